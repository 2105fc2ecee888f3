"""``python -m benchmarks``: run the races, print the table, write JSON and plots."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from benchmarks import (
    caches,
    checkpointing,
    conversion,
    decoding,
    dispatch,
    drafting,
    grouping,
    labelling,
    matching,
    migrating,
    operating,
    planning,
    stacking,
    starting,
    training,
)
from benchmarks.harness import Race, Result, Target, figure, run
from benchmarks.tables import document, table, write_page

TOPICS: dict[str, Any] = {
    "conversion": conversion,
    "labels": labelling,
    "partition": grouping,
    "dispatch": dispatch,
    "caches": caches,
    "migrations": migrating,
    "operations": operating,
    "drafts": drafting,
    "matching": matching,
    "checkpoints": checkpointing,
    "decoding": decoding,
    "planning": planning,
    "stacks": stacking,
    "training": training,
    "command": starting,
}

ALL_TOPICS_MINUTES = 50


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen topics; return the process's exit code."""
    options = _options(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    chosen = options.topics or [*TOPICS]
    console.print(
        f"{len(chosen)} of {len(TOPICS)} topics; all take about {ALL_TOPICS_MINUTES} "
        "minutes on two quiet cores. Each race is printed when it is done."
    )
    console.print(table([]))
    results: list[Result] = []

    def add(rows: list[Result]) -> None:
        results.extend(rows)
        if rows:
            console.print(table(rows, show_header=False))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for name in chosen:
            races = list(_races(TOPICS[name], quick=options.quick))
            task = progress.add_task(name, total=len(races) + 1)
            for race in races:
                if options.quick:  # too small for a target
                    race = dataclasses.replace(race, targets={})
                add(run(race, budget_s=options.budget))
                progress.advance(task)
            add(_figures(TOPICS[name], quick=options.quick))
            progress.advance(task)
    if not options.quick:
        add(growth(results))
    missed = [row for row in results if row.met is False]
    if not options.quick:
        console.print(f"{len(missed)} of {_num_targets(results)} targets missed.")
    if options.json:
        Path(options.json).write_text(json.dumps(document(results), indent=1) + "\n")
    if options.page:
        write_page(Path(options.page), results)
    if options.plots:
        from benchmarks import plots

        for path in plots.write(results, Path(options.plots)):
            console.print(f"wrote {path}")
    return 0


def growth(results: list[Result]) -> list[Result]:
    """Compare the ratios to the floor at 100,000 leaves with those at 10,000."""
    small, large = 10_000, 100_000
    ratios = {(row.work, row.contender, row.size): row.ratio for row in results}

    def ratio(work: str, size: int) -> float | None:
        own = ratios.get((work, "treeadapt", size))
        floors = [ratios.get((work, name, size)) for name in conversion.FLOORS]
        floor = next((found for found in floors if found), None)
        return own / floor if own and floor else None

    rows = []
    for work in dict.fromkeys(row.work for row in results):
        one, two = ratio(work, small), ratio(work, large)
        if one and two:
            rows.append(
                figure(
                    "growth",
                    f"{work}: ratio to the floor, vs that at {small:,}",
                    large,
                    "treeadapt",
                    two / one,
                    of=f"{small:,} leaves",
                    target=Target(at_most=1.2),
                )
            )
    return rows


def _races(topic: Any, *, quick: bool) -> Iterator[Race]:
    if not quick:
        return topic.races()
    smallest: dict[str, tuple[Any, ...]] = {
        "labels": ((1_000,),),
        "partition": (20, 2),
        "dispatch": (1,),
        "caches": (50,),
        "migrations": (2, 2, 128, 256, 100),
        "operations": (2, 2, 256, 200),
        "drafts": (2, 2),
        "planning": (1, 1),
        "stacks": (12, 8),
        "training": (1, 2),
        "command": ((), ()),
    }
    if topic is conversion:
        return topic.races((24,), real_models=False)
    return topic.races(*smallest.get(topic.TOPIC, ()))


def _figures(topic: Any, *, quick: bool) -> list[Result]:
    if not hasattr(topic, "figures"):
        return []
    smallest = {
        "conversion": (1_000, 1),
        "partition": (20, 2),
        "dispatch": (1,),
        "caches": (50, 1),
        "migrations": (2, 2, 128, 256, 100),
        "drafts": (2, 2),
        "matching": ((6,),),
        "planning": (1, 1),
        "stacks": (12, 8),
    }
    if topic in (checkpointing, decoding) and quick:
        return list(topic.figures(2, 128, 1, apart=False))
    return list(topic.figures(*(smallest.get(topic.TOPIC, ()) if quick else ())))


def _num_targets(results: list[Result]) -> int:
    return sum(row.met is not None for row in results)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("topics", nargs="*", choices=[*TOPICS, []], metavar="topic")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes only")
    parser.add_argument(
        "--budget", type=float, default=1.5, help="seconds for each race (1.5)"
    )
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--page", help="write the table into this Markdown page")
    parser.add_argument("--plots", help="write the plots to this folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
