"""Which checkpoint a name means, and its format, by its ending or else by its content.

Takes the name of a file or folder; reads no more than the names in it, indexes, and how
files start.
Each format is in a file of this room: ``read_metadata(path)`` returns a ``Stored``,
``read(stored, wanted)`` the arrays, and ``write(path, arrays, table)``, if there is
one, writes them all at once. Of those that may be folders, ``checkpoints(folder)``
lists what is in one, and ``parts(path)`` the files that another checkpoint would
replace.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from treeadapt.checkpoints import (
    msgpack_file,
    npz_file,
    orbax_folder,
    safetensors_file,
    schema_file,
    torch_file,
)
from treeadapt.checkpoints.errors import AGAIN, refuse
from treeadapt.checkpoints.remote import HEAD_BYTES, AnyPath, RemotePath, read_range
from treeadapt.checkpoints.shard_index import (
    broken_link,
    ending_of_shards,
    without_index,
)
from treeadapt.migrations.tables.published import CONFIG
from treeadapt.text.names import Speller, listing, plural

FORMATS: Mapping[str, ModuleType] = {
    "safetensors": safetensors_file,
    "npz": npz_file,
    "msgpack": msgpack_file,
    "orbax": orbax_folder,
    "schema": schema_file,
    "torch": torch_file,
}
#: Ending of a file that is not read here -> what reads it.
_READERS = {
    "eqx": "eqx.tree_deserialise_leaves",
    "h5": "h5py, or keras.saving.load_model",
    "keras": "keras.saving.load_model",
    "npy": "numpy.load",
}
_ONLY_READ = ("npz", "msgpack")
_ENDINGS = ("safetensors", *_ONLY_READ, *torch_file.ENDINGS, "orbax")
_ARCHIVES = ("npz", "torch")  # which say what they are, whatever their name does
_OF_SHARDS = {safetensors_file.ENDING: "safetensors", torch_file.ENDINGS[0]: "torch"}
_LFS = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"\s*<(!doctype\s|html|\?xml)", re.IGNORECASE)
# A map of MessagePack that has something in it, of which the first key is a text.
_MAP = re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf.{4})[\xa0-\xbf\xd9-\xdb]", re.DOTALL)
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w.-]+)?")  # on Hugging Face's Hub
# Of a manager of Orbax, or of Flax; not of a step that is being written.
_STEP = re.compile(r"((?!.*orbax-checkpoint-tmp)(?:[^.].*[_-])?)([0-9]{1,18})")
_COMMITTED = "commit_success.txt"
_OF_JAX = "pytreedef.json"  # of ``jax.experimental.array_serialization``
_STANDARD = (
    *(safetensors_file.WHOLE, safetensors_file.INDEX, orbax_folder.METADATA),
    *(torch_file.WHOLE, torch_file.INDEX),
)
_NO_RUN = (*_STANDARD, orbax_folder.STEP_METADATA)  # a step may have items "0", "1"
_OF_ORBAX = (orbax_folder.METADATA, orbax_folder.STEP_METADATA)
_FOLDERS = (safetensors_file.INDEX, *_OF_ORBAX)  # named by their folder


def near_name(name: Path) -> str:
    """Return what a missing checkpoint may be called, as a hint, or ""."""
    folder = name.parent
    if name.is_symlink():
        return f" {broken_link(name)}"
    if not folder.is_dir():
        hub = hub_hint(str(name))
        return f" There is no folder {listing([str(folder)])}.{hub}"
    with contextlib.suppress(OSError):
        endings = (*(f".{ending}" for ending in _ENDINGS), schema_file.ENDING)
        entries = folder.iterdir()
        names = [x.name for x in entries if x.is_dir() or x.name.endswith(endings)]
        same = [x for x in names if x.partition(".")[0] == name.name.partition(".")[0]]
        stems = {x: Path(x).stem for x in sorted(names)}  # endings are alike anyway
        near = Speller().nearest(name.stem, dict.fromkeys(stems.values()))
        alike = [x for stem in near for x in stems if stems[x] == stem]
        if meant := (same or alike)[:3]:
            return f" Did you mean {listing([str(folder / x) for x in meant])}?"
    return ""


def hub_hint(text: str) -> str:
    """Say how to get a model, if a text may be the name of one on a hub; or "".

    Example:
        >>> hub_hint("google/gemma-2b")[-71:]
        'or run hf download google/gemma-2b, and load the folder that it prints.'
        >>> hub_hint("run/1/model")
        ''
    """
    if not (command := download_command(text)):
        return ""
    return (
        f" If that is a model of the Hugging Face Hub, load {f'hf://{text}'!r} (after "
        f'pip install "treeadapt[hub]"), or run {command}, and load the folder that it '
        "prints."
    )


def download_command(text: str) -> str:
    """Return the command that gets a model, if a text may be its name on a hub; or "".

    Example:
        >>> download_command("google/gemma-2b@main")
        'hf download google/gemma-2b --revision main'
    """
    if not _MODEL.fullmatch(text) or Path(text).suffix.removeprefix(".") in _ENDINGS:
        return ""
    name, _, revision = text.partition("@")
    return f"hf download {name}{f' --revision {revision}' * bool(revision)}"


def format_of(
    path: str | os.PathLike[str] | RemotePath, *, writing: bool = False
) -> str:
    """Return the format of a checkpoint, by its name.

    Args:
        path: of the checkpoint.
        writing: whether a name without ending is an Orbax folder to make.

    Raises:
        CheckpointError: the name has an unknown ending.
    """
    name = path if isinstance(path, RemotePath) else Path(path)
    ending = name.suffix.removeprefix(".").lower()
    if name.name.lower().endswith(schema_file.ENDING):
        return "schema"
    shards = "" if writing else ending_of_shards(name)
    if shards in _OF_SHARDS:
        return _OF_SHARDS[shards]
    if name.is_dir() or (writing and ending in ("", "orbax")):
        has_index = (name / safetensors_file.INDEX).is_file()
        return "safetensors" if has_index else "orbax"
    is_file = not writing and name.is_file()
    content = _format_of_content(name) if is_file else ""
    if content in _ARCHIVES:
        return content
    if ending == "safetensors" or (ending in _ONLY_READ and not writing):
        return ending
    if content:
        return content
    if is_file and (ending in torch_file.ENDINGS or _is_pickle(name)):
        return "torch"  # which says what it is instead
    if is_file and ending not in _READERS:
        require_content(name)
    problem = f"it has an unknown ending, {name.suffix!r:.30}"
    cure = (
        "Known are .safetensors, .npz, .msgpack, .schema.toml, .bin, .pt and .pth of "
        "PyTorch, folders of Orbax or of .safetensors."
    )
    if ending in _ENDINGS:
        problem = f"{ending} files are read, but not written"
    if writing:
        cure = "Write .safetensors, .schema.toml, or without an ending for Orbax."
    elif name.name == CONFIG:
        cure = f"Name its folder, {listing([str(name.parent)])}."
    elif ending in ("toml", "json"):
        cure += (
            " Other data is read with ta.load_migration, ta.load_rules, "
            "ta.load_optimizer or ta.FreezeSpec.load."
        )
    elif ending in _READERS:
        cure += f" Read it with {_READERS[ending]}, and save what it gives."
    refuse(name, problem, cure)


def checkpoints_in(folder: AnyPath) -> list[AnyPath]:
    """Return the checkpoints in a folder: files, indexes, and what Orbax wrote.

    Files of PyTorch count if there is none of these, as in folders that have both.
    """
    names = [*safetensors_file.checkpoints(folder), *orbax_folder.checkpoints(folder)]
    return names or torch_file.checkpoints(folder) or [*_of_flax(folder)]


def last_step(folder: AnyPath) -> tuple[str, str]:
    """Return the name of the last complete step in a folder of a run, or "".

    Returns:
        Its name, and the other steps in words: those before it, and later ones that are
        not complete; nothing where there is no other.
    """
    if not folder.is_dir() or any((folder / x).is_file() for x in _NO_RUN):
        return "", ""
    steps = {x.name: _STEP.fullmatch(x.name) for x in folder.iterdir()}
    numbers = {name: (int(m[2]), m[1]) for name, m in steps.items() if m}
    if len({prefix for _, prefix in numbers.values()}) > 1:
        return "", ""
    torn: list[str] = []
    for name in sorted(numbers, key=numbers.__getitem__, reverse=True):
        num_items = _num_items(folder / name)
        if num_items > 1:  # one of which must be named
            return "", ""
        if num_items:
            before = plural(len(numbers) - len(torn) - 1, "earlier step")
            texts = [before] * (len(numbers) > len(torn) + 1)
            texts += [f"{listing(torn, limit=3)} incomplete"] * bool(torn)
            return name, ", ".join(texts)
        torn.append(name)
    return "", ""


def _num_items(step: AnyPath) -> int:
    """Return how many checkpoints a step holds; 0 if it was not written to its end."""
    if step.is_file():
        return int(_format_of_content(step) == "msgpack")
    # On Google's store Orbax marks what is complete; elsewhere it renames it then.
    is_marked = not str(step).startswith("gs://") or (step / _COMMITTED).is_file()
    return len(orbax_folder.checkpoints(step)) if is_marked else 0


def _of_flax(folder: AnyPath) -> Iterator[AnyPath]:
    """Yield what Flax's ``save_checkpoint`` wrote, such as ``checkpoint_4``."""
    for file in folder.glob("[!.]*[0-9]"):
        if file.is_file() and _format_of_content(file) == "msgpack":
            yield file


