"""What the command says of optimizers in a rules file; and 200 mistakes in files."""

from __future__ import annotations

import copy
import json
import random
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from command import invoke, run
from optimizer_configs import CONFIGS, GPT2, Config

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

GPT2_FILE = f"""version = 1
{CONFIGS[0].toml}
[optimizer]
type = "MultiSteps"
every_k_schedule = 4
[[optimizer.opt]]
type = "clip_by_global_norm"
max_norm = 1.0
[[optimizer.opt]]
type = "partition"
"""
STEPS = ("--given", "steps=10_000")


def shapes(config: Config | None = None) -> dict[str, Any]:
    named = (GPT2 if config is None else config.shapes).items()
    return {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in named}


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.schema.toml"
    ta.save(file, shapes())
    return file


@pytest.fixture
def rules(tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text(GPT2_FILE)
    return file


def test_lint_without_a_tree_checks_the_tables(rules):
    out = run("lint", "--rules", rules)
    assert "0 findings in the tables." in out
    assert "note: --given steps=... is left out, which given.rate.decay_steps" in out
    rules.write_text(GPT2_FILE.replace("b2 = 0.95", "b2 = true"))
    out = run("lint", "--rules", rules, code=1)
    assert "optimizer: optimizers.decay.b2: expected a number, not the bool" in out
    assert "2 findings" in out
    assert "0 findings" in run("lint", "--rules", rules, "--ignore", "optimizer")


def test_lint_without_a_tree_or_an_optimizer_asks_for_a_tree(tmp_path, rules):
    file = tmp_path / "plain.toml"
    file.write_text('version = 1\n[rules]\n"**" = "a"\n')
    assert "Missing argument 'TREE'" in run("lint", "--rules", file, code=2)
    assert "Missing argument 'TREE'" in run("lint", "--migration", file, code=2)
    text = run("lint", "x.npz", "--rules", file, "--given", "a=1", code=2)
    assert "has none" in text
    rules.write_text("version = 1\n[rules\n")
    run("lint", "--rules", rules, code=2)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            'type = "adamw"',
            'type = "adamw"\nmask = ["**/kernel", "**/kernle"]',
            "optimizers.decay.mask: '**/kernle' reaches none of the 3 arrays that "
            "decay trains",
        ),
        (
            'type = "adamw"',
            'type = "adamw"\nmask = ["**", "!**/bais"]',
            "optimizers.decay.mask: '!**/bais' reaches no array",
        ),
        (
            'type = "adam"\n',
            'type = "masked"\nmask = "**/kernel"\ninner = {type = "sgd", '
            'learning_rate = { given = "rate" }}\n[given.x]\n',
            "optimizers.no_decay.mask: '**/kernel' reaches none of the 5 arrays",
        ),
        (
            'type = "clip_by_global_norm"\nmax_norm = 1.0',
            'type = "scale_by_rules"\nrules = { "h/7" = 1.0, "**" = 1.0 }',
            "optimizer.opt[0].rules: 'h/7' reaches none of the 8 arrays that train",
        ),
        (
            'type = "clip_by_global_norm"\nmax_norm = 1.0',
            'type = "clip_by_global_norm"\nmax_norm = -1',
            "optimizer.opt[0].max_norm: -1 is less than 0",
        ),
        (
            'type = "partition"',
            'type = "sgd"\nlearning_rate = 1',
            "optimizer: put ",
        ),
        (
            'type = "clip_by_global_norm"\nmax_norm = 1.0',
            'type = "scale_by_muon"\n[optimizer.opt.weight_dimension_numbers]\n'
            '"**/kernel" = { output_axis = 2 }\n"**" = "none"',
            "'h/0/attn/c_attn/kernel' has 2 axes, which lack one of",
        ),
    ],
)
def test_lint_with_a_tree(rules, model, old, new, says):
    text = GPT2_FILE.replace(old, new, 1)
    if "[given.x]" in text:  # what follows the table of no_decay
        text = re.sub(r"\[given\.x\]\n.*?(?=\n\[)", "", text, flags=re.DOTALL)
    rules.write_text(text)
    out = run("lint", model, "--rules", rules, *STEPS, code=1)
    assert f"optimizer: {says}" in out or says in out


