"""What openpi's own script makes of the params of a tiny pi0 and pi0.5, both ways.

openpi is not in a package index, so the formulas of its script from JAX to PyTorch,
``convert_jax_model_to_pytorch.py`` of September 2025, are here in NumPy. They lead from
params to weights; ``convert`` turns them around, and holds what it makes to them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))
from common import digest, report, report_uncalled, weights_of

Arrays = dict[str, np.ndarray]
MODELS = ("pi0", "pi05")
#: Of each model two: width, layers, and width of an MLP, of the tower for images, the
#: language model and the expert; size of a head; words; actions. Heads are always 16 of
#: the tower, and 8 of the two others, whose head is a share of the language model.
SIZES = (
    {"image": (32, 2, 19), "text": (24, 3, 34), "expert": (10, 3, 22), "head": 3}
    | {"words": 37, "actions": 7, "patch": 2, "places": 9},
    {"image": (48, 3, 17), "text": (32, 2, 26), "expert": (14, 2, 18), "head": 4}
    | {"words": 41, "actions": 5, "patch": 3, "places": 4},
)
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
TEXT = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
PROJECTIONS = {
    "pi0": ("state_proj", "action_in_proj", "action_out_proj")
    + ("action_time_mlp_in", "action_time_mlp_out"),
    "pi05": ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"),
}


def params(model_type: str, number: int) -> Arrays:
    """Return params of the nnx model; no two of their numbers are equal."""
    sizes = SIZES[number]
    e, layers, f = sizes["image"]
    block = "img/Transformer/encoderblock"
    attention = f"{block}/MultiHeadDotProductAttention_0"
    shapes: dict[str, tuple[int, ...]] = {
        "img/embedding/kernel": (sizes["patch"], sizes["patch"], 3, e),
        "img/embedding/bias": (e,),
        "img/pos_embedding": (1, sizes["places"], e),
        "img/Transformer/encoder_norm/scale": (e,),
        "img/Transformer/encoder_norm/bias": (e,),
        f"{block}/MlpBlock_0/Dense_0/kernel": (layers, e, f),
        f"{block}/MlpBlock_0/Dense_0/bias": (layers, f),
        f"{block}/MlpBlock_0/Dense_1/kernel": (layers, f, e),
        f"{block}/MlpBlock_0/Dense_1/bias": (layers, e),
        f"{attention}/out/kernel": (layers, 16, e // 16, e),
        f"{attention}/out/bias": (layers, e),
        "img/head/kernel": (e, sizes["text"][0]),
        "img/head/bias": (sizes["text"][0],),
        "llm/embedder/input_embedding": (sizes["words"], sizes["text"][0]),
    }
    for norm in ("LayerNorm_0", "LayerNorm_1"):
        shapes |= {f"{block}/{norm}/{k}": (layers, e) for k in ("scale", "bias")}
    for name in ("query", "key", "value"):
        shapes[f"{attention}/{name}/kernel"] = (layers, e, 16, e // 16)
        shapes[f"{attention}/{name}/bias"] = (layers, 16, e // 16)
    for of, end in (("text", ""), ("expert", "_1")):
        (d, depth, hidden), head = sizes[of], sizes["head"]
        is_adaptive = model_type == "pi05" and end
        shapes |= {
            f"llm/layers/attn/q_einsum{end}/w": (depth, 8, d, head),
            f"llm/layers/attn/kv_einsum{end}/w": (depth, 2, 1, d, head),
            f"llm/layers/attn/attn_vec_einsum{end}/w": (depth, 8, head, d),
            f"llm/layers/mlp{end}/gating_einsum": (depth, 2, d, hidden),
            f"llm/layers/mlp{end}/linear": (depth, hidden, d),
        }
        for name, stack in (
            ("layers/pre_attention_norm", (depth,)),
            ("layers/pre_ffw_norm", (depth,)),
            ("final_norm", ()),
        ):
            at = f"llm/{name}{end}"
            if is_adaptive:
                shapes[f"{at}/Dense_0/kernel"] = (*stack, d, 3 * d)
                shapes[f"{at}/Dense_0/bias"] = (*stack, 3 * d)
            else:
                shapes[f"{at}/scale"] = (*stack, d)
    shapes = {f"PaliGemma/{name}": shape for name, shape in shapes.items()}
    width, actions = sizes["expert"][0], sizes["actions"]
    from_actions = ("state_proj", "action_in_proj")
    for name in PROJECTIONS[model_type]:
        i = actions if name in from_actions else width
        i *= 2 if name == "action_time_mlp_in" else 1
        o = actions if name == "action_out_proj" else width
        shapes |= {f"{name}/kernel": (i, o), f"{name}/bias": (o,)}
    arrays, start = {}, 1
    for name, shape in sorted(shapes.items()):
        stop = start + int(np.prod(shape))
        arrays[name] = (np.arange(start, stop) / 2**10).astype("f4").reshape(shape)
        start = stop
    return arrays


def weights(model_type: str, leaves: Arrays) -> Arrays:
    """Return weights of PyTorch, by the formulas of openpi's script."""
    jax = {k.removeprefix("PaliGemma/"): v for k, v in leaves.items()}
    made: Arrays = {
        f"{VISION}.embeddings.patch_embedding.weight": jax[
            "img/embedding/kernel"
        ].transpose(3, 2, 0, 1),
        f"{VISION}.embeddings.patch_embedding.bias": jax["img/embedding/bias"],
        f"{VISION}.embeddings.position_embedding.weight": jax["img/pos_embedding"][0],
        f"{VISION}.post_layernorm.weight": jax["img/Transformer/encoder_norm/scale"],
        f"{VISION}.post_layernorm.bias": jax["img/Transformer/encoder_norm/bias"],
    }
    block = "img/Transformer/encoderblock"
    width = len(jax["img/embedding/bias"])
    for i in range(len(jax[f"{block}/LayerNorm_0/scale"])):
        at = f"{VISION}.encoder.layers.{i}"
        for n in (0, 1):
            norm, dense = f"{block}/LayerNorm_{n}", f"{block}/MlpBlock_0/Dense_{n}"
            made[f"{at}.layer_norm{n + 1}.weight"] = jax[f"{norm}/scale"][i]
            made[f"{at}.layer_norm{n + 1}.bias"] = jax[f"{norm}/bias"][i]
            made[f"{at}.mlp.fc{n + 1}.weight"] = jax[f"{dense}/kernel"][i].T
            made[f"{at}.mlp.fc{n + 1}.bias"] = jax[f"{dense}/bias"][i]
        for hub, name in zip(
            ("k_proj", "v_proj", "q_proj", "out_proj"),
            ("key", "value", "query", "out"),
            strict=True,
        ):
            own = f"{block}/MultiHeadDotProductAttention_0/{name}"
            kernel, bias = jax[f"{own}/kernel"][i], jax[f"{own}/bias"][i]
            made[f"{at}.self_attn.{hub}.weight"] = kernel.reshape(-1, width).T
            made[f"{at}.self_attn.{hub}.bias"] = bias.reshape(-1)
    linear = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
    made[f"{linear}.weight"] = jax["img/head/kernel"].T
    made[f"{linear}.bias"] = jax["img/head/bias"]
    made[f"{TEXT}.embed_tokens.weight"] = jax["llm/embedder/input_embedding"]
    for at, end in ((TEXT, ""), (EXPERT, "_1")):
        made |= _decoder(jax, at, end)
    for name in PROJECTIONS[model_type]:
        made[f"{name}.weight"] = jax[f"{name}/kernel"].T
        made[f"{name}.bias"] = jax[f"{name}/bias"]
    return made


