"""The table of leaves: what selectors read, one column at a time.

A row is for all leaves of a tree that the question cannot distinguish: same
matching patterns and, if a selector asks for them, same shape, classes or path. So a
table of rules costs as many decisions as there are different rows. All patterns of a
question are matched in one walk; every column is computed when it is first read.
Knows nothing of selectors (see ``selectors``) and of labels (see ``rules``).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.errors import SelectorError
from treeadapt.matcher import Matcher
from treeadapt.trees.views import TreeView

T = TypeVar("T")

_ARRAY_CLASSES = (
    jax.Array,
    jax.core.Tracer,
    jax.ShapeDtypeStruct,
    np.ndarray,
    np.generic,
)


class Leaves:
    """The leaves of one tree as a table, with a row for each kind of leaf.

    Args:
        view: the tree.
        matcher: all patterns of the question.
        needs: facts beyond patterns that the question reads: ``"leaf"`` (shape and
            dtype), ``"classes"``, ``"path"``.
        holes: paths of places that may be arrays. A pattern that could match
            there, or below, counts as used.

    Raises:
        SelectorError: a pattern asks for classes or siblings, and the tree is a flat
            dict, which has lost them.
    """

    def __init__(
        self,
        view: TreeView,
        matcher: Matcher,
        needs: frozenset[str] = frozenset(),
        holes: Sequence[str] = (),
    ):
        self.view, self.matcher, self.holes = view, matcher, holes
        if view.plan.is_flat_dict and matcher.asking:
            raise _flat_dict_error(repr(matcher.asking[0]))
        self._masks = self._match()
        self._rows, self._row_of = self._distinct(needs)

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, rows: Sequence[int]) -> Leaves:
        """Return the table of some of the rows."""
        if len(rows) == len(self):
            return self
        part = object.__new__(type(self))
        part.view, part.matcher, part.holes = self.view, self.matcher, self.holes
        part._masks = self._masks
        part._rows = [self._rows[row] for row in rows]
        return part

    def spread(self, answers: Sequence[T]) -> list[T]:
        """Return one answer a leaf, in leaf order, of one answer a row."""
        return list(map(answers.__getitem__, self._row_of))

    def matched(self, pattern: str) -> list[bool]:
        """Return, for each row, whether ``pattern`` selects its leaves."""
        bit = self.matcher.bits[pattern]
        return [bool(mask & bit) for mask in self.masks]

    def under(self, cls: type) -> list[bool]:
        """Return, for each row, whether its leaves are at or below a node of a class.

        Raises:
            SelectorError: the tree is a flat dict, which has lost its classes.
        """
        if self.view.plan.is_flat_dict:
            raise _flat_dict_error(f"node({cls.__qualname__})")
        known: dict[tuple[type, ...], bool] = {}
        for row in self._rows:
            above = self.view.plan.enclosing(row)
            if above not in known:
                known[above] = any(issubclass(one, cls) for one in above)
        return [known[self.view.plan.enclosing(row)] for row in self._rows]

    @functools.cached_property
    def masks(self) -> list[int]:
        """The bit mask of the patterns that match each row."""
        return [self._masks[row] for row in self._rows]

    @functools.cached_property
    def paths(self) -> list[str]:
        """The label path of each row; of the first leaf, where paths do not matter."""
        return [self.view.plan.paths[row] for row in self._rows]

    @functools.cached_property
    def abstract(self) -> list[Any]:
        """The shape and dtype of each row; None for static leaves."""
        return [as_abstract(self.view.leaves[row]) for row in self._rows]

    @functools.cached_property
    def is_array(self) -> list[bool]:
        """Whether the leaves of each row are arrays."""
        return [is_array(self.view.leaves[row]) for row in self._rows]

    @functools.cached_property
    def seen(self) -> int:
        """The bit mask of the patterns that match an array leaf, or could in a hole."""
        seen = 0
        if self.holes:
            seen = self.matcher.reach(self.view.plan, self.holes)
        for mask, yes in zip(self.masks, self.is_array, strict=True):
            seen |= mask * yes
        return seen

    def is_used(self, pattern: str) -> bool:
        """Return whether a pattern matches an array leaf, or could in a hole."""
        return bool(self.seen & self.matcher.bits[pattern])

    def has_any(self, answers: Iterable[bool]) -> bool:
        """Return whether a column of bools is true for an array leaf."""
        return any(map(all, zip(answers, self.is_array, strict=True)))

    def _match(self) -> Sequence[int]:
        """Return the bit mask of each leaf of the tree."""
        plan, key = self.view.plan, ("masks", self.matcher)
        found = plan.memo.get(key)
        if found is None:
            found = plan.remember(key, self.matcher.match(plan))
        return found

    def _distinct(self, needs: frozenset[str]) -> tuple[list[int], list[int]]:
        """Return the first leaf of each row, and the row of each leaf."""
        leaves, plan = self.view.leaves, self.view.plan
        facts: list[Sequence[Hashable]] = [self._masks]
        if not all_arrays(leaves):
            facts.append([is_array(leaf) for leaf in leaves])
        if "leaf" in needs:
            facts.append(list(map(_signature, leaves)))
        if "classes" in needs:
            facts.append([plan.enclosing(index) for index in range(len(leaves))])
        if "path" in needs:
            facts.append(plan.paths)
        key = ("rows", self.matcher) if len(facts) == 1 else None
        found = plan.memo.get(key)
        if found is None:
            found = _grouped(facts)
            if key is not None:
                plan.remember(key, found)
        return found


class OnePath(Leaves):
    """A table of one leaf of which little more than the path is known.

    Args:
        asked: whose question it is, for the message.
        matcher: all patterns of the question.
        path: the label path.
        leaf: the leaf, if it is known.

    Raises:
        SelectorError: when a column is read that is not known.
    """

    def __init__(self, asked: Any, matcher: Matcher, path: str, leaf: Any = ...):
        self.matcher, self._asked, self._leaf = matcher, asked, leaf
        self.masks, self.paths = [matcher.match_path(path)], [path]

    def __len__(self) -> int:
        return 1

    def at(self, rows: Sequence[int]) -> Leaves:
        """Return this table: no other row can be asked for."""
        return self

    def under(self, cls: type) -> list[bool]:
        """Return whether the leaf itself is of a class; what is above is not known."""
        if self._leaf is ... or not isinstance(self._leaf, cls):
            raise self._not_known()
        return [True]

    @functools.cached_property
    def abstract(self) -> list[Any]:
        """The shape and dtype of the leaf; None for a static leaf."""
        if self._leaf is ...:
            raise self._not_known()
        return [as_abstract(self._leaf)]

    @functools.cached_property
    def is_array(self) -> list[bool]:
        """Whether the leaf is an array."""
        return [self.abstract[0] is not None]

    def _not_known(self) -> SelectorError:
        return SelectorError(
            f"{self._asked!r} cannot be answered for {self.paths[0]!r} alone: it asks "
            "for more than the path. Decide on the full tree first: "
            "selector.bind(tree) answers by path from then on."
        )


def array_flags(leaves: Sequence[Any]) -> list[bool]:
    """Return, for each leaf, whether it is an array.

    Example:
        >>> array_flags([np.ones(2), 1.0])
        [True, False]
    """
    if all_arrays(leaves):
        return [True] * len(leaves)
    return [is_array(leaf) for leaf in leaves]


def all_arrays(leaves: Sequence[Any]) -> bool:
    """Return whether every leaf is an array, by its type alone.

    False where only the leaves themselves can show it.
    """
    return all(
        issubclass(cls, _ARRAY_CLASSES) for cls in dict.fromkeys(map(type, leaves))
    )


def as_abstract(leaf: Any) -> Any:
    """Reduce a leaf to its shape and dtype; None for a static leaf.

    Example:
        >>> as_abstract(np.zeros((2, 3), np.int8)), as_abstract(1.0)
        (ShapeDtypeStruct(shape=(2, 3), dtype=int8), None)
    """
    if not is_array(leaf):
        return None
    try:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    except TypeError:  # an array of another library, with a dtype of its own
        return leaf


def _signature(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype) if is_array(leaf) else None


def _grouped(facts: Sequence[Sequence[Hashable]]) -> tuple[list[int], list[int]]:
    """Return the first place of each different row of some columns, and all rows."""
    keys = facts[0] if len(facts) == 1 else list(zip(*facts, strict=True))
    first: dict[Hashable, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(key, place)
    row_of = dict(zip(first, range(len(first)), strict=True))
    return list(first.values()), list(map(row_of.__getitem__, keys))


def _flat_dict_error(part: str) -> SelectorError:
    return SelectorError(
        f"{part} asks for the classes of nodes or counts their children, and a flat "
        "dict no longer has these. Decide on the tree that it was made from: "
        "selector.bind(tree), or rules.bind(tree), answers by path from then on."
    )
