"""What transformers 4.57.6 makes of the tiny models: params of its own Flax models."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).parent))  # this file has the name of a library
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import transformers
from transformers.modeling_flax_pytorch_utils import (
    convert_pytorch_state_dict_to_flax,
)

sys.path.append(str(Path(__file__).parent))
from common import config_of, flat, report, weights_of

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


def convert(model_type: str, folder: Path) -> dict[str, Any]:
    """Return what the library's own conversion gives."""
    fields = {k: v for k, v in config_of(folder).items() if k != "model_type"}
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    model = getattr(transformers, MODELS[model_type])(config, _do_init=False)
    shapes = jax.eval_shape(
        lambda: model.init_weights(jax.random.key(0), model.input_shape)
    )
    # Of the model, the conversion reads no more than this.
    stub = types.SimpleNamespace(
        base_model_prefix=model.base_model_prefix, params=shapes
    )
    params = flat(convert_pytorch_state_dict_to_flax(weights_of(folder), stub))
    pairs, _ = jax.tree_util.tree_flatten_with_path(shapes)
    names = {"/".join(key.key for key in path) for path, _ in pairs}
    lacking, spare = sorted(names - {*params}), sorted({*params} - names)
    print(model_type, "lacks", lacking, "and has no place for", spare, file=sys.stderr)
    return {name: leaf for name, leaf in params.items() if name in names}


if __name__ == "__main__":
    report("flax", MODELS, convert)
