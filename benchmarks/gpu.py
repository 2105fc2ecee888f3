"""``python -m benchmarks.gpu``: races on an accelerator, in under eight minutes.

They read a checkpoint to the device and run compiled programs: a step of a partition of
50 groups, Muon on each layer of a stack, and a trainer's weights given to a sampler.
Compiled once, outside the clock. Everything lies on one device.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import treeadapt as ta
from benchmarks.harness import Race, Result, Target, run
from benchmarks.tables import table, write_page

TOPIC = "gpu"
KV_HEADS, HEADS, HEAD_DIM = 8, 32, 128


def main(arguments: list[str] | None = None) -> int:
    """Run all races on the first device; return the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__
    )
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--page", help="write the table into this Markdown page")
    options = parser.parse_args(arguments)
    console = Console(width=150)
    device = jax.devices()[0]
    if device.platform == "cpu" and not options.small:
        console.print(
            "SKIPPED: JAX sees no accelerator; --small runs the races on a CPU."
        )
        return 0
    console.print(f"On one {device.device_kind}.", table([]))
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for race in races(Path(folder), small=options.small):
            rows = run(race, budget_s=1.0 if options.small else 15.0)
            console.print(table(rows, show_header=False))
            results += rows
    if options.page:
        write_page(Path(options.page), results)
    return 0


def races(folder: Path, *, small: bool) -> Iterator[Race]:
    """Yield the races, each set up when its turn comes."""
    yield from _loads(folder, *((4, 64) if small else (16, 4_096)))
    yield _partition(*((50, 8) if small else (2_000, 256)))
    yield _muon(*((4, 32) if small else (24, 1_024)))
    yield _sampler(*((2, 64) if small else (24, 4_096)))


def _loads(folder: Path, layers: int, width: int) -> Iterator[Race]:
    from safetensors.flax import load_file as load_jax
    from safetensors.numpy import load_file as load_numpy

    rng = np.random.default_rng(0)
    arrays = {
        f"layers.{n}.{name}": rng.random((width, width), np.float32)
        for n in range(layers)
        for name in ("up", "down")
    }
    file = folder / "model.safetensors"
    ta.save(file, arrays)
    size_bytes = sum(array.nbytes for array in arrays.values())
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), arrays
    )
    del arrays
    yield Race(
        topic=TOPIC,
        work=f"load {size_bytes / 1e9:.2g} GB to the device",
        size=len(target),
        contenders={
            "treeadapt": _ready(lambda: ta.load(file, target)),
            "safetensors.flax": _ready(lambda: load_jax(file)),
            "safetensors.numpy, device_put": _ready(
                lambda: jax.device_put(load_numpy(file), device)
            ),
            # The floor: all bytes by several threads, and one copy.
            "pread in threads, one copy": _ready(lambda: [_copied(file, device)]),
        },
        baseline="safetensors.numpy, device_put",
        targets={"treeadapt": Target(at_most=0.5)},
    )
    stack = ta.Migration({"layers.{l}.{n} : a b": "layers/{n} : l b a"})
    stacked = jax.ShapeDtypeStruct((layers, width, width), np.float32, sharding=device)
    whole = {"layers": {"up": stacked, "down": stacked}}

    def by_hand() -> Any:
        flat = load_numpy(file)
        names = ("up", "down")
        put = {
            name: [
                jax.device_put(flat[f"layers.{n}.{name}"], device)
                for n in range(layers)
            ]
            for name in names
        }
        return {name: jnp.stack([x.T for x in put[name]]) for name in names}

    yield Race(
        topic=TOPIC,
        work="load, transpose and stack all layers",
        size=len(target),
        contenders={
            "treeadapt": _ready(lambda: ta.load(file, whole, migration=stack)),
            "device_put each, jnp.stack": _ready(by_hand),
        },
        baseline="device_put each, jnp.stack",
        targets={"treeadapt": Target(at_most=1.1)},
    )


