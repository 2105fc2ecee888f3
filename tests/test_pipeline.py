"""What the page on pipelines says of JSON and exit codes is what the command prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import command
import jax.numpy as jnp
import pytest

import treeadapt as ta

PAGE = Path(__file__).parent.parent / "docs" / "recipes" / "checks.md"
SECTION = PAGE.read_text("utf-8").partition("## What programs read")[2]
TREE = {"body": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "head": {"w": jnp.ones(3)}}
RULES = 'version = 1\n[rules]\n"body" = "frozen"\n"hed" = "train"\n"**" = "train"\n'


def documented(name: str) -> set[str]:
    """Return what is quoted in the row of a command."""
    (row,) = re.findall(rf"^\| `{re.escape(name)}` \|(.*)\|$", SECTION, re.MULTILINE)
    return {*re.findall(r"`([a-z_]+)`", row)}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    names = ("model.safetensors", "other.safetensors", "rules.toml")
    model, other, rules = (tmp_path / name for name in names)
    ta.save(model, TREE)
    ta.save(other, {"body": TREE["body"], "out": TREE["head"]})
    rules.write_text(RULES)
    return {"model": model, "other": other, "rules": rules}


def read(*arguments: Any, code: int = 0) -> Any:
    return json.loads(command.run(*arguments, "--format", "json", code=code))


def test_lint_prints_what_the_page_lists(files):
    (finding,) = read("lint", files["model"], "--rules", files["rules"], code=1)
    assert {*finding} == documented("lint")
    assert finding["kind"] == "unused"
    assert finding["rule"] == 2
    files["rules"].write_text(RULES.replace('"hed" = "train"\n', ""))
    assert read("lint", files["model"], "--rules", files["rules"]) == []


def test_diff_prints_what_the_page_lists(files):
    document = read("diff", files["model"], files["other"], code=1)
    (difference,) = document["differences"]
    kinds = {"added", "removed", "renamed"}
    assert {*document, *difference} == documented("diff") - kinds
    assert difference["kind"] == "renamed"
    assert read("diff", files["model"], files["model"])["differences"] == []


def test_show_prints_what_the_page_lists(files):
    model, rules = files["model"], files["rules"]
    rules.write_text(RULES.replace('"hed" = "train"\n', ""))
    document = read("show", model, "--rules", rules)
    parts = {*document, *document["leaves"][0], *document["totals"][0]}
    assert parts == documented("show")
    (node, *_) = read("show", model, "--rules", rules, "--depth", 1)["nodes"]
    assert {"nodes", *node} == documented("show --depth N")
    rules.write_text('version = 1\n[rules]\n"**" = []\n')
    memory = read("show", model, "--rules", rules, "--mesh", "data=2")["memory"]
    assert {"memory", *memory} == documented("show --mesh")


@pytest.mark.parametrize("name", ["lint", "diff", "show"])
def test_what_cannot_be_read_is_never_an_answer(name, tmp_path, files):
    absent = tmp_path / "absent.safetensors"
    more = {
        "lint": ("--rules", files["rules"]),
        "diff": (files["model"],),
        "show": (),
    }
    result = command.invoke(name, absent, *more[name], "--format", "json")
    assert result.exit_code == 2
    assert result.stdout == ""
