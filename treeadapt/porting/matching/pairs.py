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
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from treeadapt.porting.drafts.rows import numberless
from treeadapt.porting.matching.cuts import Shape, could_be
from treeadapt.porting.matching.layers import (
    Layered,
    by_layer,
    family_of,
    layers_of,
    numbers_of,
)
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
#: The largest one that rounding makes in tiny models: with less they are the same one.
#: What a norm nearly cancels, as a factor of the embedding, makes a larger one.
ROUNDED = 1e-5
_HOPELESS = 0.05  # a difference that other numbers will not make small
_SURE_DRAWS = 2  # with one, a change that is lacking may show too little
_CONFIRMED = 1e-4  # a difference with which a guess is right
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


def noise_of(
    models: Models,
    family: OrderFamily,
    groups: Sequence[LikeParts],
    rng: np.random.Generator,
) -> float:
    """Return how far blind answers are apart with two kinds of draws.

    Draws with which they are far apart are left out if there is another one: numbers
    may be too large for a model.
    """
    near: list[float] = []
    least = np.inf
    for kind in range(KINDS):
        noise = blind_base(models, family, groups, rng, kind).noise
        least = min(least, noise)
        near += [noise] * (noise <= MOST_NOISE)
        is_hopeless = kind > 0 and not near and _HOPELESS < least < np.inf
        if len(near) == _SURE_DRAWS or is_hopeless:
            break
    return max(near, default=least)


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
    groups = _whole_leaves(groups)
    ties = [group for group in groups if len(group.sources) > 1]
    pairs = [(g.sources[0], g.targets[0]) for g in groups if len(g.sources) == 1]
    alike = _likeness(pairs)
    chosen = [_by_names(group, alike, named()) for group in ties]
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
    layers = layers_of(slot for group in groups for slot in group.sources)
    layers |= layers_of(slot for group in groups for slot in group.targets)
    split = _Split(models, family, rng, layers)
    groups = split.into_layers(groups)
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
        apart = split.parted(base, groups, kind + 1)
        idle = idle + 1 if len(apart) == len(groups) else 0
        groups = apart
    return split.with_idle_tied(groups) if split.has_guessed else groups


