"""What the commands print on standard output, one function for each form.

Takes what a command found and prints it: as text for people, in colours where the
terminal has them, as JSON or as CSV. Reads no file and decides no exit code.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from treeadapt.cli.lint import Finding
from treeadapt.diff import TreeDiff
from treeadapt.drawing.text import aligned, lines
from treeadapt.drawing.words import columns, fitted, printable, size_text
from treeadapt.names import plural
from treeadapt.report import Summary, label_key, label_text
from treeadapt.selection.matches import STATIC
from treeadapt.selection.rules import Rules

_DIFF_COLORS = {"-": "red", "+": "green", ">": "cyan", "~": "yellow"}
# How spreadsheets start a formula; the last four are full-width.
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")


def bar(label: str, length: int) -> Any:
    """Return a progress bar on standard error, if that is a terminal."""
    hidden = not sys.stderr.isatty()
    return click.progressbar(
        length=length,
        label=printable(label),
        file=sys.stderr,
        show_pos=True,
        hidden=hidden,
    )


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


def print_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows below the names of their columns, aligned."""
    cells = [tuple(printable(str(cell)) for cell in row) for row in rows]
    first, *others = aligned(head, cells)
    click.secho(first.rstrip(), bold=True)
    for line in others:
        click.echo(line.rstrip())


def print_summary(
    summary: Summary, ties: Mapping[str, str], depth: int | None, form: str | None
) -> None:
    """Print every leaf, or what leaves add up to.

    Args:
        summary: what to print.
        ties: for a tied path the one that it is.
        depth: by how many segments of their paths, and by label, leaves are added up;
            None for every leaf.
        form: ``"json"``, ``"csv"``, or anything else for a table.
    """
    rows = _leaves(summary, ties) if depth is None else _sums(summary, depth)
    if form == "json":
        totals = [
            {
                "label": _as_data(total.label),
                "leaves": total.num_leaves,
                "params": total.num_params,
                "bytes": total.size_bytes,
            }
            for total in summary.totals
        ]
        name = "leaves" if depth is None else "nodes"
        print_json({name: rows, "totals": totals, "notes": list(summary.notes)})
    elif form == "csv":
        for row in rows:
            if "shape" in row:
                row["shape"] = row["shape"] and "x".join(map(str, row["shape"]))
        print_csv(list(rows[0]) if rows else [], [list(row.values()) for row in rows])
    elif depth is None:
        click.echo(str(summary))
    else:
        end = None if summary.rules is not None else -1
        cells = [
            (
                row["path"],
                f"{row['leaves']:,}",
                f"{row['params']:,}",
                size_text(row["bytes"]),
                label_text(row["label"]),
            )[:end]
            for row in rows
        ]
        print_table(("path", "leaves", "params", "size", "label")[:end], cells)


def print_tree(summary: Summary, depth: int | None) -> None:
    """Print a tree, folded to what fits; lines end where the terminal does."""
    if not sys.stdout.isatty():
        return click.echo(summary.to_text(depth=depth))
    width = shutil.get_terminal_size().columns
    for line in lines(summary.outline(depth=depth)):
        left = width
        for text, style in line:
            shown = fitted(text, left) if left else ""
            left -= columns(shown)
            click.secho(shown, nl=False, **_style(style))
        click.echo()
    return None


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


def print_annotations(found: Sequence[Finding], rules: Rules, file: str) -> None:
    """Print what is wrong with rules as GitHub's annotations of their file."""
    texts = Path(file).read_text("utf-8").splitlines()
    for each in found:
        place = [f"file={_escaped(file, ':,')}"]
        if each.rule is not None:
            pattern = next(rules.selectors[each.rule - 1].patterns(), "")
            quoted = (json.dumps(pattern, ensure_ascii=False), f"'{pattern}'")
            numbers = (n for n, t in enumerate(texts, 1) if any(q in t for q in quoted))
            place += [f"line={number}" for number in list(numbers)[:1]]
        rule = "" if each.rule is None else f"rule {each.rule}, "
        told = _escaped(f"{rule}{printable(each.text)}")
        click.echo(f"::error {','.join(place)},title={each.kind} rule::{told}")


def print_diff(found: TreeDiff) -> None:
    """Print how two trees differ, in the colours of a diff."""
    head, *told = str(found).splitlines()
    click.echo(head)
    for line in told:
        click.secho(line, fg=_DIFF_COLORS.get(line[0]))


def _leaves(summary: Summary, ties: Mapping[str, str]) -> list[dict[str, Any]]:
    where = {rule.number: rule.where for rule in summary.rules or ()}
    return [
        {
            "path": row.path,
            "shape": None if row.shape is None else list(row.shape),
            "dtype": row.dtype,
            "params": row.num_params,
            "bytes": row.size_bytes,
            "label": _as_data(row.label),
            "rule": None if row.rule is None else where[row.rule],
            "tied_to": ties.get(row.path),
        }
        for row in summary.rows
    ]


def _sums(summary: Summary, depth: int) -> list[dict[str, Any]]:
    sums: dict[tuple[str, Hashable], dict[str, Any]] = {}
    for row in summary.rows:
        above = summary.separator.join(row.path.split(summary.separator)[:depth])
        new = {"path": above, "leaves": 0, "params": 0, "bytes": 0}
        entry = sums.setdefault(
            (above, label_key(row.label)), new | {"label": _as_data(row.label)}
        )
        entry["leaves"] += 1
        entry["params"] += row.num_params
        entry["bytes"] += row.size_bytes
    return list(sums.values())


def _as_data(label: Any) -> Any:
    return None if label is STATIC else label


def _inert(text: str) -> str:
    return ("'" if text.startswith(_FORMULA) else "") + printable(text)


def _escaped(text: str, more: str = "") -> str:
    """Write a text as a workflow command of GitHub takes it."""
    for sign in f"%\r\n{more}":
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def _style(style: str) -> dict[str, Any]:
    """Return a style of ``drawing`` as click takes it."""
    if style.startswith("#"):
        return {"fg": tuple(int(style[i : i + 2], 16) for i in (1, 3, 5))}
    return {style: True} if style in ("bold", "dim") else {"fg": style or None}
