"""State of some layers of a stacked array, on meshes of the eight devices of a CPU."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sizes import slow_but

import treeadapt as ta

# Optax itself promotes.
pytestmark = pytest.mark.usefixtures("standard_promotion")

adam = optax.adam(1e-1)

#: Specs of a stacked array, and those of a slice of four of its eight layers.
SPECS = {
    "along others": (P(None, "model", "data"), P(None, "model", "data")),
    "along layers": (P("data", "model", None), P("data", "model", None)),
    "over too many": (P(("data", "model"), None, None), P()),
}
every = pytest.mark.parametrize(
    ("kind", "where"),
    slow_but(
        [("Explicit", "along others")],
        itertools.product(["Auto", "Explicit"], SPECS),
    ),
)


def params_on(kind: str, spec: Any) -> dict[str, Any]:
    types = (getattr(AxisType, kind),) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    w = jnp.arange(8 * 6 * 4.0).reshape(8, 6, 4) / 100
    return {
        "blocks": {"w": jax.device_put(w, NamedSharding(mesh, spec))},
        "head": jax.device_put(jnp.ones(4), NamedSharding(mesh, P())),
    }


def from_layer(tx: Any, depth: int) -> Any:
    rules = {f"blocks/{{{depth}..7}}": "a", "head": "a", "**": "frozen"}
    return ta.partition({"a": tx}, ta.Rules(rules, stacks={"blocks": 0}))


def stepping(tx: Any) -> Any:
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
        return ta.apply_updates(params, updates), state

    return step


@pytest.mark.slow
@every
def test_state_of_a_slice_is_sharded_as_its_array(kind, where):
    spec, of_slice = SPECS[where]
    params, tx = params_on(kind, spec), from_layer(adam, 4)
    shardings = ta.opt_state_shardings(tx, params)
    name = "blocks/{4..7}/w"
    mu = shardings.inner_states["a"][0].mu
    assert (mu[name].spec, mu["head"].spec) == (of_slice, P())
    state = ta.init_sharded(tx, params)
    assert state.inner_states["a"][0].nu[name].sharding == mu[name]
    plain = jax.tree.map(np.asarray, (params, state))
    want = stepping(tx)(*plain)
    for step in (stepping(tx), jax.jit(stepping(tx))):
        new, after = step(params, state)
        assert new["blocks"]["w"].sharding.is_equivalent_to(
            params["blocks"]["w"].sharding, 3
        )
        jax.tree.map(np.testing.assert_allclose, (new, after), want)


def test_specs_without_a_mesh_do_not_shard_slices_along_the_layers():
    params = jax.eval_shape(lambda: params_on("Auto", P()))
    specs = {"blocks": {"w": P("data", "model", None)}, "head": P()}
    state = ta.opt_state_shardings(from_layer(adam, 4), params, specs)
    mu = state.inner_states["a"][0].mu
    assert mu["blocks/{4..7}/w"] == P(None, "model", None)


def test_statistics_of_a_slice_follow_the_axes_that_remain():
    params = {"w": jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)}
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    rules = ta.Rules({"w/{4..7}": "a", "**": "frozen"}, stacks={"w": 0})
    tx = ta.partition({"a": tx}, rules)
    mesh = AbstractMesh((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, P("data", None, "model"))
    shardings = ta.opt_state_shardings(tx, params, {"w": sharding})
    flat = ta.to_flat_dict(shardings)
    found = {n: s.spec for n, s in flat.items() if n.endswith("{4..7}")}
    prefix = "inner_states/a/0/"
    assert found[f"{prefix}v_row/w/{{4..7}}"] == P("data", None)
    assert found[f"{prefix}v_col/w/{{4..7}}"] == P("data", "model")


def test_the_memory_of_a_line_search_is_sharded_behind_its_first_axis():
    params, tx = params_on("Auto", P("data", "model", None)), optax.scale_by_lbfgs(3)
    shardings = ta.opt_state_shardings(from_layer(tx, 4), params)
    memory = shardings.inner_states["a"].diff_params_memory["blocks/{4..7}/w"]
    assert memory.spec == P(None, "data", "model", None)


@pytest.mark.slow
@every
def test_sharded_slices_are_carried_bit_for_bit(kind, where):
    params, tx = params_on(kind, SPECS[where][0]), from_layer(adam, 4)
    state = stepping(tx)(params, ta.init_sharded(tx, params))[1]
    for other in (from_layer(adam, 3), ta.adapt(adam)):
        there, _ = ta.carry_state(other, params, state)
        again, report = ta.carry_state(tx, params, there)
        assert report.fresh == ()
        jax.tree.map(np.testing.assert_array_equal, again, state)
        on = next(iter(jax.tree.leaves(params))).sharding.device_set
        moments = [leaf for leaf in jax.tree.leaves(there) if leaf.ndim > 1]
        assert all(leaf.sharding.device_set == on for leaf in moments)


def test_a_plan_of_memory_says_what_is_split_along_a_sharded_axis():
    params = {"blocks/w": jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)}
    mesh = AbstractMesh((4, 2), ("data", "model"))

    def plan(depth: int, spec: Any) -> Any:
        rules = {f"blocks/{{{depth}..7}}": "a", "**": "frozen"}
        table = ta.Rules(rules if depth else {"**": "a"}, stacks={"blocks": 0})
        tx = ta.partition({"a": adam}, table)
        return ta.summarize(params, {"**": spec}, mesh=mesh, tx=tx).memory

    found = plan(4, P("data", None, None))
    assert found.notes == (
        "1 array (128 KiB) sharded along the axis of the layers that are in different "
        "groups: each update moves them between devices. Shard another axis.",
    )
    sizes = {each.kind: each.device_bytes for each in found.kinds}
    assert sizes["state/mu"] == 4 * 64 * 64 * 4 // 4
    sizes = {e.kind: e.device_bytes for e in plan(3, P("data", None, None)).kinds}
    assert sizes["state/mu"] == 5 * 64 * 64 * 4
    assert plan(4, P(None, "data", None)).notes == ()
    assert plan(0, P("data", None, None)).notes == ()


# Functions of params and state


def test_slices_meet_the_leaf_of_their_array():
    params = {"blocks": {"w": jnp.ones((8, 2))}, "head": jnp.ones(3)}
    names = {"blocks": {"w": "the kernel"}, "head": "the head"}
    tx = from_layer(adam, 4)
    found = ta.tree_map_params(tx, lambda leaf, name: name, tx.init(params), names)
    mu = found.inner_states["a"][0].mu
    assert mu == {"blocks/{4..7}/w": "the kernel", "head": "the head"}


@pytest.mark.slow
def test_a_stored_gradient_of_some_layers_is_computed_again():
    stacks = {"blocks": 0}
    where = ta.Rules({"blocks/{0..3}": True, "**": False}, stacks=stacks).where(True)
    tx = ta.freeze(optax.lbfgs(), where)
    params = {"blocks": {"w": jnp.ones((8, 2))}, "head": jnp.ones(3)}

    def loss(params: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    state = tx.init(params)
    value, grad = ta.value_and_grad_from_state(loss)(params, state=state)
    more = {"value": value, "grad": grad, "value_fn": loss}
    updates, state = tx.update(grad, state, params, **more)
    params = ta.apply_updates(params, updates)
    found = ta.value_and_grad_from_state(loss)(params, state=state)
    jax.tree.map(np.testing.assert_array_equal, found, jax.value_and_grad(loss)(params))


def test_a_param_that_is_called_like_some_layers_is_a_param():
    params = {"blocks/{4..6}/w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    specs = {"blocks/{4..6}/w": P("data", None)}
    for tx, name, spec in (
        (adam, "0/mu/blocks/{4..6}/w", P("data", None)),
        (optax.sm3(1e-2), "0/mu/blocks/{4..6}/w/0", P("data")),
    ):
        found = ta.to_flat_dict(ta.opt_state_shardings(tx, params, specs))
        assert found[name] == spec


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        ta.per_layer(adam, {"blocks": 0}),
        optax.scale_by_lbfgs(3),
    ],
    ids=["per_layer", "a memory that is made of nothing"],
)
def test_slices_are_carried_to_the_mesh_and_train_there(tx):
    params = params_on("Auto", P("data", "model", None))
    state = from_layer(tx, 4).init(params)
    _, state = stepping(from_layer(tx, 4))(params, state)
    other = from_layer(tx, 2)
    carried, _ = ta.carry_state(other, params, state)
    alone = [
        path
        for path, leaf in ta.to_flat_dict(carried).items()
        if leaf.committed and len(leaf.sharding.device_set) == 1
    ]
    assert alone == []
    stepping(other)(params, carried)


@pytest.mark.slow
def test_slices_are_carried_to_another_mesh():
    params = params_on("Auto", P("data", "model", None))
    state = from_layer(adam, 4).init(params)
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[6:]
    )
    specs = {"blocks/w": P("data", None, None), "head": P()}
    there = jax.device_put(params, ta.named_shardings(params, specs, mesh))
    tx = from_layer(adam, 2)
    carried, report = ta.carry_state(tx, there, state)
    assert len(report.carried) == 5
    mu = carried.inner_states["a"][0].mu["blocks/{2..7}/w"]
    assert mu.sharding.is_equivalent_to(there["blocks"]["w"].sharding, 3)
    # What is carried whole is the saved object, where it is.
    placed = jax.device_put(carried, ta.opt_state_shardings(tx, there))
    stepping(tx)(there, placed)
