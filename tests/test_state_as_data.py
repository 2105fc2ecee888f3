"""An optimizer's state as data: stable names, checkpoints, other model libraries."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from brax.training.agents.ppo.losses import PPONetworkParams
from flax.training.train_state import TrainState
from trees import SAME_MODEL, two_layers

import treeadapt as ta

# Optax itself promotes.
pytestmark = pytest.mark.usefixtures("standard_promotion")


class Layer(eqx.Module):
    kernel: jax.Array
    bias: jax.Array


class Net(eqx.Module):
    """The paths of a Linen net of two layers, in Equinox."""

    Dense_0: Layer
    Dense_1: Layer
    activation: Any = jax.nn.tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.activation(x @ self.Dense_0.kernel + self.Dense_0.bias)
        return x @ self.Dense_1.kernel + self.Dense_1.bias


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.tanh(nn.Dense(4)(x))
        return nn.Dense(1)(x)


INPUTS = jnp.linspace(-1.0, 1.0, 10, dtype=jnp.float32).reshape(5, 2)


def linen_params() -> Any:
    return LinenNet().init(jax.random.key(0), INPUTS)["params"]


def equinox_net() -> Net:
    empty = Net(*(Layer(jnp.zeros(s), jnp.zeros(s[1])) for s in ((2, 4), (4, 1))))
    return ta.from_state_dict(empty, linen_params())


def linen_loss(params: Any) -> jax.Array:
    return jnp.mean((LinenNet().apply({"params": params}, INPUTS) - 1.0) ** 2)


def equinox_loss(net: Net) -> jax.Array:
    return jnp.mean((net(INPUTS) - 1.0) ** 2)


@functools.cache
def compiled_step(tx: Any, loss: Any) -> Any:
    def step(params: Any, state: Any) -> Any:
        grads = eqx.filter_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return ta.apply_updates(params, updates), state

    return eqx.filter_jit(step)


def train(tx: Any, loss: Any, params: Any, state: Any, steps: int) -> Any:
    for _ in range(steps):
        params, state = compiled_step(tx, loss)(params, state)
    return params, state


def assert_equal(one: Any, two: Any) -> None:
    one, two = ta.to_flat_dict(one), ta.to_flat_dict(two)
    assert list(one) == list(two)
    for path in one:
        np.testing.assert_array_equal(one[path], two[path], err_msg=path)


def ppo() -> PPONetworkParams:
    def net() -> Any:
        layer = {"bias": jnp.zeros(2), "kernel": jnp.ones((2, 2))}
        return {"params": {"hidden_0": layer}}

    return PPONetworkParams(policy=net(), value=net())


def test_names_of_a_state_are_stable_and_read_as_one_path():
    assert ta.tree_paths(ta.adapt(optax.adam(1e-3)).init(ppo())) == (
        "0/count",
        "0/mu/policy/params/hidden_0/bias",
        "0/mu/policy/params/hidden_0/kernel",
        "0/mu/value/params/hidden_0/bias",
        "0/mu/value/params/hidden_0/kernel",
        "0/nu/policy/params/hidden_0/bias",
        "0/nu/policy/params/hidden_0/kernel",
        "0/nu/value/params/hidden_0/bias",
        "0/nu/value/params/hidden_0/kernel",
    )


def test_names_of_a_partition_say_the_group():
    tx = ta.partition(
        {"a": optax.sgd(1e-3, momentum=0.9)}, {"value": "a", "**": "frozen"}
    )
    assert ta.tree_paths(tx.init(ppo())) == (
        "inner_states/a/0/trace/value/params/hidden_0/bias",
        "inner_states/a/0/trace/value/params/hidden_0/kernel",
    )


@pytest.mark.parametrize(
    "row", [row for row in SAME_MODEL if not row.opaque], ids=lambda row: row.name
)
def test_names_do_not_depend_on_the_classes_of_the_model(row):
    tx = ta.adapt(optax.adamw(optax.linear_schedule(1.0, 0.0, 3)))
    state = tx.init(row.make())
    want = tx.init(two_layers(dict, dict))
    assert ta.tree_paths(state) == ta.tree_paths(want)
    assert jax.tree.structure(state) == jax.tree.structure(want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["adapt", "partition", "freeze", "lbfgs", "MultiSteps"]
)
def test_a_flat_dict_is_restored_on_an_abstract_state(kind):
    tx = {
        "adapt": ta.adapt(optax.adam(1e-2)),
        "partition": ta.partition({"a": optax.adam(1e-2)}, {"**": "a"}),
        "freeze": ta.freeze(optax.adam(1e-2), "Dense_0"),
        "lbfgs": ta.adapt(optax.lbfgs(linesearch=None)),
        "MultiSteps": ta.adapt(optax.MultiSteps(optax.adam(1e-2), 2)),
    }[kind]
    net = equinox_net()
    net, state = train(tx, equinox_loss, net, tx.init(net), 3)
    flat = ta.to_flat_dict(state)
    abstract = eqx.filter_eval_shape(tx.init, net)
    again = ta.from_flat_dict(abstract, flat)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert all(map(lambda a, b: a is b, *map(jax.tree.leaves, (again, state))))
    assert_equal(
        train(tx, equinox_loss, net, again, 2)[0],
        train(tx, equinox_loss, net, state, 2)[0],
    )


def test_a_state_of_another_model_is_an_error_with_its_names():
    tx = ta.adapt(optax.adam(1e-3))
    flat = ta.to_flat_dict(tx.init(ppo()))
    abstract = jax.eval_shape(tx.init, linen_params())
    with pytest.raises(ta.StructureMismatchError, match="0/mu/Dense_0/bias"):
        ta.from_flat_dict(abstract, flat)


@pytest.mark.slow
def test_a_state_written_with_flax_loads_into_an_equinox_model(tmp_path):
    tx = ta.adapt(optax.adam(1e-2))
    train_state = TrainState.create(
        apply_fn=LinenNet().apply, params=linen_params(), tx=tx
    )
    for _ in range(3):
        grads = jax.grad(linen_loss)(train_state.params)
        train_state = train_state.apply_gradients(grads=grads)
    file = tmp_path / "state.msgpack"
    file.write_bytes(flax.serialization.to_bytes(train_state))

    saved = flax.serialization.msgpack_restore(file.read_bytes())
    net = ta.from_state_dict(equinox_net(), saved["params"])
    state = ta.from_state_dict(eqx.filter_eval_shape(tx.init, net), saved["opt_state"])
    assert_equal(state, train_state.opt_state)
    linen, _ = train(tx, linen_loss, train_state.params, train_state.opt_state, 3)
    assert_close(train(tx, equinox_loss, net, state, 3)[0], linen)


def assert_close(net: Net, params: Any) -> None:
    flat = ta.to_flat_dict(params)
    for path, leaf in ta.to_flat_dict(eqx.filter(net, eqx.is_array)).items():
        np.testing.assert_allclose(leaf, flat[path], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_of_plain_adam_with_orbax_loads_into_adapt(tmp_path):
    # A state of nested dicts, which Orbax gives back as dicts and lists.
    tx = optax.adam(1e-2)
    params = linen_params()
    params, old = train(tx, linen_loss, params, tx.init(params), 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", old)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "state")
    assert type(saved) is not type(old)

    net = ta.from_state_dict(equinox_net(), params)
    adapted = ta.adapt(tx)
    state, report = ta.carry_state(adapted, net, saved)
    assert report.fresh == report.left_over == report.warnings == ()
    assert_equal(state, old)
    assert jax.tree.structure(state) == jax.tree.structure(adapted.init(net))
    assert_close(
        train(adapted, equinox_loss, net, state, 3)[0],
        train(tx, linen_loss, params, old, 3)[0],
    )


@pytest.mark.slow
def test_plain_adam_goes_on_bit_for_bit_through_adapt():
    tx = optax.adam(1e-2)
    params = linen_params()
    params, old = train(tx, linen_loss, params, tx.init(params), 3)
    flat = ta.from_flat_dict(
        jax.eval_shape(ta.adapt(tx).init, params), ta.to_flat_dict(old)
    )
    assert_equal(
        train(ta.adapt(tx), linen_loss, params, flat, 3)[0],
        train(tx, linen_loss, params, old, 3)[0],
    )


def test_a_state_reads_as_arrays_of_a_file(tmp_path):
    tx = ta.adapt(optax.adam(1e-2))
    net = equinox_net()
    net, state = train(tx, equinox_loss, net, tx.init(net), 2)
    np.savez(tmp_path / "state.npz", **ta.to_flat_dict(state))
    with np.load(tmp_path / "state.npz") as file:
        assert sorted(file) == sorted(ta.tree_paths(state))
        again = ta.from_flat_dict(eqx.filter_eval_shape(tx.init, net), dict(file))
    assert_equal(again, state)


def test_selectors_read_the_names_of_a_state():
    tx = ta.partition(
        {"a": optax.adam(1e-2), "b": optax.adam(1e-2)},
        {"Dense_0": "a", "Dense_1": "b", "**": "a"},
    )
    state = tx.init(linen_params())
    moments, _ = ta.split(state, "**/mu/**/kernel")
    assert list(moments) == [
        "inner_states/a/0/mu/Dense_0/kernel",
        "inner_states/b/0/mu/Dense_1/kernel",
    ]
