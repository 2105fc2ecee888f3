"""``match_models``: from two models to the table between them.

Takes both trees and both functions; gives a ``ModelMatch``. Nothing is claimed that was
not seen to answer right on numbers that the search did not use.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.migration import Migration
from treeadapt.porting.drafts.draft import draft_migration
from treeadapt.porting.matching.another_size import Resized, resized, told
from treeadapt.porting.matching.first_calls import (
    first_answers,
    never_numbers,
    require_finite,
    require_trees,
)
from treeadapt.porting.matching.judge import USUAL_TOLERANCE, unseen
from treeadapt.porting.matching.model_match import ModelMatch
from treeadapt.porting.matching.search import Found, Search
from treeadapt.porting.matching.sides import LimitError, Models, ModelSide, usual
from treeadapt.porting.matching.tables import (
    SIZES,
    table_of,
    undecided,
    with_rows,
    without_check,
)
from treeadapt.porting.measure import answers_of
from treeadapt.porting.wrong_rows.find import find_wrong_rows
from treeadapt.text.names import fold, listing
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe
from treeadapt.trees.state_dict import to_flat_dict

_LEAST = 16  # evaluations, without which nothing can be said


def match_models(
    source: Any,
    target: Any,
    model: Callable[[Any], Any],
    reference: Any,
    *,
    more: tuple[Any, Any, Callable[[Any], Any], Callable[[Any], Any]] | None = None,
    tolerance: float = USUAL_TOLERANCE,
    limit: int = 20_000,
    seed: int = 0,
) -> ModelMatch:
    """Find the table that turns the arrays of one model into those of another.

    Neither names nor numbers need be alike: only both functions are asked, with numbers
    of the search's own. Use tiny models whose sizes are unlike each other, with two
    layers or more, in float32, without dropout, and inputs that reach every token,
    position and expert. The table then serves the large ones.

    Args:
        source: tree or flat dict of the old model's arrays; names, shapes and dtypes
            are used, integers are passed on as they are.
        target: tree that the new model takes; shapes and dtypes are enough.
        model: called with a tree like ``target``; returns an array or a list of arrays.
            Let it be compiled by ``jax.jit``.
        reference: the old model: a function that is called with a flat dict of arrays
            of NumPy under the old names and answers like ``model``. Given its answers
            to ``source`` instead, the table is drafted from names, and
            ``find_wrong_rows`` mends it.
        more: source, target, model and reference of another size, at which the table
            must answer right too. Without them, sizes that the table states keep a
            mark, ``check = "sizes"``. If it is right there with other sizes alone, or
            another root of a size as a factor, the marks stay, and ``why`` says which.
        tolerance: largest difference that is rounding, as for ``find_wrong_rows``. Up
            to 1e-4 a difference above 1e-5 must also be within 100 times of what
            rounding the numbers in their last bit changes.
        limit: of calls of both models.
        seed: of the numbers that the models are asked with.

    Returns:
        The table, if one was found, and what it rests on.

    Raises:
        MigrationError: what is passed is not a function; a side has no arrays, or is a
            path; the answers have other shapes, are integers only, are others each
            time or the same always; or they hold NaN, as the source does.

    Example:
        >>> random = np.random.default_rng(0)
        >>> old = {"w": np.zeros((3, 5)), "b": np.zeros(3)}
        >>> new = {"kernel": np.zeros((5, 3)), "bias": np.zeros(3)}
        >>> x = random.normal(size=(4, 5)).astype("float32")
        >>> match = match_models(
        ...     old,
        ...     new,
        ...     lambda p: jnp.tanh(x @ p["kernel"] + p["bias"]),
        ...     lambda p: np.tanh(x @ p["w"].T + p["b"]),
        ... )
        >>> match.migration
        Migration({'b': 'bias', 'w : o i': 'kernel : i o'})
    """
    if not callable(model):
        raise MigrationError(
            "match_models expects a function of params as model, got "
            f"{describe(model)}."
        )
    require_trees(source=source, target=target)
    if not callable(reference):
        return _from_answers(source, target, model, reference, tolerance, limit, seed)
    models = _models(source, target, model, reference, max(limit, _LEAST))
    given = _numbers(source)
    first = first_answers(models, given, tolerance, seed)
    strange = never_numbers(models, first, seed)
    if strange:
        return _nothing(strange, models.evaluations)
    search = Search(models, given, tolerance, seed)
    match = _result(search, source, target, model)
    if more is None or match.migration is None:
        return match
    other, table = _models(*more, max(limit, _LEAST)), match.migration
    numbers = _numbers(more[0])
    there = resized(table, models, other, numbers, tolerance=tolerance, seed=seed)
    evaluations = match.evaluations + other.evaluations
    return dataclasses.replace(_with_more(match, there, table), evaluations=evaluations)


def _nothing(why: str, evaluations: int) -> ModelMatch:
    """Return a match without a table, because no search could find one."""
    return ModelMatch(
        found=False,
        migration=None,
        after=math.inf,
        unseen={},
        undecided=(),
        unused=(),
        kept=(),
        why=(why,),
        nearest=None,
        evaluations=evaluations,
    )


def _models(
    source: Any,
    target: Any,
    model: Callable[[Any], Any],
    reference: Callable[[Any], Any],
    limit: int,
) -> Models:
    """Return both models, with numbers for what is abstract and does not change."""
    flat = {path: _as_numpy(leaf) for path, leaf in to_flat_dict(source).items()}
    old = ModelSide(flat, reference, role="reference")
    new = ModelSide(target, model, role="model")
    for side in (old, new):
        side.fixed = {path: _concrete(leaf) for path, leaf in side.fixed.items()}
    return Models(old, new, limit)


def _as_numpy(leaf: Any) -> Any:
    is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    return leaf if is_abstract or not isinstance(leaf, jax.Array) else np.asarray(leaf)


def _concrete(leaf: Any) -> Any:
    """Return zeros, or a random key, in the place of a leaf that is only a shape."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key = jax.random.key(0)
        return jax.random.split(key, leaf.shape) if leaf.shape else key
    return np.zeros(leaf.shape, leaf.dtype)


