"""The first load of a published folder: what does not fit names the next call.

The call is in the first two lines, and it works.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import command
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_qwen3 import CONFIG, SHAPES

import treeadapt as ta

OWN = {"blocks": [{"up": {"kernel": jax.ShapeDtypeStruct((22, 17), "float32")}}] * 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weights = {
        f"model.layers.{layer}.{name}.weight": np.ones(shape, "float32")
        for layer in range(3)
        for name, shape in SHAPES.items()
    }
    weights["model.embed_tokens.weight"] = np.ones((37, 22), "float32")
    weights["model.norm.weight"] = np.ones(22, "float32")
    ta.save(tmp_path / "published", weights, max_shard_bytes=8_000)
    (tmp_path / "published" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "published"


@pytest.fixture
def target(folder: Path) -> Any:
    return ta.load(folder, migration="tunix")


def call_in(load: Any, *arguments: Any, **more: Any) -> str:
    """Return the call that an error names in its first two lines."""
    with pytest.raises(ta.TreeAdaptError) as caught:
        load(*arguments, **more)
    found = re.search(r"ta\.\w+\(.*\)[^ ]*(?=[.,]$| writes)", first_two(caught.value))
    assert found, str(caught.value)
    return found[0].rstrip(".")


def first_two(message: Any) -> str:
    return "\n".join(str(message).splitlines()[:2])


def run(call: str, target: Any) -> Any:
    return eval(call, {"ta": ta, "target": target})


def assert_loads(call: str, target: Any) -> None:
    loaded = run(call, target)
    assert jax.tree.structure(loaded) == jax.tree.structure(target)


@pytest.mark.slow
@pytest.mark.parametrize(
    "migration", [None, "hf", "Qwen/Qwen3-0.6B", Path("absent.toml"), [None, "hf"]]
)
@pytest.mark.parametrize("load", [ta.load, ta.compare_checkpoint])
def test_a_table_that_ships_and_fits_is_named(load, folder, target, migration):
    if load is ta.compare_checkpoint and migration is None:
        return  # it reports and raises nothing
    call = call_in(load, folder, target, migration=migration)
    assert call == f"ta.load({str(folder)!r}, target, migration='tunix/qwen3')"
    assert_loads(call, target)


@pytest.mark.slow
def test_a_target_of_another_dtype_is_cast(folder, target):
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), target)
    assert_loads(call_in(ta.load, folder, half), half)


@pytest.mark.slow
@pytest.mark.parametrize("migration", [None, "hf", "tunix", Path("absent.toml")])
def test_without_a_table_that_fits_a_draft_is_named(folder, migration):
    call = call_in(ta.load, folder, OWN, migration=migration)
    assert call == f"ta.draft_migration({str(folder)!r}, target)"
    assert isinstance(run(call, OWN), ta.MigrationDraft)


@pytest.mark.slow
def test_a_configuration_in_the_place_of_a_table_names_tables_for_it(folder, target):
    file = str(folder / "config.json")
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(folder, target, migration=file)
    call = f"ta.load({str(folder)!r}, target, migration='tunix/qwen3')"
    assert call in first_two(caught.value)
    assert_loads(call, target)
    with pytest.raises(ta.MigrationError, match="Tables for it are ") as caught:
        ta.load_migration(file)
    call = re.search(r"ta\.load_migration\(.*\)", str(caught.value))[0]
    assert isinstance(run(call, target), ta.Migration)
    with pytest.raises(ta.MigrationError, match="Tables for its config") as told:
        ta.load_migration(str(folder))
    assert "'tunix/qwen3'" in str(told.value)
    text = command.run("convert", folder, "x", "--migration", file, code=2)
    assert "'tunix/qwen3'" in text
    assert "Name one, as --migration " in text


@pytest.mark.slow
def test_a_path_with_the_name_of_a_layout_is_told_from_a_text(folder, target):
    with pytest.raises(ta.MigrationError, match="is a text, migration='tunix'"):
        ta.load(folder, target, migration=Path("tunix"))


@pytest.mark.slow
@pytest.mark.parametrize("migration", [None, "tunix"])
def test_of_one_shard_the_folder_is_named(folder, target, migration):
    shard = min(folder.glob("*.safetensors"))
    with pytest.raises(ta.TreeAdaptError) as caught:
        ta.load(shard, target, migration=migration)
    assert "one of 5 shards" in first_two(caught.value)
    assert f"ta.load({str(folder)!r}, ...)" in first_two(caught.value)


@pytest.mark.slow
def test_a_part_of_a_run_is_loaded_by_the_call(folder, target, tmp_path):
    zeros = jax.tree.map(np.zeros_like, target)
    ta.save(tmp_path / "run", {"opt": {"mu": zeros}, "params": target})
    assert_loads(call_in(ta.load, tmp_path / "run", target), target)
    deep = {"trained": {"model": {"w": np.ones(2)}}, "step": 3}
    ta.save(tmp_path / "deep", deep)
    blank = {"w": np.zeros(2)}
    loaded = run(call_in(ta.load, tmp_path / "deep", blank), blank)
    assert loaded["w"].tolist() == [1, 1]


@pytest.mark.slow
def test_a_target_that_holds_more_is_told_its_part(target, tmp_path):
    ta.save(tmp_path / "params", target)
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(tmp_path / "params", {"params": target, "step": 0})
    assert "one part of the target, 'params'" in first_two(caught.value)


@pytest.mark.slow
def test_a_lenient_load_that_loads_nothing_warns_of_the_same(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ta.load(folder, OWN, strict=False)
    assert "ta.draft_migration(" in first_two(caught[0].message)


def test_what_is_wrong_in_a_table_of_ones_own_is_corrected_there(folder, tmp_path):
    (tmp_path / "own.toml").write_text("version = 1\n[[rows]]\nfrom = 3\n")
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(folder, OWN, migration=tmp_path / "own.toml")
    assert "ta.draft_migration" not in str(caught.value)


@pytest.mark.slow
def test_a_broken_config_hides_no_error(folder, target):
    (folder / "config.json").write_text("{")
    with pytest.raises(ta.CheckpointError, match="does not fit the target") as caught:
        ta.load(folder, target)
    assert "ta.draft_migration(" in first_two(caught.value)


@pytest.mark.slow
def test_without_a_config_the_table_is_named_that_takes_the_names(folder, target):
    (folder / "config.json").unlink()
    for arguments in ([folder], [folder, target]):
        with pytest.raises(ta.MigrationError, match="there is no such file") as caught:
            ta.load(*arguments, migration="tunix")
        text = str(caught.value)
        assert "'tunix/deepseek" not in text
        assert "migration='tunix/qwen3' fits" in text.splitlines()[1]
        assert "ta.load_migration('tunix/qwen3', config=..., sizes=...)" in text
    named = ta.load_migration("tunix/qwen3", config=CONFIG)
    assert jax.tree.structure(ta.load(folder, migration=named)) == (
        jax.tree.structure(target)
    )


def test_without_a_config_nothing_is_named_that_does_not_fit(tmp_path):
    ta.save(tmp_path / "x.safetensors", {"own.weight": np.ones(2)})
    with pytest.raises(ta.MigrationError, match="there is no such file") as caught:
        ta.load(tmp_path / "x.safetensors", migration="tunix")
    assert "fits" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("has_target", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_of_a_config_of_another_model_the_table_that_fits_is_named(
    folder, target, by_name, has_target
):
    fields = CONFIG if by_name else {**CONFIG, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(fields))
    name = "tunix/llama" if by_name else "tunix"
    with pytest.raises(ta.MigrationError, match="no row takes") as caught:
        ta.load(folder, *[target] * has_target, migration=name)
    assert "migration='tunix/qwen3' fits" in str(caught.value)


def test_a_table_of_ones_own_is_not_compared_with_those_that_ship(folder):
    table = ta.Migration({"own": "own"})
    with pytest.raises(ta.MigrationError, match="no row takes") as caught:
        ta.load(folder, migration=table)
    assert "'tunix" not in str(caught.value)


def error_of(*arguments, **options) -> str:
    with pytest.raises(ta.TreeAdaptError) as caught:
        ta.load(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("migration", [None, ta.Migration({"a": "a", "b": "b"})])
def test_cast_is_offered_only_where_it_helps(tmp_path, migration):
    file = tmp_path / "model.safetensors"
    ta.save(file, {"a": np.ones(2, "f4"), "b": np.ones(3, "f4")})

    def text(dtype):
        target = {"a": np.ones(2, dtype), "b": np.ones(4, "f4")}
        return error_of(file, target, migration=migration)

    assert "pass cast=true" not in text("i4").lower()
    assert "cast=True would not help 'a': change the target." in text("i4")
    assert "pass cast=true" in text("f2").lower()


LAYERS = [f"layer_{n}" for n in range(93)]


def test_a_part_is_named_only_if_it_fits_or_there_is_one(tmp_path):
    file = tmp_path / "model.safetensors"
    ta.save(file, {"w": np.ones(2, "f4"), "b": np.ones(3, "f4")})
    alike = {"w": np.ones(2, "f4"), "b": np.ones(3, "f4")}
    other = {"w": np.ones(4, "f4"), "b": np.ones(3, "f4")}
    assert "draft_migration" in error_of(file, dict.fromkeys(LAYERS, other))
    one = error_of(file, {**dict.fromkeys(LAYERS, other), "head": alike})
    assert "one part of the target, 'head': ta.load(" in one
    assert "one part of the target, 'head'" in error_of(file, {"head": other})
    every = error_of(file, dict.fromkeys(LAYERS, alike))
    assert "the names of 93 parts of the target, 'layer_0'" in every
    whole = tmp_path / "whole.safetensors"
    ta.save(whole, {"x": other, "y": alike})
    assert "are below 'y' in it" in error_of(whole, alike)


@pytest.mark.slow
def test_every_way_to_a_table_that_does_not_fit_names_the_one_that_does(folder):
    hint = "By the names in it, migration='tunix/qwen3' fits."
    wrong = ta.load_migration("tunix/gemma2", config={**CONFIG, "model_type": "gemma2"})
    for table in ("tunix/gemma2", wrong):
        assert hint in error_of(folder, migration=table)
    for name in ("convert", "lint"):
        result = command.invoke(
            *(name, folder, *["new.safetensors"] * (name == "convert")),
            *("--migration", "tunix/gemma2"),
        )
        assert result.exit_code in (1, 2)
        assert "By the names in it, --migration tunix/qwen3 fits." in result.output
        assert "ta." not in result.output


@pytest.mark.slow
def test_of_one_shard_the_folder_is_named_without_a_target_too(folder, tmp_path):
    shard = str(min(folder.glob("*.safetensors")))
    said = f"It is one of 5 shards. To load all of them: ta.load({str(folder)!r}, ...)."
    for migration in ("tunix", ["tunix", "maxtext"]):
        with pytest.raises(ta.MigrationError) as caught:
            ta.load(shard, migration=migration)
        assert said in first_two(caught.value)
    with pytest.raises(ta.MigrationError) as caught:
        ta.compare_checkpoint(shard, OWN, migration="tunix")
    assert said in first_two(caught.value)
    said = f"It is one of 5 shards. Name {str(folder)!r} instead."
    for name, more in (("convert", [tmp_path / "x"]), ("lint", [])):
        result = command.invoke(name, shard, *more, "--migration", "tunix/qwen3")
        assert result.exit_code in (1, 2)
        assert said in result.output


@pytest.mark.slow
def test_a_table_that_fits_the_file_alone_is_not_said_to_fit(folder, target):
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(folder, OWN, migration="tunix/qwen2")
    text = str(caught.value)
    assert "'tunix/qwen3' fits this checkpoint, but not this target" in text
    assert text.count("The rows are of the table") == 1
    ta.save(folder.parent / "own.safetensors", {"up": np.ones((3, 22, 17), "float32")})
    result = command.invoke(
        *("convert", folder, folder.parent / "new", "--migration", "tunix/qwen2"),
        *("--target", folder.parent / "own.safetensors"),
    )
    assert result.exit_code in (1, 2)
    assert "qwen3 fits this checkpoint, but not this target" in result.output
    with pytest.raises(ta.MigrationError, match="'tunix/qwen3' fits\\. Sizes"):
        ta.load(folder, target, migration="tunix/qwen2")


def test_only_a_load_that_succeeds_warns_of_marks(folder):
    weights = {"a.w": np.ones((2, 3), "float32")}
    ta.save(folder / "own.safetensors", weights)
    marked = ta.Migration({"a.w": ("a", {"check": "names"})})
    for target in ({"a": np.ones(5, "float32")}, {"b": np.ones(5, "float32")}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ta.MigrationError, match="does not fit the target"):
                ta.load(folder / "own.safetensors", target, migration=marked)
    with pytest.warns(ta.TreeAdaptWarning, match="marked to check") as caught:
        ta.load(folder / "own.safetensors", migration=marked)
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_of_tables_that_take_the_same_names_the_one_for_the_model_type_is_named(
    tmp_path,
):
    weights = {
        f"model.layers.0.{name}.weight": np.ones((4,) * (1 if "norm" in name else 2))
        for name in SHAPES
        if name.split(".")[-1] not in ("q_norm", "k_norm")
    }
    weights["model.embed_tokens.weight"] = np.ones((37, 4))
    weights |= {"model.norm.weight": np.ones(4), "lm_head.weight": np.ones((37, 4))}
    ta.save(tmp_path / "model.safetensors", weights)
    for model_type, named in (
        ("llama", "By the names in it, migration='flax/llama' fits."),
        ("other", "migration='flax/gemma' or migration='flax/llama' fits."),
    ):
        config = {"model_type": model_type, "num_attention_heads": 2}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ta.MigrationError, match=re.escape(named)):
            ta.load(tmp_path, migration="flax/t5")
