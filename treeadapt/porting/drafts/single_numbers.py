"""Numbers of paths that were seen at one model alone, and the rows that rest on them.

A model with more layers has other numbers: ``layers.3.w``, dropped, was the last of
four; ``{l+6}`` begins after two blocks of three. Most numbers say nothing of that kind.
One that no row runs over, as of ``Conv_0`` and ``Conv_1``, is a part of a name; so is a
small one right after a word, as of ``bn1``, and one of the few that each block of a
model has, as of its two norms ``LayerNorm_0`` and ``LayerNorm_2``. All others are
counts, and a row rests on those of this model for one of three reasons, which are the
three parts of this file:

- it names counts that other rows run over, and moves their leaves in its own way, or
  runs over those of which another row names some;
- it adds to counts what rows that fill the same place do not add;
- it gives counts others by a list, as ``{n=1a,2a,2b}`` and ``{n=0,1,2}``, or fills a
  place where a list does: these were counted through this model.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from treeadapt.porting.drafts.parts import Pattern
from treeadapt.porting.drafts.path_numbers import (
    Above,
    Members,
    PathNumber,
    PathNumbers,
    Use,
    is_of_layers,
)
from treeadapt.porting.drafts.rows import (
    LARGE_NUMBER,
    DraftAddress,
    DraftRow,
    Hole,
    are_renumbered,
    is_count,
    template_of,
    tokens_of,
    with_number,
)
from treeadapt.porting.drafts.writing import WrittenRow, written
from treeadapt.text.names import listing, natural

_ALONE = (
    "Numbers of layers in a path are those of this model; with others, no row takes "
    "the leaves of:"
)
_ANSWERS = "draft.check with twice as many answers it"
_ADDED = (
    "what is added to these numbers was seen at this size alone, and may follow from "
    "how many others there are: draft.check says what answers it"
)
_AMONG = (
    "another row has some of these numbers, and which ones it has in other models was "
    f"not seen: {_ANSWERS}; where all models have as many, delete the mark"
)
_LISTED = (
    "numbers that a list gives other ones were seen at this size alone: see the code, "
    "no check answers it"
)
_MOST_IN_A_WORD = 3  # of numbers as in ``conv3``


def with_single_numbers(
    rows: Sequence[WrittenRow], inner: Collection[Above]
) -> tuple[list[WrittenRow], str]:
    """Mark rows that rest on numbers of this model.

    A note is enough for those that name numbers of sources which no row takes at
    another size: that is an error.

    Args:
        rows: a table, rows that drop leaves included.
        inner: what is before numbers within a block, whose size is in ``sizes``.
    """
    numbers = PathNumbers(rows)
    named, alone = _named_among_others(numbers, inner)
    reasons = [
        *named,
        *((row, _ADDED) for row in _shifted_apart(rows)),
        *((row, _LISTED) for row in _counted_through(numbers, inner)),
        *((n, _LISTED) for n, each in enumerate(rows) if _has_padded(each.row)),
    ]
    marked = [*rows]
    for row, note in reasons:
        marked[row] = marked[row].with_row(marked[row].row.marked("numbers", note))
    names = [marked[n].sources[0] for n in sorted(alone) if not marked[n].row.checks]
    return marked, f"{_ALONE} {listing(names, limit=3)}." if names else ""


def _has_padded(row: DraftRow) -> bool:
    """Return whether a list has numbers such as ``02``, which no capture counts."""
    lists = (
        token.texts
        for place in row.places
        for token in place.tokens
        if isinstance(token, Hole) and len(token.texts) > 1
    )
    return any(
        all(map(str.isdecimal, texts)) and not all(map(is_count, texts))
        for texts in lists
    )


# --- counts that a row names ---


def _named_among_others(
    numbers: PathNumbers, inner: Collection[Above]
) -> tuple[list[tuple[int, str]], set[int]]:
    """Return rows that name numbers which others run over.

    Those that move their leaves in another way come with a note, and those that drop
    the last of all, make what is after all, or copies for several. So do those that
    leave further ones to ``{rest:**}``, which takes them as they are. Others only name
    numbers that have no row in a larger model.
    """
    named: list[tuple[int, str]] = []
    alone: set[int] = set()
    for place, uses in numbers.uses.items():
        most = max(max(use.numbers) for use in uses)
        is_name = place.is_after_a_word and not is_of_layers(place.above)
        is_name = is_name and most <= _MOST_IN_A_WORD
        rows = [numbers.rows[use.row].row for use in uses]
        has_copies = place.side == 1 and any(len(row.targets) > 1 for row in rows)
        if place.above in inner or (is_name and not has_copies):
            continue
        are_alike = _are_only_renamed(place, rows)
        if not (place.side or are_alike) and any(use.is_after for use in uses):
            # How many are before what another row has is of this model, too.
            named += ((use.row, _AMONG) for use in uses if use.runs and not use.names)
        for use in (use for use in uses if use.names):
            others = [other for other in uses if other.row != use.row]
            is_among = any(o.runs or o.is_part or use.is_part for o in others)
            if is_among and are_alike:
                continue
            is_run_over = bool(numbers.running[place.above] - {use.row})
            is_last = 0 < numbers.last[place.above] == max(use.numbers)
            is_dropped = is_last and is_run_over and not numbers.rows[use.row].targets
            # Copies for layers, of which a larger model has more; or what is after all.
            is_one, is_within = len(use.numbers) == 1, None in place.above[1]
            is_copied = not is_one and len(numbers.rows[use.row].row.targets) > 1
            is_copied |= is_last and is_one and not (is_name or is_within)
            is_counted = place.side == 1 and is_run_over and is_copied
            has_others = not is_name and (
                is_among or is_dropped or _leaves_more_to_rest(numbers, place, use)
            )
            if has_others or is_counted:
                above = "".join("#" if t is None else t for t in place.above[1])
                note = (
                    f"numbers after {above!r} were seen at this size alone: "
                    f"{_ANSWERS}; where all models have as many, delete the mark"
                )
                named.append((use.row, note))
            elif is_run_over and max(use.numbers) and not place.side:
                alone.add(use.row)
    return named, alone


def _leaves_more_to_rest(numbers: PathNumbers, place: PathNumber, use: Use) -> bool:
    """Return whether ``{rest:**}`` takes the leaves of further layers, as they are.

    What the first of several layers has alone, it may have in any model.
    """
    rows = numbers.running[place.above] - {use.row}
    is_rest = any(numbers.rows[row].row.is_rest for row in rows)
    are_all = {*map(int, numbers.numbers_after(place.above))} == use.numbers
    return is_rest and is_of_layers(place.above) and (are_all or max(use.numbers) > 0)


def _are_only_renamed(place: PathNumber, rows: Sequence[DraftRow]) -> bool:
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


def with_doubtful_runs(
    rows: Sequence[DraftRow], inner: Collection[Above]
) -> list[DraftRow]:
    """Mark rows that run over numbers of which another row has some, otherwise.

    As where a third layer is halved, and the first two are not: a fourth may be either.

    Args:
        rows: not united yet, so that those of other leaves stay as they are.
        inner: as for ``with_single_numbers``.
    """
    by_template: dict[Pattern, dict[int, list[str]]] = {}
    for number, row in enumerate(rows):
        for path in row.source_paths if row.is_live and not row.is_rest else ():
            alike = by_template.setdefault(template_of(path), {})
            alike.setdefault(number, []).append(path)
    doubtful: set[int] = set()
    for template, alike in by_template.items():
        numbers = (n for n, fixed in enumerate(template) if fixed is None)
        places = (PathNumber(0, template, n) for n in numbers if len(alike) > 1)
        for place in places:
            doubtful |= {
                one
                for one, other in itertools.permutations(alike, 2)
                if place.above not in inner
                and _are_next_to(alike[one], alike[other], place)
                and _taken(rows[one], alike[one][0], place) == {"0", LARGE_NUMBER}
                and _taken(rows[other], alike[other][0], place) != {LARGE_NUMBER}
                and not _are_only_renamed(place, [rows[one], rows[other]])
            }
    return [
        row.marked("numbers", _AMONG) if number in doubtful else row
        for number, row in enumerate(rows)
    ]


def _are_next_to(ones: Sequence[str], others: Sequence[str], place: PathNumber) -> bool:
    """Return whether some paths differ from others in one number, which is no name."""
    at = place.position
    sides = [
        {(tokens[:at], tokens[at + 1 :]) for tokens in map(tokens_of, paths)}
        for paths in (ones, others)
    ]
    if sides[0].isdisjoint(sides[1]):
        return False
    most = max(int(tokens_of(path)[at]) for path in (*ones, *others))
    is_name = place.is_after_a_word and not is_of_layers(place.above)
    return not is_name or most > _MOST_IN_A_WORD


def _taken(row: DraftRow, path: str, place: PathNumber) -> set[str]:
    """Return which of the first and a large number a row takes at a place of a path.

    Only the large one, where it takes all after its first number: none are left then.
    """
    (text,), _ = written([row])
    numbers = "0", LARGE_NUMBER
    tokens, at = tokens_of(path), place.position
    return {n for n in numbers if text.read.takes(with_number(tokens, at, n))}


# --- what is added to counts ---


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
        if not any(isinstance(t, Hole) or is_count(t) for t in target.tokens):
            continue
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


# --- counts that a list gives others ---


class _Renumbering(NamedTuple):
    """Numbers of sources that become others, in one place of the targets.

    Attributes:
        places: what is before them in both paths.
        olds: numbers of the sources, or texts that hold some.
        news: those of the targets, in the same order.
        row: whose list says so; None if several rows name one each.
    """

    places: tuple[Above, Above]
    olds: Sequence[str]
    news: Sequence[str]
    row: int | None = None

    @property
    def is_rising(self) -> bool:
        """Whether what has the larger number has it on both sides."""
        order = sorted(
            range(len(self.olds)), key=[*map(natural, self.olds)].__getitem__
        )
        return [self.news[n] for n in order] == sorted(self.news, key=natural)


def _counted_through(numbers: PathNumbers, inner: Collection[Above]) -> list[int]:
    """Return rows that give numbers other ones, and all in the same places.

    As of blocks that the target counts through all stages: their numbers follow from
    how many each stage has. The first of all is the first in any model, unless they are
    counted from the last.
    """
    every = (*_of_lists(numbers.rows), *_of_several_rows(numbers))
    counted = [
        each
        for each in every
        if are_renumbered(each.olds, each.news) and not _are_names(each, numbers)
    ]
    marked = {each.row for each in counted if each.row is not None}
    rising: dict[Above, bool] = {}
    for each in counted:
        place = each.places[1]
        rising[place] = rising.get(place, True) and each.is_rising
    for number, each_row in enumerate(numbers.rows if rising else ()):
        paths = () if each_row.row.is_rest else each_row.row.target_paths
        if any(_is_counted(path, rising, inner) for path in paths):
            marked.add(number)
    return sorted(marked)


def _is_counted(
    path: str, rising: Mapping[Above, bool], inner: Collection[Above]
) -> bool:
    """Return whether a path of the target has a count, but for the first of all.

    Args:
        path: of the target.
        rising: whether counts keep their order, by the places that have some.
        inner: as for ``with_single_numbers``. What is counted in blocks is in theirs.
    """
    template = template_of(path)
    for at, token in enumerate(tokens_of(path)):
        own = 1, template[:at]
        places = {own, (1, template[: at - 2])} if own in inner else {own}
        orders = [rising[place] for place in places if place in rising]
        if template[at] is None and orders and (int(token) or not all(orders)):
            return True
    return False


def _are_names(new: _Renumbering, numbers: PathNumbers) -> bool:
    """Return whether numbers of both sides are parts of names within a block.

    So are those of modules of different kinds, as of attention and of a map. So are
    those that keep their order, of modules of which a block has no others: in a larger
    model a block has the same ones, and a number that is not among them has no row.
    """
    if not all(map(is_count, (*new.olds, *new.news))):
        return False
    in_blocks = [above for above in new.places if None in above[1]]
    members = [numbers.members_of_blocks(above) for above in in_blocks]
    if not members or None in members:
        return False
    if any(each and _are_of_different_kinds(each) for each in members):
        return True
    sides = zip(new.places, (new.olds, new.news), strict=True)
    are_all = all(numbers.numbers_after(above) == {*own} for above, own in sides)
    return are_all and new.is_rising and not any(map(is_of_layers, new.places))


def _are_of_different_kinds(members: Members) -> bool:
    """Return whether each member of a block has leaves that no other one has."""
    pairs = itertools.permutations(members.values(), 2)
    return all(one - other for one, other in pairs)


def _of_lists(rows: Sequence[WrittenRow]) -> Iterator[_Renumbering]:
    """Yield what the lists of rows do with numbers."""
    for number, each in enumerate(rows):
        olds = [hole for place in each.row.sources for hole in _holes(place)]
        for place in each.row.targets:
            for (above, old), (new_above, new) in itertools.product(
                olds, _holes(place)
            ):
                if old.atoms == new.atoms:
                    places = (0, above), (1, new_above)
                    yield _Renumbering(places, old.texts, new.texts, number)


def _holes(place: DraftAddress) -> Iterator[tuple[Pattern, Hole]]:
    """Yield what is before each hole of a path, and the hole."""
    above: Pattern = ()
    for token in place.tokens:
        is_number = isinstance(token, Hole) or is_count(token)
        if isinstance(token, Hole):
            yield above, token
        above = (*above, None if is_number else str(token))


class _Move(NamedTuple):
    """How one leaf is renamed by a row, as far as a number of its target goes.

    Attributes:
        row: its place in the table.
        olds: the numbers of the source.
        new: that number.
    """

    row: int
    olds: tuple[str, ...]
    new: str


def _of_several_rows(numbers: PathNumbers) -> Iterator[_Renumbering]:
    """Yield what rows do with numbers of which each names some.

    Nothing where one of the numbers of the sources becomes itself plus the same, or
    where those right after words, which are names, are needed to tell them apart.
    """
    for place, uses in numbers.uses.items():
        moves: dict[Pattern, list[_Move]] = {}
        for use in uses if place.side == 1 else ():
            row = numbers.rows[use.row].row
            is_plain = len(row.places) == 2 and not use.runs
            for (old, *_), (new, *_) in row.pairs if is_plain else ():
                if template_of(new) == place.template:
                    olds = tuple(filter(is_count, tokens_of(old)))
                    move = _Move(use.row, olds, tokens_of(new)[place.position])
                    moves.setdefault(template_of(old), []).append(move)
        for template, alike in moves.items():
            yield from _of_one_template(numbers, place, template, alike)


def _of_one_template(
    numbers: PathNumbers,
    place: PathNumber,
    template: Pattern,
    moves: Sequence[_Move],
) -> Iterator[_Renumbering]:
    """Yield the renumbering of paths that differ in numbers only.

    Args:
        numbers: of the table.
        place: the number of the targets.
        template: of the paths of the sources.
        moves: of these paths.
    """

    def decide(columns: Sequence[int]) -> bool:
        keys = {(*(move.olds[n] for n in columns), move.new) for move in moves}
        return len({key[:-1] for key in keys}) == len(keys)

    rows = {move.row for move in moves}
    olds = [PathNumber(0, template, n) for n, t in enumerate(template) if t is None]
    runs = [all(u.runs for u in numbers.uses[p] if u.row in rows) for p in olds]
    # The numbers of blocks, over which all of the rows run, decide nothing.
    columns = [n for n, is_of_blocks in enumerate(runs) if not is_of_blocks]
    columns = columns if decide(columns) else [*range(len(olds))]
    if not decide([n for n in columns if not olds[n].is_after_a_word]):
        return
    by_olds = {tuple(move.olds[n] for n in columns): move.new for move in moves}
    news = [*by_olds.values()]
    is_one = len({*news}) == 1  # a part of a name, as 2 of ``fc_2``
    if not is_one and all(are_renumbered(e, news) for e in zip(*by_olds, strict=True)):
        places = olds[columns[-1]].above, place.above
        yield _Renumbering(places, [*map(".".join, by_olds)], news)
