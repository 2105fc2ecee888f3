"""Law 6: a frozen leaf keeps its bits, whatever runs, for any number of steps."""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import bits, flat_updates, put
from sizes import some
from trees import TREES, LayerTuple, ModelTuple, mlp, two_layers

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

# A negative zero, a NaN with a payload, a subnormal, an infinity.
ODD = np.array([0x80000000, 0x7FC01234, 0x00000001, 0xFF800000], np.uint32)
ODD_HALF = np.array([0x8000, 0x7FC1, 0x0001, 0xFF80], np.uint16)


def model():
    """Frozen leaves with odd bits, and leaves that train."""
    return {
        "frozen": {
            "half": jnp.asarray(ODD_HALF.view(jnp.bfloat16)),
            "single": jnp.asarray(ODD.view(np.float32)),
            "weight": jnp.linspace(-1.0, 1.0, 7),
        },
        "free": (jnp.ones((2, 3)), jnp.full(3, 0.5)),
    }


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.5),
    "momentum": lambda: optax.chain(
        optax.add_decayed_weights(0.5), optax.sgd(0.01, momentum=0.9, nesterov=True)
    ),
    "noise": lambda: optax.noisy_sgd(0.01, key=jax.random.key(0)),
    "lbfgs": lambda: optax.lbfgs(
        memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(3)
    ),
}

FREEZERS = {
    "freeze": lambda tx: ta.freeze(tx, "frozen"),
    "partition": lambda tx: ta.partition({"a": tx}, {"frozen": "frozen", "**": "a"}),
    "frozen twice": lambda tx: ta.freeze(
        ta.partition({"a": tx}, {"frozen/weight": "frozen", "**": "a"}), "frozen"
    ),
}


def loss(tree):
    """A loss with a gradient at every leaf, and NaNs at the odd ones."""
    flat = ta.split(tree)[0]
    free = [
        jnp.sum((flat[path] - 0.25) ** 2) for path in sorted(flat) if "free" in path
    ]
    odd = [
        jnp.nansum(flat[path].astype(jnp.float32))
        for path in flat
        if "free" not in path
    ]
    return sum(free) + 0.0 * jnp.nan_to_num(sum(odd), posinf=0.0, neginf=0.0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def thousand(tx, steps, params):
    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        grads = jax.tree.map(lambda g: g + 1, grads)  # gradients everywhere
        extra = {"value": value, "grad": grads, "value_fn": loss}
        updates, state = tx.update(grads, state, params, **extra)
        return (ta.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), length=steps)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("freezer", ["freeze", "partition"])
def test_law_6_frozen_leaves_keep_their_bits_over_a_thousand_steps(name, freezer):
    params = model()
    new, state = thousand(FREEZERS[freezer](OPTIMIZERS[name]()), 1_000, params)
    assert bits(new["frozen"]) == bits(params["frozen"])
    assert all((a != b).all() for a, b in zip(new["free"], params["free"], strict=True))
    arrays = [x for x in jax.tree.leaves(state) if x.ndim]
    assert all(x.shape[-1] == 3 or x.shape == (2,) for x in arrays)  # only of "free"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "noise"])
def test_leaves_left_out_by_split_keep_their_bits(name):
    tree = model()
    params, rest = ta.split(tree, ~ta.glob("frozen"))
    tx = OPTIMIZERS[name]()

    @jax.jit
    def train(params, rest):
        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: loss(ta.merge(p, rest)))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry, _ = jax.lax.scan(step, (params, tx.init(params)), length=1_000)
        return ta.merge(carry[0], rest)

    new = train(params, rest)
    assert bits(new["frozen"]) == bits(tree["frozen"])
    assert (new["free"][0] != tree["free"][0]).all()


def test_optaxs_own_freeze_leaks_in_a_chain():
    # The order that people usually write; this library's ``freeze`` wraps instead.
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = optax.chain(optax.freeze({"a": True, "b": False}), optax.adamw(0.1))
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["a"].any()
    tx = ta.freeze(optax.adamw(0.1), "a")
    updates, _ = tx.update(params, tx.init(params), params)
    assert not updates["a"].any()


