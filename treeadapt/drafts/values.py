"""Rows from values: which numbers of the source are which of the target.

Leaves that share numbers are linked. What is linked, and alike but for the numbers in
its paths, is one row: numbers that are equal along every link are captures, all others
are axes of one array that the leaves are together. ``digits`` finds how an index of one
side is made of those of the other one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from treeadapt.drafts.digits import IndexMap, fit_map, refined
from treeadapt.drafts.numbers import Origins
from treeadapt.drafts.rows import (
    AtomAxes,
    DraftAddress,
    DraftRow,
    Hole,
    is_count,
    tokens_of,
    windowed,
)

#: Tokens of a path, with None for numbers.
_Pattern: TypeAlias = tuple[str | None, ...]

_LEAST_KNOWN = 0.2  # of a leaf, before its numbers are evidence
_LEAST_LINK = 0.005  # of what is known of a leaf, before it is of another one
_MAX_NUMBER = 10**6


@dataclasses.dataclass(frozen=True)
class NumberedLeaf:
    """A leaf of one side.

    Attributes:
        path: its path.
        shape: of its array.
        template: its tokens, with None for numbers.
        numbers: in its path.
    """

    path: str
    shape: tuple[int, ...]
    template: tuple[str | None, ...]
    numbers: tuple[int, ...]


def leaf_of(path: str, shape: tuple[int, ...]) -> NumberedLeaf:
    """Return a leaf with the numbers of its path apart."""
    tokens = tokens_of(path)
    numbers = tuple(int(token) for token in tokens if is_count(token))
    template = tuple(None if is_count(token) else token for token in tokens)
    return NumberedLeaf(path, shape, template, numbers)


@dataclasses.dataclass(frozen=True)
class Link:
    """Numbers that two leaves share: where they are in each."""

    source: int
    target: int
    source_flat: np.ndarray
    target_flat: np.ndarray


def find_links(
    targets: Sequence[NumberedLeaf],
    origins: Mapping[str, Origins],
    least: float = _LEAST_KNOWN,
) -> list[Link]:
    """Return which leaves share numbers."""
    links = []
    for number, leaf in enumerate(targets):
        origin = origins.get(leaf.path)
        if origin is None or origin.share < least or not len(origin.flat):
            continue
        order = np.argsort(origin.leaves, kind="stable")
        leaves, starts = np.unique(origin.leaves[order], return_index=True)
        for source, shared in zip(leaves, np.split(order, starts[1:]), strict=True):
            if len(shared) >= max(1, _LEAST_LINK * len(origin.flat)):
                links.append(
                    Link(
                        int(source), number, origin.places[shared], origin.flat[shared]
                    )
                )
    return links


def rows_of_links(
    sources: Sequence[NumberedLeaf],
    targets: Sequence[NumberedLeaf],
    links: Sequence[Link],
) -> list[DraftRow]:
    """Return the rows that shared numbers show; none for links that follow no row."""
    pools: dict[object, list[list[Link]]] = {}
    for component in _components(links):
        ends = {(0, sources[one.source].template) for one in component}
        ends |= {(1, targets[one.target].template) for one in component}
        pools.setdefault(frozenset(ends), []).append(component)
    rows: list[DraftRow] = []
    for pool in pools.values():
        pool_rows = _Pool(sources, targets, pool).rows()
        if pool_rows is None:  # apart, some may follow one
            shapes: dict[object, list[list[Link]]] = {}
            for component in pool:
                key = frozenset(
                    (sources[one.source].shape, targets[one.target].shape)
                    for one in component
                )
                shapes.setdefault(key, []).append(component)
            parts = (_Pool(sources, targets, part).rows() for part in shapes.values())
            pool_rows = [row for part in parts for row in part or ()]
        rows += pool_rows
    return rows


def _components(links: Sequence[Link]) -> list[list[Link]]:
    """Divide links into those that hang together."""
    parents: dict[tuple[int, int], tuple[int, int]] = {}

    def root(node: tuple[int, int]) -> tuple[int, int]:
        while parents.setdefault(node, node) != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for link in links:
        parents[root((0, link.source))] = root((1, link.target))
    components: dict[tuple[int, int], list[Link]] = {}
    for link in links:
        components.setdefault(root((0, link.source)), []).append(link)
    return list(components.values())


@dataclasses.dataclass
class _Variant:
    """Leaves of one template, as one array: its slots, then the axes of a leaf.

    Captures are equal in all of them.

    Attributes:
        template: of their paths.
        positions: of the slots among the numbers of a path.
        values: of each slot, in order.
        fixed: numbers of the path that are no slots, by position.
        shape: of a leaf.
        leaves: numbers of the leaves in the side, by the values of their slots.
    """

    template: tuple[str | None, ...]
    positions: list[int]
    values: list[list[int]]
    fixed: dict[int, int]
    shape: tuple[int, ...]
    leaves: dict[tuple[int, ...], int]

    @property
    def ranked(self) -> list[int]:
        """Its sizes if a slot counts the values that there are."""
        return [*map(len, self.values), *self.shape]

    @property
    def numbered(self) -> list[int]:
        """Its sizes if a slot counts from 0."""
        return [*(values[-1] + 1 for values in self.values), *self.shape]


class _Pool:
    """Components that are alike but for numbers in paths."""

    def __init__(
        self,
        sources: Sequence[NumberedLeaf],
        targets: Sequence[NumberedLeaf],
        components: Sequence[Sequence[Link]],
    ) -> None:
        self._sides = (sources, targets)
        self._components = components
        self._captures = self._find_captures()

    def rows(self) -> list[DraftRow] | None:
        """Return the rows; None if not all of it follows one."""
        by_key: dict[object, list[Link]] = {}
        for component in self._components:
            by_key.setdefault(self._key(component[0]), []).extend(component)
        kinds: dict[object, list[Link]] = {}
        for links in by_key.values():
            kinds.setdefault(self._kind(links), []).extend(links)
        rows: dict[object, list[DraftRow]] = {}
        for links in kinds.values():
            row = self._row(links)
            if row is None:
                return None
            row = dataclasses.replace(row, pairs=_pairs(links, *self._sides))
            form = row.sources, row.targets, row.gaps, row.notes
            rows.setdefault(form, []).append(row)
        return [
            dataclasses.replace(
                every[0], pairs=tuple(pair for row in every for pair in row.pairs)
            )
            for every in rows.values()
        ]

    def _leaf(self, side: int, link: Link) -> NumberedLeaf:
        return self._sides[side][(link.source, link.target)[side]]

    def _find_captures(
        self,
    ) -> list[dict[tuple[int, _Pattern], list[int]]]:
        """Return classes of positions whose numbers are equal along every link."""
        equal: dict[tuple[_Pattern, _Pattern], np.ndarray] = {}
        seen: dict[tuple[int, _Pattern, int], set[int]] = {}
        for link in itertools.chain(*self._components):
            one, two = self._leaf(0, link), self._leaf(1, link)
            for side, leaf in enumerate((one, two)):
                for place, number in enumerate(leaf.numbers):
                    seen.setdefault((side, leaf.template, place), set()).add(number)
            same = np.equal.outer(one.numbers, two.numbers)
            key = one.template, two.template
            equal[key] = equal[key] & same if key in equal else same
        classes: list[dict[tuple[int, _Pattern], list[int]]] = []
        sides = [
            sorted({s for s, _ in equal}, key=str),
            sorted({t for _, t in equal}, key=str),
        ]
        # A class starts from a number of one template and takes what equals it.
        first = sides[0][0]
        for place in range(sum(token is None for token in first)):
            if len(seen.get((0, first, place), ())) < 2:
                continue
            nodes: dict[tuple[int, _Pattern], list[int]] = {}
            waiting, reached = [(0, first, place)], {(0, first, place)}
            while waiting:
                side, template, position = waiting.pop()
                nodes.setdefault((side, template), []).append(position)
                for (s, t), same in equal.items():
                    if (s, t)[side] != template:
                        continue
                    others = np.flatnonzero(
                        same[position] if side == 0 else same[:, position]
                    )
                    for other in map(int, others):
                        node = (1 - side, (s, t)[1 - side], other)
                        if node not in reached:
                            reached.add(node)
                            waiting.append(node)
            whole = len(nodes) == len(sides[0]) + len(sides[1])
            if whole and nodes not in classes:
                classes.append(
                    {key: sorted(position) for key, position in nodes.items()}
                )
        return classes

    def _key(self, link: Link) -> tuple[int, ...]:
        return self._captured(0, self._leaf(0, link))

    def _captured(self, side: int, leaf: NumberedLeaf) -> tuple[int, ...]:
        """Return the numbers of a path that are captures."""
        return tuple(
            leaf.numbers[each[side, leaf.template][0]] for each in self._captures
        )

    def _kind(self, links: Sequence[Link]) -> object:
        """Return what decides of the form of a row: equal ones have one form."""
        kinds = set()
        for link in links:
            for side in (0, 1):
                leaf = self._leaf(side, link)
                captured = {
                    place
                    for each in self._captures
                    for place in each[side, leaf.template]
                }
                numbers = tuple(
                    n for i, n in enumerate(leaf.numbers) if i not in captured
                )
                kinds.add((side, leaf.template, leaf.shape, numbers))
        return frozenset(kinds)

    def _variants(self, side: int, links: Sequence[Link]) -> list[_Variant] | None:
        """Return the leaves of one side as arrays, one for each template."""
        leaves: dict[_Pattern, dict[int, NumberedLeaf]] = {}
        for link in links:
            leaf = self._leaf(side, link)
            number = (link.source, link.target)[side]
            leaves.setdefault(leaf.template, {})[number] = leaf
        variants = []
        for template, by_number in leaves.items():
            captured = {
                place for each in self._captures for place in each[side, template]
            }
            first = self._key(links[0])
            rows = [
                leaf.numbers
                for leaf in by_number.values()
                if self._captured(side, leaf) == first
            ]
            free = [i for i in range(len(rows[0])) if i not in captured]
            slots = [i for i in free if len({row[i] for row in rows}) > 1]
            values = [sorted({row[i] for row in rows}) for i in slots]
            by_slot = {
                tuple(leaf.numbers[i] for i in slots): number
                for number, leaf in by_number.items()
            }
            is_grid = len(by_slot) == len(rows) == math.prod(map(len, values))
            shapes = {leaf.shape for leaf in by_number.values()}
            is_small = all(each[-1] < _MAX_NUMBER for each in values)
            if not is_grid or len(shapes) > 1 or not is_small:
                return None
            fixed = {i: rows[0][i] for i in free if i not in slots}
            variants.append(
                _Variant(template, slots, values, fixed, shapes.pop(), by_slot)
            )
        return variants

    def _row(self, links: Sequence[Link]) -> DraftRow | None:
        sources, targets = self._variants(0, links), self._variants(1, links)
        if sources is None or targets is None:
            return None
        sides = (sources, targets)
        for side in (1, 0):  # the parts are targets, or sources
            if len(sides[1 - side]) == 1:
                row = self._placed(side, sides[side], sides[1 - side][0], links)
                if row is not None:
                    return row
        return None

    def _placed(
        self, side: int, parts: list[_Variant], whole: _Variant, links: Sequence[Link]
    ) -> DraftRow | None:
        """Return the row if each part is somewhere in the whole.

        Args:
            side: on which the parts are.
            parts: arrays.
            whole: the array on the other side.
            links: between them.
        """
        maps = []
        for part in parts:
            flat, places = self._points(side, part, whole, links)
            index_map = fit_map(part.ranked, flat, places, whole.numbered)
            if index_map is None:
                return None
            maps.append(index_map)
        captures = {
            (s, template, place): atom
            for atom, each in enumerate(self._captures)
            for (s, template), places in each.items()
            for place in places
        }
        return _Layout(side, parts, whole, maps, captures).row()

    def _points(
        self, side: int, part: _Variant, whole: _Variant, links: Sequence[Link]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where numbers are in the part, and where in the whole."""
        ranks = [{v: i for i, v in enumerate(values)} for values in part.values]
        flat, places = [], []
        for link in links:
            leaf, other = self._leaf(side, link), self._leaf(1 - side, link)
            if leaf.template != part.template:
                continue
            inner, outer = (link.source_flat, link.target_flat)[
                :: 1 if side == 0 else -1
            ]
            slot = [
                r[leaf.numbers[i]] for r, i in zip(ranks, part.positions, strict=True)
            ]
            flat.append(inner + _flat(slot, part.ranked) * math.prod(part.shape))
            slot = [other.numbers[i] for i in whole.positions]
            places.append(outer + _flat(slot, whole.numbered) * math.prod(whole.shape))
        return np.concatenate(flat), np.concatenate(places)


