"""What people type first, from other habits: each error names what was meant."""

from __future__ import annotations

import ast
import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command import run

import treeadapt as ta

PARAMS = {"encoder": {"w": jnp.ones(3)}, "head": {"w": jnp.ones(3)}}
TURNED = (
    {"frozen": ["encoder"], "train": ["**"]},
    {"frozen": "encoder", "train": "**"},
    {"frozen": ("encoder",), "train": ("**",)},
    [("frozen", "encoder"), ("train", "**")],
    {"frozen": ["encoder"]},
)
OPTIMIZERS = {"train": optax.adam(1e-3)}
MEANT = r"wrong way round\. The pattern comes first: \{'encoder': 'frozen'"


@pytest.mark.parametrize("rules", TURNED)
def test_labels_before_patterns_are_written_the_other_way_round(rules):
    with pytest.raises(ta.UnusedRuleError, match=MEANT):
        ta.param_labels(PARAMS, rules)
    with pytest.raises(ta.TransformError, match=MEANT):
        ta.partition(OPTIMIZERS, rules)


def test_so_are_those_of_a_file(tmp_path):
    file = tmp_path / "rules.toml"
    for rules in ('frozen = ["encoder"]', 'frozen = "encoder"\ntrain = "**"'):
        file.write_text(f"version = 1\n[rules]\n{rules}\n")
        with pytest.raises(ta.UnusedRuleError, match=MEANT):
            ta.param_labels(PARAMS, ta.load_rules(file))


@pytest.mark.parametrize(
    "rules",
    [
        {"frozn": "train", "**": "train"},
        {"hed": jax.P("head")},  # an axis of a mesh may have the name of a node
        {"hed": 0.1},
    ],
)
def test_other_mistakes_are_not_taken_for_it(rules):
    with pytest.raises(ta.TreeAdaptError) as caught:
        ta.param_labels(PARAMS, rules)
    assert "way round" not in str(caught.value)


def test_a_label_that_is_the_name_of_a_node_is_a_label():
    labels = ta.param_labels(PARAMS, {"head": "encoder", "**": "head"})
    assert labels["head"]["w"] == "encoder"


@pytest.mark.parametrize("made", [dict, ta.Rules])
def test_rules_in_the_place_of_a_selector_are_asked_for_a_label(made):
    rules = made({"encoder": "frozen", "**": "train"})
    with pytest.raises(ta.SelectorError, match=r"\.where\('frozen'\)") as caught:
        ta.freeze(optax.adam(1e-3), rules)
    call = str(caught.value).rpartition(": ")[2].removesuffix(".")
    where = eval(call, {"treeadapt": ta, "rules": rules})
    ta.freeze(optax.adam(1e-3), where).init(PARAMS)


@pytest.mark.parametrize("pattern", [".*", ".+", "^.*$", "(.*)"])
def test_everything_as_a_regular_expression_is_two_stars(pattern):
    with pytest.raises(ta.UnusedRuleError, match=r"did you mean '\*\*' \(2 leaves\)"):
        ta.param_labels(PARAMS, {pattern: "train"})


class Model(eqx.Module):
    first: eqx.nn.LayerNorm
    head: eqx.nn.Linear


@pytest.mark.parametrize("pattern", ["**/LayerNorm", "LayerNorm", "**/LayerNorm/bias"])
def test_the_name_of_a_class_is_written_as_a_class(pattern):
    model = Model(eqx.nn.LayerNorm(3), eqx.nn.Linear(3, 3, key=jax.random.key(0)))
    meant = pattern.replace("LayerNorm", "<LayerNorm>")
    with pytest.raises(ta.UnusedRuleError, match="did you mean") as caught:
        ta.param_labels(model, {pattern: "no_decay", "**": "decay"})
    assert repr(meant) in str(caught.value)
    ta.param_labels(model, {meant: "no_decay", "**": "decay"})


@pytest.mark.parametrize("row", [("w:i o", "k:o i"), ("w: i o", "k :o i")])
def test_a_colon_without_spaces_is_written_with_them(row):
    table = ta.Migration([row])
    with pytest.raises(ta.MigrationError, match="write 'w : i o', 'k : o i'"):
        table({"w": jnp.ones((2, 3))})
    with pytest.raises(ta.MigrationError, match="spaces around ':', 'k : o i'"):
        ta.Migration({"w : i o": "k:o i"})


def test_names_with_a_colon_are_no_axes():
    with pytest.raises(ta.MigrationError) as caught:
        ta.Migration({"dense/kernel:0": "kernel"})({"w": jnp.ones((2, 3))})
    assert "colon" not in str(caught.value)


def test_an_inverse_that_is_called_without_a_tree_is_explained():
    table = ta.Migration({"w : i o": "k : o i"})
    for migration in (table, table.then(ta.Migration({"k": "b"}))):
        with pytest.raises(ta.MigrationError, match=r"m\.inverse\(tree\)"):
            migration.inverse()


