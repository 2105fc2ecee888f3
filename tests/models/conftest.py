"""Models of other libraries promote ranks and dtypes as JAX does by default."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

pytest.register_assert_rewrite("laws")


@pytest.fixture(autouse=True, scope="package")
def promotion() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
