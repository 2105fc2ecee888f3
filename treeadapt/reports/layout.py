"""The lines of a picture: what is where, in columns of a fixed-width font.

Takes an outline; gives the lines of its legend and of its tree, each a row of spans as
wide as their texts. SVG, HTML and text paint these spans, so that they show the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from treeadapt.reports.outline import LEGEND, Branch, Node, Outline, every
from treeadapt.reports.palette import Paint
from treeadapt.reports.words import columns, fitted

_BAR, _MIX = 16, 5
_NAME, _CONTENTS, _LABEL, _RULES = 48, 32, 34, 60
_LEAST_RULES = 10  # columns of rules, below which they are left out
_SHORTEST = 12  # columns of a name in a narrow terminal
# Columns whose cells end at one place.
_NUMBERS = frozenset(
    {"leaves", "params", "size", "state", "share", "rule", "ms", "ratio"}
    | {"each device", "replicated"}
)


class Span(NamedTuple):
    """A part of a line.

    Attributes:
        text: as wide as the span; of a bar, spaces.
        style: words such as ``bold``, ``dim`` or ``number``, which ends at its right;
            or a colour, which is for text alone.
        share: of a bar, how much of it is filled.
        parts: of a bar, its paints and their shares of what is filled.
    """

    text: str
    style: str = ""
    share: float = 0.0
    parts: Sequence[tuple[Paint, float]] = ()

    @property
    def is_bar(self) -> bool:
        """Whether it is a bar; text leaves out what is a ``mix``."""
        return self.style in ("bar", "mix", "swatch")


class Line(NamedTuple):
    """A line of a picture.

    Attributes:
        spans: from left to right.
        tip: its tooltip.
        row: of the tree; None for a line of the legend, and above the tree.
    """

    spans: Sequence[Span]
    tip: str = ""
    row: Branch | None = None


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
    padded = []
    for column in zip(head, *rows, strict=True):
        width = max(map(columns, column))
        spaces = [" " * (width - columns(cell)) for cell in column]
        pairs = zip(column, spaces, strict=True)
        is_right = column[0] in _NUMBERS
        padded.append([s + cell if is_right else cell + s for cell, s in pairs])
    return list(zip(*padded, strict=True))


def picture(
    outline: Outline, *, labels: int = 16, limit: int = 44, width: int = 28
) -> tuple[Line, list[Line], list[Line]]:
    """Return a bar of the whole, as wide as the picture; the legend; and the tree.

    Args:
        outline: the outline.
        labels: how many labels to show, about.
        limit: as for ``Outline.rows``.
        width: as for ``Outline.rows``.
    """
    legend, tree = legend_lines(outline, labels), tree_lines(outline, limit, width)
    texts = ["".join(span.text for span in line.spans) for line in (*legend, *tree)]
    room = max(map(columns, (outline.headline, *texts))) + 2
    return Line([_bar(outline, outline.root, room)]), legend, tree


def legend_lines(
    outline: Outline, limit: int = 16, room: int | None = None
) -> list[Line]:
    """Return the lines of the legend, none without rules, and of the table below it.

    Args:
        outline: the outline.
        limit: how many labels to show, about.
        room: columns that there are. Rules go first, then counts.
    """
    shown = outline.legend(limit)
    below = [Line([Span(text)] if text else []) for text in ("", *outline.table)]
    if not shown:
        return below[1:]
    texts = []
    for one in shown:
        name, rules = fitted(one.text, _LABEL), fitted(", ".join(one.rules), _RULES)
        texts.append((name, *outline.numbers(one), rules))
    head, *table = _padded(LEGEND, texts)
    styles = ["strong", *["number"] * (len(head) - 2), "muted"]
    kept = list(range(len(head)))
    for least in ("rules", "params", "leaves"):
        widths = [columns(head[n]) + 2 for n in kept if LEGEND[n] != "rules"]
        if len(widths) < len(kept):  # rules may be cut at the edge, numbers may not
            widths.append(_LEAST_RULES)
        if room is not None and sum(widths) + 1 > room:
            kept.remove(LEGEND.index(least))
    lines = [Line([Span("   "), *_heads([head[n] for n in kept])])]
    for one, row in zip(shown, table, strict=True):
        swatch = Span("  ", "swatch", 1.0, [(one.paint, 1.0)])
        cells = [Span(row[n], styles[n]) for n in kept]
        spans = [swatch, Span(" "), *_spaced(*cells)]
        lines.append(Line(spans, one.tip))
    return [*lines, *(below if outline.table else [])]


def tree_lines(
    outline: Outline, limit: int = 44, width: int = 28, room: int | None = None
) -> list[Line]:
    """Return the lines of the tree.

    Args:
        outline: the outline.
        limit: as for ``Outline.rows``.
        width: as for ``Outline.rows``.
        room: columns that there are. The bars go first, then contents and sizes; labels
            stay, and names are cut in the middle.
    """
    rows = list(every(outline.rows(limit, width)))
    if not rows:
        return []
    labels = [
        fitted(outline.labels_text(row.node), _LABEL) if outline.has_labels else ""
        for row in rows
    ]
    texts = []
    for row in rows:
        name, kind, size = outline.cells(row.node)
        name = fitted("  " * row.level + name, _NAME, middle=True)
        texts.append((name, fitted(kind, _CONTENTS), size))
    widths = [max(map(columns, column)) + 2 for column in zip(*texts, strict=True)]
    end = max(map(columns, ("label", *labels))) if outline.has_labels else 0
    # What is left out, from the least: the bar, contents, sizes.
    drops = 0
    needs = [sum(widths) + _BAR + 2, sum(widths), widths[0] + widths[2], widths[0]]
    while room is not None and drops < 3 and needs[drops] + end > room:
        drops += 1
    if room is not None and needs[drops] + end > room:
        longest = max(room - end - 2, _SHORTEST)
        texts = [(fitted(n, longest, middle=True), kind, s) for n, kind, s in texts]
    head, *table = _padded(("path", "contents", "size"), texts)
    kept = [0, *([1] if drops < 2 else []), *([2] if drops < 3 else [])]
    share = [Span("  "), Span("share".ljust(_BAR), "dim")] if not drops else []
    spans = [Span("  ", "marker"), *_heads([head[n] for n in kept]), *share, Span("  ")]
    label = [Span(" " * (_MIX + 1), "mix"), Span("label", "dim")]
    lines = [Line([*spans, *(label if outline.has_labels else [])])]
    for row, cells, wording in zip(rows, table, labels, strict=True):
        node, indent = row.node, 2 * row.level
        bar = _bar(outline, node, _BAR)
        name, kind, size = cells
        parts = [
            Span(name[indent:], "bold" if node.children else ""),
            Span(kind, "muted"),
            Span(size, "number"),
        ]
        shown = [*(parts[n] for n in kept), *([] if drops else [bar])]
        spans = [Span(name[:indent]), Span("  ", "marker"), *_spaced(*shown)]
        if outline.has_labels:
            mix = Span(" " * _MIX, "mix", 1.0, bar.parts)
            first = outline.labels[max(node.shares, key=lambda pair: pair[1])[0]]
            text = Span(wording, first.paint.color)
            spans += [Span("  "), mix, Span(" ", "mix"), text]
        lines.append(Line(spans, outline.tooltip(row), row))
    return lines


def _bar(outline: Outline, node: Node, width: int) -> Span:
    """Return a bar that is filled as far as a node is of the whole."""
    parts = [(outline.labels[label].paint, share) for label, share in node.cells]
    share = node.size_bytes / (outline.root.size_bytes or 1)
    return Span(" " * width, "bar", share, parts)


def _heads(head: Sequence[str]) -> list[Span]:
    styles = ("dim number" if text.strip() in _NUMBERS else "dim" for text in head)
    return _spaced(*map(Span, head, styles))


def _spaced(*spans: Span) -> list[Span]:
    """Put space between spans."""
    return [one for span in spans for one in (span, Span("  "))][:-1]
