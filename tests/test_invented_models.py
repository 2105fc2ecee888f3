"""Ten invented architectures, each in two layouts, from functions and from names.

A state-space model, a vision transformer with registers, a RegNet, an encoder with a
decoder, experts next to a shared one, a UNet with attention, a convolutional LSTM, two
towers with one projection, a network of graphs, and a codec with codebooks. Names are
as PyTorch has them, and what they become is as people write it in Flax, layer by layer
and as stacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import treeadapt as ta

Shapes = dict[str, tuple[int, ...]]
Leaves = dict[str, Any]
Renames = list[tuple[str, str]]


def linear(at: str, o: int, i: int, *, bias: bool = True) -> Shapes:
    return {f"{at}.weight": (o, i)} | ({f"{at}.bias": (o,)} if bias else {})


def norm(at: str, e: int, *, bias: bool = True) -> Shapes:
    return {f"{at}.weight": (e,)} | ({f"{at}.bias": (e,)} if bias else {})


def conv(at: str, o: int, i: int, k: int) -> Shapes:
    return {f"{at}.weight": (o, i, k, k), f"{at}.bias": (o,)}


def state_space(layers: int, e: int, s: int, k: int, v: int, r: int) -> Shapes:
    shapes: Shapes = {"backbone.embeddings.weight": (v, e)}
    for n in range(layers):
        at = f"backbone.layers.{n}"
        shapes |= norm(f"{at}.norm", e, bias=False)
        at = f"{at}.mixer"
        shapes |= linear(f"{at}.in_proj", 2 * k, e, bias=False)
        shapes |= linear(f"{at}.x_proj", r + 2 * s, k, bias=False)
        shapes |= linear(f"{at}.dt_proj", k, r)
        shapes |= linear(f"{at}.out_proj", e, k, bias=False)
        shapes |= {f"{at}.A_log": (k, s), f"{at}.D": (k,)}
        shapes |= {f"{at}.conv1d.weight": (k, 1, 5), f"{at}.conv1d.bias": (k,)}
    return shapes | norm("backbone.norm_f", e, bias=False)


def registers(layers: int, e: int, f: int, p: int, n: int, g: int) -> Shapes:
    shapes: Shapes = {"cls_token": (1, 1, e), "reg_token": (1, g, e)}
    shapes |= {"pos_embed": (1, n, e)} | conv("patch_embed.proj", e, 3, p)
    for layer in range(layers):
        at = f"blocks.{layer}"
        shapes |= norm(f"{at}.norm1", e) | norm(f"{at}.norm2", e)
        for name in ("q", "k", "v", "proj"):
            shapes |= linear(f"{at}.attn.{name}", e, e)
        shapes |= linear(f"{at}.mlp.fc1", f, e) | linear(f"{at}.mlp.fc2", e, f)
        shapes |= {f"{at}.ls1.gamma": (e,), f"{at}.ls2.gamma": (e,)}
    return shapes | norm("norm", e) | linear("head", 41, e)


def regnet(c: int, g: int, n: int, stem: int) -> Shapes:
    def block(at: str, o: int, i: int, k: int) -> Shapes:
        own: Shapes = {f"{at}.conv.weight": (o, i, k, k)} | norm(f"{at}.bn", o)
        return own | {f"{at}.bn.running_mean": (o,), f"{at}.bn.running_var": (o,)}

    shapes, width = block("stem", stem, 3, 3), stem
    for stage in range(3):
        o = c + 4 * stage
        for number in (1, 2):
            at = f"s{stage + 1}.b{number}"
            shapes |= block(f"{at}.conv1", o, width, 1) | block(f"{at}.conv2", o, g, 3)
            shapes |= conv(f"{at}.se.fc1", 7, o, 1) | conv(f"{at}.se.fc2", o, 7, 1)
            shapes |= block(f"{at}.conv3", o, o, 1)
            if number == 1:
                shapes |= block(f"{at}.downsample", o, width, 1)
            width = o
    return shapes | linear("head.fc", n, width)


def encoder_decoder(layers: int, e: int, f: int, v: int, t: int) -> Shapes:
    shapes: Shapes = {"shared.weight": (v, e)}
    for side, length in (("encoder", t), ("decoder", t + 4)):
        for n in range(layers):
            at = f"{side}.layers.{n}"
            for a in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
                for p in "qkv":
                    shapes |= linear(f"{at}.{a}.{p}_proj", e, e, bias=p != "k")
                shapes |= linear(f"{at}.{a}.out_proj", e, e)
                shapes |= norm(f"{at}.{a}_layer_norm", e)
            shapes |= linear(f"{at}.fc1", f, e) | linear(f"{at}.fc2", e, f)
            shapes |= norm(f"{at}.final_layer_norm", e)
        shapes |= norm(f"{side}.layer_norm", e)
        shapes[f"{side}.embed_positions.weight"] = (length, e)
    return shapes


def experts(
    layers: int, e: int, f: int, x: int, v: int, h: int, d: int, s: int
) -> Shapes:
    def gated(at: str, size: int) -> Shapes:
        up, gate = (
            linear(f"{at}.{p}_proj", size, e, bias=False) for p in ("up", "gate")
        )
        return up | gate | linear(f"{at}.down_proj", e, size, bias=False)

    shapes: Shapes = {"model.embed_tokens.weight": (v, e)}
    for n in range(layers):
        at = f"model.layers.{n}"
        for name in ("input", "post_attention"):
            shapes |= norm(f"{at}.{name}_layernorm", e, bias=False)
        for p, o, i in (("q", h * d, e), ("k", d, e), ("v", d, e), ("o", e, h * d)):
            shapes |= linear(f"{at}.self_attn.{p}_proj", o, i, bias=False)
        shapes |= linear(f"{at}.mlp.gate", x, e, bias=False)
        shapes |= linear(f"{at}.mlp.shared_expert_gate", 1, e, bias=False)
        shapes |= gated(f"{at}.mlp.shared_expert", s)
        for expert in range(x):
            shapes |= gated(f"{at}.mlp.experts.{expert}", f)
    shapes |= norm("model.norm", e, bias=False)
    return shapes | linear("lm_head", v, e, bias=False)


def unet(c: int, e: int, t: int, blocks: int) -> Shapes:
    def residual(at: str, i: int, o: int) -> Shapes:
        own = norm(f"{at}.norm1", i) | conv(f"{at}.conv1", o, i, 3)
        own |= linear(f"{at}.temb_proj", o, t) | norm(f"{at}.norm2", o)
        own |= conv(f"{at}.conv2", o, o, 3)
        return own | (conv(f"{at}.nin_shortcut", o, i, 1) if i != o else {})

    def attention(at: str, o: int) -> Shapes:
        own = norm(f"{at}.norm", o)
        for name in ("q", "k", "v", "proj_out"):
            own |= conv(f"{at}.{name}", o, o, 1)
        return own

    shapes = conv("conv_in", c, 3, 3) | linear("time_embed.0", t, c)
    shapes |= linear("time_embed.2", t, t)
    for n in range(blocks):
        at, i, o = f"down.{n}", c + e * n, c + e * (n + 1)
        shapes |= residual(f"{at}.block", i, o) | attention(f"{at}.attn", o)
        shapes |= conv(f"{at}.downsample.conv", o, o, 3)
    shapes |= residual("mid.block_1", o, o) | attention("mid.attn", o)
    shapes |= residual("mid.block_2", o, o)
    for n in range(blocks):
        at, o = f"up.{n}", c + e * (n + 1)
        shapes |= residual(f"{at}.block", 2 * o, o)
        shapes |= conv(f"{at}.upsample.conv", o, o, 3)
    return shapes | norm("norm_out", c) | conv("conv_out", 3, c, 3)


def conv_lstm(layers: int, c: int, h: int, k: int, o: int) -> Shapes:
    shapes = conv("stem", h, c, k)
    for n in range(layers):
        at = f"cells.{n}"
        shapes |= conv(f"{at}.conv_x", 4 * h, h, k) | conv(f"{at}.conv_h", 4 * h, h, k)
        shapes |= {f"{at}.peep_i": (h,), f"{at}.peep_f": (h,), f"{at}.peep_o": (h,)}
        shapes |= norm(f"{at}.gn", h)
    return shapes | conv("readout", o, h, 1)


def two_towers(layers: int, e: int, f: int, v: int, p: int, j: int, n: int) -> Shapes:
    shapes: Shapes = {"text.tok_emb.weight": (v, e), "text.pos_emb.weight": (n, e)}
    shapes |= conv("image.patchify", e, 3, p) | {"image.cls": (1, 1, e)}
    shapes["image.pos"] = (1, n + 1, e)
    for tower in ("image", "text"):
        for layer in range(layers):
            at = f"{tower}.blocks.{layer}"
            shapes |= norm(f"{at}.ln_1", e) | norm(f"{at}.ln_2", e)
            for name in ("q", "k", "v", "o"):
                shapes |= linear(f"{at}.attn.{name}", e, e)
            shapes |= linear(f"{at}.mlp.c_fc", f, e) | linear(f"{at}.mlp.c_proj", e, f)
        shapes |= norm(f"{tower}.ln_post", e)
    return shapes | linear("joint_proj", j, e, bias=False) | {"logit_scale": ()}


def graphs(layers: int, e: int, x: int, y: int, m: int, o: int) -> Shapes:
    shapes = linear("node_enc", e, x) | linear("edge_enc", m, y)
    for n in range(layers):
        at = f"layers.{n}"
        shapes |= linear(f"{at}.msg.0", 2 * m, 2 * e + m) | linear(
            f"{at}.msg.2", m, 2 * m
        )
        shapes |= linear(f"{at}.upd.0", 3 * e, e + m) | linear(f"{at}.upd.2", e, 3 * e)
        shapes |= linear(f"{at}.att_src", 1, e) | linear(f"{at}.att_dst", 1, e)
        shapes |= norm(f"{at}.norm_nodes", e) | norm(f"{at}.norm_edges", m)
    return shapes | linear("readout.0", e + 1, e) | linear("readout.2", o, e + 1)


def codec(c: int, k: int, books: int, words: int, d: int) -> Shapes:
    def wave(at: str, o: int, i: int, k: int) -> Shapes:
        return {f"{at}.weight": (o, i, k), f"{at}.bias": (o,)}

    shapes = wave("encoder.conv_in", c, 1, k)
    for n in range(3):
        wide = c * 2**n
        at, up = f"encoder.blocks.{n}", f"decoder.blocks.{n}"
        shapes |= wave(f"{at}.res.conv1", wide, wide, 3) | {
            f"{at}.snake.alpha": (wide,)
        }
        shapes |= wave(f"{at}.res.conv2", wide, wide, 1)
        shapes |= wave(f"{at}.down", 2 * wide, wide, 4)
        more = c * 2 ** (3 - n)
        shapes |= wave(f"{up}.up", more // 2, more, 4) | {f"{up}.snake.alpha": (more,)}
        shapes |= wave(f"{up}.res.conv1", more // 2, more // 2, 3)
        shapes |= wave(f"{up}.res.conv2", more // 2, more // 2, 1)
    for n in range(books):
        at = f"quantizer.layers.{n}"
        shapes |= linear(f"{at}.in_proj", d, 8 * c) | linear(f"{at}.out_proj", 8 * c, d)
        shapes[f"{at}.codebook_emb.weight"] = (words, d)
    return shapes | wave("decoder.conv_out", 1, c, k)


PARTS = [("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")]
MODELS: dict[str, tuple[Callable[..., Shapes], Renames, dict[str, int], dict[str, int]]]
MODELS = {
    "state space": (
        state_space,
        [
            *((r"layers\.(\d+)\.norm$", r"layers.\1.pre_norm"), ("mixer", "ssm")),
            *((r"^backbone\.", ""), ("norm_f", "final_norm"), ("conv1d", "conv")),
        ],
        {"layers": 3, "e": 11, "s": 5, "k": 13, "v": 37, "r": 7},
        {"layers": 2, "e": 17, "s": 3, "k": 19, "v": 41, "r": 5},
    ),
    "registers": (
        registers,
        [
            *((r"^cls_token$", "class_token"), (r"^reg_token$", "register_tokens")),
            *((r"^pos_embed$", "position_embedding"), (r"^norm$", "encoder_norm")),
            *((r"^patch_embed\.proj", "patch_embedding"), (r"^head$", "classifier")),
            *((r"attn\.proj$", "attention.out"), ("blocks", "encoder.layer")),
            *((rf"attn\.{a}$", f"attention.{b}") for a, b in PARTS[:3]),
            *(("norm1", "norm_before_attention"), ("norm2", "norm_before_mlp")),
            *(("mlp.fc1", "mlp.up"), ("mlp.fc2", "mlp.down")),
            *(("ls1", "scale_attention"), ("ls2", "scale_mlp")),
        ],
        {"layers": 3, "e": 22, "f": 29, "p": 5, "n": 23, "g": 4},
        {"layers": 2, "e": 26, "f": 31, "p": 7, "n": 17, "g": 3},
    ),
    "regnet": (
        regnet,
        [
            *((r"^s(\d)\.b(\d)", r"stages.\1.block_\2"), ("downsample", "shortcut")),
            *((r"conv1(?=\.|$)", "expand"), (r"conv2(?=\.|$)", "spatial")),
            *((r"conv3(?=\.|$)", "project"), (r"head\.fc", "classifier")),
            *((r"se\.fc1", "squeeze.reduce"), (r"se\.fc2", "squeeze.expand")),
            (r"\.bn$", ".batch_norm"),
        ],
        {"c": 11, "g": 5, "n": 31, "stem": 13},
        {"c": 17, "g": 3, "n": 37, "stem": 19},
    ),
    "encoder and decoder": (
        encoder_decoder,
        [
            *(("self_attn_layer_norm", "self_attention_norm"), ("layers", "block")),
            *(("encoder_attn_layer_norm", "cross_attention_norm"),),
            *(("self_attn", "self_attention"), ("encoder_attn", "cross_attention")),
            *((rf"\.{a}_proj", f".{b}") for a, b in PARTS[:3]),
            *(("out_proj", "out"), ("fc1", "mlp.up"), ("fc2", "mlp.down")),
            *(("final_layer_norm", "mlp_norm"), ("layer_norm", "final_norm")),
            *((r"^shared", "token_embedding"), ("embed_positions", "positions_emb")),
        ],
        {"layers": 3, "e": 22, "f": 29, "v": 37, "t": 17},
        {"layers": 2, "e": 26, "f": 31, "v": 41, "t": 19},
    ),
    "experts": (
        experts,
        [
            *((r"model\.", ""), ("embed_tokens", "embed"), (r"^norm", "final_norm")),
            *(("input_layernorm", "attention_norm"), ("self_attn", "attention")),
            *((rf"\.{a}_proj", f".{b}") for a, b in PARTS),
            *(("post_attention_layernorm", "mlp_norm"), ("_proj", "")),
            *((r"mlp\.gate$", "moe.router"), (r"mlp\.experts", "moe.experts")),
            *((r"mlp\.shared_expert_gate", "moe.shared_router"),),
            (r"mlp\.shared_expert", "moe.shared"),
        ],
        {"layers": 3, "e": 11, "f": 13, "x": 4, "v": 37, "h": 3, "d": 7, "s": 17},
        {"layers": 2, "e": 19, "f": 17, "x": 3, "v": 41, "h": 5, "d": 11, "s": 23},
    ),
    "unet": (
        unet,
        [
            *((r"^down\b", "encoder"), (r"^up\b", "decoder"), (r"^mid", "middle")),
            *(("nin_shortcut", "shortcut"), ("temb_proj", "time_projection")),
            *((rf"attn\.{a}$", f"attention.{b}") for a, b in PARTS[:3]),
            *((r"attn\.proj_out", "attention.out"), (r"attn\.norm", "attention.norm")),
            (r"time_embed\.0", "time_embedding.dense_a"),
            (r"time_embed\.2", "time_embedding.dense_b"),
        ],
        {"c": 8, "e": 6, "t": 23, "blocks": 2},
        {"c": 10, "e": 4, "t": 29, "blocks": 2},
    ),
    "convolutional lstm": (
        conv_lstm,
        [
            *((r"^cells\.(\d+)", r"rnn.cell_\1"), ("conv_x", "input_conv")),
            *(("conv_h", "recurrent_conv"), (r"\bgn", "group_norm")),
            *(("readout", "output_conv"), ("stem", "input_stem")),
        ],
        {"layers": 3, "c": 3, "h": 7, "k": 5, "o": 2},
        {"layers": 2, "c": 2, "h": 11, "k": 3, "o": 5},
    ),
    "two towers": (
        two_towers,
        [
            *((r"^image\b", "vision_model"), (r"^text\b", "text_model")),
            *(("tok_emb", "token_embedding"), ("pos_emb", "position_embedding")),
            *(("blocks", "layers"), ("ln_1", "layer_norm1"), ("ln_2", "layer_norm2")),
            *((rf"attn\.{a}$", f"self_attn.{b}_proj") for a, b in PARTS),
            *(("c_fc", "fc1"), ("c_proj", "fc2"), ("ln_post", "post_layernorm")),
            *(("joint_proj", "projection"), ("patchify", "patch_embedding")),
            *((r"^cls$", "class_embedding"), (r"^pos$", "position_embedding")),
        ],
        {"layers": 3, "e": 22, "f": 29, "v": 37, "p": 5, "j": 13, "n": 17},
        {"layers": 2, "e": 26, "f": 31, "v": 41, "p": 7, "j": 11, "n": 19},
    ),
    "network of graphs": (
        graphs,
        [
            *((r"msg\.0", "message.dense_a"), (r"msg\.2", "message.dense_b")),
            *((r"upd\.0", "update.dense_a"), (r"upd\.2", "update.dense_b")),
            *(("att_src", "attention_source"), ("att_dst", "attention_target")),
            *(("node_enc", "node_encoder"), ("edge_enc", "edge_encoder")),
            *((r"readout\.0", "head.dense_a"), (r"readout\.2", "head.dense_b")),
        ],
        {"layers": 3, "e": 11, "x": 5, "y": 3, "m": 7, "o": 2},
        {"layers": 2, "e": 13, "x": 7, "y": 4, "m": 5, "o": 3},
    ),
    "codec": (
        codec,
        [
            *((r"blocks\.(\d+)", r"block_\1"), (r"\bres\b", "residual_unit")),
            *((r"\bdown$", "strided_conv"), (r"\bup$", "upsample_conv")),
            *(
                ("quantizer.layers", "vector_quantizer"),
                ("codebook_emb", "codebook_embed"),
            ),
            *(("in_proj", "project_in"), ("out_proj", "project_out")),
            *(("conv_in", "first_conv"), ("conv_out", "last_conv")),
        ],
        {"c": 5, "k": 7, "books": 3, "words": 37, "d": 11},
        {"c": 6, "k": 5, "books": 2, "words": 41, "d": 7},
    ),
}


def as_flax(path: str, leaf: Any, renames: Renames) -> tuple[str, Any]:
    at, _, kind = path.rpartition(".")
    if kind == "weight":
        is_table = leaf.ndim == 2 and re.search("emb|shared", at)
        kind = "embedding" if is_table else "kernel" if leaf.ndim > 1 else "scale"
        leaf = np.moveaxis(leaf, (0, 1), (-1, -2)) if kind == "kernel" else leaf
    kind = kind.removeprefix("running_")
    for old, new in renames if at else ():
        at = re.sub(old, new, at)
    for old, new in () if at else renames:
        kind = re.sub(old, new, kind)
    return f"{at}/{kind}".replace(".", "/").removeprefix("/"), leaf


def stacked(leaves: Leaves) -> Leaves:
    """The same with one array for leaves that differ in their first number only."""
    alike: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        alike.setdefault(re.sub(r"/\d+(?=/)", "", path, count=1), {})[path] = leaf
    made: Leaves = {}
    for path, members in alike.items():
        if {*members} == {path} or len({leaf.shape for leaf in members.values()}) > 1:
            made |= members
        else:
            made[path] = np.stack([*members.values()])
    return made


def numbers(shapes: Shapes) -> Leaves:
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=s).astype("f4") for path, s in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_an_invented_model_is_drafted(name, is_stacked):
    make, renames, small, other = MODELS[name]

    def convert(weights: Leaves) -> Leaves:
        made = dict(as_flax(path, leaf, renames) for path, leaf in weights.items())
        return stacked(made) if is_stacked else made

    source = numbers(make(**small))
    result = convert(source)
    draft = ta.draft_migration(source, convert=convert)
    assert not draft.missing
    assert not draft.unexpected
    report = draft.check(numbers(make(**other)), convert)
    assert report, str(report)
    abstract = (
        {p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for p, leaf in side.items()}
        for side in (source, result)
    )
    by_names = ta.draft_migration(*abstract)
    assert all(row.notes.check for row in by_names.migration.rows)
    wrong = [p for p, new in draft.pairs.items() if by_names.pairs.get(p) != new]
    assert not wrong
