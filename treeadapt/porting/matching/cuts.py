"""Ways to cut the leaves of both sides until their parts come out even.

Takes shapes by path; gives pairs of lists of slots, the fewest cuts first. Parts come
out even if, for each number of elements, both sides have as many of those that could be
each other by shape: layers of a scan, slices, parts of an axis or of each head. A leaf
may be two of the target (a tie), or two of the source one (a sum), and the end of an
axis may have no partner (padding).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from treeadapt.porting.drafts.rows import numberless, tokens_of
from treeadapt.porting.matching.layers import one_text
from treeadapt.porting.matching.sides import ModelPart, Spot, Step, Stretch
from treeadapt.text.names import listing

Shape: TypeAlias = tuple[int, ...]
Steps: TypeAlias = tuple[Step, ...]

_MOST_SLICES = 64  # of one axis
_MOST_STATES = 10_000  # Mamba, fused otherwise on both sides, takes 6,000
_MOST_PARTS = 4  # of one axis
_SIDES = "source", "target"
_LEAST_STACKED = 4  # leaves below a node, before it is a scan
_LEFT = 0.3  # what is still uneven, at least counts for that much of a cut
_ONE_BY_ONE = 4.0  # what it costs to cut the layers of one leaf, and not of another


@dataclasses.dataclass(frozen=True)
class LeafFamily:
    """Leaves that differ in numbers only, all cut alike.

    Attributes:
        paths: of the leaves.
        parts: the way to each part of a leaf, the same in all.
        shape: of a part, with axes of size 1.
        copies: families that hold the same numbers; of the source, what is added.
        joined: that shape with the parts of all heads on one axis: the other side may
            have other heads, as grouped queries do.
    """

    paths: tuple[str, ...]
    parts: tuple[Steps, ...]
    shape: Shape
    copies: tuple[LeafFamily, ...] = ()
    joined: Shape = ()

    @property
    def count(self) -> int:
        """How many parts there are in all leaves."""
        return len(self.paths) * len(self.parts)

    @property
    def size(self) -> int:
        """How many numbers a part has."""
        return math.prod(self.shape)

    @property
    def like(self) -> Shape:
        """The shape by which parts are compared with those of the other side."""
        return self.joined or self.shape

    def slots(self) -> list[ModelPart]:
        """Return one slot for each part."""
        every = [self._places(), *(copy._places() for copy in self.copies)]
        return [ModelPart(places) for places in zip(*every, strict=True)]

    def _places(self) -> list[Spot]:
        shape = without_ones(self.like)
        pairs = itertools.product(self.paths, self.parts)
        return [Spot(path, steps, shape) for path, steps in pairs]

    def cut(self, options: Sequence[tuple[Step, ...]]) -> list[LeafFamily]:
        """Return the families of parts that are made by some steps from each part."""
        by_shape: dict[tuple[Shape, Shape], list[Steps]] = defaultdict(list)
        for steps in options:
            shape = _shape_after(self.shape, steps)
            by_shape[shape, _joined_after(shape, steps)].append(steps)
        return [
            LeafFamily(
                self.paths,
                tuple(p + more for p in self.parts for more in steps),
                shape,
                joined=joined,
            )
            for (shape, joined), steps in by_shape.items()
        ]


class Cutting(NamedTuple):
    """Parts of an axis, or of each head along it."""

    axis: int
    heads: int
    sizes: tuple[int, ...]

    def steps(self, shape: Shape) -> list[tuple[Step, ...]]:
        """Return the steps to each part of an array of some shape."""
        ends = [0, *itertools.accumulate(self.sizes)]
        axis, pairs = self.axis, itertools.pairwise(ends)
        if self.heads == 1:
            return [(Stretch(axis, start, stop),) for start, stop in pairs]
        inner = shape[axis] // self.heads
        split = (*shape[:axis], self.heads, inner, *shape[axis + 1 :])
        return [(split, Stretch(axis + 1, start, stop)) for start, stop in pairs]

    def of(self, shape: Shape) -> Cutting | None:
        """Return the same for another array with one axis of this length."""
        length = self.heads * sum(self.sizes)
        axes = [axis for axis, n in enumerate(shape) if n == length]
        return self._replace(axis=axes[0]) if len(axes) == 1 else None

    @property
    def slices(self) -> bool:
        """Whether each part is one slice."""
        return {*self.sizes} == {1}

    @property
    def cost(self) -> float:
        """What it counts for: few parts that are equal are the likeliest."""
        kinds = len({*self.sizes})
        return 1 + 0.05 * len(self.sizes) + 1.5 * (kinds - 1) + 0.25 * (self.heads > 1)


#: The families of the source, and of the target.
Families: TypeAlias = tuple[tuple[LeafFamily, ...], tuple[LeafFamily, ...]]

#: Families that become one with fewer numbers, that one, and how many fewer.
Less: TypeAlias = tuple[tuple[LeafFamily, ...], LeafFamily, int]


def without_ones(shape: Shape) -> Shape:
    """Return a shape without its axes of size 1."""
    return tuple(n for n in shape if n != 1)


def _shape_after(shape: Shape, steps: tuple[Step, ...]) -> Shape:
    """Return the shape of what some steps lead to."""
    for step in steps:
        if isinstance(step, Stretch):
            size = step.stop - step.start
            shape = (*shape[: step.axis], size, *shape[step.axis + 1 :])
        else:
            shape = step
    return shape


def _joined_after(shape: Shape, steps: tuple[Step, ...]) -> Shape:
    """Return a shape with heads and what is left of each on one axis; else nothing."""
    if len(steps) != 2 or not isinstance(steps[1], Stretch):
        return ()
    axis = steps[1].axis
    return (*shape[: axis - 1], shape[axis - 1] * shape[axis], *shape[axis + 1 :])


def cuts(
    source: Mapping[str, Shape], target: Mapping[str, Shape]
) -> Iterator[tuple[list[ModelPart], list[ModelPart]]]:
    """Yield slots of both sides that come out even, the fewest cuts first."""
    ties = itertools.count()
    queue: list[tuple[float, int, float, Families, list[Uneven]]] = []
    seen: set[object] = set()

    def push(cost: float, sides: Families) -> None:
        key = frozenset(sides[0]), frozenset(sides[1])
        if key not in seen:
            seen.add(key)
            uneven = _uneven(sides)
            heapq.heappush(
                queue, (cost + _LEFT * len(uneven), next(ties), cost, sides, uneven)
            )

    for cost, (ones, twos) in _starts((_families(source), _families(target))):
        push(cost, (_unstacked(ones), _unstacked(twos)))
        push(cost + _ONE_BY_ONE, (ones, twos))
    while queue and len(seen) < _MOST_STATES:
        *_, cost, sides, uneven = heapq.heappop(queue)
        if not uneven:
            yield tuple([s for f in side for s in f.slots()] for side in sides)  # type: ignore[misc]
            continue
        for extra, near in _neighbours(sides, uneven):
            push(cost + extra, near)


def missing_leaf(source: Mapping[str, Shape], target: Mapping[str, Shape]) -> str:
    """Say which leaf one side may lack, if it lacks as many numbers; or ""."""
    sides = _families(source), _families(target)
    totals = [sum(f.count * f.size for f in families) for families in sides]
    more = int(totals[1] > totals[0])
    excess = abs(totals[1] - totals[0])
    as_many = [f for f in sides[more] if f.count * f.size == excess]
    if not excess or not as_many:
        return ""
    texts = [one_text(family.paths) for family in as_many]
    which = "it" if len(texts) == 1 else "one of these"
    which += f" may be missing in the {_SIDES[1 - more]}"
    return (
        f"{_numbers_of(totals)}, {excess:,} more, as many as in "
        f"{listing(texts, write=str)}: {which}. Let both models have it, or neither"
    )


def _numbers_of(totals: Sequence[int]) -> str:
    """Say how many numbers both sides have, the fewer first."""
    more = int(totals[1] > totals[0])
    return (
        f"the {_SIDES[1 - more]} has {totals[1 - more]:,} numbers, the {_SIDES[more]} "
        f"{totals[more]:,}"
    )


def why_uneven(source: Mapping[str, Shape], target: Mapping[str, Shape]) -> str:
    """Say that no cut that was tried makes both sides even, and what to look for."""
    if missing := missing_leaf(source, target):
        return missing
    sides = _families(source), _families(target)
    totals = [sum(f.count * f.size for f in families) for families in sides]
    have = _numbers_of(totals)
    excess = abs(totals[1] - totals[0])
    alone = [
        one_text(family.paths)
        for own, other in (sides, sides[::-1])
        for family in own
        if not any(could_be(family.shape, each.shape) for each in other)
    ]
    text = f" (no leaf of the other side is like {listing(alone, write=str)})"
    look = (
        "look for a leaf that one side lacks, or that it has as a sum of two arrays"
        if excess
        else "look for a leaf of more parts, or parts that are padded on both sides"
    )
    return (
        f"{have}, and no cut that was tried makes them even{text * bool(alone)}, of "
        f"slices and of two to {_MOST_PARTS} parts of an axis or of each head: {look}"
    )


def _families(leaves: Mapping[str, Shape]) -> tuple[LeafFamily, ...]:
    """Return leaves that differ in numbers only together."""
    groups: dict[tuple[str, Shape], list[str]] = defaultdict(list)
    for path, shape in leaves.items():
        groups[numberless(path), shape].append(path)
    return tuple(LeafFamily(tuple(p), ((),), shape) for (_, shape), p in groups.items())


def _starts(sides: Families) -> Iterator[tuple[float, Families]]:
    """Yield families of which both sides have as many numbers, and what that costs.

    Where one side has more, a leaf of the target may be a copy, two vectors of the
    source may add up to one, or the end of an axis may be padding; one or two such
    leaves are tried.
    """
    totals = [sum(f.count * f.size for f in families) for families in sides]
    excess = totals[1] - totals[0]
    if not excess:
        yield 0.0, sides
        return
    larger = int(excess > 0)
    trimmed = [*_trimmed(sides, larger)]
    every = [*trimmed, *(_tied(sides[1], trimmed) if larger else _summed(sides[0]))]
    own = sides[larger]
    alone = [(each,) for each in every if each[-1] == abs(excess)]
    for chosen in alone or itertools.combinations(every, 2):
        gone = {family for replaced, *_ in chosen for family in replaced}
        if sum(amount for *_, amount in chosen) == abs(excess) and len(gone) == sum(
            len(replaced) for replaced, *_ in chosen
        ):
            new = (family for _, family, _ in chosen)
            kept = (*(family for family in own if family not in gone), *new)
            cost = float(len(chosen))
            yield cost, (sides[0], kept) if larger else (kept, sides[1])


def _tied(families: Sequence[LeafFamily], trimmed: Sequence[Less]) -> Iterator[Less]:
    """Yield two families that may be copies, as one; both may be padded."""
    whole: list[Less] = [((family,), family, 0) for family in families]
    for (ones, one, less), (twos, two, _) in itertools.combinations(
        [*whole, *trimmed], 2
    ):
        is_pair = ones != twos and one.count == two.count
        if is_pair and sorted(one.shape) == sorted(two.shape):
            tied = dataclasses.replace(one, copies=(two,))
            yield (*ones, *twos), tied, less + twos[0].count * twos[0].size


def _summed(families: Sequence[LeafFamily]) -> Iterator[Less]:
    """Yield two families of vectors that may add up to one: biases of an LSTM."""
    vectors = [family for family in families if len(family.shape) == 1]
    for one, two in itertools.combinations(vectors, 2):
        if one.shape == two.shape and one.count == two.count:
            summed = dataclasses.replace(one, copies=(two,))
            yield (one, two), summed, two.count * two.size
    for family in vectors:
        for halves in _by_number(family.paths):
            first, second = (dataclasses.replace(family, paths=p) for p in halves)
            summed = dataclasses.replace(first, copies=(second,))
            yield (family,), summed, second.count * second.size


def _by_number(paths: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Yield paths in two parts: a number of them, as in bias_1 and bias_2, has two."""
    for column in zip(*map(tokens_of, paths), strict=True):
        values = [*dict.fromkeys(column)]
        pairs = [*zip(paths, column, strict=True)]
        halves = [tuple(path for path, own in pairs if own == each) for each in values]
        if len(values) == 2 and len(halves[0]) == len(halves[1]):
            yield halves


