"""What a conversion function makes of distinct numbers, and what it never reads.

It is called twice, with different numbers. What is in a result by chance, as ``x + 1``
of one leaf may be a number of another, is not there the second time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.porting.drafts.inputs import (
    Side,
    calling,
    distinct_numbers,
    is_flat,
    is_pair,
    read_side,
    yielded,
)
from treeadapt.porting.drafts.rows import by_template
from treeadapt.text.names import listing
from treeadapt.trees.views import view_tree

_MOST_CALLS = 32  # to find out which leaves are not read


class Conversion:
    """A function, and the tree whose form its argument has.

    Args:
        source: tree, or the path of a checkpoint or schema.
        side: its leaves.
        convert: the function.

    Raises:
        MigrationError: it is not a function.
    """

    def __init__(self, source: Any, side: Side, convert: Callable[[Any], Any]) -> None:
        if not callable(convert):
            raise MigrationError(
                f"convert= is {type(convert).__name__}, not a function."
            )
        self._source, self._side, self._convert = source, side, convert

    def called(self, nth: int) -> tuple[Side, Side]:
        """Return distinct numbers, others for each ``nth``, and what is made of them.

        Raises:
            MigrationError: the function raises, writes into its input, or returns no
                arrays.
        """
        arrays = distinct_numbers(self._side.leaves, nth)
        specs = {
            path: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for path, array in arrays.items()
        }
        reading = {
            path: functools.partial(_same, array) for path, array in arrays.items()
        }
        return Side(self._side.name, specs, reading), self._made(arrays)

    def below_zero(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the numbers of ``called`` with a minus, and what is made of them.

        Raises:
            MigrationError: the function raises on these.
        """
        arrays = {
            path: np.asarray(-array)
            if np.issubdtype(array.dtype, np.floating)
            else array
            for path, array in distinct_numbers(self._side.leaves).items()
        }
        with np.errstate(all="ignore"):  # roots and logarithms of these
            made = self.with_numbers(0, arrays)
        return arrays, {path: made.array(path) for path in made.leaves}

    def with_zeros(self, nth: int, paths: Iterable[str]) -> Side:
        """Return what is made of the numbers of ``called``, some leaves at zero.

        Raises:
            MigrationError: the function raises on zeros.
        """
        arrays = distinct_numbers(self._side.leaves, nth)
        return self.with_numbers(nth, {p: np.zeros_like(arrays[p]) for p in paths})

    def with_numbers(self, nth: int, numbers: Mapping[str, np.ndarray]) -> Side:
        """Return what is made of the numbers of ``called``, but for some leaves.

        Raises:
            MigrationError: the function raises on these.
        """
        arrays = distinct_numbers(self._side.leaves, nth) | dict(numbers)
        for array in arrays.values():
            array.flags.writeable = False
        return self._made(arrays)

    def dtypes(
        self, given: Side, made: Side
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the leaves' own dtypes, and those that the function makes of these.

        Args:
            given: what ``called`` gave, with float32 for all floating-point numbers.
            made: what the function made of it.

        Returns:
            Dtypes by path; None if the function does not take arrays of them.
        """
        before = {path: np.dtype(x.dtype) for path, x in self._side.leaves.items()}
        if any(given.leaves[path].dtype != dtype for path, dtype in before.items()):
            arrays = {
                path: array.astype(before[path])
                for path, array in distinct_numbers(self._side.leaves).items()
            }
            try:
                made = self._made(arrays)
            except MigrationError:
                return None
        return before, {path: np.dtype(x.dtype) for path, x in made.leaves.items()}

    def unread(self, paths: Sequence[str]) -> list[str]:
        """Return those of some leaves that the function does not depend on."""
        first, second = (distinct_numbers(self._side.leaves, nth) for nth in (0, 1))
        before = self._made(first)
        groups = by_template(paths)

        def is_read(some: Sequence[str]) -> bool:
            after = self._made(first | {path: second[path] for path in some})
            return after.leaves != before.leaves or any(
                not np.array_equal(as_bytes(before.array(p)), as_bytes(after.array(p)))
                for p in before.leaves
            )

        if not paths or not is_read(paths):
            return [*paths]
        if len(groups) > _MOST_CALLS:
            return []
        return [path for some in groups.values() if not is_read(some) for path in some]

    def _made(self, arrays: Mapping[str, Any]) -> Side:
        """Return what the function makes of arrays."""
        source = self._source
        if isinstance(source, str | os.PathLike) or is_flat(source):
            tree: Any = dict(arrays)
        else:
            view = view_tree(source)
            tree = view.rebuild([arrays.get(path, leaf) for path, leaf in view.items()])
        copies = {path: array.copy() for path, array in arrays.items()}
        integers = [p for p, x in arrays.items() if np.issubdtype(x.dtype, np.integer)]
        with calling(self._convert, integers):
            result = self._convert(tree)
            kind = type(result).__name__
            is_lazy = isinstance(result, Iterator | ItemsView)
            if is_lazy:
                result = [*result]
        is_list = isinstance(result, list) and result and all(map(is_pair, result))
        if is_lazy or is_list:
            result = yielded(result, kind)
        if result is None or isinstance(result, int | float | complex | str | bytes):
            raise MigrationError(
                f"convert= returned {kind}. It is to return the new tree."
            )
        for path, array in arrays.items():
            if not np.array_equal(as_bytes(array), as_bytes(copies[path])):
                raise MigrationError(
                    f"convert= wrote into its input, {listing([path])}. Let it copy "
                    "first."
                )
        what = f"what convert= returned, of type {kind}"
        made = read_side(result, self._side.leaves, what)
        if made.arrays is None:
            raise MigrationError("convert= returned shapes. It is to return arrays.")
        return made


def as_bytes(array: Any) -> np.ndarray:
    """Return the bytes of an array, to compare them."""
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _same(array: np.ndarray) -> np.ndarray:
    return array
