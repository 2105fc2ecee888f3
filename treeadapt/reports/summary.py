"""Reports: what a person sees of a tree and of what rules decide for it.

``summarize`` gives one row a leaf, one row a rule, and totals per label; with a mesh
also what each of its devices holds (see ``memory``). It reads shapes and dtypes only,
so it works on abstract, sharded and traced trees. What is wrong with the rules is
reported here, not raised: a report is for looking at.
See ``selection.rules`` for what was decided.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from treeadapt.checkpoints.replacing import replaced
from treeadapt.errors import ShardingError, TreeAdaptError
from treeadapt.reports.html import html_page, html_part
from treeadapt.reports.layout import aligned
from treeadapt.reports.memory import MemoryPlan, plan_memory
from treeadapt.reports.outline import Node, Outline, Total, added, grown, sum_text
from treeadapt.reports.palette import SIZES, paints
from treeadapt.reports.summary_rows import (
    LeafRow,
    OptimizerRow,
    RuleRow,
    folded_cells,
    folded_name,
    kinds_text,
    label_text,
    leaf_cells,
    optimizer_lines,
    rule_cells,
    shape_text,
)
from treeadapt.reports.svg import svg
from treeadapt.reports.text import lines, markdown, plain
from treeadapt.reports.words import printable
from treeadapt.selection.decision import Decision
from treeadapt.selection.repairs import Names, advice_lines, entry_text
from treeadapt.selection.rules import RulesLike, as_rules
from treeadapt.selection.selectors import Unused, Where, select
from treeadapt.selection.splitting import collections_beside_params
from treeadapt.selection.tree_first import view_first
from treeadapt.sharding.specs import AxisRules
from treeadapt.text.names import (
    fold,
    listing,
    natural,
    plural,
    shorten,
)
from treeadapt.text.places import Place
from treeadapt.transforms.nnx_state import require_no_optimizer
from treeadapt.trees.arrays import Tree, is_array
from treeadapt.trees.describing import written_dtype
from treeadapt.trees.views import TreeView

_LINEN_STATISTICS = "batch_stats"  # the collection of Flax's BatchNorm


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong with rules, or with a migration.

    Attributes:
        kind: ``"unmatched"``, ``"overlap"``, ``"unused"``, ``"count"``,
            ``"shadowed"``, or what ``lint`` finds besides.
        rule: number of the rule, from 1; None for leaves without one, and migrations.
        text: what is wrong, and how it may be cured.
        row: number of the row of a migration that makes it, from 1.
        place: in the file, keys from the top; empty for the whole, and where the number
            of a rule or row says it.
    """

    kind: str
    rule: int | None
    text: str
    row: int | None = None
    place: Place = ()

    @property
    def line(self) -> str:
        """The number of the rule, if any, and the text."""
        return f"rule {self.rule}, {self.text}" if self.rule else self.text


