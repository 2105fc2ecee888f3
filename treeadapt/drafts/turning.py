"""Which matrices are turned around between two models.

A weight of PyTorch is ``[out, in]``, a kernel ``[in, out]``. Where axes have one size,
or heads make up the width, shapes allow both; rows of the same models of which only one
order fits show which it is, and names if there are none.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from treeadapt.drafts.shapes import AxisOrder
from treeadapt.drafts.words import plain_words

_APART = 64  # more than the axes of an array: parts of one are not side by side


class Turning:
    """What rows of which one order fits show of the others."""

    def __init__(self, proofs: Iterable[tuple[str, str, bool]]) -> None:
        """Take a source, a target, and whether it is turned, of each such row."""
        self._votes: dict[object, Counter[bool]] = defaultdict(Counter)
        for one, two, is_turned in proofs:
            for key in _keys(one, two):
                self._votes[key][is_turned] += 1

    def is_turned(self, one: str, two: str) -> bool:
        """Return whether the matrix at ``one`` is probably turned around at ``two``."""
        for key in _keys(one, two):
            votes = self._votes.get(key, Counter())
            if votes[True] != votes[False]:
                return votes[True] > votes[False]
        return {*_ends(one, two)} == {"weight", "kernel"}


def _ends(one: str, two: str) -> list[str]:
    return ["".join(plain_words(text)[-1:]) for text in (one, two)]


def _keys(one: str, two: str) -> Iterator[object]:
    """Yield what matrices may have in common, the nearest first."""
    ends = _ends(one, two)
    yield tuple(ends)
    yield from enumerate(ends)
    yield None


def perm_of(
    order: AxisOrder, source_slots: int, target_slots: int
) -> tuple[int, ...] | None:
    """Return which axis of the source is each of the target; None if parts are apart.

    What is one axis on either side counts as one; numbers of paths do not count.

    Example:
        >>> from treeadapt.drafts.shapes import layouts
        >>> perm_of(layouts([4, 6, 5], 1, [4, 5, 2, 3], 0)[0], 1, 0)
        (1, 0)
    """
    axes = order.source[source_slots:], order.target[target_slots:]
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


def turns(perm: Sequence[int] | None) -> bool | None:
    """Return whether a matrix is turned around; None if its axes are in another order.

    Of ``[out, in, *window]`` that is ``[*window, in, out]``, and the way back; of
    several matrices in one array, each of them.

    Example:
        >>> turns((1, 0)), turns((0, 1, 2)), turns((2, 3, 1, 0)), turns((1, 2, 0))
        (True, False, True, None)
    """
    if perm is None or len(perm) < 2:
        return None
    is_usual = [not distance(perm, is_turned=is_turned) for is_turned in (False, True)]
    return is_usual[1] if any(is_usual) else None


def distance(perm: Sequence[int] | None, *, is_turned: bool) -> int:
    """Return how many axes are not where a matrix that is turned, or not, has them."""
    if perm is None:
        return _APART
    places = [*range(len(perm))]
    usual = [places]
    if is_turned and len(perm) > 1:
        out, into, *window = places
        *rest, one, two = places
        usual = [[*window, into, out], [two, one, *rest], [*rest, two, one]]
    return min(sum(a != b for a, b in zip(perm, each, strict=True)) for each in usual)
