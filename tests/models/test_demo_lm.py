"""The fine-tune of a GPT-2 in a short form, and that its checks can fail."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import HAS_TORCH

import treeadapt as ta

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.parametrize("torch", ["0", "1"])
def test_the_demo_passes_its_own_checks(torch, tmp_path):
    # A process of its own, because a part of it is one more process.
    done = subprocess.run(
        [sys.executable, EXAMPLES / "gpt2_lora.py", f"--folder={tmp_path}"]
        + ["--torch-steps=2", "--steps=8"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1]), "USE_TORCH": torch},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, bit for bit" in done.stdout
    assert "18 of 52 arrays changed, 0 frozen ones" in done.stdout
    assert (tmp_path / "report.svg").read_text().startswith("<svg")
    with_torch = HAS_TORCH and torch == "1"
    assert ("NOT INSTALLED" in done.stdout) != with_torch
    with_peft = with_torch and importlib.util.find_spec("peft") is not None
    compared = 2 * with_torch + with_peft
    assert len(re.findall("ours differ by", done.stdout)) == compared
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    arrays = ta.read_metadata(tmp_path / "adapter" / "adapter_model.safetensors")
    ranks = config["rank_pattern"] | dict.fromkeys(("c_proj", "c_fc"), config["r"])
    for name, leaf in arrays.items():
        *_, module, factor, _ = name.split(".")
        if factor == "lora_A":
            assert leaf.shape[0] == ranks[module]


def test_the_demo_fails_if_a_frozen_array_changes_or_none_does(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(EXAMPLES)
    import gpt2_lora

    names = ("wte.weight", "h.1.mlp.c_fc.bias", "h.2.mlp.c_fc.bias")
    start = {name: np.zeros(3) for name in names}
    ta.save(tmp_path / "start", start, max_shard_bytes=100)
    for changed, passes in [(names[2:], True), (names[1:], False), ((), False)]:
        tuned = tmp_path / f"{len(changed)} changed"
        ta.save(tuned, start | dict.fromkeys(changed, np.ones(3)), max_shard_bytes=100)
        assert gpt2_lora.same_where_frozen(tmp_path / "start", tuned) == passes
    assert "2 of 3 arrays changed, 1 frozen ones" in capsys.readouterr().out
