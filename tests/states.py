"""States of optimizers, compared by the paths of their leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

import treeadapt as ta


def assert_equal(one: Any, two: Any) -> None:
    """Compare two trees leaf by leaf, in dtype and value; the order does not matter."""
    one, two = ta.to_flat_dict(one), ta.to_flat_dict(two)
    assert sorted(one) == sorted(two)
    for path in one:
        assert one[path].dtype == two[path].dtype, path
        assert np.array_equal(one[path], two[path]), path
