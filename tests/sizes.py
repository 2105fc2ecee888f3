"""How large a run is: ``make test-full`` runs all tests at their full size."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")
U = TypeVar("U")

QUICK = settings.default.max_examples <= 25
FULL = settings.default.max_examples >= 2_000


def full(size: T, otherwise: T) -> T:
    """The size in ``make test-full``, and what is enough elsewhere."""
    return size if FULL else otherwise


def slow_but(quick: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """Rows as values of a test; those outside ``quick`` run in ``make test-slow``."""
    rows = list(rows)
    assert all(row in rows for row in quick)
    slow = pytest.mark.slow
    return [
        row
        if row in quick
        else pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=slow)
        for row in rows
    ]


def some(rows: Iterable[Any], step: int = 3) -> list[Any]:
    """Rows as values of a test: each ``step``-th; others run in ``make test-slow``."""
    rows = list(rows)
    return slow_but(rows[::step], rows)


def crossed(
    rows: Iterable[T], columns: Iterable[U], step: int = 2
) -> list[tuple[T, U]]:
    """Each row with each column in ``make test-full``, elsewhere with some of them.

    Elsewhere a row meets each ``step``-th column, and the next row those next to them,
    so every row and every column is in some pair. A quick run takes half of those.
    """
    rows, columns = list(rows), list(columns)
    step = full(1, min(2 * step if QUICK else step, len(columns)))
    return [
        (row, column)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
        if (i + j) % step == 0
    ]


def grid(rows: Iterable[Any], columns: Iterable[Any], step: int = 2) -> list[Any]:
    """Each row with each column; all but those of ``crossed`` in ``make test-slow``."""
    rows, columns = list(rows), list(columns)
    return slow_but(crossed(rows, columns, step), itertools.product(rows, columns))
