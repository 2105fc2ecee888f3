"""Explaining: which rule or row decides one leaf, line by line.

Takes a ``Decision`` or the plan of a migration; prints each rule with its verdict, or
the row with its captures, sizes and operations.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import click
from jax.sharding import PartitionSpec

from treeadapt.cli.optimizing import explain_optimizer
from treeadapt.cli.outcome import read_outcome
from treeadapt.errors import TreeAdaptError
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.optimizers.load import OptimizerFile
from treeadapt.reports.words import printable
from treeadapt.selection.decision import MISSING, STATIC, Decision
from treeadapt.selection.selectors import select
from treeadapt.sharding.specs import spec_text
from treeadapt.text.names import Speller, listing


def explain_leaf(tree: str, path: str, **names: Any) -> None:
    """Print what decides or moves one leaf; see the options of ``explain``.

    Args:
        tree: name of the tree.
        path: of the leaf.
        names: what else ``read_outcome`` takes.

    Raises:
        SystemExit: nothing does.
        click.UsageError, TreeAdaptError: as for ``read_outcome``.
    """
    _, outcome, optimizers = read_outcome(tree, path=path, **names)
    if isinstance(outcome, Decision):
        is_matched = explain_rules(tree, path, outcome, optimizers)
    else:
        is_matched = outcome is not None and explain_row(tree, path, outcome[0])
    if not is_matched:
        sys.exit(1)


def explain_rules(
    tree: str, path: str, decision: Decision, optimizers: OptimizerFile | None
) -> bool:
    """Print which rules match a leaf, and return whether one decides it.

    Args:
        tree: name of the tree.
        path: of the leaf, or of layers of an array.
        decision: the rules, and the tree.
        optimizers: what the file of the rules says of them.

    Raises:
        TreeAdaptError: the tree has no such leaf.
    """
    stored = decision.stored.plan.paths
    parts = {  # of a leaf or a layer; or of an array, its layers, those alike as one
        layers.path: layers.rows
        for layers in decision.divided()
        if path in (layers.path, layers.region.path)
    }
    if path in decision.paths:
        parts = {path: [decision.paths.index(path)]}
    if not parts:
        _require_leaf(tree, path, [*dict.fromkeys((*stored, *decision.paths))])
    rows = [row for part_rows in parts.values() for row in part_rows]
    deciding = {decision.deciding[row] for row in rows}
    for index, (where, label) in enumerate(decision.rules.pairs):
        chosen = select(decision.view, where, unused="ignore")
        matching = "matches" if any(chosen[row] for row in rows) else "-"
        verdict = "decides" if index in deciding else matching
        text = f"{verdict:8} rule {index + 1}: {where.typed} = {_value(label)}"
        look = {"bold": verdict == "decides" or None, "dim": verdict == "-" or None}
        click.secho(printable(text), **look)
    for name, (row, *_) in parts.items():
        value, rule = decision.values[row], decision.deciding[row] + 1
        wording = f"gets {'' if rule else 'the default, '}{_value(value)}"
        if value is STATIC:
            wording = "is not an array, and needs no rule"
        elif value is MISSING:
            wording = "is matched by no rule"
        elif rule and len(parts) > 1:
            wording += f" by rule {rule}"
        click.echo(printable(f"{name!r} {wording}."))
    labels = dict.fromkeys(decision.values[row] for row in rows)
    for label in labels:
        alike = [
            row
            for row in rows
            if decision.is_array[row] and decision.values[row] == label
        ]
        if optimizers is not None:
            for line in explain_optimizer(optimizers, decision, alike, label):
                click.echo(printable(line))
    return MISSING not in labels


def _value(label: Any) -> str:
    return spec_text(label) if isinstance(label, PartitionSpec) else repr(label)


def explain_row(tree: str, path: str, plan: MigrationPlan) -> bool:
    """Print which row moves a leaf, and where; return whether one does.

    Args:
        tree: name of the tree.
        path: of the leaf, or of what it becomes.
        plan: of the migration.

    Raises:
        TreeAdaptError: neither side has such a leaf.
    """
    lines = [*plan.explanation(path)]
    for line in lines:
        click.echo(printable(line))
    if lines:
        return True
    _require_leaf(tree, path, [*plan.source, *plan.result])
    row = next((n for n, row in enumerate(plan.rows, 1) if row.takes(path)), None)
    why = "no row" if row is None else f"row {row}, which does not fit; see lint"
    click.echo(printable(f"{path!r} is matched by {why}."))
    return False


def _require_leaf(tree: str, path: str, paths: Sequence[str]) -> None:
    if path not in paths:
        part = re.compile(rf"(.*[/.])?{re.escape(path)}([/.].*)?", re.DOTALL)
        around = list(filter(part.fullmatch, paths))
        near = (around or Speller().nearest(path, paths))[:3]
        hint = f" Did you mean {listing(near)}?" if near else ""
        raise TreeAdaptError(f"{tree!r} has no leaf {path!r}.{hint}")
