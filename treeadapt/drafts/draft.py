"""``draft_migration``: the first version of a table, and what it rests on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.drafts.families import families, siblings_of, single
from treeadapt.drafts.merging import canonical, is_guess, merged
from treeadapt.drafts.migration_draft import MigrationDraft
from treeadapt.drafts.numbers import (
    bits,
    castable,
    contents,
    find_origins,
    have_numbers_in_common,
    is_constant,
    is_symmetric,
)
from treeadapt.drafts.ordering import apart
from treeadapt.drafts.pairing import propose
from treeadapt.drafts.rows import DraftRow, Hole, is_count, tokens_of
from treeadapt.drafts.sides import (
    Side,
    calling,
    distinct_numbers,
    is_flat,
    is_pair,
    read_side,
    yielded,
)
from treeadapt.drafts.values import Link, find_links, leaf_of, rows_of_links
from treeadapt.drafts.words import Words, load_words
from treeadapt.drafts.writing import WrittenRow, with_sizes, written
from treeadapt.errors import MigrationError
from treeadapt.migrations.migration import Migration
from treeadapt.names import fold, listing, plural
from treeadapt.trees.views import view_tree

_EQUAL = "equal leaves"
_MANY_LEAVES = 50_000  # too many to see which rows could do without a list
_MOST_PAIRS = 10_000  # of leaves of different sizes whose names are compared
_MOST_TRIED = 64  # pairs of leaves of different sizes that are compared
_LEAST_WITHIN = 0.05  # of a leaf, to find its order next to one other leaf
_NAMES = "names"
_SCALED = "scales", "numbers of few bits, which scales may go with: see `multiply`"
_NOTHING_COMMON = "The two sides have no numbers in common; names decide."
_FEW_PAIRS = (
    "Most leaves have no partner: these do not look like one model of one size. Where "
    "sizes differ, draft on two models of one size: the table is that of all sizes."
)
_NO_ROW = "The two sides have numbers in common, in an order that no row gives."


def draft_migration(
    source: Any,
    target: Any = None,
    *,
    convert: Callable[[Any], Any] | None = None,
    synonyms: str | os.PathLike[str] | None = None,
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
            once, with distinct numbers (read-only arrays of NumPy, float32) in the form
            of ``source``: a fresh flat dict of a checkpoint, else a tree like it. The
            tree, or the pairs of names and arrays, that it returns or yields are the
            target; if there is a ``target``, its names are compared.
        synonyms: a file of words that mean the same in names, as the one that comes
            with the library; it is added to that.

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
    """
    words = load_words(synonyms)
    one = read_side(source, what="the source")
    notes: list[str] = []
    is_converted = convert is not None
    if convert is not None:
        one, two = _converted(source, one, convert)
        if target is not None:
            notes += _compared(two, read_side(target, one.leaves, "the target"))
    elif target is None:
        raise MigrationError("Pass the target, or convert=, a function that gives it.")
    else:
        two = read_side(target, one.leaves, "the target")
    rows = _rows(one, two, words, notes, is_distinct=is_converted)
    return _finished(one, two, rows, notes)


