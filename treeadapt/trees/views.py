"""Plans: what conversion needs to know of one tree structure, found once.

``view_tree`` turns any tree into a ``TreeView``: its leaves, the plan of its structure
(paths, classes, the nested skeleton), and the way back into the caller's classes. For
a structure that was seen before this is ``jax.tree.flatten`` and one look-up. A plan
holds only what is a function of the structure as JAX compares it: never a leaf, and
never the treedef that rebuilds the caller's tree, which is the one in hand.
Trees that JAX cannot distinguish or cannot rebuild faithfully (opaque classes, shared
variables, constructors with code of their own) are walked again each time.
Knows neither patterns (see ``patterns``) nor rules (see ``rules``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import optax

from treeadapt.errors import PathCollisionError
from treeadapt.trees import paths as _paths
from treeadapt.trees.adapters.registry import AdapterRegistry, current_registry
from treeadapt.trees.exact import exact_paths
from treeadapt.trees.flatten import flatten
from treeadapt.trees.opaque import Searcher
from treeadapt.trees.walk import ROOT, Walk

_MAX_PLANS = 256
_MAX_PLANNED_LEAVES = 500_000
_MAX_MEMO = 32
_Reorder: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]


class Plan:
    """What is known of one tree structure; a function of that structure alone.

    Attributes:
        paths: label path of each leaf, in JAX's leaf order.
        untrained: indices of leaves that no optimizer should see.
        random: indices of leaves that are random state.
        nones: paths of ``None``, each of which is in the place of a leaf.
        holes: paths of ``optax.MaskedNode``, which may replace a leaf or a node of the
            tree that this one is a part of.
        has_gaps: it has any of these two.
        has_layers: some leaves are layers of one array.
        ties: second path of a shared node, and its first, which names its leaves.
        is_flat_dict: a plain dict of leaves and holes, some key of which holds ``/``.
        is_dicts: all of its nodes are dicts and holes.
        is_plain: all of its nodes are dicts, lists, tuples and ``None``.
        root: class of the tree itself.
        node_classes: classes of its nodes and boxes.
        shares: it has nodes with an identity, two of which could be one.
        memo: answers that depend on the structure alone; see ``remember``.
    """

    def __init__(self, walk: Walk):
        self.paths: tuple[str, ...] = tuple(walk.paths)
        self.untrained: frozenset[int] = frozenset(walk.untrained)
        self.random: frozenset[int] = frozenset(walk.random)
        self.shares = len(walk.shared) > 1
        self.memo: dict[Any, Any] = {}
        self._nodes = walk.nodes
        types = frozenset(itertools.chain.from_iterable(walk.nodes.values()))
        self.node_classes = types
        self.nones, self.holes = (
            tuple(self.paths_of(functools.partial(operator.is_, cls)))
            for cls in (type(None), optax.MaskedNode)
        )
        self.has_gaps = bool(self.nones or self.holes)
        self.has_layers = False
        self.ties = walk.ties
        self.is_plain = types <= {dict, list, tuple, type(None)}
        self.root: type | None = next(iter(walk.nodes.get(None, ())), None)
        self.is_dicts = types <= {dict, type(None), optax.MaskedNode}
        self.is_flat_dict = (
            self.root is dict
            and {None, *self.nones, *self.holes}.issuperset(walk.nodes)
            and self.is_dicts
            and any("/" in path for path in self.paths)
        )
        self._skeleton = walk.skeleton[ROOT]

    def __repr__(self) -> str:
        return f"Plan({len(self.paths)} leaves)"

    def __len__(self) -> int:
        return len(self.paths)

    def nest(self, leaves: Sequence[Any]) -> Any:
        """Return the state dict that holds ``leaves``."""
        treedef, to_state, _ = self._nested
        return treedef.unflatten(to_state(leaves))

    def flat(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return ``{path: leaf}``; of two leaves with one path, the last alone."""
        flat = self._blank.copy()  # has its full size, and its keys in order
        flat.update(zip(self.paths, leaves, strict=True))
        return flat

    @functools.cached_property
    def _blank(self) -> dict[str, Any]:
        return dict.fromkeys(self.paths)

    def unnest(self, state: Any) -> Sequence[Any] | None:
        """Return the leaves of a plain state dict of just this structure.

        None if it has another structure, or a leaf that an adapter may open.
        """
        leaves, treedef = flatten(state)
        plain = _memo(current_registry())[1]
        expected, _, from_state = self._nested
        if treedef != expected or not plain.issuperset(_classes(leaves)):
            return None
        return from_state(leaves)

    @functools.cached_property
    def _nested(self) -> tuple[Any, _Reorder, _Reorder]:
        """The treedef of the state dict; reorders leaves for it, and back."""
        order, treedef = flatten(self._skeleton)
        back = sorted(range(len(order)), key=order.__getitem__)
        return treedef, _permutation(order), _permutation(back)

    def classes(self, path: str | None) -> tuple[type, ...]:
        """Return the classes of the nodes and boxes at ``path`` (None: the root)."""
        return tuple(self._nodes.get(path, ()))

    def enclosing(self, path: str) -> tuple[type, ...]:
        """Return the classes of all nodes above or at ``path``, root first."""
        classes = list(self._nodes.get(None, ()))
        end = path.find(_paths.SEPARATOR)
        while end >= 0:
            classes += self._nodes.get(path[:end], ())
            end = path.find(_paths.SEPARATOR, end + 1)
        return (*classes, *self._nodes.get(path, ()))

    def paths_of(self, is_one: Callable[[type], bool]) -> list[str]:
        """Return the paths of the nodes that have one of some classes."""
        return [
            path or ""
            for path, classes in self._nodes.items()
            if any(map(is_one, classes))
        ]

    def child_names(self, path: str | None) -> Sequence[str]:
        """Return the segments right below ``path``, with or without leaves below them.

        Args:
            path: path of a node, or None for the root.
        """
        return self._names.get(path, ())

    @functools.cached_property
    def _names(self) -> dict[str | None, list[str]]:
        below: dict[str | None, dict[str, None]] = {}
        for path in (*self.paths, *self._nodes):
            while path is not None:
                above, slash, name = path.rpartition(_paths.SEPARATOR)
                path = above if slash else None
                names = below.setdefault(path, {})
                if name in names:
                    break  # so is what is above it
                names[name] = None
        return {path: list(names) for path, names in below.items()}

    def with_layers(self, text: str) -> str:
        """Return a stored path with ``*`` for the numbers of layers in this plan."""
        return text  # in the plan of a caller's tree, no path has any

    @functools.cached_property
    def clash(self) -> tuple[int, int] | None:
        """Two leaves that have one path, if there are any."""
        first: dict[str, int] = {}
        for index, path in enumerate(self.paths):
            if first.setdefault(path, index) != index:
                return first[path], index
        return None

    def remember(self, key: Any, answer: Any) -> Any:
        """Keep ``answer`` under ``key``; at 32 answers the memo is cleared first."""
        if len(self.memo) >= _MAX_MEMO:
            self.memo.clear()
        self.memo[key] = answer
        return answer


