"""Several processes, each with some of the devices, build and run the same program.

Two processes on this machine (``jax.distributed``, gloo, eight CPU devices in all) run
``multiprocess_worker.py``, each with a different hash seed; in ``make test-full``, four
as well. One process that has all devices runs it too. If a program depends on the order
of a set, it gives wrong numbers without an error (hazards L2, H16), so the tests
compare programs byte by byte.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several import once, require_success, start
from sizes import full

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "multiprocess_worker.py"


@dataclasses.dataclass(frozen=True)
class Run:
    """What the processes of one run wrote, in their order."""

    reports: list[dict[str, Any]]
    numbers: list[dict[str, np.ndarray]]


def run(processes: int, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run once, even if several test processes need the result."""
    folder, is_new = once(f"{processes}-processes", tmp_path_factory)
    if is_new:
        start(WORKER, processes, folder)
    require_success(folder)
    names = range(processes)
    return Run(
        [json.loads((folder / f"report-{name}.json").read_text()) for name in names],
        [dict(np.load(folder / f"numbers-{name}.npz")) for name in names],
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Run:
    return run(1, tmp_path_factory)


@pytest.fixture(scope="module", params=full([2, 4], [2]), ids="{} processes".format)
def together(request, tmp_path_factory) -> Run:
    return run(request.param, tmp_path_factory)


@pytest.mark.hazard("H16")
def test_the_processes_have_different_hash_seeds(together):
    orders = {tuple(report["order of a set"]) for report in together.reports}
    assert len(orders) > 1


@pytest.mark.hazard("L1")
def test_no_process_sees_a_whole_kernel(together):
    for report in together.reports:
        seen = report["seen"]
        assert max(seen[path] for path in seen if path.endswith("kernel")) <= 0.5


def test_a_training_state_is_sharded_by_one_call_in_all_processes(together, alone):
    (expected,) = alone.reports
    for report in together.reports:
        for path, (spec, share) in report["whole"].items():
            assert spec == expected["whole"][path][0]
            if path.endswith("kernel"):
                assert spec.endswith("('data', 'model')")
                assert share <= 0.5
    assert sum(path.endswith("kernel") for path in expected["whole"]) == 15


@pytest.mark.hazard("L2")
@pytest.mark.parametrize("program", ["init", "step", "there and back"])
def test_all_processes_build_one_program(together, alone, program):
    (expected,) = (report["programs"][program] for report in alone.reports)
    for report in together.reports:
        assert report["programs"][program] == expected


def test_the_numbers_are_those_of_one_process(together, alone):
    (expected,) = alone.numbers
    assert any("state/" in name for name in expected)
    for numbers in together.numbers:
        assert list(numbers) == list(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(numbers[name], value, err_msg=name)


def test_every_group_trains_but_the_frozen_one(alone):
    (report,), (numbers,) = alone.reports, alone.numbers
    moved = {report["labels"][path]: False for path in report["labels"]}
    for path, label in report["labels"].items():
        moved[label] |= bool((numbers[f"agent/{path}"] % 1).any())
    assert moved.pop("frozen") is False
    assert len(moved) == 4
    assert all(moved.values())


@pytest.mark.hazard("L1")
def test_conversions_work_on_arrays_that_cannot_be_read(together):
    assert all(report["identical"] for report in together.reports)


def test_all_processes_give_the_same_names_labels_and_reports(together, alone):
    for key in ("labels", "summary"):
        (expected,) = (report[key] for report in alone.reports)
        assert all(report[key] == expected for report in together.reports)


def test_state_is_sharded_as_the_params_in_all_processes(together, alone):
    (expected,) = alone.reports
    for report in together.reports:
        assert report["state"] == expected["state"]
        assert all(is_in_place for _, is_in_place in report["state"].values())
        assert report["explicit"] == expected["explicit"]
    kernels = {v for k, v in expected["explicit"].items() if k.endswith("kernel")}
    assert kernels == {"P('data', 'model')"}


def test_orbax_saves_and_restores_the_sharded_flat_dict(together, alone):
    assert all(report["restored"] for report in together.reports + alone.reports)
