"""Rows from names and shapes: which leaf is which, for the whole model at once.

Leaves that differ in numbers only are one *family*. Families whose shapes allow it are
candidates of each other; words in common, and what their neighbours are paired with,
score them; one assignment has the largest sum. A pair is sure by its *margin*: what
the best assignment without it lacks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from treeadapt.drafts.anchors import Anchors, prefixes
from treeadapt.drafts.families import (
    Family,
    families,
    grouped_paths,
    place_of,
    rescued,
)
from treeadapt.drafts.fused import Fusion, fusions
from treeadapt.drafts.rows import DraftRow, is_count, tokens_of
from treeadapt.drafts.shapes import AxisOrder, layouts
from treeadapt.drafts.siblings import SiblingNumbers, numbers_of
from treeadapt.drafts.turning import Turning, distance, perm_of, turns
from treeadapt.drafts.words import Words, plain_words

LEAST_MARGIN = 0.4  # of 2, for a row without a mark
LEAST_NAME = 0.3  # of 1
LEAST_DISTINCT = 0.6  # of 1: words that tell it from others of its shape
_TABLES = {"embed", "positions", "types"}  # rows of vectors, which nothing turns
_COMMON = 0.7  # of a side's names: a word in so many is one of its parts
_BROAD = 0.25  # of 1: what a word counts for that is within a longer text
_KINDS = {"weight", "bias", "mean", "var"}  # of the leaves of one module
_MAX_FAMILIES = 4_000  # of a side
_MAX_ANCHORS = 2_000  # leaves with equal paths, whose neighbours others may be
_MAX_COMPONENT = 200  # families that are assigned at once


@dataclasses.dataclass(frozen=True)
class Unit:
    """What is assigned: a family, or two that hold the layers of one.

    Attributes:
        family: the first of them.
        tail: the family of the layers after those of whole blocks, if any.
        axis: along which both hold layers.
    """

    family: Family
    tail: Family | None = None
    axis: int = 0


def propose(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    words: Words,
    by_values: Sequence[DraftRow],
) -> tuple[list[DraftRow], int]:
    """Return a row for each pair of families, marked unless all speak for it.

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
    ones, twos = rescued(ones, twos), rescued(twos, ones)
    left = [Unit(each) for each in ones]
    right = _with_tails(twos, ones)
    named = [[unit.family for unit in units] for units in (left, right)]
    numbers = [*map(numbers_of, named, (source, target))]
    siblings = SiblingNumbers(named, numbers, words)
    assignment = _Assignment(left, right, words, by_values, siblings)
    rows = assignment.rows(fused)
    return rows, sum(len(ones[i].paths) for i in assignment.crowded)


def _segments(family: Family) -> list[tuple[str | None, ...]]:
    parts: list[list[str | None]] = [[]]
    for token in family.tokens:
        if token == "/" or token == ".":
            parts.append([])
        else:
            parts[-1].append(token)
    return [tuple(part) for part in parts]


def _with_tails(twos: list[Family], ones: list[Family]) -> list[Unit]:
    """Return the units of the target: blocks of layers with the layers after them."""
    counts = {n for each in ones for n in each.counts}
    by_end: dict[object, list[Family]] = defaultdict(list)
    for each in twos:
        if not each.counts:
            segments = _segments(each)
            for start in range(1, len(segments)):
                by_end[tuple(segments[start:])].append(each)
    units: list[Unit] = []
    used: set[Family] = set()
    for each in twos:
        segments = _segments(each)
        at = [i for i, segment in enumerate(segments) if None in segment]
        if len(each.counts) != 1 or not at:
            continue
        for tail in by_end.get(tuple(segments[at[-1] + 1 :]), ()):
            if tail in used or len(tail.shape) != len(each.shape):
                continue
            axis = _layer_axis(each, tail, counts)
            if axis is not None:
                units.append(Unit(each, tail, axis))
                used |= {each, tail}
                break
    return [*units, *(Unit(each) for each in twos if each not in used)]


