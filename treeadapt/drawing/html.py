"""An outline as HTML: a tree that folds, without a script, nothing fetched.

``html_part`` stands in somebody else's page, such as a notebook, and takes its colours
of text and ground; ``html_page`` is a page of its own, light or dark as the reader's
system is. Equal outlines give equal text.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from treeadapt.drawing.outline import (
    Label,
    Node,
    Outline,
    Row,
    every,
    headline,
    labels_text,
    legend,
    tooltip,
    unfolded,
)
from treeadapt.drawing.palette import Paint
from treeadapt.drawing.words import fitted, size_text

_PAGE_ROWS, _PART_ROWS = 2_000, 400
_WIDTH = 200
_LABELS_OF_PAGE, _LABELS_OF_PART = 300, 16
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
.treeadapt table { border-collapse: collapse; margin: 0 0 .8em; font: inherit;
  color: inherit }
.treeadapt th, .treeadapt td { padding: 0 1.4em 0 0; text-align: right; border: 0;
  font: inherit; background: none; vertical-align: top; white-space: nowrap }
.treeadapt th { opacity: .65 }
.treeadapt td.rules { opacity: .65; white-space: normal; overflow-wrap: anywhere }
.treeadapt .left { text-align: left }
.treeadapt td:first-child:not(.rules) { font-weight: 600 }
.treeadapt .swatch { display: inline-block; width: 11px; height: 11px;
  border-radius: 2px; margin-right: .6em; vertical-align: -1px }
.treeadapt ul { margin: 0 0 .8em; padding: 0; list-style: none }
.treeadapt li { overflow-wrap: anywhere; border-left: 3px solid #d1242f;
  padding-left: .7em; margin: .2em 0 }
.treeadapt .tree { overflow-x: auto }
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
_PAGE_STYLE = """
:root { color-scheme: light dark }
body { margin: 24px }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_part(outline: Outline) -> str:
    """Return an outline as an element for a notebook or another page."""
    return _text(_report(outline, _PART_ROWS, _LABELS_OF_PART, None))


def html_page(outline: Outline, *, depth: int | None = None) -> str:
    """Return an outline as an HTML document.

    Args:
        outline: what to draw.
        depth: how many segments of a path; None for any number.
    """
    page = ET.Element("html", {"lang": "en"})
    head = ET.SubElement(page, "head")
    ET.SubElement(head, "meta", {"charset": "utf-8"})
    told = {"http-equiv": "Content-Security-Policy", "content": _POLICY}
    ET.SubElement(head, "meta", told)
    told = {"name": "viewport", "content": "width=device-width"}
    ET.SubElement(head, "meta", told)
    ET.SubElement(head, "title").text = outline.title or headline(outline)
    ET.SubElement(head, "style").text = _PAGE_STYLE
    body = ET.SubElement(page, "body")
    body.append(_report(outline, _PAGE_ROWS, _LABELS_OF_PAGE, depth))
    return f"<!doctype html>\n{_text(page)}\n"


def _text(element: ET.Element) -> str:
    return ET.tostring(element, encoding="unicode", method="html")


def _report(
    outline: Outline, num_rows: int, num_labels: int, depth: int | None
) -> ET.Element:
    made = ET.Element("div", {"class": "treeadapt"})
    ET.SubElement(made, "style").text = _STYLE
    if outline.title:
        _words(made, "div", "head", outline.title)
    _words(made, "div", "" if outline.title else "head", headline(outline))
    whole = ET.SubElement(made, "div", {"class": "bar all"})
    _own(whole, outline.root, outline)
    if outline.has_labels and outline.labels:
        made.append(_legend(outline, num_labels))
    if outline.notes:
        notes = ET.SubElement(made, "ul")
        for note in outline.notes:
            _words(notes, "li", "", note)
    tree = ET.SubElement(made, "div", {"class": "tree"})
    _heads(tree, outline)
    root = outline.root
    first = unfolded(root, depth=depth)  # as the picture
    is_open = {id(row.node) for row in every(first) if row.children}
    rows = unfolded(root, rows=num_rows, width=_WIDTH, depth=depth)
    for row in rows:
        tree.append(_row(row, outline, is_open))
    return made


