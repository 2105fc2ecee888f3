"""Tables of text: leaves, rules and totals, in aligned columns.

Takes plain values and gives cells that are ready to print; ``aligned`` writes them with
spaces between, and whoever has a better terminal takes the cells themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from treeadapt.drawing.words import printable, size_text


class Table(NamedTuple):
    """Cells below the names of their columns.

    Attributes:
        head: the names.
        cells: the rows.
        right: columns of numbers.
        folds: columns that a narrow terminal may break.
    """

    head: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]
    right: tuple[str, ...]
    folds: tuple[str, ...] = ()


class LeafCells(NamedTuple):
    """A leaf of a table; ``shape`` is None if it is no array."""

    path: str
    shape: tuple[int, ...] | None
    dtype: str
    num_params: int
    size_bytes: int
    label: str
    rule: int | None


def leaf_table(leaves: Iterable[LeafCells], *, has_rules: bool) -> Table:
    """Return a table of leaves, with their labels and rules if there are any."""
    head: tuple[str, ...] = ("path", "shape", "dtype", "params", "size")
    head += ("label", "rule") if has_rules else ()
    cells = []
    for leaf in leaves:
        row = (printable(leaf.path) or "''", *_array_cells(leaf))
        decided = (leaf.label, _number(leaf.rule)) if has_rules else ()
        cells.append((*row, *decided))
    return Table(head, cells, ("params", "size", "rule"), ("path",))


def rule_table(rules: Iterable[tuple[int | None, str, int, str]]) -> Table:
    """Return a table of rules: number, label, leaves that it decides, pattern."""
    cells = [
        (_number(number), label, f"{num_leaves:,}", where or "no rule")
        for number, label, num_leaves, where in rules
    ]
    head = ("rule", "label", "leaves", "pattern")
    return Table(head, cells, ("rule", "leaves"), ("pattern",))


def total_table(totals: Iterable[tuple[str, int, int, int]]) -> Table:
    """Return a table of totals: label, leaves, parameters, bytes."""
    cells = [
        (label, f"{num_leaves:,}", f"{num_params:,}", size_text(size_bytes))
        for label, num_leaves, num_params, size_bytes in totals
    ]
    head = ("label", "leaves", "params", "size")
    return Table(head, cells, ("leaves", "params", "size"))


def aligned(table: Table) -> str:
    """Write a table as lines, without spaces at their ends.

    Example:
        >>> print(aligned(total_table([("train", 2, 1_024, 4_096)])))
        label  leaves  params     size
        train       2   1,024  4.0 KiB
    """
    columns = []
    for column in zip(table.head, *table.cells, strict=True):
        width = max(map(len, column))
        justify = str.rjust if column[0] in table.right else str.ljust
        columns.append([justify(text, width) for text in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def _array_cells(leaf: LeafCells) -> tuple[str, str, str, str]:
    if leaf.shape is None:
        return "-", leaf.dtype, "-", "-"
    shape = str(list(leaf.shape)).replace(" ", "")
    return shape, leaf.dtype, f"{leaf.num_params:,}", size_text(leaf.size_bytes)


def _number(number: int | None) -> str:
    return "-" if number is None else str(number)
