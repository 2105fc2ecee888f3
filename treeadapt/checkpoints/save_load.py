"""Saving and loading: the leaves of a tree, by label path.

Takes a tree and the name of a checkpoint. What is loaded is compared with a target by
metadata before any array is read, so a false header does no harm. Python numbers are
saved as 0-d arrays; other static leaves, ``None`` and containers are not: they come
from the target. The state of an optimizer is a tree like any other.

``load`` goes from room to room in one direction: ``opening`` lists what a checkpoint
holds, ``migrated`` gives it other names, ``deciding`` compares it with the target,
``reading`` gives arrays and ``leaves`` places them. ``writing`` is for ``save``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, overload

import jax
import numpy as np

from treeadapt.checkpoints.accelerators import ToAccelerators
from treeadapt.checkpoints.deciding import (
    Wanted,
    decided,
    is_unlike,
    paths_to_load,
    relevant,
    require_count,
    require_fit,
    selected,
    source_that_fits,
    target_view,
)
from treeadapt.checkpoints.errors import named_path, reported
from treeadapt.checkpoints.leaves import (
    boxes_to_read,
    is_long,
    may_be_tied,
    placed,
    restored,
    restored_form,
    sharding_to_read,
    stored_form,
    to_array,
)
from treeadapt.checkpoints.load_report import LoadReport
from treeadapt.checkpoints.migrated import Source, named_migration, source_of, valueless
from treeadapt.checkpoints.next_call import (
    all_shards,
    likely_call,
    next_call,
    tables_that_take,
)
from treeadapt.checkpoints.opening import opened
from treeadapt.checkpoints.processes import agreed, spans_processes
from treeadapt.checkpoints.reading import extra_bytes, read_ahead, read_arrays
from treeadapt.checkpoints.record import TREE, Leaf, Stored
from treeadapt.checkpoints.remote import MAX_INFLIGHT_BYTES
from treeadapt.checkpoints.versions import watched
from treeadapt.checkpoints.writing import write
from treeadapt.errors import CheckpointError, MigrationError, TreeAdaptWarning
from treeadapt.migrations.box_parts import whole
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.moved_array import read_boxes
from treeadapt.migrations.tables.published import CONFIG
from treeadapt.selection.freeze_spec import FreezeSpec
from treeadapt.selection.rules import Rules, allowing
from treeadapt.selection.selectors import Unused, Where
from treeadapt.text.names import listing, natural, plural
from treeadapt.transforms.adapt import is_transformation
from treeadapt.trees.arrays import Tree
from treeadapt.trees.describing import describe
from treeadapt.trees.metadata import holds_nothing
from treeadapt.trees.paths import nested
from treeadapt.trees.views import TreeView, view_tree

#: A table, or the name of a file or of a published one.
MigrationLike: TypeAlias = Migration | str | os.PathLike[str]
#: One, or several of which exactly one must fit; None takes names as they are.
Migrations: TypeAlias = MigrationLike | Sequence[MigrationLike | None] | None
T = TypeVar("T")

_ALIKE = ("dtype", "sharding")  # what abstract leaves share that may be one array


def save(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    where: Where = "**",
    max_shard_bytes: int | None = None,
    unused: Unused = "error",
) -> None:
    """Write the arrays and Python numbers of a tree, named by their label paths.

    Whatever stood at ``path`` is replaced once all is written, and stays if writing
    fails. One array under two paths is stored once in safetensors. A Python number
    is stored as a 0-d bool, int64, float64 or complex128, typed PRNG keys as their
    integers; the metadata says so. Functions and classes are not data and not stored;
    a warning names other static leaves, such as text, that are not stored either, and
    one says so where nothing is.

    A name that ends in ``.schema.toml`` makes a schema: all this but the values, one
    line a leaf, for git and for checks without the arrays. Everything that reads
    metadata reads it.

    Several processes save to one Orbax folder: all must call this, each writes what its
    devices hold, and if one cannot go on, all raise the same error. For one that never
    comes, because its own tree has no paths or ``where`` fails, they wait five minutes.

    Args:
        path: ``.safetensors``, ``.schema.toml``, or no ending for an Orbax folder.
        tree: any tree. For safetensors its leaves come to the host; for a schema they
            may be abstract, or on devices of other processes.
        where: selects the leaves to save.
        max_shard_bytes: write ``path`` as a folder of safetensors shards with an index,
            as Hugging Face's tools do. No shard has more bytes of arrays, unless it is
            one larger leaf, and the leaves of one shard are on the host at a time.
        unused: ``"error"`` or ``"ignore"`` entries of ``where`` that match no array.

    Raises:
        CheckpointError: the format cannot hold a leaf, a leaf has no value here, the
            tree is a table such as ``Rules``, an optimizer, a function or None, or the
            file system refuses.
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
        >>> schema = file.with_suffix(".schema.toml")
        >>> save(schema, {"layers": layers, "step": 700})
        >>> print(schema.read_text().partition("[leaves]")[2].strip())
        "layers/0" = "float64[2,3]"
        "layers/1" = "bfloat16[3]"
        "step" = "int"
    """
    if isinstance(tree, Migration | Rules | FreezeSpec):
        raise CheckpointError(
            f"Got {describe(tree)} as the tree, which holds no arrays. Write its text: "
            "pathlib.Path('table.toml').write_text(table.to_toml())."
        )
    view, where = view_tree(tree), allowing(where, unused)
    leaves: dict[str, Any] = {}
    table: dict[str, Leaf] = {}
    first: dict[int, str] = {}
    lost: list[str] = []
    for (name, leaf), yes in zip(view.items(), selected(view, where), strict=True):
        form = stored_form(leaf)
        if not yes or (form is None and (callable(leaf) or holds_nothing(leaf))):
            continue
        if form is None or is_long(leaf):
            lost.append(name)
            continue
        table[name] = form
        # The path of a leaf that is the whole tree, or has an empty key, marks no tie.
        if may_be_tied(leaf) and name and first.setdefault(id(leaf), name) != name:
            table[name] = dataclasses.replace(form, owner=first[id(leaf)])
        else:
            leaves[name] = leaf
    idle = "" if table or lost else _nothing_saved(tree, view)
    arrays = ((name, to_array(name, leaf)) for name, leaf in leaves.items())
    write(path, arrays, table, max_shard_bytes)
    if idle:
        warnings.warn(idle, TreeAdaptWarning, stacklevel=2)
    if lost:
        warnings.warn(
            f"{plural(len(lost), 'leaf')} cannot be saved as an array and must come "
            f"from the target of load: {listing(lost)}.",
            TreeAdaptWarning,
            stacklevel=2,
        )


def _nothing_saved(tree: Any, view: TreeView) -> str:
    """Write that a checkpoint has nothing in it; empty where that is no surprise.

    Raises:
        CheckpointError: the tree is a function or a transformation, or None.
    """
    if is_transformation(tree):
        raise CheckpointError(
            "Got an optimizer as the tree, which holds no arrays. Save its state: "
            "opt_state = tx.init(params), or what tx.update returned last."
        )
    if tree is None or (callable(tree) and [path for path, _ in view.items()] == [""]):
        raise CheckpointError(
            f"Got {describe(tree)} as the tree, which holds no arrays. Pass a tree of "
            "arrays, such as the params or the model."
        )
    # The state of an optimizer may have none: Optax's are named tuples.
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: hasattr(node, "_fields"))
    if any(hasattr(node, "_fields") for node in nodes):
        return ""
    return "Nothing is saved: no array and no number of the tree is chosen."


@overload
def load(
    path: str | os.PathLike[str] | Any,
    *,
    where: Where = ...,
    migration: Migrations = ...,
    strict: bool = ...,
    cast: bool = ...,
    max_inflight_bytes: int = ...,
    decode: bool = ...,
    unused: Unused = ...,
) -> dict[str, Any]: ...


# Without a target these are dicts; but pyright 1.1 takes the first overload that a
# target of type Any fits, which therefore gives Any.
@overload
def load(
    path: str | os.PathLike[str] | Any,
    target: None,
    *,
    where: Where = ...,
    migration: Migrations = ...,
    strict: bool = ...,
    cast: bool = ...,
    max_inflight_bytes: int = ...,
    decode: bool = ...,
    unused: Unused = ...,
) -> Any: ...


@overload
def load(
    path: str | os.PathLike[str] | Any,
    target: T,
    *,
    where: Where = ...,
    migration: Migrations = ...,
    strict: bool = ...,
    cast: bool = ...,
    max_inflight_bytes: int = ...,
    decode: bool = ...,
    unused: Unused = ...,
) -> T: ...


def load(
    path: str | os.PathLike[str] | Any,
    target: Any = None,
    *,
    where: Where = "**",
    migration: Migrations = None,
    strict: bool = True,
    cast: bool = False,
    max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    decode: bool = True,
    unused: Unused = "error",
) -> Any:
    """Fill a tree like ``target`` with the leaves of a checkpoint.

    Shapes and dtypes are compared before any array is read. A leaf goes where that of
    ``target`` is: to its sharding, or to NumPy; an abstract one to its sharding if it
    has one, else to JAX's default device. Where that is of an abstract mesh, as
    ``jax.eval_shape`` makes it, it is on the mesh of ``jax.set_mesh``, or of the other
    leaves, with the same axes. Of ``.safetensors``, one leaf is read at a time, and of
    it what this process's devices need, through a migration too
    (``MigrationPlan.gathered`` lists exceptions). To accelerators, up to 256 MiB are
    read ahead, and what only moves numbers runs there. Orbax and Flax take all leaves
    at once; those that a migration moves, Orbax takes one group or 256 MiB at a time. A
    Python number fits any 0-d leaf of its kind (bool, integer, floating or complex)
    that holds its value exactly.

    If leaves of ``target`` are on devices of several processes, all of these must call
    this, and if one cannot go on, all raise the same error.

    Args:
        path: a ``.safetensors``, ``.npz`` or Flax ``.msgpack`` file, one that PyTorch's
            ``torch.save`` wrote, a folder of Orbax, or one of shards with their index
            or of one ``.safetensors`` or ``.bin`` file, written by any library; or the
            URL of one, ``gs://``, ``s3://``, ``https://`` or any other that fsspec
            reads, from which of safetensors and PyTorch's files only headers and what
            is needed are read. If a folder holds two checkpoints, name the file or the
            index that is meant; of numbered steps the last complete one is read, and a
            warning names it. A schema has no arrays for a ``target``; without one it
            gives abstract leaves. Or a tree of arrays in memory: by the same rules
            ``target`` takes what fits. Arrays of JAX go from device to device, and the
            result may hold the tree's own arrays.
        target: tree, concrete or abstract; gives classes, static leaves and every leaf
            that is not loaded, also Python numbers that the checkpoint lacks. None for
            nested dicts of what is stored, with arrays of NumPy.
        where: selects the leaves of ``target`` to load, or without one of the
            checkpoint; anything else that is stored is ignored then. With a migration,
            it selects new names, and with a target only rows that could make one of the
            selected leaves must fit.
        migration: gives what is stored other names and axes; its rows name leaves as
            ``read_metadata`` does. Every stored leaf needs a row, whatever ``strict``
            is, unless ``where`` leaves some of the target out and the others are
            filled; only what the selected leaves are made of is read. What ``new=``
            fills with zeros counts as stored. Of a list, for several layouts of one
            model, exactly one must fit; None in it takes names as they are. A path or
            text names a file, a text also a published table, as for ``load_migration``;
            its sizes, and of a layout its model type, come from the ``config.json``
            next to the weights.
        strict: refuse unless all that is selected fits. Without it, leaves that are
            missing, misshaped or retyped stay as they are in ``target``, which a
            warning lists, and what is unexpected is left out; ``compare_checkpoint``
            lists all. The rows of the selected leaves must fit anyway, and so must what
            their functions make, which is known too late for the report.
        cast: turn arrays into the dtypes of ``target``, integers into floating-point
            numbers too but not back. A value that becomes infinite, and an integer that
            the new dtype does not hold exactly, is an error.
        max_inflight_bytes: how much of a remote checkpoint may be on the host that is
            not in the result, next to the largest shard of this process.
        decode: give an array that is published as codes and scales (FP8, MXFP4, packed
            integers) as the numbers that these mean, as one leaf, in the dtype that the
            ``config.json`` next to it states, else in that of its scales or bfloat16.
            Parts that are not together are an error. Where ``target`` has all parts of
            an array, they stay as they are stored. False gives each leaf as it is
            stored.
        unused: ``"error"`` or ``"ignore"`` entries of ``where`` that match no array.

    Returns:
        Tree with the treedef of ``target``. Paths that were tied when saved share one
        array if they do in ``target``, or if its leaves there are abstract and alike.

    Raises:
        CheckpointError: the checkpoint cannot be read, or ``strict`` and it does not
            fit; the message lists all misfits; or ``target`` is a function, or has
            shardings in the place of arrays.
        MigrationError: instead, with a migration; the message also lists all that is
            wrong with its rows; of several, how each misses, or which fit. Copies
            that differ, and a padding that is not zero, are found when they are read;
            nothing was put into ``target`` then.
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
        >>> save(file, {f"layers.{n}.bias": np.full(2, n) for n in range(3)})
        >>> stack = Migration({"layers.{n}.bias : e": "blocks/bias : n e"})
        >>> load(file, migration=stack)["blocks"]["bias"].tolist()
        [[0, 0], [1, 1], [2, 2]]
    """
    where, is_whole = allowing(where, unused), _selects_all(where)
    if isinstance(target, str | os.PathLike):
        named_path(path)  # which refuses a tree, because the name comes first
    view = None if target is None else target_view(target)
    is_shared = view is not None and any(map(spans_processes, view.leaves))
    together = agreed("load") if is_shared else contextlib.nullcontext(str)
    likes = None if view is None else view.flat()
    with (
        together as told,
        opened(path, max_inflight_bytes, told, decode=decode, likes=likes) as stored,
    ):
        if view is not None:
            stored.require_arrays()
        wanted = Wanted(where, view, strict, cast, is_whole)
        source, _ = _source(path, stored, migration, wanted)
        if view is None:
            source.problems.raise_any()
            require_count(source, wanted)
            loaded = _as_stored(source, where)
        else:
            report = decided(source, wanted)
            if not report.misfits:
                require_count(source, wanted)
            require_fit(source, report, wanted)
            loaded = _filled(view, source, report.restored)
        # Of a load that fails, only the error counts.
        for text in filter(None, (*source.remarks, source.stored.left_out_text)):
            warnings.warn(text, TreeAdaptWarning, stacklevel=2)
        return loaded


def _source(
    path: str | os.PathLike[str],
    stored: Stored,
    migration: Migrations,
    wanted: Wanted,
) -> tuple[Source, int | None]:
    """Return the leaves that can be loaded, and which of several migrations fits."""
    folders = [path] if isinstance(path, str | os.PathLike) else []
    is_list = isinstance(migration, Sequence) and not isinstance(migration, str | bytes)
    names: Sequence[Any] = migration if is_list else [migration]  # type: ignore[assignment]
    try:
        tables = [named_migration(each, *folders) for each in names]
    except MigrationError as error:
        paths = [each for each in names if isinstance(each, str | os.PathLike)]
        # What is wrong in a file of one's own is corrected there.
        if all(map(_is_own_table, paths)):
            raise
        calls = tables_that_take(stored, names[0], wanted.likes)
        if not calls and wanted.likes is not None:
            calls = [next_call(stored.without_boxes(wanted.likes), wanted.likes)]
        raise MigrationError("\n".join([str(error), *calls])) from None
    if is_list:
        return source_that_fits(stored, tables, wanted)
    source = source_of(stored, tables[0], wanted.likes, cast=wanted.cast)
    if not {"unmatched", "unused"}.isdisjoint(source.problems.texts):
        source.problems.advice += tables_that_take(
            stored, tables[0].published, wanted.likes
        )
    if source.problems.texts:
        source.problems.lead = all_shards(stored)
    return relevant(source, wanted), None


def _is_own_table(path: str | os.PathLike[str]) -> bool:
    return os.path.isfile(path) and os.path.basename(path) != CONFIG


def _selects_all(where: Any) -> bool:
    return isinstance(where, str) and where == "**"


def _as_stored(source: Source, where: Any) -> Any:
    """Return nested dicts of what can be loaded, as it is stored."""
    source.problems.raise_any()
    table = source.stored.table
    paths = paths_to_load(source, where)
    leaves: dict[str, Any] = dict.fromkeys(paths)
    nested(leaves)  # which refuses some paths, before any array is read
    if source.stored.is_abstract:
        with reported(source.stored.path, "read"):
            leaves = {path: restored_form(table[path]) for path in paths}
    else:
        ties: dict[str, list[str]] = {}
        for path in paths:
            ties.setdefault(table[path].owner or path, []).append(path)
        tied = {names[0]: names for names in ties.values()}
        arrays = read_ahead(source.stored, source.read(dict.fromkeys(tied)))
        for path, array in arrays:
            with reported(source.stored.path, "read"):
                leaf = restored(table[path], array)
            leaves |= dict.fromkeys(tied[path], leaf)
            del array, leaf  # before the next leaves are read
    return leaves[""] if [*leaves] == [""] else nested(leaves)


def _filled(view: TreeView, source: Source, paths: Iterable[str]) -> Any:
    """Return a target with the leaves of these paths, each where the target's is."""
    likes, leaves, table = view.flat(), view.flat(), source.stored.table
    ties: dict[Any, list[str]] = {}
    for path in paths:
        key: Any = id(likes[path])
        if isinstance(likes[path], jax.ShapeDtypeStruct):  # it may be tied, or not
            key = tuple(getattr(likes[path], name, None) for name in _ALIKE)
        ties.setdefault((table[path].owner or path, key), []).append(path)
    tied = {names[0]: names for names in ties.values()}
    places = {path: sharding_to_read(path, table[path], likes[path]) for path in tied}
    owners = set()
    mover = ToAccelerators(
        source.stored.path, {path: likes[path] for path in tied}, source.groups or {}
    )
    for path, array in read_ahead(
        source.stored,
        mover.arrays(source.read(places)),
        lambda path, array: boxes_to_read(likes[path], array.shape),
    ):
        owner, like = table[path].owner or path, likes[path]
        is_own = source.stored.format == TREE and not isinstance(like, np.ndarray)
        # The target has two; or JAX may take its memory, which is the caller's.
        if (owner in owners or is_own) and isinstance(array, np.ndarray):
            array = array.copy()
        owners.add(owner)
        with reported(source.stored.path, "read"):
            leaf = placed(path, array, like)
        leaves |= dict.fromkeys(tied[path], leaf)
        del array, leaf  # before the next leaves are read
    if mover.lacking:
        warnings.warn(
            f"{plural(len(mover.lacking), 'array')} moved on the host, which takes "
            "longer, because a device has no room for it twice: "
            f"{listing(mover.lacking)}.",
            TreeAdaptWarning,
            stacklevel=3,
        )
    return view.replace(leaves)


