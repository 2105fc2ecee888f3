"""Rows from names and shapes: which leaf is which, for the whole model at once.

Leaves that differ in numbers only are one family (see ``families``). Families of one
size whose shapes allow it are candidates of each other. Words in common score them, and
what leaves next to both are paired with; one assignment has the largest sum. Where
families are left on both sides, a number becomes a part of their names, and all are
paired again. No name proves anything: every row is marked, with the other candidates.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from treeadapt.porting.drafts.families import (
    Family,
    families,
    finer_families,
    grouped_paths,
    place_of,
    ranked_texts,
)
from treeadapt.porting.drafts.fused import fusions
from treeadapt.porting.drafts.rows import DraftRow, numberless
from treeadapt.porting.drafts.shapes import AxisOrder, Turning, layouts
from treeadapt.porting.drafts.synonyms import Words

_MAX_FAMILIES = 4_000  # of a side
_MAX_ANCHORS = 2_000  # leaves with equal paths, whose neighbours others may be
_MAX_RIVALS = 200  # families of one size
_ALONE = 0.5  # of 2: what a word counts for that is within a longer text
_LEAST_MARGIN = 0.2  # of 2: how much better a pair is than its rivals
_LEAST_NAME = 0.2  # of 1: what a pair has in common, to say something of others
_ROUNDS = 3  # of neighbours that are paired, and pair others
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
    ones, twos, fused = fusions(ones, twos, words)
    while True:
        assignment = _Assignment(ones, twos, words, by_values)
        finer = finer_families(*assignment.left())
        if finer is None:
            break
        ones, twos = finer
    turning = Turning(assignment.proofs())
    rows = [each.row(turning) for each in fused]
    rows += [assignment.row(i, j, turning) for i, j in assignment.pairs.items()]
    return rows, sum(len(ones[i].paths) for i in assignment.crowded)


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
        for some, others in self._sizes.values():
            if len(others) > _MAX_RIVALS:
                self.crowded |= {*some}
                continue
            for i in some:
                for j in others:
                    if orders := layouts(*ones[i].dims, *twos[j].dims):
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
        names = {}
        for i, j in self._orders:
            both = meanings[0][i] & meanings[1][j]
            more = (alone[0][i] | meanings[0][i]) & (alone[1][j] | meanings[1][j])
            same = 2 * weight(both) + _ALONE * weight(more - both)
            names[i, j] = same / max(sums[0][i] + sums[1][j], 1e-9)
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
        votes = {}
        for i, j in names:
            a, b = self._ones[i].text, self._twos[j].text
            itself = (a, b) in anchors
            shares = [
                max(
                    2
                    * (both[node][other] - itself)
                    / max(counts[0][node] + counts[1][other] - 2 * itself, 1)
                    for other in _nodes(b)
                )
                for node in _nodes(a)
            ]
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
        united = {}
        for i, j in scores:
            (node, kind), (other, _) = ends[0][i], ends[1][j]
            some, others = (
                m.get(n, {}) for m, n in zip(modules, (node, other), strict=True)
            )
            each = [scores[i, j]]
            if kind in some:
                each += [
                    scores.get((some[k], others[k]), -1.0)
                    for k in some
                    if k in others and k != kind
                ]
            united[i, j] = sum(each) / len(each)
        return united

    def left(self) -> Iterator[tuple[Sequence[Family], set[int]]]:
        """Yield the families of each side, and numbers of those without a partner."""
        yield self._ones, {*range(len(self._ones))} - {*self.pairs} - self.crowded
        yield self._twos, {*range(len(self._twos))} - {*self.pairs.values()}

    def proofs(self) -> Iterator[tuple[str, str, bool]]:
        """Yield pairs of which shapes show whether they are turned around."""
        for i, j in self.pairs.items():
            ways = {order.turns for order in self._orders[i, j]}
            if len(ways) == 1 and (is_turned := ways.pop()) is not None:
                yield self._ones[i].text, self._twos[j].text, is_turned

    def row(self, i: int, j: int, turning: Turning) -> DraftRow:
        """Return the row of a pair, in the likeliest order of axes."""
        source, target = self._ones[i], self._twos[j]
        orders = self._orders[i, j]
        order = turning.likeliest(orders, source.text, target.text)
        checks = ["names"]
        if len(orders) > 1:
            checks.append("order of axes")
        if order.is_split:
            checks.append("order within an axis")
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


def _nodes(text: str) -> list[str]:
    """Return what is above a leaf, at each depth.

    Example:
        >>> _nodes("h.#.attn/q")
        ['h', 'h.#', 'h.#.attn']
    """
    return [text[:i] for i, char in enumerate(text) if char in "/."] or [""]
