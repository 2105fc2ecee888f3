"""A new checkpoint, in any format, put in place once it is whole.

Takes a name, whose ending says the format, and arrays. Replaces nothing but a
checkpoint of the same kind. See ``locating`` for the formats.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from treeadapt.checkpoints import orbax_folder, safetensors_file, schema_file
from treeadapt.checkpoints.errors import named_path, reported
from treeadapt.checkpoints.locating import FORMATS, checkpoints_in, format_of
from treeadapt.checkpoints.processes import agreed
from treeadapt.checkpoints.record import Leaf, require_written
from treeadapt.checkpoints.replacing import replaced
from treeadapt.errors import CheckpointError
from treeadapt.text.names import listing
from treeadapt.text.wording import worded

SHARDS = "safetensors shards"
_SECONDS_BETWEEN_COUNTS = 0.1


def write(
    path: str | os.PathLike[str],
    arrays: Iterable[tuple[str, Any]],
    table: Mapping[str, Leaf],
    max_shard_bytes: int | None = None,
    written: Callable[[int], None] | None = None,
    replaceable: Collection[str] = (),
) -> None:
    """Write arrays to a new file or folder, and put it in place.

    Args:
        path: of the checkpoint; its ending says the format.
        arrays: label paths and arrays, of NumPy or JAX, in the order of ``table``;
            taken once it is known that a checkpoint may be written there, and not for
            a schema.
        table: all leaves by label path, also those that are tied to one of the arrays.
        max_shard_bytes: of each shard in a folder of them; None for another format.
        written: called now and then, from another thread, with how many bytes are in
            the new file or folder.
        replaceable: names of files in a folder that go with the checkpoint in it,
            though they are not a part of it.

    Raises:
        CheckpointError: it cannot be written.
    """
    name, kind = named_path(path), SHARDS
    if max_shard_bytes is None:
        kind = format_of(name, writing=True)
    else:
        _require_shards(name, max_shard_bytes)
    if kind == "orbax":
        for path_of_leaf, leaf in table.items():
            require_written(path_of_leaf, leaf.array.dtype.name)
        _write_together(name, arrays, table, written, replaceable)
        return
    with (
        reported(name, "written"),
        replaced(name, lambda: _check(name, kind, replaceable)) as new,
        _counted(new, written),
    ):
        if max_shard_bytes is not None:
            safetensors_file.write_shards(new, arrays, table, max_shard_bytes)
        elif kind == "schema":
            schema_file.write(new, table)
        else:
            safetensors_file.write(new, dict(arrays), table)


@contextlib.contextmanager
def _counted(new: Path, written: Callable[[int], None] | None) -> Iterator[None]:
    """Say how many bytes there are while something writes them.

    The writers of safetensors and of Orbax are calls that say nothing until they end.

    Args:
        new: what is being written.
        written: what ``write`` takes.
    """
    if written is None:
        yield
        return
    is_done = threading.Event()

    def count() -> None:
        while not is_done.wait(_SECONDS_BETWEEN_COUNTS):
            written(_size_on_disk(new))

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
        yield
    finally:
        is_done.set()
        counting.join()


def _size_on_disk(new: Path) -> int:
    size_bytes = 0
    with contextlib.suppress(OSError):  # Orbax renames as it writes
        files = new.rglob("*") if new.is_dir() else [new]
        size_bytes = sum(file.stat().st_size for file in files if file.is_file())
    return size_bytes


def _write_together(
    path: Path,
    arrays: Iterable[tuple[str, Any]],
    table: Mapping[str, Leaf],
    written: Callable[[int], None] | None,
    replaceable: Collection[str],
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
                new = stack.enter_context(
                    replaced(path, lambda: _check(path, "orbax", replaceable))
                )
                orbax_folder.begin(new)
            first, folder = json.loads(told(json.dumps([entries, str(new)])))
            different = {name for name, _ in entries.items() ^ first.items()}
            if different:
                pairs = (
                    f"{name!r} is {entries.get(name)}, of process 0 {first.get(name)}"
                    for name in sorted(different)
                )
                raise CheckpointError(
                    f"This process saves other leaves: {listing(pairs, write=str)}. "
                    "Save the same tree in all processes."
                )
            new = Path(folder)
            if not new.is_dir():
                raise CheckpointError(
                    f"There is no folder {listing([str(new)])} here, which process 0 "
                    "made. Save to a file system that all processes share."
                )
        with agreed(call), reported(path, "written"), _counted(new, written):
            orbax_folder.write(new, dict(arrays), table)
        with agreed(call), reported(path, "written"):
            if is_first:
                orbax_folder.finish(new)
            stack.close()


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


def _check(path: Path, kind: str, replaceable: Collection[str]) -> None:
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
            option = worded("max_shard_bytes=", "--max-shard-bytes")
            cure = f"Pass {option} to replace it, or choose another name."
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
                return _require_own(path, kind, replaceable)
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
    there = [path for path in checkpoints_in(folder) if path.name in rivals]
    if not there:
        return
    raise CheckpointError(
        f"{listing([str(file)])} is not written, because it would be a second "
        f"checkpoint next to {listing([str(there[0])])}, and readers differ in which "
        "they take. Save to another folder, or move that checkpoint away first."
    )


def _require_own(path: Path, kind: str, replaceable: Collection[str]) -> None:
    """Raise unless a folder is one checkpoint of a kind and holds little else."""
    if kind == SHARDS:
        strangers = safetensors_file.others(path)
        what = "a folder of safetensors shards"
        others = "more than an index and its shards"
    else:
        strangers = orbax_folder.others(path)
        what, others = "a checkpoint", "what Orbax did not write"
    name = listing([str(path)])
    if strangers is None:
        raise CheckpointError(
            f"The folder {name} is not {what} and is not replaced. Choose another name."
        )
    if strangers := [each for each in strangers if each not in replaceable]:
        raise CheckpointError(
            f"The checkpoint {name} is not replaced, because it holds {others}: "
            f"{listing(strangers)}. Move that away, or choose another name."
        )
