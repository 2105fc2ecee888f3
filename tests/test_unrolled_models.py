"""Which trees rules with stacks read as unrolled models, and which they refuse.

That they then decide as without stacks is law 12, in ``test_stacks_law``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import treeadapt as ta


def layers(count, **shapes):
    return [
        {name: jnp.zeros(shape) for name, shape in shapes.items()} for _ in range(count)
    ]


def test_an_unrolled_model_may_lack_the_axis_of_the_stack():
    rules = ta.Rules({"blocks/{0..1}": "a", "**": "b"}, stacks={"blocks": 1})
    assert rules.match({"blocks": layers(3, w=(5,))}).values == ["a", "a", "b"]


def test_an_exception_below_an_unrolled_stack_need_not_match():
    stacks = {"blocks": 0, "blocks/rngs": None}
    rules = ta.Rules({"**": "a"}, stacks=stacks)
    assert len(rules.match({"blocks": layers(2, w=(5, 7), b=(7,))}).paths) == 4


LAYER = {"w": jnp.zeros((5, 7)), "b": jnp.zeros(7)}


@pytest.mark.parametrize(
    "blocks",
    [
        [LAYER, {"w": jnp.zeros((5, 9)), "b": jnp.zeros(7)}],
        {"1": LAYER, "2": LAYER},
        {0: LAYER, 2: LAYER},
        {"0": LAYER, "scale": jnp.zeros(9)},
        {"0": LAYER, "norm": {"scale": jnp.zeros(5)}},
        [jnp.zeros(5), jnp.zeros(6)],
    ],
    ids=["shapes", "from 1", "a gap", "an array beside", "a node beside", "no names"],
)
def test_a_number_in_the_unrolled_form_says_that_a_tree_is_unrolled(blocks):
    tree = {"blocks": blocks, "head": jnp.zeros(5)}
    table = {"blocks/0": "frozen", "**": "train"}
    unrolled = ta.Rules(table, stacks={"blocks": 0}, unused="ignore").match(tree)
    plain = ta.Rules(table, unused="ignore").match(tree)
    assert (unrolled.paths, unrolled.values) == (plain.paths, plain.values)


def test_layers_of_an_unrolled_model_with_a_gap_are_frozen_as_wholes():
    params = {"blocks": {"0": LAYER, "2": LAYER}}
    rules = ta.Rules({"blocks/0": "frozen", "**": "train"}, stacks={"blocks": 0})
    tx = ta.partition({"train": optax.sgd(1.0)}, rules)
    state, grads = tx.init(params), jax.tree.map(jnp.ones_like, params)
    blocks = tx.update(grads, state, params)[0]["blocks"]
    assert not any(map(jnp.any, jax.tree.leaves(blocks["0"])))
    assert all(map(jnp.all, jax.tree.leaves(blocks["2"])))


@pytest.mark.parametrize("stack", [0, ("layers_{l}", 0)], ids=["a list", "Linen"])
def test_a_gap_does_not_hide_that_a_tree_fits_both_ways(stack):
    if stack == 0:
        tree = {
            "layers": {"0": {"w": jnp.zeros((4, 4))}, "2": {"w": jnp.zeros((4, 2))}}
        }
    else:
        tree = {"layers": {"w": jnp.zeros((4, 2))}, "layers_3": {"b": jnp.zeros(2)}}
    rules = ta.Rules({"**": "a"}, stacks={"layers": stack})
    with pytest.raises(ta.StackError, match="can be read in two ways"):
        rules.match(tree)


def test_only_the_place_of_the_unrolled_number_counts():
    table = ta.Rules({"blocks/{0..1}": "a", "**": "b"}, stacks={"blocks": 0})
    scanned = {"blocks": {"mlps": [{"w": jnp.zeros((3, 7))}, {"w": jnp.zeros((3, 5))}]}}
    paths = table.match(scanned).paths
    assert list(paths[:3]) == [f"blocks/{layer}/mlps/0/w" for layer in range(3)]
    deeper = {"model": {"blocks": layers(2, w=(5, 7), b=(7,))}}
    with pytest.raises(ta.StackError, match="matches nothing"):
        table.match(deeper)
    padded = {
        "blocks": {"00": {"w": jnp.zeros((3, 7))}, "01": {"w": jnp.zeros((3, 5))}}
    }
    assert table.match(padded).paths[0] == "blocks/0/00/w"
    linen = ta.Rules({"**": "a"}, stacks={"layers": ("layers_{l}", 0)})
    tree = {"layers": {"w": jnp.zeros((2, 7))}, "sublayers_3": {"w": jnp.zeros(7)}}
    paths = linen.match(tree).paths
    assert list(paths) == ["layers_0/w", "layers_1/w", "sublayers_3/w"]
    tree = {"layers_3": LAYER, "layers_5": LAYER}
    assert linen.match(tree).paths == ta.Rules({"**": "a"}).match(tree).paths


def test_of_nested_stacks_only_the_inner_one_may_be_unrolled():
    stacks = {"blocks": 0, "blocks/experts": 1}
    experts = [{"w": jnp.zeros((3, 7, 5))}, {"w": jnp.zeros((3, 6, 5))}]
    tree = {"blocks": {"scale": jnp.zeros((3, 9)), "experts": experts}}
    table = ta.Rules({"blocks/0/experts/1": "a", "**": "b"}, stacks=stacks)
    matches = table.match(tree)
    labels = dict(zip(matches.paths, matches.values, strict=True))
    assert len(labels) == 9
    assert labels["blocks/0/experts/1/w"] == "a"
    assert [*labels.values()].count("a") == 1
    tree["blocks"]["experts"][1]["w"] = jnp.zeros((3, 7, 4))
    with pytest.raises(ta.StackError, match="can be read in two ways"):
        table.match(tree)


def test_a_tree_that_fits_both_ways_is_an_error():
    tree = {"blocks": layers(2, w=(12, 64), b=(12,))}
    rules = ta.Rules({"blocks/0": "a", "**": "b"}, stacks={"blocks": 0})
    with pytest.raises(ta.StackError, match="can be read in two ways") as caught:
        rules.match(tree)
    assert "stacks={'blocks': ('blocks_{l}', 0)}" in str(caught.value)
    stacks = {"blocks": ("blocks_{l}", 0)}
    paths = ta.Rules({"**": "a"}, stacks=stacks).match(tree).paths
    assert len(paths) == 48
    assert "blocks_11/1/w" in paths


def test_a_half_unrolled_model_is_an_error():
    tree = {"blocks": layers(2, scale=(9,))}
    for layer in tree["blocks"]:
        layer["experts"] = {"w": jnp.zeros((3, 7, 5))}
    stacks = {"blocks": 0, "blocks/experts": 1}
    with pytest.raises(ta.StackError, match="matches nothing"):
        ta.Rules({"**": "a"}, stacks=stacks).match(tree)


def test_the_name_of_an_axis_says_which_way_a_tree_is_read():
    nn = pytest.importorskip("flax.linen")
    box = nn.Partitioned(jnp.zeros((12, 64)), ("layers", None))
    rules = ta.Rules({"**": "a"}, stacks={"blocks": "layers"})
    assert len(rules.match({"blocks": [box, box]}).paths) == 24
    box = nn.Partitioned(jnp.zeros((12, 64)), (None, None))
    assert len(rules.match({"blocks": [box, box]}).paths) == 2
    with pytest.raises(ta.StackError, match="has no box that names its axes"):
        rules.match({"blocks": [jnp.zeros((12, 64))] * 2})


def test_a_tree_without_arrays_is_not_called_unrolled():
    rules = ta.Rules({"**": "a"}, stacks={"blocks": 0})
    assert ta.summarize({"blocks": jax.nn.relu, "x": 1}, rules).notes == ()
