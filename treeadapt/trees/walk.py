"""One walk over a tree: its leaves, their paths, and the way back.

Visits a tree node by node with the registry's adapters, in JAX's leaf order, without
recursion. The way back is a ``Recipe``: the steps, in postfix order, that rebuild the
caller's classes where JAX cannot (opaque classes, variables with an identity,
constructors with code of their own). It holds no leaf.
Knows nothing of caching (see ``views``).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from treeadapt.errors import AdapterError, PathCollisionError, PathError
from treeadapt.text.names import listing, plural
from treeadapt.trees import _jax
from treeadapt.trees import paths as _paths
from treeadapt.trees.adapters import fields
from treeadapt.trees.adapters.adapter import BOX, Adapter, Flat
from treeadapt.trees.adapters.jax import treedef_of_node
from treeadapt.trees.adapters.registry import LEAF, AdapterRegistry, NodeKind
from treeadapt.trees.arrays import is_array
from treeadapt.trees.exact import exact_places
from treeadapt.trees.flatten import MAX_DEPTH, cycle_error, depth_error
from treeadapt.trees.opaque import (
    Searcher,
    is_plain,
    leaf_error,
    node_error,
    passed_over,
)

T = TypeVar("T")

_MAX_PLAIN = 256

#: Key of the root's place in ``Walk.skeleton``.
ROOT = "root"


class _Step(NamedTuple):
    """Build one node out of the ``width`` trees on the stack, or use one again."""

    number: int | None  # of a node that may be met again
    unflatten: Callable[[Any, Sequence[Any]], Any] | None = None  # None: met again
    aux: Any = None
    width: int = 0


class Recipe:
    """The way back for a tree that JAX cannot rebuild: steps in postfix order.

    An ``int`` is the index of a leaf.
    """

    def __init__(self, steps: Sequence[int | _Step]):
        self._steps = tuple(steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._steps == other._steps

    def __hash__(self) -> int:
        return hash(len(self._steps))

    @property
    def metadata(self) -> tuple[Any, ...]:
        """What the nodes are built from in addition to their children, in order."""
        return tuple(
            step.aux
            for step in self._steps
            if isinstance(step, _Step) and step.unflatten
        )

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build the tree around ``leaves``, bottom up."""
        stack: list[Any] = []
        nodes: dict[int | None, Any] = {}
        for step in self._steps:
            if isinstance(step, int):
                stack.append(leaves[step])
            elif step.unflatten is None:
                stack.append(nodes[step.number])
            else:
                start = len(stack) - step.width
                node = step.unflatten(step.aux, stack[start:])
                del stack[start:]
                stack.append(node)
                nodes[step.number] = node
        return stack[0]


class _Spot(NamedTuple):
    """Where something is: its path, and its place in the skeleton."""

    path: str | None  # None: the root
    container: dict[str, Any]
    name: str


@dataclasses.dataclass(slots=True)
class _Frame:
    """One node: where it is, its children still to come, and what it is made of."""

    pairs: Iterator[tuple[Any, Any]]
    spot: _Spot
    prefix: str = ""  # of the paths below
    trains: bool = True
    random: bool = False
    in_opaque: bool = False
    node: Any = None
    kind: NodeKind = LEAF
    aux: Any = None
    count: int = 0
    number: int | None = None

    def finish(self) -> _Step:
        """Return the step that builds the node again."""
        adapter = self.kind.adapter
        if self.kind.by_hand and adapter is not None and adapter.unflatten is not None:
            return _Step(self.number, adapter.unflatten, self.aux, self.count)
        # With the class, because treedefs of other classes may be equal (JAX 0.10).
        aux = (type(self.node), treedef_of_node(self.node))
        return _Step(self.number, _unflatten_one_level, aux, self.count)


_DONE: Iterator[Any] = iter(())
_NOWHERE = _Spot(None, {}, "")


def _unflatten_one_level(aux: tuple[type, Any], children: Sequence[Any]) -> Any:
    return aux[1].unflatten(children)


