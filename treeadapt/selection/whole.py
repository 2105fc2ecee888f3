"""Questions about the leaves of a tree, and the whole tree behind its smaller views.

Selectors, rules and lifted functions are each a ``Question``: of a tree it gives
``Answers``. Optax asks about gradients, filtered trees and flat dicts, which have lost
the classes and siblings by which a selector decides. So a ``WholeTree`` decides once,
on the caller's tree, and answers by path. Transformations of this library are handed
it; masks that Optax itself calls find it with ``whole_of``.
Decides nothing itself (see ``selectors`` and ``rules``).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from treeadapt.arrays import is_array
from treeadapt.errors import SelectorError, TransformError
from treeadapt.layers.region import Region
from treeadapt.layers.stacks import NO_STACKS, Stacks, Unrolled
from treeadapt.matcher import Matcher, matcher_of
from treeadapt.names import plural, shorten
from treeadapt.patterns import parse
from treeadapt.selection.answers import IN_AN_OPTIMIZER, Answers, require_agreement
from treeadapt.selection.leaves import Known, Leaves
from treeadapt.trees.views import TreeView, view_tree

W = TypeVar("W", "WholeTree", None)


class Question:
    """What can be asked about every leaf of a tree: its patterns and further needs.

    Attributes:
        needs: facts beyond patterns that an answer reads: leaf, classes, path.
        stacks: whose layers are leaves of their own to it.
        gives: what it makes of a tree, for messages.
    """

    needs: frozenset[str] = frozenset()
    stacks: Stacks = NO_STACKS
    gives = "A mask"

    def ask(self, tree: Any) -> Any:
        """Return a tree of answers, as Optax calls for them.

        They are those of the whole tree in force, if ``tree`` is a view of it.

        Raises:
            SelectorError: ``tree`` is a number: a schedule is called so.
        """
        refuse_number(self, tree)
        view = view_tree(tree)
        whole = whole_of(view)
        if whole is None:
            answers = self.of_view(view)
        else:
            answers = self.answer(whole, view.plan.paths)
        answers = require_agreement(answers, self.gives, cure=IN_AN_OPTIMIZER)
        return view.rebuild(answers)

    def of_view(self, view: TreeView) -> list[Any]:
        """Return one answer for each leaf of a tree, which may be a part of one."""
        return self.decide(view, reports=True, is_part=view.plan.has_gaps).of(view)

    def decide(
        self, view: TreeView, *, reports: bool, is_part: bool = False
    ) -> Answers:
        """Decide every leaf of a tree.

        Args:
            view: the tree.
            reports: raise for what matches no array leaf, and no None.
            is_part: the tree may be a part of one: what could match one of its holes,
                or something below, is not reported.
        """
        raise NotImplementedError

    def answer(self, whole: WholeTree, paths: Sequence[str]) -> list[Any]:
        """Return the answers for some leaves of a whole tree.

        Args:
            whole: the tree.
            paths: of the leaves.

        Returns:
            One answer a leaf; ``Split`` where its layers have different ones.
        """
        return whole.answers(paths, self)

    def patterns(self) -> Iterator[str]:
        """Yield the text of every pattern that it holds."""
        yield from ()

    @functools.cached_property
    def matcher(self) -> Matcher:
        """The matcher of all its patterns."""
        return matcher_of(tuple(map(parse, dict.fromkeys(self.patterns()))))

    def table(
        self, view: TreeView, *, is_part: bool = False
    ) -> tuple[Leaves, Unrolled]:
        """Return the table of the leaves of a tree, with ``stacks`` of its layers.

        Args:
            view: the tree.
            is_part: the tree may be a part of one, with nodes in its holes.
        """
        if self.stacks.data:
            layers = self.stacks.unroll(view, is_part=is_part)
        else:  # as ``unroll`` does; most tables are such
            count = len(view.leaves)
            layers = Unrolled(view, view, [1] * count, [()] * count, {}, self.stacks)
        holes = layers.view.plan.holes if is_part else ()
        return Leaves(layers.view, self.matcher, self.needs, holes), layers

    @property
    def needs_tree(self) -> bool:
        """Whether classes or numbers of children decide, which a flat dict lacks."""
        return "classes" in self.needs or bool(self.matcher.asking)

    def needs_params(self, gradients: TreeView) -> bool:
        """Return whether it asks for more than paths, which gradients cannot answer."""
        return self.needs_tree or not self.needs <= {"path"}

    @functools.cached_property
    def _known(self) -> Known:
        return Known()


@dataclasses.dataclass(frozen=True, repr=False)
class BoundQuestion(Question):
    """What has decided on one full tree, and answers by path.

    Attributes:
        asked: what decided.
        answers: what it decided.
    """

    asked: Any
    answers: Answers

    def __repr__(self) -> str:
        return f"<{self.asked!r} bound to {plural(len(self.answers.paths), 'path')}>"

    def __hash__(self) -> int:
        return hash((self.asked, len(self.answers.paths)))

    def decide(
        self, view: TreeView, *, reports: bool, is_part: bool = False
    ) -> Answers:
        """Return what was decided; nothing is reported, the full tree was checked."""
        return self.answers

    def bind(self, tree: Any) -> Any:
        """Decide again, on another full tree."""
        return self.asked.bind(tree)

    def needs_params(self, gradients: TreeView) -> bool:
        """Return that nothing more is asked for."""
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class WholeTree:
    """The caller's whole tree, while smaller views of it are shown to selectors.

    Attributes:
        view: the whole tree.
        strict: report patterns that match nothing in it.
        is_params: the tree holds the params; otherwise only gradients of them, which
            share nothing but the paths: classes, dtypes and siblings may differ.
        regions: layers that smaller views hold instead of an array, by their key.
        layers: the tree with the shapes of one layer of each stack, where a
            transformation runs on each layer by itself; what knows no stacks decides
            on it.
    """

    view: TreeView
    strict: bool
    is_params: bool
    regions: Mapping[str, Region] = dataclasses.field(default_factory=dict)
    layers: TreeView | None = None
    _answers: dict[int, tuple[Any, Answers]] = dataclasses.field(
        default_factory=dict, init=False
    )

    def holds(self, view: TreeView) -> bool:
        """Return whether every leaf of ``view`` has its path in the whole tree."""
        return all(
            path in self._paths or path in self.regions for path in view.plan.paths
        )

    def answers(self, paths: Sequence[str], asked: Any) -> list[Any]:
        """Decide on the whole tree, once, and answer for some of its paths.

        Args:
            paths: paths of the whole tree, or names of some layers of its arrays.
            asked: a ``Question``; known by identity.

        Returns:
            One answer a path; ``Split`` where its layers have different ones.

        Raises:
            TransformError: only gradients are known, and they cannot answer.
        """
        if id(asked) not in self._answers:
            if not self.is_params and asked.needs_params(self.view):
                raise TransformError(
                    f"{shorten(repr(asked))} asks for more than paths (classes, "
                    "shapes, dtypes or siblings), and gradients may differ from the "
                    "params in these. Pass the params too: "
                    "update(updates, state, params)."
                )
            view = self.view if asked.stacks else self.layers or self.view
            answers = asked.decide(view, reports=self.strict)
            self._answers[id(asked)] = asked, answers  # so that the id stays its own
        _, answers = self._answers[id(asked)]
        values = answers.of(self.view, paths, self.regions)
        if self.layers is None:
            return values
        who = "What runs inside per_layer"
        return require_agreement(values, who, cure=IN_AN_OPTIMIZER)

    def with_regions(self, regions: Mapping[str, Region]) -> WholeTree:
        """Return the tree with more layers that smaller views hold, by key."""
        if not regions:
            return self
        return dataclasses.replace(self, regions={**self.regions, **regions})

    def stored_path(self, path: str) -> str:
        """Return the path in the whole tree of the array that a view shows."""
        return self.regions[path].path if path in self.regions else path

    @functools.cached_property
    def _paths(self) -> frozenset[str]:
        return frozenset(self.view.plan.paths)


def whole_tree(
    tree: Any, *, strict: bool = False, is_params: bool = True
) -> contextlib.AbstractContextManager[WholeTree]:
    """Let selectors and rules called on smaller views decide on the tree behind them.

    Inside the block a selector, rules, or whatever else asks ``whole_of``, called on a
    tree whose paths all belong to ``tree``, answers as on ``tree`` itself: classes,
    sibling counts and leaf predicates see the caller's own nodes and leaves.

    Args:
        tree: the caller's whole tree, or its ``TreeView``. Within another block whose
            tree holds all its paths, that larger tree stays in force.
        strict: report patterns that match nothing, as on a full tree.
        is_params: ``tree`` holds the params, not only gradients of them.

    Example:
        >>> from treeadapt.selection.selectors import node
        >>> model = {"pair": (jnp.ones(1), jnp.ones(1)), "one": jnp.ones(1)}
        >>> with whole_tree(model):
        ...     node(tuple)({"pair/0": jnp.ones(1), "one": jnp.ones(1)})
        {'one': False, 'pair/0': True}
    """
    view = tree if isinstance(tree, TreeView) else view_tree(tree)
    outer = whole_of(view)
    if outer is None:
        whole = WholeTree(view, strict, is_params)
    else:
        whole = dataclasses.replace(outer, strict=strict)
    return in_force(whole)


def no_whole_tree() -> contextlib.AbstractContextManager[None]:
    """Let selectors and rules answer for what they are called on, and no tree behind.

    For functions of the caller's that a transformation calls: an optimizer inside
    them has a tree of its own, whose paths may be among those of the outer one.
    """
    return in_force(None)


@contextlib.contextmanager
def in_force(whole: W) -> Iterator[W]:
    """Let selectors and rules called on smaller views ask this tree, or none."""
    token = _whole.set(whole)
    try:
        yield whole
    finally:
        _whole.reset(token)


def whole_of(view: TreeView) -> WholeTree | None:
    """Return the whole tree in force if ``view`` is a view of it, otherwise None."""
    whole = _whole.get()
    return whole if whole is not None and whole.holds(view) else None


_whole: contextvars.ContextVar[WholeTree | None] = contextvars.ContextVar(
    "treeadapt_whole_tree", default=None
)


def refuse_number(asked: Any, tree: Any) -> None:
    """Raise if ``tree`` is one number: whoever calls takes ``asked`` for a schedule.

    Raises:
        SelectorError: it names the cure.
    """
    if isinstance(tree, numbers.Number) or (is_array(tree) and tree.shape == ()):
        raise SelectorError(
            f"{shorten(repr(asked))} was called with one number, as a schedule is "
            "called with the step count; it wants a tree. optax.inject_hyperparams "
            "treats every callable as a schedule, masks too; "
            "treeadapt.inject_hyperparams does not: use that one. For a tree that is "
            "one scalar, call param_mask or param_labels."
        )
