"""Moments: which leaves of a source are those of an optimizer's state.

A table may move a whole run: params, averages and moments by the same rows, which hold
for all of them as long as numbers only change places. What changes numbers holds for
params alone. A model may use the names of Optax's fields itself, so a name decides
nothing: a copy of the params is below it, and a step count next to it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from treeadapt.layers.region import read_key
from treeadapt.migrations.group import Group
from treeadapt.text.names import listing
from treeadapt.transforms.optax_fields import COPY_FIELDS
from treeadapt.transforms.state_map import cuts_of, last, parent
from treeadapt.trees.paths import SEPARATOR

_COUNT = "count"


def changed_moments(
    groups: Iterable[Group], source: Mapping[str, Any]
) -> Iterator[tuple[Group, str]]:
    """Yield groups that would change the numbers of moments, and what is wrong.

    Args:
        groups: of a plan.
        source: shapes and dtypes by path.
    """
    is_state = functools.cache(functools.partial(_holds_copies, source=source))
    for group in groups:
        for path in group.source_paths if group.row.values.changes else ():
            prefixes = [prefix for prefix, _ in cuts_of(path)]
            copies = [prefix for prefix in prefixes if last(prefix) in COPY_FIELDS]
            if copies and is_state(parent(copies[0])):
                field = last(copies[0])
                text = (
                    f"{listing([path])} is {field!r} of an optimizer's state, whose "
                    "numbers change in another way than those of params: move "
                    "the params alone, and then carry_state(..., migration=) the state"
                )
                yield group, text
                break


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
