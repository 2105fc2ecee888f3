"""An outline as an SVG picture: one file, no script, nothing fetched.

It brings its own ground, light or dark as the reader's system is, so it can be read
wherever it is shown, as in a pull request. Rows have tooltips where the file itself is
opened. Equal outlines give equal bytes.
"""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence

from treeadapt.drawing.markup import element, px
from treeadapt.drawing.outline import LEGEND, Node, Outline, Row, every
from treeadapt.drawing.palette import Paint
from treeadapt.drawing.words import columns, fitted, size_text

_NOTES = 6
_LINE, _CLOSE = 21, 19  # heights of rows, in pixels
_CHAR = 7.25  # width of a character of the font below
_MARGIN, _GAP, _INDENT = 20, 16, 14
_BAR, _MIX = 150, 34
_MAX_LEVEL = 12
_NUMBERS = ("end",) * 4
_STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  "Liberation Mono", monospace; white-space: pre; fill: #1f2328 }
.title { font-size: 14px; font-weight: 600 }
.strong { font-weight: 600 }
.end { text-anchor: end }
.muted, .marker { fill: #59636e }
.warn { fill: #b3261e }
.band { fill: #f6f8fa }
.track { fill: #e6eaef }
.ground { fill: #ffffff; stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.muted, .marker { fill: #9198a1 }
.warn { fill: #ff8f85 }
.band { fill: #151b23 }
.track { fill: #262c36 }
.ground { fill: #0d1117; stroke: #30363d }
}
"""


def svg(outline: Outline) -> str:
    """Return an outline as an SVG document."""
    return ET.tostring(_Page(outline).draw(), encoding="unicode") + "\n"


class _Page:
    """A picture in the making; ``y`` is where the next row goes.

    Its columns are as wide as the longest text in them takes, within bounds.
    """

    def __init__(self, outline: Outline):
        self.outline = outline
        self.rows = list(every(outline.rows()))
        self.cells = [outline.cells(row.node) for row in self.rows]
        wide = [tuple(map(columns, cells)) for cells in self.cells]
        indented = (w[0] + _indent(r) for w, r in zip(wide, self.rows, strict=True))
        self.widths = (
            _within(24, indented, 50),
            _within(8, (one[1] for one in wide), 40),
            _within(4, (one[2] for one in wide), 12),
            _within(8, (one[3] for one in wide), 30),
        )
        kind_x = _MARGIN + self.widths[0] * _CHAR + _GAP
        size_end = kind_x + (self.widths[1] + self.widths[2]) * _CHAR + _GAP
        bar_x = size_end + _GAP
        self.right = bar_x + _BAR
        label_x = self.right + _GAP
        self.places = (_MARGIN, kind_x, size_end, bar_x, label_x)
        if outline.has_labels:
            self.right = label_x + _MIX + 8 + self.widths[3] * _CHAR
        self.room = int((self.right - _MARGIN) / _CHAR)  # in columns
        self.y = _MARGIN + 6.0
        self.root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg"})
        self.patterns: dict[str, Paint] = {}

    def draw(self) -> ET.Element:
        """Draw everything, then the ground below it."""
        title = f"{self.outline.title}: " if self.outline.title else ""
        element(self.root, "title", title + self.outline.headline)
        element(self.root, "style", _STYLE)
        patterns = element(self.root, "defs")
        ground = element(self.root, "rect", x=0.5, y=0.5, rx=6, class_="ground")
        self._head()
        if self.outline.legend():
            self._legend()
        self._notes()
        self._tree()
        width, height = self.right + _MARGIN, self.y - _LINE + _MARGIN + 4
        size = {"width": px(width), "height": px(height)}
        view = f"0 0 {px(width)} {px(height)}"
        self.root.attrib.update(size, viewBox=view, role="img")
        ground.attrib.update(width=px(width - 1), height=px(height - 1))
        for name, paint in self.patterns.items():
            _pattern(patterns, name, paint)
        return self.root

    def _head(self) -> None:
        title = self.outline.title
        if title:
            shown = fitted(title, int(self.room / 1.2))
            self._words(self.root, _MARGIN, shown, "title")
            self.y += _LINE + 3
        headline = self.outline.headline
        self._words(self.root, _MARGIN, headline, "" if title else "title")
        self.y += _LINE
        self._size_bar(self.root, _MARGIN, self.right - _MARGIN, self.outline.root)
        self.y += _LINE + 6

    def _legend(self) -> None:
        shown = self.outline.legend()
        name = _within(5, (columns(one.text) for one in shown), 28)
        ends = itertools.accumulate((0, name + 9, 9, 11, 7))
        places = [_MARGIN + 20 + end * _CHAR for end in ends]
        places.append(places[-1] + _GAP)
        room = int((self.right - places[-1]) / _CHAR)
        head = LEGEND if any(one.rules for one in shown) else LEGEND[:-1]
        for x, text, end in zip(places, head, ("", *_NUMBERS, ""), strict=False):
            self._words(self.root, x, text, f"muted {end}".strip())
        self.y += _CLOSE
        for one in shown:
            group = self._group(one.tip)
            self._rect(group, _MARGIN, 10, 12, 12, rx=2, fill=self._fill(one.paint))
            rules = fitted(", ".join(one.rules), room)
            texts = (fitted(one.text, name), *self.outline.numbers(one), rules)
            classes = ("strong", *_NUMBERS, "muted")
            for x, text, class_ in zip(places, texts, classes, strict=True):
                self._words(group, x, text, class_)
            self.y += _CLOSE
        self.y += 10

    def _notes(self) -> None:
        notes = self.outline.notes
        shown = notes if len(notes) <= _NOTES else notes[: _NOTES - 1]
        for note in shown:
            text = f"! {fitted(note, self.room - 3)}"
            self._words(self._group(note), _MARGIN, text, "warn")
            self.y += _CLOSE
        if len(shown) < len(notes):
            told = f"! … {len(notes) - len(shown):,} more notes"
            self._words(self.root, _MARGIN, told, "warn")
            self.y += _CLOSE
        self.y += 8 if notes else 0

    def _tree(self) -> None:
        share = f"share of {size_text(self.outline.root.size_bytes)}"
        label = "label" if self.outline.has_labels else ""
        head = ("path", "contents", "size", share, label)
        for x, text in zip(self.places, head, strict=True):
            self._words(self.root, x, text, "muted end" if text == "size" else "muted")
        self.y += _LINE
        for place, row in enumerate(self.rows):
            group = self._group(self.outline.tooltip(row))
            if place % 2 == 0:
                width = self.right - _MARGIN + 16
                self._rect(group, _MARGIN - 8, 14.5, width, _LINE, rx=4, class_="band")
            self._row(group, row, self.cells[place])
            self.y += _LINE

    def _row(self, group: ET.Element, row: Row, cells: Sequence[str]) -> None:
        node = row.node
        x = _MARGIN + min(row.level, _MAX_LEVEL) * _INDENT
        if node.children:
            is_open = "0,-2.5 9,-2.5 4.5,2.5" if row.children else ""
            points = is_open or "2,-4.5 2,4.5 7,0"
            move = f"translate({px(x)} {px(self.y - 4)})"
            element(group, "polygon", points=points, transform=move, class_="marker")
        name, kind, size, label = cells
        _, kind_x, size_end, bar_x, label_x = self.places
        name = fitted(name, self.widths[0] - _indent(row), middle=True)
        self._words(group, x + 14, name, "strong" if node.children else "")
        self._words(group, kind_x, fitted(kind, self.widths[1]), "muted")
        self._words(group, size_end, size, "end")
        self._size_bar(group, bar_x, _BAR, node)
        if self.outline.has_labels:
            self._mix(group, label_x, _MIX, node)
            self._words(group, label_x + _MIX + 8, fitted(label, self.widths[3]))

    def _size_bar(self, into: ET.Element, x: float, length: float, node: Node) -> None:
        """Draw a track, and on it the part of the whole that a node is, by label."""
        self._rect(into, x, 9.5, length, 11, rx=2, class_="track")
        if node.size_bytes:
            part = node.size_bytes / self.outline.root.size_bytes
            self._mix(into, x, max(length * part, 2.0), node)

    def _mix(self, into: ET.Element, x: float, length: float, node: Node) -> None:
        """Draw a bar that the labels of a node share."""
        cells = node.cells
        widths = _widths([share for _, share in cells], length)
        for place, ((label, _), width) in enumerate(zip(cells, widths, strict=True), 1):
            gap = 0.0 if place == len(cells) or width < 4 else 1.0
            fill = self._fill(self.outline.labels[label].paint)
            self._rect(into, x, 9.5, width - gap, 11, fill=fill)
            x += width

    def _fill(self, paint: Paint) -> str:
        if paint.texture == "plain":
            return paint.color
        name = f"{paint.texture}-{paint.color[1:]}"
        self.patterns[name] = paint
        return f"url(#{name})"

    def _group(self, tip: str) -> ET.Element:
        group = element(self.root, "g")
        element(group, "title", tip)
        return group

    def _rect(
        self,
        into: ET.Element,
        x: float,
        above: float,
        width: float,
        height: float,
        **more: str | float,
    ) -> None:
        y = self.y - above
        element(into, "rect", "", x=x, y=y, width=width, height=height, **more)

    def _words(self, into: ET.Element, x: float, text: str, classes: str = "") -> None:
        if text:
            element(into, "text", text, x=x, y=self.y, class_=classes)


def _pattern(into: ET.Element, name: str, paint: Paint) -> None:
    """Define stripes; those of a gap are thin."""
    turn = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    made = element(into, "pattern", id=name, width=6, height=6, **turn)
    is_gap = paint.texture == "gap"
    ground, stripe = (0.25, paint.color) if is_gap else (1, "#ffffff")
    element(made, "rect", width=6, height=6, fill=paint.color, fill_opacity=ground)
    opacity = 1 if is_gap else 0.65
    element(made, "rect", width=2, height=6, fill=stripe, fill_opacity=opacity)


def _indent(row: Row) -> int:
    """Return how many columns a name is indented."""
    return round((min(row.level, _MAX_LEVEL) * _INDENT + 14) / _CHAR)


def _within(least: int, numbers: Iterable[int], most: int) -> int:
    return min(max([least, *numbers]), most)


def _widths(shares: Sequence[float], length: float) -> list[float]:
    """Divide a length by shares, so that what is there is seen: at least a pixel."""
    least = min(1.0, length / len(shares))
    big = [share for share in shares if share * length >= least]
    left = length - least * (len(shares) - len(big))
    return [
        left * share / sum(big) if share * length >= least else least
        for share in shares
    ]
