"""Numbers of a migration that follow from sizes, and functions that see the target."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

import treeadapt as ta


def equal(found, wanted):
    assert not ta.tree_diff(found, wanted, values=True)


def in_a_file(m, tmp_path):
    """The same table, and its inverse, as they come back from a file."""
    tables = []
    for each in (m, m.inverse):
        (tmp_path / "m.toml").write_text(each.to_toml())
        tables.append(ta.load_migration(tmp_path / "m.toml"))
        assert tables[-1] == each
    return tables


DENSE = {
    "h.{l}.mlp : o i": "dense/mlp : i o l",
    "h.{l+dense}.gate : e": "moe/gate : e l",
    "h.{l+dense}.norm : e": "moe/norm : e l",
    "h.{l}.norm : e": "dense/norm : e l",
}


@pytest.mark.parametrize(("layers", "dense"), [(5, 2), (7, 3), (4, 1)])
def test_one_table_serves_any_number_of_dense_layers(tmp_path, layers, dense):
    """DeepSeek V2 and V3 in MaxText."""
    leaves = {f"h.{n}.mlp": np.full((2, 3), n, np.float32) for n in range(dense)}
    leaves |= {f"h.{n}.gate": np.full(4, n) for n in range(dense, layers)}
    leaves |= {f"h.{n}.norm": np.full(3, n) for n in range(layers)}
    there, back = in_a_file(ta.Migration(DENSE, sizes={"dense": dense}), tmp_path)
    found = there(leaves)
    assert found["moe/norm"][0].tolist() == [*range(dense, layers)]
    assert found["dense/norm"][0].tolist() == [*range(dense)]
    equal(back(found), leaves)


def test_a_number_from_which_a_size_is_taken_starts_there(tmp_path):
    m = ta.Migration({"h.{n}.gate": "moe/{n-dense}"}, sizes={"dense": 2})
    there, back = in_a_file(m, tmp_path)
    leaves = {f"h.{n}.gate": np.full(1, n) for n in (2, 3, 10)}
    assert [*there(leaves)] == ["moe/0", "moe/1", "moe/8"]
    equal(back(there(leaves)), leaves)
    with pytest.raises(ta.MigrationError, match=r"'h\.1\.gate'"):
        there(leaves | {"h.1.gate": np.ones(1)})


def test_a_scale_may_be_a_power_of_a_size(tmp_path):
    """Queries over sqrt(d), and embeddings times sqrt(e), in MaxText and Gemma."""
    table = {
        "q : (h d) e": ("q : e h d", {"scale": "d**-0.5"}),
        "wte : v e": ("embed : v e", {"scale": "e**0.5", "sizes": {"e": 9}}),
        "b : v": ("b : v", {"offset": "h"}),
    }
    there, back = in_a_file(ta.Migration(table, sizes={"h": 2}), tmp_path)
    for d in (4, 16):
        leaves = {"q": np.ones((2 * d, 3), np.float32), "wte": np.ones((5, 9))}
        leaves["b"] = np.zeros(3, np.float32)
        found = there(leaves)
        assert {*found["q"].ravel()} == {np.float32(d**-0.5)}
        assert {*found["embed"].ravel()} == {3.0}
        assert {*found["b"]} == {2.0}
        equal(back(found), leaves)


@pytest.mark.usefixtures("standard_promotion")
def test_moments_are_divided_by_a_power_of_a_size():
    m = ta.Migration({"q : (h d)": ("q : h d", {"scale": "d**-0.5"})}, sizes={"d": 4})
    old = {"q": np.ones(8, np.float32)}
    tx = optax.adam(1e-3)
    saved = jax.tree.map(np.ones_like, tx.init(old))
    state, _ = ta.carry_state(tx, m(old), saved, migration=m)
    assert {*np.ravel(state[0].mu["q"])} == {2.0}
    assert {*np.ravel(state[0].nu["q"])} == {4.0}


def test_a_pad_may_be_a_size(tmp_path):
    table = {"wte : v e": ("embed : v e", {"pad": {"v": (0, "spare")}})}
    there, back = in_a_file(ta.Migration(table, sizes={"spare": 3}), tmp_path)
    leaves = {"wte": np.ones((4, 2))}
    assert there(leaves)["embed"].shape == (7, 2)
    equal(back(there(leaves)), leaves)


@pytest.mark.parametrize(
    ("table", "sizes", "problem"),
    [
        ({"h.{l+dense}": "x/{l}"}, {}, "no size 'dense'"),
        ({"h.{l+dense}": "x/{l}"}, {"dense": 0}, "no size 'dense'"),
        ({"h.{l+9d}": "x/{l}"}, {}, "a bare '{'"),
        ({"a : v": ("a : v", {"pad": {"v": (0, "x")}})}, {}, "no size 'x'"),
        ({"a : v": ("a : v", {"pad": {"v": (0, "x*2")}})}, {"x": 2}, "its pad"),
        ({"a : v": ("a : v", {"scale": "d**v"})}, {}, "its scale"),
        ({"a : v": ("a : v", {"scale": "v*2"})}, {}, "its scale"),
        ({"a : v": ("a : v", {"scale": "__import__('os')"})}, {}, "its scale"),
        ({"a : v": ("a : v", {"scale": "d**-0.5"})}, {}, "size of 'd' stays open"),
        ({"a : v": ("a : v", {"scale": "d**999"})}, {"d": 1000}, "cannot hold"),
        ({"a": "b"}, {"dense": 2}, "not an axis"),
    ],
)
def test_what_is_not_a_size_is_an_error(table, sizes, problem):
    with pytest.raises(ta.MigrationError, match=problem):
        ta.Migration(table, sizes=sizes)({"a": np.ones(2)})


# Functions that see the target.


def resized(x, target):
    """As position embeddings are resized to what the model has."""
    assert isinstance(target, jax.ShapeDtypeStruct)
    return np.resize(x, target.shape).astype(target.dtype)


POSITIONS = ta.Migration({"pos": ("pos", (resized, resized)), "{p:**}": "{p}"})


@pytest.mark.parametrize("num_positions", [9, 16])
def test_one_row_resizes_to_every_target(tmp_path, num_positions):
    leaves = {"pos": np.arange(8, dtype=np.float32).reshape(1, 4, 2), "w": np.ones(2)}
    like = np.zeros((1, num_positions, 2), np.float32)
    target = {"pos": like, "w": np.zeros(2)}
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), target)
    wanted = {"pos": np.resize(leaves["pos"], like.shape), "w": leaves["w"]}
    ta.save(tmp_path / "x.safetensors", leaves)
    for each in (target, shapes):
        equal(POSITIONS(leaves, each), wanted)
    found = ta.load(tmp_path / "x.safetensors", target, migration=POSITIONS)
    equal(found, wanted)
    assert POSITIONS.inverse(wanted, leaves)["pos"].shape == (1, 4, 2)
    chain = POSITIONS.then(ta.Migration({"pos : 1 n e": "p : n e", "w": "w"}))
    found = chain(leaves, {"p": like[0], "w": target["w"]})
    equal(found, {"p": wanted["pos"][0], "w": leaves["w"]})


def test_a_row_of_several_targets_sees_all_of_them():
    seen = []

    def halves(x, *, target):
        seen.append(target)
        return x[: target[0].shape[0]], x[target[0].shape[0] :]

    m = ta.Migration({"a": (("b", "c"), halves)})
    target = {"b": np.zeros(2), "c": np.zeros(3)}
    equal(
        m({"a": np.arange(5.0)}, target), {"b": np.arange(2.0), "c": np.arange(2.0, 5)}
    )
    assert [each.shape for each in seen[0]] == [(2,), (3,)]


def test_without_the_leaf_of_a_target_the_row_and_the_path_are_named(tmp_path):
    leaves = {"pos": np.ones((1, 4, 2), np.float32), "w": np.ones(2)}
    ta.save(tmp_path / "x.safetensors", leaves)
    for call in (
        lambda: POSITIONS(leaves),
        lambda: POSITIONS(leaves, {"w": np.ones(2)}),
        lambda: ta.load(tmp_path / "x.safetensors", migration=POSITIONS),
    ):
        with pytest.raises(ta.MigrationError, match="'pos', by the row 'pos'"):
            call()


def test_other_functions_are_called_as_before():
    leaves = {"a": np.ones(2), "b": np.ones(2)}

    def both(one, target):  # the second leaf, and not the target
        return one + target

    bound = functools.partial(resized, target=jax.ShapeDtypeStruct((3,), np.float32))
    equal(ta.Migration({("a", "b"): ("c", both)})(leaves), {"c": np.full(2, 2.0)})
    assert ta.Migration({"a": ("a", bound), "b": "b"})(leaves)["a"].shape == (3,)
    equal(ta.Migration({"a": ("a", np.negative), "b": "b"})(leaves)["a"], -leaves["a"])


def test_a_cast_back_without_a_target_says_what_to_write():
    m = ta.Migration({"w : a": ("w : a", {"cast": "float32"})})
    new = m({"w": np.ones(2, np.float16)})
    with pytest.raises(
        ta.MigrationError, match=r"pass one, or write the old dtype, too"
    ):
        m.inverse(new)
    equal(m.inverse(new, {"w": np.zeros(2, np.float16)}), {"w": np.ones(2, np.float16)})
    with pytest.raises(ta.MigrationError, match=r"write \{'cast': dtype\} next to"):
        ta.Migration({"w : a": "w : a"})(new, {"w": np.zeros(2, np.float16)})


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("counted", "listed"), [(1, 2), (2, 1), (3, 1), (3, 2)])
def test_a_list_beside_leaves_that_count_otherwise(counted, listed, order):
    """Neither a foreign error nor a leaf that is left out in silence."""
    source = {f"a/{n}": np.full(3, n) for n in range(counted)}
    source |= {f"b/{text}": np.ones(3) for text in "pq"[:listed]}
    sides = ("a/{l} : i", "b/{l=p,q} : i")[::order]
    table = ta.Migration({sides: "C : l [i i]"})
    words = "'a/2' is number 2 of l" if counted == 3 else "without"
    with pytest.raises(ta.MigrationError, match=words):
        table(source)
    both = {"a/0": np.zeros(3), "a/1": np.ones(3), "b/p": np.ones(3), "b/q": np.ones(3)}
    assert table(both)["C"].shape == (2, 6)
