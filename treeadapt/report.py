"""Reports: what a person sees of a tree and of what rules decide for it.

``summarize`` gives one row a leaf, one row a rule, and totals per label. It reads
shapes and dtypes only, so it works on abstract, sharded and traced trees. What is wrong
with the rules is told here, not raised: a report is for looking at.
What was decided comes from ``matches``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from treeadapt._arrays import is_array
from treeadapt.errors import listing, plural
from treeadapt.matches import STATIC, RuleMatches, where_text
from treeadapt.plans import view_tree
from treeadapt.repairs import entry_text
from treeadapt.rules import as_rules


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One leaf of a report.

    Attributes:
        path: label path.
        shape: of the array; None for a static leaf.
        dtype: of the array; the name of its type for a static leaf.
        num_params: number of elements; 0 for a static leaf.
        size_bytes: of the whole array, over all devices.
        label: what the rules give it; None without rules or without a match.
        rule: number of the rule that decided, from 1; None if none did.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: str
    num_params: int
    size_bytes: int
    label: Any
    rule: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule of a report, or the leaves with one label that no rule decided.

    Attributes:
        number: place of the rule in the table, from 1; None for no rule.
        label: what it gives; None for array leaves without a label.
        num_leaves: how many leaves it decided.
        where: its selector, as it was typed; empty for no rule.
    """

    number: int | None
    label: Any
    num_leaves: int
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class Total:
    """The leaves with one label, added up."""

    label: Any
    num_leaves: int
    num_params: int
    size_bytes: int


_Segment = tuple[tuple[float, str, str], ...]
_AFTER_NUMBERS = math.inf


class _Table(NamedTuple):
    head: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]
    right: tuple[str, ...]  # columns of numbers
    folds: tuple[str, ...] = ()  # columns that a narrow terminal may break


