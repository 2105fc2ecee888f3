"""An array that a migration makes, whose boxes are made of boxes of its sources.

Its sources are arrays in files or in memory, or made by another table. Each box is made
of a few leaves at a time, in memory that it keeps: leaves whose numbers stay in order
are read into it, others are read and then moved. So a stack of all layers needs its own
bytes, and those of a layer. With shapes in the place of sources it says what reading
would cost: a plan and ``load`` ask the same, so they cannot disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.migrations.axes import indices, names_of
from treeadapt.migrations.box_parts import (
    Box,
    Part,
    SourceBoxes,
    around,
    lengths,
    nested_names,
    parts_of_box,
    whole,
)
from treeadapt.migrations.group import Group
from treeadapt.migrations.run_group import require_sound
from treeadapt.migrations.running import run
from treeadapt.trees.arrays import copy_values, empty, is_array

GAP_BYTES = 2**12  # systems read whole pages, so a smaller gap is read over
PIECE_BYTES = 2**10  # what a piece counts as at least, because each read takes time
_STEP_BYTES = 2**23  # of boxes that are made together; larger leaves one by one
_KEYS = jax.dtypes.prng_key
_MOST = 1.25  # times the bytes of the sources; above it they are read whole, once


@dataclasses.dataclass(frozen=True)
class MovedArray:
    """An array that a group makes.

    Attributes:
        group: of a plan.
        target: place of the target in the row.
        numbers: values of the target's numbers, which tell its leaves apart.
        sources: by path: arrays to read, or shapes and dtypes to count bytes; what is
            read for the last time may be taken out.
        like: the array that has the numbers of what is new; None where these are zero.
    """

    group: Group
    target: int
    numbers: tuple[int, ...]
    sources: dict[str, Any]
    like: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return tuple(self.group.target_specs[self.target].shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self.group.target_specs[self.target].dtype

    @property
    def form(self) -> Any:
        """What is equal where boxes cost the same."""
        firsts = (self.sources[paths[0]] for paths in self.group.sources)
        forms = (getattr(each, "form", getattr(each, "dtype", None)) for each in firsts)
        return self.group.move or self.group, self.target, *forms

    @functools.cached_property
    def divides(self) -> bool:
        """Whether boxes can be made of boxes of the sources.

        Not where zeros are cut off, a function makes them, or parts are nested so that
        none is in one piece.
        """
        move = self.group.move
        return (
            move is not None
            and not move.values.cuts_zeros
            and nested_names(move) is not None
            and all(move.size.values())
            and all(map(is_divisible, map(self.sources.get, self.group.source_paths)))
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.read([whole(self.shape)])[0]

    def cost(self, boxes: Sequence[Box]) -> tuple[float, bool]:
        """Return how many bytes are read for boxes, and whether no more is than needed.

        They are infinite if the array does not divide.

        Args:
            boxes: of the array, which are read together.
        """
        if not self.divides:
            return math.inf, False
        wanted: dict[tuple[int, tuple[range, ...]], list[Box]] = {}
        are_tight = True
        for part in itertools.chain.from_iterable(map(self._parts, boxes)):
            are_tight &= part.is_tight
            for each in part.sources:
                # Boxes of the same leaves are read together.
                wanted.setdefault((each.number, each.ranges), []).append(each.box)
        num_bytes = 0.0
        for (number, ranges), leaf_boxes in wanted.items():
            array = self.sources[self.group.sources[number][0]]
            each_bytes, is_tight = cost(array, leaf_boxes)
            num_bytes += math.prod(map(len, ranges)) * each_bytes
            are_tight &= is_tight
        return num_bytes, are_tight

    def read(
        self,
        boxes: Sequence[Box],
        into: Sequence[Any] = (),
        *,
        forget: bool = False,
        must_own: bool = False,
    ) -> list[Any]:
        """Return boxes, made of a few of the sources at a time.

        The boxes of one source are read together, because what devices share may lie
        side by side in a file, in pieces too small to be worth reading one by one.

        Args:
            boxes: of the array.
            into: arrays to fill, None for a new one; empty for new ones.
            forget: whether a source that is read for the last time here is taken out of
                ``sources``, because no other array of the group needs it.
            must_own: whether the result has memory of its own, not that of a source.

        Raises:
            CheckpointError: a source cannot be read.
            MigrationError: copies differ, or values do not fit.
        """
        arrays: list[Any] = []
        parts_of, steps = self.steps(boxes)
        for place, (box, parts) in enumerate(zip(boxes, parts_of, strict=True)):
            # What the move makes of one part may be the box.
            is_whole = len(parts) == 1 and lengths(parts[0].picks) == lengths(box)
            array = into[place] if into else None
            if array is not None or must_own or not is_whole or not parts[0].is_exact:
                array = empty(lengths(box), self.dtype) if array is None else array
                if self.group.row.values.pads(is_source=False):
                    array[...] = 0 if self.like is None else box_of(self.like, box)
            arrays.append(array)
        later = Counter(itertools.chain(*steps))
        for paths, pieces in steps.items():
            self._take(pieces, arrays)
            later.subtract(paths)
            for path in paths if forget else ():
                if not later[path]:
                    del self.sources[path]
        return arrays

    def steps(
        self, boxes: Sequence[Box]
    ) -> tuple[list[list[Part]], dict[tuple[str, ...], list[tuple[int, Part]]]]:
        """Return the parts of boxes, and in which order they are made.

        Args:
            boxes: of the array.

        Returns:
            The parts of each box; and by the paths of the leaves that are read at a
            time what is made of them, each part with the place of its box.
        """
        max_bytes = _STEP_BYTES // max(1, len(boxes))
        parts_of = [[*self._parts(box, max_bytes)] for box in boxes]
        steps: dict[tuple[str, ...], list[tuple[int, Part]]] = {}
        for place, parts in enumerate(parts_of):
            for part in parts:
                steps.setdefault(self._paths(part), []).append((place, part))
        return parts_of, steps

    def _parts(self, box: Box, max_bytes: float = math.inf) -> Iterator[Part]:
        """Yield the parts of a box, each made of few bytes of the sources."""
        assert self.group.move is not None
        most = max(1, max_bytes / self.dtype.itemsize)  # which may be infinite
        return parts_of_box(self.group.move, self.target, self.numbers, box, most)

    def _paths(self, part: Part) -> tuple[str, ...]:
        """Return the paths of the leaves that a part is made of, each once."""
        every = (self.leaves(each) for each in part.sources)
        return tuple(dict.fromkeys(itertools.chain(*every)))

    def leaves(self, source: SourceBoxes) -> list[str]:
        """Return the paths of the leaves of one source of a part, in order."""
        assert self.group.move is not None
        paths = self.group.sources[source.number]
        return [paths[leaf] for leaf in source.leaves(self.group.move)]

    def _take(self, pieces: Sequence[tuple[int, Part]], arrays: list[Any]) -> None:
        """Read what some parts are made of, and put them into arrays of boxes.

        Args:
            pieces: parts, each with the place of its box.
            arrays: of the boxes; None for one that is what the move makes.
        """
        wanted: dict[str, tuple[list[Box], list[Any]]] = {}
        moved: list[tuple[int, Part]] = []
        for place, part in pieces:
            rows = self._rows(part, arrays[place])
            if not rows:
                moved.append((place, part))
            for each in part.sources:
                for n, path in enumerate(self.leaves(each)):
                    boxes, into = wanted.setdefault(path, ([], []))
                    boxes.append(each.box)
                    into.append(rows[n] if rows else None)
        read = {
            path: [
                array
                for array, row in zip(
                    read_boxes(self.sources[path], boxes, into), into, strict=True
                )
                if row is None
            ]
            for path, (boxes, into) in wanted.items()
        }
        for place, part in moved:
            sources = [
                [read[path].pop(0) for path in self.leaves(each)]
                for each in part.sources
            ]
            made, faults = run(part.move, sources)
            require_sound(self.group, faults)
            array = made[0][part.leaf][(..., *part.picks)]
            if arrays[place] is None:
                arrays[place] = array
            else:
                copy_values(arrays[place][(..., *part.place)], array)

    def _rows(self, part: Part, array: Any) -> list[Any]:
        """Return where the leaves of a part go in an array; none if they are moved."""
        move, (first, *others) = part.move, part.sources
        source, target = move.sources[0], move.targets[0]
        names = [*target.numbers, *names_of(target.axes, 0)]
        order = [*source.numbers, *names_of(source.axes, 0)]
        is_same = self.sources[self.leaves(first)[0]].dtype == self.dtype
        is_moved = others or move.values.computes or {*names} != {*order}
        if array is None or is_moved or not (is_same and part.is_exact):
            return []
        # An array that is cut between names can be split into them without a copy.
        named = array[(..., *part.place)].reshape([move.size[name] for name in names])
        named = named.transpose([names.index(name) for name in order])
        rows = [named[(*index, ...)] for index in indices(source.numbers, move.size)]
        is_ready = rows[0].flags.c_contiguous
        return [row.reshape(lengths(first.box)) for row in rows] if is_ready else []


def moved_arrays(
    group: Group, sources: dict[str, Any], likes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a group makes, by path; what is only renamed is the source itself.

    Args:
        group: of a plan.
        sources: as for ``MovedArray``.
        likes: leaves of the target, by path, that have numbers of what is new.
    """
    if group.move is None and group.row.function is None:
        (path,) = group.source_paths
        return dict.fromkeys(group.filled, sources[path])
    arrays = {}
    for target, paths in enumerate(group.targets):
        every: Iterable[tuple[int, ...]] = [()]  # of a function
        if group.move is not None:
            every = indices(group.move.targets[target].numbers, group.move.size)
        for path, numbers in zip(paths, every, strict=True):
            like = likes.get(path) if group.row.values.fills else None
            arrays[path] = MovedArray(group, target, numbers, sources, like)
    return arrays


