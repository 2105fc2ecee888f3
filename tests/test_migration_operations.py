"""What is next to the target of a row: on files, meshes and states, and in messages.

See ``test_migration_properties`` for the laws over random tables, which have all of it.
"""

from __future__ import annotations

from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command import run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from work import recorded_programs

import treeadapt as ta

HEADS = {"kv : (k d) e": ("kv : e (k r) d", {"repeat": {"r": 2}})}
KV = np.arange(60, dtype=np.float32).reshape(12, 5)


def refused(table: Any, **more: Any) -> str:
    with pytest.raises(ta.MigrationError) as caught:
        ta.Migration(table, **more)
    return str(caught.value)


# --- repeat ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64", "bool"])
def test_the_copies_of_a_repeat_must_be_equal_on_the_way_back(kind, dtype):
    m = ta.Migration(HEADS, sizes={"d": 3})
    w = kind(KV.astype(jnp.dtype(dtype)))
    there = m({"kv": w})["kv"]
    np.testing.assert_array_equal(
        there, einops.repeat(w, "(k d) e -> e (k r) d", d=3, r=2)
    )
    back = m.inverse({"kv": there})["kv"]
    assert back.dtype == w.dtype
    np.testing.assert_array_equal(back, w)
    torn = np.array(there)
    torn[1, 3, 2] = torn[1, 3, 2] == 0  # the second copy of a head
    with pytest.raises(
        ta.MigrationError, match="make 'kv' of 'kv': the copies are not"
    ):
        m.inverse({"kv": kind(torn)})
    # Under jit, and on shapes, the first copy is taken.
    traced = jax.jit(m.inverse)({"kv": kind(torn)})["kv"]
    np.testing.assert_array_equal(traced, w)


def test_bits_decide_whether_copies_are_equal():
    m = ta.Migration({"w : a": ("w : r a", {"repeat": {"r": 2}})})
    for kind in (np.asarray, jnp.asarray):
        nans = kind(np.array([np.nan, -0.0], np.float32))
        assert m.inverse(m({"w": nans}))["w"].tobytes() == nans.tobytes()
        signs = kind(np.array([[0.0], [-0.0]], np.float32))
        with pytest.raises(ta.MigrationError, match="copies are not equal"):
            m.inverse({"w": signs})


def test_what_numpy_repeats_can_be_written_to():
    (leaf,) = ta.Migration({"w : a": ("w : a r", {"repeat": {"r": 3}})})(
        {"w": np.ones(2)}
    ).values()
    leaf[0, 0] = 5
    assert leaf.tolist() == [[5, 1, 1], [1, 1, 1]]


def test_the_size_of_a_repeat_may_come_from_the_target():
    m = ta.Migration({"kv : (k d) e": ("kv : e (k r) d", {"repeat": "r"})})
    target = {"kv": np.zeros((5, 8, 3), np.float32)}
    with pytest.raises(ta.MigrationError, match=r"the size of .*'r' stays open"):
        m({"kv": KV})
    sized = ta.Migration(
        {"kv : (k d) e": ("kv : e (k r) d", {"repeat": "r"})}, sizes={"k": 4}
    )
    there = sized({"kv": KV}, target)
    assert sized.plan({"kv": KV}, target).one_way == ()
    with pytest.raises(ta.MigrationError, match=r"the size of .* stays open"):
        m.inverse(there)
    np.testing.assert_array_equal(sized.inverse(there, {"kv": KV})["kv"], KV)
    empty = {"w": np.zeros((0, 2))}
    m = ta.Migration({"w : a": ("w : r a", {"repeat": "r"})})
    with pytest.raises(ta.MigrationError, match="r has size 0"):
        m({"w": np.ones(2)}, empty)


