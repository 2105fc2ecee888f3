"""Moments: which leaves of a source are those of an optimizer's state.

A table may move a whole run: params, averages and moments by the same rows, which hold
for all of them as long as numbers only change places. What changes numbers holds for
params alone. A model may use the names of Optax's fields itself, so a name decides
nothing: a copy of the params is below it, and a step count next to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from treeadapt.layers.region import read_key
from treeadapt.migrations.groups import Group
from treeadapt.names import listing
from treeadapt.optax_fields import COPY_FIELDS
from treeadapt.paths import SEPARATOR

_COUNT = "count"


def changed_moments(
    groups: Iterable[Group], source: Mapping[str, Any]
) -> Iterator[tuple[Group, str]]:
    """Yield groups that would change the numbers of moments, and what is wrong.

    Args:
        groups: of a plan.
        source: shapes and dtypes by path.
    """
    changing = [group for group in groups if group.row.values.changes]
    are_states: dict[str, bool] = {}
    for group in changing:
        for path in group.source_paths:
            nodes = (at for at in _fields_above(path) if at[1] in COPY_FIELDS)
            node, name = next(nodes, ("", ""))
            if name and node not in are_states:
                are_states[node] = _holds_copies(node, source)
            if name and are_states[node]:
                text = (
                    f"{listing([path])} is {name!r} of an optimizer's state, whose "
                    "numbers change in another way than those of params: move the "
                    "params alone, and then carry_state(..., migration=) the state"
                )
                yield group, text
                break


def _fields_above(path: str) -> Iterator[tuple[str, str]]:
    """Yield each node above a path, with the next segment of the path.

    Example:
        >>> list(_fields_above("0/mu/w"))
        [('', '0'), ('0', 'mu')]
    """
    segments = path.split(SEPARATOR)
    for place in range(len(segments) - 1):
        yield SEPARATOR.join(segments[:place]), segments[place]


def _holds_copies(node: str, source: Mapping[str, Any]) -> bool:
    """Return whether a node is a state of Optax that holds copies of the params.

    Args:
        node: its path.
        source: shapes and dtypes by path.
    """
    start = f"{node}{SEPARATOR}" if node else ""
    if np.shape(source.get(f"{start}{_COUNT}", (0,))) != ():
        return False
    fields: dict[str, set[str]] = {}
    for path in source:
        if path.startswith(start):
            name, _, tail = path[len(start) :].partition(SEPARATOR)
            if tail and name in COPY_FIELDS:
                fields.setdefault(name, set()).add(read_key(tail).path)
    every = [*fields.values()]
    if any(one & other for one, other in itertools.combinations(every, 2)):
        return True  # as the two moments of Adam
    tails = sorted(set().union(*every))
    for path in source if start and tails else ():
        if not path.startswith(start) and f"{SEPARATOR}{path}".endswith(
            f"{SEPARATOR}{tails[0]}"
        ):
            above = path.removesuffix(tails[0])
            if all(f"{above}{tail}" in source for tail in tails):
                return True
    return False
