"""Families: leaves whose paths differ in numbers only, and their places in rows.

A number that does not count from 0 is a part of a name, as in ``norm1``. Of several
such siblings it says which one a leaf is: by itself if the other side has the same
numbers, else by its rank, because a ``Sequential`` counts what has no leaves, too, and
some libraries count from 1.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from treeadapt.porting.drafts.rows import (
    DraftAddress,
    Hole,
    by_template,
    is_count,
    tokens_of,
)
from treeadapt.porting.drafts.shapes import AxisOrder
from treeadapt.porting.drafts.synonyms import Words

_MOST_PARTS = 64  # families that one becomes

#: Values of each number with siblings, by the tokens before it and its own text.
Siblings = dict[tuple[tuple[str | None, ...], str], tuple[int, ...]]


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
        blocks: which number is two: of a block, and within it, ``{(b i)}``.
    """

    tokens: tuple[str | None, ...]
    counts: tuple[int, ...]
    shifts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    paths: tuple[str, ...]
    blocks: int | None = None

    @functools.cached_property
    def dims(self) -> tuple[tuple[int, ...], int]:
        """Counts of its numbers, then its axes; how many of these are numbers."""
        return (*self.counts, *self.shape), len(self.counts)

    @functools.cached_property
    def size(self) -> int:
        """How many numbers all of its leaves have."""
        return math.prod(self.counts) * math.prod(self.shape)

    @functools.cached_property
    def text(self) -> str:
        """Its path, with ``#`` for the numbers."""
        return "".join("#" if token is None else token for token in self.tokens)


def families(leaves: Mapping[str, Any]) -> list[Family]:
    """Return the families of the leaves of one side, in their order."""
    return [
        family
        for paths in by_template(leaves).values()
        for family in _parted([(path, tokens_of(path)) for path in paths], leaves)
    ]


def _parted(
    members: list[tuple[str, tuple[str, ...]]], leaves: Mapping[str, Any]
) -> Iterator[Family]:
    """Yield the families of leaves that are alike but for numbers."""
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
            yield from _parted(part, leaves)

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
    ((shape, dtype),) = forms
    ordered = sorted(members, key=lambda each: [int(each[1][i]) for i in values])
    yield Family(
        tuple(None if i in values else token for i, token in enumerate(tokens)),
        tuple(map(len, values.values())),
        tuple(numbers[0] for numbers in values.values()),
        shape,
        dtype,
        tuple(path for path, _ in ordered),
    )


def finer_families(
    source: tuple[Sequence[Family], Set[int]], target: tuple[Sequence[Family], Set[int]]
) -> tuple[list[Family], list[Family]] | None:
    """Divide families without a partner, so that some may get one.

    A number becomes a part of a name; or it becomes two, of blocks of layers and within
    these, and what is left of whole blocks is a family of its own.

    Args:
        source: families of the source, and the numbers of those without a partner.
        target: the same of the target.

    Returns:
        The families of both sides; None if nothing could get a partner so.
    """
    sides = [[*source[0]], [*target[0]]]
    left = source[1], target[1]
    for side, way in itertools.product((0, 1), (_in_blocks, _slices)):
        others = [sides[1 - side][number] for number in sorted(left[1 - side])]
        finer: list[Family] = []
        for number, family in enumerate(sides[side]):
            parts = way(family, others) if number in left[side] else []
            finer += parts or [family]
        if len(finer) > len(sides[side]):
            sides[side] = finer
            return sides[0], sides[1]
    return None


def _slices(family: Family, others: Sequence[Family]) -> list[Family]:
    """Return one family for each value of a number, if one of the others fits."""
    sizes = {each.size for each in others}
    slots = [
        slot
        for slot, count in enumerate(family.counts)
        if count <= _MOST_PARTS and family.size // count in sizes
    ]
    if not slots or family.blocks is not None:
        return []
    slot = min(slots, key=lambda i: (family.counts[i], -i))
    return [_some(family, slot, value, 1) for value in range(family.counts[slot])]


def _in_blocks(family: Family, others: Sequence[Family]) -> list[Family]:
    """Return the layers of whole blocks and those after them, if two others fit."""
    sizes = {each.size for each in others}
    for slot, count in enumerate(family.counts):
        layer = family.size // count
        for other in others:
            for inner in other.counts:
                blocks, rest = divmod(count, inner)
                fits = {layer * inner * blocks, layer * rest} <= sizes
                is_one = other.size == layer * inner * blocks and blocks in other.shape
                if rest and fits and is_one and not family.shifts[slot]:
                    whole = _some(family, slot, 0, count - rest)
                    counts = whole.counts[:slot], whole.counts[slot + 1 :]
                    shifts = (*whole.shifts[:slot], 0, *whole.shifts[slot:])
                    whole = dataclasses.replace(
                        whole,
                        counts=(*counts[0], blocks, inner, *counts[1]),
                        shifts=shifts,
                        blocks=slot,
                    )
                    return [whole, _some(family, slot, count - rest, rest)]
    return []


