"""What the command line takes for a tree: a checkpoint's metadata, or a function.

Takes the text of an argument; gives an abstract tree, no array loaded or made. A
checkpoint is read as data. ``module:function`` imports code and runs it under
``jax.eval_shape``: it is the user's own, as with ``python -m``.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from treeadapt._arrays import is_array
from treeadapt.checkpoints import store
from treeadapt.checkpoints.common import Stored, as_tree
from treeadapt.cli.printing import bar
from treeadapt.errors import CheckpointError, TreeAdaptError, listing
from treeadapt.plans import view_tree

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*(?<!\.py):[A-Za-z_][\w.]*")
_FILE = re.compile(r"(?P<file>.*)\.py:(?P<function>[A-Za-z_][\w.]*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Source:
    """An abstract tree, and which of its leaves are others.

    Attributes:
        tree: leaves are ``jax.ShapeDtypeStruct`` and static leaves.
        ties: path, and the path whose leaf it is.
    """

    tree: Any
    ties: Mapping[str, str]


def read_source(text: str) -> Source:
    """Read a tree, abstractly.

    Args:
        text: name of a checkpoint, or ``module:function``.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        TreeAdaptError: the function cannot be found or fails.
    """
    if _is_function(text):
        module, _, function = text.partition(":")
        return _traced(text, module, function)
    stored = read_stored(text)
    return Source(as_tree(stored.leaves), stored.ties)


def read_stored(text: str) -> Stored:
    """Read all that is known of a checkpoint without its arrays.

    Raises:
        CheckpointError: it is not a checkpoint, or cannot be read.
    """
    if _is_function(text):
        raise CheckpointError(f"{text} has shapes and no values; name a checkpoint.")
    file = _FILE.fullmatch(text)
    if file and not Path(text).exists():
        parts = Path(file["file"]).parts
        module = ".".join(parts) if all(map(str.isidentifier, parts)) else "module"
        raise CheckpointError(
            f"{text} names a file; name the module: {module}:{file['function']}."
        )
    return store.read_stored(text)


def read_arrays(text: str) -> dict[str, Any]:
    """Read a checkpoint with its arrays, as a flat dict.

    Raises:
        CheckpointError: it is not a checkpoint, or cannot be read.
    """
    found = {}
    with bar(f"Reading {text}", len(read_stored(text).leaves)) as shown:
        for path, array in store.read_arrays(text):
            found[path] = array
            shown.update(1)
    return found


def _is_function(text: str) -> bool:
    return bool(_FUNCTION.fullmatch(text)) and not Path(text).exists()


def _traced(text: str, module: str, function: str) -> Source:
    """Return the abstract result of a function, static leaves as they are."""
    made: list[Any] = []

    def run() -> list[Any]:
        tree = _function(text, module, function)()
        view = view_tree(tree)
        if not any(map(is_array, view.leaves)):
            raise TreeAdaptError(
                f"{text} returns {'None' if tree is None else type(tree).__name__}, "
                "with no array in it; return the tree of parameters."
            )
        made.append(view)
        return [leaf for leaf in view.leaves if is_array(leaf)]

    try:
        shapes = iter(jax.eval_shape(run))
    except TreeAdaptError:
        raise
    except (Exception, SystemExit) as error:
        told = " ".join(str(error).split())[:300]
        raise TreeAdaptError(
            f"{text} raised {type(error).__name__}{': ' * bool(told)}{told}"
        ) from error
    view = made[0]
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for path, leaf in zip(view.plan.paths, view.leaves, strict=True):
        if is_array(leaf) and first.setdefault(id(leaf), path) != path:
            ties[path] = first[id(leaf)]
    leaves = [next(shapes) if is_array(leaf) else leaf for leaf in view.leaves]
    return Source(view.rebuild(leaves), ties)


def _function(text: str, module: str, function: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    found: Any = importlib.import_module(module)
    for name in function.split("."):
        if not hasattr(found, name):
            raise TreeAdaptError(f"The module of {text} has no {listing([name])}.")
        found = getattr(found, name)
    if not callable(found):
        raise TreeAdaptError(
            f"{text} is not a function; give one that returns the tree."
        )
    return found
