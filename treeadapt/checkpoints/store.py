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
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    NUMBER,
    Stored,
    as_tree,
    nested,
    number_array,
    refuse,
    reported,
)
from treeadapt.checkpoints.fitting import (
    LoadReport,
    as_arrays,
    compared,
    home,
    is_key,
    is_number,
    key_kind,
    placed,
    wrapped,
)
from treeadapt.checkpoints.replacing import replaced, restore
from treeadapt.convert import describe
from treeadapt.errors import CheckpointError, SelectorError, TreeAdaptWarning
from treeadapt.names import listing, plural
from treeadapt.selection.selectors import as_selector, check_choice, select
from treeadapt.trees.views import TreeView, view_tree

Format = Literal["safetensors", "npz", "msgpack", "orbax"]

FORMATS: Mapping[str, ModuleType] = {
    "safetensors": safetensors_file,
    "npz": npz_file,
    "msgpack": msgpack_file,
    "orbax": orbax_folder,
}
WRITTEN = ("safetensors", "orbax")


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
    first: dict[int, str] = {}
    leaves: dict[str, Any] = {}
    ties: dict[str, str] = {}
    kinds: dict[str, str] = {}
    lost: list[str] = []
    chosen = _selected(view, where)
    for name, leaf, yes in zip(view.plan.paths, view.leaves, chosen, strict=True):
        if not yes:
            continue
        if not is_array(leaf):
            number = number_array(leaf) if is_number(leaf) else None
            if number is not None:
                leaves[name], kinds[name] = number, NUMBER
            elif not callable(leaf):
                lost.append(name)
            continue
        if is_key(leaf):
            kinds[name] = str(key_kind(leaf))
        if id(leaf) in first:
            ties[name] = first[id(leaf)]
        else:
            first[id(leaf)] = name
            leaves[name] = leaf
    kind = format_of(path, format, writing=True)
    host = kind != "orbax"
    for name, leaf in leaves.items():
        _require_value(name, leaf, host=host)
    pairs = ((name, _plain(leaf, host=host)) for name, leaf in leaves.items())
    write_leaves(path, pairs, ties, kinds, kind)
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
        return _plain_tree(stored.without_boxes(), where)
    view = view_tree(target)
    own = view.flat()
    stored = stored.without_boxes(own)
    report = _report(view, own, stored, where, cast=cast)
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
    made, owners = dict(own), {}
    with reported(path, "read"):
        for one, array in _arrays(stored, own, report.restored):
            like = own[one]
            key = (stored.ties.get(one, one), _like_key(like))
            if key not in owners:
                owners[key] = placed(one, array, like)
            made[one] = owners[key]
    return view.rebuild(list(made.values()))


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
    own = view.flat()
    stored = read_stored(path, format).without_boxes(own)
    return _report(view, own, stored, where, cast=cast)


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
    kind = format_of(path, given)
    if not name.exists():
        raise CheckpointError(f"There is no checkpoint {listing([str(name)])}.")
    folder = kind == "orbax" or (name / safetensors_file.INDEX).is_file()
    if name.is_dir() != folder or not (name.is_dir() or name.is_file()):
        refuse(name, f"it is not a {kind} {'folder' if kind == 'orbax' else 'file'}")
    with reported(name, "read"):
        version = _version(name)
        with _unreplaced(name, version):
            found = FORMATS[kind].read_metadata(name)
        return dataclasses.replace(found, version=version, path=name, format=kind)


