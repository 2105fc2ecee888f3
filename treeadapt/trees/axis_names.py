"""Axis names that a model carries itself: the boxes of Linen and nnx.

``nn.Partitioned``, ``nn.LogicallyPartitioned`` and ``nnx.Variable`` may name the axes
of the array inside. A row of the table below says how one class of boxes is read; a
library that nobody has imported has no boxes.
See ``sharding.specs`` for specs made of these names, ``layers.stacks`` for stacks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from treeadapt.adapters.registry import current_registry
from treeadapt.trees.views import TreeView


@dataclasses.dataclass(frozen=True, slots=True)
class AxisNames:
    """What one box says of the axes of its array.

    Attributes:
        names: one an axis: a name, several, or None.
        rules: pairs that translate them into mesh axes, which came with the box.
        logical: the names are certainly no mesh axes.
    """

    names: tuple[Any, ...]
    rules: Sequence[tuple[str, Any]] = ()
    logical: bool = False


def _partitioned(box: Any) -> AxisNames:
    return AxisNames(tuple(box.names))


def _logically_partitioned(box: Any) -> AxisNames:
    return AxisNames(tuple(box.names), tuple(box.rules or ()), logical=True)


def _variable(box: Any) -> AxisNames | None:
    metadata = box.get_metadata()
    # Flax has renamed it twice.
    keys = ("out_sharding", "sharding_names", "sharding")
    names = next((metadata[name] for name in keys if metadata.get(name)), None)
    if not isinstance(names, tuple | list | PartitionSpec):
        return None
    return AxisNames(tuple(names), tuple(metadata.get("sharding_rules") or ()))


# Rows of the table: module whose presence in ``sys.modules`` makes the row count, class
# of the box, and what reads its names. The first row that fits a box decides.
_BOXES: tuple[tuple[str, str, Callable[[Any], AxisNames | None]], ...] = (
    ("flax.linen.spmd", "LogicallyPartitioned", _logically_partitioned),
    ("flax.core.meta", "Partitioned", _partitioned),
    ("flax.nnx", "Variable", _variable),
)


def axis_names(view: TreeView) -> dict[int, AxisNames]:
    """Return what boxes with names say of the leaves in them, by index of the leaf."""
    readers = [
        (getattr(sys.modules[module], name), read)
        for module, name, read in _BOXES
        if module in sys.modules
    ]
    classes = tuple(cls for cls, _ in readers)
    nodes = (cls for path in view.plan.paths for cls in view.plan.classes(path))
    if not any(issubclass(cls, classes) for cls in nodes):
        return {}
    by_leaf: dict[int, AxisNames] = {}
    registry = current_registry()
    pending = [view.rebuild(range(len(view.leaves)))]
    seen: dict[int, Any] = {}  # nodes with an identity may be in two places
    while pending:
        node = pending.pop()
        adapter = registry.find(node).adapter
        if adapter is None or id(node) in seen:
            continue
        seen[id(node)] = node
        children = adapter.flatten(node).children
        reader = next((read for cls, read in readers if isinstance(node, cls)), None)
        names = None if reader is None else reader(node)
        if names is None:
            pending += children
        else:
            by_leaf |= dict.fromkeys(jax.tree.leaves(children), names)
    return by_leaf
