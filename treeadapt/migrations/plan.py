"""Plans: what a migration would do, before any array is read.

``explanation`` gives lines about one leaf, of the source or of the result.
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

from treeadapt.migrations.axes import REST
from treeadapt.migrations.counts import Count
from treeadapt.migrations.files import BaseTable
from treeadapt.migrations.group import Group, shape_of, size_bytes
from treeadapt.migrations.moved_array import gathered
from treeadapt.migrations.planning import assign, plan_groups
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Address, Row
from treeadapt.migrations.swappable import swappable
from treeadapt.migrations.take import plain_name
from treeadapt.migrations.templates import BELOW
from treeadapt.text.html_table import html_table
from treeadapt.text.names import fold, listing, plural, size_text
from treeadapt.trees.arrays import is_array
from treeadapt.trees.paths import SEPARATOR

#: Numbers that fill leaves which the source lacks.
BLANKS = {"zeros": 0, "ones": 1}

#: What fills leaves in an inverse that a row drops: a target, if it has them.
DROPPED = "dropped"
_WIDTH = 88
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
        backwards: the rows of its inverse, as far as they lead back, each with its
            place in ``rows``; None for one that drops what is new.
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
    backwards: tuple[tuple[int | None, Row], ...]
    sizes: Mapping[str, int]
    shardings: Mapping[str, Any]
    bases: tuple[BaseTable, ...] = ()
    counts: tuple[Count, ...] = ()

    @property
    def tables(self) -> tuple[MigrationPlan, ...]:
        """The plan of each table of a chain: this one."""
        return (self,)

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

    def __repr__(self) -> str:
        lines = [self._title]
        for text, counts, remarks in self._row_texts:
            line = f"{text}: {counts}" if counts else text
            is_short = len(line) <= _WIDTH
            lines.append(line if is_short else line.replace(" -> ", "\n    -> ", 1))
            lines += [f"    {remark}" for remark in remarks]
        return "\n".join([*lines, *self._remarks])

    def _repr_html_(self) -> str:
        """Return the plan for a notebook."""
        rows = (
            (number, *text.split(" -> ", 1), counts, "\n".join(remarks))
            for number, (text, counts, remarks) in enumerate(self._row_texts, 1)
        )
        head = ("row", "source", "target", "arrays", "remarks")
        return html_table(self._title, head, rows, self._remarks)

    @property
    def _title(self) -> str:
        counts = plural(len(self.source), "leaf"), plural(len(self.result), "leaf")
        verb = "becomes" if len(self.source) == 1 else "become"
        return f"{counts[0]} {verb} {counts[1]}."

    @property
    def _remarks(self) -> list[str]:
        """What is to be said of the whole, as lines."""
        lines = [
            f"new {listing([path])}: {how}"
            for path, how in self.new.items()
            if how != DROPPED
        ]
        if kept := [path for path, how in self.new.items() if how == DROPPED]:
            text = f"{plural(len(kept), 'leaf')} dropped before, kept of the target"
            lines.append(f"{text}: {listing(fold(kept))}")
        if self.lost:
            text = f"{plural(len(self.lost), 'pattern')} of leaves dropped before"
            lines.append(f"{text}, in no target: {listing(self.lost)}")
        if self.static:
            names = listing(self.static)
            lines.append(f"not arrays, and left out: {names}")
        words = "exact" if self.exact else "not exact"
        lines.append(
            f"{words}; {size_text(self.peak_bytes)} for the largest group"
            f"{'; a second run would pass' if self.repeatable else ''}"
        )
        lost = [path for path in self.one_way if path not in self.noted]
        if lost:
            names = listing(fold(lost))
            lines.append(f"{plural(len(lost), 'leaf')} with no way back: {names}")
        lines += (*noted_lines(self), *unstated_lines(self))
        if self.gathered:
            names = listing(fold(self.gathered))
            lines.append(f"whole sources for each part of {names}")
        return [*lines, *(f"not checked on shapes: {text}" for text in self.unread)]

    @property
    def _row_texts(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield of each row its addresses, how many arrays it moves, and remarks."""
        groups_of: dict[int, list[Group]] = {}
        for group in self.groups:
            groups_of.setdefault(group.place, []).append(group)
        for place, row in enumerate(self.rows):
            groups = groups_of.get(place, [])
            checks = [f"check: {row.notes.check}"] if row.notes.check else []
            if row.drops:
                counts = "it matches nothing here" if place in self.idle else ""
                yield row.both, counts, checks
                continue
            if row.notes.copy and not groups:
                yield row.both, "copies alone", checks
                continue
            sources = sum(len(paths) for group in groups for paths in group.sources)
            targets = sum(len(paths) for group in groups for paths in group.targets)
            remarks = [*filter(None, dict.fromkeys(map(sizes_text, groups))), *checks]
            if left := ", ".join(
                filter(None, dict.fromkeys(map(selected_text, groups)))
            ):
                remarks.append(f"it takes {left}")
            if row.values.add:
                text = "trained on, several summands move faster than their sum"
                remarks.append(f"{text}: {len(row.sources)} times")
            if self.swappable.get(place):
                pairs = pairs_text(self.swappable[place])
                remarks.append(f"shapes do not tell apart: {pairs}")
            yield row.both, f"{sources:,} to {targets:,}", remarks


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


