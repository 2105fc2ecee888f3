"""Hypothesis strategies for trees whose paths collide, and a slow reference of paths.

Free text finds no collision in thousands of trees, so keys come from an alphabet of
seven words, of equal numbers and of tuples. A *plan of a tree* (``Node``, ``Leaf``) is
drawn first and built afterwards, so one plan gives several trees: in other classes,
with other insertion orders, with new leaf objects. Classes come from a fixed pool: one
that JAX knows is never freed.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import flax.struct
import jax.tree_util as jtu
import numpy as np
from flax.core import FrozenDict
from hypothesis import strategies as st


class Word(enum.StrEnum):
    A = "a"
    B = "b"


class Number(enum.IntEnum):
    ONE = 1


WORDS = ("", "a", "b", "a/b", "b/a", "0", "1", Word.A, Word.B)
NUMBERS = (0, 1, 2, True, 1.0, -0.0, 0.5, np.int64(1), Number.ONE)
TUPLES = (("a",), ("b",), ("a", "b"), ("a/b",), ("a,b",))
FAMILIES = (WORDS, WORDS, WORDS, NUMBERS, TUPLES)  # words collide, so mostly words
FIELDS = ((), ("a",), ("b",), ("a", "b"), ("b", "a"), ("a", "b", "c"))


def _default(items: Any) -> Any:
    return collections.defaultdict(list, items)


def _frozen(items: Any) -> Any:
    return FrozenDict(items, __unsafe_skip_copy__=True)  # copying would sort the rest


MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": _default,
    "FrozenDict": _frozen,
}
SEQUENCES: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
}


def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields)


def _dataclass(name: str, fields: tuple[str, ...]) -> Any:
    return dataclasses.make_dataclass(name, fields, eq=False)


def _registered(name: str, fields: tuple[str, ...]) -> Any:
    return jtu.register_dataclass(_dataclass(name, fields))


def _struct(name: str, fields: tuple[str, ...]) -> Any:
    body = {"__annotations__": dict.fromkeys(fields, Any)}
    return flax.struct.dataclass(type(name, (), body))


def _module(name: str, fields: tuple[str, ...]) -> Any:
    body = {"__annotations__": dict.fromkeys(fields, Any)}
    return types.new_class(name, (eqx.Module,), exec_body=lambda ns: ns.update(body))


RECORDS = {
    "NamedTuple": _namedtuple,
    "dataclass": _dataclass,
    "register_dataclass": _registered,
    "flax.struct": _struct,
    "Equinox": _module,
}
#: Two classes for each kind of record and each choice of fields.
POOL = {
    (kind, fields): tuple(make(name, fields) for name in ("One", "Two"))
    for kind, make in RECORDS.items()
    for fields in FIELDS
}
OPAQUE = frozenset({"dataclass"})

LEAVES: dict[str, Callable[[], Any]] = {
    "float": lambda: np.zeros(2, np.float32),
    "int": lambda: np.zeros(3, np.int32),
    "function": lambda: operator.add,
    "text": lambda: "text",
}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of a plan; ``None`` of the tree if it has no kind."""

    kind: str | None


@dataclasses.dataclass(frozen=True)
class Node:
    """A container of a plan: its kind, and its children in order of insertion."""

    kind: str
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


def build(
    plan: Node | Leaf, *, backwards: bool = False, variant: int = 0, make: Any = None
) -> Any:
    """Build the tree of a plan, with new leaves.

    Args:
        plan: of the tree.
        backwards: insert the keys of mappings in the opposite order.
        variant: which class of the pool.
        make: called with each ``Leaf`` for its leaf; see ``LEAVES``.
    """
    if isinstance(plan, Leaf):
        return None if plan.kind is None else (make or _new_leaf)(plan)
    children = [
        build(child, backwards=backwards, variant=variant, make=make)
        for child in plan.children
    ]
    if plan.kind in SEQUENCES:
        return SEQUENCES[plan.kind](children)
    if plan.kind in MAPPINGS:
        items = list(zip(plan.keys, children, strict=True))
        return MAPPINGS[plan.kind](dict(items[::-1] if backwards else items))
    cls = POOL[plan.kind, plan.keys][variant]
    return cls(**dict(zip(plan.keys, children, strict=True)))


