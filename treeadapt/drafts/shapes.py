"""Orders of axes that shapes allow.

A leaf of a family has numbers in its path, and axes. Both are *dims*: what is a number
on one side may be an axis on the other one. A layout says of which atoms each dim of
both sides is made.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

_MOST = 24  # layouts that are tried


@dataclasses.dataclass(frozen=True)
class AxisOrder:
    """Atoms of the dims of both sides.

    Attributes:
        source: of each dim, the outermost first; none for one of size 1.
        target: the same.
        sizes: of the atoms.
        is_split: whether a dim is made of several.
    """

    source: tuple[tuple[int, ...], ...]
    target: tuple[tuple[int, ...], ...]
    sizes: dict[int, int]
    is_split: bool


def layouts(
    source: Sequence[int], source_slots: int, target: Sequence[int], target_slots: int
) -> list[AxisOrder]:
    """Return all that fit, the most likely first.

    A number that both paths may have stays one.

    Args:
        source: sizes of its dims, numbers first.
        source_slots: how many of them are numbers.
        target: sizes of its dims, numbers first.
        target_slots: how many of them are numbers.

    Example:
        >>> layouts([4, 6, 5], 1, [4, 5, 6], 0)[0].target
        ((0,), (2,), (1,))
        >>> [each.target for each in layouts([4, 6, 6], 1, [4, 6, 6], 0)]
        [((0,), (1,), (2,)), ((0,), (2,), (1,))]
        >>> layouts([4, 6, 5], 1, [4, 5, 2, 3], 0)[0].source
        ((0,), (1, 2), (3,))
    """
    if math.prod(source) != math.prod(target):
        return []
    return [*_layouts(tuple(source), source_slots, tuple(target), target_slots)]


@functools.lru_cache(maxsize=4_096)
def _layouts(
    source: tuple[int, ...],
    source_slots: int,
    target: tuple[int, ...],
    target_slots: int,
) -> tuple[AxisOrder, ...]:
    kept: dict[int, int] = {}  # numbers of the source, and of the target
    for one in range(source_slots):
        for two in range(target_slots):
            if source[one] == target[two] and two not in kept.values():
                kept[one] = two
                break
    ones = [i for i, n in enumerate(source) if n != 1 and i not in kept]
    twos = [i for i, n in enumerate(target) if n != 1 and i not in kept.values()]
    orders = []
    for pairs in itertools.islice(_matched(source, target, ones, twos), _MOST):
        atoms = itertools.count()
        sizes: dict[int, int] = {}
        left: dict[int, tuple[int, ...]] = {}
        right: dict[int, tuple[int, ...]] = {}
        whole = sorted([*pairs, *(((a,), (b,)) for a, b in kept.items())])
        for one_group, two_group in whole:
            wide = one_group if len(one_group) > 1 else two_group
            shape = source if wide is one_group else target
            new_atoms = []
            for dim in wide:
                atom = next(atoms)
                sizes[atom] = shape[dim]
                new_atoms.append(atom)
            if len(one_group) > 1:
                left |= {
                    dim: (atom,) for dim, atom in zip(one_group, new_atoms, strict=True)
                }
                right[two_group[0]] = tuple(new_atoms)
            else:
                right |= {
                    dim: (atom,) for dim, atom in zip(two_group, new_atoms, strict=True)
                }
                left[one_group[0]] = tuple(new_atoms)
        is_split = any(len(a) + len(b) > 2 for a, b in pairs)
        orders.append(
            AxisOrder(
                tuple(left.get(i, ()) for i in range(len(source))),
                tuple(right.get(i, ()) for i in range(len(target))),
                sizes,
                is_split,
            )
        )
    return tuple(orders)


Groups = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _matched(
    source: Sequence[int], target: Sequence[int], ones: list[int], twos: list[int]
) -> Iterator[Groups]:
    """Yield groups of dims with equal products; one of both has one dim."""
    same = Counter(source[i] for i in ones) == Counter(target[i] for i in twos)
    if same:
        yield from _bijections(source, target, ones, twos)
        return
    yield from _grouped(source, target, ones, twos, [])


def _bijections(
    source: Sequence[int], target: Sequence[int], ones: list[int], twos: list[int]
) -> Iterator[Groups]:
    if not ones:
        yield []
        return
    first, *others = ones
    for two in twos:
        if target[two] == source[first]:
            left = [each for each in twos if each != two]
            for rest in _bijections(source, target, others, left):
                yield [((first,), (two,)), *rest]


def _grouped(
    source: Sequence[int],
    target: Sequence[int],
    ones: list[int],
    twos: list[int],
    groups: Groups,
) -> Iterator[Groups]:
    if not ones and not twos:
        yield groups
        return
    if not ones or not twos:
        return
    first, *others = ones
    for two in twos:
        if target[two] == source[first]:
            left = [each for each in twos if each != two]
            yield from _grouped(
                source, target, others, left, [*groups, ((first,), (two,))]
            )
    for count in (2, 3):
        for many in itertools.combinations(twos, count):
            if math.prod(target[i] for i in many) == source[first]:
                left = [each for each in twos if each not in many]
                yield from _grouped(
                    source, target, others, left, [*groups, ((first,), many)]
                )
        for many in itertools.combinations(others, count - 1):
            group = (first, *many)
            product = math.prod(source[i] for i in group)
            for two in twos:
                if target[two] == product:
                    left = [each for each in others if each not in many]
                    rest = [each for each in twos if each != two]
                    yield from _grouped(
                        source, target, left, rest, [*groups, (group, (two,))]
                    )
