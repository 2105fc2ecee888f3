"""Text: an outline as lines in colours, and as Markdown.

A line is a list of texts, each with a style, which holds the words ``bold``, ``dim`` or
``red``, or is a colour such as ``#3377dd``. The texts alone are the plain form, for a
pipe, a log or a commit message.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

from treeadapt.reports.layout import Line, Span, legend_lines, tree_lines
from treeadapt.reports.outline import LEGEND, Outline
from treeadapt.reports.words import fitted

Styled = list[tuple[str, str]]  # texts, each with its style

_CODE = 60
_MAX_RULES = 8  # of a label, in Markdown
_EIGHTHS = " ▏▎▍▌▋▊▉"


def lines(outline: Outline, room: int | None = None) -> Iterator[Styled]:
    """Yield the lines of an outline, without its title; ``room`` as for the tree."""
    yield [(outline.headline, "bold")]
    yield []
    legend = legend_lines(outline, room=room)
    yield from map(_styled, legend)
    if legend:
        yield []
    yield from map(_styled, tree_lines(outline, room=room))
    if outline.notes:
        yield []
        for note in outline.notes:
            wrapped = [note] if room is None else textwrap.wrap(note, max(room, 2))
            yield from ([(part, "red")] for part in wrapped)


def plain(lines: Iterable[Styled]) -> str:
    """Return lines without their styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


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
    if outline.table:
        parts.append(_fenced("text", "\n".join(outline.table)))
    if outline.notes:
        parts.append(_fenced("diff", "\n".join(f"- {note}" for note in outline.notes)))
    tree = _fenced("text", plain(map(_styled, tree_lines(outline))))
    parts.append(f"<details><summary>Tree</summary>\n\n{tree}\n\n</details>")
    return "\n\n".join(parts)


def _code(text: str) -> str:
    """Write a text as code in a cell of a table."""
    text = fitted(text, _CODE).replace("|", "\\|")
    ticks = _ticks(text, 1)
    space = " " if text.strip("`") != text or not text.strip() else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _fenced(kind: str, text: str) -> str:
    ticks = _ticks(text, 3)
    return f"{ticks}{kind}\n{text}\n{ticks}"


def _ticks(text: str, least: int) -> str:
    """Return more backticks than any run of them in a text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def _styled(line: Line) -> Styled:
    styled = []
    for span in line.spans:
        if span.style in ("bar", "swatch"):
            styled += list(_bar(span))
        elif span.style not in ("mix", "marker"):
            styled.append((span.text, span.style))
    return styled


def _bar(span: Span) -> Iterator[tuple[str, str]]:
    """Yield a bar as cells, in the colours of its labels."""
    width = len(span.text)
    eighths = round(8 * width * span.share)
    full, part = divmod(max(eighths, 1) if span.share else 0, 8)
    text = "█" * full + (_EIGHTHS[part] if part else "")
    at, total = 0, 0.0
    for place, (paint, share) in enumerate(span.parts, 1):
        total += share
        end = len(text) if place == len(span.parts) else round(total * len(text))
        if text[at:end]:
            yield text[at:end], paint.color
        at = max(at, end)
    yield " " * (width - len(text)), ""
