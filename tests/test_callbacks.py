"""What is called with params and state together, outside ``update``."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from brax.training.agents.ppo.losses import PPONetworkParams
from flax import nnx
from jax.sharding import PartitionSpec as P
from sizes import slow_but, some
from trees import BY_NAME, SAME_MODEL, two_layers

import treeadapt as ta
from treeadapt import tree_map_params, value_and_grad_from_state

# Optax itself promotes.
pytestmark = pytest.mark.usefixtures("standard_promotion")


class Named(NamedTuple):
    """Params that are called like the fields of a line search's state."""

    value: Any
    grad: Any
    count: Any
    learning_rate: Any


def ramp(*shape: int) -> jax.Array:
    return jnp.linspace(0.5, 1.5, int(np.prod(shape)), dtype=jnp.float32).reshape(shape)


def named() -> Named:
    return Named(ramp(), {"value": ramp(3), "grad": ramp()}, ramp(2), ramp(2, 2))


def ppo() -> PPONetworkParams:
    def net(*sizes: int) -> Any:
        return {
            "params": {
                f"hidden_{i}": {"bias": ramp(n), "kernel": ramp(n, n)}
                for i, n in enumerate(sizes)
            }
        }

    return PPONetworkParams(policy=net(2, 3), value=net(2))


def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))


def loss(params: Any, target: Any = 0.3, *, scale: Any = 1.0) -> jax.Array:
    """A sum over the arrays in the order of their paths, whatever holds them."""
    flat = ta.split(params)[0]
    return scale * sum(jnp.sum((flat[path] - target) ** 4) for path in sorted(flat))


MODELS = {
    "named": named,
    "ppo": ppo,
    "equinox": mlp,
    "dict": lambda: two_layers(dict, dict),
    "flat dict": lambda: ta.to_flat_dict(two_layers(dict, dict)),
    "bare array": lambda: ramp(4),
}

SEARCHES = {
    "zoom": lambda: optax.lbfgs(memory_size=3),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)
    ),
}


def fit(tx: Any, params: Any, steps: int, *, stored: bool = True) -> Any:
    """Minimise the loss; return the params, the state and the losses on the way."""
    reuse = value_and_grad_from_state(loss)

    @jax.jit
    def step(arrays: Any, state: Any) -> Any:
        params = ta.from_flat_dict(model, {**statics, **arrays})
        if stored:
            value, grad = reuse(params, state=state)
        else:
            value, grad = as_gradient(params)
        updates, state = tx.update(
            grad, state, params, value=value, grad=grad, value_fn=loss
        )
        return arrays_of(ta.apply_updates(params, updates)), state, value

    model = params
    statics = {k: v for k, v in ta.to_flat_dict(params).items() if not eqx.is_array(v)}
    arrays, state, values = arrays_of(params), strong(tx.init(params)), []
    for _ in range(steps):
        arrays, state, value = step(arrays, state)
        values.append(float(value))
    return arrays, state, values


@functools.cache
def fitted(model: str, search: str, *, stored: bool = True) -> Any:
    """Four steps of a search, compiled once for all tests that look at them."""
    return fit(ta.adapt(SEARCHES[search]()), MODELS[model](), 4, stored=stored)


