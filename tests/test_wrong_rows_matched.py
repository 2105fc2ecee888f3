"""``find_wrong_rows`` where edits do not mend a table: the models are matched."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import treeadapt as ta

WIDTH = 6
X = np.random.default_rng(9).normal(size=(4, WIDTH)).astype("f4")
SQUARE = np.empty((WIDTH, WIDTH), "f4")
TARGET = {**dict.fromkeys("abcd", SQUARE), "norm": SQUARE[0]}


@pytest.fixture(autouse=True)
def broadcasting():
    """Let the models broadcast, as people write them."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {f"{name}.w": rng.normal(size=SQUARE.shape) for name in "abcd"}
    return {
        path: array.astype("f4")
        for path, array in {**arrays, "norm": np.exp(rng.normal(size=WIDTH))}.items()
    }


def model(p: Any, epsilon: float = 1e-6) -> Any:
    y = np.tanh(X @ p["a"]) @ p["b"]
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + epsilon) * (1 + p["norm"])
    return np.tanh(y @ p["c"]) @ p["d"]


def reference(w: Any, **options: Any) -> Any:
    params = {name: w[f"{name}.w"].T for name in "abcd"}
    return model({**params, "norm": w["norm"] - 1}, **options)


#: Three maps in a ring, which no exchange of two mends, and a norm without its one.
RING = {
    "a.w : o i": "b : o i",
    "b.w : o i": "c : i o",
    "c.w : o i": "a : o i",
    "d.w : o i": "d : i o",
    "norm": "norm",
}
TURNED = {f"{name}.w : o i": f"{name} : i o" for name in "abcd"}
RIGHT = {**TURNED, "norm": ("norm", {"offset": -1.0})}


def find(table: Any, answers: Any = reference, **options: Any) -> ta.WrongRows:
    migration = table if isinstance(table, ta.Migration) else ta.Migration(table)
    return ta.find_wrong_rows(migration, weights(), TARGET, model, answers, **options)


def assert_right(report: ta.WrongRows) -> None:
    assert report.migration is not None, report
    other = weights(5)
    made = report.migration(other, TARGET)
    np.testing.assert_allclose(model(made), reference(other), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_rows_that_no_edits_mend_are_found_by_matching() -> None:
    report = find(RING)
    assert report.found
    assert report.found_by == "matching"
    assert_right(report)
    ring, norm = report.changes
    assert ring.rows == tuple(f"{row!r}: {new!r}" for row, new in [*RING.items()][:3])
    assert norm.alternatives == ("'norm': ('norm', {'offset': -1.0})",)
    assert ring.why == "what both models answer, which were matched"
    assert 0 < report.matching_evaluations < 150 < report.evaluations
    text = str(report)
    assert "Found by matching the models." in text
    assert f"{report.matching_evaluations} of them to match the models" in text


@pytest.mark.slow
def test_rows_that_are_right_stay_as_they_are_written() -> None:
    table = {**RING, "d.w : first second": "d : second first"}
    del table["d.w : o i"]
    report = find(table, depth=0)
    assert report.found_by == "matching"
    texts = [row.text for row in report.migration.rows]
    assert "d.w : first second" in texts


def test_edits_come_first_and_are_said_to_have_mended() -> None:
    report = find({**RIGHT, "a.w : o i": "a : o i"})
    assert report.found_by == "edits"
    assert report.matching_evaluations == 0
    assert "matching" not in str(report)
    assert find(RIGHT).found_by == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["b", "norm"])
def test_matching_alone_names_the_one_row_that_is_wrong(name: str) -> None:
    wrong = {"b": {"b.w : o i": "b : o i"}, "norm": {"norm": "norm"}}[name]
    report = find({**RIGHT, **wrong}, depth=0)
    ((source, target),) = wrong.items()
    (change,) = report.changes
    assert report.found_by == "matching"
    assert change.rows == (f"{source!r}: {target!r}",)
    assert report.migration == ta.Migration(RIGHT)


@pytest.mark.slow
def test_models_that_differ_elsewhere_give_no_table_and_are_said_to() -> None:
    report = find(RING, lambda w: reference(w, epsilon=1e-2), depth=1)
    assert not report.found
    assert report.migration is None
    assert report.found_by == ""
    assert report.matching_evaluations > 0
    assert report.ranked
    assert "the models were matched, too" in str(report)