def _trimmed(sides: Families, side: int) -> Iterator[Less]:
    """Yield a family, the same as long as one of the other side, and what is less."""
    for family, other in itertools.product(sides[side], sides[1 - side]):
        more = Counter(family.shape) - Counter(other.shape)
        less = Counter(other.shape) - Counter(family.shape)
        if more.total() != 1 or less.total() != 1 or family.count != other.count:
            continue
        (long,), (short,) = more, less
        if long > short:
            axis = family.shape.index(long)
            for start in (0, long - short):
                step = Stretch(axis, start, start + short)
                (trimmed,) = family.cut([(step,)])
                amount = family.count * (family.size - trimmed.size)
                yield (family,), trimmed, amount


def _unstacked(families: tuple[LeafFamily, ...]) -> tuple[LeafFamily, ...]:
    """Cut the layers of each scan: all leaves below a node have one axis in common."""
    below: dict[str, list[LeafFamily]] = defaultdict(list)
    for family in families:
        nodes = family.paths[0].split("/")
        for stop in range(1, len(nodes)):
            below["/".join(nodes[:stop])].append(family)
    cut: dict[LeafFamily, list[LeafFamily]] = {}
    for members in below.values():
        open_ = [f for f in members if f not in cut and not f.copies]
        if len(members) < _LEAST_STACKED or len(open_) < len(members):
            continue
        for axis in (0, 1):
            sizes = {(*f.shape, 0, 0)[axis] for f in members}
            if len(sizes) == 1 and 1 < min(sizes) <= _MOST_SLICES:
                layers = Cutting(axis, 1, (1,) * min(sizes))
                cut |= {f: f.cut(layers.steps(f.shape)) for f in members}
                break
    return tuple(part for family in families for part in cut.get(family, [family]))


