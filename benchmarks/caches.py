"""Caches: many structures, their memory, and the cost of importing."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
from collections.abc import Iterator

import psutil

import treeadapt as ta
from benchmarks import models
from benchmarks.harness import Race, Result, Target, figure

TOPIC = "caches"


def races(structures: int = 1_500) -> Iterator[Race]:
    """Yield a race between the latest of many structures and the first one."""
    trees = [{f"layer_{i}": {"w": models.LEAF}} for i in range(structures)]
    for tree in trees:
        ta.to_state_dict(tree)

    def latest() -> object:
        return ta.to_state_dict(trees[-1])

    def first() -> object:
        return ta.to_state_dict(trees[0])

    yield Race(
        topic=TOPIC,
        work=f"{structures:,} structures seen: the latest vs the first",
        size=1,
        contenders={"the latest": latest, "the first": first},
        baseline="the first",
        targets={"the latest": Target(at_most=2)},
    )


def figures(structures: int = 10_000, imports: int = 7) -> Iterator[Result]:
    """Measure memory after many structures, in MB, and the import, in ms."""
    process = psutil.Process()
    for i in range(500):
        ta.tree_paths({f"warm_{i}": [models.LEAF]})
    gc.collect()
    before = process.memory_info().rss
    for i in range(structures):
        ta.tree_paths({f"layer_{i}": [models.LEAF, {"w": models.LEAF}]})
    gc.collect()
    yield figure(
        TOPIC,
        f"memory held after {structures:,} structures",
        structures,
        "treeadapt",
        max(0, process.memory_info().rss - before) / 1e6,
        of="1 MB",
        target=Target(at_most=5),
    )
    program = (
        "import time, jax, optax; s = time.perf_counter(); import treeadapt; "
        "print(time.perf_counter() - s)"
    )
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for _ in range(imports)
    ]
    yield figure(
        TOPIC,
        "import treeadapt after jax and optax",
        1,
        "treeadapt",
        statistics.median(times) * 1e3,
        of="1 ms",
        target=Target(at_most=20),
    )
