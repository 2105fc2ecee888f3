"""Sums: leaves of the target that a function adds several leaves of the source for.

As the two biases of a cell of PyTorch. With all summands but one at zero, a sum is that
one: so each gets a leaf of its own, ``b/0`` and ``b/1`` in place of ``b``, which is
drafted as any other. If a row makes each of them alone, one row adds these; else a
second table does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.porting.drafts.called_function import Conversion
from treeadapt.porting.drafts.finishing import rest
from treeadapt.porting.drafts.inputs import Side
from treeadapt.porting.drafts.merging import canonical
from treeadapt.porting.drafts.nearer_sides import NearerSides
from treeadapt.porting.drafts.rows import (
    DraftAddress,
    DraftRow,
    Hole,
    by_template,
    tokens_of,
)
from treeadapt.porting.drafts.writing import as_table, written

MOST_GROUPS = 32  # of leaves of which all others are set to zero

#: Leaves in place of sums: their names, by that of a sum.
Summands = Mapping[str, tuple[str, ...]]


def summands(
    between: NearerSides,
    conversion: Conversion,
    sources: Sequence[str],
    targets: Sequence[str],
) -> Iterator[tuple[NearerSides, Summands]]:
    """Yield the sides with summands in place of sums, those of one name together first.

    Args:
        between: the sides.
        conversion: the function.
        sources: leaves that it reads, and that have no row.
        targets: leaves that it makes, and that have no row.
    """
    alike = [*by_template(sources).values()]
    apart = [[path] for path in sources] if len(alike) < len(sources) else []
    for groups in (alike, apart):
        if 1 < len(groups) <= MOST_GROUPS:
            try:
                every = [
                    _alone(between, conversion, nth, groups, targets) for nth in (0, 1)
                ]
            except MigrationError:  # it does not take zeros
                return
            found = {p: tuple(own) for p, own in every[0].items() if len(own) > 1}
            found = {p: own for p, own in found.items() if own == tuple(every[1][p])}
            if found:
                yield with_table_below(between, found, every)


def _alone(
    between: NearerSides,
    conversion: Conversion,
    nth: int,
    groups: Sequence[Sequence[str]],
    targets: Sequence[str],
) -> dict[str, dict[int, np.ndarray]]:
    """Return what leaves are of one group of others alone, of all on which they depend.

    Nothing of a leaf that is not the sum of these.
    """
    own = [[between.own(0, path) for path in group] for group in groups]
    names = {path: between.own(1, path) for path in targets}
    every = [*itertools.chain(*own)]
    none, whole = conversion.with_zeros(nth, every), conversion.with_zeros(nth, [])
    alone: dict[str, dict[int, np.ndarray]] = {path: {} for path in targets}
    for number, group in enumerate(own):
        made = conversion.with_zeros(nth, {*every} - {*group})
        for path, name in names.items():
            array = made.array(name)
            if array.shape == whole.leaves[name].shape and np.any(array):
                alone[path][number] = array
    return {
        path: _side_by_side(parts)
        if _is_sum(whole.array(name), none.array(name), parts)
        else {}
        for (path, name), parts in zip(names.items(), alone.values(), strict=True)
    }


def _side_by_side(parts: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Return summands with those that have no place in common as one.

    As where both biases of one direction are next to those of the other direction.

    Example:
        >>> each = np.eye(2)
        >>> _side_by_side({0: each[0], 1: 3 * each[0], 2: each[1], 3: 5 * each[1]})
        {0: array([1., 1.]), 1: array([3., 5.])}
    """
    summands: dict[int, np.ndarray] = {}
    for number, part in parts.items():
        apart = (
            n for n, other in summands.items() if not np.any((other != 0) & (part != 0))
        )
        place = next(apart, number)
        summands[place] = summands[place] + part if place in summands else part
    return summands


def _is_sum(
    whole: np.ndarray, none: np.ndarray, parts: Mapping[int, np.ndarray]
) -> bool:
    if np.any(none) or not np.issubdtype(whole.dtype, np.floating):
        return False
    return np.allclose(sum(parts.values()), whole, rtol=1e-6, atol=0)


