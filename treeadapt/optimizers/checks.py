"""Checks: what only a tree can show of an optimizer from a file.

Takes what a file says, and an abstract tree; gives findings, and how many bytes of the
state belong to each label. Reads shapes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.optimizers.building import Fault, Selection
from treeadapt.optimizers.load import OptimizerFile
from treeadapt.selection.rules import Rules
from treeadapt.text.data_files import one_line
from treeadapt.text.names import listing, plural
from treeadapt.transforms.partition import FROZEN
from treeadapt.transforms.state_map import init_of_arrays, map_state, view_init
from treeadapt.trees.arrays import is_array
from treeadapt.trees.views import view_tree

# These take a batch of gradients, which no tree can show.
_OF_BATCHES = ("dpsgd", "differentially_private_aggregate")


def tree_findings(file: OptimizerFile, tree: Any) -> Iterator[Fault]:
    """Yield what is wrong with the optimizer of a file for one tree, and where.

    Args:
        file: what the file says.
        tree: abstract, or concrete; no value is read.
    """
    labels = labels_by_array(file.rules, tree)
    for selection in file.selections:
        yield from _unreached(selection, tree, labels)
    if file.tx is not None:
        yield from _failures(file, tree)


def labels_by_array(rules: Rules | None, tree: Any) -> dict[str, set[Any]]:
    """Return the labels of each array that trains, several where layers differ."""
    every = _layers_by_array(rules, tree).items()
    return {path: {label for label, _ in parts.values()} for path, parts in every}


def _layers_by_array(
    rules: Rules | None, tree: Any
) -> dict[str, dict[str, tuple[Any, int]]]:
    """Return, for each array that trains, its layers: key, label and how many."""
    view = view_tree(tree)
    if rules is None:
        return {p: {p: ("", 1)} for p, leaf in view.items() if is_array(leaf)}
    decision = rules.match(view)
    layers_of: dict[str, dict[str, tuple[Any, int]]] = {}
    for layers in decision.divided():
        label, region = decision.values[layers.rows[0]], layers.region
        if decision.is_array[layers.rows[0]] and label != FROZEN:
            part = {region.key: (label, len(layers.rows))}
            layers_of.setdefault(region.path, {}).update(part)
    return layers_of


def _unreached(
    selection: Selection, tree: Any, labels: Mapping[str, set[Any]]
) -> Iterator[Fault]:
    """Yield patterns that reach no array of their group, and axes that are missing."""
    where, label = selection.where, selection.label
    group = {path for path, every in labels.items() if not label or label in every}
    verb = f"{label} trains" if label else "train"
    whose = f"{plural(len(group), 'array')} that {verb}"
    patterns = selection.patterns
    if not isinstance(where, Rules):  # each pattern of a mask by itself, then all
        each = [(pattern.removeprefix("!"), True) for pattern in patterns]
        where, patterns = Rules([*each, (where, True)], default=False), (*patterns, "")
    decision = where.match(tree)
    array_of = {
        row: (layers.region.path, decision.stored.leaves[layers.leaf])
        for layers in decision.divided()
        for row in layers.rows
    }
    for number, pattern in enumerate(patterns):
        reached = {array_of[row][0] for row in decision.selected(number)}
        who = f"{listing([pattern])} reaches" if pattern else "it reaches"
        if pattern.startswith("!") and not reached:
            yield Fault(selection.place, f"{who} no array")
        elif not pattern.startswith("!") and not reached & group:
            yield Fault(selection.place, f"{who} none of the {whose}")
    lacking = {}
    for row, (path, array) in array_of.items():
        axes = decision.values[row] if path in group else None
        every = np.hstack(axes).tolist() if isinstance(axes, tuple) else ()
        if any(not -array.ndim <= axis < array.ndim for axis in every):
            shape = f"{path!r} has {plural(array.ndim, 'axis')}"
            lacking[path] = f"{shape}, which lack one of {axes}"
    for text in lacking.values():
        yield Fault(selection.place, text)


def _failures(file: OptimizerFile, tree: Any) -> Iterator[Fault]:
    """Yield what one step on shapes raises."""
    tx: Any = file.tx
    init, arrays = init_of_arrays(tx, tree)

    # It returns nothing: functions among the params come back as they are, and
    # ``eval_shape`` returns arrays only.
    def step(arrays: dict[str, Any]) -> None:
        state, params = init(arrays), view_tree(tree).replace(arrays)
        loss, grads = jnp.float32(0), params
        extra = {"value": loss, "loss": loss, "grad": grads, "value_fn": lambda _: loss}
        extra |= {"obj_fn": lambda _: loss, "grad_fn": lambda params, _: params}
        takes_batches = any(name in str(file.tables) for name in _OF_BATCHES)
        if not takes_batches:
            tx.update(grads, state, params, **extra)

    try:
        jax.eval_shape(step, arrays)
    except Exception as error:  # noqa: BLE001 - of Optax, or of a mask: a finding
        yield Fault(("optimizer",), f"one step on shapes fails: {one_line(error)}")


def state_bytes(file: OptimizerFile, tree: Any) -> dict[Any, int]:
    """Return how many bytes of the state belong to the params with each label.

    What belongs to no param, such as step counts, is under "".

    Args:
        file: what the file says; its optimizer is complete.
        tree: abstract, or concrete; no value is read.
    """
    layers_of = _layers_by_array(file.rules, tree)
    state = view_init(file.tx, tree)
    sizes: dict[Any, int] = {}
    slots = map_state(file.tx, state, tree).slots
    for slot, leaf in zip(slots, state.leaves, strict=True):
        size = leaf.size * leaf.dtype.itemsize
        parts = layers_of.get(slot.region.path, {}) if slot.region else {}
        if slot.region and slot.region.key in parts:
            parts = {slot.region.key: parts[slot.region.key]}
        for label, share in _shares(size, parts.values()):
            sizes[label] = sizes.get(label, 0) + share
    return sizes


def _shares(size: int, parts: Collection[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
    """Yield each label with its share of some bytes, in proportion to its layers.

    A state around all labels holds an array whole, with the layers of several.
    """
    total, end = sum(num_layers for _, num_layers in parts), 0
    for label, num_layers in parts:
        start, end = end, end + num_layers
        yield label, size * end // total - size * start // total
    if not parts:
        yield "", size
