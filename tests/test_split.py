"""Split and merge: what trains, what rides along, ties, traces and donation."""

from __future__ import annotations

import ast
import copy
import dataclasses
import math
import pickle
import warnings
from collections import defaultdict
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from flax import nnx
from trees import NnxTied, assert_same, eqx_shared, mlp, nnx_batchnorm

import treeadapt as ta


def w(fill=1.0):
    return jnp.full((2, 3), fill, jnp.float32)


def model():
    return {
        "enc": {"w": w(), "b": jnp.zeros(3)},
        "head": [w(2.0), jax.nn.relu],
        "steps": jnp.arange(3),
        "rate": 0.5,
    }


# What goes where


def test_params_are_the_inexact_arrays_in_leaf_order():
    tree = model()
    params, rest = ta.split(tree)
    assert list(params) == ["enc/b", "enc/w", "head/0"]
    assert params["enc/w"] is tree["enc"]["w"]
    assert list(rest.arrays) == ["steps"]
    assert jax.tree.leaves(rest) == [tree["steps"]]


def test_all_arrays():
    params, rest = ta.split({**model(), "key": jax.random.key(0)}, arrays="all")
    assert list(params) == ["enc/b", "enc/w", "head/0", "key", "steps"]
    assert rest.arrays == {}


def test_where_selects_and_the_rest_stays():
    tree = model()
    for where in ("enc", ta.glob("enc"), ["enc", "!head"], ~ta.glob("head")):
        params, rest = ta.split(tree, where)
        assert list(params) == ["enc/b", "enc/w"]
        assert list(rest.arrays) == ["head/0", "steps"]
        assert_same(tree, ta.merge(params, rest))


def test_where_that_hits_nothing_is_an_error():
    with pytest.raises(ta.UnusedRuleError, match="encoder"):
        ta.split(model(), "encoder")


def test_nested_params_are_a_state_dict_of_the_chosen():
    tree = model()
    params, rest = ta.split(tree, "enc", nested=True)
    assert jax.tree.structure(params) == jax.tree.structure({"enc": {"b": 0, "w": 0}})
    assert_same(tree, ta.merge(params, rest))
    assert ta.split(tree, [], nested=True)[0] == {}
    leaf = w()
    assert ta.split(leaf, nested=True)[0] is leaf
    assert ta.merge(*ta.split(leaf, nested=True)) is leaf


def test_nested_params_may_hold_any_leaf():
    params, rest = ta.split({"a": {"b": w(), "c": w()}}, nested=True)
    values = {"a": {"b": "text", "c": 1}}
    assert ta.merge(values, rest) == values
    values["a"]["b"] = {"a mapping": 1}
    with pytest.raises(ta.StructureMismatchError, match="'a/b': a dict cannot take"):
        ta.merge(values, rest)
    del params["a"]["b"]
    params["a"]["d"] = 1
    with pytest.raises(ta.StructureMismatchError, match=r"'a/b'.*\n.*unexpected 'a/d'"):
        ta.merge(params, rest)


def test_keys_with_separators_nest_as_they_were():
    tree = {"mlp/~/linear": {"w": w(), "": w()}, "mlp": {"b": w()}, "": {"x": w()}}
    params, rest = ta.split(tree, nested=True)
    assert list(params) == ["", "mlp", "mlp/~/linear"]
    assert_same(tree, ta.merge(params, rest))
    with pytest.raises(ta.StructureMismatchError, match="unexpected '/y'"):
        ta.merge({**params, "": {**params[""], "y": 1}}, rest)


def test_arrays_has_two_values():
    with pytest.raises(ta.TreeAdaptError, match="arrays= is"):
        ta.split(model(), arrays="float")


def test_abstract_trees_split():
    shapes = jax.eval_shape(lambda: {"a": w(), "n": jnp.arange(2)})
    params, rest = ta.split(shapes)
    assert params == {"a": shapes["a"]}
    assert ta.merge(params, rest) == shapes


def test_path_collisions_are_errors():
    with pytest.raises(ta.PathCollisionError):
        ta.split({"a/b": w(), "a": {"b": w()}})


# The rest


