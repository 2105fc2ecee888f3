"""Outlines: a tree folded to what a reader can take in.

Takes leaves with a path, a size and a label; gives nodes with what all their leaves add
up to, and the texts that every form paints: as an ``Outline`` writes a row, SVG, HTML,
Markdown and text show it. Paths part at slashes and, as PyTorch writes names, at dots.
A node with one child joins it (``policy/params``). Numbered siblings that are alike in
names, kinds and labels are one (``layers/{0..23}``, ``h.{0..11}.attn``). ``rows``
chooses what to open within a number of rows: first what has several labels, then the
rest, one level after the other.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from treeadapt.reports.palette import REST, SIZES, Paint
from treeadapt.reports.words import count_text, fitted, printable, share_text
from treeadapt.text.names import plural, range_text, size_text

LEGEND = ("label", "leaves", "params", "size", "share", "rules")
_MAX_DEPTH = 40  # the rest of a path is one name
_FEWEST_ALIKE = 3
_MAX_RANGE = 6
_MAX_LABELS = 4  # more are counted
_MAX_CELLS = 60  # of a bar
_MAX_LINES = 12  # of labels in a tooltip
_MAX_TEXT = 300
_PARTS = re.compile(r"(?=/)|(?<=[^/.])(?=\.(?!\.[0-9]))")  # not in {0..3}
_LAYERS = r"\{[0-9{},.]*\}"  # as in a path of several
_NUMBERED = re.compile(r"(.*?)(?<![0-9])([0-9]{1,15})([^0-9]*)", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Total:
    """The leaves with one label, added up.

    Attributes:
        label: what they have; ``MISSING`` without a match, None without rules.
        num_leaves, num_params, size_bytes: of the leaves.
        text: the label, as it reads; empty without rules.
        paint: how the label looks.
        rules: what gives it, as it was typed.
    """

    label: Any
    num_leaves: int
    num_params: int
    size_bytes: int
    text: str = dataclasses.field(default="", repr=False)
    paint: Paint = dataclasses.field(default=SIZES, repr=False)
    rules: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    @property
    def counts(self) -> tuple[str, str, str]:
        """Its leaves, parameters and size, as a table shows them."""
        counts = (f"{self.num_leaves:,}", f"{self.num_params:,}")
        return (*counts, size_text(self.size_bytes))

    @property
    def tip(self) -> str:
        """The label and its rules, for a tooltip."""
        return "\n".join(map(_short, [self.text, *_first_lines(self.rules, "rule")]))


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A leaf, a node, or several of one kind that are alike.

    Attributes:
        name: its part of the path, with the slash or dot before it.
        start: the path down to it; of the first, if they are several.
        kind: of a leaf, such as ``float32[3,4]``; empty for a node.
        rule: of a leaf: what gave it its label.
        num_leaves, num_params, size_bytes: of all of them.
        parts: leaves and bytes of all of them by label, which is its place.
        copies: how many there are.
        children: of the first, if they are several.
        like: equal for nodes that are alike.
    """

    name: str
    start: str
    kind: str = ""
    rule: str = ""
    num_leaves: int = 0
    num_params: int = 0
    size_bytes: int = 0
    parts: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    copies: int = 1
    children: list[Node] = dataclasses.field(default_factory=list)
    like: int = -1

    @property
    def is_leaf(self) -> bool:
        """Whether it is a leaf, or several."""
        return bool(self.kind)

    @property
    def kind_text(self) -> str:
        """What it is, in a few words."""
        if not self.is_leaf:
            return plural(self.num_leaves, "leaf")
        times = f"{self.copies:,} x " if self.copies > 1 else ""
        return times + self.kind

    @property
    def shares(self) -> list[tuple[int, float]]:
        """Labels with their part of the bytes, or of the leaves if there are none."""
        column = 1 if self.size_bytes else 0
        whole = self.size_bytes or self.num_leaves or 1
        return [(label, part[column] / whole) for label, part in self.parts.items()]

    @property
    def cells(self) -> list[tuple[int, float]]:
        """What a bar shows: the shares that are there, or a sample of very many."""
        shares = [(label, share) for label, share in self.shares if share]
        if len(shares) <= _MAX_CELLS:
            return shares
        ends = np.cumsum([share for _, share in shares])
        middles = (np.arange(_MAX_CELLS) + 0.5) / _MAX_CELLS * ends[-1]
        seen = Counter(np.searchsorted(ends, middles).tolist())
        return [(shares[at][0], count / _MAX_CELLS) for at, count in seen.items()]