def test_a_function_of_paths_is_called_with_a_tree_and_told_what_makes_rules():
    def label(path):
        return "frozen" if "encoder" in path.split("/") else "train"

    def short(path):
        return "frozen" if path == "encoder" else "train"

    tx = ta.partition(OPTIMIZERS, label)
    with pytest.raises(AttributeError) as caught:
        tx.init(PARAMS)
    assert "called once, with the whole tree" in caught.value.__notes__[0]
    with pytest.raises(
        ta.SelectorError, match="A function of 'path' was called"
    ) as told:
        ta.partition(OPTIMIZERS, short).init(PARAMS)
    for text in (caught.value.__notes__[0], str(told.value)):
        cure = re.search(r"treeadapt\.Rules\(.*\)", text)[0]
        names = {"treeadapt": ta, "function": label, "model": PARAMS}
        state = ta.partition(OPTIMIZERS, eval(cure, names)).init(PARAMS)
        assert [*state.inner_states["train"][0].mu] == ["head/w"]
    # One answer for a whole tree is an answer, of a function of trees.
    ta.partition(OPTIMIZERS, lambda tree: "train").init(PARAMS)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("freeze_layers", "freeze"),
        ("from_pretrained", "load"),
        ("load_checkpoint", "load"),
        ("save_pretrained", "save"),
        ("convert", "migration=table"),
        ("mask", "param_mask"),
        ("mask_params", "param_mask"),
        ("label_params", "param_labels"),
        ("labels", "param_labels"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(name, ours):
    with pytest.raises(AttributeError, match="Did you mean") as caught:
        getattr(ta, name)
    assert ours in str(caught.value)


@pytest.mark.parametrize(
    ("transforms", "cure"),
    [
        ({"train": optax.adam(1e-3), "frozen": None}, "Leave it out"),
        ({"train": None}, 'write "frozen" in the rules'),
        ({"train": 0.1}, "name the optimizer: optax.adam\\(0.1\\)"),
        ({"train": optax.adam}, "call it, adam\\(...\\).$"),
    ],
)
def test_what_is_not_an_optimizer_is_not_taken_for_another_order(transforms, cure):
    with pytest.raises(ta.TransformError, match=cure) as caught:
        ta.partition(transforms, {"encoder": "frozen", "**": "train"})
    assert "First comes" not in str(caught.value)


def test_factors_as_small_as_rates_warn():
    with pytest.warns(ta.TreeAdaptWarning, match="largest factor") as caught:
        ta.scale_by_rules({"encoder": 1e-5, "**": 1e-4})
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "factors",
    [
        {"encoder": 1e-5, "**": 1.0},
        {"encoder": -1e-5, "**": -1e-4},
        {"encoder": 0.0, "**": 0.0},
        {"**": jnp.full(3, 1e-4)},
    ],
)
def test_other_factors_do_not(factors):
    ta.scale_by_rules(factors)  # a warning is an error


@pytest.mark.parametrize("optimizers", ["", '[optimizers.train]\ntype = "adam"\n'])
def test_a_file_that_freezes_everything_is_told_so(tmp_path, optimizers):
    file = tmp_path / "optimizer.toml"
    file.write_text(f'version = 1\n[rules]\n"**" = "frozen"\n{optimizers}')
    with pytest.raises(ta.RulesFileError) as caught:
        ta.load_optimizer(file)
    assert '"frozen", so nothing' in str(caught.value)
    assert "add a rule" not in str(caught.value)
    assert "[optimizers.train] with" not in str(caught.value)


MODEL = {"a": {"k": np.ones((2, 3), "float32")}, "b": np.ones(3, "float32")}


@pytest.mark.parametrize(
    ("label", "meant"), [("frozn", "frozen"), ("freeze", "frozen"), ("trian", "train")]
)
def test_a_label_without_an_optimizer_names_the_one_that_is_meant(label, meant):
    tx = ta.partition({"train": optax.sgd(1.0)}, {"a": label, "**": "train"})
    with pytest.raises(ta.TransformError, match=f"did you mean '{meant}'") as caught:
        tx.init(MODEL)
    assert f"partition({{..., '{label}': optax.adam(1e-3)}}, rules)" in str(
        caught.value
    )


def test_a_label_that_is_like_no_other_gets_an_optimizer():
    tx = ta.partition({"train": optax.sgd(1.0)}, {"a": "body", "**": "train"})
    with pytest.raises(ta.TransformError, match="add its optimizer") as caught:
        tx.init(MODEL)
    assert "did you mean" not in str(caught.value)


