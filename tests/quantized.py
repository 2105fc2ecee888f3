"""Arrays as libraries publish them in codes and scales, and what they mean.

Each form makes random parts, a configuration, and by a plain formula of NumPy the array
that they mean. ``.ci/oracles/quantized.py`` hands the same parts to the libraries that
write such files, and ``quantized.toml`` has digests of what they answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

BF16, FP8, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
NAMES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
}
FP4 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
Arrays = dict[str, np.ndarray]


class Published(NamedTuple):
    """Arrays of a file, and what they mean.

    Attributes:
        parts: by name, as they are stored.
        meant: by name.
        config: what ``config.json`` has; None without that file.
    """

    parts: Arrays
    meant: Arrays
    config: dict[str, Any] | None = None


def write_safetensors(file: Path, arrays: Arrays) -> None:
    """Write a file without the library, which lacks some dtypes."""
    header, data = {}, b""
    for name, array in arrays.items():
        place = [len(data), len(data) + array.nbytes]
        dtype = NAMES[array.dtype.name]
        header[name] = {
            "dtype": dtype,
            "shape": [*array.shape],
            "data_offsets": place,
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write(folder: Path, published: Published) -> Path:
    """Write a folder as it is published, and return it."""
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", published.parts)
    if published.config is not None:
        (folder / "config.json").write_text(json.dumps(published.config))
    return folder


def config(method: str, dtype: str = "bfloat16", **stated: Any) -> dict[str, Any]:
    return {
        "model_type": "any",
        "torch_dtype": dtype,
        "quantization_config": {"quant_method": method, **stated},
    }


def groups(num_bits: int = 8, **weights: Any) -> dict[str, Any]:
    """What compressed-tensors states."""
    return {
        "config_groups": {"group_0": {"weights": {"num_bits": num_bits, **weights}}}
    }


def float8(random: np.random.Generator, *shape: int, dtype: Any = FP8) -> np.ndarray:
    """Any codes but those of NaN and infinity."""
    codes = random.integers(0, 256, shape, np.uint8)
    codes[~np.isfinite(codes.view(dtype).astype(np.float32))] = 0
    return codes.view(dtype)


def scales(random: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Any:
    return (random.random(shape, np.float32) / 64 + 2**-9).astype(dtype)


def spread(grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Repeat what is on a grid, whose last blocks may be short, up to a shape."""
    for axis, size in enumerate(shape):
        block = -(-size // grid.shape[axis])
        grid = np.repeat(grid, block, axis)
    return grid[tuple(map(slice, shape))]


def in_blocks(grid: np.ndarray, block: int, shape: tuple[int, ...]) -> np.ndarray:
    grid = grid.repeat(block, 0).repeat(block, 1)
    return grid[: shape[0], : shape[1]]


def f32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


def packed(codes: np.ndarray, bits: int, axis: int, order: Any = None) -> np.ndarray:
    """Words of 32 bits, the last of which may have codes of 0."""
    count = 32 // bits
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    short = -codes.shape[-1] % count
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    codes = codes.reshape(*codes.shape[:-1], -1, count)
    words = np.zeros(codes.shape[:-1], np.uint32)
    for place, code in enumerate(order or range(count)):
        words |= codes[..., place] << np.uint32(code * bits)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def pairs(codes: np.ndarray) -> np.ndarray:
    """Bytes of two codes, the low bits first."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


Form = Callable[[np.random.Generator], Published]
FORMS: dict[str, Form] = {}


def form(function: Form) -> Form:
    FORMS[function.__name__] = function
    return function


def _fp8_blocks(random: Any, scale_dtype: Any, *shape: int, **stated: Any) -> Published:
    w = float8(random, *shape)
    s = scales(random, *(-(-n // 128) for n in shape), dtype=scale_dtype)
    meant = (f32(w) * in_blocks(f32(s), 128, shape)).astype(BF16)
    stated = {"weight_block_size": [128, 128], **stated}
    return Published(
        {"a.weight": w, "a.weight_scale_inv": s},
        {"a.weight": meant},
        config("fp8", **stated),
    )


@form
def fp8_blocks(random: Any) -> Published:
    return _fp8_blocks(random, np.float32, 301, 200)


@form
def fp8_blocks_with_bfloat16_scales(random: Any) -> Published:
    return _fp8_blocks(random, BF16, 256, 384)


@form
def fp8_blocks_without_a_configuration(random: Any) -> Published:
    return _fp8_blocks(random, np.float32, 200, 130)._replace(config=None)


@form
def fp8_blocks_with_exponents(random: Any) -> Published:
    w = float8(random, 256, 384)
    s = random.integers(118, 130, (2, 3), np.uint8)
    meant = np.ldexp(f32(w), in_blocks(s.astype(int), 128, w.shape) - 127)
    return Published(
        {"a.weight": w, "a.weight_scale_inv": s.view(E8M0)},
        {"a.weight": meant.astype(BF16)},
        config("fp8", weight_block_size=[128, 128], scale_fmt="ue8m0"),
    )


@form
def fp8_blocks_of_experts(random: Any) -> Published:
    w, s = float8(random, 3, 256, 128), scales(random, 3, 2, 1)
    every = np.stack([in_blocks(each, 128, (256, 128)) for each in s])
    return Published(
        {"experts.gate_up_proj": w, "experts.gate_up_proj_scale_inv": s},
        {"experts.gate_up_proj": (f32(w) * every).astype(BF16)},
        config("fp8", weight_block_size=[128, 128]),
    )


@form
def fp4_experts_in_fp8(random: Any) -> Published:
    codes = random.integers(0, 16, (12, 64), np.uint8)
    s = random.integers(118, 130, (12, 2), np.uint8)
    meant = np.ldexp(FP4[codes], spread(s.astype(int), codes.shape) - 127)
    return Published(
        {"a.weight": pairs(codes).view(np.int8), "a.weight_scale_inv": s.view(E8M0)},
        {"a.weight": meant.astype(BF16)},
        config("fp8", weight_block_size=[128, 128]),
    )


def _fp8_scaled(
    random: Any, *grid: int, stated: Any, dtype: str = "bfloat16", more: Any = None
) -> Published:
    w = float8(random, 24, 32)
    s = scales(random, *grid)
    by_axis = s.reshape(grid if len(grid) == 2 else (*grid, *(1,) * (2 - len(grid))))
    meant = f32(w) * spread(by_axis, w.shape)
    return Published(
        {"a.weight": w, "a.weight_scale": s, **(more or {})},
        {
            "a.weight": meant.astype(
                ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
            )
        },
        None if stated is None else config(dtype=dtype, **stated),
    )


@form
def fp8_of_a_tensor(random: Any) -> Published:
    more = {"a.input_scale": np.float32(0.5).reshape(1)}
    return _fp8_scaled(random, 1, stated={"method": "modelopt"}, more=more)


@form
def fp8_of_a_tensor_without_a_configuration(random: Any) -> Published:
    return _fp8_scaled(random, stated=None)


@form
def fp8_of_rows(random: Any) -> Published:
    stated = groups(type="float", strategy="channel")
    stated |= {"method": "compressed-tensors", "format": "float-quantized"}
    return _fp8_scaled(random, 24, 1, stated=stated)


@form
def fp8_of_rows_by_fbgemm(random: Any) -> Published:
    return _fp8_scaled(random, 24, 1, stated={"method": "fbgemm_fp8"}, dtype="float16")


@form
def fp8_of_groups(random: Any) -> Published:
    stated = groups(type="float", strategy="group", group_size=8)
    stated |= {"method": "compressed-tensors", "format": "naive-quantized"}
    return _fp8_scaled(random, 24, 4, stated=stated, dtype="float32")


@form
def fp8_in_one_axis_of_scales(random: Any) -> Published:
    return _fp8_scaled(random, 24, stated={"method": "compressed-tensors"})


@form
def mxfp8(random: Any) -> Published:
    w = float8(random, 8, 96)
    s = random.integers(110, 130, (8, 3), np.uint8)
    meant = np.ldexp(f32(w), spread(s.astype(int), w.shape) - 127).astype(BF16)
    stated = groups(type="float", strategy="group", group_size=32)
    return Published(
        {"a.weight": w, "a.weight_scale": s},
        {"a.weight": meant},
        config("compressed-tensors", format="mxfp8-quantized", **stated),
    )


def _int8(random: Any, grid: Any, **weights: Any) -> Published:
    w = random.integers(-128, 128, (20, 24), np.int8)
    s = scales(random, *grid, dtype=BF16)
    parts, codes = {"a.weight": w, "a.weight_scale": s}, f32(w)
    if not weights.pop("symmetric", True):
        zero = random.integers(-128, 128, grid, np.int8)
        parts["a.weight_zero_point"] = zero
        codes -= spread(f32(zero), w.shape)
    meant = (codes * spread(f32(s), w.shape)).astype(BF16)
    weights["symmetric"] = "a.weight_zero_point" not in parts
    stated = {"format": "int-quantized", **groups(type="int", **weights)}
    return Published(parts, {"a.weight": meant}, config("compressed-tensors", **stated))


@form
def int8_of_rows(random: Any) -> Published:
    return _int8(random, (20, 1), strategy="channel")


@form
def int8_of_groups_with_zeros(random: Any) -> Published:
    return _int8(random, (20, 3), strategy="group", group_size=8, symmetric=False)


def _integers(
    random: Any, bits: int, columns: int, size: int, **others: Any
) -> Published:
    q = random.integers(0, 2**bits, (20, columns), np.uint8)
    count = columns // size
    s = scales(random, 20, count, dtype=others.pop("dtype", BF16))
    zero = np.full((20, count), 2 ** (bits - 1))
    parts = {
        "a.weight_packed": packed(q, bits, 1),
        "a.weight_scale": s,
        "a.weight_shape": np.array(q.shape),
    }
    strategy = "channel" if count == 1 else "group"
    stated = groups(
        bits, type="int", strategy=strategy, group_size=size, symmetric=not others
    )
    if others:
        zero = random.integers(0, 2**bits, zero.shape)
        parts["a.weight_zero_point"] = packed(zero, bits, 0)
    meant = (f32(q) - spread(f32(zero), q.shape)) * spread(f32(s), q.shape)
    name = "float16" if s.dtype == np.float16 else "bfloat16"
    stated["format"] = "pack-quantized"
    return Published(
        parts,
        {"a.weight": meant.astype(s.dtype)},
        config("compressed-tensors", name, **stated),
    )


@form
def int4_packed(random: Any) -> Published:
    return _integers(random, 4, 64, 32)


@form
def int4_packed_with_zeros(random: Any) -> Published:
    return _integers(random, 4, 64, 16, zeros=True)


@form
def int4_packed_of_rows_of_odd_length(random: Any) -> Published:
    return _integers(random, 4, 37, 37)


@form
def int8_packed(random: Any) -> Published:
    return _integers(random, 8, 48, 16, dtype=np.float16)


@form
def int2_packed_with_zeros(random: Any) -> Published:
    return _integers(random, 2, 48, 24, zeros=True)


def _nvfp4(random: Any, second: Any, divides: bool) -> tuple[Any, Any, Any]:
    codes = random.integers(0, 16, (10, 48), np.uint8)
    s = np.abs(f32(float8(random, 10, 3))).astype(FP8)
    by = f32(s) / second if divides else f32(s) * second
    return pairs(codes), s, (FP4[codes] * spread(by, codes.shape)).astype(BF16)


@form
def nvfp4_of_compressed_tensors(random: Any) -> Published:
    second = np.float32(random.random() * 1000 + 100).reshape(1)
    words, s, meant = _nvfp4(random, second, divides=True)
    stated = groups(4, type="float", strategy="tensor_group", group_size=16)
    parts = {
        "a.weight_packed": words,
        "a.weight_scale": s,
        "a.weight_global_scale": second,
        "a.input_global_scale": np.ones(1, np.float32),
    }
    stated["format"] = "nvfp4-pack-quantized"
    return Published(parts, {"a.weight": meant}, config("compressed-tensors", **stated))


@form
def nvfp4_of_modelopt(random: Any) -> Published:
    second = np.float32(random.random() / 1000)
    words, s, meant = _nvfp4(random, second, divides=False)
    parts = {
        "a.weight": words,
        "a.weight_scale": s,
        "a.weight_scale_2": np.asarray(second),
        "a.input_scale": np.ones((), np.float32),
    }
    return Published(parts, {"a.weight": meant}, config("modelopt", quant_algo="NVFP4"))


@form
def mxfp4_of_compressed_tensors(random: Any) -> Published:
    codes = random.integers(0, 16, (6, 96), np.uint8)
    s = random.integers(110, 130, (6, 3), np.uint8)
    meant = np.ldexp(FP4[codes], spread(s.astype(int), codes.shape) - 127)
    stated = groups(4, type="float", strategy="group", group_size=32)
    return Published(
        {"a.weight_packed": pairs(codes), "a.weight_scale": s},
        {"a.weight": meant.astype(BF16)},
        config("compressed-tensors", format="mxfp4-pack-quantized", **stated),
    )


def _mxfp4(random: Any, separator: str) -> tuple[Arrays, np.ndarray]:
    codes = random.integers(0, 16, (3, 10, 64), np.uint8)
    s = random.integers(110, 130, (3, 10, 2), np.uint8)
    meant = np.ldexp(FP4[codes], s.astype(int).repeat(32, -1) - 127).astype(BF16)
    parts = {
        f"experts.down_proj{separator}blocks": pairs(codes).reshape(3, 10, 2, 16),
        f"experts.down_proj{separator}scales": s,
    }
    return parts, meant


@form
def mxfp4_of_gpt_oss(random: Any) -> Published:
    parts, meant = _mxfp4(random, "_")
    turned = {"experts.down_proj": np.ascontiguousarray(meant.swapaxes(1, 2))}
    return Published(parts, turned, config("mxfp4"))


@form
def mxfp4_of_openai(random: Any) -> Published:
    parts, meant = _mxfp4(random, ".")
    return Published(parts, {"experts.down_proj": meant})


@form
def awq(random: Any) -> Published:
    ins, outs, size = 64, 24, 32
    q = random.integers(0, 16, (ins, outs), np.uint8)
    zero = random.integers(0, 16, (ins // size, outs), np.uint8)
    s = scales(random, ins // size, outs, dtype=np.float16)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    meant = (f32(q) - spread(f32(zero), q.shape)) * spread(f32(s), q.shape)
    parts = {
        "a.qweight": packed(q, 4, 1, order),
        "a.qzeros": packed(zero, 4, 1, order),
        "a.scales": s,
    }
    return Published(
        parts,
        {"a.weight": np.ascontiguousarray(meant.astype(np.float16).T)},
        config("awq", "float16", bits=4, group_size=size, version="gemm"),
    )


def _gptq(random: Any, bits: int, group: Any, version: str = "gptq") -> Published:
    ins, outs, count = 64, 32, int(max(group)) + 1
    q = random.integers(0, 2**bits, (ins, outs), np.uint8)
    zero = random.integers(0, 2**bits - 1, (count, outs), np.uint8)
    s = scales(random, count, outs, dtype=np.float16)
    group = np.asarray(group, np.int32)
    plus = int(version == "gptq")
    meant = (f32(q) - (f32(zero) + plus)[group]) * f32(s)[group]
    parts = {
        "a.qweight": packed(q, bits, 0),
        "a.qzeros": packed(zero, bits, 1),
        "a.scales": s,
        "a.g_idx": group,
    }
    stated = {"bits": bits, "group_size": ins // count, "checkpoint_format": version}
    stated["desc_act"] = bool(np.any(np.diff(group) < 0))
    return Published(
        parts,
        {"a.weight": np.ascontiguousarray(meant.astype(np.float16).T)},
        config("gptq", "float16", **stated),
    )


@form
def gptq_4_bits(random: Any) -> Published:
    return _gptq(random, 4, np.arange(64) // 16)


@form
def gptq_8_bits(random: Any) -> Published:
    return _gptq(random, 8, np.arange(64) // 32)


@form
def gptq_2_bits_in_the_order_of_activations(random: Any) -> Published:
    return _gptq(random, 2, random.permutation(np.arange(64) // 16))


@form
def gptq_v2(random: Any) -> Published:
    return _gptq(random, 4, np.arange(64) // 16, "gptq_v2")


NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
    + [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    + [0.07958029955625534, 0.16093020141124725, 0.24611230194568634]
    + [0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
    + [0.7229568362236023, 1.0],
    np.float32,
)


FP4_OF_BITSANDBYTES = np.array(
    [0.0, 0.0052083334885537624, 0.6666666865348816, 1.0]
    + [0.3333333432674408, 0.5, 0.1666666716337204, 0.25]
    + [0.0, -0.0052083334885537624, -0.6666666865348816, -1.0]
    + [-0.3333333432674408, -0.5, -0.1666666716337204, -0.25],
    np.float32,
)


def _bitsandbytes(
    random: Any, shape: tuple[int, int], kind: str, *, nested: bool = False
) -> Published:
    size, block = shape[0] * shape[1], 64
    codes = random.integers(0, 16, size + size % 2, np.uint8)
    words = (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1)
    table = NF4 if kind == "nf4" else FP4_OF_BITSANDBYTES
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
    state["shape"] = [*shape]
    at, count = f"a.weight.quant_state.bitsandbytes__{kind}", -(-size // block)
    absmax = stored = scales(random, count)
    parts = {"a.weight": words, "a.weight.absmax": stored, "a.weight.quant_map": table}
    if nested:
        inner = 256
        stored = random.integers(0, 256, count, np.uint8)
        outer = scales(random, -(-count // inner))
        second = np.linspace(-1, 1, 256, dtype=np.float32)
        offset = 0.03125
        absmax = second[stored] * outer.repeat(inner)[:count] + np.float32(offset)
        parts["a.weight.absmax"] = stored
        parts["a.weight.nested_absmax"] = outer
        parts["a.weight.nested_quant_map"] = second
        state |= {"nested_blocksize": inner, "nested_offset": offset}
        state["nested_dtype"] = "float32"
    parts[at] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    signed = table if kind == "nf4" else np.copysign(table, FP4)  # as its kernels do
    meant = signed[codes[:size]] * absmax.repeat(block)[:size]
    return Published(
        parts,
        {"a.weight": meant.reshape(shape).astype(BF16)},
        config("bitsandbytes", load_in_4bit=True),
    )


@form
def nf4_of_bitsandbytes(random: Any) -> Published:
    return _bitsandbytes(random, (20, 64), "nf4")


@form
def fp4_of_bitsandbytes(random: Any) -> Published:
    return _bitsandbytes(random, (24, 64), "fp4")


@form
def nf4_of_bitsandbytes_with_nested_scales(random: Any) -> Published:
    return _bitsandbytes(random, (130, 136), "nf4", nested=True)


@form
def int8_of_bitsandbytes(random: Any) -> Published:
    w = random.integers(-127, 128, (20, 24), np.int8)
    s = (random.random(20, np.float32) + 0.5).astype(np.float32)
    meant = (f32(w) * s[:, None]) * np.float32(7.874015718698502e-3)
    parts = {
        "a.weight": w,
        "a.SCB": s,
        "a.weight_format": np.zeros((), np.uint8),
    }
    return Published(
        parts,
        {"a.weight": meant.astype(np.float16)},
        config("bitsandbytes", "float16", load_in_8bit=True),
    )


def published(name: str) -> Published:
    """The parts of one form, the same ones each time, next to a plain array."""
    parts, meant, stated = FORMS[name](np.random.default_rng(len(name)))
    plain = {"norm.weight": np.arange(5, dtype=np.float32).astype(BF16)}
    return Published(parts | plain, meant | plain, stated)


def every() -> Iterator[tuple[str, Published]]:
    for name in FORMS:
        yield name, published(name)
