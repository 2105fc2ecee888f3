"""Migrations: plans, sharded arrays, hard names, and what the messages say.

See ``test_migration_tables`` for real tables against their formulas, and
``test_migration_properties`` for the laws over random ones.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command import run
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sizes import grid, slow_but
from work import calls_in, recorded_programs

import treeadapt as ta

STACK = {"l.{i}.w : (h d) e": "w : e i h d"}
LAYERS = {f"l.{i}.w": np.arange(24.0).reshape(6, 4) + i for i in range(12)}


def message(call):
    with pytest.raises(ta.MigrationError) as caught:
        call()
    assert len(str(caught.value).encode()) <= 4_000
    return str(caught.value)


# --- sharded arrays ---


@pytest.fixture(params=["Auto", "Explicit", "Explicit in force"])
def mesh(request):
    kind, *in_force = request.param.split(" ", 1)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType[kind],) * 2)
    with jax.set_mesh(mesh) if in_force else contextlib.nullcontext():
        yield mesh


TABLES = [
    ("l.{i}.w : (h d) e", "w : e i h d", {"d": 6}),
    ("l.{i}.w : h e", "w : (e i h)", {"h": 24, "e": 16}),
    ("l.{i}.w : [a b] e", ("u : e i a", "v : e i b"), {"a": 8}),
    (("l.{i}.w : a e", "k.{i}.w : a e"), "w : e i [a a]", {}),
    ("l.{i}.w : a e", ("w : e i a", "v : i e a"), {}),
    ("l.{i}.w : a e", ("w : e i a", {"pad": {"i": (1, 2)}, "scale": 2.0}), {}),
    ("l.{i}.w : (k d) e", ("w : (k r) i e d", {"repeat": {"r": 2}}), {"k": 4}),
    ("l.{i}.w : a e", (("w : r e i a", "v : i e a"), {"repeat": {"r": 8}}), {}),
]
SPECS = [P("model"), P("data", "model"), P(("model", "data"))]


@pytest.mark.parametrize(("table", "spec"), grid(TABLES, SPECS, 3))
def test_sharded_arrays_move_and_come_back(mesh, table, spec):
    source, target, sizes = table
    prefixes = "lk" if isinstance(source, tuple) else "l"
    host = {
        f"{prefix}.{i}.w": np.arange(384.0, dtype=np.float32).reshape(24, 16) + i
        for prefix, i in itertools.product(prefixes, range(4))
    }
    leaves = jax.device_put(host, NamedSharding(mesh, spec))
    m = ta.Migration({source: target}, sizes=sizes)
    moved = m(leaves)
    for path, leaf in m(host).items():
        np.testing.assert_array_equal(moved[path], leaf)
        assert moved[path].sharding.mesh == mesh
    back = m.inverse(moved, leaves)
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(back[path], leaf)
        assert back[path].sharding == leaf.sharding


def test_a_sharded_stack_is_not_gathered(mesh):
    leaves = jax.device_put(
        {f"l.{i}.w": jnp.ones((24, 44)) + i for i in range(4)},
        NamedSharding(mesh, P("model", "data")),
    )
    target = jax.ShapeDtypeStruct(
        (44, 4, 4, 6),
        jnp.float32,
        sharding=NamedSharding(mesh, P("data", None, "model")),
    )
    m = ta.Migration(STACK)
    with recorded_programs() as programs:
        assert m(leaves, {"w": target})["w"].sharding == target.sharding
    ((_, text),) = programs
    for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert word not in text


def test_arrays_of_one_device_go_where_the_target_is(mesh):
    sharding = NamedSharding(mesh, P(None, None, None, "data"))
    target = {"w": jax.ShapeDtypeStruct((4, 12, 3, 2), jnp.float32, sharding=sharding)}
    for leaves in (
        jax.device_put(LAYERS, jax.devices()[3]),
        jax.tree.map(jnp.asarray, LAYERS),
    ):
        assert ta.Migration(STACK)(leaves, target)["w"].sharding == sharding


def submesh(devices, kind):
    every = np.array(devices)
    return NamedSharding(jax.sharding.Mesh(every, ("x",), axis_types=(kind,)), P("x"))


@pytest.mark.parametrize("source", ["anywhere", "one device", "mesh"])
@pytest.mark.parametrize("stages", ["devices", "meshes", "orders"])
def test_each_leaf_goes_to_its_own_sharding(mesh, source, stages):
    kind, devices = mesh.axis_types[0], jax.devices()
    shardings = {
        "devices": [jax.sharding.SingleDeviceSharding(each) for each in devices[:4]],
        "meshes": [submesh(devices[2 * i : 2 * i + 2], kind) for i in range(4)],
        "orders": [submesh(np.roll(devices, i), kind) for i in range(4)],
    }[stages]
    w = np.arange(4.0 * 8 * 16).reshape(4, 8, 16).astype(np.float32)
    place = {
        "anywhere": None,
        "one device": devices[5],
        "mesh": NamedSharding(mesh, P(None, "data", "model")),
    }[source]
    target = {
        f"stage.{i}": jax.ShapeDtypeStruct((16, 8), np.float32, sharding=sharding)
        for i, sharding in enumerate(shardings)
    }
    target["stage.1"] = jax.ShapeDtypeStruct((16, 8), np.float32)  # anywhere
    m = ta.Migration({"w : i a b": "stage.{i} : b a"})
    stacked = {"w": jnp.asarray(w) if place is None else jax.device_put(w, place)}
    for i, (path, leaf) in enumerate(m(stacked, target).items()):
        np.testing.assert_array_equal(leaf, w[i].T)
        if i != 1:
            assert leaf.sharding == target[path].sharding


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_leaves_on_other_devices_each_come_together(mesh, dtype):
    kind, devices = mesh.axis_types[0], jax.devices()
    w = jnp.arange(4 * 8 * 16, dtype=dtype).reshape(4, 8, 16)
    stages = {
        f"stage.{i}": jax.device_put(w[i], submesh(devices[2 * i : 2 * i + 2], kind))
        for i in range(4)
    }
    m = ta.Migration({"stage.{i} : a b": "w : i b a"})
    sharding = NamedSharding(mesh, P(None, "data", "model"))
    like = jax.ShapeDtypeStruct((4, 16, 8), dtype, sharding=sharding)
    made = m(stages, {"w": like})["w"]
    np.testing.assert_array_equal(made, w.swapaxes(1, 2))
    assert made.sharding == sharding
    # Nothing says where they belong without a target.
    with pytest.raises(ValueError, match="incompatible devices"):
        m(stages)


def test_sharded_arrays_keep_zeros_below_zero_and_subnormal_numbers(mesh):
    bits = np.array([0x80000000, 1, 0x80000001, 0x7F800001, 0x7FC00123], np.uint32)
    w = np.tile(bits, (8, 2)).view(np.float32)
    sharded = jax.device_put(w, NamedSharding(mesh, P("data")))
    m = ta.Migration({"w : (i a) b": "{i} : a b"}, sizes={"i": 4})
    for i, part in enumerate(m({"w": sharded}).values()):
        expected = w[2 * i : 2 * i + 2].view(np.uint32)
        np.testing.assert_array_equal(np.asarray(part).view(np.uint32), expected)


def test_groups_of_one_form_are_compiled_once():
    leaves = {f"{n}.{i}.w": jnp.ones((61, 43)) for n in "abc" for i in range(2)}
    with recorded_programs() as programs:
        ta.Migration({"{n}.{i}.w : a b": "{n}/w : b i a"})(leaves)
    assert len(programs) == 3
    assert len({*programs}) == 1


def test_arrays_on_different_devices_are_named_by_jax():
    one, two = (jax.device_put(LAYERS["l.0.w"], each) for each in jax.devices()[:2])
    m = ta.Migration({"{i}.w : a b": "w : i a b"})
    with pytest.raises(ValueError, match=r"devices.* ids \[0\] .* \[1\]") as caught:
        m({"0.w": one, "1.w": two, "2.w": one})
    assert "row '{i}.w : a b', which makes 'w' of '0.w'" in caught.value.__notes__[-1]
    anywhere = jnp.asarray(LAYERS["l.0.w"])
    assert m({"0.w": one, "1.w": anywhere})["w"].shape == (2, 6, 4)


def test_errors_of_jax_name_the_row_and_its_leaves():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,))
    leaves = jax.device_put(
        {f"l.{i}.w": jnp.ones((24, 16)) for i in range(2)},
        NamedSharding(mesh, P("model")),
    )
    m = ta.Migration(STACK, sizes={"h": 6})
    with pytest.raises(Exception, match="reshape") as caught:
        jax.jit(m)(leaves)
    notes = "".join(caught.value.__notes__)
    assert "row 'l.{i}.w : (h d) e', which makes 'w' of 'l.0.w', 'l.1.w'" in notes
    assert "jax.sharding.auto_axes" in notes
    auto = jax.sharding.auto_axes(m, out_sharding={"w": P()})
    with jax.set_mesh(mesh):
        assert jax.jit(auto)(leaves)["w"].shape == (16, 2, 6, 4)


# --- who owns what ---


def test_rows_without_axes_give_the_callers_own_objects():
    key = jax.random.key(0)
    leaves = {"a": LAYERS["l.0.w"], "b": 3, "c": key, "d": jax.nn.relu}
    moved = ta.Migration({"{n}": "x/{n}"})(leaves)
    assert [*moved] == ["x/a", "x/b", "x/c"]
    assert moved["x/a"] is leaves["a"]
    assert moved["x/c"] is key


def test_typed_keys_stack():
    leaves = {f"{i}/key": jax.random.key(i) for i in range(3)}
    m = ta.Migration({"{l}/key : ": "key : l"})
    moved = m(leaves)
    assert moved["key"].dtype == leaves["0/key"].dtype
    back = m.inverse(moved)
    assert all(jnp.all(back[path] == leaf) for path, leaf in leaves.items())


def test_numpy_in_the_order_of_the_sources_is_not_copied_twice():
    moved = ta.Migration({"l.{i}.w : a b": "w : b i a"})(LAYERS)["w"]
    assert moved.shape == (4, 12, 6)
    assert moved.transpose(1, 2, 0).flags.c_contiguous
    one = LAYERS["l.3.w"]
    assert np.shares_memory(ta.Migration({"w : a b": "v : b a"})({"w": one})["v"], one)


@pytest.mark.parametrize(
    ("table", "shared"),
    [
        ({"a": "b"}, True),
        ({"a : x y": "b : y x"}, True),
        ({"a : x y": "b : (x y)"}, True),
        ({"a : x y": "b/{x} : y"}, True),
        ({"a : [x x] y": ("b : x y", "c : x y")}, True),
        ({"a : x y": ("b : x y", "c : y x")}, True),
        ({"a : x y": "b : (y x)"}, False),
        ({"a": ("b", {"scale": 2.0})}, False),
        ({"a": ("b", {"cast": "float32"})}, False),
        ({"a : x y": ("b : x y", {"pad": {"x": (0, 1)}})}, False),
        ({"a.{x} : y z": "b : x y z"}, True),  # a stack of one array
    ],
)
def test_what_may_share_memory_with_the_source(table, shared):
    one = np.arange(8.0).reshape(2, 4)
    stacked = "a.{x} : y z" in table
    moved = ta.Migration(table)({"a.0": one} if stacked else {"a": one})
    assert all(np.shares_memory(leaf, one) == shared for leaf in moved.values())


# --- names ---


@pytest.mark.parametrize(
    ("template", "path", "found"),
    [
        ("{p=x-y,x}-{n}", "x-y-3", {"p": "x", "n": "y-3"}),
        ("{p=x-y,x}-{n+0}", "x-y-3", {"p": "x-y", "n": "3"}),
        ("{p=x-y,x}-{n}", "x-3", {"p": "x", "n": "3"}),
        ("{a}_{n+60}", "b_c_61", {"a": "b_c", "n": "1"}),
        ("{a}_{n+60}", "b_61_61", {"a": "b_61", "n": "1"}),
        ("{n+60}5{m}", "5905", None),
        ("{n+60}5{m}", "51655x", {"n": "456", "m": "5x"}),
        ("{a:**}/x/{b:**}", "x/x/y", {"a": "", "b": "/x/y"}),
        ("{a:**}/x{n}/{b:**}", "p/x1/x2", {"a": "/p", "n": "1", "b": "/x2"}),
        ("{a}1{p=1,a}a/{b:**}", "111aa/c", {"a": "11", "p": "a", "b": "/c"}),
        (r"a\/{n}\/\{b", "a/1/{b", {"n": "1"}),
        ("{n+0}", "01", None),
        ("{n+0}", "9" * 30, None),
        ("{a}{b", "", None),
    ],
)
def test_captures_are_the_leftmost_shortest_of_their_kind(template, path, found):
    names = re.findall(r"(?<!\\){(\w+)", template)
    many = re.findall(r"{(\w+):\*\*}", template)
    filled = [f"/{{{name}:**}}" if name in many else f"{{{name}}}" for name in names]
    target = "/".join(map("{}={}".format, names, filled))

    def rename():
        return ta.Migration({template: target})({path: 1.0})

    if found is None:
        problem = "column 4" if template == "{a}{b" else "no leaf is taken by"
        assert problem in message(rename)
    else:
        texts = (found[name] for name in names)
        assert [*rename()] == ["/".join(map("{}={}".format, names, texts))]


def test_hostile_names_take_no_time():
    text = "_".join(f"{{c{i}}}" for i in range(200)) + "x"
    names = ["a_" * 2_000, "_" * 4_000, "a" * 100_000]
    said = message(lambda: ta.Migration({text: "y"})(dict.fromkeys(names, 0.0)))
    assert "no leaf is taken by" in said


# --- plans ---


def test_a_plan_says_rows_sizes_and_what_shapes_cannot_show():
    m = ta.Migration(
        {
            "l.{i}.w : (h d) e": "w : e i h d",
            ("a : x y", "b : x y"): "c : y x",
            "f": ("g", np.negative),
            "old.*": None,
        },
        sizes={"h": 3},
    )
    leaves = {**LAYERS, "a": np.ones((2, 2)), "b": np.ones((2, 2)), "f": np.ones(1)}
    plan = m.plan({**leaves, "old.x": np.ones(3), "act": jax.nn.relu})
    text = str(plan)
    assert text.startswith("16 leaves become 3 leaves.")
    assert "'l.{i}.w : (h d) e' -> 'w : e i h d': 12 to 1" in text
    assert "i=12, h=3, d=2, e=4" in text
    assert "shapes do not tell apart: h and d" in text
    assert "shapes do not tell apart: x and y" in text
    assert "'old.*' -> dropped" in text
    assert "left out: 'act'" in text
    assert "'a : x y, b : x y': its sources must be equal" in text
    assert "a function decides" in text
    assert "not exact" in text
    assert plan.one_way == ("g",)
    assert plan.dropped == ("old.x",)
    assert plan.peak_bytes == 2 * 12 * 24 * 8


def test_a_plan_holds_no_array():
    plan = ta.Migration({"{n:**}": "x/{n:**}"}).plan(LAYERS)
    leaves = [*plan.source.values(), *plan.result.values()]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_a_dropped_capture_is_one_way():
    m = ta.Migration({"{a}.w": "w"})
    assert m.plan({"x.w": 1.0}).one_way == ("w",)
    assert "'{a}.w'" in message(lambda: m.inverse)


def test_the_shapes_of_the_target_confirm_a_shorter_group():
    leaves = {
        f"{n}/{i}/w": np.ones(3) for n, k in {"e": 4, "d": 2}.items() for i in range(k)
    }
    m = ta.Migration({"{n}/{l}/w : a": "{n}/w : l a"})
    assert "'d/0/w', 'd/1/w' without 'd/2/w', 'd/3/w'" in message(lambda: m(leaves))
    target = {"e/w": np.ones((4, 3)), "d/w": np.ones((2, 3))}
    assert {path: leaf.shape for path, leaf in m(leaves, target).items()} == {
        "d/w": (2, 3),
        "e/w": (4, 3),
    }


# --- how much is tried ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "name"),
    [
        ("r#.{x}", "s#/{x}", "r#.w"),
        ("{x}.r#", "s#/{x}", "w.r#"),
        ("l.{i}.r#.{x}", "s#/{i}/{x}", "l.3.r#.w"),
        ("{x:**}/r#/{y:**}", "{x:**}/s#/{y:**}", "a/r#/b"),
        ("r#a{x}", "s#a{x}", "r#ab"),
        ("r#/{x:**}", "s#/{x:**}", "r#"),
        ("r#", "s#", "r#"),
    ],
)
def test_few_rows_are_tried_for_each_leaf(source, target, name):
    def calls(count):
        numbers = [str(number) for number in range(count)]
        rows = {source.replace("#", n): target.replace("#", n) for n in numbers}
        leaves = {name.replace("#", n): 1.0 for n in numbers}
        m, plans = ta.Migration(rows), []
        work = calls_in(lambda: plans.append(m.plan(leaves)))
        assert [group.place for group in plans[0].groups] == [*range(count)]
        return work

    assert calls(300) < 3.3 * calls(100)


def test_the_first_of_the_rows_that_match_takes_a_leaf():
    table = [("{x}.{y}.c", "1/{x}"), ("a.{x}.{y}", "2/{y}"), ("{x:**}", "3/{x:**}")]
    for order in itertools.permutations(table):
        m = ta.Migration([*order, ("a.b.c", "4"), ("z", "5")])
        plan, _ = m.planned({"a.b.c": 1.0, "z": 1.0}, None)
        assert plan.groups[0].row.sources[0].text == order[0][0]


def test_an_entry_of_new_that_an_earlier_one_hides_is_an_error():
    m = ta.Migration({"a": "b"}, new={"h/*": "zeros", "h/w": "target"})
    said = message(lambda: m.plan({"a": 1.0}, {"b": 1.0, "h/w": np.ones(3)}))
    assert said == "1 entry: of new= for which the target has no unfilled leaf\n  'h/w'"


# --- functions ---


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x[:1], "float64[1], and the target has float64[3]"),
        (lambda x: x.astype("f4"), "float32[3], and the target has float64[3]"),
        (lambda x: None, "a NoneType, which is not an array"),
        (lambda x: {"d": x}, "a dict, which is not an array"),
    ],
)
def test_what_a_function_makes_must_fit_the_target(function, text):
    target = {"c": np.zeros(3)}
    for row in (("c", function), (("c",), lambda x: (function(x),))):
        said = message(
            lambda row=row: ta.Migration({"a": row})({"a": np.ones(3)}, target)
        )
        assert f"made 'c' of 'a': {text}." in said


def test_a_function_may_make_a_number_or_an_abstract_array():
    m = ta.Migration({"a": ("c", lambda x: 3.0), "b": ("d", lambda x: x.T)})
    target = {"c": np.float32(0), "d": jax.ShapeDtypeStruct((3, 2), "f4")}
    assert m({"a": 1, "b": np.ones((2, 3), "f4")}, target)["c"] == 3.0
    leaves = {"a": 1, "b": jax.ShapeDtypeStruct((2, 3), "f4")}
    assert m(leaves, target)["d"].shape == (3, 2)


# --- what is not a number ---


class Mode(enum.IntEnum):
    TRAIN = 1


def test_members_of_enums_are_static():
    m = ta.Migration({"a": "b", "n": "m"})
    leaves = {"a": np.ones(3), "n": True, "mode": Mode.TRAIN}
    assert m.plan(leaves).static == ("mode",)
    assert [*m(leaves)] == ["b", "m"]
    said = message(lambda: ta.Migration({"{x}": "{x}", "mode": "c"})(leaves))
    assert "'mode' ('mode': not an array, and needs no row)" in said
    said = message(lambda: m(leaves, {"b": np.ones(3), "m": Mode.TRAIN}))
    assert "'m': a Mode, the row 'n' makes a bool" in said
    made = ta.Migration({"a": ("b", lambda x: Mode.TRAIN), "n": None})
    assert "a Mode, which is not an array" in message(lambda: made(leaves))


# --- arrays that cannot be moved ---


class Lazy:
    shape, dtype = (2,), np.dtype("float32")


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (np.ma.masked_array(np.ones(2, "f4"), [True, False]), "whose mask would be"),
        (Lazy(), "not an array of NumPy or JAX"),
    ],
)
def test_what_would_lose_something_is_not_moved(leaf, text):
    m = ta.Migration({"{l}.w : a": "w : l a"})
    for leaves in ({"0.w": leaf}, {"0.w": np.ones(2, "f4"), "1.w": leaf}):
        said = message(lambda leaves=leaves: m(leaves))
        assert text in said
        assert repr([*leaves][-1]) in said
    renamed = ta.Migration({"0.w": "w"})
    assert renamed({"0.w": leaf})["w"] is leaf


@pytest.mark.parametrize(
    ("dtype", "typed", "fits"),
    [
        ("float32", {"scale": 1e300}, False),
        ("float32", {"scale": -1e300}, False),
        ("float32", {"scale": 1e-60}, False),
        ("float32", {"offset": -1e39}, False),
        ("bfloat16", {"scale": 1e39}, False),
        ("complex64", {"scale": 1e39}, False),
        ("float16", {"scale": 1e30}, True),
        ("float64", {"scale": 1e300, "offset": 1e39}, True),
        ("complex128", {"scale": 1e-60}, True),
    ],
)
def test_a_scale_is_a_number_of_the_computation(dtype, typed, fits):
    m = ta.Migration({"a": ("b", typed)})
    leaf = np.zeros(2, jnp.dtype(dtype))
    if fits:
        assert m({"a": leaf})["b"].dtype == leaf.dtype
        return
    assert f" {next(iter(typed))} of" in message(lambda: m({"a": leaf}))
    assert "which cannot hold" in message(lambda: m.inverse({"b": leaf}))


WITHOUT_ZERO = [
    np.ones(2, jnp.float8_e8m0fnu),
    np.array(["1", "2"]),
    np.array([None, 1]),
    np.zeros(2, "M8[s]"),
    jax.random.split(jax.random.key(0)),
]


@pytest.mark.parametrize("leaf", WITHOUT_ZERO, ids=lambda leaf: str(leaf.dtype))
def test_what_has_no_zero_is_not_padded_or_made_of_zeros(leaf):
    m = ta.Migration({"a : x": ("b : x", {"pad": {"x": (0, 1)}})})
    text = f"{leaf.dtype} has no zeros to pad with"
    assert f"'a': {text}" in message(lambda: m({"a": leaf}))
    assert f"'b': {text}" in message(lambda: m.inverse({"b": leaf}))
    new = ta.Migration({"a": "b"}, new={"c": "zeros"})
    for one in (np.ones(2), jnp.ones(2)):
        said = message(lambda one=one: new({"a": one}, {"b": one, "c": leaf}))
        assert "new= cannot make zeros for\n  'c'" in said
    e8m0 = {"pad": {"x": (0, 1)}, "cast": "float8_e8m0fnu"}
    narrow = ta.Migration({"a : x": ("b : x", e8m0)})
    assert "'a': float8_e8m0fnu has" in message(lambda: narrow({"a": np.ones(2)}))


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64", "int4"])
def test_what_has_a_zero_is_padded(dtype):
    m = ta.Migration({"a : x": ("b : x", {"pad": {"x": (1, 2)}})})
    leaf = np.ones(2).astype(jnp.dtype(dtype))
    padded = m({"a": leaf})
    assert padded["b"].astype(bool).tolist() == [False, True, True, False, False]
    np.testing.assert_array_equal(m.inverse(padded)["a"], leaf)


@pytest.mark.parametrize(
    "given",
    [
        {"sizes": 3},
        {"sizes": ["d"]},
        {"sizes": {"d": True}},
        {"sizes": {"d": np.True_}},
        {"sizes": {"d": 2.0}},
        {"sizes": {"d": np.int64(0)}},
        {"new": 3},
        {"new": ["a"]},
        {"new": "zeros"},
        {"new": {"a": ["zeros"]}},
    ],
)
def test_sizes_and_new_of_other_types_are_malformed(given):
    assert "{" not in message(lambda: ta.Migration({"a : d": "b : d"}, **given))


def test_further_axes_have_no_size_and_no_padding():
    text = "'...', which is not an axis of"
    table = {"a : x ...": "b : ... x"}
    assert text in message(lambda: ta.Migration(table, sizes={"...": 2}))
    table = {"a : x ...": ("b : ... x", {"pad": {"...": (0, 1)}})}
    assert text in message(lambda: ta.Migration(table))


def test_a_path_in_new_has_no_axes():
    new = {"w : x": "zeros"}
    assert "at column 2: axes" in message(lambda: ta.Migration({"a": "b"}, new=new))


def test_a_size_is_any_integer():
    m = ta.Migration({"a : (h d)": "b : h d"}, sizes={"d": np.int64(2)})
    assert type(m.sizes["d"]) is int
    assert m({"a": np.ones(6)})["b"].shape == (3, 2)


@pytest.mark.parametrize(
    ("narrow", "dtype"),
    [("float32", "float64"), ("int8", "int64"), ("complex64", "complex128")],
)
def test_jax_does_not_narrow_what_the_plan_says(narrow, dtype):
    cast = ta.Migration({"a": ("b", {"cast": dtype})})
    new = ta.Migration({"a": "b"}, new={"c": "zeros"})
    source, like = jnp.ones(2, narrow), jax.ShapeDtypeStruct((2,), np.dtype(dtype))
    target = {"b": jax.ShapeDtypeStruct((2,), np.dtype(narrow)), "c": like}
    assert not jax.config.jax_enable_x64
    said = message(lambda: cast({"a": source}))
    assert f"'b' would be {dtype}, which needs jax_enable_x64" in said
    said = message(lambda: new({"a": source}, target))
    assert f"'c': {dtype} needs jax_enable_x64" in said
    assert cast({"a": np.asarray(source)})["b"].dtype == dtype
    assert new({"a": np.asarray(source)}, target)["c"].dtype == dtype
    assert cast({"a": jax.ShapeDtypeStruct((2,), narrow)})["b"].dtype == dtype


SMALL = ["float8_e8m0fnu", "float8_e5m2", "float4_e2m1fn"]


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("narrow", SMALL)
@pytest.mark.parametrize("xp", [np, jnp])
def test_dtypes_of_8_bits_are_cast(xp, narrow, dtype):
    m = ta.Migration({"a": ("b", {"cast": dtype})})
    leaf = xp.asarray([1.0, 4.0]).astype(jnp.dtype(narrow))
    found = m({"a": leaf})["b"]
    assert found.dtype == dtype
    assert np.asarray(found).astype(np.float32).tolist() == [1, 4]


@pytest.mark.parametrize(("narrow", "dtype"), [("int4", "int2"), ("uint2", "int4")])
def test_integers_of_few_bits_are_cast(narrow, dtype):
    m = ta.Migration({"a": ("b", {"cast": dtype})})
    leaf = np.array([1, 0]).astype(jnp.dtype(narrow))
    assert m({"a": leaf})["b"].astype(int).tolist() == [1, 0]
    if narrow == "int4":
        said = message(lambda: m({"a": np.array([3, 0]).astype(jnp.dtype(narrow))}))
        assert "do not fit their new dtype" in said


# --- messages ---


def test_sizes_say_what_is_known():
    assert "the size of 'h', 'd' stays open" in message(
        lambda: ta.Migration(STACK)(LAYERS)
    )
    assert "axis 0 of 'l.0.w' has size 6, and (h d) has h=4" in message(
        lambda: ta.Migration(STACK, sizes={"h": 4})(LAYERS)
    )
    assert "12 leaves for i, whose size is 4" in message(
        lambda: ta.Migration(STACK, sizes={"i": 4, "h": 3})(LAYERS)
    )
    assert "'l.{i}.w : h d e' has axes for 3" in message(
        lambda: ta.Migration({"l.{i}.w : h d e": "w : e i h d"})(LAYERS)
    )


def test_a_second_run_is_an_error_that_names_the_new_leaves():
    m = ta.Migration(STACK, sizes={"h": 3})
    assert "no row takes\n  'w'" in message(lambda: m(m(LAYERS)))


def test_numbers_have_no_axes():
    m = ta.Migration({"{n}/{l} : ": "{n} : l"})
    assert "'a/0' is a Python number" in message(lambda: m({"a/0": 1, "a/1": 2}))


def test_numbers_are_not_scaled():
    said = message(lambda: ta.Migration({"a": ("b", {"scale": 2.0})})({"a": 1}))
    assert "its values cannot be changed so\n  'a' is a Python number" in said


def test_targets_of_a_group_that_fails_are_not_missing_too():
    m = ta.Migration({**STACK, "{n}": "x/{n}"})
    target = {"w": np.ones(3), "x/b": np.ones(1), "x/c": np.ones(1)}
    said = message(lambda: m({**LAYERS, "b": np.ones(1)}, target))
    assert "'l.0.w': the size of 'h', 'd' stays open" in said
    assert said.endswith("1 leaf: nothing fills\n  'x/c'")


def test_messages_are_sentences():
    m = ta.Migration({"{a}.{n}": "{n}"})
    said = message(lambda: m(dict.fromkeys(("a.w", "b.w", "a.v", "b.v"), 1.0)))
    assert said.startswith("2 clashes: two leaves get the name of")
    assert str(ta.Migration({"a": "b"}).plan({"a": 1.0})).startswith(
        "1 leaf becomes 1 leaf."
    )
    pad = ta.Migration({"a : x": ("b : x", {"pad": {"x": (2, 2)}})})
    assert "without padding has size -1, which no axis has" in message(
        lambda: pad.inverse({"b": np.ones(3)})
    )
    assert "axis 0 of 'a' has size 3, and the row has 1" in message(
        lambda: ta.Migration({"a : 1": "b : 1"})({"a": np.ones(3)})
    )


def test_scaling_integers_is_refused():
    m = ta.Migration({"a : x": ("b : x", {"scale": 2})})
    assert "int64, which cannot be scaled" in message(lambda: m({"a": np.arange(3)}))


def test_a_row_that_matches_only_static_leaves_says_so():
    m = ta.Migration({"w": "v", "act": "fn"})
    said = message(lambda: m({"w": np.ones(2), "act": jax.nn.relu}))
    assert "'act' ('act': not an array, and needs no row)" in said


def test_a_migration_reads_as_it_was_typed():
    m = ta.Migration(
        {"a : x y": ("b : y x", {"scale": 2.0, "pad": {"x": (0, 1)}}), "c": None},
        sizes={"x": 3},
        new={"d": "zeros"},
    )
    assert eval(repr(m), {"Migration": ta.Migration}) == m
    back = m.inverse
    assert eval(repr(back), {"Migration": ta.Migration}) == back
    assert hash(m) == hash(eval(repr(m), {"Migration": ta.Migration}))
    assert back.inverse != m  # what was dropped does not come back


def test_order_of_the_source_does_not_matter():
    m = ta.Migration(STACK, sizes={"h": 3})
    backwards = dict(reversed(LAYERS.items()))
    np.testing.assert_array_equal(m(LAYERS)["w"], m(backwards)["w"])


def test_a_migration_runs_inside_jit():
    m = ta.Migration(STACK, sizes={"h": 3})
    moved = jax.jit(m)(jax.tree.map(jnp.asarray, LAYERS))
    np.testing.assert_array_equal(moved["w"], m(LAYERS)["w"].astype(np.float32))


# --- what contradicts itself ---


@pytest.mark.parametrize(
    ("path", "sizes", "name"),
    [
        ("w.{(b i)}.{i}", {"i": 2}, "w.0.1"),
        ("w.{(b i)}.{(i b)}", {"b": 2, "i": 2}, "w.1.1"),
    ],
)
def test_a_leaf_whose_numbers_contradict_each_other_is_an_error(path, sizes, name):
    leaves = {f"w.{j}": np.ones(1) for j in ("0.0", "0.1", "1.1", "2.2", "3.3")}
    m = ta.Migration({f"{path} : e": "w : b i e"}, sizes=sizes)
    assert f"{name!r}: its numbers contradict each other" in message(lambda: m(leaves))


def test_two_lists_of_one_text_on_one_side_are_an_error():
    table = {("a.{p=x,y}", "b.{p=u,v}"): "c.{p}"}
    assert "two lists of 'p' are on one side" in message(lambda: ta.Migration(table))


@pytest.mark.parametrize("target", ["c : x ...", "c : [x y] ..."])
def test_arrays_with_other_numbers_of_further_axes_are_unequal(target):
    second = "y" if "y" in target else "x"
    m = ta.Migration({("a : x ...", f"b : {second} ..."): target})
    leaves = {"a": np.ones((2, 3)), "b": np.ones((2, 3, 1))}
    assert "'b' is float64[2,3,1]" in message(lambda: m(leaves))


@pytest.mark.parametrize(
    "leaf", [np.array([None, 1]), np.array(["1"]), jax.random.key(0)]
)
def test_what_holds_no_numbers_is_not_cast(leaf):
    m = ta.Migration({"a": ("b", {"cast": "float32"})})
    assert "float32 is another kind of number" in message(lambda: m({"a": leaf}))


def test_copies_of_objects_are_compared():
    m = ta.Migration({("a", "b"): "c"})
    one, two = np.array([None, 1]), np.array([None, 2])
    assert [*m({"a": one, "b": one.copy()})] == ["c"]
    assert "not equal" in message(lambda: m({"a": one, "b": two}))


@pytest.mark.parametrize(
    "typed", [{"scale": 10**400}, {"offset": -(10**400)}, {"cast": None}, {"cast": []}]
)
def test_operations_without_a_meaning_are_malformed(typed):
    assert "is malformed" in message(lambda: ta.Migration({"a": ("b", typed)}))


@pytest.mark.parametrize(
    "table",
    [
        {"a": ("b", "c")},
        {("a", "b"): "c"},
        {"a": (("b",), (lambda x: (x,), lambda x: x))},
        {("a",): ("b", (lambda x: x, lambda x: (x,)))},
        {"a : x": ("b : x", {"scale": 2.0, "pad": {"x": (1, 2)}})},
    ],
)
def test_backwards_twice_is_the_migration(table):
    m = ta.Migration(table)
    leaves = dict.fromkeys(("a", "b") if ("a", "b") in table else ("a",), np.ones(2))
    assert m.inverse.inverse == m
    assert repr(m.inverse.inverse) == repr(m)
    again = m.inverse(m(leaves))
    assert [*again] == [*leaves]
    np.testing.assert_array_equal(again["a"], leaves["a"])


# --- what a plan must not pass over ---


def test_leaves_of_the_other_side_or_below_a_prefix_get_advice():
    m = ta.Migration({"h.{l}.w : o i": "h/w : l i o", "b": "bias"})
    leaves = {f"h.{n}.w": np.ones((2, 3)) for n in range(2)} | {"b": np.ones(3)}
    for wrong, text in (
        (m(leaves), "look like names of the other side of the rows: use migration.inv"),
        (m(leaves) | {"more": np.ones(3)}, "other side of the rows: use migration.inv"),
        ({"model": leaves}, "Without 'model/' in front, rows name such leaves"),
    ):
        with pytest.raises(ta.MigrationError, match=text):
            m(wrong)
    with pytest.raises(ta.MigrationError) as caught:
        m({"other": np.ones(3)})
    assert "other side" not in str(caught.value)
    assert "in front" not in str(caught.value)


class Tensor:
    """What PyTorch's tensors have."""

    shape = (2, 3)
    dtype = type("dtype", (), {"__repr__": lambda self: "torch.float32"})()