@pytest.mark.slow
def test_lint_tries_one_step(rules, model):
    assert "0 findings" in run("lint", model, "--rules", rules, *STEPS)
    sam = 'type = "scale_by_muon"\nweight_dimension_numbers = { "h" = {} }'
    text = GPT2_FILE.replace('type = "clip_by_global_norm"\nmax_norm = 1.0', sam)
    rules.write_text(text)
    out = run("lint", model, "--rules", rules, *STEPS, code=1)
    assert "optimizer: one step on shapes fails: " in out
    assert "'ln_f/scale'" in out


@pytest.mark.parametrize("tree", ["trees:mlp", "trees:with_function"])
def test_one_step_is_tried_on_a_tree_with_functions(tmp_path, tree):
    rules = tmp_path / "rules.toml"
    table = 'type = "adam"\nlearning_rate = 1e-3\n'
    rules.write_text(f'version = 1\n[rules]\n"**" = "a"\n[optimizers.a]\n{table}')
    assert "0 findings" in run("lint", tree, "--rules", rules)


def test_a_step_that_fails_is_found_on_a_tree_with_functions(tmp_path):
    rules = tmp_path / "rules.toml"
    table = 'type = "scale_by_muon"\nweight_dimension_numbers = { "**" = {} }\n'
    rules.write_text(f'version = 1\n[rules]\n"**" = "a"\n[optimizers.a]\n{table}')
    out = run("lint", "trees:mlp", "--rules", rules, code=1)
    assert "\noptimizer: one step on shapes fails: Muon optimized" in out


def test_show_lists_each_label_with_its_optimizer_and_its_state(rules, model):
    assert "--given steps=..." in run("show", model, "--rules", rules, code=2)
    out = run("show", model, "--rules", rules, *STEPS)
    assert "adamw(learning_rate=rate, weight_decay=0.1, b2=0.95)" in out
    text = run("show", model, "--rules", rules, *STEPS, "--format", "json")
    rows = json.loads(text)["optimizers"]
    assert [row["label"] for row in rows] == ["frozen", "no_decay", "decay", ""]
    assert rows[0]["state_bytes"] == 0
    assert rows[-1]["optimizer"].startswith("MultiSteps(every_k_schedule=4, opt=chain(")
    tx = ta.load_optimizer(rules, steps=10_000)
    state = jax.eval_shape(tx.init, shapes())
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert sum(row["state_bytes"] for row in rows) == total
    for row in rows[1:3]:
        assert row["state_bytes"] == 3 * 4 * row["params"]  # mu, nu and the sum
    broken = GPT2_FILE.replace("max_norm = 1.0", "max_norm = -1")
    rules.write_text(broken)
    assert "max_norm: -1 is less" in run("show", model, "--rules", rules, code=2)


def test_show_of_the_file_alone_lists_its_optimizers(rules):
    out = run("show", rules)
    assert '"**" = "decay"' in out
    assert "# [optimizers.no_decay] is adam(learning_rate=rate, b2=0.95)\n" in out
    assert "# [optimizer] is MultiSteps(" in out
    assert tomllib.loads(out)["rules"]["**"] == "decay"


@pytest.mark.slow
def test_shared_arguments_are_shown_in_each_group_and_found_in_their_line(rules, model):
    shared = GPT2_FILE.replace("b2 = 0.95\n", "").replace(
        "[optimizers.decay]", "[each]\nb2 = 0.95\n[optimizers.decay]"
    )
    rules.write_text(shared)
    out = run("show", rules)
    assert "# [optimizers.no_decay] is adam(learning_rate=rate, b2=0.95)\n" in out
    out = run("show", model, "--rules", rules, *STEPS)
    assert "adamw(learning_rate=rate, weight_decay=0.1, b2=0.95)" in out
    assert "b2=0.95" in run("explain", model, "h/0/ln_1/scale", "--rules", rules)
    assert "0 findings" in run("lint", model, "--rules", rules, *STEPS)
    rules.write_text(shared.replace("b2 = 0.95", "b3 = 0.95"))
    out = run("lint", "--rules", rules, "--format", "github", code=1)
    line = shared.splitlines().index("b2 = 0.95") + 1
    assert f"line={line}" in out
    assert out.count("each.b3") == 1


