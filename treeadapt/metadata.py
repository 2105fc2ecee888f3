"""Metadata of nodes, compared strictly: what a structure holds besides its leaves.

JAX compares the metadata of two structures with ``==``: it takes ``1`` for ``True`` and
``1.0``, and an object that changed in place for itself. Here things are the same only
if type and exact value are, and what can change in place is taken down as it is now.
Knows no leaf; where structures come from is up to ``plans``.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu

from treeadapt.walk import Program


def same_static(one: Any, two: Any) -> bool:
    """Compare two static values by type and exact value.

    ``1``, ``True`` and ``1.0`` are different, ``0.0`` and ``-0.0`` too, also within
    tuples; NaN equals itself.

    Example:
        >>> same_static(1, True), same_static(0.0, -0.0), same_static("a", "a")
        (False, False, True)
    """
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        nan = math.isnan(one) and math.isnan(two)
        return nan or (one == two and math.copysign(1, one) == math.copysign(1, two))
    if isinstance(one, complex):
        return same_static(one.real, two.real) and same_static(one.imag, two.imag)
    if isinstance(one, tuple):
        return same_statics(one, two)
    if isinstance(one, jtu.PyTreeDef):
        return same_statics(node_data(one), node_data(two))
    try:
        return bool(one == two)
    except (ValueError, TypeError):  # an object that refuses comparison
        return False


def same_statics(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Compare two sequences of static values, pair by pair.

    Example:
        >>> same_statics(("a", (1, 2)), ("a", (1, True)))
        False
    """
    if one is two:
        return True
    if len(one) != len(two):
        return False
    return all(map(operator.is_, one, two)) or all(map(same_static, one, two))


def node_data(structure: Any) -> tuple[Any, ...]:
    """Return the metadata of all nodes of a treedef or ``Program``.

    Returns:
        The parts of what JAX keeps of each node, children first, in one row: two equal
        structures have them at equal places. They are the caller's own objects.

    Example:
        >>> node_data(jax.tree.structure({"a": [1.0], "b": None}))
        ('a', 'b')
    """
    if isinstance(structure, Program):
        return structure.metadata
    found: list[Any] = []

    def note(children: Any, data: Any) -> None:
        del children
        if type(data) in (tuple, list):  # made anew whenever JAX flattens
            found.extend(data)
        elif data is not None:
            found.append(data)

    structure.walk(note, id, [None] * structure.num_leaves)  # ``id``: any function
    return tuple(found)


def as_of_now(data: Sequence[Any]) -> tuple[Any, ...] | None:
    """Take metadata down as it is now, if any of it can change in place.

    Args:
        data: metadata of nodes, as from ``node_data``.

    Returns:
        The same with tuples in place of lists, dicts, sets and dataclasses that do not
        hash; None if there is none of these.

    Example:
        >>> as_of_now(("relu", (1, [2])))
        ('relu', (1, (<class 'list'>, 2)))
        >>> as_of_now(("relu", (1, 2))) is None
        True
    """
    copier = _Copier()
    copied = copier.tuple(data)
    return copied if copier.seen else None


class _Copier:
    """Copies what can change; an object that holds itself is written once."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, Any]] = {}  # number, and the object itself

    def tuple(self, things: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self.copy, things))

    def copy(self, thing: Any) -> Any:
        if type(thing) is tuple:
            return self.tuple(thing)
        if isinstance(thing, tuple):
            return type(thing), *self.tuple(tuple(thing))
        if isinstance(thing, jtu.PyTreeDef):
            return self.tuple(node_data(thing))
        parts = _parts(thing)
        if parts is None:
            return thing
        if id(thing) in self.seen:
            return type(thing), self.seen[id(thing)][0]
        self.seen[id(thing)] = (len(self.seen), thing)
        return type(thing), *self.tuple(parts)


def _parts(thing: Any) -> list[Any] | None:
    """Return what an object holds if it can change in place, otherwise None."""
    if isinstance(thing, list):
        return list.copy(thing)
    if isinstance(thing, dict):
        return list(dict.items(thing))
    if isinstance(thing, set):
        return sorted(set.copy(thing), key=repr)
    if type(thing).__hash__ is None and dataclasses.is_dataclass(thing):
        return [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    return None
