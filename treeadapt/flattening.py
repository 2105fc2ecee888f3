"""``jax.tree.flatten`` with typed errors instead of crashes.

A tree that is nested too deep, contains itself, or has keys that cannot be sorted
makes JAX fail without saying where, or overflow the C stack; here each gives an error
with the path. Walks a tree only to explain a failure, or where a raised recursion limit
has switched JAX's own check off.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import jax.tree_util as jtu

from treeadapt.errors import (
    AdapterError,
    PathError,
    TreeAdaptError,
    TreeCycleError,
    TreeDepthError,
)
from treeadapt.paths import SEPARATOR, segment
from treeadapt.registry import BOX, Adapter, Flat, current_registry

#: Deepest tree that any part of the library walks. JAX flattens recursively in C++ and
#: checks only Python's recursion limit; where that is higher, a deeper tree could
#: overflow the C stack, so its depth is measured first.
MAX_DEPTH = 5_000

# From Python 3.12 on, nobody can give back levels of recursion that JAX has lost.
_LOSSES_STAY = sys.version_info >= (3, 12)
# The limit is one for all threads: whoever changes it must be the only one.
_limit_changes = threading.RLock()
_lost = threading.local()  # how many levels JAX has lost, by thread
_SPARE = 100  # levels of recursion that explaining a failure may need
_SHOWN = 20  # segments of a deep path in a message


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Call ``jax.tree.flatten``, turning its crashes into errors that name the path.

    Raises:
        TreeDepthError: the tree is nested deeper than JAX can flatten.
        TreeCycleError: the tree contains itself.
        PathError: the keys of a node cannot be sorted.
    """
    try:
        if (
            sys.getrecursionlimit() > MAX_DEPTH
            and sys.getrecursionlimit() - _levels_lost() > MAX_DEPTH
        ) or (_LOSSES_STAY and _is_graph(tree)):
            _require_flat_enough(tree)
        return _jax_flatten(tree)
    except (SystemError, RecursionError, ValueError, TypeError) as error:
        with _limit_changes:
            sys.setrecursionlimit(sys.getrecursionlimit() + _SPARE)
            raise _explained(tree, error) from None


def _jax_flatten(tree: Any) -> tuple[list[Any], Any]:
    # A frame of its own: the level that it gives back is the one the handler needs.
    return jtu.default_registry.flatten(tree)


def _is_graph(tree: Any) -> bool:
    # A node with an identity, such as an nnx module, may well lead back to itself.
    adapter = current_registry().find(tree).adapter
    return adapter is not None and adapter.shared


def _explained(tree: Any, error: Exception) -> Exception:
    _give_back_levels()
    if isinstance(error, TreeAdaptError):
        return error
    reason = error.__cause__ or error  # JAX hides one behind a failed comparison
    if isinstance(reason, SystemError | RecursionError):
        return _too_deep(tree)
    return _unsortable(tree) or error


def _give_back_levels() -> None:
    """Take back the spare levels of recursion; leave those that JAX has lost.

    When something raises inside its flatten, JAX 0.10 never leaves the levels of
    recursion that it was in, and Python takes them for used from then on. Of a tree
    that is too deep that is all of them: without this, every later call would fail.
    """
    limit, frames = sys.getrecursionlimit(), 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frame, frames = frame.f_back, frames + 1
    known = _levels_lost()  # were given back before
    lost = 0 if _has_room(2 * _SPARE) else limit - frames - known
    if lost <= 3 * _SPARE:
        lost = 0
    _lost.levels = known + lost
    with contextlib.suppress(RecursionError):  # the stack was as good as full before
        sys.setrecursionlimit(limit - _SPARE + lost)


def _levels_lost() -> int:
    return getattr(_lost, "levels", 0)


def _has_room(levels: int) -> bool:
    try:
        return levels == 0 or _has_room(levels - 1)
    except RecursionError:
        return False


