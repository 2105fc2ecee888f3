"""Five models that drafts were not made on, each in two styles of names and layouts.

Names are those of timm, transformers, diffusers, open_clip and the authors of xLSTM;
what they become is as people write it in Flax, layer by layer, and as stacks for a
scan. A model is its shapes at some sizes; a table is the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Shapes = dict[str, tuple[int, ...]]


class Model(NamedTuple):
    """A model and what it becomes.

    Attributes:
        shapes: names and shapes, at sizes.
        published: sizes as somebody published them.
        prime: small ones, all different.
        tables: by style.
        open_sizes: names in tables of which the source leaves the size open.
    """

    shapes: Callable[..., Shapes]
    published: dict[str, int]
    prime: dict[str, int]
    tables: dict[str, dict[Any, Any]]
    open_sizes: tuple[str, ...] = ()


def linear(at: str, o: int, i: int, *, bias: bool = True) -> Shapes:
    return {f"{at}.weight": (o, i)} | ({f"{at}.bias": (o,)} if bias else {})


def conv(at: str, o: int, i: int, k: int) -> Shapes:
    return {f"{at}.weight": (o, i, k, k), f"{at}.bias": (o,)}


def norm(at: str, e: int, *, bias: bool = True) -> Shapes:
    return {f"{at}.weight": (e,)} | ({f"{at}.bias": (e,)} if bias else {})


def convnext(e: int, f: int, c: int, k: int, p: int, n: int, blocks: int) -> Shapes:
    leaves = conv("stem.0", e, c, p) | norm("stem.1", e)
    for stage in range(3):
        at = f"stages.{stage}"
        if stage:
            leaves |= norm(f"{at}.downsample.0", e) | conv(
                f"{at}.downsample.1", e, e, 2
            )
        for block in range(blocks):
            here = f"{at}.blocks.{block}"
            leaves[f"{here}.gamma"] = (e,)
            leaves |= conv(f"{here}.conv_dw", e, 1, k) | norm(f"{here}.norm", e)
            leaves |= linear(f"{here}.mlp.fc1", f, e) | linear(f"{here}.mlp.fc2", e, f)
    return leaves | norm("head.norm", e) | linear("head.fc", n, e)


def rwkv(layers: int, e: int, f: int, v: int) -> Shapes:
    leaves: Shapes = {"rwkv.embeddings.weight": (v, e)}
    leaves |= norm("rwkv.blocks.0.pre_ln", e)
    for layer in range(layers):
        at = f"rwkv.blocks.{layer}"
        leaves |= norm(f"{at}.ln1", e) | norm(f"{at}.ln2", e)
        for name in ("decay", "first"):
            leaves[f"{at}.attention.time_{name}"] = (e,)
        for name in ("key", "value", "receptance"):
            leaves[f"{at}.attention.time_mix_{name}"] = (1, 1, e)
            leaves |= linear(f"{at}.attention.{name}", e, e, bias=False)
        leaves |= linear(f"{at}.attention.output", e, e, bias=False)
        for name in ("key", "receptance"):
            leaves[f"{at}.feed_forward.time_mix_{name}"] = (1, 1, e)
        leaves |= linear(f"{at}.feed_forward.key", f, e, bias=False)
        leaves |= linear(f"{at}.feed_forward.receptance", e, e, bias=False)
        leaves |= linear(f"{at}.feed_forward.value", e, f, bias=False)
    return leaves | norm("rwkv.ln_out", e) | {"head.weight": (v, e)}


def xlstm(layers: int, e: int, f: int, v: int, h: int, q: int, d: int) -> Shapes:
    leaves: Shapes = {"backbone.embeddings.weight": (v, e)}
    for layer in range(layers):
        at = f"backbone.blocks.{layer}"
        leaves |= norm(f"{at}.norm_mlstm", e, bias=False)
        for name, size in (("q", h * q), ("k", h * q), ("v", h * d)):
            leaves |= linear(f"{at}.mlstm_layer.{name}", size, e, bias=False)
        leaves |= linear(f"{at}.mlstm_layer.ogate_preact", h * d, e, bias=False)
        leaves |= linear(f"{at}.mlstm_layer.igate_preact", h, e)
        leaves |= linear(f"{at}.mlstm_layer.fgate_preact", h, e)
        leaves |= norm(f"{at}.mlstm_layer.multihead_norm", h * d, bias=False)
        leaves |= linear(f"{at}.mlstm_layer.out_proj", e, h * d, bias=False)
        leaves |= norm(f"{at}.norm_ffn", e, bias=False)
        leaves |= linear(f"{at}.ffn.proj_up_gate", f, e, bias=False)
        leaves |= linear(f"{at}.ffn.proj_up", f, e, bias=False)
        leaves |= linear(f"{at}.ffn.proj_down", e, f, bias=False)
    leaves |= norm("backbone.out_norm", e, bias=False)
    return leaves | {"lm_head.weight": (v, e)}


def unet(c: int, e: int, t: int, x: int, f: int, blocks: int) -> Shapes:
    leaves = conv("conv_in", e, c, 3)
    leaves |= linear("time_embedding.linear_1", t, e)
    leaves |= linear("time_embedding.linear_2", t, t)

    def resnet(at: str, i: int) -> Shapes:
        own = norm(f"{at}.norm1", i) | conv(f"{at}.conv1", e, i, 3)
        own |= linear(f"{at}.time_emb_proj", e, t)
        own |= norm(f"{at}.norm2", e) | conv(f"{at}.conv2", e, e, 3)
        return own | (conv(f"{at}.conv_shortcut", e, i, 1) if i != e else {})

    def attention(at: str) -> Shapes:
        own = norm(f"{at}.norm", e) | linear(f"{at}.proj_in", e, e)
        here = f"{at}.transformer_blocks.0"
        for number, width in ((1, e), (2, x)):
            for name, size in (("to_q", e), ("to_k", width), ("to_v", width)):
                own |= linear(f"{here}.attn{number}.{name}", e, size, bias=False)
            own |= linear(f"{here}.attn{number}.to_out.0", e, e)
        for number in (1, 2, 3):
            own |= norm(f"{here}.norm{number}", e)
        own |= linear(f"{here}.ff.net.0.proj", 2 * f, e)
        own |= linear(f"{here}.ff.net.2", e, f)
        return own | linear(f"{at}.proj_out", e, e)

    for block in range(blocks):
        at = f"down_blocks.{block}"
        for number in range(2):
            leaves |= resnet(f"{at}.resnets.{number}", e)
            leaves |= attention(f"{at}.attentions.{number}")
        leaves |= conv(f"{at}.downsamplers.0.conv", e, e, 3)
    leaves |= resnet("mid_block.resnets.0", e) | resnet("mid_block.resnets.1", e)
    leaves |= attention("mid_block.attentions.0")
    for block in range(blocks):
        at = f"up_blocks.{block}"
        for number in range(3):
            leaves |= resnet(f"{at}.resnets.{number}", 2 * e)
            leaves |= attention(f"{at}.attentions.{number}")
        leaves |= conv(f"{at}.upsamplers.0.conv", e, e, 3)
    return leaves | norm("conv_norm_out", e) | conv("conv_out", c, e, 3)


def clip(
    layers: int, e: int, w: int, f: int, g: int, v: int, n: int, **more: int
) -> Shapes:
    leaves: Shapes = {
        "positional_embedding": (n, w),
        "text_projection": (w, more["d"]),
        "logit_scale": (),
        "visual.class_embedding": (e,),
        "visual.positional_embedding": (more["m"], e),
        "visual.proj": (e, more["d"]),
        "visual.conv1.weight": (e, 3, more["p"], more["p"]),
    }
    leaves |= norm("visual.ln_pre", e)
    for tower, width, hidden in (("visual.", e, f), ("", w, g)):
        for layer in range(layers):
            at = f"{tower}transformer.resblocks.{layer}"
            leaves |= norm(f"{at}.ln_1", width)
            leaves[f"{at}.attn.in_proj_weight"] = (3 * width, width)
            leaves[f"{at}.attn.in_proj_bias"] = (3 * width,)
            leaves |= linear(f"{at}.attn.out_proj", width, width)
            leaves |= norm(f"{at}.ln_2", width)
            leaves |= linear(f"{at}.mlp.c_fc", hidden, width)
            leaves |= linear(f"{at}.mlp.c_proj", width, hidden)
        leaves |= norm("visual.ln_post", e) if tower else {}
    return leaves | {"token_embedding.weight": (v, w)} | norm("ln_final", w)


def both(
    old: str, new: str, weight: str, kernel: str, k: str = "scale"
) -> dict[str, str]:
    """A weight with axes, and a bias."""
    lead = "" if "{l}" in new or "{l}" not in old else "l "
    bias = kernel.split()[-1] if " " in kernel else kernel
    return {
        f"{old}.weight : {weight}": f"{new}/{k} : {lead}{kernel}",
        f"{old}.bias : {bias}": f"{new}/bias : {lead}{bias}",
    }


def dense(old: str, new: str) -> dict[str, str]:
    return both(old, new, "o i", "i o", "kernel")


def square(old: str, new: str) -> dict[str, str]:
    return both(old, new, "o i h w", "h w i o", "kernel")


def only(rows: dict[str, str]) -> dict[str, str]:
    """The row of the weight."""
    return {old: new for old, new in rows.items() if ".weight" in old}


BLOCK = "stages.{s}.blocks.{b}"
CONVNEXT: dict[str, dict[Any, Any]] = {
    "by layer": square("stem.0", "stem_conv")
    | both("stem.1", "stem_norm", "e", "e")
    | both("stages.{s}.downsample.0", "downsample_{s}/norm", "e", "e")
    | square("stages.{s}.downsample.1", "downsample_{s}/conv")
    | {f"{BLOCK}.gamma": "stage_{s}/block_{b}/layer_scale"}
    | square(f"{BLOCK}.conv_dw", "stage_{s}/block_{b}/dwconv")
    | both(f"{BLOCK}.norm", "stage_{s}/block_{b}/norm", "e", "e")
    | dense(f"{BLOCK}.mlp.fc1", "stage_{s}/block_{b}/pwconv1")
    | dense(f"{BLOCK}.mlp.fc2", "stage_{s}/block_{b}/pwconv2")
    | both("head.norm", "final_norm", "e", "e")
    | dense("head.fc", "classifier"),
    "stacked": square("stem.0", "patchify")
    | both("stem.1", "patchify_ln", "e", "e")
    | both("stages.{s}.downsample.0", "stages/{s}/down/ln", "e", "e")
    | square("stages.{s}.downsample.1", "stages/{s}/down/conv")
    | {
        f"{BLOCK}.gamma : e": "stages/{s}/blocks/gamma : b e",
        f"{BLOCK}.conv_dw.weight : o i h w": "stages/{s}/blocks/dw/w : b h w i o",
        f"{BLOCK}.conv_dw.bias : o": "stages/{s}/blocks/dw/b : b o",
        f"{BLOCK}.norm.weight : e": "stages/{s}/blocks/ln/scale : b e",
        f"{BLOCK}.norm.bias : e": "stages/{s}/blocks/ln/offset : b e",
        f"{BLOCK}.mlp.fc1.weight : o i": "stages/{s}/blocks/expand/w : b i o",
        f"{BLOCK}.mlp.fc1.bias : o": "stages/{s}/blocks/expand/b : b o",
        f"{BLOCK}.mlp.fc2.weight : o i": "stages/{s}/blocks/contract/w : b i o",
        f"{BLOCK}.mlp.fc2.bias : o": "stages/{s}/blocks/contract/b : b o",
    }
    | both("head.norm", "ln_f", "e", "e")
    | dense("head.fc", "logits"),
}
AT = "rwkv.blocks.{l}"
RWKV: dict[str, dict[Any, Any]] = {
    "by layer": {"rwkv.embeddings.weight": "emb/embedding"}
    | both("rwkv.blocks.0.pre_ln", "ln0", "e", "e")
    | both(f"{AT}.ln1", "blocks_{l}/ln1", "e", "e")
    | both(f"{AT}.ln2", "blocks_{l}/ln2", "e", "e")
    | {
        AT + ".attention.time_{n=decay,first}": "blocks_{l}/att/time_{n}",
        AT + ".attention.time_mix_{n=key,value,receptance} : 1 1 e": (
            "blocks_{l}/att/time_mix_{n=k,v,r} : e"
        ),
        AT + ".attention.{n=key,value,receptance,output}.weight : o i": (
            "blocks_{l}/att/{n}/kernel : i o"
        ),
        AT + ".feed_forward.time_mix_{n=key,receptance} : 1 1 e": (
            "blocks_{l}/ffn/time_mix_{n=k,r} : e"
        ),
        AT + ".feed_forward.{n=key,receptance,value}.weight : o i": (
            "blocks_{l}/ffn/{n}/kernel : i o"
        ),
    }
    | both("rwkv.ln_out", "ln_out", "e", "e")
    | {"head.weight : v e": "head/kernel : e v"},
    "stacked": {"rwkv.embeddings.weight": "embed"}
    | both("rwkv.blocks.0.pre_ln", "norm_in", "e", "e")
    | both(f"{AT}.ln1", "layers/time_norm", "e", "e")
    | both(f"{AT}.ln2", "layers/channel_norm", "e", "e")
    | {
        AT + ".attention.time_{n=decay,first} : e": (
            "layers/time_mix/{n=decay,bonus} : l e"
        ),
        AT + ".attention.time_mix_{n=key,value,receptance} : 1 1 e": (
            "layers/time_mix/mix_{n=k,v,r} : l e"
        ),
        AT + ".attention.{n=key,value,receptance,output}.weight : o i": (
            "layers/time_mix/w_{n=k,v,r,o} : l i o"
        ),
        AT + ".feed_forward.time_mix_{n=key,receptance} : 1 1 e": (
            "layers/channel_mix/mix_{n=k,r} : l e"
        ),
        AT + ".feed_forward.{n=key,receptance,value}.weight : o i": (
            "layers/channel_mix/w_{n=k,r,v} : l i o"
        ),
    }
    | both("rwkv.ln_out", "norm_out", "e", "e")
    | {"head.weight : v e": "unembed : e v"},
}
CELL = "backbone.blocks.{l}.mlstm_layer"
XLSTM: dict[str, dict[Any, Any]] = {
    "by layer": {"backbone.embeddings.weight": "embedding/embedding"}
    | {
        "backbone.blocks.{l}.norm_{n=mlstm,ffn}.weight": "block_{l}/{n}_norm/scale",
        CELL + ".{n=q,k}.weight : (h q) e": "block_{l}/mlstm/{n}/kernel : e h q",
        f"{CELL}.v.weight : (h d) e": "block_{l}/mlstm/v/kernel : e h d",
        f"{CELL}.ogate_preact.weight : (h d) e": "block_{l}/mlstm/ogate/kernel : e h d",
        CELL + ".{n=i,f}gate_preact.weight : h e": (
            "block_{l}/mlstm/{n}gate/kernel : e h"
        ),
        CELL + ".{n=i,f}gate_preact.bias": "block_{l}/mlstm/{n}gate/bias",
        f"{CELL}.multihead_norm.weight : (h d)": (
            "block_{l}/mlstm/head_norm/scale : h d"
        ),
        f"{CELL}.out_proj.weight : e (h d)": "block_{l}/mlstm/out/kernel : h d e",
        "backbone.blocks.{l}.ffn.proj_{n=up_gate,up,down}.weight : o i": (
            "block_{l}/ffn/{n=gate,up,down}/kernel : i o"
        ),
        "backbone.out_norm.weight": "final_norm/scale",
        "lm_head.weight : v e": "lm_head/kernel : e v",
    },
    "stacked": {
        "backbone.embeddings.weight": "tok",
        "backbone.blocks.{l}.norm_{n=mlstm,ffn}.weight : e": (
            "scan/{n=cell,mlp}/prenorm : l e"
        ),
        CELL + ".{n=q,k,v}.weight : o i": "scan/cell/w{n} : l i o",
        CELL + ".{n=o,i,f}gate_preact.weight : o i": "scan/cell/w_{n}gate : l i o",
        CELL + ".{n=i,f}gate_preact.bias : o": "scan/cell/b_{n}gate : l o",
        f"{CELL}.multihead_norm.weight : e": "scan/cell/postnorm : l e",
        f"{CELL}.out_proj.weight : o i": "scan/cell/wo : l i o",
        "backbone.blocks.{l}.ffn.proj_{n=up_gate,up,down}.weight : o i": (
            "scan/mlp/{n=w_gate,w_up,w_down} : l i o"
        ),
        "backbone.out_norm.weight": "norm",
        "lm_head.weight : v e": "unembed : e v",
    },
}


def unet_rows(at: str, to: str, *, short: bool) -> dict[str, str]:
    """The rows of a residual block and of a transformer."""
    words = {
        "norm1": "norm_in" if short else "norm1",
        "conv1": "conv_in" if short else "conv1",
        "norm2": "norm_mid" if short else "norm2",
        "conv2": "conv_mid" if short else "conv2",
        "time_emb_proj": "time" if short else "time_emb_proj",
        "conv_shortcut": "skip" if short else "conv_shortcut",
    }
    old, new = (
        f"{at}.resnets.{{r}}",
        f"{to}/res_{{r}}" if short else f"{to}/resnets_{{r}}",
    )
    rows: dict[str, str] = {}
    for name, word in words.items():
        if name.startswith("norm"):
            rows |= both(f"{old}.{name}", f"{new}/{word}", "e", "e")
        elif name == "conv_shortcut" and not at.startswith("up"):
            continue
        elif name.startswith("conv"):
            rows |= square(f"{old}.{name}", f"{new}/{word}")
        else:
            rows |= dense(f"{old}.{name}", f"{new}/{word}")
    old, new = (
        f"{at}.attentions.{{r}}",
        f"{to}/{'attn' if short else 'attentions'}_{{r}}",
    )
    inner = f"{new}/block" if short else f"{new}/transformer_blocks_0"
    here = f"{old}.transformer_blocks.0"
    rows |= both(f"{old}.norm", f"{new}/norm", "e", "e")
    for name in ("proj_in", "proj_out"):
        rows |= dense(f"{old}.{name}", f"{new}/{name}")
    for number, word in (("1", "self"), ("2", "cross")):
        a = f"{inner}/{word}" if short else f"{inner}/attn{number}"
        for name in ("to_q", "to_k", "to_v"):
            new_name = name[-1] if short else name
            rows |= only(dense(f"{here}.attn{number}.{name}", f"{a}/{new_name}"))
        out = f"{a}/o" if short else f"{a}/to_out_0"
        rows |= dense(f"{here}.attn{number}.to_out.0", out)
    for number, word in (("1", "self_norm"), ("2", "cross_norm"), ("3", "mlp_norm")):
        new_name = word if short else f"norm{number}"
        rows |= both(f"{here}.norm{number}", f"{inner}/{new_name}", "e", "e")
    ff = "mlp" if short else "ff"
    rows |= dense(
        f"{here}.ff.net.0.proj", f"{inner}/{ff}/{'glu' if short else 'net_0/proj'}"
    )
    return rows | dense(
        f"{here}.ff.net.2", f"{inner}/{ff}/{'out' if short else 'net_2'}"
    )


def unet_table(*, short: bool) -> dict[Any, Any]:
    rows = square("conv_in", "stem" if short else "conv_in")
    for number in (1, 2):
        name = (
            f"time/dense_{number - 1}" if short else f"time_embedding/linear_{number}"
        )
        rows |= dense(f"time_embedding.linear_{number}", name)
    words = ("down", "up") if short else ("down_blocks", "up_blocks")
    for old, word, sampler in (
        ("down_blocks", words[0], "downsamplers"),
        ("up_blocks", words[1], "upsamplers"),
    ):
        at = f"{old}.{{b}}"
        rows |= unet_rows(at, f"{word}_{{b}}", short=short)
        new = "resample" if short else f"{sampler}_0/conv"
        rows |= square(f"{at}.{sampler}.0.conv", f"{word}_{{b}}/{new}")
    rows |= unet_rows("mid_block", "mid" if short else "mid_block", short=short)
    rows |= both("conv_norm_out", "final/norm" if short else "conv_norm_out", "e", "e")
    return rows | square("conv_out", "final/conv" if short else "conv_out")


def clip_rows(at: str, to: str, *, stacked: bool) -> dict[Any, Any]:
    old = f"{at}transformer.resblocks.{{l}}"
    if not stacked:
        new = f"{to}/layers_{{l}}"
        parts = ("query", "key", "value")
        return {
            f"{old}.attn.in_proj_weight : [o o o] i": tuple(
                f"{new}/self_attn/{part}/kernel : i o" for part in parts
            ),
            f"{old}.attn.in_proj_bias : [o o o]": tuple(
                f"{new}/self_attn/{part}/bias : o" for part in parts
            ),
            **both(f"{old}.ln_1", f"{new}/norm1", "e", "e"),
            **both(f"{old}.ln_2", f"{new}/norm2", "e", "e"),
            **dense(f"{old}.attn.out_proj", f"{new}/self_attn/out"),
            **dense(f"{old}.mlp.c_fc", f"{new}/mlp/fc1"),
            **dense(f"{old}.mlp.c_proj", f"{new}/mlp/fc2"),
        }
    new = f"{to}/blocks"
    return {
        f"{old}.attn.in_proj_weight : o i": f"{new}/mha/qkv/w : l i o",
        f"{old}.attn.in_proj_bias : o": f"{new}/mha/qkv/b : l o",
        **both(f"{old}.ln_1", f"{new}/ln_attn", "e", "e"),
        **both(f"{old}.ln_2", f"{new}/ln_mlp", "e", "e"),
        **dense(f"{old}.attn.out_proj", f"{new}/mha/proj"),
        **dense(f"{old}.mlp.c_fc", f"{new}/mlp/in"),
        **dense(f"{old}.mlp.c_proj", f"{new}/mlp/out"),
    }


CLIP: dict[str, dict[Any, Any]] = {
    style: {
        "logit_scale": "logit_scale",
        "positional_embedding": f"{txt}/{pos}",
        "visual.positional_embedding": f"{img}/{pos}",
        "visual.class_embedding": f"{img}/{cls}",
        "text_projection": f"{txt}/{proj}/kernel",
        "visual.proj": f"{img}/{proj}/kernel",
        "token_embedding.weight": f"{txt}/{tok}",
        **only(square("visual.conv1", f"{img}/{patch}")),
        **both("visual.ln_pre", f"{img}/{pre}", "e", "e"),
        **both("visual.ln_post", f"{img}/{post}", "e", "e"),
        **both("ln_final", f"{txt}/{post}", "e", "e"),
        **clip_rows("visual.", img, stacked=style == "stacked"),
        **clip_rows("", txt, stacked=style == "stacked"),
    }
    for style, img, txt, pos, cls, proj, tok, patch, pre, post in (
        (
            *("by layer", "vision_model", "text_model", "position_embedding/embedding"),
            *("class_embedding", "projection", "token_embedding/embedding"),
            *("patch_embedding", "pre_layernorm", "final_layernorm"),
        ),
        (
            *("stacked", "img", "txt", "pos", "cls", "proj", "tok", "patches"),
            *("ln_in", "ln_out"),
        ),
    )
}

MODELS = {
    "convnext": Model(
        convnext,
        {"e": 96, "f": 384, "c": 3, "k": 7, "p": 4, "n": 1_000, "blocks": 3},
        {"e": 11, "f": 13, "c": 3, "k": 5, "p": 7, "n": 17, "blocks": 4},
        CONVNEXT,
    ),
    "rwkv": Model(
        rwkv,
        {"layers": 12, "e": 768, "f": 3_072, "v": 50_277},
        {"layers": 5, "e": 11, "f": 13, "v": 17},
        RWKV,
    ),
    "xlstm": Model(
        xlstm,
        {
            "layers": 32,
            "e": 4_096,
            "f": 10_944,
            "v": 50_304,
            "h": 8,
            "q": 256,
            "d": 512,
        },
        {"layers": 11, "e": 13, "f": 17, "v": 19, "h": 3, "q": 5, "d": 7},
        XLSTM,
        ("h",),
    ),
    "unet": Model(
        unet,
        {"c": 4, "e": 320, "t": 1_280, "x": 768, "f": 1_280, "blocks": 3},
        {"c": 5, "e": 11, "t": 13, "x": 17, "f": 19, "blocks": 2},
        {"by layer": unet_table(short=False), "in short": unet_table(short=True)},
    ),
    "clip": Model(
        clip,
        {
            "layers": 12,
            "e": 768,
            "w": 512,
            "f": 3_072,
            "g": 2_048,
            "v": 49_408,
            "n": 77,
            "d": 512,
            "m": 50,
            "p": 32,
        },
        {
            "layers": 7,
            "e": 11,
            "w": 13,
            "f": 17,
            "g": 19,
            "v": 23,
            "n": 29,
            "d": 31,
            "m": 37,
            "p": 5,
        },
        CLIP,
    ),
}
