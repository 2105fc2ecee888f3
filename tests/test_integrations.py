"""Training works inside other libraries' loops, and JAX's own.

Each test trains a few steps in another library's loop, with params in that library's
own containers, and gets the numbers of plain Optax on ``{label path: array}``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import flax.serialization
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from brax.training.agents.ppo.losses import PPONetworkParams
from brax.training.gradients import gradient_update_fn
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from haiku.data_structures import to_immutable_dict
from sizes import grid

import treeadapt as ta

# Other libraries do the maths here.
pytestmark = pytest.mark.usefixtures("standard_promotion")

STEPS = 3
XS = jax.random.normal(jax.random.key(7), (8, 2))
YS = jnp.sum(XS, axis=1, keepdims=True)


def squares(predict: Callable[[Any], Any]) -> jax.Array:
    return jnp.mean((predict(XS) - YS) ** 2)


# --- What each loop runs, and what plain Optax makes of it ----------------------------


class Case(NamedTuple):
    """A transformation of any tree, and the same of a flat dict, in plain Optax."""

    tx: Any
    plain: Callable[[dict[str, Any]], Any]


def decayed(weights: str) -> Case:
    """Weight decay only for the weights, within a chain."""

    def chain(mask: Any) -> Any:
        adamw = optax.adamw(0.1, weight_decay=0.1, mask=mask)
        return optax.chain(optax.clip_by_global_norm(0.5), adamw)

    def plain(flat: dict[str, Any]) -> Any:
        return chain({path: path.endswith(weights) for path in flat})

    return Case(ta.adapt(chain(ta.glob(f"**/{weights}"))), plain)


def grouped(first: str) -> Case:
    """The first layer frozen, its biases slow, the others fast: three groups."""
    slow, fast = optax.sgd(0.1, momentum=0.9), optax.adam(0.1)
    rules = {f"{first}/{{w,weight,kernel}}": "frozen", first: "slow", "**": "fast"}

    def label(path: str) -> str:
        if not path.startswith(first):
            return "fast"
        return "frozen" if path.endswith(("/w", "/weight", "/kernel")) else "slow"

    def plain(flat: dict[str, Any]) -> Any:
        transforms = {"slow": slow, "fast": fast, "frozen": optax.set_to_zero()}
        return optax.partition(transforms, {path: label(path) for path in flat})

    return Case(ta.partition({"slow": slow, "fast": fast}, rules), plain)


def all_but(frozen: str | None, tx: Any, flat: dict[str, Any]) -> Any:
    """The result of plain Optax with ``tx`` on every leaf but one."""
    labels = {path: "off" if path == frozen else "on" for path in flat}
    return optax.partition({"on": tx, "off": optax.set_to_zero()}, labels)


def by_hand(plain: Callable[..., Any], tree: Any, loss: Callable[..., Any]) -> Any:
    """Train with plain Optax on the flat dict of the arrays that train."""
    params, rest = ta.split(tree)
    tx = plain(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda part: loss(ta.merge(part, rest)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def assert_same(tree: Any, flat: dict[str, Any]) -> None:
    found, _ = ta.split(tree)
    assert sorted(found) == sorted(flat)
    for path, leaf in flat.items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-5, atol=1e-6)


def assert_frozen(before: Any, after: Any, path: str) -> None:
    one, two = (ta.to_flat_dict(tree)[path] for tree in (before, after))
    assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


# --- Flax -----------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(4)(x)))


LINEN = {"adapt": decayed("kernel"), "partition": grouped("Dense_0")}


@pytest.mark.parametrize(("name", "container"), grid(LINEN, [dict, FrozenDict]))
def test_flax_train_state(name, container):
    case = LINEN[name]
    net = Linen()
    params = container(net.init(jax.random.key(0), XS)["params"])

    def loss(params):
        return squares(lambda xs: net.apply({"params": params}, xs))

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    state = TrainState.create(apply_fn=net.apply, params=params, tx=case.tx)
    for _ in range(STEPS):
        state = step(state)

    assert type(state.params) is container
    assert state.step == STEPS
    assert_same(state.params, by_hand(case.plain, params, loss))


def test_flax_state_survives_serialization():
    case = grouped("Dense_0")
    params = Linen().init(jax.random.key(0), XS)["params"]
    _, state = case.tx.update(params, case.tx.init(params), params)

    saved = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(case.tx.init(params), saved)

    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(state)))


class Normed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(2, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.hidden(x))))


def nnx_loss(model: Any) -> jax.Array:
    return squares(model)


def train_nnx(tx: Any, wrt: Any) -> tuple[Any, Any]:
    model = Normed()
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(nnx_loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads)

    for _ in range(STEPS):
        step(model, optimizer)
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [decayed("kernel"), grouped("hidden")], ids=["adapt", "partition"]
)
def test_nnx_optimizer(case):
    model, optimizer = train_nnx(case.tx, nnx.Param)

    assert optimizer.step[...] == STEPS
    assert_same(nnx.state(model, nnx.Param), by_hand(case.plain, Normed(), nnx_loss))


@pytest.mark.slow
def test_nnx_optimizer_takes_a_selector_as_a_filter():
    where = ta.glob("{hidden,out}/*")
    case = grouped("hidden")
    model, _ = train_nnx(case.tx, where)

    chosen, rest = ta.split(Normed(), where)

    def loss(flat):
        return nnx_loss(ta.merge(flat, rest))

    assert_same(nnx.state(model, where), by_hand(case.plain, chosen, loss))
    assert_frozen(Normed(), model, "norm/scale")
    assert_frozen(Normed(), model, "hidden/kernel")


@pytest.mark.slow
def test_nnx_optimizer_with_a_line_search():
    search = optax.scale_by_backtracking_linesearch(5)
    tx = ta.adapt(optax.lbfgs(memory_size=2, linesearch=search))
    model = Normed()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = nnx_loss(model)

    @nnx.jit
    def step(model, optimizer):
        graph, params, others = nnx.split(model, nnx.Param, ...)

        def of_params(params):
            return nnx_loss(nnx.merge(graph, params, others, copy=True))

        value, grads = jax.value_and_grad(of_params)(params)
        optimizer.update(model, grads, value=value, grad=grads, value_fn=of_params)

    for _ in range(STEPS):
        step(model, optimizer)
    assert nnx_loss(model) < before


# --- Brax -----------------------------------------------------------------------------


class AgentTuple(NamedTuple):
    policy: Any
    value: Any


def brax_params(container: Any) -> Any:
    keys = jax.random.split(jax.random.key(0))
    return container(*(Linen().init(key, XS) for key in keys))


def brax_loss(params: Any, xs: jax.Array, ys: jax.Array) -> jax.Array:
    policy, value = (Linen().apply(net, xs) for net in (params.policy, params.value))
    return jnp.mean((policy - ys) ** 2) + jnp.mean((value + ys) ** 2)


# Brax calls update without params, so no weight decay here.
BRAX = {
    "adapt": Case(ta.adapt(optax.adam(0.1)), lambda flat: optax.adam(0.1)),
    "partition": grouped("policy/params/Dense_0"),
}


@pytest.mark.parametrize(
    ("name", "container"), grid(BRAX, [PPONetworkParams, AgentTuple])
)
def test_brax_gradient_update_fn(name, container):
    case = BRAX[name]
    params = brax_params(container)
    update = jax.jit(gradient_update_fn(brax_loss, case.tx, pmap_axis_name=None))
    found, state = params, case.tx.init(params)
    for _ in range(STEPS):
        _, found, state = update(found, XS, YS, optimizer_state=state)

    assert type(found) is container
    wanted = by_hand(case.plain, params, lambda params: brax_loss(params, XS, YS))
    assert_same(found, wanted)


@pytest.mark.slow
def test_brax_gradient_update_fn_over_devices_with_aux():
    case = grouped("policy/params/Dense_0")
    params = brax_params(PPONetworkParams)

    def loss(params, xs, ys):
        return brax_loss(params, xs, ys), {"seen": xs.shape[0]}

    update = gradient_update_fn(loss, case.tx, pmap_axis_name="i", has_aux=True)

    def step(params, state, xs, ys):
        (_, aux), params, state = update(params, xs, ys, optimizer_state=state)
        return params, state, aux

    # Brax maps over devices with this axis name; the mean gradient is over all devices.
    step = jax.jit(jax.vmap(step, (None, None, 0, 0), axis_name="i"))
    halves = [x.reshape(2, 4, -1) for x in (XS, YS)]
    found, state = params, case.tx.init(params)
    for _ in range(STEPS):
        out, states, aux = step(found, state, *halves)
        found, state = jax.tree.map(lambda x: x[0], (out, states))

    assert aux["seen"].tolist() == [4, 4]
    wanted = by_hand(case.plain, params, lambda params: brax_loss(params, XS, YS))
    assert_same(found, wanted)


@pytest.mark.slow
def test_a_transformation_that_needs_params_says_so_in_brax():
    params = brax_params(PPONetworkParams)
    tx = ta.adapt(optax.adamw(0.1))
    update = gradient_update_fn(brax_loss, tx, pmap_axis_name=None)
    with pytest.raises(ValueError, match="not passing `params`"):
        update(params, XS, YS, optimizer_state=tx.init(params))


# --- Equinox --------------------------------------------------------------------------


class Net(eqx.Module):
    hidden: eqx.nn.Linear
    out: eqx.nn.Linear
    activation: Callable
    seen: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key)
        self.hidden = eqx.nn.Linear(2, 4, key=keys[0])
        self.out = eqx.nn.Linear(4, 1, key=keys[1])
        self.activation = jax.nn.relu
        self.seen = jnp.array(0)

    def __call__(self, x):
        return self.out(self.activation(self.hidden(x)))


def eqx_model(seed: int = 0) -> Net:
    return Net(jax.random.key(seed))


def eqx_loss(model: Any) -> jax.Array:
    return squares(jax.vmap(model))


EQUINOX = {"adapt": decayed("weight"), "partition": grouped("hidden")}


@pytest.mark.parametrize(
    ("name", "apply"), grid(EQUINOX, [ta.apply_updates, eqx.apply_updates])
)
def test_equinox_loop_with_the_raw_model(name, apply):
    case = EQUINOX[name]

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(eqx_loss)(model)
        updates, state = case.tx.update(grads, state, model)
        return apply(model, updates), state

    model = eqx_model()
    state = case.tx.init(model)
    for _ in range(STEPS):
        model, state = step(model, state)

    assert model.activation is jax.nn.relu
    assert model.seen == 0
    assert_same(model, by_hand(case.plain, eqx_model(), eqx_loss))


@pytest.mark.slow
@pytest.mark.parametrize("case", EQUINOX.values(), ids=EQUINOX)
def test_equinox_loop_with_filtered_params(case):
    """Today's advice, ``eqx.partition`` and ``eqx.combine``, still works."""
    params, static = eqx.partition(eqx_model(), eqx.is_inexact_array)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda part: eqx_loss(eqx.combine(part, static)))(params)
        updates, state = case.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = case.tx.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    assert_same(params, by_hand(case.plain, eqx_model(), eqx_loss))


