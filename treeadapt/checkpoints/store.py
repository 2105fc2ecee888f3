"""Saving and loading: the leaves of a tree, by label path, in any format.

Takes a tree and a file name; the file's ending says the format. What is loaded is
checked against a target by metadata before any array is read, so that a file may state
what it likes. Python numbers are saved as 0-d arrays; other static leaves, ``None`` and
containers are not: they come from the target. The state of an optimizer is a tree as
any other. Formats are in the other files of this room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.checkpoints import (
    msgpack_file,
    npz_file,
    orbax_folder,
    safetensors_file,
)
from treeadapt.checkpoints.common import (
    DTYPES,
    Stored,
    as_tree,
    nested,
    refuse,
    reported,
)
from treeadapt.checkpoints.fitting import (
    LoadReport,
    as_array,
    compared,
    home,
    is_key,
    is_long,
    placed,
    stored_form,
    target_form,
)
from treeadapt.checkpoints.replacing import replaced, restore
from treeadapt.convert import describe
from treeadapt.errors import CheckpointError, SelectorError, TreeAdaptWarning
from treeadapt.names import listing, plural
from treeadapt.selection.selectors import check_choice, select
from treeadapt.trees.views import TreeView, view_tree

Format = Literal["safetensors", "npz", "msgpack", "orbax"]

FORMATS: Mapping[str, ModuleType] = {
    "safetensors": safetensors_file,
    "npz": npz_file,
    "msgpack": msgpack_file,
    "orbax": orbax_folder,
}
WRITTEN = ("safetensors", "orbax")
_ALIKE = ("dtype", "sharding")  # what tied leaves must share to be one array


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    where: Any = "**",
    format: Literal["safetensors", "orbax"] | None = None,  # noqa: A002
) -> None:
    """Write the arrays and Python numbers of a tree, named by their label paths.

    Whatever stood at ``path`` is replaced once all is written, and stays if writing
    fails. One array under two paths is stored once in ``.safetensors``. A Python number
    is stored as a 0-d bool, int64, float64 or complex128, typed PRNG keys as their
    integers; the metadata says so. Functions and classes are not data and not stored;
    a warning names other static leaves, such as text, that are not stored either.

    Args:
        path: ``.safetensors``, or no ending for an Orbax folder.
        tree: any tree. For ``.safetensors`` its leaves come to the host.
        where: selects the leaves to save.
        format: ``"safetensors"`` or ``"orbax"``, whatever the ending.

    Raises:
        CheckpointError: the format cannot hold a leaf, a leaf has no value here, or
            the file system refuses.
        PathCollisionError: two leaves have the same path.
        UnusedRuleError: an entry of ``where`` selects no array or number.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> layers = [np.ones((2, 3)), np.zeros(3, jnp.bfloat16)]
        >>> save(file, {"layers": layers, "step": 700})
        >>> for name, leaf in read_metadata(file).items():
        ...     print(name, leaf.shape, leaf.dtype)
        step () int64
        layers/0 (2, 3) float64
        layers/1 (3,) bfloat16
    """
    _require_path(path)
    view = view_tree(tree)
    leaves: dict[str, Any] = {}
    marks: dict[str, dict[str, str]] = {"ties": {}, "kinds": {}}
    first: dict[int, str] = {}
    lost: list[str] = []
    for (name, leaf), yes in zip(view.items(), _selected(view, where), strict=True):
        form = stored_form(leaf)
        if not yes or (form is None and callable(leaf)):
            continue
        if form is None or is_long(leaf):
            lost.append(name)
            continue
        if form.kind:
            marks["kinds"][name] = form.kind
        if is_array(leaf) and first.setdefault(id(leaf), name) != name:
            marks["ties"][name] = first[id(leaf)]
        else:
            leaves[name] = leaf
    _write(path, leaves, marks, format_of(path, format, writing=True))
    if lost:
        warnings.warn(
            f"{plural(len(lost), 'leaf')} cannot be saved as an array and must come "
            f"from the target of load: {listing(lost)}.",
            TreeAdaptWarning,
            stacklevel=2,
        )


def load(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    where: Any = "**",
    strict: bool = True,
    cast: bool = False,
    format: Format | None = None,  # noqa: A002
) -> Any:
    """Fill a tree like ``target`` with the leaves of a checkpoint.

    Shapes and dtypes are compared before any array is read, and leaves are read one
    at a time (Flax's and Orbax's readers take all of them). A leaf goes where that of
    ``target`` is: to its sharding, or to NumPy; an abstract one to its sharding if it
    has one, else to JAX's default device. A Python number fits any 0-d leaf of its kind
    (bool, integer, floating or complex) that holds its value exactly.

    Args:
        path: a ``.safetensors``, ``.npz`` or Flax ``.msgpack`` file, a folder of Orbax,
            or one of safetensors shards with their index, written by any library.
        target: tree, concrete or abstract; gives classes, static leaves and every leaf
            that is not loaded, also Python numbers that the checkpoint lacks. None for
            nested dicts of what is stored, with arrays of NumPy.
        where: selects the leaves of ``target`` to load, or without one of the
            checkpoint; anything else that is stored is ignored then.
        strict: refuse unless all that is selected fits. Without it, leaves that are
            missing, misshaped or retyped stay as they are in ``target``, and what is
            unexpected is left out: ``load_report`` lists them. A warning says if that
            leaves nothing to load.
        cast: turn arrays into the dtypes of ``target``, integers into floating-point
            numbers too but not back. A value that becomes infinite or another integer
            is an error.
        format: ``"safetensors"``, ``"npz"``, ``"msgpack"`` or ``"orbax"``, whatever the
            ending.

    Returns:
        Tree with the treedef of ``target``. Paths that were tied when saved share one
        array if the target has them alike.

    Raises:
        CheckpointError: the checkpoint cannot be read, or ``strict`` and it does not
            fit; the message lists all misfits.
        PathCollisionError: there is no ``target``, and dicts cannot hold the paths.
        UnusedRuleError: an entry of ``where`` selects no array or number.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save(file, {"encoder": np.ones(2), "head": np.ones(3)})
        >>> load(file)
        {'encoder': array([1., 1.]), 'head': array([1., 1., 1.])}
        >>> load(file, {"encoder": np.zeros(2), "head": np.zeros(5)}, where="encoder")
        {'encoder': array([1., 1.]), 'head': array([0., 0., 0., 0., 0.])}
    """
    stored = read_stored(path, format)
    if target is None:
        stored = stored.without_boxes()
        table = {one: stored.table[one] for one in _chosen(stored.leaves, where)}
        stored = dataclasses.replace(stored, table=table)
        target, where = _plain_target(stored), "**"
    view = view_tree(target)
    made = view.flat()
    stored = stored.without_boxes(made)
    report = _report(view, stored, where, cast=cast)
    name = listing([str(stored.path)])
    if strict and not report.fits:
        raise CheckpointError(
            f"The checkpoint {name} does not fit the target.\n{report}\n"
            "Choose leaves with where=, or pass strict=False."
        )
    if not report.restored and not report.fits:
        warnings.warn(
            f"Nothing was loaded from {name}, because no leaf of the target fits.\n"
            f"{report}",
            TreeAdaptWarning,
            stacklevel=2,
        )
    owners: dict[Any, Any] = {}
    wanted = {one: made[one] for one in report.restored}
    with reported(path, "read"):
        for one, array in read_arrays(stored, wanted):
            like = wanted[one]
            owner = stored.table[one].owner or one
            key = owner, type(like), *(getattr(like, x, None) for x in _ALIKE)
            if key not in owners:
                owners[key] = placed(one, array, like)
            made[one] = owners[key]
    return view.replace(made)


def load_report(
    path: str | os.PathLike[str],
    target: Any,
    *,
    where: Any = "**",
    cast: bool = False,
    format: Format | None = None,  # noqa: A002
) -> LoadReport:
    """Report how a checkpoint fits a target; only metadata and numbers are read.

    Args:
        path: as for ``load``.
        target: as for ``load``.
        where: as for ``load``.
        cast: as for ``load``.
        format: as for ``load``.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        UnusedRuleError: an entry of ``where`` selects no array or number.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save(file, {"w": np.ones(2), "step": 700})
        >>> print(load_report(file, {"w": np.zeros(2), "step": 0}))
        2 leaves restored.
        1 number changed:
          'step': 700, the target has 0
    """
    view = view_tree(target)
    stored = read_stored(path, format).without_boxes(view.flat())
    return _report(view, stored, where, cast=cast)


def read_metadata(
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002
) -> dict[str, jax.ShapeDtypeStruct]:
    """Read the names, shapes and dtypes of a checkpoint, and no array.

    Args:
        path: a checkpoint; only the headers of ``.safetensors`` and ``.npz`` files and
            the metadata of Orbax folders are read, but all of a ``.msgpack`` file.
        format: as for ``load``.

    Returns:
        Flat dict of abstract leaves, in the order of the file; an abstract tree for
        ``summarize``, ``param_labels`` and ``tree_diff``. Where Orbax or Flax wrote
        boxes, so that every path ends in ``/value``, that is left out.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    return dict(read_stored(path, format).without_boxes().leaves)


