"""Running: the arrays of one group, moved from their addresses to the others.

Takes a ``Move``, which knows every size, and arrays; gives arrays. NumPy arrays stay
with NumPy, and where one array becomes another whole the result may be a view of it, as
of ``numpy.transpose``. Anything else is moved by JAX: traced if it is, otherwise in one
compiled function for all groups of the same form.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from treeadapt.migrations.axes import Axes, Product, indices, names_of
from treeadapt.migrations.move import Layout, Move
from treeadapt.migrations.rows import Piece
from treeadapt.migrations.take import Order, taken_name
from treeadapt.trees.arrays import narrow_bits
from treeadapt.trees.casting import (
    converted,
    factor_dtype,
    has_infinite,
    is_lost,
    wide_dtype,
)

_MOST_RUNS = 16  # that are taken as slices

#: What may be wrong with values.
UNEQUAL = "the copies are not equal"
CUT_OFF = "what is cut off is not zero"
LOST = "values do not fit their new dtype"


def run(
    move: Move,
    leaves: Sequence[Sequence[Any]],
    shardings: Sequence[Sequence[Any]] = (),
) -> tuple[list[list[Any]], list[str]]:
    """Move the arrays of one group.

    Args:
        move: how.
        leaves: the arrays of each source, in the order of their numbers.
        shardings: where each array of each target belongs, None for anywhere; empty if
            that is so for all.

    Returns:
        The arrays of each target, in the order of their numbers, and what is wrong with
        the values: known of concrete arrays only.
    """
    every = [leaf for group in leaves for leaf in group]
    places = [*itertools.chain(*shardings)]
    if all(isinstance(leaf, np.ndarray | np.generic) for leaf in every):
        arrays, faults = _run_on_host(move, leaves)
    elif any(isinstance(leaf, jax.core.Tracer) for leaf in every):
        return _run(move, [_narrowed(move, group) for group in leaves], jnp)[0], []
    elif places and None not in places and len(_orders(every)) > 1:
        # No program takes arrays of several meshes.
        arrays, faults = _run_on_host(move, leaves)
        arrays = [
            [*map(jax.device_put, group, target)]
            for group, target in zip(arrays, shardings, strict=True)
        ]
    else:
        arrays, faults = _run_compiled(move, leaves, shardings)
    return arrays, [
        text
        for text, fault in zip((UNEQUAL, CUT_OFF, LOST), faults, strict=True)
        if not isinstance(fault, jax.core.Tracer) and bool(fault)
    ]


def _narrowed(move: Move, leaves: Sequence[Any]) -> list[Any]:
    """Return leaves in the dtype of the result if that is smaller.

    A cast is the same before a move as after it, but then fewer bytes are moved, also
    from device to device. Not before a computation, which would round other numbers.
    """
    if move.values.computes or move.values.multiply:
        return [*leaves]
    smaller = [leaf.dtype.itemsize > move.dtype.itemsize for leaf in leaves]
    return [
        converted(leaf, move.dtype) if is_larger else leaf
        for leaf, is_larger in zip(leaves, smaller, strict=True)
    ]


def _run_on_host(
    move: Move, leaves: Sequence[Sequence[Any]]
) -> tuple[list[list[Any]], list[Any]]:
    """Move arrays with NumPy."""
    with np.errstate(all="ignore"):  # what overflows is in the faults
        return _run(move, [list(map(np.asarray, group)) for group in leaves], np)


def _run_compiled(
    move: Move, leaves: Sequence[Sequence[Any]], shardings: Sequence[Sequence[Any]]
) -> tuple[list[list[Any]], list[Any]]:
    """Move concrete arrays of JAX, without gathering what is sharded."""
    every = [leaf for group in leaves for leaf in group]
    wanted: tuple[tuple[Any, ...], ...] = ()
    if _movable(every, [*itertools.chain(*shardings)]):
        wanted = tuple(
            tuple(_with_axes(each, AxisType.Auto) for each in target)
            for target in shardings
        )
    kept = (getattr(leaf, "sharding", None) for leaf in every)  # NumPy has none
    is_explicit = any(map(operator.is_not, map(_auto_sharding, every), kept))
    # While something is traced, what is not traced moves now: it leaves its mesh.
    now = jax.ensure_compile_time_eval if is_explicit else contextlib.nullcontext
    with now():
        compiled = _compiled(move, wanted)
        arrays, faults = on_auto_axes(compiled, tuple(map(tuple, leaves)))
    anywhere = [[None] * len(group) for group in arrays]
    with now(), no_mesh():
        for group, target in zip(arrays, shardings or anywhere, strict=True):
            for place, (array, sharding) in enumerate(zip(group, target, strict=True)):
                if sharding is None and is_explicit:
                    sharding = _with_axes(array.sharding, AxisType.Explicit)
                if sharding is not None:
                    group[place] = jax.device_put(array, sharding)
    return arrays, faults


def on_auto_axes(compiled: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled function with arrays on meshes with Auto axes.

    Explicit axes would ask for the sharding after each reshape.
    """

    def on_auto_mesh(leaf: Any) -> Any:
        sharding = _auto_sharding(leaf)
        is_auto = sharding is getattr(leaf, "sharding", None)
        return leaf if is_auto else jax.device_put(leaf, sharding)

    with no_mesh():
        return compiled(*jax.tree.map(on_auto_mesh, args))


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Return a context without the mesh in force, if there is one.

    JAX refuses arrays of other meshes and devices than those of that mesh.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    try:
        return jax.set_mesh(Mesh(np.empty((), object), ()))
    except ValueError:  # while something is traced, its axes alone can be left
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _auto_sharding(leaf: Any) -> Any:
    """Return the sharding of an array, or the same with Auto axes."""
    return _with_axes(getattr(leaf, "sharding", None), AxisType.Auto)


