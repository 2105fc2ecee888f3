"""Rules with ``stacks``, as a user meets them: what is malformed, and what is awkward.

``test_stacks_law`` holds whole scanned models against their unrolled twins.
"""

from __future__ import annotations

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from scanned import TOKENS, LinenModel

import treeadapt as ta

#: The maths is that of Optax.
pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS = 4


def model(num_layers=LAYERS):
    w = np.arange(num_layers * 6, dtype=np.float32).reshape(num_layers, 2, 3)
    blocks = {"b": jnp.ones((num_layers, 3)), "w": jnp.asarray(w)}
    return {"blocks": blocks, "embed": jnp.ones((5, 2)), "head": jnp.ones(3)}


MODEL = model()
ONES = jax.tree.map(jnp.ones_like, MODEL)
LOWER = {"blocks/{0..1}": "frozen", "**": "train"}


def rules(table=LOWER, stacks=None, **options):
    return ta.Rules(
        table, stacks={"blocks": 0} if stacks is None else stacks, **options
    )


def frozen(table=LOWER):
    return rules(table).where("frozen")


def train(tx, where=LOWER):
    return ta.partition({"train": tx}, rules(where))


def step(tx, grads=ONES, params=MODEL, **extra):
    return tx.update(grads, tx.init(params), params, **extra)[0]


def first_column(updates):
    """One number of the update of each layer of a bias."""
    return updates["blocks"]["b"][:, 0].tolist()


def complains(fn, *texts, error=ta.StackError):
    with pytest.raises(error) as raised:
        fn()
    for text in texts:
        assert text in str(raised.value), str(raised.value)
    assert len(str(raised.value).encode()) <= 4096


# What is given.


@pytest.mark.parametrize(
    "given",
    [
        {"blocks": True},
        {"blocks": 1.5},
        {"blocks": ""},
        {"blocks": []},
        {"blocks": ("blocks_{l}",)},
        {"blocks": ("blocks", 0)},
        {"blocks": ("{a}/{b}", 0)},
        {"blocks": ("blocks_{l:**}", 0)},
        {"blocks": ("/blocks/{l}", 0)},
        {"blocks": ("blocks//{l}", 0)},
        {"blocks": ("blocks_{l}", None)},
        {"blocks": ("blocks_{l}", True)},
        {"blocks": (0, "blocks_{l}")},
        {"/blocks": 0},
        {"blocks/": 0},
        {7: 0},
        {"blocks": None},
        {"blocks": 0, "blocks/w": ("other/{e}", 1)},
        [("blocks", 0)],
        "blocks",
        0,
    ],
    ids=str,
)
def test_malformed_stacks_are_refused_at_once(given):
    complains(lambda: rules(stacks=given), "stack")


@pytest.mark.parametrize(
    ("stacks", "texts"),
    [
        ({"block": 0}, ["'block'", "matches nothing", "'blocks'?"]),
        ({"blocks/0": 0}, ["'blocks/0'", "without numbers of layers"]),
        ({"blocks/*": 0}, ["'blocks'?", "and not a pattern"]),
        ({"params/blocks": 0}, ["'params/blocks'", "'blocks'?"]),
        ({"blocks": 0, "blocks/x": None}, ["'blocks/x'", "matches nothing"]),
        ({"blocks": 2}, ["'blocks/b' float32[4,3] has no axis 2", "'blocks/b': None"]),
        ({"blocks": -3}, ["'blocks/b' float32[4,3] has no axis -3"]),
        (
            {"blocks": 2, "blocks/b": 1},
            ["change its entry to stacks={'blocks/b': None"],
        ),
        ({"blocks/b": 2}, ["change its entry to stacks={'blocks/b': None"]),
        (
            {"blocks": 1},
            [
                "'blocks/b' float32[4,3] has 3",
                "'blocks/w' float32[4,2,3] has 2",
                "None",
            ],
        ),
        ({"": 0}, ["''", "disagree", "'head' float32[3] has 3"]),
        ({"blocks": "layers"}, ["'blocks/b'", "no box", "'layers'", "number"]),
        ({"blocks": 0, "blocks/w": -3}, ["'blocks/w'", "axis 0", "two stacks"]),
        ({"": 0, "blocks": 1, "blocks/w": 0}, ["'blocks/w' and ''", "two stacks"]),
    ],
    ids=str,
)
def test_stacks_that_do_not_fit_the_tree_name_path_shape_and_fix(stacks, texts):
    table = rules({"**": 1}, stacks)
    complains(lambda: table.match(MODEL), *texts)
    tx = ta.partition({1: optax.sgd(1.0)}, table)
    complains(lambda: tx.init(MODEL), *texts)
    complains(lambda: jax.eval_shape(tx.init, MODEL), *texts)


