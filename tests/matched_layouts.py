"""More pairs for ``match_models``: mixtures of experts, grouped queries, gates.

Each function gives an old model with leaves as PyTorch has them, one for each expert or
fused, and a new one that stacks and splits them, as JAX is written. Both run the same
code, which their two ways to read the leaves lead to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matched import Arrays, Pair, arrays, nested

TOKENS = (np.arange(44).reshape(4, 11) * 7 % 23).astype("int32")
WORDS = 23


def rms_norm(x: Any, scale: Any, epsilon: float = 1e-6) -> Any:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def specs(shapes: dict[str, tuple[int, ...]]) -> Any:
    """Nested dicts of abstract leaves."""
    return nested({p: jax.ShapeDtypeStruct(s, "float32") for p, s in shapes.items()})


def pair_of(
    name: str,
    shapes: dict[str, tuple[int, ...]],
    target: dict[str, tuple[int, ...]],
    read_old: Callable[[Arrays], Any],
    read_new: Callable[[Any], Any],
    run: Callable[..., Any],
) -> Pair:
    """A pair that reads its leaves in two ways and runs the same code."""
    return Pair(
        name,
        arrays(shapes),
        specs(target),
        jax.jit(lambda p: run(*read_new(p))),
        jax.jit(lambda p: run(*read_old(p))),
    )


def experts(*, top: int = 2, chosen: int = 4, renormalised: bool = True) -> Pair:
    """A mixture of four experts, of which the router may choose from the first only."""
    width, count, hidden, layers = 9, 4, 7, 2
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (WORDS, width)}
    target: dict[str, tuple[int, ...]] = {"embed": (WORDS, width)}
    for n in range(layers):
        at = f"layers.{n}"
        shapes |= {f"{at}.router.weight": (count, width), f"{at}.norm": (width,)}
        for x in range(count):
            shapes |= {
                f"{at}.experts.{x}.{name}.weight": shape
                for name, shape in (
                    ("w1", (hidden, width)),
                    ("w2", (width, hidden)),
                    ("w3", (hidden, width)),
                )
            }
        target |= {
            f"block_{n}/scale": (width,),
            f"block_{n}/router": (width, count),
            f"block_{n}/in": (count, width, 2, hidden),
            f"block_{n}/out": (count, hidden, width),
        }

    def run(embed: Any, blocks: Any, renormalised: bool) -> Any:
        x = jnp.asarray(embed)[TOKENS]
        for norm, router, gate, up, down in blocks:
            y = rms_norm(x, norm)
            scores = jax.nn.softmax(y @ router)
            scores = jnp.where(jnp.arange(count) < chosen, scores, 0)
            weights, best = jax.lax.top_k(scores, top)
            if renormalised:
                weights = weights / weights.sum(-1, keepdims=True)
            weights = (jax.nn.one_hot(best, count) * weights[..., None]).sum(-2)
            inner = jax.nn.silu(jnp.einsum("bne,xef->bnxf", y, gate))
            inner = inner * jnp.einsum("bne,xef->bnxf", y, up)
            x = x + jnp.einsum("bnxf,xfe,bnx->bne", inner, down, weights)
        return x @ embed.T

    def old(p: Any) -> Any:
        def stacked(n: int, name: str) -> Any:
            names = (f"layers.{n}.experts.{x}.{name}.weight" for x in range(count))
            return jnp.stack([p[name].T for name in names])

        blocks = [
            (
                p[f"layers.{n}.norm"],
                p[f"layers.{n}.router.weight"].T,
                *(stacked(n, name) for name in ("w1", "w3", "w2")),
            )
            for n in range(layers)
        ]
        return p["embed.weight"], blocks, True

    def new(p: Any) -> Any:
        every = (p[f"block_{n}"] for n in range(layers))
        blocks = [
            (b["scale"], b["router"], b["in"][:, :, 0], b["in"][:, :, 1], b["out"])
            for b in every
        ]
        return p["embed"], blocks, renormalised

    return pair_of("experts", shapes, target, old, new, run)


def grouped() -> Pair:
    """Queries, keys and values fused by groups, as in Falcon; the new ones apart."""
    width, groups, each, head, layers = 10, 2, 3, 4, 2
    heads = groups * each
    shapes: dict[str, tuple[int, ...]] = {"wte": (WORDS, width)}
    target: dict[str, tuple[int, ...]] = {"embed": (WORDS, width)}
    for n in range(layers):
        shapes |= {
            f"h.{n}.norm": (width,),
            f"h.{n}.qkv": (groups * (each + 2) * head, width),
            f"h.{n}.dense": (width, heads * head),
        }
    target |= {
        "layers/scale": (layers, width),
        "layers/q": (layers, width, heads, head),
        "layers/k": (layers, width, groups, head),
        "layers/v": (layers, width, groups, head),
        "layers/o": (layers, heads, head, width),
    }

    def run(embed: Any, blocks: Any) -> Any:
        x = jnp.asarray(embed)[TOKENS]
        length = TOKENS.shape[1]
        near = -0.1 * np.abs(np.arange(length)[:, None] - np.arange(length))
        for norm, q, k, v, o in blocks:
            y = rms_norm(x, norm)
            q = jnp.einsum("bne,egrd->bngrd", y, q.reshape(width, groups, each, head))
            k, v = (jnp.einsum("bne,egd->bngd", y, w) for w in (k, v))
            scores = jnp.einsum("bngrd,bmgd->bgrnm", q, k) / 2 + near
            scores = jnp.where(np.tri(length) > 0, scores, -1e9)
            mixed = jnp.einsum("bgrnm,bmgd->bngrd", jax.nn.softmax(scores), v)
            mixed = mixed.reshape(*TOKENS.shape, heads, head)
            x = x + jnp.einsum("bnhd,hde->bne", mixed, o.reshape(heads, head, width))
        return x @ embed.T

    def old(p: Any) -> Any:
        blocks = []
        for n in range(layers):
            qkv = p[f"h.{n}.qkv"].T.reshape(width, groups, each + 2, head)
            q, k, v = qkv[:, :, :each], qkv[:, :, each], qkv[:, :, each + 1]
            blocks.append((p[f"h.{n}.norm"], q, k, v, p[f"h.{n}.dense"].T))
        return p["wte"], blocks

    def new(p: Any) -> Any:
        own = p["layers"]
        names = ("scale", "q", "k", "v", "o")
        return p["embed"], [[own[k][n] for k in names] for n in range(layers)]

    return pair_of("grouped", shapes, target, old, new, run)


def gated(order: str = "zrn") -> Pair:
    """A GRU: PyTorch's gates are r, z, n; the new ones are apart, in another order."""
    width, layers = 6, 2
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (WORDS, width)}
    target: dict[str, tuple[int, ...]] = {"table": (WORDS, width)}
    for n in range(layers):
        for name in ("ih", "hh"):
            shapes[f"rnn.weight_{name}_l{n}"] = (3 * width, width)
            shapes[f"rnn.bias_{name}_l{n}"] = (3 * width,)
        for name in ("in", "state"):
            target[f"cell_{n}/{name}/kernel"] = (3, width, width)
            target[f"cell_{n}/{name}/bias"] = (3, width)

    def run(embed: Any, cells: Any) -> Any:
        x = jnp.asarray(embed)[TOKENS]
        for own, state, b, c in cells:

            def step(h: Any, each: Any, own: Any, state: Any, b: Any, c: Any) -> Any:
                r, z, n = jnp.einsum("bi,gij->gbj", each, own) + b[:, None]
                s, y, m = jnp.einsum("bi,gij->gbj", h, state) + c[:, None]
                r, z = jax.nn.sigmoid(r + s), jax.nn.sigmoid(z + y)
                h = (1 - z) * jnp.tanh(n + r * m) + z * h
                return h, h

            start = jnp.zeros((len(x), width))
            weights = (own, state, b, c)
            _, x = jax.lax.scan(
                lambda h, each, w=weights: step(h, each, *w), start, x.swapaxes(0, 1)
            )
            x = x.swapaxes(0, 1)
        return x @ embed.T

    def old(p: Any) -> Any:
        def gates(name: str) -> Any:
            return p[f"rnn.{name}"].reshape(3, width, -1).swapaxes(1, 2)

        cells = []
        for n in range(layers):
            kernels = (gates(f"weight_{name}_l{n}") for name in ("ih", "hh"))
            biases = (gates(f"bias_{name}_l{n}")[:, 0] for name in ("ih", "hh"))
            cells.append((*kernels, *biases))
        return p["embed.weight"], cells

    places = jnp.array([order.index(gate) for gate in "rzn"])

    def new(p: Any) -> Any:
        cells = []
        for n in range(layers):
            own, state = p[f"cell_{n}"]["in"], p[f"cell_{n}"]["state"]
            leaves = (own["kernel"], state["kernel"], own["bias"], state["bias"])
            cells.append([leaf[places] for leaf in leaves])
        return p["table"], cells

    return pair_of("gated", shapes, target, old, new, run)


