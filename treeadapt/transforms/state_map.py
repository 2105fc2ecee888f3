"""State maps: what each leaf of an optimizer's state is.

Every leaf of a state has a label path, such as ``0/mu/policy/hidden_0/kernel``. In a
copy of the params it has a prefix (``0/mu``) and, after it, the path of a parameter, or
the key of some layers of one; any other leaf (``0/count``) has no prefix. Nothing else
in the package decides this. ``map_state`` knows the transformation: it asks with the
placeholder of Optax. ``map_classes`` has the state alone and goes by the classes of
Optax, as ``map_state`` does where a transformation refuses the placeholder (a line
search looks at the first leaf). ``map_names`` has names of leaves alone, except where
``StateMap.prefixes_in`` knows the classes of states.
See ``adapt``, ``per_layer``, ``carry_state``, ``callbacks`` and ``sharding`` for what
happens to the leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
import optax

from treeadapt.errors import TransformError
from treeadapt.layers.region import Region, read_key
from treeadapt.transforms.optax_fields import (
    COPY_FIELDS,
    GROUPS,
    NAMED_FIELDS,
    SCALE_FIELDS,
    STATE_FIELDS,
    degree_of,
    has_fields,
    is_state_class,
)
from treeadapt.trees.arrays import is_array, is_inexact
from treeadapt.trees.paths import SEPARATOR
from treeadapt.trees.views import Plan, TreeView, view_tree

#: Gives the layers of a param, and what follows its path, for what follows a copy; None
#: for what names no param.
Home: TypeAlias = Callable[[str], tuple[Region, str] | None]


@dataclasses.dataclass(slots=True)  # frozen would triple its cost
class Slot:
    """What one leaf of a state is.

    Attributes:
        name: label path of the leaf in the state.
        prefix: label path of the copy of the params that holds it; None if none does.
        tail: what follows ``prefix``.
        region: the parameter that it belongs to, or the layers of it that it holds;
            None in no copy.
        rest: what follows the parameter: statistics may come several a parameter
            (``sm3``).
        is_copy: whether the leaf is in a copy of the params.
        node: label path of the state that has the copy, or the leaf, as a field.
        field: name of that field.
    """

    name: str
    prefix: str | None = None
    tail: str = ""
    region: Region | None = None
    rest: str = ""
    is_copy: bool = dataclasses.field(init=False)
    node: str = dataclasses.field(init=False)
    field: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.is_copy = self.prefix is not None
        path = self.name if self.prefix is None else self.prefix
        self.node, _, self.field = path.rpartition(SEPARATOR)

    @property
    def array(self) -> str:
        """Path in its copy of the array of which it may hold some layers."""
        return below(self.region.path, self.rest) if self.region else self.tail


class Field(NamedTuple):
    """What a field of a state holds.

    Attributes:
        name: its name.
        degree: the power of a factor on the params that is one on it, if it is known.
        rank: how many axes are before those of a parameter; None if the leaves have
            other shapes than the params.
    """

    name: str
    degree: int | None
    rank: int | None


@dataclasses.dataclass(frozen=True)
class StateMap:
    """What every leaf of a state is.

    Attributes:
        view: the state; its leaves may be anything.
        slots: one a leaf, in leaf order.
    """

    view: TreeView
    slots: Sequence[Slot]

    @functools.cached_property
    def copies(self) -> Sequence[tuple[Slot, Any]]:
        """The leaves in copies of the params."""
        pairs = zip(self.slots, self.view.leaves, strict=True)
        return [(slot, leaf) for slot, leaf in pairs if slot.is_copy]

    def owner(self, leaf: int) -> str | None:
        """Return the path of the param to which a leaf belongs, by the leaf's index."""
        region = self.slots[leaf].region
        return region.path if region else None

    def fields(self, params: Mapping[str, Any]) -> dict[str, Field]:
        """Return what each field holds that has a copy of the params; see ``field_of``.

        Args:
            params: arrays by path.
        """
        is_scaled = any(slot.field in SCALE_FIELDS for slot, _ in self.copies)
        fields: dict[str, Field] = {}
        for slot, spec in self.copies:
            name, shape, rank = slot.field, np.shape(spec), None
            if slot.region and not slot.rest and slot.region.path in params:
                like = slot.region.shape(params[slot.region.path].shape)
                more = len(shape) - len(like)
                rank = more if more >= 0 and shape[more:] == like else None
            classes = self.view.plan.classes(slot.node or None)
            degree = degree_of(classes, name, is_scaled=is_scaled)
            key = field_of(str(slot.prefix))
            before = fields.setdefault(key, Field(name, degree, rank))
            rank = rank if before.rank is None else before.rank
            fields[key] = Field(name, degree if degree == before.degree else None, rank)
        return fields

    def prefixes_in(self, plan: Plan, names: Iterable[str]) -> dict[str, str | None]:
        """Return where an earlier state holds copies of the params, by its classes.

        A copy is a field of Optax's own states that holds no state, or of a state of
        another class where this state has one in a state of this class.

        Args:
            plan: of the earlier state.
            names: of its leaves, in leaf order; paths in it, but for boxes.

        Returns:
            The prefix by name, None for leaves that are in no copy. Names in states of
            other classes, or of none, are left out.
        """
        # Where states of a class have copies.
        fields_by_class: dict[type, dict[str, None]] = {}
        classes = _classes_with_fields(self.view.plan)
        for prefix in dict.fromkeys([slot.prefix for slot, _ in self.copies]):
            if owner := _owner(classes, str(prefix)):
                fields_by_class.setdefault(owner[0], {})[owner[1]] = None
        prefixes: dict[str, str | None] = {}
        classes = _classes_with_fields(plan)
        for name, path in zip(names, plan.paths, strict=True):
            if (owner := _owner(classes, path)) is None:
                continue
            cls, rest = owner
            first = {rest.partition(SEPARATOR)[0]: None} if is_state_class(cls) else {}
            fields = fields_by_class.get(cls, first)
            fits = [field for field in fields if f"{rest}/".startswith(f"{field}/")]
            if fits or first:
                node = path.removesuffix(rest)
                prefixes[name] = node + max(fits, key=len) if fits else None
        return prefixes


