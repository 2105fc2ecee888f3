"""Drafted rows as text: names for their axes, and the file with its comments."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from treeadapt.migrations.migration import Migration
from treeadapt.migrations.operations import OF
from treeadapt.migrations.rows import SPLIT, Row, parse_row
from treeadapt.porting.drafts.factors import read_factor
from treeadapt.porting.drafts.merging import open_atoms
from treeadapt.porting.drafts.rows import (
    EXPERT_WORDS,
    LAYER_WORDS,
    DraftAddress,
    DraftRow,
    Hole,
    template_of,
    tokens_of,
)
from treeadapt.porting.drafts.stated import NOTHING, ModelConfig

_LETTERS = "abcdefgijkmnopqrstuwxyz"
_COUNT = range(10**6)
#: What separates axes from a path, where it is a part of the path.
ESCAPED_SPLIT = SPLIT.replace(":", r"\:")
_FIRST = "dense"  # layers before those that are counted from there
_NEAR = {"l": LAYER_WORDS, "x": EXPERT_WORDS}  # the word before a number
_TEXTS = {  # what a list is of
    "k": {"weight", "bias", "kernel", "scale", "gamma", "beta", "w", "b"},
    "p": {"q", "k", "v", "query", "key", "value", "gate", "up", "down"},
    "s": {"encoder", "decoder"},
}
_SPECIAL = re.compile(r"[\\{}*?\[]")
_EMBEDDINGS = {"embed", "embedding", "embeddings", "wte", "head", "classifier", "vocab"}
_HEADS = {
    "attn",
    "attention",
    "self",
    "q",
    "k",
    "v",
    "o",
    "query",
    "key",
    "value",
    "qkv",
    *("wq", "wk", "wv", "wo", "wqkv", "kv"),
}


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How numbers and axes are written in the addresses of a row.

    Attributes:
        names: of atoms.
        lists: values of numbers by atom, of which no others are to match.
        sizes: names of sizes, by what they add to the number of a source.
    """

    names: Mapping[int, str]
    lists: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict)
    sizes: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WrittenRow:
    """A row as ``Migration`` takes it, and what it was.

    Attributes:
        sources: addresses.
        targets: addresses.
        operations: beside the targets.
        row: what it says.
        spelling: of the addresses.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: dict[str, Any]
    row: DraftRow
    spelling: Spelling = Spelling({})

    def respelled(self, **changes: Any) -> WrittenRow:
        """Return it with other fields of ``spelling``."""
        spelling = dataclasses.replace(self.spelling, **changes)
        sources, targets = _addresses(self.row, spelling)
        return dataclasses.replace(
            self, sources=sources, targets=targets, spelling=spelling
        )

    def with_row(self, row: DraftRow) -> WrittenRow:
        """Return it with other marks and notes."""
        return dataclasses.replace(self, row=row)

    @property
    def pair(self) -> tuple[Any, Any]:
        """The source and the target as in a table."""
        source = alone(self.sources)
        target = alone(self.targets) if self.targets else None
        options = self.options
        return source, (target, options) if options else target

    @property
    def options(self) -> dict[str, Any]:
        """What is next to the targets: operations, and the mark."""
        check = ", ".join(self.row.checks)
        return self.operations | ({"check": check} if check else {})

    @functools.cached_property
    def read(self) -> Row:
        """The row as a table reads it."""
        return parse_row(*self.pair)


@dataclasses.dataclass(frozen=True)
class WrittenSizes:
    """Sizes next to the rows.

    Attributes:
        sizes: by the names that are in the rows.
        keys: where a configuration states them, by name.
        open: names of those that no shape gives at another size.
        counts: keys of the configuration, by paths with one number, which it counts.
    """

    sizes: dict[str, int]
    keys: dict[str, str]
    open: frozenset[str]
    counts: Mapping[str, str] = dataclasses.field(default_factory=dict)


def alone(texts: tuple[str, ...]) -> Any:
    """Return addresses as a table has them: one is not in a tuple."""
    return texts[0] if len(texts) == 1 else texts


def as_table(
    rows: Iterable[WrittenRow],
    of_rows: WrittenSizes,
    new: Mapping[str, Any] | None = None,
) -> Migration:
    """Return the table of some rows."""
    # Operations and paths may name sizes; other rows are read once.
    table = [
        each.pair if each.operations or each.spelling.sizes else each.read
        for each in rows
    ]
    return Migration(table, sizes=of_rows.sizes or None, new=new)


def with_sizes(row: DraftRow) -> WrittenRow:
    """Return one row as text, with the sizes that no shape gives next to it."""
    (text,), of_rows = written([row])
    more = {"sizes": of_rows.sizes} if of_rows.sizes else {}
    return dataclasses.replace(text, operations=text.operations | more)


def written(
    rows: Sequence[DraftRow], stated: ModelConfig = NOTHING
) -> tuple[list[WrittenRow], WrittenSizes]:
    """Return the rows as text, and the sizes that no shape gives or that are stated."""
    sizes: dict[str, int] = {}
    keys: dict[str, str] = {}
    names: dict[tuple[int, str, int], str] = {}  # the last: of equal ones in a row
    texts, is_open = [], set()
    named: list[dict[int, str]] = []
    for row in rows:
        of_heads = stated.head_sizes(row) if stated.heads and counts_heads(row) else {}
        open_of_row = open_atoms(row, of_heads)
        fixed: dict[int, str] = {}
        for atom in dict.fromkeys([*open_of_row, *of_heads]):
            size, key = row.sizes[atom], of_heads.get(atom, "")
            nth = [row.sizes[other] for other in fixed].count(size)
            if (size, key, nth) not in names:
                near = "h" if _counts_heads(row, atom) else ""
                near = "i" if _counts_layers(row, atom) else near
                wishes = (*(("two",) if size == 2 else ()), *near, *"dijkmn")
                free = (
                    name for name in (*"d" * bool(key), *wishes) if name not in sizes
                )
                names[size, key, nth] = name = next(free, f"size{size}")
                sizes[name] = size
                keys |= {name: key} if key else {}
            fixed[atom] = names[size, key, nth]
            is_open |= {fixed[atom]} if atom in open_of_row else set()
        named.append(fixed)
    for row, fixed in zip(rows, named, strict=True):
        seen = {*fixed.values()} - {*keys}
        texts.append(_written(row, _names(row, fixed, {*sizes, _FIRST}), seen))
    return texts, WrittenSizes(sizes, keys, frozenset(is_open))


def with_copies_apart(row: WrittenRow) -> Iterator[WrittenRow]:
    """Yield a row that fills one leaf, and those that fill others as the same array.

    These depend on a configuration, which says that both are one.
    """
    if not row.row.tie:
        yield row
        return
    (((source, *_), _),) = row.row.pairs
    every = zip(row.targets, row.row.targets, strict=True)
    for number, (text, address) in enumerate(every):
        path = "".join(map(str, address.tokens))
        notes = row.row.notes if number else ()
        own = dataclasses.replace(
            row.row, targets=(address,), pairs=(((source,), (path,)),), notes=notes
        )
        operations = {"copy": row.row.tie} if number else row.operations
        yield dataclasses.replace(row, targets=(text,), operations=operations, row=own)


def with_first_layers(
    rows: Sequence[WrittenRow], of_rows: WrittenSizes, stated: ModelConfig
) -> tuple[list[WrittenRow], WrittenSizes]:
    """Return rows whose numbers begin after those of another row, by a size.

    As of the dense layers before the others, whose count no shape shows.
    """
    counts_of = [_added(each) & _first_counts(each.row, rows) for each in rows]
    counts = {count for counts in counts_of for count in counts}
    if len(counts) != 1:
        return [*rows], of_rows
    (count,) = counts
    key = stated.first.get(count, "")
    after = (e for e, own in zip(rows, counts_of, strict=True) if own)
    templates = {template_of(p) for each in after for p in each.row.source_paths}
    texts = []
    for each, own in zip(rows, counts_of, strict=True):
        # So do rows that have the numbers before: how many these are is that size.
        rests_on_it = any(template_of(p) in templates for p in each.row.source_paths)
        is_open = rests_on_it and not key
        text = each.with_row(each.row.marked("sizes")) if is_open else each
        texts.append(text.respelled(sizes={count: _FIRST}) if own else text)
    keys = of_rows.keys | ({_FIRST: key} if key else {})
    sizes = {**of_rows.sizes, _FIRST: count}
    return texts, WrittenSizes(sizes, keys, of_rows.open | {_FIRST})


def _added(each: WrittenRow) -> set[int]:
    """Return what is added to numbers of the sources of a row."""
    return {
        token.shift
        for place in each.row.sources
        for token in place.tokens
        if isinstance(token, Hole) and len(token.atoms) == 1 and not token.texts
        if token.atoms[0] not in each.spelling.lists
    }


def _first_counts(row: DraftRow, rows: Sequence[WrittenRow]) -> set[int]:
    """Return offsets of numbers that are how many leaves another row has."""
    counts = set()
    for place in row.sources:
        for at, token in enumerate(place.tokens):
            if not (isinstance(token, Hole) and token.shift):
                continue
            for other in (each.row for each in rows if each.targets):
                holes = [p.tokens[at] for p in other.sources if len(p.tokens) > at]
                paths = map(tokens_of, other.source_paths)
                start = place.tokens[:at]
                numbers = {each[at] for each in paths if each[:at] == start}
                is_one = all(isinstance(h, Hole) and len(h.atoms) == 1 for h in holes)
                if is_one and numbers == set(map(str, range(token.shift))):
                    counts.add(token.shift)
    return counts


def counts_heads(row: DraftRow) -> bool:
    """Return whether a row is of attention, by the words of its paths."""
    return not all(_HEADS.isdisjoint(place.words) for place in row.places)


def _counts_heads(row: DraftRow, atom: int) -> bool:
    """Return whether a factor is the outer one of an axis of attention."""
    parts = [part for place in row.places for axis in place.axes for part in axis]
    return counts_heads(row) and all(part[0] == atom for part in parts if atom in part)


def _counts_layers(row: DraftRow, atom: int) -> bool:
    """Return whether a factor is the inner one of a number of a path."""
    tokens = (token for place in row.places for token in place.tokens)
    return any(
        isinstance(token, Hole) and len(token.atoms) > 1 and token.atoms[-1] == atom
        for token in tokens
    )


def _names(row: DraftRow, fixed: dict[int, str], reserved: set[str]) -> dict[int, str]:
    """Return a name for each atom of a row."""
    names = dict(fixed)
    if row.is_rest:
        return names

    def give(atom: int, *wishes: str) -> None:
        if atom in names:
            return
        free = (
            name
            for name in itertools.chain(wishes, _LETTERS, map("n{}".format, _COUNT))
            if name not in reserved and name not in names.values()
        )
        names[atom] = next(free)

    for atom in row.copies:
        give(atom, "r")
    for atom, _ in row.takes:
        if is_factor(row, atom):
            give(atom, "p")
    for place in row.places:
        before = ""
        for token in place.tokens:
            if isinstance(token, Hole):
                for atom, wish in _wishes(token, before):
                    give(atom, *wish)
            elif token.isalpha():
                before = token.lower()
    words = set().union(*(place.words for place in row.places))
    source, *_ = row.places
    many = next(
        (axis for place in row.places for axis in place.axes if len(axis) > 1), ()
    )
    if any(place.before for place in row.places):
        for part in many:
            give(part[0], "h", "g")
            give(part[-1], "d")
    for part in many:
        for atom, wish in zip(
            part, "hd" if len(part) == 2 else "f" * len(part), strict=False
        ):
            give(atom, wish, "k")
    composed = [
        part
        for place in row.places
        for axis in place.axes
        for part in axis
        if len(part) > 1 and len(axis) == 1
    ]
    for part in composed:
        unnamed = [atom for atom in part if atom not in names]
        if words & _HEADS and (len(unnamed) > 1 or unnamed == [*part[:1]]):
            give(unnamed[0], "h", "k")
            give(unnamed[-1], "d")
    plain = [atom for axis in source.axes for part in axis for atom in part]
    plain = [atom for atom in plain if atom not in names]
    if len(plain) == 4:
        wishes = "ochw"
    elif len(plain) == 3 and not composed:
        wishes = "oct"
    elif len(plain) == 2 and words & _EMBEDDINGS:
        wishes = "ve"
    elif len(plain) == 2:
        wishes = "oi"
    else:
        wishes = "e" * len(plain)
    for atom, wish in zip(plain, wishes, strict=False):
        give(atom, wish)
    for atom in sorted(row.sizes):
        give(atom, "e")
    return names


def _wishes(hole: Hole, before: str) -> Iterator[tuple[int, Sequence[str]]]:
    if len(hole.atoms) > 1:
        for atom, wish in zip(hole.atoms, "bi", strict=False):
            yield atom, wish
        return
    (atom,) = hole.atoms
    if hole.texts:
        texts = {word.lower() for word in hole.texts}
        yield atom, [*(name for name, of in _TEXTS.items() if texts <= of), *"pnmk"]
    else:
        yield atom, [*(name for name, of in _NEAR.items() if before in of), *"nl"]


def _written(
    row: DraftRow, names: Mapping[int, str], seen: Iterable[str] = ()
) -> WrittenRow:
    if row.is_rest:
        return WrittenRow(("{rest:**}",), ("{rest}",), {}, row)
    spelling = Spelling(names)
    sources, targets = _addresses(row, spelling)
    factor = read_factor(row, names)
    operations: dict[str, Any] = {"add": True} if row.is_sum else {}
    if row.takes:
        operations["take"] = _taken(row, names)
    if isinstance(factor.value, str):
        operations["scale"] = factor.value
    for note in factor.doubts:
        row = row.marked("scale", note)
    if seen:
        row = row.marked("sizes")
    if row.copies:
        (operations["repeat"],) = (names[atom] for atom in row.copies)
    if row.scale != 1:
        operations.setdefault("scale", row.scale)
    if row.offset:
        operations["offset"] = row.offset
    if row.pads:
        operations["pad"] = _padded(row.targets[0], row.pads, names)
    if row.cast:
        operations["cast"] = list(row.cast)
    if row.cuts:
        # It is written as the way back of a row that pads, which undoes all of it.
        fill = {"fill": "target"} if row.evidence == "values" else {}  # else zeros
        undo: dict[str, Any] = {"pad": _padded(row.sources[0], row.cuts, names)}
        undo |= fill
        undo |= {"offset": -row.offset} if row.offset else {}
        undo |= {"cast": [*reversed(row.cast)]} if row.cast else {}
        operations = {"undo": undo}
    return WrittenRow(sources, targets, operations, row, spelling)


def _addresses(
    row: DraftRow, spelling: Spelling
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the addresses of both sides."""
    is_plain = len(row.sources) == len(row.targets) == 1 and _is_renaming(row)
    # A power is of an axis, so the axes of what is multiplied by one are written.
    with_axes = not is_plain or read_factor(row, spelling.names).has_powers
    sources, targets = (
        tuple(
            _address(each, row, spelling, is_target=is_target, with_axes=with_axes)
            for each in side
        )
        for is_target, side in zip((False, True), row.sides, strict=True)
    )
    return sources, targets


