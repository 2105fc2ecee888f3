"""Optimizers on the command line: what a rules file says of them, for a tree.

Takes the file and the values of ``--given``; gives rows for ``show``, findings for
``lint`` and lines for ``explain``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import click

from treeadapt.cli.options import OPTIMIZER
from treeadapt.errors import RulesFileError
from treeadapt.optimizers.building import NOTHING
from treeadapt.optimizers.checks import state_bytes, tree_findings
from treeadapt.optimizers.load import (
    OptimizerFile,
    expression_text,
    read_optimizer_file,
)
from treeadapt.reports.summary import Finding, Summary
from treeadapt.reports.summary_rows import OptimizerRow
from treeadapt.selection.decision import MISSING, STATIC, Decision
from treeadapt.selection.rules import Rules
from treeadapt.selection.selectors import Selector, select
from treeadapt.text.data_files import one_line
from treeadapt.text.names import fold, listing
from treeadapt.text.places import Place, place_text
from treeadapt.transforms.partition import FROZEN
from treeadapt.trees.arrays import is_number

_STEPS = (0, 1, 10, 100, 1_000, 10_000, 100_000)


def read_optimizers(
    path: str, given: Sequence[str], *, allow_regex: bool
) -> OptimizerFile:
    """Read what a rules file says of optimizers.

    Args:
        path: name of the file.
        given: values by name, such as ``steps=10000``, each as TOML has it.
        allow_regex: accept ``re:`` patterns.

    Raises:
        RulesFileError: the file cannot be read.
        click.UsageError: a value is not TOML.
    """
    import tomllib  # here, as in ``text/data_files``

    values: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            values |= {name.strip(): tomllib.loads(f"value = {value}")["value"]}
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            cure = (
                "Write a name and a value of TOML: --given steps=10000, --given "
                "'name=\"a text\"'."
            )
            with contextlib.suppress(ValueError):  # a number that TOML writes otherwise
                number = int(value) if value.strip().isdecimal() else float(value)
                cure = f"Write --given {name.strip()}={number}."
            raise click.UsageError(
                f"--given has {listing([text])}: {one_line(error)}. {cure}"
            ) from error
    file = read_optimizer_file(path, allow_regex=allow_regex, given=values)
    if given and not file.tables:
        raise click.UsageError(f"--given needs optimizers, and {path!r} has none.")
    return file


def require_whole(file: OptimizerFile, path: str) -> None:
    """Raise unless the optimizer of a file can be built.

    Raises:
        RulesFileError: something is wrong, or not given.
    """
    if file.findings:
        text = "; ".join(map(str, file.findings))
        raise RulesFileError(f"{path}: {text}. See treeadapt lint --rules {path}.")
    if file.lacking:
        options = " ".join(f"--given {name}=..." for name in file.lacking)
        raise RulesFileError(f"{path} needs {options}: nobody gives these values.")


def optimizer_rows(
    file: OptimizerFile, tree: Any, summary: Summary
) -> tuple[OptimizerRow, ...]:
    """Return what trains each label of a summary, with the bytes of its state."""
    sizes, rows, of_all = state_bytes(file, tree), [], (0, 0)
    for total in summary.totals:
        counts = (total.num_leaves, total.num_params)
        if total.label == "":
            of_all = counts
        elif total.label is not STATIC:
            text, size = _text(file, total.label), sizes.pop(total.label, 0)
            rows.append(OptimizerRow(total.label, text, *counts, size))
    if sizes or "" in file.tables:
        rest = sum(sizes.values())
        rows.append(OptimizerRow("", _text(file, ""), *of_all, rest))
    return tuple(rows)


def optimizer_findings(
    file: OptimizerFile, tree: Any, *, fits: bool
) -> Iterator[Finding]:
    """Yield what is wrong with the optimizers of a file.

    Args:
        file: what it says.
        tree: the tree to train; None for no tree.
        fits: whether the rules fit that tree.
    """
    faults = [*file.findings]
    if tree is not None and fits:
        faults += tree_findings(file, tree)
    for fault in faults:
        # The kind of the finding says "optimizer" already.
        text = fault.text if fault.place == (OPTIMIZER,) else str(fault)
        yield Finding(OPTIMIZER, None, text, place=fault.place)


def optimizer_notes(file: OptimizerFile, tree: Any) -> Iterator[str]:
    """Yield what was not checked."""
    for name, place in file.lacking.items():
        yield f"--given {name}=... is left out, which {place_text(place)} needs"
    if file.tables and (tree is None or file.lacking):
        why = "no TREE" if tree is None else "values are left out"
        yield f"no step was tried: {why}"


def table_lines(file: OptimizerFile) -> Iterator[str]:
    """Yield the tables of a file, each as an expression."""
    for label in file.tables:
        place = ("optimizers", label) if label else ("optimizer",)
        yield f"[{place_text(place)}] is {_text(file, label)}"


def explain_optimizer(
    file: OptimizerFile, decision: Decision, rows: Sequence[int], label: Any
) -> Iterator[str]:
    """Yield what trains some leaves, at which rates, and what masks and factors say.

    Args:
        file: what the rules file says of optimizers.
        decision: its rules, and the tree.
        rows: the arrays, or layers, that have the label.
        label: the label.
    """
    if not rows or label in (FROZEN, STATIC) or not isinstance(label, str):
        return
    tables = {name: x for name, x in file.tables.items() if name in (label, "")}
    selections = [each for each in file.selections if each.label in (label, "")]
    for selection in selections:
        if isinstance(selection.where, Rules):  # what the rows get of it follows
            tables = _folded(tables, _place_in_tables(selection.place))
    yield from table_lines(dataclasses.replace(file, tables=tables))
    for rate in file.rates:
        if rate.label in (label, ""):
            text = expression_text(rate.data)
            if not is_number(rate.data):
                text += _at_steps(rate.value)
            yield f"{place_text(rate.place)} is {text}"
    for selection in selections:
        by_answer: dict[tuple[str, str], list[str]] = {}
        for path, *answer in _answers(selection.where, decision, rows):
            by_answer.setdefault((answer[0], answer[1]), []).append(path)
        for (verb, by), paths in by_answer.items():
            text = f"{place_text(selection.place)} {verb}"
            yield f"{text} {listing(fold(paths))}{by}"


def _answers(
    where: Selector | Rules, decision: Decision, rows: Sequence[int]
) -> Iterator[tuple[str, str, str]]:
    """Yield paths of rows, what a mask or a table says of each, and by which rule."""
    if not isinstance(where, Rules):
        chosen = select(decision.view, where, unused="ignore")
        for row in rows:
            verb = "selects" if chosen[row] else "does not select"
            yield decision.paths[row], verb, ""
        return
    table = where.match(decision.stored.tree)
    row_of = {path: row for row, path in enumerate(table.paths)}
    for path in (decision.paths[row] for row in rows):
        value, rule = table.values[row_of[path]], table.deciding[row_of[path]]
        if value is MISSING:
            yield path, "has no pattern for", ""
        else:
            yield path, f"gives {value} to", f", by {table.rules.selectors[rule].typed}"


def _place_in_tables(place: Place) -> Place:
    """Return the keys to a place in ``OptimizerFile.tables``."""
    return place[1:] if place[0] == "optimizers" else ("", *place[1:])


def _folded(data: Any, place: Place) -> Any:
    """Return data with dots for a table inside, if it is there."""
    if not place:
        return {"given": "{...}"}  # a name, which ``expression_text`` writes as it is
    key, rest = place[0], place[1:]
    if isinstance(data, dict) and key in data:
        return {**data, key: _folded(data[key], rest)}
    if isinstance(data, list) and isinstance(key, int) and key < len(data):
        return [*data[:key], _folded(data[key], rest), *data[key + 1 :]]
    return data  # the file has it in [given], by name


def _text(file: OptimizerFile, label: Any) -> str:
    is_there = isinstance(label, str) and label in file.tables
    return expression_text(file.tables[label]) if is_there else ""


def _at_steps(rate: Any) -> str:
    """Write what a rate is at some steps, if it is known."""
    if rate is NOTHING:
        return ""
    if not callable(rate):
        return f" = {rate:g}"
    values = (f"{float(rate(step)):.3g} at {step:,}" for step in _STEPS)
    return f": {', '.join(values)}"
