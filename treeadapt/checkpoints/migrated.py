"""A checkpoint under the new names of a migration.

Takes what a checkpoint holds, and a migration; gives the same under the new names, and
what reads it, one group of leaves at a time, so that memory is bounded by the largest.
All is planned on metadata. Compares nothing with a target, but for what a function of
the table makes, which is not known before it ran.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from treeadapt.checkpoints.common import Leaf, Stored, reported
from treeadapt.checkpoints.files import read_arrays
from treeadapt.checkpoints.fitting import compared
from treeadapt.checkpoints.leaves import abstract_form, restored, stored_form, to_array
from treeadapt.convert import describe
from treeadapt.errors import MigrationError
from treeadapt.migrations.groups import Group
from treeadapt.migrations.migration import Migration, run_group
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.migrations.problems import Problems
from treeadapt.names import listing

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
            f"Expected migration=ta.Migration(table), got {describe(migration)}."
        )
    old = stored.without_boxes()
    with reported(stored.path, "read"):
        source = {one: abstract_form(leaf) for one, leaf in old.table.items()}
    plan, problems = migration.planned(source, likes)
    likes = likes or {}
    kept = [path for path, filling in plan.new.items() if filling == "target"]
    for path in kept:
        if isinstance(likes[path], jax.ShapeDtypeStruct):
            problems.add("abstract", listing([path]))
    moving = _Moving(old, plan, likes, cast)
    return Source(moving.stored(), moving.read, frozenset(kept), problems)


def made_of(stored: Stored, path: str) -> str:
    """Write what makes a leaf of a migration, for messages."""
    group = stored.table[path].key
    if not isinstance(group, Group):
        return f"{listing([path])} is new"
    given = listing(group.given, limit=2)
    return f"{listing([path])} is made of {given} by the row {group.row.text!r:.200}"


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
        last: dict[str, Group] = {}
        places: dict[str, Any] = {}
        for group in self.plan.groups:
            homes = {wanted[path] for path in group.filled if path in wanted}
            if homes:
                is_single = _is_renamed(group) and len(homes) == 1
                home = homes.pop() if is_single else None
                places |= dict.fromkeys(group.given, home)
                last[[*group.given][-1]] = group
        held: dict[str, Any] = {}
        for one, array in read_arrays(self.old, places):
            held[one] = array
            del array
            if one in last:
                made = self._made(last[one], held, wanted)
                held.clear()
                for path in [*made]:
                    yield path, made.pop(path)
        for path, filling in self.plan.new.items():
            if filling == "zeros" and path in wanted:
                form = self._like(path).array
                yield path, np.zeros(form.shape, form.dtype)

    def _made(
        self, group: Group, held: Mapping[str, Any], wanted: Collection[str]
    ) -> dict[str, Any]:
        """Return the arrays that one group makes, as far as they are wanted."""
        if _is_renamed(group):
            (leaf,) = held.values()
            return {path: leaf for path in group.filled if path in wanted}
        leaves = {one: restored(self.old.table[one], held[one]) for one in held}
        every = run_group(group, leaves, {})
        made = {path: every[path] for path in group.filled if path in wanted}
        for path, leaf in made.items():
            if group.row.function is not None:
                self._check(group, path, leaf)
            array = np.asarray(to_array(path, leaf))
            # A view would keep what is left out in memory, too.
            made[path] = array if len(made) == len(every) else array.copy()
        return made

    def _check(self, group: Group, path: str, leaf: Any) -> None:
        """Raise unless what a function made is data, and fits the target."""
        form, text = stored_form(leaf), ""
        if form is None:
            text = f"{describe(leaf)}, which is not an array."
        elif path in self.likes:
            report = compared(
                {path: self.likes[path]},
                [True],
                dataclasses.replace(self.old, table={path: form}),
                (),
                lambda wanted: [(one, np.asarray(leaf)) for one in wanted],
                cast=self.cast,
            )
            text = "" if report.fits else f"what does not fit.\n{report}"
        if text:
            raise MigrationError(
                f"The function of the row {group.row.text!r} made {listing([path])} of "
                f"{listing(group.given, limit=2)}: {text}"
            )

    def _like(self, path: str) -> Leaf:
        return stored_form(self.likes.get(path)) or _UNKNOWN

    def _leaf(self, group: Group, number: int, path: str) -> Leaf:
        if group.row.function is not None:
            return self._like(path)
        if group.move is None:
            return self.old.table[next(group.given)]
        return stored_form(group.made[number]) or _UNKNOWN

    def _origin(self, group: Group, number: int) -> Any:
        """Return what is equal for targets that would be one array."""
        owners = tuple(self.old.table[one].owner or one for one in group.given)
        if group.row.function is not None:
            return group.place, number, owners
        if group.move is None:
            return owners
        pieces = tuple((s, a, 0, b) for s, a, t, b in group.move.pieces if t == number)
        layout = group.move.targets[number]
        return owners, dataclasses.replace(group.move, targets=(layout,), pieces=pieces)


def _is_renamed(group: Group) -> bool:
    """Return whether its leaf stays as it is stored."""
    return group.move is None and group.row.function is None
