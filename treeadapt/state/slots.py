"""Slots: where an optimizer's state holds copies of the params.

Every leaf of a state has a label path, such as ``0/mu/policy/hidden_0/kernel``. In a
copy of the params it has a prefix (``0/mu``) and, after it, the path of a parameter;
any other leaf (``0/count``) has no prefix. ``find_slots`` knows the transformation: it
asks with Optax's placeholder, and where one refuses that (a line search looks at the
first leaf) it takes every subtree that holds nothing but parameters for a copy.
``cut_names`` goes by names alone, except where ``known_prefixes`` knows the classes of
states.
See ``carry_state``, ``callbacks`` and ``sharding`` for what happens to the slots.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import optax

from treeadapt.arrays import is_array, is_inexact
from treeadapt.errors import TransformError
from treeadapt.layers.region import Region, read_key
from treeadapt.paths import SEPARATOR
from treeadapt.state.optax_fields import (
    GROUPS,
    STATE_FIELDS,
    has_fields,
    is_state_class,
)
from treeadapt.transforms.adapt import is_placeholder, placeholder
from treeadapt.transforms.flat import fast_params
from treeadapt.trees.views import Plan, TreeView, view_tree


@dataclasses.dataclass(slots=True)  # frozen would triple its cost
class Slot:
    """Where one leaf of a state is.

    Attributes:
        name: label path of the leaf in the state.
        prefix: label path of the copy of the params that holds it; None if none does.
        tail: what follows ``prefix``: the path of a parameter, and for statistics that
            come several a parameter (``sm3``) what follows that.
        is_copy: whether the leaf is in a copy of the params.
        node: label path of the state that has the copy, or the leaf, as a field.
        field: name of that field.
    """

    name: str
    prefix: str | None = None
    tail: str = ""
    is_copy: bool = dataclasses.field(init=False)
    node: str = dataclasses.field(init=False)
    field: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.is_copy = self.prefix is not None
        path = self.name if self.prefix is None else self.prefix
        self.node, _, self.field = path.rpartition(SEPARATOR)


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


def find_slots(tx: Any, view: TreeView, params: Any = None) -> list[Slot]:
    """Find out for every leaf of a state whether it belongs to a copy of the params.

    Args:
        tx: the transformation whose state it is.
        view: the state; its leaves may be anything.
        params: tree with the classes and the paths of the params, and any leaves, or a
            pair of them; needed only where ``tx`` refuses the placeholder, or takes
            pairs. None if they are not known.

    Returns:
        One slot a leaf, in leaf order.

    Raises:
        TransformError: ``tx`` refuses the placeholder and ``params`` are not known.

    Example:
        >>> tx = optax.adam(1e-3)
        >>> view = view_tree(tx.init({"net": {"w": jnp.ones(2)}}))
        >>> [(slot.prefix, slot.tail) for slot in find_slots(tx, view)]
        [(None, ''), ('0/mu', 'net/w'), ('0/nu', 'net/w')]
    """
    mark = placeholder()
    in_pairs = isinstance(params, optax.LookaheadParams)
    if in_pairs or holds(view.tree, lambda x: isinstance(x, optax.LookaheadState)):
        mark = optax.LookaheadParams(mark, mark)
    slots = _marked(tx, mark, view)
    if slots is not None:
        return slots
    if params is None:
        raise TransformError(
            "The transformation does not say where its state holds the params (it "
            "refuses the placeholder that Optax asks with). Pass the params as a tree: "
            "tree_map_params(tx, lambda leaf, _: ..., state, params)."
        )
    return _alike(view, view_tree(fast_params(params)))


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


def _marked(tx: Any, mark: Any, view: TreeView) -> list[Slot] | None:
    """Cut a state where ``tx`` puts a placeholder; None if it refuses to say."""
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
    if len(tails) != len(view.leaves):
        return None
    # A flat dict has a bare param under ``""``.
    return [
        Slot(name)
        if tail is None
        else Slot(name, name.removesuffix(tail).removesuffix(SEPARATOR), tail)
        for name, tail in zip(view.plan.paths, tails, strict=True)
    ]


def _alike(view: TreeView, params: TreeView) -> list[Slot]:
    """Take every subtree that holds nothing but params for a copy of them."""
    paths = frozenset(params.plan.paths)
    whole: dict[str, bool] = {}
    for name in view.plan.paths:
        for prefix, tail in cuts_of(name):
            is_param = home_of(tail, paths) is not None
            whole[prefix] = whole.get(prefix, True) and is_param
    # A state whose fields all have names of params is not a copy of them.
    kinds = {dict, params.plan.root}
    copies = {
        prefix
        for prefix, is_one in whole.items()
        if is_one and not kinds.isdisjoint(view.plan.classes(prefix or None))
    }
    return [
        _first_cut(name, lambda prefix, _: prefix in copies) for name in view.plan.paths
    ]


def stored(tail: str) -> str:
    """Return the path of a parameter of which a leaf may hold some layers.

    Example:
        >>> stored("net/{4..11}/w"), stored("net/w")
        ('net/w', 'net/w')
    """
    return read_key(tail).path


def home_of(tail: str, params: Container[str]) -> tuple[Region, str] | None:
    """Return where a leaf of a copy belongs; None if there is no such parameter.

    Returns:
        The parameter, or the layers of it that the leaf has, and what follows.

    Example:
        >>> home_of("net/w/0", {"net/w"}), home_of("net", {"net/w"})
        ((Region(path='net/w', along=()), '0'), None)
        >>> home_of("net/{4..5}/w", {"net/w"})[0].key
        'net/{4..5}/w'
    """
    for path in (tail, *above(tail), ""):
        for region in (Region(path), read_key(path)):
            if region.path in params:
                return region, tail.removeprefix(path).removeprefix(SEPARATOR)
    return None


def cuts_of(name: str) -> Iterator[tuple[str, str]]:
    """Yield every way to cut a name in two, the shortest prefix first."""
    yield "", name
    end = name.find(SEPARATOR)
    while end >= 0:
        yield name[:end], name[end + 1 :]
        end = name.find(SEPARATOR, end + 1)


def known_prefixes(
    plan: Plan, names: Iterable[str], new: Plan, slots: Iterable[Slot]
) -> dict[str, str | None]:
    """Return where a saved state holds copies of the params, as its classes say it.

    A copy is a field of Optax's own states that holds no state, or of a state of
    another class where the new state has one in a state of this class.

    Args:
        plan: of the saved state.
        names: of its leaves, in leaf order; paths in it, but for boxes.
        new: plan of the new state.
        slots: where its leaves are.

    Returns:
        The prefix by name, None for leaves that are in no copy. Names in states of
        other classes, or of none, are left out.
    """
    # Where states of a class have copies.
    fields_by_class: dict[type, dict[str, None]] = {}
    for prefix in dict.fromkeys([x.prefix for x in slots if x.prefix is not None]):
        for cls, rest in _owner(new, prefix):
            fields_by_class.setdefault(cls, {})[rest] = None
    prefixes: dict[str, str | None] = {}
    for name, path in zip(names, plan.paths, strict=True):
        for cls, rest in _owner(plan, path):
            is_optax = is_state_class(cls)
            fields = fields_by_class.get(
                cls, [rest.partition(SEPARATOR)[0]] if is_optax else []
            )
            fits = [field for field in fields if f"{rest}/".startswith(f"{field}/")]
            if fits or is_optax:
                node = path.removesuffix(rest)
                prefixes[name] = node + max(fits, key=len) if fits else None
    return prefixes


def _owner(plan: Plan, path: str) -> list[tuple[type, str]]:
    """Return the class of the state that has something as a field, if it is known.

    That is Optax's own that does not say that it holds a state there; else the nearest
    that is not of Optax.

    Returns:
        At most one pair of the class and what of the path is below it.
    """
    every = [*_states_above(plan, path)]
    optax_ones = [each for each in every if is_state_class(each[0])]
    nearest = [each for each in every if not is_state_class(each[0])][-1:]
    return [
        (cls, rest)
        for cls, rest in optax_ones
        if rest.partition(SEPARATOR)[0] not in STATE_FIELDS
    ][:1] or nearest


def _states_above(plan: Plan, path: str) -> Iterator[tuple[type, str]]:
    """Yield the classes with fields above a path, and what of it is below them."""
    for node in ("", *[*above(path)][::-1]):
        rest = path[len(node) :].removeprefix(SEPARATOR) if node else path
        for cls in plan.classes(node or None):
            if has_fields(cls):
                yield cls, rest


def field_of(prefix: str) -> str:
    """Return the field that holds a copy; with ``inner_states``, the label of a group.

    Example:
        >>> field_of("inner_states/mu/0/nu"), field_of("inner_states/mu")
        ('nu', 'inner_states/mu')
    """
    *nodes, name = prefix.split(SEPARATOR)
    run = itertools.takewhile(GROUPS.__eq__, reversed(nodes))  # it may be a label, too
    return below(GROUPS, name) if len([*run]) % 2 else name


def cut_names(
    names: Iterable[str],
    fields: Container[str],
    tails: Container[str],
    prefixes: Mapping[str, str | None] = MappingProxyType({}),
) -> list[Slot]:
    """Cut the names of a state.

    Args:
        names: label paths of leaves.
        fields: the fields that may hold copies of the params; see ``field_of``.
        tails: what may follow them: parameters, some layers of which a leaf may hold.
        prefixes: those of some leaves, None for leaves that are in no copy. Of all
            others nothing else is known.

    Returns:
        One slot a name. Where there are several ways, the longest tail wins (params
        may be called ``mu``), and no copy of the params is inside another.

    Example:
        >>> names = ["0/count", "0/nu/mu/w"]
        >>> slots = cut_names(names, {"mu", "nu"}, {"w", "mu/w"})
        >>> [(slot.prefix, slot.tail) for slot in slots]
        [(None, ''), ('0/nu', 'mu/w')]
    """
    copies = {prefix for prefix in prefixes.values() if prefix is not None}
    around = {path for name in prefixes for path in (*above(name), "")} - copies

    def is_copy(prefix: str, tail: str) -> bool:
        return field_of(prefix) in fields and stored(tail) in tails

    def may_be_copy(prefix: str, tail: str) -> bool:
        return prefix not in around and is_copy(prefix, tail)

    slots: list[Slot] = []
    for name in names:
        if name in prefixes:
            prefix = prefixes[name]
            tail = name.removeprefix(prefix or "").removeprefix(SEPARATOR)
            is_one = prefix is not None and is_copy(prefix, tail)
            slots.append(Slot(name, prefix, tail) if is_one else Slot(name))
        else:
            slots.append(_first_cut(name, may_be_copy))
    copies.update([slot.prefix for slot in slots if slot.prefix is not None])
    inner = {one for one in copies if any(path in copies for path in above(one))}
    return [Slot(slot.name) if slot.prefix in inner else slot for slot in slots]


def _first_cut(name: str, is_copy: Callable[[str, str], bool]) -> Slot:
    """Cut a name after the shortest prefix that is a copy of the params, if one is."""
    cuts = (*cuts_of(name), (name, ""))
    return next((Slot(name, *cut) for cut in cuts if is_copy(*cut)), Slot(name))
