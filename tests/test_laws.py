"""The laws, each over the one shared table of trees."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import (
    BY_NAME,
    SAME_MODEL,
    TREES,
    WITHOUT_ARRAYS,
    assert_same,
    two_layers,
)

import treeadapt as ta


@pytest.fixture(autouse=True)
def _positions_are_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnstablePathWarning)
        yield


every_tree = pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)


@every_tree
def test_paths_are_those_of_the_table(row):
    assert ta.tree_paths(row.make()) == row.paths


@every_tree
def test_law_1_state_dict_round_trip(row):
    tree = row.make()
    assert_same(tree, ta.from_state_dict(tree, ta.to_state_dict(tree)))


@every_tree
def test_law_1_flat_dict_round_trip(row):
    tree = row.make()
    assert_same(tree, ta.from_flat_dict(tree, ta.to_flat_dict(tree)))


@every_tree
def test_law_1_the_result_has_the_treedef_of_the_target(row):
    tree = row.make()
    again = ta.from_flat_dict(tree, ta.to_flat_dict(tree))
    if not row.opaque:
        assert jax.tree.structure(again) == jax.tree.structure(tree)


@every_tree
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("arrays", ["inexact", "all"])
def test_law_1_merge_undoes_split(row, nested, arrays):
    tree = row.make()
    where = [] if not row.paths else "**"
    params, rest = ta.split(tree, where, arrays=arrays, nested=nested)
    assert_same(tree, ta.merge(params, rest))


@every_tree
def test_law_1_with_a_second_tree_of_the_kind_as_target(row):
    tree, target = row.make(), row.make()
    again = ta.from_state_dict(target, ta.to_state_dict(tree))
    assert_same(tree, again)


@every_tree
def test_state_dict_is_plain(row):
    def check(node):
        if type(node) is dict:
            assert all(type(key) is str for key in node)
            for child in node.values():
                check(child)
        else:
            assert node is None or jax.tree.structure(node).num_leaves == 1

    check(ta.to_state_dict(row.make()))


@every_tree
def test_law_2_no_leaf_is_lost(row):
    tree = row.make()
    flat = ta.to_flat_dict(tree)
    nested = jax.tree.leaves(ta.to_state_dict(tree))
    assert len(flat) == len(row.paths) == len(nested)
    assert {id(leaf) for leaf in flat.values()} == {id(leaf) for leaf in nested}
    if not row.opaque and row.name != "nnx tied":
        leaves = jax.tree.leaves(tree)
        assert all(a is b for a, b in zip(flat.values(), leaves, strict=True))


def test_law_3_one_model_has_one_set_of_paths():
    assert len(SAME_MODEL) >= 18
    for row in SAME_MODEL:
        assert set(ta.tree_paths(row.make())) == set(BY_NAME["dict"].paths), row.name


@pytest.mark.hazard("D1")
@pytest.mark.parametrize("make", WITHOUT_ARRAYS.values(), ids=WITHOUT_ARRAYS)
def test_law_3_a_tree_of_masks_labels_or_shapes_has_the_paths_of_its_model(make):
    tree = make()
    assert ta.tree_paths(tree) == BY_NAME["dataclass"].paths
    for again in (
        ta.from_state_dict(tree, ta.to_state_dict(tree)),
        ta.from_flat_dict(tree, ta.to_flat_dict(tree)),
        ta.merge(*ta.split(tree, [])),
    ):
        assert_same(tree, again)


def test_law_3_the_mask_of_a_model_of_plain_dataclasses_reaches_its_leaves():
    model = BY_NAME["dataclass"].make()
    mask = ta.param_mask(model, "**/w")
    assert type(mask) is type(model)
    assert ta.to_flat_dict(mask) == {
        path: path.endswith("w") for path in BY_NAME["dataclass"].paths
    }
    params, _ = ta.split(model)
    tx = optax.add_decayed_weights(0.5, mask=ta.lift(mask))
    updates, _ = tx.update(
        jax.tree.map(jnp.zeros_like, params),
        tx.init(params),
        jax.tree.map(jnp.ones_like, params),
    )
    moved = {path for path, update in updates.items() if update.any()}
    assert moved == {"hidden/w", "out/w"}


@pytest.mark.hazard("B6")
def test_law_3_insertion_order_and_class_name_do_not_matter():
    forward = ta.tree_paths({"a": {"x": 1.0, "y": 2.0}, "b": 3.0})
    assert ta.tree_paths({"b": 3.0, "a": {"y": 2.0, "x": 1.0}}) == forward


def test_law_3_same_state_dict_loads_into_every_container():
    model = two_layers(dict, dict)
    for row in SAME_MODEL:
        loaded = ta.from_state_dict(row.make(), model)
        flat = ta.to_flat_dict(loaded)
        assert flat["hidden/w"] is model["hidden"]["w"], row.name
        assert flat["out/b"] is model["out"]["b"], row.name


def _map(fn, flat):
    return {path: fn(leaf) for path, leaf in flat.items()}


def _abstract(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def lenient(where):
    """The selector, without errors where nothing satisfies it."""
    return ta.Rules([(where, True), ("**", False)], unused="ignore").where(True)


#: What a function inside a transformation may make of the flat dict that it is shown.
VARIANTS = {
    "as it is": lambda flat: flat,
    "fewer leaves": lambda flat: dict(list(flat.items())[::2]),
    "one more axis": lambda flat: _map(lambda x: jnp.ones((2, *x.shape)), flat),
    "without axes": lambda flat: _map(lambda _: jnp.ones(()), flat),
    "other shapes": lambda flat: {
        path: jnp.ones((2,) * (n % 3)) for n, path in enumerate(flat)
    },
    "other dtypes": lambda flat: _map(lambda x: jnp.ones(x.shape, bool), flat),
    "abstract": lambda flat: _map(_abstract, flat),
    "abstract and other": lambda flat: {
        path: jax.ShapeDtypeStruct((3,) * (n % 3), jnp.int32)
        for n, path in enumerate(flat)
    },
    "numbers": lambda flat: dict.fromkeys(flat, 1.0),
}
ASKED = {
    "ndim": lenient(ta.leaf(ndim=2)),
    "dtype": lenient(ta.leaf(dtype=jnp.float32)),
    "size": lenient(~ta.leaf(min_size=3)),
    "function": lenient(ta.leaf(lambda x: x.shape[:1] == (2,))),
    "path": lenient("**/w"),
    "rules": ta.Rules([(ta.leaf(ndim=2), 1), ("**", 2)], unused="ignore"),
    "lifted": ta.lift(
        lambda tree: {
            path: getattr(leaf, "ndim", 0) == 2
            for path, leaf in ta.to_flat_dict(tree).items()
        }
    ),
}


@every_tree
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_law_4_a_selector_answers_for_the_tree_that_it_is_given(row, jitted):
    flat, _ = ta.split(row.make())
    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in flat.values())
    if not flat or row.opaque or (jitted and is_abstract):
        pytest.skip("no transformation runs on it")
    if jitted:
        flat = _map(jnp.asarray, flat)  # of the dtype that jit makes of NumPy's
    answers, wanted = {}, {}

    def update(updates, state, params=None):
        for name, vary in VARIANTS.items():
            for kind, asked in ASKED.items():
                answers[name, kind] = asked(vary(params))
        return updates, state

    tx = ta.adapt(optax.GradientTransformation(lambda _: optax.EmptyState(), update))

    def step(flat):
        params = ta.merge(flat, ta.split(row.make())[1])
        updates = tx.update(params, tx.init(params), params)[0]
        return ta.split(updates, arrays="all")[0]

    _ = jax.jit(step)(flat) if jitted else step(flat)
    for name, vary in VARIANTS.items():
        for kind, asked in ASKED.items():
            wanted[name, kind] = asked(vary(flat))
    assert answers == wanted


@every_tree
def test_law_4_an_optimizer_of_another_model_decides_on_that(row):
    flat = ta.split(row.make())[0]
    if len(flat) < 2 or row.opaque:
        pytest.skip("nothing here is shown to a transformation")
    ranks = {path: 2 - n % 2 for n, path in enumerate(flat)}
    small = {path: jnp.ones((2,) * rank) for path, rank in ranks.items()}
    big = {path: jnp.ones((2,) * (3 - rank)) for path, rank in ranks.items()}
    makers = {
        "freeze": lambda: ta.freeze(optax.trace(0.9), ta.leaf(ndim=2)),
        "partition": lambda: ta.partition(
            {"slow": optax.trace(0.9)},
            [(ta.leaf(ndim=2), "frozen"), ("**", "slow")],
        ),
        "adapt": lambda: ta.adapt(optax.masked(optax.trace(0.9), ta.leaf(ndim=1))),
    }
    for maker in makers.values():
        tx = maker()
        want = tx.update(small, tx.init(small), small)
        inner = {}

        def init(_, tx=tx, inner=inner):
            inner["state"] = tx.init(small)
            return optax.EmptyState()

        def update(updates, state, _=None, tx=tx, inner=inner):
            inner["step"] = tx.update(small, inner["state"], small)
            return updates, state

        outer = ta.adapt(optax.GradientTransformation(init, update))
        outer.update(big, outer.init(big), big)
        assert jax.tree.structure(inner["step"]) == jax.tree.structure(want)
        assert ta.tree_paths(inner["step"][1]) == ta.tree_paths(want[1])


@every_tree
def test_law_8_conversion_adds_no_operation_and_one_trace(row):
    target = row.make()
    arrays = ta.split(target, "**" if row.paths else [], arrays="all")[0]
    concrete = {k: v for k, v in arrays.items() if isinstance(v, jax.Array)}

    def identity(leaves):
        tree = ta.from_flat_dict(target, {**arrays, **leaves}, strict=False)
        flat = ta.to_flat_dict(ta.from_state_dict(tree, ta.to_state_dict(tree)))
        return {key: flat[key] for key in leaves}

    assert jax.make_jaxpr(identity)(concrete).eqns == []
    assert_traced_once(identity, [concrete] * 100)


def assert_traced_once(fn, arguments):
    traces = []

    @jax.jit
    def counted(argument):
        traces.append(1)
        return fn(argument)

    for argument in arguments:
        counted(argument)
    assert len(traces) == 1


@every_tree
def test_law_8_rest_of_equal_trees_gives_one_trace(row):
    tree = row.make()
    arrays = ta.split(tree, [])[1].arrays.values()
    if not all(isinstance(leaf, jax.Array) for leaf in arrays):
        pytest.skip("abstract and float64 leaves cannot be jit arguments")
    rests = [ta.split(tree, [])[1] for _ in range(3)]
    assert_traced_once(lambda rest: rest.arrays, rests)


def test_law_8_sharded_arrays_are_not_touched():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    leaf = jax.device_put(jnp.arange(8.0), sharding)
    for row in SAME_MODEL:
        target = row.make()
        with jax.transfer_guard("disallow"):
            filled = dict.fromkeys(row.paths, leaf)
            tree = ta.from_flat_dict(target, filled, strict=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ta.TiedLeafWarning)
                params, rest = ta.split(tree, "hidden")
            merged = ta.merge(params, rest)
        assert all(x is leaf for x in ta.to_flat_dict(merged).values()), row.name


@pytest.mark.slow
def test_law_10_every_error_stays_below_4_kb():
    big = {f"layer_{i}": np.ones((2, 3), np.float32) for i in range(20_000)}
    damaged = {f"Layer_{i}": 1.0 for i in range(20_000)}
    with pytest.raises(ta.StructureMismatchError) as raised:
        ta.from_flat_dict(big, damaged)
    assert len(str(raised.value).encode()) <= 4096
    assert "'layer_{0..19999}'" in str(raised.value)
