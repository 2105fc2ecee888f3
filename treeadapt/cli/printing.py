"""What the commands print on standard output, one function for each form.

Takes what a command found and prints it: as text for people, in colours where the
terminal has them, as JSON or as CSV. Reads no file and decides no exit code.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click

from treeadapt.cli.lint import Finding
from treeadapt.diff import TreeDiff
from treeadapt.drawing.terminal import lines
from treeadapt.drawing.words import printable, size_text
from treeadapt.errors import plural
from treeadapt.matches import STATIC, where_text
from treeadapt.report import Summary, label_key
from treeadapt.rules import Rules

_DIFF_COLORS = {"-": "red", "+": "green", ">": "cyan", "~": "yellow"}
# How spreadsheets start a formula; the last four are full-width.
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
_RIGHT = frozenset({"leaves", "params", "size", "ms", "ratio"})


def print_json(content: Any) -> None:
    """Print anything that JSON can say."""
    click.echo(json.dumps(content, indent=2))


def print_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows below the names of their columns, as CSV.

    A text that a spreadsheet would run as a formula gets an apostrophe before it.
    """
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n")
    write.writerow(head)
    for row in rows:
        write.writerow([_inert(cell) if type(cell) is str else cell for cell in row])
    click.echo(text.getvalue(), nl=False)


def _inert(text: str) -> str:
    return ("'" if text.startswith(_FORMULA) else "") + printable(text)


