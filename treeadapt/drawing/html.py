"""An outline as HTML: a tree that folds, without a script, nothing fetched.

``html_part`` is an element of somebody else's page, such as a notebook, and takes its
colours of text and ground; ``html_page`` is a page that holds just that, light or dark
as the reader's system is. Equal outlines give equal text.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from treeadapt.drawing.markup import element
from treeadapt.drawing.outline import LEGEND, Node, Outline, Row, every
from treeadapt.drawing.palette import Paint
from treeadapt.drawing.words import fitted, size_text

_ROWS, _WIDTH, _LABELS = 400, 200, 100
_MAX_TEXT = 160

_STYLE = """
.treeadapt { font: 12px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; max-width: 92em; text-align: left }
.treeadapt .head { font-weight: 600; font-size: 14px }
.treeadapt .bar, .treeadapt .mix { display: flex; height: 11px; border-radius: 2px;
  overflow: hidden; background: rgba(128, 136, 148, .2) }
.treeadapt .own { display: flex; min-width: 2px }
.treeadapt .own > i, .treeadapt .mix > i { min-width: 1px }
.treeadapt .all { margin: .3em 0 .9em }
.treeadapt table { border-collapse: collapse; font: inherit; color: inherit }
.treeadapt th, .treeadapt td { padding: 0 1.4em 0 0; text-align: right; border: 0;
  font: inherit; background: none; vertical-align: top; white-space: nowrap }
.treeadapt td.rules { white-space: normal; overflow-wrap: anywhere }
.treeadapt .left { text-align: left }
.treeadapt td:first-child { font-weight: 600 }
.treeadapt .swatch { display: inline-block; width: 11px; height: 11px;
  border-radius: 2px; margin-right: .6em; vertical-align: -1px }
.treeadapt .note { overflow-wrap: anywhere; border-left: 3px solid #d1242f;
  padding-left: .7em; margin: .5em 0 }
.treeadapt .tree { overflow-x: auto; margin-top: .8em }
.treeadapt .row { display: grid; align-items: center; column-gap: 1.2em;
  grid-template-columns: minmax(15em, 1.3fr) minmax(9em, 1fr) 5em 11em 34px
    minmax(13em, 1.2fr);
  padding: 1px 6px; border-radius: 4px; min-width: 70em }
.treeadapt summary.row { cursor: pointer; list-style: none }
.treeadapt summary.row::-webkit-details-marker { display: none }
.treeadapt .row:hover { background: rgba(128, 136, 148, .14) }
.treeadapt .row > * { overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
.treeadapt .name { padding-left: 1.3em }
.treeadapt summary > .name { font-weight: 600; padding-left: 0 }
.treeadapt summary > .name::before { content: "\\25B8"; display: inline-block;
  width: 1.3em; opacity: .65 }
.treeadapt details[open] > summary > .name::before { content: "\\25BE" }
.treeadapt .size { text-align: right }
.treeadapt .quiet { opacity: .65 }
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
    made = ET.Element("div", {"class": "treeadapt"})
    element(made, "style", _STYLE)
    if outline.title:
        element(made, "div", outline.title, class_="head")
    element(made, "div", outline.headline, class_="" if outline.title else "head")
    _own(element(made, "div", class_="bar all"), outline.root, outline)
    if outline.legend():
        _legend(element(made, "table"), outline)
    for note in outline.notes:
        element(made, "div", note, class_="note")
    tree = element(made, "div", class_="tree")
    head = element(tree, "div", class_="row quiet")
    share = f"share of {size_text(outline.root.size_bytes)}"
    for text in ("path", "contents", "size", share):
        classes = {"path": "name", "size": "size"}
        element(head, "span", text, class_=classes.get(text, ""))
    for text in ("", "label") if outline.has_labels else ():
        element(head, "span", text)
    first = every(outline.rows())  # as the picture
    is_open = {id(row.node) for row in first if row.children}
    for row in outline.rows(_ROWS, _WIDTH):
        tree.append(_row(row, outline, is_open))
    return _text(made)


def _legend(table: ET.Element, outline: Outline) -> None:
    shown = outline.legend(_LABELS)
    head = element(table, "tr", class_="quiet")
    for name in LEGEND if any(one.rules for one in shown) else LEGEND[:-1]:
        element(head, "th", name, class_="left" if name in ("label", "rules") else "")
    for one in shown:
        line = element(table, "tr")
        name_cell = element(line, "td", class_="left", title=one.tip)
        swatch = element(name_cell, "span", class_="swatch", style=_fill(one.paint))
        swatch.tail = fitted(one.text, 60)
        for text in outline.numbers(one):
            element(line, "td", text)
        rules = fitted(", ".join(one.rules), 4 * _MAX_TEXT)
        element(line, "td", rules, class_="left rules quiet")


def _row(row: Row, outline: Outline, is_open: set[int]) -> ET.Element:
    """Return a line with all that is below it; as deep as outlines are."""
    node = row.node
    made = line = ET.Element("div")
    if row.children:
        made = ET.Element("details", {"open": ""} if id(node) in is_open else {})
        line = element(made, "summary")
    line.attrib.update({"class": "row", "title": outline.tooltip(row)})
    indent = f"margin-left:{1.2 * min(row.level, 16):.3g}em"
    name, kind, size, label = outline.cells(node)
    name = fitted(name, _MAX_TEXT, middle=True)
    element(line, "span", name, class_="name", style=indent)
    element(line, "span", kind, class_="quiet")
    element(line, "span", size, class_="size")
    _own(element(line, "span", class_="bar"), node, outline)
    if outline.has_labels:
        _parts(element(line, "span", class_="mix"), node, outline)
        element(line, "span", fitted(label, _MAX_TEXT))
    for part in line:
        part.tail = " "  # where styles are taken away, words stay apart
    made.extend(_row(child, outline, is_open) for child in row.children)
    return made


def _own(track: ET.Element, node: Node, outline: Outline) -> None:
    """Fill a track as far as a node is of the whole."""
    if node.size_bytes:
        width = f"width:{100 * node.size_bytes / outline.root.size_bytes:.4g}%"
        _parts(element(track, "span", class_="own", style=width), node, outline)


def _parts(bar: ET.Element, node: Node, outline: Outline) -> None:
    for label, share in node.cells:
        fill = _fill(outline.labels[label].paint)
        element(bar, "i", style=f"flex:{share:.4g};{fill}")


def _fill(paint: Paint) -> str:
    if paint.texture == "plain":
        return f"background:{paint.color}"
    is_gap = paint.texture == "gap"
    above, below = paint.color if is_gap else "#ffffffa6", paint.color + "40" * is_gap
    stripes = f"{above} 0 2px,#0000 2px 6px"
    return f"background:repeating-linear-gradient(135deg,{stripes}),{below}"


def _text(made: ET.Element) -> str:
    return ET.tostring(made, encoding="unicode", method="html")