def compare_checkpoint(
    path: str | os.PathLike[str] | Any,
    target: Tree,
    *,
    where: Where = "**",
    migration: Migrations = None,
    cast: bool = False,
    decode: bool = True,
    unused: Unused = "error",
) -> LoadReport:
    """Report how a checkpoint fits a target; only metadata and numbers are read.

    Args:
        path: as for ``load``. The numbers of a schema fit by their kind.
        target: as for ``load``.
        where: as for ``load``.
        migration: as for ``load``; the report has new names, and says which of a list
            fits, or which published table a text means.
        cast: as for ``load``.
        decode: as for ``load``; the report says which leaves are decoded, and how.
        unused: as for ``load``.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        MigrationError: the rows do not fit what is stored, or of several migrations
            none fits, or more than one.
        UnusedRuleError: an entry of ``where`` selects no array or number.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> save(file, {"w": np.ones(2), "step": 700})
        >>> print(compare_checkpoint(file, {"w": np.zeros(2), "step": 0}))
        2 leaves fit.
        1 number changed:
          'step': 700, the target has 0
    """
    if isinstance(target, str | os.PathLike):
        named_path(path)
    view, is_whole = target_view(target), _selects_all(where)
    wanted = Wanted(allowing(where, unused), view, cast=cast, is_whole=is_whole)
    with opened(path, decode=decode, likes=wanted.likes) as stored:
        source, place = _source(path, stored, migration, wanted)
        source.problems.raise_any()
        report = decided(source, wanted)
        likes, extra = wanted.likes or {}, 0
        if not source.migrates:
            extra = extra_bytes(
                stored,
                source.read(dict.fromkeys(report.restored)),
                lambda name, array: boxes_to_read(likes[name], array.shape),
            )
        hint = ""
        if is_unlike(report) and not source.migrates:
            hint = likely_call(source.first.stored, likes, wanted.random)
    return dataclasses.replace(
        report,
        hint=hint,
        migration=place,
        extra_bytes=extra,
        decoded=dict(stored.decoded),
        plain_float8=stored.plain_float8,
        left_out=source.stored.left_out,
    )


