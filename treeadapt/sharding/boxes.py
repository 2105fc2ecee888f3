"""Axis names that a model carries itself: the boxes of Linen and nnx.

``nn.Partitioned``, ``nn.LogicallyPartitioned`` and ``nnx.Variable`` may name the axes
of the array inside. Gives the spec that follows, by leaf. A row of the table below says
how one class of boxes is read; a library that nobody has imported has no boxes.
See ``params`` for whether rules agree with a box.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from treeadapt.adapters.registry import current_registry
from treeadapt.errors import ShardingError
from treeadapt.names import listing
from treeadapt.sharding.specs import mesh_axes
from treeadapt.trees.views import TreeView

#: Ordered pairs of a logical name and the mesh axes for it, as Flax writes them.
AxisRules = Sequence[tuple[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """What one box says of the axes of its array.

    Attributes:
        names: one an axis: a name, several, or None.
        rules: pairs that translate them, which came with the box.
        logical: the names are certainly no mesh axes.
    """

    names: tuple[Any, ...]
    rules: AxisRules = ()
    logical: bool = False


def _partitioned(box: Any) -> Names:
    return Names(tuple(box.names))


def _logically_partitioned(box: Any) -> Names:
    return Names(tuple(box.names), tuple(box.rules or ()), logical=True)


def _variable(box: Any) -> Names | None:
    metadata = box.get_metadata()
    # Flax has renamed it twice.
    known = ("out_sharding", "sharding_names", "sharding")
    names = next((metadata[name] for name in known if metadata.get(name)), None)
    if not isinstance(names, tuple | list | PartitionSpec):
        return None
    return Names(tuple(names), tuple(metadata.get("sharding_rules") or ()))


# Rows of the table: module whose presence in ``sys.modules`` makes the row count, class
# of the box, and what reads its names. The first row that fits a box decides.
_BOXES: tuple[tuple[str, str, Callable[[Any], Names | None]], ...] = (
    ("flax.linen.spmd", "LogicallyPartitioned", _logically_partitioned),
    ("flax.core.meta", "Partitioned", _partitioned),
    ("flax.nnx", "Variable", _variable),
)


def box_specs(
    view: TreeView, logical_axes: Mapping[str, Any] | AxisRules
) -> dict[int, PartitionSpec]:
    """Return the specs that the boxes of a tree ask for.

    Args:
        view: the tree.
        logical_axes: mesh axes by logical name, or ordered pairs of these; as in Flax
            an earlier pair takes the mesh axis.

    Returns:
        ``{index of a leaf: spec}`` of the leaves in boxes that have names.

    Raises:
        ShardingError: there are no mesh axes for a logical name.
    """
    readers = [
        (getattr(sys.modules[module], name), read)
        for module, name, read in _BOXES
        if module in sys.modules
    ]
    classes = tuple(cls for cls, _ in readers)
    nodes = (cls for path in view.plan.paths for cls in view.plan.classes(path))
    if not any(issubclass(cls, classes) for cls in nodes):
        return {}
    pairs = _pairs(logical_axes)
    return {
        index: _spec(names, pairs, view.plan.paths[index])
        for index, names in _named_leaves(view, readers)
    }


def _named_leaves(
    view: TreeView, readers: Sequence[tuple[type, Callable[[Any], Names | None]]]
) -> Iterator[tuple[int, Names]]:
    """Yield the leaves in boxes with names, by index."""
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
            continue
        for index in jax.tree.leaves(children):
            yield index, names


def _pairs(logical_axes: Mapping[str, Any] | AxisRules) -> AxisRules:
    if isinstance(logical_axes, Mapping):
        return tuple(logical_axes.items())
    pairs = tuple(logical_axes)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ShardingError(
            "logical_axes is a mapping from logical name to mesh axes, or pairs, such "
            f"as {{'embed': None, 'mlp': 'model'}}; got {logical_axes!r}."
        )
    return pairs


def _spec(named: Names, pairs: AxisRules, path: str) -> PartitionSpec:
    pairs = (*pairs, *named.rules)
    known = dict.fromkeys(name for name, _ in pairs)
    entries: list[Any] = [None] * len(named.names)
    used: dict[str, None] = {}
    for place, name in enumerate(named.names):
        if name is None or name in known:
            continue
        if named.logical:
            raise _unknown_name(name, path)
        entries[place] = name
        used.update(dict.fromkeys(mesh_axes(name)))
    still_open = [name if name in known else None for name in named.names]
    for name, axes in pairs:
        for place, wanted in enumerate(still_open):
            taken = any(axis in used for axis in mesh_axes(axes))
            if wanted is not None and wanted == name and not taken:
                entries[place] = tuple(axes) if isinstance(axes, list) else axes
                used.update(dict.fromkeys(mesh_axes(axes)))
                still_open[place] = None
    return PartitionSpec(*entries)


def _unknown_name(name: Any, path: str) -> ShardingError:
    return ShardingError(
        f"The box at {listing([path])} names an axis {name!r}, which is a logical "
        f"name. Say which mesh axes it is: logical_axes={{{name!r}: 'model'}}, "
        "or None for an axis that is not sharded."
    )
