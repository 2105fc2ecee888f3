"""Forms in which one model is published: its head, its names, what older files hold.

Here of tiny models of numbers alone; ``models/test_forms.py`` lets transformers write
them.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import treeadapt as ta

REPOSITORY = Path(__file__).parents[1]
sys.path.append(str(REPOSITORY / ".ci" / "oracles"))
from common import FOLDER, config_of, weights_of  # noqa: E402

GEMMA4 = "model.language_model.layers"
#: Layout, model type, and what older files also hold of its first layer.
BUFFERS = [
    ("flax", "gpt2", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
    ("flax", "gpt2", ["h.0.attn.bias", "h.0.attn.masked_bias"]),
    ("keras-hub", "gpt2", ["transformer.h.0.attn.bias"]),
    ("flax", "gptj", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
    ("flax", "bert", ["bert.embeddings.position_ids"]),
    ("flax", "albert", ["albert.embeddings.position_ids"]),
    ("keras-hub", "albert", ["albert.embeddings.position_ids"]),
    ("flax", "bart", ["model.encoder.version", "model.decoder.version"]),
    ("keras-hub", "esm", ["esm.embeddings.position_ids"]),
    ("keras-hub", "qwen3_5", ["mtp.norm.weight", "mtp.layers.0.mlp.up_proj.weight"]),
    ("maxtext", "qwen3_next", ["mtp.norm.weight"]),
    ("maxtext-unscanned", "qwen3_next", ["mtp.norm.weight"]),
    *(
        ("maxtext-unscanned", f"gemma4_{size}", [f"{GEMMA4}.{layer}.self_attn.{name}"])
        for size, layer in (("e2b", 34), ("e4b", 24))
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    ),
    *(
        (layout, "llama", ["model.layers.0.self_attn.rotary_emb.inv_freq"])
        for layout in ("flax", "keras-hub", "maxtext", "maxtext-unscanned", "tunix")
    ),
]


def load_table(layout, model_type, config):
    """Load a table by the type in its configuration, or by its name."""
    is_stated = config_of(config).get("model_type") == model_type
    name = layout if is_stated else f"{layout}/{model_type}"
    return ta.load_migration(name, config=config)


@pytest.mark.parametrize(("layout", "model_type", "names"), BUFFERS)
def test_buffers_of_older_versions_are_dropped_by_name(layout, model_type, names):
    folder = FOLDER / model_type / "1"
    weights = weights_of(folder)
    m = load_table(layout, model_type, folder)
    more = {name: np.ones((1, 3), "f4") for name in names}
    without = {name: leaf for name, leaf in weights.items() if name not in more}
    assert not ta.tree_diff(m(weights | more), m(without), values=True)
    # By name, and not everything: another leaf is still an error.
    with pytest.raises(ta.MigrationError, match="surprise"):
        m(weights | {"surprise": np.ones(3)})


# --- names ---

TABLES = {
    (folder.name, file.stem): file.read_text("utf-8")
    for folder in (REPOSITORY / "treeadapt" / "migrations" / "tables").iterdir()
    for file in folder.glob("*.toml")
}
#: Layout and model type, what a name begins with or has, and what other files write.
SPELLINGS = [
    *(
        (*table, r"^model\.", "")
        for table, text in TABLES.items()
        if "{at=model.," in text
    ),
    *((*table, r"^", "transformer.") for table in TABLES if table[1] == "gpt2"),
    *(
        (*table, rf"^{table[1]}\.", "")
        for table in TABLES
        if table[1] in {"albert", "bert", "deit", "distilbert", "resnet", "vit"}
        or table[1] in {"esm", "wav2vec2"}
    ),
    ("flax", "wav2vec2", r"parametrizations\.weight\.original0", "weight_g"),
    ("flax", "wav2vec2", r"parametrizations\.weight\.original1", "weight_v"),
    ("keras-hub", "dinov3_vit", r"^layer\.", "model.layer."),
    ("keras-hub", "gemma3n_text", r"^model\.language_model\.", "model."),
    ("easydel", "mamba2", r"\.embeddings\.", ".embedding."),
    *((*table, r"^", "model.") for table in TABLES if table[0] == "openpi"),
    *((*table, r"^", "dinov2.") for table in TABLES if table[1] == "dinov2"),
    ("flax", "gptj", r"^transformer\.", ""),
    ("tunix", "gemma3", r"^language_model\.model", "model.language_model"),
    *(
        (*table, r"Norm\.weight$", "Norm.gamma")
        for table in TABLES
        if table[1] == "bert"
    ),
    *((*table, r"Norm\.bias$", "Norm.beta") for table in TABLES if table[1] == "bert"),
]


@pytest.mark.parametrize(("layout", "model_type", "old", "new"), SPELLINGS)
def test_files_of_other_spellings_give_the_same_params_and_come_back(
    layout, model_type, old, new
):
    folder = FOLDER / model_type / "1"
    weights = weights_of(folder)
    spelt = {re.sub(old, new, name): leaf for name, leaf in weights.items()}
    assert spelt.keys() != weights.keys()
    m = load_table(layout, model_type, folder)
    params = m(spelt)
    assert not ta.tree_diff(params, m(weights), values=True)
    assert not ta.tree_diff(m.inverse(params, spelt), spelt, values=True)
    # What every file has is still missed.
    needed = (r for r in m.rows if not (r.drops or r.notes.optional or r.notes.copy))
    row = next(needed)
    with pytest.raises(ta.MigrationError, match="no leaf is taken by"):
        m({name: leaf for name, leaf in spelt.items() if not row.takes(name)})


# --- heads ---

#: The head of a model of which it is no leaf, and what it is a copy of.
ALWAYS = {
    "albert": (
        "predictions.decoder.weight",
        "albert.embeddings.word_embeddings.weight",
    ),
    "bart": ("lm_head.weight", "model.shared.weight"),
    "bert": (
        "cls.predictions.decoder.weight",
        "bert.embeddings.word_embeddings.weight",
    ),
    "distilbert": (
        "vocab_projector.weight",
        "distilbert.embeddings.word_embeddings.weight",
    ),
    "esm": ("lm_head.decoder.weight", "esm.embeddings.word_embeddings.weight"),
    "gpt2": ("lm_head.weight", "wte.weight"),
    "opt": ("lm_head.weight", "model.decoder.embed_tokens.weight"),
    "whisper": ("proj_out.weight", "model.decoder.embed_tokens.weight"),
    "gemma3": ("lm_head.weight", "language_model.model.embed_tokens.weight"),
    **dict.fromkeys(
        ["pi0", "pi05"],
        (
            "paligemma_with_expert.paligemma.lm_head.weight",
            "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight",
        ),
    ),
    **dict.fromkeys(
        ["gemma", "gemma2", "gemma3_text"],
        ("lm_head.weight", "model.embed_tokens.weight"),
    ),
    **dict.fromkeys(
        ["gemma3n_text", "gemma4_e2b", "gemma4_e4b"],
        ("lm_head.weight", "model.language_model.embed_tokens.weight"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model_type"), [t for t in TABLES if "copy = true" in TABLES[t]]
)
def test_a_copy_of_the_embedding_is_compared_and_left_out(layout, model_type):
    folder, (head, embedding) = FOLDER / model_type / "1", ALWAYS[model_type]
    weights = weights_of(folder)
    m = load_table(layout, model_type, folder)
    params, both = m(weights), weights | {head: weights[embedding]}
    assert not ta.tree_diff(m(both), params, values=True)
    assert not ta.tree_diff(m.inverse(params, both), both, values=True)
    assert head not in m.inverse(params)
    with pytest.raises(ta.MigrationError, match="the copies are not equal"):
        m(weights | {head: weights[embedding] + 1})
    # What was trained is written at both places, and not what the old file has.
    trained = m.inverse(m({**weights, embedding: weights[embedding] + 1}), both)
    assert not ta.tree_diff(trained[head], trained[embedding], values=True)


TIED = [t for t in TABLES if 'copy = "tie_word_embeddings"' in TABLES[t]]


def embedding_of(model_type):
    if model_type == "mamba2":
        return "backbone.embeddings.weight"
    inner = "language_model." if model_type in ("qwen3_5", "qwen3_vl") else ""
    return f"model.{inner}embed_tokens.weight"


def tying(layout, model_type, is_tied):
    config = config_of(FOLDER / model_type / "1") | {"tie_word_embeddings": is_tied}
    return ta.load_migration(layout, config=config)


@functools.cache
def with_a_head(layout, model_type):
    """A table, a file and a model that both have a head, and the place of the two."""
    m = tying(layout, model_type, True)
    weights = weights_of(FOLDER / model_type / "1")
    weights["lm_head.weight"] = weights[embedding_of(model_type)]
    target = m(weights)
    without = {k: v for k, v in weights.items() if k != "lm_head.weight"}
    (place,) = target.keys() - m(without).keys()
    return m, weights, target, place


@pytest.mark.parametrize(("layout", "model_type"), TIED)
@pytest.mark.parametrize("file_has_head", [False, True])
@pytest.mark.parametrize("model_has_head", [False, True])
def test_a_head_is_tied_in_the_file_in_the_model_in_both_or_in_neither(
    layout, model_type, file_has_head, model_has_head
):
    m, weights, target, place = with_a_head(layout, model_type)
    weights, target = {**weights}, {**target}
    if not file_has_head:
        del weights["lm_head.weight"]
    if not model_has_head:
        del target[place]
    params = m(weights, target)
    assert not ta.tree_diff(params, target, values=True)
    assert not ta.tree_diff(m.inverse(params, weights), weights, values=True)
    if file_has_head and not model_has_head:
        other = {"lm_head.weight": weights[embedding_of(model_type)] + 1}
        with pytest.raises(ta.MigrationError, match="the copies are not equal"):
            m(weights | other, target)
    if file_has_head != model_has_head:
        untied = tying(layout, model_type, False)
        with pytest.raises(ta.MigrationError, match="tie_word_embeddings = false"):
            untied(weights, target)


@pytest.mark.slow
def test_files_of_the_base_model_of_bart_lack_a_bias_of_zeros(tmp_path):
    folder = FOLDER / "bart" / "1"
    m, weights = ta.load_migration("flax", config=folder), weights_of(folder)
    params = m(weights)
    base = {k: v for k, v in weights.items() if k != "final_logits_bias"}
    base = {name.removeprefix("model."): leaf for name, leaf in base.items()}
    ta.save(tmp_path / "base", base, max_shard_bytes=2**20)
    (tmp_path / "base" / "config.json").write_text((folder / "config.json").read_text())
    loaded = ta.load(tmp_path / "base", params, migration="flax")
    assert not loaded["final_logits_bias"].any()
    assert not ta.tree_diff(m.inverse(loaded, base), base, values=True)
    # Without a model to fill, it stays out; a file that has it gives its numbers.
    assert "final_logits_bias" not in m(base)
    assert params["final_logits_bias"].all()
    assert m(weights, params)["final_logits_bias"].all()
    assert m.inverse(params)["final_logits_bias"].all()


# --- names in the header ---


def shared_file(tmp_path, texts):
    """A file as ``safetensors.torch.save_model`` writes it of a tied model."""
    arrays = {"lm_head.weight": np.ones((3, 2), "f4"), "model.norm.weight": np.ones(2)}
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, file, metadata=texts)
    return file


def test_names_that_save_model_left_out_are_tied(tmp_path):
    shared = {"model.embed_tokens.weight": "lm_head.weight", "format": "pt"}
    file = shared_file(tmp_path, shared)
    tree = ta.load(file)
    assert tree["model.embed_tokens.weight"] is tree["lm_head.weight"]
    rows = ta.Migration(
        {"model.embed_tokens.weight : v e": "embed : e v", "{rest:**}": None}
    )
    assert ta.load(file, migration=rows)["embed"].shape == (2, 3)


def test_other_texts_of_a_header_are_not_names(tmp_path):
    texts = {"author": "me", "model.norm.weight": "lm_head.weight", "x": "no such leaf"}
    texts |= {"format": "lm_head.weight"}
    names = {*ta.read_metadata(shared_file(tmp_path, texts))}
    assert names == {"lm_head.weight", "model.norm.weight"}
