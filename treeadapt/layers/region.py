"""Regions: some layers of one array that holds a stack of them.

A ``Region`` says which layers these are and along which axes they lie. It has a key,
cuts them out by static slices, and ``put`` puts them in again by one concatenation;
both cost as much as there are runs of layers. What rules decide, what a group of a
partition holds, what ``per_layer`` maps and what state is carried or sharded by are
regions.

``blocks/{4..11}/attn/kernel`` is the key of layers 4 to 11 of the array at
``blocks/attn/kernel``: their numbers come after the stack. The axis is named where it
is not the first: ``blocks/{4..11}@1/attn/kernel``.
See ``stacks`` for which arrays hold layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.layers.keys import read_layers, runs, runs_text
from treeadapt.trees.arrays import is_array, is_placed

_MOST_RUNS = 8  # beyond these, one gather is less work than so many slices


class Along(NamedTuple):
    """One axis along which an array holds layers, and which of them are meant.

    Attributes:
        stack: key of the stack.
        axis: of the stored array, counted from the start.
        numbers: of the layers, ascending.
    """

    stack: str
    axis: int
    numbers: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
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
            >>> Region("blocks/w", (Along("blocks", 0, [4, 5, 6]),)).key
            'blocks/{4..6}/w'
            >>> Region("blocks/w", (Along("blocks", 1, [0, 1, 5]),)).key
            'blocks/{{0..1},{5}}@1/w'
        """
        path = self.path
        for stack, axis, numbers in sorted(self.along, key=lambda each: -len(each[0])):
            layers = runs_text(numbers) + (f"@{axis}" if axis else "")
            below = path[len(stack) :].strip("/")
            path = "/".join(filter(None, (stack, layers, below)))
        return path

    @property
    def numbers(self) -> dict[str, Sequence[int]]:
        """The numbers of the layers, by the key of their stack."""
        return {each.stack: each.numbers for each in self.along}

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many layers it has along each of its axes."""
        return tuple(len(each.numbers) for each in self.along)

    def layers(self) -> Iterator[tuple[int, ...]]:
        """Yield the numbers of each layer, those of the last axis running fastest."""
        return itertools.product(*(each.numbers for each in self.along))

    def of_numbers(self, numbers: Mapping[str, Sequence[int]]) -> Region:
        """Return layers with other numbers of its array.

        Args:
            numbers: by the key of the stack; those of other stacks stay.
        """
        along = [
            each._replace(numbers=tuple(numbers.get(each.stack, each.numbers)))
            for each in self.along
        ]
        return Region(self.path, tuple(along))

    def at(self, places: Sequence[Sequence[int]]) -> Region:
        """Return some of its layers.

        Args:
            places: of these among its layers, along each of its axes.
        """
        pairs = zip(self.along, places, strict=True)
        return self.of_numbers({x.stack: [x.numbers[i] for i in p] for x, p in pairs})

    def on(self, axes: Mapping[str, int]) -> Region:
        """Return the same layers along other axes, by the key of their stack."""
        along = [each._replace(axis=axes[each.stack]) for each in self.along]
        return Region(self.path, tuple(along))

    def shifted(self, rank: int) -> Region:
        """Return the same layers of an array with some axes in front of its own."""
        along = [each._replace(axis=each.axis + rank) for each in self.along]
        return Region(self.path, tuple(along))

    def inside(self, path: str) -> Region:
        """Return the same layers of an array that holds these and no others.

        Args:
            path: of that array.
        """
        along = [each._replace(numbers=range(len(each.numbers))) for each in self.along]
        return Region(path, tuple(along))

    def shape(self, of: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of these layers of an array of a shape."""
        if not self.along:
            return tuple(of)
        shape = list(of)
        for each in self.along:
            shape[each.axis] = len(each.numbers)
        return tuple(shape)

    def take(self, array: Any) -> Any:
        """Return these layers of an array; anything else as it is."""
        if not self.along or not is_array(array):
            return array  # all of it; no update, or a number
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape(array.shape), array.dtype)
        for each in self.along:
            array = _cut_axis(array, each.axis, each.numbers)
        return array


def read_key(key: str) -> Region:
    """Read the name of some layers of an array.

    Returns:
        The layers; an array as a whole at ``key``, if it is not such a name.

    Example:
        >>> read_key("blocks/{4..6}@1/attn/kernel")
        Region(path='blocks/attn/kernel', along=(Along(stack='blocks', axis=1, \
numbers=(4, 5, 6)),))
        >>> read_key("blocks/attn/kernel")
        Region(path='blocks/attn/kernel', along=())
    """
    if "{" not in key:
        return Region(key)
    path: list[str] = []
    along: list[Along] = []
    for segment in key.split("/"):
        if layers := read_layers(segment):
            numbers, axis = layers
            along.append(Along("/".join(path), axis, numbers))
        else:
            path.append(segment)
    return Region("/".join(path), tuple(along)) if along else Region(key)


def _cut_axis(array: Any, axis: int, places: Sequence[int]) -> Any:
    array, entry = _gathered(array, axis)
    ends = list(runs(places))
    if len(ends) > _MOST_RUNS:
        layers = jnp.take(
            array,
            np.asarray(places),
            axis=axis,
            mode="clip",
            unique_indices=True,
            indices_are_sorted=True,
        )
    else:
        parts = [jax.lax.slice_in_dim(array, *each, axis=axis) for each in ends]
        layers = _joined(parts, axis)
    return layers if entry is None else _spread(layers, axis, entry)


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
        (_, _, places), *inner = region.along
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


def _put_axis(
    array: Any, axis: int, parts_in: Sequence[tuple[Sequence[int], Any]]
) -> Any:
    """Return ``array`` with parts put in at some places along one axis."""
    array, entry = _gathered(array, axis)
    parts: list[tuple[int, int, Any]] = []
    for places, part in parts_in:
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
            run = part if whole else jax.lax.slice_in_dim(part, start, stop, axis=axis)
            parts.append((first, end, run))
            start = stop
    pieces, done = [], 0
    for first, end, part in sorted(parts, key=lambda each: each[0]):
        if first > done:
            pieces.append(jax.lax.slice_in_dim(array, done, first, axis=axis))
        pieces.append(part)
        done = end
    if done < array.shape[axis]:
        pieces.append(jax.lax.slice_in_dim(array, done, None, axis=axis))
    whole_array = _joined(pieces, axis)
    return whole_array if entry is None else _respecified(whole_array, axis, entry)
