"""Equinox: modules are registered with keys; ``eqx.nn.Shared`` is a box.

A module's keys depend on its class and on which fields it has, never on the values of
its static fields, so its names are stable though those values may be mutable.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx

from treeadapt import _jax
from treeadapt.registry import BOX, Adapter, Flat


def _module(node: Any) -> Flat:
    keyed, aux = _jax.one_level_with_keys(node)
    keyed = list(keyed)
    return Flat([key.name for key, _ in keyed], [child for _, child in keyed], aux)


def _shared(node: Any) -> Flat:
    flat = _module(node)
    return flat._replace(keys=[BOX if k == "pytree" else k for k in flat.keys])


def _state(node: Any) -> Flat:
    children, aux = _jax.one_level(node)
    return Flat(range(len(children)), children, aux)


ADAPTERS = (
    Adapter(name="equinox Shared", applies=eqx.nn.Shared, flatten=_shared),
    Adapter(name="equinox State", applies=eqx.nn.State, flatten=_state),
    Adapter(name="equinox Module", applies=eqx.Module, flatten=_module),
)
