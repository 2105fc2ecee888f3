"""Freeze specs: frozen leaves as data, and leaves that thawed since."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import treeadapt as ta
from benchmarks.published_names import names_of, tree_of


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def model(*layers: str, **more: Any) -> dict[str, Any]:
    return {name: {"kernel": array(2, 2), "bias": array(2)} for name in layers} | more


def chosen(tree: Any, where: Any) -> list[str]:
    mask = ta.to_flat_dict(ta.param_mask(tree, where))
    return [path for path, selected in mask.items() if selected]


def test_a_spec_is_a_selector():
    spec = ta.FreezeSpec(["trunk", "!**/bias"])
    tree = model("trunk", "head")
    assert chosen(tree, spec) == ["trunk/kernel"]
    assert chosen(tree, ~spec & "trunk") == ["trunk/bias"]
    assert spec.matches("trunk/kernel")
    assert not spec.matches("trunk/bias")
    assert ta.param_labels(tree, {spec: "f", "**": "t"})["trunk"]["kernel"] == "f"
    assert ta.param_mask(tree, spec) == spec(tree)
    tx = optax.masked(optax.set_to_zero(), spec)
    tx.init(jax.tree.map(lambda s: jnp.ones(s.shape), tree))


def test_a_spec_reports_patterns_that_match_nothing():
    with pytest.raises(ta.UnusedRuleError, match="'trunk'"):
        ta.param_mask(model("trunk"), ta.FreezeSpec("trunc"))
    with pytest.raises(ta.UnusedRuleError, match="'trunk'"):
        ta.FreezeSpec(["trunk", "trunc"]).bind(model("trunk"))


def test_a_spec_may_freeze_nothing():
    spec = ta.FreezeSpec([]).bind(model("trunk"))
    assert spec == ta.FreezeSpec((), (), ("trunk/bias", "trunk/kernel"))
    assert chosen(model("trunk"), spec) == []
    spec.check(model("head"))


def test_a_bound_spec_holds_the_paths_of_frozen_arrays():
    spec = ta.FreezeSpec("trunk").bind(model("trunk", "head", trunk2=array(1)))
    assert spec.paths == ("trunk/bias", "trunk/kernel")
    assert ta.FreezeSpec("**").bind({"w": array(1), "f": len, "n": None}).paths == (
        "w",
    )


def test_a_spec_binds_to_the_tree_that_it_gets():
    spec = ta.FreezeSpec("layers/{-2..}").bind({"layers": [array(1)] * 3})
    assert spec.paths == ("layers/1", "layers/2")
    assert spec.bind({"layers": [array(1)] * 4}).paths == ("layers/2", "layers/3")


def test_a_bound_spec_answers_on_a_flat_dict_by_its_paths():
    spec = ta.FreezeSpec("layers/{-1}")
    flat = {"layers/0": array(1), "layers/1": array(1)}
    with pytest.raises(ta.SelectorError, match="bind"):
        spec(flat)
    bound = spec.bind({"layers": [array(1), array(1)]})
    assert bound(flat) == {"layers/0": False, "layers/1": True}
    assert bound({"layers/1": array(1), "layers/0": None})["layers/1"] is True
    assert bound.matches("layers/1")
    assert not bound(("layers", 0), array(1))  # as an nnx filter
    with pytest.raises(ta.SelectorError, match="bind"):
        spec.matches("layers/1")


def test_a_bound_spec_refuses_a_leaf_that_it_never_saw():
    tree = {"layers": [array(1), array(1)]}
    spec = ta.FreezeSpec("layers/{-1}").bind(tree)
    grown = {"layers/0": array(1), "layers/1": array(1), "layers/2": array(1)}
    for asked in (spec, ta.FreezeSpec("layers/{-1}", ["layers/1"])):
        with pytest.raises(ta.SelectorError, match=r"no leaf at .*'layers/2'"):
            asked(grown)
        with pytest.raises(ta.SelectorError, match="'layers/2'"):
            asked.matches("layers/2")
        with pytest.raises(ta.SelectorError, match="'layers/2'"):
            asked(("layers", 2), array(1))
        assert not asked(("layers", 2), len)
    assert spec(grown | {"layers/2": None})["layers/1"] is True
    assert spec(tree) == {"layers": [False, True]}


def test_only_new_names_are_suggested_for_a_missing_leaf():
    spec = ta.FreezeSpec("encoder").bind(model("encoder", "head"))
    with pytest.raises(ta.FreezeError) as caught:
        spec.check(model("backbone", "head"))
    assert "'encoder/kernel' is gone; the nearest name is 'backbone/kernel'" in str(
        caught.value
    )
    assert "head" not in str(caught.value)


def test_leaves_thawed_in_every_layer_are_one_line():
    layers = [f"trunk_{i}" for i in range(40)]
    spec = ta.FreezeSpec("trunk_*").bind(model(*layers, "head"))
    with pytest.raises(ta.FreezeError) as caught:
        spec.check(model("head"))
    assert str(caught.value).splitlines()[:3] == [
        "80 leaves that were frozen are not frozen any more:",
        "  'trunk_{0..39}/bias' is gone",
        "  'trunk_{0..39}/kernel' is gone",
    ]


def test_an_unchanged_model_passes():
    spec = ta.FreezeSpec("trunk").bind(model("trunk", "head"))
    spec.check(model("trunk", "head"))
    spec.check(model("trunk", "head", "more"))


def test_a_renamed_layer_is_named_with_its_new_name():
    spec = ta.FreezeSpec(["trunk*", "!**/bias"]).bind(
        model("trunk_0", "trunk_1", "head")
    )
    with pytest.raises(ta.FreezeError) as caught:
        spec.check(model("trunk_0", "truck_1", "head"))
    assert "1 leaf that was frozen is not frozen any more" in str(caught.value)
    assert "'trunk_1/kernel' is gone; the nearest name is 'truck_1/kernel'" in str(
        caught.value
    )
    assert "which trains" in str(caught.value)


def test_a_leaf_that_the_patterns_no_longer_match_is_named():
    spec = ta.FreezeSpec("layers/{-2..}").bind({"layers": [array(1)] * 3})
    with pytest.raises(
        ta.FreezeError, match="'layers/1' is still there, but no pattern"
    ):
        spec.check({"layers": [array(1)] * 4})


def test_an_unbound_spec_has_nothing_to_check():
    with pytest.raises(ta.SelectorError, match="never bound"):
        ta.FreezeSpec("trunk").check(model("trunk"))


@pytest.mark.slow
def test_a_message_about_thousands_of_leaves_is_small():
    spec = ta.FreezeSpec("**/experts").bind(tree_of("qwen3_moe"))
    assert len(spec.paths) == 21_600
    with pytest.raises(ta.FreezeError) as caught:
        spec.check({"model": tree_of("qwen3_moe")["lm_head"]})
    assert "21,600 leaves" in str(caught.value)
    assert len(str(caught.value).encode()) <= 4_000


@pytest.mark.parametrize(
    "spec",
    [
        ta.FreezeSpec("trunk"),
        ta.FreezeSpec(["trunk", '!"quoted"\n'], []),
        ta.FreezeSpec(["a"], ["a/b", "a/c" * 40]),
        ta.FreezeSpec(["a"], ["a/b"], ["x", "y/z"]),
    ],
    ids=repr,
)
def test_specs_are_values_and_files(tmp_path, spec):
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec)
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
    file = tmp_path / "freeze.toml"
    file.write_text(spec.to_toml())
    assert ta.FreezeSpec.load(file) == spec
    fields = {"version": 1, "freeze": list(spec.freeze)}
    if spec.paths is not None:
        fields["paths"] = list(spec.paths)
    if spec.others is not None:
        fields["others"] = list(spec.others)
    file = tmp_path / "freeze.json"
    file.write_text(json.dumps(fields))
    assert ta.FreezeSpec.load(file) == spec


@pytest.mark.slow
def test_a_large_spec_is_saved_and_loaded(tmp_path):
    spec = ta.FreezeSpec("**/experts").bind(tree_of("qwen3_moe"))
    file = tmp_path / "freeze.toml"
    file.write_text(spec.to_toml())
    again = ta.FreezeSpec.load(file)
    assert again == spec
    assert again.paths == tuple(n for n in names_of("qwen3_moe") if "/experts/" in n)
    again.check(tree_of("qwen3_moe"))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ta.FreezeSpec(ta.glob("a")), ta.SelectorError),
        (lambda: ta.FreezeSpec([dict]), ta.SelectorError),
        (lambda: ta.FreezeSpec(None), ta.SelectorError),
        (lambda: ta.FreezeSpec("a", [3]), ta.SelectorError),
        (lambda: ta.FreezeSpec("a["), ta.PatternError),
    ],
)
def test_a_spec_holds_only_text(make, error):
    with pytest.raises(error):
        make()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('freeze = ["a"]', "no version"),
        ("version = 1", "it has no freeze"),
        ("version = 1\nfreeze = [1]", "not a list of strings"),
        ('version = 1\nfreeze = "a"\npaths = "b"', "not a list of strings"),
        ('version = 1\nfreeze = "a"\nrules = 1', "unknown field 'rules'"),
        ('version = 1\nfreeze = "re:.*"', "allow_regex=True"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, text, match):
    file = tmp_path / "freeze.toml"
    file.write_text(text)
    with pytest.raises(ta.RulesFileError, match=match):
        ta.FreezeSpec.load(file)
    if "re:" in text:
        assert ta.FreezeSpec.load(file, allow_regex=True) == ta.FreezeSpec("re:.*")