def _with_axes(sharding: Any, kind: AxisType) -> Any:
    """Return a sharding on the same mesh with axes of another kind."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    kinds = (kind,) * len(mesh.axis_names)
    if mesh.axis_types == kinds or not isinstance(mesh, Mesh):
        return sharding
    other = Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return NamedSharding(other, sharding.spec, memory_kind=sharding.memory_kind)


def _movable(leaves: Sequence[Any], shardings: Sequence[Any]) -> bool:
    """Return whether one compiled function can take the leaves to some shardings."""
    wanted = {_devices(each) for each in shardings if each is not None}
    return bool(wanted) and len(wanted | _orders(leaves)) == 1


def _orders(leaves: Iterable[Any]) -> set[tuple[Any, ...]]:
    """Return the devices of leaves that were put on some, in their order."""
    return {
        _devices(leaf.sharding) for leaf in leaves if getattr(leaf, "committed", False)
    }


def _devices(sharding: Any) -> tuple[Any, ...]:
    """Return the devices of a sharding, in their order, which is that of a program."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=operator.attrgetter("id")))


@functools.lru_cache(maxsize=256)
def _compiled(move: Move, shardings: tuple[tuple[Any, ...], ...]) -> Any:
    def moved(leaves: Any) -> Any:  # by this name JAX complains of devices
        return _run(move, leaves, jnp, max_bits=64)

    if not shardings:
        return jax.jit(moved)
    return jax.jit(moved, out_shardings=([*map(list, shardings)], None))


