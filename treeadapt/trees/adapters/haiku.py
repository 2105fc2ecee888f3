"""Haiku: the immutable ``FlatMapping`` that older versions return for parameters.

Haiku registers it with JAX as one wide node of all its leaves; here it is taken apart
level by level, in the same leaf order, so that its paths are those of a plain dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from haiku.data_structures import to_immutable_dict

from treeadapt.trees.adapters.adapter import Adapter, Flat

_FlatMapping = type(to_immutable_dict({}))


def _flat_mapping(node: Any) -> Flat:
    keys = sorted(node)
    return Flat(keys, [node[key] for key in keys], tuple(keys))


def _flat_mapping_again(aux: tuple[str, ...], children: Sequence[Any]) -> Any:
    return to_immutable_dict(dict(zip(aux, children, strict=True)))


ADAPTERS = (
    Adapter(
        name="haiku FlatMapping",
        applies=_FlatMapping,
        flatten=_flat_mapping,
        unflatten=_flat_mapping_again,
        # JAX knows it as one level, this as many (Haiku 0.0.17).
        by_hand=lambda cls: True,
    ),
)
