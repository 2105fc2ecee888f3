"""Outlines: a tree folded to what a reader can take in.

Takes leaves with a path, a size and a label; gives nodes with what all their leaves add
up to. A node with one child joins it (``policy/params``). Numbered siblings that are
alike in names, kinds and labels stand as one (``layers/{0..23}``). ``unfolded`` chooses
what to open within a number of rows: first what has several labels, then the rest, one
level after the other.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from treeadapt.drawing.palette import Paint
from treeadapt.drawing.words import (
    count_text,
    fitted,
    printable,
    share_text,
    size_text,
)
from treeadapt.errors import plural

_MAX_DEPTH = 40  # the rest of a path is one name
_FEWEST_ALIKE = 3
_MAX_RANGE = 6
_MAX_LABELS = 4  # more are counted
_MAX_CELLS = 60  # of a bar
_MAX_LINES = 12  # of labels in a tooltip
_MAX_TEXT = 300
_NUMBERED = re.compile(
    r"(?P<before>.*(?<![0-9])|)(?P<number>[0-9]{1,15})(?P<after>[^0-9]*)", re.DOTALL
)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf to draw.

    Attributes:
        path: where it is.
        kind: what it is: ``float32[3,4]``, or the name of a type.
        num_params: number of elements.
        size_bytes: size of the whole.
        label: place of its label in the legend.
        rule: what gave it that label, for the tooltip; may be empty.
    """

    path: str
    kind: str
    num_params: int
    size_bytes: int
    label: int
    rule: str


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """An entry of the legend.

    Attributes:
        text: the label, as it reads.
        paint: how it looks.
        num_leaves: how many leaves have it.
        num_params: their elements.
        size_bytes: their size.
        rules: what gives it, as it was typed.
    """

    text: str
    paint: Paint
    num_leaves: int
    num_params: int
    size_bytes: int
    rules: tuple[str, ...]

    @property
    def tip(self) -> str:
        """The label and its rules, for a tooltip."""
        return "\n".join(map(_short, [self.text, *_first_lines(self.rules, "rule")]))

    def numbers(self, outline: Outline) -> tuple[str, str, str, str]:
        """Write its leaves, parameters, size and share of the whole."""
        whole = outline.root.size_bytes
        return (
            f"{self.num_leaves:,}",
            count_text(self.num_params),
            size_text(self.size_bytes),
            share_text(self.size_bytes / whole if whole else 0),
        )


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A leaf, a node, or several of one kind that are alike.

    Attributes:
        name: as it reads below its parent.
        kind: of a leaf; empty for a node.
        rule: of a leaf.
        children: of the first, if they are several.
        copies: how many there are.
        num_leaves, num_params, size_bytes: of all of them.
        parts: leaves and bytes of all of them by label.
        like: equal for nodes that are alike.
    """

    name: str
    kind: str = ""
    rule: str = ""
    children: list[Node] = dataclasses.field(default_factory=list)
    copies: int = 1
    num_leaves: int = 0
    num_params: int = 0
    size_bytes: int = 0
    parts: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    like: int = -1

    @property
    def is_leaf(self) -> bool:
        """Whether it is a leaf, or several."""
        return bool(self.kind)

    @property
    def name_text(self) -> str:
        """Its name; an empty one is seen, and all of it prints."""
        return printable(self.name) or "''"

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
        ends = list(itertools.accumulate(share for _, share in shares))
        middles = ((cell + 0.5) / _MAX_CELLS * ends[-1] for cell in range(_MAX_CELLS))
        seen = (bisect.bisect_left(ends, middle) for middle in middles)
        return [
            (shares[place][0], len(list(group)) / _MAX_CELLS)
            for place, group in itertools.groupby(seen)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """All that a picture shows.

    Attributes:
        title: what it is of; may be empty.
        root: the tree.
        labels: the legend, in order; one without a text if there are no rules.
        has_labels: whether there are rules.
        notes: what is wrong with the rules, a line each.
    """

    title: str
    root: Node
    labels: Sequence[Label]
    has_labels: bool
    notes: Sequence[str]


def grown(leaves: Sequence[Leaf]) -> Node:
    """Return the root of a tree, folded where leaves are alike.

    Args:
        leaves: in the order to show.

    Example:
        >>> block = lambda n: Leaf(f"model/h_{n}/w", "float32[2]", 2, 8, 0, "")
        >>> root = grown([block(0), block(1), block(2)])
        >>> root.children[0].name, root.children[0].copies, root.size_bytes
        ('model/h_{0..2}/w', 3, 24)
    """
    root = Node("")
    inner: dict[tuple[int, str], Node] = {}
    for leaf in leaves:
        segments = leaf.path.split("/", _MAX_DEPTH)
        at = root
        for segment in segments[:-1]:
            known = inner.get((id(at), segment))
            if known is None:
                known = Node(segment)
                inner[id(at), segment] = known
                at.children.append(known)
            at = known
        at.children.append(_leaf_node(segments[-1], leaf))
    _finish(root, {})
    return root


def _leaf_node(name: str, leaf: Leaf) -> Node:
    return Node(
        name,
        kind=leaf.kind,
        rule=leaf.rule,
        num_leaves=1,
        num_params=leaf.num_params,
        size_bytes=leaf.size_bytes,
        parts={leaf.label: (1, leaf.size_bytes)},
    )


def _finish(node: Node, known: dict[object, int]) -> None:
    """Add up, merge and join below a node; at most ``_MAX_DEPTH`` deep."""
    if node.is_leaf:
        told: object = (node.kind, node.size_bytes, *node.parts, node.rule)
    else:
        for child in node.children:
            _finish(child, known)
        told = tuple((child.name, child.like) for child in node.children)
        node.children = [_joined(child) for child in _merged(node.children)]
        _add_up(node, node.children)
    node.like = known.setdefault((node.is_leaf, told), len(known))


def _add_up(node: Node, children: Sequence[Node]) -> None:
    for child in children:
        node.num_leaves += child.num_leaves
        node.num_params += child.num_params
        node.size_bytes += child.size_bytes
        for label, (count, size) in child.parts.items():
            old = node.parts.get(label, (0, 0))
            node.parts[label] = (old[0] + count, old[1] + size)
    node.parts = dict(sorted(node.parts.items()))


def _joined(node: Node) -> Node:
    """Join a node with its only child."""
    if len(node.children) != 1:
        return node
    (only,) = node.children
    only.name = f"{node.name}/{only.name}"
    return only


def _merged(children: Sequence[Node]) -> list[Node]:
    """Return numbered siblings that are alike as one, where the first of them stood."""
    alike: dict[object, list[tuple[str, Node]]] = {}
    keys: list[object] = []
    for child in children:
        found = _NUMBERED.fullmatch(child.name)
        key: object = id(child)
        if found:
            number = found["number"]
            # Numbers of a fixed width are a family of their own: 00 and 0 differ.
            width = len(number) if number != str(int(number)) else 0
            key = (found["before"], found["after"], width, child.like)
            alike.setdefault(key, []).append((number, child))
        keys.append(key)
    made = []
    for key, child in zip(keys, children, strict=True):
        group = alike.get(key, [])
        if len(group) < _FEWEST_ALIKE:
            made.append(child)
        elif group[0][1] is child:
            made.append(_several(group))
    return made


def _several(group: Sequence[tuple[str, Node]]) -> Node:
    """Return the first of some that are alike, standing for all."""
    number, first = group[0]
    start = first.name.rindex(number)
    after = first.name[start + len(number) :]
    first.name = f"{first.name[:start]}{_range([one for one, _ in group])}{after}"
    _multiply(first, len(group))
    return first


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
    first, last = numbers[0], numbers[-1]
    if int(last) - int(first) == len(numbers) - 1:
        return f"{{{first}..{last}}}"
    shown = numbers if len(numbers) <= _MAX_RANGE else [*numbers[:3], "…", last]
    return f"{{{','.join(shown)}}}"


class Row(NamedTuple):
    """One line of a picture.

    Attributes:
        node: what stands there.
        path: its whole path, with ``{0..3}`` for several.
        level: how far it is indented.
        children: the lines below it; empty if it is folded or a leaf.
    """

    node: Node
    path: str
    level: int
    children: Sequence[Row]


def unfolded(
    root: Node, *, rows: int = 44, width: int = 28, depth: int | None = None
) -> list[Row]:
    """Return the lines to show: as many as fit, what has several labels first.

    Args:
        root: the tree.
        rows: how many lines in all, about; a page of them if not given.
        width: how many children of one node; the others are added up in one line.
        depth: how many segments of a path; None for any number.
    """
    opened: dict[int, Sequence[Node]] = {id(root): _first(root.children, width)}
    left = rows - len(opened[id(root)])
    for mixed in (True, False):
        level = [(node, _segments(node)) for node in opened[id(root)]]
        while level:
            able = [
                (node, _first(node.children, width))
                for node, deep in level
                if id(node) not in opened
                and node.children
                and (len(node.parts) > 1 or not mixed)
                and (depth is None or deep < depth)
            ]
            if mixed:  # the largest that fit
                able.sort(key=lambda pair: -pair[0].size_bytes)
            elif sum(len(children) for _, children in able) > left:
                break
            for node, children in able:
                if len(children) <= left:
                    opened[id(node)] = children
                    left -= len(children)
            level = [
                (child, deep + _segments(child))
                for node, deep in level
                for child in opened.get(id(node), ())
            ]
    return _rows(root, opened, "", 0)


def _rows(
    node: Node, opened: Mapping[int, Sequence[Node]], above: str, level: int
) -> list[Row]:
    made = []
    for child in opened.get(id(node), ()):
        path = f"{above}{child.name}"
        below = _rows(child, opened, f"{path}/", level + 1)
        made.append(Row(child, path, level, below))
    return made


def every(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield lines and all below them, from top to bottom."""
    for row in rows:
        yield row
        yield from every(row.children)


