"""States of other rules: what is unlike when an update fails on its state.

A state that was made by other rules, another optimizer or for other params fails deep
inside Optax, with an error that names neither. Only then the state that ``init`` would
make is computed, abstractly, and compared by name; an update that works costs nothing.
See ``state.carry_state`` for the way from one to the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from treeadapt.errors import TransformError
from treeadapt.text.names import Mismatch
from treeadapt.transforms.optax_fields import NAMED_FIELDS
from treeadapt.trees.describing import describe, describe_argument
from treeadapt.trees.paths import SEPARATOR
from treeadapt.trees.views import same_structure, view_tree


def stale_error(
    state: Any, init: Callable[[Any], Any], flat: Any
) -> TransformError | None:
    """Return the error that says what of a state is unlike a new one, if anything is.

    What measures fills a dict that is empty at first.

    Args:
        state: with which an update failed.
        init: makes a state for a flat dict.
        flat: the flat dict of the params, or of updates like them.
    """
    is_optimizer = all(callable(getattr(state, x, None)) for x in ("init", "update"))
    if is_optimizer or inspect.isroutine(state):
        return TransformError(
            f"Got {describe_argument(state)} as state. First make one: "
            "state = tx.init(params); then tx.update(grads, state, params)."
        )
    try:
        expected = jax.eval_shape(init, flat)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # such as a mask that reads values
    old, new = view_tree(state), view_tree(expected)
    old_leaves, new_leaves = old.flat(), new.flat()
    both = old_leaves.keys() & new_leaves.keys()
    mismatch = Mismatch(
        [path for path in new_leaves if path not in both],
        [
            path
            for path in old_leaves
            if path not in both and NAMED_FIELDS.isdisjoint(path.split(SEPARATOR))
        ],
        {
            path: f"{describe(old_leaves[path])} in place of {describe(leaf)}"
            for path, leaf in new_leaves.items()
            if path in both and np.shape(old_leaves[path]) != np.shape(leaf)
        },
    )
    text = "Its containers are others: of other groups, or of a checkpoint."
    if mismatch:
        text = mismatch.text("leaf", "the state has", to="a new state")
    elif len(both) < len(old_leaves) or same_structure(old.structure, new.structure):
        return None
    return TransformError(
        f"The state is not one of this optimizer, rules and params. {text}\nIt "
        "goes on here: state, report = treeadapt.carry_state(tx, params, state), "
        "with the whole optimizer as tx, and migration=table where params have "
        "other names.",
        paths=mismatch.paths,
    )
