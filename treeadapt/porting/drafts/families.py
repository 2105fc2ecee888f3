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

_LEAST_SISTERS = 3  # families that words divide alike, to say something of layers
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
        words: which number has texts for its values, as ``{p=q,k,v}``, and these.
    """

    tokens: tuple[str | None, ...]
    counts: tuple[int, ...]
    shifts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    paths: tuple[str, ...]
    blocks: int | None = None
    words: tuple[int, tuple[str, ...]] | None = None

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
        """Its path, with ``#`` for the numbers, and texts in braces."""
        return "".join(self.shown)

    @functools.cached_property
    def shown(self) -> tuple[str, ...]:
        """The tokens of its path, with ``#`` for the numbers, and texts in braces."""
        numbers = ["#"] * len(self.counts)
        if self.words is not None:
            slot, texts = self.words
            numbers[slot] = f"{{{','.join(texts)}}}"
        left = iter(numbers)
        return tuple(next(left) if token is None else token for token in self.tokens)

    @property
    def numbers(self) -> Iterator[tuple[int, str]]:
        """Each number that is no text, and what is before it in the path."""
        places = (place for place, token in enumerate(self.tokens) if token is None)
        for slot, place in enumerate(places):
            if self.words is None or self.words[0] != slot:
                yield slot, "".join(self.shown[:place])


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


def with_sister_stacks(
    ones: Sequence[Family], twos: Sequence[Family], words: Words
) -> tuple[list[Family], list[Family]]:
    """Join families that words of one side alone divide, as all others' layers.

    As where a side has a stack of ``local`` layers and one of ``global`` layers, and
    the other side counts layers through. Names show that at once of all modules, and
    later, among those that are left over, of none.
    """
    sides = [[*ones], [*twos]]
    for side in (0, 1):
        while joined := _sisters_joined(sides[side], sides[1 - side], words):
            sides[side] = joined
    return sides[0], sides[1]


def _sisters_joined(
    own: Sequence[Family], others: Sequence[Family], words: Words
) -> list[Family]:
    """Return families of which those that some words divide are one; none without."""
    there = {word for each in others for word in words.of(each.text)}
    contexts: dict[object, dict[str, int]] = {}
    for number, each in enumerate(own):
        form = each.counts, each.shape, each.dtype
        for place, token in enumerate(each.tokens if each.words is None else ()):
            if (
                token is not None
                and token.isalpha()
                and there.isdisjoint(words.of(token))
            ):
                key = place, each.tokens[:place], each.tokens[place + 1 :], form
                contexts.setdefault(key, {})[token] = number
    by_texts: dict[frozenset[str], list[tuple[int, dict[str, int]]]] = defaultdict(list)
    for (place, *_), members in contexts.items():  # type: ignore[misc]
        if len(members) > 1:
            by_texts[frozenset(members)].append((place, members))
    for texts, every in sorted(by_texts.items(), key=lambda item: -len(item[1])):
        stacks = [
            _is_stack_of(own[min(m.values())], len(texts), others) for _, m in every
        ]
        if len(every) < _LEAST_SISTERS or 2 * sum(stacks) < len(stacks):
            continue
        order = words.in_order([*every[0][1]])
        gone = {number for _, members in every for number in members.values()}
        new = {
            min(members.values()): _listed(
                [own[members[t]] for t in order], place, order
            )
            for place, members in every
        }
        numbered = enumerate(own)
        return [new.get(n, each) for n, each in numbered if n in new or n not in gone]
    return []


def _is_stack_of(family: Family, parts: int, others: Iterable[Family]) -> bool:
    """Return whether layers of the other side may be several stacks like this one.

    Args:
        family: a stack.
        parts: how many stacks there are.
        others: of the other side.
    """
    return not any(each.size == family.size for each in others) and any(
        each.size == parts * family.size
        and any(
            count % parts == 0 and count // parts in (*family.counts, *family.shape)
            for count in each.counts
        )
        for each in others
    )


