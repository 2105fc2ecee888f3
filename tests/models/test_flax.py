"""Published layouts against the models of transformers: logits, both ways.

A case is a model and a table of ``docs/examples/migrations``. PyTorch saves the model,
the table reads its file into Flax, and both answer alike; the way back gives every bit,
and PyTorch reads it. One mistake in the table shows in the shapes or in the answer.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from mutations import wrong_tables
from tiny import HAS_TORCH, MIGRATIONS, TOKENS, Tiny, transformers

import treeadapt as ta

GPT2_LAYERS, GPT2_LENGTH = 3, 23


def numbers(*shape: int) -> np.ndarray:
    """Random numbers for an input."""
    return np.random.default_rng(2).normal(size=shape).astype("float32")


CASES = {
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
            num_hidden_layers=2,
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
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")


class Setting(NamedTuple):
    """What the tests of one case share; made once.

    Attributes:
        tiny: the model.
        folder: of the PyTorch file, if there is PyTorch.
        source: the arrays of that file.
        target: the parameters of the Flax model, as shapes.
        migration: the table.
        answer: what the Flax model answers, a function of its parameters.
        expected: PyTorch's answer, else that of transformers' own conversion.
    """

    tiny: Tiny
    folder: Path
    source: dict[str, np.ndarray]
    target: Any
    migration: ta.Migration
    answer: Any
    expected: np.ndarray


@pytest.fixture(scope="module", params=CASES)
def setting(request, tmp_path_factory) -> Setting:
    tiny = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    answer = tiny.flax_answer()
    if HAS_TORCH:
        tiny.save(folder)
        source = ta.to_flat_dict(ta.load(folder))
        expected = tiny.torch_answer(tiny.read_torch(folder))
    else:
        source = tiny.source()
        expected = answer(oracle(tiny, source))
    return Setting(
        tiny,
        folder,
        source,
        tiny.flax_params(),
        ta.load_migration(MIGRATIONS / f"{request.param}.toml"),
        answer,
        expected,
    )


def oracle(tiny: Tiny, source: dict[str, np.ndarray]) -> Any:
    """The Flax parameters that transformers' own conversion gives."""
    flax = getattr(transformers, tiny.flax)
    # The conversion asks a model for these two, and to make one is slow.
    model = SimpleNamespace(
        params=tiny.flax_params(), base_model_prefix=flax.base_model_prefix
    )
    conversion = transformers.modeling_flax_pytorch_utils
    return conversion.convert_pytorch_state_dict_to_flax(
        {name: source[name] for name in source if name not in tiny.buffers()}, model
    )


def test_the_answers_are_equal(setting):
    params = setting.migration(setting.source, setting.target)
    answer = setting.answer(ta.from_flat_dict(setting.target, params))
    assert np.std(setting.expected) > 0.01
    np.testing.assert_allclose(answer, setting.expected, atol=1e-5, rtol=1e-5)


def test_transformers_own_conversion_gives_the_same_bits(setting):
    converted = oracle(setting.tiny, setting.source)
    params = setting.migration(setting.source, setting.target)
    assert not ta.tree_diff(params, ta.to_flat_dict(converted), values=True)


def test_the_way_back_gives_every_bit(setting):
    params = setting.migration(setting.source, setting.target)
    back = setting.migration.inverse(params)
    buffers = setting.tiny.buffers()
    kept = {
        name: setting.source[name] for name in setting.source if name not in buffers
    }
    assert not ta.tree_diff(back, kept, values=True)


@needs_torch
def test_a_folder_is_read_and_written_for_pytorch(setting, tmp_path):
    params = ta.load(setting.folder, setting.target, migration=setting.migration)
    changed = jax.tree.map(lambda leaf: leaf * 1.5, params)
    ta.save(tmp_path / "model.safetensors", setting.migration.inverse(changed))
    answer = setting.tiny.torch_answer(setting.tiny.read_torch(tmp_path))
    np.testing.assert_allclose(
        answer, setting.answer(changed), atol=1e-5 * np.abs(answer).max()
    )


@needs_torch
def test_the_schema_lists_what_pytorch_saves(setting):
    schema = MIGRATIONS / f"{setting.tiny.names}.schema.toml"
    assert ta.load_report(schema, ta.read_metadata(setting.folder)).fits


def test_adams_state_moves_along(setting):
    """A step after the migration equals the migration of a step, bit for bit."""
    migration, tx = setting.migration, optax.adam(1e-2)
    buffers = setting.tiny.buffers()
    params = {
        name: setting.source[name] for name in setting.source if name not in buffers
    }
    grads = jax.tree.map(np.cos, params)
    _, state = tx.update(grads, tx.init(params), params)
    there = migration(params, setting.target)
    carried, report = ta.carry_state(tx, there, state, migration=migration)
    assert not report.fresh, report
    updates, state = tx.update(grads, state, params)
    moved, _ = tx.update(migration(grads, setting.target), carried, there)
    assert not ta.tree_diff(moved, migration(updates, setting.target), values=True)


def test_no_mistake_in_the_table_stays_unseen(setting, tmp_path, request):
    """Shapes tell of it, or the answer does."""
    name = request.node.callspec.params["setting"]
    unseen, seen = [], 0
    for mistake, wrong in wrong_tables(MIGRATIONS / f"{name}.toml", tmp_path):
        try:
            params = wrong(setting.source, setting.target)
        except ta.MigrationError:
            seen += 1
            continue
        answer = setting.answer(ta.from_flat_dict(setting.target, params))
        if np.allclose(answer, setting.expected, atol=1e-3):
            unseen.append(mistake)
        seen += 1
    assert not unseen
    assert seen > 5
