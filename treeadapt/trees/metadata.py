"""Static values and metadata of nodes, compared strictly and as they once were.

JAX compares the metadata of two structures with ``==``: it takes ``1`` for ``True`` and
``1.0``, and an object that changed in place for itself. A ``Snapshot`` takes values
down by type and exact value, with all that they hold, as they are now.
Knows no leaf that is an array. See ``views`` for where structures come from.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import operator
import struct
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from pickle import PickleError
from typing import Any

import jax
import jax.tree_util as jtu

from treeadapt import _jax
from treeadapt.adapters import fields
from treeadapt.trees.views import same_structure
from treeadapt.trees.walk import Recipe

_ATOMS = frozenset({str, int, bool, bytes, type(None), type(...), type(NotImplemented)})
_BY_IDENTITY = (
    *(type, types.FunctionType, types.ModuleType, enum.Enum),
    *(jax.Array, jax.core.Tracer, type(threading.Lock()), type(threading.RLock())),
)
_BY_EQUALITY = frozenset({"jax", "jaxlib", "ml_dtypes"})  # their objects do not change
_REFUSALS = (  # of an object that cannot be pickled
    *(TypeError, ValueError, AttributeError, LookupError, RuntimeError),
    *(PickleError, Warning),
)
_NO_HASH = object.__hash__  # it hashes the address
_POINTER = struct.calcsize("P")


class Snapshot:
    """Static values as they were when this was made.

    Two snapshots are equal if their values were, by type and exact value, with all that
    they hold. Containers, dataclasses and other objects of Python classes are looked
    into, and so is what pickles. Functions, classes, modules and JAX arrays are the
    same only as themselves; so is an object without an ``__eq__``, while it holds the
    same. What cannot be looked into, such as a generator, is never the same, not even
    as itself.

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
        """Return whether the values were the same whenever this was called."""
        if self._changing and not self._changed:
            self._changed = _read(self._changing)[0] != self._then
        return not self._changed

    def is_of(self, things: Sequence[Any]) -> bool:
        """Return whether a snapshot of ``things`` would equal this one."""
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
    return getattr(thing, "__dict__", None) == {} and not (
        callable(thing) or fields.slots(type(thing)) or _has_hidden_state(type(thing))
    )


