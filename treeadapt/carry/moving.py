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
from treeadapt.carry.optax_fields import (
    PARAM_FIELDS,
    SCALE_FIELDS,
    SUM_FIELDS,
    degree_of,
)
from treeadapt.carry.slots import (
    Slot,
    above,
    below,
    cut_names,
    cuts_of,
    joins_params,
    last,
    parent,
)
from treeadapt.convert import describe
from treeadapt.errors import MigrationError
from treeadapt.migrations.groups import Group, GroupMaker, Taken
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.planning import assign
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row
from treeadapt.migrations.running import run
from treeadapt.names import listing
from treeadapt.paths import unboxed
from treeadapt.trees.views import TreeView


@dataclasses.dataclass(frozen=True)
class Saved:
    """The leaves of a saved state.

    Attributes:
        leaves: by name; params have the names of today.
        origins: the saved names of those of which a leaf was made, where they differ.
        unmoved: why other leaves were not moved, by saved name.
        ties: what each row that makes copies of one parameter fills, as text.
    """

    leaves: dict[str, Any]
    origins: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    unmoved: dict[str, str] = dataclasses.field(default_factory=dict)
    ties: dict[str, str] = dataclasses.field(default_factory=dict)

    def origin(self, name: str) -> tuple[str, ...]:
        """Return the saved names of the leaves of which one was made."""
        return self.origins.get(name, (name,))


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
    copies: dict[str, dict[str, str]] = {}
    for slot in slots:
        if slot.prefix is not None:
            copies.setdefault(slot.prefix, {})[slot.tail] = slot.name
    made = Saved({})
    rest = [slot for slot in slots if not slot.is_copy]
    owners = {parent(prefix) for prefix in copies}
    joined = {
        slot.node
        for slot in rest
        if slot.node not in owners and joins_params(saved[slot.name], len(params))
    }
    for slot in rest:
        if any(path in copies for path in above(slot.name)):
            made.unmoved[slot.name] = "no row names it"
        elif slot.node in joined:
            made.unmoved[slot.name] = "all params are joined there, without their names"
        else:
            made.leaves[slot.name] = saved[slot.name]
    parts: dict[tuple[str, str, int], list[tuple[Taken, str]]] = {}
    for prefix, names in copies.items():
        for tail, short in unboxed(names).items():
            own = short if short in homes else tail
            place, taken = homes[own]
            more = own[len(taken.path) + 1 :]
            part = (prefix, "" if more == "value" else more, place)
            parts.setdefault(part, []).append((taken, names[tail]))
    for (prefix, more, place), taken_as in parts.items():
        left = {taken.path: name for taken, name in taken_as}
        leaves = {path: saved[name] for path, name in left.items()}
        field, problems = fields[last(prefix)], Problems()
        row = _law(migration.rows[place], field, more)
        if isinstance(row, str):
            made.unmoved.update(dict.fromkeys(left.values(), row))
            continue
        rank = field.rank or 0 if _changes(row) else 0
        specs = {path: _spec(leaf, rank) for path, leaf in leaves.items()}
        maker = GroupMaker(row, place, migration.sizes, specs, params, problems)
        for group in [] if row.drops else maker.groups([each for each, _ in taken_as]):
            origin = tuple(left.pop(path) for path in group.given)
            arrays = _move(group, leaves, rank, params)
            if isinstance(arrays, str):
                made.unmoved.update(dict.fromkeys(origin, arrays))
                continue
            for path, array in arrays.items():
                _put(made, below(prefix, below(path, more)), array, origin)
            if arrays and row.reversed().compares:
                made.ties[row.text] = listing(group.filled)
        if problems.found:
            text = "; ".join(problems.texts())
            made.unmoved.update(dict.fromkeys(left.values(), text))
    return made


def _put(made: Saved, name: str, leaf: Any, origin: tuple[str, ...]) -> None:
    if name in made.leaves:
        both = listing((*made.origin(name), *origin))
        raise MigrationError(
            f"Several leaves get the name {name!r}: {both}. Write rows that keep them "
            "apart."
        )
    made.leaves[name], made.origins[name] = leaf, origin


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
        degree = degree_of(own.plan.classes(slot.node or None), name)
        if is_scaled and name in SUM_FIELDS:
            degree = None  # they may add up what was scaled
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
    none is known to, the nearest that a row takes.
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

    homes = {}
    for tail in tails:
        if found := [path for path in (tail, *above(tail)) if path in owners]:
            homes[tail] = owners[next(filter(may_fill, found), found[0])]
    return homes


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
    if _changes(law) and (more or field.rank is None):
        return "it does not have the shape of its parameter, so it is only renamed"
    return law


def _changes(row: Row) -> bool:
    """Return whether a row does more than rename."""
    return row.has_axes or bool(row.values) or row.compares


def _spec(leaf: Any, rank: int) -> Any:
    """Return the shape and dtype of a leaf without its first axes."""
    if not is_array(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape[rank:], leaf.dtype)


def _move(
    group: Group, leaves: Mapping[str, Any], rank: int, params: Mapping[str, Any]
) -> dict[str, Any] | str:
    """Return what one group fills of the params of today, or why it cannot.

    Args:
        group: planned without the first axes of its leaves.
        leaves: the saved leaves, by parameter.
        rank: how many first axes these are.
        params: the arrays that train today, by path.
    """
    given = [[leaves[path] for path in paths] for paths in group.sources]
    if group.move is None:
        return dict.fromkeys(group.filled, given[0][0])
    likes = [params.get(paths[0]) for paths in group.targets]
    for spec, like, path in zip(group.made, likes, group.filled, strict=False):
        if like is not None and like.shape != spec.shape:
            return f"it would be {describe(spec)}, and {path!r} is {describe(like)}"
    if not any(path in params for path in group.filled):
        return {}
    every = [*itertools.chain(*given)]
    if group.move.compares and any(isinstance(x, jax.core.Tracer) for x in every):
        return "copies cannot be compared under jit"
    move = group.move.after(every[0].shape[:rank])
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in every):
        arrays = jax.eval_shape(lambda given: run(move, given)[0], given)
    else:
        wanted = [] if rank else [getattr(like, "sharding", None) for like in likes]
        arrays, faults = run(move, given, wanted)
        if faults and move.compares:
            return faults[0]
    return dict(zip(group.filled, itertools.chain(*arrays), strict=True))
