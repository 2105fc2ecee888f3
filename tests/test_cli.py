"""The ``treeadapt`` command on real files of each format, and on bad ones."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_qwen3
from command import COMMANDS, invoke, run
from test_checkpoints import ENDINGS, FORMATS, HOSTILE, hostile

import treeadapt as ta
from treeadapt.checkpoints import reading, save_load, writing
from treeadapt.checkpoints.array_boxes import FileArray
from treeadapt.cli import bench, convert_command, sources
from treeadapt.reports import diff

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def model():
    layers = {
        f"hidden_{n}": {
            "kernel": np.ones((2, 3), ml_dtypes.bfloat16),
            "bias": np.zeros(3, np.float32),
        }
        for n in range(11)
    }
    return {"policy": layers, "value": {"kernel": np.ones((3, 1), np.float32)}}


def linked():
    """A tree for ``module:function``, with a static leaf and a tied one."""
    weight = jnp.ones((2, 3))
    return {"a": weight, "b": {"a": weight}, "act": "relu", "c": [jnp.ones(2)] * 1}


def failing():
    raise RuntimeError("no\nluck " + "x" * 5_000)


def returning_none():
    return None


def returning_text():
    return "no tree"


def reading_values():
    return {"a": jnp.ones(int(jnp.ones(())))}


def abstract():
    return jax.eval_shape(linked_arrays)


def linked_arrays():
    return {"a": jnp.ones((2, 3))}


class Scale:
    """A model that is called like a function."""

    def __init__(self):
        self.w = np.ones((2, 3))

    def __call__(self, x):
        return self.w * x


ta.register(Scale, fields=("w",))
MODEL = Scale()
SHAPES = abstract()


def leaving():
    sys.exit("bye")


def needing(config):
    return config


LINEN = nn.Dense(3)
RULES = 'version = 1\n[rules]\n"policy/hidden_0" = "frozen"\n"**" = "train"\n'


@pytest.fixture(params=FORMATS)
def file(request, tmp_path):
    path = tmp_path / f"model{ENDINGS[request.param]}"
    ta.save(path, model())
    return path


@pytest.fixture
def npz(tmp_path):
    path = tmp_path / "model.safetensors"
    ta.save(path, model())
    return path


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


def written(tmp_path, text):
    path = tmp_path / "other.toml"
    path.write_text("version = 1\n[rules]\n" + text)
    return path


def test_show_lists_every_leaf_in_natural_order(file, rules):
    lines = run("show", file, "--rules", rules).splitlines()
    assert lines[0].split()[:5] == ["path", "shape", "dtype", "params", "size"]
    paths = [line.split()[0] for line in lines[1:24]]
    assert paths.index("policy/hidden_2/bias") < paths.index("policy/hidden_10/bias")
    assert paths[-1] == "value/kernel"
    assert "bfloat16" in lines[2]
    assert any(line.split()[:2] == ["frozen", "2"] for line in lines[24:])


def test_show_as_json(npz, rules):
    found = json.loads(run("show", npz, "--rules", rules, "--format", "json"))
    leaf = next(x for x in found["leaves"] if x["path"] == "policy/hidden_0/kernel")
    assert leaf == {
        "path": "policy/hidden_0/kernel",
        "shape": [2, 3],
        "dtype": "bfloat16",
        "params": 6,
        "bytes": 12,
        "label": "frozen",
        "rule": "'policy/hidden_0'",
        "tied_to": None,
        "leaves": 1,
    }
    assert [total["leaves"] for total in found["totals"]] == [2, 21]


def test_show_adds_up_by_depth(npz, rules):
    lines = run("show", npz, "--depth", 1).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["path", "leaves"],
        ["policy", "22"],
        ["value", "1"],
    ]
    assert "frozen" in run("show", npz, "--depth", 1, "--rules", rules)


def test_statics_shows_each_leaf_that_is_not_an_array(tmp_path, monkeypatch):
    code = "import numpy as np\ndef tree():\n    return [np.ones(2), 0.5, len]\n"
    (tmp_path / "with_statics.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    options = ("show", "with_statics:tree")
    assert "(2 not arrays)" in run(*options)
    for shown in (run(*options, "--statics"), run(*options, "--format", "json")):
        assert "not arrays" not in shown
        assert "float" in shown
        assert "builtin_function_or_method" in shown


def test_depth_does_not_count_the_dots_of_layers(tmp_path):
    ta.save(tmp_path / "x.safetensors", {"h.w": np.ones((4, 2), "f4")})
    table = '[stacks]\n"" = 0\n[rules]\n"{0..1}/**" = "a"\n"**" = "b"\n'
    rules = tmp_path / "stacked.toml"
    rules.write_text(f"version = 1\n{table}")
    options = ("show", tmp_path / "x.safetensors", "--rules", rules)
    for depth, names in (
        (1, ["{0..1}", "{2..3}"]),
        (2, ["{0..1}/h.w", "{2..3}/h.w"]),
    ):
        lines = run(*options, "--depth", depth).splitlines()
        assert [line.split()[0] for line in lines[1:]] == names


def test_sums_are_data_in_json(npz, rules):
    options = ("show", npz, "--depth", 1, "--rules", rules, "--format")
    nodes = json.loads(run(*options, "json"))["nodes"]
    assert nodes[0] == {
        "path": "policy",
        "leaves": 2,
        "params": 9,
        "bytes": 24,
        "label": "frozen",
    }


def test_sums_keep_labels_apart_that_read_alike(tmp_path):
    ta.save(tmp_path / "y.safetensors", {"x": {"a": np.ones(2), "b": np.ones(3)}})
    other = written(tmp_path, '"x/a" = 1\n"x/b" = "1"\n')
    options = (tmp_path / "y.safetensors", "--rules", other, "--depth", 1)
    nodes = json.loads(run("show", *options, "--format", "json"))["nodes"]
    assert [(node["label"], node["params"]) for node in nodes] == [(1, 2), ("1", 3)]
    table = run("show", *options).splitlines()
    assert [row.split()[-1] for row in table[1:]] == ["1", "'1'"]


def test_show_as_a_tree(npz, rules):
    text = run("show", npz, "--rules", rules, "--format", "tree")
    assert (
        text
        == ta.summarize(ta.read_metadata(npz), ta.load_rules(rules)).to_text() + "\n"
    )
    assert "hidden_{1..10}" in text


@pytest.mark.parametrize("name", ["report.svg", "report.html", "report.md"])
def test_show_draws_to_a_file(npz, rules, tmp_path, name):
    out = tmp_path / name
    options = ("show", npz, "--rules", rules, "--output", out)
    assert run(*options) == f"Wrote {str(out)!r}.\n"
    summary = ta.summarize(ta.read_metadata(npz), ta.load_rules(rules))
    drawn = getattr(
        summary, {"svg": "to_svg", "html": "to_html"}.get(name[7:], "to_markdown")
    )
    assert out.read_text("utf-8") == drawn(title="model.safetensors by rules.toml")
    assert "--force" in run(*options, code=2)
    run(*options, "--force", "--filter", "value", "--depth", 1)
    assert "policy" not in out.read_text("utf-8")


def test_show_draws_nothing_where_it_should_not(npz, tmp_path, rules):
    before = sorted(tmp_path.iterdir())
    (tmp_path / "folder.svg").mkdir()
    for name, reason in (
        ("x.png", ".svg, .html or .md"),
        ("none/x.svg", "no folder"),
        ("folder.svg", "is a folder"),
    ):
        out = tmp_path / name
        text = run("show", npz, "--output", out, "--force", code=2)
        assert reason in text
        assert len(text.splitlines()) <= 2
    both = ("--output", tmp_path / "x.svg", "--format", "json")
    assert "one of the two" in run("show", npz, *both, code=2)
    run("show", npz, "--output", npz, code=2)
    bad = written(tmp_path, '"[" = "b"')
    run("show", npz, "--output", tmp_path / "x.svg", "--rules", bad, code=2)
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "folder.svg", bad])


def test_show_filters_leaves_rules_and_totals(npz, rules):
    text = run("show", npz, "--filter", "**/bias", "--rules", rules)
    assert "kernel" not in text
    assert "train       10" in text
    text = run("show", npz, "--filter", "policy/hidden_0", "--rules", rules)
    assert "train" not in text
    found = json.loads(
        run("show", npz, "--filter", "value", "--rules", rules, "--format", "json")
    )
    assert [total["leaves"] for total in found["totals"]] == [1]
    assert "did you mean" in run("show", npz, "--filter", "**/bais", code=2)


def test_show_reports_tied_leaves(tmp_path):
    weight = np.ones(3)
    ta.save(tmp_path / "x.safetensors", {"a": weight, "b": weight})
    tied = "Tied, and counted twice: 'b' is 'a'."
    assert tied in run("show", tmp_path / "x.safetensors")
    assert "'b/a' is 'a'" in run("show", "test_cli:linked")
    tree = ("show", "test_cli:linked", "--format", "tree")
    assert "Tied, and counted twice: 'b/a' is 'a'." in run(*tree)
    assert "Tied" not in run(*tree, "--filter", "a")
    out = tmp_path / "x.html"
    run("show", tmp_path / "x.safetensors", "--output", out)
    assert "Tied, and counted twice: 'b' is 'a'." in out.read_text("utf-8")


def test_a_function_is_run_abstractly():
    found = json.loads(run("show", "test_cli:linked", "--format", "json"))
    assert {leaf["path"]: leaf["shape"] for leaf in found["leaves"]} == {
        "a": [2, 3],
        "b/a": [2, 3],
        "act": None,
        "c/0": [2],
    }


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("MODEL", ["w", "float64"]),  # called by its users, and not by the command
        ("SHAPES", ["a", "float32"]),
        ("abstract", ["a", "float32"]),
    ],
)
def test_a_tree_or_an_abstract_one_is_shown_like_what_a_function_returns(name, leaf):
    (shown,) = json.loads(run("show", f"test_cli:{name}", "--format", "json"))["leaves"]
    assert [shown["path"], shown["dtype"]] == leaf
    assert shown["shape"] == [2, 3]


def test_a_module_is_imported_before_anything_is_abstract(tmp_path, monkeypatch):
    text = "import jax.numpy as jnp\nsize = int(jnp.ones(()) * 3)\n"
    text += "def make():\n    return {'a': jnp.ones(size)}\n"
    (tmp_path / "script_with_values.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert "[3]" in run("show", "script_with_values:make")
    assert "Did you mean 'script_with_values'" in run(
        "show", "script_with_value:make", code=2
    )
    (tmp_path / "script_without.py").write_text("import no_such_library\n")
    assert "No module named 'no_such_library'" in run(
        "show", "script_without:make", code=2
    )


def test_a_name_near_a_missing_checkpoint_is_proposed(npz, tmp_path):
    (tmp_path / "freeze.toml").write_text(RULES)
    proposed = f"Did you mean '{npz}'?"
    for name in ("modle.safetensors", "model", "model.npz"):
        assert proposed in run("show", tmp_path / name, code=2)
    assert "mean" not in run("show", tmp_path / "freeze", code=2)
    missing = tmp_path / "none" / npz.name
    assert f"There is no folder '{missing.parent}'" in run("show", missing, code=2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_cli:failing", "raised RuntimeError: no luck"),
        ("test_cli:nothing", "no attribute 'nothing'"),
        ("test_cli:retrning_text", "Did you mean 'returning_text'"),
        ("test_cli:RULES", "is str, with no array"),
        ("no_such_module:f", "There is no module 'no_such_module'"),
        ("linked:test_cli", "Did you mean 'test_cli:linked'?"),
        ("no/such.npz", "no checkpoint"),
        ("nothing", "no checkpoint"),
        ("test_cli:returning_none", "returns None, with no array"),
        ("test_cli:returning_text", "returns str, with no array"),
        ("test_cli:leaving", "raised SystemExit: bye"),
        (
            "test_cli:LINEN",
            "is Dense, with no array in it; its parameters come from init",
        ),
        ("test_cli:needing", "takes arguments: missing a required argument: 'config'"),
        ("test_cli:reading_values", "needs the values of arrays"),
        ("test_cli", "name a function or a model: test_cli:function"),
        ("test_cli:", "name a function or a model: test_cli:function"),
        ("test_cli.linked", "did you mean test_cli:linked?"),
        ("test_cli.", "name a function or a model: test_cli:function"),
        ("test_cli.py", "name the module: test_cli:function"),
        ("rules.toml", "rules come after --rules"),
        ("nosuch://example.com/x", "Protocol not known: nosuch"),
        ("m/model.safetensors.index.json", "There is no folder 'm'"),
        ("tests/test_cli.py:linked", "name the module: tests.test_cli:linked"),
        ("test_cli.py:linked", "name the module: test_cli:linked"),
        ("../test_cli.py:linked", "name the module: module:linked"),
    ],
)
def test_what_is_not_a_tree_is_a_short_error(name, reason):
    text = run("show", name, code=2)
    assert reason in text
    assert len(text.splitlines()) <= 2
    assert len(text) < 700


def test_several_filters_are_united_less_what_is_excluded(npz):
    shown = ("show", npz, "--filter", "policy", "--filter", "!**/bias")
    leaves = json.loads(run(*shown, "--format", "json"))["leaves"]
    assert [leaf["path"] for leaf in leaves] == [
        f"policy/hidden_{n}/kernel" for n in range(11)
    ]


def test_show_as_markdown(npz, tmp_path):
    bad = written(
        tmp_path, '"policy/hidden_0" = "fro|zen```"\n"valu" = "b"\n"**" = "@all"\n'
    )
    text = run("show", npz, "--rules", bad, "--format", "markdown")
    assert text.splitlines()[:8] == [
        "**23 leaves, 102 parameters, 276 B**",
        "",
        "| label | leaves | params | size | share | rules |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        "| ```` fro\\|zen``` ```` | 2 | 9 | 24 B | 9% | `'policy/hidden_0'` |",
        "| `@all` | 21 | 93 | 252 B | 91% | `'**'` |",
        "",
        "```diff",
    ]
    assert "- Unused: rule 2, 'valu' matches no array: did you mean 'value'" in text
    tree = ta.summarize(ta.read_metadata(npz), ta.load_rules(bad)).to_text()
    assert tree.split("\n\n")[2] in text.partition("````text\n")[2]
    assert text.endswith("\n````\n\n</details>\n")


def test_rules_that_fit_lint_clean(file, rules):
    assert run("lint", file, "--rules", rules) == "0 findings in 23 arrays.\n"


def test_lint_finds_all_kinds(npz, tmp_path):
    bad = written(
        tmp_path,
        '"policy/*/bias" = "b"\n"policy/hidden_3/bias" = "c"\n"policy/hiden_0" = "d"\n',
    )
    text = run("lint", npz, "--rules", bad, code=1)
    assert "unmatched: 12 leaves without a rule" in text
    assert "unused: rule 3, 'policy/hiden_0' matches no array" in text
    assert "did you mean 'policy/hidden_0'" in text
    assert "shadowed: rule 2, 'policy/hidden_3/bias' is unreachable" in text
    found = json.loads(run("lint", npz, "--rules", bad, "--format", "json", code=1))
    assert [each["kind"] for each in found] == ["unmatched", "unused", "shadowed"]


def test_lint_finds_the_overlaps_that_the_rules_refuse(npz, tmp_path):
    table = '"policy/hidden_0/bias" = "b"\n"**/bias" = "c"\n"**" = "b"\n'
    refused = tmp_path / "refused.toml"
    refused.write_text(f'version = 1\noverlap = "error"\n[rules]\n{table}')
    with pytest.raises(ta.OverlapError):
        ta.param_labels(ta.read_metadata(npz), ta.load_rules(refused))
    first, second = run("lint", npz, "--rules", refused, code=1).splitlines()[:2]
    assert first.startswith(
        "overlap: rule 2, '**/bias' gives another value than rule 1, 'policy/hidden_0/"
    )
    assert second.startswith("overlap: rule 3, '**' gives another value than rule 2,")
    run("lint", npz, "--rules", refused, "--ignore", "overlap")
    run("lint", npz, "--rules", written(tmp_path, table))


def test_lint_says_what_it_did_not_look_for(npz, tmp_path):
    bad = written(tmp_path, '"policy" = "a"\n')
    assert "1 finding in 23 arrays.\n" in run("lint", npz, "--rules", bad, code=1)
    text = run("lint", npz, "--rules", bad, "--ignore", "unmatched")
    assert text == "0 findings in 23 arrays; ignored: 1 unmatched.\n"


def test_lint_and_the_error_give_one_cure_for_a_shadowed_rule(npz, tmp_path):
    for text, cure in (
        ('"policy" = "a"\n"policy/hidden_0" = "a"\n', "Remove it: they give"),
        ('"policy/*" = "a"\n"policy" = "b"\n', "Keep one of the two"),
        ('"policy" = "a"\n"policy/hidden_0" = "b"\n', "Move it up, before rule 1"),
    ):
        bad = written(tmp_path, text + '"**" = "train"\n')
        told = run("lint", npz, "--rules", bad, code=1)
        assert cure in told
        with pytest.raises(ta.UnusedRuleError) as caught:
            ta.param_labels(ta.read_metadata(npz), ta.load_rules(bad))
        assert told.splitlines()[0].partition("is unreachable")[2] in str(caught.value)


STACKED = """
[stacks]
"blocks" = 0
[rules]
"blocks/{0..1}/w" = "frozen"
"**" = "train"
"""


@pytest.fixture
def stacked(tmp_path):
    """A scanned checkpoint, the same unrolled, and one rules file for both."""
    flat = {"blocks/w": np.ones((4, 2, 3)), "blocks/b": np.ones((4, 3))}
    layers = {
        path.replace("/", f"/{n}/"): x[n] for path, x in flat.items() for n in range(4)
    }
    head = {"head": np.ones(3)}
    np.savez(tmp_path / "scanned.npz", **flat, **head)
    np.savez(tmp_path / "unrolled.npz", **layers, **head)
    (tmp_path / "stacked.toml").write_text("version = 1" + STACKED)
    names = ("scanned.npz", "unrolled.npz", "stacked.toml")
    return tuple(str(tmp_path / name) for name in names)


def test_one_rules_file_serves_a_scanned_and_an_unrolled_checkpoint(stacked):
    scanned, unrolled, rules = stacked
    one, two = (
        json.loads(run("show", tree, "--rules", rules, "--format", "json"))
        for tree in (scanned, unrolled)
    )
    assert one["totals"] == two["totals"]
    rows = [(leaf["path"], leaf["shape"], leaf["leaves"]) for leaf in one["leaves"]]
    assert rows == [
        ("blocks/{0..1}/w", [2, 2, 3], 2),
        ("blocks/{0..3}/b", [4, 3], 4),
        ("blocks/{2..3}/w", [2, 2, 3], 2),
        ("head", [3], 1),
    ]
    assert two["notes"] == [
        "Unrolled: the layers of the stack 'blocks' are leaves of this tree."
    ]
    for tree in (scanned, unrolled):
        assert "0 findings in 9 arrays." in run("lint", tree, "--rules", rules)
    for path in ("blocks/2/w", "head"):
        told = [
            run("explain", tree, path, "--rules", rules) for tree in (scanned, unrolled)
        ]
        assert told[0] == told[1]


def test_explain_lists_the_layers_of_a_stored_array(stacked):
    scanned, _, rules = stacked
    lines = run("explain", scanned, "blocks/w", "--rules", rules).splitlines()
    assert lines == [
        "decides  rule 1: 'blocks/{0..1}/w' = 'frozen'",
        "decides  rule 2: '**' = 'train'",
        "'blocks/{0..1}/w' gets 'frozen' by rule 1.",
        "'blocks/{2..3}/w' gets 'train' by rule 2.",
    ]
    agreeing = run("explain", scanned, "blocks/b", "--rules", rules).splitlines()
    assert agreeing[-1] == "'blocks/{0..3}/b' gets 'train'."
    as_shown = run("explain", scanned, "blocks/{0..1}/w", "--rules", rules)
    assert as_shown.splitlines()[-1] == "'blocks/{0..1}/w' gets 'frozen'."
    near = run("explain", scanned, "blocks/4/w", "--rules", rules, code=2)
    assert "Did you mean 'blocks/0/w'" in near


def test_lint_names_runs_of_layers(stacked):
    scanned, _, rules = stacked
    text = STACKED.replace('"**" =', '"blocks/{2..3}/*" =').replace("w", "ww", 1)
    Path(rules).write_text("version = 1" + text)
    told = run("lint", scanned, "--rules", rules, code=1)
    assert (
        "5 leaves without a rule: 'blocks/{0..1}/b', 'blocks/{0..1}/w', 'head'" in told
    )
    assert "did you mean 'blocks/{0..1}/w' (2 leaves)?" in told


def test_diff_is_like_diff(file, tmp_path):
    other = model()
    other["policy"]["hidden_0"]["scale"] = other["policy"]["hidden_0"].pop("kernel")
    other["value"]["kernel"] = np.ones((3, 2), np.float32)
    ta.save(tmp_path / "other.safetensors", other)
    ta.save(tmp_path / "same.safetensors", model())
    same = ("diff", file, tmp_path / "same.safetensors")
    assert run(*same, "--values") == "No difference.\n"
    assert run(*same) == (
        "No difference in names, shapes and dtypes; values were not compared.\n"
    )
    assert json.loads(run(*same, "--format", "json")) == {
        "values_compared": False,
        "differences": [],
    }
    text = run("diff", file, tmp_path / "other.safetensors", code=1)
    assert "> renamed   'policy/hidden_0/kernel' -> 'policy/hidden_0/scale'" in text
    assert "~ reshaped  'value/kernel'" in text
    run("diff", file, tmp_path / "nothing.safetensors", code=2)


def with_statics():
    """A tree for ``module:function`` with all that is not a plain array."""
    net = [jnp.ones((2, 3)), jax.nn.relu]
    return {"net": net, "key": jax.random.key(0), "n": 3, "p": 0.5, "act": "relu"}


def test_a_saved_model_does_not_differ_from_the_model(tmp_path):
    for name in ("m.safetensors", "m"):
        with pytest.warns(ta.TreeAdaptWarning, match="'act'"):
            ta.save(tmp_path / name, with_statics())
        run("diff", tmp_path / name, "test_cli:with_statics")
        run("diff", "test_cli:with_statics", tmp_path / name)
    ta.save(tmp_path / "w.safetensors", with_statics(), where="net")
    text = run("diff", tmp_path / "w.safetensors", "test_cli:with_statics", code=1)
    assert text.splitlines()[0] == "1 difference: 1 added."


def test_diff_compares_values_only_when_asked(npz, tmp_path):
    other = model()
    other["value"]["kernel"][0] = 3
    ta.save(tmp_path / "other.safetensors", other)
    run("diff", npz, tmp_path / "other.safetensors")
    text = run("diff", npz, tmp_path / "other.safetensors", "--values", code=1)
    assert "'value/kernel': float32[3,1], 1 of 3 elements, by at most 2" in text
    run("diff", npz, npz, "--values", "--where", "value")
    run("diff", npz, "test_cli:linked", "--values", code=2)


@pytest.mark.parametrize("there", FORMATS)
def test_convert_writes_any_format(file, there, tmp_path):
    out = tmp_path / f"out{ENDINGS[there]}"
    assert "Wrote 23 leaves" in run("convert", file, out)
    run("diff", file, out, "--values")


def test_convert_never_overwrites_without_force(npz, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    assert "--force" in run("convert", npz, out, code=2)
    assert out.read_bytes() == b"mine"
    run("convert", npz, out, "--force")
    run("diff", npz, out)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years")
    run("convert", npz, tmp_path / "folder", "--force", code=2)
    assert (tmp_path / "folder" / "thesis.txt").exists()


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_give_short_errors_and_write_nothing(case, tmp_path, rules):
    folder = tmp_path / "files"
    folder.mkdir()
    path = hostile(case, folder)
    for arguments in (
        ("show", path),
        ("lint", path, "--rules", rules),
        ("diff", path, path),
        ("convert", path, folder / "out.safetensors"),
    ):
        text = run(*arguments, code=2)
        assert text.startswith("error: ")
        assert len(text.splitlines()) <= 2
        assert len(text) < 700
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_explain_says_which_rule_decides(rules, npz, tmp_path):
    text = run("explain", npz, "policy/hidden_0/bias", "--rules", rules)
    assert text.splitlines() == [
        "decides  rule 1: 'policy/hidden_0' = 'frozen'",
        "matches  rule 2: '**' = 'train'",
        "'policy/hidden_0/bias' gets 'frozen'.",
    ]
    counted = written(tmp_path, '"policy/hidden_{-1}" = "last"\n')
    assert "'last'" in run("explain", npz, "policy/hidden_10/bias", "--rules", counted)
    text = run("explain", npz, "value/kernel", "--rules", counted, code=1)
    assert "no rule" in text
    counted.write_text('version = 1\ndefault = "x"\n[rules]\n')
    text = run("explain", npz, "value/kernel", "--rules", counted)
    assert text == "'value/kernel' gets the default, 'x'.\n"
    text = run(
        "explain",
        "test_cli:linked",
        "act",
        "--rules",
        written(tmp_path, '"a" = 1'),
    )
    assert "'act' is not an array" in text


@pytest.mark.parametrize(
    ("path", "proposed"),
    [
        ("value/kernal", "Did you mean 'value/kernel'"),
        ("value", "Did you mean 'value/kernel'"),
        ("hidden_3/bias", "Did you mean 'policy/hidden_3/bias'"),
        ("hidden_3", "Did you mean 'policy/hidden_3/bias', 'policy/hidden_3/kernel'"),
        ("zzz", "no leaf 'zzz'."),
    ],
)
def test_explain_refuses_a_path_that_is_not_in_the_tree(path, proposed, rules, npz):
    assert proposed in run("explain", npz, path, "--rules", rules, code=2)


def test_lint_annotates_the_rules_file_on_github(npz, tmp_path):
    bad = written(tmp_path, '"policy" = "b"\n"po,licy:%" = "c"\n\'value/x\' = "d"\n')
    lines = run("lint", npz, "--rules", bad, "--format", "github", code=1).splitlines()
    assert [line.partition("::")[2].split("::")[0] for line in lines] == [
        f"error file={bad},line=2,title=unmatched",
        f"error file={bad},line=4,title=unused",
        f"error file={bad},line=5,title=unused",
    ]
    assert "rule 2, 'po,licy:%25' matches no array" in lines[1]


def test_arguments_in_the_wrong_order_are_reported(npz, rules, tmp_path):
    assert "Missing option '--rules'" in run("lint", npz, code=2)
    assert "TOML or JSON" in run("lint", npz, "--rules", npz, code=2)
    run("lint", rules, "--rules", rules, code=2)
    for arguments, order in (
        (("lint", rules, "--rules", npz), "TREE, and the file after its option"),
        (("show", rules, "--rules", npz), "TREE, and the file after its option"),
        (("explain", "policy/x", npz, "--rules", rules), "TREE, then PATH"),
        (("explain", "x", "test_cli:linked", "--rules", rules), "TREE, then PATH"),
        (("convert", tmp_path / "new.safetensors", npz), "SRC, then DST"),
    ):
        text = run(*arguments, code=2)
        assert f"is not a tree, and '{npz}' is; the order is {order}." in text or (
            "'test_cli:linked' is; the order is TREE, then PATH" in text
        )
    rows = tmp_path / "rows.toml"
    rows.write_text('version = 1\n[[rows]]\nfrom = "a"\nto = "b"\n')
    assert "Pass it as --migration." in run("lint", npz, "--rules", rows, code=2)
    assert "Pass it as --rules." in run("lint", npz, "--migration", rules, code=2)
    text = run("convert", npz, "x", "--migration", rules, code=2)
    assert f"To see what it does: treeadapt show TREE --rules '{rules}'" in text
    run("show", npz, "--rules", rules)
    missing = ("explain", npz, "a", "--rules", tmp_path / "x.toml")
    assert "there is no such file" in run(*missing, code=2)
    assert "no values" in run("convert", "test_cli:linked", "x.safetensors", code=2)


def test_a_rules_file_in_yaml_gets_an_error_that_is_true(npz, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("version: 1\nrules:\n  '**': train\n")
    text = run("lint", npz, "--rules", rules, code=2)
    assert "a rules file is TOML or JSON" in text
    assert "Write it as TOML" in text
    assert "Rename" not in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("show",), "Missing argument 'TREE'"),
        (("--fromat",), "No such option"),
        (
            ("convert", "--from", "a"),
            "Names come without one: treeadapt convert SRC DST",
        ),
        (("show", "x", "--fromat", "json"), "--fromat"),
        (("show", "x", "--format", "xml"), "is not one of"),
        (("shwo", "x"), "No such command 'shwo'"),
        (("check", "x"), "No such command 'check'. Did you mean 'lint'?"),
        (
            ("explain", "x", "y", "--format", "json"),
            "These commands have it: compare, diff, draft, lint, show, tables.",
        ),
        (("show", "x", "--depth", "0"), "not in the range"),
    ],
)
def test_a_wrong_use_is_reported_in_two_lines(arguments, told):
    lines = run(*arguments, code=2).splitlines()
    assert told in lines[0]
    assert lines[0].startswith("error: ")
    assert lines[1:] == [f"Try '{' '.join(('treeadapt', *used(arguments)))} --help'."]


def used(arguments):
    return [name for name in arguments[:1] if name in COMMANDS]


def test_bad_rules_are_short_errors(npz, tmp_path):
    for text in ('"a" = [1]', '"[" = "b"', "nonsense", '"re:.*" = "a"'):
        bad = written(tmp_path, text)
        for arguments in (("lint", npz, "--rules", bad), ("show", npz, "--rules", bad)):
            assert len(run(*arguments, code=2).splitlines()) <= 2
    regex = written(tmp_path, '"re:.*" = "a"')
    assert "pass --allow-regex" in run("lint", npz, "--rules", regex, code=2)
    run("lint", npz, "--rules", regex, "--allow-regex")
    run("lint", npz, "--rules", tmp_path / "none.toml", code=2)


@pytest.mark.hazard("K14")
def test_names_do_not_reach_the_terminal_raw(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"a\n\x1b[31m": np.ones(1), "b": np.ones(1)})
    rules = written(tmp_path, '"b" = "c"\n')
    for arguments, code in (
        (("show", path), 0),
        (("show", path, "--depth", "1"), 0),
        (("lint", path, "--rules", rules), 1),
        (("show", path, "--format", "markdown"), 0),
        (("show", path, "--format", "tree"), 0),
        (("lint", path, "--rules", rules, "--format", "github"), 1),
        (("explain", path, "b\x1b", "--rules", rules), 2),
        (("diff", path, "test_cli:linked"), 1),
    ):
        assert "\x1b" not in run(*arguments, code=code)


# Migrations


def unrolled():
    return {
        **{f"h.{n}.q": np.full((6, 2), n, np.float32) for n in range(11)},
        "h.0.mask": np.ones(3, bool),
        "emb": np.ones((5, 2), np.float32),
    }


MIGRATION = ta.Migration(
    {
        "h.{l}.q : (k d) e": "blocks/q : l e k d",
        "h.{l}.mask": None,
        "emb : v e": ("table : v e", "head/w : e v"),
    },
    sizes={"d": 3},
)


@pytest.fixture
def old(tmp_path):
    ta.save(tmp_path / "old.safetensors", unrolled())
    return tmp_path / "old.safetensors"


@pytest.fixture
def migration(tmp_path):
    return table(tmp_path, MIGRATION)


def table(folder, rows, name="table.toml"):
    rows = rows if isinstance(rows, ta.Migration) else ta.Migration(rows)
    (folder / name).write_text(rows.to_toml())
    return folder / name


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_convert_migrates_there_and_back(kind, old, migration, tmp_path):
    new, back = (tmp_path / f"{name}{ENDINGS[kind]}" for name in ("new", "back"))
    assert "Wrote 3 leaves" in run("convert", old, new, "--migration", migration)
    want = MIGRATION(unrolled())
    found = ta.load(new, want)
    assert all(np.array_equal(found[path], want[path]) for path in want)
    run("convert", new, back, "--migration", migration, "--reverse")
    lines = run("diff", old, back, "--values", code=1).splitlines()
    assert lines[1:] == ["- removed   'h.0.mask': bool[3]"]


def test_of_several_migrations_convert_takes_the_one_that_fits(old, tmp_path):
    wrong = table(tmp_path, {"blocks.q : l e h": "blocks/q : l e h"}, "wrong.toml")
    right = table(tmp_path, MIGRATION, "right.toml")
    files = ("--migration", wrong, "--migration", right)
    text = run("convert", old, tmp_path / "new.safetensors", *files)
    assert f"{str(right)!r} fits." in text
    assert set(ta.read_metadata(tmp_path / "new.safetensors")) == {
        *MIGRATION(unrolled())
    }
    text = run(
        "convert", old, tmp_path / "x.safetensors", *files[:2], *files[:2], code=2
    )
    assert text.count("wrong.toml") == 2
    again = table(tmp_path, MIGRATION, "again.toml")
    files = ("--migration", again, *files[2:])
    text = run("convert", old, tmp_path / "x.safetensors", *files, code=2)
    assert "again.toml" in text
    assert "which is meant is not known" in text
    assert not (tmp_path / "x.safetensors").exists()


@pytest.fixture
def published(tmp_path):
    """A folder as people publish models: configuration, tokenizer, weights."""
    folder, cache = tmp_path / "published", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    for name in KEPT:
        (folder / name).write_text(f"text of {name}")
    (cache / "blob").write_text("linked text")
    (folder / "merges.txt").symlink_to(cache / "blob")
    for name in WEIGHTS:
        (folder / name).write_text("{}")
    ta.save(cache / "hash", {"w": np.ones(2)}, max_shard_bytes=100)
    (shard,) = (cache / "hash").glob("*.safetensors")
    shard.rename(cache / "0123abcd")
    (folder / "without_an_ending").symlink_to(cache / "0123abcd")
    np.savez(folder / "arrays.npz", w=np.ones(2))
    (folder / "arrays.npz").rename(folder / "zip_of_arrays")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    (folder / ".gitattributes").write_text("x")
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    return folder


KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model")
WEIGHTS = (
    *("model.safetensors", "model-00001-of-00002.safetensors", "consolidated.00.pth"),
    *(
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
    *("model.safetensors.index.fp16.json", "flax_model.msgpack", "tf_model.h5"),
    *("model-q4.gguf", "weights.npz", "optimizer.pt", "model.onnx", "MODEL.BIN"),
    *("model.ckpt.data-00000-of-00001", "model.ckpt.index", "model.schema.toml"),
)


@pytest.mark.parametrize("form", ["file", "shards", "orbax"])
def test_convert_copies_what_is_not_weights(published, old, tmp_path, form):
    new = tmp_path / "new"
    name = new / "model.safetensors" if form == "file" else new
    if form == "file":
        new.mkdir()
        (new / "config.json").write_text("of the user")
    more = ("--max-shard-bytes", 10**6) if form == "shards" else ()
    dry = run("convert", old, name, "--like", published, "--dry-run", *more)
    assert "Would copy" in dry
    text = run("convert", old, name, "--like", published, *more)
    kept = {*KEPT, "merges.txt"}
    written = {file.name for file in new.iterdir() if not file.is_dir()}
    if form == "file":
        assert written == {*kept, "model.safetensors"}
        assert (new / "config.json").read_text() == "of the user"
        kept.remove("config.json")
        assert "'config.json' (there already)" in text
    assert kept <= written
    for file in kept - {"merges.txt"}:
        assert (new / file).read_text() == f"text of {file}"
    assert (new / "merges.txt").read_text() == "linked text"
    assert not (new / "merges.txt").is_symlink()
    assert not (new / "original").exists()
    assert f"Copied {len(kept)} files from {str(published)!r}" in text
    for reason in ("(weights)", "(folders)", "(hidden)", "(a link to nothing)"):
        assert reason in text
    # No file next to it changes what is read.
    assert {*ta.read_metadata(name)} == {*ta.read_metadata(old)}
    assert {*ta.load(name)} == {*ta.load(old)}
    of_shards = {"model.safetensors", "model.safetensors.index.json"}
    assert not written & ({*WEIGHTS} - of_shards)
    assert not written & {"without_an_ending", "zip_of_arrays", "gone.json"}


@pytest.mark.parametrize("more", [(), ("--max-shard-bytes", 10**6)])
def test_force_replaces_what_like_copied_and_nothing_else(
    published, old, tmp_path, more
):
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    (published / "config.json").write_text(json.dumps(quantised))
    new = tmp_path / "new"
    call = ("convert", old, new, "--like", published, *more)
    run(*call)
    config = (new / "config.json").read_text()
    assert "--force replaces it" in run(*call, code=2)
    for force in (("--force",), ("--force", "--dry-run")):
        text = run(*call, *force)
        assert "5 files from" in text
        assert "5 of these had been copied there before." in text
        assert (new / "config.json").read_text() == config
    # Without --like nothing says what these files are.
    text = run("convert", old, new, "--force", *more, code=2)
    assert "because it holds more than weights: 'config.json'" in text
    (new / "notes.txt").write_text("of the user")
    text = run(*call, "--force", code=2)
    assert "because it holds more than weights: 'notes.txt'. Move that away" in text
    (new / "notes.txt").unlink()
    (new / "config.json").write_text("of the user")
    text = run(*call, "--force", code=2)
    assert "'config.json' in it is not what --like copies. Move that away" in text
    assert (new / "config.json").read_text() == "of the user"
    (new / "config.json").unlink()
    assert "4 of these" in run(*call, "--force")
    assert (new / "config.json").read_text() == config
    assert {*ta.read_metadata(new)} == {*ta.read_metadata(old)}


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_what_makes_a_folder_an_adapter_goes_with_its_weights(old, tmp_path, name):
    """Transformers takes such a folder for an adapter, and not for the model."""
    like, new = tmp_path / "peft", tmp_path / "new"
    like.mkdir()
    new.mkdir()
    for file in ("adapter_config.json", "config.json"):
        (like / file).write_text("{}")
    text = run("convert", old, new / name, "--like", like)
    is_adapter = name.startswith("adapter")
    assert (new / "adapter_config.json").exists() == is_adapter
    assert (new / "config.json").exists()
    assert ("Left there: 'adapter_config.json' (of an adapter" in text) != is_adapter


def test_convert_copies_from_no_folder_of_orbax_what_orbax_wrote(old, tmp_path):
    run("convert", old, tmp_path / "orbax")
    (tmp_path / "orbax" / "config.json").write_text("{}")
    (tmp_path / "new").mkdir()
    new = tmp_path / "new" / "model.safetensors"
    run("convert", old, new, "--like", tmp_path / "orbax")
    assert {file.name for file in new.parent.iterdir()} == {new.name, "config.json"}


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_nothing_is_copied_next_to_a_single_file(published, old, tmp_path, more):
    (tmp_path / "notes.txt").write_text("of the user")
    before = {file.name for file in tmp_path.iterdir()}
    new = tmp_path / "new.safetensors"
    text = run("convert", old, new, "--like", published, *more)
    assert f"Nothing is copied from {str(published)!r}" in text
    after = {file.name for file in tmp_path.iterdir()}
    assert after - before == ({new.name} if not more else set())
    # So the folder that is written to may be the one that gives the sizes.
    run("convert", old, new, "--like", tmp_path, "--force", *more)
    # What the message names: a folder.
    run("convert", old, tmp_path / "folder", "--like", published)
    assert (tmp_path / "folder" / "config.json").is_file()


def test_a_large_file_is_not_copied(published, old, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_command, "MAX_COPIED_BYTES", 20)
    text = run("convert", old, tmp_path / "new", "--like", published)
    assert "as weights are" in text
    assert (tmp_path / "new" / "merges.txt").exists()
    assert not (tmp_path / "new" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("like", "to", "text"),
    [
        ("nowhere", "new", "is not there. Name the folder"),
        ("old.safetensors", "new", "is not a folder. Name the folder"),
        ("config.json", "new", "is not a folder. Name its folder"),
        (".", "adapter_model.safetensors", "the folder that is written to"),
        (".", "new.schema.toml", "--like needs a DST with arrays"),
    ],
)
def test_a_folder_that_cannot_be_copied_from_is_refused_first(
    old, tmp_path, like, to, text
):
    (tmp_path / "config.json").write_text("{}")
    assert text in run("convert", old, tmp_path / to, "--like", tmp_path / like, code=2)
    assert not (tmp_path / to).exists()


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B"])
def test_a_model_of_a_hub_to_copy_from_is_downloaded_first(old, tmp_path, name):
    text = run("convert", old, tmp_path / "new", "--like", name, code=2)
    assert "hf download Qwen/Qwen3-0.6B --exclude '*.safetensors' prints" in text


def test_a_dry_run_prints_the_plan_and_writes_nothing(old, migration, tmp_path):
    before = sorted(tmp_path.iterdir())
    more = ("--migration", migration, "--dry-run")
    lines = run("convert", old, tmp_path / "new.safetensors", *more).splitlines()
    plan = MIGRATION.plan(ta.read_metadata(old))
    assert lines[:-1] == str(plan).splitlines()
    assert lines[-1].startswith("Would write 3 leaves to ")
    text = run("convert", old, tmp_path / "copy", "--dry-run")
    assert text == f"Would write 13 leaves to {str(tmp_path / 'copy')!r}.\n"
    assert sorted(tmp_path.iterdir()) == before


def new_model():
    return {"blocks": {"q": np.ones((11, 2, 2, 3), np.float32)}, "bias": np.ones(4)}


def test_a_target_solves_sizes_and_fills_what_is_new(old, tmp_path):
    rows = {"h.{l}.q : (k d) e": "blocks/q : l e k d", "*.mask": None, "emb": None}
    new = tmp_path / "new.safetensors"
    file = table(tmp_path, rows)
    text = run("convert", old, new, "--migration", file, code=2)
    assert "write it in [sizes], or name a target: --target" in text
    file = table(tmp_path, ta.Migration(rows, new={"bias": "zeros"}))
    text = run("convert", old, new, "--migration", file, code=2)
    assert "[new] fills 'bias' in the form of a target. Name one: --target." in text
    told = run("lint", old, "--migration", file, code=2)
    assert "in the form of a target. Name one: TARGET." in told
    more = ("--migration", file, "--target", "test_cli:new_model")
    assert "Wrote 2 leaves" in run("convert", old, new, *more)
    assert ta.load(new)["bias"].tolist() == [0, 0, 0, 0]
    assert run("lint", old, "test_cli:new_model", *more[:2]).startswith("0 findings")


def test_more_findings_of_a_layout_are_asked_for_by_the_name_of_its_table(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "head_dim": 4}')
    own = tmp_path / "own.safetensors"
    ta.save(own, {"embed": np.ones((3, 2)), "head": np.ones((2, 3))})
    more = ("--reverse", "--migration")
    text = run("convert", own, "x", *more, "tunix", "--like", folder, code=2)
    call = text.splitlines()[0].rpartition("see ")[2]
    assert call == "lint --migration tunix/qwen3"
    assert "'embed'" in run("lint", own, "--reverse", *call.split()[1:], code=1)


def test_a_migration_that_does_not_fit_writes_nothing(old, tmp_path):
    file = table(tmp_path, {"h.{l}.k": "k/{l}", "emb : v": "emb : v", "*.mask": None})
    more = ("--migration", file)
    text = run("convert", old, tmp_path / "new.safetensors", *more, code=2)
    assert text.startswith("error: unmatched: no row takes: 'h.{0..10}.q'")
    assert text.endswith("; 2 more, see lint\n")
    assert not (tmp_path / "new.safetensors").exists()


def test_trees_of_a_migration_in_the_wrong_order_are_named(tmp_path):
    file = table(tmp_path, {"h.{l}.{k} : ...": "h/{k} : l ...", "{p:**}": "{p}"})
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    layers = {f"h.{n}.{k}": np.ones(3) for n in range(4) for k in "ab"}
    ta.save(old, layers | {"emb": np.ones(2)})
    run("convert", old, new, "--migration", file)
    run("lint", old, new, "--migration", file)
    text = run("lint", new, old, "--migration", file, code=2)
    assert f"The rows lead from {str(old)!r} to {str(new)!r}" in text
    assert "Swap the two, or read the rows with --reverse." in text
    run("lint", new, old, "--migration", file, "--reverse")
    assert "forwards" in run("lint", old, new, "--migration", file, "--reverse", code=2)


@pytest.mark.parametrize("is_right", [False, True])
def test_rows_that_fit_the_other_way_round_are_said_and_read_so(is_right, tmp_path):
    rows = {"h.{l}.w : i o": "w : l o i"}
    file = table(tmp_path, rows)
    old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    layers = {f"h.{n}.w": np.ones((3, 5 - n * (not is_right))) for n in range(2)}
    ta.save(old, {f"h.{n}.w": np.ones((3, 5)) for n in range(2)})
    ta.save(tmp_path / "target.safetensors", layers)
    run("convert", old, new, "--migration", file)
    back, target = tmp_path / "back.safetensors", tmp_path / "target.safetensors"
    calls = [
        ("convert", new, back, "--migration", file, "--target", target),
        ("compare", new, target, "--migration", file),
    ]
    if is_right:
        calls += [
            ("convert", new, back, "--migration", file, "--force"),
            ("lint", new, "--migration", file),
            ("explain", new, "w", "--migration", file),
        ]
    says = f"The rows of {str(file)!r} fit the other way round. "
    for call in calls:
        text = run(*call, code=2)
        assert (f"{says}Add --reverse." in text) == is_right
        if is_right:
            run(*call, "--reverse")
    if is_right:
        assert f"{says}Leave --reverse out." in run(
            "convert", old, back, "--force", "--migration", file, "--reverse", code=2
        )


def test_a_published_table_the_other_way_round_names_reverse(tmp_path):
    weights = {
        f"model.layers.{layer}.{name}.weight": np.ones(shape, "float32")
        for layer in range(3)
        for name, shape in tiny_qwen3.SHAPES.items()
    }
    weights |= {"model.embed_tokens.weight": np.ones((37, 22), "float32")}
    weights |= {"model.norm.weight": np.ones(22, "float32")}
    ta.save(tmp_path / "hf", weights, max_shard_bytes=10**9)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(tiny_qwen3.CONFIG))
    here, back = tmp_path / "tuned.safetensors", tmp_path / "back"
    run("convert", tmp_path / "hf", here, "--migration", "tunix")
    call = ("convert", here, back, "--migration", "tunix", "--like", tmp_path / "hf")
    assert "Add --reverse." in run(*call, code=2)
    run(*call, "--reverse")
    assert not ta.tree_diff(ta.load(back), weights, values=True)


def test_compare_reads_rows_backwards_only_with_a_table(old):
    assert "--reverse needs --migration" in run(
        "compare", old, old, "--reverse", code=2
    )


def test_rows_whose_sizes_stay_open_are_read_the_other_way_round_too(old, tmp_path):
    rows = {"h.{l}.q : (k d) e": "blocks/q : l e k d", "*.mask": None, "emb": None}
    file, new = table(tmp_path, rows), tmp_path / "new.safetensors"
    call = ("convert", old, new, "--migration", file)
    text = run(*call, "--reverse", code=2)
    assert "fit the other way round. Leave --reverse out. Sizes then stay open" in text
    assert "write them in [sizes], or name a target: --target." in text
    assert "other way round" not in run(*call, code=2)
    target = tmp_path / "target.safetensors"
    ta.save(target, {"blocks": {"q": np.ones((11, 2, 2, 3), np.float32)}})
    run(*call, "--target", target)


def test_the_name_of_a_table_in_the_place_of_a_tree_goes_after_its_option(old):
    text = run("compare", old, "tunix", code=2)
    assert "comes after its option: --migration tunix." in text
    assert "--migration openpi/pi05." in run("convert", "pi05", "x", code=2)
    text = run("lint", old, "tunix", code=2)
    assert f"'tunix' is a table: write {old} --migration tunix." in text
    assert "treeadapt tables tunix." in run("diff", old, "tunix", code=2)


def test_a_table_in_the_place_of_a_tree_is_named(old, tmp_path):
    file = table(tmp_path, {"{rest:**}": "{rest}"})
    for trees in ((file, old), (old, file)):
        text = run("lint", *trees, code=2)
        assert f"is a table: write {old} --rules {file} or --migration {file}." in text


def test_nothing_is_written_to_a_name_of_code(old, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run("convert", old, "test_cli:new_model", code=2)
    assert "--target test_cli:new_model" in text
    assert not Path("test_cli:new_model").exists()


def test_a_run_of_segments_is_explained_without_a_slash(tmp_path):
    ta.save(tmp_path / "x.safetensors", {"opt": {"mu": {"w": np.ones(2)}}})
    file = table(tmp_path, {"{t:**}/w": "{t}/kernel"})
    text = run("explain", tmp_path / "x.safetensors", "opt/mu/w", "--migration", file)
    assert "captures: t = opt/mu" in text.splitlines()


def test_lint_finds_every_problem_of_a_migration(old, migration, tmp_path):
    lines = run("lint", old, "--migration", migration).splitlines()
    assert lines == [
        "0 findings in 13 arrays.",
        "note: row 1, 'h.{l}.q : (k d) e': shapes do not tell apart k and d, k and e",
    ]
    ta.save(
        tmp_path / "new.safetensors", {"blocks": {"q": np.ones(2)}, "x": np.ones(1)}
    )
    more = (tmp_path / "new.safetensors", "--migration")
    lines = run("lint", old, *more, migration, code=1).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "missing",
        "extra",
        "extra",
        "misfit",
        "4 findings in 13 arrays.",
    ]
    found = json.loads(run("lint", old, *more, migration, "--format", "json", code=1))
    missing = {"kind": "missing", "rule": None, "text": "nothing fills: 'x'"}
    assert found[0] == missing | {"row": None, "place": []}
    assert [each["row"] for each in found] == [None, 3, 3, 1]
    text = run("lint", old, *more, migration, "--format", "github", code=1)
    assert text.startswith(f"::error file={migration},title=missing::nothing fills")


def test_lint_can_ignore_that_only_dtypes_differ(tmp_path):
    ta.save(
        tmp_path / "old.safetensors", {"w": np.ones(2, np.float16), "x": np.ones(2)}
    )
    ta.save(tmp_path / "new.safetensors", {"w": np.ones(2), "x": np.ones(3)})
    file = table(tmp_path, {"w": "w", "x": "x"})
    trees = (tmp_path / "old.safetensors", tmp_path / "new.safetensors")
    lines = run("lint", *trees, "--migration", file, code=1).splitlines()
    assert lines == [
        "misfit: the target has another shape or dtype: 'x': float64[3], the row 'x' "
        "makes float64[2]",
        "retyped: the target has another dtype; write {'cast': dtype} next to the "
        "target of its row, or load a checkpoint with cast=True: 'w': float64[2], the "
        "row 'w' makes float16[2]",
        "2 findings in 2 arrays.",
    ]
    more = ("--migration", file, "--ignore", "retyped")
    assert "1 finding in 2 arrays; ig" in run("lint", *trees, *more, code=1)


def test_lint_notes_a_row_that_drops_nothing(tmp_path):
    ta.save(tmp_path / "old.safetensors", {"w": np.ones(2), "head/bias": np.ones(2)})
    file = table(tmp_path, {"w": "w", "head": None, "*.mask": None})
    text = run("lint", tmp_path / "old.safetensors", "--migration", file)
    assert text.splitlines()[:2] == [
        "0 findings in 2 arrays.",
        "note: row 3, '*.mask': it drops leaves, and none is here",
    ]
    assert "row 2" not in text


def test_lint_fails_where_there_is_no_way_back(old, tmp_path):
    rows = {"h.{l}.q : a b": "q : l a b", "h.{l}.{m}": "{m}", "emb": "emb"}
    file = table(tmp_path, rows)
    text = run("lint", old, "--migration", file, code=1)
    assert text.startswith("one-way: the inverse does not lead back from 'mask'\n")
    text = run("lint", old, "--migration", file, "--ignore", "one-way")
    assert text.startswith("0 findings in 13 arrays; ignored: 1 one-way.\n")
    assert "Wrote 3" in run("convert", old, tmp_path / "new", "--migration", file)
    text = run("convert", old, tmp_path / "x", "--migration", file, "--reverse", code=2)
    assert "cannot be read backwards: 'h.{l}.{m}'" in text


@pytest.mark.parametrize(
    ("rows", "path", "lines"),
    [
        (
            MIGRATION,
            "h.10.q",
            [
                "captures: l = 10",
                "sizes: l=11, k=2, d=3, e=2",
                "'h.{0..10}.q' -> 'blocks/q'",
            ],
        ),
        (MIGRATION, "emb", ["sizes: v=5, e=2", "'emb' -> 'table', 'head/w'"]),
        (MIGRATION, "h.0.mask", []),
        (
            {"{x:**}": "new/{x}"},
            "emb",
            ["captures: x = emb", "'emb' -> 'new/emb', as it is"],
        ),
        (
            ta.Migration({"out : v e": ("emb : v e", {"pad": {"v": (2, 1)}})}).inverse,
            "emb",
            ["sizes: v=2, e=2", "pad undone: {'v': (2, 1)}", "'emb' -> 'out'"],
        ),
    ],
)
def test_explain_says_what_a_row_does_with_a_leaf(rows, path, lines, old, tmp_path):
    m = rows if isinstance(rows, ta.Migration) else ta.Migration(rows)
    found = run("explain", old, path, "--migration", table(tmp_path, m)).splitlines()
    assert found[0].startswith("row ")
    assert found[1:] == lines


def test_explain_names_what_no_row_matches(old, tmp_path):
    file = table(tmp_path, {"emb : a b c": "x : a b c", "*.mask": None})
    more = ("--migration", file)
    text = run("explain", old, "h.3.q", *more, code=1)
    assert text == "'h.3.q' is matched by no row.\n"
    text = run("explain", old, "emb", *more, code=1)
    assert text == "'emb' is matched by row 1, which does not fit; see lint.\n"
    assert "Did you mean 'h.3.q'" in run("explain", old, "h.3.k", *more, code=2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("lint", "x"), "Missing option '--rules' or '--migration'"),
        (("explain", "x", "y"), "Missing option '--rules' or '--migration'"),
        (("lint", "x", "--rules", "a", "--migration", "b"), "one of the two"),
        (("lint", "x", "y", "--rules", "a"), "A target needs --migration"),
        (("convert", "x", "y", "--reverse"), "--reverse and --target need --migration"),
        (("convert", "x", "y", "--target", "z"), "--reverse and --target need"),
        (("lint", "x", "--migration", "gone.toml"), "there is no such file"),
        (("lint", "x", "--migration", "x.npz"), "a file ends in .toml or .json"),
    ],
)
def test_wrong_options_of_a_migration_are_reported(arguments, told):
    text = run(*arguments, code=2)
    assert told in text
    assert len(text.splitlines()) <= 2


def test_show_prints_a_rules_file_or_a_migration_and_what_uses_it(rules, tmp_path):
    shown = invoke("show", rules)
    assert shown.exit_code == 0
    assert shown.stdout == ta.load_rules(rules).to_toml()
    assert f"treeadapt show TREE --rules {rules}" in shown.stderr
    for options in (["--format", "json"], ["--depth", "1"], ["--filter", "a"]):
        assert "is not a checkpoint" in run("show", rules, *options, code=2)
    table = tmp_path / "table.json"
    table.write_text('{"version": 1, "rows": [{"from": "a : i o", "to": "b : o i"}]}')
    shown = invoke("show", table)
    assert shown.stdout == ta.load_migration(table).to_toml()
    assert f"treeadapt lint TREE TARGET --migration {table}" in shown.stderr


def test_show_says_what_a_json_or_toml_file_of_another_kind_is_not(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 4}')
    assert "rules come after --rules" in run("show", config, code=2)
    broken = tmp_path / "rules.toml"
    broken.write_text('version = 1\n[rules]\n"a" = \n')
    assert "rules.toml" in run("show", broken, code=2)


def test_show_names_the_folder_of_a_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "There is no checkpoint" in run("show", "org/model", code=2)
    folder = tmp_path / ".cache/huggingface/hub/models--org--model"
    folder.mkdir(parents=True)
    assert "hub/models--org--model" in run("show", "org/model", code=2)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_bench_measures_the_tree_of_the_user_by_its_rules(npz, rules):
    lines = run("bench", npz, "--rules", rules).splitlines()
    names = [line.split("  ")[0] for line in lines]
    assert {"jax.tree.flatten", "split", "param_labels", "trace of partition"} < {
        *names
    }
    assert len({line.split()[-3] for line in lines[1:]}) == 1
    assert "--rules needs a TREE" in run("bench", "--rules", rules, code=2)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_bench_leaves_out_a_partition_by_numbers(npz, tmp_path):
    rates = tmp_path / "rates.toml"
    rates.write_text('version = 1\n[rules]\n"**" = 0.5\n')
    text = run("bench", npz, "--rules", rates)
    assert "trace of optax.adam" in text
    assert "trace of partition" not in text


def test_bench_prints_a_table(monkeypatch):
    monkeypatch.setattr(bench, "_SIZES", (10,))
    lines = run("bench").splitlines()
    assert lines[0].split() == ["call", "leaves", "ms", "ratio"]
    names = [line.split("  ")[0] for line in lines[1:]]
    assert names[0] == "jax.tree.flatten"
    assert {"to_flat_dict", "split", "merge", "param_labels"} < {*names}


def test_an_interrupt_has_its_own_exit_code(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "read_source", interrupt)
    assert run("show", "x.safetensors", code=130) == "error: Interrupted.\n"


def test_a_diff_as_json_has_each_leaf_that_the_text_folds(tmp_path):
    for name, layers in (("a", 9), ("b", 4)):
        ta.save(
            tmp_path / f"{name}.safetensors",
            {"h": [np.ones(2) for _ in range(layers)], "end": np.ones(1)},
        )
    files = ("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert run(*files, code=1).splitlines()[1:] == [
        "- removed   'h/{4..8}': float64[2]"
    ]
    found = json.loads(run(*files, "--format", "json", code=1))
    paths = [each["path"] for each in found["differences"]]
    assert paths == [f"h/{n}" for n in range(4, 9)]


def test_help_and_version():
    assert "Exit codes" in run("--help")
    assert "a folder of safetensors" in " ".join(run("--help").split())
    for arguments in ((), *((name,) for name in COMMANDS)):
        text = invoke(*arguments, "--help", terminal_width=60).stdout
        assert "Usage" in text
        assert max(map(len, text.splitlines())) <= 60
    assert run("--version") == f"treeadapt, version {ta.__version__}\n"
    assert "No such command" in run("nonsense", code=2)


DOCS = Path(__file__).parent.parent / "docs"
PAGES = (DOCS / "command-line.md", DOCS / "recipes" / "converting.md")


def documented(page):
    """Yield each command of a page, and what it prints according to the page."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    for block in blocks:
        for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = entry.partition("\n")
            yield command, printed


