"""Versions: whether what is at a path is still the checkpoint that was opened."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from treeadapt.checkpoints.errors import reported
from treeadapt.checkpoints.remote import AnyPath, RemotePath, mapped
from treeadapt.errors import CheckpointError
from treeadapt.text.names import listing


@contextlib.contextmanager
def watched(
    path: AnyPath, version: Mapping[AnyPath, tuple[Any, ...]]
) -> Iterator[None]:
    """Report that another checkpoint came to the path, whatever else goes wrong.

    Args:
        path: of the checkpoint, for messages.
        version: as ``Stored`` has it; what is in it at the end counts.

    Raises:
        CheckpointError: it did.
    """
    try:
        yield
    finally:
        with reported(path, "read"):
            stamps = mapped(lambda file: stamp(file, again=True), version)
            is_same = [*stamps] == [*version.values()]
        if not is_same:
            raise CheckpointError(
                f"The checkpoint {listing([str(path)])} was replaced while it was "
                "read. Read it again."
            )


def stamp(path: AnyPath, *, again: bool = False) -> tuple[Any, ...]:
    """Return what changes when another file or folder comes to a path.

    Files that come into a folder, and links to a file or its mode, change nothing.

    Args:
        path: of the file or folder.
        again: ask a remote store for it although an answer is known.
    """
    if isinstance(path, RemotePath):
        return path.stamp(again=again)
    try:
        facts = path.stat()
    except FileNotFoundError:
        return ()
    if stat.S_ISDIR(facts.st_mode):
        return (facts.st_ino,)
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