def _run(
    move: Move, leaves: Sequence[Sequence[Any]], xp: Any, max_bits: int = 16
) -> tuple[list[list[Any]], list[Any]]:
    """Move arrays with NumPy, or with JAX: traced, or on the way into a program.

    Args:
        move: how.
        leaves: the arrays of each source.
        xp: ``numpy`` or ``jax.numpy``.
        max_bits: of floats that JAX moves as integers.

    Returns:
        The arrays of each target, and whether each fault is there.
    """
    lost: list[Any] = []
    if move.values.add and not move.values.undoes:
        gathered, ends, pairs = _added(move, leaves, xp, max_bits, lost)
    elif move.values.multiply:
        gathered, ends, pairs = [_multiplied(move, leaves, xp, lost)], [], []
    else:
        moved = functools.partial(moved_numbers, move, xp=xp)
        gathered, ends, pairs = _by_bits(moved, leaves, xp, max_bits)
    rest = [xp.any(_bits(end, xp) != 0) for end in ends]
    unequal = [xp.any(_bits(one, xp) != _bits(two, xp)) for one, two in pairs]
    finished = [
        [_finished(move, target, array, xp, lost) for array in arrays]
        for target, arrays in zip(move.targets, gathered, strict=True)
    ]
    for place in move.zeros:
        finished[place] = [*map(xp.zeros_like, finished[place])]
    return finished, [xp.any(xp.array(each, bool)) for each in (unequal, rest, lost)]


def _by_bits(
    moved: Callable[[Any], Any], arrays: Any, xp: Any, max_bits: int = 16
) -> Any:
    """Call a function that only moves numbers, so that it keeps all their bits.

    XLA may widen floats of 16 bits and less even where it only copies them, and a NaN
    then comes back as another one. Of any floats that are sharded it may take sums with
    zeros, which end minus zeros and subnormal numbers. As integers they stay as they
    are. The derivative is that of the function itself, which is linear.

    Args:
        moved: the function; each number of its result is one of its argument, or 0.
        arrays: its argument, a tree of arrays of one dtype.
        xp: ``numpy`` or ``jax.numpy``.
        max_bits: of floats that JAX moves as integers.
    """
    dtype = jax.tree.leaves(arrays)[0].dtype
    bits = None if xp is np else narrow_bits(dtype, max_bits)
    if bits is None:
        return moved(arrays)

    def viewed(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda a: jax.lax.bitcast_convert_type(a, dtype), tree)

    @jax.custom_jvp
    def exactly(arrays: Any) -> Any:
        return viewed(moved(viewed(arrays, bits)), dtype)

    @exactly.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return exactly(*primals), moved(*tangents)

    return exactly(arrays)


def moved_numbers(
    move: Move, leaves: Sequence[Sequence[Any]], xp: Any
) -> tuple[list[list[Any]], list[Any], list[tuple[Any, Any]]]:
    """Return the arrays of each target, the ends, and what must be equal.

    Args:
        move: how they are moved.
        leaves: the arrays of each source.
        xp: ``numpy`` or ``jax.numpy``.

    Returns:
        For each target its arrays; what is cut off of the sources; and pairs of arrays
        that must be equal, if the second one is repeated along axes of size 1.
    """
    pairs: list[tuple[Any, Any]] = []
    ends: list[Any] = []
    sources: list[Any] = []
    for layout, group in zip(move.sources, leaves, strict=True):
        inner = [_without_pads(move, layout, leaf, xp, ends) for leaf in group]
        if xp is np and len(inner) == 1:  # a stack of one would be a copy
            sources.append(inner[0][None] if layout.numbers else inner[0])
        else:
            sources.append(xp.stack(inner) if layout.numbers else inner[0])
    gathered = []
    for number in range(len(move.targets)):
        pieces = [piece for piece in move.pieces if piece.target == number]
        copies = [[piece] for piece in pieces] if move.compares else [pieces]
        arrays, *others = (_gathered(move, each, sources, xp, pairs) for each in copies)
        pairs += itertools.chain(*(zip(other, arrays, strict=True) for other in others))
        gathered.append(arrays)
    return gathered, ends, pairs


