"""The harness: contenders timed in turns, so that their ratios are reliable.

A ``Race`` names one task and its contenders. ``run`` times them round by round, in
changing order, within one process. It reports the median of each contender's ratio to
the baseline, round by round, with its quartiles. Seconds are medians and depend on the
machine; ratios hardly do. Set-up and the harness's own work are never timed: a
contender that computes returns one array to wait for, and results are not searched for
arrays.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

MIN_SAMPLE_S = 0.01
#: Work that makes so many objects that one full collection doubles its time.
MIN_COLLECTED_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the work.

    Attributes:
        run: does it once; called with what ``fresh`` returns, if given. If it returns
            an array, the clock stops when that is computed.
        fresh: makes a new input for every sample, untimed (for cold work).
    """

    run: Callable[..., Any]
    fresh: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a ratio must reach: at most, or at least, a value."""

    at_most: float | None = None
    at_least: float | None = None

    def met(self, ratio: float) -> bool:
        """Return whether a ratio reaches the target."""
        if self.at_most is not None:
            return ratio <= self.at_most
        return ratio >= (self.at_least or 0.0)

    def __str__(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:.3g}"
        return f">= {self.at_least:.3g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Race:
    """One task, its contenders, and their targets.

    Attributes:
        topic, work, size: position of the row in the table; ``size`` counts leaves.
        contenders: by name; the first one is ours.
        baseline: name of the contender in the denominator of the ratios.
        targets: what the ratio of a contender to the baseline must reach.
    """

    topic: str
    work: str
    size: int
    contenders: Mapping[str, Contender | Callable[[], Any]]
    baseline: str
    targets: Mapping[str, Target] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One contender in one race, or one counted figure.

    Attributes:
        seconds: median of one run; None for a figure that is not a time.
        ratio: median of its ratio to the baseline, with quartiles.
    """

    topic: str
    work: str
    size: int
    contender: str
    baseline: str
    seconds: float | None
    ratio: float
    low: float
    high: float
    target: str = ""
    met: bool | None = None


def figure(
    topic: str,
    work: str,
    size: int,
    contender: str,
    value: float,
    *,
    of: str,
    target: Target | None = None,
) -> Result:
    """Return a row for a figure that was counted, not timed."""
    return Result(
        topic=topic,
        work=work,
        size=size,
        contender=contender,
        baseline=of,
        seconds=None,
        ratio=value,
        low=value,
        high=value,
        target=str(target or ""),
        met=None if target is None else target.met(value),
    )


def run(race: Race, *, budget_s: float) -> list[Result]:
    """Time the contenders of a race.

    Args:
        race: what to run.
        budget_s: about how long the race may take, in seconds; at most twice as long
            if some of the contenders have a target.

    Returns:
        One row for each contender.
    """
    contenders = {name: _contender(given) for name, given in race.contenders.items()}
    once = {name: _calibrate(contender) for name, contender in contenders.items()}
    repeats = {
        name: 1
        if contenders[name].fresh
        else max(1, min(2_000, int(MIN_SAMPLE_S / max(seconds, 1e-9))))
        for name, seconds in once.items()
    }

    def rounds(names: Collection[str]) -> int:
        a_round = sum(once[name] * repeats[name] for name in names)
        return max(3, min(41, int(budget_s / max(a_round, 1e-6))))

    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    judged = [n for n in names if n in (names[0], race.baseline, *race.targets)]
    gc.collect()  # it stays on afterwards: code that creates many objects pays for them
    order = random.Random(0)
    for nth in range(rounds(judged)):
        # The others, of which some take a hundred times as long, join the first rounds.
        turn = names if nth < rounds(names) else judged
        # No fixed neighbours: a contender after a large one finds cold caches.
        for name in order.sample(turn, len(turn)):
            if once[name] > MIN_COLLECTED_S:
                gc.collect()  # else a few contenders pay for the objects of all
            samples[name].append(_sample(contenders[name], repeats[name]))
    return [_result(race, name, samples) for name in names]


def run_apart(
    module: str,
    devices: int,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Run a module in a process of its own; return what its last line of JSON says.

    Args:
        module: its name; it prints what it measured.
        devices: how many of the CPU it has.
        arguments: of its command line.
        environment: further variables of its environment.
    """
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        check=True,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            **(environment or {}),
        },
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _contender(given: Contender | Callable[[], Any]) -> Contender:
    return given if isinstance(given, Contender) else Contender(run=given)


def _calibrate(contender: Contender) -> float:
    _sample(contender, 1)  # compiles and fills caches
    once = _sample(contender, 1)
    if once > MIN_SAMPLE_S:  # long enough to measure; some take seconds
        return once
    return min(once, *(_sample(contender, 1) for _ in range(2)))


def _sample(contender: Contender, repeats: int) -> float:
    if contender.fresh is not None:
        given = contender.fresh()
        start = time.perf_counter()
        _wait(contender.run(given))
        return time.perf_counter() - start
    run = contender.run
    start = time.perf_counter()
    for _ in range(repeats):
        out = run()
    _wait(out)
    return (time.perf_counter() - start) / repeats


def _wait(out: Any) -> None:
    if isinstance(out, jax.Array):
        out.block_until_ready()


def _result(race: Race, name: str, samples: Mapping[str, list[float]]) -> Result:
    base = samples[race.baseline]
    ratios = [one / other for one, other in zip(samples[name], base, strict=False)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    target = race.targets.get(name)
    return Result(
        topic=race.topic,
        work=race.work,
        size=race.size,
        contender=name,
        baseline=race.baseline,
        seconds=statistics.median(samples[name]),
        ratio=ratio,
        low=low,
        high=high,
        target=str(target or ""),
        met=None if target is None else target.met(ratio),
    )
