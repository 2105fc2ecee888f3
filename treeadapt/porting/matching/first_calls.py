"""Whether two models can be matched at all: what a few calls of each say.

Takes both models and the numbers of the source; raises with the cause where no search
could find a table, or says which one answers NaN. Whether the models are alike is left
to the search.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.porting.matching.judge import SMALL
from treeadapt.porting.matching.sides import Arrays, Models, ModelSide, usual
from treeadapt.porting.measure import apart, require_alike
from treeadapt.text.names import listing, shorten

#: What a model answers.
Answers: TypeAlias = Sequence[np.ndarray]

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


def first_answers(
    models: Models, given: Mapping[str, Any], tolerance: float, seed: int
) -> tuple[Answers, Answers]:
    """Return what the old and the new model answer to random numbers.

    Args:
        models: both models, each of which is called at most eight times.
        given: numbers of the source, if there are any.
        tolerance: largest difference that is rounding.
        seed: of the numbers that the models are asked with.

    Raises:
        MigrationError: no search could find a table, because the shapes of answers
            differ; all answers of a model are integers; equal numbers have other
            answers each time, or all numbers the same; or NaN in the source makes
            answers NaN.
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
    return theirs, ours


def never_numbers(models: Models, first: tuple[Answers, Answers], seed: int) -> str:
    """Say which model answers NaN, or alone infinite numbers, to all numbers.

    Empty if neither does. No table is right then, because NaN never matches. What may
    be a variance is positive in some of the numbers, and all are small in others.

    Args:
        models: both models, called twice each if ``first`` is not finite.
        first: what they answered to random numbers.
        seed: of other ones.
    """
    if all(map(_are_comparable, *first)):
        return ""
    rng = np.random.default_rng([seed, 7])
    every = []
    for side, answers in zip((models.old, models.new), first, strict=True):
        drawn = {path: np.abs(array) for path, array in _drawn(side, rng).items()}
        small = {path: (SMALL * array).astype("f4") for path, array in drawn.items()}
        asked = (_asked(models, side, arrays) for arrays in (drawn, small))
        every.append([*zip(answers, *asked, strict=True)])
    old, new = every
    return said_of_strange(
        "of usual size, and of a 20th of it,",
        [_always_strange(one, two) for one, two in zip(old, new, strict=True)],
        [_always_strange(two, one) for one, two in zip(old, new, strict=True)],
    )


def _are_comparable(one: np.ndarray, two: np.ndarray) -> bool:
    is_nan = np.isnan(one).any() or np.isnan(two).any()
    return not is_nan and np.array_equal(np.isinf(one), np.isinf(two))


def _always_strange(own: Answers, other: Answers) -> np.ndarray:
    """Return NaN or infinity where some answers always are, the rest as zeros."""
    is_infinite = np.isinf(own).all(0) & ~np.isinf(other).any(0)
    return np.select([np.isnan(own).all(0), is_infinite], [np.nan, np.inf], 0.0)


def said_of_strange(what: str, old: Answers, new: Answers) -> str:
    """Say which model answers NaN or infinite numbers; empty if neither does.

    Args:
        what: what the numbers are like that they were asked with.
        old: answers of the old model.
        new: of the new one.
    """
    texts = [*filter(None, (_strange("reference", old), _strange("model", new)))]
    if not texts:
        return ""
    return (
        f"to random numbers {what} {' and '.join(texts)}, and no table changes that: "
        "look for a division by zero, a root or logarithm of what is negative, or a "
        "row that a mask hides as a whole"
    )


def _strange(role: str, answers: Answers) -> str:
    """Say how many entries of answers are NaN or infinite, and which is the first."""
    for kind, test in (("NaN", np.isnan), ("infinite numbers", np.isinf)):
        for number, array in enumerate(answers):
            places = np.argwhere(test(array))
            if len(places):
                first = tuple(int(n) for n in places[0])
                where = f", first at {first}" * bool(first)
                which = f" of answer {number}" * (len(answers) > 1)
                count = f"{len(places)} of {array.size} entries{which}{where}"
                return f"{role}= answers {kind} ({count})"
    return ""


def _drawn(side: ModelSide, rng: np.random.Generator) -> Arrays:
    return {path: usual(shape, rng) for path, shape in side.shapes.items()}


def _asked(models: Models, side: ModelSide, arrays: Arrays) -> list[np.ndarray]:
    """Call a model with copies, because it may change what it is called with."""
    return models.called(side, {path: array.copy() for path, array in arrays.items()})


def _require_floats(side: ModelSide, answers: Answers) -> None:
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
    answers: Answers,
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


def _apart(again: Sequence[np.ndarray], answers: Answers) -> float:
    """Return how far floats differ; integers may be the place of one of two equals."""
    pairs = [
        [np.nan_to_num(array) for array in pair]
        for pair in zip(again, answers, strict=False)
        if pair[0].shape == pair[1].shape and pair[0].dtype.kind in "fc"
    ]
    return apart(*zip(*pairs, strict=True)) if pairs else 0.0


def _require_dependent(
    models: Models, side: ModelSide, answers: Answers, rng: np.random.Generator
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


def require_finite(given: Mapping[str, Any], answers: Answers) -> None:
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
