"""Moving: the leaves of a saved state, as the params of today would have them.

Takes a saved state by its old names, and a migration; gives it by the new names. Each
copy of the params is planned and moved by itself and may hold any part of them. What a
row does to a copy depends on the field: moments shrink where params grow. What cannot
be moved is left out, with the reason.
See ``carry_state`` for what becomes of the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from treeadapt.errors import MigrationError
from treeadapt.layers.region import Along, Region, read_key
from treeadapt.migrations.copies import Share, shares_of
from treeadapt.migrations.group import Group, Taken
from treeadapt.migrations.groups import GroupMaker
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.planning import assign, has_place_in
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row
from treeadapt.migrations.running import CUT_OFF, run
from treeadapt.migrations.spellings import spell
from treeadapt.migrations.take import lengths_after
from treeadapt.state.matching import by_node
from treeadapt.state.state_slices import StateLeaf, cut_leaf
from treeadapt.text.names import listing
from treeadapt.transforms.optax_fields import COPY_FIELDS, PARAM_FIELDS
from treeadapt.transforms.state_map import (
    Field,
    Slot,
    StateMap,
    above,
    below,
    cuts_of,
    field_of,
    homes_in,
    is_joint,
    last,
    map_names,
)
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The leaves of a saved state.

    Attributes:
        leaves: by name; params have the names of today.
        unmoved: why other leaves were not moved, by saved name.
        prefixes: what ``StateMap.prefixes_in`` says.
        fields: those of each state, by its name, whether their leaves moved or not.
    """

    leaves: dict[str, StateLeaf]
    unmoved: dict[str, str] = dataclasses.field(default_factory=dict)
    prefixes: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)

    def leave(self, slots: Iterable[Slot], reason: str) -> None:
        """Note leaves that are not moved."""
        self.unmoved.update(dict.fromkeys([slot.name for slot in slots], reason))

    def add(self, leaf: StateLeaf) -> None:
        """Add a leaf that was moved.

        Raises:
            MigrationError: another one has its name.
        """
        other = self.leaves.setdefault(leaf.whole, leaf)
        if other is not leaf:
            both = listing((*(other.origin or [other.whole]), *leaf.origin))
            raise MigrationError(
                f"Several leaves get the name {leaf.whole!r}: {both}. Write rows that "
                "keep them apart."
            )

    def followed_by(self, later: SavedState) -> SavedState:
        """Return what became of the leaves after the next table of a chain, too.

        Args:
            later: what that table made of ``leaves``; names in it are between the two.
        """
        by_name = {leaf.slot.name: leaf for leaf in self.leaves.values()}

        def origins(names: Iterable[str]) -> tuple[str, ...]:
            befores = filter(None, map(by_name.get, names))
            every = (leaf.origin or (leaf.whole,) for leaf in befores)
            return tuple(dict.fromkeys(itertools.chain(*every)))

        leaves = {}
        for name, leaf in later.leaves.items():
            leaves[name] = leaf
            if leaf.origin:
                befores = filter(None, map(by_name.get, leaf.origin))
                is_padded = leaf.is_padded or any(x.is_padded for x in befores)
                origin = origins(leaf.origin)
                leaves[name] = dataclasses.replace(
                    leaf, origin=origin, is_padded=is_padded
                )
        unmoved = {
            name: reason
            for between, reason in later.unmoved.items()
            for name in origins([between])
        }
        return dataclasses.replace(self, leaves=leaves, unmoved=self.unmoved | unmoved)


#: By place of the row and path of the parameter, how it takes that, and where it is.
_Leaves: TypeAlias = dict[tuple[int, str], tuple[Taken, list[Slot]]]


def move_copies(
    saved: Mapping[str, Any],
    migration: Migration,
    new: StateMap,
    params: Mapping[str, Any],
    prefixes: Mapping[str, str | None],
) -> SavedState:
    """Move every copy of the params in a saved state.

    Args:
        saved: its leaves by name.
        migration: from the params of the saved state to those of today.
        new: the new state.
        params: the arrays that train today, by path.
        prefixes: what ``new.prefixes_in`` says of the saved state.

    Raises:
        MigrationError: two leaves of a copy get one name.
    """
    fields = new.fields(params)
    if len(migration.tables) == 1:
        return _Mover(saved, migration, fields, params, prefixes).moved()
    between = _params_between(saved, migration, fields, params)
    states: list[SavedState] = []
    for table, likes in zip(migration.tables, [*between, params], strict=True):
        is_partial = likes is not params
        mover = _Mover(saved, table, fields, likes, prefixes, is_partial=is_partial)
        state = mover.moved()
        saved = {leaf.slot.name: leaf.value for leaf in state.leaves.values()}
        prefixes = {leaf.slot.name: leaf.slot.prefix for leaf in state.leaves.values()}
        states.append(state)
    return functools.reduce(SavedState.followed_by, states)


