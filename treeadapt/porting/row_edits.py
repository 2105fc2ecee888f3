"""Alternatives: what a row could mean instead.

Takes one row and the shapes of its leaves; gives rows that may be in its place, each
one edit away: axes, names or texts in another order, parts of each head, halves that
are neighbours, a number that is added, two rows exchanged. Which of them fit is up to
``planning``, and whether a number moves, to the arrays. ``migrations/swappable`` says
the same of one group in short, from its sizes alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from treeadapt.errors import MigrationError
from treeadapt.migrations.axes import (
    REST,
    Axes,
    Axis,
    Product,
    every_name,
    parts_of,
)
from treeadapt.migrations.rows import SPLIT, Row, parse_row

MAX_TEXTS = 8  # of a capture that are tried alone and in pairs

_PLAIN = re.compile(r"[\w./:-]+")
_MOST_NAMES = 4  # of which all orders are tried
_FRESH = "abcdefgh"  # names of axes where none are written
_COMPOSED = re.compile(r"\{\(([^(){}]+)\)\}")
_LISTED = re.compile(r"\{\w+=([^{}]+)\}")


Rows: TypeAlias = tuple[Row, ...]


class Alternative(NamedTuple):
    """Rows in the place of one, and what they say otherwise."""

    rows: Rows
    why: str


#: The text of a path, and its axes; none where they are not written.
_Address: TypeAlias = tuple[str, Axes]
_Side: TypeAlias = tuple[_Address, ...]


@dataclasses.dataclass(frozen=True)
class _Sketch:
    """A row that can be edited: what its texts mean, and what is next to them."""

    sides: tuple[_Side, _Side]
    values: Mapping[str, Any]
    notes: Mapping[str, Any]
    undoes: bool

    @classmethod
    def of(cls, row: Row) -> _Sketch:
        """Return a row to edit; what was checked of it does not hold any more."""
        sources, targets = (
            tuple((one.path.text, one.axes if one.has_axes else ()) for one in side)
            for side in (row.sources, row.targets)
        )
        notes = row.notes.typed()
        kept = {name: notes[name] for name in notes if not name.startswith("check")}
        values = row.values
        return cls((sources, targets), values.typed(), kept, values.undoes)

    def row(self, sizes: Mapping[str, int]) -> Row | None:
        """Return what it says; None if that contradicts itself."""
        options = {"undo": self.values} if self.undoes and self.values else self.values
        options = {**options, **self.notes}
        source, target = map(_side_text, self.sides)
        try:
            return parse_row(source, (target, options) if options else target, sizes)
        except MigrationError:
            return None

    def with_side(self, side: int, addresses: _Side) -> _Sketch:
        """Return it with other addresses on one side."""
        sides = (addresses, self.sides[1]) if side == 0 else (self.sides[0], addresses)
        return dataclasses.replace(self, sides=sides)

    def with_address(self, side: int, number: int, address: _Address) -> _Sketch:
        """Return it with one other address."""
        every = self.sides[side]
        return self.with_side(side, (*every[:number], address, *every[number + 1 :]))

    def paths(self, side: int) -> list[str]:
        """Return the paths of one side."""
        return [path for path, _ in self.sides[side]]

    def with_paths(self, side: int, paths: Iterable[str]) -> _Sketch:
        """Return it with other paths on one side, and its own axes."""
        axes = (axes for _, axes in self.sides[side])
        return self.with_side(side, tuple(zip(paths, axes, strict=True)))

    def pieces(self, side: int) -> list[tuple[int, int]]:
        """Return each address of a side, with each part of its bracket."""
        every = enumerate(self.sides[side])
        return [(n, part) for n, (_, axes) in every for part in range(parts_of(axes))]


def alternatives_of(
    row: Row,
    shapes: Mapping[str, tuple[int, ...]],
    ranks: Sequence[int],
    sizes: Mapping[str, int],
) -> Iterator[Alternative]:
    """Yield what a row could say instead; some of it fits no shapes.

    Args:
        row: a row; one with a function, or that multiplies, has no alternatives.
        shapes: of the leaves that it takes, by path.
        ranks: of the leaves that it makes.
        sizes: of the table.

    Example:
        >>> row = parse_row("w : (h d) e", "q : e h d")
        >>> every = alternatives_of(row, {"w": (6, 6)}, [3], {})
        >>> [each.rows[0].sources[0].text for each in every][:2]
        ['w : e (h d)', 'w : (d h) e']
    """
    if row.drops or row.function is not None or row.values.multiply:
        return
    for edited, why, rest in _rewritten(row, shapes, ranks):
        new = edited.row(sizes)
        if new is not None:
            yield Alternative((new, *rest), why)


def _rewritten(
    row: Row, shapes: Mapping[str, tuple[int, ...]], ranks: Sequence[int]
) -> Iterator[tuple[_Sketch, str, Rows]]:
    """Yield a row with one edit, for all its leaves or for some before the others."""
    sketch = _Sketch.of(row)
    for edited, why in _edits(sketch, [*map(len, shapes.values())], ranks):
        yield edited, why, ()
    for key, paths in _texts(row, shapes).items():
        few = [(each,) for each in paths] * (len(paths) > 1)
        pairs = itertools.combinations(paths, 2) if 2 < len(paths) < 6 else ()
        for some in (*few, *pairs):
            lengths = [len(shapes[path]) for text in some for path in paths[text]]
            alone = _of_texts(sketch, key, some)
            for edited, why in _edits(alone, lengths, ranks) if alone else ():
                yield edited, f"{why}, for {' and '.join(some)} alone", (row,)


def exchanges(
    one: Row, two: Row, sizes: Mapping[str, int]
) -> Iterator[tuple[Row, Row, bool]]:
    """Yield two rows with paths of each other, and whether these are of the targets.

    Each keeps its own axes.

    Args:
        one: a row.
        two: another one.
        sizes: of the table.

    Example:
        >>> gate, up = parse_row("a : i o", "gate : i o"), parse_row("b", "up")
        >>> [first.both for first, *_ in exchanges(gate, up, {})]
        ["'b : i o' -> 'gate : i o'", "'a : i o' -> 'up : i o'"]
    """
    if one.function or two.function:
        return
    first, second = _Sketch.of(one), _Sketch.of(two)
    for side in (0, 1):
        paths, others = first.paths(side), second.paths(side)
        if len(paths) == len(others):
            left = first.with_paths(side, others).row(sizes)
            right = second.with_paths(side, paths).row(sizes)
            if left is not None and right is not None:
                yield left, right, side == 1


def tied(row: Row, path: str, sizes: Mapping[str, int]) -> Iterator[Alternative]:
    """Yield rows that fill one more path with what they make: as it is, or turned."""
    if row.drops or row.function is not None or len(row.targets) != 1:
        return
    sketch = _Sketch.of(row)
    ((_, axes),) = sketch.sides[1]
    for order in dict.fromkeys((axes, axes[::-1])):
        copied = sketch.with_side(1, (*sketch.sides[1], (path, order))).row(sizes)
        if copied is not None:
            yield Alternative((copied,), f"{path} is a copy")


def _side_text(addresses: _Side) -> Any:
    texts = tuple(
        path + SPLIT * bool(axes) + " ".join(each.text for each in axes)
        for path, axes in addresses
    )
    return texts[0] if len(texts) == 1 else texts


def _edits(
    sketch: _Sketch, ranks: Sequence[int], made_ranks: Sequence[int]
) -> Iterator[tuple[_Sketch, str]]:
    """Yield a row with one edit each, and what it is.

    Args:
        sketch: the row.
        ranks: of the leaves that it takes.
        made_ranks: of those that it makes.
    """
    yield from _with_other_values(sketch, min((*ranks, *made_ranks), default=0))
    if len({*ranks}) == 1 and not any(axes for _, axes in sketch.sides[0]):
        names = itertools.islice(_FRESH, min(ranks[0], len(_FRESH)))
        axes = tuple(Axis(((name,),)) for name in names)
        for side, every in enumerate(sketch.sides):
            sketch = sketch.with_side(side, tuple((path, axes) for path, _ in every))
    has_parts = any(parts_of(axes) > 1 for s in sketch.sides for _, axes in s)
    for side, every in enumerate(sketch.sides):
        for number, (path, axes) in enumerate(every):
            for order, why in _orders(axes):
                yield sketch.with_address(side, number, (path, order)), why
            for text, why in _other_paths(path):
                yield sketch.with_address(side, number, (text, axes)), why
        for addresses in _swaps(every) if has_parts else ():
            yield sketch.with_side(side, addresses), "the order of addresses"
            # Parts of different sizes fit only together with their addresses.
            order_of_parts = [every.index(address) for address in addresses]
            for other in _with_parts(sketch.sides[1 - side], order_of_parts):
                both = sketch.with_side(side, addresses).with_side(1 - side, other)
                yield both, "the order of parts"
        if len(every) > 1 and len({axes for _, axes in every}) == 1:
            for order, why in _orders(every[0][1]):
                yield sketch.with_side(side, tuple((p, order) for p, _ in every)), why
    yield from _halves(sketch)


def _with_other_values(sketch: _Sketch, rank: int) -> Iterator[tuple[_Sketch, str]]:
    """Yield a row that computes or pads otherwise."""
    values = dict(sketch.values)
    if "scale" in values:
        unscaled = {name: values[name] for name in values if name != "scale"}
        yield dataclasses.replace(sketch, values=unscaled), "no scale"
    for name, widths in values.get("pad", {}).items():
        pads = values | {"pad": {**values["pad"], name: widths[::-1]}}
        yield (
            dataclasses.replace(sketch, values=pads),
            f"the other end of {name} padded",
        )
    offset = values.pop("offset", 0)
    for number in (0, 1, -1) if offset or rank <= 1 else ():
        if number != offset:
            shifted = values | ({"offset": number} if number else {})
            yield dataclasses.replace(sketch, values=shifted), f"an offset of {number}"


def _other_paths(path: str) -> Iterator[tuple[str, str]]:
    """Yield a path with the names of a number, or the texts of a list, in new order."""
    for pattern, mark, why in ((_COMPOSED, " ", "names"), (_LISTED, ",", "texts")):
        for match in pattern.finditer(path):
            for order in _swaps(match[1].split(mark)):
                text = f"{path[: match.start(1)]}{mark.join(order)}"
                yield text + path[match.end(1) :], f"the order of {why} in {match[0]}"


def _orders(axes: Axes) -> Iterator[tuple[Axes, str]]:
    """Yield axes, names in brackets, and parts in other orders."""
    for order in _swaps(axes):
        yield order, "the order of axes"
    for place, axis in enumerate(axes):
        for other, why in _axis_orders(axis):
            yield (*axes[:place], other, *axes[place + 1 :]), why


def _axis_orders(axis: Axis) -> Iterator[tuple[Axis, str]]:
    """Yield an axis with its names or its parts in other orders."""
    parts, before = axis.parts, axis.before
    lengths = {*map(len, parts)}
    for names in _swaps(range(max(lengths))) if len(lengths) == 1 else ():
        new = tuple(tuple(part[n] for n in names) for part in parts)
        yield Axis(new), "the order of names in brackets"
    if len(parts) == 1:
        return
    for new in _swaps(parts):
        yield Axis(new, before), "the order of parts"
    for place in range(len(parts)):
        for inner in _swaps(axis.inner(place)):
            new = (*parts[:place], (*axis.outer, *inner), *parts[place + 1 :])
            yield Axis(new, before), f"the order of names in part {place + 1}"
    for number in range(min(lengths) + 1):
        if number != before and len({part[:number] for part in parts}) == 1:
            yield Axis(parts, number), "the parts of each head"


def _with_parts(addresses: _Side, order: Sequence[int]) -> Iterator[_Side]:
    """Yield one address whose parts are in another order, if it has so many."""
    if len(addresses) == 1 and parts_of(addresses[0][1]) == len(order):
        ((path, axes),) = addresses
        moved = (
            Axis(tuple(axis.product(n) for n in order), axis.before)
            if len(axis.parts) > 1
            else axis
            for axis in axes
        )
        yield ((path, tuple(moved)),)


def _halves(sketch: _Sketch) -> Iterator[tuple[_Sketch, str]]:
    """Yield rows in which the halves of an axis become neighbours, or the opposite.

    Of all parts, or of one or two alone: queries and keys are turned, values are not.
    """
    every = itertools.chain(*(every_name(axes) for s in sketch.sides for _, axes in s))
    names = [name for name in dict.fromkeys(every) if name != REST]
    halves = ("two", "half") if "two" not in names else ("two_", "half_")
    sizes = {**sketch.notes.get("sizes", {}), halves[0]: 2}
    split = dataclasses.replace(sketch, notes={**sketch.notes, "sizes": sizes})
    pieces = [sketch.pieces(side) for side in (0, 1)]
    counts, several = {*map(len, pieces)}, max(map(len, pieces))
    lengths = (several, 1, 2) if len(counts) == 1 else (several,)
    groups = (itertools.combinations(range(several), length) for length in lengths)
    chosen = dict.fromkeys(itertools.chain(*groups))
    for name, some, is_back in itertools.product(names, chosen, (False, True)):
        edited, is_changed = split, True
        for side, order in enumerate((halves, halves[::-1])):
            order = order[::-1] if is_back else order
            for place, (number, part) in enumerate(pieces[side]):
                if place in some or len(counts) > 1:
                    path, axes = edited.sides[side][number]
                    new = _with_halves(axes, part, name, order)
                    is_changed &= new != axes
                    edited = edited.with_address(side, number, (path, new))
        if is_changed:
            words = ("neighbours", "halves")[:: -1 if is_back else 1]
            yield edited, f"{words[1]} of {name} become {words[0]}"


def _with_halves(axes: Axes, part: int, name: str, halves: Product) -> Axes:
    """Return axes with two names in the place of one, in one part."""
    count = parts_of(axes)

    def product(place: int, old: Product) -> Product:
        split = (halves if each == name else (each,) for each in old)
        return tuple(itertools.chain(*split)) if place == part else old

    return tuple(
        Axis(tuple(itertools.starmap(product, enumerate(axis.parts))), axis.before)
        if len(axis.parts) == count  # one with fewer is in all parts
        else axis
        for axis in axes
    )


def _texts(row: Row, shapes: Mapping[str, Any]) -> dict[str, dict[str, set[str]]]:
    """Return the texts that captures hold, each with the paths that have it."""
    texts: dict[str, dict[str, set[str]]] = {}
    for path, address in itertools.product(shapes, row.sources):
        held = address.path.match(path) or {}
        for capture in address.path.captures if held else ():
            is_text = not capture.is_number
            if is_text or (capture.entries and capture.key in row.outer):
                text = capture.write(held[capture.key])
                texts.setdefault(capture.key, {}).setdefault(text, set()).add(path)
    return {
        key: paths
        for key, paths in texts.items()
        if len(paths) <= MAX_TEXTS and all(map(_PLAIN.fullmatch, paths))
    }


def _of_texts(sketch: _Sketch, key: str, texts: Sequence[str]) -> _Sketch | None:
    """Return a row for some texts of a capture alone; None if it cannot be written."""
    pattern = re.compile(rf"\{{{key}(?::\*\*|=[^{{}}]*)?\}}")
    if len(texts) > 1 and any("/" in text for text in texts):
        return None
    listed = re.compile(rf"\{{{key}=([^{{}}]*)\}}")
    lists = [listed.findall(" ".join(sketch.paths(side))) for side in (0, 1)]
    sides = [texts, texts]
    if all(lists):  # the same places of the other list
        here, there = (each[0].split(",") for each in lists)
        sides[1] = [there[here.index(text)] for text in texts]
    for side, some in enumerate(sides):
        text = some[0] if len(some) == 1 else f"{{{key}={','.join(some)}}}"
        paths = (pattern.sub(text, path) for path in sketch.paths(side))
        sketch = sketch.with_paths(side, paths)
    return sketch


def _swaps(items: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield all other orders of a few, and those with two of many exchanged."""
    places = range(len(items))
    if len(items) <= _MOST_NAMES:
        orders: Iterator[tuple[int, ...]] = itertools.permutations(places)
    else:
        pairs = itertools.combinations(places, 2)
        orders = (tuple({a: b, b: a}.get(n, n) for n in places) for a, b in pairs)
    seen = {tuple(items)}
    for order in orders:
        new = tuple(items[n] for n in order)
        if new not in seen:
            seen.add(new)
            yield new
