"""Tables around one: what may be in the place of its rows, and what that makes.

Takes a migration and both sides; gives states, the tables one edit away from each, and
their params. A state says which rows are others than in the given table. See
``porting.row_edits`` for what a row could mean, and ``find`` for what is tried.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.group import Group, shape_of
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.planning import fits, plan_groups
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row
from treeadapt.migrations.run_group import is_moved, run_group
from treeadapt.migrations.running import run
from treeadapt.porting.row_edits import (
    Alternative,
    Rows,
    alternatives_of,
    exchanges,
    tied,
)
from treeadapt.trees.arrays import is_array, is_inexact_dtype
from treeadapt.trees.state_dict import from_flat_dict, to_flat_dict

_OF_IDS = np.dtype("float64")
#: A row: the number of its table in a chain, and its place there.
Place: TypeAlias = tuple[int, int]
#: What is in the place of rows of the given table, in order.
State: TypeAlias = tuple[tuple[Place, Rows], ...]
#: One change: rows that are wrong without each other.
Unit: TypeAlias = Mapping[Place, Rows]


@dataclasses.dataclass
class Case:
    """Arrays under the old names, and the answers of the reference to them.

    Attributes:
        leaves: the arrays, by path.
        answers: of the reference.
        remembered: what rows of the first table made of them.
        compared: how far the answers of a table were from these, and its score.
    """

    leaves: Mapping[str, Any]
    answers: list[Any]
    remembered: dict[tuple[Place, Rows], dict[str, Any]] = dataclasses.field(
        default_factory=dict
    )
    compared: dict[State, Any] = dataclasses.field(default_factory=dict)


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
        self._linked: list[frozenset[Place]] = []  # whose rows fit only together
        self._groups: dict[tuple[Place, Rows], list[Group]] = {}
        self._wholes: dict[State, bool] = {(): True}
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
            ids = np.arange(start, self.num_ids, dtype=_OF_IDS)
            self.ids[0][path] = ids.reshape(shape)
        for number in range(len(self.plans) - 1):
            places = [place for place in self.places if place[0] == number]
            made = [self.moved_ids(place, self.rows((), place)) for place in places]
            self.ids.append(dict(itertools.chain(*(each.items() for each in made))))

    def rows(self, state: State, place: Place) -> Rows:
        """Return what is in the place of a row."""
        given = (self.plans[place[0]].rows[place[1]],)
        return dict(state).get(place, given)

    def groups(self, place: Place) -> list[Group]:
        """Return the groups of a row of the given table."""
        return self._groups[place, self.rows((), place)]

    def taken(self, place: Place) -> list[str]:
        """Return the paths of the leaves that a row of the given table takes."""
        plan, (row,) = self.plans[place[0]], self.rows((), place)
        if row.drops:
            moved = {path for group in plan.groups for path in group.source_paths}
            return [p for p in plan.source if row.takes(p) and p not in moved]
        return [*itertools.chain(*(g.source_paths for g in self.groups(place)))]

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
        units += [crossed] if crossed else []
        for linked in self._linked:
            ones = [unit for unit in units if not linked.isdisjoint(unit)]
            units = [unit for unit in units if linked.isdisjoint(unit)]
            pairs = itertools.chain(*(unit.items() for unit in ones))
            units += [dict(sorted(pairs, key=lambda pair: pair[0]))] if ones else []
        return units

    def place_that_takes(self, path: str) -> Place:
        """Return where the row is that takes a leaf of the source, or drops it."""
        places = ((0, number) for number in range(len(self.plans[0].rows)))
        return next(place for place in places if path in self.taken(place))

    def placed(
        self, every: Mapping[Place, Rows], sources: Iterable[str], leaves: Iterable[str]
    ) -> State | None:
        """Return a state with rows that fit only together; None if they do not fit.

        Args:
            every: rows by their place; none where the given one is gone.
            sources: paths of what they take.
            leaves: paths of what they make.
        """
        plan = self.plans[0]
        paths, wanted = dict.fromkeys(sources), {p: self.likes[p] for p in leaves}
        for place, rows in every.items():
            if self.rows((), place)[0] in rows:  # it keeps what the others leave
                paths |= dict.fromkeys(self.taken(place))
                wanted |= {
                    p: self.likes[p] for p in self.made(place, self.rows((), place))
                }
        pairs = [(place, row) for place, rows in every.items() for row in rows]
        pairs.sort(key=lambda pair: pair[1] is self.rows((), pair[0])[0])
        source, problems = {path: plan.source[path] for path in paths}, Problems()
        planned, _ = plan_groups(
            [r for _, r in pairs], plan.sizes, source, wanted, problems
        )
        made = {path: spec for group in planned for path, spec in group.specs.items()}
        if problems.texts or made.keys() != wanted.keys():
            return None
        if not all(fits(spec, wanted[path]) for path, spec in made.items()):
            return None
        for place, rows in every.items():
            self._groups[place, rows] = [
                g for g in planned if pairs[g.place][0] == place
            ]
        self._linked.append(frozenset(every))
        return self.edited((), every)

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
        paths = self.taken(place)
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
                if self._fits(place, edited, wanted, paths):
                    signature = self._signature(place, edited)
                    if signature not in signatures:
                        signatures.add(signature)
                        every.append(Alternative(edited, why))
        added = {p: it for p, it in plan.added.items() if can_be_shaken(it)}
        for path, like in added.items() if len(rows) == 1 else ():
            for each in tied(rows[0], path, plan.sizes):
                if self._fits(place, each.rows, {**wanted, path: like}, paths):
                    every.append(each)
        return every

    def _exchange(
        self, one: tuple[Place, Rows], two: tuple[Place, Rows]
    ) -> list[tuple[tuple[Rows, Rows], str]]:
        """Return what two rows would be, if both fit, with leaves of each other."""
        (place, rows), (other, others) = one, two
        if place[0] != other[0] or len(rows) != 1 or len(others) != 1:
            return []
        plan, wanted = self.plans[place[0]], (self.made(*one), self.made(*two))
        paths = self.taken(place), self.taken(other)
        shapes = [sorted(map(str, each.values())) for each in wanted]
        # Keys and integers pass on as they are.
        may_exchange_sources = all(
            can_be_shaken(plan.source[path]) for path in itertools.chain(*paths)
        )
        every: list[tuple[tuple[Rows, Rows], str]] = []
        for new, new_other, is_target in exchanges(rows[0], others[0], plan.sizes):
            if not (shapes[0] == shapes[1] if is_target else may_exchange_sources):
                continue
            pairs = (place, new), (other, new_other)
            made = wanted[::-1] if is_target else wanted
            # A row may match leaves of the other, too: see ``_in_order``.
            taken = paths if is_target else paths[::-1]
            if all(
                self._fits(at, (row,), likes, some)
                for (at, row), likes, some in zip(pairs, made, taken, strict=True)
            ):
                side = "targets" if is_target else "sources"
                every.append((((new,), (new_other,)), f"two {side} exchanged"))
        return every

    def _fits(
        self, place: Place, rows: Rows, wanted: Mapping[str, Any], paths: Iterable[str]
    ) -> bool:
        """Return whether rows make leaves of some shapes, and remember how.

        Args:
            place: where the rows are.
            rows: in the place of one of the given table.
            wanted: shapes and dtypes by path.
            paths: of leaves that they are to take.
        """
        plan = self.plans[place[0]]
        if (place, rows) not in self._groups:
            source = {path: plan.source[path] for path in paths}
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
            values = dataclasses.replace(
                group.move.values, scale=1.0, offset=0.0, cast=()
            )
            move = dataclasses.replace(group.move, values=values, dtype=_OF_IDS)
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

    def params(self, case: Case, state: State) -> dict[str, Any] | None:
        """Return what a table makes; None if the numbers contradict it."""
        leaves = case.leaves
        every = dict.fromkeys([*self.places, *dict(state)])
        for number, plan in enumerate(self.plans):
            likes = self.likes if number == len(self.plans) - 1 else {}
            result: dict[str, Any] = {}
            for path, how in plan.new.items():
                like = plan.added[path]
                zeros = np.zeros(like.shape, like.dtype) if how == "zeros" else None
                result[path] = likes[path] if zeros is None else zeros
            for place in (place for place in every if place[0] == number):
                key = place, self.rows(state, place)
                made = {} if number else case.remembered.get(key, {})
                try:
                    for group in self._groups[key] if not made else ():
                        filling = likes if group.row.values.fills else {}
                        made |= run_group(group, leaves, filling)
                except MigrationError:
                    return None
                result |= made
                if not number:
                    case.remembered[key] = made
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
            rows = self._in_order(state, places)
            changed = [pair for pair in state if pair[0][0] == number]
            filled = {path for pair in changed for path in self.made(*pair)}
            names = {name for row in rows for name in row.names}
            sizes = {name: size for name, size in plan.sizes.items() if name in names}
            new = {p: how for p, how in table._new.items() if p not in filled}
            typed = [row.typed() for row in rows]
            tables.append(Migration(typed, sizes=sizes, new=new))
        return functools.reduce(Migration.then, tables)

    def is_whole(self, state: State) -> bool:
        """Return whether the migration that a state means can be written."""
        if state not in self._wholes:
            try:
                built = self.built(state)
                _, problems = built.planned(self.plans[0].source, self.likes)
                self._wholes[state] = not problems.texts
            except MigrationError:
                self._wholes[state] = False
        return self._wholes[state]

    def _in_order(self, state: State, places: Iterable[Place]) -> list[Row]:
        """Return the rows of a table, the narrower before one that takes its leaves."""
        rows: list[tuple[Row, list[str]]] = []
        for place in places:
            for row in self.rows(state, place):
                groups = self._groups.get((place, self.rows(state, place)), [])
                taken = (g.source_paths for g in groups if g.row is row)
                rows.append((row, [*itertools.chain(*taken)]))
        for _ in range(len(rows) if state else 0):
            stray = next(
                (
                    (wide, narrow)
                    for narrow, (_, paths) in enumerate(rows)
                    for wide in range(narrow)
                    if paths
                    and any(map(rows[wide][0].takes, paths))
                    and not any(map(rows[narrow][0].takes, rows[wide][1]))
                ),
                None,
            )
            if stray is None:
                break
            wide, narrow = stray
            rows.insert(wide, rows.pop(narrow))
        return [row for row, _ in rows]


def can_be_shaken(leaf: Any) -> bool:
    """Return whether a leaf is an array of numbers that can be other ones."""
    return is_array(leaf) and is_inexact_dtype(leaf.dtype)
