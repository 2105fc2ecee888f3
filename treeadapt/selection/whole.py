"""The whole tree behind the smaller views that Optax shows.

Optax calls masks and labels on gradients, filtered trees and flat dicts, which have
lost the classes and siblings by which a selector decides. A ``WholeTree`` decides once,
on the caller's tree, and answers by path. Transformations of this library are handed
it; masks that Optax itself calls find it with ``whole_of``. ``look_up`` reads the
answers of what was bound to a tree.
Decides nothing itself (see ``selectors`` and ``rules``).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from treeadapt.arrays import is_array
from treeadapt.convert import describe
from treeadapt.errors import SelectorError, TransformError
from treeadapt.layers.region import Region
from treeadapt.layers.stacks import (
    IN_AN_OPTIMIZER,
    PerLayer,
    require_agreement,
)
from treeadapt.names import fold, listing, paths_text, plural, shorten
from treeadapt.trees.views import TreeView, view_tree

T = TypeVar("T")
W = TypeVar("W", "WholeTree", None)


def look_up(answers: Mapping[str, T], flat: Mapping[str, Any], *, static: T) -> list[T]:
    """Return what was decided for every leaf of a smaller view.

    Args:
        answers: what was decided, by path.
        flat: the leaves of the view, by path.
        static: answer for a static leaf that was not decided.

    Returns:
        One answer a leaf, in order.

    Raises:
        SelectorError: nothing was decided for an array leaf, or for another number of
            layers than it has.

    Example:
        >>> look_up({"w": True, "b": False}, {"b": jnp.ones(2)}, static=False)
        [False]
    """
    new = [path for path in flat if path not in answers and is_array(flat[path])]
    if new:
        raise no_leaf(new)
    found = [answers.get(path, static) for path in flat]
    for answer, (path, leaf) in zip(found, flat.items(), strict=True):
        if isinstance(answer, PerLayer) and is_array(leaf):
            shape = dict(enumerate(leaf.shape))
            sizes = {each.axis: len(each.numbers) for each in answer.region.along}
            other = [size for axis, size in sizes.items() if shape.get(axis) != size]
            if other:
                raise SelectorError(
                    f"Bound to a tree that has {plural(other[0], 'layer')} in "
                    f"{listing([path])}, which is {describe(leaf)} here. Bind to the "
                    "tree as it is now: .bind(tree)."
                )
    return found


def no_leaf(paths: Iterable[str]) -> SelectorError:
    """Return the error for array leaves about which nothing was decided."""
    paths = list(paths)
    bare = f" {paths_text(paths)}" if paths == [""] else ""
    return SelectorError(
        f"Bound to a tree that has no leaf at {listing(fold(paths))}.{bare} Bind to "
        "the tree as it is now: .bind(tree)."
    )


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
    _answers: dict[int, Any] = dataclasses.field(default_factory=dict, init=False)

    def holds(self, view: TreeView) -> bool:
        """Return whether every leaf of ``view`` has its path in the whole tree."""
        return all(
            path in self._paths or path in self.regions for path in view.plan.paths
        )

    def answers(self, paths: Iterable[str], asked: Any) -> list[Any]:
        """Decide on the whole tree, once, and answer for some of its paths.

        Args:
            paths: paths of the whole tree, or names of some layers of its arrays.
            asked: selector, rules or the like, with ``decide(view, reports=)`` and
                ``needs_params(gradients)``; known by identity.

        Returns:
            One answer a path; ``PerLayer`` where its layers have different ones.

        Raises:
            TransformError: only gradients are known, and they cannot answer.
        """
        known = self._answers.get(id(asked))
        if known is None:
            if not self.is_params and asked.needs_params(self.view):
                raise TransformError(
                    f"{shorten(repr(asked))} asks for more than paths (classes, "
                    "shapes, dtypes or siblings), and gradients may differ from the "
                    "params in these. Pass the params too: "
                    "update(updates, state, params)."
                )
            view = self.view if asked.stacks else self.layers or self.view
            found = asked.decide(view, reports=self.strict)
            known = asked, dict(zip(self.view.plan.paths, found, strict=True))
            self._answers[id(asked)] = known  # holds ``asked``: its id stays its own
        of_part = functools.partial(self.part, known[1])
        parts = list(map(of_part if self.regions else known[1].__getitem__, paths))
        if self.layers is None:
            return parts
        who = "What runs inside per_layer"
        return require_agreement(parts, who, cure=IN_AN_OPTIMIZER)

    def with_regions(self, regions: Mapping[str, Region]) -> WholeTree:
        """Return the tree with more layers that smaller views hold, by key."""
        if not regions:
            return self
        return dataclasses.replace(self, regions={**self.regions, **regions})

    def stored_path(self, path: str) -> str:
        """Return the path in the whole tree of the array that a view shows."""
        return self.regions[path].path if path in self.regions else path

    def part(self, known: Mapping[str, Any], path: str) -> Any:
        """Return the answer for what a view shows at a path.

        Args:
            known: answers by path in the whole tree.
            path: in the view; for some layers of an array, ``PerLayer`` is of these.
        """
        if path not in self.regions:
            return known[path]
        region = self.regions[path]
        answer = known[region.path]
        return answer.take(region) if isinstance(answer, PerLayer) else answer

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
