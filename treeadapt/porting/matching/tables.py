"""The table of pairs that were found: written by a draft, and compared with them.

Takes parts with their partners and orders; gives a migration. The draft is shown the
pairs as a function, so it writes layers, scans and experts as a person would.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.rows import Row
from treeadapt.porting.drafts.draft import draft_marked
from treeadapt.porting.matching.search import Found
from treeadapt.porting.matching.sides import Models, usual
from treeadapt.text.names import fold, listing
from treeadapt.trees.state_dict import to_flat_dict

NAMES = "names"
ORDER = "order of axes"
INTEGERS = "integers"
SIZES = "sizes"
LISTED = "order"  # of numbers in one axis, of which another size has others


def undecided(found: Found) -> tuple[tuple[str, ...], ...]:
    """Return paths of the source that no answer tells apart, or of one its axes."""
    tied = (tuple(dict.fromkeys(slot.path for slot in each)) for each in found.tied)
    turned = ((m.source.path,) for m in found.solution if not m.is_certain)
    return tuple(dict.fromkeys([*(each for each in tied if len(each) > 1), *turned]))


def table_of(found: Found, models: Models, source: Any) -> Migration:
    """Return the table, without what is new in the target.

    Raises:
        MigrationError: no table says it.
    """
    marks: dict[str, str] = {}
    for paths in undecided(found):
        marks |= dict.fromkeys(paths, NAMES if len(paths) > 1 else ORDER)
    arrays = {p: x for p, x in to_flat_dict(source).items() if hasattr(x, "dtype")}
    # The models were asked in float32, which says nothing of casts.
    leaves = {
        path: jax.ShapeDtypeStruct(
            np.shape(leaf),
            "float32"
            if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
            else leaf.dtype,
        )
        for path, leaf in arrays.items()
    }
    convert = functools.partial(found.convert, models)
    draft = draft_marked(leaves, convert=convert, marks=marks)
    table = draft.migration
    integers = [
        path
        for path, leaf in leaves.items()
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    ]
    gone = [path for path in draft.unexpected if path in models.old.shapes]
    left = [*gone, *draft.missing]
    if len(table.tables) == 1:
        alone = [*_alone(found, models, leaves, marks, left)] if left else []
        left = [] if alone else left
        tables = [*alone, table]
        rows = (_checked(row, integers) for each in tables for row in each.rows)
        table = Migration([*rows], sizes=_sizes_of(tables))
    if left:
        names = listing(fold(left), limit=4)
        raise MigrationError(f"no row gives the order of {names}")
    _require_equal(table, found, models, leaves)
    return table


def _alone(
    found: Found,
    models: Models,
    leaves: Mapping[str, Any],
    marks: Mapping[str, str],
    left: Sequence[str],
) -> Iterator[Migration]:
    """Yield a table for each leaf of the target of which no row of a draft made any.

    Rows for several leaves have one order, and these may have others.

    Raises:
        MigrationError: no row gives the order of one alone either.
    """
    sources: dict[str, list[str]] = defaultdict(list)
    for moved in found.solution:
        for place in moved.target.places:
            if {place.path, moved.source.path} & {*left}:
                sources[place.path] += [each.path for each in moved.source.places]
    every = [path for each in sources.values() for path in dict.fromkeys(each)]
    if {*every, *sources} != {*left} or len(every) != len({*every}):
        return
    for target, paths in sources.items():

        def convert(weights: Mapping[str, Any], target: str = target) -> dict[str, Any]:
            others = {p: np.zeros(s, "float32") for p, s in models.old.shapes.items()}
            return {target: found.convert(models, {**others, **weights})[target]}

        own = {path: leaves[path] for path in paths}
        draft = draft_marked(own, convert=convert, marks=marks)
        if draft.unexpected or draft.missing or len(draft.migration.tables) > 1:
            raise MigrationError(f"no row gives the order of {target}")
        yield draft.migration


def _sizes_of(tables: Sequence[Migration]) -> dict[str, int]:
    """Return the sizes of all tables.

    Raises:
        MigrationError: two tables have two sizes for one name.
    """
    sizes: dict[str, int] = {}
    for table in tables:
        for name, size in table.sizes.items():
            if sizes.setdefault(name, size) != size:
                raise MigrationError(f"{name!r} has two sizes in one table")
    return sizes


def _checked(row: Row, integers: Sequence[str]) -> tuple[Any, Any]:
    """Return a row as typed; with a mark if it drops integers, or lists an order."""
    source, target = row.typed()
    if row.drops and any(row.takes(path) for path in integers):
        return source, (None, {"check": INTEGERS})
    if row.values.take and not row.notes.check and isinstance(target, tuple):
        return source, (target[0], {**target[-1], "check": LISTED})
    return source, target


def with_rows(
    table: Migration,
    rows: Iterator[tuple[Any, Any]],
    new: Mapping[str, Any] | None = None,
) -> Migration:
    """Return a table with other rows, and the same sizes."""
    return Migration([*rows], sizes=table.sizes, new=new)


def without_check(row: Row, check: str) -> tuple[Any, Any]:
    """Return a row as typed, without one of the texts of its mark."""
    source, target = row.typed()
    left = ", ".join(c for c in row.notes.check.split(", ") if c != check)
    if not isinstance(target, tuple) or not isinstance(target[-1], dict):
        return source, target
    options = {key: value for key, value in target[-1].items() if key != "check"}
    options |= {"check": left} if left else {}
    return source, (target[0], options) if options else target[0]


def likes_of(models: Models) -> dict[str, Any]:
    """Return the leaves of the target that a table fills, as shapes."""
    return {
        path: jax.ShapeDtypeStruct(shape, "float32")
        for path, shape in models.new.shapes.items()
    }


def _require_equal(
    table: Migration, found: Found, models: Models, leaves: Mapping[str, Any]
) -> None:
    """Raise unless a table gives the numbers of the pairs."""
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        path: usual(leaf.shape, rng)
        if path in models.old.shapes
        else np.zeros(leaf.shape, leaf.dtype)
        for path, leaf in leaves.items()
    }
    made = table(weights, likes_of(models))
    wanted = found.convert(models, weights)
    odd = [
        path
        for path, array in wanted.items()
        if not np.allclose(np.asarray(made[path]), array, rtol=1e-5, atol=1e-7)
    ]
    if odd:
        raise MigrationError(f"the rows of {listing(fold(odd), limit=4)} do not fit")
