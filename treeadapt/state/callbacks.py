"""Functions of params and state together, called outside ``update``.

``value_and_grad_from_state`` and ``tree_map_params`` do what Optax's functions of these
names do, for params of any classes and for states on the flat view: what is in the
state is matched with the caller's tree by label path.
See ``transforms/state_map`` for where a state holds copies of the params.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from treeadapt.errors import StructureMismatchError, TransformError
from treeadapt.layers.region import read_key
from treeadapt.state.fields import tree_get
from treeadapt.text.names import listing, plural
from treeadapt.transforms.adapt import with_extra_args
from treeadapt.transforms.flat import FlatDict, require_trained
from treeadapt.transforms.optax_fields import STORED_FIELDS
from treeadapt.transforms.state_map import holds, map_state
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe_argument
from treeadapt.trees.views import TreeView, view_tree


def value_and_grad_from_state(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``jax.value_and_grad`` of ``fn`` that reuses what a line search stored.

    As ``optax.value_and_grad_from_state``, for params of any classes, and whatever they
    are called. Where the stored value cannot be used it is computed again: before the
    first step, after one that ended in a NaN, and in a partition or under ``masked``,
    where other leaves have moved since.

    Args:
        fn: function of the params, and of anything else; returns a scalar.

    Returns:
        ``value_and_grad(params, *args, state=state, **kwargs)``, which returns the
        value and the gradient. ``params`` is any tree; ``state`` is that of a
        transformation made by ``adapt``, ``partition`` or ``freeze``, or of plain
        Optax; all other arguments go to ``fn``. The gradient is a tree of the classes
        of ``params``: arrays at the paths that train; zeros at arrays that do not
        (what a frozen line search leaves out, integers, batch statistics); ``None`` at
        functions, other static leaves and typed keys. So ``update`` of the
        transformation, ``ta.apply_updates``, ``eqx.apply_updates`` and norms take it.

    Raises:
        TransformError: (when called) the state holds no value and gradient.
        NoArraysError: (when called) nothing in ``params`` would train.

    Example:
        >>> from treeadapt.transforms.adapt import adapt
        >>> def loss(params):
        ...     return jnp.sum(params["value"] ** 2)
        >>> tx, params = adapt(optax.lbfgs()), {"value": jnp.ones(2)}
        >>> value_and_grad_from_state(loss)(params, state=tx.init(params))
        (Array(2., dtype=float32), {'value': Array([2., 2.], dtype=float32)})
    """

    @functools.wraps(fn)
    def value_and_grad(
        params: Any, *args: Any, state: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        view = view_tree(params)
        flat = require_trained(view)
        # Optax 0.2.8 takes whatever is called ``value``, a part of a model too.
        stored = _stored(state, flat)
        if stored is not None:
            flat = {path: flat[path] for path in stored[1]}

        def compute() -> tuple[Any, FlatDict]:
            return jax.value_and_grad(
                lambda part: fn(view.replace(part), *args, **kwargs)
            )(flat)

        value, grad = compute() if stored is None else _reuse(stored, flat, compute)
        still = {path: _no_gradient(leaf) for path, leaf in view.items()}
        return value, view.replace(still | grad)

    return value_and_grad


def _reuse(
    stored: tuple[Any, FlatDict],
    flat: FlatDict,
    compute: Callable[[], tuple[Any, FlatDict]],
) -> tuple[Any, FlatDict]:
    """Return what is stored if its value is finite, else compute it."""
    value, grad = stored

    def keep() -> tuple[Any, FlatDict]:
        return value, {path: grad[path].astype(flat[path].dtype) for path in flat}

    def again() -> tuple[Any, FlatDict]:
        new_value, new_grad = compute()
        return jnp.asarray(new_value, value.dtype), new_grad

    return jax.lax.cond(jnp.isfinite(value), keep, again)


def _stored(state: Any, flat: FlatDict) -> tuple[Any, FlatDict] | None:
    """Return the value and the flat gradient that a line search left in the state.

    None if they cannot be used, because other leaves may have moved since.
    """
    if holds(state, lambda node: isinstance(node, optax.transforms.PartitionState)):
        return None
    value, grad = (tree_get(state, name, None) for name in STORED_FIELDS)
    if value is None or grad is None:
        raise TransformError(
            "The state holds no value and gradient of the params. Only a line search "
            "stores them: optax.lbfgs, scale_by_zoom_linesearch, or "
            "scale_by_backtracking_linesearch(store_grad=True). For others call "
            "jax.value_and_grad."
        )
    grads = view_tree(grad).flat()
    if any(path not in flat and read_key(path).path in flat for path in grads):
        return None  # a gradient of some layers alone
    stray = [path for path in grads if path not in flat]
    if stray:
        raise TransformError(
            f"The state holds gradients at {listing(stray)}, where the params have no "
            "array that trains. Pass the params that the state was made for."
        )
    is_part = len(grads) < len(flat)
    if is_part and holds(state, lambda node: isinstance(node, optax.MaskedState)):
        return None
    return value, grads


def _no_gradient(leaf: Any) -> Any:
    is_key = is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return jnp.zeros_like(leaf) if is_array(leaf) and not is_key else None


def tree_map_params(
    tx: Any,
    f: Callable[..., Any],
    state: Any,
    /,
    *trees: Any,
    transform_non_params: Callable[[Any], Any] | None = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Map a function over every copy of the params in the state of an optimizer.

    As ``optax.tree_utils.tree_map_params``, with trees in the caller's structure
    whatever the structure in the state: leaves are matched by label path, so the group
    of a partition meets its own part of each tree. A copy may hold leaves of other
    shapes than the params (``adafactor``, the memory of L-BFGS).

    Args:
        tx: the transformation whose state it is.
        f: called with a leaf of the state and the leaf of each tree at the path of its
            parameter.
        state: the state, concrete or abstract.
        *trees: trees with the paths of the params, in any containers and with any
            leaves, ``None`` among them: specs, labels, masks, the params themselves.
        transform_non_params: applied to every other leaf of the state; they stay
            without it.
        is_leaf: whether something else is a leaf, in the copies and in the trees.

    Returns:
        State of the structure of ``state``, each ``MaskedNode`` in its place.

    Raises:
        StructureMismatchError: a tree has no leaf for a parameter in the state.
        TransformError: ``tx`` is not a transformation or ``f`` not a function; or
            ``tx`` refuses Optax's placeholder (line searches do) and no
            tree was passed that gives the paths of the params.

    Example:
        >>> from treeadapt.transforms.partition import partition
        >>> tx = partition({"a": optax.trace(0.9)}, {"w": "a", "**": "frozen"})
        >>> params = {"w": jnp.ones(2), "b": jnp.ones(3)}
        >>> specs = {"w": "spec of w", "b": "spec of b"}
        >>> tree_map_params(tx, lambda leaf, spec: spec, tx.init(params), specs)
        PartitionState(inner_states={'a': TraceState(trace={'w': 'spec of w'})})
    """
    order = "tree_map_params takes (tx, f, state, *trees)"
    with_extra_args(tx, order)
    if not callable(f):
        raise TransformError(
            f"Expected a function of a leaf; got {describe_argument(f)}. {order}."
        )
    view, leaves = _named(state, is_leaf)
    named = [_named(tree, is_leaf, none_too=True) for tree in trees]
    by_path = [
        dict(zip(tree.plan.paths, tree_leaves, strict=True))
        for tree, tree_leaves in named
    ]
    slots = map_state(tx, view, named[0][0].tree if named else None).slots
    new: list[Any] = []
    lacking: dict[str, None] = {}
    for slot, leaf in zip(slots, leaves, strict=True):
        if slot.region:
            path = slot.region.path
            args = [tree[path] for tree in by_path if path in tree]
            if len(args) < len(trees):
                lacking[slot.tail] = None
            elif not lacking:
                new.append(f(leaf, *args))
        else:
            new.append(transform_non_params(leaf) if transform_non_params else leaf)
    if lacking:
        raise StructureMismatchError(
            f"A tree lacks {plural(len(lacking), 'parameter')} of the state: "
            f"{listing(lacking)}. Every tree needs the paths of the state's params.",
            paths=lacking,
        )
    return view.rebuild(new)


def _named(
    tree: Any, is_leaf: Callable[[Any], bool] | None, *, none_too: bool = False
) -> tuple[TreeView, list[Any]]:
    """View a tree whose leaves may be anything; return its leaves too."""

    def ends(node: Any) -> bool:
        return (none_too and node is None) or (is_leaf is not None and is_leaf(node))

    treedef: Any
    leaves, treedef = jax.tree.flatten(tree, is_leaf=ends)
    view = view_tree(treedef.unflatten(range(len(leaves))))  # opens no leaf
    return view, [leaves[index] for index in view.leaves]
