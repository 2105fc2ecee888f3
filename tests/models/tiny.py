"""Tiny random models of transformers, in PyTorch and in Flax, with prime sizes.

Nothing is downloaded: a model is made from its configuration, every parameter of it is
random, and PyTorch saves it as shards with an index, as published models are. Without
PyTorch, random arrays under the same names stand in for its file, and transformers'
own conversion to Flax for its answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import pytest

import treeadapt as ta

# What imports this file is skipped without them.
transformers = pytest.importorskip("transformers", reason="see `make test-models`")

MIGRATIONS = Path(__file__).parents[2] / "docs" / "examples" / "migrations"
PUBLISHED = Path(__file__).parents[2] / "treeadapt" / "migrations" / "tables"
HAS_TORCH = transformers.is_torch_available()
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 35], [8, 9, 7, 9, 3, 2, 3, 8, 4, 0]])


def table_file(name: str) -> Path:
    """The file of a table: of an example, or ``<model>-flax`` of a published one."""
    model, _, layout = name.rpartition("-")
    if layout == "flax":
        return PUBLISHED / layout / f"{model}.toml"
    return MIGRATIONS / f"{name}.toml"


class Tiny(NamedTuple):
    """A model of transformers.

    Attributes:
        names: of its PyTorch file: ``docs/examples/migrations/<names>.schema.toml``.
        torch: name of the PyTorch class.
        flax: name of the Flax class; empty if there is none.
        config: makes its configuration.
        inputs: name and value of each input.
        answer: field of the output that is compared.
        base: whether the file holds the model below the head alone, without a prefix.
        buffers: arrays that published files hold and that no parameter is made of.
    """

    names: str
    torch: str
    flax: str
    config: Callable[[], Any]
    inputs: Mapping[str, np.ndarray] = {"input_ids": TOKENS}
    answer: str = "logits"
    base: bool = False
    buffers: Callable[[], Mapping[str, np.ndarray]] = dict

    def torch_model(self) -> Any:
        """The model in PyTorch, every parameter random, zeros and ones too."""
        import torch

        torch.manual_seed(1)
        model = getattr(transformers, self.torch)(self.config()).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
                # To these, 1 can be added and taken away without rounding.
                parameter.mul_(2**16).round_().div_(2**16)
        return model

    def save(self, folder: Path) -> None:
        """Write the PyTorch model as several files with an index."""
        import torch

        model = self.torch_model()
        if self.base:
            model = model.base_model
        for name, value in self.buffers().items():
            *modules, last = name.split(".")
            owner = model
            for module in modules:
                if not hasattr(owner, module):  # older models had it
                    owner.add_module(module, torch.nn.Module())
                owner = owner.get_submodule(module)
            owner.register_buffer(last, torch.from_numpy(value))
        model.save_pretrained(folder, max_shard_size="8KB")

    def read_torch(self, folder: Path) -> Any:
        """The model in PyTorch from a file; every name must be the model's."""
        model, report = getattr(transformers, self.torch).from_pretrained(
            folder, config=self.config(), output_loading_info=True
        )
        assert not report["missing_keys"]
        assert set(report["unexpected_keys"]) <= {*self.buffers()}
        return model.eval()

    def torch_answer(self, model: Any) -> np.ndarray:
        """What the PyTorch model answers."""
        import torch

        inputs = {name: torch.from_numpy(value) for name, value in self.inputs.items()}
        with torch.no_grad():
            return model(**inputs)[self.answer].numpy()

    def flax_model(self) -> Any:
        """The model in Flax, without parameters."""
        return getattr(transformers, self.flax)(self.config(), _do_init=False)

    def flax_params(self) -> Any:
        """The parameters of the Flax model, as shapes."""
        model = self.flax_model()
        return jax.eval_shape(
            lambda: model.init_weights(jax.random.key(0), model.input_shape)
        )

    def flax_answer(self) -> Callable[[Any], np.ndarray]:
        """A function of parameters: what the Flax model answers; compiled once."""
        model = self.flax_model()
        answer = jax.jit(
            lambda params: model(params=params, **self.inputs)[self.answer]
        )
        return lambda params: np.asarray(answer(params))

    def source(self) -> dict[str, np.ndarray]:
        """Random arrays under the names of the PyTorch file, without PyTorch."""
        random = np.random.default_rng(1)
        schema = ta.load(MIGRATIONS / f"{self.names}.schema.toml")
        leaves = {
            path: (random.normal(size=leaf.shape) * 0.3).astype(leaf.dtype)
            for path, leaf in ta.to_flat_dict(schema).items()
        }
        return leaves | dict(self.buffers())
