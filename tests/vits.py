"""Vision transformers in nnx: layers in a scan, heads on an axis of their own.

``ViT`` has a class token and a head; ``Tower`` is what Gemma 3 sees images with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of one model; ``hidden`` is the width of its MLP."""

    image: int
    patch: int
    width: int
    layers: int
    heads: int
    hidden: int
    labels: int = 0
    epsilon: float = 1e-12
    exact: bool = True  # GELU, else its approximation by tanh

    @property
    def patches(self) -> int:
        """Of an image."""
        return (self.image // self.patch) ** 2


def stack(make: Callable[[nnx.Rngs], Any], layers: int, rngs: nnx.Rngs) -> Any:
    """A module whose arrays hold those of all layers, along axis 0."""
    return nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs)


class Block(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.exact = s.exact
        self.norm1 = nnx.LayerNorm(s.width, epsilon=s.epsilon, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            s.heads, s.width, decode=False, rngs=rngs, keep_rngs=False
        )
        self.norm2 = nnx.LayerNorm(s.width, epsilon=s.epsilon, rngs=rngs)
        self.up = nnx.Linear(s.width, s.hidden, rngs=rngs)
        self.down = nnx.Linear(s.hidden, s.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        y = jax.nn.gelu(self.up(self.norm2(x)), approximate=not self.exact)
        return x + self.down(y)


class Tower(nnx.Module):
    """Images, [batch, channels, height, width], to [batch, patches, width]."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs, *, first: int = 0):
        patch = (s.patch, s.patch)
        self.patches = nnx.Conv(
            3, s.width, patch, strides=patch, padding="VALID", rngs=rngs
        )
        self.positions = nnx.Param(jnp.zeros((first + s.patches, s.width)))
        self.blocks = stack(lambda rngs: Block(s, rngs), s.layers, rngs)
        self.norm = nnx.LayerNorm(s.width, epsilon=s.epsilon, rngs=rngs)

    def __call__(self, images: jax.Array, *first: jax.Array) -> jax.Array:
        x = self.patches(jnp.moveaxis(images, 1, -1))
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = jnp.concatenate([*first, x], axis=1) + self.positions[...]
        run = nnx.scan(
            lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return self.norm(run(x, self.blocks))


class ViT(nnx.Module):
    """Images to logits, as the class token sees them."""

    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.token = nnx.Param(jnp.zeros(s.width))
        self.tower = Tower(s, rngs, first=1)
        self.head = nnx.Linear(s.width, s.labels, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        shape = (images.shape[0], 1, self.token.shape[0])
        token = jnp.broadcast_to(self.token[...], shape)
        return self.head(self.tower(images, token)[:, 0])
