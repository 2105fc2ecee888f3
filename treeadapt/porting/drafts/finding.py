"""The rows between two sides, by the strongest evidence that there is for each.

Numbers come first, then what names propose of the leaves that are left. Where leaves
are left on both sides that one table cannot say, others are put around it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp

from treeadapt.porting.drafts.blank_parts import with_blank_parts
from treeadapt.porting.drafts.called_function import Conversion
from treeadapt.porting.drafts.evidence import Evidence
from treeadapt.porting.drafts.families import families
from treeadapt.porting.drafts.finishing import NO_ROW, rest
from treeadapt.porting.drafts.inputs import Side
from treeadapt.porting.drafts.nearer_sides import NearerSides
from treeadapt.porting.drafts.numbers import castable
from treeadapt.porting.drafts.pairing import propose, with_tie, with_tied_head
from treeadapt.porting.drafts.rows import DraftRow, by_template, template_of
from treeadapt.porting.drafts.scaled_parts import with_scaled_parts
from treeadapt.porting.drafts.stated import ModelConfig
from treeadapt.porting.drafts.sums import MOST_GROUPS, Summands, summands, with_sums
from treeadapt.porting.drafts.synonyms import Words
from treeadapt.porting.drafts.taken import orders_of_numbers, with_orders
from treeadapt.text.names import listing, plural

_MOST_PAIRS = 10_000  # of families that are left, beyond which none is compared
_MOST_TRIED = 64  # pairs of families of different sizes whose numbers are compared
_SCALED = "scales", "numbers of few bits, which scales may go with: see `multiply`"
_MANY_GROUPS = (
    "Sums were not looked for among {} names without a row, as "
    f"{MOST_GROUPS} are the most: draft fewer leaves, and a function that reads these."
)
_NOTHING_COMMON = "The two sides have no numbers in common; names decide."


@dataclasses.dataclass(frozen=True)
class FoundRows:
    """Rows between two sides.

    Attributes:
        between: the sides.
        evidence: their numbers.
        rows: those that fit, those that numbers contradict too.
        notes: what else there is to know.
        unread: leaves of the source that the function does not depend on; None if there
            is no function.
    """

    between: NearerSides
    evidence: Evidence
    rows: Sequence[DraftRow]
    notes: list[str]
    unread: Sequence[str] | None

    @property
    def left(self) -> tuple[list[str], list[str]]:
        """Leaves of both sides that no live row has, but for unread ones."""
        live = [row for row in self.rows if row.is_live]
        sources, targets = self.evidence.without_row(live)
        gone = {*(self.unread or ())}
        return [path for path in sources if path not in gone], [*targets]

    @property
    def own_unread(self) -> list[str] | None:
        """The unread leaves by the names that they have on their own side."""
        if self.unread is None:
            return None
        return [self.between.own(0, path) for path in self.unread]

    def is_worse_than(self, other: FoundRows) -> bool:
        """Return whether fewer leaves of both sides are left by other rows."""
        own, others = ([*map(len, each.left)] for each in (self, other))
        return own != others and all(a >= b for a, b in zip(own, others, strict=True))


@dataclasses.dataclass(frozen=True)
class RowFinder:
    """What rows are found by, but for the two sides.

    Attributes:
        conversion: the function; None if there is none.
        words: what names mean.
        stated: by the configuration.
        marks: for paths of the source what their row rests on besides numbers.
    """

    conversion: Conversion | None
    words: Words
    stated: ModelConfig
    marks: Mapping[str, str]

    def best(self, between: NearerSides) -> FoundRows:
        """Return the rows between two sides, with tables around them if these help."""
        best = self.found(between)
        if not best.evidence.has_numbers:
            others = map(self.found, between.in_periods() if best.left[1] else ())
            return next(filter(best.is_worse_than, others), best)
        for nearer in (
            self._in_endings,
            self._with_blanks,
            self._with_factors,
            self._with_sums,
            self._in_blocks,
        ):
            if best.left[1]:
                best = next(filter(best.is_worse_than, nearer(best)), best)
        return best

    def found(
        self, between: NearerSides, unread: Sequence[str] | None = None
    ) -> FoundRows:
        """Return the rows between two sides.

        Args:
            between: the sides.
            unread: leaves of the source that the function does not depend on, by the
                names that they have there; to be found out without them.
        """
        notes: list[str] = []
        evidence = Evidence(between.calls)
        rows = _rows(evidence, self.words, notes, self.stated)
        rows = [_marked(row, self.marks, between) for row in rows]
        rows = [with_tie(row, self.words, self.stated.tied) for row in rows]
        left = evidence.without_row(row for row in rows if row.is_live)[0]
        if unread is None and self.conversion is not None:
            unread = self.conversion.unread([*left])
        if unread is not None:
            unread = [path for path in left if between.own(0, path) in unread]
        return FoundRows(between, evidence, rows, notes, unread)

    def _with_blanks(self, best: FoundRows) -> Iterator[FoundRows]:
        """Yield rows of zeros next to numbers, which a table before them makes."""
        if self.conversion is None:
            return
        nearer = with_blank_parts(best.between, best.evidence, best.rows)
        if nearer is not None:
            yield self.found(nearer, best.own_unread)

    def _with_factors(self, best: FoundRows) -> Iterator[FoundRows]:
        """Yield rows of what is multiplied, by a table after them, as a part alone."""
        if self.conversion is not None:
            sides = with_scaled_parts(best.between, self.conversion, *best.left)
            yield from (self.found(nearer, best.own_unread) for nearer in sides)

    def _with_sums(self, best: FoundRows) -> Iterator[FoundRows]:
        """Yield rows of summands, added by these rows or by a table after them."""
        if self.conversion is None:
            return
        sources, targets = best.left
        # A part of a summand may be all of another leaf.
        sources += [p for row in best.rows if row.cuts for p in row.source_paths]
        if (groups := len(by_template(sources))) > MOST_GROUPS:
            best.notes.append(_MANY_GROUPS.format(groups))
        for apart, names in self._summands(best, sources, targets):
            rows = with_sums(apart.rows, names)
            sums = [row for row in rows or () if row.is_sum]
            evidence = best.evidence
            if rows and all(map(evidence.gives, sums)):
                yield dataclasses.replace(best, rows=rows, notes=apart.notes)
            else:
                yield apart

    def _summands(
        self, best: FoundRows, sources: Sequence[str], targets: Sequence[str]
    ) -> Iterator[tuple[FoundRows, Summands]]:
        """Yield rows that make summands, of sums of which all summands are found."""
        if self.conversion is None:
            return
        for nearer, names in summands(best.between, self.conversion, sources, targets):
            apart = self.found(nearer, best.own_unread)
            unknown = apart.left[1]
            whole = [path for path in names if {*names[path]}.isdisjoint(unknown)]
            if len(whole) == len(names):
                yield apart, names
                continue
            text = listing(best.between.own(1, p) for p in names if p not in whole)
            note = f"Sums, of which not all summands are found: {text}."
            best.notes.append(note)
            for some, own in self._summands(best, sources, whole) if whole else ():
                some.notes.append(note)
                yield some, own

    def _in_blocks(self, best: FoundRows) -> Iterator[FoundRows]:
        """Yield rows of which a number of paths is two."""
        for nearer in best.between.in_blocks(best.evidence, best.rows):
            yield self.found(nearer, best.own_unread)

    def _in_endings(self, best: FoundRows) -> Iterator[FoundRows]:
        """Yield rows of which an ending of names is a number."""
        for nearer in best.between.in_endings(best.evidence, best.rows):
            yield self.found(nearer, best.own_unread)


def _marked(row: DraftRow, marks: Mapping[str, str], between: NearerSides) -> DraftRow:
    names = (between.own(0, path) for path in row.source_paths)
    for name in filter(marks.__contains__, names):
        row = row.marked(marks[name])
    return row


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
    taking = evidence.reordered(rows)
    # Rows that take numbers of one node in different orders are no table.
    apart = [row for row in taking if not orders_of_numbers([row])]
    found: list[DraftRow] = []
    for some in (taking, apart):
        found, new_notes = _rows_next_to(
            evidence, words, stated, [*rows, *some], have_common=have_common
        )
        if len(apart) == len(taking) or evidence.fit_together(found):
            break
    notes += new_notes
    return found


def _rows_next_to(
    evidence: Evidence,
    words: Words,
    stated: ModelConfig,
    rows: Sequence[DraftRow],
    *,
    have_common: bool,
) -> tuple[list[DraftRow], list[str]]:
    """Return rows with those for the leaves that are left, and what to know of them.

    Args:
        evidence: both sides.
        words: what names mean.
        stated: by the configuration.
        rows: that numbers show.
        have_common: whether more numbers are in common than by chance.
    """
    notes: list[str] = []
    orders = orders_of_numbers(rows)
    proposed = _proposed(evidence, words, rows, notes)
    proposed = [with_orders(row, orders) for row in proposed]
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
        every = [*rows, *tested]  # a live one of these gave its numbers
        return [row for row in every if row.is_live or evidence.fits(row)], notes
    notes.append(_NOTHING_COMMON)
    return _fitting(evidence, _by_names(evidence, words, notes, stated)), notes


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
    proposed, crowded = propose(*evidence.without_row(rows), words, rows)
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
    ones, twos = map(families, evidence.without_row(rows))
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
