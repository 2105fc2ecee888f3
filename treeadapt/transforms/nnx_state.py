"""``nnx.Optimizer``: what is one, and its state as plain arrays.

Flax keeps each leaf of the state in a variable. ``plain_state`` gives the state as
Optax made it. Imports no Flax: an object can be an ``nnx.Optimizer`` only if somebody
did.
"""

from __future__ import annotations

import sys
from typing import Any

import jax

from treeadapt.errors import TransformError


def is_nnx_optimizer(tree: Any) -> bool:
    """Return whether a tree is an ``nnx.Optimizer``; imports no Flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(tree, nnx.Optimizer)


def require_no_optimizer(tree: Any, name: str) -> None:
    """Raise ``TransformError`` for an ``nnx.Optimizer`` where rules decide on params.

    Its paths are those of its state: rules for a model match other leaves there, or
    with ``"**"`` all of the moments.
    """
    if is_nnx_optimizer(tree):
        raise TransformError(
            f"{name} with rules got an nnx.Optimizer, which holds moments. Pass "
            "gradients, the model, or moments: treeadapt.tree_get(optimizer, 'mu'). "
            "For rules on the paths of the state, pass optimizer.opt_state."
        )


def is_variable(node: Any) -> bool:
    """Return whether Flax keeps a leaf of the state in it."""
    return isinstance(node, sys.modules["flax.nnx"].Variable)


def plain_state(state: Any) -> Any:
    """Return the state in an ``nnx.Optimizer``, of arrays; any other as it is."""
    if not is_nnx_optimizer(state):
        return state
    return jax.tree.map(
        lambda variable: variable.get_value(), state.opt_state, is_leaf=is_variable
    )
