"""A checkpoint as one file or folder, in any format.

Takes a name, whose ending says the format, and arrays; gives what a checkpoint holds.
What is read is what the metadata said, and of one checkpoint, or an error. What is
written is put in place once it is whole. Each format is in a file of this room:
``read_metadata(path)`` returns a ``Stored``, ``read(stored, wanted)`` the arrays, and
``write(path, arrays, table)``, if there is one, writes them all at once. Of those that
may be folders, ``checkpoints(folder)`` lists what is in one, and ``parts(path)`` the
files that another checkpoint would replace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jax

from treeadapt.checkpoints import (
    msgpack_file,
    npz_file,
    orbax_folder,
    safetensors_file,
    schema_file,
)
from treeadapt.checkpoints.common import (
    NUMBER,
    UNPICKLED,
    Leaf,
    Stored,
    refuse,
    reported,
)
from treeadapt.checkpoints.processes import agreed
from treeadapt.checkpoints.replacing import replaced, restore
from treeadapt.convert import describe
from treeadapt.errors import CheckpointError, TreeAdaptWarning
from treeadapt.names import SHOWN, Speller, listing

FORMATS: Mapping[str, ModuleType] = {
    "safetensors": safetensors_file,
    "npz": npz_file,
    "msgpack": msgpack_file,
    "orbax": orbax_folder,
    "schema": schema_file,
}
#: Ending of a file that is not read here -> what reads it.
_READERS = {
    "eqx": "eqx.tree_deserialise_leaves",
    "h5": "h5py, or keras.saving.load_model",
    "keras": "keras.saving.load_model",
    "npy": "numpy.load",
}
_ONLY_READ = ("npz", "msgpack")
_OF_PARTS = ("safetensors", "orbax")  # may be several files
_STANDARD = (safetensors_file.WHOLE, safetensors_file.INDEX, orbax_folder.METADATA)
SHARDS = "safetensors shards"
_BATCH_BYTES = 2**28
_T = TypeVar("_T")


def read_stored(path: str | os.PathLike[str]) -> Stored:
    """Read all that is known of a checkpoint without its arrays, as it is stored.

    A warning says what another program made untrue of what was written next to the
    arrays; the file counts then.

    Raises:
        CheckpointError: the checkpoint cannot be read, or a schema has another hash
            than that of its leaves.
    """
    name = _named(path)
    if not name.exists():
        restore(name.absolute())
    if not name.exists():
        hint = near_name(name)
        raise CheckpointError(f"There is no checkpoint {listing([str(name)])}.{hint}")
    version: dict[Path, tuple[int, ...]] = {}
    with reading(name, version), reported(name, "read"):
        version[name] = _stamp(name)
        if name.is_dir() and format_of(name) != "schema":
            name = _located(name)
        kind = format_of(name)
        if not (name.is_file() or (name.is_dir() and kind != "schema")):
            refuse(name, f"it is not a {kind} file")
        reader = FORMATS[kind]
        for file in reader.parts(name) if kind in _OF_PARTS else (name,):
            version[file] = _stamp(file)  # before it is opened
        stored = _compared_with_hash(reader.read_metadata(name), kind)
    if stored.doubts:
        left = len(stored.doubts) - SHOWN
        more = f"; and {left:,} more" if left > 0 else ""
        warnings.warn(
            f"The checkpoint {listing([str(name)])} is read as it is now: "
            f"{'; '.join(stored.doubts[:SHOWN])}{more}. Save it again to end this "
            "warning.",
            TreeAdaptWarning,
            stacklevel=3,
        )
    return dataclasses.replace(stored, version=version, format=kind)


def near_name(name: Path) -> str:
    """Return what a missing checkpoint may be called, as a hint, or ""."""
    folder = name.parent
    if name.is_symlink():
        return f" {_broken(name)}"
    if not folder.is_dir():
        return f" There is no folder {listing([str(folder)])}."
    with contextlib.suppress(OSError):
        endings = (*(f".{kind}" for kind in FORMATS), schema_file.ENDING)
        entries = [
            x for x in folder.iterdir() if x.is_dir() or x.name.endswith(endings)
        ]
        names = [x.name for x in entries]
        same = [x for x in names if x.partition(".")[0] == name.name.partition(".")[0]]
        if near := (same or Speller().nearest(name.name, names))[:3]:
            return f" Did you mean {listing([str(folder / x) for x in near])}?"
    return ""


def _broken(link: Path) -> str:
    """Say that a link, such as one in a copied cache, leads nowhere."""
    name, to = listing([str(link)]), listing([os.readlink(link)])
    return f"{name} is a link to {to}, which is not there."


def read_arrays(stored: Stored, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Read leaves, each of which must be what the metadata said.

    What is yielded may read its data later: use it within ``reading``.

    Args:
        stored: the checkpoint, maybe with the paths of a model.
        wanted: the leaves to read, and for each the sharding to read it to, or None
            for the host.

    Yields:
        Path and array.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    if not wanted:
        return
    require_arrays(stored)
    path = stored.path
    with reported(path, "read"):
        arrays = FORMATS[stored.format].read(stored, wanted)
        for one, array in zip(wanted, arrays, strict=True):
            stated = stored.table[one].array
            if array.shape != stated.shape or array.dtype != stated.dtype:
                refuse(
                    path,
                    f"its metadata says that {listing([one])} is {describe(stated)}, "
                    f"and its content is {describe(array)}",
                )
            yield one, array


def batches(items: Iterable[_T], bytes_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield items so many at a time that reading their arrays together pays.

    Args:
        items: what is to be read.
        bytes_of: returns how many bytes the arrays of one have.
    """
    batch: list[_T] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += bytes_of(item)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def write(
    path: str | os.PathLike[str],
    arrays: Iterable[tuple[str, Any]],
    table: Mapping[str, Leaf],
    max_shard_bytes: int | None = None,
) -> None:
    """Write arrays to a new file or folder, and put it in place.

    Args:
        path: of the checkpoint; its ending says the format.
        arrays: label paths and arrays, of NumPy or JAX, in the order of ``table``;
            taken once it is known that a checkpoint may be written there, and not for
            a schema.
        table: all leaves by label path, also those that are tied to one of the arrays.
        max_shard_bytes: of each shard in a folder of them; None for another format.

    Raises:
        CheckpointError: it cannot be written.
    """
    name, kind = _named(path), SHARDS
    if max_shard_bytes is None:
        kind = format_of(name, writing=True)
    else:
        _require_shards(name, max_shard_bytes)
    if kind == "orbax":
        _write_together(name, arrays, table)
        return
    with reported(name, "written"), replaced(name, lambda: _check(name, kind)) as new:
        if max_shard_bytes is not None:
            safetensors_file.write_shards(new, arrays, table, max_shard_bytes)
        elif kind == "schema":
            schema_file.write(new, table)
        else:
            safetensors_file.write(new, dict(arrays), table)


