"""Cuts: some layers of the arrays in a flat dict, and the way back.

``divide`` gives each label a group: the keys of its own flat dict, and for each the
piece of an array that it stands for. ``take`` cuts the pieces out by static slices,
``put_back`` puts them in again. Both cost as much as there are runs of layers, and a
group of whole arrays costs nothing.
See ``selection.stacks`` for what layers are, ``partition`` for what runs on groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.arrays import is_array, is_placed
from treeadapt.errors import PathCollisionError
from treeadapt.selection.stacks import PerLayer
from treeadapt.selection.whole import Cut, WholeTree
from treeadapt.slices import boxes, runs
from treeadapt.transforms.flat import FlatDict, by_half

L = TypeVar("L", bound=Hashable)

_MOST_RUNS = 8  # beyond these, one gather is less work than so many slices


class Piece(NamedTuple):
    """Some layers of one array of a flat dict.

    Attributes:
        path: of the array.
        axes: along which it holds layers.
        places: of the layers, ascending, along each axis.
    """

    path: str
    axes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]


#: The keys of a group's flat dict; None where one is the key of a whole array.
Group = dict[str, Piece | None]


def divide(
    whole: WholeTree, paths: Sequence[str], answers: Sequence[Any]
) -> dict[Any, Group]:
    """Group the arrays of a flat dict, or pieces of them, by label.

    Args:
        whole: the caller's tree, which learns the names of the pieces.
        paths: keys of the flat dict.
        answers: a label for each, or ``PerLayer`` labels.

    Raises:
        PathCollisionError: a piece has the name of another leaf.
    """
    groups: dict[Any, Group] = {}
    known = frozenset(paths)
    for path, answer in zip(paths, answers, strict=True):
        if not isinstance(answer, PerLayer):
            groups.setdefault(answer, {})[path] = None
            continue
        axes = tuple(axis.axis for axis in answer.axes)
        sizes = tuple(map(len, answer.numbers))
        for label, found in boxes(answer.values, sizes).items():
            for places in found:
                numbers = tuple(
                    tuple(map(own.__getitem__, chosen))
                    for own, chosen in zip(answer.numbers, places, strict=True)
                )
                key = answer.key_of(numbers)
                if key in known:
                    raise PathCollisionError(
                        f"Some layers of {answer.path!r} would be called {key!r}, "
                        "which is the path of another leaf. Rename that leaf."
                    )
                whole.cuts[key] = Cut(answer.path, numbers)
                groups.setdefault(label, {})[key] = Piece(path, axes, places)
    return groups


def take(flat: Any, group: Group) -> Any:
    """Return the flat dict of a group, half by half for lookahead."""

    def of_half(half: FlatDict) -> FlatDict:
        return {
            key: half[key] if piece is None else cut(half[piece.path], piece)
            for key, piece in group.items()
        }

    return by_half(of_half, flat)


def put_back(
    part: Mapping[str, Any], group: Group, rest: Callable[[str], Any]
) -> FlatDict:
    """Return the arrays of which a group has some layers, with these put in.

    Args:
        part: the flat dict of the group, or of several groups together.
        group: what its keys stand for.
        rest: gives the array, by path, that has all other layers; None if it has none,
            and then the result has none.
    """
    found = {key: leaf for key, leaf in part.items() if group.get(key) is None}
    pieces: dict[str, list[tuple[Piece, Any]]] = {}
    for key, piece in group.items():
        if piece is not None:
            pieces.setdefault(piece.path, []).append((piece, part[key]))
    return found | {path: put(rest(path), held) for path, held in pieces.items()}


def cut(array: Any, piece: Piece) -> Any:
    """Return a piece of an array; anything else as it is."""
    if not is_array(array):
        return array  # no update, or a number
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = list(array.shape)
        for axis, places in zip(piece.axes, piece.places, strict=True):
            shape[axis] = len(places)
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)
    for axis, places in zip(piece.axes, piece.places, strict=True):
        array = _cut_axis(array, axis, places)
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


def put(rest: Any, held: Sequence[tuple[Piece, Any]]) -> Any:
    """Return an array with pieces put in, sharded as it was."""
    if not is_array(rest):
        return rest
    with jax.numpy_dtype_promotion("standard"):  # groups may differ in dtypes
        dtype = jnp.result_type(rest, *(array for _, array in held))
    array = rest if rest.dtype == dtype else rest.astype(dtype)
    (axis, *inner), first = held[0][0].axes, []
    for piece, part in held:
        part = part if part.dtype == dtype else part.astype(dtype)
        if inner:
            own = Piece(piece.path, piece.axes[1:], piece.places[1:])
            part = put(_cut_axis(array, axis, piece.places[0]), [(own, part)])
            array = _put_axis(array, axis, [(piece.places[0], part)])
        else:
            first.append((piece.places[0], part))
    array = _put_axis(array, axis, first) if first else array
    if isinstance(array, jax.core.Tracer) or not is_placed(rest):
        return array  # where the pieces are, if the rest may be anywhere
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
