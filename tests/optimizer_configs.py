"""Configurations as people have them: names of parameters, a file, and Optax by hand.

The names are those of the projects; the shapes are tiny. The labels of each leaf are
written out in Python, without any pattern, and the optimizer as one would write it with
Optax alone, for the flat dict of the leaves that train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax
from optax import contrib

import treeadapt as ta

Labels = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Config:
    """One configuration.

    Attributes:
        name: of the project, and what it shows.
        shapes: by path.
        toml: the file, without its version.
        label: the label of a path; "frozen" for one that does not train.
        by_hand: given the label of each path that trains, the transformation.
        given: what the caller passes.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    toml: str
    label: Callable[[str], str]
    by_hand: Callable[[Labels], Any]
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _ends(*names: str) -> Callable[[str], bool]:
    return lambda path: path.rpartition("/")[2] in names


def _decay(path: str) -> str:
    return "no_decay" if _ends("bias", "scale")(path) else "decay"


GPT2 = {
    "wte/embedding": (5, 4),
    "wpe/embedding": (3, 4),
    "h/0/ln_1/scale": (4,),
    "h/0/ln_1/bias": (4,),
    "h/0/attn/c_attn/kernel": (4, 12),
    "h/0/attn/c_attn/bias": (12,),
    "h/0/mlp/c_fc/kernel": (4, 8),
    "h/1/ln_1/scale": (4,),
    "h/1/attn/c_attn/kernel": (4, 12),
    "ln_f/scale": (4,),
}
VIT = {
    "img/embedding/kernel": (2, 2, 3, 4),
    "img/embedding/bias": (4,),
    "img/pos_embedding": (1, 4, 4),
    "img/Transformer/encoderblock_0/LayerNorm_0/scale": (4,),
    "img/Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel": (4, 8),
    "img/Transformer/encoderblock_0/MlpBlock_0/Dense_0/bias": (8,),
    "img/Transformer/encoderblock_1/MlpBlock_0/Dense_0/kernel": (4, 8),
    "img/head/kernel": (4, 2),
    "img/head/bias": (2,),
    "t": (1,),
}
LLAMA = {
    "transformer/wte/embedding": (5, 4),
    "transformer/h/0/attention/wq/kernel": (4, 4),
    "transformer/h/0/attention_norm/kernel": (4,),
    "transformer/h/0/feed_forward/w1/kernel": (4, 8),
    "transformer/ln_f/kernel": (4,),
    "lm_head/kernel": (4, 5),
}
PALIGEMMA = {
    "PaliGemma/img/embedding/kernel": (2, 2, 3, 4),
    "PaliGemma/llm/layers/attn/q_einsum/w": (2, 4, 4),
    "PaliGemma/llm/layers/attn/q_einsum/lora_a": (2, 4, 2),
    "PaliGemma/llm/layers/attn/q_einsum/lora_b": (2, 2, 4),
    "action_in_proj/kernel": (3, 4),
    "action_in_proj/bias": (4,),
}
PPO = {
    f"{net}/params/hidden_{n}/{leaf}": (3, 3) if leaf == "kernel" else (3,)
    for net in ("policy", "value")
    for n in range(3)
    for leaf in ("kernel", "bias")
}
TITAN = {
    "tok_embeddings/weight": (5, 4),
    "layers/0/attention/wq/weight": (4, 4),
    "layers/0/attention_norm/weight": (4,),
    "layers/0/feed_forward/w1/weight": (8, 4),
    "norm/weight": (4,),
    "output/weight": (5, 4),
}
DETR = {
    "backbone/ResidualBlock_0/Conv_0/kernel": (1, 1, 3, 4),
    "backbone/ResidualBlock_0/BatchNorm_0/scale": (4,),
    "transformer/encoder/encoderblock_0/self_attention/query/kernel": (4, 4),
    "bbox_embed/Dense_0/kernel": (4, 4),
    "class_embed/bias": (3,),
}
UNET = {
    "conv_in/kernel": (1, 1, 4, 4),
    "down_blocks_0/attentions_0/transformer_blocks_0/attn2/to_k/kernel": (4, 4),
    "down_blocks_0/attentions_0/transformer_blocks_0/attn2/to_v/kernel": (4, 4),
    "down_blocks_0/resnets_0/conv1/kernel": (1, 1, 4, 4),
    "time_embedding/linear_1/kernel": (4, 8),
}
T5 = {
    "encoder/layers_0/attention/query/kernel": (4, 4),
    "encoder/layers_0/pre_attention_layer_norm/scale": (4,),
    "encoder/relpos_bias/rel_embedding": (2, 4),
    "decoder/layers_0/mlp/wi_0/kernel": (4, 8),
    "token_embedder/embedding": (6, 4),
}
MUON = {
    "embed/embedding": (6, 4),
    "blocks/0/attn/query/kernel": (4, 2, 2),
    "blocks/0/attn/out/kernel": (2, 2, 4),
    "blocks/0/mlp/up/kernel": (4, 8),
    "blocks/0/norm/scale": (4,),
    "head/kernel": (4, 6),
}
HAIKU = {
    "mlp/~/linear_0/w": (3, 4),
    "mlp/~/linear_0/b": (4,),
    "mlp/~/linear_1/w": (4, 2),
    "mlp/~/linear_1/b": (2,),
}

