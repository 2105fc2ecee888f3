"""The report of a tree: what it counts, what it says of rules, how it fits a page."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from scanned import TWINS
from trees import BY_NAME

import treeadapt as ta

TREE = {"a": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "b": jnp.ones(2)}
NO_LABEL = ta.Rules({}).default
WITH_STATIC = TREE | {"act": jax.nn.relu}


def rows_of(summary):
    pending, rows = [*summary.outline().rows()], []
    while pending:
        row = pending.pop(0)
        rows.append(row)
        pending = [*row.children, *pending]
    return rows


def rules_of(summary):
    """Number, label, number of leaves and selector of each; none says more."""
    assert not any(row.ends for row in summary.rules)
    return [(row.number, row.label, row.num_leaves, row.where) for row in summary.rules]


def test_every_rule_has_one_row_with_the_number_that_its_leaves_show():
    rules = ta.Rules({"nothing": "x", "a": "frozen", "a/bias": "y", "b": "train"})
    summary = ta.summarize(TREE, rules)
    assert [row.rule for row in summary.rows] == [2, 2, 4]
    assert rules_of(summary) == [
        (1, "x", 0, "'nothing'"),
        (2, "frozen", 2, "'a'"),
        (3, "y", 0, "'a/bias'"),
        (4, "train", 1, "'b'"),
    ]
    assert summary.notes == (
        "Unused: rule 1, 'nothing' matches no array: paths here look like 'a/bias', "
        "'b'",
        "Shadowed: rule 3, 'a/bias' is unreachable: earlier rules already match its "
        "only leaf, 'a/bias'. Move it up, before rule 2, 'a'.",
    )


def test_leaves_without_a_rule_have_a_row_for_each_label():
    unmatched = ta.summarize(WITH_STATIC, {"a": "frozen"})
    assert rules_of(unmatched)[1:] == [
        (None, ta.STATIC, 1, ""),
        (None, NO_LABEL, 1, ""),
    ]
    assert unmatched.notes == (
        "Unmatched: 1 leaf without a rule: 'b'. Add a rule, or end with one for "
        '"**".',
    )
    given = ta.summarize(TREE, ta.Rules({"a": "frozen"}, default="train"))
    assert rules_of(given)[1:] == [(None, "train", 1, "")]
    assert "   -  train        1  no rule\n" in str(given)


def test_an_overlap_that_the_rules_refuse_is_reported_and_not_raised():
    rules = {"a/bias": "x", "a": "y", "b": "z"}
    summary = ta.summarize(TREE, ta.Rules(rules, overlap="error"))
    assert summary.notes == (
        "Overlap: rule 2, 'a' gives another value than rule 1, 'a/bias', to 1 leaf: "
        "'a/bias'. Exclude them from one of the two, or choose overlap = \"first\".",
    )
    assert ta.summarize(TREE, rules).notes == ()


def test_rules_with_one_label_are_one_total_in_the_order_of_the_rules():
    rules = ta.Rules([("b", 1), ("**/bias", 0.5), ("**", 1)])
    totals = ta.summarize(TREE, rules).totals
    assert [(total.label, total.num_leaves, total.num_params) for total in totals] == [
        (1, 2, 8),
        (0.5, 1, 3),
    ]


@pytest.mark.parametrize("name", ["no leaf", "None and empties", "bare leaf"])
def test_any_tree_has_a_report_with_and_without_rules(name):
    tree = BY_NAME[name].make()
    num_leaves = len(jax.tree.leaves(tree))
    for summary in (ta.summarize(tree), ta.summarize(tree, ta.Rules({}, default="x"))):
        assert len(summary.rows) == num_leaves
        assert len(str(summary).splitlines()[0].split()) == (
            5 if summary.rules is None else 7
        )


def test_a_path_without_text_is_seen():
    assert str(ta.summarize(jnp.ones(2))).splitlines()[1].startswith("''  ")


def test_what_does_not_print_is_escaped():
    assert "a\\x1b[1mb" in str(ta.summarize({"a\x1b[1mb": jnp.ones(2)}))


def test_natural_order_counts_and_puts_a_node_before_what_extends_its_name():
    ordered = ["", "1", "02", "2", "10", "a", "a/b", "a1", "a2", "a10/0", "a10/b"]
    ordered += ["a.b"]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    # Some have more digits than int() takes.
    ordered[-1:-1] = long = ["a." + digit * 5_000 for digit in "19"]
    shuffled += long[::-1]
    rows = ta.summarize(dict.fromkeys(shuffled, jnp.ones(1))).rows
    assert [row.path for row in rows] == ordered


def test_where_narrows_leaves_rules_totals_and_notes_together():
    rules = {"a/kernel": "x", "a/bias": "y", "nothing": "z"}
    summary = ta.summarize(TREE, rules, where="**/bias")
    assert [row.path for row in summary.rows] == ["a/bias"]
    assert rules_of(summary) == [(2, "y", 1, "'a/bias'")]
    assert [(t.label, t.num_leaves) for t in summary.totals] == [("y", 1)]
    assert len(summary.notes) == 1
    assert summary.notes[0].startswith("Unused: rule 3, 'nothing' matches no array")
    assert "b" in ta.summarize(TREE, rules, where="b").notes[0]
    assert "rule 2: 'a/bias'" in summary.to_html()
    with pytest.raises(ta.UnusedRuleError):
        ta.summarize(TREE, rules, where="**/bais")


def test_rules_decide_on_the_whole_tree_whatever_is_shown():
    tree = {"layers": [{"w": jnp.ones(2)} for _ in range(4)]}
    rules = {"layers/{-1}": "last", "**": "train"}
    labels = [row.label for row in ta.summarize(tree, rules, where="layers/3").rows]
    assert labels == ["last"]


def test_an_overlap_is_reported_only_for_leaves_that_are_shown():
    rules = ta.Rules({"a/bias": "x", "a": "y", "b": "z"}, overlap="error")
    assert ta.summarize(TREE, rules, where="b").notes == ()
    assert "Overlap" in ta.summarize(TREE, rules, where="a").notes[0]


def test_repr_is_one_short_line():
    tree = {f"x{n}": jnp.ones(2) for n in range(100)}
    shown = repr(ta.summarize(tree, {"**": "train"}))
    assert shown == "Summary(100 leaves, 200 parameters, 800 B)"


def test_the_text_of_a_report_is_its_tree():
    tree = {"net": [{"w": jnp.ones(4), "b": jnp.ones(4)} for _ in range(3)]}
    summary = ta.summarize(tree, {"**/w": "decay", "**": "train"})
    assert summary.to_text() == (
        "6 leaves, 24 parameters, 96 B\n"
        "\n"
        "   label  leaves  params  size  share  rules\n"
        "██ decay       3      12  48 B    50%  '**/w'\n"
        "██ train       3      12  48 B    50%  '**'\n"
        "\n"
        "path        contents        size  share             label\n"
        "net/{0..2}  6 leaves        96 B  ████████████████  decay (50%), train (50%)\n"
        "  b         3 x float32[4]  48 B  ████████          train\n"
        "  w         3 x float32[4]  48 B  ████████          decay"
    )


def test_labels_that_read_alike_are_kept_apart():
    ones = [np.ones(2_000), np.ones(2_000)]
    ones[1][1_000] = 2.0  # NumPy leaves it out of the text
    for first, second in ((1, "1"), (1, True), (ones[0], ones[1])):
        summary = ta.summarize(
            {"a": np.ones(2), "b": np.ones(3)}, [("a", first), ("b", second)]
        )
        assert [total.num_params for total in summary.totals] == [2, 3]
        assert [place for row in rows_of(summary) for place in row.node.parts] == [0, 1]
    shown = str(
        ta.summarize({"a": np.ones(2), "b": np.ones(3)}, [("a", 1), ("b", "1")])
    )
    assert [line.split()[0] for line in shown.splitlines()[-2:]] == ["1", "'1'"]


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_a_report_of_layers_adds_up_to_that_of_the_unrolled_model(twin):
    table = {"**/*{1,3}/**": "odd", f"**/{twin.kernel}": "rate", "**/norm": "norm"}
    rules = ta.Rules(table, stacks=twin.stacks, unused="ignore")
    scanned, unrolled = twin.scanned(), twin.unrolled()
    found = ta.summarize(scanned, rules)
    plain = ta.summarize(unrolled, ta.Rules(table, unused="ignore"))
    assert found.rules == plain.rules
    assert found.totals == plain.totals
    assert found.outline().root.parts == plain.outline().root.parts
    assert len(found.rows) < len(plain.rows)
    for row in found.rows:
        if row.shape is None:
            continue
        # Its path is the pattern of its layers.
        same = ta.summarize(unrolled, table, where=row.path)
        assert {(one.label, one.rule) for one in same.rows} == {(row.label, row.rule)}
        sums = [(x.num_leaves, x.num_params, x.size_bytes) for x in same.totals]
        assert sums == [(row.num_leaves, row.num_params, row.size_bytes)]
        assert np.prod(row.shape) == row.num_params
    notes = {
        f"Unrolled: the layers of the stack {key!r} are leaves of this tree."
        for key, axis in twin.stacks.items()
        if axis is not None
    }
    assert {*ta.summarize(unrolled, rules).notes} == notes | {*plain.notes}


LAYERS = {"blocks": {"w": jnp.ones((3, 6)), "b": jnp.ones(6)}, "head": jnp.ones(3)}
OF_LAYERS = ta.Rules(
    {"blocks/{0,1,4}/w": "frozen", "blocks": "train"}, stacks={"blocks": -1}
)


def test_layers_that_get_the_same_are_one_row():
    summary = ta.summarize(LAYERS, OF_LAYERS)
    rows = [(row.path, row.shape, row.label, row.num_leaves) for row in summary.rows]
    assert rows == [
        ("blocks/{0..5}/b", (6,), "train", 6),
        ("blocks/{{0..1},{4}}/w", (3, 3), "frozen", 3),
        ("blocks/{{2..3},{5}}/w", (3, 3), "train", 3),
        ("head", (3,), NO_LABEL, 1),
    ]
    assert [rule.num_leaves for rule in summary.rules] == [3, 9, 1]
    assert [total.num_params for total in summary.totals] == [9, 15, 3]
    shown = [row.path for row in rows_of(summary) if row.node.is_leaf]
    assert shown == [path for path, *_ in rows]


def test_where_selects_layers_and_so_does_a_selector_of_the_rules():
    summary = ta.summarize(LAYERS, OF_LAYERS, where="blocks/{-1}")
    assert [row.path for row in summary.rows] == ["blocks/{5}/b", "blocks/{5}/w"]
    frozen = ta.summarize(LAYERS, OF_LAYERS, where=OF_LAYERS.where("frozen"))
    assert [row.path for row in frozen.rows] == ["blocks/{{0..1},{4}}/w"]
    assert frozen.totals[0].num_leaves == 3


def test_notes_name_runs_of_layers():
    rules = ta.Rules({"blocks/{1..4}/b": "x"}, stacks={"blocks": -1})
    assert ta.summarize(LAYERS, rules).notes == (
        "Unmatched: 9 leaves without a rule: 'blocks/{0..5}/w', "
        "'blocks/{{0},{5}}/b', 'head'. Add a rule, or end with one for \"**\".",
    )


def test_a_plan_of_layers_holds_what_the_plan_of_the_unrolled_model_holds():
    spec = jax.sharding.PartitionSpec
    table = {"blocks/*/w": spec(None, "model"), "**": spec()}
    rules = ta.Rules(table, stacks={"blocks": -1})
    mesh = jax.sharding.AbstractMesh((3,), ("model",))
    tree = {"blocks": {"w": jnp.ones((3, 9, 6)), "b": jnp.ones((9, 6))}}
    blocks = [{"w": jnp.ones((3, 9)), "b": jnp.ones(9)} for _ in range(6)]
    tx = optax.adam(1e-3)
    found = ta.summarize(tree, rules, mesh=mesh, tx=tx).memory
    plain = ta.summarize({"blocks": blocks}, table, mesh=mesh, tx=tx).memory
    assert found.device_bytes == plain.device_bytes
    assert found.arrays[1].spec == spec(None, "model", None)
    part = ta.summarize(tree, rules, mesh=mesh, where="blocks/2/w").memory
    assert [array.path for array in part.arrays] == ["blocks/w"]


@pytest.mark.slow
def test_a_rule_that_is_no_pattern_says_how_its_paths_end():
    attention = linen.MultiHeadDotProductAttention(num_heads=2)
    params = attention.init(jax.random.key(0), jnp.ones((5, 8)))["params"]
    nnx_one = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    for tree in (params, nnx.state(nnx_one, nnx.Param)):
        table = {ta.leaf(ndim=2): "m", ("**/bias", "!query"): "b", "**": "rest"}
        summary = ta.summarize(tree, table)
        assert [dict(row.ends) for row in summary.rules] == [
            {"bias": 3},
            {"bias": 1},
            {},
        ]
        text = "leaf(ndim=2): bias 3"
        for form in (str, ta.Summary.to_text, ta.Summary.to_html, ta.Summary.to_svg):
            assert text in form(summary)
        assert text in summary.to_markdown()
    many = {f"w{n}": jnp.ones(1) for n in range(12)}
    (rule,) = ta.summarize(many, {ta.leaf(): "a"}).rules
    assert rule.text == "leaf(): w0 1, w1 1, w2 1, w3 1, w4 1, w5 1 and 6 more"
    dotted = {"h.0.w": jnp.ones(1), "h.1.w": jnp.ones(1)}
    (rule,) = ta.summarize(dotted, {ta.leaf(): "a"}, separator=".").rules
    assert rule.text == "leaf(): w 2"


def test_functions_and_numbers_are_one_line():
    model = {"a": jnp.ones(2), "f": jax.nn.relu, "n": 0.5, "s": [0.1, len]}
    rules = {"s/0": "x", "a": "y"}
    for summary in (ta.summarize(model), ta.summarize(model, rules)):
        line = "(4 not arrays)"
        assert len(summary.rows) == 5  # each, for programs
        for text in (str(summary), summary.to_text(), summary.to_html()):
            assert line in text
            assert "s/0" not in text.replace("'s/0'", "")
            assert "s/1" not in text
        assert "float 2" in str(summary)
    cells = str(summary).partition("(4 not arrays)")[2].splitlines()[0].split("-  ")
    assert cells[-1].split() == ["static,", "x", "1"]
    assert summary.totals == ta.summarize(model, rules, statics=True).totals
    shown = ta.summarize(model, rules, statics=True)
    for text in (str(shown), shown.to_text()):
        assert "(4 not" not in text
    assert "s/1" in str(shown)
    one = ta.summarize({"a": jnp.ones(2), "f": jax.nn.relu})
    assert "not arrays" not in str(one)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)


class NormedLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=True)(linen.Dense(4, name="head")(x))


@pytest.mark.parametrize("label", ["frozen", "train"])
def test_batch_statistics_are_said_to_be_no_params(label):
    """A model changes them, frozen or not, and no optimizer does."""
    rules = {"**/head": "train", "**": label}
    model = Normed(nnx.Rngs(0))
    (note,) = ta.summarize(model, rules).notes
    assert note.startswith(
        "Note: no optimizer trains 'norm/mean', 'norm/var', whatever"
    )
    assert note in str(ta.summarize(model, rules))
    variables = jax.eval_shape(NormedLinen().init, jax.random.key(0), jnp.ones((1, 3)))
    (note,) = ta.summarize(variables, rules).notes
    assert note.startswith("Note: 'batch_stats' are batch statistics, whatever their")
    ta.adapt(optax.adam(1e-3)).init(variables["params"])  # what it names


def test_batch_statistics_are_said_only_with_labels_for_them():
    model = Normed(nnx.Rngs(0))
    assert not ta.summarize(model).notes
    assert not ta.summarize(model, {"**": jax.P()}).notes
    rules = {"head": "train", "**": "frozen"}
    assert not ta.summarize(model, rules, where="head").notes
    assert not ta.summarize({"params": model.head, "opt": 1.0}, {"**": "train"}).notes
