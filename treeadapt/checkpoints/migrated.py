"""A checkpoint under the new names of a migration.

Takes what a checkpoint holds, and a migration; gives the same under the new names, and
what reads it, one group of leaves at a time, so that memory is bounded by the largest.
All is planned on metadata. Compares nothing with a target, but for what a function of
the table makes, which is not known before it ran.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from treeadapt.checkpoints.boxes import (
    FileArray,
    box_of,
    boxes_here,
    empty,
    lengths,
    whole,
)
from treeadapt.checkpoints.common import Leaf, Stored, reported
from treeadapt.checkpoints.files import batches, read_arrays
from treeadapt.checkpoints.leaves import (
    abstract_form,
    bound_sharding,
    restored,
    stored_form,
    to_array,
)
from treeadapt.checkpoints.load_report import by_value, misfit
from treeadapt.convert import describe
from treeadapt.errors import MigrationError
from treeadapt.migrations.axes import indices
from treeadapt.migrations.groups import Group
from treeadapt.migrations.migration import Migration, require_sound, run_group
from treeadapt.migrations.parts import Box, Part, parts_of_box
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.running import run
from treeadapt.names import listing

_MOST = 1.25  # times the bytes of the sources; above it they are read whole, once
_UNKNOWN = Leaf(jax.ShapeDtypeStruct((), np.bool_))


@dataclasses.dataclass(frozen=True)
class Source:
    """Leaves that can be loaded.

    Attributes:
        stored: what there is, under the names of the target.
        read: reads leaves as ``read_arrays`` does, in any order.
        kept: paths that stay as the target has them.
        problems: what is wrong, but for how it fits the target.
    """

    stored: Stored
    read: Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]]
    kept: frozenset[str] = frozenset()
    problems: Problems = dataclasses.field(default_factory=Problems)


def migrated(
    stored: Stored,
    migration: Migration,
    likes: Mapping[str, Any] | None,
    *,
    cast: bool,
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
    if not isinstance(migration, Migration):
        raise MigrationError(
            "Expected migration=ta.Migration(table) or ta.load_migration(file), got "
            f"{describe(migration)}."
        )
    old = stored.without_boxes()
    with reported(stored.path, "read"):
        source = {one: abstract_form(leaf) for one, leaf in old.table.items()}
    plan, problems = migration.planned(source, likes)
    likes = likes or {}
    kept = [path for path, filling in plan.new.items() if filling != "zeros"]
    for path in plan.without_values(likes):
        problems.add("abstract", listing([path]))
    moving = _Moving(old, plan, likes, cast)
    return Source(moving.stored(), moving.read, frozenset(kept), problems)


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


def made_of(stored: Stored, paths: Iterable[str]) -> list[str]:
    """Write what makes leaves of a migration, for messages: one line for each row."""
    lines: dict[str, str] = {}
    for path in paths:
        group, name = stored.table[path].key, listing([path])
        if not isinstance(group, Group):
            lines.setdefault("", f"{name} is new")
        elif (row := group.row.text) not in lines:
            sources = listing(group.source_paths, limit=2)
            lines[row] = f"{name} is made of {sources} by the row {row!r:.200}"
    return [*lines.values()]


@dataclasses.dataclass(frozen=True)
class _Moving:
    """A checkpoint and the plan by which its leaves move.

    Attributes:
        old: the checkpoint, with the names that the rows name.
        plan: of the migration.
        likes: leaves of the target by path; empty without one.
        cast: whether other dtypes fit the target.
    """

    old: Stored
    plan: MigrationPlan
    likes: Mapping[str, Any]
    cast: bool

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
                        key=group,
                        owner="" if owner == path else owner,
                    )
        for path, filling in self.plan.new.items():
            if filling == "zeros":
                table[path] = self._like(path)
        return dataclasses.replace(self.old, table=table)

    def read(self, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Read leaves as ``read_arrays`` does, in the order of the groups.

        Yields:
            Path and array: integers for a typed key, 0-d for a number.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            MigrationError: copies differ, what is cut off is not zero, or what a
                function made does not fit the target.
        """
        groups = [g for g in self.plan.groups if any(one in wanted for one in g.filled)]
        for batch in batches(groups, self.plan.bytes_of):
            places: dict[str, Any] = {}
            for group in batch:
                homes = {wanted[path] for path in group.filled if path in wanted}
                is_single = _is_renamed(group) and len(homes) == 1
                places |= dict.fromkeys(
                    group.source_paths, homes.pop() if is_single else None
                )
            arrays = dict(read_arrays(self.old, places))
            for group in batch:
                of_group = {path: arrays.pop(path) for path in group.source_paths}
                yield from self._made(group, of_group, wanted)
        for path, filling in self.plan.new.items():
            if filling == "zeros" and path in wanted:
                form = self._like(path).array
                yield path, np.zeros(form.shape, form.dtype)

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
        moved = self._moved(group, sources, {*paths})
        if moved:
            yield from moved
            return
        leaves = {
            one: restored(self.old.table[one], sources.pop(one)) for one in [*sources]
        }
        needs_likes = group.row.function or group.row.values.fills
        likes = self.likes if needs_likes else {}
        result = run_group(group, leaves, likes, fits=self._fits)
        # JAX may take the memory of an array, so no other may have a part of it; and a
        # view would keep what is left out in memory, too.
        is_alone = group.move is not None and len(result) == 1
        leaves.clear()
        for path in paths:
            array = np.asarray(to_array(path, result.pop(path)))
            yield path, array if is_alone else array.copy()

    def _moved(
        self, group: Group, sources: Mapping[str, Any], paths: Collection[str]
    ) -> list[tuple[str, _MovedArray]]:
        """Return what reads each array by parts; nothing if that would read more."""
        is_read = all(isinstance(leaf, FileArray) for leaf in sources.values())
        is_other = any(self.old.table[path].kind for path in sources)
        if group.move is None or not is_read or is_other:
            return []
        moved: list[tuple[str, _MovedArray]] = []
        num_bytes = 0
        for target, paths_of_target in enumerate(group.targets):
            every = indices(group.move.targets[target].numbers, group.move.size)
            for path, numbers in zip(paths_of_target, every, strict=True):
                if path not in paths:
                    continue
                like = self.likes.get(path) if group.row.values.fills else None
                array = _MovedArray(group, target, numbers, sources, like)
                plan = array.plan(
                    boxes_here(bound_sharding(self.likes.get(path)), array.shape)
                )
                if plan is None:
                    return []
                num_bytes += plan.num_bytes
                moved.append((path, dataclasses.replace(array, planned=plan)))
        whole_bytes = sum(
            leaf.num_bytes([whole(leaf.shape)]) for leaf in sources.values()
        )
        return moved if num_bytes <= _MOST * whole_bytes else []

    def _fits(self, leaf: Any, like: Any) -> bool:
        """Return whether what a function made fits a target, as what is stored does."""
        there, form = stored_form(leaf) or _UNKNOWN, stored_form(like)
        value = np.asarray(leaf).item() if by_value(there, form) else None
        return not misfit(there, form, value, cast=self.cast)

    def _like(self, path: str) -> Leaf:
        return stored_form(self.likes.get(path)) or _UNKNOWN

    def _leaf(self, group: Group, number: int, path: str) -> Leaf:
        if group.row.function is not None:
            if self.old.format == "schema" and path not in self.likes:
                raise MigrationError(
                    f"The row {group.row.text!r} has a function, and what that makes "
                    f"of a schema is not known: {listing([path])}. Name a checkpoint."
                )
            return self._like(path)
        if group.move is None:
            return self.old.table[next(group.source_paths)]
        return stored_form(group.target_specs[number]) or _UNKNOWN

    def _origin(self, group: Group, number: int) -> Any:
        """Return what is equal for targets that would be one array."""
        owners = tuple(self.old.table[one].owner or one for one in group.source_paths)
        if group.row.function is not None:
            return group.place, number, owners
        if group.move is None:
            return owners
        pieces = tuple((s, a, 0, b) for s, a, t, b in group.move.pieces if t == number)
        layout = group.move.targets[number]
        return owners, dataclasses.replace(group.move, targets=(layout,), pieces=pieces)


