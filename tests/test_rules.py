"""Rules: the first match wins, and errors say how to fix them."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from inside import inside
from jax.sharding import PartitionSpec
from trees import TREES

import treeadapt as ta
from benchmarks.published_names import MODELS, names_of, tree_of


class Norm(eqx.Module):
    scale: Any


class Net(eqx.Module):
    layers: list[Any]
    head: Any
    act: Any = jax.nn.relu
    rate: float = 0.1


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def net() -> Net:
    return Net([{"w": array(2, 2), "norm": Norm(array(2))} for _ in range(3)], array(2))


flat = ta.to_flat_dict


def select(tree: Any, where: Any, **options: Any) -> list[bool]:
    """Whether each leaf is selected."""
    return [*flat(ta.param_mask(tree, where, **options)).values()]


TREE = {
    "encoder": {"kernel": array(3, 4), "bias": array(4)},
    "head": {"kernel": array(4, 2), "bias": array(2)},
}

# What rows of ``refusals.txt`` are about.
MIXED = TREE | {"f": len}
NESTED = {"net": {"layers": [{"w": array(4, 2), "b": array(4)} for _ in range(2)]}}
DOTTED = dict.fromkeys(["h.0.w", "h.1.w", "wte.weight"], array(2))
TWO_LAYERS = {"params": {f"Dense_{n}": {"kernel": array(2, 2)} for n in (0, 1)}}
STACKED = {"blocks": {"norm": array(2, 3), "experts": {"wi": array(2, 4, 3)}}}
STORED_PATHS = ta.Rules(
    {"blocks/norm": "a", "blocks/experts/wi": "b"},
    stacks={"blocks": ("blocks_{l}", 0), "blocks/experts": 1},
)


# The first match wins


@pytest.mark.parametrize(
    ("rules", "labels"),
    [
        ({"encoder": "f", "**": "t"}, "ffTT"),
        ({"**/bias": "b", "encoder": "f", "**": "t"}, "bfbt"),
        ([("head/bias", "b"), (["encoder", "!**/bias"], "f"), ("**", "t")], "tfbt"),
        ({ta.leaf(ndim=1): "b", "**": "t"}, "btbt"),
        ({ta.glob("head") & ta.leaf(ndim=2): "x", dict: "t"}, "tttx"),
        ({"encoder": "f", "!encoder": "t"}, "fftt"),
        ({("encoder/bias", "head/bias"): "b", "**": "t"}, "btbt"),
    ],
)
def test_the_first_rule_that_matches_wins(rules, labels):
    assert "".join(flat(ta.param_labels(TREE, rules)).values()) == labels.lower()
    assert "".join(flat(ta.Rules(rules)(TREE)).values()) == labels.lower()


@pytest.mark.hazard("B14")
def test_labels_have_exactly_the_treedef_of_the_tree():
    model = net()
    labels = ta.param_labels(model, {"**/norm": "n", "**": "t"})
    assert jax.tree.structure(labels) == jax.tree.structure(model)
    assert labels.layers[1]["norm"].scale == "n"


def test_static_leaves_need_no_rule():
    labels = ta.param_labels(net(), {"layers": "a", "head": "b"})
    assert labels.act is ta.STATIC
    assert labels.rate is ta.STATIC
    assert ta.param_labels(net(), {"layers": "a"}, default="b").act is ta.STATIC
    assert ta.param_labels(net(), {"**": "a"}).act == "a"


def test_static_is_one_object():
    assert pickle.loads(pickle.dumps(ta.STATIC)) is ta.STATIC
    assert copy.deepcopy(ta.STATIC) is ta.STATIC
    assert repr(ta.STATIC) == "STATIC"
    assert {ta.STATIC: 1}[ta.STATIC] == 1
    no_default = ta.Rules({"encoder": 1})
    with pytest.raises(ta.UnmatchedPathError):
        pickle.loads(pickle.dumps(no_default))(TREE)


def test_labels_may_be_anything_that_is_one_leaf():
    rules = {"encoder/bias": 1, "encoder": 0.5, "head/bias": PartitionSpec("x")}
    labels = flat(ta.param_labels(TREE, rules, default=("a",)[0]))
    assert labels["encoder/bias"] == 1
    assert labels["head/bias"] == PartitionSpec("x")
    factor = np.ones(3)
    assert ta.param_labels(TREE, {"**": factor})["head"]["bias"] is factor


@pytest.mark.parametrize("label", [("a", "b"), [1], {"a": 1}, ()])
def test_a_container_is_a_value_of_rules_though_no_label(label):
    assert ta.Rules({"**": label}).match(TREE).values == [label] * 4


class Prior(NamedTuple):
    mean: float
    scale: float


def test_values_of_any_type_are_read_by_path():
    rules = ta.Rules({"**/bias": None, "encoder": Prior(0.0, 1.0)}, default=["x"])
    tree = TREE | {"act": len}
    values = rules.by_path(tree)
    assert list(values) == list(ta.tree_paths(tree))
    assert values["encoder/bias"] is values["head/bias"] is None
    assert values["encoder/kernel"] == Prior(0.0, 1.0)
    assert values["head/kernel"] == ["x"]
    assert values["act"] is ta.STATIC


def test_layers_with_other_values_have_their_keys():
    rules = ta.Rules({"b/{0..1}": None, "**": (0.0, 1.0)}, stacks={"b": 0})
    tree = {"b": {"w": array(4, 2)}, "head": array(2)}
    assert rules.by_path(tree) == {
        "b/{0..1}/w": None,
        "b/{2..3}/w": (0.0, 1.0),
        "head": (0.0, 1.0),
    }
    assert ta.Rules({"**": None}, stacks={"b": 0}).by_path(tree)["b/w"] is None


def test_a_tree_holds_none_and_named_tuples_but_no_other_container():
    rules = ta.Rules({"**/bias": None, "**": Prior(0.0, 1.0)})
    values = rules(TREE)
    assert values["encoder"] == {"kernel": Prior(0.0, 1.0), "bias": None}
    assert rules.bind(TREE)(TREE) == values
    assert rules == ta.Rules({"**/bias": None, "**": Prior(0.0, 1.0)})
    assert rules != ta.Rules({"**/bias": None, "**": (0.0, 1.0)})
    assert rules.where(None).bind(TREE)(TREE)["head"] == {"bias": True, "kernel": False}


def test_none_and_no_rule_are_told_apart_in_reports():
    rules = ta.Rules({"encoder": None}, unused="ignore")
    text = str(ta.summarize(TREE, rules))
    assert re.search(r"encoder/bias .* None +1$", text, re.MULTILINE)
    assert re.search(r"head/bias .* - +-$", text, re.MULTILINE)
    assert "2 leaves without a rule" in text


@pytest.mark.filterwarnings("ignore::treeadapt.TreeAdaptWarning")
@pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)
def test_every_container_kind_is_labelled_by_its_paths(row):
    tree, first = row.make(), ta.escape((*row.paths, "x")[0])
    rules = ta.Rules({first: 0, "**": 1}, unused="ignore")
    want = [int(place > 0) for place in range(len(row.paths))]
    assert rules.match(tree).values == want
    assert rules.bind(tree).answers.by_path == dict(zip(row.paths, want, strict=True))
    assert select(tree, first, unused="ignore") == [not value for value in want]
    labels = ta.param_labels(tree, rules)
    if not row.opaque:
        assert jax.tree.structure(labels) == jax.tree.structure(tree)
        assert [*flat(labels).values()] == want


# What does not fit


def test_a_default_is_the_label_of_an_array_without_a_rule():
    assert ta.param_labels(TREE, {"encoder": "f"}, default="t")["head"]["bias"] == "t"
    assert ta.Rules({"encoder": "f"}, default="t")(TREE)["head"]["bias"] == "t"


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"encodr": "f", "**": "t"}, "'encodr' (rule 1): did you mean 'encoder' (2"),
        ({"kernel": "f", "**": "t"}, "did you mean '**/kernel' (2 leaves)"),
        ([(["encoder", "!bias"], "f"), ("**", "t")], "'!bias' (rule 1)"),
        (
            {ta.node(Norm): "f", "**": "t"},
            "node(Norm) (rule 1): classes here are 'dict'",
        ),
        ({ta.leaf(ndim=5): "f", "**": "t"}, "leaf(ndim=5)"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(rules, named):
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.param_labels(TREE, rules)
    assert named in str(caught.value)
    labels = ta.Rules(rules, unused="ignore")(TREE)
    assert flat(labels)["head/kernel"] == "t"


@pytest.mark.parametrize(
    "rules",
    [
        {"encoder": "f", "encoder/bias": "b", "**": "t"},
        {"encoder": "f", "head": "t", ta.leaf(ndim=1): "b"},
        [("**", "t"), ("head", "f")],
        [("encoder", "f"), ("head", "t"), (["**/bias", "!head/kernel"], "b")],
    ],
)
def test_a_shadowed_rule_is_an_error_with_the_fix(rules):
    with pytest.raises(ta.UnusedRuleError, match="is unreachable") as caught:
        ta.param_labels(TREE, rules)
    assert "Move it up, before rule 1" in str(caught.value)
    assert "encoder/bias" in str(caught.value) or "head/bias" in str(caught.value)
    ta.Rules(rules, unused="ignore")(TREE)


def test_a_node_above_all_arrays_is_named_once():
    below = {"model": {"params": TREE}}
    wrong = {"encoder": "f", "head": "t", "**/head/bias": "t"}
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.param_labels(below, {"model/encoder": "f"} | wrong | {"**": "t"})
    line = (
        "\nAll 4 leaves are below 'model/params': write 'model/params/...' or '**/...'."
    )
    assert str(caught.value).count(line) == 1
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.param_labels(below, {"encoder": "f", "**": "t"})
    assert "All 4 leaves" not in str(caught.value)
    with pytest.raises(
        ta.UnmatchedPathError, match="All 4 leaves are below 'model/params'"
    ):
        ta.param_labels(below, ta.Rules({"encoder": "f"}, unused="ignore"))
    with pytest.raises(ta.UnmatchedPathError) as caught:
        ta.param_labels(TREE, ta.Rules({"x": "f"}, unused="ignore"))
    assert "All 4 leaves" not in str(caught.value)


def test_an_error_about_a_bare_leaf_shows_its_empty_path():
    bare = "one bare array in place of a tree: its path is ''.*ravel_pytree"
    bound = ta.glob("a").bind({"a": array(1), "b": array(1)})
    for use in (
        lambda tree: ta.param_labels(tree, {"a": 1, "**": 2}),
        lambda tree: ta.param_labels(tree, {"a": 1}),
        lambda tree: ta.param_mask(tree, "a"),
        lambda tree: optax.adamw(0.1, mask=ta.glob("a")).init(tree),
        lambda tree: ta.freeze(optax.sgd(0.1), "a").init(tree),
        lambda tree: ta.partition({"a": optax.sgd(1.0)}, {"a": "a"}).init(tree),
        lambda tree: ta.lift({"a": True})(tree),
        bound,
    ):
        with pytest.raises((ta.SelectorError, ta.RulesError), match=bare):
            use(array(2))


def test_the_paths_of_a_small_tree_are_listed():
    names = "abcdefghijklm"
    small, large = (dict.fromkeys(names[:n], array(1)) for n in (12, 13))
    listed = ", ".join(map(repr, small))
    for use in (
        lambda tree: ta.param_labels(tree, {"z": 1, "a": 3, "**": 2}),
        lambda tree: ta.param_labels(tree, {"aa": 1, "**": 2}),
        lambda tree: ta.param_mask(tree, "z"),
        lambda tree: optax.adamw(0.1, mask=ta.glob("z")).init(tree),
        lambda tree: ta.freeze(optax.sgd(0.1), "z").init(tree),
        lambda tree: ta.lift(dict.fromkeys([*tree, "z"], True))(tree),
        lambda tree: ta.param_labels(tree, ta.Rules({"**": 1}, stacks={"z": 0})),
    ):
        with pytest.raises(ta.TreeAdaptError, match=f"The paths here are {listed}"):
            use(small)
        with pytest.raises(ta.TreeAdaptError) as caught:
            use(large)
        assert "The paths here are" not in str(caught.value)
    with pytest.raises(ta.UnmatchedPathError, match=listed):
        ta.param_labels(small, [])


def test_a_final_catch_all_may_be_unused():
    rules = {"encoder": "f", "head": "t", "**": "x"}
    assert set(flat(ta.param_labels(TREE, rules)).values()) == {"f", "t"}


def test_overlap_is_an_error_on_request():
    rules = [("encoder", "f"), ("**/bias", "b"), ("**", "b")]
    with pytest.raises(ta.OverlapError, match="encoder/bias") as caught:
        ta.Rules(rules, overlap="error")(TREE)
    assert "rule 1, 'encoder', and rule 2, '**/bias'" in str(caught.value)
    same = ta.Rules(
        [("encoder", "f"), ("**/kernel", "f")], overlap="error", default="t"
    )
    assert flat(same(TREE))["head/bias"] == "t"
    apart = ta.Rules([(ta.leaf(ndim=1), "b"), (ta.leaf(ndim=2), "k")], overlap="error")
    assert flat(apart(TREE))["head/bias"] == "b"


def test_equal_numbers_of_numpy_are_one_value():
    half, same = np.float32(0.5), np.float32(0.5)
    rules = ta.Rules([("encoder", half), ("**", same)], overlap="error")
    assert set(flat(rules(TREE)).values()) == {half}
    assert flat(rules.where(same)(TREE))["encoder/bias"]
    assert rules == ta.Rules([("encoder", same), ("**", half)], overlap="error")
    assert rules != ta.Rules([("encoder", 0.5), ("**", 0.5)], overlap="error")
    layers = ta.Rules({"w/0": half, "**": same}, stacks={"w": 0})
    assert layers({"w": array(3, 2)}) == {"w": half}


def test_a_static_leaf_may_overlap_and_does_not_count_as_a_match():
    tree = {"w": array(1), "act": len}
    with pytest.raises(ta.UnusedRuleError, match="'act'"):
        ta.param_labels(tree, {"act": "a", "w": "b"})
    ta.Rules([("*", "a"), ("w", "a"), ("a*", "b")], overlap="error", unused="ignore")(
        tree
    )


def test_a_tree_without_arrays_reports_nothing():
    assert ta.Rules({"a": 1})({"b": len, "c": None}) == {"b": ta.STATIC, "c": None}
    assert ta.Rules({"a": 1})({}) == {}


def test_the_same_structure_is_checked_again_when_leaves_change():
    rules = ta.Rules({"a": 1, "b": 2})
    assert rules({"a": array(), "b": array(1)}) == {"a": 1, "b": 2}
    with pytest.raises(ta.UnusedRuleError):
        rules({"a": 1.0, "b": array(1)})
    by_shape = ta.Rules([(ta.leaf(ndim=1), 1), ("**", 2)])
    assert by_shape({"a": array(1), "b": array(2, 2)}) == {"a": 1, "b": 2}
    assert by_shape({"a": array(2, 2), "b": array(1)}) == {"a": 2, "b": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", [{"x" * 3_000: 1}, {f"nothing_{n}": n for n in range(300)}, {"a/0": 1}]
)
def test_messages_hold_at_most_4_kb(rules):
    tree = {"a": [array(1) for _ in range(5_000)], "b" * 500: array(1)}
    with pytest.raises((ta.UnusedRuleError, ta.UnmatchedPathError)) as caught:
        ta.param_labels(tree, rules)
    assert 40 < len(str(caught.value).encode()) <= 4_000


# Which rule decides


def test_matches_show_the_deciding_rule():
    rules = ta.Rules(
        [("**/bias", "b"), (["encoder", "!**/bias"], "f")], unused="ignore"
    )
    matches = rules.match(TREE | {"act": len})
    assert matches.paths[1:3] == ("encoder/bias", "encoder/kernel")
    assert list(matches.deciding) == [-1, 0, 1, 0, -1]
    assert matches.values == [ta.STATIC, "b", "f", "b", rules.default]
    assert matches.unmatched == ("head/kernel",)
    assert matches.is_array == [False, True, True, True, True]
    with pytest.raises(ta.UnmatchedPathError):
        matches.check()


def test_matches_report_without_raising():
    rules = ta.Rules([("encoder", 1), ("typo", 2), ("encoder/bias", 3), ("**", 4)])
    matches = rules.match(TREE)
    assert matches.unused == ((1, "typo"),)
    assert matches.shadowed == (2,)
    with pytest.raises(ta.UnusedRuleError, match="typo"):
        matches.check()


# Rules are values


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (ta.Rules({"a": "x", "**": "y"}), "Rules({'a': 'x', '**': 'y'})"),
        (ta.Rules([("a", 1), ("a", 2)]), "Rules([('a', 1), ('a', 2)])"),
        (ta.Rules({"a": 1}, default=2), "Rules({'a': 1}, default=2)"),
        (
            ta.Rules([(["a", "!b"], 1)], unused="ignore", overlap="error"),
            "Rules([(['a', '!b'], 1)], unused='ignore', overlap='error')",
        ),
        (ta.Rules({Norm: 1, ta.leaf(ndim=1): 2}), "Rules({Norm: 1, leaf(ndim=1): 2})"),
        (ta.Rules({}), "Rules({})"),
    ],
    ids=str,
)
def test_rules_are_values(rules, text):
    assert repr(rules) == text
    again = pickle.loads(pickle.dumps(rules))
    assert (
        again
        == rules
        == copy.deepcopy(rules)
        == ta.Rules(rules.pairs, **_options(rules))
    )
    assert hash(again) == hash(rules)
    assert repr(again) == text
    assert rules != ta.Rules({"other": 1})
    with pytest.raises(AttributeError):
        rules.default = 3
    with pytest.raises(AttributeError):
        del rules.default


def _options(rules):
    return {name: getattr(rules, name) for name in ("default", "unused", "overlap")}


def test_rules_compare_by_type_and_order():
    assert ta.Rules({"a": 1}) != ta.Rules({"a": True})
    assert ta.Rules({"a": 1, "b": 2}) != ta.Rules({"b": 2, "a": 1})
    assert ta.Rules({"a": 1}) != ta.Rules({"a": 1}, default=1)
    array_value = np.ones(2)
    assert ta.Rules({"a": array_value}) == ta.Rules({"a": array_value})
    assert ta.Rules({"a": array_value}) != ta.Rules({"a": np.ones(2)})
    with pytest.raises(TypeError):
        hash(ta.Rules({"a": array_value}))


def test_another_default_replaces_nothing_else_of_the_rules():
    rules = ta.Rules({"encoder": 1, "typo": 3}, unused="ignore", overlap="error")
    labels = flat(ta.param_labels(TREE, rules, default=2))
    assert [*labels.values()] == [1, 1, 2, 2]
    rules = ta.Rules({"encoder": 1, "encoder/bias": 3}, default=4, overlap="error")
    with pytest.raises(ta.OverlapError):
        ta.param_labels(TREE, rules, default=2)


# As Optax calls them


@pytest.mark.usefixtures("standard_promotion")
def test_multi_transform_takes_rules():
    params = jax.tree.map(lambda s: jnp.ones(s.shape), TREE)
    rules = ta.Rules({"encoder": "frozen", "**": "train"})
    tx = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "train": optax.adam(0.1)}, rules
    )
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(params, state, params)
    assert float(updates["encoder"]["bias"][0]) == 0.0
    assert float(updates["head"]["bias"][0]) < 0.0
    marked = optax.tree.map_params(tx, lambda _: 0, state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)


def test_a_rule_for_a_hole_of_a_partial_tree_is_not_reported_when_called():
    rules = ta.Rules({"encoder": "f", "**": "t"})
    part = {"encoder": optax.MaskedNode(), "head": array(1)}
    assert rules(part) == {"encoder": optax.MaskedNode(), "head": "t"}
    assert rules({"encoder": None, "head": array(1)}) == {"encoder": None, "head": "t"}
    with pytest.raises(ta.UnusedRuleError):
        ta.param_labels(part, rules)


def test_a_rule_that_matches_no_hole_of_a_partial_tree_is_reported():
    part = {"encoder": optax.MaskedNode(), "head": {"w": array(1), "b": None}}
    table = {"encoder/norm": "n", "encoder": "f", "**/bias": "n", "**": "t"}
    assert ta.Rules(table)(part)["head"] == {"w": "t", "b": None}
    for typo in ("encodr", "head/wieght", "head/v", "head/b/c"):
        with pytest.raises(ta.UnusedRuleError, match=f"'{typo}'"):
            ta.Rules({typo: "x"} | table)(part)
    with pytest.raises(ta.UnusedRuleError, match="head/w"):
        ta.Rules({"head": "t", "head/w": "x", "**": "f"})(part)
    assert ta.Rules({"head": "t", "head/b": "x", "**": "f"})(part)["head"]["w"] == "t"


@pytest.mark.parametrize(
    ("table", "missing"),
    [
        ({"**/bias": "n", "**": "t"}, None),
        ({"l/bias": "n", "l/weight": "t"}, None),
        ({"**/biass": "n", "**": "t"}, "biass"),
        ({"l/bias/x": "n", "**": "t"}, "l/bias/x"),
        # It decides in the place of the None alone, and that is a use.
        ({"l/weight": "a", "l/*": "n", "**": "t"}, None),
        ({"l": "a", "l/*": "n", "**": "t"}, "l/\\*.*unreachable"),
        ([(["**/bias"], "n"), ("**", "t")], None),
        ([(["**/bias", "!**/kernl"], "n"), ("**", "t")], "kernl"),
        ([(ta.glob("l/weight") & "l/bias", "n"), ("**", "t")], "no array satisf"),
        ([(ta.glob("l/*") & "**/bias", "n"), ("**", "t")], None),
        # A None may be a leaf of any shape.
        ([(ta.leaf(ndim=7), "n"), ("**", "t")], None),
        ([(ta.leaf(ndim=2), "n"), ("l/*", "x"), ("**", "t")], None),
        ([(ta.leaf(ndim=2), "n"), ("l/weight", "x"), ("**", "t")], "unreachable"),
        # Of classes, those are used that have a None below them.
        ([(eqx.nn.LayerNorm, "n"), ("**", "t")], None),
        ([(eqx.nn.Conv2d, "n"), ("**", "t")], "node\\(Conv2d\\)"),
        ({"**/<Conv2d>/**": "n", "**": "t"}, "<Conv2d>"),
        ([(ta.leaf(ndim=7) & eqx.nn.Conv2d, "n"), ("**", "t")], "Conv2d"),
    ],
    ids=repr,
)
def test_a_none_is_the_place_of_a_leaf_for_every_use_of_rules(table, missing):
    key = jax.random.key(0)
    norm = eqx.filter(eqx.nn.LayerNorm(2), lambda _: False)
    model = {"l": eqx.nn.Linear(2, 2, use_bias=False, key=key), "norm": norm}
    rules = ta.Rules(table)
    labels = set(rules.values)
    tx = ta.partition({label: optax.sgd(1.0) for label in labels}, rules)
    uses = [
        lambda: rules(model),
        lambda: ta.param_labels(model, rules),
        lambda: rules.bind(model),
        lambda: tx.init(model),
    ]
    for use in uses:
        if missing is None:
            use()
        else:
            with pytest.raises(ta.UnusedRuleError, match=missing):
                use()
    assert bool(ta.summarize(model, rules).notes) == (missing is not None)


@pytest.mark.parametrize("count", [3, jnp.zeros((), jnp.int32), np.float32(1)])
def test_a_call_with_a_step_count_is_refused(count):
    with pytest.raises(ta.SelectorError, match=r"treeadapt\.inject_hyperparams"):
        ta.Rules({"**": 1})(count)
    with pytest.raises(ta.SelectorError, match=r"treeadapt\.inject_hyperparams"):
        ta.Rules({"**": 1}).bind({"a": array(1)})(count)
    assert ta.param_labels(count, {"**": 1}) == 1
    assert ta.param_labels(count, ta.Rules({"**": 1}).bind(count)) == 1


def test_labels_are_found_while_tracing():
    seen = []

    @jax.jit
    def step(tree):
        seen.append(ta.param_labels(tree, {ta.leaf(ndim=1): "b", "**": "t"}))
        return tree

    step({"w": jnp.ones((2, 2)), "b": jnp.ones(2)})
    assert seen == [{"w": "t", "b": "b"}]


# Smaller views


BY_TREE = ta.Rules({Norm: "n", "layers/{-1}": "last", "**": "t"})


def test_a_flat_dict_cannot_answer_for_the_tree():
    with pytest.raises(ta.SelectorError, match="bind"):
        BY_TREE(flat(net()))


def test_bound_rules_answer_on_every_view():
    want = flat(BY_TREE(net()))
    bound = BY_TREE.bind(net())
    assert bound(flat(net())) == want
    part = {path: leaf for path, leaf in flat(net()).items() if "layers/2" in path}
    assert bound(part) == {path: want[path] for path in part}
    mask = bound.where("n")(part)
    assert mask == {path: want[path] == "n" for path in part}
    assert ta.param_labels(flat(net()), bound) == want
    assert bound.bind(net()) == bound
    assert hash(bound.bind(net())) == hash(bound)
    assert repr(bound) == f"<{BY_TREE!r} bound to 9 paths>"
    with pytest.raises(ta.SelectorError, match="'new'"):
        bound({"new": array(1)})
    for tree in (net(), {"head": array(1), "bias": None}):
        with pytest.raises(ta.UnusedRuleError):
            ta.Rules({"typo": 1, "**": 2}).bind(tree)


def test_bound_rules_are_not_a_table():
    bound = BY_TREE.bind(net())
    for use in (ta.Rules, lambda rules: ta.param_labels(net(), rules, default=1)):
        with pytest.raises(ta.RulesError, match=r"bound\.rules"):
            use(bound)


def test_inside_a_transformation_a_flat_dict_answers_as_the_tree():
    want = flat(BY_TREE(net()))
    shown = {path: x for path, x in flat(net()).items() if hasattr(x, "shape")}
    typo = ta.Rules({"typo": 1, "**": 2})
    labels = inside(net(), lambda _: BY_TREE(shown))
    assert labels == {path: want[path] for path in shown}
    with pytest.raises(ta.UnusedRuleError):
        inside(net(), lambda _: typo(shown))
    labels = inside(net(), lambda _: typo(shown), has_params=False)
    assert set(labels.values()) == {2}


def test_inside_a_transformation_only_leaves_in_the_part_need_a_rule():
    tree = {"w": array(2), "step": array(dtype=jnp.int32)}
    rules = ta.Rules({"w": "t"})
    with pytest.raises(ta.UnmatchedPathError, match="'step'"):
        rules(tree)
    assert inside(tree, lambda _: rules({"w": array(2)})) == {"w": "t"}
    with pytest.raises(ta.UnmatchedPathError, match="'step'"):
        inside(tree, lambda _: rules({"step": array(2)}))


# The selector of a label


def test_where_selects_the_leaves_with_a_label():
    rules = ta.Rules({"**/bias": "b", "encoder": "f", "**": "t"})
    for label in "bft":
        mask = flat(ta.param_mask(TREE, rules.where(label)))
        assert mask == {p: v == label for p, v in flat(rules(TREE)).items()}
    assert rules.where("f").matches("encoder/kernel")
    assert not rules.where("f").matches("encoder/bias")
    left = flat((~rules.where("f"))(TREE))
    assert [path for path, yes in left.items() if not yes] == ["encoder/kernel"]
    joined = rules.where("b") | rules.where("f")
    assert sum(select(TREE, joined)) == 3
    assert pickle.loads(pickle.dumps(rules.where("b"))) == rules.where("b")
    assert repr(rules.where("b")) == f"{rules!r}.where('b')"


def test_where_of_the_default_selects_array_leaves_without_a_rule():
    rules = ta.Rules({"layers": "a"}, default="b")
    model = net()
    assert flat(rules.where("b")(model))["head"] is True
    assert flat(rules.where("b")(model))["act"] is False
    assert flat(rules.where(ta.STATIC)(model))["act"] is True
    assert sum(select(model, rules.where(ta.STATIC))) == 2
    with pytest.raises(ta.SelectorError, match="bind"):
        rules.where("b").matches("head")
    assert not rules.where("b").matches("layers/0/w")


def test_where_agrees_with_the_labels_if_the_default_is_static():
    rules = ta.Rules({"layers": "a"}, default=ta.STATIC)
    labels = flat(rules(net()))
    static = flat(rules.where(ta.STATIC)(net()))
    assert static == {path: label is ta.STATIC for path, label in labels.items()}
    assert static["head"] is static["act"] is True


def test_where_reports_rules_that_match_nothing():
    rules = ta.Rules({"typo": "f", "**": "t"})
    with pytest.raises(ta.UnusedRuleError, match="'typo'"):
        ta.param_mask(TREE, rules.where("t"))
    lenient = ta.Rules({"typo": "f", "**": "t"}, unused="ignore")
    assert all(flat(ta.param_mask(TREE, lenient.where("t"))).values())
    with pytest.raises(ta.UnusedRuleError, match="'typo'"):
        ta.param_mask(TREE, rules.where("t"))  # a lenient call leaves nothing behind


def test_where_with_an_unknown_label_names_the_known_ones():
    with pytest.raises(ta.RulesError, match="labels are 'f', 't'\\."):
        ta.Rules({"a": "f"}, default="t").where("x")
    assert not any(flat(ta.Rules({"**": "t"}).where("frozen")(TREE)).values())
    assert len(ta.split(TREE, ~ta.Rules({"**": "t"}).where("frozen"))[0]) == 4
    with pytest.raises(ta.RulesError, match="there are no rules"):
        ta.Rules({}).where("x")


# Names from published models


def count_of(labels: Any) -> dict[Any, int]:
    counts: dict[Any, int] = {}
    for label in flat(labels).values():
        counts[label] = counts.get(label, 0) + 1
    return counts


LORA = {
    "language_model/model/layers/*/self_attn/{q,v}_proj": "lora",
    "vision_tower": "frozen",
    "**": "frozen",
}
MIXTURE = ta.Rules(
    [
        ("**/block_sparse_moe/gate", "router"),
        ("**/experts", "expert"),
        (["**/*norm*", "!**/experts"], "norm"),
        ("model/layers/{-4..}", "last"),
    ],
    default="rest",
)
DECAY = ta.Rules(
    [(["**/*norm*", "**/bias", "**/dt_bias", "**/A_log"], 0.0), ("**", 0.1)]
)


def lora(name):
    parts = name.split("/")
    language = name.startswith("language_model/model/layers/")
    return "lora" if language and parts[-2] in ("q_proj", "v_proj") else "frozen"


def mixture(name):
    if "/block_sparse_moe/gate/" in name:
        return "router"
    if "/experts/" in name:
        return "expert"
    if "norm" in name:
        return "norm"
    return "last" if name.startswith(_LAST) else "rest"


_LAST = tuple(f"model/layers/{number}/" for number in (52, 53, 54, 55))


def decay(name):
    ends = ("/bias", "/dt_bias", "/A_log")
    return 0.0 if "norm" in name or name.endswith(ends) else 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rules", "slow", "counts"),
    [
        ("gemma3", {**LORA}, lora, {"lora": 124, "frozen": 1_123}),
        (
            "mixtral",
            MIXTURE,
            mixture,
            {"router": 56, "expert": 1_344, "norm": 113, "last": 16, "rest": 210},
        ),
        ("gemma3", DECAY, decay, {0.0: 647, 0.1: 600}),
        ("qwen3_moe", DECAY, decay, {0.0: 191, 0.1: 22_022}),
    ],
)
def test_rules_that_people_use(model, rules, slow, counts):
    unused = "ignore" if rules is DECAY else "error"
    rules = rules if isinstance(rules, ta.Rules) else ta.Rules(rules)
    rules = ta.Rules(rules.pairs, default=rules.default, unused=unused)
    labels = rules(tree_of(model))
    assert flat(labels) == {name: slow(name) for name in names_of(model)}
    assert count_of(labels) == counts


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_everything_is_decided_the_same_with_a_default(model):
    prefix = "/".join(names_of(model)[-1].split("/")[:2])
    one = ta.Rules({prefix: "a", "**": "b"})(tree_of(model))
    two = ta.Rules({prefix: "a"}, default="b")(tree_of(model))
    assert one == two
    assert count_of(one)["a"] == sum(
        name.startswith(prefix + "/") or name == prefix for name in names_of(model)
    )


@pytest.mark.slow
def test_fifty_rules_at_once_decide_as_one_by_one():
    names = names_of("mixtral")
    rules = [
        *((f"model/layers/{n}/self_attn", f"attention {n}") for n in range(40)),
        *((f"**/experts/{e}/w{{1,3}}", f"expert {e}") for e in range(8)),
        ("**/*norm*", "norm"),
        ("**", "rest"),
    ]
    want = {}
    for name in names:
        matching = (label for where, label in rules if ta.glob(where).matches(name))
        want[name] = next(matching)
    assert flat(ta.Rules(rules)(tree_of("mixtral"))) == want


# Laws


SEGMENT = st.sampled_from(["a", "b", "ab"])
PATHS = st.lists(
    st.lists(SEGMENT, min_size=1, max_size=3).map("/".join), min_size=1, max_size=6
)
PATTERN = st.lists(
    st.sampled_from(["a", "b", "ab", "*", "**", "a*", "{a,b}"]), min_size=1, max_size=3
).map("/".join)
WHERE = st.one_of(
    PATTERN,
    st.lists(PATTERN | st.builds("!{}".format, PATTERN), min_size=1, max_size=3),
    st.sampled_from(
        [ta.leaf(ndim=0), ta.leaf(ndim=1), ~ta.leaf(ndim=1), ta.node(dict)]
    ),
    st.tuples(PATTERN, st.sampled_from([0, 1])).map(
        lambda two: ta.glob(two[0]) & ta.leaf(ndim=two[1])
    ),
)
TABLE = st.lists(st.tuples(WHERE, st.integers(0, 3)), max_size=5)


@pytest.mark.slow
@given(PATHS, TABLE, st.data())
def test_the_first_match_wins_as_in_a_slow_loop(paths, table, data):
    tree = {
        "t": {p: array(*[1] * data.draw(st.integers(0, 1))) for p in paths},
        "f": len,
    }
    rules = ta.Rules(table, default=9, unused="ignore")
    each = [select(tree, where, unused="ignore") for where, _ in table]
    want = []
    for index, leaf_ in enumerate(flat(tree).values()):
        hits = (label for (_, label), m in zip(table, each, strict=True) if m[index])
        want.append(next(hits, ta.STATIC if leaf_ is len else 9))
    assert rules.match(tree).values == want
    assert [*flat(rules(tree)).values()] == want
    assert [*flat(rules.bind(tree)(tree)).values()] == want
    for label in dict.fromkeys(label for _, label in table):
        where = select(tree, rules.where(label), unused="ignore")
        assert where == [type(v) is int and v == label for v in want]


@pytest.mark.slow
@given(PATHS, TABLE)
def test_reports_agree_with_a_slow_count(paths, table):
    tree = {"t": {path: array() for path in paths}}
    table = [(where, value) for where, value in table if isinstance(where, str | list)]
    matches = ta.Rules(table, default=9).match(tree)
    patterns = [
        (index, [where] if isinstance(where, str) else where)
        for index, (where, _) in enumerate(table)
    ]
    unused = {
        (index, entry)
        for index, entries in patterns
        for entry in entries
        if not any(ta.glob(entry.removeprefix("!")).matches(p) for p in matches.paths)
    }
    assert unused == {
        (index, entry) for index, entry in matches.unused if isinstance(entry, str)
    }
    for index in matches.shadowed:
        assert index not in matches.deciding
        assert table[index][0] != "**"
        assert any(select(tree, table[index][0], unused="ignore"))


@pytest.mark.slow
@given(PATHS, TABLE, st.randoms(use_true_random=False))
def test_labels_do_not_depend_on_insertion_order(paths, table, random):
    tree = {path: array(1) for path in paths}
    items = list(tree.items())
    random.shuffle(items)
    rules = ta.Rules(table, default=9, unused="ignore")
    if any(isinstance(where, str | list) for where, _ in table) or not table:
        nested = ({"t": tree}, {"t": dict(items)})
        assert rules(nested[0]) == rules(nested[1])


# What an error says


LAYERS = {
    "layers": {
        str(i): {"attn": {"out": {"bias": array(1), "kernel": array(2)}}}
        for i in range(12)
    }
}


def test_a_problem_in_every_layer_is_one_line():
    with pytest.raises(ta.UnmatchedPathError) as caught:
        ta.param_labels(LAYERS, {"**/kernel": "a"})
    assert "12 of 24 leaves match no rule: 'layers/{0..11}/attn/out/bias'.\n" in str(
        caught.value
    )
    rules = {f"layers/{i}/attn/out/bais": i for i in range(12)} | {"**": 1}
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.param_labels(LAYERS, rules)
    assert (
        "\n  'layers/{0..11}/attn/out/bais' (rule {1..12}), the first: did you mean "
        "'layers/0/attn/out/bias' (1 leaf)"
    ) in str(caught.value)
    assert str(caught.value).count("bais") == 1
    bound = ta.Rules({"**": "a"}).bind({"layers": {}, "x": array(1)})
    with pytest.raises(ta.SelectorError, match=r"'layers/\{0\.\.11\}/attn/out/bias', "):
        bound(LAYERS)


@pytest.mark.parametrize(
    "use",
    [
        lambda rules: ta.param_labels(LAYERS, rules),
        lambda rules: ta.partition({1: optax.sgd(1.0)}, rules).init(ONES),
        lambda rules: ta.scale_by_rules(rules).init(ONES),
    ],
    ids=["labels", "partition", "scale"],
)
def test_the_suggested_way_to_allow_an_unused_rule_works_there(use):
    table = {"layres": 1, "**": 1}
    with pytest.raises(ta.UnusedRuleError) as caught:
        use(table)
    assert 'treeadapt.Rules(rules, unused="ignore")' in str(caught.value)
    use(ta.Rules(table, unused="ignore"))


def test_the_suggested_way_to_allow_an_unused_selector_works_there():
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.freeze(optax.sgd(1.0), "layres").init(ONES)
    cure = 'treeadapt.Rules([(where, 1)], unused="ignore").where(1)'
    assert cure in str(caught.value)
    where = eval(cure, {"treeadapt": ta, "where": "layres"})
    ta.freeze(optax.sgd(1.0), where).init(ONES)
    assert ta.split(LAYERS, ~where)[0].keys() == ta.to_flat_dict(LAYERS).keys()


ONES = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), LAYERS)


class Tied(nnx.Module):
    def __init__(self):
        self.embed = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
        self.head.kernel = self.embed.kernel
        self.same = self.embed


def test_rules_as_an_nnx_filter_are_an_error_that_names_where():
    model, rules = Tied(), ta.Rules({"head": "a", "**": "b"})
    for asked in (rules, rules.bind(model)):
        with pytest.raises(ta.SelectorError, match=r"rules\.where\('a'\)"):
            nnx.state(model, asked)
    assert "head" in nnx.state(model, rules.where("a"))


def test_rules_in_a_tree_are_a_leaf():
    tree = {"w": array(2), "rules": ta.Rules({"**": np.ones(2)})}
    assert ta.tree_paths({"w": array(2), "rules": ta.Rules({"**": "x"})}) == (
        "rules",
        "w",
    )
    with pytest.raises(ta.AdapterError):
        ta.split(tree)


def test_an_overlap_asks_no_rule_about_leaves_that_clash_already():
    asked = []
    rules = [("**", 3), ("head", 4), (ta.leaf(lambda x: asked.append(x.shape)), 2)]
    with pytest.raises(ta.OverlapError):
        ta.Rules(rules, overlap="error", unused="ignore")(
            {"head": array(7), "w": array(2)}
        )
    assert asked == [(2,)]


def test_entries_that_match_nothing_may_be_ignored_wherever_leaves_are_chosen(tmp_path):
    where = ["encoder/{kernel,kernl}", "typo", tuple, "!bais"]
    tree = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), TREE)
    file = tmp_path / "x.safetensors"
    ta.save(file, tree)
    zeros = jax.tree.map(jnp.zeros_like, tree)
    calls = {
        "split": lambda **options: ta.split(tree, where, **options)[0],
        "map_where": lambda **options: ta.map_where(
            jnp.ones_like, tree, where, **options
        ),
        "save": lambda **options: ta.save(
            tmp_path / "y.safetensors", tree, where=where, **options
        ),
        "load": lambda **options: ta.load(file, zeros, where=where, **options),
        "load alone": lambda **options: ta.load(file, where=where, **options),
        "compare": lambda **options: ta.compare_checkpoint(
            file, zeros, where=where, **options
        ),
        "tree_diff": lambda **options: ta.tree_diff(
            tree, zeros, where=where, **options
        ),
        "summarize": lambda **options: ta.summarize(tree, where=where, **options),
        "param_mask": lambda **options: ta.param_mask(tree, where, **options),
        "freeze": lambda **options: ta.freeze(optax.sgd(0.1), where, **options).init(
            tree
        ),
    }
    for call in calls.values():
        with pytest.raises(ta.UnusedRuleError, match="'typo'"):
            call()
        with pytest.raises(ta.SelectorError, match="unused= is 'error' or 'ignore'"):
            call(unused="warn")
    chosen = {name: call(unused="ignore") for name, call in calls.items()}
    assert [*chosen["split"]] == ["encoder/kernel"]
    assert [*ta.read_metadata(tmp_path / "y.safetensors")] == ["encoder/kernel"]
    assert ta.tree_paths(chosen["load alone"]) == ("encoder/kernel",)
    assert len(chosen["summarize"].rows) == 1


def test_rules_made_of_rules_keep_the_options_that_are_not_given():
    options = {"default": 1, "unused": "ignore", "overlap": "error", "stacks": {"b": 0}}
    rules = ta.Rules({"a": 2}, **options)
    assert ta.Rules(rules) == rules
    for name, value in {"default": 3, "stacks": {"c": 1}, "overlap": "first"}.items():
        assert ta.Rules(rules, **{name: value}) == ta.Rules(
            {"a": 2}, **options | {name: value}
        )
    assert ta.Rules(rules, unused="error").unused == "error"


def test_first_labels_of_a_small_tree_take_few_calls_through_few_modules():
    warm = {"warm": np.ones(1)}
    ta.param_labels(warm, {"**": 1})
    tree = {"new": {"w": np.ones(2), "b": np.ones(1)}, "head": {"w": np.ones(2)}}
    tree |= {"n": np.ones(1), "m": np.ones(1), "k": np.ones(1)}
    package, calls = str(Path(ta.__file__).parent), []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        ta.param_labels(tree, {"new": "frozen", "**": "train"})
    finally:
        sys.setprofile(None)
    assert len(calls) <= 150
    assert len(set(calls)) <= 12
