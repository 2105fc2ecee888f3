"""Checkpoints as Orbax folders: Orbax's reader and writer.

Leaves are saved as nested dicts, one level a segment. Orbax 0.12.8 joins names with
dots (``param_name_from_keypath``), so that ``a.b`` and ``b`` in ``a`` come back as one
array, and makes file names of them (orbax#304): every segment is percent-encoded first.
Arrays are saved and restored with their shardings, piece by piece, as Orbax does it.
Tied leaves are written twice, and marked. A leaf without elements is an error, because
Orbax cannot store it.

Of several processes each writes and reads what is on its devices. Orbax's checkpointers
would let all wait for one that failed, so ``begin``, ``write`` and ``finish`` use its
handler, which waits for nobody; ``writing`` calls them in all processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax
import numpy as np

from treeadapt.checkpoints.errors import refuse
from treeadapt.checkpoints.processes import spans_processes
from treeadapt.checkpoints.record import (
    MAX_LEAVES,
    NUMBER,
    Leaf,
    Stored,
    abstract,
    marked,
    sound_marks,
)
from treeadapt.checkpoints.remote import AnyPath, RemotePath
from treeadapt.checkpoints.schema_file import marks_of
from treeadapt.errors import CheckpointError, PathCollisionError
from treeadapt.text.names import listing
from treeadapt.trees.arrays import is_array
from treeadapt.trees.paths import nested, segment

METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"  # of a step, which may hold several items
_MAX_METADATA_BYTES = 64 * 2**20
_PATIENCE_S = 10  # for threads of Orbax, once one of them has failed
_ANSWERS_S = 0.5  # for those of TensorStore, which nothing can wait for
_MAX_ENTRIES = 10 * MAX_LEAVES
# What Orbax writes of a tree, as paths in its folder.
_OWN = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|commit_success\.txt"
    r"|array_metadatas(/process_\d+)?|ocdbt\.process_\d+"
    r"|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d(/[0-9a-f]{32})?)"
)
_OUTWARD = re.compile(r"^\.\.?$|^/|\.\./|[\0\\]")
_EMPTY = "%E"  # an empty segment; no quoted text has it
_MARK = "treeadapt"  # in the folder's own metadata: its names are escaped


def others(path: Path) -> list[str] | None:
    """Return what Orbax did not write of a folder; None if it is not a checkpoint."""
    if not (path / METADATA).is_file():
        return None
    entries = _entries(path).items()
    return [name for name, link in entries if link or not _OWN.fullmatch(name)]


def checkpoints(path: AnyPath) -> list[AnyPath]:
    """Return the metadata of a checkpoint in a folder, or of a step with its items.

    A folder that is no step has each checkpoint in it. Those that are being written are
    left out.
    """
    metadata = path / METADATA
    if metadata.is_file():
        return [metadata]
    found = (file.parent for file in path.glob(f"[!.]*/{METADATA}"))
    items = [item for item in found if "orbax-checkpoint-tmp" not in item.name]
    if len(items) > 1 and {item.name for item in items} <= _stated_items(path):
        return [path / STEP_METADATA]
    return items


def parts(path: AnyPath) -> Iterator[AnyPath]:
    """Give what changes if another checkpoint comes to a folder."""
    for folder in _items(path).values():
        yield from (folder, folder / METADATA, folder / "manifest.ocdbt")


def read_metadata(path: AnyPath) -> Stored:
    """Read names, shapes and dtypes; no array is loaded.

    Several items of a step are one tree, each below its name.

    Raises:
        CheckpointError: it is not a checkpoint, or leads out of its folder.
    """
    items = {name: _read_item(path, it, name) for name, it in _items(path).items()}
    if [*items] == [""]:
        return items[""]
    table: dict[str, Leaf] = {}
    for name, stored in items.items():
        for inner, leaf in stored.table.items():
            owner = leaf.owner and f"{name}/{leaf.owner}"
            table[f"{name}/{inner}"] = dataclasses.replace(leaf, owner=owner)
    boxed = any(stored.boxed for stored in items.values())
    doubts = (doubt for stored in items.values() for doubt in stored.doubts)
    return Stored(path, table, boxed=boxed, doubts=tuple(doubts))


def _read_item(path: AnyPath, folder: AnyPath, item: str) -> Stored:
    """Read the metadata of one item of a step, or of the only folder."""
    import orbax.checkpoint as ocp

    # TensorStore follows links, out of the folder and to any file of this machine,
    # and takes whatever bytes are there for numbers (orbax#3375).
    outward = []
    if isinstance(folder, Path):
        blobs = _blobs(folder)
        outward = [
            name
            for name, is_link in _entries(folder).items()
            if is_link and (folder / name).resolve().parent != blobs
        ]
    if outward:
        cure = "Copy the files themselves into it."
        refuse(path, f"{listing(outward, limit=3)} in it is a link", cure)
    marks = _marks(path, folder)
    with _checkpointer() as checkpointer:
        tree = _tree(checkpointer, folder)
    key_kinds = _key_kinds(path, folder)
    table: dict[str, Leaf] = {}
    for keys, value in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_array):
        if not is_array(value):
            continue
        segments = [segment(key) for key in keys]
        kind = str(key_kinds.get(".".join(segments), ""))
        if isinstance(value, ocp.metadata.ScalarMetadata):
            kind = NUMBER
        name = "/".join(segments if marks is None else map(unescape_segment, segments))
        if name in table:
            refuse(path, f"two leaves are named {listing([name])}")
        leaf = abstract(path, name, tuple(value.shape), str(value.dtype))
        table[name] = Leaf(leaf, kind, (item, keys))
    if marks is None:
        return Stored(path, table, boxed=True)
    # Orbax stores tied leaves too, each by itself.
    marks = sound_marks(path, marks)
    ties = {
        name: owner
        for name, owner in marks["ties"].items()
        if name in table and owner in table and owner not in marks["ties"]
        if table[name].array == table[owner].array
    }
    plain = {name: leaf for name, leaf in table.items() if name not in ties}
    stored = marked(path, plain, {**marks, "ties": ties})
    doubts = [
        f"{listing([name])} in it is not {listing([owner])}"
        for name, owner in marks["ties"].items()
        if name not in ties
    ]
    return dataclasses.replace(stored, doubts=(*stored.doubts, *doubts))


def read(stored: Stored, wanted: Mapping[str, Any]) -> list[Any]:
    """Read leaves, all that are wanted of an item in one go, each to its sharding.

    Args:
        stored: what ``read_metadata`` returned.
        wanted: by path the sharding to give the leaf; None for a NumPy array.
    """
    likes: dict[str, dict[Any, Any]] = {}
    for path, sharding in wanted.items():
        leaf = stored.table[path]
        item, keys = leaf.key
        likes.setdefault(item, {})[keys] = leaf.array.update(sharding=sharding)
    folders = _items(stored.path)
    arrays = {item: _restored(folders[item], like) for item, like in likes.items()}
    keys_by_path = (stored.table[path].key for path in wanted)
    return [arrays[item][keys] for item, keys in keys_by_path]


def _restored(folder: AnyPath, likes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Read leaves of one folder, by their keys."""
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        # The restored tree must be of the stored lists and dicts, with a mark where
        # nothing is to be read.
        item = jax.tree_util.tree_map_with_path(
            lambda keys, _: likes.get(keys, ocp.PLACEHOLDER),
            _tree(checkpointer, folder),
            is_leaf=is_array,
        )
        types = ocp.checkpoint_utils.construct_restore_args(item)
        args = ocp.args.PyTreeRestore(item, restore_args=types)
        restored = checkpointer.restore(_absolute(folder), args=args)
    return dict(jax.tree_util.tree_leaves_with_path(restored))


