"""Starting the command: help and completion need no JAX, other commands little else.

Each way is a process, timed from its start to its end. Next to it is one that imports
what it cannot do without, and does nothing.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import treeadapt as ta
from benchmarks.harness import Race, Target

TOPIC = "command"

_COMPLETING = ("", "show", "lint --ignore")  # each followed by a space
_RULES = 'version = 1\n[rules]\n"encoder" = "frozen"\n"**" = "train"\n'
_ON_A_FILE = (
    "show model.safetensors",
    "lint model.safetensors --rules rules.toml",
    "explain model.safetensors head/w --rules rules.toml",
)


def races(
    completing: Sequence[str] = _COMPLETING, on_a_file: Sequence[str] = _ON_A_FILE
) -> Iterator[Race]:
    """Yield the races: help, completion of some words, and commands on a small file."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)  # races run after all are listed
    tree = {name: {"w": np.ones((2, 3), "f4")} for name in ("encoder", "head")}
    ta.save(Path(folder, "model.safetensors"), tree)
    Path(folder, "rules.toml").write_text(_RULES, "utf-8")
    yield _race("--help", folder, "click", 2.5)
    for words in completing:
        typed = ["treeadapt", *words.split()]
        variables = {
            "_TREEADAPT_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(typed),
            "COMP_CWORD": str(len(typed)),
        }
        yield _race("", folder, "click", 2.5, variables)
    for words in on_a_file:
        yield _race(words, folder, "jax, optax", 1.6)


def _race(
    words: str,
    folder: str,
    libraries: str,
    at_most: float,
    variables: dict[str, str] | None = None,
) -> Race:
    """Return a race of one command with an import of libraries."""
    program = (sys.executable, "-m", "treeadapt", *words.split())
    floor = (sys.executable, "-c", f"import {libraries}")
    package = str(Path(ta.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": package, **(variables or {})}
    completed = (variables or {}).get("COMP_WORDS")
    work = f"complete {completed!r}" if completed else f"treeadapt {words}"

    def started(command: Sequence[str]) -> None:
        subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)

    return Race(
        topic=TOPIC,
        work=work,
        size=1,
        contenders={
            "treeadapt": lambda: started(program),
            f"import {libraries}": lambda: started(floor),
        },
        baseline=f"import {libraries}",
        targets={"treeadapt": Target(at_most=at_most)},
    )
