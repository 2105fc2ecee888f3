"""Saving and loading: the array leaves of a tree, by label path, in any format.

Takes a tree and a file name; the file's ending says the format. What is loaded is
checked against a target by metadata before any array is read, so that a file may state
what it likes. Static leaves, ``None`` and containers are not saved: they come from the
target. The state of an optimizer is a tree as any other.
Formats are in the other files of this room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt._arrays import is_array
from treeadapt.checkpoints import (
    msgpack_file,
    npz_file,
    orbax_folder,
    safetensors_file,
)
from treeadapt.checkpoints.common import DTYPES, Stored, refuse, told
from treeadapt.checkpoints.replacing import replaced, restore
from treeadapt.convert import describe
from treeadapt.errors import CheckpointError, SelectorError, listing, plural
from treeadapt.plans import TreeView, view_tree
from treeadapt.repairs import Speller
from treeadapt.selectors import as_selector, check_choice, select

Format = Literal["safetensors", "npz", "msgpack", "orbax"]

FORMATS: Mapping[str, ModuleType] = {
    "safetensors": safetensors_file,
    "npz": npz_file,
    "msgpack": msgpack_file,
    "orbax": orbax_folder,
}
WRITTEN = ("safetensors", "orbax")
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How a checkpoint and a target fit together.

    Attributes:
        restored: paths of the target that the checkpoint fills.
        missing: paths of the target that the checkpoint lacks.
        unexpected: paths of the checkpoint that the target lacks.
        misshaped: paths with another shape: what is stored, and what the target has.
        retyped: paths with the same shape and another dtype; the same.
    """

    restored: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: Mapping[str, tuple[str, str]]
    retyped: Mapping[str, tuple[str, str]]

    @property
    def fits(self) -> bool:
        """Whether nothing is missing, unexpected, misshaped or retyped."""
        return not (self.missing or self.unexpected or self.misshaped or self.retyped)

    def __str__(self) -> str:
        lines = [f"{plural(len(self.restored), 'leaf')} restored."]
        speller = Speller()
        for kind, names, others, source in (
            ("missing", self.missing, self.unexpected, "stored is"),
            ("unexpected", self.unexpected, self.missing, "the target has"),
        ):
            if names:
                lines.append(f"{plural(len(names), 'leaf')} {kind}:")
            for name in names[:_SHOWN]:
                near = speller.nearest(name, others[:2_000], count=1)
                # One stored name is not offered to two that are missing.
                back = speller.nearest(near[0], names[:2_000], count=1) if near else []
                hint = f" ({source} {listing(near)})" if back == [name] else ""
                lines.append(f"  {listing([name])}{hint}")
            lines += _more(len(names))
        for kind, pairs in (("shape", self.misshaped), ("dtype", self.retyped)):
            if pairs:
                lines.append(f"{plural(len(pairs), 'leaf')} of another {kind}:")
            for name, (got, want) in list(pairs.items())[:_SHOWN]:
                lines.append(f"  {listing([name])}: {got}, the target has {want}")
            lines += _more(len(pairs))
        return "\n".join(lines)


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    format: Format | None = None,  # noqa: A002
) -> None:
    """Write the array leaves of a tree, named by their label paths.

    Whatever stood at ``path`` is replaced once all is written, and stays if writing
    fails. One array under two paths is stored once in ``.safetensors``. Typed PRNG
    keys are stored as their integers.

    Args:
        path: ``.safetensors``, or no ending for an Orbax folder.
        tree: any tree of arrays; static leaves are not stored. For ``.safetensors`` all
            leaves come to the host, for Orbax none.
        format: ``"safetensors"`` or ``"orbax"``, whatever the ending.

    Raises:
        CheckpointError: the format cannot hold a leaf, a leaf has no value here, or
            the file system refuses.
        PathCollisionError: two leaves have the same path.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save(file, {"layers": [np.ones((2, 3)), np.zeros(3, jnp.bfloat16)]})
        >>> for name, leaf in read_metadata(file).items():
        ...     print(name, leaf.shape, leaf.dtype)
        layers/0 (2, 3) float64
        layers/1 (3,) bfloat16
    """
    _require_path(path)
    view = view_tree(tree)
    first: dict[int, str] = {}
    leaves: dict[str, Any] = {}
    ties: dict[str, str] = {}
    for name, leaf in zip(view.plan.paths, view.leaves, strict=True):
        if not is_array(leaf):
            continue
        if id(leaf) in first:
            ties[name] = first[id(leaf)]
        else:
            first[id(leaf)] = name
            leaves[name] = leaf
    kind = format_of(path, format, writing=True)
    host = kind != "orbax"
    for name, leaf in leaves.items():
        _require_value(name, leaf, host=host)
    write_leaves(
        path, ((n, _plain(x, host=host)) for n, x in leaves.items()), ties, kind
    )