def read_stored(path: str | os.PathLike[str], given: str | None = None) -> Stored:
    """Read all that is known of a checkpoint without its arrays, as it is stored.

    Args:
        path: of the checkpoint.
        given: its format; None to go by the name.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    _require_path(path)
    name = Path(path)
    if not name.exists():
        restore(name.absolute())
    if not name.exists():
        raise CheckpointError(f"There is no checkpoint {listing([str(name)])}.")
    kind = format_of(name, given)
    is_folder = kind == "orbax" or (name / safetensors_file.INDEX).is_file()
    if not (name.is_dir() if is_folder else name.is_file()):
        refuse(name, f"it is not a {kind} {'folder' if kind == 'orbax' else 'file'}")
    with reported(name, "read"):
        version = _version(name)
    with _reading(name, version):
        found = FORMATS[kind].read_metadata(name)
    return dataclasses.replace(found, version=version, format=kind)


def read_arrays(
    stored: Stored, wanted: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Read leaves, each of which must be what the metadata said.

    Args:
        stored: the checkpoint, maybe with the paths of a model.
        wanted: the leaves to read, and for each that of a target, to whose sharding it
            may go, or None. All, to the host, if not given.

    Yields:
        Path and array.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    if wanted is None:
        wanted = dict.fromkeys(stored.table)
    if not wanted:
        return
    path, table = stored.path, stored.table
    places = {one: _place(table[one].array, like) for one, like in wanted.items()}
    with _reading(path, stored.version):
        arrays = FORMATS[stored.format].read(stored, places)
        for one, array in zip(places, arrays, strict=True):
            stated = table[one].array
            if array.shape != stated.shape or array.dtype != stated.dtype:
                refuse(
                    path,
                    f"its metadata says that {listing([one])} is {describe(stated)}, "
                    f"and its content is {describe(array)}",
                )
            yield one, array


def copy(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Write a checkpoint again, in another format.

    Args:
        source: a checkpoint of any format.
        path: where to write; it is replaced once all is written.
        format: as for ``save``, of what is written.
        progress: called with the path of each leaf that is about to be written.

    Raises:
        CheckpointError: one cannot be read, or the other not written.
    """
    stored = read_stored(source).without_boxes()
    ties, leaves = stored.ties, {}
    wanted = dict.fromkeys(one for one in stored.table if one not in ties)
    for one, array in read_arrays(stored, wanted):
        progress(one)
        leaves[one] = np.asarray(array)
    marks = {"ties": ties, "kinds": stored.kinds}
    _write(path, leaves, marks, format_of(path, format, writing=True))


