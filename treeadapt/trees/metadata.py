"""Static values and metadata of nodes, compared strictly and as they once were.

JAX compares the metadata of two structures with ``==`` (0.10; jax#7826, equinox#798):
it takes ``1`` for ``True`` and ``1.0``, and an object that changed in place for itself.
A ``Snapshot`` takes values down by type and exact value, with all that they hold, as
they are now.
Knows no leaf that is an array. See ``views`` for where structures come from.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import operator
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np

from treeadapt.trees import _jax
from treeadapt.trees.adapters import fields
from treeadapt.trees.views import same_structure
from treeadapt.trees.walk import Recipe

_ATOMS = frozenset({str, int, bool, bytes, type(None), type(...)})
_NO_HASH = object.__hash__  # it hashes the address
# What never changes, or has attributes that are caches or handlers, not values.
_BY_EQUALITY = (type, types.FunctionType, types.ModuleType, enum.Enum)
_OPENED = frozenset({"builtins", "collections", "types", "argparse", "functools"})
_CLOSED = (sys.stdlib_module_names | {"jax", "jaxlib", "ml_dtypes"}) - _OPENED


class Snapshot:
    """Static values as they were when this was made.

    Two snapshots are equal if their values were, by type and exact value, with all that
    they hold. Builtin containers and numbers, ``collections``, NumPy arrays, partial
    functions and whatever has attributes, a dataclass, say, are looked into. All else
    (functions, classes, generators, objects of the rest of the standard library and of
    JAX) is the same if it is one object, or equal, whatever becomes of it.

    Attributes:
        things: the values; those that can change may have changed since.

    Example:
        >>> settings = {"scale": [0.5]}
        >>> before = Snapshot([settings])
        >>> before == Snapshot([{"scale": [0.5]}]), before == Snapshot([settings])
        (True, True)
        >>> settings["scale"].append(2)
        >>> before == Snapshot([settings]), before.is_current()
        (False, False)
    """

    __slots__ = ("_changed", "_changing", "_then", "_tokens", "things")

    def __init__(self, things: Sequence[Any]):
        self.things = tuple(things)
        self._tokens, self._changing = _read(self.things)
        self._then = _read(self._changing)[0]
        self._changed = False

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Snapshot) or self._tokens != other._tokens:
            return False
        if _same(self._changing, other._changing):
            return not (self._changed or other._changed)
        return self.is_current() and other.is_current()

    def __hash__(self) -> int:
        return hash(len(self.things))

    def is_current(self) -> bool:
        """Return whether no call of this has seen another value than at first."""
        if self._changing and not self._changed:
            self._changed = _read(self._changing)[0] != self._then
        return not self._changed

    def is_of(self, things: Sequence[Any]) -> bool:
        """Return whether it is of just these objects, and none has changed."""
        return _same(things, self.things) and self.is_current()


def same_static(one: Any, two: Any) -> bool:
    """Compare two static values by type and exact value.

    ``1``, ``True`` and ``1.0`` are different, ``0.0`` and ``-0.0`` too, however deep
    inside; NaN equals itself.

    Example:
        >>> same_static(1, True), same_static([0.0], [-0.0]), same_static("a", "a")
        (False, False, True)
    """
    return one is two or _read([one])[0] == _read([two])[0]


def holds_nothing(thing: Any) -> bool:
    """Return whether an object is a bare marker: no attributes, and not callable.

    Example:
        >>> holds_nothing(type("Marker", (), {})()), holds_nothing("text")
        (True, False)
    """
    return (
        getattr(thing, "__dict__", None) == {}
        and not (callable(thing) or fields.slots(type(thing)))
        and fields.has_attributes_alone(type(thing))
    )


def node_data(structure: Any) -> tuple[Any, ...]:
    """Return the metadata of all nodes of a treedef or ``Recipe``.

    Returns:
        One tuple of what JAX keeps of each node, its tuples and lists opened once,
        children first: two equal structures have equal things at equal places. They
        are the caller's own objects.

    Example:
        >>> node_data(jax.tree.structure({"a": [1.0], "b": None}))
        ('a', 'b')
    """
    if isinstance(structure, Recipe):
        return structure.metadata
    metadata: list[Any] = []

    def note(children: Any, data: Any) -> None:
        del children
        if type(data) in (tuple, list):  # JAX makes a new one at each flattening
            metadata.extend(data)
        elif data is not None:
            metadata.append(data)

    _jax.walk(structure, note)
    return tuple(metadata)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether things are the same objects; in tuples, which JAX makes anew."""
    if len(some) != len(others):
        return False
    return all(map(operator.is_, some, others)) or all(
        one is two
        or (
            type(one) is type(two) is tuple
            and len(one) == len(two)
            and all(map(operator.is_, one, two))
        )
        for one, two in zip(some, others, strict=True)
    )