def parent(path: str) -> str:
    """Return the path without its last segment.

    Example:
        >>> parent("0/mu"), parent("mu")
        ('0', '')
    """
    return path.rpartition(SEPARATOR)[0]


def above(path: str) -> Iterator[str]:
    """Yield the paths above a path, the nearest first, but for the empty one.

    Example:
        >>> list(above("0/mu/w"))
        ['0/mu', '0']
    """
    while path := parent(path):
        yield path


def last(path: str) -> str:
    """Return the last segment of a path."""
    return path.rpartition(SEPARATOR)[2]


def below(path: str, rest: str) -> str:
    """Join a path and what is below it; either may be empty.

    Example:
        >>> below("0", "mu/w"), below("", "mu"), below("0", "")
        ('0/mu/w', 'mu', '0')
    """
    return SEPARATOR.join(filter(None, (path, rest)))


def is_joint(leaf: Any, num_params: int) -> bool:
    """Return whether a leaf may hold all params in one vector (``optax.flatten``).

    Args:
        leaf: a leaf in a state without copies of the params.
        num_params: how many params train.
    """
    return is_inexact(leaf) and len(leaf.shape) == 1 and leaf.size > num_params > 1


def fast_params(params: Any) -> Any:
    """Return the params of which gradients are taken."""
    # Optax 0.2.8 looks for an attribute ``fast``, which a model may have, too
    # (optax/_src/lookahead.py).
    return params.fast if isinstance(params, optax.LookaheadParams) else params


@functools.cache
def placeholder() -> Any:
    """Return the object with which ``optax.tree.map_params`` calls ``init``.

    Its class is private in Optax, but the object is part of the contract: the state
    holds params where ``init`` puts it.
    """
    asked: list[Any] = []

    def init(params: Any) -> tuple[()]:
        asked.append(params)
        return ()

    optax.tree.map_params(init, lambda leaf: leaf, ())
    return asked[0]


