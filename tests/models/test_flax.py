"""Published layouts against the models of transformers: logits, both ways.

A case is a model and a published table. PyTorch saves the model,
the table reads its file into Flax, and both answer alike; the way back gives every bit,
and PyTorch reads it. One mistake in the table shows in the shapes or in the answer.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from command import invoke
from laws import Laws, make_setting, needs_torch, oracle
from tiny import TOKENS, Tiny, table_file, transformers

import treeadapt as ta

GPT2_LAYERS, GPT2_LENGTH = 3, 23
#: Of our own model, in the same size.
GPT2_SIZES = {
    "vocabulary": 37,
    "length": GPT2_LENGTH,
    "width": 22,
    "layers": GPT2_LAYERS,
    "heads": 2,
    "hidden": 13,
}
LLAMA = {
    "vocab_size": 37,
    "hidden_size": 84,  # 6 heads of 14, two for each of keys and values
    "intermediate_size": 23,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}


def rates() -> dict[str, np.ndarray]:
    """Buffers that files of Llama 2 hold."""
    return {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(7, "f4")
        for layer in range(LLAMA["num_hidden_layers"])
    }


def numbers(*shape: int) -> np.ndarray:
    """Random numbers for an input."""
    return np.random.default_rng(2).normal(size=shape).astype("float32")


#: The last word of a name is that of the table.
CASES = {
    "llama-flax": Tiny(
        names="llama",
        torch="LlamaForCausalLM",
        flax="FlaxLlamaForCausalLM",
        config=lambda: transformers.LlamaConfig(**LLAMA),
        buffers=rates,
    ),
    "mistral llama-flax": Tiny(
        names="llama",
        torch="MistralForCausalLM",
        flax="FlaxMistralForCausalLM",
        # No text is as long as its window, which is one longer in Flax.
        config=lambda: transformers.MistralConfig(**LLAMA),
        buffers=rates,
    ),
    "gpt2-flax": Tiny(
        names="gpt2",
        torch="GPT2LMHeadModel",
        flax="FlaxGPT2LMHeadModel",
        config=lambda: transformers.GPT2Config(
            vocab_size=37,
            n_positions=GPT2_LENGTH,
            n_embd=22,
            n_layer=GPT2_LAYERS,
            n_head=2,
            n_inner=13,
        ),
        base=True,
        buffers=lambda: {
            f"h.{layer}.attn.bias": np.tri(GPT2_LENGTH, dtype=np.uint8)[None, None]
            for layer in range(GPT2_LAYERS)
        },
    ),
    "vit-flax": Tiny(
        names="vit",
        torch="ViTForImageClassification",
        flax="FlaxViTForImageClassification",
        config=lambda: transformers.ViTConfig(
            image_size=21,
            patch_size=7,
            num_channels=3,
            hidden_size=22,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=13,
            num_labels=17,
        ),
        inputs={"pixel_values": numbers(2, 3, 21, 21)},
    ),
    "bert-flax": Tiny(
        names="bert",
        torch="BertForMaskedLM",
        flax="FlaxBertForMaskedLM",
        config=lambda: transformers.BertConfig(
            vocab_size=37,
            max_position_embeddings=23,
            hidden_size=22,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=13,
        ),
        inputs={
            "input_ids": TOKENS,
            "token_type_ids": (np.arange(10) >= [[3], [7]]).astype(int),
            "attention_mask": (np.arange(10) < [[10], [8]]).astype(int),
        },
        buffers=lambda: {"bert.embeddings.position_ids": np.arange(23)[None]},
    ),
    "whisper-flax": Tiny(
        names="whisper",
        torch="WhisperForConditionalGeneration",
        flax="FlaxWhisperForConditionalGeneration",
        config=lambda: transformers.WhisperConfig(
            vocab_size=37,
            num_mel_bins=5,
            d_model=22,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=13,
            decoder_ffn_dim=17,
            max_source_positions=19,
            max_target_positions=23,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        inputs={"input_features": numbers(2, 5, 38), "decoder_input_ids": TOKENS},
    ),
    "gemma-flax": Tiny(
        names="gemma",
        torch="GemmaForCausalLM",
        flax="FlaxGemmaForCausalLM",
        config=lambda: transformers.GemmaConfig(
            vocab_size=37,
            max_position_embeddings=53,
            hidden_size=22,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=14,
            intermediate_size=13,
        ),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def setting(request, tmp_path_factory):
    tiny = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    *_, table = request.param.split()
    file = table_file(table)
    return make_setting(tiny, file, folder, tiny.flax_params(), tiny.flax_answer())


class TestFlax(Laws):
    def test_transformers_own_conversion_gives_the_same_bits(self, setting):
        converted = oracle(setting.tiny, setting.source)
        assert not ta.tree_diff(setting.filled(setting.source), converted, values=True)

    @needs_torch
    def test_one_line_loads_the_folder_and_one_gives_it_back(self, setting, tmp_path):
        """By the name of the layout; the folder says which model it is."""
        target = setting.target
        params = ta.load(setting.folder, target, migration="flax")
        answer = setting.answer(params)
        np.testing.assert_allclose(answer, setting.expected, atol=1e-5, rtol=1e-5)

        run, back = tmp_path / "run.safetensors", tmp_path / "back"
        ta.save(run, jax.tree.map(lambda leaf: leaf * 1.5, params))
        arguments = ["--reverse", "--migration", "flax", "--like", setting.folder]
        result = invoke("convert", run, back, *arguments, "--max-shard-bytes", "8000")
        assert result.exit_code == 0, result.output
        assert (back / "config.json").is_file()
        again = setting.tiny.torch_answer(setting.tiny.read_torch(back))
        changed = setting.answer(jax.tree.map(lambda leaf: leaf * 1.5, params))
        np.testing.assert_allclose(again, changed, atol=1e-5 * np.abs(again).max())
