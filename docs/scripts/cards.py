"""Write ``docs/recipes/published-tables.md``: what is known of each published table.

Run ``python docs/scripts/cards.py``; a test says where the page is not up to date.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from treeadapt.migrations.tables.card import card
from treeadapt.migrations.tables.published import PublishedTable, published

PAGE = Path(__file__).parent.parent / "recipes" / "published-tables.md"
_HEAD = """# Cards of the published tables

What each [table](published.md) was compared with, and which files it opens, written
from the tables themselves by `python docs/scripts/cards.py`. What several tables of a
layout have in common is said once; `treeadapt tables tunix/qwen3` prints all that is
known of one, its card.

Sizes that `config.json` states, and how many layers and experts it says that there are,
are compared with the arrays. Names are in their first spelling. A leaf that no row of a
table takes is an error, never left out. Where it is said how far answers are apart, the
library's model was called next to that of PyTorch, with random weights: the largest
difference, relative to the largest number in the answers.
"""
_OF_ONE = ("about", "answers", "model types")  # said with each table


def page() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *_lines()])


def _lines() -> Iterator[str]:
    for layout, types in published().items():
        tables = [*dict.fromkeys(types.values())]
        cards = {_type(table): card(table) for table in tables}
        yield f"## {layout}\n"
        for table in tables:
            yield f"- **{table.name}**: {_about(table, cards[_type(table)])}"
        yield ""
        headings = dict.fromkeys(heading for one in cards.values() for heading in one)
        for heading in headings:
            if heading not in _OF_ONE:
                texts = "; ".join(_facts(heading, cards))
                yield f"*{heading.capitalize()}*: {texts}.\n"


def _type(table: PublishedTable) -> str:
    return table.name.partition("/")[2]


def _about(table: PublishedTable, facts: Mapping[str, Sequence[str]]) -> str:
    """Return what only one table has: what it leads to, and how near answers are."""
    texts = [" ".join(facts["about"])]
    if table.model_types != (_type(table),):
        texts.append(f"Model types: {', '.join(map(_code, table.model_types))}.")
    if table.answers_apart:
        texts.append(f"Answers are within {table.answers_apart}.")
    else:
        texts.append(f"Answers are not compared: {table.not_called}.")
    return " ".join(texts)


def _facts(
    heading: str, cards: Mapping[str, Mapping[str, Sequence[str]]]
) -> Iterator[str]:
    """Yield what cards have under a heading, once for the tables that have it."""
    types_of: dict[str, list[str]] = {}
    for model_type, facts in cards.items():
        for line in facts.get(heading, []):
            text = line if heading == "compared with" else _code(line)
            types_of.setdefault(text, []).append(model_type)
    texts_of: dict[tuple[str, ...], list[str]] = {}
    for text, types in types_of.items():
        texts_of.setdefault(tuple(types), []).append(text)
    for which, texts in texts_of.items():
        others = [each for each in cards if each not in which]
        is_most = len(others) < len(which)
        names = f"all but {', '.join(others)}" if is_most else ", ".join(which)
        yield f"{f'{names}: ' * bool(others)}{', '.join(texts)}"


def _code(line: str) -> str:
    return f"`{line}`"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
