"""Label paths: stable string names for leaves.

Turns one key of a container into the text of one path segment, and segments into a
path such as ``encoder/layers/0/kernel``. Keys that Python holds equal (``1``, ``True``,
``1.0``) get one text; text that depends on a hash seed or an object's address is
refused. Nothing is escaped: a key that holds ``/`` reads as several segments.
Knows nothing about containers (see ``adapters/registry``) or patterns.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax.tree_util as jtu
import numpy as np

from treeadapt.errors import PathCollisionError, PathError
from treeadapt.text.names import listing

SEPARATOR = "/"
_BOX = "/value"

_LARGEST = 10**4_000  # Python refuses to write longer numbers


def segment(key: Any) -> str:
    """Write one key of a container as the text of a path segment.

    Args:
        key: a string, a number, a tuple of those, or a JAX key entry
            (``DictKey``, ``GetAttrKey``, ``SequenceKey``, ``FlattenedIndexKey``).

    Returns:
        The text; equal keys give equal texts, whatever their type.

    Raises:
        PathError: the key is of a type that has no stable text.

    Example:
        >>> [segment(key) for key in ("kernel", 3, True, 1.0, 0.5, ("a", 1))]
        ['kernel', '3', '1', '1', '0.5', '(a,1)']
    """
    if type(key) is str:
        return key
    if isinstance(key, str):  # a StrEnum member or numpy.str_ reads as its value
        return str.__str__(key)
    if isinstance(key, tuple):
        return f"({','.join(segment(part) for part in key)})"
    if isinstance(key, jtu.GetAttrKey):
        return key.name
    if isinstance(key, jtu.SequenceKey):
        return str(key.idx)
    if isinstance(key, jtu.DictKey | jtu.FlattenedIndexKey):
        return segment(key.key)
    return _number(key)


def join(segments: Iterable[str]) -> str:
    """Join segments to a label path.

    Example:
        >>> join(["policy", "hidden_0", "kernel"])
        'policy/hidden_0/kernel'
    """
    return SEPARATOR.join(segments)


def unboxed(
    paths: Collection[str], model_paths: Collection[str] = ()
) -> dict[str, str]:
    """Return stored paths as the model has them, without the ``value`` of boxes.

    Orbax and Flax write a box (an ``nnx.Variable``, ``nn.Partitioned``) as a node with
    one child, ``value``; label paths have no segment for it.

    Args:
        paths: what is stored.
        model_paths: the paths of the model; empty if they are not known. Where it
            really has a leaf called ``value``, as Brax does, the path stays.

    Returns:
        ``{stored path: path}``. The ending is cut off where ``model_paths`` has the
        path without it and not the one with it; and everywhere if every path ends so
        and ``model_paths`` has none of them.

    Example:
        >>> unboxed(["a/value", "value/b"], model_paths=["a", "value/b"])
        {'a/value': 'a', 'value/b': 'value/b'}
        >>> unboxed(["a/value", "b/value"])
        {'a/value': 'a', 'b/value': 'b'}
    """
    paths, model_paths = dict.fromkeys(paths), frozenset(model_paths)
    short = {path: path.removesuffix(_BOX) for path in paths if path.endswith(_BOX)}
    if "value" in paths and "" in model_paths:
        short["value"] = ""
    everywhere = len(short) == len(paths) and not any(
        path in model_paths for path in paths
    )
    return {
        path: short[path]
        if path in short
        and path not in model_paths
        and short[path] not in paths
        and (everywhere or short[path] in model_paths)
        else path
        for path in paths
    }


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts that hold the leaves, one level a segment of their paths.

    Raises:
        PathCollisionError: one leaf is above another.

    Example:
        >>> nested({"a/b": 1, "a/c": 2})
        {'a': {'b': 1, 'c': 2}}
    """
    top: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = top
        paths = itertools.accumulate(parents, "{}/{}".format)
        for above, segment in zip(paths, parents, strict=True):
            if above in leaves:
                raise PathCollisionError(
                    f"Nested dicts cannot hold {listing([above])} next to "
                    f"{listing([path])}. Pass a target or choose leaves with where=; "
                    "treeadapt.read_metadata lists the paths."
                )
            node = node.setdefault(segment, {})
        node[last] = leaf
    return top


def as_tree(leaves: Mapping[str, Any]) -> Any:
    """Return nested dicts, whose siblings patterns can count, or the flat dict.

    Example:
        >>> as_tree({"a/b": 1}), as_tree({"a": 1, "a/b": 2})
        ({'a': {'b': 1}}, {'a': 1, 'a/b': 2})
    """
    try:
        return nested(leaves)
    except PathCollisionError:
        return dict(leaves)


def _number(key: Any) -> str:
    # Every number that compares equal to a Python number also hashes like it, so it is
    # the same dictionary key and must have the same text.
    value = _python_number(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or (isinstance(value, int) and abs(value) > _LARGEST):
        raise PathError(
            f"A key of type {type(key).__name__} has no stable text: "
            f"{_short_repr(key)}. Use string, number or tuple keys, or register an "
            "adapter for the container that names its children: "
            "treeadapt.register(...)."
        )
    return repr(value)


def _python_number(key: Any) -> int | float | None:
    """Return the ``int`` or ``float`` equal to ``key``, if there is just one."""
    if isinstance(key, bool | np.bool_):
        return int(key)
    with contextlib.suppress(TypeError):
        return operator.index(key)
    if isinstance(key, complex) and key.imag == 0:
        return float(key.real)
    if isinstance(key, complex | np.inexact) and not isinstance(key, float):
        return None  # NumPy holds np.float32(0.1) equal to 0.1 and to its neighbours
    if not isinstance(key, numbers.Number):
        return None
    number: Any = key
    if number != number:
        return math.nan
    with contextlib.suppress(OverflowError):
        if float(number) == number:
            return float(number)
    return None


def _short_repr(key: Any) -> str:
    if isinstance(key, int) and abs(key) > _LARGEST:
        return "a number of thousands of digits"
    text = repr(key)
    return text if len(text) <= 80 else text[:77] + "..."