def _converted(
    source: Any, one: Side, convert: Callable[[Any], Any]
) -> tuple[Side, Side]:
    """Return what a function makes of distinct numbers, and these."""
    if not callable(convert):
        raise MigrationError(f"convert= is {type(convert).__name__}, not a function.")
    arrays = distinct_numbers(one.leaves)
    if isinstance(source, str | os.PathLike) or is_flat(source):
        tree: Any = dict(arrays)
    else:
        view = view_tree(source)
        tree = view.rebuild([arrays.get(path, leaf) for path, leaf in view.items()])
    copies = {path: array.copy() for path, array in arrays.items()}
    with calling(convert):
        result = convert(tree)
        kind, is_lazy = type(result).__name__, isinstance(result, Iterator | ItemsView)
        if is_lazy:
            result = [*result]
    if is_lazy or (isinstance(result, list) and result and all(map(is_pair, result))):
        result = yielded(result, kind)
    if result is None or isinstance(result, int | float | complex | str | bytes):
        raise MigrationError(f"convert= returned {kind}. It is to return the new tree.")
    for path, array in arrays.items():
        if not np.array_equal(_bytes(array), _bytes(copies[path])):
            raise MigrationError(
                f"convert= wrote into its input, {listing([path])}. Let it copy first."
            )
    two = read_side(result, one.leaves, f"what convert= returned, of type {kind}")
    if two.arrays is None:
        raise MigrationError("convert= returned shapes. It is to return arrays.")
    read = {path: functools.partial(_same, array) for path, array in arrays.items()}
    specs = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for path, array in arrays.items()
    }
    return Side(one.name, specs, read), two


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _compared(two: Side, target: Side) -> Iterator[str]:
    """Say where what a function made is not like the target."""
    gone = [path for path in target.leaves if path not in two.leaves]
    more = [path for path in two.leaves if path not in target.leaves]
    other = [
        path
        for path, leaf in two.leaves.items()
        if path in target.leaves and target.leaves[path].shape != leaf.shape
    ]
    for text, paths in (
        ("the function does not make", gone),
        ("the target lacks", more),
        ("have another shape in the target", other),
    ):
        if paths:
            names = listing(fold(paths), limit=4)
            yield f"{plural(len(paths), 'leaf')} that {text}: {names}."


def _rows(
    one: Side, two: Side, words: Words, notes: list[str], *, is_distinct: bool
) -> list[DraftRow]:
    """Return the rows by the strongest evidence that there is for each."""
    rows: list[DraftRow] = []
    has_values = one.arrays is not None and two.arrays is not None
    have_common = False
    if has_values:
        rows, have_common = _by_values(one, two, is_distinct=is_distinct)
        rows += _by_offset(one, two, rows)
    else:
        rows = _equal(one, two)
    proposed, crowded = _by_names(one, two, words, rows)
    if crowded:
        notes.append(
            f"{plural(crowded, 'leaf')} of the source not looked at: too many names "
            "have their size. Numbers on both sides, or convert=, would show them."
        )
    if has_values:
        tested = [each for row in proposed for each in _tested(row, one, two)]
        tested += _of_other_sizes(one, two, [*rows, *tested], words)
        tested = _with_rivals(tested, one, two)
        shows = any(row.evidence == "values" for row in (*rows, *tested))
        if not shows:
            have_common = have_common or _are_reordered(tested, one, two)
            if have_common:
                notes.append(_NO_ROW)
        if shows or have_common or is_distinct:
            return [row for row in (*rows, *tested) if not _misfit(row, one, two)]
        notes.append(_NOTHING_COMMON)
        rows = _equal(one, two)
        proposed, _ = _by_names(one, two, words, rows)
    return [row for row in (*rows, *proposed) if not _misfit(row, one, two)]


def _by_names(
    one: Side, two: Side, words: Words, rows: Sequence[DraftRow]
) -> tuple[list[DraftRow], int]:
    """Return rows of leaves that others lack, and how many were not looked at."""
    sources, targets = _left(one, two, rows)
    proposed, crowded = propose(sources, targets, words, rows)
    return [
        row.checked(*_SCALED) if _may_be_scaled(row) else row for row in proposed
    ], crowded


def _left(one: Side, two: Side, rows: Sequence[DraftRow]) -> Iterator[dict[str, Any]]:
    """Yield the leaves of both sides that no row has."""
    for side, paths in ((one, "source_paths"), (two, "target_paths")):
        covered = {path for row in rows for path in getattr(row, paths)}
        yield {path: leaf for path, leaf in side.leaves.items() if path not in covered}


