"""``nnx.Optimizer``: a state in.

Flax keeps each leaf of the state in a variable, which only it changes in place.
``set_opt_state`` writes a state into these, and is the only function here that changes
what it is given. See ``transforms.nnx_state`` for the way out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.errors import StructureMismatchError, TransformError
from treeadapt.state.fields import can_hold
from treeadapt.text.names import listing, section, shorten
from treeadapt.transforms.flat import require_no_refs
from treeadapt.transforms.nnx_state import is_nnx_optimizer, is_variable, plain_state
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe
from treeadapt.trees.views import view_tree

_NO_VALUES = " without values, as jax.eval_shape makes it"


def set_opt_state(optimizer: Any, state: Any, step: Any = None) -> None:
    """Write a state into an ``nnx.Optimizer``, in place.

    For a state that ``carry_state`` made, that was loaded, or that was put on a mesh.
    Nothing is written if anything does not fit.

    Args:
        optimizer: an ``nnx.Optimizer``; its ``opt_state`` and, if given, ``step`` are
            changed, as its own ``update`` does.
        state: state of ``optimizer.tx``, of any containers: matched by path, and of the
            same shapes and dtypes. Each array is kept as it is, with its sharding.
        step: new number of updates; None keeps it.

    Raises:
        TransformError: ``optimizer`` is something else, or a leaf is a ``jax.Ref``.
        StructureMismatchError: the state lacks leaves that the optimizer has, has
            others, or has them in another shape or dtype, or shapes alone; or ``step``
            is not one integer that the optimizer can hold.

    Example:
        >>> from flax import nnx
        >>> from treeadapt import tree_set
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> set_opt_state(optimizer, tree_set(optimizer, count=7), step=7)
        >>> int(optimizer.opt_state[0].count[...]), int(optimizer.step[...])
        (7, 7)
    """
    if not is_nnx_optimizer(optimizer):
        raise TransformError(
            f"Expected an nnx.Optimizer; got a {type(optimizer).__name__}. "
            "set_opt_state takes (optimizer, state)."
        )
    slots = jax.tree.leaves(optimizer.opt_state, is_leaf=is_variable)
    slot_of = dict(zip(view_tree(optimizer.opt_state).plan.paths, slots, strict=True))
    view = view_tree(plain_state(state))
    require_no_refs(view)
    leaf_of = view.flat()
    old_leaf_of = {path: slot.get_value() for path, slot in slot_of.items()}
    wrong = []
    for path in dict.fromkeys([*old_leaf_of, *leaf_of]):
        new, old = _text(leaf_of, path), _text(old_leaf_of, path)
        if new not in (old, old.removesuffix(_NO_VALUES)):
            places = f"{new} in the state, and {old} in the optimizer"
            wrong.append(f"{listing([path])} is {places}")
    if wrong:
        lines = section("The state is not that of optimizer.tx:", wrong)
        cure = (
            "Pass the 'opt_state' of a saved nnx.Optimizer, and its 'step' as step=; "
            "treeadapt.carry_state fits a state to another transformation."
        )
        raise StructureMismatchError("\n".join([*lines, cure]))
    if step is not None:
        dtype = optimizer.step.get_value().dtype
        is_value = not isinstance(step, jax.Ref | jax.ShapeDtypeStruct)
        if not is_value or np.shape(step) or not can_hold(dtype, step):
            seen = describe(step) if is_array(step) else shorten(repr(step))
            raise StructureMismatchError(
                f"step is {seen}; expected a number of updates, one integer in {dtype}."
            )
    for path, slot in slot_of.items():
        slot.set_value(leaf_of[path])
    if step is not None:
        optimizer.step.set_value(jnp.asarray(step, dtype))


def _text(leaves: dict[str, Any], path: str) -> str:
    if path not in leaves:
        return "missing"
    leaf = leaves[path]
    text = describe(leaf) if is_array(leaf) else type(leaf).__name__
    return text + _NO_VALUES * isinstance(leaf, jax.ShapeDtypeStruct)
