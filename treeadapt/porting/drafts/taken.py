"""Numbers in another order, or some of them: what ``take`` of a drafted row says.

Takes where numbers are that follow no row; gives, for axes and numbers of paths of the
source, which of their values the target has, in which order. With the source in that
order a row is found as any other, and gets ``take``. Nothing is claimed unless each
value has numbers that are there once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from treeadapt.migrations.take import MAX_TAKEN, Order, Take
from treeadapt.porting.drafts.links import Link, NumberedLeaf
from treeadapt.porting.drafts.mixed_radix import Digit, axis_steps, factored
from treeadapt.porting.drafts.parts import Pattern, Variant
from treeadapt.porting.drafts.rows import DraftAddress, DraftRow, Hole

_PAIR = 2  # parts that are the same in all models
_LEAST = 0.98  # of the numbers whose place is known, that an order must explain


@dataclasses.dataclass(frozen=True)
class Selected:
    """Which values of an axis, or of a number of a path, the target has.

    Attributes:
        place: of the axis, or of the number among those of the path.
        is_number: whether it is a number of the path.
        outer: how often these values follow each other along the axis.
        inner: how many indices of the axis are one value.
        values: in the order of the target.
        size: how many the source has.
    """

    place: int
    is_number: bool
    outer: int
    inner: int
    values: tuple[int, ...]
    size: int

    @property
    def ranks(self) -> np.ndarray:
        """The place of each value in the target; -1 of one that it lacks."""
        ranks = np.full(self.size, -1)
        ranks[list(self.values)] = np.arange(len(self.values))
        return ranks

    @property
    def take(self) -> Take:
        """What a row says: a slice, if no other factor is next to it, or it reverses.

        Two parts the other way round are those of the formula, as scale and shift are.
        Of more, as of the levels of a pyramid, another model may have another number.
        """
        values, size = self.values, self.size
        first, step = values[0], values[1] - values[0]
        is_alone = self.outer == self.inner == 1
        if values == (*range(size),)[::-1] and (is_alone or size > _PAIR):
            return Take(text="::-1")
        is_step = step > 1 and first < step
        if is_alone and is_step and values == (*range(first, size, step),):
            return Take(text=f"{first or ''}::{step}")
        return Take(Order.of(values), size)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A factor of an axis whose values follow each other as no row says.

    Attributes:
        outer: how many values the factors before it have.
        inner: how many those after it have.
        moves: how far each of its values is from the first one.
    """

    outer: int
    inner: int
    moves: np.ndarray


