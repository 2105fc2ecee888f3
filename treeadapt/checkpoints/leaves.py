"""What a leaf is in a file, and what comes back of it.

Takes leaves of a tree; gives the record and the array to write, and from an array that
was read the leaf for a target. A Python number is stored as a 0-d array, a typed PRNG
key as its integers; ``Leaf.kind`` says so. Reads and writes no file.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from treeadapt.checkpoints.array_boxes import boxes_here, on_devices
from treeadapt.checkpoints.processes import spans_processes
from treeadapt.checkpoints.record import NUMBER, Leaf, require_form
from treeadapt.errors import CheckpointError
from treeadapt.migrations.box_parts import Box, whole
from treeadapt.migrations.moved_array import read_boxes
from treeadapt.text.names import listing
from treeadapt.trees.arrays import is_array, is_number
from treeadapt.trees.casting import converted, is_lost

_OF_NUMPY = np.ndarray | np.generic


def stored_form(leaf: Any) -> Leaf | None:
    """Return what a file says of a leaf; None if it is not data."""
    if is_number(leaf):
        return Leaf(jax.ShapeDtypeStruct((), np.dtype(type(leaf))), NUMBER)
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return Leaf(data, str(_key_kind(leaf)))
    if is_array(leaf):
        return Leaf(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return None


def may_be_tied(leaf: Any) -> bool:
    """Return whether the same object at two paths is one array, which both share.

    Abstract leaves have no numbers. NumPy's scalars do not change, and ``np.True_`` is
    one object wherever it is.
    """
    return is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct | np.generic)


def to_array(name: str, leaf: Any) -> Any:
    """Return the array to write: of NumPy or JAX, with a dtype that files know.

    Args:
        name: of the leaf, for messages.
        leaf: an array or a number.

    Raises:
        CheckpointError: the leaf has no value here, a mask, a form that files lack, or
            changes in place.
    """
    problem = ""
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        problem = f"has no value: it is a {type(leaf).__name__}"
    elif isinstance(leaf, np.ma.MaskedArray):
        problem = "is a masked array, whose mask would be lost. Fill it first"
    elif isinstance(leaf, jax.Ref):
        problem = "is a Ref, which changes in place. Save its array, ref[...]"
    if problem:
        raise CheckpointError(f"The leaf {listing([name])} {problem}.")
    if is_key(leaf):
        return jax.random.key_data(leaf)
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    require_form(name, array)
    return array


def abstract_form(leaf: Leaf) -> Any:
    """Return what was stored without its value: a number is 0, others are abstract.

    Raises:
        ValueError: JAX does not know this kind of key.
    """
    if leaf.kind == NUMBER:
        return leaf.array.dtype.type().item()
    if not leaf.kind:
        return leaf.array
    data = jax.ShapeDtypeStruct(leaf.array.shape, np.uint32)
    return jax.eval_shape(lambda data: _keys(data, leaf.kind), data)


def restored_form(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of what ``restored`` returns.

    Raises:
        ValueError: JAX does not know this kind of key.
    """
    return leaf.array if leaf.kind == NUMBER else abstract_form(leaf)


def restored(leaf: Leaf, array: Any) -> Any:
    """Return what was stored, without a target: an array of NumPy, or a typed key.

    Args:
        leaf: what the file says of it.
        array: as it was read.

    Raises:
        ValueError: JAX does not know this kind of key.
    """
    if leaf.kind in ("", NUMBER):
        return array if isinstance(array, jax.Array) else np.asarray(array)
    return _keys(np.asarray(array), leaf.kind)


def sharding_to_read(name: str, stated: Leaf, like: Any) -> Any:
    """Return the sharding to read a leaf to, if it is that of the target; or None.

    Args:
        name: of the leaf, for messages.
        stated: what the file says of it.
        like: the target's leaf.

    Raises:
        CheckpointError: the target's sharding does not divide its shape, or has no
            devices.
    """
    sharding = bound_sharding(like)
    if not is_array(like) or isinstance(like, jax.core.Tracer):
        return None
    if sharding is not None:
        text = f"The target's {listing([name])} cannot be sharded"
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, AbstractMesh):
            axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
            raise CheckpointError(
                f"{text}: its mesh is abstract and has no devices. Call load in the "
                f"block of `with jax.set_mesh(mesh):`, where mesh has the axes {axes}."
            )
        try:
            sharding.shard_shape(tuple(like.shape))
        except ValueError as error:
            raise CheckpointError(f"{text}: {error}") from error
    is_same = like.dtype == stated.array.dtype == _narrowed(stated.array.dtype)
    return sharding if is_same else None


