"""More formulas of public converters: encoders, state spaces, sounds, images, proteins.

As in ``converters``: each is rebuilt in NumPy from names and axes of what it makes.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from oracles.converters import (
    Arrays,
    Convert,
    Oracle,
    Shapes,
    flax_convolutions,
    linear,
    norm,
)


def easydel_mamba2(
    layers: int, e: int, inner: int, h: int, s: int, v: int
) -> tuple[Shapes, Convert]:
    conv = inner + 2 * s
    shapes: Shapes = {"backbone.embeddings.weight": (v, e)}
    for n in range(layers):
        at = f"backbone.layers.{n}"
        shapes |= {f"{at}.norm.weight": (e,)}
        shapes |= linear(f"{at}.mixer.in_proj", inner + conv + h, e)
        shapes |= {f"{at}.mixer.conv1d.weight": (conv, 1, 4)}
        shapes |= {f"{at}.mixer.conv1d.bias": (conv,)}
        shapes |= {f"{at}.mixer.{name}": (h,) for name in ("dt_bias", "A_log", "D")}
        shapes |= {f"{at}.mixer.norm.weight": (inner,)}
        shapes |= linear(f"{at}.mixer.out_proj", e, inner)
    shapes |= {"backbone.norm_f.weight": (e,), "lm_head.weight": (v, e)}

    def convert(w: Arrays) -> Arrays:
        made = {}
        for path, a in w.items():
            new = path.replace(".", "/")
            if "embeddings" in path:
                made[new.replace("weight", "embedding")] = a
            elif path.endswith(".weight"):
                made[new.replace("weight", "kernel")] = a.T
            else:
                made[new] = a
        return made

    return shapes, convert


def flax_wav2vec2(
    layers: int, convs: int, c: int, e: int, f: int, g: int, v: int
) -> tuple[Shapes, Convert]:
    encoder = "wav2vec2.encoder"
    shapes: Shapes = {"wav2vec2.masked_spec_embed": (e,)}
    for n in range(convs):
        at = f"wav2vec2.feature_extractor.conv_layers.{n}"
        shapes |= {f"{at}.conv.weight": (c, c if n else 1, 3), f"{at}.conv.bias": (c,)}
        shapes |= norm(f"{at}.layer_norm", c)
    shapes |= norm("wav2vec2.feature_projection.layer_norm", c)
    shapes |= linear("wav2vec2.feature_projection.projection", e, c, bias=True)
    # A weight norm: of each of the 16 positions, and the directions of all.
    weight = f"{encoder}.pos_conv_embed.conv.parametrizations.weight"
    shapes |= {f"{weight}.original0": (1, 1, 16)}
    shapes |= {f"{weight}.original1": (e, e // g, 16)}
    shapes |= {f"{encoder}.pos_conv_embed.conv.bias": (e,)}
    shapes |= norm(f"{encoder}.layer_norm", e)
    for n in range(layers):
        at = f"{encoder}.layers.{n}"
        for p in ("q", "k", "v", "out"):
            shapes |= linear(f"{at}.attention.{p}_proj", e, e, bias=True)
        shapes |= linear(f"{at}.feed_forward.intermediate_dense", f, e, bias=True)
        shapes |= linear(f"{at}.feed_forward.output_dense", e, f, bias=True)
        shapes |= norm(f"{at}.layer_norm", e) | norm(f"{at}.final_layer_norm", e)
    shapes |= linear("lm_head", v, e, bias=True)

    def convert(w: Arrays) -> Arrays:
        made = {}
        for path, a in w.items():
            new = path.replace(".", "/")
            new = new.replace("parametrizations/weight/original0", "weight_g")
            new = new.replace("parametrizations/weight/original1", "weight_v")
            if new.endswith("/weight"):
                name = "scale" if "norm" in new else "kernel"
                new, a = new.removesuffix("weight") + name, a.T
            made[new] = a
        return made

    return shapes, convert


def transformers_vjepa2(
    layers: int, late: int, e: int, p: int, m: int
) -> tuple[Shapes, Convert]:
    shapes: Shapes = {
        "patch_embed.proj.weight": (e, 3, 2, 5, 5),
        "patch_embed.proj.bias": (e,),
    }
    for blocks, count, width in (("blocks", layers, e), ("predictor_blocks", late, p)):
        for n in range(count):
            at = f"{blocks}.{n}"
            shapes |= norm(f"{at}.norm1", width) | norm(f"{at}.norm2", width)
            shapes |= linear(f"{at}.attn.qkv", 3 * width, width, bias=True)
            shapes |= linear(f"{at}.attn.proj", width, width, bias=True)
            shapes |= linear(f"{at}.mlp.fc1", 4 * width, width, bias=True)
            shapes |= linear(f"{at}.mlp.fc2", width, 4 * width, bias=True)
    shapes |= norm("norm", e)
    shapes |= linear("predictor_embed", p, e, bias=True)
    shapes |= {f"mask_tokens.{n}": (1, 1, p) for n in range(m)}
    shapes |= norm("predictor_norm", p) | linear("predictor_proj", e, p, bias=True)
    renamed = (
        ("predictor_blocks.", "predictor.layer."),
        ("blocks.", "encoder.layer."),
        ("attn.", "attention."),
        ("patch_embed.", "encoder.embeddings.patch_embeddings."),
        ("predictor_embed.", "predictor.embeddings.predictor_embeddings."),
        ("predictor_norm.", "predictor.layernorm."),
        ("predictor_proj.", "predictor.proj."),
        ("norm.", "encoder.layernorm."),
    )

    def convert(w: Arrays) -> Arrays:
        made = {}
        for path, a in w.items():
            new = path
            for old, name in renamed:
                if old == "attn.":
                    new = new.replace(old, name)
                elif path.startswith(old):
                    new = name + path.removeprefix(old)
            if "qkv" in new:
                for part, x in zip(
                    ("query", "key", "value"), np.split(a, 3), strict=True
                ):
                    made[new.replace("qkv", part)] = x
            elif "mask_tokens" not in new:
                made[new] = a
        tokens = np.stack([w[f"mask_tokens.{n}"] for n in range(m)])
        return made | {"predictor.embeddings.mask_tokens": tokens}

    return shapes, convert


def t5x_umt5(
    layers: int, e: int, h: int, d: int, f: int, v: int, b: int
) -> tuple[Shapes, Convert]:
    shapes: Shapes = {"token_embedder/embedding": (v, e)}
    kinds = {
        "encoder": {"attention": "SelfAttention"},
        "decoder": {
            "self_attention": "SelfAttention",
            "encoder_decoder_attention": "EncDecAttention",
        },
    }
    for side, attentions in kinds.items():
        at = f"{side}/{side}"
        for name in attentions:
            for p in ("key", "query", "value"):
                shapes[f"{at}/{name}/{p}/kernel"] = (e, layers, h, d)
            shapes[f"{at}/{name}/out/kernel"] = (h, layers, d, e)
        for name in norms_of(attentions):
            shapes[f"{at}/{name}/scale"] = (e, layers)
        shapes |= {f"{at}/mlp/{p}/kernel": (e, layers, f) for p in ("wi_0", "wi_1")}
        shapes[f"{at}/mlp/wo/kernel"] = (f, layers, e)
        shapes[f"{at}/relpos_bias/rel_embedding"] = (h, layers, b)
        shapes[f"{side}/{side}_norm/scale"] = (e,)
    shapes["decoder/logits_dense/kernel"] = (e, v)

    def convert(w: Arrays) -> Arrays:
        made = {"shared.weight": w["token_embedder/embedding"]}
        for side, attentions in kinds.items():
            old = f"{side}/{side}"
            for n in range(layers):
                new = f"{side}.block.{n}.layer"
                for place, (name, called) in enumerate(attentions.items()):
                    for p in ("key", "query", "value", "out"):
                        kernel = w[f"{old}/{name}/{p}/kernel"][:, n]
                        shape = (-1, e) if p == "out" else (e, -1)
                        made[f"{new}.{place}.{called}.{p[0]}.weight"] = kernel.reshape(
                            shape
                        ).T
                for place, name in enumerate(norms_of(attentions)):
                    scale = w[f"{old}/{name}/scale"][:, n]
                    made[f"{new}.{place}.layer_norm.weight"] = scale
                for p in ("wi_0", "wi_1", "wo"):
                    at = f"{new}.{len(attentions)}.DenseReluDense.{p}.weight"
                    made[at] = w[f"{old}/mlp/{p}/kernel"][:, n].T
                bias = w[f"{old}/relpos_bias/rel_embedding"][:, n].T
                at = f"{new}.0.SelfAttention.relative_attention_bias.weight"
                made[at] = bias
            scale = w[f"{side}/{side}_norm/scale"]
            made[f"{side}.final_layer_norm.weight"] = scale
        return made | {"lm_head.weight": w["decoder/logits_dense/kernel"].T}

    return shapes, convert


def norms_of(attentions: dict[str, str]) -> list[str]:
    """The norms of a layer of T5X, in its order."""
    before = {"encoder_decoder_attention": "cross_attention"}
    names = [*(before.get(name, name) for name in attentions), "mlp"]
    return [f"pre_{name}_layer_norm" for name in names]


def diffusers_unet(c: int, t: int, x: int, blocks: int) -> tuple[Shapes, Convert]:
    def conv(at: str, o: int, i: int, size: int) -> Shapes:
        return {f"{at}.weight": (o, i, size, size), f"{at}.bias": (o,)}

    def resnet(at: str, o: int, i: int) -> Shapes:
        shapes = norm(f"{at}.norm1", i) | conv(f"{at}.conv1", o, i, 3)
        shapes |= linear(f"{at}.time_emb_proj", o, t, bias=True)
        shapes |= norm(f"{at}.norm2", o) | conv(f"{at}.conv2", o, o, 3)
        return shapes | (conv(f"{at}.conv_shortcut", o, i, 1) if o != i else {})

    def attention(at: str) -> Shapes:
        shapes = norm(f"{at}.norm", c) | conv(f"{at}.proj_in", c, c, 1)
        block = f"{at}.transformer_blocks.0"
        for name, keys in (("attn1", c), ("attn2", x)):
            shapes |= linear(f"{block}.{name}.to_q", c, c)
            shapes |= linear(f"{block}.{name}.to_k", c, keys)
            shapes |= linear(f"{block}.{name}.to_v", c, keys)
            shapes |= linear(f"{block}.{name}.to_out.0", c, c, bias=True)
        for n in (1, 2, 3):
            shapes |= norm(f"{block}.norm{n}", c)
        shapes |= linear(f"{block}.ff.net.0.proj", 8 * c, c, bias=True)
        shapes |= linear(f"{block}.ff.net.2", c, 4 * c, bias=True)
        return shapes | conv(f"{at}.proj_out", c, c, 1)

    shapes = conv("conv_in", c, 4, 3)
    shapes |= linear("time_embedding.linear_1", t, c, bias=True)
    shapes |= linear("time_embedding.linear_2", t, t, bias=True)
    for n in range(blocks):
        for k in range(2):
            shapes |= resnet(f"down_blocks.{n}.resnets.{k}", c, c)
            shapes |= attention(f"down_blocks.{n}.attentions.{k}")
        shapes |= conv(f"down_blocks.{n}.downsamplers.0.conv", c, c, 3)
        for k in range(3):
            shapes |= resnet(f"up_blocks.{n}.resnets.{k}", c, 2 * c)
            shapes |= attention(f"up_blocks.{n}.attentions.{k}")
        shapes |= conv(f"up_blocks.{n}.upsamplers.0.conv", c, c, 3)
    shapes |= resnet("mid_block.resnets.0", c, c) | attention("mid_block.attentions.0")
    shapes |= resnet("mid_block.resnets.1", c, c)
    shapes |= norm("conv_norm_out", c) | conv("conv_out", 4, c, 3)

    def convert(w: Arrays) -> Arrays:
        made = {}
        for path, a in w.items():
            new = re.sub(r"\.([0-9]+)(?=\.)", r"_\1", path).replace(".", "/")
            if a.ndim == 4:
                new, a = new.replace("weight", "kernel"), a.transpose(2, 3, 1, 0)
            elif a.ndim == 2:
                new, a = new.replace("weight", "kernel"), a.T
            elif new.endswith("weight"):
                new = new.replace("weight", "scale")
            made[new] = a
        return made

    return shapes, convert


def flax_regnet(
    stages: int, layers: int, c: int, g: int, r: int, v: int
) -> tuple[Shapes, Convert]:
    def conv(at: str, o: int, i: int, size: int) -> Shapes:
        shapes = {f"{at}.convolution.weight": (o, i, size, size)}
        shapes |= norm(f"{at}.normalization", o)
        shapes |= {f"{at}.normalization.running_{m}": (o,) for m in ("mean", "var")}
        return shapes | {f"{at}.normalization.num_batches_tracked": ()}

    shapes = conv("regnet.embedder.embedder", c, 3, 3)
    for stage in range(stages):
        width = c * 2 ** (stage + 1)
        for n in range(layers):
            at = f"regnet.encoder.stages.{stage}.layers.{n}"
            before = width if n else width // 2
            if not n:
                shapes |= conv(f"{at}.shortcut", width, before, 1)
            shapes |= conv(f"{at}.layer.0", width, before, 1)
            shapes |= conv(f"{at}.layer.1", width, width // g, 3)
            for k, (o, i) in ((0, (r, width)), (2, (width, r))):
                shapes[f"{at}.layer.2.attention.{k}.weight"] = (o, i, 1, 1)
                shapes[f"{at}.layer.2.attention.{k}.bias"] = (o,)
            shapes |= conv(f"{at}.layer.3", width, width, 1)
    shapes |= linear("classifier.1", v, width, bias=True)

    return shapes, flax_convolutions


def transformers_esm2(layers: int, e: int, f: int, v: int) -> tuple[Shapes, Convert]:
    shapes: Shapes = {"embed_tokens.weight": (v, e)}
    for n in range(layers):
        at = f"layers.{n}"
        for p in ("q", "k", "v", "out"):
            shapes |= linear(f"{at}.self_attn.{p}_proj", e, e, bias=True)
        shapes |= norm(f"{at}.self_attn_layer_norm", e)
        shapes |= linear(f"{at}.fc1", f, e, bias=True)
        shapes |= linear(f"{at}.fc2", e, f, bias=True)
        shapes |= norm(f"{at}.final_layer_norm", e)
    shapes |= norm("emb_layer_norm_after", e)
    shapes |= linear("contact_head.regression", 1, layers * 5, bias=True)
    shapes |= linear("lm_head.dense", e, e, bias=True)
    shapes |= norm("lm_head.layer_norm", e) | {"lm_head.bias": (v,)}
    parts = {
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.out_proj": "attention.output.dense",
        "self_attn_layer_norm": "attention.LayerNorm",
        "fc1": "intermediate.dense",
        "fc2": "output.dense",
        "final_layer_norm": "LayerNorm",
    }

    def convert(w: Arrays) -> Arrays:
        made = {"esm.embeddings.word_embeddings.weight": w["embed_tokens.weight"]}
        for path, a in w.items():
            at, _, kind = path.rpartition(".")
            if match := re.fullmatch(r"layers\.([0-9]+)\.(.*)", at):
                number, part = match.groups()
                made[f"esm.encoder.layer.{number}.{parts[part]}.{kind}"] = a
            elif at == "emb_layer_norm_after":
                made[f"esm.encoder.{path}"] = a
            elif at == "contact_head.regression":
                made[f"esm.{path}"] = a
            elif at.startswith("lm_head"):
                made[path] = a
        return made

    return shapes, convert


def transformers_siglip2(
    layers: int, e: int, h: int, f: int, p: int, v: int, t: int
) -> tuple[Shapes, Convert]:
    d, attention = e // h, "MultiHeadDotProductAttention_0"

    def block(at: str, count: tuple[int, ...]) -> Shapes:
        shapes: Shapes = {}
        for n in (0, 1) if count else (0,):
            shapes |= {
                f"{at}/LayerNorm_{n}/{k}": (*count, e) for k in ("scale", "bias")
            }
        for n, (i, o) in enumerate(((e, f), (f, e))):
            shapes[f"{at}/MlpBlock_0/Dense_{n}/kernel"] = (*count, i, o)
            shapes[f"{at}/MlpBlock_0/Dense_{n}/bias"] = (*count, o)
        for name in ("query", "key", "value"):
            shapes[f"{at}/{attention}/{name}/kernel"] = (*count, e, h, d)
            shapes[f"{at}/{attention}/{name}/bias"] = (*count, h, d)
        shapes[f"{at}/{attention}/out/kernel"] = (*count, h, d, e)
        shapes[f"{at}/{attention}/out/bias"] = (*count, e)
        return shapes

    image, text = "params/img", "params/txt"
    shapes: Shapes = {
        f"{image}/embedding/kernel": (3 * p * p, e),
        f"{image}/embedding/bias": (e,),
        f"{image}/pos_embedding": (4, 4, e),
        f"{image}/MAPHead_0/probe": (1, 1, e),
        f"{text}/Embed_0/embedding": (v, e),
        f"{text}/pos_embedding": (1, t, e),
        f"{text}/head/kernel": (e, e),
        f"{text}/head/bias": (e,),
        "params/t": (1,),
        "params/b": (1,),
    }
    encoders = {
        f"{image}/Transformer": "vision_model",
        f"{text}/Encoder_0": "text_model",
    }
    for at in encoders:
        shapes |= block(f"{at}/encoderblock", (layers,))
        shapes |= {f"{at}/encoder_norm/{k}": (e,) for k in ("scale", "bias")}
    shapes |= block(f"{image}/MAPHead_0", ())

    def flat(w: Any, name: str) -> Any:
        return w.reshape((-1, e) if name == "out" else (e, -1)).T

    def convert(w: Arrays) -> Arrays:
        made = {
            "vision_model.embeddings.patch_embedding.weight": w[
                f"{image}/embedding/kernel"
            ].T,
            "vision_model.embeddings.patch_embedding.bias": w[
                f"{image}/embedding/bias"
            ],
            "vision_model.head.probe": w[f"{image}/MAPHead_0/probe"],
            "text_model.embeddings.token_embedding.weight": w[
                f"{text}/Embed_0/embedding"
            ],
            "text_model.head.weight": w[f"{text}/head/kernel"].T,
            "text_model.head.bias": w[f"{text}/head/bias"],
            "logit_scale": w["params/t"],
            "logit_bias": w["params/b"],
        }

        def normed(old: str, new: str, n: int | None = None) -> None:
            for one, two in (("scale", "weight"), ("bias", "bias")):
                a = w[f"{old}/{one}"]
                made[f"{new}.{two}"] = a if n is None else a[n]

        def mapped(old: str, new: str, n: int | None = None) -> None:
            for k in (0, 1):
                for one, two in (("kernel", "weight"), ("bias", "bias")):
                    a = w[f"{old}/MlpBlock_0/Dense_{k}/{one}"]
                    made[f"{new}.fc{k + 1}.{two}"] = (a if n is None else a[n]).T

        for (at, model), last in zip(
            encoders.items(), ("post_layernorm", "final_layer_norm"), strict=True
        ):
            positions = w[f"{at.rpartition('/')[0]}/pos_embedding"].reshape(-1, e)
            made[f"{model}.embeddings.position_embedding.weight"] = positions
            normed(f"{at}/encoder_norm", f"{model}.{last}")
            for n in range(layers):
                old, new = f"{at}/encoderblock", f"{model}.encoder.layers.{n}"
                for k in (0, 1):
                    normed(f"{old}/LayerNorm_{k}", f"{new}.layer_norm{k + 1}", n)
                mapped(old, f"{new}.mlp", n)
                for name in ("query", "key", "value", "out"):
                    called = f"{name}_proj" if name == "out" else f"{name[0]}_proj"
                    kernel = w[f"{old}/{attention}/{name}/kernel"][n]
                    bias = w[f"{old}/{attention}/{name}/bias"][n]
                    made[f"{new}.self_attn.{called}.weight"] = flat(kernel, name)
                    made[f"{new}.self_attn.{called}.bias"] = bias.reshape(-1)
        old, new = f"{image}/MAPHead_0", "vision_model.head"
        normed(f"{old}/LayerNorm_0", f"{new}.layernorm")
        mapped(old, f"{new}.mlp")
        at = f"{old}/{attention}"
        fused = [flat(w[f"{at}/{n}/kernel"], n) for n in ("query", "key", "value")]
        made[f"{new}.attention.in_proj_weight"] = np.concatenate(fused)
        biases = [w[f"{at}/{n}/bias"].reshape(-1) for n in ("query", "key", "value")]
        made[f"{new}.attention.in_proj_bias"] = np.concatenate(biases)
        made[f"{new}.attention.out_proj.weight"] = flat(w[f"{at}/out/kernel"], "out")
        made[f"{new}.attention.out_proj.bias"] = w[f"{at}/out/bias"]
        return made

    return shapes, convert


OTHER_CONVERTERS = {
    "easydel/mamba2": Oracle(
        "easydel 0.3.0",
        easydel_mamba2,
        {"layers": 3, "e": 22, "inner": 44, "h": 4, "s": 7, "v": 37},
        {"layers": 2, "e": 26, "inner": 52, "h": 2, "s": 5, "v": 41},
    ),
    "hf-flax/wav2vec2": Oracle(
        "transformers 4.57",
        flax_wav2vec2,
        {"layers": 3, "convs": 4, "c": 11, "e": 22, "f": 13, "g": 2, "v": 37},
        {"layers": 2, "convs": 3, "c": 7, "e": 34, "f": 29, "g": 2, "v": 41},
    ),
    "transformers/vjepa2": Oracle(
        "transformers 5.24",
        transformers_vjepa2,
        {"layers": 3, "late": 2, "e": 22, "p": 14, "m": 4},
        {"layers": 2, "late": 3, "e": 26, "p": 10, "m": 5},
    ),
    "t5x/umt5": Oracle(
        "transformers 5.24",
        t5x_umt5,
        {"layers": 3, "e": 22, "h": 5, "d": 7, "f": 13, "v": 37, "b": 8},
        {"layers": 2, "e": 26, "h": 3, "d": 11, "f": 17, "v": 41, "b": 10},
    ),
    "diffusers/unet": Oracle(
        "diffusers 0.35",
        diffusers_unet,
        {"c": 11, "t": 23, "x": 13, "blocks": 3},
        {"c": 7, "t": 19, "x": 17, "blocks": 2},
    ),
    "hf-flax/regnet": Oracle(
        "transformers 4.57",
        flax_regnet,
        {"stages": 3, "layers": 2, "c": 10, "g": 2, "r": 7, "v": 37},
        {"stages": 2, "layers": 3, "c": 14, "g": 2, "r": 5, "v": 41},
    ),
    "transformers/esm2": Oracle(
        "transformers 5.24",
        transformers_esm2,
        {"layers": 3, "e": 22, "f": 13, "v": 37},
        {"layers": 2, "e": 34, "f": 29, "v": 41},
    ),
    "transformers/siglip2": Oracle(
        "transformers 5.24",
        transformers_siglip2,
        {"layers": 3, "e": 22, "h": 2, "f": 13, "p": 5, "v": 37, "t": 19},
        {"layers": 2, "e": 34, "h": 2, "f": 29, "p": 7, "v": 41, "t": 23},
    ),
}
