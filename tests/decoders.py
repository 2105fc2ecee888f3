"""Gemma 3 and the mixture of experts of Qwen 3 in nnx, with layers in a scan.

Both give queries and keys norms of their own, and an axis to heads. The norms of nnx
keep the factor that they multiply by, where Gemma publishes it less 1.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import vits
from flax import nnx
from llamas import rotate_halves
from vits import stack


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of one model; ``hidden`` is the width of its MLP, or of an expert."""

    words: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    scale: float  # of the products of queries and keys
    experts: int = 0
    chosen: int = 0  # experts of each token
    window: int = 0  # of a local layer
    image_token: int = 0
    image_tokens: int = 0  # of each image
    epsilon: float = 1e-6


def dense(inner: int | tuple[int, ...], out: int | tuple[int, ...], rngs: nnx.Rngs):
    axis = tuple(range(-len(inner), 0)) if isinstance(inner, tuple) else -1
    return nnx.LinearGeneral(inner, out, axis=axis, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.scale = s.scale
        self.query = dense(s.width, (s.heads, s.head), rngs)
        self.key = dense(s.width, (s.kv_heads, s.head), rngs)
        self.value = dense(s.width, (s.kv_heads, s.head), rngs)
        self.out = dense((s.heads, s.head), s.width, rngs)
        self.query_norm = nnx.RMSNorm(s.head, epsilon=s.epsilon, rngs=rngs)
        self.key_norm = nnx.RMSNorm(s.head, epsilon=s.epsilon, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, theta: float) -> jax.Array:
        """``mask`` says which of [batch, time, time] are seen."""
        q = rotate_halves(self.query_norm(self.query(x)), theta)
        k = rotate_halves(self.key_norm(self.key(x)), theta)
        return self.out(
            jax.nn.dot_product_attention(
                q, k, self.value(x), mask=mask[:, None], scale=self.scale
            )
        )


class GemmaLayer(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(s.width, epsilon=s.epsilon, rngs=rngs)

        self.input_norm, self.post_attention_norm = norm(), norm()
        self.pre_feedforward_norm, self.post_feedforward_norm = norm(), norm()
        self.attention = Attention(s, rngs)
        self.gate = dense(s.width, s.hidden, rngs)
        self.up = dense(s.width, s.hidden, rngs)
        self.down = dense(s.hidden, s.width, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, theta: float) -> jax.Array:
        y = self.attention(self.input_norm(x), mask, theta)
        x = x + self.post_attention_norm(y)
        y = self.pre_feedforward_norm(x)
        y = self.down(nnx.gelu(self.gate(y)) * self.up(y))
        return x + self.post_feedforward_norm(y)


class Gemma3(nnx.Module):
    """Blocks of six layers, the last of which sees all; the rest of the layers.

    Each text has one image; its tokens have the number ``image_token``.
    """

    def __init__(self, s: Sizes, image: vits.Sizes, rngs: nnx.Rngs):
        self.sizes = s
        self.embed = nnx.Embed(s.words, s.width, rngs=rngs)
        self.blocks = stack(
            lambda rngs: nnx.List([GemmaLayer(s, rngs) for _ in range(6)]),
            s.layers // 6,
            rngs,
        )
        self.tail = stack(lambda rngs: GemmaLayer(s, rngs), s.layers % 6, rngs)
        self.norm = nnx.RMSNorm(s.width, epsilon=s.epsilon, rngs=rngs)
        self.tower = vits.Tower(image, rngs)
        self.image_norm = nnx.RMSNorm(image.width, epsilon=image.epsilon, rngs=rngs)
        self.image_out = dense(image.width, s.width, rngs)

    def seen(self, images: jax.Array) -> jax.Array:
        """The image's tokens: patches in squares, averaged."""
        x = self.tower(images)
        side, tokens = (round(n**0.5) for n in (x.shape[1], self.sizes.image_tokens))
        x = x.reshape(x.shape[0], tokens, side // tokens, tokens, side // tokens, -1)
        x = x.mean((2, 4)).reshape(x.shape[0], tokens**2, -1)
        return self.image_out(self.image_norm(x))

    def __call__(self, tokens: jax.Array, images: jax.Array) -> jax.Array:
        s = self.sizes
        x = self.embed(tokens) * s.width**0.5
        of_image = tokens == s.image_token
        number = jnp.cumsum(of_image, axis=1)[..., None] - 1
        seen = jnp.take_along_axis(self.seen(images), number, axis=1)
        x = jnp.where(of_image[..., None], seen, x)

        whole = of_image[:, :, None] & of_image[:, None]
        step = jnp.arange(tokens.shape[1])
        past = step[:, None] - step
        full, local = (past >= 0) | whole, (past >= 0) & (past < s.window) | whole

        def block(x: jax.Array, layers: nnx.List) -> jax.Array:
            *others, last = layers
            for layer in others:
                x = layer(x, local, 10_000.0)
            return last(x, full, 1_000_000.0)

        axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
        x = nnx.scan(block, **axes)(x, self.blocks)
        x = nnx.scan(lambda x, layer: layer(x, local, 10_000.0), **axes)(x, self.tail)
        return self.embed.attend(self.norm(x))


class Experts(nnx.Module):
    """Each token goes to a few experts; here all compute, and most count nothing."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.chosen = s.chosen
        self.gate = nnx.Param(jnp.zeros((s.experts, s.width, s.hidden)))
        self.up = nnx.Param(jnp.zeros((s.experts, s.width, s.hidden)))
        self.down = nnx.Param(jnp.zeros((s.experts, s.hidden, s.width)))

    def __call__(self, x: jax.Array, logits: jax.Array) -> jax.Array:
        shares, which = jax.lax.top_k(jax.nn.softmax(logits), self.chosen)
        shares /= shares.sum(-1, keepdims=True)
        shares = shares[..., None] * jax.nn.one_hot(which, logits.shape[-1])
        gate = jnp.einsum("bte,xef->btxf", x, self.gate[...])
        up = jnp.einsum("bte,xef->btxf", x, self.up[...])
        y = jnp.einsum("btxf,xfe->btxe", jax.nn.silu(gate) * up, self.down[...])
        return jnp.einsum("btxe,btkx->bte", y, shares)


class MoeLayer(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(s.width, epsilon=s.epsilon, rngs=rngs)
        self.attention = Attention(s, rngs)
        self.mlp_norm = nnx.RMSNorm(s.width, epsilon=s.epsilon, rngs=rngs)
        self.router = dense(s.width, s.experts, rngs)
        self.experts = Experts(s, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        time = x.shape[1]
        past = jnp.tri(time, dtype=bool)[None]
        x = x + self.attention(self.attention_norm(x), past, 1_000_000.0)
        y = self.mlp_norm(x)
        return x + self.experts(y, self.router(y))


class Qwen3Moe(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.embed = nnx.Embed(s.words, s.width, rngs=rngs)
        self.blocks = stack(lambda rngs: MoeLayer(s, rngs), s.layers, rngs)
        self.norm = nnx.RMSNorm(s.width, epsilon=s.epsilon, rngs=rngs)
        self.head = dense(s.width, s.words, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        run = nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return self.head(self.norm(run(self.embed(tokens), self.blocks)))
