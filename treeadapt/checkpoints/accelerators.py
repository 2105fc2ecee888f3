"""Loads to accelerators: reading overlaps copying, and arrays are turned there.

Takes arrays that read their data later, and the leaves of a target; gives arrays on
devices. Several threads read ahead into buffers, of which so many bytes are in flight
at most; each is copied to the devices once it is full, and filled again once that copy
is done. CPUs may keep a buffer as the array and share the memory that is read, so for
them ``leaves.placed`` reads one array after the other.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from treeadapt.checkpoints.array_boxes import (
    FileArray,
    assembled,
    boxes_by_device,
    boxes_here,
    read_together,
)
from treeadapt.checkpoints.errors import reported
from treeadapt.checkpoints.leaves import bound_sharding, is_for_host
from treeadapt.checkpoints.remote import RemotePath
from treeadapt.migrations.box_parts import Box, Part, around, lengths, whole
from treeadapt.migrations.group import Group, size_bytes
from treeadapt.migrations.moved_array import MovedArray, read_boxes
from treeadapt.migrations.on_device import BoxOnDevice, is_worth_compiling, only_moves
from treeadapt.trees.arrays import empty

_INFLIGHT_BYTES = 2**28  # of local files, if no array is larger
_READ_BYTES = 2**24  # of a local file, that one thread reads at a time
_READERS = 16
_REUSED_BYTES = 2**20  # of a buffer that is filled again: a new one costs new pages


def is_accelerator(device: Any) -> bool:
    """Return whether arrays are copied to a device, whose memory is its own."""
    return bool(device.platform != "cpu")


class ToAccelerators:
    """Brings the leaves of a load to accelerators.

    Attributes:
        lacking: paths of arrays that were turned on the host, because a device had no
            room to turn them.
    """

    def __init__(
        self, file: Any, likes: Mapping[str, Any], groups: Mapping[str, Group]
    ) -> None:
        """Plan which arrays are worth a program that turns them.

        Args:
            file: path of the checkpoint.
            likes: the target's leaves that are loaded, by path.
            groups: of a migration, that which makes a leaf, by path.
        """
        self.lacking: list[str] = []
        self._file, self._likes = file, likes
        self._reserved: dict[str, int] = {}  # room for what is not whole
        self._num_arrays: Counter[Any] = Counter()
        self._num_bytes: Counter[Any] = Counter()
        self._has_devices = any(map(is_accelerator, jax.local_devices()))
        distinct = {id(each): each for each in groups.values()}
        for group in distinct.values() if self._has_devices else ():
            for number, paths in enumerate(group.targets if group.move else ()):
                names = [path for path in paths if path in likes]
                form = group.move, number
                each_bytes = size_bytes(group.target_specs[number])
                self._num_bytes[form] += len(names) * each_bytes
                self._num_arrays[form] += len([*group.source_paths]) if names else 0

    def arrays(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield leaves, of which those that belong to accelerators are there.

        Args:
            pairs: path and array of what ``read_arrays`` reads, or a migration makes.

        Yields:
            The same, in another order; as they came where they belong to the host or to
            a CPU, or change on the host.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        if not self._has_devices:
            yield from pairs
            return
        belt = _Belt(self._file)
        try:
            for path, array in pairs:
                boxes = _boxes(array, self._likes[path])
                if not boxes:
                    yield path, array
                    continue
                sharding = bound_sharding(self._likes[path])
                deliveries = _plain(path, array, sharding)
                if self._turns(path, array, boxes, belt.max_bytes):
                    deliveries = _turned(path, array, sharding, boxes)
                for delivery in deliveries:
                    yield from self._whole(belt.put(delivery))
            yield from self._whole(belt.rest())
        finally:
            belt.pool.shutdown(cancel_futures=True)

    def _whole(self, leaves: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for path, leaf in leaves:
            self._reserved.pop(path, None)
            yield path, leaf

    def _turns(
        self, path: str, array: Any, boxes: Mapping[Any, Box], inflight_bytes: int
    ) -> bool:
        """Return whether an array is turned on the devices that have its boxes."""
        if not isinstance(array, MovedArray) or not only_moves(array):
            return False
        form = array.group.move, array.target
        largest = max(math.prod(lengths(box)) for box in boxes.values())
        num_bytes = self._num_bytes[form] * largest // math.prod(array.shape)
        if not is_worth_compiling(self._num_arrays[form], num_bytes):
            return False
        # Twice: at last bits become numbers, in other memory.
        room = 2 * largest * int(array.dtype.itemsize)
        taken = sum(self._reserved.values()) + inflight_bytes
        if any(room + taken > _free_bytes(device) for device in boxes):
            self.lacking.append(path)
            return False
        self._reserved[path] = room
        return True


@dataclasses.dataclass
class _Read:
    """Boxes of a source, and the memory that each is read into, once there is room."""

    source: Any
    boxes: Sequence[Box]
    buffers: Sequence[Any] = ()


@dataclasses.dataclass
class _Delivery:
    """What is copied to devices at a time.

    Attributes:
        reads: what is read before.
        copied: copies it, and returns arrays of devices; once these are ready, the
            buffers are no longer needed.
        made: returns path and array of the leaf that is whole then; None if it is not.
    """

    reads: Sequence[_Read]
    copied: Callable[[], Sequence[Any]]
    made: Callable[[], tuple[str, Any]] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are read for it."""
        return sum(
            math.prod(lengths(box)) * int(read.source.dtype.itemsize)
            for read in self.reads
            for box in read.boxes
        )


