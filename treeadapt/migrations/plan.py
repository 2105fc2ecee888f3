"""Plans: what a migration would do, before any array is read.

Knows facts; ``plan_text`` writes what is printed of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.migrations.counts import Count
from treeadapt.migrations.files import BaseTable
from treeadapt.migrations.group import Group, shape_of, size_bytes
from treeadapt.migrations.moved_array import gathered
from treeadapt.migrations.plan_text import explanation, plan_html, plan_text
from treeadapt.migrations.planning import assign, plan_groups
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row
from treeadapt.migrations.swappable import swappable
from treeadapt.migrations.templates import BELOW
from treeadapt.text.names import listing
from treeadapt.trees.arrays import is_array

#: Numbers that fill leaves which the source lacks.
BLANKS = {"zeros": 0, "ones": 1}

#: What fills leaves in an inverse that a row drops: a target, if it has them.
DROPPED = "dropped"
_SPELLING = "another spelling, unless a target has this one"
_NOTHING = jax.ShapeDtypeStruct((), jnp.bool_)


@dataclasses.dataclass(frozen=True, repr=False)
class MigrationPlan:
    """What a migration does with the leaves of one source.

    Attributes:
        groups: leaves that move together, in the order of the result.
        dropped: paths of leaves that have no place in the result.
        new: paths that the source lacks, and what fills them: ``"zeros"``, ``"ones"``,
            ``"target"``, or ``"dropped"`` for a target's leaf that the way there drops.
        lost: what is dropped on the way there, and no target has, as patterns.
        added: shapes and dtypes of these leaves.
        static: paths of functions and other leaves that are not numbers, which are not
            in the result.
        source: the leaves of the source, by path.
        rows: the table.
        undone: rows that drop, in the inverse, what is new.
        sizes: sizes that hold in the whole table.
        shardings: of leaves of the target, by path.
        bases: the published table that the rows begin with, if there is one.
        counts: of layers and experts that there should be.
    """

    groups: tuple[Group, ...]
    dropped: tuple[str, ...]
    new: Mapping[str, str]
    lost: tuple[str, ...]
    added: Mapping[str, Any]
    static: tuple[str, ...]
    source: Mapping[str, Any]
    rows: tuple[Row, ...]
    undone: tuple[Row, ...]
    sizes: Mapping[str, int]
    shardings: Mapping[str, Any]
    bases: tuple[BaseTable, ...] = ()
    counts: tuple[Count, ...] = ()

    @property
    def kept(self) -> list[str]:
        """Paths that the way there drops, and that are kept of the target."""
        return [path for path, filling in self.new.items() if filling == DROPPED]

    @property
    def tables(self) -> tuple[MigrationPlan, ...]:
        """The plan of each table of a chain: this one."""
        return (self,)

    @functools.cached_property
    def backwards(self) -> tuple[tuple[int | None, Row], ...]:
        """The rows of its inverse, as far as they lead back, with their places here.

        The place is None of one that drops what is new.
        """
        return read_backwards(self.rows, self.undone)

    def places(self, paths: Sequence[str]) -> dict[str, int]:
        """Return the place of the row that takes each path, as far as one does."""
        by_row, _ = assign(self.rows, paths, Problems())
        return {each.path: n for n, every in enumerate(by_row) for each in every}

    @functools.cached_property
    def result(self) -> dict[str, Any]:
        """Shape and dtype of each leaf of the result; None where a function decides."""
        specs = (group.specs.items() for group in self.groups)
        return dict(itertools.chain(*specs, self.added.items()))

    @property
    def _known_result(self) -> dict[str, Any]:
        specs = self.result.items()
        return {path: _NOTHING if spec is None else spec for path, spec in specs}

    @property
    def exact(self) -> bool:
        """Whether the way back could give every array bit for bit.

        Nothing is dropped, rounded or given to a function, and no cast takes the NaNs
        of a dtype for one another.
        """
        firsts = (self.source[next(group.source_paths)] for group in self.groups)
        return not self.dropped and all(map(_is_exact, self.groups, firsts))

    @functools.cached_property
    def one_way(self) -> tuple[str, ...]:
        """Paths of the result that the inverse does not lead back to their sources."""
        return tuple(dict.fromkeys((*self._strays, *self.noted)))

    @functools.cached_property
    def _strays(self) -> tuple[str, ...]:
        """Paths of the result that the inverse leads elsewhere, with any target."""
        places = [place for place, _ in self.backwards]
        rows = [row for _, row in self.backwards]
        groups, dropped = plan_groups(
            rows, self.sizes, self._known_result, self.source, Problems()
        )
        origins = {
            path: (places[group.place], tuple(sorted(group.filled)))
            for group in groups
            for path in group.source_paths
        }
        strays = (
            path
            for group in self.groups
            for path in group.filled
            if origins.get(path) != (group.place, tuple(sorted(group.source_paths)))
        )
        return (*strays, *(path for path in self.added if path not in dropped))

    @functools.cached_property
    def noted(self) -> dict[str, str]:
        """Paths in ``one_way`` of which the way back gives the same answers, and why.

        A sum goes to the first of its sources, and the others get zeros.
        """
        noted = {
            path: "the first summand gets the sum, and the others zeros"
            for group in self.groups
            if group.row.values.add and not group.row.values.undoes
            for path in group.filled
        }
        places = {path: g.place for g in self.groups for path in g.filled}
        by_row, _ = assign([row for _, row in self.backwards], [*places], Problems())
        for (place, row), matches in zip(self.backwards, by_row, strict=True):
            for path in (match.path for match in matches):
                is_spelled = place is not None and row.notes.optional is True
                if is_spelled and places[path] != place and path not in self._strays:
                    noted[path] = _SPELLING
        for group in self.groups:
            row, path = self.rows[group.place], group.sources[0][0]
            captures = (row.spellings and row.sources[0].path.match(path)) or {}
            texts = row.spellings.items()
            if any(captures.get(name, each[0]) != each[0] for name, each in texts):
                noted |= dict.fromkeys(group.filled, _SPELLING)
        return noted

    @functools.cached_property
    def idle(self) -> tuple[int, ...]:
        """Places in ``rows`` of those that drop leaves and have none to drop here."""
        rows = {place: row for place, row in enumerate(self.rows) if row.drops}
        paths = frozenset(self.dropped)
        takers = ((n for n in rows if rows[n].takes(each)) for each in paths)
        used = {next(each, None) for each in takers}
        return tuple(n for n in rows if n not in used and not rows[n].is_spare)

    @functools.cached_property
    def repeatable(self) -> bool:
        """Whether the rows would take the result again, so that a second run passes."""
        problems = Problems()
        plan_groups(self.rows, self.sizes, self._known_result, None, problems)
        return not problems.texts

    @functools.cached_property
    def gathered(self) -> tuple[str, ...]:
        """Paths whose shards need more than their own part of the sources.

        An axis of several names is cut across them; the row cuts off zeros, nests parts
        in an axis or has a function; or the parts of all arrays of a group cost more
        than to read its sources once. Each process that has such a shard reads more, up
        to all sources.
        """
        return self.gathered_from(dict(self.source))

    def gathered_from(self, sources: dict[str, Any]) -> tuple[str, ...]:
        """Return ``gathered`` for sources that an earlier table makes.

        Args:
            sources: shapes and dtypes by path, or ``MovedArray`` of shapes.
        """
        costs: dict[Any, tuple[float, bool]] = {}
        paths: list[str] = []
        for group in self.groups:
            shards = {
                path: shard
                for path, spec in group.specs.items()
                if (shard := _shard_shape(self.shardings.get(path), spec)) is not None
            }
            paths += gathered(group, sources, shards, costs)
        return tuple(paths)

    def without_values(self, likes: Mapping[str, Any]) -> list[str]:
        """Return paths of which numbers of a target are needed, and it has none.

        Args:
            likes: leaves of the target, by path.
        """
        groups = (group for group in self.groups if group.row.values.fills)
        paths = [path for path, filling in self.new.items() if filling not in BLANKS]
        every = (*paths, *itertools.chain(*(group.filled for group in groups)))
        return [
            path
            for path in every
            if isinstance(likes.get(path), jax.ShapeDtypeStruct | None)
        ]

    @property
    def peak_bytes(self) -> int:
        """Bytes of the sources and targets of the largest group."""
        return max(map(self.bytes_of, self.groups), default=0)

    def bytes_of(self, group: Group) -> int:
        """Return the bytes of the sources and targets of one group."""
        specs = (
            *map(self.source.__getitem__, group.source_paths),
            *group.specs.values(),
        )
        return sum(map(size_bytes, filter(is_array, specs)))

    def explanation(self, path: str) -> Iterator[str]:
        """Yield what is done with a leaf, or what it is made of."""
        return explanation(self, path)

    @functools.cached_property
    def swappable(self) -> dict[int, tuple[tuple[str, str], ...]]:
        """What could be swapped without changing a shape, in pairs, by row.

        Names of axes, or of one number ``{(b i)}``; a composed axis and another one of
        its size, as ``("(h d)", "e")``; parts of a bracket with one size, as
        ``("part 2", "part 3")``; and the texts of a list that becomes an axis, as
        ``("p", "p")``. No check of shapes can find such a mistake. Lint the table on
        models whose sizes are all different primes.
        """
        pairs: dict[int, dict[tuple[str, str], None]] = {}
        for group in {(g.place, g.move): g for g in self.groups}.values():
            pairs.setdefault(group.place, {}).update(dict.fromkeys(swappable(group)))
        left = {
            place: tuple(
                pair
                for pair in swaps
                if not _names_in(pair) <= {*self.rows[place].notes.checked}
            )
            for place, swaps in pairs.items()
        }
        return {place: swaps for place, swaps in left.items() if swaps}

    @property
    def unread(self) -> tuple[str, ...]:
        """What only values show, and what is therefore not checked on shapes."""
        texts = []
        for row in {group.place: group.row for group in self.groups}.values():
            checks = {
                "its sources must be equal": row.compares,
                "its repeats must be equal": row.values.repeats(is_source=True),
                "what it cuts off must be zero": row.values.cuts_zeros,
                "its values must fit their dtype": row.values.computes
                or row.values.multiply
                or row.values.cast,
                "a function decides what it makes": row.function is not None,
            }
            due = (text for text, is_due in checks.items() if is_due)
            texts += [f"{listing([row.text])}: {text}" for text in due]
        return tuple(texts)

    @property
    def by_row(self) -> Iterator[tuple[Row, list[Group]]]:
        """Yield each row with the groups that it makes."""
        groups_of: dict[int, list[Group]] = {}
        for group in self.groups:
            groups_of.setdefault(group.place, []).append(group)
        for place, row in enumerate(self.rows):
            yield row, groups_of.get(place, [])

    def __repr__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        """Return the plan for a notebook."""
        return plan_html(self)


def read_backwards(
    rows: Sequence[Row], added: Iterable[Row]
) -> tuple[tuple[int | None, Row], ...]:
    """Return the rows of an inverse, with the places of those that they undo.

    Args:
        rows: the table; those that cannot be read backwards are left out.
        added: rows that drop what it adds: a path before anything else, and what a
            pattern matches if it has no other place.
    """
    pairs = (
        (place, row.reversed()) for place, row in enumerate(rows) if leads_back(row)
    )
    first: list[tuple[int | None, Row]] = []
    last: list[tuple[int | None, Row]] = []
    for row in added:
        if any({*each.path.captures} - {BELOW} for each in row.sources):
            last.append((None, dataclasses.replace(row, is_spare=True)))
        else:
            first.append((None, row))
    return (*first, *pairs, *last)


def leads_back(row: Row) -> bool:
    """Return whether a row can be read backwards."""
    has_way = row.function is None or row.inverse is not None
    is_lossy = row.values.multiply or row.selects
    return has_way and not (row.drops or row.lost or is_lossy)


def _is_exact(group: Group, spec: Any) -> bool:
    values = group.row.values
    is_cut = values.fill and values.undoes
    is_computed = values.computes or values.multiply
    if group.row.function is not None or is_computed or is_cut or group.selected:
        return False
    if group.move is None:
        return True
    old, new = spec.dtype, group.move.dtype
    if old == new:
        return True
    # NumPy takes floats of 8 bits for one another, though none holds them all.
    is_wider = new.itemsize > old.itemsize or jnp.issubdtype(new, jnp.integer)
    return bool(is_wider and np.can_cast(old, new)) and _count_of_nan(old) <= 1


@functools.lru_cache(maxsize=256)
def _count_of_nan(dtype: Any) -> float:
    """Return how many NaNs a dtype has, which come back of a cast as one of them."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    bits = jnp.finfo(dtype).bits
    if bits > 16:
        return math.inf
    with np.errstate(invalid="ignore"):
        every = np.arange(2**bits, dtype=f"uint{8 * dtype.itemsize}").view(dtype)
        return int(np.isnan(every).sum())


def _shard_shape(sharding: Any, spec: Any) -> tuple[int, ...] | None:
    """Return the shape of each shard, () if that is unknown; None without shards."""
    if sharding is None or spec is None:
        return None if sharding is None or sharding.num_devices == 1 else ()
    try:
        shape = tuple(sharding.shard_shape(shape_of(spec)))
    except ValueError:  # it does not divide the shape, which is an error elsewhere
        return None
    return None if shape == shape_of(spec) else shape


def _names_in(pair: Iterable[str]) -> set[str]:
    """Return the names of a pair: ``(h d)`` has two."""
    return {name for text in pair for name in text.strip("()").split(" ")}
