"""``as_tree=True``: a transformation that sees the caller's classes, not a flat dict.

Some transformations look for modules by class, and find none in a flat dict. Such a one
is marked as ``OnTree``; ``on_tree`` runs it on trees of the caller's classes with None
in all other places, as ``equinox.partition`` gives it, and in place of a box in which
nothing is shown; and takes the updates apart again. Its state is its own on that tree.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.tree_util as jtu
import optax

from treeadapt.errors import TransformError
from treeadapt.selection.whole_tree import WholeTree
from treeadapt.text.names import listing
from treeadapt.transforms.flat import FlatDict, by_half, callbacks_on_flat, shaped_extra
from treeadapt.trees.adapters.adapter import BOX
from treeadapt.trees.adapters.registry import current_registry
from treeadapt.trees.views import TreeView, view_tree


class OnTree(optax.GradientTransformationExtraArgs):
    """A transformation that is to see trees of the caller's classes."""


def on_tree(tx: Any, whole: WholeTree) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` as a transformation of flat dicts; as it is if it is one already.

    Args:
        tx: a transformation with extra arguments.
        whole: the caller's tree, and the layers of its arrays that flat dicts hold.

    Raises:
        TransformError: (by ``init`` and ``update``) JAX does not know a class in the
            tree, or one array would be in two places.
    """
    if not isinstance(tx, OnTree):
        return tx
    view = whole.view

    def tree(flat: FlatDict) -> Any:
        _require_known_to_jax(view)
        leaves = {whole.stored_path(key): leaf for key, leaf in flat.items()}
        if len(leaves) < len(flat):
            raise TransformError(
                f"With as_tree=True a group has one part of an array; {listing(flat)} "
                "has several. Give these layers one label, or leave as_tree=True out."
            )
        hidden = view.rebuild([leaves.get(path) for path in view.plan.paths])
        return _without_empty_boxes(hidden)

    def flattened(tree: Any, keys: FlatDict) -> Any:
        flat = view_tree(tree).flat()
        if not {whole.stored_path(key) for key in keys}.issuperset(flat):
            return tree  # a measurement, as inside optax.monitor
        return {key: flat.get(whole.stored_path(key)) for key in keys}

    def init(params: Any) -> Any:
        return tx.init(by_half(tree, params))

    def update(
        updates: FlatDict, state: Any, params: Any | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        back = functools.partial(flattened, keys=updates)
        shaped = shaped_extra(extra, updates, params)
        trees = {name: tree(value) for name, value in shaped.items()}
        shown = None
        if params is not None:
            shown = by_half(tree, params)
            backs = dict.fromkeys(shaped, back)
            trees |= callbacks_on_flat(extra, back, backs, narrow=tree)
        new, after = tx.update(tree(updates), state, shown, **(extra | trees))
        return by_half(back, new), after

    return optax.GradientTransformationExtraArgs(init, update)


def _without_empty_boxes(tree: Any) -> Any:
    """Return a tree with None for each box in which nothing is shown.

    Who looks into a module asks whether it has a bias, and takes a box for one.
    """
    find = current_registry().find

    def is_empty(node: Any) -> bool:
        adapter = find(node).adapter
        keys = adapter.flatten(node).keys if adapter else ()
        is_box = bool(keys) and all(key is BOX for key in keys)
        return is_box and not jtu.tree_leaves(node)

    return jtu.tree_map(
        lambda leaf: None if is_empty(leaf) else leaf, tree, is_leaf=is_empty
    )


def _require_known_to_jax(view: TreeView) -> None:
    if isinstance(view.structure, jtu.PyTreeDef):
        return
    if view.plan.ties:
        second, first = next(iter(view.plan.ties.items()))
        raise TransformError(
            f"One variable is at {first!r} and {second!r}, which JAX takes for two. "
            "Pass a tree that has it once, such as nnx.state(model, nnx.Param)."
        )
    kinds = current_registry().kinds
    opened = {x for x in view.plan.node_classes if x in kinds and kinds[x].opens}
    if paths := view.plan.paths_of(opened.__contains__):
        names = sorted(cls.__name__ for cls in opened)
        raise TransformError(
            f"JAX does not know {listing(names, write=str)}, at {listing(paths)}. "
            "Register it (a dataclass with jax.tree_util.register_dataclass), or leave "
            "as_tree=True out."
        )
