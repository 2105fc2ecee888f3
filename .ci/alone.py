"""Run the tests of ``tests/test_alone.py`` with no optional library, and with each one.

Every job is a virtual environment of its own inside the folder given. They share one
base with JAX, NumPy, Optax and the test runner through a path file, so that only the
one library, and what it brings along, has to be installed for a job.

    python .ci/alone.py FOLDER [JOB ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lowest import SETUP, lowest

REPOSITORY = SETUP.parent
#: Job -> what is installed, and the optional modules that must then be there.
JOBS: dict[str, tuple[tuple[str, ...], str]] = {
    "none": ((), ""),
    "attrs": (("attrs",), "attrs"),
    "brax": (("brax",), "brax flax orbax rich"),
    "chex": (("chex",), "chex"),
    "equinox": (("equinox",), "equinox"),
    "flax": (("flax",), "flax orbax rich"),
    "haiku": (("dm-haiku",), "haiku"),
    "orbax": (("orbax-checkpoint",), "orbax"),
    "paramax": (("paramax",), "equinox paramax"),
    "penzai": (("penzai",), "penzai"),
    "remote": (("aiohttp", "fsspec"), "attrs"),  # fsspec comes with others, too
    "safetensors": (("safetensors",), "safetensors"),
}
BASE = ("click", "jax", "numpy", "optax", "pytest", "hypothesis")
TESTS = ("tests/test_alone.py", "tests/test_golden.py")


def environment(folder: Path, names: Sequence[str], base: Path | None = None) -> Path:
    """Make a virtual environment with some of the libraries of ``setup.cfg``.

    Args:
        folder: of the environment; one that has just these is left as it is.
        names: of libraries; the newest versions that the bounds allow are taken.
        base: another environment, all of whose libraries are seen too.

    Returns:
        Its Python.
    """
    python = folder / "bin" / "python"
    bounds = lowest(SETUP.read_text("utf-8"))
    wanted = [f"{name}>={bounds[name]}" for name in names]
    ready = folder / ".ready"
    if not ready.exists() or ready.read_text("utf-8").split() != wanted:
        venv.create(folder, clear=True, symlinks=True)
        if base:
            (there,) = base.glob("lib/python3*/site-packages")
            (here,) = folder.glob("lib/python3*/site-packages")
            (here / "base.pth").write_text(f"{there.resolve()}\n")
        if wanted:
            pip = [sys.executable, "-m", "pip", "--python", python]
            subprocess.run(
                [*pip, "install", "-qq", "--no-compile", *wanted], check=True
            )
        ready.write_text("\n".join(wanted), "utf-8")
    return python


def run(folder: Path, job: str) -> tuple[int, str]:
    """Run one job, whose base must be there.

    Returns:
        Exit status and what the test runner printed.
    """
    names, modules = JOBS[job]
    python = environment(folder / job, names, folder / "base")
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "TREEADAPT_TEST_ONLY": modules,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def main(folder: Path, jobs: Sequence[str]) -> int:
    """Run jobs, two at a time, and print a line for each.

    Returns:
        Number of jobs that failed.

    Raises:
        SystemExit: there is no job of some name.
    """
    unknown = [job for job in jobs if job not in JOBS]
    if unknown:
        sys.exit(f"No such job: {', '.join(unknown)}. There are {', '.join(JOBS)}.")
    environment(folder / "base", BASE)
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for job, (status, text) in zip(
            jobs, pool.map(lambda job: run(folder, job), jobs), strict=True
        ):
            failed += bool(status)
            print(text if status else "", end="")
            print(f"{job:12} {text.rstrip().splitlines()[-1]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(JOBS)))
