"""Drafted rows, tried: whether one fits some leaves, and what it makes of their arrays.

Each is a table of its own. Most rows have neither numbers nor texts in their paths, and
those that differ in these paths alone are written, read and planned once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from treeadapt.errors import MigrationError
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.run_group import run_group
from treeadapt.porting.drafts.merging import canonical
from treeadapt.porting.drafts.rows import DraftRow
from treeadapt.porting.drafts.writing import as_table, written


class _Form(NamedTuple):
    """A row with numbers for its paths, planned for leaves of some shapes."""

    plan: MigrationPlan
    problems: Problems

    def made(
        self, source: Mapping[str, Any], target: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what the row makes of arrays that are in its own order."""
        self.problems.raise_any()
        leaves = {str(n): array for n, array in enumerate(source.values())}
        likes = {str(n): leaf for n, leaf in enumerate(target.values())}
        made: dict[str, Any] = {}
        for group in self.plan.groups:
            made |= run_group(group, leaves, likes)
        return {path: made[str(n)] for n, path in enumerate(target)}


class TriedRows:
    """What rows do with leaves; remembers how it planned them."""

    def __init__(self) -> None:
        self._forms: dict[object, _Form] = {}  # by what decides it

    def fits(
        self, row: DraftRow, source: Mapping[str, Any], target: Mapping[str, Any]
    ) -> bool:
        """Return whether a row fits the shapes of both sides.

        Args:
            row: the row.
            source: at least its leaves, by path.
            target: the same of the other side.
        """
        if (form := self._form(row, source, target)) is not None:
            return not form.problems.texts
        kinds: dict[object, list[Any]] = {}
        for pair in row.pairs:  # those of equal shapes are alike: two of them show it
            ones, twos = (
                tuple(map(leaves.get, paths))
                for leaves, paths in zip((source, target), pair, strict=True)
            )
            kinds.setdefault((ones, twos), []).append(pair)
        some = [p for alike in kinds.values() for p in (alike[0], *alike[1:][-1:])]
        some = [*row.pairs] if row.takes else some  # which name all numbers
        olds, news = (
            {path: leaves[path] for pair in some for path in pair[side]}
            for side, leaves in enumerate((source, target))
        )
        return plans([canonical(row)], olds, news)

    def made(
        self, row: DraftRow, source: Mapping[str, Any], target: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what a row makes of arrays.

        Args:
            row: the row.
            source: its arrays, by path, in its order.
            target: shapes and dtypes of what it should make, in its order.

        Raises:
            MigrationError: it does not fit, or the numbers contradict it.
        """
        if (form := self._form(row, source, target)) is not None:
            return form.made(source, target)
        return as_table(*written([canonical(row)]))(source, target)

    def _form(
        self, row: DraftRow, source: Mapping[str, Any], target: Mapping[str, Any]
    ) -> _Form | None:
        """Return the plan of a row; None where numbers or texts of its paths decide."""
        if not is_of_words(row):
            return None
        (paths,), row = row.pairs, canonical(row)
        axes = tuple(tuple((p.axes, p.before) for p in side) for side in row.sides)
        specs = [
            [(of_side[path].shape, of_side[path].dtype) for path in own]
            for of_side, own in zip((source, target), paths, strict=True)
        ]
        changes = row.changes, row.copies, row.gaps, row.evidence
        key = axes, *changes, *map(tuple, (row.sizes.items(), *specs))
        if key not in self._forms:
            table = as_table(*written([_numbered(row)]))
            leaves = (
                {str(n): jax.ShapeDtypeStruct(*spec) for n, spec in enumerate(each)}
                for each in specs
            )
            self._forms[key] = _Form(*table.planned(*leaves, compares=True))
        return self._forms[key]


def is_of_words(row: DraftRow) -> bool:
    """Return whether the leaves of a row have its paths, without numbers and lists."""
    sides = tuple(tuple(place.path for place in side) for side in row.sides)
    return row.pairs == (sides,)


def _numbered(row: DraftRow) -> DraftRow:
    """Return a row with numbers for the paths of each side."""
    for side, addresses in enumerate(row.sides):
        numbered = (
            dataclasses.replace(place, tokens=(str(number),))
            for number, place in enumerate(addresses)
        )
        row = row.with_side(side, tuple(numbered))
    return row


def plans(
    rows: Sequence[DraftRow], source: Mapping[str, Any], target: Mapping[str, Any]
) -> bool:
    """Return whether rows make a table that fits leaves of both sides."""
    table = as_table(*written(rows))  # what we write can be read
    try:
        table.plan(source, target)
    except MigrationError:
        return False
    return True
