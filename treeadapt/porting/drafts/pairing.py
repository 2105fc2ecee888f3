"""Rows from names and shapes: which leaf is which, for the whole model at once.

Leaves that differ in numbers only are one family (see ``families``). Families of one
size whose shapes allow it are candidates of each other. Words in common score them, and
what leaves next to both are paired with; one assignment has the largest sum. Where
families are left on both sides, a number becomes a part of their names, and all are
paired again. No name proves anything: every row is marked, with the other candidates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from treeadapt.porting.drafts.families import (
    Family,
    families,
    grouped_paths,
    other_families,
    place_of,
    ranked_texts,
    with_sister_stacks,
)
from treeadapt.porting.drafts.fused import fusions
from treeadapt.porting.drafts.merging import canonical
from treeadapt.porting.drafts.rows import DraftRow, Hole, numberless
from treeadapt.porting.drafts.shapes import AxisOrder, Seen, Sisters, layouts, order_of
from treeadapt.porting.drafts.synonyms import Words
from treeadapt.text.names import listing

_A_NUMBER = re.compile(r"#|[0-9]+")
_MAX_FAMILIES = 4_000  # of a side
_MAX_ANCHORS = 2_000  # leaves with equal paths, whose neighbours others may be
_MAX_RIVALS = 200  # families of one size
_ALONE = 0.5  # of 2: what a word counts for that is within a longer text
_UNSHARED = 0.05  # of 1: what a word takes away, so that a longer name is left over
_IN_PLACE = 0.05  # of 2: what a number counts for that is in one place on both sides
_LEAST_MARGIN = 0.2  # of 2: how much better a pair is than its rivals
_LEAST_NAME = 0.2  # of 1: what a pair has in common, to say something of others
_ROUNDS = 3  # of neighbours that are paired, and pair others
_PADDED = {"embed", "head", "positions"}  # what libraries make longer by zeros
_KINDS = {"weight", "bias", "mean", "var"}  # of the leaves of one module
_MOST_NAMED = 3  # candidates in a comment


def propose(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    words: Words,
    by_values: Sequence[DraftRow],
) -> tuple[list[DraftRow], int]:
    """Return a marked row for each pair of families.

    With it comes the number of leaves of the source that are not looked at, because too
    many names have their size.

    Args:
        source: leaves of the source without a partner.
        target: leaves of the target that nothing fills.
        words: what names mean.
        by_values: rows that values gave, whose neighbours these may be.
    """
    ones, twos = families(source), families(target)
    if max(len(ones), len(twos)) > _MAX_FAMILIES:
        return [], len(source)
    if not (ones and twos):
        return [], 0
    ones, twos, fused = fusions(ones, twos, words)
    ones, twos = with_sister_stacks(ones, twos, words)
    while True:
        assignment = _Assignment(ones, twos, words, by_values)
        others = other_families(assignment.left(), words)
        if others is None:
            break
        ones, twos = others
    sisters = Sisters(_proved(by_values), assignment.seen())
    rows = [each.row(sisters) for each in fused]
    rows += [assignment.row(i, j, sisters) for i, j in assignment.pairs.items()]
    for one, two, axis, more in _of_other_length(assignment.left(), words):
        single = _Assignment([one], [two], words, by_values)
        every = (single.row(*pair, sisters) for pair in single.pairs.items())
        rows += [_padded(row, axis, more) for row in every]
    return rows, sum(len(ones[i].paths) for i in assignment.crowded)


def with_tie(row: DraftRow, words: Words, key: str) -> DraftRow:
    """Return a row with the key that ties a head to the embedding, if it fills both.

    Args:
        row: of which numbers or names show that it fills both.
        words: what names mean.
        key: of the configuration that says that both are one array; or empty.
    """
    places = (*row.sources, *row.targets)
    has_numbers = any(isinstance(t, Hole) for place in places for t in place.tokens)
    is_plain = len(row.pairs) == len(row.sources) == 1 and not row.has_bracket
    if not key or has_numbers or not is_plain or len(row.targets) < 2:
        return row
    old, *news = ("".join(map(str, place.tokens)) for place in places)
    is_head = dict(zip(row.targets, ("head" in words.of(p) for p in news), strict=True))
    first = [place for place in row.targets if not is_head[place]]
    heads = [place for place in row.targets if is_head[place]]
    if len(first) != 1 or "embed" not in words.of(old):
        return row
    names = listing(["".join(map(str, place.tokens)) for place in heads], write=str)
    note = f"{names} is the embedding: the configuration has {key}"
    return dataclasses.replace(row, targets=(*first, *heads), tie=key).marked("", note)


def with_tied_head(
    rows: Sequence[DraftRow],
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    words: Words,
    key: str,
) -> list[DraftRow]:
    """Return rows in which the embedding fills a head that nothing else does, too.

    Args:
        rows: that names and shapes propose.
        source: leaves of the source.
        target: leaves of the target.
        words: what names mean.
        key: of the configuration that says that both are one array.
    """
    filled = {path for row in rows for path in row.target_paths}
    heads = [p for p in target if p not in filled and "head" in words.of(p)]
    pairs = [
        (number, old[0], new[0])
        for number, row in enumerate(rows)
        for old, new in (row.pairs if row.is_rest or len(row.pairs) == 1 else ())
        if len(old) == len(new) == 1 and "embed" in words.of(old[0])
    ]
    for head, (number, path, embedding) in itertools.product(heads, pairs):
        both = [
            [
                *map(
                    canonical,
                    propose({path: source[path]}, {new: target[new]}, words, ())[0],
                )
            ]
            for new in (embedding, head)
        ]
        if not all(both):
            continue
        (one,), (two,) = both
        if one.sources != two.sources or one.changes != two.changes:
            continue
        both_targets = dataclasses.replace(
            one,
            targets=(*one.targets, *two.targets),
            pairs=(((path,), (embedding, head)),),
            checks=tuple(dict.fromkeys([*one.checks, *two.checks])),
            notes=(),
        )
        tied = with_tie(both_targets, words, key)
        left = [pair for pair in rows[number].pairs if pair[0] != (path,)]
        smaller = dataclasses.replace(rows[number], pairs=tuple(left))
        return [*rows[:number], *[smaller] * bool(left), *rows[number + 1 :], tied]
    return [*rows]


class _Assignment:
    """The best pairs of families.

    Attributes:
        pairs: numbers of families of the source, and of the target.
        crowded: numbers of families of the source with too many candidates.
    """

    def __init__(
        self,
        ones: Sequence[Family],
        twos: Sequence[Family],
        words: Words,
        by_values: Sequence[DraftRow],
    ) -> None:
        self._ones, self._twos = ones, twos
        self.crowded: set[int] = set()
        self._orders: dict[tuple[int, int], list[AxisOrder]] = {}
        self._sizes: dict[int, tuple[list[int], list[int]]]
        self._sizes = defaultdict(lambda: ([], []))
        for side, every in enumerate((ones, twos)):
            for number, family in enumerate(every):
                self._sizes[family.size][side].append(number)
        counted = [
            [[(n, words.of(text)[-1:]) for n, text in each.numbers] for each in side]
            for side in (ones, twos)
        ]
        for some, others in self._sizes.values():
            if len(others) > _MAX_RIVALS:
                self.crowded |= {*some}
                continue
            for i, j in itertools.product(some, others):
                alike = _alike(counted[0][i], counted[1][j])
                orders = layouts(*ones[i].dims, *twos[j].dims, alike)
                if orders := [o for o in orders if _has_lists(o, ones[i], twos[j])]:
                    self._orders[i, j] = orders
        names = self._names(words)
        self._scores = names
        for _ in range(_ROUNDS):
            self.pairs = self._assigned()
            votes = self._votes(by_values, names)
            self._scores = self._of_modules(
                {pair: names[pair] + votes[pair] for pair in names}, words
            )
        self.pairs = self._assigned()

    def _names(self, words: Words) -> dict[tuple[int, int], float]:
        """Return how much of two names is the same: rare words count more."""
        texts = [*ranked_texts(self._ones, self._twos, words)]
        # A word of a longer text, the norm of `attn_norm`, says less than the text.
        meanings, alone = (
            [[Counter(read(text)) for text in side] for side in texts]
            for read in (words.of, words.single)
        )
        counts = Counter(word for side in meanings for each in side for word in each)
        total = len(self._ones) + len(self._twos) + 1

        def weight(each: Counter[str]) -> float:
            return sum(
                (0.15 + math.log(total / counts.get(word, 1)) / math.log(total)) * n
                for word, n in each.items()
            )

        sums = [[weight(each) for each in side] for side in meanings]
        mean = 2 * max(sum(map(sum, sums)) / total, 1e-9)
        shorts = [[words.shortened(text) for text in side] for side in texts]
        every = [
            [one | two for one, two in zip(*sides, strict=True)]
            for sides in zip(alone, meanings, strict=True)
        ]
        places = _numbers_in_place(texts)
        names = {}
        for i, j in self._orders:
            (new, starts), (others, other_starts) = shorts[0][i], shorts[1][j]
            short = (new & other_starts) | (others & starts)
            same = 0.0  # of most pairs of a large model
            if short or not every[0][i].keys().isdisjoint(every[1][j]):
                both = meanings[0][i] & meanings[1][j]
                more = (every[0][i] & every[1][j]) | Counter(short)
                same = 2 * weight(both) + _ALONE * weight(more - both)
            # A sum, not a share: a longer name is not less like each of two others.
            names[i, j] = (same - _UNSHARED * (sums[0][i] + sums[1][j])) / mean
            names[i, j] += _IN_PLACE * len(places[0][i] & places[1][j])
        return names

    def _assigned(self) -> dict[int, int]:
        """Return the pairs of the best assignment."""
        from scipy.optimize import linear_sum_assignment

        pairs: dict[int, int] = {}
        for some, others in self._sizes.values():
            table = np.full((len(some), len(others)), -100.0)
            for x, i in enumerate(some):
                for y, j in enumerate(others):
                    if (i, j) in self._orders:
                        # An order of the files decides between equal names.
                        apart = i / len(self._ones) - j / len(self._twos)
                        table[x, y] = self._scores[i, j] - 1e-3 * apart**2
            for x, y in zip(*linear_sum_assignment(table, maximize=True), strict=True):
                if table[x, y] > -50:
                    pairs[some[x]] = others[y]
        return pairs

    def _votes(
        self, by_values: Sequence[DraftRow], names: Mapping[tuple[int, int], float]
    ) -> dict[tuple[int, int], float]:
        """Return for each pair how far what is next to both is paired, up to 1.

        Of each node above one leaf, it is the share of pairs that it has in common with
        the likeliest node above the other one.
        """
        best: dict[tuple[int, int], list[float]] = defaultdict(list)
        for (i, j), score in self._scores.items():
            best[0, i].append(score)
            best[1, j].append(score)
        seconds = {key: sorted([-1.0, *scores])[-2] for key, scores in best.items()}
        anchors = {
            (self._ones[i].text, self._twos[j].text)
            for i, j in self.pairs.items()
            if names[i, j] >= _LEAST_NAME
            and self._scores[i, j] - max(seconds[0, i], seconds[1, j]) >= _LEAST_MARGIN
        }
        for row in by_values:
            some = row.pairs[:_MAX_ANCHORS] if row.is_rest else row.pairs[:1]
            anchors |= {(numberless(a[0]), numberless(b[0])) for a, b in some}
        both: dict[str, Counter[str]] = defaultdict(Counter)
        counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        for a, b in anchors:
            nodes, others = _nodes(a), _nodes(b)
            counts[0].update(nodes)
            counts[1].update(others)
            for node in nodes:
                both[node].update(others)
        by_end: dict[tuple[int, str], list[tuple[str, str]]] = defaultdict(list)
        for anchor in sorted(anchors):
            for end in enumerate(anchor):
                by_end[end].append(anchor)
        votes = {}
        above = [
            [_nodes(each.text) for each in side] for side in (self._ones, self._twos)
        ]
        is_known = [not both.keys().isdisjoint(nodes) for nodes in above[0]]
        for i, j in names:
            votes[i, j] = 0.0
            if not is_known[i]:
                continue
            # Nodes of which no leaves are paired have nothing in common.
            alike = [
                [other for other in above[1][j] if other in both.get(node, ())]
                for node in above[0][i]
            ]
            if not any(alike):
                continue
            a, b = self._ones[i].text, self._twos[j].text
            # A pair of one of these with another leaf does not speak for this one.
            rivals = {*by_end.get((0, a), ()), *by_end.get((1, b), ())}
            without = [({*_nodes(x)}, {*_nodes(y)}) for x, y in rivals]

            def share(node: str, other: str, without: Any = without) -> float:
                ones, twos = (
                    [node in x for x, _ in without],
                    [other in y for _, y in without],
                )
                shared = both[node][other] - sum(map(operator.and_, ones, twos))
                every = counts[0][node] - sum(ones) + counts[1][other] - sum(twos)
                return 2 * shared / max(every, 1)

            pairs = zip(above[0][i], alike, strict=True)
            shares = [max((share(n, m) for m in own), default=0.0) for n, own in pairs]
            votes[i, j] = sum(shares) / len(shares)
        return votes

    def _of_modules(
        self, scores: Mapping[tuple[int, int], float], words: Words
    ) -> dict[tuple[int, int], float]:
        """Return scores of pairs with those of the leaves next to both.

        Leaves of one module go to one module: the weight goes where the bias may go.
        """
        ends = [
            [(_nodes(each.text)[-1], words.of(each.text)[-1:]) for each in side]
            for side in (self._ones, self._twos)
        ]
        modules: list[dict[str, dict[tuple[str, ...], int]]] = [{}, {}]
        for side, every in zip(modules, ends, strict=True):
            for number, (node, kind) in enumerate(every):
                if _KINDS.issuperset(kind):
                    side.setdefault(node, {}).setdefault(kind, number)
        # What is next to each leaf: nothing of one whose module has no other.
        siblings = [
            {k: n for k, n in own.items() if k != kind} if kind in own else {}
            for own, kind in (
                (modules[0].get(node, {}), kind) for node, kind in ends[0]
            )
        ]
        united = dict(scores)
        for i, j in scores:
            if some := siblings[i]:
                others = modules[1].get(ends[1][j][0], {})
                each = [scores[i, j]]
                each += [
                    scores.get((some[k], others[k]), -1.0) for k in some if k in others
                ]
                united[i, j] = sum(each) / len(each)
        return united

    def left(self) -> list[tuple[Sequence[Family], set[int]]]:
        """Return the families of each side, and numbers of those without a partner."""
        ones, twos = ({*range(len(side))} for side in (self._ones, self._twos))
        return [
            (self._ones, ones - {*self.pairs} - self.crowded),
            (self._twos, twos - {*self.pairs.values()}),
        ]

    def seen(self) -> Iterator[Seen]:
        """Yield the pairs, and the orders of axes that shapes allow each."""
        for i, j in self.pairs.items():
            yield self._ones[i].text, self._twos[j].text, self._orders[i, j]

    def row(self, i: int, j: int, sisters: Sisters) -> DraftRow:
        """Return the row of a pair, in the likeliest order of axes."""
        source, target = self._ones[i], self._twos[j]
        orders = self._orders[i, j]
        order = sisters.likeliest(orders, source.text, target.text)
        checks = ["names"]
        if len(orders) > 1:
            checks.append("order of axes")
        if order.is_split:
            checks.append("order within an axis")
        if source.words or target.words:
            checks.append("order of parts")
        rivals = [b for b in self._sizes[target.size][1] if (i, b) in self._orders]
        rivals.sort(key=lambda b: (b != j, -self._scores[i, b]))
        near = [self._twos[b].text for b in rivals[: 1 + _MOST_NAMED]]
        note = f"{near[0]}, or {', '.join(near[1:])}" if near[1:] else ""
        dtypes = str(source.dtype), str(target.dtype)
        return DraftRow(
            (place_of(source, order.source),),
            (place_of(target, order.target),),
            dict(order.sizes),
            tuple(grouped_paths(source, target, order)),
            "shapes",
            tuple(checks),
            (note,) if note else (),
            cast=dtypes if dtypes[0] != dtypes[1] else (),
        )


def _of_other_length(
    left: Sequence[tuple[Sequence[Family], set[int]]], words: Words
) -> Iterator[tuple[Family, Family, int, int]]:
    """Yield families of which one is longer along an axis, cut to one length.

    As of a vocabulary that a library pads with zeros. With them comes the axis, and by
    how much the target is longer; less than 0 if the source is.
    """
    ones, twos = ([side[number] for number in sorted(some)] for side, some in left)
    used: set[Family] = set()
    for one, two in itertools.product(ones, twos):
        is_known = _PADDED.intersection(words.of(one.text), words.of(two.text))
        shapes = Counter(one.shape), Counter(two.shape)
        lengths = [*(shapes[0] - shapes[1]).elements()]
        others = [*(shapes[1] - shapes[0]).elements()]
        if not is_known or len(one.shape) < 2 or one.counts != two.counts:
            continue
        if len(lengths) != 1 or len(others) != 1 or used & {one, two}:
            continue
        used |= {one, two}
        more = others[0] - lengths[0]
        longer, length = (two, others[0]) if more > 0 else (one, lengths[0])
        axis = longer.shape.index(length)
        shape = [*longer.shape]
        shape[axis] -= abs(more)
        cut = dataclasses.replace(longer, shape=tuple(shape))
        yield (one, cut, axis, more) if more > 0 else (cut, two, axis, more)


def _padded(row: DraftRow, axis: int, more: int) -> DraftRow:
    """Return a row of leaves that were cut to one length as that of the whole."""
    length = ((axis, 0, abs(more)),)
    row = row.marked("length", f"{abs(more)} zeros at the end")
    if more > 0:
        return dataclasses.replace(row, pads=length)
    return dataclasses.replace(row, cuts=length)


def _alike(ones: Sequence[Any], twos: Sequence[Any]) -> list[tuple[int, int]]:
    """Return which numbers of two paths may be one: first those after one word."""
    pairs = itertools.product(ones, twos)
    ordered = sorted(pairs, key=lambda pair: pair[0][1] != pair[1][1])
    return [(one, two) for (one, _), (two, _) in ordered]


def _has_lists(order: AxisOrder, one: Family, two: Family) -> bool:
    """Return whether what has texts for its values is no number of the other side.

    It is an axis there, or the place within a block of layers.
    """
    numbers = order.source[: len(one.counts)], order.target[: len(two.counts)]
    return not any(
        numbers[side][each.words[0]] in numbers[1 - side]
        for side, each in enumerate((one, two))
        if each.words is not None
    )


def _proved(rows: Iterable[DraftRow]) -> Iterator[Seen]:
    """Yield what rows that numbers show say of the order of axes."""
    for row in rows:
        order = order_of(row) if row.is_live and not row.checks else None
        if order is not None and row.evidence == "values":
            (source, *_), (target, *_) = row.pairs[0]
            yield source, target, [order]


def _numbers_in_place(
    texts: Sequence[Sequence[str]],
) -> list[list[set[tuple[int, str]]]]:
    """Return the numbers of paths, each with how many are before it.

    The second of a block is not that of a kernel within the block. Only of places at
    which both sides have the same numbers.
    """
    every = [
        [
            {
                (n, found)
                for n, found in enumerate(_A_NUMBER.findall(text))
                if found != "#"
            }
            for text in side
        ]
        for side in texts
    ]
    unions = [set().union(*side) for side in every]
    odd = {place for place, _ in unions[0] ^ unions[1]}
    return [
        [{each for each in own if each[0] not in odd} for own in side] for side in every
    ]


def _nodes(text: str) -> list[str]:
    """Return what is above a leaf, at each depth.

    Example:
        >>> _nodes("h.#.attn/q")
        ['h', 'h.#', 'h.#.attn']
    """
    return [text[:i] for i, char in enumerate(text) if char in "/."] or [""]
