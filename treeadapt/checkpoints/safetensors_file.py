"""Checkpoints as ``.safetensors``: the label path is the tensor's name.

The library's own writer and reader; the header is read here, because the library takes
a name that occurs twice. Leaves of one buffer are stored once: one entry of the
header's text metadata says which paths share a tensor, and which were no arrays. A
folder of shards is read by its index, as Hugging Face's tools write it.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treeadapt.checkpoints.common import (
    MAX_LEAVES,
    Stored,
    abstract,
    marked,
    marks,
    refuse,
)
from treeadapt.errors import CheckpointError
from treeadapt.names import listing

_MAX_HEADER_BYTES = 64 * 2**20
INDEX = "model.safetensors.index.json"
_RESERVED = "__metadata__"
_MARK = "treeadapt"  # the only entry of that metadata with a meaning here
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
    """Read names, shapes and dtypes; only headers are touched.

    Args:
        path: a file, or a folder of shards with an index.

    Raises:
        CheckpointError: a header is malformed, too large, or does not fit the file, or
            an index does not fit its folder.
    """
    if path.is_dir():
        return _sharded(path)
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
        names[name] = (path, name, start + begin)
    if not isinstance(texts, dict) or _MARK not in texts:
        return Stored(leaves, names)
    return marked(path, leaves, names, _json(path, texts[_MARK]))


def read(path: Path, stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Read leaves, one at a time.

    Args:
        path: the file.
        stored: its metadata.
        wanted: paths, in the order in which to give them.
    """
    import safetensors

    with contextlib.ExitStack() as stack:
        files: dict[Path, Any] = {}
        for one in wanted:
            shard, name, start = stored.names[one]
            leaf = stored.leaves[one]
            if shard not in files:
                file = safetensors.safe_open(shard, framework="np")
                files[shard] = stack.enter_context(file)
            if not leaf.dtype.name.startswith("float8"):
                yield files[shard].get_tensor(name)
            elif not math.prod(leaf.shape):
                yield np.zeros(leaf.shape, leaf.dtype)
            else:  # which the reader checks, but does not know as a NumPy dtype
                raw = np.memmap(shard, leaf.dtype, "r", start, leaf.shape)
                yield np.array(raw)


def write(
    path: Path,
    leaves: Iterable[tuple[str, Any]],
    ties: Mapping[str, str],
    kinds: Mapping[str, str],
) -> None:
    """Write leaves; the writer takes them all at once, on the host.

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
    texts = {_MARK: json.dumps(marks(ties, kinds))} if ties or kinds else None
    safetensors.numpy.save_file(found, path, metadata=texts)


def _sharded(path: Path) -> Stored:
    """Read the metadata of all shards, which must hold what the index says."""
    index = path / INDEX
    if index.stat().st_size > _MAX_HEADER_BYTES:
        refuse(path, f"its index is larger than {_MAX_HEADER_BYTES >> 20} MiB")
    document = _json(path, index.read_text("utf-8"))
    table = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(table, dict) or len(table) > MAX_LEAVES:
        refuse(path, "its index is not a table of tensors and their files")
    shards: dict[str, set[str]] = {}
    for name, shard in table.items():
        if not isinstance(shard, str):
            refuse(path, f"its index gives no file for {listing([name])}")
        shards.setdefault(shard, set()).add(name)
    for shard in shards:  # all before any is opened
        file = path / shard
        if Path(shard).name != shard or not file.is_file():
            refuse(path, f"{listing([shard])}, in its index, is not a file in it")
        if file.resolve().parent != path.resolve():
            cure = "Copy the files themselves to one folder."
            refuse(path, f"{listing([shard])} is a link that leads out of it", cure)
    leaves: dict[str, Any] = {}
    names: dict[str, Any] = {}
    ties: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for shard, listed in shards.items():
        found = read_metadata(path / shard)
        wrong = listed.symmetric_difference(found.leaves.keys() - found.ties.keys())
        if wrong:
            refuse(
                path,
                f"its index and {listing([shard])} disagree on which tensors are in "
                f"that file: {listing(sorted(wrong), limit=3)}",
            )
        twice = found.leaves.keys() & leaves.keys()
        twice |= found.ties.keys() & table.keys()
        if twice:
            refuse(
                path, f"two leaves in it are named {listing(sorted(twice), limit=3)}"
            )
        leaves |= found.leaves
        names |= found.names
        ties |= found.ties
        kinds |= found.kinds
    return Stored(leaves, names, ties, kinds)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            refuse(path, "it ends before its header does")
        if length > _MAX_HEADER_BYTES:
            refuse(path, f"its header is larger than {_MAX_HEADER_BYTES >> 20} MiB")
        text = file.read(length)
    header = _json(path, text.decode())
    if not isinstance(header, dict) or len(header) > MAX_LEAVES:
        refuse(path, "its header is not a table of tensors")
    return header, 8 + length


def _json(path: Path, text: str) -> Any:
    """Read JSON in which no name occurs twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = collections.Counter(key for key, _ in pairs)
            twice = [key for key, count in counts.items() if count > 1]
            refuse(path, f"a name occurs twice: {listing(twice, limit=3)}")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        refuse(path, "its header is nested too deep")


def _begin(offsets: Any, size_bytes: int, data_bytes: int) -> int:
    """Return where a tensor begins in the data; -1 if it cannot lie there."""
    if not isinstance(offsets, list) or len(offsets) != 2:
        return -1
    begin, end = offsets
    if type(begin) is not int or type(end) is not int:
        return -1
    fits = 0 <= begin <= end <= data_bytes and end - begin == size_bytes
    return begin if fits else -1
