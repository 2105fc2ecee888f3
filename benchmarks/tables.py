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
    ]
    for rows in _tables(results):
        lines += [*rows, ""]
    path.write_text("\n".join([before + start.rstrip(), *lines, end + after]), "utf-8")


def _tables(results: list[Result]) -> list[list[str]]:
    """Return a table for each work of several sizes, and one for all others."""
    by_work: dict[str, list[Result]] = {}
    for row in results:
        by_work.setdefault(row.work, []).append(row)
    tables, others = [], []
    for rows in by_work.values():
        if len({row.size for row in rows}) > 1:
            tables.append(_by_size(rows))
        else:
            others += rows
    return [*tables, _by_work(others)] if others else tables


def _by_size(rows: list[Result]) -> list[str]:
    """Return a table with a line for each contender and a column for each size."""
    sizes = sorted({row.size for row in rows})
    cells = {(row.contender, row.size): row for row in rows}
    lines = [
        f"| {rows[0].work}: leaves | " + " | ".join(f"{n:,}" for n in sizes) + " |",
        "| --- |" + " ---: |" * len(sizes),
    ]
    for contender in dict.fromkeys(row.contender for row in rows):
        found = [cells.get((contender, size)) for size in sizes]
        texts = [_time_and_ratio(row) if row else "" for row in found]
        lines.append(f"| {contender} | {' | '.join(texts)} |")
    return lines


def _time_and_ratio(row: Result) -> str:
    if row.contender == row.baseline:
        return _time(row.seconds)
    ratio = f"{_time(row.seconds)}, {row.ratio:.2f} ({_spread(row)})"
    return f"{ratio}, {_target(row)}" if row.target else ratio


def _by_work(rows: list[Result]) -> list[str]:
    """Return a table with a line for each contender; a work is named once."""
    lines = [
        "| work | leaves | contender | time | ratio | target |",
        "| --- | ---: | --- | ---: | ---: | --- |",
    ]
    last = ""
    for row in rows:
        work, size = ("", "") if row.work == last else (row.work, f"{row.size:,}")
        ratio = f"{row.ratio:.2f}"
        if row.seconds is not None and row.contender != row.baseline:
            ratio += f" ({_spread(row)})"
        lines.append(
            f"| {work} | {size} | {row.contender} | {_time(row.seconds)} "
            f"| {ratio} | {_target(row)} |"
        )
        last = row.work
    return lines


def _spread(row: Result) -> str:
    return f"{row.low:.2f}\N{EN DASH}{row.high:.2f}"


def _target(row: Result) -> str:
    return row.target + {True: " met", False: " **missed**", None: ""}[row.met]


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
