"""Products of sources, and models published in FP8 with a scale for each block.

Names and shapes at published size, on shapes alone; values at a tiny size, against the
formula of the conversion script that DeepSeek publishes next to the weights: each scale
times its block of 128 by 128 numbers, in float32, rounded to bfloat16.

Names, shapes and dtypes are facts from public text. Of DeepSeek-V3: README_WEIGHTS.md
(blocks, float32 scales, layer 61, 671B), a list of the headers of its files (shapes of
weights and scales, 684.53B numbers in all), transformers#42580 and vllm#23640 (the
router's bias is float32). Of Qwen 3: modular#7142 (1.7B: 196 scales, all bfloat16, that
of ``mlp.down_proj`` is 16 by 48) and HabanaAI/vllm-fork#2141 (32B: bfloat16). Others
have scales of another dtype (lmdeploy#4276), so the table takes any.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sizes import slow_but

import treeadapt as ta

#: Rows that multiply, for files that are read as they are stored.
MIGRATIONS = Path(__file__).with_name("multiplied")
#: Rows of the same for what is decoded.
DECODED = Path(__file__).parents[1] / "docs" / "examples" / "migrations"
BLOCK = 128
FP8 = ml_dtypes.float8_e4m3fn

Specs = dict[str, jax.ShapeDtypeStruct]


def plain(name: str, *shape: int, dtype: Any = jnp.bfloat16) -> Specs:
    return {name: jax.ShapeDtypeStruct(shape, dtype)}


def quantised(name: str, rows: int, columns: int, scale: Any) -> Specs:
    """A weight, and the scales of its blocks."""
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    return plain(f"{name}.weight", rows, columns, dtype=FP8) | plain(
        f"{name}.weight_scale_inv", *blocks, dtype=scale
    )


@dataclasses.dataclass(frozen=True)
class DeepSeek:
    """Sizes of DeepSeek-V3; by default those that it has."""

    words: int = 129_280
    width: int = 7_168
    dense: int = 3
    sparse: int = 58
    heads: int = 128
    plain_head: int = 128
    rotary: int = 64
    value: int = 128
    query_rank: int = 1_536
    rank: int = 512
    hidden: int = 18_432
    expert: int = 2_048
    experts: int = 256

    def mlp(self, at: str, hidden: int) -> Specs:
        return (
            quantised(f"{at}.gate_proj", hidden, self.width, jnp.float32)
            | quantised(f"{at}.up_proj", hidden, self.width, jnp.float32)
            | quantised(f"{at}.down_proj", self.width, hidden, jnp.float32)
        )

    def attention(self, at: str) -> Specs:
        head = self.plain_head + self.rotary
        both = self.plain_head + self.value
        shapes = {
            "q_a_proj": (self.query_rank, self.width),
            "q_b_proj": (self.heads * head, self.query_rank),
            "kv_a_proj_with_mqa": (self.rank + self.rotary, self.width),
            "kv_b_proj": (self.heads * both, self.rank),
            "o_proj": (self.width, self.heads * self.value),
        }
        leaves = plain(f"{at}.q_a_layernorm.weight", self.query_rank)
        leaves |= plain(f"{at}.kv_a_layernorm.weight", self.rank)
        for name, shape in shapes.items():
            leaves |= quantised(f"{at}.{name}", *shape, jnp.float32)
        return leaves

    def source(self) -> Specs:
        leaves = plain("model.embed_tokens.weight", self.words, self.width)
        for number in range(self.dense + self.sparse):
            at = f"model.layers.{number}"
            leaves |= self.attention(f"{at}.self_attn")
            for name in ("input", "post_attention"):
                leaves |= plain(f"{at}.{name}_layernorm.weight", self.width)
            if number < self.dense:
                leaves |= self.mlp(f"{at}.mlp", self.hidden)
                continue
            leaves |= plain(f"{at}.mlp.gate.weight", self.experts, self.width)
            bias = f"{at}.mlp.gate.e_score_correction_bias"
            leaves |= plain(bias, self.experts, dtype=jnp.float32)
            leaves |= self.mlp(f"{at}.mlp.shared_experts", self.expert)
            for expert in range(self.experts):
                leaves |= self.mlp(f"{at}.mlp.experts.{expert}", self.expert)
        leaves |= plain("model.norm.weight", self.width)
        return leaves | plain("lm_head.weight", self.words, self.width)

    def next_token(self) -> Specs:
        """Layer 61, which has an embedding and a head of its own in the files."""
        at, width = f"model.layers.{self.dense + self.sparse}", self.width
        number = self.dense + self.sparse - 1
        last = f"model.layers.{number}."
        leaves = {
            f"{at}.{name.removeprefix(last)}": leaf
            for name, leaf in self.source().items()
            if name.startswith(last)
        }
        for name in ("enorm", "hnorm", "shared_head.norm"):
            leaves |= plain(f"{at}.{name}.weight", width)
        leaves |= plain(f"{at}.eh_proj.weight", width, 2 * width)
        for name in ("embed_tokens", "shared_head.head"):
            leaves |= plain(f"{at}.{name}.weight", self.words, width)
        return leaves

    def target(self) -> Specs:
        width, query = self.width, self.heads * (self.plain_head + self.rotary)
        both = self.heads * (self.plain_head + self.value)
        leaves = plain("embed/embedding", self.words, width)
        for name, layers in (("dense", self.dense), ("moe", self.sparse)):
            for path, *shape in (
                ("attention/q_a/kernel", width, self.query_rank),
                ("attention/q_b/kernel", self.query_rank, query),
                ("attention/kv_a/kernel", width, self.rank + self.rotary),
                ("attention/kv_b/kernel", self.rank, both),
                ("attention/out/kernel", self.heads * self.value, width),
                ("attention/q_a_norm/scale", self.query_rank),
                ("attention/kv_a_norm/scale", self.rank),
                ("attention_norm/scale", width),
                ("mlp_norm/scale", width),
            ):
                leaves |= plain(f"{name}/{path}", layers, *shape)
        for at, lead, hidden in (
            ("dense/mlp", (self.dense,), self.hidden),
            ("moe/shared", (self.sparse,), self.expert),
            ("moe/experts", (self.experts, self.sparse), self.expert),
        ):
            leaves |= plain(f"{at}/gate/kernel", *lead, width, hidden)
            leaves |= plain(f"{at}/up/kernel", *lead, width, hidden)
            leaves |= plain(f"{at}/down/kernel", *lead, hidden, width)
        leaves |= plain("moe/router/kernel", self.sparse, width, self.experts)
        bias = (self.sparse, self.experts)
        leaves |= plain("moe/router/bias", *bias, dtype=jnp.float32)
        leaves |= plain("norm/scale", width)
        return leaves | plain("head/kernel", width, self.words)


@dataclasses.dataclass(frozen=True)
class Qwen3:
    """Sizes of Qwen3-8B-FP8; by default those that it has."""

    words: int = 151_936
    width: int = 4_096
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 12_288

    def source(self) -> Specs:
        leaves = plain("model.embed_tokens.weight", self.words, self.width)
        for number in range(self.layers):
            at = f"model.layers.{number}"
            for name, *shape in (
                ("self_attn.q_proj", self.heads * BLOCK, self.width),
                ("self_attn.k_proj", self.kv_heads * BLOCK, self.width),
                ("self_attn.v_proj", self.kv_heads * BLOCK, self.width),
                ("self_attn.o_proj", self.width, self.heads * BLOCK),
                ("mlp.gate_proj", self.hidden, self.width),
                ("mlp.up_proj", self.hidden, self.width),
                ("mlp.down_proj", self.width, self.hidden),
            ):
                leaves |= quantised(f"{at}.{name}", *shape, jnp.bfloat16)
            for name in ("q", "k"):
                leaves |= plain(f"{at}.self_attn.{name}_norm.weight", BLOCK)
            for name in ("input", "post_attention"):
                leaves |= plain(f"{at}.{name}_layernorm.weight", self.width)
        leaves |= plain("model.norm.weight", self.width)
        return leaves | plain("lm_head.weight", self.words, self.width)

    def target(self) -> Specs:
        leaves = plain("embed/embedding", self.words, self.width)
        for path, *shape in (
            ("attention/query/kernel", self.width, self.heads, BLOCK),
            ("attention/key/kernel", self.width, self.kv_heads, BLOCK),
            ("attention/value/kernel", self.width, self.kv_heads, BLOCK),
            ("attention/out/kernel", self.heads, BLOCK, self.width),
            ("attention/query_norm/scale", BLOCK),
            ("attention/key_norm/scale", BLOCK),
            ("attention_norm/scale", self.width),
            ("mlp_norm/scale", self.width),
            ("mlp/gate/kernel", self.width, self.hidden),
            ("mlp/up/kernel", self.width, self.hidden),
            ("mlp/down/kernel", self.hidden, self.width),
        ):
            leaves |= plain(f"blocks/{path}", self.layers, *shape)
        leaves |= plain("norm/scale", self.width)
        return leaves | plain("head/kernel", self.width, self.words)


#: Sizes that blocks of 128 do not divide, where the published ones are not divided.
TINY = {
    "deepseek-v3-fp8": DeepSeek(37, 150, 3, 2, 2, 70, 11, 66, 131, 129, 140, 139, 3),
    "qwen3-fp8": Qwen3(37, 150, 3, 2, 1, 140),
}
#: Parameters without scales, as the publishers count them.
PUBLISHED = {
    "deepseek-v3-fp8": (DeepSeek(), 671_026_419_200, 32),
    "qwen3-fp8": (Qwen3(), 8_190_735_360, 14),
}


def numbers_of(leaves: Specs) -> int:
    return sum(
        math.prod(leaf.shape)
        for name, leaf in leaves.items()
        if not name.endswith("weight_scale_inv")
    )


each_model = pytest.mark.parametrize("name", slow_but(["qwen3-fp8"], TINY))


@each_model
def test_a_table_reads_the_published_names_and_shapes(name):
    sizes, count, arrays = PUBLISHED[name]
    source, target = sizes.source(), sizes.target()
    m = ta.load_migration(MIGRATIONS / f"{name}-scanned.toml")
    plan = m.plan(source, target)
    assert plan.result == target
    assert len(target) == arrays
    assert plan.dropped == ()
    assert numbers_of(source) == numbers_of(target) == count
    made = {path for path in target if "kernel" in path} - {"head/kernel"}
    assert {*plan.one_way} == made - {"moe/router/kernel"}
    with pytest.raises(ta.MigrationError, match="cannot be read backwards"):
        _ = m.inverse


def test_a_layer_that_predicts_one_more_token_is_dropped():
    m = ta.load_migration(MIGRATIONS / "deepseek-v3-fp8-scanned.toml")
    sizes = TINY["deepseek-v3-fp8"]
    more = {
        name.replace("layers.5.", "layers.61."): leaf
        for name, leaf in sizes.next_token().items()
    }
    plan = m.plan(sizes.source() | more, sizes.target())
    assert {*plan.dropped} == {*more}


@pytest.mark.slow
def test_all_numbers_of_the_files_are_as_many_as_published():
    leaves = DeepSeek().source() | DeepSeek().next_token()
    total = sum(math.prod(leaf.shape) for leaf in leaves.values())
    assert round(total / 1e9, 2) == 684.53
    small = Qwen3(width=2_048, layers=28, heads=16, hidden=6_144).source()
    scales = {k: v.shape for k, v in small.items() if k.endswith("weight_scale_inv")}
    assert len(scales) == 196
    assert scales["model.layers.0.mlp.down_proj.weight_scale_inv"] == (16, 48)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_scales_may_have_any_dtype(dtype):
    sizes = TINY["qwen3-fp8"]
    leaves = {
        name: leaf.update(dtype=dtype) if name.endswith("_scale_inv") else leaf
        for name, leaf in sizes.source().items()
    }
    m = ta.load_migration(MIGRATIONS / "qwen3-fp8-scanned.toml")
    assert m.plan(leaves, sizes.target()).result == sizes.target()


def random_leaves(specs: Specs) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)
        for name, leaf in specs.items()
    }


def dequantised(leaves: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The formula: a scale for each block, in float32, rounded to bfloat16."""
    weight = leaves[f"{name}.weight"].astype(np.float32)
    scales = leaves[f"{name}.weight_scale_inv"].astype(np.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = np.s_[
                row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK
            ]
            weight[block] *= scales[row, column]
    return weight.astype(ml_dtypes.bfloat16)


def expected(name: str, leaves: dict[str, np.ndarray], path: str) -> np.ndarray:
    """One array of a target, by formulas of NumPy."""
    s: Any = TINY[name]
    kind = path.split("/")[-2]

    def stack(numbers: Any, weight: str) -> np.ndarray:
        every = [dequantised(leaves, f"model.layers.{n}.{weight}").T for n in numbers]
        return np.stack(every)

    if name == "qwen3-fp8":
        words = {"query": "q", "key": "k", "value": "v", "out": "o"}
        if "mlp/" in path:
            return stack(range(s.layers), f"mlp.{kind}_proj")
        whole = stack(range(s.layers), f"self_attn.{words[kind]}_proj")
        heads = (-1, BLOCK)
        if kind == "out":
            return whole.reshape(s.layers, *heads, s.width)
        return whole.reshape(s.layers, s.width, *heads)
    layers = range(3) if path.startswith("dense") else range(3, 5)
    words = {"kv_a": "kv_a_proj_with_mqa", "out": "o_proj"}
    if "attention/" in path:
        return stack(layers, f"self_attn.{words.get(kind, f'{kind}_proj')}")
    if "experts" in path:
        every = [stack(layers, f"mlp.experts.{x}.{kind}_proj") for x in range(3)]
        return np.stack(every)
    middle = "shared_experts." if "shared" in path else ""
    return stack(layers, f"mlp.{middle}{kind}_proj")


@pytest.mark.slow
@each_model
def test_values_are_those_of_the_formula(name, tmp_path):
    sizes = TINY[name]
    leaves, target = random_leaves(sizes.source()), sizes.target()
    schema = MIGRATIONS / f"{name}.schema.toml"
    assert ta.read_metadata(schema) == sizes.source()
    m = ta.load_migration(MIGRATIONS / f"{name}-scanned.toml")
    ta.save(tmp_path / "published", leaves, max_shard_bytes=400_000)
    mesh = jax.make_mesh((2,), ("x",))

    def spread(path: str, leaf: Any) -> Any:
        axis = next((i for i, n in enumerate(leaf.shape) if n % 2 == 0), None)
        spec = P() if axis is None else P(*[None] * axis, "x")
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    on_mesh = {path: spread(path, leaf) for path, leaf in target.items()}
    results = {
        "numpy": m(leaves, target),
        "jax": m(jax.tree.map(jnp.asarray, leaves), target),
        "file": ta.load(tmp_path / "published", target, migration=m),
        "shards": ta.load(tmp_path / "published", on_mesh, migration=m),
    }
    quantised_paths = {*m.plan(leaves, target).one_way}
    for kind, result in results.items():
        for path, like in target.items():
            leaf = np.asarray(result[path])
            assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype), path
            if path in quantised_paths:
                wanted = expected(name, leaves, path)
                np.testing.assert_array_equal(leaf, wanted, err_msg=f"{kind} {path}")
        assert kind != "shards" or all(
            result[path].sharding == on_mesh[path].sharding for path in on_mesh
        )


