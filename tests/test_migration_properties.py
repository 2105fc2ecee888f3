"""The laws of migrations over random tables, whose arrays NumPy knows.

A row is drawn as one array over named axes and two ways to store it: some axes become
numbers in paths, the others are permuted and composed, or joined with other arrays in
a bracket, which may be among names of its axis. Others repeat it, pad it, fill what is
new from a target, or make it of factors. So both sides of every row are known without
the library. Axes in single arrays are compared with the real einops, and paths with a
reference that tries every way to cut a path.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import einops
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sizes import full

import treeadapt as ta

EXAMPLES = settings.default.max_examples
#: Ten times as many in the full profile: 20,000. Elsewhere a third: they are slow.
at_length = settings(max_examples=full(EXAMPLES * 10, EXAMPLES // 3))
#: The texts of an index in a list; one is a prefix of another, and two are numbers.
TEXTS = ("q", "qk", "0", "10")
#: Of arrays that only move, and of factors.
DTYPES = (np.float32, ml_dtypes.bfloat16, np.int32, np.complex64)
FACTORS = (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8)


# --- random rows ---


@dataclasses.dataclass(frozen=True)
class Side:
    """One way to store an array over named axes.

    Attributes:
        path: template of the path.
        names: how each index in the path is written, by position in ``indices``.
        indices: axes that are numbers in the path.
        axes: the other axes in order, composed ones together; an empty one is ``1``.
        ellipsis: where in ``axes`` the further axes are.
    """

    path: str
    indices: tuple[str, ...]
    texts: tuple[Any, ...]
    axes: tuple[tuple[str, ...], ...]
    ellipsis: int | None

    @property
    def address(self) -> str:
        parts = [_composed(axes) for axes in self.axes]
        if self.ellipsis is not None:
            parts.insert(self.ellipsis, "...")
        return f"{self.path} : {' '.join(parts)}"

    def stored(self, whole: np.ndarray, order: str) -> dict[str, np.ndarray]:
        """Return the arrays by path of ``whole``, whose first axes are ``order``."""
        sizes = dict(zip(order, whole.shape, strict=False))
        extra = list(range(len(order), whole.ndim))
        found = {}
        for at in itertools.product(*(range(sizes[name]) for name in self.indices)):
            where = dict(zip(self.indices, at, strict=True))
            array = whole[tuple(where.get(name, slice(None)) for name in order)]
            left = [name for name in order if name not in where]
            flat = [left.index(name) for axes in self.axes for name in axes]
            rest = [place - len(where) for place in extra]
            before = sum(len(axes) for axes in self.axes[: self.ellipsis or 0])
            shape = [math.prod(sizes[name] for name in axes) for axes in self.axes]
            if self.ellipsis is not None:
                flat[before:before] = rest
                shape[self.ellipsis : self.ellipsis] = whole.shape[len(order) :]
            found[self.name(where, sizes)] = array.transpose(flat).reshape(shape)
        return found

    def along(self, name: str, array: np.ndarray) -> int:
        """Return which axis of a stored array has a name of its own."""
        place = self.axes.index((name,))
        after = self.ellipsis is not None and self.ellipsis <= place
        return place + (array.ndim - len(self.axes) if after else 0)

    def name(self, where: dict[str, int], sizes: dict[str, int]) -> str:
        """Return the path at the numbers of the indices."""
        name = self.path
        for spelled, write in self.texts:
            name = name.replace(spelled, write(where, sizes), 1)
        return name


def _composed(axes: tuple[str, ...]) -> str:
    return "1" if not axes else axes[0] if len(axes) == 1 else f"({' '.join(axes)})"


def _plain(name: str) -> tuple[str, Any]:
    return f"{{{name}}}", lambda where, sizes: str(where[name])


def _offset(name: str, by: int) -> tuple[str, Any]:
    return f"{{{name}+{by}}}", lambda where, sizes: str(where[name] + by)


def _listed(name: str, texts: tuple[str, ...]) -> tuple[str, Any]:
    spelled = f"{{{name}={','.join(texts)}}}"
    return spelled, lambda where, sizes: texts[where[name]]


def _block(outer: str, inner: str) -> tuple[str, Any]:
    return f"{{({outer} {inner})}}", lambda where, sizes: str(
        where[outer] * sizes[inner] + where[inner]
    )


@st.composite
def sides(
    draw: Any,
    root: str,
    indices: list[str],
    axes: Sequence[str],
    sizes: dict[str, int],
    more: bool = False,
    spelled: dict[str, bool] | None = None,
) -> Side:
    """A way to store the axes ``indices`` in the path and ``axes`` in the array.

    An item of ``axes`` with several letters is one axis. ``spelled`` says which indices
    are lists: those of both paths are in both or none.
    """
    indices = draw(st.permutations(indices))
    texts, left = [], list(indices)
    while left:
        name = left.pop()
        kind = draw(st.sampled_from(["plain", "offset", "listed", "block"]))
        if spelled and name in spelled:
            kind = "listed" if spelled[name] else kind if kind != "listed" else "plain"
        listed = spelled and left and spelled.get(left[-1])
        if kind == "block" and left and not listed:
            texts.append(_block(left.pop(), name))
        elif kind == "offset":
            texts.append(_offset(name, draw(st.integers(1, 11))))
        elif kind == "listed" and sizes[name] <= len(TEXTS):
            texts.append(
                _listed(name, tuple(draw(st.permutations(TEXTS)))[: sizes[name]])
            )
        else:
            texts.append(_plain(name))
    separator = draw(st.sampled_from(["/", "_", "/x."]))
    path = separator.join([root, *(spelled for spelled, _ in texts)])
    groups: list[tuple[str, ...]] = []
    for name in draw(st.permutations(axes)):
        if groups and groups[-1] and len(name) == 1 and draw(st.booleans()):
            groups[-1] += (name,)
        else:
            if draw(st.integers(0, 5)) == 0:
                groups.append(())
            groups.append(tuple(name))
    ellipsis = draw(st.integers(0, len(groups))) if more else None
    return Side(path, tuple(indices), tuple(texts), tuple(groups), ellipsis)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: addresses and arrays of both sides, and the sizes that settle it.

    Attributes:
        source: address of the source, or several.
        target: the same of the target.
        before: arrays of the source.
        after: arrays of the target.
        sizes: of names.
        options: next to the target.
        like: arrays of a target whose ends are those of ``after``, and nothing else is.
        past: the same of ``before``, for the way back.
        cuts: whether numbers are cut off that do not come back.
        products: paths of what has no way back.
    """

    source: Any
    target: Any
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    sizes: dict[str, int]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    like: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    past: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    cuts: bool = False
    products: tuple[str, ...] = ()

    @property
    def pair(self) -> tuple[Any, Any]:
        """The row as it is typed."""
        target = (self.target, self.options) if self.options else self.target
        return self.source, target

    @property
    def needed(self) -> dict[str, np.ndarray] | None:
        """The target, if its numbers are needed."""
        return self.after | self.like if self.like else None

    @property
    def needed_back(self) -> dict[str, np.ndarray] | None:
        """The source as the target of the way back, if its numbers are needed."""
        return self.before | self.past if self.past else None


