"""The tree comes first, and what chooses its leaves comes after it.

Takes the two arguments that most functions have, takes the tree apart, and raises if
they were passed in the other order, or a file's name in the place of the tree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from treeadapt.errors import SelectorError, TreeAdaptError
from treeadapt.selection.whole_tree import Question
from treeadapt.text.names import shorten
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe_argument
from treeadapt.trees.views import TreeView, view_tree


def view_whole(tree: Any) -> TreeView:
    """Take a tree apart of which leaves are chosen.

    Raises:
        SelectorError: it is a text, such as the name of a file.
    """
    if isinstance(tree, str | bytes | os.PathLike):
        raise SelectorError(
            f"Expected a tree, such as a model; got the text {shorten(repr(tree))}. A "
            "file is read by treeadapt.load(path). What chooses leaves comes after the "
            "tree."
        )
    return view_tree(tree)


def view_first(tree: Any, chooser: Any, call: str) -> TreeView:
    """Take a tree apart that comes before what chooses its leaves.

    Args:
        tree: the tree.
        chooser: rules, a selector, or whatever one of them is made of; or None.
        call: how the function is called, such as ``split(tree, where)``.

    Raises:
        SelectorError: the two are in the other order, or the tree is a text. Labels,
            texts and empty trees in the place of the tree are taken as they are unless
            there are arrays in the place of ``chooser``.
    """
    if _is_tree(chooser) and _chooses(tree):
        raise SelectorError(
            f"The tree comes first, {call}; got {_written(tree)} for it, and "
            f"{describe_argument(chooser)} with arrays after it. Swap the two."
        )
    return view_whole(tree)


def _chooses(value: Any) -> bool:
    """Return whether a value may choose leaves, by patterns, classes or rules."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_text, value.values()))
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return bool(value) and all(map(_is_text, value))
    return isinstance(value, str | type | Question)


def _is_text(value: Any, depth: int = 3) -> bool:
    """Return whether it is a text, a spec as rules take it, or a pair of these.

    A tree may be lists in lists to any depth; pairs hold lists of names, and no more.
    """
    if isinstance(value, tuple | list) and not isinstance(value, PartitionSpec):
        is_short = depth > 0 and bool(value)
        return is_short and all(x is None or _is_text(x, depth - 1) for x in value)
    return isinstance(value, str | PartitionSpec)


def _is_tree(value: Any) -> bool:
    """Return whether a value holds arrays, and cannot be rules that give some."""
    if value is None or isinstance(value, str | type | Question):
        return False
    if isinstance(value, Mapping) and any("*" in str(key) for key in value):
        return False  # patterns, as of factors that are arrays
    try:
        return any(map(is_array, view_tree(value).leaves))
    except TreeAdaptError:
        return False


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {shorten(repr(value))}"
    is_table = isinstance(value, type | Question)
    return shorten(repr(value)) if is_table else describe_argument(value)
