"""Rows of arrays that hold several others: query, key and value in one.

Which names are such is in the file of synonyms. Names do not tell in which order the
parts are, so all of these rows are marked.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from typing import Any

from treeadapt.drafts.families import Family, grouped_paths, place_of
from treeadapt.drafts.rows import DraftAddress, DraftRow
from treeadapt.drafts.shapes import AxisOrder, layouts
from treeadapt.drafts.words import Words


def fused_rows(
    ones: list[Family], twos: list[Family], words: Words
) -> tuple[list[Family], list[Family], list[DraftRow]]:
    """Pair arrays that hold several others with those that are apart.

    Returns:
        What is left of both sides, and the rows, all of them marked.
    """
    rows: list[DraftRow] = []
    used: set[Family] = set()
    for is_source, parts, wholes in ((False, twos, ones), (True, ones, twos)):
        groups: dict[object, dict[str, Family]] = defaultdict(dict)
        for each in parts:
            meanings = words.of(each.text)
            for fused, names in words.fused.items():
                inside = [m for m in meanings if m in names]
                if len(inside) == 1:
                    rest = tuple(m for m in meanings if m != inside[0])
                    key = fused, rest, each.counts
                    groups[key].setdefault(inside[0], each)
        candidates: list[Any] = []
        for (fused, rest, _), members in groups.items():  # type: ignore[misc]
            names = words.fused[fused]
            if len(members) < len(names):
                continue
            family_parts = [members[name] for name in names]
            for whole in wholes:
                meanings = words.of(whole.text)
                if fused not in meanings and not {*names} <= {*meanings}:
                    continue
                row = _fused_row(family_parts, whole, is_source=is_source)
                if row is not None:
                    shared = sum((Counter(rest) & Counter(meanings)).values())
                    candidates.append(
                        (shared, len(candidates), family_parts, whole, row)
                    )
        for _, _, family_parts, whole, row in sorted(
            candidates, key=lambda c: (-c[0], c[1])
        ):
            if not used & {*family_parts, whole}:
                used |= {*family_parts, whole}
                rows.append(row)
    return (
        [each for each in ones if each not in used],
        [each for each in twos if each not in used],
        rows,
    )


def _fused_row(
    parts: list[Family], whole: Family, *, is_source: bool
) -> DraftRow | None:
    """Return the row of parts one after the other along an axis of the whole."""
    rank = {len(part.shape) for part in parts}
    if len(rank) > 1 or len({part.dtype for part in parts}) > 1:
        return None
    slots = len(whole.counts)
    for count in (1, 2):
        for many in itertools.combinations(range(len(parts[0].shape)), count):
            if count == 2 and many[1] != many[0] + 1:
                continue
            sums = [math.prod(part.shape[i] for i in many) for part in parts]
            rest = [
                tuple(n for i, n in enumerate(part.shape) if i not in many)
                for part in parts
            ]
            if len({*rest}) > 1:
                continue
            dims = (*parts[0].counts, sum(sums), *rest[0])
            first = len(parts[0].counts)
            for layout in layouts(dims, first, whole.dims, slots):
                if layout.is_split or not layout.source[first]:
                    continue
                axis = layout.target.index(layout.source[first])
                if axis < slots:
                    continue
                return _bracket(parts, whole, layout, many, axis, is_source=is_source)
    return None


def _bracket(
    parts: list[Family],
    whole: Family,
    layout: AxisOrder,
    many: tuple[int, ...],
    axis: int,
    *,
    is_source: bool,
) -> DraftRow:
    first = len(parts[0].counts)
    atoms = itertools.count(1 + max(layout.sizes))
    sizes = dict(layout.sizes)
    shared: dict[tuple[int, int], int] = {}
    places, products = [], []
    for part in parts:
        product: list[int] = []
        for nth, i in enumerate(reversed(many)):
            key = nth, part.shape[i]
            if key not in shared:
                shared[key] = next(atoms)
                sizes[shared[key]] = part.shape[i]
            product.insert(0, shared[key])
        rest = iter(layout.source[first + 1 :])
        dims = [*layout.source[:first]]
        for i in range(len(part.shape)):
            dims.append((product[many.index(i)],) if i in many else next(rest))
        places.append(place_of(part, dims))
        products.append(tuple(product))
    place = place_of(whole, layout.target)
    axes = list(place.axes)
    axes[axis - len(whole.counts)] = tuple(products)
    place = DraftAddress(place.tokens, tuple(axes))
    grouped: dict[tuple[str, ...], list[str]] = {}
    for part in parts:
        for ones, twos in grouped_paths(part, whole, layout):
            grouped.setdefault(twos, []).extend(ones)
    pairs = tuple((tuple(ones), twos) for twos, ones in grouped.items())
    left, right = (tuple(places), (place,))[:: 1 if is_source else -1]
    if not is_source:
        pairs = tuple((twos, ones) for ones, twos in pairs)
    dtypes = str(parts[0].dtype), str(whole.dtype)
    cast = dtypes if is_source else dtypes[::-1]
    # Nothing tells whether the parts of each head are next to each other.
    are_equal = len({*products}) == 1
    other = "; or each head holds its own, `(h p d)`" if are_equal else ""
    return DraftRow(
        left,
        right,
        sizes,
        pairs,
        "shapes",
        (f"the parts, and their order{other}",),
        cast=cast if cast[0] != cast[1] else (),
    )