def _added(
    move: Move,
    leaves: Sequence[Sequence[Any]],
    xp: Any,
    max_bits: int,
    lost: list[Any],
) -> tuple[list[list[Any]], list[Any], list[Any]]:
    """Return what ``moved_numbers`` does, of a target that is the sum of sources.

    Args:
        move: it knows the layouts and the sizes.
        leaves: the arrays of each source.
        xp: ``numpy`` or ``jax.numpy``.
        max_bits: as for ``_run``.
        lost: gets whether values are lost.
    """
    every, ends = [], []
    for place in range(len(leaves)):
        pieces = tuple(p._replace(source=0) for p in move.pieces if p.source == place)
        layouts = move.sources[place : place + 1]
        alone = dataclasses.replace(move, sources=layouts, pieces=pieces)
        moved = functools.partial(moved_numbers, alone, xp=xp)
        arrays, cut, _ = _by_bits(moved, leaves[place : place + 1], xp, max_bits)
        every.append(arrays[0])
        ends += cut
    sums = []
    for arrays in zip(*every, strict=True):
        wide = [array.astype(wide_dtype(array.dtype)) for array in arrays]
        sums.append(functools.reduce(operator.add, wide))
        are_finite = functools.reduce(operator.and_, map(xp.isfinite, wide))
        lost.append(xp.any(~xp.isfinite(sums[-1]) & are_finite))
    return [sums], ends, []


def _multiplied(
    move: Move, leaves: Sequence[Sequence[Any]], xp: Any, lost: list[Any]
) -> list[Any]:
    """Return the arrays of a target that is the product of the sources.

    Args:
        move: it knows the layouts and the sizes.
        leaves: the arrays of each source.
        xp: ``numpy`` or ``jax.numpy``.
        lost: gets whether values are lost.
    """
    (target,) = move.targets
    wanted = [*target.numbers, *names_of(target.axes, 0)]
    dtype = factor_dtype(array.dtype for array, *_ in leaves)
    # In the order of the largest factor, whose memory is then walked as it lies.
    lead = max(
        ([*each.numbers, *names_of(each.axes, 0)] for each in move.sources), key=len
    )
    lead += [name for name in wanted if name not in lead]
    factors: list[Any] = []
    for layout, group in zip(move.sources, leaves, strict=True):
        axes = [axis.product(0) for axis in layout.axes]
        ends = [(0, move.count(axis) - move.length(axis)) for axis in axes]
        arrays = [converted(array, dtype) for array in group]
        if any(map(any, ends)):
            arrays = [xp.pad(array, ends) for array in arrays]
        array = xp.stack(arrays) if layout.numbers else arrays[0]
        names = [*layout.numbers, *itertools.chain(*axes)]
        array = xp.reshape(array, [move.size[name] for name in names])
        order = [names.index(name) for name in lead if name in names]
        shape = [move.size[name] if name in names else 1 for name in lead]
        factors.append(xp.reshape(xp.transpose(array, order), shape))
    product = functools.reduce(operator.mul, factors)
    is_too_large = ~xp.isfinite(product)
    if xp is not np or is_too_large.any():
        are_finite = functools.reduce(operator.and_, map(xp.isfinite, factors))
        lost.append(xp.any(is_too_large & are_finite))
    product = xp.transpose(product, [lead.index(name) for name in wanted])
    shape = [move.size[name] for name in target.numbers]
    shape += [move.count(axis.product(0)) for axis in target.axes]
    cuts = [slice(move.length(axis.product(0))) for axis in target.axes]
    product = xp.reshape(product, shape)
    return [product[(*index, *cuts)] for index in indices(target.numbers, move.size)]