def test_an_array_of_another_library_is_named():
    text = r"The leaf 'h.0.w' is a .*Tensor of torch.float32, not an array of NumPy"
    table = ta.Migration({"h.{l}.w : o i": "h/w : l i o"})
    for use in (table, lambda leaves: ta.draft_migration(leaves, {"w": np.ones(3)})):
        with pytest.raises(ta.MigrationError, match=text) as caught:
            use({"h.0.w": Tensor()})
        assert "x.detach().numpy()" in str(caught.value)


def test_a_plan_lists_what_shapes_cannot_tell_apart():
    table = {
        "a : e [(h d) (k d) (k d)]": ("q : e h d", "k : e k d", "v : e k d"),
        "h/{(b i)}/w : e": "{i}/w : b e",
        "g/{(b i)}": "g{b}/{i}",
        "{p=gate,up}.w : r o": "kernel : p r o",
        "wi : r o p": "{p=wi_0,wi_1} : r o",
        "{x=one,two}": "{x=1,2}",  # names are on both sides, and no axis
        "n.{l}.q : (a c) e": "n/q : l e a c",
    }
    m = ta.Migration(table, sizes={"h": 6, "d": 2, "i": 2, "a": 2})
    leaves = {"a": np.ones((5, 20)), "gate.w": np.ones((3, 7)), "up.w": np.ones((3, 7))}
    leaves |= {f"h/{n}/w": np.ones(5) for n in range(6)} | {"wi": np.ones((3, 7, 2))}
    leaves |= {f"g/{n}": np.ones(5) for n in range(6)} | {"one": 1.0, "two": 2.0}
    leaves |= {f"n.{n}.q": np.ones((22, 22)) for n in range(3)}
    plan = m.plan(leaves)
    assert plan.swappable == {
        0: (("part 2", "part 3"), ("h", "d"), ("k", "d")),
        1: (("b", "i"),),
        2: (("b", "i"),),
        3: (("p", "p"),),
        4: (("p", "p"),),
        6: (("a", "c"), ("(a c)", "e")),
    }
    assert "    shapes do not tell apart: part 2 and part 3, h and d" in str(plan)
    assert "    shapes do not tell apart: the texts of p\n" in str(plan)
    back = m.inverse.plan(m(leaves), leaves)
    assert {tuple(sorted(pairs)) for pairs in back.swappable.values()} == {
        tuple(sorted(pairs)) for pairs in plan.swappable.values()
    }