def test_arrays_of_one_stack_that_disagree_are_named():
    tree = {"blocks": {**MODEL["blocks"], "short": jnp.ones((3, 3))}}
    table = rules({"**": 1})
    complains(
        lambda: table.match(tree),
        "'blocks'",
        "'blocks/short' float32[3,3] has 3",
        "has 4",
        "{'blocks/short': None}",
    )
    cured = rules({"**": 1}, {"blocks": 0, "blocks/short": None})
    assert "blocks/short" in cured.match(tree).paths


def test_an_array_without_layers_must_be_at_least_one():
    empty = {"blocks": {"w": jnp.ones((0, 3))}}
    complains(lambda: rules({"**": 1}).match(empty), "'blocks/w'", "no layer")


def test_an_axis_of_millions_is_refused_before_it_is_unrolled():
    tree = {"blocks": jax.ShapeDtypeStruct((2_000_000, 2), jnp.float32)}
    complains(lambda: rules({"**": 1}).match(tree), "2,000,000", "axis")


def test_layers_with_the_path_of_another_leaf_are_refused():
    tree = {"blocks": {"w": jnp.ones((2, 3))}, "blocks_0": {"w": 1.0}}
    table = rules({"**": 1}, {"blocks": ("blocks_{l}", 0)})
    complains(lambda: table.match(tree), "'blocks_0/w'", error=ta.PathCollisionError)


# What is equal, and what is written.


def test_rules_with_stacks_are_values():
    table = rules(stacks={"blocks": 0, "blocks/w": None})
    again = pickle.loads(pickle.dumps(table))
    assert again == table
    assert hash(again) == hash(table)
    assert again.match(MODEL).paths == table.match(MODEL).paths
    assert table == rules(stacks={"blocks/w": None, "blocks": 0})
    assert table not in [ta.Rules(LOWER), rules(), rules(stacks={"blocks": 1})]
    assert repr(table).endswith("stacks={'blocks': 0, 'blocks/w': None})")
    assert eval(repr(table), {"Rules": ta.Rules}) == table
    assert pickle.loads(pickle.dumps(table.where("train"))) == table.where("train")


def test_no_stacks_are_none_at_all():
    assert rules(stacks={}) == ta.Rules(LOWER)
    assert "stacks" not in repr(rules(stacks={})) + rules(stacks={}).to_toml()


@pytest.mark.parametrize(
    "stacks",
    [
        {"blocks": 0},
        {"blocks": -1},
        {"blocks": "layers"},
        {"": 0},
        {"blocks": ("blocks_{l}", 0), "blocks/w": None},
        {"blocks": 0, "blocks/experts": ("blocks/expert_{e}", "experts")},
        {'a "quoted" key': 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"default": "x", "overlap": "error"}], ids=str)
def test_rules_files_say_the_same(tmp_path, stacks, options):
    table = rules(LOWER, stacks, **options)
    file = tmp_path / "rules.toml"
    file.write_text(table.to_toml())
    assert ta.load_rules(file) == table
    assert ta.load_rules(file).to_toml() == table.to_toml()


def test_a_rules_file_may_be_json(tmp_path):
    file = tmp_path / "rules.json"
    file.write_text(
        '{"version": 1, "rules": {"**": "x"},'
        ' "stacks": {"blocks": ["blocks_{l}", 0], "blocks/w": false}}'
    )
    expected = rules({"**": "x"}, {"blocks": ("blocks_{l}", 0), "blocks/w": None})
    assert ta.load_rules(file) == expected


