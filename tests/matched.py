"""Pairs of small models for ``match_models``: alike, and different elsewhere.

Each pair is an old model with names and axes of PyTorch, and a new one of its own
layout, both as functions. ``alike`` may take another table; ``elsewhere`` has models
that differ in a constant, an epsilon, a mask or a step, which no table can mend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from wrong_models import Model

import treeadapt as ta

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models.

    Attributes:
        name: what they are like.
        source: arrays under the old names.
        target: tree of shapes of the new model.
        model: the new model.
        reference: the old one.
    """

    name: str
    source: Arrays
    target: Any
    model: Callable[[Any], Any]
    reference: Callable[[Any], Any]

    def match(self, **options: Any) -> ta.ModelMatch:
        """Match them."""
        sides = self.source, self.target, self.model, self.reference
        return ta.match_models(*sides, **options)

    def after(self, migration: ta.Migration, source: Arrays) -> float:
        """How far the answers are apart, at numbers of the caller's."""
        flat = migration(source, self.target)
        answers = (
            self.model(ta.from_flat_dict(self.target, flat)),
            self.reference(source),
        )
        ours, theirs = (
            np.concatenate([np.ravel(x) for x in jax.tree.leaves(each)])
            for each in answers
        )
        return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))


def arrays(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    """Random numbers; vectors are positive."""
    rng = np.random.default_rng(seed)
    return {
        path: np.exp(0.3 * rng.normal(size=shape)).astype("f4")
        if len(shape) < 2
        else (rng.normal(size=shape) / math.sqrt(shape[-1])).astype("f4")
        for path, shape in shapes.items()
    }


def nested(flat: Arrays) -> Any:
    """Nested dicts of a flat one."""
    tree: Any = {}
    for path, leaf in flat.items():
        *nodes, last = path.split("/")
        node = tree
        for name in nodes:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def silent(pair: Pair) -> Pair:
    """The pair with names of the target that say nothing."""
    rng = np.random.default_rng(3)
    words: dict[str, str] = {}

    def word(key: str) -> str:
        letters = ("bdfgklmnprst", "aeiou")
        text = "".join(
            letters[i % 2][rng.integers(len(letters[i % 2]))] for i in range(8)
        )
        return words.setdefault(key, text)

    flat = ta.to_flat_dict(pair.target)
    new = {path: "/".join(map(word, path.split("/"))) for path in flat}

    def model(tree: Any) -> Any:
        leaves = ta.to_flat_dict(tree)
        return pair.model(nested({path: leaves[new[path]] for path in flat}))

    target = nested({new[path]: leaf for path, leaf in flat.items()})
    return Pair(f"{pair.name}, silent", pair.source, target, model, pair.reference)


def of_table(make: Callable[[], Model]) -> Pair:
    """A model of ``wrong_models`` and itself under the names of its source."""
    own = make()
    table, source = own.table(), own.source()
    target = nested(jax.eval_shape(table, source))
    apply = jax.jit(own.apply)
    reference = jax.jit(lambda leaves: own.apply(nested(table(leaves))))
    return Pair(own.name, source, target, apply, reference)


# Small models in NumPy. Options say how they differ, and are those of the old one.


def gelu(x: Any, *, exact: bool = False) -> Any:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    if exact:
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(inner))


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def softmax(x: Any) -> Any:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def layer_norm(x: Any, scale: Any, bias: Any, epsilon: float = 1e-5) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def rms_norm(x: Any, scale: Any, epsilon: float = 1e-6) -> Any:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def rotated(x: Any, base: float = 10_000.0, *, halves: bool = True) -> Any:
    """Give [time, heads, head] positions."""
    half = x.shape[-1] // 2
    turns = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    if halves:
        a, b = x[..., :half], x[..., half:]
    else:
        a, b = x[..., ::2], x[..., 1::2]
    turned = (
        a * np.cos(turns) - b * np.sin(turns),
        b * np.cos(turns) + a * np.sin(turns),
    )
    if halves:
        return np.concatenate(turned, -1)
    return np.stack(turned, -1).reshape(x.shape)


TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6])


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder, its size, and in what its two sides may differ."""

    words: int = 11
    width: int = 8
    layers: int = 2
    heads: int = 2
    head: int = 6
    hidden: int = 10
    epsilon: float = 1e-6
    base: float = 10_000.0
    cap: float = 0.0
    clip: float = 0.0
    mask: float = -1e9
    factor: float = 1.0
    residual: float = 1.0
    act: Callable[[Any], Any] = silu
    window: int = 0
    shift: float = 0.0
    final: bool = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the source."""
        inner = self.heads * self.head
        shapes: dict[str, tuple[int, ...]] = {"tok.weight": (self.words, self.width)}
        for n in range(self.layers):
            at = f"layers.{n}"
            shapes |= {
                f"{at}.attn_norm.weight": (self.width,),
                f"{at}.wq.weight": (inner, self.width),
                f"{at}.wk.weight": (inner, self.width),
                f"{at}.wv.weight": (inner, self.width),
                f"{at}.wo.weight": (self.width, inner),
                f"{at}.ffn_norm.weight": (self.width,),
                f"{at}.gate.weight": (self.hidden, self.width),
                f"{at}.up.weight": (self.hidden, self.width),
                f"{at}.down.weight": (self.width, self.hidden),
            }
        return shapes | {
            "norm.weight": (self.width,),
            "head.weight": (self.words, self.width),
        }

    def run(
        self,
        embed: Any,
        layer: Callable[[int], Any],
        norm: Any,
        head: Any,
        *,
        halves: bool,
    ) -> Any:
        """Logits; ``layer`` gives norms, q, k, v [width, heads, head], o, the MLP."""
        x = embed[TOKENS] * self.factor
        seen = np.tri(len(TOKENS)) > 0
        if self.window:
            seen &= np.tri(len(TOKENS), k=-self.window) == 0
        for n in range(self.layers):
            one, two, q, k, v, o, gate, up, down = layer(n)
            y = rms_norm(x, one, self.epsilon)
            q, k, v = (np.einsum("te,ehd->thd", y, w) for w in (q, k, v))
            q, k = (rotated(z, self.base, halves=halves) for z in (q, k))
            scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head)
            if self.cap:
                scores = self.cap * np.tanh(scores / self.cap)
            weights = softmax(np.where(seen, scores, self.mask))
            x = x + self.residual * np.einsum("hqk,khd,hde->qe", weights, v, o)
            y = rms_norm(x, two, self.epsilon)
            inner = self.act(y @ gate) * (y @ up)
            if self.clip:
                inner = np.clip(inner, -self.clip, self.clip)
            x = x + self.residual * inner @ down + self.shift
        x = rms_norm(x, norm, self.epsilon) if self.final else x * norm
        return x @ head

    def reference(self, p: Any) -> Any:
        """The old model: rotates neighbours."""
        heads = (self.heads, self.head)

        def layer(n: int) -> Any:
            at = f"layers.{n}"
            maps = (
                p[f"{at}.w{name}.weight"].T.reshape(self.width, *heads)
                for name in "qkv"
            )
            out = p[f"{at}.wo.weight"].T.reshape(*heads, self.width)
            norms = (p[f"{at}.{name}_norm.weight"] for name in ("attn", "ffn"))
            mlp = (p[f"{at}.{name}.weight"].T for name in ("gate", "up", "down"))
            return *norms, *maps, out, *mlp

        return self.run(
            p["tok.weight"], layer, p["norm.weight"], p["head.weight"].T, halves=False
        )

    def target(self) -> Any:
        """Of the new model: scanned, gate and up in one, its heads on an axis."""
        e, h, d, f = self.width, self.heads, self.head, self.hidden
        n = self.layers
        shapes = {
            "embed": (self.words, e),
            "blocks/ln_1": (n, e),
            "blocks/qkv": (n, e, 3, h, d),
            "blocks/out": (n, h, d, e),
            "blocks/ln_2": (n, e),
            "blocks/wi": (n, e, 2, f),
            "blocks/wo": (n, f, e),
            "ln_f": (e,),
            "logits": (e, self.words),
        }
        return nested(
            {p: jax.ShapeDtypeStruct(s, "float32") for p, s in shapes.items()}
        )

    def model(self, p: Any) -> Any:
        """The new model: rotates halves."""
        own = p["blocks"]

        def layer(n: int) -> Any:
            qkv = (own["qkv"][n][:, i] for i in range(3))
            gate, up = (own["wi"][n][:, i] for i in (0, 1))
            norms = own["ln_1"][n], own["ln_2"][n]
            return *norms, *qkv, own["out"][n], gate, up, own["wo"][n]

        return self.run(p["embed"], layer, p["ln_f"], p["logits"], halves=True)


