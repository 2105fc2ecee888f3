"""Pieces: the layers of one array that two states hold in different leaves.

A group of a partition holds some layers of a stacked array; the groups of another run
hold others. Where that is so, the leaves of both states are divided into pieces that
are whole on either side, each a slot with a name of its own, so that all that is said
of slots goes for pieces. Their number grows with the groups, not with the layers. Which
axis holds the layers is what the shape of the parameter says.
See ``slices`` for the names, ``transforms.cuts`` for the arrays.
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

from treeadapt.carry.slots import Slot, below, fitting
from treeadapt.slices import read_slice_key, slice_key
from treeadapt.transforms import cuts
from treeadapt.transforms.cuts import Piece

#: Numbers that a leaf has along axes of its parameter; all along the other axes.
AxisNumbers = tuple[tuple[int, tuple[int, ...]], ...]


@dataclasses.dataclass
class StateLeaf:
    """One leaf of a state, or a piece of one.

    Attributes:
        slot: where it is; that of a piece is as if it were a leaf.
        array: the leaf.
        whole: name of the leaf.
        piece: what of the leaf it is; None for all of it.
        box: what it holds of its parameter, where its name does not say it.
        origin: the saved names of those of which a migration made it; empty if none.
        origin_of: gives these for some of the numbers of its parameter.
    """

    slot: Slot
    array: Any
    whole: str
    piece: Piece | None = None
    box: AxisNumbers = ()
    origin: tuple[str, ...] = ()
    origin_of: Callable[[AxisNumbers], tuple[str, ...]] | None = None

    @functools.cached_property
    def value(self) -> Any:
        """The leaf, or the piece."""
        return self.array if self.piece is None else cut_leaf(self.array, self.piece)


_AnyLeaf = TypeVar("_AnyLeaf", bound=StateLeaf)
#: A leaf of a copy, and what its name says that it holds.
_Held = tuple[StateLeaf, Mapping[str, tuple[int, ...]]]


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
            path, sets = read_slice_key(leaf.slot.tail)
            held.setdefault(path, []).append((leaf, dict(sets)))
    pieces: dict[int, list[Any]] = {}
    unclear = set()
    for path, each in held.items():
        if path in params and [leaf for leaf, sets in each if sets or leaf.box]:
            shape = tuple(params[path].shape)
            ways = _ways(shape, each)
            if len(ways) > 1:
                unclear.add(path)
                continue
            for boxes, names in ways.items():
                pieces |= _pieces(path, shape, each, boxes, names)
    divided = [
        [part for leaf in leaves for part in pieces.get(id(leaf), [leaf])]
        for leaves in (new, saved)
    ]
    return divided[0], divided[1], unclear


def _box(
    held: _Held, shape: tuple[int, ...], axes: Mapping[str, int]
) -> AxisNumbers | None:
    """Return what a leaf holds of a parameter; None if its shape is another.

    Args:
        held: the leaf.
        shape: of the parameter.
        axes: those of the stacks, by key.
    """
    leaf, sets = held
    box = leaf.box or tuple(sorted((axes[key], sets[key]) for key in sets))
    own = list(shape)
    for axis, numbers in box:
        if numbers[-1] >= shape[axis]:
            return None
        own[axis] = len(numbers)
    lead = np.ndim(leaf.array) - len(own)
    if lead < 0 or np.shape(leaf.array)[lead:] != tuple(own):
        return None
    return tuple(each for each in box if len(each[1]) < shape[each[0]])


def _ways(
    shape: tuple[int, ...], held: Sequence[_Held]
) -> dict[tuple[AxisNumbers | None, ...], dict[int, str]]:
    """Return how stacks may be along the axes of a parameter, as shapes allow.

    Returns:
        What each leaf holds; None for those of other shapes. With it, the keys of the
        stacks by axis.
    """
    keys = sorted({key for _, sets in held for key in sets}, key=len)
    found: dict[tuple[AxisNumbers | None, ...], dict[int, str]] = {}
    for axes in itertools.permutations(range(len(shape)), len(keys)):
        by_key = dict(zip(keys, axes, strict=True))
        row = tuple(_box(each, shape, by_key) for each in held)
        found[row] = dict(zip(axes, keys, strict=True))
    fits = [[box is not None for box in row] for row in found]
    return dict(fitting([*found.items()], fits))


def _pieces(
    path: str,
    shape: tuple[int, ...],
    held: Sequence[_Held],
    boxes: Sequence[AxisNumbers | None],
    names: Mapping[int, str],
) -> dict[int, list[StateLeaf]]:
    """Return the pieces of the leaves of one parameter, by the identity of the leaf.

    Args:
        path: of the parameter.
        shape: of it.
        held: the leaves.
        boxes: what each has of the parameter; None for those of other shapes.
        names: the keys of stacks by axis.
    """
    pairs = zip(held, boxes, strict=True)
    partly = [(leaf, dict(box)) for (leaf, _), box in pairs if box is not None]
    used = sorted({axis for _, box in partly for axis in box})
    if len([axis for axis in used if axis not in names]) > 1:
        return {}  # no names for them
    every = {axis: tuple(range(shape[axis])) for axis in used}
    own = [(leaf, every | box) for leaf, box in partly]
    atoms = {axis: _atoms([box[axis] for _, box in own]) for axis in used}
    found: dict[int, list[StateLeaf]] = {}
    for leaf, box in own:
        lead = np.ndim(leaf.array) - len(shape)
        axes = tuple(lead + axis for axis in used)
        inside = [[a for a in atoms[axis] if a[0] in box[axis]] for axis in used]
        is_whole = all(len(each) == 1 for each in inside)
        for chosen in itertools.product(*inside):
            boxed = tuple(zip(used, chosen, strict=True))
            some = [pair for pair in boxed if len(pair[1]) < shape[pair[0]]]
            sets = {names.get(axis, path): numbers for axis, numbers in some}
            places = [np.searchsorted(box[axis], numbers) for axis, numbers in boxed]
            part = Piece("", axes, tuple(tuple(each.tolist()) for each in places))
            prefix, tail = str(leaf.slot.prefix), slice_key(path, sets)
            found.setdefault(id(leaf), []).append(
                dataclasses.replace(
                    leaf,
                    slot=Slot(below(prefix, tail), prefix, tail),
                    piece=None if is_whole else part,
                    box=boxed,
                    origin=leaf.origin_of(boxed) if leaf.origin_of else leaf.origin,
                )
            )
    return found


def _atoms(sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Divide numbers into the largest sets that are in or out of others as a whole.

    Example:
        >>> _atoms([(0, 1, 2, 3, 4, 5), (2, 3, 4, 5), (4, 5)])
        [(0, 1), (2, 3), (4, 5)]
    """
    members = [frozenset(numbers) for numbers in sets]
    atoms: dict[tuple[bool, ...], list[int]] = {}
    for number in sorted({number for numbers in sets for number in numbers}):
        key = tuple(number in numbers for numbers in members)
        atoms.setdefault(key, []).append(number)
    return list(map(tuple, atoms.values()))


