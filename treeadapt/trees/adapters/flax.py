"""Flax Linen: boxes of partitioned parameters, which add no path segment; Modules.

A Linen Module describes a network and holds none of its parameters, so it is a leaf.

``flax.struct`` classes are registered with JAX with keys, and need no row of their own.
"""

from __future__ import annotations

from typing import Any

from flax import linen
from flax.core import FrozenDict, meta

from treeadapt.trees.adapters import jax
from treeadapt.trees.adapters.adapter import Adapter, AxisNames


def _axis_names(box: Any) -> AxisNames | None:
    if isinstance(box, linen.LogicallyPartitioned):
        return AxisNames(tuple(box.names), tuple(box.rules or ()))
    if isinstance(box, meta.Partitioned):
        return AxisNames(tuple(box.names), logical=False)
    return None


ADAPTERS = (
    Adapter(
        name="flax FrozenDict",
        applies=lambda cls: cls is FrozenDict,
        flatten=jax.mapping,
    ),
    Adapter(
        name="flax box",
        applies=meta.AxisMetadata,
        flatten=jax.boxed,
        axis_names=_axis_names,
    ),
    Adapter(name="Linen Module", applies=linen.Module, leaf=True),
)
