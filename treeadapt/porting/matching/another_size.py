"""Whether a table is that of models of another size, too.

Takes a table and both models of the other size; gives the table that answers right
there. Sizes that it states, and factors that are roots of a size, belong to one size of
the models, so others are tried in their place.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.migration import Migration
from treeadapt.porting.matching.judge import UNKNOWN, Verdict, judge
from treeadapt.porting.matching.sides import LimitError, Models
from treeadapt.text.names import listing

_MOST = 200  # tables that are tried
_POWERS = (0.5, -0.5)
_SAME = 1e-5  # a factor is to the root of a size


class Resized(NamedTuple):
    """A table at another size.

    Attributes:
        changes: what it has to state there, in place of what it states; none if it is
            right as it is.
        verdict: how far the answers are apart, as it is if nothing makes it right.
        problem: why it is not right there; empty if it is.
    """

    changes: tuple[str, ...]
    verdict: Verdict
    problem: str = ""


def resized(
    table: Migration,
    first: Models,
    models: Models,
    given: Mapping[str, Any],
    *,
    tolerance: float,
    seed: int,
) -> Resized:
    """Ask models of another size.

    Args:
        table: what was found between the first models.
        first: those models.
        models: those of the other size.
        given: numbers of their source, if there are any.
        tolerance: largest difference that is rounding.
        seed: of the numbers that they are asked with.
    """
    as_it_is = _asked(table, models, given, tolerance=tolerance, seed=seed)
    if not as_it_is.problem:
        return as_it_is
    lengths = sorted({n for n in _lengths(models) if n > 1})
    others = _others(table, frozenset(_lengths(first)), lengths)
    for changes, other in itertools.islice(others, _MOST):
        there = _asked(other, models, given, tolerance=tolerance, seed=seed)
        if not there.problem:
            return there._replace(changes=changes)
    return as_it_is


def _asked(
    table: Migration,
    models: Models,
    given: Mapping[str, Any],
    *,
    tolerance: float,
    seed: int,
) -> Resized:
    zeros = {path: np.zeros(x, "float32") for path, x in models.new.shapes.items()}
    convert = functools.partial(table, target={**models.new.fixed, **zeros})
    try:
        verdict = judge(models, given, convert, seed)
    except MigrationError as error:
        return Resized((), UNKNOWN, str(error))
    except LimitError:
        return Resized((), UNKNOWN, "the limit of evaluations is reached, see limit=")
    is_right = verdict.is_right(tolerance)
    return Resized((), verdict, "" if is_right else verdict.text(tolerance))


def _lengths(models: Models) -> Iterator[int]:
    """Yield the lengths of all axes."""
    for side in (models.old, models.new):
        yield from itertools.chain(*side.shapes.values())


def _others(
    table: Migration, first: frozenset[int], lengths: Iterable[int]
) -> Iterator[tuple[tuple[str, ...], Migration]]:
    """Yield tables that state other numbers, and which."""
    if len(table.tables) > 1:
        return
    divisors = sorted({d for n in lengths for d in range(2, n + 1) if n % d == 0})
    scales = dict.fromkeys(row.values.scale for row in table.rows)
    powers = {scale: power for scale in scales for power in _power_of(scale, first)}
    if not table.sizes and not powers:
        return
    every_size = itertools.product(divisors, repeat=len(table.sizes))
    every_root = itertools.product(
        *([(old, float(n) ** power) for n in lengths] for old, power in powers.items())
    )
    for numbers, pairs in itertools.product(every_size, every_root):
        sizes, roots = dict(zip(table.sizes, numbers, strict=True)), dict(pairs)
        rows = (_scaled(*row.typed(), roots) for row in table.rows)
        texts = [
            f"{name} = {size} in place of {table.sizes[name]}"
            for name, size in sizes.items()
            if size != table.sizes[name]
        ]
        texts += [
            f"scale {new:.4g} in place of {old:.4g}"
            for old, new in roots.items()
            if not math.isclose(old, new, rel_tol=_SAME)
        ]
        yield tuple(texts), Migration([*rows], sizes=sizes, new=table._new)


def _power_of(scale: Any, sizes: Iterable[int]) -> Iterator[float]:
    """Yield the power of a size that a factor is."""
    for n, power in itertools.product(sizes, _POWERS):
        if n > 1 and math.isclose(scale, n**power, rel_tol=_SAME):
            yield power
            return


def _scaled(source: Any, target: Any, roots: Mapping[float, float]) -> tuple[Any, Any]:
    """Return a row as typed with another factor, if it has one of some."""
    if not isinstance(target, tuple) or not isinstance(target[-1], dict):
        return source, target
    options = dict(target[-1])
    if options.get("scale") in roots:
        options["scale"] = roots[options["scale"]]
    return source, (*target[:-1], options)


def told(there: Resized) -> str:
    """Say what a table has to state at the other size."""
    numbers = listing(there.changes, write=str)
    return (
        f"with the models in more= the table is right with {numbers}: such numbers "
        "belong to one size of the models, so write those of yours"
    )
