"""Rows united as a person would write them.

Rows whose addresses differ in one part of a segment on each side become one with a list
there, ``{p=q,k,v}`` to ``{p=query,key,value}``. Rows that differ in what a reader must
look at stay apart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from treeadapt.porting.drafts.rows import DraftAddress, DraftRow, Hole, Tokens

_SEPARATORS = frozenset("/._- ")
_MOST_KEYS = 400_000  # ways of all rows to be like others
_MOST = 8  # words of a segment that a list may take the place of


def canonical(row: DraftRow) -> DraftRow:
    """Number the atoms of a row by their first place in it."""
    new: dict[int, int] = {}
    for place in row.places:
        holes = (token.atoms for token in place.tokens if isinstance(token, Hole))
        for atom in itertools.chain(*holes, *itertools.chain(*place.axes)):
            new.setdefault(atom, len(new))
    if [*new] == [*new.values()] == [*row.sizes]:
        return row

    def numbered(atoms: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(new.__getitem__, atoms))

    def place_of(place: DraftAddress) -> DraftAddress:
        tokens = tuple(
            dataclasses.replace(token, atoms=numbered(token.atoms))
            if isinstance(token, Hole)
            else token
            for token in place.tokens
        )
        axes = tuple(tuple(map(numbered, parts)) for parts in place.axes)
        return dataclasses.replace(place, tokens=tokens, axes=axes)

    sources = tuple(map(place_of, row.sources))
    targets = tuple(map(place_of, row.targets))
    sizes = {atom: row.sizes.get(old, 0) for old, atom in new.items()}
    return dataclasses.replace(
        row,
        sources=sources,
        targets=targets,
        sizes=sizes,
        gaps=frozenset(new[atom] for atom in row.gaps if atom in new),
        bare=frozenset(new[atom] for atom in row.bare if atom in new),
        copies=frozenset(new[atom] for atom in row.copies if atom in new),
        takes=tuple((new[atom], take) for atom, take in row.takes),
    )


def open_atoms(row: DraftRow, stated: Collection[int] = ()) -> list[int]:
    """Return the atoms of which no shape at other sizes would give the size.

    Where an axis has several, one that a configuration states is, then a factor of 2,
    else the smallest; of numbers that are one in a path, the innermost, which counts
    the layers of a block.
    """
    return _open(row, stated)[0]


def is_guess(row: DraftRow, stated: Collection[int] = ()) -> bool:
    """Return whether another atom of the same size may be the one to keep."""
    return _open(row, stated)[1]


def _open(row: DraftRow, stated: Collection[int]) -> tuple[list[int], bool]:
    guesses = False
    sums: list[list[tuple[int, ...]]] = []
    determined: set[int] = set()
    # Numbers of one path say nothing of those that are one in the other path.
    united = {
        atom
        for place in row.places
        for token in place.tokens
        if isinstance(token, Hole) and len(token.atoms) > 1
        for atom in token.atoms
    }
    for place in row.places:
        for token in place.tokens:
            if isinstance(token, Hole):
                if token.is_text or token.texts:
                    determined |= {*token.atoms} - row.gaps
                elif len(token.atoms) == 1:
                    determined |= {*token.atoms} - row.gaps - united
                else:
                    sums.append([token.atoms])
        sums += [list(parts) for parts in place.axes]
    inner = {atom for parts in sums for atom in parts[0][-1:]} & united
    chosen = sorted(row.gaps)
    determined |= {atom for atom, take in row.takes if take.size}
    determined |= row.gaps
    determined |= {parts[0][0] for parts in sums if [*map(len, parts)] == [1]}
    sums = [parts for parts in sums if [*map(len, parts)] != [1]]
    while True:
        count = -1
        while count != len(determined):
            count = len(determined)
            for parts in sums:
                names = {atom for part in parts for atom in part} - determined
                is_linear = all(
                    len([atom for atom in part if atom in names]) <= 1 for part in parts
                )
                if len(names) == 1 and is_linear:
                    determined |= names
        every = [
            {atom for part in parts for atom in part} - determined for parts in sums
        ]
        left = [sorted(names) for names in every if names]
        if not left:
            return chosen, guesses
        shortest = min(left, key=len)
        best = min(
            shortest,
            key=lambda atom: (
                atom not in stated,
                atom not in inner,
                row.sizes[atom] != 2,
                row.sizes[atom],
                atom,
            ),
        )
        equal = [atom for atom in shortest if row.sizes[atom] == row.sizes[best]]
        guesses |= len(equal) > 1 and best not in inner and best not in stated
        chosen.append(best)
        determined.add(best)


def merged(rows: Sequence[DraftRow]) -> list[DraftRow]:
    """Unite rows, in the order of the first of each."""
    live: dict[int, DraftRow] = dict(enumerate(map(canonical, rows)))
    keys: dict[object, dict[int, tuple[int, int, int, int]]] = {}
    counter = itertools.count(len(live))

    most = max(2, _MOST_KEYS // max(1, len(live)))
    forms: dict[object, int] = {}

    def note(number: int) -> None:
        form = forms.setdefault(_form(live[number]), len(forms))
        for key, window in itertools.islice(_keys(live[number]), most):
            keys.setdefault((form, key), {})[number] = window

    for number in live:
        note(number)
    order = {number: number for number in live}
    while True:
        best = None
        for key, members in keys.items():
            if len(members) < 2:
                continue
            windows = {n: members[n] for n in members if n in live}
            keys[key] = windows
            if len(windows) < 2:
                continue
            length = sum(b - a + d - c for a, b, c, d in windows.values())
            rank = (-len(windows), length, min(order[n] for n in windows))
            if best is None or rank < best[0]:
                best = rank, key, windows
        if best is None:
            return [live[n] for n in sorted(live, key=order.__getitem__)]
        _, key, windows = best
        united = _united(
            [(live[n], windows[n]) for n in sorted(windows, key=order.__getitem__)]
        )
        if united is None:
            del keys[key]
            continue
        number = next(counter)
        order[number] = min(order[n] for n in windows)
        for each in windows:
            del live[each]
        live[number] = united
        note(number)


def _windows(tokens: Tokens) -> Iterator[tuple[int, int]]:
    """Yield the parts of a path that a list may take the place of."""
    start = 0
    for stop in range(len(tokens) + 1):
        if stop < len(tokens) and tokens[stop] not in ("/", "."):
            continue
        places = [
            i
            for i in range(start, stop)
            if isinstance(tokens[i], str) and tokens[i] not in _SEPARATORS
        ][:_MOST]
        for i, j in itertools.combinations_with_replacement(places, 2):
            inner = tokens[i : j + 1]
            touches = (i > 0 and isinstance(tokens[i - 1], Hole)) or (
                j + 1 < len(tokens) and isinstance(tokens[j + 1], Hole)
            )
            if not touches and all(isinstance(token, str) for token in inner):
                yield i, j + 1
        start = stop + 1


def _form(row: DraftRow) -> object:
    """Return what rows that are united have in common, paths apart."""
    return (
        tuple(place.axes for place in row.places),
        row.evidence,
        row.checks,
        row.changes,
        row.copies,
        tuple((atom, row.sizes[atom]) for atom in open_atoms(row)),
    )


def _keys(row: DraftRow) -> Iterator[tuple[object, tuple[int, int, int, int]]]:
    """Yield what two paths have without a part of each, and where these parts are."""
    if len(row.places) != 2:
        return
    sources, targets = (
        [((p.tokens[:a], p.tokens[b:]), (a, b)) for a, b in _windows(p.tokens)]
        for p in row.places
    )
    for (one, window), (two, other) in itertools.product(sources, targets):
        yield (one, two), (*window, *other)


def _united(
    rows: Sequence[tuple[DraftRow, tuple[int, int, int, int]]],
) -> DraftRow | None:
    """Return one row for several; None if two have one text on one side only."""
    first, window = rows[0]
    atom = 1 + max(first.sizes, default=-1)
    places = []
    for side in (0, 1):
        texts = []
        for row, windows in rows:
            start, stop = windows[2 * side : 2 * side + 2]
            texts.append("".join(map(str, row.places[side].tokens[start:stop])))
        if len({*texts}) < len(texts):
            return None
        start, stop = window[2 * side : 2 * side + 2]
        address = first.places[side]
        hole = Hole((atom,), texts=tuple(texts), is_text=True)
        places.append(address.with_tokens(start, stop, hole))
    row = dataclasses.replace(
        first,
        sources=(places[0],),
        targets=(places[1],),
        sizes={**first.sizes, atom: len(rows)},
        pairs=tuple(pair for row, _ in rows for pair in row.pairs),
        notes=tuple(dict.fromkeys(note for row, _ in rows for note in row.notes)),
    )
    return canonical(row)
