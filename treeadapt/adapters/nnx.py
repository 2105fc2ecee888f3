"""Flax nnx: Variables are boxes, Modules and Variables have an identity.

One Variable reachable under two paths is one leaf, at the first of them, and comes back
as one Variable. Only ``nnx.Param`` trains; batch statistics, caches and random state
do not.
"""

from __future__ import annotations

import functools

from flax import nnx

from treeadapt.adapters import jax
from treeadapt.adapters.adapter import Adapter

ADAPTERS = (
    Adapter(
        name="nnx Variable",
        applies=nnx.Variable,
        flatten=jax.boxed,
        trains=lambda node: isinstance(node, nnx.Param),
        shared=True,
    ),
    Adapter(name="nnx State", applies=nnx.State, flatten=jax.mapping),
    Adapter(
        name="nnx Module",
        applies=nnx.Pytree,
        # nnx keeps bookkeeping of its own among the children; it holds no leaf.
        flatten=functools.partial(jax.named, box="_pytree__state"),
        shared=True,
    ),
)
