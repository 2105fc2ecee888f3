"""What a caller passed: checks of it, and texts about what is something else.

Takes any objects; raises, or says in words what they are and what to pass instead. See
``selectors`` and ``rules`` for what is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from treeadapt.errors import RulesError, SelectorError, TreeAdaptError
from treeadapt.text.names import listing, shorten
from treeadapt.trees import paths
from treeadapt.trees.arrays import is_array, same_value
from treeadapt.trees.describing import describe
from treeadapt.trees.views import view_tree


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``.

    Raises:
        SelectorError: it names the choices.
    """
    if value not in choices:
        raise SelectorError(
            f"{name}= is {' or '.join(map(repr, choices))}, got {value!r}."
        )


def check_counts(expect: Any, labels: Sequence[Any]) -> None:
    """Raise unless ``expect`` has a number for labels that the rules give."""
    if not isinstance(expect, Mapping):
        raise RulesError(
            "expect= is a mapping from labels to numbers of arrays, such as "
            f'{{"lora": 24}}; got {shorten(repr(expect))}.'
        )
    for label, count in expect.items():
        if not any(same_value(label, each) for each in labels):
            known = listing(map(repr, labels), write=str)
            raise RulesError(
                f"expect= names the label {shorten(repr(label))}, which no rule gives; "
                f"labels are {known}."
            )
        if type(count) is not int or count < 0:
            raise RulesError(
                f"expect= has {shorten(repr(count))} for {shorten(repr(label))}. Write "
                "a number of arrays, such as 24."
            )


def turned_table(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """Return rules with patterns for labels and labels for patterns, if all are texts.

    Example:
        >>> turned_table([("frozen", ["encoder", "wte"]), ("train", "**")])
        {'encoder': 'frozen', 'wte': 'frozen', '**': 'train'}
        >>> turned_table([("encoder", 0.1)])
        {}
    """
    table: dict[str, Any] = {}
    may_be_axes = False
    for key, value in pairs:
        is_list = isinstance(value, list | tuple | PartitionSpec)
        texts = list(value) if is_list else [value]
        if not isinstance(key, str) or not all(isinstance(x, str) for x in texts):
            return {}
        may_be_axes |= isinstance(value, PartitionSpec)  # as a file's lists are read
        table |= dict.fromkeys(texts, key)
    is_sure = "frozen" in table.values() or not all(map(str.isidentifier, table))
    return table if is_sure or not may_be_axes else {}


def turned_text(table: Mapping[str, Any]) -> str:
    """Say that rules are the other way round, and write them as they are meant."""
    rows = listing((f"{k!r}: {v!r}" for k, v in table.items()), limit=4, write=str)
    return f"These rules are the wrong way round. The pattern comes first: {{{rows}}}."


def argument_text(value: Any) -> str:
    """Write an argument; an array, and a tree of anything, by its type alone."""
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    parts = value if is_list else [value]
    if jtu.all_leaves(parts) and not any(map(is_array, parts)):
        return shorten(repr(value))
    return describe(value)


def instead_text(spec: Any) -> str:
    """Say how to make a selector of what Optax, Equinox or nnx would take."""
    is_mapping = isinstance(spec, Mapping)
    labels: Any = (*spec.values(),) if is_mapping else getattr(spec, "values", None)
    is_table = isinstance(labels, tuple) and len(labels) > 0  # of Rules, or for them
    if is_table and all(isinstance(label, str) for label in labels):
        label = "frozen" if "frozen" in labels else labels[0]
        rules = "treeadapt.Rules(rules)" if is_mapping else "rules"
        return f". Of rules take the leaves of one label: {rules}.where({label!r})"
    if isinstance(spec, Mapping) or _is_mask(spec):
        return (
            ". Of a tree of bools take the paths: [treeadapt.escape(path) for path, "
            "yes in treeadapt.to_flat_dict(mask).items() if yes]"
        )
    if callable(spec) and not hasattr(spec, "where"):
        return (
            ". A function that is asked about each leaf's shape and dtype is made a "
            "selector by treeadapt.leaf(function); one of the whole tree gives bools, "
            "whose paths are one: [treeadapt.escape(path) for path, yes in "
            "treeadapt.to_flat_dict(function(tree)).items() if yes]"
        )
    return ""


def _is_mask(spec: Any) -> bool:
    """Return whether a tree of any classes has bools in the place of arrays."""
    try:
        view = view_tree(spec)
    except TreeAdaptError:
        return False
    is_node = view.plan.paths != ("",) and len(view.leaves) > 0
    return is_node and all(isinstance(leaf, bool | np.bool) for leaf in view.leaves)


def keys_text(keys: Iterable[Any]) -> str:
    """Write the keys of one path, as JAX and Flax give them, as a text."""
    return paths.join(map(paths.segment, keys))


_ANY_WIDTH = {
    bool: np.bool_,
    int: np.integer,
    float: np.floating,
    complex: np.complexfloating,
}


def checked_dtype(dtype: Any) -> Any:
    """Return a dtype, or a family of dtypes, that a leaf may have.

    Raises:
        SelectorError: it is something else.
    """
    if isinstance(dtype, type) and dtype in _ANY_WIDTH:
        return _ANY_WIDTH[dtype]
    try:
        # Only a family of dtypes, such as ``np.floating``, has subclasses.
        is_abstract = isinstance(dtype, type) and issubclass(dtype, np.generic)
        if is_abstract and dtype.__subclasses__():
            return dtype
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            return dtype
        return jnp.dtype(dtype)
    except (TypeError, ValueError) as error:
        what = f"leaf(dtype=): {dtype!r} is not a dtype: {error}."
        raise SelectorError(what) from error


def dtype_text(dtype: Any) -> str:
    """Write what ``checked_dtype`` returns."""
    return dtype.__name__ if isinstance(dtype, type) else repr(str(dtype))
