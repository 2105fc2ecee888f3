"""Tables of ``docs/examples/migrations`` at the sizes of published models.

Names and shapes only: a plan reads no array, and none is made.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import decoders
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import vits
from flax import nnx
from llamas import EquinoxLlama, LinenLlama, NnxLlama, Sizes
from mutations import with_rows, without

import treeadapt as ta
from benchmarks.published_names import gemma3

MIGRATIONS = Path(__file__).parents[1] / "docs" / "examples" / "migrations"

LLAMAS = {
    "3.2 1B": Sizes(128_256, 2_048, 16, 32, 8, 64, 8_192, tied=True),
    "3.1 8B": Sizes(128_256, 4_096, 32, 32, 8, 128, 14_336),
    "3.1 405B": Sizes(128_256, 16_384, 126, 128, 8, 128, 53_248),
}
PARAMS = {"3.2 1B": 1_235_814_400, "3.1 8B": 8_030_261_248, "3.1 405B": 405_853_388_800}


def specs(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract arrays in the dtype of published files."""
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for name, shape in shapes.items()
    }


def half(tree: Any) -> Any:
    """The shapes of a model, in the dtype of published files."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), tree)


def llama(s: Sizes) -> dict[str, jax.ShapeDtypeStruct]:
    """The names and shapes of Llama as Hugging Face publishes it."""
    queries, keys = s.heads * s.head, s.kv_heads * s.head
    layer = {
        "input_layernorm": (s.width,),
        "mlp.down_proj": (s.width, s.hidden),
        "mlp.gate_proj": (s.hidden, s.width),
        "mlp.up_proj": (s.hidden, s.width),
        "post_attention_layernorm": (s.width,),
        "self_attn.k_proj": (keys, s.width),
        "self_attn.o_proj": (s.width, queries),
        "self_attn.q_proj": (queries, s.width),
        "self_attn.v_proj": (keys, s.width),
    }
    shapes = {"model.embed_tokens.weight": (s.words, s.width)}
    shapes |= {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(s.layers)
        for name, shape in layer.items()
    }
    shapes["model.norm.weight"] = (s.width,)
    return specs(shapes if s.tied else shapes | {"lm_head.weight": (s.words, s.width)})


def scanned_in_linen(s: Sizes):
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    return jax.eval_shape(LinenLlama(s).init, jax.random.key(0), tokens)["params"]


def scanned_in_nnx(s: Sizes):
    return nnx.eval_shape(lambda: NnxLlama(s, nnx.Rngs(0)))


def listed_in_equinox(s: Sizes):
    return eqx.filter_eval_shape(EquinoxLlama, s, jax.random.key(0))


#: A table, what makes its target, and the number of arrays for layers.
OWN = {
    "Linen": ("llama-scanned", scanned_in_linen, lambda layers: 9),
    "nnx": ("llama-scanned", scanned_in_nnx, lambda layers: 9),
    "Equinox": ("llama-equinox", listed_in_equinox, lambda layers: 8 * layers),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("size", "own"),
    [
        ("3.2 1B", "nnx"),
        *(("3.1 8B", name) for name in OWN),
        ("3.1 405B", "Linen"),
        ("3.1 405B", "nnx"),
    ],
)
def test_llama_becomes_a_model_of_ones_own(size, own, tmp_path):
    table, target_of, count = OWN[own]
    s = LLAMAS[size]
    file = MIGRATIONS / f"{table}.toml"
    m = without(file, "lm_head.weight", tmp_path) if s.tied else ta.load_migration(file)
    source, target = llama(s), half(target_of(s))
    plan = m.plan(source, target)
    assert plan.exact
    assert plan.one_way == plan.dropped == ()
    assert plan.result == ta.to_flat_dict(target)
    assert len(source) == 9 * s.layers + 3 - s.tied
    assert len(plan.result) == count(s.layers) + 3 - s.tied
    for leaves in (source, plan.result):
        assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == PARAMS[size]
    assert m.inverse(plan.result, source) == source


def layered(at: str, layers: int, shapes: Mapping[str, tuple[int, ...]]):
    """The shapes of all layers, of those of one."""
    return {
        f"{at}.{number}.{name}": shape
        for number in range(layers)
        for name, shape in shapes.items()
    }


def attention(s: decoders.Sizes) -> dict[str, tuple[int, ...]]:
    """Of one layer that gives queries and keys a norm."""
    return {
        "self_attn.q_proj.weight": (s.heads * s.head, s.width),
        "self_attn.k_proj.weight": (s.kv_heads * s.head, s.width),
        "self_attn.v_proj.weight": (s.kv_heads * s.head, s.width),
        "self_attn.o_proj.weight": (s.width, s.heads * s.head),
        "self_attn.q_norm.weight": (s.head,),
        "self_attn.k_norm.weight": (s.head,),
    }


def mlp(at: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (hidden, width),
        f"{at}.up_proj.weight": (hidden, width),
        f"{at}.down_proj.weight": (width, hidden),
    }


#: Gemma 3 27B: 62 layers, which are ten blocks of six and two more.
GEMMA3 = decoders.Sizes(
    262_208, 5_376, 62, 32, 16, 128, 21_504, 168**-0.5, window=1_024, image_tokens=256
)
TOWER = vits.Sizes(896, 14, 1_152, 27, 16, 4_304, epsilon=1e-6, exact=False)
#: Qwen3-30B-A3B: 48 layers of 128 experts.
QWEN3_MOE = decoders.Sizes(
    151_936, 2_048, 48, 32, 4, 128, 768, 128**-0.5, experts=128, chosen=8
)


def gemma3_27b() -> dict[str, jax.ShapeDtypeStruct]:
    """The names and shapes of Gemma 3 27B, its vision tower included."""
    s, image = GEMMA3, TOWER
    text, vision = "language_model.model", "vision_tower.vision_model"
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    layer = attention(s) | mlp("mlp", s.width, s.hidden)
    layer |= {f"{name}_layernorm.weight": (s.width,) for name in norms}
    kernels = {
        f"self_attn.{p}_proj": 2 * (image.width,) for p in ("q", "k", "v", "out")
    }
    kernels |= {
        "mlp.fc1": (image.hidden, image.width),
        "mlp.fc2": (image.width, image.hidden),
        "layer_norm1": (image.width,),
        "layer_norm2": (image.width,),
    }
    block = {f"{name}.weight": shape for name, shape in kernels.items()}
    block |= {f"{name}.bias": shape[:1] for name, shape in kernels.items()}
    shapes = {
        f"{text}.embed_tokens.weight": (s.words, s.width),
        f"{text}.norm.weight": (s.width,),
        "multi_modal_projector.mm_input_projection_weight": (image.width, s.width),
        "multi_modal_projector.mm_soft_emb_norm.weight": (image.width,),
        f"{vision}.embeddings.patch_embedding.weight": (
            *(image.width, 3),
            *(image.patch, image.patch),
        ),
        f"{vision}.embeddings.patch_embedding.bias": (image.width,),
        f"{vision}.embeddings.position_embedding.weight": (image.patches, image.width),
        f"{vision}.post_layernorm.weight": (image.width,),
        f"{vision}.post_layernorm.bias": (image.width,),
    }
    shapes |= layered(f"{text}.layers", s.layers, layer)
    return specs(shapes | layered(f"{vision}.encoder.layers", image.layers, block))


def qwen3_moe_30b() -> dict[str, jax.ShapeDtypeStruct]:
    """The names and shapes of Qwen3-30B-A3B."""
    s = QWEN3_MOE
    layer = attention(s) | {
        "input_layernorm.weight": (s.width,),
        "post_attention_layernorm.weight": (s.width,),
        "mlp.gate.weight": (s.experts, s.width),
    }
    for number in range(s.experts):
        layer |= mlp(f"mlp.experts.{number}", s.width, s.hidden)
    shapes = {
        "model.embed_tokens.weight": (s.words, s.width),
        "model.norm.weight": (s.width,),
        "lm_head.weight": (s.words, s.width),
    }
    return specs(shapes | layered("model.layers", s.layers, layer))


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_gemma3_27b_becomes_ten_blocks_of_six_layers_and_two_more(tmp_path):
    file = MIGRATIONS / "gemma3-scanned.toml"
    m, source = ta.load_migration(file), gemma3_27b()
    assert set(source) == {name.replace("/", ".") for name in gemma3()}
    target = half(nnx.eval_shape(lambda: decoders.Gemma3(GEMMA3, TOWER, nnx.Rngs(0))))
    plan = m.plan(source, target)
    assert plan.one_way == plan.dropped == ()
    assert plan.result == ta.to_flat_dict(target)
    assert (len(source), len(plan.result)) == (1_247, 116)
    for leaves in (source, plan.result):
        assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == 27_432_406_640
    assert m.inverse(plan.result) == source

    # All but the norms comes back exactly.
    rows = tomllib.loads(file.read_text())["rows"]
    without_offset = [{k: v for k, v in row.items() if k != "offset"} for row in rows]
    assert not plan.exact
    assert with_rows(file, without_offset, tmp_path).plan(source, target).exact

    # As the file says of norms in float32.
    cast = {"cast": ["bfloat16", "float32"]}
    wide = [row | cast if "offset" in row else row for row in rows]
    m = with_rows(file, wide, tmp_path)
    sums = {
        path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        for path, leaf in plan.result.items()
        if "norm" in path and not path.startswith("tower")
    }
    plan = m.plan(source, plan.result | sums)
    assert m.inverse(plan.result) == source


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_18432_expert_kernels_become_3_arrays():
    m, source = (
        ta.load_migration(MIGRATIONS / "qwen3-moe-scanned.toml"),
        qwen3_moe_30b(),
    )
    target = half(nnx.eval_shape(lambda: decoders.Qwen3Moe(QWEN3_MOE, nnx.Rngs(0))))
    plan = m.plan(source, target)
    assert plan.exact
    assert plan.one_way == plan.dropped == ()
    assert plan.result == ta.to_flat_dict(target)
    assert (len(source), len(plan.result)) == (18_867, 15)
    assert sum("experts" in name for name in source) == 18_432
    assert sum("experts" in name for name in plan.result) == 3
    experts = 2 * math.prod(plan.result["blocks/experts/gate"].shape)
    assert experts <= plan.peak_bytes <= 2 * experts
    for leaves in (source, plan.result):
        assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == 30_532_122_624
    assert m.inverse(plan.result) == source