def test_show_one_optimizer_for_all(rules, model):
    rules.write_text('version = 1\n[optimizer]\ntype = "adam"\nlearning_rate = 1\n')
    text = run("show", model, "--rules", rules, "--format", "json")
    (row,) = json.loads(text)["optimizers"]
    assert row["label"] == ""
    assert row["optimizer"] == "adam(learning_rate=1)"
    assert row["leaves"] == len(GPT2)
    assert row["state_bytes"] == 2 * 4 * row["params"] + 4
    assert "0 findings" in run("lint", model, "--rules", rules)
    out = run("explain", model, "wte/embedding", "--rules", rules)
    assert "[optimizer] is adam(learning_rate=1)" in out


def test_pictures_show_the_optimizer_of_each_label(rules, model, tmp_path):
    for ending in ("svg", "html", "md"):
        file = tmp_path / f"picture.{ending}"
        run("show", model, "--rules", rules, *STEPS, "--output", file)
        text = file.read_text("utf-8")
        assert "adamw(learning_rate=rate, weight_decay=0.1, b2=0.95)" in text
        assert "optimizer of" in text


def test_a_mesh_takes_the_optimizer_of_the_file(rules, model):
    rules.write_text(
        'version = 1\n[rules]\n"**/kernel" = ["", "model"]\n"**" = []\n'
        '[optimizer]\ntype = "adam"\nlearning_rate = 1\n'
    )
    out = run("show", model, "--rules", rules, "--mesh", "model=4")
    assert "state/mu" in out
    assert "adam(learning_rate=1)" in out


@pytest.mark.slow
def test_explain_says_what_trains_a_parameter_and_how_fast(rules, model):
    path = "h/0/mlp/c_fc/kernel"
    out = run("explain", model, path, "--rules", rules)
    assert "'h/0/mlp/c_fc/kernel' gets 'decay'." in out
    assert "[optimizers.decay] is adamw(learning_rate=rate, weight_decay=0.1" in out
    assert "[optimizer] is MultiSteps(" in out
    assert out.endswith("optimizers.decay.learning_rate is rate\n")
    out = run("explain", model, path, "--rules", rules, *STEPS)
    assert "learning_rate is rate: 0 at 0, 0.015 at 1, 0.03 at 10, " in out
    assert "optimizer" not in run("explain", model, "wte/embedding", "--rules", rules)


def test_explain_says_what_trains_the_layers_of_an_array(rules, tmp_path):
    model = tmp_path / "model.schema.toml"
    ta.save(model, {"blocks": {"w": jnp.ones((3, 2))}, "head": jnp.ones(2)})
    rules.write_text(
        'version = 1\n[rules]\n"blocks/0" = "slow"\n"**" = "fast"\n[stacks]\n'
        '"blocks" = 0\n[optimizers.slow]\ntype = "sgd"\nlearning_rate = 0.1\n'
        '[optimizers.fast]\ntype = "sgd"\nlearning_rate = 1.0\n'
    )
    out = run("explain", model, "blocks/w", "--rules", rules)
    assert "[optimizers.slow] is sgd(learning_rate=0.1)" in out
    assert "[optimizers.fast] is sgd(learning_rate=1.0)" in out
    out = run("explain", model, "blocks/2/w", "--rules", rules)
    assert "slow]" not in out
    text = run("show", model, "--rules", rules, "--format", "json")
    rows = json.loads(text)["optimizers"]
    assert [(row["label"], row["leaves"]) for row in rows] == [("slow", 1), ("fast", 3)]


