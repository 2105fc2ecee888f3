"""Checkpoints as ``.npz``: NumPy's reader and writer, one leaf at a time.

A member is named after its label path; what a file system could take for more than a
name is percent-encoded, and the path itself stands in the member's zip comment, as do
the name of a dtype that NumPy's format lacks (bfloat16, fp8) and the paths of tied
leaves. Any ``np.load`` reads the file; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treeadapt.checkpoints.common import (
    MAX_LEAVES,
    Stored,
    abstract,
    escape_segment,
    refuse,
)
from treeadapt.errors import CheckpointError, listing

_ENDING = ".npy"
_MAX_COMMENT = 65_535
_MAX_HEADER = 10_000
_SAFE = re.compile(r"(?!\.)[\w.+=~()\[\],@ -]+", re.ASCII)
_RAW = {1: "uint8", 2: "uint16"}  # what holds the bits of an extended dtype


def read_metadata(path: Path) -> Stored:
    """Read names, shapes and dtypes from the members' headers; no array is loaded.

    Raises:
        CheckpointError: the archive is damaged, or holds something else than arrays.
    """
    leaves, names = {}, {}
    ties: dict[str, str] = {}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > MAX_LEAVES:
            refuse(path, f"it has {len(members):,} members")
        for member in members:
            one, dtype, others = _described(path, member)
            leaf = _leaf(path, archive, member, dtype)
            for name in (one, *others):
                if name in leaves:
                    refuse(path, f"a name occurs twice: {listing([name])}")
                leaves[name], names[name] = leaf, member
            ties |= dict.fromkeys(others, one)
    return Stored(leaves, names, ties)


def read(path: Path, stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Read leaves, one at a time.

    Args:
        path: the file.
        stored: its metadata.
        wanted: paths, in the order in which to give them.
    """
    with zipfile.ZipFile(path) as archive:
        for one in wanted:
            with archive.open(stored.names[one]) as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
            dtype = stored.leaves[one].dtype
            # Bits of an extended dtype; or another byte order.
            extended = dtype.isbuiltin != 1
            yield array.view(dtype) if extended else array.astype(dtype, copy=False)


def write(
    path: Path, leaves: Iterable[tuple[str, Any]], ties: Mapping[str, str]
) -> None:
    """Write leaves, one at a time.

    Raises:
        CheckpointError: a name is too long.
    """
    others: dict[str, list[str]] = {}
    for other, one in ties.items():
        others.setdefault(one, []).append(other)
    with zipfile.ZipFile(path, "x", allowZip64=True) as archive:
        for name, leaf in leaves:
            member = zipfile.ZipInfo(_member_name(name))
            member.comment = _comment(name, leaf, others.get(name, []))
            array = np.asarray(leaf)
            if array.dtype.isbuiltin != 1:
                array = array.view(_RAW[array.dtype.itemsize])
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _member_name(name: str) -> str:
    segments = name.split("/")
    return (
        "/".join(s if _SAFE.fullmatch(s) else escape_segment(s) for s in segments)
        + _ENDING
    )


def _comment(name: str, leaf: Any, others: list[str]) -> bytes:
    facts: dict[str, Any] = {}
    if _member_name(name) != name + _ENDING:
        facts["path"] = name
    if leaf.dtype.isbuiltin != 1:
        facts["dtype"] = leaf.dtype.name
    if others:
        facts["also"] = others
    text = json.dumps({"treeadapt": 1, **facts}).encode() if facts else b""
    if len(text) > _MAX_COMMENT:
        raise CheckpointError(
            f"The name {listing([name])} is too long for .npz; save as .safetensors."
        )
    return text


def _described(
    path: Path, member: zipfile.ZipInfo
) -> tuple[str, str | None, list[str]]:
    """Return a member's label path, its extended dtype, and the paths tied to it."""
    if not member.filename.endswith(_ENDING):
        refuse(path, f"the member {listing([member.filename])} is no array")
    name = member.filename.removesuffix(_ENDING)
    if not member.comment.startswith(b'{"treeadapt": 1'):
        return name, None, []
    facts = json.loads(member.comment)
    name, dtype, others = facts.get("path", name), facts.get("dtype"), facts.get("also")
    others = others or []
    if not isinstance(others, list) or not all(
        isinstance(text, str) for text in (name, dtype or "", *others)
    ):
        refuse(path, f"the member {listing([member.filename])} is described wrongly")
    return name, dtype, others


def _leaf(
    path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, dtype: str | None
) -> Any:
    formats: Any = np.lib.format
    with archive.open(member) as file:
        version = formats.read_magic(file)
        readers = {
            (1, 0): formats.read_array_header_1_0,
            (2, 0): formats.read_array_header_2_0,
        }
        if version not in readers:
            refuse(path, f"{listing([member.filename])} is of an unknown version")
        shape, _, plain = readers[version](file, max_header_size=_MAX_HEADER)
        header_bytes = file.tell()
    name = member.filename.removesuffix(_ENDING)
    if plain.kind == "V" and dtype is None:
        refuse(
            path,
            f"the leaf {listing([name])} has lost its dtype, as bfloat16 does in "
            "np.savez",
            "Write it with treeadapt.save, or as .safetensors.",
        )
    leaf = abstract(path, name, shape, dtype or plain.newbyteorder("=").name)
    if dtype and (leaf.dtype.isbuiltin == 1 or plain != _RAW[leaf.dtype.itemsize]):
        refuse(path, f"the leaf {listing([name])} is no {dtype}")
    size_bytes = math.prod(leaf.shape) * plain.itemsize
    if plain.hasobject or header_bytes + size_bytes != member.file_size:
        refuse(path, f"the leaf {listing([name])} does not fill its member")
    return leaf
