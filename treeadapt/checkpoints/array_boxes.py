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

from treeadapt.checkpoints.errors import refuse, reported
from treeadapt.checkpoints.remote import (
    REQUESTS,
    AnyPath,
    RemotePath,
    Stream,
    fetch,
    joined,
)
from treeadapt.migrations.box_parts import Box, around, lengths, whole
from treeadapt.migrations.moved_array import bytes_read, read_boxes, walked
from treeadapt.trees.arrays import empty

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

    @property
    def place(self) -> tuple[str, int]:
        """What puts arrays into the order in which they are in files."""
        return str(self.path), self.start_bytes

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
        block = np.empty(0, np.uint8)
        for start_bytes, num_bytes, parts in self.pieces(boxes):
            (number, place, rows), *others = parts
            if rows is None:
                self._read_to(file, start_bytes, arrays[number][place])
                for other, there, _ in others:
                    arrays[other][there] = arrays[number][place]
                continue
            if num_bytes > block.nbytes:
                block = np.empty(num_bytes, np.uint8)
            self._read_to(file, start_bytes, block[:num_bytes])
            inner = self.shape[len(self.shape) - len(rows) + 1 :]
            elements = block[:num_bytes].view(self.dtype).reshape(-1, *inner)
            for number, place, rows in parts:
                arrays[number][place] = elements[rows]

    def pieces(
        self, boxes: Sequence[Box]
    ) -> Iterator[tuple[int, int, list[tuple[int, Any, Any]]]]:
        """Yield what is read for boxes, from the start to the end.

        Yields:
            Where it starts in the array, how many bytes it has, and who gets of it: the
            number of a box, which part of it, and which part of the rows that were
            read; None for all of them, as they are.
        """
        if not bytes_read(self, boxes):
            return
        every, box_around = whole(self.shape), around(boxes)
        if all(box == every for box in boxes):  # as of an array of no axes
            size_bytes = math.prod(self.shape) * self.dtype.itemsize
            yield 0, size_bytes, [(number, ..., None) for number in range(len(boxes))]
            return
        depth, _ = walked(self.shape, self.dtype.itemsize, box_around)
        sizes = [math.prod(self.shape[k:]) for k in range(1, len(self.shape) + 1)]
        strides = [size * self.dtype.itemsize for size in sizes]
        while strides[depth] > _BLOCK_BYTES and depth < len(box_around) - 1:
            depth += 1  # so that a block is small however long the rows are
        rows, row_bytes = box_around[depth], strides[depth]
        step = max(1, _BLOCK_BYTES // row_bytes)
        outer_axes = (range(s.start, s.stop) for s in box_around[:depth])
        for outer in itertools.product(*outer_axes):
            start_bytes = sum(map(operator.mul, outer, strides))
            held = [
                (number, tuple(i - each.start for i, each in above), box[depth:])
                for number, box in enumerate(boxes)
                for above in [[*zip(outer, box, strict=False)]]
                if all(each.start <= i < each.stop for i, each in above)
            ]
            if len(held) == 1 and held[0][2][1:] == whole(self.shape[depth + 1 :]):
                number, place, box = held[0]  # its rows follow each other, there too
                num_bytes = (box[0].stop - box[0].start) * row_bytes
                start = start_bytes + box[0].start * row_bytes
                yield start, num_bytes, [(number, place, None)]
                continue
            for first in range(rows.start, rows.stop, step):
                last = min(first + step, rows.stop)
                parts = []
                for number, place, box in held:
                    a, b = max(first, box[0].start), min(last, box[0].stop)
                    there = slice(a - box[0].start, b - box[0].start)
                    if a < b:
                        here = (slice(a - first, b - first), *box[1:])
                        parts.append((number, (*place, there), here))
                if parts:
                    start = start_bytes + first * row_bytes
                    yield start, (last - first) * row_bytes, parts

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
    jobs = sorted(jobs, key=lambda job: job[0].place)
    stream = Stream(fetch(requests_for(job[:2] for job in jobs), max_bytes))
    for file_array, boxes, arrays in jobs:
        stream.path = file_array.path
        file_array.read_into(stream, boxes, arrays)


def requests_for(
    wanted: Iterable[tuple[FileArray, Sequence[Box]]],
) -> list[tuple[Any, int, int]]:
    """Return path, start and stop of what is asked for to read boxes together.

    Args:
        wanted: arrays, in the order in which they are in files, and boxes of each.
    """
    return joined(
        (array.path, array.start_bytes + place, array.start_bytes + place + num_bytes)
        for array, boxes in wanted
        for place, num_bytes, _ in array.pieces(boxes)
    )


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
    boxes = boxes_by_device(sharding, shape).values()
    return [*{_key(box): box for box in boxes}.values()]


def boxes_by_device(sharding: Any, shape: Sequence[int]) -> dict[Any, Box]:
    """Return the box of each of this process's devices.

    Args:
        sharding: of JAX.
        shape: of the whole array.

    Raises:
        ValueError: the sharding does not fit the shape.
    """
    indices = sharding.addressable_devices_indices_map(tuple(shape)).items()
    return {device: _box(index, shape) for device, index in indices}


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
    boxes = boxes_here(sharding, array.shape)
    parts = read_boxes(array, boxes)
    for place in range(len(parts)):
        parts[place] = changed(parts[place])
    return assembled(array.shape, sharding, dtype, boxes, parts)


def assembled(
    shape: Sequence[int],
    sharding: Any,
    dtype: Any,
    boxes: Sequence[Box],
    parts: Sequence[Any],
) -> jax.Array:
    """Return the array of a sharding, of the boxes of this process's devices.

    Args:
        shape: of the whole array.
        sharding: of JAX.
        dtype: of the array.
        boxes: as ``boxes_here`` returns them.
        parts: the arrays of NumPy that are there.
    """
    shape = tuple(shape)
    by_box = dict(zip(map(_key, boxes), parts, strict=True))

    def part(index: Any) -> Any:
        # JAX asks for one part even if none of the devices is of this process.
        return by_box[_key(_box(index, shape))] if by_box else False

    return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Return the box of an index of JAX."""
    pairs = zip(index, shape, strict=True)
    return tuple(slice(*each.indices(size)[:2]) for each, size in pairs)


def _key(box: Box) -> tuple[tuple[int, int], ...]:
    return tuple((each.start, each.stop) for each in box)  # slices have no hash
