"""The models of transformers on PyTorch, whose answers others are compared with.

Has an environment of its own, whatever that of another library holds. Reads lines from
its standard input, each the name of a class and a folder with a configuration, weights
and inputs; writes the answers there, and ``done``. See ``answers_of_pytorch``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from common import config_of


def answer(name: str, folder: Path) -> None:
    """Write all arrays that a model answers with.

    Raises:
        AssertionError: a weight is missing, which would have numbers of its own.
    """
    fields = config_of(folder)
    with np.load(folder / "weights.npz") as weights:
        state = {key: torch.from_numpy(weights[key]) for key in weights}
    with np.load(folder / "inputs.npz") as arrays:
        inputs = {key: torch.from_numpy(arrays[key]) for key in arrays}
    model, about = getattr(transformers, name).from_pretrained(
        None,
        config=transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields),
        state_dict=state,
        # The others want sizes that are multiples of 16 bytes.
        experts_implementation="eager",
        output_loading_info=True,
    )
    # Weights of a model with a head may lack this part of the model without one.
    missing = [key for key in about["missing_keys"] if not key.startswith("pooler.")]
    assert not missing, missing
    with torch.no_grad():
        answers = model(**inputs)
    arrays = {k: x.numpy() for k, x in answers.items() if isinstance(x, torch.Tensor)}
    if about["missing_keys"]:
        arrays.pop("pooler_output", None)
    np.savez(folder / "answers.npz", **arrays)


def main() -> None:
    """Answer one line after the other."""
    to_caller, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, _, folder = line.rstrip("\n").partition(" ")
        answer(name, Path(folder))
        print("done", file=to_caller, flush=True)


if __name__ == "__main__":
    main()
