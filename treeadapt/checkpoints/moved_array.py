"""An array that a migration makes of a checkpoint, whose boxes can be read.

Each box is made of a few leaves at a time, in memory that it keeps: leaves
whose numbers stay in order are read into it, others are read and then moved. So a stack
of all layers needs its own bytes, and those of a layer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from treeadapt.checkpoints.boxes import (
    FileArray,
    HostArray,
    box_of,
    empty,
    lengths,
    whole,
)
from treeadapt.migrations.axes import names_of
from treeadapt.migrations.costs import Reading, divided, source_boxes
from treeadapt.migrations.groups import Group
from treeadapt.migrations.migration import require_sound
from treeadapt.migrations.parts import Box, Part, parts_of_box
from treeadapt.migrations.running import Move, run

_STEP_BYTES = 2**23  # of boxes that are made together; larger leaves one by one


@dataclasses.dataclass(frozen=True)
class MovedArray:
    """An array that a migration makes, whose boxes can be read.

    Attributes:
        group: it is one of its targets.
        way: how the boxes of this process's devices are made.
        source_arrays: the sources, by path.
        like: the array that has the numbers of what is new; None where these are zero.
    """

    group: Group
    way: Reading
    source_arrays: dict[str, FileArray | HostArray]
    like: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return tuple(self.group.target_specs[self.way.target].shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        return np.dtype(self.group.target_specs[self.way.target].dtype)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.made([whole(self.shape)], like_source=True)[0]

    def read(self, boxes: Sequence[Box]) -> list[Any]:
        """Read boxes, each to a new array of NumPy in row-major order.

        Raises:
            CheckpointError: a source cannot be read.
            MigrationError: copies differ, or values do not fit.
        """
        return self.made(boxes)

    def made(
        self,
        boxes: Sequence[Box],
        *,
        like_source: bool = False,
        forget: bool = False,
        shared: bool = False,
    ) -> list[Any]:
        """Return boxes, made of a few of the sources at a time.

        The boxes of one source are read together, because what devices share may lie
        side by side in a file, in pieces too small to be worth reading one by one.

        Args:
            boxes: of the array.
            like_source: whether axes may be in memory in the order of the sources, so
                that copying runs through it in order.
            forget: whether each source may be forgotten once it is read.
            shared: whether the result may not have the memory of a source.

        Raises:
            CheckpointError: a source cannot be read.
            MigrationError: copies differ, or values do not fit.
        """
        arrays: list[Any] = []
        steps: dict[tuple[str, ...], list[_Piece]] = {}
        for place, box in enumerate(boxes):
            parts = [*self._parts(place, box, len(boxes))]
            sizes, order = lengths(box), tuple(range(len(box)))
            if like_source and parts:
                order = _source_order(parts[0][0])
            pieces = [
                _Piece(part, place, offset, order, self._is_straight(part, order))
                for part, offset in parts
            ]
            is_alone = len(pieces) == 1 and parts[0][0].is_exact
            is_alone &= bool(parts) and parts[0][0].place == whole(sizes)
            new = None
            if shared or not is_alone or pieces[0].is_straight:
                memory = empty([sizes[axis] for axis in order], self.dtype)
                new = memory.transpose([order.index(n) for n in range(len(order))])
                if self.group.row.values.pads(is_source=False):
                    new[...] = 0 if self.like is None else box_of(self.like, box)
            arrays.append(new)
            for piece in pieces:
                of_sources = source_boxes(self.group, [piece.part])
                steps.setdefault((*of_sources,), []).append(piece)
        later = Counter(itertools.chain(*steps))
        for paths, pieces in steps.items():
            self._take(pieces, arrays)
            later.subtract(paths)
            for path in paths if forget else ():
                if not later[path]:
                    del self.source_arrays[path]
        return arrays

    def _parts(
        self, place: int, box: Box, num_boxes: int
    ) -> Iterator[tuple[Part, Box]]:
        """Yield the parts of a box, each with the box in it that it is of."""
        assert self.group.move is not None
        target, numbers, planned, parts = self.way
        most = max(1, _STEP_BYTES // self.dtype.itemsize // num_boxes)
        for smaller in divided(self.group.move, target, box, most):
            offset = tuple(
                slice(each.start - around.start, each.stop - around.start)
                for each, around in zip(smaller, box, strict=True)
            )
            is_planned = place < len(planned) and planned[place] == smaller
            of_box = parts[place] if is_planned else None
            of_box = of_box or parts_of_box(self.group.move, target, numbers, smaller)
            yield from ((part, offset) for part in of_box or ())

    def _take(self, pieces: Sequence[_Piece], arrays: list[Any]) -> None:
        """Read what some pieces are made of, and put them into arrays of boxes."""
        wanted: dict[str, list[Box]] = {}
        into: dict[str, list[Any]] = {}
        straight = []
        for piece in pieces:
            leaf_boxes = source_boxes(self.group, [piece.part])
            views: Sequence[Any] = [None] * len(leaf_boxes)
            if piece.is_straight:
                views = piece.views(arrays[piece.place], len(leaf_boxes))
            straight.append(views[0] is not None)
            for view, (path, boxes) in zip(views, leaf_boxes.items(), strict=True):
                wanted.setdefault(path, []).extend(boxes)
                into.setdefault(path, []).extend([view] * len(boxes))
        parts = {
            path: self.source_arrays[path].read(boxes, into[path])[::-1]
            for path, boxes in wanted.items()
        }
        for piece, is_there in zip(pieces, straight, strict=True):
            leaves = [
                [parts[self.group.sources[source][place]].pop() for place, _ in boxes]
                for source, boxes in piece.part.sources
            ]
            if is_there:
                continue
            made, faults = run(piece.part.move, leaves)
            require_sound(self.group, faults)
            if arrays[piece.place] is None:
                arrays[piece.place] = made[0][0]
            else:
                piece.part.put(made[0], arrays[piece.place][(..., *piece.offset)])

    def _is_straight(self, part: Part, order: Sequence[int]) -> bool:
        """Return whether elements are in the order of the source, as they are.

        Args:
            part: of a box.
            order: the axes of the box, as they are in memory.
        """
        move, (source, *copies) = part.move, part.copies
        path = self.group.sources[source[0]][0]
        is_same = self.source_arrays[path].dtype == self.dtype == move.dtype
        if copies or not is_same or move.values.computes or not part.is_exact:
            return False
        axes = move.targets[0].axes
        after = names_of(tuple(axes[place] for place in order), 0)
        before, after = (
            [name for name in names if move.size[name] > 1]
            for names in (_source_names(move), after)
        )
        return before == after


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of one of several boxes.

    Attributes:
        part: what it is made of.
        place: which box.
        offset: the part of that box in which it has a place.
        order: the axes of that box, as they are in memory.
        is_straight: whether its elements are in the order of the source, as they are.
    """

    part: Part
    place: int
    offset: Box
    order: tuple[int, ...]
    is_straight: bool

    def views(self, array: Any, count: int) -> Sequence[Any]:
        """Return what each of its leaves fills of an array; None for what it cannot."""
        # With the dots, what has no axes is a view, too.
        view = array[(..., *self.offset)][(..., *self.part.place)].transpose(self.order)
        if not view.flags.c_contiguous:
            return [None] * count
        ((_, ((_, box), *_)),) = self.part.sources
        rows = view.reshape(count, *lengths(box))
        return [rows[row, ...] for row in range(count)]


def _source_names(move: Move) -> list[str]:
    """Return the names of the first source as they are in memory, outermost first."""
    layout = move.sources[0]
    return [*layout.numbers, *names_of(layout.axes, 0)]


def _source_order(part: Part) -> tuple[int, ...]:
    """Return the axes of what a part makes, in the order of its first source."""
    names = _source_names(part.move)

    def place(number: int) -> int:
        product = part.move.targets[0].axes[number].product(0)
        places = (names.index(name) for name in product if name in names)
        return min(places, default=len(names))

    return tuple(sorted(range(len(part.move.targets[0].axes)), key=place))