def test_repeats_are_not_gathered_on_a_mesh():
    mesh = jax.make_mesh((8,), ("model",))
    heads = NamedSharding(mesh, P(None, "model"))
    w = jax.device_put(KV, NamedSharding(mesh, P()))
    target = {"kv": jax.ShapeDtypeStruct((5, 8, 3), np.float32, sharding=heads)}
    m = ta.Migration(HEADS, sizes={"d": 3})
    assert m.plan({"kv": w}, target).gathered == ()
    with recorded_programs() as programs:
        moved = m({"kv": w}, target)["kv"]
    assert moved.sharding == heads
    np.testing.assert_array_equal(moved, m({"kv": KV})["kv"])
    ((_, program),) = programs
    for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert word not in program


@pytest.mark.parametrize("spec", [P(None, "model"), P("data"), P(("data", "model"))])
def test_a_file_is_read_by_the_heads_of_each_device(tmp_path, spec):
    w = np.arange(16 * 64 * 40, dtype=np.float32).reshape(16 * 64, 40)
    table = {"kv : (k d) e": ("kv : (k r) e d", {"repeat": {"r": 4}})}
    m = ta.Migration(table, sizes={"d": 64})
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, spec)
    target = {"kv": jax.ShapeDtypeStruct((64, 40, 64), np.float32, sharding=sharding)}
    ta.save(tmp_path / "a.safetensors", {"kv": w})
    loaded = ta.load(tmp_path / "a.safetensors", target, migration=m)
    assert loaded["kv"].sharding == sharding
    np.testing.assert_array_equal(loaded["kv"], m({"kv": w})["kv"])
    assert m.plan({"kv": w}, target).gathered == ()
    # And back, from the repeated file to shards of the heads.
    ta.save(tmp_path / "b.safetensors", loaded)
    whole = NamedSharding(mesh, P(spec[0]))
    like = {"kv": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=whole)}
    back = ta.load(tmp_path / "b.safetensors", like, migration=m.inverse)
    np.testing.assert_array_equal(back["kv"], w)
    torn = np.array(loaded["kv"])
    torn[5, 0, 0] += 1
    ta.save(tmp_path / "c.safetensors", {"kv": torn})
    with pytest.raises(ta.MigrationError, match="copies are not equal"):
        ta.load(tmp_path / "c.safetensors", like, migration=m.inverse)


def test_half_a_group_of_copies_is_a_part_of_its_own():
    """Six repeats of three heads on two devices: the second head is on both."""
    sharding = NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))
    target = {"w": jax.ShapeDtypeStruct((6, 4), np.float32, sharding=sharding)}
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    m = ta.Migration({"w : k e": ("w : (k r) e", {"repeat": {"r": 2}})})
    assert m.plan({"w": w}, target).gathered == ()
    tiled = ta.Migration({"w : k e": ("w : (r k) e", {"repeat": {"r": 2}})})
    assert tiled.plan({"w": w}, target).gathered == ()
    joined = ta.Migration({"w : (k e)": ("w : (k r) e", {"repeat": {"r": 2}})})
    assert joined.plan({"w": w.reshape(-1)}, target).gathered == ()


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_moments_are_repeated_and_come_back():
    tx = optax.adam(1e-2)
    params = {"kv": jnp.asarray(KV)}
    _, state = tx.update({"kv": jnp.cos(params["kv"])}, tx.init(params), params)
    m = ta.Migration(HEADS, sizes={"d": 3})
    new = m(params)
    carried, report = ta.carry_state(tx, new, state, migration=m)
    np.testing.assert_array_equal(carried[0].nu["kv"], m(state[0].nu)["kv"])
    back, report = ta.carry_state(tx, params, carried, migration=m.inverse)
    assert not report.warnings
    np.testing.assert_array_equal(back[0].mu["kv"], state[0].mu["kv"])


