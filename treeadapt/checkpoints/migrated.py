"""A checkpoint under the new names of a migration.

Takes what a checkpoint holds, and a migration; gives the same under the new names, and
what reads it, one group of leaves at a time, so that memory is bounded by the largest.
All is planned on metadata. Compares nothing with a target, but for what a function of
the table makes, which is not known before it ran. ``named_migration`` and
``require_migration`` are for callers: what they may pass in the place of a migration.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from treeadapt.checkpoints.array_boxes import boxes_here
from treeadapt.checkpoints.errors import reported
from treeadapt.checkpoints.leaves import (
    abstract_form,
    bound_sharding,
    restored,
    stored_form,
    to_array,
)
from treeadapt.checkpoints.load_report import by_value, misfit
from treeadapt.checkpoints.reading import batches, read_arrays
from treeadapt.checkpoints.record import Leaf, Stored
from treeadapt.checkpoints.remote import checkpoint_path
from treeadapt.errors import MigrationError
from treeadapt.migrations.box_parts import whole
from treeadapt.migrations.chain import units_of
from treeadapt.migrations.counts import miscounted, uncounted
from treeadapt.migrations.group import Group
from treeadapt.migrations.loading import load_migration
from treeadapt.migrations.migration import Migration, to_migration
from treeadapt.migrations.moved_array import (
    MovedArray,
    is_divisible,
    moved_arrays,
    pays,
)
from treeadapt.migrations.plan import BLANKS, MigrationPlan
from treeadapt.migrations.plan_text import selected_lines, unstated_lines
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import unchecked_text
from treeadapt.migrations.run_group import run_group
from treeadapt.migrations.tables.published import CONFIG, is_name, published
from treeadapt.text.names import listing
from treeadapt.text.wording import worded
from treeadapt.trees.describing import describe

_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}\.[a-z]+$")  # one of several files
_UNKNOWN = Leaf(jax.ShapeDtypeStruct((), np.bool_))


@dataclasses.dataclass(frozen=True)
class Source:
    """Leaves that can be loaded.

    Attributes:
        stored: what there is, under the names of the target.
        read: reads leaves as ``read_arrays`` does, in any order.
        kept: paths that stay as the target has them.
        problems: what is wrong, but for how it fits the target.
        groups: of a migration, that which makes a leaf, by path; None without one.
        remarks: what a load warns of: rows that nobody compared, what is left out.
        before: what its groups take, in a chain what an earlier table makes; None for
            what is stored.
        miscounted: how a configuration says otherwise how many layers there are.
        uncounted: its keys that would say so, and do not.
    """

    stored: Stored
    read: Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]]
    kept: frozenset[str] = frozenset()
    problems: Problems = dataclasses.field(default_factory=Problems)
    groups: Mapping[str, Group] | None = None
    remarks: tuple[str, ...] = ()
    before: Source | None = None
    miscounted: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def migrates(self) -> bool:
        """Whether a migration makes the leaves."""
        return self.groups is not None

    @property
    def first(self) -> Source:
        """What is stored, under its own names."""
        return self if self.before is None else self.before.first

    def old_paths(self, paths: Iterable[str]) -> list[str]:
        """Return what is stored of which leaves are made, by its names there."""
        if self.groups is None or self.before is None:
            return [*paths]
        groups = [self.groups[path] for path in paths if path in self.groups]
        sources = itertools.chain(*(group.source_paths for group in groups))
        return self.before.old_paths(dict.fromkeys(sources))

    def made_of(self, paths: Iterable[str]) -> list[str]:
        """Write what makes leaves, for messages: one line for each row."""
        lines: dict[str, str] = {}
        for path in paths:
            group, name = (self.groups or {}).get(path), listing([path])
            if group is None:
                lines.setdefault("", f"{name} is new")
            elif (row := group.row.text) not in lines:
                sources = self.old_paths([path])
                how = f"is made of {listing(sources, limit=2)}"
                if sources == [path]:
                    how = "keeps its name"
                lines[row] = f"{name} {how} by the row {row!r:.200}"
        return [*lines.values()]

    def exchanged(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Write how an exchange of two axes of a row gives leaves of some shapes."""
        groups = self.groups or {}
        advice = (
            groups[path].exchange_advice(path, shape)
            for path, shape in shapes.items()
            if path in groups
        )
        return [f"{x[0].upper()}{x[1:]}" for x in filter(None, dict.fromkeys(advice))]


