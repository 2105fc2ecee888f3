"""Tables that begin with a published one: rows and sizes of one's own in front."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command import invoke

import treeadapt as ta

REPOSITORY = Path(__file__).parents[1]
sys.path.append(str(REPOSITORY / ".ci" / "oracles"))
from common import FOLDER, weights_of  # noqa: E402

TABLE = REPOSITORY / "treeadapt" / "migrations" / "tables" / "tunix" / "qwen3.toml"
FOLDER_OF = FOLDER / "qwen3" / "1"
OWN = {
    "lm_head.weight": None,
    "model.norm.weight : e": ("last_norm : e", {"scale": 2.0}),
    "adapter.{n}": "adapter/{n}",
}
TEXT = """
version = 1
extends = "tunix/qwen3"

[[rows]]
drop = "lm_head.weight"

[[rows]]
from = "model.norm.weight : e"
to = "last_norm : e"
scale = 2.0

[[rows]]
from = "adapter.{n}"
to = "adapter/{n}"
"""


def written(tmp_path, text=TEXT, name="own.toml"):
    file = tmp_path / name
    file.write_text(text)
    return file


def weights():
    return weights_of(FOLDER_OF) | {"adapter.a": np.ones(2, "f4")}


def test_own_rows_come_first_and_the_rest_is_that_of_the_table(tmp_path):
    m = ta.load_migration(written(tmp_path), config=FOLDER_OF)
    plain = ta.load_migration("tunix/qwen3", config=FOLDER_OF)(weights_of(FOLDER_OF))
    params = m(weights())
    gone, new = {*plain} - {*params}, {*params} - {*plain}
    assert (gone, new) == ({"lm_head/w", "final_norm/w"}, {"last_norm", "adapter/a"})
    np.testing.assert_array_equal(params["last_norm"], 2 * plain["final_norm/w"])
    rest = {path: leaf for path, leaf in plain.items() if path not in gone}
    assert not ta.tree_diff({path: params[path] for path in rest}, rest, values=True)
    assert not ta.tree_diff(m.inverse(params, weights()), weights(), values=True)


def test_a_file_and_a_call_say_the_same_and_go_through_a_file(tmp_path):
    file = written(tmp_path)
    m = ta.load_migration(file, config=FOLDER_OF)
    called = ta.load_migration("tunix", config=FOLDER_OF, rows=OWN)
    assert m == called
    assert hash(m) == hash(called)
    whole = written(tmp_path, m.to_toml(), "whole.toml")  # written out, without a base
    assert "extends" not in whole.read_text()
    assert ta.load_migration(whole) == m
    assert not ta.load_migration(whole).plan(weights()).bases
    as_json = {
        "version": 1,
        "extends": "tunix/qwen3",
        "rows": [
            {"drop": "lm_head.weight"},
            {"from": "model.norm.weight : e", "to": "last_norm : e", "scale": 2.0},
            {"from": "adapter.{n}", "to": "adapter/{n}"},
        ],
    }
    file = written(tmp_path, json.dumps(as_json), "own.json")
    assert ta.load_migration(file, config=FOLDER_OF) == m


def test_only_rows_that_own_ones_leave_nothing_may_match_nothing(tmp_path):
    m = ta.load_migration("tunix", config=FOLDER_OF, rows=OWN)
    lacking = weights()
    del lacking["model.embed_tokens.weight"]
    with pytest.raises(ta.MigrationError, match=r"no leaf is taken by\n.*embed_tokens"):
        m(lacking)
    lacking = weights()
    del lacking["model.norm.weight"]
    with pytest.raises(ta.MigrationError, match="no leaf is taken by"):
        m(lacking)


def test_own_sizes_and_keys_win(tmp_path):
    text = 'version = 1\nextends = "tunix/qwen3"\n'
    config = json.loads((FOLDER_OF / "config.json").read_text())
    heads = config["num_attention_heads"]
    q = "model.layers.0.self_attn.q_proj.weight"
    d = weights_of(FOLDER_OF)[q].shape[0] // heads
    own = {"h": 1, "k": 1, "d": d}
    for m in (
        ta.load_migration("tunix/qwen3", sizes=own, config=FOLDER_OF),
        ta.load_migration(
            written(tmp_path, text + f"[sizes]\nh = 1\nk = 1\nd = {d}\n"),
            config=FOLDER_OF,
        ),
    ):
        assert m.sizes == own
    keyed = written(tmp_path, text + '[config]\nh = "heads"\n')
    m = ta.load_migration(keyed, config=config | {"heads": 3})
    assert m.sizes["h"] == 3
    assert m.sizes["d"] == d


def test_an_entry_of_a_chain_begins_with_a_table_too(tmp_path):
    text = """
