"""Haliax: a ``NamedArray`` is a box that names the axes of its array."""

from __future__ import annotations

import haliax

from treeadapt.adapters import jax
from treeadapt.adapters.adapter import Adapter

ADAPTERS = (
    Adapter(
        name="Haliax NamedArray",
        applies=haliax.NamedArray,
        flatten=jax.boxed,
        axis_names=lambda node: [axis.name for axis in node.axes],
    ),
)
