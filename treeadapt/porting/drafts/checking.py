"""A drafted table held against numbers of another configuration, there and back."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.plan import BLANKS
from treeadapt.migrations.plan_text import noted_lines
from treeadapt.migrations.rows import Row
from treeadapt.porting.drafts.answering import (
    OF_OTHER_SIZES,
    OF_STATED_SIZES,
    Left,
    Shapes,
    answered,
    led_back,
    unanswered,
    with_stated_sizes,
)
from treeadapt.porting.drafts.called_function import Conversion, as_bytes
from treeadapt.porting.drafts.inputs import read_side
from treeadapt.text.names import fold, listing, plural

_NOT_ALL = "there; on the way back not all comes back"
_COMPUTED = "Rounded where it is computed"
_NEW = "[new]"
_POWER_OF_TWO = 0.5  # the fraction of one
_ONE_WAY = "there; what takes some of the numbers has no way back"


@dataclasses.dataclass(frozen=True)
class DraftCheck:
    """What a table gives other than it should; false if there is something.

    Attributes:
        forwards: by the text of a row, or ``[new]``, paths of the target whose numbers
            differ.
        backwards: by the text of a row, paths of the source that do not come back.
        problem: why the table does not run; empty if it does.
        num_leaves: how many leaves of the target were compared.
        migration: the table. Where all is equal, rows lose the marks that this answers:
            ``sizes`` where leaves have other shapes than in the draft and the row says
            no size itself but 2 of halves, ``scale`` where also no size that may be the
            same in both has the factor as a power,
            ``length`` where an axis has another length, and no multiple of a number
            is the next one to both, ``numbers`` where there are twice as many, in all
            rows that fill the same places, and not in lists that give them others,
            ``order`` where a slice takes of another number.
        has_way_back: whether it was compared there and back: what takes only some of
            the numbers has no way back.
        left: by the text of a row, the marks that it keeps of those that sizes answer,
            and what would answer each. Empty if something differs.
        lost: what does not come back, a line each: sums, what is dropped, cut off or
            rounded. Empty if something differs.
        same: sizes that the table says itself, by name, of rows whose leaves have other
            shapes than in the draft: no shape says what they are.
    """

    forwards: Mapping[str, tuple[str, ...]]
    backwards: Mapping[str, tuple[str, ...]]
    problem: str
    num_leaves: int
    migration: Migration
    has_way_back: bool = True
    left: Mapping[str, Left] = dataclasses.field(default_factory=dict)
    lost: tuple[str, ...] = ()
    same: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return not (self.forwards or self.backwards or self.problem)

    def __str__(self) -> str:
        if self:
            is_all = all(line.startswith(_COMPUTED) for line in self.lost)
            back = "there and back" if is_all else _NOT_ALL
            way = back if self.has_way_back else _ONE_WAY
            equal = f"{plural(self.num_leaves, 'leaf')}: equal, {way}."
            lines = [equal, *self.lost, *blank_lines(self.migration)]
            lines += [*self._same_lines(), *self._left_lines()]
            return "\n".join(lines)
        lines = [f"The table does not run: {self.problem}"] if self.problem else []
        for way, rows in (("there", self.forwards), ("back", self.backwards)):
            for row, paths in rows.items():
                names = listing(fold(paths), limit=3)
                lines.append(f"The row {row!r} differs on the way {way}: {names}.")
        lines += self._size_lines()
        return "\n".join(lines)

    def _size_lines(self) -> Iterator[str]:
        """Yield the sizes of the table that rows which differ name."""
        wrong = {*self.forwards, *self.backwards}
        sizes = {
            name: size
            for table in self.migration.tables
            for name, size in table.sizes.items()
            if any(name in row.names and row.text in wrong for row in table.rows)
        }
        if sizes:
            yield (
                f"{_sizes_text(sizes)} taken: for a model with others, pass sizes= to "
                "check."
            )

    def _same_lines(self) -> Iterator[str]:
        """Yield which sizes no model has shown to be others, and how to give others."""
        if self.same:
            is_one = len(self.migration.tables) == 1
            names = ", ".join(f"{name!r}: n" for name in self.same)
            sizes = f"pass sizes={{{names}}} to load_migration"
            way = sizes if is_one else "draft that one"
            yield (
                f"{_sizes_text(self.same)} the same in both models: for one with "
                f"another number, {way}."
            )

    def _left_lines(self) -> Iterator[str]:
        """Yield which marks stay, and what would answer them."""
        alike: dict[tuple[str, str], list[str]] = {}
        for row, marks in self.left.items():
            for each in marks.items():
                alike.setdefault(each, []).append(row)
        for (mark, way), rows in alike.items():
            keep = "keeps" if len(rows) == 1 else "keep"
            names = listing(rows, limit=3)
            yield f"{plural(len(rows), 'row')} {keep} {mark!r}, {names}: {way}."


def _sizes_text(sizes: Mapping[str, int]) -> str:
    texts = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    return f"[sizes] {texts} {'was' if len(sizes) == 1 else 'were'}"


def blank_lines(migration: Migration) -> Iterator[str]:
    """Yield what a table makes of no leaf, which no size shows to be so in all models.

    As a flag of each layer, which is zero of the first ones.
    """
    every: dict[str, list[str]] = {}
    for table in migration.tables:
        for path, blank in table._fillings.items():
            every.setdefault(blank, []).append(path)
    for blank in filter(every.__contains__, BLANKS):
        names = listing(fold(every[blank]), limit=4)
        head = f"{blank.title()} of no leaf of the source"
        yield f"{head}, as seen at this size: {names}."


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
    migration: Migration,
    shapes: Sequence[Shapes],
    source: Any,
    other: Any,
    stated: Collection[str] = (),
    others: Collection[str] = (),
    *,
    answers: bool = True,
) -> DraftCheck:
    """Compare what a table does with a function, or with the target that is wanted.

    Args:
        migration: the table.
        shapes: of the leaves that each of its tables took when it was drafted, by path.
        source: tree, checkpoint or schema, at another size than that of the draft.
        other: a function as for ``draft_migration``, or the target: a tree or file.
        stated: names of sizes that a configuration next to ``source`` states.
        others: names of sizes that are others than in the draft.
        answers: whether to go back, too, and to find out which marks equal results
            answer.

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
        goes_back = answers and not selects
        back = migration.inverse(wanted, leaves) if goes_back else {}
    except MigrationError as error:
        return DraftCheck({}, {}, str(error), 0, migration)
    forwards: dict[Row, list[str]] = {}
    backwards: dict[Row, list[str]] = {}
    for group in plan.tables[-1].groups:
        forwards.setdefault(group.row, []).extend(group.filled)
    for group in plan.tables[0].groups if goes_back else ():
        backwards.setdefault(group.row, []).extend(group.source_paths)
    # The summands of a sum do not come back; what comes back is to have that sum.
    summands = {*led_back(plan.tables, plan.noted)}
    if summands and goes_back:
        again = migration(back, wanted)
        if all(_are_near(again[path], wanted[path], 1e-5) for path in plan.noted):
            back |= {path: leaves[path] for path in summands}
    computes = any(row.values.computes or row.values.cast for row in migration.rows)
    is_chain = len(plan.tables) > 1
    odd = [
        dict(_differing(paths, *sides, computes=computes and is_chain))
        for paths, sides in ((forwards, (made, wanted)), (backwards, (back, leaves)))
    ]
    new = [path for path in plan.new if not _is_same(made[path], wanted[path])]
    odd[0] |= {_NEW: tuple(new)} if new else {}
    if any(odd) or not answers:
        return DraftCheck(odd[0], odd[1], "", len(wanted), migration, not selects)
    rows, reasons = answered(plan, shapes, leaves)
    same = _same_sizes(migration, rows["sizes"], {*stated, *others})
    kept = rows["sizes"] & with_stated_sizes(plan, stated)
    rows["sizes"] -= kept
    reasons["sizes"] = {
        row: OF_OTHER_SIZES
        if not row.names.isdisjoint({*others} - same.keys())
        else OF_STATED_SIZES
        for row in kept
    }
    return DraftCheck(
        forwards={},
        backwards={},
        problem="",
        num_leaves=len(wanted),
        migration=_without_answered_marks(migration, rows),
        has_way_back=not selects,
        left=unanswered(migration, rows, reasons),
        lost=() if selects else tuple(_lost_lines(plan)),
        same=same,
    )


