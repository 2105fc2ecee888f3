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

from treeadapt.checkpoints.common import MAX_LEAVES, Stored, abstract, refuse
from treeadapt.names import listing

_ENDING = ".npy"


def read_metadata(path: Path) -> Stored:
    """Read names, shapes and dtypes from the members' headers; no array is loaded.

    Raises:
        CheckpointError: the archive is damaged, or holds something else than arrays.
    """
    leaves, names = {}, {}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > MAX_LEAVES:
            refuse(path, f"it has {len(members):,} members")
        for member in members:
            name = member.filename.removesuffix(_ENDING)
            if name == member.filename:
                refuse(path, f"the member {listing([name])} is not an array")
            if name in leaves:
                refuse(path, f"a name occurs twice: {listing([name])}")
            leaves[name], names[name] = _leaf(path, archive, member), member.filename
    return Stored(leaves, names)


def read(path: Path, stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Read leaves, one at a time.

    Args:
        path: the file.
        stored: its metadata.
        wanted: paths, in the order in which to give them.
    """
    with np.load(path, allow_pickle=False) as file:
        for one in wanted:
            array = file[stored.names[one]]
            yield array.astype(array.dtype.newbyteorder("="), copy=False)


def _leaf(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    formats: Any = np.lib.format
    with archive.open(member) as file:
        readers = {
            (1, 0): formats.read_array_header_1_0,
            (2, 0): formats.read_array_header_2_0,
        }
        shape, _, dtype = readers[formats.read_magic(file)](file)
        header_bytes = file.tell()
    name = member.filename.removesuffix(_ENDING)
    if dtype.kind == "V":
        refuse(
            path,
            f"the leaf {listing([name])} has lost its dtype, as bfloat16 does in "
            "np.savez",
            "Write it as .safetensors.",
        )
    leaf = abstract(path, name, shape, dtype.newbyteorder("=").name)
    if header_bytes + math.prod(shape) * dtype.itemsize != member.file_size:
        refuse(path, f"the leaf {listing([name])} does not fill its member")
    return leaf
