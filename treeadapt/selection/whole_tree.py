"""Questions about the leaves of a tree, and the whole tree behind its smaller views.

Selectors, rules and lifted functions are each a ``Question``: of a tree it gives
``Answers``. Optax asks about gradients, filtered trees and flat dicts, which have lost
the classes and siblings by which a selector decides. So a ``WholeTree`` decides once,
on the caller's tree, and answers by path. Transformations of this library are handed
it; masks that Optax itself calls find it with ``whole_of``. Shapes and dtypes are
always those of the leaves that a question is asked about: a mask function may have cut
them, and an optimizer of another model may be made inside a transformation.
Decides nothing itself (see ``selectors`` and ``rules``).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax

from treeadapt.errors import SelectorError, TransformError
from treeadapt.layers.region import Region
from treeadapt.layers.stacks import NO_STACKS, Stacks, Unrolled
from treeadapt.patterns.glob import parse
from treeadapt.patterns.matcher import Matcher, matcher_of
from treeadapt.selection.answers import IN_AN_OPTIMIZER, Answers, require_agreement
from treeadapt.selection.leaves import Known, Leaves, signature
from treeadapt.text.names import plural, shorten
from treeadapt.trees.arrays import is_array
from treeadapt.trees.views import TreeView, view_tree

W = TypeVar("W", "WholeTree", None)


class Question:
    """What can be asked about every leaf of a tree: its patterns and further needs.

    Attributes:
        needs: facts beyond patterns that an answer reads: leaf, classes, path.
        stacks: whose layers are leaves of their own to it.
        gives: what it makes of a tree, for messages.
        for_users: its names that are not for the rooms of this library alone.
    """

    for_users: ClassVar[frozenset[str]] = frozenset()
    needs: frozenset[str] = frozenset()
    stacks: Stacks = NO_STACKS
    gives = "A mask"

    def __dir__(self) -> list[str]:
        names = map(str, super().__dir__())
        return [name for name in names if name[0] == "_" or name in self.for_users]

    def ask(self, tree: Any) -> Any:
        """Return a tree of answers, as Optax calls for them.

        Classes and siblings are those of the whole tree in force, if ``tree`` is a view
        of it; shapes and dtypes are those of ``tree``.

        Raises:
            SelectorError: ``tree`` is a number: a schedule is called so.
        """
        refuse_number(self, tree)
        view = view_tree(tree)
        whole = whole_of(view)
        decided = self.of_view(view) if whole is None else whole.of_leaves(view, self)
        answers = require_agreement(decided, self.gives, cure=IN_AN_OPTIMIZER)
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

    def needs_params(self, gradients: TreeView, *, of_leaves: bool) -> bool:
        """Return whether it asks for what gradients cannot answer.

        Args:
            gradients: the caller's.
            of_leaves: leaves that are not gradients are asked about, as they are.
        """
        return self.needs_tree or not (of_leaves or self.needs <= {"path"})

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

    def needs_params(self, gradients: TreeView, *, of_leaves: bool) -> bool:
        """Return that nothing more is asked for."""
        return False


class _Round(NamedTuple):
    """What was decided on a whole tree; for some keys only, where it has their leaves.

    Attributes:
        view: the tree.
        answers: what was decided.
        keys: of layers in ``WholeTree.shown`` whose leaves the tree has.
    """

    view: TreeView
    answers: Answers
    keys: frozenset[str]


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
        shown: leaves that smaller views have for the layers in ``regions``, by key,
            where their shape or dtype is not that of the whole array.
        gradients: of the params, where an update is made. What Optax shows to masks
            then are updates, whose dtype may not be that of their params.
    """

    view: TreeView
    strict: bool
    is_params: bool
    regions: Mapping[str, Region] = dataclasses.field(default_factory=dict)
    layers: TreeView | None = None
    shown: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gradients: TreeView | None = None
    _answers: dict[int, tuple[Any, list[_Round]]] = dataclasses.field(
        default_factory=dict, init=False
    )

    def holds(self, view: TreeView) -> bool:
        """Return whether ``view`` may be one of the whole tree.

        Every leaf has its path in it, and it is made of dicts: one of other classes has
        its own, and is a tree by itself.
        """
        return view.plan.is_dicts and all(
            path in self._paths or path in self.regions for path in view.plan.paths
        )

    def of_leaves(self, view: TreeView, asked: Question) -> list[Any]:
        """Answer for all leaves of a view, with the shapes and dtypes they have there.

        Leaves of the dtype of the updates are taken for updates, which have the dtype
        of their params to whoever asks.
        """
        whole = self
        if "leaf" in asked.needs:
            leaves, dtypes = dict(view.items()), self._dtypes
            for path in leaves.keys() & dtypes.keys():
                leaf, (dtype, of_param) = leaves[path], dtypes[path]
                if is_array(leaf) and leaf.dtype == dtype:
                    leaves[path] = jax.ShapeDtypeStruct(leaf.shape, of_param)
            whole = self.showing(leaves)
        return whole.answers(view.plan.paths, asked, of_leaves=whole is not self)

    @functools.cached_property
    def _dtypes(self) -> dict[str, tuple[Any, Any]]:
        """The dtypes of an update and of its param, by path, where they differ."""
        dtypes = {}
        updates = {} if self.gradients is None else dict(self.gradients.items())
        for path in (*self._by_path, *self.regions):
            stored = self.stored_path(path)
            both: list[Any] = [updates.get(stored), self._by_path[stored]]
            if all(map(is_array, both)) and both[0].dtype != both[1].dtype:
                dtypes[path] = both[0].dtype, both[1].dtype
        return dtypes

    def showing(self, leaves: Mapping[str, Any]) -> WholeTree:
        """Return the whole tree with the leaves of a view in the places of its own.

        It is this one if all of them have the shape and dtype that it knows.
        """
        shown = {
            path: leaf
            for path, leaf in leaves.items()
            if signature(leaf) != signature(self._leaf(path))
        }
        if not shown:
            return self
        field = "view" if self.layers is None else "layers"
        arrays = {path: x for path, x in shown.items() if path not in self.regions}
        regions = {path: x for path, x in shown.items() if path in self.regions}
        changed: dict[str, Any] = {field: _with_leaves(self._shapes, arrays)}
        return dataclasses.replace(self, shown={**self.shown, **regions}, **changed)

    def answers(
        self, paths: Sequence[str], asked: Any, *, of_leaves: bool = False
    ) -> list[Any]:
        """Decide on the whole tree, once, and answer for some of its paths.

        Args:
            paths: paths of the whole tree, or names of some layers of its arrays.
            asked: a ``Question``; known by identity.
            of_leaves: as for ``Question.needs_params``.

        Returns:
            One answer a path; ``Split`` where its layers have different ones.

        Raises:
            TransformError: only gradients are known, and they cannot answer.
        """
        if id(asked) not in self._answers:
            if not self.is_params and asked.needs_params(
                self.view, of_leaves=of_leaves
            ):
                raise TransformError(
                    f"{shorten(repr(asked))} asks for more than paths (classes, "
                    "shapes, dtypes or siblings), and gradients may differ from the "
                    "params in these. Pass the params too: "
                    "update(updates, state, params)."
                )
            rounds = [*self._decided(asked)]
            self._answers[id(asked)] = asked, rounds  # so that the id stays its own
        _, (first, *others) = self._answers[id(asked)]
        values = first.answers.of(first.view, paths, self.regions)
        for view, answers, keys in others:
            some = [place for place, path in enumerate(paths) if path in keys]
            of_keys = answers.of(view, [paths[place] for place in some], self.regions)
            for place, value in zip(some, of_keys, strict=True):
                values[place] = value
        if self.layers is None:
            return values
        who = "What runs inside per_layer"
        return require_agreement(values, who, cure=IN_AN_OPTIMIZER)

    def has_shapes_of(self, view: TreeView) -> bool:
        """Return whether the leaves of a view have the shapes that are known."""
        return all(
            getattr(leaf, "shape", None) == getattr(self._leaf(path), "shape", None)
            for path, leaf in view.items()
            if path not in self.regions  # the layers that this library cut out
        )

    def _decided(self, asked: Question) -> Iterator[_Round]:
        """Yield what is decided on the whole tree, and on it with leaves of ``shown``.

        Of several regions of one array, each is decided in a round of its own.
        """
        view = self.view if asked.stacks else self._shapes
        yield _Round(view, asked.decide(view, reports=self.strict), frozenset())
        # With stacks, layers are asked about, whose shape a region does not change.
        left = [] if asked.stacks or "leaf" not in asked.needs else [*self.shown]
        while left:
            keys = {self.stored_path(path): path for path in left}
            leaves = {stored: self.shown[path] for stored, path in keys.items()}
            some = _with_leaves(view, leaves)
            answers = asked.decide(some, reports=False)
            yield _Round(some, answers, frozenset(keys.values()))
            left = [path for path in left if path not in keys.values()]

    def _leaf(self, path: str) -> Any:
        """Return the leaf that a smaller view has at a path, for all that is known."""
        return self.shown.get(path, self._by_path[self.stored_path(path)])

    @property
    def _shapes(self) -> TreeView:
        """The tree with the leaves that smaller views have."""
        return self.layers or self.view

    @functools.cached_property
    def _by_path(self) -> dict[str, Any]:
        return self._shapes.flat()

    def stored_path(self, path: str) -> str:
        """Return the path in the whole tree of the array that a view shows."""
        return self.regions[path].path if path in self.regions else path

    @functools.cached_property
    def _paths(self) -> frozenset[str]:
        return frozenset(self.view.plan.paths)


