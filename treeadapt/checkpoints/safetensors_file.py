"""Checkpoints as ``.safetensors``: the label path is the tensor's name.

The library writes files. They are read without it, because version 0.8.0 gives NumPy no
8-bit floats, maps whole files into memory, and takes names that occur twice. Leaves of
one buffer are stored once: one entry of the header's text metadata says which paths
share a tensor, and which were not arrays; PyTorch's ``save_model`` has an entry for
each path. A folder of shards has an index, as Hugging Face's tools write it; one shard
is on the host at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from treeadapt.checkpoints import shard_index
from treeadapt.checkpoints.array_boxes import FileArray
from treeadapt.checkpoints.decoded_array import Codes, PackedArray
from treeadapt.checkpoints.errors import AGAIN, refuse, reported
from treeadapt.checkpoints.record import (
    MAX_LEAVES,
    Leaf,
    Stored,
    abstract,
    marked,
    require_written,
    sound_marks,
)
from treeadapt.checkpoints.remote import AnyPath, read_range
from treeadapt.checkpoints.schema_file import marks_of
from treeadapt.checkpoints.shard_index import MARK, ending_of_shards
from treeadapt.errors import CheckpointError
from treeadapt.text.data_files import parse_json
from treeadapt.text.names import listing

_MAX_HEADER_BYTES = 64 * 2**20
ENDING = "safetensors"
WHOLE = "model.safetensors"  # in a folder, as Hugging Face's tools name the files
INDEX = f"{WHOLE}.index.json"
_RESERVED = "__metadata__"
_DTYPE_NAMES = (
    "BOOL:bool U8:uint8 U16:uint16 U32:uint32 U64:uint64 "
    "I8:int8 I16:int16 I32:int32 I64:int64 "
    "F16:float16 BF16:bfloat16 F32:float32 F64:float64 C64:complex64 "
    "F8_E4M3:float8_e4m3fn F8_E4M3FNUZ:float8_e4m3fnuz F8_E5M2:float8_e5m2 "
    "F8_E5M2FNUZ:float8_e5m2fnuz F8_E8M0:float8_e8m0fnu"
)
_DTYPES = dict(pair.split(":") for pair in _DTYPE_NAMES.split())
_PACKED = "F4"  # two in a byte, the low bits first (safetensors 0.6 and later)
#: A header of safetensors 0.6 and later may have these, and nothing says which bits of
#: a byte come first: 0.8.0 reads them neither to NumPy nor to PyTorch.
_SIX_BITS = ("F6_E2M3", "F6_E3M2")


def read_metadata(path: AnyPath) -> Stored:
    """Read names, shapes and dtypes; only headers are touched.

    Args:
        path: a file, the index of shards, or a folder with an index of that name.

    Raises:
        CheckpointError: a header is malformed, too large, or does not fit the file, or
            an index does not fit its folder.
    """
    if _is_file(path):
        return _of_file(path)
    return shard_index.joined_shards(path, _index_in(path), _of_file)


def checkpoints(folder: AnyPath) -> list[AnyPath]:
    """Return the indexes in a folder, and the files that are not shards of one."""
    return shard_index.checkpoints(folder, (ENDING,))


def index_of(file: Path) -> Path:
    """Return the index whose shards Hugging Face's tools take if a file is missing."""
    return file.with_name(f"{file.name}.index.json")


def parts(path: AnyPath) -> Iterator[AnyPath]:
    """Give the files of a checkpoint, the index before what it names is read.

    Raises:
        CheckpointError: it names what is not a file in its folder.
    """
    return iter([path]) if _is_file(path) else shard_index.parts(path, _index_in(path))


