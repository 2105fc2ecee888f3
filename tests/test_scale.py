"""``scale_by_rules``: a factor for each leaf, without groups and without state."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import bits, flat_params, flat_updates, program, put
from trees import TREES, LayerTuple, ModelTuple, mlp, two_layers

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

TRAINS = [row for row in TREES if row.paths and not row.opaque and not row.warns]


@pytest.mark.parametrize("row", TRAINS, ids=lambda row: row.name)
def test_every_tree_gets_the_numbers_of_optaxs_scale(row):
    tree = row.make()
    flat = flat_params(tree)
    updates, state = ta.scale_by_rules({"**": 0.1}).update(
        put(tree, flat), optax.EmptyState()
    )
    want, _ = optax.scale(0.1).update(flat, optax.EmptyState())
    got = {path: x for path, x in flat_updates(updates).items() if path in flat}
    assert bits(got) == bits(want)
    assert state == optax.EmptyState()


def test_the_first_rule_that_matches_gives_the_factor():
    model = two_layers(ModelTuple, LayerTuple)
    ones = jax.tree.map(jnp.ones_like, model)
    rules = {"**/b": 0, "hidden": jnp.float32(0.5), "**": np.float64(2)}
    tx = ta.scale_by_rules(rules)
    updates, _ = jax.jit(tx.update)(ones, tx.init(model))
    assert updates.hidden.w[0, 0] == 0.5
    assert (updates.out.w[0, 0], updates.out.b[0], updates.hidden.b[0]) == (2, 0, 0)


@pytest.mark.slow
def test_it_equals_a_group_for_each_factor():
    model = mlp()
    grads = eqx.filter(model, eqx.is_array)
    rates = {"layers/0": 0.5, "**": 2.0}
    chained = optax.chain(ta.adapt(optax.adam(0.25)), ta.scale_by_rules(rates))
    groups = ta.partition(
        {rate: optax.adam(0.25 * rate) for rate in rates.values()}, rates
    )
    ours, _ = chained.update(grads, chained.init(model), model)
    want, _ = groups.update(grads, groups.init(model), model)
    assert bits(ours) == bits(want)  # factors are powers of two


@pytest.mark.parametrize("factors", [[1.0, 10.0], (1, 10), np.array([1.0, 10.0])])
@pytest.mark.parametrize("made", [dict, ta.Rules])
def test_an_array_of_factors_runs_along_the_leading_axis(factors, made):
    stack = {"blocks": jnp.ones((2, 3, 4)), "head": jnp.ones(2)}
    tx = ta.scale_by_rules(made({"blocks": factors, "head": 1.0}))
    updates, _ = tx.update(stack, tx.init(stack))
    assert updates["blocks"][:, 0, 0].tolist() == [1, 10]
    assert updates["blocks"].shape == (2, 3, 4)


def test_rules_may_be_bound_and_read_classes():
    model = [mlp(), {"w": jnp.ones(2)}]
    rules = ta.Rules({eqx.nn.MLP: 0.0, "**": 1.0})
    for made in (rules, rules.bind(model)):
        tx = ta.scale_by_rules(made)
        ones = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_array))
        updates, _ = tx.update(ones, tx.init(model), model)
        moved = [path for path, x in flat_updates(updates).items() if x.any()]
        assert moved == ["1/w"]


@pytest.mark.slow
def test_dtypes_stay():
    tree = {"c": jnp.ones(2, jnp.complex64), "h": jnp.ones(2, jnp.bfloat16)}
    tx = ta.scale_by_rules({"c": 2j, "h": jnp.float32(0.1)})
    updates, _ = tx.update(tree, tx.init(tree))
    assert (updates["c"].dtype, updates["h"].dtype) == (jnp.complex64, jnp.bfloat16)
    assert updates["c"][0] == 2j


def test_the_program_has_one_product_a_leaf():
    model = mlp()
    params = ta.split(model)[0]
    tx = ta.scale_by_rules({"layers/0": 0.1, "**": 1.0})

    def update(flat):
        return flat_updates(tx.update(put(model, flat), optax.EmptyState())[0])

    text = program(update, params)
    assert text.count(" mul ") == len(params)


def test_a_factor_may_be_injected():
    factory = optax.inject_hyperparams(
        lambda low: ta.scale_by_rules({"a": low, "**": 1.0})
    )
    tx, ones = factory(0.5), {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = tx.init(ones)
    assert jax.jit(tx.update)(ones, state, ones)[0]["a"][0] == 0.5
    state.hyperparams["low"] = jnp.float32(0.25)
    assert tx.update(ones, state, ones)[0]["a"][0] == 0.25


def test_a_schedule_is_injected_as_the_error_says():
    factory = ta.inject_hyperparams(
        lambda rate: ta.scale_by_rules({"a": rate, "**": 1.0})
    )
    tx, ones = factory(optax.linear_schedule(1.0, 0.0, 10)), {"a": 1.0, "b": 1.0}
    ones = jax.tree.map(jnp.float32, ones)
    _, state = tx.update(ones, tx.init(ones), ones)
    updates, _ = tx.update(ones, state, ones)
    assert {path: float(update) for path, update in updates.items()} == pytest.approx(
        {"a": 0.9, "b": 1.0}
    )


@pytest.mark.parametrize(
    "rules",
    [
        {"a": 0.0, "b": 1.0, "**": -0.5},
        {"a": 1, "**": -1e-4},
        {"a": [1.0, -0.5], "**": 1.0},
        {"a": np.float32(-0.5), "**": 1.0},
    ],
)
def test_a_negative_factor_warns_that_its_leaves_climb(rules):
    with pytest.warns(ta.TreeAdaptWarning, match=r"factor -0\.\d+ .*climb the loss"):
        ta.scale_by_rules(rules)


def test_factors_of_which_all_are_negative_do_not_warn():
    for rules in ({"**": -1e-4}, {"a": 0.0, "**": -1e-3}, {"**": -1.0}):
        ta.scale_by_rules(rules)


def test_it_works_anywhere_in_a_chain():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    scale = ta.scale_by_rules({"a": 0.5, "**": 1.0})
    whole = lambda p: jax.tree.map(lambda _: True, p)  # noqa: E731
    for tx in (
        ta.adapt(optax.chain(scale, optax.scale(1.0))),
        optax.masked(scale, {"a": True, "b": False}),
        optax.masked(scale, whole),
        ta.partition({"x": scale}, {"**": "x"}),
        ta.freeze(scale, "b"),
    ):
        updates, _ = tx.update(params, tx.init(params), params)
        assert updates["a"][0] == 0.5
        optax.tree.map_params(tx, lambda x: x, tx.init(params))
    fast = ta.adapt(optax.chain(scale, optax.lookahead(optax.sgd(1.0), 1, 0.5)))
    both = optax.LookaheadParams.init_synced(params)
    assert fast.update(params, fast.init(both), both)[0].slow["a"][0] == -0.25
    update, _ = ta.adapt(scale).update({"a": None, "b": jnp.ones(2)}, (), params)
    assert update["a"] is None


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ({"**": "frozen"}, ta.TransformError, "'a'.*'frozen'.*not a number"),
        ({"**": True}, ta.TransformError, "'a'.*True"),
        ({"**": 1j}, ta.TransformError, "'a'.*1j.*float32"),
        ({"**": [1.0, 2.0]}, ta.TransformError, r"'a'.*\(2,\).*\(3, 1\)"),
        ({"a": 1.0, "s": [1.0]}, ta.TransformError, r"'s'.*\(1,\).*\(\)"),
        (
            {"a": np.ones((3, 1)), "s": 1.0},
            ta.TransformError,
            r"'a'.*\(3, 1\).*leading",
        ),
        ({"a": 1.0}, ta.UnmatchedPathError, "'s'"),
        ({"a": 1.0, "x": 1.0, "**": 1.0}, ta.UnusedRuleError, "'x'"),
        ({"a": None, "**": 1.0}, ta.TransformError, "None"),
        ({"**": "frozen"}, ta.TransformError, "Write 0.0 for leaves that do not move"),
        ({"**": "slow"}, ta.TransformError, "Labels are for treeadapt.partition"),
        ({"**": ["slow", "fast"]}, ta.TransformError, "'a'.*not a number"),
        (
            {"s": 1.0, "**": optax.adam(1e-3)},
            ta.TransformError,
            r"An optimizer .*rule 2, '\*\*'.*partition\(",
        ),
        (
            {"**": optax.linear_schedule(1.0, 0.0, 9)},
            ta.TransformError,
            r"schedule .*rule 1.*inject_hyperparams\(lambda rate: ",
        ),
    ],
)
def test_init_names_rules_that_do_not_fit(rules, error, words):
    params = {"a": jnp.ones((3, 1)), "s": jnp.ones(())}
    with pytest.raises(error, match=words):
        ta.scale_by_rules(rules).init(params)


@pytest.mark.slow
def test_a_factor_of_zero_can_be_learned():
    def update(factor):
        tx = ta.scale_by_rules({"a": factor, "b": [0.0, 1.0]})
        updates = {"a": jnp.float32(3.0), "b": jnp.ones(2)}
        return tx.update(updates, optax.EmptyState())[0]["a"]

    for factor in (0.0, 2.0):
        assert jax.grad(update)(factor) == 3.0


@pytest.mark.hazard("F37")
@pytest.mark.parametrize(
    "rules",
    [
        {"embed": [1.0, 2.0, 3.0], "**": 1.0},
        ta.Rules({"blocks/0": 0.5, "**": 1.0}, stacks={"blocks": 0}),
    ],
    ids=["array", "stack"],
)
def test_factors_of_layers_never_scale_examples(rules):
    params = {"embed": jnp.ones((3, 2)), "blocks": {"w": jnp.ones((3, 2))}}
    each = jax.tree.map(lambda leaf: jnp.ones((3, *leaf.shape)), params)
    tx = ta.scale_by_rules(rules)
    with pytest.raises(ta.TransformError, match=r"is float32\[3,3,2\], and the param"):
        tx.update(each, tx.init(params), params)
    one = ta.scale_by_rules({"embed": 0.5, "**": 2.0})
    updates, _ = one.update(each, one.init(params), params)
    assert updates["embed"].shape == (3, 3, 2)
    assert (updates["embed"] == 0.5).all()