GROUPED = {"q.w": np.ones((2048, 7)), "k.w": np.ones((512, 7))}


def test_only_the_outermost_name_has_two_sizes_in_one_row():
    row = {"{n}.w : (h d) e": "{n} : e h d"}
    said = message(lambda: ta.Migration(row, sizes={"h": 16})(GROUPED))
    assert said.splitlines()[1:] == [
        "  d is 32 in 'k.w' and 128 in 'q.w'. Only h, the outermost of (h d), may "
        "differ: write the size of d in sizes=, or those of this row next to its "
        "target, pass a target, or write two rows"
    ]
    by_size = ta.Migration(row, sizes={"d": 64})(GROUPED)
    assert (by_size["q"].shape, by_size["k"].shape) == ((7, 32, 64), (7, 8, 64))
    # With a target there is no doubt, nor where the row itself has the size.
    key, value = next(iter(row.items()))
    by_row = ta.Migration({key: (value, {"sizes": {"h": 16}})})(GROUPED)
    assert (by_row["q"].shape, by_row["k"].shape) == ((7, 16, 128), (7, 16, 32))
    target = {"q": np.ones((7, 16, 128)), "k": np.ones((7, 16, 32))}
    assert ta.Migration(row, sizes={"h": 16}).plan(GROUPED, target).one_way == ()
    target["k"] = np.ones((7, 4, 128))
    said = message(lambda: ta.Migration(row, sizes={"h": 16}).plan(GROUPED, target))
    assert "'k': float64[7,4,128], the row" in said
    # Neither is there where an array has an axis for it, or a number in a bracket.
    back = ta.Migration(row).inverse(target)
    assert back["k.w"].shape == (512, 7)
    fused = {"{n} : e [(h d) (k d)]": ("{n}/q : e h d", "{n}/k : e k d")}
    leaves = {"a": np.ones((3, 20)), "b": np.ones((3, 40))}
    said = message(lambda: ta.Migration(fused, sizes={"h": 4, "k": 1})(leaves))
    assert "d is 4 in 'a' and 8 in 'b'" in said


