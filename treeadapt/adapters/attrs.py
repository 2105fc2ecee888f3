"""attrs classes, which JAX sees as one opaque leaf.

Children are named by attribute, not by ``__init__`` argument (``_y``, not ``y``), and
are put back without converters or validators.
"""

from __future__ import annotations

from typing import Any

import attrs

from treeadapt.adapters import fields
from treeadapt.registry import Adapter, Flat


def _instance(node: Any) -> Flat:
    return fields.take_declared_apart(node, attrs.fields(type(node)))


OPENERS = (
    Adapter(
        name="attrs class",
        applies=lambda cls: attrs.has(cls) and fields.has_attributes_alone(cls),
        flatten=_instance,
        unflatten=fields.put_together,
    ),
)
