"""A new state can be donated together with the params."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from sizes import grid

import treeadapt as ta

# Each keeps one array in two places, or the params themselves.
ALIASING = {
    "lbfgs": optax.lbfgs,
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.contrib.schedule_free_sgd(0.1), 2),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
}
MAKERS = {
    "adapt": ta.adapt,
    "partition": lambda tx: ta.partition({"a": tx, "b": optax.sgd(0.1)}, RULES),
    "freeze": lambda tx: ta.freeze(tx, "b"),
}
RULES = {"a": "a", "**": "b"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "maker"), grid(ALIASING, MAKERS, 3))
def test_params_and_state_are_donated_at_the_first_step(name, maker):
    params = {"a": {"w": jnp.ones(3)}, "b": jnp.ones(2)}
    tx = MAKERS[maker](ALIASING[name]())
    state = tx.init(params)
    leaves = jax.tree.leaves((params, state))
    assert len({id(leaf) for leaf in leaves}) == len(leaves)

    def loss(params):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        search = {"value": value, "grad": grads, "value_fn": loss}
        extra = search if name == "lbfgs" else {}
        updates, state = tx.update(grads, state, params, **extra)
        return ta.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it
        params, state = donating(params, state)
        donating(params, state)


@pytest.mark.parametrize("memory", ["pinned_host", "unpinned_host"])
def test_a_copy_for_donation_stays_in_the_same_memory(memory):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)
    params = {"w": jax.device_put(jnp.ones(3), place)}
    tx = optax.GradientTransformation(
        lambda params: (params["w"], params["w"]),
        lambda updates, state, params=None: (updates, state),
    )
    state = ta.adapt(tx).init(params)
    assert len({id(leaf) for leaf in (params["w"], *state)}) == 3
    assert [leaf.sharding for leaf in state] == [place, place]


def test_an_array_that_occurs_twice_cannot_be_donated_today():
    state = optax.lbfgs().init(jnp.ones(3))
    assert state[0].diff_params_memory is state[0].diff_updates_memory
