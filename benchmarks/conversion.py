"""Conversion of known structures, compared with JAX's floor and other libraries."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import optree
import orbax.checkpoint as ocp
import tree as dm_tree
from flax import nnx, serialization, traverse_util

import treeadapt as ta
from benchmarks import models
from benchmarks.harness import Race, Result, Target, figure

TOPIC = "conversion"
#: Names of the contenders that are JAX's own floor.
FLOORS = (
    "flatten + unflatten",
    "flatten both + unflatten",
    "flatten + look-up + dict",
)
SIZES = (24, 1_000, 10_000, 100_000)


def races(
    sizes: tuple[int, ...] = SIZES, *, real_models: bool = True
) -> Iterator[Race]:
    """Yield one race for each direction and size, and one for each real model."""
    for size in sizes:
        tree = models.blocks(size)
        yield from _synthetic(tree, len(jax.tree.leaves(tree)))
    for name, model in models.real_models().items() if real_models else ():
        yield _real(name, model)
    yield _halves(24 if real_models else 2)


def figures(num_leaves: int = 1_000_000, rounds: int = 3) -> Iterator[Result]:
    """Measure how long it takes to name a huge new tree."""
    layer = dict.fromkeys(("kernel", "bias", "scale", "offset"), models.LEAF)
    block = {f"layer_{j}": layer for j in range(10)}
    tree = {f"block_{i}": block for i in range(max(1, num_leaves // 40))}
    size = len(jax.tree.leaves(tree))
    ratios = []
    for _ in range(rounds):
        ta.default_registry.forget()
        ours = _seconds(lambda: ta.to_flat_dict(tree))
        ratios.append(ours / _seconds(lambda: _exact_names(tree)))
    ta.default_registry.forget()  # a plan of a million leaves is large
    yield figure(
        TOPIC,
        "to_flat_dict, cold, vs tree_leaves_with_path + keystr",
        size,
        "treeadapt",
        statistics.median(ratios),
        of="tree_leaves_with_path + keystr",
        target=Target(at_most=2) if size >= 1_000_000 else None,
    )


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _exact_names(tree: Any) -> list[tuple[str, Any]]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]


def _synthetic(tree: Any, size: int) -> Iterator[Race]:
    state = ta.to_state_dict(tree)
    nested = jax.tree.structure(state)
    plain = serialization.to_state_dict(tree)
    yield Race(
        topic=TOPIC,
        work="to_state_dict",
        size=size,
        contenders={
            "treeadapt": lambda: ta.to_state_dict(tree),
            "flatten + unflatten": _floor(tree),
            "flax.serialization": lambda: serialization.to_state_dict(tree),
            "orbax.checkpoint.tree": lambda: ocp.tree.serialize_tree(tree),
        },
        baseline="flatten + unflatten",
        targets={
            "treeadapt": Target(at_most=1.4),
            **({"flax.serialization": Target(at_least=5)} if size >= 1_000 else {}),
        },
    )
    yield Race(
        topic=TOPIC,
        work="from_state_dict",
        size=size,
        contenders={
            "treeadapt": lambda: ta.from_state_dict(tree, state),
            "flatten both + unflatten": _floor(tree, state),
            "flax.serialization": lambda: serialization.from_state_dict(tree, plain),
            "orbax.checkpoint.tree": lambda: ocp.tree.deserialize_tree(plain, tree),
        },
        baseline="flatten both + unflatten",
        targets={"treeadapt": Target(at_most=2 if size < 100 else 1.7)},
    )
    yield Race(
        topic=TOPIC,
        work="to_flat_dict",
        size=size,
        contenders={
            "treeadapt": lambda: ta.to_flat_dict(tree),
            "flatten + nested unflatten": lambda: nested.unflatten(
                jax.tree.flatten(tree)[0]
            ),
            "flatten + look-up + dict": _flat_floor(tree),
            "orbax.checkpoint.tree": lambda: ocp.tree.to_flat_dict(tree, sep="/"),
            "flax.traverse_util": lambda: traverse_util.flatten_dict(plain, sep="/"),
            "tree_flatten_with_path + keystr": lambda: _keystr(tree),
            "optree paths": lambda: optree.tree_paths(plain),
            "dm-tree": lambda: dm_tree.flatten_with_path(plain),
        },
        baseline="flatten + look-up + dict",
        # Above it are the check of the leaves' classes and a few calls.
        targets={"treeadapt": Target(at_most=1.4 if size < 100 else 1.3)},
    )


def _real(name: str, model: Any) -> Race:
    return Race(
        topic=TOPIC,
        work=f"to_state_dict, {name}",
        size=len(jax.tree.leaves(model)),
        contenders={
            "treeadapt": lambda: ta.to_state_dict(model),
            "flatten + unflatten": _floor(model),
        },
        baseline="flatten + unflatten",
    )


def _halves(num_blocks: int) -> Race:
    model = models.Transformer(num_blocks, key=jax.random.PRNGKey(0))
    module = models.NnxMlp()

    def ours() -> Any:
        return ta.merge(*ta.split(model))

    def equinox() -> Any:
        return eqx.combine(*eqx.partition(model, eqx.is_inexact_array))

    def flax() -> Any:
        return nnx.merge(*nnx.split(module))

    return Race(
        topic=TOPIC,
        work=f"split + merge, {num_blocks}-block transformer",
        size=len(jax.tree.leaves(model)),
        contenders={
            "treeadapt": ours,
            "eqx.partition + combine": equinox,
            "nnx.split + merge (another model)": flax,
            "flatten + unflatten": _floor(model),
        },
        baseline="flatten + unflatten",
    )


def _floor(tree: Any, *others: Any) -> Callable[[], Any]:
    def flatten_unflatten() -> Any:
        for other in others:
            jax.tree.flatten(other)
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, leaves)

    return flatten_unflatten


def _flat_floor(tree: Any) -> Callable[[], Any]:
    """Return the minimal work for a flat dict of a known structure."""
    known, paths = jax.tree.structure(tree), ta.tree_paths(tree)
    blank = dict.fromkeys(paths)

    def flatten_look_up() -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        assert treedef == known
        flat = blank.copy()
        flat.update(zip(paths, leaves, strict=True))
        return flat

    return flatten_look_up


def _keystr(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
