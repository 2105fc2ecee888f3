"""What the programs of the libraries, and the test of their digests, share.

NumPy alone is needed here: each library has an environment of its own, without
treeadapt.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[2] / "tests" / "published"


def config_of(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a tiny model."""
    return json.loads((folder / "config.json").read_text("utf-8"))


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """Return weights of a tiny model by name: no two of its numbers are equal."""
    document = tomllib.loads((folder / "model.schema.toml").read_text("utf-8"))
    arrays, start = {}, 1
    for name, text in sorted(document["leaves"].items()):
        dtype, _, shape = text.rstrip("]").partition("[")
        sizes = [int(size) for size in shape.split(",") if size]
        stop = start + int(np.prod(sizes))
        assert stop < 2**24, "float32 holds no more consecutive integers"
        arrays[name] = (np.arange(start, stop) / 2**10).astype(dtype).reshape(sizes)
        start = stop
    return arrays


def random_weights_of(folder: Path) -> dict[str, np.ndarray]:
    """Return weights of a tiny model by name, with which its answers are finite."""
    random = np.random.default_rng(0)
    weights = weights_of(folder)
    # To the scales of norms.
    adds_one = folder.parent.name.startswith(("gemma", "qwen3_next"))
    for name, array in weights.items():
        if array.dtype.kind == "i":
            continue
        noise = random.normal(size=array.shape) / 10
        if name.endswith("inv_freq"):  # follows from its size
            noise = 10_000.0 ** -(np.arange(array.size) / array.size)
        elif name.endswith("running_var"):
            noise = 1 + abs(noise)
        elif name.endswith("weight") and array.ndim == 1 and not adds_one:  # of a norm
            noise += 1
        weights[name] = np.asarray(noise, array.dtype)
    return weights


def digest(leaves: Mapping[str, Any]) -> str:
    """Return a hash of names, shapes, dtypes and little-endian bytes."""
    code = hashlib.sha256()
    for name, leaf in sorted(leaves.items()):
        array = np.ascontiguousarray(leaf)
        code.update(f"{name}\0{np.shape(leaf)}\0{array.dtype.name}\0".encode())
        code.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return code.hexdigest()


def flat(tree: Any, path: str = "") -> dict[str, np.ndarray]:
    """Return the arrays of nested dicts and lists by their paths, with slashes."""
    if isinstance(tree, Mapping):
        pairs = tree.items()
    elif isinstance(tree, list | tuple):
        pairs = enumerate(tree)
    else:
        return {path: np.asarray(tree)}
    return {
        name: leaf
        for key, node in pairs
        for name, leaf in flat(node, f"{path}/{key}" if path else str(key)).items()
    }


def report(
    layout: str, models: Mapping[str, Any], convert: Callable[[str, Path], Any]
) -> None:
    """Print a digest for each table of a layout and each tiny model.

    Args:
        layout: of the tables.
        models: the model types.
        convert: takes a model type and a folder, and gives what the library makes of
            its weights, by path.
    """
    for model_type in models:
        for number in ("1", "2"):
            leaves = convert(model_type, FOLDER / model_type / number)
            name = f"{model_type}-{number}"
            print(f"{layout}/{model_type}", name, digest(leaves), flush=True)
            if "--names" in sys.argv:
                print(*(f"  {k} {np.shape(v)}" for k, v in leaves.items()), sep="\n")


def report_answers(
    layout: str,
    models: Iterable[str],
    apart: Callable[[str, Path], float],
    settings: Mapping[str, str] | None = None,
) -> None:
    """Print how far answers of two libraries are apart, for each model type.

    Args:
        layout: of the tables.
        models: the model types.
        apart: takes a model type and a folder, and gives the largest difference,
            relative to the largest number.
        settings: those that are not as configurations say, in words, by model type.
    """
    if "PYTORCH" not in os.environ:
        print("Answers are SKIPPED: PyTorch is not installed.", file=sys.stderr)
        return
    for model_type in models:
        largest = max(apart(model_type, FOLDER / model_type / n) for n in ("1", "2"))
        more = (settings or {}).get(model_type, "")
        text = f"{largest:.0e}{', with ' * bool(more)}{more}"
        print(f"{layout}/{model_type} answers {text}", flush=True)


def report_uncalled(layout: str, reasons: Mapping[str, str]) -> None:
    """Print why answers of a layout's models are not compared, by model type."""
    for model_type, reason in reasons.items():
        print(f"{layout}/{model_type} uncalled {reason}", flush=True)


def apart(ours: Mapping[str, Any], theirs: Mapping[str, np.ndarray]) -> float:
    """Return by how much answers of one name differ, relative to the largest number.

    Raises:
        AssertionError: there is none with the same name, or one has another shape.
    """
    shared = [(np.asarray(ours[key]), theirs[key]) for key in ours if key in theirs]
    assert shared, ([*ours], [*theirs])
    assert all(a.shape == b.shape for a, b in shared)
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in shared)


def answers_of_pytorch(
    name: str,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return all arrays that a model of transformers answers with, on PyTorch.

    Args:
        name: of its class.
        config: as in its ``config.json``.
        weights: by name.
        inputs: by name.

    Raises:
        RuntimeError: ``pytorch.py`` fails.
    """
    process = _pytorch()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), "utf-8")
        np.savez(Path(folder, "weights.npz"), **weights)
        np.savez(Path(folder, "inputs.npz"), **inputs)
        print(name, folder, file=process.stdin, flush=True)
        if process.stdout.readline() != "done\n":
            raise RuntimeError(f"{name} does not answer; see above.")
        with np.load(Path(folder, "answers.npz")) as answers:
            return dict(answers)


@functools.cache
def _pytorch() -> subprocess.Popen[str]:
    """Return the process that answers for all models, in an environment of its own."""
    return subprocess.Popen(
        [os.environ["PYTORCH"], Path(__file__).parent / "pytorch.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def gemma_checkpoint(weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a Gemma 3 for text as the authors' own checkpoints have it."""
    params = {
        "transformer/embedder": {
            "input_embedding": weights["model.embed_tokens.weight"]
        },
        "transformer/final_norm": {"scale": weights["model.norm.weight"]},
    }
    norms = {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffw_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn/_query_norm": "self_attn.q_norm",
        "attn/_key_norm": "self_attn.k_norm",
    }
    size = weights["model.layers.0.self_attn.q_norm.weight"].size
    for layer in range(sum(".q_norm." in name for name in weights)):
        here = f"transformer/layer_{layer}/"

        def of(name: str, layer: int = layer) -> Any:
            return weights[f"model.layers.{layer}.{name}.weight"]

        def by_head(name: str) -> Any:
            return of(name).reshape(-1, size, of(name).shape[-1]).swapaxes(1, 2)

        keys, values = by_head("self_attn.k_proj"), by_head("self_attn.v_proj")
        out = of("self_attn.o_proj").T
        params |= {f"{here}{ours}": {"scale": of(hub)} for ours, hub in norms.items()}
        params |= {
            f"{here}attn/q_einsum": {"w": by_head("self_attn.q_proj")},
            f"{here}attn/kv_einsum": {"w": np.stack([keys, values])},
            f"{here}attn/attn_vec_einsum": {"w": out.reshape(-1, size, out.shape[-1])},
            f"{here}mlp/gating_einsum": {
                "w": np.stack([of("mlp.gate_proj"), of("mlp.up_proj")])
            },
            f"{here}mlp/linear": {"w": of("mlp.down_proj").T},
        }
    return params