@dataclasses.dataclass(slots=True, eq=False)  # frozen would triple its cost
class TreeView:
    """One tree, taken apart.

    Attributes:
        leaves: the caller's leaf objects, in JAX's leaf order; an object that is in
            several places of a tree with identity (nnx) is listed once.
        plan: what is known of the structure.
        structure: ``PyTreeDef`` or ``Recipe``; its ``unflatten`` puts new leaves, in
            the same order, into a tree of the caller's classes.
        tree: the tree itself, for messages.
    """

    leaves: list[Any]
    plan: Plan
    structure: Any
    tree: Any

    def items(self) -> Iterator[tuple[str, Any]]:
        """Return pairs of path and leaf, in leaf order."""
        return zip(self.plan.paths, self.leaves, strict=True)

    def flat(self) -> dict[str, Any]:
        """Return ``{path: leaf}``; of two leaves with one path, the last alone."""
        return self.plan.flat(self.leaves)

    def replace(self, flat: Mapping[str, Any]) -> Any:
        """Return a tree of the caller's classes with the leaves of ``flat`` put in.

        Args:
            flat: ``{path: leaf}``; other leaves stay, and other paths are ignored.

        Example:
            >>> view_tree({"a": [1.0], "b": 2.0}).replace({"a/0": 3.0})
            {'a': [3.0], 'b': 2.0}
        """
        return self.rebuild([flat.get(path, leaf) for path, leaf in self.items()])

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return a tree of the caller's classes and treedef around ``leaves``."""
        return self.structure.unflatten(leaves)

    def require_unique(self) -> TreeView:
        """Return this view; raise if two leaves have one path.

        Raises:
            PathCollisionError: it names both exact paths.
        """
        if self.plan.clash is None:
            return self
        path = self.plan.paths[self.plan.clash[0]]
        exact = exact_paths(self.tree, current_registry())
        one, two = map(exact.__getitem__, self.plan.clash)
        raise PathCollisionError(
            f"Two leaves have the same path {path!r}: {one} and {two}. Rename one of "
            "the keys; to_state_dict, which nests, can still convert this tree.",
            paths=[path],
        )


def view_tree(tree: Any) -> TreeView:
    """Take any tree apart, with unique paths.

    Args:
        tree: any pytree, or a tree of classes that the registry can open. No leaf is
            read, moved or copied.

    Raises:
        PathCollisionError: two leaves have the same label path.
        PathError: a key has no stable text.
        TreeDepthError: the tree is nested deeper than JAX can flatten.
        TreeCycleError: the tree contains itself.
        AdapterError: an object that holds arrays has no adapter.

    Example:
        >>> view = view_tree({"b": 1.0, "a": [2.0, 3.0]})
        >>> view.plan.paths, view.leaves
        (('a/0', 'a/1', 'b'), [2.0, 3.0, 1.0])
    """
    return TreeView(*take_apart(tree), tree).require_unique()


