"""Trees to measure: synthetic ones by size, and the shapes of real models.

All leaves are one shared scalar array, so that a tree of 100,000 leaves is cheap to
create and only conversion is timed. Models that run have separate arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict

from benchmarks import published_names

LEAF = jnp.ones(())


class Params(NamedTuple):
    """The container of a Brax PPO agent, as a NamedTuple."""

    policy: Any
    value: Any


def blocks(num_leaves: int, tag: str = "") -> Params:
    """Return a NamedTuple of two FrozenDicts of blocks of layers of 4 leaves."""
    names = ("kernel", "bias", "scale", "offset")
    layer = dict.fromkeys(names, LEAF)

    def half() -> FrozenDict:
        left, found = num_leaves // 2, {}
        while left > 0:
            layers = {f"layer_{j}": layer for j in range(min(4, max(1, left // 4)))}
            found[f"block{tag}_{len(found)}"] = layers
            left -= 4 * len(layers)
        return FrozenDict(found)

    return Params(half(), half())


def mixture_of_experts() -> dict[str, Any]:
    """Return the 22,213 leaves of a published mixture of experts, one shared array."""
    return jax.tree.map(lambda _: LEAF, published_names.tree_of("qwen3_moe"))


class Block(eqx.Module):
    """A transformer block: attention and a two-layer MLP with LayerNorms."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable[..., Any]

    def __init__(self, width: int, *, key: jax.Array):
        k1, k2, k3 = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(
            2, width, use_query_bias=True, use_key_bias=True, key=k1
        )
        self.up = eqx.nn.Linear(width, 2 * width, key=k2)
        self.down = eqx.nn.Linear(2 * width, width, key=k3)
        self.activation = jax.nn.gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the tokens ``x``, shape (length, width), one block on."""
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        h = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.down)(self.activation(jax.vmap(self.up)(h)))


class Transformer(eqx.Module):
    """An Equinox transformer of many small blocks."""

    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, num_blocks: int = 24, width: int = 16, *, key: jax.Array):
        *keys, last = jax.random.split(key, num_blocks + 1)
        self.blocks = [Block(width, key=k) for k in keys]
        self.head = eqx.nn.Linear(width, 1, key=last)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one number for the tokens ``x``, shape (length, width)."""
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))[0]


class NnxMlp(nnx.Module):
    """A deep nnx MLP."""

    def __init__(self, depth: int = 24, width: int = 16):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [nnx.Linear(width, width, rngs=rngs) for _ in range(depth)]
        )


def llama(
    layers: int, *, width: int, queries: int, keys: int, hidden: int, words: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a published Llama; ``queries`` and ``keys`` are those of all heads."""
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    every: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (words, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (words, width),
    }
    every |= {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    return {
        path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in every.items()
    }


def haiku_params(depth: int = 24) -> dict[str, Any]:
    """Return params like Haiku's, two levels with ``/`` in the names."""
    return {f"mlp/~/linear_{i}": {"b": LEAF, "w": LEAF} for i in range(depth)}


def brax_ppo() -> Any:
    """Return the params of Brax's PPO networks, in Brax's own class."""
    from brax.training.agents.ppo import losses, networks

    made = networks.make_ppo_networks(8, 2)
    key = jax.random.PRNGKey(0)
    return losses.PPONetworkParams(
        policy=made.policy_network.init(key), value=made.value_network.init(key)
    )


def linen_params(depth: int = 12) -> Any:
    """Return Linen params as a plain nested dict."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(depth):
                x = nn.Dense(8)(x)
            return x

    return Net().init(jax.random.PRNGKey(0), jnp.ones((1, 8)))


def real_models() -> dict[str, Any]:
    """Return the real models by name."""
    return {
        "Brax PPO": brax_ppo(),
        "Equinox transformer, 24 blocks": Transformer(key=jax.random.PRNGKey(0)),
        "nnx MLP, 24 layers": NnxMlp(),
        "Haiku MLP, 24 layers": haiku_params(),
        "mixture of experts": mixture_of_experts(),
    }
