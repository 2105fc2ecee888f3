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
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from treeadapt.carry.slots import Slot, below
from treeadapt.slices import read_slice_key, slice_key
from treeadapt.transforms import cuts
from treeadapt.transforms.cuts import Piece

#: Numbers that a leaf has along axes of its parameter; all along the other axes.
Box = tuple[tuple[int, tuple[int, ...]], ...]

_Sets = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A piece of a leaf of a state, as a slot.

    Attributes:
        slot: as if the piece were a leaf.
        box: what it holds of the parameter.
        piece: what of the leaf it is; None for all of it.
    """

    slot: Slot
    box: Box = ()
    piece: Piece | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of a copy: its slot, its shape, what its name says, and its box."""

    side: int
    slot: Slot
    shape: tuple[int, ...]
    sets: _Sets
    box: Box | None

    def box_in(self, shape: tuple[int, ...], axes: Mapping[str, int]) -> Box | None:
        """Return what the leaf holds of a parameter; None if its shape is another.

        Args:
            shape: of the parameter.
            axes: those of the stacks, by key.
        """
        box = self.box
        if box is None:
            named = ((axes[key], numbers) for key, numbers in self.sets.items())
            box = tuple(sorted(named))
        own = list(shape)
        for axis, numbers in box:
            if numbers[-1] >= shape[axis]:
                return None
            own[axis] = len(numbers)
        lead = len(self.shape) - len(own)
        if lead < 0 or self.shape[lead:] != tuple(own):
            return None
        return tuple(each for each in box if len(each[1]) < shape[each[0]])


def divide(
    new: Iterable[tuple[Slot, Any]],
    saved: Iterable[tuple[Slot, Any]],
    boxes: Mapping[str, Box],
    params: Mapping[str, Any],
) -> tuple[dict[str, list[Part]], dict[str, list[Part]], set[str]]:
    """Divide leaves of two states into pieces that are whole in both.

    Args:
        new: the slots of the new state, and their leaves.
        saved: the same of the saved state.
        boxes: what leaves of the saved state hold, where their name does not say it.
        params: the arrays that train today, by path.

    Returns:
        The parts of leaves of either state, by the name of the leaf. Leaves that are
        not there stay as they are. And the params of which leaves stay because shapes
        do not show which axes they are cut along.
    """
    held: dict[str, list[_Leaf]] = {}
    for side, leaves in enumerate((new, saved)):
        for slot, leaf in leaves:
            if slot.is_copy:
                path, sets = read_slice_key(slot.tail)
                box = boxes.get(slot.name) if side else None
                one = _Leaf(side, slot, np.shape(leaf), dict(sets), box)
                held.setdefault(path, []).append(one)
    found: tuple[dict[str, list[Part]], ...] = {}, {}
    unclear = set()
    for path, each in held.items():
        if path in params and any(one.sets or one.box for one in each):
            shape = tuple(params[path].shape)
            ways = _ways(shape, each)
            if len(ways) > 1:
                unclear.add(path)
                continue
            for row, names in ways.items():
                pairs = zip(each, row, strict=True)
                own = [(one, dict(box)) for one, box in pairs if box is not None]
                for one, parts in _parts(path, shape, own, names):
                    found[one.side][one.slot.name] = parts
    return found[0], found[1], unclear


def _ways(
    shape: tuple[int, ...], held: Sequence[_Leaf]
) -> dict[tuple[Box | None, ...], dict[int, str]]:
    """Return how stacks may be along the axes of a parameter, as shapes allow.

    Returns:
        What each leaf holds; None for those of other shapes. With it, the keys of the
        stacks by axis.
    """
    keys = sorted({key for one in held for key in one.sets}, key=len)
    found: dict[tuple[Box | None, ...], dict[int, str]] = {}
    for axes in itertools.permutations(range(len(shape)), len(keys)):
        own = dict(zip(keys, axes, strict=True))
        row = tuple(one.box_in(shape, own) for one in held)
        found[row] = dict(zip(axes, keys, strict=True))
    fits = [any(box is not None for box in boxes) for boxes in zip(*found, strict=True)]
    return {
        row: names
        for row, names in found.items()
        if [box is not None for box in row] == fits
    }


def _parts(
    path: str,
    shape: tuple[int, ...],
    own: Sequence[tuple[_Leaf, Mapping[int, tuple[int, ...]]]],
    names: Mapping[int, str],
) -> Iterator[tuple[_Leaf, list[Part]]]:
    """Yield the leaves of one parameter with their parts.

    Args:
        path: of the parameter.
        shape: of it.
        own: the leaves, and the numbers that each has along axes.
        names: the keys of stacks by axis.
    """
    used = sorted({axis for _, box in own for axis in box})
    if len([axis for axis in used if axis not in names]) > 1:
        return  # no names for them
    atoms = {
        axis: _atoms(shape[axis], {box[axis] for _, box in own if axis in box})
        for axis in used
    }
    for one, box in own:
        lead = len(one.shape) - len(shape)
        inside = [
            [a for a in atoms[axis] if axis not in box or a[0] in box[axis]]
            for axis in used
        ]
        parts = []
        for chosen in itertools.product(*inside):
            sets, places = {}, []
            for axis, numbers in zip(used, chosen, strict=True):
                if len(numbers) < shape[axis]:
                    sets[names.get(axis, path)] = numbers
                among = box.get(axis, range(shape[axis]))
                index = {number: place for place, number in enumerate(among)}
                places.append(tuple(index[number] for number in numbers))
            tail = slice_key(path, sets)
            prefix = str(one.slot.prefix)
            piece = Piece("", tuple(lead + axis for axis in used), tuple(places))
            whole = all(len(each) == 1 for each in inside)
            slot = Slot(below(prefix, tail), prefix, tail)
            boxed = tuple(zip(used, chosen, strict=True))
            parts.append(Part(slot, boxed, None if whole else piece))
        yield one, parts


def _atoms(size: int, sets: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Divide numbers into the largest sets that are in or out of others as a whole.

    Example:
        >>> _atoms(6, [(2, 3, 4, 5), (4, 5)])
        [(0, 1), (2, 3), (4, 5)]
    """
    members = [frozenset(numbers) for numbers in sets]
    atoms: dict[tuple[bool, ...], list[int]] = {}
    for number in range(size):
        key = tuple(number in numbers for numbers in members)
        atoms.setdefault(key, []).append(number)
    return list(map(tuple, atoms.values()))


def cut(leaf: Any, piece: Piece) -> Any:
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


def joined(names: Iterable[str]) -> list[str]:
    """Write the names of pieces that are next to each other along one axis as one.

    Example:
        >>> joined(["mu/h/{0..3}/w", "mu/h/{4}/w", "mu/h/{9}/w", "count"])
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