def on_meshes(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves of a target, with devices in the place of abstract meshes.

    ``jax.eval_shape`` of arrays on Explicit axes of a mesh gives shardings of abstract
    ones. The mesh that is set is taken, or else the only one of the other leaves, where
    the names and sizes of its axes are the same.

    Args:
        leaves: of the target.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    meshes = {it.mesh: None for it in shardings if isinstance(it, NamedSharding)}
    if not any(isinstance(mesh, AbstractMesh) for mesh in meshes):
        return [*leaves]
    with_devices = [mesh for mesh in meshes if isinstance(mesh, Mesh)]

    def bound(leaf: Any, sharding: Any) -> Any:
        is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        if not is_abstract or not isinstance(sharding, NamedSharding):
            return leaf
        if not isinstance(sharding.mesh, AbstractMesh):
            return leaf
        axes = [*sharding.mesh.shape.items()]
        for candidates in ([jax.sharding.get_mesh()], with_devices):
            fitting = [x for x in candidates if [*x.shape.items()] == axes]
            if len(fitting) == 1:
                kind = sharding.memory_kind
                place = NamedSharding(fitting[0], sharding.spec, memory_kind=kind)
                return leaf.update(sharding=place)
        return leaf

    return [*map(bound, leaves, shardings)]


def boxes_to_read(like: Any, shape: Sequence[int]) -> list[Box]:
    """Return the boxes that ``placed`` reads of an array, for a leaf of the target."""
    sharding = None if is_for_host(like) else bound_sharding(like)
    return boxes_here(sharding, shape)


def is_for_host(like: Any) -> bool:
    """Return whether all of an array is needed, because it is changed on the host."""
    if is_number(like) or is_key(like) or isinstance(like, _OF_NUMPY):
        return True
    return bool(_narrowed(like.dtype) != like.dtype)


def placed(name: str, array: Any, like: Any) -> Any:
    """Turn what was read into a leaf like the target's, where the target's is.

    Args:
        name: of the leaf, for messages.
        array: as it was read.
        like: the target's leaf.

    Raises:
        CheckpointError: the target's dtype cannot hold a value.
    """
    if is_number(like):
        return type(like)(np.asarray(array).item())
    if is_key(like):
        keys = _keys(np.asarray(array), _key_kind(like))
        if not spans_processes(like):
            return jax.device_put(keys, bound_sharding(like))
        return jax.make_array_from_callback(
            keys.shape, like.sharding, lambda index: keys[index]
        )
    sharding, is_of_numpy = bound_sharding(like), isinstance(like, _OF_NUMPY)
    if isinstance(array, jax.Array) and not is_of_numpy and array.dtype == like.dtype:
        is_there = sharding is None or sharding == array.sharding
        return array if is_there else jax.device_put(array, sharding)
    change = functools.partial(_cast, name, dtype=like.dtype)
    if is_for_host(like):
        return change(np.asarray(array))
    if sharding is None:
        (host,) = read_boxes(array, [whole(array.shape)])
        return jax.device_put(change(host))
    return on_devices(array, sharding, like.dtype, change)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed PRNG keys."""
    return is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def is_long(leaf: Any) -> bool:
    """Return whether a leaf is a Python number that does not fit 64 bits."""
    return is_number(leaf) and np.asarray(leaf).dtype != type(leaf)


def as_array(leaf: Any) -> Any:
    """Return a leaf, or a 0-d abstract array for a Python number."""
    return jax.ShapeDtypeStruct((), type(leaf)) if is_number(leaf) else leaf


def bound_sharding(leaf: Any) -> Any:
    """Return the sharding that a leaf is bound to; None where JAX may move it."""
    is_traced = isinstance(leaf, jax.core.Tracer)
    if isinstance(leaf, jax.Array) and not is_traced and not leaf.committed:
        return None  # what is bound to one device refuses to meet what is on several
    return getattr(leaf, "sharding", None)


def _narrowed(dtype: Any) -> Any:
    """Return the dtype that JAX would make of one: of 32 bits for one of 64."""
    return jax.dtypes.canonicalize_dtype(dtype)


def _keys(array: Any, kind: Any) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(array), impl=kind)


def _key_kind(leaf: Any) -> Any:
    """Return the kind of typed PRNG keys, abstract ones too: ``"threefry2x32"``."""
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return kinds[0]


def _cast(name: str, array: Any, dtype: Any) -> Any:
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        cast = converted(array, dtype)
    if is_lost(array, cast):
        raise CheckpointError(
            f"{listing([name])} holds values of {array.dtype} that {dtype} cannot hold."
        )
    return cast
