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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from treeadapt.layers.keys import boxes
from treeadapt.layers.region import Along, Region, put
from treeadapt.transforms.state_map import Slot, below
from treeadapt.trees.arrays import is_placed

_ALL = Region("")


@dataclasses.dataclass
class StateLeaf:
    """One leaf of a state, or a piece of one.

    Attributes:
        slot: where it is; that of a piece is as if it were a leaf.
        array: the leaf.
        whole: name of the leaf.
        piece: which indices of the leaf it is, along the axes of the leaf itself; along
            none, if it is all of it.
        origin: the saved names of those of which a migration made it; empty if none.
        is_padded: whether some of its elements are zeros that a migration added.
    """

    slot: Slot
    array: Any
    whole: str
    piece: Region = _ALL
    origin: tuple[str, ...] = ()
    is_padded: bool = False

    @functools.cached_property
    def value(self) -> Any:
        """The leaf, or the piece."""
        return cut_leaf(self.array, self.piece)


_AnyLeaf = TypeVar("_AnyLeaf", bound=StateLeaf)
#: A leaf of a copy, and what it holds of its parameter.
_Holder = tuple[_AnyLeaf, Region]


def divide_leaves(
    leaves: Iterable[_AnyLeaf], params: Mapping[str, Any]
) -> tuple[dict[int, list[_AnyLeaf]], set[str]]:
    """Divide leaves of two states into pieces that are whole in both.

    Args:
        leaves: those of both states.
        params: the arrays of either, by path.

    Returns:
        The pieces of each leaf of a param that is divided, by the identity of the leaf;
        one piece, of a leaf that is whole in both. And the params of which leaves stay
        whole because nothing names the axes they are cut along.
    """
    by_param: dict[str, list[_Holder[_AnyLeaf]]] = {}
    for leaf in leaves:
        region = leaf.slot.region
        if region is not None and not leaf.slot.rest and region.path in params:
            by_param.setdefault(region.path, []).append((leaf, region))
    pieces: dict[int, list[_AnyLeaf]] = {}
    unclear = set()
    for path, holders in by_param.items():
        if any(region.along for _, region in holders):
            shape = tuple(params[path].shape)
            divided = _pieces(shape, holders)
            if divided is None:
                unclear.add(path)
            else:
                pieces |= divided
    return pieces, unclear


def _part(
    leaf: StateLeaf, region: Region, shape: tuple[int, ...]
) -> dict[int, tuple[int, ...]] | None:
    """Return the axes of which a leaf holds a part, and the numbers along each.

    Args:
        leaf: the leaf.
        region: what it holds of its parameter.
        shape: of that.

    Returns:
        None if the leaf has another shape than these numbers of the parameter.
    """
    numbers = {each.axis: tuple(each.numbers) for each in region.along}
    if len(numbers) < len(region.along) or any(
        axis >= len(shape) or each[-1] >= shape[axis] for axis, each in numbers.items()
    ):
        return None
    size = region.shape(shape)
    lead = np.ndim(leaf.array) - len(size)
    if lead < 0 or np.shape(leaf.array)[lead:] != size:
        return None
    return {axis: each for axis, each in numbers.items() if len(each) < shape[axis]}


def _pieces(
    shape: tuple[int, ...], holders: Sequence[_Holder[_AnyLeaf]]
) -> dict[int, list[_AnyLeaf]] | None:
    """Return the pieces of the leaves of one parameter, by the identity of the leaf.

    Args:
        shape: of the parameter.
        holders: the leaves; those of other shapes stay whole.

    Returns:
        None if they are cut along several axes that no stack names.
    """
    parts = [(*each, _part(*each, shape)) for each in holders]
    fits = [(leaf, held, part) for leaf, held, part in parts if part is not None]
    used = sorted({axis for _, _, numbers in fits for axis in numbers})
    along = [each for _, region, _ in fits for each in region.along]
    # The first ones; where a migration leaves gaps, no stack is named.
    path = holders[0][1].path
    names = {each.axis: each.stack for each in reversed(along) if each.stack != path}
    if len([axis for axis in used if axis not in names]) > 1:
        return None
    atoms = {
        axis: _atoms([part[axis] for *_, part in fits if axis in part], shape[axis])
        for axis in used
    }
    pieces: dict[int, list[_AnyLeaf]] = {}
    for leaf, _, part in fits:
        numbers = {axis: part.get(axis, range(shape[axis])) for axis in used}
        inside = [[(i, a) for a in atoms[i] if a[0] in numbers[i]] for i in used]
        is_whole = all(len(each) == 1 for each in inside)
        for cut in itertools.product(*inside):
            some = [
                Along(names.get(i, path), i, a) for i, a in cut if len(a) < shape[i]
            ]
            held = Region(path, tuple(some))
            places = [
                Along("", i, tuple(np.searchsorted(numbers[i], a).tolist()))
                for i, a in cut
            ]
            lead = np.ndim(leaf.array) - len(shape)
            prefix, tail = str(leaf.slot.prefix), held.key
            pieces.setdefault(id(leaf), []).append(
                dataclasses.replace(
                    leaf,
                    slot=Slot(below(prefix, tail), prefix, tail, held),
                    piece=Region("", () if is_whole else tuple(places)).shifted(lead),
                )
            )
    return pieces


def _atoms(sets: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Divide the numbers of an axis into sets that are in or out of others as a whole.

    Example:
        >>> _atoms([(0, 1, 2, 3, 4, 5), (2, 3, 4, 5), (4, 5)], 7)
        [(0, 1), (2, 3), (4, 5), (6,)]
    """
    members = [frozenset(numbers) for numbers in sets]
    owners = [tuple(place in own for own in members) for place in range(size)]
    return [places for ((places,),) in boxes(owners, [size]).values()]


def cut_leaf(leaf: Any, piece: Region) -> Any:
    """Return some numbers of a leaf, along its own axes; NumPy's stay with NumPy."""
    if not isinstance(leaf, np.ndarray):
        return piece.take(leaf)
    for _, axis, places in piece.along:
        leaf = leaf.take(places, axis)
    return leaf


def fill(leaf: Any, parts: Sequence[tuple[Region, Any]]) -> Any:
    """Return a leaf with pieces put in.

    Args:
        leaf: what has the other layers. If it is abstract and the pieces are not, the
            other layers are zeros.
        parts: pieces of it, and what they are.
    """
    _, first = parts[0]
    if any(isinstance(part, jax.ShapeDtypeStruct) for _, part in parts):
        return jax.ShapeDtypeStruct(leaf.shape, first.dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        device = _sharding_of(leaf.shape, first) if is_placed(first) else None
        leaf = jnp.zeros(leaf.shape, first.dtype, device=device)
    return put(leaf, [(piece, _beside(leaf, part)) for piece, part in parts])


def _beside(leaf: Any, part: Any) -> Any:
    """Return a piece of a leaf on the devices of the leaf, if that was put on some."""
    are_placed = is_placed(leaf) and is_placed(part)
    if not are_placed or leaf.sharding.device_set == part.sharding.device_set:
        return part
    return jax.device_put(part, _sharding_of(part.shape, leaf) or leaf.sharding)


def _sharding_of(shape: Sequence[int], like: Any) -> NamedSharding | None:
    """Return the sharding of an array on a mesh for one of another shape."""
    sharding: Any = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding) or like.ndim != len(shape):
        return None
    sizes = zip(sharding.spec, like.shape, shape, strict=False)
    spec = PartitionSpec(*(entry if old == new else None for entry, old, new in sizes))
    return sharding.update(spec=spec)
