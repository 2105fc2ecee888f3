"""PyTorch's ``.bin``, ``.pt`` and ``.pth`` files, read without PyTorch; never written.

``torch.save`` writes a zip archive of one pickle, which is walked and not unpickled
(``torch_pickle``), and a member of plain bytes for each storage, of which boxes are
read like those of any other file. A label path is the joined keys of nested tables, as
in ``state_dict/head.weight`` or ``optimizer/state/0/exp_avg``. Numbers are Python
numbers; texts, None and objects are not leaves. Tensors that are the same view of one
storage are tied.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from treeadapt.checkpoints import shard_index, torch_pickle
from treeadapt.checkpoints.array_boxes import FileArray, read_together
from treeadapt.checkpoints.errors import AGAIN, refuse
from treeadapt.checkpoints.record import (
    DTYPES,
    MAX_LEAVES,
    NUMBER,
    Leaf,
    Stored,
    abstract,
)
from treeadapt.checkpoints.remote import AnyPath, RemotePath, opened_ranges, read_range
from treeadapt.checkpoints.strided_array import array_in_file, length
from treeadapt.checkpoints.torch_pickle import Other, Storage, Tensor
from treeadapt.migrations.box_parts import whole
from treeadapt.text.names import listing, plural

ENDINGS = ("bin", "ckpt", "pt", "pth")
WHOLE = "pytorch_model.bin"  # in a folder, as Hugging Face's tools name the files
INDEX = f"{WHOLE}.index.json"
_PICKLE, _HEAD_BYTES = "data.pkl", 30
_BEFORE_1_6 = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_PICKLE_BYTES, _MAX_LEVELS = 2**26, 64
_MAX_NAMES = 2**26  # characters of all names, because a table may be in many places
_MAX_TIMES, _MAX_MORE_BYTES = 32, 2**30  # of all arrays, as to those of the file


def read_metadata(path: AnyPath) -> Stored:
    """Read names, shapes and dtypes: the archive's directory and its pickle.

    Args:
        path: a file, or the index of shards.

    Raises:
        CheckpointError: it is not an archive of PyTorch, is damaged, or has more than
            tensors and plain tables; or an index does not fit its folder.
    """
    if _is_index(path):
        return shard_index.joined_shards(path, path, _of_file)
    return _of_file(path)


def checkpoints(folder: AnyPath) -> list[AnyPath]:
    """Return the indexes in a folder, and the files that are not shards of one."""
    files = shard_index.checkpoints(folder, ENDINGS)
    named = (WHOLE, INDEX)  # which are meant, whatever is in them
    return [
        file
        for file in files
        if file.name in named or _is_index(file) or is_archive(read_range(file, 0, 512))
    ]


def is_archive(start: bytes) -> bool:
    """Return whether a file that starts so is PyTorch's, of any version."""
    name_bytes = int.from_bytes(start[26:28], "little")  # of an archive's first member
    name = start[_HEAD_BYTES : _HEAD_BYTES + name_bytes]
    is_zip = start.startswith(b"PK\3\4") and name.endswith(f"/{_PICKLE}".encode())
    return is_zip or start.startswith(_BEFORE_1_6)


def parts(path: AnyPath) -> Iterator[AnyPath]:
    """Give the files of a checkpoint, the index before what it names is read.

    Raises:
        CheckpointError: it names what is not a file in its folder.
    """
    return shard_index.parts(path, path) if _is_index(path) else iter([path])


def read(stored: Stored, wanted: Iterable[str]) -> Iterator[Any]:
    """Return leaves whose boxes can be read, and numbers.

    Args:
        stored: what ``read_metadata`` returned.
        wanted: paths, in the order in which to give them.
    """
    return (stored.table[path].key for path in wanted)


def _is_index(path: AnyPath) -> bool:
    return shard_index.ending_of_shards(path) == ENDINGS[0]


def tree_of(path: AnyPath) -> Any:
    """Return what the pickle of a file says; see ``torch_pickle``.

    Raises:
        CheckpointError: as for ``read_metadata``.
    """
    return _content(path)[0]


def _of_file(path: AnyPath) -> Stored:
    """Read what one file holds."""
    tree, members, folder = _content(path)
    return _Leaves(path, _places(path, members, folder)).stored(tree)


