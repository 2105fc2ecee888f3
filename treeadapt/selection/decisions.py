"""Decisions: many questions about every leaf of one tree, asked together.

Takes selectors as things that can be asked about a ``Case`` and a ``TreeView``, and
gives one answer a leaf. All patterns of all selectors are matched in one walk, which
gives each leaf a bit mask; leaves with the same mask share a decision, and shapes or
classes are looked at only where the mask alone leaves the answer open.
Answers that follow from names alone are remembered with the plan of the structure.
Knows nothing of what selectors look like (see ``selectors``) or of labels (``rules``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.errors import SelectorError
from treeadapt.matcher import Matcher, matcher_of
from treeadapt.patterns import parse
from treeadapt.trees.views import Plan, TreeView

T = TypeVar("T")


class _Unknown:
    """Type of ``UNKNOWN``: a fact that a case does not hold."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = _Unknown()


@dataclasses.dataclass(slots=True)
class Case:
    """What is known of one leaf, or of all leaves with one bit mask.

    Attributes:
        hits: bit mask of the patterns that select the leaf.
        bits: the bit of each pattern.
        leaf: the leaf as a ``ShapeDtypeStruct``; None for a static leaf.
        classes: classes of the nodes above or at the leaf.
        every_class: ``classes`` is complete; otherwise there may be others.
        path: the label path.
    """

    hits: int
    bits: Mapping[str, int]
    leaf: Any = UNKNOWN
    classes: tuple[type, ...] = ()
    every_class: bool = False
    path: Any = UNKNOWN

    def hit(self, pattern: str) -> bool:
        """Tell whether ``pattern`` selects the leaf."""
        return bool(self.hits & self.bits[pattern])

    def under(self, cls: type) -> bool | None:
        """Tell whether the leaf stands under a ``cls``; None where that is unknown."""
        if any(issubclass(found, cls) for found in self.classes):
            return True
        return False if self.every_class else None


class Asked(Protocol):
    """What a selector must offer to be asked."""

    @property
    def needs(self) -> frozenset[str]:
        """Facts beyond patterns that an answer may need: leaf, classes, path."""

    @property
    def key(self) -> Hashable | None:
        """What stands for it in caches; None if names alone do not decide."""

    @property
    def plain(self) -> str | None:
        """The pattern, if the selector is just one."""

    def patterns(self) -> Iterable[str]:
        """Give the text of every pattern that it holds."""

    def ask(self, case: Case) -> bool | None:
        """Decide one case; None where the case lacks a fact that matters."""