def blocks(
    *,
    causal: bool = True,
    scale: float = 0.0,
    offset: int = 0,
    post: bool = False,
    final: bool = True,
    bias: bool = True,
    act: Callable[[Any], Any] = jax.nn.gelu,
    skips: bool = True,
) -> Pair:
    """A decoder with learned positions; the options are those of the old one."""
    width, heads, hidden, layers = 8, 2, 13, 2
    head = width // heads
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (WORDS, width),
        "places.weight": (TOKENS.shape[1] + 1, width),
        "norm.weight": (width,),
        "head.weight": (WORDS, width),
    }
    target: dict[str, tuple[int, ...]] = {
        "embed": (WORDS, width),
        "positions": (TOKENS.shape[1] + 1, width),
        "last": (width,),
        "head": (width, WORDS),
    }
    for n in range(layers):
        at = f"layers.{n}"
        shapes |= {f"{at}.{name}.weight": (width, width) for name in "qkvo"}
        shapes |= {
            f"{at}.norm_1.weight": (width,),
            f"{at}.norm_2.weight": (width,),
            f"{at}.up.weight": (hidden, width),
            f"{at}.down.weight": (width, hidden),
        }
        shapes |= {} if bias else {f"{at}.down.bias": (width,)}
    target |= {
        "blocks/ln_1": (layers, width),
        "blocks/ln_2": (layers, width),
        "blocks/qkv": (layers, width, 3, heads, head),
        "blocks/out": (layers, heads, head, width),
        "blocks/wi": (layers, width, hidden),
        "blocks/wo": (layers, hidden, width),
    }
    plain = (True, head**-0.5, 0, False, True, jax.nn.gelu, True)
    changed = (causal, scale or head**-0.5, offset, post, final, act, skips)

    def run(leaves: Any, every: Any, options: Any) -> Any:
        embed, places, last, out = leaves
        causal, scale, offset, post, final, act, skips = options
        count, length = TOKENS.shape
        x = jnp.asarray(embed)[TOKENS] + places[offset : offset + length]
        for one, two, qkv, o, up, down, b in every:
            y = x if post else rms_norm(x, one)
            q, k, v = (jnp.einsum("bne,ehd->bnhd", y, w) for w in qkv)
            scores = jnp.einsum("bnhd,bmhd->bhnm", q, k) * scale
            if causal:
                scores = jnp.where(np.tri(length) > 0, scores, -1e9)
            mixed = jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores), v)
            x = x + mixed.reshape(count, length, width) @ o.reshape(width, width)
            x = rms_norm(x, one) if post else x
            y = x if post else rms_norm(x, two)
            x = x * skips + act(y @ up) @ down + b
            x = rms_norm(x, two) if post else x
        return (rms_norm(x, last) if final else x * last) @ out

    def old(p: Any) -> Any:
        every = []
        for n in range(layers):
            at = f"layers.{n}"
            q, k, v, o = (p[f"{at}.{name}.weight"].T for name in "qkvo")
            qkv = [w.reshape(width, heads, head) for w in (q, k, v)]
            norms = p[f"{at}.norm_1.weight"], p[f"{at}.norm_2.weight"]
            maps = p[f"{at}.up.weight"].T, p[f"{at}.down.weight"].T
            every.append((*norms, qkv, o, *maps, p.get(f"{at}.down.bias", 0)))
        names = ("embed", "places", "norm")
        leaves = (*(p[f"{name}.weight"] for name in names), p["head.weight"].T)
        return leaves, every, changed

    def new(p: Any) -> Any:
        own = p["blocks"]
        every = [
            (
                *(own[name][n] for name in ("ln_1", "ln_2")),
                [own["qkv"][n][:, i] for i in range(3)],
                *(own[name][n] for name in ("out", "wi", "wo")),
                0,
            )
            for n in range(layers)
        ]
        leaves = tuple(p[name] for name in ("embed", "positions", "last", "head"))
        return leaves, every, plain

    return pair_of("blocks", shapes, target, old, new, run)


