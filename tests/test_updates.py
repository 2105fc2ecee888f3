"""New parameters from updates: Optax's numbers, every tree, and no drift of bits."""

from __future__ import annotations

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import like
from sizes import some
from trees import TREES, mlp, structure

import treeadapt as ta


@pytest.fixture(autouse=True)
def _positions_are_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnstablePathWarning)
        yield


every_tree = pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def bits(leaf):
    data = np.asarray(leaf)
    return data.dtype, data.shape, data.tobytes()


def inexact(leaf):
    return eqx.is_inexact_array_like(leaf) and hasattr(leaf, "dtype")


def with_leaves(tree, make):
    """The tree with ``make(leaf)`` for each inexact array, and None elsewhere."""
    leaves = ta.to_flat_dict(tree).items()
    return like(tree, {path: make(x) for path, x in leaves if inexact(x)})


@every_tree
def test_every_tree_gets_the_numbers_of_the_flat_dict(row):
    tree = row.make()
    leaves = ta.to_flat_dict(tree)
    moved = {path: x for path, x in leaves.items() if inexact(x)}
    with jax.numpy_dtype_promotion("standard"):
        want = optax.apply_updates(moved, {p: x * 0 + 1 for p, x in moved.items()})
        new = ta.apply_updates(tree, with_leaves(tree, lambda x: x * 0 + 1))
    assert structure(new) == structure(tree)
    assert type(new) is type(tree)
    for path, after in ta.to_flat_dict(new).items():
        if path in want:
            assert bits(after) == bits(want[path])
        else:
            assert after is leaves[path]


@every_tree
def test_no_update_at_all_gives_the_callers_own_leaves(row):
    tree = row.make()
    new = ta.to_flat_dict(ta.apply_updates(tree, {}))
    assert all(new[path] is x for path, x in ta.to_flat_dict(tree).items())


@pytest.mark.parametrize("row", some(TREES), ids=lambda row: row.name)
def test_zero_updates_of_every_leaf_keep_every_bit(row):
    tree = row.make()
    new = ta.apply_updates(tree, with_leaves(tree, lambda x: x * 0))
    new = ta.to_flat_dict(new)
    for path, before in ta.to_flat_dict(tree).items():
        assert new[path] is before or bits(new[path]) == bits(jnp.asarray(before))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("delta_dtype", FLOATS)
@pytest.mark.parametrize("jit", [False, True])
def test_a_zero_keeps_the_bits_of_every_float(dtype, delta_dtype, jit):
    width = np.dtype(dtype).itemsize
    every = np.arange(2**16, dtype=np.uint16)
    # Every sign and exponent of the 32-bit floats, with some payloads.
    pattern = every if width == 2 else every.astype(np.uint32) << 16 | every[::-1] >> 3
    leaf = jnp.asarray(pattern.view(dtype))
    step = jax.jit(ta.apply_updates) if jit else ta.apply_updates
    with jax.numpy_dtype_promotion("standard"):
        new = step({"w": leaf}, {"w": jnp.zeros(leaf.shape, delta_dtype)})["w"]
        new = step({"w": new}, {"w": -jnp.zeros(leaf.shape, delta_dtype)})["w"]
    assert new.dtype == dtype
    assert np.asarray(new).tobytes() == pattern.tobytes()


def test_optax_itself_loses_the_sign_of_a_zero():
    # If Optax changes this, ``apply_updates`` may become simpler.
    assert not jnp.signbit(optax.apply_updates(jnp.array(-0.0), jnp.array(0.0)))
    assert jnp.signbit(ta.apply_updates(jnp.array(-0.0), jnp.array(0.0)))


numbers = st.floats(width=32, allow_subnormal=True)


@pytest.mark.slow
@given(
    st.lists(st.tuples(numbers, numbers), min_size=4, max_size=4),  # compiled once
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
)
def test_nonzero_updates_give_the_bits_of_optax(pairs, dtype, delta_dtype):
    with np.errstate(all="ignore"):
        leaf = np.array([one for one, _ in pairs], np.float32).astype(dtype)
        delta = np.array([two for _, two in pairs], np.float32).astype(delta_dtype)
    tree, updates = {"a": [jnp.asarray(leaf)]}, {"a": [jnp.asarray(delta)]}
    with jax.numpy_dtype_promotion("standard"):
        want = optax.apply_updates(tree, updates)["a"][0]
        new = ta.apply_updates(tree, updates)["a"][0]
    assert (new.dtype, new.shape, new.weak_type) == (want.dtype, want.shape, False)
    # As XLA compares: on some CPUs it takes subnormal numbers for zero.
    moved = np.asarray(jnp.asarray(delta) != 0)
    assert np.asarray(new)[moved].tobytes() == np.asarray(want)[moved].tobytes()