def _layer_axis(blocks: Family, tail: Family, counts: set[int]) -> int | None:
    """Return the axis along which two families hold the layers of one, if any."""
    for axis in range(len(tail.shape)):
        rest = [n for i, n in enumerate(tail.shape) if i != axis]
        other = [n for i, n in enumerate(blocks.shape) if i != axis]
        total = blocks.counts[0] * blocks.shape[axis] + tail.shape[axis]
        if rest == other and total in counts and tail.shape[axis] < blocks.counts[0]:
            return axis
    return None


def _unit_layouts(source: Family, unit: Unit) -> list[AxisOrder]:
    """Return the layouts of a pair; of blocks with a tail, those of the tail."""
    other = unit.family
    if unit.tail is None:
        return layouts(source.dims, len(source.counts), other.dims, len(other.counts))
    axis = unit.axis
    total = other.counts[0] * other.shape[axis] + unit.tail.shape[axis]
    orders = []
    for slot, count in enumerate(source.counts):
        if count == total:
            dims = list(source.dims)
            dims[slot] = unit.tail.shape[axis]
            orders += [
                each
                for each in layouts(dims, len(source.counts), unit.tail.dims, 0)
                if each.source[slot] == each.target[axis] and each.source[slot]
            ]
    return orders


class _Assignment:
    """The best pairs of families, and how sure each is.

    Attributes:
        crowded: numbers of families of the source with too many candidates.
    """

    def __init__(
        self,
        ones: Sequence[Unit],
        twos: Sequence[Unit],
        words: Words,
        by_values: Sequence[DraftRow],
        siblings: SiblingNumbers,
    ) -> None:
        self._ones, self._twos, self._words = ones, twos, words
        self._siblings = siblings
        self._known = by_values
        self.crowded: set[int] = set()
        by_size: dict[int, list[int]] = defaultdict(list)
        for j, unit in enumerate(twos):
            size = math.prod(unit.family.dims)
            size += math.prod(unit.tail.dims) if unit.tail else 0
            by_size[size].append(j)
        self._layouts: dict[tuple[int, int], list[AxisOrder]] = {}
        self._rivals: tuple[dict[int, list[int]], dict[int, list[int]]]
        self._rivals = defaultdict(list), defaultdict(list)
        for i, unit in enumerate(ones):
            near = by_size.get(math.prod(unit.family.dims), ())
            if len(near) > _MAX_COMPONENT:
                self.crowded.add(i)
                continue
            for j in near:
                orders = _unit_layouts(unit.family, twos[j])
                if orders:
                    self._layouts[i, j] = orders
                    self._rivals[0][i].append(j)
                    self._rivals[1][j].append(i)
        meanings = [
            [Counter(words.of(text)) for text in texts] for texts in siblings.texts
        ]
        counts: Counter[str] = Counter()
        for each in itertools.chain(*meanings):
            counts.update(each.keys())
        total = len(ones) + len(twos) + 1
        self._weights = {
            word: 0.15 + math.log(total / n) / math.log(total)
            for word, n in counts.items()
        }
        self._meanings = meanings
        self._totals = [
            [sum(self._weights[word] * n for word, n in each.items()) for each in side]
            for side in meanings
        ]
        self._sets = [
            [_nth_words(each.elements()) for each in side] for side in meanings
        ]
        # A word of a longer text, the norm of `attn_norm`, tells nothing apart.
        self._broad = [
            [
                each | _nth_words(words.single(text))
                for each, text in zip(sets, texts, strict=True)
            ]
            for sets, texts in zip(self._sets, siblings.texts, strict=True)
        ]
        self._numberless = [
            [_nth_words(words.of(_numberless(unit.family.text))) for unit in side]
            for side in (ones, twos)
        ]
        self._vocabularies = [set().union(*sets) for sets in self._sets]
        self._known_words = {*words.meanings.values()} - {"layers"}
        self._shares = []
        for side in meanings:
            seen: Counter[str] = Counter()
            for each in side:
                seen.update(each.keys())
            self._shares.append({word: n / len(side) for word, n in seen.items()})

        # What is above a leaf, and what is left of its name.
        self._kinds = [
            [_module_and_kind(unit.family.text, words) for unit in side]
            for side in (ones, twos)
        ]
        self._modules: tuple[dict[str, dict[tuple[str, ...], int]], ...]
        self._modules = defaultdict(dict), defaultdict(dict)
        for modules, kinds in zip(self._modules, self._kinds, strict=True):
            for n, (module, kind) in enumerate(kinds):
                if _KINDS.issuperset(kind):
                    modules[module].setdefault(kind, n)

    def rows(self, fused: Sequence[Fusion]) -> list[DraftRow]:
        """Return the rows of arrays that hold others, and those of the best pairs."""
        names = {pair: self._name(*pair) for pair in self._layouts}
        # First by names alone; then neighbours of what was paired so count, too.
        scores = dict(names)
        for _ in range(2):
            chosen = self._assigned(scores)
            votes = self._votes(chosen, names)
            scores = {pair: names[pair] + votes.get(pair, 0.0) for pair in names}
            scores = self._of_modules(scores)
        chosen = self._assigned(scores)
        self._anchors = self._neighbours(chosen, names)
        sure = {
            (i, j)
            for (i, j), margin in chosen.items()
            if self._is_sure(i, j, margin, names[i, j])
        }
        sure -= {pair for pair in sure if self._may_be_swapped(*pair, chosen, sure)}
        turning = Turning(self._proofs(sure))
        rows = [each.row(turning) for each in fused]
        for pair in chosen:
            rows += self._rows_of(*pair, scores, turning, is_sure=pair in sure)
        return rows

    def _may_be_swapped(
        self,
        i: int,
        j: int,
        chosen: Iterable[tuple[int, int]],
        sure: Set[tuple[int, int]],
    ) -> bool:
        """Return whether a number alone tells a pair from one that is not sure.

        The first norm is most often that before attention. If nothing says so of the
        second, they may as well be the other way around.
        """
        for a, b in chosen:
            is_open = (a, b) not in sure
            if is_open and (i, b) in self._layouts and (a, j) in self._layouts:
                telling = self._sets[1][j] - self._broad[1][b]
                telling |= self._sets[0][i] - self._broad[0][a]
                telling &= self._sets[0][i] & self._sets[1][j]
                numbered = self._numberless[0][i] ^ self._numberless[1][j]
                if telling and telling <= numbered:
                    return True
        return False

    def _proofs(
        self, pairs: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[str, str, bool]]:
        """Yield sources and targets of which shapes show if they are turned around."""
        for i, j in pairs:
            one, two = self._ones[i].family, self._twos[j].family
            slots = len(one.counts), len(two.counts)
            ways = {turns(perm_of(order, *slots)) for order in self._layouts[i, j]}
            is_table = not _TABLES.isdisjoint(self._meanings[0][i])
            if len(ways) == 1 and not is_table:
                (is_turned,) = ways
                if is_turned is not None:
                    yield one.text, two.text, is_turned

    def _name(self, i: int, j: int) -> float:
        one, two = self._meanings[0][i], self._meanings[1][j]
        both = sum(
            self._weights[word] * min(n, two[word])
            for word, n in one.items()
            if word in two
        )
        every = self._totals[0][i] + self._totals[1][j]
        # A word of a longer text, the attention of `self_attn_layer_norm`.
        broad = self._broad[0][i] & self._broad[1][j]
        extra = self._weight(broad - (self._sets[0][i] & self._sets[1][j]))
        return (2 * both + _BROAD * extra) / every if every else 0.0

    def _of_modules(
        self, scores: Mapping[tuple[int, int], float]
    ) -> dict[tuple[int, int], float]:
        """Return scores of pairs with those of the leaves next to both.

        Leaves of one module go to one module: the weight goes where the bias may go.
        """
        united = {}
        for (i, j), score in scores.items():
            (parent, its_kind), (module, _) = self._kinds[0][i], self._kinds[1][j]
            every = [score]
            beside = (
                self._modules[0][parent] if its_kind in self._modules[0][parent] else {}
            )
            for kind, other in beside.items():
                two = self._modules[1][module].get(kind)
                if other != i and two is not None and two != j:
                    every.append(scores.get((other, two), -1.0))
            united[i, j] = sum(every) / len(every)
        return united

    def _assigned(
        self, scores: Mapping[tuple[int, int], float]
    ) -> dict[tuple[int, int], float]:
        """Return the pairs of the best assignment, and their margins."""
        from scipy.optimize import linear_sum_assignment

        chosen: dict[tuple[int, int], float] = {}
        for component in self._components:
            ones = sorted({i for i, _ in component})
            twos = sorted({j for _, j in component})
            row = {i: n for n, i in enumerate(ones)}
            column = {j: n for n, j in enumerate(twos)}
            table = np.full((len(ones), len(twos)), -100.0)
            for i, j in component:
                # An order of the files decides between equal names.
                apart = i / len(self._ones) - j / len(self._twos)
                table[row[i], column[j]] = scores[i, j] + 0.01 - 1e-3 * apart**2
            if max(table.shape) > _MAX_COMPONENT:
                self.crowded.update(ones)
                continue

            def best(table: np.ndarray) -> tuple[float, list[tuple[int, int]]]:
                a, b = linear_sum_assignment(table, maximize=True)
                pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
                pairs = [(x, y) for x, y in pairs if table[x, y] > -50]
                return sum(table[x, y] for x, y in pairs), pairs

            total, pairs = best(table)
            for x, y in pairs:
                score = table[x, y]
                table[x, y] = -100.0
                without, _ = best(table)
                table[x, y] = score
                # A pair that nothing else could take is as sure as it is scored.
                chosen[ones[x], twos[y]] = float(total - without)
        return chosen

    @functools.cached_property
    def _components(self) -> list[list[tuple[int, int]]]:
        """The candidates, divided into those that share no family."""
        parents: dict[Any, Any] = {}

        def root(node: Any) -> Any:
            while parents.setdefault(node, node) != node:
                parents[node] = parents[parents[node]]
                node = parents[node]
            return node

        for i, j in self._layouts:
            parents[root((0, i))] = root((1, j))
        groups: dict[Any, list[tuple[int, int]]] = {}
        for i, j in self._layouts:
            groups.setdefault(root((0, i)), []).append((i, j))
        return [*groups.values()]

    def _votes(
        self,
        chosen: Mapping[tuple[int, int], float],
        names: Mapping[tuple[int, int], float],
    ) -> dict[tuple[int, int], float]:
        """Return how many neighbours of two families are pairs, up to 1; not if 0."""
        anchors = self._neighbours(chosen, names)
        both, counts = anchors.both, anchors.counts
        above = [prefixes(unit.family.text) for unit in self._twos]
        votes: dict[tuple[int, int], float] = {}
        for i, candidates in self._rivals[0].items():
            a = self._ones[i].family.text
            near = [(counts[0][p], both.get(p, Counter())) for p in prefixes(a)]
            every = {q for _, many in near for q in many}
            for j in candidates:
                if every.isdisjoint(above[j]):
                    continue
                is_anchor = (a, self._twos[j].family.text) in anchors.pairs
                best = [
                    max(
                        (
                            2
                            * (many[q] - is_anchor)
                            / (count + counts[1][q] - 2 * is_anchor)
                            for q in above[j]
                            if q in many and many[q] > is_anchor
                        ),
                        default=0.0,
                    )
                    for count, many in near
                ]
                votes[i, j] = sum(best) / len(best)
        return votes

    def _neighbours(
        self,
        chosen: Mapping[tuple[int, int], float],
        names: Mapping[tuple[int, int], float],
    ) -> Anchors:
        """Return what is paired already, above each leaf."""
        pairs = [
            (self._ones[i].family.text, self._twos[j].family.text)
            for (i, j), margin in chosen.items()
            if margin >= 0.2 and names[i, j] >= 0.2
        ]
        for row in self._known:
            some = row.pairs[:_MAX_ANCHORS] if row.is_rest else row.pairs[:1]
            pairs += {(_numberless(a[0]), _numberless(b[0])) for a, b in some}
        return Anchors(pairs)

    def _is_sure(self, i: int, j: int, margin: float, name: float) -> bool:
        """Return whether names leave no doubt of a pair of the best assignment."""
        texts = self._ones[i].family.text, self._twos[j].family.text
        is_far = name < LEAST_NAME or margin < LEAST_MARGIN / 2
        if is_far or self._conflicts(i, j) or self._anchors.contradict(*texts):
            return False
        rivals = [other for other in self._rivals[0][i] if other != j]
        others = [other for other in self._rivals[1][j] if other != i]
        if (rivals or others) and self._siblings.differ(i, j):
            return False
        distinct = self._distinct(i, j, rivals, others)
        return distinct > 0.99 or (
            margin >= LEAST_MARGIN and distinct >= LEAST_DISTINCT
        )

    def _rows_of(
        self,
        i: int,
        j: int,
        scores: Mapping[tuple[int, int], float],
        turning: Turning,
        *,
        is_sure: bool,
    ) -> Iterator[DraftRow]:
        one, unit = self._ones[i].family, self._twos[j]
        orders = self._layouts[i, j]
        rivals = [other for other in self._rivals[0][i] if other != j]
        checks = []
        if not is_sure:
            kinds = self._kinds[1]
            rivals.sort(key=lambda b: (kinds[b][1] != kinds[j][1], -scores[i, b]))
            near = [self._twos[b].family.text for b in rivals[:3]]
            checks.append(
                f"the pair; or {', '.join(near)}" if near else "the pair; names differ"
            )
        layout = _likeliest(
            orders,
            len(one.counts),
            len(unit.family.counts),
            is_turned=turning.is_turned(one.text, unit.family.text),
        )
        if len(orders) > 1:
            checks.append("the order of axes; shapes allow others")
        if layout.is_split:
            checks.append("the order within the axis that is divided")
        if self._holds_parts(i, j):
            checks.append("the order of the parts that each holds")
        if unit.tail is not None:
            checks.append("which layers are in which block")
            yield from _tail_rows(one, unit, layout, tuple(checks))
            return
        yield _row(one, unit.family, layout, tuple(checks))

    def _holds_parts(self, i: int, j: int) -> bool:
        """Return whether arrays of several parts have other names, or order."""
        fused = {*self._words.fused}
        one, two = self._ones[i].family.text, self._twos[j].family.text
        is_fused = fused & ({*self._meanings[0][i]} | {*self._meanings[1][j]})
        kinds = {"weight", "kernel", "bias"}
        plain = [
            [w for w in plain_words(text) if w not in kinds] for text in (one, two)
        ]
        return bool(is_fused) and plain[0][-2:] != plain[1][-2:]

    def _conflicts(self, i: int, j: int) -> bool:
        """Return whether each of two names has a word in place of one of the other."""
        one, two = (
            {
                word
                for word in meanings.keys() - other.keys()
                if (word, 0) not in self._broad[1 - side][(j, i)[side]]
                and self._tells(side, word)
            }
            for side, meanings, other in (
                (0, self._meanings[0][i], self._meanings[1][j]),
                (1, self._meanings[1][j], self._meanings[0][i]),
            )
        )
        return bool(one and two) or bool((one | two) & self._words.marks)

    def _tells(self, side: int, word: str) -> bool:
        """Return whether a word could tell names of a side apart."""
        share = self._shares[side][word]
        return share <= _COMMON or (share < 1 and word in self._known_words)

    def _distinct(self, i: int, j: int, rivals: list[int], others: list[int]) -> float:
        """Return how well words that both names have tell the pair from its rivals.

        It is that of the nearest rival: 1 if all that tells the name from that of the
        rival is in both names, 0 if nothing is.
        """
        least = 1.0
        for side, name, other, many in ((1, j, i, rivals), (0, i, j, others)):
            for rival in many:
                least = min(least, self._told(side, name, rival, other))
                if least < LEAST_DISTINCT:
                    return least
        return least

    def _told(self, side: int, name: int, rival: int, other: int) -> float:
        """Return how much of what tells a name from a rival is true of another name.

        Args:
            side: where the name and its rival are.
            name: number of one of a pair.
            rival: number of another one that could take its place.
            other: number of the other one of the pair, on the other side.
        """
        has, lacks = self._sets[side][name], self._sets[side][rival]
        its = self._sets[1 - side][other]
        extra = has - self._broad[side][rival]
        absent = lacks - has
        if has == its and extra:
            return 1.0  # as most often
        vocabulary = self._vocabularies[1 - side]
        both = self._weight((absent & vocabulary) - self._broad[1 - side][other])
        both += self._weight(extra & its)
        # What no name on that side has counts little.
        odd = self._weight((extra & vocabulary) - its) + self._weight(absent & its)
        odd += 0.25 * self._weight(extra - vocabulary)
        return both / (both + odd) if both else 0.0

    def _weight(self, words: Set[tuple[str, int]]) -> float:
        return sum(self._weights.get(word, 1.0) for word, _ in words)


