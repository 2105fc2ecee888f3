"""Checkpoints of several processes: what each loads, how all fail, and that none hangs.

Two processes on this machine (``jax.distributed``, gloo, eight CPU devices in all) run
``process_checkpoints_worker.py``, each with a different hash seed; in ``make
test-full``, four as well.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import process_checkpoints_worker as worker
import pytest
from several import exit_codes, once, require_success, start
from sizes import full

import treeadapt as ta

pytestmark = [
    pytest.mark.slow,
    # Orbax may leave its event loop to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(os.name != "posix", reason="POSIX only"),
]

WORKER = Path(worker.__file__)
COUNTS = full([2, 4], [2])


@dataclasses.dataclass(frozen=True)
class Run:
    """What several processes wrote: a folder of checkpoints, and reports."""

    folder: Path
    reports: list[dict[str, Any]]


@pytest.fixture(scope="module", params=COUNTS, ids="{} processes".format)
def together(request, tmp_path_factory) -> Run:
    processes = request.param
    folder, is_new = once(f"{processes}-checkpoints", tmp_path_factory)
    if is_new:
        model = jax.jit(worker.make_model)() | worker.extra(1)
        ta.save(folder / "alone", model)
        ta.save(folder / "alone.safetensors", model)
        ta.save(folder / "shards", model, max_shard_bytes=700)
        start(WORKER, processes, folder)
    require_success(folder)
    names = range(processes)
    return Run(
        folder,
        [json.loads((folder / f"report-{name}.json").read_text()) for name in names],
    )


def test_each_process_loads_its_parts_of_any_checkpoint_bit_for_bit(together):
    for report in together.reports:
        found = report["wrong"]
        assert len(found) == 1 + 4 * 6 + 1
        assert not any(found.values()), found


def test_each_process_reads_its_parts_of_a_file_only(together):
    for report in together.reports:
        assert report["share"] < 1 / len(together.reports) + 0.1


def test_one_process_loads_what_several_saved(together):
    like = worker.abstract_model(8, 1) | worker.extra(0)
    loaded = ta.load(together.folder / "together", like)
    expected = jax.jit(worker.make_model)() | worker.extra(1)
    assert not ta.tree_diff(loaded, expected, values=True)
    assert loaded["step"] == 7
    plain = ta.load(together.folder / "together")
    assert not ta.tree_diff(plain, ta.load(together.folder / "alone"), values=True)
    plain["key"] = np.asarray(jax.random.key_data(plain["key"]))
    with ocp.StandardCheckpointer() as checkpointer:
        by_orbax = checkpointer.restore(together.folder / "together", plain)
    assert not ta.tree_diff(by_orbax, plain, values=True)


ERRORS = {
    "other tree": r"LAST failed, so none goes on\. This process saves other leaves: "
    r"'b' is .*, 'c' is .*\. Save the same",
    "no folder": r"FIRST failed, so none goes on\. There is no folder .*Make it\.$",
    "other call": r"different calls \(process \d: save to .*; process \d: load\)",
    "other name": r"calls \(process \d: .*new-False'; process \d: .*new-True'\)",
    "no file": r"^CheckpointError: There is no checkpoint '.*nowhere'\.$",
    "no file there": r"LAST failed, .* There is no checkpoint '",
    "safetensors": r"'a' is also on devices of other processes\. Save as an Orbax",
    "shards": r"'a' is also on devices of other processes\. Save as an Orbax",
    "empty": r"^CheckpointError: The leaf 'b' has no elements",
    "full there": r"LAST .*together' cannot be written: .*(too large|OCDBT)",
    "full first": r"FIRST .*together' cannot be written: OSError: .*No space left",
    "full at last": r"FIRST .*together' cannot be written: OSError: .*No space left",
    "not shared": r"LAST .*There is no folder .* here, which process 0 made",
    "read there": r"LAST failed, .*OSError: .*Input/output error",
    "late": r"through \"save to '.*together'\": one did not come within 1 s",
    "afterwards": r"^no error$",
}


@pytest.mark.hazard("L3")
@pytest.mark.parametrize("case", ERRORS)
def test_all_processes_raise_if_one_cannot_go_on(case, together):
    count = len(together.reports)
    pattern = ERRORS[case].replace("LAST", rf"Process {count - 1} of {count}")
    pattern = pattern.replace("FIRST", rf"Process 0 of {count}")
    texts = {report["errors"][case] for report in together.reports}
    for text in texts:
        assert re.search(pattern, text, re.DOTALL), text
    assert len(texts) == 1 or case == "late"


def test_a_process_that_is_stopped_stops_the_others(together):
    *others, last = (report["errors"]["stopped"] for report in together.reports)
    assert last == "KeyboardInterrupt: "
    for text in others:
        assert "failed, so none goes on. KeyboardInterrupt" in text


def test_nothing_is_left_of_what_failed(together):
    names = {"alone", "alone.safetensors", "one.safetensors", "run", "shards"}
    names.add("together")
    found = {file.name for file in together.folder.iterdir()}
    assert {
        name for name in found if not name.startswith((".", "report", "output"))
    } == {
        *names,
        "exit-codes.json",
    }
    assert not [name for name in found if name.startswith(".")]


# Processes that die.

DEATHS = full(
    [
        (count, call, who)
        for count in (2, 4)
        for call in ("save", "load")
        for who in (0, count - 1)
    ],
    [(2, "save", 1)],
)
LIMIT_S = 40.0


@pytest.fixture(scope="module")
def deaths(tmp_path_factory) -> dict[Any, tuple[Path, float]]:
    """Run all cases, two at a time: most of their time is spent waiting."""
    base = tmp_path_factory.mktemp("deaths")

    def run(case: Any) -> tuple[Path, float]:
        count, call, who = case
        folder = base / f"{call}-{who}-of-{count}"
        folder.mkdir()
        ta.save(folder / "old", OLD)
        begin = time.monotonic()
        start(WORKER, count, folder, call, who, wait_for_all=True)
        return folder, time.monotonic() - begin

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(DEATHS, pool.map(run, DEATHS), strict=True))


OLD = {"params": {"embed": np.ones((16, 8), np.float32)}}


@pytest.mark.hazard("K23", "L3")
@pytest.mark.parametrize("case", DEATHS, ids=str)
def test_if_a_process_is_killed_the_others_end_and_the_old_checkpoint_stays(
    case, deaths
):
    (_, _, who), (folder, elapsed_s) = case, deaths[case]
    codes = exit_codes(folder)
    outputs = [
        (folder / f"output-{process}.txt").read_text(errors="replace")
        for process in range(len(codes))
    ]
    assert codes.pop(who) == -9, outputs[who]
    assert all(codes), outputs  # each ended by itself, with an error
    assert elapsed_s < LIMIT_S
    assert not ta.tree_diff(ta.load(folder / "old"), OLD, values=True)
    ta.save(folder / "old", OLD)
    left = {file.name for file in folder.iterdir() if file.name.startswith(".")}
    assert left == set()
