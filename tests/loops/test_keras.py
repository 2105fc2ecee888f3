"""Keras models on JAX: their page, their names, and loops with their variables.

Variables in a dict keep the laws of adapters; a model is read, and never rebuilt.
"""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_pages import REPOSITORY, run_page

import treeadapt as ta
from treeadapt.testing import check_adapter

os.environ["KERAS_BACKEND"] = "jax"
keras = pytest.importorskip("keras", reason="keras is NOT INSTALLED")

PAGE = "docs/libraries/keras.md"
STEPS = 3


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(3, name="encoder"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, seed=0, name="drop"),
            keras.layers.Dense(1, name="head"),
        ],
        name="net",
    )


def variables(model):
    return {v.path: v for v in model.variables}


def test_the_page_runs(monkeypatch):
    run_page(PAGE, (REPOSITORY / PAGE).read_text("utf-8"), monkeypatch)


def test_a_model_and_a_dict_of_its_variables_have_the_paths_of_keras(model):
    paths = tuple(v.path for v in model.variables)
    assert "net/encoder/kernel" in paths
    assert ta.tree_paths(model) == paths
    assert ta.tree_paths(variables(model)) == tuple(sorted(paths))
    for path, value in ta.to_flat_dict(model).items():
        assert value is variables(model)[path].value
    assert ta.tree_paths({"actor": model})[0] == "actor/net/encoder/kernel"
    assert ta.tree_paths(model.layers[0]) == paths[:2]


def test_only_what_keras_trains_trains(model):
    assert list(ta.split(model)[0]) == [v.path for v in model.trainable_variables]
    model.layers[0].trainable = False
    assert list(ta.split(model)[0]) == [v.path for v in model.trainable_variables]
    model.get_layer("head").bias.trainable = False
    assert set(ta.split(variables(model))[0]) == {
        "net/norm/gamma",
        "net/norm/beta",
        "net/head/kernel",
    }


def test_variables_in_a_dict_keep_the_laws(model):
    check_adapter(variables(model))
    check_adapter(model.variables)
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    check_adapter(variables(optimizer))
    assert ta.tree_paths(optimizer) == tuple(v.path for v in optimizer.variables)


def test_a_variable_comes_back_as_a_new_one_that_keras_takes(model):
    tree = variables(model)
    again = ta.merge(*ta.split(tree, "net/head"))
    for path, v in again.items():
        assert type(v) is type(tree[path])
        assert v is not tree[path]
        assert (v.path, v.shape, v.dtype) == (path, tree[path].shape, tree[path].dtype)
    outs = [
        model.stateless_call(
            [tree[v.path] for v in model.trainable_variables],
            [tree[v.path] for v in model.non_trainable_variables],
            jnp.ones((1, 2)),
        )[0]
        for tree in (tree, again)
    ]
    assert np.array_equal(*outs)


def test_a_variable_knows_the_shape_and_dtype_of_its_new_value(model):
    v = model.get_layer("head").kernel
    wide = jnp.zeros((4, 2, 1), jnp.bfloat16)
    again = ta.from_flat_dict({"v": v}, {"v": wide}, strict=False)["v"]
    assert (again.shape, again.ndim, again.dtype) == (wide.shape, 3, "bfloat16")
    assert (v.shape, v.dtype) == ((3, 1), "float32")


def test_one_variable_under_two_paths_is_one_leaf(model):
    v = model.get_layer("head").kernel
    tree = {"a": v, "b": v}
    assert ta.tree_paths(tree) == ("a",)
    again = ta.from_flat_dict(tree, {"a": jnp.ones((3, 1))})
    assert again["a"] is again["b"]
    assert ta.tree_paths([model, model]) == ta.tree_paths([model])


def test_layers_of_one_path_are_a_collision():
    class Two(keras.Model):
        def __init__(self):
            super().__init__(name="two")
            self.first = keras.layers.Dense(2, name="same")
            self.second = keras.layers.Dense(2, name="same")

        def call(self, inputs):
            return self.second(self.first(inputs))

    model = Two()
    model(jnp.ones((1, 2)))
    for read in (ta.tree_paths, ta.to_flat_dict, ta.split):
        with pytest.raises(ta.PathCollisionError, match="two/same/kernel"):
            read(model)


