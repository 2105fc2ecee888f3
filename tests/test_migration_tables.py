"""Real conversion tables, each against its formulas in NumPy, bit for bit, both ways.

A case is a table, the arrays under their old addresses and the same arrays under the
new ones, made by NumPy. Every number of a case is another one and its sizes are
different primes wherever the model allows it, so no wrong axis passes. To give a new
table every law, add a case.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import treeadapt as ta
from benchmarks.published_names import gemma3, mixtral, qwen3_moe


class Case(NamedTuple):
    """One table with its arrays.

    Attributes:
        table: of the migration.
        source: arrays under their old names.
        result: arrays under their new names, in the order of the rows.
        sizes: that the source leaves open.
        needed: those among them that the shapes of the target leave open, too.
        exact: whether everything comes back; else only what ``result`` holds.
    """

    table: Any
    source: dict[str, np.ndarray]
    result: dict[str, np.ndarray]
    sizes: dict[str, int] = {}
    needed: dict[str, int] = {}
    exact: bool = True


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def filler():
    """A function that makes arrays, no number of which occurs twice."""
    total = 1

    def make(*shape: int) -> np.ndarray:
        nonlocal total
        count = int(np.prod(shape))
        total += count
        assert total < 2**24  # float32 holds each
        return np.arange(total - count, total, dtype=np.float32).reshape(shape)

    return make


LAYERS, E, F, V, HEADS, KV, HALF = 13, 11, 17, 19, 7, 3, 5
D = 2 * HALF


def llama_leaves(make: Callable[..., Any]) -> dict[str, Any]:
    """The leaves of a Llama as Hugging Face names them."""
    leaves = {"model.embed_tokens.weight": make(V, E)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        leaves |= {
            f"{at}.self_attn.q_proj.weight": make(HEADS * D, E),
            f"{at}.self_attn.k_proj.weight": make(KV * D, E),
            f"{at}.self_attn.v_proj.weight": make(KV * D, E),
            f"{at}.self_attn.o_proj.weight": make(E, HEADS * D),
            f"{at}.mlp.gate_proj.weight": make(F, E),
            f"{at}.mlp.up_proj.weight": make(F, E),
            f"{at}.mlp.down_proj.weight": make(E, F),
            f"{at}.input_layernorm.weight": make(E),
            f"{at}.post_attention_layernorm.weight": make(E),
        }
    leaves["model.norm.weight"] = make(E)
    leaves["lm_head.weight"] = make(V, E)
    return leaves


def llama_table(first: bool) -> dict[str, Any]:
    """Scanned over axis 0 or 1; the halves of a rotary head become neighbours."""
    layer = "model.layers.{l}"

    def stacked(name: str, head: str, *rest: str) -> str:
        axes = ("l", head, *rest) if first else (head, "l", *rest)
        return f"layers/{name} : {' '.join(axes)}"

    return {
        "model.embed_tokens.weight": "embed/embedding",
        f"{layer}.self_attn.q_proj.weight : (h two d) e": stacked(
            "query/kernel", "e", "h", "(d two)"
        ),
        f"{layer}.self_attn.k_proj.weight : (k two d) e": stacked(
            "key/kernel", "e", "k", "(d two)"
        ),
        f"{layer}.self_attn.v_proj.weight : (k d two) e": stacked(
            "value/kernel", "e", "k", "(d two)"
        ),
        f"{layer}.self_attn.o_proj.weight : e (h d two)": stacked(
            "out/kernel", "h", "(d two)", "e"
        ),
        layer + ".mlp.{p=gate,up}_proj.weight : f e": stacked(
            "wi/kernel", "e", "p", "f"
        ),
        f"{layer}.mlp.down_proj.weight : e f": stacked("wo/kernel", "f", "e"),
        layer + ".{n}_layernorm.weight : e": stacked("{n}_norm/scale", "e"),
        "model.norm.weight": "norm/scale",
        "lm_head.weight : v e": "head/kernel : e v",
    }


def llama(first: bool) -> Case:
    source = llama_leaves(filler())
    axis = 0 if first else 1

    def stack(name: str, formula: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return np.stack(
            [
                formula(source[f"model.layers.{layer}.{name}.weight"])
                for layer in range(LAYERS)
            ],
            axis,
        )

    def rotary(heads: int) -> Callable[[np.ndarray], np.ndarray]:
        def formula(w: np.ndarray) -> np.ndarray:
            halves = w.reshape(heads, 2, HALF, E)
            return halves.transpose(3, 0, 2, 1).reshape(E, heads, D)

        return formula

    gate, up = (stack(f"mlp.{p}_proj", np.transpose) for p in ("gate", "up"))
    result = {
        "embed/embedding": source["model.embed_tokens.weight"],
        "layers/query/kernel": stack("self_attn.q_proj", rotary(HEADS)),
        "layers/key/kernel": stack("self_attn.k_proj", rotary(KV)),
        "layers/value/kernel": stack(
            "self_attn.v_proj", lambda w: w.T.reshape(E, KV, D)
        ),
        "layers/out/kernel": stack(
            "self_attn.o_proj", lambda w: w.T.reshape(HEADS, D, E)
        ),
        "layers/wi/kernel": np.stack([gate, up], 2),
        "layers/wo/kernel": stack("mlp.down_proj", np.transpose),
        "layers/input_norm/scale": np.stack(
            [source[f"model.layers.{i}.input_layernorm.weight"] for i in range(LAYERS)],
            axis,
        ),
        "layers/post_attention_norm/scale": stack(
            "post_attention_layernorm", lambda w: w
        ),
        "norm/scale": source["model.norm.weight"],
        "head/kernel": source["lm_head.weight"].T,
    }
    sizes = {"two": 2, "h": HEADS, "k": KV}
    return Case(llama_table(first), source, result, sizes, {"two": 2})


@case
def llama_scanned_on_axis_0() -> Case:
    return llama(first=True)


@case
def llama_scanned_on_axis_1() -> Case:
    return llama(first=False)


@case
def grouped_query_keys_and_values_fused() -> Case:
    make, layers, k, d, e = filler(), 11, 3, 5, 7
    key, value = make(layers, k * d, e), make(layers, k * d, e)
    table = {
        ("h.{l}.k.weight : (k d) e", "h.{l}.v.weight : (k d) e"): (
            "blocks/kv/kernel : e l [(k d) (k d)]"
        )
    }
    source = {f"h.{layer}.k.weight": key[layer] for layer in range(layers)}
    source |= {f"h.{layer}.v.weight": value[layer] for layer in range(layers)}
    fused = np.concatenate([key, value], 1).transpose(2, 0, 1)
    return Case(table, source, {"blocks/kv/kernel": fused}, {"k": k}, {"k": k})


@case
def fused_query_key_value_split_into_unequal_heads() -> Case:
    make, layers, h, k, d, e = filler(), 2, 7, 3, 5, 11
    table = {
        "h.{l}.qkv.weight : [(h d) (k d) (k d)] e": (
            "attn/q/kernel : l e h d",
            "attn/k/kernel : l e k d",
            "attn/v/kernel : e k l d",
        ),
        "h.{l}.qkv.bias : [(h d) (k d) (k d)]": (
            "attn/q/bias : l h d",
            "attn/k/bias : l k d",
            "attn/v/bias : k l d",
        ),
    }
    source, found = {}, {}
    for layer in range(layers):
        w, b = make((h + 2 * k) * d, e), make((h + 2 * k) * d)
        source |= {f"h.{layer}.qkv.weight": w, f"h.{layer}.qkv.bias": b}
        cuts = [h * d, (h + k) * d]
        for name, part, bias in zip(
            "qkv", np.split(w, cuts), np.split(b, cuts), strict=True
        ):
            heads = h if name == "q" else k
            found[name, layer] = (part.T.reshape(e, heads, d), bias.reshape(heads, d))
    q, k_, v = (
        [np.stack([found[name, layer][i] for layer in range(layers)]) for i in (0, 1)]
        for name in "qkv"
    )
    result = {
        "attn/k/kernel": k_[0],
        "attn/q/kernel": q[0],
        "attn/v/kernel": v[0].transpose(1, 2, 0, 3),
        "attn/k/bias": k_[1],
        "attn/q/bias": q[1],
        "attn/v/bias": v[1].transpose(1, 0, 2),
    }
    return Case(table, source, result, {"d": d, "k": k})


@case
def gate_and_up_side_by_side() -> Case:
    make, e, f = filler(), 5, 7
    source = {f"{i}.{p}.weight": make(f, e) for i in range(3) for p in ("gate", "up")}
    table = {"{i}.{p=gate,up}.weight : f e": "mlp/{i}/wi : e (p f)"}
    result = {
        f"mlp/{i}/wi": np.concatenate(
            [source[f"{i}.gate.weight"].T, source[f"{i}.up.weight"].T], 1
        )
        for i in range(3)
    }
    return Case(table, source, result)


@case
def interleaved_expert_halves_in_blocks_of_layers() -> Case:
    make, blocks, size, x, e, f = filler(), 7, 2, 3, 5, 11
    at = "model.layers.{(b i)}.mlp.experts.gate_up_proj"
    table = {
        f"{at} : x e (f p)": "layers_{i}/moe/wi_{p} : x b e f",
        f"{at}_bias : x (f p)": "layers_{i}/moe/wi_{p}_bias : x b f",
    }
    source = {}
    for layer in range(blocks * size):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        source |= {name: make(x, e, 2 * f), name + "_bias": make(x, 2 * f)}
    result = {
        f"layers_{i}/moe/wi_{p}{tail}": np.stack(
            [
                source[f"model.layers.{b * size + i}.mlp.experts.gate_up_proj{tail}"][
                    ..., p::2
                ]
                for b in range(blocks)
            ],
            1,
        )
        for tail in ("", "_bias")
        for i in range(size)
        for p in range(2)
    }
    return Case(table, source, result, {"i": size, "p": 2})


@case
def blocks_of_six_layers_and_a_remainder() -> Case:
    make, blocks, e, f = filler(), 3, 5, 7
    count = 6 * blocks + 2
    source = {f"model.layers.{n}.mlp.weight": make(f, e) for n in range(count)}
    source |= {f"model.layers.{n}.norm.weight": make(e) for n in range(count)}
    tail = "model.layers.{n+18}"
    block = "model.layers.{(b i)}"
    table = {
        f"{tail}.mlp.weight : f e": "remainder/{n}/mlp/kernel : e f",
        f"{tail}.norm.weight : e": "remainder/norm/scale : n e",
        f"{block}.mlp.weight : f e": "blocks/{i}/mlp/kernel : e b f",
        f"{block}.norm.weight : e": "blocks/norm/scale : b i e",
    }
    mlp = np.stack([source[f"model.layers.{n}.mlp.weight"].T for n in range(count)])
    norm = np.stack([source[f"model.layers.{n}.norm.weight"] for n in range(count)])
    result = {f"remainder/{n}/mlp/kernel": mlp[18 + n] for n in range(2)}
    result["remainder/norm/scale"] = norm[18:]
    for i in range(6):
        result[f"blocks/{i}/mlp/kernel"] = mlp[i:18:6].transpose(1, 0, 2)
    result["blocks/norm/scale"] = norm[:18].reshape(blocks, 6, e)
    return Case(table, source, result, {"i": 6})


@case
def two_kinds_of_layers_in_turn() -> Case:
    make, blocks, e = filler(), 3, 5
    table = {
        "layers.{(b i)}.linear_attn.{n}.weight : o e": "{i}/linear/{n} : b e o",
        "layers.{(b i)}.self_attn.{n}.weight : o e": "{i}/attn/{n} : b e o",
    }
    kinds = ["linear_attn", "linear_attn", "linear_attn", "self_attn"]
    source = {
        f"layers.{4 * b + i}.{kind}.{n}.weight": make(7, e)
        for b in range(blocks)
        for i, kind in enumerate(kinds)
        for n in ("in", "out")
    }
    result = {
        f"{i}/{kind.removesuffix('_attn').replace('self', 'attn')}/{n}": np.stack(
            [source[f"layers.{4 * b + i}.{kind}.{n}.weight"].T for b in range(blocks)]
        )
        for i, kind in enumerate(kinds)
        for n in ("in", "out")
    }
    return Case(table, source, result, {"i": 4}, {"i": 4})


@case
def experts_times_layers() -> Case:
    make, layers, experts, e, f = filler(), 3, 11, 5, 7
    table = {
        "model.layers.{l}.mlp.experts.{x}.{n=gate,up,down}_proj.weight : o i": (
            "layers/moe/{n}/kernel : x l i o"
        )
    }
    source = {
        f"model.layers.{layer}.mlp.experts.{x}.{n}_proj.weight": make(
            *((e, f) if n == "down" else (f, e))
        )
        for layer in range(layers)
        for x in range(experts)
        for n in ("gate", "up", "down")
    }
    result = {
        f"layers/moe/{n}/kernel": np.stack(
            [
                np.stack(
                    [
                        source[
                            f"model.layers.{layer}.mlp.experts.{x}.{n}_proj.weight"
                        ].T
                        for layer in range(layers)
                    ]
                )
                for x in range(experts)
            ]
        )
        for n in ("down", "gate", "up")
    }
    return Case(table, source, result)


@case
def a_subtree_stacked() -> Case:
    make, layers = filler(), 11
    table = {
        "h/{l}/{rest:**} : ...": "blocks/{rest:**} : l ...",
        "t/{l}/{rest:**} : ... z": "tail/{rest} : ... l z",
    }
    shapes = {"ln/scale": (5,), "mlp/up/kernel": (2, 3), "conv": (2, 3, 5, 7)}
    source = {
        f"{at}/{layer}/{rest}": make(*shape)
        for at in "ht"
        for layer in range(layers)
        for rest, shape in sorted(shapes.items())
    }
    source |= {f"h/{layer}/gate": make() for layer in range(layers)}
    result = {
        f"{new}/{rest}": np.stack(
            [source[f"{at}/{layer}/{rest}"] for layer in range(layers)],
            0 if at == "h" else len(shapes.get(rest, ())) - 1,
        )
        for at, new in (("h", "blocks"), ("t", "tail"))
        for rest in sorted([*shapes, "gate"])
        if (at, rest) != ("t", "gate")
    }
    return Case(table, source, result)


@case
def scalars_stacked() -> Case:
    source = {
        f"h/{layer}/temperature": np.float32(layer + 3).reshape(())
        for layer in range(11)
    }
    stacked = np.arange(3, 14, dtype=np.float32)
    table = {"h/{l}/temperature : ": "temperature : l 1"}
    return Case(table, source, {"temperature": stacked[:, None]})


@case
def gpt2_with_fused_attention_buffers_and_a_tied_head() -> Case:
    make, layers, h, d, v, n = filler(), 2, 3, 5, 19, 23
    e = h * d
    table = {
        "h.{i}.attn.{x=bias,masked_bias}": None,
        "h.{i}.attn.c_attn.weight : e [(h d) (h d) (h d)]": (
            "h/{i}/q/kernel : e h d",
            "h/{i}/k/kernel : e h d",
            "h/{i}/v/kernel : e h d",
        ),
        "h.{i}.attn.c_attn.bias : (p h d)": "h/{i}/{p=q,k,v}/bias : h d",
        "h.{i}.attn.c_proj.weight : (h d) e": "h/{i}/out/kernel : h d e",
        "h.{i}.mlp.{m=c_fc,c_proj}.weight": "h/{i}/{m=up,down}/kernel",
        "h.{i}.mlp.{m=c_fc,c_proj}.bias": "h/{i}/{m=up,down}/bias",
        "{at}ln_{which}.{k=weight,bias}": "{at}norm_{which}/{k=scale,bias}",
        "wte.weight : v e": ("embed : v e", "head/kernel : e v"),
        "wpe.weight": "positions",
    }
    source: dict[str, np.ndarray] = {}
    kernels, biases, outs = {}, {}, {}
    mlp: dict[str, dict[str, np.ndarray]] = {"weight": {}, "bias": {}}
    for i in range(layers):
        w, b, o = make(e, 3 * e), make(3 * e), make(e, e)
        source |= {
            f"h.{i}.attn.bias": np.tri(n, dtype=bool),
            f"h.{i}.attn.masked_bias": np.float32(-1e4).reshape(()),
            f"h.{i}.attn.c_attn.weight": w,
            f"h.{i}.attn.c_attn.bias": b,
            f"h.{i}.attn.c_proj.weight": o,
            f"h.{i}.mlp.c_fc.weight": make(e, F),
            f"h.{i}.mlp.c_proj.weight": make(F, e),
            f"h.{i}.mlp.c_fc.bias": make(F),
            f"h.{i}.mlp.c_proj.bias": make(e),
        }
        outs[f"h/{i}/out/kernel"] = o.reshape(h, d, e)
        for j, part in enumerate("qkv"):
            at = slice(j * e, (j + 1) * e)
            kernels[f"h/{i}/{part}/kernel"] = w[:, at].reshape(e, h, d)
            biases[f"h/{i}/{part}/bias"] = b[at].reshape(h, d)
        for old, new in (("c_proj", "down"), ("c_fc", "up")):
            for kind, name in (("weight", "kernel"), ("bias", "bias")):
                mlp[kind][f"h/{i}/{new}/{name}"] = source[f"h.{i}.mlp.{old}.{kind}"]
    norms = {f"h.{i}.ln_{j}": f"h.{i}.norm_{j}" for i in range(layers) for j in (1, 2)}
    source |= {f"{old}.{k}": make(e) for old in norms for k in ("weight", "bias")}
    scales = {
        f"{norms[old]}/{new}": source[f"{old}.{k}"]
        for old in norms
        for k, new in (("bias", "bias"), ("weight", "scale"))
    }
    source |= {"wte.weight": make(v, e), "wpe.weight": make(n, e)}
    result = {
        **dict(sorted(kernels.items())),
        **dict(sorted(biases.items())),
        **outs,
        **mlp["weight"],
        **mlp["bias"],
        **scales,
        "embed": source["wte.weight"],
        "head/kernel": source["wte.weight"].T,
        "positions": source["wpe.weight"],
    }
    return Case(table, source, result, {"h": h}, exact=False)


@case
def vision_transformer() -> Case:
    make, layers, heads, d, height, width, n = filler(), 2, 3, 5, 7, 11, 13
    e = heads * d
    at, to = "encoder.layer.{i}.attention", "block_{i}/attn"
    table = {
        "patch.weight : o c h w": "embedding/kernel : h w c o",
        "cls_token": "cls",
        "position_embeddings : 1 n e": "positions : n e",
        at + ".{n=query,key,value}.weight : (a d) e": to + "/{n}/kernel : e a d",
        at + ".{n=query,key,value}.bias : (a d)": to + "/{n}/bias : a d",
        at + ".output.weight : e (a d)": to + "/out/kernel : a d e",
    }
    kernels, biases, outs = {}, {}, {}
    for i in range(layers):
        for name in ("key", "query", "value"):
            kernels[i, name], biases[i, name] = make(e, e), make(e)
        outs[i] = make(e, e)
    source = {
        "patch.weight": make(e, 2, height, width),
        "cls_token": make(1, 1, e),
        "position_embeddings": make(1, n, e),
    }
    result = {
        "embedding/kernel": source["patch.weight"].transpose(2, 3, 1, 0),
        "cls": source["cls_token"],
        "positions": source["position_embeddings"][0],
    }
    for (i, name), w in kernels.items():
        source[f"encoder.layer.{i}.attention.{name}.weight"] = w
        result[f"block_{i}/attn/{name}/kernel"] = w.T.reshape(e, heads, d)
    for (i, name), w in biases.items():
        source[f"encoder.layer.{i}.attention.{name}.bias"] = w
        result[f"block_{i}/attn/{name}/bias"] = w.reshape(heads, d)
    for i, w in outs.items():
        source[f"encoder.layer.{i}.attention.output.weight"] = w
        result[f"block_{i}/attn/out/kernel"] = w.T.reshape(heads, d, e)
    return Case(table, source, result, {"a": heads})


@case
def encoder_and_decoder_with_lists_that_translate() -> Case:
    make = filler()
    block = "{s=encoder,decoder}.block.{i}.layer"
    table = {
        block + ".0.SelfAttention.{n=q,k,v,o}.weight : o e": (
            "{s}/{i}/attention/{n=query,key,value,out}/kernel : e o"
        ),
        block + ".{j=0,1}.layer_norm.weight": "{s}/{i}/{j=pre_attention,pre_mlp}/scale",
        block + ".1.DenseReluDense.{n=wi,wo}.weight : o e": (
            "{s}/{i}/mlp/{n}/kernel : e o"
        ),
        "shared.weight": "token_embedder",
    }
    source = {"shared.weight": make(7, 3)}
    first, norms, last = {}, {}, {}
    for s, i in itertools.product(("decoder", "encoder"), range(2)):
        at, to = f"{s}.block.{i}.layer", f"{s}/{i}"
        for n, new in zip("kovq", ("key", "out", "value", "query"), strict=True):
            source[f"{at}.0.SelfAttention.{n}.weight"] = w = make(5, 3)
            first[f"{to}/attention/{new}/kernel"] = w.T
        for j, new in ((0, "pre_attention"), (1, "pre_mlp")):
            source[f"{at}.{j}.layer_norm.weight"] = w = make(3)
            norms[f"{to}/{new}/scale"] = w
        for n in ("wi", "wo"):
            source[f"{at}.1.DenseReluDense.{n}.weight"] = w = make(11, 3)
            last[f"{to}/mlp/{n}/kernel"] = w.T
    result = {**dict(sorted(first.items())), **norms, **last}
    return Case(table, source, result | {"token_embedder": source["shared.weight"]})


@case
def bert_with_old_names_of_its_norms() -> Case:
    make = filler()
    table = {
        "bert.{at}.LayerNorm.{k=gamma,beta}": "{at}.norm.{k=scale,bias}",
        "bert.encoder.layer.{i}.{at}.dense.weight : o e": "layer/{at}/kernel : i e o",
        "bert.encoder.layer.{i}.{at}.dense.bias : o": "layer/{at}/bias : i o",
        r"odd \: name\{\} : a b": r"plain \: name : b a",
    }
    places = ("attention.output", "intermediate")
    kernels = {at: make(11, 7, 5) for at in places}
    biases = {at: make(11, 7) for at in places}
    source = {
        f"bert.encoder.layer.{i}.{at}.dense.{kind}": arrays[at][i]
        for kind, arrays in (("weight", kernels), ("bias", biases))
        for i in range(11)
        for at in places
    }
    norms = {
        f"{at}.norm.{new}": (f"bert.{at}.LayerNorm.{old}", make(7))
        for at in ("embeddings", "encoder.layer.2.output", "encoder.layer.10.output")
        for old, new in (("beta", "bias"), ("gamma", "scale"))
    }
    source |= dict(norms.values()) | {"odd : name{}": make(2, 3)}
    result = {
        **{new: array for new, (_, array) in norms.items()},
        **{f"layer/{at}/kernel": kernels[at].transpose(0, 2, 1) for at in places},
        **{f"layer/{at}/bias": biases[at] for at in places},
        "plain : name": source["odd : name{}"].T,
    }
    return Case(table, source, result)


@case
def numbers_that_move() -> Case:
    arrays = filler()(12, 1)
    source = {f"layers/{n + 60}/w": arrays[n] for n in range(12)}
    result = {f"tail/{n}/w": arrays[n] for n in range(12)}
    return Case({"layers/{n+60}/w": "tail/{n}/w"}, source, result)


def same(found: Any, wanted: dict[str, Any]) -> None:
    """Fail unless names, shapes, dtypes and bits agree, the order of names aside."""
    assert sorted(found) == sorted(wanted)
    for path, leaf in wanted.items():
        array = np.asarray(found[path])
        assert (path, array.shape, array.dtype) == (path, leaf.shape, leaf.dtype)
        assert array.tobytes() == leaf.tobytes(), path


def shapes(leaves: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in leaves.items()
    }


def migration(given: Case) -> ta.Migration:
    return ta.Migration(given.table, sizes=given.sizes or None)


def returned(given: Case) -> dict[str, np.ndarray]:
    """What comes back: all that no row drops."""
    if given.exact:
        return given.source
    kept = re.compile(r"(?!.*\.attn\.(masked_)?bias$)")  # GPT-2's buffers
    return {path: leaf for path, leaf in given.source.items() if kept.match(path)}


each_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@each_case
def test_arrays_are_those_of_the_formulas(make):
    given = make()
    found = migration(given)(given.source)
    same(found, given.result)
    assert {type(leaf) for leaf in found.values()} == {np.ndarray}
    assert list(found) == list(given.result)  # rows, then names in natural order


@each_case
def test_the_inverse_gives_back_every_bit(make):
    given = make()
    found = migration(given).inverse(given.result)
    same(found, returned(given))
    assert {type(leaf) for leaf in found.values()} == {np.ndarray}


@pytest.mark.slow
@each_case
def test_jitted_code_gives_the_same_arrays(make):
    given = make()
    m = migration(given)
    found = jax.jit(m)(given.source)
    same(found, given.result)
    same(jax.jit(m.inverse)(found), returned(given))


@each_case
def test_shapes_migrate_as_arrays_do(make):
    given = make()
    m = migration(given)
    assert m(shapes(given.source)) == shapes(given.result)
    assert m.inverse(shapes(given.result)) == shapes(returned(given))


@each_case
def test_the_order_of_the_source_never_matters(make):
    given = make()
    found = migration(given)(dict(reversed(given.source.items())))
    same(found, given.result)
    assert list(found) == list(given.result)


@each_case
def test_a_target_checks_and_changes_nothing(make):
    given = make()
    plan = migration(given).plan(shapes(given.source), shapes(given.result))
    assert plan.exact is given.exact
    assert not plan.one_way
    assert not plan.repeatable
    same(migration(given)(given.source, shapes(given.result)), given.result)
    wrong = given.result | {"stray": np.zeros(2)}
    with pytest.raises(ta.MigrationError, match="stray"):
        migration(given)(given.source, shapes(wrong))


@each_case
def test_a_target_gives_sizes(make):
    given = make()
    m = ta.Migration(given.table, sizes=given.needed or None)
    same(m(given.source, target=shapes(given.result)), given.result)
    back = m.inverse(given.result, target=shapes(returned(given)))
    same(back, returned(given))


@each_case
def test_what_is_migrated_is_refused(make):
    given = make()
    m = migration(given)
    with pytest.raises(ta.MigrationError):
        m(given.result)
    with pytest.raises(ta.MigrationError):
        m.inverse(given.source)


@each_case
def test_a_table_and_its_inverse_are_written_and_read(make, tmp_path):
    given = make()
    m = migration(given)
    (tmp_path / "there.toml").write_text(m.to_toml())
    (tmp_path / "back.toml").write_text(m.inverse.to_toml())
    same(ta.load_migration(tmp_path / "there.toml")(given.source), given.result)
    back = ta.load_migration(tmp_path / "back.toml")
    same(back(given.result), returned(given))


@pytest.mark.parametrize(
    ("make", "name"),
    [(make, name) for make in CASES.values() for name in make().sizes],
)
def test_an_open_size_is_named(make, name):
    given = make()
    sizes = {key: size for key, size in given.sizes.items() if key != name}
    with pytest.raises(ta.MigrationError, match=f"'{name}'"):
        ta.Migration(given.table, sizes=sizes or None)(given.source)


def swapped(address: str) -> list[str]:
    """The address with each two of its axes exchanged."""
    path, _, axes = address.rpartition(" : ")
    parts = re.findall(r"\[.*?\]|\(.*?\)|\S+", axes)
    found = []
    for i, j in itertools.combinations(range(len(parts)), 2):
        other = list(parts)
        other[i], other[j] = parts[j], parts[i]
        found.append(f"{path} : {' '.join(other)}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_every_exchange_of_two_axes_is_found_at_prime_sizes(first):
    given = llama(first)
    tried = 0
    for row, target in given.table.items():
        for wrong in swapped(target) if " : " in row else ():
            m = ta.Migration({**given.table, row: wrong}, sizes=given.sizes)
            with pytest.raises(ta.MigrationError, match=re.escape(row)):
                m.plan(given.source, shapes(given.result))
            tried += 1
    assert tried == 35


def test_a_row_without_axes_gives_the_callers_object():
    leaves = {"a/x": np.ones(3), "b/x": jnp.ones(3), "n": 3, "s": np.float32(2)}
    table = {"{at}/x": "{at}/y", "n": "m/n", "s": "m/s"}
    found = ta.Migration(table)(leaves)
    renamed = ta.Migration(table)(leaves)
    for old, new in (("a/x", "a/y"), ("b/x", "b/y"), ("n", "m/n"), ("s", "m/s")):
        assert found[new] is leaves[old]
        assert renamed[new] is leaves[old]


def test_a_tree_does_as_well_as_a_flat_dict():
    given = llama(first=True)
    names = {path.replace(".", "/"): leaf for path, leaf in given.source.items()}
    table = {
        row.partition(" : ")[0].replace(".", "/")
        + "".join(row.partition(" : ")[1:]): to
        for row, to in given.table.items()
    }
    tree = traverse_util.unflatten_dict(names, sep="/")
    same(ta.Migration(table, sizes=given.sizes)(tree), given.result)


def test_jax_arrays_stay_jax_arrays():
    given = grouped_query_keys_and_values_fused()
    leaves = {path: jnp.asarray(leaf) for path, leaf in given.source.items()}
    found = migration(given)(leaves)
    same(found, given.result)
    assert all(isinstance(leaf, jax.Array) for leaf in found.values())


# --- full sizes, on shapes alone ---


def abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def test_the_leaves_of_llama_8b_become_11(monkeypatch):
    sizes = {"LAYERS": 32, "E": 4096, "F": 14336, "V": 128256, "HEADS": 32, "KV": 8}
    for name, size in (sizes | {"HALF": 64, "D": 128}).items():
        monkeypatch.setitem(globals(), name, size)
    leaves = llama_leaves(abstract)
    assert len(leaves) == 291
    m = ta.Migration(llama_table(first=False), sizes={"two": 2, "h": 32, "k": 8})
    found = m(leaves)
    assert len(found) == 11
    assert found["layers/query/kernel"] == abstract(4096, 32, 32, 128)
    assert found["layers/key/kernel"] == abstract(4096, 32, 8, 128)
    assert found["layers/wi/kernel"] == abstract(4096, 32, 2, 14336)
    assert m.inverse(found) == leaves


GEMMA = {
    "language_model/model/layers/{n+60}/{rest:**} : ...": "tail/{rest} : n ...",
    "language_model/model/layers/{(b i)}/{rest:**} : ...": "blocks/{i}/{rest} : b ...",
    "vision_tower/vision_model/encoder/layers/{l}/{rest:**} : ...": (
        "img/{rest} : ... l"
    ),
    "language_model/model/{rest:**}": "text/{rest}",
    "{rest:**}": "other/{rest}",
}
MIXTRAL = {
    "model/layers/{l}/block_sparse_moe/experts/{x}/{n=w1,w2,w3}/weight : o i": (
        "layers/moe/{n=gate,down,up}/kernel : l x i o"
    ),
    "model/layers/{l}/{rest:**}/weight : ...": "layers/{rest}/kernel : l ...",
    "{rest:**}": "other/{rest}",
}
QWEN = {
    "model/language_model/layers/{l}/mlp/experts/{x}/{n}_proj/weight : f e": (
        "layers/experts/{n}/kernel : l x e f"
    ),
    "model/language_model/layers/{(b i)}/{kind}_attn/{rest:**} : ...": (
        "blocks/{i}/{kind}/{rest} : b ..."
    ),
    "model/language_model/layers/{l}/{rest:**} : ...": "layers/{rest} : l ...",
    "{rest:**}": "other/{rest}",
}


@pytest.mark.parametrize(
    ("names", "table", "sizes", "count", "one"),
    [
        (gemma3, GEMMA, {"i": 6}, 116, ("blocks/5/mlp/up_proj/weight", (10, 7, 5))),
        (mixtral, MIXTRAL, None, 13, ("layers/moe/down/kernel", (56, 8, 5, 7))),
        pytest.param(
            qwen3_moe,
            QWEN,
            {"i": 4},
            46,
            ("layers/experts/gate/kernel", (40, 180, 5, 7)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gemma3", "mixtral", "qwen3_moe"],
)
def test_published_names_move_and_come_back(names, table, sizes, count, one):
    leaves = {
        name: abstract(7) if "norm" in name or "bias" in name else abstract(7, 5)
        for name in names()
    }
    m = ta.Migration(table, sizes=sizes)
    found = m(leaves)
    assert found[one[0]].shape == one[1]
    assert len(found) == count
    assert m.inverse(found) == leaves
    plan = m.plan(leaves)
    assert plan.exact
    assert not plan.one_way


# --- values ---

BF16 = np.dtype(jnp.bfloat16)
NUMBERS = np.arange(-6, 9, dtype=np.float32).reshape(3, 5) / 4
PAD = {"v": (1, 2)}


@pytest.mark.parametrize(
    ("dtype", "operations", "formula", "exact"),
    [
        ("float32", {"scale": 0.25}, lambda x: x * np.float32(0.25), False),
        ("float32", {"offset": 1}, lambda x: x + np.float32(1), False),
        ("float64", {"scale": 0.5, "offset": 1}, lambda x: x * 0.5 + 1, False),
        (
            "bfloat16",
            {"offset": 1.0, "scale": 0.5},
            lambda x: (x.astype("f4") * np.float32(0.5) + 1).astype(BF16),
            False,
        ),
        ("float32", {"pad": PAD}, lambda x: np.pad(x, [(0, 0), (1, 2)]), True),
        (
            "float32",
            {"cast": ["float32", "float64"]},
            lambda x: x.astype("float64"),
            False,  # a signalling NaN comes back as a quiet one
        ),
        (
            "float32",
            {"cast": ["float32", "bfloat16"]},
            lambda x: x.astype(BF16),
            False,
        ),
        (
            "bfloat16",  # one rounding at the end, and zeros after the offset
            {
                "cast": ["bfloat16", "float32"],
                "pad": PAD,
                "offset": 2.0**-12,
                "scale": 2,
            },
            lambda x: np.pad(
                x.astype("f4") * 2 + np.float32(2.0**-12), [(0, 0), (1, 2)]
            ),
            False,
        ),
    ],
)
def test_values_change_in_one_order_and_back(
    dtype, operations, formula, exact, tmp_path
):
    leaf = NUMBERS.astype(dtype)
    m = ta.Migration({"w.{l}.x : v": ("w : l v", operations)})
    source = {f"w.{layer}.x": leaf[layer] for layer in range(3)}
    wanted = {"w": formula(leaf)}
    plan = m.plan(shapes(source))
    assert plan.exact is exact
    found = m(source)
    same(found, wanted)
    same(m.inverse(found), source)
    assert m(shapes(source)) == shapes(wanted)
    (tmp_path / "m.toml").write_text(m.to_toml())
    (tmp_path / "back.toml").write_text(m.inverse.to_toml())
    same(ta.load_migration(tmp_path / "m.toml")(source), wanted)
    same(ta.load_migration(tmp_path / "back.toml")(wanted), source)


def test_a_scale_is_a_number_of_the_computation():
    w = NUMBERS + np.float32(1 / 3)
    found = ta.Migration({"a : x y": ("b : y x", {"scale": 0.3})})({"a": w})
    same(found, {"b": (w * np.float32(0.3)).T})
    half = w.astype(np.float16)
    found = ta.Migration({"a : x y": ("b : y x", {"scale": 0.3})})({"a": half})
    same(found, {"b": (half.astype("f4") * np.float32(0.3)).astype("f2").T})


def test_operations_reach_every_copy():
    m = ta.Migration({"a : x y": (("b : y x", "c : x y"), {"offset": 1.0})})
    found = m({"a": NUMBERS})
    same(found, {"b": (NUMBERS + 1).T, "c": NUMBERS + 1})
    same(m.inverse(found), {"a": NUMBERS})


def test_a_cast_back_takes_its_dtype_from_the_target():
    m = ta.Migration({"a : x y": ("b : y x", {"cast": "float32"})})
    source = {"a": NUMBERS.astype(BF16)}
    found = m(source)
    same(found, {"b": NUMBERS.T})
    same(m.inverse(found, target=shapes(source)), source)
    with pytest.raises(ta.MigrationError, match="cast"):
        m.inverse(found)


def test_what_a_pad_trims_is_zero():
    m = ta.Migration({"a : v": ("b : v", {"pad": {"v": (0, 2)}})}).inverse
    full = np.array([1, 2, 0, 3], np.float32)
    with pytest.raises(ta.MigrationError, match="'b'"):
        m({"b": full})
    assert m(shapes({"b": full})) == {"a": jax.ShapeDtypeStruct((2,), np.float32)}
    same(jax.jit(m)({"b": full}), {"a": full[:2]})


@pytest.mark.parametrize("other", [0.0, -0.0, np.nan, 1.0])
def test_copies_must_agree_in_every_bit(other):
    """Zeros of both signs differ, and a NaN is equal to itself."""
    m = ta.Migration({"a : x y": ("b : y x", "c : x y")}).inverse
    one = np.array([[np.nan, 0.0, 1.0]], np.float32)
    two = one.copy()
    two[0, 1] = other
    leaves = {"b": one.T, "c": two}
    if two.tobytes() == one.tobytes():
        same(m(leaves), {"a": one})
        return
    with pytest.raises(ta.MigrationError, match=r"'b'(.|\n)*'c'"):
        m(leaves)
    assert m(shapes(leaves)) == {"a": jax.ShapeDtypeStruct((1, 3), np.float32)}
    assert jax.jit(m)(leaves)["a"].shape == (1, 3)


def test_bits_of_any_number_survive():
    bits = np.random.default_rng(0).integers(0, 2**32, (2, 3, 5), np.uint32)
    leaves = {f"{layer}/w": bits[layer].view(np.float32) for layer in range(2)}
    m = ta.Migration({"{l}/w : a b": "w : b l a"})
    found = m(leaves)
    same(found, {"w": bits.view(np.float32).transpose(2, 0, 1)})
    same(m.inverse(found), leaves)


# --- rows that are not addresses ---


def test_new_leaves_are_zeros_or_those_of_the_target():
    m = ta.Migration({"a": "b"}, new={"z": "zeros", "k/0": "target"})
    target = {"b": np.ones(2), "z": np.ones((2, 3), np.float16), "k/0": np.ones(5)}
    source = {"a": np.zeros(2)}
    found = m(source, target=target)
    same(found, {"b": source["a"], "z": np.zeros((2, 3), "f2"), "k/0": np.ones(5)})
    same(m.inverse(found), source)
    with pytest.raises(ta.MigrationError, match="target"):
        m(source)
    with pytest.raises(ta.MigrationError, match="k/0"):
        m(source, target=shapes(target))


def test_functions_go_back_only_with_their_inverse():
    pair = ta.Migration({"{n}/a": ("{n}/b", (np.exp2, np.log2))})
    source = {"3/a": np.array([1.0, 2.0])}
    same(pair(source), {"3/b": np.array([2.0, 4.0])})
    same(pair.inverse(pair(source)), source)
    with pytest.raises(ta.MigrationError, match=r"\{n\}/a"):
        pair.to_toml()
    alone = ta.Migration({"{n}/a": ("{n}/b", np.exp2), "{x}_{y}": "{y}"})
    with pytest.raises(ta.MigrationError) as caught:
        _ = alone.inverse
    assert "{n}/a" in str(caught.value)
    assert "{x}_{y}" in str(caught.value)


def test_a_table_that_fits_its_own_result_is_marked():
    leaves = {"a/kernel": np.zeros((2, 3))}
    assert (
        ta.Migration({"{n}/kernel : d e": "{n}/kernel : e d"}).plan(leaves).repeatable
    )
    assert not ta.Migration({"{n}/kernel": "{n}/weight"}).plan(leaves).repeatable


def test_names_that_do_not_return_are_listed():
    """``b_c`` would return to the first row, which never gave it."""
    table = {"x/{n}": "{n}", "y/{n}_{k}": "{n}_{k}"}
    plan = ta.Migration(table).plan({"x/a": np.zeros(2), "y/b_c": np.zeros(3)})
    assert list(plan.one_way) == ["b_c"]


# --- what is refused ---

LAYERS_OF = {f"h/{layer}/w": np.zeros((2, 3), np.float32) for layer in range(12)}
STACK = {"h/{l}/w : a b": "w : l a b"}


@pytest.mark.parametrize(
    ("source", "target", "named"),
    [
        ({k: v for k, v in LAYERS_OF.items() if k != "h/7/w"}, None, "h/7/w"),
        (LAYERS_OF | {"h/5/w": np.zeros((2, 4), "f4")}, None, "h/5/w"),
        (LAYERS_OF | {"h/5/w": np.zeros((2, 3), "f2")}, None, "h/5/w"),
        (LAYERS_OF | {"h/5/w": np.zeros(6, "f4")}, None, "h/5/w"),
        (LAYERS_OF | {"h/05/w": np.zeros((2, 3), "f4")}, None, "h/05/w"),
        (LAYERS_OF | {"h/x/w": np.zeros((2, 3), "f4")}, None, "h/x/w"),
        (LAYERS_OF | {"stray": np.zeros(2)}, None, "stray"),
        (LAYERS_OF, {"w": np.zeros((12, 2, 5), "f4")}, "[12,2,5]"),
        (LAYERS_OF, {"w": np.zeros((12, 2, 3), "f2")}, "float16"),
        (LAYERS_OF, {"v": np.zeros((12, 2, 3), "f4")}, "'v'"),
        (LAYERS_OF, {"w": np.zeros((12, 2, 3), "f4"), "v": np.zeros(2)}, "'v'"),
    ],
)
def test_leaves_that_do_not_fit_are_named(source, target, named):
    with pytest.raises(ta.MigrationError) as caught:
        ta.Migration(STACK)(source, target=target)
    assert named in str(caught.value)
    assert len(str(caught.value).encode()) <= 4_000


@pytest.mark.parametrize(
    ("row", "value", "why"),
    [
        ("h/{l}/w : a b", "w : l a", "an axis is dropped"),
        ("h/{l}/w : a b", "w : l a b c", "an axis comes from nowhere"),
        ("h/{l}/w : a b", "w : a b", "a number in one path is no axis"),
        ("h/{l}/w : a b c", "w : l a b c", "another rank"),
        ("h/{l}/w : (a b) c", "w : l a b c", "sizes are open"),
        ("h/{(b i)}/w : x y", "{i}/w : b x y", "a size in a number is open"),
        ("h/{l}/w", "w", "two leaves get one name"),
        ("h/{l}/w : a a", "w : l a a", "an axis twice"),
        ("h/{l}/w : l a", "w : l a", "an axis that is a number in the same address"),
        ("h/{l:**}/w : a b", "w : l a b", "an axis that is text"),
        ("h/{l}/w : ... b", "w : l b", "further axes on one side"),
        ("h/{l}/w : ... ... b", "w : l ... ... b", "further axes twice"),
        ("h/{l}/w : (... b)", "w : l (... b)", "further axes in parentheses"),
        ("h/{l}/w : a 3", "w : l a 3", "a number for an axis"),
        ("h/{l}/w : a (b", "w : l a b", "an open parenthesis"),
        ("h/{l}/w : a ((b))", "w : l a b", "parentheses in parentheses"),
        ("h/{l}/w : a b", "w", "axes on one side"),
        ("h/{l}/w : a b : c", "w : l a b", "two lists of axes"),
        ("h/{l}/w : [a b] c", "w : l a b c", "a bracket for one address"),
        ("h/{l}/w : [a b] c", ("u : l a c", "w : l c"), "a part is not in its target"),
        ("h/{l}/w : [a b] [c d]", ("u : l a c", "w : l b d"), "two brackets"),
        (("h/{l}/w : a b", "h/{k}/w : a b"), "w : l a b", "two templates, one leaf"),
        ("h/{l}{m}/w : a b", "w : l m a b", "captures touch"),
        ("h/{l=0,0}/w : a b", "w : l a b", "a text twice"),
        ("h/{l=0,1}/w", "h/{l=a}/w", "lists of two lengths"),
        ("h/{l}/w : a b", ("w : l a b", {"scale": 0}), "a scale without inverse"),
        ("h/{l}/w : a b", ("w : l a b", {"size": 2}), "an operation that is not one"),
        ("h/{l}/w : a b", ("w : l (a b)", {"pad": {"b": (0, 1)}}), "a composed pad"),
        ("h/{l}/w : a b", ("w : l a b", np.negative), "axes and a function"),
        ("h/*/w", "w", "a wildcard that does not drop"),
    ],
)
def test_rows_that_cannot_be_are_refused(row, value, why):
    with pytest.raises(ta.MigrationError) as caught:
        ta.Migration({row: value})(LAYERS_OF)
    assert "h/" in str(caught.value)
    assert len(str(caught.value).encode()) <= 4_000


def test_a_remainder_of_blocks_lacks_the_rest_of_its_block():
    m = ta.Migration({"h/{(b i)}/w : x y": "{i}/w : b x y"}, sizes={"i": 5})
    with pytest.raises(ta.MigrationError, match=r"without 'h/\{12..14\}/w'"):
        m(LAYERS_OF)


def test_all_that_is_wrong_is_listed_at_once():
    leaves = {k: v for k, v in LAYERS_OF.items() if k != "h/7/w"} | {"stray": 1.0}
    with pytest.raises(ta.MigrationError) as caught:
        ta.Migration(STACK | {"gone": "gone"})(leaves, target={"x": np.zeros(2)})
    for named in ("h/7/w", "stray", "gone", "'x'"):
        assert named in str(caught.value)


def test_a_size_without_use_is_refused():
    with pytest.raises(ta.MigrationError, match="heads"):
        ta.Migration(STACK, sizes={"heads": 2})(LAYERS_OF)


def test_nothing_is_read_before_everything_fits():
    class Unreadable(np.ndarray):
        def __array_function__(self, *rest: Any) -> Any:
            raise AssertionError("read")

    leaves = {k: v.view(Unreadable) for k, v in LAYERS_OF.items()}
    with pytest.raises(ta.MigrationError, match="stray"):
        ta.Migration(STACK)(leaves | {"stray": np.zeros(1)})


# --- what is dropped ---

TREE = {
    "head/bias": np.ones(2),
    "head/dense/kernel": np.ones(3),
    "header": np.ones(4),
    "h.0.mask": np.ones(5),
    "h.1.mask/x": np.ones(6),
    "h.1.masked": np.ones(7),
}


@pytest.mark.parametrize(
    ("drop", "dropped"),
    [
        ("head", ["head/bias", "head/dense/kernel"]),
        ("head/dense", ["head/dense/kernel"]),
        ("head/*", ["head/bias", "head/dense/kernel"]),
        ("head/**", ["head/bias", "head/dense/kernel"]),
        ("header", ["header"]),
        ("*.mask", ["h.0.mask", "h.1.mask/x"]),
        ("h.{l}.mask", ["h.0.mask", "h.1.mask/x"]),
        ("h.{l=1,2}.mask", ["h.1.mask/x"]),
        (("head/bias", "head", "header"), ["head/bias", "head/dense/kernel", "header"]),
        ("hea", []),
        ("", []),
        ("*", [*TREE]),
    ],
)
def test_what_drops_a_node_drops_all_that_is_below_it(drop, dropped):
    m = ta.Migration([(drop, None), ("{rest:**}", "new/{rest}")])
    if dropped == [*TREE]:
        m = ta.Migration([(drop, None)])
    plan = m.plan(TREE)
    assert sorted(plan.dropped) == sorted(dropped)
    assert m(TREE).keys() == {f"new/{path}" for path in TREE if path not in dropped}
    # The inverse, and its file, name the node too.
    back = m.inverse
    same(dict(sorted(back(m(TREE), TREE).items())), dict(sorted(TREE.items())))
    assert sorted(back.plan(m(TREE), TREE).new) == sorted(dropped)
    assert back.to_toml().count('"dropped"') == (3 if isinstance(drop, tuple) else 1)
    # One that matches nothing serves other models: the plan says so.
    said = "it matches nothing here" in str(plan)
    assert said == (not dropped)
    assert plan.idle == (() if dropped else (0,))


def test_new_names_a_node_and_its_inverse_drops_it():
    m = ta.Migration({"w": "w"}, new={"head": "zeros"})
    target = {"w": np.ones(1), "head": {"a": np.ones(2), "b": {"c": np.ones(3)}}}
    moved = m({"w": np.ones(1)}, target)
    assert moved.keys() == {"w", "head/a", "head/b/c"}
    assert m.inverse(target).keys() == {"w"}
    assert m.plan({"w": np.ones(1)}, target).one_way == ()
    with pytest.raises(ta.MigrationError, match="'hea'"):
        ta.Migration({"w": "w"}, new={"hea": "zeros"})({"w": np.ones(1)}, target)


def test_a_row_after_one_that_drops_a_node_gets_nothing_of_it():
    m = ta.Migration({"head": None, "head/bias": "bias", "{x:**}": "{x}"})
    with pytest.raises(ta.MigrationError, match="'head/bias'"):
        m(TREE)
    m = ta.Migration({"head/bias": "bias", "head": None, "{x:**}": "{x}"})
    assert "bias" in m(TREE)
    assert m.plan(TREE).dropped == ("head/dense/kernel",)
