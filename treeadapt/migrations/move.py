"""``Move``: how the arrays of one group are moved, with every size known.

``groups`` makes it of a row and the shapes of its leaves, ``running`` carries it out,
``box_parts`` cuts it to the part of an array that one device needs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from treeadapt.migrations.axes import Axes, Axis, Product, indices
from treeadapt.migrations.operations import Values
from treeadapt.migrations.rows import Piece
from treeadapt.migrations.take import Order


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the indices of the arrays at one address are.

    Attributes:
        numbers: names whose values tell the leaves apart, outermost first.
        axes: axes of each leaf.
    """

    numbers: tuple[str, ...]
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Move:
    """How the arrays of one group are moved; equal for groups of the same form.

    Attributes:
        sources: layouts of the sources; their leaves are in the order of their numbers.
        targets: the same of the targets.
        pieces: see ``Row.pieces``.
        sizes: size of each name, in order of names.
        values: what is done to values, or undone.
        dtype: dtype of the result.
        compares: whether the sources are copies, which must be equal.
        lengths: of products that are shorter than their names say, because the last
            block is: with 128 in a block, 576 is 4 and a half.
        takes: names of axes of the sources, and which of their numbers the targets have
            under ``taken_name``.
        zeros: places of targets that get zeros, because the first one gets the sum.
    """

    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]
    pieces: tuple[Piece, ...]
    sizes: tuple[tuple[str, int], ...]
    values: Values
    dtype: Any
    compares: bool
    lengths: tuple[tuple[Product, int], ...] = ()
    takes: tuple[tuple[str, Order], ...] = ()
    zeros: tuple[int, ...] = ()

    @functools.cached_property
    def size(self) -> Mapping[str, int]:
        """Size by name."""
        return dict(self.sizes)

    def count(self, names: Iterable[str]) -> int:
        """Return the product of the sizes of some names."""
        return math.prod(self.size[name] for name in names)

    def length(self, product: Product) -> int:
        """Return the size of an axis of some names."""
        return dict(self.lengths).get(product, self.count(product))

    def start(self, axis: Axis, part: int) -> int:
        """Return where one part of the concatenation starts along an axis.

        With names before the bracket, for the first of their values.
        """
        several = range(part if len(axis.parts) > 1 else 0)
        return sum(self.count(axis.inner(place)) for place in several)

    def width(self, axis: Axis) -> int:
        """Return how much of an axis all parts have for each value before them."""
        return self.start(axis, len(axis.parts))

    def indices(self, names: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yield the numbers of each leaf of an address, in order."""
        for values in indices(names, self.size):
            yield dict(zip(names, values, strict=True))

    def shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of the leaves at an address, before they are padded."""
        return tuple(sum(map(self.length, axis.parts)) for axis in layout.axes)

    def after(self, shape: Sequence[int]) -> Move:
        """Return the move of arrays that have some axes before those of the leaves."""
        names = [f"before {place}" for place in range(len(shape))]
        axes = tuple(Axis(((name,),)) for name in names)

        def extend(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
            return tuple(Layout(each.numbers, axes + each.axes) for each in layouts)

        return dataclasses.replace(
            self,
            sources=extend(self.sources),
            targets=extend(self.targets),
            sizes=(*zip(names, shape, strict=True), *self.sizes),
        )
