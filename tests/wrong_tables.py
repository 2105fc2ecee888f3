"""Tiny models with right tables, and mistakes in tables: what is to be found.

The mistakes are edits of the text of a table. They are written without a look at what
``find_wrong_rows`` tries, and kept if the table still fits and its answers differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treeadapt as ta

TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models with the same numbers.

    Attributes:
        table: the right one.
        sizes: of it.
        shapes: of the leaves under the old names.
        forward: the new model.
        new: what fills leaves.
    """

    table: Mapping[Any, Any]
    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    forward: Callable[[Any], Any]

    def migration(self, table: Any = None) -> ta.Migration:
        return ta.Migration(self.table if table is None else table, sizes=self.sizes)

    def source(self, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {
            path: (
                np.exp(0.3 * rng.normal(size=shape))
                if len(shape) == 1 and "bias" not in path
                else rng.normal(size=shape) / max(shape[-1], 1) ** 0.5
            ).astype(np.float32)
            for path, shape in self.shapes.items()
        }

    @property
    def target(self) -> Any:
        shapes = {
            "gpt2": GPT2_TARGET,
            "llama": LLAMA_TARGET,
            "conv": CONV_TARGET,
        }[NAMES[id(self.forward)]]
        return {p: jax.ShapeDtypeStruct(s, np.float32) for p, s in shapes.items()}

    def reference(self) -> Callable[[Any], Any]:
        right, target = self.migration(), self.target
        return jax.jit(lambda flat: self.forward(right(flat, target)))


def as_usual(model: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a model broadcast as models do."""

    def allowed(params: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            return model(params)

    return allowed


def norm(x: Any, scale: Any, bias: Any = None) -> Any:
    if bias is not None:
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * scale if bias is None else x * scale + bias


def attention(q: Any, k: Any, v: Any) -> Any:
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e9))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


LAYERS, E, H, K, D, F, V = 2, 12, 2, 1, 6, 12, 12


@as_usual
def gpt2(p: Any) -> Any:
    x = p["wte"][TOKENS] + p["wpe"][: TOKENS.shape[1]]
    outputs = []
    for i in range(LAYERS):
        y = norm(x, p["ln1/scale"][i], p["ln1/bias"][i])
        q, k, v = (
            jnp.einsum("bte,ehd->bthd", y, p[f"{n}/kernel"][i]) + p[f"{n}/bias"][i]
            for n in "qkv"
        )
        out = jnp.einsum("bthd,hde->bte", attention(q, k, v), p["o/kernel"][i])
        x = x + out + p["o/bias"][i]
        y = norm(x, p["ln2/scale"][i], p["ln2/bias"][i])
        y = jax.nn.gelu(y @ p["fc/kernel"][i] + p["fc/bias"][i])
        x = x + y @ p["proj/kernel"][i] + p["proj/bias"][i]
        outputs.append(x)
    return [*outputs, norm(x, p["ln_f/scale"], p["ln_f/bias"]) @ p["wte"].T]


GPT2_TABLE = {
    "wte.weight : v e": "wte : v e",
    "wpe.weight : t e": "wpe : t e",
    "h.{l}.ln_{n}.weight : e": "ln{n}/scale : l e",
    "h.{l}.ln_{n}.bias : e": "ln{n}/bias : l e",
    "h.{l}.attn.c_attn.weight : e [(h d) (h d) (h d)]": (
        "q/kernel : l e h d",
        "k/kernel : l e h d",
        "v/kernel : l e h d",
    ),
    "h.{l}.attn.c_attn.bias : [(h d) (h d) (h d)]": (
        "q/bias : l h d",
        "k/bias : l h d",
        "v/bias : l h d",
    ),
    "h.{l}.attn.c_proj.weight : (h d) e": "o/kernel : l h d e",
    "h.{l}.attn.c_proj.bias : e": "o/bias : l e",
    "h.{l}.mlp.c_{m=fc,proj}.weight : i o": "{m=fc,proj}/kernel : l i o",
    "h.{l}.mlp.c_{m=fc,proj}.bias : o": "{m=fc,proj}/bias : l o",
    "ln_f.weight": "ln_f/scale",
    "ln_f.bias": "ln_f/bias",
}
GPT2_SHAPES = {
    "wte.weight": (V, E),
    "wpe.weight": (V, E),
    **{
        f"h.{i}.{name}": shape
        for i in range(LAYERS)
        for name, shape in {
            "ln_1.weight": (E,),
            "ln_1.bias": (E,),
            "ln_2.weight": (E,),
            "ln_2.bias": (E,),
            "attn.c_attn.weight": (E, 3 * E),
            "attn.c_attn.bias": (3 * E,),
            "attn.c_proj.weight": (E, E),
            "attn.c_proj.bias": (E,),
            "mlp.c_fc.weight": (E, F),
            "mlp.c_fc.bias": (F,),
            "mlp.c_proj.weight": (F, E),
            "mlp.c_proj.bias": (E,),
        }.items()
    },
    "ln_f.weight": (E,),
    "ln_f.bias": (E,),
}
GPT2_TARGET = {
    "wte": (V, E),
    "wpe": (V, E),
    **{f"ln{n}/{kind}": (LAYERS, E) for n in "12" for kind in ("scale", "bias")},
    **{f"{n}/kernel": (LAYERS, E, H, D) for n in "qkv"},
    **{f"{n}/bias": (LAYERS, H, D) for n in "qkv"},
    "o/kernel": (LAYERS, H, D, E),
    "o/bias": (LAYERS, E),
    "fc/kernel": (LAYERS, E, F),
    "fc/bias": (LAYERS, F),
    "proj/kernel": (LAYERS, F, E),
    "proj/bias": (LAYERS, E),
    "ln_f/scale": (E,),
    "ln_f/bias": (E,),
}


def rotated(x: Any) -> Any:
    """Rotate neighbours by the position."""
    angles = np.arange(x.shape[1])[:, None] / 10 ** (np.arange(D // 2) / 2)
    one, two = x[..., ::2], x[..., 1::2]
    cos, sin = (f(angles)[None, :, None].astype(np.float32) for f in (np.cos, np.sin))
    both = jnp.stack([one * cos - two * sin, two * cos + one * sin], -1)
    return both.reshape(x.shape)


LH = 4  # heads of queries
LK = 2


@as_usual
def llama(p: Any) -> Any:
    x = p["embed"][TOKENS]
    outputs = []
    for i in range(LAYERS):
        y = norm(x, p["attn_norm"][i])
        q = rotated(jnp.einsum("bte,ehd->bthd", y, p["q"][i]))
        k = rotated(jnp.einsum("bte,ekd->btkd", y, p["kv"][i, 0]))
        v = jnp.einsum("bte,ekd->btkd", y, p["kv"][i, 1])
        k, v = (jnp.repeat(a, LH // LK, 2) for a in (k, v))
        x = x + jnp.einsum("bthd,hde->bte", attention(q, k, v), p["o"][i])
        y = norm(x, p["mlp_norm"][i])
        y = jax.nn.silu(y @ p["gate"][i]) * (y @ p["up"][i])
        x = x + y @ p["down"][i]
        outputs.append(x)
    return [*outputs, norm(x, p["norm"]) @ p["head"]]


LE = LH * D
LLAMA_TABLE = {
    "model.embed_tokens.weight": "embed",
    "layers.{l}.input_layernorm.weight : e": ("attn_norm : l e", {"offset": 1}),
    "layers.{l}.post_attention_layernorm.weight : e": (
        "mlp_norm : l e",
        {"offset": 1},
    ),
    "layers.{l}.self_attn.q_proj.weight : (h two half) e": "q : l e h (half two)",
    (
        "layers.{l}.self_attn.k_proj.weight : (k two half) e",
        "layers.{l}.self_attn.v_proj.weight : (k half two) e",
    ): "kv : l [1 1] e k (half two)",
    "layers.{l}.self_attn.o_proj.weight : e (h d)": "o : l h d e",
    "layers.{l}.mlp.{p=gate,up}_proj.weight : f e": "{p=gate,up} : l e f",
    "layers.{l}.mlp.down_proj.weight : e f": "down : l f e",
    "norm.weight": ("norm", {"offset": 1}),
    "lm_head.weight : v e": "head : e v",
}
LLAMA_SHAPES = {
    "model.embed_tokens.weight": (LE, LE),
    **{
        f"layers.{i}.{name}.weight": shape
        for i in range(LAYERS)
        for name, shape in {
            "input_layernorm": (LE,),
            "post_attention_layernorm": (LE,),
            "self_attn.q_proj": (LE, LE),
            "self_attn.k_proj": (LK * D, LE),
            "self_attn.v_proj": (LK * D, LE),
            "self_attn.o_proj": (LE, LE),
            "mlp.gate_proj": (LE, LE),
            "mlp.up_proj": (LE, LE),
            "mlp.down_proj": (LE, LE),
        }.items()
    },
    "norm.weight": (LE,),
    "lm_head.weight": (LE, LE),
}
LLAMA_TARGET = {
    "embed": (LE, LE),
    "attn_norm": (LAYERS, LE),
    "mlp_norm": (LAYERS, LE),
    "q": (LAYERS, LE, LH, D),
    "kv": (LAYERS, 2, LE, LK, D),
    "o": (LAYERS, LH, D, LE),
    "gate": (LAYERS, LE, LE),
    "up": (LAYERS, LE, LE),
    "down": (LAYERS, LE, LE),
    "norm": (LE,),
    "head": (LE, LE),
}

IMAGES = np.random.default_rng(1).normal(size=(2, 5, 5, 6)).astype(np.float32)


@as_usual
def conv(p: Any) -> Any:
    x = IMAGES
    outputs = []
    for i in range(2):
        x = jax.lax.conv_general_dilated(
            x,
            p[f"conv{i}/kernel"],
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = (x - p[f"bn{i}/mean"]) / jnp.sqrt(p[f"bn{i}/var"] + 1e-5)
        x = jax.nn.gelu(x * p[f"bn{i}/scale"] + p[f"bn{i}/bias"])
        outputs.append(x)
        if not i:
            x = x[:, :, :, :]
    flat = x.reshape(len(x), -1)
    return [*outputs, flat @ p["head/kernel"] + p["head/bias"]]


C = 6
CONV_TABLE = {
    "conv{n}.weight : o i h w": "conv{n}/kernel : h w i o",
    "bn{n}.weight": "bn{n}/scale",
    "bn{n}.bias": "bn{n}/bias",
    "bn{n}.running_{s=mean,var}": "bn{n}/{s=mean,var}",
    "fc.weight : o (c y x)": "head/kernel : (y x c) o",
    "fc.bias": "head/bias",
}
CONV_SHAPES = {
    **{
        f"{name.format(i)}": shape
        for i in range(2)
        for name, shape in {
            "conv{}.weight": (C, C, 2, 2),
            "bn{}.weight": (C,),
            "bn{}.bias": (C,),
            "bn{}.running_mean": (C,),
            "bn{}.running_var": (C,),
        }.items()
    },
    "fc.weight": (10, C * 3 * 3),
    "fc.bias": (10,),
}
CONV_TARGET = {
    **{f"conv{i}/kernel": (2, 2, C, C) for i in range(2)},
    **{f"bn{i}/{n}": (C,) for i in range(2) for n in ("scale", "bias", "mean", "var")},
    "head/kernel": (C * 3 * 3, 10),
    "head/bias": (10,),
}

NAMES = {id(gpt2): "gpt2", id(llama): "llama", id(conv): "conv"}
PAIRS = {
    "gpt2": Pair(GPT2_TABLE, {}, GPT2_SHAPES, gpt2),
    "llama": Pair(LLAMA_TABLE, {"two": 2}, LLAMA_SHAPES, llama),
    "conv": Pair(CONV_TABLE, {"y": 3, "x": 3}, CONV_SHAPES, conv),
}


def _texts(value: Any) -> tuple[tuple[str, ...], Any]:
    options = None
    if isinstance(value, tuple) and isinstance(value[-1], dict):
        value, options = value
    return (value if isinstance(value, tuple) else (value,)), options


def _row(sources: Any, targets: Any, options: Any) -> tuple[Any, Any]:
    source, target = (s[0] if len(s) == 1 else tuple(s) for s in (sources, targets))
    return source, (target, options) if options else target


def wrong_texts(text: str) -> Iterator[str]:
    """Yield one address with one mistake each."""
    path, _, axes = text.partition(" : ")
    words = re.findall(r"\[[^]]*\]|\([^)]*\)|\S+", axes)
    for a, b in itertools.combinations(range(len(words)), 2):
        order = [*words]
        order[a], order[b] = order[b], order[a]
        yield f"{path} : {' '.join(order)}"
    for inner in re.findall(r"\(([^()]*)\)", axes):
        names = inner.split()
        for order in itertools.permutations(names):
            yield f"{path} : {axes.replace(inner, ' '.join(order))}"
    yield text.replace("[(h d) (h d) (h d)]", "(h [d d d])")
    yield text.replace("(half two)", "(two half)")
    for listed in re.findall(r"=([\w,]+)\}", path):
        yield text.replace(listed, ",".join(reversed(listed.split(","))))


def mistakes(pair: Pair) -> list[list[tuple[Any, Any]]]:
    """Return tables with one wrong row that fit, and whose answers differ."""
    rows = [*pair.table.items()]
    edited: list[tuple[int, tuple[Any, Any]]] = []
    tables = []
    for place, (source, value) in enumerate(rows):
        sources = source if isinstance(source, tuple) else (source,)
        targets, options = _texts(value)
        for n, text in enumerate(sources):
            for wrong in wrong_texts(text):
                new = (*sources[:n], wrong, *sources[n + 1 :])
                edited.append((place, _row(new, targets, options)))
        for n, text in enumerate(targets):
            for wrong in wrong_texts(text):
                new = (*targets[:n], wrong, *targets[n + 1 :])
                edited.append((place, _row(sources, new, options)))
        for a, b in itertools.combinations(range(len(targets)), 2):
            new = [*targets]
            new[a], new[b] = new[b], new[a]
            edited.append((place, _row(sources, new, options)))
        if options:
            edited.append((place, _row(sources, targets, None)))
            edited.append((place, _row(sources, targets, {"offset": -1})))
        elif "ln" in str(source) and "weight" in str(source):
            edited.append((place, _row(sources, targets, {"offset": 1})))
    for place, row in edited:
        tables.append([*rows[:place], row, *rows[place + 1 :]])
    for a, b in itertools.combinations(range(len(rows)), 2):
        new = [*rows]
        new[a], new[b] = (rows[a][0], rows[b][1]), (rows[b][0], rows[a][1])
        tables.append(new)
    return [table for table in tables if is_wrong(pair, table)]


def is_wrong(pair: Pair, table: Any, seed: int = 5) -> bool:
    """Return whether a table fits and gives other answers."""
    source = pair.source(seed)
    try:
        params = pair.migration(table)(source, pair.target)
    except ta.MigrationError:
        return False
    return error(pair, params, seed) > 1e-3


def error(pair: Pair, params: Any, seed: int = 5) -> float:
    """Return the largest difference of the answers from the right ones."""
    right = pair.migration()(pair.source(seed), pair.target)
    ours, theirs = map(_JITTED[NAMES[id(pair.forward)]], (params, right))
    pairs = zip(ours, theirs, strict=True)
    return float(max(jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in pairs))


_JITTED = {name: jax.jit(pair.forward) for name, pair in PAIRS.items()}


def jitted(name: str) -> Callable[[Any], Any]:
    return _JITTED[name]


def merged(tables: Any, pair: Pair) -> list[tuple[Any, Any]]:
    """Return one table with the mistakes of several."""
    right = [*pair.table.items()]
    rows = [*right]
    for table in tables:
        for place, row in enumerate(table):
            if row != right[place]:
                rows[place] = row
    return rows
