"""The parameter names of three published models, generated from layers and modules.

Each generator yields the tensor names as their publishers wrote them, with ``/`` for
``.``. ``CHECKS`` holds the number of names and the SHA-256 of the sorted names, joined
by newlines, with ``.`` again, as once compared with the published files.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


def _weights(prefix: str, modules: str) -> Iterator[str]:
    return (f"{prefix}/{module}/weight" for module in modules.split())


def gemma3() -> Iterator[str]:
    """A language tower of 62 layers and a vision tower of 27."""
    text, vision = "language_model/model", "vision_tower/vision_model"
    layer = (
        "input_layernorm post_attention_layernorm pre_feedforward_layernorm "
        "post_feedforward_layernorm mlp/down_proj mlp/gate_proj mlp/up_proj "
        "self_attn/k_norm self_attn/k_proj self_attn/o_proj self_attn/q_norm "
        "self_attn/q_proj self_attn/v_proj"
    )
    yield from _weights(text, "embed_tokens norm")
    for number in range(62):
        yield from _weights(f"{text}/layers/{number}", layer)
    yield "multi_modal_projector/mm_input_projection_weight"
    yield "multi_modal_projector/mm_soft_emb_norm/weight"
    yield f"{vision}/embeddings/position_embedding/weight"
    for module in ("embeddings/patch_embedding", "post_layernorm"):
        yield from (f"{vision}/{module}/{kind}" for kind in ("weight", "bias"))
    block = (
        "layer_norm1 layer_norm2 mlp/fc1 mlp/fc2 self_attn/k_proj self_attn/out_proj "
        "self_attn/q_proj self_attn/v_proj"
    )
    for number in range(27):
        for name in _weights(f"{vision}/encoder/layers/{number}", block):
            yield from (name, name.removesuffix("weight") + "bias")


def mixtral() -> Iterator[str]:
    """56 layers of 8 experts each."""
    layer = (
        "block_sparse_moe/gate input_layernorm post_attention_layernorm "
        "self_attn/k_proj self_attn/o_proj self_attn/q_proj self_attn/v_proj"
    )
    yield "lm_head/weight"
    yield from _weights("model", "embed_tokens norm")
    for number in range(56):
        yield from _weights(f"model/layers/{number}", layer)
        for expert in range(8):
            prefix = f"model/layers/{number}/block_sparse_moe/experts/{expert}"
            yield from _weights(prefix, "w1 w2 w3")


def qwen3_moe() -> Iterator[str]:
    """40 layers of 180 experts each; attention is linear in three of four layers."""
    root = "model/language_model"
    layer = (
        "input_layernorm post_attention_layernorm mlp/gate mlp/shared_expert_gate "
        "mlp/shared_expert/down_proj mlp/shared_expert/gate_proj "
        "mlp/shared_expert/up_proj"
    )
    linear = "conv1d in_proj_a in_proj_b in_proj_qkv in_proj_z norm out_proj"
    full = "k_norm k_proj o_proj q_norm q_proj v_proj"
    yield "lm_head/weight"
    yield from _weights(root, "embed_tokens norm")
    for number in range(40):
        prefix = f"{root}/layers/{number}"
        yield from _weights(prefix, layer)
        for expert in range(180):
            yield from _weights(
                f"{prefix}/mlp/experts/{expert}", "down_proj gate_proj up_proj"
            )
        if number % 4 == 3:
            yield from _weights(f"{prefix}/self_attn", full)
        else:
            yield from _weights(f"{prefix}/linear_attn", linear)
            yield f"{prefix}/linear_attn/A_log"
            yield f"{prefix}/linear_attn/dt_bias"


MODELS = {"gemma3": gemma3, "mixtral": mixtral, "qwen3_moe": qwen3_moe}

CHECKS = {
    "gemma3": (
        1_247,
        "2a0c27271444eec945ce9c781c65f575569757bfbe04b86d81c3b23e70363122",
    ),
    "mixtral": (
        1_739,
        "4d6ee2d89adb5606788e51676f266765e10db4e0a0698d02cd6d3828d318f569",
    ),
    "qwen3_moe": (
        22_213,
        "e92500ffc7b583ee1223b88b387f095e2cfc8905f7e022751bf50dbad40d7534",
    ),
}


def digest(names: Iterable[str]) -> str:
    """Return the SHA-256 of the sorted names as published."""
    text = "\n".join(sorted(name.replace("/", ".") for name in names))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def names_of(model: str) -> tuple[str, ...]:
    """Return the paths of a model, in the order of its tree's leaves."""
    return tuple(sorted(MODELS[model](), key=lambda name: name.split("/")))


@functools.cache
def tree_of(model: str) -> dict[str, Any]:
    """Return the model as nested dicts of abstract arrays."""
    tree: dict[str, Any] = {}
    for name in names_of(model):
        *above, last = name.split("/")
        node = tree
        for segment in above:
            node = node.setdefault(segment, {})
        rank = 1 if "norm" in name or last in ("bias", "A_log", "dt_bias") else 2
        node[last] = jax.ShapeDtypeStruct((8,) * rank, jnp.bfloat16)
    return tree
