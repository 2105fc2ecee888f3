"""Flax nnx: Variables are boxes, Modules and Variables have an identity.

One Variable reachable under two paths is one leaf, at the first of them, and comes back
as one Variable. Only ``nnx.Param`` trains; batch statistics, caches and random state
do not.
"""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from treeadapt.trees.adapters import jax
from treeadapt.trees.adapters.adapter import Adapter, AxisNames


def _axis_names(variable: nnx.Variable[Any]) -> AxisNames | None:
    metadata = variable.get_metadata()
    # Flax has renamed it twice; 0.12 says ``out_sharding``.
    keys = ("out_sharding", "sharding_names", "sharding")
    names = next((metadata[name] for name in keys if metadata.get(name)), None)
    if not isinstance(names, tuple | list | PartitionSpec):
        return None
    rules = tuple(metadata.get("sharding_rules") or ())
    return AxisNames(tuple(names), rules, logical=False)


ADAPTERS = (
    Adapter(
        name="nnx Variable",
        applies=nnx.Variable,
        flatten=jax.boxed,
        trains=lambda node: isinstance(node, nnx.Param),
        random=lambda node: isinstance(node, nnx.RngState),
        shared=True,
        axis_names=_axis_names,
    ),
    Adapter(name="nnx State", applies=nnx.State, flatten=jax.mapping),
    Adapter(
        name="nnx Module",
        applies=nnx.Pytree,
        # nnx keeps bookkeeping of its own among the children (Flax 0.12); it holds no
        # leaf.
        flatten=functools.partial(jax.named, box="_pytree__state"),
        shared=True,
    ),
)
