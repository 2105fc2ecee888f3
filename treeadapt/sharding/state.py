"""Shardings of an optimizer's state: every array follows the param it belongs to.

``opt_state_shardings`` says where the state of any Optax transformation goes, and
``init_sharded`` makes it there. A state leaf belongs to the param at which its path
ends; its shape then says how: the same shape has the same sharding, axes that are
missing (factored statistics) or came in front (a memory of several steps) are
accounted for, as are slices (some layers of a param), and whatever else there is, is on
every device. Structure alone would not do: Adafactor, SM3, L-BFGS and ``zero_nans``
keep other shapes in the place of a param.
See ``transforms/state_map`` for what each leaf of a state is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from treeadapt.errors import ShardingError
from treeadapt.layers.region import Region
from treeadapt.sharding.specs import is_open, mesh_axes, spec_of_rank
from treeadapt.text.names import listing, plural
from treeadapt.transforms.adapt import with_extra_args
from treeadapt.transforms.flat import view_params
from treeadapt.transforms.state_map import (
    Slot,
    fast_params,
    init_of_arrays,
    map_state,
    view_init,
)
from treeadapt.trees.arrays import is_array
from treeadapt.trees.views import TreeView, view_tree

#: A sharding, or the spec of one.
Placement = Sharding | PartitionSpec

_OF_NUMPY = np.ndarray | np.generic


def opt_state_shardings(
    tx: Any, params: Any, shardings: Any = None, *, memory_kind: str | None = None
) -> Any:
    """Return the sharding of every array in the state of an optimizer.

    Args:
        tx: any transformation: of Optax, or made by ``adapt``, ``partition``,
            ``freeze``. Only shapes go through its ``init``.
        params: the params as ``tx.init`` takes them, concrete or abstract.
        shardings: tree with the paths of ``params``, in any containers, of shardings or
            of ``PartitionSpec``; None for the shardings that the arrays in ``params``
            have.
        memory_kind: of every array of the state, scalars included, such as
            ``"pinned_host"`` for the memory of the host; None for that of its param. A
            compiled step moves such a state to its devices and back.

    Returns:
        Tree with the treedef of ``tx.init(params)``, of ``PartitionSpec`` if
        ``shardings`` are, else of shardings: for a copy of a param the param's own,
        memory kind included; for statistics of one, the part of it that remains. Where
        sizes do not say which axis remained, that axis is not sharded. State of some
        layers of a stacked param is sharded along the axis of the layers if the mesh
        divides their number (never if ``shardings`` are specs). An array that belongs
        to no param is on every device of the mesh.

    Raises:
        ShardingError: an array has no sharding, or one that does not fit its shape; or
            its devices have no memory of that kind, or ``shardings`` are specs, which
            have none.
        TransformError: ``tx`` is not a transformation, or JAX sees an object in
            ``params`` that holds arrays as one leaf.
        PathCollisionError: two leaves have the same path.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> params = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
        >>> specs = opt_state_shardings(optax.adam(1e-3), params, {"w": P("x", None)})
        >>> specs[0].mu, specs[0].count
        ({'w': P('x', None)}, P())
    """
    state, places = place_state(tx, params, shardings)
    placements = [place.placement for place in places]
    if memory_kind is not None:
        placements = [in_memory(placement, memory_kind) for placement in placements]
    return state.rebuild(placements)


def in_memory(placement: Placement, kind: str) -> Sharding:
    """Return a sharding in another memory of the same devices."""
    if isinstance(placement, PartitionSpec):
        raise ShardingError(
            f"memory_kind={kind!r} got specs, which name no memory. Pass shardings: "
            "named_shardings(params, rules, mesh)."
        )
    try:
        return placement.with_memory_kind(str(kind))
    except ValueError as error:  # of JAX, which lists those that there are
        text = str(error).removesuffix(".")
        raise ShardingError(
            f"memory_kind={kind!r}: {text}. Pass one of these, or None."
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where one array of a state is.

    Attributes:
        slot: in the state.
        param: path of the param that it belongs to; None if it belongs to none.
        placement: on the devices.
        is_split: whether it holds some layers of a param that is sharded along the axis
            of its layers.
    """

    slot: Slot
    param: str | None
    placement: Placement
    is_split: bool = False


def place_state(
    tx: Any, params: Any, shardings: Any = None, mesh: Mesh | AbstractMesh | None = None
) -> tuple[TreeView, list[Place]]:
    """Say where each array of a state goes.

    Args:
        tx: as for ``opt_state_shardings``, as all others.
        params: the params.
        shardings: their shardings or specs.
        mesh: that of the specs, if it is known.

    Returns:
        The abstract state, and one place a leaf.
    """
    with_extra_args(tx, "The order is (tx, params, shardings)")
    view = view_params(fast_params(params))
    placed = _placed_params(view, fast_params(shardings))
    everywhere = _everywhere(placed)
    state = view_init(tx, params)
    slots = map_state(tx, state, params).slots
    return state, [
        place_slot(slot, leaf.shape, placed, everywhere, mesh)
        for slot, leaf in zip(slots, state.leaves, strict=True)
    ]


