"""Partitions of many groups: init and trace, size of the state, and its dispatch."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import treeadapt as ta
from benchmarks.harness import Race, Result, Target, figure

TOPIC = "partition"


def _setup(leaves: int, groups: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    params = {f"layer_{i}/w": jnp.ones((2,)) for i in range(leaves)}
    labels = {path: f"g{i % groups}" for i, path in enumerate(params)}
    transforms = {f"g{i}": optax.adam(1e-3 * (i + 1)) for i in range(groups)}
    return params, transforms, labels


def _init_and_trace(tx: Any, params: Any) -> Any:
    state = jax.eval_shape(tx.init, params)
    return jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p))(params, state, params)


def races(leaves: int = 2_000, groups: int = 50) -> Iterator[Race]:
    """Yield the races of one partition."""
    params, transforms, labels = _setup(leaves, groups)
    ours = ta.partition(transforms, lambda _: labels)
    native = optax.partition(transforms, lambda _: labels)
    adam = optax.adam(1e-3)
    yield Race(
        topic=TOPIC,
        work=f"init + trace of update, {groups} groups",
        size=leaves,
        contenders={
            "treeadapt": lambda: _init_and_trace(ours, params),
            "one adam": lambda: _init_and_trace(adam, params),
            "optax.partition": lambda: _init_and_trace(native, params),
        },
        baseline="treeadapt",
        targets={
            "one adam": Target(at_least=1 / 1.4),  # ours is at most 1.4 times it
            "optax.partition": Target(at_least=2),  # 2.4 times one adam, the floor
        },
    )
    yield _file_race(leaves, groups)
    states = {"treeadapt": ours.init(params), "optax.partition": native.init(params)}
    passed = jax.jit(lambda state: state)
    yield Race(
        topic=TOPIC,
        work=f"state through one jit call, {groups} groups",
        size=leaves,
        contenders={
            name: _call(passed, (jnp.ones(()), state)) for name, state in states.items()
        },
        baseline="treeadapt",
        targets={"optax.partition": Target(at_least=10)},
    )


def _file_race(leaves: int, groups: int) -> Race:
    """Return the race of an optimizer from a file with the same one in Python."""
    params = {f"layer_{n}": {"w": jnp.ones((2,))} for n in range(leaves)}
    size = leaves // groups
    rules = {
        f"layer_{{{n * size}..{n * size + size - 1}}}": f"g{n}" for n in range(groups)
    }
    rates = {f"g{n}": 1e-3 * (n + 1) for n in range(groups)}
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = Path(folder, "optimizer.json")
    tables = {
        label: {"type": "adamw", "learning_rate": rate, "weight_decay": 0.1}
        for label, rate in rates.items()
    }
    document = {"version": 1, "rules": rules, "optimizers": tables}
    file.write_text(json.dumps(document), "utf-8")

    def from_file() -> Any:
        return ta.load_optimizer(file).init(params)

    def in_python() -> Any:
        transforms = {
            label: optax.adamw(rate, weight_decay=0.1) for label, rate in rates.items()
        }
        return ta.partition(transforms, rules).init(params)

    return Race(
        topic=TOPIC,
        work=f"an optimizer from a file, and init, {groups} groups",
        size=leaves,
        contenders={"treeadapt": from_file, "the same in Python": in_python},
        baseline="treeadapt",
        targets={"the same in Python": Target(at_least=1 / 1.2)},
    )


def figures(leaves: int = 2_000, groups: int = 50) -> Iterator[Result]:
    """Count the nodes of the states."""
    params, transforms, labels = _setup(leaves, groups)
    states = {
        "treeadapt": ta.partition(transforms, lambda _: labels).init(params),
        "optax.partition": optax.partition(transforms, lambda _: labels).init(params),
    }
    own = 2 * leaves + 8 * groups + 2  # mu and nu of a leaf; what one adam adds
    for name, state in states.items():
        yield figure(
            TOPIC,
            f"state nodes, {groups} groups",
            leaves,
            name,
            _num_nodes(jax.tree.structure(state)) / own,
            of="leaves' own + groups'",
            target=Target(at_most=1) if name == "treeadapt" else None,
        )


def _call(fn: Any, state: Any) -> Any:
    return lambda: fn(state)[0]


def _num_nodes(treedef: Any) -> int:
    count, pending = 0, [treedef]
    while pending:
        node = pending.pop()
        count += 1
        pending.extend(node.children())
    return count
