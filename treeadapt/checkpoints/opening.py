"""What a checkpoint holds, without its arrays.

Takes a name; gives what one file or folder in any format holds, and an error if another
checkpoint comes to its place before all is read. See ``locating`` for the formats,
``reading`` for arrays and ``writing`` for new checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from treeadapt.checkpoints import schema_file
from treeadapt.checkpoints.decoding import decoded, may_be_quantized
from treeadapt.checkpoints.errors import named_path, refuse, reported
from treeadapt.checkpoints.in_memory import listed_tree
from treeadapt.checkpoints.locating import (
    FORMATS,
    last_step,
    located,
    near_name,
    require_content,
)
from treeadapt.checkpoints.quantization_config import stated_in
from treeadapt.checkpoints.record import Stored
from treeadapt.checkpoints.remote import MAX_INFLIGHT_BYTES, AnyPath, checkpoint_path
from treeadapt.checkpoints.replacing import restore
from treeadapt.checkpoints.versions import stamp, watched
from treeadapt.errors import CheckpointError, TreeAdaptWarning
from treeadapt.migrations.tables.published import CONFIG
from treeadapt.text.names import first_rows, listing

_OF_PARTS = ("safetensors", "orbax", "torch")  # may be several files
_OF_CODES = ("safetensors", "torch")  # in which models are published quantised


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str] | Any,
    max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    chosen: Callable[[str], str] = str,
    *,
    decode: bool = True,
    likes: Mapping[str, Any] | None = None,
) -> Iterator[Stored]:
    """Read all that is known of a checkpoint without its arrays, and watch over it.

    A warning says what another program made untrue of what was written next to the
    arrays; the file counts then.

    Args:
        path: as for ``load``; of a tree there is nothing to watch over.
        max_inflight_bytes: as for ``load``.
        chosen: returns the step that all processes take, given that of this one.
        decode: whether arrays that are stored as codes and scales are one leaf each.
        likes: leaves of the target by path; parts that it has stay as they are stored.

    Yields:
        What it holds; read its arrays before the end.

    Raises:
        CheckpointError: the checkpoint cannot be read, a schema has another hash than
            that of its leaves, or, whatever else goes wrong, another checkpoint came to
            the path before the end.
    """
    if not isinstance(path, str | os.PathLike):
        stored = listed_tree(path)
        if not stored.table:
            named_path(path)  # which refuses it
        yield stored
        return
    name = checkpoint_path(path, max_inflight_bytes)
    version: dict[AnyPath, tuple[Any, ...]] = {}
    if isinstance(name, Path) and not name.exists():
        restore(name.absolute())
    with reported(name, "read"):
        step, others = last_step(name)
    step = chosen(step)
    if step:
        folder, name = name, name / step
    if others:
        warnings.warn(
            f"{listing([str(folder)])} holds several steps. The last that is complete, "
            f"{listing([step])}, is read; there are {others}. Name it, "
            f"{listing([str(name)])}, to end this warning.",
            TreeAdaptWarning,
            stacklevel=4,
        )
    with watched(name, version):
        stored = _listed(name, version)
        if decode and stored.format in _OF_CODES:
            stored = _decoded(stored, version, likes or {})
        if stored.doubts:
            warnings.warn(
                f"The checkpoint {listing([str(name)])} is read as it is now: "
                f"{'; '.join(first_rows(stored.doubts))}. Save it again to end this "
                "warning.",
                TreeAdaptWarning,
                stacklevel=4,
            )
        yield stored


def read_stored(path: str | os.PathLike[str], *, decode: bool = True) -> Stored:
    """Return what ``opened`` yields, of a checkpoint whose arrays are not read.

    Raises:
        CheckpointError: as for ``opened``.
    """
    with opened(path, decode=decode) as stored:
        return stored


def _listed(name: AnyPath, version: dict[AnyPath, tuple[Any, ...]]) -> Stored:
    """Return what a checkpoint holds.

    Args:
        name: of a file or folder.
        version: gets the stamp of each file that is read, before it is.
    """
    if not name.exists():
        hint = near_name(name) if isinstance(name, Path) else ""
        if "*" in str(name):
            hint = " Patterns are not read; name the folder of the shards."
        elif str(name).startswith("~"):
            hint = " ~ stands for nothing here: pass pathlib.Path(name).expanduser()."
        raise CheckpointError(f"There is no checkpoint {listing([str(name)])}.{hint}")
    with reported(name, "read"):
        version[name] = stamp(name)
        name, kind = located(name)
        reader = FORMATS[kind]
        for file in reader.parts(name) if kind in _OF_PARTS else (name,):
            require_content(file)
            version[file] = stamp(file)
        stored = _compared_with_hash(reader.read_metadata(name), kind)
    return dataclasses.replace(stored, version=version, format=kind)


def _decoded(
    stored: Stored, version: dict[AnyPath, tuple[Any, ...]], likes: Mapping[str, Any]
) -> Stored:
    """Return what is stored with decoded arrays, if it is not as ``save`` wrote it."""
    if not may_be_quantized(stored):
        return stored
    path = stored.path
    with reported(path, "read"):
        config = (path if path.is_dir() else path.parent) / CONFIG
        if config.is_file():
            version[config] = stamp(config)
        stated = stated_in(path, config)
        is_own = stored.hash and not stated.fields
        return stored if is_own else decoded(stored, stated, likes)


def _compared_with_hash(stored: Stored, kind: str) -> Stored:
    """Return what is stored, with doubts if leaves are not those that were written.

    Raises:
        CheckpointError: they are not, in a schema.
    """
    text = schema_file.marks_of(stored.table)["hash"] if stored.hash else ""
    if stored.hash == text:
        return stored
    parts = "paths, shapes, dtypes and ties"
    problem = f"its {parts} are not those that it was written with"
    if kind == "schema":
        problem += f"; their hash is {text!r} and not {stored.hash!r:.60}"
        cure = f'To accept them, write hash = "{text}" in it, or remove that line.'
        refuse(stored.path, problem, cure)
    return dataclasses.replace(stored, doubts=(problem, *stored.doubts))
