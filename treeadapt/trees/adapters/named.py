"""Classes that a user registers by naming their fields.

Where JAX knows the class, the fields rename its children, in JAX's order; where it does
not, they are the attributes that hold children.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Sequence
from typing import Any

from treeadapt.errors import AdapterError
from treeadapt.trees.adapters import fields, jax
from treeadapt.trees.adapters.adapter import Adapter, Flat, jax_knows
from treeadapt.trees.arrays import is_array_class

_VALUES = (
    *(bool, int, float, complex, str, bytes, bytearray, type, type(None)),
    types.BuiltinFunctionType,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)


def adapter_of_fields(cls: type, names: tuple[str, ...]) -> Adapter:
    """Return the adapter for ``register(cls, fields=names)``."""
    if cls is object or issubclass(cls, _VALUES) or is_array_class(cls):
        raise AdapterError(
            f"A {cls.__name__} is a leaf and holds no children. Register the class of "
            "the object that holds it: register(Net, fields=('w', 'b'))."
        )
    if issubclass(cls, dict | list | tuple | set | collections.deque):
        raise AdapterError(
            f"{cls.__name__} holds items besides attributes, so its fields alone would "
            "not bring it back. Register an Adapter for it."
        )

    def flatten(node: Any) -> Flat:
        return _renamed(node, names) if jax_knows(node) else _opened(node, names)

    return Adapter(
        name=cls.__name__,
        applies=cls,
        flatten=flatten,
        unflatten=jax.build,
        by_hand=jax.runs_code_when_built,
    )


def _renamed(node: Any, names: Sequence[str]) -> Flat:
    by_hand = jax.runs_code_when_built(type(node))
    flat = jax.dataclass_fields(node) if by_hand else jax.keyed(node)
    if len(flat.children) != len(names):
        raise AdapterError(
            f"A {type(node).__name__} has {len(flat.children)} children in JAX but was "
            f"registered with the {len(names)} fields {names!r}. Name each child, in "
            "JAX's order."
        )
    return flat._replace(keys=names)


def _opened(node: Any, names: Sequence[str]) -> Flat:
    flat = fields.picked(node, names)
    missing = [name for name in names if name not in flat.keys]
    if missing:
        raise AdapterError(
            f"A {type(node).__name__} was registered with the fields {names!r}, but "
            f"this one has no attribute {missing[0]!r} of its own."
        )
    return flat
