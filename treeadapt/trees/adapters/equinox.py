"""Equinox: modules are registered with keys; ``eqx.nn.Shared`` is a box.

A module's keys depend on its class and on which fields it has, never on the values of
its static fields, so its names are stable though those values may be mutable. What a
layer keeps from call to call, such as batch statistics, does not train: neither in the
``State`` of a model nor, as the initial one, in the index of the layer.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx

from treeadapt.trees import _jax
from treeadapt.trees.adapters import jax
from treeadapt.trees.adapters.adapter import Adapter, Flat


def _state(node: Any) -> Flat:
    children, aux = _jax.one_level(node)
    return Flat(range(len(children)), children, aux)


ADAPTERS = (
    Adapter(
        name="equinox Shared",
        applies=eqx.nn.Shared,
        flatten=functools.partial(jax.named, box="pytree"),
    ),
    Adapter(
        name="equinox State",
        applies=eqx.nn.State,
        flatten=_state,
        trains=lambda _: False,
    ),
    Adapter(
        name="equinox StateIndex",
        applies=eqx.nn.StateIndex,
        flatten=jax.named,
        trains=lambda _: False,
    ),
    Adapter(name="equinox Module", applies=eqx.Module, flatten=jax.named),
)