def _lost_lines(plan: Any) -> Iterator[str]:
    """Yield what does not come back, though a target that has it keeps it."""
    yield from (f"{line[0].upper()}{line[1:]}." for line in noted_lines(plan))
    cut: list[str] = []
    rounded: list[str] = []
    computed: list[str] = []
    for number, table in enumerate(plan.tables):
        for group in table.groups:
            values = group.row.values
            dtypes = {table.source[path].dtype for path in group.source_paths}
            if values.fill and values.undoes:
                cut += led_back(plan.tables[:number], group.source_paths)
            if values.cast and not all(
                np.can_cast(dtype, group.move.dtype) for dtype in dtypes
            ):
                rounded += led_back(plan.tables[:number], group.source_paths)
            elif values.computes and not values.add and not _is_shift(group):
                computed += led_back(plan.tables[:number], group.source_paths)
    for text, paths in (
        ("Dropped, and not made again", plan.dropped),
        ("What is cut off does not come back, and is kept of a target", cut),
        ("Rounded to another dtype", rounded),
        (_COMPUTED, computed),
    ):
        if paths:
            yield f"{text}: {listing(fold(dict.fromkeys(paths)), limit=3)}."


def _is_shift(group: Any) -> bool:
    """Return whether a group multiplies by a power of two alone, which is exact."""
    values = group.row.values if group.move is None else group.move.values
    return not values.offset and abs(math.frexp(values.scale)[0]) == _POWER_OF_TWO