@pytest.mark.parametrize("freezer", FREEZERS)
def test_frozen_leaves_cost_no_memory(freezer):
    params = {"frozen": {"weight": jnp.ones(1_000)}, "free": jnp.ones(3)}
    state = FREEZERS[freezer](optax.adam(0.1)).init(params)
    assert sum(x.size for x in jax.tree.leaves(state)) == 1 + 2 * 3
    chained = optax.chain(
        optax.freeze({"frozen": True, "free": False}), optax.adam(0.1)
    ).init(params)
    assert sum(x.size for x in jax.tree.leaves(chained)) == 1 + 2 * 1_003


TRAINS = [row for row in TREES if row.paths and not row.opaque and not row.warns]


@pytest.mark.parametrize("row", TRAINS, ids=lambda row: row.name)
def test_in_every_tree_frozen_leaves_get_zeros_and_others_their_updates(row):
    tree = row.make()
    flat = {p: jnp.ones_like(x) for p, x in ta.split(tree)[0].items()}
    where = ta.escape(sorted(flat)[0]) if "" not in flat else []
    frozen = sorted(flat)[:1] if "" not in flat else []
    tx = ta.freeze(optax.sgd(1.0, momentum=0.9), where)
    params = put(tree, flat)
    state = tx.init(params)
    assert sorted(state[0].trace) == sorted(set(flat) - set(frozen))
    updates, _ = tx.update(params, state, params)
    for path, update in flat_updates(updates).items():
        moves = path in flat and path not in frozen
        assert bool((update == -1).all() if moves else (update == 0).all())


def test_any_kind_of_selector_can_freeze():
    net = [mlp(), mlp()]
    ones = jax.tree.map(jnp.ones_like, eqx.filter(net, eqx.is_array))
    rules = ta.Rules({"0": "frozen", "**": "train"})
    spec = ta.FreezeSpec(freeze="0").bind(net)
    for where in ("0", "{-2}", ["0"], rules.where("frozen"), spec, ~ta.glob("1")):
        tx = ta.freeze(optax.sgd(1.0), where)
        updates, _ = tx.update(ones, tx.init(net), net)
        moved = [path[0] for path, x in flat_updates(updates).items() if x.any()]
        assert set(moved) == {"1"}
    tx = ta.freeze(optax.sgd(1.0), ta.node(eqx.nn.Linear))
    assert tx.init(net)  # everything is frozen on purpose
    with pytest.raises(ta.UnusedRuleError, match="'2'"):
        ta.freeze(optax.sgd(1.0), "2").init(net)
    with pytest.raises(ta.SelectorError):
        ta.freeze(optax.sgd(1.0), lambda tree: tree)


@pytest.mark.slow
def test_a_line_search_sees_the_frozen_leaves():
    params = two_layers(ModelTuple, LayerTuple)
    seen = []

    def value_fn(params):
        seen.append(type(params))
        return loss({"free": list(jax.tree.leaves(params))})

    tx = ta.freeze(optax.lbfgs(memory_size=2), "hidden")
    value, grads = jax.value_and_grad(value_fn)(params)
    extra = {"value": value, "grad": grads, "value_fn": value_fn}
    step = lambda p, s: tx.update(grads, s, p, **extra)  # noqa: E731
    updates, _ = jax.eval_shape(step, params, tx.init(params))
    assert set(seen) == {ModelTuple}
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_zeros_have_the_dtype_of_optaxs_update():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    grads = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}
    tx = ta.freeze(optax.sgd(1.0), "a")
    ours, _ = tx.update(grads, tx.init(params), params)
    native = optax.selective_transform(
        optax.sgd(1.0), freeze_mask={"a": True, "b": False}
    )
    want, _ = native.update(grads, native.init(params), params)
    assert bits(ours["b"]) == bits(want["b"])
    assert bits(ours["a"]) == bits(-want["a"])  # adding -0.0 keeps a -0.0


def _of_each_example(tx):
    """As ``optax.contrib.dpsgd``: a gradient of each example in, their mean out."""
    return optax.chain(
        optax.stateless(lambda updates, _: jax.tree.map(lambda u: u.mean(0), updates)),
        tx,
    )