def whole_tree(
    tree: Any,
    *,
    strict: bool = False,
    is_params: bool = True,
    gradients: TreeView | None = None,
) -> contextlib.AbstractContextManager[WholeTree]:
    """Let selectors and rules called on smaller views decide on the tree behind them.

    Inside the block a selector, rules, or whatever else asks ``whole_of``, called on a
    tree whose paths all belong to ``tree``, answers as on ``tree`` itself: classes
    and sibling counts are those of the caller's own nodes.

    Args:
        tree: the caller's whole tree, or its ``TreeView``. Within another block whose
            tree holds all its paths, that larger tree stays in force, with the leaves
            of this one.
        strict: report patterns that match nothing, as on a full tree.
        is_params: ``tree`` holds the params, not only gradients of them.
        gradients: of the params, if there are any.

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
        whole = outer.showing(dict(view.items()))
        if not is_params:
            # Gradients with the shapes of the params that are known are of these.
            alike = whole is outer or outer.has_shapes_of(view)
            whole = outer if alike else dataclasses.replace(whole, is_params=False)
    return in_force(dataclasses.replace(whole, strict=strict, gradients=gradients))


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


def _with_leaves(view: TreeView, leaves: Mapping[str, Any]) -> TreeView:
    """Return a tree with other leaves at some paths."""
    if not leaves:
        return view
    others = [leaves.get(path, leaf) for path, leaf in view.items()]
    return TreeView(others, view.plan, view.structure, view.rebuild(others))


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
