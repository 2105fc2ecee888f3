"""An outline as HTML: a tree that folds, without a script, nothing fetched.

``html_part`` is an element of somebody else's page, such as a notebook, and takes its
colours of text and ground; ``html_page`` is a page that holds just that, light or dark
as the reader's system is. Equal outlines give equal text.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from treeadapt.reports.layout import Line, picture
from treeadapt.reports.markup import element
from treeadapt.reports.outline import Outline, every
from treeadapt.reports.palette import Paint
from treeadapt.reports.words import columns

_ROWS, _WIDTH, _LABELS = 400, 200, 100

_STYLE = """
.treeadapt { font: 12px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; white-space: pre; text-align: left; overflow-x: auto }
.treeadapt div { box-sizing: border-box; min-width: 100%; width: max-content }
.treeadapt .title { font-size: 14px }
.treeadapt .title, .treeadapt .strong, .treeadapt .bold { font-weight: 600 }
.treeadapt .dim, .treeadapt .muted, .treeadapt .marker { opacity: .65 }
.treeadapt .red { border-left: 3px solid #d1242f; padding-left: .7em; margin: .5em 0 }
.treeadapt span { display: inline-block; white-space: pre }
.treeadapt .number { text-align: right }
.treeadapt .bar, .treeadapt .mix, .treeadapt .swatch { display: inline-flex;
  height: 11px; border-radius: 2px; overflow: hidden; vertical-align: -1px }
.treeadapt .bar { background: rgba(128, 136, 148, .2) }
.treeadapt i { min-width: 1px }
.treeadapt .bar > i { min-width: 2px }
.treeadapt .tree { margin-top: .8em }
.treeadapt .line:hover { background: rgba(128, 136, 148, .14) }
.treeadapt summary { cursor: pointer; list-style: none }
.treeadapt summary::-webkit-details-marker { display: none }
.treeadapt .marker { display: inline-block; width: 2ch }
.treeadapt summary > .marker::before { content: "\\25B8" }
.treeadapt details[open] > summary > .marker::before { content: "\\25BE" }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
{title}<style>:root {{ color-scheme: light dark }} body {{ margin: 24px }}</style>
</head><body>{part}</body></html>
"""


def html_page(outline: Outline) -> str:
    """Return an outline as an HTML document."""
    title = ET.Element("title")
    title.text = outline.title or outline.headline
    return _PAGE.format(title=_text(title), part=html_part(outline))


def html_part(outline: Outline) -> str:
    """Return an outline as an element for a notebook or another page."""
    root = ET.Element("div", {"class": "treeadapt"})
    element(root, "style", _STYLE)
    if outline.title:
        element(root, "div", outline.title, class_="title")
    element(root, "div", outline.headline, class_="" if outline.title else "title")
    whole, legend, tree = picture(outline, labels=_LABELS, limit=_ROWS, width=_WIDTH)
    for line in (whole, *legend):
        _line(element(root, "div"), line)
    for note in outline.notes:
        element(root, "div", note, class_="red")
    above = [element(root, "div", class_="tree")]
    first = every(outline.rows())  # as the picture
    is_open = {id(row.node) for row in first if row.children}
    for line in tree:
        if line.row:
            del above[line.row.level + 1 :]
        into, tag = above[-1], "div"
        if line.row and line.row.children:
            into, tag = element(into, "details"), "summary"
            if id(line.row.node) in is_open:
                into.set("open", "")
            above.append(into)
        _line(element(into, tag, class_="line"), line)
    return _text(root)


def _line(into: ET.Element, line: Line) -> None:
    if line.tip:
        into.set("title", line.tip)
    for span in line.spans:
        # A notebook that is written as a page may join spaces.
        width = f"width:{columns(span.text)}ch"
        if span.is_bar:
            bar = element(into, "span", span.text, class_=span.style, style=width)
            for paint, share in span.parts:
                part = f"width:{100 * span.share * share:.4g}%;{_fill(paint)}"
                element(bar, "i", style=part)
        else:
            classes = "" if span.style.startswith("#") else span.style
            element(into, "span", span.text, class_=classes, style=width)


def _fill(paint: Paint) -> str:
    if paint.texture == "plain":
        return f"background:{paint.color}"
    is_gap = paint.texture == "gap"
    above, below = paint.color if is_gap else "#ffffffa6", paint.color + "40" * is_gap
    stripes = f"{above} 0 2px,#0000 2px 6px"
    return f"background:repeating-linear-gradient(135deg,{stripes}),{below}"


def _text(root: ET.Element) -> str:
    return ET.tostring(root, encoding="unicode", method="html")
