"""Plots of the results: time by size, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.harness import Result

COLOURS = ("#1b6ca8", "#8a8a8a", "#d1495b", "#edae49", "#66a182", "#7d5ba6")
COLOURS += ("#222222", "#35b5c9")  # as many as the work with the most contenders has


def write(results: Sequence[Result], folder: Path) -> Iterator[Path]:
    """Write one SVG for each topic that was measured at several sizes.

    Args:
        results: rows of the table.
        folder: where to write; created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for topic in dict.fromkeys(row.topic for row in results):
        rows = [row for row in results if row.topic == topic and row.seconds]
        works = [
            work
            for work in dict.fromkeys(row.work for row in rows)
            if len({row.size for row in rows if row.work == work}) > 1
        ]
        if not works:
            continue
        figure, axes = pyplot.subplots(
            1, len(works), figsize=(4.4 * len(works), 3.6), squeeze=False
        )
        for axis, work in zip(axes[0], works, strict=True):
            _draw(axis, work, [row for row in rows if row.work == work])
        figure.tight_layout()
        path = folder / f"{topic}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        yield path


def _draw(axis: Axes, work: str, rows: Sequence[Result]) -> None:
    names = dict.fromkeys(row.contender for row in rows)
    for place, name in enumerate(names):
        own = [row for row in rows if row.contender == name]
        axis.loglog(
            [row.size for row in own],
            [row.seconds * 1e3 for row in own if row.seconds],
            marker="o",
            markersize=4,
            linewidth=2.2 if name == "treeadapt" else 1.4,
            color=COLOURS[place % len(COLOURS)],
            label=name,
        )
    axis.set_title(work, fontsize=10)
    axis.set_xlabel("leaves")
    axis.set_ylabel("milliseconds")
    axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False)
