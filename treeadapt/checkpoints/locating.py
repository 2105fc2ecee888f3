"""Which checkpoint a name means, and its format, which its ending says.

Takes the name of a file or folder; reads no more than the names in it, and indexes.
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
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from treeadapt.checkpoints import (
    msgpack_file,
    npz_file,
    orbax_folder,
    safetensors_file,
    schema_file,
)
from treeadapt.checkpoints.errors import UNPICKLED, refuse
from treeadapt.names import Speller, listing

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
_STANDARD = (safetensors_file.WHOLE, safetensors_file.INDEX, orbax_folder.METADATA)


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


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder: files, indexes, and what Orbax wrote."""
    return [*safetensors_file.checkpoints(folder), *orbax_folder.checkpoints(folder)]


def located(name: Path) -> tuple[Path, str]:
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
    one, *others = standard or names or [name]
    if one != name and not others:
        one = name if one.is_dir() or one.name in _STANDARD[1:] else one
        return one, format_of(one)
    problem, cure = "it holds several", proposal(name) if is_folder else ""
    if not is_folder:
        problem = f"it is not a {kind} file"
    elif len(standard) > 1:
        problem = (
            f"it holds more than one checkpoint, {listing([*map(str, standard)])}, and "
            "readers differ in which they take"
        )
        cure = "Move away the one that is not meant, or name the other one."
    elif one == name:
        problem = "there is neither an Orbax checkpoint nor a .safetensors file in it"
    refuse(name, problem, cure)


def proposal(folder: Path) -> str:
    """Name the checkpoints below a folder, such as the steps of a manager."""
    steps = [step for step in folder.glob("[!.]*") if "-tmp" not in step.name]
    revisions = folder.glob("snapshots/[!.]*")  # as in the cache of Hugging Face
    folders = [folder, *steps, *revisions]
    there = [one for each in folders for one in checkpoints_in(each)]
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
