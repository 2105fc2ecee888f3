"""Classes that were registered with JAX.

Names come from the registration: dataclasses and other classes registered with keys
keep those names; a class registered without keys gets positions and a warning. A
dataclass whose construction runs code of its own (``__post_init__``, a hand-written
``__init__``, ``init=False`` fields) is rebuilt without it, because a conversion
that doubles a value, resets a field or fails is no identity.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from treeadapt.errors import AdapterError, UnstablePathWarning
from treeadapt.trees import _jax
from treeadapt.trees.adapters import fields
from treeadapt.trees.adapters.adapter import BOX, Adapter, Flat
from treeadapt.trees.arrays import is_array


def boxed(node: Any) -> Flat:
    """Take a node apart whose children add no segment to the path."""
    children, aux = _jax.one_level(node)
    return Flat((BOX,) * len(children), children, aux)


def mapping(node: Any) -> Flat:
    """Take a node apart of which JAX keeps the keys as metadata, and nothing else."""
    children, keys = _jax.one_level(node)
    return Flat(keys, children)


def named(node: Any, *, box: str = "") -> Flat:
    """Take a node apart whose two flatten functions agree, as those of libraries do.

    Args:
        node: the node.
        box: name of the child that adds no segment, if there is one.
    """
    pairs, aux = _jax.one_level_with_keys(node)
    keys, children = [], []
    for key, child in pairs:
        keys.append(BOX if box and getattr(key, "name", None) == box else key)
        children.append(child)
    return Flat(keys, children, aux)


class _Derived(NamedTuple):
    """Aux of a node that computes arrays from its fields when it is built.

    New children need new ones, so JAX builds the node, as it always does; but labels
    and shapes, of which there is nothing to compute, are put in a bare instance.
    """

    shell: fields.Shell
    treedef: Any


def keyed(node: Any) -> Flat:
    """Take a node apart with the keys that it was registered with."""
    children, aux = _jax.one_level(node)
    children = list(children)
    pairs = list(_jax.one_level_with_keys(node)[0])
    if len(pairs) != len(children):
        raise AdapterError(
            f"{type(node).__name__} was registered with JAX in two ways that differ: "
            f"{len(pairs)} children with keys, {len(children)} without."
        )
    order = _aligned([child for _, child in pairs], children)
    return Flat([pairs[place][0] for place in order], children, aux)


def _aligned(keyed_children: list[Any], children: list[Any]) -> list[int]:
    # The two flatten functions of a class may disagree on the order (JAX 0.10 does not
    # check it); leaves come from the plain one, so names are matched by identity.
    places: dict[int, collections.deque[int]] = {}
    for place, child in enumerate(keyed_children):
        places.setdefault(id(child), collections.deque()).append(place)
    order = [places[id(c)].popleft() for c in children if places.get(id(c))]
    in_order = list(range(len(children)))
    return order if sorted(order) == in_order else in_order


def dataclass_fields(node: Any) -> Flat:
    """Take apart a dataclass that runs code when built, for ``build``.

    If its children are just its attributes of those names, its aux is every other
    attribute; otherwise it is what JAX needs to rebuild it. Arrays that its own code
    put in other attributes follow from the fields that it is given: see ``_Derived``.
    """
    flat = keyed(node)
    names = [getattr(key, "name", None) for key in flat.keys]
    bare = fields.picked(node, [name for name in names if name is not None])
    if list(map(id, bare.children)) != list(map(id, flat.children)):
        return flat._replace(aux=treedef_of_node(node))
    init_names = {field.name for field in dataclasses.fields(node) if field.init}
    rest = tuple(
        (name, value)
        for name, value in bare.aux.rest
        if name in init_names or not _has_array(value)
    )
    if len(rest) == len(bare.aux.rest):
        return bare
    shell = bare.aux._replace(rest=rest)
    return bare._replace(aux=_Derived(shell, treedef_of_node(node)))


def _has_array(value: Any) -> bool:
    """Return whether an array is in a tree, whose dicts may have any keys."""
    leaves = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, dict))
    return any(
        any(map(_has_array, leaf.values()))
        if isinstance(leaf, dict)
        else is_array(leaf)
        for leaf in leaves
    )


def take_registered_apart(node: Any) -> Flat:
    """Take apart what JAX could open without it, but was registered in its own way.

    Its aux is what JAX needs to rebuild it, as for ``build``.
    """
    return _stable(node, keyed(node))._replace(aux=treedef_of_node(node))


def build(aux: Any, children: Sequence[Any]) -> Any:
    """Put a node together again, without its constructor where that runs code."""
    if isinstance(aux, _Derived):
        whole = all(
            isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(children)
        )
        aux = aux.treedef if whole else aux.shell
    if isinstance(aux, fields.Shell):
        return fields.put_together(aux, children)
    return aux.unflatten(children)


def treedef_of_node(node: Any) -> Any:
    """Return the treedef of a node with its children as leaves."""
    return jax.tree.structure(node, is_leaf=lambda other: other is not node)


def runs_code_when_built(cls: type) -> bool:
    """Return whether building an instance of a dataclass runs code written for it."""
    if not dataclasses.is_dataclass(cls):
        return False
    init_names = {field.name for field in dataclasses.fields(cls) if field.init}
    # JAX 0.10 rebuilds a registered dataclass with its constructor: a ``__post_init__``
    # runs again, and a field with ``init=False`` is reset.
    return (
        hasattr(cls, "__post_init__")
        or cls.__new__ is not object.__new__
        or not fields.is_generated(inspect.unwrap(cls.__init__))
        or not (
            cls.__setattr__ is object.__setattr__
            or fields.is_generated(cls.__setattr__)
        )
        or len(init_names) < len(dataclasses.fields(cls))
        or not init_names.issuperset([*inspect.signature(cls.__init__).parameters][1:])
    )


def _stable(node: Any, flat: Flat) -> Flat:
    if not any(isinstance(key, jtu.FlattenedIndexKey) for key in flat.keys):
        return flat
    _warn_of_positions(type(node), len(flat.children))
    return flat._replace(keys=range(len(flat.children)))


def _warn_of_positions(cls: type, count: int) -> None:
    names = ", ".join(f'"name{i}"' for i in range(min(count, 3)))
    more = ", ..." if count > 3 else ""
    warnings.warn(
        f"{cls.__module__}.{cls.__qualname__} is registered with JAX without keys, so "
        "the paths of its children are positions, which change when a child is added. "
        f"Name them once: treeadapt.register({cls.__name__}, fields=({names}{more}))",
        UnstablePathWarning,
        stacklevel=2,
    )


def _partial(node: Any) -> Flat:
    children, aux = _jax.one_level(node)
    return Flat(("args", "keywords"), children, aux)


ADAPTERS = (
    Adapter(name="jax Partial", applies=jtu.Partial, flatten=_partial),
    Adapter(
        name="registered dataclass",
        applies=runs_code_when_built,
        flatten=lambda node: _stable(node, dataclass_fields(node)),
        unflatten=build,
        by_hand=runs_code_when_built,
    ),
    Adapter(
        name="registered class",
        applies=lambda cls: True,
        flatten=lambda node: _stable(node, keyed(node)),
    ),
)
