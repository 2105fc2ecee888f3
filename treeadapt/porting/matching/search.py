"""The way from two models to pairs of all parts: each cut, each family of orders.

Takes both models; gives parts with their partners and orders that answer right on
numbers that the search did not use, or the dead ends on the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.porting.drafts.draft import draft_migration
from treeadapt.porting.matching.axes import NEAREST, Axes, Moved, all_alike
from treeadapt.porting.matching.changes import (
    BlindAnswers,
    Changes,
    by_path,
    find_changes,
)
from treeadapt.porting.matching.cuts import cuts, missing_leaf, why_uneven
from treeadapt.porting.matching.differences import what_differs
from treeadapt.porting.matching.influence import LEAST, Influences
from treeadapt.porting.matching.judge import UNKNOWN, Verdict, judge
from treeadapt.porting.matching.orders import TIERS
from treeadapt.porting.matching.pairs import (
    MOST_NOISE,
    ROUNDED,
    DeadEndError,
    LikeParts,
    OrderFamily,
    blind_numbers,
    grouped,
    noise_of,
    pairings,
)
from treeadapt.porting.matching.sides import (
    LimitError,
    ModelPart,
    Models,
    ModelSide,
    usual,
)
from treeadapt.text.names import plural

_MOST_CUTS = 24
_RESERVE = 400  # evaluations that are left to see what the models differ in
_MOST_LOOKED_AT = 6  # cuts with which it is seen what the models differ in
_AS_NEAR = 10  # times the least difference of blind answers, that is as little
_MOST_DRAWS = 4  # of numbers with which it is seen what near models differ in
_LITTLE = 10 * LEAST  # a difference through which leaf is not to be seen
_MOST_CHANGED = 4  # cuts for which numbers plus one are looked for
_MOST_TURNED = 3  # cuts for which heads may be last, and parts in another order
_MOST_SOLUTIONS = 3  # of one pairing
# Evaluations of one cut and one family of orders, and more of them for each part.
_MOST_OF_ALL = 1_000, 40
_MOST_OF_GUESS = 0, 10
_MOST_GUESSES = 3  # with draws of their own
_FEWER_LATER = 4  # times fewer with orders for which nearly all numbers are alike

#: Parts of the source and of the target that come out even.
Cut = tuple[list[ModelPart], list[ModelPart]]


@dataclasses.dataclass(frozen=True)
class Found:
    """A partner and an order for each part.

    Attributes:
        solution: pairs of parts, with their orders.
        tied: parts of the source that no answer tells apart.
        changes: scale and offset of leaves of the target, by path.
        family: the orders that were allowed.
        groups: the parts that could be each other.
        verdict: how far the answers are apart.
    """

    solution: Sequence[Moved]
    tied: tuple[tuple[ModelPart, ...], ...]
    changes: Mapping[str, tuple[float, float]]
    family: OrderFamily
    groups: Sequence[LikeParts]
    verdict: Verdict = UNKNOWN

    def convert(self, models: Models, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays of the target that arrays of the source become."""
        shapes = models.new.shapes.items()
        arrays = {path: np.zeros(shape, "float32") for path, shape in shapes}
        for moved in self.solution:
            numbers = np.sum(
                [p.of(np.asarray(weights[p.path])) for p in moved.source.places], axis=0
            )
            for place, order in zip(moved.target.places, moved.orders, strict=True):
                scale, offset = self.changes.get(place.path, (1.0, 0.0))
                part = place.of(arrays[place.path])
                part[...] = order(numbers).reshape(part.shape) * scale + offset
        return arrays