@pytest.mark.slow
@each_model
def test_rows_of_decoded_leaves_make_the_same_and_have_a_way_back(name, tmp_path):
    """Those of ``docs/examples``; a way back gives what the codes and scales mean."""
    sizes, model = TINY[name], name.removesuffix("-fp8")
    leaves, folder = random_leaves(sizes.source()), tmp_path / "published"
    ta.save(folder, leaves, max_shard_bytes=400_000)
    stated = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    config = {"dtype": "bfloat16", "quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config))
    m = ta.load_migration(DECODED / f"{model}-scanned.toml")
    loaded = ta.to_flat_dict(ta.load(folder, sizes.target(), migration=m))
    by_rows = ta.load_migration(MIGRATIONS / f"{name}-scanned.toml")
    assert not ta.tree_diff(loaded, by_rows(leaves, sizes.target()), values=True)
    assert not ta.tree_diff(m.inverse(loaded), ta.load(folder), values=True)
    assert ta.read_metadata(DECODED / f"{model}.schema.toml") == ta.read_metadata(
        folder
    )


def test_a_device_reads_the_blocks_that_it_needs():
    """Where shards are whole blocks, nothing is read that they do not need."""
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), P(None, None, "x"))
    m = ta.load_migration(MIGRATIONS / "qwen3-fp8-scanned.toml")
    sizes = Qwen3()
    target = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if path.startswith("blocks/mlp/")
        else leaf
        for path, leaf in sizes.target().items()
    }
    assert m.plan(sizes.source(), target).gathered == ()