def _numbers(source: Any) -> dict[str, Any]:
    """Return the arrays of the source in float32; none if it is abstract."""
    leaves = to_flat_dict(source)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves.values()):
        return {}
    arrays = {path: leaf for path, leaf in leaves.items() if hasattr(leaf, "dtype")}
    return {
        path: np.asarray(jnp.asarray(leaf).astype("float32"))
        for path, leaf in arrays.items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def _result(
    search: Search, source: Any, target: Any, model: Callable[[Any], Any]
) -> ModelMatch:
    """Search, and write the table of what is found."""
    models, found = search.models, search.found()
    why = [] if found is not None else [*search.differences, *search.why]
    if found is None and search.nearest is None and not search.differences:
        why[:0] = search.dead_ends[-1:]
    cast = [*models.old.cast, *models.new.cast]
    if cast:
        names = listing(fold(cast), limit=4)
        why.append(f"cast up to float32, in which the models were asked: {names}")
    best = found or search.nearest
    table = None
    if best is not None:
        try:
            table = table_of(best, models, source)
        except MigrationError as error:
            why.append(f"all is paired, but no table says it: {error}")
    is_found = found is not None and table is not None
    shares: dict[str, float] = {}
    kept = search.kept
    if found is not None and table is not None:
        why += filter(None, [found.verdict.doubt()])
        shares = _unseen(search, found, target, model, why)
        kept = (
            *kept,
            *filter(lambda p: is_array(models.new.fixed[p]), models.new.fixed),
        )
        new = dict.fromkeys(kept, "target")
        if new and len(table.tables) == 1:
            table = with_rows(table, (row.typed() for row in table.rows), new)
    return ModelMatch(
        found=is_found,
        migration=table if is_found else None,
        after=best.verdict.largest if best is not None else math.inf,
        unseen=shares,
        undecided=undecided(best) if best is not None else (),
        unused=search.unused,
        kept=tuple(dict.fromkeys(kept)),
        why=tuple(why),
        nearest=table if found is None else None,
        evaluations=models.evaluations,
    )


def _unseen(
    search: Search,
    found: Found,
    target: Any,
    model: Callable[[Any], Any],
    why: list[str],
) -> dict[str, float]:
    """Return which numbers of the target influence no answer."""
    models, rng = search.models, np.random.default_rng([search.seed, 2])
    weights = {path: usual(shape, rng) for path, shape in models.old.shapes.items()}
    arrays = found.convert(models, {**models.old.fixed, **weights})
    try:
        return unseen(models, target, model, arrays)
    except LimitError:
        why.append("which numbers influence no answer was not looked at: see limit=")
        return {}


def _with_more(match: ModelMatch, there: Resized, table: Migration) -> ModelMatch:
    """Return what was found, and whether it is right at another size too."""
    after = max(match.after, there.verdict.largest)
    if there.problem:
        problem = f"the table is not that of the models in more=: {there.problem}"
        return dataclasses.replace(
            match,
            found=False,
            migration=None,
            nearest=table,
            after=after,
            why=(problem, *match.why),
        )
    if there.changes:
        return dataclasses.replace(match, after=after, why=(*match.why, told(there)))
    if len(table.tables) == 1:
        rows = (without_check(row, SIZES) for row in table.rows)
        table = with_rows(table, rows, table._new)
    return dataclasses.replace(match, migration=table, after=after)


def _from_answers(
    source: Any,
    target: Any,
    model: Callable[[Any], Any],
    answers: Any,
    tolerance: float,
    limit: int,
    seed: int,
) -> ModelMatch:
    """Draft a table from names, and mend it until it gives the answers."""
    require_finite(_numbers(source), answers_of(answers))
    why = "only answers were given: names drafted the table, find_wrong_rows mended it"
    draft = draft_migration(source, target)
    table: Migration | None = draft.migration
    after, evaluations, is_found = math.inf, 0, False
    try:
        report = find_wrong_rows(
            draft.migration,
            source,
            target,
            model,
            answers,
            tolerance=tolerance,
            limit=limit,
            seed=seed,
        )
        is_found, table, after = report.found, report.migration, report.after
        evaluations, whys = report.evaluations, [why]
        if report.unseen:
            whys.append(f"not seen in answers alone: {listing(report.unseen)}")
    except MigrationError as error:
        whys = [why, f"the draft does not fit: {error}"]
    return ModelMatch(
        found=is_found,
        migration=table if is_found else None,
        after=after,
        unseen={},
        undecided=(),
        unused=draft.unexpected,
        kept=draft.missing,
        why=tuple(whys),
        nearest=None,
        evaluations=evaluations,
    )
