"""Arrays that are stored as codes and scales, read as the numbers that these mean.

A number is (table[code] - zero) * scale. Codes of a few bits are packed into words
along one axis, and scales are on a grid of blocks, so a box of the array needs boxes of
its parts alone. Numbers are float32 a few rows at a time, and are rounded once.
Knows no names: see ``quantized_forms`` for which leaves belong together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from treeadapt.checkpoints.array_boxes import FileArray
from treeadapt.migrations.box_parts import Box, lengths, whole
from treeadapt.trees.arrays import empty

_STEP = 2**18  # numbers that are float32 at a time; they fit a cache
#: The numbers that codes of one byte mean as exponents of 2, as libraries compute them.
EXPONENTS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32("inf"))


@dataclasses.dataclass(frozen=True)
class Reshaped:
    """An array under another shape and dtype, read whole."""

    array: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, boxes: Sequence[Box]) -> list[Any]:
        """Return boxes of it."""
        array = np.ascontiguousarray(self.array).reshape(-1)
        return [array.view(self.dtype).reshape(self.shape)[box] for box in boxes]


def reshaped(array: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """Return what reads an array under another shape, and dtype of the same bytes."""
    form = {"shape": tuple(shape), "dtype": dtype or array.dtype}
    if isinstance(array, FileArray):
        return dataclasses.replace(array, **form)
    return Reshaped(array, **form)


@dataclasses.dataclass(frozen=True)
class Codes:
    """Codes of a few bits in words, which follow each other along one axis.

    Attributes:
        words: reads boxes of the words.
        bits: of a code.
        axis: along which a word has several.
        order: for each place in a word, which of its codes is there, the lowest bits
            being 0; empty for that order.
    """

    words: Any
    bits: int = 8
    axis: int = 0
    order: tuple[int, ...] = ()

    @property
    def _count(self) -> int:
        return int(self.words.dtype.itemsize) * 8 // self.bits

    def box_of_words(self, box: Box) -> Box:
        """Return the box of the words that hold a box of codes."""
        axis, count = self.axis, self._count
        cut = slice(box[axis].start // count, -(-box[axis].stop // count))
        return (*box[:axis], cut, *box[axis + 1 :])

    def read(self, boxes: Sequence[Box]) -> list[Any]:
        """Return boxes of codes, one byte each."""
        words = self.words.read([self.box_of_words(box) for box in boxes])
        return [self.unpacked(*pair) for pair in zip(words, boxes, strict=True)]

    def unpacked(self, words: Any, box: Box) -> Any:
        """Return a box of codes, given the box of its words."""
        axis, count = self.axis, self._count
        words = words.view(f"u{words.dtype.itemsize}")
        if count == 1:
            return words
        shape = (*words.shape[: axis + 1], count, *words.shape[axis + 1 :])
        codes = np.empty(shape, np.uint8)
        mask = words.dtype.type(2**self.bits - 1)
        for place, code in enumerate(self.order or range(count)):
            at = (slice(None),) * (axis + 1) + (place,)
            codes[at] = (words >> words.dtype.type(code * self.bits)) & mask
        codes = codes.reshape(*words.shape[:axis], -1, *words.shape[axis + 1 :])
        start, length = box[axis].start % count, lengths(box)[axis]
        return codes[(slice(None),) * axis + (slice(start, start + length),)]


@dataclasses.dataclass(frozen=True)
class PackedArray:
    """An array of numbers of 4 bits, two in a byte, the low bits first.

    Attributes:
        codes: the numbers as they are in the bytes.
        shape: of the array.
        dtype: of the array, in which a number has a byte.
    """

    codes: Codes
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

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
        codes = self.codes.read(boxes)
        arrays = [np.ascontiguousarray(each).view(self.dtype) for each in codes]
        for place, given in enumerate(into):
            if given is not None:
                given[...] = arrays[place]
                arrays[place] = given
        return arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodedArray:
    """An array that is stored as codes and scales.

    Attributes:
        shape: of what is meant.
        dtype: of what is meant.
        codes: by the axes that they are stored with.
        table: the number that each code stands for, float32.
        scale: by blocks of codes; unsigned bytes are exponents of 2.
        blocks: how many codes a block has along each axis.
        zero: by blocks, what is subtracted from the number of each code; or None.
        divides: whether numbers are divided by their scale.
        factor: of all numbers, after their scale.
        offset: of all numbers, after that.
        swaps: whether the last two axes are stored the other way round.
        is_flat: whether codes have one axis, for all numbers in row-major order.
        groups: the row of ``scale`` for each row of codes; None where it is the block.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    codes: Codes
    table: Any
    scale: Any
    blocks: tuple[int, ...]
    zero: Any = None
    divides: bool = False
    factor: Any = None
    offset: Any = None
    swaps: bool = False
    is_flat: bool = False
    groups: Any = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.read([whole(self.shape)])[0]

    def read(self, boxes: Sequence[Box], into: Sequence[Any] = ()) -> list[Any]:
        """Read boxes, each to an array of NumPy; codes that they share are read once.

        Args:
            boxes: of the array.
            into: contiguous arrays to fill, None for a new one; empty for new ones.

        Raises:
            CheckpointError: a file ends before, or cannot be read.
        """
        arrays = [
            empty(lengths(box), self.dtype) if given is None else given
            for box, given in zip(boxes, into or [None] * len(boxes), strict=True)
        ]
        filled = [number for number, array in enumerate(arrays) if array.size]
        stored = [self._stored(boxes[number]) for number in filled]
        words = self.codes.words.read([*map(self.codes.box_of_words, stored)])
        for number, box in zip(filled, stored, strict=True):
            numbers = self._numbers(box, words.pop(0))
            array, columns = arrays[number], boxes[number][1:]
            if not self.is_flat:
                turned = np.swapaxes(array, -1, -2) if self.swaps else array
                self._fill(turned, box, numbers)
            elif columns == whole(self.shape[1:]):
                self._fill(array.reshape(-1), box, numbers)
            else:
                rows = empty(lengths(box), self.dtype)
                self._fill(rows, box, numbers)
                array[...] = rows.reshape(-1, *self.shape[1:])[(slice(None), *columns)]
        return arrays

    def _stored(self, box: Box) -> Box:
        """Return the box of codes for a box of the array."""
        if self.is_flat:
            length = math.prod(self.shape[1:])
            return (slice(box[0].start * length, box[0].stop * length),)
        return (*box[:-2], box[-1], box[-2]) if self.swaps else box

    def _fill(self, array: Any, box: Box, numbers: Callable[[Box], Any]) -> None:
        with np.errstate(all="ignore"):  # as in the file: infinite stays infinite
            for piece in _pieces(box):
                array[_within(piece, box)] = numbers(piece).astype(self.dtype)

    def _numbers(self, box: Box, words: Any) -> Callable[[Box], Any]:
        """Read the scales of a box; return what gives the numbers of a piece of it."""
        read_words = self.codes.box_of_words(box)
        grid = _around(self._places(box))
        scale = _scales(self.scale, grid)
        (zero,) = (None,) if self.zero is None else self.zero.read([grid])

        def numbers(piece: Box) -> Any:
            some = words[_within(self.codes.box_of_words(piece), read_words)]
            values = np.take(self.table, self.codes.unpacked(some, piece))
            places = self._places(piece)
            cut = _around(places)
            places = [each - one.start for each, one in zip(places, cut, strict=True)]
            if zero is not None:
                values -= _spread(zero[_within(cut, grid)].astype(np.float32), places)
            if self.divides:
                values /= _spread(scale(cut), places)
            else:
                values *= _spread(scale(cut), places)
            if self.factor is not None:
                values *= self.factor
            if self.offset is not None:
                values += self.offset
            return values

        return numbers

    def _places(self, box: Box) -> list[Any]:
        """Return the block of each place along each axis of a box."""
        pairs = zip(box, self.blocks, strict=True)
        places = [np.arange(each.start, each.stop) // size for each, size in pairs]
        if self.groups is not None:
            places[0] = self.groups[box[0]]
        return places


def _scales(scale: Any, grid: Box) -> Callable[[Box], Any]:
    """Read a part of a grid of scales; return what gives pieces of it as numbers."""
    if isinstance(scale, DecodedArray):  # scales have scales, too
        (words,) = scale.codes.words.read([scale.codes.box_of_words(grid)])
        return scale._numbers(grid, words)
    (stored,) = scale.read([grid])

    def numbers(piece: Box) -> Any:
        some = stored[_within(piece, grid)]
        is_exponent = some.dtype == np.uint8
        return EXPONENTS[some] if is_exponent else some.astype(np.float32)

    return numbers


def _pieces(box: Box) -> Iterator[Box]:
    """Yield small boxes that together are a box, as many rows as fit each."""
    sizes = lengths(box)
    axis = next(k for k in range(len(sizes)) if math.prod(sizes[k + 1 :]) <= _STEP)
    step = max(1, _STEP // max(1, math.prod(sizes[axis + 1 :])))
    rows = box[axis]
    for outer in itertools.product(*(range(s.start, s.stop) for s in box[:axis])):
        above = [slice(place, place + 1) for place in outer]
        for first in range(rows.start, rows.stop, step):
            cut = slice(first, min(first + step, rows.stop))
            yield (*above, cut, *box[axis + 1 :])


def _within(piece: Box, box: Box) -> Box:
    """Return where a piece is in what was read of a box."""
    pairs = zip(piece, box, strict=True)
    return tuple(slice(p.start - b.start, p.stop - b.start) for p, b in pairs)


def _around(places: Sequence[Any]) -> Box:
    """Return the box of a grid that has some places of each axis."""
    return tuple(slice(int(each.min()), int(each.max()) + 1) for each in places)


def _spread(grid: Any, places: Sequence[Any]) -> Any:
    """Return the number of a grid for each place; axes of one block are broadcast."""
    for axis, place in reversed([*enumerate(places)]):
        if grid.shape[axis] > 1:
            grid = np.take(grid, place, axis=axis)
    return grid
