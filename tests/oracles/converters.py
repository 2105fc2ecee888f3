"""The formulas of public converters, rebuilt in NumPy from what their results are.

Each takes sizes, and gives the shapes of what a publisher writes, and a function that
makes of such arrays what the library has. Names and axes are those of the library
and version that ``CONVERTERS`` names; no code of one is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
Convert = Callable[[Arrays], Arrays]


class Oracle(NamedTuple):
    """A converter, and two configurations of its model.

    Attributes:
        library: whose converter it is, and its version.
        make: gives shapes and the function, at sizes.
        small: sizes to draft at.
        other: sizes to compare at; what the table says itself stays.
    """

    library: str
    make: Callable[..., tuple[Shapes, Convert]]
    small: dict[str, int]
    other: dict[str, int]


def linear(at: str, o: int, i: int, *, bias: bool = False) -> Shapes:
    return {f"{at}.weight": (o, i)} | ({f"{at}.bias": (o,)} if bias else {})


def norm(at: str, e: int) -> Shapes:
    return {f"{at}.weight": (e,), f"{at}.bias": (e,)}


def decoder(
    layers: int, e: int, h: int, k: int, d: int, f: int, v: int, **more: Any
) -> Shapes:
    """A decoder of the Hub: norms, grouped queries, a gated map, a head."""
    head, bias, norms, kind = (
        more.get(name, default)
        for name, default in (
            ("head", True),
            ("bias", False),
            ("norms", ("input", "post_attention")),
            ("mlp", "mlp"),
        )
    )
    shapes: Shapes = {"model.embed_tokens.weight": (v, e)}
    for n in range(layers):
        at = f"model.layers.{n}"
        shapes |= {f"{at}.{name}_layernorm.weight": (e,) for name in norms}
        for p, size in (("q", h), ("k", k), ("v", k)):
            shapes |= linear(f"{at}.self_attn.{p}_proj", size * d, e, bias=bias)
        shapes |= linear(f"{at}.self_attn.o_proj", e, h * d)
        if more.get("qk_norm"):
            shapes |= {f"{at}.self_attn.{p}_norm.weight": (d,) for p in "qk"}
        if kind == "mlp":
            for p, o, i in (("gate", f, e), ("up", f, e), ("down", e, f)):
                shapes |= linear(f"{at}.mlp.{p}_proj", o, i)
    shapes["model.norm.weight"] = (e,)
    return shapes | ({"lm_head.weight": (v, e)} if head else {})


def heads(w: Any, d: int) -> Any:
    """``[h * d, e]`` as ``[e, h, d]``."""
    return w.T.reshape(w.shape[1], -1, d)


def out_heads(w: Any, d: int) -> Any:
    """``[e, h * d]`` as ``[h, d, e]``."""
    return w.T.reshape(-1, d, w.shape[0])


def pairs(w: Any) -> Any:
    """The last axis with its halves next to each other, as MaxText rotates them."""
    half = w.shape[-1] // 2
    return np.stack([w[..., :half], w[..., half:]], -1).reshape(w.shape)


def scanned(arrays: list[Any], axis: int = 1) -> Any:
    """Layers along an axis, the second as MaxText has them; the last of a vector."""
    return np.stack(arrays, min(axis, arrays[0].ndim))


# --- tunix ---


def tunix_llama(**sizes: int) -> tuple[Shapes, Convert]:
    layers, d = sizes["layers"], sizes["d"]

    def convert(w: Arrays) -> Arrays:
        made = {
            "embedder/input_embedding": w["model.embed_tokens.weight"],
            "final_norm/w": w["model.norm.weight"],
            "lm_head/w": w["lm_head.weight"].T,
        }
        for n in range(layers):
            old, new = f"model.layers.{n}", f"layers/{n}"
            for name in ("input", "post_attention"):
                made[f"{new}/{name}_layernorm/w"] = w[f"{old}.{name}_layernorm.weight"]
            for p in "qkv":
                q = w[f"{old}.self_attn.{p}_proj.weight"]
                made[f"{new}/attn/{p}_proj/w"] = heads(q, d)
            o = w[f"{old}.self_attn.o_proj.weight"]
            made[f"{new}/attn/o_proj/w"] = out_heads(o, d)
            for p in ("gate", "up", "down"):
                up = w[f"{old}.mlp.{p}_proj.weight"]
                made[f"{new}/mlp/{p}_proj/kernel"] = up.T
        return made

    return decoder(**sizes), convert


def tunix_qwen2(**sizes: int) -> tuple[Shapes, Convert]:
    layers, d = sizes["layers"], sizes["d"]
    _, as_llama = tunix_llama(**sizes)

    def convert(w: Arrays) -> Arrays:
        made = as_llama(w)
        for n in range(layers):
            for p in "qkv":
                bias = w[f"model.layers.{n}.self_attn.{p}_proj.bias"]
                made[f"layers/{n}/attn/{p}_bias"] = bias.reshape(-1, d)
        return made

    return decoder(**sizes, bias=True), convert


def tunix_gemma3(**sizes: int) -> tuple[Shapes, Convert]:
    layers, d = sizes["layers"], sizes["d"]
    norms = {
        "input": "pre_attention",
        "post_attention": "post_attention",
        "pre_feedforward": "pre_ffw",
        "post_feedforward": "post_ffw",
    }

    def convert(w: Arrays) -> Arrays:
        made = {
            "embedder/input_embedding": w["model.embed_tokens.weight"],
            "final_norm/scale": w["model.norm.weight"],
        }
        for n in range(layers):
            old, new = f"model.layers.{n}", f"layers/{n}"
            for a, b in norms.items():
                made[f"{new}/{b}_norm/scale"] = w[f"{old}.{a}_layernorm.weight"]
            q, k, v = (
                heads(w[f"{old}.self_attn.{p}_proj.weight"], d).swapaxes(0, 1)
                for p in "qkv"
            )
            made[f"{new}/attn/q_einsum/w"] = q
            made[f"{new}/attn/kv_einsum/w"] = np.stack([k, v])
            o = w[f"{old}.self_attn.o_proj.weight"]
            made[f"{new}/attn/attn_vec_einsum/w"] = out_heads(o, d)
            for p, name in (("q", "query"), ("k", "key")):
                scale = w[f"{old}.self_attn.{p}_norm.weight"]
                made[f"{new}/attn/_{name}_norm/scale"] = scale
            for p in ("gate", "up", "down"):
                made[f"{new}/mlp/{p}_proj/kernel"] = w[f"{old}.mlp.{p}_proj.weight"].T
        return made

    return decoder(**sizes, head=False, norms=[*norms], qk_norm=True), convert


# --- MaxText ---


def _maxtext(
    layers: int, d: int, *, is_scanned: bool, rotate: bool, qk_norm: bool, factor: float
) -> Convert:
    """MaxText's decoder of a model like Llama, its layers in one array or apart."""

    def layer(w: Arrays, n: int) -> Arrays:
        at = f"model.layers.{n}"
        own = {
            f"{new}_self_attention_layer_norm-scale": w[f"{at}.{old}_layernorm.weight"]
            for old, new in (("input", "pre"), ("post_attention", "post"))
        }
        for p, name in (("q", "query"), ("k", "key"), ("v", "value")):
            q = heads(w[f"{at}.self_attn.{p}_proj.weight"], d)
            q = pairs(q) if rotate and p != "v" else q
            q = q * np.float32(factor) if p == "q" and factor != 1 else q
            own[f"self_attention-{name}-kernel"] = q
            if qk_norm and p != "v":
                scale = w[f"{at}.self_attn.{p}_norm.weight"]
                own[f"self_attention-{name}_norm-scale"] = scale
        o = w[f"{at}.self_attn.o_proj.weight"]
        own["self_attention-out-kernel"] = out_heads(o, d)
        for p, name in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            if f"{at}.mlp.{p}_proj.weight" in w:
                own[f"mlp-{name}-kernel"] = w[f"{at}.mlp.{p}_proj.weight"].T
        return own

    def convert(w: Arrays) -> Arrays:
        made = {
            "params-token_embedder-embedding": w["model.embed_tokens.weight"],
            "params-decoder-decoder_norm-scale": w["model.norm.weight"],
        }
        if "lm_head.weight" in w:
            made["params-decoder-logits_dense-kernel"] = w["lm_head.weight"].T
        every = [layer(w, n) for n in range(layers)]
        if is_scanned:
            for name in every[0]:
                stack = scanned([own[name] for own in every])
                made[f"params-decoder-layers-{name}"] = stack
        else:
            for n, own in enumerate(every):
                made |= {f"params-decoder-layers_{n}-{p}": a for p, a in own.items()}
        return made

    return convert