TRANSFORMATIONS = {
    "partition": lambda: ta.partition(
        {"train": optax.adam(1e-3)}, {"a": "frozen", "**": "train"}
    ),
    "freeze": lambda: ta.freeze(optax.adam(1e-3), "a"),
    "adapt": lambda: ta.adapt(optax.adam(1e-3)),
    "without a state": lambda: ta.adapt(optax.sgd(1.0)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_state_and_params_that_are_exchanged_are_said(name):
    tx = TRANSFORMATIONS[name]()
    with pytest.raises(ta.TransformError, match="State and params are exchanged"):
        tx.update(MODEL, MODEL, tx.init(MODEL))


def test_params_of_another_model_are_not_taken_for_a_state():
    tx = ta.adapt(optax.adam(1e-3))
    with pytest.raises(ta.TransformError, match="not gradients of these params"):
        tx.update(MODEL, tx.init(MODEL), {"other": MODEL["b"]})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights.safetensors"
    ta.save(path, {"w": MODEL["a"]["k"], "b": MODEL["b"]})
    return path


def test_rules_in_the_place_of_a_migration_are_told_from_one(file):
    with pytest.raises(ta.MigrationError, match=r"Rules label .*ta\.Migration\(\{"):
        ta.load(file, migration=ta.Rules({"**": "train"}))
    with pytest.raises(ta.MigrationError, match=r"Wrap .*migration=ta\.Migration\(t"):
        ta.load(file, migration={"w": "w"})


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("table", [None, {"w": "v", "b": "c"}])
def test_a_target_of_another_dtype_is_told_to_cast_in_two_lines(file, table):
    names = ("w", "b") if table is None else ("v", "c")
    shapes = (spec(2, 3, dtype="bfloat16"), spec(3, dtype="bfloat16"))
    target = dict(zip(names, shapes, strict=True))
    migration = table and ta.Migration(table)
    with pytest.raises(ta.TreeAdaptError) as caught:
        ta.load(file, target, migration=migration)
    second = str(caught.value).splitlines()[1]
    assert "cast=True" in second
    assert "from float32[3] to bfloat16[3]" in second
    assert ta.load(file, target, migration=migration, cast=True)


def test_a_dtype_to_which_nothing_casts_is_not_told_to(file):
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(file, {"w": spec(2, 3, dtype="int32"), "b": spec(3)})
    assert "cast=True" not in str(caught.value).splitlines()[1]


@pytest.mark.parametrize(
    ("rows", "cure"),
    [
        ({"w : v e": "u : v e"}, "'w : v e': 'u : e v'"),
        ({"w": "u"}, "'w : a b': 'u : b a'"),
        ({"{a=w}": "{a=u}"}, "'{a=w} : b c': '{a=u} : c b'"),
    ],
)
def test_a_target_with_two_axes_exchanged_gets_the_row_that_fits(file, rows, cure):
    target = {"u": spec(3, 2), "b": spec(3)}
    flat = ta.load(file)
    for call in (
        lambda m: ta.load(file, target, migration=m),
        lambda m: m(flat, target),
    ):
        with pytest.raises(ta.MigrationError) as caught:
            call(ta.Migration({**rows, "b": "b"}))
        assert f"exchanged it fits: {cure}" in str(caught.value)
        mended = ast.literal_eval(f"{{{cure}}}")
        assert call(ta.Migration({**mended, "b": "b"}))


def test_a_shape_that_no_exchange_gives_gets_no_row(file):
    flat = ta.load(file)
    for shape in ((3, 4), (6,)):
        with pytest.raises(ta.MigrationError) as caught:
            ta.Migration({"w": "u", "b": "b"})(flat, {"u": spec(*shape), "b": spec(3)})
        assert "exchanged" not in str(caught.value)


TABLE = {"w : i o": "v : o i"}
RULES = {"encoder": "frozen", "**": "train"}
FILES = {
    "load_migration": ta.Migration(TABLE).to_toml(),
    "load_rules": ta.Rules(RULES).to_toml(),
    "FreezeSpec.load": ta.FreezeSpec(["encoder"]).to_toml(),
    "load_optimizer": (
        'version = 1\n[optimizers.train]\ntype = "adam"\nlearning_rate = 1e-3\n'
        '[rules]\n"**" = "train"\n'
    ),
}
LOADERS = {**{name: getattr(ta, name, None) for name in FILES}, "load": ta.load}
LOADERS["FreezeSpec.load"] = ta.FreezeSpec.load


@pytest.mark.parametrize("name", FILES)
def test_the_text_of_a_file_in_the_place_of_its_name_is_written_to_one(
    name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text = FILES[name]
    with pytest.raises(ta.TreeAdaptError, match=r"got its content, 'version") as caught:
        LOADERS[name](text)
    (call,) = re.findall(r"pathlib\.Path\('file\.toml'\).*?\(text\)", str(caught.value))
    eval(call, {"pathlib": pathlib, "text": text})
    LOADERS[name]("file.toml")
    as_json = '{"version": 1}'
    with pytest.raises(ta.TreeAdaptError, match=r"got its content.*'file\.json'"):
        LOADERS[name](as_json)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_file_of_another_kind_is_said_with_what_reads_it(name, loader, tmp_path):
    file = tmp_path / "file.toml"
    file.write_text(FILES[name])
    if loader == name or (loader, name) == ("load_rules", "load_optimizer"):
        LOADERS[loader](file)
        return
    with pytest.raises(ta.TreeAdaptError, match=rf"ta\.{name}\b"):
        LOADERS[loader](file)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_schema_and_a_configuration_are_told_from_other_files(loader, tmp_path):
    schema, config = tmp_path / "m.schema.toml", tmp_path / "config.json"
    ta.save(schema, PARAMS)
    config.write_text('{"model_type": "qwen3"}')
    if loader == "load":
        LOADERS[loader](schema)
    else:
        with pytest.raises(ta.TreeAdaptError, match=r"Read it with ta\.load\."):
            LOADERS[loader](schema)
    says = "Name its folder" if loader == "load" else "Pass it as config="
    with pytest.raises(ta.TreeAdaptError, match=says) as caught:
        LOADERS[loader](config)
    if loader != "load":
        call = str(caught.value).rpartition(": ")[2].removesuffix(".")
        table = eval(call, {"ta": ta, "table": "tunix"})
        is_sure = loader == "load_migration"
        assert table.published == ("keras-hub/qwen3" if is_sure else "tunix/qwen3")
        assert ("'tunix/qwen3'" in str(caught.value)) == is_sure


def test_files_of_another_kind_are_said_in_the_words_of_the_command(tmp_path):
    for name, text in FILES.items():
        (tmp_path / f"{name}.toml").write_text(text)
    ta.save(tmp_path / "m.safetensors", PARAMS)
    wrong = [("--rules", "load_migration", "--migration")]
    wrong += [("--migration", "load_rules", "--rules")]
    for option, name, meant in wrong:
        file = str(tmp_path / f"{name}.toml")
        said = run("lint", tmp_path / "m.safetensors", option, file, code=2)
        assert f"Pass it as {meant}." in said


WRONG_MIGRATIONS = {
    "a path": ("table.toml", r"ta\.load_migration\('table\.toml'\)"),
    "a Path": (pathlib.Path("table.toml"), r"ta\.load_migration\('table\.toml'\)"),
    "a table": (TABLE, r"ta\.Migration\(table\)"),
    "pairs": ([*TABLE.items()], r"ta\.Migration\(table\)"),
    "rules": (ta.Rules(RULES), r"ta\.Migration\(\{"),
}


@pytest.mark.parametrize("case", WRONG_MIGRATIONS)
def test_what_is_not_a_migration_is_made_one_by_the_call_in_the_error(case):
    value, says = WRONG_MIGRATIONS[case]
    old, new = {"w": np.ones((2, 3))}, {"v": np.ones((3, 2))}
    tx = optax.adam(1e-3)
    calls = [
        lambda x: ta.find_wrong_rows(x, old, new, dict, dict),
        ta.Migration(TABLE).then,
        lambda x: ta.carry_state(tx, new, tx.init(old), migration=x),
    ]
    for call in calls:
        with pytest.raises(ta.MigrationError, match=says):
            call(value)
        with pytest.raises(ta.MigrationError, match=r"Pass draft\.migration"):
            call(ta.draft_migration(old, new))
        with pytest.raises(ta.MigrationError) as caught:
            call(old)  # arrays, which are in the wrong place
        assert "Wrap" not in str(caught.value)


def test_source_and_target_of_wrong_rows_that_are_exchanged_are_said():
    old, new = {"w": np.ones((2, 3))}, {"w": jax.ShapeDtypeStruct((3, 2), float)}
    m = ta.Migration({"w : i o": "w : o i"})
    with pytest.raises(
        ta.MigrationError, match=r"'w' of the source has no value.*order"
    ):
        ta.find_wrong_rows(m, new, old, dict, dict)


def test_a_match_in_the_place_of_its_migration_is_asked_for_it():
    x = np.linspace(-1, 1, 12).reshape(4, 3)
    match = ta.match_models(
        {"fc": np.ones((5, 3)), "out": np.ones((2, 5))},
        {"a": jnp.ones((3, 5)), "b": jnp.ones((5, 2))},
        lambda params: jnp.tanh(x @ params["a"]) @ params["b"],
        lambda old: np.tanh(x @ old["fc"].T) @ old["out"].T,
    )
    assert match.migration is not None
    with pytest.raises(ta.MigrationError, match=r"Pass match\.migration\."):
        ta.Migration(TABLE).then(match)
