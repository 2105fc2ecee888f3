"""What keras-hub makes of the tiny models: variables of its own backbones, on JAX.

Where it has a writer of its own, what that makes of the backbone comes after it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).parent))  # this file has the name of the library
os.environ["KERAS_BACKEND"] = "jax"

import keras
import keras_hub
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parent))
from common import report, weights_of

MODELS = (
    *("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral"),
    *("gemma", "gemma2", "gemma3_text", "gpt2", "qwen3_5"),
    *("bert", "albert", "distilbert", "esm", "vit", "deit", "dinov2", "dinov3_vit"),
)


def convert(model_type: str, folder: Path) -> dict[str, Any]:
    """Return what the library loads into its backbone, by the paths of variables."""
    keras.utils.clear_session()
    with tempfile.TemporaryDirectory() as written:
        save_file(weights_of(folder), Path(written) / "model.safetensors")
        config = (folder / "config.json").read_text("utf-8")
        (Path(written) / "config.json").write_text(config, "utf-8")
        backbone = keras_hub.models.Backbone.from_preset(written, dtype="float32")
    return {
        each.path: each.numpy()
        for each in backbone.variables
        if not each.path.endswith("seed_generator_state")
    }


if __name__ == "__main__":
    report("keras-hub", MODELS, convert)