def read(stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Return leaves whose boxes can be read.

    Args:
        stored: what ``read_metadata`` returned.
        wanted: paths, in the order in which to give them.
    """
    for path in wanted:
        yield stored.table[path].key


def write(path: Path, arrays: Mapping[str, Any], table: Mapping[str, Leaf]) -> None:
    """Write arrays; the writer takes them all at once, on the host.

    Args:
        path: of the file.
        arrays: by label path.
        table: all leaves, also those that are tied to one of the arrays.

    Raises:
        CheckpointError: a name is reserved, the format lacks a dtype, or other
            processes have a part of an array.
    """
    import safetensors.numpy

    _check(arrays, table)
    on_host = {name: _on_host(leaf) for name, leaf in arrays.items()}
    # transformers and accelerate refuse texts without a format (safetensors#549).
    texts = {"format": "pt", MARK: json.dumps(marks_of(table))}
    path.touch()
    # safetensors 0.8.0 makes files that nobody else may read (safetensors#782).
    mode = path.stat().st_mode
    safetensors.numpy.save_file(on_host, path, metadata=texts)
    path.chmod(mode)


def write_shards(
    folder: Path,
    arrays: Iterable[tuple[str, Any]],
    table: Mapping[str, Leaf],
    max_shard_bytes: int,
) -> None:
    """Write a folder of shards and their index, one shard after the other.

    Args:
        folder: to make.
        arrays: by label path, in the order of ``table``; a shard is written before the
            arrays of the next one are taken.
        table: as for ``write``; each shard has what belongs to its arrays.
        max_shard_bytes: of the arrays in a shard; a larger leaf has one of its own.

    Raises:
        CheckpointError: as for ``write``; before any array is taken, if that is known.
    """
    plain = {name: leaf.array for name, leaf in table.items() if not leaf.owner}
    _check(plain, table)
    folder.mkdir()
    rest, shards, size_bytes = iter(arrays), _divided(plain, max_shard_bytes), 0
    files: dict[str, str] = {}
    for number, num_leaves in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        is_last = number == len(shards)  # to the end, where a reader checks its file
        in_shard = dict(rest if is_last else itertools.islice(rest, num_leaves))
        table_of_shard = {
            name: leaf
            for name, leaf in table.items()
            if (leaf.owner or name) in in_shard
        }
        write(folder / file, in_shard, table_of_shard)
        files |= dict.fromkeys(in_shard, file)
        size_bytes += sum(leaf.nbytes for leaf in in_shard.values())
        del in_shard  # before the next arrays are taken
    marks = marks_of(table)
    about = {name: marks[name] for name in ("version", "hash")}
    texts = {"total_size": size_bytes, MARK: about}
    document = {"metadata": texts, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(document, indent=2) + "\n", "utf-8")


def others(folder: Path) -> list[str] | None:
    """Return what a folder holds but an index and its shards; None without an index.

    Raises:
        CheckpointError: the index cannot be read.
    """
    entries = sorted(folder.iterdir())
    if entries and not (folder / INDEX).is_file():
        return None
    with reported(folder, "read"):
        names = shard_index.weight_map(folder, folder / INDEX)[0] if entries else {}
    shards = {*names.values()}
    expected = {INDEX} | {name for name in shards if name.endswith(".safetensors")}
    return [
        file.name
        for file in entries
        if file.name not in expected or file.is_symlink() or not file.is_file()
    ]


def _check(arrays: Mapping[str, Any], table: Mapping[str, Leaf]) -> None:
    """Raise unless the format can hold arrays, of which shapes may be all there is."""
    if _RESERVED in table:
        raise CheckpointError(f"A leaf of safetensors cannot be named {_RESERVED!r}.")
    for name, leaf in arrays.items():
        if leaf.dtype.name not in _DTYPES.values():
            problem = f"{leaf.dtype}, which safetensors has no name for"
        elif not getattr(leaf, "is_fully_addressable", True):
            problem = "also on devices of other processes"
        else:
            continue
        require_written(name, leaf.dtype.name)
        raise CheckpointError(
            f"The leaf {listing([name])} is {problem}. Save as an Orbax folder."
        )


def _on_host(leaf: Any) -> Any:
    """Return the array that the writer takes.

    A JAX array keeps the copy that is made of it for the host (jax#26216), and some
    versions of JAX free one only with Python's next garbage collection. So the shards
    are copied here, from a second JAX array of the same buffers, which nothing else
    holds. On a CPU they are memory that NumPy sees as it is.
    """
    if not isinstance(leaf, jax.Array) or leaf.sharding.num_devices == 1:
        return np.asarray(leaf, order="C")
    pieces = [shard.data for shard in leaf.addressable_shards]
    second = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)
    whole = np.empty(leaf.shape, leaf.dtype)
    for shard in second.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = shard.data
    return whole


def _divided(leaves: Mapping[str, Any], max_shard_bytes: int) -> list[int]:
    """Return how many leaves are in each shard; their order is kept."""
    counts: list[int] = []
    free_bytes = -1
    for leaf in leaves.values():
        size_bytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        if size_bytes > free_bytes:
            counts.append(0)
            free_bytes = max_shard_bytes
        counts[-1] += 1
        free_bytes -= size_bytes
    return counts


def _of_file(path: AnyPath) -> Stored:
    """Read what one file holds."""
    size_bytes = path.stat().st_size
    head = read_range(path, 0, 9)
    length, opening = head[:8], head[8:]
    data_bytes = 8 + int.from_bytes(length, "little")  # where the data starts
    if opening != b"{" and (opening or data_bytes - 8 > _MAX_HEADER_BYTES):
        seen = f"it begins with {head!r}, and not with the length of a header in JSON"
        cure = "So do pickles, which are not read." * (length[:1] == b"\x80")
        refuse(path, f"it is not a safetensors file: {seen}", cure)
    if data_bytes - 8 > _MAX_HEADER_BYTES:
        refuse(path, f"its header is larger than {_MAX_HEADER_BYTES >> 20} MiB")
    text = read_range(path, 8, data_bytes)
    if size_bytes < max(data_bytes, 10):  # the length, and ``{}`` at least
        refuse(path, f"it is cut off after {size_bytes:,} bytes, in its header", AGAIN)
    header = parse_json(text.decode())
    if not isinstance(header, dict):
        refuse(path, "its header is not a table of tensors")
    texts = header.pop(_RESERVED, {})
    marks = texts.get(MARK)
    if len(header) > MAX_LEAVES:
        refuse(path, f"it has {len(header):,} tensors")
    table = {}
    places: dict[tuple[int, int], str] = {}
    for name, entry in header.items():
        if entry["dtype"] in _SIX_BITS:
            _refuse_six_bits(path, name, entry["dtype"])
        dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
        dtype = "float4_e2m1fn" if dtype == _PACKED else dtype
        leaf = abstract(path, name, entry["shape"], dtype)
        start, stop = entry["data_offsets"]
        is_packed = entry["dtype"] == _PACKED
        if is_packed and (not leaf.shape or leaf.shape[-1] % 2):
            refuse(path, f"a byte of {listing([name])} has numbers of two rows")
        size = math.prod(leaf.shape) * leaf.dtype.itemsize // (1 + is_packed)
        if {type(start), type(stop)} != {int} or stop - start != size:
            refuse(path, f"the leaf {listing([name])} has another size than its data")
        places[start, stop] = name
        table[name] = Leaf(
            leaf, key=_array(path, data_bytes + start, leaf, is_packed=is_packed)
        )
    end = 0
    for start, stop in sorted(places):
        if start != end:
            name = listing([places[start, stop]])
            refuse(path, f"the data of {name} does not follow that of another leaf")
        end = stop
    if size_bytes != data_bytes + end:
        stated = f"its header describes {data_bytes + end:,}"
        is_cut = "is cut off after" if size_bytes < data_bytes + end else "has"
        refuse(path, f"it {is_cut} {size_bytes:,} bytes, and {stated}", AGAIN)
    if marks is None:
        return Stored(path, table | _shared(texts, table))
    return marked(path, table, sound_marks(path, parse_json(marks)))


def _refuse_six_bits(path: AnyPath, name: str, dtype: str) -> NoReturn:
    """Raise because numbers of 6 bits have no order in bytes that is written down."""
    refuse(
        path,
        f"the leaf {listing([name])} is {dtype}, numbers of 6 bits, and safetensors "
        "does not say in which order these are in bytes",
        "Whoever wrote them has to unpack them: safetensors.deserialize(data), of the "
        "bytes of the file, gives those of each leaf. F8_E4M3 holds all such numbers "
        "exactly, and is read.",
    )


def _array(path: AnyPath, start_bytes: int, leaf: Any, *, is_packed: bool) -> Any:
    """Return what reads an array of a file."""
    if not is_packed:
        return FileArray(path, start_bytes, leaf.shape, leaf.dtype)
    *rows, last = leaf.shape
    data = FileArray(path, start_bytes, (*rows, last // 2), np.dtype(np.uint8))
    codes = Codes(data, bits=4, axis=len(rows))
    return PackedArray(codes, leaf.shape, leaf.dtype)


def _shared(texts: Mapping[str, Any], table: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return the leaves that ``safetensors.torch.save_model`` left out, as tied ones.

    Of names that share a tensor it keeps the first in the alphabet, and the others are
    texts of the header, ``{"model.embed_tokens.weight": "lm_head.weight"}``. A name
    without a dot may be anything, as in ``{"base_model": "encoder"}``.
    """
    pairs = ((name, owner) for name, owner in texts.items() if "." in name)
    return {
        name: dataclasses.replace(table[owner], owner=owner)
        for name, owner in pairs
        if isinstance(owner, str) and owner in table and name not in table
    }


def _is_file(path: AnyPath) -> bool:
    """Return whether a checkpoint is one file, and not shards with their index."""
    return not path.is_dir() and ending_of_shards(path) != ENDING


def _index_in(path: AnyPath) -> AnyPath:
    """Return the index that a path, of a folder or of itself, means."""
    return path / INDEX if path.is_dir() else path
