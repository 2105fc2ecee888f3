"""``jax.tree.flatten`` with typed errors instead of crashes.

A tree that is nested too deep, contains itself, or has keys that cannot be sorted
makes JAX fail without saying where, or overflow the C stack; here each gives an error
with the path. Walks a tree only to explain a failure, or where a raised recursion limit
has switched JAX's own check off. Never changes that limit.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from treeadapt.errors import (
    AdapterError,
    PathError,
    TreeAdaptError,
    TreeCycleError,
    TreeDepthError,
    explaining,
)
from treeadapt.trees import _jax
from treeadapt.trees.adapters.adapter import BOX
from treeadapt.trees.adapters.registry import current_registry
from treeadapt.trees.paths import SEPARATOR, segment

#: Deepest tree that any part of the library walks. JAX 0.10 flattens recursively in C++
#: and checks only Python's recursion limit; where that is higher, a deeper tree could
#: overflow the C stack, so its depth is measured first (jax#15711).
MAX_DEPTH = 5_000

_SPARE = 20  # levels of recursion that the code of a node may need
_EVERY = 16  # nodes between two looks at how many levels are left


def _nested(levels: int) -> tuple[Any, ...]:
    node: tuple[Any, ...] = ()
    for _ in range(levels):
        node = (node,)
    return node


# To compare these takes as many levels of recursion.
_NESTED, _AS_DEEP = _nested(_SPARE + _EVERY), _nested(_SPARE + _EVERY)
_MAX_KINDS = 1_000
_SHOWN = 20  # segments of a deep path in a message


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Call ``jax.tree.flatten``, turning its crashes into errors that name the path.

    Raises:
        TreeDepthError: the tree is nested deeper than JAX can flatten.
        TreeCycleError: the tree contains itself.
        PathError: the keys of a node cannot be sorted.
    """
    try:
        is_raised = sys.getrecursionlimit() > MAX_DEPTH
        if is_raised and (error := _problem(tree, least=MAX_DEPTH)):
            raise error
        registry = current_registry()
        kind = registry.kinds.get(type(tree)) or registry.find(tree)
        if kind.adapter and kind.adapter.shared:  # it may well lead back to itself
            return _flatten_with_care(tree)
        kinds = registry.memo.setdefault("flattened", set())
        alike = _kind(tree)
        if alike in kinds:
            return _jax.flatten(tree)
        flat = _flatten_with_care(tree)
        if len(kinds) >= _MAX_KINDS:
            kinds.clear()
        kinds.add(alike)
        return flat
    except (SystemError, RecursionError, ValueError, TypeError) as error:
        raise _explained(tree, error) from None


def _kind(tree: Any) -> tuple[Any, ...]:
    """Return what the next tree that a program converts has in common with this one."""
    if type(tree) is dict:
        first = next(iter(tree), None)
        return dict, len(tree), first if type(first) is str else None
    if type(tree) in (list, tuple):
        return type(tree), len(tree)
    return (id(type(tree)),)  # a number keeps no class alive


def _flatten_with_care(tree: Any) -> tuple[list[Any], Any]:
    """Flatten a tree, but stop before JAX fails.

    Where code that JAX runs on the way (the order of keys, a class of the user's) finds
    no level of recursion left, JAX 0.10 keeps all the levels that it was in, for good:
    no later call in that thread would work. Asking on the way takes a while, so it is
    done for the first tree of a kind, and for graphs. No node is more than one level
    below the one that is visited before it.
    """
    nodes = itertools.count()
    is_at_the_edge = False

    def stop(_: Any) -> bool:
        nonlocal is_at_the_edge
        if not is_at_the_edge and next(nodes) % _EVERY == 0:
            try:
                is_at_the_edge = _NESTED != _AS_DEEP
            except RecursionError:
                is_at_the_edge = True
        return is_at_the_edge

    with contextlib.suppress(ValueError):  # the stack is not so deep
        # Since Python 3.12 its own levels are counted apart from those of C
        # (cpython#91079): look whether a frame of Python's is that far up.
        sys._getframe(sys.getrecursionlimit() - _SPARE)
        raise RecursionError
    flat = _jax.flatten(tree, stop)
    if is_at_the_edge:
        raise RecursionError
    return flat


