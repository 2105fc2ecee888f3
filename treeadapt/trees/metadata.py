"""Static values and metadata of nodes, compared strictly and as they once were.

JAX compares the metadata of two structures with ``==``: it takes ``1`` for ``True`` and
``1.0``, and an object that changed in place for itself. A ``Snapshot`` takes values
down by type and exact value, with all that they hold, as they are now.
Knows no leaf that is an array; where structures come from is up to ``plans``.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import operator
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from pickle import PickleError
from typing import Any

import jax
import jax.tree_util as jtu

from treeadapt import _jax
from treeadapt.adapters import fields
from treeadapt.trees.walk import Program

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

    __slots__ = ("_changed", "_then", "_tokens", "_watched", "things")

    def __init__(self, things: Sequence[Any]):
        self.things = tuple(things)
        self._tokens, self._watched = _read(self.things)
        self._then = _read(self._watched)[0]
        self._changed = False

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Snapshot) or self._tokens != other._tokens:
            return False
        if _same(self._watched, other._watched):
            return not (self._changed or other._changed)
        return self.is_current() and other.is_current()

    def __hash__(self) -> int:
        return hash(len(self.things))

    def is_current(self) -> bool:
        """Tell whether the values are what they were, whenever this was asked."""
        if self._watched and not self._changed:
            self._changed = _read(self._watched)[0] != self._then
        return not self._changed

    def is_of(self, things: Sequence[Any]) -> bool:
        """Tell whether a snapshot of ``things`` would be this one."""
        return (
            len(things) == len(self.things)
            and all(map(_is_alike, things, self.things))
            and self.is_current()
        )


def same_static(one: Any, two: Any) -> bool:
    """Compare two static values by type and exact value.

    ``1``, ``True`` and ``1.0`` are different, ``0.0`` and ``-0.0`` too, however deep
    inside; NaN equals itself.

    Example:
        >>> same_static(1, True), same_static([0.0], [-0.0]), same_static("a", "a")
        (False, False, True)
    """
    return one is two or _read([one])[0] == _read([two])[0]


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

    _jax.walk(structure, note)
    return tuple(found)


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _is_alike(one: Any, two: Any) -> bool:
    """Tell whether two values are one, or tuples of the same, as JAX makes anew."""
    return one is two or (type(one) is type(two) is tuple and _same(one, two))


def _read(things: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return tokens that stand for values, and the objects that can change in place."""
    reader = _Reader({})
    try:
        reader.read(things)
    except RecursionError:  # sets within sets
        return (_Never(),), (things,)
    return tuple(reader.tokens), tuple(reader.watched)


def _atoms(things: Sequence[Any]) -> tuple[tuple[type, ...], Sequence[Any]] | None:
    """Return the types of things and the things if all are atoms."""
    types_of = tuple(map(type, things))
    return (types_of, tuple(things)) if _ATOMS.issuperset(types_of) else None


class _Reader:
    """Writes down values and what they hold, without recursion but for sets.

    Each value is a token, followed by those of what it holds. An object that is met
    again is written as its number. No token depends on an address or a hash seed.
    """

    def __init__(self, seen: dict[int, tuple[int, Any]]) -> None:
        self.tokens: list[Any] = []
        self.watched: list[Any] = []  # what can change, without what lies in it
        self._seen = seen  # number, and the object itself, so that its id stays its own

    def read(self, things: Iterable[Any]) -> None:
        pending = [iter(things)]
        watched_from = sys.maxsize  # how deep the one lies that is watched
        while pending:
            for thing in pending[-1]:
                cls = type(thing)
                if cls in _ATOMS:
                    self.tokens.append((cls, thing))
                elif cls is float:
                    self.tokens.append((cls, thing.hex()))
                elif cls is tuple and (atoms := _atoms(thing)):
                    self.tokens.append(atoms)
                elif id(thing) in self._seen:
                    self.tokens.append((_Reader, self._seen[id(thing)][0]))
                else:
                    self._seen[id(thing)] = (len(self._seen), thing)
                    head, inside, can_change = _opener(cls)(self, thing)
                    if can_change and len(pending) < watched_from:
                        self.watched.append(thing)
                        watched_from = len(pending)
                    self.tokens.append((head, len(inside)))
                    pending.append(iter(inside))
                    break
            else:
                pending.pop()
                if len(pending) <= watched_from:
                    watched_from = sys.maxsize

    def unordered(self, things: Iterable[Any]) -> frozenset[Any]:
        """Return what stands for values that have no order."""
        found = []
        for thing in things:
            reader = _Reader(dict(self._seen))  # so that none depends on the others
            reader.read((thing,))
            self.watched += reader.watched
            found.append(tuple(reader.tokens))
        return frozenset(found)


# What represents an object, what it holds, and whether that can change in place.
_Opened = tuple[Any, Sequence[Any], bool]


_Opener = Callable[["_Reader", Any], _Opened]
_OPENERS: MutableMapping[type, _Opener] = weakref.WeakKeyDictionary()  # known ones


