"""Six small models, their tables, and the mistakes that people make in such tables.

Written by somebody who had not read what ``find_wrong_rows`` tries. Each model has
names and axes of PyTorch on one side, and a tree on the other; the reference is the
model with what the right table makes of the source, so that only the table can be
wrong. A mistake is kept if the table still fits every shape and the answers differ.

``python tests/wrong_models.py`` searches for all of them, which takes half an hour on
two cores, and prints what was found; ``--help`` says how to choose some.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import multiprocessing
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import treeadapt as ta

HEADS, DIM, WIDTH, LAYERS = 2, 6, 12, 3
FAR = 4  # wrong rows, or a ring of three and one more


@dataclasses.dataclass(frozen=True)
class Model:
    """A model under two layouts.

    Attributes:
        name: what it is like.
        rows: the right table, as pairs of what ``Migration`` takes.
        sizes: sizes that no shape says.
        shapes: of the source, by name.
        apply: the answers to a tree of the new layout.
        mistakes: rows by the place of the right row that they replace, by what is
            wrong; none to drop it.
    """

    name: str
    rows: tuple[tuple[Any, Any], ...]
    sizes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    apply: Callable[[Any], Any]
    mistakes: dict[str, dict[int, tuple[tuple[Any, Any], ...]]]

    def table(self, *replaced: dict[int, tuple[tuple[Any, Any], ...]]) -> ta.Migration:
        """Return the table with some rows replaced."""
        changed = {place: rows for each in replaced for place, rows in each.items()}
        rows = [changed.get(place, (row,)) for place, row in enumerate(self.rows)]
        return ta.Migration(dict(itertools.chain(*rows)), sizes=self.sizes)

    @functools.cached_property
    def reference(self) -> Callable[[Any], Any]:
        """The answers to arrays of the source, compiled once for all tables."""
        right = self.table()
        return jax.jit(lambda leaves: self.apply(nested(right(leaves))))

    @functools.cached_property
    def compiled(self) -> Callable[[Any, Any], Any]:
        """The answers to a tree of the new layout in a dtype, compiled once."""

        def apply(params: Any, dtype: Any) -> Any:
            return self.apply(jax.tree.map(lambda leaf: leaf.astype(dtype), params))

        return jax.jit(apply, static_argnames="dtype")

    def source(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return numbers as training leaves them: no norm of ones, no bias of zeros."""
        rng = np.random.default_rng(seed)
        arrays = {}
        for name, shape in self.shapes.items():
            numbers = rng.normal(size=shape)
            if "var" in name:
                numbers = 0.5 + numbers**2
            elif len(shape) > 1:
                numbers = numbers / np.sqrt(np.prod(shape[1:]))
            elif "norm" in name and name.endswith("weight"):
                numbers = 1 + 0.3 * numbers
            arrays[name] = numbers.astype("float32")
        return arrays


def _norm(x: Any, own: Any) -> Any:
    x = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
    return x * own["scale"] + own["bias"]


