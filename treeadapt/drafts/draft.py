"""``draft_migration``: the first version of a table, and what it rests on."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from treeadapt.data_files import VERSION
from treeadapt.drafts.merging import canonical, is_guess, merged
from treeadapt.drafts.numbers import (
    bits,
    contents,
    find_origins,
    have_numbers_in_common,
    is_constant,
)
from treeadapt.drafts.ordering import apart
from treeadapt.drafts.pairing import propose
from treeadapt.drafts.rows import DraftRow, Hole
from treeadapt.drafts.sides import (
    Side,
    calling,
    distinct_numbers,
    is_flat,
    read_side,
)
from treeadapt.drafts.values import Link, find_links, leaf_of, rows_of_links
from treeadapt.drafts.words import load_words
from treeadapt.drafts.writing import WrittenRow, written
from treeadapt.errors import MigrationError
from treeadapt.migrations.files import MIGRATION_FILE
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.rows import parse_row
from treeadapt.names import fold, listing, plural
from treeadapt.trees.views import view_tree

_MANY_LEAVES = 50_000  # too many to see which rows could do without a list
_LEAST_WITHIN = 0.05  # of a leaf, to find its order next to one other leaf
_OTHER = "its numbers are other ones in the target"
_NOTHING_COMMON = "The two sides have no numbers in common; names decide."
_NO_ROW = "The two sides have numbers in common, in an order that no row gives."


@dataclasses.dataclass(frozen=True)
class MigrationDraft:
    """A drafted table, and what each of its rows rests on.

    Attributes:
        migration: the table as it is, doubtful rows included.
        pairs: for each path of the source the paths of the target that it goes to.
        doubtful: paths of the source whose row is marked ``# check:``.
        missing: leaves of the target that nothing fills.
        unexpected: leaves of the source without a partner; in the text, their rows that
            drop them are comments.
        notes: what else there is to know: sizes of 1, models that are not alike.
    """

    migration: Migration
    pairs: Mapping[str, tuple[str, ...]]
    doubtful: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]
    _rows: tuple[WrittenRow, ...] = dataclasses.field(repr=False)
    _sizes: Mapping[str, int] = dataclasses.field(repr=False)

    def to_toml(self) -> str:
        """Write the table as a migration file, with a comment where to look at it."""
        lines = [f"# {line}".rstrip() for line in str(self).splitlines()]
        lines += [f"version = {VERSION}"]
        if self._sizes:
            lines += ["", "# What no shape says at another size.", "[sizes]"]
            lines += MIGRATION_FILE.field_lines(self._sizes)
        if not self._rows:
            lines.append("rows = []")
        for each in self._rows:
            if each.row.is_rest:
                lines += self._drops()
            lines.append("")
            lines += [f"# check: {_line(reason)}" for reason in each.row.checks]
            lines += [f"# {_line(note)}" for note in each.row.notes]
            fields = {"from": _alone(each.sources), "to": _alone(each.targets)}
            lines.append(MIGRATION_FILE.table)
            lines += MIGRATION_FILE.field_lines(fields | each.operations)
        if not any(each.row.is_rest for each in self._rows):
            lines += self._drops()
        if self.missing:
            lines += ["", "# Nothing in the source is like these leaves of the target:"]
            folded = [*fold(self.missing)]
            lines += [f"#     {_line(path)}" for path in folded[:200]]
            left = len(folded) - 200
            lines += [f"#     and {left:,} more"] if left > 0 else []
        return "\n".join(lines) + "\n"

    def _drops(self) -> list[str]:
        """Return the rows that would drop leaves without a partner, as comments."""
        if not self.unexpected:
            return []
        lines = ["", "# Nothing in the target is like these. To drop them:"]
        for text in _dropping(self.unexpected):
            lines += ["#", f"# {MIGRATION_FILE.table}"]
            lines.append(f"# drop = {MIGRATION_FILE.string(text)}")
        return lines

    def __str__(self) -> str:
        counts = Counter(
            "to check" if each.row.checks else _EVIDENCE[each.row.evidence]
            for each in self._rows
        )
        parts = [f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind]]
        head = plural(len(self._rows), "row")
        lines = [f"{head}{': ' if parts else ''}{', '.join(parts)}."]
        for noun, paths in (
            ("of the target that nothing fills", self.missing),
            ("of the source without a partner", self.unexpected),
        ):
            if paths:
                names = listing(fold(paths), limit=4)
                lines.append(f"{plural(len(paths), 'leaf')} {noun}: {names}.")
        return "\n".join([*lines, *self.notes])


_EVIDENCE = {
    "values": "by values",
    "shapes": "by names and shapes",
    "equal": "by equal paths",
}
_KINDS = ("by values", "by names and shapes", "by equal paths", "to check")


def draft_migration(
    source: Any,
    target: Any = None,
    *,
    convert: Callable[[Any], Any] | None = None,
    synonyms: str | os.PathLike[str] | None = None,
) -> MigrationDraft:
    """Write the first version of a table that turns ``source`` into ``target``.

    Where both sides hold the same numbers, their places show every row, axes included.
    Where they do not, names and shapes are paired, for the whole model at once. A row
    that is not certain is marked; the text has a comment ``# check:`` above it, with
    what else it could be.

    Args:
        source: tree, concrete or abstract, or the path of a checkpoint or schema.
        target: the same of the other side. A pair of small models with equal numbers
            and sizes that are different primes makes all rows certain.
        convert: a function that converts the source, in place of numbers. It is called
            once, with distinct numbers (read-only arrays of NumPy, float32) in the form
            of ``source``: a fresh flat dict of a checkpoint, else a tree like it. What
            it returns is the target; if there is a ``target``, its names are compared.
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
    one = read_side(source)
    notes: list[str] = []
    is_converted = convert is not None
    if convert is not None:
        one, two = _converted(source, one, convert)
        if target is not None:
            notes += _compared(two, read_side(target, one.leaves))
    elif target is None:
        raise MigrationError("Pass the target, or convert=, a function that gives it.")
    else:
        two = read_side(target, one.leaves)
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
    if result is None:
        raise MigrationError("convert= returned None. It is to return the new tree.")
    for path, array in arrays.items():
        if not np.array_equal(_bytes(array), _bytes(copies[path])):
            raise MigrationError(
                f"convert= wrote into its input, {listing([path])}. Let it copy first."
            )
    kind = type(result).__name__
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
    one: Side, two: Side, words: Any, notes: list[str], *, is_distinct: bool
) -> list[DraftRow]:
    """Return the rows by the strongest evidence that there is for each."""
    rows: list[DraftRow] = []
    has_values = one.arrays is not None and two.arrays is not None
    have_common = False
    if has_values:
        rows, have_common = _by_values(one, two, is_distinct=is_distinct)
    else:
        rows = _equal(one, two)
    done = (
        {p for r in rows for p in r.source_paths},
        {p for r in rows for p in r.target_paths},
    )
    left = [
        {path: leaf for path, leaf in side.leaves.items() if path not in covered}
        for side, covered in zip((one, two), done, strict=True)
    ]
    proposed, crowded = propose(left[0], left[1], words, rows)
    if crowded:
        notes.append(
            f"{plural(crowded, 'leaf')} of the source not looked at: too many names "
            "have their size. Numbers on both sides, or convert=, would show them."
        )
    if has_values:
        tested = [each for row in proposed for each in _tested(row, one, two)]
        shows = any(row.evidence == "values" for row in (*rows, *tested))
        if not shows:
            have_common = have_common or _are_reordered(tested, one, two)
            if have_common:
                notes.append(_NO_ROW)
        if shows or have_common or is_distinct:
            return [row for row in (*rows, *tested) if not _misfit(row, one, two)]
        notes.append(_NOTHING_COMMON)
        rows = _equal(one, two)
        paths = {path for row in rows for path in row.source_paths}
        left = [
            {path: leaf for path, leaf in side.leaves.items() if path not in paths}
            for side in (one, two)
        ]
        proposed, _ = propose(left[0], left[1], words, rows)
    return [row for row in (*rows, *proposed) if not _misfit(row, one, two)]