def test_a_target_that_lacks_a_path_is_said_to():
    m = ta.Migration({"h.{l}.q : (k d) e": "blok/q : l e k d"})
    leaves = {f"h.{i}.q": np.ones((4, 3)) for i in range(2)}
    target = {"blocks/q": np.ones((2, 3, 2, 2))}
    said = message(lambda: m(leaves, target))
    assert said.splitlines() == [
        "1 group: sizes contradict each other or stay open",
        "  'h.0.q': the size of 'k', 'd' stays open: the target has no 'blok/q'",
        "1 leaf: nothing fills",
        "  'blocks/q' (the nearest is 'blok/q')",
        "1 leaf: the target does not have",
        "  'blok/q' (the nearest is 'blocks/q')",
    ]
    said = message(lambda: m(leaves, {"blok/q": np.ones(3)}))
    assert "and the target does not show it; write it in sizes= of ta.Mig" in said


def test_a_row_of_captures_that_is_misspelt_has_the_nearest_leaf():
    leaves = {
        f"model/blocks/{n}/attn/o/{k}": np.ones(1) for n in range(4) for k in "ab"
    }
    table = {"{t:**}/blocks/{l}/attn/out/{k}": "{t}/{l}/{k}", "{rest:**}": "{rest}"}
    said = message(lambda: ta.Migration(table)(leaves))
    assert "(the nearest leaf is 'model/blocks/0/attn/o/a')" in said


