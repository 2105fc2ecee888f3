"""Conversion: any tree to and from plain dicts, leaf objects untouched.

A *state dict* is nested, ``{"layers": {"0": {"kernel": leaf}}}``; a *flat dict* is one
level, ``{"layers/0/kernel": leaf}``. The way back takes container classes, functions,
``None`` and empty containers from a target tree, and leaves from the dict. No leaf is
read, moved, copied or cast, inside or outside ``jit``, on any device.
See ``splitting`` for selecting a part of a tree, ``paths`` for naming rules.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu

from treeadapt.errors import StructureMismatchError
from treeadapt.text.names import SHOWN, Mismatch
from treeadapt.trees.adapters.registry import current_registry
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe
from treeadapt.trees.paths import SEPARATOR
from treeadapt.trees.views import TreeView, take_apart, view_nested, view_tree

T = TypeVar("T")
_MISSING = object()


def to_state_dict(tree: Any) -> Any:
    """Convert a tree to a plain nested dict with ``str`` keys.

    Args:
        tree: any pytree, or a tree of classes that the registry can open.

    Returns:
        Nested ``dict``; every leaf is the caller's own object. Empty containers are
        ``{}`` and ``None`` stays. Boxes (``nnx.Variable``, ``nn.Partitioned``) add no
        level. A bare leaf is returned as it is.

    Raises:
        PathCollisionError: two children of one node have the same name.
        PathError: a key has no stable text.
        AdapterError: an object that holds arrays has no adapter.

    Example:
        >>> to_state_dict({"layers": [1.0, (2.0, None)]})
        {'layers': {'0': 1.0, '1': {'0': 2.0, '1': None}}}
    """
    leaves, plan, _ = take_apart(tree)
    return plan.nest(leaves)


def to_flat_dict(tree: Any) -> dict[str, Any]:
    """Convert a tree to ``{label path: leaf}``, in JAX's leaf order.

    Args:
        tree: any pytree, or a tree of classes that the registry can open.

    Returns:
        One entry a leaf, functions and other static leaves included; every value is
        the caller's own object. ``None`` and empty containers have no entry.

    Raises:
        PathCollisionError: two leaves have the same path; both are named.
        PathError: a key has no stable text.
        AdapterError: an object that holds arrays has no adapter.

    Example:
        >>> to_flat_dict({"layers": [1.0, (2.0, None)]})
        {'layers/0': 1.0, 'layers/1/0': 2.0}
    """
    leaves, plan, _ = take_apart(tree)
    flat = plan.flat(leaves)
    if len(flat) < len(leaves):
        view_tree(tree)  # names the two that have one path
    return flat


def tree_paths(tree: Any) -> tuple[str, ...]:
    """Return the label path of every leaf, in JAX's leaf order.

    Raises:
        PathCollisionError: two leaves have the same path; both are named.

    Example:
        >>> tree_paths({"b": 1.0, "a": [2.0, 3.0]})
        ('a/0', 'a/1', 'b')
    """
    return view_tree(tree).plan.paths


def from_state_dict(target: T, state: Any, *, strict: bool = True) -> T:
    """Put the leaves of a state dict into a tree like ``target``.

    Args:
        target: tree, or abstract tree (``jax.eval_shape``, ``eqx.filter_eval_shape``),
            that gives container classes, and functions, static leaves, ``None`` and
            empty containers that ``state`` lacks.
        state: nested dict as ``to_state_dict`` makes it; other containers with the same
            names do as well, and tuples or lists that have lost the names of named
            tuples: ``target`` says which these were.
        strict: compare shape and dtype with the array leaves of ``target``.

    Returns:
        Tree with the treedef of ``target``; its leaves are the objects in ``state``.

    Raises:
        StructureMismatchError: entries are missing, unexpected or, if ``strict``, of
            another shape or dtype; all of them are reported at once.

    Example:
        >>> from_state_dict([0.0, (0.0,)], {"0": 1.0, "1": {"0": 2.0}})
        [1.0, (2.0,)]
    """
    view = view_nested(target)
    leaves = view.plan.unnest(state)
    if leaves is not None:
        # ``unnest`` found all of them, and that each is a leaf.
        if not strict or next(_differing(view, leaves), None) is None:
            return view.rebuild(leaves)
        return _rebuild(view, leaves, [], strict=strict)
    leaves, unexpected = _align(view, to_state_dict(state))
    if unexpected and lacks_names_alone(state, target):
        by_places = to_state_dict(by_position(state))
        placed, others = _align(view_nested(by_position(target)), by_places)
        if not others and not any(leaf is _MISSING for leaf in placed):
            leaves, unexpected = placed, []
    return _rebuild(view, leaves, unexpected, strict=strict)


def from_flat_dict(target: T, flat: Mapping[str, Any], *, strict: bool = True) -> T:
    """Put the leaves of a flat dict into a tree like ``target``.

    Args:
        target: as for ``from_state_dict``.
        flat: ``{label path: leaf}``, in any order.
        strict: compare shape and dtype with the array leaves of ``target``.

    Returns:
        Tree with the treedef of ``target``; its leaves are the objects in ``flat``.

    Raises:
        StructureMismatchError: entries are missing, unexpected or, if ``strict``, of
            another shape or dtype; all of them are reported at once.
        PathCollisionError: two leaves of ``target`` have the same path.

    Example:
        >>> from_flat_dict([0.0, (0.0,)], {"1/0": 2.0, "0": 1.0})
        [1.0, (2.0,)]
    """
    if not isinstance(flat, Mapping):
        raise StructureMismatchError(
            f"A flat dict is {{path: leaf}}, not {describe(flat)}; a nested one is for "
            "from_state_dict."
        )
    view = view_tree(target)
    leaves = [flat.get(path, _MISSING) for path in view.plan.paths]
    unexpected: list[str] = []
    if len(flat) > sum(leaf is not _MISSING for leaf in leaves):
        paths = frozenset(view.plan.paths)
        unexpected = [str(name) for name in flat if name not in paths]
        placed = tree_paths(by_position(target))
        if flat.keys() == frozenset(placed):
            leaves, unexpected = [flat[path] for path in placed], []
    return _rebuild(view, leaves, unexpected, strict=strict)


def by_position(tree: Any) -> Any:
    """Return a tree with a tuple for each list and named tuple, as pickles have it.

    Example:
        >>> by_position({"a": [1.0, optax.EmptyState()]})
        {'a': (1.0, ())}
    """
    # Without recursion: JAX flattens deeper trees than Python calls functions.
    nodes, first_children = [tree], []
    for node in nodes:
        first_children.append(len(nodes))
        nodes.extend(_entries(node))
    for place, first in reversed([*enumerate(first_children)]):
        node = nodes[place]
        children = nodes[first : first + len(_entries(node))]
        if isinstance(node, tuple | list):
            nodes[place] = tuple(children)
        elif type(node) is dict:
            nodes[place] = dict(zip(node, children, strict=True))
    return nodes[0]


def _entries(node: Any) -> Collection[Any]:
    """Return what is in a list, a tuple or a dict, and nothing of any other."""
    if type(node) is dict:
        return node.values()
    return node if isinstance(node, tuple | list) else ()


def lacks_names_alone(state: Any, target: Any) -> bool:
    """Return whether a state has the leaves of a target, by names or by places.

    Of some named tuples the names may be lost, and kept of others. A name that is not
    the target's is of another field.

    Example:
        >>> lacks_names_alone((0, optax.EmaState(1, 2)), (0, optax.EmaState(3, 4)))
        True
        >>> lacks_names_alone(optax.TraceState(1), optax.ScaleByRssState(1))
        False
    """
    places = map(tree_paths, (by_position(target), by_position(state)))
    names = dict(zip(next(places), tree_paths(target), strict=True))
    for path, place in zip(tree_paths(state), next(places), strict=True):
        parts = (each.split(SEPARATOR) for each in (path, place, names.get(place, "")))
        if any(part not in known for part, *known in zip(*parts, strict=False)):
            return False
    return True


def _rebuild(
    view: TreeView, incoming: Sequence[Any], unexpected: Sequence[str], *, strict: bool
) -> Any:
    """Put leaves in their places; static leaves may come from the target."""
    paths, leaves, missing = view.plan.paths, list(incoming), []
    for index in [i for i, leaf in enumerate(incoming) if leaf is _MISSING]:
        leaves[index] = view.leaves[index]
        if is_array(leaves[index]):
            missing.append(paths[index])
    wrong = {
        paths[index]: f"{describe(leaves[index])}, the target has "
        f"{describe(view.leaves[index])}"
        for index in (_differing(view, leaves) if strict else ())
    }
    mismatch = Mismatch(missing, unexpected, wrong or containers(paths, leaves))
    if mismatch:
        hint, above = "", tuple(f"{path}/" for path in unexpected[:SHOWN])
        if not set(missing).isdisjoint(unexpected):
            hint = "The dict is flat, {path: leaf}: from_flat_dict takes it."
        elif any(path.startswith(above) for path in missing[:SHOWN]):
            hint = "If the dict is nested, from_state_dict takes it."
        text = mismatch.text("entry", "the dict has", hint=hint)
        raise StructureMismatchError(text, paths=mismatch.paths)
    return view.rebuild(leaves)


def _differing(view: TreeView, leaves: Sequence[Any]) -> Iterator[int]:
    """Yield the places of leaves of another shape or dtype than those of the target."""
    if all(map(operator.is_, view.leaves, leaves)):
        return
    for index, (like, leaf) in enumerate(zip(view.leaves, leaves, strict=True)):
        if leaf is not like and differs(like, leaf):
            yield index


def containers(paths: Sequence[str], leaves: Sequence[Any]) -> dict[str, str]:
    """Return the problem, by path, of each value that is more than one leaf."""
    find = current_registry().find
    classes = dict(zip(map(type, leaves), leaves, strict=True))  # which alone decide
    opened = {cls for cls, leaf in classes.items() if find(leaf).opens}
    if jtu.all_leaves(leaves) and not opened:
        return {}
    return {
        path: f"{describe(leaf)} cannot take the place of a leaf"
        for path, leaf in zip(paths, leaves, strict=True)
        if type(leaf) in opened or not jtu.all_leaves((leaf,))
    }


def differs(want: Any, got: Any) -> bool:
    """Return whether a leaf has another shape or dtype than the one it replaces.

    An array of no axes may take the place of a Python number, whatever its dtype.
    """
    if not is_array(want):
        is_number = isinstance(want, numbers.Number)
        return is_array(got) and not (is_number and got.shape == ())
    return not is_array(got) or want.shape != got.shape or want.dtype != got.dtype


def _align(view: TreeView, state: Any) -> tuple[list[Any], list[str]]:
    """Find the place of each leaf of ``state``; return leaves and unexpected paths."""
    leaves = [_MISSING] * len(view.leaves)
    unexpected: list[str] = []
    places = view.plan.nest(range(len(view.leaves)))
    pending: list[tuple[str | None, Any, Any]] = [(None, places, state)]
    while pending:
        path, wanted, value = pending.pop()
        if type(value) is dict and not isinstance(wanted, int):
            below = wanted or {}
            pending += [
                (name if path is None else f"{path}/{name}", below.get(name), child)
                for name, child in reversed(value.items())
            ]
        elif isinstance(wanted, int) and type(value) not in (dict, type(None)):
            leaves[wanted] = value
        else:
            unexpected += _leaf_paths(path, value)
    return leaves, unexpected


def _leaf_paths(above: str | None, state: Any) -> Sequence[str]:
    plan = view_nested(state).plan
    if above is None:
        return plan.paths
    # A bare leaf is at the path itself, and not a child with an empty name.
    return [f"{above}/{path}" if plan.root else above for path in plan.paths]
