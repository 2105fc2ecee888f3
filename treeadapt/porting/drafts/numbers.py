"""Where each number of the target is in the source, found by its bits.

Of a large leaf only lines along its axes are looked up, at a few places; the whole of
it is compared when the table runs. A number that the source has twice says nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from treeadapt.porting.drafts.rows import template_of

#: Leaves with at most this many numbers are looked up whole.
WHOLE = 2**15
_LINES = 4  # along each axis of a larger one
_CHUNK = 2**22
_LEAST_BITS = 64  # of what equal arrays have in common


@dataclasses.dataclass(frozen=True)
class Origins:
    """Numbers of one leaf, and where they are in the source.

    Attributes:
        flat: flat indices of the numbers whose place is known.
        leaves: number of the leaf of the source, for each.
        places: flat index in that leaf, for each.
        total: how many numbers were looked up.
        absent: how many of them the source has nowhere.
    """

    flat: np.ndarray
    leaves: np.ndarray
    places: np.ndarray
    total: int
    absent: int

    @property
    def share(self) -> float:
        """How many of the numbers that were looked up are known, from 0 to 1."""
        return len(self.flat) / self.total if self.total else 0.0


@dataclasses.dataclass(frozen=True)
class Lookup:
    """What looking the numbers of a target up in a source gives.

    Attributes:
        origins: where they are, by path of the target.
        constant: whether all numbers of a leaf are one, by path of the target. Of one
            number are those that are 0 or 1, as all are whose paths differ in numbers
            only.
        first_equal: for each leaf of the source, the index of the first one that has
            the same numbers: its own, mostly.
    """

    origins: dict[str, Origins]
    constant: dict[str, bool]
    first_equal: list[int]

    def varied(self) -> dict[str, Origins]:
        """Return where the numbers are of leaves that are not constant."""
        return {p: own for p, own in self.origins.items() if not self.constant[p]}


@functools.lru_cache(maxsize=1_024)
def sample(shape: tuple[int, ...]) -> np.ndarray:
    """Return flat indices to look up, the same for all leaves of a shape."""
    size = int(np.prod(shape, dtype=np.int64))
    if size <= WHOLE:
        return np.arange(size)
    random = np.random.default_rng(0)
    lines = []
    for axis, length in enumerate(shape):
        for _ in range(_LINES):
            point = [np.full(length, random.integers(n)) for n in shape]
            point[axis] = np.arange(length)
            lines.append(np.ravel_multi_index(tuple(point), shape))
    return np.unique(np.concatenate(lines))


def bits(array: np.ndarray) -> np.ndarray | None:
    """Return numbers as unsigned integers; None of those that have no such form."""
    if array.dtype.itemsize not in (1, 2, 4, 8) or array.dtype.kind in "OUSMm":
        return None
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def castable(old: Any, new: Any) -> bool:
    """Return whether numbers of one dtype may have become those of another one."""
    if old == new:
        return True
    both = (jnp.floating, jnp.complexfloating, jnp.integer)
    return any(jnp.issubdtype(old, k) and jnp.issubdtype(new, k) for k in both)


def as_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return numbers in another dtype, rounded; too large ones are infinite."""
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def is_constant(array: np.ndarray) -> bool:
    """Return whether all numbers are one, as far as they are looked up."""
    numbers = bits(array)
    if numbers is None or not len(numbers):
        return True
    return _are_one(numbers[sample(array.shape)])


def _are_one(numbers: np.ndarray) -> bool:
    return bool((numbers == numbers[:1]).all())


def find_origins(
    source: Sequence[Callable[[], np.ndarray]],
    dtypes: Sequence[Any],
    target: Mapping[str, Callable[[], np.ndarray]],
) -> Lookup:
    """Look the numbers of a target up in a source.

    Args:
        source: give the arrays, one at a time.
        dtypes: of them.
        target: give the arrays, by path.
    """
    wanted: dict[Any, list[tuple[str, np.ndarray, np.ndarray]]] = {}
    constant: dict[str, bool] = {}
    singles: dict[object, dict[str, Any]] = {}  # by their names without numbers
    for path, read in target.items():
        array = read()
        numbers = bits(array)
        if numbers is None or not len(numbers):
            constant[path] = True
            continue
        flat = sample(array.shape)
        seen = numbers[flat]
        constant[path] = _are_one(seen)
        if array.size == 1:
            singles.setdefault(template_of(path), {})[path] = array.item()
        wanted.setdefault(array.dtype, []).append((path, flat, seen))
    for numbers_of in singles.values():
        differ = len({*numbers_of.values()}) > 1
        if differ or not {*numbers_of.values()} <= {0, 1}:
            constant |= dict.fromkeys(numbers_of, False)
    tables = {
        dtype: _Table(_distinct(np.concatenate([seen for *_, seen in leaves])))
        for dtype, leaves in wanted.items()
    }
    first_equal = list(range(len(source)))
    seen_leaves: dict[Any, int] = {}
    for number, (read, dtype) in enumerate(zip(source, dtypes, strict=True)):
        array = read()
        source_numbers = bits(array)
        if source_numbers is None:
            continue
        seen = source_numbers[sample(array.shape)]
        key = array.shape, array.dtype, seen.tobytes()
        if not _are_one(seen) and seen_leaves.setdefault(key, number) != number:
            first_equal[number] = seen_leaves[key]
            continue
        for new, table in tables.items():
            if castable(dtype, new):
                table.add(number, array, new)
    origins = {}
    for dtype, leaves in wanted.items():
        tables[dtype].add_waiting()
        for path, flat, seen in leaves:
            origins[path] = tables[dtype].look_up(flat, seen)
    return Lookup(origins, constant, first_equal)


