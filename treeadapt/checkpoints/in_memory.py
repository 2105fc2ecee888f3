"""A tree in the place of a checkpoint: the same steps, and no file.

Takes a tree of arrays and Python numbers, or of shapes, and gives what ``opening`` says
of a file. Arrays of JAX stay on their devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from treeadapt.checkpoints.leaves import stored_form, to_array
from treeadapt.checkpoints.record import SHAPES, TREE, Leaf, Stored
from treeadapt.trees.views import view_tree


def listed_tree(tree: Any) -> Stored:
    """Return what a tree holds, as if it were stored."""
    table = {
        path: Leaf(form.array, form.kind, key=leaf)
        for path, leaf in view_tree(tree).items()
        if (form := stored_form(leaf)) is not None
    }
    leaves = (leaf.key for leaf in table.values())
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    return Stored(Path("tree"), table, format=SHAPES if is_abstract else TREE)


def read(stored: Stored, wanted: Mapping[str, Any]) -> Iterator[Any]:
    """Give leaves, one at a time; arrays of JAX go from device to device.

    Args:
        stored: what ``listed_tree`` returned.
        wanted: paths, each with the sharding where the leaf goes, or None.
    """
    for path, sharding in wanted.items():
        array = to_array(path, stored.table[path].key)
        is_moved = sharding is not None and isinstance(array, jax.Array)
        yield jax.device_put(array, sharding) if is_moved else array
