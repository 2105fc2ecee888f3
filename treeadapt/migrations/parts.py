"""Parts: a box of one target array, made of boxes of the source arrays alone.

A box is a slice with start and stop for each axis. Splitting an axis into the names in
it is always a view: the ranges of a target's axes become ranges of names, and these
become ranges of the axes of the sources. A ``Move`` with the lengths of the ranges as
its sizes does the rest. Reads no array: who has them hands them over.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from treeadapt.arrays import copy_values
from treeadapt.migrations.axes import Axis, Product
from treeadapt.migrations.running import Layout, Move
from treeadapt.migrations.templates import compose, decompose

Box: TypeAlias = tuple[slice, ...]

#: Values of names, each from the first to before the last.
Ranges: TypeAlias = dict[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class SourceBoxes:
    """What a part is made of: the same box of some leaves of one source.

    Attributes:
        number: place of the source in the row.
        leaves: which of its leaves, in order, as ranges of the numbers in its path.
        starts: where the box starts, in order, if it is in several places of each leaf,
            because what it has is not one box; 0 alone if it is.
        axis: along which these places are.
        box: of each leaf, at the first of these places.
    """

    number: int
    leaves: tuple[tuple[str, range], ...]
    starts: range
    axis: int
    box: Box

    @property
    def count(self) -> int:
        """How many boxes there are."""
        return math.prod(len(values) for _, values in self.leaves) * len(self.starts)

    def boxes(self, sizes: Mapping[str, int]) -> Iterator[tuple[int, int, Box]]:
        """Yield each box: the leaf, where the box starts in it, and the box."""
        names = [name for name, _ in self.leaves]
        for values in itertools.product(*(values for _, values in self.leaves)):
            leaf = compose(names, dict(zip(names, values, strict=True)), sizes)
            for start in self.starts:
                yield leaf, start, shifted(self.box, self.axis, start)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a box of a target, and what it is made of.

    Attributes:
        sources: one, or several that must be equal or are multiplied.
        move: makes leaves of one target of them, maybe more than is wanted.
        leaf: which of these leaves is wanted.
        picks: its part that is wanted.
        cut: the part of the box in which it has a place.
        shape: of that, after the axis of nested parts was split in two.
        place: where it is there.
        is_exact: whether no more is made than is wanted.
        is_tight: whether no more is read than is wanted; repeats are read once.
    """

    sources: tuple[SourceBoxes, ...]
    move: Move
    leaf: int
    picks: Box
    cut: Box
    shape: tuple[int, ...]
    place: Box
    is_exact: bool
    is_tight: bool

    def view(self, array: Any) -> Any:
        """Return what this part fills of an array for the box."""
        return array[(..., *self.cut)].reshape(self.shape)[(..., *self.place)]

    def is_all(self, array: Any) -> bool:
        """Return whether it fills an array, axis by axis, with all that is made."""
        return self.is_exact and bool(self.view(array).shape == array.shape)

    def put(self, leaves: Sequence[Any], array: Any) -> None:
        """Put what the move made of the sources into an array for the box."""
        copy_values(self.view(array), leaves[self.leaf][self.picks])