def test_a_model_without_variables_yet_is_an_error(model):
    with pytest.raises(ta.AdapterError, match="'new' is not built"):
        ta.tree_paths(keras.Sequential([keras.layers.Dense(2)], name="new"))
    flatten = keras.layers.Flatten()
    flatten(jnp.ones((1, 2)))
    assert ta.tree_paths({"flatten": flatten}) == ()


def test_a_model_is_not_rebuilt_and_says_what_to_do(model, tmp_path):
    file = tmp_path / "net.safetensors"
    ta.save(file, model)
    params, rest = ta.split(model)
    for rebuild in (
        lambda: ta.merge(params, rest),
        lambda: ta.from_flat_dict(model, ta.to_flat_dict(model)),
        lambda: ta.load(file, target=model),
        lambda: ta.param_labels(model, {"**": "train"}),
    ):
        with pytest.raises(ta.AdapterError, match="stateless_call"):
            rebuild()
    with pytest.raises(ta.TransformError, match="the plain dict"):
        ta.adapt(optax.sgd(0.1)).init(model)
    saved = ta.to_flat_dict(ta.load(file))
    for v in model.variables:
        assert np.array_equal(saved[v.path], v.value)


def train(model, tx, state=None):
    """Train with Optax, through ``stateless_call``; return params and state."""
    values = ta.to_flat_dict(model)
    params, _ = ta.split(model)
    xs = jnp.linspace(-1, 1, 8).reshape(4, 2)

    def loss(params):
        out, _ = model.stateless_call(
            [params[v.path] for v in model.trainable_variables],
            [values[v.path] for v in model.non_trainable_variables],
            xs,
        )
        return jnp.mean((out - 1) ** 2)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params) if state is None else state
    for _ in range(STEPS):
        params, state = step(params, state)
    return params, state


def test_partition_gives_the_bits_of_optax_and_its_state_goes_to_a_file(
    model, tmp_path
):
    groups = {"fast": optax.adam(1e-1), "slow": optax.adam(1e-3)}
    tx = ta.partition(
        groups, {"net/encoder": "frozen", "net/head": "fast", "**": "slow"}
    )
    label = {"encoder": "frozen", "head": "fast", "norm": "slow"}
    theirs = optax.partition(
        {**groups, "frozen": optax.set_to_zero()},
        lambda params: {path: label[path.split("/")[1]] for path in params},
    )
    before = ta.to_flat_dict(model)
    params, state = train(model, tx)
    expected, _ = train(model, theirs)
    assert params.keys() == expected.keys()
    for path, value in params.items():
        assert np.array_equal(value, expected[path])
        assert np.array_equal(value, before[path]) is ("encoder" in path)
    file = tmp_path / "state.safetensors"
    ta.save(file, state)
    loaded = ta.load(file, target=state)
    again, once_more = train(model, tx, loaded)[0], train(model, tx, state)[0]
    assert all(np.array_equal(again[path], once_more[path]) for path in again)


def test_a_misspelt_rule_never_trains(model):
    tx = ta.partition({"train": optax.sgd(1.0)}, {"net/haed": "frozen", "**": "train"})
    with pytest.raises(ta.UnusedRuleError, match="net/head"):
        train(model, tx)


def test_where_variables_are_those_of_nnx_too_nothing_changes():
    pytest.importorskip("flax")
    code = """
import keras
import treeadapt as ta
from flax import nnx
model = keras.Sequential(
    [keras.Input((2,)), keras.layers.BatchNormalization(name="norm")], name="net"
)
tree = {v.path: v for v in model.variables}
assert all(isinstance(v, nnx.Variable) for v in tree.values())
assert ta.tree_paths(model) == tuple(tree)
for params in (ta.split(model)[0], ta.split(tree)[0]):
    assert sorted(params) == ["net/norm/beta", "net/norm/gamma"]
again = ta.merge(*ta.split(tree))
assert {path: v.path for path, v in again.items()} == {path: path for path in tree}
"""
    env = {**os.environ, "KERAS_NNX_ENABLED": "true"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, check=True)


def test_the_adapter_is_loaded_with_keras_alone():
    code = """
import sys
import jax.numpy as jnp
import treeadapt as ta
ta.tree_paths({"w": jnp.ones(2)})
assert not {"keras", "treeadapt.trees.adapters.keras"} & set(sys.modules)
import keras
layer = keras.layers.Dense(1, name="late")
layer(jnp.ones((1, 2)))
assert ta.tree_paths(layer) == ("late/kernel", "late/bias")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