def format_of(
    path: str | os.PathLike[str], given: str | None = None, *, writing: bool = False
) -> str:
    """Return the format of a checkpoint, by its name.

    Args:
        path: of the checkpoint.
        given: what the caller says; None to go by the name.
        writing: whether a name without ending is an Orbax folder to make.

    Raises:
        CheckpointError: the name has an unknown ending.
        SelectorError: ``given`` is unknown.
    """
    name = Path(path)
    ending = name.suffix.removeprefix(".").lower()
    if given is not None:
        check_choice("format", given, tuple(FORMATS))
    elif not name.is_dir() and ending in ("safetensors", "npz", "msgpack"):
        given = ending
    elif (name / safetensors_file.INDEX).is_file():
        given = "safetensors"
    elif name.is_dir() or (writing and ending in ("", "orbax")):
        given = "orbax"
    else:
        refuse(
            name,
            f"it has an unknown ending, {name.suffix!r:.30}",
            "Known are .safetensors, .npz, .msgpack, and folders of Orbax.",
        )
    if writing and given not in WRITTEN:
        raise CheckpointError(
            f"{listing([str(name)])}: {given} files are read, but not written. Save as "
            ".safetensors, or without an ending as an Orbax folder."
        )
    return given


def _write(
    path: str | os.PathLike[str],
    leaves: Mapping[str, Any],
    marks: Mapping[str, Mapping[str, str]],
    kind: str,
) -> None:
    """Write leaves, with their ties and kinds, to a new file, and put it in place."""
    name = Path(path)
    if kind == "orbax" and jax.process_count() > 1:
        # Every process must write to one folder, and put it in place together.
        raise CheckpointError(
            "Several processes save to an Orbax folder by Orbax's own checkpointer: "
            "StandardCheckpointer().save(path, ta.to_flat_dict(tree)). ta.load reads "
            "what it wrote."
        )
    with reported(name, "written"), replaced(name, lambda: _check(name, kind)) as new:
        arrays = {one: _value(one, leaf) for one, leaf in leaves.items()}
        FORMATS[kind].write(new, arrays, marks)


