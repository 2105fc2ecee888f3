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
from typing import TypeAlias

from treeadapt.porting.drafts.rows import DraftRow, Hole, numberless
from treeadapt.porting.drafts.synonyms import plain_words

_MOST = 24  # layouts that are tried
_MOST_IN_ONE = 3  # dims that may be one of the other side
_APART = 64  # more than the axes of an array: parts of one are not side by side
_TURNED = {"weight", "kernel"}  # what libraries call a matrix whose axes they turn


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

    @functools.cached_property
    def form(self) -> tuple[object, ...] | None:
        """How it is written but for sizes: its axes, and where numbers are axes."""
        if self.perm is None:
            return None
        sides = self.source, self.target
        places = tuple(
            dims[slots:].index(own)
            for others, dims, there, slots in zip(
                sides, sides[::-1], self.slots, self.slots[::-1], strict=True
            )
            for own in others[:there]
            if own in dims[slots:]
        )
        return self.perm, places

    @property
    def reversed(self) -> AxisOrder:
        """The order of the way back."""
        return AxisOrder(
            self.target, self.source, self.sizes, self.is_split, self.slots[::-1]
        )

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


#: A source, a target, and the orders of axes that they may have.
Seen: TypeAlias = tuple[str, str, Sequence[AxisOrder]]


class Sisters:
    """What pairs whose axes are known, or nearly so, show of the others.

    Proved rows come first, then what shapes leave to pairs alike; then words.
    """

    def __init__(self, proved: Iterable[Seen], others: Iterable[Seen]) -> None:
        self._votes: list[dict[tuple[object, object], float]] = []
        for pairs in (proved, others):
            votes: dict[tuple[object, object], float] = defaultdict(float)
            for source, target, orders in pairs:
                turned = {order.turns for order in orders}
                share = 1 / len(orders)
                ways: list[tuple[object, float]]
                ways = [(order.form, share) for order in orders if order.form]
                ways += [(way, 1) for way in turned - {None} if len(turned) == 1]
                for key, (way, count) in itertools.product(_ends(source, target), ways):
                    votes[key, way] += count
            self._votes.append(dict(votes))

    def likeliest(
        self, orders: Iterable[AxisOrder], source: str, target: str
    ) -> AxisOrder:
        """Return the order of a pair that its sisters have, the nearest first."""
        left = [*orders]
        ends = _ends(source, target)
        turned: bool | None = None
        for key, votes in itertools.product(ends, self._votes):
            for kind in ("form", "turns"):
                counts = [votes.get((key, getattr(o, kind)), 0.0) for o in left]
                most = max(counts)
                left = [o for o, n in zip(left, counts, strict=True) if n == most]
            no, yes = (votes.get((key, way), 0.0) for way in (False, True))
            if turned is None and yes != no:
                turned = yes > no
        is_turned = _are_of_two_kinds(source, target) if turned is None else turned
        return min(left, key=lambda order: order.distance(is_turned=is_turned))


def _are_of_two_kinds(source: str, target: str) -> bool:
    """Return whether one side has a weight, and the other one a kernel."""
    kinds = [_TURNED & {*plain_words(text)} for text in (source, target)]
    return len(kinds[0] | kinds[1]) == 2 and all(len(each) == 1 for each in kinds)


def _ends(source: str, target: str) -> list[object]:
    """Return what pairs may have in common, the nearest first."""
    first, last = ("".join(plain_words(text)[-1:]) for text in (source, target))
    names = numberless(source), numberless(target)
    return [("name", *names), (first, last), (0, first), (1, last), None]


def order_of(row: DraftRow) -> AxisOrder | None:
    """Return the order of axes of a row; None of one that is no single pair."""
    if len(row.sources) != 1 or len(row.targets) != 1 or row.has_bracket:
        return None
    dims: list[tuple[tuple[int, ...], ...]] = []
    slots = []
    for place in row.places:
        holes = [token.atoms for token in place.tokens if isinstance(token, Hole)]
        dims.append((*holes, *(parts[0] for parts in place.axes)))
        slots.append(len(holes))
    is_split = any(len(atoms) > 1 for atoms in itertools.chain(*dims))
    return AxisOrder(dims[0], dims[1], dict(row.sizes), is_split, (slots[0], slots[1]))


def layouts(
    source: Sequence[int],
    source_slots: int,
    target: Sequence[int],
    target_slots: int,
    alike: Iterable[tuple[int, int]] | None = None,
) -> list[AxisOrder]:
    """Return all that fit, the most likely first.

    A number that both paths may have stays one.

    Args:
        source: sizes of its dims, numbers first.
        source_slots: how many of them are numbers.
        target: sizes of its dims, numbers first.
        target_slots: how many of them are numbers.
        alike: numbers of the source, and of the target, that may be one, the likeliest
            first; all of them if it is None.

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
    slots = source_slots, target_slots
    kept: dict[int, int] = {}  # numbers of the source, and of the target
    for one, two in itertools.product(*map(range, slots)) if alike is None else alike:
        is_free = one not in kept and two not in kept.values()
        if is_free and source[one] == target[two]:
            kept[one] = two
    return [*_layouts(tuple(source), tuple(target), slots, tuple(kept.items()))]


@functools.lru_cache(maxsize=4_096)
def _layouts(
    source: tuple[int, ...],
    target: tuple[int, ...],
    ends: tuple[int, int],
    both: tuple[tuple[int, int], ...],
) -> tuple[AxisOrder, ...]:
    kept = dict(both)
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