@dataclasses.dataclass
class _Split:
    """What groups are split by: the answers, after guesses that they confirm."""

    models: Models
    family: OrderFamily
    rng: np.random.Generator
    layers: Mapping[ModelPart, Layered]
    has_guessed: bool = False

    def into_layers(self, groups: Sequence[LikeParts]) -> list[LikeParts]:
        """Return the groups of each layer, where both sides have them in one order."""
        by_layer = [self._by_layer(group) for group in groups]
        every = [part for parts in by_layer for part in parts]
        if len(every) == len(groups):
            return [*groups]
        self.has_guessed = True
        if self._is_right(every):
            return every
        for place, parts in enumerate(by_layer):
            if len(parts) > 1:
                before = itertools.chain(*by_layer[:place])
                if not self._is_right([*before, *parts, *groups[place + 1 :]]):
                    by_layer[place] = [groups[place]]
        return [part for parts in by_layer for part in parts]

    def _by_layer(self, group: LikeParts) -> list[LikeParts]:
        """Return the parts of each layer; the group if both sides have other counts."""
        sides = [by_layer(s, self.layers) for s in (group.sources, group.targets)]
        counts = [[len(slots) for slots in side] for side in sides]
        if counts[0] != counts[1]:
            return [group]
        return [*map(LikeParts, *sides)]

    def _is_right(self, groups: Sequence[LikeParts]) -> bool:
        """Return whether the answers confirm a guess."""
        base = blind_base(self.models, self.family, groups, self.rng, 0)
        return base.noise <= _CONFIRMED

    def parted(
        self, base: Base, groups: Sequence[LikeParts], kind: int
    ) -> list[LikeParts]:
        """Return the groups of parts that change the answers alike.

        The parts of one layer are asked. If those of the others may be split alike, and
        the answers confirm it, they are not.
        """
        first: dict[Hashable, tuple[LikeParts, list[LikeParts]]] = {}
        likely: list[list[LikeParts]] = []
        for group in groups:
            key = self._labels(group)
            if len(group.sources) == 1:
                likely.append([group])
            elif key in first:
                likely.append(self._like(group, first[key][1]))
            else:
                parts = _parted(base, self.family, group, self.rng, kind)
                likely.append(parts)
                first[key] = group, parts
        every = [part for parts in likely for part in parts]
        asked = {id(group) for group, _ in first.values()}
        guessed = [
            len(parts) > 1 and id(group) not in asked
            for group, parts in zip(groups, likely, strict=True)
        ]
        if not any(guessed) or self._is_right(every):
            return every
        return [
            part
            for group, parts, is_guess in zip(groups, likely, guessed, strict=True)
            for part in (
                _parted(base, self.family, group, self.rng, kind) if is_guess else parts
            )
        ]

    def with_idle_tied(self, groups: Sequence[LikeParts]) -> list[LikeParts]:
        """Return groups in which parts on which no answer depends are together.

        A guess that such a part is that of its layer was not confirmed by any answer.
        """
        base = blind_base(self.models, self.family, groups, self.rng, 0)
        alone: dict[Hashable, list[LikeParts]] = {}
        for group in groups:
            if len(group.sources) == 1:
                alone.setdefault(self._labels(group), []).append(group)
        idle: dict[Hashable, list[LikeParts]] = {}
        for each in (each for each in alone.values() if len(each) > 1):
            numbers: dict[Spot, np.ndarray] = {}
            for group in each:
                drawn = self.family.drawn(group, self.rng, 1)
                numbers |= drawn.of(0, group.sources[0])
            change = base.old(numbers)
            if base.apart(change, np.zeros_like(change)) <= base.tolerance:
                shapes = each[0].sources[0].shapes, each[0].targets[0].shapes
                idle.setdefault(shapes, []).extend(each)
        gone = {id(group) for each in idle.values() for group in each}
        ties = [
            LikeParts(
                tuple(slot for group in each for slot in group.sources),
                tuple(slot for group in each for slot in group.targets),
            )
            for each in idle.values()
        ]
        return [*(group for group in groups if id(group) not in gone), *ties]

    def _labels(self, group: LikeParts) -> Hashable:
        """Return what groups of several layers have in common."""
        sides = group.sources, group.targets
        return tuple(
            frozenset(Counter(self.layers[s].label for s in side).items())
            for side in sides
        )

    def _like(self, group: LikeParts, parts: Sequence[LikeParts]) -> list[LikeParts]:
        """Return the parts of a group, split like those of another layer."""
        sides = []
        for slots, each in (
            (group.sources, [part.sources for part in parts]),
            (group.targets, [part.targets for part in parts]),
        ):
            by_label = {self.layers[slot].label: slot for slot in slots}
            if len(by_label) < len(slots):
                return [group]
            sides.append(
                [tuple(by_label[self.layers[s].label] for s in part) for part in each]
            )
        return [*map(LikeParts, *sides)]


def _parted(
    base: Base,
    family: OrderFamily,
    group: LikeParts,
    rng: np.random.Generator,
    kind: int,
) -> list[LikeParts]:
    """Return the groups of parts that change the answers alike."""
    drawn = family.drawn(group, rng, kind)
    changes = [(0, slot, base.old(drawn.of(0, slot))) for slot in group.sources]
    changes += [(1, slot, base.new(drawn.of(1, slot))) for slot in group.targets]
    parts, rest = [], LikeParts((), ())
    for cluster in _clusters(base, changes):
        ones, twos = (
            tuple(slot for own, slot, _ in cluster if own == side) for side in (0, 1)
        )
        if len(ones) == len(twos):
            parts.append(LikeParts(ones, twos))
        else:
            rest = LikeParts(rest.sources + ones, rest.targets + twos)
    return [*parts, *([rest] if rest.sources else [])]