def source_of(
    stored: Stored,
    migration: Migration | None,
    likes: Mapping[str, Any] | None,
    *,
    cast: bool,
) -> Source:
    """Return the leaves of a checkpoint, under the names of a target.

    Args:
        stored: what it holds.
        migration: gives its leaves other names and axes; None if they keep theirs.
        likes: leaves of the target by path; None without one.
        cast: as for ``load``.

    Raises:
        MigrationError: as for ``migrated``.
    """
    if migration is not None:
        return migrated(stored, migration, likes, cast=cast)
    if likes is not None:
        stored = stored.asked_for(likes.__contains__)
    stored = stored.without_boxes(likes or ())
    return Source(stored, lambda wanted: read_arrays(stored, wanted))


def named_migration(migration: Any, *checkpoints: str | os.PathLike[str]) -> Any:
    """Return the migration that a name means; anything else as it is.

    Args:
        migration: a name or path as ``load_migration`` takes it, or any other object.
        checkpoints: of the first one with a ``config.json`` next to it that file is
            read, or where all the weights of a folder are, the one in it.

    Raises:
        MigrationError: as for ``load_migration``.
    """
    if not isinstance(migration, str | os.PathLike):
        return migration
    if isinstance(migration, os.PathLike):
        _require_file(migration)
    paths = map(checkpoint_path, checkpoints)
    folders = (path if path.is_dir() else path.parent for path in paths)
    files = [folder / CONFIG for folder in folders]
    config = next((file for file in files if file.is_file()), None)
    is_layout = is_name(migration) and "/" not in migration
    return load_migration(migration, config=config or (files[0] if is_layout else None))


def _require_file(path: os.PathLike[str]) -> None:
    """Raise if a path has the name of a published table, which only a text names.

    Raises:
        MigrationError: it has.
    """
    text = os.fspath(path)
    if text.partition("/")[0] in published() and is_name(text):
        raise MigrationError(
            f"A path names a file, and there is no file {text!r}: the table that ships "
            f"with treeadapt is a text, migration={text!r}."
        )


def require_migration(migration: Any) -> None:
    """Raise unless a table was made of what the caller gives.

    Raises:
        MigrationError: it is something else.
    """
    if not isinstance(migration, Migration):
        raise MigrationError(
            "Expected migration=ta.Migration(table), or the name of a file or of a "
            f"published table, got {describe(migration)}."
            f"{to_migration(migration, 'migration=')}"
        )


def migrated(
    stored: Stored, migration: Migration, likes: Mapping[str, Any] | None, *, cast: bool
) -> Source:
    """Plan a migration of a checkpoint on its metadata.

    Args:
        stored: what it holds.
        migration: its rows name leaves as ``read_metadata`` does.
        likes: leaves of the target by path, which solve sizes; None without one.
        cast: as for ``load``.

    Raises:
        MigrationError: it is not a migration, or needs a target.
    """
    require_migration(migration)
    old = asked_for(stored, migration).without_boxes()
    with reported(stored.path, "read"):
        source = {path: abstract_form(leaf) for path, leaf in old.table.items()}
    plan: Any
    plan, problems = migration.planned(source, likes)
    problems.advice += part_advice(migration, old)
    for path in plan.without_values(likes or {}):
        problems.add("abstract", listing([path]), paths=[path])
    result = Source(old, lambda wanted: read_arrays(old, wanted))
    for number, table in enumerate(plan.tables, 1):
        is_last = number == len(plan.tables)
        targets = likes or {}
        if not is_last:
            targets = {} if problems.texts else plan.likes(number - 1)
        units = units_of(plan.tables[:number])
        moving = _Moving(result, table, targets, cast, units, is_last)
        groups = {path: group for group in table.groups for path in group.filled}
        result = Source(
            moving.stored(), moving.read, moving.kept, problems, groups, before=result
        )
    marks = [*filter(None, [unchecked_text((*migration.rows, *migration._marked_new))])]
    marks += itertools.chain(*(table.unstated for table in migration.tables))
    remarks = (*marks, *selected_lines(plan), *unstated_lines(plan))
    is_part = problems.texts or _SHARD.search(str(stored.path))
    return dataclasses.replace(
        result,
        remarks=remarks,
        miscounted=() if is_part else tuple(miscounted(plan)),
        uncounted=tuple(uncounted(plan)),
    )


def miscounted_text(source: Source) -> str:
    """Write that there are other layers than a configuration says, and what to do."""
    faults = "; ".join(source.miscounted)
    return (
        f"{source.stored.title} holds other parts of a model than its configuration "
        f"says: {faults}. If none is missing, pass the table with what is right: "
        "migration=ta.load_migration(name, config={**config, ...})."
    )


def asked_for(stored: Stored, migration: Migration) -> Stored:
    """Return what is stored without the optional leaves that no row takes."""
    rows = migration.tables[0].rows
    return stored.asked_for(lambda path: any(row.takes(path) for row in rows))


