"""``find_wrong_rows``: the rows because of which two models answer otherwise.

Takes a table that fits all shapes, both sides, the new model, and the old one or its
answers; gives the mended table. Nothing is claimed that was not seen to answer right.
See ``tables`` for what is tried.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from treeadapt.errors import MigrationError, explaining
from treeadapt.migrations.migration import Migration, require_dtypes, to_migration
from treeadapt.migrations.rows import Row
from treeadapt.porting.measure import (
    answers_of,
    apart,
    called,
    errors_of,
    require_alike,
)
from treeadapt.porting.wrong_rows.matched import MatchedTable, matched
from treeadapt.porting.wrong_rows.tables import (
    Case,
    Place,
    State,
    Tables,
    Unit,
    can_be_shaken,
)
from treeadapt.text.names import listing, plural, section
from treeadapt.trees.describing import describe
from treeadapt.trees.state_dict import to_flat_dict

_CANCELS = "another number added to all of it cancels"
_MOST_DOUBLES = 1_500  # tables with two edits of one row
_MOST_DOUBLED = 3  # rows, the likeliest, that are edited twice

#: How many answers agree before one differs, negative, and how much that one does.
_Score: TypeAlias = tuple[int, float]

_LEAST = 5  # evaluations without which not even the differences are known


@dataclasses.dataclass(frozen=True)
class RowChange:
    """One change of a table.

    Attributes:
        rows: the rows as they were given, as texts.
        alternatives: the rows in their place.
        why: what is different.
        error: the largest difference if this change alone is left out.
    """

    rows: tuple[str, ...]
    alternatives: tuple[str, ...]
    why: str
    error: float

    def __str__(self) -> str:
        lines = [f"- {text}" for text in self.rows]
        lines += [f"+ {text}" for text in self.alternatives]
        return "\n".join([*lines, f"    {self.why}; without it {self.error:.2g}"])


@dataclasses.dataclass(frozen=True)
class WrongRows:
    """What ``find_wrong_rows`` found; printed, it is a report.

    Attributes:
        found: whether ``migration`` as a whole answers within the tolerance.
        before: largest difference of the answers: of an entry, relative to itself or,
            if that is more, to three times the median of its array. Integers that
            differ are infinitely far apart.
        after: the same with the mended table.
        changes: the rows that are wrong: each has ``rows`` and ``alternatives`` as
            texts, ``why``, and ``error``, the difference without this change.
        others: changes that do as well as one of these, as texts.
        ranked: texts of rows and the least difference with a change of each, least
            first, if nothing was found.
        unseen: rows of which the answers say nothing. Of the old model as a function,
            rows with a leaf whose numbers, changed alone, change no answer, as of a
            head that hidden states never read. A bias that no answer can depend on,
            because a softmax cancels it, is there with that reason. Of answers alone,
            rows of leaves whose numbers are all equal.
        evaluations: how often the model or the reference was called.
        tried: how many tables were tried.
        migration: the mended table; the given one if nothing is wrong; None if none
            was found.
        found_by: ``"edits"`` of the given table; ``"matching"`` of the models, the last
            resort if the old one is a function; empty if nothing had to be changed.
        matching_evaluations: how many of ``evaluations`` matching took; 0 if it was not
            asked.
        why: what matching says if it finds nothing, as that the models differ where
            numbers are small.
    """

    found: bool
    before: float
    after: float
    changes: tuple[RowChange, ...]
    others: tuple[str, ...]
    ranked: tuple[tuple[str, float], ...]
    unseen: tuple[str, ...]
    evaluations: int
    tried: int
    migration: Migration | None
    found_by: str = ""
    matching_evaluations: int = 0
    why: tuple[str, ...] = ()
    _why_unseen: str = dataclasses.field(default="", repr=False)

    def __str__(self) -> str:
        is_seen = all(text.endswith(f"({_CANCELS})") for text in self.unseen)
        rows = "No row" if is_seen else "No row that the answers depend on"
        text = f"{rows} is wrong: the answers differ by {self.after:.2g}."
        if self.changes:
            count = plural(len(self.changes), "change")
            text = f"{count}: the answers differ by {self.after:.2g}"
            text = f"{text}, before by {self.before:.2g}."
            if self.found_by == "matching":
                text += " Found by matching the models."
        elif not self.found:
            text = (
                f"Not found: the answers differ by {self.before:.2g}, and no table "
                "that was tried answers right. The models may differ elsewhere, in a "
                "dtype, a constant or a layer; or rows are wrong in ways not tried."
            )
        lines = [text, *map(str, self.changes)]
        lines += section("these do as well:", self.others)
        ranked = [f"{error:.2g}  {text}" for text, error in self.ranked]
        lines += section("least difference with a change of one row:", ranked)
        lines += section("the models were matched, too:", self.why)
        if self.unseen:
            lines.append(
                f"not seen, because {self._why_unseen}: {listing(self.unseen)}."
            )
        calls = plural(self.evaluations, "evaluation")
        if self.matching_evaluations:
            calls += f", {self.matching_evaluations:,} of them to match the models"
        return "\n".join([*lines, f"{calls}, {plural(self.tried, 'table')} tried"])


class _LimitError(Exception):
    """No evaluations are left."""


def find_wrong_rows(
    migration: Migration,
    source: Any,
    target: Any,
    model: Callable[[Any], Any],
    reference: Any,
    *,
    tolerance: float = 1e-4,
    width: int = 8,
    depth: int = 3,
    limit: int = 20_000,
    seed: int = 0,
) -> WrongRows:
    """Find the rows because of which a model answers otherwise than the old one.

    Tables that differ from the given one in a row or more are tried: axes, names, parts
    or texts in another order, halves for neighbours, other offsets, rows exchanged. If
    none does, and the old model is a function, both models are matched without a table,
    as by ``match_models``, and rows are wrong that contradict the match. A table is
    found only if it answers right as a whole. Use tiny models with random numbers:
    every try is a forward pass.

    Args:
        migration: a table, or a chain, that fits ``source`` and ``target``.
        source: tree or flat dict of arrays under the old names.
        target: tree that the model takes; shapes and dtypes are enough.
        model: called with a tree like ``target``; returns an array, or a list of arrays
            in the order in which they are computed. Let it be compiled by ``jax.jit``.
        reference: the old model: a function that is called with a flat dict of arrays
            of NumPy under the old names and answers like ``model``; or its answers to
            ``source``. A function finds more, because its arrays can be changed.
        tolerance: largest difference that is rounding, as in ``WrongRows.before``.
        width: how many tables each step of the search goes on from.
        depth: how many edits the search goes from the given table; with 0 the models
            are matched at once.
        limit: of calls of the model and the reference, which are five or more. A right
            table takes 2; with a function 4, and one or two more for each leaf.
        seed: of the numbers by which arrays are changed.

    Returns:
        The changes, the mended table, and what else is to know.

    Raises:
        MigrationError: the table does not fit; the answers have other shapes.

    Example:
        >>> old = {"w": np.arange(9.0).reshape(3, 3), "b": np.ones(3)}
        >>> m = Migration({"w : i o": "kernel : i o", "b": "bias"})
        >>> def model(p):
        ...     return np.ones(3) @ np.tanh(p["kernel"]) + p["bias"]
        >>> def reference(p):
        ...     return np.tanh(p["w"]) @ np.ones(3) + p["b"]
        >>> new = {"kernel": old["w"], "bias": old["b"]}
        >>> report = find_wrong_rows(m, old, new, model, reference)
        >>> print(report.changes[0].alternatives[0])
        'w : o i': 'kernel : i o'
    """
    if not isinstance(migration, Migration) or not callable(model):
        raise MigrationError(
            "find_wrong_rows takes (migration, source, target, model, reference); got "
            f"{describe(migration)} for the migration and {describe(model)} for the "
            f"model, which is a function of params.{to_migration(migration)}"
        )
    flat = to_flat_dict(source)
    for path, leaf in flat.items():
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise MigrationError(
                f"The leaf {listing([path])} of the source has no value: it is a "
                "ShapeDtypeStruct. The order of arguments is migration, source, "
                "target, model, reference; the source has the old arrays."
            )
    require_dtypes(flat)
    flat = {path: np.asarray(x) if can_be_shaken(x) else x for path, x in flat.items()}
    try:
        tables = Tables(migration, flat, target)
    except MigrationError as error:
        with explaining(error):
            _, problems = migration.planned(to_flat_dict(target), flat)
            if not problems.texts:
                error.add_note(
                    "The table fits with source and target exchanged. The order of "
                    "arguments is migration, source, target, model, reference."
                )
        raise
    left = max(limit, _LEAST)
    search = _Search(
        tables, flat, model, reference, tolerance, width, depth, left, seed
    )
    return search.report()


@dataclasses.dataclass
class _Search:
    """A search for a table that answers right; ``left`` counts the evaluations."""

    tables: Tables
    flat: Mapping[str, Any]
    model: Callable[[Any], Any]
    reference: Any
    tolerance: float
    width: int
    depth: int
    left: int
    seed: int
    evaluations: int = 0
    seen: set[State] = dataclasses.field(default_factory=set)
    least: dict[Place, float] = dataclasses.field(default_factory=dict)
    cases: list[Case] = dataclasses.field(default_factory=list)

    def report(self) -> WrongRows:
        """Return what is found."""
        theirs = self.reference
        is_function = callable(theirs)
        if is_function:
            theirs = self._called("reference", dict(self.flat))
        self.cases = [Case(self.flat, answers_of(theirs))]
        before, _ = self._compared(self.cases[0], ())
        if is_function:
            leaves = self._shaken(np.random.default_rng(self.seed))
            self.cases.append(Case(leaves, self._called("reference", leaves)))
        changes: tuple[RowChange, ...] = ()
        others: tuple[str, ...] = ()
        after, migration = before, None
        state, match = None, MatchedTable(None, 0)
        with contextlib.suppress(_LimitError):
            state = self._found()
        if state is None and is_function:
            match = self._matched()
            state = match.state
        if state is not None:
            state, others = self._refined(state)
            changes = tuple(self._change(state, u) for u in self.tables.units(state))
            migration = self.tables.built(state)
            if state:  # the table as it is written, not as it was put together
                params = migration(self.flat, self.tables.likes)
                self.left += 1
                ours = self._called("model", self.tables.tree(params))
                after, _ = self._difference(ours, self.cases[0].answers)
            if not after <= self.tolerance:
                migration, changes, others, after = None, (), (), before
        unseen = self._unseen()
        why = "all numbers of a leaf are equal, and the reference is not a function"
        if is_function:
            unseen = self._unread() if migration is not None else ()
            why = "no answer depends on a leaf"
        least = (
            () if migration else sorted(self.least.items(), key=lambda pair: pair[1])
        )
        return WrongRows(
            found=migration is not None,
            before=before,
            after=after,
            changes=changes,
            others=others,
            ranked=tuple((_text(self.tables.rows((), x)[0]), e) for x, e in least),
            unseen=unseen,
            evaluations=self.evaluations,
            tried=len(self.seen),
            migration=migration,
            found_by=("matching" if match.state else "edits") if changes else "",
            matching_evaluations=match.evaluations,
            why=match.why,
            _why_unseen=why,
        )

    def _found(self) -> State | None:
        """Return a table that answers right as a whole."""
        if self._answers_right(()):
            return ()
        starts: list[State] = [()]
        if len(self.cases) > 1:
            shown = self._shown()
            if self._answers_right(shown):
                return shown
            starts = [*dict.fromkeys([shown, ()])]
        for start in starts:
            state = self._beam(start, self.cases[-1], self.depth)
            if state is not None and self._answers_right(state):
                return state
        return self._doubled() if self.depth > 1 else None

    def _matched(self) -> MatchedTable:
        """Return what a match of both models says, for which no table need be near."""
        if self.left <= 0:
            return MatchedTable(None, 0, ("the limit left no evaluation for that",))
        comparison, match = matched(
            self.tables,
            self.cases[0],
            self.model,
            self.reference,
            tolerance=self.tolerance,
            limit=self.left,
            seed=self.seed,
        )
        self.evaluations += match.evaluations
        self.left -= match.evaluations
        if comparison is None:
            return match
        why, state = "they match, but the limit left no evaluation for the rows", None
        with contextlib.suppress(_LimitError):
            wrong = comparison.wrong(self.cases[-1], self._is_right)
            why = (
                f"they match, but no rows of a table say how: {listing(sorted(wrong))}"
            )
            state = comparison.state(wrong)
            state = state if state and self._answers_right(state) else None
        return dataclasses.replace(match, state=state, why=() if state else (why,))

    def _is_right(self, params: Callable[[Case], Mapping[str, Any]]) -> bool:
        """Return whether params that are made of each case answer right."""
        for case in reversed(self.cases):
            ours = self._called("model", self.tables.tree(params(case)))
            if not self._difference(ours, case.answers)[0] <= self.tolerance:
                return False
        return True

    def _doubled(self) -> State | None:
        """Return a table with two edits in one row that answers right.

        An order whose inverse is meant takes two, and the first may lead away.
        """
        tables, count = self.tables, 0
        for place in sorted(self.least, key=self.least.__getitem__)[:_MOST_DOUBLED]:
            for once, _ in tables.options(place, tables.rows((), place)):
                for rows, why in tables.options(place, once):
                    state = tables.edited((), {place: rows})
                    count += 1
                    if count > _MOST_DOUBLES:
                        return None
                    if state in self.seen:
                        continue
                    self.seen.add(state)
                    tables.reasons.setdefault((place, rows), why)
                    if self._answers_right(state):
                        return state
        return None

    def _shown(self) -> State:
        """Mend a table while its rows are shown one after the other, as far as it goes.

        A row that is not shown has one number for all that may change places, so no
        order in it can be wrong.
        """
        tables, case = self.tables, self.cases[-1]
        first, numbers = tables.classes(), np.zeros(tables.num_ids, complex)
        positive = [np.zeros(0, int)]
        for path, ids in tables.ids[0].items():
            if can_be_shaken(case.leaves[path]):
                numbers[ids.astype(int)] = case.leaves[path]
                if (case.leaves[path] >= 0).all():
                    positive.append(first[ids.astype(int)].reshape(-1))
        # What may be a variance stays positive, or all answers are NaN.
        every = np.concatenate(positive)
        numbers[every] = np.abs(numbers[every])
        hidden: dict[Place, dict[str, Any]] = {}
        for place in (place for place in tables.places if not place[0]):
            row = tables.groups(place)[0].row
            if row.function is not None or row.compares or row.values:
                continue  # what it makes depends on all its numbers
            for path in tables.taken(place):
                leaf, ids = case.leaves[path], tables.ids[0][path]
                if can_be_shaken(leaf):
                    blind = numbers[first[ids.astype(int)]]
                    blind = blind if leaf.dtype.kind == "c" else blind.real
                    hidden.setdefault(place, {})[path] = blind.astype(leaf.dtype)
        state: State = ()
        for count in range(len(hidden) + 1):
            shown, blinded = case, [*hidden.values()][count:]
            if blinded:
                leaves = {**case.leaves, **collections.ChainMap(*blinded)}
                shown = Case(leaves, self._called("reference", leaves))
            if self._compared(shown, state)[0] <= self.tolerance:
                continue
            near = self._beam(state, shown, min(2, self.depth))
            if near is None:
                break
            state = near
        return state

    def _beam(self, start: State, case: Case, depth: int) -> State | None:
        """Return the shortest of the nearest tables that answer right."""
        params = self.tables.params(case, start)
        states, before = [start], {start}
        for _ in range(depth):
            fitting: list[State] = []
            scored: list[tuple[_Score, tuple[int, ...], State, Any]] = []
            for new, places in itertools.chain(*map(self.tables.neighbours, states)):
                if new in before:
                    continue
                before.add(new)
                self.seen.add(new)
                leaves = self.tables.params(case, new)
                if leaves is None or (params is not None and _equal(params, leaves)):
                    continue
                gap, score = self._compared(case, new)
                if len(new) == 1 and case is self.cases[-1]:
                    ((place, _),) = new
                    self.least[place] = min(gap, self.least.get(place, math.inf))
                fitting += [new] * (gap <= self.tolerance and self.tables.is_whole(new))
                scored.append((score, self._cost(new), new, places))
            if fitting:
                return min(fitting, key=self._cost)
            states, counts = [], dict[Any, int]()
            for *_, new, places in sorted(scored, key=lambda each: each[:2]):
                counts[places] = counts.get(places, 0) + 1
                if counts[places] <= 2 and len(states) < self.width:
                    states.append(new)
        return None

    def _refined(self, state: State) -> tuple[State, tuple[str, ...]]:
        """Return the least and shortest of what changed, and what does as well."""
        tables = self.tables
        others: dict[str, None] = {}
        with contextlib.suppress(_LimitError):  # what is found may not be the shortest
            for unit in tables.units(state):
                if self._answers_right(tables.without(state, unit)):
                    state = tables.without(state, unit)
            for unit in tables.units(state):
                base, fitting = tables.without(state, unit), [state]
                every: Iterator[Any] = itertools.chain(
                    tables.neighbours(base),
                    (e for e in tables.neighbours(state) if {*e[1]} <= {*unit}),
                )
                for new in dict.fromkeys(each for each, _ in every):
                    self.seen.add(new)
                    if new not in (state, base) and self._answers_right(new):
                        fitting.append(new)
                state = min(fitting, key=self._cost)
                for each in fitting:
                    pairs = [pair for pair in each if pair not in state]
                    text = "; ".join(_text(row) for _, rows in pairs for row in rows)
                    others |= dict.fromkeys([text] * bool(text))
        return state, tuple(others)

    def _change(self, state: State, unit: Unit) -> RowChange:
        """Return one change as texts."""
        rows = itertools.chain(*(self.tables.rows((), place) for place in unit))
        new = itertools.chain(*unit.values())
        whys = (self.tables.reasons.get(pair, "") for pair in unit.items())
        self.left += 1
        error, _ = self._compared(self.cases[-1], self.tables.without(state, unit))
        why = ", ".join(dict.fromkeys(filter(None, whys)))
        return RowChange(tuple(map(_text, rows)), tuple(map(_text, new)), why, error)

    def _cost(self, state: State) -> tuple[int, ...]:
        """Return how much there is to write."""
        rows = [row for _, rows in state for row in rows]
        return len(state), len(rows), sum(len(_text(row)) for row in rows)

    def _answers_right(self, state: State) -> bool:
        """Return whether a table answers right on all numbers."""
        cases = reversed(self.cases)
        is_right = all(self._compared(c, state)[0] <= self.tolerance for c in cases)
        return is_right and self.tables.is_whole(state)

    def _compared(self, case: Case, state: State) -> tuple[float, _Score]:
        """Return how much the answers differ, and how good that is in a search."""
        if state not in case.compared:
            params = self.tables.params(case, state)
            if params is None:
                return math.inf, (1, math.inf)
            ours = self._called("model", self.tables.tree(params))
            case.compared[state] = self._difference(ours, case.answers)
        compared: tuple[float, _Score] = case.compared[state]
        return compared

    def _called(self, role: str, leaves: Any) -> list[Any]:
        """Return what the model, or the reference, answers."""
        if self.left <= 0:
            raise _LimitError
        self.left -= 1
        self.evaluations += 1
        function = self.model if role == "model" else self.reference
        return called(role, function, leaves)

    def _difference(self, ours: Sequence[Any], theirs: Sequence[Any]) -> Any:
        """Return the largest difference of answers, and the score."""
        require_alike(ours, theirs)
        errors = [errors_of(*both) for both in zip(ours, theirs, strict=True)]
        largest = [float(np.max(each, initial=0)) for each in errors]
        # Most that finite numbers differ by; entries that never match count as that.
        bounded = (np.minimum(each, 2.0) for each in errors if each.size)
        rms = [float(np.sqrt(np.mean(each**2))) for each in bounded]
        agree = [each <= self.tolerance for each in largest]
        place = agree.index(False) if False in agree else len(agree)
        return max(largest, default=0.0), (-place, [*rms, 0.0][place])

    def _shaken(self, rng: np.random.Generator) -> dict[str, Any]:
        """Return the source with other numbers, which hide nothing."""
        leaves = dict(self.flat)
        for group in self.tables.plans[0].groups:
            values = group.row.values
            factor = math.exp(0.3 * rng.normal())
            # Copies stay equal, and zeros that are cut off stay zeros.
            is_bound = group.row.compares or values.cuts_zeros
            is_bound |= bool(values.repeats(is_source=True))
            for path in group.source_paths:
                leaf = leaves[path]
                if not can_be_shaken(leaf):
                    continue
                shift = 0.1 * rng.normal(size=leaf.shape) * (leaf == 0)
                if leaf.dtype.kind != "c" and (leaf >= 0).all():
                    shift = np.abs(shift)  # it may be a variance
                noise = np.exp(0.3 * rng.normal(size=leaf.shape))
                new = leaf * factor if is_bound else leaf * noise + shift
                leaves[path] = np.asarray(new).astype(leaf.dtype)
        return leaves

    def _unread(self) -> tuple[str, ...]:
        """Return the rows with a leaf on whose numbers no answer depends."""
        leaves = {
            path: group.row.text
            for group in self.tables.plans[0].groups
            for path in group.source_paths
            if can_be_shaken(self.flat[path])
        }
        reasons: dict[str, str] = {}  # of rows, by their text
        for path, row in leaves.items():
            try:
                reason = None if reasons.get(row) == "" else self._reason_unread(path)
            except _LimitError:
                reason = ""  # of what is left, nobody knows
            if reason is not None:
                reasons[row] = reason
        return tuple(f"{row} ({why})" if why else row for row, why in reasons.items())

    def _reason_unread(self, path: str) -> str | None:
        """Return why no answer depends on a leaf, if known; None if one does."""
        case, before = self.cases[-1], self.cases[0].leaves
        answers = self._called("reference", {**case.leaves, path: before[path]})
        if apart(answers, case.answers) > self.tolerance:
            return None
        # What is read and cancels leaves a trace of rounding; what is not read, none.
        are_same = all(map(np.array_equal, answers, case.answers))
        if are_same or before[path].ndim != 1:
            return ""
        shifted = np.asarray(case.leaves[path] + 1).astype(before[path].dtype)
        answers = self._called("reference", {**case.leaves, path: shifted})
        return _CANCELS if apart(answers, case.answers) <= self.tolerance else ""

    def _unseen(self) -> tuple[str, ...]:
        """Return the rows of leaves whose numbers are all equal."""
        texts: dict[str, None] = {}
        for group in self.tables.plans[0].groups:
            every = (self.flat[path] for path in group.source_paths)
            leaves = [leaf for leaf in every if can_be_shaken(leaf) and leaf.size > 1]
            if any((leaf == leaf.flat[0]).all() for leaf in leaves):
                texts[group.row.text] = None
        return tuple(texts)


def _equal(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Return whether two tables make the same numbers."""
    return one.keys() == two.keys() and all(
        array is two[path] or np.array_equal(array, two[path])
        for path, array in one.items()
    )


def _text(row: Row) -> str:
    """Write a row as in a table."""
    source, target = row.typed()
    return f"{source!r}: {target!r}"