@pytest.mark.parametrize(
    "stacks",
    [
        "stacks = 1",
        'stacks = ["blocks"]',
        '[stacks]\n"blocks" = true',
        '[stacks]\n"blocks" = 0.5',
        '[stacks]\n"blocks" = ["blocks", 0]',
        '[stacks]\n"blocks" = ["blocks_{l}", false]',
        '[stacks]\n"blocks" = [0]',
        '[stacks]\n"blocks" = {axis = 0}',
        '[stacks]\n"blocks" = false',
        '[stacks]\n"/blocks" = 0',
        "[stacks]\n" + "\n".join(f'"b{n}" = 0' for n in range(300)),
    ],
    ids=lambda text: text[:40],
)
def test_malformed_stacks_in_a_file_name_the_file(tmp_path, stacks):
    file = tmp_path / "rules.toml"
    head, tail = (stacks, "") if stacks.startswith("stacks") else ("", stacks)
    file.write_text(f'version = 1\n{head}\n[rules]\n"**" = "x"\n{tail}\n')
    complains(lambda: ta.load_rules(file), "rules.toml", error=ta.RulesFileError)


# Where layers are: keys, axes, names, exceptions, nested stacks.


@pytest.mark.parametrize(
    ("tree", "stacks", "paths"),
    [
        ({"w": jnp.ones((2, 3))}, {"w": 0}, ["w/0", "w/1"]),
        (jnp.ones((2, 3)), {"": 0}, ["0", "1"]),
        ({"a": {"w": jnp.ones((3, 2))}}, {"": -1}, ["0/a/w", "1/a/w"]),
        ({"a": {"w": jnp.ones((3, 2))}}, {"": ("m{i}", 1)}, ["m0/a/w", "m1/a/w"]),
        ({"a": jnp.ones((2, 3))}, {"a": ("x/{l}/y", 0)}, ["x/0/y", "x/1/y"]),
        (
            {"a": {"e": {"w": jnp.ones((2, 3, 1))}, "r": jnp.ones((1, 3))}},
            {"a/e": ("a/expert_{e}", 0), "a": 1},
            ["a/0/expert_0/w", "a/0/expert_1/w"]
            + ["a/1/expert_0/w", "a/1/expert_1/w"]
            + ["a/2/expert_0/w", "a/2/expert_1/w", "a/0/r", "a/1/r", "a/2/r"],
        ),
        (
            {"a": {"b": {"w": jnp.ones(3), "v": jnp.ones((2, 3))}, "w": jnp.ones(2)}},
            {"a": 0, "a/b": None, "a/b/v": 0},
            ["a/b/v/0", "a/b/v/1", "a/b/w", "a/0/w", "a/1/w"],
        ),
    ],
    ids=[
        "a leaf",
        "a bare leaf",
        "the tree",
        "its members",
        "around",
        "nested",
        "none",
    ],
)
def test_paths_of_layers(tree, stacks, paths):
    assert list(rules({"**": 1}, stacks).match(tree).paths) == paths


def test_a_layer_has_the_shape_that_is_left():
    tree = {"blocks": {"w": jnp.ones((2, 4, 3), jnp.bfloat16)}}
    matches = rules({ta.leaf(ndim=2, dtype="bfloat16"): 1}, {"blocks": 1}).match(tree)
    assert [leaf.shape for leaf in matches.view.leaves] == [(2, 3)] * 4
    assert matches.values == [1] * 4


def test_axes_are_read_from_linen_boxes_and_never_guessed():
    def kernels(init, names):
        return nn.with_partitioning(init, names) if len(names) == 2 else init

    scanned = LinenModel(0, kernels, metadata=True)
    tree = jax.eval_shape(scanned.init, jax.random.key(0), TOKENS)
    stacks = {"params/blocks": "layers"}
    table = rules({"**": 1}, stacks)
    complains(lambda: table.match(tree), "'params/blocks/mlp_wi/bias'", "no box")
    # Arrays without a box can be given a number each, or an exception.
    numbers = [
        f"params/blocks/{name}"
        for name in ("mlp_wi/bias", "mlp_wo/bias", "norm/bias", "norm/scale")
    ]
    table = rules({"**": 1}, stacks | dict.fromkeys(numbers))
    paths = table.match(tree).paths
    assert "params/blocks/4/mlp_wi/kernel" in paths
    assert "params/blocks/mlp_wi/bias" in paths
    other = rules({"**": 1}, {"params/blocks": "depth"} | dict.fromkeys(numbers))
    complains(lambda: other.match(tree), "'depth'", "'layers'")