def _filled(shape: tuple[int, ...], start: int, dtype: Any = np.float32) -> np.ndarray:
    """An array of different numbers."""
    numbers = np.arange(start, start + math.prod(shape))
    if dtype == ml_dtypes.bfloat16:  # it does not hold all integers: those from 1.0 on
        return (0x3F80 + numbers).astype(np.uint16).view(dtype).reshape(shape)
    return numbers.astype(dtype).reshape(shape)


def _turned(row: Row, backwards: bool) -> Row:
    if not backwards:
        return row
    undone = ("take", "repeat", "pad", "fill")
    operations = {k: v for k, v in row.options.items() if k in undone}
    options = {k: v for k, v in row.options.items() if k not in operations}
    options |= {"undo": operations} if operations else {}
    return Row(
        row.target,
        row.source,
        row.after,
        row.before,
        row.sizes,
        options,
        past=row.like,
        cuts="fill" in operations,
    )


@st.composite
def moves(draw: Any, root: str, letters: str, copies: int = 1) -> Row:
    """A row that permutes, composes, stacks and unstacks, to one place or several."""
    order = letters[: draw(st.integers(0, 4))]
    sizes = {name: draw(st.sampled_from([1, 2, 3, 11])) for name in order}
    assume(math.prod(sizes.values()) <= 600)
    more = draw(st.booleans())
    extra = tuple(draw(st.lists(st.integers(1, 3), max_size=2))) if more else ()
    dtype = draw(st.sampled_from(DTYPES))
    whole = _filled((*sizes.values(), *extra), draw(st.integers(1, 9)), dtype)
    # An index in both paths stays one: stacks of some axis for each of its numbers.
    both = (
        draw(st.sets(st.sampled_from(order)))
        if order and draw(st.booleans())
        else set()
    )
    takes, orders = draw(taken(sizes))
    assume(not _selects(takes) or any(len(n) < sizes[x] for x, n in orders.items()))
    chosen = whole
    for axis, name in enumerate(order):
        chosen = np.take(chosen, orders.get(name, range(sizes[name])), axis)
    counts = {name: len(orders.get(name, range(n))) for name, n in sizes.items()}
    spelled = {
        name: name not in orders and n <= len(TEXTS) and draw(st.booleans())
        for name, n in sizes.items()
        if name in both
    }
    repeats = draw(repeated(root, copies))
    places, arrays = [], []
    for number in range(copies + 1):
        free = [name for name in order if name not in both]
        mine = [name for name in free if draw(st.integers(0, 2)) == 0]
        if number:  # an axis may be a number in one path only
            mine = [name for name in mine if name not in places[0].indices]
        axes = "".join(name for name in free if name not in mine)
        at = f"{root}{number}" if number else f"{root}s"
        axes += "".join(name for name, (at_, _) in repeats.items() if at_ == number)
        here = counts if number else sizes
        side = draw(sides(at, [*mine, *sorted(both)], axes, here, more, spelled))
        places.append(side)
        copied = "".join(name for name in repeats if name in axes)
        lead = tuple(repeats[name][1] for name in copied)
        array = chosen if number else whole
        array = np.broadcast_to(array, (*lead, *array.shape))
        arrays.append(side.stored(array, copied + order))
    used = _used(places, order)
    after, like, pads = draw(padded(places[1:], arrays[1:], orders))
    target = tuple(side.address for side in places[1:])
    options = draw(
        noted(sizes, used, {name: size for name, (_, size) in repeats.items()})
    )
    row = Row(
        places[0].address,
        target if copies > 1 else target[0],
        arrays[0],
        after,
        {name: size for name, size in sizes.items() if name in used},
        options | pads | ({"take": takes} if takes else {}),
        like,
        products=tuple(after) if counts != sizes else (),
    )
    if "repeat" in row.options and isinstance(row.options["repeat"], str):
        row.sizes.update({name: size for name, (_, size) in repeats.items()})
    return _turned(row, not row.products and draw(st.booleans()))


