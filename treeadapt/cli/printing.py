"""What the commands print on standard output, one function for each form.

Takes what a command found and prints it: as text for people, in colours where the
terminal has them, or as JSON. Reads no file and decides no exit code.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
from jax.sharding import PartitionSpec

from treeadapt.migrations.tables.card import card
from treeadapt.migrations.tables.published import find, published, tables_of
from treeadapt.reports.diff import TreeDiff
from treeadapt.reports.layout import aligned
from treeadapt.reports.outline import Total, added, ends
from treeadapt.reports.summary import Finding, Summary, label_key
from treeadapt.reports.summary_rows import LeafRow, label_text, optimizer_lines
from treeadapt.reports.text import lines
from treeadapt.reports.words import columns, fitted, printable
from treeadapt.selection.decision import MISSING, STATIC
from treeadapt.selection.largest_axis import ShardLargest
from treeadapt.text.names import plural, size_text

_DIFF_COLORS = {"-": "red", "+": "green", ">": "cyan", "~": "yellow"}


def bar(
    label: str, length_bytes: int, read_bytes: Callable[[], int] | None = None
) -> Any:
    """Return a progress bar on standard error, if that is a terminal.

    It fits a width of 40 columns: the label is cut in the middle.

    Args:
        label: what is being done.
        length_bytes: how much there is to do.
        read_bytes: says how much is read, of what is written later; shown until
            anything is.
    """
    err, width = sys.stderr, shutil.get_terminal_size().columns
    shown = click.progressbar(
        length=max(1, length_bytes),
        label=fitted(printable(label), max(8, width - 32), middle=True),
        file=err,
        width=0 if width > 70 else max(1, width // 10),
        bar_template="%(label)s [%(bar)s] %(info)s",
        show_percent=False,
        show_pos=True,
        show_eta=width > 70,
        hidden=not (err and err.isatty()),
    )
    whole = size_text(length_bytes)

    def position() -> str:
        if shown.finished:
            return f"{whole} in {time.time() - shown.start:.1f} s"
        if read_bytes is not None and shown.pos == 0:
            return f"read {size_text(read_bytes())}/{whole}"
        return f"{size_text(min(shown.pos, length_bytes))}/{whole}"

    shown.format_pos = position  # click 8.4 counts items only
    return shown


def move(shown: Any, position_bytes: int) -> None:
    """Move a bar to a position, of as many bytes as are done; never back."""
    done = min(position_bytes, shown.length) - shown.pos
    if done > 0:
        shown.update(done)
    elif not shown.finished:
        shown.render_progress()


def print_json(content: Any) -> None:
    """Print anything that JSON can say."""
    print_lines(json.dumps(content, indent=2, default=_as_data))


def print_lines(text: str) -> None:
    """Print a text, line by line.

    Where Python does not buffer, it takes one large text for written although the
    reader of a pipe left amid it.
    """
    for line in text.removesuffix("\n").split("\n"):
        click.echo(line)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below the names of their columns, aligned."""
    first, *others = aligned(head, [tuple(map(printable, row)) for row in rows])
    click.secho(first, bold=True)
    for line in others:
        click.echo(line)


def print_published(name: str | None, form: str | None) -> None:
    """Print the published tables, or the card of one.

    Args:
        name: of a layout, or of a table; None for all.
        form: ``"json"``, or anything else for a table.

    Raises:
        MigrationError: there is no such layout or table.
    """
    if name is not None and "/" in name:
        every = [find(name)]
        cards = [{"card": card(every[0])}]
    else:
        chosen = [*published().values()] if name is None else [tables_of(name)]
        every = [*dict.fromkeys(x for types in chosen for x in types.values())]
        cards = [{} for _ in every]
    if form == "json":
        fields = ("name", "oracle", "model_types", "sha256")
        print_json(
            [
                {field: getattr(one, field) for field in fields} | more
                for one, more in zip(every, cards, strict=True)
            ]
        )
    elif any(cards):
        lines = [
            (heading * (number == 0), line)
            for heading, texts in cards[0]["card"].items()
            for number, line in enumerate(texts)
        ]
        print_table((every[0].name, ""), lines)
    else:
        rows = [(one.name, one.oracle, ", ".join(one.model_types)) for one in every]
        print_table(("table", "compared with", "model types"), rows)


def print_summary(
    summary: Summary,
    ties: Mapping[str, str],
    depth: int | None,
    form: str | None,
    decoded: Mapping[str, str],
) -> None:
    """Print a report in one of its forms.

    Args:
        summary: what to print.
        ties: for a tied path the one that it is.
        depth: how many segments of a path to show in a drawing; elsewhere by how many
            of them, and by label, leaves are added up; None for every leaf.
        form: ``"json"``, ``"markdown"``, ``"tree"``, or anything else for a table.
        decoded: by path of a leaf that is stored as codes and scales, how it is.
    """
    if form == "tree":
        _print_tree(summary, depth)
    elif form == "markdown":
        print_lines(summary.to_markdown(depth=depth))
    elif form == "json":
        document: dict[str, Any] = {
            "leaves" if depth is None else "nodes": [
                *_records(summary, ties, depth, decoded)
            ],
            "totals": [{"label": one.label, **_sums(one)} for one in summary.totals],
            "notes": summary.notes,
        }
        if summary.optimizers:
            document["optimizers"] = _fields(summary.optimizers)
        if plan := summary.memory:
            sizes: dict[str, Any] = {
                "devices": plan.num_devices,
                "device_bytes": plan.device_bytes,
            }
            if plan.host_bytes:
                sizes["host_bytes"] = plan.host_bytes
            rows = {"kinds": _fields(plan.kinds), "arrays": _fields(plan.arrays)}
            document["memory"] = {"mesh": dict(plan.mesh), **sizes, **rows}
        print_json(document)
    elif depth is None:
        print_lines(str(summary))
    else:
        head = ("path", "leaves", "params", "size", "label")
        end = None if summary.rules is not None else -1
        nodes = _nodes(summary, depth)
        cells = [(path, *one.counts, label_text(one.label)) for path, one in nodes]
        print_table(head[:end], [row[:end] for row in cells])
        if summary.optimizers:
            print_lines("\n".join(["", *optimizer_lines(summary.optimizers)]))
        if summary.memory is not None:
            click.echo(f"\n{summary.memory}")
        if summary.notes:  # whatever the depth, what is wrong is said
            print_lines("\n".join(["", *map(printable, summary.notes)]))