def _decoder(jax: Arrays, at: str, end: str) -> Arrays:
    """Return the weights of the language model, or of the expert for actions."""
    made: Arrays = {}
    queries = jax[f"llm/layers/attn/q_einsum{end}/w"]
    for i, query in enumerate(queries):
        width = query.shape[1]
        layer, keys = f"{at}.layers.{i}", jax[f"llm/layers/attn/kv_einsum{end}/w"][i]
        out = jax[f"llm/layers/attn/attn_vec_einsum{end}/w"][i]
        gating = jax[f"llm/layers/mlp{end}/gating_einsum"][i]
        made |= {
            f"{layer}.self_attn.q_proj.weight": query.transpose(0, 2, 1).reshape(
                -1, width
            ),
            f"{layer}.self_attn.k_proj.weight": keys[0, 0].T,
            f"{layer}.self_attn.v_proj.weight": keys[1, 0].T,
            f"{layer}.self_attn.o_proj.weight": out.reshape(-1, width).T,
            f"{layer}.mlp.gate_proj.weight": gating[0].T,
            f"{layer}.mlp.up_proj.weight": gating[1].T,
            f"{layer}.mlp.down_proj.weight": jax[f"llm/layers/mlp{end}/linear"][i].T,
        }
        for hub, name in (
            ("input_layernorm", "pre_attention_norm"),
            ("post_attention_layernorm", "pre_ffw_norm"),
        ):
            norm = f"llm/layers/{name}{end}"
            made |= _norm(jax, norm, f"{layer}.{hub}", (i,))
    return made | _norm(jax, f"llm/final_norm{end}", f"{at}.norm", ())


def _norm(jax: Arrays, own: str, hub: str, place: tuple[int, ...]) -> Arrays:
    if f"{own}/scale" in jax:
        return {f"{hub}.weight": jax[f"{own}/scale"][place]}
    return {
        f"{hub}.dense.weight": jax[f"{own}/Dense_0/kernel"][place].T,
        f"{hub}.dense.bias": jax[f"{own}/Dense_0/bias"][place],
    }


def convert(model_type: str, folder: Path) -> dict[str, Any]:
    """Return the params of which the script makes the weights of a folder.

    Where a number of the params is in the weights is known by params that are numbered,
    because the script computes nothing.
    """
    numbered, known = params(model_type, int(folder.name) - 1), weights_of(folder)
    places = weights(model_type, numbered)
    value_of = {
        number: value
        for name, array in places.items()
        for number, value in zip(
            array.ravel().tolist(), known[name].ravel().tolist(), strict=True
        )
    }
    leaves = {
        name: np.array([value_of[each] for each in array.ravel().tolist()], "f4")
        for name, array in numbered.items()
    }
    leaves = {k: v.reshape(numbered[k].shape) for k, v in leaves.items()}
    back = weights(model_type, leaves)
    assert all((known[name] == array).all() for name, array in back.items())
    name = f"{model_type}-{folder.name}-back"
    print(f"openpi/{model_type}", name, digest(back), flush=True)
    return leaves


if __name__ == "__main__":
    report("openpi", MODELS, convert)
    reason = "openpi is in no package index, so its models are not called"
    report_uncalled("openpi", dict.fromkeys(MODELS, reason))