def test_the_rest_reads_as_what_it_holds():
    rest = ta.split(model())[1]
    assert repr(rest) == "Rest({steps: int32[3]})"
    assert ta.tree_paths(rest) == ("steps",)
    (path,) = jtu.tree_leaves_with_path(rest)[0][0]
    assert path == jtu.DictKey("steps")


def test_the_rest_goes_through_transformations():
    tree = model()
    params, rest = ta.split(tree, "enc")
    doubled = jax.tree.map(lambda x: x * 2, rest)
    merged = ta.merge(params, doubled)
    assert merged["head"][0].tolist() == (tree["head"][0] * 2).tolist()
    assert merged["head"][1] is jax.nn.relu
    assert jax.eval_shape(lambda rest: rest, rest).arrays["head/0"].shape == (2, 3)
    shapes = jax.tree.map(lambda x: x.shape, rest)
    assert shapes.arrays == {"head/0": (2, 3), "steps": (3,)}


def test_the_rest_copies_and_pickles():
    params, rest = ta.split({"a": np.ones(2), "n": np.arange(3), "name": "n"}, "a")
    for again in (copy.deepcopy(rest), pickle.loads(pickle.dumps(rest))):
        merged = ta.merge(params, again)
        assert merged["name"] == "n"
        assert merged["n"].tolist() == [0, 1, 2]
        assert jax.tree.structure(again) == jax.tree.structure(rest)


# Wrong params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enc/b": None}, "missing 'enc/b'"),
        ({"head/1": 1.0}, "unexpected 'head/1'"),
        ({"enc/b": None, "enc/B": 1.0}, "missing 'enc/b'.*\n.*unexpected 'enc/B'"),
        ({5: 1.0}, "unexpected '5'"),
    ],
)
def test_merge_wants_just_the_keys_that_split_gave(change, message):
    params, rest = ta.split(model())
    changed = {**params, **change}
    changed = {key: value for key, value in changed.items() if value is not None}
    with pytest.raises(ta.StructureMismatchError, match=message):
        ta.merge(changed, rest)


@pytest.mark.parametrize("params", [None, 1.0, [1.0], {1.0}, "enc"])
def test_params_are_a_mapping(params):
    with pytest.raises(ta.StructureMismatchError, match="params are a mapping"):
        ta.merge(params, ta.split(model())[1])


def test_merge_wants_a_rest():
    params, _ = ta.split(model())
    with pytest.raises(ta.StructureMismatchError, match="got a dict as the rest"):
        ta.merge(params, params)


def test_merge_takes_any_leaves_and_reads_a_defaultdict_as_it_is():
    _, rest = ta.split({"a": w(), "b": w()})
    assert ta.merge({"a": "label", "b": max}, rest) == {"a": "label", "b": max}
    params = defaultdict(int, a=1)
    with pytest.raises(ta.StructureMismatchError, match="missing 'b'"):
        ta.merge(params, rest)
    assert list(params) == ["a"]


# In loops


def train(tree, steps=3, **options):
    params, rest = ta.split(tree, **options)
    tx = optax.sgd(0.1)
    state = tx.init(params)
    traces = []

    @jax.jit
    def step(params, rest, state):
        traces.append(1)

        def loss(params):
            built = ta.merge(params, rest)
            return sum(jnp.sum(jnp.sin(x)) for x in ta.split(built)[0].values())

        grads = jax.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, rest, state)
    return ta.merge(params, rest), len(traces)


def test_gradients_flow_through_merge_inside_jit():
    tree = model()
    trained, traces = train(tree, where="enc")
    assert traces == 1
    assert jax.tree.structure(trained) == jax.tree.structure(tree)
    assert (trained["enc"]["w"] != tree["enc"]["w"]).all()
    assert trained["head"][0] is tree["head"][0]
    assert trained["steps"] is tree["steps"]


def test_an_equinox_model_trains():
    tree = mlp()
    with jax.numpy_rank_promotion("allow"):
        trained, traces = train(tree)
    assert traces == 1
    assert trained(jnp.ones(2)).shape == (2,)
    assert trained.activation is tree.activation


def test_arrays_of_the_rest_are_no_constants():
    params, rest = ta.split({"a": jnp.ones(3), "b": jnp.ones(1_000)}, "a")

    def loss(params, rest):
        tree = ta.merge(params, rest)
        return tree["a"].sum() + tree["b"].sum()

    jaxpr = jax.make_jaxpr(loss)(params, rest)
    assert jaxpr.consts == []
    assert len(jaxpr.in_avals) == 2


