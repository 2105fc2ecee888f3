"""The memory of a plan: published shapes on 2,048 devices, none of which exist.

And the carrying of a state to other params, which needs the same. Next to both is the
one part that is JAX's own, the shapes of the optimizer's state by ``jax.eval_shape``:
nobody knows these without it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import treeadapt as ta
from benchmarks.harness import Race, Result, Target, figure

TOPIC = "planning"

_MESH = AbstractMesh((64, 32), ("data", "model"))
_RULES = {
    "**/experts/{gate,up}": P("model", "data", None),
    "**/experts/down": P("model", None, "data"),
    "**/{query,key,value,key_value}": P("data", None, None),
    "**/out": P("model", None, "data"),
    "**/{gate,up,router,head}": P("data", "model"),
    "**/{down,*_down,embed}": P("model", "data"),
    "**": P(),
}


def races(dense: int = 126, sparse: int = 58) -> Iterator[Race]:
    """Yield one race a model; arguments are numbers of layers."""
    for name, tree in _models(dense, sparse).items():
        tx = optax.adamw(1e-4)
        yield Race(
            topic=TOPIC,
            work=f"plan the memory of {name}, AdamW",
            size=len(jax.tree.leaves(tree)),
            contenders={
                "treeadapt": functools.partial(_plan, tree, tx),
                "jax.eval_shape(tx.init)": functools.partial(_shapes, tree, tx),
            },
            baseline="jax.eval_shape(tx.init)",
            targets={"treeadapt": Target(at_most=2)},
        )
    yield _carrying(16 * dense)


def _carrying(layers: int) -> Race:
    """Return the race of carrying a state, of which JAX's tracing is the floor."""
    zeros = {"kernel": np.zeros((2, 3), np.float32), "bias": np.zeros(3, np.float32)}
    params = {f"layers_{n}": dict(zeros) for n in range(layers)}
    tx = optax.adamw(1e-4)
    shapes = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return Race(
        topic=TOPIC,
        work="carry the state of AdamW",
        size=2 * layers,
        contenders={
            "treeadapt": lambda: ta.carry_state(tx, params, state) and None,
            "jax.eval_shape(tx.init)": functools.partial(_shapes, params, tx),
        },
        baseline="jax.eval_shape(tx.init)",
        targets={"treeadapt": Target(at_most=2)},
    )


def figures(dense: int = 126, sparse: int = 58) -> Iterator[Result]:
    """Yield the seconds of a plan; arguments are numbers of layers."""
    for name, tree in _models(dense, sparse).items():
        for tx_name, tx in (
            ("AdamW", optax.adamw(1e-4)),
            ("AdamW, embedding frozen", ta.freeze(optax.adamw(1e-4), "embed")),
        ):
            samples = []
            for _ in range(3):
                start = time.perf_counter()
                _plan(tree, tx)
                samples.append(time.perf_counter() - start)
            yield figure(
                TOPIC,
                f"seconds to plan the memory of {name}, {tx_name}",
                len(jax.tree.leaves(tree)),
                "treeadapt",
                statistics.median(samples),
                of="1 s",
                target=Target(at_most=5),
            )


def _plan(tree: Any, tx: Any) -> int:
    rules = ta.Rules(_RULES, unused="ignore")
    plan = ta.summarize(tree, rules, mesh=_MESH, tx=tx).memory
    assert plan is not None
    return plan.device_bytes


def _shapes(tree: Any, tx: Any) -> None:
    # A new function, because JAX remembers the shapes of one that it has seen.
    jax.eval_shape(lambda params: tx.init(params), tree)


def _models(dense: int, sparse: int) -> dict[str, Any]:
    """Return a dense model of 405 billion parameters, and a mixture of 671."""
    wide, narrow = 16_384, 7_168
    grouped = {
        "query": _weight(wide, 128, 128),
        "key": _weight(wide, 8, 128),
        "value": _weight(wide, 8, 128),
        "out": _weight(128, 128, wide),
    }
    latent = {
        "query_down": _weight(narrow, 1_536),
        "query_norm": _weight(1_536),
        "query": _weight(1_536, 128, 192),
        "key_value_down": _weight(narrow, 576),
        "key_value_norm": _weight(512),
        "key_value": _weight(512, 128, 256),
        "out": _weight(128, 128, narrow),
    }
    mixture = {
        "router": _weight(narrow, 256),
        "balance": _weight(256),
        "experts": _mlp(narrow, 2_048, 256),
        "shared": _mlp(narrow, 2_048),
    }
    blocks = [_block(narrow, latent, _mlp(narrow, 18_432))] * 3
    blocks += [_block(narrow, latent, mixture)] * sparse
    alike = [_block(wide, grouped, _mlp(wide, 53_248))] * dense
    return {
        "405 billion parameters": _model(wide, 128_256, alike),
        "671 billion in 256 experts": _model(narrow, 129_280, blocks),
    }


def _model(width: int, words: int, layers: list[Any]) -> dict[str, Any]:
    ends = {"embed": _weight(words, width), "head": _weight(width, words)}
    return {**ends, "layers": layers, "norm": _weight(width)}


def _block(width: int, attention: Any, mlp: Any) -> dict[str, Any]:
    norms = {"attention": _weight(width), "mlp": _weight(width)}
    return {"attention": attention, "mlp": mlp, "norms": norms}


def _mlp(width: int, hidden: int, *experts: int) -> dict[str, Any]:
    up, down = _weight(*experts, width, hidden), _weight(*experts, hidden, width)
    return {"gate": up, "up": up, "down": down}


def _weight(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
