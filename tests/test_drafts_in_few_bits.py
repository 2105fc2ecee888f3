"""Drafts of numbers in another order, of 16 bits: most of them are there several times.

NumPy's index is the oracle.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import treeadapt as ta

Leaves = dict[str, Any]


def numbers(shapes: dict[str, tuple[int, ...]], dtype: Any = jnp.bfloat16) -> Leaves:
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=s).astype(dtype) for path, s in shapes.items()}


def cells() -> Leaves:
    return {
        f"rnn.{k}_{name}_l{n}": (21, i)[: 1 + (k == "weight")]
        for n in range(2)
        for name, i in (("ih", 11), ("hh", 7))
        for k in ("weight", "bias")
    }


def with_gates_in_order(leaf: np.ndarray) -> np.ndarray:
    return leaf.reshape(3, 7, *leaf.shape[1:])[[1, 0, 2]].reshape(leaf.shape).T


def order(rows: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(rows)


ORDERS: dict[str, tuple[dict[str, tuple[int, ...]], Any]] = {
    "gates": (
        cells(),
        lambda w: {f"c/{p}": with_gates_in_order(a) for p, a in w.items()},
    ),
    "words": ({"embed": (64, 32)}, lambda w: {"e": w["embed"][order(64)]}),
    "more words": ({"embed": (600, 40)}, lambda w: {"e": w["embed"][order(600)].T}),
    "some words": ({"embed": (600, 40)}, lambda w: {"e": w["embed"][order(600)[:50]]}),
    "a flipped kernel": (
        {"conv": (13, 11, 3, 5)},
        lambda w: {"k": w["conv"][:, :, ::-1].transpose(2, 3, 1, 0)},
    ),
    "every second layer": (
        {f"h.{n}.w": (30, 20) for n in range(6)},
        lambda w: {f"x/{n}/w": w[f"h.{2 * n}.w"].T for n in range(3)},
    ),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_found_where_numbers_repeat(name, dtype):
    shapes, convert = ORDERS[name]
    source = numbers(shapes, dtype)
    target = convert(source)
    draft = ta.draft_migration(source, target)
    assert not draft.missing, draft.summary
    assert any(row.values.take for row in draft.migration.rows)
    made = draft.migration(source, target)
    assert not ta.tree_diff(made, target, values=True)
    same = ta.draft_migration(
        {path: leaf.astype("float32") for path, leaf in source.items()},
        {path: leaf.astype("float32") for path, leaf in target.items()},
    )
    assert same.migration == draft.migration
    wide = {path: leaf.astype("float32") for path, leaf in target.items()}
    cast = ta.draft_migration(source, wide)
    assert not cast.missing
    assert not ta.tree_diff(cast.migration(source, wide), wide, values=True)


def test_an_order_of_equal_rows_is_not_guessed():
    row = numbers({"row": (1, 40)})["row"]
    source = numbers({"up": (7, 5)}) | {"embed": np.repeat(row, 30, 0)}
    source["embed"][3] *= -1
    target = {"e": source["embed"][order(30)], "up": source["up"].T}
    draft = ta.draft_migration(source, target)
    assert draft.missing == ("e",)
    assert "both have the same numbers, in an order that no row" in draft.to_toml()
