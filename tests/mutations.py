"""Wrong tables made of a right one, each by one small mistake."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import treeadapt as ta

# The names of a list, ``{p=query,key}``, and what one bracket of axes holds.
_LIST = re.compile(r"\{(\w+)=([^{}]*,[^{}]*)\}")
_BRACKET = re.compile(r"(?<=\()[^()]+(?=\))|(?<=\[)[^\[\]()]+(?=\])")
_OPERATIONS = ("scale", "offset", "pad")


def wrong_tables(
    path: Path, folder: Path, source: Any = None
) -> Iterator[tuple[str, ta.Migration]]:
    """Yield each table that one mistake makes of a file, and the mistake in words.

    A mistake is made in one address: two axes or two names of a list change places. Or
    in one row: two targets change places, an operation is forgotten, or the row is.
    Tables that are refused as they are read are left out, and so are optional rows, and
    drops from a given source, that take no leaf, and rows about copies, of which a
    source that is as it should be has none. Spellings may have any order.
    """
    rows = tomllib.loads(path.read_text())["rows"]
    for row, parsed in zip([*rows], ta.load_migration(path).rows, strict=True):
        # A drop need not take a leaf either: older files have masks, newer ones none.
        may_be_idle = row.pop("optional", False) or (
            "drop" in row and source is not None
        )
        if "copy" in row or (may_be_idle and not any(map(parsed.takes, source or ()))):
            rows.remove(row)
    for number, row in enumerate(rows):
        for mistake, wrong in _wrong_rows(row):
            changed = [*rows[:number], *wrong, *rows[number + 1 :]]
            try:
                table = with_rows(path, changed, folder)
            except ta.MigrationError:
                continue
            yield f"row {number}: {mistake}", table


def with_rows(path: Path, rows: list[dict[str, Any]], folder: Path) -> ta.Migration:
    """Return the migration of a file with other rows."""
    table = tomllib.loads(path.read_text()) | {"rows": rows}
    file = folder / "changed.json"
    file.write_text(json.dumps(table))
    return ta.load_migration(file)


def without(path: Path, name: str, folder: Path) -> ta.Migration:
    """Return the migration of a file without the row that reads a name."""
    rows = tomllib.loads(path.read_text())["rows"]
    kept = [row for row in rows if name not in str(row.get("from"))]
    assert len(kept) == len(rows) - 1
    return with_rows(path, kept, folder)


def _wrong_rows(row: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    yield "forgotten", []
    if "drop" in row:
        return
    for name in _OPERATIONS:
        if name in row:
            yield f"without {name}", [{k: v for k, v in row.items() if k != name}]
    for side in ("from", "to"):
        addresses = row[side] if isinstance(row[side], list) else [row[side]]
        for first, second in itertools.combinations(range(len(addresses)), 2):
            parts = [address.partition(" : ") for address in addresses]
            paths = [part[0] for part in parts]
            paths[first], paths[second] = paths[second], paths[first]
            swapped = [
                "".join((path, *part[1:]))
                for path, part in zip(paths, parts, strict=True)
            ]
            yield f"{side}: paths {first} and {second}", [row | {side: swapped}]
        for at, address in enumerate(addresses):
            other = str(row["to" if side == "from" else "from"])
            for mistake, wrong in _wrong_addresses(address, other):
                changed = [*addresses]
                changed[at] = wrong
                one = changed if isinstance(row[side], list) else wrong
                yield f"{side}: {mistake}", [row | {side: one}]


def _wrong_addresses(address: str, other: str) -> Iterator[tuple[str, str]]:
    path, colon, axes = address.partition(" : ")
    for found in _LIST.finditer(path):
        if f"{{{found[1]}}}" in other or not re.search(rf"\b{found[1]}\b", other):
            continue  # the text stays, or goes, so the order of the list means nothing
        for names in _swapped(found[2].split(",")):
            text = ",".join(names)
            wrong = path[: found.start(2)] + text + path[found.end(2) :]
            yield f"names {text}", wrong + colon + axes
    # Axes of the array: what is in a bracket is one of them.
    parts = re.findall(r"\([^()]*\)|\[(?:[^\[\]()]|\([^()]*\))*\]|\S+", axes)
    for wrong in _swapped(parts):
        yield f"axes {' '.join(wrong)}", path + colon + " ".join(wrong)
    for found in _BRACKET.finditer(axes):
        for names in _swapped(found[0].split()):
            wrong = axes[: found.start()] + " ".join(names) + axes[found.end() :]
            yield f"axes {wrong}", path + colon + wrong


def _swapped(parts: list[str]) -> Iterator[list[str]]:
    """Every list with two parts in each other's place that reads otherwise."""
    for first, second in itertools.combinations(range(len(parts)), 2):
        if parts[first] != parts[second]:
            changed = [*parts]
            changed[first], changed[second] = changed[second], changed[first]
            yield changed
