"""The table of leaves: what selectors read, one column at a time.

A row is for all leaves of a tree that the question cannot distinguish: same
matching patterns and, if a selector asks for them, same shape, classes or path. So a
table of rules costs as many decisions as there are different rows. All patterns of a
question are matched in one walk; every column is computed when it is first read.
Knows nothing of selectors (see ``selectors``) and of labels (see ``rules``).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from treeadapt.errors import SelectorError
from treeadapt.patterns.matcher import Matcher
from treeadapt.text.wording import worded
from treeadapt.trees.arrays import ARRAY_CLASSES, is_array
from treeadapt.trees.views import Plan, TreeView

T = TypeVar("T")
Known = weakref.WeakKeyDictionary[Plan, list[Any]]
_Rows = tuple[list[int], list[int]]  # the first leaf of each, and the row of each leaf
_UNKNOWN: Any = object()


class Leaves:
    """The leaves of one tree as a table, with a row for each kind of leaf.

    Args:
        view: the tree.
        matcher: all patterns of the question.
        needs: facts beyond patterns that the question reads: ``"leaf"`` (shape and
            dtype), ``"classes"``, ``"path"``.
        holes: paths of places that may be nodes of arrays. A pattern that could
            match there, or below, counts as used.

    Raises:
        SelectorError: classes or siblings are asked for, and the tree is a flat dict,
            or the rest of a split, which has lost them.
    """

    # Whether names alone decide the rows of this, the whole table.
    _by_names = False

    def __init__(
        self,
        view: TreeView,
        matcher: Matcher,
        needs: frozenset[str] = frozenset(),
        holes: Sequence[str] = (),
    ):
        self.view, self.matcher, self.holes = view, matcher, holes
        is_rest = getattr(view.plan.root, "forgets_classes", False)
        asks = bool(matcher.asking) or "classes" in needs
        if asks and (is_rest or view.plan.is_flat_dict):
            part = repr(matcher.asking[0]) if matcher.asking else "A class selector"
            what = "the rest of a split" if is_rest else "a flat dict"
            python = (
                "Decide on the tree that it was made from: selector.bind(tree), or "
                "rules.bind(tree), answers by path from then on."
            )
            cure = worded(python, "Name the model as TREE, module:function.")
            raise SelectorError(
                f"{part} asks for the classes of nodes or counts their children, and "
                f"{what} no longer has these. {cure}"
            )
        self._masks, by_names = self._match()
        self._shapes: dict[int, Any] = {}  # by leaf; for all parts of the table
        self._above: list[tuple[type, ...]] = []
        self._rows, self._row_of = self._distinct(needs) or by_names

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, rows: Sequence[int]) -> Leaves:
        """Return the table of some of the rows."""
        if len(rows) == len(self):
            return self
        part = object.__new__(type(self))
        part.view, part.matcher, part.holes = self.view, self.matcher, self.holes
        part._masks, part._shapes, part._above = self._masks, self._shapes, self._above
        part._arrays_only = self._arrays_only
        part._rows = [self._rows[row] for row in rows]
        return part

    def spread(self, answers: Sequence[T]) -> list[T]:
        """Return one answer a leaf, in leaf order, of one answer a row."""
        return list(map(answers.__getitem__, self._row_of))

    def once(self, answers: Known, answer: Callable[[Leaves], list[T]]) -> list[T]:
        """Return an answer for all rows, remembered where names alone decide it.

        Args:
            answers: what was answered before, by plan.
            answer: gives one answer a row of a table.
        """
        if not self._by_names:
            return answer(self)
        rows = answers.get(self.view.plan)
        if rows is None:
            rows = answers[self.view.plan] = answer(self)
        return rows

    def matched(self, pattern: str) -> list[bool]:
        """Return, for each row, whether ``pattern`` selects its leaves."""
        bit = self.matcher.bits[pattern]
        return [bool(mask & bit) for mask in self.masks]

    def under(self, cls: type) -> list[bool]:
        """Return, for each row, whether its leaves are under a node of a class."""
        above = [self._above[row] for row in self._rows]
        are_under = {
            classes: any(issubclass(one, cls) for one in classes)
            for classes in dict.fromkeys(above)
        }
        return list(map(are_under.__getitem__, above))

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
        shapes, leaves = self._shapes, self.view.leaves
        for row in self._rows:
            if row not in shapes:
                shapes[row] = as_abstract(leaves[row])
        return [shapes[row] for row in self._rows]

    @functools.cached_property
    def is_array(self) -> list[bool]:
        """Whether the leaves of each row are arrays."""
        if self._arrays_only:
            return [True] * len(self._rows)
        return [is_array(self.view.leaves[row]) for row in self._rows]

    @functools.cached_property
    def members(self) -> list[list[int]]:
        """The leaves of each row."""
        leaves_by_row: list[list[int]] = [[] for _ in self._rows]
        for leaf, row in enumerate(self._row_of):
            leaves_by_row[row].append(leaf)
        return leaves_by_row

    @functools.cached_property
    def reached(self) -> int:
        """The bit mask of the patterns that could match in a hole."""
        return self.matcher.reach(self.view.plan, self.holes) if self.holes else 0

    @functools.cached_property
    def seen(self) -> int:
        """The bit mask of the patterns that are used; see ``is_used``."""
        seen = functools.reduce(operator.or_, self.nones.masks, self.reached)
        for mask, yes in zip(self.masks, self.is_array, strict=True):
            seen |= mask * yes
        return seen

    def is_used(self, pattern: str) -> bool:
        """Return whether a pattern matches an array leaf or None, or may in a hole."""
        return bool(self.seen & self.matcher.bits[pattern])

    @functools.cached_property
    def nones(self) -> Places:
        """The places of None, in which a larger tree may have leaves."""
        plan = self.view.plan
        if not plan.nones:
            return Places(self.matcher, (), (), ())
        masks = self.matcher.match(plan, plan.nones)
        above = [*map(plan.enclosing, plan.nones)]
        return Places(self.matcher, plan.nones, masks, above)

    def may_reach(self, pattern: str | None) -> bool:
        """Return whether a pattern, or None for what is more, could match in a hole."""
        if pattern is None:
            return bool(self.holes)
        return bool(self.reached & self.matcher.bits[pattern])

    def has_any(self, answers: Iterable[bool]) -> bool:
        """Return whether a column of bools is true for an array leaf."""
        return any(map(all, zip(answers, self.is_array, strict=True)))

    def _match(self) -> tuple[Sequence[int], _Rows]:
        """Return the bit mask of each leaf, and the rows that these give."""
        plan, key = self.view.plan, self.matcher
        rows = plan.memo.get(key)
        if rows is None:
            masks = self.matcher.match(plan)
            rows = plan.remember(key, (masks, _grouped([masks])))
        return rows

    def _distinct(self, needs: frozenset[str]) -> _Rows | None:
        """Return the rows, if more than the patterns distinguish them."""
        leaves, plan = self.view.leaves, self.view.plan
        facts: list[Sequence[Hashable]] = [self._masks]
        # By type alone: where only the leaves themselves can show it, they are asked.
        types = set(map(type, leaves))
        self._arrays_only = all(issubclass(one, ARRAY_CLASSES) for one in types)
        if not self._arrays_only:
            facts.append([is_array(leaf) for leaf in leaves])
        if "leaf" in needs:
            facts.append(list(map(signature, leaves)))
        if "classes" in needs:
            self._above = list(map(plan.enclosing, plan.paths))
            facts.append(self._above)
        if "path" in needs:
            facts.append(plan.paths)
        self._by_names = len(facts) == 1
        return None if self._by_names else _grouped(facts)


class NotKnown(Exception):  # noqa: N818  # it is no error: another part may answer
    """A path alone does not say what is asked."""


class Places(Leaves):
    """A table of places of leaves; the leaves themselves are not known.

    Args:
        matcher: all patterns of the question.
        paths: the label paths.
        masks: the bit masks of the patterns that match them.
        above: the classes of the nodes above them.

    Raises:
        NotKnown: when a column is read that is not known.
    """

    def __init__(
        self,
        matcher: Matcher,
        paths: Sequence[str],
        masks: Sequence[int],
        above: Sequence[tuple[type, ...]],
    ):
        self.matcher, self.paths, self.masks = matcher, list(paths), list(masks)
        self._above, self._rows = list(above), list(range(len(paths)))

    def at(self, rows: Sequence[int]) -> Leaves:
        """Return the table of some of the rows."""
        if len(rows) == len(self):
            return self
        paths = [self.paths[row] for row in rows]
        masks = [self.masks[row] for row in rows]
        return Places(self.matcher, paths, masks, [self._above[row] for row in rows])

    @functools.cached_property
    def abstract(self) -> list[Any]:
        """Refuse: no shape is known."""
        raise NotKnown

    @functools.cached_property
    def is_array(self) -> list[bool]:
        """Whether each leaf is an array."""
        return [shape is not None for shape in self.abstract]


class OnePath(Places):
    """A table of one leaf of which little more than the path is known.

    Args:
        matcher: all patterns of the question.
        path: the label path.
        leaf: the leaf, if it is known.

    Raises:
        NotKnown: when a column is read that is not known.
    """

    def __init__(self, matcher: Matcher, path: str, leaf: Any = _UNKNOWN):
        super().__init__(matcher, [path], [matcher.match_path(path)], [()])
        self._leaf = leaf

    def under(self, cls: type) -> list[bool]:
        """Return whether the leaf itself is of a class; what is above is not known."""
        if self._leaf is _UNKNOWN or not issubclass(type(self._leaf), cls):
            raise NotKnown
        return [True]

    @functools.cached_property
    def abstract(self) -> list[Any]:
        """The shape and dtype of the leaf; None for a static leaf."""
        if self._leaf is _UNKNOWN:
            raise NotKnown
        return [as_abstract(self._leaf)]


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


def signature(leaf: Any) -> Hashable:
    """Return shape and dtype of a leaf, to be compared; None for a static leaf."""
    if not is_array(leaf):
        return None
    shape_and_dtype = (tuple(leaf.shape), leaf.dtype)
    try:
        hash(shape_and_dtype)
    except TypeError:  # an array of another library
        return id(leaf)
    return shape_and_dtype


def _grouped(facts: Sequence[Sequence[Hashable]]) -> _Rows:
    """Return the first place of each different row of some columns, and all rows."""
    keys = facts[0] if len(facts) == 1 else list(zip(*facts, strict=True))
    first: dict[Hashable, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(key, place)
    row_of = dict(zip(first, range(len(first)), strict=True))
    return list(first.values()), list(map(row_of.__getitem__, keys))