@pytest.mark.slow
def test_equinox_loop_with_split_params_and_plain_optax():
    frozen = ta.glob("hidden/weight")
    params, rest = ta.split(eqx_model(), ~frozen)
    tx = optax.adamw(0.1)

    # The rest is an argument: no array is a constant, and nothing is traced again.
    @jax.jit
    def step(params, state, rest):
        grads = jax.grad(lambda part: eqx_loss(ta.merge(part, rest)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(STEPS):
        params, state = step(params, state, rest)
    model = ta.merge(params, rest)

    def plain(flat):
        return all_but("hidden/weight", tx, flat)

    assert step._cache_size() == 1
    assert_same(model, by_hand(plain, eqx_model(), eqx_loss))
    assert_frozen(eqx_model(), model, "hidden/weight")


@pytest.mark.slow
def test_equinox_line_search_with_a_frozen_leaf():
    tx = ta.freeze(optax.lbfgs(), "hidden/weight")

    @eqx.filter_jit
    def step(model, state):
        value, grad = ta.value_and_grad_from_state(eqx_loss)(model, state=state)
        updates, state = tx.update(
            grad, state, model, value=value, grad=grad, value_fn=eqx_loss
        )
        return ta.apply_updates(model, updates), state

    model = eqx_model()
    state = tx.init(model)
    for _ in range(STEPS):
        model, state = step(model, state)
    assert eqx_loss(model) < eqx_loss(eqx_model())
    assert_frozen(eqx_model(), model, "hidden/weight")


# --- Haiku ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mapping"), grid(["adam", "sm3"], [dict, to_immutable_dict])
)
def test_haiku(name, mapping):
    tx = getattr(optax, name)(0.1)
    net = hk.without_apply_rng(hk.transform(lambda xs: hk.nets.MLP([4, 1])(xs)))
    params = mapping(net.init(jax.random.key(0), XS))

    def loss(params):
        return squares(lambda xs: net.apply(params, xs))

    frozen = ta.freeze(tx, "mlp/~/linear_0/w")

    @jax.jit
    def step(params, state):
        updates, state = frozen.update(jax.grad(loss)(params), state, params)
        return ta.apply_updates(params, updates), state

    found, state = params, frozen.init(params)
    for _ in range(STEPS):
        found, state = step(found, state)

    def plain(flat):
        return all_but("mlp/~/linear_0/w", tx, flat)

    assert type(found) is type(params)
    assert_same(found, by_hand(plain, params, loss))


# --- Optax outside and inside ---------------------------------------------------------


def clipped(tx: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(0.5), tx, optax.scale(0.5))


def named(tx: Any) -> Any:
    clip = optax.clip_by_global_norm(0.5)
    return optax.named_chain(("clip", clip), ("inner", tx), ("scale", optax.scale(0.5)))


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "chain": clipped,
    "named_chain": named,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda factor: optax.chain(tx, optax.scale(factor))
    )(factor=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups"),
    [(name, False) for name in WRAPPERS] + [("chain", True), ("named_chain", True)],
)
@pytest.mark.parametrize("where", ["around", "inside"])
def test_optax_wrappers(name, where, groups):
    wrap, adamw = WRAPPERS[name], optax.adamw(0.1, weight_decay=0.1)

    def compose(anywhere: Callable[[Any], Any]) -> Any:
        return wrap(anywhere(adamw)) if where == "around" else anywhere(wrap(adamw))

    def ours(tx: Any) -> Any:
        rules = {"hidden/weight": "frozen", "**": "on"}
        return ta.partition({"on": tx}, rules) if groups else ta.adapt(tx)

    def plain(flat: dict[str, Any]) -> Any:
        frozen = "hidden/weight" if groups else None
        return compose(lambda tx: all_but(frozen, tx, flat))

    tx = compose(ours)
    params, static = eqx.partition(eqx_model(), eqx.is_inexact_array)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda part: eqx_loss(eqx.combine(part, static)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    assert_same(params, by_hand(plain, eqx_model(), eqx_loss))


# --- JAX's own loops ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", EQUINOX.values(), ids=EQUINOX)
def test_scan_over_steps(case):
    params, static = eqx.partition(eqx_model(), eqx.is_inexact_array)

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(lambda p: eqx_loss(eqx.combine(p, static)))(
            params
        )
        updates, state = case.tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    start = (params, case.tx.init(params))
    (params, _), values = jax.lax.scan(step, start, length=STEPS)
    assert values.shape == (STEPS,)
    assert_same(params, by_hand(case.plain, eqx_model(), eqx_loss))


def seeds() -> jax.Array:
    return jnp.array([0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("case", EQUINOX.values(), ids=EQUINOX)
def test_vmap_over_an_ensemble_of_raw_models(case):
    ensemble = eqx.filter_vmap(eqx_model)(seeds())

    @eqx.filter_jit
    @eqx.filter_vmap
    def step(model, state):
        grads = eqx.filter_grad(eqx_loss)(model)
        updates, state = case.tx.update(grads, state, model)
        return ta.apply_updates(model, updates), state

    state = eqx.filter_vmap(case.tx.init)(ensemble)
    for _ in range(STEPS):
        ensemble, state = step(ensemble, state)
    assert_members(ensemble, case.plain)


@pytest.mark.slow
@pytest.mark.parametrize("case", EQUINOX.values(), ids=EQUINOX)
def test_vmap_over_an_ensemble_of_split_models(case):
    ensemble = eqx.filter_vmap(eqx_model)(seeds())
    params, rest = ta.split(ensemble)

    @jax.jit
    @jax.vmap
    def step(params, rest, state):
        grads = jax.grad(lambda part: eqx_loss(ta.merge(part, rest)))(params)
        updates, state = case.tx.update(grads, state, params)
        return ta.apply_updates(params, updates), state

    state = jax.vmap(case.tx.init)(params)
    for _ in range(STEPS):
        params, state = step(params, rest, state)
    assert_members(ta.merge(params, rest), case.plain)


def assert_members(ensemble: Any, plain: Callable[..., Any]) -> None:
    for place, seed in enumerate(seeds()):
        flat = {path: x[place] for path, x in ta.split(ensemble)[0].items()}
        assert_same(flat, by_hand(plain, eqx_model(seed), eqx_loss))
