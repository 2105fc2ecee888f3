"""Reports: what a person sees of a tree and of what rules decide for it.

``summarize`` gives one row a leaf, one row a rule, and totals per label. It reads
shapes and dtypes only, so it works on abstract, sharded and traced trees. What is wrong
with the rules is told here, not raised: a report is for looking at.
What was decided comes from ``matches``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treeadapt._arrays import is_array
from treeadapt.checkpoints.replacing import replaced
from treeadapt.drawing import palette
from treeadapt.drawing.html import html_page, html_part
from treeadapt.drawing.outline import Label, Leaf, Outline, grown, sum_text
from treeadapt.drawing.svg import svg
from treeadapt.drawing.tables import (
    LeafCells,
    Table,
    aligned,
    leaf_table,
    rule_table,
    total_table,
)
from treeadapt.drawing.terminal import lines, markdown, plain
from treeadapt.drawing.words import printable
from treeadapt.errors import TreeAdaptError, listing, plural
from treeadapt.matches import STATIC, RuleMatches, where_text
from treeadapt.plans import view_tree
from treeadapt.repairs import entry_text
from treeadapt.rules import as_rules
from treeadapt.selectors import select


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
# Texts of labels that are not strings, and of leaves without a label.
_NO_NAME = re.compile(r"-|static|no rule|True|False|[-+.0-9]+(e[-+]?[0-9]+)?|nan|-?inf")


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """A report of one tree; ``print`` it, look at it in a notebook, or ``save`` it.

    Attributes:
        rows: one for each leaf, in natural order (``layer_2`` before ``layer_10``).
        rules: one for each rule, in order, also those that decide nothing (if the
            whole tree is shown), then one for each label that leaves without a rule
            have; None without rules.
        totals: one for each label, in the order of the rules.
        notes: what is wrong with the rules, a line each.
    """

    rows: tuple[Row, ...]
    rules: tuple[RuleRow, ...] | None
    totals: tuple[Total, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        told = sum_text(
            len(self.rows),
            sum(row.num_params for row in self.rows),
            sum(row.size_bytes for row in self.rows),
        )
        return f"Summary({told})"

    def __str__(self) -> str:
        parts = [*map(aligned, self._tables()), "\n".join(self.notes)]
        return "\n\n".join(filter(None, parts))

    def __rich__(self) -> Any:
        """Return the report for ``rich.print``."""
        paints = self._paints() if self.rules is not None else []
        colors = {
            _label_text(total.label): paint.color
            for total, paint in zip(self.totals, paints, strict=False)
        }
        return _rich(self._tables(), colors, self.notes)

    def to_svg(self, *, title: str = "", depth: int | None = None) -> str:
        """Return the report as a picture, to be put in a pull request.

        A tree of rows, each with its size and a bar in the colours of its labels;
        above it the totals per label, the rules that give it, and the notes. Siblings
        that are alike are one row, and what is too much is added up.

        Args:
            title: of the picture.
            depth: how many segments of a path to show; None for as many as fit.

        Returns:
            An SVG document, the same for equal reports.
        """
        return svg(self.outline(title), depth=depth)

    def to_html(self, *, title: str = "", depth: int | None = None) -> str:
        """Return the report as a page with a tree that folds.

        It holds what ``to_svg`` shows, and far more of the tree, folded.

        Args:
            title: of the page.
            depth: how many segments of a path to show; None for any number.

        Returns:
            An HTML document without scripts, the same for equal reports.
        """
        return html_page(self.outline(title), depth=depth)

    def to_text(self, *, depth: int | None = None) -> str:
        """Return what ``to_svg`` shows as lines of text; for a log or a pipe.

        Args:
            depth: how many segments of a path to show; None for as many as fit.
        """
        return plain(list(lines(self.outline(), depth=depth)))

    def to_markdown(self, *, depth: int | None = None) -> str:
        """Return what ``to_svg`` shows as Markdown; for a comment on a pull request.

        Args:
            depth: how many segments of a path to show; None for as many as fit.
        """
        return markdown(self.outline(), depth=depth)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "",
        depth: int | None = None,
    ) -> None:
        """Write the report to a file: ``to_svg`` or ``to_html``, by the ending.

        It is written under another name and put in place once it is whole; a file that
        is there already is replaced.

        Args:
            path: of the file, which ends in ``.svg`` or ``.html``.
            title: as for ``to_svg``.
            depth: as for ``to_svg``.

        Raises:
            TreeAdaptError: the name has another ending, its folder is missing, or it is
                a folder.
        """
        name = Path(path)
        write = {".svg": self.to_svg, ".html": self.to_html}.get(name.suffix.lower())
        if write is None:
            raise TreeAdaptError(
                f"A report is a picture or a page, and {listing([str(name)])} is the "
                "name of neither. End it in .svg or .html."
            )
        if name.is_dir():
            raise TreeAdaptError(
                f"{listing([str(name)])} is a folder. Choose another name."
            )
        text = write(title=title, depth=depth)
        with replaced(name) as part:
            part.write_bytes(text.encode("utf-8"))

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        return html_part(self.outline())

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """Return the report for Treescope, which calls this."""
        from treeadapt.drawing.treescope_parts import treescope_part

        del path, subtree_renderer
        return treescope_part(self.outline(), type(self).__name__)

    def outline(self, title: str = "") -> Outline:
        """Return what pictures show of this report."""
        places = {label_key(total.label): i for i, total in enumerate(self.totals)}
        where = {rule.number: rule.where for rule in self.rules or ()}
        giving: dict[Any, list[str]] = {key: [] for key in places}
        for rule in self.rules or ():
            if rule.num_leaves and rule.where:
                giving[label_key(rule.label)].append(printable(rule.where))
        legend = [
            Label(
                _legend_text(total.label) if self.rules is not None else "",
                paint,
                total.num_leaves,
                total.num_params,
                total.size_bytes,
                tuple(giving[label_key(total.label)]),
            )
            for total, paint in zip(self.totals, self._paints(), strict=True)
        ]
        known: dict[int, int] = {}  # many leaves have the very same label
        leaves = []
        for row in self.rows:
            if id(row.label) not in known:
                known[id(row.label)] = places[label_key(row.label)]
            shape = "" if row.shape is None else f"[{','.join(map(str, row.shape))}]"
            decided = "" if row.rule is None else f"rule {row.rule}: "
            leaves.append(
                Leaf(
                    row.path,
                    printable(f"{row.dtype}{shape}"),
                    row.num_params,
                    row.size_bytes,
                    known[id(row.label)],
                    printable(f"{decided}{where.get(row.rule, '')}"),
                )
            )
        return Outline(
            printable(title),
            grown(leaves),
            legend,
            self.rules is not None,
            tuple(map(printable, self.notes)),
        )

    def _paints(self) -> list[palette.Paint]:
        """Return how the label of each total looks."""
        if self.rules is None:
            return [palette.SIZES] * len(self.totals)
        labels = [total.label for total in self.totals]
        given = [label for label in labels if label is not None and label is not STATIC]
        found = iter(palette.paints(given))
        special = {id(None): palette.GAP, id(STATIC): palette.STATIC}
        return [special.get(id(label)) or next(found) for label in labels]

    def _tables(self) -> Iterator[Table]:
        ruled = self.rules is not None
        yield leaf_table(map(_leaf_cells, self.rows), has_rules=ruled)
        if self.rules is not None:
            yield rule_table(
                (rule.number, _label_text(rule.label), rule.num_leaves, rule.where)
                for rule in self.rules
            )
        yield total_table(
            (
                _label_text(total.label) if ruled else "all",
                total.num_leaves,
                total.num_params,
                total.size_bytes,
            )
            for total in self.totals
        )


def summarize(tree: Any, rules: Any = None, *, where: Any = None) -> Summary:
    """Report every leaf of a tree and what rules decide for it.

    Args:
        tree: any tree, concrete or abstract; no array value is read.
        rules: ``Rules``, or a mapping or pairs for it; None for names and sizes alone.
        where: selects the leaves to report; None for all. Rules decide on the whole
            tree all the same, and those that decide no such leaf are left out.

    Returns:
        ``Summary``: leaves, rules, totals per label, and notes on unmatched leaves and
        on rules that decide nothing. ``rich.print`` fits it into the terminal.

    Raises:
        PathCollisionError: two leaves have the same path.
        RulesError, SelectorError: ``rules`` are no rules.
        UnusedRuleError: an entry of ``where`` selects no array.

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
    chosen = [True] * len(view.leaves) if where is None else select(view, where)
    rows = [
        _row(path, leaf, index, matches)
        for index, (path, leaf) in enumerate(
            zip(view.plan.paths, view.leaves, strict=True)
        )
        if chosen[index]
    ]
    groups = _groups(rows, matches)
    if where is not None:
        groups = [group for group in groups if group[2]]
    return Summary(
        rows=tuple(sorted(rows, key=lambda row: natural(row.path))),
        rules=None if matches is None else tuple(_rule_rows(groups, matches)),
        totals=tuple(_totals(groups)),
        notes=tuple(_notes(matches, chosen)) if matches else (),
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
    labels: dict[Any, tuple[Any, list[Row]]] = {}
    for _, label, rows in groups:
        labels.setdefault(label_key(label), (label, []))[1].extend(rows)
    for label, rows in labels.values():
        if rows:
            yield Total(
                label,
                len(rows),
                sum(row.num_params for row in rows),
                sum(row.size_bytes for row in rows),
            )


def _legend_text(label: Any) -> str:
    return "no rule" if label is None else " ".join(_label_text(label).split())


def label_key(label: Any) -> Hashable:
    """Return what is equal for labels that are one.

    By type, text and value: 1 differs from True and "1", and arrays are one only if
    they are the same object, because their text leaves much out.
    """
    try:
        hash(label)
    except TypeError:
        return id(label)
    return type(label), repr(label), label


def _notes(matches: RuleMatches, chosen: Sequence[bool]) -> list[str]:
    notes = []
    shown = frozenset(itertools.compress(matches.paths, chosen))
    unmatched = [path for path in matches.unmatched if path in shown]
    if unmatched:
        notes.append(
            f"No rule: {plural(len(unmatched), 'leaf')}, {listing(unmatched)}."
        )
    if matches.rules.overlap == "error" and matches.overlaps:
        paths = dict.fromkeys(
            matches.paths[leaf] for leaf, _, _ in matches.overlaps if chosen[leaf]
        )
        if paths:
            notes.append(
                "Overlap: rules with different values for "
                f"{plural(len(paths), 'leaf')}, {listing(paths)}."
            )
    for index, entry in matches.unused:
        notes.append(f"Unused: {entry_text(entry)} (rule {index + 1}) hits no array.")
    for index in matches.shadowed:
        text = where_text(matches.rules.selectors[index])
        notes.append(
            f"Shadowed: {text} (rule {index + 1}): earlier rules decide all its leaves."
        )
    return notes


def _leaf_cells(row: Row) -> LeafCells:
    return LeafCells(
        row.path,
        row.shape,
        row.dtype,
        row.num_params,
        row.size_bytes,
        _label_text(row.label),
        row.rule,
    )


def _label_text(label: Any) -> str:
    """Write a label; a string that reads as something else stands in quotes."""
    if label is None:
        return "-"
    if label is STATIC:
        return "static"
    is_plain = isinstance(label, str) and not _NO_NAME.fullmatch(label)
    return printable(label) if is_plain else repr(label)


def _rich(
    tables: Iterable[Table], colors: Mapping[str, str], notes: Iterable[str]
) -> Any:
    """Return tables and notes for ``rich``, with labels in their colors."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    parts: list[Any] = []
    for table in tables:
        made = RichTable(box=None, header_style="bold", pad_edge=False)
        for name in table.head:
            made.add_column(
                name,
                justify="right" if name in table.right else "left",
                no_wrap=name not in table.folds,
                overflow="fold",
            )
        for cells in table.cells:
            styles = (
                colors.get(c, "") if n == "label" else ""
                for n, c in zip(table.head, cells, strict=True)
            )
            # Not str, for rich reads "[abc]" there as a style.
            made.add_row(*map(Text, cells, styles))
        parts += [made, ""]
    return Group(*parts, *map(Text, notes))