def test_params_and_rest_can_be_donated():
    tree = {"a": jnp.ones(3), "b": [jnp.ones(2), jnp.arange(4)]}
    params, rest = ta.split(tree, "a")

    def step(params, rest):
        return jax.tree.map(lambda x: x + 1, (params, rest))

    step = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(3):
        params, rest = step(params, rest)
    merged = ta.merge(params, rest)
    assert merged["b"][1].tolist() == [3, 4, 5, 6]
    assert tree["a"].is_deleted()
    assert tree["b"][0].is_deleted()


def test_sharded_params_stay_as_they_are():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    tree = {"a": jax.device_put(jnp.ones(8), sharding), "b": jnp.ones(2)}
    with jax.transfer_guard("disallow"):
        params, rest = ta.split(tree, "a")
        merged = ta.merge(params, rest)
    assert merged["a"] is tree["a"]
    assert params["a"].sharding == sharding


# Traces


def count_traces(trees, where="**"):
    traces, results = [], []

    @jax.jit
    def run(params, rest):
        traces.append(1)
        tree = ta.merge(params, rest)
        results.append(tree)
        return 0

    for tree in trees:
        run(*ta.split(tree, where))
    return len(traces), results


@dataclasses.dataclass
class Plain:
    w: Any
    n: Any = 1


@jtu.register_dataclass
@dataclasses.dataclass
class Static:
    w: Any
    n: Any = dataclasses.field(default=1, metadata={"static": True})


class Module(eqx.Module):
    w: Any
    n: Any = eqx.field(static=True, default=1)


@flax.struct.dataclass
class Struct:
    w: Any


@flax.struct.dataclass
class OtherStruct:
    w: Any


@pytest.mark.hazard("H5")
@pytest.mark.parametrize(
    "make",
    [
        model,
        lambda: Plain(w()),
        lambda: {"a": Plain([w()], "text")},
        lambda: Static(w(), "static"),
        lambda: Module(w(), (1, "a")),
        mlp,
        nnx_batchnorm,
        NnxTied,
        lambda: eqx.nn.BatchNorm(2, "batch", mode="ema"),
        lambda: {"nan": math.nan, "w": w()},
    ],
)
def test_equal_trees_share_one_trace(make):
    first = make()
    again = ta.merge(*ta.split(first))
    with jax.numpy_dtype_promotion("standard"):
        assert count_traces([first, again, first])[0] == 1


@pytest.mark.hazard("H3")
@pytest.mark.parametrize(
    ("values", "traces"),
    [
        ([1, 1, 1], 1),
        ([1, True, 1.0, 1], 3),
        ([0.0, -0.0], 2),
        ([1.0, 2.0], 2),
        ([math.nan, float("nan")], 1),
        ([0j, -0j, complex(0, -0.0)], 3),
        (["a", "a", "b"], 2),
        ([max, max, min], 2),
    ],
)
def test_static_leaves_are_compared_by_type_and_value(values, traces):
    trees = [{"w": w(), "static": value} for value in values]
    count, seen = count_traces(trees)
    assert count == traces
    types = {type(tree["static"]) for tree in seen}
    assert types == {type(value) for value in values}


def test_numpy_scalars_are_arrays_and_change_without_a_trace():
    trees = [{"w": w(), "rate": np.float32(rate)} for rate in (0.1, 0.2, 0.3)]
    assert count_traces(trees)[0] == 1
    assert list(ta.split(trees[0])[0]) == ["rate", "w"]


def test_two_classes_of_one_shape_have_two_traces():
    # A JAX may hold the structures of such dataclasses equal; 0.10 does, 0.8 did not.
    for wrap in (lambda tree: tree, lambda tree: {"x": tree, "y": Plain(w())}):
        trees = [wrap(Struct(w())), wrap(OtherStruct(w())), wrap(Struct(w()))]
        count, seen = count_traces(trees)
        assert count == 2
        kinds = [type(tree.get("x") if type(tree) is dict else tree) for tree in seen]
        assert kinds == [Struct, OtherStruct]


