"""A drafted table held against numbers of another configuration, there and back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.rows import Row
from treeadapt.porting.drafts.called_function import Conversion, as_bytes
from treeadapt.porting.drafts.inputs import read_side
from treeadapt.porting.drafts.rows import (
    are_renumbered,
    by_template,
    template_of,
    tokens_of,
)
from treeadapt.text.names import fold, listing, plural

#: Marks of numbers that were seen at one size: an equal result at another shows them.
ANSWERED = frozenset({"length", "numbers", "order", "scale", "sizes"})

_ONE_WAY = "there; what takes some of the numbers has no way back"

#: Shapes by path.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class DraftCheck:
    """What a table gives other than it should; false if there is something.

    Attributes:
        forwards: by the text of a row, paths of the target whose numbers differ.
        backwards: by the text of a row, paths of the source that do not come back.
        problem: why the table does not run; empty if it does.
        num_leaves: how many leaves of the target were compared.
        migration: the table. Where all is equal, rows lose the marks that this answers:
            ``sizes`` and ``scale`` where leaves have other shapes than in the draft,
            ``length`` where an axis has another length, and no multiple of a number
            is the next one to both, ``numbers`` where there are twice as many, in all
            rows that fill the same places, and not in lists that give them others,
            ``order`` where a slice takes of another number, or a list of other shapes.
        has_way_back: whether it was compared there and back: what takes only some of
            the numbers has no way back.
    """

    forwards: Mapping[str, tuple[str, ...]]
    backwards: Mapping[str, tuple[str, ...]]
    problem: str
    num_leaves: int
    migration: Migration
    has_way_back: bool = True

    def __bool__(self) -> bool:
        return not (self.forwards or self.backwards or self.problem)

    def __str__(self) -> str:
        if self:
            way = "there and back" if self.has_way_back else _ONE_WAY
            return f"{plural(self.num_leaves, 'leaf')}: equal, {way}."
        lines = [f"The table does not run: {self.problem}"] if self.problem else []
        for way, rows in (("there", self.forwards), ("back", self.backwards)):
            for row, paths in rows.items():
                names = listing(fold(paths), limit=3)
                lines.append(f"The row {row!r} differs on the way {way}: {names}.")
        return "\n".join(lines)


def shapes_of_tables(migration: Migration, shapes: Shapes) -> list[Shapes]:
    """Return the shapes of what each table takes, of the first alone if that is open.

    Args:
        migration: tables.
        shapes: of the leaves that the first one takes.
    """
    leaves = {p: jax.ShapeDtypeStruct(shape, "float32") for p, shape in shapes.items()}
    if len(migration.tables) == 1:
        return [shapes]
    try:
        plans = migration.plan(leaves).tables
    except MigrationError:  # what lies between follows from the target alone
        return [shapes]
    return [{p: tuple(x.shape) for p, x in plan.source.items()} for plan in plans]


def compared_with(
    migration: Migration, shapes: Sequence[Shapes], source: Any, other: Any
) -> DraftCheck:
    """Compare what a table does with a function, or with the target that is wanted.

    Args:
        migration: the table.
        shapes: of the leaves that each of its tables took when it was drafted, by path.
        source: tree, checkpoint or schema, at another size than that of the draft.
        other: a function as for ``draft_migration``, or the target: a tree or file.

    Raises:
        MigrationError: a side holds no numbers; the function raises.
    """
    from_side = read_side(source, what="the source")
    if callable(other) and jax.tree_util.all_leaves([other]):
        from_side, to_side = Conversion(source, from_side, other).called(0)
    else:
        to_side = read_side(other, from_side.leaves, "the target")
    if from_side.arrays is None or to_side.arrays is None:
        text = "A check compares numbers: pass arrays on both sides, or a function."
        raise MigrationError(text)
    leaves = {path: from_side.array(path) for path in from_side.leaves}
    wanted = {path: to_side.array(path) for path in to_side.leaves}
    try:
        plan = migration.plan(leaves, wanted)
        made = migration(leaves, wanted)
        selects = any(row.selects for row in migration.rows)
        back = {} if selects else migration.inverse(wanted, leaves)
    except MigrationError as error:
        return DraftCheck({}, {}, str(error), 0, migration)
    forwards: dict[Row, list[str]] = {}
    backwards: dict[Row, list[str]] = {}
    for group in plan.tables[-1].groups:
        forwards.setdefault(group.row, []).extend(group.filled)
    for group in () if selects else plan.tables[0].groups:
        backwards.setdefault(group.row, []).extend(group.source_paths)
    # The summands of a sum do not come back; what comes back is to have that sum.
    summands = {*led_back(plan.tables, plan.noted)}
    if summands and not selects:
        again = migration(back, wanted)
        if all(_are_near(again[path], wanted[path], 1e-5) for path in plan.noted):
            back |= {path: leaves[path] for path in summands}
    computes = any(row.values.computes or row.values.cast for row in migration.rows)
    is_chain = len(plan.tables) > 1
    odd = [
        dict(_differing(paths, *sides, computes=computes and is_chain))
        for paths, sides in ((forwards, (made, wanted)), (backwards, (back, leaves)))
    ]
    if not any(odd):
        resized = _resized(plan, shapes[0], leaves)
        answered = dict.fromkeys(("scale", "sizes"), resized)
        tables = [*zip(plan.tables, shapes, strict=False)]
        if len(tables) == len(plan.tables):
            answered |= {
                "length": _every(_of_other_length(*each) for each in tables),
                "numbers": _every(_of_more_numbers(*each) for each in tables),
                "order": _every(_of_other_counts(*each, resized) for each in tables),
                "sizes": resized - _every(_of_same_blocks(*each) for each in tables),
            }
        migration = _without_answered_marks(migration, answered)
    return DraftCheck(odd[0], odd[1], "", len(wanted), migration, not selects)


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


def _every(sets: Iterable[set[Row]]) -> set[Row]:
    return set().union(*sets)


def _of_other_length(plan: Any, shapes: Shapes) -> set[Row]:
    """Return the rows that pad, or cut off, as much of axes of other lengths.

    A length that is the next multiple of a number, as of 8, may have the same padding
    twice: then the longer ones have a divisor that is more than the padding.
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
        more = 0 if row.values.undoes else 1
        if all(
            old != new and math.gcd(old + more * pad, new + more * pad) <= pad
            for pad, old, new in lengths
        ):
            resized.add(row)
    return resized


