"""The index of shards: which file of a folder each leaf is in.

Hugging Face's tools write it next to shards of safetensors, and of PyTorch. Takes an
index and what reads one shard; gives what all shards hold together. A name in an index
never leads to another folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from treeadapt.checkpoints.errors import refuse, reported
from treeadapt.checkpoints.record import MAX_LEAVES, Leaf, Stored, has_version
from treeadapt.checkpoints.remote import AnyPath, RemotePath, mapped
from treeadapt.errors import CheckpointError
from treeadapt.text.data_files import parse_json
from treeadapt.text.names import listing, plural
from treeadapt.text.wording import worded

MARK = "treeadapt"  # the only entry of an index's metadata with a meaning here
_MAX_INDEX_BYTES = 64 * 2**20
# Of a variant, such as ``fp16``, the index of ``model.fp16-00001-of-00002.safetensors``
# is ``model.safetensors.index.fp16.json``.
_NAME = re.compile(r"(.+)\.([a-z]+)\.index((?:\.[^.]+)?)\.json")
_SHARD = re.compile(r"(.+?)((?:\.[^.]+)?)-(\d{1,5})-of-(\d{1,5})\.([a-z]+)")
# Transformers reads both entries.
_TO_WRITE = """
import json, pathlib, treeadapt as ta
folder = pathlib.Path({folder})
files = sorted(folder.glob({pattern}))
shards = {{name: x.name for x in files for name in ta.read_metadata(x, decode=False)}}
(folder / {index}).write_text(json.dumps({{"metadata": {{}}, "weight_map": shards}}))
"""
_OUTWARD = re.compile(r"^\.|[^\w.,+=@~ ()\[\]-]")  # in a URL it may lead elsewhere


@dataclasses.dataclass(frozen=True)
class ShardSet:
    """Files that are all shards of one checkpoint by their names.

    Attributes:
        stem: ``model`` of ``model.fp16-00001-of-00002.safetensors``.
        variant: ``.fp16`` of it; mostly "".
        count: ``00002`` of it.
        ending: ``safetensors`` of it.
    """

    stem: str
    variant: str
    count: str
    ending: str

    @classmethod
    def of(cls, file: AnyPath) -> ShardSet | None:
        """Return the set that a file is in by its name; None for any other file."""
        match = _SHARD.fullmatch(file.name)
        return cls(*match.group(1, 2, 4, 5)) if match else None

    @property
    def index(self) -> str:
        """The name of the index that lists them."""
        return f"{self.stem}.{self.ending}.index{self.variant}.json"

    @property
    def names(self) -> list[str]:
        """The names of all shards."""
        width = len(self.count)
        return [
            f"{self.stem}{self.variant}-{n:0{width}}-of-{self.count}.{self.ending}"
            for n in range(1, int(self.count) + 1)
        ]

    def to_write(self, folder: AnyPath) -> str:
        """Return what writes the index, if all shards are there."""
        start = glob.escape(f"{self.stem}{self.variant}-")
        pattern = f"{start}*-of-{self.count}.{self.ending}"
        texts = {"folder": str(folder), "pattern": pattern, "index": self.index}
        # In double quotes, because a shell takes all of it in single ones.
        lines = _TO_WRITE.format(**{key: json.dumps(x) for key, x in texts.items()})
        command = shlex.join(["python", "-c", "; ".join(lines.strip().splitlines())])
        return worded(lines, f"\n{command}")


def ending_of_shards(path: AnyPath) -> str:
    """Return the ending of the shards whose index has such a name; or ""."""
    match = _NAME.fullmatch(path.name)
    return match[2] if match else ""


def checkpoints(folder: AnyPath, endings: Collection[str]) -> list[AnyPath]:
    """Return the indexes in a folder, and the files that are not shards of one.

    A file next to an index of its name counts alone if none of the shards is there.

    Args:
        folder: to look into.
        endings: of the files, without a dot.
    """
    found = (file for each in endings for file in folder.glob(f"[!.]*.{each}"))
    files = {file.name for file in found if file.is_file()}
    indexes: list[AnyPath] = []
    rest = {*files}
    names: list[Any] = sorted(folder.glob("[!.]*.json"))
    for index in names:
        if ending_of_shards(index) not in endings:
            continue
        shards = set()  # of one that cannot be read, which is for what reads it
        with contextlib.suppress(CheckpointError), reported(index, "read"):
            shards = {*weight_map(folder, index)[0].values()}
            whole = _NAME.sub(r"\1\3.\2", index.name)
            if not files & shards and whole in files:
                continue
        indexes.append(index)
        rest -= shards
    return [*indexes, *(folder / name for name in sorted(rest))]


def weight_map(path: AnyPath, index: AnyPath) -> tuple[dict[str, str], str]:
    """Read which shard each leaf is in, whatever is in the folder, and their hash.

    Args:
        path: of the checkpoint, for messages.
        index: of its shards.

    Raises:
        CheckpointError: the index cannot be read.
    """
    if index.stat().st_size > _MAX_INDEX_BYTES:
        refuse(path, f"its index is larger than {_MAX_INDEX_BYTES >> 20} MiB")
    with reported(index, "read"):
        document = parse_json(index.read_text("utf-8"))
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict) or len(names) > MAX_LEAVES:
        refuse(path, "its index is not a table of tensors and their files")
    for name, shard in names.items():
        if not isinstance(shard, str):
            refuse(path, f"its index gives no file for {listing([name])}")
    about = document.get("metadata")
    marks = about.get(MARK) if isinstance(about, dict) else None
    if not isinstance(marks, dict) or not has_version(marks):
        return names, ""
    return names, str(marks.get("hash", ""))


def in_other_shard(file: AnyPath, names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first of some leaves that an index has next to a shard of it.

    Args:
        file: the shard.
        names: of leaves that it lacks.

    Returns:
        The leaf and the name of its shard; None if no index has any of them.
    """
    _, shards = index_that_lists(file)
    return next(((name, shards[name]) for name in names if name in shards), None)