def _explained(tree: Any, error: Exception) -> Exception:
    if isinstance(error, TreeAdaptError):
        return error
    # JAX 0.10 raises a bare SystemError at the limit, and hides the reason of a failed
    # comparison of keys (jax#15358).
    reason = error.__cause__ or error
    is_deep = isinstance(reason, SystemError | RecursionError)
    problem = None
    with explaining(error):
        problem = _problem(tree, least=0 if is_deep else sys.maxsize)
    return problem or error


def depth_error(depth: int, names: Sequence[str | None]) -> TreeDepthError:
    """Return the error for a tree that goes on down ``names``."""
    return TreeDepthError(
        f"The tree is nested at least {depth:,} levels deep (down {_start(names)!r}), "
        "which is deeper than JAX can flatten here. Flatten the container, for example "
        "to a list of layers."
    )


def cycle_error(names: Sequence[str | None], *, opened: str = "") -> TreeCycleError:
    """Return the error for a node at ``names`` that is also above itself.

    Args:
        names: the segments down to it.
        opened: name of its class, if JAX does not know that.
    """
    leaf = f", or make the class a leaf: treeadapt.register({opened}, leaf=True)"
    return TreeCycleError(
        f"The tree contains itself: {_start(names)!r} leads back to a node above it. "
        f"Break the cycle before converting it{leaf if opened else '.'}"
    )


def _name(key: Any) -> str | None:
    """Return the segment of a key, None for a box: for messages, so it never raises."""
    if key is BOX:
        return None
    try:
        return segment(key)
    except PathError:
        return str(key)


def _start(names: Sequence[str | None]) -> str:
    # A path of thousands of segments is cut before it is joined.
    text = SEPARATOR.join(name for name in names[:_SHOWN] if name is not None)
    return text if len(names) <= _SHOWN and len(text) <= 200 else text[:200] + "..."


def _problem(tree: Any, *, least: int) -> TreeAdaptError | None:
    """Return the error for a tree that JAX cannot flatten; None if it may be able to.

    It has a cycle, keys that cannot be sorted, or at least so many levels. Measures the
    depth as JAX sees it, down to ``MAX_DEPTH``.
    """
    find = current_registry().find
    # Key, id and children of the nodes above, below a frame that holds the root.
    frames: list[tuple[Any, int, Iterator[Any]]] = [("", 0, iter((("", tree),)))]
    above: set[int] = set()
    visited: dict[int, tuple[int, Any]] = {}  # at which depth; keeps ids from reuse
    depth, deepest = 0, list[str | None]()
    while frames:
        for key, child in frames[-1][2]:
            level = len(frames)
            try:
                kind = find(child)
                if kind.adapter is None or kind.opens:
                    continue
                if id(child) in above:
                    return cycle_error(_names(frames, key))
                if level > depth:
                    depth, deepest = level, _names(frames, key)
                if depth >= MAX_DEPTH:
                    return depth_error(depth, deepest)
                if visited.get(id(child), (0, None))[0] >= level:
                    continue
                flat = kind.adapter.open(child)
            except AdapterError:  # the walk reports it
                continue
            except (ValueError, TypeError) as error:
                if _is_of_sorting(error):
                    return _unsortable(child, _names(frames, key))
                continue
            above.add(id(child))
            visited[id(child)] = (level, child)
            frames.append((key, id(child), zip(flat.keys, flat.children, strict=False)))
            break
        else:
            above.discard(frames.pop()[1])
    return depth_error(depth, deepest) if depth >= least else None


def _names(frames: Sequence[tuple[Any, int, Any]], key: Any) -> list[str | None]:
    return [*(_name(at) for at, *_ in frames[2 : _SHOWN + 2]), _name(key)]


def _is_of_sorting(error: Exception) -> bool:
    return "Comparator" in str(error) or "not supported between" in str(error)


def _unsortable(node: Any, names: Sequence[str | None]) -> PathError:
    types = sorted({type(key).__name__ for key in node})
    return PathError(
        f"The {type(node).__name__} at {_start(names)!r} has keys that Python "
        f"cannot sort (of type {', '.join(types)}), so JAX cannot flatten it. Use keys "
        "of one type that has an order."
    )