def test_a_static_field_that_changes_retraces():
    assert count_traces([Static(w(), 1), Static(w(), 2), Static(w(), 1)])[0] == 2
    assert count_traces([Plain(w(), "a"), Plain(w(), "b"), Plain(w(), "a")])[0] == 2
    assert count_traces([Module(w(), 1), Module(w(), 2)])[0] == 2


@pytest.mark.hazard("D7", "E3")
def test_an_array_in_a_static_field_does_not_fail_on_second_use():
    trees = [Static(w(), np.arange(3)) for _ in range(3)]
    count, seen = count_traces(trees)
    assert count == 3  # metadata that refuses comparison is never the same
    assert seen[2].n is trees[2].n
    assert_same_leaves(trees[0], ta.merge(*ta.split(trees[0])))


def assert_same_leaves(one, two):
    assert type(one) is type(two)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True))


@pytest.mark.hazard("H6")
def test_static_values_that_do_not_hash():
    static = [1]
    tree = Static(w(), static)
    assert ta.merge(*ta.split(tree)).n is static
    static.append(2)
    assert ta.tree_paths(tree) == ("w",)


# Ties


@pytest.mark.hazard("E6")
def test_one_array_under_two_paths_is_reported():
    tied = w()
    with pytest.warns(ta.TiedLeafWarning, match=r"'a' and 'b' .* tie=\{'b': 'a'\}"):
        params, _ = ta.split({"a": tied, "b": tied, "c": w()})
    assert set(params) == {"a", "b", "c"}


def test_arrays_of_another_library_are_an_error_with_the_way_out():
    class Tensor:
        shape, dtype = (2,), "torch.float32"

    with pytest.raises(TypeError, match=r"torch\.float32 is not a dtype .*\.numpy\(\)"):
        ta.split({"w": Tensor()})


def test_many_arrays_under_two_paths_are_one_warning():
    arrays = {f"a{number:02}": w() for number in range(60)}
    with pytest.warns(ta.TiedLeafWarning) as caught:
        ta.split({"x": arrays, "y": dict(arrays)})
    (text,) = [str(one.message) for one in caught]
    assert text.startswith("'x/a00' and 'y/a00' (and 59 more pairs of paths) are one")
    assert "'y/a07': 'x/a07', ...}" in text
    assert len(text) < 500

    tied = w()
    tree = {"a": tied, "b": tied, "c": tied, "d": [tied]}
    with pytest.warns(ta.TiedLeafWarning, match="2 more pairs") as caught:
        ta.split(tree)
    (text,) = [str(one.message) for one in caught]
    tie = ast.literal_eval(text[text.index("{") : text.index("}") + 1])
    assert list(ta.split(tree, tie=tie)[0]) == ["a"]


def test_a_tie_is_proposed_to_a_leaf_that_is_not_tied_itself():
    tied = w()
    tree = {"a": tied, "b": tied, "c": tied}
    with pytest.warns(ta.TiedLeafWarning, match=r"tie=\{'c': 'b'\}"):
        ta.split(tree, tie={"a": "b"})
    assert list(ta.split(tree, tie={"a": "b", "c": "b"})[0]) == ["b"]


