"""What silently goes wrong with Optax today, but not here.

Each test first shows the trap in Optax, so that we notice a change there. Then it shows
that this library does what the user meant, or says what to do.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from brax.training.agents.ppo.losses import PPONetworkParams
from flax import nnx
from flax.core import FrozenDict
from trees import mlp

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

ONE = {"a": jnp.ones(2), "b": jnp.ones(2)}


def moved(tx: Any, params: Any, grads: Any = None) -> dict[str, bool]:
    """Which leaves a transformation moves; gradients are zero unless given."""
    grads = jax.tree.map(jnp.zeros_like, params) if grads is None else grads
    updates, _ = tx.update(grads, tx.init(params), params)
    return {path: bool(x.any()) for path, x in ta.to_flat_dict(updates).items()}


# Silent today


@pytest.mark.slow
def test_a_mask_is_treated_as_a_schedule():
    def mask(tree):
        return jax.tree.map(lambda x: jnp.ndim(x) > 0, tree)

    def tx(inject, mask):
        return inject(optax.adamw)(0.1, weight_decay=0.5, mask=mask)

    assert moved(tx(optax.inject_hyperparams, mask), ONE) == {"a": False, "b": False}
    assert moved(tx(ta.inject_hyperparams, mask), ONE) == {"a": True, "b": True}
    for said in (ta.glob("a"), ta.lift(mask), ta.Rules({"a": True, "b": False})):
        with pytest.raises(ta.SelectorError, match=r"treeadapt\.inject_hyperparams"):
            moved(tx(optax.inject_hyperparams, said), ONE)
        with pytest.raises(ta.SelectorError, match=r"treeadapt\.inject_hyperparams"):
            moved(ta.adapt(tx(optax.inject_hyperparams, said)), ONE)
        assert moved(tx(ta.inject_hyperparams, said), ONE)["a"]


def test_a_function_as_freeze_mask_freezes_everything():
    def mask(tree):
        return {"a": True, "b": False}

    today = optax.selective_transform(optax.sgd(1.0), freeze_mask=mask)
    assert moved(today, ONE, ONE) == {"a": False, "b": False}
    assert moved(ta.freeze(optax.sgd(1.0), "a"), ONE, ONE) == {"a": False, "b": True}
    with pytest.raises(ta.SelectorError, match="A selector is"):
        ta.freeze(optax.sgd(1.0), mask)


def test_setting_the_count_overwrites_a_parameter_called_count():
    params = {"count": jnp.ones(2), "w": jnp.ones(2)}
    state = (
        optax.TraceState(params),
        optax.scale_by_schedule(lambda n: 1.0).init(params),
    )
    broken = optax.tree.set(state, count=jnp.int32(7))
    assert broken[0].trace["count"] == 7  # a parameter
    kept = ta.tree_set(state, count=jnp.int32(7))
    assert kept[0].trace["count"].tolist() == [1, 1]
    assert kept[1].count == 7


@pytest.mark.hazard("F16")
def test_masked_leaves_get_their_gradients_as_updates():
    mask = {"a": True, "b": False}
    updates, _ = optax.masked(optax.sgd(1.0), mask).update(
        ONE, optax.masked(optax.sgd(1.0), mask).init(ONE)
    )
    assert updates["b"][0] == 1  # uphill
    assert moved(ta.freeze(optax.sgd(1.0), "b"), ONE, ONE) == {"a": True, "b": False}


def test_frozen_leaves_move_by_weight_decay():
    mask = {"a": True, "b": False}
    today = optax.chain(optax.freeze(mask), optax.adamw(0.1))
    assert moved(today, ONE, ONE) == {"a": True, "b": True}
    assert moved(ta.freeze(optax.adamw(0.1), "a"), ONE, ONE) == {"a": False, "b": True}
    groups = ta.partition({"t": optax.adamw(0.1)}, {"a": "frozen", "**": "t"})
    assert moved(groups, ONE, ONE) == {"a": False, "b": True}


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm


@pytest.mark.slow
def test_a_class_mask_on_a_flat_dict_decays_the_norms():
    model = Normed(eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.nn.LayerNorm(2))
    model = jax.tree.map(jnp.ones_like, model)

    def is_norm(node):
        return isinstance(node, eqx.nn.LayerNorm)

    def mask(tree):
        return jax.tree.map(lambda node: not is_norm(node), tree, is_leaf=is_norm)

    flat, _ = ta.split(model)
    assert moved(optax.adamw(0.1, mask=mask), flat)["norm/weight"]  # today
    for said in (ta.lift(mask), ~ta.node(eqx.nn.LayerNorm), ~ta.glob("<LayerNorm>")):
        decays = moved(ta.adapt(optax.adamw(0.1, mask=said)), model)
        assert decays["linear/weight"]
        assert not decays["norm/weight"]
    with pytest.raises(ta.SelectorError, match="bind"):
        moved(optax.adamw(0.1, mask=ta.node(eqx.nn.LayerNorm)), flat)
    bound = (~ta.node(eqx.nn.LayerNorm)).bind(model)
    assert not moved(optax.adamw(0.1, mask=bound), flat)["norm/weight"]


@pytest.mark.hazard("F18")
def test_a_typo_in_a_label_or_an_idle_group_passes():
    txs = {"t": optax.sgd(1.0), "unused": optax.adam(1.0)}
    assert optax.multi_transform(txs, {"a": "t", "b": "t"}).init(ONE)
    with pytest.raises(ta.TransformError, match="'unused'"):
        ta.partition(txs, {"a": "t", "b": "t"})
    with pytest.raises(ta.UnusedRuleError, match="'aa'"):
        ta.partition({"t": optax.sgd(1.0)}, {"aa": "t", "**": "t"}).init(ONE)


@pytest.mark.hazard("F15")
def test_labels_of_mixed_types_fail_where_nobody_looks():
    txs = {"a": optax.sgd(1.0), 0: optax.adam(1.0)}
    state = optax.multi_transform(txs, {"a": "a", "b": 0}).init(ONE)
    with pytest.raises(ValueError, match="Comparator"):
        jax.tree.leaves(state)
    with pytest.raises(ta.TransformError, match="one type"):
        ta.partition(txs, {"a": "a", "b": 0})


@pytest.mark.parametrize("no", ["no", "False", np.array([0, 1])[1:]])
@pytest.mark.hazard("F17")
def test_values_other_than_bools_are_true_in_a_mask(no):
    tx = optax.masked(optax.set_to_zero(), {"a": no, "b": False})
    assert not moved(tx, ONE, ONE)["a"]
    mask = ta.param_mask(ONE, "b")
    assert all(type(yes) is bool for yes in mask.values())


@pytest.mark.hazard("F23")
def test_a_label_function_is_called_on_gradients():
    seen = []

    def labels(tree):
        seen.append(tree["w"].dtype)
        return {"w": "half" if tree["w"].dtype == jnp.bfloat16 else "full"}

    params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones(2, jnp.bfloat16)}
    txs = {"half": optax.scale(2.0), "full": optax.scale(3.0)}
    today = optax.multi_transform(txs, labels)
    today.update(grads, today.init(params), params)
    assert seen == [jnp.float32, jnp.bfloat16]
    tx = ta.partition(txs, labels)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert seen[2:] == [jnp.float32, jnp.float32]
    assert updates["w"][0] == 3


@pytest.mark.hazard("F22")
def test_a_nested_mask_sees_what_the_outer_one_left():
    seen = []

    def inner(tree):
        seen.append(len(jax.tree.leaves(tree)))
        return jax.tree.map(lambda _: True, tree)

    def tx(mask):
        return optax.masked(optax.masked(optax.sgd(1.0), mask), {"a": True, "b": False})

    tx(inner).init(ONE)
    assert seen == [1]
    ta.adapt(tx(ta.lift(inner))).init(ONE)
    assert {*seen[1:]} == {2}


@pytest.mark.hazard("F26")
def test_freezing_with_zeros_keeps_the_memory():
    big = {"big": jnp.ones(1_000), "small": jnp.ones(())}

    def size(tx):
        return sum(x.size for x in jax.tree.leaves(tx.init(big)))

    mask = {"big": True, "small": False}
    assert size(optax.chain(optax.adam(1.0), optax.freeze(mask))) == 2_003
    assert size(ta.freeze(optax.adam(1.0), "big")) == 3


# Errors today


class Agent(NamedTuple):
    policy: Any
    value: Any


@pytest.mark.hazard("D15")
def test_labels_in_other_containers_are_refused():
    params = PPONetworkParams(policy={"w": jnp.ones(2)}, value={"w": jnp.ones(2)})
    labels = {"policy": "t", "value": "z"}
    txs = {"t": optax.sgd(1.0), "z": optax.sgd(2.0)}
    with pytest.raises(ValueError, match="different types"):  # brax#480
        optax.multi_transform(txs, labels).init(params)
    for said in (labels, ta.lift(labels), lambda _: labels, ta.lift(Agent("t", "z"))):
        tx = ta.partition(txs, said)
        updates, _ = tx.update(params, tx.init(params), params)
        assert (updates.policy["w"][0], updates.value["w"][0]) == (-1, -2)
    frozen = FrozenDict({"a": jnp.ones(2), "b": jnp.ones(2)})
    assert moved(ta.freeze(optax.sgd(1.0), "b"), frozen, frozen)["a"]


@pytest.mark.hazard("E2")
def test_a_module_of_labels_is_called():
    model = mlp()
    params = eqx.filter(model, eqx.is_array)
    labels = jax.tree.map(lambda x: "t", params)
    with pytest.raises(TypeError):  # equinox#193
        optax.multi_transform({"t": optax.sgd(1.0)}, labels).init(params)
    with pytest.raises(ta.TransformError, match=r"treeadapt\.lift"):
        ta.partition({"t": optax.sgd(1.0)}, labels)
    tx = ta.partition({"t": optax.sgd(1.0)}, ta.lift(labels))
    assert tx.init(model)


def test_a_mask_function_with_a_setting_is_treated_as_a_mask():
    class AtLeast(eqx.Module):
        ndim: int

        def __call__(self, tree):
            return jax.tree.map(lambda x: x.ndim >= self.ndim, tree)

    with pytest.raises(ValueError, match="different types"):
        optax.masked(optax.sgd(1.0), AtLeast(2)).init(ONE)
    asked = lambda tree: AtLeast(2)(tree)  # noqa: E731
    assert ta.adapt(optax.masked(optax.sgd(1.0), ta.lift(asked))).init(ONE)


@pytest.mark.hazard("F24")
def test_a_placeholder_meets_wrappers():
    naive = optax.GradientTransformation(
        lambda p: optax.adam(1.0).init(dict(p)), optax.adam(1.0).update
    )
    with pytest.raises(TypeError):
        optax.tree.map_params(naive, lambda x: "P", naive.init(ONE))
    for tx in (
        ta.adapt(optax.adam(1.0)),
        ta.freeze(optax.adam(1.0), "a"),
        ta.partition({"t": optax.adam(1.0)}, {"**": "t"}),
        ta.adapt(optax.masked(optax.adam(1.0), ta.glob("a"))),
    ):
        state = optax.tree.map_params(tx, lambda x: "P", tx.init(ONE))
        assert "P" in jax.tree.leaves(state)


@pytest.mark.slow
@pytest.mark.hazard("F25")
def test_gradients_in_another_class_are_refused_by_a_line_search():
    class Point(NamedTuple):
        x: Any
        y: Any

    def loss(p):
        return (p.x - 1.0) ** 2 + (p.y + 2.0) ** 2

    params, tx = Point(jnp.float32(3), jnp.float32(4)), optax.lbfgs(memory_size=2)
    flat = params._asdict()
    value, grad = jax.value_and_grad(loss)(params)
    extra = {"value": value, "grad": grad, "value_fn": loss}
    with pytest.raises(ValueError, match="different types"):
        tx.update(grad._asdict(), tx.init(flat), flat, **extra)
    ours = ta.adapt(tx)
    step = lambda p: ours.update(grad, ours.init(p), p, **extra)[0]  # noqa: E731
    assert jax.tree.structure(jax.eval_shape(step, params)) == jax.tree.structure(
        params
    )


@pytest.mark.slow
@pytest.mark.hazard("E1")
def test_a_raw_model_is_refused():
    model = mlp()
    grads = eqx.filter(model, eqx.is_array)
    for make in (optax.adam, optax.lbfgs, optax.contrib.schedule_free_sgd):
        with pytest.raises((TypeError, AttributeError)):  # equinox#69 and others
            make(0.1).init(model)
    steps = optax.MultiSteps(optax.sgd(1.0), 1)
    with pytest.raises(TypeError):  # equinox#590: the model given as params alone
        steps.update(grads, steps.init(grads), model)
    ours = ta.adapt(steps)
    updates, _ = ours.update(grads, ours.init(model), model)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)


def test_variables_of_nnx_meet_labels():
    class Net(nnx.Module):
        def __init__(self):
            self.one = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.two = nnx.Linear(2, 2, rngs=nnx.Rngs(1))

    net = Net()
    state = nnx.state(net, nnx.Param)
    labels = jax.tree.map(lambda _: "t", state)
    pure = nnx.to_pure_dict(state)
    with pytest.raises(ValueError, match="different types"):  # flax#5372, in effect
        optax.multi_transform({"t": optax.sgd(1.0)}, labels).init(pure)
    tx = ta.partition({"t": optax.sgd(1.0)}, {"one": "frozen", "**": "t"})
    for params in (net, state, pure):
        assert sorted(
            {path[:3] for path, yes in moved(tx, params, params).items() if yes}
        ) == ["two"]


@pytest.mark.slow
def test_state_that_changes_its_type_does_not_scan():
    def scans(tx, params):
        def step(state, _):
            return tx.update(ONE, state, params)[1], None

        jax.eval_shape(lambda s: jax.lax.scan(step, s, length=2), tx.init(params))

    fast = optax.chain(optax.zero_nans(), optax.adam(0.1))
    lookahead = optax.lookahead(fast, 2, 0.5, reset_state=True)
    sam = optax.contrib.sam(optax.sgd(0.1), fast)
    pairs = [(lookahead, optax.LookaheadParams.init_synced(ONE)), (sam, ONE)]
    for tx, params in pairs:
        with pytest.raises(TypeError, match="bool"):  # siblings of optax#828
            scans(tx, params)
        scans(ta.adapt(tx), params)
    scans(ta.adapt(optax.MultiSteps(fast, 2)), ONE)


def test_labels_that_cannot_be_sorted_fail_where_nobody_looks():
    class Group(enum.Enum):
        SLOW = 1
        FAST = 2

    txs = {Group.SLOW: optax.sgd(1.0), Group.FAST: optax.sgd(2.0)}
    state = optax.multi_transform(txs, {"a": Group.SLOW, "b": Group.FAST}).init(ONE)
    with pytest.raises(ValueError, match="Comparator"):
        jax.tree.leaves(state)
    with pytest.raises(ta.TransformError, match="sorted"):
        ta.partition(txs, {"a": Group.SLOW, "b": Group.FAST})


def test_a_field_called_fast_hijacks_lookahead():
    class Model(NamedTuple):
        fast: Any
        slow: Any

    params = Model({"w": jnp.ones(2)}, {"w": jnp.ones(2)})
    tx = optax.lookahead(optax.adam(0.1), 2, 0.5)
    assert list(tx.init(params).fast_state[0].mu) == ["w"]  # half of the model
    assert list(ta.adapt(tx).init(params).fast_state[0].mu) == ["fast/w", "slow/w"]


def test_params_with_a_value_confuse_the_line_search():
    params = Agent({"w": jnp.ones(2)}, {"w": jnp.ones(2)})

    def loss(p):
        return jnp.sum(p.policy["w"] ** 2 + p.value["w"] ** 2)

    state = optax.lbfgs().init(params)
    with pytest.raises(KeyError, match="multiple values"):
        optax.value_and_grad_from_state(loss)(params, state=state)
    flat_state = ta.adapt(optax.lbfgs()).init(params)
    assert jnp.isinf(optax.tree.get(flat_state, "value"))  # no key is called just that


@pytest.mark.slow
def test_multi_steps_in_a_chain_drops_extra_arguments():
    inner = optax.chain(optax.polyak_sgd(), optax.sgd(1.0))
    tx = optax.chain(optax.MultiSteps(inner, 1).gradient_transformation())
    with pytest.raises(TypeError, match="value"):
        tx.update(ONE, tx.init(ONE), ONE, value=1.0)
    tx = optax.chain(ta.adapt(optax.MultiSteps(inner, 1)))
    tx.update(ONE, tx.init(ONE), ONE, value=jnp.float32(1.0))
