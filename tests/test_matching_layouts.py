"""``match_models`` over experts, groups of heads and gates of one leaf.

Where the answers do not tell parts apart, it is said, and only there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from matched import Pair, arrays, silent
from matched_layouts import experts, gated, grouped

import treeadapt as ta
from treeadapt.porting.matching.cuts import cuts, why_uneven


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


X = np.random.default_rng(2).normal(size=(7, 8)).astype("f4")


def joined(new: dict[str, tuple[int, ...]], kernel: Any, order: Any) -> Pair:
    """A map, a kernel over each row, and a skip; the new layout is a function's."""
    old = {"conv.weight": (8, 1, 3), "mid.weight": (5, 8), "fc.weight": (4, 13)}

    def run(taps: Any, mid: Any, last: Any) -> Any:
        y = sum(np.roll(X, n, 0) * taps[n] for n in range(3))
        return np.concatenate([y, np.tanh(y @ mid)], 1) @ last

    def reference(p: Any) -> Any:
        taps = p["conv.weight"][:, 0].T
        return run(taps, p["mid.weight"].T, p["fc.weight"].T)

    def model(p: Any) -> Any:
        return run(kernel(p["kernel"]), p["mid"], order(p["last"]))

    target = {name: jax.ShapeDtypeStruct(shape, "f4") for name, shape in new.items()}
    return Pair("joined", arrays(old), target, model, reference)


OTHERWISE = {"kernel": (3, 8), "mid": (8, 5), "last": (13, 4)}


def take_of(found: ta.ModelMatch, name: str) -> dict[str, Any]:
    """The options of the row that makes a leaf."""
    (row,) = (row for row in found.migration.rows if name in str(row.typed()[1]))
    return row.typed()[1][1]


@pytest.mark.slow
def test_kernels_may_run_backwards():
    pair = joined(OTHERWISE, lambda kernel: kernel[::-1], lambda last: last)
    found = pair.match()
    assert_right(pair, found)
    assert take_of(found, "kernel")["take"] == {"i": "::-1"}
    assert take_of(found, "kernel")["check"] == "order"


@pytest.mark.slow
def test_what_is_joined_may_be_joined_the_other_way_round():
    def order(last: Any) -> Any:
        return np.concatenate([last[5:], last[:5]])

    pair = joined(OTHERWISE, lambda kernel: kernel, order)
    found = pair.match()
    assert_right(pair, found)
    assert take_of(found, "last")["check"] == "order"  # of another size it is another
    both = joined(OTHERWISE, lambda kernel: kernel[::-1], order)
    assert_right(both, both.match())


@pytest.mark.parametrize("names", [("b_ih", "b_hh"), ("b1", "b2")])
def test_two_biases_of_the_source_may_be_one(names):
    source = arrays({"w": (5, 8), names[0]: (5,), names[1]: (5,)})
    target = {
        "kernel": jax.ShapeDtypeStruct((8, 5), "f4"),
        "bias": jax.ShapeDtypeStruct((5,), "f4"),
    }

    def reference(p: Any) -> Any:
        return np.tanh(X @ p["w"].T + p[names[0]] + p[names[1]])

    def model(p: Any) -> Any:
        return np.tanh(X @ p["kernel"] + p["bias"])

    pair = Pair("two biases", source, target, model, reference)
    assert_right(pair, pair.match())
    differing = dataclasses.replace(
        pair, reference=lambda p: reference({**p, names[1]: 2 * p[names[1]]})
    )
    assert not differing.match().found


@pytest.mark.slow
def test_maps_that_both_sides_fuse_otherwise_are_cut():
    """Mamba: both halves of one map, and three of another of the same shape."""
    inner, width, rank, states = 10, 8, 2, 3
    source = {
        "in": (2 * inner, width),
        "out": (width, inner),
        "x": (rank + 2 * states, inner),
        "dt": (inner, rank),
        "log": (inner, states),
    }
    target = {
        **dict.fromkeys(("in_x", "in_z"), (width, inner)),
        "out": (inner, width),
        "down": (inner, rank),
        **dict.fromkeys("bc", (inner, states)),
        "up": (rank, inner),
        "log": (states, inner),
    }
    sides = (
        {f"{n}/{name}": shape for n in (0, 1) for name, shape in leaves.items()}
        for leaves in (source, target)
    )
    olds, news = next(cuts(*sides))
    assert len(olds) == len(news) == 2 * len(target)


def test_that_no_cut_fits_is_said_of_those_that_were_tried():
    text = why_uneven({"a": (3, 4)}, {"b": (2, 6)})
    assert "no cut that was tried makes them even" in text
    assert "of more parts" in text
