"""``.npz`` files, read with NumPy, one array at a time; never written.

A label path is the name that ``numpy.savez`` was given. NumPy unpickles nothing here.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from treeadapt.checkpoints.common import MAX_LEAVES, Leaf, Stored, abstract, refuse
from treeadapt.names import listing

_ENDING = ".npy"


def read_metadata(path: Path) -> Stored:
    """Read names, shapes and dtypes from the members' headers; no array is loaded.

    Raises:
        CheckpointError: the archive is damaged, or holds something other than arrays.
    """
    table: dict[str, Leaf] = {}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > MAX_LEAVES:
            refuse(path, f"it has {len(members):,} members")
        for member in members:
            name = member.filename.removesuffix(_ENDING)
            if name == member.filename:
                refuse(path, f"the member {listing([name])} is not an array")
            if name in table:
                refuse(path, f"a name occurs twice: {listing([name])}")
            with archive.open(member) as file:
                table[name] = _leaf(path, name, file, member)
    return Stored(path, table)


def read(stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Read leaves, one at a time.

    Args:
        stored: what ``read_metadata`` returned.
        wanted: paths, in the order in which to give them.
    """
    with np.load(stored.path, allow_pickle=False) as file:
        for one in wanted:
            array = file[stored.table[one].key]
            yield array.astype(array.dtype.newbyteorder("="), copy=False)


def _leaf(path: Path, name: str, file: Any, member: zipfile.ZipInfo) -> Leaf:
    """Read the header of one member, which must have the array's size."""
    formats: Any = np.lib.format
    readers = {
        (1, 0): formats.read_array_header_1_0,
        (2, 0): formats.read_array_header_2_0,
    }
    shape, _, dtype = readers[formats.read_magic(file)](file)
    if dtype.kind == "V":
        refuse(
            path,
            f"the leaf {listing([name])} has lost its dtype, as bfloat16 does in "
            "np.savez",
            "Write it as .safetensors.",
        )
    leaf = abstract(path, name, shape, dtype.newbyteorder("=").name)
    if file.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
        refuse(path, f"the leaf {listing([name])} does not fill its member")
    return Leaf(leaf, key=member.filename)
