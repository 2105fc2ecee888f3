"""Which part of the source is which of the target.

All parts that could be each other have the same numbers, so both models answer alike
whatever the table is. Then one part at a time gets other numbers: of a source and of a
target that change the answers alike, one is the other. Parts that no answer tells apart
stay tied, and names decide them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from treeadapt.porting.drafts.rows import numberless
from treeadapt.porting.matching.cuts import Shape, could_be
from treeadapt.porting.matching.orders import (
    KINDS,
    Blind,
    Drawn,
    Ordering,
    Sizes,
    orders_of,
)
from treeadapt.porting.matching.sides import (
    Base,
    ModelPart,
    Models,
    Numbers,
    Spot,
    Stretch,
)
from treeadapt.text.names import natural

#: The largest difference of answers with which models may still be the same one.
MOST_NOISE = 3e-3
_HOPELESS = 0.05  # a difference that other numbers will not make small
_MOST_EXCHANGES = 16  # of tied parts, tried after what names say

#: Paths of the target by path of the source, as names propose them.
Named: TypeAlias = Callable[[], Mapping[str, Sequence[str]]]


class DeadEndError(Exception):
    """With this cut, these orders or this choice, no table answers right."""


@dataclasses.dataclass(frozen=True)
class LikeParts:
    """Parts that could be each other, as many on both sides."""

    sources: tuple[ModelPart, ...]
    targets: tuple[ModelPart, ...]


@dataclasses.dataclass(frozen=True)
class Pairing:
    """A partner for each part.

    Attributes:
        pairs: of source and target.
        tied: sources that no answer tells apart.
    """

    pairs: tuple[tuple[ModelPart, ModelPart], ...]
    tied: tuple[tuple[ModelPart, ...], ...]


class OrderFamily:
    """The orders that are allowed: all tables of a family use them.

    Args:
        sizes: of axes on both sides.
        tier: see ``orders_of``.
    """

    def __init__(self, sizes: Sizes, tier: int) -> None:
        self.sizes, self.tier = sizes, tier
        self.blind = functools.lru_cache(maxsize=4_096)(self._blind)

    def orders(self, source: Shape, target: Shape) -> list[Ordering]:
        """Return the orders from one shape to another."""
        return orders_of(source, target, self.sizes, self.tier)

    def _blind(self, sources: tuple[Shape, ...], targets: tuple[Shape, ...]) -> Blind:
        every = [
            (one, two, self.orders(one, two))
            for one, two in itertools.product(sources, targets)
        ]
        return Blind(sources, targets, every)

    def drawn(self, group: LikeParts, rng: np.random.Generator, kind: int) -> Drawn:
        """Draw numbers that no order within a group tells apart."""
        shapes = (
            tuple(dict.fromkeys(shape for slot in slots for shape in slot.shapes))
            for slots in (group.sources, group.targets)
        )
        return self.blind(*shapes).draw(rng, kind)


def grouped(
    sources: Sequence[ModelPart], targets: Sequence[ModelPart]
) -> list[LikeParts]:
    """Return the parts that could be each other together."""
    left = [
        (side, slot) for side, each in enumerate((sources, targets)) for slot in each
    ]
    groups = []
    while left:
        part = [left.pop(0)]
        for side, slot in part:
            near = {
                id(each)
                for other, each in left
                if other != side
                and each.size == slot.size
                and any(could_be(a, b) for a in slot.shapes for b in each.shapes)
            }
            part += [pair for pair in left if id(pair[1]) in near]
            left = [pair for pair in left if id(pair[1]) not in near]
        ones, twos = (tuple(slot for own, slot in part if own == n) for n in (0, 1))
        if len(ones) != len(twos):
            raise DeadEndError(f"no part of the other side is like {part[0][1].path}")
        groups.append(LikeParts(ones, twos))
    return groups


def blind_numbers(
    family: OrderFamily,
    groups: Sequence[LikeParts],
    rng: np.random.Generator,
    kind: int,
) -> tuple[Numbers, Numbers]:
    """Draw numbers for both sides of which no table of the family changes any."""
    old: dict[Spot, np.ndarray] = {}
    new: dict[Spot, np.ndarray] = {}
    for group in groups:
        drawn = family.drawn(group, rng, kind)
        for slot in group.sources:
            old |= drawn.of(0, slot)
        for slot in group.targets:
            new |= drawn.of(1, slot)
    return old, new


def blind_base(
    models: Models,
    family: OrderFamily,
    groups: Sequence[LikeParts],
    rng: np.random.Generator,
    kind: int,
) -> Base:
    """Ask both models with blind numbers."""
    return Base(models, *blind_numbers(family, groups, rng, kind))


def least_noise(
    models: Models,
    family: OrderFamily,
    groups: Sequence[LikeParts],
    rng: np.random.Generator,
) -> float:
    """Return how far blind answers are apart, at best, with the kinds of draws."""
    least = np.inf
    for kind in range(KINDS):
        least = min(least, blind_base(models, family, groups, rng, kind).noise)
        if least <= MOST_NOISE or (kind and _HOPELESS < least < np.inf):
            break
    return least


def pairings(
    models: Models,
    family: OrderFamily,
    groups: Sequence[LikeParts],
    rng: np.random.Generator,
    named: Named,
) -> Iterator[Pairing]:
    """Yield pairs of parts: one pairing, and others if some are tied.

    Raises:
        DeadEndError: no pairing answers right.
    """
    groups = _split(models, family, groups, rng)
    ties = [group for group in groups if len(group.sources) > 1]
    pairs = [(g.sources[0], g.targets[0]) for g in groups if len(g.sources) == 1]
    chosen = [_by_names(group, named()) for group in ties]
    tied = tuple(group.sources for group in ties)
    yield Pairing((*pairs, *itertools.chain(*chosen)), tied)
    exchanges = (
        (number, i, j)
        for number, each in enumerate(chosen)
        for i, j in itertools.combinations(range(len(each)), 2)
    )
    for number, i, j in itertools.islice(exchanges, _MOST_EXCHANGES):
        other = list(chosen[number])
        (one, two), (three, four) = other[i], other[j]
        other[i], other[j] = (one, four), (three, two)
        rest = itertools.chain(*(c for n, c in enumerate(chosen) if n != number))
        yield Pairing((*pairs, *rest, *other), tied)


def _split(
    models: Models,
    family: OrderFamily,
    groups: Sequence[LikeParts],
    rng: np.random.Generator,
) -> list[LikeParts]:
    """Split groups until no draw tells their parts apart."""
    groups = list(groups)
    idle = refused = kind = 0
    while idle < KINDS and any(len(group.sources) > 1 for group in groups):
        kind += 1
        base = blind_base(models, family, groups, rng, kind)
        if base.noise > MOST_NOISE:
            refused += 1
            if refused > KINDS:
                raise DeadEndError(
                    f"with numbers that no order changes the answers differ by "
                    f"{base.noise:.2g}"
                )
            continue
        apart = [
            part
            for group in groups
            for part in _parted(base, family, group, rng, kind + 1)
        ]
        idle = idle + 1 if len(apart) == len(groups) else 0
        groups = apart
    return groups


def _parted(
    base: Base,
    family: OrderFamily,
    group: LikeParts,
    rng: np.random.Generator,
    kind: int,
) -> list[LikeParts]:
    """Return the groups of parts that change the answers alike."""
    if len(group.sources) == 1:
        return [group]
    drawn = family.drawn(group, rng, kind)
    clusters: list[tuple[np.ndarray, list[ModelPart], list[ModelPart]]] = []
    for slot in group.sources:
        change = base.old(drawn.of(0, slot))
        near = _nearest(base, change, clusters)
        if near is None:
            clusters.append((change, [slot], []))
        else:
            clusters[near][1].append(slot)
    rest: tuple[list[ModelPart], list[ModelPart]] = ([], [])
    for slot in group.targets:
        near = _nearest(base, base.new(drawn.of(1, slot)), clusters)
        (rest[1] if near is None else clusters[near][2]).append(slot)
    parts = []
    for _, ones, twos in clusters:
        if len(ones) == len(twos):
            parts.append(LikeParts(tuple(ones), tuple(twos)))
        else:
            rest[0].extend(ones)
            rest[1].extend(twos)
    if rest[0]:
        parts.append(LikeParts(tuple(rest[0]), tuple(rest[1])))
    return parts


def _nearest(
    base: Base,
    change: np.ndarray,
    clusters: Sequence[tuple[np.ndarray, list[ModelPart], list[ModelPart]]],
) -> int | None:
    """Return which cluster a change of the answers belongs to."""
    errors = [base.apart(change, each) for each, *_ in clusters]
    best = min(range(len(errors)), key=errors.__getitem__, default=None)
    return best if best is not None and errors[best] <= base.tolerance else None


def _by_names(
    group: LikeParts, named: Mapping[str, Sequence[str]]
) -> list[tuple[ModelPart, ModelPart]]:
    """Return pairs of tied parts by what their names propose, then by their order."""
    left = sorted(group.targets, key=_rank)
    pairs = []
    for source in sorted(group.sources, key=_rank):
        by_name = (t for t in left if t.path in named.get(source.path, ()))
        target = next(by_name, left[0])
        left.remove(target)
        pairs.append((source, target))
    return pairs


def _rank(slot: ModelPart) -> tuple[object, ...]:
    """Sort parts by their paths, without numbers first, then by where they are."""
    place = slot.places[0]
    starts = [step[1] for step in place.steps if isinstance(step, Stretch)]
    return numberless(place.path), natural(place.path), starts