@dataclasses.dataclass
class _Job:
    """Deliveries for which is read together, and what says when that is done."""

    deliveries: Sequence[_Delivery]
    reading: Sequence[concurrent.futures.Future[Any]]
    num_bytes: int
    copies: list[Any] = dataclasses.field(default_factory=list)


class _Belt:
    """Reads ahead for deliveries, and starts their copies in order.

    Attributes:
        pool: of the threads that read.
        max_bytes: in flight, from the start of a read to the end of the copy; more only
            for one array alone that is larger.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._is_remote = file, isinstance(file, RemotePath)
        self.max_bytes, self._job_bytes = _INFLIGHT_BYTES, _READ_BYTES
        if self._is_remote:  # the requests of each job have as much under way
            self.max_bytes = file.store.max_bytes // 2
            self._job_bytes = self.max_bytes // 4
        num_readers = max(2, min(_READERS, os.cpu_count() or 1))
        self.pool = concurrent.futures.ThreadPoolExecutor(num_readers)
        self._next: list[_Delivery] = []
        self._reading: deque[_Job] = deque()
        self._copying: deque[_Job] = deque()
        self._inflight_bytes = 0
        self._buffers = _Buffers()

    def put(self, delivery: _Delivery) -> Iterator[tuple[str, Any]]:
        """Take one more delivery; yield leaves that are whole meanwhile."""
        self._next.append(delivery)
        if sum(each.num_bytes for each in self._next) >= self._job_bytes:
            yield from self._start()

    def rest(self) -> Iterator[tuple[str, Any]]:
        """Yield all other leaves."""
        yield from self._start()
        while self._reading or self._copying:
            yield from self._advance()

    def _start(self) -> Iterator[tuple[str, Any]]:
        """Read for the next deliveries, once there is room."""
        deliveries, self._next = self._next, []
        num_bytes = sum(each.num_bytes for each in deliveries)
        while (
            self._inflight_bytes and self._inflight_bytes + num_bytes > self.max_bytes
        ):
            yield from self._advance()
        self._inflight_bytes += num_bytes
        reads = [read for each in deliveries for read in each.reads]
        free_bytes = self.max_bytes - self._inflight_bytes
        for read in reads:
            read.buffers = [
                self._buffers.taken(lengths(box), read.source.dtype, free_bytes)
                for box in read.boxes
            ]
        if self._is_remote:
            reading: list[Any] = [self.pool.submit(self._read_remote, reads)]
        else:
            reading = [
                self.pool.submit(read_boxes, *each)
                for read in reads
                for each in _cut(read)
            ]
        self._reading.append(_Job(deliveries, reading, num_bytes))

    def _read_remote(self, reads: Sequence[_Read]) -> None:
        """Read what is of files by requests that are made together."""
        files = [
            (read.source, read.boxes, read.buffers)
            for read in reads
            if isinstance(read.source, FileArray)
        ]
        with reported(self._file, "read"):
            read_together(files, self._job_bytes)
        for read in reads:
            if not isinstance(read.source, FileArray):
                read_boxes(read.source, read.boxes, read.buffers)

    def _advance(self) -> Iterator[tuple[str, Any]]:
        """Copy what is read, and end one copy; wait for what is first."""
        while self._reading:
            is_read = all(each.done() for each in self._reading[0].reading)
            if self._copying and not is_read:
                break
            job = self._reading.popleft()
            for each in job.reading:
                each.result()
            for delivery in job.deliveries:
                job.copies += delivery.copied()
            self._copying.append(job)
            for delivery in job.deliveries:
                if delivery.made is not None:
                    yield delivery.made()
        job = self._copying.popleft()
        jax.block_until_ready(job.copies)
        self._inflight_bytes -= job.num_bytes
        if all(_is_copied(each) for each in job.copies):
            for delivery in job.deliveries:
                for read in delivery.reads:
                    self._buffers.give_back(read.buffers)


class _Buffers:
    """Memory to read into, of which the pages are there already."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def taken(self, shape: Sequence[int], dtype: Any, max_free_bytes: int) -> Any:
        """Return an array of no certain content, and keep only so many others."""
        size = math.prod(shape) * dtype.itemsize
        for place, buffer in enumerate(self._free):
            if buffer.nbytes == size:
                return self._free.pop(place).view(dtype).reshape(shape)
        while self._free and sum(x.nbytes for x in self._free) > max_free_bytes:
            self._free.pop(0)
        return empty(shape, dtype)

    def give_back(self, arrays: Iterable[Any]) -> None:
        """Keep the memory of arrays that nobody reads any longer."""
        for array in arrays:
            if array.nbytes >= _REUSED_BYTES:
                self._free.append(array.reshape(-1).view(np.uint8))


