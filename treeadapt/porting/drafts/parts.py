"""Rows of arrays that are parts of one array, or all of it.

Takes where the parts are in the whole, as digits of its axes (see ``mixed_radix``);
gives the places of a row: each part is the whole, or its name is the value of an axis,
or the parts follow each other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from treeadapt.porting.drafts.mixed_radix import COPIES, Digit, IndexMap, refined
from treeadapt.porting.drafts.rows import (
    SEGMENT,
    AtomAxes,
    DraftAddress,
    DraftRow,
    Hole,
    windowed,
)

#: Tokens of a path, with None for numbers.
Pattern: TypeAlias = tuple[str | None, ...]


@dataclasses.dataclass
class Variant:
    """Leaves of one template, as one array: its slots, then the axes of a leaf.

    Captures are equal in all of them.

    Attributes:
        template: of their paths.
        positions: of the slots among the numbers of a path.
        values: of each slot, in order.
        fixed: numbers of the path that are no slots, by position.
        shape: of a leaf.
    """

    template: tuple[str | None, ...]
    positions: list[int]
    values: list[list[int]]
    fixed: dict[int, int]
    shape: tuple[int, ...]

    @property
    def ranked(self) -> list[int]:
        """Its sizes if a slot counts the values that there are."""
        return [*map(len, self.values), *self.shape]

    @property
    def numbered(self) -> list[int]:
        """Its sizes if a slot counts from 0."""
        return [*(values[-1] + 1 for values in self.values), *self.shape]


def row_of_parts(
    side: int,
    parts: Sequence[Variant],
    whole: Variant,
    maps: Sequence[IndexMap],
    captures: Mapping[tuple[int, Pattern, int], int],
) -> DraftRow | None:
    """Return the row of parts that are the whole, or make it up; else None.

    Args:
        side: on which the parts are: 0 for the source, 1 for the target.
        parts: arrays.
        whole: the array on the other side.
        maps: where each part is in it.
        captures: atoms of the numbers that both paths have, by side, template of the
            path, and place among its numbers.
    """
    return _Layout(side, parts, whole, maps, captures).row()


def without_endings(template: Pattern) -> Iterator[tuple[Pattern, int]]:
    """Yield a template without what follows a number of it, and where that began.

    Example:
        >>> [*without_endings(("l", None, "_", "back"))]
        [(('l', None, 'back'), 2), (('l', None), 2)]
    """
    for start in range(1, len(template)):
        ends = (
            range(start + 1, len(template) + 1) if template[start - 1] is None else ()
        )
        for end in ends:
            if template[end - 1] in (None, "/"):
                break
            yield (*template[:start], *template[end:]), start


class _Layout:
    """How parts are in a whole, as the places of a row."""

    def __init__(
        self,
        side: int,
        parts: Sequence[Variant],
        whole: Variant,
        maps: Sequence[IndexMap],
        captures: Mapping[tuple[int, Pattern, int], int],
    ) -> None:
        self._side, self._parts, self._whole = side, parts, whole
        self._maps, self._captures = maps, captures
        self._atoms = itertools.count(1 + max(captures.values(), default=-1))
        self._sizes: dict[int, int] = {}
        self._fixed: dict[int, int] = {}  # atoms of numbers that are always there
        self._gaps: set[int] = set()
        self._copies: set[int] = set()

    def row(self) -> DraftRow | None:
        """Return the row; None if the parts are not the whole."""
        sizes = self._whole.numbered
        spans = [self._span(each) for each in self._maps]
        count = len(self._maps)
        is_whole = [
            self._covers(one, each, sizes)
            for one, each in zip(spans, self._maps, strict=True)
        ]
        if all(is_whole):
            return self._united()
        has_copies = any(each.along(COPIES) for each in self._maps)
        if count == 1 or any(is_whole) or has_copies:
            return None
        tokens = (each.template[-1] or "" for each in self._parts)
        has_segments = any(token.startswith(SEGMENT) for token in tokens)
        if not has_segments and (listed := self._listed()):
            return listed
        # ``l{n}`` takes ``l0_reverse``, too, so no row has both as its parts.
        every = {each.template for each in self._parts}
        shorter = itertools.chain(*map(without_endings, every))
        has_endings = any(without in every for without, _ in shorter)
        return None if has_endings else self._joined(spans)

    def _span(self, each: IndexMap) -> list[int]:
        """Return how many values of each axis of the whole a map reaches.

        It is 0 where other values are between them, as those of other parts are.
        """
        span = []
        slots = len(self._whole.values)
        for axis in range(len(self._whole.numbered)):
            step = 1
            for digit in each.along(axis):
                if digit.step < step or (digit.step > step and axis >= slots):
                    step = 0
                    break
                step = digit.step * digit.size
            span.append(step)
        return span

    def _covers(self, span: list[int], each: IndexMap, sizes: list[int]) -> bool:
        slots = len(self._whole.values)
        is_whole = span[slots:] == sizes[slots:] and not any(each.start[slots:])
        return is_whole and self._has_numbers(each)

    def _has_numbers(self, each: IndexMap) -> bool:
        """Return whether a map reaches all numbers in the paths of the whole."""
        return all(
            math.prod(digit.size for digit in each.along(axis)) == len(values)
            and each.start[axis] == values[0]
            for axis, values in enumerate(self._whole.values)
        )

    def _united(self) -> DraftRow | None:
        """Return the row of parts each of which is the whole."""
        cuts = self._cuts(range(len(self._whole.numbered)))
        atoms: dict[tuple[int, ...], int] = {}
        places = []
        for part, each in zip(self._parts, self._maps, strict=True):
            address = self._part(part, each, cuts, atoms)
            if address is None:
                return None
            places.append(address)
        whole = self._whole_place(atoms, None)
        return None if whole is None else self._made(places, whole)

    def _cuts(self, axes: Iterable[int]) -> dict[int, list[int]]:
        """Return where digits start along axes of the whole, and the end of each."""
        cuts: dict[int, set[int]] = {axis: {1} for axis in axes}
        for each in self._maps:
            for digit in itertools.chain(*each.digits):
                if digit.axis in cuts:
                    cuts[digit.axis].add(digit.step)
                    if digit.axis >= len(self._whole.values):
                        cuts[digit.axis].add(digit.step * digit.size)
        return {axis: sorted(starts) for axis, starts in cuts.items()}

    def _atom(
        self, key: tuple[int, ...], size: int, atoms: dict[tuple[int, ...], int]
    ) -> int:
        if key not in atoms:
            atoms[key] = next(self._atoms)
            self._sizes[atoms[key]] = size
        return atoms[key]

    def _part(
        self,
        part: Variant,
        each: IndexMap,
        cuts: Mapping[int, Sequence[int]],
        atoms: dict[tuple[int, ...], int],
    ) -> DraftAddress | None:
        """Return the place of a part; notes its atoms by axis and step."""
        dims: list[tuple[int, ...]] = []
        for digits in each.digits:
            atoms_of_axis: list[int] = []
            for digit in digits:
                pieces = refined(digit, cuts.get(digit.axis, ()))
                if pieces is None:
                    return None
                for piece in pieces:
                    key = piece.axis, piece.step
                    if piece.axis == COPIES:  # of equal size in all parts, or no row
                        key = COPIES, piece.size
                    atoms_of_axis.append(self._atom(key, piece.size, atoms))
            dims.append(tuple(atoms_of_axis))
        self._copies = {atom for key, atom in atoms.items() if key[0] == COPIES}
        holes: dict[int, Hole] = {}
        for position, values, own in zip(
            part.positions, part.values, dims, strict=False
        ):
            first, is_run = values[0], values == [*range(values[0], values[-1] + 1)]
            if not is_run or (first and len(own) > 1) or self._copies & {*own}:
                return None
            holes[position] = Hole(own, first)
        axes: AtomAxes = tuple((own,) for own in dims[len(part.values) :])
        return DraftAddress(self._filled(self._side, part, holes), axes)

    def _filled(
        self, side: int, variant: Variant, holes: Mapping[int, Hole]
    ) -> tuple[str | Hole, ...]:
        tokens: list[str | Hole] = []
        place = 0
        for token in variant.template:
            if token is not None:
                tokens.append(token)
                continue
            atom = self._captures.get((side, variant.template, place))
            if atom is not None:
                tokens.append(Hole((atom,)))
            elif place in holes:
                tokens.append(holes[place])
            else:
                tokens.append(str(variant.fixed[place]))
            place += 1
        return tuple(tokens)

    def _whole_place(
        self,
        atoms: dict[tuple[int, ...], int],
        bracket: tuple[int, AtomAxes] | None,
    ) -> DraftAddress | None:
        """Return the place of the whole, whose atoms the parts have noted."""
        whole = self._whole
        by_axis: dict[int, list[tuple[int, int]]] = {}
        for key, atom in atoms.items():
            by_axis.setdefault(key[0], []).append((key[1], atom))
        holes: dict[int, Hole] = {}
        for axis, (position, values) in enumerate(
            zip(whole.positions, whole.values, strict=True)
        ):
            steps = sorted(by_axis.get(axis, ()))
            hole = self._hole(steps, values)
            if hole is None:
                return None
            holes[position] = hole
        axes: list[tuple[tuple[int, ...], ...]] = []
        for axis in range(len(whole.values), len(whole.numbered)):
            if bracket is not None and axis == bracket[0]:
                axes.append(bracket[1][0])
            else:
                steps = sorted(by_axis.get(axis, ()), reverse=True)
                axes.append((tuple(atom for _, atom in steps),))
        return DraftAddress(self._filled(1 - self._side, whole, holes), tuple(axes))

    def _hole(self, digits: list[tuple[int, int]], values: list[int]) -> Hole | None:
        """Return the hole of a number of the whole.

        Args:
            digits: steps and atoms, the innermost first.
            values: of the number.
        """
        start = values[0]
        steps = [step for step, _ in digits]
        if not digits:
            return None
        if start and steps == [1]:
            return Hole((digits[0][1],), start)
        if steps[0] != 1:
            # The number is also made of one that is the same in all of these leaves.
            if not 0 <= start < steps[0]:
                return None
            self._fixed[next(self._atoms)] = start
            atom = max(self._fixed)
            self._sizes[atom] = steps[0]
            digits = [(1, atom), *digits]
        elif start:
            return None
        for (step, atom), (above, _) in itertools.pairwise(digits):
            if above // step != self._sizes[atom] or atom in self._fixed:
                self._gaps.add(atom)
            self._sizes[atom] = above // step
        return Hole(tuple(atom for _, atom in reversed(digits)))

    def _listed(self) -> DraftRow | None:
        """Return the row of equal parts, whose names are the values of an axis."""
        parts, maps = self._parts, self._maps
        first = parts[0]
        order = sorted(range(len(parts)), key=lambda number: maps[number].start)
        alike = all(
            part.ranked == first.ranked
            and part.values == first.values
            and each.digits == maps[0].digits
            for part, each in zip(parts, maps, strict=True)
        )
        if not alike:
            return None
        starts = [maps[number].start for number in order]
        moved = [a for a in range(len(starts[0])) if starts[0][a] != starts[-1][a]]
        if len(moved) != 1 or any(starts[0][len(self._whole.values) :]):
            return None
        axis = moved[0]
        steps = {b[axis] - a[axis] for a, b in itertools.pairwise(starts)}
        if len(steps) != 1 or axis < len(self._whole.values):
            return None
        step = steps.pop()
        places = []
        digits = maps[0].along(axis)
        # The list is one more digit of that axis; all together are the axis.
        chain = sorted([*((d.step, d.size) for d in digits), (step, len(parts))])
        reach = 1
        for unit, size in chain:
            if unit != reach:
                return None
            reach = unit * size
        sizes = self._whole.numbered
        every = self._span(maps[0])
        if reach != sizes[axis]:
            return None
        slots = len(self._whole.values)
        others = [a for a in range(slots, len(sizes)) if a != axis]
        if any(every[a] != sizes[a] for a in others):
            return None
        cuts = self._cuts(range(len(sizes)))
        cuts[axis] = sorted({*cuts[axis], step, step * len(parts)})
        atoms: dict[tuple[int, ...], int] = {}
        for number in order:
            place = self._part(parts[number], maps[number], cuts, atoms)
            if place is None:
                return None
            places.append(place)
        atom = self._atom((axis, step), len(parts), atoms)
        window = windowed([place.tokens for place in places])
        if window is None:
            return None
        before, after = window
        texts = tuple(
            "".join(str(t) for t in each.tokens[before : len(each.tokens) - after])
            for each in places
        )
        if len({*texts}) < len(texts):
            return None
        hole = Hole((atom,), texts=texts)
        stop = len(places[0].tokens) - after
        listed = places[0].with_tokens(before, stop, hole)
        whole = self._whole_place(atoms, None)
        if whole is None:
            return None
        is_outermost = step == sizes[axis] // len(parts)
        note = (
            "" if not is_outermost else "equal parts; unequal ones are [a b] and a list"
        )
        return self._made([listed], whole, *([note] if note else []))

    def _joined(self, spans: Sequence[list[int]]) -> DraftRow | None:
        """Return the row of parts that follow each other along an axis."""
        sizes, slots = self._whole.numbered, len(self._whole.values)
        partial = {
            axis
            for span in spans
            for axis in range(slots, len(sizes))
            if span[axis] != sizes[axis]
        }
        if len(partial) != 1:
            return None
        axis = partial.pop()
        if any(0 in (*span[:axis], *span[axis + 1 :]) for span in spans):
            return None
        outer = self._outer(axis, sizes[axis])
        block = min((digit.step for digit in outer), default=sizes[axis])
        every = [  # the digits of each part within a block
            [digit for digit in each.along(axis) if digit.step < block]
            for each in self._maps
        ]
        order = sorted(
            range(len(self._maps)), key=lambda number: self._maps[number].start[axis]
        )
        end = 0
        for number in order:
            start, inner = self._maps[number].start, every[number]
            others = [*start[slots:axis], *start[axis + 1 :]]
            reach = 1
            for digit in inner:
                if digit.step != reach:
                    return None
                reach *= digit.size
            if start[axis] != end or any(others):
                return None
            end += reach
        if end != block:
            return None
        if not all(map(self._has_numbers, self._maps)):
            return None
        cuts = self._cuts(a for a in range(len(sizes)) if a != axis)
        atoms: dict[tuple[int, ...], int] = {}
        shared: dict[tuple[int, int, int], int] = {}
        places, products = [], []
        for number in order:
            part_atoms: dict[tuple[int, ...], int] = dict(atoms)
            part, each = self._parts[number], self._maps[number]
            # Factors of equal size, counted from the innermost, have one name.
            digits = every[number]
            product = []
            for place, digit in enumerate(digits):
                key = place, digit.size, len(digits) if place else 0
                if key not in shared:
                    shared[key] = next(self._atoms)
                    self._sizes[shared[key]] = digit.size
                part_atoms[axis, digit.step] = shared[key]
                product.append(shared[key])
            address = self._part(part, each, cuts, part_atoms)
            if address is None:
                return None
            atoms |= {key: atom for key, atom in part_atoms.items() if key[0] != axis}
            for digit in outer:
                atoms[axis, digit.step] = part_atoms[axis, digit.step]
            places.append(address)
            outside = [atoms[axis, digit.step] for digit in reversed(outer)]
            products.append((*outside, *reversed(product)))
        whole = self._whole_place(atoms, (axis, (tuple(products),)))
        if whole is None:
            return None
        return self._made(places, dataclasses.replace(whole, before=len(outer)))

    def _outer(self, axis: int, size: int) -> list[Digit]:
        """Return the digits of all parts along an axis of which each value has all.

        As groups of heads, each with its queries, then its key, then its value.
        """
        every = [each.along(axis) for each in self._maps]
        outer: list[Digit] = []
        for digits in zip(*(reversed(each) for each in every), strict=False):
            digit = digits[0]
            below = size if not outer else outer[0].step
            if len({*digits}) > 1 or digit.step * digit.size != below:
                break
            outer.insert(0, digit)
        return outer if outer and min(map(len, every)) > len(outer) else []

    def _made(
        self, parts: list[DraftAddress], whole: DraftAddress, *notes: str
    ) -> DraftRow | None:
        for atom, start in self._fixed.items():
            # A number that is in all paths of the parts gets the name.
            at = [
                [i for i, token in enumerate(each.tokens) if token == str(start)]
                for each in parts
            ]
            if any(len(each) != 1 for each in at):
                return None
            parts = [
                part.with_tokens(place, place + 1, Hole((atom,)))
                for part, (place,) in zip(parts, at, strict=True)
            ]
        if self._copies and (
            self._side == 0
            or len(self._copies) > 1
            or math.prod(self._whole.numbered) == 1  # as zeros are of any zero
        ):
            return None
        sides = (parts, [whole]) if self._side == 0 else ([whole], parts)
        for atom in self._captures.values():
            self._sizes.setdefault(atom, 0)
        return DraftRow(
            tuple(sides[0]),
            tuple(sides[1]),
            self._sizes,
            (),
            "values",
            notes=notes,
            gaps=frozenset(self._gaps),
            fixed=frozenset(self._fixed),
            copies=frozenset(self._copies),
        )
