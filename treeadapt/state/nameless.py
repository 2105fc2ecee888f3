"""States whose fields have lost their names, and states that have nothing in common.

Pickles of other versions, HDF5 and JAX's own serializer give tuples or lists in place
of Optax's named tuples. As a whole such a state can be read by position; in part it
cannot: an accumulator of squares and a momentum look alike.
See ``carry_state``, which asks before and after it goes by names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import optax

from treeadapt.errors import CheckpointError
from treeadapt.text.names import listing, plural
from treeadapt.transforms.optax_fields import (
    COPY_FIELDS,
    NAMED_FIELDS,
    STATE_FIELDS,
    is_state_class,
)
from treeadapt.trees.paths import SEPARATOR
from treeadapt.trees.state_dict import by_position, differs, lacks_names_alone
from treeadapt.trees.views import Plan, TreeView, same_structure, view_tree


def read_by_position(new: TreeView, saved: TreeView) -> tuple[Any, str] | None:
    """Read a saved state whose named tuples became tuples, lists or numbered dicts.

    Args:
        new: the first state of today's transformation; arrays may be abstract.
        saved: the earlier state.

    Returns:
        The saved leaves in the classes of ``new``, and a warning that names these; None
        if all have names, those of other fields, or it does not agree as a whole.
    """
    names = frozenset(new.plan.paths)
    if names == saved.flat().keys():
        return None
    target, placed = (view_tree(by_position(each.tree)) for each in (new, saved))
    paths, flat = target.plan.paths, placed.flat()
    if names == frozenset(paths) or flat.keys() != {*paths}:
        return None
    is_numbered = saved.plan.root is dict  # which need not keep empty parts
    if not is_numbered and not same_structure(target.structure, placed.structure):
        return None
    leaves = [flat[path] for path in paths]
    if any(map(differs, new.leaves, leaves)):
        return None
    kept = set(filter(is_state_class, saved.plan.node_classes))
    is_of_others = not kept.issubset(new.plan.node_classes)
    if is_of_others or not lacks_names_alone(saved.tree, new.tree):
        return None
    lacking = (
        "some fields of the saved state have no names"
        if kept
        else "the saved state has no names of fields"
    )
    return new.rebuild(leaves), (
        f"{lacking}. As a whole it is like the new one, so "
        f"its {plural(len(leaves), 'leaf')} were taken by position, as those of "
        f"{listing(_state_classes(new.plan), write=str)}. States of other optimizers "
        f"may look alike; to say what it is: {_cure(saved.plan)}."
    )


def nothing_carried(new: Plan, saved: Plan, arrays: Sequence[str], params: Plan) -> str:
    """Say why nothing of a saved state was carried.

    Args:
        new: of the first state of today's transformation.
        saved: of the saved state.
        arrays: names of the arrays in it.
        params: of the params.

    Raises:
        CheckpointError: arrays have no field's name. No optimizer left these behind on
            purpose, as one that was changed leaves its fields.
    """
    known = _known_fields().union(*map(_fields_of, new.node_classes))
    for cls in set(saved.node_classes).difference(params.node_classes):
        known |= _fields_of(cls)
    nameless = [name for name in arrays if known.isdisjoint(name.split(SEPARATOR))]
    if nameless:
        raise CheckpointError(
            f"Nothing was carried, and {plural(len(nameless), 'array')} of the saved "
            f"state have no field's name: {listing(nameless, limit=3)}, where the new "
            f"state has {listing(new.paths, limit=3)}. If Optax's named tuples became "
            f"tuples, lists or dicts, say which they were: {_cure(saved)}. To start "
            "again, call tx.init(params)."
        )
    fields, new_fields = (
        {
            part: None
            for name in names
            for part in name.split(SEPARATOR)
            if part in known
        }
        for names in (arrays, new.paths)
    )
    if fields.keys() & new_fields.keys():
        return (
            f"nothing was carried. The new state has names like {new.paths[-1]!r}, the "
            f"saved one like {arrays[-1]!r}. If the model was renamed, pass "
            "migration=ta.Migration({old: new})."
        )
    both = (_written(saved, fields), _written(new, new_fields))
    return (
        "nothing was carried: the saved state is of {}, the new one of {}, and all of "
        "it starts again.".format(*both)
    )


def _cure(saved: Plan) -> str:
    form = "flat" if saved.is_flat_dict else "state"
    return (
        f"saved = ta.from_{form}_dict(jax.eval_shape(old_tx.init, old_params), saved), "
        "with the optimizer and the params of that run"
    )


def _written(plan: Plan, fields: Iterable[str]) -> str:
    """Name an optimizer by the classes and the fields of its state."""
    classes = listing(_state_classes(plan), write=str)
    fields = f"the fields {listing(fields, write=str)}"
    return f"{classes} ({fields})" if classes else f"an optimizer with {fields}"


def _state_classes(plan: Plan) -> list[str]:
    """Return the names of the classes of states that hold something."""
    classes = (cls for cls in plan.node_classes if is_state_class(cls))
    return sorted({cls.__name__ for cls in classes if _fields_of(cls)})


def _fields_of(cls: type) -> frozenset[str]:
    if dataclasses.is_dataclass(cls):
        return frozenset(field.name for field in dataclasses.fields(cls))
    return frozenset(getattr(cls, "_fields", ()))


@functools.cache
def _known_fields() -> frozenset[str]:
    """Return the fields of Optax's own states, which a dict may name."""
    classes = [cls for cls in vars(optax).values() if isinstance(cls, type)]
    states = filter(is_state_class, classes)
    return COPY_FIELDS.union(STATE_FIELDS, NAMED_FIELDS, *map(_fields_of, states))