@pytest.mark.hazard("F37")
@pytest.mark.parametrize(
    "maker",
    [
        lambda tx: ta.freeze(tx, "head"),
        lambda tx: ta.partition({"a": tx}, {"head": "frozen", "**": "a"}),
        lambda tx: ta.adapt(ta.freeze(tx, "head")),
        lambda tx: ta.freeze(tx, "head", as_tree=True),
        lambda tx: ta.freeze(tx, "**"),
    ],
    ids=["freeze", "partition", "adapt", "as_tree", "all"],
)
def test_a_frozen_leaf_under_gradients_of_each_example_keeps_its_shape(maker):
    params = {"head": jnp.ones(2), "body": jnp.ones(2), "steps": jnp.arange(3)}
    each = jax.tree.map(lambda leaf: jnp.ones((4, *leaf.shape)), params)
    tx = maker(_of_each_example(optax.sgd(0.1)))
    updates, _ = tx.update(each, tx.init(params), params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    new = optax.apply_updates(params, updates)
    assert (new["head"] == 1).all()
    assert (new["steps"] == params["steps"]).all()


@pytest.mark.parametrize("grad", [0.5, 2])
def test_a_number_may_be_the_gradient_of_a_leaf_that_does_not_move(grad):
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    frozen = ta.freeze(optax.sgd(0.1), "a")
    for tx in (frozen, optax.chain(optax.sgd(0.1), frozen), ta.adapt(frozen)):
        updates, _ = tx.update({"a": grad, "b": jnp.ones(2)}, tx.init(params), params)
        assert updates["a"].shape == (2,)
        assert np.signbit(updates["a"]).all()
    layers = {"a": jnp.ones((3, 2))}
    for tx in (
        ta.per_layer(optax.sgd(1.0), {"a": 0}),
        ta.scale_by_rules({"**": -1.0}),
    ):
        updates, _ = tx.update({"a": grad}, tx.init(layers), layers)
        assert (updates["a"] == -grad).all()


def test_what_freezes_before_the_mean_of_examples_gives_a_zero_for_each():
    params = {"head": jnp.ones(2), "body": jnp.ones(2)}
    each = jax.tree.map(lambda leaf: jnp.ones((4, *leaf.shape)), params)
    tx = optax.chain(
        ta.freeze(optax.identity(), "head"), _of_each_example(optax.sgd(0.1))
    )
    updates, _ = tx.update(each, tx.init(params), params)
    assert updates["head"].shape == (2,)
    assert not updates["head"].any()


@pytest.mark.slow
def test_a_zero_keeps_the_sharding_of_its_leaf():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    params = jax.device_put({"a": jnp.ones(8), "b": jnp.ones(8)}, sharding)
    tx = ta.freeze(optax.adam(0.1), "a")
    updates, state = tx.update(params, tx.init(params), params)
    assert all(x.sharding == sharding for x in updates.values())
    assert state[0].mu["b"].sharding == sharding


DTYPES = [
    jnp.float32,
    jnp.float16,
    jnp.bfloat16,
    jnp.complex64,
    jnp.float8_e5m2,
    jnp.float8_e4m3fn,
    jnp.float8_e4m3fnuz,
    jnp.float4_e2m1fn,
]
KEEPERS = {
    "freeze": lambda: ta.freeze(optax.sgd(1.0), "a"),
    "partition": lambda: ta.partition({"b": optax.sgd(1.0)}, {"a": "frozen", "b": "b"}),
    "factor": lambda: ta.scale_by_rules({"a": 0, "b": 1.0}),
    "factors": lambda: ta.scale_by_rules({"a": [0.0, -0.0, 0.0], "b": 1.0}),
    "some factors": lambda: ta.scale_by_rules({"a": [0.0, 0.0, 1.0], "b": 1.0}),
    "a number too small": lambda: ta.scale_by_rules({"a": 1e-99, "b": 1.0}),
    "an array": lambda: ta.scale_by_rules({"a": jnp.float32(0), "b": 1.0}),
}


@pytest.mark.hazard("F33")
@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("dtype", some(DTYPES), ids=lambda dtype: dtype.__name__)
def test_optaxs_own_apply_updates_keeps_the_bits_of_unmoved_leaves(dtype, keeper):
    negative = -jnp.zeros((), dtype)
    params = {
        "a": jnp.stack([negative, -negative, jnp.ones((), dtype)]),
        "b": jnp.ones(2),
    }
    grads = {
        "a": jnp.array(
            [jnp.nan, jnp.inf if dtype != jnp.float4_e2m1fn else 1, 0], dtype
        ),
        "b": jnp.ones(2),
    }
    tx = KEEPERS[keeper]()
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert updates["b"].any()
    assert new["a"].dtype == dtype
    assert bits(new["a"]) == bits(params["a"])


def test_statistics_that_do_not_train_keep_their_bits_under_optaxs_apply_updates():
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    model.mean[...] = -jnp.zeros(2)
    tx = ta.adapt(optax.sgd(1.0))
    params = nnx.state(model)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert bits(new["mean"]) == bits(params["mean"])
    assert (new["scale"][...] == 0).all()


@pytest.mark.slow
def test_a_compiled_step_keeps_the_sharding_of_integers_on_an_explicit_mesh():
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((8,), ("x",), axis_types=(explicit,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    leaves = {"w": jnp.ones(8), "f": jnp.ones(8), "n": jnp.arange(8)}
    params = jax.device_put(leaves, sharding)
    factors = {"f": [*[1.0] * 7, 0.0], "n": 1.0, "w": jnp.float32(0)}
    tx = optax.chain(ta.freeze(optax.adam(0.1), "f"), ta.scale_by_rules(factors))

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: jnp.sum(p["w"] * p["f"]), allow_int=True)(params)
        return tx.update(grads, state, params)[0]

    with jax.set_mesh(mesh):
        updates = step(params, tx.init(params))
    assert {path: leaf.sharding for path, leaf in updates.items()} == dict.fromkeys(
        leaves, sharding
    )


@pytest.mark.slow
def test_a_frozen_leaf_of_a_dtype_without_zero_keeps_its_bits():
    scales = jnp.asarray([0.5, 1.0, 4.0], jnp.float8_e8m0fnu)
    params = {"scales": scales, "w": jnp.ones(3)}
    tx = ta.freeze(optax.adam(0.1), "scales")
    updates, _ = tx.update(params, tx.init(params), params)
    for add in (ta.apply_updates, optax.apply_updates, jax.jit(ta.apply_updates)):
        new = add(params, updates)
        assert new["scales"].dtype == scales.dtype
        assert np.asarray(new["scales"]).tobytes() == np.asarray(scales).tobytes()
        assert not np.array_equal(new["w"], params["w"])


def test_params_without_the_frozen_class_are_an_error():
    class Net(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
            self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    net = Net()
    tx = ta.freeze(optax.sgd(0.1), nnx.LayerNorm)
    state, grads = tx.init(net), nnx.state(net)
    tx.update(grads, state, net)
    with pytest.raises(ta.UnusedRuleError, match="LayerNorm"):
        tx.update(grads, state, nnx.state(net))  # which has lost its classes


def test_one_optimizer_may_freeze_in_several_trees():
    trees = {"encoder": jnp.ones(1), "pi": jnp.ones(1)}, {"v": jnp.ones(1)}
    with pytest.raises(ta.UnusedRuleError, match="allow it with unused="):
        ta.freeze(optax.sgd(1.0), "encoder").init(trees[1])
    for where in ("encoder", ta.FreezeSpec("encoder"), ta.glob("encoder") & "encoder"):
        tx = ta.freeze(optax.sgd(1.0), where, unused="ignore")
        moved = []
        for tree in trees:
            updates, _ = tx.update(tree, tx.init(tree), tree)
            moved += [name for name in tree if updates[name].any()]
        assert moved == ["pi", "v"]
    masked = ta.freeze(optax.adamw(0.1, mask=ta.glob("typo")), "z", unused="ignore")
    with pytest.raises(ta.UnusedRuleError, match="typo"):
        masked.init(trees[0])
    with pytest.raises(ta.SelectorError, match="unused="):
        ta.freeze(optax.sgd(1.0), "encoder", unused=True)
