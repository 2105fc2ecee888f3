"""Boxes of an array that are made on its device, of boxes of its sources.

Takes a ``MovedArray``, and what was read for each of its parts; gives boxes on devices,
bit for bit what ``MovedArray.read`` gives on the host. Only moves run there, on
unsigned integers as wide as the numbers: XLA may change a NaN that it only copies.
Reads nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.migrations.box_parts import Box, Part, lengths
from treeadapt.migrations.move import Move
from treeadapt.migrations.moved_array import MovedArray
from treeadapt.migrations.running import moved_numbers, no_mesh, on_auto_axes
from treeadapt.trees.arrays import least_value

_LEAST_BYTES = 2**26  # of arrays that share a program, which takes as long to compile
_FEW_ARRAYS = 2  # of which as many bytes are turned as of several
_LEAST_BYTES_OF_FEW = 2**28


def is_worth_compiling(num_arrays: int, num_bytes: int) -> bool:
    """Return whether a program is compiled for so many arrays of the same form."""
    is_few = num_arrays <= _FEW_ARRAYS
    return num_bytes >= (_LEAST_BYTES_OF_FEW if is_few else _LEAST_BYTES)


def only_moves(array: MovedArray) -> bool:
    """Return whether boxes of an array are numbers of its sources, and nothing else.

    Not where numbers or dtypes change, copies are compared, or numbers of the target
    are among them.
    """
    move = array.group.move
    if move is None or not array.divides or bits_of(array.dtype) is None:
        return False
    values = move.values
    sources = map(array.sources.__getitem__, array.group.source_paths)
    return not (
        values.computes
        or values.multiply
        or values.fills
        or values.repeats(is_source=True)
        or move.compares
        or move.zeros
        or (values.pad and least_value(array.dtype) is not None)
        or any(source.dtype != array.dtype for source in sources)
    )


def bits_of(dtype: Any) -> Any:
    """Return the dtype of integers that a device moves in the place of numbers.

    Returns:
        None where a device has them in other bytes than a file: booleans, complex
        numbers, those of less than a byte, and those that JAX narrows.
    """
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if not is_float and not jnp.issubdtype(dtype, jnp.integer):
        return None
    num_bits = jnp.finfo(dtype).bits if is_float else jnp.iinfo(dtype).bits
    bits = np.dtype(f"u{dtype.itemsize}")
    is_same = jax.dtypes.canonicalize_dtype(bits) == bits
    return bits if is_same and num_bits == 8 * dtype.itemsize else None


class BoxOnDevice:
    """A box of an array on a device, to which its parts come one by one.

    The device needs room for the box twice at most, and for what its part is made of.
    """

    def __init__(self, array: MovedArray, box: Box, parts: int, device: Any) -> None:
        self._shape, self._dtype = lengths(box), array.dtype
        self._bits, self._device = bits_of(array.dtype), device
        self._is_padded = bool(array.group.row.values.pads(is_source=False))
        self._is_alone = parts == 1 and not self._is_padded
        self._made: Any = None

    def add(self, part: Part, leaves: Sequence[Sequence[Any]]) -> list[Any]:
        """Put one part into the box.

        Args:
            part: of the box.
            leaves: what was read for each of its sources: arrays of NumPy, which must
                stay as they are until what is returned is ready.

        Returns:
            The leaves on the device.
        """
        sources = [
            [jax.device_put(leaf.view(self._bits), self._device) for leaf in of_source]
            for of_source in leaves
        ]
        picks = tuple((each.start, each.stop) for each in part.picks)
        if self._is_alone and lengths(part.picks) == self._shape:
            program = _whole(part.move, part.leaf, picks, self._dtype)
            self._made = on_auto_axes(program, sources)
        else:
            place = np.array([each.start for each in part.place], np.int32)
            program = _update(part.move, part.leaf, picks)
            self._made = on_auto_axes(program, self._bits_on_device(), place, sources)
        return [leaf for of_source in sources for leaf in of_source]

    def array(self) -> Any:
        """Return the box, once all parts are in it."""
        made = self._bits_on_device()
        is_done = made.dtype == self._dtype
        return made if is_done else on_auto_axes(_viewed(self._dtype), made)

    def _bits_on_device(self) -> Any:
        if self._made is None:
            with no_mesh():
                self._made = jnp.zeros(self._shape, self._bits, device=self._device)
        return self._made


@functools.lru_cache(maxsize=256)
def _whole(
    move: Move, leaf: int, picks: tuple[tuple[int, int], ...], dtype: Any
) -> Callable[..., Any]:
    """Return the program that makes a box at once."""

    def turned(sources: Any) -> Any:
        made = _made(move, leaf, picks, sources)
        return jax.lax.bitcast_convert_type(made, dtype)

    return jax.jit(turned)


@functools.lru_cache(maxsize=256)
def _update(
    move: Move, leaf: int, picks: tuple[tuple[int, int], ...]
) -> Callable[..., Any]:
    """Return the program that puts a part into a box, in the memory of that."""

    def updated(box: Any, place: Any, sources: Any) -> Any:
        part = _made(move, leaf, picks, sources)
        starts = [place[axis] for axis in range(box.ndim)]
        return jax.lax.dynamic_update_slice(box, part, starts)

    return jax.jit(updated, donate_argnums=0)


@functools.lru_cache(maxsize=64)
def _viewed(dtype: Any) -> Callable[..., Any]:
    """Return the program that gives the numbers that bits are, in other memory."""
    return jax.jit(lambda array: jax.lax.bitcast_convert_type(array, dtype))


def _made(
    move: Move, leaf: int, picks: tuple[tuple[int, int], ...], sources: Any
) -> Any:
    arrays, ends, pairs = moved_numbers(move, sources, jnp)
    assert not [*ends, *pairs], move  # which ``only_moves`` leaves to the host
    return arrays[0][leaf][(..., *(slice(*pick) for pick in picks))]
