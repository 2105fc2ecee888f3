"""A user's module: ``mypy --strict`` must infer every public type as written here.

``make lint`` checks this file; ``assert_type`` states what a call returns. A line that
is wrong on purpose ignores the expected error: with ``--strict`` an unneeded exemption
is an error too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax.sharding import Mesh

import treeadapt as ta


class Model(NamedTuple):
    encoder: dict[str, jax.Array]
    head: jax.Array


def model() -> Model:
    return Model({"w": jnp.ones((2, 3))}, jnp.ones(3))


def names(tree: Model) -> None:
    assert_type(ta.tree_paths(tree), tuple[str, ...])
    assert_type(ta.to_flat_dict(tree), dict[str, Any])
    flat = ta.to_flat_dict(tree)
    assert_type(ta.from_flat_dict(tree, flat, strict=False), Model)
    assert_type(ta.from_state_dict(tree, ta.to_state_dict(tree)), Model)
    assert_type(ta.escape("a*"), str)
    params, rest = ta.split(tree, "encoder", arrays="all", nested=True)
    assert_type(rest, ta.Rest[Model])
    assert_type(params, ta.Params)
    assert_type(ta.merge(params, rest), Model)
    assert_type(ta.map_where(jnp.zeros_like, tree, "head", unused="ignore"), Model)


def selection(tree: Model, file: Path) -> None:
    where = ta.glob("**/w") & ~ta.node(dict) | ta.leaf(ndim=1)
    assert_type(where, ta.Selector)
    assert_type(where.matches("a/b"), bool)
    rules = ta.Rules({"encoder": "frozen", "**": "train"}, unused="ignore")
    assert_type(rules.where("frozen"), ta.Selector)
    assert_type(rules.to_toml(), str)
    assert_type(ta.load_rules(file), ta.Rules)
    ta.param_labels(tree, rules)
    ta.param_labels(tree, {"**": 1}, default=0)
    ta.param_labels(tree, [("head", 1), (dict, 2), (["a", "!b"], 3)])
    ta.param_mask(tree, ["**", "!head"])
    assert_type(ta.summarize(tree, rules), ta.Summary)
    assert_type(ta.tree_diff(tree, tree, values=True), ta.TreeDiff)


def training(tree: Model) -> Model:
    tx: optax.GradientTransformationExtraArgs
    tx = ta.partition({"train": optax.adam(1e-3)}, {"head": "train", "**": "frozen"})
    tx = ta.adapt(optax.lbfgs())
    tx = ta.freeze(optax.sgd(0.1), "encoder")
    state = tx.init(tree)
    updates, state = tx.update(tree, state, tree)
    updated = ta.apply_updates(tree, updates)
    assert_type(updated, Model)
    count: jax.Array = ta.tree_get(state, "count", default=jnp.zeros(()))
    del count
    return updated


def sharding(tree: Model, mesh: Mesh) -> None:
    ta.partition_specs(tree, {"**": None}, default=None)
    ta.named_shardings(tree, {"**": None}, mesh)


def files(tree: Model, file: Path) -> Model:
    ta.save(file, tree, max_shard_bytes=10**6)
    assert_type(ta.compare_checkpoint(file, tree), ta.LoadReport)
    assert_type(ta.load(file), dict[str, Any])
    untyped: Any = tree
    model: Model = ta.load(file, untyped)
    assert_type(ta.load(file, model), Model)
    loaded = ta.load(str(file), tree, where="head", strict=False)
    assert_type(loaded, Model)
    return loaded


def registry() -> None:
    class Net:
        w: jax.Array

    ta.register(Net, fields=("w",))
    known: ta.AdapterRegistry = ta.default_registry
    del known


def errors() -> None:
    try:
        ta.glob("a**b")
    except ta.PatternError as error:
        problem: ta.TreeAdaptError = error
        value: ValueError = error
        del problem, value


def wrong(tree: Model) -> None:
    ta.split(tree, arrays="floats")  # type: ignore[arg-type]
    ta.Rules({"**": "train"}, overlap="last")  # type: ignore[arg-type]
    ta.to_flat_dict()  # type: ignore[call-arg]
    ta.escape(3)  # type: ignore[arg-type]
    ta.split(tree, 3)  # type: ignore[arg-type]
    ta.param_labels(tree, 3)  # type: ignore[arg-type]
    ta.no_such_name  # type: ignore[attr-defined]  # noqa: B018


Loss = Callable[[Mapping[str, jax.Array]], jax.Array]


def own_loop(tree: Model, loss: Loss) -> Model:
    params, rest = ta.split(tree)
    grads = jax.grad(loss)(params)
    updates: dict[str, jax.Array] = ta.apply_updates(params, grads)
    merged = ta.merge(updates, rest)
    assert_type(merged, Model)
    return merged
