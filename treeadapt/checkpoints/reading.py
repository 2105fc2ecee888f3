"""Arrays of a checkpoint, once it is known what it holds.

Takes what ``opening`` found; gives arrays, of any format, each of which is what the
metadata said, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from treeadapt.checkpoints import in_memory
from treeadapt.checkpoints.errors import refuse, reported
from treeadapt.checkpoints.locating import FORMATS
from treeadapt.checkpoints.stored import TREE, Stored
from treeadapt.convert import describe
from treeadapt.names import listing

_BATCH_BYTES = 2**28
_T = TypeVar("_T")


def read_arrays(stored: Stored, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Read leaves, each of which must be what the metadata said.

    What is yielded may read its data later: use it while it is ``opened``.

    Args:
        stored: the checkpoint, maybe with the paths of a model.
        wanted: the leaves to read, and for each the sharding to read it to, or None
            for the host.

    Yields:
        Path and array.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    if not wanted:
        return
    stored.require_arrays()
    path = stored.path
    with reported(path, "read"):
        reader = in_memory if stored.format == TREE else FORMATS[stored.format]
        arrays = reader.read(stored, wanted)
        for one, array in zip(wanted, arrays, strict=True):
            stated = stored.table[one].array
            if array.shape != stated.shape or array.dtype != stated.dtype:
                refuse(
                    path,
                    f"its metadata says that {listing([one])} is {describe(stated)}, "
                    f"and its content is {describe(array)}",
                )
            yield one, array


def batches(items: Iterable[_T], bytes_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield items so many at a time that reading their arrays together pays.

    Args:
        items: what is to be read.
        bytes_of: returns how many bytes the arrays of one have.
    """
    batch: list[_T] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += bytes_of(item)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