_WIDTH = 72  # of an expression in a picture


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """A report of one tree; ``print`` it, look at it in a notebook, or ``save`` it.

    Attributes:
        rows: one for each leaf, in natural order (``layer_2`` before ``layer_10``).
        rules: one for each rule, in order, also those that decide nothing (if the
            whole tree is shown), then one for each label that leaves without a rule
            have; None without rules.
        totals: one for each label, in the order of the rules.
        notes: what is wrong with the rules, a line each, as ``lint`` words it.
        separator: what is between the segments that ``depth`` counts.
        memory: what each device of a mesh holds; None without a mesh.
        statics: show each leaf that is not an array. Otherwise several of them, such as
            functions and numbers in a model of Equinox, are one line of whatever is
            printed or drawn; ``rows`` has each in any case.
        optimizers: what trains each label, if a rules file says it.
    """

    rows: tuple[LeafRow, ...]
    rules: tuple[RuleRow, ...] | None
    totals: tuple[Total, ...]
    notes: tuple[str, ...]
    separator: str = "/"
    memory: MemoryPlan | None = None
    statics: bool = False
    optimizers: tuple[OptimizerRow, ...] = ()

    def __repr__(self) -> str:
        return f"Summary({sum_text(self.totals)})"

    def __str__(self) -> str:
        texts = ["\n".join(aligned(*table)) for table in self._tables()]
        texts.append("\n".join(optimizer_lines(self.optimizers)))
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
        shown, folded = self._divided
        for row in shown:
            kind = printable(row.dtype + shape_text(row))
            by = f"rule {row.rule}: {where[row.rule]}" if row.rule else ""
            part = {places[label_key(row.label)]: (row.num_leaves, row.size_bytes)}
            leaves.append(Node("", row.path, kind, by, *added([row]), part))
        if folded:
            part = {}
            for row in folded:
                place = places[label_key(row.label)]
                part[place] = (part.get(place, (0, 0))[0] + row.num_leaves, 0)
            name = folded_name(folded)
            leaves.append(Node("", name, kinds_text(folded), "", *added(folded), part))
        return Outline(
            printable(title),
            grown(leaves),
            self.totals,
            self.rules is not None,
            tuple(map(printable, self.notes)),
            depth,
            self.separator,
            self._lines_below,
        )

    @property
    def _lines_below(self) -> tuple[str, ...]:
        """What a picture shows below its legend."""
        below = optimizer_lines(self.optimizers, _WIDTH)
        if self.memory:
            below += [*([""] if below else []), *self.memory.lines]
        return tuple(below)

    @property
    def _divided(self) -> tuple[Sequence[LeafRow], Sequence[LeafRow]]:
        """The leaves that are a line each, and the static ones that are one line."""
        statics = [row for row in self.rows if row.shape is None]
        if self.statics or len(statics) < 2:
            return self.rows, []
        return [row for row in self.rows if row.shape is not None], statics

    def _tables(self) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
        """Yield head and rows of each table: leaves, rules, totals."""
        head = ("path", "shape", "dtype", "params", "size", "label", "spec", "rule")
        shown, folded = self._divided
        lines = [*map(leaf_cells, shown), *([folded_cells(folded)] if folded else [])]
        # A spec that a rule says is its label.
        placed = [row for row in self.rows if row.spec is not None]
        is_said = all(
            isinstance(row.label, PartitionSpec) and ... not in tuple(row.label)
            for row in placed
        )
        left_out = {"spec"} if self.memory is None or is_said else set[str]()
        left_out |= {"label", "rule"} if self.rules is None else set()
        shows = [name not in left_out for name in head]
        table = [tuple(itertools.compress(line, shows)) for line in (head, *lines)]
        yield table[0], table[1:]
        if self.rules is not None:
            cells = list(map(rule_cells, self.rules))
            yield ("rule", "label", "leaves", "pattern"), cells
        sums = [
            ("all" if self.rules is None else label_text(one.label), *one.counts)
            for one in self.totals
        ]
        yield ("label", "leaves", "params", "size"), sums


