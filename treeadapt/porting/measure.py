"""How far the answers of two models are apart, by a scale for each array.

Takes models, or what they return; gives arrays, and one number for the largest
difference. One mask of -1e9, or one very large activation, does not hide the other
entries, because the scale is three times the median. Integers and booleans are equal or
not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from treeadapt.errors import MigrationError, explaining
from treeadapt.text.names import listing
from treeadapt.trees.describing import describe
from treeadapt.trees.state_dict import to_flat_dict

_MEDIANS = 3.0  # of an array's sizes make its scale

#: Whose leaves each function takes.
SIDES = {"model": "target", "reference": "source"}


def called(role: str, function: Callable[[Any], Any], leaves: Any) -> list[np.ndarray]:
    """Return what a model answers; its own error says which one failed, and on what.

    Args:
        role: of the function, ``"model"`` or ``"reference"``.
        function: the model.
        leaves: what it is called with.

    Raises:
        MigrationError: the answer is not an array of numbers, or a list of such.
    """
    try:
        return answers_of(function(leaves))
    except Exception as error:
        with explaining(error):
            error.add_note(_of_failed(role, function, leaves, error))
        raise


def _of_failed(
    role: str, function: Callable[[Any], Any], leaves: Any, error: Exception
) -> str:
    """Say with which leaves a function failed, and which order the arguments have."""
    names = [*to_flat_dict(leaves)]
    text = (
        f"{role}= failed on the leaves of the {SIDES[role]}: "
        f"{listing(names, limit=6)}. The order of arguments is source, target, model, "
        "reference: model takes a tree like target, reference a flat dict like source."
    )
    absent = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(absent, str) and absent not in names:
        text += f" {listing([absent])} is not one of these leaves."
    # By its classes, because PyTorch is not imported here.
    bases = type(function).__mro__
    if any(each.__module__ == "torch.nn.modules.module" for each in bases):
        text += (
            f" {type(function).__name__!r} is a module, not a function of its weights: "
            f"{role}=lambda w: torch.func.functional_call(module, {{name: "
            "torch.from_numpy(array) for name, array in w.items()}, inputs)"
            ".detach().numpy()."
        )
    return text


def answers_of(value: Any) -> list[np.ndarray]:
    """Return what a model answers as arrays of NumPy, floats with 64 bits.

    Raises:
        MigrationError: it is not an array of numbers, or a list of such.
    """
    every = value if isinstance(value, list | tuple) else [value]
    has_none = any(each is None for each in every)  # which NumPy takes for NaN
    try:
        arrays = [] if has_none else [_widened(np.asarray(each)) for each in every]
    except (TypeError, ValueError):
        arrays = []  # what is not a number
    if any(array.size for array in arrays):
        return arrays
    got = "None" if value is None else describe(value)
    within = " with None in it" if has_none and value is not None else ""
    raise MigrationError(
        f"Expected an array, or a list of arrays, as the answer, got {got}{within}: "
        "return the arrays alone, such as the logits."
    )


def _widened(array: np.ndarray) -> np.ndarray:
    """Return an array as integers, booleans, or floats of 64 bits."""
    if array.dtype.kind in "iub":
        return array
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")


def require_alike(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> None:
    """Raise unless both models answer with arrays of the same shapes.

    Raises:
        MigrationError: they do not.
    """
    shapes = [[array.shape for array in each] for each in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise MigrationError(
            f"The model answers with arrays of shapes {shapes[0]}, the reference with "
            f"{shapes[1]}. Let both return the same arrays, in the same order, and "
            "each with its axes in the same order."
        )


def apart(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Return the largest difference of answers of the same shapes, relative.

    An entry differs by ``|a - b| / max(scale, |a|, |b|)``, where the scale of an array
    is three times the median of the sizes of its finite entries that are not zero.
    Infinities match where both have them, if most entries are finite; NaN never does.

    Example:
        >>> mask = np.array([1.0, 2.0, 3.0, -1e9])
        >>> round(apart([mask], [mask + [0.6, 0, 0, 0]]), 3)
        0.08
        >>> apart([np.array([5])], [np.array([6])])
        inf
    """
    each = (errors_of(one, two) for one, two in zip(ours, theirs, strict=True))
    return max((float(np.max(errors, initial=0)) for errors in each), default=0.0)


def errors_of(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Return how much each entry of two arrays differs; infinite where none matches."""
    if "f" not in one.dtype.kind + two.dtype.kind and "c" not in one.dtype.kind:
        return np.where(one == two, 0.0, math.inf)
    finite = np.isfinite(one) & np.isfinite(two)
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = np.maximum(np.abs(one), np.abs(two))
        errors = np.abs(one - two) / np.maximum(scale_of(two), sizes)
        matches = np.where(one == two, 0.0, math.inf)
    is_finite_mostly = 2 * finite.sum() >= one.size
    return np.where(finite, errors, matches if is_finite_mostly else math.inf)


def scale_of(array: np.ndarray) -> float:
    """Return three times the median size of the entries that are finite, not zero."""
    sizes = np.abs(array[np.isfinite(array) & (array != 0)])
    return _MEDIANS * float(np.median(sizes)) if sizes.size else 1.0
