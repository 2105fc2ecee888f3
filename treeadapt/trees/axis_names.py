"""Axis names that a model carries itself.

Boxes may name the axes of the array inside: of Linen and nnx, named arrays of Haliax
and penzai, and what else has an adapter that reads the names. Where T5X and Flaxformer
keep names in a collection of their own, ``params_axes``, they belong to the params next
to it.
See ``sharding.specs`` for specs made of these names, ``layers.stacks`` for stacks.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterator

import jax

from treeadapt.trees.adapters.adapter import AxisNames
from treeadapt.trees.adapters.registry import current_registry
from treeadapt.trees.exact import node_at
from treeadapt.trees.paths import SEPARATOR
from treeadapt.trees.views import TreeView

_COLLECTION = "_axes"  # of names, after that of the variables; so is each name


def axis_names(view: TreeView) -> dict[int, AxisNames]:
    """Return what is said of the axes of leaves, by index of the leaf."""
    places = {path: index for index, path in enumerate(view.plan.paths)}
    beside = {places[p]: names for p, names in _beside(view) if p in places}
    return beside | _of_boxes(view)


def _of_boxes(view: TreeView) -> dict[int, AxisNames]:
    """Return what boxes with names say of the leaves in them."""
    registry = current_registry()
    classes = {cls for path in view.plan.paths for cls in view.plan.classes(path)}
    kinds = [registry.kinds.get(cls) for cls in classes]
    if all(kind and not (kind.adapter and kind.adapter.axis_names) for kind in kinds):
        return {}
    by_leaf: dict[int, AxisNames] = {}
    # The tree, and the same with the indices of its leaves.
    pending = [(view.tree, view.rebuild(range(len(view.leaves))))]
    seen: set[int] = set()  # nodes with an identity may be in two places
    while pending:
        node, of_indices = pending.pop()
        adapter = registry.find(node).adapter
        if adapter is None or (adapter.shared and id(node) in seen):
            continue
        seen.add(id(node))
        children = adapter.flatten(of_indices).children
        names = None if adapter.axis_names is None else adapter.axis_names(node)
        if names is None:
            pending += zip(adapter.flatten(node).children, children, strict=True)
        else:
            if not isinstance(names, AxisNames):
                names = AxisNames(tuple(names), is_note=True)
            by_leaf |= dict.fromkeys(jax.tree.leaves(children), names)
    return by_leaf


def _beside(view: TreeView) -> Iterator[tuple[str, AxisNames]]:
    """Yield paths, and the names that a collection next to theirs has for them."""
    linen = sys.modules.get("flax.linen.partitioning")
    if linen is None:
        return
    cls = linen.AxisMetadata
    for path in view.plan.paths_of(functools.partial(operator.is_, cls)):
        segments = path.split(SEPARATOR)
        of_names = [name.endswith(_COLLECTION) for name in segments]
        if of_names[-1] and True in of_names[:-1]:
            segments[-1] = segments[-1].removesuffix(_COLLECTION)
            place = of_names.index(True)
            segments[place] = segments[place].removesuffix(_COLLECTION)
            names = node_at(view.tree, path).names
            yield SEPARATOR.join(segments), AxisNames(tuple(names), is_note=True)