def _of_other_sizes(
    one: Side, two: Side, rows: Sequence[DraftRow], words: Words
) -> Iterator[DraftRow]:
    """Yield rows that repeat numbers of few bits: names say which leaves to compare."""
    ones, twos = map(families, _left(one, two, rows))
    if len(ones) * len(twos) > _MOST_PAIRS:
        return
    meanings = [[{*words.of(each.text)} for each in side] for side in (ones, twos)]
    near = [
        (-len(meanings[0][a] & meanings[1][b]), a, b)
        for a, b in itertools.product(range(len(ones)), range(len(twos)))
        if ones[a].size < twos[b].size
        and not twos[b].size % ones[a].size
        and castable(ones[a].dtype, twos[b].dtype)
    ]
    done: set[int] = set()
    for _, a, b in sorted(near)[:_MOST_TRIED]:
        if b not in done:
            row = DraftRow((), (), {}, ((ones[a].paths, twos[b].paths),), "values")
            drafted = _within(row, one, two)
            yield from drafted
            done |= {b} if drafted else set()


def _may_be_scaled(row: DraftRow) -> bool:
    """Return whether a row casts numbers of few bits, as models are quantised."""
    dtypes = [jnp.dtype(name) for name in row.cast]
    return bool(dtypes) and (
        min(dtype.itemsize for dtype in dtypes) == 1
        or len({jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes}) > 1
    )


def _are_reordered(rows: Sequence[DraftRow], one: Side, two: Side) -> bool:
    """Return whether leaves, or all of a row, have their numbers in another order."""
    dtypes = {leaf.dtype for leaf in two.leaves.values()}
    rows = [row for row in rows if not row.is_live]
    old = [*([path] for path in one.leaves), *(row.source_paths for row in rows)]
    new = [*([path] for path in two.leaves), *(row.target_paths for row in rows)]
    there = {
        (dtype, contents([one.array(path) for path in paths], dtype))
        for paths in old
        for dtype in dtypes
    }
    return any(
        (dtype, own) in there
        for paths in new
        for dtype in {two.leaves[path].dtype for path in paths}
        if (own := contents([two.array(path) for path in paths], dtype))
    )


def _equal(one: Side, two: Side) -> list[DraftRow]:
    """Return one row for leaves that have a path and a shape on both sides.

    Of siblings with other numbers, as many, each may be one with another number.
    There is none unless most leaves are such: then one model became the other.
    """
    every = [
        siblings_of(itertools.starmap(single, side.leaves.items()))
        for side in (one, two)
    ]

    def is_renumbered(path: str) -> bool:
        tokens = tokens_of(path)
        groups = (
            [siblings.get((tokens[:place], token), ()) for siblings in every]
            for place, token in enumerate(tokens)
            if is_count(token)
        )
        return any(len(a) == len(b) and a != b for a, b in groups)

    paths = [
        path
        for path, leaf in one.leaves.items()
        if two.leaves.get(path) == leaf and not is_renumbered(path)
    ]
    if not paths or 2 * len(paths) < min(len(one.leaves), len(two.leaves)):
        return []
    return [_rest(paths, "equal").checked(_NAMES)]


def _rest(paths: Iterable[str], evidence: str) -> DraftRow:
    pairs = tuple(((path,), (path,)) for path in paths)
    return DraftRow((), (), {}, pairs, evidence, is_rest=True)


def _collapsed(rows: Sequence[DraftRow], one: Side, two: Side) -> list[DraftRow]:
    """Return rows with one for all leaves that stay as they are, if most do."""
    staying = [row for row in rows if _stays(row)]
    paths = [path for row in staying for path in row.source_paths]
    if len(staying) < 2 or 2 * len(paths) < min(len(one.leaves), len(two.leaves)):
        return [*rows]
    return [*(row for row in rows if not _stays(row)), _rest(paths, "values")]


def _stays(row: DraftRow) -> bool:
    is_plain = len(row.places) == 2 and row.sources == row.targets
    is_sure = row.is_live and not (row.checks or row.cast or row.offset)
    return (
        is_plain
        and is_sure
        and all(ones == twos and len(ones) == 1 for ones, twos in row.pairs)
    )