def pairs_text(pairs: Iterable[tuple[str, str]]) -> str:
    """Write pairs that shapes do not tell apart."""
    return ", ".join(
        f"the texts of {a}" if a == b else f"{a} and {b}" for a, b in pairs
    )


def noted_lines(plan: Any) -> Iterator[str]:
    """Yield of which leaves of a plan the way back gives something else, and what."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in plan.noted.items():
        by_reason.setdefault(reason, []).append(path)
    for reason, paths in by_reason.items():
        yield f"back from {listing(fold(paths))}, {reason}"


def selected_lines(plan: Any) -> Iterator[str]:
    """Yield warnings of what a plan leaves out because its rows take some numbers."""
    for table in plan.tables:
        texts: dict[tuple[str, str], None] = {}
        for group in table.groups:
            if group.selected:
                texts[group.row.text, selected_text(group)] = None
        for row, text in texts:
            yield f"The row {listing([row])} takes {text}; all others are left out."


def unstated_lines(plan: Any) -> Iterator[str]:
    """Yield which leaves of a plan are copies, though no configuration says so."""
    for table in plan.tables:
        for group in table.groups:
            key, count = group.row.notes.copy, len(table.rows[group.place].targets)
            if isinstance(key, str) and group.targets[count:]:
                paths = itertools.chain(*group.targets[count:])
                yield (
                    f"{listing(paths)} becomes a copy of "
                    f"{listing(group.source_paths)}, and no configuration says that "
                    f"{key} is true."
                )


def sizes_text(group: Group) -> str:
    """Write the sizes of a group's names."""
    sizes = group.move.sizes if group.move and group.row.has_axes else ()
    plain = (pair for pair in sizes if pair[0] == plain_name(pair[0]))
    plain = (pair for pair in plain if not pair[0].startswith(REST))
    return ", ".join(f"{name}={size}" for name, size in plain)


def take_text(row: Row) -> str:
    """Write what a row takes, in short."""
    return f"{row.values.typed()['take']}"[:80]


def selected_text(group: Group) -> str:
    """Write of which numbers a group leaves some out."""
    texts = (
        f"{some:,} of {plural(size, 'number')} of {name!r}"
        for name, some, size in group.selected
    )
    return ", ".join(texts)


def explanation(plan: MigrationPlan, path: str, start: int = 0) -> Iterator[str]:
    """Yield what a plan does with a leaf, or makes it of; nothing if it has no row.

    Args:
        plan: of one table.
        path: of the leaf.
        start: how many rows are in the tables before.

    Example:
        >>> from treeadapt.migrations.migration import Migration
        >>> m = Migration({"layers.{l}.q : (h d) e": "q : l e h d"}, sizes={"d": 4})
        >>> plan = m.plan({f"layers.{n}.q": np.ones((8, 3)) for n in range(5)})
        >>> for line in explanation(plan, "layers.3.q"):
        ...     print(line)
        row 1: 'layers.{l}.q : (h d) e' -> 'q : l e h d'
        captures: l = 3
        sizes: l=5, h=2, d=4, e=3
        'layers.{0..4}.q' -> 'q'
    """
    for group in plan.groups:
        addresses = (*group.row.sources, *group.row.targets)
        for address, paths in zip(
            addresses, (*group.sources, *group.targets), strict=True
        ):
            if path in paths:
                yield f"row {start + group.place + 1}: {group.row.both}"
                yield from _leaf_lines(group, address, path)
    if path in plan.dropped:
        rows = [(n, row) for n, row in enumerate(plan.rows) if row.takes(path)]
        drops = [(n, row) for n, row in rows if row.drops]  # which may be the last
        leaving = [(n, row) for n, row in rows if row.values.take]
        place, row = (drops or leaving)[0]
        verb = "drops it" if row.drops else f"leaves it out: take = {take_text(row)}"
        yield f"row {start + place + 1}: {row.text!r} {verb}"
    if plan.new.get(path) == DROPPED:
        yield f"{listing([path])} was dropped before, and is kept of the target"
    elif path in plan.new:
        yield f"{listing([path])} is new, and filled by {plan.new[path]!r}"
    if path in plan.static:
        yield f"{listing([path])} is not an array, and left out"


def _leaf_lines(group: Group, address: Address, path: str) -> Iterator[str]:
    """Yield what is done with a leaf at one address, and with what moves with it."""
    row = group.row
    if captured := _captured(address, path):
        yield f"captures: {captured}"
    if sizes_text(group):
        yield f"sizes: {sizes_text(group)}"
    for name, value in row.values.typed().items():
        yield f"{name}{' undone' if row.values.undoes else ''}: {value}"
    how = ", by a function" if row.function else ", as it is" * (group.move is None)
    sides = (
        listing(fold([*side]), limit=2) for side in (group.source_paths, group.filled)
    )
    yield f"{' -> '.join(sides)}{how}"


def _captured(address: Address, path: str) -> str:
    """Write what a path gives each capture, and the number that a text stands for."""
    captures = address.path.match(path) or {}
    texts = {}
    for each in address.path.captures:
        value = captures[each.key]
        text = each.write(value).removeprefix(SEPARATOR)
        is_other = isinstance(value, int) and text != str(value)
        texts[each.key] = f"{each.key} = {text}{f' ({value})' if is_other else ''}"
    return ", ".join(texts.values())