def _copied(file: Path, device: Any, step: int = 2**24) -> jax.Array:
    """Return the bytes of a file on a device."""
    data = np.empty(file.stat().st_size, np.uint8)
    with file.open("rb") as opened, ThreadPoolExecutor(16) as pool:

        def read(start: int) -> None:
            part = memoryview(data)[start : start + step]
            while part:
                count = os.preadv(opened.fileno(), [part], start)
                part, start = part[count:], start + count

        [*pool.map(read, range(0, data.size, step))]
    return jax.device_put(data, device)


def _partition(leaves: int, width: int, groups: int = 50) -> Race:
    params = {f"layer_{i}/w": jnp.ones((width, width)) for i in range(leaves)}
    labels = {path: f"g{i % groups}" for i, path in enumerate(params)}
    transforms = {f"g{i}": optax.adam(1e-3 * (i + 1)) for i in range(groups)}
    return Race(
        topic=TOPIC,
        work=f"one Adam step, {groups} groups",
        size=leaves,
        contenders={
            "treeadapt": _step(ta.partition(transforms, lambda _: labels), params),
            "optax.partition": _step(
                optax.partition(transforms, lambda _: labels), params
            ),
            "one adam": _step(optax.adam(1e-3), params),
        },
        baseline="treeadapt",
        targets={"optax.partition": Target(at_least=1.0)},
    )


def _muon(layers: int, width: int) -> Race:
    stacked = {
        "blocks": {
            "up": jax.random.normal(jax.random.key(0), (layers, width, 4 * width))
        }
    }
    unrolled = {
        f"blocks_{n}": {"up": stacked["blocks"]["up"][n]} for n in range(layers)
    }
    muon = optax.contrib.muon(1e-3)
    return Race(
        topic=TOPIC,
        work=f"one Muon step, {layers} layers in one array",
        size=layers,
        contenders={
            "treeadapt": _step(ta.per_layer(muon, {"blocks": 0}), stacked),
            "Muon, an array for each layer": _step(muon, unrolled),
        },
        baseline="Muon, an array for each layer",
        targets={"treeadapt": Target(at_most=1.1)},
    )


def _sampler(layers: int, width: int) -> Race:
    cast = {"cast": "bfloat16"}
    move = ta.Migration(
        {
            "blocks/{p=key,value} : l e k d": (
                "layers/{l}/{p} : e (k r) d",
                {"repeat": {"r": HEADS // KV_HEADS}, **cast},
            ),
            "blocks/{p=query,out} : l ...": ("layers/{l}/{p} : ...", cast),
        }
    )
    heads = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    shapes = {name: (layers, width, count, HEAD_DIM) for name, count in heads.items()}
    shapes["out"] = (layers, HEADS, HEAD_DIM, width)
    trainer = {
        "blocks": {
            name: jax.random.normal(jax.random.key(0), shape)
            for name, shape in shapes.items()
        }
    }

    def by_hand(params: Any) -> Any:
        sampler = {}
        for n in range(layers):
            for name, stack in params["blocks"].items():
                leaf = stack[n].astype(jnp.bfloat16)
                if name in ("key", "value"):
                    leaf = jnp.repeat(leaf, HEADS // KV_HEADS, axis=1)
                sampler[f"layers/{n}/{name}"] = leaf
        return sampler

    return Race(
        topic=TOPIC,
        work="weights to a sampler, one program",
        size=layers * len(shapes),
        contenders={
            "treeadapt": _ready(jax.jit(move), trainer),
            "written by hand": _ready(jax.jit(by_hand), trainer),
        },
        baseline="written by hand",
        targets={"treeadapt": Target(at_most=1.1)},
    )


def _step(tx: Any, params: Any) -> Callable[[], None]:
    update = jax.jit(tx.update)
    return _ready(update, jax.tree.map(jnp.ones_like, params), tx.init(params), params)


def _ready(function: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    """Call ``function`` and wait for all that it returns."""
    return lambda: jax.block_until_ready(function(*arguments)) and None


if __name__ == "__main__":
    sys.exit(main())