def _by_values(
    one: Side, two: Side, *, is_distinct: bool
) -> tuple[list[DraftRow], bool]:
    """Return the rows that numbers show, compared bit by bit; are any in common?"""
    assert one.arrays is not None
    assert two.arrays is not None
    paths = [*one.leaves]
    sources = [leaf_of(path, leaf.shape) for path, leaf in one.leaves.items()]
    targets = [leaf_of(path, leaf.shape) for path, leaf in two.leaves.items()]
    origins, first, constant = find_origins(
        [one.arrays[path] for path in paths],
        [leaf.dtype for leaf in one.leaves.values()],
        two.arrays,
    )
    twins: dict[int, list[str]] = {}
    for number, owner in enumerate(first):
        if number != owner:
            twins.setdefault(owner, []).append(paths[number])
    if not is_distinct:
        origins = {
            path: origin for path, origin in origins.items() if not constant[path]
        }
    links = find_links(targets, origins)
    rows = []
    for row in rows_of_links(sources, targets, links):
        for each in _by_dtype(row, one, two):
            if not _misfit(each, one, two) and _gives(each, one, two):
                rows.append(each)
    by_path = {paths[owner]: names for owner, names in twins.items()}
    varied = (own for path, own in origins.items() if not constant[path])
    have_common = have_numbers_in_common(varied)
    return [_with_twins(row, by_path) for row in rows], have_common


def _by_offset(one: Side, two: Side, rows: Sequence[DraftRow]) -> Iterator[DraftRow]:
    """Yield rows of leaves that no row has, if their numbers are 1 more."""
    ones, twos = (
        {
            p: leaf
            for p, leaf in side.items()
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        }
        for side in _left(one, two, rows)
    )

    def plus_one(path: str) -> np.ndarray:
        array = one.array(path)
        return array.astype(np.promote_types(array.dtype, np.float32)) + 1

    origins, _, constant = find_origins(
        [functools.partial(plus_one, path) for path in ones],
        [leaf.dtype for leaf in ones.values()],
        {path: functools.partial(two.array, path) for path in twos},
    )
    sources = [leaf_of(path, leaf.shape) for path, leaf in ones.items()]
    targets = [leaf_of(path, leaf.shape) for path, leaf in twos.items()]
    varied = {path: own for path, own in origins.items() if not constant[path]}
    links = find_links(targets, varied)
    for row in rows_of_links(sources, targets, links):
        for each in _by_dtype(dataclasses.replace(row, offset=1.0), one, two):
            if not _misfit(each, one, two) and _gives(each, one, two):
                yield each


def _with_twins(row: DraftRow, twins: Mapping[str, Sequence[str]]) -> DraftRow:
    """Mark a row whose source has the same numbers elsewhere, too."""
    names = [name for path in row.source_paths for name in twins.get(path, ())]
    if not names:
        return row
    note = f"the source has the same numbers at {listing(names, limit=3)}"
    return row.checked(_EQUAL, note)


def _with_rivals(rows: Sequence[DraftRow], one: Side, two: Side) -> list[DraftRow]:
    """Mark rows whose numbers say nothing of the leaf, or of the order of its axes.

    A cast makes the numbers of a model and of its average equal; a symmetric array is
    the same whichever axis is first.
    """
    proved = [row for row in rows if row.is_live and row.evidence == "values"]
    sizes = {two.leaves[path].size for row in proved for path in row.target_paths}
    sizes |= {one.leaves[path].size for row in proved for path in row.source_paths}
    alike: dict[tuple[Any, bytes], list[str]] = {}
    keys: dict[tuple[Any, str], tuple[Any, bytes]] = {}
    for dtype in {two.leaves[row.target_paths[0]].dtype for row in proved}:
        for path, leaf in one.leaves.items():
            if leaf.size in sizes and (same := contents([one.array(path)], dtype)):
                keys[dtype, path] = dtype, same
                alike.setdefault((dtype, same), []).append(path)
    marked = []
    for row in rows:
        if row.is_live and row.evidence == "values":
            dtype = two.leaves[row.target_paths[0]].dtype
            every = {
                other
                for path in row.source_paths
                if (dtype, path) in keys
                for other in alike[keys[dtype, path]]
                if other not in row.source_paths
            }
            if every:
                names = listing(fold([p for p in one.leaves if p in every]), limit=3)
                row = row.checked(_EQUAL, f"these have the same numbers: {names}")
            if all(is_symmetric(one.array(path)) for path in row.source_paths):
                row = row.checked("order of axes", "the arrays are symmetric")
        marked.append(row)
    return marked


