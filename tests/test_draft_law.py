"""Drafts at other sizes: a table drafted at one size is that of all sizes.

Each case of ``test_migration_tables`` is drafted once, from values, and compared with
its table on arrays of other sizes. The tables of ``docs/examples/migrations`` are in
``test_drafts``.
"""

from __future__ import annotations

import itertools
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
from sizes import some
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


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTED)
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


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["prime", "published"])
def test_models_kept_aside_are_paired_by_names(sizes):
    count = right = 0
    for name, style in ASIDE:
        table, shapes = aside(name, style, getattr(MODELS[name], sizes))
        plan = table.plan(shapes)
        draft = ta.draft_migration(shapes, plan.result)
        goes = {path: {*g.filled} for g in plan.groups for path in g.source_paths}
        assert draft.doubtful == (*draft.pairs,)
        assert not (draft.missing and draft.unexpected)
        count += len(goes)
        right += sum({*draft.pairs.get(path, ())} == goes[path] for path in goes)
    assert right >= 0.92 * count


@pytest.mark.slow
@pytest.mark.parametrize(("name", "style"), ASIDE)
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


# --- numbers in another order, and some of them ---

GATES = [0, 3, 1, 2]  # of torch's i, f, g, o: i, o, f, g
LSTM = {"w_ih": (28, 5), "w_hh": (28, 7), "b_ih": (28,), "b_hh": (28,)}
KERAS = [1, 0, 2]  # of torch's r, z, n
GRU = {"weight_ih": (21, 5), "weight_hh": (21, 7), "bias_ih": (21,), "bias_hh": (21,)}
LAYERS = {f"h.{n}.{k}": (3, 5)[: 1 + (k == "w")] for n in range(6) for k in "wb"}
EXPERTS = {f"h.{n}.moe.{x}.w": (3, 5) for n in range(2) for x in range(4)}
LAST = [5, 3, 0, 1, 4, 2]
EVEN, WORDS = {"take": {"l": "::2"}}, {"take": {"v": [4, 0, 7, 6, 2, 1, 3, 5]}}
SOME = {"take": {"h": [3, 0], "of": 5}}

#: Sizes of another model, of which as many numbers are taken.
LARGER = {3: 9, 4: 2, 5: 6, 7: 11, 11: 10, 21: 33, 28: 44, 35: 40}

#: Rows, shapes of the source, and whether the rows have a mark.
TAKES: dict[str, tuple[Any, dict[str, tuple[int, ...]], bool]] = {
    "gates": (
        {
            "w_{n=ih,hh} : (p o) i": ("kernel_{n} : i (p o)", {"take": {"p": GATES}}),
            "b_{n=ih,hh} : (p o)": ("b_{n} : (p o)", {"take": {"p": GATES}}),
        },
        LSTM,
        False,
    ),
    "gates of two biases in one": (
        {
            "weight_{n=ih,hh} : (p o) i": (
                "kernel/{n} : i (p o)",
                {"take": {"p": KERAS}},
            ),
            "bias_{n=ih,hh} : (p o)": ("bias : n (p o)", {"take": {"p": KERAS}}),
        },
        GRU,
        False,
    ),
    "gates of one bias in two": (
        {"bias : n (p o)": ("bias_{n=ih,hh} : (p o)", {"take": {"p": KERAS}})},
        {"bias": (2, 21)},
        False,
    ),
    "layers": (
        {
            "h.{l}.w : o i": ("blk/{l}/w : i o", {"take": {"l": LAST}}),
            "h.{l}.b": ("blk/{l}/b", {"take": {"l": LAST}}),
        },
        LAYERS,
        True,
    ),
    "layers of one name": (
        {"h.{l}.{k}": ("h.{l}.{k}", {"take": {"l": "::-1"}})},
        LAYERS,
        True,
    ),
    "layers that are stacked": (
        {
            "h.{l}.w : o i": ("w : l i o", {"take": {"l": LAST}}),
            "h.{l}.b : o": ("b : l o", {"take": {"l": LAST}}),
        },
        LAYERS,
        True,
    ),
    "layers of a stack": (
        {"w : l i o": ("h.{l}.w : o i", {"take": {"l": LAST}})},
        {"w": (6, 3, 5)},
        True,
    ),
    "every second layer": (
        {"h.{l}.w : o i": ("w : l i o", EVEN), "h.{l}.b": ("b.{l}", EVEN)},
        LAYERS,
        True,
    ),
    "experts": (
        {"h.{l}.moe.{x}.w : o i": ("w : l x i o", {"take": {"x": [2, 0, 3, 1]}})},
        EXPERTS,
        True,
    ),
    "two experts": (
        {"h.{l}.moe.{x}.w": ("h/{l}/{x}/w", {"take": {"x": [3, 0], "of": 4}})},
        EXPERTS,
        True,
    ),
    "a vocabulary": (
        {"wte : v e": ("embed : v e", WORDS), "head : v e": ("out : e v", WORDS)},
        {"wte": (8, 5), "head": (8, 5)},
        True,
    ),
    "some heads": (
        {"q : (h d) e": ("q : e h d", SOME), "o : e (h d)": ("o : (h d) e", SOME)},
        {"q": (35, 11), "o": (11, 35)},
        True,
    ),
    "a kernel that is flipped": (
        {"up : i o h w": ("up : h w i o", {"take": {"h": "::-1", "w": "::-1"}})},
        {"up": (5, 7, 4, 3)},
        True,
    ),
}