def test_a_repeat_is_explained(tmp_path):
    m = ta.Migration(HEADS, sizes={"d": 3})
    plan = m.plan({"kv": KV})
    ta.save(tmp_path / "kv.safetensors", {"kv": KV})
    (tmp_path / "m.toml").write_text(m.to_toml())
    tree, file = tmp_path / "kv.safetensors", tmp_path / "m.toml"
    lines = run("explain", tree, "kv", "--migration", file).splitlines()
    assert lines[:4] == [
        "row 1: 'kv : (k d) e' -> 'kv : e (k r) d'",
        "sizes: k=4, d=3, e=5, r=2",
        "repeat: {'r': 2}",
        "'kv' -> 'kv'",
    ]
    assert plan.exact
    assert not plan.one_way
    assert plan.swappable == {0: (("k", "d"), ("k", "r"))}


def test_a_file_may_not_repeat_beyond_measure_unless_the_target_does():
    m = ta.Migration({"w : a": ("w : x a", {"repeat": {"x": 2**60}})})
    with pytest.raises(ta.MigrationError, match="may not make so much of"):
        m({"w": np.ones(3)})
    table = {"w : a b": ("w : x a b", {"repeat": {"x": 512}})}
    dense = {"w": jax.ShapeDtypeStruct((2048, 768), jnp.bfloat16)}
    experts = {"w": jax.ShapeDtypeStruct((512, 2048, 768), jnp.bfloat16)}
    m = ta.Migration(table)
    with pytest.raises(ta.MigrationError, match="may not make so much of"):
        m.plan(dense)
    assert m.plan(dense, experts).result == experts


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (
            {"w : a": ("v : a", {"repeat": {"a": 2}})},
            "repeats along 'a', which is not an",
        ),
        (
            {"w : a": ("v : a", {"repeat": "r"})},
            "repeats along 'r', which is not an axis",
        ),
        (
            {"w : r": ("v.{r} : ", {"repeat": "r"})},
            "repeats along 'r', which is not an",
        ),
        ({"w": ("v", {"repeat": "r"})}, "repeats along 'r', which is not an axis"),
        (
            {"w : ...": ("v : ...", {"repeat": "..."})},
            "repeats along '...', which is not",
        ),
        ({"w : a": ("v : a r", {"repeat": {"r": 0}})}, "its repeat is {'r': 0}"),
        ({"w : a": ("v : a r", {"repeat": {"r": True}})}, "its repeat is {'r': True}"),
        ({"w : a": ("v : a r", {"repeat": 2})}, "its repeat is 2"),
        ({"w : a": ("v : a r", {"repeat": {}})}, "its repeat is {}"),
        ({"w : a": (("u : a", "v : a"), {"repeat": "r"})}, "repeats along 'r', which"),
        (
            {"w : a": ("v : a r", {"repeat": {"r": 2}, "sizes": {"r": 3}})},
            "'r' has two sizes, 2 and 3",
        ),
        ({"w": None, "v": (None, {"repeat": "r"})}, "it drops leaves and changes them"),
        ({"w : a": ("v : a r", {"repet": "r"})}, "did you mean 'repeat'?"),
    ],
)
def test_a_repeat_that_makes_no_sense_is_refused(table, text):
    assert text in refused(table)


# --- fill ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64", "bool"])
@pytest.mark.parametrize(
    "kinds", [(np.asarray, jnp.asarray), (jnp.asarray, np.asarray)]
)
def test_what_is_new_has_the_numbers_of_a_target_of_any_kind(kinds, dtype):
    numbers = np.arange(12).astype(jnp.dtype(dtype)).reshape(3, 4)
    source, target = kinds[0](numbers[1:, :2]), kinds[1](numbers[::-1].T)
    before = np.array(target)
    pads = {"pad": {"a": (1, 0), "b": (0, 2)}, "fill": "target"}
    m = ta.Migration({"w : a b": ("v : b a", pads)})
    moved = m({"w": source}, {"v": target})["v"]
    wanted = before.copy()
    wanted[:2, 1:] = numbers[1:, :2].T
    np.testing.assert_array_equal(moved, wanted, strict=True)
    np.testing.assert_array_equal(target, before)  # and it is not written to
    back = m.inverse({"v": moved})["w"]
    np.testing.assert_array_equal(back, source, strict=True)


