"""Label trees from rules: new rules on a new structure, and the same again."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax

import treeadapt as ta
from benchmarks import models
from benchmarks.harness import Contender, Race, Target

TOPIC = "labels"
_fresh = itertools.count()


def races(sizes: tuple[int, ...] = (1_000, 10_000, 100_000)) -> Iterator[Race]:
    """Yield cold and warm races."""
    for size in sizes:
        yield _cold(size)
        yield _cold_many_rules(size)
        yield _warm(size)


def _rules(count: int, tag: str) -> list[tuple[str, str]]:
    kinds = ("kernel", "bias", "scale", "offset")
    found = [
        (f"**/block{tag}_{i // 4}/**/{kinds[i % 4]}", f"group_{i}")
        for i in range(count - 1)
    ]
    return [*found, ("**", "rest")]


def _new(size: int, count: int) -> tuple[Any, list[tuple[str, str]]]:
    tag = str(next(_fresh))
    return models.blocks(size, tag), _rules(count, tag)


def _ours(given: tuple[Any, list[tuple[str, str]]]) -> Any:
    tree, rules = given
    return ta.param_labels(tree, ta.Rules(rules, unused="ignore"))


def _regex_loop(given: tuple[Any, list[tuple[str, str]]]) -> Any:
    """Label as many projects do: search every rule for every leaf."""
    tree, rules = given
    compiled = [
        (re.compile(pattern.replace("**/", ".*").replace("**", ".*")), label)
        for pattern, label in rules
    ]

    def label(path: Any, leaf: Any) -> str:
        del leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return next(value for regex, value in compiled if regex.search(name))

    return jax.tree_util.tree_map_with_path(label, tree)


def _floor(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, leaves)


def _cold(size: int) -> Race:
    return Race(
        topic=TOPIC,
        work="cold param_labels, 50 rules",
        size=size,
        contenders={
            "treeadapt": Contender(run=_ours, fresh=lambda: _new(size, 50)),
            "regex loop": Contender(run=_regex_loop, fresh=lambda: _new(size, 50)),
            "flatten + unflatten": Contender(
                run=lambda given: _floor(given[0]), fresh=lambda: _new(size, 50)
            ),
        },
        baseline="treeadapt",
        targets={"regex loop": Target(at_least=8)} if size == 10_000 else {},
    )


def _cold_many_rules(size: int) -> Race:
    return Race(
        topic=TOPIC,
        work="cold param_labels, 500 rules vs 50",
        size=size,
        contenders={
            "500 rules": Contender(run=_ours, fresh=lambda: _new(size, 500)),
            "50 rules": Contender(run=_ours, fresh=lambda: _new(size, 50)),
        },
        baseline="50 rules",
        targets={"500 rules": Target(at_most=1.3)} if size == 10_000 else {},
    )


def _warm(size: int) -> Race:
    tree, pairs = _new(size, 50)
    rules = ta.Rules(pairs, unused="ignore")

    return Race(
        topic=TOPIC,
        work="warm param_labels",
        size=size,
        contenders={
            "treeadapt": lambda: ta.param_labels(tree, rules),
            "flatten + unflatten": lambda: _floor(tree),
        },
        baseline="flatten + unflatten",
        targets={"treeadapt": Target(at_most=2)} if size >= 10_000 else {},
    )