@pytest.mark.hazard("E7")
def test_a_tie_trains_as_one_and_can_be_donated():
    tied = w()
    tree = {"emb": tied, "head": {"w": tied, "b": jnp.ones(2)}}
    params, rest = ta.split(tree, tie={"head/w": "emb"})
    assert list(params) == ["emb", "head/b"]
    assert rest.arrays == {}

    def loss(params, rest):
        tree = ta.merge(params, rest)
        return tree["emb"].sum() * 2 + tree["head"]["w"].sum() * 3

    grads = jax.grad(loss)(params, rest)
    assert grads["emb"].tolist() == (5 * jnp.ones((2, 3))).tolist()
    step = jax.jit(lambda p, r: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    merged = ta.merge(step(params, rest), rest)
    assert merged["emb"] is merged["head"]["w"]


def test_a_tie_may_join_equal_shapes_and_frozen_sources():
    tree = {"a": w(1.0), "b": w(2.0), "c": w(3.0)}
    params, rest = ta.split(tree, "c", tie={"b": "a"})
    merged = ta.merge(params, rest)
    assert merged["b"] is merged["a"] is tree["a"]
    params, rest = ta.split(tree, tie={"b": "a", "c": "a"})
    assert list(params) == ["a"]
    assert ta.merge({"a": 1}, rest) == {"a": 1, "b": 1, "c": 1}


def test_ties_that_are_said_are_not_reported():
    tied = w()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = {"a": tied, "b": tied, "c": tied}
        ta.split(tree, tie={"b": "a", "c": "a"})
        ta.split(tree, tie={"a": "b", "c": "b"})
        ta.split({**tree, "d": w()}, "d", tie={"b": "a", "c": "a"})
    with pytest.warns(ta.TiedLeafWarning, match="'a' and 'c'"):
        ta.split(tree, tie={"b": "a"})


@pytest.mark.hazard("E14")
def test_what_is_the_same_object_by_chance_is_no_tie():
    shape, scalar = jax.ShapeDtypeStruct((2,), jnp.float32), np.float32(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ta.split({"a": 1.0, "b": 1.0, "c": shape, "d": shape, "e": scalar, "f": scalar})
        jax.jit(lambda x: ta.split({"a": x, "b": x})[0])(w())
        empty = jax.tree.map(lambda _: None, {"a": w(), "b": w()})
        ta.split(empty)


@pytest.mark.hazard("E8")
def test_the_shared_node_of_equinox_survives():
    tree = eqx_shared()
    params, rest = ta.split(tree)
    assert list(params) == ["0/weight", "1/bias"]
    assert_same(tree, ta.merge(params, rest))


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        ({"x": "a"}, "'x' is not an array"),
        ({"a": "x"}, "'x' is not an array"),
        ({"name": "a"}, "'name' is not an array"),
        ({"a": "a"}, "a leaf of its own"),
        ({"a": "b", "b": "c"}, "a leaf of its own"),
        ({"a": "d"}, r"'a' is float32\[2,3\] but 'd' is float32\[4\]"),
        ({"a": "e"}, "bfloat16"),
    ],
)
def test_ties_that_cannot_be(tie, message):
    tree = {
        "a": w(),
        "b": w(),
        "c": w(),
        "d": jnp.ones(4),
        "e": jnp.ones((2, 3), jnp.bfloat16),
        "name": "n",
    }
    with pytest.raises(ta.StructureMismatchError, match=message):
        ta.split(tree, tie=tie)


@pytest.mark.hazard("F9")
def test_one_variable_under_two_paths_is_one_leaf_and_comes_back_tied():
    tree = NnxTied()
    params, rest = ta.split(tree)
    assert list(params) == ["emb/kernel"]
    merged = ta.merge(params, rest)
    assert merged.emb is merged.head
    assert merged.emb.kernel is merged.head.kernel

    def loss(params, rest):
        built = ta.merge(params, rest)
        x = jnp.ones((1, 2))
        return (built.emb(x) * 2 + built.head(x) * 3).sum()

    grads = jax.jit(jax.grad(loss))(params, rest)
    assert grads["emb/kernel"].tolist() == [[5, 5], [5, 5]]


@pytest.mark.hazard("F9")
def test_untied_variables_of_the_same_structure_stay_apart():
    class Pair(nnx.Module):
        def __init__(self, first, second):
            self.first, self.second = first, second

    def linear():
        return nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))

    one = linear()
    for _ in range(2):  # with a cold and a warm cache, in either order
        apart, tied = Pair(linear(), linear()), Pair(one, one)
        assert ta.tree_paths(apart) == ("first/kernel", "second/kernel")
        assert ta.tree_paths(tied) == ("first/kernel",)
        again = ta.merge(*ta.split(apart))
        assert again.first is not again.second
        again = ta.merge(*ta.split(tied))
        assert again.first is again.second


# What does not train


def test_batch_statistics_go_to_the_rest():
    params, rest = ta.split(nnx_batchnorm())
    assert list(params) == ["bias", "scale"]
    assert list(rest.arrays) == ["mean", "var"]
    everything, _ = ta.split(nnx_batchnorm(), arrays="all")
    assert list(everything) == ["bias", "mean", "scale", "var"]
    state = nnx.state(nnx_batchnorm())
    assert list(ta.split(state)[0]) == ["bias", "scale"]