version = 1
[[tables]]
extends = "tunix/qwen3"
[[tables.rows]]
from = "adapter.{n}"
to = "adapter/{n}"
[[tables]]
[[tables.rows]]
from = "{rest:**}"
to = "model/{rest}"
"""
    m = ta.load_migration(written(tmp_path, text), config=FOLDER_OF)
    assert len(m.tables) == 2
    assert "model/adapter/a" in m(weights())
    own = {"sizes": {"h": 1}, "rows": {"adapter.a": None}}
    first, second = ta.load_migration(written(tmp_path, text), **own).tables
    assert (first.sizes["h"], second.sizes) == (1, {})
    assert first.rows[0].drops


@pytest.mark.slow
def test_load_and_the_command_take_it(tmp_path):
    source = tmp_path / "model.safetensors"
    ta.save(source, weights())
    (tmp_path / "config.json").write_text((FOLDER_OF / "config.json").read_text())
    file = written(tmp_path)
    assert "last_norm" in ta.load(source, migration=str(file))
    target = tmp_path / "new.safetensors"
    result = invoke("convert", source, target, "--migration", file)
    assert result.exit_code == 0, result.output
    result = invoke("show", file)
    assert result.exit_code == 0, result.output
    result = invoke("lint", source, target, "--migration", file)
    fixed = hashlib.sha256(TABLE.read_bytes()).hexdigest()
    assert f"begins with 'tunix/qwen3', whose sha256 is '{fixed}'" in result.output
    assert result.exit_code == 0
    for stated, code in ((fixed, 0), ("0" * 64, 1)):
        text = TEXT.replace("[[rows]]", f'sha256 = "{stated}"\n[[rows]]', 1)
        file = written(tmp_path, text)
        result = invoke("lint", source, target, "--migration", file)
        assert result.exit_code == code, result.output
    assert f"write sha256 = '{fixed}'" in result.output
    result = invoke("lint", source, target, "--migration", file, "--format", "github")
    assert result.exit_code == 1
    assert ta.load(source, migration=str(file))  # a hash is for who reviews a change


@pytest.mark.parametrize(
    ("base", "told"),
    [
        ("tunix", "Name a published table"),
        ("other.toml", "Name a published table"),
        ("../other", "Name a published table"),
        ("/etc/table", "Name a published table"),
        ("tunix/qwen4", "no table of the model type 'qwen4'"),
        ("tunx/qwen3", "Did you mean 'tunix'?"),
        ("maxtext/qwen3_next", "a chain, which nothing extends. Load that"),
    ],
)
def test_a_table_begins_with_a_published_one_only(tmp_path, base, told):
    (tmp_path / "other.toml").write_text(TEXT)
    file = written(tmp_path, f'version = 1\nextends = "{base}"\n')
    with pytest.raises(ta.MigrationError) as caught:
        ta.load_migration(file)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("extends = 3", "'extends' is not a string"),
        ('extends = "tunix/qwen3"\nsha256 = 3', "'sha256' is not a string"),
        ("", "has no rows"),
    ],
)
def test_what_is_no_base_is_an_error(tmp_path, text, told):
    with pytest.raises(ta.MigrationError, match=told):
        ta.load_migration(written(tmp_path, f"version = 1\n{text}\n"))


def test_rows_of_a_call_are_checked_as_a_table_is():
    with pytest.raises(ta.MigrationError, match="A table is a mapping"):
        ta.load_migration("tunix/qwen3", rows="model.norm.weight")
    with pytest.raises(ta.MigrationError, match="optional is not True"):
        ta.load_migration("tunix/qwen3", rows={"a": ("b", {"optional": 1})})


def test_a_layer_more_is_dropped_by_name():
    folder = FOLDER / "deepseek_v3" / "1"
    whole = weights_of(folder)
    layers = {int(name.split(".")[2]) for name in whole if ".layers." in name}
    last, more = f".{max(layers)}.", f".{max(layers) + 1}."
    extra = {name.replace(last, more): leaf for name, leaf in whole.items()}
    m = ta.load_migration("maxtext", config=folder, rows={f"model.layers{more}*": None})
    plain = ta.load_migration("maxtext", config=folder)(whole)
    assert not ta.tree_diff(m(extra | whole), plain, values=True)
    back = m.inverse(plain, extra | whole)
    assert not ta.tree_diff(back, extra | whole, values=True)


def test_own_rows_come_before_those_of_a_published_chain():
    folder = FOLDER / "qwen3_next" / "1"
    own = {"lm_head.weight": None, "value_head.weight : v e": "params/value : e v"}
    m = ta.load_migration("maxtext", config=folder, rows=own)
    more = {"value_head.weight": np.ones((1, 3), "f4")}
    params = m(weights_of(folder) | more)
    assert params["params/value"].shape == (3, 1)
    assert "params/decoder/logits_dense/kernel" not in params
    assert m.published == "maxtext/qwen3_next"
    assert m.origin.count("maxtext/qwen3_next") == 1
