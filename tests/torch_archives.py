"""Files of PyTorch, written byte by byte as ``torch.save`` writes them, without it."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
EMPTY = b"ccollections\nOrderedDict\n)R"


def integer(number: int) -> bytes:
    return b"\x8a\x08" + number.to_bytes(8, "little", signed=True)


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def several(*items: bytes) -> bytes:
    """The opcodes of a tuple."""
    return b"(" + b"".join(items) + b"t"


def table(items: Mapping[Any, bytes], *, ordered: bool = False) -> bytes:
    pairs = b"".join((value_of(key)) + value for key, value in items.items())
    return (EMPTY if ordered else b"}") + b"(" + pairs + b"u"


def value_of(value: Any) -> bytes:
    """The opcodes of a plain value: None, bool, int, float, str, list or dict."""
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return table({key: value_of(each) for key, each in value.items()})
    return b"](" + b"".join(map(value_of, value)) + b"e"


def storage(key: str, kind: str, size: int) -> bytes:
    of = f"ctorch\n{kind}Storage\n".encode()
    if kind == "Untyped":
        of = b"ctorch.storage\nUntypedStorage\n"
    return several(text("storage"), of, text(key), text("cpu"), integer(size)) + b"Q"


def tensor(
    key: str,
    kind: str,
    size: int,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    offset: int = 0,
    more: Sequence[bytes] = (),
    version: str = "_v2",
) -> bytes:
    """The opcodes of a tensor that is a view of a storage."""
    if strides is None:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    arguments = several(
        storage(key, kind, size),
        integer(offset),
        several(*map(integer, shape)),
        several(*map(integer, strides)),
        b"\x89",
        EMPTY,
        *more,
    )
    return f"ctorch._utils\n_rebuild_tensor{version}\n".encode() + arguments + b"R"


def parameter(opcodes: bytes) -> bytes:
    return (
        b"ctorch._utils\n_rebuild_parameter\n" + several(opcodes, b"\x88", EMPTY) + b"R"
    )


class Storages:
    """The storages of an archive, as tensors of arrays are written."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def whole(self, array: Any) -> bytes:
        """The opcodes of an array that has a storage of its own."""
        key = str(len(self.arrays))
        self.arrays[key] = array
        return tensor(key, KINDS[array.dtype.name], array.size, array.shape)

    def tree(self, node: Any) -> bytes:
        """The opcodes of dicts and lists of arrays and plain values."""
        if isinstance(node, np.ndarray):
            return self.whole(node)
        if isinstance(node, dict):
            return table({key: self.tree(value) for key, value in node.items()})
        if isinstance(node, list | tuple):
            return b"](" + b"".join(map(self.tree, node)) + b"e"
        return value_of(node)


def archive(
    pickled: bytes,
    storages: Mapping[str, Any],
    *,
    order: bytes = b"little",
    name: str = "archive",
    compression: int = zipfile.ZIP_STORED,
    extra: Mapping[str, bytes] | None = None,
) -> bytes:
    """The bytes of a file, given the opcodes of what is saved."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", compression) as out:
        out.writestr(f"{name}/data.pkl", b"\x80\x02" + pickled + b".")
        out.writestr(f"{name}/byteorder", order)
        for key, array in storages.items():
            data = array if isinstance(array, bytes) else np.asarray(array).tobytes()
            out.writestr(f"{name}/data/{key}", data)
        out.writestr(f"{name}/version", b"3\n")
        for member, data in (extra or {}).items():
            out.writestr(f"{name}/{member}", data)
    return raw.getvalue()


def saved(tree: Any) -> bytes:
    """The bytes of a file of dicts and lists of arrays and plain values."""
    storages = Storages()
    pickled = storages.tree(tree)
    return archive(pickled, storages.arrays)


def save(path: Path, tree: Any) -> None:
    path.write_bytes(saved(tree))
