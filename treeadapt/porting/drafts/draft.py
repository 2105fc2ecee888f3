"""``draft_migration``: the first version of a table, and what it rests on."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from treeadapt.errors import MigrationError
from treeadapt.porting.drafts.called_function import Conversion
from treeadapt.porting.drafts.evidence import Evidence
from treeadapt.porting.drafts.families import families
from treeadapt.porting.drafts.finishing import NO_ROW, finished, rest
from treeadapt.porting.drafts.inputs import Side, read_side
from treeadapt.porting.drafts.migration_draft import MigrationDraft
from treeadapt.porting.drafts.numbers import castable
from treeadapt.porting.drafts.pairing import propose, with_tied_head
from treeadapt.porting.drafts.rows import DraftRow, by_template, template_of
from treeadapt.porting.drafts.stated import ModelConfig, read_stated
from treeadapt.porting.drafts.synonyms import Words, load_words
from treeadapt.text.names import fold, listing, plural

_MOST_PAIRS = 10_000  # of families that are left, beyond which none is compared
_MOST_TRIED = 64  # pairs of families of different sizes whose numbers are compared
_SCALED = "scales", "numbers of few bits, which scales may go with: see `multiply`"
_HALVED = ("float64", "float32")  # by JAX, not by what the function is for
_OTHER_DTYPES = (
    "convert= takes float32 and not the dtypes of the source: casts are not known."
)
_NOTHING_COMMON = "The two sides have no numbers in common; names decide."


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
            read. The tree, or the pairs of names and arrays, that it returns or yields
            are the target; if there is a ``target``, its names are compared.
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
    words = load_words(synonyms)
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
    evidence = Evidence(calls)
    every = _rows(evidence, words, notes, stated)
    rows = [_marked(row, marks or {}) for row in every]
    unread = None
    if conversion is not None:
        unread = conversion.unread([*evidence.left(filter(_is_live, rows))[0]])
        dtypes = conversion.dtypes(*calls[0])
        notes += [] if dtypes else [_OTHER_DTYPES]
        if dtypes and target is not None:
            dtypes[1].update({path: x.dtype for path, x in other.leaves.items()})
        if dtypes:
            evidence = evidence.with_dtypes(*dtypes)
            rows = [
                dataclasses.replace(part, cast=()) if part.cast == _HALVED else part
                for row in rows
                for part in evidence.by_dtype(row)
            ]
    return finished(evidence, rows, unread, notes, stated)


def _marked(row: DraftRow, marks: Mapping[str, str]) -> DraftRow:
    for path in row.source_paths:
        row = row.marked(marks[path]) if path in marks else row
    return row


def _is_live(row: DraftRow) -> bool:
    return row.is_live


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


def _rows(
    evidence: Evidence, words: Words, notes: list[str], stated: ModelConfig
) -> list[DraftRow]:
    """Return the rows by the strongest evidence that there is for each.

    First what numbers show, then what names propose of the leaves that are left, as far
    as numbers do not contradict it. Two sides that share no number are paired by names.
    """
    if not evidence.has_numbers:
        return _fitting(evidence, _by_names(evidence, words, notes, stated))
    rows, have_common = evidence.rows()
    proposed = _proposed(evidence, words, rows, notes)
    tested = [each for row in proposed for each in evidence.tested(row)]
    tested += _of_other_sizes(evidence, [*rows, *tested], words)
    counted = evidence.counted([*rows, *tested])
    done = {path for row in counted for path in row.target_paths}
    tested = [row for row in tested if row.is_live or done.isdisjoint(row.target_paths)]
    tested = [*evidence.with_rivals([*tested, *counted])]
    shows = any(r.is_live and r.evidence == "values" for r in (*rows, *tested))
    shows = shows or evidence.are_equal(tested)
    if not shows:
        have_common = have_common or evidence.are_reordered(tested)
        notes += [NO_ROW] if have_common else []
    if shows or have_common or len(evidence.calls) > 1:
        return _fitting(evidence, [*rows, *tested])
    notes.append(_NOTHING_COMMON)
    return _fitting(evidence, _by_names(evidence, words, notes, stated))


def _fitting(evidence: Evidence, rows: Sequence[DraftRow]) -> list[DraftRow]:
    return [row for row in rows if evidence.fits(row)]


def _by_names(
    evidence: Evidence, words: Words, notes: list[str], stated: ModelConfig
) -> list[DraftRow]:
    """Return one row for leaves that stay, and those that names and shapes propose."""
    source, target = evidence.source, evidence.target
    rows = _equal(source, target)
    rows = [*rows, *_proposed(evidence, words, rows, notes)]
    if not stated.tied:
        return rows
    return with_tied_head(rows, source.leaves, target.leaves, words, stated.tied)


def _proposed(
    evidence: Evidence, words: Words, rows: Sequence[DraftRow], notes: list[str]
) -> list[DraftRow]:
    """Return what names and shapes propose for leaves that no row has."""
    proposed, crowded = propose(*evidence.left(rows), words, rows)
    if crowded:
        note = (
            f"{plural(crowded, 'leaf')} of the source not looked at: too many names "
            "have their size. Numbers on both sides, or convert=, would show them."
        )
        notes += [note] if note not in notes else []
    return [row.marked(*_SCALED) if _may_be_scaled(row) else row for row in proposed]


def _of_other_sizes(
    evidence: Evidence, rows: Sequence[DraftRow], words: Words
) -> Iterator[DraftRow]:
    """Yield rows that repeat numbers of few bits: names say which leaves to compare."""
    ones, twos = map(families, evidence.left(rows))
    if len(ones) * len(twos) > _MOST_PAIRS:
        return
    meanings = [[{*words.of(each.text)} for each in side] for side in (ones, twos)]
    near = [
        (-len(meanings[0][a] & meanings[1][b]), a, b)
        for a, b in itertools.product(range(len(ones)), range(len(twos)))
        if 0 < ones[a].size < twos[b].size
        and not twos[b].size % ones[a].size
        and castable(ones[a].dtype, twos[b].dtype)
    ]
    done: set[int] = set()
    for _, a, b in sorted(near)[:_MOST_TRIED]:
        if b not in done:
            drafted = evidence.repeated(ones[a].paths, twos[b].paths)
            yield from drafted
            done |= {b} if drafted else set()


def _may_be_scaled(row: DraftRow) -> bool:
    """Return whether a row casts to or from one byte, or integers to or from floats.

    So do models that are quantised.
    """
    dtypes = [jnp.dtype(name) for name in row.cast]
    return bool(dtypes) and (
        min(dtype.itemsize for dtype in dtypes) == 1
        or len({jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes}) > 1
    )


def _equal(source: Side, target: Side) -> list[DraftRow]:
    """Return one row for leaves that have a path and a shape on both sides, or none.

    Of paths that differ in numbers only, as many on both sides and not the same, each
    may be one with another number. There is no row unless it has half of the leaves of
    a side: then one model became the other.
    """
    ones, twos = by_template(source.leaves), by_template(target.leaves)
    renumbered = {
        template
        for template, paths in ones.items()
        if len(paths) == len(twos.get(template, ())) and {*paths} != {*twos[template]}
    }
    paths = [
        path
        for path, leaf in source.leaves.items()
        if target.leaves.get(path) == leaf and template_of(path) not in renumbered
    ]
    if not paths or 2 * len(paths) < min(len(source.leaves), len(target.leaves)):
        return []
    return [rest(paths, "equal").marked("names")]
