"""Parts of an array that a function multiplies: as queries, and not keys and values.

Takes sides of which leaves of the target have no row; gives sides with the numbers of
the source in place of their products. A last table multiplies them. What is multiplied
by how much is seen with numbers so far apart that no product is near another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.porting.drafts.called_function import Conversion
from treeadapt.porting.drafts.nearer_sides import NearerSides
from treeadapt.porting.drafts.numbers import exact_factor
from treeadapt.porting.drafts.sums import with_table_below

_MOST_NUMBERS = 2**16
_PLACES = 2**20  # from 1 to 2, which float32 tells apart, multiplied too
_TRIED = 8  # numbers of a leaf, of which each has to be a multiple
_NEAR = 2.0**-22


def with_scaled_parts(
    between: NearerSides,
    conversion: Conversion,
    sources: Sequence[str],
    targets: Sequence[str],
) -> Iterator[NearerSides]:
    """Yield the sides with numbers of the source in place of multiples of them.

    Args:
        between: the sides.
        conversion: the function.
        sources: leaves that it reads, and that have no row.
        targets: leaves that it makes, and that have no row.
    """
    leaves = between.calls[0][0].leaves
    sources = [path for path in sources if leaves[path].dtype == np.float32]
    ends = np.cumsum([leaves[path].size for path in sources])
    if not sources or ends[-1] > _MOST_NUMBERS:
        return
    apart = _far_apart(int(ends[-1]))
    numbers = {
        between.own(0, path): part.reshape(leaves[path].shape).copy()
        for path, part in zip(sources, np.split(apart, ends[:-1]), strict=True)
    }
    try:
        made = conversion.with_numbers(0, numbers)
    except MigrationError:
        return
    factors: dict[str, float] = {}
    parts: list[dict[str, dict[int, np.ndarray]]] = [{} for _ in between.calls]
    for path in targets:
        name = between.own(1, path)
        products = made.array(name) if name in made.leaves else np.zeros(0)
        found = _origins(products, apart) if products.dtype == "f4" else None
        if found is None:
            continue
        near, places = found
        pairs = []
        for own, (source, target) in zip(parts, between.calls, strict=True):
            every = [source.array(each).reshape(-1) for each in sources]
            array = np.concatenate(every)[places].reshape(products.shape)
            own[path] = {0: array}
            pairs.append((array, target.array(path)))
        factor = exact_factor(near, pairs)
        if all(np.allclose(a * factor, b, rtol=1e-6, atol=0) for a, b in pairs):
            factors[path] = factor
    if factors:
        one = dict.fromkeys(factors, (0,))
        yield with_table_below(between, one, parts, factors)[0]


def _far_apart(count: int) -> np.ndarray:
    """Return numbers from 1 to 2, in order, whose multiples are not near each other.

    They are not evenly apart, so that no other factor gives the same multiples.
    """
    places = np.random.default_rng(0).choice(_PLACES, count, replace=False)
    return (1 + np.sort(places) / _PLACES).astype("f4")


def _origins(products: np.ndarray, numbers: np.ndarray) -> tuple[float, Any] | None:
    """Return by what numbers are multiplied, and which these are; None if by nothing.

    Args:
        products: an array.
        numbers: in order.
    """
    y = products.reshape(-1).astype(np.float64)
    x = numbers.astype(np.float64)
    if not y.size or not y.all():
        return None

    def nearest(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.searchsorted(x, wanted * (1 - _NEAR)).clip(max=len(x) - 1)
        return at, abs(x[at] / wanted - 1) < _NEAR

    factors = y[0] / x
    for tried in y[np.linspace(0, y.size - 1, _TRIED).astype(int)]:
        factors = factors[nearest(tried / factors)[1]]
    for factor in factors[:_TRIED]:
        at, is_near = nearest(y / factor)
        if is_near.all() and len(np.unique(at)) == y.size and abs(factor - 1) > _NEAR:
            return float(f"{factor:.7g}"), at
    return None