def test_leaves_without_a_row_that_differ_in_a_number_are_one_line():
    said = message(
        lambda: ta.Migration({"a": "b"})(
            {f"h/{n}/w": np.ones(1) for n in range(12)} | {"a": np.ones(1)}
        )
    )
    first, line, *cure = said.splitlines()
    assert (first, line) == ("12 leaves: no row takes", "  'h/{0..11}/w'")
    assert '"{rest:**}": "{rest}" keeps all others' in cure[0]
    assert cure[1] == '"{rest:**}": None drops them.'


def test_a_group_that_fails_hides_only_its_own_leaves():
    m = ta.Migration({"{n} : (h d)": "t/{n} : h d"})
    leaves = {"self_attn": np.ones(6), "mlp": np.ones(6)}
    said = message(lambda: m(leaves, {"t/attn": np.ones((2, 3)), "t/mlp": np.ones(6)}))
    assert "1 leaf: nothing fills\n  't/attn'" in said
    assert "1 leaf: the target does not have\n  't/self_attn'" in said


def test_counts_that_differ_say_what_to_do():
    m = ta.Migration({"{n}/{l} : e": "{n} : l e"})
    counts = {"a": 12, "b": 11}
    leaves = {f"{n}/{i}": np.ones(3) for n in counts for i in range(counts[n])}
    cure = "if none is missing, pass a target, or write two rows"
    assert message(lambda: m(leaves)).endswith(f"9 more without 'b/11'; {cure}")
    said = message(lambda: m(leaves, {"a": np.ones((12, 3)), "x": np.ones((11, 3))}))
    assert "9 more without 'b/11'; if none is missing, write two rows" in said
    del leaves["b/3"]
    assert "if none is missing" not in message(lambda: m(leaves))


