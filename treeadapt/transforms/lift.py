"""``lift``: let any mask or label function decide on the caller's whole tree.

Inside ``adapt``, ``partition`` and ``freeze`` transformations are shown flat dicts,
which have lost the classes and the containers that a path-reading mask function looks
at. Selectors and rules look through by themselves; ``lift`` does it for the rest.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from treeadapt.errors import SelectorError, UnmatchedPathError, UnusedRuleError
from treeadapt.selection.answers import Answers
from treeadapt.selection.decision import STATIC
from treeadapt.selection.rules import rules_of_function
from treeadapt.selection.whole_tree import Question
from treeadapt.text.names import MAX_LISTED, listing, paths_text, plural
from treeadapt.transforms.state_map import above
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe
from treeadapt.trees.views import Plan, TreeView, view_tree

_OF_PATHS = [("path",), ("name",), ("key",)]  # arguments


class Lifted(Question):
    """A mask or label function of the caller's tree, answering on smaller views.

    Attributes:
        asked: a function of a tree, or a tree of masks or labels (or a prefix of one).
    """

    def __init__(self, asked: Any):
        self.asked = asked

    def __repr__(self) -> str:
        return f"lift({self.asked!r})"

    def __call__(self, tree: Any) -> Any:
        """Return masks or labels with the treedef of ``tree``."""
        return self.ask(tree)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """A function may look at shapes and dtypes; a tree of answers does not."""
        return frozenset({"leaf"} if is_function(self.asked) else ())

    def needs_params(self, gradients: TreeView, *, of_leaves: bool) -> bool:
        """Return whether a function may look for classes that gradients may lack."""
        # Optax 0.2.8 calls label functions on gradients in ``update``.
        return is_function(self.asked) and not gradients.plan.is_plain

    def decide(
        self, view: TreeView, *, reports: bool, is_part: bool = False
    ) -> Answers:
        """Return the answer for each leaf that has one; static leaves need none."""
        asked = self.asked
        answers = view_tree(_called(asked, view) if is_function(asked) else asked)
        if answers.plan.root is None:  # one value for the whole tree
            _require_function_of_trees(asked)
            return Answers(view.plan.paths, [answers.leaves[0]] * len(view.leaves))
        by_path = answers_by_path(answers, view)
        places = [_nearest(by_path, path) for path in view.plan.paths]
        if reports and not view.plan.holes:
            _require_used(by_path, places, view.plan)
        pairs = zip(view.plan.paths, places, strict=True)
        decided = {path: by_path[place] for path, place in pairs if place is not None}
        values = [*decided.values()]
        is_mask = all(isinstance(value, bool) for value in values)
        return Answers([*decided], values, False if is_mask else STATIC, _no_answer)


def lift(fn_or_tree: Any) -> Lifted:
    """Return a mask or label function that decides on the caller's whole tree.

    Without it, a function that reads paths or classes sees the flat dict inside
    ``adapt``, and decays what it should not.

    Args:
        fn_or_tree: a function from a tree to a tree of bools or labels, or such a tree.
            Containers may differ from those of the params, and a value may be for
            a whole subtree: answers are matched by label path. Functions and other
            static leaves need no answer, and a function finds None in their places. A
            NamedTuple in the place of a leaf, as Muon's dimension numbers, is one
            answer, and so is None next to it.

    Returns:
        Callable for wherever Optax takes a mask or labels.

    Raises:
        UnmatchedPathError: (when called) a leaf has no answer.
        UnusedRuleError: (when called) an answer is for no leaf of the whole tree.
        TransformError: (when called) only gradients are known, whose classes may not be
            those of the params, and a function is to be asked.
        SelectorError: ``fn_or_tree`` is neither: one number, params or a
            transformation, say. Or, when called, it is called on a number, as a
            schedule would be.

    Example:
        >>> mask = lift({"encoder": True, "head": False})
        >>> mask({"encoder/w": jnp.ones(2), "head/w": jnp.ones(2)})
        {'encoder/w': True, 'head/w': False}
    """
    if isinstance(fn_or_tree, Lifted):
        return fn_or_tree
    if not is_function(fn_or_tree):
        _require_answers(fn_or_tree)
    return Lifted(fn_or_tree)


def is_function(thing: Any) -> bool:
    """Tell a mask function from a tree of masks, also where the tree is callable."""
    if not callable(thing):
        return False
    if isinstance(thing, jax.tree_util.Partial):
        return True
    # No mask and no label is an array of numbers: a module that holds one, or nothing,
    # is called for what it returns. Optax 0.2.8 calls every tree of labels that has a
    # ``__call__`` (equinox#193, optax#1007), and no mask whose leaves are not all
    # callable, a function with a setting in it too (since 0.2.4, optax#913).
    leaves = jax.tree.leaves(thing)
    return all(callable(leaf) or _is_number_array(leaf) for leaf in leaves)


def _called(function: Any, view: TreeView) -> Any:
    """Return what a function of a tree says, and explain what it is called with."""
    try:
        return function(arrays_of(view))
    except (AttributeError, TypeError) as error:
        error.add_note(
            "The function is called once, with the whole tree. If it is one of a path, "
            f"make rules of it: {rules_of_function(function)}."
        )
        raise


def _require_function_of_trees(asked: Any) -> None:
    """Raise if what gives one answer for a whole tree was written for one path.

    Raises:
        SelectorError: it was, by the name of its argument.
    """
    code = getattr(asked, "__code__", None)
    if code is not None and code.co_varnames[: code.co_argcount] in _OF_PATHS:
        raise SelectorError(
            f"A function of {code.co_varnames[0]!r} was called once, with the whole "
            "tree, and gave one answer for all leaves. If it is one of a path, make "
            f"rules of it: {rules_of_function(asked)}."
        )


def _require_answers(tree: Any) -> None:
    """Raise unless a tree may be one of masks or labels.

    A mask of a raw model has the model's functions in it; something must be an answer.
    """
    is_one = jax.tree_util.all_leaves([tree])
    keyed = jax.tree_util.tree_leaves_with_path(tree)
    if keyed and not any(is_answer(leaf, is_one=is_one) for _, leaf in keyed):
        keys, leaf = keyed[0]
        where = f" at {jax.tree_util.keystr(keys)}" if keys else ""
        raise SelectorError(
            "lift takes a function of a tree, or a tree of bools or labels, such as "
            f'{{"encoder": False, "head": True}}; got {describe(leaf)}{where}.'
        )


def is_answer(leaf: Any, *, is_one: bool = False) -> bool:
    """Return whether a leaf may be a mask or label; a number may, but not alone."""
    is_number = isinstance(leaf, numbers.Number) and not isinstance(leaf, bool)
    return not (callable(leaf) or _is_number_array(leaf) or (is_one and is_number))


def _is_number_array(leaf: Any) -> bool:
    return is_array(leaf) and leaf.dtype != bool


def arrays_of(view: TreeView) -> Any:
    """Return the tree with None for its static leaves."""
    if all(map(is_array, view.leaves)):
        return view.tree
    return view.rebuild([leaf if is_array(leaf) else None for leaf in view.leaves])


def answers_by_path(answers: TreeView, view: TreeView) -> dict[str, Any]:
    """Return the answers by path; a NamedTuple in the place of a leaf is one answer.

    So are Muon's dimension numbers, and None next to them: "not this leaf".
    """
    ends = {
        cls
        for path in view.plan.paths
        for cls in answers.plan.classes(path)
        if issubclass(cls, tuple) and hasattr(cls, "_fields")
    }
    if not ends:
        return answers.flat()
    treedef: Any
    leaves, treedef = jax.tree.flatten(
        answers.tree, is_leaf=lambda node: node is None or type(node) in ends
    )
    places = view_tree(treedef.unflatten(range(len(leaves))))
    return {path: leaves[place] for path, place in places.items()}


def _nearest(by_path: Mapping[str, Any], path: str) -> str | None:
    """Return the path of the answer for a leaf: its own, or that of a node above."""
    return next((node for node in (path, *above(path)) if node in by_path), None)


def _require_used(
    by_path: Mapping[str, Any], places: Sequence[str | None], plan: Plan
) -> None:
    """Raise for answers that are for no leaf, no None, and no second path of a leaf."""
    used = {*places, *(_nearest(by_path, path) for path in plan.nones)}
    idle = [
        path
        for path, answer in by_path.items()
        if path not in used
        and answer is not None
        and not any(f"{path}/".startswith(f"{second}/") for second in plan.ties)
        and not _is_of_static(path, answer, by_path)
    ]
    if idle:
        raise UnusedRuleError(
            f"{plural(len(idle), 'mask or label')} without a leaf in the params: "
            f"{listing(idle)}. The paths must be those of treeadapt.tree_paths. "
            f"{paths_text(plan.paths)}",
            paths=idle,
        )


def _is_of_static(path: str, answer: Any, by_path: Mapping[str, Any]) -> bool:
    """Return whether an answer may be that of a static leaf, which params lack.

    A mask or labels of a raw model have it. An answer for a node above makes it one of
    an array, which would get that answer if this one were misspelt.
    """
    is_of_static = answer is False or answer is STATIC
    return is_of_static and by_path.keys().isdisjoint(above(path))


def _no_answer(paths: Sequence[str], num_asked: int) -> UnmatchedPathError:
    limit = MAX_LISTED if num_asked <= MAX_LISTED else 8
    bare = f" {paths_text(paths)}" if list(paths) == [""] else ""
    return UnmatchedPathError(
        f"{plural(len(paths), 'leaf')} of the params without a mask or label: "
        f"{listing(paths, limit=limit)}.{bare} Give every leaf, or a node "
        "above it, a value that is not None.",
        paths=paths,
    )