def read_arrays(stored: Stored) -> Iterator[tuple[str, Any]]:
    """Read every leaf of a checkpoint, to the host.

    Args:
        stored: the checkpoint, maybe with the paths of a model.

    Yields:
        Path and array.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with reported(stored.path, "read"):
        yield from _arrays(stored, {}, stored.leaves)


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
    wanted = [one for one in stored.leaves if one not in stored.ties]

    def leaves() -> Iterator[tuple[str, Any]]:
        with reported(source, "read"):
            for one, array in _arrays(stored, {}, wanted):
                progress(one)
                yield one, np.asarray(array)

    made = format_of(path, format, writing=True)
    write_leaves(path, leaves(), stored.ties, stored.kinds, made)


def write_leaves(
    path: str | os.PathLike[str],
    leaves: Iterable[tuple[str, Any]],
    ties: Mapping[str, str],
    kinds: Mapping[str, str],
    kind: str,
) -> None:
    """Write pairs of path and array to a new file, then put it in place.

    Raises:
        CheckpointError: it cannot be written.
    """
    name = Path(path)
    if kind == "orbax" and jax.process_count() > 1:
        # Every process must write to one folder, and put it in place together.
        raise CheckpointError(
            "Several processes save to an Orbax folder by Orbax's own checkpointer: "
            "StandardCheckpointer().save(path, ta.to_flat_dict(tree)). ta.load reads "
            "what it wrote."
        )
    with reported(name, "written"), replaced(name, lambda: _check(name, kind)) as part:
        FORMATS[kind].write(part, leaves, ties, kinds)


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
    elif not name.exists() and not writing:
        raise CheckpointError(f"There is no checkpoint {listing([str(name)])}.")
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


def _require_path(path: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            "The name of a checkpoint comes first, save(path, tree) and load(path, "
            f"target); got {describe(path)} for it."
        )


def _selected(view: TreeView, where: Any) -> list[bool]:
    """Select leaves, with 0-d arrays in the place of Python numbers."""
    leaves = as_arrays(view.leaves)
    return select(dataclasses.replace(view, leaves=leaves), where)


def _report(
    view: TreeView, own: Mapping[str, Any], stored: Stored, where: Any, *, cast: bool
) -> LoadReport:
    extra = {one: leaf for one, leaf in stored.leaves.items() if one not in own}
    chosen, unexpected = _selected(view, where), _also_selected(extra, where)

    def read(scalars: list[str]) -> Mapping[str, Any]:
        with reported(stored.path, "read"):
            return dict(_arrays(stored, {}, scalars))

    return compared(own, chosen, stored, unexpected, read, cast=cast)


def _plain_tree(stored: Stored, where: Any) -> Any:
    """Return nested dicts of what is stored and selected."""
    view = view_tree(as_tree(stored.leaves))
    chosen = zip(view.plan.paths, select(view, where), strict=True)
    wanted = [one for one, yes in chosen if yes]
    nested({tuple(one.split("/")): None for one in wanted})  # before anything is read
    found: dict[tuple[str, ...], Any] = {}
    owners: dict[str, Any] = {}
    with reported(stored.path, "read"):
        for one, array in _arrays(stored, {}, wanted):
            mark, owner = stored.kinds.get(one, NUMBER), stored.ties.get(one, one)
            if owner not in owners:
                owners[owner] = array if mark == NUMBER else wrapped(array, mark)
            found[tuple(one.split("/"))] = owners[owner]
    return found[("",)] if wanted == [""] else nested(found)


def _also_selected(extra: Mapping[str, Any], where: Any) -> tuple[str, ...]:
    """Return the stored paths that the selector selects by their names."""
    try:
        view = view_tree(as_tree(extra))
        mask = select(view, as_selector(where), unused="ignore")
    except SelectorError:  # it asks for classes, which a file does not have
        return ()
    return tuple(one for one, yes in zip(view.plan.paths, mask, strict=True) if yes)


def _arrays(
    stored: Stored, target: Mapping[str, Any], wanted: Iterable[str]
) -> Iterator[tuple[str, Any]]:
    """Read leaves, each of which must be what the metadata said."""
    path, asked = stored.path, list(wanted)
    places = {one: _sharding(stored, one, target.get(one)) for one in asked}
    with _unreplaced(path, stored.version):
        given: Any = places if stored.format == "orbax" else asked
        arrays = FORMATS[stored.format].read(path, stored, given)
        for one, array in zip(asked, arrays, strict=True):
            stated = stored.leaves[one]
            if array.shape != stated.shape or array.dtype != stated.dtype:
                refuse(
                    path,
                    f"its metadata says that {listing([one])} is {describe(stated)}, "
                    f"and its content is {describe(array)}",
                )
            yield one, array


@contextlib.contextmanager
def _unreplaced(path: Path, version: tuple[int, ...]) -> Iterator[None]:
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


def _sharding(stored: Stored, one: str, leaf: Any) -> Any:
    """Return where a leaf is to be read to; None for the host."""
    if not is_array(leaf) or isinstance(leaf, jax.core.Tracer):
        return None
    dtype = stored.leaves[one].dtype
    direct = leaf.dtype == dtype == jax.dtypes.canonicalize_dtype(dtype)
    return home(leaf) if direct else None


def _like_key(like: Any) -> tuple[Any, ...]:
    dtype = str(getattr(like, "dtype", ""))
    return type(like).__name__, dtype, repr(getattr(like, "sharding", None))


def _require_value(name: str, leaf: Any, *, host: bool) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise CheckpointError(
            f"The leaf {listing([name])} has no value: it is a {type(leaf).__name__}."
        )
    if not is_key(leaf) and DTYPES.get(np.dtype(leaf.dtype).name) != leaf.dtype:
        raise CheckpointError(
            f"The leaf {listing([name])} is of dtype {leaf.dtype}, which no checkpoint "
            "holds."
        )
    if host and not getattr(leaf, "is_fully_addressable", True):
        raise CheckpointError(
            f"The leaf {listing([name])} is also on devices of other processes. "
            "Save as an Orbax folder."
        )


def _plain(leaf: Any, *, host: bool) -> Any:
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf) if host else leaf