def _params_between(
    saved: Mapping[str, Any],
    migration: Migration,
    fields: Mapping[str, Field],
    params: Mapping[str, Any],
) -> list[Mapping[str, Any]]:
    """Return what is known of the params between the tables of a chain."""
    specs: dict[str, Any] = {}
    for name, leaf in saved.items():
        for prefix, tail in cuts_of(name):
            field = fields.get(field_of(prefix))
            if field and field.rank == 0 and is_array(leaf):
                specs.setdefault(read_key(tail).path, leaf)
    plan: Any = migration.planned(specs, params)[0]
    return [between.leaves for between in plan.shown[:-1]]


@dataclasses.dataclass(frozen=True)
class _Mover:
    """Moves every copy of the params in a state by one table.

    Attributes:
        saved: the leaves of the state by name.
        migration: the table.
        fields: of the new state.
        params: the arrays that the table makes of those before, by path.
        prefixes: as for ``move_copies``.
        is_partial: whether there may be more params than these, as between two tables.
    """

    saved: Mapping[str, Any]
    migration: Migration
    fields: Mapping[str, Field]
    params: Mapping[str, Any]
    prefixes: Mapping[str, str | None]
    is_partial: bool = False

    def moved(self) -> SavedState:
        """Return what became of all leaves."""
        rows = self._rows_by_end()
        home = homes_in({array: match.path for array, (_, match) in rows.items()})
        slots = map_names(self.saved, self.fields, home, self.prefixes)
        owners = {slot.prefix: slot.node for slot in slots if slot.prefix is not None}
        joint = {slot.node for slot in slots if self._is_joint(slot)}
        joint.difference_update(owners.values())
        result = SavedState({}, prefixes=self.prefixes, fields=by_node(slots))
        copies: dict[tuple[str, str], _Leaves] = {}
        for slot in slots:
            if slot.prefix is not None:
                place, match = rows[slot.array]
                more = "" if slot.rest == "value" else slot.rest
                leaves = copies.setdefault((slot.prefix, more), {})
                leaves.setdefault((place, match.path), (match, []))[1].append(slot)
            elif not owners.keys().isdisjoint(above(slot.name)):
                result.leave([slot], "no row takes it")
            elif slot.node in joint:
                result.leave([slot], "all params are joined there, without names")
            else:
                leaf = StateLeaf(slot, self.saved[slot.name], slot.name)
                result.leaves[slot.name] = leaf
        names = {slot.array for slot in slots if slot.prefix is not None}
        lengths = lengths_after(sorted(names))
        for around, leaves in copies.items():
            for share in self._shares(leaves, result):
                by_path = {path: slots for (_, path), (_, slots) in leaves.items()}
                self._move(result, around, share, by_path, lengths)
        return result

    def _shares(self, leaves: _Leaves, result: SavedState) -> list[Share]:
        """Return what each row takes of a copy, with the names that the params have.

        What is there twice has moments of its own, so it is not compared.

        Args:
            leaves: of the copy.
            result: gets what is there twice.
        """
        rows, by_row = self.migration.rows, [list[Taken]() for _ in self.migration.rows]
        for (place, _), (match, slots) in leaves.items():
            if rows[place].notes.copy:
                result.leave(slots, "the params of today have it once")
            else:
                by_row[place].append(match)
        has_place = has_place_in(self.params)
        return shares_of(rows, spell(rows, by_row, has_place, Problems()), has_place)

    def _is_joint(self, slot: Slot) -> bool:
        """Return whether all params may be joined in a leaf, without names."""
        return (
            self.prefixes.get(slot.name) in (None, slot.name)
            and COPY_FIELDS.isdisjoint(field_of(x) for x, _ in cuts_of(slot.name))
            and is_joint(self.saved[slot.name], len(self.params))
        )

    def _rows_by_end(self) -> dict[str, tuple[int, Taken]]:
        """Return the row, and how it takes the parameter, by the end of a name.

        The parameter is that end or above it: the nearest that becomes one of today;
        where none is known to, the nearest that a row takes. ``value`` is first taken
        for a box.

        With rows ``{"enc.w": "encoder/w", "head": "head"}``, what follows the field
        ``mu`` in the name ``0/mu/enc.w/value`` makes:

            ends      {"enc.w/value": None, "enc.w": None}: it, and what is above it
            owners    {"enc.w": (0, Taken(0, "enc.w", {}))}: what rows take of these
            returned  {"enc.w/value": the same, "enc.w": the same}
        """
        rows = self.migration.rows
        ends = dict.fromkeys(
            path
            for name in self.saved
            for prefix, tail in cuts_of(name)
            if field_of(prefix) in self.fields
            for array in [read_key(tail).path]
            for path in (array, *above(array))
        )
        by_row, _ = assign(rows, [*ends], Problems())
        has_place = has_place_in(self.params)
        owners = {
            match.path: (place, match)
            for place, matches in enumerate(by_row)
            for match in matches
        }

        def may_fill(path: str) -> bool:
            place, match = owners[path]
            row, captures = rows[place], match.captures
            if (
                row.has_axes
                or row.values.take
                or any(key.startswith("(") for key in captures)
            ):
                return True  # the names are known after the sizes
            return any(has_place(target, captures) for target in row.targets)

        has_boxes = not any(last(path) == "value" for path in self.params)
        rows_by_end = {}
        for end in ends:
            paths = [end, *above(end)]
            if has_boxes and last(end) == "value":
                paths = [*paths[1:], end]
            if owned := [path for path in paths if path in owners]:
                rows_by_end[end] = owners[next(filter(may_fill, owned), owned[0])]
        return rows_by_end

    def _move(
        self,
        result: SavedState,
        around: tuple[str, str],
        share: Share,
        slots_by_path: Mapping[str, Sequence[Slot]],
        lengths: Mapping[str, int],
    ) -> None:
        """Move the leaves of a copy that one row takes.

        Args:
            result: gets what became of them.
            around: what their names have before and after the path of a parameter.
            share: the row, and how it takes each leaf.
            slots_by_path: where the leaves of each parameter are.
            lengths: see ``lengths_after``, of the params in all copies.
        """
        field = self.fields[field_of(around[0])]
        row = _row_for_field(share.row, field, around[1])
        if isinstance(row, str):
            slots_of_row = (slots_by_path[match.path] for match in share.matches)
            return result.leave(itertools.chain(*slots_of_row), row)
        slots: dict[str, list[Slot]] = {}
        slices = []
        for path in (match.path for match in share.matches):
            for slot in slots_by_path[path]:
                if row.moves and slot.region and slot.region.along:
                    slices.append(slot)
                else:
                    slots.setdefault(path, []).append(slot)
        result.leave(slices, "it holds only some layers, and its row has axes")
        rank = field.rank or 0 if row.moves else 0
        specs = {path: self.saved[first.name] for path, (first, *_) in slots.items()}
        for path, array in specs.items():
            if is_array(array):
                specs[path] = jax.ShapeDtypeStruct(array.shape[rank:], array.dtype)
        problems, sizes = Problems(), self.migration.sizes
        maker = GroupMaker(
            row,
            share.place,
            sizes,
            specs,
            self.params,
            problems,
            is_partial=self.is_partial,
            lengths=lengths,
        )
        matches = [match for match in share.matches if match.path in slots]
        for group in [] if row.drops else maker.groups(matches):
            sources = [slot for path in group.source_paths for slot in slots.pop(path)]
            moved = self._moved(around, group, sources, rank)
            if isinstance(moved, str):
                result.leave(sources, moved)
                continue
            for leaf in moved:
                result.add(leaf)
        if problems.texts:
            reason = "; ".join(text for _, text, _ in problems.each())
            result.leave(itertools.chain(*slots.values()), reason)

    def _moved(
        self, around: tuple[str, str], group: Group, slots: Sequence[Slot], rank: int
    ) -> list[StateLeaf] | str:
        """Return what one group fills of the params of today, or why it cannot.

        What a row pads along one axis is left out after the move.

        Args:
            around: as for ``move``.
            group: planned without the first axes of its leaves.
            slots: of its leaves, in order; of one leaf there may be several slices.
            rank: how many first axes these are.
        """
        every, move = [self.saved[slot.name] for slot in slots], group.move
        if move is None:
            return [
                _leaf(around, _renamed(slot, path), array, (slot.name,))
                for slot, array in zip(slots, every, strict=True)
                for path in group.filled
            ]
        if not (self.is_partial or any(path in self.params for path in group.filled)):
            return []
        for path, spec in group.specs.items():
            like = self.params.get(path)
            if like is not None and like.shape != spec.shape:
                shapes = describe(spec), describe(like)
                return f"it would be {shapes[0]}, and {path!r} is {shapes[1]}"
        if move.compares and any(isinstance(x, jax.core.Tracer) for x in every):
            return "copies cannot be compared under jit"
        whole, rest = move.after(every[0].shape[:rank]), iter(every)
        sources = [[*itertools.islice(rest, len(paths))] for paths in group.sources]
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in every):
            arrays = jax.eval_shape(lambda sources: run(whole, sources)[0], sources)
        else:
            shardings = [
                [getattr(self.params.get(path), "sharding", None) for path in paths]
                for paths in group.targets
            ]
            arrays, faults = run(whole, sources, [] if rank else shardings)
            # Moments of padding are cut off, whatever they are.
            if fault := next((x for x in faults if x != CUT_OFF), None):
                return fault
        origin, pads = tuple([s.name for s in slots]), move.values.pads(is_source=False)
        leaves = []
        each = zip(move.targets, group.targets, arrays, strict=True)
        for layout, paths, moved in each:
            ends = [pads.get(axis.name, (0, 0)) for axis in layout.axes]
            for path, array in zip(paths, moved, strict=True):
                along = tuple(
                    Along(path, axis, range(first, array.shape[rank + axis] - last))
                    for axis, (first, last) in enumerate(ends)
                    if first or last
                )
                # Names of layers say of one axis alone what is new.
                # A later table of a chain may turn axes, so it gets all, with zeros.
                is_cut = len(along) == 1 and not self.is_partial
                region = Region(path, along if is_cut else ())
                part = cut_leaf(array, region.shifted(rank))
                if 0 not in region.sizes:
                    leaf = _leaf(around, region, part, origin)
                    leaf.is_padded = bool(along) and not is_cut
                    leaves.append(leaf)
        return leaves