def summarize(
    tree: Tree,
    rules: RulesLike | None = None,
    *,
    where: Where | None = None,
    separator: str = "/",
    mesh: Mesh | AbstractMesh | None = None,
    tx: Any = None,
    memory_kind: str | None = None,
    specs: Mapping[Any, Any] | None = None,
    logical_axes: Mapping[str, Any] | AxisRules = (),
    statics: bool = False,
    unused: Unused = "error",
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
        memory_kind: of the optimizer's state, as for ``opt_state_shardings``: with
            ``"pinned_host"`` it is counted in the memory of the host. None for that of
            its param, which is the host's if the leaf has such a sharding.
        specs: ``{label: spec}`` where the rules give labels, as for
            ``partition_specs``.
        logical_axes: mesh axes by logical axis name, as for ``partition_specs``.
        statics: show each leaf that is not an array, such as the functions and numbers
            of a model of Equinox; otherwise several of them are one line.
        unused: ``"error"`` or ``"ignore"`` entries of ``where`` that match no array.

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
        TransformError: ``tx`` is not a transformation, or ``tree`` is an
            ``nnx.Optimizer``, and there are rules for it.

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
    if memory_kind is not None and tx is None:
        raise ShardingError("memory_kind= is of the state of tx=. Pass tx=, too.")
    if mesh is None and (tx is not None or specs is not None or logical_axes):
        raise ShardingError(
            "tx=, specs= and logical_axes= are for a mesh. Pass mesh=, too."
        )
    if mesh is not None and rules is None:
        raise ShardingError(
            'mesh= needs rules that give specs, such as {"**/kernel": P("data", None), '
            '"**": P()}.'
        )
    if rules is not None:
        require_no_optimizer(tree, "summarize")
    view = view_first(tree, rules, "summarize(tree, rules)")
    decision = as_rules(() if rules is None else rules).match(view)
    paths = decision.paths
    chosen = [True] * len(paths)
    if where is not None:
        chosen = select(decision.view, where, unused=unused)
    parts = [*_parts(decision, chosen)]
    memory = None
    if mesh is not None:
        memory = plan_memory(
            tree,
            rules,
            mesh,
            tx=tx,
            memory_kind=memory_kind,
            specs=specs,
            logical_axes=logical_axes,
            paths=None if where is None else {part.array_path for part in parts},
        )
    by_path = {} if memory is None else memory.param_specs
    rows = [
        _leaf_row(decision, part, by_path, ruled=rules is not None) for part in parts
    ]
    ruled = None if rules is None else list(_rule_rows(rows, decision, separator))
    shown = [rule for rule in ruled or () if rule.num_leaves or where is None]
    notes: list[str] = []
    if rules is not None:
        notes += [
            f"{finding.kind.capitalize()}: {finding.line}"
            for finding in findings(decision, {*itertools.compress(paths, chosen)})
            # On a mesh, leaves without a rule have a box, or are scalars.
            if mesh is None or finding.kind != "unmatched"
        ]
        notes += [f"Note: {line}" for line in habits(decision)]
        labelled = {row.path for row in rows if isinstance(row.label, str)}
        notes += _untrained(view, {x.array_path for x in parts if x.path in labelled})
        notes += [
            f"Unrolled: the layers of the stack {key!r} are leaves of this tree."
            for key in sorted(decision.unrolled.left_out)
        ]
    if memory is not None:
        notes += memory.notes
    return Summary(
        rows=tuple(sorted(rows, key=lambda row: natural(row.path))),
        rules=None if ruled is None else tuple(shown),
        totals=tuple(_totals(rows, ruled)),
        notes=tuple(notes),
        separator=separator,
        memory=memory,
        statics=statics,
    )


class _Reported(NamedTuple):
    """Layers of one array that one rule decided; or a whole leaf.

    Attributes:
        path: with the numbers of the layers.
        array_path: of the array.
        leaf: the array as it is stored, or a static leaf.
        shape: of these layers; None of a static leaf.
        first: row of the first one in the decision.
        num_leaves: how many layers there are.
    """

    path: str
    array_path: str
    leaf: Any
    shape: tuple[int, ...] | None
    first: int
    num_leaves: int


def _untrained(view: TreeView, paths: Collection[str]) -> Iterator[str]:
    """Yield lines about leaves that no optimizer trains, whose labels may say it.

    Args:
        view: of the tree.
        paths: of arrays with labels, not with specs.
    """
    plan = view.plan
    of_model = [plan.paths[index] for index in sorted(plan.untrained)]
    if names := fold(path for path in of_model if path in paths):
        yield (
            f"Note: no optimizer trains {listing(names, limit=5)}, whatever its label. "
            "A model may change such state itself, as it does batch statistics."
        )
    if _LINEN_STATISTICS in collections_beside_params(plan, paths, ()):
        yield (
            f"Note: {_LINEN_STATISTICS!r} are batch statistics, whatever their label: "
            "the model changes them. Give an optimizer variables['params'] alone."
        )


def _parts(decision: Decision, chosen: Sequence[bool]) -> Iterator[_Reported]:
    """Yield the leaves that are chosen, layers of one array as one."""
    leaves = decision.stored.leaves
    if not decision.unrolled.sizes:  # a fifth of the time of regions without layers
        rows = zip(itertools.count(), decision.stored.plan.paths, leaves, strict=False)
        for first, path, leaf in itertools.compress(rows, chosen):
            shape = tuple(leaf.shape) if is_array(leaf) else None
            yield _Reported(path, path, leaf, shape, first, 1)
        return
    for layers in decision.divided(chosen):
        leaf, region = leaves[layers.leaf], layers.region
        shape = region.shape(leaf.shape) if is_array(leaf) else None
        first, *others = layers.rows
        yield _Reported(layers.path, region.path, leaf, shape, first, 1 + len(others))


def _leaf_row(
    decision: Decision,
    part: _Reported,
    specs: Mapping[str, PartitionSpec],
    *,
    ruled: bool,
) -> LeafRow:
    """Return the row of a part, with its label if ``ruled``.

    Args:
        decision: what the rules decided.
        part: some layers, or a leaf.
        specs: by the path of the array, if there is a mesh.
        ruled: whether there are rules.
    """
    label = decision.values[part.first] if ruled else None
    decided = label, decision.deciding[part.first] + 1 or None, part.num_leaves
    if part.shape is None:
        return LeafRow(part.path, None, type(part.leaf).__name__, 0, 0, *decided)
    form = _form(part.shape, part.leaf.dtype)
    return LeafRow(part.path, *form, *decided, specs.get(part.array_path))


# Most leaves of a large model are alike.
@functools.lru_cache(maxsize=1_024)
def _form(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], str, int, int]:
    """Return shape, dtype as text, number of elements and bytes of an array."""
    num_params = math.prod(shape)
    size_bytes = num_params * getattr(dtype, "itemsize", 0)
    return shape, written_dtype(dtype), num_params, size_bytes