@dataclasses.dataclass(frozen=True)
class Uneven:
    """Parts of one size that could be each other, more of them on one side."""

    size: int
    side: int
    families: tuple[LeafFamily, ...]


def _uneven(sides: Families) -> list[Uneven]:
    """Return where parts do not come out even, the largest first."""
    by_size: dict[int, list[tuple[int, LeafFamily]]] = defaultdict(list)
    for side, families in enumerate(sides):
        for family in families:
            by_size[family.size].append((side, family))
    found = []
    for size in sorted(by_size, reverse=True):
        for part in components(by_size[size]):
            over = sum(family.count * (1 - 2 * side) for side, family in part)
            if over:
                side = int(over < 0)
                more = tuple(family for own, family in part if own == side)
                found.append(Uneven(size, side, more))
    return found


def components(
    families: Sequence[tuple[int, LeafFamily]],
) -> Iterator[list[tuple[int, LeafFamily]]]:
    """Yield families of both sides that could be each other by shape, together."""
    left = list(families)
    while left:
        part = [left.pop()]
        for side, family in part:
            near = [
                (other, each)
                for other, each in left
                if other != side and could_be(family.like, each.like)
            ]
            part += near
            left = [each for each in left if each not in near]
        yield part


@functools.lru_cache(maxsize=65_536)
def could_be(one: Shape, two: Shape) -> bool:
    """Return whether axes of one shape, in some order, make those of the other."""
    one, two = without_ones(one), without_ones(two)
    fine, coarse = (one, two) if len(one) >= len(two) else (two, one)
    return any(True for _ in assignments(fine, coarse))


