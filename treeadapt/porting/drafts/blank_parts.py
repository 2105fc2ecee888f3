"""Zeros between numbers: as of the bias of keys, next to those of queries and values.

Takes sides of which a leaf of the target has zeros next to numbers of the source; gives
sides whose source has a leaf of its own for the zeros, ``q.bias/zeros`` for those that
are as many as the numbers of ``q.bias`` next to them. A first table fills it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from treeadapt.migrations.migration import Migration
from treeadapt.porting.drafts.evidence import CONSTANT, Evidence
from treeadapt.porting.drafts.inputs import Side, distinct_numbers
from treeadapt.porting.drafts.links import Link
from treeadapt.porting.drafts.migration_draft import dropping
from treeadapt.porting.drafts.nearer_sides import NearerSides
from treeadapt.porting.drafts.rows import DraftRow

_NAME = "zeros"

#: Of a leaf of the source: leaves of the target, flat indices of their zeros, and those
#: of the numbers next to them in the leaf.
_Blanks = dict[str, list[tuple[str, np.ndarray, np.ndarray]]]


def with_blank_parts(
    between: NearerSides, evidence: Evidence, rows: Sequence[DraftRow]
) -> NearerSides | None:
    """Return the sides with a leaf for zeros of leaves without a row; None without any.

    Args:
        between: the sides.
        evidence: their numbers, of both calls of a function.
        rows: of other leaves.
    """
    links: dict[str, list[Link]] = {}
    for link in evidence.linked_without_live_row(rows)[2]:
        links.setdefault(link.ends[1].path, []).append(link)
    blanks: _Blanks = {}
    for path, own in links.items():
        arrays = [target.array(path) for _, target in evidence.calls]
        is_blank = np.all([array == 0 for array in arrays], axis=0)
        for source, (flat, places) in _next_to(is_blank, own).items():
            blanks.setdefault(source, []).append((path, flat, places))
    names = {path: f"{path}/{_NAME}" for path in blanks}
    if not names or not between.calls[0][0].leaves.keys().isdisjoint(names.values()):
        return None
    fill = {"fill": _NAME, "check": CONSTANT}
    new = {drop.sources[0]: fill for drop in dropping(names.values())}
    above, below = between.tables
    own_names = {name: between.own(0, path) for path, name in names.items()}
    return dataclasses.replace(
        between,
        calls=[
            _filled(*sides, nth, blanks, names)
            for nth, sides in enumerate(between.calls)
        ],
        names=({**between.names[0], **own_names}, between.names[1]),
        tables=((*above, Migration([("{rest:**}", "{rest}")], new=new)), below),
    )


def _next_to(
    is_blank: np.ndarray, links: Sequence[Link]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return which leaves are as large as the zeros next to them, and where these are.

    Args:
        is_blank: where an array of the target is zero.
        links: of all its other numbers.
    """
    owners, places = np.full((2, is_blank.size), -1)
    for number, link in enumerate(links):
        owners[link.flats[1]], places[link.flats[1]] = number, link.flats[0]
    if not np.array_equal(owners < 0, is_blank.reshape(-1)):
        return {}
    flat = np.arange(is_blank.size).reshape(is_blank.shape)
    for axis, size in enumerate(is_blank.shape):
        lines = np.moveaxis(is_blank, axis, 0).reshape(size, -1)
        run = np.flatnonzero(lines.all(1))
        if not len(run) or lines.any(1).sum() > len(run) or np.ptp(run) >= len(run):
            continue
        for near in (run - len(run), run + len(run)):
            if near.min() < 0 or near.max() >= size:
                continue
            zeros, others = (flat.take(each, axis).reshape(-1) for each in (run, near))
            found = {
                links[n].ends[0]: (
                    zeros[owners[others] == n],
                    places[others][owners[others] == n],
                )
                for n in np.unique(owners[others])
            }
            if all(
                sorted(own) == [*range(int(np.prod(leaf.shape)))]
                for leaf, (_, own) in found.items()
            ):
                return {leaf.path: both for leaf, both in found.items()}
    return {}


def _filled(
    source: Side, target: Side, nth: int, blanks: _Blanks, names: Mapping[str, str]
) -> tuple[Side, Side]:
    """Return the sides with numbers in place of zeros, which the source has, too."""
    more = {names[path]: source.leaves[path] for path in blanks}
    every = distinct_numbers({**source.leaves, **more}, nth)
    arrays: dict[str, np.ndarray] = {}
    for path, parts in blanks.items():
        numbers = every[names[path]].reshape(-1)
        for made, flat, places in parts:
            array = arrays.setdefault(made, target.array(made).copy())
            array.reshape(-1)[flat] = numbers[places]
    read = {
        path: functools.partial(np.asarray, array) for path, array in arrays.items()
    }
    own = {name: functools.partial(np.asarray, every[name]) for name in more}
    return (
        dataclasses.replace(
            source,
            leaves={**source.leaves, **more},
            arrays={**(source.arrays or {}), **own},
        ),
        dataclasses.replace(target, arrays={**(target.arrays or {}), **read}),
    )
