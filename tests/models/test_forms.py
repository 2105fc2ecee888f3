"""Forms of one model, each written by transformers, PyTorch or safetensors.

A head may be tied or not and be in the file or not; names may have the prefix of the
model with a head; older names are read by transformers itself. Each folder fills the
Flax class, which answers as PyTorch does, and gets its own form back.
"""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from command import invoke
from laws import needs_torch
from test_flax import CASES, LLAMA
from tiny import TOKENS, Tiny, transformers

import treeadapt as ta

pytestmark = needs_torch

SMALL = {"vocab_size": 37, "max_position_embeddings": 23}
MODELS = {
    **{name: CASES[f"{name}-flax"] for name in ("gpt2", "bert", "whisper", "gemma")},
    "llama": CASES["llama-flax"]._replace(
        config=lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)
    ),
    "untied": CASES["llama-flax"],
    "opt": Tiny(
        names="",
        torch="OPTForCausalLM",
        flax="FlaxOPTForCausalLM",
        config=lambda: transformers.OPTConfig(
            **SMALL,
            hidden_size=22,
            word_embed_proj_dim=22,
            ffn_dim=13,
            num_hidden_layers=3,
            num_attention_heads=2,
            pad_token_id=0,
        ),
        inputs={"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)},
    ),
    "distilbert": Tiny(
        names="",
        torch="DistilBertForMaskedLM",
        flax="FlaxDistilBertForMaskedLM",
        config=lambda: transformers.DistilBertConfig(
            **SMALL, dim=22, n_heads=2, n_layers=3, hidden_dim=13
        ),
        inputs={"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS)},
    ),
    "bart": Tiny(
        names="",
        torch="BartForConditionalGeneration",
        flax="FlaxBartForConditionalGeneration",
        config=lambda: transformers.BartConfig(
            **SMALL,
            d_model=22,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=13,
            decoder_ffn_dim=17,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        ),
        inputs={"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, ::-1].copy()},
    ),
}


def as_it_is(model, folder):
    model.save_pretrained(folder, max_shard_size="8KB")


def below_the_head(model, folder):
    model.base_model.save_pretrained(folder)


def every_copy(model, folder):
    import torch

    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    model.config.save_pretrained(folder)


def shared_names(model, folder):
    import safetensors.torch

    file = folder / "model.safetensors"
    safetensors.torch.save_model(model, file, metadata={"format": "pt"})
    model.config.save_pretrained(folder)


def older_names(model, folder):
    """As TensorFlow called the numbers of a norm, which transformers still reads."""
    import torch

    state = model.state_dict()
    for new, old in (("weight", "gamma"), ("bias", "beta")):
        name = re.compile(rf"(?<=LayerNorm\.){new}$")
        state = {name.sub(old, path): leaf for path, leaf in state.items()}
    torch.save(state, folder / "pytorch_model.bin")
    model.config.save_pretrained(folder)


FORMS = [
    *(
        (name, write)
        for name in MODELS
        for write in (as_it_is, every_copy, shared_names)
    ),
    *((name, below_the_head) for name in ("gpt2", "whisper", "gemma", "llama", "opt")),
    ("bert", older_names),
]


@pytest.mark.parametrize(("name", "write"), FORMS)
def test_a_form_fills_the_model_of_jax_and_comes_back(name, write, tmp_path):
    tiny, folder = MODELS[name], tmp_path / "published"
    folder.mkdir()
    model = tiny.torch_model()
    if hasattr(model, "final_logits_bias"):  # a buffer, which was saved at all times
        model.final_logits_bias.zero_()
    write(model, folder)
    expected = tiny.torch_answer(model)
    params = ta.load(folder, tiny.flax_params(), migration="flax")
    answer = tiny.flax_answer()
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(answer(params), expected, atol=2e-5, rtol=2e-5)
    assert ta.compare_checkpoint(folder, params, migration="flax").fits

    run, back = tmp_path / "run.safetensors", tmp_path / "back"
    trained = jax.tree.map(lambda leaf: leaf * 1.5, params)
    ta.save(run, trained)
    arguments = ["--reverse", "--migration", "flax", "--like", folder]
    result = invoke("convert", run, back, *arguments, "--target", folder)
    assert result.exit_code == 0, result.output
    assert {*ta.read_metadata(back)} == {*ta.read_metadata(folder)}
    again = tiny.torch_answer(tiny.read_torch(back))
    changed = answer(trained)
    np.testing.assert_allclose(again, changed, atol=2e-5 * np.abs(again).max())


def test_a_head_of_its_own_is_no_copy(tmp_path):
    tiny = MODELS["untied"]
    tiny.save(tmp_path)
    target = dict(tiny.flax_params())
    del target["lm_head"]
    with pytest.raises(ta.MigrationError, match="unexpected 'lm_head/kernel'"):
        ta.load(tmp_path, target, migration="flax")
    below = tmp_path / "below"
    below_the_head(tiny.torch_model(), below)
    with pytest.raises(ta.MigrationError, match="tie_word_embeddings = false"):
        ta.load(below, tiny.flax_params(), migration="flax")
