"""Drafts at other sizes: a table drafted at one size is that of all sizes.

Each case of ``test_migration_tables`` is drafted once, from values, and compared with
its table on arrays of other sizes. The tables of ``docs/examples/migrations`` are in
``test_drafts``.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_migration_tables as tables
import test_quantised_models as quantised
import test_sampler as sampler
from command import invoke
from kept_aside import MODELS
from resized import resized
from sizes import slow_but, some
from test_drafts import (
    DRAFTED,
    abstract,
    float32,
    moves_alike,
    numbers,
    rests_on_numbers,
    table_of,
)
from test_example_migrations import SIZES, schema_of

import treeadapt as ta

#: Sizes that a case does not let go: the remainder starts after three blocks.
KEPT = {"blocks_of_six_layers_and_a_remainder": {3}}


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("name", some(tables.CASES, 2))
def test_law_13_each_table_of_the_tests_is_drafted_for_all_sizes(name, is_back):
    case = tables.CASES[name]()
    pair = case.source, case.result
    draft = ta.draft_migration(*pair[:: -1 if is_back else 1])
    if not is_back:
        assert rests_on_numbers(draft)
        assert not draft.missing
    sizes = {*draft.migration.sizes.values()}
    table, source = resized(
        tables.migration(case), case.source, sizes | KEPT.get(name, set())
    )
    result = table(source)
    assert abstract(source) != abstract(case.source)
    if is_back:
        source = table.inverse(result, source)
        source = {path: source[path] for path in source if path not in draft.missing}
        ties = {p: a for p, a in result.items() if p not in draft.unexpected}
        moves_alike(draft.migration, ties, source)
    else:
        moves_alike(draft.migration, source, result)


@pytest.mark.parametrize("name", slow_but(["llama-flax"], DRAFTED))
def test_lint_finds_nothing_that_the_draft_does_not_say(name, tmp_path):
    source = numbers(ta.read_metadata(schema_of(name)))
    result = table_of(name, tmp_path, SIZES.get(name, {}))(source)
    pair = tmp_path / "a.schema.toml", tmp_path / "b.schema.toml"
    for file, side in zip(pair, (source, result), strict=True):
        ta.save(file, abstract(side))
    draft = ta.draft_migration(*pair)
    file = tmp_path / "drafted.toml"
    assert invoke("draft", *pair, "--output", file).exit_code == 0
    linted = invoke("lint", *pair, "--migration", file)
    said = {"check"} | ({"unmatched"} if draft.unexpected else set())
    said |= {"missing"} if draft.missing else set()
    assert {*re.findall(r"(?m)^[a-z]+(?=:)", linted.output)} - {"note"} == said


# --- models that drafts were not made on ---

ASIDE = [(name, style) for name in MODELS for style in MODELS[name].tables]
QUICKLY = [("convnext", "by layer"), ("rwkv", "stacked"), ("xlstm", "by layer")]


def aside(name: str, style: str, sizes: dict[str, int]) -> tuple[ta.Migration, Any]:
    """The table of a model, and its shapes."""
    model = MODELS[name]
    table = model.tables[style]
    sizes_of = {k: sizes[k] for k in model.open_sizes if f"({k} " in str(table)}
    shapes = {
        path: jax.ShapeDtypeStruct(shape, "float32")
        for path, shape in model.shapes(**sizes).items()
    }
    return ta.Migration(table, sizes=sizes_of or None), shapes


@pytest.mark.parametrize("sizes", ["prime", "published"])
@pytest.mark.parametrize(
    "cases", [QUICKLY, pytest.param(ASIDE, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_models_kept_aside_are_paired_by_names(cases, sizes):
    count = right = 0
    for name, style in cases:
        table, shapes = aside(name, style, getattr(MODELS[name], sizes))
        plan = table.plan(shapes)
        draft = ta.draft_migration(shapes, plan.result)
        goes = {path: {*g.filled} for g in plan.groups for path in g.source_paths}
        assert draft.doubtful == (*draft.pairs,)
        assert not (draft.missing and draft.unexpected)
        count += len(goes)
        right += sum({*draft.pairs.get(path, ())} == goes[path] for path in goes)
    assert right >= 0.92 * count


@pytest.mark.parametrize(("name", "style"), slow_but(QUICKLY, ASIDE))
def test_models_kept_aside_are_drafted_from_values(name, style):
    table, shapes = aside(name, style, MODELS[name].prime)
    source = float32(shapes)
    draft = ta.draft_migration(source, table(source))
    assert rests_on_numbers(draft)
    assert not draft.missing
    moves_alike(draft.migration, source, table(source))
    sizes = {*draft.migration.sizes.values()}
    table, source = resized(table, source, sizes)
    moves_alike(draft.migration, source, table(source))


# --- what is next to a target ---

HEADS = "h.{l}.k.weight : (k d) e"
REPEATS: dict[str, tuple[Any, dict[str, int], dict[str, tuple[int, ...]]]] = {
    "inner": (
        {HEADS: ("key : l e (k r) d", {"repeat": {"r": 4}})},
        {"k": 3},
        {f"h.{layer}.k.weight": (15, 7) for layer in range(2)},
    ),
    "outer": (
        {HEADS: ("key : l e (r k) d", {"repeat": {"r": 4}})},
        {"k": 3},
        {f"h.{layer}.k.weight": (15, 7) for layer in range(2)},
    ),
    "within": (
        {HEADS: ("key/{l} : e (k r d)", {"repeat": {"r": 2}})},
        {"k": 3},
        {f"h.{layer}.k.weight": (15, 7) for layer in range(3)},
    ),
    "experts": (
        {"h.{l}.up.weight : o i": ("moe/up : l x i o", {"repeat": {"x": 3}})},
        {},
        {f"h.{layer}.up.weight": (5, 7) for layer in range(2)},
    ),
    "layers": ({"norm : e": ("norms : l e", {"repeat": {"l": 5}})}, {}, {"norm": (7,)}),
    "one of two": (
        {"w : v e": (("embed : v e", "heads : r e v"), {"repeat": {"r": 3}})},
        {},
        {"w": (5, 7)},
    ),
}


@pytest.mark.parametrize("name", REPEATS)
def test_numbers_that_are_repeated_are_drafted_from_values(name):
    rows, sizes, shapes = REPEATS[name]
    shapes = {path: np.zeros(shape) for path, shape in shapes.items()}
    source = float32(shapes | {"other.weight": np.zeros((11, 13))})
    table = ta.Migration(rows | {"other.weight : o i": "other : i o"}, sizes=sizes)
    draft = ta.draft_migration(source, table(source))
    assert rests_on_numbers(draft)
    assert not draft.missing
    assert "repeat = " in draft.to_toml()
    kept = {*draft.migration.sizes.values(), *(repeat(rows))}
    other, source = resized(table, source, kept)
    moves_alike(draft.migration, source, other(source))


def repeat(rows: Any) -> list[int]:
    """How often the rows repeat numbers."""
    return [n for _, more in rows.values() for n in more["repeat"].values()]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_weights_of_a_sampler_are_drafted_from_values(dtype):
    shapes = {f"blocks/{name}": (3, *shape) for name, shape in sampler.SHAPES.items()}
    shapes["embed"] = (sampler.VOCAB, sampler.WIDTH)
    source = float32({path: np.zeros(shape) for path, shape in shapes.items()})
    table = sampler.migration(dtype)
    draft = ta.draft_migration(source, table(source))
    assert rests_on_numbers(draft)
    assert not draft.missing
    other, source = resized(table, source, {sampler.COPIES})
    result = other(source)
    made = draft.migration(source, result)
    assert not ta.tree_diff(made, result, values=True)


@pytest.mark.parametrize("is_back", [False, True])
def test_what_no_drafted_row_says_is_not_a_drop(is_back):
    source = float32({"w": np.zeros((11, 5)), "q.weight": np.zeros((5, 7))})
    pair = source, {"embed": source["w"][::-1], "q": source["q.weight"].T}
    draft = ta.draft_migration(*pair[:: -1 if is_back else 1])
    assert len(draft.missing) == len(draft.unexpected) == 1
    text = draft.to_toml()
    assert "numbers in common, in an order that no row gives" in text
    assert f"#     {draft.missing[0]} and {draft.unexpected[0]}" in text
    assert "drop" not in text


def test_copies_in_the_source_are_told_to_be_drafted_the_other_way():
    rows, sizes, shapes = REPEATS["inner"]
    source = float32({path: np.zeros(shape) for path, shape in shapes.items()})
    result = ta.Migration(rows, sizes=sizes)(source)
    draft = ta.draft_migration(result, source)
    assert not draft.pairs
    assert "draft the other way around" in draft.to_toml()
    back = ta.draft_migration(source, result).migration.inverse
    assert not ta.tree_diff(back(result, source), source, values=True)


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize("name", quantised.TINY)
def test_numbers_that_scales_multiply_are_marked(name, with_values):
    sizes = quantised.TINY[name]
    source = quantised.random_leaves(sizes.source())
    table = ta.load_migration(quantised.MIGRATIONS / f"{name}-scanned.toml")
    result = table(source, sizes.target())
    pair = (source, result) if with_values else (abstract(source), abstract(result))
    draft = ta.draft_migration(*pair)
    scaled = {path for path, leaf in source.items() if leaf.dtype == quantised.FP8}
    assert scaled & draft.pairs.keys() <= {*draft.doubtful}
    goes = {
        path: {*group.filled}
        for group in table.plan(source, sizes.target()).groups
        for path in group.source_paths
    }
    for path, targets in draft.pairs.items():
        assert path in draft.doubtful or {*targets} <= goes[path], path
    if not with_values:
        assert "see `multiply`" in draft.to_toml()


def test_scalars_that_differ_are_evidence():
    source = {f"h.{n}.scale": np.float32(n) for n in range(6)}
    target = {"scales": np.array([*source.values()])}
    for pair in ((source, target), (target, source)):
        draft = ta.draft_migration(*pair)
        assert rests_on_numbers(draft)
        moves_alike(draft.migration, *pair)
    ones = {path: np.ones((), jnp.float32) for path in source}
    draft = ta.draft_migration({"scales": np.ones(6, jnp.float32)}, ones)
    assert draft.doubtful == ("scales",)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "float8_e4m3fn", "int4"])
@pytest.mark.parametrize("with_scales", [False, True])
def test_numbers_of_one_byte_show_what_was_only_stacked(dtype, with_scales):
    """Square maps, too: no number stands once, and none of the rows is there twice."""
    random = np.random.default_rng(0)
    shapes = {"q": (24, 24), "k": (24, 24), "up": (40, 24), "down": (24, 40)}
    source: dict[str, Any] = {}
    for n in range(3):
        for name, shape in shapes.items():
            numbers = random.normal(size=shape) * (1 if dtype == "bool" else 3)
            numbers = numbers > 0 if dtype == "bool" else numbers
            source[f"h.{n}.{name}.weight"] = numbers.astype(jnp.dtype(dtype))
            if with_scales:
                source[f"h.{n}.{name}.scale"] = random.random(shape[0], "float32")
    target = {
        f"h/{path[4:].replace('.', '/')}": np.stack(
            [source[path.replace(".0.", f".{n}.")] for n in range(3)]
        )
        for path in source
        if ".0." in path
    }
    draft = ta.draft_migration(source, target)
    assert "no numbers in common" not in str(draft)
    assert rests_on_numbers(draft)
    moves_alike(draft.migration, source, target)


def test_few_bits_that_are_equal_by_chance_are_left_to_names():
    source = {"a.mask": np.array([[True, True, False], [True, False, False]])}
    draft = ta.draft_migration(source, {"a/mask": source["a.mask"]})
    assert draft.doubtful == ("a.mask",)
