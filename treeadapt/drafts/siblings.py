"""Numbers of names: which of its siblings a module is.

A ``Sequential`` counts what has no leaves, too: its ``0, 2, 4`` are ``0, 1, 2`` of a
model that has names. Where the numbers of siblings are others than those of the other
side, their ranks are what both may have in common, and an equal digit says nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from treeadapt.drafts.families import Family
from treeadapt.drafts.rows import is_count, tokens_of
from treeadapt.drafts.words import Words


@dataclasses.dataclass(frozen=True)
class Number:
    """A number of a path.

    Attributes:
        before: tokens of the path before it.
        value: of it.
        group: those of all siblings, its own among them, that have the same leaves
            with as many axes, from the least on.
    """

    before: tuple[str, ...]
    value: int
    group: tuple[int, ...]

    @property
    def rank(self) -> int:
        """How many of the siblings have a smaller number."""
        return self.group.index(self.value)

    def is_like(self, other: Number) -> bool:
        """Return whether it is the same one of siblings as another one is.

        Under one name a number may as well have stayed what it was.

        Example:
            >>> of_net = Number(("net", "."), 4, (0, 2, 4))
            >>> of_net.is_like(Number(("dense", "_"), 2, (0, 1, 2)))
            True
            >>> of_net.is_like(Number(("dense", "_"), 4, (0, 4)))
            False
            >>> of_net.is_like(Number(("net", "."), 2, (0, 1, 2)))
            False
        """
        is_same = len(self.group) == len(other.group) and self.rank == other.rank
        return is_same and (self.before != other.before or self.value == other.value)


class _Siblings:
    """The numbers of one side, by what is before them."""

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        kinds: dict[tuple[str, ...], dict[int, set[object]]]
        kinds = defaultdict(lambda: defaultdict(set))
        for path, leaf in leaves.items():
            tokens = tokens_of(path)
            plain = tuple("#" if is_count(token) else token for token in tokens)
            for place, token in enumerate(tokens):
                if is_count(token):
                    below = plain[place + 1 :], len(leaf.shape)
                    kinds[tokens[:place]][int(token)].add(below)
        self._groups: dict[tuple[tuple[str, ...], int], tuple[int, ...]] = {}
        for before, members in kinds.items():
            alike: dict[frozenset[object], list[int]] = defaultdict(list)
            for value in sorted(members):
                alike[frozenset(members[value])].append(value)
            for group in alike.values():
                self._groups |= {(before, value): tuple(group) for value in group}

    def number(self, tokens: tuple[str, ...], place: int) -> Number:
        """Return the number of a path of this side at a place in it."""
        before, value = tokens[:place], int(tokens[place])
        return Number(before, value, self._groups[before, value])


def numbers_of(
    families: Sequence[Family], leaves: Mapping[str, Any]
) -> list[list[Number]]:
    """Return the numbers of each family that all of its leaves have.

    Args:
        families: of the leaves of one side.
        leaves: all of that side.
    """
    siblings = _Siblings(leaves)
    return [
        [
            siblings.number(tokens_of(family.paths[0]), place)
            for place, token in enumerate(family.tokens)
            if is_count(token)
        ]
        for family in families
    ]


def renumbered(
    paths: Iterable[str], source: Mapping[str, Any], target: Mapping[str, Any]
) -> set[str]:
    """Return paths of both sides whose siblings are as many, with other numbers."""
    if source.keys() == target.keys():
        return set()
    sides = [_Siblings(leaves) for leaves in (source, target)]
    moved = set()
    for path in paths:
        tokens = tokens_of(path)
        for place in (at for at, token in enumerate(tokens) if is_count(token)):
            one, two = (side.number(tokens, place).group for side in sides)
            if len(one) == len(two) and one != two:
                moved.add(path)
    return moved


class SiblingNumbers:
    """The numbers of the families of both sides, next to each other.

    Attributes:
        texts: of each family, by side, with ranks in place of numbers that are other
            ones on the other side, and with none where siblings are not as many.
    """

    def __init__(
        self,
        sides: Sequence[Sequence[Family]],
        numbers: Sequence[Sequence[Sequence[Number]]],
        words: Words,
    ) -> None:
        meanings = [
            {word for family in families for word in words.of(family.text)}
            for families in sides
        ]
        self._numbers = numbers
        # A number that is a part of a word, as in `fc1`, is not that of a sibling.
        self._plain = [
            [
                {n for n in of_family if not _is_word(family, n, words, other)}
                for family, of_family in zip(families, of_side, strict=True)
            ]
            for families, of_side, other in zip(
                sides, numbers, meanings[::-1], strict=True
            )
        ]
        groups = [
            {n.group for of_family in of_side for n in of_family if len(n.group) > 1}
            for of_side in self._plain
        ]
        apart = groups[0] ^ groups[1]
        counts = [{len(each) for each in of_side & apart} for of_side in groups]
        self.texts = [
            [
                _text(family, {n for n in of_family if n.group in apart}, other)
                for family, of_family in zip(families, of_side, strict=True)
            ]
            for families, of_side, other in zip(
                sides, self._plain, counts[::-1], strict=True
            )
        ]

    def differ(self, i: int, j: int) -> bool:
        """Return whether two families are not the same ones of their siblings."""
        ones, twos = self._numbers[0][i], self._numbers[1][j]
        odd = [
            {one for one in ones if not any(map(one.is_like, twos))},
            {two for two in twos if not any(map(two.is_like, ones))},
        ]
        plain = self._plain[0][i] | self._plain[1][j]
        return all(odd) and not plain.isdisjoint(odd[0] | odd[1])


def _is_word(family: Family, number: Number, words: Words, other: Set[str]) -> bool:
    """Return whether a number is a part of a word for each of the siblings.

    Args:
        family: whose path has the number.
        number: one of it.
        words: what names mean.
        other: words of the other side.
    """
    tokens = ["#" if token is None else token for token in family.tokens]
    before, after = tokens[: len(number.before)], tokens[len(number.before) + 1 :]
    plain = Counter(words.of("".join([*before, "#", *after])))
    more: Counter[str] = Counter()
    for value in number.group:
        extra = Counter(words.of("".join([*before, str(value), *after]))) - plain
        if str(value) in extra:
            return False
        more += extra
    return not more or not other.isdisjoint(more)


def _text(family: Family, numbers: Set[Number], counts: Set[int]) -> str:
    """Return the path of a family with ranks in place of numbers.

    Args:
        family: whose path it is.
        numbers: of it, that are other ones on the other side.
        counts: how many siblings there are on the other side.
    """
    tokens = ["#" if token is None else token for token in family.tokens]
    for number in numbers:
        if len(number.group) in counts:
            # As no number of a path is written, and none of a word.
            tokens[len(number.before)] = f"00{number.rank}"
        elif counts:
            tokens[len(number.before)] = "#"
    return "".join(tokens)
