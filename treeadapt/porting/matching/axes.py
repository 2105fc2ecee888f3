"""The order of the axes of each pair.

All other pairs have numbers that none of their orders changes, and one pair shows
distinct numbers: an order that answers otherwise than the source is wrong. Orders that
no answer tells apart are a symmetry, as of values with the map after them: the simplest
is taken for one pair, the others must fit it, and a choice with which nothing fits is
taken back.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from treeadapt.porting.drafts.rows import numberless
from treeadapt.porting.matching.layers import layers_of
from treeadapt.porting.matching.orders import KINDS, PLAIN, Blind, Ordering
from treeadapt.porting.matching.pairs import (
    MOST_NOISE,
    DeadEndError,
    OrderFamily,
    Pairing,
)
from treeadapt.porting.matching.sides import (
    Base,
    ModelPart,
    Models,
    Numbers,
    Spot,
    usual,
)

_MOST_ROUNDS = 40
#: The largest difference of models that are said to be near.
NEAREST = 0.05
_NEARLY = 5  # times the least difference is as little
_SURELY = 2e-6  # a difference that float32 does not round off in a tiny model
_MOST_CHOICES = 3  # of a symmetry, before its pair is given up

#: The orders of one pair that are left: of each place of the target.
Choices: TypeAlias = tuple[tuple[Ordering, ...], ...]


@dataclasses.dataclass(frozen=True)
class Moved:
    """One pair, and the order that answers right.

    Attributes:
        source: part of the source.
        target: part of the target.
        orders: at each place of the target.
        is_certain: whether no other order answers alike, but such as only exchange
            hidden units, of which the plain one is taken.
    """

    source: ModelPart
    target: ModelPart
    orders: tuple[Ordering, ...]
    is_certain: bool


@dataclasses.dataclass
class Axes:
    """The orders of all pairs; ``left`` has those that answer right so far."""

    models: Models
    family: OrderFamily
    pairing: Pairing
    rng: np.random.Generator
    refused: str = "no order of axes answers right"
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        sources, targets = zip(*self.pairing.pairs, strict=True)
        self.layers = {**layers_of(sources), **layers_of(targets)}

    def solutions(self) -> Iterator[tuple[Moved, ...]]:
        """Yield orders for all pairs that answer right as a whole."""
        left: list[Choices] = []
        for source, target in self.pairing.pairs:
            each = (self.family.orders(source.shapes[0], s) for s in target.shapes)
            left.append(tuple(itertools.product(*each)))
            if not left[-1]:
                raise DeadEndError(f"no axes lead from {source.path} to {target.path}")
        self.tolerance = self._base(left, 0).usual
        yield from self._solved(left, 0)
        raise DeadEndError(self.refused)

    def _solved(self, left: list[Choices], depth: int) -> Iterator[tuple[Moved, ...]]:
        """Yield what fits, choosing where nothing else tells orders apart."""
        idle = refused = 0
        for kind in range(1, _MOST_ROUNDS):
            is_last = all(len(each) == 1 for each in left)
            if self._apart(left) <= (NEAREST if is_last else self.tolerance):
                yield tuple(self._moved(left))
            if is_last or idle >= KINDS - 1:
                break
            base = self._base(left, kind)
            if base.noise > MOST_NOISE:
                self.refused = (
                    f"paired part by part, the answers differ by {base.noise:.2g}"
                )
                refused += 1
                if refused > KINDS:
                    break
                continue
            fewer = self._shown(base, left)
            if fewer is None:
                return
            is_same = all(map(_same_length, left, fewer))
            idle, left = idle + 1 if is_same else 0, fewer
        open_ = [place for place, each in enumerate(left) if len(each) > 1]
        if not open_ or depth > len(left):
            return
        chosen = min(open_, key=lambda place: len(left[place]))
        alike = [p for p in open_ if self._key(p) == self._key(chosen)]
        for nth in range(min(_MOST_CHOICES, len(left[chosen]))):
            tried = list(left)
            for place in alike:
                tried[place] = left[place][nth : nth + 1] or left[place][:1]
            yield from self._solved(tried, depth + 1)

    def _key(self, place: int) -> tuple[object, ...]:
        """Return what pairs have in common that differ in numbers of paths only."""
        source, target = self.pairing.pairs[place]
        paths = (source.path, *(each.path for each in target.places))
        return (*map(numberless, paths), source.shapes, target.shapes)

    def _label(self, place: int) -> Hashable:
        """Return what a pair has in common with those of other layers."""
        return tuple(self.layers[slot].label for slot in self.pairing.pairs[place])

    def _moved(self, left: Sequence[Choices]) -> Iterator[Moved]:
        """Yield the first order of each pair, and whether another answers alike."""
        base = self._base([each[:1] for each in left], 0)
        for place, each in enumerate(left):
            first, *others = each
            most = max(PLAIN, *(order.cost for order in first))
            rivals = [c for c in others if max(o.cost for o in c) <= most]
            doubts = self._right(base, [place], tuple(rivals)) if rivals else ()
            yield Moved(*self.pairing.pairs[place], first, not doubts)

    def _apart(self, left: Sequence[Choices]) -> float:
        """Return how the answers differ with the first order of each pair."""
        old: dict[Spot, np.ndarray] = {}
        new: dict[Spot, np.ndarray] = {}
        for (source, target), each in zip(self.pairing.pairs, left, strict=True):
            numbers = usual(source.shapes[0], self.rng)
            old[source.places[0]] = numbers
            for place, order in zip(target.places, each[0], strict=True):
                new[place] = order(numbers)
        return Base(self.models, old, new).noise

    def _shown(self, base: Base, left: Sequence[Choices]) -> list[Choices] | None:
        """Return the orders that answer right when pairs are shown one by one."""
        fewer = list(left)
        alike_places: dict[Hashable, list[int]] = {}
        for place, each in enumerate(left):
            if len(each) > 1:
                alike_places.setdefault((self._label(place), each), []).append(place)
        for places in alike_places.values():
            first, *others = places
            each = left[first]
            right = self._right(base, [first], each, MOST_NOISE)
            # Those of other layers are likely alike, and all of them are asked at once.
            alike = self._right(base, others, right) if others and right else ()
            fewer[first] = alike or right
            for place in others:
                fewer[place] = alike or self._of_one(base, place, right, each)
            refused = [place for place in places if not fewer[place]]
            if refused:
                source, target = self.pairing.pairs[refused[0]]
                self.refused = f"no axes of {source.path} to {target.path} answer right"
                return None
        return fewer

    def _of_one(
        self, base: Base, place: int, likely: Choices, every: Choices
    ) -> Choices:
        """Return the orders of a pair that answer right, the likely ones first."""
        right = self._right(base, [place], likely) if likely else ()
        if len(right) < max(1, len(likely)):
            right = self._right(base, [place], every, MOST_NOISE)
        return right

    def _right(
        self,
        base: Base,
        places: Sequence[int],
        choices: Choices,
        rounded: float = 0.0,
    ) -> Choices:
        """Return those of some orders with which pairs answer like their sources.

        Numbers that are shown may round by more than those of the base, up to
        ``rounded``. Of orders that are near, those much farther than others are wrong,
        or come last if the models differ by as much.
        """
        pairs = [self.pairing.pairs[place] for place in places]
        numbers = [usual(source.shapes[0], self.rng) for source, _ in pairs]
        wanted = base.old(
            {source.places[0]: n for (source, _), n in zip(pairs, numbers, strict=True)}
        )
        errors = []
        for choice in choices:
            shown = {
                at: order(n)
                for (_, target), n in zip(pairs, numbers, strict=True)
                for at, order in zip(target.places, choice, strict=True)
            }
            errors.append(base.apart(wanted, base.new(shown)))
        near = _NEARLY * min(errors, default=0.0)
        most = min(max(base.usual, near), max(base.tolerance, rounded))
        right = [(c, e) for c, e in zip(choices, errors, strict=True) if e <= most]
        right.sort(key=lambda pair: pair[1] > max(near, _SURELY))
        return tuple(choice for choice, _ in right)

    def _base(self, left: Sequence[Choices], kind: int) -> Base:
        """Ask both models with numbers of each pair that its orders do not change."""
        old: dict[Spot, np.ndarray] = {}
        new: dict[Spot, np.ndarray] = {}
        for (source, target), each in zip(self.pairing.pairs, left, strict=True):
            shape = source.shapes[0]
            orders = [
                (shape, place.shape, [*dict.fromkeys(c[nth] for c in each)])
                for nth, place in enumerate(target.places)
            ]
            drawn = Blind([shape], target.shapes, orders).draw(self.rng, kind)
            old |= drawn.of(0, source)
            new |= drawn.of(1, target)
        return Base(self.models, old, new)


def all_alike(
    models: Models, solution: Sequence[Moved], rng: np.random.Generator
) -> bool:
    """Return whether each pair alone, with other numbers, changes both answers alike.

    Relative to that change, so that a wrong order of what hardly matters is seen, too.
    Pairs that differ in their layer only are asked together.
    """
    every = [_placed(moved, rng) for moved in solution]
    base = Base(models, *map(_merged, zip(*every, strict=True)))
    layers = layers_of(moved.source for moved in solution)
    labels: dict[Hashable, list[Moved]] = {}
    for moved in solution:
        labels.setdefault(layers[moved.source].label, []).append(moved)
    for alike in labels.values():
        placed = [_placed(moved, rng) for moved in alike]
        old, new = map(_merged, zip(*placed, strict=True))
        if not base.are_alike(base.old(old), base.new(new)):
            return False
    return True


def _placed(moved: Moved, rng: np.random.Generator) -> tuple[Numbers, Numbers]:
    """Return numbers of a pair at its places on both sides."""
    numbers = usual(moved.source.shapes[0], rng)
    places = zip(moved.target.places, moved.orders, strict=True)
    return {moved.source.places[0]: numbers}, {p: order(numbers) for p, order in places}


def _merged(every: Iterable[Numbers]) -> Numbers:
    return {place: numbers for each in every for place, numbers in each.items()}


def _same_length(one: Sequence[object], two: Sequence[object]) -> bool:
    return len(one) == len(two)