def is_placeholder(params: Any) -> bool:
    """Return whether ``optax.tree.map_params`` is asking with its placeholder."""
    return isinstance(fast_params(params), type(placeholder()))


def map_state(tx: Any, view: TreeView, params: Any = None) -> StateMap:
    """Return what each leaf of the state of a transformation is.

    Args:
        tx: the transformation whose state it is.
        view: the state; its leaves may be anything.
        params: tree with the classes and the paths of the params, and any leaves, or a
            pair of them. Without them regions are read from names; and they are needed
            where ``tx`` refuses the placeholder, or takes pairs.

    Raises:
        TransformError: ``tx`` refuses the placeholder and ``params`` are not known.

    Example:
        >>> tx = optax.adam(1e-3)
        >>> view = view_tree(tx.init({"net": {"w": jnp.ones(2)}}))
        >>> [(slot.prefix, slot.tail) for slot in map_state(tx, view).slots]
        [(None, ''), ('0/mu', 'net/w'), ('0/nu', 'net/w')]
    """
    mark = placeholder()
    in_pairs = isinstance(params, optax.LookaheadParams)
    if in_pairs or holds(view.tree, lambda x: isinstance(x, optax.LookaheadState)):
        mark = optax.LookaheadParams(mark, mark)
    like = None if params is None else view_tree(fast_params(params)).plan.paths
    tails = _marked(tx, mark, view)
    if tails is None:
        if like is None:
            raise TransformError(
                "The transformation does not say where its state holds the params (it "
                "refuses the placeholder that Optax asks with). Pass the params as a "
                "tree: tree_map_params(tx, lambda leaf, _: ..., state, params)."
            )
        return map_classes(view, like)
    home = homes_in(dict(zip(like or (), like or (), strict=True)), deep=True)
    slots = []
    for name, tail in zip(view.plan.paths, tails, strict=True):
        if tail is None:
            slots.append(Slot(name))
        else:  # a flat dict has a bare param under ``""``
            prefix = name.removesuffix(tail).removesuffix(SEPARATOR)
            slots.append(Slot(name, prefix, tail, *home(tail) or (read_key(tail), "")))
    return StateMap(view, slots)


def map_classes(view: TreeView, params: Iterable[str]) -> StateMap:
    """Return what each leaf of a state is, where the transformation is not known.

    A field of Optax's own states that holds neither a state nor names of its own, such
    as ``hyperparams``, is a copy of the params where it has their paths. In states of
    other classes the path of a param is looked for at the end of each name.

    Args:
        view: the state; its leaves may be anything.
        params: their paths; of a flat dict, its keys.

    Example:
        >>> tx = optax.inject_hyperparams(optax.adam)(1e-3)
        >>> params = {"b1": jnp.ones(2), "w": jnp.ones(2)}
        >>> owned = map_classes(view_tree(tx.init(params)), params)
        >>> [slot.name for slot in owned.slots if slot.is_copy and slot.tail == "b1"]
        ['inner_state/0/mu/b1', 'inner_state/0/nu/b1']
    """
    paths = {path: path for path in params}
    deep, exact = homes_in(paths, deep=True), homes_in(paths)
    classes = _classes_with_fields(view.plan)

    def slot(name: str) -> Slot:
        cls, rest = _owner(classes, name) or (None, name)
        start = name.removesuffix(rest)
        if cls is not None and is_state_class(cls):
            field, slash, tail = rest.partition(SEPARATOR)
            # Params may be one bare array.
            may_be_copy = field not in NAMED_FIELDS if slash else field in COPY_FIELDS
            place = deep(tail) if may_be_copy else None
            return Slot(name, start + field, tail, *place) if place else Slot(name)
        for prefix, tail in cuts_of(rest):
            if place := exact(tail):
                node = (start + prefix).removesuffix(SEPARATOR)
                return Slot(name, node, tail, *place)
        return Slot(name)

    return StateMap(view, [*map(slot, view.plan.paths)])


