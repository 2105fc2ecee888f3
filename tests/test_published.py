"""Published tables by name, and by the ``config.json`` next to the weights.

What each table does is compared in ``test_published_tables``; here the way to one: its
name, the model type, sizes that a configuration states, and every error on the way.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from command import invoke
from tiny_qwen3 import CONFIG, SHAPES

import treeadapt as ta
from treeadapt.migrations.tables.published import published


def leaf(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def qwen3(*, tied=False, layers=2):
    """A tiny Qwen 3 under the names of the hub."""
    weights = {"model.embed_tokens.weight": leaf(13, 22), "model.norm.weight": leaf(22)}
    for number in range(layers):
        for name, shape in SHAPES.items():
            weights[f"model.layers.{number}.{name}.weight"] = leaf(*shape) + number
    return weights if tied else weights | {"lm_head.weight": leaf(13, 22)}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder as ``save_pretrained`` writes it: shards, index and configuration."""
    ta.save(tmp_path / "published", qwen3(), max_shard_bytes=4_000)
    (tmp_path / "published" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "published"


def configured(folder, **changes):
    """Change the configuration in a folder; None takes a key out."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


# --- one line ---


def test_one_line_loads_a_published_folder(folder):
    by_hand = ta.load_migration("tunix/qwen3", config=CONFIG)(qwen3())
    for file in (folder, folder / "model.safetensors.index.json"):
        params = ta.load(file, migration="tunix")
        assert params["layers"]["1"]["attn"]["q_proj"]["w"].shape == (22, 4, 6)
        assert not ta.tree_diff(params, by_hand, values=True)


def test_a_target_gives_sizes_that_no_configuration_does(folder):
    target = ta.load(folder, migration="tunix")
    (folder / "config.json").unlink()
    again = ta.load(folder, target, migration="tunix/qwen3")
    assert not ta.tree_diff(again, target, values=True)


def test_a_head_that_one_side_alone_has_is_the_embedding():
    tied, m = qwen3(tied=True), ta.load_migration("tunix/qwen3")
    params = ta.load_migration("tunix", config=CONFIG)(tied)
    assert not [path for path in params if "lm_head" in path]
    target = params | {"lm_head/w": jax.ShapeDtypeStruct((22, 13), np.float32)}
    head = m(tied, target)["lm_head/w"]
    np.testing.assert_array_equal(head, tied["model.embed_tokens.weight"].T)
    untied = ta.load_migration("tunix", config=CONFIG | {"tie_word_embeddings": False})
    with pytest.raises(ta.MigrationError) as caught:
        untied(tied, target)
    assert "nothing fills\n  'lm_head/w'" in str(caught.value)
    assert str(caught.value).endswith("tie_word_embeddings = false.")


def test_a_report_and_an_error_say_which_table_and_which_sizes(folder):
    target = ta.load(folder, migration="tunix")
    report = ta.compare_checkpoint(folder, target, migration="tunix")
    assert report.fits
    text = (
        "of the table 'tunix/qwen3', with h = 4 (num_attention_heads), "
        "k = 2 (num_key_value_heads), d = 6 (head_dim)"
    )
    assert report.origin == text
    assert str(report).endswith(f"The rows are {text}.")
    del target["final_norm"]
    with pytest.raises(ta.MigrationError, match="the table 'tunix/qwen3'"):
        ta.load(folder, target, migration="tunix")
    own = ta.compare_checkpoint(
        folder, target, migration=ta.Migration({"{x:**}": "{x}"})
    )
    assert own.origin == ""


def test_of_several_layouts_the_one_that_fits_is_taken(folder, tmp_path):
    table = tmp_path / "own.toml"
    table.write_text(ta.Migration({"other.{l}.w": "other/{l}/w"}).to_toml())
    names = ["tunix", str(table)]
    target = ta.load(folder, migration="tunix")
    report = ta.compare_checkpoint(folder, target, migration=names)
    assert report.migration == 0
    assert "tunix/qwen3" in report.origin
    again = ta.load(folder, target, migration=names[::-1])
    assert not ta.tree_diff(again, target, values=True)


# --- names ---


def error_of(name, **options):
    with pytest.raises(ta.MigrationError) as caught:
        ta.load_migration(name, **options)
    assert len(str(caught.value)) < 4_000
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tunx/qwen3", "no layout 'tunx'. Did you mean 'tunix'?"),
        ("Tunix/qwen3", "no layout 'Tunix'. Did you mean 'tunix'?"),
        ("hello", "no layout 'hello'. Layouts are"),
        (" tunix/qwen3", "no layout ' tunix'. Did you mean 'tunix'?"),
        ("t" * 100_000, "no layout 'ttt"),
        ("tunix/" + "q" * 100_000, "no table of the model type 'qqq"),
        ("a\0b", "no layout"),
        ("https://example.org/x", "no layout 'https:'"),
        ("", "no layout ''"),
        ("tunix/qwen4", "'qwen4'. Near it: 'qwen2', 'qwen3'"),
        ("tunix/Qwen3", "'Qwen3'. Near it: 'qwen3'"),
        ("tunix/qwen3/x", "no table of the model type 'qwen3/x'"),
        ("tunix/../tunix/qwen3", "no table of the model type '../tunix/qwen3'"),
        ("tunix/", "depends on the model type"),
        ("tunix", "depends on the model type"),
        ("tunix/mamba", "It has: 'gemma2',"),
        ("./tunix/qwen3", "TOML or JSON"),
        ("tunix/qwen3.toml", "there is no such file"),
        ("tunix\\qwen3", "TOML or JSON"),
        ("/tunix/qwen3", "TOML or JSON"),
    ],
)
def test_a_name_that_is_not_one_is_never_guessed(name, told):
    assert told in error_of(name)


def test_a_path_object_is_a_file(tmp_path):
    with pytest.raises(ta.MigrationError, match="TOML or JSON"):
        ta.load_migration(Path("tunix/qwen3"))


# --- configurations ---


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "has no 'model_type'"),
        ({"model_type": None}, "has None as 'model_type'"),
        ({"model_type": 3}, "has 3 as 'model_type'"),
        ({"model_type": ""}, "has '' as 'model_type'"),
        ({"model_type": "qwen3_next"}, "'qwen3_next'. Near it: 'qwen3_moe', 'qwen3'"),
        ({"model_type": "mistral3"}, "no table of the model type 'mistral3'"),
        (CONFIG | {"num_attention_heads": True}, "has 'num_attention_heads': True"),
        (CONFIG | {"num_attention_heads": "4"}, "has 'num_attention_heads': '4'"),
        (CONFIG | {"num_attention_heads": 0}, "has 'num_attention_heads': 0"),
        (CONFIG | {"head_dim": 2.0}, "has 'head_dim': 2.0"),
        (CONFIG | {"head_dim": 2**80}, "has 'head_dim': "),
        (CONFIG | {"head_dim": [6]}, "has 'head_dim': [6]"),
        (7, "Expected as config= a folder"),
        ("folder\0", "cannot be read"),
    ],
)
def test_a_configuration_is_taken_at_its_word_or_refused(config, told):
    assert told in error_of("tunix", config=config)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no such file"),
        ("", "malformed"),
        ("[]", "is not a table"),
        ("{", "malformed"),
        ('{"model_type": "qwen3", "model_type": "llama"}', "occurs twice"),
    ],
)
def test_a_missing_or_false_file_says_how_to_go_on(folder, text, told):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(folder, migration="tunix")
    assert told in str(caught.value)
    assert str(folder / "config.json") in str(caught.value)
    assert "Name the table, as 'tunix/" in str(caught.value)


def test_a_size_that_contradicts_names_both(folder):
    configured(folder, num_attention_heads=5)
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(folder, migration="tunix")
    text = str(caught.value)
    assert "h = 5 (num_attention_heads)" in text
    assert "'model.layers.0.self_attn.q_proj.weight'" in text


@pytest.mark.parametrize("model_type", ["pi0", "pi05"])
def test_the_actions_of_pi0_are_as_many_as_its_configuration_says(model_type):
    published = Path(__file__).parent / "published" / model_type / "1"
    weights = ta.load(published / "model.schema.toml")
    config = json.loads((published / "config.json").read_text())
    ta.load_migration(f"openpi/{model_type}", config=config)(weights)
    other = ta.load_migration(f"openpi/{model_type}", config={"action_dim": 32})
    with pytest.raises(ta.MigrationError, match=r"a = 32 \(action_dim\)"):
        other(weights)


def test_a_size_that_no_key_gives_stays_open_or_follows_from_others(folder):
    configured(folder, head_dim=None)  # it follows from the heads
    params = ta.load(folder, migration="tunix")
    assert params["layers"]["0"]["attn"]["k_proj"]["w"].shape == (22, 2, 6)
    configured(folder, num_attention_heads=None, num_key_value_heads=None)
    with pytest.raises(ta.MigrationError, match="stays open"):
        ta.load(folder, migration="tunix")


def test_a_size_may_be_a_quotient_of_two():
    """As the size of a head, which older files of Llama do not state."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "hidden_size": 24, **sizes}
    origin = ta.load_migration("maxtext", config=config).origin
    assert "d = 6 (hidden_size / num_attention_heads)" in origin
    origin = ta.load_migration("maxtext", config=config | {"head_dim": 8}).origin
    assert "d = 8 (head_dim)" in origin
    text = error_of("maxtext", config=config | {"hidden_size": 22})
    assert "has 'hidden_size / num_attention_heads': 22 / 4" in text


def test_a_table_that_cannot_be_read_without_a_size_says_where_it_comes_from():
    text = error_of("maxtext/deepseek_v3")
    assert "no size 'dense'" in text
    assert text.endswith("Pass config=, which gives 'h', 'dense'.")
    config = {"first_k_dense_replace": 3}
    assert ta.load_migration("maxtext/deepseek_v3", config=config).sizes["dense"] == 3


def test_a_name_outright_needs_no_configuration_and_overrules_one(folder):
    configured(folder, model_type="mistral")
    params = ta.load(folder, migration="tunix/qwen3")
    assert params["layers"]["0"]["attn"]["q_proj"]["w"].shape == (22, 4, 6)


def test_a_file_of_ones_own_has_config_too(tmp_path, folder):
    file = tmp_path / "own.toml"
    file.write_text(
        """version = 1
[config]
h = ["n_head", "text.n_head"]
[[rows]]
from = "w : (h d) e"
to = "kernel : e h d"
"""
    )
    ta.save(tmp_path / "x.safetensors", {"w": leaf(12, 5)})
    (tmp_path / "config.json").write_text('{"n_head": null, "text": {"n_head": 3}}')
    assert ta.load(tmp_path / "x.safetensors", migration=str(file))["kernel"].shape == (
        5,
        3,
        4,
    )
    report = ta.compare_checkpoint(
        tmp_path / "x.safetensors", {"kernel": leaf(5, 3, 4)}, migration=file
    )
    assert report.origin == f"of {str(file)!r}, with h = 3 (text.n_head)"
    text = file.read_text().replace('["n_head", "text.n_head"]', "3")
    file.write_text(text)
    with pytest.raises(
        ta.MigrationError, match=r"'h' of config is not a string, or a list of strings"
    ):
        ta.load_migration(file)


# --- optional rows ---


def test_an_optional_row_may_match_nothing_in_both_directions(tmp_path):
    rows = {"a : i o": "b : o i", "c : i": ("d : i", {"optional": True})}
    m = ta.Migration(rows)
    assert [*m({"a": leaf(2, 3)})] == ["b"]
    assert [*m.inverse({"b": leaf(3, 2)})] == ["a"]
    assert [*m({"a": leaf(2, 3), "c": leaf(2)})] == ["b", "d"]
    (tmp_path / "x.toml").write_text(m.to_toml())
    assert ta.load_migration(tmp_path / "x.toml") == m
    assert m != ta.Migration({"a : i o": "b : o i", "c : i": "d : i"})
    with pytest.raises(ta.MigrationError, match="its optional is not True"):
        ta.Migration({"c": ("d", {"optional": False})})
    with pytest.raises(ta.MigrationError, match="no leaf is taken by"):
        m({"c": leaf(2)})


# --- the command ---


def test_tables_lists_layouts_and_tables():
    every = invoke("tables")
    assert every.exit_code == 0
    assert "tunix" in every.output
    assert "qwen3_moe" in every.output
    one = invoke("tables", "tunix")
    assert one.exit_code == 0
    assert "tunix/qwen3 " in one.output
    assert "google-tunix==" in one.output
    wrong = invoke("tables", "tunx")
    assert wrong.exit_code == 2
    assert "Did you mean 'tunix'?" in wrong.output


@pytest.mark.slow
def test_convert_goes_to_a_layout_and_back(folder, tmp_path):
    run, back = tmp_path / "run.safetensors", tmp_path / "back"
    result = invoke("convert", folder, run, "--migration", "tunix")
    assert result.exit_code == 0, result.output
    assert "The rows are of the table 'tunix/qwen3', with h = 4" in result.output
    assert not ta.tree_diff(
        ta.load(run), ta.load(folder, migration="tunix"), values=True
    )
    arguments = ("--reverse", "--migration", "tunix", "--like", folder)
    result = invoke("convert", run, back, *arguments, "--max-shard-bytes", "4000")
    assert result.exit_code == 0, result.output
    assert json.loads((back / "config.json").read_text()) == CONFIG
    assert not ta.tree_diff(ta.load(back), ta.load(folder), values=True)


@pytest.mark.slow
def test_lint_explain_and_show_take_names(folder, tmp_path):
    target = tmp_path / "target.schema.toml"
    ta.save(target, ta.load(folder, migration="tunix"))
    for name in ("tunix", "tunix/qwen3"):
        result = invoke("lint", folder, target, "--migration", name)
        assert result.exit_code == 0, result.output
    path = "model.layers.0.self_attn.o_proj.weight"
    result = invoke("explain", folder, path, "--migration", "tunix")
    assert "-> 'layers/0/attn/o_proj/w'" in result.output
    result = invoke("lint", target, folder, "--migration", "tunix", "--reverse")
    assert result.exit_code == 0, result.output
    result = invoke("show", "tunix/qwen3")
    assert result.exit_code == 0
    row = 'from = "{at=model.,}layers.{l}.self_attn.q_proj.weight : (h d) e"'
    assert row in result.output
    wrong = invoke("lint", target, "--migration", "tunix")
    assert wrong.exit_code == 2
    assert "there is no such file" in wrong.output
    wrong = invoke("lint", target, "--migration", "tunix/qwen4")
    assert "Near it: 'qwen2', 'qwen3'" in wrong.output


# --- what is near, and what is not ---


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tunix/llama", "tunix/qwen2", "flax/vit"])
def test_a_table_of_a_near_type_says_what_it_lacks(folder, name):
    with pytest.raises(ta.MigrationError, match="no row takes") as caught:
        ta.load(folder, migration=name)
    assert f"of the table {name!r}" in str(caught.value)


def test_a_chain_of_tables_says_where_its_rows_come_from(folder):
    there = ta.load_migration("tunix", config=folder)
    chain = there.inverse.then(ta.load_migration("maxtext", config=folder))
    moved = chain(ta.load(folder, migration="tunix"))
    again = ta.load(folder, migration="maxtext")
    assert not ta.tree_diff(moved, ta.to_flat_dict(again), values=True)
    assert not ta.tree_diff(
        chain.inverse(moved), ta.load(folder, migration="tunix"), values=True
    )


@pytest.mark.parametrize("migration", [b"tunix", 7, {"tunix": 1}])
def test_what_is_neither_a_table_nor_a_text_is_an_error(folder, migration):
    with pytest.raises(ta.MigrationError, match=r"Expected migration="):
        ta.load(folder, migration=migration)


def test_heads_of_queries_and_of_keys_have_one_size():
    """A table that takes the numbers of both from a configuration takes that, too."""
    for tables in published().values():
        for table in tables.values():
            config = tomllib.loads(table.file.read_text()).get("config", {})
            assert {"h", "k", "d"} & {*config} != {"h", "k"}, table.name


@pytest.mark.parametrize(
    "layout", ["tunix", "maxtext", "maxtext-unscanned", "keras-hub"]
)
def test_a_configuration_with_too_many_heads_of_keys_is_an_error(layout, tmp_path):
    width = {"q": 24, "k": 8, "v": 8}
    of_layer = {f"self_attn.{p}_proj.weight": (n, 24) for p, n in width.items()}
    of_layer |= {f"self_attn.{p}_proj.bias": (n,) for p, n in width.items()}
    of_layer |= {"self_attn.o_proj.weight": (24, 24), "mlp.down_proj.weight": (24, 7)}
    of_layer |= {f"mlp.{p}_proj.weight": (7, 24) for p in ("gate", "up")}
    norms = ("input_layernorm", "post_attention_layernorm")
    of_layer |= {f"{norm}.weight": (24,) for norm in norms}
    weights = {"model.embed_tokens.weight": (19, 24), "model.norm.weight": (24,)}
    weights |= {
        f"model.layers.{n}.{k}": v for n in range(2) for k, v in of_layer.items()
    }
    weights |= {"lm_head.weight": (19, 24)}
    ta.save(
        tmp_path / "model.safetensors",
        {k: np.ones(v, np.float32) for k, v in weights.items()},
    )
    config = {"model_type": "qwen2", "hidden_size": 24, "num_attention_heads": 3}
    for heads in (1, 2):
        stated = {**config, "num_key_value_heads": heads}
        (tmp_path / "config.json").write_text(json.dumps(stated))
        if heads == 1:
            ta.load(tmp_path, migration=layout)
            continue
        with pytest.raises(ta.MigrationError, match="k_proj"):
            ta.load(tmp_path, migration=layout)
