"""Families: leaves whose paths differ in numbers only, and their places in rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from treeadapt.drafts.rows import DraftAddress, Hole, is_count, tokens_of
from treeadapt.drafts.shapes import AxisOrder

_MOST_PARTS = 64  # families that one becomes


@dataclasses.dataclass(frozen=True)
class Family:
    """Leaves whose paths differ in numbers only.

    Attributes:
        tokens: of the path, with None for the numbers.
        counts: of each number.
        shifts: the least value of each.
        shape: of a leaf.
        dtype: of a leaf.
        paths: of the leaves, in the order of their numbers.
    """

    tokens: tuple[str | None, ...]
    counts: tuple[int, ...]
    shifts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    paths: tuple[str, ...]

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """Counts of its numbers, then its axes."""
        return (*self.counts, *self.shape)

    @functools.cached_property
    def text(self) -> str:
        """Its path, with ``#`` for the numbers."""
        return "".join("#" if token is None else token for token in self.tokens)


def families(leaves: Mapping[str, Any]) -> list[Family]:
    """Return the families of the leaves of one side, in their order."""
    groups: dict[object, list[tuple[str, tuple[str, ...]]]] = {}
    for path in leaves:
        tokens = tokens_of(path)
        key = tuple(None if is_count(token) else token for token in tokens)
        groups.setdefault(key, []).append((path, tokens))
    return [each for members in groups.values() for each in _divided(members, leaves)]


def _divided(
    members: list[tuple[str, tuple[str, ...]]], leaves: Mapping[str, Any]
) -> Iterator[Family]:
    """Yield the families of leaves that are alike but for numbers.

    A number that does not count from 0 is a part of a name, as in ``norm1``.
    """
    tokens = members[0][1]
    values = {
        i: sorted({int(each[i]) for _, each in members})
        for i in range(len(tokens))
        if is_count(tokens[i]) and any(each[i] != tokens[i] for _, each in members)
    }

    def split(at: int) -> Iterator[Family]:
        parts: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        for path, each in members:
            parts.setdefault(each[at], []).append((path, each))
        for part in parts.values():
            yield from _divided(part, leaves)

    for i, numbers in values.items():
        is_run = numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        is_alone = all(
            (0 <= j < len(tokens) and tokens[j] in ("/", ".")) or j in (-1, len(tokens))
            for j in (i - 1, i + 1)
        )
        if not is_run or (numbers[0] and not (is_alone and len(numbers) > 2)):
            yield from split(i)
            return
    forms = {(tuple(leaves[p].shape), np.dtype(leaves[p].dtype)) for p, _ in members}
    if len(forms) > 1 or len(members) != math.prod(map(len, values.values())):
        yield from split(min(values, key=lambda i: len(values[i])))
        return
    (shape, dtype) = forms.pop()
    ordered = sorted(members, key=lambda each: [int(each[1][i]) for i in values])
    yield Family(
        tuple(None if i in values else token for i, token in enumerate(tokens)),
        tuple(map(len, values.values())),
        tuple(numbers[0] for numbers in values.values()),
        shape,
        dtype,
        tuple(path for path, _ in ordered),
    )


def _without_slot(family: Family, slot: int) -> list[Family]:
    """Return one family for each value of a number, as a part of its name."""
    places = [i for i, token in enumerate(family.tokens) if token is None]
    grid = np.arange(len(family.paths)).reshape(family.counts)
    slices = []
    for value in range(family.counts[slot]):
        tokens = list(family.tokens)
        tokens[places[slot]] = str(value + family.shifts[slot])
        keep = [i for i in range(len(family.counts)) if i != slot]
        slices.append(
            Family(
                tuple(tokens),
                tuple(family.counts[i] for i in keep),
                tuple(family.shifts[i] for i in keep),
                family.shape,
                family.dtype,
                tuple(family.paths[i] for i in np.take(grid, value, slot).reshape(-1)),
            )
        )
    return slices


def rescued(ones: list[Family], others: list[Family]) -> list[Family]:
    """Take a number as a part of the name where its family fits no other."""
    sizes = Counter(math.prod(each.dims) for each in others)
    every: list[Family] = []
    for each in ones:
        total = math.prod(each.dims)
        slots = [
            i
            for i, n in enumerate(each.counts)
            if n <= _MOST_PARTS and sizes[total // n] >= n
        ]
        if slots and not sizes[total]:
            slot = min(slots, key=lambda i: (each.counts[i], -i))
            every += _without_slot(each, slot)
        else:
            every.append(each)
    return every


def place_of(
    family: Family, dims: Sequence[tuple[int, ...]], shifts: Sequence[int] | None = None
) -> DraftAddress:
    """Return the place of a family whose numbers and axes are made of atoms."""
    slots = len(family.counts)
    holes = iter(zip(dims[:slots], shifts or family.shifts, strict=True))
    tokens: list[str | Hole] = []
    for token in family.tokens:
        if token is None:
            atoms, shift = next(holes)
            tokens.append(Hole(atoms, shift))
        else:
            tokens.append(token)
    return DraftAddress(tuple(tokens), tuple((atoms,) for atoms in dims[slots:]))


def grouped_paths(
    one: Family, two: Family, layout: AxisOrder
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield the leaves that move together, by the numbers that both paths have."""
    slots = [
        dims[: len(f.counts)]
        for dims, f in ((layout.source, one), (layout.target, two))
    ]
    shared = [
        (a, slots[1].index(atoms))
        for a, atoms in enumerate(slots[0])
        if atoms in slots[1]
    ]
    groups: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, family in enumerate((one, two)):
        numbers = itertools.product(*map(range, family.counts))
        for path, values in zip(family.paths, numbers, strict=True):
            groups[tuple(values[pair[side]] for pair in shared)][side].append(path)
    for ones, twos in groups.values():
        yield tuple(ones), tuple(twos)
