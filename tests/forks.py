"""Programs that need a process of their own, as forks of one that has imported JAX.

To import JAX takes a second or two, to fork a process some milliseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

#: What treeadapt imports.
IMPORTS = "import jax, jax.numpy, jax.tree_util, numpy, optax, optax.contrib"

SERVER = """
import gc, json, os, signal, sys, traceback, warnings
warnings.filterwarnings("ignore", "os.fork")  # no thread is running yet
gc.collect(), gc.freeze()  # the collector need not look at what was imported
for line in sys.stdin:
    task = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, name in enumerate(task["files"]):
        os.dup2(os.open(name, os.O_RDWR), number)
    os.environ.update(task["env"])
    sys.argv = task["argv"]
    signal.alarm(300)
    status = 0
    try:
        exec(compile(task["program"], "<string>", "exec"))
    except SystemExit as stopped:
        status = stopped.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)  # Python overflows its stack when it frees a deep tree
"""


class Forks:
    """A process that runs programs in forks of itself, one after the other.

    Args:
        prelude: what the process runs first; its names are those of every program.
        options: of Python.
    """

    def __init__(self, prelude: str = IMPORTS, *options: str):
        self._process = subprocess.Popen(
            [sys.executable, *options, "-c", f"{prelude}\n{SERVER}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        program: str,
        *arguments: object,
        terminal: str | None = None,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program with arguments and more variables of the environment.

        With ``terminal``, the name of one, it writes there and not into the result.
        """
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdout", "stderr")]
            for file in files:
                file.touch()
            task = {
                "program": textwrap.dedent(program),
                "argv": ["-c", *map(str, arguments)],
                "env": env,
                "files": [os.devnull, *(terminal or str(file) for file in files)],
            }
            print(json.dumps(task), file=self._process.stdin, flush=True)
            status = int(self._process.stdout.readline())
            texts = [file.read_text("utf-8") for file in files]
        return subprocess.CompletedProcess(task["argv"], status, *texts)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
