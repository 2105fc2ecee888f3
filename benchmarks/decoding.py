"""Decoding: a gigabyte of FP8 codes with scales of blocks, as the numbers they mean.

Each run is a process of its own, as those of ``checkpointing`` are and for the same
reason. NumPy's plain formula reads one array after the other and spreads each scale
over its block; both end with the same bits, in bfloat16, in memory of their own.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

import treeadapt as ta
from benchmarks.checkpointing import memory_bytes
from benchmarks.harness import Race, Result, Target, figure, run_apart

TOPIC = "decoding"

_BLOCK = 128
_CODES, _MEANT = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
_OURS, _FORMULA, _SHARD = "treeadapt", "NumPy formula", "treeadapt, a shard of four"


def races() -> Iterator[Race]:
    """Yield nothing: a race runs in one process, and here each run needs its own."""
    yield from ()


def figures(
    layers: int = 64, width: int = 4_096, rounds: int = 5, *, apart: bool = True
) -> Iterator[Result]:
    """Measure time and peak memory of decoding, next to NumPy's plain formula.

    Args:
        layers: arrays; 64 of 16 MiB of codes each are a gigabyte.
        width: of each array.
        rounds: how often each contender runs.
        apart: whether each run is a process of its own, without which its memory and
            time mean little.
    """
    run = _run if apart else _done
    with tempfile.TemporaryDirectory() as folder:
        run("write", folder, layers, width)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in _LOADS}
        for number in range(rounds):
            for name in [*_LOADS][:: -1 if number % 2 else 1]:
                found[name].append(run(name, folder, layers, width))
    for name, runs in found.items():
        pairs = zip(runs, found[_FORMULA], strict=True)
        ratios = sorted(one["seconds"] / two["seconds"] for one, two in pairs)
        target = Target(at_most=1.0) if name == _OURS else None
        ratio = statistics.median(ratios)
        yield Result(
            topic=TOPIC,
            work="1 GB of FP8 in blocks, to bfloat16",
            size=layers,
            contender=name,
            baseline=_FORMULA,
            seconds=statistics.median(each["seconds"] for each in runs),
            ratio=ratio,
            low=ratios[len(ratios) // 4],
            high=ratios[-1 - len(ratios) // 4],
            target=str(target or ""),
            met=None if target is None else target.met(ratio),
        )
    for name, runs in found.items():
        yield figure(
            TOPIC,
            "FP8 in blocks, peak memory beyond the result",
            layers,
            name,
            statistics.median(each["beyond"] / each["largest"] for each in runs),
            of="codes of one array",
            target=Target(at_most=2.0) if name == _OURS else None,
        )


def _run(work: str, folder: str, layers: int, width: int) -> dict[str, float]:
    return run_apart(__name__, 4, work, folder, layers, width)


# What runs in these processes.


def _load_treeadapt(folder: Path) -> dict[str, np.ndarray]:
    return dict(ta.load(folder))


def _load_formula(folder: Path) -> dict[str, np.ndarray]:
    file = folder / "model.safetensors"
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_bytes))
    header.pop("__metadata__", None)
    kinds = {"F8_E4M3": _CODES, "F32": np.dtype(np.float32)}

    def part(name: str) -> np.ndarray:
        start, _ = header[name]["data_offsets"]
        shape, dtype = header[name]["shape"], kinds[header[name]["dtype"]]
        count, offset = int(np.prod(shape)), 8 + header_bytes + start
        return np.fromfile(file, dtype, count, offset=offset).reshape(shape)

    made = {}
    for name in (name for name in header if not name.endswith("_scale_inv")):
        scale = part(f"{name}_scale_inv").repeat(_BLOCK, 0).repeat(_BLOCK, 1)
        made[name] = (part(name).astype(np.float32) * scale).astype(_MEANT)
    return made


def _load_shard(folder: Path) -> dict[str, np.ndarray]:
    """Return what one of four processes needs: a quarter of each array."""
    quarter = ta.Migration({"{name} : (q r) c": "{name}.{q} : r c"}, sizes={"q": 4})
    return dict(ta.load(folder, migration=quarter, where="*.0"))


_LOADS: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {
    _OURS: _load_treeadapt,
    _FORMULA: _load_formula,
    _SHARD: _load_shard,
}


def _write(folder: Path, layers: int, width: int) -> None:
    """Write a folder as DeepSeek's are, with a configuration."""
    folder.mkdir()
    rng, arrays = np.random.default_rng(0), {}
    blocks = -(-width // _BLOCK)
    for layer in range(layers):
        codes = rng.integers(0, 120, (width, width), np.uint8)  # none of them NaN
        name = f"layers.{layer}.weight"
        arrays[name] = codes.view(_CODES)
        arrays[f"{name}_scale_inv"] = rng.uniform(0.5, 2.0, (blocks, blocks)).astype(
            np.float32
        )
    ta.save(folder / "model.safetensors", arrays)
    method = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
    config = {"torch_dtype": "bfloat16", "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(config))


def _done(work: str, folder: str, layers: int, width: int) -> dict[str, float]:
    """Do what a process of its own does: something small first, then what counts."""
    sizes = {"small": (2, 2 * _BLOCK), "large": (layers, width)}
    found: dict[str, float] = {}
    for part, size in sizes.items():
        path = Path(folder) / part
        if work == "write":
            _write(path, *size)
            continue
        before = memory_bytes("VmRSS")
        start = time.perf_counter()
        made = jax.tree.leaves(_LOADS[work](path))
        seconds = time.perf_counter() - start
        result = sum(leaf.nbytes for leaf in made)
        found = {
            "seconds": seconds,
            "beyond": max(0, memory_bytes("VmHWM") - before - result),
            "largest": size[1] ** 2,
        }
    return found


if __name__ == "__main__":
    print(json.dumps(_done(*sys.argv[1:3], *map(int, sys.argv[3:]))))