def test_explain_says_which_factor_and_which_masks_a_leaf_gets(rules, model):
    table = "{ 'h/{0..5}' = 0.1, '**/scale' = 0.5, '**' = 1.0 }"
    rules.write_text(
        'version = 1\n[rules]\n"**" = "all"\n[[optimizers.all]]\ntype = "adamw"\n'
        'learning_rate = 1e-3\nmask = "**/kernel"\n[[optimizers.all]]\n'
        f'type = "scale_by_rules"\nrules = {table}\n'
    )
    path = "h/0/mlp/c_fc/kernel"
    out = run("explain", model, path, "--rules", rules)
    assert "scale_by_rules(rules={...})" in out
    assert "\noptimizers.all[0].learning_rate is 0.001\n" in out
    assert f"\noptimizers.all[0].mask selects '{path}'\n" in out
    assert f"all[1].rules gives 0.1 to '{path}', by 'h/{{0..5}}'\n" in out
    out = run("explain", model, "ln_f/scale", "--rules", rules)
    assert "mask does not select 'ln_f/scale'\n" in out
    assert "rules gives 0.5 to 'ln_f/scale', by '**/scale'\n" in out


def test_explain_says_which_factors_the_layers_of_an_array_get(rules, tmp_path):
    model = tmp_path / "model.schema.toml"
    ta.save(model, {"blocks": {"w": jnp.ones((6, 2))}, "head": jnp.ones(2)})
    rules.write_text(
        'version = 1\n[rules]\n"**" = "all"\n[stacks]\n"blocks" = 0\n[given]\n'
        'factors = { "blocks/{0..2}" = 0.1, "**" = 1.0 }\n[[optimizers.all]]\n'
        'type = "sgd"\nlearning_rate = 0.1\n[[optimizers.all]]\n'
        'type = "scale_by_rules"\nrules = { given = "factors" }\n'
    )
    out = run("explain", model, "blocks/w", "--rules", rules)
    assert "scale_by_rules(rules=factors)" in out
    assert "given.factors gives 0.1 to 'blocks/{0..2}/w', by 'blocks/{0..2}'\n" in out
    assert "given.factors gives 1.0 to 'blocks/{3..5}/w', by '**'\n" in out
    out = run("explain", model, "blocks/4/w", "--rules", rules)
    assert out.endswith("given.factors gives 1.0 to 'blocks/4/w', by '**'\n")


def test_a_number_that_toml_writes_otherwise_is_written_so(rules):
    for text, cure in (("steps=.5", "steps=0.5"), ("steps=010", "steps=10")):
        out = run("lint", "--rules", rules, "--given", text, code=2)
        assert f"Write --given {cure}." in out


def test_a_tree_that_is_not_there_is_said_before_what_its_optimizers_need(rules):
    out = run("show", "absent.safetensors", "--rules", rules, code=2)
    assert "absent.safetensors" in out
    assert "--given" not in out


def test_a_given_value_is_toml(rules, model):
    for text in ("steps", "steps=", "steps=ten", "=1", f"steps={'[' * 2_000}"):
        code = 2 if text != "=1" else 1
        run("lint", model, "--rules", rules, "--given", text, code=code)
    assert "--given needs --rules" in run("show", model, "--given", "a=1", code=2)


# Mistakes

#: Rates take a schedule, and these may be negative or none.
NO_MISTAKE = re.compile(r"\w*(rate|weight_decay\w*|step_size|value)|version")
LINEAR = {"type": "linear_schedule", "init_value": 1.0, "end_value": 0.0}


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    if path:
        yield path
    if isinstance(data, dict | list):
        keys = data if isinstance(data, dict) else range(len(data))
        for key in keys:
            yield from places(data[key], (*path, key))


