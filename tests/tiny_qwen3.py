"""A Qwen 3 of tiny sizes: what ``config.json`` states, and the shapes of one layer."""

from __future__ import annotations

CONFIG = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}

#: By what is between the number of the layer and ``.weight``.
SHAPES = {
    "self_attn.q_proj": (24, 22),
    "self_attn.k_proj": (12, 22),
    "self_attn.v_proj": (12, 22),
    "self_attn.o_proj": (22, 24),
    "self_attn.q_norm": (6,),
    "self_attn.k_norm": (6,),
    "mlp.gate_proj": (17, 22),
    "mlp.up_proj": (17, 22),
    "mlp.down_proj": (22, 17),
    "input_layernorm": (22,),
    "post_attention_layernorm": (22,),
}
