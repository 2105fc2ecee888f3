"""Renumbering: what ``take`` of one row makes of the numbers in paths.

Takes one row and the leaves that it takes; gives these leaves with the places of their
numbers among those that are taken. With ``{"take": {"l": "::2"}}`` the leaf ``h.4.w``
of ``h.{l}.w`` becomes number 2, and ``h.3.w`` is left out. What ``take`` may say is in
``take``; along axes, ``running`` takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from treeadapt.migrations.group import Taken
from treeadapt.migrations.problems import UnplannedError
from treeadapt.migrations.rows import Row
from treeadapt.migrations.take import Order, taken_name
from treeadapt.migrations.templates import Capture, compose, decompose
from treeadapt.text.names import listing, plural


@dataclasses.dataclass
class Renumbering:
    """The numbers that one row takes.

    Attributes:
        row: the row.
        lengths: see ``lengths_after``.
        left_out: paths of leaves of which the numbers are not taken.
        new_numbers: for each number in a path, after what is before it, that of the
            result; None where the leaf is left out.
    """

    row: Row
    lengths: Mapping[str, int]
    left_out: list[str] = dataclasses.field(default_factory=list)
    new_numbers: dict[tuple[str, int], int | None] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._takes = dict(self.row.values.take)
        self._selected: dict[str, tuple[int, int]] = {}

    @property
    def selected(self) -> tuple[tuple[str, int, int], ...]:
        """Names of which not all numbers are taken: how many, and of how many."""
        return tuple((name, *counts) for name, counts in self._selected.items())

    def order(self, name: str, size: int) -> Order:
        """Return which numbers of a name are taken, of so many.

        Raises:
            UnplannedError: none is.
        """
        order = self._takes[name].order_of(size)
        if len(order) < size:
            self._selected[name] = len(order), size
        if not len(order):
            text = f"take leaves none of the {size:,} numbers of {name}"
            raise UnplannedError(text)
        return order.inverse if self.row.values.undoes else order

    def orders(
        self, names: Collection[str], sizes: Mapping[str, int], source_path: str
    ) -> tuple[tuple[str, Order], ...]:
        """Return which numbers are taken along axes.

        Args:
            names: of these axes, among others.
            sizes: of all numbers, and of those that are taken.
            source_path: of the first source, for messages.

        Raises:
            UnplannedError: the targets have places for more, or fewer.
        """
        orders = [
            (name, self.order(name, sizes[name]))
            for name in self._takes
            if name in names
        ]
        for name, order in orders:
            if len(order) != sizes[taken_name(name)]:
                text = f"{plural(len(order), 'number')} of {name} are taken, and there"
                there = f"are places for {sizes[taken_name(name)]:,}"
                raise UnplannedError(f"{listing([source_path])}: {text} {there}")
        return tuple(orders)

    def number(self, name: str, place: int) -> int:
        """Return the number in a path that has a place among those that are taken."""
        by_taken = {taken_name(each): each for each in self._takes}
        if name not in by_taken:
            return place
        size = self._selected.get(by_taken[name], (0, place + 1))[1]
        numbers = self.order(by_taken[name], size).numbers
        return int(numbers[place]) if place < len(numbers) else place

    def apply(
        self, matches: Sequence[Taken], counts: dict[str, int]
    ) -> tuple[Sequence[Taken], dict[str, int]]:
        """Return leaves with the places of their numbers among those that are taken.

        Args:
            matches: all leaves; those that are not taken become ``left_out``.
            counts: of the numbers in their paths, by name.

        Raises:
            UnplannedError: a list names other numbers than there are.
        """
        captures = (c for each in self.row.sources for c in each.path.captures)
        if all(self._takes.keys().isdisjoint(each.names) for each in captures):
            return matches, counts
        lengths = [self._lengths_of(match, counts) for match in matches]
        sizes = {**counts}
        for name in dict.fromkeys(name for each in lengths for name in each):
            sizes[name] = max(each[name] for each in lengths if name in each)
            sizes[taken_name(name)] = len(self.order(name, sizes[name]))
        places: dict[tuple[str, int], dict[int, int]] = {}
        for name, size in dict.fromkeys(
            pair for each in lengths for pair in each.items()
        ):
            numbers = self.order(name, size).numbers.tolist()
            places[name, size] = {number: n for n, number in enumerate(numbers)}
        kept = []
        for match, length in zip(matches, lengths, strict=True):
            by_name = {name: places[name, size] for name, size in length.items()}
            if new := self._taken(match, by_name, sizes):
                kept.append(new)
            else:
                self.left_out.append(match.path)
        most: dict[str, int] = {}  # a row may have the first layers only
        for (name, _), by_number in places.items():
            taken = [n + 1 for number, n in by_number.items() if number < counts[name]]
            most[taken_name(name)] = max([most.get(taken_name(name), 1), *taken])
        return kept, sizes | most

    def _lengths_of(self, match: Taken, counts: Mapping[str, int]) -> dict[str, int]:
        """Return how many numbers there are in the place of those of a leaf, by name.

        Args:
            match: the leaf.
            counts: of the numbers of the row.
        """
        template, lengths = self.row.sources[match.address].path, {}
        for capture in template.captures:
            for name in (name for name in capture.names if name in self._takes):
                lengths[name] = counts[name]
                if capture.entries or len(capture.names) > 1:
                    continue
                start = self._start(match, capture, counts)
                most = self.lengths.get(start, 0) - capture.shift
                lengths[name] = max(int(match.captures[name]) + 1, most)
                size = self._takes[name].size
                if size not in (0, lengths[name]):
                    text = f"{plural(lengths[name], 'number')} of {name} after"
                    cure = "the list names each once, or 'of' is next to it"
                    seen = f"and take has {size:,}: {cure}"
                    raise UnplannedError(f"{text} {listing([start])}, {seen}")
        return lengths

    def _start(self, match: Taken, capture: Capture, counts: Mapping[str, int]) -> str:
        """Return what the path of a leaf has before a capture."""
        template = self.row.sources[match.address].path
        values: dict[str, Any] = {}
        for each in template.captures:
            values |= decompose(each.names, match.captures[each.key], counts)
        return template.fill(values, counts, before=capture)

    def _taken(
        self,
        match: Taken,
        places: Mapping[str, Mapping[int, int]],
        counts: Mapping[str, int],
    ) -> Taken | None:
        """Return a leaf with its new numbers; None if one of them is not taken.

        Args:
            match: the leaf.
            places: of the numbers that are taken, by name.
            counts: of all numbers, and of those that are taken.
        """
        captures, is_kept = dict(match.captures), True
        sides = (
            row.sources[match.address].path.captures
            for row in (self.row, self.row.renamed)
        )
        for old, new in zip(*sides, strict=True):
            if old.key == new.key:
                continue
            values = decompose(old.names, captures.pop(old.key), counts)
            for name, by_number in places.items():
                if name in values:
                    values[name] = by_number.get(values[name])
            is_taken = None not in values.values()
            number = None
            if is_taken:
                sizes = dict(zip(old.names, map(counts.get, new.names), strict=True))
                number = captures[new.key] = compose(old.names, values, sizes)
            is_kept &= is_taken
            if not old.entries:
                start = self._start(match, old, counts)
                before = int(match.captures[old.key]) + old.shift
                after = None if number is None else number + old.shift
                self.new_numbers[start, before] = after
        return match._replace(captures=captures) if is_kept else None