def begin(path: Path) -> None:
    """Make the folder that all processes write to; one of them does."""
    path.mkdir()
    (path / "array_metadatas").mkdir()  # which Orbax's other processes wait for


def write(path: Path, arrays: Mapping[str, Any], table: Mapping[str, Leaf]) -> None:
    """Write what this process has of arrays, to a folder that ``begin`` made.

    They stay on their devices until Orbax takes them. Of one that each process has for
    itself, process 0 writes its own.

    Args:
        path: of the folder.
        arrays: by label path.
        table: all leaves, also those that are tied to one of the arrays.

    Raises:
        CheckpointError: a leaf has no elements.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    leaves = {name: arrays[leaf.owner or name] for name, leaf in table.items()}
    empty = [name for name, leaf in leaves.items() if 0 in leaf.shape]
    if empty:
        raise CheckpointError(
            f"The leaf {listing(empty[:1])} has no elements, which Orbax cannot "
            "store. Save as .safetensors."
        )
    if jax.process_count() > 1:
        leaves = {
            name: leaf if spans_processes(leaf) else np.asarray(leaf)
            for name, leaf in leaves.items()
        }
    escaped = {
        "/".join(map(escape_segment, name.split("/"))): leaf
        for name, leaf in leaves.items()
    }
    try:
        tree = nested(escaped)
    except PathCollisionError:
        tree = {escape_segment(name): leaf for name, leaf in leaves.items()}
    args = ocp.args.PyTreeSave(tree, custom_metadata={_MARK: marks_of(table)})
    with _quiet(), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        handler.save(epath.Path(path.absolute()), args=args)


def finish(path: Path) -> None:
    """Complete a folder that all processes have written to; one of them does."""
    import orbax.checkpoint as ocp
    from etils import epath

    with _quiet(), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        handler.finalize(epath.Path(path.absolute()))
        now = path.stat().st_mtime_ns
        document = {
            "item_handlers": handler.typestr(),
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            "custom_metadata": {},
        }
    (path / STEP_METADATA).write_text(json.dumps(document), "utf-8")
    # Orbax takes a folder without it for unfinished where a store cannot rename one,
    # such as gs:// (``CommitFileTemporaryPath`` in its path/atomicity.py).
    (path / "commit_success.txt").touch()


def escape_segment(segment: str) -> str:
    """Write one segment as a name that is safe in any file system and store.

    Example:
        >>> [escape_segment(name) for name in ("kernel", "..", "a.b/c", "")]
        ['kernel', '%2E%2E', 'a%2Eb%2Fc', '%E']
    """
    # ``quote`` leaves dots and tildes, which file systems and Orbax give a meaning.
    text = quote(segment, safe="", errors="surrogatepass")
    return text.replace(".", "%2E").replace("~", "%7E") or _EMPTY


def unescape_segment(text: str) -> str:
    """Return the segment that ``escape_segment`` wrote.

    Example:
        >>> unescape_segment(escape_segment("a.b/ü"))
        'a.b/ü'
    """
    return "" if text == _EMPTY else unquote(text, errors="surrogatepass")


def _items(path: AnyPath) -> dict[str, AnyPath]:
    """Return the folders of a checkpoint, by the names of their items.

    The only item of a step has no name, and neither has a folder that is no step.
    """
    first, *_ = checkpoints(path)
    if first.name == STEP_METADATA:
        names = sorted(_stated_items(path))
        folders = {name: path / name for name in names}
        return {n: it for n, it in folders.items() if (it / METADATA).is_file()}
    return {"": path if first.name == METADATA else first}


def _stated_items(path: AnyPath) -> set[str]:
    """Return the names of the items that a step says it has; none if it is no step."""
    file = path / STEP_METADATA
    document = _json(path, file) if file.is_file() else {}
    stated = document.get("item_handlers") if isinstance(document, dict) else None
    names = stated if isinstance(stated, dict) else {}
    return {name for name in names if not _OUTWARD.search(name) and "/" not in name}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax from printing, in each of its threads, an error that it raises, too.

    What it logs is passed on if nothing is raised. TensorStore may answer after Orbax
    has closed its event loop: Python then prints that a callback failed, which only a
    hook of the process could keep back.
    """
    logger = logging.getLogger("absl")
    earlier = {*threading.enumerate()}
    records: list[logging.LogRecord] = []

    def is_passed(record: logging.LogRecord) -> bool:
        is_kept = bool(record.exc_info) and "orbax" in record.pathname
        if is_kept:
            records.append(record)
        return not is_kept

    logger.addFilter(is_passed)
    try:
        yield
    except Exception:
        records.clear()
        for thread in {*threading.enumerate()} - earlier:
            if type(thread).__module__.startswith("orbax."):
                thread.join(_PATIENCE_S)
        threading.Event().wait(_ANSWERS_S)
        raise
    finally:
        logger.removeFilter(is_passed)
        for record in records:
            logger.handle(record)


