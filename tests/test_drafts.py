"""Drafts: a row without a mark is right, names and axes, at every size.

From values: each table of ``docs/examples/migrations``, and each case of
``test_migration_tables``, is drafted from a pair of small models. From names and
shapes: the same from schemas alone, also with leaves missing and half of the synonyms.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_migration_tables as tables
from command import invoke
from sizes import some
from test_example_migrations import SIZES, TABLES, schema_of
from work import calls_in

import treeadapt as ta
from treeadapt.porting.drafts import draft as drafts
from treeadapt.porting.drafts import inputs, synonyms, writing

Leaves = dict[str, np.ndarray]

#: Each size of a schema at another size of the model, and the sizes of its table.
OTHER_SIZES: dict[str, tuple[dict[int, int], dict[str, int]]] = {
    "llama": ({84: 60, 42: 30, 23: 29, 37: 41, 7: 3}, {"d": 6, "half": 3}),
    "gpt2": ({22: 26, 66: 78, 13: 17, 37: 41, 23: 31}, {}),
    "vit": ({22: 39, 13: 17, 17: 19, 7: 5, 10: 11}, {"d": 13}),
    "bert": ({22: 26, 13: 17, 37: 41, 23: 31}, {}),
    "whisper": ({22: 26, 13: 29, 17: 31, 37: 41, 23: 43, 19: 47, 5: 11}, {}),
    "gemma": ({22: 26, 84: 60, 28: 30, 13: 17, 37: 41}, {}),
    "gemma3": (
        {22: 26, 84: 60, 28: 30, 14: 6, 13: 17, 37: 41, 10: 21, 11: 23, 7: 5, 16: 25},
        {"d": 6, "head": 7},
    ),
    "peft-gpt2": ({22: 26, 66: 78, 13: 17, 3: 5}, {}),
    "peft-llama": ({84: 60, 42: 30, 23: 29, 3: 5}, {"d": 6}),
    "qwen3-moe": ({22: 26, 84: 60, 28: 30, 14: 6, 13: 17, 37: 41}, {"d": 6}),
}


#: Tables that are drafted. Those of models in FP8 are in ``test_quantised_models``.
DRAFTED = {
    name: file
    for name, file in TABLES.items()
    if name not in ("deepseek-v3-scanned", "qwen3-scanned")
}


def table_of(name: str, folder: Any, sizes: Mapping[str, int]) -> ta.Migration:
    """A table of the examples, with sizes in place of a target."""
    text = DRAFTED[name].read_text("utf-8").replace("{n+60}", "{n+12}")
    table = tomllib.loads(text)
    wanted = table.get("sizes", {}) | dict(sizes)
    table["sizes"] = {k: n for k, n in wanted.items() if re.search(rf"\b{k}\b", text)}
    table.pop("new", None)
    for row in table["rows"]:
        row.pop("scale", None)  # no name or shape shows a factor
    file = folder / f"{name}.json"
    file.write_text(json.dumps(table))
    return ta.load_migration(file)


def numbers(shapes: Mapping[str, Any], seed: int = 0) -> Leaves:
    """Random numbers of shapes, all of them different."""
    rng = np.random.default_rng(seed)
    return {
        path: (rng.permutation(leaf.size) + rng.integers(2**40))
        .astype("float64")
        .reshape(leaf.shape)
        for path, leaf in shapes.items()
    }


def abstract(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in leaves.items()
    }


def shapes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {path: jax.ShapeDtypeStruct(s, "float32") for path, s in shapes.items()}


def float32(shapes: Mapping[str, Any], seed: int = 0) -> Leaves:
    """Random numbers as a model has them."""
    rng = np.random.default_rng(seed)
    return {
        path: rng.normal(size=leaf.shape).astype("float32")
        for path, leaf in shapes.items()
    }


def at_other_sizes(name: str, folder: Any) -> tuple[ta.Migration, Leaves]:
    """The table of an example, and what it reads, at other sizes."""
    model = name.rpartition("-")[0]
    new, sizes = OTHER_SIZES[model]
    shapes = {
        path: jax.ShapeDtypeStruct(tuple(new.get(n, n) for n in leaf.shape), "float32")
        for path, leaf in ta.read_metadata(schema_of(name)).items()
    }
    if model not in ("gemma3", "vit", "whisper"):  # one layer less
        at = re.compile(r"(?:\bh|\.layers?)\.([0-9]+)\.")
        last = max(int(found[1]) for path in shapes if (found := at.search(path)))
        part = re.compile(rf"(?:\bh|\.layers?)\.{last}\.")
        shapes = {path: leaf for path, leaf in shapes.items() if not part.search(path)}
    return table_of(name, folder, sizes), float32(shapes, 1)


def moves_alike(found: ta.Migration, source: Leaves, result: Leaves) -> None:
    """Fail unless the draft gives the same bits, and gives them back."""
    kept = {p: a for p, a in source.items() if any(r.takes(p) for r in found.rows)}
    made = found(kept, result)
    assert not ta.tree_diff(made, {p: result[p] for p in made}, values=True)
    assert made.keys() == result.keys()
    back = found.inverse(made, kept)
    if not any(row.values for row in found.rows):
        assert not ta.tree_diff(back, kept, values=True)


#: Layers from the first that no block has, and a list of some of them.
NUMBERS = re.compile(r"\{l(\+[0-9]+|=[0-9,]+)\}")


def rests_on_numbers(draft: ta.MigrationDraft) -> bool:
    """Whether the rows of sizes that were seen have that mark, and no others any.

    Rows that begin after blocks, or list some layers, say numbers of this model, and so
    do those that have the layers before.
    """
    sizes = {*draft.migration.sizes}
    rows = draft.migration.rows
    after = {form_of(row.text): row.notes.check for row in rows if "+" in row.text}
    return all(
        row.notes.check
        == ("sizes" if sizes & row.names else after.get(form_of(row.text), ""))
        or (row.notes.check == "numbers" and NUMBERS.search(row.text))
        for row in rows
    )


def form_of(text: str) -> str:
    """The path of an address, whatever its captures are."""
    return re.sub(r"\{[^}]*\}", "{}", text.split(" : ")[0])


# --- from values ---


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTED)
def test_each_example_is_drafted_from_values(name, tmp_path):
    source = float32(ta.read_metadata(schema_of(name)))
    result = table_of(name, tmp_path, SIZES.get(name, {}))(source)
    draft = ta.draft_migration(source, result)
    assert rests_on_numbers(draft)
    assert not draft.missing
    moves_alike(draft.migration, source, result)
    table, source = at_other_sizes(name, tmp_path)
    moves_alike(draft.migration, source, table(source))


@pytest.mark.parametrize("make", tables.CASES.values(), ids=tables.CASES)
def test_each_table_of_the_tests_is_drafted_from_values(make):
    given = make()
    draft = ta.draft_migration(given.source, given.result)
    assert rests_on_numbers(draft)
    assert not draft.missing
    moves_alike(draft.migration, given.source, given.result)


def fused(order: str, dtype: Any, *, heads: int, size: int) -> tuple[Leaves, Leaves]:
    """Query, key and value as one array of each layer, and as three of all layers."""
    width = 11
    rng = np.random.default_rng(0)
    axes = {"h": heads, "p": 3, "d": size}
    place = order.index("p")
    source, parts = {}, {}
    for name, rest in (("weight", (width,)), ("bias", ())):
        layers = rng.normal(size=(2, *(axes[a] for a in order), *rest)).astype(dtype)
        for n, layer in enumerate(layers):
            at = f"h.{n}.query_key_value.{name}"
            source[at] = layer.reshape(3 * heads * size, *rest)
        for number, part in enumerate(("query", "key", "value")):
            part_of = layers.take(number, 1 + place)
            parts[f"attn/{part}/{name}"] = (
                part_of.transpose(0, 3, 1, 2) if rest else part_of
            )
    return source, parts


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("order", ["hpd", "phd", "hdp"])
def test_parts_may_be_within_each_head(order, is_back, dtype):
    pair = fused(order, dtype, heads=3, size=5)
    other = fused(order, dtype, heads=7, size=2)
    if is_back:
        pair, other = pair[::-1], other[::-1]
    draft = ta.draft_migration(*pair)
    assert rests_on_numbers(draft)
    assert f"({' '.join(order)})" in draft.to_toml()
    moves_alike(draft.migration, *other)
    shapes = ta.draft_migration(*map(abstract, pair))
    assert {*shapes.doubtful} == {*pair[0]}
    assert "or each head holds its own parts, `(h p d)`" in shapes.to_toml()


def test_parts_may_be_within_each_head_of_one_axis():
    source, parts = fused("hpd", "f4", heads=3, size=5)
    flat = {
        path: leaf.reshape(*leaf.shape[:-2], 15) for path, leaf in sorted(parts.items())
    }
    draft = ta.draft_migration(source, flat)
    assert rests_on_numbers(draft)
    assert draft.migration.sizes == {"h": 3}
    moves_alike(draft.migration, source, flat)


def grouped(heads: int, queries: int, size: int, width: int) -> tuple[Leaves, Leaves]:
    """Groups of heads, each with its queries, its key and its value."""
    source, target = {}, {}
    shape = (2, heads, queries + 2, size, width)
    for n, layer in enumerate(np.random.default_rng(0).normal(size=shape)):
        source[f"h.{n}.wqkv.weight"] = layer.reshape(-1, width)
        target[f"h.{n}.q.kernel"] = layer[:, :queries].reshape(-1, size, width)
        target[f"h.{n}.k.kernel"] = layer[:, queries]
        target[f"h.{n}.v.kernel"] = layer[:, queries + 1]
    return source, target


@pytest.mark.parametrize("is_back", [False, True])
def test_heads_with_several_queries_of_their_own_are_nested_parts(is_back):
    way = -1 if is_back else 1
    draft = ta.draft_migration(*grouped(3, 4, 5, 11)[::way])
    assert rests_on_numbers(draft)
    assert not (draft.missing)
    assert not (draft.unexpected)
    assert "(h [(f d) d d]) e" in draft.to_toml()
    moves_alike(draft.migration, *grouped(3, 2, 7, 13)[::way])


def per_head(
    order: str, heads: int, size: int, wide: int, width: int
) -> tuple[Leaves, Leaves]:
    """Two arrays, one of them of three parts, and one that holds all head by head."""
    rng = np.random.default_rng(0)
    source, target = {}, {}
    sizes = {"q": size, "k": size, "v": wide, "z": wide}
    for n in range(2):
        parts = {p: rng.normal(size=(heads, d, width)) for p, d in sizes.items()}
        flat = {p: part.reshape(-1, width) for p, part in parts.items()}
        source[f"h.{n}.qkv.weight"] = np.concatenate([flat[p] for p in "qkv"])
        source[f"h.{n}.z.weight"] = flat["z"]
        both = np.concatenate([parts[p] for p in order], 1)
        target[f"h/{n}/kernel"] = both.reshape(-1, width).T
    return source, target


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("order", ["qkvz", "zqkv"])
def test_parts_of_each_head_may_be_segments_of_another_array(order, is_back):
    way = -1 if is_back else 1
    draft = ta.draft_migration(*per_head(order, 3, 5, 14, 11)[::way])
    assert rests_on_numbers(draft)
    assert not (draft.missing)
    assert not (draft.unexpected)
    moves_alike(draft.migration, *per_head(order, 3, 7, 12, 13)[::way])


@pytest.mark.parametrize("is_back", [False, True])
def test_parts_of_each_head_may_become_parts_of_all_heads(is_back):
    def pair(size: int, wide: int) -> tuple[Leaves, Leaves]:
        whole = np.random.default_rng(0).normal(size=(3, size + wide, 11))
        parts = [part.reshape(-1, 11) for part in np.split(whole, [size], 1)]
        return {"w": whole.reshape(-1, 11)}, {"k": np.concatenate(parts).T}

    way = -1 if is_back else 1
    draft = ta.draft_migration(*pair(5, 14)[::way])
    assert rests_on_numbers(draft)
    moves_alike(draft.migration, *pair(5, 12)[::way])


def test_two_sizes_that_are_equal_have_names_of_their_own():
    whole = np.random.default_rng(0).normal(size=(3, 3, 7, 11))
    target = whole.swapaxes(0, 1).reshape(63, 11).T
    draft = ta.draft_migration({"w": whole.reshape(63, 11)}, {"k": target})
    assert [*draft.migration.sizes.values()] == [3, 3]
    assert rests_on_numbers(draft)


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_rotary_llama_is_right_at_other_sizes(first, monkeypatch):
    given = tables.llama(first)
    draft = ta.draft_migration(given.source, given.result)
    query = "model.layers.{l}.self_attn.{p=q,k}_proj.weight : (h two d) e"
    assert query in [row.text for row in draft.migration.rows]
    assert draft.migration.sizes == {"two": 2}
    for name, size in {"LAYERS": 4, "E": 13, "F": 9, "HEADS": 6, "KV": 2}.items():
        monkeypatch.setattr(tables, name, size)
    monkeypatch.setattr(tables, "HALF", 7)
    monkeypatch.setattr(tables, "D", 14)
    other = tables.llama(first)
    moves_alike(draft.migration, other.source, other.result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-flax", "llama-scanned", "vit-nnx"])
def test_16_bits_repeat_and_show_the_rows_all_the_same(name, tmp_path):
    shapes = ta.read_metadata(schema_of(name))
    wide = float32(shapes)
    source = {path: leaf.astype(jnp.bfloat16) for path, leaf in wide.items()}
    table = table_of(name, tmp_path, SIZES.get(name, {}))
    draft = ta.draft_migration(source, table(source))
    assert not draft.missing
    other, more = at_other_sizes(name, tmp_path)
    for path, targets in draft.pairs.items():
        if path not in draft.doubtful and path in more:
            assert targets  # compared below
    if not draft.doubtful:
        moves_alike(draft.migration, more, other(more))


def test_a_cast_is_part_of_the_row():
    wide = np.random.default_rng(0).normal(size=(5, 7)).astype("float32")
    source = {"a.weight": wide}
    target = {"a/kernel": wide.T.astype(jnp.bfloat16)}
    draft = ta.draft_migration(source, target)
    assert rests_on_numbers(draft)
    made = draft.migration(source)
    assert not ta.tree_diff(made, target, values=True)


def test_one_array_twice_is_one_row_with_two_targets():
    wide = float32(abstract({"wte": np.zeros((11, 5))}))["wte"]
    draft = ta.draft_migration({"wte": wide}, {"embed": wide, "head": wide.T})
    ((row, targets),) = [
        (row.text, [each.text for each in row.targets]) for row in draft.migration.rows
    ]
    assert (row, targets) == ("wte : v e", ["embed : v e", "head : e v"])


def test_a_stack_of_hundreds_is_seen_whatever_its_names():
    stack = np.random.default_rng(0).normal(size=(300, 5, 7)).astype("float32")
    source = {f"some.{n}.w": layer for n, layer in enumerate(stack)}
    source["w"] = np.random.default_rng(1).normal(size=stack.shape).astype("float32")
    draft = ta.draft_migration(source, {"other": stack.swapaxes(1, 2)})
    assert draft.pairs.keys() == source.keys() - {"w"}
    assert rests_on_numbers(draft)


NUMBERED = np.random.default_rng(5).normal(size=(3, 4, 13, 7)).astype("float32")
BY_NUMBER = {
    "the parts of an array": (
        {f"h.{i}.p.{n}.w": NUMBERED[i, n, : 5 + n] for i in range(3) for n in range(3)},
        {
            f"h/{i}/w": np.concatenate([NUMBERED[i, n, : 5 + n] for n in range(3)]).T
            for i in range(3)
        },
    ),
    "the parts of a stack": (
        {f"h.{i}.w{n}": NUMBERED[i, n, : 5 + n] for i in range(3) for n in range(2)},
        {"h/w": np.concatenate([NUMBERED[:, 0, :5], NUMBERED[:, 1, :6]], axis=1)},
    ),
    "copies": (
        {f"h.{i}.w": NUMBERED[i, 0] for i in range(3)},
        {
            f"h/{i}/x{n}": NUMBERED[i, 0].T if n else NUMBERED[i, 0]
            for i in range(3)
            for n in range(2)
        },
    ),
}


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("name", BY_NUMBER)
def test_parts_may_differ_in_a_number_and_in_size(name, is_back):
    pair = BY_NUMBER[name][::-1] if is_back else BY_NUMBER[name]
    draft = ta.draft_migration(*pair)
    assert bool(draft.doubtful) == (is_back and name == "copies")  # either of two
    moves_alike(draft.migration, *pair)


@pytest.mark.parametrize("with_values", [True, False])
@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("path", ["b/{b}/{i}/w", "b/{i}/{b}/w"])
def test_one_number_may_become_two(path, is_back, with_values):
    def pair(blocks, size):
        layers = float32({f"h.{n}.w": A for n in range(blocks * size)}, blocks)
        return layers, {
            path.format(b=n // size, i=n % size): layers[f"h.{n}.w"].T
            for n in range(blocks * size)
        }

    source, target = pair(4, 3)[:: -1 if is_back else 1]
    if with_values:
        draft = ta.draft_migration(source, target)
        assert rests_on_numbers(draft)
        assert draft.migration.sizes == {"i": 3}
        moves_alike(draft.migration, *pair(2, 3)[:: -1 if is_back else 1])
    else:
        draft = ta.draft_migration(abstract(source), abstract(target))
        assert {*draft.pairs} == {*draft.doubtful} == {*source}


def test_parts_of_a_layer_may_be_in_one_array_of_the_layers_with_its_place_in_blocks():
    """As MaxText scans Qwen3.5: blocks are an axis, two maps of a layer one kernel."""
    names = [(n, part) for n in range(6) for part in "ba"]
    source = float32({f"h.{n}.in_{part}.w": np.zeros((7, 5)) for n, part in names})
    both = [
        np.concatenate([source[f"h.{n}.in_{part}.w"].T for part in "ba"], 1)
        for n in range(6)
    ]
    target = {f"h/layer_{i}/in_ba": np.stack(both[i::2], 1) for i in (0, 1)}
    draft = ta.draft_migration(source, target)
    assert [row.text for row in draft.migration.rows] == [
        "h.{(b i)}.in_{p=b,a}.w : o a"
    ]
    moves_alike(draft.migration, source, target)


@pytest.mark.parametrize("is_back", [False, True])
def test_some_layers_of_a_block_have_a_row_with_their_place_in_it(is_back):
    """As a scan of four layers, of which the second and the fourth have experts."""

    def pair(blocks: int) -> tuple[Leaves, Leaves]:
        numbers = [n for n in range(4 * blocks) if n % 2]
        source = float32({f"layers.{n}.experts.w": np.zeros((7, 5)) for n in numbers})
        arrays = {n: source[f"layers.{n}.experts.w"].T for n in numbers}
        target = {
            f"layer_{i}/experts": np.stack(
                [arrays[n] for n in numbers if n % 4 == i], 1
            )
            for i in (1, 3)
        }
        return (target, source) if is_back else (source, target)

    draft = ta.draft_migration(*pair(3))
    texts = "layers.{(b i)}.experts.w : o a", "layer_{i}/experts : o b a"
    assert [row.text for row in draft.migration.rows] == [texts[is_back]]
    assert draft.migration.sizes == {"i": 4}
    moves_alike(draft.migration, *pair(5))


def test_words_may_be_places_in_blocks_of_layers_that_are_scaled():
    """As MaxText scans Gemma 2: layers of two kinds, queries divided by a root."""

    def convert(leaves: Leaves) -> Leaves:
        made = {}
        for first, kind in enumerate(("local", "global")):
            numbers = range(first, len(leaves) // 2, 2)
            made[f"h/{kind}/up"] = np.stack(
                [leaves[f"h.{n}.up.w"].T for n in numbers], 1
            )
            queries = [leaves[f"h.{n}.q.w"].T.reshape(11, 3, 7) for n in numbers]
            made[f"h/{kind}/q"] = np.stack(queries, 1) * np.float32(7**-0.5)
        return made

    shapes = {f"h.{n}.up.w": (13, 11) for n in range(6)}
    source = float32(shapes_of(shapes | {f"h.{n}.q.w": (21, 11) for n in range(6)}))
    draft = ta.draft_migration(source, convert=convert)
    assert [row.text for row in draft.migration.rows] == [
        "h.{(b i)}.up.w : o a",
        "h.{(b i)}.q.w : (h d) e",
    ]
    moves_alike(draft.migration, source, convert(source))


def of_words(count: int) -> tuple[Leaves, Leaves]:
    """Leaves whose names have few words in common; every second one is turned."""
    words = ["".join(w) for w in itertools.product("bdk", "aeo", "mnr", "iuy", "pt")]
    names = (f"{words[n]}.w{words[-n]}" for n in range(count))
    source = float32(shapes_of(dict.fromkeys(names, (3, 5))))
    result = {
        f"{words[(5 * n) % 97]}/x{words[n]}": array.T if n % 2 else array
        for n, array in enumerate(source.values())
    }
    return source, result


@pytest.mark.slow
def test_rows_that_differ_in_words_are_planned_once():
    def work(count: int) -> int:
        sides = of_words(count)
        return calls_in(lambda: ta.draft_migration(*sides))

    assert len(ta.draft_migration(*of_words(20)).migration.rows) == 20
    assert work(60) - work(20) < 40 * 1_300  # 2,700 if each is planned


def test_words_that_nothing_else_has_in_their_place_are_not_listed():
    parts = "in", "x", "dt", "out"
    source = float32(
        {f"h.{n}.{p}_proj.w": np.zeros((7, 5)) for n in "012" for p in parts}
    )
    source["norm.scale"] = np.ones(5, "float32")
    draft = ta.draft_migration(
        source, {path.replace(".", "/"): leaf for path, leaf in source.items()}
    )
    assert "h.{l}.{p}_proj.w" in {
        row.text.partition(" :")[0] for row in draft.migration.rows
    }


def test_random_streams_are_no_leaves_of_a_draft():
    """As of ``nnx.Rngs``: a typed key, and the count next to it."""
    source = float32({"w": np.zeros((7, 5))})
    rngs = {"key": jax.random.key(0), "count": np.uint32(3)}
    draft = ta.draft_migration(source | {"rngs": rngs}, {"kernel": source["w"].T})
    assert not draft.unexpected
    assert draft.pairs == {"w": ("kernel",)}


def test_scalars_of_several_names_are_one_array():
    source = {"q.scale": np.float32(0.3), "k.scale": np.float32(0.7)}
    target = {"scales": np.float32([0.3, 0.7])}
    draft = ta.draft_migration(source, target)
    assert rests_on_numbers(draft)
    moves_alike(draft.migration, source, target)


WINDOW = (2, 3, 1, 0)
A, B, C, D = (np.random.default_rng(i).normal(size=(5, 7)) for i in range(4))
E, F, G = (np.random.default_rng(i).normal(size=(5, 4, 3, 2)) for i in range(3))


@pytest.mark.parametrize(
    ("source", "target", "mark"),
    [
        ({"fc1.w": A, "fc2.w": B}, {"fc1/k": A.T, "fc2/k": B}, ""),
        (
            {"net.0.w": E, "net.3.w": A},
            {"net/0/k": E.transpose(WINDOW), "net/3/k": A.T},
            "",
        ),
        (
            {"h.0.w": A, "h.1.w": B, "h.2.w": C, "h.3.w": D},
            {"h/0/k": A.T, "h/1/k": B, "h/2/k": C.T, "h/3/k": D},
            "numbers",  # nothing shows which of both a fifth layer is
        ),
        (
            {"conv1.w": E, "conv2.w": F, "conv_short.w": G},
            {
                "conv1/k": E.transpose(WINDOW),
                "conv2/k": F.transpose(WINDOW),
                "conv_short/k": G,
            },
            "",
        ),
    ],
)
def test_each_row_takes_its_own_leaves(source, target, mark):
    source, target = (
        {path: leaf.astype("f4") for path, leaf in side.items()}
        for side in (source, target)
    )
    draft = ta.draft_migration(source, target)
    assert {row.notes.check for row in draft.migration.rows} == {mark}
    assert not draft.migration.sizes
    assert not draft.unexpected
    moves_alike(draft.migration, source, target)


def test_no_row_takes_a_leaf_without_a_partner():
    source = float32(abstract({f"norm{n}.w": np.zeros(5) for n in (1, 2, "_extra")}))
    target = {f"norm{n}/scale": source[f"norm{n}.w"] for n in (1, 2)}
    draft = ta.draft_migration(source, target)
    assert draft.unexpected == ("norm_extra.w",)
    assert not any(row.takes("norm_extra.w") for row in draft.migration.rows)


def counted_parameters(power: int) -> tuple[Leaves, Leaves]:
    """Parameters of a list, whose names are numbers, and what they become."""
    shapes = [(6,)] * 4 + [(11, 6)] + [(6, 9)] * 2 + [(9, 6)] * 4
    source = float32({f"t{n}": np.zeros(shape) for n, shape in enumerate(shapes)})
    target = {"emb": source["t4"]}
    for n in (0, 1):
        both = np.stack([source[f"t{n + 7}"].T, source[f"t{n + 9}"].T], 1)
        target |= {
            f"layers/{n}/a": source[f"t{n}"],
            f"layers/{n}/b": source[f"t{n + 2}"],
        }
        target |= {f"layers/{n}/down": source[f"t{n + 5}"].T}
        target |= {f"layers/{n}/both": both**power}
    return source, target


@pytest.mark.slow
@pytest.mark.parametrize("is_back", [False, True])
def test_arrays_whose_names_are_only_numbers_have_the_rows_that_numbers_prove(is_back):
    pair = counted_parameters(1)[:: -1 if is_back else 1]
    draft = ta.draft_migration(*pair)
    assert not draft.missing
    assert not draft.unexpected
    assert len(draft.migration.tables) == 1
    moves_alike(draft.migration, *pair)


def test_a_number_that_would_match_too_much_becomes_a_list():
    source, target = counted_parameters(3)  # `both` has no row, so these are left
    draft = ta.draft_migration(source, target)
    assert draft.unexpected == ("t7", "t8", "t9", "t10")
    checks = {row.notes.check for row in draft.migration.rows}
    assert checks == {"numbers"}  # of a longer list, these would be others
    rows = [(row.text, row.targets[0].text) for row in draft.migration.rows]
    assert ("t{n=5,6} : o i", "layers/{n=0,1}/down : i o") in rows
    for path in draft.unexpected:
        assert not any(row.takes(path) for row in draft.migration.rows)


def test_equal_arrays_of_the_source_are_marked():
    wide = float32(abstract({"w": np.zeros((11, 5))}))["w"]
    source = {"a.w": wide, "b.w": wide.copy()}
    draft = ta.draft_migration(source, {"x": wide.T})
    assert draft.doubtful


def test_constants_are_no_evidence():
    source = {"x.scale": np.ones(7, "f4"), "y.scale": np.ones(7, "f4")}
    target = {"p/scale": np.ones(7, "f4"), "q/scale": np.ones(7, "f4")}
    draft = ta.draft_migration(source, target)
    assert {*draft.doubtful} == {*source}


def test_numbers_that_were_changed_have_no_row():
    w = float32(abstract({"w": np.zeros((5, 7))}))["w"]
    source = {"mlp.w": w, "out.w": w + 1}
    draft = ta.draft_migration(source, {"mlp/w": w**3, "out/w": w + 1})
    assert (draft.unexpected, draft.missing) == (("mlp.w",), ("mlp/w",))
    assert rests_on_numbers(draft)
    text = draft.to_toml()
    assert text.index("the numbers against them") < text.index('# from = "mlp.w"')
    assert "drop" not in text


def test_leaves_that_a_cast_makes_equal_are_marked():
    w = float32(abstract({"w": np.zeros((7, 4))}))["w"]
    source = {"model.w": w, "average.w": w + np.float32(1e-6)}
    target = {f"{k}/k": a.T.astype(jnp.bfloat16) for k, a in source.items()}
    draft = ta.draft_migration(source, target)
    assert {*draft.doubtful} == {*source}
    assert 'check = "equal leaves"' in draft.to_toml()


def test_a_symmetric_array_does_not_show_the_order_of_its_axes():
    w = float32(abstract({"w": np.zeros((7, 7))}))["w"]
    draft = ta.draft_migration({"w": w + w.T, "v": w}, {"x": w + w.T, "y": w.T})
    assert draft.doubtful == ("w",)
    assert 'check = "order of axes"' in draft.to_toml()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [7, 70])
def test_numbers_in_another_order_are_not_left_to_names(size, dtype):
    stack, other = np.random.default_rng(0).normal(size=(2, 3, 30, size)).astype(dtype)
    source = {f"h.{i}.w": stack[i] for i in range(3)}
    mixed = np.random.default_rng(0).permutation(stack.reshape(-1))
    draft = ta.draft_migration(source, {"h/w": mixed.reshape(stack.shape)})
    assert draft.unexpected == tuple(source)
    assert "an order that no row found here gives" in str(draft)
    unlike = ta.draft_migration(source, {"h/w": other})
    assert unlike.doubtful == tuple(source)
    assert "no numbers in common" in str(unlike)


def test_models_with_the_same_numbers_are_not_said_to_have_none():
    gate, up = np.random.default_rng(0).normal(size=(2, 5, 7)).astype("float32")
    mixed = np.random.default_rng(0).permutation(np.concatenate([gate, up]), axis=1)
    draft = ta.draft_migration({"gate": gate, "up": up}, {"fused": mixed[::-1]})
    assert "no numbers in common" not in str(draft)
    assert "do not look like one model" not in str(draft)


@pytest.mark.parametrize("with_values", [True, False])
def test_the_only_layer_of_a_model_is_warned_of(with_values):
    shapes = {"h.0.q.weight": np.zeros((4, 7)), "norm.scale": np.zeros(5)}
    source = float32(shapes)
    stack = source["h.0.q.weight"].T[None]
    target = {"h/q/kernel": stack, "norm/scale": source["norm.scale"]}
    sizes = (source, target) if with_values else (abstract(source), abstract(target))
    draft = ta.draft_migration(*sizes)
    assert draft.pairs["h.0.q.weight"] == ("h/q/kernel",)
    notes = [note.rpartition(" here, ")[2] for note in draft.notes if "size 1" in note]
    assert notes == [
        "as the layers of a model with one, is `1` in the rows of 'h/q/kernel'."
    ]


def test_large_leaves_are_looked_up_along_lines():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, 96, 8, 64)).astype("float32")
    source = {
        f"h.{i}.q": q[i].reshape(96, 8, 2, 32).transpose(1, 3, 2, 0).reshape(512, 96)
        for i in range(3)
    }
    draft = ta.draft_migration(source, {"blocks/q": q})
    assert rests_on_numbers(draft)
    moves_alike(draft.migration, source, {"blocks/q": q})


# --- from a conversion function ---


def test_a_conversion_function_becomes_a_table():
    def convert(leaves):
        heads = {
            f"blocks/{name}": np.stack(
                [leaves.pop(f"h.{i}.{name}").T.reshape(7, 3, 5) for i in range(2)]
            )
            for name in "qk"
        }
        return heads | {"norm": {"scale": leaves["ln.weight"] + 1}}

    shapes = {f"h.{i}.{name}": np.zeros((15, 7)) for i in range(2) for name in "qk"}
    shapes |= {"ln.weight": np.zeros(7), "unused": np.zeros(3)}
    draft = ta.draft_migration(abstract(shapes), convert=convert)
    assert draft.migration == ta.Migration(
        {
            "h.{l}.{p=q,k} : (h d) e": "blocks/{p} : l e h d",
            "ln.weight": ("norm/scale", {"offset": 1.0}),
            "unused": None,
        }
    )
    assert not draft.unexpected
    assert rests_on_numbers(draft)


def test_what_a_function_never_reads_is_dropped():
    shapes = {f"h.{n}.{name}": np.zeros(3) for n in range(3) for name in ("w", "mask")}
    shapes |= {"steps": np.zeros((), "int32"), "used": np.zeros(5)}
    seen = []

    def convert(leaves):
        seen.append(1)
        made = {p.replace(".", "/"): a for p, a in leaves.items() if p.endswith("w")}
        return made | {"used": leaves["used"] ** 3}

    draft = ta.draft_migration(abstract(shapes), convert=convert)
    assert [row.text for row in draft.migration.rows] == [
        "h.{l}.w",
        "h.*.mask",
        "steps",
    ]
    assert (draft.unexpected, draft.missing) == (("used",), ("used",))
    assert rests_on_numbers(draft)
    assert 2 < len(seen) < 11


@pytest.mark.slow
def test_a_number_that_is_there_by_chance_is_no_evidence():
    """In one call, 137 of 308 numbers of ``x + 1`` were those of other leaves."""
    shapes = abstract({f"h.{n}.w": np.zeros((13, 22)) for n in range(14)})
    draft = ta.draft_migration(
        shapes, convert=lambda w: {p: a + 1 for p, a in w.items()}
    )
    (row,) = draft.migration.rows
    assert row.typed() == ("h.{l}.w", ("h.{l}.w", {"offset": 1.0}))
    assert rests_on_numbers(draft)


COMPUTED = {
    "a factor": (lambda w: w * np.float32(0.25), {"scale": 0.25, "check": "scale"}),
    "a power of a size": (lambda w: w / np.sqrt(5, dtype="f4"), {"scale": "i**-0.5"}),
    "a negative one": (lambda w: -w, {"scale": -1.0}),
    "a line": (
        lambda w: 3 * w - 2,
        {"scale": 3.0, "offset": -2.0, "check": "scale"},
    ),
    "zeros": (
        lambda w: np.pad(w, ((0, 0), (1, 2))),
        {"pad": {"i": (1, 2)}, "check": "length"},
    ),
    "zeros of both": (
        lambda w: np.pad(w, ((3, 0), (0, 2))),
        {"pad": {"o": (3, 0), "i": (0, 2)}, "check": "length"},
    ),
    "a part": (
        lambda w: w[2:],
        {"undo": {"pad": {"o": (2, 0)}, "fill": "target"}, "check": "length"},
    ),
    "a factor and zeros": (
        lambda w: np.pad(w * 4, ((0, 1), (0, 0))),
        {"scale": 4.0, "pad": {"o": (0, 1)}, "check": "length, scale"},
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_a_function_computes_is_in_the_row(name):
    change, operations = COMPUTED[name]
    shapes = {"w": np.zeros((11, 5)), "v": np.zeros((11, 5))}
    draft = ta.draft_migration(
        abstract(shapes), convert=lambda w: {"a": change(w["w"]).T, "b": w["v"]}
    )
    assert draft.doubtful == ("w",) * ("check" in operations)
    assert not (draft.missing)
    assert not (draft.unexpected)
    rows = {row.text: row.typed()[1] for row in draft.migration.rows}
    assert rows == {"w : o i": ("a : i o", operations), "v": "b"}


ROUNDED = {
    "bfloat16": lambda width: np.float32(jnp.bfloat16(width**0.5)),
    "float16": lambda width: np.float32(np.float16(width**0.5)),
}


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("width", [22, 44, 90])
def test_a_root_that_was_rounded_is_marked_and_named(width, dtype):
    """4.6875 is short, as a number that somebody chose, and the root of 22."""

    def convert(leaves):
        wide = leaves["embed"]
        return {"embed": wide * ROUNDED[dtype](wide.shape[1])}

    draft = ta.draft_migration({"embed": np.zeros((37, width), "f4")}, convert=convert)
    assert draft.doubtful == ("embed",)
    assert f"{dtype}(e**0.5)" in draft.to_toml()
    again = draft.check({"embed": np.zeros((37, 26), "f4")}, convert)
    assert again or draft.migration == again.migration
    (row,) = draft.migration.rows
    if row.typed()[1][1]["scale"] == f"{dtype}(e**0.5)":  # the root in one dtype alone
        assert again
        assert [row.notes.check for row in again.migration.rows] == [""]


@pytest.mark.parametrize("power", [0.5, -0.5])
def test_a_factor_of_a_leaf_that_keeps_its_axes_is_a_power_of_one(power):
    def convert(leaves):
        wide = leaves["embed"]
        return {"embed": wide * np.float32(wide.shape[1] ** power)}

    draft = ta.draft_migration({"embed": np.zeros((37, 22), "f4")}, convert=convert)
    (row,) = draft.migration.rows
    assert row.typed() == ("embed : v e", ("embed : v e", {"scale": f"e**{power}"}))
    source = float32({"embed": np.zeros((41, 26))}, 3)
    made = draft.migration(source)
    assert not ta.tree_diff(made, convert(source), values=True)


def test_a_factor_has_all_digits_that_its_products_need():
    factor = np.float32(10**0.5 * 1.3)
    draft = ta.draft_migration(
        {"w": np.zeros((13, 7), "f4")},
        convert=lambda leaves: {"w": leaves["w"] * factor},
    )
    source = float32({"w": np.zeros((13, 7))}, 3)
    assert np.array_equal(draft.migration(source)["w"], source["w"] * factor)


def heads_of_two_halves(num_heads: int, size: int) -> tuple[Leaves, Leaves]:
    """A query whose rotary halves are neighbours in the target."""
    random = np.random.default_rng(num_heads * size)
    wide = random.normal(size=(num_heads * size, 11)).astype("f4")
    halves = wide.reshape(num_heads, 2, size // 2, 11)
    return {"q.weight": wide}, {"q/kernel": halves.swapaxes(1, 2).reshape(wide.shape).T}


def test_sizes_that_were_seen_are_marked_also_where_another_model_agrees():
    draft = ta.draft_migration(*heads_of_two_halves(4, 6))
    assert draft.migration.sizes == {"two": 2, "d": 3}
    assert [row.notes.check for row in draft.migration.rows] == ["sizes"]
    assert "draft.check at another size" in draft.summary
    assert "find_wrong_rows" not in draft.summary
    same = draft.check(*heads_of_two_halves(4, 6))
    assert same
    assert same.migration == draft.migration
    other = draft.check(*heads_of_two_halves(7, 6))
    assert other
    assert [row.notes.check for row in other.migration.rows] == ["sizes"]  # 3 halves
    wrong = draft.check(*heads_of_two_halves(4, 12))
    assert not wrong
    assert wrong.migration == draft.migration


def turned_heads(half, divided_by=None):
    """Queries that MaxText scales by the size of a head, whose halves are two axes."""

    def convert(leaves):
        one = {path: leaf.reshape(6, 2, half, 14) for path, leaf in leaves.items()}
        factor = (2 * half) ** -0.5 if divided_by is None else 1 / divided_by
        one["q"] = one["q"] * np.float32(factor)
        return {path: leaf.transpose(3, 0, 2, 1) for path, leaf in one.items()}

    return convert


def test_a_factor_is_the_root_of_a_product_of_sizes():
    shapes = {"q": np.zeros((60, 14)), "k": np.zeros((60, 14))}
    draft = ta.draft_migration(abstract(shapes), convert=turned_heads(5))
    q, k = sorted(draft.migration.rows, key=lambda row: row.text, reverse=True)
    assert re.fullmatch(r"\(\w+ \w+\)\*\*-0.5", q.typed()[1][1]["scale"])
    assert q.notes.check != "scale"
    assert isinstance(k.typed()[1], str)
    wider = {"q": np.zeros((6 * 2 * 7, 14)), "k": np.zeros((6 * 2 * 7, 14))}
    source = float32(wider, 3)
    expected = turned_heads(7)(source)
    rows = [row.typed() for row in draft.migration.rows]
    for path, leaf in ta.Migration(rows)(source, expected).items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-6)


@pytest.mark.slow
def test_a_factor_that_no_size_gives_is_marked():
    shapes = {"q": np.zeros((60, 14)), "k": np.zeros((60, 14))}
    draft = ta.draft_migration(abstract(shapes), convert=turned_heads(5, 3**0.5))
    q, k = sorted(draft.migration.rows, key=lambda row: row.text, reverse=True)
    assert q.typed()[1][1] == {"scale": pytest.approx(3**-0.5), "check": "scale"}
    assert isinstance(k.typed()[1], str)
    assert "no size here gives, and may" in draft.to_toml()


def test_a_function_may_move_scalars():
    draft = ta.draft_migration(
        {"logit_scale": np.zeros(()), "bn.count": np.zeros((), "int32")},
        convert=lambda leaves: {
            "scale": leaves["logit_scale"].reshape(1),
            "count": leaves["bn.count"],
        },
    )
    assert draft.migration == ta.Migration(
        {"logit_scale : ": "scale : 1", "bn.count": "count"}
    )
    assert rests_on_numbers(draft)


def test_a_function_that_computes_has_no_row():
    draft = ta.draft_migration(
        {"a.w": np.zeros((5, 7))}, convert=lambda leaves: {"a/w": leaves["a.w"] ** 3}
    )
    assert (draft.unexpected, draft.missing) == (("a.w",), ("a/w",))


def test_what_a_function_makes_is_compared_with_a_target():
    source = {f"h.{i}": np.zeros((5, 7), np.float32) for i in (0, 1)}
    target = {"h/0": np.zeros((7, 5)), "h/1": np.zeros((7, 6)), "h/2": np.zeros(3)}
    draft = ta.draft_migration(
        source,
        target,
        convert=lambda w: {"h/0": w["h.0"].T, "h/1": w["h.1"].T, "x": w["h.0"]},
    )
    assert draft.notes[:3] == (
        "1 leaf not made by the function: 'h/2'.",
        "1 leaf not in the target: 'x'.",
        "1 leaf of another shape in the target: 'h/1'.",
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_function_that_casts_shows_what_it_moves(dtype):
    order = np.random.default_rng(0).permutation(63)

    def mixed(leaf):  # in an order that no row gives
        return leaf.reshape(-1)[order].reshape(leaf.shape)

    layers = [f"h.{i}" for i in range(3)]
    shapes = {f"{at}.{name}_norm": np.zeros(7) for at in layers for name in ("a", "b")}
    shapes |= {f"{at}.q": np.zeros((9, 7)) for at in layers}
    shapes |= {f"{at}.k": np.zeros((9, 7)) for at in layers}

    def convert(leaves):
        other = {"a_norm": "b_norm", "b_norm": "a_norm", "q": "q", "k": "k"}
        result = {}
        for path, leaf in leaves.items():
            at, _, name = path.rpartition(".")
            leaf = {"k": np.transpose, "q": mixed}.get(name, np.asarray)(leaf)
            result[f"{at}.{other[name]}"] = leaf.astype(dtype)
        return result

    draft = ta.draft_migration(abstract(shapes), convert=convert)
    assert draft.pairs["h.1.a_norm"] == ("h.1.b_norm",)
    assert draft.unexpected == tuple(path for path in shapes if path.endswith("q"))
    assert rests_on_numbers(draft)


@pytest.mark.parametrize("old", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_function_may_add_1_and_cast(dtype, old):
    norms = {f"h.{i}.{name}_norm": np.zeros(7) for i in range(3) for name in "ab"}
    weights = {f"h.{i}.q": np.zeros((9, 7)) for i in range(3)}
    shapes = {path: x.astype(jnp.dtype(old)) for path, x in (norms | weights).items()}

    def convert(leaves):
        for path, leaf in leaves.items():
            new = path.translate(str.maketrans(".ab", "/ba"))
            yield new, (leaf + 1 if "norm" in path else leaf.T).astype(dtype)

    draft = ta.draft_migration(abstract(shapes), convert=convert)
    casts = [old, jnp.dtype(dtype).name]
    # JAX makes one of the other.
    cast = {} if set(casts) <= {"float32", "float64"} else {"cast": casts}
    cast = {} if len({*casts}) == 1 else cast
    assert rests_on_numbers(draft)
    if casts != ["float64", "float32"]:
        made, wanted = draft.migration(shapes), dict(convert(shapes))
        assert {p: x.dtype for p, x in ta.to_flat_dict(made).items()} == {
            path: array.dtype for path, array in wanted.items()
        }
    assert draft.migration == ta.Migration(
        {
            "h.{l}.{p=a,b}_norm": ("h/{l}/{p=b,a}_norm", {"offset": 1.0} | cast),
            "h.{l}.q : o i": ("h/{l}/q : i o", cast) if cast else "h/{l}/q : i o",
        }
    )


@pytest.mark.parametrize(
    "form",
    [
        dict,
        list,
        iter,
        lambda pairs: (each for each in pairs),
        lambda p: dict(p).items(),
    ],
)
def test_a_function_may_return_or_yield_pairs(form):
    source = abstract({"a.w": np.zeros((5, 7)), "b.w": np.zeros(3)})
    draft = ta.draft_migration(
        source, convert=lambda leaves: form([(f"x{p}", a.T) for p, a in leaves.items()])
    )
    assert draft.pairs == {"a.w": ("xa.w",), "b.w": ("xb.w",)}
    assert rests_on_numbers(draft)


def test_numbers_for_a_function_are_apart_in_16_bits_and_show_an_offset():
    leaves = abstract({f"{i}": np.zeros((1_000,)) for i in range(40)})
    arrays = inputs.distinct_numbers(leaves)
    assert len(np.unique(np.concatenate([*arrays.values()]))) == 40_000
    for array in arrays.values():
        short = array.astype(jnp.bfloat16)
        assert len(np.unique(short)) > 700
        assert ((array + 1).astype(jnp.bfloat16) != short).all()


def write_into(leaves):
    leaves["w"][0] = 1
    return leaves


def forget(leaves):
    leaves.pop("w")


def name_by_number(leaves):
    return {str(leaves["w"].sum()): leaves["w"]}


def fail_late(leaves):
    yield from leaves.items()
    raise KeyError("gone")


def fail(leaves):
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("convert", "text"),
    [
        (write_into, "writes into its input"),
        (forget, "returned None"),
        (name_by_number, "other names or shapes for other numbers"),
        (fail, "raised KeyError: 'gone'"),
        (fail_late, "convert=fail_late raised KeyError: 'gone'"),
        (lambda leaves: {}, "no array in what convert= returned, of type dict"),
        (lambda leaves: len, "no array in what convert= returned, of type builtin"),
        (3, "not a function"),
        (lambda leaves: iter([*leaves.values()]), "returned list_iterator of ndarray"),
        (lambda leaves: zip("a", "b", strict=True), "returned zip of tuple"),
        (lambda leaves: [("a", leaves["w"])] * 2, "gave 'a' twice"),
        (lambda leaves: 3, "returned int"),
    ],
)
def test_a_conversion_function_that_cannot_be_read_is_named(convert, text):
    with pytest.raises(ta.MigrationError, match=text):
        ta.draft_migration({"w": np.zeros(3, "f4")}, convert=convert)


def test_a_function_that_needs_integers_is_drafted_from_what_it_returns():
    source = {"index": np.array([2, 0, 1]), "w": np.arange(15, dtype="f4")}
    source["w"] = source["w"].reshape(3, 5)

    def convert(leaves: Leaves) -> Leaves:
        return {"t": leaves["w"][leaves["index"]]}

    with pytest.raises(ta.MigrationError, match="its integers too, 'index'"):
        ta.draft_migration(source, convert=convert)
    draft = ta.draft_migration(source, convert(source))
    source = {"w": source["w"]}
    np.testing.assert_array_equal(
        draft.migration(source)["t"], source["w"][np.array([2, 0, 1])]
    )


def first_dense(dense: int, layers: int) -> tuple[Leaves, Leaves]:
    shapes = {f"h.{n}.w": np.zeros((5, 7)) for n in range(layers)}
    source = float32(shapes, layers)
    stack = np.stack([*source.values()])
    return source, {"dense/w": stack[:dense], "moe/w": stack[dense:]}


def test_numbers_after_those_of_another_row_begin_at_a_size():
    draft = ta.draft_migration(*first_dense(2, 5))
    assert rests_on_numbers(draft)
    assert draft.migration.sizes == {"dense": 2}
    text = draft.to_toml()
    assert 'from = "h.{l+dense}.w : o i"' in text
    rows = [row.typed() for row in draft.migration.rows]
    moves_alike(ta.Migration(rows, sizes={"dense": 3}), *first_dense(3, 7))


@pytest.mark.parametrize("names", ["own", "of a filled leaf"])
def test_what_a_function_leaves_at_zero_is_filled_with_zeros(names):
    """Whisper's keys have no bias, and models whose attention has one keep zeros."""
    last = "b" if names == "own" else "q"

    def convert(leaves):
        made = {f"l/{n}/q": leaves[f"l.{n}.q"].T for n in range(len(leaves))}
        return made | {
            f"l/{n}/{last}{n}": np.zeros(4, "f4") for n in range(len(leaves))
        }

    small = float32({f"l.{n}.q": np.zeros((11, 5)) for n in range(3)})
    draft = ta.draft_migration(small, convert=convert)
    assert not draft.missing
    assert rests_on_numbers(draft)
    want = convert(small)
    assert not ta.tree_diff(draft.migration(small, want), want, values=True)
    assert not ta.tree_diff(draft.migration.inverse(want, small), small, values=True)
    assert "[new]" in draft.to_toml()


