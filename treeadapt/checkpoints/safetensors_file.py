"""Checkpoints as ``.safetensors``: the label path is the tensor's name.

The library's own writer and reader; the header is read here, because the library takes
a name that occurs twice. Leaves of one buffer are stored once: the header's text
metadata maps the other paths to the stored one, as Hugging Face's tools do.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treeadapt.checkpoints.common import MAX_LEAVES, Stored, abstract, refuse
from treeadapt.errors import CheckpointError, listing

_MAX_HEADER_BYTES = 64 * 2**20
_RESERVED = "__metadata__"
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def read_metadata(path: Path) -> Stored:
    """Read names, shapes and dtypes; only the header is touched.

    Raises:
        CheckpointError: the header is malformed, too large, or does not fit the file.
    """
    header, start = _header(path)
    size = path.stat().st_size - start
    texts = header.pop(_RESERVED, {})
    leaves, names = {}, {}
    for name, entry in header.items():
        if not isinstance(entry, dict):
            refuse(path, f"the entry {listing([name])} is not a tensor")
        dtype = _DTYPES.get(str(entry.get("dtype")), entry.get("dtype"))
        leaf = abstract(path, name, entry.get("shape"), dtype)
        size_bytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        begin = _begin(entry.get("data_offsets"), size_bytes, size)
        if begin < 0:
            refuse(path, f"the tensor {listing([name])} does not fit the file")
        leaves[name] = leaf
        names[name] = (name, start + begin)
    ties = {
        other: name
        for other, name in (texts.items() if isinstance(texts, dict) else ())
        if other not in leaves and isinstance(name, str) and name in leaves
    }
    leaves |= {other: leaves[name] for other, name in ties.items()}
    names |= {other: names[name] for other, name in ties.items()}
    return Stored(leaves, names, ties)


def read(path: Path, stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Read leaves, one at a time.

    Args:
        path: the file.
        stored: its metadata.
        wanted: paths, in the order in which to give them.
    """
    import safetensors

    with safetensors.safe_open(path, framework="np") as file:
        for one in wanted:
            name, start = stored.names[one]
            leaf = stored.leaves[one]
            if not leaf.dtype.name.startswith("float8"):
                yield file.get_tensor(name)
            elif not math.prod(leaf.shape):
                yield np.zeros(leaf.shape, leaf.dtype)
            else:  # which the reader checks, but does not know as a NumPy dtype
                raw = np.memmap(path, leaf.dtype, "r", start, leaf.shape)
                yield np.array(raw)


def write(
    path: Path, leaves: Iterable[tuple[str, Any]], ties: Mapping[str, str]
) -> None:
    """Write leaves; the writer wants them all on the host.

    Raises:
        CheckpointError: a name is reserved, or the format lacks a dtype.
    """
    import safetensors.numpy

    found = {}
    for name, leaf in leaves:
        if leaf.dtype.name not in _DTYPES.values():
            raise CheckpointError(
                f"The leaf {listing([name])} is {leaf.dtype}, which safetensors has "
                "no name for. Save as an Orbax folder."
            )
        found[name] = np.asarray(leaf, order="C")
    if _RESERVED in found or _RESERVED in ties:
        raise CheckpointError(f"A leaf of safetensors cannot be named {_RESERVED!r}.")
    safetensors.numpy.save_file(found, path, metadata=dict(ties) or None)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            refuse(path, "it ends before its header does")
        if length > _MAX_HEADER_BYTES:
            refuse(path, f"its header is larger than {_MAX_HEADER_BYTES >> 20} MiB")
        text = file.read(length)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            twice = [key for key, count in counts.items() if count > 1]
            refuse(path, f"a name occurs twice: {listing(twice, limit=3)}")
        return found

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except RecursionError:
        refuse(path, "its header is nested too deep")
    if not isinstance(header, dict) or len(header) > MAX_LEAVES:
        refuse(path, "its header is not a table of tensors")
    return header, 8 + length


def _begin(offsets: Any, size_bytes: int, data_bytes: int) -> int:
    """Return where a tensor begins in the data; -1 if it cannot lie there."""
    if not isinstance(offsets, list) or len(offsets) != 2:
        return -1
    begin, end = offsets
    if type(begin) is not int or type(end) is not int:
        return -1
    fits = 0 <= begin <= end <= data_bytes and end - begin == size_bytes
    return begin if fits else -1