class Walk:
    """What one walk over a tree collects.

    Attributes:
        leaves: each leaf; one under a shared node is listed once.
        paths: label path of each leaf.
        seen: what JAX flattens the tree to: leaves, shared ones again, opaque objects.
        untrained: indices of leaves that no optimizer should see.
        random: indices of leaves that are random state.
        nodes: classes of the nodes and boxes at each path; None is the root's path.
        skeleton: ``{ROOT: state dict}``, with the index of each leaf in its place.
        shared: number of each node with an identity, the node and its path, by its
            ``id``.
        ties: path at which such a node is met again, and the path that it has.
        by_hand: JAX cannot rebuild the tree; ``recipe`` can.
        cacheable: what JAX compares of the structure never changes.
    """

    def __init__(self, registry: AdapterRegistry, plain: set[type]):
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.seen: list[Any] = []
        self.untrained: set[int] = set()
        self.random: set[int] = set()
        self.nodes: dict[str | None, tuple[type, ...]] = {}
        self.skeleton: dict[str, Any] = {}
        self.shared: dict[int, tuple[int, Any, str | None]] = {}
        self.ties: dict[str, str] = {}
        self.by_hand = False
        self.cacheable = True
        self._registry = registry
        self._plain = plain  # classes of leaves that need no closer look
        self._frames: list[_Frame] = []
        self._opened: set[int] = set()  # nodes above, from the first opaque one on
        self._steps: list[int | _Frame | _Step] = []
        self._chains: dict[tuple[type, ...], tuple[type, ...]] = {}  # one of each

    @functools.cached_property
    def _searcher(self) -> Searcher:
        return Searcher(self._registry)

    def run(self, tree: Any) -> Walk:
        """Visit every node and leaf of ``tree``."""
        kinds, find = self._registry.kinds, self._registry.find
        frames, plain = self._frames, self._plain
        # Faster than ``kinds``, which holds no class.
        by_class: dict[type, NodeKind] = {}
        spot = _Spot(None, self.skeleton, ROOT)
        frames.append(_Frame(iter(((BOX, tree),)), spot))
        while frames:
            frame = frames[-1]
            for key, child in frame.pairs:
                if key is BOX:
                    spot = frame.spot
                else:
                    name = key if type(key) is str else _segment(key, frame)
                    container = frame.spot.container[frame.spot.name]
                    if not isinstance(container, dict):
                        raise _box_error(frame.spot)
                    if name in container:
                        raise self._collision(frame, name)
                    spot = _Spot(frame.prefix + name, container, name)
                cls = type(child)
                kind = by_class.get(cls) or kinds.get(cls) or find(child)
                by_class[cls] = kind
                if (kind.adapter is None or kind.opens) and cls not in plain:
                    kind = self._look_closer(child, spot)
                if kind.adapter is None:
                    self._add_leaf(child, spot, frame)
                elif kind.adapter.shared and id(child) in self.shared:
                    self._add_again(child, spot, frame)
                else:
                    self._enter(child, kind.adapter, kind, spot, frame)
                    break
            else:
                frames.pop()
                if frames:  # the first one only holds the root
                    # After its children: postfix order. The step is made of the frame
                    # in ``recipe``, which few walks ask for.
                    self._steps.append(frame)
                    self._opened.discard(id(frame.node))
                    # Python's collector goes through all that is kept.
                    frame.pairs, frame.spot = _DONE, _NOWHERE
        return self

    def is_faithful(self, leaves: Sequence[Any]) -> bool:
        """Return whether the walk met just what JAX flattens, in JAX's order."""
        if len(leaves) != len(self.seen):
            return False
        if all(map(operator.is_, leaves, self.seen)):
            return True
        # Some classes make new leaf objects whenever they are flattened.
        ours, theirs = set(map(id, self.seen)), set(map(id, leaves))
        return all(
            a is b or (type(a) is type(b) and id(a) not in theirs and id(b) not in ours)
            for a, b in zip(self.seen, leaves, strict=True)
        )

    def order_error(self, leaves: Sequence[Any]) -> AdapterError:
        """Return the error for a tree that JAX flattens to other ``leaves``."""
        classes = {cls for chain in self.nodes.values() for cls in chain}
        entries = self._registry.entries
        registered = [x.name for x in entries if any(map(x.covers, classes))]
        names = registered or sorted(cls.__name__ for cls in classes)
        theirs, ours = plural(len(leaves), "leaf"), f"{len(self.seen):,}"
        if len(leaves) == len(self.seen):
            ours = "the same number in another order"
        return AdapterError(
            f"JAX flattens this tree to {theirs}, its adapters to {ours}. Check "
            f"{listing(names)}: where JAX knows the class, the children must be those "
            "of JAX, in JAX's order."
        )

    def recipe(self) -> Recipe:
        """Return the steps that rebuild the tree; they hold no leaf."""
        steps = self._steps
        return Recipe([s.finish() if isinstance(s, _Frame) else s for s in steps])

    def _look_closer(self, node: Any, spot: _Spot) -> NodeKind:
        """Decide whether an object that JAX takes for a leaf is one."""
        kind = self._registry.find_again(node)
        if kind.adapter is None:
            if kind.sealed or is_plain(type(node)) or is_array(node):
                if len(self._plain) >= _MAX_PLAIN:
                    self._plain.clear()  # classes made in a loop must not pile up
                self._plain.add(type(node))
            elif _asked(self._searcher.holds_array, node, spot):
                hidden = self._searcher.full(fields.attributes(node))
                raise leaf_error(node, spot.path or "", hidden)
        return kind

    def _add_leaf(self, leaf: Any, spot: _Spot, frame: _Frame) -> None:
        if spot.container.get(spot.name) not in (None, {}):
            raise _box_error(spot)
        spot.container[spot.name] = index = len(self.leaves)
        self.leaves.append(leaf)
        self.paths.append(spot.path or "")
        self._steps.append(index)
        if not frame.trains:
            self.untrained.add(index)
        if frame.random:
            self.random.add(index)
        if not frame.in_opaque:
            self.seen.append(leaf)

    def _add_again(self, node: Any, spot: _Spot, frame: _Frame) -> None:
        self.by_hand = True
        number, _, home = self.shared[id(node)]
        self.ties[spot.path or ""] = home or ""
        self._steps.append(_Step(number))
        if not frame.in_opaque:
            self.seen += jax.tree.leaves(node)

    def _enter(
        self, node: Any, adapter: Adapter, kind: NodeKind, spot: _Spot, above: _Frame
    ) -> None:
        if kind.is_mapping:  # most nodes: no code of an adapter is needed
            children, keys = _jax.one_level(node)
            flat, trains = Flat(keys, children), above.trains
            random = above.random
        else:
            flat = _asked(adapter.open, node, spot)
            trains = above.trains and adapter.trains(node)
            random = above.random or adapter.random(node)
        if node is None:
            spot.container.setdefault(spot.name, None)
        elif spot.container.get(spot.name) is None:
            spot.container[spot.name] = {}
        chain = (*self.nodes.get(spot.path, ()), type(node))
        self.nodes[spot.path] = self._chains.setdefault(chain, chain)
        if kind.opens or above.in_opaque:  # JAX did not look for cycles there
            self._go_down(node, kind, spot)
        if kind.opens:
            if hidden := self._searcher.full(passed_over(flat)):
                raise node_error(node, spot.path or "", flat.keys, hidden)
            if not above.in_opaque:
                self.seen.append(node)
        self.by_hand |= kind.by_hand
        self.cacheable &= flat.aux is None or _hashes(flat.aux)
        number = None
        if adapter.shared:
            number = len(self.shared)
            # The node is kept, so that its id stays its own.
            self.shared[id(node)] = (number, node, spot.path)
        self._frames.append(
            _Frame(
                pairs=zip(flat.keys, flat.children, strict=True),
                spot=spot,
                prefix="" if spot.path is None else spot.path + _paths.SEPARATOR,
                trains=trains,
                random=random,
                in_opaque=above.in_opaque or kind.opens,
                node=node,
                kind=kind,
                aux=flat.aux,
                count=len(flat.children),
                number=number,
            )
        )

    def _go_down(self, node: Any, kind: NodeKind, spot: _Spot) -> None:
        is_cycle = id(node) in self._opened
        if is_cycle or len(self._frames) > MAX_DEPTH:
            names = [*(above.spot.name for above in self._frames[2:]), spot.name]
            if is_cycle:
                raise cycle_error(names, opened=type(node).__name__ * kind.opens)
            raise depth_error(len(names), names)
        self._opened.add(id(node))

    def _collision(self, frame: _Frame, name: str) -> PathCollisionError:
        nodes = [above.node for above in self._frames[1:]]
        adapter = self._registry.find(nodes[-1]).adapter
        keys = adapter.open(nodes[-1]).keys if adapter else ()
        same = [
            index
            for index, key in enumerate(keys)
            if key is not BOX and _paths.segment(key) == name
        ]
        exact = exact_places(nodes, same, self._registry)
        return PathCollisionError(
            f"Two children of the {type(nodes[-1]).__name__} at "
            f"{(frame.spot.path or '')!r} have the same name {name!r}: "
            f"{' and '.join(exact[:2])}. Not even a nested dict can hold both. Rename "
            "one of the keys."
        )


def _asked(fn: Callable[[Any], T], node: Any, spot: _Spot) -> T:
    """Return ``fn(node)``; an error says where the node is."""
    try:
        return fn(node)
    except AdapterError as error:
        raise AdapterError(f"At {(spot.path or '')!r}: {error}") from None


def _box_error(spot: _Spot) -> PathCollisionError:
    return PathCollisionError(
        f"A box at {(spot.path or '')!r} holds a leaf as well as other children, and "
        "gives none of them a name. Name them in its adapter."
    )


def _segment(key: Any, frame: _Frame) -> str:
    try:
        return _paths.segment(key)
    except PathError as error:
        where = f"at {frame.spot.path!r}" if frame.spot.path else "at the root"
        raise PathError(f"In the node {where}: {error}") from None


def _hashes(aux: Any) -> bool:
    try:
        hash(aux)
    except (TypeError, ValueError):  # metadata that may change in place, or an array
        return False
    return True