def _by_dtype(row: DraftRow, one: Side, two: Side) -> Iterator[DraftRow]:
    """Divide a row by the dtypes of its leaves, and note the casts."""
    parts: dict[tuple[str, ...], list[Any]] = {}
    for pair in row.pairs:
        sources, targets = pair
        olds = {str(np.dtype(one.leaves[path].dtype)) for path in sources}
        news = {str(np.dtype(two.leaves[path].dtype)) for path in targets}
        if len(olds) == len(news) == 1:
            old, new = olds.pop(), news.pop()
            parts.setdefault((old, new) if old != new else (), []).append(pair)
    for cast, pairs in parts.items():
        yield dataclasses.replace(row, pairs=tuple(pairs), cast=cast)


def _single(row: DraftRow) -> tuple[Migration, WrittenRow]:
    (text,), sizes = written([row])
    return _table([text], sizes), text


def _table(rows: Iterable[WrittenRow], sizes: Mapping[str, int]) -> Migration:
    return Migration([each.pair for each in rows], sizes=sizes or None)


def _misfit(row: DraftRow, one: Side, two: Side) -> str:
    """Return what is wrong with a row on shapes; empty if nothing is."""
    kinds: dict[object, list[tuple[tuple[str, ...], tuple[str, ...]]]] = {}
    for pair in row.pairs:  # those of equal shapes are alike
        olds, news = (
            [*map(side.leaves.get, p)] for side, p in zip((one, two), pair, strict=True)
        )
        kinds.setdefault((tuple(olds), tuple(news)), []).append(pair)
    some = [pair for alike in kinds.values() for pair in (alike[0], *alike[1:][-1:])]
    source = {path: one.leaves[path] for paths, _ in some for path in paths}
    target = {path: two.leaves[path] for _, paths in some for path in paths}
    try:
        migration, _ = _single(canonical(row))
        migration.plan(source, target)
    except MigrationError as error:
        return str(error)
    return ""


def _gives(row: DraftRow, one: Side, two: Side) -> bool:
    """Return whether a row gives every number of its targets."""
    source = {path: one.array(path) for path in row.source_paths}
    target = {path: two.leaves[path] for path in row.target_paths}
    try:
        migration, _ = _single(canonical(row))
        moved = migration(source, target)
    except MigrationError:
        return False
    return all(
        np.array_equal(_bytes(moved[path]), _bytes(two.array(path))) for path in target
    )


def _bytes(array: Any) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _tested(row: DraftRow, one: Side, two: Side) -> list[DraftRow]:
    """Return what the numbers of both sides leave of a row that names propose."""
    arrays = [two.array(path) for path in row.target_paths]
    fits = not _misfit(row, one, two)
    if all(map(is_constant, arrays)):
        is_live = fits and _gives(row, one, two)
        row = row.checked("constant numbers") if is_live else row
        return [dataclasses.replace(row, is_live=is_live)]
    rows = _within(row, one, two)
    if rows:
        return rows
    for offset in (0.0, 1.0):
        tried = dataclasses.replace(row, offset=offset)
        if not _misfit(tried, one, two) and _gives(tried, one, two):
            if all(map(_is_telling, arrays)):
                return [dataclasses.replace(tried, evidence="values", checks=())]
            return [tried]
    return [dataclasses.replace(row, is_live=False)]