def _nth_words(words: Iterable[str]) -> frozenset[tuple[str, int]]:
    """Return words, each with how many times it was there before."""
    counts: Counter[str] = Counter()
    nth = []
    for word in words:
        nth.append((word, counts[word]))
        counts[word] += 1
    return frozenset(nth)


def _module_and_kind(text: str, words: Words) -> tuple[str, tuple[str, ...]]:
    """Return what is above a leaf, and what the rest of its path means.

    Example:
        >>> from treeadapt.drafts.words import load_words
        >>> _module_and_kind("h.#.attn.c_proj.kernel", load_words(None))
        ('h.#.attn.c_proj', ('weight',))
    """
    place = max(text.rfind("/"), text.rfind("."))
    return text[: max(place, 0)], words.of(text[place + 1 :])


def _numberless(path: str) -> str:
    return "".join("#" if is_count(token) else token for token in tokens_of(path))


def _likeliest(
    orders: Sequence[AxisOrder], first: int, second: int, *, is_turned: bool
) -> AxisOrder:
    """Return the layout with axes where models usually have them, of those that fit."""
    return min(
        orders,
        key=lambda each: distance(perm_of(each, first, second), is_turned=is_turned),
    )


def _row(
    one: Family, two: Family, layout: AxisOrder, checks: tuple[str, ...]
) -> DraftRow:
    source, target = place_of(one, layout.source), place_of(two, layout.target)
    dtypes = str(one.dtype), str(two.dtype)
    return DraftRow(
        (source,),
        (target,),
        dict(layout.sizes),
        tuple(grouped_paths(one, two, layout)),
        "shapes",
        checks,
        cast=dtypes if dtypes[0] != dtypes[1] else (),
    )