@pytest.mark.parametrize("number", [0, 1])
def test_what_a_function_makes_of_no_leaf_is_filled(number):
    def convert(leaves):
        made = {path.replace("w", "k"): leaf.T for path, leaf in leaves.items()}
        norms = {
            f"l/{n}/norm": np.full(leaf.shape[0], number, leaf.dtype)
            for n, leaf in enumerate(leaves.values())
        }
        return made | norms

    draft = ta.draft_migration(
        {f"l.{n}.w": np.zeros((5, 7), "f4") for n in range(3)}, convert=convert
    )
    assert not draft.missing
    assert rests_on_numbers(draft)
    source = float32({f"l.{n}.w": np.zeros((4, 9)) for n in range(2)})
    wanted = convert(source)
    assert not ta.tree_diff(draft.migration(source, wanted), wanted, values=True)
    assert not ta.tree_diff(
        draft.migration.inverse(wanted, source), source, values=True
    )


def test_what_a_function_reads_is_never_to_be_dropped():
    """The two biases of an LSTM, of which the target has the product."""
    shapes = {"ih.bias": np.zeros(7), "hh.bias": np.zeros(7), "w": np.zeros((5, 7))}

    def convert(leaves):
        return {"k": leaves["w"].T, "bias": leaves["ih.bias"] * leaves["hh.bias"]}

    draft = ta.draft_migration(abstract(shapes), convert=convert)
    assert draft.unexpected == ("ih.bias", "hh.bias")
    assert "drop" not in draft.to_toml()
    assert "No row here gives what the function makes of these" in draft.to_toml()


