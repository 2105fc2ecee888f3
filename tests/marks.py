"""What is next to the arrays of a checkpoint: ties, kinds of leaves, and the hash.

Ties and kinds are read from the schema that the command makes of a checkpoint, the hash
as other programs find it in a file of each format.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from pathlib import Path

import safetensors
from command import run


def schema_of(path: Path) -> dict[str, str]:
    """What the schema of a checkpoint says of each leaf."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.schema.toml"
        run("convert", path, file)
        return tomllib.loads(file.read_text("utf-8"))["leaves"]


def ties_of(path: Path) -> dict[str, str]:
    """The path of each leaf that is another one, and that other."""
    start = "tied to "
    texts = schema_of(path).items()
    return {one: text[len(start) :] for one, text in texts if text.startswith(start)}


def kinds_of(path: Path) -> dict[str, str]:
    """What leaves of a checkpoint were, where an array cannot say it."""
    kinds = {}
    for one, text in schema_of(path).items():
        if text.startswith("key<"):
            kinds[one] = text[len("key<") :].rpartition("> ")[0]
        elif text.split()[0] in ("bool", "int", "float", "complex", "number"):
            kinds[one] = "number"
    return kinds


def hash_of(path: Path) -> str:
    """The hash of its leaves that a checkpoint has."""
    if path.name.lower().endswith(".schema.toml"):
        return tomllib.loads(path.read_text("utf-8"))["hash"]
    if path.is_file():
        with safetensors.safe_open(path, "np") as file:
            return json.loads(file.metadata()["treeadapt"])["hash"]
    if (index := path / "model.safetensors.index.json").exists():
        return json.loads(index.read_text("utf-8"))["metadata"]["treeadapt"]["hash"]
    document = json.loads((path / "_METADATA").read_text("utf-8"))
    return document["custom_metadata"]["treeadapt"]["hash"]
