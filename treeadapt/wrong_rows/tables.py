"""Tables around one: what may be in the place of its rows, and what that makes.

Takes a migration and both sides; gives states, the tables one edit away from each, and
their params. A state says which rows are others than in the given table. See
``migrations.alternatives`` for what a row could mean, and ``find`` for what is tried.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from treeadapt.arrays import is_array, is_inexact_dtype
from treeadapt.convert import from_flat_dict, to_flat_dict
from treeadapt.errors import MigrationError
from treeadapt.migrations.alternatives import (
    Alternative,
    alternatives_of,
    exchanged,
    exchanged_texts,
    tied,
)
from treeadapt.migrations.group import Group, shape_of
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.planning import fits, plan_groups
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row
from treeadapt.migrations.run_group import is_moved, run_group
from treeadapt.migrations.running import run

#: A row: the number of its table in a chain, and its place there.
Place: TypeAlias = tuple[int, int]
Rows: TypeAlias = tuple[Row, ...]
#: What is in the place of rows of the given table, in order.
State: TypeAlias = tuple[tuple[Place, Rows], ...]
#: One change: rows that are wrong without each other.
Unit: TypeAlias = Mapping[Place, Rows]


class Tables:
    """A migration, and tables around it.

    Args:
        migration: fits both sides.
        flat: arrays of NumPy under the old names.
        target: tree that the result should be like.

    Raises:
        MigrationError: it does not fit.
    """

    def __init__(
        self, migration: Migration, flat: Mapping[str, Any], target: Any
    ) -> None:
        self.migration, self.target = migration, target
        self.likes = to_flat_dict(target)
        plan, problems = migration.planned(flat, self.likes, compares=True)
        problems.raise_any()
        self.plans = plan.tables
        self.options = functools.cache(self._options)
        self.exchange = functools.cache(self._exchange)
        self.reasons: dict[tuple[Place, Rows], str] = {}
        self._groups: dict[tuple[Place, Rows], list[Group]] = {}
        self.places: list[Place] = []
        for number, each in enumerate(self.plans):
            for place, row in enumerate(each.rows):
                groups = [group for group in each.groups if group.place == place]
                self._groups[(number, place), (row,)] = groups
                self.places += [(number, place)] * bool(groups)
        self.ids: list[dict[str, Any]] = [{}]
        self.num_ids = 1  # what is padded is 0
        for path, spec in self.plans[0].source.items():
            start, shape = self.num_ids, shape_of(spec)
            self.num_ids += math.prod(shape)
            ids = np.arange(start, self.num_ids, dtype=np.float64)
            self.ids[0][path] = ids.reshape(shape)
        for number in range(len(self.plans) - 1):
            places = [place for place in self.places if place[0] == number]
            made = [self.moved_ids(place, self.rows((), place)) for place in places]
            self.ids.append(dict(itertools.chain(*(each.items() for each in made))))

    def rows(self, state: State, place: Place) -> Rows:
        """Return what is in the place of a row."""
        return dict(state).get(place) or (self.plans[place[0]].rows[place[1]],)

    def groups(self, place: Place) -> list[Group]:
        """Return the groups of a row of the given table."""
        return self._groups[place, self.rows((), place)]

    def made(self, place: Place, rows: Rows) -> dict[str, Any]:
        """Return the shapes of what rows make, by path."""
        specs = (group.specs.items() for group in self._groups[place, rows])
        return dict(itertools.chain(*specs))

    def edited(self, state: State, new: Unit) -> State:
        """Return a state with other rows in some places."""
        every = sorted({**dict(state), **new}.items(), key=lambda pair: pair[0])
        return tuple(pair for pair in every if pair[1] != self.rows((), pair[0]))

    def without(self, state: State, unit: Unit) -> State:
        """Return a state without one change."""
        return self.edited(state, {place: self.rows((), place) for place in unit})

    def units(self, state: State) -> list[Unit]:
        """Return the changes that make a state; rows that were exchanged are one."""
        units: list[Unit] = []
        crossed: dict[Place, Rows] = {}
        for place, rows in state:
            before = self.made(place, self.rows((), place))
            if self.made(place, rows).keys() >= before.keys():
                units.append({place: rows})
            else:
                crossed[place] = rows
        return [*units, crossed] if crossed else units

    def neighbours(self, state: State) -> Iterator[tuple[State, tuple[Place, ...]]]:
        """Yield all tables one edit away, and where they differ."""
        for place in self.places:
            for rows, why in self.options(place, self.rows(state, place)):
                self.reasons.setdefault((place, rows), why)
                yield self.edited(state, {place: rows}), (place,)
        for pair in itertools.combinations(self.places, 2):
            one, two = ((place, self.rows(state, place)) for place in pair)
            for both, why in self.exchange(one, two):
                new = dict(zip(pair, both, strict=True))
                for key in new.items():
                    self.reasons.setdefault(key, why)
                yield self.edited(state, new), pair

    def _options(self, place: Place, rows: Rows) -> list[Alternative]:
        """Return what may be in the place of rows that are there, each once."""
        plan, wanted = self.plans[place[0]], self.made(place, rows)
        if None in wanted.values():  # a function decides
            return []
        signatures = {self._signature(place, rows)}
        every: list[Alternative] = []
        for number, row in enumerate(rows):
            groups = [g for g in self._groups[place, rows] if g.row is row]
            taken = itertools.chain(*(group.source_paths for group in groups))
            shapes = {path: shape_of(plan.source[path]) for path in taken}
            specs = itertools.chain(*(group.specs.values() for group in groups))
            ranks = [len(shape_of(spec)) for spec in specs]
            for new, why in alternatives_of(row, shapes, ranks, plan.sizes):
                edited = (*rows[:number], *new, *rows[number + 1 :])
                if self._fits(place, edited, wanted):
                    signature = self._signature(place, edited)
                    if signature not in signatures:
                        signatures.add(signature)
                        every.append(Alternative(edited, why))
        for path in plan.new if len(rows) == 1 else ():
            if not is_inexact_dtype(plan.added[path].dtype):
                continue
            for edited, why in tied(rows[0], path, plan.sizes):
                if self._fits(place, edited, {**wanted, path: plan.added[path]}):
                    every.append(Alternative(edited, why))
        return every

    def _exchange(
        self, one: tuple[Place, Rows], two: tuple[Place, Rows]
    ) -> list[tuple[tuple[Rows, Rows], str]]:
        """Return what two rows would be, if both fit, with leaves of each other."""
        if one[0][0] != two[0][0] or len(one[1]) > 1 or len(two[1]) > 1:
            return []
        (row,), (other,), sizes = one[1], two[1], self.plans[one[0][0]].sizes
        wanted = self.made(*one), self.made(*two)
        shapes = [sorted(map(str, each.values())) for each in wanted]
        by_target = exchanged(row, other, 1, sizes) if shapes[0] == shapes[1] else None
        by_source = [
            exchanged(row, other, 0, sizes),
            *exchanged_texts(row, other, sizes),
            *((a, b) for b, a in exchanged_texts(other, row, sizes)),
        ]
        groups = (group for place in (one[0], two[0]) for group in self.groups(place))
        paths = [*itertools.chain(*(group.source_paths for group in groups))]
        specs = [self.plans[one[0][0]].source[path] for path in paths]
        if not all(is_array(spec) and is_inexact_dtype(spec.dtype) for spec in specs):
            by_source = []  # keys and integers pass on as they are
        pairs = [(by_target, wanted[::-1], "two targets exchanged")]
        pairs += [(both, wanted, "two sources exchanged") for both in by_source]
        return [
            (((both[0],), (both[1],)), why)
            for both, made, why in pairs
            if both is not None
            and self._fits(one[0], both[:1], made[0], paths)
            and self._fits(two[0], both[1:], made[1], paths)
        ]

    def _fits(
        self,
        place: Place,
        rows: Rows,
        wanted: Mapping[str, Any],
        paths: Iterable[str] | None = None,
    ) -> bool:
        """Return whether rows make leaves of some shapes, and remember how.

        Args:
            place: where the rows are.
            rows: in the place of one of the given table.
            wanted: shapes and dtypes by path.
            paths: of leaves that they may take; None for those of the given row.
        """
        plan = self.plans[place[0]]
        if (place, rows) not in self._groups:
            groups = self.groups(place)
            own = itertools.chain(*(group.source_paths for group in groups))
            taken = (path for path in paths or () if any(r.takes(path) for r in rows))
            source = {path: plan.source[path] for path in (taken if paths else own)}
            problems = Problems()
            planned, dropped = plan_groups(rows, plan.sizes, source, wanted, problems)
            if problems.texts or dropped:
                return False
            self._groups[place, rows] = planned
        made = self.made(place, rows)
        return made.keys() == wanted.keys() and all(
            spec is not None and fits(spec, wanted[path]) for path, spec in made.items()
        )

    def moved_ids(self, place: Place, rows: Rows) -> dict[str, Any]:
        """Return which number of the source is where in what rows make."""
        ids = self.ids[place[0]]
        result: dict[str, Any] = {}
        for group in self._groups[place, rows]:
            sources = [[ids.get(path) for path in paths] for paths in group.sources]
            lacking = any(array is None for paths in sources for array in paths)
            if group.row.function is not None or group.row.values.multiply or lacking:
                continue
            if group.move is None:
                result |= dict.fromkeys(group.filled, sources[0][0])
                continue
            numbers = dict[str, Any](scale=1.0, offset=0.0, cast=())
            values = dataclasses.replace(group.move.values, **numbers)
            move = dataclasses.replace(
                group.move, values=values, dtype=np.dtype("float64")
            )
            arrays = itertools.chain(*run(move, sources)[0])
            result |= dict(zip(group.filled, arrays, strict=True))
        return result

    def _signature(self, place: Place, rows: Rows) -> Any:
        """Return what is equal for rows that do the same."""
        values: dict[str, Any] = {}
        for group in self._groups[place, rows]:
            one = group.move.values if group.move else group.row.values
            number = one.scale, one.offset, one.undoes and one.computes
            values |= dict.fromkeys(group.filled, number)
        ids = self.moved_ids(place, rows)
        return frozenset((path, values[path], a.tobytes()) for path, a in ids.items())

    def classes(self) -> Any:
        """Return for each number of the source the first one of its class.

        Numbers of a class may change places if rows are written otherwise.
        """
        ones, twos = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
        for state, places in self.neighbours(()):
            before: dict[str, Any] = {}
            after: dict[str, Any] = {}
            for place in places:
                before |= self.moved_ids(place, self.rows((), place))
                after |= self.moved_ids(place, self.rows(state, place))
            for path in before.keys() & after.keys():
                one, two = before[path].astype(int), after[path].astype(int)
                differs = (one != two) & (one > 0) & (two > 0)
                ones.append(one[differs])
                twos.append(two[differs])
        one, two = np.concatenate(ones), np.concatenate(twos)
        first = np.arange(self.num_ids)
        while True:
            low, new = np.minimum(first[one], first[two]), first.copy()
            np.minimum.at(new, one, low)
            np.minimum.at(new, two, low)
            new = new[new]
            if np.array_equal(new, first):
                return first
            first = new

    def params(
        self, leaves: Mapping[str, Any], state: State, remembered: dict[Any, Any]
    ) -> dict[str, Any] | None:
        """Return what a table makes; None if the numbers contradict it.

        Args:
            leaves: under the old names.
            state: the table.
            remembered: what rows of the first table made of these leaves.
        """
        for number, plan in enumerate(self.plans):
            likes = self.likes if number == len(self.plans) - 1 else {}
            result = {
                path: np.zeros(plan.added[path].shape, plan.added[path].dtype)
                if how == "zeros"
                else likes[path]
                for path, how in plan.new.items()
            }
            for place in (place for place in self.places if place[0] == number):
                key = place, self.rows(state, place)
                made = {} if number else remembered.get(key, {})
                try:
                    for group in self._groups[key] if not made else ():
                        filling = likes if group.row.values.fills else {}
                        made |= run_group(group, leaves, filling)
                except MigrationError:
                    return None
                result |= made
                if not number:
                    remembered[key] = made
            leaves = result
        return dict(leaves)

    def tree(self, params: Mapping[str, Any]) -> Any:
        """Return a tree like the target."""
        static = {p: leaf for p, leaf in self.likes.items() if not is_moved(leaf)}
        return from_flat_dict(self.target, {**static, **params})

    def built(self, state: State) -> Migration:
        """Return the migration that a state means."""
        if not state:
            return self.migration
        tables = []
        pairs = zip(self.migration.tables, self.plans, strict=True)
        for number, (table, plan) in enumerate(pairs):
            places = [(number, place) for place in range(len(plan.rows))]
            rows = [row for place in places for row in self.rows(state, place)]
            changed = [pair for pair in state if pair[0][0] == number]
            filled = {path for pair in changed for path in self.made(*pair)}
            names = {name for row in rows for name in row.names}
            sizes = {name: size for name, size in plan.sizes.items() if name in names}
            new = {p: how for p, how in table._new.items() if p not in filled}
            typed = [row.typed() for row in rows]
            tables.append(Migration(typed, sizes=sizes, new=new))
        return functools.reduce(Migration.then, tables)
