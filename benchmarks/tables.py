"""The results of races: a readable table, data, and a table in a page."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from benchmarks.harness import Result

# Characters, so that the tables of two races are one.
COLUMNS = {
    "work": 46,
    "leaves": 9,
    "contender": 30,
    "time": 8,
    "ratio": 6,
    "quartiles": 15,
    "target": 18,
}


def table(results: list[Result], *, show_header: bool = True) -> Table:
    """Return the results as a table, whose columns fit below those of another."""
    made = Table(box=None, header_style="bold", pad_edge=False, show_header=show_header)
    for name, width in COLUMNS.items():
        right = name in ("leaves", "time", "ratio")
        made.add_column(name, justify="right" if right else "left", width=width)
    last = None
    for row in results:
        work = (row.work, row.size)
        mark = {True: "  met", False: "  MISSED", None: ""}[row.met]
        made.add_row(
            row.work if work != last else "",
            f"{row.size:,}" if work != last else "",
            row.contender,
            _time(row.seconds),
            f"{row.ratio:.2f}",
            f"{row.low:.2f} - {row.high:.2f}" if row.seconds is not None else "",
            f"{row.target}{mark}",
        )
        last = work
    return made


def write_page(path: Path, results: list[Result]) -> None:
    """Put the table and the machine into a page, between two markers."""
    text = path.read_text("utf-8")
    start, end = "<!-- table -->\n", "<!-- end of table -->"
    before, _, rest = text.partition(start)
    after = rest.partition(end)[2]
    about = document([])
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    lines = [
        f"{about['cores']} cores, {about['device']}, Python {about['python']}, "
        f"{versions}.",
        "",
        "| work | leaves | contender | time | ratio | quartiles | target |",
        "| --- | ---: | --- | ---: | ---: | --- | --- |",
    ]
    for row in results:
        mark = {True: " met", False: " **missed**", None: ""}[row.met]
        spread = f"{row.low:.2f} - {row.high:.2f}" if row.seconds is not None else ""
        lines.append(
            f"| {row.work} | {row.size:,} | {row.contender} | {_time(row.seconds)} "
            f"| {row.ratio:.2f} | {spread} | {row.target}{mark} |"
        )
    path.write_text("\n".join([before + start.rstrip(), *lines, end + after]), "utf-8")


def document(results: list[Result]) -> dict[str, Any]:
    """Return the results with the versions and the machine, as data."""
    peers = ("flax", "equinox", "orbax-checkpoint", "optree", "dm-tree")
    names = ("jax", "jaxlib", "optax", *peers)
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": jax.devices()[0].device_kind,
        "cores": _num_cores(),
        "versions": _versions(names),
        "results": [dataclasses.asdict(row) for row in results],
    }


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _num_cores() -> int:
    import psutil

    return len(psutil.Process().cpu_affinity())


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
