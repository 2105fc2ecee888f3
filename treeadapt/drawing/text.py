"""Text: aligned tables, an outline as lines in colours, and an outline as Markdown.

A line is a list of spans: a text, and a style, which is ``bold``, ``dim``, ``red`` or a
colour such as ``#3377dd``. Their texts alone are the plain form, for a pipe, a log or a
commit message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from treeadapt.drawing.outline import LEGEND, Node, Outline, every
from treeadapt.drawing.words import columns, fitted

Span = tuple[str, str]  # text, and style

_BAR = 16
_NAME, _CONTENTS, _LABEL, _RULES = 48, 32, 34, 60
_MAX_RULES = 8  # of a label, in Markdown
_EIGHTHS = " ▏▎▍▌▋▊▉"
# Columns whose cells end at one place.
_NUMBERS = frozenset({"leaves", "params", "size", "share", "rule", "ms", "ratio"})


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write a table as lines; columns of numbers end at one place.

    Args:
        head: the names of the columns.
        rows: the cells below them.

    Example:
        >>> aligned(("label", "leaves"), [("train", "2")])
        ['label  leaves', 'train       2']
    """
    return ["  ".join(row).rstrip() for row in _padded(head, rows)]


def _padded(
    head: Sequence[str], rows: Iterable[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Return head and rows, with the cells of each column equally wide."""
    made = []
    for column in zip(head, *rows, strict=True):
        width = max(map(columns, column))
        spaces = [" " * (width - columns(cell)) for cell in column]
        pairs = zip(column, spaces, strict=True)
        is_right = column[0] in _NUMBERS
        made.append([s + cell if is_right else cell + s for cell, s in pairs])
    return list(zip(*made, strict=True))


def lines(outline: Outline) -> Iterator[list[Span]]:
    """Yield the lines of an outline."""
    if outline.title:
        yield [(outline.title, "bold")]
    yield [(outline.headline, "" if outline.title else "bold")]
    yield []
    if outline.legend():
        yield from _legend(outline)
        yield []
    yield from _tree(outline)
    if outline.notes:
        yield []
        yield from ([(note, "red")] for note in outline.notes)


def plain(made: Iterable[list[Span]]) -> str:
    """Return lines without their styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in made)


def markdown(outline: Outline) -> str:
    """Return an outline as Markdown, for a comment on a pull request.

    Names are code, so that they are neither markup nor mentions.
    """
    parts = [f"**{outline.headline}**"]
    if outline.title:
        parts.insert(0, f"### {_code(outline.title)}")
    if outline.legend():
        table = [LEGEND, ("---", *["---:"] * 4, "---")]
        for one in outline.legend():
            rules = " ".join(map(_code, one.rules[:_MAX_RULES]))
            table.append((_code(one.text), *outline.numbers(one), rules))
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in table))
    if outline.notes:
        parts.append(_fenced("diff", "\n".join(f"- {note}" for note in outline.notes)))
    tree = _fenced("text", plain(_tree(outline)))
    parts.append(f"<details><summary>Tree</summary>\n\n{tree}\n\n</details>")
    return "\n\n".join(parts)


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
    """Return more backticks than any run of them in a text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def _legend(outline: Outline) -> Iterator[list[Span]]:
    cells = [
        (
            fitted(one.text, _LABEL),
            *outline.numbers(one),
            fitted(", ".join(one.rules), _RULES),
        )
        for one in outline.legend()
    ]
    head, *rows = aligned(LEGEND, cells)
    yield [("   ", ""), (head, "dim")]
    for one, row in zip(outline.legend(), rows, strict=True):
        yield [("██ ", one.paint.color), (row, "")]


def _tree(outline: Outline) -> Iterator[list[Span]]:
    rows = list(every(outline.rows()))
    cells = [outline.cells(row.node) for row in rows]
    shown = [
        (
            fitted("  " * row.level + name, _NAME, middle=True),
            fitted(kind, _CONTENTS),
            size,
        )
        for row, (name, kind, size, _) in zip(rows, cells, strict=True)
    ]
    head, *table = _padded(("path", "contents", "size"), shown)
    last = [("label", "dim")] if outline.has_labels else []
    if rows:
        yield [("  ".join([*head, "share".ljust(_BAR + 2)]), "dim"), *last]
    for row, (name, kind, size), (*_, label) in zip(rows, table, cells, strict=True):
        style = "bold" if row.node.children else ""
        line = [(name, style), (f"  {kind}  {size}  ", "")]
        line += [*_bar(row.node, outline), ("  ", "")]
        if outline.has_labels:
            first = max(row.node.shares, key=lambda pair: pair[1])[0]
            line.append((fitted(label, _LABEL), outline.labels[first].paint.color))
        yield line


def _bar(node: Node, outline: Outline) -> Iterator[Span]:
    """Yield as many cells as a node is of the whole, in the colours of its labels."""
    whole = outline.root.size_bytes
    eighths = round(8 * _BAR * node.size_bytes / whole) if whole else 0
    full, part = divmod(max(eighths, 1) if node.size_bytes else 0, 8)
    text = "█" * full + (_EIGHTHS[part] if part else "")
    at, total = 0, 0.0
    for place, (label, share) in enumerate(node.shares, 1):
        total += share
        end = len(text) if place == len(node.parts) else round(total * len(text))
        if text[at:end]:
            yield text[at:end], outline.labels[label].paint.color
        at = max(at, end)
    yield " " * (_BAR - len(text)), ""
