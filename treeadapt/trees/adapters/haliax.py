"""Haliax: a ``NamedArray`` is a box that names the axes of its array."""

from __future__ import annotations

import haliax

from treeadapt.trees.adapters import jax
from treeadapt.trees.adapters.adapter import Adapter

ADAPTERS = (
    Adapter(
        name="Haliax NamedArray",
        applies=haliax.NamedArray,
        flatten=jax.boxed,
        axis_names=lambda node: [axis.name for axis in node.axes],
    ),
)