def _same_sizes(
    migration: Migration, rows: Collection[Row], stated: Collection[str]
) -> dict[str, int]:
    """Return sizes that a table says itself, which rows of other shapes name."""
    return {
        name: size
        for table in migration.tables
        for name, size in table.sizes.items()
        if name not in stated
        and any(
            name in row.names
            for row in table.rows
            if row in rows and "sizes" in row.notes.check.split(", ")
        )
    }


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


def with_other_sizes(migration: Migration, sizes: Mapping[str, int]) -> Migration:
    """Return tables with other sizes of the names that they have some of.

    Raises:
        MigrationError: no table has a size of a name.
    """
    known = {name: None for table in migration.tables for name in table.sizes}
    if unknown := [name for name in sizes if name not in known]:
        cure = f"Those of the table are {listing(known)}" if known else "It has none"
        text = f"sizes= has {listing(unknown)}, which no [sizes] of the table has."
        raise MigrationError(f"{text} {cure}.")
    if not sizes:
        return migration
    return in_order(
        Migration(
            [row.typed() for row in table.rows],
            sizes={name: sizes.get(name, n) for name, n in table.sizes.items()},
            new=table._new,
        )
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
    if not (computes or row.values.cast):
        return _is_same(source, target)
    if source.shape != target.shape or source.dtype != target.dtype:
        return False
    return _are_near(source, target, 1e-5 if not row.values.cast else 2.0**-7)


def _is_same(source: Any, target: Any) -> bool:
    is_alike = source.shape == target.shape and source.dtype == target.dtype
    return is_alike and np.array_equal(as_bytes(source), as_bytes(target))


def _are_near(source: Any, target: Any, rtol: float) -> bool:
    a, b = (np.asarray(array, np.float64) for array in (source, target))
    return bool(np.allclose(a, b, rtol=rtol, atol=1e-6))
