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
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.convert import describe
from treeadapt.errors import MigrationError
from treeadapt.layers.region import Along, Region, read_key
from treeadapt.migrations.groups import Group, GroupMaker, Taken
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.operations import Values
from treeadapt.migrations.planning import assign
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row
from treeadapt.migrations.running import CUT_OFF, run
from treeadapt.names import listing
from treeadapt.optax_fields import PARAM_FIELDS
from treeadapt.state.matching import by_node
from treeadapt.state.pieces import StateLeaf, cut_leaf, divide_leaves, fill, zeros
from treeadapt.state.state_map import (
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


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The leaves of a saved state.

    Attributes:
        leaves: by name; params have the names of today.
        unmoved: why other leaves were not moved, by saved name.
        warnings: of rows that make copies of one parameter, by their text.
        prefixes: what ``StateMap.prefixes_in`` says.
        fields: those of each state, by its name, whether their leaves moved or not.
    """

    leaves: dict[str, StateLeaf]
    unmoved: dict[str, str] = dataclasses.field(default_factory=dict)
    warnings: dict[str, str] = dataclasses.field(default_factory=dict)
    prefixes: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)

    def leave(self, names: Iterable[str], reason: str) -> None:
        """Note leaves that are not moved."""
        self.unmoved.update(dict.fromkeys(names, reason))

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


#: How a row takes leaves of a copy, and where these are.
_Leaves: TypeAlias = Sequence[tuple[Taken, Slot]]


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
    rows = _params_and_rows(saved, migration.rows, fields, params)
    home = homes_in({array: match.path for array, (_, match) in rows.items()})
    slots = map_names(saved, fields, home, prefixes)
    moved = SavedState({}, prefixes=prefixes, fields=by_node(slots))
    mover = _Mover(saved, migration, params, moved)
    copies = {slot.prefix for slot in slots}
    owners = {slot.node for slot in slots if slot.is_copy}
    joint = {slot.node for slot in slots if is_joint(saved[slot.name], len(params))}
    parts: dict[tuple[str, str, int], list[tuple[Taken, Slot]]] = {}
    for slot in slots:
        if slot.prefix is not None:
            place, match = rows[slot.array]
            more = "" if slot.rest == "value" else slot.rest
            part = (slot.prefix, more, place)
            parts.setdefault(part, []).append((match, slot))
        elif any(path in copies for path in above(slot.name)):
            moved.leave([slot.name], "no row names it")
        elif slot.node in joint - owners:
            moved.leave([slot.name], "all params are joined there, without names")
        else:
            moved.leaves[slot.name] = StateLeaf(slot, saved[slot.name], slot.name)
    for (prefix, more, place), leaves in parts.items():
        mover.move((prefix, more), place, fields[field_of(prefix)], leaves)
    return moved


def _params_and_rows(
    names: Iterable[str],
    rows: Sequence[Row],
    fields: Mapping[str, Field],
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
        if field_of(prefix) in fields
        for array in [read_key(tail).path]
        for path in (array, *above(array))
    )
    by_row, _ = assign(rows, [*tails], Problems())
    owners = {
        match.path: (place, match)
        for place, matches in enumerate(by_row)
        for match in matches
    }

    def may_fill(path: str) -> bool:
        place, match = owners[path]
        row = rows[place]
        if row.has_axes or any(key.startswith("(") for key in match.captures):
            return True  # the names are known after the sizes
        return any(each.path.fill(match.captures, {}) in params for each in row.targets)

    has_boxes = not any(last(path) == "value" for path in params)
    homes = {}
    for tail in tails:
        paths = [tail, *above(tail)]
        if has_boxes and last(tail) == "value":
            paths = [*paths[1:], tail]
        if owned := [path for path in paths if path in owners]:
            homes[tail] = owners[next(filter(may_fill, owned), owned[0])]
    return homes


@dataclasses.dataclass
class _Whole:
    """What a copy holds of a parameter of the saved state, as a whole array.

    Attributes:
        match: how a row takes it.
        array: the array; zero where the copy holds nothing.
        marks: for all its numbers but those of its first axes, which of the leaves that
            the row takes holds it, counted from 1; -1 where none does.
        names: of these leaves.
        is_part: whether the copy holds a part of it or nothing.
    """

    match: Taken
    array: Any
    marks: Any
    names: dict[str, None]
    is_part: bool = False


def _marks_in(group: Group, wholes: Mapping[str, _Whole]) -> Mapping[str, Any]:
    """Return the marks of what a group fills."""
    marks = [[wholes[path].marks for path in paths] for paths in group.sources]
    if group.move is None:
        return dict.fromkeys(group.filled, marks[0][0])
    values = group.move.values
    values = Values(pad=values.pad, undoes=values.undoes)
    move = dataclasses.replace(group.move, values=values, dtype=np.dtype(np.int32))
    arrays, _ = run(move, marks)
    return dict(zip(group.filled, itertools.chain(*arrays), strict=True))


def _holders(
    marks: Callable[[], Mapping[str, Any]],
    path: str,
    names: Sequence[str],
    some: Region,
) -> tuple[str, ...]:
    """Return the saved leaves that hold some numbers of a moved one."""
    seen = marks()[path]
    for _, axis, numbers in some.along:
        seen = seen.take(numbers, axis)
    return tuple(names[mark - 1] for mark in np.unique(seen) if mark > 0)


@dataclasses.dataclass(frozen=True)
class _Mover:
    """Moves the leaves of one state.

    Attributes:
        saved: the leaves by name.
        migration: its table.
        params: the arrays that train today, by path.
        result: gets the leaves that moved.
        before: for rows that were asked about, the params before by path: how the row
            takes each, and the shapes of all that move together with it.
    """

    saved: Mapping[str, Any]
    migration: Migration
    params: Mapping[str, Any]
    result: SavedState
    before: dict[int, Mapping[str, tuple[Taken, Mapping[str, Any]]]] = (
        dataclasses.field(default_factory=dict)
    )

    def move(
        self, around: tuple[str, str], place: int, field: Field, part: _Leaves
    ) -> None:
        """Move the leaves of a copy that one row takes.

        What it lacks of an array of today, because it was frozen, is filled with zeros
        for the move, and left out after it. So is what a row pads, if it is along one
        axis.

        Args:
            around: what their names have before and after the path of a parameter.
            place: that of the row in the table.
            field: what the copy holds.
            part: how the row takes each leaf, and where that is.
        """
        row = _row_for_field(self.migration.rows[place], field, around[1])
        if isinstance(row, str):
            return self.result.leave([slot.name for _, slot in part], row)
        rank = field.rank or 0 if row.moves else 0
        wholes = self._wholes(row, place, field, part)
        names, left = [slot.name for _, slot in part], dict(wholes)
        arrays = {path: whole.array for path, whole in wholes.items()}
        specs = {
            path: jax.ShapeDtypeStruct(array.shape[rank:], array.dtype)
            if is_array(array)
            else array
            for path, array in arrays.items()
        }
        problems, sizes = Problems(), self.migration.sizes
        maker = GroupMaker(row, place, sizes, specs, self.params, problems)
        matches = [whole.match for whole in wholes.values()]
        for group in [] if row.drops else maker.groups(matches):
            origin = tuple(
                n for path in group.source_paths for n in left.pop(path).names
            )
            filled = self._moved(group, arrays, rank)
            if isinstance(filled, str):
                self.result.leave(origin, filled)
                continue
            pads = bool(row.values.pads(is_source=False))
            has_gaps = pads or any(wholes[path].is_part for path in group.source_paths)
            marks = functools.cache(functools.partial(_marks_in, group, wholes))
            for path, array in filled.items():
                held: Region | None = Region(path)
                if has_gaps:
                    held = _region_of(path, marks()[path] > 0)
                is_padded = pads and (held is None or len(held.along) > 1)
                if is_padded:  # names of layers say it of one axis alone
                    held = _region_of(path, marks()[path] >= 0)
                if held is None:
                    self.result.leave(origin, "what it holds is not a set of layers")
                elif all(held.sizes):
                    kept = cut_leaf(array, held.shifted(field.rank or 0))
                    prefix, tail = around[0], below(path, around[1])
                    slot = Slot(below(prefix, tail), prefix, tail, held, around[1])
                    leaf = StateLeaf(slot, kept, slot.name, origin=origin)
                    leaf.is_padded = is_padded
                    if row.moves or has_gaps:
                        leaf.origin_of = functools.partial(_holders, marks, path, names)
                    self.result.add(leaf)
            if filled and row.copies:
                self.result.warnings[row.text] = (
                    f"the row {row.text!r} makes copies of one parameter: each of "
                    f"{listing(group.filled)} goes on with all of its moments, and "
                    "gets only a part of its gradient from now on. Reset them if they "
                    "are not updated as one."
                )
        if problems.texts:
            reason = "; ".join(text for _, text, _ in problems.each())
            lost = (whole.names for whole in left.values())
            self.result.leave(itertools.chain(*lost), reason)

    def _wholes(
        self, row: Row, place: int, field: Field, part: _Leaves
    ) -> dict[str, _Whole]:
        """Return what a row takes of a copy, by parameter; arguments as for ``move``.

        Slices that do not have the shape of their parameter are left out.
        """
        rank, wholes = field.rank or 0, dict[str, _Whole]()
        marks, slices = dict[str, tuple[int, str]](), list[StateLeaf]()
        for mark, (match, slot) in enumerate(part, 1):
            array, marks[slot.name] = self.saved[slot.name], (mark, match.path)
            if slot.region is None or not slot.region.along:
                shape = np.shape(array)[rank:] if row.moves else ()
                uniform = np.broadcast_to(np.int32(mark), shape)
                wholes[match.path] = _Whole(match, array, uniform, {slot.name: None})
            else:
                slices.append(StateLeaf(slot, array, slot.name))
        before = self._before(place) if row.moves or slices else {}

        def start(path: str, like: Any) -> None:
            if path in before and path not in wholes:
                match, specs = before[path]
                shape = specs[path].shape
                array = zeros((*like.shape[:rank], *shape), like)
                none = np.full(shape, -1, np.int32)
                wholes[path] = _Whole(match, array, none, {}, is_part=True)

        olds = {path: specs[path] for path, (_, specs) in before.items()}
        pieces, _ = divide_leaves(slices if field.rank is not None else (), olds)
        for each in itertools.chain(*pieces.values()):
            mark, path = marks[each.whole]
            start(path, each.array)
            whole, some = wholes[path], each.slot.region or Region(path)
            whole.array = fill(whole.array, [(some.shifted(rank), each.value)])
            held = {along.axis: along.numbers for along in some.along}
            every = [held.get(i, range(n)) for i, n in enumerate(whole.marks.shape)]
            whole.marks[np.ix_(*every)] = mark
            whole.names[each.whole] = None
        moving = [path for path in wholes if row.moves and path in before]
        for path in {id(before[path][1]): path for path in moving}.values():
            for other in before[path][1]:
                start(other, wholes[path].array)
        moved = {*itertools.chain(*(whole.names for whole in wholes.values()))}
        others = [leaf.whole for leaf in slices if leaf.whole not in moved]
        text = "it holds some layers, and not in the shape of its parameter"
        self.result.leave(others, text)
        return wholes

    def _before(self, place: int) -> Mapping[str, tuple[Taken, Mapping[str, Any]]]:
        """Return the params that a row took, as the params of today show them."""
        row = self.migration.rows[place]
        if place not in self.before and not (
            row.lost or row.function or row.values.multiply or row.drops
        ):
            values = dataclasses.replace(row.values, cast=())
            back = dataclasses.replace(row, values=values).reversed()
            (matches,), _ = assign([back], [*self.params], Problems())
            sizes = self.migration.sizes
            maker = GroupMaker(back, place, sizes, self.params, None, Problems())
            groups = [group.specs for group in maker.groups(matches)]
            olds = {path: specs for specs in groups for path in specs}
            (matches,), _ = assign([row], [*olds], Problems())
            self.before[place] = {
                match.path: (match, olds[match.path]) for match in matches
            }
        return self.before.get(place, {})

    def _moved(
        self, group: Group, leaves: Mapping[str, Any], rank: int
    ) -> dict[str, Any] | str:
        """Return what one group fills of the params of today, or why it cannot.

        Args:
            group: planned without the first axes of its leaves.
            leaves: by parameter.
            rank: how many first axes these are.
        """
        sources = [[leaves[path] for path in paths] for paths in group.sources]
        every = [*itertools.chain(*sources)]
        if group.move is None:
            return dict.fromkeys(group.filled, every[0])
        if not any(path in self.params for path in group.filled):
            return {}
        for path, spec in group.specs.items():
            like = self.params.get(path)
            if like is not None and like.shape != spec.shape:
                shapes = describe(spec), describe(like)
                return f"it would be {shapes[0]}, and {path!r} is {shapes[1]}"
        if group.move.compares and any(isinstance(x, jax.core.Tracer) for x in every):
            return "copies cannot be compared under jit"
        move = group.move.after(every[0].shape[:rank])
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in every):
            arrays = jax.eval_shape(lambda sources: run(move, sources)[0], sources)
        else:
            likes = [[*map(self.params.get, paths)] for paths in group.targets]
            shardings = [
                [getattr(like, "sharding", None) for like in each] for each in likes
            ]
            arrays, faults = run(move, sources, [] if rank else shardings)
            # Moments of padding are cut off, whatever they are.
            others = [fault for fault in faults if fault != CUT_OFF]
            if others:
                return others[0]
        return dict(zip(group.filled, itertools.chain(*arrays), strict=True))


def _region_of(path: str, mask: Any) -> Region | None:
    """Return what is held of an array as a region.

    Args:
        path: of the array, which is the name of its axes, too.
        mask: whether each of its numbers is held.

    Returns:
        None if what is held is not all that has some numbers along each axis.

    Example:
        >>> _region_of("w", np.array([[False, False], [True, True]])).along
        (Along(stack='w', axis=0, numbers=(1,)),)
    """
    every = range(mask.ndim)
    lines = [mask.any(tuple(i for i in every if i != axis)) for axis in every]
    numbers = [tuple(np.flatnonzero(line).tolist()) for line in lines]
    if mask.sum() != math.prod(map(len, numbers)):
        return None
    along = (Along(path, axis, each) for axis, each in enumerate(numbers))
    return Region(path, tuple(x for x in along if not lines[x.axis].all()))


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
