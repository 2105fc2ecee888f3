"""Numbers plus or minus one, and times the root of a size, on the way to the target.

With blind numbers, in which no order of axes can be wrong, only such a change of whole
leaves can make the answers differ. One more or less is tried for each family of the
target's vectors alone, the best is kept, and so on until the answers are the same. A
factor is measured, where the answers are the same without a leaf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from treeadapt.porting.drafts.rows import numberless
from treeadapt.porting.matching.influence import Influences
from treeadapt.porting.matching.pairs import (
    MOST_NOISE,
    ROUNDED,
    LikeParts,
    OrderFamily,
    blind_numbers,
)
from treeadapt.porting.matching.sides import Models
from treeadapt.porting.measure import apart

#: Scale and offset of the leaves of the target, by their paths without numbers.
Changes: TypeAlias = Mapping[str, tuple[float, float]]

_OFFSETS = (-1.0, 1.0)
_MOST_STEPS = 4
_NEAR = 0.1  # a root is to a factor that was seen
_MOST_TOGETHER = 6  # families, of which all subsets are tried
_BETTER = 0.9  # of a difference, from which on a change is one for the better
_MAYBE = 0.05  # a difference that may be that of one factor more
_FAR_BETTER = 0.1  # of a difference, where nothing but that change may be lacking


class Near(NamedTuple):
    """Changes, and how far the answers are apart with them."""

    changes: Changes
    error: float

    @property
    def is_right(self) -> bool:
        """Whether that is rounding."""
        return self.error <= ROUNDED


#: No changes, of which nothing is known.
FAR = Near({}, math.inf)


class BlindAnswers:
    """What both models answer to numbers that no order of a family changes.

    Attributes:
        vectors: families of the target's vectors, which may be one more or less.
        roots: of all sizes, which may be factors.
    """

    def __init__(
        self,
        models: Models,
        family: OrderFamily,
        groups: Sequence[LikeParts],
        seed: int,
    ) -> None:
        vectors: dict[str, None] = {}
        for group in groups:
            names = [numberless(p.path) for slot in group.targets for p in slot.places]
            if len(group.sources[0].shapes[0]) < 2:
                vectors |= dict.fromkeys(names)
        self.vectors = [*vectors]
        self.roots = _roots(models)
        rngs = (np.random.default_rng([seed, kind]) for kind in (0, 1))
        bases = [blind_numbers(family, groups, r, kind) for kind, r in enumerate(rngs)]
        self._models, self._groups, self._first = models, groups, bases[0]
        self._numbers = [new for _, new in bases]
        self._theirs = [
            models.called(models.old, models.old.arrays(o)) for o, _ in bases
        ]

    def apart(self, changes: Changes) -> float:
        """Return how far the answers are apart with some changes."""
        new, largest = self._models.new, 0.0
        new.changes = by_path(self._models, changes)
        for numbers, theirs in zip(self._numbers, self._theirs, strict=True):
            ours = self._models.called(new, new.arrays(numbers))
            largest = max(largest, apart(ours, theirs))
            if largest > MOST_NOISE:
                break
        new.changes = {}
        return largest

    def factors(self, changes: Changes) -> list[tuple[list[str], float]]:
        """Return leaves of the target that may lack a factor, and that factor."""
        new = self._models.new
        new.changes = by_path(self._models, changes)
        found = Influences(self._models, self._groups, self._first).factors()
        new.changes = {}
        return [([*dict.fromkeys(map(numberless, p))], factor) for p, factor in found]

    def nearest(self, candidates: Iterable[Changes]) -> Near:
        """Return the nearest of some changes; one that differs by rounding ends it."""
        best = FAR
        for changes in candidates:
            near = Near(changes, self.apart(changes))
            best = min(best, near, key=lambda each: each.error)
            if best.is_right:
                break
        return best


def find_changes(blind: BlindAnswers, known: Near, *, with_factors: bool) -> Near:
    """Return the nearest changes, or what is known if nothing is far nearer.

    Those that are near are not taken at once: see ``ROUNDED``.

    Args:
        blind: the answers.
        known: no changes, or the nearest of what was found before.
        with_factors: whether a factor is looked for where nothing is near without.
    """
    best = known
    is_near = known.error <= MOST_NOISE
    for found in _found(blind, with_factors=with_factors, is_near=is_near):
        share = _FAR_BETTER if best.error <= MOST_NOISE else 1.0
        if found.is_right or found.error < share * best.error:
            best = found
        if best.is_right:
            break
    return best


def _found(blind: BlindAnswers, *, with_factors: bool, is_near: bool) -> Iterator[Near]:
    """Yield the nearest with a factor, with offsets, and with both.

    A factor is looked for where the answers are the same once a leaf is zero. Where
    they are near without changes no offset is lacking: one more shows far more.
    """
    if with_factors:
        yield blind.nearest(_with_factor(blind, {}))
    if is_near:
        return
    offsets = _offsets_added(blind)
    yield offsets
    if offsets.changes and (with_factors or offsets.error <= _MAYBE):
        yield blind.nearest(_with_factor(blind, offsets.changes))


def _with_factor(blind: BlindAnswers, changes: Changes) -> Iterator[Changes]:
    """Yield changes and one factor more: roots of sizes, near what was measured."""
    for names, factor in blind.factors(changes):
        for root in blind.roots:
            if math.isnan(factor) or abs(root / factor - 1) < _NEAR:
                yield {**changes, **dict.fromkeys(names, (root, 0.0))}


def _offsets_added(blind: BlindAnswers) -> Near:
    """Return offsets with which answers are nearer, adding the best one by one."""
    best = blind.nearest([{}])
    for _ in range(_MOST_STEPS):
        step = blind.nearest(_offsets(best.changes, blind.vectors))
        if not step.error < _BETTER * best.error:  # with nothing to try it is infinite
            break
        best = step
        if best.is_right:
            break
    return best


def by_path(models: Models, changes: Changes) -> dict[str, tuple[float, float]]:
    """Return changes by the paths of the target's leaves."""
    names = ((path, numberless(path)) for path in models.new.shapes)
    return {path: changes[name] for path, name in names if name in changes}


def _offsets(best: Changes, vectors: Sequence[str]) -> Iterator[Changes]:
    """Yield changes by one more or one less of some vectors."""
    if not best:
        most = len(vectors) if len(vectors) <= _MOST_TOGETHER else 0
        sets = (
            c for n in range(2, most + 1) for c in itertools.combinations(vectors, n)
        )
        for subset, offset in itertools.product([*sets, (*vectors,)], _OFFSETS):
            yield dict.fromkeys(subset, (1.0, offset))
    for name, offset in itertools.product(vectors, _OFFSETS):
        if name not in best:
            yield {**best, name: (1.0, offset)}
        else:
            yield {key: change for key, change in best.items() if key != name}


def _roots(models: Models) -> list[float]:
    """Return the roots of all sizes, and one by each."""
    shapes = itertools.chain(models.old.shapes.values(), models.new.shapes.values())
    sizes = sorted({n for shape in shapes for n in shape if n > 1})
    return [float(n) ** power for n in sizes for power in (0.5, -0.5)]
