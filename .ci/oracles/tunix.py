"""What google-tunix makes of the tiny models: weights of its own nnx models.

Its package imports all of its trainers, and their libraries; models need none of them,
so a module without them takes the place of the package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).parent))  # this file has the name of the library
spec = importlib.util.find_spec("tunix")
package = types.ModuleType("tunix")
package.__path__ = spec.submodule_search_locations
sys.modules["tunix"] = package
sys.path.append(str(Path(__file__).parent))

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from common import (  # noqa: E402
    answers_of_pytorch,
    apart,
    config_of,
    flat,
    gemma_checkpoint,
    random_weights_of,
    report,
    report_answers,
    weights_of,
)
from flax import nnx  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

#: Module of the library, and its loader.
MODELS = {
    "llama": ("llama3", "params"),
    "qwen2": ("qwen2", "params"),
    "qwen3": ("qwen3", "params"),
    "qwen3_moe": ("qwen3", "params"),
    "gemma2": ("gemma", "params_safetensors"),
    "gemma3_text": ("gemma3", "params_safetensors"),
    "gemma3": ("gemma3", "params_safetensors"),
}
#: The classes of transformers that have the same weights.
CALLED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}
#: Whatever ``rope_theta`` these are given, Tunix 0.1.7 rotates them by its default.
ROPE_THETA = 1_000_000
_ROPE = f"the rope_theta of {ROPE_THETA:,} that Tunix 0.1.7 takes for all"
_SCALE = "the size of a head as query_pre_attn_scalar, as in Tunix 0.1.7"
#: What the models of Tunix cannot be told: in its place, PyTorch's are.
SETTINGS = {
    "llama": _ROPE,
    "qwen3": _ROPE,
    "qwen3_moe": f"{_ROPE}, and norm_topk_prob",
    "gemma2": _SCALE,
    "gemma3_text": _SCALE,
    "gemma3": _SCALE,
}


def loaded(model_type: str, folder: Path, weights: Any) -> Any:
    """Return the library's model with the weights that it loads."""
    name, loader = MODELS[model_type]
    model = importlib.import_module(f"tunix.models.{name}.model")
    params = importlib.import_module(f"tunix.models.{name}.{loader}")
    config = config_of(folder)
    config = config.get("text_config", config)
    fields = {
        "num_layers": config["num_hidden_layers"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config.get("moe_intermediate_size", config["intermediate_size"]),
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
    }
    fields["num_embed" if name.startswith("gemma") else "vocab_size"] = config[
        "vocab_size"
    ]
    if not name.startswith("gemma"):
        fields |= {"rope_theta": 10_000, "norm_eps": 1e-6}
    if name == "gemma":
        fields |= {
            "final_logit_softcap": config["final_logit_softcapping"],
            "attn_logits_soft_cap": config["attn_logit_softcapping"],
            "sliding_window_size": config["sliding_window"],
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
            "attention_types": [
                model.AttentionType.LOCAL_SLIDING
                if kind == "sliding_attention"
                else model.AttentionType.GLOBAL
                for kind in config["layer_types"]
            ],
        }
    if name == "gemma3":
        fields |= {
            "sliding_window_size": config["sliding_window"],
            "local_base_frequency": config["rope_local_base_freq"],
            "global_base_frequency": config["rope_theta"],
        }
    if "num_experts" in config:
        fields |= {
            "num_experts": config["num_experts"],
            "num_experts_per_tok": config["num_experts_per_tok"],
        }
    with tempfile.TemporaryDirectory() as written:
        save_file(weights, Path(written) / "model.safetensors")
        return params.create_model_from_safe_tensors(
            written, model.ModelConfig(**fields), dtype=jnp.float32
        )


def convert(model_type: str, folder: Path) -> dict[str, Any]:
    """Return what the library loads into its model."""
    model = loaded(model_type, folder, weights_of(folder))
    return flat(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def with_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with what Tunix takes whatever it is told."""
    if "text_config" in config:
        return config | {"text_config": with_settings(config["text_config"])}
    changes: dict[str, Any] = {}
    if SETTINGS.get(config["model_type"], "").startswith(_ROPE):
        changes["rope_theta"] = ROPE_THETA
    if "norm_topk_prob" in config:
        changes["norm_topk_prob"] = True
    if "query_pre_attn_scalar" in config:
        changes["query_pre_attn_scalar"] = config["head_dim"]
    return config | changes


def answers_apart(model_type: str, folder: Path) -> float:
    """Return by how much answers of both models differ, relative to the largest."""
    config = with_settings(config_of(folder))
    weights = random_weights_of(folder)
    words = config.get("text_config", config)["vocab_size"]
    tokens = np.random.default_rng(1).integers(3, words, (2, 7))
    positions = np.tile(np.arange(7), (2, 1))
    mask = np.tile(np.tril(np.ones((7, 7), bool)), (2, 1, 1))
    logits, _ = loaded(model_type, folder, weights)(tokens, positions, None, mask)
    inputs = {"input_ids": tokens}
    theirs = answers_of_pytorch(CALLED[model_type], config, weights, inputs)
    return apart({"logits": logits}, theirs)


def of_authors(model_type: str, folder: Path) -> dict[str, Any]:
    """Return Gemma 3 as its authors' checkpoints have it.

    Raises:
        AssertionError: the library's reader of such makes another model of it.
    """
    params = importlib.import_module("tunix.models.gemma3.params")
    checkpoint = gemma_checkpoint(weights_of(folder))
    read = flat(params.map_from_upstream_checkpoint(checkpoint))
    of_hub = convert(model_type, folder)
    assert read.keys() == of_hub.keys()
    assert all((read[name] == of_hub[name]).all() for name in read)
    return flat(checkpoint)


if __name__ == "__main__":
    report("tunix", MODELS, convert)
    report("gemma-flat", ["gemma3_text"], of_authors)
    report_answers("tunix", CALLED, answers_apart, SETTINGS)
