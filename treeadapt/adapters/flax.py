"""Flax Linen: boxes of partitioned parameters, which add no path segment; Modules.

A Linen Module describes a network and holds none of its parameters, so it is a leaf.

``FrozenDict`` and ``flax.struct`` classes are registered with JAX with keys, and need
no row of their own.
"""

from __future__ import annotations

from typing import Any

from flax import linen
from flax.core import FrozenDict, meta

from treeadapt import _jax
from treeadapt.registry import BOX, Adapter, Flat


def _frozen_dict(node: Any) -> Flat:
    values, keys = _jax.one_level(node)
    return Flat(keys, values)


def _box(node: Any) -> Flat:
    children, aux = _jax.one_level(node)
    return Flat((BOX,) * len(children), children, aux)


ADAPTERS = (
    Adapter(
        name="flax FrozenDict",
        applies=lambda cls: cls is FrozenDict,
        flatten=_frozen_dict,
    ),
    Adapter(name="flax box", applies=meta.AxisMetadata, flatten=_box),
    Adapter(name="Linen Module", applies=linen.Module, leaf=True),
)