def _content(path: AnyPath) -> tuple[Any, list[zipfile.ZipInfo], str]:
    """Read what the pickle of a file says, its members, and the folder of storages."""
    _require_archive(path, read_range(path, 0, 512))
    with opened_ranges(path) as content:
        try:
            archive = zipfile.ZipFile(content)
        except zipfile.BadZipFile:
            refuse(path, "it is not a whole archive", AGAIN)
        pickled, folder = _pickle_in(path, archive)
        order = archive.NameToInfo.get(f"{folder}byteorder")
        if order is not None and archive.read(order)[:8] != b"little":
            cure = "Save it again on a machine of the other order, which most are."
            refuse(path, "its numbers are in big-endian order", cure)
        try:
            tree = torch_pickle.content_of(archive.read(pickled))
        except torch_pickle.UnreadError as error:
            refuse(path, f"its pickle is not read: {error!s}", error.cure)
        except ValueError as error:
            refuse(path, f"its pickle is damaged: {error!s:.200}", AGAIN)
        return tree, archive.infolist(), f"{folder}data/"


def _require_archive(path: AnyPath, start: bytes) -> None:
    """Raise with what to do unless a file starts as archives do."""
    if start.startswith(b"PK\3\4"):
        return
    if start.startswith(_BEFORE_1_6):
        cure = "Save it again: torch.save(torch.load(file, map_location='cpu'), new)."
        refuse(path, "it is in the format of PyTorch before 1.6", cure)
    if start.startswith(b"\x80"):
        cure = "If you trust it, load it where it was made, and save its arrays alone."
        refuse(path, "it is a pickle, which can run code and is not read", cure)
    refuse(path, "it is not a file of PyTorch", AGAIN)


def _pickle_in(path: AnyPath, archive: zipfile.ZipFile) -> tuple[zipfile.ZipInfo, str]:
    """Return the pickle of an archive, and the folder in it that all members are in."""
    members = archive.infolist()
    if len(members) > MAX_LEAVES:
        refuse(path, f"it has {len(members):,} members")
    if len(archive.NameToInfo) != len(members):
        refuse(path, "two of its members have the same name")
    pickles = [each for each in members if each.filename.endswith(f"/{_PICKLE}")]
    if len(pickles) != 1:
        refuse(path, f"it is not a file of PyTorch: it has {len(pickles)} {_PICKLE}")
    folder = pickles[0].filename.removesuffix(_PICKLE)
    if f"{folder}constants.pkl" in archive.NameToInfo:
        cure = "Save its numbers alone: torch.save(torch.jit.load(file).state_dict(), "
        refuse(path, "it is a TorchScript program", f"{cure}new).")
    size_bytes = path.stat().st_size
    for member in members:
        if not 0 <= member.header_offset <= size_bytes - _HEAD_BYTES:
            refuse(path, "it is cut off", AGAIN)  # in the middle, which moves all
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            name = listing([member.filename])
            cure = "Save it again: torch.save(torch.load(file), new)."
            refuse(path, f"its member {name} is compressed", cure)
    if pickles[0].file_size > _MAX_PICKLE_BYTES:
        refuse(path, f"its pickle is larger than {_MAX_PICKLE_BYTES >> 20} MiB")
    return pickles[0], folder


def _places(
    path: AnyPath, members: Sequence[zipfile.ZipInfo], folder: str
) -> dict[str, tuple[int, int]]:
    """Return where the storages of an archive start and end, by their keys.

    Args:
        path: of the archive.
        members: all of it, which must not overlap.
        folder: in which storages are.
    """
    size_bytes = path.stat().st_size
    members = sorted(members, key=lambda member: member.header_offset)
    places, end = {}, 0
    for member, head in zip(members, _heads(path, members), strict=True):
        name = listing([member.filename])
        lengths = np.frombuffer(head, "<u2", 2, 26)  # of its name, and of what follows
        start = member.header_offset + _HEAD_BYTES + int(lengths.sum(dtype=np.int64))
        if head[:4] != b"PK\3\4" or member.header_offset < end:
            refuse(path, f"its member {name} is not where its directory says", AGAIN)
        end = start + member.file_size
        if end > size_bytes or member.compress_size != member.file_size:
            refuse(path, f"its member {name} is cut off", AGAIN)
        if member.filename.startswith(folder):
            places[member.filename.removeprefix(folder)] = start, end
    return places


