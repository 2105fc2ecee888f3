"""An outline as an SVG picture: one file, no script, nothing fetched.

It brings its own ground, light or dark as the reader's system is, so it can be read
wherever it is shown, as in a pull request. Rows have tooltips where the file itself is
opened. Equal outlines give equal bytes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from treeadapt.drawing.outline import Label, Node, Outline, Row, every
from treeadapt.drawing.palette import Paint
from treeadapt.drawing.words import columns, fitted, size_text

_NOTES = 6
_LINE, _CLOSE = 21, 19  # heights of rows, in pixels
_CHAR = 7.25  # width of a character of the font below
_MARGIN, _GAP, _INDENT = 20, 16, 14
_BAR, _MIX = 150, 34
_MAX_LEVEL = 12
_FONT = (
    'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", '
    '"Liberation Mono", monospace'
)
_COLORS = (  # what, on light and on dark ground
    ("text", "fill", "#1f2328", "#e6edf3"),
    (".muted, .marker", "fill", "#59636e", "#9198a1"),
    (".warn", "fill", "#b3261e", "#ff8f85"),
    (".band", "fill", "#f6f8fa", "#151b23"),
    (".track", "fill", "#e6eaef", "#262c36"),
    (".ground", "fill", "#ffffff", "#0d1117"),
    (".ground", "stroke", "#d0d7de", "#30363d"),
)


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
        self.whole_bytes = outline.root.size_bytes
        nodes = [row.node for row in self.rows]
        names = [columns(r.node.name_text) + _indent(r) for r in self.rows]
        kinds = [columns(node.kind_text) for node in nodes]
        sizes = [columns(size_text(node.size_bytes)) for node in nodes]
        labels = [columns(outline.labels_text(node)) for node in nodes]
        self.name_columns = _within(24, names, 50)
        self.kind_columns = _within(8, kinds, 40)
        self.label_columns = _within(8, labels, 30)
        self.kind_x = _MARGIN + self.name_columns * _CHAR + _GAP
        size_columns = self.kind_columns + _within(4, sizes, 12)
        self.size_end = self.kind_x + size_columns * _CHAR + _GAP
        self.bar_x = self.size_end + _GAP
        self.right = self.bar_x + _BAR
        self.label_x = self.right + _GAP
        if outline.has_labels:
            self.right = self.label_x + _MIX + 8 + self.label_columns * _CHAR
        self.room = int((self.right - _MARGIN) / _CHAR)  # in columns
        self.y = _MARGIN + 6.0
        self.root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg"})
        self.textures: dict[str, str] = {}

    def draw(self) -> ET.Element:
        """Draw everything, then the ground below it."""
        title = f"{self.outline.title}: " if self.outline.title else ""
        ET.SubElement(self.root, "title").text = title + self.outline.headline
        ET.SubElement(self.root, "style").text = _style()
        patterns = ET.SubElement(self.root, "defs")
        ground = ET.SubElement(self.root, "rect")
        self._head()
        if self.outline.legend():
            self._legend()
        self._notes()
        self._tree()
        height = self.y - _LINE + _MARGIN + 4
        width = self.right + _MARGIN
        _set(self.root, width=width, height=height)
        self.root.set("viewBox", f"0 0 {_px(width)} {_px(height)}")
        self.root.set("role", "img")
        _set(ground, x=0.5, y=0.5, width=width - 1, height=height - 1, rx=6)
        ground.set("class", "ground")
        for texture, color in self.textures.items():
            _pattern(patterns, texture, color)
        return self.root

    def _head(self) -> None:
        title = self.outline.title
        if title:
            self._words(_MARGIN, fitted(title, int(self.room / 1.2)), "title")
            self.y += _LINE + 3
        self._words(_MARGIN, self.outline.headline, "" if title else "title")
        self.y += _LINE
        self._size_bar(self.root, _MARGIN, self.right - _MARGIN, self.outline.root)
        self.y += _LINE + 6

    def _legend(self) -> None:
        labels = self.outline.labels
        name = min(max([5, *(columns(one.text) for one in labels)]), 28)
        ends = [_MARGIN + 20 + name * _CHAR]
        for width in (9, 9, 11, 7):
            ends.append(ends[-1] + width * _CHAR)
        names = ("leaves", "params", "size", "share")
        self._words(_MARGIN + 20, "label", "muted")
        for end, title in zip(ends[1:], names, strict=True):
            self._words(end, title, "muted", end=True)
        if any(one.rules for one in labels):
            self._words(ends[-1] + _GAP, "rules", "muted")
        self.y += _CLOSE
        for one in self.outline.legend():
            if isinstance(one, Label):
                self._entry(one, name, ends)
            else:
                self._words(_MARGIN + 20, one, "muted")
                self.y += _CLOSE
        self.y += 10

    def _entry(self, one: Label, name_columns: int, ends: Sequence[float]) -> None:
        """Draw a row of the legend."""
        group = self._group(one.tip)
        swatch = ET.SubElement(group, "rect")
        _set(swatch, x=_MARGIN, y=self.y - 10, width=12, height=12, rx=2)
        swatch.set("fill", self._fill(one.paint))
        self._words(_MARGIN + 20, fitted(one.text, name_columns), "strong", into=group)
        for end, number in zip(ends[1:], one.numbers(self.whole_bytes), strict=True):
            self._words(end, number, "", end=True, into=group)
        x = ends[-1] + _GAP
        rules = fitted(", ".join(one.rules), int((self.right - x) / _CHAR))
        self._words(x, rules, "muted", into=group)
        self.y += _CLOSE

    def _notes(self) -> None:
        notes = self.outline.notes
        shown = notes if len(notes) <= _NOTES else notes[: _NOTES - 1]
        for note in shown:
            group = self._group(note)
            self._words(_MARGIN, f"! {fitted(note, self.room - 3)}", "warn", into=group)
            self.y += _CLOSE
        if len(shown) < len(notes):
            told = f"! … {len(notes) - len(shown):,} more notes"
            self._words(_MARGIN, told, "warn")
            self.y += _CLOSE
        self.y += 8 if notes else 0

    def _tree(self) -> None:
        self._words(_MARGIN, "path", "muted")
        self._words(self.kind_x, "contents", "muted")
        self._words(self.size_end, "size", "muted", end=True)
        self._words(self.bar_x, f"share of {size_text(self.whole_bytes)}", "muted")
        if self.outline.has_labels:
            self._words(self.label_x, "label", "muted")
        self.y += _LINE
        for place, row in enumerate(self.rows):
            self._row(row, is_banded=place % 2 == 0)

    def _row(self, row: Row, *, is_banded: bool) -> None:
        node = row.node
        group = self._group(self.outline.tooltip(row))
        if is_banded:
            band = ET.SubElement(group, "rect")
            _set(band, x=_MARGIN - 8, y=self.y - 14.5, height=_LINE, rx=4)
            _set(band, width=self.right - _MARGIN + 16)
            band.set("class", "band")
        x = _MARGIN + min(row.level, _MAX_LEVEL) * _INDENT
        if node.children:
            self._marker(group, x, is_open=bool(row.children))
        name = fitted(node.name_text, self.name_columns - _indent(row), middle=True)
        self._words(x + 14, name, "strong" if node.children else "", into=group)
        kind = fitted(node.kind_text, self.kind_columns)
        self._words(self.kind_x, kind, "muted", into=group)
        size = size_text(node.size_bytes)
        self._words(self.size_end, size, "", end=True, into=group)
        self._size_bar(group, self.bar_x, _BAR, node)
        if self.outline.has_labels:
            self._mix(group, self.label_x, _MIX, node)
            told = fitted(self.outline.labels_text(node), self.label_columns)
            self._words(self.label_x + _MIX + 8, told, "", into=group)
        self.y += _LINE

    def _size_bar(self, into: ET.Element, x: float, length: float, node: Node) -> None:
        """Draw a track, and on it the part of the whole that a node is, by label."""
        track = ET.SubElement(into, "rect")
        _set(track, x=x, y=self.y - 9.5, width=length, height=11, rx=2)
        track.set("class", "track")
        if node.size_bytes:
            self._mix(
                into, x, max(length * node.size_bytes / self.whole_bytes, 2.0), node
            )

    def _mix(self, into: ET.Element, x: float, length: float, node: Node) -> None:
        """Draw a bar that the labels of a node share."""
        shares = node.cells
        widths = _widths([share for _, share in shares], length)
        last = len(shares) - 1
        for place, ((label, _), width) in enumerate(zip(shares, widths, strict=True)):
            part = ET.SubElement(into, "rect")
            gap = 0.0 if place == last or width < 4 else 1.0
            _set(part, x=x, y=self.y - 9.5, width=width - gap, height=11)
            part.set("fill", self._fill(self.outline.labels[label].paint))
            x += width

    def _marker(self, into: ET.Element, x: float, *, is_open: bool) -> None:
        y = self.y - 4
        points = [(0, -2.5), (9, -2.5), (4.5, 2.5)] if is_open else []
        points = points or [(2, -4.5), (2, 4.5), (7, 0)]
        marker = ET.SubElement(into, "polygon")
        told = (f"{_px(x + dx)},{_px(y + dy)}" for dx, dy in points)
        marker.set("points", " ".join(told))
        marker.set("class", "marker")

    def _fill(self, paint: Paint) -> str:
        if paint.texture == "plain":
            return paint.color
        name = f"{paint.texture}-{paint.color[1:]}"
        self.textures[name] = paint.color
        return f"url(#{name})"

    def _group(self, tip: str) -> ET.Element:
        group = ET.SubElement(self.root, "g")
        ET.SubElement(group, "title").text = tip
        return group

    def _words(
        self,
        x: float,
        text: str,
        classes: str,
        *,
        end: bool = False,
        into: ET.Element | None = None,
    ) -> None:
        if not text:
            return
        made = ET.SubElement(self.root if into is None else into, "text")
        _set(made, x=x, y=self.y)
        classes = " ".join(filter(None, (classes, "end" if end else "")))
        if classes:
            made.set("class", classes)
        made.text = text


def _pattern(into: ET.Element, name: str, color: str) -> None:
    """Define stripes; those of a gap are thin."""
    size = 6
    is_gap = name.startswith("gap")
    pattern = ET.SubElement(into, "pattern", {"id": name})
    _set(pattern, width=size, height=size)
    pattern.set("patternUnits", "userSpaceOnUse")
    pattern.set("patternTransform", "rotate(45)")
    for width in (size, 2):
        part = ET.SubElement(pattern, "rect")
        _set(part, width=width, height=size)
        part.set("fill", color if is_gap or width == size else "#ffffff")
        if is_gap == (width == size):
            part.set("fill-opacity", "0.25" if is_gap else "0.65")


def _indent(row: Row) -> int:
    """Return how many columns a name is indented."""
    return round((min(row.level, _MAX_LEVEL) * _INDENT + 14) / _CHAR)


def _within(least: int, numbers: Sequence[int], most: int) -> int:
    return min(max([least, *numbers]), most)


def _widths(shares: Sequence[float], length: float) -> list[float]:
    """Divide a length by shares, so that what is there is seen: at least a pixel."""
    least = min(1.0, length / len(shares))
    small = [share * length < least for share in shares]
    left = length - least * sum(small)
    big = sum(
        share for share, is_small in zip(shares, small, strict=True) if not is_small
    )
    return [
        least if is_small else left * share / big
        for share, is_small in zip(shares, small, strict=True)
    ]


def _style() -> str:
    light = "\n".join(f"{name} {{ {what}: {one} }}" for name, what, one, _ in _COLORS)
    dark = "\n".join(f"{name} {{ {what}: {two} }}" for name, what, _, two in _COLORS)
    return (
        f"\ntext {{ font: 12px {_FONT}; white-space: pre }}\n"
        ".title { font-size: 14px; font-weight: 600 }\n"
        ".strong { font-weight: 600 }\n"
        ".end { text-anchor: end }\n"
        f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
    )


def _set(element: ET.Element, **numbers: float) -> None:
    for name, number in numbers.items():
        element.set(name, _px(number))


def _px(number: float) -> str:
    text = f"{number:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
