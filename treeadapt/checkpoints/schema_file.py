"""Schemas as ``.schema.toml``: a checkpoint without its arrays, one line a leaf.

For git: a change of a model shows as the lines of the leaves that it changes. A line is
``"encoder/kernel" = "float32[8,3]"``; a Python number is ``"int"``, typed PRNG keys are
``"key<threefry2x32> uint32[2]"``, what is stored of them, and a leaf that is another
one is ``"tied to encoder/kernel"``. The hash of these texts marks every checkpoint that
this library writes, of any format.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax

from treeadapt.checkpoints.common import (
    MAX_LEAVES,
    NUMBER,
    Leaf,
    Stored,
    abstract,
    marked,
    require_dtype,
)
from treeadapt.convert import describe
from treeadapt.data_files import VERSION, DataFile
from treeadapt.errors import CheckpointError
from treeadapt.names import listing

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
_COMMENT = "# A tree without its values. After an edit, remove the line of the hash."
_NUMBERS = {"bool": "bool", "int64": "int", "float64": "float", "complex128": "complex"}
_DTYPES = {name: dtype for dtype, name in _NUMBERS.items()}
_TIE = "tied to "
_KEY = re.compile(r"key<(.+)>", re.DOTALL)
_ARRAY = re.compile(r"([a-z][a-z0-9_]*)\[((?:[0-9]{1,19},)*[0-9]{1,19})?\]")


def read_metadata(path: Path) -> Stored:
    """Read all that a schema holds.

    Raises:
        CheckpointError: it is malformed or too large.
    """
    document = _FILE.read(path)
    _FILE.check_fields(path, document, ("version", "hash", "leaves"))
    texts = document.get("leaves")
    if not isinstance(texts, dict):
        cure = f"Write {_FILE.table} above its lines."
        _FILE.refuse(path, "it has no table of leaves", cure)
    if len(texts) > MAX_LEAVES:
        seen = f"it has {len(texts):,} leaves"
        _FILE.refuse(path, seen, f"At most {MAX_LEAVES:,}.")
    table: dict[str, Leaf] = {}
    ties: dict[str, str] = {}
    for name, text in texts.items():
        if isinstance(text, str) and text.startswith(_TIE):
            ties[name] = text.removeprefix(_TIE)
        else:
            table[name] = _leaf(path, name, text)
    kinds = {name: leaf.kind for name, leaf in table.items() if leaf.kind}
    kinds |= {name: kinds[one] for name, one in ties.items() if one in kinds}
    made = marked(path, table, {"ties": ties, "kinds": kinds})
    in_order = {name: made[name] for name in texts}
    return Stored(path, in_order, hash=str(document.get("hash", "")))


def read(stored: Stored, wanted: Iterable[str]) -> NoReturn:
    """Raise, because a schema has nothing to read.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(
        f"{listing([os.fspath(stored.path)])} is a schema and holds no arrays. Name a "
        "checkpoint; load(schema) without a target gives abstract leaves."
    )


def write(path: Path, leaves: Mapping[str, Any], marks: Mapping[str, Any]) -> None:
    """Write shapes and dtypes.

    Args:
        path: of the file.
        leaves: what has a shape and a dtype, also for tied leaves.
        marks: as for ``files.write``.

    Raises:
        CheckpointError: a dtype is unknown, a path is not valid Unicode, or the file
            would be too large to be read.
    """
    for name, leaf in leaves.items():
        require_dtype(name, leaf.dtype)
    texts = entries(leaves, marks).items()
    text = hashed(leaves, marks)["hash"]
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


def hashed(
    leaves: Mapping[str, Any], marks: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return marks with the hash of all that a schema says, in any order of the leaves.

    Args:
        leaves: what has a shape and a dtype, with tied leaves or without.
        marks: as for ``files.write``.
    """
    texts = json.dumps(sorted(entries(leaves, marks).items()))
    return {**marks, "hash": hashlib.sha256(texts.encode()).hexdigest()[:16]}


def entries(leaves: Mapping[str, Any], marks: Mapping[str, Any]) -> dict[str, str]:
    """Return what a schema says of each leaf, in the order of ``leaves``."""
    kinds = marks["kinds"]
    texts = {
        name: _text(tuple(leaf.shape), leaf.dtype, kinds.get(name, ""))
        for name, leaf in leaves.items()
    }
    return texts | {name: f"{_TIE}{one}" for name, one in marks["ties"].items()}


# The leaves of a large model have few shapes.
@functools.lru_cache(maxsize=4_096)
def _text(shape: tuple[int, ...], dtype: Any, kind: str) -> str:
    if kind == NUMBER:
        return _NUMBERS.get(dtype.name, f"{NUMBER} {dtype.name}[]")
    text = describe(jax.ShapeDtypeStruct(shape, dtype))
    return f"key<{kind}> {text}" if kind else text


def _leaf(path: Path, name: str, text: Any) -> Leaf:
    """Read what ``_text`` wrote."""
    given = str(text)
    if given in _DTYPES:
        given = f"{NUMBER} {_DTYPES[given]}[]"
    kind, _, array = given.rpartition(" ")
    key, found = _KEY.fullmatch(kind), _ARRAY.fullmatch(array)
    if type(text) is not str or not found or not (key or kind in ("", NUMBER)):
        cure = f"Write shape and dtype, {_FILE.line}, or the type of a number."
        seen = f"the leaf {listing([name])} is {listing([str(text)])}"
        _FILE.refuse(path, seen, cure)
    shape = tuple(map(int, filter(None, (found[2] or "").split(","))))
    return Leaf(abstract(path, name, shape, found[1]), key[1] if key else kind)