@pytest.mark.parametrize(
    ("address", "instead"),
    [("**.inv_freq", "*: '*.inv_freq'"), ("a/{x:**}_b", "{x}: '{x}_b'")],
)
def test_a_part_of_a_segment_has_one_star(address, instead):
    said = message(lambda: ta.Migration({address: None}))
    assert f"For a part of one write {instead}." in said


def test_what_fills_new_leaves_may_have_a_mark():
    marked = {"h/*": {"fill": "zeros", "check": "ask Ann"}, "k": {"fill": "ones"}}
    m = ta.Migration({"a": "b"}, new=marked)
    plain = ta.Migration({"a": "b"}, new={"h/*": "zeros", "k": "ones"})
    source = {"a": np.ones(3)}
    target = {"b": np.ones(3), "h/w": np.ones(2), "k": np.zeros(2)}
    assert not ta.tree_diff(m(source, target), plain(source, target), values=True)
    assert "new 'h/w': zeros; check: ask Ann\n" in str(m.plan(source, target))
    assert m != plain
    assert plain == ta.Migration({"a": "b"}, new={**plain._new, "k": marked["k"]})
    for odd in ({"fill": "two"}, {"fill": "zeros", "checks": "x"}, {"check": "x"}):
        with pytest.raises(ta.MigrationError, match="Write 'zeros'"):
            ta.Migration({"a": "b"}, new={"h": odd})


# --- new= backwards ---

HALVES = {"l/0/w": np.ones(2), "l/0/b": np.full(3, 2.0), "l/1/w": np.ones(2)}
FILLED = ta.Migration(
    {"l/{n}/{k}": "m/{n}/{k}"}, new={"m/*/b": "zeros", "m/head": "zeros"}
)
WHOLE = {f"m/{n}/{k}": np.ones(2 + (k == "b")) for n in range(2) for k in "wb"}
WHOLE["m/head"] = np.ones(4)


def test_the_inverse_drops_only_what_new_filled(tmp_path):
    made = FILLED(HALVES, WHOLE)
    back = FILLED.inverse(made, HALVES)
    assert sorted(back) == sorted(HALVES)
    assert [*back["l/0/b"]] == [2, 2, 2]
    # Without a target nothing shows which of the leaves was new.
    assert sorted(FILLED.inverse(made)) == sorted([*HALVES, "l/1/b"])
    plan = FILLED.plan(HALVES, WHOLE)
    assert plan.one_way == ()
    assert FILLED.inverse.plan(made, HALVES).dropped == ("m/head", "m/1/b")
    source, target, file = (tmp_path / name for name in ("s.npz", "t.npz", "m.toml"))
    np.savez(source, **made)
    np.savez(target, **HALVES)
    file.write_text(FILLED.to_toml())
    options = ("--migration", file, "--reverse", "--target", target)
    assert run("explain", source, "m/1/b", *options) == "row 3: 'm/*/b' drops it\n"