def _write_together(
    path: Path, arrays: Iterable[tuple[str, Any]], table: Mapping[str, Leaf]
) -> None:
    """Write an Orbax folder from all processes; see ``write``.

    Process 0 makes the folder and puts it in place once all have written their parts.
    """
    call, is_first = f"save to {listing([str(path)])}", jax.process_index() == 0
    entries = schema_file.entries(table)
    with contextlib.ExitStack() as stack:
        with agreed(call) as told, reported(path, "written"):
            new = path
            if is_first:
                new = stack.enter_context(replaced(path, lambda: _check(path, "orbax")))
                orbax_folder.begin(new)
            first, name = json.loads(told(json.dumps([entries, str(new)])))
            different = [
                one for one in entries | first if entries.get(one) != first.get(one)
            ]
            if different:
                here, there = (
                    one.get(different[0], "missing") for one in (entries, first)
                )
                raise CheckpointError(
                    f"Its tree differs from that of process 0 in {listing(different)}: "
                    f"the first is {here!r}, in process 0 {there!r}. Save the same "
                    "tree in all processes."
                )
            new = Path(name)
            if not new.is_dir():
                raise CheckpointError(
                    f"There is no folder {listing([str(new)])} here, which process 0 "
                    "made. Save to a file system that all processes share."
                )
        with agreed(call), reported(path, "written"):
            orbax_folder.write(new, dict(arrays), table)
        with agreed(call), reported(path, "written"):
            if is_first:
                orbax_folder.finish(new)
            stack.close()