@st.composite
def taken(
    draw: Any, sizes: dict[str, int]
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """What a row takes of some names, as it is typed, and the numbers in order."""
    takes: dict[str, Any] = {}
    orders: dict[str, list[int]] = {}
    names = st.lists(st.sampled_from(sorted(sizes)), max_size=2, unique=True)
    for name in draw(names) if sizes and draw(st.booleans()) else ():
        size = sizes[name]
        kind = draw(st.sampled_from(["order", "slice", "some"]))
        if kind == "slice":
            ends = st.none() | st.integers(-size, size)
            steps = st.sampled_from([None, 1, 2, 3, -1, -2])
            parts = draw(st.tuples(ends, ends, steps))
            orders[name] = [*range(size)[slice(*parts)]]
            takes[name] = ":".join("" if part is None else str(part) for part in parts)
        else:
            orders[name] = draw(st.permutations(range(size)))
            takes[name] = orders[name]
        if kind == "some" and not {*takes} - {name}:
            assume(size > 1)
            orders[name] = orders[name][: draw(st.integers(1, size - 1))]
            runs = [f"{n}:{n + 1}" if draw(st.booleans()) else n for n in orders[name]]
            return {name: runs, "of": size}, orders
        assume(orders[name])
    return takes, orders


def _used(places: Sequence[Side], names: Sequence[str]) -> set[str]:
    """Return the names of axes and of blocks."""
    return {
        name
        for side in places
        for name in names
        if any(name in axes for axes in side.axes)
        or any(f"({name} " in text or f" {name})" in text for text, _ in side.texts)
    }


@st.composite
def padded(
    draw: Any,
    places: Sequence[Side],
    arrays: Sequence[dict[str, np.ndarray]],
    others: Collection[str] = (),
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """Arrays of targets with ends, a target with these ends alone, and the options."""
    inner = {path: leaf for stored in arrays for path, leaf in stored.items()}
    names = [{axes[0] for axes in side.axes if len(axes) == 1} for side in places]
    alone = sorted(set.intersection(*names).difference(others))
    fill = draw(st.sampled_from([None, "zeros", "target", "target"]))
    if not alone or not fill:
        return inner, {}, {}
    chosen = draw(st.lists(st.sampled_from(alone), min_size=1, max_size=2, unique=True))
    widths = st.tuples(st.integers(0, 2), st.integers(0, 2))
    pads = {name: draw(widths) for name in chosen}
    after, like = {}, {}
    for side, stored in zip(places, arrays, strict=True):
        for path, leaf in stored.items():
            ends = [(0, 0)] * leaf.ndim
            for name, width in pads.items():
                ends[side.along(name, leaf)] = width
            whole = np.pad(leaf, ends)
            box = tuple(
                slice(low, size - high)
                for size, (low, high) in zip(whole.shape, ends, strict=True)
            )
            if fill == "target":
                whole = _filled(whole.shape, 7, whole.dtype)
                like[path] = whole.copy()
                like[path][box] = 1
                whole[box] = leaf
            after[path] = whole
    return after, like, {"pad": pads} | ({"fill": "target"} if like else {})


@st.composite
def products(draw: Any, root: str, letters: str) -> Row:
    """A row of two or three factors, each with some of the names of the product."""
    names = letters[: draw(st.integers(1, 4))]
    sizes = {name: draw(st.sampled_from([1, 2, 3, 11])) for name in names}
    assume(math.prod(sizes.values()) <= 200)
    chosen = st.sets(st.sampled_from(names))
    parts = draw(st.lists(chosen, min_size=2, max_size=3))
    parts[0] |= {*names}.difference(*parts)
    # One axis of blocks, the last of which may be short.
    block = ""
    if len(parts[0]) > 1 and draw(st.integers(0, 2)):
        block = "".join(draw(st.permutations(sorted(parts[0])))[:2])
    lists = {name: sizes[name] <= len(TEXTS) and draw(st.booleans()) for name in names}
    whole = np.ones([*sizes.values()], np.float32)
    factors = []
    for part in parts:
        shape = [size if name in part else 1 for name, size in sizes.items()]
        numbers = draw(st.permutations([-3, -2, -1, 1, 2, 3]))
        factors.append(np.resize(np.array(numbers, np.float32), shape))
        whole = whole * factors[-1]
    cut = draw(st.integers(0, sizes[block[1]] - 1)) if block else 0
    places, arrays = [], []
    # A name that a factor lacks is an axis somewhere: otherwise it would be text.
    axis_of_product = {
        name for name in names if not all(name in part for part in parts)
    }
    for number, part in enumerate([{*names}, *parts]):
        blocks = {*block} if number < 2 else set()
        others = part - blocks - (set() if number else axis_of_product)
        mine = [name for name in sorted(others) if draw(st.integers(0, 2)) == 0]
        axes = [name for name in sorted(part - blocks) if name not in mine]
        axes += [block] if blocks else []
        at = f"{root}{number}" if number else f"{root}s"
        side = draw(sides(at, mine, axes, sizes, False, lists))
        array = whole if not number else factors[number - 1]
        dtype = np.float32 if not number else draw(st.sampled_from(FACTORS))
        left = [name for name in names if name in part]
        shape = [sizes[name] for name in left]
        stored = side.stored(array.reshape(shape).astype(dtype), "".join(left))
        places.append(side)
        arrays.append(stored)
    target, *sources = places
    used = _used(places, names)
    options: dict[str, Any] = {"multiply": True}
    if block:
        options["sizes"] = {name: sizes[name] for name in block[1:]}
    axis = tuple(block)
    is_short = block and all(axis in side.axes for side in places[:2])
    for side, stored in zip(places, arrays, strict=True):
        if is_short and axis in side.axes:
            at = side.axes.index(axis)
            for path, leaf in stored.items():
                short = slice(leaf.shape[at] - cut)
                stored[path] = leaf[(slice(None),) * at + (short,)]
    used -= {*block[:1]}
    if draw(st.booleans()):
        options["cast"] = "bfloat16"
        for path, leaf in arrays[0].items():
            arrays[0][path] = leaf.astype(ml_dtypes.bfloat16)
    after, like, pads = draw(padded([target], arrays[:1]))
    order = draw(st.permutations(range(len(sources))))
    return Row(
        tuple(sources[place].address for place in order),
        target.address,
        {path: leaf for stored in arrays[1:] for path, leaf in stored.items()},
        after,
        {name: size for name, size in sizes.items() if name in used},
        options | pads,
        like,
        products=tuple(after),
    )


@st.composite
def sums(draw: Any) -> tuple[Row, dict[str, np.ndarray]]:
    """A row of two or three summands of one form, and what the way back gives."""
    names = "abc"[: draw(st.integers(0, 3))]
    sizes = {name: draw(st.sampled_from([1, 2, 3, 11])) for name in names}
    lists = {name: sizes[name] <= len(TEXTS) and draw(st.booleans()) for name in names}
    dtype = draw(st.sampled_from([np.float32, ml_dtypes.bfloat16]))
    shape = tuple(sizes.values())
    wholes = [  # of integers whose sum, and twice that, bfloat16 holds
        (np.arange(math.prod(shape)) % 41 + draw(st.integers(0, 1))).reshape(shape)
        for _ in range(draw(st.integers(2, 3)))
    ]
    scale = draw(st.sampled_from([1.0, 2.0, 0.5]))
    back = [sum(wholes), *(np.zeros_like(whole) for whole in wholes[1:])]
    places, arrays, backs = [], [], []
    for number, whole in enumerate([sum(wholes) * scale, *wholes]):
        mine = [name for name in names if draw(st.integers(0, 3)) == 0]
        axes = [name for name in names if name not in mine]
        at = f"u{number}" if number else "us"
        side = draw(sides(at, mine, axes, sizes, False, lists))
        places.append(side)
        arrays.append(side.stored(whole.astype(dtype), names))
        if number:
            backs.append(side.stored(back[number - 1].astype(dtype), names))
    before, returned = (
        {path: leaf for stored in every for path, leaf in stored.items()}
        for every in (arrays[1:], backs)
    )
    row = Row(
        tuple(side.address for side in places[1:]),
        places[0].address,
        before,
        arrays[0],
        {name: sizes[name] for name in _used(places, names)},
        {"add": True} | ({"scale": scale} if scale != 1 else {}),
    )
    return row, returned


@st.composite
def repeated(draw: Any, root: str, copies: int) -> dict[str, tuple[int, int]]:
    """Names along which a target repeats numbers: of which target, and how often."""
    count = draw(st.sampled_from([0, 0, 1, 2]))
    return {
        f"{root.upper()}Z"[place]: (
            draw(st.integers(1, copies)),
            draw(st.integers(1, 3)),
        )
        for place in range(count)
    }


@st.composite
def noted(
    draw: Any, sizes: dict[str, int], used: set[str], repeats: dict[str, int]
) -> dict[str, Any]:
    """What is next to the target of a row."""
    options: dict[str, Any] = {}
    if len(repeats) == 1 and draw(st.booleans()):
        (options["repeat"],) = repeats
    elif repeats:
        options["repeat"] = repeats
    if used and draw(st.booleans()):
        options["sizes"] = {name: sizes[name] for name in sorted(used)}
    if used and draw(st.booleans()):
        options["checked"] = " ".join(sorted(used))
    return options


@st.composite
def joins(draw: Any, root: str, letters: str) -> Row:
    """A row with a bracket: two or three arrays joined along an axis, or cut."""
    outer, inner = letters[: draw(st.integers(0, 2))], letters[2:]
    sizes = {name: draw(st.integers(1, 3)) for name in letters}
    stacked = [name for name in outer if draw(st.booleans())]
    kept = [name for name in outer if name not in stacked]
    parts = draw(
        st.lists(
            st.sampled_from(
                [(inner[0],), (inner[1],), tuple(inner), tuple(inner[::-1])]
            ),
            min_size=2,
            max_size=3,
        )
    )
    order = draw(st.permutations(kept))
    place = draw(st.integers(0, len(order)))
    axes = [*order[:place], f"[{' '.join(map(_composed, parts))}]", *order[place:]]
    index = draw(st.booleans())  # whether the joined arrays are stacked by path
    start, texts, pieces, after = 1, [], [], {}
    for number, part in enumerate(parts):
        names = outer + "".join(part)
        whole = _filled(tuple(sizes[name] for name in names), start)
        start += whole.size
        at = f"{root}{number}"
        names_in = stacked if index else []
        axes_in = [name for name in names if name not in names_in]
        spelled = dict.fromkeys(names_in, False)
        side = draw(sides(at, names_in, "".join(axes_in), sizes, spelled=spelled))
        texts.append(side.address)
        after |= side.stored(whole, names)
        flat = [*stacked, *order[:place], *part, *order[place:]]
        lead = [sizes[name] for name in [*stacked, *order[:place]]]
        tail = [sizes[name] for name in order[place:]]
        moved = whole.transpose([names.index(name) for name in flat])
        pieces.append(moved.reshape(*lead, -1, *tail))
    joined = np.concatenate(pieces, len(stacked) + place)
    path = "/".join([f"{root}s", *(f"{{{name}}}" for name in stacked)])
    before = {
        "/".join([f"{root}s", *map(str, at)]): joined[at]
        for at in itertools.product(*(range(sizes[name]) for name in stacked))
    }
    indices = set(stacked) if index else set()
    blocks = re.findall(r"\{\((\w) (\w)\)", " ".join(texts))
    open_names = {*outer, *itertools.chain(*parts)} - indices
    open_names.update(itertools.chain(*blocks))
    named = {name: sizes[name] for name in open_names}
    row = Row(f"{path} : {' '.join(axes)}", tuple(texts), before, after, named)
    return _turned(row, draw(st.booleans()))


def _joined(
    draw: Any,
    root: str,
    stacked: Sequence[str],
    kept: Sequence[str],
    parts: Sequence[Sequence[str]],
    wholes: Sequence[np.ndarray],
) -> tuple[str, dict[str, np.ndarray]]:
    """One address of parts, and its arrays; names may be around them in their axis.

    Axes of ``wholes`` are ``stacked``, ``kept`` and those of the part.
    """
    order = draw(st.permutations(list(kept)))
    place = draw(st.integers(0, len(order)))
    first = draw(st.integers(0, place))
    last = draw(st.integers(place, len(order)))
    bracket = " ".join(map(_composed, parts))
    if len(parts) > 1:
        bracket = f"[{bracket}]"
    elif first < last:
        bracket = " ".join(parts[0])
    axis = " ".join([*order[first:place], bracket, *order[place:last]])
    axes = [*order[:first], f"({axis})" if first < last else axis, *order[last:]]
    pieces = []
    for part, whole in zip(parts, wholes, strict=True):
        names = [*stacked, *kept, *part]
        flat = [*stacked, *order[:place], *part, *order[place:]]
        moved = whole.transpose([names.index(name) for name in flat])
        count = len(stacked) + place
        shape = moved.shape[:count], moved.shape[count + len(part) :]
        pieces.append(moved.reshape(*shape[0], -1, *shape[1]))
    joined = np.concatenate(pieces, len(stacked) + place)
    ends = len(stacked) + first, len(stacked) + last + 1
    shape = joined.shape[: ends[0]], joined.shape[ends[1] :]
    joined = joined.reshape(*shape[0], -1, *shape[1])
    path = "/".join([root, *(f"{{{name}}}" for name in stacked)])
    arrays = {
        "/".join([root, *map(str, at)]): joined[at]
        for at in itertools.product(*map(range, joined.shape[: len(stacked)]))
    }
    return f"{path} : {' '.join(axes)}", arrays


@st.composite
def nests(draw: Any, root: str, letters: str) -> Row:
    """A row with brackets on both sides, each alone on its axis or among names."""
    outer, inner = letters[: draw(st.integers(1, 2))], letters[2:]
    sizes = {name: draw(st.integers(1, 3)) for name in letters}
    stacked = [name for name in outer if draw(st.integers(0, 3)) == 0]
    kept = [name for name in outer if name not in stacked]
    every = [(inner[0],), (inner[1],), tuple(inner), tuple(inner[::-1])]
    parts = draw(st.lists(st.sampled_from(every), min_size=2, max_size=4))
    start, wholes = 1, []
    for part in parts:
        names = [*stacked, *kept, *part]
        wholes.append(_filled(tuple(sizes[name] for name in names), start))
        start += wholes[-1].size
    text, before = _joined(draw, f"{root}s", stacked, kept, parts, wholes)
    is_cut = [draw(st.booleans()) for _ in parts[1:]]
    cuts = [0, *(n for n, cut in enumerate(is_cut, 1) if cut), len(parts)]
    in_path = draw(st.booleans())
    paths, axes = (stacked, kept) if in_path else ([], [*stacked, *kept])
    texts, after = [], {}
    for number, (a, b) in enumerate(itertools.pairwise(cuts)):
        at = f"{root}{number}"
        one, arrays = _joined(draw, at, paths, axes, parts[a:b], wholes[a:b])
        texts.append(one)
        after |= arrays
    named = {name: sizes[name] for name in {*outer, *itertools.chain(*parts)}}
    named = {name: n for name, n in named.items() if name not in paths}
    target = tuple(texts) if len(texts) > 1 else texts[0]
    return _turned(Row(text, target, before, after, named), draw(st.booleans()))


@st.composite
def tables(draw: Any) -> Row:
    """Several rows as one: each with names and axes of its own."""
    every = ["move", "move", "copy", "copy", "join", "join", "nest", "nest", "product"]
    kinds = draw(st.lists(st.sampled_from(every), min_size=1, max_size=3))
    rows = []
    for root, letters, kind in zip(
        "uvw", ("abcd", "efgh", "ijkm"), kinds, strict=False
    ):
        if kind == "join":
            rows.append(draw(joins(root, letters)))
        elif kind == "product":
            rows.append(draw(products(root, letters)))
        elif kind == "nest":
            rows.append(draw(nests(root, letters)))
        else:
            rows.append(draw(moves(root, letters, copies=1 if kind == "move" else 2)))
    merged: dict[str, dict[str, Any]] = {
        name: {path: leaf for row in rows for path, leaf in getattr(row, name).items()}
        for name in ("before", "after", "sizes", "like", "past")
    }
    assume(merged["before"])
    return Row(
        [row.pair for row in rows],
        None,
        **merged,
        cuts=any(row.cuts for row in rows),
        products=tuple(path for row in rows for path in row.products),
    )


def migration(row: Row) -> ta.Migration:
    return ta.Migration(row.source, sizes=row.sizes or None)


def same(found: Any, wanted: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(wanted)
    for path, leaf in wanted.items():
        assert (path, found[path].shape, found[path].dtype) == (
            path,
            leaf.shape,
            leaf.dtype,
        )
        assert np.asarray(found[path]).tobytes() == leaf.tobytes(), path


def shapes(leaves: dict[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    return {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in leaves.items()}


@pytest.mark.slow
@at_length
@given(tables())
def test_arrays_are_those_of_numpy_and_come_back(row):
    m = migration(row)
    plan = m.plan(shapes(row.before))
    assert plan.exact == (not row.cuts and not row.products)
    assert sorted(plan.one_way) == sorted(row.products)
    found = m(row.before, row.needed)
    same(found, row.after)
    if not row.products:
        same(m.inverse(found, row.needed_back), row.before)
        return
    with pytest.raises(ta.MigrationError, match=r"; what [mt].* has no way") as error:
        _ = m.inverse
    sources = [source for source, value in row.source if _has_no_way_back(value)]
    names = [", ".join([each] if isinstance(each, str) else each) for each in sources]
    assert names
    assert all(repr(name) in str(error.value) for name in names)


@pytest.mark.slow
@at_length
@given(sums())
def test_sums_are_those_of_numpy_and_go_to_the_first_source(tmp_path_factory, drawn):
    row, returned = drawn
    m = ta.Migration([row.pair], sizes=row.sizes or None)
    found = m(row.before)
    same(found, row.after)
    same(jax.jit(m)(row.before), row.after)
    back = m.inverse(found, shapes(row.before))
    same(back, returned)
    same(m(back), row.after)
    plan = m.plan(row.before)
    assert not plan.exact
    assert sorted(plan.noted) == sorted(plan.one_way) == sorted(row.after)
    file = tmp_path_factory.mktemp("any") / "table.toml"
    for each in (m, m.inverse):
        file.write_text(each.to_toml(), "utf-8")
        assert ta.load_migration(file) == each


def _has_no_way_back(value: Any) -> bool:
    if len(value) != 2 or not isinstance(value[1], dict):
        return False
    return "multiply" in value[1] or _selects(value[1].get("take", {}))


def _selects(takes: dict[str, Any]) -> bool:
    """Return whether some numbers may be left out, at some length."""
    every = ("::", "::1", "::-1")
    return "of" in takes or any(
        isinstance(take, str) and take not in every for take in takes.values()
    )


@pytest.mark.slow
@settings(max_examples=full(EXAMPLES * 10, EXAMPLES // 5))  # each is compiled
@given(tables())
def test_a_traced_migration_makes_the_same_arrays(row):
    m = migration(row)
    same(jax.jit(m)(row.before, row.needed), row.after)


@pytest.mark.slow
def test_the_random_tables_have_every_option_both_ways():
    seen = []

    @settings(max_examples=300)
    @given(tables())
    def draw(row):
        seen.extend(
            ("undo " if options is not value[1] else "") + name
            for _, value in row.source
            if isinstance(value, tuple) and isinstance(value[1], dict)
            for options in (value[1], value[1].get("undo", {}))
            for name in options
        )

    draw()
    both = ("repeat", "pad", "fill")
    notes = ("sizes", "checked", "multiply", "cast")
    for name in (*both, *(f"undo {each}" for each in both), *notes):
        assert seen.count(name) >= 3, name


@pytest.mark.slow
@at_length
@given(tables())
def test_a_table_and_its_inverse_go_through_a_file(tmp_path_factory, row):
    file = tmp_path_factory.mktemp("any") / "table.toml"
    m = migration(row)
    for each in (m,) if row.products else (m, m.inverse):
        file.write_text(each.to_toml(), "utf-8")
        assert ta.load_migration(file) == each
    if not row.products:
        assert m.inverse.inverse == m


@pytest.mark.slow
@at_length
@given(tables(), st.randoms(use_true_random=False))
def test_the_order_of_the_source_never_matters(row, random):
    paths = list(row.before)
    random.shuffle(paths)
    m = migration(row)
    found = m({path: row.before[path] for path in paths}, row.needed)
    assert list(found) == list(m(row.before, row.needed))
    same(found, row.after)


@pytest.mark.slow
@at_length
@given(tables())
def test_shapes_migrate_as_arrays_do(row):
    m = migration(row)
    assert m(shapes(row.before)) == shapes(row.after)
    assert m(shapes(row.before), shapes(row.after)) == shapes(row.after)
    target = row.needed or shapes(row.after)
    assert m(row.before, target=target).keys() == row.after.keys()


@pytest.mark.slow
@at_length
@given(tables(), st.data())
def test_fewer_sizes_give_the_same_arrays_or_an_error(row, data):
    names = sorted(row.sizes)
    left = data.draw(st.sets(st.sampled_from(names), max_size=2)) if names else ()
    sizes = {name: row.sizes[name] for name in names if name not in left}
    target = row.needed
    if not target and data.draw(st.booleans()):
        target = shapes(row.after)
    try:
        found = ta.Migration(row.source, sizes=sizes or None)(row.before, target=target)
    except ta.MigrationError:
        return
    same(found, row.after)


@pytest.mark.slow
@at_length
@given(tables(), st.data())
def test_a_leaf_more_or_less_is_an_error_and_never_other_arrays(row, data):
    dropped = migration(row).plan(row.before).dropped
    path = data.draw(st.sampled_from(sorted({*row.before}.difference(dropped))))
    less = {key: leaf for key, leaf in row.before.items() if key != path}
    more = {**row.before, "stray": row.before[path]}
    m = migration(row)
    with pytest.raises(ta.MigrationError, match="stray"):
        m(more)
    with pytest.raises(ta.MigrationError):
        m(less, target=shapes(row.after))


# --- law 11, over tables of every kind of row ---

#: A value that any of the ways to change or to lose one would show.
SPECIAL = np.array([1.5, -0.0, np.nan, -np.inf, 1e-40, 0.1], np.float32)
TURNS = {
    "rename": ("{x}.{y}", ["{y}/{x}", "{x}/{y}", "{x}", "{y}_{x}", "{x}.{y}"]),
    "drop": ("{x}.*", [None]),
    "function": ("{x}.{y}", ["{y}/{x}"]),
    "axes": ("{x}.{y} : a b", ["{y}/{x} : b a", "{x}/{y} : (a b)", "{x} : y b a"]),
    "values": ("{x}.{y} : a b", ["{y}/{x} : b a"]),
}
VALUES = [
    {"cast": "float64"},
    {"cast": ["float32", "float64"], "pad": {"b": (1, 0)}},
    {"cast": "bfloat16"},
    {"pad": {"a": (0, 2), "b": (1, 1)}},
    {"scale": 2.0},
    {"offset": -1.0, "pad": {"a": (1, 0)}},
]
FUNCTIONS = [np.negative, (np.negative, np.negative), (np.transpose, np.transpose)]


@st.composite
def mixed(draw: Any) -> tuple[Any, dict[str, int], dict[str, Any]]:
    """Rows of every kind, whose sources never meet and whose targets may."""
    first = draw(tables())
    assume(not first.like and not first.past)  # they need a target
    table, leaves = list(first.source), dict(first.before)
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from([*TURNS, "rename"]))
        source, targets = TURNS[kind]
        target = draw(st.sampled_from(targets))
        if kind == "axes" and target.endswith("y b a"):
            source = source.replace("{y}", "{y=0,1}")
        at = draw(st.sampled_from(["z/", f"z{number}/", "u", f"s{number}."]))
        if target is not None:
            target = at + target
        if kind == "values":
            target = (target, draw(st.sampled_from(VALUES)))
        if kind == "function":
            target = (target, draw(st.sampled_from(FUNCTIONS)))
        table.append((f"s{number}.{source}", target))
        names = st.sampled_from(["0", "1", "10", "a"])
        for x, y in draw(st.sets(st.tuples(names, names), min_size=1, max_size=3)):
            leaf = np.roll(SPECIAL, len(leaves)).reshape(2, 3)
            is_number = kind == "rename" and draw(st.booleans())
            leaves[f"s{number}.{x}.{y}"] = 3 if is_number else leaf
    return draw(st.permutations(table)), first.sizes, leaves


def gone_and_back(drawn: Any) -> tuple[bool, bool] | None:
    """Check law 11; return whether it held of names and of values."""
    table, sizes, leaves = drawn
    m = ta.Migration(table, sizes=sizes)
    try:
        plan, found = m.plan(leaves), m(leaves)
    except ta.MigrationError:  # targets met, or leaves were torn
        return None
    assert sorted(found) == sorted(plan.result)
    if plan.one_way:
        return False, False
    like = {
        k: v if isinstance(v, int) else shapes({k: v})[k] for k, v in leaves.items()
    }
    for path in plan.dropped:
        del like[path]
    back = m.inverse(found, like)
    assert sorted(back) == sorted(like)
    whole = m.inverse(found, leaves)
    assert sorted(whole) == sorted(leaves)
    assert all(whole[path] is leaves[path] for path in plan.dropped)
    for path in like if plan.exact else ():
        if isinstance(leaves[path], int):
            assert back[path] is leaves[path]
        else:
            same({path: back[path]}, {path: leaves[path]})
    return True, plan.exact


@pytest.mark.slow
def test_law_11_what_is_exact_and_not_one_way_comes_back():
    found = []

    # Enough that each kind is drawn.
    @settings(at_length, max_examples=max(100, at_length.max_examples))
    @given(mixed())
    def draw(drawn):
        found.append(gone_and_back(drawn))

    draw()
    for wanted in ((True, True), (True, False), (False, False), None):
        assert found.count(wanted) >= 5, wanted


# --- axes against einops ---


@st.composite
def patterns(draw: Any) -> tuple[str, str]:
    """Axes on both sides, most of them well-formed."""
    tokens = [*"abc"[: draw(st.integers(0, 3))], *draw(st.sampled_from([[], ["..."]]))]
    found = []
    for _ in range(2):
        parts: list[str] = []
        for token in draw(st.permutations(tokens)):
            compose = token != "..." and parts and parts[-1] not in ("...", "1")
            if compose and draw(st.booleans()):
                parts[-1] = f"({parts[-1].strip('()')} {token})"
            else:
                parts.append(token)
            if draw(st.integers(0, 4)) == 0:
                parts.append("1")
        if draw(st.integers(0, 5)) == 0:  # often a mistake
            parts.append(draw(st.sampled_from(["a", "(", ")", "d", "...", "(1 a)"])))
        found.append(" ".join(parts))
    return found[0], found[1]


@pytest.mark.slow
@at_length
@given(patterns(), st.lists(st.sampled_from([1, 2, 3, 6]), max_size=4), st.data())
def test_axes_mean_what_they_mean_to_einops(pattern, shape, data):
    left, right = pattern
    names = sorted(set(re.findall("[abc]", left)))
    known = (
        data.draw(st.dictionaries(st.sampled_from(names), st.integers(1, 3)))
        if names
        else {}
    )
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    try:
        wanted = einops.rearrange(array, f"{left} -> {right}", **known)
    except einops.EinopsError:
        wanted = None
    m: Any = None
    try:
        m = ta.Migration({f"x : {left}": f"y : {right}"}, sizes=known or None)
        found = m({"x": array})
    except ta.MigrationError:
        assert wanted is None, (left, right, shape, known)
    else:
        assert wanted is not None, (left, right, shape, known)
        same(found, {"y": wanted})
        same(m.inverse(found, target=shapes({"x": array})), {"x": array})


@at_length
@given(st.permutations("abrs"), st.data())
def test_repeats_mean_what_they_mean_to_einops(order, data):
    sizes = dict(
        zip("abrs", data.draw(st.tuples(*[st.integers(1, 3)] * 4)), strict=True)
    )
    cut = data.draw(st.integers(1, 4))
    parts = (order[:cut], order[cut:])
    right = " ".join(_composed(tuple(part)) for part in parts if part)
    array = np.arange(sizes["a"] * sizes["b"], dtype=np.float32)
    wanted = einops.repeat(array, f"(a b) -> {right}", **sizes)
    repeat = {"r": sizes.pop("r"), "s": sizes.pop("s")}
    m = ta.Migration({"x : (a b)": (f"y : {right}", {"repeat": repeat})}, sizes=sizes)
    moved = m({"x": array})
    same(moved, {"y": wanted})
    same(m.inverse(moved), {"x": array})


@at_length
@given(st.permutations("abc"), st.data())
def test_takes_mean_what_they_mean_to_einops(order, data):
    """einops cuts and turns; what is taken between is NumPy's."""
    counts = st.tuples(*[st.integers(1, 4)] * 3)
    sizes = dict(zip("abc", data.draw(counts), strict=True))
    takes, orders = data.draw(taken(sizes))
    cut = data.draw(st.integers(1, 3))
    parts = (order[:cut], order[cut:])
    right = " ".join(_composed(tuple(part)) for part in parts if part)
    array = np.arange(math.prod(sizes.values()), dtype=np.float32)
    array = array.reshape(sizes["a"] * sizes["b"], sizes["c"])
    wanted = einops.rearrange(array, "(a b) c -> a b c", a=sizes["a"])
    for axis, name in enumerate("abc"):
        wanted = np.take(wanted, orders.get(name, range(sizes[name])), axis)
    wanted = einops.rearrange(wanted, f"a b c -> {right}")
    options = {"take": takes} if takes else {}
    row = {"x : (a b) c": (f"y : {right}", options) if takes else f"y : {right}"}
    m = ta.Migration(row, sizes={name: sizes[name] for name in "ab"})
    moved = m({"x": array})
    same(moved, {"y": wanted})
    if not _selects(takes):
        same(m.inverse(moved, shapes({"x": array})), {"x": array})


@pytest.mark.slow
def test_einops_takes_and_refuses_patterns_of_the_draw():
    """So neither half of the comparison is empty."""
    taken = []

    @settings(max_examples=100)
    @given(patterns())
    def draw(pattern):
        shape = (2,) * len(re.findall(r"\(.*?\)|\S+", pattern[0]))
        try:
            einops.rearrange(np.zeros(shape), " -> ".join(pattern))
            taken.append(True)
        except einops.EinopsError:
            taken.append(False)

    draw()
    assert 10 < sum(taken) < len(taken) - 10


# --- paths against every way to cut them ---


@dataclasses.dataclass(frozen=True)
class Capture:
    """A part of a template: its name, and which texts it takes."""

    name: str
    kind: str  # "text", "list", "plus" or "many"
    texts: tuple[str, ...] = ()
    plus: int = 0

    @property
    def spelled(self) -> str:
        inner = {
            "text": self.name,
            "list": f"{self.name}={','.join(self.texts)}",
            "plus": f"{self.name}+{self.plus}",
            "many": f"{self.name}:**",
        }
        return f"{{{inner[self.kind]}}}"

    def value(self, text: str) -> str | None:
        """What the capture holds for ``text``; None if it does not take it."""
        if self.kind == "list":
            return text if text in self.texts else None
        if self.kind == "plus":
            fits = re.fullmatch("0|[1-9][0-9]*", text) and int(text) >= self.plus
            return str(int(text) - self.plus) if fits else None
        return text or None


Segment = tuple[Any, ...]  # texts and captures in turn, or one capture of many


def cuts(segment: Segment, text: str) -> Iterator[list[tuple[str, str]]]:
    """Every way to cut one segment, the first capture shortest first."""
    if not segment:
        if not text:
            yield []
        return
    first, rest = segment[0], segment[1:]
    if isinstance(first, str):
        if text.startswith(first):
            yield from cuts(rest, text[len(first) :])
        return
    for end in range(1, len(text) + 1):
        value = first.value(text[:end])
        if value is not None:
            for more in cuts(rest, text[end:]):
                yield [(first.name, value), *more]


def matches(
    segments: list[Segment], parts: list[str]
) -> Iterator[list[tuple[str, str]]]:
    """Every way to cut a path."""
    if not segments:
        if not parts:
            yield []
        return
    first, rest = segments[0], segments[1:]
    if isinstance(first[0], Capture) and first[0].kind == "many":
        for count in range(len(parts) + 1):
            held = "".join("/" + part for part in parts[:count])
            for more in matches(rest, parts[count:]):
                yield [(first[0].name, held), *more]
    elif parts:
        for found in cuts(first, parts[0]):
            for more in matches(rest, parts[1:]):
                yield [*found, *more]


def reference(segments: list[Segment], path: str) -> dict[str, str] | None:
    """What the first way to cut a path gives each name, if equal names agree."""
    first = next(matches(segments, path.split("/")), None)
    if first is None:
        return None
    known: dict[str, str] = {}
    agree = all(known.setdefault(name, value) == value for name, value in first)
    return known if agree else None


@st.composite
def templates(draw: Any) -> list[Segment]:
    kinds: dict[str, str] = {}
    segments: list[Segment] = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 2)) == 0:
            name = f"m{len(segments)}"
            kinds[name] = "many"
            segments.append((Capture(name, "many"),))
            continue
        segment: list[Any] = []
        for number in range(draw(st.integers(0, 3))):
            if number or draw(st.booleans()):
                segment.append(draw(st.sampled_from(["_", "_", "a", "1"])))
            name = draw(st.sampled_from(["x", "y", "z"]))
            kind = kinds.setdefault(
                name, draw(st.sampled_from(["text", "text", "list", "plus"]))
            )
            texts = ("a", "a_a", "1", "10") if kind == "list" else ()
            plus = draw(st.integers(1, 2)) if kind == "plus" else 0
            segment.append(Capture(name, kind, texts, plus))
        if not segment or draw(st.booleans()):
            segment.append(draw(st.sampled_from(["a", "_", "1", "b"])))
        segments.append(tuple(segment))
    return segments


@st.composite
def paths_like(draw: Any, segments: list[Segment]) -> str:
    """A path that the template may match: its captures filled, or a mistake."""
    word = st.text("a_1", min_size=1, max_size=5)
    parts: list[str] = []
    for segment in segments:
        if segment[0] == "" or (
            isinstance(segment[0], Capture) and segment[0].kind == "many"
        ):
            parts += draw(st.lists(st.sampled_from(["", "a", "_", "1"]), max_size=3))
            continue
        text = ""
        for part in segment:
            if isinstance(part, str):
                text += part
            elif part.kind == "list":
                text += draw(st.sampled_from(part.texts))
            elif part.kind == "plus":
                text += draw(st.sampled_from(["0", "1", "2", "3", "10", "01"]))
            else:
                text += draw(word)
        parts.append(text)
    if draw(st.integers(0, 4)) == 0:
        parts.append(draw(word))
    return "/".join(parts)


@pytest.mark.slow
@at_length
@given(st.data())
def test_paths_are_cut_as_the_reference_cuts_them(data):
    segments = data.draw(templates())
    path = data.draw(paths_like(segments))
    captures = {
        part.name: part
        for segment in segments
        for part in segment
        if isinstance(part, Capture)
    }
    source = "/".join(
        "".join(part if isinstance(part, str) else part.spelled for part in segment)
        for segment in segments
    )
    # Shows what each name holds, whatever it holds.
    target = "/".join(["^", *(f"{{{name}}}/^" for name in captures)])
    held = reference(segments, path)
    m = ta.Migration({source: target})
    if held is None:
        with pytest.raises(ta.MigrationError, match=re.escape(repr(path)[1:-1])):
            m({path: 1.0})
        return
    wanted = "^"
    for name, capture in captures.items():
        wanted += held[name] if capture.kind == "many" else "/" + held[name]
        wanted += "/^"
    assert list(m({path: 1.0})) == [wanted]


@pytest.mark.slow
def test_the_drawn_paths_match_and_do_not():
    found = []

    @settings(max_examples=100)
    @given(st.data())
    def draw(data):
        segments = data.draw(templates())
        path = data.draw(paths_like(segments))
        ways = list(itertools.islice(matches(segments, path.split("/")), 2))
        found.append((len(ways), reference(segments, path) is not None))

    draw()
    assert sum(matched for _, matched in found) > 20
    assert sum(not matched for _, matched in found) > 20
    assert sum(ways == 2 and matched for ways, matched in found) > 5
