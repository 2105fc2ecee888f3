"""What the libraries that write quantised files make of them; see ``tests/quantized``.

Prints a digest for each form that a library decodes on a CPU. AWQ, GPTQ and the oldest
forms have no such library that installs: their formulas are in the tests alone.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from quantized import Published, every

_ROOT = "a."


def tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor of the same bytes, whatever its dtype."""
    names = {"float8_e8m0fnu": "float8_e8m0fnu", "bool": "bool"}
    dtype = getattr(torch, names.get(array.dtype.name, array.dtype.name))
    flat = np.array(array, order="C").reshape(-1).view(np.uint8)
    return torch.from_numpy(flat).view(dtype).reshape(array.shape)


def local(form: Published) -> dict[str, torch.Tensor]:
    """Return the parts of the array, by their names in its module."""
    return {
        name.removeprefix(_ROOT): tensor(part)
        for name, part in form.parts.items()
        if name.startswith(_ROOT)
    }


def by_compressed_tensors(form: Published, stated: dict[str, Any]) -> torch.Tensor:
    """Return what the compressor of a format makes of its parts."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = stated["config_groups"]["group_0"]["weights"]
    if weights.get("group_size") and weights["strategy"] == "channel":
        weights = {k: v for k, v in weights.items() if k != "group_size"}
    if stated["format"].startswith("mx"):
        weights = weights | {"scale_dtype": "torch.uint8"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(stated["format"])
    return compressor.decompress(local(form), scheme)["weight"]


def by_transformers(form: Published, stated: dict[str, Any]) -> torch.Tensor:
    """Return what transformers makes of MXFP4, and of FP8 in blocks."""
    if stated["quant_method"] == "mxfp4":
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = (
            tensor(part) for name, part in form.parts.items() if "down_proj" in name
        )
        return convert_moe_packed_tensors(blocks, scales)
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scale = (
        tensor(part) for name, part in form.parts.items() if "norm" not in name
    )
    meant = next(iter(form.meant.values()))
    dtype = getattr(torch, meant.dtype.name)
    return Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)


def by_bitsandbytes(form: Published, stated: dict[str, Any]) -> torch.Tensor:
    """Return what its functions for a CPU make."""
    import bitsandbytes as bnb

    parts = local(form)
    if "SCB" in parts:
        return bnb.functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
    others = {k.removeprefix("weight."): v for k, v in parts.items() if k != "weight"}
    state = bnb.functional.QuantState.from_dict(others, torch.device("cpu"))
    return bnb.functional.dequantize_4bit(parts["weight"], state)


LIBRARIES = {
    "compressed-tensors": by_compressed_tensors,
    "mxfp4": by_transformers,
    "fp8": by_transformers,
    "bitsandbytes": by_bitsandbytes,
}


def main() -> None:
    """Print what each library makes of the forms that it reads."""
    for name, form in every():
        stated = (form.config or {}).get("quantization_config", {})
        library = LIBRARIES.get(stated.get("quant_method"))
        is_bare = library is by_compressed_tensors and "config_groups" not in stated
        if library is None or is_bare:
            continue
        dtype = getattr(torch, form.config["torch_dtype"])
        try:
            decoded = library(form, stated)
        except ValueError as error:  # transformers takes no short blocks
            print(f"quantized: {name} is left out: {error}", file=sys.stderr)
            continue
        array = decoded.to(dtype).contiguous().reshape(-1)
        data = array.view(torch.uint8).numpy().tobytes()
        print("quantized", name, hashlib.sha256(data).hexdigest())


if __name__ == "__main__":
    main()
