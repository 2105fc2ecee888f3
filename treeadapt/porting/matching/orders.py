"""Orders of axes that a part may have on the other side, and numbers blind to them.

An order is an array of positions in the shape of the target: which number of the source
is there. ``Blind`` draws numbers that no order of some tells apart.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from treeadapt.porting.matching.cuts import Shape, assignments
from treeadapt.porting.matching.sides import ModelPart, Spot

_MOST = 400  # orders of one part
_COPIES = 2  # cost of an order within an axis
PLAIN = _COPIES - 1  # the most that orders of whole axes cost
KINDS = 3  # of draws
TIERS = (1, 2, 3, 4, 5)
_JOINED_OTHERWISE = 5  # the tier of axes that run backwards, or start elsewhere

#: The sizes of axes on both sides: heads are among them.
Sizes: TypeAlias = frozenset[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Ordering:
    """One order of axes.

    Attributes:
        positions: in the shape of the target: where the number is in the source.
        cost: 0 if axes keep their order, 1 if whole axes change places, else more.
    """

    positions: np.ndarray
    cost: int

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers of a source's part in this order."""
        return np.ravel(numbers)[self.positions]


@functools.lru_cache(maxsize=4_096)
def orders_of(source: Shape, target: Shape, sizes: Sizes, tier: int) -> list[Ordering]:
    """Return the orders in which a part of the source may be in the target.

    Args:
        source: shape of the part there.
        target: shape of the part here.
        sizes: of axes, which may be numbers of heads.
        tier: 1 for whole axes, in every order, split and joined; 2 for halves and
            neighbours within heads too; 3 for heads last; 4 for parts of an axis in
            another order; 5 for heads last, and axes that run backwards, as of a kernel
            that is transposed, or that two sizes make the other way round, as of a skip
            connection.
    """
    fine, coarse = source, target
    is_turned = len(target) >= len(source)
    if is_turned:
        fine, coarse = target, source
    found: dict[bytes, Ordering] = {}
    for positions, cost in _whole(fine, coarse):
        for more, moved in _moved(positions, sizes, tier):
            if not is_turned:
                back = np.empty(moved.size, np.intp)
                back[moved.ravel()] = np.arange(moved.size)
                moved = back.reshape(target)
            order = Ordering(moved, cost + more)
            found.setdefault(moved.tobytes(), order)
    return sorted(found.values(), key=lambda order: order.cost)[:_MOST]


def _whole(fine: Shape, coarse: Shape) -> Iterator[tuple[np.ndarray, int]]:
    """Yield positions in the coarse shape, in the fine one, and what they cost."""
    for own in assignments(fine, coarse):
        for chosen in itertools.product(*map(itertools.permutations, own)):
            axes = [axis for each in chosen for axis in each]
            cost = int(axes != sorted(axes))
            numbers = np.arange(math.prod(fine)).reshape([fine[a] for a in axes])
            yield numbers.transpose(np.argsort(axes)), cost