def _padded(
    place: DraftAddress, pads: Iterable[tuple[int, int, int]], names: Mapping[int, str]
) -> dict[str, list[int]]:
    """Return how much each axis is longer, by its name."""
    return {
        _axis(place.axes[axis], names): [before, after] for axis, before, after in pads
    }


def _taken(row: DraftRow, names: Mapping[int, str]) -> dict[str, Any]:
    """Return which numbers are taken, by the names of their axes."""
    takes = {names[atom]: take.typed for atom, take in row.takes}
    some = [take.size for _, take in row.takes if take.needs_size]
    return takes | ({OF: some[0]} if some else {})


def is_of_path(row: DraftRow, atom: int) -> bool:
    """Return whether an atom is a number of a path."""
    tokens = (token for place in row.places for token in place.tokens)
    return any(isinstance(token, Hole) and atom in token.atoms for token in tokens)


def is_factor(row: DraftRow, atom: int) -> bool:
    """Return whether an atom is one of several factors wherever it is."""
    parts = [part for place in row.places for axis in place.axes for part in axis]
    is_one = all(len(part) > 1 for part in parts if atom in part)
    return is_one and not is_of_path(row, atom)


def _is_renaming(row: DraftRow) -> bool:
    """Return whether each array stays as it is."""
    source, target = row.places
    holes = [
        [token for token in place.tokens if isinstance(token, Hole)]
        for place in (source, target)
    ]
    atoms = [{atom for hole in in_path for atom in hole.atoms} for in_path in holes]
    is_one = all(len(hole.atoms) == 1 for in_path in holes for hole in in_path)
    # A list of numbers of its own in each path is read as such only in axes.
    is_same = source.axes == target.axes and atoms[0] == atoms[1] and is_one
    takes_axes = any(not is_of_path(row, atom) for atom, _ in row.takes)
    return is_same and not (row.pads or row.cuts or takes_axes)