class _Plan(NamedTuple):
    """How boxes of an array are made.

    Attributes:
        boxes: of the array.
        parts: of each box.
        sources: the boxes that parts are made of, by path, in the order of the parts.
        num_bytes: how many bytes are read for them.
    """

    boxes: Sequence[Box]
    parts: Sequence[Sequence[Part]]
    sources: Mapping[str, Sequence[Box]]
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class _MovedArray:
    """An array that a migration makes, whose boxes can be read.

    Attributes:
        group: it is one of its targets.
        target: which one.
        numbers: which leaf of the target.
        source_files: the sources, by path.
        like: the array that has the numbers of what is new; None where these are zero.
        planned: how the boxes of this process's devices are made.
    """

    group: Group
    target: int
    numbers: tuple[int, ...]
    source_files: Mapping[str, FileArray]
    like: Any
    planned: _Plan | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return tuple(self.group.target_specs[self.target].shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        return np.dtype(self.group.target_specs[self.target].dtype)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.read([whole(self.shape)])[0]

    def plan(self, boxes: Sequence[Box]) -> _Plan | None:
        """Return how boxes are made; None if that needs whole arrays."""
        assert self.group.move is not None
        parts: list[list[Part]] = []
        sources: dict[str, list[Box]] = {}
        for box in boxes:
            box_parts = parts_of_box(self.group.move, self.target, self.numbers, box)
            if box_parts is None:
                return None
            parts.append(box_parts)
            for source, leaf_boxes in itertools.chain(
                *(part.sources for part in box_parts)
            ):
                for place, each in leaf_boxes:
                    path = self.group.sources[source][place]
                    sources.setdefault(path, []).append(each)
        num_bytes = sum(
            self.source_files[path].num_bytes(boxes) for path, boxes in sources.items()
        )
        return _Plan(boxes, parts, sources, num_bytes)

    def read(self, boxes: Sequence[Box]) -> list[Any]:
        """Read boxes, each to a new array of NumPy.

        The boxes of one source are read together, because what devices share may lie
        side by side in a file, in pieces too small to be worth reading one by one.

        Raises:
            CheckpointError: a source cannot be read.
            MigrationError: copies differ, or values do not fit.
        """
        plan = self.planned
        if plan is None or plan.boxes != boxes:  # what goes elsewhere is read whole
            plan = self.plan(boxes)
        assert plan is not None
        pieces = {
            path: self.source_files[path].read(parts)[::-1]
            for path, parts in plan.sources.items()
        }
        pairs = zip(plan.parts, boxes, strict=True)
        return [self._made(parts, box, pieces) for parts, box in pairs]

    def _made(
        self, parts: Sequence[Part], box: Box, pieces: Mapping[str, list[Any]]
    ) -> Any:
        """Make one box of its parts, and take what it is made of from the pieces."""
        shape = lengths(box)
        is_simple = len(parts) == 1 and parts[0].is_exact
        is_simple &= bool(parts) and parts[0].place == whole(shape)
        whole_box: Any = None if is_simple else empty(shape, self.dtype)
        if not is_simple and self.group.row.values.pads(is_source=False):
            whole_box[...] = 0 if self.like is None else box_of(self.like, box)
        for part in parts:
            leaves = [
                [
                    pieces[self.group.sources[source][place]].pop()
                    for place, _ in leaf_boxes
                ]
                for source, leaf_boxes in part.sources
            ]
            arrays, faults = run(part.move, leaves)
            require_sound(self.group, faults)
            if is_simple:
                return arrays[0][0]
            part.put(arrays[0], whole_box)
        return whole_box


def _is_renamed(group: Group) -> bool:
    """Return whether its leaf stays as it is stored."""
    return group.move is None and group.row.function is None