def parts_of_box(
    move: Move,
    target: int,
    numbers: Sequence[int],
    box: Box,
    max_elements: float = math.inf,
) -> Iterator[Part]:
    """Yield the parts that together are a box of one target's leaf.

    Args:
        move: of a group that divides.
        target: place of the target in the row.
        numbers: values of its numbers, which tell its leaves apart.
        box: of the leaf; what is added to it is in no part.
        max_elements: of a part, if leaves of a source can be taken a few at a time.
    """
    pads = move.values.pads(is_source=False)
    layout = move.targets[target]
    pieces = [piece for piece in move.pieces if piece[2] == target]
    smaller = _divided(move, target, box, max_elements)
    for cut in itertools.chain(*(_aligned(move, layout, each) for each in smaller)):
        for two in dict.fromkeys(piece[3] for piece in pieces):
            spans: list[tuple[Product, int, int]] = []
            shape, place = [], []
            for axis, each in zip(layout.axes, cut, strict=True):
                first, last = each.start, each.stop
                if axis.before:
                    width = move.width(axis)
                    outer = range(first // width, -(-last // width))
                    spans.append((axis.outer, outer.start, outer.stop))
                    shape.append(len(outer))
                    place.append(slice(0, len(outer)))
                    first -= outer.start * width
                    last -= (outer.stop - 1) * width
                inner = axis.inner(two)
                start = move.start(axis, two) + pads.get(axis.name, (0, 0))[0]
                low = max(first, start)
                high = max(low, min(last, start + move.length(inner)))
                spans.append((inner, low - start, high - start))
                shape.append(last - first)
                place.append(slice(low - first, high - first))
            if all(first < last for _, first, last in spans):
                offset = tuple(
                    slice(each.start - around.start, each.stop - around.start)
                    for each, around in zip(cut, box, strict=True)
                )
                copies = [(s, one) for s, one, _, part in pieces if part == two]
                fixed = dict(zip(layout.numbers, numbers, strict=True))
                made = _Made(move, fixed, spans, copies)
                yield made.part(offset, tuple(shape), tuple(place))


def _divided(move: Move, target: int, box: Box, max_elements: float) -> Iterator[Box]:
    """Yield smaller boxes that together are a box, each made of few of the sources.

    It is divided only between numbers that tell leaves of a source apart, so that what
    is read for one part is not read for the next.

    Args:
        move: of a group.
        target: place of the target in the row.
        box: of an array of it.
        max_elements: of a smaller box, unless there is no such number in it.
    """
    numbers = {name for layout in move.sources for name in layout.numbers}
    size = math.prod(lengths(box))
    for place, axis in enumerate(move.targets[target].axes):
        name, *inner = (len(axis.parts) == 1 and axis.parts[0]) or ("",)
        step, each = move.count(inner), box[place]
        length = each.stop - each.start
        if size <= max_elements or name not in numbers or length <= step:
            continue
        # From multiples on, so that boxes of other devices are divided at the same.
        step *= max(1, int(max_elements * length / size) // step)
        for start in range(each.start // step * step, each.stop, step):
            part = slice(max(start, each.start), min(start + step, each.stop))
            smaller = (*box[:place], part, *box[place + 1 :])
            yield from _divided(move, target, smaller, max_elements)
        return
    yield box


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole array.

    Example:
        >>> whole((2, 3))
        (slice(0, 2, None), slice(0, 3, None))
    """
    return tuple(slice(0, size) for size in shape)


def around(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that holds some boxes.

    Example:
        >>> around([(slice(0, 2),), (slice(3, 4),)])
        (slice(0, 4, None),)
    """
    return tuple(
        slice(min(s.start for s in each), max(s.stop for s in each))
        for each in zip(*boxes, strict=True)
    )


def lengths(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(each.stop - each.start for each in box)


def shifted(box: Box, axis: int, by: int) -> Box:
    """Return a box that is as long, and starts later along an axis."""
    return tuple(
        slice(each.start + by, each.stop + by) if place == axis else each
        for place, each in enumerate(box)
    )


def _aligned(move: Move, layout: Layout, box: Box) -> Iterator[Box]:
    """Yield smaller boxes: between values of what is before a bracket, or within one.

    In each, the axis of nested parts is a product of two.
    """
    place = next((n for n, axis in enumerate(layout.axes) if axis.before), None)
    if place is None:
        yield box
        return
    each, width = box[place], move.width(layout.axes[place])
    inside = (-(-each.start // width) * width, each.stop // width * width)
    edges = {each.start, each.stop, *(n for n in inside if each.start < n < each.stop)}
    for start, stop in itertools.pairwise(sorted(edges)):
        yield (*box[:place], slice(start, stop), *box[place + 1 :])


@dataclasses.dataclass
class _Made:
    """What is made at once, of ranges of names.

    Attributes:
        move: of the group.
        fixed: values of the numbers of the target.
        spans: for each axis its names, and where what is wanted starts and stops.
        copies: for each source, its place in the row, and which part of it this is.
        ranges: values of names, so many that they are one box of each source.
    """

    move: Move
    fixed: Mapping[str, int]
    spans: Sequence[tuple[Product, int, int]]
    copies: Sequence[tuple[int, int]]
    ranges: Ranges = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.move.size
        self.ranges |= {name: (n, n + 1) for name, n in self.fixed.items()}
        for product, first, last in self.spans:
            lows, highs = (decompose(product, n, size) for n in (first, last - 1))
            ends = {name: (lows[name], highs[name] + 1) for name in product}
            self.ranges |= self._joined(product, ends)
        products = [
            product
            for axis, one in self._source_axes()
            for product in (axis.outer, axis.inner(one))
        ]
        for name in self._source_names():  # of copies, all must be equal
            self.ranges.setdefault(name, (0, size[name]))
        before: Ranges = {}
        while before != self.ranges:  # until all are ranges of the sources' axes
            before = dict(self.ranges)
            for product in products:
                self.ranges |= self._joined(product, self.ranges)

    def part(self, cut: Box, shape: tuple[int, ...], place: Box) -> Part:
        """Return the part that has this place."""
        move, ranges, numbers = self.move, self.ranges, (*self.fixed,)
        small = Move(
            tuple(self._layout(source, one) for source, one in self.copies),
            (Layout(numbers, tuple(Axis((it,)) for it, _, _ in self.spans)),),
            tuple((number, 0, 0, 0) for number in range(len(self.copies))),
            tuple((name, last - first) for name, (first, last) in ranges.items()),
            dataclasses.replace(move.values, pad=()),
            move.dtype,
            move.compares,
            tuple((each, self._span(each)[1]) for each, _ in move.lengths),
        )

        def among(names: Sequence[str], values: Mapping[str, int]) -> int:
            """Return the place that values have among the ranges of their names."""
            offsets = {name: values[name] - ranges[name][0] for name in names}
            return compose(names, offsets, small.size)

        picks = []
        for product, first, last in self.spans:
            # Within a name with several values all are whole: it is one range there.
            start = among(product, decompose(product, first, move.size))
            picks.append(slice(start, start + last - first))
        counts = (
            small.count(numbers),
            *(small.length(it) for it, _, _ in self.spans),
        )
        read = {*self._source_names()}
        return Part(
            tuple(self._source(source, one) for source, one in self.copies),
            small,
            among(numbers, self.fixed),
            tuple(picks),
            cut,
            shape,
            place,
            math.prod(counts)
            == math.prod(last - first for _, first, last in self.spans),
            small.count(name for name in numbers if name in read) == 1
            and all(_is_tight(small, *span, read, move.size) for span in self.spans),
        )

    def _source_axes(self) -> Iterator[tuple[Axis, int]]:
        for source, one in self.copies:
            for axis in self.move.sources[source].axes:
                yield axis, one

    def _source_names(self) -> Iterator[str]:
        for source, _ in self.copies:
            yield from self.move.sources[source].numbers
        for axis, one in self._source_axes():
            yield from axis.product(one)

    def _layout(self, source: int, one: int) -> Layout:
        """Return the layout of a source's boxes."""
        layout = self.move.sources[source]
        outer = itertools.chain(*(axis.outer for axis in layout.axes))
        inner = tuple(Axis((axis.inner(one),)) for axis in layout.axes)
        return Layout((*layout.numbers, *outer), inner)

    def _source(self, source: int, one: int) -> SourceBoxes:
        """Return which boxes of a source are read."""
        move, layout = self.move, self.move.sources[source]
        pads = move.values.pads(is_source=True)
        starts, along = range(1), 0
        box = []
        for place, axis in enumerate(layout.axes):
            start = move.start(axis, one) + pads.get(axis.name, (0, 0))[0]
            first, length = self._span(axis.inner(one))
            box.append(slice(start + first, start + first + length))
            if axis.before:
                width, along = move.width(axis), place
                first, length = self._span(axis.outer)
                starts = range(first * width, (first + length) * width, width)
        leaves = tuple((name, range(*self.ranges[name])) for name in layout.numbers)
        return SourceBoxes(source, leaves, starts, along, tuple(box))

    def _span(self, product: Product) -> tuple[int, int]:
        """Return where ranges of names start along their axis, and their length."""
        first, last = (
            compose(
                product, {n: self.ranges[n][end] - end for n in product}, self.move.size
            )
            for end in (0, 1)
        )
        return first, min(last + 1, self.move.length(product)) - first

    def _joined(
        self, product: Product, ranges: Mapping[str, tuple[int, int]]
    ) -> Ranges:
        """Return ranges, maybe wider, that are one range of their product."""
        wider: Ranges = {}
        several = False
        for name in product:
            wider[name] = (0, self.move.size[name]) if several else ranges[name]
            several |= wider[name][1] - wider[name][0] > 1
        return wider


def _is_tight(
    small: Move,
    product: Product,
    first: int,
    last: int,
    names: Collection[str],
    sizes: Mapping[str, int],
) -> bool:
    """Return whether a part reads no more along an axis than a range of it needs.

    Args:
        small: move of the part.
        product: names of the axis.
        first: where the range starts.
        last: where it stops.
        names: those that the sources have; others are repeated.
        sizes: of all names in the whole array.
    """
    kept = [name for name in product if name in names]
    if len(kept) == len(product):
        return small.length(product) == last - first
    values = decompose(product, np.arange(first, last), sizes)
    each = zip(*(values[name].tolist() for name in kept), strict=True)
    return small.count(kept) == (len({*each}) if kept else 1)
