"""Every undocumented call into JAX, in one place.

Each has one sentence on what breaks if it changes, and a test in
``tests/test_jax_internals.py`` that says so before anything else fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu

#: ``flatten(tree, is_leaf=None) -> (leaves, treedef)``. If it goes, every conversion
#: calls ``jax.tree.flatten`` in its place, which is a layer of Python slower.
flatten = jtu.default_registry.flatten

#: ``one_level(node) -> (children, metadata)``, None for a leaf. If it changes, adapters
#: find neither children nor metadata, and classes that JAX knows look like any other.
one_level = jtu.default_registry.flatten_one_level

#: ``one_level_with_keys(node) -> ((key, child) pairs, metadata)``. If it changes,
#: registered classes lose the names of their children.
one_level_with_keys = jtu.default_registry.flatten_one_level_with_keys


def walk(treedef: Any, note: Callable[[Any, Any], None]) -> None:
    """Call ``note(children, metadata)`` for each node of a treedef, children first.

    If it changes, metadata that JAX holds equal and Python does not (``1``, ``True``)
    is taken for the same, so that compiled functions run an old program.
    """
    treedef.walk(note, id, [None] * treedef.num_leaves)  # ``id``: any function


def inputs_read(fn: Callable[..., Any], *args: Any) -> list[bool]:
    """Return for each array of ``args`` whether ``fn`` computes with it, or returns it.

    If the parts of a jaxpr change, gradients of frozen leaves are counted as memory.
    """
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    parts = [jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns)]
    read = {id(variable) for part in parts for variable in part}
    return [id(variable) in read for variable in jaxpr.invars]


def coordination_client() -> Any:
    """Return what the processes of ``jax.distributed`` talk through; None without it.

    It has ``wait_at_barrier(name, limit_ms)``, ``key_value_set(key, text,
    allow_overwrite=False)`` and the same for bytes, ``blocking_key_value_get_bytes(key,
    limit_ms)``, ``key_value_dir_get(key)`` and ``key_value_delete(key)`` for all that
    is below a key. If they change, several processes can neither save to Orbax nor load
    to arrays that they share. Imported here, so that nothing else depends on it.
    """
    from jax._src import distributed

    return distributed.global_state.client