class _Steps:
    """How an array goes along its axes through another one.

    Attributes:
        start: index in the other array of the array's first number.
        made: digits of the other array that axes are made of.
        cuts: by axis, the factor that is not one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        points: tuple[np.ndarray, np.ndarray],
        other: Sequence[int],
        *,
        in_parts: bool,
    ) -> None:
        self.other, self._in_parts = other, in_parts
        self.start, self.made = -1, list[Digit]()
        self.cuts = dict[int, _Cut]()
        flat, places = points
        steps = axis_steps(sizes, flat, places) if len(flat) else [None]
        if any(step is None for step in steps):
            return
        known = [step for step in steps if step is not None]
        at = np.unravel_index(flat, tuple(sizes)) if sizes else ()
        moved = sum(step[index] for step, index in zip(known, at, strict=True))
        start = int(np.median(places - moved))
        if np.mean(places - moved == start) < _LEAST:
            return
        for axis, step in enumerate(known):
            digits = factored(step, other)
            cut = None if digits is not None else self._cut(step)
            if cut is None and digits is None:
                return
            self.made += digits or ()
            if cut is not None:
                values = at[axis] // cut.inner % len(cut.moves)
                if len(np.unique(values)) < len(cut.moves):
                    return  # of one nothing is known
                self.cuts[axis] = cut
        if not self.cuts:
            self._cut_at_gap(known)
        self.start = start

    def _cut(self, steps: np.ndarray) -> _Cut | None:
        """Cut an axis where the fewest values are left that are not made of digits."""
        count = len(steps)
        if not self._in_parts:
            return _Cut(1, 1, steps)
        divisors = [n for n in range(1, count // 2 + 1) if not count % n]
        inner = [n for n in divisors if self._is_one(steps.reshape(-1, n), steps[:n])]
        outer = [
            n
            for n in divisors
            if self._is_one(steps.reshape(n, -1), steps[:: count // n])
        ]
        both = [
            (a * b, a, b)
            for a, b in itertools.product(outer, inner)
            if a * b < count and not count % (a * b)
        ]
        if not both:
            return None
        _, a, b = max(both)
        cut = _Cut(a, b, steps[: count // a : b])
        self.made += factored(steps[:: count // a], self.other) or ()
        self.made += factored(steps[:b], self.other) or ()
        return cut

    def _is_one(self, rows: np.ndarray, part: np.ndarray) -> bool:
        """Return whether all rows move alike, and a part of the axis is of digits."""
        alike = (rows - rows[:, :1] == rows[0] - rows[0, 0]).all()
        return bool(alike) and factored(part - part[0], self.other) is not None

    def _cut_at_gap(self, every: Sequence[np.ndarray]) -> None:
        """Cut an axis at a digit between whose values others are left out."""
        for axis, steps in enumerate(every):
            digits = factored(steps, self.other) or ()
            for place, digit in enumerate(digits):
                above, below = (
                    math.prod(d.size for d in some)
                    for some in (digits[:place], digits[place + 1 :])
                )
                reach = self._reach(digit.axis)[0]
                if digit.step > reach and not digit.step % reach:
                    moves = steps[: below * digit.size : below]
                    self.cuts[axis] = _Cut(above, below, moves)
                    self.made.remove(digit)
                    return

    def _reach(self, axis: int) -> tuple[int, int]:
        """Return how many indices of the other's axis digits make up, and the next."""
        reach = 1
        for digit in sorted(
            (d for d in self.made if d.axis == axis), key=lambda d: d.step
        ):
            if digit.step != reach:
                return reach, digit.step
            reach *= digit.size
        return reach, self.other[axis]

    def selected(self, cut: _Cut) -> tuple[int, int, int, tuple[int, ...], int] | None:
        """Return which values of an axis of the other array a factor takes.

        Returns:
            The axis, how often the values follow each other there, how many indices are
            one, the values, and how many there are.
        """
        stride = math.prod(self.other)
        for axis, length in enumerate(self.other):
            stride //= length
            index = self.start // stride % length + cut.moves // stride
            if (cut.moves % stride).any() or index.min() < 0 or index.max() >= length:
                continue
            inner, end = self._reach(axis)
            if end % inner or length % end or (index % inner).any():
                return None
            values = tuple(int(n) for n in index // inner)
            is_once = len({*values}) == len(values) and max(values) < end // inner
            return (
                (axis, length // end, inner, values, end // inner) if is_once else None
            )
        return None


def selected_of(
    part: Variant,
    whole: Variant,
    points: tuple[np.ndarray, np.ndarray],
    counts: Sequence[int],
    *,
    in_parts: bool,
) -> list[Selected]:
    """Return which values of the source an array of the target takes.

    Args:
        part: of the target.
        whole: of the source.
        points: where numbers are in the part, and in the whole.
        counts: how many numbers there are at each place of the source's paths.
        in_parts: whether what is taken may be a factor of an axis.
    """
    steps = _Steps(part.ranked, points, whole.numbered, in_parts=in_parts)
    every = [steps.selected(cut) for cut in steps.cuts.values() if steps.start >= 0]
    found = []
    slots = len(whole.values)
    for one in every:
        if one is None:
            return []
        axis, outer, inner, values, size = one
        if axis < slots:
            place = whole.positions[axis]
            if outer * inner > 1 or max(values) >= counts[place]:
                return []
            found.append(Selected(place, True, 1, 1, values, counts[place]))
        else:
            found.append(Selected(axis - slots, False, outer, inner, values, size))
    return found


def ordered_in(
    part: Variant,
    whole: Variant,
    points: tuple[np.ndarray, np.ndarray],
    counts: Sequence[int],
    *,
    in_parts: bool,
) -> list[Selected]:
    """Return in which order an array of the source is within one of the target.

    Args:
        part: of the source.
        whole: of the target.
        points: where numbers are in the part, and in the whole.
        counts: how many numbers there are at each place of the source's paths.
        in_parts: whether what is taken may be a factor of an axis.
    """
    steps = _Steps(part.ranked, points, whole.numbered, in_parts=in_parts)
    slots = len(part.values)
    found = []
    for axis, cut in steps.cuts.items() if steps.start >= 0 else ():
        places = cut.moves - cut.moves.min()
        order = np.argsort(places)
        values, size = tuple(int(n) for n in order), len(order)
        if len({*np.diff(places[order]).tolist()}) > 1:
            return []
        if axis < slots:
            place = part.positions[axis]
            if part.values[axis] != [*range(counts[place])] or size < counts[place]:
                return []
            found.append(Selected(place, True, 1, 1, values, size))
        else:
            place = axis - slots
            found.append(Selected(place, False, cut.outer, cut.inner, values, size))
    return found


#: What is taken of leaves of the source, by the template of their paths.
SelectedOf = Mapping[Pattern, Sequence[Selected]]


def taken_links(links: Iterable[Link], selected: SelectedOf) -> Iterator[Link]:
    """Yield links to leaves of the source as if these had the target's order.

    An axis is three there: the taken values, and what is outside and inside of them.
    """
    for link in links:
        source, target = link.ends
        leaf, flat, is_taken = _taken(
            source, link.flats[0], selected.get(source.template, ())
        )
        yield Link((leaf, target), (flat, link.flats[1][is_taken]))


def _taken(
    leaf: NumberedLeaf, flat: np.ndarray, selected: Sequence[Selected]
) -> tuple[NumberedLeaf, np.ndarray, np.ndarray]:
    """Return a leaf with what is taken of it, its indices, and which these are."""
    numbers = [*leaf.numbers]
    by_axis = {one.place: one for one in selected if not one.is_number}
    for one in selected:
        if one.is_number:
            numbers[one.place] = int(one.ranks[numbers[one.place]])
    at = np.unravel_index(flat, leaf.shape) if leaf.shape else ()
    is_taken = np.ones(len(flat), bool)
    shape: list[int] = []
    places: list[np.ndarray] = []
    for axis, index in enumerate(at):
        if axis not in by_axis:
            shape.append(leaf.shape[axis])
            places.append(index)
            continue
        one = by_axis[axis]
        rank = one.ranks[index // one.inner % one.size]
        is_taken &= rank >= 0
        shape += [one.outer, len(one.values), one.inner]
        places += [index // (one.inner * one.size), rank, index % one.inner]
    new = dataclasses.replace(leaf, numbers=tuple(numbers), shape=tuple(shape))
    if at:
        every = tuple(place[is_taken] for place in places)
        flat = np.ravel_multi_index(every, new.shape)
    return new, flat, is_taken


def with_takes(row: DraftRow, selected: SelectedOf) -> DraftRow | None:
    """Return the row of leaves as they are; None if what is taken has no name in it."""
    templates = [*selected]
    every = {tuple(own) for own in selected.values()}
    if len(every) > 1:
        return None
    (own,) = every
    takes: dict[int, Take] = {}
    sizes = dict(row.sizes)
    addresses = []
    for address in row.sources:
        axes = [*address.axes]
        for one in sorted(own, key=lambda one: one.place):
            if one.is_number:
                atoms = _of_number(address, templates, one.place)
                address_axes: tuple[tuple[int, ...], ...] = ()
            else:
                three = axes[one.place : one.place + 3]
                if any(len(axis) > 1 for axis in three):
                    return None
                atoms = three[1][0]
                address_axes = (tuple(itertools.chain(*(axis[0] for axis in three))),)
                axes[one.place : one.place + 3] = [address_axes]
            if len(atoms) != 1 or takes.setdefault(atoms[0], one.take) != one.take:
                return None
            sizes[atoms[0]] = one.size
        addresses.append(DraftAddress(address.tokens, tuple(axes), address.before))
    if any(len(each.order or ()) > MAX_TAKEN for each in takes.values()):
        return None
    row = dataclasses.replace(row, sizes=sizes, takes=tuple(takes.items()))
    return row.with_side(0, tuple(addresses))


def _of_number(
    address: DraftAddress, templates: Sequence[Pattern], place: int
) -> tuple[int, ...]:
    """Return the atoms of a number of a path; none unless it is that and no more."""
    if len(templates) > 1 or len(templates[0]) != len(address.tokens):
        return ()
    at = [i for i, token in enumerate(templates[0]) if token is None][place]
    hole = address.tokens[at]
    is_plain = isinstance(hole, Hole) and not (hole.texts or hole.shift)
    return hole.atoms if isinstance(hole, Hole) and is_plain else ()


def orders_of_numbers(rows: Iterable[DraftRow]) -> dict[Pattern, Take]:
    """Return what rows take of numbers of paths, by what is before these."""
    return {
        above: take
        for row in rows
        for atom, take in row.takes
        for above, hole in _numbers(row)
        if hole.atoms == (atom,)
    }


def with_orders(row: DraftRow, orders: Mapping[Pattern, Take]) -> DraftRow:
    """Return a row that takes the numbers of its paths as others do."""
    takes = dict(row.takes)
    for above, hole in _numbers(row):
        if above in orders and not hole.texts and len(hole.atoms) == 1:
            takes.setdefault(hole.atoms[0], orders[above])
    if len(takes) == len(row.takes):
        return row
    return dataclasses.replace(row, takes=tuple(takes.items()))


def _numbers(row: DraftRow) -> Iterator[tuple[Pattern, Hole]]:
    """Yield holes of the paths of sources, after what is before each."""
    for address in row.sources:
        above = tuple(None if isinstance(t, Hole) else t for t in address.tokens)
        for place, token in enumerate(address.tokens):
            if isinstance(token, Hole):
                yield above[:place], token