class Branch(NamedTuple):
    """One line of a picture.

    Attributes:
        node: what is shown.
        path: its whole path, with ``{0..3}`` for several.
        level: how far it is indented.
        children: the lines below it; empty if it is folded or a leaf.
    """

    node: Node
    path: str
    level: int
    children: list[Branch]


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """All that a picture shows, and how it reads.

    Attributes:
        title: what it is of; may be empty.
        root: the tree.
        labels: what the leaves with each label add up to, in order.
        has_labels: whether there are rules.
        notes: what is wrong with the rules, a line each.
        depth: how many segments of a path to show; None for as many as fit.
        separator: what is between segments that ``depth`` counts.
        table: lines to show below the legend, in a fixed-width font.
    """

    title: str
    root: Node
    labels: Sequence[Total]
    has_labels: bool
    notes: Sequence[str]
    depth: int | None = None
    separator: str = "/"
    table: Sequence[str] = ()

    @property
    def headline(self) -> str:
        """What the whole tree adds up to."""
        return sum_text([self.root])

    def legend(self, limit: int = 16) -> list[Total]:
        """Return the labels; of very many the first, the rest as one, and the last."""
        labels = list(self.labels) if self.has_labels else []
        if len(labels) <= limit:
            return labels
        head, tail = 2 * limit // 5, limit // 5
        rest = labels[head:-tail]
        more = Total(None, *added(rest), f"… {len(rest):,} more labels", REST)
        return [*labels[:head], more, *labels[-tail:]]

    def numbers(self, one: Total) -> tuple[str, str, str, str]:
        """Write leaves, parameters, size and share of the whole, as in ``LEGEND``."""
        leaves, _, size = one.counts
        share = share_text(one.size_bytes / (self.root.size_bytes or 1))
        return leaves, count_text(one.num_params), size, share

    def cells(self, node: Node) -> tuple[str, str, str]:
        """Write name, contents and size of a node."""
        name = printable(node.name.removeprefix("/")) or "''"  # an empty one is seen
        return name, node.kind_text, size_text(node.size_bytes)

    def labels_text(self, node: Node) -> str:
        """Write the labels of a node, the largest first, with their shares."""
        shares = sorted(node.shares, key=lambda pair: -pair[1])
        if len(shares) == 1:
            return self.labels[shares[0][0]].text
        if len(shares) > _MAX_LABELS:
            return f"{len(shares):,} labels"
        texts = [f"{self.labels[i].text} ({share_text(share)})" for i, share in shares]
        more = [f"+{len(texts) - 2}"] if len(texts) > 2 else []
        return ", ".join([*texts[:2], *more])

    def tooltip(self, row: Branch) -> str:
        """Write all that is known of a line."""
        node = row.node
        lines = [fitted(printable(row.path), _MAX_TEXT, middle=True) or "''"]
        lines += [_short(node.kind_text)] if node.is_leaf else []
        lines.append(sum_text([node]))
        if self.has_labels:
            parts = [
                f"{_short(self.labels[label].text)}: {plural(count, 'leaf')}, "
                f"{size_text(size)}"
                for label, (count, size) in node.parts.items()
            ]
            lines += _first_lines(parts, "label")
            lines += [f"by {_short(node.rule)}"] if node.rule else []
        return "\n".join(lines)

    def rows(self, limit: int = 44, width: int = 28) -> list[Branch]:
        """Return the lines to show: as many as fit, what has several labels first.

        Args:
            limit: how many lines in all, about; a page of them if not given.
            width: how many children of one node; the others are added up in one line.
        """
        top = _below(Branch(self.root, "", -1, []), width)
        left = limit - len(top)
        for mixed in (True, False):
            level = top
            while level:
                able = [
                    (row, _below(row, width))
                    for row in level
                    if not row.children and self._may_open(row.node, mixed=mixed)
                ]
                if mixed:  # the largest that fit
                    able.sort(key=lambda pair: -pair[0].node.size_bytes)
                elif sum(len(children) for _, children in able) > left:
                    break
                for row, children in able:
                    if len(children) <= left:
                        row.children.extend(children)
                        left -= len(children)
                level = [child for row in level for child in row.children]
        return top

    def _may_open(self, node: Node, *, mixed: bool) -> bool:
        if not node.children or (mixed and len(node.parts) < 2):
            return False
        below = node.children[0].start[: len(node.start) + 1]
        return self.depth is None or len(ends(below, self.separator)) <= self.depth


def ends(path: str, separator: str) -> list[int]:
    """Return where the segments of a path end; none ends within ``{0..3}``.

    Example:
        >>> ends("a/b/c", "/"), ends("{0..3}/h.w", ".")
        ([1, 3, 5], [8, 10])
    """
    matches = re.finditer(rf"{_LAYERS}|({re.escape(separator)})", path)
    return [*(each.start() for each in matches if each[1]), len(path)]


def grown(leaves: Iterable[Node]) -> Node:
    """Return the root of a tree, folded where leaves are alike.

    Args:
        leaves: in the order to show; each ``start`` is its path.

    Example:
        >>> sizes = {"num_leaves": 1, "size_bytes": 8, "parts": {0: (1, 8)}}
        >>> block = lambda n: Node("", f"model/h.{n}.w", "float32[2]", **sizes)
        >>> root = grown([block(0), block(1), block(2)])
        >>> root.children[0].name, root.children[0].copies, root.size_bytes
        ('model/h.{0..2}.w', 3, 24)
    """
    root = Node("", "")
    inner: dict[str, Node] = {}
    for leaf in leaves:
        *above, leaf.name = _PARTS.split(leaf.start, _MAX_DEPTH)
        at, start = root, ""
        for part in above:
            start += part
            if start not in inner:
                inner[start] = Node(part, start)
                at.children.append(inner[start])
            at = inner[start]
        at.children.append(leaf)
    _finish(root, {})
    return root


