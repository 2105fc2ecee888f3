"""The registry: which adapter applies to a node of a given type.

An ``AdapterRegistry`` finds the adapter for a type and remembers the answer. Order: the
exact type; the user's entries, newest first; the libraries' entries in a fixed order;
any class that JAX knows; dataclasses and attrs classes; otherwise the object is a leaf.
The class alone decides, never what an object holds. An optional library's adapters are
loaded the first time a type is looked up while that library is imported; when they load
never changes their rank.
See the other files of this folder for the containers, ``trees`` for walking them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

from treeadapt.errors import AdapterError
from treeadapt.trees.adapters import builtin, jax, named
from treeadapt.trees.adapters.adapter import Adapter, jax_knows


@dataclasses.dataclass(frozen=True, slots=True)
class NodeKind:
    """What the registry says of one type.

    Attributes:
        adapter: the adapter; None for a leaf.
        opens: JAX does not know the class: the adapter opens what JAX sees as a leaf.
        by_hand: nodes of the class are rebuilt by the adapter, not by JAX.
        sealed: an entry says that it is a leaf, so nobody looks inside it.
        is_mapping: JAX keeps the keys of its children as metadata, and nothing else.
    """

    adapter: Adapter | None = None
    opens: bool = False
    by_hand: bool = False
    sealed: bool = False
    is_mapping: bool = False


#: What the registry says of everything that no adapter applies to.
LEAF = NodeKind()

# Rows of the library table: module whose presence in ``sys.modules`` loads the adapter
# file, and the file. The order is the rank, whatever the order of loading.
_ADAPTER_FILES = (
    ("flax.nnx", "treeadapt.trees.adapters.nnx"),
    ("flax", "treeadapt.trees.adapters.flax"),
    ("paramax", "treeadapt.trees.adapters.paramax"),
    ("equinox", "treeadapt.trees.adapters.equinox"),
    ("haiku", "treeadapt.trees.adapters.haiku"),
    ("haliax", "treeadapt.trees.adapters.haliax"),
    ("penzai", "treeadapt.trees.adapters.penzai"),
    ("jax.experimental.sparse", "treeadapt.trees.adapters.sparse"),
    # Keras 3; earlier ones have no such module, and no class for a Variable.
    ("keras.src.backend.jax", "treeadapt.trees.adapters.keras"),
)


class AdapterRegistry:
    """A table from node types to adapters.

    Copies are independent: registering in a copy leaves the original alone, and
    ``use`` puts a copy in force for a block of code.

    Example:
        >>> registry = default_registry.copy()
        >>> class Net:
        ...     def __init__(self, w):
        ...         self.w = w
        >>> registry.register(Net, fields=("w",)).name
        'Net'
        >>> registry.find(Net(1.0)).opens, default_registry.find(Net(1.0)).opens
        (True, False)
    """

    def __init__(self, entries: Iterable[Adapter] = ()):
        self._lock = threading.RLock()
        self._entries: list[Adapter] = list(entries)  # the user's, newest last
        self.forget()

    def __repr__(self) -> str:
        return f"AdapterRegistry({[entry.name for entry in self._entries]})"

    def copy(self) -> AdapterRegistry:
        """Return an independent registry with the same entries."""
        with self._lock:
            return AdapterRegistry(self._entries)

    @property
    def entries(self) -> tuple[Adapter, ...]:
        """The user's own entries, newest first."""
        return tuple(reversed(self._entries))

    def register(
        self,
        entry: type | Adapter,
        fields: Sequence[str] | None = None,
        *,
        leaf: bool = False,
    ) -> Adapter:
        """Add an adapter; see ``treeadapt.register``."""
        adapter = (
            entry if isinstance(entry, Adapter) else _made(entry, fields, leaf=leaf)
        )
        if isinstance(entry, Adapter) and (fields is not None or leaf):
            raise AdapterError("Give fields= or leaf= with a class, not an Adapter.")
        if not callable(adapter.applies):
            raise AdapterError(
                f"The adapter {adapter.name!r} has applies={adapter.applies!r}. "
                "Expected a class, or a function that takes a class."
            )
        with self._lock:
            self._entries.append(adapter)
            self.forget()
        return adapter

    def find(self, node: Any) -> NodeKind:
        """Return what is known of the type of ``node``.

        Args:
            node: any object. It is only asked for its type, and JAX for whether it
                knows that type.
        """
        return self.kinds.get(type(node)) or self._search(node)

    def find_again(self, node: Any) -> NodeKind:
        """Find as ``find`` does; look up again a type that JAX may know by now."""
        kind = self.find(node)
        if (kind.opens or kind.adapter is None) and jax_knows(node):
            self.forget()
            kind = self.find(node)
        return kind

    def forget(self) -> None:
        """Look every type up again, as after a class was registered with JAX late."""
        with self._lock:
            #: What ``find`` knows by type. It keeps no class of the user's alive.
            self.kinds: MutableMapping[type, NodeKind] = weakref.WeakKeyDictionary()
            #: What other rooms derive from the entries.
            self.memo: dict[str, Any] = {}

    @contextlib.contextmanager
    def use(self) -> Iterator[AdapterRegistry]:
        """Put this registry in force within a ``with`` block, in this thread."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def _search(self, node: Any) -> NodeKind:
        cls = type(node)
        known_to_jax = jax_knows(node)
        kinds = self.kinds  # an entry registered meanwhile gets a new, empty table
        kind = LEAF
        ranked = self._ranked(cls, known_to_jax=known_to_jax)
        for adapter in sorted(ranked, key=lambda row: not row.is_exact(cls)):
            if not adapter.covers(cls):
                continue
            if adapter.leaf:
                if known_to_jax and adapter.is_exact(cls):
                    raise AdapterError(
                        f"{cls.__name__} is registered as a leaf, but JAX knows the "
                        "class and opens it. Register it with treeadapt or with JAX."
                    )
                if not known_to_jax:
                    kind = NodeKind(sealed=True)
                    break
            elif known_to_jax or adapter.unflatten is not None:
                by_hand = adapter.unflatten is not None and adapter.by_hand(cls)
                is_mapping = adapter.flatten is jax.mapping
                kind = NodeKind(
                    adapter,
                    not known_to_jax,
                    by_hand or not known_to_jax,
                    is_mapping=is_mapping,
                )
                break
        kinds[cls] = kind
        return kind

    def _ranked(self, cls: type, *, known_to_jax: bool) -> Iterator[Adapter]:
        yield from self.entries
        for library, module in _ADAPTER_FILES:
            if library in sys.modules:
                yield from importlib.import_module(module).ADAPTERS
        if known_to_jax:
            # JAX opens no subclass of a container by itself: one that it knows was
            # registered, in a way of its own.
            for row in builtin.NODES:
                if row.is_exact(cls) or not isinstance(row.applies, type):
                    yield row
            yield from jax.ADAPTERS
            return
        yield from builtin.LEAVES
        if "attr" in sys.modules:  # attrs can be imported so, and never without it
            yield from importlib.import_module("treeadapt.trees.adapters.attrs").OPENERS
        yield from builtin.OPENERS


def _made(cls: type, fields: Sequence[str] | None, *, leaf: bool) -> Adapter:
    if not isinstance(cls, type) or (fields is None) is not leaf:
        raise AdapterError(
            "Give register a class and its fields, register(Net, fields=('w', 'b')), "
            f"a class and leaf=True, or an Adapter; got {cls!r}."
        )
    if fields is None:
        return Adapter(name=cls.__name__, applies=cls, leaf=True)
    names = (fields,) if isinstance(fields, str) else tuple(fields)
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise AdapterError(
            f"fields of {cls.__name__} must be different strings: {names!r}."
        )
    return named.adapter_of_fields(cls, names)


#: The registry that every function uses unless another one is in force.
default_registry = AdapterRegistry()
_current: contextvars.ContextVar[AdapterRegistry] = contextvars.ContextVar(
    "treeadapt_registry", default=default_registry
)


#: Returns the registry in force: the default one unless within ``use``.
current_registry = _current.get


def register(
    entry: type | Adapter, fields: Sequence[str] | None = None, *, leaf: bool = False
) -> Adapter:
    """Register a class, in one line or in full.

    Args:
        entry: a class, or an ``Adapter``.
        fields: for a class, the names of its children. If JAX knows the class, one name
            for each child in JAX's order; if it does not, the attributes that hold
            children: such an object is opened, and rebuilt without its constructor.
        leaf: for a class that JAX does not know: its instances are leaves, whatever
            they hold.

    Returns:
        The adapter that was registered. The newest entry for a class decides.

    Raises:
        AdapterError: not just one of ``fields`` and ``leaf`` is given, the fields are
            malformed, or the class is one of values or of plain containers.

    Example:
        >>> class Net:
        ...     def __init__(self, w, b):
        ...         self.w, self.b = w, b
        >>> with default_registry.copy().use():  # leaves the default one alone
        ...     register(Net, fields=("w", "b")).name
        'Net'
    """
    return current_registry().register(entry, fields, leaf=leaf)
