"""Costs: what is read of the sources of a group for boxes of the arrays that it makes.

A plan asks which shards need whole sources, and ``load`` what it should read: both get
the answer here, so they cannot disagree. Takes shapes and boxes; reads nothing. Sources
are in row-major order, as in a file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from treeadapt.arrays import is_array
from treeadapt.migrations.axes import indices
from treeadapt.migrations.groups import Group
from treeadapt.migrations.parts import Box, Part, parts_of_box
from treeadapt.migrations.running import Move

GAP_BYTES = 2**12  # systems read whole pages, so a smaller gap is read over
PIECE_BYTES = 2**10  # what a piece counts as at least, because each read takes time
_KEYS = jax.dtypes.prng_key
_MOST = 1.25  # times the bytes of the sources; above it they are read whole, once


class Reading(NamedTuple):
    """How boxes of one array are made.

    Attributes:
        target: place of the target in the row.
        numbers: which leaf of it the array is.
        boxes: of the array.
        parts: of each box.
    """

    target: int
    numbers: tuple[int, ...]
    boxes: Sequence[Box]
    parts: Sequence[Sequence[Part]]


def readings(
    group: Group,
    specs: Mapping[str, Any],
    boxes: Mapping[str, Sequence[Box]],
    *,
    is_free: bool = False,
) -> dict[str, Reading]:
    """Return how boxes of a group's arrays are made of boxes of its sources.

    Args:
        group: of a plan.
        specs: shapes and dtypes of the sources, by path.
        boxes: by path of an array that the group makes, those that are needed.
        is_free: whether reading costs nothing, because the sources are in memory.

    Returns:
        By path; empty where it costs less to read the sources whole, once.
    """
    move, whole_bytes = group.move, _whole_bytes(group, specs)
    if move is None or whole_bytes is None:
        return {}
    made: dict[str, Reading] = {}
    num_bytes = 0
    for target, paths in enumerate(group.targets):
        every = indices(move.targets[target].numbers, move.size)
        for path, numbers in zip(paths, every, strict=True):
            if path not in boxes:
                continue
            parts: list[Sequence[Part]] = []
            for box in boxes[path]:
                of_box = parts_of_box(move, target, numbers, box)
                if of_box is None:
                    return {}
                parts.append(of_box)
            made[path] = Reading(target, numbers, boxes[path], parts)
            of_sources = source_boxes(group, itertools.chain(*parts))
            num_bytes += sum(
                bytes_read(specs[one], each) for one, each in of_sources.items()
            )
    return made if is_free or _pays(num_bytes, whole_bytes) else {}


#: Of one array: the most bytes that are read for a shard, and whether none of these is
#: read for more than its own part.
Cost: TypeAlias = tuple[float, bool]


def gathered(
    group: Group,
    specs: Mapping[str, Any],
    shards: Mapping[str, tuple[int, ...]],
    costs: dict[Any, Cost],
) -> list[str]:
    """Return the arrays of which a process with one shard needs more than its part.

    It has one shard of each array of the group, and ``readings`` says what it reads.

    Args:
        group: of a plan.
        specs: shapes and dtypes of the sources, by path.
        shards: by path of an array that the group makes, the shape of a shard; none for
            one that is not divided.
        costs: what is known of groups like this one, and gets more.
    """
    if not shards or (group.move is None and group.row.function is None):
        return []
    whole_bytes = _whole_bytes(group, specs)
    if group.move is None or whole_bytes is None:
        return [*shards]
    dtypes = tuple(specs[paths[0]].dtype for paths in group.sources)
    by_path: dict[str, Cost] = {}
    for target, paths in enumerate(group.targets):
        for path in paths:
            key = group.move, target, shards.get(path), dtypes
            if key not in costs:
                costs[key] = _cost(group, specs, target, shards.get(path))
            by_path[path] = costs[key]
    pays = _pays(sum(num_bytes for num_bytes, _ in by_path.values()), whole_bytes)
    return [path for path in shards if not (pays and by_path[path][1])]


def divided(move: Move, target: int, box: Box, max_elements: int) -> Iterator[Box]:
    """Yield smaller boxes that together are a box, each made of few of the sources.

    It is divided only between numbers that tell leaves of a source apart, so that what
    is read for one part is not read for the next.

    Args:
        move: of a group.
        target: place of the target in the row.
        box: of an array of it.
        max_elements: of a smaller box, unless there is no such number in it.
    """
    numbers = {name for layout in move.sources for name in layout.numbers}
    size = math.prod(each.stop - each.start for each in box)
    for place, axis in enumerate(move.targets[target].axes):
        name, *inner = (len(axis.parts) == 1 and axis.parts[0]) or ("",)
        step, each = move.count(inner), box[place]
        length = each.stop - each.start
        if size <= max_elements or name not in numbers or length <= step:
            continue
        # From multiples on, so that boxes of other devices are divided at the same.
        step *= max(1, max_elements * length // size // step)
        for start in range(each.start // step * step, each.stop, step):
            part = slice(max(start, each.start), min(start + step, each.stop))
            smaller = (*box[:place], part, *box[place + 1 :])
            yield from divided(move, target, smaller, max_elements)
        return
    yield box


def bytes_read(spec: Any, boxes: Sequence[Box]) -> int:
    """Return how many bytes are read for boxes together; more for short pieces.

    Args:
        spec: shape and dtype of the array.
        boxes: of it.
    """
    if not boxes or 0 in spec.shape:
        return 0
    return walked(spec.shape, spec.dtype.itemsize, around(boxes))[1]


def walked(shape: Sequence[int], itemsize: int, around: Box) -> tuple[int, int]:
    """Return how many outer axes are walked index by index, and the cost in bytes.

    Args:
        shape: of an array.
        itemsize: bytes of an element.
        around: what is read of it.
    """
    read_bytes = row_bytes = itemsize
    depth = 0
    for axis in reversed(range(len(shape))):
        if not depth and row_bytes - read_bytes >= GAP_BYTES:
            depth = axis + 1
            read_bytes = max(read_bytes, PIECE_BYTES)
        length = around[axis].stop - around[axis].start
        read_bytes = length * (read_bytes if depth else row_bytes)
        row_bytes *= shape[axis]
    return depth, read_bytes


def around(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that holds some boxes.

    Example:
        >>> around([(slice(0, 2),), (slice(3, 4),)])
        (slice(0, 4, None),)
    """
    return tuple(
        slice(min(s.start for s in each), max(s.stop for s in each))
        for each in zip(*boxes, strict=True)
    )