def test_a_name_that_flax_puts_at_the_wrong_axis_is_noticed():
    # For an axis counted from the end Flax inserts the name one place too early.
    scanned = LinenModel(-1, nn.with_partitioning, metadata=True)
    tree = jax.eval_shape(scanned.init, jax.random.key(0), TOKENS)
    table = rules({"**": 1}, {"params/blocks": "layers"})
    complains(lambda: table.match(tree), "disagree", "'params/blocks'")
    assert rules({"**": 1}, {"params/blocks": -1}).match(tree).check()


def test_axes_are_read_from_nnx_variables():
    def stack(names):
        return {"blocks": {"w": nnx.Param(jnp.ones((3, 2)), out_sharding=names)}}

    with jax.set_mesh(jax.make_mesh((1, 1), ("layers", "embed"))):
        for names, paths in [
            (("layers", "embed"), 3),
            (("embed", "layers"), 2),
        ]:
            table = rules({"**": 1}, {"blocks": "layers"})
            assert len(table.match(stack(names)).paths) == paths
        twice = stack(("layers", None))
        complains(lambda: rules({"**": 1}, {"blocks": "embed"}).match(twice), "'embed'")


@pytest.mark.slow
def test_integers_keys_and_functions_below_a_stack():
    extra = {
        "count": jnp.arange(LAYERS),
        "key": jax.random.split(jax.random.key(0), LAYERS),
        "activation": jnp.tanh,
        "rate": 0.5,
    }
    tree = {**MODEL, "blocks": {**MODEL["blocks"], **extra}}
    tx = train(optax.sgd(1.0))
    grads = jax.tree.map(jnp.ones_like, ta.split(tree, nested=True)[0])
    updates = tx.update(grads, tx.init(tree), tree)[0]
    assert first_column(updates) == [0, 0, -1, -1]
    paths = rules().match(tree).paths
    assert "blocks/3/key" in paths
    assert "blocks/3/activation" in paths
    one = {**tree, "blocks": {**tree["blocks"], "step": jnp.int32(1)}}
    complains(lambda: tx.init(one), "'blocks/step' int32[]", "None")


# Where one answer for each array is needed.


@pytest.mark.parametrize(
    "ask",
    [
        lambda: rules()(MODEL),
        lambda: ta.param_labels(MODEL, rules()),
        lambda: rules().bind(MODEL)(MODEL),
        lambda: frozen()(MODEL),
        lambda: rules().bind(MODEL).where("frozen")(MODEL),
        lambda: ta.param_mask(MODEL, frozen()),
        lambda: ta.param_mask(MODEL, ["blocks/0", frozen()]),
        lambda: ta.param_mask(MODEL, ta.leaf(ndim=1) & frozen()),
        lambda: optax.masked(optax.sgd(1.0), frozen()).init(MODEL),
        lambda: ta.adapt(optax.adamw(0.1, mask=frozen())).init(MODEL),
        lambda: optax.multi_transform({"train": optax.sgd(1.0)}, rules()).init(MODEL),
        lambda: train(
            optax.masked(optax.sgd(1.0), frozen({"blocks/3": "frozen", "**": 1}))
        ).init(MODEL),
    ],
)
def test_one_answer_for_an_array_names_layers_rules_and_partition(ask):
    complains(ask, "'blocks/b'", "'blocks/{", "treeadapt.partition")
    with pytest.raises(ta.StackError) as raised:
        ask()
    if "ndim" not in str(raised.value):
        assert len(re.findall(r"\(rule \d, '", str(raised.value))) in (0, 2)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: ta.split(MODEL, frozen()),
        lambda: ta.map_where(jnp.zeros_like, MODEL, ~frozen()),
    ],
)
def test_where_no_optimizer_is_made_none_is_advised(ask):
    complains(ask, "'blocks/b'", "'blocks/{", "array. Give all layers of the array one")
    with pytest.raises(ta.StackError) as raised:
        ask()
    assert "treeadapt.partition" not in str(raised.value)


def test_masks_name_both_rules():
    for ask in (lambda: frozen()(MODEL), lambda: ta.param_labels(MODEL, rules())):
        complains(ask, "(rule 1, 'blocks/{0..1}')", "(rule 2, '**')")