def format_of(path: str | os.PathLike[str], *, writing: bool = False) -> str:
    """Return the format of a checkpoint, by its name.

    Args:
        path: of the checkpoint.
        writing: whether a name without ending is an Orbax folder to make.

    Raises:
        CheckpointError: the name has an unknown ending.
    """
    name = Path(path)
    ending = name.suffix.removeprefix(".").lower()
    if name.name.lower().endswith(schema_file.ENDING):
        return "schema"
    if not writing and safetensors_file.is_index(name):
        return "safetensors"
    if name.is_dir() or (writing and ending in ("", "orbax")):
        has_index = (name / safetensors_file.INDEX).is_file()
        return "safetensors" if has_index else "orbax"
    if ending == "safetensors" or (ending in _ONLY_READ and not writing):
        return ending
    problem = f"it has an unknown ending, {name.suffix!r:.30}"
    cure = (
        "Known are .safetensors, .npz, .msgpack, .schema.toml, folders of Orbax or of "
        ".safetensors."
    )
    if ending in _ONLY_READ:
        problem = f"{ending} files are read, but not written"
    if writing:
        cure = "Write .safetensors, .schema.toml, or without an ending for Orbax."
    elif ending in ("bin", "ckpt", "pt", "pth"):
        cure += f" {UNPICKLED}"
    elif ending in _READERS:
        cure += f" Read it with {_READERS[ending]}, and save what it gives."
    refuse(name, problem, cure)


def _require_shards(path: Path, max_shard_bytes: Any) -> None:
    """Raise unless shards of so many bytes may be written, whatever is at ``path``."""
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise CheckpointError(
            "Expected max_shard_bytes to be a positive int, such as 5 * 2**30; got "
            f"{max_shard_bytes!r:.60}."
        )
    if path.suffix.removeprefix(".").lower() in (*FORMATS, "toml"):
        raise CheckpointError(
            f"max_shard_bytes makes a folder of safetensors shards, but "
            f"{listing([str(path)])} ends in {path.suffix!r:.30}. Leave it out, or "
            "choose a name without an ending."
        )


def _compared_with_hash(stored: Stored, kind: str) -> Stored:
    """Return what is stored, with doubts if leaves are not those that were written.

    Raises:
        CheckpointError: they are not, in a schema.
    """
    text = schema_file.marks_of(stored.table)["hash"] if stored.hash else ""
    if stored.hash == text:
        return stored
    problem = (
        "its paths, shapes, dtypes and ties are not those that it was written with"
    )
    if kind == "schema":
        problem += f"; their hash is {text!r} and not {stored.hash!r:.60}"
        cure = f'To accept them, write hash = "{text}" in it, or remove that line.'
        refuse(stored.path, problem, cure)
    cast = {
        name: dataclasses.replace(leaf, kind="")
        for name, leaf in stored.table.items()
        if leaf.kind == NUMBER and leaf.array.dtype.name not in schema_file.NUMBERS
    }
    numbers = [
        f"{listing([name])} in it is {describe(leaf.array)} and not a Python number"
        for name, leaf in cast.items()
    ]
    return dataclasses.replace(
        stored,
        table={**stored.table, **cast},
        doubts=(problem, *stored.doubts, *numbers),
    )


def _check(path: Path, kind: str) -> None:
    """Raise unless nothing is at ``path``, or what a new checkpoint may replace."""
    if path.is_symlink():
        raise CheckpointError(
            f"{listing([str(path)])} is a link to {listing([os.readlink(path)])} and "
            "is not replaced. Save to that name, or remove the link."
        )
    if path.exists() and path.is_dir() != (kind in ("orbax", SHARDS)):
        what = "a folder" if path.is_dir() else "a file"
        cure = "Choose another name."
        if (path / safetensors_file.INDEX).is_file():
            what = "a folder of shards"
            cure = "Pass max_shard_bytes= to replace it, or choose another name."
        raise CheckpointError(f"{listing([str(path)])} is {what}. {cure}")
    if kind == "safetensors":
        _require_alone(path)
    while path.is_dir():
        with contextlib.suppress(FileNotFoundError):  # others replace it meanwhile
            if path.samefile("."):
                raise CheckpointError(
                    f"{listing([str(path)])} is the current folder and is not "
                    "replaced. Name a folder in it."
                )
            before = path.stat()
            try:
                return _require_own(path, kind)
            except CheckpointError:
                now = path.stat()
                is_same = os.path.samestat(now, before)
                if is_same and now.st_ctime_ns == before.st_ctime_ns:
                    raise


def _require_alone(file: Path) -> None:
    """Raise if a new file would be the second checkpoint of its folder."""
    folder, index = file.parent, safetensors_file.index_of(file)
    rivals = [index.name]
    if file.name == safetensors_file.WHOLE:
        rivals.append(orbax_folder.METADATA)
    there = [one for one in _checkpoints(folder) if one.name in rivals]
    if not there:
        return
    cure = "Save to another folder."
    if there[0] == index:
        cure = "remove them and their index first, or save to another folder."
        if index.name == safetensors_file.INDEX and not safetensors_file.others(folder):
            cure = f"pass max_shard_bytes= and the folder, {listing([str(folder)])}."
        cure = f"To replace the shards, {cure}"
    raise CheckpointError(
        f"{listing([str(file)])} is not written, because it would be a second "
        f"checkpoint next to {listing([str(there[0])])}, and readers differ in which "
        f"they take. {cure}"
    )