def load(
    path: str | os.PathLike[str],
    target: Any,
    *,
    where: Any = "**",
    strict: bool = True,
    format: Format | None = None,  # noqa: A002
) -> Any:
    """Fill a tree like ``target`` with the leaves of a checkpoint.

    Shapes and dtypes are compared before any array is read, and leaves are read one
    at a time (Flax's and Orbax's readers take all of them). A leaf goes where that of
    ``target`` is: to its sharding, or to NumPy; an abstract one to its sharding if it
    has one, else to JAX's default device.

    Args:
        path: a ``.safetensors``, ``.npz`` or Flax ``.msgpack`` file, or a folder of
            Orbax, written by any library.
        target: tree, concrete or abstract; gives classes, static leaves and every leaf
            that is not loaded.
        where: selects the leaves of ``target`` to load; what else is stored is no
            matter then.
        strict: refuse unless all that is selected fits. Without it, leaves that are
            missing, misshaped or retyped stay as they are in ``target``, and what is
            unexpected is left out: ``load_report`` tells which.
        format: ``"safetensors"``, ``"npz"``, ``"msgpack"`` or ``"orbax"``, whatever the
            ending.

    Returns:
        Tree with the treedef of ``target``. Paths that were tied when saved share one
        array if the target has them alike.

    Raises:
        CheckpointError: the checkpoint cannot be read, or ``strict`` and it does not
            fit; all misfits are told at once.
        UnusedRuleError: an entry of ``where`` selects no array leaf of ``target``.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save(file, {"encoder": np.ones(2), "head": np.ones(3)})
        >>> load(file, {"encoder": np.zeros(2), "head": np.zeros(5)}, where="encoder")
        {'encoder': array([1., 1.]), 'head': array([0., 0., 0., 0., 0.])}
    """
    kind, stored = _stored(path, format)
    name = Path(path)
    view = view_tree(target)
    report = _report(view, stored, where)
    if strict and not report.fits:
        raise CheckpointError(
            f"The checkpoint {listing([str(name)])} does not fit the target.\n"
            f"{report}\nChoose leaves with where=, or pass strict=False."
        )
    places = {one: place for place, one in enumerate(view.plan.paths)}
    leaves = list(view.leaves)
    own = dict(zip(view.plan.paths, view.leaves, strict=True))
    owners: dict[Any, Any] = {}
    with told(name, "read"):
        for one, array in _arrays(kind, name, stored, own, report.restored):
            like = own[one]
            key = (stored.ties.get(one, one), _like_key(like))
            if key not in owners:
                owners[key] = _placed(array, like)
            leaves[places[one]] = owners[key]
    return view.rebuild(leaves)


def load_report(
    path: str | os.PathLike[str],
    target: Any,
    *,
    where: Any = "**",
    format: Format | None = None,  # noqa: A002
) -> LoadReport:
    """Tell how a checkpoint fits a target; only metadata is read.

    Args:
        path: as for ``load``.
        target: as for ``load``.
        where: as for ``load``.
        format: as for ``load``.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        UnusedRuleError: an entry of ``where`` selects no array leaf of ``target``.
    """
    return _report(view_tree(target), _stored(path, format)[1], where)


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
        ``summarize``, ``param_labels`` and ``tree_diff``.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    return dict(_stored(path, format)[1].leaves)


def read_ties(
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002
) -> dict[str, str]:
    """Read which paths are another path's leaf, stored once.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    return dict(_stored(path, format)[1].ties)


def read_stored(path: str | os.PathLike[str]) -> Stored:
    """Read all that is known of a checkpoint without its arrays, ties as well.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    return _stored(path, None)[1]


