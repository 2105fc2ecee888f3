"""Comparing a checkpoint with what it is to be loaded into.

Takes what ``compare`` was called with; reads names, shapes, dtypes and numbers.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import click

from treeadapt.checkpoints import url
from treeadapt.checkpoints.opening import read_stored
from treeadapt.checkpoints.save_load import compare_checkpoint
from treeadapt.cli import printing, sources
from treeadapt.cli.migration_findings import read_migration, turned_hint
from treeadapt.errors import MigrationError
from treeadapt.reports.words import printable

_ORDER = "CHECKPOINT, then TARGET"


def compare_with_model(
    checkpoint: str,
    target: str,
    migration: str | None,
    where: Sequence[str],
    form: str | None,
    *,
    cast: bool,
    reverse: bool,
    decode: bool,
) -> None:
    """Print how a checkpoint fits a target; see the options of ``compare``.

    Raises:
        SystemExit: it does not.
        click.UsageError: the two are in another order.
        TreeAdaptError: one of the two cannot be read, or the rows do not fit.
    """
    sources.require_order(checkpoint, target, _ORDER)
    if sources.names_function(checkpoint):
        wrong = f"{checkpoint!r} is code, not a checkpoint; the order is {_ORDER}."
        raise click.UsageError(wrong)
    tree = sources.read_tree(target, decode=decode)
    table: Any = migration
    if reverse:
        if migration is None:
            raise click.UsageError("--reverse needs --migration.")
        table = read_migration(migration, checkpoint, reverse=True)
    try:
        report = compare_checkpoint(
            checkpoint,
            tree,
            where=list(where) or "**",
            migration=table,
            cast=cast,
            decode=decode,
        )
    except MigrationError:
        if migration is None:
            raise
        stored = read_stored(checkpoint, decode=decode)
        hint = turned_hint(migration, stored, tree, checkpoint, reverse=reverse)
        if hint:
            raise click.UsageError(hint) from None
        raise
    if form == "json":
        fields = dataclasses.asdict(report)
        fields["numbers"] = {
            path: [_as_json(number) for number in pair]
            for path, pair in report.numbers.items()
        }
        printing.print_json({"fits": report.fits, **fields})
    else:
        for line in str(report).splitlines():
            click.echo(printable(line))
        is_renamed = report.missing and report.unexpected and not report.hint
        if is_renamed and migration is None:
            names = f"{url.shown(checkpoint)} {url.shown(target)}"
            click.echo(printable(f"note: treeadapt draft {names} writes a table."))
    if not report.fits:
        sys.exit(1)


def _as_json(number: complex) -> Any:
    """Return a number as JSON can say it: NaN, infinities and complex ones as texts."""
    is_plain = not isinstance(number, complex) and math.isfinite(number)
    return number if is_plain else str(number)