def test_zeros_of_two_trees_are_not_said_to_be_left():
    wide = float32({"a": np.zeros((11, 5))})["a"]
    draft = ta.draft_migration({"a": wide}, {"b": wide, "bias": np.zeros(4, "f4")})
    assert draft.missing == ("bias",)


# --- held against another configuration ---


@pytest.mark.parametrize("by_function", [True, False])
def test_a_draft_is_checked_at_another_size(by_function):
    def convert(leaves):
        made = {"norm": leaves["norm"] + 1, "embed": leaves["embed"]}
        q = leaves["q"]
        q = q.reshape(2, -1, q.shape[1]).swapaxes(1, 2)
        return made | {"q": q * leaves["norm"].size}

    def model(width, heads):
        shapes = {"norm": (width,), "embed": (11, width), "q": (2 * heads, width)}
        return float32({path: np.zeros(shape) for path, shape in shapes.items()}, 3)

    draft = ta.draft_migration(model(5, 7), convert=convert)
    assert draft.doubtful == ("q",)  # 5 is the size of an axis, and a head was seen

    def check(width, heads):
        source = model(width, heads)
        return draft.check(source, convert if by_function else convert(source))

    right, wrong = check(5, 3), check(13, 7)
    assert right
    equal, rounded, left = str(right).split("\n")
    assert equal == "3 leaves: equal, there and back."
    assert rounded == "Rounded where it is computed: 'norm', 'q'."
    assert left.startswith("1 row keeps 'scale', 'q : (h d) e': it may be 5, of a size")
    assert not wrong  # the factor follows from a size
    assert [*wrong.forwards.values()] == [("q",)] == [*wrong.backwards.values()]
    assert "The row 'q : (h d) e' differs on the way there: 'q'." in str(wrong)
    odd = draft.check(model(5, 3), {"norm": np.zeros(4)})
    assert not odd
    assert str(odd).startswith("The table does not run: ")
    with pytest.raises(ta.MigrationError, match="pass arrays on both sides"):
        draft.check(abstract(model(5, 3)), abstract(model(5, 3)))