def _of_other_counts(plan: Any, shapes: Shapes, resized: Collection[Row]) -> set[Row]:
    """Return the rows that take of another number than in the draft, or all of a list.

    Args:
        plan: of a table.
        shapes: of the leaves that it was drafted from, by path.
        resized: rows whose leaves have other shapes than these.
    """
    others: set[Row] = set()
    for group in plan.groups:
        row = group.row
        path = next(iter(group.source_paths))
        places = {axis.text: n for n, axis in enumerate(row.sources[0].axes)}
        num_leaves = [sum(map(row.takes, each)) for each in (shapes, plan.source)]
        slices = [name for name, take in row.values.take if not take.size]
        differ = [
            shapes[path][places[name]] != plan.source[path].shape[places[name]]
            if name in places and path in shapes
            else name not in places and num_leaves[0] != num_leaves[1]
            for name in slices
        ]
        is_answered = all(differ) if slices else row in resized
        others |= {row} if is_answered and row.values.take else set()
    return others


def _of_more_numbers(plan: Any, shapes: Shapes) -> set[Row]:
    """Return the rows whose paths have numbers of which there are twice as many.

    What is added to the numbers of a row follows from those of others that fill the
    same place: there are to be twice as many of these, too. No size shows that a list
    which gives numbers other ones is that of all.
    """
    olds, news = map(_counts, (shapes, plan.source))
    by_row: dict[Row, list[str]] = {}
    filled: dict[Row, set[tuple[str | None, ...]]] = {}
    for group in plan.groups:
        by_row.setdefault(group.row, []).extend(group.source_paths)
        filled.setdefault(group.row, set()).update(_counts(group.filled))
    for path, place in plan.places(plan.dropped).items():
        by_row.setdefault(plan.rows[place], []).append(path)

    def has_more(path: str, *, is_other: bool = False) -> bool:
        tokens, template = tokens_of(path), template_of(path)
        every = [template[:n] for n in range(len(tokens)) if template[n] is None]
        several = [above for above in every if len(olds.get(above, ())) > 1]
        return bool(several or (is_other and not every)) and all(
            len(news[above]) >= 2 * len(olds[above]) for above in several
        )

    fewer = [
        filled[row]
        for row in filled
        if not all(has_more(path, is_other=True) for path in by_row[row])
    ]
    return {
        row
        for row, paths in by_row.items()
        if all(map(has_more, paths))
        if all(filled.get(row, set()).isdisjoint(places) for places in fewer)
        if not _is_renumbered(row)
    }


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


def _counts(paths: Iterable[str]) -> dict[tuple[str | None, ...], set[str]]:
    """Return the numbers of paths, by what is before them."""
    numbers: dict[tuple[str | None, ...], set[str]] = {}
    for path in paths:
        tokens, template = tokens_of(path), template_of(path)
        for place, token in enumerate(template):
            if token is None:
                numbers.setdefault(template[:place], set()).add(tokens[place])
    return numbers


def _without_answered_marks(
    migration: Migration, answers: Mapping[str, Collection[Row]]
) -> Migration:
    """Return tables in which rows lack the marks that another size answers."""

    def answered(row: Row) -> tuple[Any, Any]:
        source, value = row.typed()
        marks = row.notes.check.split(", ")
        left = [mark for mark in marks if row not in answers.get(mark, ())]
        if left == marks:
            return source, value
        target, options = value
        options = {name: options[name] for name in options if name != "check"}
        options |= {"check": ", ".join(left)} if left else {}
        return source, (target, options) if options else target

    return in_order(
        Migration([*map(answered, table.rows)], sizes=table.sizes, new=table._new)
        for table in migration.tables
    )


def in_order(tables: Iterable[Migration]) -> Migration:
    """Return tables as one migration: itself, if there is one."""
    return functools.reduce(Migration.then, tables)


def _differing(
    paths: Mapping[Row, list[str]],
    made: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    computes: bool,
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield rows with the paths whose numbers differ, beyond what is rounded."""
    for row, every in paths.items():
        is_near = computes or row.values.computes
        odd = [
            path
            for path in every
            if not _agree(row, made[path], wanted[path], computes=is_near)
        ]
        if odd:
            yield row.text, tuple(odd)


def _agree(row: Row, source: Any, target: Any, *, computes: bool) -> bool:
    if source.shape != target.shape or source.dtype != target.dtype:
        return False
    if not (computes or row.values.cast):
        return np.array_equal(as_bytes(source), as_bytes(target))
    return _are_near(source, target, 1e-5 if not row.values.cast else 2.0**-7)


def _are_near(source: Any, target: Any, rtol: float) -> bool:
    a, b = (np.asarray(array, np.float64) for array in (source, target))
    return bool(np.allclose(a, b, rtol=rtol, atol=1e-6))
