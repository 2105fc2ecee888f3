"""An outline as an SVG picture: one file, no script, nothing fetched.

It brings its own ground, light or dark as the reader's system is, so it can be read
wherever it is shown, as in a pull request. Rows have tooltips where the file itself is
opened. Equal outlines give equal bytes.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from treeadapt.reports.layout import Line, Span, picture
from treeadapt.reports.markup import element, px
from treeadapt.reports.outline import Outline
from treeadapt.reports.palette import Paint
from treeadapt.reports.words import columns, fitted

_NOTES = 6
_LINE, _CLOSE = 21, 19  # heights of rows, in pixels
_CHAR = 7.25  # width of a character of the font below
_MARGIN = 20
_STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  "Liberation Mono", monospace; white-space: pre; fill: #1f2328 }
.title { font-size: 14px }
.title, .strong, .bold { font-weight: 600 }
.number { text-anchor: end }
.dim, .muted, .marker { fill: #59636e }
.red { fill: #b3261e }
.band { fill: #f6f8fa }
.track { fill: #e6eaef }
.ground { fill: #ffffff; stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.dim, .muted, .marker { fill: #9198a1 }
.red { fill: #ff8f85 }
.band { fill: #151b23 }
.track { fill: #262c36 }
.ground { fill: #0d1117; stroke: #30363d }
}
"""


def svg(outline: Outline) -> str:
    """Return an outline as an SVG document."""
    return ET.tostring(_Page().draw(outline), encoding="unicode") + "\n"


class _Page:
    """A picture in the making; ``y`` is where the next row goes."""

    def __init__(self) -> None:
        self.root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg"})
        self.y = _MARGIN + 6.0

    def draw(self, outline: Outline) -> ET.Element:
        """Draw everything, then the ground below it."""
        title = f"{outline.title}: " if outline.title else ""
        element(self.root, "title", title + outline.headline)
        element(self.root, "style", _STYLE)
        looks = (one.paint for one in (*outline.labels, *outline.legend()))
        patterns = element(self.root, "defs")
        for paint in dict.fromkeys(one for one in looks if one.texture != "plain"):
            _pattern(patterns, paint)
        ground = element(self.root, "rect", x=0.5, y=0.5, rx=6, class_="ground")
        whole, legend, tree = picture(outline)
        room = columns(whole.spans[0].text)
        if title:
            shown = fitted(outline.title, int(room / 1.2))
            self._line(Line([Span(shown, "title")]), _LINE + 3)
        self._line(Line([Span(outline.headline, "" if title else "title")]))
        self._line(whole, _LINE + 6)
        for line in legend:
            self._line(line, _CLOSE)
        self.y += 10 if legend else 0
        notes = [f"! {fitted(note, room - 2)}" for note in outline.notes]
        if len(notes) > _NOTES:
            left = len(notes) - _NOTES + 1
            notes = [*notes[: _NOTES - 1], f"! … {left:,} more notes"]
        for note in notes:
            self._line(Line([Span(note, "red")]), _CLOSE)
        self.y += 8 if notes else 0
        for place, line in enumerate(tree):
            self._line(line, band=room if place % 2 else 0)
        width, height = room * _CHAR + 2 * _MARGIN, self.y - _LINE + _MARGIN + 4
        size = {"width": px(width), "height": px(height)}
        view = f"0 0 {px(width)} {px(height)}"
        self.root.attrib.update(size, viewBox=view, role="img")
        ground.attrib.update(width=px(width - 1), height=px(height - 1))
        return self.root

    def _line(self, line: Line, height: float = _LINE, *, band: int = 0) -> None:
        """Draw a line, on a band of so many columns."""
        into = self.root
        if line.tip:
            into = element(self.root, "g")
            element(into, "title", line.tip)
        if band:
            width, y = band * _CHAR + 16, self.y - 14.5
            rect = {"y": y, "width": width, "height": _LINE, "rx": 4}
            element(into, "rect", "", x=_MARGIN - 8, class_="band", **rect)
        x: float = _MARGIN
        for span in line.spans:
            width = columns(span.text) * _CHAR
            if span.style == "marker":
                self._marker(into, x, line)
            elif span.is_bar:
                self._bar(into, x, width, span)
            elif span.text.strip():
                style = "" if span.style.startswith("#") else span.style
                text = span.text.strip()
                start = x + width if "number" in style else x
                element(into, "text", text, x=start, y=self.y, class_=style)
            x += width
        self.y += height

    def _marker(self, into: ET.Element, x: float, line: Line) -> None:
        """Draw a triangle that shows whether a node is open."""
        if line.row and line.row.node.children:
            is_open = "0,-2.5 9,-2.5 4.5,2.5" if line.row.children else ""
            points = is_open or "2,-4.5 2,4.5 7,0"
            move = f"translate({px(x)} {px(self.y - 4)})"
            element(into, "polygon", points=points, transform=move, class_="marker")

    def _bar(self, into: ET.Element, x: float, length: float, span: Span) -> None:
        """Draw a bar, and the track that it is a part of."""
        y = self.y - 9.5
        if span.style == "bar":
            track = {"width": length, "height": 11, "rx": 2}
            element(into, "rect", "", x=x, y=y, class_="track", **track)
        if span.share:
            length = max(length * span.share, 2.0)
            widths = _widths([share for _, share in span.parts], length)
            for (paint, _), width in zip(span.parts, widths, strict=True):
                gap = 1.0 if width >= 4 and len(widths) > 1 else 0.0
                part = {"width": width - gap, "height": 11}
                fill = paint.color
                if paint.texture != "plain":
                    fill = f"url(#{_name(paint)})"
                element(into, "rect", "", x=x, y=y, fill=fill, **part)
                x += width


def _name(paint: Paint) -> str:
    return f"{paint.texture}-{paint.color[1:]}"


def _pattern(into: ET.Element, paint: Paint) -> None:
    """Define stripes; those of a gap are thin."""
    turn = {"patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"}
    pattern = element(into, "pattern", "", id=_name(paint), width=6, height=6, **turn)
    is_gap = paint.texture == "gap"
    ground, stripe = (0.25, paint.color) if is_gap else (1, "#ffffff")
    element(pattern, "rect", width=6, height=6, fill=paint.color, fill_opacity=ground)
    opacity = 1 if is_gap else 0.65
    element(pattern, "rect", width=2, height=6, fill=stripe, fill_opacity=opacity)


def _widths(shares: Sequence[float], length: float) -> list[float]:
    """Divide a length by shares, so that what is there is seen: at least a pixel."""
    least = min(1.0, length / len(shares))
    widths = [max(least, share * length) for share in shares]
    whole = math.fsum(widths)  # the same in every version of Python, unlike ``sum``
    return [width * length / whole for width in widths]
