"""Chains: tables that are planned one after the other.

Each table takes what the one before makes. Names and shapes between two of them need
not exist anywhere: they are what the earlier tables make of the source, and what the
rows of the later ones, read backwards, make of the target. That solves sizes, and is
never compared, because a leaf may be missing there: a row with no way back shows none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from treeadapt.migrations.files import BaseTable
from treeadapt.migrations.group import Group, size_bytes
from treeadapt.migrations.groups import MAX_GROWTH, MAX_MORE_BYTES
from treeadapt.migrations.moved_array import moved_arrays
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.migrations.plan_text import explanation
from treeadapt.migrations.planning import compare_target, plan_groups
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Address, Row
from treeadapt.migrations.run_group import is_moved, run_group, spec_of
from treeadapt.migrations.templates import PathsByCapture
from treeadapt.text.names import listing, plural, size_text
from treeadapt.trees.arrays import is_array

Node = TypeVar("Node", bound=Hashable)

#: What is wrong with a table because an earlier one is.
_FOLLOWING = ("unused", "torn", "missing", "extra", "idle")


@dataclasses.dataclass
class Between:
    """What the target shows of the leaves between two tables.

    Attributes:
        later: of the leaves that the next table makes; None after the last table.
        plan: of the next table; None after the last one.
        leaves: shapes and dtypes by path; after the last table the target's own leaves.
        groups: of the rows of the next table read backwards: what makes each leaf.
        failed: places of rows of the next table, of which groups have no way back here.
    """

    later: Between | None = None
    plan: MigrationPlan | None = None
    leaves: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    groups: Mapping[str, Group] = dataclasses.field(default_factory=dict)
    failed: frozenset[int] = frozenset()

    def led_back(self, plan: MigrationPlan) -> Between:
        """Return what the rows of a plan, read backwards, show of the leaves before it.

        A leaf is shown only if its row takes it there and back.
        """
        places = [place for place, _ in plan.backwards]
        rows = [row for _, row in plan.backwards]
        likes = {p: spec_of(leaf) for p, leaf in self.leaves.items() if is_moved(leaf)}
        problems = Problems()
        groups, _ = plan_groups(
            rows, plan.sizes, likes, plan.source, problems, has_place=_anywhere
        )
        owners = plan.places([path for group in groups for path in group.filled])
        by_path = {
            path: group
            for group in groups
            for path, spec in group.specs.items()
            if spec is not None and owners.get(path) == places[group.place]
        }
        failed = {places[rows.index(row)] for row, _ in problems.failed}
        failed |= {*range(len(plan.rows))} - {*places}
        failed |= {places[group.place] for group in groups if group.row.function}
        return Between(
            self,
            plan,
            {path: group.specs[path] for path, group in by_path.items()},
            by_path,
            frozenset(place for place in failed if place is not None),
        )

    def has_place(self, address: Address, captures: Mapping[str, Any]) -> bool:
        """Return whether there may be something at an address."""
        if self._places.has(address.path, captures):
            return True
        if self.later is None or self.plan is None:
            return False
        numbers = {name: captures.get(name, 0) for name in address.path.names}
        path = address.path.fill(numbers, dict.fromkeys(numbers, 1))
        place = self.plan.places([path]).get(path)
        if place is None or self.plan.rows[place].drops:
            return False
        if place in self.failed:
            return True  # nothing shows what it takes
        row = self.plan.rows[place]
        matches = (source.path.match(path) for source in row.sources)
        inner = next(match for match in matches if match is not None)
        return any(self.later.has_place(target, inner) for target in row.targets)

    @functools.cached_property
    def _places(self) -> PathsByCapture:
        return PathsByCapture(self.leaves)

    def _makers(self, paths: Sequence[str]) -> Iterable[Group]:
        """Return the groups that make leaves, each once."""
        groups = [self.groups[path] for path in paths if path in self.groups]
        return {id(group): group for group in groups}.values()

    def values(self, paths: Sequence[str]) -> dict[str, Any]:
        """Return leaves of the target, led back to be leaves between the tables.

        Args:
            paths: of these, as far as the target shows them.
        """
        if self.later is None:
            return {path: self.leaves[path] for path in paths}
        values: dict[str, Any] = {}
        for group in self._makers(paths):
            leaves = self.later.values([*group.source_paths])
            values |= run_group(group, leaves, {})
        return values

    def origins(self, paths: Sequence[str]) -> list[str]:
        """Return the leaves of the target of which ``values`` makes some leaves."""
        if self.later is None:
            return [*paths]
        sources = itertools.chain(*(it.source_paths for it in self._makers(paths)))
        return self.later.origins([*dict.fromkeys(sources)])


@dataclasses.dataclass(frozen=True, repr=False)
class ChainPlan:
    """What a chain of tables does with the leaves of one source.

    What it has of a ``MigrationPlan`` is that of the whole; rows are numbered through.

    Attributes:
        tables: the plan of each table.
        shown: what the target shows of the leaves that each table makes.
    """

    tables: tuple[MigrationPlan, ...]
    shown: tuple[Between, ...]

    @property
    def source(self) -> Mapping[str, Any]:
        """The leaves of the source, by path."""
        return self.tables[0].source

    @property
    def result(self) -> dict[str, Any]:
        """Shape and dtype of each leaf of the result; None where a function decides."""
        return self.tables[-1].result

    @property
    def new(self) -> Mapping[str, str]:
        """Paths that the last table adds, and what fills them."""
        return self.tables[-1].new

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all tables."""
        return tuple(itertools.chain(*(plan.rows for plan in self.tables)))

    @property
    def dropped(self) -> tuple[str, ...]:
        """Paths of leaves of the source of which nothing is in the result."""
        used = {*self.sources_of(len(self.tables), self.result)}
        return tuple(path for path in self.source if path not in used)

    @property
    def exact(self) -> bool:
        """Whether the way back could give every array bit for bit."""
        return all(plan.exact for plan in self.tables)

    @functools.cached_property
    def one_way(self) -> tuple[str, ...]:
        """Paths of the result that the inverse does not lead back to their sources."""
        strays: set[str] = set()
        for number, plan in enumerate(self.tables):
            strays = {*plan.one_way, *self._across(number, strays, 1)}
        return tuple(path for path in self.result if path in strays)

    @functools.cached_property
    def noted(self) -> dict[str, str]:
        """What of ``one_way`` gives the same answers back, and why, by path."""
        noted: dict[str, str] = {}
        strays: set[str] = set()
        for number, plan in enumerate(self.tables):
            lost = {path for path in plan.one_way if path not in plan.noted}
            strays = {*lost, *self._across(number, strays, 1)}
            befores = [(r, [*self._across(number, [p], 1)]) for p, r in noted.items()]
            noted = {path: reason for reason, paths in befores for path in paths}
            noted |= plan.noted
        return {path: reason for path, reason in noted.items() if path not in strays}

    @functools.cached_property
    def repeatable(self) -> bool:
        """Whether the tables would take the result again."""
        specs: Mapping[str, Any] = self.result
        for plan in self.tables:
            problems = Problems()
            known = {path: spec for path, spec in specs.items() if spec is not None}
            groups, _ = plan_groups(plan.rows, plan.sizes, known, None, problems)
            if problems.texts:
                return False
            specs = {
                path: spec for group in groups for path, spec in group.specs.items()
            }
        return True

    @functools.cached_property
    def gathered(self) -> tuple[str, ...]:
        """Paths whose shards need more than their own part of the sources."""
        arrays: dict[str, Any] = dict(self.source)
        for plan in self.tables[:-1]:
            made = (moved_arrays(group, arrays, {}) for group in plan.groups)
            arrays = {
                path: it for each in (*made, plan.added) for path, it in each.items()
            }
        return self.tables[-1].gathered_from(arrays)

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Bytes of the groups that hang together, of those that are the largest."""
        units = units_of(self.tables)
        sizes = (sum(p.bytes_of(group) for p, group in unit) for unit in units)
        return max(sizes, default=0)

    @functools.cached_property
    def swappable(self) -> dict[int, tuple[tuple[str, str], ...]]:
        """What could be swapped without changing a shape, in pairs, by row."""
        return {
            start + place: pairs
            for start, plan in self._numbered
            for place, pairs in plan.swappable.items()
        }

    @property
    def bases(self) -> tuple[BaseTable, ...]:
        """The published tables that the rows of tables begin with."""
        return tuple(itertools.chain(*(plan.bases for plan in self.tables)))

    @property
    def unread(self) -> tuple[str, ...]:
        """What only values show, and what is therefore not checked on shapes."""
        return tuple(itertools.chain(*(plan.unread for plan in self.tables)))

    @property
    def idle(self) -> tuple[int, ...]:
        """Places of rows that match nothing here, and need not."""
        every = self._numbered
        return tuple(start + place for start, plan in every for place in plan.idle)

    def without_values(self, likes: Mapping[str, Any]) -> list[str]:
        """Return paths of which numbers of a target are needed, and it has none.

        Args:
            likes: leaves of the target, by path.
        """
        paths = self.tables[-1].without_values(likes)
        for plan, between in zip(self.tables[:-1], self.shown, strict=False):
            needed = plan.without_values({})
            paths += [path for path in needed if path not in between.groups]
            origins = between.origins(needed)
            paths += [path for path in origins if not has_values(likes.get(path))]
        return [*dict.fromkeys(paths)]

    def likes(self, place: int) -> Mapping[str, Any]:
        """Return what one table is shown of a target: values where it needs them."""
        between, plan = self.shown[place], self.tables[place]
        if between.later is None:
            return between.leaves
        return {**between.leaves, **between.values(plan.without_values({}))}

    @property
    def _numbered(self) -> list[tuple[int, MigrationPlan]]:
        """Each plan, with the place of its first row."""
        counts = itertools.accumulate((len(p.rows) for p in self.tables), initial=0)
        return [*zip(counts, self.tables, strict=False)]

    def sources_of(self, number: int, paths: Iterable[str]) -> list[str]:
        """Return the leaves of the source of which leaves after some tables are made.

        Args:
            number: of these tables, from the first.
            paths: of the leaves.
        """
        for table in reversed(range(number)):
            paths = self._across(table, paths, -1)
        return [*paths]

    def explanation(self, path: str) -> Iterator[str]:
        """Yield what each table does with a leaf, or makes it of."""
        levels = [table.source for table in self.tables] + [self.result]
        at = next((n for n, leaves in enumerate(levels) if path in leaves), 0)
        paths = {at: [path]}  # what it is, or was, after so many tables
        for number in range(at, len(self.tables)):
            paths[number + 1] = self._across(number, paths[number], 1)
        for number in reversed(range(at)):
            paths[number] = self._across(number, paths[number + 1], -1)
        for number, (start, plan) in enumerate(self._numbered):
            near = paths[number + (number < at)]
            named = {*near}
            firsts: dict[Any, str] = {}  # of each row
            for group in plan.groups:
                side = group.filled if number < at else group.source_paths
                if one := next((path for path in side if path in named), None):
                    firsts.setdefault(group.place, one)
            firsts |= {p: p for p in near if p in plan.dropped or p in plan.new}
            every = (explanation(plan, one, start) for one in firsts.values())
            lines = [*itertools.chain(*every)]
            if lines:
                yield f"table {number + 1} of {len(self.tables)}"
                yield from lines

    def _across(self, number: int, paths: Iterable[str], step: int) -> list[str]:
        """Return what one table makes of leaves, or what these are made of.

        Args:
            number: of the table.
            paths: of the leaves.
            step: 1 from sources to targets, -1 back.
        """
        named = {*paths}
        groups = self.tables[number].groups
        sides = ((group.source_paths, group.filled)[::step] for group in groups)
        every = (far for near, far in sides if not named.isdisjoint(near))
        return [*itertools.chain(*every)]

    def __repr__(self) -> str:
        count, lines = len(self.tables), []
        for number, plan in enumerate(self.tables, 1):
            lines += [f"table {number} of {count}", repr(plan)]
        return "\n".join([*lines, self._remark])

    def _repr_html_(self) -> str:
        """Return the plans of the tables for a notebook."""
        tables = "".join(plan._repr_html_() for plan in self.tables)
        return f"{tables}<div>{self._remark}</div>"

    @property
    def _remark(self) -> str:
        words = "exact" if self.exact else "not exact"
        size = f"{size_text(self.peak_bytes)} for the groups that hang together"
        return f"all {len(self.tables)} tables: {words}; {size}"


def units_of(
    plans: Sequence[MigrationPlan],
) -> list[list[tuple[MigrationPlan, Group]]]:
    """Return groups that hang together, because one takes what another makes.

    Args:
        plans: of tables that follow each other.
    """
    every = [(plan, group) for plan in plans for group in plan.groups]
    places = itertools.count()
    links: list[tuple[int, int]] = []
    makers: dict[str, int] = {}  # of what the table before makes
    for plan in plans:
        made: dict[str, int] = {}
        for group in plan.groups:
            place = next(places)
            links += [(place, makers[x]) for x in group.source_paths if x in makers]
            made |= dict.fromkeys(group.filled, place)
        makers = made
    roots = roots_of(links)
    units: dict[int, list[tuple[MigrationPlan, Group]]] = {}
    for place, pair in enumerate(every):
        units.setdefault(roots.get(place, place), []).append(pair)
    return [*units.values()]


def roots_of(pairs: Iterable[Iterable[Node]]) -> dict[Node, Node]:
    """Return for each of some nodes one that stands for all that hang together."""
    parents: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while parents.setdefault(node, node) != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for one, two in pairs:
        parents[root(one)] = root(two)
    return {node: root(node) for node in parents}


def has_values(leaf: Any) -> bool:
    """Return whether a target has numbers of a leaf."""
    return leaf is not None and not isinstance(leaf, jax.ShapeDtypeStruct)


def plan_chain(
    tables: Sequence[Any],
    leaves: Mapping[str, Any],
    likes: Mapping[str, Any] | None,
    *,
    compares: bool,
) -> tuple[ChainPlan, Problems]:
    """Plan tables one after the other, and say what is wrong.

    Args:
        tables: each a ``Migration``, in order.
        leaves: of the source, by path.
        likes: of the target, by path; None without one.
        compares: whether the result must fit the target.

    Raises:
        MigrationError: a target is needed.
    """
    shown = [Between() for _ in tables[1:]] + [Between(leaves=likes or {})]
    seen = -1
    while True:
        plan, problems = _forwards(tables, leaves, likes, shown)
        count = sum(len(each.leaves) + len(each.groups) for each in shown)
        if likes is None or count == seen:
            break
        seen = count
        for place in reversed(range(1, len(tables))):
            shown[place - 1] = shown[place].led_back(plan.tables[place])
    last = plan.tables[-1]
    if compares and likes is not None:
        compare_target(last.groups, last.new, likes, problems[-1])
    return plan, _joined(plan, problems)


def _forwards(
    tables: Sequence[Any],
    leaves: Mapping[str, Any],
    likes: Mapping[str, Any] | None,
    shown: Sequence[Between],
) -> tuple[ChainPlan, list[Problems]]:
    """Plan each table for what the one before makes, as far as that is known."""
    plans, every = [], []
    most_bytes = MAX_MORE_BYTES + MAX_GROWTH * _bytes_of(leaves)
    for table, between in zip(tables, shown, strict=True):
        known = likes if between.later is None else between.leaves
        plan, problems = table.planned(
            leaves,
            None if likes is None else known,
            has_place=between.has_place if between is not shown[-1] else None,
        )
        plans.append(plan)
        every.append(problems)
        leaves = dict(plan.result)
        for path in [path for path, spec in leaves.items() if spec is None]:
            leaves[path] = between.leaves.get(path)
            if leaves[path] is None and between is not shown[-1]:
                text = f"{listing([path])}: a function makes it, and no target shows it"
                problems.add("unknown", text, paths=[path])
                del leaves[path]
        is_shown = likes is not None and between is shown[-1]
        if not is_shown and _bytes_of(leaves) > most_bytes:
            text = f"{plural(len(leaves), 'leaf')} of {size_text(_bytes_of(leaves))}; "
            text += f"at most {MAX_GROWTH} times the bytes of the source"
            problems.add("large", f"{text}, and {size_text(MAX_MORE_BYTES)} more")
            break
    return ChainPlan(tuple(plans), tuple(shown)), every


def _joined(plan: ChainPlan, every: Sequence[Problems]) -> Problems:
    """Return the problems of all tables, each with the number of its table."""
    joined = Problems(origin=every[0].origin)
    count = len(plan.shown)
    for number, problems in enumerate(every, 1):
        follows = bool(joined.texts)
        earlier = plan.tables[number - 2 : number - 1]
        groups = itertools.chain(*(each.groups for each in earlier))
        made = {*itertools.chain(*(group.filled for group in groups))}
        for kind, causes in problems.texts.items():
            if follows and kind in _FOLLOWING:
                continue
            for text, cause in causes.items():
                note = f" (table {number} of {count}"
                if name := next(filter(made.__contains__, cause.leaves), None):
                    sources = listing(plan.sources_of(number - 1, [name]), limit=2)
                    note += f"; {listing([name])} is made of {sources}"
                cause = cause._replace(is_early=number < count)
                joined.add(kind, f"{text}{note})", **cause._asdict())
        joined.advice += problems.advice if not follows else []
    return joined


def _bytes_of(leaves: Mapping[str, Any]) -> int:
    return sum(size_bytes(leaf) for leaf in leaves.values() if is_array(leaf))


def _anywhere(*_: Any) -> bool:
    return True
