"""Flax's ``.msgpack`` files, read with Flax, the whole file at once; never written.

A label path is the joined keys of nested maps. Texts and None are not leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from treeadapt.arrays import is_array
from treeadapt.checkpoints.common import NUMBER, Stored, abstract, refuse
from treeadapt.names import listing


def read_metadata(path: Path) -> Stored:
    """Read the file; the arrays themselves serve as the names that it has for them.

    Raises:
        CheckpointError: the file is damaged, or holds something other than leaves.
    """
    from flax import serialization

    state = serialization.msgpack_restore(path.read_bytes())
    if not isinstance(state, dict):
        refuse(path, "it is not a map of leaves")
    leaves, arrays, kinds = {}, {}, {}
    pending: list[tuple[str, Any]] = [("", state)]
    while pending:
        above, node = pending.pop()
        name = above[1:]
        if isinstance(node, dict):
            pending += [(f"{above}/{key}", node[key]) for key in reversed(node)]
        elif node is None or isinstance(node, str):
            continue
        elif is_array(node) or isinstance(node, bool | int | float | complex):
            if name in leaves:
                refuse(path, f"two leaves are named {listing([name])}")
            arrays[name] = array = np.asarray(node)
            leaves[name] = abstract(path, name, array.shape, array.dtype.name)
            if not is_array(node):
                kinds[name] = NUMBER
        else:
            refuse(path, f"{listing([name])} is a {type(node).__name__}")
    return Stored(leaves, arrays, kinds=kinds, boxed=True)


def read(path: Path, stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Give leaves, which are in memory already.

    Args:
        path: the file.
        stored: its metadata.
        wanted: paths, in the order in which to give them.
    """
    return (stored.names[one] for one in wanted)