class Program:
    """Several selectors, made ready to be asked together.

    Args:
        selectors: in the order in which the first that selects a leaf decides.
    """

    def __init__(self, selectors: Iterable[Asked]):
        self.selectors = tuple(selectors)
        plain = [selector.plain for selector in self.selectors]
        # Plain patterns come first, in order: the lowest bit that is set in a mask is
        # then the first of them that decides, and no other one need be asked.
        texts = [text for text in plain if text is not None]
        self._plain_bits = (1 << len(dict.fromkeys(texts))) - 1
        for selector in self.selectors:
            texts.extend(selector.patterns())
        self.texts = tuple(dict.fromkeys(texts))
        self.bits = {text: 1 << place for place, text in enumerate(self.texts)}
        first: dict[str, int] = {}
        for index, text in enumerate(plain):
            if text is not None:
                first.setdefault(text, index)
        self._owner = tuple(first.values())
        self._others = tuple(
            (index, self.selectors[index])
            for index, text in enumerate(plain)
            if text is None
        )
        self.needs = frozenset().union(*(one.needs for one in self.selectors))
        keys = tuple(one.key for one in self.selectors)
        self.key: Hashable | None = None if None in keys else keys

    @functools.cached_property
    def needs_tree(self) -> bool:
        """Whether classes or numbers of children decide, which a flat dict lacks."""
        return "classes" in self.needs or any(
            parse(text).needs_tree for text in self.texts
        )

    @functools.cached_property
    def needs_params(self) -> bool:
        """Whether gradients cannot answer: they share only the paths of the params."""
        return self.needs_tree or not self.needs <= {"path"}

    @functools.cached_property
    def matcher(self) -> Matcher:
        """The matcher of all patterns, shared by programs with the same patterns."""
        return matcher_of(tuple(map(parse, self.texts)))

    def hits(self, view: TreeView) -> Sequence[int]:
        """Return the bit mask of each leaf.

        Raises:
            SelectorError: classes or sibling counts are asked of a flat dict.
        """
        plan = view.plan
        if plan.is_flat_dict and self.needs_tree:
            self._refuse_flat_dict()
        key = ("hits", self.texts)
        found = plan.memo.get(key)
        if found is None:
            found = plan.remember(key, self.matcher.match(plan))
        return found

    def reach(self, view: TreeView, paths: Sequence[str]) -> int:
        """Return the bit mask of the patterns that could match at or below ``paths``.

        The class and the content of these places are not known.
        """
        return self.matcher.reach(view.plan, paths) if paths else 0

    def first(self, view: TreeView) -> Sequence[int]:
        """Return, for each leaf, the index of the first selector that selects it.

        Returns:
            One index a leaf, in leaf order; -1 where no selector does.
        """
        if self.key is None:
            return self.each(view, self.ask_first)
        key = ("first", self.key)
        found = view.plan.memo.get(key)
        if found is None:
            found = view.plan.remember(key, self.each(view, self.ask_first))
        return found

    def ask_first(self, case: Case) -> int | None:
        """Return the index of the first selector that selects; None if unknown."""
        low = case.hits & self._plain_bits
        place = (low & -low).bit_length() - 1
        best = self._owner[place] if low else len(self.selectors)
        for index, selector in self._others:
            if index > best:
                break
            answer = selector.ask(case)
            if answer is None:
                return None
            if answer:
                return index
        return best if low else -1

    def each(self, view: TreeView, ask: Callable[[Case], T | None]) -> list[T]:
        """Put one question about every leaf.

        Args:
            view: the tree.
            ask: gives the answer for a case, or None where the case lacks a fact.

        Returns:
            One answer a leaf, in leaf order.
        """
        hits = self.hits(view)
        known = {mask: ask(Case(mask, self.bits)) for mask in dict.fromkeys(hits)}
        if None not in known.values():
            return list(map(known.__getitem__, hits))  # type: ignore[arg-type]
        facts = _facts(view, self.needs)
        answers: dict[Any, T] = {}
        found: list[T] = []
        for index, mask in enumerate(hits):
            answer = known[mask]
            if answer is None:
                key = (mask, facts(index))
                answer = answers.get(key)
                if answer is None:
                    case = self._full_case(mask, view, index)
                    answers[key] = answer = _decided(ask(case), view.plan, index)
            found.append(answer)
        return found

    def at_path(self, path: str, **facts: Any) -> Case:
        """Return the case of one path without a tree.

        Raises:
            SelectorError: a pattern counts siblings or names a class.
        """
        return Case(self.matcher.match_path(path), self.bits, path=path, **facts)

    def _full_case(self, mask: int, view: TreeView, index: int) -> Case:
        return Case(
            mask,
            self.bits,
            leaf=as_abstract(view.leaves[index]),
            classes=view.plan.enclosing(index) if "classes" in self.needs else (),
            every_class=True,
            path=view.plan.paths[index],
        )

    def _refuse_flat_dict(self) -> None:
        for selector in self.selectors:
            part = next(_tree_parts(selector), None)
            if part is not None:
                raise SelectorError(
                    f"{part} asks for the classes of nodes or counts their children, "
                    "and a flat dict no longer has these. Decide on the tree that it "
                    "was made from: selector.bind(tree), or rules.bind(tree), answers "
                    "by path from then on."
                )


