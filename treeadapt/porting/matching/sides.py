"""Both models, the leaves that may change, and parts of them.

Takes the two trees and functions; gives answers to numbers that are put into parts of
leaves, and counts how often a model is called. Decides nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.porting.measure import SIDES, called, require_alike, scale_of
from treeadapt.text.names import listing
from treeadapt.trees.arrays import is_array, is_inexact_dtype
from treeadapt.trees.state_dict import from_flat_dict, to_flat_dict

#: Numbers by the place that they are put at.
Numbers: TypeAlias = Mapping["Spot", np.ndarray]
#: Arrays of one side by path.
Arrays: TypeAlias = dict[str, Any]

_DTYPE = np.dtype("float32")
_ALIKE = 0.05  # of a change, which a wrong pair or order changes by more
_ROUNDED = 2e-5  # what changes of answers round by, relative to the answers


class Stretch(NamedTuple):
    """The entries of one axis from ``start`` to ``stop``."""

    axis: int
    start: int
    stop: int


#: A step into an array: some entries of an axis, or a shape in which one axis is two.
Step: TypeAlias = Stretch | tuple[int, ...]


class LimitError(Exception):
    """No evaluations are left."""


@dataclasses.dataclass(frozen=True, eq=False)
class Spot:
    """A part of a leaf.

    Attributes:
        path: of the leaf.
        steps: from the leaf to the part.
        shape: of the part, without axes of size 1.
    """

    path: str
    steps: tuple[Step, ...]
    shape: tuple[int, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return the part as a view, with the axes that the leaf has there."""
        for step in self.steps:
            if isinstance(step, Stretch):
                array = array[(slice(None),) * step.axis + (slice(*step[1:]),)]
            else:
                array = array.reshape(step)
        return array


@dataclasses.dataclass(frozen=True, eq=False)
class ModelPart:
    """Numbers that move as one.

    At several places of the target they are copies. Those of the source add up: the
    first one has the numbers, and the others are zero while parts are compared.
    """

    places: tuple[Spot, ...]

    @property
    def path(self) -> str:
        """Path of the first leaf."""
        return self.places[0].path

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of all places."""
        return tuple(place.shape for place in self.places)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return math.prod(self.places[0].shape)


class ModelSide:
    """One model, and the leaves that it is called with.

    Attributes:
        shapes: of the leaves whose numbers may change, by path.
        fixed: the other leaves, as they were given.
        cast: paths of leaves that are cast up to float32.
        changes: scale and offset of what is put into a leaf, by path.
        role: ``"model"`` or ``"reference"``.

    Args:
        tree: of the leaves.
        call: the model.
        role: which of the two it is, as for ``called``.
    """

    def __init__(self, tree: Any, call: Callable[[Any], Any], *, role: str) -> None:
        leaves = to_flat_dict(tree)
        self.fixed: Arrays = {p: x for p, x in leaves.items() if not _moves(x)}
        self.shapes = {p: tuple(x.shape) for p, x in leaves.items() if _moves(x)}
        if not self.shapes:
            raise MigrationError(
                f"The {SIDES[role]} holds no array of floating-point numbers: "
                f"{listing(leaves)}."
            )
        moving = (leaves[path] for path in self.shapes)
        self.cast = [
            path
            for path, leaf in zip(self.shapes, moving, strict=True)
            if jnp.dtype(leaf.dtype).itemsize < _DTYPE.itemsize
        ]
        self.changes: dict[str, tuple[float, float]] = {}
        self.role = role
        self._tree, self._call = tree, call
        self._is_plain = type(tree) is dict and tree.keys() == leaves.keys()

    def leave_out(self, paths: Iterable[str], rng: np.random.Generator) -> None:
        """Let some leaves have fixed numbers."""
        for path in paths:
            self.fixed[path] = usual(self.shapes.pop(path), rng)

    def arrays(self, numbers: Numbers) -> Arrays:
        """Return zeros, and the numbers where they belong."""
        zeros = {p: np.zeros(shape, _DTYPE) for p, shape in self.shapes.items()}
        self._put(zeros, numbers)
        return zeros

    def changed(self, arrays: Arrays, numbers: Numbers) -> Arrays:
        """Return arrays with other numbers at some places; the given ones stay."""
        copies = {place.path: arrays[place.path].copy() for place in numbers}
        self._put(copies, numbers)
        return {**arrays, **copies}

    def _put(self, arrays: Arrays, numbers: Numbers) -> None:
        for place, values in numbers.items():
            view = place.of(arrays[place.path])
            scale, offset = self.changes.get(place.path, (1.0, 0.0))
            view[...] = values.reshape(view.shape) * scale + offset

    def answers(self, arrays: Mapping[str, Any]) -> list[np.ndarray]:
        """Call the model with arrays under the names of this side."""
        leaves = {**self.fixed, **arrays}
        tree = leaves if self._is_plain else from_flat_dict(self._tree, leaves)
        return called(self.role, self._call, tree)


def _moves(leaf: Any) -> bool:
    """Return whether a leaf is an array whose numbers may be other ones."""
    return is_array(leaf) and is_inexact_dtype(leaf.dtype)


def usual(shape: Sequence[int], rng: np.random.Generator, shrunk: float = 1) -> Any:
    """Return random numbers of usual size; those of vectors are positive."""
    numbers = rng.normal(size=shape)
    if len(shape) < 2:
        numbers = np.exp(0.3 * numbers)  # some are variances
    else:
        numbers = numbers / math.sqrt(max(1, math.prod(shape) / max(shape)))
    return (shrunk * numbers).astype(_DTYPE)


@dataclasses.dataclass
class Models:
    """The old and the new model; counts their calls.

    Attributes:
        old: the source and its model.
        new: the target and its model.
        left: how many more calls there may be.
        evaluations: how many there were.
    """

    old: ModelSide
    new: ModelSide
    left: int
    evaluations: int = 0

    def called(self, side: ModelSide, arrays: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the answers of one side.

        Raises:
            LimitError: no call is left.
        """
        if self.left <= 0:
            raise LimitError
        self.left -= 1
        self.evaluations += 1
        with np.errstate(all="ignore"):
            return side.answers(arrays)


