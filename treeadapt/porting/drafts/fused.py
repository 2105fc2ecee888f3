"""Rows of arrays that hold several others: query, key and value in one.

Which names are such is in the file of synonyms. Shapes say how the parts may be in the
whole, and ``parts`` writes that as a row. Names do not tell in which order the parts
are, so all of these rows are marked.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from treeadapt.porting.drafts.families import Family, grouped_paths
from treeadapt.porting.drafts.mixed_radix import Digit, IndexMap
from treeadapt.porting.drafts.parts import Variant, row_of_parts
from treeadapt.porting.drafts.rows import DraftRow
from treeadapt.porting.drafts.shapes import AxisOrder, Sisters, layouts
from treeadapt.porting.drafts.synonyms import Words

_PARTS_OF_HEADS = "or each head holds its own parts, `(h p d)`"


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Arrays that are apart on one side, and one on the other one.

    Attributes:
        parts: in the order of the file of synonyms.
        whole: what holds them.
        is_source: whether the parts are in the source.
        ways: all that shapes allow, at least one: dims of the parts, with one for the
            axes that are joined, and those of the whole; and what a row says then.
    """

    parts: tuple[Family, ...]
    whole: Family
    is_source: bool
    ways: tuple[tuple[AxisOrder, DraftRow], ...]

    def row(self, sisters: Sisters) -> DraftRow:
        """Return the row of the likeliest way."""
        texts = self.parts[0].text, self.whole.text
        source, target = texts if self.is_source else texts[::-1]
        orders = [way if self.is_source else way.reversed for way, _ in self.ways]
        chosen = sisters.likeliest(orders, source, target)
        best, row = self.ways[orders.index(chosen)]
        checks = ["names", *["order of axes"] * (len(self.ways) > 1)]
        checks += ["order within an axis"] * best.is_split
        grouped: dict[tuple[str, ...], list[str]] = {}
        for part in self.parts:
            for of_part, of_whole in grouped_paths(part, self.whole, best):
                grouped.setdefault(of_whole, []).extend(of_part)
        pairs = [(tuple(of_parts), x) for x, of_parts in grouped.items()]
        cast = str(self.parts[0].dtype), str(self.whole.dtype)
        if not self.is_source:
            pairs = [(twos, ones) for ones, twos in pairs]
            cast = cast[::-1]
        return dataclasses.replace(
            row,
            pairs=tuple(pairs),
            evidence="shapes",
            checks=(*checks, "order of parts"),
            cast=cast if cast[0] != cast[1] else (),
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
                ways = tuple(_ways(family_parts, whole, 0 if is_source else 1))
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


def _ways(
    parts: Sequence[Family], whole: Family, side: int
) -> Iterator[tuple[AxisOrder, DraftRow]]:
    """Yield how parts may be in a whole: along an axis of their own, or one they share.

    Args:
        parts: of equal rank.
        whole: what may hold them.
        side: on which the parts are: 0 for the source.
    """
    if len({(len(part.shape), part.dtype) for part in parts}) > 1:
        return
    slots = len(parts[0].counts)
    places = range(len(parts[0].shape))
    are_equal = len({part.shape for part in parts}) == 1
    pairs = itertools.pairwise(places)
    for joined in (*((),) * are_equal, *((place,) for place in places), *pairs):
        rests = [
            [n for place, n in enumerate(part.shape) if place not in joined]
            for part in parts
        ]
        if any(rest != rests[0] for rest in rests):
            continue
        widths = [math.prod(part.shape[place] for place in joined) for part in parts]
        at = slots + (joined[0] if joined else 0)
        dims = [*parts[0].counts, *rests[0]]
        dims.insert(at, sum(widths))
        for layout in layouts(dims, slots + (not joined), *whole.dims):
            own = layout.source[: slots + 1] if not joined else [layout.source[at]]
            is_plain = {*own} <= {*layout.target} and not (joined and layout.is_split)
            if not is_plain or own[-1] not in layout.target[len(whole.counts) :]:
                continue
            starts = itertools.accumulate(widths, initial=0)
            maps = [
                _map(part, whole, layout, at, joined, start)
                for part, start in zip(parts, starts, strict=False)
            ]
            variants = map(_variant, parts)
            row = row_of_parts(side, [*variants], _variant(whole), maps, {})
            if row is not None:
                # Nothing tells whether the parts of each head are side by side.
                notes = (_PARTS_OF_HEADS,) * (are_equal and bool(joined))
                yield layout, dataclasses.replace(row, notes=notes)


def _map(
    part: Family,
    whole: Family,
    layout: AxisOrder,
    at: int,
    joined: Sequence[int],
    start: int,
) -> IndexMap:
    """Return where a part is in the whole.

    Args:
        part: one of the parts.
        whole: what holds them.
        layout: its source is the dims of the parts, its target those of the whole.
        at: the dim of the parts that they share.
        joined: axes of the part that are in it.
        start: of the part along it.
    """
    digit_of: dict[int, Digit] = {}  # by atom
    for axis, atoms in enumerate(layout.target):
        step = 1
        for atom in reversed(atoms):
            digit_of[atom] = Digit(axis, step, layout.sizes[atom])
            step *= layout.sizes[atom]
    shared = layout.target.index(layout.source[at])
    dims = [tuple(map(digit_of.__getitem__, atoms)) for atoms in layout.source]
    inner: list[tuple[Digit, ...]] = []
    step = 1
    for place in reversed(joined):
        size = part.shape[place]
        inner.insert(0, (Digit(shared, step, size),) if size > 1 else ())
        step *= size
    starts = [*whole.shifts, *[0] * len(whole.shape)]
    starts[shared] += start
    return IndexMap((*dims[:at], *inner, *dims[at + 1 :]), tuple(starts))


def _variant(family: Family) -> Variant:
    """Return the leaves of a family as one array."""
    counts = zip(family.shifts, family.counts, strict=True)
    values = [[*range(first, first + count)] for first, count in counts]
    return Variant(family.tokens, [*range(len(values))], values, {}, family.shape)