def _within(row: DraftRow, one: Side, two: Side) -> list[DraftRow]:
    """Return the rows that numbers show among the leaves of a proposed row alone.

    A number that other leaves have, too, may stand once among these.
    """
    assert one.arrays is not None
    assert two.arrays is not None
    sources = [leaf_of(path, one.leaves[path].shape) for path in row.source_paths]
    targets = [leaf_of(path, two.leaves[path].shape) for path in row.target_paths]
    number = {leaf.path: place for place, leaf in enumerate(sources)}
    links: list[Link] = []
    at = {leaf.path: place for place, leaf in enumerate(targets)}
    for ones, twos in row.pairs:
        origins, _, constant = find_origins(
            [one.arrays[path] for path in ones],
            [one.leaves[path].dtype for path in ones],
            {path: two.arrays[path] for path in twos},
        )
        origins = {
            path: origin for path, origin in origins.items() if not constant[path]
        }
        leaves = [targets[at[path]] for path in twos]
        links += [
            Link(
                number[ones[each.source]],
                at[twos[each.target]],
                each.source_flat,
                each.target_flat,
            )
            for each in find_links(leaves, origins, _LEAST_WITHIN)
        ]
    rows = []
    for linked in rows_of_links(sources, targets, links):
        for each in _by_dtype(linked, one, two):
            if not _misfit(each, one, two) and _gives(each, one, two):
                rows.append(each)
    done = {path for each in rows for path in each.target_paths}
    return rows if done == {*row.target_paths} else []