def _format_of_content(file: AnyPath) -> str:
    """Return the format of a file of any name, as its first bytes say; or ""."""
    start = read_range(file, 0, HEAD_BYTES)
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**32:
        return "safetensors"
    if torch_file.is_archive(start):
        return "torch"
    name_bytes = int.from_bytes(start[26:28], "little")  # of an archive's first file
    if start[:4] == b"PK\3\4" and start[30 : 30 + name_bytes].endswith(b".npy"):
        return "npz"
    return "msgpack" if _MAP.match(start) else ""


def _is_pickle(file: AnyPath) -> bool:
    """Return whether ``pickle`` wrote a file."""
    return read_range(file, 0, HEAD_BYTES)[:1] == b"\x80"


def require_content(file: AnyPath) -> None:
    """Raise if a file is there and what should be in it is not.

    Raises:
        CheckpointError: it is empty, a pointer of Git LFS, or a web page.
    """
    if not file.is_file():
        return
    start, again = read_range(file, 0, HEAD_BYTES), AGAIN
    if not start:
        refuse(file, "it is empty", again)
    if start.startswith(_LFS):
        cure = f"Run git lfs pull in {listing([str(file.parent)])}."
        cure = again if isinstance(file, RemotePath) else cure
        refuse(file, "it is a pointer of Git LFS, and not the file itself", cure)
    if _PAGE.match(start):
        refuse(file, "it is a web page, maybe of an error", again)


