"""Parts: a box of one target array, made of boxes of the source arrays alone.

A box is a slice with start and stop for each axis. Splitting an axis into the names in
it is always a view: the ranges of a target's axes become ranges of names, and these
become ranges of the axes of the sources. A ``Move`` with the lengths of the ranges as
its sizes does the rest. Reads no array. Parts that are nested in an axis follow each
other for each value of the names before them; such a value is fixed, as a number in a
path is, and then they are contiguous.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from treeadapt.migrations.axes import Axis, Product
from treeadapt.migrations.move import Layout, Move
from treeadapt.migrations.rows import Piece
from treeadapt.migrations.take import Order, taken_name
from treeadapt.migrations.templates import compose, decompose

_MOST_BLOCKS = 4_096  # of nested parts, of an array; else it is read whole
_MOST_RUNS = 1_000  # of an axis that are read one by one; else all that is around them

Box: TypeAlias = tuple[slice, ...]

#: Values of names, each a range of all that it has.
Ranges: TypeAlias = dict[str, range]


@dataclasses.dataclass(frozen=True)
class SourceBoxes:
    """What a part is made of: the same box of some leaves of one source.

    Attributes:
        number: place of the source in the row.
        ranges: values of the numbers in its path that these leaves have.
        box: of each leaf.
    """

    number: int
    ranges: tuple[range, ...]
    box: Box

    def leaves(self, move: Move) -> list[int]:
        """Return the places of these leaves among all of the source, in order."""
        names = move.sources[self.number].numbers
        every = (
            dict(zip(names, x, strict=True)) for x in itertools.product(*self.ranges)
        )
        return [compose(names, values, move.size) for values in every]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a box of a target, and what it is made of.

    Attributes:
        sources: one, or several that must be equal or are multiplied.
        move: makes leaves of one target of them, maybe more than is wanted.
        leaf: which of these leaves is wanted.
        picks: its part that is wanted.
        place: where that is in the box.
        is_tight: whether no more is read than is wanted; repeats are read once.
    """

    sources: tuple[SourceBoxes, ...]
    move: Move
    leaf: int
    picks: Box
    place: Box
    is_tight: bool

    @property
    def is_exact(self) -> bool:
        """Whether no more is made than is wanted."""
        layout = self.move.targets[0]
        made = (*self.move.shape(layout), self.move.count(layout.numbers))
        return math.prod(made) == math.prod(lengths(self.picks))


def parts_of_box(
    move: Move,
    target: int,
    numbers: Sequence[int],
    box: Box,
    max_elements: float = math.inf,
) -> Iterator[Part]:
    """Yield the parts that together are a box of one target's leaf, but for padding.

    Args:
        move: of a group that divides.
        target: place of the target in the row.
        numbers: values of its numbers, which tell its leaves apart.
        box: of the leaf; what is added to it is in no part.
        max_elements: of a part, if leaves of a source can be taken a few at a time.
    """
    pads = move.values.pads(is_source=False)
    layout = move.targets[target]
    pieces = [piece for piece in move.pieces if piece.target == target]
    values = dict(zip(layout.numbers, numbers, strict=True))
    every = (
        _divided(move, target, x, max_elements) for x in _by_runs(move, target, box)
    )
    parts_of_target = dict.fromkeys(piece.target_part for piece in pieces)
    before = nested_names(move) or ()
    for smaller, two in itertools.product(
        itertools.chain.from_iterable(every), parts_of_target
    ):
        for fixed in _fixed(move, layout, two, values, smaller, before):
            ranges = {name: range(number, number + 1) for name, number in fixed.items()}
            spans: list[tuple[Product, range]] = []
            place = []
            for axis, each, whole_box in zip(layout.axes, smaller, box, strict=True):
                start, product = _start(move, axis, two, fixed)
                start += pads.get(axis.name, (0, 0))[0]
                low = max(each.start, start)
                high = max(low, min(each.stop, start + move.length(product)))
                spans.append((product, range(low - start, high - start)))
                place.append(slice(low - whole_box.start, high - whole_box.start))
            if all(span for _, span in spans):
                parts = [(s, one) for s, one, _, part in pieces if part == two]
                yield _part(move, target, ranges, spans, parts, tuple(place))


def nested_names(move: Move) -> tuple[str, ...] | None:
    """Return the names before nested parts, in the order in which they are met.

    Returns:
        None if no box has one value of each in one piece: one of them is not outermost
        in another axis, or they have too many values.
    """
    axes = [axis for each in (*move.sources, *move.targets) for axis in each.axes]
    names = tuple(dict.fromkeys(itertools.chain(*(axis.outer for axis in axes))))
    for product in itertools.chain(*(axis.parts for axis in axes)) if names else ():
        are_fixed = [name in names for name in product]
        if are_fixed != sorted(are_fixed, reverse=True):
            return None
    is_taken = not {*names}.isdisjoint(
        itertools.chain(*((name, taken_name(name)) for name, _ in move.takes))
    )
    is_cut = any(not {*names}.isdisjoint(product) for product, _ in move.lengths)
    return None if is_taken or is_cut or move.count(names) > _MOST_BLOCKS else names


