"""``carry_state``: an optimizer state for today's params, filled from an earlier one.

The new state is that of ``tx.init(params)``; each of its leaves that has a counterpart
in the earlier state, of the same shape and, unless it may be cast, dtype, is taken from
there. The report says of every leaf what became of it, and warns where what was carried
does not go together.
See ``matching`` for which names belong together.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.errors import (
    CheckpointError,
    MigrationError,
    TransformError,
    TreeAdaptWarning,
)
from treeadapt.layers.region import read_key
from treeadapt.migrations.migration import Migration, to_migration
from treeadapt.selection.selectors import select
from treeadapt.state.fields import can_hold, numpy_values
from treeadapt.state.matching import (
    Choice,
    Offers,
    by_node,
    learn_links,
    match_copies,
    match_rest,
)
from treeadapt.state.migrate_state import SavedState, move_copies
from treeadapt.state.nameless import nothing_carried, read_by_position
from treeadapt.state.report import (
    CarryReport,
    NewLeaf,
    Table,
    ambiguous_text,
    axes_of_layers,
    number,
    report_of,
)
from treeadapt.state.state_slices import StateLeaf, divide_leaves, fill
from treeadapt.text.names import listing, shorten
from treeadapt.transforms.adapt import is_transformation, with_extra_args
from treeadapt.transforms.flat import require_no_refs, trained
from treeadapt.transforms.nnx_state import is_nnx_optimizer, plain_state
from treeadapt.transforms.optax_fields import STORED_FIELDS, is_state_class
from treeadapt.transforms.state_map import (
    StateMap,
    below,
    cuts_of,
    fast_params,
    field_of,
    homes_in,
    init_of_arrays,
    map_names,
    map_state,
    view_init,
)
from treeadapt.trees.arrays import is_array, is_inexact
from treeadapt.trees.casting import converted, is_lost, kind_of
from treeadapt.trees.describing import describe
from treeadapt.trees.paths import unboxed
from treeadapt.trees.views import TreeView, view_tree

__all__ = ["CarryReport", "carry_state"]

_ORDER = "carry_state takes (tx, params, saved)"


def carry_state(
    tx: Any,
    params: Any,
    saved: Any,
    *,
    migration: Migration | None = None,
    cast: bool = False,
    reset: Any = None,
) -> tuple[Any, CarryReport]:
    """Return a state for ``tx`` and ``params``, filled from any earlier state.

    For what changes between two runs: which leaves are frozen, how they are grouped,
    layers of one array (see ``Rules``, ``stacks``) among them, what is wrapped around
    the optimizer, the classes of the model, plain Optax before and ``adapt`` now.
    Moments are matched by field and parameter path. Every other leaf
    (step counts, hyperparameters) follows the moments next to it: a group that took
    leaves from an earlier group continues that group's count, and one that took none
    starts at zero. Where the leaves of one group come from several with other counts,
    its own earlier count stays, or else the smallest is taken, which makes steps
    shorter, never longer. A group without moments (a schedule alone) goes on with the
    count of the group that has its name, else with that of all that it may be, if these
    are equal; if not, it starts at zero, with a warning.

    ``migration`` moves the params of the earlier run to those of today, and every copy
    of them in the state moves by the same rows: moments, averages, what ``MultiSteps``
    adds up, the memory of L-BFGS. Where a row has ``scale``, first moments are divided
    by it and second ones by its square; averages of params are scaled and shifted like
    them. What does not move starts fresh, and the report says why: a row with a
    function; what ``pad`` adds; copies of one parameter whose moments differ; layers
    that are stacked, but some were frozen or in another group; and, but for names,
    layers of one array that were in groups of their own, and statistics that do not
    have the shapes of the params (``adafactor``, ``sm3``). Such statistics start fresh,
    too, where an array is cut into other layers.

    A warning says where moments come from an optimizer of another kind. Optax gives
    the states of some optimizers one class and the same fields (``adam``, ``adamax``
    and ``adopt``; ``sgd`` with momentum and ``lars``): change between these with
    ``reset="**"``. Under ``scale`` all of one class are taken for ``adam``.

    Args:
        tx: the transformation as it is now: made by ``adapt``, ``partition`` or
            ``freeze``, or of plain Optax.
        params: the params as they are now, as ``tx.init`` takes them. If they are
            abstract, leaves that are not carried are too.
        saved: the earlier state, or the ``nnx.Optimizer`` that holds it; or its flat
            dict; or what a checkpoint library made of it, whatever its containers, and
            with or without ``/value`` below each ``nnx.Variable`` or other box. A
            checkpoint that holds more will do, as long as no second state in it fits
            as well.
        migration: from the params that ``saved`` is of to ``params``.
        cast: carry moments, averages and hyperparameters whose dtype has changed, in
            that of the new state: after the params became bfloat16, or float32 again.
            Without it they start fresh, and the report says so. Integers, booleans and
            keys are never cast, and nothing that would become infinite or NaN is.
        reset: selector of leaves of the new state that are not carried, by their label
            path: ``"inner_states/head"`` resets one group with its count,
            ``"**/hyperparams"`` takes hyperparameters from ``tx``.

    Returns:
        The state, with the structure of ``tx.init(params)``, and the report. Leaves
        that were carried, and not cast, are the saved objects, where they are; one that
        is carried twice (the count of a group that was divided) is copied.

    Raises:
        CheckpointError: ``saved`` is abstract, such as a schema, and ``params`` is not;
            or it is the name of a file; or nothing of it is carried and its arrays have
            no fields' names.
        UnusedRuleError: a pattern in ``reset`` matches no array of the new state.
        MigrationError: ``migration`` is a table and not a ``Migration``, or gives two
            leaves one name.
        PathCollisionError: two leaves of a state have the same path.
        TransformError: ``tx`` is not a transformation, or is in another place; or a
            leaf is a ``jax.Ref``.

    Warns:
        TreeAdaptWarning: several saved leaves fit a new one equally well and differ, so
            it starts as ``tx.init`` makes it; nothing was carried; or a saved state
            without fields' names, like the new one as a whole, was taken by position.

    Example:
        >>> from treeadapt.transforms.partition import partition
        >>> params = {"head": jnp.ones(2), "trunk": jnp.ones(3)}
        >>> rules = {"head": "a", "**": "frozen"}
        >>> state = partition({"a": optax.adam(1e-3)}, rules).init(params)
        >>> thawed = partition({"a": optax.adam(1e-3)}, {"**": "a"})
        >>> state, report = carry_state(thawed, params, state)
        >>> print(report)
        carried 3 of 5 leaves of the new state
        fresh, nothing saved fits (2): 'inner_states/a/0/mu/trunk', ...

        The layers are stacked, and their moments with them:

        >>> tx, layers = optax.adam(1e-3), {f"layer_{i}": jnp.ones(3) for i in range(4)}
        >>> stack = Migration({"layer_{l} : e": "layers : l e"})
        >>> params = stack(layers)
        >>> state, report = carry_state(tx, params, tx.init(layers), migration=stack)
        >>> state[0].mu["layers"].shape, report.carried["0/mu/layers"]
        ((4, 3), '0/mu/layer_{0..3}')
    """
    if not isinstance(migration, Migration | None):
        raise MigrationError(
            f"migration= expects a ta.Migration(table), and got {describe(migration)}."
            f"{to_migration(migration, 'migration=')}"
        )
    tx = with_extra_args(tx, _ORDER)
    _require_order(params, saved)
    is_abstract = _first_abstract(view_tree(params)) is not None
    try:
        new = view_init(tx, params)
    except TypeError:  # a mask that reads values, a state that holds no arrays
        new = view_tree(tx.init(params))
    view, said = _view_saved(saved, new, may_be_abstract=is_abstract)
    table = _tabulated(tx, params, new, view, migration, reset)
    _take_all(table, cast=cast)
    for row in table.copies:
        if row.fate == "fresh" and row.slot.array in table.unclear:
            row.fate = "misshaped"
            row.why = "cut along several axes that no key names"
    if is_abstract:
        _leave_abstract(table)
    report = report_of(table, None if is_abstract else init_of_arrays(tx, params))
    fits = report.carried or report.misshaped or report.ambiguous or report.unmoved
    old_arrays = [name for name, leaf in table.old.items() if is_array(leaf)]
    # What has leaves and no array is not a state: one without moments has no leaf.
    old_names = old_arrays or [*table.old]
    if report.fresh and old_names and not fits:
        model = view_tree(fast_params(params)).plan
        text = nothing_carried(new.plan, view.plan, old_names, model)
        said += [] if report.reset else [text]
    report = dataclasses.replace(report, warnings=(*said, *report.warnings))
    if report.ambiguous:
        said.append(ambiguous_text(report.ambiguous))
    for text in said:
        warnings.warn(text, TreeAdaptWarning, stacklevel=2)
    rows = table.rows
    # So far the new state has shapes only: fresh leaves, and layers that are not
    # carried, need values.
    if not is_abstract and any(row.source is None or row.piece.along for row in rows):
        new = view_tree(tx.init(params))
    return new.rebuild(_filled(new.leaves, table)), report


def _require_order(params: Any, saved: Any) -> None:
    """Raise unless params and a saved state are what they should be.

    Raises:
        TransformError: one is in the place of another, or a leaf is a ``jax.Ref``.
        CheckpointError: one is the name of a file.
    """
    for name, tree in (("params", params), ("saved", saved)):
        is_state = name == "params" and (_is_state(tree) or is_nnx_optimizer(tree))
        if is_transformation(tree) or is_state:
            raise TransformError(
                f"Got {describe(tree)} as {name}. {_ORDER}, the earlier state."
            )
        if isinstance(tree, str | os.PathLike):
            raise CheckpointError(
                f"{name} is a name, {shorten(repr(tree))}. Pass treeadapt.load(name)."
            )
    for tree in (fast_params(params), plain_state(saved)):
        require_no_refs(view_tree(tree))


def _view_saved(
    saved: Any, new: TreeView, *, may_be_abstract: bool
) -> tuple[TreeView, list[str]]:
    """Take a saved state apart; return it with warnings about its names.

    Raises:
        CheckpointError: it holds no arrays, and it must.
    """
    view, said = view_tree(plain_state(saved)), []
    if by_position := read_by_position(new, view):
        view = view_tree(by_position[0])
        said.append(by_position[1])
    path = _first_abstract(view)
    if path is not None and not may_be_abstract:
        raise CheckpointError(
            f"The saved state holds no arrays: {listing([path])} has a shape and "
            "no value, as all leaves of a schema. Load a checkpoint of it."
        )
    return view, said


def _tabulated(
    tx: Any,
    params: Any,
    new: TreeView,
    view: TreeView,
    migration: Migration | None,
    reset: Any,
) -> Table:
    """Return the leaves of both states, moved by a migration and cut into layers.

    Args:
        tx: makes the new state.
        params: of the new state.
        new: the state that ``tx`` makes.
        view: the saved state.
        migration: from the params of the saved state to ``params``.
        reset: selector of leaves that start again.
    """
    flat = trained(view_tree(fast_params(params)))
    paths = tuple(flat)
    new_map = map_state(tx, new, params)
    asked = [False] * len(new.leaves) if reset is None else select(new, reset)
    old = _without_boxes(view.flat(), new.plan.paths, paths)
    rows = [
        NewLeaf(slot, spec, slot.name, fate="reset" if yes else "fresh")
        for slot, spec, yes in zip(new_map.slots, new.leaves, asked, strict=True)
    ]
    prefixes = new_map.prefixes_in(view.plan, old)
    if migration is None:
        saved = _unmoved(old, new_map, paths, prefixes)
    else:
        saved = move_copies(old, migration, new_map, flat, prefixes)
    # Where two states hold other layers of one array, each leaf becomes several: those
    # of both sides are then of the same layers.
    both: list[Any] = [*rows, *saved.leaves.values()]
    pieces, unclear = divide_leaves(both, flat)
    rows = [row for one in rows for row in pieces.get(id(one), [one])]
    leaves = [x for leaf in saved.leaves.values() for x in pieces.get(id(leaf), [leaf])]
    saved = dataclasses.replace(saved, leaves={leaf.slot.name: leaf for leaf in leaves})
    return Table(rows, saved, old, (new.plan, view.plan), len(paths), unclear)


def _unmoved(
    old: Mapping[str, Any],
    new_map: StateMap,
    paths: Sequence[str],
    prefixes: Mapping[str, str | None],
) -> SavedState:
    """Return saved leaves of params that have the names that they had.

    Args:
        old: leaves of the saved state, by path.
        new_map: of the new state.
        paths: of the params.
        prefixes: see ``StateMap.prefixes_in``.
    """
    copies = [slot for slot, _ in new_map.copies]
    # An unchanged name is that of the same leaf.
    same = {slot.name: slot.prefix for slot in new_map.slots if slot.name in old}
    prefixes = same | dict(prefixes)
    arrays = {slot.array: slot.region.path for slot in copies if slot.region}
    home = homes_in(dict(zip(paths, paths, strict=True)) | arrays)
    fields = {field_of(str(slot.prefix)) for slot in copies}
    slots = map_names(old, fields, home, prefixes)
    leaves = {x.name: StateLeaf(x, old[x.name], x.name) for x in slots}
    return SavedState(leaves, prefixes=prefixes, fields=by_node(slots))


def _is_state(tree: Any) -> bool:
    """Return whether a tree is a state of Optax, or of a chain."""
    parts = tree if type(tree) is tuple else (tree,)
    return any(is_state_class(type(part)) for part in parts)


def _take_all(table: Table, *, cast: bool) -> None:
    """Carry what can be carried: the leaves of copies of the params, then the rest."""
    slots = [row.slot for row in table.rows]
    wanted = [row.slot for row in table.copies if row.fate == "fresh"]
    saved = [leaf.slot for leaf in table.saved.leaves.values()]
    copies = match_copies(wanted, [slot for slot in saved if slot.is_copy])
    _take(table, copies, cast=cast)
    links = learn_links([(row.slot, source.slot) for row, source in table.moved])
    value, grad = STORED_FIELDS
    # A finite value of a line search says that the gradient with it is whole, and that
    # of the same params.
    stale = {
        below(row.slot.node, value)
        for row in table.copies
        if row.slot.field == grad and (row.source is None or row.retyped)
    }
    rest = match_rest(slots, saved, links, table.saved.fields)
    _take(table, rest, cast=cast, passed=stale)


def _take(
    table: Table, offers: Offers, *, cast: bool, passed: Container[str] = ()
) -> None:
    """Carry the leaves that were found, as far as they fit."""
    for row in table.rows:
        name = row.slot.name
        if row.fate != "fresh" or name in passed or name not in offers:
            continue
        names, choice = offers[name]
        sources = [table.saved.leaves[one] for one in names]
        source = _choose(sources, choice)
        if source is None:
            row.fate = "ambiguous"
            row.why = tuple([table.text([one]) for one in sources])
        elif misfit := _misfit(row, source, cast=cast):
            row.fate = "misshaped"
            row.is_castable = not cast and _misfit(row, source, cast=True) is None
            row.why = f"{misfit} (saved as {table.text([source])!r})"
        else:
            row.fate, row.source = "carried", source


def _leave_abstract(table: Table) -> None:
    """Leave leaves alone of which some layers are carried and the others abstract."""
    for parts in table.wholes:
        carried = [row for row in parts if row.source]
        values = [row.source.value for row in carried if row.source]
        is_abstract = all(isinstance(value, jax.ShapeDtypeStruct) for value in values)
        for row in carried if len(carried) < len(parts) and not is_abstract else ():
            row.fate, row.source = "fresh", None


def _choose(sources: Sequence[StateLeaf], choice: Choice) -> StateLeaf | None:
    """Choose among saved leaves, by what may decide; None where nothing does."""
    first, *others = [leaf.value for leaf in sources]
    counts = [number(leaf.value) for leaf in sources]
    is_one = counts[0] is not None and counts.count(counts[0]) == len(counts)
    if choice != "nothing" and (is_one or all(_same(first, x) for x in others)):
        return sources[0]
    if choice != "least" or not all(type(count) is int for count in counts):
        return None
    return sources[counts.index(min(counts))]


def _without_boxes(
    old: dict[str, Any], names: Sequence[str], paths: Sequence[str]
) -> dict[str, Any]:
    """Name saved leaves without the ``value`` of boxes; see ``unboxed``."""
    if not [name for name in old if name.endswith("value")]:
        return old
    new_names = frozenset((*names, *paths))
    stored = (*old, *(name.removesuffix("/value") for name in old))
    tails = {name: [tail for _, tail in cuts_of(name)] for name in stored}
    new = unboxed(old, [x for x in stored if not new_names.isdisjoint(tails[x])])
    return {new[name]: leaf for name, leaf in old.items()}


def _filled(leaves: Sequence[Any], table: Table) -> list[Any]:
    """Return the leaves of the new state."""
    filled = []
    used: set[int] = set()
    for leaf, parts in zip(leaves, table.wholes, strict=True):
        carried = [(row.piece, row.carried()) for row in parts if row.source]
        if not carried:
            filled.append(leaf)
            continue
        piece, old = carried[0]
        if piece.along:
            old = fill(leaf, carried)
        elif is_array(leaf) and not is_array(old):
            old = jnp.asarray(old, leaf.dtype)
        elif id(old) in used and isinstance(old, jax.Array):
            old = jnp.array(old, copy=True)  # one array in two places is not donatable
        filled.append(old)
        used.update([id(value) for _, value in carried])
    return filled


def _misfit(new: StateLeaf, saved: StateLeaf, *, cast: bool) -> str | None:
    """Say why a saved leaf cannot be in the new state; None if it can."""
    spec, old = new.value, saved.value
    if not is_array(spec):
        fits = type(old) is type(spec)
    elif not is_array(old):
        fits = not (new.slot.is_copy and spec.shape) and can_hold(spec.dtype, old)
    else:
        fits = old.shape == spec.shape or (
            not new.slot.is_copy and axes_of_layers(old, spec.shape) is not None
        )
        fits &= old.dtype == spec.dtype or (cast and _is_castable(old, spec.dtype))
    if not fits:
        return f"{describe(spec)}, but the saved one is {describe(old)}"
    if is_array(old) and is_array(spec) and _is_too_large(old, spec.dtype):
        return f"{describe(spec)}, where the saved {describe(old)} would be infinite"
    if new.slot.is_copy or np.shape(spec) != np.shape(old) or np.shape(spec) == ():
        return None
    # What ``per_layer`` keeps for each layer has its layers in the name of its state.
    one, two = (read_key(leaf.slot.node) for leaf in (new, saved))
    layers, old_layers = [*one.numbers.values()], [*two.numbers.values()]
    # One shape for more layers and for fewer, as of 4 and of 6: all layers share it.
    are_shared = (
        one.along and two.along and math.prod(one.sizes) != math.prod(two.sizes)
    )
    if layers == old_layers or are_shared or number(old) is not None:
        return None  # a number is one such as a step count
    return f"{describe(spec)} of other layers than the saved one"


def _is_castable(array: Any, dtype: Any) -> bool:
    """Return whether arrays of a dtype are numbers of the same kind, and not whole."""
    return is_inexact(array) and kind_of(array.dtype) == kind_of(dtype)


def _is_too_large(array: Any, dtype: Any) -> bool:
    """Return whether a number of an array is known to become infinite in a dtype."""
    has_value = not isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct)
    if array.dtype == dtype or not has_value:
        return False
    if jnp.finfo(array.dtype).max <= jnp.finfo(dtype).max:
        return False
    with np.errstate(over="ignore"):
        cast = converted(array, dtype)
    return bool(is_lost(array, cast, jnp if isinstance(array, jax.Array) else np))


def _same(one: Any, two: Any) -> bool:
    if one is two:
        return True
    values = numpy_values(one), numpy_values(two)
    return all(v is not None for v in values) and np.array_equal(*values)


def _first_abstract(view: TreeView) -> str | None:
    """Return the path of a leaf that has a shape and no value; None if all have one."""
    is_abstract = (p for p, x in view.items() if isinstance(x, jax.ShapeDtypeStruct))
    return next(is_abstract, None)
