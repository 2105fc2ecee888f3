"""Arrays that are cut along an axis, so that each segment of one has its own place.

As of queries, keys and values one after the other, which another array has head by
head, next to those of a second array. A segment is a leaf of its own, with a token for
its place at the end of its path, until the row that all of them are in is found.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from treeadapt.porting.drafts.links import Components, Link
from treeadapt.porting.drafts.mixed_radix import axis_steps, segment_starts
from treeadapt.porting.drafts.parts import Pattern
from treeadapt.porting.drafts.rows import SEGMENT, DraftAddress, DraftRow, Tokens

#: Where leaves are cut: an axis, and where segments begin along it, by template.
Cuts = dict[Pattern, tuple[int, tuple[int, ...]]]


def cuts_of_pool(pool: Components, side: int) -> Cuts:
    """Return where the leaves of one side are cut, those of a template alike."""
    cuts: dict[Pattern, set[tuple[int, tuple[int, ...]] | None]] = {}
    for component in pool:
        paths = [link.ends[side].path for link in component]
        for link in component:
            leaf = link.ends[side]
            is_alone = paths.count(leaf.path) == 1
            own = _cuts_of_link(link, side) if is_alone else None
            cuts.setdefault(leaf.template, set()).add(own)
    return {
        template: one
        for template, every in cuts.items()
        if len(every) == 1 and (one := min(every, key=str)) is not None
    }


def _cuts_of_link(link: Link, side: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the axis along which a leaf is cut, and where; None if it is not."""
    shape, other = link.ends[side].shape, link.ends[1 - side].shape
    every = axis_steps(shape, link.flats[side], link.flats[1 - side])
    found = [(axis, segment_starts(steps, other)) for axis, steps in enumerate(every)]
    cut = [(axis, cuts) for axis, cuts in found if cuts]
    return (cut[0][0], tuple(cut[0][1])) if len(cut) == 1 else None


def cut_pool(pool: Components, side: int, cuts: Cuts) -> Components:
    """Return links whose leaves on one side are segments."""
    return [
        [part for link in component for part in _cut_link(link, side, cuts)]
        for component in pool
    ]


def _cut_link(link: Link, side: int, cuts: Cuts) -> Iterator[Link]:
    leaf = link.ends[side]
    if leaf.template not in cuts:
        yield link
        return
    axis, starts = cuts[leaf.template]
    inner = math.prod(leaf.shape[axis + 1 :])
    outer, within = np.divmod(link.flats[side], inner * leaf.shape[axis])
    place, rest = np.divmod(within, inner)
    ends = (*starts[1:], leaf.shape[axis])
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        is_in = (place >= start) & (place < end)
        flat = outer * (end - start) * inner + (place - start) * inner + rest
        shape = (*leaf.shape[:axis], end - start, *leaf.shape[axis + 1 :])
        template = (*leaf.template, f"{SEGMENT}{axis}.{number}")
        segment = dataclasses.replace(leaf, shape=shape, template=template)
        both = (
            (segment, flat[is_in]),
            (link.ends[1 - side], link.flats[1 - side][is_in]),
        )
        (one, ones), (two, twos) = both if side == 0 else both[::-1]
        if is_in.any():
            yield Link((one, two), (ones, twos))


def with_whole_leaves(row: DraftRow, side: int) -> DraftRow | None:
    """Return a row in which the segments of each leaf are one address.

    None if they do not follow each other, or differ in other axes.
    """
    addresses = []
    for _, group in itertools.groupby(row.sides[side], _whole_tokens):
        address = _united([*group])
        if address is None:
            return None
        addresses.append(address)
    if len({address.tokens for address in addresses}) < len(addresses):
        return None  # a segment of another leaf is between two of this one
    return row.with_side(side, tuple(addresses))


def _whole_tokens(address: DraftAddress) -> Tokens:
    return address.tokens[:-1] if _mark_of(address.tokens) else address.tokens


def _mark_of(tokens: Tokens | Pattern) -> str:
    """Return the token of a segment at the end of a path; empty if it is none."""
    last = tokens[-1] if tokens else ""
    return last if isinstance(last, str) and last.startswith(SEGMENT) else ""


def _united(segments: Sequence[DraftAddress]) -> DraftAddress | None:
    """Return the address of a leaf whose segments follow each other."""
    first = segments[0]
    if not (mark := _mark_of(first.tokens)):
        return first if len(segments) == 1 else None
    axis = int(mark[1:].partition(".")[0])
    marks = [f"{SEGMENT}{axis}.{number}" for number in range(len(segments))]
    if [_mark_of(each.tokens) for each in segments] != marks:
        return None
    others = {(*each.axes[:axis], *each.axes[axis + 1 :]) for each in segments}
    parts = tuple(each.axes[axis][0] for each in segments)
    axes = (*first.axes[:axis], parts, *first.axes[axis + 1 :])
    return DraftAddress(first.tokens[:-1], axes) if len(others) == 1 else None