def _finish(node: Node, kinds: dict[object, int]) -> None:
    """Add up, merge and join below a node; at most ``_MAX_DEPTH`` deep."""
    if node.is_leaf:
        content: object = (node.kind, node.size_bytes, *node.parts, node.rule)
    else:
        for child in node.children:
            _finish(child, kinds)
        content = tuple((child.name, child.like) for child in node.children)
        node.children = [_joined(child) for child in _merged(node.children)]
        _add_up(node, node.children)
    node.like = kinds.setdefault((node.is_leaf, content), len(kinds))


def added(several: Collection[Any]) -> tuple[int, int, int]:
    """Return how many leaves, parameters and bytes nodes or rows have in all."""
    return (
        sum(one.num_leaves for one in several),
        sum(one.num_params for one in several),
        sum(one.size_bytes for one in several),
    )


def _add_up(node: Node, children: Sequence[Node]) -> None:
    node.num_leaves, node.num_params, node.size_bytes = added(children)
    for child in children:
        for label, (count, size) in child.parts.items():
            old = node.parts.get(label, (0, 0))
            node.parts[label] = (old[0] + count, old[1] + size)
    node.parts = dict(sorted(node.parts.items()))


def _joined(node: Node) -> Node:
    """Join a node with its only child."""
    if len(node.children) != 1:
        return node
    (only,) = node.children
    only.name = node.name + only.name
    return only


def _merged(children: Sequence[Node]) -> list[Node]:
    """Return numbered siblings that are alike as one, in the place of the first."""
    families: dict[tuple[str, str, int, int], list[tuple[str, Node]]] = {}
    for child in children:
        if match := _NUMBERED.fullmatch(child.name):
            before, number, after = match.groups()
            # Numbers of a fixed width are a family of their own: 00 and 0 differ.
            width = len(number) if number != str(int(number)) else 0
            key = (before, after, width, child.like)
            families.setdefault(key, []).append((number, child))
    gone: set[int] = set()
    for (before, after, *_), family in families.items():
        if len(family) >= _FEWEST_ALIKE:
            numbers, (first, *others) = zip(*family, strict=True)
            first.name = f"{before}{_range(numbers)}{after}"
            _multiply(first, len(family))
            gone.update(map(id, others))
    return [child for child in children if id(child) not in gone]


def _multiply(node: Node, times: int) -> None:
    node.copies *= times
    node.num_leaves *= times
    node.num_params *= times
    node.size_bytes *= times
    node.parts = {
        label: (times * count, times * size)
        for label, (count, size) in node.parts.items()
    }
    for child in node.children:
        _multiply(child, times)


def _range(numbers: Sequence[str]) -> str:
    """Write numbers as a pattern does, or shorter.

    Example:
        >>> _range(["1", "2", "3"]), _range(["0", "2", "4"])
        ('{1..3}', '{0,2,4}')
    """
    if written := range_text(numbers):
        return written
    shown = numbers
    if len(numbers) > _MAX_RANGE:
        shown = [*numbers[:3], "…", numbers[-1]]
    return f"{{{','.join(shown)}}}"


def every(rows: Sequence[Branch]) -> Iterator[Branch]:
    """Yield lines and all below them, from top to bottom."""
    for row in rows:
        yield row
        yield from every(row.children)


def _below(row: Branch, width: int) -> list[Branch]:
    """Return the lines below one: as many as may be shown, the others as one."""
    shown = row.node.children
    if len(shown) > width:
        rest = shown[width - 1 :]
        more = Node(f"/… {len(rest):,} more", "")
        _add_up(more, rest)
        shown = [*shown[: width - 1], more]
    return [Branch(node, row.path + node.name, row.level + 1, []) for node in shown]


def _first_lines(lines: Sequence[str], noun: str) -> list[str]:
    """Return the first lines, and how many more there are."""
    left = len(lines) - _MAX_LINES
    more = [f"… {plural(left, f'more {noun}')}"] if left > 0 else []
    return [*lines[:_MAX_LINES], *more]


def _short(text: str) -> str:
    return fitted(text, _MAX_TEXT)


def sum_text(several: Collection[Total | Node]) -> str:
    """Write what several add up to.

    Example:
        >>> sum_text([Total("train", 1, 1_200, 4_800)])
        '1 leaf, 1,200 parameters, 4.7 KiB'
    """
    leaves, params, size = added(several)
    return f"{plural(leaves, 'leaf')}, {plural(params, 'parameter')}, {size_text(size)}"
