"""Exact paths: JAX's own text of keys, for messages; and the node at a label path.

An exact path such as ``.policy['params']['w']`` is unique where a label path is not.
Also names places inside classes that JAX does not know. Slow; made only for errors.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu

from treeadapt.trees.adapters.adapter import BOX, Adapter, jax_knows
from treeadapt.trees.adapters.registry import AdapterRegistry, current_registry
from treeadapt.trees.paths import join, segment


def exact_paths(tree: Any, registry: AdapterRegistry) -> list[str]:
    """Return the exact path of each leaf, in the order of a walk.

    Example:
        >>> from treeadapt.trees.adapters.registry import default_registry
        >>> exact_paths({"a": [1.0, 2.0]}, default_registry)
        ["['a'][0]", "['a'][1]"]
    """
    paths: list[str] = []
    met: set[int] = set()  # nodes with an identity
    pending = [("", tree)]
    while pending:
        above, node = pending.pop()
        kind = registry.find(node)
        if kind.adapter is None:
            paths.append(above)
        elif not (kind.adapter.shared and id(node) in met):
            met.add(id(node))
            below = [(above + text, child) for text, child in _keys(node, kind.adapter)]
            pending += reversed(below)
    return paths


def exact_places(
    nodes: Sequence[Any], child_indices: Sequence[int], registry: AdapterRegistry
) -> list[str]:
    """Return the exact paths of some children of the last of ``nodes``.

    Args:
        nodes: the nodes from the root down, each a child of the one before.
        child_indices: which children of the last.
        registry: where to find their adapters.
    """
    keys = [_keys(node, registry.find(node).adapter) for node in nodes]
    above = [
        next(text for text, child in pairs if child is below)
        for pairs, below in zip(keys, nodes[1:], strict=False)
    ]
    return ["".join([*above, keys[-1][index][0]]) for index in child_indices]


def node_at(tree: Any, path: str) -> Any:
    """Return the outermost node of a tree that is at a label path.

    Example:
        >>> node_at({"a": [1.0, (2.0, 3.0)]}, "a/1")
        (2.0, 3.0)
    """
    registry, pending = current_registry(), [("", tree)]
    while pending:
        above, node = pending.pop()
        if above == path:
            return node
        if (adapter := registry.find(node).adapter) is not None:
            flat = adapter.open(node)
            for key, child in zip(flat.keys, flat.children, strict=True):
                segments = [] if key is BOX else [segment(key)]
                inner = join(filter(None, [above, *segments]))
                if not inner or f"{path}/".startswith(f"{inner}/"):
                    pending.append((inner, child))
    raise KeyError(path)


def _keys(node: Any, adapter: Adapter | None) -> list[tuple[str, Any]]:
    """Return the exact text of each key of a node, and its child."""
    assert adapter is not None  # of a node
    flat = adapter.open(node)
    if not jax_knows(node):
        texts = ["" if key is BOX else _text(key) for key in flat.keys]
        return list(zip(texts, flat.children, strict=True))
    by_child = collections.defaultdict(list)
    pairs, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    for keys, child in pairs:
        by_child[id(child)].append(jtu.keystr(keys))
    again = map(str, itertools.count())  # JAX made new children: number them
    return [
        (by_child[id(child)].pop(0) if by_child[id(child)] else next(again), child)
        for child in flat.children
    ]


def _text(key: Any) -> str:
    return f".{key}" if isinstance(key, str) else f"[{key!r}]"
