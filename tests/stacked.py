"""Whether a transformation does on stacked layers what it does on the unrolled model.

Two flat dicts of one small model: ``unrolled`` has a leaf for each layer, ``stacked``
one for all, along axis 0. The gradients and params of every step are the same numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import Case, Flat, Step, numbers, reference

import treeadapt as ta

STACKS = {"blocks": 0}
STEPS = 3
LAYER = {"attn/kernel": (4, 6), "mlp/kernel": (6, 4), "norm/scale": (6,)}
REST = {"embed": (5, 6), "head/bias": (3,)}


def unrolled(layers: int, dtype: str = "float32") -> Flat:
    """A flat dict with a leaf for each layer."""
    shapes = REST | {
        f"blocks/{layer}/{path}": shape
        for layer in range(layers)
        for path, shape in LAYER.items()
    }
    return {path: jnp.zeros(shape, dtype) for path, shape in shapes.items()}


def stack(flat: Flat, layers: int) -> Flat:
    """The same leaves, with one for all layers; names of halves stay."""
    found: Flat = {}
    for path, leaf in flat.items():
        half, colon, name = path.rpartition(":")
        if not name.startswith("blocks/"):
            found[path] = leaf
        elif name.startswith("blocks/0/"):
            rest = name.removeprefix("blocks/0/")
            rows = [flat[f"{half}{colon}blocks/{n}/{rest}"] for n in range(layers)]
            found[f"{half}{colon}blocks/{rest}"] = jnp.stack(rows)
    return found


def updates_of(step: Step, flat: Flat, layers: int | None = None) -> list[Flat]:
    """The updates of compiled steps; those of stacked layers if there are any."""

    def numbered(seed: float) -> Flat:
        new = numbers(flat, seed)
        return new if layers is None else stack(new, layers)

    run = jax.jit(step)
    state, found = step.init(numbered(0.5)), []
    for index in range(STEPS):
        params = numbered(0.5 + 0.1 * index)
        updates, state = run(numbered(1.0 + index), state, params)
        found.append(updates)
    return found


@functools.lru_cache(maxsize=2)
def wanted(case: Case, layers: int, dtype: str) -> list[Flat]:
    """Updates of the unrolled model, stacked."""
    flat = unrolled(layers, dtype)
    steps = updates_of(reference(case, flat), flat)
    return [stack(step, layers) for step in steps]


def distance(
    case: Case, layers: int, *, by_layer: bool, dtype: str = "float32"
) -> float:
    """How far updates of stacked layers are from those of the unrolled model.

    Returns:
        0 if they are equal bit for bit; else the largest difference in any step, as a
        part of the largest update of its leaf.
    """
    flat = unrolled(layers, dtype)
    tx = case.make()
    tx = ta.per_layer(tx, STACKS) if by_layer else ta.adapt(tx)
    got = updates_of(Step(case, stack(flat, layers), tx), flat, layers)
    return max(
        far_apart(one, other)
        for step, others in zip(wanted(case, layers, dtype), got, strict=True)
        for one, other in _pairs(step, others)
    )


def _pairs(want: Flat, got: Flat) -> Any:
    assert want.keys() == got.keys()
    return [(np.asarray(want[path]), np.asarray(got[path])) for path in want]


def far_apart(want: np.ndarray, got: np.ndarray) -> float:
    """The largest difference of two arrays, as a part of the largest entry."""
    if want.tobytes() == got.tobytes():
        return 0.0
    far = np.abs(want.astype(np.float64) - got.astype(np.float64))
    far = np.where(np.isnan(want) & np.isnan(got), 0, far)
    most = np.max(np.abs(want), initial=0, where=np.isfinite(want))
    far = np.max(far, initial=0)
    return float(far / most) if most else float(np.inf if far else 0)
