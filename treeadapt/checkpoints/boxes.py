"""Boxes: parts of arrays, read from a file and put together on devices.

A box is a slice with start and stop for each axis. ``FileArray`` is an array in a file,
of which boxes are read; ``on_devices`` makes the array of a sharding from the boxes of
this process's devices, so that no process reads or holds what it does not need.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from treeadapt.arrays import empty
from treeadapt.checkpoints.errors import refuse, reported
from treeadapt.checkpoints.remote import (
    REQUESTS,
    AnyPath,
    Recorder,
    RemotePath,
    Stream,
    fetch,
    joined,
)
from treeadapt.migrations.moved_array import bytes_read, read_boxes, walked
from treeadapt.migrations.parts import Box, around, lengths, whole

_BLOCK_BYTES = 2**20  # what is read at once and then distributed; it fits a cache


@dataclasses.dataclass(frozen=True)
class FileArray:
    """An array in a file, in row-major order.

    Attributes:
        path: the file.
        start_bytes: where it starts.
        shape: of the whole array.
        dtype: of the whole array.
    """

    path: AnyPath
    start_bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.read([whole(self.shape)])[0]

    def read(self, boxes: Sequence[Box], into: Sequence[Any] = ()) -> list[Any]:
        """Read boxes, each to an array of NumPy; what they share is read once.

        Args:
            boxes: of the array.
            into: contiguous arrays to fill, None for a new one; empty for new ones.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        arrays = [
            empty(lengths(box), self.dtype) if given is None else given
            for box, given in zip(boxes, into or [None] * len(boxes), strict=True)
        ]
        with reported(self.path, "read"):
            if isinstance(self.path, RemotePath):
                max_bytes = self.path.store.max_bytes // (2 * REQUESTS)
                read_together([(self, boxes, arrays)], max_bytes)
            else:
                with self.path.open("rb", 0) as file:
                    self.read_into(file, boxes, arrays)
        return arrays

    def read_into(self, file: Any, boxes: Sequence[Box], arrays: Sequence[Any]) -> None:
        """Fill contiguous arrays with what is in boxes, from the start to the end.

        Args:
            file: has ``seek`` and ``readinto``.
            boxes: of the array.
            arrays: as many.

        Raises:
            CheckpointError: the file ends before.
        """
        if not bytes_read(self, boxes):
            return
        every = whole(self.shape)
        if all(box == every for box in boxes):  # as of an array of no axes
            self._read_to(file, 0, arrays[0])
            for array in arrays[1:]:
                array[...] = arrays[0]
            return
        wanted = list(zip(boxes, arrays, strict=True))
        box_around = around([box for box, _ in wanted])
        depth, _ = walked(self.shape, self.dtype.itemsize, box_around)
        sizes = [math.prod(self.shape[k:]) for k in range(1, len(self.shape) + 1)]
        strides = [size * self.dtype.itemsize for size in sizes]
        while strides[depth] > _BLOCK_BYTES and depth < len(box_around) - 1:
            depth += 1  # so that a block is small however long the rows are
        rows, row_bytes = box_around[depth], strides[depth]
        step = max(1, _BLOCK_BYTES // row_bytes)
        block = np.empty(min(step, rows.stop - rows.start) * row_bytes, np.uint8)
        for outer in itertools.product(
            *(range(s.start, s.stop) for s in box_around[:depth])
        ):
            start_bytes = sum(map(operator.mul, outer, strides))
            overlaps = [
                (box[depth:], array[tuple(map(_minus, outer, box))])
                for box, array in wanted
                if all(map(_holds, box, outer))
            ]
            is_direct = len(overlaps) == 1 and overlaps[0][0][1:] == whole(
                self.shape[depth + 1 :]
            )
            if is_direct:  # its rows follow each other, there and here
                (box, array), start = overlaps[0], overlaps[0][0][0].start
                self._read_to(file, start_bytes + start * row_bytes, array)
                continue
            for first in range(rows.start, rows.stop, step):
                last = min(first + step, rows.stop)
                if not any(
                    b[0].start < last and first < b[0].stop for b, _ in overlaps
                ):
                    continue
                data = block[: (last - first) * row_bytes]
                self._read_to(file, start_bytes + first * row_bytes, data)
                elements = data.view(self.dtype).reshape(-1, *self.shape[depth + 1 :])
                for box, array in overlaps:
                    a, b = max(first, box[0].start), min(last, box[0].stop)
                    if a < b:
                        part = elements[(slice(a - first, b - first), *box[1:])]
                        array[a - box[0].start : b - box[0].start] = part

    def _read_to(self, file: Any, start_bytes: int, array: Any) -> None:
        """Fill a contiguous array with the bytes from a place on."""
        data = memoryview(array.reshape(-1).view(np.uint8))
        file.seek(self.start_bytes + start_bytes)
        while data:
            count = file.readinto(data)  # at most 2 GiB at once, on Linux
            if not count:
                refuse(self.path, "it ends before its last array")
            data = data[count:]


@dataclasses.dataclass(frozen=True)
class ReadArray:
    """An array of which some boxes were read.

    Attributes:
        shape: of the whole array.
        dtype: of the array.
        boxes: that were read, and no others can be.
        arrays: as many.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    boxes: Sequence[Box]
    arrays: Sequence[Any]

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.read([whole(self.shape)])[0]

    def read(self, boxes: Sequence[Box], _: Sequence[Any] = ()) -> list[Any]:
        """Return some of the boxes, the same arrays each time."""
        return [self.arrays[self.boxes.index(box)] for box in boxes]


def read_together(
    jobs: Iterable[tuple[FileArray, Sequence[Box], Sequence[Any]]], max_bytes: int
) -> None:
    """Fill arrays with boxes of remote files, for which requests are made together.

    Args:
        jobs: for each array, boxes and contiguous arrays to fill.
        max_bytes: as for ``fetch``.

    Raises:
        CheckpointError: a request failed.
    """
    jobs = sorted(jobs, key=lambda job: (str(job[0].path), job[0].start_bytes))
    stream = Stream(fetch(joined(_ranges(jobs)), max_bytes))
    for file_array, boxes, arrays in jobs:
        stream.path = file_array.path
        file_array.read_into(stream, boxes, arrays)


def _ranges(
    jobs: Iterable[tuple[FileArray, Sequence[Box], Sequence[Any]]],
) -> Iterator[tuple[Any, int, int]]:
    """Yield path, start and stop of all that is read for boxes, in order."""
    for file_array, boxes, arrays in jobs:
        recorder = Recorder()
        file_array.read_into(recorder, boxes, arrays)
        yield from ((file_array.path, *each) for each in recorder.ranges)


def boxes_here(sharding: Any, shape: Sequence[int]) -> list[Box]:
    """Return the boxes of this process's devices, each once; all without a sharding.

    Args:
        sharding: of JAX; None for the host.
        shape: of the whole array.

    Raises:
        ValueError: the sharding does not fit the shape.
    """
    if sharding is None:
        return [whole(shape)]
    indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
    boxes = (_box(index, shape) for index in indices)
    return [*{_key(box): box for box in boxes}.values()]


def on_devices(
    array: Any, sharding: Any, dtype: Any, changed: Callable[[Any], Any]
) -> jax.Array:
    """Read an array to the devices of a sharding; each box of it once.

    Args:
        array: as for ``read_boxes``.
        sharding: of JAX.
        dtype: of the result.
        changed: takes each box, and returns what goes to the device, of that dtype.

    Raises:
        ValueError: the sharding does not fit the shape.
    """
    shape = tuple(array.shape)
    boxes = boxes_here(sharding, shape)
    parts = dict(zip(map(_key, boxes), read_boxes(array, boxes), strict=True))
    for key in parts:
        parts[key] = changed(parts[key])

    def part(index: Any) -> Any:
        # JAX asks for one part even if none of the devices is of this process.
        return parts[_key(_box(index, shape))] if parts else False

    return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Return the box of an index of JAX."""
    pairs = zip(index, shape, strict=True)
    return tuple(slice(*each.indices(size)[:2]) for each, size in pairs)


def _key(box: Box) -> tuple[tuple[int, int], ...]:
    return tuple((each.start, each.stop) for each in box)  # slices have no hash


def _minus(index: int, each: slice) -> int:
    return index - each.start


def _holds(each: slice, index: int) -> bool:
    return bool(each.start <= index < each.stop)
