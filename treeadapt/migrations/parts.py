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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from treeadapt.migrations.axes import Axis, names_of
from treeadapt.migrations.running import Layout, Move
from treeadapt.migrations.templates import compose, decompose

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
        is_tight: whether no more is read than is wanted; repeats are read once.
    """

    whole: Move
    copies: tuple[tuple[int, int], ...]
    ranges: Mapping[str, tuple[int, int]]
    move: Move
    leaf: int
    picks: Box
    place: Box
    is_exact: bool
    is_tight: bool

    @functools.cached_property
    def sources(self) -> tuple[tuple[int, tuple[tuple[int, Box], ...]], ...]:
        """For each source, its place in the row, and place and box of each leaf."""
        layouts = self.whole.sources
        return tuple(
            (source, tuple(_leaves(self.whole, layouts[source], one, self.ranges)))
            for source, one in self.copies
        )

    @property
    def kinds(self) -> Iterator[tuple[int, int, Box]]:
        """For each source, its place, how many leaves of it there are, and the box."""
        for source, one in self.copies:
            layout = self.whole.sources[source]
            count = math.prod(map(self._length, layout.numbers))
            yield source, count, _leaf_box(self.whole, layout, one, self.ranges)

    def _length(self, name: str) -> int:
        first, last = self.ranges[name]
        return last - first

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
        box: of the leaf; what is added to it is in no part.

    Returns:
        None where zeros are cut off, which needs whole arrays.
    """
    if move.values.cuts_zeros or not all(move.size.values()):
        return None
    pads = move.values.pads(is_source=False)
    layout = move.targets[target]
    fixed = dict(zip(layout.numbers, numbers, strict=True))
    pieces = [piece for piece in move.pieces if piece[2] == target]
    parts = []
    for two in dict.fromkeys(piece[3] for piece in pieces):
        copies = [(piece[0], piece[1]) for piece in pieces if piece[3] == two]
        inner, place = [], []
        for axis, each in zip(layout.axes, box, strict=True):
            start = move.start(axis, two) + pads.get(axis.name, (0, 0))[0]
            stop = start + move.count(axis.product(two))
            first, last = max(each.start, start), min(each.stop, stop)
            inner.append((axis.product(two), first - start, last - start))
            place.append(slice(first - each.start, last - each.start))
        if all(first < last for _, first, last in inner):
            parts.append(_part(move, layout, two, copies, fixed, inner, tuple(place)))
    return parts


def _part(
    move: Move,
    layout: Layout,
    two: int,
    copies: Sequence[tuple[int, int]],
    fixed: Mapping[str, int],
    inner: Sequence[tuple[Sequence[str], int, int]],
    place: Box,
) -> Part:
    ranges = {name: (value, value + 1) for name, value in fixed.items()}
    for product, first, last in inner:
        lows = decompose(product, first, move.size)
        highs = decompose(product, last - 1, move.size)
        inner_ranges = {name: (lows[name], highs[name] + 1) for name in product}
        ranges |= _joined(move, product, inner_ranges)
    products = [
        axis.product(one)
        for source, one in copies
        for axis in move.sources[source].axes
    ]
    for name in itertools.chain(*products):
        ranges.setdefault(name, (0, move.size[name]))  # of copies, all must be equal
    before: Ranges = {}
    while before != ranges:  # until all are ranges of the sources' axes
        before = dict(ranges)
        for product in products:
            ranges |= _joined(move, product, ranges)
    small = Move(
        tuple(_single(move.sources[source], one) for source, one in copies),
        (_single(layout, two),),
        tuple((number, 0, 0, 0) for number in range(len(copies))),
        tuple((name, last - first) for name, (first, last) in ranges.items()),
        dataclasses.replace(move.values, pad=()),
        move.dtype,
        move.compares,
    )

    def among(names: Sequence[str], values: Mapping[str, int]) -> int:
        """Return the place that values have among the ranges of their names."""
        offsets = {name: values[name] - ranges[name][0] for name in names}
        return compose(names, offsets, small.size)

    picks = []
    for product, first, last in inner:
        # In a name with several values all others are whole: it is one range there too.
        start = among(product, decompose(product, first, move.size))
        picks.append(slice(start, start + last - first))
    wanted = math.prod(last - first for _, first, last in inner)
    names = [*layout.numbers, *names_of(layout.axes, two)]
    is_exact = small.count(names) == wanted
    numbers = (move.sources[source].numbers for source, _ in copies)
    read = {*itertools.chain(*products, *numbers)}
    tight = math.prod(_count_kept(*each, read, move.size) for each in inner)
    is_tight = small.count(name for name in names if name in read) == tight
    leaf = among(layout.numbers, fixed)
    return Part(
        move, (*copies,), ranges, small, leaf, (*picks,), place, is_exact, is_tight
    )


def _count_kept(
    product: Sequence[str],
    first: int,
    last: int,
    names: Collection[str],
    sizes: Mapping[str, int],
) -> int:
    """Return how many values some names of an axis have in a range of it.

    Example:
        >>> _count_kept(["k", "r"], 1, 3, {"k"}, {"k": 4, "r": 2})
        2
    """
    if {*product} <= {*names}:
        return last - first
    values = decompose(product, np.arange(first, last), sizes)
    kept = [name for name in product if name in names]
    return len({*zip(*(values[name].tolist() for name in kept), strict=True)}) or 1


def _leaves(
    move: Move, layout: Layout, part: int, ranges: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[int, Box]]:
    """Yield place and box of each leaf of a source that has a part."""
    box = _leaf_box(move, layout, part, ranges)
    for values in itertools.product(*(range(*ranges[n]) for n in layout.numbers)):
        numbers = dict(zip(layout.numbers, values, strict=True))
        yield compose(layout.numbers, numbers, move.size), box


def _leaf_box(
    move: Move, layout: Layout, part: int, ranges: Mapping[str, tuple[int, int]]
) -> Box:
    """Return the box that a part has of each leaf of a source."""
    pads = move.values.pads(is_source=True)
    firsts = {name: first for name, (first, _) in ranges.items()}
    lasts = {name: last - 1 for name, (_, last) in ranges.items()}
    box = []
    for axis in layout.axes:
        product = axis.product(part)
        start = move.start(axis, part) + pads.get(axis.name, (0, 0))[0]
        ends = [compose(product, each, move.size) for each in (firsts, lasts)]
        box.append(slice(start + ends[0], start + ends[1] + 1))
    return tuple(box)


def _single(layout: Layout, part: int) -> Layout:
    """Return a layout with one part of its concatenation only."""
    axes = (Axis((axis.product(part),)) for axis in layout.axes)
    return Layout(layout.numbers, tuple(axes))


def _joined(move: Move, product: Sequence[str], ranges: Mapping[str, Any]) -> Ranges:
    """Return ranges, maybe wider, that are one range of their product."""
    wider: Ranges = {}
    several = False
    for name in product:
        wider[name] = (0, move.size[name]) if several else ranges[name]
        several |= wider[name][1] - wider[name][0] > 1
    return wider