def test_shardings_of_one_array_that_differ_name_both_rules():
    tree = {"blocks": {"w": jnp.ones((4, 2, 3))}}
    table = rules({"blocks/0": P("a", None), "**": P()})
    complains(
        lambda: ta.partition_specs(tree, table),
        f"{P('a', None)!r} for 'blocks/{{0}}/w' (rule 'blocks/0')",
        f"{P()!r} for 'blocks/{{1..3}}/w' (rule '**')",
    )
    labels = rules({"blocks/0": "a", "**": "b"})
    complains(
        lambda: ta.partition_specs(tree, labels, specs={"a": P(None, "x"), "b": P()}),
        "'blocks/{0}/w'",
    )
    same = rules({"blocks/0": P("a", None), "**": P("a", None)})
    assert ta.partition_specs(tree, same)["blocks"]["w"] == P(None, "a", None)


def test_specs_and_selectors_see_layers():
    table = rules({ta.leaf(ndim=2) & ta.glob("blocks"): ("x", None), "**": P()})
    specs = ta.partition_specs(MODEL, table)
    assert specs["blocks"] == {"b": P(), "w": P(None, "x", None)}
    assert specs["embed"] == P()


@pytest.mark.slow
def test_answers_that_agree_are_masks_labels_and_splits():
    by_shape = {ta.leaf(ndim=2): "matrix", "**": "vector"}
    labels = {"b": "vector", "w": "matrix"}
    expected = {"blocks": labels, "embed": "matrix", "head": "vector"}
    assert rules(by_shape)(MODEL) == expected
    where = rules(by_shape).where("matrix")
    assert list(ta.split(MODEL, where)[0]) == ["blocks/w", "embed"]
    assert list(ta.split(MODEL, where & ta.glob("blocks/*"))[0]) == ["blocks/w"]
    mask = ta.param_mask(MODEL, [where, "!blocks/{0..3}/w"])
    assert [path for path, yes in ta.to_flat_dict(mask).items() if yes] == ["embed"]
    decay = optax.adamw(1.0, weight_decay=0.5, mask=where)
    zeros = jax.tree.map(jnp.zeros_like, MODEL)
    for tx in (decay, ta.adapt(decay), train(decay, {"**": "train"})):
        updates = step(tx, zeros)
        assert np.any(updates["blocks"]["w"])
        assert not np.any(updates["blocks"]["b"])


def test_selectors_with_different_stacks_disagree():
    one = rules({"**": 1}).where(1)
    other = rules({"**": 1}, {"blocks": 1}).where(1)
    for both in (one & other, one | other):
        complains(lambda both=both: both(MODEL), "'blocks'", "disagree")
    more = rules({"**": 1}, {"head": 0}).where(1)
    assert all(jax.tree.leaves((one & more)(MODEL)))


# Groups of layers.


def test_keys_of_a_group_say_which_layers_it_has():
    table = {"blocks/[03]": "frozen", "blocks/*/b": "frozen", "**": "train"}
    state = train(optax.adam(1.0), table).init(MODEL)
    mu = state.inner_states["train"][0].mu
    assert {path: leaf.shape for path, leaf in mu.items()} == {
        "blocks/{1..2}/w": (2, 2, 3),
        "embed": (5, 2),
        "head": (3,),
    }
    table = {"blocks/[12]": "frozen", "**": "train"}
    mu = train(optax.adam(1.0), table).init(MODEL).inner_states["train"][0].mu
    assert list(mu)[:2] == ["blocks/{{0},{3}}/b", "blocks/{{0},{3}}/w"]


@pytest.mark.slow
def test_nested_stacks_have_the_sets_of_both():
    tree = {"blocks": {"experts": {"wi": jnp.ones((4, 6, 2))}, "w": jnp.ones((4, 3))}}
    table = rules(
        {"blocks/{0..1}/experts/[0245]": "train", "**": "frozen"},
        {"blocks": 0, "blocks/experts": 1},
    )
    tx = ta.partition({"train": optax.trace(0.9)}, table)
    (trace,) = jax.tree.leaves(tx.init(tree).inner_states["train"])
    (key,) = tx.init(tree).inner_states["train"].trace
    assert key == "blocks/{0..1}/experts/{{0},{2},{4..5}}@1/wi"
    assert trace.shape == (2, 4, 2)
    grads = jax.tree.map(jnp.ones_like, tree)
    moved = np.argwhere(step(tx, grads, tree)["blocks"]["experts"]["wi"][:, :, 0])
    assert moved.tolist() == [[a, b] for a in (0, 1) for b in (0, 2, 4, 5)]


