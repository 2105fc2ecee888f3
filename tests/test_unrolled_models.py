"""Rules with stacks on the unrolled model: they decide as without stacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from scanned import BY_NAME, TWINS

import treeadapt as ta

every_twin = pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)


def layers(count, **shapes):
    return [
        {name: jnp.zeros(shape) for name, shape in shapes.items()} for _ in range(count)
    ]


@every_twin
def test_rules_with_stacks_serve_the_unrolled_model(twin):
    rules = ta.Rules({"**/*{1,3}/**": "odd", "**": "even"}, stacks=twin.stacks)
    tree = twin.unrolled()
    found = rules.match(tree)
    plain = ta.Rules(rules.pairs).match(tree)
    assert found.paths == plain.paths
    assert found.values == plain.values
    assert ta.param_labels(tree, rules)  # no array is cut
    of_layers = rules.match(twin.scanned())
    arrays = [dict(zip(m.paths, m.values, strict=True)) for m in (found, of_layers)]
    assert arrays[0] == arrays[1]


def test_an_unrolled_model_may_lack_the_axis_of_the_stack():
    rules = ta.Rules({"blocks/{0..1}": "a", "**": "b"}, stacks={"blocks": 1})
    assert rules.match({"blocks": layers(3, w=(5,))}).values == ["a", "a", "b"]


def test_an_exception_below_an_unrolled_stack_need_not_match():
    stacks = {"blocks": 0, "blocks/rngs": None}
    rules = ta.Rules({"**": "a"}, stacks=stacks)
    assert len(rules.match({"blocks": layers(2, w=(5, 7), b=(7,))}).paths) == 4


@pytest.mark.parametrize(
    "blocks",
    [
        layers(2, w=(5, 7), b=(7,))[1:] + [{"w": jnp.zeros((5, 9)), "b": jnp.zeros(7)}],
        {"1": {"w": jnp.zeros((5, 7)), "b": jnp.zeros(7)}},
        {"0": {"w": jnp.zeros((5, 7)), "b": jnp.zeros(7)}, "scale": jnp.zeros(9)},
    ],
    ids=["other shapes", "no layer 0", "an array beside"],
)
def test_numbers_alone_do_not_make_a_tree_the_unrolled_model(blocks):
    rules = ta.Rules({"**": "a"}, stacks={"blocks": 0})
    with pytest.raises(ta.StackError, match="disagree in their number of layers"):
        rules.match({"blocks": blocks})


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


@pytest.mark.parametrize("name", ["Linen, boxes", "nnx", "dict of experts", "ensemble"])
def test_optimizers_of_rules_and_stacks_run_on_the_unrolled_model(
    name, standard_promotion
):
    del standard_promotion
    twin = BY_NAME[name]
    tree = ta.split(twin.unrolled())[0]
    table = {"**/*1/**": "slow", "**": "fast"}
    made = [
        optax.chain(
            ta.partition({"slow": optax.sgd(0.5), "fast": optax.adam(0.1)}, rules),
            ta.scale_by_rules(ta.Rules([("**/*1/**", 0.0), ("**", 2.0)], **stacks)),
            last,
        )
        for rules, stacks, last in (
            (ta.Rules(table), {}, ta.adapt(optax.scale_by_trust_ratio())),
            (
                ta.Rules(table, stacks=twin.stacks),
                {"stacks": twin.stacks},
                ta.per_layer(optax.scale_by_trust_ratio(), twin.stacks),
            ),
        )
    ]
    plain, stacked = (tx.update(tree, tx.init(tree), tree)[0] for tx in made)
    assert not ta.tree_diff(plain, stacked, values=True)
