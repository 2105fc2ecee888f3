"""Reports: what a person sees of a tree and of what rules decide for it.

``summarize`` gives one row a leaf, one row a rule, and totals per label; with a mesh
also what each of its devices holds (see ``memory``). It reads shapes and dtypes only,
so it works on abstract, sharded and traced trees. What is wrong with the rules is
reported here, not raised: a report is for looking at.
What was decided comes from ``matches``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from treeadapt.arrays import is_array
from treeadapt.checkpoints.replacing import replaced
from treeadapt.drawing.html import html_page, html_part
from treeadapt.drawing.layout import aligned
from treeadapt.drawing.outline import Node, Outline, Total, grown, sum_text
from treeadapt.drawing.palette import SIZES, paints
from treeadapt.drawing.svg import svg
from treeadapt.drawing.text import lines, markdown, plain
from treeadapt.drawing.words import printable
from treeadapt.errors import ShardingError, TreeAdaptError
from treeadapt.memory import MemoryPlan, plan_memory
from treeadapt.names import listing, natural, plural, size_text
from treeadapt.selection.matches import STATIC, RuleMatches, where_text
from treeadapt.selection.repairs import entry_text
from treeadapt.selection.rules import as_rules
from treeadapt.selection.selectors import select
from treeadapt.selection.stacks import StackAxis
from treeadapt.sharding.specs import AxisRules, spec_text
from treeadapt.trees.views import TreeView, view_tree


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One leaf of a report; or the layers of one array to which rules give the same.

    Attributes:
        path: label path; of layers with ``{0..3}`` for their numbers.
        shape: of the array, or of the part that holds these layers; None for a static
            leaf.
        dtype: of the array; the name of its type for a static leaf.
        num_params: number of elements; 0 for a static leaf.
        size_bytes: of the whole array, over all devices.
        label: what the rules give it; None without rules or without a match.
        rule: number of the rule that decided, from 1; None if none did.
        num_leaves: how many layers it is; 1 for a leaf that is in no stack.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: str
    num_params: int
    size_bytes: int
    label: Any
    rule: int | None
    num_leaves: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule of a report, or the leaves with one label that no rule decided.

    Attributes:
        number: place of the rule in the table, from 1; None for no rule.
        label: what it gives; None for array leaves without a label.
        num_leaves: how many leaves it decided; each layer of a stack is one.
        where: its selector, as it was typed; empty for no rule.
    """

    number: int | None
    label: Any
    num_leaves: int
    where: str


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
        separator: what is between the segments that ``depth`` counts.
        memory: what each device of a mesh holds; None without a mesh.
    """

    rows: tuple[Row, ...]
    rules: tuple[RuleRow, ...] | None
    totals: tuple[Total, ...]
    notes: tuple[str, ...]
    separator: str = "/"
    memory: MemoryPlan | None = None

    def __repr__(self) -> str:
        return f"Summary({sum_text(self.totals)})"

    def __str__(self) -> str:
        texts = ["\n".join(aligned(*table)) for table in self._tables()]
        texts += [str(self.memory)] if self.memory else []
        return "\n\n".join(filter(None, [*texts, "\n".join(self.notes)]))

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
        return svg(self.outline(title, depth))

    def to_html(self, *, title: str = "", depth: int | None = None) -> str:
        """Return the report as a page with a tree that folds.

        It holds what ``to_svg`` shows, and more of the tree, folded.

        Args:
            title: as for ``to_svg``.
            depth: as for ``to_svg``.

        Returns:
            An HTML document without scripts, the same for equal reports.
        """
        return html_page(self.outline(title, depth))

    def to_markdown(self, *, title: str = "", depth: int | None = None) -> str:
        """Return what ``to_svg`` shows as Markdown, for a comment on a pull request.

        Args:
            title: as for ``to_svg``.
            depth: as for ``to_svg``.
        """
        return markdown(self.outline(title, depth)) + "\n"

    def to_text(self, *, depth: int | None = None) -> str:
        """Return what ``to_svg`` shows as lines of text; for a log or a pipe.

        Args:
            depth: how many segments of a path to show; None for as many as fit.
        """
        return plain(lines(self.outline(depth=depth)))

    def save(
        self, path: str | os.PathLike[str], *, title: str = "", depth: int | None = None
    ) -> None:
        """Write the report to a file, in the form that its ending says.

        It is written under another name and put in place once it is whole; a file that
        is there already is replaced.

        Args:
            path: of the file, which ends in ``.svg``, ``.html`` or ``.md``.
            title: as for ``to_svg``.
            depth: as for ``to_svg``.

        Raises:
            TreeAdaptError: the name has another ending, its folder is missing, or it is
                a folder.
        """
        name = Path(path)
        forms = {".svg": self.to_svg, ".html": self.to_html, ".md": self.to_markdown}
        write = forms.get(name.suffix.lower())
        if write is None:
            raise TreeAdaptError(
                f"A report cannot be written as {listing([str(name)])}. End the name "
                "in .svg, .html or .md."
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

    def outline(self, title: str = "", depth: int | None = None) -> Outline:
        """Return what pictures show of this report; arguments as for ``to_svg``."""
        places = {label_key(total.label): i for i, total in enumerate(self.totals)}
        where = {rule.number: printable(rule.where) for rule in self.rules or ()}
        leaves = []
        for row in self.rows:
            kind = printable(row.dtype + _shape(row))
            by = f"rule {row.rule}: {where[row.rule]}" if row.rule else ""
            sums = (row.num_leaves, row.num_params, row.size_bytes)
            part = {places[label_key(row.label)]: (row.num_leaves, row.size_bytes)}
            leaves.append(Node("", row.path, kind, by, *sums, part))
        return Outline(
            printable(title),
            grown(leaves),
            self.totals,
            self.rules is not None,
            tuple(map(printable, self.notes)),
            depth,
            self.separator,
            self.memory.lines if self.memory else (),
        )

    def _tables(self) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
        """Yield head and rows of each table: leaves, rules, totals."""
        end = None if self.rules is not None else -2
        head = ("path", "shape", "dtype", "params", "size", "label", "rule")
        yield head[:end], [_cells(row)[:end] for row in self.rows]
        if self.rules is not None:
            cells = list(map(_rule_cells, self.rules))
            yield ("rule", "label", "leaves", "pattern"), cells
        sums = [
            ("all" if self.rules is None else label_text(one.label), *one.counts)
            for one in self.totals
        ]
        yield ("label", "leaves", "params", "size"), sums


def summarize(
    tree: Any,
    rules: Any = None,
    *,
    where: Any = None,
    separator: str = "/",
    mesh: Mesh | AbstractMesh | None = None,
    tx: Any = None,
    specs: Mapping[Any, Any] | None = None,
    logical_axes: Mapping[str, Any] | AxisRules = (),
) -> Summary:
    """Report every leaf of a tree and what rules decide for it.

    Args:
        tree: any tree, concrete or abstract; no array value is read.
        rules: ``Rules``, or a mapping or pairs for it; None for names and sizes alone.
            With a mesh they give specs, as for ``partition_specs``. If they have
            ``stacks``, each layer counts as a leaf, and those of one array that get the
            same are one row, ``blocks/{0..3}/w``.
        where: selects the leaves to report; None for all. Rules decide on the whole
            tree all the same, and those that decide no such leaf are left out.
            ``memory`` counts an array whole of which it selects some layers.
        separator: between the segments that the ``depth`` of a drawing counts; ``"."``
            for names as PyTorch writes them.
        mesh: the mesh that shall hold the tree; an ``AbstractMesh`` need not exist, and
            no device is used.
        tx: the optimizer that trains the tree on that mesh: any transformation, of
            Optax, or made by ``adapt``, ``partition``, ``freeze``.
        specs: ``{label: spec}`` where the rules give labels, as for
            ``partition_specs``.
        logical_axes: mesh axes by logical axis name, as for ``partition_specs``.

    Returns:
        ``Summary``: leaves, rules, totals per label, and notes on unmatched leaves and
        on rules that decide nothing. With a mesh its ``memory`` is a ``MemoryPlan``:
        the bytes on each device of params and, with ``tx``, of gradients and of each
        field of the optimizer's state.

    Raises:
        PathCollisionError: two leaves have the same path.
        RulesError, SelectorError: ``rules`` cannot be read as rules.
        UnusedRuleError: an entry of ``where`` selects no array; with a mesh also, a
            rule matches none.
        ShardingError, UnmatchedPathError: with a mesh, as by ``named_shardings``;
            ``tx``, ``specs`` or ``logical_axes`` without a mesh, or a mesh without
            rules.
        TransformError: ``tx`` is not a transformation.

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
    if mesh is None and (tx is not None or specs is not None or logical_axes):
        raise ShardingError(
            "tx=, specs= and logical_axes= are for a mesh. Pass mesh=, too."
        )
    if mesh is not None and rules is None:
        raise ShardingError(
            'mesh= needs rules that give specs, such as {"**/kernel": P("data", None), '
            '"**": P()}.'
        )
    view = view_tree(tree)
    matches = None if rules is None else as_rules(rules).match(view)
    table = view if matches is None else matches.view
    chosen = [True] * len(table.leaves) if where is None else select(table, where)
    rows = list(_rows(view, matches, chosen))
    groups = _groups(rows, matches)
    ruled = tuple(rule for rule, found in groups if found or where is None)
    notes: list[str] = []
    memory = None
    if matches is not None:
        # On a mesh, leaves without a rule have a box, or are scalars.
        notes += _notes(matches, chosen, needs_rule=mesh is None)
    if mesh is not None:
        paths = None
        if where is not None and matches is not None:
            paths = _stored_paths(matches, chosen)
        memory = plan_memory(
            tree,
            rules,
            mesh,
            tx=tx,
            specs=specs,
            logical_axes=logical_axes,
            paths=paths,
        )
        notes += memory.notes
    return Summary(
        rows=tuple(sorted(rows, key=lambda row: natural(row.path))),
        rules=None if matches is None else ruled,
        totals=tuple(_totals(groups, is_ruled=matches is not None)),
        notes=tuple(notes),
        separator=separator,
        memory=memory,
    )


