"""What is wrong with a migration for one tree, as findings.

Takes a migration and abstract trees; gives its plan, findings, and notes on what no
check of shapes can see. See ``reports.summary`` for the findings of rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treeadapt.checkpoints.migrated import asked_for, named_migration, part_advice
from treeadapt.checkpoints.next_call import all_shards, tables_that_take
from treeadapt.checkpoints.record import Stored
from treeadapt.cli.options import CHECK, MILD, ONE_WAY
from treeadapt.errors import MigrationError
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.migrations.plan_text import noted_lines, pairs_text
from treeadapt.migrations.problems import name_target
from treeadapt.reports.summary import Finding
from treeadapt.text.names import fold, listing
from treeadapt.trees.views import view_tree

_OF_NAMES = ("unmatched", "unused")  # findings that another table may not have


def read_migration(
    file: str, *checkpoints: str | None, reverse: bool = False
) -> Migration:
    """Read a migration file or a published table, or the way back of it.

    Args:
        file: its name.
        checkpoints: the configuration is next to one of these.
        reverse: whether the rows are read backwards.

    Raises:
        MigrationError: it cannot be read, or has no way back.
    """
    migration: Migration = named_migration(file, *filter(None, checkpoints))
    return migration.inverse if reverse else migration


def planned(
    migration: Migration, source: Any, target: Any
) -> tuple[MigrationPlan, list[Finding]]:
    """Plan a migration, and find what is wrong with it.

    Args:
        migration: the table.
        source: checkpoint, abstract tree, or flat dict, to migrate.
        target: abstract tree that the result should fit; None if that is not known.

    Raises:
        MigrationError: the table needs a target.
    """
    likes = None if target is None else view_tree(target).flat()
    advice: list[str] = []
    if isinstance(source, Stored):
        source = asked_for(source, migration)
        advice += part_advice(migration, source)
    leaves = source.leaves if isinstance(source, Stored) else view_tree(source).flat()
    plan, problems = migration.planned(leaves, likes, compares=True)
    numbers = {id(row): number for number, row in enumerate(plan.rows, 1)}
    each = list(problems.each())
    faults = []
    for text, places in fold(text for _, text, _ in each).items():
        kind, _, row = each[places[0]]
        faults.append(Finding(kind, None, text, numbers.get(id(row))))
    if isinstance(source, Stored) and any(x.kind in _OF_NAMES for x in faults):
        advice += tables_that_take(source, migration.published, likes)
    if isinstance(source, Stored) and faults and (shards := all_shards(source)):
        advice.append(shards)
    faults += [Finding("unused", None, text) for text in advice if faults]
    lost = [path for path in plan.one_way if path not in plan.noted]
    if not faults and lost:
        last = reversed(plan.groups)
        rows = (g.place + 1 for g in last if lost[0] in g.filled)
        text = f"the inverse does not lead back from {listing(fold(lost))}"
        faults.append(Finding(ONE_WAY, None, text, next(rows, None)))
    for base in plan.bases:
        if base.stated and base.stated != base.sha256:
            text = (
                f"the table {base.name!r}, with which this one begins, is not the one "
                f"of sha256 = {base.stated!r:.80}. Compare what both make, then write "
                f"sha256 = {base.sha256!r}."
            )
            faults.append(Finding(CHECK, None, text))
    for entry in migration._marked_new:
        text = (
            f"[new] {entry.text!r:.200}: {entry.notes.check}. See the code of the new "
            "model, then delete `check`."
        )
        faults.append(Finding(CHECK, None, text))
    for number, row in enumerate(plan.rows, 1):
        if row.notes.check:
            text = (
                f"{row.both}: {row.notes.check}. Compare the answers of both models, "
                "then delete `check` from the row."
            )
            faults.append(Finding(CHECK, None, text, number))
    return plan, faults


def turned_hint(
    file: str, source: Any, target: Any, *checkpoints: str | None, reverse: bool
) -> str:
    """Return a sentence if a table fits read the other way; otherwise "".

    Args:
        file: its name.
        source: as for ``planned``.
        target: the same.
        checkpoints: the configuration is next to one of these.
        reverse: whether the rows were read backwards, which did not fit.
    """
    try:
        table = read_migration(file, *checkpoints, reverse=not reverse)
        kinds = {each.kind for each in planned(table, source, target)[1]}
        if not kinds <= {*MILD, "sizes"}:
            return ""
        if "sizes" in kinds:  # which stay open; the names say the direction
            typed = read_migration(file, *checkpoints, reverse=reverse)
            typed_kinds = {each.kind for each in planned(typed, source, target)[1]}
            if typed_kinds.isdisjoint(_OF_NAMES):
                return ""
    except MigrationError:
        return ""
    cure = "Leave --reverse out." if reverse else "Add --reverse."
    if "sizes" in kinds:
        target_text = name_target("pass a target")
        cure += f" Sizes then stay open: write them in [sizes], or {target_text}."
    return f"The rows of {listing([file])} fit the other way round. {cure}"


def leads_other_way(migration: Migration, source: Any, target: Any) -> bool:
    """Return whether nothing but marks is wrong with a migration the other way."""
    try:
        faults = planned(migration, target, source)[1]
    except MigrationError:
        return False
    return all(each.kind == CHECK for each in faults)


def notes(plan: MigrationPlan) -> Iterator[str]:
    """Yield what shapes cannot show."""
    for base in plan.bases:
        yield f"it begins with {base.name!r}, whose sha256 is {base.sha256!r}"
    for place, pairs in plan.swappable.items():
        row = listing([plan.rows[place].text])
        text = f"shapes do not tell apart {pairs_text(pairs)}"
        yield f"row {place + 1}, {row}: {text}"
    for place in plan.idle:
        row = listing([plan.rows[place].text])
        yield f"row {place + 1}, {row}: it drops leaves, and none is here"
    yield from noted_lines(plan)
    for text in plan.unread:
        yield f"not checked on shapes: {text}"
    if plan.repeatable:
        yield "a second run would pass: no name or shape shows that one was done"