def other_families(
    both: Sequence[tuple[Sequence[Family], Set[int]]], words: Words
) -> tuple[list[Family], list[Family]] | None:
    """Divide or join families without a partner, so that some may get one.

    A number becomes a part of a name; or it becomes two, of blocks of layers and within
    these, and what is left of whole blocks is a family of its own. Or a word becomes a
    number.

    Args:
        both: families of the source, and the numbers of those without a partner; the
            same of the target.
        words: what names mean.

    Returns:
        The families of both sides; None if nothing could get a partner so.
    """
    sides = [[*families_of] for families_of, _ in both]
    left = [numbers for _, numbers in both]
    for way, side in itertools.product((_divided, _joined), (0, 1)):
        others = [sides[1 - side][number] for number in sorted(left[1 - side])]
        new = way(sides[side], left[side], others, words)
        if len(new) != len(sides[side]):
            sides[side] = new
            return sides[0], sides[1]
    return None


def _divided(
    side: Sequence[Family], left: Set[int], others: Sequence[Family], _: Words
) -> list[Family]:
    """Divide what is left of a side in the first way that others fit."""
    for way in (_in_blocks, _slices):
        parts = {number: way(side[number], others) for number in left}
        if any(parts.values()):
            every = (parts.get(n) or [each] for n, each in enumerate(side))
            return [*itertools.chain(*every)]
    return [*side]


def _joined(
    side: Sequence[Family], left: Set[int], others: Sequence[Family], words: Words
) -> list[Family]:
    """Make one of families that differ in one word, if another has the size of all.

    As of four gates, each an array, that are one array on the other side.
    """
    sizes = {each.size for each in others}
    alike: dict[object, dict[str, int]] = {}
    for number in sorted(left):
        each = side[number]
        if each.words is None and each.blocks is None:
            form = each.counts, each.shifts, each.shape, each.dtype
            for place, token in enumerate(each.tokens):
                if token is not None and token.isalnum():
                    key = place, each.tokens[:place], each.tokens[place + 1 :], form
                    alike.setdefault(key, {})[token] = number
    joined: dict[int, Family] = {}
    used: set[int] = set()
    for (place, *_), members in alike.items():  # type: ignore[misc]
        for texts in _of_one_letter([*members]):
            numbers = [members[text] for text in texts]
            size = len(texts) * side[numbers[0]].size
            if len(texts) > 1 and size in sizes and not used & {*numbers}:
                used |= {*numbers}
                ordered = words.in_order(texts)
                parts = [side[members[text]] for text in ordered]
                joined[min(numbers)] = _listed(parts, place, ordered)
    every = enumerate(side)
    return [joined.get(n, each) for n, each in every if n in joined or n not in used]


def _of_one_letter(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield texts, then those that begin, or end, with one letter."""
    yield [*texts]
    for end in (0, -1):
        alike: dict[str, list[str]] = {}
        for text in texts:
            alike.setdefault(text[end], []).append(text)
        yield from alike.values()


def _listed(parts: Sequence[Family], place: int, texts: Sequence[str]) -> Family:
    """Return families that differ in one word as one, with a number for the word."""
    first = parts[0]
    slot = sum(token is None for token in first.tokens[:place])
    grids = [np.reshape(np.array(each.paths, object), first.counts) for each in parts]
    return dataclasses.replace(
        first,
        tokens=(*first.tokens[:place], None, *first.tokens[place + 1 :]),
        counts=(*first.counts[:slot], len(parts), *first.counts[slot:]),
        shifts=(*first.shifts[:slot], 0, *first.shifts[slot:]),
        paths=tuple(np.stack(grids, slot).flat),
        words=(slot, tuple(texts)),
    )


def _slices(family: Family, others: Sequence[Family]) -> list[Family]:
    """Return one family for each value of a number, if one of the others fits."""
    sizes = {each.size for each in others}
    slots = [
        slot
        for slot, count in enumerate(family.counts)
        if count <= _MOST_PARTS and family.size // count in sizes
        if family.words is None or family.words[0] != slot
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
    words = family.words
    if words is not None and slot < words[0] and not end:
        words = words[0] - 1, words[1]
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
        words=words,
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
            tokens = [*family.shown]
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
    return "".join("#" if is_count(token) else token for token in family.shown)


def place_of(family: Family, dims: Sequence[tuple[int, ...]]) -> DraftAddress:
    """Return the place of a family whose numbers and axes are made of atoms."""
    slots = len(family.counts)
    holes = [Hole(*each) for each in zip(dims[:slots], family.shifts, strict=True)]
    if family.words is not None:
        slot, texts = family.words
        holes[slot] = Hole(dims[slot], texts=texts)
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
