"""Functions of a tree that a transformation holds and that nobody lifted.

Inside ``adapt`` a function that gives masks, labels, dimension numbers, updates or
measures is shown the flat dict. One that goes by shapes decides as it would on the
caller's tree; one that looks at keys, containers or classes may not, and decays or
freezes what it should not. ``warn_of_unlifted`` asks it about both. Such a function is
found by who holds it, Optax, and not by what it is called. One number for the whole
tree, such as a norm, is not compared. A tree of masks or labels in the model's own
shape makes JAX fail, which ``unlifted_trees`` explains; a transformation that tests for
classes of the model finds none, of which ``warn_of_unlifted`` warns too.
What to do instead is ``lift``, a selector, or ``as_tree=True``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import re
import types
import warnings
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax
import numpy as np
import optax

from treeadapt.errors import TransformError, TreeAdaptError, UnliftedMaskWarning
from treeadapt.selection.rules import BoundRules, Rules
from treeadapt.selection.whole_tree import Question
from treeadapt.text.names import listing, shorten
from treeadapt.transforms.as_tree import OnTree
from treeadapt.transforms.flat import FlatDict
from treeadapt.transforms.lift import Lifted, answers_by_path, is_answer, is_function
from treeadapt.transforms.state_map import above
from treeadapt.trees.arrays import same_value
from treeadapt.trees.views import TreeView, view_tree

# Masks and labels that a transformation of the caller's own holds.
_ASKED = re.compile(r"(^|_)(mask|labels)$")
_MASK = re.compile(r"(^|_)mask$")
# What Optax holds and calls with no tree of the caller's, or as a transformation.
_NOT_ASKED = re.compile(r"^(init|update)(_fns?)?$|factory")
_LIBRARIES = ("optax", "treeadapt", "jax")
_TESTS = frozenset({"isinstance", "issubclass", "type"})  # for a class
_PASSED_ON, _COMPUTED = object(), object()  # answers that are arrays
_NO_ANSWER = object()
_MAX_THINGS = 20_000  # a chain of a thousand transformations; not a data set
_MAX_HELPERS = 200


def warn_of_unlifted(
    tx: Any, whole: TreeView, flat: FlatDict, *, stacklevel: int
) -> None:
    """Warn of each function that decides otherwise on the flat dict.

    Args:
        tx: transformation that was shown ``flat``.
        whole: the caller's tree.
        flat: what is shown of it.
        stacklevel: of the caller's line, as ``warnings.warn`` counts it from here.

    Warns:
        UnliftedMaskWarning: it names the function, and leaves on which it disagrees.
    """
    if whole.plan.is_flat_dict:
        return
    _warn_of_classes(tx, whole, stacklevel=stacklevel + 1)
    things = _everything(tx, into_trees=False)
    for fn in (thing for is_asked, thing in things if is_asked):
        shown, meant = _ask(fn, view_tree(flat), flat), _ask(fn, whole, flat)
        both = shown.keys() & meant.keys()  # none if one of the trees makes it raise
        paths = [p for p in flat if p in both and not _agree(meant[p], shown[p])]
        if not paths:
            continue
        text = (
            f"The function {_name_of(fn)} is shown the flat dict {{path: array}} here, "
            f"and decides otherwise for {listing(paths, limit=4)} than on the tree "
            "itself: it looks at keys or classes. For a mask or labels use a selector, "
            "such as treeadapt.glob('**/kernel'), or treeadapt.lift(function); others "
            "see the tree with as_tree=True. If it is meant for paths, filter this."
        )
        warnings.warn(text, UnliftedMaskWarning, stacklevel=stacklevel + 1)


def refuse_text_masks(tx: Any) -> None:
    """Raise if Optax holds texts as its mask, which are true everywhere.

    Raises:
        TransformError: it names the selector that it may have meant.
    """
    for name, value in _held_by_optax(tx):
        refuse_text_mask(name, value)


def refuse_text_mask(name: str, value: Any) -> None:
    """Raise if an argument is called a mask and has texts or patterns in it.

    Raises:
        TransformError: it names the selector that it may have meant.

    Example:
        >>> refuse_text_mask("mask", {"kernel": True})
    """
    if not _MASK.search(name):
        return
    if isinstance(value, Rules | BoundRules):
        rules = value.rules if isinstance(value, BoundRules) else value
        _refuse_labels(name, [*rules.values, rules.default])
    if type(value) is dict:
        _refuse_labels(name, jax.tree.leaves(value))
        if patterns := [key for key in value if isinstance(key, str) and "*" in key]:
            raise TransformError(
                f"{name}= has the patterns {listing(patterns, limit=4)} as keys, and "
                f"Optax reads no patterns. Write {name}=treeadapt.Rules({{...}}), of "
                "the same dict."
            )
    texts = [value] if isinstance(value, str) else value
    if not (isinstance(texts, list | tuple) and texts):
        return
    if all(isinstance(text, str) for text in texts):
        raise TransformError(
            f"{name}={value!r:.100} is not a mask: Optax reads no patterns and takes a "
            f"text for True, for every leaf. Write {name}={_selector_of(texts)}."
        )


def _selector_of(texts: Sequence[str]) -> str:
    """Write a list of patterns as a selector.

    Example:
        >>> _selector_of(["a", "b", "!c"])
        "(treeadapt.glob('a') | treeadapt.glob('b')) & ~treeadapt.glob('c')"
    """
    chosen = [f"treeadapt.glob({text!r})" for text in texts if text[:1] != "!"]
    gone = [f"~treeadapt.glob({text[1:]!r})" for text in texts if text[:1] == "!"]
    either = " | ".join(chosen)
    whole = f"({either})" if gone and len(chosen) > 1 else either
    return " & ".join(filter(None, [whole, *gone]))


def refuse_labels_as_mask(tx: Any, whole: TreeView, flat: FlatDict) -> None:
    """Raise if a function that Optax holds as its mask gives labels.

    Args:
        tx: transformation that was shown ``flat``.
        whole: the caller's tree.
        flat: what is shown of it.

    Raises:
        TransformError: it names the selector that it may have meant.
    """
    masks = {
        id(mask): (name, mask)  # init and update hold it
        for name, mask in _held_by_optax(tx)
        if _MASK.search(name) and is_function(mask)
    }
    for name, mask in masks.values():
        if isinstance(mask, Lifted) or not isinstance(mask, Question):
            _refuse_labels(name, _ask(mask, whole, flat).values())


def _refuse_labels(name: str, answers: Iterable[Any]) -> None:
    labels = [*dict.fromkeys(each for each in answers if isinstance(each, str))]
    if labels:
        raise TransformError(
            f"{name}= gives the texts {listing(labels, limit=4)}, not True and False: "
            "Optax takes a text for True, for every leaf. For the leaves of one label "
            f"write {name}=rules.where(label), with rules = treeadapt.Rules(...); "
            f"for a pattern, {name}=treeadapt.glob(pattern)."
        )


def _held_by_optax(tx: Any) -> Iterator[tuple[str, Any]]:
    """Yield what functions of Optax hold, by name."""
    for _, thing in _everything(tx):
        if isinstance(thing, types.FunctionType) and _is_of_library(thing):
            yield from _held(thing)


def names_of_asked(tx: Any, codes: Collection[types.CodeType]) -> Iterator[str]:
    """Yield the names of functions that are asked about a tree, of those that ran.

    Args:
        tx: a transformation of Optax, whose functions are looked into.
        codes: what ran, as a traceback shows it.
    """
    for is_asked, thing in _everything(tx, into_trees=False):
        while isinstance(thing, functools.partial):
            thing = thing.func
        if is_asked:
            plain = inspect.unwrap(thing)
            called = plain if hasattr(plain, "__code__") else type(thing).__call__
            if getattr(called, "__code__", None) in codes:
                yield _name_of(thing)


def unlifted_trees(tx: Any, whole: TreeView, flat: FlatDict) -> Iterator[str]:
    """Yield what a transformation holds that is in the shape of the caller's tree.

    Trees of masks or labels (or prefixes of these), and functions that return one
    whatever they are asked about: JAX cannot match them with a flat dict.

    Args:
        tx: transformation that was shown ``flat``.
        whole: the caller's tree.
        flat: what is shown of it.

    Yields:
        A text for each, as messages show it.
    """
    if whole.plan.is_flat_dict:
        return
    for is_asked, thing in _everything(tx, into_trees=False):
        if is_asked:
            shown = _answer_of(thing, view_tree(flat), flat)
            if shown and _is_in_shape_of(shown[0], whole):
                yield f"the function {_name_of(thing)}"
        elif not isinstance(thing, Question) and _is_in_shape_of(thing, whole):
            yield shorten(repr(thing))


def _is_in_shape_of(answers: Any, whole: TreeView) -> bool:
    """Return whether answers fit a tree leaf by leaf, or node by node."""
    if type(answers) is dict and answers.keys() <= {*whole.plan.paths}:
        return False  # of a flat dict
    try:
        if jax.tree_util.all_leaves([answers]):
            return False  # one answer for all leaves
        by_path = answers_by_path(view_tree(answers), whole)
    except (TreeAdaptError, TypeError, ValueError):  # of keys that JAX cannot sort
        return False
    nodes = {node for path in whole.plan.paths for node in (path, *above(path))}
    is_below = bool(by_path) and by_path.keys() <= nodes
    return is_below and all(map(is_answer, by_path.values()))


def _warn_of_classes(tx: Any, whole: TreeView, *, stacklevel: int) -> None:
    """Warn of a function that tests for a class of the nodes of a tree.

    It need not be the caller's: those that it calls in its own package are read too.
    """
    names = {
        base.__name__: cls
        for cls in whole.plan.node_classes
        if not issubclass(cls, Mapping | list | optax.MaskedNode)
        for base in cls.__mro__
        if base.__module__ not in ("builtins", "typing", "abc")
    }
    for is_asked, thing in _everything(tx, into_trees=False):
        if is_asked or not names:
            continue
        for fn, code in _codes(thing):
            tested = names.keys() & code.co_names
            if tested and not _TESTS.isdisjoint(code.co_names):
                name = min(tested)
                is_it = functools.partial(operator.is_, names[name])
                paths = whole.plan.paths_of(is_it)
                text = (
                    f"The transformation calls {fn.__module__}.{_name_of(fn)}, which "
                    f"tests for the class {name}, as nodes of this tree are "
                    f"({listing(paths, limit=4)}). It is shown the flat dict {{path: "
                    "array} here, and finds none. Show it the tree: as_tree=True, in "
                    "adapt, partition and freeze; or filter this warning."
                )
                warnings.warn(text, UnliftedMaskWarning, stacklevel=stacklevel + 1)
                return


def _codes(fn: Any) -> Iterator[tuple[Any, types.CodeType]]:
    """Yield functions and their codes: of one that no library wrote, and its helpers.

    Helpers are functions of the same package that it names.
    """
    if not isinstance(fn, types.FunctionType) or _is_of_library(fn):
        return
    package = _package(fn)
    functions, seen = [fn], {fn}
    while functions and len(seen) < _MAX_HELPERS:
        helper = functions.pop()
        codes = [helper.__code__]
        for code in codes:
            yield helper, code
            codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
            for name in code.co_names:
                other = helper.__globals__.get(name)
                if isinstance(other, types.FunctionType) and other not in seen:
                    seen.add(other)
                    functions += [other] * (_package(other) == package)


def patterns_held(tx: Any) -> Iterator[str]:
    """Yield the patterns of the selectors and rules that a transformation holds.

    Example:
        >>> from treeadapt.selection.selectors import glob
        >>> list(patterns_held(optax.adamw(0.1, mask=glob("**/kernel"))))
        ['**/kernel']
    """
    for _, thing in _everything(tx):
        if isinstance(thing, Question):
            yield from thing.patterns()


def _name_of(fn: Any) -> str:
    """Return what to call a function in a message."""
    return getattr(fn, "__qualname__", type(fn).__name__)


def _everything(tx: Any, *, into_trees: bool = True) -> Iterator[tuple[bool, Any]]:
    """Yield what a transformation holds, and whether it is a function to ask.

    Args:
        tx: the transformation.
        into_trees: look also into what sees the caller's classes, not a flat dict.
    """
    pending: list[tuple[str, bool, Any]] = [("", False, tx)]
    seen: dict[int, Any] = {}  # keeps what it knows by identity
    while pending and len(seen) < _MAX_THINGS:
        name, by_optax, thing = pending.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, OnTree) and not into_trees:
            continue
        is_asked = _is_asked(name, thing, by_optax=by_optax)
        yield is_asked, thing
        if is_asked or isinstance(thing, Question):
            continue
        if isinstance(thing, optax.GradientTransformation):
            by_optax = False  # its own functions are not functions of a tree
        elif isinstance(thing, types.FunctionType | types.MethodType):
            by_optax = _is_of_library(thing)
        elif isinstance(thing, optax.MultiSteps):
            by_optax = True
        held = [(inner or name, by_optax, value) for inner, value in _held(thing)]
        pending += reversed(held)


def _is_asked(name: str, thing: Any, *, by_optax: bool) -> bool:
    if isinstance(thing, type | Question) or not callable(thing):
        return False
    named = _ASKED.search(name) or (by_optax and not _NOT_ASKED.search(name))
    return bool(named) and not _is_of_library(thing) and is_function(thing)


def _is_of_library(thing: Any) -> bool:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return _package(thing) in _LIBRARIES


def _package(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "").partition(".")[0]


def _held(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, a container or a wrapper holds, by name."""
    values: Sequence[Any] = ()
    if isinstance(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # not assigned yet
                yield name, cell.cell_contents
        values = thing.__defaults__ or ()
    elif isinstance(thing, types.MethodType):
        values = (thing.__func__, thing.__self__)
    elif isinstance(thing, functools.partial):
        values = (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, inspect.BoundArguments):
        values = (thing.arguments,)
    elif isinstance(thing, optax.MultiSteps):
        values = (vars(thing),)
    elif isinstance(thing, dict):  # another mapping may read a file for each item
        for key, value in dict.items(thing):
            yield key if isinstance(key, str) else "", value
    elif isinstance(thing, tuple | list):
        values = thing
    yield from (("", value) for value in values)


def _ask(fn: Callable[..., Any], view: TreeView, flat: FlatDict) -> dict[str, Any]:
    """Trace a function on one tree: nothing is computed, and no array is read.

    Returns:
        The answer for each leaf by path: a mask or label, whether an array is one that
        the function was shown, or ``_NO_ANSWER``. Empty if it raises.
    """
    results = _answer_of(fn, view, flat)
    with contextlib.suppress(Exception):
        answers = Lifted(lambda _: results[0]).decide(view, reports=False).by_path
        return {path: answers.get(path, _NO_ANSWER) for path in view.plan.paths}
    return {}


def _answer_of(fn: Callable[..., Any], view: TreeView, flat: FlatDict) -> list[Any]:
    """Trace a function on one tree: what it returns, or nothing if it raises."""
    kept = [path in flat for path in view.plan.paths]
    results: list[Any] = []

    def run(arrays: list[Any], count: Any) -> None:
        rest = iter(arrays)
        tree = view.rebuild([next(rest) if keep else None for keep in kept])
        shown = {*map(id, arrays)}

        def answer(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array | np.ndarray):
                return leaf
            return _PASSED_ON if id(leaf) in shown else _COMPUTED

        results.append(jax.tree.map(answer, fn(*_arguments(fn, tree, count))))

    # It is asked what nobody else would ask it: whatever it raises, it has no answer.
    with contextlib.suppress(Exception):
        jax.eval_shape(run, list(itertools.compress(view.leaves, kept)), np.int32(0))
    return results


def _arguments(fn: Callable[..., Any], tree: Any, count: Any) -> tuple[Any, ...]:
    """Return what Optax gives such a function: updates, a step, params."""
    signature = inspect.signature(fn)
    for arguments in ((tree,), (tree, tree), (tree, count, tree)):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            return arguments
    return ()


def _agree(one: Any, two: Any) -> bool:
    if one is _NO_ANSWER or two is _NO_ANSWER:
        # No dimension numbers are an answer; no mask and no label are none.
        return not any(isinstance(answer, tuple) for answer in (one, two))
    return same_value(one, two)