def _some(family: Family, slot: int, first: int, count: int) -> Family:
    """Return the leaves with some values of a number; one is a part of their name."""
    place = [i for i, token in enumerate(family.tokens) if token is None][slot]
    grid = np.arange(len(family.paths)).reshape(family.counts)
    some = np.take(grid, range(first, first + count), slot)
    start, end = first + family.shifts[slot], () if count == 1 else (count,)
    token = str(start) if count == 1 else None
    return dataclasses.replace(
        family,
        tokens=(*family.tokens[:place], token, *family.tokens[place + 1 :]),
        counts=(*family.counts[:slot], *end, *family.counts[slot + 1 :]),
        shifts=(
            *family.shifts[:slot],
            *(start for _ in end),
            *family.shifts[slot + 1 :],
        ),
        paths=tuple(family.paths[i] for i in some.flat),
    )


def siblings_of(side: Iterable[Family]) -> Siblings:
    """Return the numbers of siblings that have the same leaves with as many axes."""
    kinds: dict[Any, dict[int, set[object]]] = defaultdict(lambda: defaultdict(set))
    for family in side:
        plain = [
            "#" if token is None or is_count(token) else token
            for token in family.tokens
        ]
        for place, token in enumerate(family.tokens):
            if is_count(token):
                below = (*plain[place + 1 :], len(family.shape))
                kinds[family.tokens[:place]][int(token or 0)].add(below)
    siblings: Siblings = {}
    for before, members in kinds.items():
        alike: dict[frozenset[object], list[int]] = defaultdict(list)
        for value in sorted(members):
            alike[frozenset(members[value])].append(value)
        for group in alike.values():
            if len(group) > 1:
                siblings |= {(before, str(value)): tuple(group) for value in group}
    return siblings


def ranked_texts(
    ones: Sequence[Family], twos: Sequence[Family], words: Words
) -> Iterator[list[str]]:
    """Yield the paths of each side, with ranks for numbers that the other side lacks.

    A number that is a part of a word, as in ``fc1``, stays, if the other side has that
    word without a number.
    """
    every = [siblings_of(side) for side in (ones, twos)]
    plain = [
        {w for f in side for w in words.of(_unnumbered(f))} for side in (ones, twos)
    ]
    groups = [{*siblings.values()} for siblings in every]
    for side, families_of in enumerate((ones, twos)):
        counts = {len(group) for group in groups[1 - side] - groups[side]}
        texts = []
        for family in families_of:
            tokens = ["#" if token is None else token for token in family.tokens]
            for place, token in enumerate(family.tokens):
                group = every[side].get((family.tokens[:place], token or ""))
                if group is None or group in groups[1 - side]:
                    continue
                around = "".join([*tokens[:place], "#", *tokens[place + 1 :]])
                meanings = {*words.of("".join(tokens))} - {*words.of(around)}
                if token not in meanings and meanings & plain[1 - side]:
                    continue
                # Written as no number of a path is, and none of a word.
                is_like = len(group) in counts
                tokens[place] = f"00{group.index(int(token or 0))}" if is_like else "#"
            texts.append("".join(tokens))
        yield texts


def _unnumbered(family: Family) -> str:
    tokens = (
        token if token and not is_count(token) else "#" for token in family.tokens
    )
    return "".join(tokens)


def place_of(family: Family, dims: Sequence[tuple[int, ...]]) -> DraftAddress:
    """Return the place of a family whose numbers and axes are made of atoms."""
    slots = len(family.counts)
    holes = [Hole(*each) for each in zip(dims[:slots], family.shifts, strict=True)]
    if (at := family.blocks) is not None:
        holes[at : at + 2] = [Hole((*holes[at].atoms, *holes[at + 1].atoms))]
    left = iter(holes)
    tokens = (next(left) if token is None else token for token in family.tokens)
    return DraftAddress(tuple(tokens), tuple((atoms,) for atoms in dims[slots:]))


def grouped_paths(
    source: Family, target: Family, layout: AxisOrder
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield the leaves that move together, by the numbers that both paths have."""
    slots = layout.source[: len(source.counts)], layout.target[: len(target.counts)]
    shared = [
        (a, slots[1].index(atoms))
        for a, atoms in enumerate(slots[0])
        if atoms in slots[1]
    ]
    groups: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, family in enumerate((source, target)):
        numbers = itertools.product(*map(range, family.counts))
        for path, values in zip(family.paths, numbers, strict=True):
            groups[tuple(values[pair[side]] for pair in shared)][side].append(path)
    for ones, twos in groups.values():
        yield tuple(ones), tuple(twos)
