"""Layers inside a scan: a step with four labels, and the time to trace it.

The model is a dict of stacked blocks as a scanned transformer has them, and the same
blocks one by one. Only the optimizer's step is timed: the gradients are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import treeadapt as ta
from benchmarks.harness import Race, Result, Target, figure

TOPIC = "stacks"
STACKS = {"blocks": 0}


def _blocks(layers: int, width: int) -> dict[str, Any]:
    shapes = {
        "attn": {"qkv": (width, 3 * width), "out": (width, width)},
        "mlp": {"up": (width, 4 * width), "down": (4 * width, width)},
        "norm": {"scale": (width,), "bias": (width,)},
    }
    return {
        part: {name: jnp.ones((layers, *shape)) for name, shape in held.items()}
        for part, held in shapes.items()
    }


def _scanned(layers: int, width: int) -> dict[str, Any]:
    return {"blocks": _blocks(layers, width), "embed": jnp.ones((8 * width, width))}


def _unrolled(params: Any, layers: int) -> dict[str, Any]:
    blocks = {
        str(i): jax.tree.map(lambda x, i=i: x[i], params["blocks"])
        for i in range(layers)
    }
    return {**params, "blocks": blocks}


def _table(layers: int) -> dict[str, str]:
    third = layers // 3
    return {
        f"blocks/{{0..{third - 1}}}": "frozen",
        f"blocks/{{{third}..{2 * third - 1}}}": "slow",
        "**/norm": "norms",
        "**": "fast",
    }


def _partition(rules: ta.Rules) -> Any:
    rates = {"slow": 1e-4, "norms": 3e-4, "fast": 1e-3}
    return ta.partition({name: optax.adam(rate) for name, rate in rates.items()}, rules)


def races(layers: int = 48, width: int = 64) -> Iterator[Race]:
    """Yield the races of one model."""
    params = _scanned(layers, width)
    unrolled = _unrolled(params, layers)
    rules = ta.Rules(_table(layers), stacks=STACKS)
    ours, size = _partition(rules), len(jax.tree.leaves(unrolled))
    contenders: dict[str, tuple[Any, Any]] = {
        "four labels, stacked": (ours, params),
        "one adam, stacked": (optax.adam(1e-3), params),
        "four labels, unrolled": (_partition(ta.Rules(_table(layers))), unrolled),
    }
    yield Race(
        topic=TOPIC,
        work=f"one step, {layers} layers of width {width}",
        size=size,
        contenders={name: _step(*given) for name, given in contenders.items()},
        baseline="four labels, stacked",
        # A third is frozen, and what is cut must be put together again.
        targets={"one adam, stacked": Target(at_least=1 / 1.5)},
    )
    few = _scanned(layers // 4, width)
    few_rules = ta.Rules(_table(layers // 4), stacks=STACKS)
    yield Race(
        topic=TOPIC,
        work=f"trace of a step with four labels, {layers} layers",
        size=size,
        contenders={
            "stacked": _traced(ours, params),
            f"stacked, {layers // 4} layers": _traced(_partition(few_rules), few),
            "unrolled": _traced(*contenders["four labels, unrolled"]),
        },
        baseline="stacked",
        targets={
            f"stacked, {layers // 4} layers": Target(at_least=1 / 1.2),
            "unrolled": Target(at_least=4),
        },
    )


def figures(layers: int = 48, width: int = 64) -> Iterator[Result]:
    """Count the operations of a step, for several numbers of layers."""
    counts = {}
    for each in (layers // 4, layers, 4 * layers):
        params = jax.eval_shape(lambda each=each: _scanned(each, width))
        tx = _partition(ta.Rules(_table(each), stacks=STACKS))
        counts[each] = len(_jaxpr(tx, params).eqns)
    for each, count in counts.items():
        yield figure(
            TOPIC,
            f"operations of a step with four labels, {each} layers",
            each,
            "stacked",
            count / counts[layers],
            of=f"{layers} layers",
            target=Target(at_most=1),
        )


def _step(tx: Any, params: Any) -> Callable[[], Any]:
    @jax.jit
    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    grads = jax.tree.map(lambda leaf: leaf * 0.5, params)
    state = tx.init(params)
    return lambda: step(grads, state, params)


def _traced(tx: Any, params: Any) -> Callable[[], Any]:
    return lambda: _jaxpr(tx, params)


def _jaxpr(tx: Any, params: Any) -> Any:
    state = jax.eval_shape(tx.init, params)
    return jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p))(params, state, params)
