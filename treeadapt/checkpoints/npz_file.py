"""``.npz`` files, read with NumPy, one array at a time; never written.

A label path is the name that ``numpy.savez`` was given. NumPy unpickles nothing here:
texts, dates, records and objects, which people put there too, are no leaves. Of a dtype
that NumPy does not know, ``savez`` writes the size alone. Two bytes are bfloat16; one
byte may be any float8 or int4, so an array of such is not a leaf, either.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from treeadapt.checkpoints.errors import AGAIN, refuse
from treeadapt.checkpoints.record import MAX_LEAVES, Leaf, Stored, abstract
from treeadapt.checkpoints.remote import AnyPath, read_range
from treeadapt.text.names import listing

_ENDING = ".npy"
_NOT_NUMBERS = "OSUMmV"  # kinds: objects, bytes, texts, dates, durations, no name
_BFLOAT16 = np.dtype("V2")  # as ``savez`` writes it, because NumPy has no name for it


def read_metadata(path: AnyPath) -> Stored:
    """Read names, shapes and dtypes from the members' headers; no array is loaded.

    Returns:
        What it holds, with a doubt for each array that is not of numbers.

    Raises:
        CheckpointError: the archive is damaged, holds something other than arrays, or
            arrays of which none is of numbers.
    """
    table: dict[str, Leaf] = {}
    left_out: dict[str, str] = {}
    with path.open("rb") as content:
        if not zipfile.is_zipfile(content):
            start = read_range(path, 0, 9)
            is_safetensors = start[4:] == b"\0\0\0\0{"  # after a length
            cure = "It begins as safetensors do: give it that ending."
            refuse(path, "it is not a whole archive", cure if is_safetensors else AGAIN)
        archive = zipfile.ZipFile(content)
        members = archive.infolist()
        if len(members) > MAX_LEAVES:
            refuse(path, f"it has {len(members):,} members")
        for member in members:
            name = member.filename.removesuffix(_ENDING)
            if name == member.filename:
                refuse(path, f"the member {listing([name])} is not an array")
            if name in table or name in left_out:
                refuse(path, f"a name occurs twice: {listing([name])}")
            with archive.open(member) as file:
                shape, dtype = _header(file)
                size = member.file_size - file.tell()
            if dtype.kind in _NOT_NUMBERS and dtype != _BFLOAT16:
                left_out[name] = dtype.name
            else:
                leaf = _leaf(path, name, shape, dtype, size)
                table[name] = Leaf(leaf, key=member.filename)
    doubts = [
        f"{listing([name])} is left out, because {dtype:.40} is not a dtype of numbers"
        for name, dtype in left_out.items()
    ]
    if doubts and not table:
        refuse(path, f"it holds no numbers: {doubts[0]}")
    return Stored(path, table, doubts=tuple(doubts))


def read(stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Read leaves, one at a time.

    Args:
        stored: what ``read_metadata`` returned.
        wanted: paths, in the order in which to give them.
    """
    with (
        stored.path.open("rb") as content,
        np.load(content, allow_pickle=False) as file,
    ):
        for path in wanted:
            array = file[stored.table[path].key]
            if array.dtype == _BFLOAT16:
                array = array.view(jnp.bfloat16)
            yield array.astype(array.dtype.newbyteorder("="), copy=False)


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and dtype of one member, up to where its numbers begin."""
    formats: Any = np.lib.format
    readers = {
        (1, 0): formats.read_array_header_1_0,
        (2, 0): formats.read_array_header_2_0,
    }
    shape, _, dtype = readers[formats.read_magic(file)](file)
    return shape, dtype


def _leaf(
    path: AnyPath, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], size: int
) -> Any:
    """Return the abstract array of a member, whose numbers take ``size`` bytes."""
    is_named = dtype != _BFLOAT16
    text = dtype.newbyteorder("=").name if is_named else "bfloat16"
    leaf = abstract(path, name, shape, text)
    if math.prod(shape) * dtype.itemsize != size:
        refuse(path, f"the leaf {listing([name])} does not fill its member")
    return leaf
