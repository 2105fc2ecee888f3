"""Flax's ``.msgpack`` files, read with Flax, the whole file at once; never written.

A label path is the joined keys of nested maps. Texts and None are not leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from treeadapt.checkpoints.errors import AGAIN, refuse
from treeadapt.checkpoints.record import NUMBER, Leaf, Stored, abstract
from treeadapt.checkpoints.remote import AnyPath
from treeadapt.text.names import listing
from treeadapt.trees.arrays import is_array


def read_metadata(path: AnyPath) -> Stored:
    """Read the file; the arrays themselves are the keys of their leaves.

    Raises:
        CheckpointError: the file is damaged, or holds something other than leaves.
    """
    from flax import serialization

    try:
        state = serialization.msgpack_restore(path.read_bytes())
    except ValueError as error:
        if "incomplete input" in str(error):  # MessagePack has no class for it
            refuse(path, "it is cut off", AGAIN)
        raise
    if not isinstance(state, dict):
        refuse(path, "it is not a map of leaves")
    table: dict[str, Leaf] = {}
    pending: list[tuple[str, Any]] = [("", state)]
    while pending:
        above, node = pending.pop()
        name = above[1:]
        if isinstance(node, dict):
            pending += [(f"{above}/{key}", node[key]) for key in reversed(node)]
        elif is_array(node) or isinstance(node, bool | int | float | complex):
            if name in table:
                refuse(path, f"two leaves are named {listing([name])}")
            array = np.asarray(node)
            leaf = abstract(path, name, array.shape, array.dtype.name)
            table[name] = Leaf(leaf, "" if is_array(node) else NUMBER, array)
        elif node is not None and not isinstance(node, str):
            refuse(path, f"{listing([name])} is a {type(node).__name__}")
    return Stored(path, table, boxed=True)


def read(stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Give leaves, which are in memory already.

    Args:
        stored: what ``read_metadata`` returned.
        wanted: paths, in the order in which to give them.
    """
    return (stored.table[path].key for path in wanted)