def _print_tree(summary: Summary, depth: int | None) -> None:
    """Print a tree, folded to what fits; lines end where the terminal does."""
    if not sys.stdout.isatty():
        return print_lines(summary.to_text(depth=depth))
    room = shutil.get_terminal_size().columns
    for line in lines(summary.outline(depth=depth), room):
        left = room
        for text, style in line:
            shown = fitted(text, left) if left else ""
            left -= columns(shown)
            click.secho(shown, nl=False, **_style(style))
        click.echo()
    return None


def print_findings(
    faults: Sequence[Finding], ignored: Mapping[str, int], among: str
) -> None:
    """Print what is wrong, a line each, and how much it is.

    Args:
        faults: what is wrong.
        ignored: how many findings of each kind are left out.
        among: how many arrays there are.
    """
    for each in faults:
        click.echo(f"{click.style(f'{each.kind}:', fg='red')} {printable(each.line)}")
    counts = f"{plural(len(faults), 'finding')} in {among}"
    left_out = ", ".join(f"{count:,} {kind}" for kind, count in ignored.items())
    click.echo(f"{counts}; ignored: {left_out}." if ignored else f"{counts}.")


def print_annotations(
    faults: Sequence[Finding], file: str, lines: Sequence[int | None]
) -> None:
    """Print what is wrong as GitHub's annotations of a file.

    Args:
        faults: what is wrong.
        file: name of the file.
        lines: where each is; None for the file as a whole.
    """
    for each, line in zip(faults, lines, strict=True):
        place = f"file={_escaped(file, ':,')}{f',line={line}' if line else ''}"
        row = f"row {each.row}: " if each.row else ""
        wording = _escaped(printable(f"{row}{each.line}"))
        click.echo(f"::error {place},title={each.kind}::{wording}")


def print_diff(difference: TreeDiff) -> None:
    """Print how two trees differ, in the colours of a diff."""
    head, *rest = str(difference).splitlines()
    click.echo(head)
    for line in rest:
        click.secho(line, fg=_DIFF_COLORS.get(line[0]))


def _records(
    summary: Summary,
    ties: Mapping[str, str],
    depth: int | None,
    decoded: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """Yield every leaf, or what leaves add up to, for other programs."""
    if depth is not None:
        for path, one in _nodes(summary, depth):
            yield {"path": path, **_sums(one), "label": one.label}
        return
    where = {rule.number: rule.where or None for rule in summary.rules or ()}
    for row, record in zip(summary.rows, _fields(summary.rows), strict=True):
        num_leaves = record.pop("leaves")
        if summary.memory is None:
            del record["spec"]
        others = {"rule": where.get(row.rule), "tied_to": ties.get(row.path)}
        if decoded:
            others["decoded"] = decoded.get(row.path)
        yield {**record, **others, "leaves": num_leaves}


def _nodes(summary: Summary, depth: int) -> Iterator[tuple[str, Total]]:
    """Yield the start of a path, and what leaves below it with one label add up to."""
    below: dict[tuple[str, Hashable], list[LeafRow]] = {}
    for row in summary.rows:
        above = row.path[: ends(row.path, summary.separator)[:depth][-1]]
        below.setdefault((above, label_key(row.label)), []).append(row)
    for (above, _), rows in below.items():
        yield above, Total(rows[0].label, *added(rows))


def _sums(one: Total) -> dict[str, int]:
    return dict(zip(("leaves", "params", "bytes"), added([one]), strict=True))


def _fields(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return dataclasses for other programs: ``bytes`` is short for ``size_bytes``.

    A memory kind is there only where it is not that of the device.
    """
    names = {
        field.name: re.sub("^(num|size|is)_", "", field.name)
        for row in rows[:1]
        for field in dataclasses.fields(row)
    }
    return [
        {
            short: value
            for name, short in names.items()
            if (value := getattr(row, name)) is not None or name != "memory_kind"
        }
        for row in rows
    ]


def _as_data(label: Any) -> Any:
    """Return a label for other programs; specs are as in a rules file."""
    if isinstance(label, PartitionSpec):
        return ["..." if entry is ... else entry for entry in label]
    if isinstance(label, ShardLargest):
        return label.data
    return None if label is STATIC or label is MISSING else label


def _escaped(text: str, more: str = "") -> str:
    """Write a text as a workflow command of GitHub takes it."""
    for sign in f"%\r\n{more}":
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def _style(style: str) -> dict[str, Any]:
    """Return a style of ``reports.text`` as click takes it."""
    color = style[1:] if style.startswith("#") else ""
    fg = tuple(bytes.fromhex(color)) or ("red" if style == "red" else None)
    words = style.split()
    return {"fg": fg, "bold": "bold" in words or None, "dim": "dim" in words or None}
