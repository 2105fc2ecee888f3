"""The demo in a short form: it runs, and its check of every parameter can fail."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import treeadapt as ta

REPOSITORY = Path(__file__).parents[1]
DEMO = REPOSITORY / "docs" / "examples" / "brax_ppo.py"


@pytest.mark.slow
def test_demo_freezes_and_trains_what_its_rules_file_says():
    # One test, because a run takes long; a separate process, because Brax promotes
    # ranks.
    done = subprocess.run(
        [sys.executable, DEMO, "--updates=1", "--envs=16"],
        # Nearly all the time goes into compiling, at as little cost as in the tests.
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    groups = re.findall(r"^\S+ +\[\S+\] .* (\w+) +\d$", done.stdout, re.MULTILINE)
    assert groups == ["frozen"] * 4 + ["fast"] * 6 + ["slow"] * 8
    before_and_after = re.findall(r"reward of an episode: (.* -> .*)", done.stdout)
    pretrained, with_brax, with_namedtuple, without_rules = before_and_after
    assert with_brax == with_namedtuple != pretrained
    assert without_rules != with_brax
    verdict = r"(same bits|moved \d+\.\d+)"
    rows = re.findall(
        rf"^\S+ +(\w+) +{verdict} +{verdict} +{verdict} *$", done.stdout, re.M
    )
    assert [label for label, *_ in rows] == groups
    for label, *verdicts in rows:
        is_frozen = label == "frozen"
        same = [text == "same bits" for text in verdicts]
        assert same == [is_frozen, is_frozen, False]
    assert "4 frozen parameters, the same bit for bit" in done.stdout
    assert "14 others, all moved." in done.stdout


@pytest.mark.parametrize(
    ("frozen", "trained", "status"),
    [
        (0.0, 2.0, 0),
        (1e-30, 2.0, 1),
        (-0.0, 2.0, 1),  # equal, but different bits
        (0.0, 1.0, 1),
    ],
)
def test_demo_fails_if_a_frozen_bit_changes_or_another_parameter_stays(
    frozen, trained, status, capsys
):
    spec = importlib.util.spec_from_file_location("brax_ppo", DEMO)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    start = {"frozen": jnp.zeros(2), "trained": jnp.ones(2)}
    end = {"frozen": jnp.array([0.0, frozen]), "trained": jnp.array([1.0, trained])}
    rules = ta.Rules({"frozen": "frozen", "trained": "fast"})
    assert demo.compare(start, {"dict": end}, rules) == status
    assert ("(!)" in capsys.readouterr().out) == bool(status)