def decoder(new: Decoder = Decoder(), old: Decoder | None = None) -> Pair:
    """A decoder under both layouts."""
    old = old or new
    source = arrays(old.shapes())
    return Pair("decoder", source, new.target(), new.model, old.reference)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """An encoder with biases and LayerNorm, and in what its two sides may differ."""

    words: int = 11
    width: int = 8
    heads: int = 2
    hidden: int = 10
    epsilon: float = 1e-5
    exact: bool = True
    mask: float = -1e9
    tied: bool = False
    padding: int = 0
    scaled: bool = False
    classes: int = 3
    post: bool = True
    power: float = 0.5

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the source."""
        e = self.width
        shapes: dict[str, tuple[int, ...]] = {
            "emb.word.weight": (self.words, e),
            "emb.place.weight": (len(TOKENS), e),
        }
        for n in range(2):
            at = f"layer.{n}"
            for name in ("query", "key", "value", "dense"):
                shapes |= {f"{at}.{name}.weight": (e, e), f"{at}.{name}.bias": (e,)}
            for name in ("ln_a", "ln_b"):
                shapes |= {f"{at}.{name}.weight": (e,), f"{at}.{name}.bias": (e,)}
            shapes |= {
                f"{at}.up.weight": (self.hidden, e),
                f"{at}.up.bias": (self.hidden,),
                f"{at}.down.weight": (e, self.hidden),
                f"{at}.down.bias": (e,),
            }
        if not self.tied:
            shapes["cls.weight"] = (self.classes, e)
        return shapes

    def _run(self, embed: Any, places: Any, layers: Any, head: Any) -> Any:
        x = embed[TOKENS] * (math.sqrt(self.width) if self.scaled else 1) + places
        hidden = np.arange(len(TOKENS)) >= 6
        for q, k, v, o, a, up, down, b in layers:
            heads = (len(TOKENS), self.heads, -1)
            y = x if self.post else layer_norm(x, *a, self.epsilon)
            one, two, three = ((y @ w + c).reshape(heads) for w, c in (q, k, v))
            scores = np.einsum("qhd,khd->hqk", one, two)
            scores = scores / one.shape[-1] ** self.power
            mixed = softmax(np.where(hidden, self.mask, 0.0) + scores)
            mixed = np.einsum("hqk,khd->qhd", mixed, three).reshape(x.shape)
            x = x + mixed @ o[0] + o[1]
            x = layer_norm(x, *a, self.epsilon) if self.post else x
            y = x if self.post else layer_norm(x, *b, self.epsilon)
            x = x + gelu(y @ up[0] + up[1], exact=self.exact) @ down[0] + down[1]
            x = layer_norm(x, *b, self.epsilon) if self.post else x
        return [x, (x @ head)[:, : self.words]]

    def reference(self, p: Any) -> Any:
        """The old model."""

        def pair(name: str, *, turned: bool = True) -> Any:
            weight = p[f"{name}.weight"]
            return weight.T if turned else weight, p[f"{name}.bias"]

        layers = [
            (
                *(
                    pair(f"layer.{n}.{name}")
                    for name in ("query", "key", "value", "dense")
                ),
                pair(f"layer.{n}.ln_a", turned=False),
                pair(f"layer.{n}.up"),
                pair(f"layer.{n}.down"),
                pair(f"layer.{n}.ln_b", turned=False),
            )
            for n in range(2)
        ]
        embed = p["emb.word.weight"]
        head = embed.T if self.tied else p["cls.weight"].T
        return self._run(embed, p["emb.place.weight"], layers, head)

    def target(self) -> Any:
        """Of the new model; its vocabulary may be padded, its head a copy."""
        e, f, words = self.width, self.hidden, self.words + self.padding
        shapes = {"tokens/table": (words, e), "positions/table": (len(TOKENS), e)}
        for n in range(2):
            at = f"block_{n}"
            shapes |= {
                f"{at}/attention/qkv/kernel": (e, 3 * e),
                f"{at}/attention/qkv/bias": (3 * e,),
                f"{at}/attention/out/kernel": (e, e),
                f"{at}/attention/out/bias": (e,),
                f"{at}/norm_0/scale": (e,),
                f"{at}/norm_0/bias": (e,),
                f"{at}/up/kernel": (e, f),
                f"{at}/up/bias": (f,),
                f"{at}/down/kernel": (f, e),
                f"{at}/down/bias": (e,),
                f"{at}/norm_1/scale": (e,),
                f"{at}/norm_1/bias": (e,),
            }
        shapes["head/kernel"] = (e, words if self.tied else self.classes)
        return nested(
            {p: jax.ShapeDtypeStruct(s, "float32") for p, s in shapes.items()}
        )

    def model(self, p: Any) -> Any:
        """The new model."""
        layers = []
        for n in range(2):
            own = p[f"block_{n}"]
            qkv = own["attention"]["qkv"]
            maps = zip(
                np.split(qkv["kernel"], 3, axis=1),
                np.split(qkv["bias"], 3),
                strict=True,
            )
            norms = (
                (own[f"norm_{i}"]["scale"], own[f"norm_{i}"]["bias"]) for i in (0, 1)
            )
            first, second = norms
            out, up, down = own["attention"]["out"], own["up"], own["down"]
            rest = ((each["kernel"], each["bias"]) for each in (out, up, down))
            o, one, two = rest
            layers.append((*maps, o, first, one, two, second))
        head = p["head"]["kernel"]
        return self._run(p["tokens"]["table"], p["positions"]["table"], layers, head)


def encoder(new: Encoder = Encoder(), old: Encoder | None = None) -> Pair:
    """An encoder under both layouts."""
    old = old or new
    return Pair("encoder", arrays(old.shapes()), new.target(), new.model, old.reference)


def recurrent(order: str = "ifgo", *, one_more: float = 0.0) -> Pair:
    """An LSTM: PyTorch's gates are i, f, g, o; the new ones may be in another order."""
    inner, width = 6, 4
    x = np.random.default_rng(5).normal(size=(7, width)).astype("f4")
    shapes = {
        "rnn.weight_ih_l0": (4 * inner, width),
        "rnn.weight_hh_l0": (4 * inner, inner),
        "rnn.bias_ih_l0": (4 * inner,),
        "fc.weight": (3, inner),
        "fc.bias": (3,),
    }

    def run(own: Any, hidden: Any, bias: Any, head: Any, last: Any, names: str) -> Any:
        h, c = np.zeros(inner), np.zeros(inner)
        for each in x:
            gates = dict(
                zip(names, np.split(each @ own + h @ hidden + bias, 4), strict=True)
            )
            i, f, o = (
                1
                / (
                    1
                    + np.exp(
                        -gates[name] - one_more * (name == "f") * (names != "ifgo")
                    )
                )
                for name in "ifo"
            )
            c = f * c + i * np.tanh(gates["g"])
            h = o * np.tanh(c)
        return h @ head + last

    def reference(p: Any) -> Any:
        ih, hh, bias = (p[f"rnn.{n}_l0"] for n in ("weight_ih", "weight_hh", "bias_ih"))
        return run(ih.T, hh.T, bias, p["fc.weight"].T, p["fc.bias"], "ifgo")

    def model(p: Any) -> Any:
        cell, out = p["cell"], p["out"]
        kernels = cell["input"], cell["state"], cell["bias"]
        return run(*kernels, out["kernel"], out["bias"], order)

    target = {
        "cell": {
            "input": (width, 4 * inner),
            "state": (inner, 4 * inner),
            "bias": (4 * inner,),
        },
        "out": {"kernel": (inner, 3), "bias": (3,)},
    }
    specs = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, "float32"),
        target,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    return Pair("recurrent", arrays(shapes), specs, model, reference)


