"""The state of a ``torch.optim`` by names of parameters, which its file has by numbers.

PyTorch numbers parameters in the order of ``param_groups``, which is that of
``state_dict`` only if there is one group. So names come from the caller, or from the
file, and are never guessed: layers of one shape would exchange their moments.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from treeadapt.checkpoints import torch_file
from treeadapt.checkpoints.errors import refuse
from treeadapt.checkpoints.opening import opened
from treeadapt.checkpoints.reading import read_ahead, read_arrays
from treeadapt.checkpoints.remote import AnyPath
from treeadapt.checkpoints.shard_index import ending_of_shards
from treeadapt.checkpoints.torch_pickle import Tensor
from treeadapt.text.names import listing, plural

_STATE, _GROUPS, _NAMES = "state", "param_groups", "param_names"
_NAMED = (
    "Pass names=, in the order of its groups. PyTorch lists them: "
    "names = {p: n for n, p in model.named_parameters()}; "
    '[names[p] for group in optimizer.param_groups for p in group["params"]].'
)


def load_torch_state(
    path: str | os.PathLike[str],
    *,
    names: Iterable[str] | None = None,
    at: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the state of an optimizer that PyTorch saved, by names of parameters.

    PyTorch numbers the parameters of all groups one after the other. Their names are
    ``names``; or those in the file, where the optimizer was made of
    ``named_parameters()`` (PyTorch 2.6 and later); or those of the state dict next to
    the optimizer, if it has one group, no tied leaves, and as many leaves as the
    optimizer has parameters. Where none of these says it, there is an error.

    Args:
        path: a file of PyTorch with the ``state_dict()`` of an optimizer, alone or in
            tables with others.
        names: of the parameters of all groups, in the order of the groups.
        at: where it is in the file, such as ``"optimizer"``; None for the only one.

    Returns:
        For each field, such as ``"exp_avg"``, ``"momentum_buffer"`` and ``"step"``, its
        arrays of NumPy by name of the parameter. A parameter that never got a gradient
        has none.

    Raises:
        CheckpointError: the file cannot be read, has no such state or several, or does
            not say which name each number is; or ``names`` does not fit it.

    Example:
        >>> load_torch_state("no.pt")
        Traceback (most recent call last):
        treeadapt.errors.CheckpointError: There is no checkpoint 'no.pt'.
    """
    with opened(path, decode=False) as stored:
        file = stored.path
        if stored.format != "torch" or ending_of_shards(file):
            refuse(file, "it is not one file of PyTorch, so it has no torch.optim")
        tree = torch_file.tree_of(file)
        prefix, optimizer, neighbours = _optimizer(file, tree, at)
        numbers = [n for group in optimizer[_GROUPS] for n in group["params"]]
        named = _names(file, optimizer, numbers, neighbours, names)
        paths = {
            _joined(prefix, _STATE, number, field): (str(field), name)
            for number, name in zip(numbers, named, strict=True)
            for field in optimizer[_STATE].get(number, {})
        }
        wanted = dict.fromkeys(path for path in paths if path in stored.table)
        fields: dict[str, dict[str, Any]] = {}
        for path_, array in read_ahead(stored, read_arrays(stored, wanted)):
            field, name = paths[path_]
            fields.setdefault(field, {})[name] = np.asarray(array)
    return fields


def _joined(*keys: Any) -> str:
    return "/".join(str(key) for key in keys if key != "")


def _is_optimizer(node: Any) -> bool:
    """Return whether a table has what ``Optimizer.state_dict`` gives."""
    if not isinstance(node, dict) or not isinstance(node.get(_STATE), dict):
        return False
    groups = node.get(_GROUPS)
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(each, int | str) for each in group["params"])
        for group in groups
    )


def _optimizer(
    file: AnyPath, tree: Any, at: str | None
) -> tuple[str, dict[str, Any], Mapping[Any, Any]]:
    """Return where the optimizer's state is, itself, and the table that it is in."""
    states = {}
    pending: list[tuple[str, Any, Any]] = [("", tree, {})]
    while pending:
        prefix, node, above = pending.pop()
        if _is_optimizer(node):
            states[prefix] = node, above
        elif isinstance(node, dict | list | tuple):
            pairs = node.items() if isinstance(node, dict) else enumerate(node)
            pending += [(_joined(prefix, key), value, node) for key, value in pairs]
    if at is not None and at not in states:
        places = f"; it has some at {listing(sorted(states))}" if states else ""
        refuse(file, f"it has no state of a torch.optim at {at!r:.80}{places}")
    if at is None and len(states) != 1:
        cure = f"Name one: at={sorted(states)[0]!r:.80}." if states else ""
        seen = f"several, at {listing(sorted(states))}" if states else "none"
        refuse(file, f"of states of a torch.optim it has {seen}", cure)
    prefix = next(iter(states)) if at is None else at
    state, above = states[prefix]
    return prefix, state, above if isinstance(above, dict) else {}


def _names(
    file: AnyPath,
    optimizer: Mapping[str, Any],
    numbers: Sequence[Any],
    neighbours: Mapping[Any, Any],
    given: Iterable[str] | None,
) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of its groups."""
    if len({*numbers}) != len(numbers):
        refuse(file, "a parameter is in two groups of its optimizer")
    if given is not None:
        return _checked(file, [*given], numbers, "names= has")
    if numbers and all(isinstance(number, str) for number in numbers):
        return [*numbers]  # as FSDP writes it
    groups = optimizer[_GROUPS]
    if any(_NAMES in group for group in groups):
        listed = [name for group in groups for name in group.get(_NAMES) or ()]
        return _checked(file, listed, numbers, "its param_names has")
    if len(groups) != 1:
        seen = f"{plural(len(groups), 'group')} of numbered parameters"
        refuse(file, f"its optimizer has {seen} and no names of them", _NAMED)
    models = [
        node
        for node in neighbours.values()
        if isinstance(node, dict)
        and node
        and all(isinstance(leaf, Tensor) for leaf in node.values())
    ]
    if len(models) != 1:
        seen = f"{plural(len(models), 'state dict')} next to it"
        refuse(file, f"its optimizer has no names, and there are {seen}", _NAMED)
    (model,) = models
    if len({*model.values()}) != len(model):
        refuse(file, "its optimizer has no names, and its state dict has ties", _NAMED)
    if len(model) != len(numbers):
        seen = f"{len(numbers):,} parameters and no names, and its state dict has"
        refuse(file, f"its optimizer has {seen} {len(model):,} leaves", _NAMED)
    for (name, leaf), number in zip(model.items(), numbers, strict=True):
        for field, value in optimizer[_STATE].get(number, {}).items():
            is_moment = isinstance(value, Tensor) and value.shape
            if is_moment and value.shape != leaf.shape:
                seen = f"{field!r:.60} of number {number} has not the shape of {name!r}"
                refuse(file, f"its optimizer has no names, and {seen:.200}", _NAMED)
    return [*model]


def _checked(
    file: AnyPath, names: Sequence[Any], numbers: Sequence[Any], what: str
) -> list[str]:
    """Return names, once there is one for each parameter."""
    if len(names) != len(numbers):
        seen = f"{what} {plural(len(names), 'name')}"
        refuse(file, f"{seen} for {plural(len(numbers), 'parameter')}", _NAMED)
    if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        refuse(file, f"{what} a name twice, or something that is not a text", _NAMED)
    return [*names]