def pays(arrays: Sequence[MovedArray], boxes: Sequence[Sequence[Box]]) -> bool:
    """Return whether boxes cost not much more than to read the sources whole, once.

    Args:
        arrays: that one group makes.
        boxes: of each.
    """
    pairs = zip(arrays, boxes, strict=True)
    return _pays(sum(array.cost(each)[0] for array, each in pairs), arrays[0])


def _pays(num_bytes: float, array: MovedArray) -> bool:
    sources = map(array.sources.__getitem__, array.group.source_paths)
    return num_bytes <= _MOST * sum(
        math.prod(each.shape) * each.dtype.itemsize for each in sources
    )


def gathered(
    group: Group,
    sources: dict[str, Any],
    shards: Mapping[str, tuple[int, ...]],
    costs: dict[Any, tuple[float, bool]],
) -> list[str]:
    """Return paths of the arrays of which a process reads more than the shard it has.

    It has one shard of each array of the group.

    Args:
        group: of a plan.
        sources: shapes and dtypes by path, or what an earlier table makes of some.
        shards: by path of an array that the group makes, the shape of a shard; none for
            one that is not divided.
        costs: what is known of arrays of the same form, and gets more.
    """
    if not shards:
        return []
    by_path, arrays = {}, moved_arrays(group, sources, {})
    for path, array in arrays.items():
        key = getattr(array, "form", None), shards.get(path)
        if key[0] is None or key not in costs:
            costs[key] = _most(array, shards.get(path))
        by_path[path] = costs[key]
    total = sum(num_bytes for num_bytes, _ in by_path.values())
    first = next(iter(arrays.values()))
    are_cut = total < math.inf and (
        not isinstance(first, MovedArray) or _pays(total, first)
    )
    return [path for path in shards if not (are_cut and by_path[path][1])]


