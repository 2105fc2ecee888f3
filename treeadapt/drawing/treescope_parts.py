"""An outline as parts that Treescope renders: a tree that folds, in a notebook.

Loaded by Treescope's own call alone, so Treescope is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from treeadapt.drawing.palette import Paint
from treeadapt.drawing.words import fitted, size_text
from treeadapt.errors import plural

_ROWS, _WIDTH = 400, 100
_MAX_TEXT = 100


def treescope_part(outline: Outline, name: str) -> Any:
    """Return an outline as a foldable part.

    Args:
        outline: what to render.
        name: what it is called, such as its class.
    """
    from treescope import rendering_parts as parts

    first = unfolded(outline.root, width=_WIDTH)
    is_open = {id(row.node) for row in every(first) if row.children}
    rows = unfolded(outline.root, rows=_ROWS, width=_WIDTH)
    lines = [
        _legend_line(one, outline)
        if isinstance(one, Label)
        else parts.comment_color(parts.text(one))
        for one in (legend(outline) if outline.has_labels else ())
    ]
    lines += [
        parts.custom_style(parts.text(f"! {fitted(note, 2 * _MAX_TEXT)}"), _WARNING)
        for note in outline.notes
    ]
    lines += [_row(row, outline, is_open) for row in rows]
    head = parts.comment_color(parts.text(f"  # {headline(outline)}"))
    return _fold(parts.siblings(parts.text(name), head), lines, is_open=True)


_WARNING = "color: #d1242f"


def _legend_line(one: Label, outline: Outline) -> Any:
    from treescope import rendering_parts as parts

    _, params, size, share = one.numbers(outline)
    told = f": {plural(one.num_leaves, 'leaf')}, {params} params, {size}, {share}"
    rules = fitted(", ".join(one.rules), _MAX_TEXT)
    return parts.siblings(
        _painted(fitted(one.text, _MAX_TEXT), one.paint),
        parts.text(told),
        parts.comment_color(parts.text(f"  # {rules}" if rules else "")),
    )


def _row(row: Row, outline: Outline, is_open: set[int]) -> Any:
    from treescope import rendering_parts as parts

    node = row.node
    name = fitted(node.name_text, _MAX_TEXT, middle=True)
    told = f"{name}: {node.kind_text}, {size_text(node.size_bytes)}  "
    line = parts.siblings(parts.text(told), _label(node, outline))
    if not row.children:
        return parts.build_one_line_tree_node(line)
    return _fold(
        line,
        [_row(child, outline, is_open) for child in row.children],
        is_open=id(node) in is_open,
    )


def _fold(line: Any, children: Sequence[Any], *, is_open: bool) -> Any:
    from treescope import rendering_parts as parts

    state = parts.ExpandState
    return parts.build_custom_foldable_tree_node(
        label=line,
        contents=parts.fold_condition(expanded=parts.indented_children(children)),
        expand_state=state.EXPANDED if is_open else state.COLLAPSED,
    )


def _label(node: Node, outline: Outline) -> Any:
    from treescope import rendering_parts as parts

    if not outline.has_labels:
        return parts.empty_part()
    labels: Sequence[Label] = outline.labels
    first = max(node.shares, key=lambda pair: pair[1])[0]
    return _painted(fitted(labels_text(node, labels), _MAX_TEXT), labels[first].paint)


def _painted(text: str, paint: Paint) -> Any:
    """Return a text with a stripe of its colour before it."""
    from treescope import rendering_parts as parts

    line = "dashed" if paint.texture != "plain" else "solid"
    style = f"border-left: 0.8em {line} {paint.color}; padding-left: 0.4em"
    return parts.custom_style(parts.text(text), style)