def documented_files():
    def layer():
        return {name: np.ones(shape, "f4") for name, shape in shapes.items()}

    shapes = {"kernel": (16, 16), "bias": (16,)}
    layers = {f"hidden_{n}": layer() for n in range(6)}
    agent = {"policy": layers, "value": {"hidden_0": layer()}}
    ta.save("agent.safetensors", agent)
    old = dict(layers["hidden_5"])
    old["scale"] = old.pop("kernel")
    ta.save("older.safetensors", agent | {"policy": layers | {"hidden_5": old}})
    text = "".join(page.read_text("utf-8") for page in PAGES)
    rules, rows = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    Path("freeze.toml").write_text(rules)
    Path("stack.toml").write_text(rows)
    Path("published").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (Path("published") / name).write_text("{}")
    Path("misspelt.toml").write_text(rules.replace("**/bias", "**/bais"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_the_command_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documented_files()
    code = None
    for command, printed in documented(page):
        if command == "echo $?":
            assert printed == f"{code}\n"
            continue
        if command.startswith("cat "):
            assert Path(command.removeprefix("cat ")).read_text("utf-8") == printed
            continue
        name, *arguments = shlex.split(command)
        assert name == "treeadapt"
        found = invoke(*arguments)
        code = found.exit_code
        same = doctest.OutputChecker().check_output
        assert same(printed, found.output, doctest.ELLIPSIS), (command, found.output)


PROGRAM = "import runpy; runpy.run_module('treeadapt', None, '__main__', True)"


@pytest.mark.slow
def test_the_module_runs_as_a_program(npz, fresh):
    found = subprocess.run(
        [sys.executable, "-W", "error", "-m", "treeadapt", "show", str(npz)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "\x1b" not in found.stdout
    found = fresh.run(PROGRAM, "show", npz.with_suffix(".pkl"))
    assert found.returncode == 2
    assert "Traceback" not in found.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_colors_only_on_a_terminal_and_not_if_refused(npz, tmp_path, rules, fresh):
    bad = written(tmp_path, '"nothing" = "a"\n')
    for options, env, colored in (
        ((), {}, True),
        ((), {"NO_COLOR": ""}, True),
        (("--no-color",), {}, False),
        ((), {"NO_COLOR": "0"}, False),
    ):
        text = on_terminal(fresh, "lint", npz, "--rules", bad, *options, **env)
        assert ("\x1b[" in text) == colored
        assert "unmatched:" in text
    assert "policy/hidden_10/bias" in on_terminal(fresh, "show", npz, "--rules", rules)
    assert "\x1b[" in on_terminal(
        fresh, "show", npz, "--rules", rules, "--format", "tree"
    )
    assert on_terminal(fresh, "show", "x.safetensors", NO_COLOR="1").startswith(
        "error: There is no"
    )
    narrow = on_terminal(
        fresh, "show", npz, "--rules", bad, "--format", "tree", COLUMNS="40"
    )
    assert 'or end with one for "**".' in " ".join(narrow.split())  # is not cut


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_reading_values_shows_how_far_it_is(npz, fresh):
    text = on_terminal(fresh, "diff", "--values", npz, npz)
    assert "B/" in text  # so much of all bytes
    assert re.search(r"\d B in 0\.\d s", text)
    for line in on_terminal(fresh, "diff", "--values", npz, npz, COLUMNS="40").split(
        "\r"
    ):
        assert len(re.sub(r"\x1b\[\S*?[A-Za-z]", "", line).strip("\n")) <= 40
    found = fresh.run(PROGRAM, "diff", "--values", npz, npz)
    assert (found.stdout, found.stderr) == ("No difference.\n", "")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_writing_shows_the_bytes_on_disk(ending, tmp_path, fresh):
    big = tmp_path / "big.safetensors"
    ta.save(big, {f"w{n}": np.ones(2**22, "f4") for n in range(4)})
    text = on_terminal(fresh, "convert", big, tmp_path / f"new{ending}")
    shown = re.findall(r"([\d.]+) ([KM]?i?B)/64[.]0 MiB", text)
    assert shown
    assert "64.0 MiB in " in text
    assert text.index("64.0 MiB in ") < text.index("Wrote ")


def test_what_is_counted_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_SECONDS_BETWEEN_COUNTS", 0.001)
    counts = [0]

    def read(path):
        if path == "w2":  # two are written, as the first shard, and no more
            deadline = time.monotonic() + 20
            while counts[-1] < 2**21 and time.monotonic() < deadline:
                time.sleep(0.001)
            assert 2**21 <= counts[-1] < 2**21 + 2**12

    file = tmp_path / "big.safetensors"
    ta.save(file, {f"w{n}": np.ones(2**18, "f4") for n in range(4)})
    save_load.copy(
        file,
        tmp_path / "shards",
        max_shard_bytes=2**21,
        progress=read,
        written=counts.append,
    )
    assert counts == sorted(counts)


#: Arguments; where the output goes; the exit code, and what both outputs begin with.
SHELLS = [
    ("show x.safetensors --format json", "| head -n 1", 141, "{", ""),
    ("show x.safetensors --format json", "| true", 141, "", ""),
    ("lint x.safetensors --rules r.toml", "| true", 141, "", ""),  # finds something
    ("--help", "| true", 141, "", ""),
    ("show x.safetensors", ">&-", 2, "", "error: Standard output is closed."),
    ("show x.safetensors", "> /dev/full", 2, "", "No space left on device"),
    ("show no.safetensors", "2> /dev/full", 2, "", ""),
    ("show no.safetensors", "2>&1 >/dev/null | true", 141, "", ""),
    ("convert x.safetensors y.safetensors", "2>&-", 0, "Wrote", ""),
]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_output_that_is_lost_is_no_success(npz, fresh):
    assert fresh.run(PROGRAM, "show", npz, terminal="/dev/full").returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell with pipes")
@pytest.mark.parametrize(("arguments", "elsewhere", "code", "first", "told"), SHELLS)
def test_what_cannot_be_printed_has_its_own_exit_code(
    tmp_path, arguments, elsewhere, code, first, told
):
    """A pipe without a reader is no finding; output that is lost is no success."""
    if "full" in elsewhere and not Path("/dev/full").exists():
        pytest.skip("no full device here")
    ta.save(tmp_path / "x.safetensors", {f"leaf_{n}": np.ones(1) for n in range(5_000)})
    (tmp_path / "r.toml").write_text('version = 1\n[rules]\n"leaf_1" = "a"\n')
    command = f"{sys.executable} -m treeadapt {arguments} {elsewhere}"
    env = os.environ | {"PYTHONUNBUFFERED": "1" if "head" in elsewhere else ""}
    found = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == code, found.stderr
    assert found.stdout.startswith(first)
    assert told in found.stderr
    assert len(found.stderr.splitlines()) == bool(told)


def on_terminal(fresh, *arguments, **env):
    own, theirs = os.openpty()

    def program():
        name = os.ttyname(theirs)
        fresh.run(PROGRAM, *arguments, terminal=name, TERM="xterm", **env)
        os.close(theirs)

    running = threading.Thread(target=program)
    running.start()
    text = b""
    while True:
        try:
            part = os.read(own, 10_000)
        except OSError:  # Linux's way to say that the other end was closed
            break
        if not part:
            break
        text += part
    running.join()
    os.close(own)
    return text.decode()


@pytest.mark.filterwarnings("always:1 leaf cannot be saved")
def test_convert_writes_the_schema_of_a_function(tmp_path):
    schema = tmp_path / "model.schema.toml"
    wrote = f"3 leaves to '{schema}'."
    assert (
        run("convert", "test_cli:linked", schema, "--dry-run")
        == f"Would write {wrote}\n"
    )
    assert not schema.exists()
    assert run("convert", "test_cli:linked", schema) == f"Wrote {wrote}\n"
    assert dict(ta.read_metadata(schema).items()).keys() == {"a", "b/a", "c/0"}
    refused = run("convert", "test_cli:linked", tmp_path / "x.safetensors", code=2)
    assert "has shapes and no values" in refused


@pytest.mark.slow
@pytest.mark.parametrize("there", FORMATS)
@pytest.mark.parametrize("here", FORMATS)
def test_values_are_compared_leaf_by_leaf(here, there, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_BATCH_BYTES", 100)
    one = {f"h.{n}.w": np.full(8, n, np.float32) for n in range(6)}
    one |= {"gone.kernel": np.arange(6.0), "shape": np.ones(2), "type": np.ones(2)}
    two = {name: one[name].copy() for name in reversed(one)}
    two["come.kernel"] = two.pop("gone.kernel") + 2
    two["h.3.w"][2:4] = np.nan, 7
    two |= {"shape": np.ones(3), "type": np.ones(2, np.int64), "new": np.ones(7)}
    paths = [tmp_path / f"{n}{ENDINGS[x]}" for n, x in enumerate((here, there))]
    ta.save(paths[0], one)
    ta.save(paths[1], two)
    lines = run("diff", *paths, "--values", code=1).splitlines()
    assert lines == str(ta.tree_diff(one, two, values=True)).splitlines()
    assert "2 of 8 elements, by at most 4, NaN" in lines[-1]
    run("diff", *paths, "--values", "--where", "h.{0..2}.w")
    assert "'gone.kernel'" in run(
        "diff", *paths, "--values", "--where", "*.kernel", code=1
    )


def test_two_leaves_are_in_memory_at_a_time(tmp_path, monkeypatch):
    read, arrays, most = FileArray.read, [], []

    def counted(self, boxes, *into):
        made = read(self, boxes, *into)
        arrays.extend(weakref.ref(x if x.base is None else x.base) for x in made)
        most.append(sum(array() is not None for array in arrays))
        return made

    monkeypatch.setattr(FileArray, "read", counted)
    for name in "ab":
        leaves = {f"h.{n}": np.full((40, 3), n + ord(name)) for n in range(9)}
        ta.save(tmp_path / f"{name}.safetensors", leaves)
    pair = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert "9 changed" in run("diff", *pair, "--values", code=1)
    assert max(most) == 2
    assert len(most) == 18
    most.clear()
    run("diff", *pair, "--values", "--where", "h.4", code=1)
    assert len(most) == 2


def test_a_difference_is_found_in_every_part(monkeypatch):
    monkeypatch.setattr(diff, "_CHUNK", 3)
    for dtype in ("int64", "uint8", "float16", "complex64", "bool", "O"):
        one = np.zeros(8, dtype)
        for place in range(8):
            two = one.copy()
            two[place] = 1
            (found,) = ta.tree_diff({"a": one}, {"a": two}, values=True)
            assert found.note.startswith("1 of 8 elements")
        assert not ta.tree_diff({"a": one}, {"a": one.copy()}, values=True)
    (found,) = ta.tree_diff({"a": np.arange(9)}, {"a": np.arange(9) * 3}, values=True)
    assert found.note == "8 of 9 elements, by at most 16"


def test_lint_finds_mistaken_alternatives_and_notes_those_that_may_be_habits(tmp_path):
    tree = {
        f"h/{n}/{name}": np.ones(2) for n in range(3) for name in ("norm", "kernel")
    }
    ta.save(tmp_path / "x.safetensors", tree)
    typo = written(tmp_path, '"**/{norm,kernl}" = "a"\n"**" = "b"\n')
    text = run("lint", tmp_path / "x.safetensors", "--rules", typo, code=1)
    assert "alternative: rule 1, 'kernl'" in text
    assert "did you mean 'kernel' (3 leaves)?" in text
    run("lint", tmp_path / "x.safetensors", "--rules", typo, "--ignore", "alternative")
    habit = written(tmp_path, '"**/{norm,bias}" = "a"\n"h/{0..9}" = "b"\n')
    text = run("lint", tmp_path / "x.safetensors", "--rules", habit)
    assert "note: rule 1, 'bias' in '**/{norm,bias}' matches nothing" in text
    assert "note: rule 2, the end of '0..9' in 'h/{0..9}' matches nothing" in text


@pytest.mark.parametrize(
    ("arguments", "proposal"),
    [
        (("{npz}",), "treeadapt show {npz}"),
        (("--rules", "r.toml", "show", "{npz}"), "Options follow the command"),
        (("show", "{npz}", "r.toml"), "A rules file comes after --rules"),
        (("show", "r.toml", "{npz}"), "A rules file comes after --rules"),
        (("convert", "{npz}", "x", "--max-shard-bytes", "5XB"), "Write 5GB, 500MB"),
        (("convert", "{npz}", "x", "--max-shard-bytes", "0"), "1 byte or more"),
    ],
)
def test_what_people_type_first_leads_on(npz, arguments, proposal):
    told = run(*(each.format(npz=npz) for each in arguments), code=2)
    assert proposal.format(npz=npz) in told


def test_a_size_has_a_unit(npz, tmp_path):
    run("convert", npz, tmp_path / "x", "--max-shard-bytes", "0.1KB")
    assert len([*(tmp_path / "x").glob("*.safetensors")]) > 1


@pytest.mark.parametrize(
    ("stacks", "cure"),
    [
        ('"blocks" = 0', 'add "blocks/rope" = false in [stacks].'),
        ('"block" = 0', '"block" in [stacks] matches nothing'),
        ('"blocks" = true', '"blocks" = true in [stacks]: expected an axis'),
        ('"blocks" = true', '["blocks_{l}", 0], or false.'),
    ],
)
def test_what_a_command_says_of_stacks_names_the_section(tmp_path, stacks, cure):
    tree = {"w": np.ones((4, 3, 3)), "b": np.ones((4, 3)), "rope": np.ones(())}
    ta.save(tmp_path / "x.safetensors", {"blocks": tree, "embed": np.ones((5, 3))})
    table = f'[stacks]\n{stacks}\n[rules]\n"blocks/{{0..1}}" = "a"\n"**" = "b"\n'
    file = tmp_path / "rules.toml"
    file.write_text(f"version = 1\n{table}")
    text = run("lint", tmp_path / "x.safetensors", "--rules", file, code=2)
    assert cure in text
    assert "stacks=" not in text


def test_a_cure_names_what_the_command_takes_and_works(npz, tmp_path):
    """Each remedy that Python and the command word differently, followed."""
    ta.save(tmp_path / "x.safetensors", {"a": np.ones(1), "a/1/b": np.ones(1)})
    regex = written(tmp_path, '"re:.*" = "a"\n')
    lint = ("lint", npz, "--rules", regex)
    for arguments, cure in (
        (lint, "pass --allow-regex"),
        (("show", npz, "--filter", "<Norm>"), "<Norm>"),
        (("show", tmp_path / "x.safetensors", "--filter", "a/{-1}"), "module:function"),
        (("diff", npz, npz, "--where", "bais"), "did you mean"),
    ):
        text = run(*arguments, code=2)
        assert cure in text
        assert not re.search(r"\w=|bind\(|ta\.|treeadapt\.", text), text
    run(*lint, "--allow-regex")
    with pytest.raises(ta.RulesFileError, match="pass allow_regex=True"):
        ta.load_rules(regex)
    by_class = written(tmp_path, '"**/<Norm>" = "a"\n"**" = "b"\n')
    found = run("lint", npz, "--rules", by_class, code=1)
    assert "name that as TREE" in found
    assert "bind" not in found


def test_every_command_shows_two_examples():
    for name in COMMANDS:
        assert run(name, "--help").count(f"  treeadapt {name}") >= 2, name


def test_a_name_twice_in_a_file_is_shown(npz, tmp_path):
    twice = written(tmp_path, '"policy" = "a"\n"policy" = "b"\n')
    told = run("show", npz, "--rules", twice, code=2)
    assert "(at line 4, " in told


@pytest.mark.parametrize("shard_bytes", [10**9, 20])
def test_convert_like_a_published_folder_writes_its_form(tmp_path, shard_bytes):
    """No tool that reads config.json reads an Orbax checkpoint next to it."""
    weights = {f"model.layers.{n}.w": np.ones((2, 2), "float32") for n in range(3)}
    like, out = tmp_path / "published", tmp_path / "out"
    ta.save(like, weights, max_shard_bytes=shard_bytes)
    (like / "config.json").write_text('{"model_type": "llama"}')
    ta.save(tmp_path / "mine.safetensors", weights)
    run("convert", tmp_path / "mine.safetensors", out, "--like", like)
    assert sorted(x.name for x in out.iterdir()) == sorted(
        x.name for x in like.iterdir()
    )
    assert not ta.tree_diff(ta.load(out), weights, values=True)
    ta.save(tmp_path / "run", weights)  # without published weights: an Orbax folder
    run("convert", out, tmp_path / "again", "--like", tmp_path / "run")
    assert (tmp_path / "again" / "_METADATA").is_file()