def maxtext_llama(*, is_scanned: bool = True, **sizes: int) -> tuple[Shapes, Convert]:
    factor = sizes["d"] ** -0.5
    options = {"rotate": True, "qk_norm": False, "factor": factor}
    layers, d = sizes["layers"], sizes["d"]
    return decoder(**sizes), _maxtext(layers, d, is_scanned=is_scanned, **options)


def maxtext_llama_by_layer(**sizes: int) -> tuple[Shapes, Convert]:
    return maxtext_llama(is_scanned=False, **sizes)


def maxtext_qwen3(**sizes: int) -> tuple[Shapes, Convert]:
    options = {"rotate": False, "qk_norm": True, "factor": 1}
    convert = _maxtext(sizes["layers"], sizes["d"], is_scanned=True, **options)
    return decoder(**sizes, qk_norm=True), convert


def maxtext_qwen3_padded(**sizes: int) -> tuple[Shapes, Convert]:
    shapes, whole = maxtext_qwen3(**sizes)

    def convert(w: Arrays) -> Arrays:
        made = whole(w)
        rows, columns = "params-token_embedder-embedding", "logits_dense-kernel"
        made[rows] = np.pad(made[rows], ((0, 5), (0, 0)))
        name = f"params-decoder-{columns}"
        made[name] = np.pad(made[name], ((0, 0), (0, 5)))
        return made

    return shapes, convert


def maxtext_mixtral(x: int, **sizes: int) -> tuple[Shapes, Convert]:
    layers, e, f = sizes["layers"], sizes["e"], sizes["f"]
    shapes = decoder(**sizes, mlp="experts")
    for n in range(layers):
        at = f"model.layers.{n}.block_sparse_moe"
        shapes[f"{at}.gate.weight"] = (x, e)
        for i in range(x):
            for p in (1, 2, 3):
                size = (e, f) if p == 2 else (f, e)
                shapes[f"{at}.experts.{i}.w{p}.weight"] = size
    options = {"rotate": True, "qk_norm": False, "factor": sizes["d"] ** -0.5}
    rest = _maxtext(layers, sizes["d"], is_scanned=True, **options)

    def convert(w: Arrays) -> Arrays:
        made = rest(w)
        at, new = "model.layers.{}.block_sparse_moe", "params-decoder-layers-MoeBlock_0"
        gates = [w[f"{at.format(n)}.gate.weight"].T for n in range(layers)]
        made[f"{new}-gate-kernel"] = scanned(gates)
        for p, name in ((1, "wi_0"), (3, "wi_1"), (2, "wo")):
            made[f"{new}-{name}"] = np.stack(
                [
                    np.stack(
                        [
                            w[f"{at.format(n)}.experts.{i}.w{p}.weight"].T
                            for i in range(x)
                        ]
                    )
                    for n in range(layers)
                ],
                1,
            )
        return made

    return shapes, convert


def maxtext_gemma2(**sizes: int) -> tuple[Shapes, Convert]:
    layers, d, e = sizes["layers"], sizes["d"], sizes["e"]
    norms = {
        "input": "pre_self_attention_norm",
        "post_attention": "post_self_attention_norm",
        "pre_feedforward": "pre_ffw_norm",
        "post_feedforward": "post_ffw_norm",
    }

    def layer(w: Arrays, n: int, kind: str) -> Arrays:
        at = f"model.layers.{n}"
        own = {
            f"{b}_{kind}-scale": w[f"{at}.{a}_layernorm.weight"] + 1
            for a, b in norms.items()
        }
        for p, name in (("q", "query"), ("k", "key"), ("v", "value")):
            q = heads(w[f"{at}.self_attn.{p}_proj.weight"], d)
            q = q * np.float32(d**-0.5) if p == "q" else q
            own[f"self_attention_{kind}-{name}-kernel"] = q
        o = w[f"{at}.self_attn.o_proj.weight"]
        own[f"self_attention_{kind}-out-kernel"] = out_heads(o, d)
        for p, name in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            own[f"mlp_{kind}-{name}-kernel"] = w[f"{at}.mlp.{p}_proj.weight"].T
        return own

    def convert(w: Arrays) -> Arrays:
        embed = w["model.embed_tokens.weight"] * np.float32(e**0.5)
        made = {
            "params-token_embedder-embedding": np.pad(embed, ((0, 3), (0, 0))),
            "params-decoder-decoder_norm-scale": w["model.norm.weight"] + 1,
        }
        for first, kind in enumerate(("local", "global")):
            every = [layer(w, n, kind) for n in range(first, layers, 2)]
            for name in every[0]:
                stack = scanned([own[name] for own in every])
                made[f"params-decoder-layers-{name}"] = stack
        return made

    return decoder(**sizes, head=False, norms=[*norms]), convert


