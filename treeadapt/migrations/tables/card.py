"""The card of a published table: what it was compared with, and which files it opens.

Takes a table and says what its own file states: nothing is written by hand, so a card
cannot say what the table does not do. What a row means is up to ``migrations``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from treeadapt.migrations.tables.published import PublishedTable

#: A list of spellings of which one is no text at all.
_MAY_LACK = re.compile(r"\{at=((?=[^{}]*,\}|,)[^{}]*)\}")
_LIST = re.compile(r"\{(\w+)=([^{}]*)\}")


def card(table: PublishedTable) -> dict[str, list[str]]:
    """Return what is known of a table, by heading; a heading has one line or more."""
    document = table.fields
    fields = document.get("tables", [document])[
        0
    ]  # of a chain, that of the hub's names
    rows = fields["rows"]
    made = {
        "about": [" ".join(_comment(table.file.read_text("utf-8")))],
        "compared with": [_compared(table, document.get("digests", {}))],
        "answers": [_answers(table)],
        "model types": [", ".join(table.model_types)],
        "sizes, by config.json": [
            f"{name} = {' or '.join(_texts(keys))}"
            for name, keys in fields.get("config", {}).items()
        ],
        "counted, by config.json": [
            f"{_plain(path)} = {' or '.join(_texts(keys))}"
            for path, keys in fields.get("counts", {}).items()
        ],
        "spellings of names": [*dict.fromkeys(_spellings(rows))],
        "compared, or copied": [
            f"{_plain(name)} with {_plain(row['to'])}{_condition(row['copy'])}"
            for row in rows
            if row.get("copy")
            for name in _texts(row["from"])
        ],
        "files may lack": [
            _plain(name)
            for row in rows
            if row.get("optional")
            for name in _texts(row["from"])
        ],
        "left out": [
            _plain(name) for row in rows for name in _texts(row.get("drop", []))
        ],
    }
    return {heading: [*dict.fromkeys(it)] for heading, it in made.items() if it}


def _comment(text: str) -> Iterator[str]:
    """Yield the lines of the comment that a file begins with."""
    for line in itertools.takewhile(
        lambda each: each.startswith("#"), text.splitlines()
    ):
        yield line.removeprefix("#").strip()


def _compared(table: PublishedTable, digests: Mapping[str, str]) -> str:
    """Return with what a table was compared, on how many models, and when."""
    ways = sum(not name.endswith("-back") for name in digests)
    writer = ", and what it writes back" if len(digests) > ways else ""
    day = f" ({table.compared_on})" if table.compared_on else ""
    return f"{table.oracle}{day}: what it makes of {ways} tiny models{writer}"


def _answers(table: PublishedTable) -> str:
    """Return how far answers were apart, or why nobody knows."""
    if not table.answers_apart:
        return f"not compared: {table.not_called}"
    return (
        "of the library's model, with random weights, and those of PyTorch differ, "
        f"relative to the largest, by at most {table.answers_apart}"
    )


def _condition(copy: Any) -> str:
    return f", as {copy} says" if isinstance(copy, str) else ""


def _spellings(rows: Any) -> Iterator[str]:
    """Yield the texts that are one name: lists of which the other side has nothing."""
    for row in rows:
        targets = _texts(row.get("to", []))
        axes = {axis for each in targets for axis in each.partition(" : ")[2].split()}
        for name in _texts(row.get("from", [])):
            for key, entries in _LIST.findall(name):
                if key not in axes and not any(f"{{{key}" in each for each in targets):
                    texts = entries.split(",")
                    yield " or ".join(
                        f"'{text}'" if text else "no text" for text in texts
                    )


def _plain(path: str) -> str:
    """Return a path without its axes, and without a start that it may lack."""
    return _MAY_LACK.sub(_first, path.partition(" : ")[0])


def _first(match: re.Match[str]) -> str:
    return match[1].partition(",")[0]


def _texts(texts: Any) -> list[str]:
    return [texts] if isinstance(texts, str) else [*texts]