def test_a_filled_payload_of_nan_stays_bit_by_bit():
    bits = np.array([0x7FC1, 0xFFFF, 0x8000, 0x0001], np.uint16).view(jnp.bfloat16)
    m = ta.Migration({"w : a": ("w : a", {"pad": {"a": (0, 2)}, "fill": "target"})})
    target = {"w": jnp.asarray(np.concatenate([bits[:2], bits[2:]]))}
    moved = m({"w": jnp.asarray(bits[:2])}, target)["w"]
    assert moved.tobytes() == bits.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_each_device_fills_from_its_own_shards(tmp_path, spec):
    sharding = NamedSharding(jax.make_mesh((4,), ("x",)), spec)
    w = {"w": np.arange(24, dtype=np.float32).reshape(3, 8)}
    target = {"w": jax.device_put(-np.ones((4, 8), np.float32), sharding)}
    options = {"pad": {"l": (0, 1)}, "fill": "target", "offset": 1.0}
    m = ta.Migration({"w : l a": ("w : l a", options)})
    wanted = np.concatenate([w["w"] + 1, -np.ones((1, 8), np.float32)])
    ta.save(tmp_path / "w.safetensors", w)
    for moved in (
        ta.load(tmp_path / "w.safetensors", target, migration=m),
        m(jax.tree.map(jnp.asarray, w), target),
    ):
        assert moved["w"].sharding == sharding
        np.testing.assert_array_equal(moved["w"], wanted)
    assert m.plan(w, target).gathered == ()
    ta.save(tmp_path / "v.safetensors", moved)
    back = ta.load(tmp_path / "v.safetensors", w, migration=m.inverse)
    np.testing.assert_array_equal(back["w"], w["w"])


def test_a_fill_needs_the_numbers_of_a_target(tmp_path):
    m = ta.Migration({"w : a": ("w : a", {"pad": {"a": (0, 1)}, "fill": "target"})})
    w, shapes = {"w": np.ones(2)}, {"w": jax.ShapeDtypeStruct((3,), np.float64)}
    ta.save(tmp_path / "w.safetensors", w)
    text = "the target's values are kept, and no target has any: pass one with arrays"
    for target in (None, shapes):
        assert m.plan(w, target).exact  # on shapes
        with pytest.raises(ta.MigrationError, match=text):
            m(w, target)
        with pytest.raises(ta.MigrationError, match=text):
            ta.load(tmp_path / "w.safetensors", target, migration=m)
    assert m({"w": jax.ShapeDtypeStruct((2,), np.float64)}, shapes) == shapes
    with pytest.raises(ta.MigrationError, match=r"write {'cast': 'float32'}"):
        m(w, {"w": np.zeros(3, np.float32)})
    back = m.inverse.plan({"w": np.ones(3)})
    assert not back.exact  # what is cut off is not read
    assert back.unread == ()
    assert m.inverse({"w": np.arange(3.0)})["w"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "options",
    [{"fill": "target"}, {"pad": {"a": (0, 1)}, "fill": "zeros"}, {"fill": None}],
)
def test_a_fill_that_makes_no_sense_is_refused(options):
    assert "its fill is " in refused({"w : a": ("w : a", options)})


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_moments_of_a_filled_layer_are_fresh_with_a_warning():
    tx = optax.adam(1e-2)
    params = {"w": jnp.ones((2, 3))}
    _, state = tx.update(params, tx.init(params), params)
    options = {"pad": {"l": (0, 1)}, "fill": "target"}
    m = ta.Migration({"w : l a": ("w : l a", options)})
    new = m(params, {"w": jnp.full((3, 3), 5.0)})
    carried, report = ta.carry_state(tx, new, state, migration=m)
    np.testing.assert_array_equal(carried[0].mu["w"][:2], state[0].mu["w"])
    np.testing.assert_array_equal(carried[0].mu["w"][2], 0)
    (warning,) = report.warnings
    assert "mu, nu of 'w/{2}' start again" in warning
    back, report = ta.carry_state(tx, params, carried, migration=m.inverse)
    np.testing.assert_array_equal(back[0].nu["w"], state[0].nu["w"])
    assert not report.warnings