# --- from names and shapes ---


def know_half_of_the_words(rng: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Draft with half of the words that treeadapt knows, until the patch is undone."""
    every = synonyms.load_words(None)
    kept = rng.sample([*every.meanings], len(every.meanings) // 2)
    meanings = {text: every.meanings[text] for text in kept}
    fewer = synonyms.Words(meanings, every.fused)
    patch.setattr(drafts, "load_words", lambda _: fewer)


def right_rows(
    draft: ta.MigrationDraft,
    table: ta.Migration,
    source: Leaves,
    only: Collection[str] | None = None,
) -> tuple[set[str], set[str]]:
    """Paths of the source that go where they should, and those with the right axes."""
    result = table(source)
    goes: dict[str, set[str]] = {}
    for group in table.plan(source).groups:
        for path in group.source_paths:
            goes.setdefault(path, set()).update(group.filled)
    paired = {
        path for path, to in draft.pairs.items() if {*to} <= goes.get(path, set())
    }
    ordered = set()
    for each in draft._rows:
        paths = each.row.source_paths
        if not {*paths} <= (paired if only is None else paired & {*only}):
            continue
        single = writing.as_table(*writing.written([each.row]))
        made = single(
            {path: source[path] for path in paths},
            {path: result[path] for path in each.row.target_paths},
        )
        # Shapes do not show that 1 is added to a norm.
        if all(
            np.array_equal(made[p], result[p]) or np.array_equal(made[p] + 1, result[p])
            for p in made
        ):
            ordered |= {*paths}
    return paired, ordered


def template(path: str) -> str:
    return re.sub(r"\.[0-9]+\.", ".#.", path)


@pytest.mark.slow
def test_each_example_is_drafted_from_names_and_shapes(tmp_path):
    count = right = in_order = 0
    for name in DRAFTED:
        shapes = ta.read_metadata(schema_of(name))
        source = numbers(shapes)
        table = table_of(name, tmp_path, SIZES.get(name, {}))
        draft = ta.draft_migration(abstract(source), abstract(table(source)))
        paired, ordered = right_rows(draft, table, source)
        assert draft.doubtful == (*draft.pairs,)
        dropped = {*table.plan(source).dropped}
        templates = {template(path) for path in source if path not in dropped}
        count += len(templates)
        right += len({template(path) for path in paired} & templates)
        in_order += len({template(path) for path in ordered} & templates)
        draft.migration.planned(
            {path: a for path, a in abstract(source).items() if path in draft.pairs},
            abstract(table(source)),
        )
    assert right >= 0.95 * count
    assert in_order >= 0.95 * count


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTED)
def test_each_row_is_marked_if_leaves_and_words_are_gone(name, tmp_path, monkeypatch):
    source = numbers(ta.read_metadata(schema_of(name)))
    result = table_of(name, tmp_path, SIZES.get(name, {}))(source)
    rng = random.Random(name)
    for _ in range(4):
        know_half_of_the_words(rng, monkeypatch)
        number = re.compile(r"(?<![0-9])[0-9]+(?![0-9])")
        gone = {
            number.sub("#", path) for path in rng.sample(sorted({*source, *result}), 3)
        }
        left = [
            {p: a for p, a in side.items() if number.sub("#", p) not in gone}
            for side in (source, result)
        ]
        draft = ta.draft_migration(*map(abstract, left))
        assert draft.doubtful == (*draft.pairs,)
        assert all(row.notes.check for row in draft.migration.rows)


WIDE = {  # heads make up the width, and the rows of `mlp` are sure
    **{
        f"model.layers.{n}.self_attn.{p}_proj.weight": (22, 22)
        for n in range(3)
        for p in "qkvo"
    },
    **{f"model.layers.{n}.mlp.up_proj.weight": (13, 22) for n in range(3)},
}


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
def test_matrices_are_turned_as_those_that_shapes_decide(is_turned, is_back):
    mlp, query, out = (22, 13), (22, 2, 11), (2, 11, 22)
    if not is_turned:
        mlp, query, out = (13, 22), out, query
    target = {f"layers/attention/w{p}": (3, *query) for p in "qkv"}
    target |= {"layers/attention/wo": (3, *out), "layers/feed_forward/w3": (3, *mlp)}
    source, heads = "model.layers.{l}.self_attn.", "layers/attention/"
    rows = {
        source + "{p=q,k,v}_proj.weight : (h d) e": heads + "{p=wq,wk,wv} : l e h d",
        source + "o_proj.weight : e (h d)": heads + "wo : l h d e",
    }
    if not is_turned:
        texts = (text.replace("e h d", "h d e") for text in rows.values())
        rows = dict(zip(rows, texts, strict=True))
        rows[source + "o_proj.weight : e (h d)"] = heads + "wo : l e h d"
    sides = [shapes_of(WIDE), shapes_of(target)]
    draft = ta.draft_migration(*sides[:: -1 if is_back else 1])
    drafted = [(row.text, row.targets[0].text) for row in draft.migration.rows]
    assert {*(pair[:: -1 if is_back else 1] for pair in drafted)} >= {*rows.items()}
    assert draft.to_toml().count("order of axes") == 2


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
def test_square_parts_are_joined_along_the_axis_that_other_rows_show(
    is_turned, is_back
):
    shapes = {"q": (7, 7), "k": (7, 7), "v": (7, 7), "up": (5, 7)}
    source = {f"h.{n}.{p}.weight": shapes[p] for n in range(3) for p in shapes}
    target = {"h/qkv": (3, 7, 21), "h/up": (3, 7, 5)}
    if not is_turned:
        target = {"h/qkv": (3, 21, 7), "h/up": (3, 5, 7)}
    sides = [shapes_of(source), shapes_of(target)]
    text = ta.draft_migration(*sides[:: -1 if is_back else 1]).to_toml()
    i, o = "oi" if is_back and is_turned else "io"
    assert f'"h/qkv : l {f"{i} (p {o})" if is_turned else f"(p {o}) {i}"}"' in text
    assert f'"h.{{l}}.{{p=q,k,v}}.weight : {o} {i}"' in text
    assert "order of axes" in text


def block(names: Mapping[str, tuple[int, ...]], kinds: str) -> dict[str, Any]:
    """Weights and biases of three layers, each apart or all in one array."""
    shapes = {}
    weight, bias = kinds.split()
    for name, shape in names.items():
        for n in range(3) if "#" in name else [None]:
            path, stack = name.replace("#", str(n)), () if "#" in name else (3,)
            shapes[f"{path}{weight}"] = (*stack, *shape)
            shapes[f"{path}{bias}"] = (*stack, *shape[-1:])
    return shapes_of(shapes)


OPT_NORMS = ["self_attn_layer_norm", "final_layer_norm"]


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize(
    "norms",
    [
        ["attn_norm", "ffn_norm"],
        ["norm_attn", "norm_mlp"],
        ["mlp_last_norm", "attn_first_norm"],
        ["pre_norm", "post_norm"],  # by their order
        ["norm1", "norm2"],
        ["ln_1", "ln_2"],
    ],
)
def test_two_norms_are_paired_by_words_then_order(norms, is_back):
    source = block({f"layers.#.{name}": (22,) for name in OPT_NORMS}, ".weight .bias")
    target = block({f"blocks/{name}": (22,) for name in norms}, "/scale /bias")
    goes = dict(zip(OPT_NORMS, norms[:: -1 if "mlp" in norms[0] else 1], strict=True))
    sides = [source, target]
    draft = ta.draft_migration(*sides[:: -1 if is_back else 1])
    for path, targets in draft.pairs.items():
        old, new = (targets[0], path) if is_back else (path, targets[0])
        assert new.split("/")[1] == goes[old.split(".")[2]]
        assert new.endswith("bias") == old.endswith("bias")


@pytest.mark.parametrize("is_back", [False, True])
def test_leaves_of_one_module_go_to_one_module(is_back):
    source = block({"layers.#.fc1": (13,), "layers.#.fc2": (22,)}, ".weight .bias")
    for path, leaf in source.items():
        if path.endswith("weight"):
            shape = (*leaf.shape, 35 - leaf.shape[0])
            source[path] = jax.ShapeDtypeStruct(shape, leaf.dtype)
    shapes = {"wi/kernel": (3, 22, 13), "wo/kernel": (3, 13, 22)}
    shapes |= {"wi/bias": (3, 13), "wo/bias": (3, 22)}
    sides = [source, shapes_of(shapes)]
    draft = ta.draft_migration(*sides[:: -1 if is_back else 1])
    for path, targets in draft.pairs.items():
        old, new = (targets[0], path) if is_back else (path, targets[0])
        assert ("fc1" in old, "bias" in old) == ("wi" in new, "bias" in new)


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("axes", ["l e p h d", "l p e h d", "p l h d e", "l h p d e"])
def test_query_key_and_value_may_be_an_axis_of_one_array(axes, is_back):
    sizes = {"l": 2, "e": 22, "p": 3, "h": 5, "d": 7}
    shape = tuple(sizes[name] for name in axes.split())
    parts = {
        f"h.{n}.attn.{p}_proj.{kind}": (35, 22)[: 1 + (kind == "weight")]
        for n in range(2)
        for p in "qkv"
        for kind in ("weight", "bias")
    }
    whole = {"h/attn/qkv/kernel": shape, "h/attn/qkv/bias": (2, 3, 5, 7)}
    sides = [shapes_of(parts), shapes_of(whole)]
    draft = ta.draft_migration(*sides[:: -1 if is_back else 1])
    table = draft.migration.inverse if is_back else draft.migration
    for row in table.rows:
        written = axes if "weight" in row.text else "l p h d"
        assert row.text.startswith("h.{l}.attn.{p=q,k,v}_proj.")
        assert row.targets[0].text.endswith(f" : {written}")
    assert len(table.rows) == 2
    assert {*draft.doubtful} == {*sides[is_back]}
    assert "order of parts" in draft.to_toml()


def modules(
    names: Mapping[str, tuple[int, ...]], is_torch: bool
) -> dict[str, tuple[int, ...]]:
    """Weights and biases of layers; those of one size are norms."""
    leaves = {}
    for name, shape in names.items():
        if is_torch:
            leaves[f"{name}.weight"], leaves[f"{name}.bias"] = shape, shape[:1]
        else:
            kernel = (*shape[2:], *shape[1::-1])
            kind = "kernel" if len(shape) > 1 else "scale"
            leaves[f"{name}/{kind}"] = kernel if len(shape) > 1 else shape
            leaves[f"{name}/bias"] = shape[:1]
    return leaves


def chain(*sizes: int, kernel: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Shapes of layers, one after the other, as PyTorch has them."""
    return [(o, i, *kernel) for i, o in itertools.pairwise(sizes)]


SEQUENCES: dict[str, tuple[str, str, list[tuple[int, ...]]]] = {
    "three alike": ("net.0 net.2 net.4", "dense_0 dense_1 dense_2", chain(8, 8, 8, 8)),
    "in a list": ("net.0 net.2 net.4", "layers/0 layers/1 layers/2", chain(8, 8, 8, 8)),
    "from 1": ("net.1 net.3 net.5", "Dense_0 Dense_1 Dense_2", chain(8, 8, 8, 8)),
    "two": ("net.1 net.3", "layers_0 layers_1", chain(8, 8, 8)),
    "of sizes": (
        "net.0 net.2 net.4 net.6",
        "Dense_0 Dense_1 Dense_2 Dense_3",
        chain(3, 8, 8, 8, 2),
    ),
    "six alike": (
        "net.0 net.2 net.4 net.6 net.8 net.10",
        "dense_0 dense_1 dense_2 dense_3 dense_4 dense_5",
        chain(*[8] * 7),
    ),
    "with norms": (
        "net.0 net.1 net.3 net.4",
        "dense_0 norm_0 dense_1 norm_1",
        [(8, 8), (8,), (8, 8), (8,)],
    ),
    "with norms, of sizes": (
        "net.0 net.1 net.3 net.4 net.6",
        "dense_0 norm_0 dense_1 norm_1 dense_2",
        [(8, 3), (8,), (8, 8), (8,), (2, 8)],
    ),
    "convolutions": (
        "features.0 features.3 features.6 features.8 features.10",
        "conv_1 conv_2 conv_3 conv_4 conv_5",
        chain(3, 16, 16, 32, 32, 32, kernel=(3, 3)),
    ),
    "convolutions alike": (
        "features.0 features.3 features.6 features.8 features.10",
        "conv_1 conv_2 conv_3 conv_4 conv_5",
        chain(*[16] * 6, kernel=(3, 3)),
    ),
    "two of them": (
        "net.0 net.2 net.4 head.1 head.2 head.3",
        "body_0 body_1 body_2 head_0 head_1 head_2",
        chain(*[8] * 7),
    ),
    "of other names": (
        "net.0 net.2 net.4 end.0 end.1 end.2",
        "body_0 body_1 body_2 end_0 end_1 end_2",
        chain(*[8] * 7),
    ),
    "under one name": ("net.0 net.2 net.4", "net/0 net/1 net/2", chain(8, 8, 8, 8)),
    "norms from 0": ("norm1 norm2", "norm_0 norm_1", [(8,), (8,)]),
    "in blocks": (
        " ".join(f"block.{b}.net.{n}" for b in range(2) for n in (0, 2, 4)),
        " ".join(f"block_{b}/dense_{n}" for b in range(2) for n in range(3)),
        chain(*[8] * 7),
    ),
}


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("name", SEQUENCES)
def test_siblings_with_other_numbers_are_paired_by_rank(name, is_back):
    olds, news, shapes = SEQUENCES[name]
    goes = dict(zip(olds.split(), news.split(), strict=True))
    sides = [
        shapes_of(modules(dict(zip(names, shapes, strict=True)), is_torch=is_torch))
        for names, is_torch in ((goes, True), (goes.values(), False))
    ]
    draft = ta.draft_migration(*sides[:: -1 if is_back else 1])
    for path, targets in draft.pairs.items():
        old, new = (targets[0], path) if is_back else (path, targets[0])
        (old, kind), (new, its) = old.rsplit(".", 1), new.rsplit("/", 1)
        assert (goes[old], kind == "bias") == (new, its == "bias")
    assert len(draft.pairs) == 2 * len(goes)
    if name in ("three alike", "in a list"):
        assert len(draft.migration.rows) == 2
        assert "{p=0,2,4}" in draft.to_toml()
        assert "{p=0,1,2}" in draft.to_toml()


RENUMBERED = {
    f"net.{2 * n}.{kind}": f"net.{n}.{kind}"
    for n in range(3)
    for kind in ("weight", "bias")
}


def test_a_number_may_have_changed_under_its_name():
    source = modules({f"net.{n}": (8, 8) for n in (0, 2, 4)}, is_torch=True)
    target = modules({f"net.{n}": (8, 8) for n in (0, 1, 2)}, is_torch=True)
    stays = {f"a.{name}": shape for name, shape in source.items()}
    draft = ta.draft_migration(shapes_of(source | stays), shapes_of(target | stays))
    for path, targets in draft.pairs.items():
        right = path if path in stays else RENUMBERED[path]
        assert targets == (right,)


def test_prime_sizes_leave_one_order_of_axes():
    shapes = {
        f"layers.{i}.{name}.weight": np.zeros(shape)
        for i in range(3)
        for name, shape in {"gate": (13, 5), "up": (17, 5), "down": (5, 19)}.items()
    }
    target = {
        f"blocks/{name}/kernel": np.zeros(
            (3, *shapes[f"layers.0.{name}.weight"].shape[::-1])
        )
        for name in ("gate", "up", "down")
    }
    draft = ta.draft_migration(abstract(shapes), abstract(target))
    target = "blocks/{p}/kernel : l i o", {"check": "names"}
    assert draft.migration == ta.Migration(
        {"layers.{l}.{p=gate,up,down}.weight : o i": target}
    )


def test_a_users_own_words_are_added(tmp_path):
    file = tmp_path / "words.toml"
    file.write_text('version = 1\n[words]\nquery = ["suche"]\nkey = ["ziel"]\n')
    source = abstract(
        {"m.suche.weight": np.zeros((5, 7)), "m.ziel.weight": np.zeros((5, 7))}
    )
    target = abstract({"m/k/kernel": np.zeros((7, 5)), "m/q/kernel": np.zeros((7, 5))})
    draft = ta.draft_migration(source, target, synonyms=file)
    assert draft.pairs["m.suche.weight"] == ("m/q/kernel",)


@pytest.mark.parametrize("with_numbers", [True, False])
def test_the_summary_names_what_to_do_next(with_numbers):
    """With two functions, with answers, with another size: where it is of use."""
    source, target = heads_of_two_halves(4, 6)
    sides = (source, target) if with_numbers else (abstract(source), abstract(target))
    summary = ta.draft_migration(*sides).summary
    assert ("draft.check" in summary) == with_numbers
    for name in ("ta.match_models", "ta.find_wrong_rows"):
        assert (name in summary) == (not with_numbers)
    unlike = ta.draft_migration(abstract(source), shapes_of({"a": (5,)})).summary
    assert "ta.match_models" in unlike
    assert "find_wrong_rows" not in unlike


def test_what_a_function_computes_otherwise_is_not_said_to_be_another_model():
    source = float32({"a": np.zeros((5, 7)), "b": np.zeros(5)})
    draft = ta.draft_migration(source, convert=lambda w: {"k": np.tanh(w["a"])})
    assert "one model of one size" not in str(draft)
    assert "Most of what the function makes has no row" in str(draft)


@pytest.mark.parametrize("shape", [(15, 7), (23, 29), (5, 7)])
@pytest.mark.parametrize("factor", [3**-0.5, 5**-0.5, 11**-0.5, 1 / 3, 0.57])
def test_a_factor_is_found_at_any_shape(shape, factor):
    """Two calls with other numbers round it otherwise."""
    source = float32({"q": np.zeros(shape)})
    draft = ta.draft_migration(
        source, convert=lambda w: {"q": w["q"].T * np.float32(factor)}
    )
    assert not draft.missing
    made = draft.migration(source)["q"]
    np.testing.assert_allclose(made, source["q"].T * np.float32(factor), rtol=2e-7)


def test_models_that_are_not_one_are_said_to_be():
    source = abstract({f"a{i}.w": np.zeros((5, 7 + i)) for i in range(6)})
    target = abstract({f"z{i}/k": np.zeros((4, 30 + i)) for i in range(6)})
    draft = ta.draft_migration(source, target)
    assert not draft.pairs
    assert "do not look like one model of one size" in str(draft)


def test_other_numbers_on_both_sides_leave_it_to_names():
    shapes = {"mlp.w": np.zeros((5, 7)), "mlp.b": np.zeros(5)}
    target = {path.replace(".", "/"): leaf for path, leaf in shapes.items()}
    draft = ta.draft_migration(float32(shapes), float32(target, 1))
    assert "no numbers in common" in str(draft)
    assert draft.pairs == {"mlp.w": ("mlp/w",), "mlp.b": ("mlp/b",)}
    assert draft.doubtful == ("mlp.w", "mlp.b")


@pytest.mark.parametrize("with_values", [False, True])
def test_a_refactored_model_has_a_row_for_what_moved_and_one_for_the_rest(with_values):
    shapes = {
        f"layers/{i}/{name}": np.zeros(shape)
        for i in range(3)
        for name, shape in {"q": (5, 7), "k": (5, 7), "norm": (5,)}.items()
    }
    shapes |= {"head/kernel": np.zeros((5, 11)), "old/stat": np.zeros(13)}
    source: Any = float32(shapes) if with_values else abstract(shapes)
    target = {
        path.replace("head", "readout"): leaf
        for path, leaf in source.items()
        if path != "old/stat"
    }
    draft = ta.draft_migration(source, target)
    rows = [(row.text, row.targets[0].text) for row in draft.migration.rows]
    assert rows == [("head/kernel", "readout/kernel"), ("{rest:**}", "{rest}")]
    assert draft.unexpected == ("old/stat",)
    text = draft.to_toml()
    assert text.index('# drop = "old/stat"') < text.index("{rest:**}")


def test_an_array_that_is_turned_under_its_name_is_not_part_of_the_rest():
    source = float32({"x": np.zeros((3, 5)), "y": np.zeros((3, 4)), "z": np.zeros(7)})
    target = source | {"x": source["x"].T}
    draft = ta.draft_migration(source, target)
    moves_alike(draft.migration, source, target)


# --- the text ---


def test_the_text_is_a_migration_file(tmp_path):
    w = float32(abstract({"a.w": np.zeros((5, 7))}))
    target = {"a/k": w["a.w"].T, "new\nline": np.zeros(9, "f4")}
    draft = ta.draft_migration(w | {"b{x}*.1.y": np.zeros(3, "f4")}, target)
    text = draft.to_toml()
    (tmp_path / "t.toml").write_text(text)
    assert ta.load_migration(tmp_path / "t.toml") == draft.migration
    assert draft.missing == ("new\nline",)
    assert draft.unexpected == ("b{x}*.1.y",)
    commented = [line[2:] for line in text.splitlines() if line.startswith("# drop")]
    dropping = tomllib.loads("\n".join(commented))["drop"]
    assert ta.Migration({dropping: None}).rows[0].takes("b{x}*.1.y")


def test_what_is_not_a_pair_of_trees_is_refused():
    with pytest.raises(ta.MigrationError, match="Pass the target, or convert="):
        ta.draft_migration({"w": np.zeros(3)})
    with pytest.raises(ta.MigrationError, match="no array in the source"):
        ta.draft_migration({}, {"w": np.zeros(3)})
    for target in (some, np.ndarray):
        with pytest.raises(ta.MigrationError, match=r"The target is .*jax.eval_shape"):
            ta.draft_migration({"w": np.zeros(3)}, target)
    with pytest.raises(ta.CheckpointError):
        ta.draft_migration("nowhere.safetensors", {"w": np.zeros(3)})


def test_checkpoints_and_schemas_are_sides(tmp_path):
    leaves = float32(abstract({"h.0.w": np.zeros((5, 7)), "h.1.w": np.zeros((5, 7))}))
    new = {"w": np.stack([leaves["h.0.w"].T, leaves["h.1.w"].T])}
    rows = {"h.{l}.w : o i": "w : l i o"}
    marked = {"h.{l}.w : o i": ("w : l i o", {"check": "names"})}
    for suffix in ("safetensors", "schema.toml"):
        ta.save(tmp_path / f"old.{suffix}", leaves)
        ta.save(tmp_path / f"new.{suffix}", new)
        draft = ta.draft_migration(
            tmp_path / f"old.{suffix}", tmp_path / f"new.{suffix}"
        )
        table = marked if suffix == "schema.toml" else rows
        assert draft.migration == ta.Migration(table)


# --- the command ---


def test_the_command_writes_what_lint_reads(tmp_path):
    shapes = {f"h.{i}.fc.weight": np.zeros((5, 7)) for i in range(3)}
    ta.save(tmp_path / "a.schema.toml", abstract(shapes))
    ta.save(tmp_path / "b.schema.toml", abstract({"h/fc/kernel": np.zeros((3, 7, 5))}))
    pair = tmp_path / "a.schema.toml", tmp_path / "b.schema.toml"
    shown = invoke("draft", *pair)
    assert shown.exit_code == 0
    assert 'to = "h/fc/kernel : l i o"' in shown.output
    table = tmp_path / "t.toml"
    written = invoke("draft", *pair, "--output", table)
    assert written.exit_code == 0
    assert written.output.startswith("1 row: 1 to check.")
    assert table.read_text() == shown.output
    linted = invoke("lint", *pair, "--migration", table)
    assert linted.exit_code == 1
    assert "check: 'h.{l}.fc.weight : o i' -> 'h/fc/kernel : l i o': names" in (
        linted.output
    )
    ignoring = invoke("lint", *pair, "--migration", table, "--ignore", "check")
    assert ignoring.exit_code == 0
    assert invoke("draft", *pair, "--output", table).exit_code == 2
    assert invoke("draft", *pair, "--output", table, "--force").exit_code == 0


def test_the_command_reads_a_table_off_a_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old_script.py").write_text(
        "def convert(leaves):\n    return {'k': leaves['w'].T}\n\nsizes = 3\n"
    )
    ta.save(tmp_path / "a.schema.toml", abstract({"w": np.zeros((5, 7))}))
    shown = invoke("draft", "a.schema.toml", "--convert", "old_script:convert")
    assert shown.exit_code == 0
    assert 'from = "w : o i"\nto = "k : i o"' in shown.output
    for text, wording in {
        "old_script": "Write module:function",
        "old_script:sizes": "old_script:sizes is 3. Name a function",
        "old_script:gone": "old_script:gone is not there",
    }.items():
        refused = invoke("draft", "a.schema.toml", "--convert", text)
        assert refused.exit_code == 2
        assert wording in refused.output
    nothing = invoke("draft", "a.schema.toml")
    assert nothing.exit_code == 2
    assert "Name a TARGET, or --convert" in nothing.output