def _clusters(
    base: Base, changes: Sequence[tuple[int, ModelPart, np.ndarray]]
) -> Iterator[list[tuple[int, ModelPart, np.ndarray]]]:
    """Yield parts that change the answers alike, or nearly so, through others.

    Two that are near a third are with it: the nearest alone might be another one.
    """
    left = list(changes)
    while left:
        cluster = [left.pop(0)]
        for *_, change in cluster:
            near = [base.apart(change, each[-1]) <= base.tolerance for each in left]
            cluster += itertools.compress(left, near)
            left = [
                each for each, is_near in zip(left, near, strict=True) if not is_near
            ]
        yield cluster


def _whole_leaves(groups: Sequence[LikeParts]) -> list[LikeParts]:
    """Return groups in which tied parts follow the other parts of their leaf.

    Two biases of a gate may be exchanged, those of another gate not: of two leaves that
    answers tell apart somewhere, no part goes to the partner of the other one.
    """
    partners: dict[str, Counter[str]] = defaultdict(Counter)
    for group in groups:
        if len(group.sources) == 1:
            partners[group.sources[0].path][group.targets[0].path] += 1
    sole = {path: [*each] for path, each in partners.items() if len(each) == 1}
    parted: list[LikeParts] = []
    for group in groups:
        left = [*group.targets]
        rest = []
        for source in group.sources if len(group.sources) > 1 else ():
            own = [t for t in left if [t.path] == sole.get(source.path)]
            if len(own) == 1:
                left.remove(own[0])
                parted.append(LikeParts((source,), (own[0],)))
            else:
                rest.append(source)
        if len(group.sources) == 1:
            parted.append(group)
        elif rest:
            parted.append(LikeParts(tuple(rest), tuple(left)))
    return parted


def _likeness(
    pairs: Sequence[tuple[ModelPart, ModelPart]],
) -> Callable[[ModelPart, ModelPart], int]:
    """Return how many decided pairs two parts are like, some numbers further on.

    An expert that no input reaches is paired as the others are.
    """
    decided: dict[Hashable, list[tuple[ModelPart, ModelPart]]] = defaultdict(list)
    for source, target in pairs:
        decided[family_of(source), family_of(target)].append((source, target))

    def alike(source: ModelPart, target: ModelPart) -> int:
        pairs = decided[family_of(source), family_of(target)]
        return sum(
            bool(_ahead(source, one)) and _ahead(source, one) == _ahead(target, two)
            for one, two in pairs
        )

    return alike


def _ahead(part: ModelPart, other: ModelPart) -> set[int]:
    """Return by how much the numbers of a part are ahead of those of another one."""
    numbers = zip(numbers_of(part), numbers_of(other), strict=True)
    return {one - two for one, two in numbers if one != two}


def _by_names(
    group: LikeParts,
    alike: Callable[[ModelPart, ModelPart], int],
    named: Mapping[str, Sequence[str]],
) -> list[tuple[ModelPart, ModelPart]]:
    """Return pairs of tied parts: like others, by their names, then by their order."""
    left = sorted(group.targets, key=_rank)
    pairs = []
    for source in sorted(group.sources, key=_rank):
        by_name = (t for t in left if t.path in named.get(source.path, ()))
        target = next(by_name, left[0])
        likest = max(left, key=functools.partial(alike, source))
        target = likest if alike(source, likest) else target
        left.remove(target)
        pairs.append((source, target))
    return pairs


def _rank(slot: ModelPart) -> tuple[object, ...]:
    """Sort parts by their paths, without numbers first, then by where they are."""
    place = slot.places[0]
    starts = [step[1] for step in place.steps if isinstance(step, Stretch)]
    return numberless(place.path), natural(place.path), starts
