"""Slots: where an optimizer's state holds copies of the params.

Every leaf of a state has a label path, such as ``0/mu/policy/hidden_0/kernel``. In a
copy of the params it is a *slot* (``0/mu``) and, after it, the path of a parameter; any
other leaf (``0/count``) has no slot. ``find_slots`` tells them apart: it asks the
transformation with Optax's placeholder, and where one refuses that (a line search looks
at the first leaf) it takes every subtree that holds nothing but parameters for a copy.
What is done with the slots is up to ``carry_state`` and ``callbacks``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

from treeadapt.arrays import is_array
from treeadapt.paths import SEPARATOR
from treeadapt.transforms.adapt import is_placeholder, placeholder
from treeadapt.transforms.flat import first_half
from treeadapt.trees.views import Plan, TreeView, view_tree


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where one leaf of a state stands.

    Attributes:
        name: label path of the leaf in the state.
        prefix: label path of the copy of the params that holds it; None if none does.
        tail: what follows ``prefix``: the path of a parameter, and for statistics that
            come several a parameter (``sm3``) what follows that.
    """

    name: str
    prefix: str | None = None
    tail: str = ""

    @property
    def node(self) -> str:
        """Label path of the state that has the copy, or the leaf, as a field."""
        return parent(self.name if self.prefix is None else self.prefix)

    @property
    def field(self) -> str:
        """Name of that field."""
        name = self.name if self.prefix is None else self.prefix
        return name.rpartition(SEPARATOR)[2]


def parent(path: str) -> str:
    """Return the path without its last segment.

    Example:
        >>> parent("0/mu"), parent("mu")
        ('0', '')
    """
    return path.rpartition(SEPARATOR)[0]


def below(path: str, rest: str) -> str:
    """Join a path and what stands below it; either may be empty.

    Example:
        >>> below("0", "mu/w"), below("", "mu"), below("0", "")
        ('0/mu/w', 'mu', '0')
    """
    return SEPARATOR.join(filter(None, (path, rest)))


def find_slots(tx: Any, view: TreeView, params: Any = None) -> list[Slot] | None:
    """Tell for every leaf of a state whether it belongs to a copy of the params.

    Args:
        tx: the transformation whose state it is.
        view: the state; its leaves may be anything.
        params: tree with the classes and the paths of the params, and any leaves, or a
            pair of them; needed only where ``tx`` refuses the placeholder, or takes
            pairs. None if they are not known.

    Returns:
        One slot a leaf, in leaf order; None if ``tx`` refuses the placeholder and
        ``params`` are not known.

    Example:
        >>> tx = optax.adam(1e-3)
        >>> view = view_tree(tx.init({"net": {"w": jnp.ones(2)}}))
        >>> [(slot.prefix, slot.tail) for slot in find_slots(tx, view)]
        [(None, ''), ('0/mu', 'net/w'), ('0/nu', 'net/w')]
    """
    mark = placeholder()
    if isinstance(params, optax.LookaheadParams) or _takes_pairs(view.tree):
        mark = optax.LookaheadParams(mark, mark)
    pieces = _pieces(tx, mark, view.tree)
    if pieces is not None:
        return _from_pieces(view.plan.paths, pieces)
    if params is None:
        return None
    plan = view_tree(first_half(params)).plan
    return _from_names(view.plan, frozenset(plan.paths), plan.root)


def init_of_arrays(
    tx: Any, params: Any
) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """Return ``tx.init`` as a function of the arrays in ``params``, and these."""
    view = view_tree(params)
    where = [index for index, leaf in enumerate(view.leaves) if is_array(leaf)]

    def init(arrays: Sequence[Any]) -> Any:
        leaves = list(view.leaves)
        for index, array in zip(where, arrays, strict=True):
            leaves[index] = array
        return tx.init(view.rebuild(leaves))

    return init, [view.leaves[index] for index in where]


def _takes_pairs(state: Any) -> bool:
    """Return whether ``optax.lookahead`` made the state, or a part of it."""

    def is_its_own(node: Any) -> bool:
        return isinstance(node, optax.LookaheadState)

    return any(map(is_its_own, jax.tree.leaves(state, is_leaf=is_its_own)))