@pytest.mark.slow
def test_many_runs_of_layers():
    # So many that they are gathered instead of sliced.
    params = model(40)
    grads = jax.tree.map(jnp.ones_like, params)
    table = {"blocks/*[02468]": "train", "**": "frozen"}
    for tx in (
        train(optax.adam(1.0), table),
        ta.freeze(optax.adam(1.0), frozen(table)),
    ):
        updates = jax.jit(tx.update)(grads, tx.init(params), params)[0]
        assert np.argwhere(first_column(updates)).ravel().tolist() == [*range(0, 40, 2)]


@pytest.mark.slow
def test_a_partition_inside_a_partition_slices_again():
    inner = ta.partition(
        {"a": optax.adam(1.0), "b": optax.sgd(0.5)},
        rules({"blocks/[12]": "a", "**": "b"}),
    )
    for tx in (train(inner), ta.freeze(inner, frozen())):
        state = tx.init(MODEL)
        assert first_column(step(tx)) == pytest.approx([0, 0, -1, -0.5], abs=1e-4)
        assert any("mu/blocks/{2}/w" in path for path in ta.tree_paths(state))
        assert not any("{1" in path for path in ta.tree_paths(state))


@pytest.mark.slow
def test_a_mask_inside_a_group_is_asked_about_the_layers_of_the_group():
    def decayed(table):
        mask = rules(table).where("decay")
        return train(optax.adamw(1.0, weight_decay=0.5, mask=mask))

    zeros = jax.tree.map(jnp.zeros_like, MODEL)
    agreed = decayed({"blocks/{1..3}": "decay", "**": "none"})
    assert first_column(step(agreed, zeros)) == [0, 0, -0.5, -0.5]
    torn = decayed({"blocks/3": "decay", "**": "none"})
    complains(lambda: torn.init(MODEL), "'blocks/{2}/b'", "'blocks/{3}/b'")


@pytest.mark.slow
def test_a_line_search_moves_the_layers_of_its_group():
    def loss(params):
        return sum(jnp.sum((leaf - 3.0) ** 2) for leaf in jax.tree.leaves(params))

    tx = train(optax.lbfgs(memory_size=2))
    params, state = MODEL, tx.init(MODEL)
    value_and_grad = ta.value_and_grad_from_state(loss)

    @jax.jit
    def one_step(params, state):
        value, grad = value_and_grad(params, state=state)
        updates, state = tx.update(
            grad, state, params, value=value, grad=grad, value_fn=loss
        )
        return ta.apply_updates(params, updates), state

    for _ in range(3):
        params, state = one_step(params, state)
    np.testing.assert_array_equal(params["blocks"]["w"][:2], MODEL["blocks"]["w"][:2])
    np.testing.assert_allclose(params["blocks"]["w"][2:], 3.0, rtol=1e-4)
    np.testing.assert_allclose(params["head"], 3.0, rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.MultiSteps(train(optax.sgd(1.0)), 2),
        lambda: train(optax.MultiSteps(optax.sgd(1.0), 2)),
        lambda: ta.inject_hyperparams(lambda rate: train(optax.sgd(rate)))(1.0),
        lambda: optax.chain(optax.clip(1.0), train(optax.sgd(1.0))),
        lambda: ta.adapt(optax.chain(optax.clip(1.0), train(optax.sgd(1.0)))),
        lambda: train(optax.inject_hyperparams(optax.sgd)(1.0)),
        lambda: optax.apply_if_finite(train(optax.sgd(1.0)), 2),
        lambda: ta.partition({"train": optax.sgd(1.0)}, rules().bind(MODEL)),
        lambda: ta.freeze(optax.sgd(1.0), rules().bind(MODEL).where("frozen")),
    ],
)
def test_wrappers_around_groups_of_layers(make):
    tx = make()

    @jax.jit
    def two_steps():
        _, state = tx.update(ONES, tx.init(MODEL), MODEL)
        return tx.update(ONES, state, MODEL)[0]

    assert first_column(two_steps()) == [0, 0, -1, -1]