def _tail_rows(
    one: Family, unit: Unit, layout: AxisOrder, checks: tuple[str, ...]
) -> Iterator[DraftRow]:
    """Yield the row of the last layers, and that of the blocks before them."""
    two, tail = unit.family, unit.tail
    assert tail is not None
    axis = unit.axis
    atom = layout.target[axis][0]
    slot = next(s for s, atoms in enumerate(layout.source) if atoms == (atom,))
    blocks, size = two.shape[axis], two.counts[0]
    start = blocks * size
    grid = np.arange(len(one.paths)).reshape(one.counts)
    head_paths = [one.paths[i] for i in np.take(grid, range(start), slot).reshape(-1)]
    tail_paths = [
        one.paths[i]
        for i in np.take(grid, range(start, one.counts[slot]), slot).reshape(-1)
    ]
    shifts = list(one.shifts)
    shifts[slot] += start
    dtypes = str(one.dtype), str(two.dtype)
    cast = dtypes if dtypes[0] != dtypes[1] else ()
    yield DraftRow(
        (place_of(one, layout.source, shifts),),
        (place_of(tail, layout.target),),
        dict(layout.sizes),
        ((tuple(tail_paths), tail.paths),),
        "shapes",
        checks,
        cast=cast,
    )
    inner = 1 + max(layout.sizes)
    sizes = {**layout.sizes, atom: blocks, inner: size}
    source = list(layout.source)
    source[slot] = (atom, inner)
    target = [(inner,), *layout.target]
    yield DraftRow(
        (place_of(one, source),),
        (place_of(two, target),),
        sizes,
        ((tuple(head_paths), two.paths),),
        "shapes",
        checks,
        cast=cast,
    )
