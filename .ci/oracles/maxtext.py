"""What MaxText makes of the tiny models: params of its own decoders, and the way back.

Shapes are those of its own models, scanned or not; its mapping and hooks make arrays of
the weights, as ``to_maxtext`` does, and weights of the arrays, as ``to_huggingface``
does.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.remove(str(Path(__file__).parent))  # this file has the name of the library
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import maxtext
import numpy as np
from maxtext.checkpoint_conversion import to_maxtext
from maxtext.checkpoint_conversion.utils import param_mapping
from maxtext.checkpoint_conversion.utils.utils import process_maxtext_param
from maxtext.configs import pyconfig
from maxtext.layers import quantizations
from maxtext.models import models
from maxtext.utils import maxtext_utils

sys.path.append(str(Path(__file__).parent))
from common import (
    FOLDER,
    answers_of_pytorch,
    apart,
    config_of,
    digest,
    random_weights_of,
    report,
    report_answers,
    weights_of,
)

#: Name of the model in the library. Gemma 3 is not among them: the library scales its
#: embedding by a root that it rounds to bfloat16, which no row does.
MODELS = {
    "llama": "llama3.1-8b",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "qwen3_moe": "qwen3-30b-a3b",
    "qwen3_next": "qwen3-next-80b-a3b",
    "qwen3_vl": "qwen3-vl-2b",
    "mixtral": "mixtral-8x7b",
    "gemma2": "gemma2-2b",
    "gemma4_e2b": "gemma4-e2b",
    "gemma4_e4b": "gemma4-e4b",
    "gpt_oss": "gpt-oss-20b",
    "olmo3": "olmo3-7b",
    "deepseek_v3": "deepseek3-671b",
}
#: The classes of transformers that have the same weights.
CALLED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma4_e2b": "Gemma4ForConditionalGeneration",
    "gemma4_e4b": "Gemma4ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
#: Names of embeddings that it rounds to bfloat16, whatever its dtype is.
ROUNDED = {
    "gemma2": "embed_tokens",
    "gemma4_e2b": "embed_tokens",
    "gemma4_e4b": "embed_tokens",
    "qwen3_vl": "pos_embed",
}
_ROUNDED = (
    "an embedding rounded to bfloat16, as MaxText 0.2.5 rounds it for logits, "
    "whatever its dtype is"
)
#: What is otherwise than in the configurations of the tiny models, in both libraries.
SETTINGS = {
    "qwen3_moe": "norm_topk_prob true",
    "gemma2": f"the size of a head as query_pre_attn_scalar, and {_ROUNDED}",
    "gemma4_e2b": _ROUNDED,
    "gemma4_e4b": _ROUNDED,
    "qwen3_vl": (
        "exact GELUs in the tower for images, of which MaxText 0.2.5 approximates all, "
        "and embeddings of positions there rounded to bfloat16, as it rounds them"
    ),
    "olmo3": (
        "a rope_theta of 500,000, which transformers 5.24 takes for sliding layers "
        "whatever it is told, and without YaRN, which MaxText 0.2.5 takes for these, "
        "too, and transformers does not: with it, they are 0.5 apart"
    ),
}
#: Of these, small ones tie the head to the embedding.
TIED = ("llama", "qwen2", "qwen3", "qwen3_vl")
#: Name of a size in the library, and of the same in a configuration.
SIZES = {
    "base_emb_dim": "hidden_size",
    "base_num_query_heads": "num_attention_heads",
    "base_num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "base_mlp_dim": "intermediate_size",
    "base_moe_mlp_dim": "moe_intermediate_size",
    "base_num_decoder_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "num_experts_per_tok": "num_experts_per_tok",
    "first_num_dense_layers": "first_k_dense_replace",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "gdn_num_key_heads": "linear_num_key_heads",
    "gdn_num_value_heads": "linear_num_value_heads",
    "gdn_key_head_dim": "linear_key_head_dim",
    "gdn_value_head_dim": "linear_value_head_dim",
    "hidden_size_per_layer_input": "hidden_size_per_layer_input",
    "vocab_size_per_layer_input": "vocab_size_per_layer_input",
    "num_kv_shared_layers": "num_kv_shared_layers",
    "use_double_wide_mlp": "use_double_wide_mlp",
}
#: The same, of the configuration of a tower for images.
OF_TOWER = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "depth",
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "spatial_merge_size": "spatial_merge_size",
    "out_hidden_size": "out_hidden_size",
    "num_position_embeddings": "num_position_embeddings",
    "deepstack_visual_indexes": "deepstack_visual_indexes",
}
#: The library scans no layer of these.
NO_TABLE = {("maxtext", each) for each in ("qwen3_vl", "gemma4_e2b", "gemma4_e4b")}
LENGTH = 7
IMAGE = 151_655  # the token for which the library takes what its tower makes
PADDED = {"gemma2": 128}  # rows that the library adds to the embedding


def configured(model_type: str, fields: Mapping[str, Any], *, is_scanned: bool) -> Any:
    """Return the library's configuration of a tiny model."""
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    tower = fields.get("vision_config", {})
    fields = fields.get("text_config", fields)
    sizes = {name: fields.get(key) for name, key in SIZES.items()}
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    sizes["num_experts"] = next((fields[k] for k in experts if k in fields), None)
    if model_type in ("mixtral", "gpt_oss"):
        sizes["base_moe_mlp_dim"] = fields["intermediate_size"]
    if model_type == "gemma2":  # it counts pairs
        sizes["base_num_decoder_layers"] //= 2
    if model_type == "deepseek_v3":
        sizes["head_dim"] = None
        sizes["base_num_kv_heads"] = fields["num_attention_heads"]
    elif sizes["head_dim"] is None:
        sizes["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    sizes["vocab_size"] += PADDED.get(model_type, 0)
    options = {
        "model_name": MODELS[model_type],
        "override_model_config": "true",
        "scan_layers": str(is_scanned).lower(),
        "skip_jax_distributed_system": "true",
        "run_name": "tiny",
        "attention": "dot_product",
        "weight_dtype": "float32",
        "enable_checkpointing": "false",
        "use_multimodal": str(bool(tower)).lower(),
        # Of its answers alone.
        "dtype": "float32",
        "matmul_precision": "highest",
        "per_device_batch_size": 2,
        "max_target_length": LENGTH,
        "megablox": "false",
        "sparse_matmul": "false",
        "normalization_layer_epsilon": fields["rms_norm_eps"],
    }
    if "rope_theta" in fields:
        options["rope_max_timescale"] = int(fields["rope_theta"])
    if not fields.get("rope_scaling"):
        options |= {"rope_type": "default", "rope_use_scale": "false"}
    if model_type == "deepseek_v3":  # as it is by default, but in pairs
        options |= {"rope_type": "yarn", "rope_factor": 1}
    if not fields.get("final_logit_softcapping"):
        options["final_logits_soft_cap"] = 0.0
    if model_type.startswith(
        "gemma4"
    ):  # the towers of the small ones have no place in 0.2.5
        (size,) = {each["head_dim"] for each in fields["per_layer_config"].values()}
        options |= {"global_head_dim": size, "use_multimodal": "false"}
    elif tower:
        options |= {f"{name}_for_vit": tower[key] for name, key in OF_TOWER.items()}
        options["image_size_for_vit"] = 4 * tower["patch_size"]
        options["mrope_section"] = fields["rope_scaling"]["mrope_section"]
    if model_type in TIED:
        options["logits_via_embedding"] = str(
            fields.get("tie_word_embeddings", False)
        ).lower()
        options["normalize_embedding_logits"] = "false"  # as in those that tie
    options |= {name: size for name, size in sizes.items() if size is not None}
    arguments = [f"{name}={value}" for name, value in options.items()]
    return pyconfig.initialize(["", str(base), *arguments])


class Loaded(NamedTuple):
    """What the library makes of weights.

    Attributes:
        config: the library's configuration of the model.
        mapping: names of weights, by keys of arrays.
        keys: those of the mapping that its model has.
        shapes: place and shape of each array of the model, by key.
        structure: the tree that the arrays are in.
        arrays: in the order of their places.
    """

    config: Any
    mapping: Mapping[Any, Any]
    keys: Any
    shapes: Mapping[str, Any]
    structure: Any
    arrays: list[Any]


def loaded(
    layout: str, model_type: str, fields: Mapping[str, Any], weights: Any
) -> Loaded:
    """Return what the library makes of weights."""
    is_scanned = layout == "maxtext"
    config = configured(model_type, fields, is_scanned=is_scanned)
    model = MODELS[model_type]
    mapping = param_mapping.PARAM_MAPPING[model](fields, config, is_scanned)
    shapes, structure = to_maxtext.get_maxtext_model_info(config)
    if model_type == "deepseek_v3":  # its models keep these out of params
        biases = {key: names for key, names in mapping.items() if "gate-bias" in key}
        mapping = {key: it for key, it in mapping.items() if key not in biases}
        biases = {k.replace("params-", "MoEBiasVar-"): it for k, it in biases.items()}
        mapping |= biases
    keys = to_maxtext.validate_and_filter_param_map_keys(mapping, {*shapes})
    hooks = param_mapping.HOOK_FNS[model](fields, config, is_scanned)
    arrays: list[Any] = [None] * len(shapes)
    for key in keys:
        indices, shape = to_maxtext._get_maxtext_indices_and_shapes(key, shapes)
        # By such a name 0.2.5 stacks gates and shared experts along another axis than
        # its own models and its writer have, and then refuses the shape.
        is_param = str(key).startswith("params-")
        named = "" if is_scanned and is_param and "MoeBlock" in str(key) else key
        load = to_maxtext._get_hf_loading_function(
            mapping[key], weights.__getitem__, hooks.get(key), shape, config, named
        )
        to_maxtext._get_maxtext_weight(
            load, indices, shape, key, arrays, "float32", use_lazy_load=False
        )
    return Loaded(config, mapping, keys, shapes, structure, arrays)


def convert(layout: str, model_type: str, folder: Path) -> dict[str, Any]:
    """Return what the library makes of weights; prints a digest of the way back."""
    fields, is_scanned = config_of(folder), layout == "maxtext"
    weights = weights_of(folder)
    made = loaded(layout, model_type, fields, weights)
    by_key = {k: np.asarray(made.arrays[at]) for k, (at, _) in made.shapes.items()}
    model, config = MODELS[model_type], made.config
    hooks = param_mapping.HOOK_FNS[model](fields, config, is_scanned, saving_to_hf=True)
    forms = {name: array.shape for name, array in weights.items()}
    back: dict[str, Any] = {}
    for key in made.keys:
        parts = [jax.numpy.asarray(by_key[k]) for k in key if isinstance(key, tuple)]
        part = parts if isinstance(key, tuple) else jax.numpy.asarray(by_key[key])
        if is_scanned and str(key).startswith("MoEBiasVar"):
            part = part.T  # the writer of 0.2.5 takes their layers from another axis
        pairs = process_maxtext_param(key, part, made.mapping, hooks, forms, config)
        back |= {name: np.asarray(array) for name, array in pairs}
    number = f"{model_type}-{folder.name}-back"
    print(f"{layout}/{model_type}", number, digest(back), flush=True)
    return {key.replace("-", "/"): array for key, array in by_key.items()}


def with_settings(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with what MaxText takes whatever it is told."""
    changes: dict[str, Any] = {}
    if "norm_topk_prob" in fields:
        changes["norm_topk_prob"] = True
    if "query_pre_attn_scalar" in fields:
        changes["query_pre_attn_scalar"] = fields["head_dim"]
    if fields["model_type"] == "olmo3":
        changes["rope_theta"] = 500_000.0
    if fields["model_type"] == "deepseek_v3":  # its heads share no keys
        changes["num_key_value_heads"] = fields["num_attention_heads"]
    if fields["model_type"] == "qwen3_vl":
        changes["image_token_id"] = fields["text_config"]["vocab_size"] - 1
        changes["vision_config"] = fields["vision_config"] | {"hidden_act": "gelu"}
    return fields | changes


def asked(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what models of MaxText and of PyTorch are asked, by name."""
    words = fields.get("text_config", fields)["vocab_size"]
    random, is_asked = np.random.default_rng(1), np.ones((2, LENGTH), int)
    tokens = random.integers(3, words - 1, is_asked.shape)
    ours = {"decoder_positions": is_asked * np.arange(LENGTH)}
    theirs = {"input_ids": tokens}
    if fields["model_type"] == "qwen3_vl":  # an image of 4 tokens, each 2 by 2 patches
        size = fields["vision_config"]["patch_size"]
        patches = random.normal(size=(2, 16, 3 * 2 * size**2)).astype(np.float32)
        tokens[:, 2:6] = fields["image_token_id"]
        is_image = tokens == fields["image_token_id"]
        times, rows = [0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4]
        places = np.stack([times, rows, [0, 1, 2, 3, 2, 3, 4]], -1)
        ours["decoder_positions"] = np.tile(places, (2, 1, 1))
        ours["encoder_images"] = patches.reshape(2, 3, 2, 4 * size, 4 * size)
        theirs |= {
            "pixel_values": patches.reshape(32, -1),
            "image_grid_thw": np.tile([1, 4, 4], (2, 1)),
            "mm_token_type_ids": is_image.astype(int),
        }
        tokens = np.where(is_image, IMAGE, tokens)
    ours |= {"decoder_input_tokens": tokens, "decoder_segment_ids": is_asked}
    return ours, theirs


def with_tied_head(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose head is the embedding."""
    changes: dict[str, Any] = {"tie_word_embeddings": True}
    if "text_config" in fields:
        changes["text_config"] = fields["text_config"] | changes
    return fields | changes


def answers_apart(
    layout: str, model_type: str, folder: Path, *, is_tied: bool = False
) -> float:
    """Return by how much answers of both models differ, relative to the largest."""
    fields, weights = with_settings(config_of(folder)), random_weights_of(folder)
    if is_tied:
        fields = with_tied_head(fields)
        del weights["lm_head.weight"]
    rounded = ROUNDED.get(model_type, "no embedding")
    for name in (each for each in weights if rounded in each):
        array = weights[name].astype(jax.numpy.bfloat16)
        weights[name] = array.astype(weights[name].dtype)
    made = loaded(layout, model_type, fields, weights)
    config = made.config
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    quant = quantizations.configure_quantization(config)
    model = models.transformer_as_linen(config, mesh, quant=quant)
    variables = jax.tree.unflatten(made.structure, map(jax.numpy.asarray, made.arrays))
    ours, theirs = asked(fields)
    gelu = jax.nn.gelu
    if model_type == "qwen3_vl":  # no setting of the library makes them exact
        gelu = functools.partial(gelu, approximate=False)
    with mock.patch.object(jax.nn, "gelu", gelu):
        logits = model.apply(variables, **ours, enable_dropout=False)
    answers = answers_of_pytorch(CALLED[model_type], fields, weights, theirs)
    words = fields.get("text_config", fields)["vocab_size"]
    return apart({"logits": logits[..., :words]}, answers)


def settings_of(layout: str, models: Iterable[str]) -> dict[str, str]:
    """Return settings, and how far answers are apart where a head is tied, in words."""
    texts = dict(SETTINGS)
    for model_type in models if "PYTORCH" in os.environ else ():
        if model_type in TIED:
            folder = FOLDER / model_type / "1"
            apart = answers_apart(layout, model_type, folder, is_tied=True)
            text = (
                f"a head of its own: one that is tied to the embedding, {apart:.0e}, "
                "because MaxText 0.2.5 rounds that to bfloat16 for logits"
            )
            known = texts.get(model_type, "")
            texts[model_type] = f"{text}{'; and ' * bool(known)}{known}"
    return texts


if __name__ == "__main__":
    chosen = [each for each in sys.argv[1:] if each in MODELS] or MODELS
    for name in ("maxtext", "maxtext-unscanned"):
        known = [each for each in chosen if (name, each) not in NO_TABLE]
        report(name, known, lambda *each, layout=name: convert(layout, *each))
        compare = functools.partial(answers_apart, name)
        report_answers(name, known, compare, settings_of(name, known))
