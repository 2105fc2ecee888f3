"""An outline as lines of text, in colours where the terminal has them.

A line is a list of spans: a text, and a style that ``rich`` understands. Their texts
alone are the plain form, for a pipe, a log or a commit message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from treeadapt.drawing.outline import (
    Label,
    Node,
    Outline,
    Row,
    every,
    headline,
    labels_text,
    legend,
    unfolded,
)
from treeadapt.drawing.words import columns, fitted, size_text

Span = tuple[str, str]  # text, and style

_BAR = 16
_NAME, _CONTENTS, _LABEL, _RULES = 48, 32, 34, 60
_MAX_RULES = 8  # of a label, in Markdown
_EIGHTHS = " ▏▎▍▌▋▊▉"


def lines(outline: Outline, *, depth: int | None = None) -> Iterator[list[Span]]:
    """Yield the lines of an outline.

    Args:
        outline: what to show.
        depth: how many segments of a path; None for as many as fit.
    """
    if outline.title:
        yield [(outline.title, "bold")]
    yield [(headline(outline), "" if outline.title else "bold")]
    yield []
    if outline.has_labels and outline.labels:
        yield from _legend(outline)
        yield []
    shown = list(every(unfolded(outline.root, depth=depth)))
    if shown:
        yield from _tree(outline, shown)
    if outline.notes:
        yield []
        yield from ([(note, "red")] for note in outline.notes)


def markdown(outline: Outline, *, depth: int | None = None) -> str:
    """Return an outline as Markdown, for a comment on a pull request.

    Names stand in code, where they are neither markup nor mentions.
    """
    parts = [f"**{headline(outline)}**"]
    if outline.has_labels and outline.labels:
        parts.append("\n".join(_markdown_legend(outline)))
    if outline.notes:
        parts.append(_fenced("diff", "\n".join(f"- {note}" for note in outline.notes)))
    shown = list(every(unfolded(outline.root, depth=depth)))
    if shown:
        tree = _fenced("text", plain(list(_tree(outline, shown))))
        parts.append(f"<details><summary>Tree</summary>\n\n{tree}\n\n</details>")
    return "\n\n".join(parts)


def _markdown_legend(outline: Outline) -> Iterator[str]:
    yield "| label | leaves | params | size | share | rules |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for one in legend(outline):
        if isinstance(one, Label):
            rules = " ".join(map(_code, one.rules[:_MAX_RULES]))
            cells = [_code(one.text), *one.numbers(outline), rules]
            yield f"| {' | '.join(cells)} |"
        else:
            yield f"| {one} | | | | | |"


def _code(text: str) -> str:
    """Write a text as code in a cell of a table."""
    text = fitted(text, _RULES).replace("|", "\\|")
    ticks = _ticks(text, 1)
    space = " " if text.strip("`") != text or not text.strip() else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _fenced(kind: str, text: str) -> str:
    ticks = _ticks(text, 3)
    return f"{ticks}{kind}\n{text}\n{ticks}"


def _ticks(text: str, least: int) -> str:
    """Return more backticks than stand together in a text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def plain(made: Sequence[Sequence[Span]]) -> str:
    """Return lines without their styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in made)


def _legend(outline: Outline) -> Iterator[list[Span]]:
    shown = legend(outline)
    cells = [
        (
            fitted(one.text, _LABEL),
            *one.numbers(outline),
            fitted(", ".join(one.rules), _RULES),
        )
        for one in shown
        if isinstance(one, Label)
    ]
    head = ("label", "leaves", "params", "size", "share", "rules")
    widths = [max(map(columns, column)) for column in zip(head, *cells, strict=True)]
    yield [("   ", ""), (_aligned(head, widths, "lrrrrl"), "dim")]
    told = iter(cells)
    for one in shown:
        if isinstance(one, Label):
            text = _aligned(next(told), widths, "lrrrrl")
            yield [("██ ", one.paint.color), (text, "")]
        else:
            yield [(f"   {one}", "dim")]


def _tree(outline: Outline, rows: Sequence[Row]) -> Iterator[list[Span]]:
    names = [
        fitted("  " * r.level + r.node.name_text, _NAME, middle=True) for r in rows
    ]
    contents = [fitted(row.node.kind_text, _CONTENTS) for row in rows]
    sizes = [size_text(row.node.size_bytes) for row in rows]
    head = ("path", "contents", "size")
    cells = list(zip(names, contents, sizes, strict=True))
    widths = [max(map(columns, column)) for column in zip(head, *cells, strict=True)]
    last = [("label", "dim")] if outline.has_labels else []
    bar = "share".ljust(_BAR + 2)
    yield [(_aligned(head, widths, "llr"), "dim"), (f"  {bar}", "dim"), *last]
    for row, (name, kind, size) in zip(rows, cells, strict=True):
        line: list[Span] = [
            (_padded(name, widths[0]), "bold" if row.node.children else ""),
            (f"  {_padded(kind, widths[1])}", "dim"),
            (f"  {size.rjust(widths[2])}  ", ""),
            *_bar(row.node, outline),
            ("  ", ""),
        ]
        if outline.has_labels:
            told = fitted(labels_text(row.node, outline.labels), _LABEL)
            first = max(row.node.shares, key=lambda pair: pair[1])[0]
            line.append((told, outline.labels[first].paint.color))
        yield line


def _bar(node: Node, outline: Outline) -> Iterator[Span]:
    """Yield as many cells as a node is of the whole, in the colours of its labels."""
    whole = outline.root.size_bytes
    eighths = round(8 * _BAR * node.size_bytes / whole) if whole else 0
    if node.size_bytes:
        eighths = max(eighths, 1)
    full, part = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[part] if part else "")
    at = 0
    total = 0.0
    shares = node.shares
    for place, (label, share) in enumerate(shares):
        total += share
        end = len(text) if place == len(shares) - 1 else round(total * len(text))
        if text[at:end]:
            yield text[at:end], outline.labels[label].paint.color
        at = max(at, end)
    yield " " * (_BAR - len(text)), ""


def _padded(text: str, width: int, *, right: bool = False) -> str:
    space = " " * (width - columns(text))
    return space + text if right else text + space


def _aligned(cells: Sequence[str], widths: Sequence[int], sides: str) -> str:
    return "  ".join(
        _padded(cell, width, right=side == "r")
        for cell, width, side in zip(cells, widths, sides, strict=True)
    )
