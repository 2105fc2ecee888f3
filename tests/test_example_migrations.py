"""The tables of ``docs/examples/migrations``, and those for Flax, on the schemas there.

No model is made: each table fits the names of its file, comes back, and lints clean.
``tests/models`` compares what the models answer.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from command import invoke

import treeadapt as ta

FOLDER = Path(__file__).parents[1] / "docs" / "examples" / "migrations"
SCHEMAS = sorted(FOLDER.glob("*.schema.toml"))
EXAMPLES = {
    file.stem: file for file in sorted(FOLDER.glob("*.toml")) if file not in SCHEMAS
}
PUBLISHED = Path(__file__).parents[1] / "treeadapt" / "migrations" / "tables" / "flax"
TABLES = EXAMPLES | {
    f"{file.stem}-flax": file
    for file in sorted(PUBLISHED.glob("*.toml"))
    if FOLDER / f"{file.stem}.schema.toml" in SCHEMAS
}
#: What a target would say, of the models that the schemas are of.
SIZES = {
    "gemma3-scanned": {"d": 14, "head": 5},
    "llama-equinox": {"d": 14, "half": 7},
    "llama-scanned": {"d": 14},
    "peft-llama-scanned": {"d": 14},
    "qwen3-moe-scanned": {"d": 14},
    "qwen3-scanned": {"d": 128},
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


@pytest.fixture(params=TABLES)
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
    for m in (there, there.inverse):
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


def test_each_schema_has_a_table_and_each_table_a_line_of_the_page():
    assert {schema_of(name) for name in TABLES} == {*SCHEMAS}
    page = (FOLDER / "README.md").read_text("utf-8")
    assert all(f"]({file.name})" in page for file in (*EXAMPLES.values(), *SCHEMAS))


# --- adapters of PEFT that the tables do not have ---

LAYER = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"


@pytest.fixture
def adapter() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    names = ta.read_metadata(schema_of("peft-llama-scanned")).items()
    return {
        name: random.standard_normal(leaf.shape).astype(leaf.dtype)
        for name, leaf in names
    }


def llama_adapter() -> ta.Migration:
    """The table, with the size of a head."""
    m = ta.load_migration(TABLES["peft-llama-scanned"])
    return ta.Migration([row.typed() for row in m.rows], sizes={"d": 14})


def of_rank(leaves: dict[str, np.ndarray], layers: Any) -> dict[str, np.ndarray]:
    """Leaves of an adapter, with another rank of the queries in some layers."""
    first, second = np.ones((8, 84), np.float32), np.ones((84, 8), np.float32)
    names = ((LAYER.format(n, "q", "A"), LAYER.format(n, "q", "B")) for n in layers)
    return leaves | {k: v for a, b in names for k, v in ((a, first), (b, second))}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        # target_modules: queries and values alone
        (
            lambda a: {k: v for k, v in a.items() if "q_proj" in k or "v_proj" in k},
            "4 rows: no leaf is taken by",
        ),
        # layers_to_transform: not the first, or not the last
        (
            lambda a: {k: v for k, v in a.items() if ".layers.0." not in k},
            "without 'base_model.model.model.layers.0.",
        ),
        (
            lambda a: {k: v for k, v in a.items() if ".layers.4." not in k},
            "the target has another shape or dtype",
        ),
        # one module of one layer
        (
            lambda a: {k: v for k, v in a.items() if "4.self_attn.q" not in k},
            "the target has another shape or dtype",
        ),
        # rank_pattern: of a layer, and of a module
        (lambda a: of_rank(a, [2]), "2 groups: its arrays differ"),
        (lambda a: of_rank(a, range(5)), "the target has another shape or dtype"),
        # use_dora, lora_bias and modules_to_save
        (
            lambda a: a | {LAYER.format(0, "q", "magnitude_vector"): np.ones(84)},
            "no row takes\n  'base_model.model.model.layers.0",
        ),
        (
            lambda a: a | {LAYER.format(0, "q", "B")[:-6] + "bias": np.ones(84)},
            "no row takes\n  'base_model.model.model.layers.0",
        ),
        (
            lambda a: a | {"base_model.model.lm_head.weight": np.ones((3, 4))},
            "no row takes\n  'base_model.model.lm_head.weight'",
        ),
    ],
)
def test_an_adapter_that_a_table_does_not_have_is_an_error(adapter, change, text):
    m = llama_adapter()
    target = m(adapter)
    with pytest.raises(ta.MigrationError) as caught:
        m(change(adapter), target)
    assert text in str(caught.value)


def test_layers_without_an_adapter_get_factors_of_zeros(adapter):
    """As the page says of ``layers_to_transform``: rows with ``{l+2}`` and ``pad``."""
    later = {k: v for k, v in adapter.items() if int(k.split(".")[4]) >= 2}
    rows = []
    for row in llama_adapter().rows:
        source, target = row.typed()
        address, options = target if isinstance(target, tuple) else (target, {})
        options = options | {"pad": {"l": [2, 0]}}
        rows.append((source.replace("{l}", "{l+2}"), (address, options)))
    m = ta.Migration(rows, sizes={"d": 14})
    whole = llama_adapter()(adapter)
    factors = m(later, whole)
    for path, leaf in factors.items():
        np.testing.assert_array_equal(leaf[2:], whole[path][2:])
        assert not leaf[:2].any()
    assert not ta.tree_diff(m.inverse(factors), later, values=True)