def _opener(cls: type) -> _Opener:
    """Return the function that opens objects of a class."""
    found = _OPENERS.get(cls)
    if found is None:
        found = _OPENERS[cls] = _search(cls)
    return found


def _search(cls: type) -> _Opener:
    if issubclass(cls, _BY_IDENTITY):
        return _itself
    if issubclass(cls, jtu.PyTreeDef):
        return _treedef
    if issubclass(cls, weakref.ref):
        return _weakly
    is_partial = issubclass(cls, functools.partial)  # JAX's own can change in place too
    if cls.__module__.partition(".")[0] in _BY_EQUALITY and not is_partial:
        return _equal
    for base, opener in _CONTAINERS.items():
        if issubclass(cls, base):
            return opener if cls is base else _subclass
    base = fields.builtin_base(cls)
    if base is not object and hasattr(base, "__getnewargs__"):  # of a str, an int, ...
        return _subclass
    if base is not object or _has_hidden_state(cls) or _is_pickled_by_python(cls):
        return _pickled
    if dataclasses.is_dataclass(cls) and cls.__hash__ not in (None, object.__hash__):
        return _value
    return _attributes


def _itself(_: _Reader, thing: Any) -> _Opened:
    return _Is(thing), (), False


def _equal(_: _Reader, thing: Any) -> _Opened:
    return _Equals(thing), (), False


def _treedef(_: _Reader, thing: Any) -> _Opened:
    return _Equals(thing), node_data(thing), False


def _weakly(_: _Reader, thing: Any) -> _Opened:
    return type(thing), (thing(),), True


def _tuple(_: _Reader, thing: Any) -> _Opened:
    return tuple, thing, False


def _list(_: _Reader, thing: Any) -> _Opened:
    return _changing(list, thing.copy())


def _dict(_: _Reader, thing: Any) -> _Opened:
    return _changing(dict, [*thing, *thing.values()])


def _changing(head: Any, inside: Sequence[Any]) -> _Opened:
    atoms = _atoms(inside)
    return ((head, atoms), (), True) if atoms else (head, inside, True)


def _set(reader: _Reader, thing: Any) -> _Opened:
    return (type(thing), reader.unordered(thing)), (), type(thing) is set


def _proxy(_: _Reader, thing: Any) -> _Opened:
    return type(thing), (thing.copy(),), True


_CONTAINERS: dict[type, _Opener] = {
    tuple: _tuple,
    list: _list,
    dict: _dict,
    set: _set,
    frozenset: _set,
    types.MappingProxyType: _proxy,
}


def _subclass(_: _Reader, thing: Any) -> _Opened:
    """Open an object of a class that is made from one of Python's own."""
    attributes = tuple(fields.attributes(thing).items())
    base = fields.builtin_base(type(thing))
    if issubclass(base, dict):
        factory = getattr(thing, "default_factory", None)
        return _head(thing), (dict(base.items(thing)), factory, *attributes), True
    if issubclass(base, list | set | frozenset):
        return _head(thing), (base(base.__iter__(thing)), *attributes), True
    can_change = bool(attributes) or type(thing).__dictoffset__ != 0
    return _head(thing), (*base.__getnewargs__(thing), *attributes), can_change


def _attributes(_: _Reader, thing: Any) -> _Opened:
    return _head(thing), tuple(fields.attributes(thing).items()), True


def _value(_: _Reader, thing: Any) -> _Opened:
    """Open a dataclass that compares its fields and promises not to change them."""
    attributes = fields.attributes(thing)
    names = [field.name for field in dataclasses.fields(thing)]
    return type(thing), [(name, attributes.get(name)) for name in names], True


def _pickled(_: _Reader, thing: Any) -> _Opened:
    inside = _reduced(thing)
    if inside is None:
        return (_Is(thing) if callable(thing) else _Never()), (), True
    return _head(thing), inside, True


def _head(thing: Any) -> Any:
    cls: Any = type(thing)
    return _Is(thing) if cls.__eq__ is object.__eq__ else cls


def _has_hidden_state(cls: type) -> bool:
    """Tell whether instances are larger than their attributes: C code holds more."""
    places = len(fields.slots(cls))
    places += (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return cls.__basicsize__ > object.__basicsize__ + places * _POINTER


def _is_pickled_by_python(cls: Any) -> bool:
    # A logger or a path: its attributes are caches, handlers, locks.
    own = cls.__reduce__ is not object.__reduce__
    return own and cls.__module__.partition(".")[0] in sys.stdlib_module_names


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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Is:
    """Equal while both hold one object."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Is) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Equals:
    """Equal while both hold equal objects of one class."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Equals) or type(self.thing) is not type(other.thing):
            return False
        if self.thing is other.thing:
            return True
        # JAX compares treedefs without some of the classes, which their hash tells.
        same_hash = not isinstance(self.thing, jtu.PyTreeDef) or (
            hash(self.thing) == hash(other.thing)
        )
        return same_hash and bool(self.thing == other.thing)

    def __hash__(self) -> int:
        return hash(type(self.thing))


class _Never:
    """Equal to nothing."""

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0