def _heads(path: AnyPath, members: Sequence[zipfile.ZipInfo]) -> list[bytes]:
    """Read how members start, whose names may be longer there than in the directory."""
    shape, dtype = (_HEAD_BYTES,), np.dtype(np.uint8)
    jobs = [
        (FileArray(path, member.header_offset, shape, dtype), [whole(shape)], [array])
        for member in members
        for array in [np.empty(shape, dtype)]
    ]
    if isinstance(path, RemotePath):
        read_together(jobs, path.store.max_bytes // 2)
    else:
        with path.open("rb") as file:
            for array, boxes, into in jobs:
                array.read_into(file, boxes, into)
    return [into[0].tobytes() for *_, into in jobs]


class _Leaves:
    """The leaves of one file, as they are found in its tables."""

    def __init__(self, path: AnyPath, places: Mapping[str, tuple[int, int]]) -> None:
        self.path = path
        self.places = places
        self.table: dict[str, Leaf] = {}
        self.owners: dict[Tensor, str] = {}
        self.left_out: dict[str, str] = {}

    def stored(self, tree: Any) -> Stored:
        """Return what is in tables and lists."""
        for name, node in _walked(self.path, tree):
            if name in self.table:
                refuse(self.path, f"two leaves in it are named {listing([name])}")
            if isinstance(node, Tensor):
                self.table[name] = self._of_tensor(name, node)
            elif isinstance(node, int) and not -(2**63) <= node < 2**63:
                self.left_out[name] = "an integer of more than 64 bits"
            elif isinstance(node, bool | int | float):
                array = np.asarray(node)
                spec = abstract(self.path, name, (), array.dtype.name)
                self.table[name] = Leaf(spec, NUMBER, array)
            elif node is not None and not isinstance(node, str | bytes | bytearray):
                kind = node.name if isinstance(node, Other) else type(node).__name__
                self.left_out[name] = kind
        if not self.owners:
            refuse(self.path, "it holds no tensors")
        size_bytes = sum(_nbytes(self.table[name]) for name in self.owners.values())
        stored_bytes = sum(end - start for start, end in self.places.values())
        if size_bytes > _MAX_TIMES * stored_bytes + _MAX_MORE_BYTES:
            seen = (
                f"its tensors take {size_bytes:,} bytes and its data {stored_bytes:,}"
            )
            cure = "Save tensors that repeat numbers as t.contiguous()."
            refuse(self.path, seen, cure)
        return Stored(self.path, self.table, doubts=self._doubts())

    def _of_tensor(self, name: str, tensor: Tensor) -> Leaf:
        """Return the leaf of a tensor, once it is within its storage."""
        spec = abstract(self.path, name, tensor.shape, tensor.dtype)
        owner = self.owners.setdefault(tensor, name)
        if owner != name:
            return Leaf(spec, key=self.table[owner].key, owner=owner)
        start = self._start(name, tensor.storage) + tensor.offset * spec.dtype.itemsize
        size = length(tensor.shape, tensor.strides)
        end = self.places[tensor.storage.key][1]
        if size and start + size * spec.dtype.itemsize > end:
            refuse(
                self.path, f"the leaf {listing([name])} is not in its storage", AGAIN
            )
        key = array_in_file(self.path, start, spec.dtype, tensor.shape, tensor.strides)
        return Leaf(spec, key=key)

    def _start(self, name: str, storage: Storage) -> int:
        """Return where a storage starts, which is as large as the pickle says."""
        start, end = self.places.get(storage.key, (0, -1))
        if end - start != storage.size * DTYPES[storage.dtype].itemsize:
            seen = f"the storage of the leaf {listing([name])}"
            is_there = storage.key in self.places
            problem = "has another size than it says" if is_there else "is not in it"
            refuse(self.path, f"{seen} {problem}", AGAIN)
        return start

    def _doubts(self) -> tuple[str, ...]:
        if not self.left_out:
            return ()
        objects = [f"{name!r:.80} ({kind})" for name, kind in self.left_out.items()]
        count, texts = len(objects), listing(objects, limit=3, write=str)
        verb = "is" if count == 1 else "are"
        return (f"{plural(count, 'object')} in it {verb} left out, {texts}",)


def _walked(path: AnyPath, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in tables and lists that are not too large, with joined keys."""
    pending: list[tuple[str, Any, int]] = [("", tree, 0)]
    count = characters = 0
    while pending:
        above, node, level = pending.pop()
        count += 1
        characters += len(above)
        if level > _MAX_LEVELS:
            refuse(path, f"its tables have more than {_MAX_LEVELS} levels")
        if not isinstance(node, dict | list | tuple):
            yield above[1:], node
            continue
        if count + len(pending) + len(node) > MAX_LEAVES or characters > _MAX_NAMES:
            refuse(path, "its tables have more entries than are read")
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        items = [(f"{above}/{key}", value, level + 1) for key, value in pairs]
        pending += reversed(items)


def _nbytes(leaf: Leaf) -> int:
    return math.prod(leaf.array.shape) * int(leaf.array.dtype.itemsize)