def index_that_lists(file: AnyPath) -> tuple[AnyPath | None, dict[str, str]]:
    """Return the index next to a file that lists it as a shard, and all shards by leaf.

    Of a folder, an index, and a file that no index lists, there is none.
    """
    if not file.is_dir() and not ending_of_shards(file):
        with contextlib.suppress(CheckpointError), reported(file, "read"):
            for index in filter(ending_of_shards, file.parent.glob("[!.]*.json")):
                shards, _ = weight_map(file.parent, index)
                if file.name in shards.values():
                    return index, shards
    return None, {}


def parts(path: AnyPath, index: AnyPath) -> Iterator[AnyPath]:
    """Give the files of a checkpoint, the index before what it names is read.

    Raises:
        CheckpointError: it names what is not a file in its folder.
    """
    yield index
    yield from dict.fromkeys(_files(path, index)[0].values())


def joined_shards(
    path: AnyPath, index: AnyPath, read_shard: Callable[[AnyPath], Stored]
) -> Stored:
    """Read what all shards hold, which must be what the index says.

    How many bytes all have is not compared: tools write different sums into indexes.

    Args:
        path: of the checkpoint.
        index: of its shards.
        read_shard: returns what one file holds.

    Raises:
        CheckpointError: a shard cannot be read, or differs from the index.
    """

    def of_shard(file: AnyPath) -> Stored:
        with reported(file, "read"):
            return read_shard(file)

    listed, text = _files(path, index)
    files = [*dict.fromkeys(listed.values())]
    table: dict[str, Leaf] = {}
    there: dict[str, AnyPath] = {}
    doubts: list[str] = []
    for file, stored in zip(files, mapped(of_shard, files), strict=True):
        twice = sorted(stored.table.keys() & table.keys())
        if twice:
            refuse(path, f"two leaves in it are named {listing(twice, limit=3)}")
        table |= stored.table
        there |= dict.fromkeys(stored.table, file)
        doubts += stored.doubts
    # A tied leaf may be listed, and need not be.
    unlisted = {n for n in there.keys() - listed.keys() if not table[n].owner}
    wrong = unlisted | {
        name for name, file in listed.items() if there.get(name) != file
    }
    if wrong:
        problem = "its index and its files disagree on which tensors are in which file"
        problem += f": {listing(sorted(wrong), limit=3)}"
        refuse(path, problem, _cure(index.parent, index.name, [index.name]))
    table = {name: table[name] for name in listed} | table  # in the order of the index
    return Stored(path, table, hash=text, doubts=tuple(doubts))