def _segments(node: Node) -> int:
    return node.name.count("/") + 1


def _first(children: Sequence[Node], width: int) -> Sequence[Node]:
    """Return as many children as may be shown, the others as one."""
    if len(children) <= width:
        return children
    rest = children[width - 1 :]
    more = Node(f"… {len(rest):,} more")
    _add_up(more, rest)
    return [*children[: width - 1], more]


def labels_text(node: Node, labels: Sequence[Label]) -> str:
    """Write the labels of a node, the largest first, with their shares."""
    shares = sorted(node.shares, key=lambda pair: -pair[1])
    if len(shares) == 1:
        return labels[shares[0][0]].text
    if len(shares) > _MAX_LABELS:
        return f"{len(shares):,} labels"
    told = [f"{labels[label].text} ({share_text(share)})" for label, share in shares]
    more = [f"+{len(told) - 2}"] if len(told) > 2 else []
    return ", ".join([*told[:2], *more])


def tooltip(row: Row, outline: Outline) -> str:
    """Write all that is known of a line."""
    node = row.node
    lines = [fitted(printable(row.path), _MAX_TEXT, middle=True) or "''"]
    if node.is_leaf:
        lines.append(_short(node.kind_text))
    if not node.is_leaf or node.copies > 1:
        lines.append(plural(node.num_leaves, "leaf"))
    lines.append(
        f"{plural(node.num_params, 'parameter')}, {size_text(node.size_bytes)}"
    )
    if outline.has_labels:
        told = [
            f"{_short(outline.labels[label].text)}: {plural(count, 'leaf')}, "
            f"{size_text(size)}"
            for label, (count, size) in itertools.islice(
                node.parts.items(), _MAX_LINES + 1
            )
        ]
        lines += _first_lines(told, "label", count=len(node.parts))
        if node.rule:
            lines.append(f"by {_short(node.rule)}")
    return "\n".join(lines)


