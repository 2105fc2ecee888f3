"""A small table of what the library costs on this machine.

Times a tree next to JAX's own flattening, and next to Flax, optree and dm-tree where
they are installed and take it: the user's tree, or one of a few layers and one of many.
A first look only: no accelerator is used, and nothing is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import click
import jax
import numpy as np
import optax

from treeadapt.cli import printing, sources
from treeadapt.reports.summary import summarize
from treeadapt.selection.rules import Rules, load_rules, param_labels
from treeadapt.selection.splitting import merge, split
from treeadapt.transforms.partition import FROZEN, partition
from treeadapt.trees.state_dict import to_flat_dict, to_state_dict

_SIZES = (100, 1_000, 10_000)
_REPEATS = 7  # fewer if they take long
_LONG_S = 2.0
_RULES = Rules({"**/bias": "no_decay", "layers/{0..4}": "frozen", "**": "train"})


def measure(
    tree: str | None, rules: str | None, *, allow_regex: bool, decode: bool
) -> None:
    """Print what a tree costs; see the options of ``bench``.

    Raises:
        click.UsageError: there are rules and no tree, or they are in another order.
        TreeAdaptError: a file cannot be read.
    """
    if rules is not None and tree is None:
        raise click.UsageError("--rules needs a TREE.")
    if rules is not None:
        sources.require_order(tree or "", rules)
    table = load_rules(rules, allow_regex=allow_regex) if rules else None
    measured = None if tree is None else sources.read_tree(tree, decode=decode)
    printing.print_table(("call", "leaves", "ms", "ratio"), bench_rows(measured, table))


def bench_rows(
    tree: Any = None, rules: Rules | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield call, number of leaves, milliseconds, and times ``jax.tree.flatten``.

    Args:
        tree: of arrays, or abstract; None for made-up trees of three sizes.
        rules: labels for the tree; None for one label, ``"train"``.
    """
    for measured in map(_made_up, _SIZES) if tree is None else [tree]:
        num_leaves = len(jax.tree.leaves(measured))
        table = rules or (_RULES if tree is None else Rules({"**": "train"}))
        first_ms = None
        cases = _cases(measured, table)
        if tree is not None:
            cases |= _traces(measured, table)
        for name, run in cases.items():
            elapsed_ms = 1e3 * _shortest_s(run)
            first_ms = first_ms or elapsed_ms
            ratio = f"{elapsed_ms / first_ms:.1f}"
            yield name, f"{num_leaves:,}", f"{elapsed_ms:.3f}", ratio


def _shortest_s(run: Callable[[], Any]) -> float:
    times = [timeit.timeit(run, number=1)]
    while len(times) < _REPEATS and sum(times) < _LONG_S:
        times.append(timeit.timeit(run, number=1))
    return min(times)


def _made_up(num_leaves: int) -> Any:
    return {
        "layers": [
            {"bias": np.zeros(()), "kernel": np.zeros(())}
            for _ in range(num_leaves // 2)
        ]
    }


def _cases(tree: Any, rules: Rules) -> dict[str, Callable[[], Any]]:
    params, rest = split(tree)
    return {
        "jax.tree.flatten": lambda: jax.tree.flatten(tree),
        **_others(tree),
        "to_flat_dict": lambda: to_flat_dict(tree),
        "to_state_dict": lambda: to_state_dict(tree),
        "split": lambda: split(tree),
        "merge": lambda: merge(params, rest),
        "param_labels": lambda: param_labels(tree, rules),
    }


def _traces(tree: Any, rules: Rules) -> dict[str, Callable[[], Any]]:
    """Return one step of Adam, traced: alone, and for each label of the rules."""
    params, _ = split(tree)
    labels = {row.label for row in summarize(params, rules).rows}
    adam = optax.adam(1e-3)

    def traced(tx: optax.GradientTransformation) -> Any:
        return jax.eval_shape(lambda x: tx.update(x, tx.init(x), x), params)

    cases: dict[str, Callable[[], Any]] = {"trace of optax.adam": lambda: traced(adam)}
    if all(isinstance(label, str) for label in labels):
        tx = partition(dict.fromkeys(labels - {FROZEN}, adam), rules)
        cases["trace of partition"] = lambda: traced(tx)
    return cases


def _others(tree: Any) -> dict[str, Callable[[], Any]]:
    """Return what other libraries take, those that are installed and see all leaves."""
    functions: dict[str, Callable[[Any], Any]] = {}
    with contextlib.suppress(ImportError):
        from flax.traverse_util import flatten_dict

        functions["flax.traverse_util.flatten_dict"] = flatten_dict
    with contextlib.suppress(ImportError):
        import optree

        functions["optree.tree_leaves"] = optree.tree_leaves
    with contextlib.suppress(ImportError):
        import tree as dm_tree

        functions["dm-tree.flatten"] = dm_tree.flatten
    cases: dict[str, Callable[[], Any]] = {}
    num_leaves = len(jax.tree.leaves(tree))
    for name, function in functions.items():
        with contextlib.suppress(Exception):  # a kind of tree that it does not know
            if len(function(tree)) == num_leaves:
                cases[name] = functools.partial(function, tree)
    return cases
