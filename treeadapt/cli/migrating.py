"""What a migration file does to a checkpoint, from shapes alone.

Takes a migration and abstract trees; gives a plan, findings for ``lint``, and notes on
what no check of shapes can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treeadapt.cli.lint import Finding, as_options
from treeadapt.migrations.migration import Migration, load_migration
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.migrations.planning import compare_target
from treeadapt.migrations.problems import Problems
from treeadapt.names import fold, listing
from treeadapt.trees.views import view_tree

ONE_WAY = "one-way"
RETYPED = "retyped"
_SHOWN = 8


def read_migration(file: str, *, reverse: bool) -> Migration:
    """Read a migration file, or the way back of it.

    Raises:
        MigrationError: it cannot be read, or has no way back.
    """
    found = load_migration(file)
    return found.inverse if reverse else found


def planned(
    migration: Migration, source: Any, target: Any
) -> tuple[MigrationPlan, list[Finding]]:
    """Plan a migration, and find what is wrong with it.

    Args:
        migration: the table.
        source: abstract tree, or flat dict, to migrate.
        target: abstract tree that the result should fit; None if that is not known.

    Raises:
        MigrationError: the table needs a target.
    """
    likes = None if target is None else view_tree(target).flat()
    plan, problems = migration.planned(view_tree(source).flat(), likes)
    if likes is not None:
        compare_target(plan.groups, plan.new, likes, problems)
    return plan, [*_findings(plan, problems)]


def _findings(plan: MigrationPlan, problems: Problems) -> Iterator[Finding]:
    kinds: dict[str, list[str]] = {}
    for kind, text in problems.each():
        kinds.setdefault(kind, []).append(text)
    for kind, texts in kinds.items():
        yield from (Finding(kind, None, as_options(text)) for text in fold(texts))
    if not kinds and plan.one_way:
        names = listing(fold(plan.one_way), limit=_SHOWN)
        yield Finding(ONE_WAY, None, f"the inverse does not lead back from {names}")


def notes(plan: MigrationPlan) -> Iterator[str]:
    """Yield what shapes cannot show."""
    for place, pairs in plan.swappable.items():
        names = ", ".join(f"{a} and {b}" for a, b in pairs)
        row = listing([plan.rows[place].text])
        yield f"row {place + 1}, {row}: shapes do not tell apart {names}"
    for text in plan.unread:
        yield f"not checked on shapes: {text}"
    if plan.repeatable:
        yield "a second run would pass: no name or shape shows that one was done"
