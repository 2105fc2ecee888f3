"""A last resort: both models are matched, and the given table is compared with that.

Takes the given table and both models; gives rows in the place of those that the match
contradicts. What comes out otherwise is given back to the caller's rows, one leaf after
another, as long as the whole answers right: only what cannot be given back is wrong.
See ``matching`` for how two models are matched without a table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.group import Group
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.rows import Row, parse_row
from treeadapt.migrations.run_group import run_group
from treeadapt.porting.drafts.draft import draft_marked
from treeadapt.porting.drafts.rows import numberless
from treeadapt.porting.matching.search import Found, Search
from treeadapt.porting.matching.sides import Models, ModelSide
from treeadapt.porting.matching.tables import NAMES, ORDER, undecided
from treeadapt.porting.row_edits import Rows
from treeadapt.porting.wrong_rows.tables import (
    Case,
    Place,
    State,
    Tables,
    can_be_shaken,
)

_WHY = "what both models answer, which were matched"
# What a model raises that takes its own dtype only, or checks its numbers.
_NOT_ASKED = TypeError, ValueError, ArithmeticError, RuntimeError
_MOST_TOGETHER = 3  # of the leaves of one kind, given back at once
_MOST_TRIES = 500

#: Says whether a tree answers right, whose params are made of each case.
IsRight: TypeAlias = Callable[[Callable[[Case], Mapping[str, Any]]], bool]
#: Leaves of the target that are given back at once.
_Unit: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MatchedTable:
    """What a match says of a table.

    Attributes:
        state: the table with other rows; None if none is found.
        evaluations: calls of both models.
        why: why none is found.
    """

    state: State | None
    evaluations: int
    why: tuple[str, ...] = ()


def matched(
    tables: Tables,
    case: Case,
    model: Callable[[Any], Any],
    reference: Callable[[Any], Any],
    *,
    tolerance: float,
    limit: int,
    seed: int,
) -> tuple[Comparison | None, MatchedTable]:
    """Match two models.

    Args:
        tables: the given one, and others around it.
        case: the source as it is.
        model: the new model.
        reference: the old one.
        tolerance: largest difference that is rounding.
        limit: of calls of both models.
        seed: of the numbers that they are asked with.

    Returns:
        The given table next to the match, if there is one; and what matching took.
    """
    why = _why_not(tables, case)
    if why:
        return None, MatchedTable(None, 0, (why,))
    models = _models(tables, case, model, reference, limit)
    numbers = {p: np.asarray(case.leaves[p], "float32") for p in models.old.shapes}
    search, found = Search(models, numbers, tolerance, seed), None
    try:
        found = search.found()
        whys = [*dict.fromkeys(search.why)]
    except _NOT_ASKED as error:
        whys = [f"they cannot be asked in float32: {type(error).__name__}: {error}"]
    if found is None:
        return None, MatchedTable(None, models.evaluations, (*whys,))
    return Comparison(tables, models, found), MatchedTable(None, models.evaluations)


def _why_not(tables: Tables, case: Case) -> str:
    """Say why a table cannot be compared with a match; empty if it can be."""
    if len(tables.plans) > 1:
        return "of a chain, a match would not say which of its tables is wrong"
    if tables.params(case, ()) is None:
        return "a row takes arrays for copies that are not equal"
    for leaves in (case.leaves, tables.likes):
        kinds = {np.dtype(x.dtype).kind for x in leaves.values() if can_be_shaken(x)}
        if not kinds or "c" in kinds:
            return "that takes arrays of real numbers on both sides"
    return ""


def _models(
    tables: Tables,
    case: Case,
    model: Callable[[Any], Any],
    reference: Callable[[Any], Any],
    limit: int,
) -> Models:
    """Return both models; what is no number of the target is as the table makes it."""
    old = ModelSide(dict(case.leaves), reference, role="reference")
    new = ModelSide(tables.target, model, role="model")
    made = tables.params(case, ()) or {}
    new.fixed = {path: made.get(path, leaf) for path, leaf in new.fixed.items()}
    return Models(old, new, limit)


@dataclasses.dataclass
class Comparison:
    """The given table and a match, of which each leaf may be from either.

    Attributes:
        tables: the given one, and others around it.
        models: both.
        found: how their parts were paired.
    """

    tables: Tables
    models: Models
    found: Found

    def __post_init__(self) -> None:
        self.group_of: dict[str, Group] = {}
        self.place_of: dict[str, Place] = {}
        for place in self.tables.places:
            for group in self.tables.groups(place):
                self.group_of |= dict.fromkeys(group.filled, group)
                self.place_of |= dict.fromkeys(group.filled, place)
        self.sources_of: dict[str, dict[str, None]] = {}
        for moved in self.found.solution:
            for spot in moved.target.places:
                self.sources_of.setdefault(spot.path, {})[moved.source.path] = None

    def wrong(self, case: Case, is_right: IsRight) -> frozenset[str]:
        """Return the leaves of the target that are wrong in the given table.

        Those without which the whole does not answer right.

        Args:
            case: arrays in which no numbers are alike by chance.
            is_right: asks the new model.
        """
        given, ours = self._given(case), self._matched(case.leaves)
        wrong = {path for path, array in ours.items() if not _equal(array, given[path])}
        by_unit: dict[Any, list[str]] = {}
        for path in sorted(wrong):
            group = self.group_of.get(path)
            key: Any = path if group is None else (group.place, numberless(path))
            if group is not None and _is_opaque(group):
                key = group.sources
            by_unit.setdefault(key, []).append(path)
        return self._not_given_back([*map(tuple, by_unit.values())], is_right)

    def _not_given_back(self, units: list[_Unit], is_right: IsRight) -> frozenset[str]:
        """Return what is left of some leaves after all were given back that may be.

        One kind of leaves after the other, then what a match exchanges together.
        """
        tries = 0
        for count in range(1, _MOST_TOGETHER + 1):
            for some in itertools.combinations(units, count):
                rest = [unit for unit in units if unit not in some]
                if len(rest) + count > len(units):
                    continue  # one of them is given back already
                tries += 1
                if tries > _MOST_TRIES:
                    break
                if is_right(self._from_both(itertools.chain(*rest))):
                    units = rest
        leaves = frozenset(itertools.chain(*units))
        for unit in units:
            group = self.group_of.get(unit[0])
            is_whole = len(unit) == 1 or (group is not None and _is_opaque(group))
            for path in () if is_whole else unit:
                if is_right(self._from_both(leaves - {path})):
                    leaves -= {path}
        return leaves

    def _from_both(self, wrong: Iterable[str]) -> Callable[[Case], Mapping[str, Any]]:
        """Return what makes params: some leaves as matched, the others as given."""
        paths = [*wrong]

        def params(case: Case) -> Mapping[str, Any]:
            ours = self._matched(case.leaves)
            return {**self._given(case), **{path: ours[path] for path in paths}}

        return params

    def _given(self, case: Case) -> Mapping[str, Any]:
        """Return what the given table makes."""
        given = self.tables.params(case, ())
        assert given is not None  # it was asked before
        return given

    def _matched(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the match makes, in the dtypes of the target."""
        made = self.found.convert(self.models, leaves)
        likes = self.tables.likes
        return {path: x.astype(likes[path].dtype) for path, x in made.items()}

    def state(self, wrong: frozenset[str]) -> State | None:
        """Return the table in which some leaves are as matched; None if no rows do."""
        every: dict[Place, Rows] = {}
        left = sorted(wrong)
        while left:
            leaves, sources = self._linked(left[0], wrong)
            try:
                rows = self._rows(leaves, sources, wrong)
            except MigrationError:
                return None
            state = self.tables.placed(rows, sources, leaves)
            if state is None:
                return None
            every |= dict(state)
            left = [path for path in left if path not in leaves]
        for change in every.items():
            self.tables.reasons.setdefault(change, _WHY)
        return self.tables.edited((), every)

    def _linked(
        self, path: str, wrong: frozenset[str]
    ) -> tuple[dict[str, None], dict[str, None]]:
        """Return the leaves of both sides that have one leaf's sources, or row."""
        leaves: dict[str, None] = {path: None}
        sources: dict[str, None] = {}
        size = -1
        while size < len(leaves) + len(sources):
            size = len(leaves) + len(sources)
            for each in [*leaves]:
                group = self.group_of.get(each)
                if group is not None:
                    leaves |= dict.fromkeys(group.filled)
                    sources |= dict.fromkeys(group.source_paths)
                if each in wrong:
                    sources |= self.sources_of[each]
            for each, group in self.group_of.items():
                if not sources.keys().isdisjoint(group.source_paths):
                    leaves[each] = None
            places = {self.place_of[each] for each in leaves if each in self.place_of}
            for each in sorted(wrong):
                is_linked = not sources.keys().isdisjoint(self.sources_of[each])
                if is_linked or self.place_of.get(each) in places:
                    leaves[each] = None
        return leaves, sources

    def _rows(
        self, leaves: Iterable[str], sources: Iterable[str], wrong: frozenset[str]
    ) -> dict[Place, Rows]:
        """Return rows by the place that they have in the table.

        Raises:
            MigrationError: no row says what goes where.
        """
        table = self._drafted(leaves, sources, wrong)
        rows: dict[Place, list[Row]] = {}
        planned, _ = table.planned(
            {path: self.tables.plans[0].source[path] for path in sources}, None
        )
        for place, row in enumerate(table.rows):
            groups = [group for group in planned.groups if group.place == place]
            filled = [path for group in groups for path in group.filled]
            taken = [p for g in groups for p in g.source_paths]
            taken = taken or [path for path in sources if row.takes(path)]
            typed = _with_sizes(row, table, groups, self.tables.plans[0].sizes)
            rows.setdefault(self._place_of(filled, taken), []).append(typed)
        for path in filter(self.place_of.__contains__, leaves):
            rows.setdefault(self.place_of[path], [])
        return {
            place: (*new, *self._staying(place, {*leaves, *sources}))
            for place, new in rows.items()
        }

    def _place_of(self, filled: Sequence[str], taken: Sequence[str]) -> Place:
        """Return where a new row belongs: where its leaves were made, or taken."""
        places = (self.place_of[path] for path in filled if path in self.place_of)
        place = next(places, None)
        return place if place is not None else self.tables.place_that_takes(taken[0])

    def _staying(self, place: Place, paths: Collection[str]) -> Rows:
        """Return the given row if it makes, or drops, more than some leaves."""
        rows = self.tables.rows((), place)
        every = self.tables.made(place, rows) or self.tables.taken(place)
        return () if all(path in paths for path in every) else rows

    def _drafted(
        self, leaves: Iterable[str], sources: Iterable[str], wrong: frozenset[str]
    ) -> Migration:
        """Return a table of some leaves, written by a draft.

        Raises:
            MigrationError: no row says what goes where.
        """
        plan = self.tables.plans[0]
        shapes = {
            path: jax.ShapeDtypeStruct(plan.source[path].shape, "float32")
            for path in sources
        }
        groups = {id(g): g for g in (self.group_of.get(p) for p in leaves) if g}
        matched = {path for path in leaves if path in wrong}
        for group in groups.values():
            if _is_opaque(group):
                matched.update(group.filled)

        def convert(numbers: Mapping[str, Any]) -> dict[str, Any]:
            empty = {
                p: np.zeros(s, "float32") for p, s in self.models.old.shapes.items()
            }
            made = self.found.convert(self.models, {**empty, **numbers})
            result: dict[str, Any] = {}
            for group in groups.values():
                if not matched.issuperset(group.filled):
                    result |= run_group(group, numbers, {})
            return {**result, **{path: made[path] for path in matched}}

        marks: dict[str, str] = {}
        for paths in undecided(self.found):
            marks |= dict.fromkeys(paths, NAMES if len(paths) > 1 else ORDER)
        draft = draft_marked(shapes, convert=convert, marks=marks)
        if draft.missing or draft.unexpected or len(draft.migration.tables) > 1:
            raise MigrationError("no row gives the order of their numbers")
        return draft.migration


