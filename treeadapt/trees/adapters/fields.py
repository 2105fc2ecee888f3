"""Nodes whose children are attributes.

Takes such an object apart by attribute name and rebuilds it without running its
constructor, its ``__post_init__`` or any converter: the instance is allocated bare and
every attribute is put back. Serves dataclasses, attrs classes, and classes that a user
registers by naming fields.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from treeadapt.trees.adapters.adapter import Flat

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a ``class`` statement


class Shell(NamedTuple):
    """Aux of a node with attributes: all that is not a child.

    Attributes:
        cls: the class.
        form: how the children fill the node; for an attribute node, their names.
        rest: the other attributes, put back as they were.
    """

    cls: type
    form: Any
    rest: tuple[tuple[str, Any], ...] = ()


def picked(node: Any, names: Sequence[str]) -> Flat:
    """Take ``node`` apart at the attributes ``names``; the others go to ``aux``.

    An attribute that is not set is not a child, and is not set after rebuilding either.
    """
    values = attributes(node)
    present = tuple(name for name in names if name in values)
    children = [values.pop(name) for name in present]
    return Flat(present, children, Shell(type(node), present, lasting(node, values)))


def is_generated(function: Any) -> bool:
    """Return whether ``dataclasses`` or ``namedtuple`` wrote a function's source."""
    code = getattr(function, "__code__", None)
    # The name excludes the code of ``python -c``, whose file is "<string>" too.
    return (
        code is not None
        and code.co_filename == "<string>"
        and code.co_qualname.startswith(("__create_fn__.", "<lambda>"))
    )


def take_declared_apart(node: Any, declared: Iterable[Any]) -> Flat:
    """Take a dataclass or attrs instance apart at its fields that are not static.

    Args:
        node: the instance.
        declared: its fields, as ``dataclasses.fields`` or ``attrs.fields`` gives them.
            Static are those that JAX and Flax take for static once they register the
            class, so that registering it changes no path.
    """
    return picked(
        node,
        [
            field.name
            for field in declared
            if not field.metadata.get("static", False)
            and field.metadata.get("pytree_node", True)
        ],
    )


def put_together(aux: Shell, children: Sequence[Any]) -> Any:
    """Rebuild an attribute node around ``children`` without its constructor."""
    items = tuple(zip(aux.form, children, strict=True))
    return set_attributes(allocate(aux.cls), items + aux.rest)


def set_attributes(node: Any, items: Iterable[tuple[str, Any]]) -> Any:
    """Set attributes of ``node``, past any setter or freezing of its class."""
    for name, value in items:
        object.__setattr__(node, name, value)
    return node


def allocate(cls: type) -> Any:
    """Make a bare instance of ``cls``, running no code that was written for it."""
    return builtin_base(cls).__new__(cls)  # the only ``__new__`` that is safe to call


def has_attributes_alone(cls: type) -> bool:
    """Return whether instances of ``cls`` are nothing but their attributes.

    Not so for subclasses of a built-in class, which also hold items or a value.
    """
    return builtin_base(cls) is object


def builtin_base(cls: type) -> Any:
    """Return the nearest class above or at ``cls`` that no program defined."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)


def attributes(node: Any) -> dict[str, Any]:
    """Return the instance attributes of ``node``, slots included, in a fixed order."""
    values: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):  # past a ``__getattr__`` of the class
        values.update(object.__getattribute__(node, "__dict__"))
    for name, place in slots(type(node)):
        with contextlib.suppress(AttributeError):  # a slot that is not set
            values.setdefault(name, place.__get__(node))
    return values


def lasting(node: Any, values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return attributes except what a ``cached_property`` found in old children."""
    return tuple(
        (name, value)
        for name, value in values.items()
        if not isinstance(_declared(type(node), name), functools.cached_property)
    )


def _declared(cls: type, name: str) -> Any:
    declared = (vars(base)[name] for base in cls.__mro__ if name in vars(base))
    return next(declared, None)


def slots(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return the names and descriptors of the slots of a class, in a fixed order."""
    places = []
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            place = base.__dict__.get(_mangle(name, base))
            if name not in ("__dict__", "__weakref__") and place is not None:
                places.append((_mangle(name, base), place))
    return tuple(places)


def _mangle(name: str, cls: type) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name
