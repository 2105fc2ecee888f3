"""What keras-hub makes of the tiny models: variables of its own backbones, on JAX.

Where it has a writer of its own, what that makes of the backbone comes after it.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).parent))  # this file has the name of the library
os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import keras_hub
import numpy as np
from keras.src.initializers import random_initializers
from keras_hub.src.utils.transformers import convert_gemma3n
from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parent))
from common import (
    answers_of_pytorch,
    apart,
    config_of,
    random_weights_of,
    report,
    report_answers,
    weights_of,
)

#: Of each model type, the class of transformers with the same answers, and the task of
#: the library that gives them, if it is not the backbone.
MODELS = {
    "llama": ("LlamaForCausalLM", "Llama3CausalLM"),
    "qwen2": ("Qwen2ForCausalLM", "QwenCausalLM"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "QwenMoeCausalLM"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3CausalLM"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeCausalLM"),
    "mixtral": ("MixtralForCausalLM", "MixtralCausalLM"),
    "gemma": ("GemmaForCausalLM", "GemmaCausalLM"),
    "gemma2": ("Gemma2ForCausalLM", "GemmaCausalLM"),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3CausalLM"),
    "gemma3n_text": ("Gemma3nForCausalLM", "Gemma3nCausalLM"),
    "gpt2": ("GPT2LMHeadModel", "GPT2CausalLM"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5CausalLM"),
    "bert": ("BertModel", ""),
    "albert": ("AlbertModel", ""),
    "distilbert": ("DistilBertModel", ""),
    "esm": ("EsmModel", ""),
    "vit": ("ViTModel", ""),
    "deit": ("DeiTModel", ""),
    "dinov2": ("Dinov2Model", ""),
    "dinov3_vit": ("DINOv3ViTModel", ""),
}
#: What backbones of the library cannot be told, or is fixed, in PyTorch's models, too;
#: a text is a key whose value it is.
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "bert": (
        {"hidden_act": "gelu_pytorch_tanh"},
        "the GELU by tanh that keras-hub 0.32.0 takes for all",
    ),
    "vit": (
        {"layer_norm_eps": 1e-6},
        "the layer_norm_eps of 1e-6 that keras-hub 0.32.0 takes for all",
    ),
    "qwen3": (
        {"rms_norm_eps": 1e-5},
        "the rms_norm_eps of 1e-5 that keras-hub 0.32.0 takes for queries and keys",
    ),
    "esm": (
        {"token_dropout": False},
        "token_dropout false, because keras-hub 0.32.0 never scales by it",
    ),
    "qwen3_5": (
        {"image_token_id": 3},
        "an image and positions that keras-hub 0.32.0 counts as those of text",
    ),
    **dict.fromkeys(
        ["gemma2", "gemma3_text"],
        (
            {"query_pre_attn_scalar": "head_dim"},
            "query_pre_attn_scalar equal to head_dim",
        ),
    ),
}
#: Names of inputs and outputs in the library, and in transformers.
NAMES = {
    "token_ids": "input_ids",
    "segment_ids": "token_type_ids",
    "padding_mask": "attention_mask",
    "images": "pixel_values",
    "pixel_values": "pixel_values",
    "sequence_output": "last_hidden_state",
    "pooled_output": "pooler_output",
}


def zeros(shape: Any, *_: Any, dtype: Any = "float32", **__: Any) -> np.ndarray:
    """Return zeros in place of random numbers."""
    return np.zeros(shape, dtype)


def loaded(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Any:
    """Return the library's backbone with the weights that it loads."""
    keras.utils.clear_session()
    with tempfile.TemporaryDirectory() as written:
        save_file(weights, Path(written) / "model.safetensors")
        text = json.dumps(config)
        (Path(written) / "config.json").write_text(text, "utf-8")
        if config["model_type"] == "gemma3n_text":
            return loaded_gemma3n(config, written)
        return keras_hub.models.Backbone.from_preset(written, dtype="float32")


def loaded_gemma3n(config: dict[str, Any], written: str) -> Any:
    """Return the library's Gemma 3n for text alone, with the weights of a folder.

    Its reader makes towers of the published size, which its backbone may lack.
    """
    towers = collections.defaultdict(int)
    parts = dict.fromkeys(("vision_config", "audio_config"), towers)
    whole = collections.defaultdict(int, parts, text_config=config)
    fields = convert_gemma3n.convert_backbone_config(whole)
    fields |= {"vision_encoder_config": None, "audio_encoder_config": None}
    backbone = keras_hub.models.Gemma3nBackbone(**fields, dtype="float32")
    with SafetensorLoader(written) as loader:
        convert_gemma3n._port_language_model(loader, backbone)
    return backbone