def convolutions(*, epsilon: float = 1e-5, pool: str = "mean") -> Pair:
    """Convolutions with batch norm, channels first in the old one.

    The options are those of the old one.
    """
    channels, classes, layers = 6, 7, 2
    x = np.random.default_rng(5).normal(size=(2, 7, 6, 3)).astype("f4")
    norm = ("weight", "bias", "running_mean", "running_var")
    shapes: dict[str, tuple[int, ...]] = {
        "stem.weight": (channels, 3, 3, 3),
        "fc.weight": (classes, channels),
        "fc.bias": (classes,),
    }
    target: dict[str, tuple[int, ...]] = {
        "params/stem": (3, 3, 3, channels),
        "params/head/kernel": (channels, classes),
        "params/head/bias": (classes,),
    }
    for n in range(layers):
        shapes[f"stages.{n}.conv.weight"] = (channels, channels, 3, 3)
        shapes |= {f"stages.{n}.bn.{name}": (channels,) for name in norm}
        target |= {
            f"params/stage_{n}/conv": (3, 3, channels, channels),
            f"params/stage_{n}/scale": (channels,),
            f"params/stage_{n}/bias": (channels,),
            f"batch_stats/stage_{n}/mean": (channels,),
            f"batch_stats/stage_{n}/var": (channels,),
        }

    def run(
        stem: Any, stages: Any, head: Any, bias: Any, epsilon: float, pool: str
    ) -> Any:
        def conv(x: Any, kernel: Any) -> Any:
            names = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=names
            )

        y = jax.nn.silu(conv(x, stem))
        for kernel, scale, shift, mean, var in stages:
            z = (conv(y, kernel) - mean) / jnp.sqrt(var + epsilon)
            y = jax.nn.silu(y + z * scale + shift)
        return getattr(y, pool)((1, 2)) @ head + bias

    def old(p: Any) -> Any:
        stages = [
            (
                p[f"stages.{n}.conv.weight"].transpose(2, 3, 1, 0),
                *(p[f"stages.{n}.bn.{name}"] for name in norm),
            )
            for n in range(layers)
        ]
        stem = p["stem.weight"].transpose(2, 3, 1, 0)
        return stem, stages, p["fc.weight"].T, p["fc.bias"], epsilon, pool

    def new(p: Any) -> Any:
        params, stats = p["params"], p["batch_stats"]
        stages = []
        for n in range(layers):
            own, seen = params[f"stage_{n}"], stats[f"stage_{n}"]
            norms = own["scale"], own["bias"], seen["mean"], seen["var"]
            stages.append((own["conv"], *norms))
        head = params["head"]
        return params["stem"], stages, head["kernel"], head["bias"], 1e-5, "mean"

    return pair_of("convolutions", shapes, target, old, new, run)


