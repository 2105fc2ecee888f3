"""Operations of rows: repeats of heads, and FP8 weights with scales for their blocks.

Next to ours are the formulas of a conversion script, in NumPy: ``np.repeat`` of the
heads of keys and values, and each scale repeated over its block of 128 by 128 numbers,
times the weight in float32, rounded to bfloat16. A repeat on a mesh must cost what its
own result has in bytes, and move none between devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

import treeadapt as ta
from benchmarks.harness import Race, Target

TOPIC = "operations"

_HEAD = 128
_BLOCK = 128
_COPIES = 4


def races(
    layers: int = 4, heads: int = 8, width: int = 2_048, hidden: int = 1_536
) -> Iterator[Race]:
    """Yield the races: heads that are repeated, and blocks that are multiplied.

    The formula does not look whether a product is too large for its dtype.
    """
    keys = _keys(layers, heads, width)
    repeat = ta.Migration(
        {"h.{l}.k : (k d) e": ("k : l e (k r) d", {"repeat": {"r": _COPIES}})},
        sizes={"d": _HEAD},
    )
    of_jax = jax.tree.map(jax.numpy.asarray, keys)
    stacked = jax.jit(lambda leaves: _repeated(leaves, jax.numpy))
    yield Race(
        topic=TOPIC,
        work=f"repeat {heads} heads {_COPIES} times, NumPy",
        size=layers,
        contenders={
            "treeadapt": lambda: repeat(keys),
            "NumPy formulas": lambda: _repeated(keys, np),
        },
        baseline="NumPy formulas",
        targets={"treeadapt": Target(at_most=1.2)},
    )
    yield Race(
        topic=TOPIC,
        work=f"repeat {heads} heads {_COPIES} times, JAX",
        size=layers,
        contenders={
            "treeadapt": lambda: repeat(of_jax)["k"],
            "jit of the formula": lambda: stacked(of_jax),
        },
        baseline="jit of the formula",
        targets={"treeadapt": Target(at_most=1.2)},
    )
    weights = _quantised(layers, hidden, width)
    row = ("h.{l}.weight : (a i) (b j)", "h.{l}.weight_scale_inv : a b")
    options = {"multiply": True, "cast": "bfloat16"}
    multiply = ta.Migration(
        {row: ("k : l (b j) (a i)", options)}, sizes={"i": _BLOCK, "j": _BLOCK}
    )
    yield Race(
        topic=TOPIC,
        work="multiply FP8 weights by the scales of their blocks, to bfloat16",
        size=layers,
        contenders={
            "treeadapt, checked": lambda: multiply(weights),
            "NumPy formulas": lambda: _multiplied(weights, layers),
        },
        baseline="NumPy formulas",
    )


def _keys(layers: int, heads: int, width: int) -> dict[str, np.ndarray]:
    shape = heads * _HEAD, width
    return {f"h.{n}.k": np.ones(shape, np.float32) for n in range(layers)}


def _repeated(leaves: dict[str, Any], xp: Any) -> Any:
    """Return the same work, as a conversion script has it."""
    heads = [leaf.T.reshape(leaf.shape[1], -1, _HEAD) for leaf in leaves.values()]
    return xp.repeat(xp.stack(heads), _COPIES, 2)


def _quantised(layers: int, rows: int, columns: int) -> dict[str, np.ndarray]:
    blocks = -(-rows // _BLOCK), -(-columns // _BLOCK)
    weight = np.ones((rows, columns), ml_dtypes.float8_e4m3fn)
    leaves: dict[str, np.ndarray] = {}
    for n in range(layers):
        leaves[f"h.{n}.weight"] = weight
        leaves[f"h.{n}.weight_scale_inv"] = np.full(blocks, n + 0.5, np.float32)
    return leaves


def _multiplied(leaves: dict[str, np.ndarray], layers: int) -> np.ndarray:
    """Return the same work, as a conversion script has it."""
    every = []
    for n in range(layers):
        weight = leaves[f"h.{n}.weight"].astype(np.float32)
        scales = leaves[f"h.{n}.weight_scale_inv"]
        scales = scales.repeat(_BLOCK, 0).repeat(_BLOCK, 1)
        weight *= scales[: weight.shape[0], : weight.shape[1]]
        every.append(weight.astype(ml_dtypes.bfloat16).T)
    return np.stack(every)