def _address(
    place: DraftAddress,
    row: DraftRow,
    spelling: Spelling,
    *,
    is_target: bool,
    with_axes: bool,
) -> str:
    path = "".join(
        _token(token, row, place, spelling, is_target=is_target)
        for token in place.tokens
    )
    path = path.replace(SPLIT, ESCAPED_SPLIT)
    if not with_axes:
        return path
    axes = (_axis(axis, spelling.names, place.before) for axis in place.axes)
    return f"{path}{SPLIT}{' '.join(axes)}"


def _token(
    token: str | Hole,
    row: DraftRow,
    place: DraftAddress,
    spelling: Spelling,
    *,
    is_target: bool,
) -> str:
    if isinstance(token, str):
        return escaped(token)
    if len(token.atoms) > 1:
        return f"{{({' '.join(spelling.names[atom] for atom in token.atoms)})}}"
    (atom,) = token.atoms
    name = spelling.names[atom]
    values = spelling.lists.get(atom, ())
    # A number that is not the same on both sides is a list on both, by place.
    if values and (not is_target or _has_shift(row, spelling.lists)):
        own = [str(int(n) + token.shift) for n in values] if token.shift else values
        return f"{{{name}={','.join(own)}}}"
    if is_any_text(token, row, place):
        return f"{{{name}}}"
    if token.texts:
        texts = (re.sub(r"[\\{},]", r"\\\g<0>", text) for text in token.texts)
        return f"{{{name}={','.join(texts)}}}"
    if not token.shift:
        return f"{{{name}}}"
    size = "" if is_target else spelling.sizes.get(token.shift, "")
    return f"{{{name}+{size or token.shift}}}"