def _rows(
    view: TreeView, matches: RuleMatches | None, chosen: Sequence[bool]
) -> Iterator[Row]:
    """Yield the rows of the leaves, or layers, that are chosen."""
    if matches is None or not matches.unrolled.sizes:
        for index, (path, leaf) in enumerate(view.items()):
            if chosen[index]:
                yield _row(path, leaf, index, matches)
        return
    keys = [i if yes else None for i, yes in zip(matches.deciding, chosen, strict=True)]
    for part in matches.unrolled.divide(keys):
        row = _row(part.path, view.leaves[part.leaf], part.rows[0], matches)
        yield _part(row, matches.unrolled.axes[part.leaf], part.counts)


def _part(row: Row, axes: Sequence[StackAxis], counts: Sequence[int]) -> Row:
    """Return the row of some layers of an array.

    Args:
        row: of the array, with all its layers.
        axes: along which it holds them.
        counts: how many they are along each.
    """
    if row.shape is None:
        return dataclasses.replace(row, num_leaves=math.prod(counts))
    sizes = list(row.shape)
    for axis, count in zip(axes, counts, strict=True):
        sizes[axis.axis] = count
    num_params = math.prod(sizes)
    item_bytes = row.size_bytes // (row.num_params or 1)
    return dataclasses.replace(
        row,
        shape=tuple(sizes),
        num_params=num_params,
        size_bytes=num_params * item_bytes,
        num_leaves=math.prod(counts),
    )