def _new_leaf(leaf: Leaf) -> Any:
    return LEAVES[leaf.kind]()


def reference(tree: Any, path: str | None = None) -> Iterator[tuple[str, Any]]:
    """Every leaf of a built tree with its path, found without the library."""
    children = _children(tree)
    if children is None:
        yield path or "", tree
        return
    for name, child in children:
        yield from reference(child, name if path is None else f"{path}/{name}")


def sibling_clash(tree: Any) -> bool:
    """Return whether two children of one node have the same name."""
    children = _children(tree)
    if children is None:
        return False
    names = [name for name, _ in children]
    return len(set(names)) < len(names) or any(
        sibling_clash(child) for _, child in children
    )


def is_opaque(plan: Node | Leaf) -> bool:
    """Return whether JAX sees some node of the tree as one leaf."""
    return isinstance(plan, Node) and (
        plan.kind in OPAQUE or any(map(is_opaque, plan.children))
    )


def text(key: Any) -> str:
    """The text of a key, written independently of the library."""
    if isinstance(key, tuple):
        return "(" + ",".join(text(part) for part in key) + ")"
    if isinstance(key, str):
        return "".join(key)
    number = float(key)
    return str(int(number)) if number == int(number) else str(number)


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    if tree is None:
        return []
    if isinstance(tree, collections.OrderedDict):
        return [(text(key), child) for key, child in tree.items()]
    if isinstance(tree, FrozenDict):
        tree = tree._dict  # indexing would wrap what is in it
    if isinstance(tree, dict):
        return [(text(key), tree[key]) for key in sorted(tree)]
    if hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, list | tuple):
        return [(str(place), child) for place, child in enumerate(tree)]
    if dataclasses.is_dataclass(tree):
        return [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return None


def _nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Node]:
    return st.one_of(_mapping(children), _sequence(children), _record(children))


@st.composite
def _mapping(draw: Any, children: st.SearchStrategy[Any]) -> Node:
    kind = draw(st.sampled_from(sorted(MAPPINGS)))
    # Only an OrderedDict, which is never sorted, can hold keys of several families.
    mixed = kind == "OrderedDict" and draw(st.booleans())
    family = (*WORDS, *NUMBERS) if mixed else draw(st.sampled_from(FAMILIES))
    keys = draw(st.lists(st.sampled_from(family), max_size=4, unique=True))
    return Node(kind, tuple(keys), tuple(draw(children) for _ in keys))


@st.composite
def _sequence(draw: Any, children: st.SearchStrategy[Any]) -> Node:
    inner = draw(st.lists(children, max_size=3))
    kind = draw(st.sampled_from(sorted(SEQUENCES)))
    return Node(kind, tuple(range(len(inner))), tuple(inner))


@st.composite
def _record(draw: Any, children: st.SearchStrategy[Any]) -> Node:
    kind, fields = draw(st.sampled_from(sorted(POOL)))
    return Node(kind, fields, tuple(draw(children) for _ in fields))


leaves = st.sampled_from([*map(Leaf, LEAVES), Leaf("float"), Leaf("int"), Leaf(None)])

#: Plans of trees of any kind, some of which have colliding paths.
plans = st.recursive(leaves, _nodes, max_leaves=8)
#: Plans of trees with likely collisions: dicts of dicts with words as keys.
word_dicts = st.recursive(
    st.just(Leaf("float")),
    lambda children: st.dictionaries(
        st.sampled_from(("a", "b", "a/a", "a/b", "")), children, min_size=2, max_size=4
    ).map(lambda found: Node("dict", tuple(found), tuple(found.values()))),
    max_leaves=12,
)
