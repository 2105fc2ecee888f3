"""Tables of texts as HTML, for notebooks.

Cells are cells, so that columns stay where a notebook is written as a page, which may
join spaces. Takes its colours from the page, and needs no script.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_CELL = "text-align: left; vertical-align: top; white-space: pre-wrap"
_MOST_LINES = 40
_FEWEST_ROWS = 10
_FONT = "font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px"


def html_table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    notes: Iterable[str] = (),
) -> str:
    """Return a table as an element of a page.

    Args:
        title: a line above the table.
        head: the names of the columns.
        rows: the cells of each row, as many as there are columns; written by ``str``.
        notes: lines below the table. With them it has at most 40 lines, unless there
            are more than 26 notes; how many rows are left out is said.

    Example:
        >>> text = html_table("1 rule", ("where", "label"), [("a < b", "train")])
        >>> "1 rule" in text, "a &lt; b" in text
        (True, True)
    """

    def line(tag: str, cells: Iterable[object]) -> str:
        texts = (html.escape(str(cell)) for cell in cells)
        return "".join(f'<{tag} style="{_CELL}">{text}</{tag}>' for text in texts)

    cells, below_it = [*rows], [*notes]
    room = max(_MOST_LINES - 2 - len(below_it), _FEWEST_ROWS)
    if len(cells) > room:
        below_it.insert(0, f"and {len(cells) - room + 1:,} more rows")
        cells = cells[: room - 1]
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in cells)
    below = "".join(f"<div>{html.escape(note)}</div>" for note in below_it)
    return (
        f'<div style="{_FONT}"><b>{html.escape(title)}</b>'
        f"<table><thead><tr>{line('th', head)}</tr></thead>"
        f"<tbody>{body}</tbody></table>{below}</div>"
    )