def located(name: AnyPath) -> tuple[AnyPath, str]:
    """Return the checkpoint that is meant by a file or folder, and its format.

    Of a folder that is itself, or a file in it; names that the libraries give by
    themselves come before all others.

    Raises:
        CheckpointError: there is none, or more than one.
    """
    kind = format_of(name)
    is_folder = kind != "schema" and name.is_dir()
    if name.is_file():
        return name, kind
    names = checkpoints_in(name) if is_folder else []
    standard = [each for each in names if each.name in _STANDARD]
    if not standard:
        lacking, cure = without_index(name, names)
        if lacking:
            refuse(name, lacking, cure)
    first, *others = standard or names or [name]
    if first != name and not others:
        chosen = name if first.is_dir() or first.name in _FOLDERS else first
        return chosen, format_of(chosen)
    problem, cure = "it holds several", proposal(name) if is_folder else ""
    if not is_folder:
        problem = f"it is not a {kind} file"
    elif len(standard) > 1:
        problem = (
            f"it holds more than one checkpoint, {listing([*map(str, standard)])}, and "
            "readers differ in which they take"
        )
        cure = "Move away the one that is not meant, or name the other one."
    elif first == name and (name / _OF_JAX).is_file():
        problem = "JAX's pytree_serialization wrote it, which keeps a tree of its own"
        cure = (
            "Read it with JAX (and pip install flatbuffers), and load that tree: from "
            "jax.experimental.array_serialization import pytree_serialization; "
            f"ta.load(pytree_serialization.load({str(name)!r}), target)."
        )
    elif first == name:
        problem = (
            "there is neither an Orbax checkpoint nor a .safetensors file, or one of "
            "PyTorch, in it"
        )
    refuse(name, problem, cure)


def proposal(folder: AnyPath) -> str:
    """Name the checkpoints below a folder, such as the steps of a manager."""
    steps = [step for step in folder.glob("[!.]*") if "-tmp" not in step.name]
    revisions = folder.glob("snapshots/[!.]*")  # as in the cache of Hugging Face
    folders = [folder, *steps, *revisions]
    paths = [path for each in folders for path in checkpoints_in(each)]
    paths += [path for kind in _ONLY_READ for path in folder.glob(f"[!.]*.{kind}")]
    names = {str(x.parent if x.name in _OF_ORBAX else x): None for x in paths}
    latest = sorted(names, key=lambda x: re.sub(r"\d+", lambda n: n[0].zfill(20), x))
    if latest:
        return f"It holds {listing(latest[::-1])}. Name one of them."
    for link in folder.glob("[!.]*.safetensors*"):
        if isinstance(link, Path) and not link.exists():
            return broken_link(link)
    return ""
