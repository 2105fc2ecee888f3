"""Two models: what matching them, and mending a table between them, asks and takes.

Both are residual layers: NumPy with weights as PyTorch lays them out, and a compiled
model of JAX. ``match_models`` has no table; the one that ``find_wrong_rows`` is given
takes the norms for one less than they are. Next to the seconds of the processor that
each search takes are those of as many calls of both models alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treeadapt as ta
from benchmarks.harness import Race, Result, figure

TOPIC = "matching"

_WIDTH, _HIDDEN, _OUT = 8, 12, 5
_NORM = 1e-6
_WRONG = ta.Migration(
    {
        "h.{l}.norm.weight": ("blocks/{l}/scale", {"offset": -1.0}),
        "h.{l}.up.weight : o i": "blocks/{l}/w_in : i o",
        "h.{l}.up.bias": "blocks/{l}/b_in",
        "h.{l}.down.weight : o i": "blocks/{l}/w_out : i o",
        "head.weight : o i": "out : i o",
    }
)


def races() -> Iterator[Race]:
    """Yield no race: a search is measured once."""
    yield from ()


def figures(layers: Sequence[int] = (6, 25, 125)) -> Iterator[Result]:
    """Measure searches for models of some numbers of layers, of four leaves each."""
    for count in layers:
        yield from _searched(count)


def _searched(layers: int) -> Iterator[Result]:
    """Measure both searches, and as many calls of both models alone."""
    old, new = _leaves(layers)
    inputs = np.random.default_rng(1).normal(size=(2, _WIDTH)).astype("f4")
    compiled = jax.jit(_model)

    def model(params: Any) -> Any:
        return compiled(params, inputs)

    def reference(params: Any) -> Any:
        return _reference(params, inputs)

    sides = old, new, model, reference
    np.asarray(model(new))  # compiles
    for name, search in (
        ("match_models", lambda: ta.match_models(*sides)),
        ("find_wrong_rows", lambda: ta.find_wrong_rows(_WRONG, *sides)),
    ):
        seconds, result = _timed(search)
        if not result.found:
            raise RuntimeError(f"{name} found nothing for {len(old)} leaves: {result}")
        calls = range(result.evaluations // 2)
        alone, _ = _timed(
            lambda calls=calls: [
                (reference(old), np.asarray(model(new))) for _ in calls
            ]
        )
        for work, contender, value, unit in (
            ("calls of both models", "treeadapt", result.evaluations, "a call"),
            ("CPU seconds", "treeadapt", seconds, "a second"),
            ("CPU seconds of its calls alone", "models", alone, "a second"),
        ):
            yield figure(TOPIC, f"{name}: {work}", len(old), contender, value, of=unit)


def _timed(run: Any) -> tuple[float, Any]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def _leaves(layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the leaves of the old model, and those that the new one takes."""
    random = np.random.default_rng(0)
    old: dict[str, Any] = {}
    for layer in range(layers):
        for name, shape in (
            ("norm.weight", (_WIDTH,)),
            ("up.weight", (_HIDDEN, _WIDTH)),
            ("up.bias", (_HIDDEN,)),
            ("down.weight", (_WIDTH, _HIDDEN)),
        ):
            old[f"h.{layer}.{name}"] = random.normal(size=shape).astype("f4")
    old["head.weight"] = random.normal(size=(_OUT, _WIDTH)).astype("f4")
    blocks = [
        {
            "scale": jnp.ones(_WIDTH),
            "w_in": jnp.ones((_WIDTH, _HIDDEN)),
            "b_in": jnp.ones(_HIDDEN),
            "w_out": jnp.ones((_HIDDEN, _WIDTH)),
        }
        for _ in range(layers)
    ]
    return old, {"blocks": blocks, "out": jnp.ones((_WIDTH, _OUT))}


def _reference(params: dict[str, Any], x: Any) -> Any:
    layers = len(params) // 4
    for layer in range(layers):
        norm, up, bias, down = (
            params[f"h.{layer}.{name}"]
            for name in ("norm.weight", "up.weight", "up.bias", "down.weight")
        )
        normal = x / np.sqrt((x * x).mean(-1, keepdims=True) + _NORM) * norm
        x = x + np.tanh(normal @ up.T + bias) @ down.T / layers
    return x @ params["head.weight"].T


def _model(params: dict[str, Any], x: Any) -> Any:
    layers = len(params["blocks"])
    for block in params["blocks"]:
        normal = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + _NORM) * block["scale"]
        x = (
            x
            + jnp.tanh(normal @ block["w_in"] + block["b_in"]) @ block["w_out"] / layers
        )
    return x @ params["out"]