# --- the way back of what was dropped ---

DROPPING = ta.Migration(
    {"w : a b": "k : b a", "*.mask": None, ("inv/*", "freq"): None, "gone": None}
)
MASKED = {
    "w": np.arange(6.0).reshape(2, 3),
    "h.mask": np.arange(3),
    "g.mask": np.arange(4),
    "inv/x": np.ones(2),
}


def test_what_was_dropped_comes_back_of_a_target_that_has_it():
    moved = DROPPING(MASKED)
    back = DROPPING.inverse(moved, MASKED)
    assert sorted(back) == sorted(MASKED)
    assert all(back[path] is MASKED[path] for path in MASKED if path != "w")
    plan = DROPPING.inverse.plan(moved, MASKED)
    assert plan.lost == ("freq", "gone")
    assert str(plan).splitlines()[3:5] == [
        "3 leaves dropped before, kept of the target: 'g.mask', 'h.mask', 'inv/x'",
        "2 patterns of leaves dropped before, in no target: 'freq', 'gone'",
    ]
    # Without a target they are left out, and with another one too.
    assert [*DROPPING.inverse(moved)] == [*DROPPING.inverse(moved, {"w": MASKED["w"]})]
    assert "4 patterns of leaves dropped before, in no" in str(
        DROPPING.inverse.plan(moved)
    )
    # An abstract target plans, and has no numbers.
    shapes = {p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in MASKED.items()}
    assert DROPPING.inverse.plan(moved, shapes).result == shapes
    with pytest.raises(ta.MigrationError, match=r"no target has any: .*\n  'g.mask'"):
        DROPPING.inverse(moved, shapes)


@pytest.mark.slow
def test_what_was_dropped_comes_back_through_files(tmp_path):
    source, moved = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    ta.save(source, MASKED)
    ta.save(moved, DROPPING(MASKED))
    loaded = ta.load(moved, MASKED, migration=DROPPING.inverse)
    table, again = tmp_path / "m.toml", tmp_path / "i.toml"
    table.write_text(DROPPING.to_toml())
    again.write_text(DROPPING.inverse.to_toml())
    assert ta.load_migration(again) == DROPPING.inverse
    command = ["convert", str(moved), str(tmp_path / "c.safetensors"), "--force"]
    for options, paths in (
        (["--migration", str(table), "--reverse"], {"w"}),
        (["--migration", str(table), "--reverse", "--target", str(source)], {*MASKED}),
        (["--migration", str(again), "--target", str(source)], {*MASKED}),
    ):
        run(*command, *options)
        found = ta.to_flat_dict(ta.load(tmp_path / "c.safetensors"))
        assert found.keys() == paths
        for leaves in (found, loaded):
            for path in paths:
                np.testing.assert_array_equal(leaves[path], MASKED[path], strict=True)
    ta.save(tmp_path / "a.schema.toml", MASKED)
    options = ["--reverse", "--target", str(tmp_path / "a.schema.toml")]
    text = run(*command, "--migration", table, *options, code=2)
    assert "no target has any" in text


def test_what_new_adds_and_what_is_dropped_change_places():
    m = ta.Migration({"w": "k", "a/{n}": None}, new={"b": "zeros", "c/*": "target"})
    inverse = m.inverse
    assert inverse.plan({"k": 1.0, "b": np.ones(2), "c/x": np.ones(3)}).dropped == (
        "b",
        "c/x",
    )
    back = inverse.inverse
    target = {"k": 1.0, "b": np.ones(2), "c/x": np.ones(3)}
    assert back({"w": 2.0, "a/y": np.ones(4)}, target) == {**target, "k": 2.0}
    assert [*back({"w": 2.0, "a/y": np.ones(4)})] == ["k"]


# --- sizes and checked ---