def _require_own(path: Path, kind: str) -> None:
    """Raise unless a folder is one checkpoint of a kind and holds nothing else."""
    if kind == SHARDS:
        strangers = safetensors_file.others(path)
        what, others = (
            "a folder of safetensors shards",
            "more than an index and its shards",
        )
    else:
        strangers = orbax_folder.others(path)
        what, others = "a checkpoint", "what Orbax did not write"
    name = listing([str(path)])
    if strangers is None:
        raise CheckpointError(
            f"The folder {name} is not {what} and is not replaced. "
            f"{_proposal(path) or 'Choose another name.'}"
        )
    if strangers:
        raise CheckpointError(
            f"The checkpoint {name} is not replaced, because it holds {others}: "
            f"{listing(strangers)}. Move that away, or choose another name."
        )


def _named(path: Any) -> Path:
    """Return the path that the caller gives, which may be a tree by mistake."""
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            "The name of a checkpoint comes first, save(path, tree) and load(path, "
            f"target); got {describe(path)} for it."
        )
    return Path(path)


def require_arrays(stored: Stored) -> None:
    """Raise if there are no arrays to read.

    Raises:
        CheckpointError: it is a schema.
    """
    if stored.format == "schema":
        raise CheckpointError(
            f"{listing([str(stored.path)])} is a schema and holds no arrays. Name a "
            "checkpoint; load(schema) without a target gives abstract leaves."
        )


@contextlib.contextmanager
def reading(path: Path, version: Mapping[Path, tuple[int, ...]]) -> Iterator[None]:
    """Report that another checkpoint came to the path, whatever else goes wrong.

    Args:
        path: of the checkpoint, for messages.
        version: as ``Stored`` has it; what is in it at the end counts.

    Raises:
        CheckpointError: it did.
    """
    try:
        yield
    finally:
        with reported(path, "read"):
            is_same = all(_stamp(file) == stamp for file, stamp in version.items())
        if not is_same:
            raise CheckpointError(
                f"The checkpoint {listing([str(path)])} was replaced while it was "
                "read. Read it again."
            )


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when another file or folder comes to a path.

    Files that come into a folder, and links to a file or its mode, change nothing.
    """
    try:
        facts = path.stat()
    except FileNotFoundError:
        return ()
    if stat.S_ISDIR(facts.st_mode):
        return (facts.st_ino,)
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder: files, indexes, and what Orbax wrote."""
    return [*safetensors_file.checkpoints(folder), *orbax_folder.checkpoints(folder)]


def _located(folder: Path) -> Path:
    """Return the checkpoint that is meant by a folder: itself, or a file in it.

    Names that the libraries give by themselves come before all others.

    Raises:
        CheckpointError: there is none, or more than one.
    """
    names = _checkpoints(folder)
    standard = [name for name in names if name.name in _STANDARD]
    one, *others = standard or names or [folder]
    if len(standard) > 1:
        refuse(
            folder,
            f"it holds more than one checkpoint, {listing([*map(str, standard)])}, and "
            "readers differ in which they take",
            "Move away the one that is not meant, or name the other one.",
        )
    if others:
        refuse(folder, "it holds several", _proposal(folder))
    if one == folder:
        none = "there is neither an Orbax checkpoint nor a .safetensors file in it"
        refuse(folder, none, _proposal(folder))
    is_folder = one.is_dir() or one.name in _STANDARD[1:]
    return folder if is_folder else one


def _proposal(folder: Path) -> str:
    """Name the checkpoints below a folder, such as the steps of a manager."""
    steps = [step for step in folder.glob("[!.]*") if "-tmp" not in step.name]
    revisions = folder.glob("snapshots/[!.]*")  # as in the cache of Hugging Face
    folders = [folder, *steps, *revisions]
    there = [one for each in folders for one in _checkpoints(each)]
    there += [one for kind in _ONLY_READ for one in folder.glob(f"[!.]*.{kind}")]
    inner = orbax_folder.METADATA
    names = {str(one.parent if one.name == inner else one): None for one in there}
    latest = sorted(names, key=lambda x: re.sub(r"\d+", lambda n: n[0].zfill(20), x))
    if latest:
        return f"It holds {listing(latest[::-1])}. Name one of them."
    for link in folder.glob("[!.]*.safetensors*"):
        if not link.exists():
            return _broken(link)
    return UNPICKLED if any(folder.glob("*.bin")) else ""