def _are_reordered(rows: Sequence[DraftRow], one: Side, two: Side) -> bool:
    """Return whether leaves, or all of a row, have their numbers in another order."""
    dtypes = {leaf.dtype for leaf in two.leaves.values()}
    rows = [row for row in rows if _OTHER in row.checks]
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

    There is none unless most leaves are such: then one model became the other.
    """
    paths = [path for path, leaf in one.leaves.items() if two.leaves.get(path) == leaf]
    if not paths or 2 * len(paths) < min(len(one.leaves), len(two.leaves)):
        return []
    return [_rest(paths, "equal")]


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
    is_sure = not (row.checks or row.cast or row.offset)
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


def _with_twins(row: DraftRow, twins: Mapping[str, Sequence[str]]) -> DraftRow:
    """Mark a row whose source has the same numbers elsewhere, too."""
    names = [name for path in row.source_paths for name in twins.get(path, ())]
    if not names:
        return row
    return row.checked(f"the source has the same numbers at {listing(names, limit=3)}")


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
    pairs = []
    for each in rows:
        target: Any = _alone(each.targets)
        pairs.append(
            (
                _alone(each.sources),
                (target, each.operations) if each.operations else target,
            )
        )
    return Migration(pairs, sizes=sizes or None)


def _alone(texts: tuple[str, ...]) -> Any:
    return texts[0] if len(texts) == 1 else texts


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
        if fits and _gives(row, one, two):
            return [row.checked("constant numbers are no evidence")]
        return [row.checked(_OTHER)]
    rows = _within(row, one, two)
    if rows:
        return rows
    for offset in (0.0, 1.0):
        tried = dataclasses.replace(row, offset=offset)
        if not _misfit(tried, one, two) and _gives(tried, one, two):
            if all(map(_is_telling, arrays)):
                return [dataclasses.replace(tried, evidence="values", checks=())]
            return [tried]
    return [row.checked(_OTHER)]


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
        row.checked("which of two equal sizes is in [sizes]") if is_guess(row) else row
        for row in map(canonical, rows)
    ]
    rows = _collapsed(rows, one, two)
    ordered = sorted(
        rows, key=lambda row: min(place[path] for path in row.source_paths)
    )
    united = [_bare(row, one, two) for row in merged(ordered)]
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
    few = len(pairs) * 2 < len(one.leaves) and len(filled) * 2 < len(two.leaves)
    if few and _NO_ROW not in notes:
        notes.append("Most leaves have no partner: these do not look like one model.")
    notes += _size_notes(united, one, two)
    return MigrationDraft(
        migration,
        {path: tuple(pairs[path]) for path in one.leaves if path in pairs},
        tuple(path for path in one.leaves if path in doubtful),
        missing,
        unexpected,
        tuple(notes),
        tuple(texts),
        sizes,
    )


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
        there = parse_row(_alone(text.sources), _alone(text.targets))
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
    parsed = [parse_row(_alone(text.sources), _alone(text.targets)) for text in texts]
    places: dict[int, list[DraftRow]] = {}
    for row in special:
        path = row.source_paths[0]
        takers = (n for n, other in enumerate(parsed) if other.takes(path))
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


def _dropping(paths: Sequence[str]) -> Iterator[str]:
    """Yield the text of drops for leaves, those that differ in numbers as one."""
    groups: dict[object, list[str]] = {}
    for path in paths:
        groups.setdefault(leaf_of(path, ()).template, []).append(path)
    for members in groups.values():
        leaves = [leaf_of(path, ()) for path in members]
        text, place = "", 0
        for token in leaves[0].template:
            if token is None:
                numbers = {leaf.numbers[place] for leaf in leaves}
                text += "*" if len(numbers) > 1 else str(numbers.pop())
                place += 1
            else:
                text += "".join(f"\\{c}" if c in "\\{}*?[" else c for c in token)
        yield text.replace(" : ", r" \: ")


def _line(text: str) -> str:
    """Write a text within one line of a comment."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown[:400]
