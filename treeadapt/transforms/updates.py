"""Updates: new parameters from old ones, on any tree.

Takes a tree and updates, or two trees to average, whose leaves are matched by label
path; gives a tree of the first one's classes. The numbers are Optax's own. A leaf that
gets no update, or a zero, keeps its bits, so a frozen leaf cannot drift.
What the updates are is up to the optimizer.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from treeadapt.errors import StructureMismatchError, TransformError
from treeadapt.text.names import Speller, listing, plural
from treeadapt.transforms.flat import require_no_refs
from treeadapt.trees.arrays import (
    Tree,
    is_array,
    is_float0,
    is_inexact,
    least_value,
    narrow_bits,
)
from treeadapt.trees.describing import describe
from treeadapt.trees.paths import SEPARATOR
from treeadapt.trees.views import TreeView, view_nested

T = TypeVar("T")


def apply_updates(tree: T, updates: Tree) -> T:
    """Add updates to a tree; a leaf without an update, or with a zero, keeps its bits.

    The same numbers as ``optax.apply_updates``, except that ``-0.0 + 0.0`` is ``-0.0``
    and that a NaN keeps its payload. Derivatives are Optax's too. It works in ``jit``,
    ``scan``, ``vmap`` and ``grad``.

    Args:
        tree: any tree; the updated arrays may have any shapes and dtypes.
        updates: tree of the same classes, an arrays-only version of it (``eqx.filter``,
            gradients), or a flat dict. Leaves are matched by label path and have the
            shapes of those in ``tree``. A leaf with no entry here, ``None``,
            ``optax.MaskedNode`` or a ``float0`` array has no update.

    Returns:
        Tree with the treedef of ``tree``. Updated arrays keep their dtype; every leaf
        without an update is the caller's own object.

    Raises:
        StructureMismatchError: an update has a path that ``tree`` lacks, or another
            shape than the leaf.
        TransformError: an update that is not zero for a leaf that is not a number, or
            one that is not a number itself.
        PathCollisionError: two leaves have the same path, so they cannot be matched.

    Example:
        >>> params = {"w": jnp.array([-0.0, 1.0]), "act": jax.nn.relu}
        >>> new = apply_updates(params, {"w": jnp.array([0.0, 0.5]), "act": None})
        >>> new["w"], new["act"] is jax.nn.relu
        (Array([-0. ,  1.5], dtype=float32), True)
    """
    view = view_nested(tree)
    update_view = view_nested(updates)
    deltas = _aligned(view, update_view, _is_update)
    _require_order(view, update_view)
    moved = [i for i, delta in enumerate(deltas) if _moves(view.leaves[i], delta)]
    _require_fit(view, deltas, moved)
    leaves = list(view.leaves)
    added = _add([leaves[i] for i in moved], [deltas[i] for i in moved])
    for index, leaf in zip(moved, added, strict=True):
        leaves[index] = leaf
    updated: T = view.rebuild(leaves)
    return updated


def incremental_update(new: Tree, old: T, step_size: Any) -> T:
    """Move a tree towards a newer one: ``step_size * new + (1 - step_size) * old``.

    For target networks and averaged parameters, with the numbers of
    ``optax.incremental_update``. Only floating-point and complex arrays move, batch
    statistics among them; integers, keys, functions and other static leaves are those
    of ``old``.

    Args:
        new: the newest parameters: any tree with the same paths as ``old``; it may lack
            the leaves that do not move.
        old: the average so far, any tree.
        step_size: number, or array of shape ``()``.

    Returns:
        Tree with the treedef of ``old``, and its shapes and dtypes.

    Raises:
        StructureMismatchError: a floating-point array is in one tree only, or the
            shapes differ.

    Example:
        >>> target = {"w": jnp.zeros(2), "steps": jnp.arange(3)}
        >>> incremental_update({"w": jnp.ones(2), "steps": 0}, target, 0.25)["w"]
        Array([0.25, 0.25], dtype=float32)
    """
    view = view_nested(old)
    newer = _aligned(view, view_nested(new), is_inexact)
    moved = [i for i, leaf in enumerate(view.leaves) if is_inexact(leaf)]
    lacking = [view.plan.paths[i] for i in moved if newer[i] is None]
    if lacking:
        raise StructureMismatchError(
            f"`new` lacks {plural(len(lacking), 'array')} of `old`: "
            f"{listing(lacking)}. Select the part to average with treeadapt.split.",
            paths=lacking,
        )
    _require_fit(view, newer, moved)
    leaves = list(view.leaves)
    mixed = optax.incremental_update(
        [newer[i] for i in moved], [leaves[i] for i in moved], step_size
    )
    for index, leaf in zip(moved, mixed, strict=True):
        leaves[index] = leaf.astype(jnp.asarray(leaves[index]).dtype)
    moved_tree: T = view.rebuild(leaves)
    return moved_tree


@jax.custom_jvp
def _add(leaves: Sequence[Any], deltas: Sequence[Any]) -> list[Any]:
    """Add lists of arrays, leaving alone the bits of what gets a zero."""
    # Optax 0.2.8 skips params that are None, not updates that are, and turns -0.0 into
    # 0.0 where it adds a zero.
    added = optax.apply_updates(list(leaves), list(deltas))
    return [
        _choose(_is_nothing(jnp.asarray(delta)), jnp.asarray(leaf), new)
        for leaf, delta, new in zip(leaves, deltas, added, strict=True)
    ]


@_add.defjvp
def _add_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    # The choice by ``delta == 0`` keeps bits; it must not stop the derivative there.
    return _add(*primals), jax.jvp(optax.apply_updates, primals, tangents)[1]


@functools.partial(jax.jit, inline=True)  # a zero from the host would be a transfer
def _is_nothing(delta: jax.Array) -> jax.Array:
    least = least_value(delta.dtype)
    nothing = jnp.zeros((), delta.dtype) if least is None else least
    return delta == nothing  # of any dtype, booleans too


def _choose(keep: jax.Array, leaf: jax.Array, new: jax.Array) -> jax.Array:
    bits = narrow_bits(leaf.dtype)
    if bits is None:
        return jax.lax.select(keep, leaf, new)
    # XLA widens narrow floats to select among them, and drops a NaN's payload (JAX
    # 0.10, CPU).
    parts = (jax.lax.bitcast_convert_type(x, bits) for x in (leaf, new))
    return jax.lax.bitcast_convert_type(jax.lax.select(keep, *parts), leaf.dtype)


def _aligned(
    view: TreeView, other: TreeView, has_place: Callable[[Any], bool]
) -> list[Any]:
    """Return, for each leaf of ``view``, the leaf of ``other`` at its path or None.

    Args:
        view: the tree that decides.
        other: any tree.
        has_place: which leaves of ``other`` must have a place in it.
    """
    if other.plan is view.plan:
        return other.leaves
    view.require_unique()
    by_path = other.require_unique().flat()
    paths = frozenset(view.plan.paths)
    stray = [
        path for path, leaf in by_path.items() if path not in paths and has_place(leaf)
    ]
    if stray:
        inner = stray[0].partition(SEPARATOR)[2]
        pair = other.tree
        if isinstance(pair, tuple) and len(pair) == 2 and inner in paths:
            raise StructureMismatchError(
                "Got a pair, as update returns it. Take it apart first: "
                "updates, state = tx.update(grads, state, params).",
                paths=stray,
            )
        near = Speller().best(stray[0], view.plan.paths)
        hint = f" (the tree has {near!r})" if near else ""
        raise StructureMismatchError(
            f"{plural(len(stray), 'path')} given, but not in the tree: "
            f"{listing(stray)}{hint}. Both trees must come from the same model.",
            paths=stray,
        )
    return [by_path.get(path) for path in view.plan.paths]


def _require_order(view: TreeView, updates: TreeView) -> None:
    """Raise if updates have functions that the tree lacks, as a model has them."""
    if updates.plan is view.plan or not any(map(callable, updates.leaves)):
        return
    paths = frozenset(view.plan.paths)
    lost = [path for path, x in updates.items() if path not in paths and callable(x)]
    if lost:
        raise TransformError(
            f"The updates have {listing(lost)}, which the tree lacks, so both seem to "
            "be exchanged: apply_updates(params, updates).",
            paths=lost,
        )


def _is_update(delta: Any) -> bool:
    return _is_number(delta) and not is_float0(delta)


def _is_number(leaf: Any) -> bool:
    """Return whether ``leaf`` is a Python number or an array of numbers."""
    if isinstance(leaf, jax.Ref):
        return False  # it changes in place
    if not is_array(leaf):
        return isinstance(leaf, numbers.Number)
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _moves(leaf: Any, delta: Any) -> bool:
    """Return whether a leaf must be added to, as far as is known before any trace."""
    if delta is None or is_float0(delta):
        return False
    if _is_number(leaf):
        return not (isinstance(delta, int | float | complex) and delta == 0)
    is_abstract = isinstance(delta, jax.core.Tracer | jax.ShapeDtypeStruct)
    is_concrete = _is_number(delta) and not is_abstract
    return delta is not leaf and not (is_concrete and not np.any(np.asarray(delta)))


def _require_fit(view: TreeView, others: Sequence[Any], places: Sequence[int]) -> None:
    odd: dict[str, str] = {}
    misshaped: dict[str, str] = {}
    for index in places:
        leaf, other, path = view.leaves[index], others[index], view.plan.paths[index]
        if not _is_number(leaf) or not _is_number(other):
            odd[path] = f"{path!r} ({describe(other)} for {describe(leaf)})"
        elif np.shape(leaf) != np.shape(other):
            misshaped[path] = f"{path!r} ({describe(other)} for {describe(leaf)})"
    if odd:
        require_no_refs(view)
        raise TransformError(
            f"{plural(len(odd), 'leaf')} cannot be added to: "
            f"{listing(odd.values(), write=str)}. Only numbers can; give None where "
            "nothing is to change.",
            paths=odd,
        )
    if misshaped:
        raise StructureMismatchError(
            f"{plural(len(misshaped), 'leaf')} would get a value of another shape: "
            f"{listing(misshaped.values(), write=str)}. Both must be of one model.",
            paths=misshaped,
        )
