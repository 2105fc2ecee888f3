"""Saved states whose named tuples became tuples, lists or dicts of numbers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeadapt as ta

# Optax itself promotes.
pytestmark = pytest.mark.usefixtures("standard_promotion")

OPTIMIZERS = {
    "adamw": optax.adamw(optax.linear_schedule(1e-2, 0.0, 10)),
    "rate in the state": optax.inject_hyperparams(optax.adam)(1e-2),
    "groups": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
    ),
    "accumulated": optax.MultiSteps(optax.adam(1e-2), 2),
    "ours": ta.partition({"a": optax.adam(1e-2)}, {"w": "a", "b": "frozen"}),
}


def params() -> dict[str, Any]:
    return {"b": jnp.ones(2, jnp.float32), "w": jnp.arange(3.0, dtype=jnp.float32)}


def aged(tx: Any, steps: int = 3) -> Any:
    tree = params()
    state = tx.init(tree)
    for _ in range(steps):
        grads = jax.tree.map(lambda leaf: leaf * 0.1 + 0.2, tree)
        _, state = tx.update(grads, state, tree)
    return state


def plain(node: Any, kind: Callable[[Any], Any]) -> Any:
    """Return what a store makes of a tree that knows no named tuples."""
    if isinstance(node, tuple | list):
        return kind([plain(child, kind) for child in node])
    if isinstance(node, dict):
        return {str(name): plain(child, kind) for name, child in node.items()}
    return np.asarray(node) if eqx.is_array_like(node) else node


def numbered(items: list[Any]) -> dict[str, Any]:
    """Return groups as HDF5 has them, which keeps no empty ones."""
    return {str(place): x for place, x in enumerate(items) if jax.tree.leaves(x)}


def flat(state: Any) -> dict[str, Any]:
    return ta.to_flat_dict(plain(state, tuple))


STORES: dict[str, Callable[[Any], Any]] = {
    "tuples": lambda state: plain(state, tuple),
    "lists": lambda state: plain(state, list),
    "pickled": lambda state: pickle.loads(pickle.dumps(plain(state, tuple))),
    "numbered": lambda state: plain(state, numbered),
    "flat": flat,
}


def assert_equal(one: Any, two: Any) -> None:
    one, two = ta.to_flat_dict(one), ta.to_flat_dict(two)
    assert list(one) == list(two)
    for path in one:
        np.testing.assert_array_equal(one[path], two[path], err_msg=path)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("store", STORES)
def test_a_whole_state_is_read_by_position_with_a_warning(name, store):
    tx = OPTIMIZERS[name]
    state = aged(tx)
    saved = STORES[store](state)
    with pytest.warns(ta.TreeAdaptWarning, match="by position.*ScaleByAdamState"):
        new, report = ta.carry_state(tx, params(), saved)
    assert_equal(new, state)
    assert not report.fresh
    assert "ScaleByAdamState" in report.warnings[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("store", STORES)
def test_a_state_that_is_said_to_be_of_a_class_is_carried_in_silence(name, store):
    tx = OPTIMIZERS[name]
    state = aged(tx)
    target = jax.eval_shape(tx.init, params())
    convert = ta.from_flat_dict if store == "flat" else ta.from_state_dict
    named = convert(target, STORES[store](state))
    assert_equal(named, state)
    new, report = ta.carry_state(tx, params(), named)
    assert_equal(new, state)
    assert report.warnings == ()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_state_that_lacks_some_names_is_read_as_a_whole(place, kind):
    tx = optax.chain(optax.trace(0.9), optax.scale_by_adam())
    state = aged(tx)
    saved = tuple(plain(x, kind) if n == place else x for n, x in enumerate(state))
    with pytest.warns(ta.TreeAdaptWarning, match="some fields .* have no names"):
        new, report = ta.carry_state(tx, params(), saved)
    assert_equal(new, state)
    assert not report.fresh
    named = ta.from_state_dict(jax.eval_shape(tx.init, params()), saved)
    assert_equal(named, state)


def test_a_name_that_is_kept_is_never_read_by_position():
    # By position a momentum is an accumulator of squares.
    state = aged(optax.chain(optax.trace(0.9), optax.scale_by_adam()))
    saved = (state[0], plain(state[1], tuple))
    tx = optax.chain(optax.scale_by_rss(), optax.scale_by_adam())
    with pytest.raises(ta.StructureMismatchError, match="unexpected '0/trace"):
        ta.from_state_dict(jax.eval_shape(tx.init, params()), saved)
    with pytest.raises(ta.CheckpointError, match="no field's name"):
        ta.carry_state(tx, params(), saved)


def test_the_state_of_params_of_500_levels_is_carried():
    tree: Any = jnp.ones(2)
    for _ in range(500):
        tree = {"a": tree}
    tx = optax.adam(1e-2)
    saved = tx.init(tree)
    _, report = ta.carry_state(tx, tree, saved)
    assert not report.fresh
    assert_equal(ta.from_state_dict(saved, tuple(saved)), saved)


@pytest.mark.slow
def test_what_looks_alike_is_named():
    # As tuples, the accumulator of AdaGrad and a momentum are one.
    saved = plain(aged(optax.adagrad(1e-2)), tuple)
    with pytest.warns(ta.TreeAdaptWarning, match=r"as those of TraceState\."):
        ta.carry_state(optax.sgd(1e-2, momentum=0.9), params(), saved)
    was = jax.eval_shape(optax.adagrad(1e-2).init, params())
    named = ta.from_state_dict(was, saved)
    with pytest.warns(ta.TreeAdaptWarning, match="is of ScaleByRssState"):
        _, report = ta.carry_state(optax.sgd(1e-2, momentum=0.9), params(), named)
    assert report.carried == {}


UNLIKE = {
    "another optimizer": (optax.sgd(1e-2, momentum=0.9), params),
    "a longer chain": (optax.chain(optax.adam(1e-2), optax.adam(1e-2)), params),
    "an empty part more": (optax.chain(optax.identity(), optax.adam(1e-2)), params),
    "another dtype": (
        optax.adam(1e-2),
        lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params()),
    ),
    "another shape": (optax.adam(1e-2), lambda: params() | {"w": jnp.ones(4)}),
    "another name": (optax.adam(1e-2), lambda: {"b": jnp.ones(2), "v": jnp.ones(3)}),
}


@pytest.mark.parametrize("kind", UNLIKE)
@pytest.mark.parametrize("store", STORES)
def test_a_state_without_names_that_does_not_fit_as_a_whole_is_an_error(kind, store):
    tx, now = UNLIKE[kind]
    old_tx = optax.adam(1e-2)
    saved = STORES[store](aged(old_tx))
    with pytest.raises(ta.CheckpointError, match="no field's name") as caught:
        ta.carry_state(tx, now(), saved)
    # The cure, as it is printed.
    cure = str(caught.value).partition("saved = ")[2].partition(", with the")[0]
    names = {"old_tx": old_tx, "old_params": params(), "saved": saved}
    named = eval(cure, {"ta": ta, "jax": jax}, names)
    assert_equal(named, aged(old_tx))


def test_params_in_place_of_a_state_are_an_error():
    with pytest.raises(ta.CheckpointError, match=r"no field's name: 'b', 'w'"):
        ta.carry_state(optax.adam(1e-2), params(), params())


@pytest.mark.parametrize("form", ["own", "flat"])
def test_another_optimizer_on_purpose_is_a_warning_that_names_both(form):
    saved = aged(optax.sgd(1e-2, momentum=0.9))
    saved = ta.to_flat_dict(saved) if form == "flat" else saved
    before = "TraceState" if form == "own" else "an optimizer with the fields trace"
    words = rf"is of {before}.*the new one of ScaleByAdamState"
    with pytest.warns(ta.TreeAdaptWarning, match=words):
        state, report = ta.carry_state(optax.adam(1e-2), params(), saved)
    assert_equal(state, optax.adam(1e-2).init(params()))
    assert len(report.warnings) == 1


@pytest.mark.parametrize("saved", [{}, (), optax.sgd(1e-2).init({"w": 1.0}), [[], {}]])
def test_a_state_without_arrays_is_neither(saved):
    _, report = ta.carry_state(optax.adam(1e-2), params(), saved)
    assert report.warnings == ()


def test_nothing_to_fill_is_neither():
    saved = plain(aged(optax.adam(1e-2)), tuple)
    _, report = ta.carry_state(optax.sgd(1e-2), params(), saved)
    assert report.warnings == ()


def test_what_is_reset_as_asked_is_no_error():
    saved = plain(aged(optax.sgd(1e-2, momentum=0.9)), tuple)
    _, report = ta.carry_state(optax.adam(1e-2), params(), saved, reset="**")
    assert report.warnings == ()


def test_a_model_whose_class_has_fields_does_not_name_those_of_the_state():
    class Model(eqx.Module):
        w: jax.Array

    model = Model(jnp.ones(3))
    state = optax.adam(1e-2).init(model)
    saved = plain(state, tuple)  # the moments keep their class
    with pytest.warns(ta.TreeAdaptWarning, match="by position"):
        new, _ = ta.carry_state(optax.adam(1e-2), model, saved)
    assert_equal(new, state)
    with pytest.raises(ta.CheckpointError, match="no field's name"):
        ta.carry_state(optax.sgd(1e-2, momentum=0.9), model, saved)
