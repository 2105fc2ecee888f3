"""Numbers of paths that a row names, and other rows run over.

A model with more layers has other numbers: ``layers.3.w``, dropped, was the last of
four; ``{l+6}`` begins after two blocks of three. A number that no row runs over, as of
``Conv_0`` and ``Conv_1``, is a part of a name; so is a small one right after a word, as
of ``bn1``. Where all rows move leaves alike, and each number becomes itself plus the
same, it is only written apart, as of the one kernel of three that is 1 by 1. Where a
list gives numbers other ones, as ``{n=1a,2a,2b}`` and ``{n=0,1,2}``, they were counted
through this model, and so was what else is in that place.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from treeadapt.porting.drafts.parts import Pattern
from treeadapt.porting.drafts.rows import (
    DraftAddress,
    DraftRow,
    Hole,
    are_renumbered,
    by_template,
    is_count,
    template_of,
    tokens_of,
)
from treeadapt.porting.drafts.writing import WrittenRow
from treeadapt.text.names import listing, natural

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
        is_same = _are_only_renamed(place, [rows[use.row].row for use in every])
        for use in every:
            others = [other for other in every if other.row != use.row]
            is_among = any(o.runs or o.is_part or use.is_part for o in others)
            is_last = 0 < last[place.above] == max(use.numbers)
            is_run_over = bool(runs[place.above] - {use.row})
            is_dropped = is_last and is_run_over and not rows[use.row].targets
            if use.names and is_among and is_same:
                continue
            if use.names and (is_among or is_dropped):
                above = "".join("#" if t is None else t for t in place.above[1])
                note = f"numbers after {above!r} were seen at this size alone"
                row = marked[use.row].row.marked("numbers", note)
                marked[use.row] = marked[use.row].with_row(row)
            elif use.names and is_run_over and max(use.numbers) and not place.side:
                alone.add(use.row)
    for number in _shifted_apart(rows):
        note = "what is added to these numbers was seen at this size alone"
        row = marked[number].row.marked("numbers", note)
        marked[number] = marked[number].with_row(row)
    for number in _counted_through(rows, uses, inner):
        note = "numbers that a list gives other ones were seen at this size alone"
        row = marked[number].row.marked("numbers", note)
        marked[number] = marked[number].with_row(row)
    names = [marked[n].sources[0] for n in sorted(alone) if not marked[n].row.checks]
    return marked, f"{_ALONE} {listing(names, limit=3)}." if names else ""


def _is_of_a_word(place: _Place, uses: Sequence[_Use]) -> bool:
    """Return whether a number is small and right after a word, as of ``conv1``."""
    before = place.template[place.position - 1] if place.position else None
    most = max(max(use.numbers) for use in uses)
    return before is not None and before.isalpha() and most <= _MOST_IN_A_WORD


def _are_only_renamed(place: _Place, rows: Sequence[DraftRow]) -> bool:
    """Return whether rows move leaves alike, and add the same to their numbers."""
    if place.side == 1 or any(len(row.places) != 2 for row in rows):
        return False
    widest = min(
        rows, key=lambda row: sum(axis == ((),) for axis in row.sources[0].axes)
    )
    if not all(_move_alike(row, widest) for row in rows):
        return False
    sums: dict[int, set[int]] = {}
    templates: set[Pattern] = set()
    for row in rows:
        for (old, *_), news in row.pairs:
            if template_of(old) == place.template:
                number = int(tokens_of(old)[place.position])
                templates |= {*map(template_of, news)}
                for at, token in enumerate(tokens_of(news[0]) if news else ()):
                    if is_count(token):
                        sums.setdefault(at, set()).add(int(token) - number)
    return len(templates) == 1 and any(len(every) == 1 for every in sums.values())


def _move_alike(one: DraftRow, other: DraftRow) -> bool:
    """Return whether rows do the same to arrays, axes of size 1 apart."""
    if one.changes != other.changes or one.takes or one.copies or other.copies:
        return False
    first, second = _axes_taken(one), _axes_taken(other)
    if first is None or second is None:
        return one.sources[0].axes == other.sources[0].axes and (
            one.targets[0].axes == other.targets[0].axes
        )
    return len(first) == len(second) and all(
        a == b or None in (a, b) for a, b in zip(first, second, strict=True)
    )


def _axes_taken(row: DraftRow) -> list[int | None] | None:
    """Return the axis of the source that is each axis of the target.

    None for one of size 1, and in place of all if an axis is made of others.
    """
    (source,), (target,) = row.sides
    if any(len(axis) > 1 or len(axis[0]) > 1 for p in row.places for axis in p.axes):
        return None
    places = {axis[0]: place for place, axis in enumerate(source.axes) if axis[0]}
    if any(axis[0] and axis[0] not in places for axis in target.axes):
        return None
    return [places[axis[0]] if axis[0] else None for axis in target.axes]


def _shifted_apart(rows: Sequence[WrittenRow]) -> list[int]:
    """Return rows that add to numbers of the source what others do not.

    As where stages follow each other in the target: how many layers those before have
    is of this model. Numbers that no row runs over are names.
    """
    added: dict[Pattern, dict[int, set[int]]] = {}
    run_over: set[Pattern] = set()
    for number, each in enumerate(rows):
        if each.row.is_rest or len(each.row.places) != 2:
            continue
        (source,), (target,) = each.row.sides
        holes = {t.atoms: t for t in source.tokens if isinstance(t, Hole)}
        fixed = _fixed_shifts(source, target)
        above: Pattern = ()
        for at, token in enumerate(target.tokens):
            shifts = {fixed[at]} if at in fixed else set()
            if isinstance(token, Hole) and token.atoms in holes:
                shifts = _shifts(holes[token.atoms], token)
                run_over |= set() if token.texts else {above}
            added.setdefault(above, {}).setdefault(number, set()).update(shifts)
            is_number = isinstance(token, Hole) or is_count(token)
            above = (*above, None if is_number else str(token))
    return [
        number
        for above in added
        if above in run_over and len(set().union(*added[above].values())) > 1
        for number, shifts in added[above].items()
        if shifts - {0}
    ]


def _fixed_shifts(source: DraftAddress, target: DraftAddress) -> dict[int, int]:
    """Return what is added to numbers that are no holes, by their place in a target.

    As of a stage of one layer. A number right after a word is a part of it.
    """
    olds, news = (
        [
            (at, token)
            for at, token in enumerate(place.tokens)
            if isinstance(token, Hole) or is_count(token)
        ]
        for place in (source, target)
    )
    if len(olds) != len(news):
        return {}
    return {
        new_at: int(new) - int(old)
        for (old_at, old), (new_at, new) in zip(olds, news, strict=True)
        if isinstance(old, str) and isinstance(new, str)
        if not (old_at and str(source.tokens[old_at - 1]).isalpha())
    }


def _shifts(old: Hole, new: Hole) -> set[int]:
    """Return what is added to the numbers of a path; nothing of texts."""
    if not (old.texts or new.texts):
        return {new.shift - old.shift}
    pairs = [*zip(old.texts, new.texts, strict=False)]
    are_numbers = all(is_count(text) for pair in pairs for text in pair)
    return {int(two) - int(one) for one, two in pairs} if are_numbers else set()


def _counted_through(
    rows: Sequence[WrittenRow],
    uses: Mapping[_Place, Sequence[_Use]],
    inner: Collection[tuple[int, Pattern]],
) -> list[int]:
    """Return rows that give numbers other ones, and all in the same places.

    As of blocks that the target counts through all stages: their numbers follow from
    how many each stage has. The first of all is the first in any model, unless they are
    counted from the last.
    """
    lists = [(n, found) for n, each in enumerate(rows) for found in _lists(each.row)]
    marked = {n for n, (_, olds, news) in lists if are_renumbered(olds, news)}
    alone = (found for place in uses for found in _moved(place, rows, uses))
    places: dict[Pattern, bool] = {}
    for above, olds, news in itertools.chain((found for _, found in lists), alone):
        if are_renumbered(olds, news):
            order = sorted(range(len(olds)), key=[*map(natural, olds)].__getitem__)
            is_rising = [news[n] for n in order] == sorted(news, key=natural)
            places[above] = places.get(above, True) and is_rising
    for number, each in enumerate(rows if places else ()):
        for path in () if each.row.is_rest else each.row.target_paths:
            template, tokens = template_of(path), tokens_of(path)
            for at, token in enumerate(template):
                above = template[:at]
                every = {above, above[:-2]} if (1, above) in inner else {above}
                is_rising = all(places.get(place, True) for place in every)
                is_there = token is None and not every.isdisjoint(places)
                if is_there and (int(tokens[at]) or not is_rising):
                    marked.add(number)
    return sorted(marked)


def _moved(
    place: _Place, rows: Sequence[WrittenRow], uses: Mapping[_Place, Sequence[_Use]]
) -> Iterator[tuple[Pattern, Sequence[str], Sequence[str]]]:
    """Yield what is before numbers that rows name, those of sources, and these numbers.

    Nothing where one of the numbers of the sources becomes itself plus the same, or
    where those right after words, which are names, are needed to tell them apart.
    """
    groups: dict[Pattern, dict[tuple[str, ...], str]] = {}
    for use in uses[place] if place.side == 1 else ():
        row = rows[use.row].row
        is_plain = len(row.places) == 2 and not use.runs
        for sources, targets in row.pairs if is_plain else ():
            if template_of(targets[0]) != place.template:
                continue
            template, tokens = template_of(sources[0]), tokens_of(sources[0])
            numbers = (tokens[at] for at, each in enumerate(template) if each is None)
            new = tokens_of(targets[0])[place.position]
            groups.setdefault(template, {})[tuple(numbers)] = new
    for template, group in groups.items():
        columns = [*zip(*group, strict=True)]
        places = (at for at, each in enumerate(template) if each is None)
        of_names = [at > 0 and str(template[at - 1]).isalpha() for at in places]
        counted = {
            (*itertools.compress(numbers, map(operator.not_, of_names)), new)
            for numbers, new in group.items()
        }
        is_of_counts = len({key[:-1] for key in counted}) == len(counted)
        is_one = len({*group.values()}) == 1  # a part of a name, as 2 of ``fc_2``
        if (
            is_of_counts
            and not is_one
            and all(are_renumbered(each, [*group.values()]) for each in columns)
        ):
            olds = [".".join(numbers) for numbers in group]
            yield place.above[1], olds, [*group.values()]


def _lists(row: DraftRow) -> Iterator[tuple[Pattern, Sequence[str], Sequence[str]]]:
    """Yield what is before the lists of a target, and those of both sides."""
    olds = [t for each in row.sources for t in each.tokens if isinstance(t, Hole)]
    for address in row.targets:
        above: Pattern = ()
        for token in address.tokens:
            is_number = isinstance(token, Hole) or is_count(token)
            if isinstance(token, Hole):
                every = (old for old in olds if old.atoms == token.atoms)
                yield from ((above, old.texts, token.texts) for old in every)
            above = (*above, None if is_number else str(token))


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
