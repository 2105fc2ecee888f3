"""An array in a file whose axes are in another order, or with gaps, or repeat.

PyTorch saves what a view is a view of: the transpose of an array, every other row, one
row in the place of many. Boxes are read a few at a time from the stretch that they are
in, so that no more of it is in memory than a block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from treeadapt.checkpoints.array_boxes import FileArray
from treeadapt.migrations.box_parts import Box, lengths, whole
from treeadapt.trees.arrays import empty

_BLOCK_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class StridedArray:
    """An array whose numbers are in a stretch of a file.

    Attributes:
        stretch: from the first number of the array to the last.
        shape: of the array.
        strides: of each axis, in numbers; none is negative.
    """

    stretch: FileArray
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        return self.stretch.dtype

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.read([whole(self.shape)])[0]

    def read(self, boxes: Sequence[Box], into: Sequence[Any] = ()) -> list[Any]:
        """Read boxes, each to an array of NumPy.

        Args:
            boxes: of the array.
            into: arrays to fill, None for a new one; empty for new ones.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        arrays = [
            empty(lengths(box), self.dtype) if given is None else given
            for box, given in zip(boxes, into or [None] * len(boxes), strict=True)
        ]
        for box, array in zip(boxes, arrays, strict=True):
            if array.size:
                self._fill(box, array)
        return arrays

    def _fill(self, box: Box, array: Any) -> None:
        """Read a box, block by block along the axis whose places are farthest apart."""
        if not box:
            array[...] = self.stretch.read([(slice(0, 1),)])[0][0]
            return
        axis = int(np.argmax(self.strides))
        size_bytes = max(1, self.strides[axis]) * self.dtype.itemsize
        step = max(1, _BLOCK_BYTES // size_bytes)
        for start in range(0, array.shape[axis], step):
            stop = min(start + step, array.shape[axis])
            first = box[axis].start
            block = [*box]
            block[axis] = slice(first + start, first + stop)
            place = (slice(None),) * axis + (slice(start, stop),)
            array[place] = self._block(tuple(block))

    def _block(self, box: Box) -> Any:
        """Return a view of what is read for a box, which is not empty."""
        pairs = [*zip(box, self.strides, strict=True)]
        first = sum(part.start * stride for part, stride in pairs)
        last = sum((part.stop - 1) * stride for part, stride in pairs)
        (numbers,) = self.stretch.read([(slice(first, last + 1),)])
        steps = [stride * self.dtype.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(numbers, lengths(box), steps)


def array_in_file(
    path: Any,
    start_bytes: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> FileArray | StridedArray:
    """Return what reads an array, which is a ``FileArray`` if it is in row-major order.

    Args:
        path: of the file.
        start_bytes: of the first number.
        dtype: of the array.
        shape: of the array.
        strides: of each axis, in numbers; none is negative.
    """
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axes = zip(shape, strides, steps, strict=True)
    if 0 in shape or all(n == 1 or stride == step for n, stride, step in axes):
        return FileArray(path, start_bytes, shape, dtype)
    stretch = FileArray(path, start_bytes, (length(shape, strides),), dtype)
    return StridedArray(stretch, shape, strides)


def length(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many numbers there are from the first of an array to the last."""
    if 0 in shape:
        return 0
    pairs = zip(shape, strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)
