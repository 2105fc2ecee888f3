"""What a migration takes at other sizes than those of its source."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

import treeadapt as ta

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)


class _Sizes:
    """Another size for each size, and none twice."""

    def __init__(self, kept: Collection[int]) -> None:
        self._new = {size: size for size in (0, 1, *kept)}

    def of(self, size: int) -> int:
        if size not in self._new:
            used = {*self._new.values(), size}
            self._new[size] = next(n for n in _PRIMES if n not in used)
        return self._new[size]


def resized(
    migration: ta.Migration, source: Mapping[str, Any], kept: Collection[int] = ()
) -> tuple[ta.Migration, dict[str, np.ndarray]]:
    """The table with other sizes, and a source of it.

    Each size becomes another one, the lengths of lists and what is ``kept`` apart.
    Numbers of both paths that count from 0 are one more.
    """
    plan = migration.plan(source)
    sizes = _Sizes(kept)
    open_sizes: dict[str, int] = {}
    shapes = {path: tuple(source[path].shape) for path in plan.dropped}
    groups = [*_with_another(plan.groups)]
    for group, texts in groups:
        row, move = group.row, group.move
        if move is None:
            shape = tuple(map(sizes.of, source[next(group.source_paths)].shape))
            shapes[row.sources[0].path.fill(texts, {})] = shape
            continue
        new = {
            name: size if name in row.listed else sizes.of(size)
            for name, size in (dict(migration.sizes) | move.size).items()
        }
        open_sizes |= {name: new[name] for name in migration.sizes}
        for address, layout in zip(row.sources, move.sources, strict=True):
            shape = tuple(
                sum(math.prod(new[name] for name in part) for part in axis.parts)
                for axis in layout.axes
            )
            # Numbers that are one in a path vary with those that are axes.
            united = [n for c in address.path.captures for n in c.names[1:]]
            inner = dict.fromkeys((*layout.numbers, *united))
            for numbers in itertools.product(*(range(new[n]) for n in inner)):
                values = dict(zip(inner, numbers, strict=True))
                shapes[address.path.fill(texts | values, new)] = shape
    random = np.random.default_rng(1)
    arrays = {
        path: random.normal(size=shape).astype("float32")
        for path, shape in shapes.items()
    }
    rows = [row.typed() for row in migration.rows]
    return ta.Migration(rows, sizes=open_sizes or None), arrays


def _with_another(groups: Collection[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield groups with what their paths capture; then those of one number more."""
    every: list[tuple[Any, dict[str, Any]]] = []
    numbers: dict[tuple[int, str], set[int]] = {}
    for group in groups:
        texts = dict[str, Any]()
        for address, paths in (
            *zip(group.row.sources, group.sources, strict=True),
            *zip(group.row.targets, group.targets, strict=True),
        ):
            texts |= address.path.match(paths[0]) or {}
        every.append((group, texts))
        for name, text in texts.items():
            is_axis = group.move and name in group.row.sources[0].numbers
            if str(text).isdecimal() and not (is_axis or name in group.row.listed):
                numbers.setdefault((group.place, name), set()).add(int(text))
    yield from every
    for (place, name), values in numbers.items():
        last = len(values) - 1
        if last > 0 and values == {*range(len(values))}:
            for group, texts in every:
                number = texts.get(name)
                if group.place == place and str(number) == str(last):
                    yield group, texts | {name: type(number)(last + 1)}
