"""The tables of ``docs/examples/migrations`` on the schemas next to them.

No model is made: each table fits the names of its file, comes back, and lints clean.
``tests/models`` compares what the models answer.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from command import invoke
from test_cli import documented

import treeadapt as ta

FOLDER = Path(__file__).parents[1] / "docs" / "examples" / "migrations"
SCHEMAS = sorted(FOLDER.glob("*.schema.toml"))
TABLES = {
    file.stem: file for file in sorted(FOLDER.glob("*.toml")) if file not in SCHEMAS
}
#: Tables that multiply have no way back: see ``test_quantised_models``.
ONE_WAY = {"deepseek-v3-fp8-scanned", "qwen3-fp8-scanned"}
THERE_AND_BACK = {k: v for k, v in TABLES.items() if k not in ONE_WAY}
#: What a target would say, of the models that the schemas are of.
SIZES = {
    "gemma3-scanned": {"d": 14, "head": 5},
    "llama-equinox": {"d": 14, "half": 7},
    "llama-scanned": {"d": 14},
    "peft-llama-scanned": {"d": 14},
    "qwen3-moe-scanned": {"d": 14},
    "vit-nnx": {"d": 11},
}


class Example(NamedTuple):
    """A table, and random arrays for it.

    Attributes:
        file: the table, with sizes in place of a target.
        rows: of the table.
        schema: file with the names and shapes that the table reads.
        source: random arrays of them.
    """

    file: Path
    rows: list[dict[str, Any]]
    schema: Path
    source: dict[str, np.ndarray]

    @property
    def migration(self) -> ta.Migration:
        return ta.load_migration(self.file)


def schema_of(name: str) -> Path:
    """The schema of a table ``<model>-<target>.toml``."""
    return FOLDER / f"{name.rpartition('-')[0]}.schema.toml"


@pytest.fixture(params=THERE_AND_BACK)
def example(request, tmp_path) -> Example:
    name, schema = request.param, schema_of(request.param)
    # The tiny Gemma 3 has two blocks, not ten.
    text = TABLES[name].read_text("utf-8").replace("{n+60}", "{n+12}")
    table = tomllib.loads(text)
    table["sizes"] = table.get("sizes", {}) | SIZES.get(name, {})
    table.pop("new", None)  # leaves that only a target has
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))

    random = np.random.default_rng(0)
    source = {
        path: (random.integers(-(2**16), 2**16, leaf.shape) / 2**16).astype(leaf.dtype)
        for path, leaf in ta.read_metadata(schema).items()
    }
    return Example(file, table["rows"], schema, source)


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_read_and_written(name, tmp_path):
    there = ta.load_migration(TABLES[name])
    for m in (there,) if name in ONE_WAY else (there, there.inverse):
        (tmp_path / "again.toml").write_text(m.to_toml())
        assert ta.load_migration(tmp_path / "again.toml") == m


def test_a_plan_is_exact_unless_leaves_are_dropped_or_computed(example):
    plan = example.migration.plan(ta.read_metadata(example.schema))
    computed = any({"offset", "scale"} & {*row} for row in example.rows)
    assert plan.exact is not (computed or bool(plan.dropped))
    assert not plan.one_way
    assert not plan.repeatable


def test_what_is_read_goes_back_bit_for_bit(example):
    plan = example.migration.plan(example.source)
    back = example.migration.inverse(example.migration(example.source))
    kept = {
        path: leaf for path, leaf in example.source.items() if path not in plan.dropped
    }
    assert not ta.tree_diff(back, kept, values=True)


def test_lint_finds_nothing(example, tmp_path):
    target = tmp_path / "target.schema.toml"
    ta.save(target, example.migration(ta.load(example.schema)))
    arguments = [example.schema, target, "--migration", example.file]
    result = invoke("lint", *arguments)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("0 findings in ")


def test_the_commands_of_the_page_print_what_it_says(tmp_path, monkeypatch):
    here = FOLDER.relative_to(FOLDER.parents[2])
    shutil.copytree(FOLDER, tmp_path / here)
    monkeypatch.chdir(tmp_path)
    for command, printed in documented(FOLDER / "README.md"):
        name, *arguments = shlex.split(command)
        if name == "cd":
            assert arguments == [str(here)]
            monkeypatch.chdir(*arguments)
            continue
        assert name == "treeadapt"
        result = invoke(*arguments)
        assert result.output == printed, command


def test_each_schema_has_a_table_and_each_table_a_line_of_the_page():
    assert {schema_of(name) for name in TABLES} == {*SCHEMAS}
    page = (FOLDER / "README.md").read_text("utf-8")
    assert all(f"]({file.name})" in page for file in (*TABLES.values(), *SCHEMAS))
