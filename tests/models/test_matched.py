"""Models of transformers in PyTorch are matched, without a table.

With their twins in Flax, and with a model of our own in plain JAX. Only what both
models answer is compared. The table must answer right on numbers that the search did
not see, and at another size; and move every number as the table that ships does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import needs_torch
from test_flax import CASES
from test_llama import OWN, SIZES, answer_of, migration_of
from tiny import TOKENS, transformers

import treeadapt as ta

pytestmark = needs_torch

#: Every token of the tiny vocabulary.
EVERY = np.arange(40).reshape(2, 20) * 7 % 37
PIXELS = np.random.default_rng(2).normal(size=(2, 3, 10, 10)).astype("float32")


class Twin(NamedTuple):
    """A model of both libraries, at two sizes.

    Attributes:
        torch: name of the class of PyTorch.
        flax: name of that of Flax.
        config: name of their configuration.
        small: its options.
        large: those of another size, next to ``small``.
        inputs: of both models.
        answer: field of the output that is compared.
        tied: name in the state dict that is another one too.
        node: where the model is in the target of the table that ships.
    """

    torch: str
    flax: str
    config: str
    small: Mapping[str, Any]
    large: Mapping[str, Any]
    inputs: Mapping[str, np.ndarray] = {"input_ids": EVERY}
    answer: str = "logits"
    tied: str = ""
    node: str = ""

    def of(self, options: Mapping[str, Any]) -> Any:
        """The configuration of both."""
        config = getattr(transformers, self.config)(**options)
        config._attn_implementation = "eager"
        return config

    def sides(self, options: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
        """The source, the target, the new model and the old one."""
        config = self.of(options)
        source, reference = in_torch(self.torch, config, self.inputs, self.answer)
        source.pop(self.tied, None)
        new = getattr(transformers, self.flax)(config, _do_init=False)

        def model(params: Any) -> Any:
            return getattr(new(**self.inputs, params=params), self.answer)

        target = jax.eval_shape(
            lambda: new.init_weights(jax.random.key(0), new.input_shape)
        )
        return source, target, jax.jit(model), reference


def in_torch(
    name: str, config: Any, inputs: Mapping[str, np.ndarray], answer: str = "logits"
) -> tuple[dict[str, np.ndarray], Callable[[Mapping[str, np.ndarray]], np.ndarray]]:
    """The weights of a model in PyTorch, and the model as a function of them."""
    import torch

    torch.manual_seed(1)
    module = getattr(transformers, name)(config).eval()
    tensors = {name: torch.from_numpy(x) for name, x in inputs.items()}

    def reference(weights: Mapping[str, np.ndarray]) -> np.ndarray:
        state = {name: torch.from_numpy(x) for name, x in weights.items()}
        with torch.no_grad():
            out = torch.func.functional_call(module, state, (), tensors)
        return getattr(out, answer).numpy()

    return {name: x.numpy() for name, x in module.state_dict().items()}, reference


BERT = {
    "vocab_size": 37,
    "hidden_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 13,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
}
LLAMA = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
LARGER_LLAMA = {
    "hidden_size": 30,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
TWINS = {
    "gpt2": Twin(
        torch="GPT2LMHeadModel",
        flax="FlaxGPT2LMHeadModel",
        config="GPT2Config",
        small={
            "vocab_size": 37,
            "n_positions": 20,
            "n_embd": 22,
            "n_layer": 2,
            "n_head": 2,
            "n_inner": 13,
        },
        large={"n_embd": 30, "n_layer": 3, "n_head": 3, "n_inner": 17},
        tied="lm_head.weight",
    ),
    "bert": Twin(
        torch="BertModel",
        flax="FlaxBertModel",
        config="BertConfig",
        small=BERT,
        large={"hidden_size": 30, "num_hidden_layers": 3, "num_attention_heads": 3},
        inputs={
            "input_ids": EVERY,
            "attention_mask": np.ones_like(EVERY),
            "token_type_ids": EVERY % 2,
            "position_ids": np.arange(20) + 0 * EVERY,
        },
        answer="pooler_output",
        node="bert",
    ),
    "llama": Twin(
        torch="LlamaForCausalLM",
        flax="FlaxLlamaForCausalLM",
        config="LlamaConfig",
        small=LLAMA,
        large=LARGER_LLAMA,
    ),
    "mistral": Twin(
        torch="MistralForCausalLM",
        flax="FlaxMistralForCausalLM",
        config="MistralConfig",
        # No text is as long as its window, which is one longer in Flax.
        small=LLAMA,
        large=LARGER_LLAMA,
    ),
    "vit": Twin(
        torch="ViTForImageClassification",
        flax="FlaxViTForImageClassification",
        config="ViTConfig",
        small={
            "image_size": 10,
            "patch_size": 5,
            "hidden_size": 22,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 13,
            "num_labels": 7,
        },
        large={"hidden_size": 30, "num_hidden_layers": 3, "num_attention_heads": 3},
        inputs={"pixel_values": PIXELS},
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_model_of_torch_is_matched_with_its_twin_in_flax(name: str) -> None:
    twin = TWINS[name]
    options = {**twin.small, **twin.large}
    large = twin.sides(options)
    match = ta.match_models(*twin.sides(twin.small), more=large)
    arrays, moved = assert_right(match, large)
    shipped = ta.load_migration("flax", config=twin.of(options).to_dict())
    target = {twin.node: large[1]} if twin.node else large[1]
    wanted = shipped(arrays, target)
    moved = {f"{twin.node}/{path}".strip("/"): x for path, x in moved.items()}
    assert not ta.tree_diff(moved, wanted, values=True)


def assert_right(match: ta.ModelMatch, sides: Any) -> tuple[Any, Any]:
    """Compare the answers to other numbers; return these, before and after."""
    source, target, model, reference = sides
    assert match.found, match
    assert match.migration is not None
    rng = np.random.default_rng(5)
    arrays = {
        path: (0.3 * rng.normal(size=x.shape)).astype("f4")
        for path, x in source.items()
    }
    moved = match.migration(arrays, target)
    ours = np.asarray(model(ta.from_flat_dict(target, moved)))
    np.testing.assert_allclose(ours, reference(arrays), rtol=1e-3, atol=1e-3)
    return arrays, moved


# Qwen 2 as somebody may write it: layers in a scan, heads as an axis, halves as another


def rms(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def rotated(x: Any) -> Any:
    """Turn ``[batch, time, head, half, pair]`` by its place."""
    length, pairs = x.shape[1], x.shape[-1]
    angles = np.outer(np.arange(length), 1e4 ** (-np.arange(pairs) / pairs))
    cos, sin = (f(angles).astype("f4")[None, :, None] for f in (np.cos, np.sin))
    one, two = x[..., 0, :], x[..., 1, :]
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def attend(x: Any, own: Any) -> Any:
    q, k, v = (
        jnp.einsum("btm,m...->bt...", x, own[f"to_{n}"]) + own[f"{n}_shift"]
        for n in "qkv"
    )
    q, k = rotated(q), rotated(k)
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return jnp.einsum("bqhd,hdm->bqm", mixed, own["back"])


def block(x: Any, own: Any) -> tuple[Any, None]:
    x = x + attend(rms(x, own["first"]), own["mix"])
    gate, up = jnp.einsum("btm,mpf->pbtf", rms(x, own["second"]), own["wide"])
    return x + (jax.nn.silu(gate) * up) @ own["narrow"], None


@jax.jit
def qwen(params: Any) -> Any:
    x, _ = jax.lax.scan(block, params["words"][EVERY], params["stack"])
    return rms(x, params["last"]) @ params["logits"]


def qwen_sides(options: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    config = transformers.Qwen2Config(**options, attn_implementation="eager")
    source, reference = in_torch("Qwen2ForCausalLM", config, {"input_ids": EVERY})
    n, m, f = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    h, g = config.num_attention_heads, config.num_key_value_heads
    half = m // h // 2
    mix = {"to_v": (n, m, g, 2 * half), "v_shift": (n, g, 2 * half)}
    for name, count in (("q", h), ("k", g)):
        mix[f"to_{name}"] = (n, m, count, 2, half)
        mix[f"{name}_shift"] = (n, count, 2, half)
    stack = {
        "mix": {**mix, "back": (n, h, 2 * half, m)},
        **dict.fromkeys(("first", "second"), (n, m)),
        "wide": (n, m, 2, f),
        "narrow": (n, f, m),
    }
    words = config.vocab_size
    shapes = {"words": (words, m), "stack": stack, "last": (m,), "logits": (m, words)}
    target = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        shapes,
        is_leaf=lambda each: isinstance(each, tuple),
    )
    return source, target, qwen, reference


def test_a_model_of_torch_is_matched_with_one_in_plain_jax() -> None:
    large = qwen_sides({**LLAMA, **TWINS["llama"].large})
    match = ta.match_models(*qwen_sides(LLAMA), more=large)
    assert_right(match, large)


def test_the_table_of_our_own_llama_is_found_again() -> None:
    """Its layers are in a scan, and its heads are an axis."""
    config, target = CASES["llama-flax"].config(), OWN["Linen"].shapes(SIZES)
    config._attn_implementation = "eager"
    source, reference = in_torch("LlamaForCausalLM", config, {"input_ids": TOKENS})
    sides = source, target, answer_of(OWN["Linen"]), reference
    arrays, moved = assert_right(ta.match_models(*sides), sides)
    wanted = migration_of("Linen")(arrays, target)
    assert not ta.tree_diff(moved, wanted, values=True)