def _first_lines(
    lines: Sequence[str], noun: str, *, count: int | None = None
) -> list[str]:
    """Return the first lines, and how many more there are of ``count``."""
    count = len(lines) if count is None else count
    left = count - _MAX_LINES
    if left <= 0:
        return list(lines)
    return [*lines[:_MAX_LINES], f"… {plural(left, f'more {noun}')}"]


def _short(text: str) -> str:
    return fitted(text, _MAX_TEXT)


def legend(outline: Outline, *, limit: int = 16) -> list[Label | str]:
    """Return the labels, or the first and the last of very many.

    Args:
        outline: all that a picture shows.
        limit: how many may stand there.

    Returns:
        Labels, and where some are left out, what these add up to.
    """
    labels = outline.labels
    if len(labels) <= limit:
        return list(labels)
    head, tail = 2 * limit // 5, limit // 5
    rest = labels[head : len(labels) - tail]
    leaves = plural(sum(label.num_leaves for label in rest), "leaf")
    size = size_text(sum(label.size_bytes for label in rest))
    told = f"… {len(rest):,} more labels: {leaves}, {size}"
    return [*labels[:head], told, *labels[len(labels) - tail :]]


def headline(outline: Outline) -> str:
    """Write what the whole tree adds up to."""
    root = outline.root
    return sum_text(root.num_leaves, root.num_params, root.size_bytes)


def sum_text(num_leaves: int, num_params: int, size_bytes: int) -> str:
    """Write what leaves add up to.

    Example:
        >>> sum_text(1, 1_200, 4_800)
        '1 leaf, 1,200 parameters, 4.7 KiB'
    """
    counts = f"{plural(num_leaves, 'leaf')}, {plural(num_params, 'parameter')}"
    return f"{counts}, {size_text(size_bytes)}"
