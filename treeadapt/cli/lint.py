"""Linting: what is wrong with a table, printed or as annotations.

Takes what ``lint`` was called with. See ``reports.summary`` for the findings of rules.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from treeadapt.cli import migration_findings, optimizing, printing
from treeadapt.cli.outcome import Outcome, read_outcome
from treeadapt.migrations.files import MIGRATION_FILE
from treeadapt.migrations.plan import MigrationPlan, leads_back
from treeadapt.migrations.tables.published import is_name
from treeadapt.reports.summary import Finding, findings, habits
from treeadapt.reports.words import printable
from treeadapt.selection.decision import Decision
from treeadapt.selection.files import RULES_FILE
from treeadapt.text.names import plural
from treeadapt.text.places import Place, line_of


def lint_table(ignored: Sequence[str], form: str | None, **names: Any) -> None:
    """Print what is wrong with a table for a tree.

    Args:
        ignored: kinds of findings to leave out.
        form: ``"json"``, ``"github"``, or anything else for text.
        names: what ``read_outcome`` takes.

    Raises:
        SystemExit: anything is wrong.
        click.UsageError, TreeAdaptError: as for ``read_outcome``.
    """
    file, outcome, optimizers = read_outcome(**names)
    faults: list[Finding] = []
    hints: list[str] = []
    among, params = "the tables", None
    if isinstance(outcome, Decision):
        faults, hints = [*findings(outcome)], habits(outcome)
        params = outcome.stored.tree
        among = plural(sum(outcome.is_array), "array")
    elif outcome is not None:
        plan, faults = outcome
        among = plural(len(plan.source), "array")
        hints = [] if faults else [*migration_findings.notes(plan)]
    if optimizers is not None:
        fits = not faults
        faults += optimizing.optimizer_findings(optimizers, params, fits=fits)
        hints += optimizing.optimizer_notes(optimizers, params)
    left_out = Counter(each.kind for each in faults if each.kind in ignored)
    faults = [each for each in faults if each.kind not in ignored]
    if form == "json":
        printing.print_json([dataclasses.asdict(each) for each in faults])
    elif form == "github":
        printing.print_annotations(faults, file, _lines(faults, outcome, file, names))
    else:
        printing.print_findings(faults, left_out, among)
        for hint in hints:
            click.echo(f"note: {printable(hint)}")
    if faults:
        sys.exit(1)


def _lines(
    faults: Sequence[Finding],
    outcome: Outcome | None,
    file: str,
    names: Mapping[str, Any],
) -> list[int | None]:
    """Return the line of each finding in its file; None for the file as a whole.

    Args:
        faults: what is wrong.
        outcome: what the table does.
        file: of the table; a published one has no lines that a caller could change.
        names: what ``read_outcome`` takes.
    """
    is_migration = isinstance(outcome, tuple)
    if is_migration and is_name(file):
        return [None] * len(faults)
    lines = (MIGRATION_FILE if is_migration else RULES_FILE).lines(file)
    place_of: dict[int | None, Place] = {}
    if isinstance(outcome, tuple):
        # Of the tables of a chain, too.
        rows = [at for at in lines if at[-2:-1] == ("rows",)]
        for number, place in enumerate(_rows_in_file(outcome[0], file, names), 1):
            if place is not None and place < len(rows):  # and not of another table
                place_of[number] = rows[place]
    else:
        rules = (at for at in lines if len(at) == 2 and at[0] == "rules")
        place_of |= dict(enumerate(rules, 1))
    places = (place_of.get(each.rule or each.row, each.place) for each in faults)
    return [line_of(lines, place) for place in places]


def _rows_in_file(
    plan: MigrationPlan, file: str, names: Mapping[str, Any]
) -> Iterator[int | None]:
    """Yield for each row of a plan the number of the row in the file, from 0.

    None for a row of the way back that drops what the file adds.
    """
    forwards = migration_findings.read_migration(file, names["tree"], names["target"])
    places: list[int] = []
    end = 0
    for table in forwards.tables:
        start, end = end, end + len(table.rows) + len(table.omitted)
        omitted = {start + place for place in table.omitted}
        places += (place for place in range(start, end) if place not in omitted)
    if not names["reverse"]:
        yield from places
        return
    in_file = [*zip(places, forwards.rows, strict=True)]
    place_of = {
        row.reversed(): place for place, row in reversed(in_file) if leads_back(row)
    }
    yield from map(place_of.get, plan.rows)
