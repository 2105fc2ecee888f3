"""One adapter: how a family of node types gives named children and is rebuilt.

Both directions are side by side. See ``registry`` for which adapter applies to a type;
the adapters themselves are in a file for each library.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from treeadapt.errors import AdapterError
from treeadapt.trees import _jax


class _Box(enum.Enum):
    """Type of ``BOX``: one value, also after copying or unpickling."""

    BOX = enum.auto()

    def __repr__(self) -> str:
        return self.name


#: Key of a child that adds no segment: it is at the path of its parent.
BOX = _Box.BOX


class Flat(NamedTuple):
    """One node taken apart.

    Attributes:
        keys: one key a child; ``BOX`` for a child that adds no segment. Where JAX knows
            the class, trees that JAX holds equal must have equal keys.
        children: the child trees, in the order in which JAX flattens them if JAX knows
            the class.
        aux: whatever else ``unflatten`` needs; holds no array. Where it does not hash,
            the structure is looked at again on every conversion.

    Example:
        >>> Flat(("w", "b"), (1.0, 2.0), aux="relu").keys
        ('w', 'b')
    """

    keys: Sequence[Any]
    children: Sequence[Any]
    aux: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class AxisNames:
    """What a box says of the axes of its array.

    Attributes:
        names: one an axis: a name, several, or None.
        rules: pairs that translate them into mesh axes, which came with the box.
        logical: the names are certainly no mesh axes.
        is_note: they ask for nothing where nobody translates one of them.
    """

    names: tuple[Any, ...]
    rules: Sequence[tuple[str, Any]] = ()
    logical: bool = True
    is_note: bool = False


def _no_children(_: Any) -> Flat:
    return Flat((), ())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """How one family of node types gives named children and is rebuilt.

    Attributes:
        name: what messages and reports call it.
        applies: a class (it and its subclasses), or a test on the node's type.
        flatten: takes a node apart into ``Flat(keys, children, aux)``.
        unflatten: ``(aux, children) -> node``, running no constructor of the class;
            None where JAX itself rebuilds the node. Without it the adapter applies only
            to classes that JAX knows.
        by_hand: test on the node's type: rebuild with ``unflatten`` although JAX could,
            because JAX's way runs code of the class that may change or refuse values.
        leaf: instances are leaves, whatever they hold, and nobody looks inside them.
            Applies only to classes that JAX does not know, and needs no ``flatten``.
        trains: False for a node whose arrays no optimizer should see, such as batch
            statistics.
        random: True for a node that holds random state, such as a counter of draws:
            where a checkpoint has none, ``load`` leaves that of the target.
        shared: one object under two paths is one node, and comes back as one.
        axis_names: takes a node that holds one array, and gives the name of each of its
            axes, None for an axis without one; or None. ``named_shardings`` shards it
            by them if ``logical_axes=`` has one of them, and then needs all; ``stacks``
            may name an axis so.

    Example:
        >>> import types
        >>> Adapter(
        ...     name="SimpleNamespace",
        ...     applies=types.SimpleNamespace,
        ...     flatten=lambda n: Flat([*vars(n)], [*vars(n).values()], tuple(vars(n))),
        ...     unflatten=lambda aux, children: types.SimpleNamespace(
        ...         **dict(zip(aux, children))
        ...     ),
        ... ).name
        'SimpleNamespace'
    """

    name: str
    applies: type | Callable[[type], bool]
    flatten: Callable[[Any], Flat] = _no_children
    unflatten: Callable[[Any, Sequence[Any]], Any] | None = None
    by_hand: Callable[[type], bool] = lambda _: False
    leaf: bool = False
    trains: Callable[[Any], bool] = lambda _: True
    random: Callable[[Any], bool] = lambda _: False
    shared: bool = False
    axis_names: Callable[[Any], Sequence[Any] | AxisNames | None] | None = None

    def covers(self, cls: type) -> bool:
        """Return whether this adapter applies to nodes of class ``cls``."""
        if isinstance(self.applies, type):
            return issubclass(cls, self.applies)
        return bool(self.applies(cls))

    def is_exact(self, cls: type) -> bool:
        """Return whether this adapter was made for just the class ``cls``."""
        return self.applies is cls

    def open(self, node: Any) -> Flat:
        """Take a node apart with ``flatten``.

        Raises:
            AdapterError: ``flatten`` returns something other than a ``Flat`` with one
                key for each child.
        """
        flat = self.flatten(node)
        if isinstance(flat, Flat) and _is_row(flat.keys) and _is_row(flat.children):
            if len(flat.keys) == len(flat.children):
                return flat
            got = f"{len(flat.keys)} keys and {len(flat.children)} children"
        else:
            parts = flat if isinstance(flat, Flat) else (flat,)
            got = ", ".join(type(part).__name__ for part in parts)
        raise AdapterError(
            f"The adapter {self.name!r} takes a {type(node).__name__} apart wrongly: "
            "flatten must return Flat(keys, children, aux), with one key for each "
            f"child; it returned {got}."
        )


def _is_row(items: Any) -> bool:
    return isinstance(items, Collection) and not isinstance(items, Mapping | str)


def jax_knows(node: Any) -> bool:
    """Return whether JAX flattens objects of the type of ``node`` (None included)."""
    try:
        return _jax.one_level(node) is not None
    except (TypeError, ValueError):  # it has a way, which fails, as for odd keys
        return True