def _files(path: AnyPath, index: AnyPath) -> tuple[dict[str, AnyPath], str]:
    """Read which file each leaf is in, and the hash of the leaves.

    A name leads to a file next to the index, which may be a link to anywhere: people
    make links on their own disks, and so does the cache of Hugging Face.
    """
    names, text = weight_map(path, index)
    files: dict[str, Any] = {}
    for shard in names.values():  # all before any is opened
        is_outward = isinstance(index, RemotePath) and _OUTWARD.search(shard)
        if Path(shard).name != shard or shard in ("", "..") or is_outward:
            refuse(path, f"{listing([shard])}, in its index, is not a file in it")
        files[shard] = index.parent / shard
    there = mapped(_is_there, files.values())
    gone = [name for name, is_there in zip(files, there, strict=True) if not is_there]
    if gone:
        count = plural(len(files), "shard")
        problem = f"{listing(gone, limit=3)}, in its index of {count}, "
        problem += "is not a file in it" if len(gone) == 1 else "are not files in it"
        refuse(path, problem, _cure(index.parent, index.name, gone))
    return {name: files[shard] for name, shard in names.items()}, text


def _is_there(file: AnyPath) -> bool:
    """Return whether there is a file; what it is will be asked next."""
    is_there = file.is_file()
    if is_there and isinstance(file, RemotePath):
        file.head()
    return is_there


def without_index(folder: AnyPath, files: Collection[AnyPath]) -> tuple[str, str]:
    """Return what shards lack that no index lists, and what to do.

    Args:
        folder: that has them.
        files: all the checkpoints in it.

    Returns:
        Two texts; empty unless all files are shards of one set by their names, and a
        single one is not all of its set.
    """
    (shards, *others) = {ShardSet.of(file) for file in files} or {None}
    if shards is None or others:
        return "", ""
    there = {file.name for file in files}
    gone = [name for name in shards.names if name not in there]
    if not gone and len(there) == 1:
        return "", ""
    count, index = plural(len(shards.names), "shard"), listing([shards.index])
    problem = f"it has {len(there)} of {count}, and no index, {index}"
    if not gone:
        problem = f"there is no {index}, which says what is in which of its {count}"
    return problem, _cure(folder, shards.index, [*gone, shards.index])


def _cure(folder: AnyPath, index: str, lacking: list[str]) -> str:
    """Say how to come by what is lacking next to shards.

    Args:
        folder: of the shards.
        index: its name, whether or not it is there.
        lacking: names of files, which are not there or are wrong.
    """
    shown = listing(lacking, limit=3)
    if isinstance(folder, RemotePath):
        return f"Copy {shown} there again."
    for link in (folder / name for name in lacking):
        if link.is_symlink() and not link.exists():
            return broken_link(link)
    names = lacking if len(lacking) <= 3 else []
    words = ["hf", "download", "ORG/NAME", *names, "--local-dir", str(folder)]
    cure = f"Get {shown} from where the rest is from, as with {shlex.join(words)}"
    there = {file.name for file in folder.glob("[!.]*-of-*") if file.is_file()}
    sets = {ShardSet.of(folder / name) for name in there}
    whole = [x for x in sets if x and x.index == index and there.issuperset(x.names)]
    if len(whole) != 1:
        return f"{cure}."
    return f"{cure}, or write the index of what is there:{whole[0].to_write(folder)}"


def broken_link(link: Path) -> str:
    """Say that a link, such as one in a copied cache, leads nowhere."""
    name, to = listing([str(link)]), listing([os.readlink(link)])
    return f"{name} is a link to {to}, which is not there."
