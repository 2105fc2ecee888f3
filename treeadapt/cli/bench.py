"""A small table of what the library costs on this machine.

Times a tree of a few layers, and one of many, beside JAX's own flattening. A first look
only: no accelerator is used, and nothing is compiled.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from treeadapt.convert import to_flat_dict
from treeadapt.rules import Rules, param_labels
from treeadapt.splitting import merge, split

_SIZES = (100, 1_000, 10_000)
_REPEATS = 7


def bench_rows() -> Iterator[tuple[str, int, float, float]]:
    """Yield name, number of leaves, milliseconds, and times ``jax.tree.flatten``."""
    for num_leaves in _SIZES:
        tree = _tree(num_leaves)
        rules = Rules({"**/bias": "no_decay", "layers/{0..4}": "frozen", "**": "train"})
        params, rest = split(tree)
        flatten = functools.partial(jax.tree.flatten, tree)
        base = _best_ms(flatten)
        cases: dict[str, Callable[[], Any]] = {
            "jax.tree.flatten": flatten,
            "to_flat_dict": functools.partial(to_flat_dict, tree),
            "split": functools.partial(split, tree),
            "merge": functools.partial(merge, params, rest),
            "param_labels": functools.partial(param_labels, tree, rules),
        }
        for name, run in cases.items():
            elapsed_ms = _best_ms(run)
            yield name, num_leaves, elapsed_ms, elapsed_ms / base


def _tree(num_leaves: int) -> Any:
    leaf = np.zeros((), np.float32)
    return {
        "layers": [
            {"bias": leaf.copy(), "kernel": leaf.copy()} for _ in range(num_leaves // 2)
        ]
    }


def _best_ms(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3
