"""Common mistakes: the error says what to write instead.

Where that is all that is asked, a mistake is a row of ``refusals.txt``.
"""

from __future__ import annotations

import pickle
import types
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import treeadapt as ta

PARAMS = {"a": {"w": jnp.ones(2)}, "b": jnp.ones(3)}
ADAM = optax.adam(1e-3)
SPEC = jax.sharding.PartitionSpec()

# What rows of ``refusals.txt`` are about.
LARGE = {f"layer_{n}": jnp.ones((40, 40)) for n in range(60)}
STATE = ADAM.init(LARGE)
RULES = {"**": "fast"}
REF = {"net": {"w": jax.new_ref(jnp.ones(2)), "b": jnp.ones(2)}}
WHOLE_TREE = eqx.is_inexact_array
FILE = Path("agent.safetensors")


def test_lift_takes_a_mask_with_the_functions_of_a_model_in_it():
    mask = ta.lift({"a": True, "b": False, "act": jax.nn.relu})
    assert mask(PARAMS | {"act": jax.nn.relu})["a"] == {"w": True}


def test_lift_takes_labels_that_are_numbers():
    assert ta.lift({"a": 1, "b": 2})(PARAMS) == {"a": {"w": 1}, "b": 2}


@pytest.mark.parametrize(
    "cls",
    [
        *(object, int, bool, str, bytes, type(None), type, np.ndarray, np.float32),
        *(jax.Array, jax.ShapeDtypeStruct, types.FunctionType, types.ModuleType),
    ],
)
def test_a_class_of_values_is_not_registered_by_fields(cls):
    with ta.default_registry.copy().use() as registry:
        with pytest.raises(ta.AdapterError, match="is a leaf and holds no children"):
            ta.register(cls, fields=("real",))
        assert registry.entries == ta.default_registry.entries


def test_lookahead_slots_are_found_without_a_warning(caplog):
    tx = ta.adapt(optax.lookahead(ADAM, 2, 0.5))
    params = optax.LookaheadParams.init_synced(PARAMS)
    state = tx.init(params)
    _, report = ta.carry_state(tx, params, state)
    assert not report.fresh
    ta.tree_map_params(tx, lambda leaf: leaf, state)
    assert "fast" not in caplog.text


def test_a_misspelt_name_is_suggested_for_one_missing_leaf(tmp_path):
    target = {f"hidden_{i}": {"bias": np.ones(3)} for i in range(2)}
    given = {"hidden_0/bais": np.ones(3)}
    with pytest.raises(ta.StructureMismatchError) as caught:
        ta.from_flat_dict(target, given)
    assert str(caught.value).count("the dict has 'hidden_0/bais'") == 1
    assert "missing 'hidden_0/bias' (the dict has" in str(caught.value)
    ta.save(tmp_path / "x.safetensors", given)
    told = str(ta.compare_checkpoint(tmp_path / "x.safetensors", target))
    assert told.count("stored is 'hidden_0/bais'") == 1


def test_the_suggested_selector_selects_the_intended_leaves():
    mask = {"a": {"w": True, "[b]": False}, "*": True}
    tree = jax.tree.map(lambda yes: jnp.ones(2), mask)
    paths = [ta.escape(path) for path, yes in ta.to_flat_dict(mask).items() if yes]
    assert ta.param_mask(tree, paths) == mask


@pytest.mark.parametrize("norm", [ta.node(nnx.BatchNorm), ta.glob("**/<BatchNorm>")])
def test_the_error_for_a_class_that_a_state_has_lost_names_the_model(norm):
    model = nnx.Sequential(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    )
    with pytest.raises(ta.UnusedRuleError, match=r"'State'.*decide on that: \.bind"):
        nnx.Optimizer(model, ta.freeze(ADAM, norm), wrt=nnx.Param)
    tx = ta.freeze(ADAM, norm.bind(model))
    state = nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state
    assert len(jax.tree.leaves(state[0].mu)) == 2


# Errors as data: all paths, however many the message shows.


MANY = {f"l{n}": {"kernel": jnp.ones(2), "bias": jnp.ones(2)} for n in range(40)}
KERNELS = {f"l{n}/kernel" for n in range(40)}
BIASES = {f"l{n}/bias" for n in range(40)}
WITHOUT_BIASES = {path: jnp.ones(2) for path in KERNELS}


