"""Checkpoints as Flax ``.msgpack``: Flax's reader and writer.

The format has no header: names, shapes and dtypes are found by passing over the whole
file; one leaf at a time is in memory and none becomes an array. A label path is the
joined keys of nested maps. What is no array (a number, a string) is no leaf here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from treeadapt.checkpoints.common import (
    MAX_LEAVES,
    Stored,
    abstract,
    nested,
    refuse,
)
from treeadapt.errors import listing

_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # Flax's extension codes
_CHUNKED = "__msgpack_chunked_array__"
_MAX_BUFFER = 2**31 - 1
_MAX_DEPTH = 200


def read_metadata(path: Path) -> Stored:
    """Read names, shapes and dtypes, leaf by leaf.

    Raises:
        CheckpointError: the file is damaged, or holds something else than leaves.
    """
    import msgpack

    size = path.stat().st_size

    def unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        found = {str(key): child for key, child in pairs}
        if len(found) < len(pairs):
            refuse(path, "a name occurs twice in one map")
        return found

    with path.open("rb") as file:
        reader = msgpack.Unpacker(
            file,
            raw=False,
            strict_map_key=False,
            object_pairs_hook=unique,
            ext_hook=lambda code, data: _extension(path, code, data),
            max_buffer_size=_MAX_BUFFER,
            max_array_len=min(size, MAX_LEAVES),
            max_map_len=min(size, MAX_LEAVES),
        )
        state = reader.unpack()
        if reader.tell() != size:
            refuse(path, "something follows its content")
    if not isinstance(state, dict):
        refuse(path, "it is no map of leaves")
    leaves = dict(_leaves(path, state, ()))
    return Stored(leaves, {name: name for name in leaves}, {})


def read(path: Path, stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Read leaves; Flax reads the whole file at once.

    Args:
        path: the file.
        stored: its metadata.
        wanted: paths, in the order in which to give them.
    """
    from flax import serialization

    state = serialization.msgpack_restore(path.read_bytes())
    found: dict[str, Any] = {}
    pending: list[tuple[tuple[str, ...], Any]] = [((), state)]
    while pending:
        above, node = pending.pop()
        if isinstance(node, dict):
            pending += [((*above, str(key)), child) for key, child in node.items()]
        else:
            found["/".join(above)] = node
    for one in wanted:
        yield np.asarray(found[stored.names[one]])


def write(
    path: Path, leaves: Iterable[tuple[str, Any]], ties: Mapping[str, str]
) -> None:
    """Write leaves; tied ones are written twice.

    Raises:
        CheckpointError: a leaf stands above another, which nested maps cannot hold.
    """
    from flax import serialization

    found = {name: np.asarray(leaf) for name, leaf in leaves}
    found |= {other: found[one] for other, one in ties.items()}
    split = {tuple(name.split("/")): leaf for name, leaf in found.items()}
    path.write_bytes(serialization.msgpack_serialize(nested(split)))


def _extension(path: Path, code: int, data: bytes) -> Any:
    import msgpack

    if code == _COMPLEX:
        return None
    if code not in (_ARRAY, _SCALAR):
        refuse(path, f"it holds an unknown extension, {code}")
    shape, dtype, raw = msgpack.unpackb(data, raw=True, max_ext_len=0)
    name = dtype.decode() if isinstance(dtype, bytes) else dtype
    leaf = abstract(path, "of an array", shape, name)
    if np.prod(leaf.shape, dtype=object) * leaf.dtype.itemsize != len(raw):
        refuse(path, "an array is not as large as its shape says")
    return leaf


def _leaves(
    path: Path, state: dict[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    if len(above) > _MAX_DEPTH:
        refuse(path, "it is nested too deep")
    for key, child in state.items():
        here = (*above, key)
        if isinstance(child, jax.ShapeDtypeStruct):
            yield "/".join(here), child
        elif isinstance(child, dict) and _CHUNKED in child:
            yield "/".join(here), _chunked(path, "/".join(here), child)
        elif isinstance(child, dict):
            yield from _leaves(path, child, here)
        elif isinstance(child, list | bytes):
            refuse(path, f"{listing(['/'.join(here)])} is a {type(child).__name__}")


def _chunked(path: Path, name: str, node: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an array that Flax wrote in pieces of 1 GiB."""
    shape, chunks = node.get("shape"), node.get("chunks")
    if not isinstance(shape, dict) or not isinstance(chunks, dict) or not chunks:
        refuse(path, f"the leaf {listing([name])} lacks pieces")
    pieces = list(chunks.values())
    if not all(isinstance(piece, jax.ShapeDtypeStruct) for piece in pieces):
        refuse(path, f"the leaf {listing([name])} lacks pieces")
    leaf = abstract(path, name, list(shape.values()), pieces[0].dtype.name)
    if sum(piece.size for piece in pieces) != leaf.size:
        refuse(path, f"the leaf {listing([name])} lacks pieces")
    return leaf