def _rule_rows(
    rows: Sequence[LeafRow], decision: Decision, separator: str
) -> Iterator[RuleRow]:
    """Yield each rule, then each label that leaves without a rule have."""
    counts: collections.Counter[Hashable] = collections.Counter()
    ends: dict[int | None, dict[str, int]] = {}
    for row in rows:
        counts[row.rule or label_key(row.label)] += row.num_leaves
        names = ends.setdefault(row.rule, {})
        name = row.path.rpartition(separator)[2]
        names[name] = names.get(name, 0) + row.num_leaves
    pairs = zip(decision.rules.selectors, decision.rules.values, strict=True)
    for number, (where, label) in enumerate(pairs, 1):
        names = ends.get(number, {}) if where.plain is None else {}
        yield RuleRow(number, label, counts[number], where.typed, names)
    others = {label_key(row.label): row.label for row in rows if row.rule is None}
    for key, label in others.items():
        yield RuleRow(None, label, counts[key], "")


def _totals(
    rows: Sequence[LeafRow], ruled: Sequence[RuleRow] | None
) -> Iterator[Total]:
    """Yield the leaves with each label, added up, in the order of the rules."""
    labels: dict[Hashable, list[LeafRow]] = {}
    keys: dict[int, Hashable] = {}  # of labels that the rows hold, so none is freed
    for row in sorted(rows, key=lambda row: row.rule or math.inf) if ruled else rows:
        if id(row.label) not in keys:  # writing a label takes longer than the rest
            keys[id(row.label)] = label_key(row.label)
        labels.setdefault(keys[id(row.label)], []).append(row)
    distinct = [members[0].label for members in labels.values()]
    looks = [SIZES] * len(distinct) if ruled is None else paints(distinct)
    for label, paint, members in zip(distinct, looks, labels.values(), strict=True):
        text, where = "", tuple[str, ...]()
        if ruled is not None:
            text = " ".join(label_text(label, "no rule").split())
            numbers = dict.fromkeys(row.rule for row in members if row.rule)
            where = tuple(printable(ruled[number - 1].text) for number in numbers)
        yield Total(label, *added(members), text, paint, where)


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


def findings(
    decision: Decision, shown: Collection[str] | None = None
) -> Iterator[Finding]:
    """Yield what is wrong with rules for a tree, by kind.

    Args:
        decision: what the rules decided.
        shown: paths of the leaves to name; None for all.
    """
    rules = decision.rules
    visible = frozenset(decision.paths if shown is None else shown)
    pairs: dict[tuple[int, int], list[str]] = {}
    for leaf, one, two in decision.overlaps if rules.overlap == "error" else ():
        pairs.setdefault((one, two), []).append(decision.paths[leaf])

    def listed(paths: Collection[str], what: str) -> str:
        names = sorted(decision.names(paths), key=natural)
        return f"{plural(len(paths), 'leaf')}{what}: {listing(names)}"

    if left := [path for path in decision.unmatched if path in visible]:
        text = listed(left, " without a rule")
        cure = 'Add a rule, or end with one for "**".'
        yield Finding("unmatched", None, f"{text}. {cure}", place=("rules",))
    for (one, two), paths in sorted(pairs.items()):
        if both := [path for path in paths if path in visible]:
            text = f"{shorten(rules.selectors[two].typed)} gives another value than "
            text += f"{rules.names[one]}, to {listed(both, '')}. Exclude "
            text += 'them from one of the two, or choose overlap = "first".'
            yield Finding("overlap", two + 1, text)
    named = [(f"{entry_text(x)} matches no array", x) for _, x in decision.unused]
    lines = advice_lines(named, Names(decision.view, decision.is_array))
    for (index, _), line in zip(decision.unused, lines, strict=True):
        yield Finding("unused", index + 1, line)
    for label, (line, _) in decision.miscounted.items():
        yield Finding("count", None, line, place=("expect", label))
    for index in decision.shadowed:
        text = shorten(rules.selectors[index].typed)
        yield Finding("shadowed", index + 1, f"{text} {decision.shadow(index)}")
    for each in decision.alternatives:
        if each.hint:
            yield Finding("alternative", each.rule + 1, each.line)


def habits(decision: Decision) -> list[str]:
    """Return a line for each alternative that matches nothing and may be a habit."""
    idle = (one for one in decision.alternatives if not one.hint)
    return [f"rule {one.rule + 1}, {one.line}" for one in idle]
