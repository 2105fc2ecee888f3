"""The rows of a summary: a leaf, a rule, an optimizer; and how a table writes each.

Takes what ``summary`` found; gives cells of tables, and lines of text.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from treeadapt.reports.layout import aligned
from treeadapt.reports.outline import added
from treeadapt.reports.words import fitted, printable
from treeadapt.selection.decision import MISSING, STATIC
from treeadapt.sharding.specs import spec_text
from treeadapt.text.names import counts_text, listing, size_text

# Texts of labels that are not strings, and of leaves without a label.
_NO_NAME = re.compile(r"-|static|no rule|True|False|[-+.0-9]+(e[-+]?[0-9]+)?|nan|-?inf")


@dataclasses.dataclass(frozen=True, slots=True)
class LeafRow:
    """One leaf of a report; or the layers of one array to which rules give the same.

    Attributes:
        path: label path; of layers with ``{0..3}`` for their numbers.
        shape: of the array, or of the part that holds these layers; None for a static
            leaf.
        dtype: of the array; the name of its type for a static leaf.
        num_params: number of elements; 0 for a static leaf.
        size_bytes: of the whole array, over all devices.
        label: what the rules give it; ``MISSING`` without a match, None without rules.
        rule: number of the rule that decided, from 1; None if none did.
        num_leaves: how many layers it is; 1 for a leaf that is in no stack.
        spec: how the whole array is sharded; None without a mesh, and for a static
            leaf.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: str
    num_params: int
    size_bytes: int
    label: Any
    rule: int | None
    num_leaves: int = 1
    spec: PartitionSpec | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule of a report, or the leaves with one label that no rule decided.

    Attributes:
        number: place of the rule in the table, from 1; None for no rule.
        label: what it gives; ``MISSING`` for array leaves without a label.
        num_leaves: how many leaves it decided; each layer of a stack is one.
        where: its selector, as it was typed; empty for no rule.
        ends: of a rule that is not just a pattern, how many of the leaves that it
            decided end in each name.
    """

    number: int | None
    label: Any
    num_leaves: int
    where: str
    ends: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """Its selector, and what the leaves are called that it decided."""
        return ": ".join(filter(None, [self.where, counts_text(self.ends)]))


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerRow:
    """What trains the leaves with one label, as a rules file says it.

    Attributes:
        label: the label; "" for what is around all, and belongs to no leaf.
        optimizer: the expression, as written; empty for none.
        num_leaves, num_params: of the leaves.
        state_bytes: of the optimizer's state.
    """

    label: Any
    optimizer: str
    num_leaves: int
    num_params: int
    state_bytes: int


def rule_cells(rule: RuleRow) -> tuple[str, ...]:
    """Return a rule as cells of a table."""
    counts = (label_text(rule.label), f"{rule.num_leaves:,}")
    return (str(rule.number or "-"), *counts, rule.text or "no rule")


def leaf_cells(row: LeafRow) -> tuple[str, ...]:
    """Return a leaf as cells of a table."""
    figures = ("-", "-")
    if row.shape is not None:
        figures = (f"{row.num_params:,}", size_text(row.size_bytes))
    path = printable(row.path) or "''"
    shown = (path, shape_text(row) or "-", row.dtype, *figures)
    spec = "-" if row.spec is None else printable(spec_text(row.spec))
    return (*shown, label_text(row.label), spec, str(row.rule or "-"))


def folded_cells(rows: Sequence[LeafRow]) -> tuple[str, ...]:
    """Return several static leaves as cells of a table."""
    labels = dict.fromkeys(label_text(row.label) for row in rows)
    rules = sorted({row.rule for row in rows if row.rule})
    numbers = listing(map(str, rules), limit=3, write=str) or "-"
    text = listing(labels, limit=3, write=str)
    return (folded_name(rows), "-", kinds_text(rows), "-", "-", text, "-", numbers)


def folded_name(rows: Sequence[LeafRow]) -> str:
    """Say how many static leaves are one line."""
    return f"({added(rows)[0]:,} not arrays)"


def kinds_text(rows: Sequence[LeafRow]) -> str:
    """Write how many static leaves are of each type."""
    kinds: collections.Counter[str] = collections.Counter()
    for row in rows:
        kinds[printable(row.dtype)] += row.num_leaves
    return counts_text(kinds, limit=4)


def shape_text(row: LeafRow) -> str:
    """Write the shape of a leaf; nothing of a static one."""
    return "" if row.shape is None else f"[{','.join(map(str, row.shape))}]"


def optimizer_lines(
    rows: Sequence[OptimizerRow], width: int | None = None
) -> list[str]:
    """Return a table of what trains each label, with expressions cut to a width."""
    if not rows:
        return []
    head = ("optimizer of", "leaves", "params", "state", "expression")
    cells = [
        (
            label_text(row.label) or "all",
            *(f"{count:,}" for count in (row.num_leaves, row.num_params)),
            size_text(row.state_bytes),
            fitted(printable(row.optimizer), width) if width else row.optimizer,
        )
        for row in rows
    ]
    return aligned(head, cells)


def label_text(label: Any, missing: str = "-") -> str:
    """Write a label; a string that reads as something else is in quotes."""
    if label is MISSING:
        return missing
    if label is STATIC:
        return "static"
    if isinstance(label, PartitionSpec):
        return printable(spec_text(label))
    is_plain = isinstance(label, str) and not _NO_NAME.fullmatch(label)
    return printable(label) if is_plain else repr(label)