def _leaf(
    around: tuple[str, str], region: Region, array: Any, origin: tuple[str, ...]
) -> StateLeaf:
    """Return a leaf that was moved."""
    tail = below(region.key, around[1])
    slot = Slot(below(around[0], tail), around[0], tail, region, around[1])
    return StateLeaf(slot, array, slot.name, origin=origin)


def _renamed(slot: Slot, path: str) -> Region:
    """Return what a leaf holds of a parameter with another name."""
    along = slot.region.along if slot.region else ()
    return Region(path, tuple([each._replace(stack=path) for each in along]))


def _row_for_field(row: Row, field: Field, more: str) -> Row | str:
    """Return a row as it holds for a field, or why it does not hold.

    Args:
        row: as it holds for params.
        field: what the leaves are.
        more: what their names have after the path of the parameter.
    """
    fill = row.values.fill and row.values.undoes  # what is new starts again
    values = dataclasses.replace(row.values, cast=(), fill=fill)
    if row.function is not None:
        return "its row has a function"
    if values.multiply:
        return "its row multiplies"
    if values.add and field.degree != 1:  # summands and their sum have one gradient
        values = dataclasses.replace(values, add=False)
    if values.computes:
        if field.degree is None:
            return f"what a row with values does to {field.name!r} is not known"
        scale, factor = values.scale**field.degree, values.scale_of
        if factor:
            factor = dataclasses.replace(factor, degree=field.degree)
        values = dataclasses.replace(values, scale=scale, scale_of=factor)
        if field.name not in PARAM_FIELDS:
            values = dataclasses.replace(values, offset=0.0, offset_of=None)
    law = dataclasses.replace(row, values=values)
    if law.moves and (more or field.rank is None):
        return "it does not have the shape of its parameter, so it is only renamed"
    return law