def maxtext_gemma3(**sizes: int) -> tuple[Shapes, Convert]:
    layers, d = sizes["layers"], sizes["d"]
    whole = layers - layers % 6

    def layer(w: Arrays, n: int) -> Arrays:
        at = f"model.layers.{n}"
        own = {
            f"{p}_norm-scale": w[f"{at}.{p}_layernorm.weight"] + 1
            for p in ("input", "post_attention")
        }
        for p, name in (("q", "query"), ("k", "key"), ("v", "value")):
            q = heads(w[f"{at}.self_attn.{p}_proj.weight"], d)
            own[f"self_attention-{name}-kernel"] = q
        o = w[f"{at}.self_attn.o_proj.weight"]
        own["self_attention-out-kernel"] = out_heads(o, d)
        for p, name in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            own[f"mlp-{name}-kernel"] = w[f"{at}.mlp.{p}_proj.weight"].T
        return own

    def convert(w: Arrays) -> Arrays:
        made = {
            "params-token_embedder-embedding": w["model.embed_tokens.weight"],
            "params-decoder-decoder_norm-scale": w["model.norm.weight"] + 1,
        }
        every = [layer(w, n) for n in range(layers)]
        for name in every[0]:
            for i in range(6):
                stack = scanned([own[name] for own in every[i:whole:6]])
                made[f"params-decoder-layers-layers_{i}-{name}"] = stack
            for i, own in enumerate(every[whole:]):
                at = f"params-decoder-layers_remainder-layers_{i}"
                made[f"{at}-{name}"] = own[name]
        return made

    return decoder(**sizes, head=False), convert


def maxtext_deepseek3(x: int, dense: int, **sizes: int) -> tuple[Shapes, Convert]:
    layers, e, f, v = (sizes[name] for name in ("layers", "e", "f", "v"))
    shapes: Shapes = {"model.embed_tokens.weight": (v, e)}
    for n in range(layers):
        at = f"model.layers.{n}"
        shapes[f"{at}.input_layernorm.weight"] = (e,)
        if n < dense:
            shapes |= linear(f"{at}.mlp.up_proj", f, e)
        else:
            shapes |= linear(f"{at}.mlp.gate", x, e)
            for i in range(x):
                shapes |= linear(f"{at}.mlp.experts.{i}.up_proj", f, e)

    def convert(w: Arrays) -> Arrays:
        made = {"params-token_embedder-embedding": w["model.embed_tokens.weight"]}
        for name, some in (
            ("dense", range(dense)),
            ("moe", range(dense, layers)),
        ):
            norms = [w[f"model.layers.{n}.input_layernorm.weight"] for n in some]
            made[f"params-decoder-{name}_layers-norm-scale"] = scanned(norms)
        ups = [w[f"model.layers.{n}.mlp.up_proj.weight"].T for n in range(dense)]
        made["params-decoder-dense_layers-mlp-wi_1-kernel"] = scanned(ups)
        moe, new = range(dense, layers), "params-decoder-moe_layers-MoeBlock_0"
        gates = [w[f"model.layers.{n}.mlp.gate.weight"].T for n in moe]
        made[f"{new}-gate-kernel"] = np.stack(gates)
        made[f"{new}-wi_1"] = np.stack(
            [
                np.stack(
                    [
                        w[f"model.layers.{n}.mlp.experts.{i}.up_proj.weight"].T
                        for n in moe
                    ]
                )
                for i in range(x)
            ]
        )
        return made

    return shapes, convert


def maxtext_gpt_oss(x: int, **sizes: int) -> tuple[Shapes, Convert]:
    layers, e, f, v, h = (sizes[name] for name in ("layers", "e", "f", "v", "h"))
    shapes: Shapes = {"model.embed_tokens.weight": (v, e)}
    for n in range(layers):
        at = f"model.layers.{n}"
        shapes |= {f"{at}.self_attn.sinks": (h,), f"{at}.mlp.router.weight": (x, e)}
        shapes[f"{at}.mlp.experts.gate_up_proj"] = (x, e, 2 * f)
        shapes[f"{at}.mlp.experts.down_proj"] = (x, f, e)

    def convert(w: Arrays) -> Arrays:
        made = {"params-token_embedder-embedding": w["model.embed_tokens.weight"]}
        for i in (0, 1):
            new = f"params-decoder-layers-layers_{i}-GptOss"
            own = [f"model.layers.{n}" for n in range(i, layers, 2)]
            made[f"{new}Attention-sinks"] = scanned(
                [w[f"{at}.self_attn.sinks"] for at in own]
            )
            made[f"{new}Mlp-gate-kernel"] = scanned(
                [w[f"{at}.mlp.router.weight"].T for at in own]
            )
            for part in (0, 1):
                made[f"{new}Mlp-wi_{part}"] = scanned(
                    [w[f"{at}.mlp.experts.gate_up_proj"][..., part::2] for at in own]
                )
            made[f"{new}Mlp-wo"] = scanned(
                [w[f"{at}.mlp.experts.down_proj"] for at in own]
            )
        return made

    return shapes, convert


def maxtext_qwen35(heads_: int, ratio: int, **sizes: int) -> tuple[Shapes, Convert]:
    layers, e, k, v = (sizes[name] for name in ("layers", "e", "k", "v"))
    shapes: Shapes = {}
    for n in range(layers):
        at = f"model.layers.{n}"
        if n % 4 == 3:
            shapes |= linear(f"{at}.self_attn.o_proj", e, 7)
        else:
            at = f"{at}.linear_attn.in_proj"
            for p in "ba":
                shapes |= linear(f"{at}_{p}", heads_ * ratio, e)
            value = heads_ * ratio * v
            shapes |= linear(f"{at}_qkv", 2 * heads_ * k + value, e)
            shapes |= linear(f"{at}_z", value, e)

    def convert(w: Arrays) -> Arrays:
        def both(n: int) -> Any:
            parts = [
                w[f"model.layers.{n}.linear_attn.in_proj_{p}.weight"].reshape(
                    heads_, ratio, e
                )
                for p in "ba"
            ]
            return np.concatenate(parts, 1).reshape(-1, e).T

        def all_four(n: int) -> Any:
            at = f"model.layers.{n}.linear_attn.in_proj"
            end = heads_ * k
            parts = [*np.split(w[f"{at}_qkv.weight"], [end, 2 * end])]
            parts.append(w[f"{at}_z.weight"])
            by_head = [part.reshape(heads_, -1, e) for part in parts]
            return np.concatenate(by_head, 1).reshape(-1, e).T

        made = {
            f"params-decoder-layers-layer_{i}-attention-in_proj_{name}-kernel": (
                np.stack([of(n) for n in range(i, layers, 4)], 1)
            )
            for i in range(3)
            for name, of in (("ba", both), ("qkvz", all_four))
        }
        outs = [
            w[f"model.layers.{n}.self_attn.o_proj.weight"].T
            for n in range(3, layers, 4)
        ]
        made["params-decoder-layers-layer_3-attention-out-kernel"] = np.stack(outs, 1)
        return made

    return shapes, convert


