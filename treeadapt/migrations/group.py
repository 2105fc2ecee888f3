"""``Group``: leaves that move together, as ``groups`` plans them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Iterator
from typing import Any, NamedTuple

from treeadapt.migrations.axes import REST
from treeadapt.migrations.move import Move
from treeadapt.migrations.rows import SPLIT, Row
from treeadapt.migrations.templates import Captures
from treeadapt.text.names import listing
from treeadapt.trees.arrays import is_array


class Taken(NamedTuple):
    """A leaf that a row takes: by which of its addresses, and what it captured."""

    address: int
    path: str
    captures: Captures


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that move together.

    Attributes:
        row: the row that takes them.
        place: its place in the table.
        sources: paths of the leaves of each source, in the order of their numbers.
        targets: the same of each target.
        move: how their arrays are moved; None where each leaf stays as it is, and where
            the row has a function.
        target_specs: shape and dtype of each target's leaves; None where a function
            decides.
        selected: names of which only some numbers are taken, each with how many, and of
            how many.
    """

    row: Row
    place: int
    sources: tuple[tuple[str, ...], ...]
    targets: tuple[tuple[str, ...], ...]
    move: Move | None
    target_specs: tuple[Any, ...]
    selected: tuple[tuple[str, int, int], ...] = ()

    @property
    def source_paths(self) -> Iterator[str]:
        """Paths of all its sources."""
        return itertools.chain.from_iterable(self.sources)

    @property
    def filled(self) -> Iterator[str]:
        """Paths of all its targets."""
        return itertools.chain.from_iterable(self.targets)

    @property
    def specs(self) -> dict[str, Any]:
        """What ``target_specs`` says of each target's leaves, by path."""
        pairs = zip(self.targets, self.target_specs, strict=True)
        return {path: spec for paths, spec in pairs for path in paths}

    def with_axes_exchanged(self, path: str, shape: tuple[int, ...]) -> str:
        """Write the row with the two axes of one target exchanged that give a shape.

        Args:
            path: of a leaf that the group makes.
            shape: that it should have.

        Returns:
            The row, as in a table; empty if no two axes, or several, would do.
        """
        made = shape_of(self.specs[path])
        places = range(len(made))
        orders = [
            [{one: two, two: one}.get(place, place) for place in places]
            for one, two in itertools.combinations(places, 2)
        ]
        fitting = [o for o in orders if shape == tuple(made[place] for place in o)]
        if len(fitting) != 1:
            return ""
        number = next(n for n, paths in enumerate(self.targets) if path in paths)
        targets = [each.text for each in self.row.targets]
        sources = [each.text for each in self.row.sources]
        address = self.row.targets[number]
        axes = [axis.text for axis in address.axes]
        if not address.has_axes and len(sources) == len(targets) == 1:
            captured = {name for it in address.path.captures for name in it.names}
            letters = [each for each in string.ascii_lowercase if each not in captured]
            axes = letters[: len(made)]
            sources = [f"{sources[0]}{SPLIT}{' '.join(axes)}"]
        if len(axes) != len(made) or REST in axes:
            return ""
        turned = " ".join(axes[place] for place in fitting[0])
        targets[number] = f"{address.path.text}{SPLIT}{turned}"
        return f"{listing(sources, limit=99)}: {listing(targets, limit=99)}"


def shape_of(spec: Any) -> tuple[int, ...]:
    """Return the shape of a leaf; that of a Python number is empty."""
    return tuple(spec.shape) if is_array(spec) else ()


def size_bytes(spec: Any) -> int:
    """Return the bytes of an array, of which only shape and dtype are known."""
    return math.prod(spec.shape) * int(spec.dtype.itemsize)