def copied_tails(view: TreeView) -> dict[int, str]:
    """Return what copies of params in states of Optax call these.

    Args:
        view: a tree with states of Optax in it, whose params need not be known.

    Returns:
        By the index of a leaf, what of its path follows the copy that holds it.

    Example:
        >>> tree = {"opt": optax.adam(1e-3).init({"net": {"w": jnp.ones(2)}})}
        >>> copied_tails(view_tree(tree))
        {1: 'net/w', 2: 'net/w'}
    """
    classes, tails = _classes_with_fields(view.plan), {}
    for index, name in enumerate(view.plan.paths):
        cls, rest = _owner(classes, name) or (None, name)
        field, slash, tail = rest.partition(SEPARATOR)
        is_copy = field in COPY_FIELDS and (slash or np.ndim(view.leaves[index]) > 0)
        if cls and is_state_class(cls) and is_copy:
            tails[index] = tail
    return tails


def owners(state: Any, params: Iterable[str]) -> dict[Any, str | None]:
    """Return the path of the param of each leaf of a state, by the keys of JAX.

    Args:
        state: its leaves may be anything.
        params: the keys of the flat dict of params.
    """
    state_map = map_classes(view_tree(state), params)
    keyed = enumerate(jtu.tree_leaves_with_path(state))
    return {keys: state_map.owner(leaf) for leaf, (keys, _) in keyed}


def holds(tree: Any, is_one: Callable[[Any], bool]) -> bool:
    """Return whether one of some objects is in a tree, or is the tree.

    Example:
        >>> holds({"a": [1, (2, 3)]}, lambda node: isinstance(node, tuple))
        True
    """
    return any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one)))


def init_of_arrays(
    tx: Any, params: Any
) -> tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]:
    """Return ``tx.init`` as a function of the arrays in ``params``, and these."""
    view = view_tree(params)
    arrays = {path: leaf for path, leaf in view.items() if is_array(leaf)}
    return lambda arrays: tx.init(view.replace(arrays)), arrays


def view_init(tx: Any, params: Any) -> TreeView:
    """View the state that ``tx`` would make of ``params``, without making it.

    Raises:
        TypeError: ``tx.init`` reads values, or the state holds more than arrays.
    """
    init, arrays = init_of_arrays(tx, params)
    # Without shardings: axes of an Explicit mesh would ask for that mesh in force.
    shapes = {p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in arrays.items()}
    return view_tree(jax.eval_shape(init, shapes))


def _marked(tx: Any, mark: Any, view: TreeView) -> list[str | None] | None:
    """Return the tails where ``tx`` puts a placeholder; None if it refuses to say."""
    treedef: Any
    try:
        marks, treedef = jax.tree.flatten(tx.init(mark), is_leaf=is_placeholder)
        parts = treedef.flatten_up_to(view.tree)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    tails: list[str | None] = []
    for piece, part in zip(marks, parts, strict=True):
        if is_placeholder(piece):
            tails += view_tree(part).plan.paths
        else:
            tails += [None] * len(jax.tree.leaves(part))
    return tails if len(tails) == len(view.leaves) else None


def homes_in(params: Mapping[str, str], *, deep: bool = False) -> Home:
    """Return the function that knows the params of a state.

    Args:
        params: path of the parameter for each array that a copy may have.
        deep: whether anything may follow the path of an array.

    Example:
        >>> home = homes_in({"net/w": "net/w"}, deep=True)
        >>> home("net/w/0"), home("net")
        ((Region(path='net/w', along=()), '0'), None)
        >>> home("net/{4..5}/w")[0].key
        'net/{4..5}/w'
    """

    @functools.cache
    def home(tail: str) -> tuple[Region, str] | None:
        for path in itertools.chain((tail,), above(tail), ("",)) if deep else (tail,):
            region = Region(path) if path in params else read_key(path)
            if region.path in params:
                param = params[region.path]
                rest = region.path.removeprefix(param) + tail.removeprefix(path)
                return Region(param, region.along), rest.removeprefix(SEPARATOR)
        return None

    return home


