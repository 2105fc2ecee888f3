"""Arrays of a checkpoint, once it is known what it holds.

Takes what ``opening`` found; gives arrays, of any format, each of which is what the
metadata said, or an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from treeadapt.checkpoints import in_memory
from treeadapt.checkpoints.array_boxes import (
    FileArray,
    ReadArray,
    read_together,
    requests_for,
)
from treeadapt.checkpoints.errors import refuse, reported
from treeadapt.checkpoints.locating import FORMATS
from treeadapt.checkpoints.record import TREE, Stored
from treeadapt.checkpoints.remote import REQUESTS, RemotePath
from treeadapt.migrations.box_parts import Box, lengths, whole
from treeadapt.text.names import listing
from treeadapt.trees.arrays import empty
from treeadapt.trees.describing import describe

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
    with reported(stored.path, "read"):
        reader = in_memory if stored.format == TREE else FORMATS[stored.format]
        arrays = reader.read(stored, wanted)
        for path, array in zip(wanted, arrays, strict=True):
            stated = stored.table[path].array
            if array.shape != stated.shape or array.dtype != stated.dtype:
                refuse(
                    stored.path,
                    f"its metadata says that {listing([path])} is {describe(stated)}, "
                    f"and its content is {describe(array)}",
                )
            yield path, array


def read_ahead(
    stored: Stored,
    pairs: Iterable[tuple[str, Any]],
    boxes_of: Callable[[str, Any], Sequence[Box]] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield leaves, for many of which remote files are asked at the same time.

    Args:
        stored: the checkpoint.
        pairs: path and array of what ``read_arrays`` reads, or a migration makes of it.
        boxes_of: returns the boxes of an array that are to be read of one that reads
            its data later; None for whole arrays.

    Yields:
        The same, without what is of a remote file.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    file = stored.path
    if not isinstance(file, RemotePath):
        yield from pairs
        return

    def jobs() -> Iterator[tuple[str, Any, Sequence[Box]]]:
        for path, array in pairs:
            boxes = boxes_of(path, array) if boxes_of else [whole(array.shape)]
            yield path, array, boxes if hasattr(array, "read") else []

    def bytes_of(job: tuple[str, Any, Sequence[Box]]) -> int:
        shapes = map(lengths, job[2]) if job[2] else [job[1].shape]
        return sum(map(math.prod, shapes)) * int(job[1].dtype.itemsize)

    max_bytes = file.store.max_bytes // 2
    for batch in batches(jobs(), bytes_of, max_bytes):
        with reported(file, "read"):
            of_files = {
                path: (array, boxes, [empty(lengths(b), array.dtype) for b in boxes])
                for path, array, boxes in batch
                if isinstance(array, FileArray)
            }
            read_together(of_files.values(), max_bytes)
            arrays = {path: new for path, (*_, new) in of_files.items()}
            later = [job for job in batch if job[2] and job[0] not in arrays]
            with ThreadPoolExecutor(REQUESTS) as pool:  # an error of one is of all
                made = pool.map(lambda job: job[1].read(job[2]), later)
                arrays |= {job[0]: new for job, new in zip(later, made, strict=True)}
        del of_files
        for path, array, boxes in batch:
            if path in arrays:
                shape, dtype = tuple(array.shape), array.dtype
                array = ReadArray(shape, dtype, boxes, arrays.pop(path))
            yield path, array
            del array  # before the next leaves are read


def extra_bytes(
    stored: Stored,
    pairs: Iterable[tuple[str, Any]],
    boxes_of: Callable[[str, Any], Sequence[Box]],
) -> int:
    """Return how much more than boxes is read of remote files, as between short ranges.

    Args:
        stored: the checkpoint.
        pairs: as for ``read_ahead``; of which no array is read.
        boxes_of: as for ``read_ahead``.
    """
    if not isinstance(stored.path, RemotePath):
        return 0
    files = [
        (it, boxes_of(path, it)) for path, it in pairs if isinstance(it, FileArray)
    ]
    files.sort(key=lambda job: job[0].place)
    needed = sum(
        math.prod(lengths(box)) * array.dtype.itemsize
        for array, boxes in files
        for box in boxes
    )
    return sum(stop - start for _, start, stop in requests_for(files)) - needed


def batches(
    items: Iterable[_T], bytes_of: Callable[[_T], int], max_bytes: int | None = None
) -> Iterator[list[_T]]:
    """Yield items so many at a time that reading their arrays together pays.

    Args:
        items: what is to be read.
        bytes_of: returns how many bytes the arrays of one have.
        max_bytes: of the arrays of a batch, but for those of the last item; None for as
            many as pay.
    """
    batch: list[_T] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += bytes_of(item)
        if num_bytes >= (max_bytes or _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