def assignments(fine: Shape, coarse: Shape) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield for each coarse axis the fine axes that make it, in every way."""
    if not coarse:
        if math.prod(fine) == 1:
            yield ()
        return

    def ways(axis: int, free: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if axis == len(coarse):
            if not free:
                yield ()
            return
        for count in range(1, len(free) + 1):
            for own in itertools.combinations(free, count):
                if math.prod(fine[a] for a in own) == coarse[axis]:
                    rest = tuple(a for a in free if a not in own)
                    for more in ways(axis + 1, rest):
                        yield (own, *more)

    yield from ways(0, tuple(range(len(fine))))


def _neighbours(
    sides: Families, uneven: Sequence[Uneven]
) -> Iterator[tuple[float, Families]]:
    """Yield both sides with one family more cut, tied, or without its spare end."""
    worst = uneven[0]
    own, other = sides[worst.side], sides[1 - worst.side]
    counts = _reachable(other)

    def with_(old: Sequence[LeafFamily], new: Sequence[LeafFamily]) -> Families:
        kept = (*(family for family in own if family not in old), *new)
        return (kept, other) if worst.side == 0 else (other, kept)

    for family in worst.families:
        if family.copies or family.size == 1:
            continue
        for cutting in _cuttings_twice(family.shape, frozenset(counts)):
            for alike in _alike(family, cutting, own):
                parts = [
                    part for each, c in alike for part in each.cut(c.steps(each.shape))
                ]
                if all(
                    part.size in counts or _cuttings(part.shape, frozenset(counts))
                    for part in parts
                ):
                    yield cutting.cost, with_([each for each, _ in alike], parts)


def _alike(
    family: LeafFamily, cutting: Cutting, own: Sequence[LeafFamily]
) -> Iterator[list[tuple[LeafFamily, Cutting]]]:
    """Yield a family, and all that may be cut in the same way for the same reason.

    Those are families of its shape; those next to it with an axis as long, as a bias
    is; and of slices those below a node of its path.
    """
    yield [(family, cutting)]
    free = [each for each in own if not each.copies]
    same = [(each, cutting) for each in free if each.shape == family.shape]
    if len(same) > 1:
        yield same
    node = _node(family)
    beside = [(each, cutting.of(each.shape)) for each in free if _node(each) == node]
    near = [(each, c) for each, c in beside if c is not None and each is not family]
    if near and not cutting.slices:
        yield [(family, cutting), *near]
    nodes = family.paths[0].split("/") if cutting.slices else []
    last = len(same)
    for depth in range(len(nodes) - 1, -1, -1):
        start = "".join(f"{node}/" for node in nodes[:depth])
        below = [
            (each, cutting)
            for each in free
            if each.paths[0].startswith(start)
            and each.shape[cutting.axis : cutting.axis + 1] == (len(cutting.sizes),)
        ]
        if len(below) > max(1, last):
            yield below
            last = len(below)


def _node(family: LeafFamily) -> str:
    """Return the path of the module that leaves are in, without numbers."""
    return re.sub(r"[./][^./]*$", "", numberless(family.paths[0]))


def _reachable(families: Sequence[LeafFamily]) -> set[int]:
    """Return the sizes of parts into which leaves could be cut."""
    sizes: set[int] = set()
    for family in families:
        size = family.size
        pairs = itertools.combinations(family.shape, 2)
        sizes |= {size} | {size // n for n in family.shape if n}
        sizes |= {size // (a * b) for a, b in pairs if a * b}
    return sizes


@functools.lru_cache(maxsize=65_536)
def _cuttings(shape: Shape, counts: frozenset[int]) -> list[Cutting]:
    """Return ways to cut an array.

    Slices first, then parts of an axis, then the same parts of each head.
    """
    cuttings = [
        Cutting(axis, 1, (1,) * n)
        for axis, n in enumerate(shape)
        if 1 < n <= _MOST_SLICES and math.prod(shape) // n in counts
    ]
    for axis, n in enumerate(shape):
        rest = math.prod(shape) // n if n else 0
        for heads in (h for h in range(1, n) if n % h == 0):
            fits = [
                size
                for size in range(1, n // heads)
                if heads * size * rest in counts and (heads == 1 or size > 1)
            ]
            cuttings += [Cutting(axis, heads, s) for s in _sums(fits, n // heads)]
    return cuttings


@functools.lru_cache(maxsize=65_536)
def _cuttings_twice(shape: Shape, counts: frozenset[int]) -> list[Cutting]:
    """Return ways to cut an array, slices that have to be cut again too.

    Experts with gate and up in one array are slices first, which no leaf is like.
    """
    again = [
        Cutting(axis, 1, (1,) * n)
        for axis, n in enumerate(shape)
        if 1 < n <= _MOST_SLICES
        and math.prod(shape) // n not in counts
        and _cuttings((*shape[:axis], 1, *shape[axis + 1 :]), counts)
    ]
    return [*_cuttings(shape, counts), *again]


def _sums(sizes: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Yield two to four sizes that make a total, in every order."""
    for count in range(2, _MOST_PARTS + 1):
        for first in itertools.product(sizes, repeat=count - 1):
            last = total - sum(first)
            if last in sizes:
                yield (*first, last)
