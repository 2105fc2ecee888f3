"""GPT-2 in Flax nnx: the layers run in a scan, and linear maps have LoRA factors.

``migrations/gpt2-nnx.toml`` reads the PyTorch file of a GPT-2 into this model, and
writes it back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Attention(nnx.Module):
    """Each position looks at those before it."""

    def __init__(self, width: int, heads: int, rank: int, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nnx.LoRALinear(width, width, lora_rank=rank, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, length, width] to the same shape."""
        batch, length, width = x.shape
        q, k, v = (
            project(x).reshape(batch, length, self.heads, -1)
            for project in (self.query, self.key, self.value)
        )
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.reshape(batch, length, width))


class Block(nnx.Module):
    """One layer: attention, then two linear maps, each on top of what was there."""

    def __init__(
        self, width: int, heads: int, hidden: int, rank: int, rngs: nnx.Rngs
    ) -> None:
        self.ln_1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.attn = Attention(width, heads, rank, rngs)
        self.ln_2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.LoRALinear(width, hidden, lora_rank=rank, rngs=rngs)
        self.down = nnx.LoRALinear(hidden, width, lora_rank=rank, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, length, width] to the same shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.down(nnx.gelu(self.up(self.ln_2(x))))


class GPT2(nnx.Module):
    """The model; ``blocks`` holds the arrays of all layers, one axis more than a layer.

    Args:
        vocabulary: number of tokens.
        length: number of positions.
        width: of the embedding.
        layers: number of layers.
        heads: of the attention.
        hidden: width between the two linear maps of a layer; four times ``width`` if
            it is not given.
        rank: of the LoRA factors.
        rngs: random numbers for the start.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        width: int,
        layers: int,
        heads: int,
        hidden: int | None = None,
        rank: int = 4,
        rngs: nnx.Rngs,
    ) -> None:
        hidden = hidden or 4 * width
        self.wte = nnx.Embed(vocabulary, width, rngs=rngs)
        self.wpe = nnx.Embed(length, width, rngs=rngs)

        @nnx.split_rngs(splits=layers)
        @nnx.vmap
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(width, heads, hidden, rank, rngs)

        self.blocks = blocks(rngs)
        self.ln_f = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of the next token, ``[batch, length, vocabulary]``."""
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        return self.wte.attend(self.ln_f(run(self.blocks, x)))