def _moved(
    positions: np.ndarray, sizes: Sizes, tier: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield positions as they are, and in the orders within axes, with their cost."""
    yield 0, positions
    for axis, length in enumerate(positions.shape):
        for within in _within(length, sizes, tier):
            yield _COPIES, np.take(positions, within, axis=axis)
    if tier == _JOINED_OTHERWISE:
        axes = range(positions.ndim)
        if positions.ndim < 2:
            return
        for count in range(1, positions.ndim):
            for chosen in itertools.combinations(axes, count):
                yield _COPIES, np.flip(positions, chosen)
        for axis in axes:
            for first in _sizes_of_two(positions.shape[axis], sizes):
                yield _COPIES, np.roll(positions, -first, axis)


def _sizes_of_two(length: int, sizes: Sizes) -> list[int]:
    """Return sizes that make an axis together with another one."""
    return [n for n in sorted(sizes) if n < length and length - n in sizes]


def _within(n: int, sizes: Sizes, tier: int) -> Iterator[np.ndarray]:
    """Yield the orders within one axis of a length."""
    numbers = np.arange(n)
    if tier >= 2:
        for heads in sorted(h for h in range(1, n) if not n % h):
            size = n // heads
            is_paired = size % 2 == 0 and size > 2 and tier != _JOINED_OTHERWISE
            if is_paired and (heads == 1 or heads in sizes):
                for split in ((2, size // 2), (size // 2, 2)):
                    pairs = numbers.reshape(heads, *split)
                    yield pairs.swapaxes(1, 2).ravel()
            if tier >= 3 and heads in sizes and heads > 1:
                yield numbers.reshape(heads, size).T.ravel()
    if tier == 4:
        for parts in (2, 3, 4):
            if n % parts == 0 and n > parts:
                for order in itertools.permutations(range(parts)):
                    yield numbers.reshape(parts, -1)[list(order)].ravel()


class Blind:
    """Numbers for parts of some shapes that no order tells apart.

    Positions that an order may exchange have one number, on both sides.

    Args:
        sources: shapes of the parts of the source.
        targets: of the target.
        orders: with the shapes that each leads from and to.
    """

    def __init__(
        self,
        sources: Iterable[Shape],
        targets: Iterable[Shape],
        orders: Sequence[tuple[Shape, Shape, Sequence[Ordering]]],
    ) -> None:
        keys = [(0, shape) for shape in dict.fromkeys(sources)]
        keys += [(1, shape) for shape in dict.fromkeys(targets)]
        self._first = keys[0][1]
        starts, total = {}, 0
        for key in keys:
            starts[key] = total
            total += math.prod(key[1])
        self._starts = starts
        ones, twos = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)]
        for source, target, each in orders:
            places = np.arange(math.prod(target)) + starts[1, target]
            for order in each:
                ones.append(order.positions.ravel() + starts[0, source])
                twos.append(places)
        joined = _joined(total, np.concatenate(ones), np.concatenate(twos))
        self._classes, self._inverse = np.unique(joined, return_inverse=True)

    def draw(self, rng: np.random.Generator, kind: int) -> Drawn:
        """Draw numbers: one for each class of positions.

        Vectors are positive, because some are variances; the norm of others is
        bounded. ``kind`` says how large they are.
        """
        numbers = rng.normal(size=len(self._classes))
        if len(self._first) < 2:
            numbers = np.exp((0.4, 0.25, 0.6)[kind % KINDS] * numbers)
            return Drawn(self, numbers.astype("float32"))
        shown = Drawn(self, numbers)(0, self._first).reshape(self._first[0], -1)
        size = (1.05, 2.4, 0.375)[kind % KINDS] / np.linalg.norm(shown, 2)
        return Drawn(self, (size * numbers).astype("float32"))

    def positions(self, side: int, shape: Shape) -> np.ndarray:
        """Return which class each position of a shape belongs to."""
        start = self._starts[side, shape]
        return self._inverse[start : start + math.prod(shape)].reshape(shape)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One draw: a number for each class."""

    blind: Blind
    numbers: np.ndarray

    def __call__(self, side: int, shape: Shape) -> np.ndarray:
        """Return the numbers of parts of a shape; side 0 is the source."""
        return self.numbers[self.blind.positions(side, shape)]

    def of(self, side: int, slot: ModelPart) -> dict[Spot, np.ndarray]:
        """Return the numbers of a slot; of what is added, those of the first place."""
        places = slot.places if side else slot.places[:1]
        return {place: self(side, place.shape) for place in places}


def _joined(total: int, ones: np.ndarray, twos: np.ndarray) -> np.ndarray:
    """Return for each position the first that is joined to it, through any others."""
    roots = np.arange(total)
    while True:
        before = roots.copy()
        least = np.minimum(roots[ones], roots[twos])
        np.minimum.at(roots, ones, least)
        np.minimum.at(roots, twos, least)
        roots = roots[roots]
        if np.array_equal(roots, before):
            return roots
