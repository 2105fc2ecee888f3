"""Schemas as ``.schema.toml``: a checkpoint without its arrays, one line a leaf.

For git: a change of a model shows as the lines of the leaves that it changes. A line is
``"encoder/kernel" = "float32[8,3]"``; a Python number is ``"int"``, typed PRNG keys are
``"key<threefry2x32> uint32[2]"``, what is stored of them, and a leaf that is another
one is ``"tied to encoder/kernel"``. The hash of these texts marks every checkpoint that
this library writes, of any format.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from treeadapt.checkpoints.errors import refuse
from treeadapt.checkpoints.record import (
    MARKS_VERSION,
    MAX_LEAVES,
    NUMBER,
    Leaf,
    Stored,
    abstract,
    marked,
    require_form,
)
from treeadapt.checkpoints.remote import AnyPath
from treeadapt.errors import CheckpointError
from treeadapt.text.data_files import VERSION, DataFile, FileField
from treeadapt.text.names import listing
from treeadapt.trees.describing import describe

ENDING = ".schema.toml"
# Eight times the 22,000 leaves of a large mixture of experts; read in seconds.
MAX_BYTES = 16 * 2**20
_FILE = DataFile(
    "schema",
    CheckpointError,
    "[leaves]",
    '"encoder/kernel" = "float32[8,3]"',
    MAX_BYTES,
    is_flat=True,
)
_LEAVES = FileField("a table", "[leaves] above its lines", MAX_LEAVES, is_required=True)
_COMMENT = "# A tree without its values. After an edit, remove the line of the hash."
# What a Python number is stored as, and its type.
_NUMBERS = {"bool": "bool", "int64": "int", "float64": "float", "complex128": "complex"}
_DTYPES = {name: dtype for dtype, name in _NUMBERS.items()}
_TIE = "tied to "
_KEY = re.compile(r"key<(.+)>", re.DOTALL)
_ARRAY = re.compile(r"([a-z][a-z0-9_]*)\[((?:[0-9]{1,19},)*[0-9]{1,19})?\]")


def read_metadata(path: AnyPath) -> Stored:
    """Read all that a schema holds.

    Raises:
        CheckpointError: it is malformed or too large.
    """
    document = _FILE.read(path)
    _FILE.check(path, document, {"hash": FileField(), "leaves": _LEAVES})
    texts = document["leaves"]
    table: dict[str, Leaf] = {}
    ties: dict[str, str] = {}
    for name, text in texts.items():
        if isinstance(text, str) and text.startswith(_TIE):
            ties[name] = text.removeprefix(_TIE)
        else:
            table[name] = _leaf(path, name, text)
    kinds = {name: leaf.kind for name, leaf in table.items() if leaf.kind}
    stored = marked(path, table, {**document, "ties": ties, "kinds": kinds})
    for doubt in stored.doubts:  # people wrote it
        refuse(path, doubt)
    in_order = {name: stored.table[name] for name in texts}
    return dataclasses.replace(stored, table=in_order)


def write(path: Path, table: Mapping[str, Leaf]) -> None:
    """Write what is known of leaves without their values.

    Raises:
        CheckpointError: no file holds a dtype or a shape, a path is not valid Unicode,
            or the file would be too large to be read.
    """
    for name, leaf in table.items():
        require_form(name, leaf.array)
    texts = entries(table).items()
    text = marks_of(table)["hash"]
    lines = [_COMMENT, f"version = {VERSION}", f'hash = "{text}"']
    lines += ["", _FILE.table]
    lines += [f"{_FILE.string(name)} = {_FILE.string(text)}" for name, text in texts]
    data = ("\n".join(lines) + "\n").encode()
    if len(data) > MAX_BYTES or len(texts) > MAX_LEAVES:
        raise CheckpointError(
            f"The schema of {len(texts):,} leaves has {len(data):,} bytes, and at most "
            f"{MAX_LEAVES:,} leaves and {MAX_BYTES:,} bytes are read. Choose leaves "
            "with where=."
        )
    path.write_bytes(data)


def marks_of(table: Mapping[str, Leaf]) -> dict[str, Any]:
    """Return what files hold next to arrays: ties, kinds, and a hash of all leaves.

    The hash is that of all that a schema says, in any order of the leaves.
    """
    texts = json.dumps(sorted(entries(table).items()))
    return {
        "version": MARKS_VERSION,
        "ties": {name: leaf.owner for name, leaf in table.items() if leaf.owner},
        "kinds": {name: leaf.kind for name, leaf in table.items() if leaf.kind},
        "hash": hashlib.sha256(texts.encode()).hexdigest()[:16],
    }


def entries(table: Mapping[str, Leaf]) -> dict[str, str]:
    """Return what a schema says of each leaf."""
    return {
        name: f"{_TIE}{leaf.owner}"
        if leaf.owner
        else _text(tuple(leaf.array.shape), leaf.array.dtype, leaf.kind)
        for name, leaf in table.items()
    }


# The leaves of a large model have few shapes.
@functools.lru_cache(maxsize=4_096)
def _text(shape: tuple[int, ...], dtype: Any, kind: str) -> str:
    if kind == NUMBER:
        return _NUMBERS.get(dtype.name, f"{NUMBER} {dtype.name}[]")
    text = describe(jax.ShapeDtypeStruct(shape, dtype))
    return f"key<{kind}> {text}" if kind else text


def _leaf(path: AnyPath, name: str, text: Any) -> Leaf:
    """Read what ``_text`` wrote."""
    wording = str(text)
    if wording in _DTYPES:
        wording = f"{NUMBER} {_DTYPES[wording]}[]"
    kind, _, array = wording.rpartition(" ")
    key, match = _KEY.fullmatch(kind), _ARRAY.fullmatch(array)
    if type(text) is not str or not match or not (key or kind in ("", NUMBER)):
        cure = f"Write shape and dtype, {_FILE.line}, or the type of a number."
        seen = f"the leaf {listing([name])} is {listing([str(text)])}"
        _FILE.refuse(path, seen, cure)
    shape = tuple(map(int, filter(None, (match[2] or "").split(","))))
    return Leaf(abstract(path, name, shape, match[1]), key[1] if key else kind)