def test_a_group_that_a_target_lacks_is_dropped_though_it_is_torn():
    m = ta.Migration({"m/{k} : n ...": "l/{n}/{k} : ..."}, new={"l/*/b": "zeros"})
    source = {"m/w": np.ones((3, 2))}
    target = {f"l/{n}/{k}": np.ones(2) for n in range(3) for k in "wb"}
    del target["l/2/b"]
    made = m(source, target)
    assert [*m.inverse(made, source)] == ["m/w"]
    assert "parts are missing" in message(lambda: m.inverse(made))


def test_what_undoes_new_is_a_row_of_its_own(tmp_path):
    inverse = FILLED.inverse
    assert ta.Migration([row.typed() for row in inverse.rows]) == inverse
    file = tmp_path / "inverse.toml"
    file.write_text(inverse.to_toml())
    assert 'drop = "m/*/b"\nundo = "new"\n' in inverse.to_toml()
    assert ta.load_migration(file) == inverse
    for wrong in ({"undo": "old"}, {"scale": 2.0}):
        said = message(lambda: ta.Migration({"a": (None, wrong)}))  # noqa: B023
        assert "it drops leaves and changes them" in said


def test_what_a_pattern_of_new_did_not_fill_comes_back():
    m = ta.Migration({"l.{i}.w": "x.{i}.w", "k": "x.k"}, new={"x.*.w": "zeros"})
    source = {"l.1.w": np.ones(2), "k": np.ones(3)}
    target = {"x.1.w": np.ones(2), "x.2.w": np.ones(2), "x.k": np.ones(3)}
    plan = m.plan(source, target)
    assert plan.one_way == ()
    assert sorted(m.inverse(m(source, target), source)) == sorted(source)
    assert [*plan.result] == ["x.1.w", "x.k", "x.2.w"]


def test_new_leaves_are_in_the_way_of_a_second_run():
    m = ta.Migration({"a": "a"}, new={"b": "zeros"})
    target = {"a": np.ones(2), "b": np.ones(2)}
    assert not m.plan({"a": np.ones(2)}, target).repeatable


def test_a_path_that_two_addresses_match_backwards_is_one_way():
    plan = ta.Migration({"{x}": ("p{x}", "{x}")}).plan({"a": np.ones(2)})
    assert plan.one_way == ("pa", "a")


def test_casts_stay_within_a_kind_of_number():
    for old, new in [("int32", "float32"), ("float32", "complex64"), ("bool", "int8")]:
        m = ta.Migration({"a": ("b", {"cast": new})})
        said = message(lambda: m({"a": np.ones(2, old)}))  # noqa: B023
        assert f"'a' is {old}, and {new} is another kind of number" in said


@pytest.mark.parametrize(
    ("old", "new", "is_exact"),
    [
        ("float16", "float32", False),
        ("bfloat16", "float32", False),
        ("float32", "float64", False),
        ("float8_e4m3fn", "float32", False),
        ("float8_e4m3fnuz", "float32", True),
        ("float8_e8m0fnu", "bfloat16", False),
        ("float8_e8m0fnu", "float32", True),
        ("float4_e2m1fn", "float32", True),
        ("float8_e4m3fn", "float8_e4m3b11fnuz", False),
        ("float8_e3m4", "float4_e2m1fn", False),
        ("bfloat16", "float16", False),
        ("int4", "int8", True),
        ("uint8", "int8", False),
    ],
)
def test_a_cast_is_exact_where_every_pattern_of_bits_comes_back(old, new, is_exact):
    m = ta.Migration({"a": ("b", {"cast": [old, new]})})
    plan = m.plan({"a": jax.ShapeDtypeStruct((2,), getattr(jnp, old))})
    assert plan.exact == is_exact
    if is_exact:
        every = patterns(old) if "int" not in old else np.arange(-8, 8).astype(old)
        for kind in (np.asarray, jnp.asarray):
            leaves = {"a": kind(every)}
            same_bits(m.inverse(m(leaves))["a"], every)


# --- every pattern of bits ---

HALF_TYPES = ("bfloat16", "float16")
NARROW = (*HALF_TYPES, "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
if jax.__version_info__ >= (0, 10):  # JAX 0.8 fails for two arguments of 4 bits
    NARROW += ("float4_e2m1fn",)
BITWISE = {
    "stack": {"{i} : a b": "w : b i a"},
    "unstack": {"{i} : a b": "{a}/x : i b"},
    "join": {("0 : a b", "1 : a b"): "w : b [a a]"},
    "cut": {"0 : [a c] b": ("w : b a", "v : c b"), "1": "1"},
    "pad": {"{i} : a b": ("w : i a b", {"pad": {"i": (1, 2), "b": (0, 1)}})},
    "pad inside": {"{i} : a b": ("w : a i b", {"pad": {"b": (1, 1)}})},
    "pad repeated": {
        "{i} : a b": ("w : b i r a", {"pad": {"a": (0, 2)}, "repeat": {"r": 3}})
    },
    "copy": {"{i} : a b": ("w : b i a", "v : i (a b)")},
}


def patterns(dtype):
    """Return every pattern of bits of a dtype, NaNs with all payloads included."""
    bits = jnp.finfo(dtype).bits
    words = np.arange(2**bits, dtype=np.uint8 if bits <= 8 else np.uint16)
    return words.view(jnp.dtype(dtype))


def same_bits(one, two):
    one, two = np.asarray(one), np.asarray(two)
    assert (one.dtype, one.shape) == (two.dtype, two.shape)
    assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize(("name", "dtype"), grid(BITWISE, NARROW))
def test_what_only_moves_keeps_every_bit(name, dtype):
    table = BITWISE[name]
    if dtype == "float8_e8m0fnu" and "pad" in str(table):
        return
    every = patterns(dtype).reshape(4, -1)
    host = {"0": every, "1": every[:, ::-1].copy()}
    m = ta.Migration(table, sizes={"c": 1} if "[a c]" in str(table) else None)
    assert m.plan(host).exact
    wanted = m(host)
    device = jax.tree.map(jnp.asarray, host)
    for found, back in (
        (m(device), m.inverse(m(device), host)),
        (jax.jit(m)(device), jax.jit(m.inverse)(m(device))),
    ):
        for path, leaf in found.items():
            same_bits(leaf, wanted[path])
        for path, leaf in host.items():
            same_bits(back[path], leaf)


@pytest.mark.parametrize(("axes", "dtype"), grid(["i a b", "a i b"], NARROW))
def test_what_is_filled_keeps_every_bit(axes, dtype):
    if dtype == "float8_e8m0fnu":  # it has no zeros to pad with
        return
    every = patterns(dtype).reshape(4, -1)
    host = {"0": every, "1": every[:, ::-1].copy()}
    m = ta.Migration(
        {"{i} : a b": (f"w : {axes}", {"pad": {"b": (1, 1)}, "fill": "target"})}
    )
    shape = [{"i": 2, "a": 4, "b": every.shape[1] + 2}[name] for name in axes.split()]
    target = {"w": np.resize(every[::-1], shape)}
    wanted = m(host, target)["w"]
    device, like = jax.tree.map(jnp.asarray, (host, target))
    for moved in (m(device, like), jax.jit(m)(device, like)):
        same_bits(moved["w"], wanted)
        for path, leaf in m.inverse(moved, host).items():
            same_bits(leaf, host[path])


@pytest.mark.parametrize(
    ("operations", "dtype"), grid([{}, {"scale": 1.0}, {"scale": 0.5}], NARROW)
)
def test_copies_are_equal_whatever_their_bits(dtype, operations):
    every = patterns(dtype).reshape(4, -1)
    if operations.get("scale", 1) != 1:
        with np.errstate(invalid="ignore"):
            every = np.where(np.isfinite(every), np.zeros_like(every), every)
    target = ("v : a b i", operations) if operations else "v : a b i"
    m = ta.Migration({("{i} : a b", "w : i a b"): target})
    leaves = {"0": every, "1": every, "w": np.stack([every, every])}
    m(leaves)
    m(jax.tree.map(jnp.asarray, leaves))
    other = np.stack([every, every])
    other.view(np.uint8)[1, 0, 0] ^= 1
    said = message(lambda: m(jax.tree.map(jnp.asarray, leaves | {"w": other})))
    assert "the copies are not equal" in said


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but([("stack", "bfloat16")], itertools.product(BITWISE, HALF_TYPES)),
)
def test_derivatives_go_through_a_migration(name, dtype):
    table = BITWISE[name]
    start = (np.arange(24) % 5).reshape(2, 4, 3).astype(dtype)
    leaves = {"0": jnp.asarray(start[0]), "1": jnp.asarray(start[1])}
    m = ta.Migration(table, sizes={"c": 1} if "[a c]" in str(table) else None)
    names = {path: 1 + place for place, path in enumerate(m(leaves))}

    def loss(leaves):
        return sum(
            (m(leaves)[path].astype("float32") ** 3).sum() * c
            for path, c in names.items()
        )

    wide = jax.tree.map(lambda leaf: leaf.astype("float32"), leaves)
    wanted = jax.tree.map(lambda leaf: leaf.astype(dtype), jax.grad(loss)(wide))
    for taken in (jax.grad(loss), jax.jit(jax.grad(jax.checkpoint(loss)))):
        for path, leaf in taken(leaves).items():
            same_bits(leaf, wanted[path])
    ones = jax.tree.map(jnp.ones_like, leaves)
    moved, tangents = jax.jvp(m, (leaves,), (ones,))
    for path, leaf in m(ones).items():
        same_bits(tangents[path], leaf)
        same_bits(moved[path], m(leaves)[path])
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), leaves)
    for mapped in (jax.vmap(m), jax.jit(jax.vmap(m))):
        for path, leaf in mapped(batch).items():
            same_bits(leaf[0], m(leaves)[path])
    twice = jax.jvp(jax.grad(loss), (leaves,), (ones,))[1]
    assert all(
        np.isfinite(np.asarray(leaf, "float32")).all() for leaf in twice.values()
    )
    each = jax.vmap(jax.grad(loss))(batch)
    same_bits(each["0"][0], wanted["0"])


