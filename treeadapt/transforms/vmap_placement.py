"""Placing: state and updates of stacks stay on the devices of their params.

``zeros_like`` keeps the sharding of an array; under ``jax.vmap`` it sees no array, and
what it makes is on the first device. And over Explicit axes of a mesh, ``vmap`` wants
all arrays sharded alike along the axis of the layers. Here ``init`` makes state in its
place, ``update`` leaves it there, and inside them the axes of a mesh are Auto.
See ``per_layer`` for what is mapped, ``sharding.state`` for states as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import optax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)

from treeadapt.layers.region import Along
from treeadapt.transforms.flat import FlatDict
from treeadapt.transforms.state_map import fast_params, owners
from treeadapt.trees import _jax
from treeadapt.trees.arrays import is_array, is_placed

#: Paths of leaves with the same stacks, and the axes along which each holds layers.
AxesByPath = Mapping[str, tuple[Along, ...]]


def in_place(
    tx: optax.GradientTransformationExtraArgs, part: AxesByPath
) -> optax.GradientTransformationExtraArgs:
    """Return ``tx``, whose state and updates are where the params are.

    Args:
        tx: runs on the layers of a flat dict.
        part: the keys of that dict.
    """

    def init(params: Any) -> Any:
        leaves, like = jax.tree.leaves(params), fast_params(params)
        mesh, placed = _explicit_mesh(leaves), list(filter(is_placed, leaves))
        if mesh is None and not placed:
            return tx.init(params)
        run, shapes = tx.init, jax.eval_shape(tx.init, _shapes_of(params))
        if not jax.tree.leaves(shapes):
            return shapes  # a state without arrays
        if mesh is not None:
            types = {path: _of_type(leaf, mesh) for path, leaf in like.items()}
            run = _on_auto_axes(run, mesh, _of_state(shapes, like, types, part))
        if not placed or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return run(params)
        shardings = {p: leaf.sharding for p, leaf in like.items() if is_placed(leaf)}
        targets = _of_state(shapes, like, shardings, part)
        if len({frozenset(leaf.sharding.device_set) for leaf in placed}) > 1:
            return jax.device_put(run(params), targets)
        # Compiled, so that no device ever holds more than its part: under ``vmap``
        # ``zeros_like`` keeps no sharding (JAX 0.10).
        return jax.jit(run, out_shardings=targets)(params)

    def update(
        updates: FlatDict, state: Any, params: Any | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        mesh = _explicit_mesh(jax.tree.leaves((updates, state, params)))
        if mesh is None:
            new = tx.update(updates, state, params, **extra)
            return jax.tree.map(_put_next_to, new, _counterparts(new, updates, state))
        is_of_arrays = {n: all(map(is_array, jax.tree.leaves(extra[n]))) for n in extra}
        arrays = {name: value for name, value in extra.items() if is_of_arrays[name]}

        def run(updates: Any, state: Any, params: Any, arrays: Any) -> Any:
            return tx.update(updates, state, params, **(extra | arrays))

        args = (updates, state, params, arrays)
        old = _counterparts(jax.eval_shape(run, *_shapes_of(args)), updates, state)
        targets = jax.tree.map(lambda leaf: _of_type(leaf, mesh), old)
        return _on_auto_axes(run, mesh, targets)(*args)

    return optax.GradientTransformationExtraArgs(init, update)


def flat_key(keys: Any) -> Any:
    """Return the key of a leaf in the flat dict that holds it; None if none does."""
    return getattr(keys[-1], "key", None) if keys else None


def axes_in_leaf(axes: Sequence[int], of_param: int, rank: int) -> list[int]:
    """Return the axes of the layers in a leaf of a state that belongs to a param.

    With the axes of the param, or more in front of them, it holds layers where the
    param does; with fewer, along its first axes.

    Args:
        axes: those of the param, the outermost first.
        of_param: rank of the param, with all its layers.
        rank: that of the leaf, with all layers.

    Example:
        >>> axes_in_leaf([1], 3, 3), axes_in_leaf([1], 3, 4), axes_in_leaf([1], 3, 2)
        ([1], [2], [0])
    """
    more = rank - of_param
    return [level if more < 0 else axis + more for level, axis in enumerate(axes)]


def _shapes_of(tree: Any) -> Any:
    """Return arrays as shapes and dtypes, without shardings."""

    def shape(leaf: Any) -> Any:
        if is_array(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return leaf

    return jax.tree.map(shape, tree)


def _put_next_to(leaf: Any, old: Any) -> Any:
    """Put an array where another is, if that is somewhere."""
    if not is_placed(old) or isinstance(leaf, jax.core.Tracer):
        return leaf
    return jax.device_put(leaf, old.sharding)


def _explicit_axes(mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def _explicit_mesh(leaves: Sequence[Any]) -> Mesh | AbstractMesh | None:
    """Return the mesh of the first array that has one with Explicit axes."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            of_type: AbstractMesh = jax.typeof(leaf).sharding.mesh
            if _explicit_axes(of_type):
                sharding = None if isinstance(leaf, jax.core.Tracer) else leaf.sharding
                return getattr(sharding, "mesh", of_type)
    return None