def _stored_paths(matches: RuleMatches, chosen: Sequence[bool]) -> set[str]:
    """Return the paths of the arrays of which a layer is chosen."""
    paths, places = matches.stored.plan.paths, matches.unrolled.places
    return {paths[place] for place in itertools.compress(places, chosen)}


def _row(path: str, leaf: Any, index: int, matches: RuleMatches | None) -> Row:
    label, rule = None, None
    if matches is not None:
        label = matches.values[index]
        rule = matches.deciding[index] + 1 or None
    if not is_array(leaf):
        return Row(path, None, type(leaf).__name__, 0, 0, label, rule)
    shape, dtype = tuple(leaf.shape), leaf.dtype
    num_params = math.prod(shape)
    size_bytes = num_params * getattr(dtype, "itemsize", 0)
    return Row(path, shape, str(dtype), num_params, size_bytes, label, rule)


def _groups(
    rows: Sequence[Row], matches: RuleMatches | None
) -> list[tuple[RuleRow, list[Row]]]:
    """Return each rule with what it decided, then each label without a rule."""
    rules = () if matches is None else matches.rules.selectors
    values = () if matches is None else matches.rules.values
    groups: dict[Hashable, tuple[RuleRow, list[Row]]] = {
        number: (RuleRow(number, label, 0, where_text(where)), [])
        for number, (where, label) in enumerate(zip(rules, values, strict=True), 1)
    }
    for row in rows:
        key = row.rule or (None, id(row.label))  # default, STATIC or None
        none = RuleRow(None, row.label, 0, "")
        groups.setdefault(key, (none, []))[1].append(row)
    return [
        (dataclasses.replace(rule, num_leaves=_num_leaves(found)), found)
        for rule, found in groups.values()
    ]


