"""Specs that a model asks for itself, by the axis names in its boxes.

Gives the spec of each leaf in a box with names, logical names put in mesh axes.
See ``trees.axis_names`` for the boxes, ``params`` for whether rules agree with one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from treeadapt.errors import ShardingError
from treeadapt.names import listing
from treeadapt.sharding.specs import mesh_axes
from treeadapt.trees.axis_names import AxisNames, axis_names
from treeadapt.trees.views import TreeView

#: Ordered pairs of a logical name and the mesh axes for it, as Flax writes them.
AxisRules = Sequence[tuple[str, Any]]


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
    found = axis_names(view)
    pairs = _pairs(logical_axes) if found else ()
    return {
        index: _spec(names, pairs, view.plan.paths[index])
        for index, names in found.items()
    }


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


def _spec(named: AxisNames, pairs: AxisRules, path: str) -> PartitionSpec:
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
