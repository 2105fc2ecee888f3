"""Heads in groups: where one group looks like none.

Takes rows that cut queries, keys and values out of one array, or join them. With
several groups, each with its queries, its key and its value, as in Falcon 40B, they are
within each group; of one group nothing shows that. Of several heads that are repeated,
those of each may be next to each other, or all once more; of one head nothing shows
which. Gives these rows a mark, unless other rows or the configuration show that there
are several keys next to each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from treeadapt.porting.drafts.rows import DraftAddress, DraftRow
from treeadapt.porting.drafts.stated import ModelConfig
from treeadapt.porting.drafts.writing import counts_heads

GROUPS = "groups"
_NOTE = (
    "if heads are in groups, each with its queries, its key and its value, this is one "
    "group, and more are in another order: a model with 2 groups of keys shows it"
)
_OF_COPIES = (
    "copies of one head: of several, those of each head may be next to each other, or "
    "all heads once more: a model with 2 heads here shows it"
)
_PARTS = 3  # queries, keys and values


def with_groups_doubted(
    rows: Sequence[DraftRow], stated: ModelConfig
) -> list[DraftRow]:
    """Mark rows of queries, keys and values that may be of one of several groups.

    Args:
        rows: of one table.
        stated: of heads.
    """
    sizes = [*stated.heads, *itertools.chain(*map(_heads, rows))]
    norms = {size for row in rows for size in _normed(row)}
    marked = []
    for row in rows:
        queries, keys = _sizes(row)
        heads = {size for number, size in sizes if number * size == queries} | norms
        several = any(size < keys and keys % size == 0 for size in heads)
        is_doubtful = keys and not several
        own = row.marked(GROUPS, _NOTE) if is_doubtful else row
        if any(not _has_several(whole, sizes, norms) for whole in _copied(row)):
            own = own.marked(GROUPS, _OF_COPIES)
        marked.append(own)
    return marked


def _copied(row: DraftRow) -> Iterator[int]:
    """Yield the size of an axis of attention whose copies follow each other whole."""
    if not (row.copies and row.is_live and counts_heads(row)):
        return
    wholes, parts = (
        [*itertools.chain(*(axis for place in side for axis in place.axes))]
        for side in row.sides
    )
    for part in parts:
        if len(part) > 1 and part[0] in row.copies and part[1:] in wholes:
            yield math.prod(row.sizes[atom] for atom in part[1:])


def _has_several(
    whole: int, sizes: Sequence[tuple[int, int]], norms: Collection[int]
) -> bool:
    """Return whether an axis is known to be of several heads."""
    return any(number > 1 and number * size == whole for number, size in sizes) or any(
        norm < whole and whole % norm == 0 for norm in norms
    )


def _sizes(row: DraftRow) -> tuple[int, int]:
    """Return how large queries and keys of a row are, if one key is as large; else 0.

    Keys that the other side divides are several heads, and so are those of which the
    queries are no multiple.
    """
    wholes = [
        axis
        for side, others in ((0, 1), (1, 0))
        if len(row.sides[side]) == 1 and len(row.sides[others]) == _PARTS
        for address in row.sides[side]
        for axis in address.axes
        if len(axis) == _PARTS and not address.before
    ]
    if len(wholes) != 1 or not (row.is_live and counts_heads(row)):
        return 0, 0
    sizes = sorted(
        (math.prod(row.sizes[atom] for atom in part), len(part)) for part in wholes[0]
    )
    (key, num_key), (value, num_value), (queries, _) = sizes
    is_one = key == value < queries and num_key == num_value == 1
    return (queries, key) if is_one and queries % key == 0 else (0, 0)


def _heads(row: DraftRow) -> Iterator[tuple[int, int]]:
    """Yield how many heads axes of a row have, and how large each is."""
    for part in itertools.chain(*(axis for place in row.places for axis in place.axes)):
        sizes = [row.sizes[atom] for atom in part]
        if len(sizes) > 1 and all(sizes) and row.is_live and counts_heads(row):
            yield sizes[0], math.prod(sizes[1:])


def _normed(row: DraftRow) -> Iterator[int]:
    """Yield the size of a head whose queries, or keys, are normed."""
    for address in row.sources if row.is_live else ():
        is_vector = len(address.axes) == 1
        if is_vector and _is_of_a_norm(address) and counts_heads(row):
            sizes = [row.sizes[atom] for part in address.axes[0] for atom in part]
            if all(sizes):
                yield math.prod(sizes)


def _is_of_a_norm(address: DraftAddress) -> bool:
    texts = (text for text in address.tokens if isinstance(text, str))
    return any("norm" in text.lower() for text in texts)
