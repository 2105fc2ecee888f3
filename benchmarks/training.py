"""Training: complete small-batch steps per second, as a user writes them.

Three ways to train a 24-block Equinox transformer, and three ways to give its leaves 50
rates. Runs unchanged on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import treeadapt as ta
from benchmarks import models
from benchmarks.harness import Race

TOPIC = "training"


def races(num_blocks: int = 24, groups: int = 50) -> Iterator[Race]:
    """Yield the races of one step each."""
    model = models.Transformer(num_blocks, key=jax.random.PRNGKey(0))
    size = len(jax.tree.leaves(model))
    x = jnp.ones((4, 8, 16))
    yield Race(
        topic=TOPIC,
        work=f"one adamw step, {num_blocks}-block transformer",
        size=size,
        contenders={
            "ta.split": _split_step(model, optax.adamw(1e-3), x),
            "raw module, eqx.filter_jit": _filter_jit_step(model, x),
            "eqx.partition, manually": _partition_step(model, x),
        },
        baseline="ta.split",
    )
    params, _ = ta.split(model)
    labels = {path: f"g{i % groups}" for i, path in enumerate(params)}
    transforms = {f"g{i}": optax.adam(1e-3 * (i + 1)) for i in range(groups)}
    factors = [
        (ta.escape(path), float(i % groups + 1)) for i, path in enumerate(params)
    ]
    yield Race(
        topic=TOPIC,
        work=f"one adam step with {groups} rates, {num_blocks}-block transformer",
        size=size,
        contenders={
            "ta.partition": _split_step(
                model, ta.partition(transforms, lambda _: labels), x
            ),
            "ta.scale_by_rules": _split_step(
                model,
                optax.chain(optax.adam(1e-3), ta.scale_by_rules(ta.Rules(factors))),
                x,
            ),
            "optax.partition": _split_step(
                model, optax.partition(transforms, lambda _: labels), x
            ),
        },
        baseline="ta.partition",
    )


def _loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model)(x) ** 2)


def _split_step(model: Any, tx: Any, x: jax.Array) -> Callable[[], Any]:
    params, rest = ta.split(model)

    @jax.jit
    def step(params: Any, rest: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: _loss(ta.merge(p, rest), x))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return _looped(lambda carry: step(carry[0], rest, carry[1], x), params, tx)


def _filter_jit_step(model: Any, x: jax.Array) -> Callable[[], Any]:
    tx = optax.adamw(1e-3)

    @eqx.filter_jit
    def step(model: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = eqx.filter_value_and_grad(_loss)(model, x)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, updates), state), loss

    carry = (model, tx.init(eqx.filter(model, eqx.is_array)))
    return _advance(lambda carry: step(carry[0], carry[1], x), carry)


def _partition_step(model: Any, x: jax.Array) -> Callable[[], Any]:
    params, static = eqx.partition(model, eqx.is_inexact_array)
    tx = optax.adamw(1e-3)

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: _loss(eqx.combine(p, static), x))(
            params
        )
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return _looped(lambda carry: step(carry[0], carry[1], x), params, tx)


def _looped(step: Callable[[Any], Any], params: Any, tx: Any) -> Callable[[], Any]:
    return _advance(step, (params, tx.init(params)))


def _advance(step: Callable[[Any], Any], carry: Any) -> Callable[[], jax.Array]:
    """Return a call that does the next step and returns its loss."""

    def once() -> jax.Array:
        nonlocal carry
        carry, loss = step(carry)
        return loss

    return once