def _gathered(
    move: Move,
    pieces: Sequence[Piece],
    sources: Sequence[Any],
    xp: Any,
    pairs: list[tuple[Any, Any]],
) -> list[Any]:
    """Return the arrays of a target, made of one array for each source.

    Args:
        move: it knows the layouts and the sizes.
        pieces: of this target.
        sources: the arrays; those of several leaves are stacked along a first axis.
        xp: ``numpy`` or ``jax.numpy``.
        pairs: gets the arrays of which a copy is taken, each with that copy.
    """
    target = move.targets[pieces[0].target]
    parts = []
    for s, one, _, two in pieces:
        source, array = move.sources[s], sources[s]
        place = _joint(source.axes)
        if place is not None:
            axis = source.axes[place]
            start, place = move.start(axis, one), place + bool(source.numbers)
            if axis.before:  # for each value before the bracket the parts follow
                split = move.count(axis.outer), move.width(axis)
                shape = (*array.shape[:place], *split, *array.shape[place + 1 :])
                array, place = xp.reshape(array, shape), place + 1
            span = slice(start, start + move.count(axis.inner(one)))
            array = array[(slice(None),) * place + (span,)]
        names = [*source.numbers, *names_of(source.axes, one)]
        array = xp.reshape(array, [move.size[name] for name in names])
        for name, taken in move.takes:
            if name in names:
                array = _taken(array, names.index(name), taken, xp)
                names[names.index(name)] = taken_name(name)
        wanted = [*target.numbers, *names_of(target.axes, two)]
        repeated = [name for name in wanted if name not in names]
        copied = [name for name in names if name not in wanted]
        order = [*names]
        for axis in target.axes if repeated else ():
            order = _next_to(order, axis.product(two))
        if repeated:
            # In the order of the sources, in which NumPy copies fastest.
            array = xp.reshape(
                array, [move.size[n] if n in names else 1 for n in order]
            )
            array = xp.broadcast_to(array, [move.size[name] for name in order])
            array = np.ascontiguousarray(array) if xp is np else array
        array = xp.transpose(array, [order.index(name) for name in (*copied, *wanted)])
        if copied:
            first = array[(slice(1),) * len(copied)]
            # An axis more, so that the bytes of an element are not among its copies.
            pairs.append((array[..., None], first[..., None]))
            array = first[(0,) * len(copied)]
        products = [
            product
            for axis in target.axes
            for product in [axis.outer, axis.inner(two)][not axis.before :]
        ]
        counts = [move.size[name] for name in target.numbers]
        parts.append(xp.reshape(array, [*counts, *map(move.count, products)]))
    joined = parts[0]
    if len(parts) > 1:
        place = _joint(target.axes)
        is_nested = target.axes[place].before > 0
        joined = xp.concatenate(parts, len(target.numbers) + place + is_nested)
        if is_nested:
            joined = xp.reshape(joined, [*counts, *move.shape(target)])
    return [joined[index] for index in indices(target.numbers, move.size)]


def _taken(array: Any, axis: int, order: Order, xp: Any) -> Any:
    """Return the numbers along an axis that are taken, in their order."""
    if len(order.runs) > _MOST_RUNS:
        return xp.take(array, order.numbers, axis, mode="clip")  # which have no NaN
    runs = [
        array[
            (slice(None),) * axis
            + (slice(n.start, n.stop if n.stop >= 0 else None, n.step),)
        ]
        for n in order.runs
    ]
    return runs[0] if len(runs) == 1 else xp.concatenate(runs, axis)


def _next_to(order: Sequence[str], product: Product) -> list[str]:
    """Return names with those of one axis added that lack, next to their neighbours.

    Example:
        >>> _next_to(["k", "d", "e"], ("k", "r")), _next_to(["k", "e"], ("r",))
        (['k', 'r', 'd', 'e'], ['r', 'k', 'e'])
    """
    names = [*order]
    for place, name in enumerate(product):
        if name not in names:
            before = [names.index(each) + 1 for each in product[:place]]
            after = [names.index(each) for each in product[place:] if each in names]
            names.insert([*before[-1:], *after, 0][0], name)
    return names


def _joint(axes: Axes) -> Any:
    """Return the place of the concatenation among the axes; None without one."""
    return next((place for place, axis in enumerate(axes) if len(axis.parts) > 1), None)


def _without_pads(
    move: Move, layout: Layout, array: Any, xp: Any, ends: list[Any]
) -> Any:
    """Cut off what was added to a source.

    Args:
        move: it knows what.
        layout: of the source.
        array: the source as it is.
        xp: ``numpy`` or ``jax.numpy``.
        ends: gets what is cut off.
    """
    places = [axis.name for axis in layout.axes]
    for name, (before, _) in move.values.pads(is_source=True).items():
        cuts = [before, before + move.size[str(name)]]
        first, array, last = xp.split(array, cuts, places.index(name))
        ends += [first, last] if move.values.cuts_zeros else []
    return array


