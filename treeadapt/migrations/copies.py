"""Copies: leaves of which one side has one more, as of a head tied to an embedding.

Takes rows with ``copy``, each of which has the source of another row, or its target;
gives rows that also compare such a copy, or make one. Which leaves there are decides: a
copy in the source is compared and left out, and one that a target has and nothing else
fills is made. Reads no array.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from treeadapt.migrations.group import Taken
from treeadapt.migrations.operations import refuse
from treeadapt.migrations.rows import Address, Row
from treeadapt.migrations.spellings import HasPlace, spelled
from treeadapt.text.names import listing

#: By the row and the path of an original, its copies: by their rows, leaves of the
#: source, or the original itself where a copy is made of it.
_Copied: TypeAlias = dict[tuple[int, str], dict[int, Taken]]


class Share(NamedTuple):
    """A row, what it takes of which leaves.

    Attributes:
        place: of the row in its table.
        row: it, with the copies of what it takes or makes.
        matches: the leaves.
    """

    place: int
    row: Row
    matches: Sequence[Taken]


def check_copies(rows: Sequence[Row]) -> None:
    """Raise unless each row with ``copy`` says which other row it is about.

    Raises:
        MigrationError: a row does not.
    """
    copies = [row for row in rows if row.notes.copy]
    for copy in copies:
        _check_alone(copy)
        partners = [row for row in rows if _is_about(copy, row)]
        if not partners:
            problem = "it is about a copy, and no other row has its source or target"
            cure = "Write one of the two as in the row of what it is a copy of"
            refuse(copy.text, problem, cure)
        for row in partners:
            shared = _shared(row, [each for each in copies if _is_about(each, row)])
            own = {*row.sources, *row.targets} if row.has_axes else {*shared[:1]}
            if not {each.axes for each in shared} <= {each.axes for each in own}:
                problem = f"it has other axes than {row.text!r:.200}, or another copy"
                refuse(copy.text, problem, "Use the same names of axes in both")
            for name in copy.spellings.keys() & row.spellings.keys():
                if copy.spellings[name] != row.spellings[name]:
                    problem = f"it has another list of {name!r} than {row.text!r:.200}"
                    refuse(copy.text, problem, "Use another name")


def _check_alone(copy: Row) -> None:
    """Raise unless a row takes one leaf to one leaf."""
    sides = copy.sources, copy.targets
    if copy.values or copy.function or [*map(len, sides)] != [1, 1]:
        problem = "it is about a copy, and changes it or has more than two addresses"
        cure = 'Write "lm_head.weight": ("embed", {"copy": True})'
        refuse(copy.text, problem, cure)
    paths = [side[0].path for side in sides]
    names = [path.names.difference(copy.spellings) for path in paths]
    products = [c.key for path in paths for c in path.captures if len(c.names) > 1]
    if alone := sorted(names[0] ^ names[1]) + products:
        problem = f"it is about a copy, and {listing(alone)} is not the same in both"
        refuse(copy.text, problem, "Write a row for each copy")


def _is_about(copy: Row, row: Row) -> bool:
    """Return whether a row takes the source of a copy, or makes its target."""
    is_computed = row.function or row.values.multiply or row.values.add
    if row.notes.copy or row.drops or is_computed or row.has_parts:
        return False
    return _own(row, copy) is not None


def _own(row: Row, copy: Row) -> Address | None:
    """Return the address of a row that a copy has, too; None without one."""
    sides = (row.targets, copy.targets), (row.sources, copy.sources)
    every = ((each, of[0]) for side, of in sides for each in side)
    return next((one for one, two in every if one.path.text == two.path.text), None)


def _ends(row: Row, copy: Row) -> tuple[Address, Address]:
    """Return the address of a copy that a row has, too, and the other one."""
    (source,), (target,) = copy.sources, copy.targets
    # What stays where it is has one address on both sides of its row.
    is_target = any(each.path.text == target.path.text for each in row.targets)
    return (target, source) if is_target else (source, target)


def _shared(row: Row, copies: Sequence[Row]) -> list[Address]:
    """Return the addresses that copies share with a row, of those that have axes."""
    shared = [_ends(row, copy)[0] for copy in copies]
    return [each for each in shared if each.has_axes]


def with_copies(row: Row, copies: Sequence[Row]) -> Row:
    """Return a row with more sources and targets, which hold the same numbers.

    Args:
        row: takes the source of each copy, or makes its target.
        copies: of these.

    Example:
        >>> from treeadapt.migrations.rows import parse_row
        >>> row = parse_row("wte", "embed")
        >>> head = parse_row("wte : v e", ("head : e v", {"copy": True}))
        >>> with_copies(row, [head]).both
        "'wte : v e' -> 'embed : v e', 'head : e v'"
    """
    shared = None if row.has_axes else next(iter(_shared(row, copies)), None)
    sources = [_like(each, shared) for each in row.sources]
    targets = [_like(each, shared) for each in row.targets]
    for copy in copies:
        _, other = _ends(row, copy)
        own = _own(row, copy) if row.has_axes else shared
        side = targets if other is copy.targets[0] else sources
        side.append(other if other.has_axes else _like(other, own))
    keys = {copy.notes.copy for copy in copies}
    notes = dataclasses.replace(row.notes, copy=max(keys, key=str))
    return dataclasses.replace(
        row, sources=tuple(sources), targets=tuple(targets), notes=notes
    )


def _like(address: Address, other: Address | None) -> Address:
    """Return an address with the axes of another one, as they are written there."""
    if other is None:
        return address
    axes = other.text[len(other.path.text) :]
    text = f"{address.path.text}{axes}"
    return Address(text, address.path, other.axes, has_axes=other.has_axes)


def shares_of(
    rows: Sequence[Row],
    by_row: Sequence[Sequence[Taken]],
    has_place: HasPlace | None,
) -> list[Share]:
    """Return what each row takes, together with the copies of it.

    Args:
        rows: the table.
        by_row: what each row takes; those with ``copy`` only what no other does.
        has_place: of the target; None without one.
    """
    copied: _Copied = {}
    left = [*map(list, by_row)]
    for place in (place for place, row in enumerate(rows) if row.notes.copy):
        for match in by_row[place]:
            original = _original(match, rows[place], rows, by_row)
            if original is not None:
                copied.setdefault(original, {})[place] = match
                left[place].remove(match)
    if has_place is not None:
        _add_made(copied, rows, by_row, has_place)
    every = (_by_copies(n, rows, each, copied) for n, each in enumerate(left))
    return [*itertools.chain(*every)]


def _original(
    match: Taken, copy: Row, rows: Sequence[Row], by_row: Sequence[Sequence[Taken]]
) -> tuple[int, str] | None:
    """Return the row and the path of what a copy in the source is compared with."""
    for place, row in enumerate(rows):
        if _is_about(copy, row) and _own(row, copy) in row.targets:
            for other in by_row[place]:
                if _agree(other.captures, match.captures, copy.targets[0]):
                    return place, other.path
    return None


def _add_made(
    copied: _Copied,
    rows: Sequence[Row],
    by_row: Sequence[Sequence[Taken]],
    has_place: HasPlace,
) -> None:
    """Add the copies for which a target has a place that nothing fills."""
    made: set[str] = set()
    for place, copy in ((n, row) for n, row in enumerate(rows) if row.notes.copy):
        (source,), (target,) = copy.sources, copy.targets
        owners = [
            (n, match.path)
            for n, row in enumerate(rows)
            if _is_about(copy, row) and _own(row, copy) in row.sources
            for match in by_row[n]
        ]
        for owner in owners:
            captures = source.path.match(owner[1])
            if captures is None:
                continue
            new = spelled(copy, Taken(0, owner[1], captures), has_place)
            path, has_room = (
                target.path.fill(new.captures, {}),
                has_place(target, new.captures),
            )
            if has_room and path not in made and not _is_made(path, rows, by_row):
                copied.setdefault(owner, {})[place] = new
                made.add(path)


def _by_copies(
    place: int, rows: Sequence[Row], matches: Sequence[Taken], copied: _Copied
) -> Iterator[Share]:
    """Yield what one row takes, for each set of copies by itself."""
    row = rows[place]
    if not any((place, match.path) in copied for match in matches):
        yield Share(place, row, matches)
        return
    by_copies: dict[tuple[int, ...], list[Taken]] = {}
    for match in matches:
        copies = copied.get((place, match.path), {})
        captures = {**match.captures}
        for copy in copies.values():
            captures = {**copy.captures, **captures}
        leaves = by_copies.setdefault(tuple(copies), [])
        leaves.append(match._replace(captures=captures))
        stored = (copy for copy in copies.values() if copy.path != match.path)
        for address, copy in enumerate(stored, len(row.sources)):
            leaves.append(Taken(address, copy.path, captures))
    for places, leaves in by_copies.items():
        whole = with_copies(row, [rows[n] for n in places]) if places else row
        yield Share(place, whole, leaves)


def _is_made(path: str, rows: Sequence[Row], by_row: Sequence[Sequence[Taken]]) -> bool:
    """Return whether a row makes a leaf of what it takes."""
    for row, matches in zip(rows, by_row, strict=True):
        for target in row.targets if not row.notes.copy else ():
            captures = target.path.match(path)
            if captures is not None and any(
                _agree(match.captures, captures, target) for match in matches
            ):
                return True
    return False


def _agree(one: Mapping[str, Any], two: Mapping[str, Any], target: Address) -> bool:
    """Return whether two leaves go to one target, as far as both have its names."""
    names = (each.key for each in target.path.captures)
    return all(one.get(n, two.get(n)) == two.get(n, one.get(n)) for n in names)
