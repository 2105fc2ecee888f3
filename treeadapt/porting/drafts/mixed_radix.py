"""Maps of indices as axes: digits of a mixed radix.

Takes where the numbers of an array are in another one, by index; gives for each axis
the digits that it is made of. A digit is a run of equal steps within one axis of the
other array: ``(h d)`` is two of them. Along an axis of copies the step is 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Sequence

import numpy as np

COPIES = -1  # in place of an axis, where all values have the same numbers
_MOST_SEGMENTS = 16  # of an axis
_MOST_ENDS = 1_024  # at which a segment of an axis may end; no order of words is one
_LEAST = 0.98  # of the numbers whose place is known, that a map must explain


@dataclasses.dataclass(frozen=True)
class Digit:
    """A factor of an axis.

    Attributes:
        axis: of the other array; ``COPIES`` if it has no such axis.
        step: how far apart its values are along that axis.
        size: how many values it has.
    """

    axis: int
    step: int
    size: int


@dataclasses.dataclass(frozen=True)
class IndexMap:
    """Where an array is within another one.

    Attributes:
        digits: of each axis, the outermost first.
        start: index in the other array of the array's first number.
    """

    digits: tuple[tuple[Digit, ...], ...]
    start: tuple[int, ...]

    def along(self, axis: int) -> list[Digit]:
        """Return the digits along an axis of the other array, the innermost first."""
        digits = (d for each in self.digits for d in each if d.axis == axis)
        return sorted(digits, key=operator.attrgetter("step"))


def fit_map(
    sizes: Sequence[int],
    flat: np.ndarray,
    places: np.ndarray,
    other: Sequence[int],
) -> IndexMap | None:
    """Return the map that some numbers show; None if they do not follow one.

    Args:
        sizes: of the axes of the array.
        flat: flat indices of numbers in it.
        places: flat index of each in the other array.
        other: sizes of the axes of the other array.
    """
    if not len(flat):
        return None
    steps = axis_steps(sizes, flat, places)
    if any(step is None for step in steps):
        return None
    known = [step for step in steps if step is not None]
    coordinates = np.unravel_index(flat, tuple(sizes)) if sizes else ()
    rest = places.astype(np.int64)
    for axis, step in enumerate(known):
        rest -= step[coordinates[axis]]
    start = int(np.median(rest)) if len(rest) else 0
    if np.mean(rest == start) < _LEAST or start < 0:
        return None
    digits = [factored(step, other) for step in known]
    if any(each is None for each in digits):
        return None
    if start >= math.prod(other):
        return None
    first = np.unravel_index(start, tuple(other)) if other else ()
    whole = tuple(each for each in digits if each is not None)
    return IndexMap(whole, tuple(int(each) for each in first))


def axis_steps(
    sizes: Sequence[int], flat: np.ndarray, places: np.ndarray
) -> list[np.ndarray | None]:
    """Return how far places move along each axis, from index 0; None if not known.

    Args:
        sizes: of the axes of the array.
        flat: flat indices of numbers in it.
        places: flat index of each in the other array.
    """
    if (whole := _steps_of_all(sizes, flat, places)) is not None:
        return [*whole]
    coordinates = np.unravel_index(flat, tuple(sizes)) if sizes else ()
    steps = []
    stride = math.prod(sizes)
    for axis, size in enumerate(sizes):
        stride //= size
        steps.append(_steps(size, coordinates[axis], flat, stride, places))
    return steps


def _steps_of_all(
    sizes: Sequence[int], flat: np.ndarray, places: np.ndarray
) -> list[np.ndarray] | None:
    """Return ``axis_steps`` if every number is known, and moves by the sum of them.

    What all numbers show alike, the first ones along each axis show.
    """
    if not (sizes and len(flat)) or len(flat) != math.prod(sizes):
        return None
    grid = np.full(len(flat), -1, np.int64)
    grid[flat] = places
    grid = grid.reshape(tuple(sizes))
    axes = range(len(sizes))
    lines = [
        grid[tuple(slice(None) if n == axis else 0 for n in axes)] for axis in axes
    ]
    steps = [line - line[0] for line in lines]
    summed = functools.reduce(np.add.outer, steps) + lines[0][0]
    return steps if (grid == summed).all() and summed.min() >= 0 else None


def segment_starts(steps: np.ndarray | None, other: Sequence[int]) -> list[int]:
    """Return where an axis is cut so that each segment is made of digits.

    Args:
        steps: along the axis.
        other: sizes of the axes of the other array.

    Returns:
        Where segments begin, 0 first; nothing if the axis is not to be cut, or if no
        cuts help.

    Example:
        >>> segment_starts(np.array([0, 1, 5, 6, 2, 3, 4, 7, 8, 9]), [10])
        [0, 4]
    """
    if steps is None or factored(steps, other) is not None:
        return []
    ends = [*(1 + np.flatnonzero(np.diff(steps) < 0)), len(steps)]
    cuts = [0]
    if len(ends) > _MOST_ENDS:
        return []
    while cuts[-1] < len(steps):
        start = cuts[-1]
        segments = ((end, steps[start:end] - steps[start]) for end in reversed(ends))
        fits = (int(e) for e, part in segments if e > start and _is_made(part, other))
        end = next(fits, None)
        if end is None or len(cuts) > _MOST_SEGMENTS:
            return []
        cuts.append(end)
    return cuts[:-1]


def _is_made(steps: np.ndarray, other: Sequence[int]) -> bool:
    return factored(steps, other) is not None


def _steps(
    size: int, index: np.ndarray, flat: np.ndarray, stride: int, places: np.ndarray
) -> np.ndarray | None:
    """Return how far the place moves from index 0 of an axis to each index.

    Where no number is known, it is taken to move as between those next to it.
    """
    if size == 1:
        return np.zeros(1, np.int64)
    column = flat - index * stride
    base = int(np.bincount(index, minlength=size).argmax())
    is_base = index == base
    order = np.argsort(column[is_base], kind="stable")
    bases, starts = column[is_base][order], places[is_base][order]
    where = np.minimum(np.searchsorted(bases, column), len(bases) - 1)
    is_seen = bases[where] == column
    moved, index = (places - starts[where])[is_seen], index[is_seen]
    order = np.lexsort((moved, index))
    moved, index = moved[order], index[order]
    indices, first, counts = np.unique(index, return_index=True, return_counts=True)
    if len(indices) < max(2, size // 2):
        return None
    medians = moved[first + (counts - 1) // 2]
    steps = np.rint(np.interp(np.arange(size), indices, medians)).astype(np.int64)
    slope = medians[-1] - medians[-2], medians[1] - medians[0]
    after, before = np.arange(indices[-1] + 1, size), np.arange(indices[0])
    steps[after] = medians[-1] + slope[0] * (after - indices[-1])
    steps[before] = medians[0] - slope[1] * (indices[0] - before)
    return steps - steps[0]


def factored(steps: np.ndarray, other: Sequence[int]) -> tuple[Digit, ...] | None:
    """Return the digits that steps along one axis are made of; None if they are not.

    Args:
        steps: from index 0 of the axis to each.
        other: sizes of the axes of the other array.
    """
    digits: list[Digit] = []
    while len(steps) > 1:
        step = int(steps[1])
        if step < 0:
            return None
        differs = np.flatnonzero(steps != np.arange(len(steps)) * step)
        size = int(differs[0]) if len(differs) else len(steps)
        if len(steps) % size:
            return None
        blocks = steps.reshape(-1, size)
        if (blocks - blocks[:, :1] != blocks[:1] - blocks[0, 0]).any():
            return None
        cut = _cut(step, size, other) if step else [Digit(COPIES, 0, size)]
        if cut is None:
            return None
        digits += cut
        steps = blocks[:, 0]
    return tuple(reversed(digits))


def _cut(step: int, size: int, other: Sequence[int]) -> list[Digit] | None:
    """Cut a digit where it goes from one axis of the other array to the next."""
    digits: list[Digit] = []
    while size > 1:
        stride = 1
        for axis in reversed(range(len(other))):
            if step < stride * other[axis]:
                break
            stride *= other[axis]
        else:
            return None
        if step % stride:
            return None
        within = step // stride
        fits = min(size, -(-other[axis] // within))
        if fits < size and (fits * within != other[axis] or size % fits):
            return None
        digits.append(Digit(axis, within, fits))
        step, size = step * fits, size // fits
    return digits


def refined(digit: Digit, cuts: Iterable[int]) -> list[Digit] | None:
    """Cut a digit at more places; return the parts, the outermost first.

    Args:
        digit: of one axis of the array.
        cuts: of one axis of the other array, where another digit starts.

    Example:
        >>> refined(Digit(0, 2, 6), [1, 2, 4])
        [Digit(axis=0, step=4, size=3), Digit(axis=0, step=2, size=2)]
    """
    if digit.axis == COPIES:
        return [digit]
    end, step = digit.step * digit.size, digit.step
    pieces: list[Digit] = []
    for cut in (*sorted(cut for cut in cuts if step < cut < end), end):
        if cut % step:
            return None
        pieces.insert(0, Digit(digit.axis, step, cut // step))
        step = cut
    return pieces
