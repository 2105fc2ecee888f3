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

from treeadapt.migrations.axes import Axis, Product
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
            stop = start + move.length(axis.product(two))
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
    inner: Sequence[tuple[Product, int, int]],
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
        tuple((each, _span(move, each, ranges)[1]) for each, _ in move.lengths),
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
    lengths = (small.length(product) for product, _, _ in inner)
    is_exact = small.count(layout.numbers) * math.prod(lengths) == wanted
    numbers = (move.sources[source].numbers for source, _ in copies)
    read = {*itertools.chain(*products, *numbers)}
    is_tight = small.count(
        name for name in layout.numbers if name in read
    ) == 1 and all(_is_tight(small, each, read, move.size) for each in inner)
    leaf = among(layout.numbers, fixed)
    return Part(
        move, (*copies,), ranges, small, leaf, (*picks,), place, is_exact, is_tight
    )


def _is_tight(
    small: Move,
    inner: tuple[Product, int, int],
    names: Collection[str],
    sizes: Mapping[str, int],
) -> bool:
    """Return whether a part reads no more along an axis than a range of it needs.

    Args:
        small: move of the part.
        inner: names of the axis, and where the range starts and stops.
        names: those that the sources have; others are repeated.
        sizes: of all names in the whole array.
    """
    product, first, last = inner
    kept = [name for name in product if name in names]
    if len(kept) == len(product):
        return small.length(product) == last - first
    values = decompose(product, np.arange(first, last), sizes)
    each = zip(*(values[name].tolist() for name in kept), strict=True)
    return small.count(kept) == (len({*each}) if kept else 1)


def _span(
    move: Move, product: Product, ranges: Mapping[str, tuple[int, int]]
) -> tuple[int, int]:
    """Return where ranges of names start along their axis, and how long they are."""
    first, last = (
        compose(product, {n: ranges[n][end] - end for n in product}, move.size)
        for end in (0, 1)
    )
    return first, min(last + 1, move.length(product)) - first


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
    box = []
    for axis in layout.axes:
        product = axis.product(part)
        start = move.start(axis, part) + pads.get(axis.name, (0, 0))[0]
        first, length = _span(move, product, ranges)
        box.append(slice(start + first, start + first + length))
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