def maxtext_qwen3_next(**sizes: int) -> tuple[Shapes, Convert]:
    layers, e, f, d = (sizes[name] for name in ("layers", "e", "f", "d"))
    shapes: Shapes = {"model.embed_tokens.weight": (sizes["v"], e)}
    for n in range(layers):
        at = f"model.layers.{n}"
        shapes[f"{at}.input_layernorm.weight"] = (e,)
        shapes |= linear(f"{at}.mlp.shared_expert.up_proj", f, e)
        if n % 4 == 3:
            shapes |= linear(f"{at}.self_attn.o_proj", e, d)
        else:
            shapes |= linear(f"{at}.linear_attn.out_proj", e, f)
            shapes[f"{at}.linear_attn.A_log"] = (d,)

    def convert(w: Arrays) -> Arrays:
        made = {"params-token_embedder-embedding": w["model.embed_tokens.weight"]}
        at = "params-decoder-scanned_blocks"

        def put(old: str, new: str, *, of: range) -> None:
            """A scan of blocks, and for the first three layers a scan within each."""
            arrays = [
                w[f"model.layers.{n}.{old}"].T for n in range(layers) if n % 4 in of
            ]
            blocks = [arrays[n : n + len(of)] for n in range(0, len(arrays), len(of))]
            if len(of) == 1:
                made[f"{at}-global_layer-{new}"] = scanned([one for (one,) in blocks])
            else:
                stack = scanned([scanned(block) for block in blocks])
                made[f"{at}-local_layers-{new}"] = stack

        local, whole = range(3), range(3, 4)
        for of in (local, whole):
            put("input_layernorm.weight", "input_layernorm-scale", of=of)
            up = "mlp.shared_expert.up_proj.weight"
            put(up, "mlp-shared_expert-wi_1-kernel", of=of)
        put("self_attn.o_proj.weight", "attention-attention-out-kernel", of=whole)
        put("linear_attn.out_proj.weight", "attention-out_proj-kernel", of=local)
        put("linear_attn.A_log", "attention-A_log", of=local)
        return made

    return shapes, convert


# --- keras-hub ---


def _encoder(names: dict[str, str], layers: int, e: int, f: int) -> Shapes:
    """Layers of an encoder of the Hub, as BERT calls them."""
    shapes: Shapes = {}
    for n in range(layers):
        at = names["layer"].format(n)
        for p in ("query", "key", "value"):
            shapes |= linear(f"{at}.{names['attention']}.{p}", e, e, bias=True)
        shapes |= linear(f"{at}.attention.output.dense", e, e, bias=True)
        shapes |= linear(f"{at}.intermediate.dense", f, e, bias=True)
        shapes |= linear(f"{at}.output.dense", e, f, bias=True)
    return shapes