def _rms(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def _attend(q: Any, k: Any, v: Any, *, is_causal: bool = False) -> Any:
    """Attend; ``[time, head, dimension]``, fewer heads of keys than of queries."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        logits = jnp.where(jnp.tri(*logits.shape[1:]) > 0, logits, -1e9)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(logits), v)


def _layer(tree: Any, number: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[number], tree)


def _self_attention(x: Any, own: Any, other: Any = None, **options: Any) -> Any:
    other = x if other is None else other
    q, k, v = (
        jnp.einsum("tm,mhd->thd", y, own[n]["kernel"]) + own[n].get("bias", 0)
        for n, y in zip("qkv", (x, other, other), strict=True)
    )
    mixed = _attend(q, k, v, **options)
    return jnp.einsum("thd,hdm->tm", mixed, own["out"]["kernel"]) + own["out"].get(
        "bias", 0
    )


def _attention_rows(old: str, new: str, *, bias: bool = True) -> list[tuple[Any, Any]]:
    """Return the rows of an attention of PyTorch, with a layer ``{l}`` in the name."""
    rows = [
        (f"{old}.{{p=q,k,v}}.weight : (h d) m", f"{new}/{{p}}/kernel : l m h d"),
        (f"{old}.o.weight : m (h d)", f"{new}/out/kernel : l h d m"),
    ]
    if bias:
        rows += [
            (f"{old}.{{p=q,k,v}}.bias : (h d)", f"{new}/{{p}}/bias : l h d"),
            (f"{old}.o.bias : m", f"{new}/out/bias : l m"),
        ]
    return rows


def _attention_shapes(prefix: str, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in "qkvo":
        shapes[f"{prefix}.{name}.weight"] = (WIDTH, WIDTH)
        if bias:
            shapes[f"{prefix}.{name}.bias"] = (WIDTH,)
    return shapes


def _norms(*names: str) -> dict[str, tuple[int, ...]]:
    return {f"{n}.{kind}": (WIDTH,) for n in names for kind in ("weight", "bias")}


# A vision transformer


def vit() -> Model:
    rows = [
        ("patch.weight : m c y x", "patch/kernel : y x c m"),
        ("patch.bias : m", "patch/bias : m"),
        ("cls_token : 1 1 m", "cls : m"),
        ("pos_embed : 1 n m", "pos : n m"),
        *_attention_rows("layer.{l}.attn", "blocks/attn"),
        ("layer.{l}.norm{n=1,2}.weight : m", "blocks/norm{n}/scale : l m"),
        ("layer.{l}.norm{n=1,2}.bias : m", "blocks/norm{n}/bias : l m"),
        ("layer.{l}.fc{n=1,2}.weight : o i", "blocks/mlp{n}/kernel : l i o"),
        ("layer.{l}.fc{n=1,2}.bias : o", "blocks/mlp{n}/bias : l o"),
        ("norm.weight : m", "norm/scale : m"),
        ("norm.bias : m", "norm/bias : m"),
        ("head.weight : o m", "head/kernel : m o"),
    ]
    shapes = {
        "patch.weight": (WIDTH, 3, 3, 3),
        "patch.bias": (WIDTH,),
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 5, WIDTH),
        **_norms("norm"),
        "head.weight": (WIDTH, WIDTH),
    }
    for n in range(LAYERS):
        shapes |= _attention_shapes(f"layer.{n}.attn")
        shapes |= _norms(f"layer.{n}.norm1", f"layer.{n}.norm2")
        for fc in ("fc1", "fc2"):
            shapes[f"layer.{n}.{fc}.weight"] = (WIDTH, WIDTH)
            shapes[f"layer.{n}.{fc}.bias"] = (WIDTH,)
    image = np.random.default_rng(7).normal(size=(2, 2, 3, 3, 3)).astype("float32")

    def apply(params: Any) -> Any:
        patches = jnp.einsum("abyxc,yxcm->abm", image, params["patch"]["kernel"])
        x = (patches + params["patch"]["bias"]).reshape(4, WIDTH)
        x = jnp.concatenate([params["cls"][None], x]) + params["pos"]
        for n in range(LAYERS):
            own = _layer(params["blocks"], n)
            x = x + _self_attention(_norm(x, own["norm1"]), own["attn"])
            y = _norm(x, own["norm2"]) @ own["mlp1"]["kernel"] + own["mlp1"]["bias"]
            x = x + jax.nn.gelu(y) @ own["mlp2"]["kernel"] + own["mlp2"]["bias"]
        return _norm(x, params["norm"])[0] @ params["head"]["kernel"]

    kernel = rows[0][1]
    mistakes = {
        "patch: rows and columns exchanged": {0: (("patch.weight : m c x y", kernel),)},
        "patch: channels as rows": {0: (("patch.weight : m y c x", kernel),)},
        "patch: channels last as in TensorFlow": {
            0: (("patch.weight : m y x c", kernel),)
        },
        "class token and bias of the patches": {
            1: (("patch.bias : m", "cls : m"),),
            2: (("cls_token : 1 1 m", "patch/bias : m"),),
        },
        "scale and bias of the last norm exchanged": {
            12: (("norm.weight : m", "norm/bias : m"),),
            13: (("norm.bias : m", "norm/scale : m"),),
        },
        "head not turned": {14: (("head.weight : m o", "head/kernel : m o"),)},
    }
    return Model("vit", tuple(rows), {"h": HEADS}, shapes, apply, mistakes)


# An encoder and a decoder of speech


def whisper() -> Model:
    rows = [
        ("encoder.conv{n=1,2}.weight : o i k", "encoder/conv{n}/kernel : k i o"),
        ("encoder.conv{n=1,2}.bias : o", "encoder/conv{n}/bias : o"),
        ("encoder.positions.weight : n m", "encoder/pos : n m"),
        *_attention_rows("encoder.layers.{l}.self_attn", "encoder/attn", bias=False),
        *_attention_rows("decoder.layers.{l}.self_attn", "decoder/attn", bias=False),
        *_attention_rows("decoder.layers.{l}.cross", "decoder/cross", bias=False),
        ("decoder.tokens.weight : v m", ("embed : v m", "head : m v")),
        ("decoder.positions.weight : n m", "decoder/pos : n m"),
        ("{s=encoder,decoder}.layers.{l}.fc1.weight : o i", "{s}/up : l i o"),
        ("{s=encoder,decoder}.layers.{l}.fc2.weight : o i", "{s}/down : l i o"),
        ("{s=encoder,decoder}.layers.{l}.norm.weight : m", "{s}/norm/scale : l m"),
        ("{s=encoder,decoder}.layers.{l}.norm.bias : m", "{s}/norm/bias : l m"),
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (WIDTH, WIDTH, 3),
        "encoder.conv2.weight": (WIDTH, WIDTH, 3),
        "encoder.conv1.bias": (WIDTH,),
        "encoder.conv2.bias": (WIDTH,),
        "encoder.positions.weight": (5, WIDTH),
        "decoder.tokens.weight": (WIDTH, WIDTH),
        "decoder.positions.weight": (5, WIDTH),
    }
    for side, n in itertools.product(("encoder", "decoder"), range(LAYERS)):
        prefix = f"{side}.layers.{n}"
        shapes |= _attention_shapes(f"{prefix}.self_attn", bias=False)
        if side == "decoder":
            shapes |= _attention_shapes(f"{prefix}.cross", bias=False)
        shapes[f"{prefix}.fc1.weight"] = shapes[f"{prefix}.fc2.weight"] = (WIDTH, WIDTH)
        shapes |= _norms(f"{prefix}.norm")
    sound = np.random.default_rng(7).normal(size=(5, WIDTH)).astype("float32")
    tokens = np.array([3, 1, 4, 1, 5])

    def conv(x: Any, own: Any) -> Any:
        padded = jnp.pad(x, ((1, 1), (0, 0)))
        taps = [padded[i : i + len(x)] @ own["kernel"][i] for i in range(3)]
        return jax.nn.gelu(sum(taps) + own["bias"])

    def apply(params: Any) -> Any:
        enc, dec = params["encoder"], params["decoder"]
        x = conv(conv(sound, enc["conv1"]), enc["conv2"]) + enc["pos"]
        for n in range(LAYERS):
            own = _layer({k: enc[k] for k in ("attn", "up", "down", "norm")}, n)
            x = x + _self_attention(_norm(x, own["norm"]), own["attn"])
            x = x + jax.nn.gelu(x @ own["up"]) @ own["down"]
        y = params["embed"][tokens] + dec["pos"]
        for n in range(LAYERS):
            own = _layer(
                {k: dec[k] for k in ("attn", "cross", "up", "down", "norm")}, n
            )
            z = _norm(y, own["norm"])
            y = y + _self_attention(z, own["attn"], is_causal=True)
            y = y + _self_attention(y, own["cross"], x)
            y = y + jax.nn.gelu(y @ own["up"]) @ own["down"]
        return y @ params["head"]

    def cross(old: str, new: str, place: int) -> dict[int, tuple[tuple[Any, Any], ...]]:
        (q, kernel), (o, out) = _attention_rows(
            f"decoder.layers.{{l}}.{old}", f"decoder/{new}", bias=False
        )
        return {place: ((q, kernel),), place + 1: ((o, out),)}

    mistakes = {
        "conv not turned": {
            0: (
                (
                    "encoder.conv{n=1,2}.weight : i o k",
                    "encoder/conv{n}/kernel : k i o",
                ),
            )
        },
        "self and cross attention exchanged": {
            **cross("self_attn", "cross", 5),
            **cross("cross", "attn", 7),
        },
        "positions of the encoder and the decoder exchanged": {
            2: (("encoder.positions.weight : n m", "decoder/pos : n m"),),
            10: (("decoder.positions.weight : n m", "encoder/pos : n m"),),
        },
        "head not turned": {
            9: (("decoder.tokens.weight : v m", ("embed : v m", "head : v m")),)
        },
        "embedding turned": {
            9: (("decoder.tokens.weight : v m", ("embed : m v", "head : m v")),)
        },
    }
    return Model("whisper", tuple(rows), {"h": HEADS}, shapes, apply, mistakes)


# A model of states


def mamba() -> Model:
    rank, states = 4, 4
    rows = [
        ("embed.weight : v m", "embed : v m"),
        ("layers.{l}.in_proj.weight : (p e) m", "blocks/in_{p=x,z} : l m e"),
        ("layers.{l}.conv1d.weight : e 1 k", "blocks/conv/kernel : l k e"),
        ("layers.{l}.conv1d.bias : e", "blocks/conv/bias : l e"),
        (
            "layers.{l}.x_proj.weight : [r n n] e",
            ("blocks/to_dt : l e r", "blocks/to_b : l e n", "blocks/to_c : l e n"),
        ),
        ("layers.{l}.dt_proj.weight : e r", "blocks/dt/kernel : l r e"),
        ("layers.{l}.dt_proj.bias : e", "blocks/dt/bias : l e"),
        ("layers.{l}.A_log : e n", "blocks/a_log : l n e"),
        ("layers.{l}.D : e", "blocks/d : l e"),
        ("layers.{l}.out_proj.weight : m e", "blocks/out : l e m"),
        ("layers.{l}.norm.weight : m", ("blocks/norm : l m", {"offset": -1.0})),
        ("norm_f.weight : m", ("norm : m", {"offset": -1.0})),
        ("lm_head.weight : v m", "head : m v"),
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (WIDTH, WIDTH),
        "norm_f.weight": (WIDTH,),
        "lm_head.weight": (WIDTH, WIDTH),
    }
    for n in range(LAYERS):
        for name, shape in {
            "in_proj.weight": (2 * WIDTH, WIDTH),
            "conv1d.weight": (WIDTH, 1, 4),
            "conv1d.bias": (WIDTH,),
            "x_proj.weight": (rank + 2 * states, WIDTH),
            "dt_proj.weight": (WIDTH, rank),
            "dt_proj.bias": (WIDTH,),
            "A_log": (WIDTH, states),
            "D": (WIDTH,),
            "out_proj.weight": (WIDTH, WIDTH),
            "norm.weight": (WIDTH,),
        }.items():
            shapes[f"layers.{n}.{name}"] = shape
    tokens = np.array([3, 1, 4, 1, 5, 9])

    def block(x: Any, own: Any) -> Any:
        y = _rms(x, 1 + own["norm"])
        u, z = y @ own["in_x"], y @ own["in_z"]
        padded = jnp.pad(u, ((3, 0), (0, 0)))
        taps = [padded[i : i + len(u)] * own["conv"]["kernel"][i] for i in range(4)]
        u = jax.nn.silu(sum(taps) + own["conv"]["bias"])
        dt = jax.nn.softplus(u @ own["to_dt"] @ own["dt"]["kernel"] + own["dt"]["bias"])
        b, c, a = u @ own["to_b"], u @ own["to_c"], -jnp.exp(own["a_log"])
        state, outs = jnp.zeros((states, WIDTH)), []
        for t in range(len(u)):
            state = jnp.exp(dt[t] * a) * state + b[t][:, None] * (dt[t] * u[t])
            outs.append(c[t] @ state + own["d"] * u[t])
        return x + (jnp.stack(outs) * jax.nn.silu(z)) @ own["out"]

    def apply(params: Any) -> Any:
        x = params["embed"][tokens]
        for n in range(LAYERS):
            x = block(x, _layer(params["blocks"], n))
        return _rms(x, 1 + params["norm"]) @ params["head"]

    x_proj = rows[4][0]
    mistakes = {
        "x and its gate exchanged": {
            1: ((rows[1][0], "blocks/in_{p=z,x} : l m e"),),
        },
        "x and its gate interleaved": {
            1: (("layers.{l}.in_proj.weight : (e p) m", rows[1][1]),),
        },
        "B and C exchanged": {
            4: (
                (
                    x_proj,
                    (
                        "blocks/to_dt : l e r",
                        "blocks/to_c : l e n",
                        "blocks/to_b : l e n",
                    ),
                ),
            )
        },
        "dt last": {
            4: (
                (
                    "layers.{l}.x_proj.weight : [n n r] e",
                    (
                        "blocks/to_b : l e n",
                        "blocks/to_c : l e n",
                        "blocks/to_dt : l e r",
                    ),
                ),
            )
        },
        "D and the bias of dt exchanged": {
            6: (("layers.{l}.dt_proj.bias : e", "blocks/d : l e"),),
            8: (("layers.{l}.D : e", "blocks/dt/bias : l e"),),
        },
        "bias of the convolution and of dt exchanged": {
            3: (("layers.{l}.conv1d.bias : e", "blocks/dt/bias : l e"),),
            6: (("layers.{l}.dt_proj.bias : e", "blocks/conv/bias : l e"),),
        },
        "the one of norms forgotten": {
            10: ((rows[10][0], "blocks/norm : l m"),),
        },
        "the one of the last norm forgotten": {11: ((rows[11][0], "norm : m"),)},
        "the one of the last norm added": {
            11: ((rows[11][0], ("norm : m", {"offset": 1.0})),)
        },
        "head from the embedding": {
            0: (("embed.weight : v m", ("embed : v m", "head : m v")),),
            12: (("lm_head.weight", None),),
        },
        "embedding and head exchanged": {
            0: (("embed.weight : v m", "head : m v"),),
            12: (("lm_head.weight : v m", "embed : v m"),),
        },
    }
    return Model("mamba", tuple(rows), {"p": 2, "n": states}, shapes, apply, mistakes)


# Convolutions


def convnext() -> Model:
    wide = WIDTH
    rows = [
        ("stem.weight : o i y x", "stem/kernel : y x i o"),
        ("stem_norm.weight : c", "stem_norm/scale : c"),
        ("stem_norm.bias : c", "stem_norm/bias : c"),
        ("stem_norm.running_{s=mean,var} : c", "stats/stem/{s} : c"),
        ("blocks.{l}.dwconv.weight : c 1 y x", "blocks/dw/kernel : l y x c"),
        ("blocks.{l}.dwconv.bias : c", "blocks/dw/bias : l c"),
        ("blocks.{l}.norm.weight : c", "blocks/norm/scale : l c"),
        ("blocks.{l}.norm.bias : c", "blocks/norm/bias : l c"),
        ("blocks.{l}.norm.running_{s=mean,var} : c", "stats/blocks/{s} : l c"),
        ("blocks.{l}.pwconv{n=1,2}.weight : o i", "blocks/pw{n}/kernel : l i o"),
        ("blocks.{l}.pwconv{n=1,2}.bias : o", "blocks/pw{n}/bias : l o"),
        ("blocks.{l}.gamma : c", "blocks/gamma : l c"),
        ("blocks.{l}.conv.weight : o i y x", "blocks/conv : l y x i o"),
        ("fc.weight : o i", "fc/kernel : i o"),
        ("fc.bias : o", "fc/bias : o"),
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "stem.weight": (wide, 3, 3, 3),
        "fc.weight": (wide, wide),
        "fc.bias": (wide,),
    }
    stats = ("weight", "bias", "running_mean", "running_var")
    shapes |= {f"stem_norm.{name}": (wide,) for name in stats}
    for n in range(LAYERS):
        shapes |= {f"blocks.{n}.norm.{name}": (wide,) for name in stats}
        shapes |= {
            f"blocks.{n}.dwconv.weight": (wide, 1, 3, 3),
            f"blocks.{n}.conv.weight": (wide, wide, 3, 3),
            f"blocks.{n}.gamma": (wide,),
            f"blocks.{n}.dwconv.bias": (wide,),
        }
        for name in ("pwconv1", "pwconv2"):
            shapes[f"blocks.{n}.{name}.weight"] = (wide, wide)
            shapes[f"blocks.{n}.{name}.bias"] = (wide,)
    image = np.random.default_rng(7).normal(size=(1, 5, 5, 3)).astype("float32")

    def conv(x: Any, kernel: Any, groups: int = 1) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=layout,
            feature_group_count=groups,
        )

    def batch_norm(x: Any, own: Any, stats: Any) -> Any:
        x = (x - stats["mean"]) / jnp.sqrt(stats["var"] + 1e-5)
        return x * own["scale"] + own["bias"]

    def apply(params: Any) -> Any:
        kernel = params["stem"]["kernel"]
        x = conv(image.astype(kernel.dtype), kernel)
        x = batch_norm(x, params["stem_norm"], params["stats"]["stem"])
        for n in range(LAYERS):
            own, stats = (_layer(t["blocks"], n) for t in (params, params["stats"]))
            y = conv(x, own["dw"]["kernel"][:, :, None], wide) + own["dw"]["bias"]
            y = batch_norm(y, own["norm"], stats)
            y = jax.nn.gelu(y @ own["pw1"]["kernel"] + own["pw1"]["bias"])
            y = y @ own["pw2"]["kernel"] + own["pw2"]["bias"]
            x = x + own["gamma"] * y
            x = x + 0.5 * jax.nn.relu(conv(x, own["conv"]))
        return x.mean((1, 2)) @ params["fc"]["kernel"] + params["fc"]["bias"]

    norm = "blocks.{l}.norm"
    mistakes = {
        "stem: rows and columns exchanged": {
            0: (("stem.weight : o i x y", rows[0][1]),)
        },
        "stem: channels last": {0: (("stem.weight : o y x i", rows[0][1]),)},
        "depthwise: rows and columns exchanged": {
            4: (("blocks.{l}.dwconv.weight : c 1 x y", rows[4][1]),)
        },
        "conv: inputs and outputs exchanged": {
            12: (("blocks.{l}.conv.weight : i o y x", rows[12][1]),)
        },
        "conv: rows and columns exchanged": {
            12: (("blocks.{l}.conv.weight : o i x y", rows[12][1]),)
        },
        "mean and bias exchanged": {
            2: (("stem_norm.bias : c", "stats/stem/mean : c"),),
            3: (
                ("stem_norm.running_mean : c", "stem_norm/bias : c"),
                ("stem_norm.running_var : c", "stats/stem/var : c"),
            ),
        },
        "scale and variance exchanged": {
            6: ((f"{norm}.weight : c", "stats/blocks/var : l c"),),
            8: (
                (f"{norm}.running_var : c", "blocks/norm/scale : l c"),
                (f"{norm}.running_mean : c", "stats/blocks/mean : l c"),
            ),
        },
        "gamma and scale exchanged": {
            6: ((f"{norm}.weight : c", "blocks/gamma : l c"),),
            11: (("blocks.{l}.gamma : c", "blocks/norm/scale : l c"),),
        },
        "bias of two layers exchanged": {
            5: (("blocks.{l}.dwconv.bias : c", "blocks/norm/bias : l c"),),
            7: ((f"{norm}.bias : c", "blocks/dw/bias : l c"),),
        },
    }
    return Model("convnext", tuple(rows), {}, shapes, apply, mistakes)


# A language model with fewer heads of keys


def llama(scale: float = 0.25) -> Model:
    heads, kv = 4, 2
    width = heads * DIM
    rows = [
        ("embed_tokens.weight : v m", ("embed : v m", {"scale": scale})),
        ("layers.{l}.q_proj.weight : (h two half) m", "blocks/q : l m h (half two)"),
        ("layers.{l}.k_proj.weight : (g two half) m", "blocks/k : l m g (half two)"),
        ("layers.{l}.v_proj.weight : (g d) m", "blocks/v : l m g d"),
        ("layers.{l}.o_proj.weight : m (h d)", "blocks/o : l h d m"),
        ("layers.{l}.{p=gate,up}_proj.weight : f m", "blocks/gate_up : l m p f"),
        ("layers.{l}.down_proj.weight : m f", "blocks/down : l f m"),
        (
            "layers.{l}.{n=input,post}_norm.weight : m",
            ("blocks/{n} : l m", {"offset": -1.0}),
        ),
        ("norm.weight : m", ("norm : m", {"offset": -1.0})),
        ("lm_head.weight : v m", ("head : m v", {"pad": {"v": (0, 3)}})),
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (width, width),
        "norm.weight": (width,),
        "lm_head.weight": (width, width),
    }
    for n in range(LAYERS):
        for name, shape in {
            "q_proj": (width, width),
            "k_proj": (kv * DIM, width),
            "v_proj": (kv * DIM, width),
            "o_proj": (width, width),
            "gate_proj": (width, width),
            "up_proj": (width, width),
            "down_proj": (width, width),
            "input_norm": (width,),
            "post_norm": (width,),
        }.items():
            shapes[f"layers.{n}.{name}.weight"] = shape
    tokens = np.array([3, 1, 4, 1, 5])

    def rotary(x: Any) -> Any:
        angles = jnp.arange(len(x))[:, None] / 10.0 ** (jnp.arange(DIM // 2) / 3)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        one, two = x[..., ::2], x[..., 1::2]
        pair = one * cos - two * sin, two * cos + one * sin
        return jnp.stack(pair, -1).reshape(x.shape)

    def apply(params: Any) -> Any:
        x = params["embed"][tokens] / scale
        for n in range(LAYERS):
            own = _layer(params["blocks"], n)
            y = _rms(x, 1 + own["input"])
            q, k, v = (jnp.einsum("tm,mhd->thd", y, own[name]) for name in "qkv")
            mixed = _attend(rotary(q), rotary(k), v, is_causal=True)
            x = x + jnp.einsum("thd,hdm->tm", mixed, own["o"])
            y = _rms(x, 1 + own["post"])
            gate, up = (y @ own["gate_up"][:, i] for i in (0, 1))
            x = x + (jax.nn.silu(gate) * up) @ own["down"]
        return _rms(x, 1 + params["norm"]) @ params["head"]

    q, k = rows[1][0], rows[2][0]
    mistakes = {
        "rotary of queries left in halves": {
            1: ((q, "blocks/q : l m h (two half)"),),
        },
        "rotary of keys left in halves": {2: ((k, "blocks/k : l m g (two half)"),)},
        "rotary of both left in halves": {
            1: ((q, "blocks/q : l m h (two half)"),),
            2: ((k, "blocks/k : l m g (two half)"),),
        },
        "rotary taken for neighbours": {
            1: (("layers.{l}.q_proj.weight : (h half two) m", rows[1][1]),)
        },
        "keys and values exchanged": {
            2: (("layers.{l}.k_proj.weight : (g d) m", "blocks/v : l m g d"),),
            3: (
                (
                    "layers.{l}.v_proj.weight : (g two half) m",
                    "blocks/k : l m g (half two)",
                ),
            ),
        },
        "gate and up exchanged": {
            5: (("layers.{l}.{p=up,gate}_proj.weight : f m", rows[5][1]),)
        },
        "up and down exchanged": {
            5: (
                (
                    "layers.{l}.{p=gate,down}_proj.weight : f m",
                    "blocks/gate_up : l m p f",
                ),
            ),
            6: (("layers.{l}.up_proj.weight : m f", "blocks/down : l f m"),),
        },
        "embedding not scaled": {0: (("embed_tokens.weight : v m", "embed : v m"),)},
        "norms without their one": {7: ((rows[7][0], "blocks/{n} : l m"),)},
        "norms exchanged": {
            7: (
                (
                    "layers.{l}.{n=input,post}_norm.weight : m",
                    ("blocks/{n=post,input} : l m", {"offset": -1.0}),
                ),
            )
        },
        "head padded in front": {
            9: ((rows[9][0], ("head : m v", {"pad": {"v": (3, 0)}})),)
        },
    }
    return Model(
        "llama", tuple(rows), {"h": heads, "g": kv, "two": 2}, shapes, apply, mistakes
    )


# A mixture of experts, its projections fused


def moe(experts: int = 3) -> Model:
    rows = [
        ("wte.weight : v m", "embed : v m"),
        ("h.{l}.qkv.weight : (p h d) m", "blocks/{p=q,k,v} : l m h d"),
        ("h.{l}.qkv.bias : (p h d)", "blocks/bias_{p=q,k,v} : l h d"),
        ("h.{l}.{n=q,k}_norm.weight : d", "blocks/norm_{n} : l d"),
        ("h.{l}.proj.weight : m (h d)", "blocks/out : l h d m"),
        ("h.{l}.router.weight : x m", "blocks/router : l m x"),
        ("h.{l}.experts.{x}.w{n=1,3}.weight : f m", "blocks/wi_{n} : l x m f"),
        ("h.{l}.experts.{x}.w2.weight : m f", "blocks/wo : l x f m"),
        ("h.{l}.shared.w{n=1,2,3}.weight : o i", "blocks/shared_{n} : l i o"),
        ("h.{l}.ln_{n=1,2}.weight : m", "blocks/ln_{n} : l m"),
        ("ln_f.weight : m", "ln_f : m"),
        ("lm_head.weight : v m", "head : m v"),
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (WIDTH, WIDTH),
        "ln_f.weight": (WIDTH,),
        "lm_head.weight": (WIDTH, WIDTH),
    }
    for n in range(LAYERS):
        h = f"h.{n}"
        shapes |= {
            f"{h}.qkv.weight": (3 * WIDTH, WIDTH),
            f"{h}.qkv.bias": (3 * WIDTH,),
            f"{h}.q_norm.weight": (DIM,),
            f"{h}.k_norm.weight": (DIM,),
            f"{h}.proj.weight": (WIDTH, WIDTH),
            f"{h}.router.weight": (experts, WIDTH),
            f"{h}.ln_1.weight": (WIDTH,),
            f"{h}.ln_2.weight": (WIDTH,),
        }
        for w in ("w1", "w2", "w3"):
            shapes[f"{h}.shared.{w}.weight"] = (WIDTH, WIDTH)
            for x in range(experts):
                shapes[f"{h}.experts.{x}.{w}.weight"] = (WIDTH, WIDTH)
    tokens = np.array([3, 1, 4, 1, 5])

    def apply(params: Any) -> Any:
        x = params["embed"][tokens]
        for n in range(LAYERS):
            own = _layer(params["blocks"], n)
            y = _rms(x, own["ln_1"])
            q, k, v = (
                jnp.einsum("tm,mhd->thd", y, own[p]) + own[f"bias_{p}"] for p in "qkv"
            )
            q, k = _rms(q, own["norm_q"]), _rms(k, own["norm_k"])
            mixed = _attend(q, k, v, is_causal=True)
            x = x + jnp.einsum("thd,hdm->tm", mixed, own["out"])
            y = _rms(x, own["ln_2"])
            scores = jax.nn.softmax(y @ own["router"])
            top, chosen = jax.lax.top_k(scores, 2)
            weights = (jax.nn.one_hot(chosen, experts) * top[..., None]).sum(1)
            gate = jnp.einsum("tm,xmf->txf", y, own["wi_1"])
            up = jnp.einsum("tm,xmf->txf", y, own["wi_3"])
            out = jnp.einsum("txf,xfm->txm", jax.nn.silu(gate) * up, own["wo"])
            shared = jax.nn.silu(y @ own["shared_1"]) * (y @ own["shared_3"])
            x = x + jnp.einsum("tx,txm->tm", weights, out) + shared @ own["shared_2"]
        return _rms(x, params["ln_f"]) @ params["head"]

    qkv = "blocks/{p=q,k,v} : l m h d"
    mistakes = {
        "fused by heads": {1: (("h.{l}.qkv.weight : (h p d) m", qkv),)},
        "fused by heads, parts innermost": {
            1: (("h.{l}.qkv.weight : (h d p) m", qkv),)
        },
        "bias fused by heads": {2: (("h.{l}.qkv.bias : (h p d)", rows[2][1]),)},
        "keys before queries": {
            1: ((rows[1][0], "blocks/{p=k,q,v} : l m h d"),),
        },
        "values before keys": {1: ((rows[1][0], "blocks/{p=q,v,k} : l m h d"),)},
        "bias of keys and values exchanged": {
            2: ((rows[2][0], "blocks/bias_{p=q,v,k} : l h d"),)
        },
        "layers and experts exchanged": {
            7: (("h.{l}.experts.{x}.w2.weight : m f", "blocks/wo : x l f m"),)
        },
        "w1 and w3 of experts exchanged": {
            6: ((rows[6][0], "blocks/wi_{n=3,1} : l x m f"),)
        },
        "w2 and w3 of experts exchanged": {
            6: (
                ("h.{l}.experts.{x}.w1.weight : f m", "blocks/wi_1 : l x m f"),
                ("h.{l}.experts.{x}.w2.weight : f m", "blocks/wi_3 : l x m f"),
            ),
            7: (("h.{l}.experts.{x}.w3.weight : m f", "blocks/wo : l x f m"),),
        },
        "w1 and w2 of the shared expert exchanged": {
            8: ((rows[8][0], "blocks/shared_{n=2,1,3} : l i o"),)
        },
        "norms of a block exchanged": {9: ((rows[9][0], "blocks/ln_{n=2,1} : l m"),)},
        "embedding and head exchanged": {
            0: (("wte.weight : v m", "head : m v"),),
            11: (("lm_head.weight : v m", "embed : v m"),),
        },
        "one expert takes the place of another": {
            7: (("h.{l}.experts.{x=1,0,2}.w2.weight : m f", "blocks/wo : l x f m"),)
        },
    }
    return Model("moe", tuple(rows), {"h": HEADS, "d": DIM}, shapes, apply, mistakes)


MODELS = (vit, whisper, mamba, convnext, llama, moe)


# What goes wrong in any row


_AXES = re.compile(r"(?<= : ).*")
_LIST = re.compile(r"\{(\w+)=([\w,]+)\}")


def _with_axes(address: str, axes: str) -> str:
    return _AXES.sub(lambda _: axes, address)


def common_mistakes(model: Model) -> Iterator[tuple[str, dict[int, Any]]]:
    """Yield what people get wrong in any row: rows by the place that they replace."""
    for place, (source, target) in enumerate(model.rows):
        if not isinstance(source, str) or target is None:
            continue
        axes = _AXES.search(source)
        words = axes[0].split() if axes else []
        names = re.findall(r"\w+", axes[0]) if axes else []
        # A map that is not turned: two axes of the array exchanged.
        if len(words) == 2 and "(" not in axes[0] and "[" not in axes[0]:
            turned = _with_axes(source, " ".join(words[::-1]))
            yield f"{place}: not turned", {place: ((turned, target),)}
        # Layers that are not in their order.
        if "{l}" in source:
            text = source.replace("{l}", "{l=1,0,2}")
            yield f"{place}: two layers exchanged", {place: ((text, target),)}
        # The order of names in an axis.
        inner = re.search(r"\(([^()]+)\)", source)
        if inner:
            parts = inner[1].split()
            for order in itertools.permutations(parts):
                if [*order] != parts:
                    text = source.replace(inner[0], f"({' '.join(order)})")
                    yield f"{place}: {inner[0]} as {order}", {place: ((text, target),)}
        # A composed axis and the other one exchanged.
        if inner and len(names) > 2 and " : (" in source:
            outer = _AXES.search(source)[0].replace(inner[0], "").strip()
            if outer and " " not in outer and outer != "1":
                text = _with_axes(source, f"{outer} {inner[0]}")
                yield f"{place}: composed axis last", {place: ((text, target),)}
        # The texts of a list in another order, on one side.
        listed = _LIST.search(source)
        if listed and isinstance(target, str | tuple):
            texts = listed[2].split(",")
            first = target if isinstance(target, str) else target[0]
            if f"{{{listed[1]}}}" in first:
                for order in itertools.permutations(texts):
                    if [*order] != texts:
                        new = f"{{{listed[1]}={','.join(order)}}}"
                        changed = first.replace(f"{{{listed[1]}}}", new)
                        whole = (
                            changed
                            if isinstance(target, str)
                            else (changed, *target[1:])
                        )
                        yield (
                            f"{place}: {texts} as {order}",
                            {place: ((source, whole),)},
                        )
            # One of them alone is not turned.
            if len(words) == 2 and "(" not in axes[0] and isinstance(target, str):
                for text in texts:
                    only = source.replace(listed[0], text)
                    goes = target.replace(f"{{{listed[1]}}}", text)
                    turned = _with_axes(only, " ".join(words[::-1]))
                    if goes != target:
                        rows = ((turned, goes), (source, target))
                        yield f"{place}: {text} not turned", {place: rows}
        # A scale or an offset too many.
        if len(names) == 1 and isinstance(target, str):
            for offset in (1.0, -1.0):
                value = (target, {"offset": offset})
                yield f"{place}: {offset:+}", {place: ((source, value),)}
    # Two rows whose sources take each other's place.
    plain = [
        (place, source, target)
        for place, (source, target) in enumerate(model.rows)
        if isinstance(source, str) and isinstance(target, str)
    ]
    for (a, source_a, target_a), (b, source_b, target_b) in itertools.combinations(
        plain, 2
    ):
        axes = [_AXES.search(each)[0] for each in (source_a, source_b)]
        captures = [re.findall(r"\{[^}]*\}", each) for each in (source_a, source_b)]
        if axes[0] == axes[1] and captures[0] == captures[1]:
            rows = {a: ((source_a, target_b),), b: ((source_b, target_a),)}
            yield f"{a} and {b} exchanged", rows


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *nodes, name = path.split("/")
        node = tree
        for each in nodes:
            node = node.setdefault(each, {})
        node[name] = leaf
    return tree


#: The name of a mistake, and the rows that have it, by their place.
Mistake: TypeAlias = tuple[str, dict[int, Any]]
#: The name of a mistake, the table with it, and the rows that have it.
WrongTable: TypeAlias = tuple[str, ta.Migration, dict[int, Any]]


def seen(model: Model, mistakes: Iterable[Mistake]) -> Iterator[WrongTable]:
    """Yield the tables with mistakes that fit and change the answers."""
    source, right = model.source(), model.table()
    params = nested(right(source))
    target = jax.eval_shape(lambda: params)
    apply = functools.partial(model.compiled, dtype="float32")
    answers = np.asarray(apply(params))
    for name, rows in mistakes:
        try:
            table = model.table(rows)
            made = nested(table(source, target))
        except ta.MigrationError:
            continue
        if not np.allclose(apply(made), answers, rtol=1e-3, atol=1e-4):
            yield name, table, rows


def wrong_tables(model: Model) -> Iterator[WrongTable]:
    """Yield every mistake of a model that fits and changes the answers."""
    yield from seen(model, [*model.mistakes.items(), *common_mistakes(model)])


def several_wrong(model: Model, num_rows: int, num_tables: int) -> Iterator[WrongTable]:
    """Yield tables with several mistakes, in different rows, drawn at random."""
    singles = [(name, rows) for name, _, rows in wrong_tables(model)]
    rng = np.random.default_rng(num_rows)

    def drawn() -> Iterator[Mistake]:
        while True:
            some = rng.choice(len(singles), num_rows, replace=False)
            yield from together([singles[i] for i in some])

    yield from itertools.islice(seen(model, drawn()), num_tables)


def together(mistakes: Sequence[Mistake]) -> Iterator[Mistake]:
    """Yield some mistakes as one, unless two are in one row."""
    rows = {place: new for _, each in mistakes for place, new in each.items()}
    if len(rows) == sum(len(each) for _, each in mistakes):
        yield " + ".join(name for name, _ in mistakes), rows


def rings(model: Model) -> Iterator[dict[int, Any]]:
    """Yield rows that fill each other's targets in a ring of three: no two exchange."""
    plain: dict[Any, list[int]] = {}
    for place, (source, target) in enumerate(model.rows):
        if isinstance(source, str) and isinstance(target, str):
            captures = tuple(re.findall(r"\{[^}]*\}", source))
            plain.setdefault((_AXES.search(source)[0], captures), []).append(place)
    for places in plain.values():
        for three in itertools.combinations(places, 3):
            for filled in ((*three[1:], three[0]), (three[2], *three[:2])):
                yield {
                    place: ((model.rows[place][0], model.rows[other][1]),)
                    for place, other in zip(three, filled, strict=True)
                }


def far_wrong(model: Model, num_tables: int) -> Iterator[WrongTable]:
    """Yield tables with more mistakes than edits of one another: drawn at random.

    A ring of three rows with another mistake, or four mistakes in different rows.
    """
    singles = [(name, rows) for name, _, rows in wrong_tables(model)]
    circles = [(f"ring of {[*rows]}", rows) for rows in rings(model)]
    rng = np.random.default_rng(60)

    def drawn() -> Iterator[Mistake]:
        while True:
            is_ring = bool(circles) and rng.random() < 0.5
            ring = [circles[rng.integers(len(circles))]] if is_ring else []
            some = rng.choice(len(singles), 1 if is_ring else 4, replace=False)
            yield from together([*ring, *(singles[i] for i in some)])

    yield from itertools.islice(seen(model, drawn()), num_tables)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a search for one mistake gave.

    Attributes:
        model: which one.
        name: what is wrong.
        is_mended: whether the mended table answers right on other numbers, too.
        is_false: whether a table is called mended that does not.
        is_first: whether all rows that it changes are among the wrong ones.
        found_by: what mended it: edits, or matching.
        evaluations: calls of the model and the reference.
        elapsed_s: seconds.
    """

    model: str
    name: str
    is_mended: bool
    is_false: bool
    is_first: bool
    found_by: str
    evaluations: int
    elapsed_s: float


def search(
    model: Model,
    name: str,
    table: ta.Migration,
    rows: dict[int, Any],
    *,
    by: str,
    dtype: Any = jnp.float32,
    tolerance: float = 1e-4,
    depth: int = 3,
) -> Outcome:
    """Search for the wrong rows of one table."""
    source, right = model.source(), model.table()
    target = jax.eval_shape(lambda: nested(right(source)))
    apply = functools.partial(model.compiled, dtype="float32")
    reference = model.reference

    start = time.monotonic()
    report = ta.find_wrong_rows(
        table,
        source,
        target,
        functools.partial(model.compiled, dtype=jnp.dtype(dtype).name),
        reference if by == "function" else reference(source),
        tolerance=tolerance,
        depth=depth,
    )
    elapsed = time.monotonic() - start
    is_right = False
    if report.migration is not None:
        other = model.source(seed=5)
        made = np.asarray(apply(nested(report.migration(other, target))))
        is_right = np.allclose(made, reference(other), rtol=1e-3, atol=1e-3)
    texts = {
        ", ".join(one) if isinstance(one, tuple) else one
        for place in rows
        for one, _ in rows[place]
    }
    changed = {row for change in report.changes for row in change.rows}
    return Outcome(
        model.name,
        name,
        is_mended=report.found and is_right,
        is_false=report.found and not is_right,
        is_first=bool(changed) and all(any(t in row for t in texts) for row in changed),
        found_by=report.found_by,
        evaluations=report.evaluations,
        elapsed_s=elapsed,
    )


def _searched(job: tuple[int, int, str, int, str, float]) -> list[Outcome]:
    place, num_rows, by, num_tables, dtype, tolerance = job
    model = MODELS[place]()
    if num_rows == 1:
        tables = [*wrong_tables(model)]
        tables = tables[:: max(1, len(tables) // num_tables)] if num_tables else tables
    elif num_rows == FAR:
        tables = [*far_wrong(model, num_tables or 10)]
    else:
        tables = [*several_wrong(model, num_rows, num_tables or 12)]
    kind = jnp.dtype(dtype)
    return [
        search(model, *each, by=by, dtype=kind, tolerance=tolerance) for each in tables
    ]


def main() -> None:
    """Search for the mistakes and print what was found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[1, 2, 3], help=f"{FAR}: further away"
    )
    parser.add_argument("--by", nargs="*", default=["function", "answers"])
    parser.add_argument("--tables", type=int, default=0, help="of each model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--models", type=int, nargs="*", default=range(len(MODELS)))
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for num_rows, by in itertools.product(args.rows, args.by):
            jobs = [
                (place, num_rows, by, args.tables, args.dtype, args.tolerance)
                for place in args.models
            ]
            total: list[Outcome] = []
            for outcomes in pool.imap(_searched, jobs):
                total += outcomes
                _print(f"{outcomes[0].model}, {num_rows} by {by}", outcomes)
                for each in outcomes:
                    if not each.is_mended or each.is_false:
                        print(f"    {each}", flush=True)
            _print(f"all, {num_rows} by {by}", total)


def _print(title: str, outcomes: list[Outcome]) -> None:
    counts = (
        f"{sum(each.is_mended for each in outcomes)} of {len(outcomes)} mended",
        f"{sum(each.is_false for each in outcomes)} false",
        f"{sum(each.is_first for each in outcomes)} name only wrong rows",
        f"{sum(each.found_by == 'matching' for each in outcomes)} by matching",
        f"{np.median([each.evaluations for each in outcomes]):.0f} evaluations",
        f"{np.median([each.elapsed_s for each in outcomes]):.1f} s (medians)",
    )
    print(f"{title}: {', '.join(counts)}", flush=True)


if __name__ == "__main__":
    main()
