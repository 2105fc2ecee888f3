"""The memory of a plan: what each device of a mesh would hold.

Takes a tree, rules that give specs, a mesh that need not exist, and an optimizer; gives
bytes on each device of params, gradients and optimizer state. Reads shapes alone, so
nothing is allocated. Specs fit their arrays exactly (see ``sharding``), so all devices
hold the same number of bytes. What is in the memory of the host is counted apart. What
a program needs besides, such as activations, is not in it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from treeadapt.errors import ShardingError, TransformError
from treeadapt.reports.layout import aligned
from treeadapt.reports.words import fitted, printable
from treeadapt.sharding.params import decide_specs
from treeadapt.sharding.specs import AxisRules, is_open, shard_shape, spec_text
from treeadapt.sharding.state import in_memory, place_state
from treeadapt.text.names import fold, listing, plural, size_text
from treeadapt.transforms.adapt import with_extra_args
from treeadapt.transforms.flat import trained, view_params
from treeadapt.transforms.state_map import below, fast_params
from treeadapt.trees import _jax
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe
from treeadapt.trees.views import TreeView, view_tree

PARAMS, GRADIENTS, STATE = "params", "gradients", "state"
_SHOWN = 8  # of the largest
_PATH = 60  # columns


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedArray:
    """One array of a plan.

    Attributes:
        kind: ``"params"``, ``"gradients"``, or the field of the optimizer's state, such
            as ``"state/mu"``.
        path: label path in the tree, or of an array of the state in the state.
        param: path of the param that it is, or belongs to; None if it belongs to none.
        shape: of the whole array.
        dtype: its name on a device, where float64 needs ``jax_enable_x64``.
        spec: how it is sharded.
        size_bytes: of the whole array, once.
        device_bytes: of what each device holds.
        is_replicated: there are several devices, and each holds all of it.
        memory_kind: such as ``"pinned_host"``; None for the memory of the device.
    """

    kind: str
    path: str
    param: str | None
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    size_bytes: int
    device_bytes: int
    is_replicated: bool
    memory_kind: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KindTotal:
    """The arrays of one kind in one memory, added up.

    Attributes:
        kind: as of ``PlacedArray``.
        num_leaves: how many arrays.
        size_bytes: of the whole arrays, once.
        device_bytes: of what each device holds.
        replicated_bytes: how much of that every device holds.
        memory_kind: as of ``PlacedArray``.
    """

    kind: str
    num_leaves: int
    size_bytes: int
    device_bytes: int
    replicated_bytes: int
    memory_kind: str | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryPlan:
    """What each device of a mesh holds; ``print`` it.

    Attributes:
        mesh: names and sizes of its axes.
        arrays: params, then gradients, then the optimizer's state; each has ``kind``,
            ``path``, ``param`` (the path of the param that it is or belongs to),
            ``shape``, ``dtype``, ``spec``, ``size_bytes`` of the whole array,
            ``device_bytes`` of what each device holds, ``is_replicated``, and
            ``memory_kind``, None for the memory of the device.
        notes: what to know about the numbers, a line each.
    """

    mesh: tuple[tuple[str, int], ...]
    arrays: tuple[PlacedArray, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"MemoryPlan({self.headline})"

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def num_devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(size for _, size in self.mesh)

    @property
    def device_bytes(self) -> int:
        """Bytes that each device holds in all, in its own memory."""
        return sum(array.device_bytes for array in self._in(None))

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes of each device that are in the memory of its host, by memory kind."""
        sizes: dict[str, int] = {}
        for array in self.arrays:
            if (memory := array.memory_kind) is not None:
                sizes[memory] = sizes.get(memory, 0) + array.device_bytes
        return sizes

    @property
    def param_specs(self) -> dict[str, PartitionSpec]:
        """The spec of each param, by path."""
        return {x.path: x.spec for x in self.arrays if x.kind == PARAMS}

    @functools.cached_property
    def kinds(self) -> tuple[KindTotal, ...]:
        """Params, gradients, and the fields of the state, the largest first.

        Each has ``kind``, ``num_leaves``, ``size_bytes``, ``device_bytes``, and
        ``replicated_bytes``, the part of it of which every device holds a copy. What is
        in the memory of the host is a total of its own, with its ``memory_kind``.
        """
        kinds: dict[tuple[str, str | None], list[PlacedArray]] = {}
        for array in self.arrays:
            kinds.setdefault((array.kind, array.memory_kind), []).append(array)
        totals = [_total(kind, arrays, m) for (kind, m), arrays in kinds.items()]
        totals.sort(key=lambda x: (x.kind.startswith(STATE), -x.device_bytes))
        return tuple(totals)

    @functools.cached_property
    def largest(self) -> tuple[tuple[PlacedArray, int], ...]:
        """Each param with the bytes of it, its gradient and its state on each device.

        The largest first. An array of the state that belongs to no param is there, too.
        What is in the memory of the host is left out.
        """
        owned: dict[tuple[str | None, str], list[PlacedArray]] = {}
        for array in self._in(None):
            key = (array.param, array.path if array.param is None else "")
            owned.setdefault(key, []).append(array)
        pairs = [
            (arrays[0], sum(x.device_bytes for x in arrays))
            for arrays in owned.values()
        ]
        return tuple(sorted(pairs, key=lambda pair: -pair[1]))

    @property
    def headline(self) -> str:
        """The mesh, and what each of its devices holds."""
        axes = ", ".join(f"{printable(name)}={size}" for name, size in self.mesh)
        each = "each of " if self.num_devices > 1 else ""
        devices = plural(self.num_devices, "device")
        host = [
            f", and {size_text(size)} of {each and 'each in '}{memory}"
            for memory, size in self.host_bytes.items()
        ]
        on = f"{size_text(self.device_bytes)} on {each}{devices} ({axes})"
        return on + "".join(host)

    def _in(self, memory: str | None) -> Sequence[PlacedArray]:
        """Return the arrays in one memory, None for that of the device."""
        return [array for array in self.arrays if array.memory_kind == memory]

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """What ``print`` shows, without the notes."""
        head = ("memory", "leaves", "size", "each device", "replicated")
        sums = [_total("all", self._in(m), m) for m in (None, *self.host_bytes)]
        rows = [
            (
                one.kind + (f" in {one.memory_kind}" if one.memory_kind else ""),
                f"{one.num_leaves:,}",
                *map(size_text, (one.size_bytes, one.device_bytes)),
                size_text(one.replicated_bytes),
            )
            for one in (*self.kinds, *sums)
        ]
        groups = self._groups()
        cells = [group.cells for group in groups[:_SHOWN]]
        if rest := groups[_SHOWN:]:
            size = size_text(sum(group.device_bytes for group in rest))
            cells.append((f"and {len(rest):,} more", "", "", size))
        lines = [self.headline, "", *aligned(head, rows)]
        if cells:
            largest = "largest, with state" if not self.host_bytes else "largest"
            own_head = (largest, "contents", "spec", "each device")
            lines += ["", *aligned(own_head, cells)]
        if copies := [group for group in groups if group.first.is_replicated]:
            count = plural(sum(group.num_leaves for group in copies), "leaf")
            size = size_text(sum(group.device_bytes for group in copies))
            names = listing((group.name for group in copies), limit=3)
            counted = "" if self.host_bytes else " with state"
            text = f"A copy on each device: {count}, {size}{counted}: {names}."
            lines += ["", text]
        return tuple(lines)

    def _groups(self) -> list[_AlikeArrays]:
        """Return the largest, those that are alike as one."""
        alike: dict[Any, list[PlacedArray]] = {}
        for array, size in self.largest:
            key = (size, array.kind, array.shape, array.dtype, spec_text(array.spec))
            alike.setdefault(key, []).append(array)
        groups = [
            _AlikeArrays(path, arrays[places[0]], len(places), len(places) * size)
            for (size, *_), arrays in alike.items()
            for path, places in fold(array.path for array in arrays).items()
        ]
        return sorted(groups, key=lambda group: -group.device_bytes)


