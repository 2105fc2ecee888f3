"""The numbers in the paths of a table, and what its rows do with them.

A number is told by all that is around it in a path. A row runs over the numbers there,
or names some; a row that is written in another way takes the same numbers. What the
numbers of a model say of others is not decided here (see ``single_numbers``).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias

from treeadapt.porting.drafts.parts import Pattern
from treeadapt.porting.drafts.rows import (
    LARGE_NUMBER,
    LAYER_WORDS,
    by_template,
    template_of,
    tokens_of,
    with_number,
)
from treeadapt.porting.drafts.writing import WrittenRow

#: A side, 0 for the source, and what is before a number in its paths.
Above: TypeAlias = tuple[int, Pattern]

#: What is after each number of some paths that are alike before it.
Members: TypeAlias = Mapping[str, AbstractSet[Pattern]]


class PathNumber(NamedTuple):
    """A number of the paths of a side, by all that is around it."""

    side: int
    template: Pattern
    position: int

    @property
    def above(self) -> Above:
        """The side, and what is before the number."""
        return self.side, self.template[: self.position]

    @property
    def is_after_a_word(self) -> bool:
        """Whether nothing is between a word and the number, as in ``conv1``."""
        before = self.template[self.position - 1] if self.position else None
        return before is not None and before.isalpha()


class Use(NamedTuple):
    """What a row does with a number of its paths.

    Attributes:
        row: its place in the table.
        numbers: that its leaves have there.
        runs: whether it takes any number, or any after the first ones.
        names: whether there are numbers that it does not take.
        is_part: whether it would run, but for what it leaves to other rows.
        is_after: whether it runs over those after a number, which no size says.
    """

    row: int
    numbers: frozenset[int]
    runs: bool
    names: bool
    is_part: bool
    is_after: bool


class PathNumbers:
    """All numbers of a table.

    Attributes:
        rows: the table.
        uses: of each number.
        running: rows that run over the numbers after some tokens.
        counts: after which tokens numbers are counts, because rows run over some.
        last: the largest number after some tokens.
    """

    def __init__(self, rows: Sequence[WrittenRow]) -> None:
        self.rows = rows
        self.uses: dict[PathNumber, list[Use]] = {}
        self.running: dict[Above, set[int]] = collections.defaultdict(set)
        self.counts: set[Above] = set()
        self.last: dict[Above, int] = collections.defaultdict(int)
        for number, each in enumerate(rows):
            for place, use in _uses(number, each):
                self.uses.setdefault(place, []).append(use)
                self.running[place.above] |= {number} if use.runs else set()
                self.counts |= {place.above} if use.runs or use.is_part else set()
                self.last[place.above] = max(self.last[place.above], *use.numbers)

    @functools.cached_property
    def _by_block(self) -> Mapping[Above, Mapping[tuple[str, ...], Members]]:
        """What is after some tokens, by the numbers before: those of a block."""
        blocks: dict[Above, dict[tuple[str, ...], dict[str, set[Pattern]]]] = {}
        for row in (each.row for each in self.rows):
            sides = ((0, row.source_paths), (1, row.target_paths))
            for side, path in ((s, path) for s, paths in sides for path in paths):
                template, block = template_of(path), tuple[str, ...]()
                for at, token in enumerate(tokens_of(path)):
                    if template[at] is None:
                        members = blocks.setdefault((side, template[:at]), {})
                        after = members.setdefault(block, {}).setdefault(token, set())
                        after.add(template[at + 1 :])
                        block += (token,)
        return blocks

    def numbers_after(self, above: Above) -> set[str]:
        """Return all numbers that paths have after some tokens."""
        blocks = self._by_block.get(above, {}).values()
        return {number for members in blocks for number in members}

    def members_of_blocks(self, above: Above) -> Members | None:
        """Return what each block has after some tokens; None if it is counted there.

        Rows run over the blocks, none runs over the members, and each of several blocks
        has the same ones.
        """
        side, tokens = above
        number_of_block = [at for at, token in enumerate(tokens) if token is None][-1:]
        are_run_over = any(self.running[side, tokens[:at]] for at in number_of_block)
        blocks = [*self._by_block.get(above, {}).values()]
        if above in self.counts or not are_run_over or len(blocks) < 2:
            return None
        are_alike = all(members.keys() == blocks[0].keys() for members in blocks)
        return blocks[0] if are_alike else None


def is_of_layers(above: Above) -> bool:
    """Return whether the last word before a number is one of layers."""
    return not LAYER_WORDS.isdisjoint(_last_word(above))


def ends_in(above: Above, words: frozenset[str]) -> bool:
    """Return whether the last word before a number is one of some, or ends in one.

    As ``EncoderBlock_0``; no word ends in one of one letter.
    """
    endings = tuple(word for word in words if len(word) > 1)
    return any(w in words or w.endswith(endings) for w in _last_word(above))


def _last_word(above: Above) -> list[str]:
    return [token.lower() for token in above[1] if token and token.isalpha()][-1:]


def _uses(number: int, each: WrittenRow) -> Iterator[tuple[PathNumber, Use]]:
    """Yield what a row does with each number of its paths."""
    sized = bool(each.spelling.sizes)
    there = each.respelled(sizes={}).read if sized else each.read
    sides = ((there, each.row.source_paths), (there.reversed(), each.row.target_paths))
    fewest = 0
    for side, (read, paths) in enumerate(sides):
        templates = by_template(paths)
        for template, members in templates.items():
            if None not in template:
                continue
            # A number of a target that the source has, too, is judged there.
            is_new = side == 0 or template.count(None) > fewest
            every = [*zip(*map(tokens_of, members), strict=True)]
            tokens = [numbers[0] for numbers in every]
            for position, numbers in enumerate(every):
                if template[position] is not None:
                    continue
                takes_large, takes_first = (
                    each.row.is_rest or read.takes(with_number(tokens, position, new))
                    for new in (LARGE_NUMBER, "0")
                )
                is_shifted = takes_large and not takes_first
                is_copied = len(each.row.targets) > 1 and len({*numbers}) > 1
                is_listed = bool(each.spelling.lists) and not takes_large
                use = Use(
                    number,
                    frozenset(map(int, numbers)),
                    runs=takes_large,
                    names=(is_new or is_copied)
                    and (not takes_large or (is_shifted and not sized)),
                    is_part=is_shifted or is_listed,
                    is_after=is_shifted and not sized,
                )
                yield PathNumber(side, template, position), use
        fewest = min((template.count(None) for template in templates), default=0)