def with_table_below(
    between: NearerSides,
    found: Mapping[str, Sequence[int]],
    every: Sequence[Mapping[str, Mapping[int, np.ndarray]]],
    factors: Mapping[str, float] | None = None,
) -> tuple[NearerSides, Summands]:
    """Return sides with others in place of leaves, and the table that makes these.

    Args:
        between: the sides.
        found: numbers of what a leaf is made of: the sum of it, or a multiple of one.
        every: what these are, in each call.
        factors: by which one is multiplied, by leaf.
    """
    calls = between.calls
    target = calls[0][1]
    names: dict[str, tuple[str, ...]] = {}
    for start in itertools.count():  # there may be a leaf of that name
        names = {
            path: tuple(f"{path}/{start + place}" for place in range(len(numbers)))
            for path, numbers in found.items()
        }
        if target.leaves.keys().isdisjoint(itertools.chain(*names.values())):
            break
    new_calls = []
    for (source, whole), alone in zip(calls, every, strict=True):
        leaves = {p: leaf for p, leaf in whole.leaves.items() if p not in names}
        arrays = {p: read for p, read in (whole.arrays or {}).items() if p in leaves}
        for path, parts in names.items():
            for part, array in zip(parts, alone[path].values(), strict=True):
                leaves[part] = whole.leaves[path]
                arrays[part] = functools.partial(np.asarray, array)
        new_calls.append(
            (source, dataclasses.replace(target, leaves=leaves, arrays=arrays))
        )
    rows = [*map(canonical, _making(names, target, factors or {}))]
    if others := [path for path in target.leaves if path not in names]:
        rows.append(rest(others, "values"))
    table = as_table(*written(rows))
    spelled = {p: between.names[1][p] for p in others if p in between.names[1]}
    spelled |= {
        part: between.own(1, path) for path, parts in names.items() for part in parts
    }
    above, below = between.tables
    nearer = dataclasses.replace(
        between,
        calls=new_calls,
        names=(between.names[0], spelled),
        tables=(above, (table, *below)),
    )
    return nearer, names


def _making(
    names: Summands, target: Side, factors: Mapping[str, float]
) -> Iterator[DraftRow]:
    """Yield the rows that add or multiply, one where only numbers of paths differ."""
    alike: dict[object, list[str]] = {}
    for template, paths in by_template(names).items():
        for path in paths:
            leaf, factor = target.leaves[path], factors.get(path)
            form = template, len(leaf.shape), len(names[path]), factor
            alike.setdefault(form, []).append(path)
    for paths in alike.values():
        tokens = [*zip(*map(tokens_of, paths), strict=True)]
        count = itertools.count()
        whole = tuple(
            each[0] if len({*each}) == 1 else Hole((next(count),)) for each in tokens
        )
        shape = target.leaves[paths[0]].shape
        atoms = [*itertools.islice(count, len(shape))]
        axes = tuple(((atom,),) for atom in atoms)
        parts = [names[path] for path in paths]
        yield DraftRow(
            tuple(
                DraftAddress((*whole, "/", part.rpartition("/")[2]), axes)
                for part in parts[0]
            ),
            (DraftAddress(whole, axes),),
            dict(zip(atoms, shape, strict=True)),
            tuple((part, (path,)) for part, path in zip(parts, paths, strict=True)),
            "values",
            scale=factors.get(paths[0], 1.0),
            is_sum=len(parts[0]) > 1,
        )


def with_sums(rows: Sequence[DraftRow], names: Summands) -> list[DraftRow] | None:
    """Return the rows of summands as rows that add; None if one makes more than one.

    Args:
        rows: that make summands, among others.
        names: of the summands, by that of a sum.
    """
    owners = {path: row for row in rows if row.is_live for path in row.target_paths}
    alike: dict[tuple[int, ...], list[str]] = {}
    of_number = {id(row): row for row in owners.values()}
    for path, parts in names.items():
        if not owners.keys() >= {*parts}:
            return None
        alike.setdefault(tuple(id(owners[part]) for part in parts), []).append(path)
    sums = []
    for numbers, paths in alike.items():
        united = _united([of_number[number] for number in numbers], paths, names)
        if united is None:
            return None
        sums.append(united)
    gone = {part for parts in names.values() for part in parts}
    kept = [row for row in rows if gone.isdisjoint(row.target_paths)]
    return [*kept, *sums]


def _united(
    rows: Sequence[DraftRow], paths: Sequence[str], names: Summands
) -> DraftRow | None:
    """Return the row that adds what some rows make, each one summand."""
    plain = DraftRow((), (), {}, (), "").changes
    sources: list[DraftAddress] = []
    olds: list[dict[tuple[str, ...], tuple[str, ...]]] = []
    target: DraftAddress | None = None
    for place, row in enumerate(rows):
        own = {names[path][place]: path for path in paths}
        if {*row.target_paths} != {*own} or len(row.places) != 2:
            return None
        if row.changes != plain or row.copies:
            return None
        turned = canonical(
            dataclasses.replace(row, sources=row.targets, targets=row.sources)
        )
        (there,), (source,) = turned.sources, turned.targets
        whole = dataclasses.replace(there, tokens=there.tokens[:-2])
        if target not in (None, whole):
            return None
        target = whole
        sources.append(source)
        olds.append({tuple(own[p] for p in new): old for old, new in row.pairs})
        sizes = turned.sizes
    if target is None or any(old.keys() != olds[0].keys() for old in olds):
        return None
    pairs = [(tuple(itertools.chain(*(o[new] for o in olds))), new) for new in olds[0]]
    return canonical(
        dataclasses.replace(
            rows[0],
            sources=tuple(sources),
            targets=(target,),
            sizes=sizes,
            pairs=tuple(pairs),
            checks=tuple(dict.fromkeys(c for row in rows for c in row.checks)),
            notes=tuple(dict.fromkeys(n for row in rows for n in row.notes)),
            is_sum=True,
        )
    )