def test_the_command_refuses_what_it_cannot_read(tmp_path):
    ta.save(tmp_path / "a.schema.toml", abstract({"w": np.zeros(3)}))
    gone = invoke("draft", tmp_path / "a.schema.toml", tmp_path / "gone.safetensors")
    assert gone.exit_code == 2
    assert "There is no checkpoint" in gone.output


def test_diff_proposes_a_draft_of_what_was_renamed(tmp_path):
    ta.save(tmp_path / "a.schema.toml", abstract({"mlp/kernel": np.zeros(3)}))
    ta.save(tmp_path / "b.schema.toml", abstract({"mlp/kernels": np.zeros(3)}))
    found = invoke("diff", tmp_path / "a.schema.toml", tmp_path / "b.schema.toml")
    assert "note: treeadapt draft " in found.output


@pytest.mark.slow
def test_many_names_that_differ_in_words_are_paired_or_listed():
    rng = random.Random(0)
    names = [f"m{rng.randrange(10**9)}q.k{n % 7}.w" for n in range(300)]
    source = abstract({name: np.zeros(5 + n % 11) for n, name in enumerate(names)})
    target = {path.replace(".", "/"): leaf for path, leaf in source.items()}
    draft = ta.draft_migration(source, target)
    assert len(draft.pairs) + len(draft.unexpected) == len(source)


def test_names_with_too_many_candidates_are_said_to_be_left_out():
    shapes = {
        f"m{chr(97 + n // 26)}{chr(97 + n % 26)}.w": np.zeros(7) for n in range(250)
    }
    shapes["x.w"] = np.zeros(5)
    target = {path.replace(".", "/"): leaf for path, leaf in shapes.items()}
    draft = ta.draft_migration(abstract(shapes), abstract(target))
    assert draft.pairs == {"x.w": ("x/w",)}
    assert "250 leaves of the source not looked at" in str(draft)


def test_two_million_leaves_are_refused(monkeypatch):
    monkeypatch.setattr(inputs, "MAX_LEAVES", 2)
    leaves = abstract({f"w{n}": np.zeros(3) for n in range(3)})
    with pytest.raises(ta.MigrationError, match="2 leaves at most"):
        ta.draft_migration(leaves, leaves)


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_an_array_without_numbers_may_be_left_over(shape):
    kernel = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    old = {"w": kernel, "e": np.zeros(shape, "float32")}
    new = {"k": kernel.T, "z": np.ones(7, "float32")}
    for source, target in ((old, new), (new, old)):
        assert ta.draft_migration(source, target).migration