@pytest.mark.slow
def test_lookahead_runs_on_both_halves():
    tx = train(optax.lookahead(optax.sgd(1.0), 2, 0.5))
    params = optax.LookaheadParams(MODEL, MODEL)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(ONES, state, params)
        params = ta.apply_updates(params, updates)
    for half in params:
        moved = (half["blocks"]["b"] - MODEL["blocks"]["b"])[:, 0].tolist()
        assert moved == [0, 0, -1, -1]


def test_updates_that_are_none_or_no_gradients_at_all():
    blocks = ONES["blocks"]
    tx = train(optax.sgd(1.0))
    for missing in (None, optax.MaskedNode()):
        grads = {**ONES, "blocks": {**blocks, "w": missing}}
        for params in (MODEL, None):
            updates = tx.update(grads, tx.init(MODEL), params)[0]
            assert type(updates["blocks"]["w"]) is type(missing)
            assert first_column(updates) == [0, 0, -1, -1]
    float0 = np.zeros((LAYERS, 2, 3), jax.dtypes.float0)
    grads = {**ONES, "blocks": {**blocks, "w": float0}}
    updates = step(tx, grads)
    assert updates["blocks"]["w"].dtype == jnp.float32
    assert not np.any(updates["blocks"]["w"])


def test_a_part_of_the_tree_may_lack_the_stack():
    for tx in (train(optax.sgd(1.0)), ta.freeze(optax.sgd(1.0), frozen())):
        mask = {"blocks": False, "embed": True, "head": True}
        outer = optax.masked(tx, mask)
        assert first_column(step(outer)) == [1, 1, 1, 1]
    scale = ta.scale_by_rules(rules({"blocks/0": 2.0, "**": 3.0}))
    grads = {**ONES, "blocks": {"b": None, "w": None}}
    updates, _ = scale.update(grads, scale.init(MODEL))
    assert updates["head"].tolist() == [3, 3, 3]


@pytest.mark.slow
def test_gradients_of_another_dtype():
    grads = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ONES)
    updates = step(train(optax.sgd(1.0)), grads)
    plain = step(ta.partition({"train": optax.sgd(1.0)}, {"**": "train"}), grads)
    assert updates["blocks"]["b"].dtype == plain["blocks"]["b"].dtype
    assert first_column(updates) == [0, 0, -1, -1]


@pytest.mark.slow
def test_state_of_shapes_and_of_placeholders():
    tx = train(optax.adam(1.0))
    concrete = jax.eval_shape(lambda: tx.init(MODEL))
    assert jax.eval_shape(tx.init, MODEL) == concrete
    shapes = jax.eval_shape(lambda: MODEL)
    abstract = tx.init(shapes)
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    doubled = optax.tree_map_params(tx, lambda leaf: leaf + 1, tx.init(MODEL))
    adam = doubled.inner_states["train"][0]
    assert adam.count == 0
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves((adam.mu, adam.nu)))


def test_a_flat_dict_has_stacks_too():
    flat, rest = ta.split(MODEL)
    tx = train(optax.sgd(1.0))
    updates = tx.update(ta.split(ONES)[0], tx.init(flat), flat)[0]
    assert first_column(ta.merge(updates, rest)) == [0, 0, -1, -1]


def test_the_name_of_some_layers_may_be_taken():
    tree = {**MODEL, "blocks/{0..1}/b": jnp.ones(3)}
    tx = train(optax.sgd(1.0), {"blocks/{0..1}/b": "train", "**": "frozen"})
    complains(lambda: tx.init(tree), "'blocks/{0..1}/b'", error=ta.PathCollisionError)


def test_a_group_that_has_no_transformation_names_the_layers():
    tx = train(optax.sgd(1.0), {"blocks/0": "slow", "**": "train"})
    complains(
        lambda: tx.init(MODEL), "'slow'", "'blocks/{0}/b'", error=ta.TransformError
    )