def _is_telling(array: np.ndarray) -> bool:
    """Return whether an array has so many numbers that no other order gives it."""
    numbers = bits(array)
    return numbers is not None and len(np.unique(numbers)) > max(1, len(numbers) // 2)


def _finished(
    one: Side, two: Side, rows: Sequence[DraftRow], notes: list[str]
) -> MigrationDraft:
    place = {path: number for number, path in enumerate(one.leaves)}
    rows = [
        row.checked("sizes", "which of two equal sizes is in [sizes]")
        if is_guess(row)
        else row
        for row in map(canonical, rows)
    ]
    rows = sorted(
        _collapsed(rows, one, two),
        key=lambda row: min(place[path] for path in row.source_paths),
    )
    live, refuted = (
        merged([row for row in rows if row.is_live == is_live])
        for is_live in (True, False)
    )
    united = [_bare(row, one, two) for row in live]
    texts, sizes = written(_in_order(united))
    texts = apart(texts, [*one.leaves])
    migration = _table(texts, sizes)
    pairs = _pairs(migration, united, one, two)
    filled = {path for targets in pairs.values() for path in targets}
    doubtful = {
        path for each in texts if each.row.checks for path in each.row.source_paths
    }
    missing = tuple(path for path in two.leaves if path not in filled)
    unexpected = tuple(path for path in one.leaves if path not in pairs)
    shared = _sharing(one, two, unexpected, missing)
    few = len(pairs) * 2 < len(one.leaves) and len(filled) * 2 < len(two.leaves)
    if few and not shared and _NO_ROW not in notes:
        notes.append(_FEW_PAIRS)
    notes += _size_notes(united, one, two)
    return MigrationDraft(
        migration,
        {path: tuple(pairs[path]) for path in one.leaves if path in pairs},
        tuple(path for path in one.leaves if path in doubtful),
        missing,
        unexpected,
        tuple(notes),
        shared,
        tuple(texts),
        tuple(with_sizes(row) for row in refuted),
        sizes,
    )


def _sharing(
    one: Side, two: Side, unexpected: Sequence[str], missing: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return which leaves without a partner have numbers in common, by target."""
    shared: dict[str, dict[str, None]] = {}
    # A number that is on one side several times is looked up from there.
    for (a, sources), (b, targets) in itertools.permutations(
        ((one, unexpected), (two, missing))
    ):
        if a.arrays is None or b.arrays is None:
            return {}
        origins, _, constant = find_origins(
            [a.arrays[path] for path in sources],
            [a.leaves[path].dtype for path in sources],
            {path: b.arrays[path] for path in targets},
        )
        leaves = [leaf_of(path, b.leaves[path].shape) for path in targets]
        varied = {path: own for path, own in origins.items() if not constant[path]}
        for link in find_links(leaves, varied):
            ends = sources[link.source], targets[link.target]
            source, target = ends if a is one else ends[::-1]
            shared.setdefault(target, {})[source] = None
    return {path: tuple(shared[path]) for path in missing if path in shared}


def _pairs(
    migration: Migration, rows: Sequence[DraftRow], one: Side, two: Side
) -> dict[str, dict[str, None]]:
    """Return where each leaf of the source goes, by the plan of the table."""
    source = {path: one.leaves[path] for row in rows for path in row.source_paths}
    target = {path: two.leaves[path] for row in rows for path in row.target_paths}
    plan, _ = migration.planned(source, target)
    pairs: dict[str, dict[str, None]] = {}
    for group in plan.groups:
        for path in group.source_paths:
            pairs.setdefault(path, {}).update(dict.fromkeys(group.filled))
    return pairs


def _size_notes(rows: Sequence[DraftRow], one: Side, two: Side) -> Iterator[str]:
    sizes = {
        n for side in (one, two) for leaf in side.leaves.values() for n in leaf.shape
    }
    by_values = any(row.evidence == "values" and not row.is_rest for row in rows)
    if by_values and len(sizes - {1}) < 4:
        yield (
            "There are few different sizes, so axes may be taken for one another. "
            "Different primes show all of them."
        )
    paths = [
        path
        for row in rows
        if any(() in parts for place in row.places for parts in place.axes)
        for path in row.target_paths
    ]
    if paths:
        yield (
            "Axes of size 1 show nothing: what has size 1 here, as the layers of a "
            f"model with one, is `1` in the rows of {listing(fold(paths), limit=4)}."
        )


def _bare(row: DraftRow, one: Side, two: Side) -> DraftRow:
    """Return a row without the lists of texts that nothing else would match."""
    if len(row.places) != 2 or len(one.leaves) + len(two.leaves) > _MANY_LEAVES:
        return row
    for atom in sorted(row.sizes):
        holes = [
            token
            for place in row.places
            for token in place.tokens
            if isinstance(token, Hole) and token.atoms == (atom,) and token.is_text
        ]
        if (
            len(holes) != 2
            or holes[0].texts != holes[1].texts
            or len(holes[0].texts) < 4
        ):
            continue
        tried = dataclasses.replace(row, bare=row.bare | {atom})
        (text,), _ = written([tried])
        there = text.read
        back = there.reversed()
        takes = [path for path in one.leaves if there.takes(path)]
        gives = [path for path in two.leaves if back.takes(path)]
        if {*takes} == {*row.source_paths} and {*gives} == {*row.target_paths}:
            row = tried
    return row


def _in_order(rows: Sequence[DraftRow]) -> list[DraftRow]:
    """Put rows for some numbers, ``{n+2}``, above those for any."""
    special = [row for row in rows if _is_shifted(row)]
    rows = sorted(rows, key=lambda row: row.is_rest)
    ordered = [row for row in rows if not _is_shifted(row)]
    texts, _ = written(ordered)
    read = [text.read for text in texts]
    places: dict[int, list[DraftRow]] = {}
    for row in special:
        path = row.source_paths[0]
        takers = (n for n, other in enumerate(read) if other.takes(path))
        places.setdefault(next(takers, len(ordered)), []).append(row)
    return [
        row
        for place in range(len(ordered) + 1)
        for row in (*places.get(place, ()), *ordered[place : place + 1])
    ]


def _is_shifted(row: DraftRow) -> bool:
    return any(
        isinstance(token, Hole) and token.shift
        for p in row.sources
        for token in p.tokens
    )
