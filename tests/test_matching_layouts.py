"""``match_models`` over experts, groups of heads and gates of one leaf.

Where the answers do not tell parts apart, it is said, and only there.
"""

from __future__ import annotations

import jax
import pytest
from matched import Pair, arrays, silent
from matched_layouts import experts, gated, grouped

import treeadapt as ta


@pytest.fixture(autouse=True)
def broadcasting():
    """Let the models broadcast, as people write them."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def assert_right(pair: Pair, found: ta.ModelMatch) -> None:
    """The table answers right on fresh numbers."""
    assert found.found, found
    fresh = arrays({path: x.shape for path, x in pair.source.items()}, seed=8)
    assert pair.after(found.migration, fresh) < 1e-4


@pytest.mark.slow
def test_experts_with_gate_and_up_in_one_stack_are_found():
    pair = experts()
    found = pair.match()
    assert_right(pair, found)
    assert found.verdict == "proved"
    assert found.evaluations < 150


@pytest.mark.slow
def test_experts_are_found_without_names():
    pair = silent(experts())
    assert_right(pair, pair.match())


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [3, 2])
def test_experts_that_no_token_reaches_follow_the_others_and_are_unseen(chosen):
    pair = experts(chosen=chosen)
    found = pair.match()
    assert_right(pair, found)
    assert found.verdict == "proved but for unseen"
    share = pytest.approx(1 - chosen / 4)
    assert found.unseen == {
        f"block_{n}/{name}": share for n in (0, 1) for name in ("in", "out")
    }
    everywhere = experts()  # the same table, proved with a router that reaches all
    assert_right(everywhere, found)
    marks = [row.notes.check for row in found.migration.rows if "experts" in row.text]
    assert marks
    assert all("names" in mark for mark in marks)


@pytest.mark.slow
def test_queries_keys_and_values_fused_by_groups_are_found():
    pair = grouped()
    assert_right(pair, pair.match())


@pytest.mark.slow
def test_groups_are_found_without_names():
    pair = silent(grouped())
    assert_right(pair, pair.match())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["rzn", "zrn", "nzr"])
def test_gates_that_add_up_follow_the_one_that_does_not(order):
    """Both biases of r and z are added, those of n are not: they tell leaves apart."""
    pair = gated(order)
    found = pair.match(limit=1_000)
    assert found.undecided == ()
    assert found.after < 1e-4
    assert_right(pair, found)
