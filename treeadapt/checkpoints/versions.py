"""Versions: whether what is at a path is still the checkpoint that was opened."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from treeadapt.checkpoints.errors import reported
from treeadapt.errors import CheckpointError
from treeadapt.names import listing


@contextlib.contextmanager
def watched(path: Path, version: Mapping[Path, tuple[int, ...]]) -> Iterator[None]:
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
            is_same = all(stamp(file) == before for file, before in version.items())
        if not is_same:
            raise CheckpointError(
                f"The checkpoint {listing([str(path)])} was replaced while it was "
                "read. Read it again."
            )


def stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when another file or folder comes to a path.

    Files that come into a folder, and links to a file or its mode, change nothing.
    """
    try:
        facts = path.stat()
    except FileNotFoundError:
        return ()
    if stat.S_ISDIR(facts.st_mode):
        return (facts.st_ino,)
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
