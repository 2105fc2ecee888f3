"""From rows to a table: united, in order, each with its own leaves, and the rest of it.

Takes rows that are known to fit; gives the draft: the table, which leaves it has no row
for, and what else there is to know.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from treeadapt.migrations.counts import Count
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.plan import BLANKS
from treeadapt.porting.drafts.answering import run_over
from treeadapt.porting.drafts.evidence import CONSTANT, Evidence
from treeadapt.porting.drafts.groups_of_heads import with_groups_doubted
from treeadapt.porting.drafts.inputs import Side
from treeadapt.porting.drafts.links import find_links, leaf_of
from treeadapt.porting.drafts.merging import canonical, is_guess, merged
from treeadapt.porting.drafts.migration_draft import MigrationDraft, dropping
from treeadapt.porting.drafts.numbers import contents, find_origins
from treeadapt.porting.drafts.ordering import rows_apart
from treeadapt.porting.drafts.parts import Pattern
from treeadapt.porting.drafts.rows import (
    DraftRow,
    Hole,
    by_template,
    is_count,
    template_of,
    tokens_of,
)
from treeadapt.porting.drafts.single_numbers import (
    with_doubtful_runs,
    with_single_numbers,
)
from treeadapt.porting.drafts.stated import ModelConfig
from treeadapt.porting.drafts.writing import (
    WrittenRow,
    as_table,
    counts_heads,
    escaped,
    is_factor,
    with_copies_apart,
    with_first_layers,
    with_sizes,
    written,
)
from treeadapt.text.names import fold, listing, plural
from treeadapt.trees.casting import has_zero

NO_ROW = (
    "The two sides have numbers in common, in an order that no row found here gives."
)
_MIXED = "both have the same numbers, in an order that no row found here gives"
_MOST_PARTS = 8  # of an axis, as gates, of which an order is a part of the formula
_MANY_LEAVES = 50_000  # too many to see which rows could do without a list
_FEW_PAIRS = (
    "Most leaves have no partner: these do not look like one model of one size. Where "
    "sizes differ, draft on two models of one size: the table is that of all sizes."
)
_COMPUTED = (
    "Most of what the function makes has no row: it is computed otherwise than by "
    "moving numbers, a factor, an offset, a sum, zeros or a cast."
)


def rest(paths: Iterable[str], evidence: str) -> DraftRow:
    """Return the row of leaves that stay as they are."""
    pairs = tuple(((path,), (path,)) for path in paths)
    return DraftRow((), (), {}, pairs, evidence, is_rest=True)


def _collapsed(rows: Sequence[DraftRow], source: Side, target: Side) -> list[DraftRow]:
    """Return rows with one for all leaves that stay as they are, if most do."""
    staying = [row for row in rows if _stays(row)]
    paths = [path for row in staying for path in row.source_paths]
    if len(staying) < 2 or 2 * len(paths) < min(len(source.leaves), len(target.leaves)):
        return [*rows]
    return [*(row for row in rows if not _stays(row)), rest(paths, "values")]


def _stays(row: DraftRow) -> bool:
    is_plain = len(row.places) == 2 and row.sources == row.targets
    is_sure = (
        row.is_live
        and not row.checks
        and row.changes == DraftRow((), (), {}, (), "").changes
    )
    return (
        is_plain
        and is_sure
        and all(ones == twos and len(ones) == 1 for ones, twos in row.pairs)
    )


def finished(
    evidence: Evidence,
    rows: Sequence[DraftRow],
    unread: Sequence[str] | None,
    notes: list[str],
    stated: ModelConfig,
    inner: Collection[tuple[int, Pattern]] = (),
) -> MigrationDraft:
    """Return the draft of some rows.

    Args:
        evidence: both sides.
        rows: that fit, those that numbers contradict too.
        unread: leaves of the source that a function does not depend on; None if no
            function was called.
        notes: what is known already.
        stated: of heads and first layers.
        inner: what is before numbers whose count is in ``sizes`` of other tables.
    """
    source, target = evidence.source, evidence.target
    place = {path: number for number, path in enumerate(source.leaves)}
    rows = [*map(canonical, rows)]
    takes = any(row.takes for row in rows)
    layers = {*_layer_counts(source), *_layer_counts(target)} if takes else set()
    rows = [_with_doubts(row, stated, layers) for row in rows]
    rows = with_doubtful_runs(with_groups_doubted(rows, stated), inner)
    rows = sorted(
        _collapsed(rows, source, target),
        key=lambda row: min(place[path] for path in row.source_paths),
    )
    rows = [
        row.marked("", _MIXED) if _is_mixed(row, source, target) else row
        for row in rows
    ]
    live, refuted = (
        merged([row for row in rows if row.is_live == is_live])
        for is_live in (True, False)
    )
    united = [_bare(row, source, target) for row in live]
    united.sort(key=lambda row: row.is_rest)
    texts, of_rows = written(united, stated)
    texts = sorted(
        [*texts, *dropping(unread or (), source.leaves)],
        key=lambda each: each.row.is_rest,
    )
    texts = rows_apart(texts, [*source.leaves], [*target.leaves])
    texts, of_rows = with_first_layers(texts, of_rows, stated)
    texts, note = with_single_numbers(texts, inner)
    texts = [part for each in texts for part in with_copies_apart(each)]
    notes += [note] if note else []
    made = {path for row in united for path in row.target_paths}
    constants = {blank: _constants(evidence, made, blank) for blank in BLANKS}
    new = {
        text: {"fill": blank, "check": CONSTANT}
        for blank, every in constants.items()
        for text in every
    }
    migration = as_table(texts, of_rows, new)
    pairs = _pairs(migration, united, source, target)
    filled = {path for targets in pairs.values() for path in targets}
    filled |= {
        p for every in constants.values() for paths in every.values() for p in paths
    }
    doubtful = {
        path for each in texts if each.row.checks for path in each.row.source_paths
    }
    missing = tuple(path for path in target.leaves if path not in filled)
    left_out = [
        p for row in united for paths, new in row.pairs if not new for p in paths
    ]
    notes += _left_out_notes(left_out)
    gone = {*pairs, *(unread or ()), *left_out}
    unexpected = tuple(path for path in source.leaves if path not in gone)
    shared = _sharing(source, target, unexpected, missing)
    few = len(pairs) * 2 < len(source.leaves) and len(filled) * 2 < len(target.leaves)
    if few and not shared and NO_ROW not in notes:
        notes.append(_FEW_PAIRS if unread is None else _COMPUTED)
    notes += _size_notes(united, source, target)
    return MigrationDraft(
        migration,
        {path: tuple(pairs[path]) for path in source.leaves if path in pairs},
        tuple(path for path in source.leaves if path in doubtful),
        missing,
        unexpected,
        tuple(notes),
        shared,
        tuple(texts),
        tuple(with_sizes(row) for row in refuted),
        dataclasses.replace(of_rows, counts=_counts(texts, stated)),
        unread is not None,
        {path: leaf.shape for path, leaf in source.leaves.items()},
    )


def _counts(rows: Sequence[WrittenRow], stated: ModelConfig) -> dict[str, str]:
    """Return keys of the configuration that say how many layers, or experts, there are.

    Returns:
        The keys by paths with one number, as ``[counts]`` has them.
    """
    if not stated.counts:
        return {}
    taken = {each.read: each.row.source_paths for each in rows if each.targets}
    numbers: dict[tuple[Pattern, str], set[int]] = {}
    paths = [*itertools.chain(*taken.values())]
    places = run_over(taken)
    for path in paths:
        tokens, template = tokens_of(path), template_of(path)
        for at, fixed in enumerate(template[:-1]):
            if fixed is None and template[:at] in places:
                place = template[:at], tokens[at + 1]
                numbers.setdefault(place, set()).add(int(tokens[at]))
    counts: dict[str, str] = {}
    for (above, end), every in numbers.items():
        before = "".join("*" if token is None else escaped(token) for token in above)
        key = stated.count_key(before, len(every))
        text = f"{before}{{l}}{end}{'**' if end == '/' else '*'}"
        if key and Count.of(text, key, {}).numbers(paths) == [*range(len(every))]:
            counts[text] = key
    return counts


def _is_mixed(row: DraftRow, source: Side, target: Side) -> bool:
    """Return whether numbers contradict a row, and are the same in another order."""
    if row.is_live or source.arrays is None or target.arrays is None:
        return False
    for olds, news in row.pairs:
        dtype = target.leaves[news[0]].dtype
        both = [*map(source.array, olds)], [*map(target.array, news)]
        old, new = (contents(arrays, dtype) for arrays in both)
        if not old or old != new:
            return False
    return True


def _layer_counts(side: Side) -> Iterator[tuple[int, int]]:
    """Yield how many layers or the like there are, each with sizes of their axes."""
    for paths in by_template(side.leaves).values():
        sizes = {size for path in paths for size in side.leaves[path].shape}
        for numbers in zip(*map(_numbers, paths), strict=True):
            yield from itertools.product([len({*numbers})], sizes)


def _numbers(path: str) -> Iterator[str]:
    return filter(is_count, tokens_of(path))


def _is_of_layers(
    row: DraftRow, atom: int, layers: Collection[tuple[int, int]]
) -> bool:
    """Return whether there are as many layers, of sizes such as those of each part.

    What each of four layers has four of is not counted by the layers.
    """
    size = row.sizes[atom]
    paths = (*row.source_paths, *row.target_paths)
    own = zip(*map(_numbers, paths), strict=False)
    inner = (
        math.prod(row.sizes[each] for each in part[part.index(atom) + 1 :])
        for place in row.places
        for axis in place.axes
        for part in axis
        if atom in part
    )
    is_own = any(len({*numbers}) == size for numbers in own)
    return not is_own and any((size, each) in layers for each in inner)


def _with_doubts(
    row: DraftRow, stated: ModelConfig, layers: Collection[tuple[int, int]]
) -> DraftRow:
    """Mark what is not proved of the sizes of a row.

    Args:
        row: which fits.
        stated: of heads and first layers.
        layers: how many there are in paths, each with sizes of their axes.
    """
    is_of_heads = counts_heads(row)
    if is_guess(row, stated.head_sizes(row) if is_of_heads else ()):
        row = row.marked("sizes", "sizes that are equal here: others may be in [sizes]")
    if row.pads or row.cuts:
        row = row.marked("length", "how many these are was seen at this size alone")
    for atom, take in row.takes:
        # A slice of a factor means any number of parts, which has the mark ``sizes``.
        is_part = take.is_order and is_factor(row, atom)
        is_few = take.size <= _MOST_PARTS and take.size not in stated.counts.values()
        is_open = is_of_heads or _is_innermost(row, atom)
        is_open = is_open or _is_of_layers(row, atom, layers)
        if not is_part or not is_few or (is_open and take.size):
            row = row.marked("order", "what it takes was seen at this size alone")
    if is_of_heads and (other := stated.contradiction(row)):
        row = row.marked("heads", other)
    return row


def _is_innermost(row: DraftRow, atom: int) -> bool:
    """Return whether nothing is inside of a factor, as of classes within each box.

    The gates of a cell are whole arrays, so that each of them is further inside.
    """
    parts = (part for place in row.places for axis in place.axes for part in axis)
    return any(part[-1:] == (atom,) for part in parts)


def _constants(
    evidence: Evidence, filled: Collection[str], blank: str
) -> dict[str, tuple[str, ...]]:
    """Return what is zeros, or ones, whatever the source is: patterns and paths.

    As the bias of the keys, which the source lacks. Numbers of a pair of arrays do not
    show that: what is zero there may be a bias that nobody trained.
    """
    if len(evidence.calls) < 2:
        return {}
    every = evidence.target.leaves
    number = BLANKS[blank]
    constant = [
        path
        for path, leaf in every.items()
        if path not in filled and has_zero(leaf.dtype)
        if all((made.array(path) == number).all() for _, made in evidence.calls)
        and (leaf.size or blank == "zeros")
    ]
    patterns: dict[str, tuple[str, ...]] = {}
    for drop in dropping(constant):
        (text,), paths = drop.sources, tuple(drop.row.source_paths)
        takes = {path for path in every if drop.read.takes(path)}
        is_apart = takes == {*paths}
        alone = {one.sources[0]: (p,) for p in paths for one in dropping([p])}
        patterns |= {text: paths} if is_apart else alone
    return patterns


def _sharing(
    from_side: Side, to_side: Side, unexpected: Sequence[str], missing: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return which leaves without a partner have numbers in common, by target."""
    shared: dict[str, dict[str, None]] = {}
    # A number that is on from_side side several times is looked up from there.
    for (a, sources), (b, targets) in itertools.permutations(
        ((from_side, unexpected), (to_side, missing))
    ):
        if a.arrays is None or b.arrays is None:
            return {}
        lookup = find_origins(
            [a.arrays[path] for path in sources],
            [a.leaves[path].dtype for path in sources],
            {path: b.arrays[path] for path in targets},
        )
        olds, news = (
            [leaf_of(path, side.leaves[path].shape) for path in paths]
            for side, paths in ((a, sources), (b, targets))
        )
        for link in find_links(olds, news, lookup.varied()):
            source, target = link.ends if a is from_side else link.ends[::-1]
            shared.setdefault(target.path, {})[source.path] = None
    return {path: tuple(shared[path]) for path in missing if path in shared}


