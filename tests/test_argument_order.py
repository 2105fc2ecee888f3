"""Arguments in another order: whichever two are swapped, the error names the order.

Each row is a right call; the test swaps each pair of its arguments. Where a call cannot
be told from a right one (two trees, two functions), the row says so.
"""

from __future__ import annotations

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeadapt as ta

PARAMS = {"encoder": {"kernel": jnp.ones((3, 4))}, "head": jnp.ones(4)}
RULES = ta.Rules({"encoder": "a", "**": "b"})
TEXTS = {"encoder": "a", "**": "b"}
SPECS = {"**": jax.sharding.PartitionSpec()}
TX = optax.adam(1e-3)
STATE = TX.init(PARAMS)
SPLIT = ta.split(PARAMS)
FREE = optax.contrib.schedule_free_sgd(0.1).init(PARAMS)
MESH = jax.sharding.AbstractMesh((1,), ("data",))
MIGRATION = ta.Migration({"encoder/{k}": "enc/{k}", "head": "h"})


def _double(x):
    return x * 2


CALLS = [
    ("split", (PARAMS, "encoder")),
    ("split", (PARAMS, ta.glob("encoder"))),
    ("split", (PARAMS, ["encoder", "!head"])),
    ("map_where", (_double, PARAMS, "encoder")),
    ("map_where", (_double, PARAMS, ta.glob("encoder"))),
    ("merge", SPLIT),
    ("param_labels", (PARAMS, RULES)),
    ("param_labels", (PARAMS, TEXTS)),
    ("param_labels", (PARAMS, [*TEXTS.items()])),
    ("param_mask", (PARAMS, "encoder")),
    ("param_mask", (PARAMS, ta.glob("encoder") | "head")),
    ("partition", ({"a": TX, "b": TX}, TEXTS)),
    ("partition", ({"a": TX, "b": TX}, RULES)),
    ("freeze", (TX, "encoder")),
    ("carry_state", (TX, PARAMS, STATE)),
    ("tree_norms", (PARAMS, RULES)),
    ("tree_norms", (PARAMS, TEXTS)),
    ("partition_specs", (PARAMS, SPECS)),
    ("partition_specs", (PARAMS, ta.Rules(SPECS))),
    ("partition_specs", (PARAMS, {"encoder": ("x", None), "**": (None,)})),
    ("named_shardings", (PARAMS, SPECS, MESH)),
    ("named_shardings", (PARAMS, ta.Rules(SPECS), MESH)),
    ("opt_state_shardings", (TX, PARAMS)),
    ("init_sharded", (TX, PARAMS)),
    ("summarize", (PARAMS, RULES)),
    ("summarize", (PARAMS, TEXTS)),
    ("per_layer", (TX, {"encoder": 0})),
    ("tree_get", (STATE, "mu")),
    ("schedule_free_eval_params", (FREE, PARAMS)),
    ("tree_map_params", (TX, _double, STATE)),
    ("find_wrong_rows", (MIGRATION, PARAMS, MIGRATION(PARAMS), _double, _double)),
    ("save", ("model.safetensors", PARAMS)),
    ("load", ("model.safetensors", PARAMS)),
    ("compare_checkpoint", ("model.safetensors", PARAMS)),
]
#: Two trees, two functions, two values: either order may be meant.
ALIKE = {
    ("find_wrong_rows", 1, 2): "two trees",
    ("find_wrong_rows", 1, 4): "a function may be called as a tree is",
    ("find_wrong_rows", 2, 4): "a function may be called as a tree is",
    ("find_wrong_rows", 3, 4): "two functions",
}
#: Functions of two trees, of one argument, or without a tree.
OTHERS = (
    "adapt apply_updates draft_migration escape from_flat_dict from_state_dict glob "
    "incremental_update inject_hyperparams leaf lift load_migration load_optimizer "
    "load_rules node read_metadata register scale_by_rules schedule set_opt_state "
    "shard_largest to_flat_dict to_state_dict tree_diff tree_paths tree_set "
    "value_and_grad_from_state match_models load_torch_state"
)


def test_every_public_function_is_tried():
    functions = {name for name in ta.__all__ if inspect.isfunction(getattr(ta, name))}
    assert functions <= {name for name, _ in CALLS} | {*OTHERS.split()}


SWAPS = [
    (name, arguments, *pair)
    for name, arguments in CALLS
    for pair in itertools.combinations(range(len(arguments)), 2)
    if (name, *pair) not in ALIKE
]


@pytest.mark.parametrize(("name", "arguments", "one", "two"), SWAPS)
def test_each_pair_of_arguments_swapped_names_the_order(name, arguments, one, two):
    swapped = [*arguments]
    swapped[one], swapped[two] = swapped[two], swapped[one]
    with pytest.raises(ta.TreeAdaptError) as caught:
        getattr(ta, name)(*swapped)
    order = [*inspect.signature(getattr(ta, name)).parameters][: len(arguments)]
    text = str(caught.value)
    assert "Array(" not in text
    assert len(text) < 600
    is_named = f"({', '.join(order[:2])}" in text or "First comes" in text
    assert is_named, f"{order} is not in: {text}"


LABELS = {"encoder": {"kernel": "a"}, "head": "b"}


@pytest.mark.parametrize("tree", [LABELS, {"encoder": "a", "head": "b"}, {}, [], None])
@pytest.mark.parametrize("rules", [RULES, TEXTS, {"**": np.float32(0.5)}])
def test_trees_of_labels_and_empty_trees_are_taken(tree, rules):
    rules = ta.Rules(rules, unused="ignore")
    labels = ta.param_labels(tree, rules)
    assert ta.tree_paths(labels) == ta.tree_paths(tree)
    ta.summarize(tree, rules)
    ta.tree_norms(tree, RULES)
    ta.split(tree, "**")
    ta.param_mask(tree, ["**"])
    ta.map_where(_double, tree, "**")


def test_rules_that_give_arrays_may_be_asked_about_texts():
    factors = {"**": jnp.ones(2)}
    assert ta.param_labels({"a": "x"}, factors)["a"] is factors["**"]
    assert ta.partition_specs({"a": "x"}, SPECS)