@dataclasses.dataclass(frozen=True)
class Summary:
    """A report of one tree; ``print`` it, or read its rows.

    Attributes:
        rows: one for each leaf, in natural order (``layer_2`` before ``layer_10``).
        rules: one for each rule, in order, also those that decide nothing, then one for
            each label that leaves without a rule have; None without rules.
        totals: one for each label, in the order of the rules.
        notes: what is wrong with the rules, a line each.
    """

    rows: tuple[Row, ...]
    rules: tuple[RuleRow, ...] | None
    totals: tuple[Total, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        parts = [*map(_text, self._tables()), "\n".join(self.notes)]
        return "\n\n".join(filter(None, parts))

    def __rich__(self) -> Any:
        """Return the report for ``rich.print``."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        def table(made_of: _Table) -> Table:
            made = Table(box=None, header_style="bold", pad_edge=False)
            for name in made_of.head:
                made.add_column(
                    name,
                    justify="right" if name in made_of.right else "left",
                    no_wrap=name not in made_of.folds,
                    overflow="fold",
                )
            for cells in made_of.cells:
                made.add_row(*map(Text, cells))  # rich reads "[abc]" in a str as style
            return made

        parts = [part for one in self._tables() for part in (table(one), "")]
        return Group(*parts, *map(Text, self.notes))

    def _tables(self) -> Iterator[_Table]:
        yield self._leaf_table()
        if self.rules is not None:
            yield self._rule_table(self.rules)
        yield self._total_table()

    def _leaf_table(self) -> _Table:
        head: tuple[str, ...] = ("path", "shape", "dtype", "params", "size")
        cells = [
            (_printable(row.path) or "''", *_array_cells(row)) for row in self.rows
        ]
        if self.rules is not None:
            head += ("label", "rule")
            decided = [(_label_text(row.label), _number(row.rule)) for row in self.rows]
            cells = [(*one, *two) for one, two in zip(cells, decided, strict=True)]
        return _Table(head, cells, ("params", "size", "rule"), ("path",))

    def _rule_table(self, rules: Sequence[RuleRow]) -> _Table:
        cells = [
            (
                _number(rule.number),
                _label_text(rule.label),
                f"{rule.num_leaves:,}",
                rule.where or "no rule",
            )
            for rule in rules
        ]
        head = ("rule", "label", "leaves", "pattern")
        return _Table(head, cells, ("rule", "leaves"), ("pattern",))

    def _total_table(self) -> _Table:
        cells = [
            (
                "all" if self.rules is None else _label_text(total.label),
                f"{total.num_leaves:,}",
                f"{total.num_params:,}",
                size_text(total.size_bytes),
            )
            for total in self.totals
        ]
        head = ("label", "leaves", "params", "size")
        return _Table(head, cells, ("leaves", "params", "size"))


def summarize(tree: Any, rules: Any = None) -> Summary:
    """Report every leaf of a tree and what rules decide for it.

    Args:
        tree: any tree, concrete or abstract; no array value is read.
        rules: ``Rules``, or a mapping or pairs for it; None for names and sizes alone.

    Returns:
        ``Summary``: leaves, rules, totals per label, and notes on unmatched leaves and
        on rules that decide nothing. ``rich.print`` fits it into the terminal.

    Raises:
        PathCollisionError: two leaves have the same path.
        RulesError, SelectorError: ``rules`` are no rules.

    Example:
        >>> params = {"encoder": jnp.ones((3, 4)), "head": jnp.ones(4)}
        >>> print(summarize(params, {"encoder": "frozen", "**": "train"}))
        path     shape  dtype    params  size  label   rule
        encoder  [3,4]  float32      12  48 B  frozen     1
        head     [4]    float32       4  16 B  train      2
        <BLANKLINE>
        rule  label   leaves  pattern
           1  frozen       1  'encoder'
           2  train        1  '**'
        <BLANKLINE>
        label   leaves  params  size
        frozen       1      12  48 B
        train        1       4  16 B
    """
    view = view_tree(tree)
    matches = None if rules is None else as_rules(rules).match(view)
    rows = [
        _row(path, leaf, index, matches)
        for index, (path, leaf) in enumerate(
            zip(view.plan.paths, view.leaves, strict=True)
        )
    ]
    groups = _groups(rows, matches)
    return Summary(
        rows=tuple(sorted(rows, key=lambda row: natural(row.path))),
        rules=None if matches is None else tuple(_rule_rows(groups, matches)),
        totals=tuple(_totals(groups)),
        notes=tuple(_notes(matches)) if matches else (),
    )


def natural(path: str) -> list[_Segment]:
    """Return a sort key that counts: ``layer_2`` before ``layer_10``.

    Example:
        >>> sorted(["layer_10", "layer_2", "embed"], key=natural)
        ['embed', 'layer_2', 'layer_10']
    """
    return list(map(_segment_key, path.split("/")))


# Large trees say the same few segments again and again.
@functools.lru_cache(maxsize=4_096)
def _segment_key(segment: str) -> _Segment:
    # By their length, not by ``int``, which refuses thousands of digits.
    parts = re.findall(r"[0-9]+|[^0-9]+", segment)
    return tuple(
        (len(part.lstrip("0")), part.lstrip("0"), part)
        if part[0] in "0123456789"
        else (_AFTER_NUMBERS, part, part)
        for part in parts
    )


def size_text(size_bytes: int) -> str:
    """Write a size for people.

    Example:
        >>> size_text(48), size_text(123_456), size_text(54_000_000_000)
        ('48 B', '121 KiB', '50.3 GiB')
    """
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    digits = 0 if units[0] == "B" or size >= 100 else 1
    return f"{size:.{digits}f} {units[0]}"


def _row(path: str, leaf: Any, index: int, matches: RuleMatches | None) -> Row:
    label, rule = None, None
    if matches is not None:
        label = matches.values[index]
        rule = matches.deciding[index] + 1 or None
    if not is_array(leaf):
        return Row(path, None, type(leaf).__name__, 0, 0, label, rule)
    size = math.prod(leaf.shape)
    return Row(
        path,
        tuple(leaf.shape),
        str(leaf.dtype),
        size,
        size * getattr(leaf.dtype, "itemsize", 0),
        label,
        rule,
    )


_Groups = list[tuple[int | None, Any, list[Row]]]


def _groups(rows: Sequence[Row], matches: RuleMatches | None) -> _Groups:
    """Return number, label and leaves of each rule, then of each label without one."""
    values = () if matches is None else matches.rules.values
    ruled: _Groups = [(n, value, []) for n, value in enumerate(values, 1)]
    others: dict[int, tuple[None, Any, list[Row]]] = {}  # default, STATIC or None
    for row in rows:
        group = (
            others.setdefault(id(row.label), (None, row.label, []))
            if row.rule is None
            else ruled[row.rule - 1]
        )
        group[2].append(row)
    return [*ruled, *others.values()]


def _rule_rows(groups: _Groups, matches: RuleMatches) -> Iterator[RuleRow]:
    for number, label, rows in groups:
        selectors = matches.rules.selectors
        where = "" if number is None else where_text(selectors[number - 1])
        yield RuleRow(number, label, len(rows), where)


def _totals(groups: _Groups) -> Iterator[Total]:
    labels: list[tuple[Any, list[Row]]] = []
    for _, label, rows in groups:
        known = next((old for name, old in labels if _is_same(label, name)), None)
        if known is None:
            labels.append((label, list(rows)))
        else:
            known += rows
    for label, rows in labels:
        if rows:
            yield Total(
                label,
                len(rows),
                sum(row.num_params for row in rows),
                sum(row.size_bytes for row in rows),
            )


def _is_same(one: Any, two: Any) -> bool:
    return one is two or (type(one) is type(two) and repr(one) == repr(two))


def _notes(matches: RuleMatches) -> list[str]:
    notes = []
    if matches.unmatched:
        notes.append(
            f"No rule: {plural(len(matches.unmatched), 'leaf')}, "
            f"{listing(matches.unmatched)}."
        )
    if matches.rules.overlap == "error" and matches.overlaps:
        paths = dict.fromkeys(matches.paths[leaf] for leaf, _, _ in matches.overlaps)
        notes.append(
            f"Overlap: rules with different values for {plural(len(paths), 'leaf')}, "
            f"{listing(paths)}."
        )
    for index, entry in matches.unused:
        notes.append(f"Unused: {entry_text(entry)} (rule {index + 1}) hits no array.")
    for index in matches.shadowed:
        text = where_text(matches.rules.selectors[index])
        notes.append(
            f"Shadowed: {text} (rule {index + 1}): earlier rules decide all its leaves."
        )
    return notes


def _array_cells(row: Row) -> tuple[str, ...]:
    if row.shape is None:
        return "-", row.dtype, "-", "-"
    shape = str(list(row.shape)).replace(" ", "")
    return shape, row.dtype, f"{row.num_params:,}", size_text(row.size_bytes)


def _number(number: int | None) -> str:
    return "-" if number is None else str(number)


def _label_text(label: Any) -> str:
    if label is None:
        return "-"
    if label is STATIC:
        return "static"
    return _printable(label) if isinstance(label, str) else repr(label)


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _text(table: _Table) -> str:
    columns = list(zip(table.head, *table.cells, strict=True))
    aligned = []
    for column in columns:
        width = max(map(len, column))
        justify = str.rjust if column[0] in table.right else str.ljust
        aligned.append([justify(text, width) for text in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))
