"""What transformers 4.57.6 makes of the tiny models: params of its own Flax models.

Each Flax model is also called, with random numbers, and its answers are compared with
those of the model of PyTorch that has the same weights.
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).parent))  # this file has the name of a library
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import transformers
from transformers.modeling_flax_pytorch_utils import (
    convert_pytorch_state_dict_to_flax,
)

sys.path.append(str(Path(__file__).parent))
from common import (
    answers_of_pytorch,
    apart,
    config_of,
    flat,
    random_weights_of,
    report,
    report_answers,
    weights_of,
)

MODELS = {
    "llama": "FlaxLlamaForCausalLM",
    "mistral": "FlaxMistralForCausalLM",
    "gemma": "FlaxGemmaForCausalLM",
    "gpt2": "FlaxGPT2LMHeadModel",
    "gptj": "FlaxGPTJForCausalLM",
    "opt": "FlaxOPTForCausalLM",
    "bert": "FlaxBertForPreTraining",
    "albert": "FlaxAlbertForPreTraining",
    "distilbert": "FlaxDistilBertForMaskedLM",
    "vit": "FlaxViTForImageClassification",
    "dinov2": "FlaxDinov2Model",
    "wav2vec2": "FlaxWav2Vec2ForCTC",
    "resnet": "FlaxResNetForImageClassification",
    "clip": "FlaxCLIPModel",
    "whisper": "FlaxWhisperForConditionalGeneration",
    "bart": "FlaxBartForConditionalGeneration",
}


def config_in(folder: Path) -> Any:
    """Return the configuration of a tiny model."""
    fields = config_of(folder)
    return transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields)


def model_of(model_type: str, config: Any, weights: Any) -> tuple[Any, Any, Any]:
    """Return a Flax model, the shapes of its params, and what weights become in it."""
    model = getattr(transformers, MODELS[model_type])(config, _do_init=False)
    shapes = jax.eval_shape(
        lambda: model.init_weights(jax.random.key(0), model.input_shape)
    )
    # Of the model, the conversion reads no more than this.
    stub = types.SimpleNamespace(
        base_model_prefix=model.base_model_prefix, params=shapes
    )
    return model, shapes, convert_pytorch_state_dict_to_flax(weights, stub)


def convert(model_type: str, folder: Path) -> dict[str, Any]:
    """Return what the library's own conversion gives."""
    config = config_in(folder)
    _, shapes, params = model_of(model_type, config, weights_of(folder))
    params = flat(params)
    pairs, _ = jax.tree_util.tree_flatten_with_path(shapes)
    names = {"/".join(key.key for key in path) for path, _ in pairs}
    lacking, spare = sorted(names - {*params}), sorted({*params} - names)
    print(model_type, "lacks", lacking, "and has no place for", spare, file=sys.stderr)
    return {name: leaf for name, leaf in params.items() if name in names}


def inputs_of(config: Any, names: Any) -> dict[str, np.ndarray]:
    """Return random inputs for those that a model takes, by name."""
    random = np.random.default_rng(1)
    inputs: dict[str, np.ndarray] = {}
    for name in [n for n in ("input_ids", "decoder_input_ids") if n in names]:
        text = getattr(config, "text_config", config)
        inputs[name] = random.integers(3, text.vocab_size, (2, 7))
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32)
        inputs["pixel_values"] = random.normal(
            size=(2, vision.num_channels, size, size)
        )
    if "input_values" in names:
        inputs["input_values"] = random.normal(size=(2, 400))
    if "input_features" in names:
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        inputs["input_features"] = random.normal(size=shape)
    is_whole = {name: x.dtype.kind == "i" for name, x in inputs.items()}
    return {name: x if is_whole[name] else x.astype("f4") for name, x in inputs.items()}


def answers_apart(model_type: str, folder: Path) -> float:
    """Return by how much answers of both models differ, relative to the largest."""
    config = config_in(folder)
    # Flax models without learned positions have a mask of the square of this.
    config.max_position_embeddings = min(
        64, getattr(config, "max_position_embeddings", 64)
    )
    weights = random_weights_of(folder)
    model, _, params = model_of(model_type, config, weights)
    inputs = inputs_of(config, inspect.signature(model.__call__).parameters)
    name = MODELS[model_type].removeprefix("Flax")
    theirs = answers_of_pytorch(name, config_of(folder), weights, inputs)
    return apart(model(**inputs, params=params), theirs)


if __name__ == "__main__":
    report("flax", MODELS, convert)
    report_answers("flax", MODELS, answers_apart)
