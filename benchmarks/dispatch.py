"""Steps: the compiled program of an adapted step, and the cost of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import optax

import treeadapt as ta
from benchmarks import models
from benchmarks.harness import Contender, Race, Result, Target, figure

TOPIC = "dispatch"


def races(num_blocks: int = 24) -> Iterator[Race]:
    """Yield dispatch and trace races on an Equinox transformer."""
    model = models.Transformer(num_blocks, key=jax.random.PRNGKey(0))
    params, _ = ta.split(model)
    bias = "head/bias"
    size = len(jax.tree.leaves(model))

    def new_rest() -> Any:
        return ta.split(model)[1]

    def after_split(run: Callable[[], Any]) -> Contender:
        """Time one call after a split, like the contender that gets a new rest."""
        return Contender(run=lambda _: run(), fresh=new_rest)

    both = jax.jit(lambda params, rest: (params, rest))
    alone = jax.jit(lambda params: params)
    filtered = eqx.filter(model, eqx.is_array)
    module = eqx.filter_jit(lambda model: model)
    yield Race(
        topic=TOPIC,
        work="one jit call with the model as argument and result",
        size=size,
        contenders={
            "jit(params, rest), rest new": Contender(
                run=lambda rest: both(params, rest)[0][bias],
                fresh=new_rest,
            ),
            "jit(params)": after_split(lambda: alone(params)[bias]),
            "jit of the filtered module": after_split(
                lambda: alone(filtered).head.bias
            ),
            "eqx.filter_jit of the raw module": after_split(
                lambda: module(model).head.bias
            ),
        },
        baseline="jit(params)",
        targets={"jit(params, rest), rest new": Target(at_most=1.15)},
    )
    tx = optax.adamw(1e-3)
    adapted = ta.adapt(tx)
    yield Race(
        topic=TOPIC,
        work="trace of an adamw step",
        size=size,
        contenders={
            "adapt, on the module": lambda: _traced(adapted, filtered),
            "plain, on the flat dict": lambda: _traced(tx, params),
        },
        baseline="plain, on the flat dict",
        targets={"adapt, on the module": Target(at_most=1.1)},
    )
    masked = optax.adamw(1e-3, mask=_matrices)
    yield Race(
        topic=TOPIC,
        work="init of adamw with a mask function, called on both trees",
        size=size,
        contenders={
            "adapt, on the module": lambda: ta.adapt(masked).init(filtered),
            "plain, on the flat dict": lambda: masked.init(params),
        },
        baseline="plain, on the flat dict",
    )


def _matrices(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def figures(num_blocks: int = 24) -> Iterator[Result]:
    """Compare the operations of the adapted and the plain step, one for one."""
    model = models.Transformer(num_blocks, key=jax.random.PRNGKey(0))
    params, _ = ta.split(model)
    tx = optax.adamw(1e-3)
    adapted = ta.adapt(tx)
    filtered = eqx.filter(model, eqx.is_array)
    counts = [
        len(_traced(one, given).eqns)
        for one, given in ((adapted, filtered), (tx, params))
    ]
    yield figure(
        TOPIC,
        "operations of an adamw step",
        len(params),
        "adapt, on the module",
        counts[0] / counts[1],
        of="plain, on the flat dict",
        target=Target(at_most=1),
    )


def _traced(tx: Any, params: Any) -> Any:
    state = jax.eval_shape(tx.init, params)
    return jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p))(params, state, params)