def _pairs(
    migration: Migration, rows: Sequence[DraftRow], from_side: Side, to_side: Side
) -> dict[str, dict[str, None]]:
    """Return where each leaf of the source goes, by the plan of the table."""
    source = {path: from_side.leaves[path] for row in rows for path in row.source_paths}
    target = {path: to_side.leaves[path] for row in rows for path in row.target_paths}
    plan, _ = migration.planned(source, target)
    pairs: dict[str, dict[str, None]] = {}
    for group in plan.groups:
        for path in group.source_paths:
            pairs.setdefault(path, {}).update(dict.fromkeys(group.filled))
    return pairs


def _left_out_notes(paths: Sequence[str]) -> Iterator[str]:
    if paths:
        names = listing(fold(paths), limit=4)
        leaves = plural(len(paths), "leaf")
        yield f"{leaves} of the source that `take` leaves out: {names}."


def _size_notes(rows: Sequence[DraftRow], source: Side, target: Side) -> Iterator[str]:
    sizes = {
        n
        for side in (source, target)
        for leaf in side.leaves.values()
        for n in leaf.shape
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


def _bare(row: DraftRow, source: Side, target: Side) -> DraftRow:
    """Return a row without the lists of texts that nothing else would match."""
    if len(row.places) != 2 or len(source.leaves) + len(target.leaves) > _MANY_LEAVES:
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
        takes = [path for path in source.leaves if there.takes(path)]
        gives = [path for path in target.leaves if back.takes(path)]
        if {*takes} == {*row.source_paths} and {*gives} == {*row.target_paths}:
            row = tried
    return row