def depth_error(depth: int, names: Sequence[str | None]) -> TreeDepthError:
    """Return the error for a tree that goes on down ``names``."""
    return TreeDepthError(
        f"The tree is nested at least {depth:,} levels deep (down {_start(names)!r}), "
        "which is deeper than JAX can flatten here. Flatten the container, for example "
        "to a list of layers."
    )


def cycle_error(names: Sequence[str | None]) -> TreeCycleError:
    """Return the error for a node at ``names`` that is also above itself."""
    return TreeCycleError(
        f"The tree contains itself: {_start(names)!r} leads back to a node above it. "
        "Break the cycle before converting it."
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


def _require_flat_enough(tree: Any) -> None:
    depth, names, is_cycle = _deepest(tree, limit=MAX_DEPTH)
    if is_cycle:
        raise cycle_error(names)
    if depth >= MAX_DEPTH:
        raise depth_error(depth, names)


def _too_deep(tree: Any) -> TreeDepthError:
    depth, names, is_cycle = _deepest(tree, limit=2 * MAX_DEPTH)
    return cycle_error(names) if is_cycle else depth_error(depth, names)


def _deepest(tree: Any, *, limit: int) -> tuple[int, list[str | None], bool]:
    """Find the depth as JAX sees it, down to ``limit``.

    Returns:
        The depth, the start of the path there, and whether the path is a cycle.
    """
    find = current_registry().find
    frames: list[tuple[Iterator[tuple[Any, Any]], int]] = [(iter((("", tree),)), 0)]
    names: list[str | None] = []
    above: set[int] = set()
    visited: dict[int, tuple[int, Any]] = {}  # at which depth; keeps ids from reuse
    deepest: tuple[int, list[str | None]] = (0, [])
    while frames:
        for key, child in frames[-1][0]:
            kind = find(child)
            if kind.adapter is None or kind.opens:
                continue
            if id(child) in above:
                return len(frames), [*names[1:], _name(key)], True
            if visited.get(id(child), (0, None))[0] >= len(frames):
                continue
            names.append(_name(key))
            if len(frames) > deepest[0]:
                deepest = (len(frames), names[1 : _SHOWN + 2])
            if len(frames) >= limit:
                return (*deepest, False)
            flat = _taken_apart(kind.adapter, child)
            if flat is None:
                names.pop()
                continue
            above.add(id(child))
            visited[id(child)] = (len(frames), child)
            frames.append((zip(flat.keys, flat.children, strict=False), id(child)))
            break
        else:
            above.discard(frames.pop()[1])
            del names[len(frames) :]
    return (*deepest, False)


def _taken_apart(adapter: Adapter, node: Any) -> Flat | None:
    """Take a node apart; None where its adapter cannot, which the walk will tell."""
    try:
        flat = adapter.flatten(node)
    except AdapterError:
        return None
    return flat if isinstance(flat, Flat) else None


def _unsortable(tree: Any) -> PathError | None:
    """Explain a failure by the first node whose keys cannot be sorted, if any."""
    find = current_registry().find
    pending: list[tuple[Any, Any]] = [((), tree)]  # (place above, key), node
    seen: dict[int, Any] = {}
    while pending:
        place, node = pending.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        try:
            kind = find(node)
            if kind.adapter is None or kind.opens:
                continue
            keys, children, _ = kind.adapter.flatten(node)
        except (ValueError, TypeError) as error:
            return _explain(place, node, error)
        pending += [((place, k), c) for k, c in zip(keys, children, strict=False)]
    return None


def _explain(place: Any, node: Any, error: Exception) -> PathError | None:
    text = str(error)
    if "Comparator" not in text and "not supported between" not in text:
        return None
    types = sorted({type(key).__name__ for key in node})
    names: list[str | None] = []
    while place:
        place, key = place
        names.append(_name(key))
    return PathError(
        f"The {type(node).__name__} at {_start(names[::-1])!r} has keys that Python "
        f"cannot sort (of type {', '.join(types)}), so JAX cannot flatten it. Use keys "
        "of one type that has an order."
    )
