"""Norms of a tree of gradients, updates or params, by label or by path.

Takes a tree and rules; gives one number for each label, or for each path. Sums over
arrays as they are: nothing is gathered, cut or copied, and layers of one array that
have different labels are told apart after the sum over all other axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from treeadapt.errors import RulesError, SelectorError
from treeadapt.selection.answers import Split
from treeadapt.selection.rules import BoundRules, RulesLike, as_rules
from treeadapt.selection.tree_first import view_first
from treeadapt.text.names import shorten
from treeadapt.transforms.flat import require_no_refs
from treeadapt.transforms.nnx_state import require_no_optimizer
from treeadapt.trees.arrays import Tree, is_array


def tree_norms(
    tree: Tree,
    rules: RulesLike | None = None,
    *,
    ord: float = 2,  # noqa: A002, as numpy.linalg.norm calls it
) -> dict[str, jax.Array]:
    """Return the norm of the numbers of each label, or of each leaf.

    Call it in the compiled step, and return the result next to the loss: no second
    compilation, and on sharded arrays nothing is gathered. ``float("inf")`` as ``ord``
    shows which leaves are not finite.

    Args:
        tree: gradients, updates or params; any tree of arrays, of any sharding. Leaves
            that are integers, bools, keys or not arrays do not count.
        rules: ``Rules``, or a mapping or pairs for it, whose values are strings; or
            None for one norm a leaf. With ``stacks``, each layer counts for its label.
        ord: 2, 1 or infinity: the root of the sum of squares, the sum of magnitudes, or
            the largest of them.

    Returns:
        ``{label: norm}``, in the order of the rules, of the labels that some number
        has, ``"frozen"`` too; without rules ``{path: norm}``. Each is a scalar of
        float32, or of float64 where such numbers count; so are the sums.

    Raises:
        RulesError: a label is not a string.
        SelectorError: ``ord`` is something else.
        TransformError: ``tree`` is an ``nnx.Optimizer``, and there are rules for it; or
            a leaf is a ``jax.Ref``.
        UnmatchedPathError, UnusedRuleError, OverlapError: as for ``param_labels``.

    Example:
        >>> grads = {"net": {"w": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}}
        >>> {name: float(norm) for name, norm in tree_norms(grads).items()}
        {'net/b': 1.0, 'net/w': 5.0}
        >>> norms = tree_norms(grads, {"**/b": "biases", "**": "others"}, ord=1)
        >>> {name: float(norm) for name, norm in norms.items()}
        {'biases': 1.0, 'others': 7.0}
    """
    if ord not in _REDUCTIONS:
        raise SelectorError(f"ord is {ord!r}; it is 1, 2 or float('inf').")
    if rules is not None:
        require_no_optimizer(tree, "tree_norms")
    view = view_first(tree, rules, "tree_norms(tree, rules)")
    require_no_refs(view)
    names: Sequence[Any] = view.plan.paths
    values: list[Any] = [*names]
    if rules is not None:
        table = rules if isinstance(rules, BoundRules) else as_rules(rules)
        values = table.decide(view, reports=True, is_part=view.plan.has_gaps).of(view)
        rows = table.rules if isinstance(table, BoundRules) else table
        names = (*rows.values, rows.default)
    sums: dict[Any, jax.Array] = {}
    for path, value, leaf in zip(view.plan.paths, values, view.leaves, strict=True):
        if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            for label, part in _parts(value, jnp.asarray(leaf), ord):
                if not isinstance(label, str):
                    raise RulesError(
                        f"The label {shorten(repr(label))} is not a string, as norms "
                        f"are named by: {path!r} has it. Give the rules strings."
                    )
                sums[label] = _joined(sums.get(label), part, ord)
    order = [name for name in names if isinstance(name, str) and name in sums]
    root = jnp.sqrt if ord == 2 else jnp.asarray
    return {name: root(sums[name]) for name in dict.fromkeys(order)}


_REDUCTIONS: dict[float, Callable[..., jax.Array]] = {
    1: jnp.sum,
    2: jnp.sum,
    float("inf"): functools.partial(jnp.max, initial=0),
}


def _parts(
    value: Any, leaf: jax.Array, order: float
) -> Iterator[tuple[Any, jax.Array]]:
    """Yield labels, and the sum or the maximum of the numbers that have each."""
    if jnp.finfo(leaf.dtype).bits < 32:
        leaf = leaf.astype(jnp.float32)
    sizes = jnp.abs(leaf)
    powers = sizes * sizes if order == 2 else sizes
    reduction = _REDUCTIONS[order]
    if not isinstance(value, Split):
        yield value, reduction(powers)
        return
    layers = {each.axis for each in value.region.along}
    others = tuple(axis for axis in range(leaf.ndim) if axis not in layers)
    by_layer = reduction(powers, axis=others, keepdims=True)
    for one in value.rulings:
        yield one.value, reduction(one.region.take(by_layer))


def _joined(one: jax.Array | None, other: jax.Array, order: float) -> jax.Array:
    if one is None:
        return other
    dtype = max(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    one, other = one.astype(dtype), other.astype(dtype)
    return jnp.maximum(one, other) if order == float("inf") else one + other