def elsewhere() -> Iterator[tuple[str, Pair]]:
    """Yield pairs of models that differ in what no table can mend."""
    new, plain = Decoder(), Encoder()
    for name, value in {
        "epsilon": 1e-5,
        "base": 500_000.0,
        "cap": 2.0,
        "clip": 0.1,
        "mask": -1.0,
        "residual": 0.7,
        "act": gelu,
        "window": 3,
        "shift": 0.1,
        "final": False,
    }.items():
        yield name, decoder(new, dataclasses.replace(new, **{name: value}))
    for epsilon in (1e-12, 1e-4, 1e-3):
        yield (
            f"epsilon {epsilon}",
            decoder(new, dataclasses.replace(new, epsilon=epsilon)),
        )
    for base in (5_000.0, 9_000.0):
        yield f"base {base}", decoder(new, dataclasses.replace(new, base=base))
    for cap in (1.0, 5.0, 30.0):
        yield f"soft cap {cap}", decoder(new, dataclasses.replace(new, cap=cap))
    for clip in (0.05, 0.5):
        yield f"clip {clip}", decoder(new, dataclasses.replace(new, clip=clip))
    for window in (2, 5):
        yield f"window {window}", decoder(new, dataclasses.replace(new, window=window))
    for name, value in {
        "GELU": False,
        "epsilon of LayerNorm": 1e-6,
        "epsilon of BERT": 1e-12,
        "epsilon of vision": 1e-3,
        "mask of the encoder": -2.0,
        "norms first": False,
        "power of the head": 0.9,
        "heads": 4,
    }.items():
        field = {
            "GELU": "exact",
            "mask of the encoder": "mask",
            "norms first": "post",
            "power of the head": "power",
            "heads": "heads",
        }.get(name, "epsilon")
        yield name, encoder(plain, dataclasses.replace(plain, **{field: value}))
    pair = encoder()

    def noisy(p: Any) -> Any:
        return [
            x + 0.01 * np.cos(np.arange(x.size)).reshape(x.shape) for x in pair.model(p)
        ]

    yield "a shift of the answers", dataclasses.replace(pair, model=noisy)
    yield "a bias of the gate", recurrent("fiog", one_more=1.0)