def _read(things: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return tokens that represent values, and the outermost objects that can change.

    Each value is a token, followed by those of what it holds; an object that is met
    again is its number. No token depends on an address or a hash seed. Only sets are
    read by recursion.
    """
    tokens: list[Any] = []
    changing: list[Any] = []
    # The object too, so that its id stays its own.
    seen: dict[int, tuple[int, Any]] = {}
    pending = [*reversed(things)]
    within = sys.maxsize  # how many are pending behind an object that can change
    while pending:
        thing = pending.pop()
        if len(pending) < within:
            within = sys.maxsize
        cls = type(thing)
        if cls in _ATOMS:
            tokens.append((cls, thing))
        elif cls is float:
            tokens.append((cls, thing.hex()))
        elif id(thing) in seen:
            # The function marks a number: no value is of such a type.
            tokens.append((_read, seen[id(thing)][0]))
        else:
            seen[id(thing)] = (len(seen), thing)
            head, inside, can_change = _open(thing)
            if can_change and within == sys.maxsize:
                changing.append(thing)
                within = len(pending)
            tokens.append((head, len(inside)))
            pending += reversed(inside)
    return tokens, changing


def _open(thing: Any) -> tuple[Any, Sequence[Any], bool]:
    """Return what represents an object, what it holds, and whether that can change."""
    cls: Any = type(thing)
    if cls in (tuple, list):
        return cls, thing[:], cls is list
    if issubclass(cls, jtu.PyTreeDef):
        return _Equals(thing), node_data(thing), False
    if issubclass(cls, np.ndarray | np.generic) and thing.dtype != object:
        return (cls, thing.dtype.str, thing.shape, thing.tobytes()), (), True
    base, attributes = fields.builtin_base(cls), fields.attributes(thing)
    inside: list[Any] = [*attributes.items()]
    if issubclass(cls, functools.partial):  # JAX's own too
        inside += thing.func, thing.args, thing.keywords
    elif cls.__module__.partition(".")[0] in _CLOSED or issubclass(cls, _BY_EQUALITY):
        return _Equals(thing), (), False
    elif issubclass(cls, set | frozenset):
        read = [_read([one]) for one in base.__iter__(thing)]
        members = frozenset(tuple(tokens) for tokens, _ in read)
        changes = cls is not frozenset or any(changing for _, changing in read)
        return (cls, members), inside, changes
    elif issubclass(cls, dict | types.MappingProxyType):
        pairs = thing if base is types.MappingProxyType else dict(base.items(thing))
        inside += getattr(thing, "default_factory", None), *pairs, *pairs.values()
    elif issubclass(cls, collections.deque):  # of no builtin class since Python 3.13
        inside += thing.maxlen, *collections.deque.__iter__(thing)
    elif issubclass(cls, list):
        inside += (*list.__iter__(thing),)
    elif issubclass(cls, types.MethodType):
        inside += thing.__func__, thing.__self__
    elif hasattr(base, "__getnewargs__"):  # of a str, a number, a tuple
        inside += base.__getnewargs__(thing)
        return cls, inside, cls.__dictoffset__ != 0
    elif issubclass(cls, bytearray):
        inside += (bytes(thing),)
    elif not (cls.__dictoffset__ or fields.slots(cls)):
        return _Equals(thing), (), False
    elif dataclasses.is_dataclass(cls) and cls.__hash__ not in (None, _NO_HASH):
        # It promises that nothing but its fields counts; Linen (Flax 0.12) relies on
        # that: two modules made apart are one if their fields are.
        names = {field.name for field in dataclasses.fields(cls)}
        inside = [item for item in inside if item[0] in names]
    # Without attributes only the class counts: eqx.nn.Shared puts such an object, a new
    # one for each model, where it took an array away (Equinox 0.11.3).
    is_itself = cls.__eq__ is object.__eq__ and base is object
    return (_Equals(thing) if is_itself and inside else cls), inside, True


class _Equals:
    """Equal while both hold one object, or equal ones of one class."""

    def __init__(self, thing: Any):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Equals) and (
            self.thing is other.thing
            or (
                type(self.thing) is type(other.thing)
                and same_structure(self.thing, other.thing)
            )
        )

    def __hash__(self) -> int:
        return hash(type(self.thing))
