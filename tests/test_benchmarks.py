"""The benchmarks run at their smallest size, so that they keep working."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import gpu
from benchmarks.__main__ import TOPICS, main
from benchmarks.harness import Race, Target, run

pytestmark = [
    pytest.mark.usefixtures("standard_promotion", "small_heap"),
    # On a busy machine, a round may leave a file handle to the collector.
    pytest.mark.filterwarnings("ignore:JAXopt:DeprecationWarning"),
]


@pytest.mark.slow
@pytest.mark.parametrize("topic", TOPICS)
def test_topic_runs_and_writes_its_results(topic, tmp_path):
    file = tmp_path / "results.json"
    assert main([topic, "--quick", "--budget", "0.01", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    rows = document["results"]
    assert rows
    assert {row["topic"] for row in rows} == {TOPICS[topic].TOPIC}
    assert all(math.isfinite(row["ratio"]) and row["ratio"] >= 0 for row in rows)
    assert document["versions"]["jax"]


def test_a_slower_contender_has_a_larger_ratio():
    race = Race(
        topic="t",
        work="w",
        size=1,
        contenders={"slow": lambda: sum(range(50_000)), "fast": lambda: sum(range(50))},
        baseline="fast",
        targets={"slow": Target(at_most=2)},
    )
    slow, fast = run(race, budget_s=0.1)
    assert slow.ratio > 10
    assert slow.met is False
    assert fast.ratio == 1


@pytest.mark.slow
def test_the_races_of_a_gpu_run_on_a_cpu(capsys):
    assert gpu.main(["--small"]) == 0
    printed = capsys.readouterr().out
    assert "one Muon step" in printed
    assert "written by hand" in printed
