"""Whether two models can be matched at all: what a few calls of each say.

Takes both models and the numbers of the source; raises with the cause where no search
could find a table. Whether the models are alike is left to the search.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.porting.matching.sides import Arrays, Models, ModelSide, usual
from treeadapt.porting.measure import apart, require_alike
from treeadapt.text.names import listing, shorten

_MOST_DRAWS = 5  # for which answers may be equal by chance, as zeros after a ReLU


def require_trees(**sides: Any) -> None:
    """Raise if the path of a file is passed in place of what it holds.

    Raises:
        MigrationError: it is.
    """
    for name, tree in sides.items():
        if isinstance(tree, str | os.PathLike):
            path = shorten(repr(os.fspath(tree)))
            raise MigrationError(
                f"match_models expects arrays as {name}, got the text {path}: if that "
                f"is the path of a checkpoint, pass ta.load({path})."
            )


def require_matchable(
    models: Models, given: Mapping[str, Any], tolerance: float, seed: int
) -> None:
    """Raise if the answers of a model say that no search could find a table.

    Args:
        models: both models, each of which is called at most eight times.
        given: numbers of the source, if there are any.
        tolerance: largest difference that is rounding.
        seed: of the numbers that the models are asked with.

    Raises:
        MigrationError: the shapes of answers differ; all answers of a model are
            integers; equal numbers have other answers each time, or all numbers the
            same; or NaN in the source makes answers NaN.
    """
    rng = np.random.default_rng([seed, 5])
    sides = models.old, models.new
    drawn = [_drawn(side, rng) for side in sides]
    theirs, ours = (_asked(models, *each) for each in zip(sides, drawn, strict=True))
    require_alike(ours, theirs)
    for side, arrays, answers in zip(sides, drawn, (theirs, ours), strict=True):
        _require_floats(side, answers)
        _require_repeatable(models, side, arrays, answers, tolerance)
        _require_dependent(models, side, answers, rng)
    if not_finite(given):
        require_finite(given, models.called(models.old, given))


def _drawn(side: ModelSide, rng: np.random.Generator) -> Arrays:
    return {path: usual(shape, rng) for path, shape in side.shapes.items()}


def _asked(models: Models, side: ModelSide, arrays: Arrays) -> list[np.ndarray]:
    """Call a model with copies, because it may change what it is called with."""
    return models.called(side, {path: array.copy() for path, array in arrays.items()})


def _require_floats(side: ModelSide, answers: Sequence[np.ndarray]) -> None:
    kinds = [array.dtype.kind for array in answers]
    if all(kind in "iub" for kind in kinds):
        name = "booleans" if set(kinds) == {"b"} else "integers"
        raise MigrationError(
            f"{side.role}= answers with {name} only, in which small changes of numbers "
            "do not show: return what they are computed from, as the logits before an "
            "argmax."
        )


def _require_repeatable(
    models: Models,
    side: ModelSide,
    arrays: Arrays,
    answers: Sequence[np.ndarray],
    tolerance: float,
) -> None:
    difference = _apart(_asked(models, side, arrays), answers)
    if difference > tolerance:
        raise MigrationError(
            f"{side.role}= answers differently when it is called again with the same "
            f"numbers, by {difference:.2g}: switch off what is random in it, as "
            "dropout (module.eval() in PyTorch, deterministic=True in Flax), and keep "
            "nothing from one call to the next."
        )


def _apart(again: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> float:
    """Return how far floats differ; integers may be the place of one of two equals."""
    pairs = [
        [np.nan_to_num(array) for array in pair]
        for pair in zip(again, answers, strict=False)
        if pair[0].shape == pair[1].shape and pair[0].dtype.kind in "fc"
    ]
    return apart(*zip(*pairs, strict=True)) if pairs else 0.0


def _require_dependent(
    models: Models,
    side: ModelSide,
    answers: Sequence[np.ndarray],
    rng: np.random.Generator,
) -> None:
    if not all(np.isfinite(array).all() for array in answers):
        return  # infinite for all numbers, maybe because they are too large
    for _ in range(_MOST_DRAWS):
        others = models.called(side, _drawn(side, rng))
        if not all(map(np.array_equal, others, answers)):
            return
    raise MigrationError(
        f"{side.role}= answers the same whatever numbers it is called with "
        f"({_MOST_DRAWS + 1} were tried): let it compute with the arrays of its "
        "argument, not with those that its module was made with."
    )


def not_finite(numbers: Mapping[str, Any]) -> list[str]:
    """Return the paths of arrays that hold NaN or infinite numbers."""
    return [path for path, array in numbers.items() if not np.isfinite(array).all()]


def require_finite(given: Mapping[str, Any], answers: Sequence[np.ndarray]) -> None:
    """Raise if answers hold NaN, and so do the numbers that were asked with.

    Infinite ones alone may be those of a mask, and NaN may be where no input leads.

    Raises:
        MigrationError: they do.
    """
    paths = not_finite(given)
    if paths and any(np.isnan(array).any() for array in answers):
        raise MigrationError(
            f"The source holds NaN or infinite numbers in {listing(paths)}, and the "
            "reference answers NaN to it: pass weights without them, or only their "
            "shapes, as jax.ShapeDtypeStruct."
        )