def cut_leaf(leaf: Any, piece: Piece) -> Any:
    """Return a piece of a leaf."""
    if not isinstance(leaf, np.ndarray):
        return cuts.cut(leaf, piece)
    for axis, places in zip(piece.axes, piece.places, strict=True):
        leaf = leaf.take(places, axis)
    return leaf


def fill(leaf: Any, parts: Sequence[tuple[Piece, Any]]) -> Any:
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
    return cuts.put(leaf, parts)


def zeros(shape: Sequence[int], like: Any) -> Any:
    """Return zeros of the dtype of an array, next to it on its devices."""
    sharding: Any = getattr(like, "sharding", None)
    if isinstance(like, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(tuple(shape), like.dtype)
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    is_alike = isinstance(sharding, NamedSharding) and like.ndim == len(shape)
    if isinstance(like, jax.core.Tracer) or not is_alike:
        return jnp.zeros(shape, like.dtype)
    entries = [*sharding.spec, *[None] * (like.ndim - len(sharding.spec))]
    sizes = zip(entries, like.shape, shape, strict=True)
    spec = PartitionSpec(*(entry if old == new else None for entry, old, new in sizes))
    kind = sharding.memory_kind
    return jnp.zeros(
        shape, like.dtype, device=NamedSharding(sharding.mesh, spec, memory_kind=kind)
    )


def joined_names(names: Iterable[str]) -> list[str]:
    """Write the names of pieces that are next to each other along one axis as one.

    Example:
        >>> joined_names(["mu/h/{0..3}/w", "mu/h/{4}/w", "mu/h/{9}/w", "count"])
        ['mu/h/{{0..4},{9}}/w', 'count']
    """
    rows = [read_slice_key(name) for name in names]
    for place in range(max((len(sets) for _, sets in rows), default=0)):
        found: dict[Any, set[int]] = {}
        for path, sets in rows:
            key, numbers = sets[place] if place < len(sets) else ("", ())
            others = path, sets[:place], key, sets[place + 1 :]
            found.setdefault(others, set()).update(numbers)
        rows = [
            (
                path,
                (*outer, (key, tuple(sorted(numbers))), *inner) if numbers else outer,
            )
            for (path, outer, key, inner), numbers in found.items()
        ]
    return [slice_key(path, dict(sets)) for path, sets in rows]