def read_arrays(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Read every leaf of a checkpoint, to the host.

    Yields:
        Path and array.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    kind, stored = _stored(path, None)
    with told(path, "read"):
        yield from _arrays(kind, Path(path), stored, {}, stored.leaves)


def copy(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Write a checkpoint anew, in another format.

    Args:
        source: a checkpoint of any format.
        path: where to write; it is replaced once all is written.
        format: as for ``save``, of what is written.
        progress: called with the path of each leaf that is about to be written.

    Raises:
        CheckpointError: one cannot be read, or the other not written.
    """
    kind, stored = _stored(source, None)
    wanted = [one for one in stored.leaves if one not in stored.ties]

    def leaves() -> Iterator[tuple[str, Any]]:
        with told(source, "read"):
            for one, array in _arrays(kind, Path(source), stored, {}, wanted):
                progress(one)
                yield one, np.asarray(array)

    write_leaves(path, leaves(), stored.ties, format_of(path, format, writing=True))


def write_leaves(
    path: str | os.PathLike[str],
    leaves: Iterable[tuple[str, Any]],
    ties: Mapping[str, str],
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
    with told(name, "written"), replaced(name, lambda: _check(name, kind)) as part:
        FORMATS[kind].write(part, leaves, ties)


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
    """Tell the format of a checkpoint by its name.

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


def _stored(path: str | os.PathLike[str], given: str | None) -> tuple[str, Stored]:
    _require_path(path)
    name = Path(path)
    if not name.exists():
        restore(name.absolute())
    kind = format_of(path, given)
    if not name.exists():
        raise CheckpointError(f"There is no checkpoint {listing([str(name)])}.")
    if name.is_dir() != (kind == "orbax") or not (name.is_dir() or name.is_file()):
        refuse(name, f"it is no {kind} {'folder' if kind == 'orbax' else 'file'}")
    with told(name, "read"):
        version = _version(name)
        with _unreplaced(name, version):
            found = FORMATS[kind].read_metadata(name)
        return kind, dataclasses.replace(found, version=version)


def _report(view: TreeView, stored: Stored, where: Any) -> LoadReport:
    mask = select(view, where)
    restored, missing = [], []
    misshaped: dict[str, tuple[str, str]] = {}
    retyped: dict[str, tuple[str, str]] = {}
    for one, leaf, yes in zip(view.plan.paths, view.leaves, mask, strict=True):
        if not yes or not is_array(leaf):
            continue
        found, want = stored.leaves.get(one), _as_stored(leaf)
        if found is None:
            missing.append(one)
        elif found.shape != tuple(want.shape):
            misshaped[one] = (describe(found), describe(leaf))
        elif found.dtype != want.dtype:
            retyped[one] = (describe(found), describe(leaf))
        else:
            restored.append(one)
    known = frozenset(view.plan.paths)
    extra = {one: leaf for one, leaf in stored.leaves.items() if one not in known}
    unexpected = _also_selected(extra, where)
    return LoadReport(tuple(restored), tuple(missing), unexpected, misshaped, retyped)


def _also_selected(extra: Mapping[str, Any], where: Any) -> tuple[str, ...]:
    """Return the stored paths that the selector selects, as far as names tell."""
    try:
        view = view_tree(dict(extra))
        mask = select(view, as_selector(where), unused="ignore")
    except SelectorError:  # it asks for classes, which a file does not have
        return ()
    return tuple(one for one, yes in zip(view.plan.paths, mask, strict=True) if yes)


def _arrays(
    kind: str,
    path: Path,
    stored: Stored,
    target: Mapping[str, Any],
    wanted: Iterable[str],
) -> Iterator[tuple[str, Any]]:
    wanted = list(wanted)
    shardings = {one: _sharding(target.get(one)) for one in wanted}
    with _unreplaced(path, stored.version):
        asked = shardings if kind == "orbax" else wanted
        yield from zip(wanted, FORMATS[kind].read(path, stored, asked), strict=True)


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


def _sharding(leaf: Any) -> Any:
    if leaf is None or _is_key(leaf) or isinstance(leaf, jax.core.Tracer):
        return None
    return getattr(leaf, "sharding", None)


def _as_stored(leaf: Any) -> Any:
    """Return shape and dtype that a leaf has in a file."""
    return jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _like_key(like: Any) -> tuple[Any, ...]:
    return type(like).__name__, str(like.dtype), repr(getattr(like, "sharding", None))


def _placed(array: Any, like: Any) -> Any:
    """Bring an array to where the target's leaf is."""
    if _is_key(like):
        impls: list[Any] = []
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
        return jax.random.wrap_key_data(jnp.asarray(array), impl=impls[0])
    if isinstance(array, jax.Array):
        return array
    if isinstance(like, np.ndarray | np.generic):
        return np.asarray(array)
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return np.asarray(array)  # 64 bits, which JAX would cut in half here
    sharding = getattr(like, "sharding", None)
    return jax.device_put(np.asarray(array), sharding)


def _require_value(name: str, leaf: Any, *, host: bool) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise CheckpointError(
            f"The leaf {listing([name])} has no value: it is a {type(leaf).__name__}."
        )
    if not _is_key(leaf) and DTYPES.get(np.dtype(leaf.dtype).name) != leaf.dtype:
        raise CheckpointError(
            f"The leaf {listing([name])} is of dtype {leaf.dtype}, which no checkpoint "
            "holds."
        )
    if host and not getattr(leaf, "is_fully_addressable", True):
        raise CheckpointError(
            f"The leaf {listing([name])} lies on devices of other processes, too. "
            "Save as an Orbax folder."
        )


def _plain(leaf: Any, *, host: bool) -> Any:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf) if host else leaf


def _more(count: int) -> list[str]:
    return [f"  and {count - _SHOWN:,} more"] if count > _SHOWN else []
