"""Conversions leave sharded arrays where they are; split models train on a mesh.

``jax.transfer_guard`` stops whatever would move an array, and a deleted array stops
whatever would read one. Runs on the eight devices that ``conftest.py`` makes of a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sizes import grid
from trees import TREES

import treeadapt as ta
from treeadapt import (
    init_sharded,
    named_shardings,
    opt_state_shardings,
    partition_specs,
)


@pytest.fixture(autouse=True)
def _other_warnings_are_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnstablePathWarning)
        warnings.simplefilter("ignore", ta.CollectionWarning)
        yield


def mesh_of_six() -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[:6]).reshape(2, 3)
    return jax.sharding.Mesh(devices, ("x", "y"))


def on_mesh(tree: Any) -> Any:
    """The tree with its kernels and biases sharded, half of them in host memory."""
    mesh = mesh_of_six()
    specs = {(2, 3): P("x", "y"), (3,): P("y")}
    memories = {(2, 3): "pinned_host", (3,): "device"}

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.shape not in specs:
            return leaf
        kind = memories[leaf.shape]
        sharding = NamedSharding(mesh, specs[leaf.shape], memory_kind=kind)
        return jax.device_put(jnp.array(leaf), sharding)

    return ta.map_where(put, tree, ["**"])


def _leaves(tree: Any) -> list[Any]:
    return [*ta.to_flat_dict(tree).values()]


def _split_and_merge(tree: Any, **options: Any) -> list[Any]:
    return _leaves(ta.merge(*ta.split(tree, ["**"], **options)))


def _by_flat_dict(tree: Any) -> list[Any]:
    return _leaves(ta.from_flat_dict(tree, ta.to_flat_dict(tree)))


def _by_state_dict(tree: Any) -> list[Any]:
    return _leaves(ta.from_state_dict(tree, ta.to_state_dict(tree)))


def _renamed(tree: Any) -> list[Any]:
    flat = ta.to_flat_dict(tree)
    has_arrays = any(hasattr(leaf, "dtype") for leaf in flat.values())
    renamed = ta.Migration({"{path:**}": "new/{path:**}"} if has_arrays else {})(flat)
    # Functions and other static leaves have no row.
    return [renamed.get(f"new/{path}", leaf) for path, leaf in flat.items()]


def _nothing(_: Any) -> None:
    return None


def _specs(tree: Any) -> None:
    # Boxes disagree, and optimizer state is refused: told without a look at values.
    with contextlib.suppress(ta.ShardingError):
        partition_specs(tree, ta.Rules({"**": P()}, unused="ignore"))


#: Functions of a tree; those that convert return its leaves, the others nothing.
CONVERSIONS: dict[str, Callable[[Any], list[Any] | None]] = {
    "flat dict": _by_flat_dict,
    "state dict": _by_state_dict,
    "split": _split_and_merge,
    "split all": functools.partial(_split_and_merge, arrays="all"),
    "split nested": functools.partial(_split_and_merge, nested=True),
    "map_where": lambda tree: _leaves(ta.map_where(lambda leaf: leaf, tree, ["**"])),
    "rename": _renamed,
    "labels": lambda tree: _nothing(ta.param_labels(tree, [], default="x")),
    "mask": lambda tree: _nothing(
        ta.param_mask(tree, ["**", "!**/b"], unused="ignore")
    ),
    "by shape": lambda tree: _nothing(
        ta.param_mask(tree, ta.leaf(ndim=2, min_size=5), unused="ignore")
    ),
    "bind": lambda tree: _nothing(ta.Rules([], default="x").bind(tree)),
    "report": lambda tree: _nothing(str(ta.summarize(tree, {"**": "x"}))),
    "diff": lambda tree: _nothing(str(ta.tree_diff(tree, tree))),
    "specs": _specs,
}

every_tree = pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)


@pytest.mark.hazard("J4", "J6")
@every_tree
def test_no_conversion_moves_an_array(row):
    tree = on_mesh(row.make())
    before = _leaves(tree)
    shardings = [getattr(leaf, "sharding", None) for leaf in before]
    for name, convert in CONVERSIONS.items():
        with jax.transfer_guard("disallow_explicit"):
            after = convert(tree)
        if after is not None:
            assert list(map(id, after)) == list(map(id, before)), name
    assert [getattr(leaf, "sharding", None) for leaf in before] == shardings


@every_tree
def test_no_conversion_reads_an_array(row):
    tree = on_mesh(row.make())
    before = _leaves(tree)
    for leaf in before:
        if isinstance(leaf, jax.Array):
            leaf.delete()
    for name, convert in CONVERSIONS.items():
        after = convert(tree)
        assert after is None or list(map(id, after)) == list(map(id, before)), name


@pytest.mark.parametrize(
    "move",
    [
        lambda x: jax.device_put(x, NamedSharding(x.sharding.mesh, P())),
        lambda x: jax.device_put(x, jax.devices()[0]),
        lambda x: x + np.float32(1),
    ],
    ids=["re-shard", "gather", "from host"],
)
def test_the_guard_stops_what_moves(move):
    leaf = on_mesh(jnp.ones((2, 3)))
    with (
        jax.transfer_guard("disallow_explicit"),
        pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"),
    ):
        move(leaf)


def test_reading_a_deleted_array_raises():
    leaf = jnp.ones(3)
    leaf.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(leaf)


# Training on a mesh


RULES = ta.Rules(
    {
        "layers/{0..1}/weight": P("data", "model"),
        "layers/2/weight": P(None, "data"),
        "**": P(),
    }
)


def mesh_of_eight(kind: str) -> jax.sharding.Mesh:
    types = (getattr(AxisType, kind),) * 2
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


def model_of(widths: int = 16) -> eqx.Module:
    return eqx.nn.MLP(widths, 2, widths, 2, key=jax.random.key(0))


def loss_of(params: Any, rest: Any) -> jax.Array:
    """A loss without a matrix product, which Explicit axes want annotated."""
    model = ta.merge(params, rest)
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(jnp.sum((leaf - 0.5) ** 2) for leaf in leaves)


TRANSFORMATIONS = {
    "plain": optax.adam(0.1),
    "adapt": ta.adapt(optax.adamw(0.1, mask=ta.glob("**/weight"))),
    "partition": ta.partition(
        {"fast": optax.adam(0.1), "slow": optax.sgd(0.1, momentum=0.9)},
        {"layers/0": "frozen", "layers/1": "fast", "**": "slow"},
    ),
    "freeze": ta.freeze(optax.adam(0.1), "layers/2"),
}
both_meshes = pytest.mark.parametrize("kind", ["Auto", "Explicit"])
each_transformation = pytest.mark.parametrize(
    ("name", "kind"), grid(TRANSFORMATIONS, ["Auto", "Explicit"])
)
optax_maths = pytest.mark.usefixtures("standard_promotion")


def placed(kind: str) -> tuple[Any, Any, Any]:
    """Params and rest of a split model on a mesh, and the shardings of the params."""
    mesh, model = mesh_of_eight(kind), model_of()
    where = ta.glob("layers/{0..2}") & ~ta.glob("layers/2/bias")
    params, rest = ta.split(model, where)
    shardings = named_shardings(params, RULES.bind(model), mesh)
    everywhere = named_shardings(rest, {"**": P()}, mesh)
    return (
        jax.device_put(params, shardings),
        jax.device_put(rest, everywhere),
        (shardings, everywhere),
    )


def step_of(tx: Any) -> Callable[..., Any]:
    def step(params: Any, rest: Any, state: Any) -> tuple[Any, Any, Any]:
        grads = jax.grad(loss_of)(params, rest)
        updates, state = tx.update(grads, state, params)
        return ta.apply_updates(params, updates), rest, state

    return step


@pytest.mark.slow
@pytest.mark.hazard("J8")
@each_transformation
@optax_maths
def test_params_rest_and_state_are_donated_and_stay(name, kind):
    tx = TRANSFORMATIONS[name]
    params, rest, _ = placed(kind)
    state = init_sharded(tx, params)
    before = jax.tree.leaves((params, rest, state))
    shardings = [leaf.sharding for leaf in before]
    step = jax.jit(step_of(tx), donate_argnums=(0, 1, 2))
    after = jax.tree.leaves(step(params, rest, state))
    assert all(leaf.is_deleted() for leaf in before)
    same = [
        leaf.sharding.is_equivalent_to(own, leaf.ndim)
        for leaf, own in zip(after, shardings, strict=True)
    ]
    assert all(same)


@pytest.mark.slow
@each_transformation
@optax_maths
def test_jit_takes_shardings_of_params_rest_and_state(name, kind):
    tx = TRANSFORMATIONS[name]
    params, rest, (own, everywhere) = placed(kind)
    state = init_sharded(tx, params)
    shardings = (own, everywhere, opt_state_shardings(tx, params, own))
    step = jax.jit(step_of(tx), in_shardings=shardings, out_shardings=shardings)
    with jax.transfer_guard("disallow"):
        out = step(params, rest, step(params, rest, state)[2])
    assert [leaf.sharding for leaf in jax.tree.leaves(out)] == jax.tree.leaves(
        shardings
    )


@pytest.mark.slow
@each_transformation
@optax_maths
def test_a_step_on_a_mesh_has_the_numbers_of_one_device(name, kind):
    tx = TRANSFORMATIONS[name]
    params, rest, _ = placed(kind)
    alone = jax.device_put(
        jax.tree.map(np.asarray, (params, rest)), jax.local_devices()[0]
    )
    step = jax.jit(step_of(tx))
    out = step(params, rest, init_sharded(tx, params))
    expected = step(*alone, init_sharded(tx, alone[0]))
    jax.tree.map(
        lambda one, two: np.testing.assert_array_equal(one, two), out, expected
    )


@pytest.mark.slow
@both_meshes
def test_conversions_in_jit_keep_shardings_and_add_no_operation(kind):
    params, rest, _ = placed(kind)

    def there_and_back(params: Any, rest: Any) -> Any:
        model = ta.merge(params, rest)
        return ta.split(ta.from_flat_dict(model, ta.to_flat_dict(model)))

    assert not jax.make_jaxpr(there_and_back)(params, rest).eqns


@pytest.mark.slow
@both_meshes
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("is_traced", [False, True])
def test_a_state_is_carried_inside_a_mesh_that_is_in_force(kind, is_traced):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType[kind],) * 2)
    tx, stack = optax.adam(0.1), ta.Migration({"h/{l}/w : a b": "h/w : l b a"})
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("x", "y"))
        w = jax.device_put(jnp.arange(32.0).reshape(4, 8), sharding)
        params = {"h": {"0": {"w": w}, "1": {"w": w + 1}}}
        _, state = jax.jit(tx.update)(params, tx.init(params), params)

        def carried() -> Any:
            same, report = ta.carry_state(tx, params, state)
            assert report.warnings == ()
            return same, ta.carry_state(tx, stack(params), state, migration=stack)[0]

        # Arrays that a function only holds move while it is traced.
        same, stacked = jax.jit(carried)() if is_traced else carried()
    for one, two in zip(*map(jax.tree.leaves, (same, state)), strict=True):
        np.testing.assert_array_equal(one, two)
    mus = [state[0].mu["h"][number]["w"].T for number in "01"]
    np.testing.assert_array_equal(stacked[0].mu["h/w"], np.stack(mus))