class Survey:
    """What several selectors hit among the array leaves of one tree.

    Attributes:
        program: the selectors.
        view: the tree.
        holes: paths of places that may stand for arrays. What could hit one counts as
            a hit: that is no fault of the selector.
        is_array: whether each leaf is an array.
    """

    def __init__(self, program: Program, view: TreeView, holes: Sequence[str] = ()):
        self.program = program
        self.view = view
        self.holes = holes
        self.is_array = array_flags(view.leaves)

    @functools.cached_property
    def num_arrays(self) -> int:
        """How many leaves are arrays."""
        return sum(self.is_array)

    @functools.cached_property
    def masks(self) -> dict[int, list[int]]:
        """The different bit masks of the array leaves, and the leaves of each."""
        found: dict[int, list[int]] = {}
        hits = enumerate(self.program.hits(self.view))
        for index, mask in itertools.compress(hits, self.is_array):
            found.setdefault(mask, []).append(index)
        return found

    @functools.cached_property
    def seen(self) -> int:
        """Bit mask of the patterns that select an array leaf, or could."""
        seen = self.program.reach(self.view, self.holes)
        for mask in self.masks:
            seen |= mask
        return seen

    @functools.cached_property
    def classes(self) -> tuple[type, ...]:
        """Classes of all nodes above or at an array leaf."""
        found: dict[type, None] = {}
        for index, yes in enumerate(self.is_array):
            if yes:
                found.update(dict.fromkeys(self.view.plan.enclosing(index)))
        return tuple(found)

    def hit(self, pattern: str) -> bool:
        """Tell whether ``pattern`` selects an array leaf."""
        return bool(self.seen & self.program.bits[pattern])

    def under(self, cls: type) -> bool:
        """Tell whether an array leaf stands under a ``cls``, or could."""
        return bool(self.holes) or any(issubclass(found, cls) for found in self.classes)

    def selects(self, selector: Asked) -> bool:
        """Tell whether ``selector`` selects an array leaf, or could."""
        if self.holes:
            return selector.plain is None or self.hit(selector.plain)
        return bool(self.selected(selector))

    def selected(self, selector: Asked) -> list[int]:
        """Return the indices of the array leaves that ``selector`` selects."""
        bits = self.program.bits
        answers = [selector.ask(Case(mask, bits)) for mask in self.masks]
        if None in answers:
            chosen = self.program.each(self.view, selector.ask)
            pairs = zip(chosen, self.is_array, strict=True)
            return [index for index, (yes, arr) in enumerate(pairs) if yes and arr]
        hits = itertools.compress(self.masks.values(), answers)
        return sorted(itertools.chain.from_iterable(hits))


def array_flags(leaves: Sequence[Any]) -> list[bool]:
    """Tell for each leaf whether it is an array.

    Example:
        >>> array_flags([np.ones(2), 1.0])
        [True, False]
    """
    if all_arrays(leaves):
        return [True] * len(leaves)
    return [is_array(leaf) for leaf in leaves]


def all_arrays(leaves: Sequence[Any]) -> bool:
    """Tell whether every leaf is an array, by its type alone.

    False where only a look at the leaves themselves could tell.
    """
    return all(
        issubclass(cls, _ARRAY_CLASSES) for cls in dict.fromkeys(map(type, leaves))
    )


_ARRAY_CLASSES = (
    jax.Array,
    jax.core.Tracer,
    jax.ShapeDtypeStruct,
    np.ndarray,
    np.generic,
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


def _facts(view: TreeView, needs: frozenset[str]) -> Callable[[int], Hashable]:
    """Return what tells leaves with the same mask apart."""
    leaves, plan = view.leaves, view.plan

    def signature(index: int) -> Hashable:
        leaf = leaves[index]
        return (leaf.shape, leaf.dtype) if is_array(leaf) else None

    looks: list[Callable[[int], Hashable]] = []
    if "leaf" in needs:
        looks.append(signature)
    if "classes" in needs:
        looks.append(plan.enclosing)
    if "path" in needs:
        looks.append(plan.paths.__getitem__)
    return looks[0] if len(looks) == 1 else lambda i: tuple(look(i) for look in looks)


def _decided(answer: T | None, plan: Plan, index: int) -> T:
    if answer is None:
        raise SelectorError(
            f"A selector gives no answer for {plan.paths[index]!r}: a selector class "
            "must name in `needs` every fact that it asks for."
        )
    return answer


def _tree_parts(selector: Asked) -> Iterator[str]:
    """Name the parts of a selector that a flat dict cannot answer."""
    for text in selector.patterns():
        if parse(text).needs_tree:
            yield repr(text)
    if "classes" in selector.needs:
        yield repr(selector)
