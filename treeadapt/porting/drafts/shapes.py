"""Orders of axes that shapes allow, and the likeliest of them.

A leaf of a family has numbers in its path, and axes. Both are *dims*: what is a number
on one side may be an axis on the other one. A layout says of which atoms each dim of
both sides is made.

A weight of PyTorch is ``[out, in]``, a kernel ``[in, out]``. Where axes have one size,
or heads make up the width, shapes allow both; leaves of the same models of which only
one order fits show which it is, and names if there are none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from treeadapt.porting.drafts.synonyms import plain_words

_MOST = 24  # layouts that are tried
_MOST_IN_ONE = 3  # dims that may be one of the other side
_APART = 64  # more than the axes of an array: parts of one are not side by side
_TURNED = {("weight", "kernel"), ("kernel", "weight")}


@dataclasses.dataclass(frozen=True)
class AxisOrder:
    """Atoms of the dims of both sides.

    Attributes:
        source: of each dim, the outermost first; none for one of size 1.
        target: the same.
        sizes: of the atoms.
        is_split: whether a dim is made of several.
        slots: how many dims of each side are numbers of paths.
    """

    source: tuple[tuple[int, ...], ...]
    target: tuple[tuple[int, ...], ...]
    sizes: dict[int, int]
    is_split: bool
    slots: tuple[int, int]

    @functools.cached_property
    def perm(self) -> tuple[int, ...] | None:
        """Which axis of the source is each of the target; None if parts are apart.

        What is one axis on either side counts as one; numbers of paths do not count.

        Example:
            >>> layouts([4, 6, 5], 1, [4, 5, 2, 3], 0)[0].perm
            (1, 0)
        """
        axes = self.source[self.slots[0] :], self.target[self.slots[1] :]
        sides = [[atom for dim in dims for atom in dim] for dims in axes]
        wide = [dim for dims in axes for dim in dims if len(dim) > 1]
        unit_of = {atom: dim for dim in wide for atom in dim}
        units = []
        for atoms, others in (sides, sides[::-1]):
            every = [unit_of.get(atom, (atom,)) for atom in atoms if atom in others]
            units.append([unit for unit, _ in itertools.groupby(every)])
        if any(len({*each}) < len(each) for each in units):
            return None
        return tuple(map(units[0].index, units[1]))

    @property
    def turns(self) -> bool | None:
        """Whether a matrix is turned around; None if its axes are in another order.

        Of ``[out, in, *window]`` that is ``[*window, in, out]``, and the way back; of
        several matrices in one array, each of them.

        Example:
            >>> layouts([6, 5], 0, [5, 6], 0)[0].turns
            True
        """
        if self.perm is None or len(self.perm) < 2:
            return None
        is_usual = [not self.distance(is_turned=way) for way in (False, True)]
        return is_usual[1] if any(is_usual) else None

    def distance(self, *, is_turned: bool) -> int:
        """Return how many axes are elsewhere in a matrix that is turned, or not."""
        if self.perm is None:
            return _APART
        places = [*range(len(self.perm))]
        usual = [places]
        if is_turned and len(places) > 1:
            out, into, *window = places
            *rest, second, last = places
            usual = [[*window, into, out], [last, second, *rest], [*rest, last, second]]
        return min(
            sum(a != b for a, b in zip(self.perm, each, strict=True)) for each in usual
        )


class Turning:
    """What pairs of which one order fits show of the others."""

    def __init__(self, proofs: Iterable[tuple[str, str, bool]]) -> None:
        """Take a source, a target, and whether it is turned, of each such pair."""
        self._votes: dict[object, Counter[bool]] = defaultdict(Counter)
        for source, target, is_turned in proofs:
            for key in _ends(source, target):
                self._votes[key][is_turned] += 1

    def likeliest(
        self, orders: Iterable[AxisOrder], source: str, target: str
    ) -> AxisOrder:
        """Return the order of a pair with axes where models usually have them."""
        is_turned = _ends(source, target)[0] in _TURNED
        for key in reversed(_ends(source, target)):
            votes = self._votes.get(key, Counter())
            if votes[True] != votes[False]:
                is_turned = votes[True] > votes[False]
        return min(orders, key=lambda order: order.distance(is_turned=is_turned))


def _ends(source: str, target: str) -> list[object]:
    """Return what matrices may have in common, the nearest first."""
    first, last = ("".join(plain_words(text)[-1:]) for text in (source, target))
    return [(first, last), (0, first), (1, last), None]


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
    for place in range(source_slots):
        for other in range(target_slots):
            if source[place] == target[other] and other not in kept.values():
                kept[place] = other
                break
    ones = [i for i, n in enumerate(source) if n != 1 and i not in kept]
    twos = [i for i, n in enumerate(target) if n != 1 and i not in kept.values()]
    orders = []
    ends = source_slots, target_slots
    for pairs in itertools.islice(_matched(source, target, ones, twos), _MOST):
        atoms = itertools.count()
        sizes: dict[int, int] = {}
        left: dict[int, tuple[int, ...]] = {}
        right: dict[int, tuple[int, ...]] = {}
        whole = sorted([*pairs, *(((a,), (b,)) for a, b in kept.items())])
        for one_group, two_group in whole:
            way = 1 if len(one_group) > 1 else -1
            wide, (narrow,) = (one_group, two_group)[::way]
            (slots, other), (shape, _) = ends[::way], (source, target)[::way]
            of_wide, of_narrow = (left, right)[::way]
            # Of a number that is two, that of the other path is within a block.
            inner = [dim for dim in wide if dim < slots and narrow < other]
            of_narrow[narrow] = ()
            for dim in (*(dim for dim in wide if dim not in inner), *inner):
                atom = next(atoms)
                sizes[atom] = shape[dim]
                of_wide[dim] = (atom,)
                of_narrow[narrow] += (atom,)
        is_split = any(len(a) + len(b) > 2 for a, b in pairs)
        orders.append(
            AxisOrder(
                tuple(left.get(i, ()) for i in range(len(source))),
                tuple(right.get(i, ()) for i in range(len(target))),
                sizes,
                is_split,
                ends,
            )
        )
    return tuple(orders)


Dims = tuple[int, ...]


def _matched(
    source: Sequence[int], target: Sequence[int], ones: list[int], twos: list[int]
) -> Iterator[list[tuple[Dims, Dims]]]:
    """Yield groups of dims with equal products; one of both has one dim."""
    same = Counter(source[i] for i in ones) == Counter(target[i] for i in twos)
    most = 1 if same else _MOST_IN_ONE

    def grouped(
        ones: Sequence[int], twos: Sequence[int]
    ) -> Iterator[list[tuple[Dims, Dims]]]:
        if not ones or not twos:
            yield from [[]] * (not ones and not twos)
            return
        for some, others in _groups(ones, twos, most):
            if _product(source, some) == _product(target, others):
                left = [i for i in ones if i not in some]
                right = [i for i in twos if i not in others]
                for rest in grouped(left, right):
                    yield [(some, others), *rest]

    return grouped(ones, twos)


def _groups(
    ones: Sequence[int], twos: Sequence[int], most: int
) -> Iterator[tuple[Dims, Dims]]:
    """Yield what the first of some dims may be with; one of both has one dim."""
    first, *left = ones
    yield from (((first,), (target,)) for target in twos)
    for count in range(2, most + 1):
        yield from (((first,), many) for many in itertools.combinations(twos, count))
        for many in itertools.combinations(left, count - 1):
            yield from (((first, *many), (target,)) for target in twos)


def _product(sizes: Sequence[int], dims: Dims) -> int:
    return math.prod(sizes[dim] for dim in dims)