def _totals(
    groups: Iterable[tuple[RuleRow, list[Row]]], *, is_ruled: bool
) -> Iterator[Total]:
    """Yield the leaves with each label, added up, in the order of the rules."""
    labels: dict[Hashable, list[tuple[RuleRow, list[Row]]]] = {}
    for group in groups:
        if group[1]:
            labels.setdefault(label_key(group[0].label), []).append(group)
    given = [groups[0][0].label for groups in labels.values()]
    looks = paints(given) if is_ruled else [SIZES] * len(given)
    for label, paint, members in zip(given, looks, labels.values(), strict=True):
        rows = [row for _, found in members for row in found]
        text = " ".join(label_text(label, "no rule").split()) if is_ruled else ""
        where = tuple(printable(rule.where) for rule, _ in members if rule.where)
        yield total(label, rows, text=text, paint=paint, rules=where)


def total(label: Any, rows: Sequence[Row], **look: Any) -> Total:
    """Return leaves with one label, added up; ``look`` is how a drawing shows them."""
    params = sum(row.num_params for row in rows)
    size_bytes = sum(row.size_bytes for row in rows)
    return Total(label, _num_leaves(rows), params, size_bytes, **look)


def _num_leaves(rows: Sequence[Row]) -> int:
    return sum(row.num_leaves for row in rows)


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


def _notes(
    matches: RuleMatches, chosen: Sequence[bool], *, needs_rule: bool
) -> Iterator[str]:
    shown = frozenset(itertools.compress(matches.paths, chosen))
    clashes = matches.overlaps if matches.rules.overlap == "error" else ()
    clashing = dict.fromkeys(matches.paths[leaf] for leaf, _, _ in clashes)
    for what, paths in (
        ("No rule:", matches.unmatched if needs_rule else ()),
        ("Overlap: rules with different values for", clashing),
    ):
        names = [path for path in paths if path in shown]
        if names:
            count = plural(len(names), "leaf")
            yield f"{what} {count}, {listing(matches.names(names))}."
    for key in sorted(matches.unrolled.left_out):
        yield f"Unrolled: the layers of the stack {key!r} are leaves of this tree."
    for index, entry in matches.unused:
        yield f"Unused: {entry_text(entry)} (rule {index + 1}) matches no array."
    for index in matches.shadowed:
        rule = f"{where_text(matches.rules.selectors[index])} (rule {index + 1})"
        yield f"Shadowed: {rule}: earlier rules decide all its leaves."


def _rule_cells(rule: RuleRow) -> tuple[str, ...]:
    """Return a rule as cells of a table."""
    counts = (label_text(rule.label), f"{rule.num_leaves:,}")
    return (str(rule.number or "-"), *counts, rule.where or "no rule")


def _cells(row: Row) -> tuple[str, ...]:
    """Return a leaf as cells of a table."""
    figures = ("-", "-")
    if row.shape is not None:
        figures = (f"{row.num_params:,}", size_text(row.size_bytes))
    path = printable(row.path) or "''"
    shown = (path, _shape(row) or "-", row.dtype, *figures)
    return (*shown, label_text(row.label), str(row.rule or "-"))


def _shape(row: Row) -> str:
    return "" if row.shape is None else f"[{','.join(map(str, row.shape))}]"


def label_text(label: Any, missing: str = "-") -> str:
    """Write a label; a string that reads as something else is in quotes."""
    if label is None:
        return missing
    if label is STATIC:
        return "static"
    if isinstance(label, PartitionSpec):
        return printable(spec_text(label))
    is_plain = isinstance(label, str) and not _NO_NAME.fullmatch(label)
    return printable(label) if is_plain else repr(label)
