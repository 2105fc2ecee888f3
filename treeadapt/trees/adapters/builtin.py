"""Python's own containers.

``NODES`` are the containers that JAX flattens. ``OPENERS`` opens plain dataclasses,
which JAX sees as one opaque leaf, and ``LEAVES`` says which of them are leaves all the
same. The class decides, never what is in the object, so a tree of labels has the paths
of its model. Rebuilding runs no constructor. Reading never creates a key of a
``defaultdict``.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from treeadapt.errors import AdapterError
from treeadapt.trees import _jax
from treeadapt.trees.adapters import fields, jax
from treeadapt.trees.adapters.adapter import Adapter, Flat
from treeadapt.trees.adapters.fields import Shell


def _default_dict(node: Any) -> Flat:
    values, (_, keys) = _jax.one_level(node)
    return Flat(keys, values)


def _sequence(node: Sequence[Any]) -> Flat:
    return Flat(range(len(node)), node)


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _namedtuple(node: Any) -> Flat:
    cls = type(node)
    if not isinstance(cls._fields, tuple) or len(cls._fields) != tuple.__len__(node):
        raise AdapterError(
            f"{cls.__name__} says it has the fields {cls._fields!r} but holds "
            f"{tuple.__len__(node)} items; it is not a NamedTuple. Rename its _fields."
        )
    if _jax.one_level(node)[1] is not cls:
        return jax.take_registered_apart(node)
    rest = fields.lasting(node, fields.attributes(node))
    return Flat(cls._fields, tuple(node), Shell(cls, None, rest))


def _namedtuple_again(aux: Any, children: Sequence[Any]) -> Any:
    if not isinstance(aux, Shell):
        return aux.unflatten(children)
    return fields.set_attributes(tuple.__new__(aux.cls, children), aux.rest)


def _has_own_constructor(cls: type) -> bool:
    # JAX 0.10 calls cls(*children); a subclass may have redefined what that does.
    own_init: Any = cls.__init__  # type: ignore[misc]
    return not fields.is_generated(cls.__new__) or own_init is not object.__init__


NODES = (
    Adapter(name="dict", applies=dict, flatten=jax.mapping),
    Adapter(name="list", applies=list, flatten=_sequence),
    Adapter(name="tuple", applies=lambda cls: cls is tuple, flatten=_sequence),
    Adapter(name="None", applies=type(None)),
    Adapter(name="OrderedDict", applies=collections.OrderedDict, flatten=jax.mapping),
    Adapter(name="defaultdict", applies=collections.defaultdict, flatten=_default_dict),
    Adapter(
        name="NamedTuple",
        applies=_is_namedtuple,
        flatten=_namedtuple,
        unflatten=_namedtuple_again,
        by_hand=_has_own_constructor,
    ),
)


def _is_spec(cls: type) -> bool:
    names = getattr(cls, "__dataclass_fields__", ())
    return "shape" in names and "dtype" in names


# Their classes describe arrays and functions; those that hold arrays JAX knows. A spec
# has been no tuple, and so no node, since JAX 0.10.
_LEAF_PACKAGES = frozenset({"equinox", "flax", "jax", "jaxlib", "optax", "orbax"})
_VALUES = (str, int, float, np.ndarray, BaseException)

LEAVES = (
    Adapter(name="Enum member", applies=enum.Enum, leaf=True),
    Adapter(name="value", applies=lambda cls: issubclass(cls, _VALUES), leaf=True),
    Adapter(
        name="class of a library",
        applies=lambda cls: cls.__module__.partition(".")[0] in _LEAF_PACKAGES,
        leaf=True,
    ),
    Adapter(name="spec", applies=_is_spec, leaf=True),
)

OPENERS = (
    Adapter(
        name="dataclass",
        applies=lambda cls: (
            dataclasses.is_dataclass(cls) and fields.has_attributes_alone(cls)
        ),
        flatten=lambda node: fields.take_declared_apart(node, dataclasses.fields(node)),
        unflatten=fields.put_together,
    ),
)
