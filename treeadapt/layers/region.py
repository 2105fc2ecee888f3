"""Regions: some layers of one array that holds a stack of them.

A ``Region`` says which layers these are and along which axes they lie. It has a name,
cuts them out by static slices, and puts them in again by one concatenation; both cost
as much as there are runs of layers. What rules decide, what a group of a partition
holds and what ``per_layer`` maps are regions.
See ``stacks`` for which arrays hold layers, ``keys`` for the names.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.arrays import is_array, is_placed
from treeadapt.layers.keys import runs, slice_key

_MOST_RUNS = 8  # beyond these, one gather is less work than so many slices


class Along(NamedTuple):
    """One axis along which an array holds layers, and which of them are meant.

    Attributes:
        stack: key of the stack.
        axis: of the stored array, counted from the start.
        size: the number of layers that the array holds.
        numbers: of the layers, ascending.
    """

    stack: str
    axis: int
    size: int
    numbers: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Region:
    """Some layers of one array; all of it, if it is along no axis.

    Attributes:
        path: of the array.
        along: which layers along each axis that holds some, the outermost first.
    """

    path: str
    along: tuple[Along, ...] = ()

    @property
    def key(self) -> str:
        """The name of the layers.

        Example:
            >>> Region("blocks/w", (Along("blocks", 0, 12, [4, 5, 6]),)).key
            'blocks/{4..6}/w'
        """
        return slice_key(self.path, {each.stack: each.numbers for each in self.along})

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many layers it has along each of its axes."""
        return tuple(len(each.numbers) for each in self.along)

    def layers(self) -> Iterator[tuple[int, ...]]:
        """Yield the numbers of each layer, those of the last axis running fastest."""
        return itertools.product(*(each.numbers for each in self.along))

    def of_numbers(self, numbers: Sequence[Sequence[int]]) -> Region:
        """Return the layers of its array that have other numbers.

        Args:
            numbers: of the layers, along each of its axes.
        """
        pairs = zip(self.along, numbers, strict=True)
        along = [each._replace(numbers=tuple(chosen)) for each, chosen in pairs]
        return Region(self.path, tuple(along))

    def at(self, places: Sequence[Sequence[int]]) -> Region:
        """Return some of its layers.

        Args:
            places: of these among its layers, along each of its axes.
        """
        pairs = zip(self.along, places, strict=True)
        return self.of_numbers([[each.numbers[i] for i in own] for each, own in pairs])

    def restrict(self, other: Region) -> Region:
        """Return another region of its array, with its own numbers where it has any.

        Args:
            other: along other axes, perhaps.
        """
        numbers = {each.axis: each.numbers for each in self.along}
        return other.of_numbers(
            [numbers.get(each.axis, each.numbers) for each in other.along]
        )

    def inside(self, path: str) -> Region:
        """Return the same layers of an array that holds these and no others.

        Args:
            path: of that array.
        """
        along = [
            each._replace(size=size, numbers=range(size))
            for each, size in zip(self.along, self.sizes, strict=True)
        ]
        return Region(path, tuple(along))

    def shape(self, of: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of these layers of an array of a shape."""
        shape = list(of)
        for each in self.along:
            shape[each.axis] = len(each.numbers)
        return tuple(shape)

    def take(self, array: Any) -> Any:
        """Return these layers of an array; anything else as it is."""
        if not is_array(array):
            return array  # no update, or a number
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape(array.shape), array.dtype)
        for each in self.along:
            array = _cut_axis(array, each.axis, each.numbers)
        return array


def _cut_axis(array: Any, axis: int, places: Sequence[int]) -> Any:
    array, entry = _gathered(array, axis)
    ends = list(runs(places))
    if len(ends) > _MOST_RUNS:
        found = jnp.take(
            array,
            np.asarray(places),
            axis=axis,
            mode="clip",
            unique_indices=True,
            indices_are_sorted=True,
        )
    else:
        parts = [jax.lax.slice_in_dim(array, *each, axis=axis) for each in ends]
        found = _joined(parts, axis)
    return found if entry is None else _spread(found, axis, entry)


def _gathered(array: Any, axis: int) -> tuple[Any, Any]:
    """Return an array whose axis is not sharded, and how it was.

    On a mesh with Explicit axes, JAX slices a sharded axis only into parts that the
    mesh divides. Elsewhere the compiler decides, and nothing is done.
    """
    sharding = jax.typeof(array).sharding
    entry = [*sharding.spec, *[None] * array.ndim][axis]
    if entry is None:
        return array, None
    return _respecified(array, axis, None), entry


def _spread(array: Any, axis: int, entry: Any) -> Any:
    """Shard an axis again, if the mesh divides it."""
    names = entry if isinstance(entry, tuple) else (entry,)
    mesh = jax.typeof(array).sharding.mesh
    if array.shape[axis] % math.prod(mesh.shape[name] for name in names):
        return array
    return _respecified(array, axis, entry)


def _respecified(array: Any, axis: int, entry: Any) -> Any:
    sharding = jax.typeof(array).sharding
    entries = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    entries[axis] = entry
    spec = jax.sharding.PartitionSpec(*entries)
    return jax.sharding.reshard(array, sharding.update(spec=spec))


def _joined(arrays: Sequence[Any], axis: int) -> Any:
    return arrays[0] if len(arrays) == 1 else jax.lax.concatenate(arrays, axis)


def put(rest: Any, parts: Sequence[tuple[Region, Any]]) -> Any:
    """Return an array with layers put in, sharded as it was.

    Args:
        rest: the array; what is not one comes back as it is.
        parts: regions of it, all along the same axes, and the layers of each.
    """
    if not is_array(rest):
        return rest
    with jax.numpy_dtype_promotion("standard"):  # groups may differ in dtypes
        dtype = jnp.result_type(rest, *(part for _, part in parts))
    array = rest if rest.dtype == dtype else rest.astype(dtype)
    axis, outermost = parts[0][0].along[0].axis, []
    for region, part in parts:
        part = part if part.dtype == dtype else part.astype(dtype)
        (_, _, _, places), *inner = region.along
        if inner:
            within = Region(region.path, tuple(inner))
            part = put(_cut_axis(array, axis, places), [(within, part)])
            array = _put_axis(array, axis, [(places, part)])
        else:
            outermost.append((places, part))
    array = _put_axis(array, axis, outermost) if outermost else array
    if isinstance(array, jax.core.Tracer) or not is_placed(rest):
        return array  # where the parts are, if the rest may be anywhere
    # Not compiled, JAX gathers what it puts together along a sharded axis.
    same = rest.sharding == array.sharding
    return array if same else jax.device_put(array, rest.sharding)


def _put_axis(array: Any, axis: int, held: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """Return ``array`` with parts put in at some places along one axis."""
    array, entry = _gathered(array, axis)
    parts: list[tuple[int, int, Any]] = []
    for places, part in held:
        part, _ = _gathered(part, axis)
        ends = list(runs(places))
        if len(ends) > _MOST_RUNS:
            index = (*[slice(None)] * axis, np.asarray(places))
            array = array.at[index].set(
                part, unique_indices=True, indices_are_sorted=True
            )
            continue
        start = 0
        for first, end in ends:
            stop = start + end - first
            whole = len(ends) == 1
            own = part if whole else jax.lax.slice_in_dim(part, start, stop, axis=axis)
            parts.append((first, end, own))
            start = stop
    pieces, done = [], 0
    for first, end, part in sorted(parts, key=lambda each: each[0]):
        if first > done:
            pieces.append(jax.lax.slice_in_dim(array, done, first, axis=axis))
        pieces.append(part)
        done = end
    if done < array.shape[axis]:
        pieces.append(jax.lax.slice_in_dim(array, done, None, axis=axis))
    found = _joined(pieces, axis)
    return found if entry is None else _respecified(found, axis, entry)