def gated_blocks(
    *,
    bias: bool = True,
    tied: bool = True,
    epsilon: float = 1e-5,
    acts: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (jax.nn.silu,) * 2,
    finish: Callable[[Any], Any] = lambda x: x,
) -> Pair:
    """Gated layers behind LayerNorm: its last map is that of tokens, or inputs are not.

    ``acts`` are those of the old and of the new one, the other options the new one's.
    """
    width, hidden, classes, layers = 12, 17, 7, 2
    x = np.random.default_rng(9).normal(size=(9, width)).astype("f4")
    shapes: dict[str, tuple[int, ...]] = {"head": (WORDS if tied else classes, width)}
    target: dict[str, tuple[int, ...]] = {"table": shapes["head"]}
    ends = {"ln.w": (width,), "ln.b": (width,)} if tied else {}
    shapes |= ends
    target |= {key.replace("ln", "final"): shape for key, shape in ends.items()}
    names = {"n": "scale", "m": "shift", "a": "wi", "g": "gate", "c": "wo"}
    names |= {"ab": "wi_b", "gb": "gate_b", "cb": "wo_b"} if bias else {}
    sizes = {"a": (hidden, width), "g": (hidden, width), "c": (width, hidden)}
    sizes |= {"ab": (hidden,), "gb": (hidden,), "cb": (width,)}
    for n in range(layers):
        for key, name in names.items():
            shape = sizes.get(key, (width,))
            shapes[f"{n}.{key}"] = shape
            target[f"{name}_{n}"] = shape[::-1]

    def norm(x: Any, scale: Any, shift: Any, small: float) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + small) * scale + shift

    def run(last: Any, ends: Any, every: Any, options: Any) -> Any:
        small, act, finish = options
        y = last[TOKENS] if tied else jnp.asarray(x)
        for scale, shift, wi, gate, wo, *biases in every:
            one, two, three = biases or (0, 0, 0)
            z = norm(y, scale, shift, small)
            y = y + (act(z @ wi + one) * (z @ gate + two)) @ wo + three
        return finish((norm(y, *ends, small) if tied else y) @ last.T)

    def old(p: Any) -> Any:
        every = [[p[f"{n}.{key}"].T for key in names] for n in range(layers)]
        own = 1e-5, acts[0], lambda x: x
        return p["head"], (p.get("ln.w"), p.get("ln.b")), every, own

    def new(p: Any) -> Any:
        every = [[p[f"{name}_{n}"] for name in names.values()] for n in range(layers)]
        ends = p.get("final.w"), p.get("final.b")
        return p["table"], ends, every, (epsilon, acts[1], finish)

    return pair_of("gated blocks", shapes, target, old, new, run)
