"""What easydel makes of the tiny models: params of its own nnx models.

Its own conversion takes tensors of PyTorch, which its environment therefore has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.remove(str(Path(__file__).parent))  # this file has the name of the library
os.environ["EASYDEL_AUTO"] = "false"  # sets flags for accelerators

import jax
import jax.numpy as jnp
import numpy as np
import torch
from easydel.modules import mamba2, smollm3
from flax import nnx

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

#: The class of the library, which transformers calls the same, and its configuration.
MODELS = {
    "mamba2": (mamba2.Mamba2ForCausalLM, mamba2.Mamba2Config),
    "smollm3": (smollm3.SmolLM3ForCausalLM, smollm3.SmolLM3Config),
}
#: What is otherwise than in its models, in words.
SETTINGS = {
    "smollm3": (
        "frequencies of rotary positions in float32: EasyDeL 0.3.0 rounds them to "
        "bfloat16, and answers are then 3e-04 apart"
    )
}


def loaded(
    model_type: str, config: dict[str, Any], weights: dict[str, np.ndarray]
) -> tuple[Any, dict[str, np.ndarray]]:
    """Return the library's model, and what it makes of weights, by path.

    Raises:
        AssertionError: what it makes has no place in the model, or another shape.
    """
    of_model, of_config = MODELS[model_type]
    fields = {k: v for k, v in config.items() if k not in ("dtype", "model_type")}
    model = of_model(
        of_config(**fields, attn_mechanism="vanilla", attn_dtype=jnp.float32),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        precision=jax.lax.Precision.HIGHEST,
        rngs=nnx.Rngs(0),
    )
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    made = flat(model.transform_fn(tensors, verbose=False))
    shapes = {"/".join(map(str, k)): x.shape for k, x in model.parameters.items()}
    assert {name: array.shape for name, array in made.items()} == shapes
    return model, made


def convert(model_type: str, folder: Path) -> dict[str, Any]:
    """Return what the library makes of weights, by path."""
    return loaded(model_type, config_of(folder), weights_of(folder))[1]


def answers_apart(model_type: str, folder: Path) -> float:
    """Return by how much answers of both models differ, relative to the largest."""
    config, weights = config_of(folder), random_weights_of(folder)
    model, made = loaded(model_type, config, weights)
    graph, state, others = nnx.split(model, nnx.Param, ...)
    paths = {"/".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
    assert paths.keys() == made.keys()
    params = nnx.to_pure_dict(state)
    for name, path in paths.items():
        node = params
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = jnp.asarray(made[name])
    nnx.replace_by_pure_dict(state, params)
    tokens = np.random.default_rng(1).integers(3, config["vocab_size"], (2, 7))
    # Of the positions' frequencies alone.
    with model.mesh, mock.patch.object(jnp, "bfloat16", jnp.float32):
        logits = nnx.merge(graph, state, others)(input_ids=tokens).logits
    inputs = {"input_ids": tokens}
    name = MODELS[model_type][0].__name__
    return apart({"logits": logits}, answers_of_pytorch(name, config, weights, inputs))


if __name__ == "__main__":
    report("easydel", MODELS, convert)
    report_answers("easydel", MODELS, answers_apart, SETTINGS)