def node_data(structure: Any) -> tuple[Any, ...]:
    """Return the metadata of all nodes of a treedef or ``Recipe``.

    Returns:
        The parts of what JAX keeps of each node, children first, in one row: two equal
        structures have them at equal places. They are the caller's own objects.

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
    """Return whether things are the same, or tuples of the same, as JAX makes new."""
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
    """Return tokens that represent values, and the objects that can change in place.

    Each value is a token, followed by those of what it holds. An object that is met
    again is written as its number. No token depends on an address or a hash seed.
    """
    try:
        return _read_below(things, {})
    except RecursionError:  # sets within sets
        return [object()], [*things]


def _read_below(
    things: Iterable[Any], seen: dict[int, tuple[int, Any]]
) -> tuple[list[Any], list[Any]]:
    """Read without recursion, except in sets.

    ``seen`` has the number of each object, and the object so that its id stays its own.
    """
    tokens: list[Any] = []
    changing: list[Any] = []
    pending = [iter(things)]
    changing_from = sys.maxsize  # how deep the outermost one lies that can change
    while pending:
        for thing in pending[-1]:
            cls = type(thing)
            if cls in _ATOMS:
                tokens.append((cls, thing))
            elif cls is float:
                tokens.append((cls, thing.hex()))
            elif id(thing) in seen:
                tokens.append((_read, seen[id(thing)][0]))
            else:
                seen[id(thing)] = (len(seen), thing)
                head, inside, can_change = _open(thing, seen)
                if can_change and len(pending) < changing_from:
                    changing.append(thing)
                    changing_from = len(pending)
                tokens.append((head, len(inside)))
                pending.append(iter(inside))
                break
        else:
            pending.pop()
            if len(pending) <= changing_from:
                changing_from = sys.maxsize
    return tokens, changing


def _open(thing: Any, seen: dict[int, Any]) -> tuple[Any, Sequence[Any], bool]:
    """Return what represents an object, what it holds, and whether that can change."""
    cls: Any = type(thing)
    if issubclass(cls, _BY_IDENTITY):
        return _Is(thing), (), False
    if issubclass(cls, jtu.PyTreeDef):
        return _Equals(thing), node_data(thing), False
    is_partial = issubclass(cls, partial)  # JAX's own can change in place too
    if cls.__module__.partition(".")[0] in _BY_EQUALITY and not is_partial:
        return _Equals(thing), (), False
    if cls is tuple:
        return cls, thing, False
    if cls is list:
        return cls, thing.copy(), True
    if cls is dict:
        return cls, [*thing, *thing.values()], True
    if cls is set or cls is frozenset:
        # Each with a copy of what was seen, so that none depends on the others.
        members = [_read_below((one,), dict(seen)) for one in thing]
        can_change = cls is set or any(changing for _, changing in members)
        return (cls, frozenset(tuple(tokens) for tokens, _ in members)), (), can_change
    inside = _contents(thing)
    if inside is None:
        return (_Is(thing) if callable(thing) else object()), (), True
    is_value = hasattr(fields.builtin_base(cls), "__getnewargs__")  # a str, an int, ...
    can_change = not is_value or cls.__dictoffset__ != 0 or bool(fields.slots(cls))
    # Without attributes only the class counts: eqx.nn.Shared puts such an object, a new
    # one for each model, where it took an array away (Equinox 0.11.3).
    is_itself = cls.__eq__ is object.__eq__ and not holds_nothing(thing)
    return (_Is(thing) if is_itself else cls), inside, can_change


def _contents(thing: Any) -> Sequence[Any] | None:
    """Return what an object holds; None if it cannot be looked into."""
    cls = type(thing)
    if issubclass(cls, weakref.ref):
        return (thing(),)
    if cls is types.MappingProxyType:
        return (thing.copy(),)
    base = fields.builtin_base(cls)
    attributes = fields.attributes(thing).items()
    if issubclass(base, dict):
        factory = getattr(thing, "default_factory", None)
        return (dict(base.items(thing)), factory, *attributes)
    if issubclass(base, list | set | frozenset):
        return (base(base.__iter__(thing)), *attributes)
    if base is object and not (_has_hidden_state(cls) or _is_pickled_by_python(cls)):
        if dataclasses.is_dataclass(cls) and cls.__hash__ not in (None, _NO_HASH):
            # It promises that nothing but its fields counts, and Linen relies on that.
            names = {field.name for field in dataclasses.fields(cls)}
            return [item for item in attributes if item[0] in names]
        return tuple(attributes)
    if hasattr(base, "__getnewargs__"):
        return (*base.__getnewargs__(thing), *attributes)
    return _reduced(thing)


def _has_hidden_state(cls: type) -> bool:
    """Return whether instances are larger than their attributes: C code holds more."""
    places = len(fields.slots(cls))
    places += (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return cls.__basicsize__ > object.__basicsize__ + places * _POINTER


def _is_pickled_by_python(cls: Any) -> bool:
    # A logger or a path: its attributes are caches, handlers, locks.
    has_reduce = cls.__reduce__ is not object.__reduce__
    return has_reduce and cls.__module__.partition(".")[0] in sys.stdlib_module_names


def _reduced(thing: Any) -> list[Any] | None:
    """Return what ``pickle`` would write of an object of a class written in C."""
    reduce = copyreg.dispatch_table.get(type(thing))
    try:
        parts = reduce(thing) if reduce else thing.__reduce_ex__(4)
    except _REFUSALS:
        return None
    if isinstance(parts, str):  # a name in a module
        return None
    return [*parts[:3], *(None if part is None else list(part) for part in parts[3:5])]


class _Is:
    """Equal while both hold one object."""

    def __init__(self, thing: Any):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


class _Equals(_Is):
    """Equal while both hold equal objects of one class."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Equals)
            and type(self.thing) is type(other.thing)
            and (self.thing is other.thing or same_structure(self.thing, other.thing))
        )

    def __hash__(self) -> int:
        return hash(type(self.thing))