@dataclasses.dataclass
class Search:
    """A search.

    Attributes:
        models: both models.
        given: numbers of the source, if there are any.
        tolerance: largest difference that is rounding.
        seed: of all draws.
        why: where it stopped.
        dead_ends: what it stumbled over on the way.
        differences: what the models differ in, as far as it was seen.
        cuts: those with which that is looked for.
        missing: which leaf one side may lack, if all cuts sum leaves in its place.
        nearest: what pairs everything, but with other answers.
        unused: leaves of the source without influence.
        kept: leaves of the target without influence.
    """

    models: Models
    given: Mapping[str, Any]
    tolerance: float
    seed: int
    why: list[str] = dataclasses.field(default_factory=list)
    dead_ends: list[str] = dataclasses.field(default_factory=list)
    differences: tuple[str, ...] = ()
    cuts: Sequence[Cut] = ()
    missing: str = ""
    nearest: Found | None = None
    unused: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def found(self) -> Found | None:
        """Return what answers right; None if nothing does, or no evaluation is left."""
        reserve = min(_RESERVE, self.models.left // 3)
        self.models.left -= reserve
        try:
            return self._found()
        except LimitError:
            self.why.append(
                "the limit of evaluations is reached: limit= allows for more"
            )
        finally:
            self.models.left += reserve
        with contextlib.suppress(LimitError):
            if self.cuts and not self.differences:
                self._look_at(self.cuts)
        return None

    def _found(self) -> Found | None:
        found = self._over_all()
        if found is None and self.nearest is None and self._leave_out():
            self.why.clear()
            found = self._over_all()
        if found is None and self.nearest is not None:
            self.why.append(self.nearest.verdict.text(self.tolerance))
            self._look_at_nearest(self.nearest)
        return found

    def _over_all(self) -> Found | None:
        """Return what answers right with all leaves that are left."""
        self.rng = np.random.default_rng(self.seed)
        self.named = functools.cache(self._named)
        self.changes: list[Changes] = []
        self.likeliest: list[Cut] = []
        shapes = self.models.old.shapes, self.models.new.shapes
        every: list[Cut] = list(itertools.islice(cuts(*shapes), _MOST_CUTS))
        self.cuts = every[:_MOST_LOOKED_AT]
        if not every:
            self.why.append(why_uneven(*shapes))
        # A sum of any two vectors of one length makes up for one that is missing.
        are_sums = all(any(p.places[1:] for p in sources) for sources, _ in every)
        self.missing = missing_leaf(*shapes) if are_sums else ""
        self.near: list[tuple[OrderFamily, Sequence[LikeParts]]] = []
        found = self._first_of(
            itertools.chain(
                (self._simply(cut) for cut in every),
                self._over_near(every),
            )
        )
        if not every or found is not None or self.nearest is not None:
            return found
        self._look_at(self.cuts)
        found = self._first_of(
            itertools.chain(
                (
                    self._changed(cut, finds=place < _MOST_CHANGED)
                    for place, cut in enumerate(every)
                ),
                (
                    self._changed(cut, finds=True, with_factors=True)
                    for cut in self.likeliest
                ),
                (self._over(cut, {}, TIERS[2:]) for cut in every[:_MOST_TURNED]),
                self._over_near(()),
            )
        )
        if found is None and self.nearest is None:
            self.why.append(
                f"{plural(len(every), 'way')} to cut leaves into parts of equal sizes "
                "and all orders of axes that are known were tried: no more is to be "
                f"learned after {plural(self.models.evaluations, 'evaluation')}"
            )
        return found

    def _look_at(self, cuts: Sequence[Cut]) -> None:
        """See what the models differ in, with the cut that makes them nearest.

        With the right one they come near where numbers are small, unless they differ
        there too; then the simplest cut is taken.
        """
        self.models.new.changes = {}
        every = []
        for cut, tier in itertools.product(cuts, TIERS[:2]):
            family, groups = OrderFamily(_sizes(cut), tier), grouped(*cut)
            rng = np.random.default_rng([self.seed, tier])
            numbers = [blind_numbers(family, groups, rng, kind) for kind in (0, 2)]
            pair = [Influences(self.models, groups, each) for each in numbers]
            every.append((min(min(d.whole, d.small) for d in pair), cut, pair[0]))
        least = min(near for near, *_ in every)
        first = every[0][0]
        most = first if first <= _AS_NEAR * least else least
        _, cut, seen = next(each for each in every if each[0] <= most)
        self.likeliest = [cut, *(each for each in cuts[:1] if each is not cut)]
        self.differences = tuple(filter(None, (self.missing, *what_differs(seen))))

    def _look_at_nearest(self, found: Found) -> None:
        """See what the models differ in, whatever is paired with what."""
        self.models.new.changes = dict(found.changes)
        rng = np.random.default_rng([self.seed, 4])
        draws: list[Influences] = []
        # One, unless both differ by little more than rounding there.
        while len(draws) < _MOST_DRAWS and all(d.whole <= _LITTLE for d in draws):
            numbers = blind_numbers(found.family, found.groups, rng, 0)
            draws.append(Influences(self.models, found.groups, numbers))
        seen = max(draws, key=lambda draw: draw.whole)
        is_small = found.verdict.usual <= self.tolerance
        self.differences = (*what_differs(seen, only_small=is_small),)

    def _first_of(self, tried: Iterator[Found | None]) -> Found | None:
        for found in tried:
            if found is not None or self.nearest is not None:
                return found
        return None

    def _changed(
        self,
        cut: Cut,
        *,
        finds: bool,
        with_factors: bool = False,
        tiers: Sequence[int] = TIERS[:2],
    ) -> Found | None:
        """Return what answers right with one more, one less or a factor somewhere.

        What was found with another cut is tried first; only that unless ``finds``.
        """
        for tier in tiers:  # with later ones all numbers of a vector may be equal
            family = OrderFamily(_sizes(cut), tier)
            with contextlib.suppress(DeadEndError):
                blind = BlindAnswers(self.models, family, grouped(*cut), self.seed)
                near = blind.nearest([{}, *self.changes])
                if finds and not near.is_right:
                    near = find_changes(blind, near, with_factors=with_factors)
                changes = near.changes
                if changes and near.error <= MOST_NOISE:
                    self.changes += [changes] * (changes not in self.changes)
                    by_leaf = by_path(self.models, changes)
                    found = self._over(cut, by_leaf, TIERS[tier - 1 :])
                    if found is not None or self.nearest is not None:
                        return found
        return None

    def _over(
        self,
        cut: Cut,
        changes: Mapping[str, tuple[float, float]],
        tiers: Sequence[int],
    ) -> Found | None:
        """Return what answers right with one cut, in the simplest family of orders."""
        for tier in tiers:
            self.models.new.changes = dict(changes)
            family = OrderFamily(_sizes(cut), tier)
            try:
                groups = grouped(*cut)
                noise = self._noise(family, groups)
            except DeadEndError as error:
                self._note(str(error))
                continue
            if noise > ROUNDED and not changes:
                found = None
                if tier in TIERS[:2]:
                    found = self._changed(
                        cut, finds=True, with_factors=True, tiers=(tier,)
                    )
                self.near.append((family, groups))
            else:
                found = self._limited(family, groups)
            if found is not None or self.nearest is not None:
                return found
        return None

    def _simply(self, cut: Cut) -> Found | None:
        """Return what answers right with one cut and simple orders.

        Where blind answers are near, but not the same, changes were looked for in vain.
        If all is paired all the same, and no pair is wrong, the models differ
        elsewhere, and no other cut or order is tried.
        """
        is_first = not self.near
        found = self._over(cut, {}, TIERS[:2])
        if not is_first or found is not None or self.nearest is not None:
            return found
        if not self.near or self.near[0][0].tier > TIERS[0]:
            return None  # near with orders within heads alone, as a wrong cut may be
        rng = self.rng
        for family, groups in self.near:
            found = self._guessed(family, groups)
            if found is not None or self.nearest is not None:
                break
        self.rng = rng
        return found

    def _guessed(
        self, family: OrderFamily, groups: Sequence[LikeParts]
    ) -> Found | None:
        """Return what answers right; keeps the nearest if no pair of it is wrong.

        With one draw leaves of little influence may seem alike, with another not.
        """
        for draw in range(_MOST_GUESSES):
            self.rng = np.random.default_rng([self.seed, 6, draw])
            self.models.new.changes = {}
            found = self._limited(family, groups, is_guess=True)
            near, self.nearest = self.nearest, None
            if found is not None or near is None:
                return found
            if all_alike(self.models, near.solution, self.rng):
                self.nearest = near
                return None
        return None

    def _over_near(self, cuts: Sequence[Cut]) -> Iterator[Found | None]:
        """Yield what answers right where it is near without changes, but not the same.

        The models may differ a little, or lack a change: see ``ROUNDED``. Later orders
        with which answers are the same are tried first, because what is near pairs all
        parts, too.
        """
        if self.near:
            yield from (self._over(cut, {}, TIERS[2:]) for cut in cuts[:_MOST_TURNED])
        self.models.new.changes = {}
        for family, groups in self.near:
            yield self._limited(family, groups)
        self.near.clear()

    def _noise(self, family: OrderFamily, groups: Sequence[LikeParts]) -> float:
        """Return how far apart answers are that no order changes, if that is near."""
        noise = noise_of(self.models, family, groups, self.rng)
        if noise > MOST_NOISE:
            raise DeadEndError(
                f"with numbers that no order changes the answers differ by {noise:.2g}"
            )
        return noise

    def _limited(
        self,
        family: OrderFamily,
        groups: Sequence[LikeParts],
        *,
        is_guess: bool = False,
    ) -> Found | None:
        """Return what answers right within some evaluations, which end a wrong cut."""
        left = self.models.left
        most, each = _MOST_OF_GUESS if is_guess else _MOST_OF_ALL
        most += each * sum(len(group.sources) for group in groups)
        most //= 1 if family.tier in TIERS[:2] else _FEWER_LATER
        self.models.left = min(left, most)
        try:
            return self._within(family, groups, is_guess=is_guess)
        except DeadEndError as error:
            self._note(str(error))
            return None
        except LimitError:
            if left <= most:
                raise
            return None  # a wrong cut may pass for a right one for long
        finally:
            self.models.left += left - min(left, most)

    def _within(
        self, family: OrderFamily, groups: Sequence[LikeParts], *, is_guess: bool
    ) -> Found | None:
        """Return what answers right with some orders; keeps the nearest otherwise."""
        changes = dict(self.models.new.changes)
        every = pairings(self.models, family, groups, self.rng, self.named)
        for pairing in itertools.islice(every, 1 if is_guess else None):
            axes = Axes(self.models, family, pairing, self.rng)
            try:
                for solution in itertools.islice(axes.solutions(), _MOST_SOLUTIONS):
                    rest = pairing.tied, changes, family, groups
                    found = self._judged(Found(solution, *rest))
                    if found.verdict.is_right(self.tolerance):
                        return found
                    self._keep(found)
            except DeadEndError as error:
                self._note(str(error))
            if not pairing.tied or self.nearest is not None:
                break
        return None

    def _judged(self, found: Found) -> Found:
        """Ask both models with numbers that the search did not use."""
        moved = functools.partial(found.convert, self.models)
        verdict = judge(self.models, self.given, moved, self.seed)
        return dataclasses.replace(found, verdict=verdict)

    def _keep(self, found: Found) -> None:
        """Remember what is near, and say how far it is from right."""
        if found.verdict.depends and found.verdict.usual <= NEAREST:
            best = self.nearest
            if best is None or found.verdict.largest < best.verdict.largest:
                self.nearest = found
        else:
            self._note(found.verdict.text(self.tolerance))

    def _note(self, dead_end: str) -> None:
        self.dead_ends += [dead_end] * (dead_end not in self.dead_ends)

    def _leave_out(self) -> bool:
        """Leave out leaves without influence; return whether there are any."""
        dead = [self._without_influence(s) for s in (self.models.old, self.models.new)]
        for side, paths in zip((self.models.old, self.models.new), dead, strict=True):
            side.leave_out(paths, self.rng)
        self.unused, self.kept = map(tuple, dead)
        return any(dead)

    def _without_influence(self, side: ModelSide) -> list[str]:
        """Return the leaves of which no number changes an answer."""
        arrays = {path: usual(shape, self.rng) for path, shape in side.shapes.items()}
        wanted = self.models.called(side, arrays)
        dead = []
        for path, shape in side.shapes.items():
            other = {**arrays, path: usual(shape, self.rng)}
            answers = self.models.called(side, other)
            if all(map(np.array_equal, answers, wanted)):
                dead.append(path)
        return dead if len(dead) < len(side.shapes) else []

    def _named(self) -> Mapping[str, Sequence[str]]:
        """Return what names and shapes propose."""
        sides = (
            {p: jax.ShapeDtypeStruct(s, "float32") for p, s in side.shapes.items()}
            for side in (self.models.old, self.models.new)
        )
        try:
            return draft_migration(*sides).pairs
        except MigrationError:  # too many names, or none that can be paired
            return {}


def _sizes(cut: Cut) -> frozenset[int]:
    return frozenset(
        n for slots in cut for s in slots for shape in s.shapes for n in shape
    )
