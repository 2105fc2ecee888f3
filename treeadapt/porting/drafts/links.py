"""Links: which leaves of two sides share numbers, and where.

Takes leaves, and where the numbers of the target are in the source; gives links, and
rereads their paths: a number of a path may be a word, two numbers, or a part of a leaf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from treeadapt.porting.drafts.numbers import Origins
from treeadapt.porting.drafts.parts import Pattern
from treeadapt.porting.drafts.rows import (
    DraftAddress,
    DraftRow,
    template_of,
    tokens_of,
)

_LEAST_KNOWN = 0.2  # of a leaf, before its numbers are evidence
_ALL = 0.9  # of a leaf: no number of it is in another one by chance
_LEAST_LINK = 0.005  # of what is known of other leaves, before it is of another one


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


@functools.lru_cache(maxsize=32_768)  # a draft asks a few times about each leaf
def leaf_of(path: str, shape: tuple[int, ...]) -> NumberedLeaf:
    """Return a leaf with the numbers of its path apart."""
    template = template_of(path)
    pairs = zip(template, tokens_of(path), strict=True)
    numbers = tuple(int(token) for fixed, token in pairs if fixed is None)
    return NumberedLeaf(path, shape, template, numbers)


@dataclasses.dataclass(frozen=True)
class Link:
    """Numbers that two leaves share, and where they are in each.

    Attributes:
        ends: the leaf of the source, and that of the target.
        flats: flat indices of the numbers in each.
    """

    ends: tuple[NumberedLeaf, NumberedLeaf]
    flats: tuple[np.ndarray, np.ndarray]


#: Links that hang together, several times.
Components: TypeAlias = Sequence[Sequence[Link]]


def find_links(
    sources: Sequence[NumberedLeaf],
    targets: Iterable[NumberedLeaf],
    origins: Mapping[str, Origins],
    least: float = _LEAST_KNOWN,
) -> list[Link]:
    """Return which leaves share numbers.

    Args:
        sources: leaves, in the order in which ``origins`` counts them.
        targets: leaves.
        origins: where the numbers of targets are, by path.
        least: share of a target whose place is known.
    """
    links = []
    for leaf in targets:
        origin = origins.get(leaf.path)
        if origin is None or origin.share < least or not len(origin.flat):
            continue
        order = np.argsort(origin.leaves, kind="stable")
        numbers, starts = np.unique(origin.leaves[order], return_index=True)
        for number, shared in zip(numbers, np.split(order, starts[1:]), strict=True):
            if origin.share >= _ALL or len(shared) >= _LEAST_LINK * len(origin.flat):
                flats = origin.places[shared], origin.flat[shared]
                links.append(Link((sources[number], leaf), flats))
    return links


def templates_of(link: Link) -> tuple[Pattern, Pattern]:
    """Return the paths of both ends, with None for numbers."""
    return link.ends[0].template, link.ends[1].template


def reread(
    pool: Components, side: int, read: Callable[[NumberedLeaf], NumberedLeaf]
) -> Components:
    """Return links whose leaves on one side have other numbers in their paths."""
    new = {leaf: read(leaf) for leaf in {link.ends[side] for c in pool for link in c}}

    def ends(link: Link) -> tuple[NumberedLeaf, NumberedLeaf]:
        source, target = link.ends
        return (new[source], target) if side == 0 else (source, new[target])

    return [[Link(ends(link), link.flats) for link in each] for each in pool]


def written_back(
    row: DraftRow, side: int, write: Callable[[DraftAddress], DraftAddress | None]
) -> DraftRow | None:
    """Return a row with paths as they are on one side; None if one is not so made."""
    addresses = tuple(filter(None, map(write, row.sides[side])))
    is_whole = len(addresses) == len(row.sides[side])
    return row.with_side(side, addresses) if is_whole else None