def _check(path: Path, kind: str) -> None:
    """Raise unless nothing is at ``path``, or what a new checkpoint may replace."""
    if path.is_symlink():
        raise CheckpointError(
            f"{listing([str(path)])} is a link to {listing([os.readlink(path)])} and "
            "is not replaced. Save to that name, or remove the link."
        )
    if path.exists() and path.is_dir() != (kind == "orbax"):
        what = "a folder" if path.is_dir() else "a file"
        raise CheckpointError(f"{listing([str(path)])} is {what}. Choose another name.")
    if path.is_dir():
        orbax_folder.require_own(path)


def _require_path(path: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            "The name of a checkpoint comes first, save(path, tree) and load(path, "
            f"target); got {describe(path)} for it."
        )


def _selected(view: TreeView, where: Any) -> list[bool]:
    """Select leaves, with 0-d arrays in the place of Python numbers."""
    leaves = [as_array(leaf) for leaf in view.leaves]
    return select(dataclasses.replace(view, leaves=leaves), where)


def _report(view: TreeView, stored: Stored, where: Any, *, cast: bool) -> LoadReport:
    own, unexpected = view.flat(), []
    chosen = _selected(view, where)
    others = {one: leaf for one, leaf in stored.leaves.items() if one not in own}
    with contextlib.suppress(SelectorError):  # it asks for classes; a file has none
        unexpected = _chosen(others, where, unused="ignore")
    read = functools.partial(read_arrays, stored)
    return compared(own, chosen, stored, unexpected, read, cast=cast)


def _chosen(
    leaves: Mapping[str, Any], where: Any, unused: Literal["error", "ignore"] = "error"
) -> list[str]:
    """Return the paths that the selector selects by their names."""
    view = view_tree(as_tree(leaves))
    mask = select(view, where, unused=unused)
    return list(itertools.compress(view.plan.paths, mask))


def _plain_target(stored: Stored) -> Any:
    """Return nested dicts that all of a checkpoint fits."""
    with reported(stored.path, "read"):
        likes = {one: target_form(leaf) for one, leaf in stored.table.items()}
    return likes[""] if [*likes] == [""] else nested(likes)


@contextlib.contextmanager
def _reading(path: Path, version: tuple[int, ...]) -> Iterator[None]:
    """Report what goes wrong, above all that another checkpoint came to the path."""
    with reported(path, "read"):
        try:
            yield
        finally:
            if _version(path) != version:
                raise CheckpointError(
                    f"The checkpoint {listing([str(path)])} was replaced while it was "
                    "read. Read it again."
                )


def _version(path: Path) -> tuple[int, ...]:
    """Return what changes when another file or folder comes to a path."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _place(stated: jax.ShapeDtypeStruct, leaf: Any) -> Any:
    """Return where a leaf is to be read to; None for the host."""
    if not is_array(leaf) or isinstance(leaf, jax.core.Tracer):
        return None
    is_same = leaf.dtype == stated.dtype
    is_whole = stated.dtype == jax.dtypes.canonicalize_dtype(stated.dtype)
    return home(leaf) if is_same and is_whole else None


def _value(name: str, leaf: Any) -> Any:
    """Return the array to write: of NumPy or JAX, with a dtype that files know."""
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise CheckpointError(
            f"The leaf {listing([name])} has no value: it is a {type(leaf).__name__}."
        )
    if is_key(leaf):
        return jax.random.key_data(leaf)
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if DTYPES.get(array.dtype.name) != array.dtype:
        raise CheckpointError(
            f"The leaf {listing([name])} is of dtype {array.dtype}, which no "
            "checkpoint holds."
        )
    return array
