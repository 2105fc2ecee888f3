"""What gemma makes of the tiny models: params of its own modules.

Its checkpoints have another layout, flat, for which it has no reader of the hub's
names: ``tunix.py`` holds that one to the reader of Tunix. From there its own functions
lead to the layout of its modules. Blocks are called one after the other, as its own
transformer does, which imports a library for training, and that TensorFlow.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).parent))  # this file has the name of the library
spec = importlib.util.find_spec("gemma")
packages = ("gm", "gm.typing", "gm.ckpts", "gm.nn", "gm.math")
for name in ("gemma", *(f"gemma.{package}" for package in packages)):
    module = types.ModuleType(name)
    parts = name.split(".")[1:]
    module.__path__ = [str(Path(spec.submodule_search_locations[0], *parts))]
    sys.modules[name] = module
sys.modules["gemma.gm.typing._common"] = types.SimpleNamespace(Params=Any)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import linen as nn  # noqa: E402


class Identity(nn.Module):
    """All that a block has of the library for training."""

    def __call__(self, array: Any) -> Any:
        """Return the array."""
        return array


class Shaped:
    """An annotation of a shape."""

    def __class_getitem__(cls, _: str) -> type:
        return cls


sys.modules["kauldron"] = types.SimpleNamespace(
    kd=types.SimpleNamespace(nn=types.SimpleNamespace(Identity=Identity))
)
sys.modules["kauldron.ktyping"] = types.SimpleNamespace(Bool=Shaped, Int=Shaped)
sys.path.append(str(Path(__file__).parent))

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
from gemma.gm.ckpts import _compat  # noqa: E402
from gemma.gm.nn import _layers, _modules  # noqa: E402


def params_of(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the params of the library's modules."""
    checkpoint = gemma_checkpoint(weights)
    return _compat.nest_params(_compat.param_remapper(checkpoint))["transformer"]


def convert(_: str, folder: Path) -> dict[str, Any]:
    """Return the params of the library's modules, by path."""
    return flat(params_of(weights_of(folder)))


def block_of(config: dict[str, Any], kind: str) -> Any:
    """Return a block of the library's transformer."""
    is_local = kind == "sliding_attention"
    types_of = _modules.AttentionType
    return _modules.Block(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        embed_dim=config["hidden_size"],
        head_dim=config["head_dim"],
        hidden_dim=config["intermediate_size"],
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        transpose_gating_einsum=True,
        attn_type=types_of.LOCAL_SLIDING if is_local else types_of.GLOBAL,
        sliding_window_size=config["sliding_window"],
        query_pre_attn_scalar=config["query_pre_attn_scalar"] ** -0.5,
        rope_base_frequency=config[
            "rope_local_base_freq" if is_local else "rope_theta"
        ],
    )


def answers_apart(_: str, folder: Path) -> float:
    """Return by how much answers of both models differ, relative to the largest."""
    config, weights = config_of(folder), random_weights_of(folder)
    params = params_of(weights)
    tokens = np.random.default_rng(1).integers(3, config["vocab_size"], (2, 7))
    positions = jnp.tile(jnp.arange(7), (2, 1))
    mask = jnp.tile(jnp.tril(jnp.ones((7, 7), bool)), (2, 1, 1))
    embedder = _modules.Embedder(config["vocab_size"], config["hidden_size"])
    embedding = {"params": params["embedder"]}
    x = embedder.apply(embedding, tokens, method="encode")
    for number, kind in enumerate(config["layer_types"]):
        of_layer = {"params": params[f"layer_{number}"]}
        _, x = block_of(config, kind).apply(of_layer, x, positions, None, mask)
    x = _layers.RMSNorm().apply({"params": params["final_norm"]}, x)
    logits = embedder.apply(embedding, x, method="decode")
    inputs = {"input_ids": tokens}
    theirs = answers_of_pytorch("Gemma3ForCausalLM", config, weights, inputs)
    return apart({"logits": logits}, theirs)


if __name__ == "__main__":
    report("gemma", ["gemma3_text"], convert)
    for layout in ("gemma", "gemma-flat"):  # params of the one are made of the other
        report_answers(layout, ["gemma3_text"], answers_apart)
