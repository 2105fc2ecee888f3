"""Parts: a box of one target array, made of boxes of the source arrays alone.

A box is a slice with start and stop for each axis. The ranges of a target's axes become
ranges of the names in them, and these become ranges of the axes of the sources; a
``Move`` with the lengths of the ranges as its sizes does the rest. Reads no array: who
has them hands them over.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from treeadapt.migrations.axes import Axes, Axis
from treeadapt.migrations.running import Layout, Move

Box: TypeAlias = tuple[slice, ...]
Ranges: TypeAlias = dict[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a box of a target, and what it is made of.

    Attributes:
        whole: the move of the group.
        copies: for each source, its place in the row, and which part of it this is.
        ranges: the values of each name.
        move: makes leaves of one target of them, maybe more than is wanted.
        leaf: which of these leaves is wanted.
        picks: its part that is wanted.
        place: where these are in the box.
        is_exact: whether no more is made than is wanted.
    """

    whole: Move
    copies: tuple[tuple[int, int], ...]
    ranges: Mapping[str, tuple[int, int]]
    move: Move
    leaf: int
    picks: Box
    place: Box
    is_exact: bool

    @functools.cached_property
    def sources(self) -> tuple[tuple[int, tuple[tuple[int, Box], ...]], ...]:
        """For each source, its place in the row, and place and box of each leaf."""
        layouts = self.whole.sources
        return tuple(
            (source, tuple(_leaves(self.whole, layouts[source], one, self.ranges)))
            for source, one in self.copies
        )

    def put(self, leaves: Sequence[Any], whole: Any) -> None:
        """Put what the move made of the sources into the array for the box."""
        whole[self.place] = leaves[self.leaf][self.picks]


def parts_of_box(
    move: Move, target: int, numbers: Sequence[int], box: Box
) -> list[Part] | None:
    """Return the parts that together are a box of one target's leaf.

    Args:
        move: of the group.
        target: place of the target in the row.
        numbers: values of its numbers, which tell its leaves apart.
        box: of the leaf, without padding.

    Returns:
        None where zeros are added or cut off, which needs whole arrays.
    """
    if move.values.pad or not all(move.size.values()):
        return None
    layout = move.targets[target]
    pieces = [piece for piece in move.pieces if piece[2] == target]
    made = []
    for two in dict.fromkeys(piece[3] for piece in pieces):
        copies = [(piece[0], piece[1]) for piece in pieces if piece[3] == two]
        inner, place = [], []
        for (product, start), each in zip(
            _parts(move, layout.axes, two), box, strict=True
        ):
            stop = start + _size(move, product)
            first, last = max(each.start, start), min(each.stop, stop)
            inner.append((product, first - start, last - start))
            place.append(slice(first - each.start, last - each.start))
        if all(first < last for _, first, last in inner):
            made.append(_part(move, layout, two, copies, numbers, inner, tuple(place)))
    return made


def _part(
    move: Move,
    layout: Layout,
    two: int,
    copies: Sequence[tuple[int, int]],
    numbers: Sequence[int],
    inner: Sequence[tuple[Sequence[str], int, int]],
    place: Box,
) -> Part:
    ranges = {n: (v, v + 1) for n, v in zip(layout.numbers, numbers, strict=True)}
    for product, first, last in inner:
        ranges |= _spread(move, product, first, last)
    wanted = math.prod(last - first for _, first, last in inner)
    products = [
        product
        for source, one in copies
        for product, _ in _parts(move, move.sources[source].axes, one)
    ]
    while True:  # until all are ranges of the sources' axes
        wider = dict(ranges)
        for product in products:
            wider |= _joined(move, product, wider)
        if wider == ranges:
            break
        ranges = wider
    small = Move(
        tuple(_single(move.sources[source], one) for source, one in copies),
        (_single(layout, two),),
        tuple((number, 0, 0, 0) for number in range(len(copies))),
        tuple((name, last - first) for name, (first, last) in ranges.items()),
        move.values,
        move.undoes,
        move.dtype,
        move.compares,
    )
    picks = tuple(_pick(move, ranges, *each) for each in inner)
    count = math.prod(last - first for first, last in ranges.values())
    leaf = _flat_index(
        [
            value - ranges[n][0]
            for n, value in zip(layout.numbers, numbers, strict=True)
        ],
        [small.size[name] for name in layout.numbers],
    )
    exact = count == wanted
    return Part(move, (*copies,), ranges, small, leaf, picks, place, exact)


def _leaves(
    move: Move, layout: Layout, part: int, ranges: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[int, Box]]:
    """Yield place and box of each leaf of a source that has a part."""
    box = []
    for product, start in _parts(move, layout.axes, part):
        first = last = 0
        for name in product:
            first = first * move.size[name] + ranges[name][0]
            last = last * move.size[name] + ranges[name][1] - 1
        box.append(slice(start + first, start + last + 1))
    for values in itertools.product(*(range(*ranges[n]) for n in layout.numbers)):
        counts = [move.size[name] for name in layout.numbers]
        yield _flat_index(values, counts), tuple(box)


def _flat_index(values: Sequence[int], counts: Sequence[int]) -> int:
    """Return the place of some values among all, the last one fastest."""
    place = 0
    for value, count in zip(values, counts, strict=True):
        place = place * count + value
    return place


def _parts(move: Move, axes: Axes, part: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield for each axis the names in one part of it, and where that starts."""
    for axis in axes:
        if len(axis.parts) == 1:
            yield axis.parts[0], 0
        else:
            before = (_size(move, product) for product in axis.parts[:part])
            yield axis.parts[part], sum(before)


def _single(layout: Layout, part: int) -> Layout:
    """Return a layout with one part of its concatenation only."""
    axes = (
        axis if len(axis.parts) == 1 else Axis((axis.parts[part],))
        for axis in layout.axes
    )
    return Layout(layout.numbers, tuple(axes))


def _size(move: Move, product: Sequence[str]) -> int:
    return math.prod(move.size[name] for name in product)


def _spread(move: Move, product: Sequence[str], first: int, last: int) -> Ranges:
    """Return ranges of names that hold a range of their product."""
    ranges: Ranges = {}
    for place, name in enumerate(product):
        inner = _size(move, product[place + 1 :])
        ranges[name] = (first // inner, (last - 1) // inner + 1)
        if ranges[name][0] + 1 == ranges[name][1]:
            start = ranges[name][0] * inner
            first, last = first - start, last - start
        else:
            first, last = 0, inner
    return ranges


def _joined(move: Move, product: Sequence[str], ranges: Mapping[str, Any]) -> Ranges:
    """Return ranges, maybe wider, that are one range of their product."""
    wider: Ranges = {}
    several = False
    for name in product:
        wider[name] = (0, move.size[name]) if several else ranges[name]
        several |= wider[name][1] - wider[name][0] > 1
    return wider


def _pick(
    move: Move, ranges: Ranges, product: Sequence[str], first: int, last: int
) -> slice:
    """Return where a range of a product is among the ranges of its names."""
    start, rest = 0, first
    for place, name in enumerate(product):
        value, rest = divmod(rest, _size(move, product[place + 1 :]))
        low, high = ranges[name]
        start = start * (high - low) + value - low
    # Inside a name with several values all others are whole: it is one range there too.
    return slice(start, start + last - first)