def _of_type(leaf: Any, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return how an array is sharded over Explicit axes; not at all, if it is none."""
    spec = jax.typeof(leaf).sharding.spec if isinstance(leaf, jax.Array) else ()
    return NamedSharding(mesh, PartitionSpec(*spec))


def _on_auto_axes(
    fn: Callable[..., Any], mesh: Mesh | AbstractMesh, targets: Any
) -> Callable[..., Any]:
    """Return ``fn``, inside which Explicit axes are Auto, as ``vmap`` needs them.

    Args:
        fn: function of arrays.
        mesh: that of the axes.
        targets: how each leaf of its result is sharded over them, a tree.
    """
    # Over Explicit axes ``vmap`` wants one sharding along the layers (JAX 0.10).
    return jax.sharding.auto_axes(fn, axes=_explicit_axes(mesh), out_sharding=targets)


def _of_state(
    state: Any, params: FlatDict, shardings: Mapping[str, Sharding], part: AxesByPath
) -> Any:
    """Return where each leaf of a state belongs, a tree; None for anywhere.

    A leaf of the shape of its param is where the param is. Other statistics of it are
    sharded as the param along the axes of the layers, and what is of no param is whole.

    Args:
        state: abstract.
        params: its params.
        shardings: of those that are on certain devices, by path.
        part: the axes of the layers in the params.
    """
    some = next(iter(shardings.values()))

    def target(path: str | None, leaf: Any) -> Sharding | None:
        param: Any = None if path is None else params[path]
        sharding = some if path is None else shardings.get(path)
        if param is not None and leaf.shape == param.shape:
            return sharding
        if not isinstance(sharding, NamedSharding):
            is_single = sharding is not None and sharding.num_devices == 1
            return sharding if is_single else None
        entries: list[Any] = [None] * leaf.ndim
        if path is not None:
            axes = [each.axis for each in part[path]]
            spec = [*sharding.spec, *[None] * param.ndim]
            places = axes_in_leaf(axes, param.ndim, leaf.ndim)
            for axis, place in zip(axes, places, strict=True):
                entries[place] = spec[axis]
        return NamedSharding(sharding.mesh, PartitionSpec(*entries))

    leaves, structure = _jax.flatten(state)
    return structure.unflatten(map(target, owners(state, part).values(), leaves))


def _counterparts(new: Any, updates: Any, state: Any) -> Any:
    """Return a tree like ``new`` with the old leaf of the same shape, 0 for none.

    Args:
        new: the updates and the state that a transformation returned.
        updates: those that it got.
        state: the one that it got.
    """
    old_updates = fast_params(updates)
    old_state = dict(jtu.tree_leaves_with_path(state))

    def counterpart(keys: Any, leaf: Any) -> Any:
        is_update = keys[0].idx == 0
        old: Any
        old = old_updates.get(flat_key(keys)) if is_update else old_state.get(keys[1:])
        return old if is_array(old) and old.shape == leaf.shape else 0

    return jtu.tree_map_with_path(counterpart, new)
