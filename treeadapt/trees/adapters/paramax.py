"""paramax: ``NonTrainable`` is a box, and what is in it does not train.

So freezing a part of a model in paramax's own way renames nothing in its checkpoints.
The other wrappers compute an array from their fields, which train, and are modules like
any other of Equinox.
"""

from __future__ import annotations

from typing import Any

import paramax

from treeadapt.trees.adapters import jax
from treeadapt.trees.adapters.adapter import BOX, Adapter, Flat


def _frozen(node: Any) -> Flat:
    flat = jax.named(node)  # of a subclass with fields of its own, each has its name
    return flat._replace(keys=(BOX,)) if len(flat.keys) == 1 else flat


ADAPTERS = (
    Adapter(
        name="paramax NonTrainable",
        applies=paramax.NonTrainable,
        flatten=_frozen,
        trains=lambda _: False,
    ),
)
