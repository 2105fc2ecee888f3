"""``expect``: how many arrays should have a label."""

from __future__ import annotations

import copy
import json
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
from command import run

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

MODEL = {
    f"layers_{n}": {name: jnp.ones((2, 2)) for name in ("w", "lora_a", "lora_b")}
    for n in range(3)
}
STACKED = {
    "blocks": {"w": jnp.ones((3, 2, 5)), "lora_a": jnp.ones((3, 4, 1))},
    "head": jnp.ones(2),
}
PAIRS = {"**/lora_*": "lora", "**": "frozen"}


def rules(count: int) -> ta.Rules:
    return ta.Rules(PAIRS, expect={"lora": count})


@pytest.mark.parametrize(
    "use",
    [
        lambda rules, tree: ta.param_labels(tree, rules),
        lambda rules, tree: rules(tree),
        lambda rules, tree: rules.bind(tree),
        lambda rules, tree: rules.by_path(tree),
        lambda rules, tree: ta.partition({"lora": optax.adam(1.0)}, rules).init(tree),
        lambda rules, tree: optax.multi_transform(
            {"lora": optax.adam(1.0), "frozen": optax.set_to_zero()}, rules
        ).init(tree),
    ],
)
def test_another_number_of_arrays_is_an_error(use):
    use(rules(6), MODEL)
    with pytest.raises(ta.RulesError, match=r"5 arrays .* label 'lora', and 6 have it"):
        use(rules(5), MODEL)


def test_the_error_names_the_arrays():
    with pytest.raises(ta.RulesError) as error:
        ta.param_labels(MODEL, rules(7))
    text = "7 arrays should have the label 'lora', and 6 have it: "
    text += "'layers_{0..2}/lora_a', 'layers_{0..2}/lora_b'. Correct"
    assert str(error.value).startswith(text)
    assert error.value.paths == tuple(p for p in ta.tree_paths(MODEL) if "lora" in p)
    table = ta.Rules({"**": "a"}, default="b", expect={"b": 1, "a": 8})
    with pytest.raises(ta.RulesError) as error:
        ta.param_labels(MODEL, table)
    assert "1 array should have the label 'b', and 0 have it. " in str(error.value)
    assert "8 arrays should have the label 'a', and 9 have it: " in str(error.value)


def test_a_layer_counts_as_on_the_model_unrolled():
    pairs = {"blocks/{0..1}/lora_a": "lora", "**": "frozen"}
    stacks = {"blocks": 0}
    unrolled = {
        "blocks": {
            str(n): {k: x[n] for k, x in STACKED["blocks"].items()} for n in range(3)
        },
        "head": STACKED["head"],
    }
    for tree in (STACKED, unrolled):
        table = ta.Rules(pairs, stacks=stacks, expect={"lora": 2})
        assert table.match(tree).check()
        table = ta.Rules(pairs, stacks=stacks, expect={"lora": 1})
        with pytest.raises(ta.RulesError, match="and 2 have it"):
            table.match(tree).check()


def test_a_part_of_a_tree_is_not_counted():
    table = rules(6)
    part = {**MODEL, "layers_0": optax.MaskedNode()}
    assert table(part)["layers_1"]["w"] == "frozen"
    bound = table.bind(MODEL)
    assert bound({"layers_0/lora_a": 1.0}) == {"layers_0/lora_a": "lora"}
    # In a group of a partition, too: its inner masks are shown a few leaves.
    inner = optax.masked(optax.adam(1.0), ta.Rules({"**": True}, expect={True: 9}))
    tx = ta.partition({"lora": inner}, PAIRS)
    tx.init(MODEL)


def test_ignoring_unused_rules_ignores_no_count():
    table = ta.Rules({"zz": "a", **PAIRS}, unused="ignore", expect={"lora": 2})
    with pytest.raises(ta.RulesError, match="2 arrays"):
        ta.param_labels(MODEL, table)


def test_rules_that_expect_are_values():
    table = rules(6)
    assert table == rules(6) != rules(5)
    assert hash(table) == hash(rules(6))
    assert repr(table).endswith("expect={'lora': 6})")
    for again in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert again == table
    assert ta.Rules(table, default="x").expect == {"lora": 6}
    counts = {"lora": 6}
    table = ta.Rules(PAIRS, expect=counts)
    counts["lora"] = 0
    assert table.expect == {"lora": 6}


@pytest.mark.parametrize(
    ("expect", "says"),
    [
        ({"lroa": 1}, "names the label 'lroa', which no rule gives"),
        ({"lora": 1.0}, "has 1.0 for 'lora'"),
        ({"lora": True}, "has True for 'lora'"),
        ({"lora": -1}, "has -1 for 'lora'"),
        ({"lora": "6"}, "has '6' for 'lora'"),
        (6, "expect= is a mapping"),
        (["lora"], "expect= is a mapping"),
    ],
)
def test_malformed_counts_are_refused(expect, says, tmp_path):
    with pytest.raises(ta.RulesError, match=says):
        ta.Rules(PAIRS, expect=expect)
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"version": 1, "rules": PAIRS, "expect": expect}))
    with pytest.raises(ta.RulesFileError, match="expect"):
        ta.load_rules(file)


def test_a_file_may_expect(tmp_path):
    file = tmp_path / "rules.toml"
    text = 'version = 1\n\n[expect]\n"lora" = 6\n\n[rules]\n'
    text += '"**/lora_*" = "lora"\n"**" = "frozen"\n'
    file.write_text(text)
    assert ta.load_rules(file) == rules(6)
    assert rules(6).to_toml() == text
    with pytest.raises(ta.RulesFileError, match="labels that are texts"):
        ta.Rules({"**": 1}, expect={1: 3}).to_toml()


def test_reports_say_it_and_lint_fails(tmp_path):
    file, model = tmp_path / "rules.toml", tmp_path / "model.schema.toml"
    ta.save(model, MODEL)
    file.write_text(rules(5).to_toml())
    out = run("lint", model, "--rules", file, code=1)
    assert "count: 5 arrays should have the label 'lora', and 6 have it" in out
    assert "0 findings" in run("lint", model, "--rules", file, "--ignore", "count")
    (note,) = ta.summarize(MODEL, rules(5)).notes
    assert note.startswith("Count: 5 arrays should have the label")
    file.write_text(rules(6).to_toml())
    assert "0 findings" in run("lint", model, "--rules", file)


def test_an_optimizer_from_a_file_expects(tmp_path):
    document = {
        "rules": PAIRS,
        "expect": {"lora": 5},
        "optimizers": {"lora": {"type": "adam", "learning_rate": 1.0}},
    }
    with pytest.raises(ta.RulesError, match="5 arrays"):
        ta.load_optimizer(document).init(MODEL)
    clip = {"type": "clip", "max_delta": 1}
    document |= {"optimizer": [clip, {"type": "partition"}]}
    with pytest.raises(ta.RulesError, match="5 arrays"):
        ta.load_optimizer(document).init(MODEL)
    document |= {"expect": {"lora": 6}}
    tx = ta.load_optimizer(document)
    state = tx.init(MODEL)
    jax.jit(tx.update)(MODEL, state, MODEL)
