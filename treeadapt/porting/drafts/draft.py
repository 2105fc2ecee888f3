"""``draft_migration``: the first version of a table, and what it rests on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from treeadapt.errors import MigrationError
from treeadapt.migrations.plan import leads_back
from treeadapt.porting.drafts.called_function import Conversion
from treeadapt.porting.drafts.finding import RowFinder
from treeadapt.porting.drafts.finishing import finished
from treeadapt.porting.drafts.inputs import Side, read_side
from treeadapt.porting.drafts.migration_draft import MigrationDraft
from treeadapt.porting.drafts.more_layers import (
    with_more_layers,
    with_numbers_below_zero,
)
from treeadapt.porting.drafts.nearer_sides import NearerSides
from treeadapt.porting.drafts.stated import read_stated
from treeadapt.porting.drafts.synonyms import load_words
from treeadapt.text.names import fold, listing, plural

_HALVED = ("float64", "float32")  # by JAX, not by what the function is for
_OTHER_DTYPES = (
    "convert= takes float32 and not the dtypes of the source: casts are not known."
)


def draft_migration(
    source: Any,
    target: Any = None,
    *,
    convert: Callable[[Any], Any] | None = None,
    synonyms: str | os.PathLike[str] | None = None,
    decode: bool = True,
) -> MigrationDraft:
    """Write the first version of a table that turns ``source`` into ``target``.

    Where both sides hold the same numbers, their places show every row, axes included.
    Where they do not, names and shapes are paired, for the whole model at once. Names
    prove nothing, so each such row has a mark, ``check = "names"``, which ``lint`` and
    ``load`` report until somebody compared the answers and deletes it.

    Args:
        source: tree, concrete or abstract, or the path of a checkpoint or schema.
        target: the same of the other side. A pair of small models with equal numbers
            and sizes that are different primes makes all rows certain.
        convert: a function that converts the source, in place of numbers. It is called
            twice, each time with other distinct numbers (read-only arrays of NumPy,
            float32) in the form of ``source``: a fresh flat dict of a checkpoint, else
            a tree like it; and some more times if there are leaves that it may not
            read, and once with more layers. The tree, or the pairs of names and arrays,
            that it returns or yields are the target; if there is a ``target``, its
            names are compared.
        synonyms: a file of words that mean the same in names, as the one that comes
            with the library; it is added to that.
        decode: as for ``load``, of the paths of checkpoints.

    Raises:
        MigrationError: a side holds no array, or too many; ``convert`` raises, or
            returns no arrays.
        CheckpointError: a checkpoint cannot be read.

    Example:
        >>> random = np.random.default_rng(0)
        >>> q = random.normal(size=(2, 5, 3, 7)).astype("float32")
        >>> old = {f"h.{i}.q.weight": q[i].reshape(5, 21).T for i in (0, 1)}
        >>> draft = draft_migration(old, {"blocks/q": q})
        >>> draft.migration
        Migration({'h.{l}.q.weight : (h d) e': 'blocks/q : l e h d'})
        >>> print(draft)
        1 row: 1 by values.
        'h.{l}.q.weight : (h d) e' -> 'blocks/q : l e h d'
    """
    return draft_marked(
        source, target, convert=convert, synonyms=synonyms, decode=decode
    )


def draft_marked(
    source: Any,
    target: Any = None,
    *,
    convert: Callable[[Any], Any] | None = None,
    synonyms: str | os.PathLike[str] | None = None,
    decode: bool = True,
    marks: Mapping[str, str] | None = None,
) -> MigrationDraft:
    """Write a draft in which the rows of some leaves have a mark.

    Args:
        source: as in ``draft_migration``.
        target: as there.
        convert: as there.
        synonyms: as there.
        decode: as there.
        marks: for paths of the source what their row rests on besides numbers.

    Raises:
        MigrationError: as there.
        CheckpointError: as there.
    """
    source_side = read_side(source, what="the source", decode=decode)
    stated = read_stated(source)
    notes: list[str] = [stated.note] if stated.note else []
    conversion = None if convert is None else Conversion(source, source_side, convert)
    if conversion is not None:
        calls = [conversion.called(nth) for nth in (0, 1)]
        _require_same(calls[0][1], calls[1][1])
        if target is not None:
            paths = source_side.leaves
            other = read_side(target, paths, "the target", decode=decode)
            notes += _compared(calls[0][1], other)
    elif target is None:
        raise MigrationError("Pass the target, or convert=, a function that gives it.")
    else:
        paths = source_side.leaves
        other = read_side(target, paths, "the target", decode=decode)
        calls = [(source_side, other)]
    finder = RowFinder(conversion, load_words(synonyms), stated, marks or {})
    found = finder.best(NearerSides(calls))
    evidence, rows = found.evidence, found.rows
    notes += found.notes
    if conversion is not None:
        dtypes = conversion.dtypes(*calls[0])
        notes += [] if dtypes else [_OTHER_DTYPES]
        if dtypes and target is not None:
            dtypes[1].update({path: x.dtype for path, x in other.leaves.items()})
        if dtypes:
            evidence = evidence.with_dtypes(*found.between.named(*dtypes))
            rows = [
                dataclasses.replace(part, cast=()) if part.cast == _HALVED else part
                for row in rows
                for part in evidence.by_dtype(row)
            ]
    draft = finished(evidence, rows, found.unread, notes, stated, found.between.inner)
    whole = found.between.around(draft)
    more = _way_back_notes(whole, *calls[0])
    whole = dataclasses.replace(whole, notes=(*whole.notes, *more))
    if convert is None or conversion is None:
        return whole
    whole = with_numbers_below_zero(whole, source_side, conversion)
    return with_more_layers(whole, source, source_side, convert)


def _way_back_notes(draft: MigrationDraft, source: Side, target: Side) -> Iterator[str]:
    """Say where a table has no way back from what it fills."""
    rows = (row for table in draft.migration.tables for row in table.rows)
    stuck = [row.text for row in rows if not (row.drops or leads_back(row))]
    if stuck:
        yield f"There is no way back: {listing(stuck)} cannot be read backwards."
        return
    olds, news = (
        {p: leaf for p, leaf in side.leaves.items() if p not in gone}
        for side, gone in ((source, {*draft.unexpected}), (target, {*draft.missing}))
    )
    try:
        draft.migration.inverse.plan(news, olds)
    except MigrationError as error:
        yield f"There is no way back: {str(error).splitlines()[0]}"


def _require_same(source: Side, target: Side) -> None:
    """Raise unless a function returns the same names and shapes for other numbers."""
    odd = [
        path
        for path in dict.fromkeys([*source.leaves, *target.leaves])
        if source.leaves.get(path) != target.leaves.get(path)
    ]
    if odd:
        raise MigrationError(
            f"convert= was called twice, and returned other names or shapes for other "
            f"numbers: {listing(odd)}. It is to depend on names and shapes alone."
        )


def _compared(result: Side, target: Side) -> Iterator[str]:
    """Say where what a function made is not like the target."""
    gone = [path for path in target.leaves if path not in result.leaves]
    more = [path for path in result.leaves if path not in target.leaves]
    other = [
        path
        for path, leaf in result.leaves.items()
        if path in target.leaves and target.leaves[path].shape != leaf.shape
    ]
    for text, paths in (
        ("not made by the function", gone),
        ("not in the target", more),
        ("of another shape in the target", other),
    ):
        if paths:
            names = listing(fold(paths), limit=4)
            yield f"{plural(len(paths), 'leaf')} {text}: {names}."
