"""What the command line takes for a tree, for a mesh and for an optimizer.

Takes the text of an argument; gives an abstract tree, no array loaded or made. A
checkpoint is read as data. ``module:function`` imports code and runs it under
``jax.eval_shape``, ``module:tx`` imports an optimizer: they are the user's own, as with
``python -m``. A mesh is abstract, so that no device is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pkgutil
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
from jax.sharding import AbstractMesh

from treeadapt.arrays import is_array
from treeadapt.checkpoints import files
from treeadapt.checkpoints.common import NUMBER, Stored, as_tree, reported
from treeadapt.checkpoints.leaves import restored_form, stored_form
from treeadapt.cli.printing import bar
from treeadapt.data_files import one_line
from treeadapt.drawing.words import printable
from treeadapt.errors import (
    CheckpointError,
    ShardingError,
    TransformError,
    TreeAdaptError,
)
from treeadapt.names import listing, plural
from treeadapt.transforms.adapt import is_transformation
from treeadapt.trees.views import view_tree

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*(?<!\.py):[A-Za-z_][\w.]*")
_AXIS = re.compile(r"\s*([^=,]*[^=,\s])\s*=\s*([1-9][0-9]{0,8})\s*")
_FILE = re.compile(r"(?P<file>.*)\.py:(?P<function>[A-Za-z_][\w.]*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class AbstractTree:
    """An abstract tree, and which of its leaves are others.

    Attributes:
        tree: leaves are ``jax.ShapeDtypeStruct`` and static leaves.
        ties: path, and the path whose leaf it is.
        stored: what was read of a checkpoint; None for a function.
    """

    tree: Any
    ties: Mapping[str, str]
    stored: Stored | None = None


def read_source(text: str) -> AbstractTree:
    """Read a tree, abstractly.

    Args:
        text: name of a checkpoint, or ``module:function``.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        TreeAdaptError: the function cannot be found or fails.
    """
    if names_function(text):
        return _traced(text)
    stored = read_checkpoint(text)
    return AbstractTree(as_tree(stored.leaves), stored.ties, stored)


def read_tree(text: str | None) -> Any:
    """Read a tree alone, abstractly; None for no text.

    Raises:
        CheckpointError, TreeAdaptError: as for ``read_source``.
    """
    return None if text is None else read_source(text).tree


def read_pair(a: str, b: str) -> tuple[AbstractTree, AbstractTree]:
    """Read two trees abstractly, in one form.

    What is in boxes has the names of the other tree. Next to a checkpoint, a function's
    tree is what ``save`` stores of it: no functions and texts, and the Python numbers
    that the checkpoint has.

    Args:
        a: name of a checkpoint, or ``module:function``.
        b: the same.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        TreeAdaptError: a function cannot be found or fails.
    """
    one, two = (_traced(x) if names_function(x) else _as_stored(x) for x in (a, b))
    return _next_to(two, a, one), _next_to(one, b, two)


def _next_to(
    other: AbstractTree | Stored, text: str, found: AbstractTree | Stored
) -> AbstractTree:
    """Return what is called ``text``, under the names of the other one."""
    known = (
        other.without_boxes().leaves
        if isinstance(other, Stored)
        else view_tree(other.tree).plan.paths
    )
    if isinstance(found, Stored):
        own = _unboxed(text, found, known)
        with reported(own.path, "read"):
            tree = as_tree({p: restored_form(x) for p, x in own.table.items()})
        return AbstractTree(tree, own.ties, own)
    if isinstance(other, AbstractTree):
        return found
    view = view_tree(found.tree)
    stored = other.without_boxes(view.plan.paths).table
    leaves: list[Any] = []
    for path, leaf in view.items():
        form = stored_form(leaf)
        is_saved = form and (form.kind != NUMBER or path in stored)
        leaves.append(restored_form(form) if form and is_saved else None)
    return dataclasses.replace(found, tree=view.rebuild(leaves))


def _unboxed(text: str, stored: Stored, known: Collection[str] = ()) -> Stored:
    """Name leaves without the ``value`` of boxes, and say so."""
    found = stored.without_boxes(known)
    cut = len(stored.leaves.keys() - found.leaves.keys())
    if cut:
        wording = (
            f"left out /value, the name of what is in a box, from {plural(cut, 'path')}"
        )
        click.echo(printable(f"note: {text}: {wording}."), err=True)
    return found


def read_checkpoint(text: str) -> Stored:
    """Read all that is known of a checkpoint without its arrays.

    Raises:
        CheckpointError: it is not a checkpoint, or cannot be read.
    """
    return _unboxed(text, _as_stored(text))


def _as_stored(text: str) -> Stored:
    if names_function(text):
        raise CheckpointError(f"{text} has shapes and no values; name a checkpoint.")
    file = _FILE.fullmatch(text)
    if file and not Path(text).exists():
        parts = Path(file["file"]).parts
        module = ".".join(parts) if all(map(str.isidentifier, parts)) else "module"
        raise CheckpointError(
            f"{text} names a file; name the module: {module}:{file['function']}."
        )
    return files.read_stored(text)


def read_leaves(text: str, source: AbstractTree) -> dict[str, Any]:
    """Read the arrays of a checkpoint, as a flat dict.

    Raises:
        CheckpointError: it is not a checkpoint, or cannot be read.
    """
    stored = source.stored or read_checkpoint(text)
    found = {}
    with (
        bar(f"Reading {text}", len(stored.leaves)) as shown,
        files.reading(stored.path, stored.version),
    ):
        for path, array in files.read_arrays(stored, dict.fromkeys(stored.table)):
            found[path] = np.asarray(array)
            shown.update(1)
    return found


def names_function(text: str) -> bool:
    """Return whether a text names a function, and no file."""
    return bool(_FUNCTION.fullmatch(text)) and not Path(text).exists()


def _traced(text: str) -> AbstractTree:
    """Return the abstract result of a function, static leaves as they are."""
    made: list[Any] = []

    def run() -> list[Any]:
        function = _resolved(text)
        if not callable(function):
            wording = "is not a function; give one that returns the tree."
            raise TreeAdaptError(f"{text} {wording}")
        tree = function()
        view = view_tree(tree)
        if not any(map(is_array, view.leaves)):
            raise TreeAdaptError(
                f"{text} returns {'None' if tree is None else type(tree).__name__}, "
                "with no array in it; return the tree of parameters."
            )
        made.append(view)
        return [leaf for leaf in view.leaves if is_array(leaf)]

    with _named(text):
        shapes = iter(jax.eval_shape(run))
    view = made[0]
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for path, leaf in view.items():
        if is_array(leaf) and first.setdefault(id(leaf), path) != path:
            ties[path] = first[id(leaf)]
    leaves = [next(shapes) if is_array(leaf) else leaf for leaf in view.leaves]
    return AbstractTree(view.rebuild(leaves), ties)


def read_mesh(text: str) -> AbstractMesh:
    """Read the axes of a mesh.

    Args:
        text: names and sizes, such as ``data=16,model=8``.

    Raises:
        ShardingError: it cannot be read, or two axes have one name.
    """
    found = [_AXIS.fullmatch(part) for part in text.split(",")]
    pairs = [match.groups() for match in found if match is not None]
    sizes = {name: int(size) for name, size in pairs}
    if len(sizes) < len(found):
        raise ShardingError(
            f"--mesh has {listing([text])}. Write the name and size of each axis: "
            "data=16,model=8."
        )
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def read_optimizer(text: str) -> Any:
    """Import a transformation, or what a function of no arguments returns.

    Args:
        text: ``module:name``.

    Raises:
        TransformError: it is not one.
        TreeAdaptError: it cannot be found, or the function fails.
    """
    if not _FUNCTION.fullmatch(text):
        raise TransformError(f"--optimizer has {listing([text])}. Write module:tx.")
    with _named(text):
        found = _resolved(text)
        if not is_transformation(found) and callable(found):
            found = found()
    if not is_transformation(found):
        raise TransformError(
            f"{text} is {one_line(repr(found))}. Give a transformation of Optax, or a "
            "function of no arguments that returns one."
        )
    return found


@contextlib.contextmanager
def _named(text: str) -> Iterator[None]:
    """Say that whatever is raised inside comes from what ``text`` names.

    Raises:
        TreeAdaptError: instead of any other exception.
    """
    try:
        yield
    except TreeAdaptError:
        raise
    except (Exception, SystemExit) as error:
        wording = " ".join(str(error).split())[:300]
        raise TreeAdaptError(
            f"{text} raised {type(error).__name__}{': ' * bool(wording)}{wording}"
        ) from error


def _resolved(text: str) -> Any:
    """Import what ``module:name`` names; modules here come first."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return pkgutil.resolve_name(text)
