"""Tables of ``docs/examples/migrations`` at the sizes of published models.

Names and shapes only: a plan reads no array, and none is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from llamas import EquinoxLlama, LinenLlama, NnxLlama, Sizes
from mutations import without

import treeadapt as ta

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
