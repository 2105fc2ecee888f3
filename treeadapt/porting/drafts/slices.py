"""Links of leaves whose numbers repeat, by their slices, which mostly do not.

Of numbers of 16 bits few are there once, and a row of a matrix is: where each slice of
a target along an axis is one of the source, and of no other place, it is known from
where. A vector is known from the numbers of it that it has once, if one other vector
has all of its numbers. The order is not proved by that: the row of it is to give all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from treeadapt.porting.drafts.links import Link, NumberedLeaf
from treeadapt.porting.drafts.numbers import as_dtype, bits, sample

_MOST_NUMBERS = 2**24  # of a side, that are read
_MOST_AXES = 4
_LEAST_NUMBERS = 8  # of a slice
_ALL = 0.98  # of a leaf, whose numbers are known


@dataclasses.dataclass(frozen=True)
class _Slice:
    """Where a slice is.

    Attributes:
        leaf: place of its leaf among those of the source.
        axes: the axis along which it is one, then the others, in order.
        index: along that axis.
    """

    leaf: int
    axes: tuple[int, ...]
    index: int


def with_links_of_slices(
    sources: Sequence[NumberedLeaf],
    targets: Sequence[NumberedLeaf],
    links: Sequence[Link],
    read: Callable[[int, str], np.ndarray],
) -> list[Link]:
    """Return links, with those of slices of targets of which not all is known.

    Args:
        sources: leaves.
        targets: leaves.
        links: by the numbers that are there once.
        read: the array of a side, and a path.
    """
    known: Counter[str] = Counter()
    for link in links:
        known[link.ends[1].path] += len(link.flats[1])
    vague = [t for t in targets if known[t.path] < _ALL * len(sample(t.shape))]
    more = [*_links_of_slices(sources, vague, read)]
    done = {link.ends[1].path for link in more}
    return [*(link for link in links if link.ends[1].path not in done), *more]


def _links_of_slices(
    sources: Sequence[NumberedLeaf],
    targets: Sequence[NumberedLeaf],
    read: Callable[[int, str], np.ndarray],
) -> Iterator[Link]:
    """Yield links of targets whose slices, or numbers, are those of sources."""
    sides = sources, targets
    sizes = (sum(int(np.prod(leaf.shape)) for leaf in side) for side in sides)
    if not targets or max(sizes) > _MOST_NUMBERS:
        return
    arrays = [[read(n, leaf.path) for leaf in side] for n, side in enumerate(sides)]
    olds, news = _alike(arrays)
    vectors = _once(
        (np.sort(array).tobytes(), n)
        for n, array in enumerate(olds)
        if array is not None and array.ndim == 1
    )
    slices = _once(_slices(olds))
    for leaf, array in zip(targets, news, strict=True):
        if array is not None and array.ndim == 1:
            place = vectors.get(np.sort(array).tobytes())
            if place is not None:
                both = olds[place], array
                yield from _of_vectors((sources[place], leaf), both)
        elif array is not None:
            yield from _of_slices(sources, leaf, array, slices)


def _alike(arrays: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray | None]]:
    """Return the bits of arrays, floats as those of the smallest dtype among them."""
    floats = {
        array.dtype
        for array in itertools.chain(*arrays)
        if jnp.issubdtype(array.dtype, jnp.floating)
    }
    least = min(floats, key=lambda dtype: dtype.itemsize, default=None)

    def bits_of(array: np.ndarray) -> np.ndarray | None:
        is_float = array.dtype in floats
        flat = bits(as_dtype(array, least) if is_float else array)
        is_small = 1 <= array.ndim <= _MOST_AXES
        return None if flat is None or not is_small else flat.reshape(array.shape)

    return [[*map(bits_of, side)] for side in arrays]


def _once(pairs: Iterator[tuple[object, object]]) -> dict:
    """Return what is under each key, without keys that are there several times."""
    found: dict = {}
    for key, value in pairs:
        found[key] = None if key in found else value
    return {key: value for key, value in found.items() if value is not None}


def _keys(array: np.ndarray, axes: Sequence[int]) -> Iterator[tuple[object, ...]]:
    """Yield what tells the slices of an array along the first of some axes apart."""
    turned = np.ascontiguousarray(array.transpose(axes))
    for part in turned:
        yield part.shape, array.dtype.str, part.tobytes()


def _slices(arrays: Sequence[np.ndarray | None]) -> Iterator[tuple[object, _Slice]]:
    for number, array in enumerate(arrays):
        if array is None or array.ndim == 1:
            continue
        for axes in itertools.permutations(range(array.ndim)):
            if array.size >= _LEAST_NUMBERS * array.shape[axes[0]]:
                for index, key in enumerate(_keys(array, axes)):
                    yield key, _Slice(number, axes, index)


def _of_vectors(
    ends: tuple[NumberedLeaf, NumberedLeaf], arrays: Sequence[np.ndarray]
) -> Iterator[Link]:
    """Yield the link of vectors that have the same numbers, by those that are once."""
    found = [np.unique(x, return_index=True, return_counts=True) for x in arrays]
    old, new = (places[counts == 1] for _, places, counts in found)
    if len(new):
        yield Link(ends, (old, new))


def _of_slices(
    sources: Sequence[NumberedLeaf],
    leaf: NumberedLeaf,
    array: np.ndarray,
    slices: Mapping[object, _Slice],
) -> Iterator[Link]:
    """Yield the links of a leaf each of whose slices along an axis is of one source."""
    flat = sample(array.shape)
    at = np.unravel_index(flat, array.shape)
    for axis in range(array.ndim):
        others = [other for other in range(array.ndim) if other != axis]
        found = [slices.get(key) for key in _keys(array, (axis, *others))]
        known = [each for each in found if each is not None]
        if len(known) < len(found) or len({each.axes for each in known}) > 1:
            continue
        axes = known[0].axes
        owners = np.array([each.leaf for each in known])[at[axis]]
        indices = np.array([each.index for each in known])[at[axis]]
        for number in dict.fromkeys(each.leaf for each in known):
            own = owners == number
            places = [np.empty(0, np.int64)] * array.ndim
            for new, old in zip((axis, *others), axes, strict=True):
                places[old] = (indices if new == axis else at[new])[own]
            source = sources[number]
            there = np.ravel_multi_index(tuple(places), source.shape)
            yield Link((source, leaf), (there, flat[own]))
        return
