"""To plain dicts and back: what fits, what does not, and what the errors say."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import time
import weakref
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import equinox as eqx
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from sizes import full
from trees import TREES, NnxModel, assert_same, mlp, two_layers

import treeadapt as ta


def w():
    return jnp.ones((2, 3))


def b():
    return jnp.zeros(3)


def layer():
    return {"w": w(), "b": b()}


class Point(NamedTuple):
    x: Any
    y: Any


@flax.struct.dataclass
class Struct:
    w: Any
    b: Any
    name: str = flax.struct.field(pytree_node=False, default="struct")


# The forms


def test_the_forms_of_one_tree():
    tree = {"layers": [layer(), Point(w(), None)], "empty": {}, "none": None}
    leaves = jax.tree.leaves(tree)
    assert jax.tree.structure(ta.to_state_dict(tree)) == jax.tree.structure(
        {
            "layers": {"0": layer(), "1": {"x": 0, "y": None}},
            "empty": {},
            "none": None,
        }
    )
    flat = ta.to_flat_dict(tree)
    assert list(flat) == ["layers/0/b", "layers/0/w", "layers/1/x"]
    assert all(a is b for a, b in zip(flat.values(), leaves, strict=True))


@pytest.mark.parametrize(
    "tree", [{}, [], (), None, {"a": None, "b": {}, "c": ((), [])}, FrozenDict()]
)
@pytest.mark.hazard("B1")
def test_no_leaf_at_all(tree):
    assert ta.to_flat_dict(tree) == {}
    for again in (
        ta.from_state_dict(tree, ta.to_state_dict(tree)),
        ta.from_flat_dict(tree, {}),
        ta.merge(*ta.split(tree, [])),
    ):
        assert jax.tree.structure(again) == jax.tree.structure(tree)


@pytest.mark.hazard("B2")
def test_none_stays_a_node():
    tree = {"b": None, "a": w()}
    assert ta.tree_paths(tree) == ("a",)
    assert ta.to_state_dict(tree)["b"] is None


@pytest.mark.hazard("B5")
def test_order_and_class_come_back_by_label():
    ordered = OrderedDict(b=1.0, a=2.0)
    assert list(ta.to_flat_dict(ordered)) == ["b", "a"]
    again = ta.from_state_dict(ordered, {"a": 3.0, "b": 4.0})
    assert type(again) is OrderedDict
    assert list(again.items()) == [("b", 4.0), ("a", 3.0)]


@pytest.mark.hazard("B10")
def test_the_kind_of_container_comes_from_the_target():
    target = (w(), [b()])
    again = ta.from_state_dict(target, {"0": w(), "1": {"0": b()}})
    assert jax.tree.structure(again) == jax.tree.structure(target)


@pytest.mark.hazard("B11", "B12")
def test_the_view_shares_leaves_and_no_container():
    tree = {"a": {"w": np.zeros(2)}}
    state = ta.to_state_dict(tree)
    state["a"]["new"] = state["new"] = 1
    assert tree.keys() == {"a"}
    assert tree["a"].keys() == {"w"}
    again = ta.from_state_dict(tree, ta.to_state_dict(tree))
    again["a"]["new"] = 1
    assert tree["a"].keys() == {"w"}
    assert again["a"]["w"] is tree["a"]["w"]


@pytest.mark.hazard("B13")
def test_pairs_go_by_path():
    tree = {"b": "B", "a": "A"}
    assert ta.to_flat_dict(tree) == {"a": "A", "b": "B"}


@pytest.mark.hazard("C4")
def test_fields_in_another_order_go_by_name():
    class One(NamedTuple):
        mu: Any
        nu: Any

    class Two(NamedTuple):
        nu: Any
        mu: Any

    again = ta.from_state_dict(Two(0.0, 0.0), ta.to_state_dict(One("mu", "nu")))
    assert again == Two(nu="nu", mu="mu")


@pytest.mark.hazard("D8")
def test_a_default_does_not_hide_a_missing_entry():
    with pytest.raises(ta.StructureMismatchError, match="missing 'b'"):
        ta.from_state_dict(Struct(w(), b()), {"w": w()})


@pytest.mark.hazard("D10")
def test_no_copy():
    tree = Struct(w(), b())
    assert ta.to_state_dict(tree)["w"] is tree.w


@pytest.mark.hazard("F1")
def test_a_frozen_dict_and_a_dict_load_into_each_other():
    plain = {"a": layer()}
    frozen = FrozenDict(plain)
    assert_same(ta.from_state_dict(frozen, plain), frozen)
    assert_same(ta.from_state_dict(plain, frozen), plain)


@pytest.mark.hazard("F2")
def test_static_fields_come_from_the_target():
    again = ta.from_state_dict(Struct(w(), b(), "kept"), layer())
    assert again.name == "kept"


# Targets


def test_an_abstract_target():
    shapes = jax.eval_shape(lambda: Struct(w(), [b(), None], "abstract"))
    state = {"w": w(), "b": {"0": b(), "1": None}}
    again = ta.from_state_dict(shapes, state)
    assert (again.name, again.w) == ("abstract", state["w"])
    with pytest.raises(ta.StructureMismatchError, match=r"'w': float32\[3\], the targ"):
        ta.from_state_dict(shapes, {**state, "w": b()})


def test_an_abstract_equinox_model():
    model = mlp()
    abstract = eqx.filter_eval_shape(mlp)
    arrays = {k: v for k, v in ta.to_flat_dict(model).items() if eqx.is_array(v)}
    again = ta.from_flat_dict(abstract, arrays)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    np.testing.assert_array_equal(again(jnp.ones(2)), model(jnp.ones(2)))


def test_an_abstract_nnx_model():
    model = NnxModel()
    abstract = nnx.eval_shape(NnxModel)
    assert isinstance(abstract, NnxModel)
    again = ta.from_flat_dict(abstract, ta.to_flat_dict(model))
    assert again.hidden.w.get_value() is model.hidden.w.get_value()
    state = ta.to_state_dict(nnx.to_pure_dict(nnx.state(model)))
    again = ta.from_state_dict(abstract, state)
    assert again.out.b.get_value() is model.out.b.get_value()


@pytest.mark.hazard("G7", "G17")
def test_abstract_trees_convert_without_allocation():
    shapes = {"w": jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)}
    assert ta.to_flat_dict(shapes) == shapes
    assert ta.merge(*ta.split(shapes)) == shapes


def test_arrays_alone_load_into_a_raw_model():
    model = mlp()
    arrays = {k: v for k, v in ta.to_flat_dict(model).items() if eqx.is_array(v)}
    assert len(arrays) == len(ta.to_flat_dict(model)) - 2
    assert_same(model, ta.from_flat_dict(model, arrays))
    state = ta.to_state_dict(eqx.filter(model, eqx.is_array))
    assert_same(model, ta.from_state_dict(model, state))
    del state["activation"], state["final_activation"]
    assert_same(model, ta.from_state_dict(model, state))


def test_static_leaves_of_the_dict_win():
    target = {"act": jax.nn.relu, "rate": 0.5, "w": w()}
    again = ta.from_flat_dict(target, {"act": jax.nn.gelu, "w": target["w"]})
    assert again["act"] is jax.nn.gelu
    assert again["rate"] == 0.5
    assert (
        ta.from_flat_dict(target, {"w": w(), "rate": jnp.ones(())})["rate"].shape == ()
    )


@pytest.mark.hazard("F5", "F6", "F7")
def test_keys_of_other_types_load_by_their_text():
    state = {"l": {0: layer(), 1: layer()}, "d": {"0": w()}}
    # As ``flax.serialization.msgpack_restore`` gives it, from Flax 0.12.8 on.
    stored = jax.tree.map(np.asarray, state)
    target = {"l": [layer(), layer()], "d": {0: w()}}
    again = ta.from_state_dict(target, stored)
    assert jax.tree.structure(again) == jax.tree.structure(target)
    assert again["l"][1]["w"] is stored["l"][1]["w"]
    assert ta.from_state_dict(state, ta.to_state_dict(target))["d"].keys() == {"0"}


def test_an_optimizer_state_loads_from_the_state_dict_of_flax():
    tx = optax.chain(optax.masked(optax.adam(1e-3), {"w": True, "b": False}))
    state = tx.init(layer())
    given = flax.serialization.to_state_dict(state)
    assert_same(state, ta.from_state_dict(state, given))


def test_a_state_may_be_in_any_container():
    target = two_layers(dict, dict)
    for form in (
        lambda **fields: defaultdict(list, fields),
        lambda **fields: FrozenDict(fields),
        lambda **fields: nnx.State(fields),
    ):
        state = form(hidden=form(**target["hidden"]), out=form(**target["out"]))
        assert_same(target, ta.from_state_dict(target, state))


def test_an_opaque_state_is_opened():
    target = {"a": w()}
    with pytest.raises(ta.StructureMismatchError, match="unexpected 'a/w'"):
        ta.from_state_dict(target, {"a": PlainBox(w=w())}, strict=False)


@dataclasses.dataclass
class PlainBox:
    w: Any


@pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)
@pytest.mark.filterwarnings("ignore::treeadapt.UnstablePathWarning")
def test_another_leaf_takes_the_place_of_one_and_moves_no_other(row):
    tree = row.make()
    flat = ta.to_flat_dict(tree)
    assert [*flat] == [*ta.tree_paths(tree)]
    first = row.paths[:1]
    other = ta.from_flat_dict(tree, flat | dict.fromkeys(first, True), strict=False)
    changed = ta.to_flat_dict(other)
    assert [*changed] == [*flat]
    assert [path for path in flat if changed[path] is not flat[path]] == [*first]


# Errors


@pytest.mark.hazard("F3", "F4")
def test_all_kinds_of_mismatch_are_in_one_error():
    target = {"enc": {"w": w(), "b": b()}, "head": {"w": w(), "b": b()}, "act": max}
    flat = {
        "enc/W": w(),
        "enc/b": jnp.zeros(4),
        "head/w": jnp.ones((2, 3), jnp.bfloat16),
        "head/b": 1.0,
        "act": b(),
        "new": w(),
    }
    with pytest.raises(ta.StructureMismatchError) as raised:
        ta.from_flat_dict(target, flat)
    assert str(raised.value) == (
        "7 entries do not fit the target: 1 missing, 2 unexpected, 4 of another shape "
        "or dtype.\n"
        "  missing 'enc/w' (the dict has 'enc/W')\n"
        "  unexpected 'enc/W' (the target has 'enc/w')\n"
        "  unexpected 'new'\n"
        "  'act': float32[3], the target has a builtin_function_or_method\n"
        "  'enc/b': float32[4], the target has float32[3]\n"
        "  'head/b': a float, the target has float32[3]\n"
        "  'head/w': bfloat16[2,3], the target has float32[2,3]"
    )
    nested = {
        "enc": {"W": flat["enc/W"], "b": flat["enc/b"]},
        "head": {"w": flat["head/w"], "b": flat["head/b"]},
        "act": flat["act"],
        "new": flat["new"],
    }
    with pytest.raises(ta.StructureMismatchError) as nested_error:
        ta.from_state_dict(target, nested)
    assert str(nested_error.value) == str(raised.value)


def test_only_arrays_of_no_axes_take_the_place_of_a_number():
    target = {"lr": 0.1, "step": 3, "done": False}
    flat = {"lr": jnp.float32(0.5), "step": np.int64(4), "done": True}
    assert ta.from_flat_dict(target, flat) == flat
    for name in target:
        wrong = {**flat, name: np.ones((3, 3))}
        for convert in (ta.from_flat_dict, ta.from_state_dict):
            said = f"'{name}': float64.3,3., the target has a"
            with pytest.raises(ta.StructureMismatchError, match=said):
                convert(target, wrong)
            assert convert(target, wrong, strict=False)[name] is wrong[name]


@pytest.mark.hazard("F3", "F4")
def test_what_is_not_strict_lets_shapes_pass_and_no_names():
    target = {"a": w(), "b": b()}
    given = {"a": jnp.ones(7), "b": "text"}
    assert ta.from_flat_dict(target, given, strict=False) == given
    assert ta.from_state_dict(target, given, strict=False) == given
    for change in ({"c": 1}, {"a": None}):
        with pytest.raises(ta.StructureMismatchError):
            ta.from_state_dict(target, {**given, **change}, strict=False)
    with pytest.raises(ta.StructureMismatchError):
        ta.from_flat_dict(target, {"a": given["a"]}, strict=False)


@pytest.mark.parametrize(
    ("target", "state", "message"),
    [
        ({"a": {"b": 1.0 * np.ones(1)}}, {"a": np.ones(1)}, "missing 'a/b'"),
        ({"a": {"b": 1.0 * np.ones(1)}}, {"a": np.ones(1)}, "unexpected 'a'"),
        ({"a": np.ones(1)}, {"a": {"b": np.ones(1)}}, "unexpected 'a/b'"),
        ({"a": np.ones(1)}, {"a": {"": np.ones(1)}}, "unexpected 'a/'"),
        ({"": {"a": np.ones(1)}}, {"": {"a": np.ones(1), "b": 1}}, "unexpected '/b'"),
        ({"a": None}, {"a": np.ones(1)}, "unexpected 'a'"),
        ({"a": {}}, {"a": {"b": {"c": 1.0}}}, "unexpected 'a/b/c'"),
        ({"a": np.ones(1)}, {"a": None}, "missing 'a'"),
        ({"a": np.ones(1)}, {"a": {}}, "missing 'a'"),
        ({"a": np.ones(1)}, {}, "missing 'a'"),
        ({"a": np.ones(1)}, None, "missing 'a'"),
        ({"a": np.ones(1)}, np.ones(1), "missing 'a'"),
        (np.ones(1), {"a": np.ones(1)}, "unexpected 'a'"),
        ([np.ones(1)] * 2, [np.ones(1)] * 3, "unexpected '2'"),
        (Point(np.ones(1), 0), {"z": np.ones(1)}, "missing 'x'"),
    ],
)
def test_a_state_of_another_structure(target, state, message):
    with pytest.raises(ta.StructureMismatchError) as raised:
        ta.from_state_dict(target, state)
    assert message in str(raised.value)


@pytest.mark.hazard("B1")
def test_empty_containers_and_none_may_be_missing_or_more():
    target = {"a": {}, "b": None, "w": np.ones(1)}
    for state in (
        {"w": target["w"]},
        {"w": target["w"], "c": {}, "a": None, "b": {}},
        {"w": target["w"], "a": {"x": {"y": None}}},
    ):
        again = ta.from_state_dict(target, state)
        assert jax.tree.structure(again) == jax.tree.structure(target)


@pytest.mark.parametrize("flat", [[1.0], None, np.ones(1), "text"])
def test_a_flat_dict_is_a_mapping(flat):
    with pytest.raises(ta.StructureMismatchError, match="A flat dict is"):
        ta.from_flat_dict({"a": w()}, flat)


def test_a_nested_dict_for_a_flat_one_is_named():
    with pytest.raises(ta.StructureMismatchError, match=r"missing 'a/b'.*\n.*'a'"):
        ta.from_flat_dict({"a": {"b": w()}}, {"a": {"b": w()}})


def test_reading_a_defaultdict_makes_no_entry():
    flat = defaultdict(w, {"a": w()})
    with pytest.raises(ta.StructureMismatchError, match="missing 'b'"):
        ta.from_flat_dict({"a": w(), "b": w()}, flat)
    assert list(flat) == ["a"]


def test_a_target_with_collisions_takes_the_nested_form_only():
    target = {"a/b": w(), "a": {"b": b()}}
    with pytest.raises(ta.PathCollisionError):
        ta.from_flat_dict(target, {"a/b": w()})
    assert_same(target, ta.from_state_dict(target, ta.to_state_dict(target)))


@pytest.mark.slow
@pytest.mark.hazard("I9")
def test_law_10_messages_stay_below_4_kb():
    words = [
        str(i).translate(str.maketrans("0123456789", "abcdefghij"))
        for i in range(full(20_000, 1_000))
    ]
    big = {f"layer_{word}": np.ones(1) for word in words}  # no numbers to fold
    odd = {f"layer-{word}": np.ones(1) for word in words}
    long = {f"{'x' * 3_000}{i}": np.ones(1) for i in range(50)}
    other = {path: np.ones(2) for path in big}
    for target, flat in ((big, odd), (big, other), (long, odd), (big, long), (big, {})):
        for convert in (ta.from_flat_dict, ta.from_state_dict):
            with pytest.raises(ta.StructureMismatchError) as raised:
                convert(target, flat)
            assert len(str(raised.value).encode()) <= 4096
            assert "and " in str(raised.value)
    with pytest.raises(ta.PathCollisionError) as clash:
        ta.to_flat_dict({"a/" + "b" * 9_000: 1.0, "a": {"b" * 9_000: 2.0}})
    assert len(str(clash.value).encode()) <= 4096


@pytest.mark.slow
def test_one_missing_of_20_000_is_found():
    big = {f"layer_{i}": np.ones(1) for i in range(20_000)}
    flat = {**big, "layer_1_9999": np.ones(1)}
    del flat["layer_19999"]
    with pytest.raises(ta.StructureMismatchError) as raised:
        ta.from_flat_dict(big, flat)
    assert "missing 'layer_19999' (the dict has 'layer_1_9999')" in str(raised.value)


@pytest.mark.slow
def test_long_names_are_compared_in_no_time():
    start = time.perf_counter()
    target = {f"{'ab' * 2_000}{i}": np.ones(1) for i in range(2_000)}
    with pytest.raises(ta.StructureMismatchError):
        ta.from_flat_dict(target, {f"{'ba' * 2_000}{i}": 1 for i in range(2_000)})
    assert time.perf_counter() - start < 5


# What may be a leaf


@pytest.mark.hazard("G3", "G6", "G11", "G13", "G15")
def test_leaves_are_not_changed():
    tree = {
        "int64": np.int64(2**40),
        "float64": np.float64(1) / 3,
        "int": 2**70,
        "masked": np.ma.masked_array([1.0], mask=[1]),
        "objects": np.array([None, "a"]),
        "text": "x",
        "ref": jax.new_ref(jnp.ones(2)),
        "key": jax.random.key(0),
        "spec": jax.P("x", None),
        "dtype": jnp.float32,
        "class": Point,
    }
    flat = ta.to_flat_dict(tree)
    assert all(flat[name] is tree[name] for name in tree)
    assert_same(tree, ta.from_flat_dict(tree, flat))
    assert_same(tree, ta.merge(*ta.split(tree)))
    assert_same(tree, ta.merge(*ta.split(tree, arrays="all")))


@pytest.mark.hazard("G4", "G16")
def test_float0_gradients_convert():
    grads = jax.grad(lambda t: t["w"] * 1.0, allow_int=True)({"w": 1.0, "n": 3})
    assert grads["n"].dtype == jax.dtypes.float0
    assert_same(grads, ta.from_flat_dict(grads, ta.to_flat_dict(grads)))
    params, rest = ta.split(grads)
    assert list(params) == ["w"]
    assert rest.arrays["n"] is grads["n"]


@pytest.mark.hazard("G10")
def test_deleted_arrays_convert():
    tree = {"a": [jnp.ones(3)], "b": jnp.ones(2)}
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(tree)
    assert tree["b"].is_deleted()
    assert_same(tree, ta.from_state_dict(tree, ta.to_state_dict(tree)))
    params, rest = ta.split(tree, "a")
    assert_same(tree, ta.merge(params, rest))
    assert "float32[2]" in repr(rest)
    with pytest.raises(ta.StructureMismatchError, match="missing 'b'"):
        ta.from_flat_dict(tree, {"a/0": tree["a"][0], "c": tree["b"]})
    with pytest.raises(ta.StructureMismatchError, match=r"'b': float32\[3\]"):
        ta.from_flat_dict(tree, {"a/0": tree["a"][0], "b": tree["a"][0]})


class Unreadable:
    """An array that may be asked for its shape and dtype only."""

    shape, dtype, ndim, size = (2,), np.dtype("float32"), 1, 2

    def _never(self, *args, **kwargs):
        raise AssertionError("a conversion read an array")

    __array__ = __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = _never
    __float__ = __add__ = __copy__ = __deepcopy__ = __repr__ = __hash__ = _never


@dataclasses.dataclass
class Opaque:
    w: Any


def test_law_8_no_array_is_read():
    tree = {"a": [Unreadable(), Opaque(Unreadable())], "b": (Unreadable(), 1.0)}
    state, flat = ta.to_state_dict(tree), ta.to_flat_dict(tree)
    for again in (
        ta.from_state_dict(tree, state),
        ta.from_flat_dict(tree, flat),
        ta.from_flat_dict(ta.from_state_dict(tree, state), flat),
        ta.merge(*ta.split(tree, "b", nested=True)),
        ta.merge(*ta.split(tree, tie={"b/0": "a/0"})),
        ta.map_where(lambda leaf: leaf, tree, "a"),
    ):
        assert again["a"][0] is tree["a"][0]
        assert again["a"][1].w is tree["a"][1].w
    with pytest.raises(ta.StructureMismatchError):
        ta.from_flat_dict(tree, {**flat, "b/0": np.ones(3), "c": Unreadable()})
    with pytest.raises(ta.PathCollisionError):
        ta.to_flat_dict({"a/b": Unreadable(), "a": {"b": Unreadable()}})


@pytest.mark.hazard("G9")
def test_no_tracer_leaks():
    tree = {"a": [jnp.ones(2), Opaque(jnp.ones(3))], "n": 1.0}
    flat = {k: v for k, v in ta.to_flat_dict(tree).items() if isinstance(v, jax.Array)}

    def double(leaves):
        built = ta.from_flat_dict(tree, leaves)
        params, rest = ta.split(built, "a/0")
        again = ta.merge({k: v * 2 for k, v in params.items()}, rest)
        named = ta.to_flat_dict(ta.from_state_dict(again, ta.to_state_dict(again)))
        return {name: named[name] for name in leaves}

    with jax.checking_leaks():
        out = jax.jit(double)(flat)
    assert out["a/0"].tolist() == [2, 2]
    assert jax.vmap(double)({k: jnp.stack([v, v]) for k, v in flat.items()})[
        "a/0"
    ].shape == (2, 2)


@pytest.mark.usefixtures("small_heap")
def test_no_conversion_keeps_an_array_alive():
    def convert():
        tree = {"a": [jnp.ones(2), Opaque(np.ones(3))], "b": NnxModel()}
        ta.from_state_dict(tree, ta.to_state_dict(tree))
        params, rest = ta.split(tree, "a")
        ta.merge(params, rest)
        return [weakref.ref(leaf) for leaf in ta.to_flat_dict(tree).values()]

    refs = convert()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.hazard("H10")
@pytest.mark.usefixtures("small_heap")
def test_static_data_of_old_structures_is_let_go():
    @jax.tree_util.register_static
    class Big:
        pass

    refs = []
    for _ in range(600):
        big = Big()
        ta.to_state_dict((big, 1.0))
        refs.append(weakref.ref(big))
        del big
    gc.collect()
    assert sum(ref() is not None for ref in refs) <= 256


def test_results_can_be_pickled():
    tree = {"a": [np.ones(2), Struct(np.ones(3), None)]}
    state = pickle.loads(pickle.dumps(ta.to_state_dict(tree)))
    again = ta.from_state_dict(tree, state)
    assert jax.tree.structure(again) == jax.tree.structure(tree)


@pytest.mark.hazard("J3")
def test_gradients_come_back_in_the_classes_of_the_caller():
    grads = jax.grad(lambda p: ta.to_flat_dict(p)["x"] ** 2 * p.y)(Point(2.0, 3.0))
    assert type(grads) is Point
    assert grads == Point(12.0, 4.0)


def test_what_does_not_fit_in_every_layer_is_one_line():
    def layers(**leaves):
        return {"layers": {str(i): dict(leaves) for i in range(12)}}

    target = layers(bias=np.ones(2), kernel=np.ones((2, 3)))
    with pytest.raises(ta.StructureMismatchError) as caught:
        ta.from_state_dict(target, layers(biaas=np.ones(2), kernel=np.ones((3, 2))))
    assert str(caught.value).splitlines() == [
        "36 entries do not fit the target: 12 missing, 12 unexpected, 12 of another "
        "shape or dtype.",
        "  missing 'layers/{0..11}/bias' (the dict has 'layers/{0..11}/biaas')",
        "  unexpected 'layers/{0..11}/biaas' (the target has 'layers/{0..11}/bias')",
        "  'layers/{0..11}/kernel': float64[3,2], the target has float64[2,3]",
    ]
