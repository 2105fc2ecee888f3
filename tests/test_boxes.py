"""Checkpoints in which Orbax or Flax wrote a box as a node with the child ``value``."""

from __future__ import annotations

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from command import invoke
from flax import nnx, serialization

import treeadapt as ta

# Orbax may leave a loop of its own to the collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.hazard("K31"),
    pytest.mark.usefixtures("standard_promotion"),
]


class Boxed(nn.Module):
    """Linen, with a box around one of two params."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones, ("a", "b"))
        return nn.Dense(3, kernel_init=init)(x)


def net(seed):
    return nnx.Linear(2, 3, rngs=nnx.Rngs(seed))


def linen(seed):
    return Boxed().init(jax.random.key(seed), jnp.ones((1, 2)))


def trained(model):
    optimizer = nnx.Optimizer(model, optax.adam(1e-1), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    return optimizer


def by_orbax(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def by_flax(path, tree):
    path.write_bytes(serialization.to_bytes(tree))
    return path


def same(one, two):
    assert not ta.tree_diff(one, two, values=True, where=ta.leaf())


@pytest.mark.slow
def test_an_nnx_state_loads_into_the_model(tmp_path):
    path = by_orbax(tmp_path / "x", nnx.state(net(0)))
    same(ta.load(path, net(1)), net(0))
    same(ta.load(path, nnx.state(net(1))), net(0))
    assert ta.compare_checkpoint(path, net(1)).fits
    assert list(ta.read_metadata(path)) == ["bias", "kernel"]


def test_the_state_of_an_nnx_optimizer_loads_into_one(tmp_path):
    optimizer = trained(net(0))
    path = by_orbax(tmp_path / "x", nnx.state(optimizer))
    same(ta.load(path, nnx.state(trained(net(1)))), nnx.state(optimizer))
    assert "opt_state/0/mu/kernel" in ta.read_metadata(path)


@pytest.mark.parametrize("write", [by_orbax, by_flax])
def test_linen_boxes_load_into_the_variables(write, tmp_path):
    path = write(tmp_path / "x.msgpack", linen(0))
    same(ta.load(path, linen(1)), linen(0))
    assert sorted(ta.read_metadata(path)) == [
        "params/Dense_0/bias",
        "params/Dense_0/kernel/value",  # not every leaf is in a box
    ]


@pytest.mark.slow
def test_a_leaf_that_is_really_called_value_stays(tmp_path):
    brax = {"policy": jnp.ones(2), "value": {"w": jnp.ones(3)}, "v": {"value": 2.0}}
    brax["v"] = {"value": jnp.ones(1)}
    path = by_orbax(tmp_path / "x", brax)
    same(ta.load(path, jax.tree.map(jnp.zeros_like, brax)), brax)
    only = {"a": {"value": jnp.ones(1)}, "b": {"value": jnp.ones(2)}}
    path = by_orbax(tmp_path / "y", only)
    same(ta.load(path, jax.tree.map(jnp.zeros_like, only)), only)
    ta.save(tmp_path / "z", only)
    assert list(ta.read_metadata(tmp_path / "z")) == ["a/value", "b/value"]


def test_misfits_of_boxes_are_named_as_the_model_names_them(tmp_path):
    path = by_orbax(tmp_path / "x", nnx.state(net(0)))
    target = {"bias": jnp.zeros(3), "kernal": jnp.zeros((2, 3))}
    report = ta.compare_checkpoint(path, target)
    assert (report.missing, report.unexpected) == (("kernal",), ("kernel",))


def test_a_lenient_load_that_restores_nothing_says_so(tmp_path):
    ta.save(tmp_path / "x", {"w": np.ones(2)})
    target = {"kernel": np.zeros(2)}
    with pytest.warns(ta.TreeAdaptWarning, match="Nothing was loaded") as caught:
        assert (
            ta.load(tmp_path / "x", target, strict=False)["kernel"] is target["kernel"]
        )
    assert "'kernel'" in str(caught[0].message)
    assert str(caught[0].message).endswith(
        "Pass migration= to give what is stored other names and axes."
    )
    assert caught[0].filename == __file__


def test_a_lenient_load_names_the_leaves_that_it_leaves(tmp_path):
    layers = {f"h_{n}": np.ones(2) for n in range(40)}
    names = [f"misnamed {name}" for name in ("a", "b", "c")]
    ta.save(tmp_path / "x", {"w": np.ones(2), "head": np.ones(3), "old": np.ones(1)})
    target = {"w": np.zeros(2), "head": np.zeros(4), **layers}
    target |= dict.fromkeys(names, np.zeros(1))
    with pytest.warns(ta.TreeAdaptWarning, match="Not loaded from") as caught:
        found = ta.load(tmp_path / "x", target, strict=False)
    assert found["w"].tolist() == [1, 1]
    assert found["head"] is target["head"]
    text = str(caught[0].message)
    for name in ("head", "h_{0..39}", *names):
        assert repr(name) in text.splitlines()[0]
    assert "'head': float64[3], the target has float64[4]" in text
    assert "migration=" not in text
    assert len(text) < 1_500
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ta.load(tmp_path / "x", target, where="w", strict=False)
        ta.load(tmp_path / "x", {"w": np.zeros(2)}, strict=False)  # leaves out others


@pytest.mark.slow
def test_a_load_that_fits_nowhere_names_what_helps(tmp_path):
    params = {"w": jnp.ones(2)}
    ta.save(tmp_path / "x", params)
    with pytest.raises(ta.CheckpointError, match="Pass migration= to give") as caught:
        ta.load(tmp_path / "x", {"kernel": jnp.ones(2)})
    assert "carry_state" not in str(caught.value)
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(tmp_path / "x", {"w": jnp.ones(2, jnp.bfloat16)})
    assert "migration=" not in str(caught.value)
    state = {"params": params, "opt": optax.adam(1e-3).init(params)}
    ta.save(tmp_path / "y", state)
    other = {"params": params, "opt": optax.sgd(1e-3, momentum=0.9).init(params)}
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(tmp_path / "y", other)
    text = "'opt/0/trace/w' is in the state of an optimizer: treeadapt.carry_state"
    assert text in str(caught.value)
    with pytest.warns(ta.TreeAdaptWarning, match="carry_state"):
        ta.load(tmp_path / "y", other, strict=False)


@pytest.mark.slow
def test_carry_state_takes_a_state_in_boxes(tmp_path):
    optimizer = trained(net(0))
    path = by_orbax(tmp_path / "x", nnx.state(optimizer, nnx.optimizer.OptState))
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(path)
    tx = ta.adapt(optax.adam(1e-1))
    state, report = ta.carry_state(tx, net(0), saved)
    assert (report.fresh, report.left_over) == ((), ("step",))
    same(state[0].mu, nnx.state(optimizer)["opt_state"][0].mu)
    assert int(state[0].count) == 1


@pytest.mark.slow
def test_carry_state_takes_a_state_of_linen_boxes(tmp_path):
    tx = optax.adam(1e-1)
    params = linen(0)
    _, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", state)
        checkpointer.wait_until_finished()
        saved = checkpointer.restore(tmp_path / "x")
    again, report = ta.carry_state(tx, params, saved)
    assert (report.fresh, report.left_over) == ((), ())
    same(again, state)


@pytest.mark.slow
def test_the_commands_show_the_paths_of_the_model(tmp_path):
    by_orbax(tmp_path / "x", nnx.state(net(0)))
    by_orbax(tmp_path / "linen", linen(0))
    ta.save(tmp_path / "plain", net(0))
    ta.save(tmp_path / "linen.safetensors", linen(0))
    rules = tmp_path / "rules.toml"
    rules.write_text('version = 1\n[rules]\nkernel = "a"\nbias = "b"\n')
    note = "left out /value, the name of what is in a box, from 2 paths."
    for command in (("show",), ("lint", "--rules", rules)):
        result = invoke(command[0], tmp_path / "x", *command[1:])
        assert result.exit_code == 0
        assert note in result.stderr
        assert "value" not in result.stdout
    for command in (
        ("diff", tmp_path / "x", tmp_path / "plain", "--values"),
        ("diff", tmp_path / "plain", tmp_path / "x"),
        ("diff", tmp_path / "x", tmp_path / "x", "--where", "kernel"),
        ("diff", tmp_path / "linen", tmp_path / "linen.safetensors"),
        ("convert", tmp_path / "x", tmp_path / "y.safetensors"),
    ):
        result = invoke(*command)
        assert result.exit_code == 0
        assert "left out /value" in result.stderr
    assert list(ta.read_metadata(tmp_path / "y.safetensors")) == ["bias", "kernel"]