def _fixed(
    move: Move,
    layout: Layout,
    part: int,
    numbers: Mapping[str, int],
    box: Box,
    before: Sequence[str],
) -> Iterator[dict[str, int]]:
    """Yield the numbers of a leaf, with values of names before nested parts.

    Args:
        move: of a group.
        layout: of the target.
        part: of the concatenation along its axes.
        numbers: of the leaf.
        box: of the leaf: values of which it has nothing are left out.
        before: what ``nested_names`` says.
    """
    ranges = {name: range(move.size[name]) for name in before}
    ranges |= {n: range(numbers[n], numbers[n] + 1) for n in before if n in numbers}
    for axis, each in zip(layout.axes, box, strict=True):
        first = next(iter(axis.product(part)), "")
        if first in ranges:  # it is outermost there
            block = move.width(axis) if axis.before else 1
            block *= move.count((axis.outer if axis.before else axis.product(part))[1:])
            start = 0 if axis.before else move.start(axis, part)
            low, high = ((end - start) // block for end in (each.start, each.stop - 1))
            possible = ranges[first]
            ranges[first] = range(
                max(possible.start, low), min(possible.stop, high + 1)
            )
    for values in itertools.product(*(ranges[name] for name in before)):
        yield {**numbers, **dict(zip(before, values, strict=True))}


def _start(
    move: Move, axis: Axis, part: int, fixed: Mapping[str, int]
) -> tuple[int, Product]:
    """Return where one part of an axis starts, and its names that are not fixed.

    Args:
        move: of a group.
        axis: of a leaf.
        part: of the concatenation.
        fixed: values of names, which are the outermost there.
    """
    start, product = move.start(axis, part), axis.product(part)
    if axis.before:
        start += compose(axis.outer, fixed, move.size) * move.width(axis)
        product = axis.inner(part)
    outer = [*itertools.takewhile(fixed.__contains__, product)]
    left = product[len(outer) :]
    return start + compose(outer, fixed, move.size) * move.count(left), left


def _by_runs(move: Move, target: int, box: Box) -> Iterator[Box]:
    """Yield smaller boxes of which each takes neighbours of an axis of the sources.

    Args:
        move: of a group.
        target: place of the target in the row.
        box: of an array of it.
    """
    boxes = [box]
    orders = {taken_name(name): order for name, order in move.takes}
    for place, axis in enumerate(move.targets[target].axes):
        name, *inner = (len(axis.parts) == 1 and axis.parts[0]) or ("",)
        if name not in orders or len(orders[name].breaks) > _MOST_RUNS:
            continue
        step, each = move.count(inner), box[place]
        cuts = [n * step for n in orders[name].breaks]
        ends = [each.start, *(n for n in cuts if each.start < n < each.stop), each.stop]
        spans = [slice(*pair) for pair in itertools.pairwise(ends)]
        boxes = [(*x[:place], span, *x[place + 1 :]) for x in boxes for span in spans]
    yield from boxes


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


def _part(
    move: Move,
    target: int,
    fixed: Ranges,
    spans: Sequence[tuple[Product, range]],
    parts: Sequence[tuple[int, int]],
    place: Box,
) -> Part:
    """Return the part that makes some ranges of the axes of a target.

    Args:
        move: of the group.
        target: place of the target in the row.
        fixed: the numbers of the target's leaf.
        spans: for each axis its names, and what is wanted of them.
        parts: for each source, its place in the row, and which part of it this is;
            several are copies, or factors.
        place: of the part in its box.
    """
    products = [axis.product(n) for s, n in parts for axis in move.sources[s].axes]
    names = [*itertools.chain(*(move.sources[s].numbers for s, _ in parts), *products)]
    ranges, takes = _ranges_of_sources(move, fixed, spans, products, names)
    small = Move(
        tuple(
            Layout(
                move.sources[s].numbers,
                tuple(Axis((axis.product(one),)) for axis in move.sources[s].axes),
            )
            for s, one in parts
        ),
        (Layout((*fixed,), tuple(Axis((product,)) for product, _ in spans)),),
        tuple(Piece(number, 0, 0, 0) for number in range(len(parts))),
        tuple((name, len(values)) for name, values in ranges.items()),
        dataclasses.replace(move.values, pad=()),
        move.dtype,
        move.compares,
        tuple((each, len(_span(move, each, ranges))) for each, _ in move.lengths),
        takes,
        (0,) * (target in move.zeros),
    )

    def among(names: Sequence[str], values: Mapping[str, int]) -> int:
        """Return the place that values have among the ranges of their names."""
        offsets = {name: values[name] - ranges[name].start for name in names}
        return compose(names, offsets, small.size)

    picks = []
    for product, span in spans:
        # Within a name with several values all are whole: it is one range there.
        start = among(product, decompose(product, span.start, move.size))
        picks.append(slice(start, start + len(span)))
    leaf = among((*fixed,), {name: values.start for name, values in fixed.items()})
    read = {*names, *(taken_name(name) for name, _ in takes)}
    is_tight = (
        all(small.size[name] == len(order) for name, order in takes)
        and small.count(name for name in fixed if name in read) == 1
        and all(_is_tight(small, *span, read, move.size) for span in spans)
    )
    sources = tuple(_source(move, s, one, ranges) for s, one in parts)
    return Part(sources, small, leaf, tuple(picks), place, is_tight)


def _ranges_of_sources(
    move: Move,
    fixed: Ranges,
    spans: Sequence[tuple[Product, range]],
    products: Sequence[Product],
    names: Sequence[str],
) -> tuple[Ranges, tuple[tuple[str, Order], ...]]:
    """Return which values of each name are read, and the orders to take them in.

    Args:
        move: of the group.
        fixed: the numbers of the target's leaf.
        spans: for each axis of the target its names, and what is wanted of them.
        products: names of each axis of the sources.
        names: of the sources; of copies, whose names no target has, all must be equal.
    """
    ranges = {name: range(move.size[name]) for name in names} | fixed
    for product, span in spans:
        first, last = (decompose(product, n, move.size) for n in (span[0], span[-1]))
        ends = {name: range(first[name], last[name] + 1) for name in product}
        ranges |= _joined(product, ends, move.size)
    taken = [
        (name, order, ranges[taken_name(name)])
        for name, order in move.takes
        if taken_name(name) in ranges and name in ranges
    ]
    for name, order, values in taken:
        ranges[name], _ = order.within(values)
    before: Ranges = {}
    while before != ranges:  # until all are ranges of the sources' axes
        before = dict(ranges)
        for product in products:
            ranges |= _joined(product, ranges, move.size)
    takes = []
    for name, order, _ in taken:
        around_them, inner = order.within(ranges[taken_name(name)])
        # What is read may begin before what is taken: the order counts from there.
        more = around_them.start - ranges[name].start
        takes.append((name, inner.after(more)))
    return ranges, tuple(takes)


def _is_tight(
    small: Move,
    product: Product,
    span: range,
    names: Collection[str],
    sizes: Mapping[str, int],
) -> bool:
    """Return whether a part reads no more along an axis than a range of it needs.

    Args:
        small: move of the part.
        product: names of the axis.
        span: the range.
        names: those that the sources have; others are repeated.
        sizes: of all names in the whole array.
    """
    kept = [name for name in product if name in names]
    if len(kept) == len(product):
        return small.length(product) == len(span)
    values = decompose(product, np.asarray(span), sizes)
    each = zip(*(values[name].tolist() for name in kept), strict=True)
    return small.count(kept) == (len({*each}) if kept else 1)


def _source(move: Move, number: int, part: int, ranges: Ranges) -> SourceBoxes:
    """Return which boxes of a source have ranges of names in one of its parts."""
    layout, pads = move.sources[number], move.values.pads(is_source=True)
    box = []
    for axis in layout.axes:
        fixed = {name: ranges[name].start for name in axis.outer}
        start, product = _start(move, axis, part, fixed)
        start += pads.get(axis.name, (0, 0))[0]
        span = _span(move, product, ranges)
        box.append(slice(start + span.start, start + span.stop))
    leaves = tuple(ranges[name] for name in layout.numbers)
    return SourceBoxes(number, leaves, tuple(box))


def _span(move: Move, product: Product, ranges: Ranges) -> range:
    """Return the range along an axis that has ranges of its names."""
    first, last = (
        compose(product, {name: ranges[name][end] for name in product}, move.size)
        for end in (0, -1)
    )
    return range(first, min(last + 1, move.length(product)))


def _joined(product: Product, ranges: Ranges, sizes: Mapping[str, int]) -> Ranges:
    """Return ranges, maybe wider, that are one range of their product."""
    wider: Ranges = {}
    several = False
    for name in product:
        wider[name] = range(sizes[name]) if several else ranges[name]
        several |= len(wider[name]) > 1
    return wider