class _AlikeArrays(NamedTuple):
    """Leaves that are alike but for a number in their path.

    Attributes:
        path: with ``{0..3}`` for several.
        first: one of them.
        num_leaves: how many they are.
        device_bytes: of all of them on each device, with their gradients and state.
    """

    path: str
    first: PlacedArray
    num_leaves: int
    device_bytes: int

    @property
    def cells(self) -> tuple[str, str, str, str]:
        times = f"{self.num_leaves:,} x " if self.num_leaves > 1 else ""
        contents = times + describe(self.first)
        spec = fitted(printable(spec_text(self.first.spec)), _PATH)
        return self.name or "''", contents, spec, size_text(self.device_bytes)

    @property
    def name(self) -> str:
        """The path, and where it is if not among the params."""
        path = self.path if self.first.param is not None else below(STATE, self.path)
        return fitted(printable(path), _PATH, middle=True)


def plan_memory(
    tree: Any,
    rules: Any,
    mesh: Mesh | AbstractMesh,
    *,
    tx: Any = None,
    memory_kind: str | None = None,
    specs: Mapping[Any, Any] | None = None,
    logical_axes: Mapping[str, Any] | AxisRules = (),
    paths: Collection[str] | None = None,
) -> MemoryPlan:
    """Say what each device of a mesh holds of a tree, and of what trains it.

    Args:
        tree: params, concrete or abstract; no value is read. Those with a sharding in
            the memory of the host are counted there.
        rules: as for ``partition_specs``.
        mesh: the mesh, which need not exist.
        tx: the optimizer. Without one there is neither a gradient nor a state.
        memory_kind: of the state; None for that of its param.
        specs: as for ``partition_specs``.
        logical_axes: as for ``partition_specs``.
        paths: of the leaves to count, with what belongs to them; None for everything.

    Raises:
        ShardingError, UnmatchedPathError, UnusedRuleError: as by ``named_shardings``.
        TransformError: ``tx`` is not a transformation.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ShardingError(
            "Expected mesh= to be a jax.sharding.Mesh, or for one that need not exist "
            'AbstractMesh((16, 8), ("data", "model")); got the type '
            f"{type(mesh).__name__}."
        )
    view = view_tree(tree)
    leaf_specs, complaint = decide_specs(
        view, rules, specs, logical_axes=logical_axes, mesh=mesh
    )
    memory_of: dict[str | None, str | None] = {
        path: _host_memory(getattr(leaf, "sharding", None))
        for path, leaf in view.items()
        if is_array(leaf)
    }
    arrays = [
        _placed(PARAMS, path, path, leaf, spec, mesh, memory_of[path])
        for (path, leaf), spec in zip(view.items(), leaf_specs, strict=True)
        if is_array(leaf)
    ]
    if memory_kind is not None:
        sharding = in_memory(NamedSharding(mesh, PartitionSpec()), memory_kind)
        memory_of = dict.fromkeys([*memory_of, None], _host_memory(sharding))
    split: set[str | None] = set()
    if tx is not None and arrays:
        specs_of = view.rebuild(leaf_specs)
        placed, split = _trained(tree, specs_of, mesh, tx, memory_of)
        arrays += placed
    if paths is not None:
        arrays = [array for array in arrays if array.param in paths]
    notes = [complaint]
    if left := sum(is_open(array.spec) for array in arrays):
        count = plural(left, "array")
        notes.append(f"{count} with an axis left to the compiler: counted as whole.")
    if moved := [x for x in arrays if x.kind == PARAMS and x.path in split]:
        size = size_text(sum(array.size_bytes for array in moved))
        notes.append(
            f"{plural(len(moved), 'array')} ({size}) sharded along the axis of the "
            "layers that are in different groups: each update moves them between "
            "devices. Shard another axis."
        )
    axes = tuple(mesh.shape.items())
    return MemoryPlan(axes, tuple(arrays), tuple(filter(None, notes)))


def _trained(
    tree: Any,
    specs: Any,
    mesh: Mesh | AbstractMesh,
    tx: Any,
    memory_of: Mapping[str | None, str | None],
) -> tuple[list[PlacedArray], set[str | None]]:
    """Return the gradients, then the arrays of the state; and what is split.

    That is the params of which groups have layers, and that are sharded along these.
    """
    try:
        state, places = place_state(tx, tree, specs, mesh)
    except TypeError as error:
        static = [p for p, leaf in view_tree(tree).items() if not is_array(leaf)]
        if not static:
            raise
        raise TransformError(
            f"tx does not take a tree with {plural(len(static), 'leaf')} that "
            f"{'is not an array' if static[1:] == [] else 'are not arrays'}: "
            f"{listing(static)}. Wrap it: treeadapt.adapt(tx). ({error})"
        ) from error
    view, by_path = view_params(fast_params(tree)), view_tree(fast_params(specs)).flat()
    # The first half of the tree has the first of its leaves.
    pairs = zip(view.plan.paths, view_tree(tree).plan.paths, strict=False)
    names: dict[str | None, str] = dict(pairs)
    gradients = _gradients(tx, view, {place.param for place in places})
    arrays = [
        _placed(GRADIENTS, names[path], names[path], leaf, by_path[path], mesh)
        for path, leaf in gradients.items()
    ]
    for place, leaf in zip(places, state.leaves, strict=True):
        kind, param = below(STATE, place.slot.field), names.get(place.param)
        path, spec = place.slot.name, place.placement
        memory = memory_of.get(param)
        arrays.append(_placed(kind, path, param, leaf, spec, mesh, memory))
    return arrays, {names.get(place.param) for place in places if place.is_split}


def _gradients(
    tx: Any, view: TreeView, in_state: Collection[str | None]
) -> Mapping[str, Any]:
    """Return the params that have a gradient.

    Those that are ``in_state``, which has something of them; of others, only those
    whose gradient the update reads, so not those that are frozen. All, if it cannot be
    traced without arguments that only a training step has.
    """
    params = trained(view)
    if all(path in in_state for path in params):
        return params
    run = with_extra_args(tx)
    arrays = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in view.items()
        if is_array(leaf)
    }
    blank = {path: optax.MaskedNode() for path in arrays}  # as ``optax.masked`` does

    def update(grads: Any, params: Any) -> Any:
        params = view.replace(blank | params)
        return run.update(view.replace(blank | grads), run.init(params), params)

    # A part of the tree is traced in no time, all of a large one in seconds.
    for left_out in (in_state, frozenset[str]()):
        part = {path: arrays[path] for path in sorted(arrays.keys() - left_out)}
        try:
            yes = _jax.inputs_read(update, part, part)  # in the order of their keys
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        read = {*itertools.compress(part, yes)}
        return {p: leaf for p, leaf in params.items() if p in in_state or p in read}
    return params


def _placed(
    kind: str,
    path: str,
    param: str | None,
    array: Any,
    spec: Any,
    mesh: Mesh | AbstractMesh,
    memory_kind: str | None = None,
) -> PlacedArray:
    shape, dtype = tuple(array.shape), array.dtype
    if isinstance(dtype, np.dtype):
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # float64 is float32 on a device
    part = shard_shape(spec, shape, mesh)
    return PlacedArray(
        kind,
        path,
        param,
        shape,
        str(dtype),
        spec,
        size_bytes=math.prod(shape) * dtype.itemsize,
        device_bytes=math.prod(part) * dtype.itemsize,
        is_replicated=part == shape and mesh.size > 1,
        memory_kind=memory_kind,
    )


def _host_memory(sharding: Any) -> str | None:
    """Return the memory kind of a sharding; None for the memory of its devices."""
    kind: str | None = getattr(sharding, "memory_kind", None)
    return None if kind == "device" else kind


def _total(
    kind: str, arrays: Sequence[PlacedArray], memory_kind: str | None
) -> KindTotal:
    return KindTotal(
        kind,
        len(arrays),
        sum(array.size_bytes for array in arrays),
        sum(array.device_bytes for array in arrays),
        sum(array.device_bytes for array in arrays if array.is_replicated),
        memory_kind,
    )