def _most(array: Any, shard: Sequence[int] | None) -> tuple[float, bool]:
    """Return what a shard of an array costs at most; without one, the whole array."""
    if not isinstance(array, MovedArray):  # only renamed, with the shards of a file
        return 0, True
    if not is_array(array):  # what a function makes
        return math.inf, False
    sizes = array.shape if shard is None else shard
    if 0 in sizes:
        return 0, True
    if not array.divides:
        return math.inf, False
    most_bytes = 0.0
    starts = (range(0, n, step) for n, step in zip(array.shape, sizes, strict=True))
    for place in itertools.product(*starts):
        box = tuple(slice(a, a + size) for a, size in zip(place, sizes, strict=True))
        num_bytes, is_tight = cost(array, [box])
        most_bytes = max(most_bytes, num_bytes)
        if not is_tight:
            return most_bytes, False
    return most_bytes, True


def cost(array: Any, boxes: Sequence[Box]) -> tuple[float, bool]:
    """Return how many bytes are read for boxes, and whether all of them are needed.

    Args:
        array: shape and dtype of one in a file, in row-major order; or ``MovedArray``.
        boxes: of it, which are read together.
    """
    if isinstance(array, MovedArray):
        return array.cost(boxes)
    return bytes_read(array, boxes), True


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


def read_boxes(array: Any, boxes: Sequence[Box], into: Sequence[Any] = ()) -> list[Any]:
    """Return boxes of an array of NumPy or JAX, or of what reads them itself.

    Args:
        array: in memory, or with a method ``read``.
        boxes: of it.
        into: arrays to fill, None for one that may be a part of the array; empty for
            such ones.
    """
    if hasattr(array, "read"):
        return list(array.read(boxes, into))
    arrays = [np.asarray(array)[box] for box in boxes]
    for place, new in enumerate(into):
        if new is not None:
            new[...] = arrays[place]
    return arrays


def box_of(array: Any, box: Box) -> Any:
    """Return one box of an array of NumPy or JAX, of which this process has that."""
    if isinstance(array, jax.Array):
        for shard in array.addressable_shards:
            pairs = zip(shard.index, array.shape, strict=True)
            if tuple(slice(*each.indices(size)[:2]) for each, size in pairs) == box:
                return np.asarray(shard.data)
    return np.asarray(array)[box]


def is_divisible(spec: Any) -> bool:
    """Return whether boxes of a leaf can be read: not of numbers, and of typed keys."""
    return is_array(spec) and not jnp.issubdtype(spec.dtype, _KEYS)