def _legend(outline: Outline, limit: int) -> ET.Element:
    table = ET.Element("table")
    head = ET.SubElement(table, "tr")
    _words(head, "th", "left", "label")
    for name in ("leaves", "params", "size", "share"):
        _words(head, "th", "", name)
    if any(one.rules for one in outline.labels):
        _words(head, "th", "left", "rules")
    for one in legend(outline, limit=limit):
        if isinstance(one, Label):
            _entry(table, one, outline)
        else:
            line = ET.SubElement(table, "tr")
            cell = _words(line, "td", "left rules", one)
            cell.set("colspan", "6")
    return table


def _entry(table: ET.Element, one: Label, outline: Outline) -> None:
    line = ET.SubElement(table, "tr")
    name = ET.SubElement(line, "td", {"class": "left", "title": one.tip})
    swatch = {"class": "swatch", "style": _fill(one.paint)}
    ET.SubElement(name, "span", swatch).tail = fitted(one.text, 60)
    for text in one.numbers(outline):
        _words(line, "td", "", text)
    _words(line, "td", "left rules", fitted(", ".join(one.rules), 4 * _MAX_TEXT))


def _heads(tree: ET.Element, outline: Outline) -> None:
    line = ET.SubElement(tree, "div", {"class": "row quiet"})
    _words(line, "span", "name", "path")
    _words(line, "span", "", "contents")
    _words(line, "span", "size", "size")
    _words(line, "span", "", f"share of {size_text(outline.root.size_bytes)}")
    if outline.has_labels:
        _words(line, "span", "", "")
        _words(line, "span", "", "label")


def _row(row: Row, outline: Outline, is_open: set[int]) -> ET.Element:
    """Return a line with all that is below it; as deep as outlines are."""
    node = row.node
    if row.children:
        made = ET.Element("details", {"open": ""} if id(node) in is_open else {})
        line = ET.SubElement(made, "summary")
    else:
        made = line = ET.Element("div")
    line.attrib.update({"class": "row", "title": tooltip(row, outline)})
    name = _words(line, "span", "name", "")
    name.set("style", f"margin-left:{1.2 * min(row.level, 16):.3g}em")
    name.text = fitted(node.name_text, _MAX_TEXT, middle=True)
    _words(line, "span", "quiet", node.kind_text)
    _words(line, "span", "size", size_text(node.size_bytes))
    _own(ET.SubElement(line, "span", {"class": "bar"}), node, outline)
    if outline.has_labels:
        mix = ET.SubElement(line, "span", {"class": "mix"})
        _parts(mix, node, outline.labels)
        told = labels_text(node, outline.labels)
        _words(line, "span", "", fitted(told, _MAX_TEXT))
    for part in line:
        part.tail = " "  # where styles are taken away, words stay apart
    for child in row.children:
        made.append(_row(child, outline, is_open))
    return made


def _own(track: ET.Element, node: Node, outline: Outline) -> None:
    """Fill a track as far as a node is of the whole."""
    if node.size_bytes:
        part = 100 * node.size_bytes / outline.root.size_bytes
        told = {"class": "own", "style": f"width:{part:.4g}%"}
        _parts(ET.SubElement(track, "span", told), node, outline.labels)


def _parts(bar: ET.Element, node: Node, labels: Sequence[Label]) -> None:
    for label, share in node.cells:
        style = f"flex:{share:.4g};{_fill(labels[label].paint)}"
        ET.SubElement(bar, "i", {"style": style})


def _fill(paint: Paint) -> str:
    if paint.texture == "plain":
        return f"background:{paint.color}"
    above, below = (
        (paint.color, f"{paint.color}40")
        if paint.texture == "gap"
        else ("#ffffffa6", paint.color)
    )
    stripes = f"{above} 0 2px,#0000 2px 6px"
    return f"background:repeating-linear-gradient(135deg,{stripes}),{below}"


def _words(into: ET.Element, tag: str, classes: str, text: str) -> ET.Element:
    made = ET.SubElement(into, tag, {"class": classes} if classes else {})
    made.text = text
    return made
