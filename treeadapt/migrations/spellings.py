"""Spellings: of several names that files have for one leaf, those of a target.

Takes rows and the leaves that each takes; gives the leaves to the rows, and to the
texts of a list, that spell their names as a target does. Reads no array.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from treeadapt.migrations.group import Taken
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Address, Row
from treeadapt.migrations.templates import Index
from treeadapt.text.names import listing

#: Whether the result may have something at an address, with what it captured.
HasPlace: TypeAlias = Callable[[Address, Mapping[str, Any]], bool]


def spell(
    rows: Sequence[Row],
    by_row: list[list[Taken]],
    has_place: HasPlace | None,
    problems: Problems,
) -> list[list[Taken]]:
    """Return what each row takes, with the names that a target has.

    Optional rows may give one leaf several names, and so may lists of one side alone.

    Args:
        rows: the table.
        by_row: what each row takes.
        has_place: of the target; None without one, for the first names.
        problems: gets rows of which leaves would be spelled in two ways.
    """
    if has_place is not None and any(row.notes.optional is True for row in rows):
        by_row = _by_optional_rows(rows, by_row, has_place, problems)
    if not any(row.spellings for row in rows):
        return by_row
    return [
        [spelled(row, each, has_place) for each in matches]
        for row, matches in zip(rows, by_row, strict=True)
    ]


def _by_optional_rows(
    rows: Sequence[Row],
    by_row: Sequence[Sequence[Taken]],
    has_place: HasPlace,
    problems: Problems,
) -> list[list[Taken]]:
    """Give leaves to the first optional row that makes names which a target has."""
    every = [
        (place, number, address.path)
        for place, row in enumerate(rows)
        if row.notes.optional is True
        for number, address in enumerate(row.sources)
    ]
    index = Index(template for *_, template in every)
    chosen_by_row: list[list[Taken]] = [[] for _ in rows]
    for place, (row, matches) in enumerate(zip(rows, by_row, strict=True)):
        firsts: dict[int, str] = {}  # of the rows that are chosen, where there are more
        for match in matches:
            takers = {place: match}
            near = index.near(match.path) if row.notes.optional is True else ()
            for other, number, template in map(every.__getitem__, near):
                captures = template.match(match.path) if other > place else None
                if captures is not None:
                    takers.setdefault(other, Taken(number, match.path, captures))
            fitting = (n for n, x in takers.items() if _has_all(rows[n], x, has_place))
            chosen = next(fitting, place)
            chosen_by_row[chosen].append(takers[chosen])
            if len(takers) > 1:
                firsts.setdefault(chosen, match.path)
        if len(firsts) > 1:
            texts = (
                f"{listing([path])} as in {listing([rows[n].targets[0].text])}"
                for n, path in firsts.items()
            )
            problems.add("mixed", " and ".join(texts), row)
    return chosen_by_row


def spelled(row: Row, taken: Taken, has_place: HasPlace | None) -> Taken:
    """Return a leaf with the spelling that its names in a target have, or the first."""
    names = [name for name in row.spellings if name not in taken.captures]
    if not names:
        return taken
    texts = itertools.product(*(row.spellings[name] for name in names))
    options = [dict(zip(names, each, strict=True)) for each in texts]
    every = [taken._replace(captures={**taken.captures, **each}) for each in options]
    if has_place is None:
        return every[0]
    return next((each for each in every if _has_all(row, each, has_place)), every[0])


def _has_all(row: Row, taken: Taken, has_place: HasPlace) -> bool:
    """Return whether there may be something at all targets of a row."""
    return all(has_place(each, taken.captures) for each in row.targets)