def place_slot(
    slot: Slot,
    shape: tuple[int, ...],
    params: Mapping[str, PlacedParam],
    everywhere: Placement,
    mesh: Mesh | AbstractMesh | None = None,
) -> Place:
    """Say where one array of a state goes.

    Args:
        slot: what it is.
        shape: its shape.
        params: by path.
        everywhere: where it goes if it belongs to none of them.
        mesh: that of the specs, if it is known.
    """
    region = slot.region
    if region is None or region.path not in params:
        return Place(slot, None, everywhere)
    # ``optax.tree.map_params`` (0.2.8) goes by structure: what has the tree of the
    # params, as the flags of ``zero_nans``, need not have their shapes.
    part, is_split = _layers(params[region.path], region, mesh)
    placement = _placement(shape, slot.rest, part)
    is_split = is_split and placement is not None
    return Place(slot, region.path, placement or everywhere, is_split)


def init_sharded(
    tx: Any, params: Any, shardings: Any = None, *, memory_kind: str | None = None
) -> Any:
    """Return ``tx.init(params)`` with every array sharded as the param it belongs to.

    ``jax.jit(tx.init)(params)`` puts Adam's moments on one device, or on each of them.
    Here the state is made in place: no device holds more than its part, meshes may have
    Auto or Explicit axes, and memory kinds are kept.

    Args:
        tx: any transformation, as for ``opt_state_shardings``.
        params: the params, as ``tx.init`` takes them.
        shardings: as for ``opt_state_shardings``; needed inside ``jit``, where an array
            does not know its sharding.
        memory_kind: as for ``opt_state_shardings``.

    Returns:
        The state; uncommitted, as the params, where these were put nowhere.

    Raises:
        ShardingError: an array has no sharding, or one that does not fit its shape; its
            devices have no memory of that kind; or ``shardings`` are specs, without a
            mesh, or leave an axis unconstrained.
        TransformError: ``tx`` is not a transformation, or JAX sees an object in
            ``params`` that holds arrays as one leaf.

    Example:
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        >>> params = {"w": jax.device_put(jnp.ones(4), sharding)}
        >>> init_sharded(optax.adam(1e-3), params)[0].mu["w"].sharding.spec
        P('x',)
    """
    targets = opt_state_shardings(tx, params, shardings, memory_kind=memory_kind)
    kinds = frozenset(map(type, jax.tree.leaves(targets)))
    if PartitionSpec in kinds:
        raise ShardingError(
            "init_sharded got specs, which name no mesh. Pass shardings: "
            "named_shardings(params, rules, mesh)."
        )
    left = [
        path
        for path, target in view_tree(targets).items()
        if isinstance(target, NamedSharding) and is_open(target.spec)
    ]
    if left:
        raise ShardingError(
            f"Shardings of {plural(len(left), 'array')} of the state leave an axis to "
            f"the compiler (UNCONSTRAINED): {listing(left)}. Name mesh axes, or None."
        )
    init, arrays = init_of_arrays(tx, params)
    # An array that was put nowhere in particular has a state that may go anywhere.
    is_given = shardings is not None or memory_kind is not None
    is_given = is_given or NamedSharding in kinds
    is_fixed = is_given or any(getattr(x, "committed", False) for x in arrays.values())
    return jax.jit(init, out_shardings=targets if is_fixed else None)(arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedParam:
    """One param, as far as state follows it: its shape, and where it is."""

    shape: tuple[int, ...]
    placement: Placement

    @property
    def entries(self) -> tuple[Any, ...]:
        """The entries of the spec, one an axis."""
        placement = self.placement
        spec = placement.spec if isinstance(placement, NamedSharding) else placement
        entries = tuple(spec) if isinstance(spec, PartitionSpec) else ()
        return (*entries, *[None] * (len(self.shape) - len(entries)))

    def respecified(self, entries: Sequence[Any]) -> Placement:
        """Return its placement with other entries of the spec."""
        spec = PartitionSpec(*entries) if any(entries) else PartitionSpec()
        if not isinstance(self.placement, NamedSharding):
            return spec
        return self.placement.update(spec=spec)


def _layers(
    param: PlacedParam, region: Region, mesh: Mesh | AbstractMesh | None
) -> tuple[PlacedParam, bool]:
    """Return some layers of a param, and whether they split an axis that is sharded.

    Args:
        param: the param.
        region: the layers; along no axis, if it is the whole param.
        mesh: that of its spec, if it is known.
    """
    if isinstance(param.placement, NamedSharding):
        mesh = param.placement.mesh
    shape, entries, is_split = region.shape(param.shape), [*param.entries], False
    for each in region.along:
        names, count = mesh_axes(entries[each.axis]), shape[each.axis]
        if names and count < param.shape[each.axis]:
            is_split = True
            sizes = {} if mesh is None else mesh.shape
            parts = math.prod(sizes.get(name, 0) for name in names)
            if not parts or count % parts:
                entries[each.axis] = None
    placement = param.respecified(entries) if is_split else param.placement
    return PlacedParam(shape, placement), is_split


def _placement(
    shape: tuple[int, ...], rest: str, param: PlacedParam
) -> Placement | None:
    """Return where a state leaf of a param belongs; None if nothing says it.

    Args:
        shape: of the leaf.
        rest: what follows the path of the param: SM3 numbers its axes there.
        param: the param.
    """
    entries, whole = param.entries, param.shape
    extra = len(shape) - len(whole)
    if shape == whole:
        return param.placement
    if not isinstance(param.placement, NamedSharding | PartitionSpec):
        return None
    options: list[Sequence[Any]] = []  # entries, by the axes that it may have
    if rest.isdecimal() and shape == whole[int(rest) : int(rest) + 1]:
        options = [entries[int(rest) : int(rest) + 1]]
    elif extra > 0 and whole and shape[extra:] == whole:  # a memory of several steps
        options = [(*[None] * extra, *entries)]
    elif extra == 0 and all(a in (1, b) for a, b in zip(shape, whole, strict=True)):
        # Reduced over axes that stay, with size one.
        options = [[None if a == 1 else e for a, e in zip(shape, entries, strict=True)]]
    elif extra < 0:  # what a reduction left
        every = itertools.combinations(range(len(whole)), len(shape))
        fits = [axes for axes in every if tuple(whole[axis] for axis in axes) == shape]
        options = [[entries[axis] for axis in axes] for axes in fits]
    if not options:
        return None
    axes = zip(*options, strict=True)
    return param.respecified([e[0] if e.count(e[0]) == len(e) else None for e in axes])


def _placed_params(view: TreeView, shardings: Any) -> dict[str, PlacedParam]:
    """Return every array of the params by path, with its placement.

    Without ``shardings`` that is its own; NumPy's arrays have none.
    """
    arrays: dict[str, Any] = {p: leaf for p, leaf in view.items() if is_array(leaf)}
    by_path: dict[str, Any] = {} if shardings is None else view_tree(shardings).flat()
    text = "shardings= has no sharding and no PartitionSpec for {} of the params"
    if shardings is None:
        arrays = {p: x for p, x in arrays.items() if not isinstance(x, _OF_NUMPY)}
        by_path = {p: getattr(x, "sharding", None) for p, x in arrays.items()}
        text = "Without a sharding: {} of the params, traced or abstract"
    lost = [p for p in arrays if not isinstance(by_path.get(p), Placement)]
    if lost:
        raise ShardingError(
            f"{text.format(plural(len(lost), 'array'))}: {listing(lost)}. Pass one for "
            "each array: shardings=named_shardings(params, rules, mesh)."
        )
    kinds = {isinstance(by_path[path], PartitionSpec): path for path in arrays}
    if len(kinds) > 1:
        raise ShardingError(
            "shardings= holds specs and shardings, such as at "
            f"{listing([kinds[True], kinds[False]])}. Give either."
        )
    params: dict[str, PlacedParam] = {}
    for path, leaf in arrays.items():
        placement, shape = by_path[path], tuple(leaf.shape)
        if isinstance(placement, PartitionSpec):
            placement = spec_of_rank(placement, len(shape))
        params[path] = PlacedParam(shape, placement)
        if len(params[path].entries) > len(shape):
            raise ShardingError(
                f"{listing([path])} has shape {shape}, but its sharding has "
                f"{plural(len(params[path].entries), 'entry')}: {placement}."
            )
    on_mesh = {
        p: x for p, x in params.items() if isinstance(x.placement, NamedSharding)
    }
    return on_mesh or params


def _everywhere(params: Mapping[str, PlacedParam]) -> Placement:
    """Return the placement of what belongs to no param."""
    if not params:
        raise ShardingError(
            "No array of the params has a sharding. Place them, or pass shardings=."
        )
    first = next(iter(params.values())).placement
    if isinstance(first, NamedSharding):
        return NamedSharding(first.mesh, PartitionSpec())
    return PartitionSpec() if isinstance(first, PartitionSpec) else first
