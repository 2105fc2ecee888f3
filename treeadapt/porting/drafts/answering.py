"""Which marks of drafted rows another size answers, and what would answer the others.

Takes a table that gives the same as it should at another size, and the shapes that it
was drafted at; gives the table without the marks that this shows to be right.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from treeadapt.migrations.axes import every_name
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.rows import Row
from treeadapt.porting.drafts.factors import (
    over_sizes,
    powers_of_divisors,
    sizes_less_one,
)
from treeadapt.porting.drafts.parts import Pattern
from treeadapt.porting.drafts.rows import (
    LARGE_NUMBER,
    are_renumbered,
    by_template,
    template_of,
    tokens_of,
    with_number,
)

#: Marks of numbers that were seen at one size: an equal result at another shows them.
ANSWERED = frozenset({"groups", "length", "numbers", "order", "scale", "sizes"})

#: Shapes by path.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

#: What would answer a mark, by its name.
Left: TypeAlias = Mapping[str, str]

OF_STATED_SIZES = (
    "the same result at the same [sizes] does not answer for others; where all models "
    "have these, delete the mark"
)
OF_OTHER_SIZES = (
    "it is right at two numbers of its [sizes], which are those of one model: pass "
    "sizes= to load_migration for each"
)
_OF_A_LIST = (
    "no size answers for a list that gives numbers other ones; see the code, and "
    "delete the mark if all models have this one"
)
_OF_NUMBERS = (
    "no size answers for a list of numbers, and other numbers have no row; where all "
    "models have these, delete the mark"
)
_WAYS = {
    "groups": (
        "no shape says how many groups of heads there are; if these models had "
        "several, delete the mark"
    ),
    "length": (
        "a length of that axis which differs by no more than what is added, or cut "
        "off, answers it"
    ),
    "numbers": _OF_A_LIST,
    "order": "another number of what the slice takes of answers it",
    "scale": "leaves of other shapes answer it",
    "sizes": "leaves of other shapes answer it, and of layers in blocks another number",
}
_OF_AS_MANY = (
    "the list is of {} in both models, and fits no other number: see the code, or "
    "draft a model with another one; where all models have as many, delete the mark"
)
_OF_A_SIZE = (
    "it may be {}, of a size that is the same in both models: a model in which no size "
    "is {} answers it"
)
_OF_STAGES = (
    "rows name each number after {}, so that more of these have no row: what is added "
    "may follow from how many layers those before have; where all models have as many, "
    "delete the mark, else draft one with as many as yours"
)
_OF_THOSE_BEFORE = (
    "another row runs over those before, which are as many in both models: see the "
    "code, or draft a model with another number of these; where all models have as "
    "many, delete the mark"
)
_HALVES = 2
_IN_A_MAP = 2  # axes: all heads, and what goes in or out
#: Words of what a rotary embedding turns.
_TURNED = frozenset({"q", "k", "wq", "wk", "query", "key", "queries", "keys"})
_IF_ALL = "where all models have as many, delete it"


def answered(
    plan: Any, shapes: Sequence[Shapes], leaves: Mapping[str, Any]
) -> tuple[dict[str, set[Row]], dict[str, dict[Row, str]]]:
    """Return the rows whose marks are answered, and why others stay, by mark.

    Args:
        plan: of the tables, at another size.
        shapes: of the leaves that each of these took when it was drafted, by path;
            those of the first alone, if the others are not known.
        leaves: of the source at this size.
    """
    resized = _resized(plan, shapes[0], leaves)
    powers = _of_same_power(plan, shapes[0], leaves)
    rows = {"scale": resized - powers.keys(), "sizes": resized}
    if len(shapes) < len(plan.tables):
        return rows, {"scale": powers}
    tables = [*zip(plan.tables, shapes, strict=True)]
    counts = [_Counts(*each) for each in tables]
    as_long = {row: way for each in tables for row, way in _of_same_length(*each)}
    rows |= {
        "length": _every(_of_other_length(*each) for each in tables) - as_long.keys(),
        "numbers": _every(each.answered() for each in counts),
        "order": _every(_of_other_counts(*each) for each in tables),
        "sizes": resized - _every(_of_same_blocks(*each) for each in tables),
    }
    of_numbers = {
        row: each.way(row)
        for each in counts
        for row in each.paths
        if "numbers" in row.notes.check.split(", ") and row not in rows["numbers"]
    }
    of_lists = {row: way for table in plan.tables for row, way in _of_lists(table)}
    reasons = {"scale": powers, "numbers": of_numbers, "order": of_lists}
    return rows, reasons | {"length": as_long}


def unanswered(
    migration: Migration,
    rows: Mapping[str, Collection[Row]],
    reasons: Mapping[str, Mapping[Row, str]],
) -> dict[str, Left]:
    """Return the marks that rows keep, by their text, and what would answer them.

    Args:
        migration: the tables.
        rows: those whose marks are answered, by mark.
        reasons: why marks of some rows stay, by mark.
    """
    left: dict[str, Left] = {}
    for row in migration.rows:
        ways = _WAYS | {m: whys[row] for m, whys in reasons.items() if row in whys}
        marks = row.notes.check.split(", ")
        kept = [m for m in marks if m in ANSWERED and row not in rows.get(m, ())]
        if kept:
            left[row.text] = {mark: ways[mark] for mark in kept}
    return left


def with_stated_sizes(plan: Any, stated: Collection[str]) -> set[Row]:
    """Return the rows that say sizes of axes themselves, as of heads or levels.

    These are as they were in the draft, so no equal result shows that other models have
    them, too. The halves that turn a head of queries or keys are two in all models:
    within its numbers, next to half of them, on one side outside and inside on the
    other. Of a size in a path, as of layers in a block, other models have other paths,
    which no row takes; but what is added to a number there leaves paths as they are,
    and which of these are left for other rows.

    Args:
        plan: of the tables.
        stated: names of sizes that a configuration states.
    """
    named: set[Row] = set()
    for table in plan.tables:
        added: set[Pattern] = set()  # paths of which others have the first numbers
        for group in table.groups:
            names = (table.sizes.keys() & group.row.names) - {*stated}
            if not names.isdisjoint(_added(group.row)):
                added.update(map(template_of, group.source_paths))
            if any(
                not (_is_in_paths(group.row, name) or _is_of_halves(group, name))
                for name in names
            ):
                named.add(group.row)
        named |= {
            group.row
            for group in table.groups
            if not added.isdisjoint(map(template_of, group.source_paths))
        }
    return named


def _added(row: Row) -> set[str]:
    """Return names of sizes that are added to numbers of paths."""
    captures = (each for a in (*row.sources, *row.targets) for each in a.path.captures)
    return {each.shift_name for each in captures if each.shift_name}


def _is_in_paths(row: Row, name: str) -> bool:
    addresses = (*row.sources, *row.targets)
    captures = [each for address in addresses for each in address.path.captures]
    if name in _added(row):
        return False
    return any(name in each.names for each in captures) or not any(
        name in every_name(each.axes) for each in addresses
    )


def _is_of_halves(group: Any, name: str) -> bool:
    """Return whether a name is 2, between a head and half of it, or the last of both.

    Two heads, or two groups of channels, next to what is in each are no halves; nor are
    two groups of heads, if how large a head is has an axis of its own.
    """
    addresses = (*group.row.sources, *group.row.targets)
    axes = (axis for address in addresses for axis in address.axes)
    parts = [part for axis in axes for part in axis.parts if name in part]
    sizes = dict(group.move.sizes) if group.move else {}
    are_two = {each for part in parts for each in part if sizes.get(each) == _HALVES}
    is_last = all(name in part[-2:] for part in parts)
    within = [part for part in parts if len(part) > 2]
    # An axis more is the numbers of a head, and two of its groups are in the other one.
    layers = {n for a in addresses for each in a.path.captures for n in each.names}
    num_axes = [
        sum(bool({*every_name((axis,))} - layers) for axis in address.axes)
        for address in addresses
        if any(part in axis.parts for axis in address.axes for part in within)
    ]
    paths = (*group.source_paths, *group.filled)
    words = {token.lower() for path in paths for token in tokens_of(path)}
    is_turned = not _TURNED.isdisjoint(words)
    is_within = bool(within) and max(num_axes) <= _IN_A_MAP
    return are_two == {name} and is_last and is_within and is_turned


def led_back(tables: Sequence[Any], paths: Iterable[str]) -> list[str]:
    """Return the leaves of the source of which leaves are made.

    Args:
        tables: the plan of each.
        paths: of the leaves, after these tables.
    """
    for plan in reversed(tables):
        named = {*paths}
        groups = (g.source_paths for g in plan.groups if not named.isdisjoint(g.filled))
        paths = [*itertools.chain(*groups)]
    return [*paths]


def _resized(plan: Any, shapes: Shapes, leaves: Mapping[str, Any]) -> set[Row]:
    """Return the rows whose leaves all have other shapes than in the draft."""
    resized: set[Row] = set()
    same: set[Row] = set()
    for number, table in enumerate(plan.tables):
        for group in table.groups:
            sources = led_back(plan.tables[:number], group.source_paths)
            is_same = any(shapes.get(p) == leaves[p].shape for p in sources)
            (same if is_same else resized).add(group.row)
    return resized - same


def _of_same_power(
    plan: Any, shapes: Shapes, leaves: Mapping[str, Any]
) -> dict[Row, str]:
    """Return the rows whose factor may follow from a size that is as in the draft.

    Args:
        plan: of the tables, at another size.
        shapes: of the leaves that the first took when it was drafted, by path.
        leaves: of the source at this size.

    Returns:
        By row, how it may, and what would tell.
    """
    alike = {template_of(path): shape for path, shape in shapes.items()}
    same = {size for size in _same_sizes(shapes, leaves) if size > _HALVES}
    lengths: dict[Row, set[int]] = {}
    own: dict[Row, set[int]] = {}  # axes that are as long in both models
    factors: dict[Row, set[float]] = {}
    offsets: dict[Row, set[float]] = {}
    for number, table in enumerate(plan.tables):
        for group in table.groups:
            if "scale" not in group.row.notes.check.split(", "):
                continue
            # A power of a name is a number of its own in each group.
            values = group.row.values if group.move is None else group.move.values
            factors.setdefault(group.row, set()).update((values.scale, values.offset))
            offsets.setdefault(group.row, set()).add(values.offset)
            common = lengths.setdefault(group.row, set())
            for path in led_back(plan.tables[:number], group.source_paths):
                old = shapes.get(path, alike.get(template_of(path), ()))
                new = leaves[path].shape
                common.update(_common(old, new))
                both = (one for one, two in zip(old, new, strict=False) if one == two)
                own.setdefault(group.row, set()).update(both)
    ways: dict[Row, str] = {}
    for row, common in lengths.items():
        counts = (sum(map(row.takes, paths)) for paths in (shapes, leaves))
        every = {*common, math.gcd(*counts)} - {0}
        powers: dict[str, int] = {}
        for factor in sorted(factors[row]):
            powers |= powers_of_divisors(factor, every, same)
        of_sizes: dict[str, int] = {}
        for offset in sorted(offsets[row]):
            of_sizes |= sizes_less_one(offset, {*every, *same})
        for factor in sorted(factors[row] - offsets[row]):
            of_sizes |= over_sizes(factor, every, own[row] - {1}, same)
        if powers:
            ways[row] = _way_of_powers(powers)
        elif of_sizes:
            text, size = next(iter(of_sizes.items()))
            ways[row] = _OF_A_SIZE.format(text, size)
    return ways


def _common(old: Sequence[int], new: Sequence[int]) -> Iterator[int]:
    """Yield what divides an axis, or several that are neighbours, in both shapes."""
    if len(old) == len(new):
        for start, end in itertools.combinations(range(len(old) + 1), 2):
            yield math.gcd(math.prod(old[start:end]), math.prod(new[start:end]))


def _same_sizes(shapes: Shapes, leaves: Mapping[str, Any]) -> Iterator[int]:
    """Yield lengths of axes, and counts of leaves, of any that both models have.

    Such as the number of experts, which a factor of another leaf may follow from.
    """
    olds, news = by_template(shapes), by_template(leaves)
    for template in olds.keys() & news.keys():
        old, new = olds[template], news[template]
        both = zip(shapes[old[0]], leaves[new[0]].shape, strict=False)
        for size, other in ((len(old), len(new)), *both):
            if size == other:
                yield size


def _way_of_powers(powers: Mapping[str, int]) -> str:
    """Return what tells whether a number is one of these powers of a size."""
    few = sorted({*powers.values()})
    divisors = "that are no multiples of " + " or ".join(map(str, few))
    return (
        f"it may be {' or '.join(powers)}, of a size that is the same in both models, "
        f"or of a few times that; sizes {divisors} answer it, or write a power of the "
        "name of that size, as 'd**-0.5'"
    )


def _every(sets: Iterable[set[Row]]) -> set[Row]:
    return set().union(*sets)


def _of_other_length(plan: Any, shapes: Shapes) -> set[Row]:
    """Return the rows that pad, or cut off, as much of axes of other lengths.

    A length that is the next multiple of a number, as of 8, may have the same padding
    twice: then the longer ones have a divisor that is more than the padding. So have
    the shorter ones, where the last multiple is what is left of a length. One more or
    less may be the next odd length.
    """
    resized: set[Row] = set()
    for group in plan.groups:
        row = group.row
        path = next(filter(shapes.__contains__, group.source_paths), None)
        axes = [axis.text for axis in row.sources[0].axes]
        pads = row.values.pad
        if path is None or not pads or any(name not in axes for name, _ in pads):
            continue
        places = [axes.index(name) for name, _ in pads]
        lengths = [
            (sum(widths), shapes[path][place], plan.source[path].shape[place])
            for place, (_, widths) in zip(places, pads, strict=True)
        ]
        shifts = (0, -1) if row.values.undoes else (1,)
        if all(
            old != new
            and not (pad == 1 and (new - old) % 2 == 0)
            and all(math.gcd(old + n * pad, new + n * pad) <= pad for n in shifts)
            for pad, old, new in lengths
        ):
            resized.add(row)
    return resized


def _of_same_length(plan: Any, shapes: Shapes) -> Iterator[tuple[Row, str]]:
    """Yield the rows that add, or cut off, as much as a size that is as in the draft.

    As zeros for registers, or one more for these and a class; and what would tell.
    """
    same = {*_same_sizes(shapes, plan.source)} - {1}
    for row in dict.fromkeys(group.row for group in plan.groups):
        for width in (sum(pair) for _, pair in row.values.pad):
            if width in same:
                yield row, _OF_A_SIZE.format(width, width)
            elif width - 1 in same - {_HALVES}:
                yield row, _OF_A_SIZE.format(f"{width - 1} + 1", width - 1)


def _of_other_counts(plan: Any, shapes: Shapes) -> set[Row]:
    """Return the rows that take slices of another number than in the draft.

    A list has as many numbers wherever it fits, so that no equal result answers for it.

    Args:
        plan: of a table.
        shapes: of the leaves that it was drafted from, by path.
    """
    others: set[Row] = set()
    for group in plan.groups:
        row = group.row
        if not row.values.take:
            continue
        path = next(iter(group.source_paths))
        places = {axis.text: n for n, axis in enumerate(row.sources[0].axes)}
        num_leaves = [sum(map(row.takes, each)) for each in (shapes, plan.source)]
        parts = itertools.chain(*(axis.parts for axis in row.sources[0].axes))
        factors = {name for part in parts if len(part) > 1 for name in part}
        slices = [name for name, take in row.values.take if name not in factors]
        differ = [
            shapes[path][places[name]] != plan.source[path].shape[places[name]]
            if name in places and path in shapes
            else name not in places and num_leaves[0] != num_leaves[1]
            for name in slices  # of factors the mark is ``sizes``
        ]
        has_list = any(take.size for _, take in row.values.take)
        others |= {row} if slices and all(differ) and not has_list else set()
    return others


def _of_lists(plan: Any) -> Iterator[tuple[Row, str]]:
    """Yield the rows that take lists, and what would answer for these."""
    for row in dict.fromkeys(group.row for group in plan.groups):
        sizes = {take.size for _, take in row.values.take} - {0}
        if sizes:
            yield row, _OF_AS_MANY.format(" and ".join(map(str, sorted(sizes))))


class _Counts:
    """How many numbers paths have in the draft, and here, where rows run over them.

    A number that rows name, and none runs over, is a part of a name: with others, no
    row takes the leaf. So those above it count for each name.

    Attributes:
        paths: by row, of the sources that it takes or drops.
    """

    def __init__(self, plan: Any, shapes: Shapes) -> None:
        self.paths: dict[Row, list[str]] = {}
        self._filled: dict[Row, set[Pattern]] = {}
        for group in plan.groups:
            self.paths.setdefault(group.row, []).extend(group.source_paths)
            self._filled.setdefault(group.row, set()).update(_places(group.filled))
        for path, place in plan.places(plan.dropped).items():
            self.paths.setdefault(plan.rows[place], []).append(path)
        self._run_over = run_over(self.paths)
        self._olds, self._news = map(self._numbers, (shapes, plan.source))
        every = itertools.chain(*(group.filled for group in plan.groups))
        self._of_targets = _places(every)

    def _numbers(self, paths: Iterable[str]) -> dict[Pattern, set[str]]:
        """Return the numbers that rows run over, by what is before them."""
        numbers: dict[Pattern, set[str]] = {}
        for path in paths:
            for above, number in self._before(path):
                numbers.setdefault(above, set()).add(number)
        return numbers

    def _before(self, path: str) -> Iterator[tuple[Pattern, str]]:
        """Yield what is before numbers that rows run over, and each number."""
        tokens, template = tokens_of(path), template_of(path)
        are_counts = [
            fixed is None and template[:place] in self._run_over
            for place, fixed in enumerate(template)
        ]
        named = tuple(
            None if is_count else token
            for is_count, token in zip(are_counts, tokens, strict=True)
        )
        for place in itertools.compress(range(len(tokens)), are_counts):
            yield named[:place], tokens[place]

    def _several(self, path: str) -> list[Pattern]:
        """Return what is before numbers of a path of which the draft had several."""
        places = (above for above, _ in self._before(path))
        return [above for above in places if len(self._olds.get(above, ())) > 1]

    def _has_more(self, path: str) -> bool:
        several = self._several(path)
        return bool(several) and all(
            len(self._news[above]) >= 2 * len(self._olds[above]) for above in several
        )

    def answered(self) -> set[Row]:
        """Return the rows whose paths have numbers of which there are twice as many.

        What is added to the numbers of a row follows from those of others that fill the
        same place: there are to be twice as many of these, too; and what has no number
        follows from them alone. No size shows that a list which gives numbers other
        ones is that of all.
        """
        more = {r for r, paths in self.paths.items() if all(map(self._has_more, paths))}
        bare = {
            row
            for row, paths in self.paths.items()
            if not any(None in template_of(path) for path in paths)
        }
        by_more = set[Pattern]().union(*(self._filled.get(row, ()) for row in more))
        fewer = [self._filled[row] for row in self._filled if row not in more | bare]
        following = {
            row
            for row in bare & self._filled.keys()
            if (several := self._shared(row)) and several <= by_more
        }
        return {
            row
            for row in more | following
            if all(self._filled.get(row, set()).isdisjoint(each) for each in fewer)
            if not (_is_renumbered(row) or row in self._next_to_others)
        }

    @functools.cached_property
    def _next_to_others(self) -> set[Row]:
        """Rows that run over the numbers after some, and those that run over these."""
        both: set[Row] = set()
        for row, paths in self.paths.items():
            captures = (each for a in row.sources for each in a.path.captures)
            if any(each.shift for each in captures):
                others = {o for o in self.paths if o != row and o.takes(paths[0])}
                both |= others | {row} if others else set()
        return both

    def _shared(self, row: Row) -> set[Pattern]:
        """Return the places that a row fills, of which there are several numbers."""
        places = self._filled.get(row, set())
        return {above for above in places if len(self._of_targets[above]) > 1}

    def way(self, row: Row) -> str:
        """Return what would answer the mark of a row."""
        if _is_renumbered(row):
            return _OF_A_LIST
        if row in self._next_to_others:
            return _OF_THOSE_BEFORE
        rows = [
            other for other in self._filled if self._shared(other) & self._shared(row)
        ]
        every = (self.paths[each] for each in dict.fromkeys([row, *rows]))
        paths = [*itertools.chain(*every)]
        places = dict.fromkeys(itertools.chain(*map(self._several, paths)))
        few = {
            _written(above): (
                f"{len(self._olds[above])} in the draft, {len(self._news[above])} here"
            )
            for above in places
            if len(self._news[above]) < 2 * len(self._olds[above])
        }
        if not (places or rows):
            return _OF_NUMBERS
        if stages := [above for above in few if self._has_no_more_rows(paths, above)]:
            return _OF_STAGES.format(" and ".join(map(repr, stages)))
        if not few:
            return f"other rows fill the same places; {_IF_ALL}"
        names = ", ".join(f"after {name!r} ({counts})" for name, counts in few.items())
        return f"twice as many {names} answer it; {_IF_ALL}"

    def _has_no_more_rows(self, paths: Sequence[str], above: str) -> bool:
        """Return whether rows name all numbers at a place that others run over.

        As of stages, whose layers have a row each: more stages have no row.
        """
        tokens = [tokens_of(path) for path in paths]
        places = {
            with_number(each, n, LARGE_NUMBER)
            for each, path in zip(tokens, paths, strict=True)
            for n, token in enumerate(template_of(path))
            if token is None and _written(template_of(path)[:n]) == above
        }
        return not any(row.takes(path) for row in self.paths for path in places)


def _written(above: Pattern) -> str:
    """Write what is before a number of paths."""
    return "".join("#" if token is None else token for token in above)


def run_over(paths: Mapping[Row, Iterable[str]]) -> set[Pattern]:
    """Return what is before numbers in place of which rows take any other."""
    places: set[Pattern] = set()
    for row, own in paths.items():
        for template, (path, *_) in by_template(own).items():
            tokens = tokens_of(path)
            for place, fixed in enumerate(template):
                other = with_number(tokens, place, LARGE_NUMBER)
                if fixed is None and row.takes(other):
                    places.add(template[:place])
    return places


def _is_renumbered(row: Row) -> bool:
    sides = (
        [each for address in side for each in address.path.captures]
        for side in (row.sources, row.targets)
    )
    return any(
        old.key == new.key and are_renumbered(old.entries, new.entries)
        for old, new in itertools.product(*sides)
    )


def _of_same_blocks(plan: Any, shapes: Shapes) -> set[Row]:
    """Return the rows that have as many leaves as in the draft, and two numbers as one.

    Widths do not show how many layers a block has.
    """
    olds, news = (
        {t: len(x) for t, x in by_template(each).items()}
        for each in (shapes, plan.source)
    )
    same: set[Row] = set()
    for group in plan.groups:
        addresses = (*group.row.sources, *group.row.targets)
        captures = (each for address in addresses for each in address.path.captures)
        if any(len(each.names) > 1 for each in captures):
            templates = {*map(template_of, group.source_paths)}
            if any(olds.get(each) == news[each] for each in templates):
                same.add(group.row)
    return same


def _places(paths: Iterable[str]) -> dict[Pattern, set[str]]:
    """Return the numbers of paths, by what is before them."""
    numbers: dict[Pattern, set[str]] = {}
    for path in paths:
        tokens, template = tokens_of(path), template_of(path)
        for place, token in enumerate(template):
            if token is None:
                numbers.setdefault(template[:place], set()).add(tokens[place])
    return numbers
