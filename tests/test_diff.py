"""Differences of trees: false when equal, and each kind reported with its path."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from trees import BY_NAME, EqxModel, two_layers

import treeadapt as ta


def kinds(diff):
    return [(found.kind, found.path, found.path_after) for found in diff]


@pytest.mark.parametrize("name", ["NamedTuple", "Equinox arrays", "FrozenDict", "chex"])
def test_containers_do_not_matter(name):
    tree = BY_NAME[name].make()
    flat = ta.to_flat_dict(tree)
    assert not ta.tree_diff(tree, flat, values=True)
    assert not ta.tree_diff(jax.eval_shape(lambda: flat), tree)


def test_each_kind_is_reported():
    before = {
        "gone": np.ones(2),
        "layers": {"kernel": np.ones((2, 3))},
        "shape": np.ones(3),
    }
    after = {
        "layers": {"kernels": np.ones((2, 3))},
        "shape": np.ones((3, 1)),
        "xyz": np.ones(2, np.int32),
    }
    before["type"], after["type"] = np.ones(1), np.ones(1, ml_dtypes.bfloat16)
    before["value"], after["value"] = np.zeros(4), np.array([0, 0, 0.5, -0.25])
    diff = ta.tree_diff(before, after, values=True)
    assert kinds(diff) == [
        ("removed", "gone", ""),
        ("added", "xyz", "xyz"),
        ("renamed", "layers/kernel", "layers/kernels"),
        ("reshaped", "shape", "shape"),
        ("retyped", "type", "type"),
        ("changed", "value", "value"),
    ]
    assert str(diff).splitlines() == [
        "6 differences: 1 removed, 1 added, 1 renamed, 1 reshaped, 1 retyped, "
        "1 changed.",
        "- removed   'gone': float64[2]",
        "+ added     'xyz': int32[2]",
        "> renamed   'layers/kernel' -> 'layers/kernels': float64[2,3]",
        "~ reshaped  'shape': float64[3] -> float64[3,1]",
        "~ retyped   'type': float64[1] -> bfloat16[1]",
        "~ changed   'value': float64[4], 2 of 4 elements, by at most 0.5",
    ]
    assert len(diff.of("removed")) == 1
    assert len(diff) == 6


def test_every_entry_of_where_selects_something_in_one_of_the_trees():
    one = {"a": {"kernel": np.ones(2), "bias": np.ones(2)}}
    two = {"a": {"weight": np.ones(2), "bias": np.zeros(2)}}
    with pytest.raises(ta.UnusedRuleError, match=r"'\*\*/biaas'.*did you mean"):
        ta.tree_diff(one, two, where=["**/kernel", "**/biaas"], values=True)
    with pytest.raises(ta.UnusedRuleError, match="biaas"):
        ta.tree_diff(one, two, where=ta.glob("**/kernel") | "**/biaas")
    with pytest.raises(ta.UnusedRuleError, match="biaas"):
        ta.tree_diff({}, two, where=["**/weight", "**/biaas"])
    # An entry may be there to select what was renamed.
    assert len(ta.tree_diff(one, two, where=["**/kernel", "**/weight"])) == 1
    assert not ta.tree_diff({"a": 1}, {"a": 1}, where="b")


def test_an_equal_result_says_what_was_compared():
    tree = {"a": np.ones(2)}
    assert str(ta.tree_diff(tree, tree, values=True)) == "No difference."
    names = ta.tree_diff(tree, tree)
    assert str(names) == (
        "No difference in names, shapes and dtypes; values were not compared."
    )
    assert repr(names) == str(names)


def test_names_come_in_natural_order():
    one = {f"l_{n}": np.ones(1) for n in (1, 2, 10)}
    assert [found.path for found in ta.tree_diff(one, {})] == ["l_1", "l_2", "l_10"]


def test_layers_that_were_all_renamed_keep_their_numbers():
    one = {f"layers/{n}/attn/kernel": np.ones((2, 2)) for n in range(40)}
    two = {f"blocks/{n}/attn/weight": np.ones((2, 2)) for n in range(40)}
    diff = ta.tree_diff(one, two)
    assert len(diff.of("renamed")) == len(diff) == 40
    for found in diff:
        assert found.path.split("/")[1] == found.path_after.split("/")[1]


def test_a_leaf_of_another_shape_was_not_renamed():
    diff = ta.tree_diff({"kernel": np.ones(2)}, {"kernels": np.ones(3)})
    assert [found.kind for found in diff] == ["removed", "added"]


def test_values_are_compared_bit_by_bit():
    nan = np.array([np.nan, 1.0])
    assert not ta.tree_diff({"a": nan}, {"a": nan.copy()}, values=True)
    assert ta.tree_diff({"a": np.array(0.0)}, {"a": np.array(-0.0)}, values=True)
    (found,) = ta.tree_diff({"a": nan}, {"a": np.zeros(2)}, values=True)
    assert found.note == "2 of 2 elements, by at most 1, NaN"


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int64", "complex64", "float8_e4m3fn"]
)
def test_values_of_any_dtype(dtype):
    ones = np.ones(3, np.dtype(dtype))
    other = ones.copy()
    assert not ta.tree_diff({"a": ones}, {"a": other}, values=True)
    other[1] = 0
    (found,) = ta.tree_diff({"a": ones}, {"a": other}, values=True)
    assert found.note.startswith("1 of 3 elements")


def test_keys_and_static_leaves_are_compared():
    one = {"key": jax.random.key(0), "rate": 0.5, "act": jax.nn.relu}
    two = {"key": jax.random.key(1), "rate": 1, "act": jax.nn.relu}
    assert [f.path for f in ta.tree_diff(one, two, values=True)] == ["rate", "key"]
    assert not ta.tree_diff(one, one | {"key": jax.random.key(0)}, values=True)


def test_where_chooses_what_to_compare():
    one, two = {"a": np.ones(1), "b": np.ones(1)}, {"a": np.ones(1), "b": np.ones(2)}
    assert not ta.tree_diff(one, two, where="a")
    assert ta.tree_diff(one, two, where="b")
    with pytest.raises(ta.UnusedRuleError, match="did you mean"):
        ta.tree_diff(one, two, where="z/a")
    model = BY_NAME["Equinox"].make()
    arrays = ta.to_flat_dict(BY_NAME["Equinox arrays"].make())
    assert not ta.tree_diff(model, arrays, where=ta.leaf(), values=True)


def test_abstract_values_are_an_error_with_the_path():
    tree = jax.eval_shape(lambda: {"w": jnp.ones(3)})
    with pytest.raises(ta.TreeAdaptError, match="'w' has no value"):
        ta.tree_diff(tree, {"w": jnp.ones(3)}, values=True)


def test_no_value_is_read_unless_asked():
    deleted = jnp.ones(3)
    deleted.delete()
    assert not ta.tree_diff({"w": deleted}, {"w": jnp.ones(3)})


def test_a_hostile_name_is_quoted():
    text = str(ta.tree_diff({"a\n\x1b[31m": np.ones(1)}, {}))
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2


def test_repr_is_short():
    diff = ta.tree_diff({f"l{n}": np.ones(1) for n in range(1_000) if n % 2}, {})
    assert "and 480 more" in repr(diff)
    assert len(str(diff).splitlines()) == 501


@pytest.mark.slow
def test_thousands_of_unlike_names_end_soon():
    one = {f"{n:05}": np.ones(1) for n in range(3_000)}
    two = {f"x{n:06}y": np.ones(1) for n in range(3_000)}
    assert len(ta.tree_diff(one, two)) >= 3_000


def test_models_of_two_classes():
    model = two_layers(EqxModel, dict)
    assert not ta.tree_diff(model, two_layers(dict, dict), values=True)


def test_how_far_integers_are_apart_is_exact():
    before = {"w": np.array([2**60, -(2**63)]), "u": np.array([0], np.uint64)}
    near = {"w": np.array([2**60 + 1, -(2**63)]), "u": np.array([0], np.uint64)}
    far = {"w": np.array([2**60, 2**63 - 1]), "u": np.array([2**64 - 1], np.uint64)}
    [one] = ta.tree_diff(before, near, values=True)
    assert one.note == "1 of 2 elements, by at most 1"
    notes = [found.note for found in ta.tree_diff(before, far, values=True)]
    assert notes == [
        f"1 of 1 element, by at most {2**64 - 1:,}",
        f"1 of 2 elements, by at most {2**64 - 1:,}",
    ]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (np.array([b"a", b"b"]), np.array([b"a", b"c"])),
        (np.array([1, None], object), np.array([1, 1.0], object)),
        (np.zeros(2, "M8[D]"), np.arange(2).astype("M8[D]")),
    ],
    ids=["str", "bytes", "object", "date"],
)
def test_arrays_without_numbers_are_compared(one, two):
    [found] = ta.tree_diff({"a": one}, {"a": two}, values=True)
    assert found.note == "1 of 2 elements"
    assert not ta.tree_diff({"a": one}, {"a": one.copy()}, values=True)


def test_a_selector_with_stacks_compares_whole_arrays():
    table = {"blocks/{0..1}/b": "a", "**/w": "w", "**": "rest"}
    rules = ta.Rules(table, stacks={"blocks": 0})
    before = {"blocks": {"w": np.zeros((4, 3)), "b": np.zeros(4)}, "w": np.zeros(3)}
    after = {"blocks": {"w": np.ones((4, 3)), "b": np.ones(4)}, "w": np.ones(3)}
    found = ta.tree_diff(before, after, where=rules.where("w"), values=True)
    assert [each.path for each in found] == ["blocks/w", "w"]
    with pytest.raises(ta.StackError, match="'blocks/b' get different answers"):
        ta.tree_diff(before, after, where=rules.where("a"))
    within = ta.Rules({rules.where("w"): "x"}, default="y")
    assert within(before) == {"blocks": {"w": "x", "b": "y"}, "w": "x"}


def test_differences_that_are_alike_are_one_line():
    def blocks(name, layers, **more):
        return {
            name: {
                str(n): {"w": np.ones((2, 3)), "b": np.ones(2)} for n in range(layers)
            }
        } | more

    before = blocks("blocks", 12, norm={"bias": np.ones(3), "scale": np.ones(3)})
    after = blocks("blocks", 8, out_norm={"bias": np.ones(3), "scale": np.ones(3)})
    after["blocks"]["7"]["b"] = np.ones(5)
    diff = ta.tree_diff(before, after)
    assert str(diff).splitlines() == [
        "11 differences: 8 removed, 2 renamed, 1 reshaped.",
        "- removed   'blocks/{8..11}/b': float64[2]",
        "- removed   'blocks/{8..11}/w': float64[2,3]",
        "> renamed   'norm/{bias,scale}' -> 'out_norm/{bias,scale}'",
        "~ reshaped  'blocks/7/b': float64[2] -> float64[5]",
    ]
    assert len(diff) == 11
    assert [one.path for one in diff][:2] == ["blocks/8/b", "blocks/8/w"]


def test_a_module_that_was_renamed_in_every_layer_is_one_line():
    def model(name, out):
        part = {key: np.ones(n) for n, key in enumerate("abcd", 2)}
        layers = {str(n): {name: dict(part)} for n in range(4)}
        return {"layers": layers, out: {"w": np.ones((2, 7)), "b": np.ones(7)}}

    diff = ta.tree_diff(model("attn", "head"), model("attention", "heads"))
    assert str(diff).splitlines() == [
        "18 differences: 18 renamed.",
        "> renamed   'head/{b,w}' -> 'heads/{b,w}'",
        "> renamed   'layers/{0..3}/attn/**' -> 'layers/{0..3}/attention/**'",
    ]


def test_numbers_of_values_are_not_folded():
    before = {f"h/{n}": np.zeros(4) for n in range(4)}
    after = {f"h/{n}": np.array([n + 0.5, 0, 0, 0]) for n in range(3)}
    after["h/3"] = after["h/2"]
    lines = str(ta.tree_diff(before, after, values=True)).splitlines()[1:]
    assert lines == [
        f"~ changed   'h/{n}': float64[4], 1 of 4 elements, by at most {most}"
        for n, most in enumerate((0.5, 1.5, 2.5, 2.5))
    ]
    equal = {path: leaf + 1 for path, leaf in before.items()}
    (line,) = str(ta.tree_diff(before, equal, values=True)).splitlines()[1:]
    assert line == "~ changed   'h/{0..3}': float64[4], 4 of 4 elements, by at most 1"
