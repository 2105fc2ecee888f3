"""Mask and label functions that a transformation holds and that nobody lifted.

Inside ``adapt`` such a function is shown the flat dict. One that goes by shapes decides
as it would on the caller's tree; one that looks at keys, containers or classes may not,
and decays or freezes what it should not. ``warn_of_unlifted`` asks it about both.
What to do instead is ``lift``, or a selector.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optax

from treeadapt.errors import TreeAdaptError, UnliftedMaskWarning, listing
from treeadapt.matches import same_value
from treeadapt.plans import TreeView, view_tree
from treeadapt.rules import BoundRules, Rules
from treeadapt.selectors import Selector
from treeadapt.transforms.flat import Flat
from treeadapt.transforms.lift import (
    NO_ANSWER,
    Lifted,
    arrays_of,
    is_function,
)

# What Optax calls them: in the functions of ``masked`` and of ``partition``, and among
# the arguments that ``inject_hyperparams`` keeps.
_ASKED = re.compile(r"(^|_)(mask|labels)$")
_SEES_THE_TREE = (Selector, Rules, BoundRules, Lifted)
_MAX_THINGS = 20_000  # a chain of a thousand transformations; not a data set


def warn_of_unlifted(tx: Any, whole: TreeView, flat: Flat, *, stacklevel: int) -> None:
    """Warn of each mask or label function that decides otherwise on the flat dict.

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
    for fn in functions_asked(tx):
        paths = _disagreeing(fn, whole, flat)
        if paths:
            name = getattr(fn, "__qualname__", type(fn).__name__)
            warnings.warn(
                f"The mask or label function {name} is shown the flat dict {{path: "
                f"array}} here, and decides otherwise for {listing(paths, limit=4)} "
                "than on the tree itself: it looks at keys or classes. Use a selector, "
                "such as treeadapt.glob('**/kernel'), or wrap it: treeadapt.lift("
                "function). One that is meant for paths says so: treeadapt.lift(lambda "
                "tree: function(treeadapt.to_flat_dict(tree))).",
                UnliftedMaskWarning,
                stacklevel=stacklevel + 1,
            )


def functions_asked(tx: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield the mask and label functions in a transformation that see no whole tree.

    Args:
        tx: a transformation of Optax, whose functions are looked into.

    Example:
        >>> def mask(params):
        ...     return {"w": True}
        >>> [fn.__name__ for fn in functions_asked(optax.adamw(0.1, mask=mask))]
        ['mask']
    """
    for name, thing in _everything(tx):
        is_asked = _ASKED.search(name) and not isinstance(thing, _SEES_THE_TREE)
        if is_asked and is_function(thing):
            yield thing


def patterns_held(tx: Any) -> Iterator[str]:
    """Yield the patterns of the selectors and rules that a transformation holds.

    Example:
        >>> from treeadapt.selectors import glob
        >>> list(patterns_held(optax.adamw(0.1, mask=glob("**/kernel"))))
        ['**/kernel']
    """
    for _, thing in _everything(tx):
        if isinstance(thing, Selector):
            yield from thing.patterns()
        elif isinstance(thing, Rules | BoundRules):
            table = thing.rules if isinstance(thing, BoundRules) else thing
            for where in table.selectors:
                yield from where.patterns()


def _everything(tx: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a transformation holds, by name, itself first."""
    pending: list[tuple[str, Any]] = [("", tx)]
    seen: dict[int, Any] = {}  # keeps what it knows by identity
    while pending and len(seen) < _MAX_THINGS:
        name, thing = pending.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        yield name, thing
        if not isinstance(thing, _SEES_THE_TREE):
            pending += reversed(list(_held(thing)))


def _held(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, a container or a wrapper holds, by name."""
    if isinstance(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # not assigned yet
                yield name, cell.cell_contents
    elif isinstance(thing, types.MethodType):
        yield "", thing.__func__
        yield "", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from (("", thing.func), ("", thing.args), ("", thing.keywords))
    elif isinstance(thing, inspect.BoundArguments):
        yield "", thing.arguments
    elif isinstance(thing, optax.MultiSteps):
        yield "", vars(thing)
    elif isinstance(thing, dict):  # another mapping may read a file for each item
        for key, value in dict.items(thing):
            yield key if isinstance(key, str) else "", value
    elif isinstance(thing, tuple | list):
        yield from (("", value) for value in thing)


def _disagreeing(fn: Callable[[Any], Any], whole: TreeView, flat: Flat) -> list[str]:
    """Return the paths of which a function says other things on the two trees."""
    shown, known = (_decided(fn, view) for view in (view_tree(flat), whole))
    return [path for path in flat if not _agree(known[path], shown[path])]


def _decided(fn: Callable[[Any], Any], view: TreeView) -> dict[str, Any]:
    found = [NO_ANSWER] * len(view.leaves)
    answers = _answers(fn, view)
    with contextlib.suppress(TreeAdaptError):  # these are no masks and no labels
        found = Lifted(lambda _: answers).decide(view)
    return dict(zip(view.plan.paths, found, strict=True))


def _answers(fn: Callable[[Any], Any], view: TreeView) -> Any:
    # It is asked what nobody else would ask it: whatever it raises, it has no answer.
    with contextlib.suppress(Exception):
        return fn(arrays_of(view))
    return NO_ANSWER


def _agree(one: Any, two: Any) -> bool:
    return one is NO_ANSWER or two is NO_ANSWER or same_value(one, two)
