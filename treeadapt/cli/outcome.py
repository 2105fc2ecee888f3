"""What a table does to a tree, of the commands that take rules or a migration.

Takes names of files; gives the decision of rules with the optimizers of their file, or
the plan of a migration with what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from treeadapt.cli import migration_findings, optimizing, options, sources
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.optimizers.load import OptimizerFile
from treeadapt.reports.summary import Finding
from treeadapt.selection.decision import Decision
from treeadapt.selection.rules import load_rules

Outcome = Decision | tuple[MigrationPlan, list[Finding]]


def read_outcome(
    tree: str | None,
    rules: str | None,
    migration: str | None,
    target: str | None,
    given: Sequence[str],
    path: str = "",
    *,
    allow_regex: bool,
    reverse: bool,
    decode: bool,
) -> tuple[str, Outcome | None, OptimizerFile | None]:
    """Read a table, and find what it does to a tree.

    Args:
        tree: name of the tree; None to read only the optimizers of a rules file.
        rules: name of a rules file, or None.
        migration: name of a migration, or None; one of the two is given.
        target: name of the tree that a migration leads to.
        given: values that optimizers need.
        path: of the leaf that is asked for.
        allow_regex: accept ``re:`` patterns.
        reverse: whether the rows of the migration are read backwards.
        decode: as for ``load``.

    Returns:
        Name of the table; what it does, None without a tree; optimizers, of rules.

    Raises:
        click.UsageError: names that do not go together, or are in another order.
        TreeAdaptError: a file cannot be read.
    """
    file = rules or migration
    if file is None:
        hint = sources.misplaced_table(tree, target)
        raise click.UsageError(f"Missing option '--rules' or '--migration'.{hint}")
    if rules is not None and migration is not None:
        raise click.UsageError("--rules and --migration: give one of the two.")
    if target is not None and migration is None:
        raise click.UsageError("A target needs --migration.")
    if tree is not None:
        sources.require_order(tree, file)
        sources.require_order(tree, path, "TREE, then PATH")
    if rules is not None:
        table = load_rules(file, allow_regex=allow_regex)
        optimizers = optimizing.read_optimizers(file, given, allow_regex=allow_regex)
        if tree is not None:
            decision = table.match(sources.read_tree(tree, decode=decode))
            return file, decision, optimizers
        if not optimizers.tables:
            raise click.UsageError("Missing argument 'TREE'.")
        return file, None, optimizers
    if given or tree is None:
        wrong = "--given needs --rules." if given else "Missing argument 'TREE'."
        raise click.UsageError(wrong)
    rows = migration_findings.read_migration(file, tree, target, reverse=reverse)
    source = sources.read_source(tree, decode=decode)
    fitted = sources.read_tree(target, decode=decode)
    outcome = migration_findings.planned(rows, source.stored or source.tree, fitted)
    is_wrong = any(each.kind != options.CHECK for each in outcome[1])
    if (
        target is not None
        and is_wrong
        and migration_findings.leads_other_way(rows, source.tree, fitted)
    ):
        raise click.UsageError(
            f"The rows lead from {target!r} to {tree!r}, not from {tree!r} to "
            f"{target!r}; the order is TREE, then TARGET. Swap the two, or "
            f"read the rows {'forwards' if reverse else 'with --reverse'}."
        )
    if is_wrong and target is None:
        hint = migration_findings.turned_hint(
            file, source.stored or source.tree, None, tree, reverse=reverse
        )
        if hint:
            raise click.UsageError(hint)
    return file, outcome, None
