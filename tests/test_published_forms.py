"""Forms in which one model is published: buffers of older versions, shared names."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import treeadapt as ta

REPOSITORY = Path(__file__).parents[1]
sys.path.append(str(REPOSITORY / ".ci" / "oracles"))
from common import FOLDER, weights_of  # noqa: E402

#: Layout, model type, and what older files also hold of its first layer.
BUFFERS = [
    ("flax", "gpt2", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
    ("flax", "gpt2", ["h.0.attn.bias", "h.0.attn.masked_bias"]),
    ("keras-hub", "gpt2", ["transformer.h.0.attn.bias"]),
    ("flax", "gptj", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
    ("flax", "bert", ["bert.embeddings.position_ids"]),
    ("flax", "albert", ["albert.embeddings.position_ids"]),
    ("keras-hub", "albert", ["albert.embeddings.position_ids"]),
    *(
        (layout, "llama", ["model.layers.0.self_attn.rotary_emb.inv_freq"])
        for layout in ("flax", "keras-hub", "maxtext", "maxtext-unscanned", "tunix")
    ),
]


@pytest.mark.parametrize(("layout", "model_type", "names"), BUFFERS)
def test_buffers_of_older_versions_are_dropped_by_name(layout, model_type, names):
    folder = FOLDER / model_type / "1"
    weights = weights_of(folder)
    m = ta.load_migration(layout, config=folder)
    more = {name: np.ones((1, 3), "f4") for name in names}
    without = {name: leaf for name, leaf in weights.items() if name not in more}
    assert not ta.tree_diff(m(weights | more), m(without), values=True)
    # By name, and not everything: another leaf is still an error.
    with pytest.raises(ta.MigrationError, match="surprise"):
        m(weights | {"surprise": np.ones(3)})


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
