"""How large a run is: ``make test-full`` runs all tests at their full size."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")

FULL = settings.default.max_examples >= 2_000


def full(size: T, otherwise: T) -> T:
    """The size in ``make test-full``, and what is enough elsewhere."""
    return size if FULL else otherwise
