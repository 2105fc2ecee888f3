"""Running several processes that JAX connects, each with a different hash seed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

NUM_DEVICES = 8
TIMEOUT_S = 50.0


def once(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """Return a folder that all test processes share, and whether this one made it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= name
    try:
        folder.mkdir()
    except FileExistsError:
        wait_for(folder / "exit-codes.json")
        return folder, False
    return folder, True


def start(
    worker: Path, processes: int, folder: Path, *args: Any, wait_for_all: bool = False
) -> None:
    """Run the processes until they finish, or kill them.

    Args:
        worker: what each runs, with its number, their number, a port, ``folder`` and
            ``args``.
        processes: their number.
        folder: where each writes its output, and at last this the exit codes.
        args: more arguments.
        wait_for_all: whether to wait even if one fails.
    """
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []
    try:
        for process in range(processes):
            with (folder / f"output-{process}.txt").open("wb") as output:
                started.append(
                    subprocess.Popen(
                        [sys.executable, str(worker)]
                        + [str(arg) for arg in (process, processes, port, folder)]
                        + [str(arg) for arg in args],
                        env=environment(processes, hash_seed=process + 1),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                    )
                )
        wait(started, wait_for_all=wait_for_all)
    finally:
        codes = [child.poll() for child in started]
        for child in started:
            child.kill()
            child.wait()
        part = folder / "exit-codes.part"
        part.write_text(json.dumps(codes))
        part.rename(folder / "exit-codes.json")


def exit_codes(folder: Path) -> list[int | None]:
    """Return how each process ended; None if it did not end by itself."""
    return list(json.loads((folder / "exit-codes.json").read_text()))


def require_success(folder: Path) -> None:
    """Raise with the output of a process that failed."""
    codes = exit_codes(folder)
    for process, code in enumerate(codes):
        text = (folder / f"output-{process}.txt").read_text(errors="replace")
        assert code == 0, f"process {process} of {len(codes)} exits {code}:\n{text}"


def wait_for(file: Path) -> None:
    end = time.monotonic() + TIMEOUT_S + 5
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)


def wait(started: Iterable[subprocess.Popen[bytes]], *, wait_for_all: bool) -> None:
    """Wait for all of them, or for one that fails, because the others then hang."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        codes = [child.poll() for child in started]
        failed = any(codes) and not wait_for_all
        if failed or all(code is not None for code in codes):
            return
        time.sleep(0.05)


def environment(processes: int, *, hash_seed: int) -> dict[str, str]:
    root = str(Path(__file__).parent.parent)
    devices = NUM_DEVICES // processes
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))),
        "XLA_FLAGS": re.sub(
            r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"]
        ),
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