@pytest.mark.hazard("F11")
@pytest.mark.filterwarnings("ignore::treeadapt.RandomStateWarning")
def test_random_state_goes_to_the_rest():
    params, rest = ta.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    assert params == {}
    assert {str(x.dtype) for x in rest.arrays.values()} == {"uint32", "key<fry>"}
    tree = {"d": nnx.Dropout(0.5, rngs=nnx.Rngs(0)), "l": NnxTied()}
    assert type(ta.merge(*ta.split(tree))["d"]) is nnx.Dropout


class Dropping(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(2, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.inner(x))


@pytest.mark.slow
@pytest.mark.hazard("F11b")
def test_random_counts_in_the_rest_are_reported():
    with pytest.warns(ta.RandomStateWarning, match=r"'drop/rngs/key'.*\[1\]"):
        ta.split(Dropping())
    with pytest.warns(ta.RandomStateWarning):
        ta.split(Dropping(), "inner")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ta.split(nnx_batchnorm())
        ta.split({"key": jax.random.key(0), "w": w()})
        ta.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))  # nothing trains
        ta.split(Dropping(), arrays="all")


@pytest.mark.slow
@pytest.mark.hazard("F11b")
@pytest.mark.filterwarnings("ignore::treeadapt.RandomStateWarning")
def test_the_rest_of_a_model_that_was_called_draws_anew():
    traces = []

    @jax.jit
    def step(params, rest):
        def loss(params):
            model = ta.merge(params, rest)
            y = model(jnp.ones((1, 2)))
            return y.sum(), (ta.split(model)[1], y == 0)

        traces.append(1)
        return jax.grad(loss, has_aux=True)(params)[1]

    params, rest = ta.split(Dropping())
    masks = set()
    for _ in range(3):
        rest, mask = step(params, rest)
        masks.add(np.asarray(mask).tobytes())
    assert len(masks) == 3
    assert len(traces) == 1


@pytest.mark.slow
def test_collections_beside_params_are_reported():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(2)(x))

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        variables = Net().init(jax.random.key(0), jnp.ones((2, 2)))
    with pytest.warns(ta.CollectionWarning, match="'batch_stats'.*\"params\""):
        ta.split(variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params, rest = ta.split(variables, "params")
        ta.split(variables["params"])
        ta.split(variables, arrays="all")
        ta.split({"a": {"params": w(), "other": w()}})
        ta.split(variables, ["params", "batch_stats"])
    with pytest.warns(ta.CollectionWarning, match="'batch_stats'"):
        ta.split(variables, ["params", "**/scale", "**/mean"])
    assert all(path.startswith("params/") for path in params)
    assert all(path.startswith("batch_stats/") for path in rest.arrays)


@pytest.mark.hazard("E9", "E9b")
def test_identity_markers_of_stateful_layers_survive():
    tree, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")
    merged = ta.merge(*ta.split(tree))
    assert len(state.get(merged.ema_state_index)) == 2
    assert merged.ema_state_index.marker is tree.ema_state_index.marker
    again = ta.merge(*ta.split(state))
    assert len(again.get(tree.ema_state_index)) == 2
    full = eqx.nn.BatchNorm(3, "batch", mode="ema")  # its index holds the initial state
    params, rest = ta.split(full)
    assert eqx.nn.State(ta.merge(params, rest)).get(full.ema_state_index) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema"),
        lambda: eqx.nn.BatchNorm(3, "batch", mode="batch"),
        lambda: eqx.nn.make_with_state(eqx.nn.SpectralNorm)(
            eqx.nn.Linear(3, 2, key=jax.random.key(0)), "weight", key=jax.random.key(1)
        ),
    ],
)
def test_what_equinox_layers_keep_from_call_to_call_does_not_train(make):
    tree = make()
    trained = {f"{at}{x}" for at in ("", "0/", "0/layer/") for x in ("weight", "bias")}
    params, _ = ta.split(tree)
    assert 0 < len(params) == len(trained.intersection(params))
    kept, _ = ta.split(tree, arrays="all")
    assert len(kept) > len(params)  # also what is saved
    tx = ta.adapt(optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1)))
    grads = ta.map_where(jnp.ones_like, tree, [*kept])
    updates, _ = tx.update(grads, tx.init(tree), tree)
    moved, _ = ta.split(ta.apply_updates(tree, updates), arrays="all")
    changed = {path for path in kept if not np.array_equal(moved[path], kept[path])}
    assert changed == {*params}


