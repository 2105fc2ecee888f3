"""Linting: what is wrong with a table, printed or as annotations.

Takes what ``lint`` was called with. See ``reports.summary`` for the findings of rules.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from treeadapt.cli import migration_findings, optimizing, printing
from treeadapt.cli.outcome import read_outcome
from treeadapt.reports.summary import Finding, findings, habits
from treeadapt.reports.words import printable
from treeadapt.selection.decision import Decision
from treeadapt.text.names import plural


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
        printing.print_annotations(faults, file)
    else:
        printing.print_findings(faults, left_out, among)
        for hint in hints:
            click.echo(f"note: {printable(hint)}")
    if faults:
        sys.exit(1)