@pytest.mark.slow
def test_answers_alone_and_chains_are_not_matched() -> None:
    report = find(RING, reference(weights()), depth=1)
    assert not report.found
    assert (report.matching_evaluations, report.why) == (0, ())
    same = ta.Migration({path: path for path in weights()})
    report = find(same.then(ta.Migration(RING)), depth=1)
    assert not report.found
    assert report.matching_evaluations == 0
    assert "of a chain" in report.why[0]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [6, 40, 70, 80, 90])
def test_the_limit_holds_for_both_searches_together(limit: int) -> None:
    report = find(RING, limit=limit, depth=0)
    assert report.evaluations <= limit + 3  # what is found is described
    assert report.found or "limit" in report.why[-1]


@pytest.mark.slow
def test_a_head_that_is_a_copy_of_the_embedding_takes_its_row() -> None:
    rng = np.random.default_rng(0)
    source = {
        "embed": rng.normal(size=(7, 5)).astype("f4"),
        "head": rng.normal(size=(7, 5)).astype("f4"),
        "w": rng.normal(size=(5, 5)).astype("f4"),
    }
    target = {"embed": source["embed"], "out": source["embed"].T, "w": source["w"]}
    table = ta.Migration(
        {"embed": "embed", "head : v m": "out : m v", "w : o i": "w : o i"}
    )

    def new(p: Any) -> Any:
        return np.tanh(p["embed"] @ p["w"]) @ p["out"]

    def old(w: Any) -> Any:
        return np.tanh(w["embed"] @ w["w"].T) @ w["embed"].T

    report = ta.find_wrong_rows(table, source, target, new, old, depth=0)
    assert report.found_by == "matching", report
    made = report.migration(source, target)
    np.testing.assert_array_equal(made["out"], source["embed"].T)
    tie, turned = sorted(report.changes, key=lambda change: -len(change.rows))
    assert {*tie.rows} == {"'embed': 'embed'", "'head : v m': 'out : m v'"}
    assert turned.rows == ("'w : o i': 'w : o i'",)


def test_a_leaf_that_was_dropped_fills_one_that_was_new() -> None:
    rng = np.random.default_rng(0)
    source = {n: rng.normal(size=(5, 5)).astype("f4") for n in ("a", "b", "unused")}
    target = {"a": source["a"], "b": source["b"]}
    table = ta.Migration({"a : o i": "a : i o", "*": None}, new={"b": "zeros"})

    def new(p: Any) -> Any:
        return np.tanh(X[:, :5] @ p["a"]) @ p["b"]

    def old(w: Any) -> Any:
        return np.tanh(X[:, :5] @ w["a"].T) @ w["b"].T

    report = ta.find_wrong_rows(table, source, target, new, old, depth=0)
    assert report.found_by == "matching", report
    assert report.changes[0].rows == ("'*': None",)
    assert report.changes[0].alternatives == ("'b : o i': 'b : i o'", "'*': None")


@pytest.mark.slow
def test_leaves_of_one_row_are_mended_in_one_row() -> None:
    """Two layers are exchanged in a row that makes two stacks of them."""
    rng = np.random.default_rng(0)
    source = {
        f"{n}.{name}": rng.normal(size=(5, 5)).astype("f4")
        for n in range(3)
        for name in "qk"
    }
    target = {name: np.empty((3, 5, 5), "f4") for name in "qk"}
    rows = {"{l=1,0,2}.{p=q,k} : o i": "{p} : l i o"}

    def run(layers: Any) -> Any:
        y = X[:, :5]
        for q, k in layers:
            y = np.tanh(y @ q) @ k
        return y

    report = ta.find_wrong_rows(
        ta.Migration(rows),
        source,
        target,
        lambda p: run(zip(p["q"], p["k"], strict=True)),
        lambda w: run((w[f"{n}.q"].T, w[f"{n}.k"].T) for n in range(3)),
        depth=0,
    )
    (change,) = report.changes
    assert change.alternatives == ("'{n}.{p=k,q} : o i': '{p} : n i o'",)