@pytest.mark.slow
def test_other_dtypes_get_the_numbers_of_optax():
    tree = {
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j, -0.0j]),
        "int": jnp.array([1, -1], jnp.int8),
        "numpy": np.array([1.0, 2.0], np.float32),
        "scalar": np.float32(0.5),
    }
    updates = {
        "bool": jnp.array([True, False]),
        "complex": jnp.array([0j, 1j]),
        "int": jnp.array([3, 0], jnp.int8),
        "numpy": np.array([1.0, 0.0], np.float32),
        "scalar": jnp.float32(0.25),
    }
    want, new = optax.apply_updates(tree, updates), ta.apply_updates(tree, updates)
    for name in tree:
        assert new[name].dtype == want[name].dtype
        assert (new[name] == want[name]).all()


def test_python_numbers_move_as_with_optax_and_stay_without_an_update():
    tree = {"a": 1.0, "b": 2, "c": 3.0, "d": 4.0}
    new = ta.apply_updates(tree, {"a": 0.5, "b": jnp.array(1), "c": 0.0, "d": None})
    assert new["a"] == 1.5
    assert isinstance(new["a"], jax.Array)
    assert new["b"] == 3
    assert new["c"] is tree["c"]
    assert new["d"] is tree["d"]


def test_float0_none_and_masked_nodes_are_not_updates():
    tree = {
        "i": jnp.arange(3),
        "k": jax.random.key(0),
        "m": jnp.ones(1),
        "n": jnp.ones(1),
    }
    float0 = np.zeros(3, jax.dtypes.float0)
    key0 = np.zeros((), jax.dtypes.float0)
    updates = {"i": float0, "k": key0, "m": optax.MaskedNode(), "n": None}
    new = ta.apply_updates(tree, updates)
    assert all(new[name] is tree[name] for name in tree)


def test_integers_stay_bit_for_bit_under_zeros():
    tree = {"i": jnp.array([1, 2, 3]), "b": jnp.array([True, False])}
    new = jax.jit(ta.apply_updates)(tree, jax.tree.map(jnp.zeros_like, tree))
    assert all(bits(new[name]) == bits(tree[name]) for name in tree)


def test_masked_nodes_and_none_in_the_tree_stay():
    tree = {"a": optax.MaskedNode(), "b": jnp.ones(1), "c": None}
    new = ta.apply_updates(tree, {"a": optax.MaskedNode(), "b": jnp.ones(1), "c": None})
    assert jax.tree.structure(new) == jax.tree.structure(tree)
    assert new["b"] == 2


def test_a_raw_equinox_model_takes_filtered_updates():
    model = mlp()
    updates = jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_inexact_array))
    new = eqx.filter_jit(ta.apply_updates)(model, updates)
    want = eqx.apply_updates(model, updates)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert new.activation is model.activation
    for one, two in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        assert not eqx.is_array(one) or bits(one) == bits(two)


def test_a_raw_model_may_hold_its_own_functions_among_the_updates():
    model = mlp()
    updates = jax.tree.map(lambda x: x if callable(x) else jnp.ones_like(x), model)
    assert ta.apply_updates(model, updates).activation is model.activation


def test_updates_may_come_as_a_flat_dict():
    new = ta.apply_updates({"a": [jnp.ones(2), jnp.ones(2)]}, {"a/1": jnp.ones(2)})
    assert new["a"][0].tolist() == [1, 1]
    assert new["a"][1].tolist() == [2, 2]


def test_leaf_order_of_the_two_trees_does_not_matter():
    layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))  # weight before bias
    flat = {"bias": jnp.ones(3), "weight": jnp.zeros((3, 2))}
    new = ta.apply_updates(layer, flat)
    assert bits(new.bias) == bits(layer.bias + 1)
    assert bits(new.weight) == bits(layer.weight)