def view_nested(tree: Any) -> TreeView:
    """Take any tree apart for nested use, where paths need not be unique.

    The same as ``view_tree`` otherwise.
    """
    return TreeView(*take_apart(tree), tree)


def take_apart(tree: Any) -> tuple[list[Any], Plan, Any]:
    """Return leaves, plan and structure of a tree, as in ``TreeView``."""
    registry = current_registry()
    cache, plain = _memo(registry)
    leaves, treedef = flatten(tree)
    plan = cache.get(treedef)
    if (
        plan is not None
        and (plain.issuperset(_classes(leaves)) or _are_leaves(leaves, registry, plain))
        # JAX lists a variable with two paths twice, and nothing in its treedef says
        # that the two are one: only a walk does.
        and not (plan.shares and len(set(map(id, leaves))) < len(leaves))
    ):
        return leaves, plan, treedef
    walk = Walk(registry, plain).run(tree)
    if not walk.is_faithful(leaves):
        registry.forget()  # a class was registered with JAX after its first look-up
        plan, (cache, plain) = None, _memo(registry)
        walk = Walk(registry, plain).run(tree)
        if not walk.is_faithful(leaves):
            raise walk.order_error(leaves)
    if walk.by_hand:
        return walk.leaves, Plan(walk), walk.recipe()
    if plan is None:
        plan = Plan(walk)
        if walk.cacheable:
            cache.put(treedef, plan)
    return leaves, plan, treedef


def _classes(leaves: Sequence[Any]) -> Iterator[type]:
    """Return the classes of leaves. Most neighbors are of one: these are few."""
    return (cls for cls, _ in itertools.groupby(leaves, type))


def _are_leaves(
    leaves: Sequence[Any], registry: AdapterRegistry, plain: set[type]
) -> bool:
    """Return whether the objects among ``leaves`` are leaves that hold no array."""
    searcher = Searcher(registry)
    return not any(
        registry.find(leaf).adapter is not None or searcher.holds_array(leaf)
        for leaf in leaves
        if type(leaf) not in plain
    )


class _PlanCache:
    """Plans by treedef, bounded.

    JAX 0.10 hashes a treedef without its dict keys and metadata, so many share a hash;
    each bucket is searched by equality, the latest found first. Equality alone would
    not do: JAX compares nodes that ``register_dataclass`` made without their
    class, be it a dataclass or not, and only the hash distinguishes these.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[tuple[Any, Plan], ...]] = {}
        self._plans = self._leaves = 0

    def get(self, treedef: Any) -> Plan | None:
        key = hash(treedef)
        bucket = self._buckets.get(key, ())
        for entry in bucket:
            if _equal(entry[0], treedef):
                if entry is not bucket[0]:
                    self._put_first(key, entry)
                return entry[1]
        return None

    def put(self, treedef: Any, plan: Plan) -> None:
        self._plans += 1
        self._leaves += len(plan)
        if self._plans > _MAX_PLANS or self._leaves > _MAX_PLANNED_LEAVES:
            self._buckets, self._plans, self._leaves = {}, 1, len(plan)
        self._put_first(hash(treedef), (treedef, plan))

    def _put_first(self, key: int, entry: tuple[Any, Plan]) -> None:
        # Without a lock: where threads undo each other's work, a tree is walked again.
        rest = [other for other in self._buckets.get(key, ()) if other is not entry]
        self._buckets[key] = (entry, *rest)


def same_structure(one: Any, two: Any) -> bool:
    """Compare two structures; False where their metadata refuses comparison."""
    # JAX 0.10 compares nodes of registered dataclasses without their class, which only
    # the hash sees; the hash sees neither metadata nor keys, which equality does.
    try:
        return hash(one) == hash(two) and _equal(one, two)
    except TypeError:
        return False


def _equal(one: Any, two: Any) -> bool:
    try:
        return bool(one == two)
    except (ValueError, TypeError):  # an array in a static field (jax#7826)
        return False


def _memo(registry: AdapterRegistry) -> tuple[_PlanCache, set[type]]:
    memo = registry.memo.get("plans")
    if memo is None:
        memo = registry.memo.setdefault("plans", (_PlanCache(), set()))
    return memo


def _permutation(order: Sequence[int]) -> _Reorder:
    if list(order) == list(range(len(order))):
        return _identity
    return operator.itemgetter(*order)  # two or more: one alone is in order


def _identity(leaves: Sequence[Any]) -> Sequence[Any]:
    return leaves