_BY_CHANCE = 0.37  # of the numbers of a leaf, at most, the source has once
_FEW = 4  # numbers that may be equal by chance


def have_numbers_in_common(origins: Iterable[Origins]) -> bool:
    """Return whether more numbers of leaves are in the source than by chance.

    Two models that have nothing in common but a dtype of few bits have many numbers
    that the source has once: on average ``n / e**n`` of them, 1 / e at most.
    """
    sums = [(len(each.flat), each.total) for each in origins]
    sums.append((sum(known for known, _ in sums), sum(total for _, total in sums)))
    deviation = (_BY_CHANCE * (1 - _BY_CHANCE)) ** 0.5
    return any(
        total and known >= _BY_CHANCE * total + 4 * deviation * total**0.5
        for known, total in sums
    )


def contents(arrays: Sequence[np.ndarray], dtype: Any) -> bytes:
    """Return what arrays have equal if their numbers are, in whatever order.

    It is empty for numbers of another kind than ``dtype``, and for very few.
    """
    if not all(castable(array.dtype, dtype) for array in arrays):
        return b""
    numbers = bits(np.concatenate([as_dtype(a, dtype).reshape(-1) for a in arrays]))
    if numbers is None:
        return b""
    numbers = np.sort(numbers)
    if np.count_nonzero(numbers[1:] != numbers[:-1]) < _FEW - 1:
        return b""
    return hashlib.sha256(numbers.tobytes()).digest()


def known_in_all(every: Sequence[Origins], *, is_wide: bool) -> Origins:
    """Return what is known of a leaf in all calls of a function, and the same.

    Args:
        every: of each call.
        is_wide: whether all numbers differ. Of 16 bits some are unknown in one call,
            and what no other call contradicts counts.
    """
    first, *others = every
    for other in others:
        flat, leaves, places = (
            np.concatenate([getattr(each, name) for each in (first, other)])
            for name in ("flat", "leaves", "places")
        )
        order = np.argsort(flat, kind="stable")
        flat, leaves, places = flat[order], leaves[order], places[order]
        is_twice, is_same = np.zeros((2, len(flat)), bool)
        is_twice[:-1] = flat[1:] == flat[:-1]
        is_same[:-1] = (leaves[1:] == leaves[:-1]) & (places[1:] == places[:-1])
        is_once = ~is_twice & ~np.roll(is_twice, 1)
        is_kept = (is_twice & is_same) | (is_once & (not is_wide))
        flat, leaves, places = flat[is_kept], leaves[is_kept], places[is_kept]
        absent = max(first.absent, other.absent)
        first = Origins(flat, leaves, places, first.total, absent)
    return first