# --- products in general; see test_migration_properties for the law ---


def test_factors_may_share_any_axes():
    m = ta.Migration({("u : a", "v : b", "w : b c"): ("k : c a b", {"multiply": True})})
    leaves = {"u": np.arange(2.0), "v": np.arange(3.0), "w": np.ones((3, 4))}
    wanted = np.einsum("a,b,bc->cab", *leaves.values())
    moved = m(leaves)["k"]
    np.testing.assert_array_equal(moved, wanted, strict=True)
    np.testing.assert_array_equal(jax.jit(m)(leaves)["k"], wanted)


def test_a_product_that_overflows_is_an_error_and_nan_is_not():
    m = ta.Migration({("w : a", "s : "): ("k : a", {"multiply": True})})
    for kind in (np.asarray, jnp.asarray):
        big = {"w": kind(np.float32([1e30, 1])), "s": kind(np.float32(1e30))}
        with pytest.raises(ta.MigrationError, match="values do not fit"):
            m(big)
        nan = {"w": kind(np.float32([np.nan, 1])), "s": kind(np.float32(2))}
        np.testing.assert_array_equal(m(nan)["k"], [np.nan, 2])


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"w : a": ("k : a", {"multiply": True})}, "several sources and one target"),
        ({("w : a", "s : "): ("k : a", {"multiply": False})}, "multiply is not True"),
        ({("w", "s"): ("k", {"multiply": True})}, "it multiplies and has no axes"),
        ({("w : a", "s : b"): ("k : a", {"multiply": True})}, "'b' is not on both"),
        ({("w : a", "s : a"): ("k : a b", {"multiply": True})}, "'b' is not on both"),
        ({("w : ...", "s : ..."): ("k : ...", {"multiply": True})}, "Name each axis"),
        (
            {("w : a", "s : a"): ("k : a", {"undo": {"multiply": True}})},
            "multiply is not True",
        ),
        (
            {("w : a", "s : "): ("k : a r", {"multiply": True, "repeat": {"r": 2}})},
            "'r' is not on both sides",
        ),
    ],
)
def test_a_product_that_makes_no_sense_is_refused(row, text):
    with pytest.raises(ta.MigrationError) as caught:
        ta.Migration(row)
    assert text in str(caught.value)