def test_sizes_of_a_row_hold_in_it_alone():
    table = {
        "q : (h d)": ("q : h d", {"sizes": {"d": 4}}),
        "k : (h d)": ("k : h d", {"sizes": {"d": 2}}),
        "v : (h d)": "v : h d",
    }
    m = ta.Migration(table, sizes={"d": 3})
    shapes = {p: leaf.shape for p, leaf in m(dict.fromkeys("qkv", np.ones(12))).items()}
    assert shapes == {"q": (3, 4), "k": (6, 2), "v": (4, 3)}
    assert m.inverse.inverse == m
    assert str(m.plan(dict.fromkeys("qkv", np.ones(12)))).count("d=") == 3


def test_sizes_of_a_row_may_be_counts_of_its_leaves():
    table = {"h.{(b i)}.w : a": ("w.{i} : b a", {"sizes": {"i": 2}})}
    leaves = {f"h.{n}.w": np.full(3, n) for n in range(6)}
    moved = ta.Migration(table)(leaves)
    assert moved["w.1"][:, 0].tolist() == [1, 3, 5]
    wrong = {"h.{l}.w : a": ("w : l a", {"sizes": {"l": 7}})}
    with pytest.raises(ta.MigrationError, match="6 leaves for l, whose size is 7"):
        ta.Migration(wrong)(leaves)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sizes": {"b": 2}}, "sizes has 'b', which is not an axis of the row"),
        ({"sizes": {"a": 0}}, "its sizes are {'a': 0}"),
        ({"sizes": {"a": 2**63}}, "its sizes are {'a': "),
        ({"sizes": 3}, "its sizes are 3"),
        ({"checked": "a c"}, "checked has 'c', which is not an axis of the row"),
        ({"checked": ["a"]}, "its checked is ['a']"),
        ({"checked": ""}, "its checked is ''"),
        ({"undo": {"sizes": {"a": 2}}}, "'sizes' is not an operation"),
    ],
)
def test_notes_that_make_no_sense_are_refused(options, text):
    assert text in refused({"w : a aa": ("v : aa a", options)})


def test_notes_need_axes():
    for options in ({"sizes": {"n": 2}}, {"checked": "n"}):
        assert "which is not an axis of the row" in refused({"{n}": ("x/{n}", options)})


def test_what_was_checked_is_not_listed_again():
    table = {
        "qkv : [(h d) (h d)]": (("q : h d", "k : h d"), {"checked": "d h"}),
        "{p=gate,up} : f o": ("wi : p o f", {"checked": "p f"}),
    }
    leaves = {"qkv": np.ones(8), "gate": np.ones((3, 3)), "up": np.ones((3, 3))}
    plan = ta.Migration(table, sizes={"d": 2}).plan(leaves)
    assert plan.swappable == {0: (("part 1", "part 2"),), 1: (("f", "o"),)}
    back = ta.Migration(table, sizes={"d": 2}).inverse
    assert back.rows[0].notes.checked == ("d", "h")


def test_options_are_written_next_to_a_target_and_below_undo(tmp_path):
    options = {"repeat": {"r": 2}, "cast": ["float16", "float32"], "sizes": {"d": 2}}
    m = ta.Migration({"w : (k d)": ("w : k r d", options | {"checked": "k d"})})
    assert m.to_toml() == (
        'version = 1\n\n[[rows]]\nfrom = "w : (k d)"\nto = "w : k r d"\n'
        'repeat = { r = 2 }\ncast = ["float16", "float32"]\nsizes = { d = 2 }\n'
        'checked = "k d"\n'
    )
    assert m.inverse.to_toml().splitlines()[3:] == [
        'from = "w : k r d"',
        'to = "w : (k d)"',
        'undo = { repeat = { r = 2 }, cast = ["float16", "float32"] }',
        "sizes = { d = 2 }",
        'checked = "k d"',
    ]
    for each in (m, m.inverse):
        (tmp_path / "m.toml").write_text(each.to_toml())
        assert ta.load_migration(tmp_path / "m.toml") == each
        assert eval(repr(each), {"Migration": ta.Migration}) == each