def _is_copied(array: jax.Array) -> bool:
    """Return whether an array has memory of its own: on a CPU it may be a buffer."""
    is_traced = isinstance(array, jax.core.Tracer)
    return not is_traced and all(each.platform != "cpu" for each in array.devices())


def _cut(read: _Read) -> Iterator[tuple[Any, list[Box], list[Any]]]:
    """Yield boxes and memory for single reads, which threads do at the same time."""
    source, num_bytes = read.source, sum(buffer.nbytes for buffer in read.buffers)
    if not isinstance(source, FileArray) or num_bytes <= _READ_BYTES:
        yield source, [*read.boxes], [*read.buffers]
        return
    rows, *_ = around(read.boxes)
    step = max(1, _READ_BYTES * (rows.stop - rows.start) // num_bytes)
    for start in range(rows.start, rows.stop, step):
        boxes, buffers = [], []
        for (own, *others), buffer in zip(read.boxes, read.buffers, strict=True):
            low, high = max(own.start, start), min(own.stop, start + step)
            if low < high:
                boxes.append((slice(low, high), *others))
                buffers.append(buffer[low - own.start : high - own.start])
        yield source, boxes, buffers


def _boxes(array: Any, like: Any) -> dict[Any, Box]:
    """Return the box of each accelerator that an array goes to as it is.

    Returns:
        For no device the whole array, where JAX chooses it; empty where the array
        changes on the host, or belongs there or to a CPU.
    """
    is_later = hasattr(array, "read") and math.prod(array.shape) > 0
    if not is_later or is_for_host(like) or array.dtype != like.dtype:
        return {}
    sharding = bound_sharding(like)
    if getattr(sharding, "memory_kind", None) not in (None, "device"):
        return {}
    if sharding is None:
        return {None: whole(array.shape)} if is_accelerator(_default_device()) else {}
    boxes = boxes_by_device(sharding, array.shape)
    return boxes if all(map(is_accelerator, boxes)) else {}


def _default_device() -> Any:
    device = getattr(jax.config, "jax_default_device", None)
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


def _plain(path: str, array: Any, sharding: Any) -> Iterator[_Delivery]:
    """Yield the delivery of an array of which each device gets its box."""
    read = _Read(array, boxes_here(sharding, array.shape))
    leaves: list[Any] = []

    def copied() -> list[Any]:
        if sharding is None:
            leaves.append(jax.device_put(read.buffers[0]))
        else:
            form = array.shape, sharding, array.dtype
            leaves.append(assembled(*form, read.boxes, read.buffers))
        return leaves

    yield _Delivery([read], copied, lambda: (path, leaves.pop()))


def _turned(
    path: str, array: MovedArray, sharding: Any, boxes: Mapping[Any, Box]
) -> Iterator[_Delivery]:
    """Yield the deliveries of an array that each device makes of what is read.

    Args:
        path: of the array.
        array: which only moves numbers.
        sharding: where it belongs; None where JAX may move it.
        boxes: of the devices.
    """
    every = boxes_here(sharding, array.shape)
    parts_of, steps = array.steps(every)
    on_device: dict[Any, BoxOnDevice] = {}
    devices: list[list[Any]] = [[] for _ in every]
    for device, box in boxes.items():
        place = every.index(box)
        devices[place].append(device)
        on_device[device] = BoxOnDevice(array, box, len(parts_of[place]), device)

    def delivery(pieces: Sequence[tuple[int, Part]]) -> _Delivery:
        by_path: dict[str, list[Box]] = {}
        for _, part in pieces:
            for each in part.sources:
                for name in array.leaves(each):
                    by_path.setdefault(name, []).append(each.box)
        reads = {n: _Read(array.sources[n], boxes) for n, boxes in by_path.items()}

        def copied() -> list[Any]:
            buffers = {name: iter(read.buffers) for name, read in reads.items()}
            copies = []
            for place, part in pieces:
                leaves = [
                    [next(buffers[name]) for name in array.leaves(each)]
                    for each in part.sources
                ]
                for device in devices[place]:
                    copies += on_device[device].add(part, leaves)
            return copies

        return _Delivery([*reads.values()], copied)

    def made() -> tuple[str, Any]:
        arrays = [each.array() for each in on_device.values()]
        if sharding is None:
            return path, arrays[0]
        form = tuple(array.shape), sharding
        return path, jax.make_array_from_single_device_arrays(*form, arrays)

    yield from map(delivery, steps.values())
    yield _Delivery([], list, made)


def _free_bytes(device: Any) -> float:
    """Return how many bytes of a device are free; infinite where it does not say."""
    device = _default_device() if device is None else device
    stats = device.memory_stats() or {}
    if not {"bytes_limit", "bytes_in_use"} <= stats.keys():
        return math.inf
    return float(stats["bytes_limit"] - stats["bytes_in_use"])