def strong(state: Any) -> Any:
    """The state without weak types, with which a step would be compiled twice."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)


def update_of(tx: Any) -> Any:
    """The compiled update of a line search: its loops are compiled once."""

    @jax.jit
    def update(value: Any, grad: Any, state: Any, params: Any) -> Any:
        return tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)

    return update


def arrays_of(tree: Any) -> dict[str, Any]:
    return {k: v for k, v in ta.to_flat_dict(tree).items() if eqx.is_array(v)}


def as_gradient(params: Any) -> Any:
    flat, rest = ta.split(params)
    value, grad = jax.value_and_grad(lambda flat: loss(ta.merge(flat, rest)))(flat)
    return value, ta.merge(grad, rest)


def assert_equal(one: Any, two: Any) -> None:
    one, two = arrays_of(one), arrays_of(two)
    assert list(one) == list(two)
    for path in one:
        np.testing.assert_array_equal(one[path], two[path], err_msg=path)


@pytest.mark.parametrize(
    ("model", "search"),
    slow_but((), [("named", "zoom"), ("equinox", "zoom")])
    + some((model, "backtracking") for model in MODELS),
)
def test_the_stored_value_is_the_computed_one(model, search):
    one, two = fitted(model, search), fitted(model, search, stored=False)
    np.testing.assert_allclose(one[2], two[2], rtol=1e-5)
    assert one[2][-1] < one[2][0]
    for path in one[0]:
        np.testing.assert_allclose(one[0][path], two[0][path], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["named", "ppo", "equinox", "dict"])
def test_what_is_stored_is_returned_without_another_evaluation(model):
    params = MODELS[model]()
    tx = ta.adapt(optax.lbfgs(memory_size=3))
    arrays, state, _ = fitted(model, "zoom")
    params = ta.from_flat_dict(params, {**ta.to_flat_dict(params), **arrays})
    calls = []

    def counted(params: Any) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return loss(params)

    value, grad = value_and_grad_from_state(counted)(params, state=state)
    jax.effects_barrier()
    assert calls == []
    search = state[-1]
    assert float(value) == float(search.value)
    assert_equal(
        {k: v for k, v in arrays_of(grad).items() if k in search.grad},
        dict(search.grad),
    )
    value, grad = value_and_grad_from_state(counted)(params, state=tx.init(params))
    jax.effects_barrier()
    assert calls == [1]


@pytest.mark.slow
def test_a_value_that_is_no_number_is_computed_anew():
    params = {"w": ramp(3)}
    tx = ta.adapt(optax.lbfgs(memory_size=3))
    _, state, _ = fit(tx, params, 1)
    state = (*state[:2], state[2]._replace(value=jnp.float32(np.nan)))
    value, grad = value_and_grad_from_state(loss)(params, state=state)
    assert_equal(grad, jax.grad(loss)(params))
    assert float(value) == pytest.approx(float(loss(params)))


def test_arguments_reach_the_function():
    params = {"w": ramp(3)}
    state = ta.adapt(optax.lbfgs()).init(params)
    value_and_grad = value_and_grad_from_state(loss)
    value, _ = value_and_grad(params, 0.1, state=state, scale=2.0)
    assert float(value) == float(loss(params, 0.1, scale=2.0))
    assert value_and_grad.__name__ == "loss"


def test_a_function_among_the_arguments():
    # Optax hands the arguments to lax.cond, which takes arrays only.
    def applied(params: Any, fn: Any) -> jax.Array:
        return jnp.sum(fn(params["w"]))

    params = {"w": ramp(3)}
    state = ta.adapt(optax.lbfgs()).init(params)
    value, _ = value_and_grad_from_state(applied)(params, jnp.square, state=state)
    assert float(value) == float(jnp.sum(jnp.square(params["w"])))


@pytest.mark.slow
def test_a_plain_state_of_optax():
    params = two_layers(dict, dict)
    tx = optax.lbfgs(memory_size=3)
    native, ours = (
        optax.value_and_grad_from_state(loss),
        value_and_grad_from_state(loss),
    )
    update, state = update_of(tx), strong(tx.init(params))
    for _ in range(3):
        value, grad = ours(params, state=state)
        assert_equal((value, grad), native(params, state=state))
        updates, state = update(value, grad, state, params)
        params = optax.apply_updates(params, updates)


@pytest.mark.slow
def test_the_gradient_has_the_classes_of_the_params():
    class Model(eqx.Module):
        layer: eqx.nn.Linear
        activation: Any
        steps: jax.Array
        key: jax.Array
        name: str
        rate: float

    model = Model(
        eqx.nn.Linear(2, 2, key=jax.random.key(0)),
        jax.nn.relu,
        jnp.arange(2),
        jax.random.key(1),
        "mlp",
        0.5,
    )
    search = optax.scale_by_backtracking_linesearch(10, store_grad=True)
    tx = ta.adapt(optax.lbfgs(linesearch=search))
    state = tx.init(model)
    value, grad = value_and_grad_from_state(loss)(model, state=state)
    assert isinstance(grad, Model)
    assert grad.activation is grad.key is grad.name is grad.rate is None
    assert grad.steps.dtype == model.steps.dtype
    assert not np.any(grad.steps)
    assert_equal(grad.layer, eqx.filter_grad(loss)(model).layer)
    assert np.isfinite(optax.tree.norm(grad))
    updates, _ = tx.update(grad, state, model, value=value, grad=grad, value_fn=loss)
    for apply in (ta.apply_updates, eqx.apply_updates):
        new = apply(model, updates)
        assert new.activation is jax.nn.relu
        assert_equal(new.steps, model.steps)
        assert float(loss(new)) < float(loss(model))


@pytest.mark.slow
def test_batch_statistics_get_zeros():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    tx = ta.adapt(optax.lbfgs())
    _, grad = value_and_grad_from_state(loss)(state, state=tx.init(state))
    flat = ta.to_flat_dict(grad)
    assert np.any(flat["scale"])
    assert not np.any(flat["mean"])
    assert not np.any(flat["var"])


@pytest.mark.slow
def test_in_a_partition_it_is_computed_anew():
    rules = {"hidden": "search", "**": "sgd"}
    tx = ta.partition({"search": optax.lbfgs(), "sgd": optax.sgd(1e-2)}, rules)
    params = two_layers(dict, dict)
    update, state = update_of(tx), strong(tx.init(params))
    for _ in range(3):
        value, grad = value_and_grad_from_state(loss)(params, state=state)
        want, want_grad = jax.value_and_grad(loss)(params)
        assert float(value) == float(want)
        assert_equal(grad, want_grad)
        updates, state = update(value, grad, state, params)
        params = ta.apply_updates(params, updates)


@pytest.mark.slow
def test_two_line_searches_in_a_partition():
    tx = ta.partition(
        {"a": optax.lbfgs(), "b": optax.lbfgs()}, {"hidden": "a", "**": "b"}
    )
    losses = fit(tx, two_layers(dict, dict), 4)[2]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_under_masked_it_is_computed_anew():
    # The leaves that the mask leaves out move by their raw gradients.
    tx = ta.adapt(optax.masked(optax.lbfgs(), ta.glob("hidden")))
    params = two_layers(dict, dict)
    state = ta.tree_set(tx.init(params), value=5.0)
    value, grad = value_and_grad_from_state(loss)(params, state=state)
    assert float(value) == pytest.approx(float(loss(params)))
    assert_equal(grad, jax.grad(loss)(params))


@pytest.mark.slow
def test_a_mask_beside_the_line_search_does_not_matter():
    decay = optax.masked(optax.add_decayed_weights(1e-3), ta.glob("**/w"))
    tx = ta.adapt(optax.chain(decay, optax.lbfgs()))
    params = two_layers(dict, dict)
    state = ta.tree_set(tx.init(params), value=5.0)
    value, _ = value_and_grad_from_state(loss)(params, state=state)
    assert float(value) == 5.0


@pytest.mark.slow
def test_frozen_leaves_cost_no_gradient():
    tx = ta.freeze(optax.lbfgs(memory_size=3), "hidden")
    params = two_layers(dict, dict)
    update, state = update_of(tx), strong(tx.init(params))
    seen = []

    def watched(params: Any) -> jax.Array:
        seen.append(isinstance(params["hidden"]["w"], jax.core.Tracer))
        return loss(params)

    for _ in range(3):
        value, grad = value_and_grad_from_state(watched)(params, state=state)
        assert not np.any(grad["hidden"]["w"])
        assert_equal(grad["out"], jax.grad(loss)(params)["out"])
        updates, state = update(value, grad, state, params)
        new = ta.apply_updates(params, updates)
        assert_equal(new["hidden"], params["hidden"])
        params = new
    assert seen
    assert not any(seen)


@pytest.mark.slow
def test_it_scans():
    tx = ta.adapt(optax.lbfgs(memory_size=3))
    params = named()

    @jax.jit
    def run(params: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            value, grad = value_and_grad_from_state(loss)(params, state=state)
            updates, state = tx.update(
                grad, state, params, value=value, grad=grad, value_fn=loss
            )
            return (ta.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, tx.init(params)), length=4)

    _, values = run(params)
    np.testing.assert_allclose(values, fitted("named", "zoom")[2], rtol=1e-5)


def test_bfloat16_params_with_a_float32_loss():
    def wide(params: Any) -> jax.Array:
        return loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))

    params = {"w": ramp(3).astype(jnp.bfloat16)}
    tx = ta.adapt(optax.lbfgs())
    value, grad = value_and_grad_from_state(wide)(params, state=tx.init(params))
    assert grad["w"].dtype == jnp.bfloat16
    assert np.isfinite(float(value))


def test_a_state_without_a_value_is_an_error():
    params = {"value": ramp(2), "grad": ramp(2)}
    for tx in (optax.adam(1e-3), optax.lbfgs(linesearch=None)):
        state = ta.adapt(tx).init(params)
        with pytest.raises(ta.TransformError, match="store_grad=True"):
            value_and_grad_from_state(loss)(params, state=state)


def test_params_that_the_state_was_not_made_for_are_an_error():
    state = ta.adapt(optax.lbfgs()).init({"a": ramp(2), "b": ramp(2)})
    with pytest.raises(ta.TransformError, match="'b'"):
        value_and_grad_from_state(loss)({"a": ramp(2)}, state=state)


def paths_as_leaves(tree: Any) -> Any:
    """A tree of the same containers, each leaf its own path."""
    return ta.from_flat_dict(tree, {p: p for p in ta.tree_paths(tree)}, strict=False)


TRANSFORMS = {
    "adam": lambda: ta.adapt(optax.adam(1e-3)),
    "plain adam": lambda: optax.adam(1e-3),
    "freeze": lambda: ta.freeze(optax.adam(1e-3), "hidden"),
    "partition": lambda: ta.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)},
        {"hidden/w": "a", "hidden": "frozen", "**": "b"},
    ),
    "optax.partition": lambda: ta.adapt(
        optax.partition(
            {"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)},
            ta.Rules({"hidden": "a", "**": "b"}),
        )
    ),
    "masked": lambda: ta.adapt(optax.masked(optax.adam(1e-3), ta.glob("**/w"))),
    "chain": lambda: ta.adapt(
        optax.named_chain(("one", optax.trace(0.9)), ("two", optax.adam(1e-3)))
    ),
    "inject": lambda: ta.adapt(optax.inject_hyperparams(optax.adam)(1e-3)),
    "MultiSteps": lambda: ta.adapt(optax.MultiSteps(optax.adam(1e-3), 2)),
    "lbfgs": lambda: ta.adapt(optax.lbfgs(memory_size=2)),
    "lbfgs in a group": lambda: ta.partition(
        {"a": optax.lbfgs(memory_size=2)}, {"hidden": "frozen", "**": "a"}
    ),
    "adafactor": lambda: ta.adapt(optax.adafactor(1e-3)),
    "sm3": lambda: ta.adapt(optax.sm3(1e-3)),
    "muon": lambda: ta.adapt(optax.contrib.muon(1e-3)),
    "zero_nans": lambda: ta.adapt(optax.zero_nans()),
}


ROWS = [row for row in SAME_MODEL if not row.opaque]


@pytest.mark.parametrize(
    ("row", "kind"),
    [(row, "partition") for row in ROWS]
    + [(BY_NAME[name], kind) for name in ("dict", "Equinox") for kind in TRANSFORMS],
    ids=lambda it: getattr(it, "name", it),
)
def test_every_copy_of_the_params_meets_its_own_leaf(row, kind):
    model = row.make()
    tx = TRANSFORMS[kind]()
    params = eqx.filter(model, eqx.is_array) if kind == "plain adam" else model
    state = tx.init(params)
    names = paths_as_leaves(model)
    mapped = tree_map_params(
        tx,
        lambda leaf, name, upper: f"{name} {upper}",
        state,
        names,
        jax.tree.map(str.upper, names),
        transform_non_params=lambda leaf: "other",
    )
    copies = 0
    for name, leaf in ta.to_flat_dict(mapped).items():
        paths = [p for p in ("hidden/w", "hidden/b", "out/w", "out/b") if p in name]
        assert leaf == ("".join(f"{p} {p.upper()}" for p in paths) or "other"), name
        copies += len(paths)
    assert copies


def test_other_leaves_stay_without_a_function_for_them():
    tx = ta.adapt(optax.adam(1e-3))
    params = ppo()
    state = tx.init(params)
    mapped = tree_map_params(tx, lambda leaf: leaf + 1, state)
    assert mapped[0].count is state[0].count
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    assert float(mapped[0].nu["value/params/hidden_0/bias"][0]) == 1.0


def test_masked_nodes_stay_and_can_be_leaves():
    tx = ta.adapt(optax.masked(optax.trace(0.9), ta.glob("a")))
    params = {"a": ramp(2), "b": ramp(2)}
    state = tx.init(params)
    mapped = tree_map_params(tx, lambda leaf, name: name, state, {"a": "A", "b": "B"})
    assert mapped.inner_state.trace == {"a": "A", "b": optax.MaskedNode()}
    mapped = tree_map_params(
        tx,
        lambda leaf, name: (type(leaf).__name__, name),
        state,
        {"a": "A", "b": "B"},
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    assert mapped.inner_state.trace["b"] == ("MaskedNode", "B")


def test_specs_and_none_are_leaves_of_a_tree():
    tx = ta.adapt(optax.trace(0.9))
    params = {"a": ramp(2), "b": ramp(2)}
    specs = {"a": P("x"), "b": None}
    mapped = tree_map_params(
        tx, lambda leaf, spec: (spec, leaf.shape), tx.init(params), specs
    )
    assert mapped.trace == {"a": (P("x"), (2,)), "b": (None, (2,))}


def test_params_that_are_called_like_fields():
    for tx in (optax.adam(1e-3), optax.inject_hyperparams(optax.adam)(1e-3)):
        params = named()
        mapped = tree_map_params(
            tx := ta.adapt(tx),
            lambda leaf, name: name,
            tx.init(params),
            paths_as_leaves(params),
            transform_non_params=lambda leaf: None,
        )
        own = sorted(ta.tree_paths(params))
        assert sorted(ta.to_flat_dict(mapped).values()) == sorted(own * 2)


def test_the_same_as_optax_on_plain_trees():
    params = two_layers(dict, dict)
    tx = optax.chain(optax.adam(1e-3), optax.MultiSteps(optax.sgd(1e-3), 2))
    state = tx.init(params)
    names = paths_as_leaves(params)
    for other in (None, lambda leaf: "other"):
        one, two = (
            map_params(
                tx, lambda leaf, name: name, state, names, transform_non_params=other
            )
            for map_params in (tree_map_params, optax.tree_utils.tree_map_params)
        )
        assert jax.tree.structure(one) == jax.tree.structure(two)
        assert all(map(lambda a, b: a is b, *map(jax.tree.leaves, (one, two))))


def test_a_tree_without_a_leaf_is_an_error():
    tx = ta.adapt(optax.trace(0.9))
    state = tx.init({"a": ramp(2), "b": ramp(2)})
    with pytest.raises(ta.StructureMismatchError, match="'b'"):
        tree_map_params(tx, lambda leaf, other: other, state, {"a": 1})


def test_a_line_search_needs_a_tree():
    tx = ta.adapt(optax.lbfgs())
    state = tx.init({"a": ramp(2)})
    with pytest.raises(ta.TransformError, match="state, params"):
        tree_map_params(tx, lambda leaf: leaf, state)


@pytest.mark.slow
def test_an_abstract_state():
    tx = ta.adapt(optax.adam(1e-3))
    state = jax.eval_shape(lambda: tx.init(mlp()))
    mapped = tree_map_params(
        tx,
        lambda leaf, w: leaf.shape == w.shape,
        state,
        mlp(),
        transform_non_params=lambda leaf: True,
    )
    assert all(jax.tree.leaves(mapped))


def test_linen_variables():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))
    tx = ta.adapt(optax.adam(1e-3))
    mapped = tree_map_params(
        tx, lambda leaf, name: name, tx.init(params), paths_as_leaves(params)
    )
    assert mapped[0].mu == {p: p for p in ("params/bias", "params/kernel")}
