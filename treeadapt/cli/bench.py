"""A small table of what the library costs on this machine.

Times a tree of a few layers, and one of many, next to JAX's own flattening. A first
look only: no accelerator is used, and nothing is compiled.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from treeadapt.convert import to_flat_dict
from treeadapt.selection.rules import Rules, param_labels
from treeadapt.splitting import merge, split

_SIZES = (100, 1_000, 10_000)
_REPEATS = 7


def bench_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, number of leaves, milliseconds, and times ``jax.tree.flatten``."""
    for num_leaves in _SIZES:
        first_ms = None
        for name, run in _cases(num_leaves).items():
            elapsed_ms = 1e3 * min(timeit.repeat(run, number=1, repeat=_REPEATS))
            first_ms = first_ms or elapsed_ms
            ratio = f"{elapsed_ms / first_ms:.1f}"
            yield name, f"{num_leaves:,}", f"{elapsed_ms:.3f}", ratio


def _cases(num_leaves: int) -> dict[str, Callable[[], Any]]:
    rules = Rules({"**/bias": "no_decay", "layers/{0..4}": "frozen", "**": "train"})
    layers = [
        {"bias": np.zeros(()), "kernel": np.zeros(())} for _ in range(num_leaves // 2)
    ]
    tree = {"layers": layers}
    params, rest = split(tree)
    return {
        "jax.tree.flatten": lambda: jax.tree.flatten(tree),
        "to_flat_dict": lambda: to_flat_dict(tree),
        "split": lambda: split(tree),
        "merge": lambda: merge(params, rest),
        "param_labels": lambda: param_labels(tree, rules),
    }