def part_advice(migration: Migration, stored: Stored) -> Iterator[str]:
    """Write what to do about rows that make something of parts of decoded leaves."""
    for row in migration.tables[0].rows if stored.parts else ():
        for address in row.sources if row.targets else ():
            gone = (x for x in stored.parts if x not in stored.table)
            part = next((x for x in gone if address.path.match(x) is not None), None)
            if part is None or any(map(address.path.match, stored.table)):
                continue
            yield (
                f"The row {row.text!r:.200} takes {listing([part])}, a part of the "
                f"leaf {listing([stored.parts[part]])}, which is decoded. Name that "
                f"leaf alone, or pass {worded('decode=False', '--no-decode')}."
            )


def valueless(
    stored: Stored, migration: Migration, likes: Mapping[str, Any] | None
) -> list[str]:
    """Return paths of which a migration takes numbers of a target that has none.

    Args:
        stored: what a checkpoint holds.
        migration: as for ``migrated``.
        likes: leaves of the target by path; None without one.
    """
    forms = stored.without_boxes().table.items()
    plan, _ = migration.planned({p: abstract_form(leaf) for p, leaf in forms}, likes)
    return plan.without_values(likes or {})


@dataclasses.dataclass(frozen=True)
class _Moving:
    """Leaves and the plan of a table by which they move.

    Attributes:
        old: the leaves, with the names that the rows name.
        plan: of the table.
        likes: leaves of the target by path; empty without one.
        cast: whether other dtypes fit the target.
        units: groups of this table and of those before that hang together, which are
            read together, so that no array is read twice.
        is_last: whether the result is that of the whole migration.
    """

    old: Source
    plan: MigrationPlan
    likes: Mapping[str, Any]
    cast: bool
    units: Sequence[Sequence[tuple[MigrationPlan, Group]]]
    is_last: bool

    @property
    def kept(self) -> frozenset[str]:
        """Paths that stay as the target has them."""
        new = self.plan.new.items() if self.is_last else ()
        return frozenset(path for path, filling in new if filling not in BLANKS)

    def stored(self) -> Stored:
        """Return what the checkpoint holds under the new names.

        Leaves that would be one array are tied. What a function makes is taken to be
        what the target has.
        """
        table: dict[str, Leaf] = {}
        firsts: dict[Any, tuple[str, ...]] = {}
        for group in self.plan.groups:
            for number, paths in enumerate(group.targets):
                owners = firsts.setdefault(self._origin(group, number), paths)
                for owner, path in zip(owners, paths, strict=True):
                    table[path] = dataclasses.replace(
                        self._leaf(group, number, path),
                        key=None,
                        owner="" if owner == path else owner,
                    )
        kept = self.kept
        for path in self.plan.new:
            if path not in kept:
                table[path] = self._like(path)
        return dataclasses.replace(self.old.stored, table=table)

    def read(self, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Read leaves as ``read_arrays`` does, in the order of the groups.

        Yields:
            Path and array: integers for a typed key, 0-d for a number.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            MigrationError: copies differ, what is cut off is not zero, or what a
                function made does not fit the target.
        """
        wanted_units = [x for x in self.units if self._groups(x, wanted)]
        for units in batches(wanted_units, _unit_bytes):
            batch = [group for unit in units for group in self._groups(unit, wanted)]
            places: dict[str, Any] = {}
            for group in batch:
                homes = {wanted[path] for path in group.filled if path in wanted}
                is_single = _is_renamed(group) and len(homes) == 1
                home = homes.pop() if is_single else None
                places |= dict.fromkeys(group.source_paths, home)
            arrays = dict(self.old.read(places))
            for group in batch:
                of_group = {path: arrays.pop(path) for path in group.source_paths}
                yield from self._made(group, of_group, wanted)
        for path, filling in self.plan.new.items():
            if path in wanted and filling in BLANKS:
                form = self._like(path).array
                yield path, np.full(form.shape, BLANKS[filling], form.dtype)
            elif path in wanted:
                yield path, np.asarray(to_array(path, self.likes[path]))

    def _groups(
        self, unit: Sequence[tuple[MigrationPlan, Group]], wanted: Collection[str]
    ) -> list[Group]:
        """Return the groups of this table in a unit that make what is wanted."""
        return [
            group
            for plan, group in unit
            if plan is self.plan and any(path in wanted for path in group.filled)
        ]

    def _made(
        self, group: Group, sources: dict[str, Any], wanted: Collection[str]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the arrays that one group makes, as far as they are wanted."""
        paths = [path for path in group.filled if path in wanted]
        if _is_renamed(group):
            (leaf,) = sources.values()
            for place, path in enumerate(paths):
                is_held = place > 0 and isinstance(leaf, np.ndarray)
                yield path, leaf.copy() if is_held else leaf
            return
        if (moved := self._by_parts(group, sources, paths)) is not None:
            yield from moved
            return
        table = self.old.stored.table
        leaves = {name: restored(table[name], sources.pop(name)) for name in [*sources]}
        is_on_devices = any(isinstance(leaf, jax.Array) for leaf in leaves.values())
        needs_likes = group.row.function or group.row.values.fills or is_on_devices
        likes = self.likes if needs_likes else {}
        result = run_group(group, leaves, likes, fits=self._fits)
        # JAX may take the memory of an array, so no other may have a part of it; and a
        # view would keep what is left out in memory, too.
        is_alone = group.move is not None and len(result) == 1
        leaves.clear()
        for path in paths:
            array = to_array(path, result.pop(path))
            if is_on_devices and isinstance(array, jax.Array):
                yield path, array
                continue
            array = np.asarray(array)
            yield path, array if is_alone else array.copy()

    def _by_parts(
        self, group: Group, sources: dict[str, Any], paths: Sequence[str]
    ) -> Iterator[tuple[str, Any]] | None:
        """Return what gives each array, made part by part; None if that costs more.

        - Sources that read themselves later, as those of files: what is made reads
          what it needs of them then.
        - Other sources: each array is made whole, and forgotten before the next.
        - Rows with numbers of the target: as the first, even of sources that are in
          memory, because this process may have some shards of the target only.

        None, too, where an array cannot be divided, or its sources are on devices.
        """
        made = moved_arrays(group, sources, self.likes)
        arrays = {path: made[path] for path in paths}
        specs = map(self.plan.source.__getitem__, group.source_paths)
        if not all(map(is_divisible, specs)) or not arrays[paths[0]].divides:
            return None
        if any(isinstance(leaf, jax.Array) for leaf in sources.values()):
            return None  # of a tree in memory; they stay on their devices
        is_read = all(hasattr(leaf, "read") for leaf in sources.values())
        if is_read or group.row.values.fills:
            boxes = [
                boxes_here(bound_sharding(self.likes.get(path)), array.shape)
                for path, array in arrays.items()
            ]
            is_worth = pays([*arrays.values()], boxes)
            if group.row.values.fills and not is_worth:  # read whole, and then cut
                sources.update((path, np.asarray(it)) for path, it in sources.items())
            if group.row.values.fills or is_worth:
                return iter(arrays.items())
        boxes = [[whole(array.shape)] for array in arrays.values()]
        return self._whole(arrays) if pays([*arrays.values()], boxes) else None

    def _whole(self, arrays: Mapping[str, MovedArray]) -> Iterator[tuple[str, Any]]:
        """Yield whole arrays, and forget each source that the last one has read."""
        last = [*arrays][-1]
        for path, moved in arrays.items():
            (array,) = moved.read(
                [whole(moved.shape)],
                forget=path == last,
                must_own=len(arrays) > 1,
            )
            yield path, array
            del array  # before the next one is made

    def _fits(self, leaf: Any, like: Any) -> bool:
        """Return whether what a function made fits a target, as what is stored does."""
        there, form = stored_form(leaf) or _UNKNOWN, stored_form(like)
        value = np.asarray(leaf).item() if by_value(there, form) else None
        return not misfit(there, form, value, cast=self.cast)

    def _like(self, path: str) -> Leaf:
        return stored_form(self.likes.get(path)) or _UNKNOWN

    def _leaf(self, group: Group, number: int, path: str) -> Leaf:
        if group.row.function is not None:
            if self.old.stored.is_abstract and path not in self.likes:
                raise MigrationError(
                    f"The row {group.row.text!r} has a function, and what that makes "
                    f"of a schema is not known: {listing([path])}. Name a checkpoint."
                )
            return self._like(path)
        if group.move is None:
            return self.old.stored.table[next(group.source_paths)]
        return stored_form(group.target_specs[number]) or _UNKNOWN

    def _origin(self, group: Group, number: int) -> Any:
        """Return what is equal for targets that would be one array."""
        table = self.old.stored.table
        owners = tuple(table[path].owner or path for path in group.source_paths)
        if group.row.function is not None:
            return group.place, number, owners
        if group.move is None:
            return owners
        # Two targets are one array if they differ in their place among targets alone.
        own = (piece for piece in group.move.pieces if piece.target == number)
        pieces = tuple(piece._replace(target=0) for piece in own)
        layout = group.move.targets[number]
        zeros = (0,) * (number in group.move.zeros)
        alone = dataclasses.replace(
            group.move, targets=(layout,), pieces=pieces, zeros=zeros
        )
        return owners, alone


def _unit_bytes(unit: Sequence[tuple[MigrationPlan, Group]]) -> int:
    return sum(plan.bytes_of(group) for plan, group in unit)


def _is_renamed(group: Group) -> bool:
    """Return whether its leaf stays as it is stored."""
    return group.move is None and group.row.function is None