def test_without_stacks_nothing_is_cut():
    plain = ta.Rules({"blocks": "frozen", "**": "train"})
    stacked = rules({"blocks": "frozen", "**": "train"})
    programs = [
        str(jax.make_jaxpr(tx.update)(ONES, tx.init(MODEL), MODEL))
        for table in (plain, stacked)
        for tx in [ta.partition({"train": optax.adam(1.0)}, table)]
    ]
    assert programs[0] == programs[1]
    assert " slice" not in programs[0]


# Factors.


@pytest.mark.parametrize(
    "make",
    [
        lambda bound: ta.partition({"train": optax.sgd(1.0)}, bound),
        lambda bound: ta.freeze(optax.sgd(1.0), bound.where("frozen")),
    ],
    ids=["partition", "freeze"],
)
def test_rules_bound_to_fewer_layers_do_not_forget_the_new_ones(make):
    tx, larger = make(rules().bind(MODEL)), model(6)
    with pytest.raises(ta.SelectorError, match=r"4 layers in 'blocks/b'.*\[6,3\]"):
        tx.update(larger, tx.init(MODEL), larger)
    with pytest.raises(ta.SelectorError, match="Bind to the tree as it is now"):
        tx.init(larger)


@pytest.mark.parametrize(
    "tx",
    [
        train(optax.sgd(1.0)),
        ta.freeze(optax.sgd(1.0), frozen()),
        ta.per_layer(optax.sgd(1.0), {"blocks": 0}),
        ta.scale_by_rules(rules({"blocks/0": 0.5, "**": 1.0})),
    ],
    ids=["partition", "freeze", "per_layer", "scale"],
)
@pytest.mark.parametrize(
    "grads",
    [model(6), model(2), jax.tree.map(lambda x: jnp.stack([x] * 3), ONES)],
    ids=["more", "fewer", "per_example"],
)
def test_updates_that_do_not_hold_the_layers_of_the_params_are_refused(tx, grads):
    with pytest.raises(ta.TransformError, match="The update of 'blocks/b' is float32"):
        tx.update(grads, tx.init(MODEL), MODEL)


@pytest.mark.parametrize("bind", [False, True], ids=["rules", "bound"])
def test_a_list_of_factors_is_refused_where_arrays_hold_layers(bind):
    several = np.arange(4.0) if bind else [1.0, 2.0, 3.0, 4.0]
    table = rules({"blocks": several, "**": 1.0})
    with pytest.raises(ta.TransformError, match=r"'blocks'.*give each rule one"):
        ta.scale_by_rules(table.bind(MODEL) if bind else table)


@pytest.mark.slow
def test_factors_of_layers():
    table = {"blocks/0": 0.5, "blocks/[12]": 0.0, "**": 2}
    nan = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), ONES)
    updates = step(ta.scale_by_rules(rules(table)), nan)
    assert first_column(updates) == [0.5, 0, 0, 2]
    assert np.signbit(updates["blocks"]["b"][1:3]).all()
    assert updates["blocks"]["b"].dtype == jnp.float32


def test_factors_may_be_traced_and_differentiated():
    def total(factor):
        tx = ta.scale_by_rules(rules({"blocks/0": factor, "**": 2.0}))
        return jnp.sum(step(tx)["blocks"]["b"])

    for factor in (0.0, 0.5):
        value, slope = jax.jit(jax.value_and_grad(total))(jnp.float32(factor))
        assert (value, slope) == (3 * factor + 18, 3)


@pytest.mark.parametrize("values", [("x", 1.0), (1.0, "x"), (1j, 1.0), (10**400, 0.5)])
def test_factors_of_layers_that_are_not_numbers_are_named(values):
    tx = ta.scale_by_rules(rules({"blocks/0": values[0], "**": values[1]}))
    complains(
        lambda: tx.init(MODEL),
        "'blocks/b'",
        "(rule 1, 'blocks/0')",
        error=ta.TransformError,
    )


def test_layers_that_no_rule_matches_are_named_where_other_layers_have_a_rule():
    table = rules({"blocks/0": "train", "{embed,head}": "train"})
    tx = ta.partition({"train": optax.sgd(0.1)}, table)
    for labels in (lambda: tx.init(MODEL), lambda: table.match(MODEL).check()):
        with pytest.raises(
            ta.UnmatchedPathError, match=r"6 of 10 leaves match no rule: 'blocks/\{1..3"
        ):
            labels()
