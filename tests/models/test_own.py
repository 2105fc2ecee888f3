"""Other models from PyTorch into models of our own, with heads on an axis, scanned.

``vits.py``, ``decoders.py`` and ``docs/examples/gpt2_nnx.py`` have the models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import decoders
import jax
import numpy as np
import pytest
import vits
from flax import nnx
from laws import Laws, make_setting
from test_flax import CASES, GPT2_SIZES, numbers
from tiny import MIGRATIONS, TOKENS, Tiny, table_file, transformers

sys.path.append(str(MIGRATIONS.parent))
from gpt2_nnx import GPT2

# One image of four tokens in each text.
IMAGE = 36
WITH_IMAGE = np.where([np.arange(10) // 4 == 0, np.arange(10) // 4 == 1], IMAGE, TOKENS)

GEMMA3 = Tiny(
    names="gemma3",
    torch="Gemma3ForConditionalGeneration",
    flax="",
    config=lambda: transformers.Gemma3Config(
        text_config={
            "vocab_size": 37,
            "hidden_size": 22,
            "num_hidden_layers": 14,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 14,
            "intermediate_size": 13,
            "sliding_window": 4,
            "query_pre_attn_scalar": 16,
        },
        vision_config={
            "image_size": 28,
            "patch_size": 7,
            "hidden_size": 10,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 11,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    ),
    inputs={
        "input_ids": WITH_IMAGE,
        "token_type_ids": (WITH_IMAGE == IMAGE).astype(int),
        "pixel_values": numbers(2, 3, 28, 28),
    },
)
QWEN3_MOE = Tiny(
    names="qwen3-moe",
    torch="Qwen3MoeForCausalLM",
    flax="",
    config=lambda: transformers.Qwen3MoeConfig(
        vocab_size=37,
        hidden_size=22,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=14,
        moe_intermediate_size=13,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rope_theta=1_000_000.0,
    ),
)


def gpt2(rngs: nnx.Rngs) -> GPT2:
    """The model of the example without its LoRA factors, which no file holds."""
    model = GPT2(**GPT2_SIZES, rngs=rngs)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.LoRALinear):
            module.lora = Nothing()
    return model


class Nothing(nnx.Module):
    def __call__(self, x: Any) -> float:
        return 0.0


class Own(NamedTuple):
    """A model of our own.

    Attributes:
        tiny: that it is read from.
        make: the model, from random numbers.
        inputs: names of the inputs that it takes.
    """

    tiny: Tiny
    make: Callable[[nnx.Rngs], nnx.Module]
    inputs: tuple[str, ...]


VIT = vits.Sizes(21, 7, 22, 3, 2, 13, labels=17)
TOWER = vits.Sizes(28, 7, 10, 3, 2, 11, epsilon=1e-6, exact=False)
TEXT = decoders.Sizes(
    37, 22, 14, 6, 2, 14, 13, 16**-0.5, window=4, image_token=IMAGE, image_tokens=4
)
MOE = decoders.Sizes(37, 22, 3, 6, 2, 14, 13, 14**-0.5, experts=5, chosen=2)
OWN = {
    "gpt2-nnx": Own(CASES["gpt2-flax"], gpt2, ("input_ids",)),
    "vit-nnx": Own(
        CASES["vit-flax"], lambda rngs: vits.ViT(VIT, rngs), ("pixel_values",)
    ),
    "gemma3-scanned": Own(
        GEMMA3,
        lambda rngs: decoders.Gemma3(TEXT, TOWER, rngs),
        ("input_ids", "pixel_values"),
    ),
    "qwen3-moe-scanned": Own(
        QWEN3_MOE, lambda rngs: decoders.Qwen3Moe(MOE, rngs), ("input_ids",)
    ),
}


def answer_of(own: Own) -> Callable[[Any], np.ndarray]:
    inputs = [own.tiny.inputs[name] for name in own.inputs]
    compiled = jax.jit(lambda model: model(*inputs))
    return lambda model: np.asarray(compiled(model))


@pytest.fixture(scope="module", params=OWN)
def setting(request, tmp_path_factory):
    own = OWN[request.param]
    folder = tmp_path_factory.mktemp("model")
    target = nnx.eval_shape(lambda: own.make(nnx.Rngs(0)))
    text = (table_file(request.param)).read_text()
    file = tmp_path_factory.mktemp("table") / "table.toml"
    text = text.replace("{n+60}", "{n+12}")  # as many layers as are in blocks
    file.write_text(text.replace('[new]\n"**/lora/*" = "target"\n', ""))
    return make_setting(own.tiny, file, folder, target, answer_of(own))


class TestOwn(Laws):
    """The laws, for models of our own."""