def cuts_of(name: str) -> Iterator[tuple[str, str]]:
    """Yield every way to cut a name in two, the shortest prefix first."""
    yield "", name
    end = name.find(SEPARATOR)
    while end >= 0:
        yield name[:end], name[end + 1 :]
        end = name.find(SEPARATOR, end + 1)


def _classes_with_fields(plan: Plan) -> dict[str, list[type]]:
    """Return, by path, the classes of nodes that have fields."""
    nodes = plan.paths_of(has_fields)
    return {node: [*filter(has_fields, plan.classes(node or None))] for node in nodes}


def _owner(classes: Mapping[str, Sequence[type]], path: str) -> tuple[type, str] | None:
    """Return the class of the state that has something as a field, if it is known.

    That is Optax's own that does not say that it holds a state there; else the nearest
    that is not of Optax.

    Returns:
        The class, and what of the path is below it.
    """
    nearest = None
    nodes = [node for node in (*above(path), "") if node in classes]
    for node in reversed(nodes):
        rest = path[len(node) :].removeprefix(SEPARATOR) if node else path
        for cls in classes[node]:
            if not is_state_class(cls):
                nearest = cls, rest
            elif rest.partition(SEPARATOR)[0] not in STATE_FIELDS:
                return cls, rest
    return nearest


def field_of(prefix: str) -> str:
    """Return the field that holds a copy; with ``inner_states``, the label of a group.

    Example:
        >>> field_of("inner_states/mu/0/nu"), field_of("inner_states/mu")
        ('nu', 'inner_states/mu')
    """
    *nodes, name = prefix.split(SEPARATOR)
    run = itertools.takewhile(GROUPS.__eq__, reversed(nodes))  # it may be a label, too
    return below(GROUPS, name) if len([*run]) % 2 else name


def map_names(
    names: Iterable[str],
    fields: Container[str],
    home: Home,
    prefixes: Mapping[str, str | None] = MappingProxyType({}),
) -> list[Slot]:
    """Return what each leaf of an earlier state is, by its name.

    Args:
        names: label paths of leaves.
        fields: the fields that may hold copies of the params; see ``field_of``.
        home: knows the params, some layers of which a leaf may hold.
        prefixes: those of some leaves, None for leaves that are in no copy. Of all
            others nothing else is known.

    Returns:
        One slot a name. Where a name can be cut in several ways, the longest tail wins
        (params may be called ``mu``), and no copy of the params is inside another.

    Example:
        >>> home = homes_in({"w": "w", "mu/w": "mu/w"})
        >>> slots = map_names(["0/count", "0/nu/mu/w"], {"mu", "nu"}, home)
        >>> [(slot.prefix, slot.tail) for slot in slots]
        [(None, ''), ('0/nu', 'mu/w')]
    """
    copies = {prefix for prefix in prefixes.values() if prefix is not None}
    around = {path for name in prefixes for path in (*above(name), "")} - copies

    def cuts(name: str) -> Iterator[tuple[str, str]]:
        if name not in prefixes:
            every = (*cuts_of(name), (name, ""))
            yield from (cut for cut in every if cut[0] not in around)
        elif (prefix := prefixes[name]) is not None:
            yield prefix, name.removeprefix(prefix).removeprefix(SEPARATOR)

    def slot(name: str) -> Slot:
        for prefix, tail in cuts(name):
            if field_of(prefix) in fields and (place := home(tail)):
                return Slot(name, prefix, tail, *place)
        return Slot(name)

    slots = [*map(slot, names)]
    copies.update([slot.prefix for slot in slots if slot.prefix is not None])
    inner = {one for one in copies if any(path in copies for path in above(one))}
    return [Slot(slot.name) if slot.prefix in inner else slot for slot in slots]
