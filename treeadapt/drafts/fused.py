"""Rows of arrays that hold several others: query, key and value in one.

Which names are such is in the file of synonyms. Names do not tell in which order the
parts are, so all of these rows are marked.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from treeadapt.drafts.families import Family, grouped_paths, place_of
from treeadapt.drafts.rows import DraftAddress, DraftRow, Hole, windowed
from treeadapt.drafts.shapes import AxisOrder, Turning, layouts
from treeadapt.drafts.words import Words


@dataclasses.dataclass(frozen=True)
class Way:
    """One way in which parts follow each other in a whole.

    Attributes:
        layout: dims of the parts, with one for the axes that are joined, and those of
            the whole.
        joined: axes of a part that are joined, one or two; none if the parts have an
            axis of their own in the whole.
        axis: dim of the whole that holds the parts.
    """

    layout: AxisOrder
    joined: tuple[int, ...]
    axis: int


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Arrays that are apart on one side, and one on the other one.

    Attributes:
        parts: in the order of the file of synonyms.
        whole: what holds them.
        is_source: whether the parts are in the source.
        ways: all that shapes allow, at least one.
    """

    parts: tuple[Family, ...]
    whole: Family
    is_source: bool
    ways: tuple[Way, ...]

    def row(self, turning: Turning) -> DraftRow:
        """Return the row of the likeliest way."""
        texts = self.parts[0].text, self.whole.text
        one, two = texts if self.is_source else texts[::-1]
        layout = turning.likeliest([way.layout for way in self.ways], one, two)
        best = next(way for way in self.ways if way.layout is layout)
        checks = ["names", *["order of axes"] * (len(self.ways) > 1)]
        if best.layout.is_split:
            checks.append("order within an axis")
        return (
            _bracket(self, best, checks) if best.joined else _axis(self, best, checks)
        )


def fusions(
    ones: list[Family], twos: list[Family], words: Words
) -> tuple[list[Family], list[Family], list[Fusion]]:
    """Pair arrays that hold several others with those that are apart.

    Returns:
        What is left of both sides, and the pairs.
    """
    chosen: list[Fusion] = []
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
        candidates: list[tuple[int, int, Fusion]] = []
        for (fused, rest, _), members in groups.items():  # type: ignore[misc]
            names = words.fused[fused]
            if len(members) < len(names):
                continue
            family_parts = tuple(members[name] for name in names)
            for whole in wholes:
                meanings = words.of(whole.text)
                if fused not in meanings and not {*names} <= {*meanings}:
                    continue
                ways = tuple(_ways(family_parts, whole))
                if ways:
                    shared = sum((Counter(rest) & Counter(meanings)).values())
                    fusion = Fusion(family_parts, whole, is_source, ways)
                    candidates.append((shared, len(candidates), fusion))
        for _, _, fusion in sorted(candidates, key=lambda c: (-c[0], c[1])):
            members_of_both = {*fusion.parts, fusion.whole}
            if not used & members_of_both:
                used |= members_of_both
                chosen.append(fusion)
    return (
        [each for each in ones if each not in used],
        [each for each in twos if each not in used],
        chosen,
    )


def _ways(parts: Sequence[Family], whole: Family) -> Iterator[Way]:
    """Yield how parts may follow each other along an axis of the whole."""
    rank = {len(part.shape) for part in parts}
    if len(rank) > 1 or len({part.dtype for part in parts}) > 1:
        return
    first, slots = len(parts[0].counts), len(whole.counts)
    if len({part.shape for part in parts}) == 1 and _window(parts) is not None:
        dims = (*parts[0].counts, len(parts), *parts[0].shape)
        for layout in layouts(dims, first + 1, *whole.dims):
            alone = layout.source[: first + 1]
            if {*alone} <= {*layout.target} and alone[-1] in layout.target[slots:]:
                yield Way(layout, (), layout.target.index(layout.source[first], slots))
    for count in (1, 2):
        for joined in itertools.combinations(range(len(parts[0].shape)), count):
            if count == 2 and joined[1] != joined[0] + 1:
                continue
            sums = [math.prod(part.shape[i] for i in joined) for part in parts]
            rest = [
                tuple(n for i, n in enumerate(part.shape) if i not in joined)
                for part in parts
            ]
            if len({*rest}) > 1:
                continue
            place = joined[0]
            dims = (*parts[0].counts, *rest[0][:place], sum(sums), *rest[0][place:])
            for layout in layouts(dims, first, *whole.dims):
                atoms = layout.source[first + place]
                if not layout.is_split and atoms in layout.target[slots:]:
                    yield Way(layout, joined, layout.target.index(atoms, slots))