def source_boxes(group: Group, parts: Iterable[Part]) -> dict[str, list[Box]]:
    """Return the boxes that parts are made of, by path, in the order of the parts."""
    boxes: dict[str, list[Box]] = {}
    for part in parts:
        for source, leaf_boxes in part.sources:
            for place, box in leaf_boxes:
                boxes.setdefault(group.sources[source][place], []).append(box)
    return boxes


def _cost(
    group: Group, specs: Mapping[str, Any], target: int, shard: Sequence[int] | None
) -> Cost:
    """Return what a shard of an array costs at most.

    Args:
        group: it has a move.
        specs: as for ``gathered``.
        target: place of the target in the row.
        shard: its shape; None for the whole array.
    """
    assert group.move is not None
    shape = group.target_specs[target].shape
    sizes = shape if shard is None else shard
    if 0 in sizes:
        return 0, True
    numbers = [0] * len(group.move.targets[target].numbers)
    most_bytes = 0
    starts = (range(0, size, step) for size, step in zip(shape, sizes, strict=True))
    for place in itertools.product(*starts):
        box = tuple(slice(a, a + size) for a, size in zip(place, sizes, strict=True))
        parts = parts_of_box(group.move, target, numbers, box)
        if parts is None:
            return math.inf, False
        num_bytes = 0
        for source, count, leaf_box in itertools.chain(*(p.kinds for p in parts)):
            num_bytes += count * bytes_read(specs[group.sources[source][0]], [leaf_box])
        most_bytes = max(most_bytes, num_bytes)
        if not all(part.is_tight for part in parts):
            return most_bytes, False
    return most_bytes, True


def _whole_bytes(group: Group, specs: Mapping[str, Any]) -> int | None:
    """Return the bytes of all sources; None if they cannot be read by boxes."""
    sources = [specs[path] for path in group.source_paths]
    if any(not is_array(it) or jnp.issubdtype(it.dtype, _KEYS) for it in sources):
        return None
    return sum(math.prod(it.shape) * it.dtype.itemsize for it in sources)


def _pays(num_bytes: float, whole_bytes: int) -> bool:
    """Return whether boxes cost less than to read the sources whole, once."""
    return num_bytes <= _MOST * whole_bytes