def test_factors_that_do_not_go_together_are_an_error():
    options = {"multiply": True, "sizes": {"i": 4}}
    m = ta.Migration({("w : (a i)", "s : a"): ("k : (a i)", options)})
    assert m({"w": np.ones(10), "s": np.ones(3)})["k"].shape == (10,)
    with pytest.raises(ta.MigrationError, match="axis 0 of 's' has size 2, and a has"):
        m({"w": np.ones(10), "s": np.ones(2)})
    with pytest.raises(ta.MigrationError, match="'w' is bool, which is not a factor"):
        m({"w": np.ones(12, bool), "s": np.ones(3)})
    # An axis that only the product has is not one of blocks.
    parts = ta.Migration({("w : a", "s : i"): ("k : (a i)", options)})
    assert parts({"w": np.ones(3), "s": np.ones(4)})["k"].shape == (12,)
    # A last block is short only where the target has the axis whole.
    cut = ta.Migration({("w : (a i)", "s : a"): ("k : a i", options)})
    with pytest.raises(ta.MigrationError, match="axis 0 of 'w' has size 10"):
        cut({"w": np.ones(10), "s": np.ones(3)})


@pytest.mark.usefixtures("standard_promotion")
def test_moments_of_a_product_start_fresh():
    m = ta.Migration({("w : a b", "s : a"): ("k : b a", {"multiply": True})})
    params = {"w": jnp.ones((2, 3)), "s": jnp.ones(2)}
    tx = optax.adam(1e-2)
    _, report = ta.carry_state(tx, m(params), tx.init(params), migration=m)
    assert {*report.fresh} >= {"0/mu/k", "0/nu/k"}
    assert "its row multiplies" in str(report)
    run = {"params": params, "opt_state": tx.init(params)}
    row = {("{t:**}/w : a b", "{t:**}/s : a"): ("{t}/k : b a", {"multiply": True})}
    with pytest.raises(ta.MigrationError, match=r"carry_state\("):
        ta.Migration(row | {"{rest:**}": "{rest}"})(run)