@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize("name", TAKES)
def test_numbers_that_are_taken_are_drafted_from_values(name, is_function):
    rows, shapes, is_marked = TAKES[name]
    every = shapes | {"other.weight": (13, 17)}
    source = float32({path: np.zeros(shape) for path, shape in every.items()})
    table = ta.Migration(rows | {"other.weight : o i": "other : i o"})
    if is_function:
        draft = ta.draft_migration(source, convert=table)
    else:
        draft = ta.draft_migration(source, table(source))
    assert not draft.missing
    assert not draft.unexpected
    marks = {row.notes.check for row in draft.migration.rows if row.values.take}
    assert marks == {"order" if is_marked else ""}
    left_out = table.plan(source).dropped
    assert ("that `take` leaves out" in str(draft)) == bool(left_out)
    large = float32(
        {
            path: np.zeros([LARGER.get(n, n) for n in leaf.shape])
            for path, leaf in source.items()
        },
        seed=1,
    )
    result = table(large)
    made = draft.migration(large, result)
    assert not ta.tree_diff(made, result, values=True)
    report = draft.check(large, result)
    assert report, str(report)
    if report.has_way_back:
        back = draft.migration.inverse(result, large)
        assert not ta.tree_diff(back, large, values=True)


def test_what_is_taken_is_not_claimed_of_rows_that_are_equal():
    w = float32({"w": np.zeros((9, 4)), "up": np.zeros((4, 5))})
    w["w"][[2, 7]] = 0
    target = {"e": w["w"][[3, 7, 0, 8, 4, 2, 1, 6, 5]], "up": w["up"]}
    draft = ta.draft_migration(w, target)
    assert draft.missing == ("e",)


def test_a_number_that_is_a_name_is_not_taken_every_second_time():
    """As of Flax's ViT: the norms around a map that is number 1."""
    names = {"norm1": "LayerNorm_0", "norm2": "LayerNorm_2"}
    shapes = {f"h_{n}/{k}/scale": np.zeros(7) for n in (0, 1) for k in names.values()}
    source = float32(shapes)
    target = {
        f"h.{n}.{new}.weight": source[f"h_{n}/{old}/scale"]
        for n in (0, 1)
        for new, old in names.items()
    }
    draft = ta.draft_migration(source, target)
    assert not any(row.values.take for row in draft.migration.rows)
    assert not draft.missing


