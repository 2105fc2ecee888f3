"""Llama in three libraries: grouped queries, RMSNorm, rotary positions, SwiGLU.

``LinenLlama`` and ``NnxLlama`` scan their layers and have the same paths and shapes.
``EquinoxLlama`` has a list of layers, gate and up in one array, and rotates neighbours
of a head, where the others rotate its first half with its second.
"""

from __future__ import annotations

import dataclasses

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of one model.

    Attributes:
        words: of the vocabulary.
        head: size of a head.
        hidden: of the MLP.
        tied: whether the embedding is the head, too.
        axis: of layers, in a scan.
        theta: base of the rates of rotary positions.
        epsilon: of the norms.
    """

    words: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    tied: bool = False
    axis: int = 0
    theta: float = 10_000.0
    epsilon: float = 1e-6


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend to the past; each head of keys and values serves a group of queries.

    Args:
        q: [batch, time, heads, head], with positions, as ``k``.
        k: [batch, time, kv_heads, head], as ``v``.
        v: as ``k``.
    """
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def angles(x: jax.Array, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary positions: [time, 1, half a head]."""
    time, _, head = x.shape[-3:]
    half = head // 2
    rates = theta ** (-jnp.arange(half, dtype=float) / half)
    turns = jnp.arange(time, dtype=float)[:, None, None] * rates
    return jnp.cos(turns), jnp.sin(turns)


def rotate_halves(x: jax.Array, theta: float) -> jax.Array:
    """Give [..., time, heads, head] positions: the first half turns with the second."""
    cos, sin = angles(x, theta)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotate_neighbours(x: jax.Array, theta: float) -> jax.Array:
    """Give [..., time, heads, head] positions: each number turns with the next."""
    cos, sin = angles(x, theta)
    a, b = x[..., ::2], x[..., 1::2]
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.reshape(x.shape)


class LinenBlock(nn.Module):
    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        s = self.sizes

        def dense(name: str, *out: int, axis: tuple[int, ...] = (-1,)) -> nn.Module:
            return nn.DenseGeneral(out, axis, use_bias=False, name=name)

        y = nn.RMSNorm(s.epsilon, name="attention_norm")(x)
        q = rotate_halves(dense("query", s.heads, s.head)(y), s.theta)
        k = rotate_halves(dense("key", s.kv_heads, s.head)(y), s.theta)
        v = dense("value", s.kv_heads, s.head)(y)
        x = x + dense("out", s.width, axis=(-2, -1))(attend(q, k, v))
        y = nn.RMSNorm(s.epsilon, name="mlp_norm")(x)
        y = jax.nn.silu(dense("gate", s.hidden)(y)) * dense("up", s.hidden)(y)
        return x + dense("down", s.width)(y), None


class LinenLlama(nn.Module):
    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        s = self.sizes
        embed = nn.Embed(s.words, s.width, name="embed")
        axes, rngs = {"params": s.axis}, {"params": True}
        scan = nn.scan(LinenBlock, variable_axes=axes, split_rngs=rngs, length=s.layers)
        x, _ = scan(s, name="blocks")(embed(tokens))
        x = nn.RMSNorm(s.epsilon, name="norm")(x)
        if s.tied:
            return embed.attend(x)
        return nn.Dense(s.words, use_bias=False, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        def dense(inner: tuple[int, ...], out: tuple[int, ...]) -> nnx.Module:
            axes = tuple(range(-len(inner), 0))
            return nnx.LinearGeneral(inner, out, axis=axes, use_bias=False, rngs=rngs)

        self.sizes = s
        self.attention_norm = nnx.RMSNorm(s.width, epsilon=s.epsilon, rngs=rngs)
        self.query = dense((s.width,), (s.heads, s.head))
        self.key = dense((s.width,), (s.kv_heads, s.head))
        self.value = dense((s.width,), (s.kv_heads, s.head))
        self.out = dense((s.heads, s.head), (s.width,))
        self.mlp_norm = nnx.RMSNorm(s.width, epsilon=s.epsilon, rngs=rngs)
        self.gate = dense((s.width,), (s.hidden,))
        self.up = dense((s.width,), (s.hidden,))
        self.down = dense((s.hidden,), (s.width,))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.attention_norm(x)
        q = rotate_halves(self.query(y), self.sizes.theta)
        k = rotate_halves(self.key(y), self.sizes.theta)
        x = x + self.out(attend(q, k, self.value(y)))
        y = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class NnxLlama(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.embed = nnx.Embed(s.words, s.width, rngs=rngs)
        self.axis = s.axis
        stacked = nnx.vmap(NnxBlock, in_axes=(None, 0), out_axes=s.axis)
        self.blocks = nnx.split_rngs(splits=s.layers)(stacked)(s, rngs)
        self.norm = nnx.RMSNorm(s.width, epsilon=s.epsilon, rngs=rngs)
        if not s.tied:
            self.head = nnx.Linear(s.width, s.words, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        run = nnx.scan(
            lambda x, block: block(x),
            in_axes=(nnx.Carry, self.axis),
            out_axes=nnx.Carry,
        )
        x = self.norm(run(self.embed(tokens), self.blocks))
        return self.head(x) if hasattr(self, "head") else self.embed.attend(x)


class EquinoxBlock(eqx.Module):
    norms: list[eqx.nn.RMSNorm]  # before attention, before the MLP
    query: jax.Array  # [heads, head, width], as keys and values
    key: jax.Array
    value: jax.Array
    out: jax.Array  # [width, heads, head]
    gate_and_up: eqx.nn.Linear
    down: eqx.nn.Linear
    sizes: Sizes = eqx.field(static=True)

    def __init__(self, s: Sizes, key: jax.Array):
        keys = jax.random.split(key, 6)
        self.norms = [
            eqx.nn.RMSNorm(s.width, s.epsilon, use_bias=False) for _ in range(2)
        ]
        self.query = jax.random.normal(keys[0], (s.heads, s.head, s.width))
        self.key = jax.random.normal(keys[1], (s.kv_heads, s.head, s.width))
        self.value = jax.random.normal(keys[2], (s.kv_heads, s.head, s.width))
        self.out = jax.random.normal(keys[3], (s.width, s.heads, s.head))
        both = 2 * s.hidden
        self.gate_and_up = eqx.nn.Linear(s.width, both, use_bias=False, key=keys[4])
        self.down = eqx.nn.Linear(s.hidden, s.width, use_bias=False, key=keys[5])
        self.sizes = s

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        q, k, v = (
            jnp.einsum("hde,te->thd", w, y) for w in (self.query, self.key, self.value)
        )
        q, k = (rotate_neighbours(each, self.sizes.theta) for each in (q, k))
        x = x + jnp.einsum("ehd,thd->te", self.out, attend(q, k, v))
        y = jax.vmap(self.gate_and_up)(jax.vmap(self.norms[1])(x))
        gate, up = jnp.split(y, 2, axis=-1)
        return x + jax.vmap(self.down)(jax.nn.silu(gate) * up)


class EquinoxLlama(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[EquinoxBlock]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear | None

    def __init__(self, s: Sizes, key: jax.Array):
        keys = jax.random.split(key, s.layers + 2)
        self.embed = eqx.nn.Embedding(s.words, s.width, key=keys[0])
        self.blocks = [EquinoxBlock(s, each) for each in keys[2:]]
        self.norm = eqx.nn.RMSNorm(s.width, s.epsilon, use_bias=False)
        head = eqx.nn.Linear(s.width, s.words, use_bias=False, key=keys[1])
        self.head = None if s.tied else head

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The answer to one text."""
        x = self.embed.weight[tokens]
        for block in self.blocks:
            x = block(x)
        head = self.embed if self.head is None else self.head
        return jax.vmap(self.norm)(x) @ head.weight.T
