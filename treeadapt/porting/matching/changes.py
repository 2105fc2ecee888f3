"""Numbers plus or minus one, and times the root of a size, on the way to the target.

With blind numbers, in which no order of axes can be wrong, only such a change of whole
leaves can make the answers differ. Each family of the target's leaves is tried alone,
the best is kept, and so on until the answers are the same.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from treeadapt.porting.drafts.rows import numberless
from treeadapt.porting.matching.pairs import (
    MOST_NOISE,
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
_MOST_FACTORS = 2
_MOST_TOGETHER = 6  # families, of which all subsets are tried
_BETTER = 0.9  # of a difference, from which on a change is one for the better


class BlindAnswers:
    """What both models answer to numbers that no order of a family changes.

    Attributes:
        vectors: families of the target's vectors, which may be one more or less.
        every: all families of the target.
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
        every: dict[str, None] = {}
        for group in groups:
            names = [numberless(p.path) for slot in group.targets for p in slot.places]
            every |= dict.fromkeys(names)
            if len(group.sources[0].shapes[0]) < 2:
                vectors |= dict.fromkeys(names)
        self.vectors, self.every = [*vectors], [*every]
        self.roots = _roots(models)
        rngs = (np.random.default_rng([seed, kind]) for kind in (0, 1))
        bases = [blind_numbers(family, groups, r, kind) for kind, r in enumerate(rngs)]
        self._models = models
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

    def are_alike(self, changes: Changes) -> bool:
        """Return whether the answers are the same with some changes."""
        return self.apart(changes) <= MOST_NOISE


def find_changes(blind: BlindAnswers, *, with_factors: bool) -> Changes | None:
    """Return changes with which blind answers are the same; None if there are none."""
    units = _units(blind.every) if with_factors else []
    factors = functools.partial(_factors, units=units, roots=blind.roots)
    offsets = functools.partial(_offsets, vectors=blind.vectors)
    changes = _better(blind, {}, factors, _MOST_FACTORS)
    if not blind.are_alike(changes):
        changes = _better(blind, {}, offsets, _MOST_STEPS)
        if not blind.are_alike(changes):
            changes = _better(blind, changes, factors, _MOST_FACTORS)
    return changes if blind.are_alike(changes) else None


def _better(
    blind: BlindAnswers,
    best: Changes,
    tried: Callable[[Changes], Iterable[Changes]],
    steps: int,
) -> Changes:
    """Return changes with which answers are nearer, adding the best one by one."""
    least = blind.apart(best)
    for _ in range(steps):
        error = math.inf
        for each in tried(best):
            new = blind.apart(each)
            if new <= MOST_NOISE:
                return each
            if new < error:
                error, changes = new, each
        if not error < _BETTER * least:  # with nothing to try it is infinite
            break
        least, best = error, changes
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


def _factors(
    best: Changes, units: Sequence[tuple[str, ...]], roots: Sequence[float]
) -> Iterator[Changes]:
    """Yield changes by one factor more."""
    for unit, factor in itertools.product(units, roots):
        if not any(name in best for name in unit):
            yield {**best, **dict.fromkeys(unit, (factor, 0.0))}


def _units(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return leaves that may have one factor: each, and a kernel with its bias."""
    units: dict[tuple[str, ...], None] = {(name,): None for name in names}
    for name in names:
        node = name.rpartition("/")[0]
        units[tuple(n for n in names if n.rpartition("/")[0] == node)] = None
    return [*units]


def _roots(models: Models) -> list[float]:
    """Return the roots of all sizes, and one by each."""
    shapes = itertools.chain(models.old.shapes.values(), models.new.shapes.values())
    sizes = sorted({n for shape in shapes for n in shape if n > 1})
    return [float(n) ** power for n in sizes for power in (0.5, -0.5)]