def _freeze_check():
    spec = ta.FreezeSpec("**/bias").bind(MANY)
    spec.check({name: {"b": layer["bias"]} for name, layer in MANY.items()})


@pytest.mark.parametrize(
    ("call", "paths"),
    [
        (lambda: ta.param_labels(MANY, {"**/bias": 1}), KERNELS),
        (lambda: ta.param_labels(MANY, {"**/bias": 1, "typo": 2}), KERNELS),
        (lambda: ta.from_flat_dict(MANY, WITHOUT_BIASES), BIASES),
        (lambda: ta.from_state_dict(MANY, {**MANY, "x": {"y": 1.0}}), {"x/y"}),
        (
            lambda: ta.merge(WITHOUT_BIASES, ta.split(MANY, "**/bias")[1]),
            KERNELS | BIASES,
        ),
        (
            lambda: ta.param_labels(
                MANY, ta.Rules({"**/bias": 1, "**": 2}, overlap="error")
            ),
            BIASES,
        ),
        (_freeze_check, BIASES),
        (lambda: ta.glob("**/bias").bind(MANY)({"z": jnp.ones(1)}), {"z"}),
        (lambda: ta.Migration({"{n}/bias": "{n}/b"})(MANY), KERNELS),
        (
            lambda: ta.Migration({"{n}/{k}": "{n}/{k}"})(
                WITHOUT_BIASES, target=WITHOUT_BIASES | {"z": jnp.ones(1)}
            ),
            {"z"},
        ),
        (lambda: ta.partition_specs(MANY, {"**/bias": SPEC}), KERNELS),
        (lambda: ta.apply_updates(MANY, {"z": jnp.ones(1)}), {"z"}),
        (lambda: ta.lift({"z": True, **dict.fromkeys(MANY, False)})(MANY), {"z"}),
        (lambda: ta.tree_paths({"a/b": 1.0, "a": {"b": 2.0}}), {"a/b"}),
    ],
)
def test_an_error_has_all_paths_that_it_is_about(call, paths):
    with pytest.raises(ta.TreeAdaptError) as caught:
        call()
    assert set(caught.value.paths) == paths
    assert len(caught.value.paths) == len(paths)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.paths) == (str(caught.value), caught.value.paths)


def test_an_error_about_patterns_has_them():
    table = {"typo": 1, dict: 2, "l1": 3, ("l0/*", "!l0/x"): 4, "**/{l2,l3}/*": 5}
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.param_labels(MANY, table)
    assert caught.value.patterns == ("typo", "!l0/x", "l1", "**/{l2,l3}/*")
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.split(MANY, ["x{0..3}", tuple, "!y"])
    assert caught.value.patterns == ("x{0..3}", "node(tuple)", "!y")
    assert pickle.loads(pickle.dumps(caught.value)).patterns == caught.value.patterns


def test_an_error_about_a_migration_has_its_problems(tmp_path):
    table = {"{n}/bias : d": "{n}/b : d", "z : a b": "y : b a"}
    with pytest.raises(ta.MigrationError) as caught:
        ta.Migration(table)(MANY)
    problems = caught.value.problems
    assert [one.paths for one in problems if one.kind == "unmatched"] == [
        (path,) for path in ta.tree_paths(MANY) if path in KERNELS
    ]
    assert [one.row for one in problems if one.kind == "unused"] == ["z : a b"]
    ta.save(tmp_path / "m.safetensors", MANY)
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(tmp_path / "m.safetensors", MANY, migration=ta.Migration(table))
    assert set(caught.value.paths) >= KERNELS
    assert {one.kind for one in caught.value.problems} == {"unmatched", "unused"}
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(
            tmp_path / "m.safetensors",
            {name: {"b": 1} for name in MANY} | {"c": jnp.ones(1)},
        )
    assert set(caught.value.paths) == KERNELS | BIASES | {"c"}


@pytest.mark.slow
def test_a_state_of_arrays_that_change_in_place_is_named():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    state = jax.tree.map(jax.new_ref, ta.tree_set(optimizer, count=3))
    with pytest.raises(ta.TransformError, match=r"'0/mu/kernel', .* are Refs, which"):
        ta.set_opt_state(optimizer, state)
