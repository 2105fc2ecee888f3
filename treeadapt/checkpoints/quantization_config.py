"""What the ``config.json`` next to weights says of how their arrays are stored.

Takes what that file holds, which may come from anyone; gives the method and the few
numbers that matter to a reader. A method that is not read here is an error that names
it. What leaves there are is up to ``quantized_forms``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from treeadapt.checkpoints.errors import refuse
from treeadapt.checkpoints.record import DTYPES
from treeadapt.checkpoints.remote import AnyPath
from treeadapt.text.names import listing
from treeadapt.text.wording import worded

_MAX_BYTES = 2**24
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
DTYPE_KEYS = ("dtype", "torch_dtype")
#: Where the configuration of a language model is in that of a larger one.
_INNER = ("text_config", "llm_config", "language_config")
FLOATS = ("bfloat16", "float16", "float32")
_METHODS = (
    *("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "awq", "gptq"),
    *("bitsandbytes", "modelopt"),
)
#: Of compressed-tensors; others are sparse, or packed for one kernel.
_FORMATS = (
    *("dense", "float-quantized", "int-quantized", "naive-quantized"),
    *("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    *("mxfp8-quantized", "mixed-precision"),
)


@dataclasses.dataclass(frozen=True)
class Stated:
    """What a configuration states.

    Attributes:
        path: of the checkpoint, for messages.
        fields: its ``quantization_config``; empty without one.
        dtype: of the model; None if it does not say.
    """

    path: AnyPath
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: Any = None

    @property
    def method(self) -> str:
        """How arrays are quantised; empty if that is not stated."""
        return self.text("quant_method")

    def text(self, key: str) -> str:
        """Return a text in lower case; empty if it is not stated.

        Raises:
            CheckpointError: something else is stated.
        """
        value = self.fields.get(key)
        if not isinstance(value, str | None):
            refuse(
                self.path,
                f"its configuration has {value!r:.60} as {key!r}, which is not a text",
                raw_advice(),
            )
        return (value or "").lower()

    def number(self, *keys: str) -> int | None:
        """Return the first whole number that is stated under one of some keys."""
        values = (self.fields.get(key) for key in keys)
        return next((value for value in values if type(value) is int), None)

    def of_weights(self, key: str) -> Any:
        """Return what all groups of compressed-tensors state of weights; else None."""
        groups = self.fields.get("config_groups")
        if not isinstance(groups, dict):
            return None
        weights = [
            group.get("weights") if isinstance(group, dict) else None
            for group in groups.values()
        ]
        values = [each.get(key) if isinstance(each, dict) else None for each in weights]
        is_one = values and all(value == values[0] for value in values)
        return values[0] if is_one else None

    @property
    def block(self) -> tuple[int, ...] | None:
        """How many codes a block has along the last axes; None if it is not stated.

        Raises:
            CheckpointError: these are not positive integers.
        """
        block = self.fields.get("weight_block_size")
        if block is None:
            block = self.of_weights("block_structure")
        group = self.of_weights("group_size")
        if block is None and self.of_weights("strategy") in ("group", "tensor_group"):
            block = [group]
        if block is None:
            return None
        is_sound = isinstance(block, list) and all(
            type(size) is int and size > 0 for size in block
        )
        if not is_sound:
            refuse(
                self.path,
                f"its configuration has {block!r:.60} as a block",
                raw_advice(),
            )
        return tuple(block)

    def require_known(self) -> None:
        """Raise if the stated method is not read here.

        Raises:
            CheckpointError: it names the method.
        """
        if not self.fields:
            return
        form, sparse = self.text("format"), self.fields.get("sparsity_config")
        if self.method not in _METHODS:
            known = listing(_METHODS, limit=9)
            method = self.fields.get("quant_method")
            problem = f"its quant_method is {method!r:.60}, and known are {known}"
        elif self.method == "compressed-tensors" and form and form not in _FORMATS:
            problem = f"its format of compressed-tensors, {form!r:.60}, is not read"
        elif isinstance(sparse, dict) and sparse.get("format", "dense") != "dense":
            problem = f"its sparse format, {sparse['format']!r:.60}, is not read"
        elif self.fields.get("transform_config"):
            problem = "its weights were transformed, as transform_config says"
        else:
            return
        refuse(self.path, problem, raw_advice())


def places_in(config: Any) -> list[dict[str, Any]]:
    """Return a configuration and those of language models in it; none of no table."""
    if not isinstance(config, dict):
        return []
    inner = (config.get(key) for key in _INNER)
    return [config, *(each for each in inner if isinstance(each, dict))]


def stated_in(path: AnyPath, config: AnyPath) -> Stated:
    """Read what a ``config.json`` states of the arrays of a checkpoint.

    Args:
        path: of the checkpoint, for messages.
        config: the file, which need not be there.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not config.is_file():
        return Stated(path)
    problem = f"{listing([str(config)])} next to it cannot be read"
    if config.stat().st_size > _MAX_BYTES:
        refuse(
            path, f"{problem}: it is larger than {_MAX_BYTES >> 20} MiB", raw_advice()
        )
    try:
        # As transformers reads it: some configurations have an Infinity.
        fields = json.loads(config.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        refuse(path, f"{problem}: {str(error)!r:.80}", raw_advice())
    places = places_in(fields)
    stated = (place.get(key) for place in places for key in QUANTIZATION_KEYS)
    quantization = next((x for x in stated if isinstance(x, dict) and x), {})
    names = (place.get(key) for place in places for key in DTYPE_KEYS)
    texts = (name.removeprefix("torch.") for name in names if isinstance(name, str))
    dtype = next((DTYPES[text] for text in texts if text in FLOATS), None)
    if quantization and "quant_method" not in quantization:
        # Older configurations of these two have other fields only.
        for key in ("load_in_4bit", "load_in_8bit"):
            if quantization.get(key) is True:
                quantization["quant_method"] = "bitsandbytes"
        if "quant_algo" in quantization:
            quantization["quant_method"] = "modelopt"
        if "config_groups" in quantization:
            quantization["quant_method"] = "compressed-tensors"
    return Stated(path, quantization, dtype)


def raw_advice() -> str:
    """Return how to read codes and scales without decoding them."""
    option = worded("decode=False", "--no-decode")
    return f"{option} gives each leaf as it is stored."
