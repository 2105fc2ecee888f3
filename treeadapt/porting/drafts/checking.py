"""A drafted table held against numbers of another configuration, there and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.rows import Row
from treeadapt.porting.drafts.called_function import Conversion, as_bytes
from treeadapt.porting.drafts.inputs import read_side
from treeadapt.text.names import fold, listing, plural

#: Marks of numbers that were seen at one size: an equal result at another shows them.
ANSWERED = frozenset({"scale", "sizes"})

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
        migration: the table. Where all is equal, rows whose leaves have other shapes
            than those of the draft lose the marks that this answers, ``sizes`` and
            ``scale``.
    """

    forwards: Mapping[str, tuple[str, ...]]
    backwards: Mapping[str, tuple[str, ...]]
    problem: str
    num_leaves: int
    migration: Migration

    def __bool__(self) -> bool:
        return not (self.forwards or self.backwards or self.problem)

    def __str__(self) -> str:
        if self:
            return f"{plural(self.num_leaves, 'leaf')}: equal, there and back."
        lines = [f"The table does not run: {self.problem}"] if self.problem else []
        for way, rows in (("there", self.forwards), ("back", self.backwards)):
            for row, paths in rows.items():
                names = listing(fold(paths), limit=3)
                lines.append(f"The row {row!r} differs on the way {way}: {names}.")
        return "\n".join(lines)


def compared_with(
    migration: Migration, shapes: Shapes, source: Any, other: Any
) -> DraftCheck:
    """Compare what a table does with a function, or with the target that is wanted.

    Args:
        migration: the table.
        shapes: of the leaves that it was drafted from, by path.
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
        back = migration.inverse(wanted, leaves)
    except MigrationError as error:
        return DraftCheck({}, {}, str(error), 0, migration)
    forwards: dict[Row, list[str]] = {}
    backwards: dict[Row, list[str]] = {}
    for group in plan.groups:
        forwards.setdefault(group.row, []).extend(group.filled)
        backwards.setdefault(group.row, []).extend(group.source_paths)
    odd = [
        dict(_differing(paths, *sides))
        for paths, sides in ((forwards, (made, wanted)), (backwards, (back, leaves)))
    ]
    if not any(odd):
        resized = {
            row
            for row, paths in backwards.items()
            if {leaves[path].shape for path in paths}.isdisjoint(
                shapes[path] for path in shapes if row.takes(path)
            )
        }
        migration = _without_answered_marks(migration, resized)
    return DraftCheck(odd[0], odd[1], "", len(wanted), migration)


def _without_answered_marks(migration: Migration, rows: Collection[Row]) -> Migration:
    """Return a table in which some rows lack the marks that another size answers."""

    def answered(row: Row) -> tuple[Any, Any]:
        source, value = row.typed()
        if row not in rows or not row.notes.check:
            return source, value
        target, options = value
        left = [each for each in row.notes.check.split(", ") if each not in ANSWERED]
        options = {name: options[name] for name in options if name != "check"}
        options |= {"check": ", ".join(left)} if left else {}
        return source, (target, options) if options else target

    return Migration(
        [*map(answered, migration.rows)], sizes=migration.sizes, new=migration._new
    )


def _differing(
    paths: Mapping[Row, list[str]], made: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield rows with the paths whose numbers differ, beyond what is rounded."""
    for row, every in paths.items():
        odd = [path for path in every if not _agree(row, made[path], wanted[path])]
        if odd:
            yield row.text, tuple(odd)


def _agree(row: Row, source: Any, target: Any) -> bool:
    if source.shape != target.shape or source.dtype != target.dtype:
        return False
    if not (row.values.computes or row.values.cast):
        return np.array_equal(as_bytes(source), as_bytes(target))
    near = 1e-5 if not row.values.cast else 2.0**-7
    a, b = (np.asarray(array, np.float64) for array in (source, target))
    return bool(np.allclose(a, b, rtol=near, atol=1e-6))
