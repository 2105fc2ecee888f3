"""``Group``: leaves that move together, as ``groups`` plans them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from treeadapt.migrations.axes import REST, Axis
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

    def exchange_advice(self, path: str, shape: tuple[int, ...]) -> str:
        """Write how an exchange of two axes of one target would give a shape.

        Args:
            path: of a leaf that the group makes.
            shape: that it should have.

        Returns:
            The row with them exchanged, as in a table. Parts of one axis, or numbers of
            one capture, are not exchanged: that would mix them, and what differs is
            rather how many there are. Empty if no two axes, or several, would do.
        """
        made = shape_of(self.specs[path])
        exchanges = [
            (one, two)
            for one, two in itertools.combinations(range(len(made)), 2)
            if shape == _exchanged(made, one, two)
        ]
        if len(exchanges) != 1:
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
        one, two = (axes[place] for place in exchanges[0])
        pair = [address.axes[n] for n in exchanges[0] if address.has_axes]
        if pair and (what := self._divides_into(*pair)):
            sizes = (f"{axes[place]} = {made[place]}" for place in exchanges[0])
            other = (f"{axes[place]} = {shape[place]}" for place in exchanges[0])
            return (
                f"{one} and {two} are parts of one {what} of the source, with "
                f"{', '.join(sizes)}, and the target would have {', '.join(other)}. "
                "See which the configuration of the model says: correct the model, or "
                "the sizes of the table ([sizes], [config], sizes=). Only if the "
                f"target has {two} before {one} on purpose, write so in the row"
            )
        turned = " ".join(_exchanged(axes, *exchanges[0]))
        targets[number] = f"{address.path.text}{SPLIT}{turned}"
        row = f"{listing(sources, limit=99)}: {listing(targets, limit=99)}"
        return f"with two axes exchanged it fits: {row}"

    def _divides_into(self, one: Axis, two: Axis) -> str:
        """Return which of a source has parts on two axes; empty if none has."""
        first, second = ({*itertools.chain(*axis.parts)} for axis in (one, two))
        for address in self.row.sources:
            products = [("axis", part) for axis in address.axes for part in axis.parts]
            products += [("number", each.names) for each in address.path.captures]
            for what, names in products:
                if first.intersection(names) and second.intersection(names):
                    return what
        return ""


def _exchanged(values: Sequence[Any], one: int, two: int) -> tuple[Any, ...]:
    """Return values, two of which have changed places."""
    places = {one: two, two: one}
    return tuple(values[places.get(place, place)] for place in range(len(values)))


def shape_of(spec: Any) -> tuple[int, ...]:
    """Return the shape of a leaf; that of a Python number is empty."""
    return tuple(spec.shape) if is_array(spec) else ()


def size_bytes(spec: Any) -> int:
    """Return the bytes of an array, of which only shape and dtype are known."""
    return math.prod(spec.shape) * int(spec.dtype.itemsize)
