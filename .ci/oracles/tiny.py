"""Two tiny configurations of each model type, as transformers writes them.

Writes ``tests/published/<model_type>/<1 or 2>``: the ``config.json`` that publishes its
sizes, and the names and shapes of its weights as a schema. Run it in the environment of
``make test-models`` after a change below; digests of tables follow from these names.
Models of openpi have no such class: see ``openpi.py``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import openpi
import torch
import transformers
from transformers import CONFIG_MAPPING

import treeadapt as ta

FOLDER = Path(__file__).parents[2] / "tests" / "published"

DECODER = (
    {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "intermediate_size": 34,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 37,
    },
    {
        "num_hidden_layers": 3,
        "hidden_size": 30,
        "intermediate_size": 26,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "vocab_size": 41,
    },
)
NONE: Mapping[str, Any] = MappingProxyType({})
LAST = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def decoder(
    one: Mapping[str, Any] = NONE, two: Mapping[str, Any] = NONE, **both: Any
) -> Any:
    """Return two configurations of a decoder, each with changes."""
    return tuple(
        {k: v for k, v in (base | LAST | both | dict(changes)).items() if v is not None}
        for base, changes in zip(DECODER, (one, two), strict=True)
    )


def exact(
    one: Mapping[str, Any] = NONE, two: Mapping[str, Any] = NONE, **both: Any
) -> Any:
    """Return two configurations whose roots are exact: scaling does not round."""
    return decoder(
        {"hidden_size": 16, "head_dim": 4} | dict(one),
        {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4} | dict(two),
        **both,
    )


ENCODER = (
    {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "intermediate_size": 34,
        "num_attention_heads": 4,
        "vocab_size": 37,
        "max_position_embeddings": 19,
        "type_vocab_size": 2,
    },
    {
        "num_hidden_layers": 3,
        "hidden_size": 30,
        "intermediate_size": 26,
        "num_attention_heads": 3,
        "vocab_size": 41,
        "max_position_embeddings": 17,
        "type_vocab_size": 2,
    },
)
VISION = (
    {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "intermediate_size": 34,
        "num_attention_heads": 4,
        "image_size": 20,
        "patch_size": 5,
        "num_channels": 3,
        "num_labels": 7,
    },
    {
        "num_hidden_layers": 3,
        "hidden_size": 30,
        "intermediate_size": 26,
        "num_attention_heads": 3,
        "image_size": 12,
        "patch_size": 4,
        "num_channels": 3,
        "num_labels": 5,
    },
)
SEQ2SEQ = (
    {
        "encoder_layers": 2,
        "decoder_layers": 3,
        "d_model": 24,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 34,
        "decoder_ffn_dim": 26,
        "vocab_size": 37,
        "max_position_embeddings": 19,
    },
    {
        "encoder_layers": 3,
        "decoder_layers": 2,
        "d_model": 30,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 26,
        "decoder_ffn_dim": 34,
        "vocab_size": 41,
        "max_position_embeddings": 17,
    },
)
GPT = (
    {
        "n_layer": 2,
        "n_embd": 24,
        "n_head": 4,
        "vocab_size": 37,
        "n_positions": 19,
    },
    {
        "n_layer": 3,
        "n_embd": 30,
        "n_head": 3,
        "vocab_size": 41,
        "n_positions": 17,
    },
)
HALF = ({"num_hidden_layers": 2}, {"num_hidden_layers": 4})
DEEPSEEK = {
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 11,
    "n_shared_experts": 1,
    "head_dim": None,
    "num_key_value_heads": 4,
}

DINOV3 = {
    "hidden_size": 24,
    "intermediate_size": 34,
    "image_size": 16,
    "patch_size": 4,
    "num_register_tokens": 2,
}
QWEN35 = {
    "intermediate_size": 34,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_VL = tuple(
    {
        "text_config": decoder({"head_dim": 8}, {"head_dim": 14}, rope_scaling=rope)[
            place
        ],
        "vision_config": {
            "depth": depth,
            "hidden_size": heads * 8,
            "intermediate_size": 34,
            "num_heads": heads,
            "out_hidden_size": DECODER[place]["hidden_size"],
            "num_position_embeddings": 16,
            "patch_size": patch,
            "deepstack_visual_indexes": [*range(depth - 1)],
        },
        "tie_word_embeddings": False,
    }
    for place, (depth, heads, patch, rope) in enumerate(
        (
            (2, 3, 4, {"rope_type": "default", "mrope_section": [2, 1, 1]}),
            (3, 2, 2, {"rope_type": "default", "mrope_section": [3, 2, 2]}),
        )
    )
)


def gemma4(every: int, shared: int) -> Any:
    """Return two configurations in which one of so many layers sees all tokens.

    Args:
        every: one of so many.
        shared: how many layers of the second model have no keys of their own.
    """
    sizes = ((every, 0, 16, 4, 1), (2 * every, shared, 64, 6, 2))
    return tuple(
        {
            "text_config": decoder(
                num_hidden_layers=layers,
                layer_types=[
                    "sliding_attention" if (layer + 1) % every else "full_attention"
                    for layer in range(layers)
                ],
                global_head_dim=2 * size,
                head_dim=size,
                hidden_size=width,
                num_attention_heads=4,
                num_key_value_heads=heads,
                num_kv_shared_layers=shared_layers,
                use_double_wide_mlp=bool(shared_layers),
                hidden_size_per_layer_input=9,
                vocab_size_per_layer_input=37,
                vocab_size=37,
            )[0],
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 22,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 2,
                "position_embedding_size": 12,
            },
            "audio_config": None,
        }
        for layers, shared_layers, width, size, heads in sizes
    )


WAV2VEC2 = tuple(
    {
        "num_hidden_layers": each["num_hidden_layers"],
        "hidden_size": each["hidden_size"],
        "intermediate_size": each["intermediate_size"],
        "num_attention_heads": each["num_attention_heads"],
        "vocab_size": each["vocab_size"],
        "conv_dim": dims,
        "conv_kernel": [10, 3, 2][: len(dims)],
        "conv_stride": [5, 2, 2][: len(dims)],
        "num_feat_extract_layers": len(dims),
        "num_conv_pos_embeddings": 6,
        "num_conv_pos_embedding_groups": groups,
        "feat_extract_norm": "layer",
        "do_stable_layer_norm": True,
        "conv_bias": True,
    }
    for each, dims, groups in zip(ENCODER, ([8, 11], [7, 9, 12]), (2, 3), strict=True)
)

MAMBA2 = {
    "num_heads": 6,
    "n_groups": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

#: Models of one type that have a table each.
SAME_TYPE = {"gemma4_e2b": "gemma4", "gemma4_e4b": "gemma4"}
#: Class, and the two configurations.
MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", exact()),
    "mistral": ("MistralForCausalLM", decoder()),
    "qwen2": ("Qwen2ForCausalLM", decoder(head_dim=None)),
    "qwen3": ("Qwen3ForCausalLM", decoder({"head_dim": 8}, {"head_dim": 14})),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        decoder(
            {"head_dim": 8, "num_experts": 5},
            {"head_dim": 14, "num_experts": 11},
            moe_intermediate_size=17,
            num_experts_per_tok=2,
        ),
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        decoder(
            {"num_experts": 5},
            {"num_experts": 11},
            head_dim=None,
            moe_intermediate_size=17,
            shared_expert_intermediate_size=19,
            num_experts_per_tok=2,
        ),
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        decoder(
            {"num_hidden_layers": 4, "head_dim": 8, "num_experts": 5},
            {"num_hidden_layers": 8, "head_dim": 16, "num_experts": 6},
            intermediate_size=17,
            moe_intermediate_size=17,
            shared_expert_intermediate_size=17,
            num_experts_per_tok=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=5,
            linear_value_head_dim=7,
        ),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        exact({"num_local_experts": 5}, {"num_local_experts": 11}),
    ),
    "gemma": ("GemmaForCausalLM", decoder({"head_dim": 8}, {"head_dim": 14})),
    "gemma2": (
        "Gemma2ForCausalLM",
        exact(
            {"num_hidden_layers": 4},
            {"num_hidden_layers": 6},
        ),
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        exact(
            {"num_hidden_layers": 8},
            {"num_hidden_layers": 13},
        ),
    ),
    "gemma3n_text": (
        "Gemma3nForCausalLM",
        decoder(
            {
                "num_hidden_layers": 5,
                "num_kv_shared_layers": 2,
                "altup_num_inputs": 3,
                "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
                "layer_types": [
                    *["sliding_attention", "full_attention"] * 2,
                    "full_attention",
                ],
            },
            {
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 0,
                "activation_sparsity_pattern": [0.0] * 6,
                "layer_types": [*["sliding_attention", "full_attention"] * 3],
            },
            hidden_size_per_layer_input=9,
            vocab_size_per_layer_input=37,
            laurel_rank=5,
        ),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        decoder(
            {"num_local_experts": 5, "num_hidden_layers": 4},
            {"num_local_experts": 3, "num_hidden_layers": 6},
            num_experts_per_tok=2,
        ),
    ),
    "olmo3": (
        "Olmo3ForCausalLM",
        decoder({"num_hidden_layers": 4}, {"num_hidden_layers": 8}, head_dim=None),
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        decoder(
            {"n_routed_experts": 5, "num_hidden_layers": 4, "first_k_dense_replace": 1},
            {
                "n_routed_experts": 6,
                "num_hidden_layers": 5,
                "first_k_dense_replace": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
            },
            **{k: v for k, v in DEEPSEEK.items() if k != "num_key_value_heads"},
        ),
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        decoder(
            {"num_hidden_layers": 4},
            {"num_hidden_layers": 5, "no_rope_layer_interval": 2},
            head_dim=None,
            tie_word_embeddings=False,
        ),
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        (
            {**MAMBA2, "num_hidden_layers": 2, "hidden_size": 24, "head_dim": 8}
            | {"vocab_size": 37, "state_size": 5},
            {**MAMBA2, "num_hidden_layers": 3, "hidden_size": 30, "head_dim": 10}
            | {"vocab_size": 41, "state_size": 7, "use_bias": True, "conv_kernel": 3},
        ),
    ),
    "gpt2": ("GPT2Model", GPT),  # as the published files are
    "gptj": (
        "GPTJForCausalLM",
        tuple(each | {"rotary_dim": 4} for each in GPT),
    ),
    "opt": (
        "OPTForCausalLM",
        tuple(
            {k: v for k, v in each.items() if k not in ("intermediate_size",)}
            | {
                "ffn_dim": each["intermediate_size"],
                "word_embed_proj_dim": each["hidden_size"],
            }
            for each in (
                {k: v for k, v in e.items() if k != "type_vocab_size"} for e in ENCODER
            )
        ),
    ),
    "bert": ("BertForPreTraining", ENCODER),
    "albert": (
        "AlbertForPreTraining",
        tuple(each | {"embedding_size": 11} for each in ENCODER),
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        tuple(
            {
                "n_layers": each["num_hidden_layers"],
                "dim": each["hidden_size"],
                "hidden_dim": each["intermediate_size"],
                "n_heads": each["num_attention_heads"],
                "vocab_size": each["vocab_size"],
                "max_position_embeddings": each["max_position_embeddings"],
            }
            for each in ENCODER
        ),
    ),
    "vit": ("ViTForImageClassification", VISION),
    "deit": ("DeiTForImageClassification", VISION),
    "dinov2": (
        "Dinov2Model",
        tuple(
            {k: v for k, v in each.items() if k != "intermediate_size"}
            | {"mlp_ratio": 2}
            for each in VISION
        ),
    ),
    "resnet": (
        "ResNetForImageClassification",
        (
            {
                "embedding_size": 6,
                "hidden_sizes": [8, 12, 16, 20],
                "depths": [2, 1, 1, 3],
                "num_labels": 7,
            },
            {
                "embedding_size": 4,
                "hidden_sizes": [12, 20, 8, 16],
                "depths": [1, 3, 2, 1],
                "num_labels": 5,
            },
        ),
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        tuple(
            {k: v for k, v in each.items() if k != "max_position_embeddings"}
            | {
                "num_mel_bins": 6,
                "max_source_positions": 13,
                "max_target_positions": 19,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "decoder_start_token_id": 1,
                "suppress_tokens": [],
                "begin_suppress_tokens": [],
            }
            for each in SEQ2SEQ
        ),
    ),
    "bart": (
        "BartForConditionalGeneration",
        tuple(each | {"forced_eos_token_id": 2} for each in SEQ2SEQ),
    ),
    "clip": (
        "CLIPModel",
        tuple(
            {
                "projection_dim": 9 + place,
                "text_config": {
                    k: v for k, v in ENCODER[place].items() if k != "type_vocab_size"
                },
                "vision_config": {
                    k: v for k, v in VISION[place].items() if k != "num_labels"
                },
            }
            for place in range(2)
        ),
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        tuple(
            {
                "text_config": exact(
                    {"num_hidden_layers": 8},
                    {"num_hidden_layers": 13},
                )[place],
                "vision_config": {
                    k: v for k, v in VISION[place].items() if k != "num_labels"
                },
                "mm_tokens_per_image": 4,
            }
            for place in range(2)
        ),
    ),
    "esm": (
        "EsmForMaskedLM",
        tuple(
            {k: v for k, v in each.items() if k != "type_vocab_size"}
            | {
                "position_embedding_type": "rotary",
                "token_dropout": True,
                "pad_token_id": 1,
                "mask_token_id": 3,
            }
            for each in ENCODER
        ),
    ),
    "dinov3_vit": (
        "DINOv3ViTModel",
        (
            {**DINOV3, "num_hidden_layers": 2, "num_attention_heads": 3},
            {**DINOV3, "num_hidden_layers": 3, "hidden_size": 32}
            | {"num_attention_heads": 2, "num_register_tokens": 3, "mlp_ratio": 3}
            | {"intermediate_size": 26, "use_gated_mlp": True},
        ),
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", WAV2VEC2),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", QWEN3_VL),
    # These need transformers 5.
    "gemma4_e2b": ("Gemma4ForConditionalGeneration", gemma4(5, 4)),
    "gemma4_e4b": ("Gemma4ForConditionalGeneration", gemma4(6, 3)),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        tuple(
            {
                "text_config": QWEN35 | text,
                "vision_config": {
                    "depth": depth,
                    "hidden_size": 24,
                    "intermediate_size": 34,
                    "num_heads": heads,
                    "out_hidden_size": text["hidden_size"],
                    "num_position_embeddings": 16,
                    "patch_size": 4,
                },
                "tie_word_embeddings": False,
            }
            for text, depth, heads in (
                ({"hidden_size": 24, "num_hidden_layers": 4, "head_dim": 8}, 2, 3),
                ({"hidden_size": 30, "num_hidden_layers": 8, "head_dim": 16}, 3, 2),
            )
        ),
    ),
}


def write_openpi(model_type: str) -> None:
    """Write the folders of a model of openpi, as its script writes them."""
    for number in (1, 2):
        folder = FOLDER / model_type / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        leaves = openpi.weights(model_type, openpi.params(model_type, number - 1))
        ta.save(folder / "model.schema.toml", leaves)
        actions = openpi.SIZES[number - 1]["actions"]
        config = {"action_dim": actions, "precision": "float32"}
        text = json.dumps(config, indent=1)
        (folder / "config.json").write_text(f"{text}\n", "utf-8")


def main(names: list[str]) -> None:
    """Write the folders of these model types, or of all."""
    transformers.logging.set_verbosity_error()
    for model_type in names or openpi.MODELS:
        if model_type in openpi.MODELS:
            write_openpi(model_type)
    for model_type in (x for x in names or MODELS if x not in openpi.MODELS):
        class_name, configs = MODELS[model_type]
        for number, fields in enumerate(configs, 1):
            folder = FOLDER / model_type / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            torch.manual_seed(number)
            config = CONFIG_MAPPING[SAME_TYPE.get(model_type, model_type)](**fields)
            model = getattr(transformers, class_name)(config)
            with tempfile.TemporaryDirectory() as written:
                model.save_pretrained(written)
                leaves = ta.load(written)
                # The writer of 4.57.6 puts its prefix into one name of Gemma 3n, too.
                names = {
                    k: k.replace("_model.language_model_", "_model_") for k in leaves
                }
                leaves = {names[name]: leaf for name, leaf in leaves.items()}
                ta.save(folder / "model.schema.toml", leaves)
                text = (Path(written) / "config.json").read_text("utf-8")
            fields = json.loads(text)
            del fields["transformers_version"]
            text = json.dumps(fields, indent=1)
            (folder / "config.json").write_text(f"{text}\n", "utf-8")
        print(model_type, class_name)


if __name__ == "__main__":
    main(sys.argv[1:])
