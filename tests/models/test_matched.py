"""Models of transformers in PyTorch and in Flax are matched, without a table.

Only what both models answer is compared. The table must answer right on numbers that
the search did not see, and at another size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from laws import needs_torch
from tiny import transformers

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
    """

    torch: str
    flax: str
    config: str
    small: Mapping[str, Any]
    large: Mapping[str, Any]
    inputs: Mapping[str, np.ndarray] = {"input_ids": EVERY}
    answer: str = "logits"
    tied: str = ""

    def sides(self, options: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
        """The source, the target, the new model and the old one."""
        import torch

        torch.manual_seed(1)
        config = getattr(transformers, self.config)(**options)
        config._attn_implementation = "eager"
        old = getattr(transformers, self.torch)(config).eval()
        new = getattr(transformers, self.flax)(config, _do_init=False)
        inputs = {name: torch.from_numpy(x) for name, x in self.inputs.items()}

        def reference(weights: Mapping[str, np.ndarray]) -> np.ndarray:
            state = {name: torch.from_numpy(x) for name, x in weights.items()}
            with torch.no_grad():
                out = torch.func.functional_call(old, state, (), inputs)
            return getattr(out, self.answer).numpy()

        def model(params: Any) -> Any:
            return getattr(new(**self.inputs, params=params), self.answer)

        source = {name: x.numpy() for name, x in old.state_dict().items()}
        source.pop(self.tied, None)
        target = jax.eval_shape(
            lambda: new.init_weights(jax.random.key(0), new.input_shape)
        )
        return source, target, jax.jit(model), reference


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
    ),
    "llama": Twin(
        torch="LlamaForCausalLM",
        flax="FlaxLlamaForCausalLM",
        config="LlamaConfig",
        small=LLAMA,
        large={
            "hidden_size": 30,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
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
    large = twin.sides({**twin.small, **twin.large})
    match = ta.match_models(*twin.sides(twin.small), more=large)
    assert match.found, match
    assert match.migration is not None
    arrays, params, apply, answer = large
    rng = np.random.default_rng(5)
    fresh = {
        path: (0.3 * rng.normal(size=x.shape)).astype("f4")
        for path, x in arrays.items()
    }
    moved = match.migration(fresh, params)
    ours = np.asarray(apply(ta.from_flat_dict(params, moved)))
    np.testing.assert_allclose(ours, answer(fresh), rtol=1e-3, atol=1e-3)
