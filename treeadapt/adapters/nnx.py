"""Flax nnx: Variables are boxes, Modules and Variables have an identity.

One Variable reachable under two paths is one leaf, at the first of them, and comes back
as one Variable. Only ``nnx.Param`` trains; batch statistics, caches and random state
do not.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from treeadapt import _jax
from treeadapt.registry import BOX, Adapter, Flat


def _variable(node: Any) -> Flat:
    children, aux = _jax.one_level(node)
    return Flat((BOX,) * len(children), children, aux)


def _state(node: Any) -> Flat:
    children, keys = _jax.one_level(node)
    return Flat(keys, children)


def _pytree(node: Any) -> Flat:
    keyed, aux = _jax.one_level_with_keys(node)
    keyed = list(keyed)
    # nnx keeps bookkeeping of its own among the children; it holds no leaf.
    keys = [BOX if _name(key) == "_pytree__state" else key for key, _ in keyed]
    return Flat(keys, [child for _, child in keyed], aux)


def _name(key: Any) -> Any:
    return getattr(key, "name", None)


def _trains(node: Any) -> bool:
    return isinstance(node, nnx.Param)


ADAPTERS = (
    Adapter(
        name="nnx Variable",
        applies=nnx.Variable,
        flatten=_variable,
        trains=_trains,
        shared=True,
    ),
    Adapter(name="nnx State", applies=nnx.State, flatten=_state),
    Adapter(name="nnx Module", applies=nnx.Pytree, flatten=_pytree, shared=True),
)
