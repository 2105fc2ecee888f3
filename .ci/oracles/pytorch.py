"""The models of transformers on PyTorch, whose answers others are compared with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import config_of


def config_in(folder: Path, **changes: Any) -> Any:
    """Return the configuration of a tiny model, with changes."""
    fields = config_of(folder) | changes
    return transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields)


def answers_of(
    name: str,
    config: Any,
    weights: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return all arrays that a model answers with.

    Args:
        name: of its class.
        config: of the model.
        weights: by name.
        inputs: the same.

    Raises:
        AssertionError: a weight is missing, which would have numbers of its own.
    """
    model, about = getattr(transformers, name).from_pretrained(
        None,
        config=config,
        state_dict={key: torch.from_numpy(array) for key, array in weights.items()},
        output_loading_info=True,
    )
    assert not about["missing_keys"], about
    with torch.no_grad():
        answers = model(**{key: torch.from_numpy(x) for key, x in inputs.items()})
    return {k: x.numpy() for k, x in answers.items() if isinstance(x, torch.Tensor)}


def parameters_of(name: str) -> list[str]:
    """Return the names of what a class of models takes."""
    return [*inspect.signature(getattr(transformers, name).forward).parameters]


def apart(ours: Mapping[str, Any], theirs: Mapping[str, np.ndarray]) -> float:
    """Return by how much answers of one name differ, relative to the largest number.

    Raises:
        AssertionError: there is none with the same name.
    """
    shared = [(np.asarray(ours[key]), theirs[key]) for key in ours if key in theirs]
    assert shared, ([*ours], [*theirs])
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in shared)