def _with_sizes(
    row: Row, table: Migration, groups: Sequence[Group], given: Mapping[str, int]
) -> Row:
    """Return a row with the sizes that the given table does not state."""
    solved = {n: s for g in groups if g.move for n, s in g.move.size.items()}
    sizes = {name: size for name, size in table.sizes.items() if name in row.names}
    sizes |= {name: size for name, size in solved.items() if name in given}
    sizes = {n: size for n, size in sizes.items() if given.get(n) != size}
    source, target = row.typed()
    if not sizes or row.drops:
        return row
    is_pair = isinstance(target, tuple) and isinstance(target[-1], Mapping)
    target, options = target if is_pair else (target, {})
    return parse_row(source, (target, {**options, "sizes": sizes}), given)


def _is_opaque(group: Group) -> bool:
    """Return whether what a group makes depends on all its numbers."""
    row = group.row
    is_computed = row.function is not None or bool(
        row.values.multiply or row.values.add
    )
    return is_computed or row.compares or row.values.cuts_zeros or row.values.fills


def _equal(one: Any, two: Any) -> bool:
    """Return whether two arrays hold the same numbers, but for rounding."""
    one, two = (np.asarray(each).astype("float64") for each in (one, two))
    return np.allclose(one, two, rtol=1e-5, atol=1e-7)