def _flat(values: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for value, size in zip(values, sizes, strict=False):
        number = number * size + value
    return number


def _pairs(
    links: Iterable[Link],
    sources: Sequence[NumberedLeaf],
    targets: Sequence[NumberedLeaf],
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return the leaves of each component."""
    return tuple(
        (
            tuple(dict.fromkeys(sources[each.source].path for each in component)),
            tuple(dict.fromkeys(targets[each.target].path for each in component)),
        )
        for component in _components(list(links))
    )


class _Layout:
    """How parts are in a whole, as the places of a row."""

    def __init__(
        self,
        side: int,
        parts: Sequence[_Variant],
        whole: _Variant,
        maps: Sequence[IndexMap],
        captures: Mapping[tuple[int, _Pattern, int], int],
    ) -> None:
        self._side, self._parts, self._whole = side, parts, whole
        self._maps, self._captures = maps, captures
        self._atoms = itertools.count(1 + max(captures.values(), default=-1))
        self._sizes: dict[int, int] = {}
        self._fixed: dict[int, int] = {}  # atoms of numbers that are always there
        self._gaps: set[int] = set()

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
        if count == 1 or any(is_whole):
            return None
        return self._listed() or self._joined(spans)

    def _span(self, each: IndexMap) -> list[int]:
        """Return how many values of each axis of the whole a map reaches.

        It is 0 where other values are between them, as those of other parts are.
        """
        span = []
        slots = len(self._whole.values)
        for axis in range(len(self._whole.numbered)):
            on_axis = sorted(
                (d for digits in each.digits for d in digits if d.axis == axis),
                key=lambda digit: digit.step,
            )
            step = 1
            for digit in on_axis:
                if digit.step < step or (digit.step > step and axis >= slots):
                    step = 0
                    break
                step = digit.step * digit.size
            span.append(step)
        return span

    def _covers(self, span: list[int], each: IndexMap, sizes: list[int]) -> bool:
        slots = len(self._whole.values)
        for axis, values in enumerate(self._whole.values):
            reached = math.prod(
                d.size for digits in each.digits for d in digits if d.axis == axis
            )
            if reached != len(values) or each.start[axis] != values[0]:
                return False
        return span[slots:] == sizes[slots:] and not any(each.start[slots:])

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
        whole = self._whole_place(atoms, cuts, None)
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
        part: _Variant,
        each: IndexMap,
        cuts: Mapping[int, Sequence[int]],
        atoms: dict[tuple[int, ...], int],
    ) -> DraftAddress | None:
        """Return the place of a part; notes its atoms by axis and step."""
        dims: list[tuple[int, ...]] = []
        for digits in each.digits:
            atoms_of_axis: list[int] = []
            for digit in digits:
                pieces = refined([digit], cuts.get(digit.axis, ()))
                if pieces is None:
                    return None
                atoms_of_axis += [
                    self._atom((p.axis, p.step), p.size, atoms) for p in pieces
                ]
            dims.append(tuple(atoms_of_axis))
        return self._place(self._side, part, dims, each)

    def _place(
        self,
        side: int,
        variant: _Variant,
        dims: Sequence[tuple[int, ...]],
        each: IndexMap,
    ) -> DraftAddress | None:
        """Return the place of a variant whose slots and axes are made of atoms."""
        holes: dict[int, Hole] = {}
        for position, values, atoms in zip(
            variant.positions, variant.values, dims, strict=False
        ):
            is_run = values == list(range(values[0], values[0] + len(values)))
            if side == self._side and not is_run and len(atoms) > 1:
                return None
            if side == self._side and not is_run:
                return None
            shift = values[0] if side == self._side else each.start[len(holes)]
            if shift and len(atoms) > 1:
                return None
            holes[position] = Hole(atoms, shift)
        axes: AtomAxes = tuple((atoms,) for atoms in dims[len(variant.values) :])
        return DraftAddress(self._filled(side, variant, holes), axes)

    def _filled(
        self, side: int, variant: _Variant, holes: Mapping[int, Hole]
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
        cuts: Mapping[int, Sequence[int]],
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
        digits = [d for many in maps[0].digits for d in many if d.axis == axis]
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
        tokens = places[0].tokens
        hole = Hole((atom,), texts=texts)
        listed = DraftAddress(
            (*tokens[:before], hole, *tokens[len(tokens) - after :]), places[0].axes
        )
        whole = self._whole_place(atoms, cuts, None)
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
        if len(partial) != 1 or any(0 in span for span in spans):
            return None
        axis = partial.pop()
        order = sorted(
            range(len(self._maps)), key=lambda number: self._maps[number].start[axis]
        )
        end = 0
        for number in order:
            start, span = self._maps[number].start, spans[number]
            others = [*start[slots:axis], *start[axis + 1 :]]
            if start[axis] != end or any(others):
                return None
            end += span[axis]
        if end != sizes[axis]:
            return None
        for number, values in enumerate(self._whole.values):
            for each in self._maps:
                reached = math.prod(
                    d.size for many in each.digits for d in many if d.axis == number
                )
                if reached != len(values) or each.start[number] != values[0]:
                    return None
        cuts = self._cuts(a for a in range(len(sizes)) if a != axis)
        atoms: dict[tuple[int, ...], int] = {}
        shared: dict[tuple[int, int, int], int] = {}
        places, products = [], []
        for number in order:
            part_atoms: dict[tuple[int, ...], int] = dict(atoms)
            part, each = self._parts[number], self._maps[number]
            # Factors of equal size, counted from the innermost, have one name.
            digits = sorted(
                (d for many in each.digits for d in many if d.axis == axis),
                key=lambda digit: digit.step,
            )
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
            places.append(address)
            products.append(tuple(reversed(product)))
        whole = self._whole_place(atoms, cuts, (axis, (tuple(products),)))
        return None if whole is None else self._made(places, whole)

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
                DraftAddress((*p.tokens[:i], Hole((atom,)), *p.tokens[i + 1 :]), p.axes)
                for p, (i,) in zip(parts, at, strict=True)
            ]
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
        )
