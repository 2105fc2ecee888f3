"""Numbers of paths that a row names, and other rows run over.

A model with more layers has other numbers: ``layers.3.w``, dropped, was the last of
four; ``{l+6}`` begins after two blocks of three. A number that no row runs over, as of
``Conv_0`` and ``Conv_1``, is a part of a name; so is a small one right after a word, as
of ``bn1``.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from treeadapt.porting.drafts.parts import Pattern
from treeadapt.porting.drafts.rows import by_template, tokens_of
from treeadapt.porting.drafts.writing import WrittenRow
from treeadapt.text.names import listing

_LARGE = "987654321"  # a number that no model has
_ALONE = (
    "Numbers of layers in a path are those of this model; with others, no row takes "
    "the leaves of:"
)
_MOST_IN_A_WORD = 3  # of numbers as in ``conv3``


class _Place(NamedTuple):
    """A number of the paths of a side, by all that is around it."""

    side: int
    template: Pattern
    position: int

    @property
    def above(self) -> tuple[int, Pattern]:
        """The side, and what is before the number."""
        return self.side, self.template[: self.position]


class _Use(NamedTuple):
    """What a row does with a number of its paths.

    Attributes:
        row: its place in the table.
        numbers: that its leaves have there.
        runs: whether it takes any number, or any after the first ones.
        names: whether there are numbers that it does not take.
        is_part: whether it would run, but for what it leaves to other rows.
    """

    row: int
    numbers: frozenset[int]
    runs: bool
    names: bool
    is_part: bool


def with_single_numbers(
    rows: Sequence[WrittenRow], inner: Collection[tuple[int, Pattern]]
) -> tuple[list[WrittenRow], str]:
    """Mark rows that name numbers of leaves that others have, too.

    Rows that drop the last of numbers which others run over are marked, too. A note is
    enough for others that name numbers of sources: no row takes other numbers there,
    which is an error.

    Args:
        rows: a table, rows that drop leaves included.
        inner: what is before numbers within a block, whose size is in ``sizes``.
    """
    uses: dict[_Place, list[_Use]] = {}
    runs: dict[object, set[int]] = collections.defaultdict(set)
    last: dict[object, int] = collections.defaultdict(int)
    for number, each in enumerate(rows):
        for place, use in _uses(number, each):
            uses.setdefault(place, []).append(use)
            runs[place.above] |= {number} if use.runs else set()
            last[place.above] = max(last[place.above], *use.numbers)
    marked, alone = [*rows], set()
    for place, every in uses.items():
        if place.above in inner or _is_of_a_word(place, every):
            continue
        for use in every:
            others = [other for other in every if other.row != use.row]
            is_among = any(o.runs or o.is_part or use.is_part for o in others)
            is_last = 0 < last[place.above] == max(use.numbers)
            is_run_over = bool(runs[place.above] - {use.row})
            is_dropped = is_last and is_run_over and not rows[use.row].targets
            if use.names and (is_among or is_dropped):
                above = "".join("#" if t is None else t for t in place.above[1])
                note = f"numbers after {above!r} were seen at this size alone"
                row = marked[use.row].row.marked("numbers", note)
                marked[use.row] = marked[use.row].with_row(row)
            elif use.names and is_run_over and max(use.numbers) and not place.side:
                alone.add(use.row)
    names = [marked[n].sources[0] for n in sorted(alone) if not marked[n].row.checks]
    return marked, f"{_ALONE} {listing(names, limit=3)}." if names else ""


def _is_of_a_word(place: _Place, uses: Sequence[_Use]) -> bool:
    """Return whether a number is small and right after a word, as of ``conv1``."""
    before = place.template[place.position - 1] if place.position else None
    most = max(max(use.numbers) for use in uses)
    return before is not None and before.isalpha() and most <= _MOST_IN_A_WORD


def _uses(number: int, each: WrittenRow) -> Iterator[tuple[_Place, _Use]]:
    """Yield what a row does with each number of its paths."""
    sized = bool(each.spelling.sizes)
    there = each.respelled(sizes={}).read if sized else each.read
    sides = ((there, each.row.source_paths), (there.reversed(), each.row.target_paths))
    fewest = 0
    for side, (read, paths) in enumerate(sides):
        templates = by_template(paths)
        for template, members in templates.items():
            # A number of a target that the source has, too, is judged there.
            is_new = side == 0 or template.count(None) > fewest
            every = [*zip(*map(tokens_of, members), strict=True)]
            tokens = [numbers[0] for numbers in every]
            for position, numbers in enumerate(every):
                if template[position] is not None:
                    continue
                takes_large, takes_first = (
                    each.row.is_rest
                    or read.takes("".join(_with_number(tokens, position, new)))
                    for new in (_LARGE, "0")
                )
                is_shifted = takes_large and not takes_first
                is_listed = bool(each.spelling.lists) and not takes_large
                use = _Use(
                    number,
                    frozenset(map(int, numbers)),
                    runs=takes_large,
                    names=is_new and (not takes_large or (is_shifted and not sized)),
                    is_part=is_shifted or is_listed,
                )
                yield _Place(side, template, position), use
        fewest = min((template.count(None) for template in templates), default=0)


def _with_number(tokens: Sequence[str], position: int, number: str) -> Sequence[str]:
    return (*tokens[:position], number, *tokens[position + 1 :])