def _finished(move: Move, layout: Layout, array: Any, xp: Any, lost: list[Any]) -> Any:
    """Change the values of a target, or undo that, and change its dtype.

    Args:
        move: it knows how.
        layout: of the target.
        array: the target as it was moved.
        xp: ``numpy`` or ``jax.numpy``.
        lost: gets whether values are lost.
    """
    new, scale, offset = array, move.values.scale, move.values.offset
    if move.values.computes:
        wide = array.astype(wide_dtype(array.dtype))
        new = (wide - offset) / scale if move.values.undoes else wide * scale + offset
        lost.append(is_lost(wide, new, xp))
    if new.dtype != move.dtype:
        before, new = new, converted(new, move.dtype)
        lost.append(is_lost(before, new, xp))
    pads = move.values.pads(is_source=False)
    if pads:
        widths = [pads.get(axis.name, (0, 0)) for axis in layout.axes]
        padded = np.pad if xp is np else _with_zeros
        new = _by_bits(lambda array: padded(array, widths), new, xp)
    # Because an element of an array of NumPy is not one.
    return np.asarray(new) if xp is np else new


def _with_zeros(array: Any, widths: Sequence[tuple[int, int]]) -> Any:
    """Return an array of JAX with zeros before and after each axis.

    XLA for CPUs fuses ``pad`` with what it follows, and then NaNs of 16 bits come out
    as others although they are integers at that time (JAX 0.10.2); it does not fuse
    ``concatenate``.
    """
    for axis, ends in enumerate(widths):
        shapes = ([*array.shape[:axis], n, *array.shape[axis + 1 :]] for n in ends)
        before, after = (jnp.zeros(shape, array.dtype) for shape in shapes)
        array = jnp.concatenate([before, array, after], axis) if any(ends) else array
    return array


def filled(move: Move, target: int, array: Any, like: Any) -> Any:
    """Return an array whose padding has the numbers of another one.

    Arrays on a mesh stay there, and each device takes the numbers that it has.

    Args:
        move: it padded the array, with zeros.
        target: place of the target that the array is of.
        array: what it made.
        like: array of this shape and dtype.
    """
    axes = move.targets[target].axes
    pads = move.values.pads(is_source=False)
    box = tuple(
        slice(before, size - after)
        for size, axis in zip(array.shape, axes, strict=True)
        for before, after in [pads.get(axis.name, (0, 0))]
    )
    if isinstance(array, np.ndarray):
        new = np.array(like)
        new[box] = array[box]
        return new

    def chosen(pair: Any) -> Any:
        inside = [
            (place >= each.start) & (place < each.stop)
            for axis, each in enumerate(box)
            for place in [jax.lax.broadcasted_iota(np.int32, array.shape, axis)]
        ]
        return jnp.where(functools.reduce(operator.and_, inside), *pair)

    def exactly(*pair: Any) -> Any:
        return _by_bits(chosen, pair, jnp, max_bits=64)

    if isinstance(array, jax.core.Tracer) or isinstance(like, jax.core.Tracer):
        return exactly(array, like)
    new = on_auto_axes(jax.jit(exactly), array, like)
    sharding = array.sharding
    return new if new.sharding == sharding else jax.device_put(new, sharding)


def _bits(array: Any, xp: Any) -> Any:
    """Return integers that are equal where the array is, bit for bit."""
    if xp is np:
        if array.dtype.hasobject:
            return array
        return np.ascontiguousarray(array).view(np.uint8)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    if jnp.issubdtype(array.dtype, jnp.floating):
        if not has_infinite(array.dtype):  # XLA for CPUs cannot view 4 bits
            array = array.astype(np.float32)
        bits = jnp.finfo(array.dtype).bits
        return jax.lax.bitcast_convert_type(array, f"uint{bits}")
    return array