def filled_box(is_in: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the box that holds what is in it and nothing else; empty if none does.

    Example:
        >>> filled_box(np.array([[0, 1, 1], [0, 1, 1], [0, 0, 0]], bool))
        ((0, 2), (1, 3))
    """
    if not is_in.ndim:
        return ()
    box = tuple(
        (int(every.min()), int(every.max()) + 1)
        for every in np.nonzero(is_in)
        if len(every)
    )
    is_box = len(box) == is_in.ndim and is_in[tuple(slice(a, b) for a, b in box)].all()
    return box if is_box else ()


def fitted_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float] | None:
    """Return ``a`` and ``b`` of ``y = a * x + b``, short numbers; None without such.

    Args:
        x: in order.
        y: in order; if ``a`` is negative, the other way around.

    Example:
        >>> x = np.arange(1, 9, dtype=np.float32)
        >>> fitted_line(x, x / np.float32(4)), fitted_line(x, 2 * x + 1)
        ((0.25, 0.0), (2.0, 1.0))
        >>> fitted_line(x, x**2)
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    if len(x) < 2 or not x[0] < x[-1] or not y[0] < y[-1]:
        return None
    for sign in (1, -1):
        ends = y[::sign][[0, -1]]
        a = (ends[1] - ends[0]) / (x[-1] - x[0])
        b = ends[0] - a * x[0]
        for digits in range(1, 10):
            slope = float(f"{a:.{digits}g}")
            for shift in (0.0, float(f"{b:.{digits}g}")):
                near = 3e-7 * (np.abs(slope * x) + abs(shift))
                if (np.abs(slope * x + shift - y[::sign]) <= near).all():
                    return slope, shift
    return None


def exact_factor(near: float, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return a factor with all the digits that products in float32 need.

    Args:
        near: a short number that is the factor but for some units in the last place.
        pairs: arrays, and what they were multiplied to.

    Example:
        >>> x = np.arange(1, 99, dtype=np.float32)
        >>> exact_factor(3.162278, [(x, x * np.float32(10**0.5))])
        3.1622777
        >>> exact_factor(0.25, [(x, x / np.float32(4))])
        0.25
    """
    pairs = [(one, two) for one, two in pairs if one.dtype == np.float32]
    ulp = np.spacing(np.float32(near))
    numbers = [np.float32(near) + ulp * steps for steps in (0, -1, 1, -2, 2, -3, 3)]

    def num_equal(number: np.float32) -> int:
        return sum(int(np.sum(one * number == two)) for one, two in pairs)

    best = max(numbers, key=num_equal)
    return near if best == numbers[0] else float(str(best))


def is_symmetric(array: np.ndarray) -> bool:
    """Return whether two axes of an array can change places, and no number does."""
    pairs = itertools.combinations(range(array.ndim), 2)
    return any(
        array.shape[a] == array.shape[b] > 1
        and np.array_equal(bits(array), bits(array.swapaxes(a, b)))  # type: ignore[arg-type]
        for a, b in pairs
    )


def is_telling(array: np.ndarray) -> bool:
    """Return whether no other order gives an array: numbers, or parts, are distinct.

    Of one byte most numbers of an array are there several times, and its rows and
    columns are not.
    """
    numbers = bits(array)
    if numbers is None:
        return False
    if len(np.unique(numbers)) > max(1, len(numbers) // 2):
        return True
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    parts = (np.moveaxis(array, axis, 0) for axis in axes)
    counts = ((len({part.tobytes() for part in each}), len(each)) for each in parts)
    are_distinct = len(axes) > 1 and all(some == every for some, every in counts)
    return are_distinct and is_beyond_chance(array) and not is_symmetric(array)


def is_beyond_chance(array: np.ndarray) -> bool:
    """Return whether so much is in an array that no other is equal by chance."""
    numbers = bits(array)
    if numbers is None or not len(numbers):
        return False
    return len(numbers) * math.log2(len(np.unique(numbers))) >= _LEAST_BITS


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """Return numbers in order, each once; ``numpy.unique`` hashes many, and is slow."""
    numbers = np.sort(numbers)
    return numbers[np.insert(numbers[1:] != numbers[:-1], 0, [True] * len(numbers[:1]))]


def _as_bits(array: np.ndarray, dtype: Any) -> np.ndarray:
    numbers = bits(as_dtype(array, dtype))
    assert numbers is not None  # a table is for a dtype that has them
    return numbers


class _Table:
    """The numbers that are looked up, and where the source has them."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self._counts = np.zeros(len(values), np.int64)
        self._leaves = np.zeros(len(values), np.int32)
        self._places = np.zeros(len(values), np.int64)
        self._waiting: list[tuple[int, np.ndarray]] = []  # small leaves
        self._num_waiting = 0  # numbers of them

    def add(self, number: int, array: np.ndarray, dtype: Any) -> None:
        """Look a leaf of the source through; a small one together with the next ones.

        A call of NumPy costs more than the few numbers of one.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        if len(flat) <= WHOLE:
            self._waiting.append((number, _as_bits(flat, dtype)))
            self._num_waiting += len(flat)
            if self._num_waiting > _CHUNK:
                self.add_waiting()
            return
        for start in range(0, len(flat), _CHUNK):
            numbers = _as_bits(flat[start : start + _CHUNK], dtype)
            places = np.arange(start, start + len(numbers))
            self._add(numbers, np.full(len(numbers), number), places)

    def add_waiting(self) -> None:
        """Look the leaves through that were small."""
        if not self._waiting:
            return
        own, arrays = zip(*self._waiting, strict=True)
        lengths = [*map(len, arrays)]
        starts = np.cumsum([0, *lengths[:-1]])
        places = np.arange(sum(lengths)) - np.repeat(starts, lengths)
        self._add(np.concatenate(arrays), np.repeat(own, lengths), places)
        self._waiting, self._num_waiting = [], 0

    def _add(self, numbers: np.ndarray, leaves: np.ndarray, places: np.ndarray) -> None:
        where = np.searchsorted(self._values, numbers)
        where[where == len(self._values)] = 0
        hits = np.flatnonzero(self._values[where] == numbers)
        where = where[hits]
        np.add.at(self._counts, where, 1)
        self._leaves[where] = leaves[hits]
        self._places[where] = places[hits]

    def look_up(self, flat: np.ndarray, values: np.ndarray) -> Origins:
        where = np.searchsorted(self._values, values)
        counts = self._counts[where]
        is_known = counts == 1
        where = where[is_known]
        return Origins(
            flat[is_known],
            self._leaves[where],
            self._places[where],
            total=len(counts),
            absent=int((counts == 0).sum()),
        )