def test_each_group_has_sizes_of_its_own_names():
    m = ta.Migration({"l.{i} : (h d)": "t/{i}/{h} : d", "j": "t/x7/9"})
    target = {f"t/0/{h}": np.ones(3) for h in range(2)}
    target |= {f"t/1/{h}": np.ones(2) for h in range(3)}
    target["t/x7/9"] = np.ones(1)
    source = {"l.0": np.arange(6.0), "l.1": np.arange(6.0), "j": np.ones(1)}
    moved = m(source, target)
    assert [*moved["t/0/1"]] == [3, 4, 5]
    assert [*moved["t/1/2"]] == [4, 5]


def test_what_fills_a_number_or_a_function_of_the_target_fits_it():
    m = ta.Migration({"a": "b"})
    source, number = {"a": np.ones(3)}, {"a": np.float32(3)}
    assert "the target has another shape" in message(lambda: m(source, {"b": 1.0}))
    assert "another shape" in message(lambda: m(number, {"b": jax.nn.relu}))
    assert m(number, {"b": 1.0}) == {"b": np.float32(3)}


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    ("values", "old", "operations"),
    [
        ([1e6, 1.0], "float32", {"cast": "float16"}),
        ([300, 1], "int32", {"cast": "int8"}),
        ([200, 1], "uint8", {"cast": "int8"}),
        ([-1, 1], "int8", {"cast": "uint32"}),
        ([np.inf, 1.0], "float32", {"cast": "float8_e4m3fn"}),
        ([7.0, 6.0], "float32", {"cast": "float4_e2m1fn"}),
        ([-6.0, 2.0], "float32", {"cast": "float4_e2m1fn", "scale": 2.0}),
        ([1e30, 1.0], "float32", {"scale": 1e20}),
        ([1e30, 1.0], "bfloat16", {"offset": 3e38, "scale": 1e8}),
    ],
)
def test_values_that_a_dtype_cannot_hold_are_an_error(kind, values, old, operations):
    m = ta.Migration({"a : x": ("b : x", operations)})
    leaf = kind(np.array(values).astype(old))
    assert "'b' of 'a': values do not fit their new dtype" in message(
        lambda: m({"a": leaf})
    )
    assert m({"a": leaf[1:]})["b"].shape == (1,)
    assert jax.jit(m)({"a": jnp.asarray(leaf)})["b"].shape == (2,)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("path", ["b", "{l}.b"], ids=["alone", "stacked"])
@pytest.mark.parametrize(
    ("values", "dtype", "operations"),
    [
        ([1e30, 1.0], "float32", {"scale": 1e-20}),
        ([1e30, 1.0], "complex64", {"scale": 1e-20}),
        ([1e30, 1.0], "bfloat16", {"scale": 1e-20}),
        ([6e4, 1.0], "float16", {"scale": 0.5}),  # only when it is rounded
        ([3e38, 1.0], "float32", {"offset": -3e38}),
    ],
)
def test_values_that_the_way_back_cannot_hold_are_an_error(
    kind, path, values, dtype, operations
):
    row = {"{l}.a : x": (f"{path} : l x" if path == "b" else f"{path} : x", operations)}
    back = ta.Migration(row).inverse
    leaf = kind(np.array(values).astype(dtype))
    leaves = {"b": leaf[None]} if path == "b" else {"0.b": leaf}
    assert "'0.a'" in message(lambda: back(leaves))
    assert "values do not fit their new dtype" in message(lambda: back(leaves))
    cut = jax.tree.map(lambda leaf: leaf[..., 1:], leaves)
    assert back(cut)["0.a"].shape == (1,)
    infinite = jax.tree.map(lambda x: kind(np.full(x.shape, np.inf, x.dtype)), leaves)
    assert not np.any(np.isfinite(back(infinite)["0.a"]))
    traced = jax.jit(back)(jax.tree.map(jnp.asarray, leaves))
    assert traced["0.a"].shape == (2,)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_copies_are_compared_before_their_values_are_undone(kind):
    m = ta.Migration({"a : x": (("b : x", "c : x"), {"offset": 1e6})})
    leaves = {"b": kind(np.float32([1, 2])), "c": kind(np.float32([1.001, 2]))}
    assert "the copies are not equal" in message(lambda: m.inverse(leaves))


def test_values_that_were_infinite_stay_so():
    m = ta.Migration({"a": ("b", {"cast": "float16"})})
    moved = m({"a": np.array([np.inf, np.nan, 1.0], np.float32)})
    np.testing.assert_array_equal(moved["b"], np.array([np.inf, np.nan, 1.0]))


@pytest.mark.parametrize("name", ["x.safetensors", pathlib.Path("x.safetensors")])
def test_the_name_of_a_file_is_not_a_tree(name):
    m = ta.Migration({"w": "w"})
    for call in (m, m.plan, m.inverse, functools.partial(m, {"w": np.ones(2)})):
        with pytest.raises(ta.MigrationError, match=r"load\(path, migration="):
            call(name)


def test_one_group_may_have_arrays_of_numpy_and_of_jax():
    leaves = {"a": np.ones(2, np.float32), "b": jnp.zeros(3)}
    m = ta.Migration({("a : x", "b : y"): "c : [x y]"})
    assert m(leaves)["c"].tolist() == [1, 1, 0, 0, 0]