def print_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows below the names of their columns, aligned."""
    cells = _cells(rows)
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    for place, row in enumerate((head, *cells)):
        line = "  ".join(
            text.rjust(width) if name in _RIGHT else text.ljust(width)
            for name, text, width in zip(head, row, widths, strict=True)
        )
        click.secho(line.rstrip(), bold=place == 0 or None)


def _cells(rows: Iterable[Sequence[Any]]) -> list[list[str]]:
    return [[printable(str(cell)) for cell in row] for row in rows]


def print_leaves(summary: Summary, ties: Mapping[str, str]) -> None:
    """Print every leaf, as ``print`` or ``rich`` shows a report."""
    if _is_plain():
        click.echo(str(summary))
    else:
        from rich.console import Console

        Console(width=max(80, Console().width)).print(summary)
    for path, one in ties.items():
        click.echo(f"Tied: {path!r} is {one!r}, and counted twice.")


def print_leaves_json(
    summary: Summary, decided: Mapping[str, str], ties: Mapping[str, str]
) -> None:
    """Print every leaf, totals and notes, as JSON.

    Args:
        summary: what to print.
        decided: the rule for each path, as it was typed.
        ties: for a tied path the one that it is.
    """
    leaves = [
        {
            "path": row.path,
            "shape": None if row.shape is None else list(row.shape),
            "dtype": row.dtype,
            "params": row.num_params,
            "bytes": row.size_bytes,
            "label": as_data(row.label),
            "rule": decided.get(row.path) or None,
            "tied_to": ties.get(row.path),
        }
        for row in summary.rows
    ]
    print_json({"leaves": leaves, **_ending(summary)})


def print_leaves_csv(
    summary: Summary, decided: Mapping[str, str], ties: Mapping[str, str]
) -> None:
    """Print every leaf, as CSV; arguments as for ``print_leaves_json``."""
    head = ("path", "shape", "dtype", "params", "bytes", "label", "rule", "tied_to")
    rows = [
        (
            row.path,
            "" if row.shape is None else "x".join(map(str, row.shape)),
            row.dtype,
            row.num_params,
            row.size_bytes,
            "" if row.label is None else as_data(row.label),
            decided.get(row.path, ""),
            ties.get(row.path, ""),
        )
        for row in summary.rows
    ]
    print_csv(head, rows)


def print_tree(summary: Summary, depth: int | None) -> None:
    """Print a tree, folded to what fits."""
    if _is_plain():
        click.echo(summary.to_text(depth=depth))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in lines(summary.outline(), depth=depth):
        text = Text.assemble(*line)
        console.print(text, no_wrap=True, overflow="ellipsis", crop=True)


def _is_plain() -> bool:
    context = click.get_current_context()
    return context.color is False or not sys.stdout.isatty()


class Sum(NamedTuple):
    """The leaves below one path with one label, added up."""

    path: str
    num_leaves: int
    num_params: int
    size_bytes: int
    label: Any


def added_up(summary: Summary, depth: int) -> list[Sum]:
    """Add rows up by the first segments of their paths, and by label."""
    sums: dict[tuple[str, Hashable], list[Any]] = {}
    for row in summary.rows:
        above = "/".join(row.path.split("/")[:depth])
        key = above, label_key(row.label)
        entry = sums.setdefault(key, [above, 0, 0, 0, as_data(row.label)])
        for place, value in enumerate((1, row.num_params, row.size_bytes), 1):
            entry[place] += value
    return [Sum(*entry) for entry in sums.values()]


def print_sums(summary: Summary, depth: int) -> None:
    """Print what leaves add up to, as a table."""
    head, rows = ("path", "leaves", "params", "size"), []
    for path, num_leaves, num_params, size_bytes, label in added_up(summary, depth):
        numbers = f"{num_leaves:,}", f"{num_params:,}", size_text(size_bytes)
        rows.append((path, *numbers, "-" if label is None else label))
    print_table(*_labelled(head, rows, summary))


def print_sums_json(summary: Summary, depth: int) -> None:
    """Print what leaves add up to, totals and notes, as JSON."""
    nodes = [
        {
            "path": one.path,
            "leaves": one.num_leaves,
            "params": one.num_params,
            "bytes": one.size_bytes,
            "label": one.label,
        }
        for one in added_up(summary, depth)
    ]
    print_json({"nodes": nodes, **_ending(summary)})


def print_sums_csv(summary: Summary, depth: int) -> None:
    """Print what leaves add up to, as CSV."""
    head = ("path", "leaves", "params", "bytes")
    rows = [
        (*one[:-1], "" if one.label is None else one.label)
        for one in added_up(summary, depth)
    ]
    print_csv(*_labelled(head, rows, summary))


def _labelled(
    head: tuple[str, ...], rows: Sequence[tuple[Any, ...]], summary: Summary
) -> tuple[tuple[str, ...], Sequence[tuple[Any, ...]]]:
    """Name the last column, the label; leave it out where there are no rules."""
    if summary.rules is None:
        return head, [row[:-1] for row in rows]
    return (*head, "label"), rows


def _ending(summary: Summary) -> dict[str, Any]:
    """Return what ends a report as JSON: the totals and the notes."""
    totals = [
        {
            "label": as_data(total.label),
            "leaves": total.num_leaves,
            "params": total.num_params,
            "bytes": total.size_bytes,
        }
        for total in summary.totals
    ]
    return {"totals": totals, "notes": list(summary.notes)}


def print_findings(
    found: Sequence[Finding], ignored: Mapping[str, int], num_arrays: int
) -> None:
    """Print what is wrong with rules, a line each, and how much it is.

    Args:
        found: what is wrong.
        ignored: how many findings of each kind are left out.
        num_arrays: how many arrays there are.
    """
    for each in found:
        rule = "" if each.rule is None else f"rule {each.rule}, "
        kind = click.style(f"{each.kind}:", fg="red")
        click.echo(f"{kind} {rule}{printable(each.text)}")
    arrays = plural(num_arrays, "array")
    left_out = ", ".join(f"{count:,} {kind}" for kind, count in ignored.items())
    told = f"; ignored: {left_out}" if ignored else ""
    click.echo(f"{plural(len(found), 'finding')} in {arrays}{told}.")


def print_diff(found: TreeDiff) -> None:
    """Print how two trees differ, in the colours of a diff."""
    head, *told = str(found).splitlines()
    click.echo(head)
    for line in told:
        click.secho(line, fg=_DIFF_COLORS.get(line[0]))


def print_verdicts(table: Rules, answers: Sequence[bool], first: int) -> None:
    """Print what each rule says of a path.

    Args:
        table: the rules.
        answers: whether each matches.
        first: place of the one that decides; -1 if none does.
    """
    for place, ((where, label), yes) in enumerate(
        zip(table.pairs, answers, strict=True)
    ):
        verdict = "decides" if place == first else "matches" if yes else "-"
        text = f"{verdict:8} rule {place + 1}: {where_text(where)} = {label!r}"
        click.secho(text, bold=place == first or None, dim=not yes or None)


def as_data(label: Any) -> Any:
    """Return a label as data says it: None for a static leaf."""
    return None if label is STATIC else label