@pytest.mark.hazard("E13")
def test_an_old_state_says_so():
    tree, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")
    state.set(tree.ema_state_index, state.get(tree.ema_state_index))
    with pytest.raises(ValueError, match="old state"):
        ta.split(state)


# map_where


def test_map_where_changes_the_selected_arrays_alone():
    tree = model()
    again = ta.map_where(lambda x: x * 2, tree, "enc")
    assert again["enc"]["w"].tolist() == (tree["enc"]["w"] * 2).tolist()
    assert again["head"][0] is tree["head"][0]
    again = ta.map_where(lambda x: x + 1, tree, "**")
    assert again["head"][1] is jax.nn.relu
    assert again["rate"] == 0.5
    with pytest.raises(ta.UnusedRuleError):
        ta.map_where(lambda x: x, tree, "nothing")


@pytest.mark.parametrize(
    "value", [None, {}, {"x": 1.0}, [1.0], optax.MaskedNode(), Plain(np.ones(1), "n")]
)
def test_no_container_takes_the_place_of_a_leaf(value):
    tree = {"a": w(), "b": 1}
    params, rest = ta.split(tree)
    for call in (
        lambda: ta.map_where(lambda x: value, tree, "a"),
        lambda: ta.merge({"a": value}, rest),
        lambda: ta.from_flat_dict(tree, {"a": params["a"], "b": value}),
        lambda: ta.from_flat_dict(tree, {"a": value, "b": 1}, strict=False),
        lambda: ta.from_state_dict([w(), 1], {"0": value, "1": 1}, strict=False),
    ):
        with pytest.raises(ta.StructureMismatchError):
            call()


def test_map_where_may_change_what_stands_there():
    plain = ta.map_where(str, Plain(np.ones(1), "n"), "w")
    assert plain.w == "[1.]"


class Named(NamedTuple):
    count: Any
    index: Any


@pytest.mark.hazard("C9")
def test_fields_that_hide_methods_of_tuple():
    tree = Named(w(), [w()])
    assert ta.tree_paths(tree) == ("count", "index/0")
    assert_same(tree, ta.merge(*ta.split(tree, "index", nested=True)))


def test_a_selector_of_arrays_none_of_which_trains_is_an_error():
    tree = {"w": jnp.ones(2), "n": jnp.arange(3), "m": jnp.arange(2)}
    for where, seen in (
        ("n", "1 array, .*'n', int32"),
        (["n", "m"], "2 arrays, .*'m', int32"),
        (~ta.glob("w"), "2 arrays"),
    ):
        with pytest.raises(
            ta.NoArraysError, match=f"selects {seen}.*is not floating-point"
        ):
            ta.split(tree, where)
        assert ta.split(tree, where, arrays="all")[0]
    with pytest.raises(ta.NoArraysError, match=r"'mean', float32.*does not train"):
        ta.split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), ["mean", "var"])
    assert ta.split({"n": jnp.arange(3)})[0] == {}
    assert ta.split(tree, [])[0] == {}


def test_a_rest_that_cannot_be_donated_says_so():
    shared = jnp.ones(3)
    tree = {"a": shared, "b": shared, "w": jnp.ones(2)}
    with pytest.warns(ta.TiedLeafWarning, match="'a' and 'b' .* cannot be donated"):
        params, rest = ta.split(tree, "w")
    step = jax.jit(lambda params, rest: (params, rest), donate_argnums=1)
    with pytest.raises(Exception, match="donate the same buffer twice"):
        step(params, rest)
    params, rest = ta.split(tree, "w", tie={"b": "a"})
    params, rest = step(params, rest)
    assert ta.merge(params, rest)["b"] is ta.merge(params, rest)["a"]


@pytest.mark.parametrize("where", ["**/<Linear>", ta.node(eqx.nn.Linear)], ids=repr)
def test_the_rest_of_a_split_has_no_classes(where):
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    _, rest = ta.split(model, "layers/0/**")
    with pytest.raises(ta.SelectorError, match=r"the rest of a split.*\.bind\(tree\)"):
        ta.split(rest, where)
    bound = ta.Rules([(where, "a")]).bind(model).where("a")
    params, _ = ta.split(rest, bound)
    assert list(params) == ["layers/1/weight", "layers/1/bias"]