_COSINE = """
[given.rate]
type = "warmup_cosine_decay_schedule"
init_value = 0.0
peak_value = 3e-2
warmup_steps = 2
decay_steps = { given = "steps" }
"""
_COSINE_BY_HAND = {
    "init_value": 0.0,
    "peak_value": 3e-2,
    "warmup_steps": 2,
    "decay_steps": 10,
}


def _cosine() -> Any:
    return optax.warmup_cosine_decay_schedule(**_COSINE_BY_HAND)


CONFIGS = (
    Config(
        "GPT-2, decay by kind",
        GPT2,
        '[rules]\n"{wte,wpe}" = "frozen"\n"**/{bias,scale}" = "no_decay"\n'
        '"**" = "decay"\n'
        + _COSINE
        + """
[optimizers.decay]
type = "adamw"
learning_rate = { given = "rate" }
weight_decay = 0.1
b2 = 0.95
[optimizers.no_decay]
type = "adam"
learning_rate = { given = "rate" }
b2 = 0.95
""",
        lambda path: "frozen" if path[:3] in ("wte", "wpe") else _decay(path),
        lambda labels: optax.partition(
            {
                "decay": optax.adamw(_cosine(), weight_decay=0.1, b2=0.95),
                "no_decay": optax.adam(_cosine(), b2=0.95),
            },
            dict(labels),
        ),
        {"steps": 10},
    ),
    Config(
        "GPT-2, clipped, accumulated, decay by mask",
        GPT2,
        """
[rules]
"{wte,wpe}" = "frozen"
"**" = "train"
[optimizer]
type = "MultiSteps"
every_k_schedule = 2
[[optimizer.opt]]
type = "clip_by_global_norm"
max_norm = 1.0
[[optimizer.opt]]
type = "adamw"
learning_rate = 1e-2
weight_decay = 0.1
mask = ["**", "!**/{bias,scale}"]
""",
        lambda path: "frozen" if path[:3] in ("wte", "wpe") else "train",
        lambda labels: optax.MultiSteps(
            optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.adamw(
                    1e-2,
                    weight_decay=0.1,
                    mask={path: _decay(path) == "decay" for path in labels},
                ),
            ),
            every_k_schedule=2,
        ),
    ),
    Config(
        "big_vision, schedule, lr_mults and wd_mults",
        VIT,
        """
[rules]
"img/embedding" = "frozen"
"**" = "train"
[given]
lr = 1e-2
[[optimizer]]
type = "clip_by_global_norm"
max_norm = 1.0
[[optimizer]]
type = "scale_by_adam"
mu_dtype = "bfloat16"
[[optimizer]]
type = "add_decayed_weights"
weight_decay = 1e-3
mask = "**/kernel"
[[optimizer]]
type = "scale_by_rules"
rules = { "img/head" = 10.0, "t" = 0.1, "**" = 1.0 }
[[optimizer]]
type = "scale_by_schedule"
step_size_fn = { type = "linear_schedule", init_value = 0, end_value = 1, \
transition_steps = 4 }
[[optimizer]]
type = "scale_by_learning_rate"
learning_rate = { given = "lr" }
""",
        lambda path: "frozen" if path.startswith("img/embedding/") else "train",
        lambda labels: optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(mu_dtype="bfloat16"),
            optax.add_decayed_weights(1e-3, {p: p.endswith("/kernel") for p in labels}),
            optax.stateless(
                lambda updates, _: {
                    path: update
                    * (10.0 if "/head/" in path else 0.1 if path == "t" else 1.0)
                    for path, update in updates.items()
                }
            ),
            optax.scale_by_schedule(optax.linear_schedule(0, 1, 4)),
            optax.scale_by_learning_rate(1e-2),
        ),
    ),
    Config(
        "big_vision, Adafactor",
        VIT,
        """
[rules]
"**" = "all"
[optimizers.all]
type = "adafactor"
learning_rate = 1e-2
decay_rate = 0.8
clipping_threshold = 1.0
momentum = 0.9
dtype_momentum = "bfloat16"
weight_decay_rate = "none"
min_dim_size_to_factor = 4
""",
        lambda path: "all",
        lambda labels: optax.adafactor(
            1e-2,
            momentum=0.9,
            dtype_momentum="bfloat16",
            min_dim_size_to_factor=4,
        ),
    ),
    Config(
        "EasyLM, Llama",
        LLAMA,
        """
[rules]
"**/{attention_norm,ln_f}" = "norms"
"**" = "decay"
[[optimizers.norms]]
type = "clip_by_global_norm"
max_norm = 1
[[optimizers.norms]]
type = "adamw"
learning_rate = 1e-2
weight_decay = 0
[[optimizers.decay]]
type = "clip_by_global_norm"
max_norm = 1
[[optimizers.decay]]
type = "adamw"
learning_rate = 1e-2
weight_decay = 0.1
""",
        lambda path: "norms" if "norm" in path or "ln_f" in path else "decay",
        lambda labels: optax.partition(
            {
                label: optax.chain(
                    optax.clip_by_global_norm(1),
                    optax.adamw(1e-2, weight_decay=weight_decay),
                )
                for label, weight_decay in (("norms", 0), ("decay", 0.1))
            },
            dict(labels),
        ),
    ),
    Config(
        "openpi, LoRA",
        PALIGEMMA,
        """
[rules]
"**/{lora_a,lora_b}" = "lora"
"PaliGemma" = "frozen"
"**" = "action"
[optimizers.lora]
type = "adamw"
learning_rate = { given = "peak" }
weight_decay = 1e-10
[optimizers.action]
type = "adamw"
learning_rate = 5e-3
[optimizer]
type = "apply_if_finite"
max_consecutive_errors = 3
inner = [{ type = "clip_by_global_norm", max_norm = 1.0 }, { type = "partition" }]
""",
        lambda path: (
            "lora"
            if _ends("lora_a", "lora_b")(path)
            else "frozen"
            if path.startswith("PaliGemma")
            else "action"
        ),
        lambda labels: optax.apply_if_finite(
            optax.chain(
                optax.clip_by_global_norm(1.0),
                optax.partition(
                    {
                        "lora": optax.adamw(2.5e-3, weight_decay=1e-10),
                        "action": optax.adamw(5e-3),
                    },
                    dict(labels),
                ),
            ),
            3,
        ),
        {"peak": 2.5e-3},
    ),
    Config(
        "Brax, PPO",
        PPO,
        """
[rules]
"policy/params/hidden_0" = "frozen"
"policy" = "fast"
"value" = "slow"
[optimizers.fast]
type = "adam"
learning_rate = 3e-3
[optimizers.slow]
type = "adam"
learning_rate = 1e-3
""",
        lambda path: (
            "frozen"
            if "policy/params/hidden_0" in path
            else {"p": "fast", "v": "slow"}[path[0]]
        ),
        lambda labels: optax.partition(
            {"fast": optax.adam(3e-3), "slow": optax.adam(1e-3)}, dict(labels)
        ),
    ),
    Config(
        "Brax, injected rate and annealing",
        PPO,
        """
[optimizer]
type = "adam"
inject = ["learning_rate", "b1"]
learning_rate = { type = "linear_schedule", init_value = 3e-3, end_value = 0, \
transition_steps = 5 }
eps = 1e-5
""",
        lambda path: "all",
        lambda labels: optax.inject_hyperparams(
            optax.adam, static_args=("b2", "eps", "eps_root")
        )(optax.linear_schedule(3e-3, 0, 5), eps=1e-5),
    ),
    Config(
        "torchtitan, groups",
        TITAN,
        """
[rules]
"tok_embeddings" = "embeddings"
"output" = "head"
"**/{attention_norm,norm}/weight" = "norms"
"**" = "matrices"
[given]
lr = 1e-2
[optimizers.embeddings]
type = "adamw"
learning_rate = 3e-2
weight_decay = 0.0
[optimizers.head]
type = "adamw"
learning_rate = { given = "lr" }
weight_decay = 0.01
[optimizers.norms]
type = "adam"
learning_rate = { given = "lr" }
[optimizers.matrices]
type = "adamw"
learning_rate = { given = "lr" }
weight_decay = 0.1
""",
        lambda path: {"tok_embeddings": "embeddings", "output": "head"}.get(
            path.split("/")[0], "norms" if "norm" in path else "matrices"
        ),
        lambda labels: optax.partition(
            {
                "embeddings": optax.adamw(3e-2, weight_decay=0.0),
                "head": optax.adamw(1e-2, weight_decay=0.01),
                "norms": optax.adam(1e-2),
                "matrices": optax.adamw(1e-2, weight_decay=0.1),
            },
            dict(labels),
        ),
    ),
    Config(
        "Scenic's DETR, a slow backbone",
        DETR,
        """
[rules]
"**/BatchNorm_*" = "frozen"
"backbone" = "slow"
"**" = "fast"
[optimizers.slow]
type = "adamw"
learning_rate = 1e-3
[optimizers.fast]
type = "adamw"
learning_rate = 1e-2
[optimizer]
type = "masked"
inner = [{ type = "clip_by_global_norm", max_norm = 0.1 }, { type = "partition" }]
mask = true
""",
        lambda path: (
            "frozen"
            if "BatchNorm" in path
            else "slow"
            if path.startswith("backbone")
            else "fast"
        ),
        lambda labels: optax.masked(
            optax.chain(
                optax.clip_by_global_norm(0.1),
                optax.partition(
                    {"slow": optax.adamw(1e-3), "fast": optax.adamw(1e-2)}, dict(labels)
                ),
            ),
            mask=True,
        ),
    ),
    Config(
        "diffusers' UNet, cross-attention only",
        UNET,
        """
[rules]
"**/attn2/{to_k,to_v}" = "train"
"**" = "frozen"
[optimizers.train]
type = "lion"
learning_rate = 1e-3
weight_decay = 0.02
b1 = 0.95
""",
        lambda path: "train" if "/attn2/" in path else "frozen",
        lambda labels: optax.lion(1e-3, b1=0.95, weight_decay=0.02),
    ),
    Config(
        "T5X, two schedules joined",
        T5,
        """
[rules]
"**/{rel_embedding,scale}" = "plain"
"**" = "factored"
[given.rate]
type = "join_schedules"
boundaries = [2]
[[given.rate.schedules]]
type = "constant_schedule"
value = 1e-2
[[given.rate.schedules]]
type = "polynomial_schedule"
init_value = 1e-2
end_value = 1e-3
power = 0.5
transition_steps = 5
[optimizers.plain]
type = "sgd"
learning_rate = { given = "rate" }
momentum = 0.9
nesterov = true
[optimizers.factored]
type = "adafactor"
learning_rate = { given = "rate" }
multiply_by_parameter_scale = false
min_dim_size_to_factor = 4
""",
        lambda path: "plain" if _ends("rel_embedding", "scale")(path) else "factored",
        lambda labels: optax.partition(
            {
                "plain": optax.sgd(_joined(), momentum=0.9, nesterov=True),
                "factored": optax.adafactor(
                    _joined(),
                    multiply_by_parameter_scale=False,
                    min_dim_size_to_factor=4,
                ),
            },
            dict(labels),
        ),
    ),
    Config(
        "Muon on matrices, Adam on the rest",
        {path: shape for path, shape in MUON.items() if "attn" not in path},
        """
[rules]
"blocks/*/{attn,mlp}/**/kernel" = "matrices"
"**" = "rest"
[optimizers.matrices]
type = "muon"
learning_rate = 2e-2
ns_steps = 2
[optimizers.rest]
type = "adam"
learning_rate = 3e-3
b1 = 0.8
""",
        lambda path: (
            "matrices" if path.startswith("blocks") and "kernel" in path else "rest"
        ),
        lambda labels: optax.partition(
            {
                "matrices": contrib.muon(2e-2, ns_steps=2),
                "rest": optax.adam(3e-3, b1=0.8),
            },
            dict(labels),
        ),
    ),
    Config(
        "Muon, axes of attention",
        MUON,
        """
[rules]
"**" = "all"
[optimizers.all]
type = "muon"
learning_rate = 2e-2
ns_steps = 2
[optimizers.all.muon_weight_dimension_numbers]
"**/query/kernel" = { reduction_axis = 0, output_axis = [1, 2] }
"**/out/kernel" = { reduction_axis = [0, 1], output_axis = 2 }
"**/mlp/**/kernel" = {}
"**" = "none"
""",
        lambda path: "all",
        lambda labels: contrib.muon(
            2e-2,
            ns_steps=2,
            muon_weight_dimension_numbers={
                path: contrib.MuonDimensionNumbers(0, (1, 2))
                if "/query/" in path
                else contrib.MuonDimensionNumbers((0, 1), 2)
                if "/out/" in path
                else contrib.MuonDimensionNumbers()
                if "/mlp/" in path
                else None
                for path in labels
            },
        ),
    ),
    Config(
        "BEiT, layer-wise decay by rows",
        GPT2,
        """
[optimizer]
type = "partition"
[rules]
"**" = "all"
[[optimizers.all]]
type = "adamw"
learning_rate = 1e-2
[[optimizers.all]]
type = "scale_by_rules"
[optimizers.all.rules]
"{wte,wpe}" = 0.25
"h/0" = 0.5
"h/1" = 0.75
"**" = 1.0
""",
        lambda path: "all",
        lambda labels: optax.chain(
            optax.adamw(1e-2),
            optax.stateless(
                lambda updates, _: {
                    path: update * _FACTORS.get(path.split("/")[0], 1.0)
                    if path[0] != "h"
                    else update * (0.5 if path[2] == "0" else 0.75)
                    for path, update in updates.items()
                }
            ),
        ),
    ),
    Config(
        "Haiku, RMSProp and lookahead-free clipping by value",
        HAIKU,
        """
[rules]
"mlp/~/linear_0" = "trunk"
"**" = "head"
[[optimizers.trunk]]
type = "clip"
max_delta = 0.5
[[optimizers.trunk]]
type = "rmsprop"
learning_rate = 1e-2
centered = true
momentum = 0.9
[optimizers.head]
type = "adagrad"
learning_rate = { type = "exponential_decay", init_value = 0.1, \
transition_steps = 2, decay_rate = 0.5, staircase = true }
""",
        lambda path: "trunk" if "linear_0" in path else "head",
        lambda labels: optax.partition(
            {
                "trunk": optax.chain(
                    optax.clip(0.5), optax.rmsprop(1e-2, centered=True, momentum=0.9)
                ),
                "head": optax.adagrad(
                    optax.exponential_decay(0.1, 2, 0.5, staircase=True)
                ),
            },
            dict(labels),
        ),
    ),
    Config(
        "DreamerV3, clipping by leaf",
        HAIKU,
        """
[optimizer]
type = "masked"
mask = "**"
inner = [
  { type = "adaptive_grad_clip", clipping = 0.3 },
  { type = "scale_by_rms", decay = 0.999, eps = 1e-20, eps_in_sqrt = false },
  { type = "ema", decay = 0.9 },
  { type = "scale", step_size = -4e-5 },
]
""",
        lambda path: "all",
        lambda labels: optax.masked(
            optax.chain(
                optax.adaptive_grad_clip(0.3),
                optax.scale_by_rms(0.999, 1e-20, eps_in_sqrt=False),
                optax.ema(0.9),
                optax.scale(-4e-5),
            ),
            dict.fromkeys(labels, True),
        ),
    ),
    Config(
        "ImageNet, LARS with masks",
        DETR,
        """
[optimizer]
type = "lars"
learning_rate = { type = "piecewise_constant_schedule", init_value = 0.1, \
boundaries_and_scales = { "1" = 0.5, "2" = 0.5 } }
weight_decay = 1e-4
weight_decay_mask = ["!**/{bias,scale}"]
trust_ratio_mask = ["!**/{bias,scale}"]
""",
        lambda path: "all",
        lambda labels: optax.lars(
            optax.piecewise_constant_schedule(0.1, {1: 0.5, 2: 0.5}),
            weight_decay=1e-4,
            weight_decay_mask={path: _decay(path) == "decay" for path in labels},
            trust_ratio_mask={path: _decay(path) == "decay" for path in labels},
        ),
    ),
    Config(
        "BERT, LAMB and warm restarts",
        T5,
        """
[rules]
"**/{bias,scale}" = "no_decay"
"**" = "decay"
[given.rate]
type = "sgdr_schedule"
cosine_kwargs = [
  { init_value = 0.0, peak_value = 1e-2, decay_steps = 2, warmup_steps = 1 },
  { init_value = 0.0, peak_value = 5e-3, decay_steps = 4, warmup_steps = 1 },
]
[optimizers.decay]
type = "lamb"
learning_rate = { given = "rate" }
weight_decay = 0.01
[optimizers.no_decay]
type = "lamb"
learning_rate = { given = "rate" }
""",
        _decay,
        lambda labels: optax.partition(
            {
                "decay": optax.lamb(_restarts(), weight_decay=0.01),
                "no_decay": optax.lamb(_restarts()),
            },
            dict(labels),
        ),
    ),
    Config(
        "CLIP, numbers of all groups written once",
        VIT,
        """
[rules]
"**/{bias,scale}" = "no_decay"
"**/kernel" = "decay"
"**" = "head"
[each]
b2 = 0.98
eps = 1e-6
mu_dtype = "bfloat16"
max_norm = 1.0
[[optimizers.decay]]
type = "clip_by_global_norm"
[[optimizers.decay]]
type = "adamw"
learning_rate = 1e-2
weight_decay = 0.2
[optimizers.no_decay]
type = "adam"
learning_rate = 1e-2
[optimizers.head]
type = "adam"
learning_rate = 1e-3
b2 = 0.9
""",
        lambda path: (
            "no_decay"
            if _ends("bias", "scale")(path)
            else "decay"
            if _ends("kernel")(path)
            else "head"
        ),
        lambda labels: optax.partition(
            {
                "decay": optax.chain(
                    optax.clip_by_global_norm(1.0),
                    optax.adamw(
                        1e-2, b2=0.98, eps=1e-6, mu_dtype="bfloat16", weight_decay=0.2
                    ),
                ),
                "no_decay": optax.adam(1e-2, b2=0.98, eps=1e-6, mu_dtype="bfloat16"),
                "head": optax.adam(1e-3, b2=0.9, eps=1e-6, mu_dtype="bfloat16"),
            },
            dict(labels),
        ),
    ),
    Config(
        "schedule-free AdamW",
        LLAMA,
        """
[rules]
"**/wte" = "frozen"
"**" = "train"
[optimizer]
type = "schedule_free_adamw"
learning_rate = 1e-2
warmup_steps = 2
weight_decay = 0.01
""",
        lambda path: "frozen" if "/wte/" in path else "train",
        lambda labels: contrib.schedule_free_adamw(
            1e-2, warmup_steps=2, weight_decay=0.01
        ),
    ),
    Config(
        "Prodigy, with the caller's own schedule",
        PPO,
        """
[rules]
"value" = "frozen"
"**" = "train"
[optimizers.train]
type = "prodigy"
learning_rate = { type = "rsqrt", peak = 1.0, warmup = 2 }
betas = [0.9, 0.99]
""",
        lambda path: "frozen" if path.startswith("value") else "train",
        lambda labels: contrib.prodigy(rsqrt(1.0, 2), betas=(0.9, 0.99)),
        {"names": {"rsqrt": lambda peak, warmup: rsqrt(peak, warmup)}},
    ),
    Config(
        "a stack of layers, Muon in each",
        {"blocks/kernel": (3, 4, 4), "head": (4, 2)},
        """
[rules]
"blocks" = "blocks"
"**" = "rest"
[stacks]
"blocks" = 0
[optimizers.blocks]
type = "per_layer"
tx = { type = "muon", learning_rate = 1e-2, ns_steps = 2 }
[optimizers.rest]
type = "adam"
learning_rate = 1e-2
""",
        lambda path: "blocks" if "/" in path else "rest",
        lambda labels: optax.partition(
            {
                "blocks": ta.per_layer(contrib.muon(1e-2, ns_steps=2), {"blocks": 0}),
                "rest": optax.adam(1e-2),
            },
            dict(labels),
        ),
    ),
)
_FACTORS = {"wte": 0.25, "wpe": 0.25}


def rsqrt(peak: float, warmup: int) -> Any:
    """A schedule that is not Optax's."""
    return lambda count: peak / (1.0 + count * warmup) ** 0.5


def _joined() -> Any:
    later = optax.polynomial_schedule(1e-2, 1e-3, 0.5, 5)
    return optax.join_schedules([optax.constant_schedule(1e-2), later], [2])


def _restarts() -> Any:
    keys = ("init_value", "peak_value", "decay_steps", "warmup_steps")
    cycles = [(0.0, 1e-2, 2, 1), (0.0, 5e-3, 4, 1)]
    return optax.sgdr_schedule([dict(zip(keys, x, strict=True)) for x in cycles])