@pytest.mark.parametrize("numbers", [(0, 3), (0, 4, 8), (1, 4), (0, 3, 7)])
def test_numbers_of_a_sequential_are_a_list(numbers):
    random = np.random.default_rng(0)
    source = {
        f"features.{n}.weight": random.normal(size=(5, 7)).astype("float32")
        for n in numbers
    }
    target = {f"k{i}/w": x for i, x in enumerate(source.values())}
    draft = ta.draft_migration(source, target)
    (row,) = draft.migration.rows
    texts = ",".join(map(str, numbers)), ",".join(map(str, range(len(numbers))))
    target_text = f"k{{p={texts[1]}}}/w", {"check": "numbers"}
    assert row.typed() == (f"features.{{p={texts[0]}}}.weight", target_text)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    ("old", "new"), [((1, 2), (3, 2)), ((0, 1), (5, 2)), ((0, 1, 4), (5, 2, 3))]
)
def test_numbers_in_an_order_that_no_take_says_are_a_marked_list(blocks, old, new):
    random = np.random.default_rng(0)
    source, target = {}, {}
    for block, (one, two) in itertools.product(
        range(blocks), zip(old, new, strict=True)
    ):
        norm = random.normal(size=7).astype("float32")
        source[f"dec.{block}.layer.{one}.w"] = norm
        target[f"k{block}/n{two}"] = norm
    draft = ta.draft_migration(source, target)
    assert not ta.tree_diff(draft.migration(source, target), target, values=True)
    (row,) = draft.migration.rows
    assert f"{{p={','.join(map(str, old))}}}" in row.text
    assert row.notes.check == "numbers"


def test_numbers_of_a_list_and_of_an_axis_have_one_row():
    random = np.random.default_rng(0)
    source = {
        f"dec.{block}.layer.{n}.w": random.normal(size=7).astype("float32")
        for block, n in itertools.product(range(2), (1, 2))
    }
    target = {
        f"n{two}": np.stack([source[f"dec.{block}.layer.{one}.w"] for block in (0, 1)])
        for one, two in ((1, 3), (2, 2))
    }
    (row,) = ta.draft_migration(source, target).migration.rows
    assert row.notes.check


def test_copies_that_are_padded_alike_are_one_marked_row():
    source = float32({"wte": np.zeros((11, 6))})
    padded = np.pad(source["wte"], ((0, 5), (0, 0)))
    draft = ta.draft_migration(source, {"a": padded, "e": padded.T})
    pad = {"pad": {"v": [0, 5]}, "check": "length"}
    rows = {"wte : v e": (("a : v e", "e : e v"), pad)}
    assert draft.migration == ta.Migration(rows)


@pytest.mark.parametrize("shape", [(6, 5), (2, 15)])
def test_zeros_after_an_axis_that_is_two_have_no_row(shape):
    source = float32({"w": np.zeros((2, 3, 5))})
    padded = np.pad(source["w"].reshape(shape), 2)
    assert ta.draft_migration(source, {"t": padded}).missing == ("t",)


def test_layers_of_zeros_are_taken_as_their_neighbours_are():
    source = float32({path: np.zeros(shape) for path, shape in LAYERS.items()})
    source |= {path: np.zeros_like(x) for path, x in source.items() if path[-1] == "b"}
    rows = {"h.{l}.{k}": ("blk/{l}/{k}", {"take": {"l": LAST}})}
    target = ta.Migration(rows)(source)
    draft = ta.draft_migration(source, target)
    marks = {row.text: row.notes.check for row in draft.migration.rows}
    assert marks == {"h.{l}.w": "order", "h.{l}.b": "names, constant numbers, order"}
    assert not ta.tree_diff(draft.migration(source, target), target, values=True)


def test_another_count_answers_a_slice_and_no_shapes_answer_a_list():
    source = float32({path: np.zeros(shape) for path, shape in LAYERS.items()})

    def sizes(count: int, width: int) -> Any:
        shapes = {f"h.{n}.{k}": (width, 2) for n in range(count) for k in "wb"}
        return float32({path: np.zeros(shape) for path, shape in shapes.items()})

    for take, answers in (("::2", {6: "order", 9: ""}), (LAST, {6: "order"})):
        rows = {"h.{l}.{k}": ("blk/{l}/{k}", {"take": {"l": take}})}
        table = ta.Migration(rows)
        draft = ta.draft_migration(source, table(source))
        for count, left in answers.items():
            large = sizes(count, 7)
            report = draft.check(large, table(large))
            assert report, str(report)
            assert {row.notes.check for row in report.migration.rows} == {left}


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
    mixed = np.random.default_rng(0).permutation(source["w"].reshape(-1))
    pair = source, {"embed": mixed.reshape(11, 5), "q": source["q.weight"].T}
    draft = ta.draft_migration(*pair[:: -1 if is_back else 1])
    assert len(draft.missing) == len(draft.unexpected) == 1
    text = draft.to_toml()
    assert "numbers in common, in an order that no row found here gives" in text
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


@pytest.mark.slow
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