def test_colliding_paths_are_allowed_if_the_structure_is_the_same():
    tree = {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
    new = ta.apply_updates(tree, {"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}})
    assert (new["a/b"], new["a"]["b"]) == (2, 1)
    with pytest.raises(ta.PathCollisionError, match="a/b"):
        ta.apply_updates(tree, {"a": {"b": jnp.ones(1)}})


@pytest.mark.parametrize(
    ("updates", "error", "words"),
    [
        ({"wieght": jnp.ones(2)}, ta.StructureMismatchError, r"'wieght'.*has 'weight'"),
        ({"weight": jnp.ones(3)}, ta.StructureMismatchError, r"'weight'.*\[3\].*\[2\]"),
        ({"weight": jnp.ones(())}, ta.StructureMismatchError, "'weight'"),
        ({"weight": 0.5}, ta.StructureMismatchError, "'weight'.*a float"),
        ({"weight": "up"}, ta.TransformError, "'weight'.*a str"),
        ({"weight": jax.random.key(0)}, ta.TransformError, "'weight'.*key"),
        ({"act": 0.5}, ta.TransformError, "'act'"),
        ({"act": jnp.ones(())}, ta.TransformError, "'act'"),
        ({"act": jax.nn.gelu}, ta.TransformError, "'act'"),
        ({"key": jnp.zeros(())}, None, ""),
        ({"key": jnp.ones(())}, ta.TransformError, "'key'"),
        ({"act": 0.0, "key": 0}, None, ""),
    ],
)
def test_updates_that_do_not_fit_are_named(updates, error, words):
    tree = {"act": jax.nn.relu, "key": jax.random.key(0), "weight": jnp.ones(2)}
    if error is None:
        new = ta.apply_updates(tree, updates)
        assert all(new[name] is tree[name] for name in tree)
        return
    with pytest.raises(error, match=words):
        ta.apply_updates(tree, updates)


def test_a_traced_update_of_a_function_is_an_error():
    tree = {"act": jax.nn.relu}
    with pytest.raises(ta.TransformError, match="'act'"):
        jax.jit(lambda delta: ta.apply_updates(tree, {"act": delta}))(jnp.zeros(()))


@pytest.mark.slow
def test_a_message_about_many_leaves_is_short():
    tree = {f"layer_{i}": jnp.ones(2) for i in range(1_000)}
    with pytest.raises(ta.StructureMismatchError) as info:
        ta.apply_updates(tree, {name: jnp.ones(3) for name in tree})
    assert len(str(info.value).encode()) <= 4_000
    assert "and 992 more" in str(info.value)


@pytest.mark.slow
def test_derivatives_are_those_of_optax():
    tree, updates = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([0.0, 3.0])}

    def loss(fn):
        return lambda p, u: jnp.sum(fn(p, u)["w"] ** 3)

    ours = jax.grad(loss(ta.apply_updates), (0, 1))(tree, updates)
    want = jax.grad(loss(optax.apply_updates), (0, 1))(tree, updates)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), ours, want))
    ours = jax.hessian(loss(ta.apply_updates), 1)(tree, updates)
    want = jax.hessian(loss(optax.apply_updates), 1)(tree, updates)
    assert (ours["w"]["w"] == want["w"]["w"]).all()


def test_the_learning_rate_gets_its_derivative_at_zero():
    def loss(rate):
        return ta.apply_updates(jnp.ones(3), -rate * jnp.ones(3)).sum()

    assert jax.grad(loss)(0.0) == -3


def test_derivatives_skip_integers():
    tree = {"n": jnp.arange(2), "w": jnp.ones(2)}

    def loss(w, n):
        return ta.apply_updates({"n": n, "w": w}, {"n": jnp.ones_like(n), "w": w})[
            "w"
        ].sum()

    assert jax.jit(jax.grad(loss))(tree["w"], tree["n"]).tolist() == [2, 2]


@pytest.mark.slow
def test_it_scans_and_maps():
    params = {"i": jnp.arange(2), "w": jnp.array([-0.0, 1.0], jnp.bfloat16)}
    updates = {"i": jnp.zeros(2, int), "w": jnp.array([0.0, 0.5], jnp.bfloat16)}

    def step(params, _):
        return ta.apply_updates(params, updates), None

    new = jax.lax.scan(step, params, length=4)[0]
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, params)
    assert new["w"][1] == 3
    assert jnp.signbit(new["w"][0])
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), (params, updates))
    mapped = jax.vmap(ta.apply_updates)(*stacked)
    assert mapped["w"].shape == (2, 2)


def test_each_leaf_is_one_fused_kernel():
    tree = {"w": jnp.ones((64, 64)), "v": jnp.ones((64, 64), jnp.bfloat16)}
    compiled = jax.jit(ta.apply_updates, donate_argnums=0).lower(tree, tree).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    entry = compiled.as_text().split("ENTRY")[1]
    assert entry.count(" fusion(") == 2


