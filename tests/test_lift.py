"""``lift``: any mask or label function decides on the caller's whole tree."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from inside import inside
from trees import TREES, LayerTuple, ModelTuple, mlp, two_layers

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Mask functions use JAX's tree map, which cannot rebuild two of the rows.
BROKEN = ("NamedTuple of its own making", "doubling dataclass")
MAPS = [row for row in TREES if row.paths and not row.opaque and row.name not in BROKEN]
TRAINS = [row for row in MAPS if not row.warns]


def matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


@pytest.mark.parametrize("row", TRAINS, ids=lambda row: row.name)
def test_a_function_gets_the_callers_tree_and_answers_for_the_flat_one(row):
    tree, seen = row.make(), []

    def ask(whole):
        seen.append(whole)
        return matrices(whole)

    mask = ta.lift(ask)
    flat = ta.split(tree)[0]
    answers = inside(tree, mask)
    assert answers == {path: x.ndim > 1 for path, x in flat.items()}
    assert all(type(answer) is bool for answer in answers.values())
    assert [type(whole) for whole in seen] == [type(tree)]


@pytest.mark.parametrize("row", TRAINS, ids=lambda row: row.name)
def test_outside_it_answers_with_the_treedef_of_its_argument(row):
    tree = row.make()
    mask = ta.lift(matrices)(tree)
    assert jax.tree.structure(mask) == jax.tree.structure(tree)
    flat = ta.split(tree)[0]
    assert ta.lift(matrices)(flat) == matrices(flat)


@pytest.mark.hazard("B14")
def test_a_tree_of_answers_may_have_any_containers_and_be_a_prefix():
    model = two_layers(ModelTuple, LayerTuple)
    want = ModelTuple(LayerTuple(True, True), LayerTuple(True, False))
    for tree in (
        want,
        {"hidden": True, "out": {"w": True, "b": False}},
        {"hidden": {"w": True, "b": True}, "out/w": True, "out/b": False},
        ModelTuple(True, LayerTuple(True, False)),
        two_layers(ModelTuple, lambda w, b: LayerTuple(True, True))._replace(
            out=LayerTuple(True, False)
        ),
    ):
        assert ta.lift(tree)(model) == want
    assert ta.lift("all")(model) == two_layers(
        ModelTuple, lambda w, b: LayerTuple("all", "all")
    )
    nearest = ta.lift({"out": "far", "out/w": "near", "hidden": "far"})
    assert nearest(model).out == LayerTuple("near", "far")


def test_static_leaves_need_no_answer_and_functions_do_not_see_them():
    model = mlp()
    params = eqx.filter(model, eqx.is_array)
    for asked in (matrices, matrices(params)):
        mask = ta.lift(asked)(model)
        assert mask.layers[0].weight is True
        assert mask.activation is False
    labels = jax.tree.map(lambda x: "wide" if x.ndim > 1 else "thin", params)
    assert ta.lift(labels)(model).activation is ta.STATIC


class AtLeast(eqx.Module):
    """A mask function that is a module with a setting."""

    ndim: Any = eqx.field(static=True)

    def __call__(self, tree):
        return jax.tree.map(lambda x: x.ndim >= self.ndim, tree)


class Threshold(eqx.Module):
    """A mask function that is a module with an array."""

    ndim: jax.Array

    def __call__(self, tree):
        return jax.tree.map(lambda x: x.ndim > 1, tree)


@pytest.mark.parametrize(
    "asked",
    [
        matrices,
        AtLeast(2),
        Threshold(jnp.array(2)),
        jax.tree_util.Partial(matrices),
        ta.leaf(ndim=2),
        ta.Rules([(ta.leaf(ndim=2), True), ("**", False)]),
        ta.lift(matrices),
    ],
    ids=lambda asked: type(asked).__name__,
)
def test_functions_of_every_kind_are_called(asked):
    mask = ta.lift(asked)({"a": jnp.ones((2, 2)), "b": jnp.ones(2)})
    assert mask == {"a": True, "b": False}


@pytest.mark.parametrize(
    "tree",
    [
        eqx.tree_at(lambda m: m.activation, jax.tree.map(lambda x: True, mlp()), False),
        {"a": True},
        "label",
        jax.tree.map(lambda x: "label", mlp()),
        jax.tree.map(lambda x: np.bool_(True), mlp()),
        jax.tree.map(lambda x: jnp.array(True), mlp()),
    ],
    ids=["module of bools", "dict", "string", "module of labels", "numpy", "jax"],
)
def test_callable_trees_of_answers_are_not_called(tree):
    params = mlp() if isinstance(tree, eqx.Module) else {"a": jnp.ones(2)}
    answers = ta.to_flat_dict(ta.lift(tree)(params))
    arrays, _ = ta.split(params)
    answer, *_ = jax.tree.leaves(tree)
    assert all(answers[path] == answer for path in arrays)


def test_lifting_twice_is_lifting_once():
    mask = ta.lift(matrices)
    assert ta.lift(mask) is mask
    assert repr(ta.lift({"a": True})) == "lift({'a': True})"


@pytest.mark.parametrize("number", [0, 1.5, jnp.array(3), np.int32(2)])
def test_it_is_not_a_schedule(number):
    with pytest.raises(ta.SelectorError, match=r"treeadapt\.inject_hyperparams"):
        ta.lift(matrices)(number)


def test_optax_accepts_it_wherever_it_accepts_a_mask_or_labels():
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
    mask = ta.lift(matrices)
    assert optax.adamw(0.1, mask=mask).init(params)
    masked = optax.masked(optax.scale(2.0), mask)
    updates, _ = masked.update(params, masked.init(params))
    assert (updates["a"][0, 0], updates["b"][0]) == (2, 1)
    labels = ta.lift({"a": "x", "b": "y"})
    grouped = optax.multi_transform(
        {"x": optax.scale(2.0), "y": optax.scale(3.0)}, labels
    )
    updates, _ = grouped.update(params, grouped.init(params))
    assert (updates["a"][0, 0], updates["b"][0]) == (2, 3)


def test_missing_and_unused_answers_are_named():
    params = {"a": jnp.ones(2), "b": {"c": jnp.ones(2)}}
    with pytest.raises(ta.UnmatchedPathError, match="'b/c'"):
        ta.lift({"a": True})(params)
    with pytest.raises(ta.UnmatchedPathError, match="'b/c'"):
        ta.lift({"a": True, "b": None})(params)
    with pytest.raises(ta.UnusedRuleError, match=r"^1 mask or .*'b/d'.*tree_paths"):
        ta.lift({"a": True, "b/c": True, "b/d": True})(params)
    with pytest.raises(ta.UnusedRuleError, match=r"^2 masks or labels without"):
        ta.lift({"a": True, "b/c": True, "b/d": True, "b/e": True})(params)
    part = {"a": optax.MaskedNode(), "b": {"c": jnp.ones(2)}}
    assert ta.lift({"a": True, "b": True})(part)["b"] == {"c": True}


def test_an_answer_under_the_second_path_of_a_tied_leaf_has_a_use():
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.emb = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
            self.head = self.emb

    params = nnx.state(Tied())
    answers = {"emb/kernel": True, "head/kernel": True}
    assert ta.lift(answers)(Tied()).emb.kernel is not None
    assert ta.lift({"emb/kernel": True})(params)["emb"]["kernel"].get_value() is True
    with pytest.raises(ta.UnusedRuleError, match="'heads/kernel'"):
        ta.lift(answers | {"heads/kernel": True})(Tied())


def test_a_mask_of_a_raw_model_lifts_to_the_params_that_split_gives():
    model = mlp()
    params, _ = ta.split(model)
    mask = ta.lift(ta.param_mask(model, "**/weight"))
    assert mask(params) == {path: path.endswith("weight") for path in params}
    labels = ta.lift(ta.param_labels(model, {"layers": "train"}))
    assert labels(params) == dict.fromkeys(params, "train")
    with pytest.raises(ta.UnusedRuleError, match="'b/d'"):  # misspelt: 'b/c' gets True
        ta.lift({"b": True, "b/d": False})({"b/c": jnp.ones(2)})
