"""Drafted rows, tried: whether one fits some leaves, and what it makes of their arrays.

Each is a table of its own. Rows with neither numbers nor texts in their paths that
differ in these paths alone are written, read and planned once.
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


class PlannedRow(NamedTuple):
    """A row, planned for leaves of some shapes.

    Attributes:
        plan: of it alone.
        problems: of the plan.
        is_numbered: whether leaves have numbers for names there, in order.
    """

    plan: MigrationPlan
    problems: Problems
    is_numbered: bool = False

    def made(
        self, source: Mapping[str, Any], target: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what the row makes of arrays, by path.

        Args:
            source: arrays in the order of the row.
            target: shapes and dtypes of what it should make, in its order.

        Raises:
            MigrationError: the row does not fit, or the numbers contradict it.
        """
        self.problems.raise_any()
        leaves, likes = (
            {str(n): leaf for n, leaf in enumerate(each.values())}
            if self.is_numbered
            else each
            for each in (source, target)
        )
        made: dict[str, Any] = {}
        for group in self.plan.groups:
            made |= run_group(group, leaves, likes)
        return dict(zip(target, map(made.__getitem__, likes), strict=True))


class TriedRows:
    """Plans of rows; those that differ in words alone have one."""

    def __init__(self) -> None:
        self._forms: dict[object, PlannedRow] = {}  # by what decides it

    def fits(
        self, row: DraftRow, source: Mapping[str, Any], target: Mapping[str, Any]
    ) -> bool:
        """Return whether a row fits the shapes of both sides.

        Args:
            row: the row.
            source: shapes and dtypes of at least its leaves, by path.
            target: the same of the other side.
        """
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
        return not self.planned(row, olds, news).problems.texts

    def planned(
        self, row: DraftRow, source: Mapping[str, Any], target: Mapping[str, Any]
    ) -> PlannedRow:
        """Return the plan of a row.

        Args:
            row: the row.
            source: its leaves, or some of them, by path.
            target: what it should make of these.

        Raises:
            MigrationError: it cannot be read, which is an error of ours.
        """
        row = canonical(row)
        if not _is_of_words(row):
            return _planned(row, source, target)
        (paths,) = row.pairs
        axes = tuple(tuple((p.axes, p.before) for p in side) for side in row.sides)
        specs = [
            [(leaves[path].shape, leaves[path].dtype) for path in own]
            for leaves, own in zip((source, target), paths, strict=True)
        ]
        changes = row.changes, row.copies, row.gaps, row.evidence
        key = axes, *changes, *map(tuple, (row.sizes.items(), *specs))
        if key not in self._forms:
            olds, news = (
                {str(n): jax.ShapeDtypeStruct(*spec) for n, spec in enumerate(each)}
                for each in specs
            )
            planned = _planned(_numbered(row), olds, news)
            self._forms[key] = planned._replace(is_numbered=True)
        return self._forms[key]


def _planned(
    row: DraftRow, source: Mapping[str, Any], target: Mapping[str, Any]
) -> PlannedRow:
    table = as_table(*written([row]))
    return PlannedRow(*table.planned(source, target, compares=True))


def _is_of_words(row: DraftRow) -> bool:
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
