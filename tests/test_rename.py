"""Renaming leaves between libraries: templates, joins, splits, and what is refused."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from work import calls_in

import treeadapt as ta
from benchmarks.published_names import gemma3

LINEN = {
    "params/linear_{n}/kernel": ("layers/{n}/weight", jnp.transpose),
    "params/linear_{n}/bias": "layers/{n}/bias",
}


def linen():
    return {
        "params": {
            f"linear_{n}": {
                "kernel": jnp.arange(6.0).reshape(2, 3) + n,
                "bias": jnp.zeros(3),
            }
            for n in range(11)
        }
    }


def renamed_paths(names, table):
    return list(ta.Migration(table)({name: np.zeros(1) for name in names}))


def test_captured_names_and_functions_carry_over():
    flat = ta.to_flat_dict(linen())
    renamed = ta.Migration(LINEN)(flat)
    assert renamed["layers/10/bias"] is flat["params/linear_10/bias"]
    np.testing.assert_array_equal(
        renamed["layers/10/weight"], flat["params/linear_10/kernel"].T
    )
    assert len(renamed) == len(flat)


def test_a_tree_does_as_well_as_a_flat_dict():
    tree = linen()
    assert list(ta.Migration(LINEN)(tree)) == list(
        ta.Migration(LINEN)(ta.to_flat_dict(tree))
    )


def test_abstract_leaves_stay_abstract():
    renamed = ta.Migration(LINEN)(jax.eval_shape(linen))
    assert renamed["layers/0/weight"] == jax.ShapeDtypeStruct((3, 2), jnp.float32)


@pytest.mark.slow
def test_a_linen_model_becomes_an_equinox_one():
    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(3)(x))
            return nn.Dense(2)(x)

    x = jnp.ones(4)
    variables = Mlp().init(jax.random.key(0), x)
    target = eqx.nn.MLP(4, 2, 3, 1, key=jax.random.key(1))
    table = {
        "params/Dense_{n}/kernel": ("layers/{n}/weight", jnp.transpose),
        "params/Dense_{n}/bias": "layers/{n}/bias",
    }
    model = ta.from_flat_dict(target, ta.Migration(table)(variables))
    np.testing.assert_allclose(model(x), Mlp().apply(variables, x), rtol=1e-6)


def test_whole_segments_are_captured():
    table = {"{at:**}/kernel": "{at}/weight", "{rest:**}": "{rest}"}
    names = ["kernel", "a/kernel", "a/b/kernel", "a/b/bias"]
    assert sorted(renamed_paths(names, table)) == sorted(
        ["weight", "a/weight", "a/b/weight", "a/b/bias"]
    )


def test_captures_are_as_short_as_the_text_around_them_allows():
    assert renamed_paths(["a_b_c"], {"{x}_{y}": "{y}/{x}"}) == ["b_c/a"]
    assert renamed_paths(["l_1/x_1"], {"l_{n}/x_{n}": "{n}"}) == ["1"]
    with pytest.raises(ta.MigrationError, match="no row takes"):
        renamed_paths(["l_1/x_2"], {"l_{n}/x_{n}": "{n}"})


def test_a_backslash_makes_a_literal():
    assert renamed_paths(["a{n}*"], {r"a\{n\}\*": "b"}) == ["b"]
    assert renamed_paths(["mlp/~/linear_0"], {"mlp/~/linear_{n}": "l/{n}"}) == ["l/0"]


def test_leaves_join_and_split():
    flat = {
        f"{n}/{k}": np.full((2, 3), i) for n in range(2) for i, k in enumerate("qkv")
    }
    joined = ta.Migration(
        {("{n}/q", "{n}/k", "{n}/v"): ("{n}/qkv", lambda *x: np.concatenate(x))}
    )(flat)
    assert joined["1/qkv"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    again = ta.Migration(
        {"{n}/qkv": (("{n}/q", "{n}/k", "{n}/v"), lambda x: np.split(x, 3))}
    )(joined)
    assert not ta.tree_diff(again, flat, values=True)


def test_layers_stack():
    flat = {f"layers/{n}/w": np.full(2, n) for n in range(3)}
    sources = tuple(f"layers/{n}/w" for n in range(3))
    stacked = ta.Migration({sources: ("layers/w", lambda *x: np.stack(x))})(flat)
    assert stacked["layers/w"].shape == (3, 2)


def test_none_leaves_out():
    assert renamed_paths(["a", "b/c"], {"b/{x:**}": None, "a": "z"}) == ["z"]


def test_a_published_list_of_names_moves_to_a_flax_layout_and_back():
    names = list(gemma3())
    modules = {
        r"language_model/model/{rest:**}/weight": "llm/{rest:**}/kernel",
        r"vision_tower/vision_model/{rest:**}/weight": "img/{rest:**}/kernel",
        r"vision_tower/vision_model/{rest:**}/bias": "img/{rest:**}/bias",
        r"multi_modal_projector/{rest:**}": "projector/{rest:**}",
    }
    there = renamed_paths(names, modules)
    assert len(set(there)) == len(names)
    back = {target: source for source, target in modules.items()}
    assert sorted(renamed_paths(there, back)) == sorted(names)


def test_all_that_is_wrong_is_told_at_once():
    names = ["a/w", "b/w", "c/q", "odd"]
    table = {
        "{x}/w": "same",
        ("{x}/q", "{x}/k"): ("{x}/qk", np.add),
        "a/v": "gone",
        "a/{w}": "late",
    }
    with pytest.raises(ta.MigrationError) as caught:
        renamed_paths(names, table)
    text = str(caught.value)
    assert "no row takes\n  'odd'" in text
    assert "'a/v' (the nearest leaf is 'a/w')" in text
    assert "'a/{w}' (earlier rows take 'a/w'; move it up)" in text
    assert "'c/q' without 'c/k'" in text
    assert "'same': 'a/w', 'b/w'" in text


@pytest.mark.slow
def test_a_large_mismatch_is_a_small_error():
    names = [f"layers/{2 * n}/{'x' * 100}" for n in range(5_000)]
    with pytest.raises(ta.MigrationError) as caught:
        renamed_paths(names, {"other/{n}": "b"})
    assert len(str(caught.value).encode()) <= 4_000
    assert "and 4,992 more" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"a/*": "b"}, "bare '\\*'"),
        ({"a/{": "b"}, "bare '{'"),
        ({"{p=a/b,c}": "{p=x,y}"}, "bare '{'.*without a /"),
        ({"a/{n}{m}": "b"}, "two captures touch"),
        ({"x{a:**}": "b"}, "whole segments"),
        ({"{a}": "{b}"}, "does not capture"),
        ({"a": 3}, "not a name"),
        ({3: "a"}, "not a name"),
        ({(): "a"}, "not a name"),
        ({("{a}", "{b}"): ("c", np.add)}, "different names"),
    ],
)
def test_malformed_rows_are_refused(row, reason):
    with pytest.raises(ta.MigrationError, match=reason):
        renamed_paths(["a"], row)


def test_a_table_is_a_mapping():
    with pytest.raises(ta.MigrationError, match="mapping"):
        ta.Migration(["a"])({"a": 1.0})


def test_a_failing_function_names_row_and_leaf():
    with pytest.raises(ValueError) as caught:
        ta.Migration({"a": ("b", lambda x: x.reshape(2))})({"a": np.zeros(3)})
    assert "migration row 'a', given 'a', float64[3]" in caught.value.__notes__[0]


def test_a_split_gives_one_leaf_a_target():
    with pytest.raises(ta.MigrationError, match=r"gives 1 .* has 2"):
        ta.Migration({"a": (("b", "c"), lambda x: [x])})({"a": np.zeros(3)})


def test_functions_run_only_when_the_table_fits():
    ran = []
    with pytest.raises(ta.MigrationError):
        ta.Migration({"a": ("c", ran.append)})({"a": 1.0, "b": 2.0})
    assert not ran


def test_long_hostile_names_take_no_time():
    names = ["a_" * 5_000 + "!", "b"]
    table = {"{a}_{b}_{c}_{d}_{e}?".replace("?", "x"): "y", "{rest:**}": "{rest}"}
    with pytest.raises(ta.MigrationError, match="no leaf is taken by"):
        renamed_paths(names, table)


def test_an_empty_segment_is_kept():
    assert list(ta.Migration({"a/{x:**}/b": "c/{x}/d"})({"a//b": 1})) == ["c//d"]
    assert list(ta.Migration({"a/{x:**}/b": "c/{x}/d"})({"a/b": 1})) == ["c/d"]
    assert list(ta.Migration({"a/{x:**}": "{x}"})({"a//b/": 1})) == ["/b/"]


@pytest.mark.slow
def test_the_work_of_renaming_grows_with_rows_and_not_their_square():
    def calls(count):
        names = [f"block_{i}/w{j}" for i in range(count) for j in range(10)]
        table = {name: f"x/{name}" for name in names}
        table |= {f"other_{i}/{{n}}": f"y/{i}/{{n}}" for i in range(count)}
        flat = dict.fromkeys([*names, *(f"other_{i}/w" for i in range(count))], 0.0)
        return calls_in(lambda: ta.Migration(table)(flat))

    assert calls(90) < 3.3 * calls(30)
