"""Pieces: the layers of one array that two states hold in different leaves.

A group of a partition holds some layers of a stacked array; the groups of another run
hold others. Where that is so, the leaves of both states are divided into pieces that
are whole on either side, each a slot with a name of its own, so that all that is said
of slots goes for pieces. Their number grows with the groups, not with the layers.
See ``layers.region`` for their names.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from treeadapt.arrays import is_placed
from treeadapt.layers.keys import boxes
from treeadapt.layers.region import Along, Region, put, read_key
from treeadapt.state.slots import Slot, below

#: Numbers along some axes of an array; all numbers along the others.
AxisNumbers = tuple[tuple[int, tuple[int, ...]], ...]


@dataclasses.dataclass
class StateLeaf:
    """One leaf of a state, or a piece of one.

    Attributes:
        slot: where it is; that of a piece is as if it were a leaf.
        array: the leaf.
        whole: name of the leaf.
        piece: what of the leaf it is; empty for all of it.
        box: what it holds of its parameter, where its name does not say it.
        origin: the saved names of those of which a migration made it; empty if none.
        origin_of: gives these for some of the numbers of its parameter.
        is_padded: whether some of its numbers are zeros that a migration added.
    """

    slot: Slot
    array: Any
    whole: str
    piece: AxisNumbers = ()
    box: AxisNumbers = ()
    origin: tuple[str, ...] = ()
    origin_of: Callable[[AxisNumbers], tuple[str, ...]] | None = None
    is_padded: bool = False

    @functools.cached_property
    def value(self) -> Any:
        """The leaf, or the piece."""
        return cut_leaf(self.array, self.piece)


_AnyLeaf = TypeVar("_AnyLeaf", bound=StateLeaf)
#: A leaf of a copy, and what its name says that it holds.
_Held = tuple[StateLeaf, Region]


def divide_states(
    new: Sequence[_AnyLeaf], saved: Sequence[StateLeaf], params: Mapping[str, Any]
) -> tuple[list[_AnyLeaf], list[StateLeaf], set[str]]:
    """Divide leaves of two states into pieces that are whole in both.

    Args:
        new: the leaves of the new state.
        saved: those of the saved state.
        params: the arrays that train today, by path.

    Returns:
        The leaves of either state, or their pieces. And the params of which leaves stay
        whole because shapes do not show which axes they are cut along.
    """
    held: dict[str, list[_Held]] = {}
    every: tuple[StateLeaf, ...] = (*new, *saved)
    for leaf in every:
        if leaf.slot.is_copy:
            region = read_key(leaf.slot.tail)
            held.setdefault(region.path, []).append((leaf, region))
    pieces: dict[int, list[Any]] = {}
    unclear = set()
    for path, each in held.items():
        if path in params and any(region.along or leaf.box for leaf, region in each):
            shape = tuple(params[path].shape)
            current = _with_axes(shape, each)
            if current is None:
                unclear.add(path)
            else:
                pieces |= _pieces(path, shape, current)
    divided = [
        [part for leaf in leaves for part in pieces.get(id(leaf), [leaf])]
        for leaves in (new, saved)
    ]
    return divided[0], divided[1], unclear


def _with_axes(shape: tuple[int, ...], held: Sequence[_Held]) -> list[_Held] | None:
    """Return leaves with the axes along which they hold layers of a parameter.

    Keys of older checkpoints name no axis. It is the one that other keys name for the
    same stack; else shapes say it.

    Args:
        shape: of the parameter.
        held: its leaves.

    Returns:
        None if shapes do not say it.
    """
    fits = [_box(each, shape) is not None for each in held]
    are_older = [
        not (yes or any(each.axis for each in region.along))
        for (_, region), yes in zip(held, fits, strict=True)
    ]
    current = itertools.compress((region for _, region in held), fits)
    axis_of = {each.stack: each.axis for region in current for each in region.along}
    older = itertools.compress((region for _, region in held), are_older)
    stacks = sorted({x for region in older for x in region.numbers} - axis_of.keys())
    ways: dict[Any, list[_Held]] = {}
    for axes in itertools.permutations(range(len(shape)), len(stacks)):
        on_axes = axis_of | dict(zip(stacks, axes, strict=True))
        way = [
            (leaf, region.on(on_axes) if is_older else region)
            for (leaf, region), is_older in zip(held, are_older, strict=True)
        ]
        ways[tuple([_box(each, shape) for each in way])] = way
    # Each leaf fits that fits along any axes.
    most = [any(column) for column in zip(*map(_fitting, ways), strict=True)]
    best = [way for row, way in ways.items() if _fitting(row) == most]
    return best[0] if len(best) == 1 else None


def _fitting(row: Iterable[AxisNumbers | None]) -> list[bool]:
    return [box is not None for box in row]


def _box(held: _Held, shape: tuple[int, ...]) -> AxisNumbers | None:
    """Return what a leaf holds of a parameter; None if its shape is another.

    Args:
        held: the leaf.
        shape: of the parameter.
    """
    leaf, region = held
    box = leaf.box or tuple(
        sorted((each.axis, tuple(each.numbers)) for each in region.along)
    )
    if len(dict(box)) < len(box):
        return None
    own = list(shape)
    for axis, numbers in box:
        if axis >= len(shape) or numbers[-1] >= shape[axis]:
            return None
        own[axis] = len(numbers)
    lead = np.ndim(leaf.array) - len(own)
    if lead < 0 or np.shape(leaf.array)[lead:] != tuple(own):
        return None
    return tuple(each for each in box if len(each[1]) < shape[each[0]])


def _pieces(
    path: str, shape: tuple[int, ...], held: Sequence[_Held]
) -> dict[int, list[StateLeaf]]:
    """Return the pieces of the leaves of one parameter, by the identity of the leaf.

    Args:
        path: of the parameter.
        shape: of it.
        held: the leaves; those of other shapes stay whole.
    """
    boxed_leaves = [(each, _box(each, shape)) for each in held]
    fits = [(*each, dict(box)) for each, box in boxed_leaves if box is not None]
    partly = [(leaf, box) for leaf, _, box in fits]
    used = sorted({axis for _, box in partly for axis in box})
    along = [each for _, region, _ in fits for each in region.along]
    names = {each.axis: each.stack for each in reversed(along)}  # the first ones
    if len([axis for axis in used if axis not in names]) > 1:
        return {}  # no names for them
    atoms = {
        axis: _atoms([box[axis] for _, box in partly if axis in box], shape[axis])
        for axis in used
    }
    found: dict[int, list[StateLeaf]] = {}
    for leaf, box in partly:
        own = {axis: box.get(axis, range(shape[axis])) for axis in used}
        lead = np.ndim(leaf.array) - len(shape)
        inside = [[(i, a) for a in atoms[i] if a[0] in own[i]] for i in used]
        is_whole = all(len(each) == 1 for each in inside)
        for boxed in itertools.product(*inside):
            cut = [(names.get(i, path), i, a) for i, a in boxed if len(a) < shape[i]]
            region = Region(path, tuple(itertools.starmap(Along, cut)))
            places = [(lead + i, np.searchsorted(own[i], a)) for i, a in boxed]
            piece = tuple((axis, tuple(each.tolist())) for axis, each in places)
            prefix, tail = str(leaf.slot.prefix), region.key
            found.setdefault(id(leaf), []).append(
                dataclasses.replace(
                    leaf,
                    slot=Slot(below(prefix, tail), prefix, tail),
                    piece=() if is_whole else piece,
                    box=boxed,
                    origin=leaf.origin_of(boxed) if leaf.origin_of else leaf.origin,
                )
            )
    return found


def _atoms(sets: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Divide the numbers of an axis into sets that are in or out of others as a whole.

    Example:
        >>> _atoms([(0, 1, 2, 3, 4, 5), (2, 3, 4, 5), (4, 5)], 7)
        [(0, 1), (2, 3), (4, 5), (6,)]
    """
    members = [frozenset(numbers) for numbers in sets]
    owners = [tuple(place in own for own in members) for place in range(size)]
    return [places for ((places,),) in boxes(owners, [size]).values()]