def _pieces(tx: Any, mark: Any, state: Any) -> list[tuple[bool, Any]] | None:
    """Cut a state where ``tx`` puts a placeholder; None if it refuses to say."""
    treedef: Any
    try:
        marked = tx.init(mark)
        marks, treedef = jax.tree.flatten(marked, is_leaf=is_placeholder)
        parts = treedef.flatten_up_to(state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    pairs = zip(marks, parts, strict=True)
    return [(is_placeholder(piece), part) for piece, part in pairs]


def _from_pieces(
    names: Sequence[str], pieces: Iterable[tuple[bool, Any]]
) -> list[Slot] | None:
    slots: list[Slot] = []
    for is_copy, piece in pieces:
        tails = view_tree(piece).plan.paths
        for tail in tails:
            if len(slots) == len(names):
                return None
            name = names[len(slots)]
            slots.append(_slot(name, tail) if is_copy else Slot(name))
    return slots if len(slots) == len(names) else None


def _slot(name: str, tail: str) -> Slot:
    if name.endswith(SEPARATOR + tail):  # a flat dict has a bare param under ``""``
        return Slot(name, name[: -len(tail) - 1], tail)
    return Slot(name, "", tail) if tail else Slot(name, name, "")


def _from_names(plan: Plan, known: frozenset[str], root: type | None) -> list[Slot]:
    """Take every subtree that holds nothing but params for a copy of them."""
    whole: dict[str, bool] = {}
    cuts = [list(cuts_of(name)) for name in plan.paths]
    for name_cuts in cuts:
        for prefix, tail in name_cuts:
            whole[prefix] = whole.get(prefix, True) and _is_param(tail, known)

    def is_copy(prefix: str) -> bool:
        # A state whose fields are all named like params is no copy of them.
        return whole[prefix] and any(
            cls is dict or cls is root for cls in plan.classes(prefix or None)
        )

    return [
        next(
            (Slot(name, prefix, tail) for prefix, tail in found if is_copy(prefix)),
            Slot(name),
        )
        for name, found in zip(plan.paths, cuts, strict=True)
    ]


def cuts_of(name: str) -> Iterable[tuple[str, str]]:
    """Yield every way to cut a name in two, the shortest prefix first."""
    yield "", name
    end = name.find(SEPARATOR)
    while end >= 0:
        yield name[:end], name[end + 1 :]
        end = name.find(SEPARATOR, end + 1)


def _is_param(tail: str, known: frozenset[str]) -> bool:
    return tail in known or any(
        prefix in known for prefix, _ in cuts_of(tail) if prefix
    )


#: A name cut into state, field and tail.
Cut = tuple[str, str, str]


def cut_names(
    names: Iterable[str], fields: Iterable[str], is_tail: Callable[[str], bool]
) -> dict[str, Cut]:
    """Cut names of a state of which nothing else is known.

    Args:
        names: label paths of leaves.
        fields: names of the fields that hold copies of the params.
        is_tail: tells whether what follows a field is a parameter.

    Returns:
        ``{name: (node, field, tail)}`` of those that can be cut; where there are
        several ways, the longest tail wins (params may be called ``mu``), and no copy
        of the params stands inside another.

    Example:
        >>> params = {"w", "mu/w"}
        >>> cut_names(["0/count", "0/nu/mu/w"], ["mu", "nu"], params.__contains__)
        {'0/nu/mu/w': ('0', 'nu', 'mu/w')}
    """
    known = frozenset(fields)
    found = {}
    for name in names:
        for prefix, tail in (*cuts_of(name), (name, "")):
            node, _, field = prefix.rpartition(SEPARATOR)
            if field in known and is_tail(tail):
                found[name] = node, field, tail
                break
    copies = frozenset(below(node, field) for node, field, _ in found.values())
    return {
        name: (node, field, tail)
        for name, (node, field, tail) in found.items()
        if copies.isdisjoint(_above(node))
    }


def _above(node: str) -> Iterable[str]:
    """Yield a path and every path above it, but for the empty one."""
    while node:
        yield node
        node = parent(node)
