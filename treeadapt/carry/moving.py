"""Moving: the leaves of a saved state, as the params of today would have them.

Takes a saved state by its old names, and a migration; gives it by the new names. Each
copy of the params is planned and moved by itself and may hold any part of them. What a
row does to a copy depends on the field: moments shrink where params grow. What cannot
be moved is left out, with the reason.
See ``carry_state`` for what becomes of the result.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.carry.optax_fields import PARAM_FIELDS, SCALE_FIELDS, degree_of
from treeadapt.carry.slots import Slot, above, below, cut_names, cuts_of, is_joint, last
from treeadapt.convert import describe
from treeadapt.errors import MigrationError
from treeadapt.migrations.groups import Group, GroupMaker, Taken
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.planning import assign
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row
from treeadapt.migrations.running import CUT_OFF, run
from treeadapt.names import fold, listing
from treeadapt.trees.views import TreeView


@dataclasses.dataclass(frozen=True)
class Saved:
    """The leaves of a saved state.

    Attributes:
        leaves: by name; params have the names of today.
        origins: the saved names of those of which a leaf was made, where they differ.
        unmoved: why other leaves were not moved, by saved name.
        warnings: of rows that make copies of one parameter, by their text.
    """

    leaves: dict[str, Any]
    origins: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    unmoved: dict[str, str] = dataclasses.field(default_factory=dict)
    warnings: dict[str, str] = dataclasses.field(default_factory=dict)

    def origin(self, name: str) -> tuple[str, ...]:
        """Return the saved names of the leaves of which one was made."""
        return self.origins.get(name, (name,))

    def text(self, name: str) -> str:
        """Return them as one text."""
        return ", ".join(fold(self.origin(name)))

    def leave(self, names: Iterable[str], reason: str) -> None:
        """Note leaves that are not moved."""
        self.unmoved.update(dict.fromkeys(names, reason))

    def add(self, name: str, leaf: Any, origin: tuple[str, ...]) -> None:
        """Add a leaf that was moved.

        Raises:
            MigrationError: another one has its name.
        """
        if name in self.leaves:
            both = listing((*self.origin(name), *origin))
            cure = "Write rows that keep them apart"
            raise MigrationError(
                f"Several leaves get the name {name!r}: {both}. {cure}."
            )
        self.leaves[name], self.origins[name] = leaf, origin


class _Field(NamedTuple):
    """What a field of a state holds.

    Attributes:
        name: its name.
        degree: the power of a factor on the params that is one on it, if it is known.
        rank: how many axes are before those of a parameter; None if the leaves have
            other shapes than the params.
    """

    name: str
    degree: int | None
    rank: int | None


def move_copies(
    saved: Mapping[str, Any],
    migration: Migration,
    new: tuple[TreeView, Sequence[Slot]],
    params: Mapping[str, Any],
) -> Saved:
    """Move every copy of the params in a saved state.

    Args:
        saved: its leaves by name.
        migration: from the params of the saved state to those of today.
        new: the new state, and where its leaves are.
        params: the arrays that train today, by path.

    Raises:
        MigrationError: two leaves of a copy get one name.
    """
    fields = _fields(*new, params)
    homes = _homes(saved, migration.rows, fields, params)
    slots = cut_names(saved, lambda prefix: last(prefix) in fields, homes.__contains__)
    mover = _Mover(saved, migration, params, Saved({}))
    copies = {slot.prefix for slot in slots}
    owners = {slot.node for slot in slots if slot.is_copy}
    joint = {slot.node for slot in slots if is_joint(saved[slot.name], len(params))}
    parts: dict[tuple[str, str, int], list[tuple[Taken, str]]] = {}
    for slot in slots:
        if slot.prefix is not None:
            place, taken = homes[slot.tail]
            more = slot.tail[len(taken.path) + 1 :]
            part = (slot.prefix, "" if more == "value" else more, place)
            parts.setdefault(part, []).append((taken, slot.name))
        elif any(path in copies for path in above(slot.name)):
            mover.made.leave([slot.name], "no row names it")
        elif slot.node in joint - owners:
            mover.made.leave([slot.name], "all params are joined there, without names")
        else:
            mover.made.leaves[slot.name] = saved[slot.name]
    for (prefix, more, place), held in parts.items():
        mover.move((prefix, more), place, fields[last(prefix)], held)
    return mover.made


def _fields(
    own: TreeView, slots: Iterable[Slot], params: Mapping[str, Any]
) -> dict[str, _Field]:
    """Return what each field of a state holds that has a copy of the params."""
    copies = [pair for pair in zip(slots, own.leaves, strict=True) if pair[0].is_copy]
    is_scaled = any(slot.field in SCALE_FIELDS for slot, _ in copies)
    fields: dict[str, _Field] = {}
    for slot, spec in copies:
        name, shape, rank = slot.field, np.shape(spec), None
        if slot.tail in params:
            like = params[slot.tail].shape
            more = len(shape) - len(like)
            rank = more if more >= 0 and shape[more:] == like else None
        classes = own.plan.classes(slot.node or None)
        degree = degree_of(classes, name, is_scaled=is_scaled)
        known = fields.setdefault(name, _Field(name, degree, rank))
        rank = rank if known.rank is None else known.rank
        fields[name] = _Field(name, degree if degree == known.degree else None, rank)
    return fields


def _homes(
    names: Iterable[str],
    rows: Sequence[Row],
    fields: Mapping[str, _Field],
    params: Mapping[str, Any],
) -> dict[str, tuple[int, Taken]]:
    """Return for what may be a tail its parameter, and the place of the row for that.

    The parameter is the tail or above it: the nearest that becomes one of today; where
    none is known to, the nearest that a row takes. ``value`` is first taken for a box.
    """
    tails = dict.fromkeys(
        path
        for name in names
        for prefix, tail in cuts_of(name)
        if last(prefix) in fields
        for path in (tail, *above(tail))
    )
    taken, _ = assign([row.sources for row in rows], [*tails], Problems())
    owners = {
        each.path: (place, each) for place, own in enumerate(taken) for each in own
    }

    def may_fill(path: str) -> bool:
        place, own = owners[path]
        row = rows[place]
        if row.has_axes or any(key.startswith("(") for key in own.captures):
            return True  # the names are known after the sizes
        return any(each.path.fill(own.captures, {}) in params for each in row.targets)

    has_boxes = not any(last(path) == "value" for path in params)
    homes = {}
    for tail in tails:
        paths = [tail, *above(tail)]
        if has_boxes and last(tail) == "value":
            paths = [*paths[1:], tail]
        if found := [path for path in paths if path in owners]:
            homes[tail] = owners[next(filter(may_fill, found), found[0])]
    return homes


@dataclasses.dataclass(frozen=True)
class _Mover:
    """Moves the leaves of one state.

    Attributes:
        saved: the leaves of the saved state by name.
        migration: the table.
        params: the arrays that train today, by path.
        made: gets the result.
    """

    saved: Mapping[str, Any]
    migration: Migration
    params: Mapping[str, Any]
    made: Saved

    def move(
        self,
        around: tuple[str, str],
        place: int,
        field: _Field,
        part: Sequence[tuple[Taken, str]],
    ) -> None:
        """Move the leaves of a copy that one row takes.

        Args:
            around: what their names have before and after the path of a parameter.
            place: that of the row in the table.
            field: what the copy holds.
            part: how the row takes each leaf, and its saved name.
        """
        row = _law(self.migration.rows[place], field, around[1])
        left = {taken.path: name for taken, name in part}
        if isinstance(row, str):
            return self.made.leave(left.values(), row)
        leaves = {path: self.saved[name] for path, name in left.items()}
        rank = field.rank or 0 if row.moves else 0
        specs = {path: _spec(leaf, rank) for path, leaf in leaves.items()}
        problems, sizes = Problems(), self.migration.sizes
        maker = GroupMaker(row, place, sizes, specs, self.params, problems)
        for group in [] if row.drops else maker.groups([taken for taken, _ in part]):
            origin = tuple(left.pop(path) for path in group.given)
            arrays = self._arrays(group, leaves, rank)
            if isinstance(arrays, str):
                self.made.leave(origin, arrays)
                continue
            for path, array in arrays.items():
                self.made.add(below(around[0], below(path, around[1])), array, origin)
            if arrays and row.reversed().compares:
                self.made.warnings[row.text] = _of_copies(row, [*group.filled])
        if problems.found:
            self.made.leave(
                left.values(), "; ".join(text for _, text in problems.each())
            )

    def _arrays(
        self, group: Group, leaves: Mapping[str, Any], rank: int
    ) -> dict[str, Any] | str:
        """Return what one group fills of the params of today, or why it cannot.

        Args:
            group: planned without the first axes of its leaves.
            leaves: by parameter.
            rank: how many first axes these are.
        """
        given = [[leaves[path] for path in paths] for paths in group.sources]
        every = [*itertools.chain(*given)]
        if group.move is None:
            return dict.fromkeys(group.filled, every[0])
        if not any(path in self.params for path in group.filled):
            return {}
        likes = [self.params.get(paths[0]) for paths in group.targets]
        for paths, spec, like in zip(group.targets, group.made, likes, strict=True):
            if like is not None and like.shape != spec.shape:
                shapes = describe(spec), describe(like)
                return f"it would be {shapes[0]}, and {paths[0]!r} is {shapes[1]}"
        if group.move.compares and any(isinstance(x, jax.core.Tracer) for x in every):
            return "copies cannot be compared under jit"
        move = group.move.after(every[0].shape[:rank])
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in every):
            arrays = jax.eval_shape(lambda given: run(move, given)[0], given)
        else:
            wanted = [] if rank else [getattr(like, "sharding", None) for like in likes]
            arrays, faults = run(move, given, wanted)
            # Moments of padding are cut off, whatever they are.
            others = [fault for fault in faults if fault != CUT_OFF]
            if others:
                return others[0]
        return dict(zip(group.filled, itertools.chain(*arrays), strict=True))


def _law(row: Row, field: _Field, more: str) -> Row | str:
    """Return a row as it holds for a field, or why it does not hold.

    Args:
        row: as it holds for params.
        field: what the leaves are.
        more: what their names have after the path of the parameter.
    """
    values = dataclasses.replace(row.values, cast=())
    if row.function is not None:
        return "its row has a function"
    if values.computes:
        if field.degree is None:
            return f"what a row with values does to {field.name!r} is not known"
        offset = values.offset if field.name in PARAM_FIELDS else 0.0
        scale = values.scale**field.degree
        values = dataclasses.replace(values, scale=scale, offset=offset)
    law = dataclasses.replace(row, values=values)
    if law.moves and (more or field.rank is None):
        return "it does not have the shape of its parameter, so it is only renamed"
    return law


def _spec(leaf: Any, rank: int) -> Any:
    """Return the shape and dtype of a leaf without its first axes."""
    if not is_array(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape[rank:], leaf.dtype)


def _of_copies(row: Row, filled: Sequence[str]) -> str:
    return (
        f"the row {row.text!r} makes copies of one parameter: each of "
        f"{listing(filled)} goes on with all of its moments, and gets only a part of "
        "its gradient from now on. Reset them if they are not updated as one."
    )