def cut_leaf(leaf: Any, piece: AxisNumbers) -> Any:
    """Return some numbers of a leaf, along its own axes."""
    if not isinstance(leaf, np.ndarray):
        return _region(piece).take(leaf) if piece else leaf
    for axis, places in piece:
        leaf = leaf.take(places, axis)
    return leaf


def fill(leaf: Any, parts: Sequence[tuple[AxisNumbers, Any]]) -> Any:
    """Return a leaf with pieces put in.

    Args:
        leaf: what has the other layers. If it is abstract and the pieces are not, there
            are none.
        parts: pieces of it, and what they are.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = zeros(leaf.shape, parts[0][1])
    if any(isinstance(part, jax.ShapeDtypeStruct) for _, part in parts):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return put(leaf, [(_region(piece), _beside(leaf, part)) for piece, part in parts])


def _beside(leaf: Any, part: Any) -> Any:
    """Return a piece of a leaf on the devices of the leaf, if that was put on some."""
    are_placed = is_placed(leaf) and is_placed(part)
    if not are_placed or leaf.sharding.device_set == part.sharding.device_set:
        return part
    return jax.device_put(part, _sharding_of(part.shape, leaf) or leaf.sharding)


def _region(piece: AxisNumbers) -> Region:
    return Region("", tuple(Along("", axis, places) for axis, places in piece))


def zeros(shape: Sequence[int], like: Any) -> Any:
    """Return zeros of the dtype of an array, next to it on its devices."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(tuple(shape), like.dtype)
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    if isinstance(like, jax.core.Tracer):
        return jnp.zeros(shape, like.dtype)
    return jnp.zeros(shape, like.dtype, device=_sharding_of(shape, like))


def _sharding_of(shape: Sequence[int], like: Any) -> NamedSharding | None:
    """Return the sharding of an array on a mesh for one of another shape."""
    sharding: Any = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding) or like.ndim != len(shape):
        return None
    sizes = zip(sharding.spec, like.shape, shape, strict=False)
    spec = PartitionSpec(*(entry if old == new else None for entry, old, new in sizes))
    return sharding.update(spec=spec)


def joined_names(names: Iterable[str]) -> list[str]:
    """Write the names of pieces that are next to each other along one axis as one.

    Example:
        >>> joined_names(["mu/h/{0..3}/w", "mu/h/{4}/w", "mu/h/{9}/w", "count"])
        ['mu/h/{{0..4},{9}}/w', 'count']
    """
    regions = [read_key(name) for name in names]
    for stack in dict.fromkeys([key for region in regions for key in region.numbers]):
        joined: dict[Region, set[int]] = {}
        for region in regions:
            others = region.of_numbers({stack: ()})
            joined.setdefault(others, set()).update(region.numbers.get(stack, ()))
        regions = [
            others.of_numbers({stack: tuple(sorted(numbers))})
            for others, numbers in joined.items()
        ]
    return [region.key for region in regions]