def copy(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    migration: Migration | None = None,
    target: Any = None,
    original: Stored | None = None,
    max_shard_bytes: int | None = None,
    decode: bool = True,
    progress: Callable[[str], None] = lambda _: None,
    written: Callable[[int], None] | None = None,
    replaceable: Collection[str] = (),
) -> None:
    """Write a checkpoint again, in another format or under new names.

    Args:
        source: a checkpoint of any format.
        path: where to write; it is replaced once all is written.
        migration: as for ``load``.
        target: tree that solves sizes of the migration, and whose form new leaves have.
        original: checkpoint whose shapes ``target`` has; its arrays are read where the
            migration keeps what the target has.
        max_shard_bytes: as for ``save``.
        decode: as for ``load``.
        progress: called with the path of each leaf that is about to be written.
        written: called now and then, from another thread, with how many bytes are on
            disk.
        replaceable: names of files in the folder ``path`` that go with what is there.

    Raises:
        CheckpointError: one cannot be read, or the other not written.
        MigrationError: the rows do not fit what is stored.
    """
    likes = None if target is None else view_tree(target).flat()
    with opened(source, decode=decode) as stored:
        if migration is not None and original is not None:
            lacking = dict.fromkeys(valueless(stored, migration, likes))
            with watched(original.path, original.version):
                arrays_kept = read_arrays(original, lacking)
                likes = {**(likes or {}), **{p: np.asarray(a) for p, a in arrays_kept}}
        renamed = source_of(stored, migration, likes, cast=False)
        renamed.problems.lead = all_shards(stored) if renamed.problems.texts else ""
        renamed.problems.raise_any()
        require_count(renamed, Wanted("**", is_whole=True))
    table = dict(renamed.stored.table)
    wanted = {name: None for name, leaf in table.items() if not leaf.owner}

    kept = sorted(renamed.kept, key=natural)
    for name in kept:
        leaf = original.table[name] if original else stored_form((likes or {})[name])
        assert leaf is not None
        table[name] = dataclasses.replace(leaf, owner="")

    def arrays() -> Iterator[tuple[str, Any]]:
        # So that nothing is put in place if another checkpoint came meanwhile.
        with watched(stored.path, stored.version):
            for name, array in read_ahead(renamed.stored, renamed.read(wanted)):
                progress(name)
                (host,) = read_boxes(array, [whole(array.shape)])
                yield name, np.asarray(host, order="C")
                del array, host  # before the next leaves are read
        for name in kept:
            progress(name)
            yield name, np.asarray((likes or {})[name])

    write(path, arrays(), table, max_shard_bytes, written, replaceable)


def read_metadata(
    path: str | os.PathLike[str], *, decode: bool = True
) -> dict[str, jax.ShapeDtypeStruct]:
    """Read the names, shapes and dtypes of a checkpoint, and no array.

    Args:
        path: as for ``load``; only the headers of ``.safetensors`` and ``.npz`` files
            and the metadata of Orbax folders are read, but all of a ``.msgpack`` file.
        decode: as for ``load``.

    Returns:
        Flat dict of abstract leaves, in the order of the file; an abstract tree for
        ``summarize``, ``param_labels`` and ``tree_diff``. Where Orbax or Flax wrote
        boxes, so that every path ends in ``/value``, that is left out.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with opened(path, decode=decode) as stored:
        return stored.without_boxes().leaves