def mistakes(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Documents with one mistake each, and its kind."""
    for *above, key in places(document):
        again = copy.deepcopy(document)
        table: Any = again
        for step in above:
            table = table[step]
        value = table[key]

        def put(name: str, new: Any, table=table, key=key, again=again) -> Any:
            table[key] = new
            return name, copy.deepcopy(again)

        is_pattern = (above[:1] == ["rules"] and len(above) == 1) or (
            above and above[-1] in ("rules", "muon_weight_dimension_numbers")
        )
        if (isinstance(key, str) and above[:2] != ["given", "rate"]) or is_pattern:
            new = {("zz" + k if k == key else k): x for k, x in table.items()}
            yield "misspelt key", replaced(document, above, new)
        if above == ["optimizers"]:
            new = {k: x for k, x in table.items() if k != key}
            yield "no optimizer", replaced(document, above, new)
        is_label = above == ["rules"] and "optimizers" not in document
        if isinstance(value, str) and value != "none" and not is_label:
            kind = "unknown value" if key == "given" else "misspelt text"
            yield put(kind, f"zz{value}")
        if isinstance(value, dict | list):
            yield put("wrong kind", "text")
            if not NO_MISTAKE.fullmatch(str(key)):
                yield put("wrong kind", 3.5)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_axis = str([*above, key][-1 - isinstance(key, int)]).endswith("_axis")
        if (
            is_number
            and not NO_MISTAKE.fullmatch(str(key))
            and above not in (["given"], ["stacks"])
        ):
            yield put("schedule for a number", LINEAR | {"transition_steps": 3})
            if not is_axis:
                yield put("negative", -abs(value) - 1)
        if is_number:
            yield put("wrong kind", str(value))
            yield put("not finite", float("inf"))
            yield put("list for a number", [[value]])
        if isinstance(value, bool):
            yield put("wrong kind", "true")
        deep: Any = value
        for _ in range(40):
            deep = [deep]
        if above[:1] in (["optimizers"], ["optimizer"]):
            yield put("too deep", deep)
            yield put("unknown value", {"given": "nobody"})


def replaced(document: dict[str, Any], above: list[Any], new: Any) -> dict[str, Any]:
    again: Any = copy.deepcopy(document)
    if not above:
        return new
    table = again
    for step in above[:-1]:
        table = table[step]
    table[above[-1]] = new
    return again


def every_mistake() -> list[tuple[Config, str, dict[str, Any]]]:
    return [
        (config, kind, document)
        for config in CONFIGS
        if "names" not in config.given
        for kind, document in mistakes(tomllib.loads(config.toml))
    ]


def sampled(number: int) -> list[tuple[Config, str, dict[str, Any]]]:
    return random.Random(0).sample(every_mistake(), number)


PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_no_mistake_is_silent_and_none_a_bare_exception(part, tmp_path):
    silent = []
    for config, kind, document in sampled(200)[25 * part : 25 * (part + 1)]:
        model, rules = tmp_path / "model.schema.toml", tmp_path / "rules.json"
        ta.save(model, shapes(config))
        rules.write_text(json.dumps({"version": 1, **document}))
        given = [f"--given={name}={value}" for name, value in config.given.items()]
        result = invoke("lint", model, "--rules", rules, *given)
        bare = re.search(r"error: \w+(Error|Exception|Interrupt): ", result.output)
        is_seen = result.exit_code in (1, 2)
        if kind == "unknown value":  # lint lists it; loading is refused
            is_seen |= bool(re.search(r"--given \w+=... is left out", result.output))
            with pytest.raises(ta.RulesFileError):
                ta.load_optimizer(rules, **config.given)
        if bare or not is_seen:
            silent.append((config.name, kind, result.output, document))
    assert silent == []


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("root", ["a", "b", "mu", "z"])
def test_state_belongs_to_layers_whatever_nodes_are_called(tmp_path, root, around):
    """Both labels have two of four layers; a trace around all holds arrays whole."""
    model, rules = tmp_path / "m.schema.toml", tmp_path / "r.toml"
    ta.save(model, {root: {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)}})
    adam = 'type = "adam"\nlearning_rate = 1e-3\n'
    chain = '[[optimizer]]\ntype = "trace"\ndecay = 0.9\n'
    chain += '[[optimizer]]\ntype = "partition"\n'
    rules.write_text(
        f'version = 1\n[rules]\n"{root}/w/{{0..1}}" = "a"\n"**" = "b"\n'
        f'[stacks]\n"{root}/w" = 0\n[optimizers.a]\n{adam}[optimizers.b]\n{adam}'
        f"{chain if around else ''}"
    )
    out = run("show", model, "--rules", rules, "--format", "json")
    sizes = {row["label"]: row["state_bytes"] for row in json.loads(out)["optimizers"]}
    copies = 3 if around else 2
    assert sizes["a"] == sizes["b"] == copies * 4 * 2 * 8
