"""``per_layer`` on meshes of the eight devices of a CPU: what it makes is in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sizes import slow_but

import treeadapt as ta

# Optax itself promotes.
pytestmark = pytest.mark.usefixtures("standard_promotion")

# Outside of jit, earlier releases of JAX lose the devices of arrays with Explicit axes.
KINDS = ["Auto", "Explicit"] if jax.__version_info__ >= (0, 10) else ["Auto"]
both_meshes = pytest.mark.parametrize("kind", KINDS)

#: Sharded along the layers, in one array and not in another, over both axes of a mesh.
SPECS = {
    "arrays differ": {"w": P("data", "model", None), "b": P(None, "data")},
    "along others": {"w": P(None, "model", "data"), "b": P(None, "model")},
    "over both": {"w": P(("data", "model"), None, None), "b": P(None, None)},
}

TRANSFORMATIONS = {
    "adam": optax.adam(0.1),
    "muon": optax.contrib.muon(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": optax.lamb(0.1),
    "a chain with masks": optax.chain(
        optax.masked(optax.trace(0.9), ta.leaf(ndim=2)),
        optax.masked(optax.scale(-0.1), ~ta.leaf(ndim=2)),
    ),
    "a count in use": optax.sgd(optax.linear_schedule(0.1, 0.01, 5), momentum=0.9),
    "prodigy": optax.contrib.prodigy(0.1),
    "no state": optax.set_to_zero(),
}


def mesh_of(kind: str) -> jax.sharding.Mesh:
    types = (getattr(AxisType, kind),) * 2
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


def params_on(kind: str, specs: Any) -> Any:
    mesh = mesh_of(kind)
    arrays = {
        "w": jnp.sin(jnp.arange(8 * 16 * 4.0)).reshape(8, 16, 4),
        "b": jnp.cos(jnp.arange(8 * 4.0)).reshape(8, 4),
    }
    put = {
        n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()
    }
    return {
        "blocks": put,
        "head": jax.device_put(jnp.ones(4), NamedSharding(mesh, P())),
    }


def stepping(tx: Any) -> Callable[..., Any]:
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        return updates, state

    return step


def misplaced(tree: Any, like: Any) -> list[str]:
    """The paths of arrays that are sharded otherwise than those of ``like``."""
    leaves, others = ta.to_flat_dict(tree), ta.to_flat_dict(like)
    assert leaves.keys() == others.keys()
    return [
        path
        for path, leaf in leaves.items()
        if not leaf.sharding.is_equivalent_to(
            getattr(others[path], "sharding", others[path]), leaf.ndim
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "where"),
    [
        *itertools.product(TRANSFORMATIONS, KINDS, ["arrays differ"]),
        *itertools.product(["adam", "muon"], KINDS, list(SPECS)[1:]),
    ],
)
def test_state_and_updates_stay_with_the_params(name, kind, where):
    tx, params = (
        ta.per_layer(TRANSFORMATIONS[name], {"blocks": 0}),
        params_on(kind, SPECS[where]),
    )
    alone = jax.device_put(jax.tree.map(np.asarray, params), jax.devices()[0])
    state, start = tx.init(params), tx.init(alone)
    arrays = ta.to_flat_dict(params)
    for path, leaf in ta.to_flat_dict(state.get("blocks", {})).items():
        assert len(leaf.sharding.device_set) == 8, path
        param = next((p for p in arrays if path.endswith(p)), None)
        if param and leaf.shape == arrays[param].shape:
            same = leaf.sharding.is_equivalent_to(arrays[param].sharding, leaf.ndim)
            assert same, path
    updates, after = stepping(tx)(params, state)
    assert misplaced(after["blocks"], state["blocks"]) == []
    assert misplaced(updates, params) == []
    want, _ = stepping(tx)(alone, start)
    with jax.set_mesh(params["head"].sharding.mesh):  # for what reads no array
        compiled, _ = jax.jit(stepping(tx))(params, state)
    for one in (updates, compiled):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=3e-6), one, want
        )
    # Powers of Adam's decays, one a layer, round otherwise where devices share them.
    if name in ("a chain with masks", "a count in use", "no state"):
        jax.tree.map(np.testing.assert_array_equal, updates, want)  # elementwise


@pytest.mark.parametrize(
    ("kind", "where"),
    slow_but([], itertools.product(KINDS, SPECS)),
)
def test_init_sharded_makes_the_state_where_its_shardings_say(kind, where):
    tx, params = (
        ta.per_layer(TRANSFORMATIONS["adafactor"], {"blocks": 0}),
        params_on(kind, SPECS[where]),
    )
    state, shardings = ta.init_sharded(tx, params), ta.opt_state_shardings(tx, params)
    assert misplaced(state, shardings) == []
    _, after = stepping(tx)(params, state)
    if kind == "Explicit":
        _, after = jax.jit(stepping(tx))(params, state)
        assert misplaced(after, shardings) == []


@pytest.mark.slow
@both_meshes
def test_nested_stacks_along_any_axis_stay_too(kind):
    mesh, stacks = mesh_of(kind), {"blocks": 1, "blocks/experts": 0}
    specs = {"experts": {"w": P("model", "data", None)}, "b": P(None, "data")}
    blocks = {
        "experts": {"w": jnp.sin(jnp.arange(2 * 8 * 6.0)).reshape(2, 8, 6)},
        "b": jnp.ones((6, 8)),
    }
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = {"blocks": jax.device_put(blocks, shardings)}
    tx = ta.per_layer(optax.chain(optax.lamb(0.1), optax.adafactor(0.1)), stacks)
    state = tx.init(params)
    mu = ta.to_flat_dict(state["blocks/experts"])["0/0/mu/blocks/experts/w"]
    assert mu.sharding.spec == P("model", "data", None)
    updates, after = stepping(tx)(params, state)
    assert misplaced(updates, params) == []
    assert misplaced(after, state) == []


@both_meshes
def test_groups_of_a_partition_stay_too(kind):
    params = params_on(kind, SPECS["arrays differ"])
    table = {"blocks/{4..7}": "a", "**": "frozen"}
    stacks = {"blocks": 0}
    tx = ta.partition(
        {"a": ta.per_layer(optax.contrib.muon(0.1), stacks)},
        ta.Rules(table, stacks=stacks),
    )
    (state,) = tx.init(params).inner_states["a"].values()
    mu = state.inner_states["muon"].inner_state[0].mu["blocks/{4..7}/w"]
    assert mu.sharding.is_equivalent_to(params["blocks"]["w"].sharding, 3)


@pytest.mark.slow
def test_shared_arguments_may_be_on_an_explicit_mesh():
    params = params_on("Explicit", SPECS["arrays differ"])

    def update(updates: Any, state: Any, params: Any = None, *, factor: Any) -> Any:
        return jax.tree.map(lambda x: x * factor["by"], updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = ta.per_layer(tx, {"blocks": 0})
    by = jax.device_put(jnp.float32(2), params["head"].sharding)
    new, _ = tx.update(params, tx.init(params), params, factor={"by": by})
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 2 * y), new, params)


@pytest.mark.slow
def test_axes_of_a_mesh_may_be_of_both_kinds():
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    w = jax.device_put(jnp.ones((8, 6, 4)), NamedSharding(mesh, P("data", "model")))
    b = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P(None, "data")))
    params, tx = (
        {"blocks": {"w": w, "b": b}},
        ta.per_layer(optax.adam(0.1), {"blocks": 0}),
    )
    state = tx.init(params)
    assert misplaced(state["blocks"][0].mu, {"blocks/w": w, "blocks/b": b}) == []
    updates, _ = stepping(tx)(params, state)
    assert misplaced(updates, params) == []


def test_state_is_made_on_the_device_of_its_params():
    own = jax.devices()[3]
    params = jax.device_put({"blocks": {"w": jnp.ones((4, 3))}}, own)
    state = ta.per_layer(optax.adam(0.1), {"blocks": 0}).init(params)
    assert {x.device for x in jax.tree.leaves(state)} == {own}


def test_arrays_of_a_stack_may_be_on_different_devices():
    one, two = jax.devices()[2:4]
    params = {
        "w": jax.device_put(jnp.ones((4, 3)), one),
        "b": jax.device_put(jnp.ones((4, 2)), two),
    }
    tx = ta.per_layer(optax.trace(0.9), {"": 0})
    state = tx.init(params)
    trace = state[""].trace
    assert (trace["w"].device, trace["b"].device) == (one, two)
    updates, _ = tx.update(params, state, params)
    assert (updates["w"].device, updates["b"].device) == (one, two)
