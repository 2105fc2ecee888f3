"""What each leaf of both models influences, with numbers to which they answer alike.

Takes both models and parts that could be each other, with *blind* numbers: whatever the
table is, both models would answer alike if they were the same. Leaves are set to zero,
or made small, on both sides; gives which of them the difference goes through. Knows no
causes: see ``differences``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from treeadapt.porting.matching.layers import layers_of, one_text
from treeadapt.porting.matching.pairs import LikeParts
from treeadapt.porting.matching.sides import (
    ModelPart,
    Models,
    Numbers,
    Spot,
    Stretch,
    flat_of,
)
from treeadapt.porting.measure import apart

#: Of all leaves, where numbers are small.
SMALL = 0.05
#: What float32 rounds off.
LEAST = 3e-6
_SAME = 1e-4  # a difference with which answers are the same, if others are far larger
_FEWER = 20  # times less than the whole difference is none
_HALF = 0.5  # of a leaf's size, where its influence is its own
_FIRST_ORDER = 2.0**-10  # of a leaf's size, where its influence is nearly linear
# All numbers, or arrays alone: small scores may be less than what answers round by.
_SMALLER = ({"arrays": 1 / 16, "vectors": 1 / 16}, {"arrays": 1 / 4})
_ALL_SMALL = 1 / 16, 1 / 4  # of all numbers
_MEASURED = 0.1  # of an influence may rounding be
_LESS = 5  # times less than at usual size is none
_LEAST_FACTOR = 0.01  # that differs from 1
_MOST_CARRIERS = 8
_AS_MUCH = 50  # times a difference may a change of a factor make

#: Names of leaves that are set to zero together.
Unit = tuple[str, ...]


class Influence(NamedTuple):
    """How the influence of a leaf of the old model compares with that of the new one.

    Attributes:
        apart: how far they are apart, relative.
        factor: of the old influence, relative to the new one.
        rest: how far they are apart with that factor.
        rounding: how far rounding the answers may put them apart.
    """

    apart: float
    factor: float
    rest: float
    rounding: float

    @property
    def is_factor(self) -> bool:
        """Whether a factor makes them the same."""
        return self.apart > _LEAST_FACTOR and _FEWER * self.rest <= self.apart


@dataclasses.dataclass(frozen=True)
class Carrier:
    """A leaf without which both models answer alike.

    Attributes:
        old: its names in the source.
        new: in the target.
        lost: arrays of the source that influence nothing without it.
    """

    old: Unit
    new: Unit
    lost: frozenset[str]


class BlindSide:
    """One model with blind numbers, some of them times a factor."""

    def __init__(
        self,
        models: Models,
        *,
        is_old: bool,
        numbers: Numbers,
        groups: Sequence[LikeParts],
    ) -> None:
        self._models, self._numbers = models, numbers
        self._side = models.old if is_old else models.new
        parts = [
            (place, part)
            for place, group in enumerate(groups)
            for part in (group.sources if is_old else group.targets)
        ]
        self.spots, self.group = _by_name(parts)
        self.arrays = {
            name for name, spots in self.spots.items() if len(spots[0].shape) > 1
        }

    def answers(
        self,
        unit: Sequence[str] = (),
        factor: float = 0.0,
        zero: Sequence[str] = (),
        /,
        *,
        arrays: float = 1.0,
        vectors: float = 1.0,
    ) -> list[np.ndarray]:
        """Return the answers with some leaves times a factor, or all of a kind.

        Those of ``zero`` are zero as well.
        """
        factors = {spot: factor for name in unit for spot in self.spots[name]}
        factors |= {spot: 0.0 for name in zero for spot in self.spots[name]}
        numbers = {
            spot: values
            * factors.get(spot, 1.0)
            * (arrays if len(spot.shape) > 1 else vectors)
            for spot, values in self._numbers.items()
        }
        leaves = self._side.arrays(
            {spot: values.astype("float32") for spot, values in numbers.items()}
        )
        return self._models.called(self._side, leaves)

    def vectors(self) -> list[Unit]:
        """Return the vectors that have the same last name."""
        ends: dict[str, list[str]] = defaultdict(list)
        for name in self.spots:
            if name not in self.arrays:
                ends[re.split(r"[./]", name)[-1]].append(name)
        return [tuple(names) for names in ends.values()]

    def units(self) -> list[Unit]:
        """Return each leaf, and each array with the vectors of its module."""
        below: dict[Hashable, list[str]] = defaultdict(list)
        for name, spots in self.spots.items():
            node = name.rpartition("/")[0] or name.rpartition(".")[0]
            ends = [s[1:] for s in spots[0].steps if isinstance(s, Stretch)][-1:]
            below[node, *ends].append(name)
        maps = [
            tuple(names)
            for names in below.values()
            if 1 < len(names) <= 2 and sum(n in self.arrays for n in names) == 1
        ]
        return [*((name,) for name in self.spots), *maps]


def _by_name(
    parts: Sequence[tuple[int, ModelPart]],
) -> tuple[dict[str, list[Spot]], dict[str, int]]:
    """Return the places of leaves that differ in their layer only, and their groups."""
    layers = layers_of(part for _, part in parts)
    labels: dict[Hashable, list[tuple[int, ModelPart]]] = defaultdict(list)
    for group, part in parts:
        labels[layers[part].label].append((group, part))
    texts = [one_text(part.path for _, part in each) for each in labels.values()]
    spots: dict[str, list[Spot]] = {}
    groups: dict[str, int] = {}
    for text, each in zip(texts, labels.values(), strict=True):
        if texts.count(text) > 1:
            count = sum(name.startswith(f"{text}, part") for name in spots)
            text = f"{text}, part {count + 1} of {texts.count(text)}"
        spots[text] = [place for _, part in each for place in part.places]
        groups[text] = each[0][0]
    return spots, groups


class Influences:
    """What leaves influence, on both sides.

    Args:
        models: both.
        groups: parts that could be each other.
        numbers: of the source and of the target.

    Attributes:
        old: the old model with its numbers.
        new: the new one.
        answers: of the old model and of the new one.
        whole: how far they are apart.
        small: the same with numbers that are 20 times smaller.
        same: the largest difference that is none.
    """

    def __init__(
        self,
        models: Models,
        groups: Sequence[LikeParts],
        numbers: tuple[Numbers, Numbers],
    ) -> None:
        self.old, self.new = (
            BlindSide(models, is_old=is_old, numbers=each, groups=groups)
            for is_old, each in zip((True, False), numbers, strict=True)
        )
        self.answers = self.old.answers(), self.new.answers()
        self.whole = apart(*self.answers[::-1])
        self.small = max(
            self.apart((), (), arrays=SMALL),
            self.apart((), (), arrays=SMALL, vectors=SMALL),
        )
        self.same = max(LEAST, min(_SAME, self.whole / _FEWER))
        self._lost_by: dict[Unit, frozenset[str]] = {}

    def apart(self, old: Unit, new: Unit, **options: float) -> float:
        """Return how far the answers are apart, with options as for ``answers``."""
        return apart(self.new.answers(new, **options), self.old.answers(old, **options))

    @functools.cached_property
    def alive(self) -> frozenset[str]:
        """The arrays of the source that influence an answer."""
        names = sorted(self.old.arrays)
        changes = (apart(self.old.answers((n,)), self.answers[0]) for n in names)
        return frozenset(n for n, x in zip(names, changes, strict=True) if x > LEAST)

    def are_like(self, old: Unit, new: Unit) -> bool:
        """Return whether leaves could be each other by shape."""
        sides = ((self.old, old), (self.new, new))
        ones, twos = (sorted(side.group[n] for n in unit) for side, unit in sides)
        return ones == twos

    def read(self, zero: tuple[Unit, Unit] = ((), ())) -> tuple[Unit, Unit] | None:
        """Return the arrays of both sides that influence answers once some are zero.

        None if answers are not finite then.
        """
        every = []
        for side, names in zip((self.old, self.new), zero, strict=True):
            without = side.answers(names)
            if not all(np.isfinite(array).all() for array in without):
                return None
            left = sorted(side.arrays - {*names})
            changes = (apart(side.answers((n,), 0.0, names), without) for n in left)
            pairs = zip(left, changes, strict=True)
            every.append(tuple(name for name, change in pairs if change > LEAST))
        return every[0], every[1]

    def factors(self) -> list[tuple[list[str], float]]:
        """Return paths of the target, and the factor that they lack, if that is all.

        A factor of scores belongs to neither of the two leaves that make them. One that
        a norm cancels where the leaf is small is not measured: it is NaN.
        """
        factors = {pair: self._factor(*pair) for pair in self._alike}
        if not any(factors.values()):
            return []
        carriers = self.carriers(most_lost=1.0)
        lacking = [
            (carrier.new, factor)
            for carrier in carriers
            if (factor := factors[carrier.old, carrier.new])
            and self.partner(carrier, carriers) is None
        ]
        lacking.sort(key=lambda pair: math.isnan(pair[1]))
        return [
            ([s.path for n in unit for s in self.new.spots[n]], factor)
            for unit, factor in lacking
        ]

    def _factor(self, old: Unit, new: Unit) -> float:
        """Return the factor that a leaf may lack: 0 if none, NaN if it is cancelled."""
        share = self.share(old, new)
        if share.apart > _LEAST_FACTOR:
            is_factor = share.rest <= share.apart / 2 < math.inf
            return share.factor if is_factor else 0.0
        if not {*new} & self.new.arrays:
            return 0.0
        # Another factor would change the answers by as much as the two are apart.
        twice = apart(self.new.answers(new, 2.0), self.answers[1])
        return math.nan if twice <= _AS_MUCH * self.whole else 0.0

    @functools.cached_property
    def _alike(self) -> list[tuple[Unit, Unit]]:
        """The leaves of both sides without which both models answer alike."""
        olds = {unit: self.old.answers(unit) for unit in self.old.units()}
        news = {unit: self.new.answers(unit) for unit in self.new.units()}
        like = {
            old: [
                new
                for new, ours in news.items()
                if self.are_like(old, new) and apart(ours, theirs) <= self.same
            ]
            for old, theirs in olds.items()
        }
        some = itertools.islice(
            ((old, new) for old, new in like.items() if new), _MOST_CARRIERS
        )
        return [(old, self._likest(old, units)) for old, units in some]

    def _likest(self, old: Unit, units: Sequence[Unit]) -> Unit:
        """Return the leaf of the target that changes answers most as one does.

        Where leaves are multiplied, as gates, answers are alike without any of them.
        """
        if len(units) == 1:
            return units[0]
        theirs = self.old.answers(old, _HALF)
        return min(units, key=lambda new: apart(self.new.answers(new, _HALF), theirs))

    def carriers(self, most_lost: float = 0.5) -> list[Carrier]:
        """Return leaves without which both models answer alike, with least loss."""
        carriers = [Carrier(old, new, self.lost(old)) for old, new in self._alike]
        most = most_lost * len(self.alive)
        few = (carrier for carrier in carriers if len(carrier.lost) <= most)
        return sorted(few, key=lambda c: (len(c.lost), len(c.old)))

    def lost(self, unit: Unit) -> frozenset[str]:
        """Return the arrays that influence nothing once a leaf is zero."""
        if unit not in self._lost_by:
            without = self.old.answers(unit)
            self._lost_by[unit] = frozenset(
                name
                for name in sorted(self.alive - {*unit})
                if apart(self.old.answers((*unit, name)), without) <= LEAST
            )
        return self._lost_by[unit]

    def partner(self, first: Carrier, carriers: Sequence[Carrier]) -> Carrier | None:
        """Return the leaf that makes scores with this one.

        Each matters with the other only, and both with a third one: the values.
        """
        for other in carriers:
            is_pair = other.old != first.old and first.lost and other.lost
            if is_pair and first.lost <= {*other.old} and other.lost <= {*first.old}:
                both = first.lost | other.lost
                losses = (self.lost((name,)) for name in sorted(self.alive - both))
                few = (lost for lost in losses if 2 * len(lost) <= len(self.alive))
                if any(both <= lost for lost in few):
                    return other
        return None

    def scores_below(self, first: Carrier) -> Unit:
        """Return two leaves below one that make scores; none if there are none."""
        lost_by: dict[Unit, frozenset[str]] = {}
        for unit in self.old.units():
            arrays = [name for name in unit if name in self.alive]
            if len(arrays) == 1 and arrays[0] in first.lost:
                lost_by[unit] = self.lost(unit)
        for one, two in itertools.combinations(lost_by, 2):
            if {*one}.isdisjoint(two):
                is_pair = len(lost_by[one]) == len(lost_by[two]) == 1
                if is_pair and lost_by[one] <= {*two} and lost_by[two] <= {*one}:
                    return (*one, *two)
        return ()

    def share(
        self, old: Unit, new: Unit, zero: tuple[Unit, Unit] = ((), ())
    ) -> Influence:
        """Compare the influences of a leaf of both sides where it is small.

        Those of ``zero`` are zero as well.
        """
        return self._influence(old, new, zero, factor=_FIRST_ORDER)

    def _influence(
        self,
        old: Unit,
        new: Unit,
        zero: tuple[Unit, Unit] = ((), ()),
        /,
        *,
        factor: float = 1.0,
        **options: float,
    ) -> Influence:
        """Compare how the answers of both sides change with a leaf."""
        both = [
            (
                flat_of(side.answers(unit, factor, names, **options)),
                flat_of(side.answers(unit, 0.0, names, **options)),
            )
            for side, unit, names in zip(
                (self.old, self.new), (old, new), zero, strict=True
            )
        ]
        theirs, ours = (usual - without for usual, without in both)
        square = float(ours @ ours)
        ratio = float(theirs @ ours) / square if square else math.nan
        length = float(np.linalg.norm(theirs)) or math.nan
        rests = (np.linalg.norm(theirs - c * ours) / length for c in (1.0, ratio))
        apart, rest = (float(np.nan_to_num(x, nan=math.inf)) for x in rests)
        rounded = LEAST * float(np.linalg.norm(both[0][0]))
        longest = max(float(np.linalg.norm(theirs)), math.sqrt(square))
        rounding = rounded / longest if longest else math.inf
        return Influence(apart, ratio, rest, rounding)

    def agree_small(self, carrier: Carrier) -> bool:
        """Return whether a leaf has the same influence where all numbers are small."""
        unit = carrier.old, carrier.new
        whole = self._influence(*unit)
        return any(
            _LESS * self._influence(*unit, **sizes).apart <= whole.apart
            for sizes in _SMALLER
        )

    def beside(self, carrier: Carrier) -> list[Carrier]:
        """Return the carriers of the same thing: it, and what it goes through."""
        same = [
            other
            for other in self.carriers()
            if {*carrier.old} & self.old.arrays <= {*other.old} | other.lost
        ]
        return same or [carrier]

    def agree_where_small(self, carrier: Carrier, sign: int = 1) -> bool | None:
        """Return whether what goes through a leaf is the same where numbers are small.

        Vectors are positive or negative, because ReLU and leaky ReLU agree on one side.
        None if rounding hides it: then what the leaf makes is less than what answers
        round by. So a leaf is also made as large as its influence got small, which
        counts only if the two may agree without that: it must not make numbers large
        that the two differ at.
        """
        seen: bool | None = None
        for each in self.beside(carrier):
            unit = each.old, each.new
            most = self._influence(*unit, vectors=sign).apart / _LESS
            for size in _ALL_SMALL:
                sizes = {"arrays": size, "vectors": sign * size}
                share = self._influence(*unit, **sizes)
                if share.apart <= most:
                    return True
                if min(share.apart, 1.0) > share.rounding:
                    seen = False
                elif share.rounding <= _MEASURED:
                    larger = (
                        self._influence(*unit, factor=size**-power, **sizes)
                        for power in (2, 1)
                    )
                    if any(x.apart <= most for x in larger):
                        return True
        return seen