def keras_bert(**sizes: int) -> tuple[Shapes, Convert]:
    layers, e, h, f, v, t = (
        sizes[name] for name in ("layers", "e", "h", "f", "v", "t")
    )
    names = {"layer": "bert.encoder.layer.{}", "attention": "attention.self"}
    shapes: Shapes = {
        f"bert.embeddings.{name}_embeddings.weight": (size, e)
        for name, size in (("word", v), ("position", t), ("token_type", 2))
    }
    shapes |= norm("bert.embeddings.LayerNorm", e) | _encoder(names, layers, e, f)
    for n in range(layers):
        shapes |= norm(f"bert.encoder.layer.{n}.attention.output.LayerNorm", e)
        shapes |= norm(f"bert.encoder.layer.{n}.output.LayerNorm", e)
    shapes |= linear("bert.pooler.dense", e, e, bias=True)
    shapes |= linear("cls.seq_relationship", 2, e, bias=True)
    shapes |= linear("cls.predictions.transform.dense", e, e, bias=True)

    def convert(w: Arrays) -> Arrays:
        made = {}
        for old, new in (
            ("word", "token"),
            ("position",) * 2,
            ("token_type", "segment"),
        ):
            table = w[f"bert.embeddings.{old}_embeddings.weight"]
            made[f"{new}_embedding/embeddings"] = table

        def normed(old: str, new: str) -> None:
            made[f"{new}/gamma"] = w[f"{old}.weight"]
            made[f"{new}/beta"] = w[f"{old}.bias"]

        normed("bert.embeddings.LayerNorm", "embeddings_layer_norm")
        for n in range(layers):
            old, new = f"bert.encoder.layer.{n}", f"transformer_layer_{n}"
            for p in ("query", "key", "value"):
                at = f"{new}/self_attention_layer/{p}"
                q = w[f"{old}.attention.self.{p}.weight"]
                made[f"{at}/kernel"] = heads(q, e // h)
                bias = w[f"{old}.attention.self.{p}.bias"]
                made[f"{at}/bias"] = bias.reshape(h, -1)
            at = f"{new}/self_attention_layer/attention_output"
            made[f"{at}/kernel"] = out_heads(
                w[f"{old}.attention.output.dense.weight"], e // h
            )
            made[f"{at}/bias"] = w[f"{old}.attention.output.dense.bias"]
            for p in ("intermediate", "output"):
                made[f"{new}/feedforward_{p}_dense/kernel"] = w[
                    f"{old}.{p}.dense.weight"
                ].T
                made[f"{new}/feedforward_{p}_dense/bias"] = w[f"{old}.{p}.dense.bias"]
            normed(
                f"{old}.attention.output.LayerNorm", f"{new}/self_attention_layer_norm"
            )
            normed(f"{old}.output.LayerNorm", f"{new}/feedforward_layer_norm")
        made["pooled_dense/kernel"] = w["bert.pooler.dense.weight"].T
        made["pooled_dense/bias"] = w["bert.pooler.dense.bias"]
        return made

    return shapes, convert


def gpt2(layers: int, e: int, f: int, v: int, t: int) -> Shapes:
    """GPT-2 of the Hub, whose maps are ``[in, out]``."""
    shapes: Shapes = {
        "transformer.wte.weight": (v, e),
        "transformer.wpe.weight": (t, e),
    }
    for n in range(layers):
        at = f"transformer.h.{n}"
        shapes |= norm(f"{at}.ln_1", e) | norm(f"{at}.ln_2", e)
        for name, i, o in (
            ("attn.c_attn", e, 3 * e),
            ("attn.c_proj", e, e),
            ("mlp.c_fc", e, f),
            ("mlp.c_proj", f, e),
        ):
            shapes |= {f"{at}.{name}.weight": (i, o), f"{at}.{name}.bias": (o,)}
    return shapes | norm("transformer.ln_f", e)


def keras_gpt2(h: int, **sizes: int) -> tuple[Shapes, Convert]:
    e = sizes["e"]

    def convert(w: Arrays) -> Arrays:
        made = {
            "token_embedding/embeddings": w["transformer.wte.weight"],
            "position_embedding/embeddings": w["transformer.wpe.weight"],
            "layer_norm/gamma": w["transformer.ln_f.weight"],
            "layer_norm/beta": w["transformer.ln_f.bias"],
        }
        for n in range(sizes["layers"]):
            old, new = f"transformer.h.{n}", f"transformer_layer_{n}"
            kernels = np.split(w[f"{old}.attn.c_attn.weight"], 3, 1)
            biases = np.split(w[f"{old}.attn.c_attn.bias"], 3)
            for p, kernel, bias in zip(
                ("query", "key", "value"), kernels, biases, strict=True
            ):
                at = f"{new}/self_attention/{p}"
                made[f"{at}/kernel"] = kernel.reshape(e, h, -1)
                made[f"{at}/bias"] = bias.reshape(h, -1)
            at = f"{new}/self_attention/attention_output"
            made[f"{at}/kernel"] = w[f"{old}.attn.c_proj.weight"].reshape(h, -1, e)
            made[f"{at}/bias"] = w[f"{old}.attn.c_proj.bias"]
            for a, b in (("1", "self_attention"), ("2", "feedforward")):
                made[f"{new}/{b}_layer_norm/gamma"] = w[f"{old}.ln_{a}.weight"]
                made[f"{new}/{b}_layer_norm/beta"] = w[f"{old}.ln_{a}.bias"]
            for a, b in (("fc", "intermediate"), ("proj", "output")):
                made[f"{new}/feedforward_{b}_dense/kernel"] = w[
                    f"{old}.mlp.c_{a}.weight"
                ]
                made[f"{new}/feedforward_{b}_dense/bias"] = w[f"{old}.mlp.c_{a}.bias"]
        return made

    return gpt2(**sizes), convert


def keras_llama3(**sizes: int) -> tuple[Shapes, Convert]:
    layers, d = sizes["layers"], sizes["d"]

    def convert(w: Arrays) -> Arrays:
        made = {
            "token_embedding/embeddings": w["model.embed_tokens.weight"],
            "token_embedding/reverse_embeddings": w["lm_head.weight"].T,
            "sequence_output_layernorm/scale": w["model.norm.weight"],
        }
        for n in range(layers):
            old, new = f"model.layers.{n}", f"transformer_layer_{n}"
            for a, b in (
                ("input", "self_attention"),
                ("post_attention", "feedforward"),
            ):
                made[f"{new}/{b}_layernorm/scale"] = w[f"{old}.{a}_layernorm.weight"]
            for p, name in (("q", "query"), ("k", "key"), ("v", "value")):
                q = w[f"{old}.self_attn.{p}_proj.weight"]
                made[f"{new}/self_attention/{name}/kernel"] = heads(q, d)
            o = w[f"{old}.self_attn.o_proj.weight"]
            made[f"{new}/self_attention/attention_output/kernel"] = out_heads(o, d)
            for p, name in (
                ("gate", "gate"),
                ("up", "intermediate"),
                ("down", "output"),
            ):
                up = w[f"{old}.mlp.{p}_proj.weight"]
                made[f"{new}/feedforward_{name}_dense/kernel"] = up.T
        return made

    return decoder(**sizes), convert


def keras_gemma(**sizes: int) -> tuple[Shapes, Convert]:
    layers, d = sizes["layers"], sizes["d"]

    def convert(w: Arrays) -> Arrays:
        made = {
            "token_embedding/embeddings": w["model.embed_tokens.weight"],
            "final_normalization/scale": w["model.norm.weight"],
        }
        for n in range(layers):
            old, new = f"model.layers.{n}", f"decoder_block_{n}"
            for a, b in (("input", "pre_attention"), ("post_attention", "pre_ffw")):
                made[f"{new}/{b}_norm/scale"] = w[f"{old}.{a}_layernorm.weight"]
            for p, name in (("q", "query"), ("k", "key"), ("v", "value")):
                q = heads(w[f"{old}.self_attn.{p}_proj.weight"], d)
                made[f"{new}/attention/{name}/kernel"] = q.swapaxes(0, 1)
            o = w[f"{old}.self_attn.o_proj.weight"]
            made[f"{new}/attention/attention_output/kernel"] = out_heads(o, d)
            for p, name in (("gate", "gating"), ("up", "gating_2"), ("down", "linear")):
                made[f"{new}/ffw_{name}/kernel"] = w[f"{old}.mlp.{p}_proj.weight"].T
        return made

    return decoder(**sizes, head=False), convert


def keras_mixtral(x: int, **sizes: int) -> tuple[Shapes, Convert]:
    layers = sizes["layers"]
    shapes, _ = maxtext_mixtral(x, **sizes)
    _, rest = keras_llama3(**sizes)

    def convert(w: Arrays) -> Arrays:
        maps = {
            f"model.layers.{n}.mlp.{p}_proj.weight": np.zeros((1, 1), "f4")
            for n in range(layers)
            for p in ("gate", "up", "down")
        }
        made = {p: a for p, a in rest(w | maps).items() if "feedforward_" not in p}
        for n in range(layers):
            for b in ("feedforward",):
                name = f"transformer_layer_{n}/{b}_layernorm/scale"
                made[name] = w[f"model.layers.{n}.post_attention_layernorm.weight"]
            old, new = (
                f"model.layers.{n}.block_sparse_moe",
                f"transformer_layer_{n}/moe",
            )
            made[f"{new}/gate/kernel"] = w[f"{old}.gate.weight"].T
            for p, name in ((1, "gate"), (3, "intermediate"), (2, "output")):
                made[f"{new}/experts/expert_feedforward_{name}_dense"] = np.stack(
                    [w[f"{old}.experts.{i}.w{p}.weight"].T for i in range(x)]
                )
        return made

    return shapes, convert


def keras_vit(**sizes: int) -> tuple[Shapes, Convert]:
    layers, e, h, f, p = (sizes[name] for name in ("layers", "e", "h", "f", "p"))
    names = {"layer": "vit.encoder.layer.{}", "attention": "attention.attention"}
    shapes: Shapes = {
        "vit.embeddings.cls_token": (1, 1, e),
        "vit.embeddings.position_embeddings": (1, 17, e),
        "vit.embeddings.patch_embeddings.projection.weight": (e, 3, p, p),
    }
    shapes |= _encoder(names, layers, e, f) | norm("vit.layernorm", e)
    for n in range(layers):
        shapes |= norm(f"vit.encoder.layer.{n}.layernorm_before", e)
        shapes |= norm(f"vit.encoder.layer.{n}.layernorm_after", e)
    shapes |= linear("classifier", 19, e, bias=True)

    def convert(w: Arrays) -> Arrays:
        patches = w["vit.embeddings.patch_embeddings.projection.weight"]
        made = {
            "vit_patching_and_embedding/class_token": w["vit.embeddings.cls_token"],
            "vit_patching_and_embedding/position_embedding/embeddings": w[
                "vit.embeddings.position_embeddings"
            ][0],
            "vit_patching_and_embedding/patches/kernel": patches.transpose(2, 3, 1, 0),
            "vit_encoder/layer_norm/gamma": w["vit.layernorm.weight"],
            "vit_encoder/layer_norm/beta": w["vit.layernorm.bias"],
        }
        for n in range(layers):
            old = f"vit.encoder.layer.{n}"
            new = f"vit_encoder/transformer_block_{n + 1}"
            for q in ("query", "key", "value"):
                at = f"{new}/mha/{q}"
                kernel = w[f"{old}.attention.attention.{q}.weight"]
                made[f"{at}/kernel"] = heads(kernel, e // h)
                made[f"{at}/bias"] = w[f"{old}.attention.attention.{q}.bias"].reshape(
                    h, -1
                )
            at = f"{new}/mha/attention_output"
            out = w[f"{old}.attention.output.dense.weight"]
            made[f"{at}/kernel"] = out_heads(out, e // h)
            made[f"{at}/bias"] = w[f"{old}.attention.output.dense.bias"]
            for a, b in (("intermediate", 1), ("output", 2)):
                made[f"{new}/mlp/dense_{b}/kernel"] = w[f"{old}.{a}.dense.weight"].T
                made[f"{new}/mlp/dense_{b}/bias"] = w[f"{old}.{a}.dense.bias"]
            for a, b in (("before", 1), ("after", 2)):
                made[f"{new}/layer_norm_{b}/gamma"] = w[f"{old}.layernorm_{a}.weight"]
                made[f"{new}/layer_norm_{b}/beta"] = w[f"{old}.layernorm_{a}.bias"]
        return made

    return shapes, convert


def keras_opt_positions(**sizes: int) -> tuple[Shapes, Convert]:
    e, v, t = sizes["e"], sizes["v"], sizes["t"]
    shapes: Shapes = {
        "model.decoder.embed_tokens.weight": (v, e),
        "model.decoder.embed_positions.weight": (t + 2, e),
        "model.decoder.final_layer_norm.weight": (e,),
    }

    def convert(w: Arrays) -> Arrays:
        positions = w["model.decoder.embed_positions.weight"][2:]
        return {
            "embeddings/token_embedding/embeddings": w[
                "model.decoder.embed_tokens.weight"
            ],
            "embeddings/position_embedding/embeddings": positions,
            "layer_norm/gamma": w["model.decoder.final_layer_norm.weight"],
        }

    return shapes, convert


# --- transformers ---


def flax_gpt2(**sizes: int) -> tuple[Shapes, Convert]:
    def convert(w: Arrays) -> Arrays:
        made = {}
        for path, a in w.items():
            at, _, kind = path.replace(".", "/").rpartition("/")
            last = at.rpartition("/")[2]
            if last in ("wte", "wpe"):
                made[f"{at}/embedding"] = a
            elif a.ndim == 2:
                made[f"{at}/kernel"] = a.T
            else:
                is_norm = last.startswith("ln") and kind == "weight"
                made[f"{at}/{'scale' if is_norm else kind}"] = a
        return made

    return gpt2(**sizes), convert


def flax_convolutions(w: Arrays) -> Arrays:
    """Convolutions with batch norms, as Flax has those of PyTorch."""
    made = {}
    for path, a in w.items():
        at, _, kind = path.replace(".", "/").rpartition("/")
        if kind == "num_batches_tracked":
            continue
        if kind.startswith("running_"):
            made[f"batch_stats/{at}/{kind.removeprefix('running_')}"] = a
        elif a.ndim == 4:
            made[f"params/{at}/kernel"] = a.transpose(2, 3, 1, 0)
        elif a.ndim == 2:
            made[f"params/{at}/kernel"] = a.T
        else:
            is_norm = at.endswith("normalization") and kind == "weight"
            made[f"params/{at}/{'scale' if is_norm else kind}"] = a
    return made


def flax_resnet(c: int, e: int, n: int) -> tuple[Shapes, Convert]:
    shapes: Shapes = {}
    for stage in range(2):
        for layer in range(2):
            for part in range(2):
                at = f"resnet.encoder.stages.{stage}.layers.{layer}.layer.{part}"
                size = (e, c) if part == 0 else (c, e)
                shapes[f"{at}.convolution.weight"] = (*size, 3, 3)
                shapes |= norm(f"{at}.normalization", size[0])
                for kind in ("running_mean", "running_var"):
                    shapes[f"{at}.normalization.{kind}"] = size[:1]
                shapes[f"{at}.normalization.num_batches_tracked"] = ()
    shapes |= linear("classifier.1", n, c, bias=True)

    return shapes, flax_convolutions


def transformers_mixtral(x: int, **sizes: int) -> tuple[Shapes, Convert]:
    shapes, _ = maxtext_mixtral(x, **sizes)

    def convert(w: Arrays) -> Arrays:
        made = {path: a for path, a in w.items() if "block_sparse_moe" not in path}
        for n in range(sizes["layers"]):
            old, new = f"model.layers.{n}.block_sparse_moe", f"model.layers.{n}.mlp"
            made[f"{new}.gate.weight"] = w[f"{old}.gate.weight"]
            one, two, three = (
                np.stack([w[f"{old}.experts.{i}.w{p}.weight"] for i in range(x)])
                for p in (1, 2, 3)
            )
            made[f"{new}.experts.gate_up_proj"] = np.concatenate([one, three], 1)
            made[f"{new}.experts.down_proj"] = two
        return made

    return shapes, convert


def transformers_neox(layers: int, e: int, h: int) -> tuple[Shapes, Convert]:
    d = e // h
    shapes: Shapes = {}
    for n in range(layers):
        at = f"gpt_neox.layers.{n}.attention"
        shapes |= linear(f"{at}.query_key_value", 3 * e, e, bias=True)
        shapes |= linear(f"{at}.dense", e, e, bias=True)

    def convert(w: Arrays) -> Arrays:
        made = {}
        for n in range(layers):
            old, new = f"gpt_neox.layers.{n}.attention", f"layers/{n}/attention"
            for kind in ("weight", "bias"):
                whole = w[f"{old}.query_key_value.{kind}"]
                parts = np.moveaxis(whole.reshape(h, 3, d, *whole.shape[1:]), 1, 0)
                for p, part in zip(("query", "key", "value"), parts, strict=True):
                    made[f"{new}/{p}/{kind}"] = part.reshape(h * d, *part.shape[2:])
            made[f"{new}/out/kernel"] = w[f"{old}.dense.weight"].T
            made[f"{new}/out/bias"] = w[f"{old}.dense.bias"]
        return made

    return shapes, convert


# --- Flax's own, and layouts of one library ---


def timm_vit(**sizes: int) -> tuple[Shapes, Convert]:
    layers, e, h, f, p = (sizes[name] for name in ("layers", "e", "h", "f", "p"))
    shapes: Shapes = {
        "embedding/kernel": (p, p, 3, e),
        "embedding/bias": (e,),
        "cls": (1, 1, e),
        "Transformer/posembed_input/pos_embedding": (1, 17, e),
        "Transformer/encoder_norm/scale": (e,),
        "Transformer/encoder_norm/bias": (e,),
    }
    for n in range(layers):
        at = f"Transformer/encoderblock_{n}"
        for k in (0, 2):
            for kind in ("scale", "bias"):
                shapes[f"{at}/LayerNorm_{k}/{kind}"] = (e,)
        inner = f"{at}/MultiHeadDotProductAttention_1"
        for q in ("query", "key", "value"):
            shapes[f"{inner}/{q}/kernel"] = (e, h, e // h)
            shapes[f"{inner}/{q}/bias"] = (h, e // h)
        shapes[f"{inner}/out/kernel"] = (h, e // h, e)
        shapes[f"{inner}/out/bias"] = (e,)
        for k, i, o in ((0, e, f), (1, f, e)):
            shapes[f"{at}/MlpBlock_3/Dense_{k}/kernel"] = (i, o)
            shapes[f"{at}/MlpBlock_3/Dense_{k}/bias"] = (o,)

    def convert(w: Arrays) -> Arrays:
        made = {
            "patch_embed.proj.weight": w["embedding/kernel"].transpose(3, 2, 0, 1),
            "patch_embed.proj.bias": w["embedding/bias"],
            "cls_token": w["cls"],
            "pos_embed": w["Transformer/posembed_input/pos_embedding"],
            "norm.weight": w["Transformer/encoder_norm/scale"],
            "norm.bias": w["Transformer/encoder_norm/bias"],
        }
        for n in range(layers):
            old, new = f"Transformer/encoderblock_{n}", f"blocks.{n}"
            inner = f"{old}/MultiHeadDotProductAttention_1"
            every = [f"{inner}/{q}" for q in ("query", "key", "value")]
            made[f"{new}.attn.qkv.weight"] = np.concatenate(
                [w[f"{q}/kernel"].reshape(e, e).T for q in every]
            )
            made[f"{new}.attn.qkv.bias"] = np.concatenate(
                [w[f"{q}/bias"].reshape(e) for q in every]
            )
            made[f"{new}.attn.proj.weight"] = w[f"{inner}/out/kernel"].reshape(e, e).T
            made[f"{new}.attn.proj.bias"] = w[f"{inner}/out/bias"]
            for a, b in ((0, 1), (1, 2)):
                dense = f"{old}/MlpBlock_3/Dense_{a}"
                made[f"{new}.mlp.fc{b}.weight"] = w[f"{dense}/kernel"].T
                made[f"{new}.mlp.fc{b}.bias"] = w[f"{dense}/bias"]
            for a, b in ((0, 1), (2, 2)):
                made[f"{new}.norm{b}.weight"] = w[f"{old}/LayerNorm_{a}/scale"]
                made[f"{new}.norm{b}.bias"] = w[f"{old}/LayerNorm_{a}/bias"]
        return made

    return shapes, convert


def gemma_stacked(
    layers: int, e: int, h: int, d: int, f: int
) -> tuple[Shapes, Convert]:
    shapes: Shapes = {"transformer/final_norm&scale": (e,)}
    for n in range(layers):
        at = f"transformer/layer_{n}"
        shapes[f"{at}/attn/q_einsum&w"] = (h, e, d)
        shapes[f"{at}/mlp/gating_einsum&w"] = (2, f, e)
        shapes[f"{at}/pre_ffw_norm&scale"] = (e,)

    def convert(w: Arrays) -> Arrays:
        made = {"transformer/final_norm&scale": w["transformer/final_norm&scale"]}
        for i in range(6):
            for name in (
                "attn/q_einsum&w",
                "mlp/gating_einsum&w",
                "pre_ffw_norm&scale",
            ):
                at = f"transformer/stacked_layers/attention_type_{i}/{name}"
                own = [w[f"transformer/layer_{n}/{name}"] for n in range(i, layers, 6)]
                made[at] = np.stack(own)
        return made

    return shapes, convert


def falcon_heads(layers: int, e: int, g: int, r: int, d: int) -> tuple[Shapes, Convert]:
    shapes: Shapes = {}
    for n in range(layers):
        at = f"transformer.h.{n}.self_attention"
        shapes |= linear(f"{at}.query_key_value", g * (r + 2) * d, e)

    def convert(w: Arrays) -> Arrays:
        made = {}
        for n in range(layers):
            whole = w[f"transformer.h.{n}.self_attention.query_key_value.weight"]
            groups = whole.reshape(g, r + 2, d, e)
            for p, part in (
                ("query", groups[:, :r]),
                ("key", groups[:, r : r + 1]),
                ("value", groups[:, r + 1 :]),
            ):
                made[f"h/{n}/attn/{p}/kernel"] = part.reshape(-1, e).T
        return made

    return shapes, convert


LLAMA = {"layers": 3, "e": 22, "h": 5, "k": 2, "d": 14, "f": 13, "v": 37}
OTHER = {"layers": 2, "e": 26, "h": 3, "k": 1, "d": 14, "f": 17, "v": 41}
BLOCKS = {**LLAMA, "layers": 14}
MOE = {"x": 4}
BERT = {"layers": 3, "e": 22, "h": 2, "f": 13, "v": 37, "t": 19}
BERT2 = {"layers": 2, "e": 34, "h": 2, "f": 29, "v": 41, "t": 23}
GPT2 = {**BERT}
GPT2_FLAX = {name: n for name, n in BERT.items() if name != "h"}
VIT = {"layers": 3, "e": 22, "h": 2, "f": 13, "p": 5}
VIT2 = {"layers": 2, "e": 34, "h": 2, "f": 29, "p": 7}

CONVERTERS = {
    "tunix/llama3": Oracle("google-tunix 0.1.7", tunix_llama, LLAMA, OTHER),
    "tunix/qwen2": Oracle("google-tunix 0.1.7", tunix_qwen2, LLAMA, OTHER),
    "tunix/gemma3": Oracle("google-tunix 0.1.7", tunix_gemma3, LLAMA, OTHER),
    "maxtext/llama3.1-scanned": Oracle("maxtext 0.2.5", maxtext_llama, LLAMA, OTHER),
    "maxtext/llama3.1": Oracle("maxtext 0.2.5", maxtext_llama_by_layer, LLAMA, OTHER),
    "maxtext/qwen3-scanned": Oracle("maxtext 0.2.5", maxtext_qwen3, LLAMA, OTHER),
    "maxtext/qwen3-padded": Oracle("maxtext 0.2.5", maxtext_qwen3_padded, LLAMA, OTHER),
    "maxtext/mixtral-scanned": Oracle(
        "maxtext 0.2.5", maxtext_mixtral, LLAMA | MOE, OTHER | {"x": 3}
    ),
    "maxtext/gemma2-scanned": Oracle(
        "maxtext 0.2.5",
        maxtext_gemma2,
        {**LLAMA, "layers": 6},
        {**OTHER, "layers": 4, "d": 10},
    ),
    "maxtext/gemma3-scanned": Oracle(
        "maxtext 0.2.5", maxtext_gemma3, BLOCKS, OTHER | {"layers": 14}
    ),
    "maxtext/deepseek3-scanned": Oracle(
        "maxtext 0.2.5",
        maxtext_deepseek3,
        {**LLAMA, "layers": 7, "dense": 2, "x": 5},
        {**OTHER, "layers": 5, "dense": 2, "x": 3},
    ),
    "maxtext/gpt-oss-scanned": Oracle(
        "maxtext 0.2.5",
        maxtext_gpt_oss,
        {**LLAMA, "layers": 6, "x": 3},
        {**OTHER, "layers": 4, "x": 7},
    ),
    "maxtext/qwen3.5-scanned": Oracle(
        "maxtext 0.2.5",
        maxtext_qwen35,
        {"layers": 12, "e": 22, "heads_": 3, "ratio": 2, "k": 5, "v": 7},
        {"layers": 8, "e": 26, "heads_": 3, "ratio": 2, "k": 7, "v": 11},
    ),
    "maxtext/qwen3-next-scanned": Oracle(
        "maxtext 0.2.5",
        maxtext_qwen3_next,
        {"layers": 12, "e": 22, "f": 13, "d": 7, "v": 37},
        {"layers": 8, "e": 26, "f": 17, "d": 5, "v": 41},
    ),
    "keras-hub/bert": Oracle("keras-hub 0.32.0", keras_bert, BERT, BERT2),
    "keras-hub/gpt2": Oracle("keras-hub 0.32.0", keras_gpt2, GPT2, BERT2),
    "keras-hub/llama3": Oracle("keras-hub 0.32.0", keras_llama3, LLAMA, OTHER),
    "keras-hub/gemma": Oracle("keras-hub 0.32.0", keras_gemma, LLAMA, OTHER),
    "keras-hub/mixtral": Oracle(
        "keras-hub 0.32.0", keras_mixtral, LLAMA | MOE, OTHER | {"x": 3}
    ),
    "keras-hub/vit": Oracle("keras-hub 0.32.0", keras_vit, VIT, VIT2),
    "keras-hub/opt": Oracle(
        "keras-hub 0.32.0",
        keras_opt_positions,
        {"e": 22, "v": 37, "t": 19},
        {"e": 26, "v": 41, "t": 23},
    ),
    "hf-flax/gpt2": Oracle(
        "transformers 4.56",
        flax_gpt2,
        GPT2_FLAX,
        {name: n for name, n in BERT2.items() if name != "h"},
    ),
    "hf-flax/resnet": Oracle(
        "transformers 4.56",
        flax_resnet,
        {"c": 7, "e": 11, "n": 13},
        {"c": 5, "e": 17, "n": 19},
    ),
    "transformers/mixtral": Oracle(
        "transformers 5.24", transformers_mixtral, LLAMA | MOE, OTHER | {"x": 3}
    ),
    "transformers/gpt-neox": Oracle(
        "transformers 4.56",
        transformers_neox,
        {"layers": 3, "e": 22, "h": 2},
        {"layers": 2, "e": 26, "h": 2},
    ),
    "timm/vit": Oracle("timm 1.0.31", timm_vit, VIT, VIT2),
    "gemma/stacked": Oracle(
        "gemma 4.0.1",
        gemma_stacked,
        {"layers": 18, "e": 22, "h": 5, "d": 7, "f": 13},
        {"layers": 12, "e": 26, "h": 3, "d": 11, "f": 17},
    ),
    "transformers/falcon-40b": Oracle(
        "transformers 4.56",
        falcon_heads,
        {"layers": 3, "e": 22, "g": 3, "r": 4, "d": 7},
        {"layers": 2, "e": 26, "g": 3, "r": 5, "d": 11},
    ),
}
