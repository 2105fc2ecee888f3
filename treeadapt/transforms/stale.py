"""States of other rules: what is unlike when an update fails on its state.

A state that was made by other rules, another optimizer or for other params fails deep
inside Optax, with an error that names neither. Only then the state that ``init`` would
make is computed, abstractly, and compared; an update that works costs nothing.
See ``state.carry_state`` for the way from one to the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
import optax

from treeadapt.arrays import is_array
from treeadapt.convert import describe
from treeadapt.errors import TransformError, TreeAdaptError
from treeadapt.layers.region import read_key
from treeadapt.names import Mismatch, fold, plural, section
from treeadapt.optax_fields import NAMED_FIELDS, is_state_class
from treeadapt.state_map import fast_params, holds
from treeadapt.trees.views import view_tree


@contextlib.contextmanager
def explained_state(
    state: Any, init: Callable[[Any], Any], flat: Any
) -> Iterator[None]:
    """Say what is unlike if what runs inside fails on a state that is not its own.

    Args:
        state: that the update was given.
        init: makes a state for a flat dict.
        flat: the flat dict of the params, or of updates like them.

    Raises:
        TransformError: the update failed, and ``init`` makes another state.
    """
    try:
        yield
    except TreeAdaptError:
        raise
    except Exception as error:
        differences = _unlike_fresh(state, init, flat)
        if not differences:
            raise
        raise TransformError(_message(differences, fast_params(flat))) from error


class _Difference(NamedTuple):
    """A place where a state is not like a new one.

    Attributes:
        text: what is unlike.
        lacking: the leaf for which it has no state; or
        surplus: the leaf for which it has one that a new state lacks.
        why: the reason for that, if the leaf is there.
    """

    text: str
    lacking: str = ""
    surplus: str = ""
    why: str = ""


def _message(differences: Sequence[_Difference], flat: Mapping[str, Any]) -> str:
    """Write what is unlike, and names that changed apart from what else did."""
    lacking = dict.fromkeys(one.lacking for one in differences if one.lacking)
    gone = dict.fromkeys(
        one.surplus
        for one in differences
        if one.surplus and read_key(one.surplus).path not in flat
    )
    renamed = Mismatch([*lacking], [*gone]) if lacking and gone else Mismatch()
    texts = []
    for one in differences:
        if not renamed or not (one.lacking or one.surplus in gone):
            why = "is gone" if one.surplus in gone else one.why
            texts.append(f"{one.text}, and {why}" if one.surplus else one.text)
    rows = section(
        "The state is not one of this optimizer and these rules:", fold(texts)
    )
    cure = "A state of earlier rules"
    if renamed:
        title = "The state was made for other params. " * (not rows)
        names = renamed.text("name", "the state has", to="this tree")
        rows += f"{title}{names}".splitlines()
        cure += ", or of other names with migration=table,"
    rows.append(
        f"{cure} goes on here: state, report = treeadapt.carry_state(tx, params, "
        "state), with the whole optimizer as tx."
    )
    return "\n".join(rows)


def _unlike_fresh(
    state: Any, init: Callable[[Any], Any], flat: Any
) -> list[_Difference]:
    """Return what of a state is unlike what ``init`` makes; nothing if that fails."""
    try:
        expected = jax.eval_shape(init, flat)
    except (AttributeError, KeyError, TypeError, ValueError):
        return []  # such as a mask that reads values
    return list(dict.fromkeys(_unlike(state, expected)))


def _unlike(
    old: Any, new: Any, group: str = "", name: str = "", of: str = ""
) -> Iterator[_Difference]:
    """Yield each place where a state is not like a new one.

    Args:
        old: the state, or a part of it.
        new: the same of the one that ``init`` makes.
        group: words that name the group that it belongs to.
        name: the last key of a dict above it.
        of: the field that it is, if that has names of the state itself.
    """
    masks = [isinstance(node, optax.MaskedNode) for node in (old, new)]
    is_divided = hasattr(old, "inner_states")
    if any(masks):
        if not all(masks):
            yield _lacking(name, group) if masks[0] else _surplus(name, group)
    elif is_divided and isinstance(new, optax.transforms.PartitionState):
        groups, others = new.inner_states, old.inner_states
        texts = [f"group {x!r} has no state" for x in groups if x not in others]
        idle = [x for x in others if x not in groups]
        texts += [f"group {x!r} has a state, and no transformation" for x in idle]
        yield from map(_Difference, texts)
        for label in groups:
            if label in others:
                pair = others[label], groups[label]
                yield from _unlike(*pair, f" in group {label!r}", name)
    elif isinstance(new, Mapping) and isinstance(old, Mapping):
        lacking = [key for key in new if key not in old]
        # What measures fills a dict that is empty at first.
        surplus = [key for key in old if new and key not in new]
        if not of and holds((old, new), lambda node: is_state_class(type(node))):
            of = "states"  # of a chain, or of stacks
        if of:
            texts = [f"the state has no {key!r} among its {of}" for key in lacking]
            texts += [f"the state has {key!r} among its {of}" for key in surplus]
            yield from (_Difference(text + group) for text in texts)
        else:
            yield from (_lacking(key, group) for key in lacking)
            yield from (_surplus(key, group) for key in surplus)
        for key in new:
            if key in old:
                yield from _unlike(old[key], new[key], group, key)
    elif hasattr(new, "_fields") and all(hasattr(old, x) for x in new._fields):
        for field in new._fields:
            of = field if field in NAMED_FIELDS else ""
            pair = getattr(old, field), getattr(new, field)
            yield from _unlike(*pair, group, name, of)
    elif _is_plain(new) and _is_plain(old) and len(old) == len(new):
        for one, two in zip(old, new, strict=True):
            yield from _unlike(one, two, group, name)
    elif type(old) is type(new) and _is_of_own_class(new):
        flats = view_tree(old).flat(), view_tree(new).flat()
        yield from _unlike(*flats, group, name)
    elif (
        isinstance(new, Mapping | tuple | list)
        or _is_of_own_class(new)
        or (is_array(new) and is_array(old) and np.shape(old) != np.shape(new))
    ):
        whose = f" of {name!r}" if name else ""
        seen = f"{describe(old)} in place of {describe(new)}"
        if _is_plain(new) and _is_plain(old):
            seen = f"{plural(len(old), 'part')} in place of {len(new):,}"
        yield _Difference(f"the state{whose}{group} has {seen}")


def _is_of_own_class(node: Any) -> bool:
    """Return whether a node is of the classes of a model, as with ``as_tree=True``."""
    return not (isinstance(node, Mapping | tuple | list) or jtu.all_leaves((node,)))


def _lacking(name: Any, group: str) -> _Difference:
    return _Difference(f"{name!r} has no state{group}", lacking=name)


def _surplus(name: Any, group: str) -> _Difference:
    why = "is not in it" if group else "is frozen or masked out"
    return _Difference(f"{name!r} has a state{group}", surplus=name, why=why)


def _is_plain(node: Any) -> bool:
    """Return whether a node is a tuple or list without names."""
    return isinstance(node, tuple | list) and not hasattr(node, "_fields")