def convert(_: str, folder: Path) -> dict[str, Any]:
    """Return what the library loads into its backbone, by the paths of variables."""
    backbone = loaded(config_of(folder), weights_of(folder))
    return {
        each.path: each.numpy()
        for each in backbone.variables
        if not each.path.endswith("seed_generator_state")
    }


def inputs_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return random inputs, by name in transformers."""
    random = np.random.default_rng(1)
    words = config.get("text_config", config).get("vocab_size", 5)
    size = config.get("image_size", 1)
    images = random.normal(size=(2, 3, size, size)).astype("f4")
    return {
        "input_ids": random.integers(4, words, (2, 7)),
        "token_type_ids": random.integers(0, 2, (2, 7)),
        "attention_mask": np.ones((2, 7), int),
        "pixel_values": images,
    }


def with_image(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return inputs with an image of 4 by 4 patches, for both libraries."""
    random, tower = np.random.default_rng(1), config["vision_config"]
    tokens = random.integers(4, config["text_config"]["vocab_size"], (1, 7))
    tokens[0, 2:6] = config["image_token_id"]  # four patches make one
    size = tower["patch_size"]
    shape = (16, tower["in_channels"], tower["temporal_patch_size"], size, size)
    patches = random.normal(size=shape).astype("f4")
    grid, mask = np.array([[1, 4, 4]]), np.ones((1, 7), int)
    theirs = {
        "input_ids": tokens,
        "attention_mask": mask,
        "pixel_values": patches.reshape(16, -1),
        "image_grid_thw": grid,
        # The library counts all tokens, where others count an image by its edges.
        "position_ids": np.tile(np.arange(7), (3, 1, 1)),
    }
    ours = {
        "token_ids": tokens,
        "padding_mask": mask,
        "pixel_values": patches.transpose(0, 2, 3, 4, 1)[None],
        "image_grid_thw": grid[None],
        "vision_indices": np.arange(2, 6)[None],
    }
    return ours, theirs


def answers_apart(model_type: str, folder: Path) -> float:
    """Return by how much answers of both models differ, relative to the largest."""
    name, task = MODELS[model_type]
    config = config_of(folder)
    changes, _ = SETTINGS.get(model_type, ({}, ""))
    config |= {key: config.get(it, it) for key, it in changes.items()}
    weights = random_weights_of(folder)
    model = loaded(config, weights)
    if task:
        model = getattr(keras_hub.models, task)(backbone=model, preprocessor=None)
    # A model with one input takes an image, whose channels are last.
    names = [*model.input] if isinstance(model.input, dict) else ["images"]
    if "vision_indices" in names:
        ours, inputs = with_image(config)
    else:
        of_all = inputs_of(config)
        inputs = {NAMES[name]: of_all[NAMES[name]] for name in names}
        ours = {name: inputs[NAMES[name]] for name in names}
        is_image = {name: array.ndim == 4 for name, array in ours.items()}
        ours |= {k: x.transpose(0, 2, 3, 1) for k, x in ours.items() if is_image[k]}
    # Operations one by one take longer to compile; a grid of an image is no array.
    call = model if "vision_indices" in names else jax.jit(model)
    answers = call(ours if isinstance(model.input, dict) else ours["images"])
    if not isinstance(answers, dict):
        answers = {"logits" if task else "sequence_output": answers}
    answers = {NAMES.get(key, key): np.asarray(it) for key, it in answers.items()}
    return apart(answers, answers_of_pytorch(name, config, weights, inputs))


# Weights come in their places, and compiling them for each shape takes most of the
# time.
RANDOM = dict.fromkeys(("normal", "uniform", "truncated_normal"), zeros)
random_initializers.random = types.SimpleNamespace(
    **vars(random_initializers.random) | RANDOM
)

if __name__ == "__main__":
    report("keras-hub", MODELS, convert)
    notes = {key: text for key, (_, text) in SETTINGS.items()}
    report_answers("keras-hub", MODELS, answers_apart, notes)