def test_nothing_is_transferred():
    params = {
        "w": jnp.ones(3),
        "half": jnp.ones(2, jnp.bfloat16),
        "complex": jnp.ones(2, jnp.complex64),
        "steps": jnp.arange(3),
    }
    updates = jax.tree.map(lambda leaf: leaf * 0, params) | {"w": jnp.ones(3)}
    with jax.transfer_guard("disallow"):
        optax.apply_updates(params, updates)  # Optax transfers nothing either
        new = ta.apply_updates(params, updates)
    assert new["w"].tolist() == [2, 2, 2]


@pytest.mark.slow
def test_it_keeps_the_sharding():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    leaf = jax.device_put(jnp.ones((8, 2)), sharding)
    new = ta.apply_updates({"w": leaf}, {"w": leaf})["w"]
    assert new.sharding.is_equivalent_to(sharding, 2)
    spec = jax.P("x")
    parts = jax.shard_map(ta.apply_updates, mesh=mesh, in_specs=spec, out_specs=spec)
    assert bits(parts({"w": leaf}, {"w": leaf})["w"]) == bits(new)


def test_equal_trees_are_traced_once():
    traces = []

    @jax.jit
    def step(tree, updates):
        traces.append(1)
        return ta.apply_updates(tree, updates)

    tree = {"w": jnp.ones(2), "i": jnp.arange(2)}
    for _ in range(5):
        tree = step(tree, {"w": jnp.ones(2), "i": None})
    assert len(traces) == 1


# incremental_update


@every_tree
def test_an_average_gets_the_numbers_of_the_flat_dict(row):
    old = row.make()
    leaves = ta.to_flat_dict(old)
    moved = {path: x for path, x in leaves.items() if inexact(x)}
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves.values()):
        return
    newer = {path: x * 0 + 3 for path, x in moved.items()}
    want = optax.incremental_update(newer, moved, 0.25)
    new = ta.incremental_update(with_leaves(old, lambda x: x * 0 + 3), old, 0.25)
    assert structure(new) == structure(old)
    for path, after in ta.to_flat_dict(new).items():
        assert after is leaves[path] or bits(after) == bits(jnp.asarray(want[path]))


def test_an_average_takes_leaves_that_do_not_move_from_the_old_tree():
    old = {"act": jax.nn.relu, "i": jnp.array(1), "k": jax.random.key(0), "r": 0.5}
    new = {"act": jax.nn.gelu, "i": jnp.array(9), "k": jax.random.key(1), "r": 0.9}
    got = ta.incremental_update(
        {**new, "w": jnp.ones(1)}, {**old, "w": jnp.zeros(1)}, 0.5
    )
    assert got["w"] == 0.5
    assert all(got[name] is old[name] for name in old)


def test_an_average_of_another_class_keeps_the_class_of_the_old_one():
    model = mlp()
    params, _ = ta.split(model)
    got = eqx.filter_jit(ta.incremental_update)(params, model, 0.5)
    assert jax.tree.structure(got) == jax.tree.structure(model)
    assert bits(got.layers[0].bias) == bits(model.layers[0].bias)


def test_an_average_scans_with_an_array_step_size():
    old = {"w": jnp.zeros(2, jnp.bfloat16)}
    new = {"w": jnp.ones(2, jnp.bfloat16)}

    def step(average, size):
        return ta.incremental_update(new, average, size), None

    with jax.numpy_dtype_promotion("standard"):
        got = jax.lax.scan(step, old, jnp.array([0.5, 0.5]))[0]
    assert got["w"].dtype == jnp.bfloat16
    assert got["w"].tolist() == [0.75, 0.75]


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({"a": jnp.ones(2)}, "`old`.*'b'"),
        ({"a": jnp.ones(2), "b": None}, "`old`.*'b'"),
        ({"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(1)}, "'c'"),
        ({"a": jnp.ones(2), "b": jnp.ones(3)}, r"'b'.*\[3\].*\[2\]"),
        ({"a": jnp.ones(2), "b": jnp.arange(2)}, None),
    ],
)
def test_an_average_needs_both_trees(new, words):
    old = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    if words is None:
        with jax.numpy_dtype_promotion("standard"):
            assert ta.incremental_update(new, old, 0.5)["b"].tolist() == [0, 0.5]
        return
    with pytest.raises(ta.StructureMismatchError, match=words):
        ta.incremental_update(new, old, 0.5)
