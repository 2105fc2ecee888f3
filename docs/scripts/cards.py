"""Write ``docs/recipes/published-tables.md``: the card of each published table.

Run ``python docs/scripts/cards.py``; a test says where the page is not up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from treeadapt.migrations.tables.card import card
from treeadapt.migrations.tables.published import published

PAGE = Path(__file__).parent.parent / "recipes" / "published-tables.md"
_HEAD = """# Cards of the published tables

What each [table](published.md) was compared with, and which files it opens, written
from the tables themselves by `python docs/scripts/cards.py`. `treeadapt tables
tunix/qwen3` prints one card.

Sizes that `config.json` states, and how many layers and experts it says that there are,
are compared with the arrays. Names are in their first spelling. A leaf that no row of a
table takes is an error, never left out.
"""
#: Headings whose lines are not names of a file.
_SENTENCES = ("compared with", "answers")


def page() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *_lines()])


def _lines() -> Iterator[str]:
    for layout, types in published().items():
        yield f"## {layout}\n"
        for table in dict.fromkeys(types.values()):
            about, *others = card(table).items()
            yield f"### {table.name}\n\n{' '.join(about[1])}\n"
            for heading, lines in others:
                texts = lines if heading in _SENTENCES else map(_code, lines)
                yield f"- {heading}: {'; '.join(texts)}"
            yield ""


def _code(line: str) -> str:
    return f"`{line}`"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
