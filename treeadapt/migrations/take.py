"""Taking: which numbers along an axis are taken, and in which order.

Takes what a row has as ``take`` for one name: a list, which names every number of the
axis once or says out of how many it selects, or a slice as text. Gives an ``Order`` for
an axis of some size. Reads no array.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

MAX_TAKEN = 262_144  # numbers of one list, which a file may hold, too
_SHORT_RUN = 3  # numbers that are written one by one
_SLICE = re.compile(r"(-?[0-9]{1,18})?:(-?[0-9]{1,18})?(?::(-?[0-9]{1,18})?)?")
_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")


@dataclasses.dataclass(frozen=True)
class Order:
    """Numbers along an axis, in the order in which they are taken.

    Attributes:
        runs: of neighbours, in order.

    Example:
        >>> order = Order.of([0, 2, 3, 1])
        >>> order.runs
        (range(0, 1), range(2, 4), range(1, 2))
        >>> order.inverse.numbers
        array([0, 3, 1, 2])
    """

    runs: tuple[range, ...]

    @classmethod
    def of(cls, numbers: Any) -> Order:
        """Return the order of some numbers."""
        every = np.asarray(numbers, np.int64)
        cuts = np.flatnonzero(np.diff(every) != 1) + 1
        firsts = [0, *cuts.tolist()] if every.size else []
        stops = [*cuts.tolist(), every.size]
        return cls(
            tuple(
                range(int(every[first]), int(every[first]) + stop - first)
                for first, stop in zip(firsts, stops, strict=False)
            )
        )

    @functools.cached_property
    def numbers(self) -> Any:
        """The numbers, as an array of NumPy."""
        runs = [np.arange(run.start, run.stop, run.step) for run in self.runs]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    @functools.cached_property
    def inverse(self) -> Order:
        """The order that undoes it, of one that takes every number once."""
        return Order.of(np.argsort(self.numbers))

    @functools.cached_property
    def breaks(self) -> list[int]:
        """Places at which the next number is not the neighbour of the last one."""
        return [int(n) for n in np.flatnonzero(np.diff(self.numbers) != 1) + 1]

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def within(self, places: range) -> tuple[range, Order]:
        """Return the range that holds some of the numbers, and their order in it.

        Args:
            places: of these numbers, at least one.
        """
        numbers = self.numbers[places.start : places.stop]
        first = int(numbers.min())
        return range(first, int(numbers.max()) + 1), Order.of(numbers - first)

    def after(self, start: int) -> Order:
        """Return the order of the same numbers with another one added to each."""
        return Order.of(self.numbers + start)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.runs)


@dataclasses.dataclass(frozen=True)
class Take:
    """What a row takes along one axis.

    Attributes:
        order: of a list; None for a slice.
        size: of the axis, as the list says; 0 for a slice.
        text: of the slice.
    """

    order: Order | None = None
    size: int = 0
    text: str = ""

    @property
    def is_order(self) -> bool:
        """Whether every number is taken once, whatever the size of the axis."""
        if self.order is None:
            first, last, step = _parts_of(self.text)
            return (first, last) == (None, None) and step in (None, 1, -1)
        return len(self.order) == self.size

    @property
    def needs_size(self) -> bool:
        """Whether a list does not name every number."""
        return self.order is not None and not self.is_order

    def order_of(self, size: int) -> Order:
        """Return the numbers that are taken of an axis of some size, in order."""
        if self.order is not None:
            return self.order
        return Order((range(size)[slice(*_parts_of(self.text))],))

    @property
    def typed(self) -> Any:
        """It as it is written in a table, but for the size."""
        if self.order is None:
            return self.text
        items: list[Any] = []
        for run in self.order.runs:
            is_long = len(run) > _SHORT_RUN
            items += [f"{run.start}:{run.stop}"] if is_long else run
        return items


def parse_take(typed: Any, size: int = 0) -> Take | str:
    """Read what is taken along one axis; return what is wrong with it as a text.

    Args:
        typed: numbers and runs of them, as ``[0, 2, "4:8"]``; or a slice, ``"::2"``.
        size: of the axis, for a list that does not name each of its numbers.

    Example:
        >>> parse_take(["0:3", 4], 8).order.numbers
        array([0, 1, 2, 4])
        >>> parse_take([0, 2])
        'it names 2 numbers, up to 2'
    """
    if isinstance(typed, str):
        is_slice = _SLICE.fullmatch(typed) and _parts_of(typed)[2] != 0
        return Take(text=typed) if is_slice else "it is not a slice"
    numbers = _numbers(typed)
    if isinstance(numbers, str):
        return numbers
    if len({*numbers}) < len(numbers):
        twice = next(n for n, count in Counter(numbers).items() if count > 1)
        return f"it names {twice} twice"
    most = max(numbers)
    if size and most >= size:
        return f"it names {most}, and the last number of {size:,} is {size - 1:,}"
    if not size and most >= len(numbers):
        return f"it names {len(numbers):,} numbers, up to {most:,}"
    return Take(Order.of(numbers), size or len(numbers))


def _numbers(typed: Any) -> list[int] | str:
    """Return the numbers of a list, or what is wrong with it."""
    items = typed.tolist() if isinstance(typed, np.ndarray) else typed
    if not isinstance(items, list | tuple | range) or not len(items):
        return "it is neither a list of numbers nor a slice"
    runs: list[range] = []
    for item in items:
        parts: tuple[int | None, int | None, int | None] = (None, None, None)
        if isinstance(item, str) and _SLICE.fullmatch(item):
            parts = _parts_of(item)
        elif type(item) is int or isinstance(item, np.integer):
            parts = (int(item), int(item) + 1, None)
        first, last, step = parts
        if first is None or last is None or step is not None or not 0 <= first < last:
            return f"{item!r:.80} is neither a number from 0 on nor a run as '0:8'"
        runs.append(range(first, last))
    if sum(map(len, runs)) > MAX_TAKEN:
        return f"it has more than {MAX_TAKEN:,} numbers, which only a slice may take"
    return [*itertools.chain(*runs)]


def _parts_of(text: str) -> tuple[int | None, int | None, int | None]:
    match = _SLICE.fullmatch(text)
    assert match is not None
    first, last, step = (None if part is None else int(part) for part in match.groups())
    return first, last, step


def taken_name(name: str) -> str:
    """Return how the numbers of a name that are taken are called."""
    return f"{name}'"


def plain_name(name: str) -> str:
    """Return the name of all numbers of which some are taken.

    Example:
        >>> plain_name(taken_name("l")), plain_name("l")
        ('l', 'l')
    """
    return name.removesuffix("'")


def lengths_after(paths: Sequence[str] | Mapping[str, Any]) -> dict[str, int]:
    """Return for each start of a path how many numbers may follow it.

    Example:
        >>> lengths_after(["h.0.w", "h.11.w"])
        {'h.': 12}
    """
    lengths: dict[str, int] = {}
    for path in paths:
        for start, number in numbers_in(path):
            lengths[start] = max(lengths.get(start, 0), number + 1)
    return lengths


def numbers_in(path: str) -> Iterator[tuple[str, int]]:
    """Yield the numbers in a path, each after what is before it."""
    for match in _NUMBER.finditer(path):
        yield path[: match.start()], int(match[0])