def is_any_text(hole: Hole, row: DraftRow, place: DraftAddress) -> bool:
    """Return whether a text is written without a list of what it may be."""
    (atom,) = hole.atoms
    is_same = all(hole.texts == each for each in _lists(row, atom))
    return hole.is_text and is_same and (atom in row.bare or place in row.targets)


def _has_shift(row: DraftRow, atoms: Collection[int]) -> bool:
    tokens = (token for place in row.places for token in place.tokens)
    holes = (token for token in tokens if isinstance(token, Hole) and token.shift)
    return any(hole.atoms[0] in atoms for hole in holes)


def escaped(text: str) -> str:
    """Return a part of a path as a row has it, where no character is special."""
    return _SPECIAL.sub(lambda match: "\\" + match[0], text)


def _lists(row: DraftRow, atom: int) -> Iterator[tuple[str, ...]]:
    for place in row.places:
        for token in place.tokens:
            if isinstance(token, Hole) and token.atoms == (atom,):
                yield token.texts


def _axis(
    axis: Sequence[tuple[int, ...]], names: Mapping[int, str], before: int = 0
) -> str:
    if len(axis) > 1 and before:
        outer = " ".join(names[atom] for atom in axis[0][:before])
        return f"({outer} {_axis([part[before:] for part in axis], names)})"
    parts = []
    for part in axis:
        text = " ".join(names[atom] for atom in part)
        parts.append(text if len(part) == 1 else f"({text})" if part else "1")
    return parts[0] if len(parts) == 1 else f"[{' '.join(parts)}]"
