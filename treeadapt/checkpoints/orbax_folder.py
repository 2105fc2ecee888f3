"""Checkpoints as Orbax folders: Orbax's reader and writer.

Leaves are saved as nested dicts, one level a segment; Orbax joins names with dots and
makes file names of them, so every segment is percent-encoded first. Arrays are saved
and restored with their shardings, piece by piece, as Orbax does it. Tied leaves are
written twice, and a leaf without elements is an error, because Orbax cannot store it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.checkpoints.common import (
    MAX_LEAVES,
    NUMBER,
    Stored,
    abstract,
    escape_segment,
    marked,
    marks,
    nested,
    refuse,
    unescape_segment,
)
from treeadapt.errors import CheckpointError, PathCollisionError
from treeadapt.names import listing
from treeadapt.paths import segment

_METADATA = "_METADATA"
_MAX_METADATA_BYTES = 64 * 2**20
# What Orbax writes of a tree, as paths in its folder.
_OWN = re.compile(
    r"_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|commit_success\.txt"
    r"|array_metadatas(/process_\d+)?|ocdbt\.process_\d+"
    r"|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d(/[0-9a-f]{32})?)"
)
_OUTWARD = re.compile(r"^\.\.?$|^/|\.\./|[\0\\]")
_MARK = "treeadapt"  # in the folder's own metadata: its names are escaped


def require_own(path: Path) -> None:
    """Raise unless a folder is one checkpoint and holds nothing else.

    Raises:
        CheckpointError: it is not a checkpoint, or holds what Orbax does not write.
    """
    if not (path / _METADATA).is_file():
        raise CheckpointError(
            f"The folder {listing([str(path)])} is not a checkpoint and is not "
            f"replaced. {_proposal(path) or 'Choose another name.'}"
        )
    others = [name for name, link in _entries(path) if link or not _OWN.fullmatch(name)]
    if others:
        raise CheckpointError(
            f"The checkpoint {listing([str(path)])} is not replaced, because it holds "
            f"what Orbax did not write: {listing(others)}. Move that away, or choose "
            "another name."
        )


def read_metadata(path: Path) -> Stored:
    """Read names, shapes and dtypes; no array is loaded.

    Raises:
        CheckpointError: it is not a checkpoint, or leads out of its folder.
    """
    import orbax.checkpoint as ocp

    folder = _folder(path)
    # TensorStore follows links, out of the folder and to any file of this machine.
    links = [name for name, is_link in _entries(folder) if is_link]
    if links:
        refuse(path, f"{listing(links)} in it is a link")
    document = _document(path, folder)
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = _tree(checkpointer, folder)
    own = (document.get("custom_metadata") or {}).get(_MARK)
    own_keys = _key_kinds(folder)
    leaves, names, kinds = {}, {}, {}
    pairs = jax.tree_util.tree_flatten_with_path(found, is_leaf=is_array)[0]
    for keys, value in pairs:
        segments = [segment(key) for key in keys]
        stored_name = ".".join(segments)
        if not is_array(value):
            continue
        if own is not None:
            segments = [unescape_segment(text) for text in segments]
        name = "/".join(segments)
        if name in leaves:
            refuse(path, f"two leaves are named {listing([name])}")
        leaves[name] = abstract(path, name, tuple(value.shape), str(value.dtype))
        names[name] = keys
        if isinstance(value, ocp.metadata.ScalarMetadata):
            kinds[name] = NUMBER
        elif stored_name in own_keys:
            kinds[name] = own_keys[stored_name]
    if own is None:
        return Stored(leaves, names, kinds=kinds, boxed=True)
    return marked(path, leaves, names, own)


def read(path: Path, stored: Stored, wanted: Mapping[str, Any]) -> list[Any]:
    """Read leaves, all that are wanted in one go, each to its sharding.

    Args:
        path: the folder.
        stored: its metadata.
        wanted: by path the sharding to give the leaf; None for a NumPy array.
    """
    import orbax.checkpoint as ocp

    if not wanted:
        return []
    likes = {}
    for one, sharding in wanted.items():
        leaf = stored.leaves[one]
        like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        likes[stored.names[one]] = like
    folder = _folder(path)
    with ocp.PyTreeCheckpointer() as checkpointer:
        # The restored tree must be of the stored lists and dicts, with a mark where
        # nothing is to be read.
        item = jax.tree_util.tree_map_with_path(
            lambda keys, _: likes.get(keys, ocp.PLACEHOLDER),
            _tree(checkpointer, folder),
            is_leaf=is_array,
        )
        restored = checkpointer.restore(
            folder.absolute(),
            args=ocp.args.PyTreeRestore(
                item,
                restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            ),
        )
    found = dict(jax.tree_util.tree_flatten_with_path(restored)[0])
    return [found[stored.names[one]] for one in wanted]


def write(
    path: Path,
    leaves: Iterable[tuple[str, Any]],
    ties: Mapping[str, str],
    kinds: Mapping[str, str],
) -> None:
    """Write leaves, which stay on their devices until Orbax takes them.

    Raises:
        CheckpointError: a leaf has no elements.
    """
    import orbax.checkpoint as ocp

    # Orbax knows arrays of NumPy, but few of the scalars.
    found = {
        name: np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
        for name, leaf in leaves
    }
    found |= {other: found[one] for other, one in ties.items()}
    for name, leaf in found.items():
        if 0 in leaf.shape:
            raise CheckpointError(
                f"The leaf {listing([name])} has no elements, which Orbax cannot "
                "store. Save as .safetensors."
            )
    segments = {name: tuple(map(escape_segment, name.split("/"))) for name in found}
    try:
        tree = nested({segments[name]: leaf for name, leaf in found.items()})
    except PathCollisionError:
        tree = {escape_segment(name): leaf for name, leaf in found.items()}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(
            path.absolute(),
            args=ocp.args.PyTreeSave(tree, custom_metadata={_MARK: marks({}, kinds)}),
        )


def _folder(path: Path) -> Path:
    """Return the folder itself, or the only item of a step."""
    if (path / _METADATA).is_file():
        return path
    items = _items(path)
    if len(items) == 1:
        return items[0]
    what = "it holds several" if items else "it is not an Orbax checkpoint"
    return refuse(path, what, _proposal(path))


def _items(path: Path) -> list[Path]:
    """Return the checkpoints in a folder, without those that are being written."""
    found = (file.parent for file in path.glob(f"[!.]*/{_METADATA}"))
    return [item for item in found if "orbax-checkpoint-tmp" not in item.name]


def _proposal(path: Path) -> str:
    """Name the checkpoints below a folder, such as the steps of a manager."""
    steps = [step for step in path.glob("[!.]*") if "-tmp" not in step.name]
    names = [str(item) for folder in (path, *steps) for item in _items(folder)]
    names.sort(key=lambda name: re.sub(r"\d+", lambda n: n[0].zfill(20), name))
    return f"It holds {listing(names[::-1])}. Name one of them." if names else ""


def _entries(folder: Path) -> Iterator[tuple[str, bool]]:
    """Yield the path in the folder of all that is in it, and if it is a link."""
    count = 0
    start = len(os.path.join(folder, ""))
    for above, folders, files in os.walk(folder):
        for name in (*folders, *files):
            count += 1
            if count > 10 * MAX_LEAVES:
                refuse(folder, "it holds too many files")
            entry = os.path.join(above, name)
            yield entry[start:].replace(os.sep, "/"), os.path.islink(entry)


def _tree(checkpointer: Any, folder: Path) -> Any:
    """Return the metadata of each leaf, in the stored dicts and lists."""
    found = checkpointer.metadata(folder.absolute())
    found = getattr(found, "item_metadata", found)
    if found is None:  # Orbax says so in its log only
        refuse(folder, "its metadata is damaged")
    return getattr(found, "tree", found)


def _document(path: Path, folder: Path) -> Mapping[str, Any]:
    file = folder / _METADATA
    if file.stat().st_size > _MAX_METADATA_BYTES:
        refuse(path, "its metadata is too large")
    document = json.loads(file.read_text("utf-8"))
    entries = document.get("tree_metadata") if isinstance(document, dict) else None
    if not isinstance(entries, dict) or len(entries) > MAX_LEAVES:
        refuse(path, "its metadata is not a table of leaves")
    for entry in entries.values():
        for key in entry["key_metadata"]:
            text = str(key["key"])
            if _OUTWARD.search(text):
                refuse(path, f"the name {listing([text])} leads out of it")
    return document


def _key_kinds(folder: Path) -> dict[str, str]:
    """Return the kinds of the typed PRNG keys that Orbax turned to integers."""
    file = folder / "array_metadatas" / "process_0"
    if not file.is_file() or file.stat().st_size > _MAX_METADATA_BYTES:
        return {}
    entries = json.loads(file.read_text("utf-8"))["array_metadatas"]
    facts = [entry["array_metadata"] for entry in entries]
    kinds = ((each["ext_metadata"] or {}).get("random_key_impl") for each in facts)
    pairs = zip((str(each["param_name"]) for each in facts), kinds, strict=True)
    return {name: kind for name, kind in pairs if isinstance(kind, str)}
