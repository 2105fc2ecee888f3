"""Showing a tree, what rules say of it, and files of tables; also as a drawing.

Takes what ``show`` was called with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from treeadapt.checkpoints import url
from treeadapt.cli import optimizing, options, printing, sources
from treeadapt.migrations.migration import Migration
from treeadapt.reports.summary import summarize
from treeadapt.reports.words import printable
from treeadapt.selection.rules import Rules, load_rules
from treeadapt.text.names import fold, listing


def show_tree(
    tree: str,
    rules: str | None,
    given: Sequence[str],
    form: str | None,
    depth: int | None,
    where: Sequence[str],
    mesh: str | None,
    optimizer: str | None,
    memory_kind: str | None,
    output: str | None,
    *,
    statics: bool,
    decode: bool,
    allow_regex: bool,
    force: bool,
) -> None:
    """Print or draw a tree; see the options of ``show``.

    Raises:
        click.UsageError, Failure: options that do not go together.
        TreeAdaptError: a file cannot be read, or what is in it does not fit.
    """
    if output is not None and form is not None:
        raise options.Failure(
            "--output draws, and --format prints; give one of the two."
        )
    if output is not None:
        options.require_new(output, force=force)
    if mesh is not None and rules is None:
        raise click.UsageError("--mesh needs --rules, with a list for each pattern.")
    if optimizer is not None and mesh is None:
        raise click.UsageError("--optimizer needs --mesh.")
    if given and rules is None:
        raise click.UsageError("--given needs --rules.")
    table = optimizers = None
    if rules is not None:
        sources.require_order(tree, rules)
        table = load_rules(rules, allow_regex=allow_regex)
        optimizers = optimizing.read_optimizers(rules, given, allow_regex=allow_regex)
    if not (rules or output or form or depth or where or statics):
        file = sources.read_rules_or_migration(tree, allow_regex=allow_regex)
        if file is not None:
            _show_table(tree, file)
            return
    source = sources.read_source(tree, decode=decode)
    if rules is not None and optimizers is not None and optimizers.tables:
        optimizing.require_whole(optimizers, rules)
    tx = None if optimizer is None else sources.read_optimizer(optimizer)
    if tx is None and optimizers is not None and mesh is not None:
        tx = optimizers.tx
    if memory_kind is not None and tx is None:
        raise click.UsageError("--memory-kind needs --optimizer.")
    summary = summarize(
        source.tree,
        table,
        where=list(where) or None,
        mesh=None if mesh is None else sources.read_mesh(mesh),
        tx=tx,
        memory_kind=memory_kind,
        statics=statics,
    )
    notes = list(summary.notes)
    tied = (row.path for row in summary.rows if row.path in source.ties)
    if pairs := [f"{path!r} is {source.ties[path]!r}" for path in tied]:
        shown = listing(pairs, limit=3, write=str)
        notes.append(f"Tied, and counted twice: {shown}.")
    decoded = {} if source.stored is None else source.stored.decoded
    shown_forms: dict[str, list[str]] = {}
    for row in summary.rows:
        if row.path in decoded:
            shown_forms.setdefault(decoded[row.path], []).append(row.path)
    for kind, paths in shown_forms.items():
        notes.append(f"Decoded from {kind}: {listing(fold(paths))}.")
    summary = dataclasses.replace(summary, notes=tuple(notes))
    if optimizers is not None and optimizers.tx is not None and not where:
        rows = optimizing.optimizer_rows(optimizers, source.tree, summary)
        summary = dataclasses.replace(summary, optimizers=rows)
    if output is None:
        printing.print_summary(summary, source.ties, depth, form, decoded)
    else:
        names = (url.shown(name) for name in (tree, rules) if name)
        title = " by ".join(Path(name).name for name in names)
        summary.save(output, title=title, depth=depth)
        click.echo(f"Wrote {output!r}.")


def _show_table(name: str, table: Rules | Migration) -> None:
    """Print a rules file or a migration, and how to see what it does to a tree."""
    printing.print_lines(table.to_toml())
    is_rules = isinstance(table, Rules)
    if is_rules:
        file = optimizing.read_optimizers(name, (), allow_regex=True)
        for line in optimizing.table_lines(file):
            click.echo(printable(f"# {line}"))  # so that it stays TOML
    usage = "show TREE --rules" if is_rules else "lint TREE TARGET --migration"
    click.echo(printable(f"note: what it does: treeadapt {usage} {name}"), err=True)
