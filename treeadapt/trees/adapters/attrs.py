"""attrs classes, which JAX sees as one opaque leaf.

Children are named by attribute, not by ``__init__`` argument (``_y``, not ``y``), and
are put back without converters or validators.
"""

from __future__ import annotations

from typing import Any

import attrs

from treeadapt.trees.adapters import fields
from treeadapt.trees.adapters.adapter import Adapter, Flat

_HASH = "_attrs_cached_hash"  # where ``cache_hash=True`` remembers the hash


def _instance(node: Any) -> Flat:
    declared = attrs.fields(type(node))
    flat = fields.take_declared_apart(node, declared)
    caches = _caches(type(node)).difference(field.name for field in declared)
    rest = [
        (name, None if name == _HASH else value)
        for name, value in flat.aux.rest
        if name not in caches
    ]
    return flat._replace(aux=flat.aux._replace(rest=tuple(rest)))


def _caches(cls: type) -> frozenset[str]:
    """Return the slots in which attrs keeps what a ``cached_property`` remembers."""
    getters = [base.__dict__.get("__getattr__") for base in cls.__mro__]
    defaults = [getattr(get, "__defaults__", None) or () for get in getters]
    return frozenset().union(*(x for xs in defaults for x in xs if isinstance(x, dict)))


OPENERS = (
    Adapter(
        name="attrs class",
        applies=lambda cls: attrs.has(cls) and fields.has_attributes_alone(cls),
        flatten=_instance,
        unflatten=fields.put_together,
    ),
)