class Base:
    """Numbers on both sides to which both models should answer alike.

    Attributes:
        noise: the largest difference of the two answers, relative.
    """

    def __init__(self, models: Models, old: Numbers, new: Numbers) -> None:
        self._models = models
        self._arrays = models.old.arrays(old), models.new.arrays(new)
        theirs = models.called(models.old, self._arrays[0])
        ours = models.called(models.new, self._arrays[1])
        require_alike(ours, theirs)
        self._scales = np.concatenate([_scales(array).ravel() for array in theirs])
        self._zeros = flat_of(theirs), flat_of(ours)
        self.noise = difference(*self._zeros, self._scales)

    @property
    def tolerance(self) -> float:
        """How far answers that are equal may be apart."""
        return 30 * self.noise + _ROUNDED

    @property
    def usual(self) -> float:
        """How far answers that are equal are apart in most cases."""
        return 3 * self.noise + _ROUNDED

    def old(self, numbers: Numbers) -> np.ndarray:
        """Return how the old model's answers change with some numbers."""
        arrays = self._models.old.changed(self._arrays[0], numbers)
        return flat_of(self._models.called(self._models.old, arrays)) - self._zeros[0]

    def new(self, numbers: Numbers) -> np.ndarray:
        """Return how the new model's answers change with some numbers."""
        arrays = self._models.new.changed(self._arrays[1], numbers)
        return flat_of(self._models.called(self._models.new, arrays)) - self._zeros[1]

    def apart(self, one: np.ndarray, two: np.ndarray) -> float:
        """Return the largest relative difference of two changes of answers."""
        return difference(one, two, self._scales)

    def are_alike(self, one: np.ndarray, two: np.ndarray) -> bool:
        """Return whether two changes of answers are the same, relative to them."""
        sizes = (np.linalg.norm(each / self._scales) for each in (one, one - two))
        change, rest = (float(size) for size in sizes)
        return rest <= _ALIKE * change + _ROUNDED


def flat_of(answers: Sequence[np.ndarray]) -> np.ndarray:
    """Return answers as one vector of floats; infinite entries are zero."""
    vectors = []
    for array in answers:
        array = np.ascontiguousarray(array).ravel()
        array = array.view("float64") if array.dtype.kind == "c" else array
        vectors.append(np.where(np.isinf(array), 0, array.astype("float64")))
    return np.concatenate(vectors)


def _scales(array: np.ndarray) -> np.ndarray:
    """Return for each number of an answer the size that differences are held to."""
    flat = flat_of([array])
    least = scale_of(flat) if array.dtype.kind in "fc" else 1.0
    return np.maximum(least, np.abs(flat))


def difference(one: np.ndarray, two: np.ndarray, scales: np.ndarray) -> float:
    """Return the largest difference of two vectors, relative; infinite with NaN."""
    with np.errstate(all="ignore"):
        sizes = np.maximum(scales, np.maximum(np.abs(one), np.abs(two)))
        largest = float(np.max(np.abs(one - two) / sizes, initial=0))
    return largest if math.isfinite(largest) else math.inf