def _bracket(fusion: Fusion, way: Way, checks: Sequence[str]) -> DraftRow:
    parts, whole, layout, many = fusion.parts, fusion.whole, way.layout, way.joined
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
        place = first + many[0]
        rest = iter(layout.source[first:place] + layout.source[place + 1 :])
        dims = [*layout.source[:first]]
        for i in range(len(part.shape)):
            dims.append((product[many.index(i)],) if i in many else next(rest))
        places.append(place_of(part, dims))
        products.append(tuple(product))
    address = place_of(whole, layout.target)
    axes = list(address.axes)
    axes[way.axis - len(whole.counts)] = tuple(products)
    joint = DraftAddress(address.tokens, tuple(axes))
    # Nothing tells whether the parts of each head are next to each other.
    are_equal = len({*products}) == 1
    note = "or each head holds its own parts, `(h p d)`"
    row = _joined_row(fusion, layout, places, joint, sizes, (*checks, "order of parts"))
    return dataclasses.replace(row, notes=(note,) * are_equal)


def _window(parts: Sequence[Family]) -> tuple[int, int] | None:
    """Return how many tokens the paths of parts share before and after their names."""
    holes = [(n,) for n in range(len(parts[0].counts))]
    return windowed(
        [place_of(part, [*holes, *([()] * len(part.shape))]).tokens for part in parts]
    )


def _axis(fusion: Fusion, way: Way, checks: Sequence[str]) -> DraftRow:
    """Return the row of parts that are an axis of the whole."""
    layout, parts = way.layout, fusion.parts
    first = len(parts[0].counts)
    dims = [*layout.source[:first], *layout.source[first + 1 :]]
    places = [place_of(part, dims) for part in parts]
    window = _window(parts)
    assert window is not None
    before, after = window
    texts = tuple(
        "".join(map(str, place.tokens[before : len(place.tokens) - after]))
        for place in places
    )
    tokens = places[0].tokens
    hole = Hole(layout.source[first], texts=texts)
    listed = (*tokens[:before], hole, *tokens[len(tokens) - after :])
    address = DraftAddress(listed, places[0].axes)
    whole = place_of(fusion.whole, layout.target)
    checks = (*checks, "order of parts")
    return _joined_row(fusion, layout, [address], whole, layout.sizes, checks)


def _joined_row(
    fusion: Fusion,
    layout: AxisOrder,
    places: Sequence[DraftAddress],
    joint: DraftAddress,
    sizes: Mapping[int, int],
    checks: tuple[str, ...],
) -> DraftRow:
    """Return the row of the places of the parts, and that of the whole."""
    parts, whole = fusion.parts, fusion.whole
    grouped: dict[tuple[str, ...], list[str]] = {}
    for part in parts:
        for ones, twos in grouped_paths(part, whole, layout):
            grouped.setdefault(twos, []).extend(ones)
    pairs = tuple((tuple(ones), twos) for twos, ones in grouped.items())
    left, right = (tuple(places), (joint,))[:: 1 if fusion.is_source else -1]
    if not fusion.is_source:
        pairs = tuple((twos, ones) for ones, twos in pairs)
    dtypes = str(parts[0].dtype), str(whole.dtype)
    cast = dtypes if fusion.is_source else dtypes[::-1]
    return DraftRow(
        left,
        right,
        dict(sizes),
        pairs,
        "shapes",
        checks,
        cast=cast if cast[0] != cast[1] else (),
    )
