"""Rows that take numbers in another order, or some of them, and rows that add.

NumPy's ``take`` and ``+`` are the oracles. Random tables with ``take`` are in
``test_migration_properties``, and with boxes, chains and files where these are tested.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from command import invoke

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")  # of Optax itself

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def layers(count, **shapes):
    return {
        f"h.{n}.{name}": normal(*shape)
        for n in range(count)
        for name, shape in shapes.items()
    }


def table_of(tmp_path, m):
    (tmp_path / "table.toml").write_text(m.to_toml())
    return tmp_path / "table.toml"


# An order.


def test_the_gates_of_an_lstm_change_places_and_come_back(tmp_path):
    w = normal(4 * 6, 5)  # torch: i f g o; the other side: i g f o, transposed
    row = ("kernel : e (p h)", {"take": {"p": [0, 2, 1, 3]}})
    m = ta.Migration({"w : (p h) e": row}, sizes={"p": 4})
    new = m({"w": w})
    wanted = w.reshape(4, 6, 5)[[0, 2, 1, 3]].reshape(24, 5).T
    np.testing.assert_array_equal(new["kernel"], wanted)
    plan = m.plan({"w": w})
    assert plan.exact
    assert not plan.one_way
    assert m.inverse(new)["w"].tobytes() == w.tobytes()
    assert ta.load_migration(table_of(tmp_path, m.inverse)) == m.inverse


def test_an_order_that_is_not_its_own_inverse_comes_back():
    x = {"w": normal(5, 2)}
    m = ta.Migration({"w : v e": ("k : e v", {"take": {"v": [3, 0, 4, 1, 2]}})})
    np.testing.assert_array_equal(m(x)["k"], x["w"][[3, 0, 4, 1, 2]].T)
    assert m.inverse(m(x))["w"].tobytes() == x["w"].tobytes()
    again = {"h.{l}.w : e": ("h.{l}.w : e", {"take": {"l": [2, 0, 1]}})}
    m = ta.Migration(again)
    x = layers(3, w=(2,))
    new = m(x)
    assert [new[f"h.{n}.w"] is not None for n in range(3)]
    np.testing.assert_array_equal(new["h.0.w"], x["h.2.w"])
    assert all(m.inverse(new)[path].tobytes() == x[path].tobytes() for path in x)


def test_a_list_read_off_a_small_model_does_not_select_of_a_large_one():
    m = ta.Migration({"wte : v e": ("wte : v e", {"take": {"v": [2, 0, 1]}})})
    with pytest.raises(ta.MigrationError, match="take names all numbers of 'v', or"):
        m({"wte": normal(9, 2)})
    some = {"take": {"v": [2, 0, 1], "of": 9}}  # what the message says
    x = normal(9, 2)
    new = ta.Migration({"wte : v e": ("wte : v e", some)})({"wte": x})
    np.testing.assert_array_equal(new["wte"], x[[2, 0, 1]])
    with pytest.raises(ta.MigrationError, match="9 numbers of l after 'h', and take"):
        ta.Migration({"h{l}": ("h{l}", {"take": {"l": [1, 0]}})})(
            {f"h{n}": normal(2) for n in range(9)}
        )


# Some of them.


def test_a_selection_is_one_way_and_a_load_says_what_it_leaves_out(tmp_path):
    x = {"wte": normal(9, 2), "b": normal(2)}
    table = {"wte : v e": ("wte : v e", {"take": {"v": ["0:4", 6], "of": 9}}), "b": "b"}
    m = ta.Migration(table)
    plan = m.plan(x)
    assert not plan.exact
    assert plan.one_way == ("wte",)
    assert "it takes 5 of 9 numbers of 'v'" in repr(plan)
    with pytest.raises(ta.MigrationError, match="what take selects has no way back"):
        _ = m.inverse
    ta.save(tmp_path / "x.safetensors", x)
    said = "The row 'wte : v e' takes 5 of 9 numbers of 'v'; all others are left out"
    with pytest.warns(ta.TreeAdaptWarning, match=said):
        new = ta.load(tmp_path / "x.safetensors", migration=m)
    np.testing.assert_array_equal(new["wte"], x["wte"][[0, 1, 2, 3, 6]])
    file = table_of(tmp_path, m)
    assert 'take = { v = ["0:4", 6], of = 9 }' in file.read_text()
    assert ta.load_migration(file) == m
    args = [str(tmp_path / "x.safetensors"), str(tmp_path / "y.safetensors")]
    result = invoke("convert", *args, "--migration", str(file))
    assert said in result.output


@pytest.mark.parametrize("axes", [False, True])
def test_every_second_layer_has_the_numbers_that_follow(axes):
    x = layers(12, w=(2, 3), b=(3,))
    row = "h/{l}/w : o i" if axes else "h/{l}/w"
    source = "h.{l}.w : i o" if axes else "h.{l}.w"
    take = {"take": {"l": "1::2"}}
    m = ta.Migration({source: (row, take), "h.{l}.b : o": ("b : l o", take)})
    new = m(x)
    for n in range(6):
        w = x[f"h.{2 * n + 1}.w"]
        np.testing.assert_array_equal(new[f"h/{n}/w"], w.T if axes else w)
    assert axes or new["h/0/w"] is x["h.1.w"]
    np.testing.assert_array_equal(new["b"], [x[f"h.{n}.b"] for n in range(1, 12, 2)])
    plan = m.plan(x)
    assert sorted(plan.dropped) == sorted(
        f"h.{n}.{k}" for n in range(0, 12, 2) for k in "wb"
    )
    assert any("leaves it out" in line for line in plan.explanation("h.0.w"))
    assert plan.idle == ()


def test_rows_of_one_node_take_the_same_layers():
    x = layers(4, w=(2,), b=(2,)) | {"h.3.moe": normal(2)}
    half = {"take": {"l": "::2"}}
    rows = {"h.{l}.w": ("h/{l}/w", half), "h.{l}.moe": None}
    with pytest.raises(ta.MigrationError, match="write the same take in each") as error:
        ta.Migration({**rows, "h.{l}.b": "h/{l}/b"})(x)
    assert "'h.1': 'h.{l}.w' leaves it out, and 'h.{l}.b' makes it number 1" in str(
        error.value
    )
    assert len(ta.Migration({**rows, "h.{l}.b": ("h/{l}/b", half)})(x)) == 4
    # What the last layers alone have counts from the end of all layers.
    last = {"take": {"l": "-2:"}}
    rows = {f"h.{{l}}.{k}": (f"h/{{l}}/{k}", last) for k in ("w", "b", "moe")}
    new = ta.Migration(rows)(x)
    assert [*new] == ["h/0/w", "h/1/w", "h/0/b", "h/1/b", "h/1/moe"]


def test_a_selection_of_nothing_and_a_torn_node_are_errors():
    x = layers(4, w=(2,))
    with pytest.raises(ta.MigrationError, match="none of the 4 numbers of l"):
        ta.Migration({"h.{l}.w : e": ("w : l e", {"take": {"l": "4:"}})})(x)
    del x["h.2.w"]
    m = ta.Migration({"h.{l}.w : e": ("w : l e", {"take": {"l": "::2"}})})
    with pytest.raises(ta.MigrationError, match=r"without 'h\.2\.w'"):
        m(x)
    m = ta.Migration({"h.{l}.w : e": ("w : l e", {"take": {"l": "1::2"}})})
    np.testing.assert_array_equal(m(x)["w"], [x["h.1.w"], x["h.3.w"]])


def test_a_size_in_a_scale_is_that_of_the_source():
    x = {"w": normal(4, 3)}
    m = ta.Migration(
        {"w : h e": ("w : h e", {"take": {"h": [1, 3], "of": 4}, "scale": "h**-0.5"})}
    )
    np.testing.assert_array_equal(m(x)["w"], x["w"][[1, 3]] * np.float32(0.5))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (("k : a", {"take": {"a": [0, 2]}}), "it names 2 numbers, up to 2"),
        (("k : a", {"take": {"a": [0, 0]}}), "it names 0 twice"),
        (("k : a", {"take": {"a": [0, -1]}}), "neither a number from 0 on nor a run"),
        (("k : a", {"take": {"a": [0, 9], "of": 8}}), "the last number of 8 is 7"),
        (("k : a", {"take": {"a": "::0"}}), "it is not a slice"),
        (("k : a", {"take": {"a": "::2", "of": 8}}), "It is of one list"),
        (("k : a", {"take": {}}), "its take is {}"),
        (("k : a", {"take": {"a": ["0:262145"]}}), "more than 262,144"),
        (("k : a", {"take": {"b": "::2"}}), "not an axis or number of it"),
        (("k : a", {"take": {"a": "::2"}, "pad": {"a": (0, 1)}}), "or pads 'a'"),
        (("k : a", {"take": {"a": [1, 0]}, "sizes": {"a": 3}}), "'of': 3}}"),
    ],
)
def test_a_take_that_contradicts_itself_is_an_error(row, text):
    with pytest.raises(ta.MigrationError) as error:
        ta.Migration({"w : a": row})
    assert text in str(error.value)


@pytest.mark.slow
def test_moments_take_the_same_numbers():
    x = layers(4, w=(3, 2)) | {"wte": normal(7, 2)}
    tx = optax.adam(0.1)
    state = tx.init({path: jnp.asarray(leaf) for path, leaf in x.items()})
    grads = {path: jnp.asarray(normal(*leaf.shape)) for path, leaf in x.items()}
    _, state = tx.update(grads, state)
    m = ta.Migration(
        {
            "h.{l}.w : i o": ("w : l o i", {"take": {"l": "::2"}}),
            "wte : v e": ("wte : v e", {"take": {"v": [5, 1, 2], "of": 7}}),
        }
    )
    new = m(x)
    carried, _ = ta.carry_state(tx, new, state, migration=m)
    for field in ("mu", "nu"):
        wanted = m(getattr(state[0], field))
        moved = getattr(carried[0], field)
        assert {*moved} == {*wanted}
        for path, leaf in wanted.items():
            np.testing.assert_array_equal(moved[path], leaf)


# Sums.


def biases(dtype=np.float32):
    return {"ih": normal(8).astype(dtype), "hh": normal(8).astype(dtype)}


def added(**more):
    return ta.Migration(
        {("ih : (p h)", "hh : (p h)"): ("b : p h", {"add": True, **more})},
        sizes={"p": 4},
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_sources_are_added_in_float32(tmp_path, dtype):
    x = biases(dtype)
    m = added(scale=2.0)
    wanted = (x["ih"].astype(np.float32) + x["hh"].astype(np.float32)) * 2
    wanted = wanted.astype(dtype).reshape(4, 2)
    for leaves in (x, {path: jnp.asarray(leaf) for path, leaf in x.items()}):
        np.testing.assert_array_equal(np.asarray(m(leaves)["b"]), wanted, strict=True)
        traced = jax.jit(m)(leaves)["b"]
        np.testing.assert_array_equal(np.asarray(traced), wanted, strict=True)
    back = m.inverse(m(x))
    np.testing.assert_array_equal(back["hh"], np.zeros(8, dtype), strict=True)
    again = m(back)["b"]
    np.testing.assert_array_equal(again, wanted)
    assert ta.load_migration(table_of(tmp_path, m)) == m
    assert ta.load_migration(table_of(tmp_path, m.inverse)) == m.inverse
    ta.save(tmp_path / "x.safetensors", x)
    new = ta.load(tmp_path / "x.safetensors", migration=m)
    np.testing.assert_array_equal(new["b"], wanted, strict=True)
    ta.save(tmp_path / "y.safetensors", m(x))
    old = ta.load(tmp_path / "y.safetensors", migration=m.inverse)
    assert all(old[path].tobytes() == back[path].tobytes() for path in back)


def test_a_sum_is_noted_and_not_found(tmp_path):
    x, m = biases(), added()
    plan = m.plan(x)
    assert not plan.exact
    assert plan.one_way == ("b",)
    note = "back from 'b', the first summand gets the sum, and the others zeros"
    assert note in repr(plan)
    assert "trained on, several summands move faster than their sum" in repr(plan)
    ta.save(tmp_path / "x.safetensors", x)
    table = str(table_of(tmp_path, m))
    result = invoke("lint", str(tmp_path / "x.safetensors"), "--migration", table)
    assert result.exit_code == 0
    assert note in result.output
    chain = m.then(ta.Migration({"b : p h": "c : h p"}))
    assert chain.plan(x).one_way == ("c",)
    assert [*chain.plan(x).noted] == ["c"]


def test_summands_go_together_or_are_an_error():
    x = biases()
    with pytest.raises(ta.MigrationError, match="cannot be scaled, shifted or added"):
        added()({path: np.arange(8) for path in x})
    with pytest.raises(ta.MigrationError, match="'hh' is float64"):
        added()({**x, "hh": np.ones(8)})
    with pytest.raises(ta.MigrationError, match="'j' on one side only"):
        ta.Migration({("a : i", "b : i j"): ("c : i", {"add": True})})
    for row in (
        {"a : i": ("c : i", {"add": True})},
        {("a : i", "b : i"): ("c : [i i]", {"add": True})},
    ):
        with pytest.raises(ta.MigrationError, match="several sources without brackets"):
            ta.Migration(row)
    with pytest.raises(ta.MigrationError, match="it adds and has no axes"):
        ta.Migration({("a", "b"): ("c", {"add": True})})
    with pytest.raises(ta.MigrationError, match="adds and multiplies"):
        ta.Migration({("a : i", "b : i"): ("c : i", {"add": True, "multiply": True})})
    row = {"add": True, "take": {"i": "::2"}}
    with pytest.raises(ta.MigrationError, match="takes numbers of 'i' and adds"):
        ta.Migration({("a : i", "b : i"): ("c : i", row)})
    big = np.full(8, 3e38, np.float32)
    with pytest.raises(ta.MigrationError, match="do not fit their new dtype"):
        added()({"ih": big, "hh": big})


@pytest.mark.slow
def test_moments_of_summands_are_those_of_the_sum_where_they_are_equal():
    x, tx, m = biases(), optax.adam(0.1), added()
    grad = jnp.asarray(normal(8))
    _, state = tx.update({"ih": grad, "hh": grad}, tx.init(x))
    carried, _ = ta.carry_state(tx, m(x), state, migration=m)
    np.testing.assert_array_equal(carried[0].mu["b"], state[0].mu["ih"].reshape(4, 2))
    back, _ = ta.carry_state(tx, x, carried, migration=m.inverse)
    for path in x:
        np.testing.assert_array_equal(back[0].nu[path], state[0].nu["ih"])
    _, other = tx.update({"ih": grad, "hh": 2 * grad}, tx.init(x))
    carried, report = ta.carry_state(tx, m(x), other, migration=m)
    assert "the copies are not equal" in str(report)
    assert not carried[0].mu["b"].any()


# Factors.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("d**-0.5", 48**-0.5),
        ("(two d)**-0.5", 96**-0.5),
        ("bfloat16(d**0.5)", float(jnp.bfloat16(48**0.5))),
        ("float16((two d)**-0.5)", float(np.float16(96**-0.5))),
        ("d", 48.0),
    ],
)
def test_factors_are_rounded_as_the_other_library_rounds_them(tmp_path, text, factor):
    x = {"w": normal(48, 3)}
    m = ta.Migration(
        {"w : d e": ("k : e d", {"scale": text})},
        sizes={"two": 2} if "two" in text else None,
    )
    wanted = x["w"].T * np.float32(factor)
    np.testing.assert_array_equal(m(x)["k"], wanted)
    np.testing.assert_array_equal(m.inverse(m(x))["w"], (wanted / np.float32(factor)).T)
    assert f'scale = "{text}"' in m.to_toml()
    assert ta.load_migration(table_of(tmp_path, m)) == m
    tx = optax.adam(0.1)
    _, state = tx.update({"w": jnp.ones((48, 3))}, tx.init(x))
    carried, _ = ta.carry_state(tx, m(x), state, migration=m)
    nu = np.float32(state[0].nu["w"][0, 0]) / np.float32(factor**2)
    np.testing.assert_allclose(carried[0].nu["k"], nu, rtol=1e-6)


@pytest.mark.parametrize("text", ["d**", "bfloat16(2)", "int8(d)", "(d)**2", "d*2"])
def test_other_arithmetic_is_refused(text):
    with pytest.raises(ta.MigrationError, match=r"or a power of sizes, as 'd\*\*-0.5'"):
        ta.Migration({"w : d": ("k : d", {"scale": text})})


def test_literals_are_written_with_all_their_digits(tmp_path):
    for value in (1 / 3, float(np.float32(0.1)), 27.712812921102035):
        m = ta.Migration({"w : d": ("k : d", {"scale": value})})
        assert ta.load_migration(table_of(tmp_path, m)) == m


# Spellings.

SPELLED = {
    f"{start}{name}": (f"ln/{{l}}/{kind}", {"optional": True})
    for start in ("h.{l}.", "transformer.h.{l}.")
    for name, kind in (("gamma", "scale"), ("weight", "scale"), ("bias", "bias"))
}


@pytest.mark.parametrize("start", ["h", "transformer.h"])
@pytest.mark.parametrize("name", ["gamma", "weight"])
def test_the_way_back_has_the_names_of_its_target(tmp_path, start, name):
    x = {f"{start}.{n}.{k}": normal(2) for n in range(3) for k in (name, "bias")}
    m = ta.Migration(SPELLED)
    params = m(x)
    back = m.inverse(params, x)
    assert {path: leaf.tobytes() for path, leaf in back.items()} == {
        path: leaf.tobytes() for path, leaf in x.items()
    }
    assert next(iter(m.inverse(params))) == "h.0.gamma"  # the first, without a target
    plan = m.plan(x)
    is_first = (start, name) == ("h", "gamma")
    assert plan.one_way == (() if is_first else tuple(plan.noted))
    assert set(plan.noted.values()) <= {
        "another spelling, unless a target has this one"
    }
    ta.save(tmp_path / "x.safetensors", x)
    table = str(table_of(tmp_path, m))
    result = invoke("lint", str(tmp_path / "x.safetensors"), "--migration", table)
    assert result.exit_code == 0, result.output
    assert is_first or "another spelling" in result.output


def test_a_target_of_two_spellings_is_an_error_that_names_both():
    m = ta.Migration(SPELLED)
    x = {"h.0.gamma": normal(2), "h.1.weight": normal(2)}
    with pytest.raises(ta.MigrationError, match="spells names in two ways") as error:
        m.inverse(m(x), x)
    assert "'ln/0/scale' as in 'h.{l}.gamma' and 'ln/1/scale' as in 'h.{l}.weight'" in (
        str(error.value)
    )