def _checkpointer() -> Any:
    """Return Orbax's reader, which does not wait for other processes."""
    import orbax.checkpoint as ocp

    index = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _absolute(folder: AnyPath) -> Any:
    """Return what Orbax takes: of a remote folder the URL as it is."""
    from etils import epath

    if isinstance(folder, RemotePath):
        return epath.Path(folder.full)
    return folder.absolute()


def _blobs(folder: Path) -> Path | None:
    """Return the folder that all files of a folder in Hugging Face's cache are in."""
    parents = folder.resolve().parents
    caches = (each.with_name("blobs") for each in parents if each.name == "snapshots")
    return next(caches, None)


def _entries(folder: Path) -> dict[str, bool]:
    """Return all paths below a folder, relative to it, and which of them are links."""
    files = [*itertools.islice(folder.rglob("*"), _MAX_ENTRIES + 1)]
    if len(files) > _MAX_ENTRIES:
        refuse(folder, "it holds too many files")
    return {file.relative_to(folder).as_posix(): file.is_symlink() for file in files}


def _tree(checkpointer: Any, folder: AnyPath) -> Any:
    """Return the metadata of each leaf, in the stored dicts and lists."""
    metadata = checkpointer.metadata(_absolute(folder)).item_metadata
    if metadata is None:  # Orbax says so in its log only
        refuse(folder, "its metadata is damaged")
    return metadata.tree


def _marks(path: AnyPath, folder: AnyPath) -> Any:
    """Return what ``write`` said of the leaves, once all names are safe."""
    document = _json(path, folder / METADATA)
    entries = document["tree_metadata"]
    if len(entries) > MAX_LEAVES:
        refuse(path, f"it has {len(entries):,} leaves")
    for entry in entries.values():
        for key in entry["key_metadata"]:
            text = str(key["key"])
            if _OUTWARD.search(text):
                refuse(path, f"the name {listing([text])} leads out of it")
    return (document.get("custom_metadata") or {}).get(_MARK)


def _key_kinds(path: AnyPath, folder: AnyPath) -> dict[str, str]:
    """Return the kinds of the typed PRNG keys that Orbax turned to integers."""
    file = folder / "array_metadatas" / "process_0"
    if not file.is_file():
        return {}
    entries = _json(path, file)["array_metadatas"]
    facts = [entry["array_metadata"] for entry in entries]
    return {
        each["param_name"]: each["ext_metadata"]["random_key_impl"]
        for each in facts
        if "random_key_impl" in (each["ext_metadata"] or {})
    }


def _json(path: AnyPath, file: AnyPath) -> Any:
    if file.stat().st_size > _MAX_METADATA_BYTES:
        refuse(path, "its metadata is too large")
    return json.loads(file.read_text("utf-8"))
