"""Checkpoints: loading two gigabytes to eight devices, and saving them.

Each run is a process of its own, because memory that a process has used once it may use
again for nothing. It loads or saves something small first, which imports and compiles;
then the clock starts. Its peak is the most that the system counted of it (``VmHWM``),
less what it had before and what the arrays themselves take. Contenders take turns, and
the table has medians. The files were written just before, so they are in the system's
cache.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import treeadapt as ta
from benchmarks.harness import Race, Result, Target, figure, run_apart

TOPIC = "checkpoints"

_STACK = {
    "layers.{l}.{n=up,down}.weight : a b": "layers/{n} : l a b",
    "layers.{l}.query.weight : (h d) e": "layers/query : l e h d",
}
# All layers become one array, whose axes are in another order.
_ONE = {
    "layers.{l}.up.weight : a b": "up : l b a",
    "layers.*.down.weight": None,
    "layers.*.query.weight": None,
}
_SPECS = {
    "*.{up,query}.weight": P("data", "model"),
    "*.down.weight": P("model", "data"),
}
_STACKED = {
    "layers/up": P(None, "data", "model"),
    "layers/down": P(None, "model", "data"),
    "layers/query": P(None, "data", "model", None),
}


def races() -> Iterator[Race]:
    """Yield nothing: a race runs in one process, and here each run needs its own."""
    yield from ()


def figures(
    layers: int = 14, width: int = 2_048, rounds: int = 5, *, apart: bool = True
) -> Iterator[Result]:
    """Measure time and peak memory of loading and saving, next to the usual means.

    Args:
        layers: of the model; 14 of 144 MB each are 2 GB.
        width: of the model.
        rounds: how often each contender runs.
        apart: whether each run is a process of its own, without which its memory and
            time mean little.
    """
    run = _run if apart else _done
    with tempfile.TemporaryDirectory() as folder:
        run("write", folder, layers, width)
        for work, contenders in (("load", _LOADS), ("save", _SAVES)):
            found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
            for number in range(rounds):
                # Each comes after another one in turn, whose memory it may take.
                for name in [*contenders][:: -1 if number % 2 else 1]:
                    found[name].append(run(f"{work}:{name}", folder, layers, width))
            yield from _rows(work, found)
        for name in _STACKS:
            runs = [run(f"stack:{name}", folder, layers, width) for _ in range(rounds)]
            target = Target(at_most=1.2) if "treeadapt" in name else None
            yield figure(
                TOPIC,
                "load and stack all layers, peak memory",
                layers,
                name,
                statistics.median(each["beyond"] / each["arrays"] for each in runs) + 1,
                of="the stacked array",
                target=target,
            )


def _rows(work: str, found: dict[str, list[dict[str, float]]]) -> Iterator[Result]:
    """Yield a row of time and one of memory for each contender."""
    others = {name: each for name, each in found.items() if "treeadapt" not in name}
    medians = {
        name: statistics.median(run["seconds"] for run in each)
        for name, each in found.items()
    }
    fastest = min(others, key=medians.__getitem__)
    for name, runs in found.items():
        pairs = zip(runs, found[fastest], strict=True)
        ratios = sorted(one["seconds"] / two["seconds"] for one, two in pairs)
        is_best = name == ("treeadapt" if work == "load" else "treeadapt, shards")
        target = Target(at_most=1.0) if is_best else None
        ratio = statistics.median(ratios)
        yield Result(
            topic=TOPIC,
            work=f"{work} 2 GB, {_WHERE[work]}",
            size=int(runs[0]["leaves"]),
            contender=name,
            baseline=fastest,
            seconds=medians[name],
            ratio=ratio,
            low=ratios[len(ratios) // 4],
            high=ratios[-1 - len(ratios) // 4],
            target=str(target or ""),
            met=None if target is None else target.met(ratio),
        )
    for name, runs in found.items():
        units = statistics.median(run["beyond"] / run["largest"] for run in runs)
        most = _MOST.get(f"{work}:{name}")
        target = None if most is None else Target(at_most=most)
        yield figure(
            TOPIC,
            f"{work} 2 GB, peak memory beyond the arrays",
            int(runs[0]["leaves"]),
            name,
            units,
            of="largest leaf or group",
            target=target,
        )


# A shard holds four of the largest leaves.
_MOST = {
    "load:treeadapt": 1.3,
    "load:treeadapt, migration": 1.3,
    "save:treeadapt, shards": 4 * 1.3,
}
_WHERE = {"load": "to 8 devices", "save": "from 8 devices"}


def _run(work: str, folder: str, layers: int, width: int) -> dict[str, float]:
    # The C library of Linux keeps what is freed of arrays up to 32 MB, as Orbax's
    # pieces are here, unless this is set (M_MMAP_THRESHOLD of mallopt(3)).
    gives_back = {"MALLOC_MMAP_THRESHOLD_": "1048576"} if "of Orbax" in work else {}
    return run_apart(__name__, 8, work, folder, layers, width, environment=gives_back)


# What runs in these processes.


def _model(layers: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(leaf.shape, np.float32)
        for name, leaf in _shapes(layers, width).items()
    }


def _shapes(layers: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {
        "up": (4 * width, width),
        "down": (width, 4 * width),
        "query": (width, width),
    }
    return {
        f"layers.{layer}.{name}.weight": jax.ShapeDtypeStruct(shape, np.float32)
        for layer in range(layers)
        for name, shape in shapes.items()
    }


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _target(leaves: Any) -> dict[str, Any]:
    """Return the abstract leaves of the model, sharded on a mesh of 4 x 2."""
    shardings = ta.named_shardings(leaves, _SPECS, _mesh())
    return {
        name: jax.ShapeDtypeStruct(
            leaf.shape, np.dtype("float32"), sharding=shardings[name]
        )
        for name, leaf in leaves.items()
    }


def _load_treeadapt(folder: Path, target: dict[str, Any]) -> Any:
    return ta.load(folder / "model.safetensors", target)


def _load_migrated(folder: Path, target: dict[str, Any]) -> Any:
    migration = ta.Migration(_STACK, sizes={"d": 64})
    made = migration.plan(target).result
    stacked = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(_mesh(), _STACKED[name])
        )
        for name, leaf in made.items()
    }
    return ta.load(folder / "model.safetensors", stacked, migration=migration)


def _load_safetensors(folder: Path, target: dict[str, Any]) -> Any:
    import safetensors.numpy

    leaves = safetensors.numpy.load_file(folder / "model.safetensors")
    return {
        name: jax.device_put(leaves[name], target[name].sharding) for name in target
    }


def _load_orbax(folder: Path, target: dict[str, Any]) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "orbax", target)


def _load_numpy(folder: Path, target: dict[str, Any]) -> Any:
    with np.load(folder / "model.npz") as leaves:
        return {
            name: jax.device_put(leaves[name], like.sharding)
            for name, like in target.items()
        }


def _stack_treeadapt(folder: Path, target: dict[str, Any]) -> Any:
    return ta.load(folder / "model.safetensors", migration=ta.Migration(_ONE))


def _stack_to_devices(folder: Path, target: dict[str, Any]) -> Any:
    migration = ta.Migration(_ONE)
    leaf = migration.plan(target).result["up"]
    sharding = NamedSharding(_mesh(), P(None, "data", "model"))
    like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return ta.load(folder / "model.safetensors", {"up": like}, migration=migration)


def _stack_of_orbax(folder: Path, target: dict[str, Any]) -> Any:
    return ta.load(folder / "ours", migration=ta.Migration(_ONE))


def _stack_by_numpy(folder: Path, target: dict[str, Any]) -> Any:
    import safetensors

    with safetensors.safe_open(folder / "model.safetensors", "np") as leaves:
        names = [name for name in target if ".up." in name]
        return np.stack([leaves.get_tensor(name).T for name in names])


def _save_treeadapt(folder: Path, leaves: dict[str, Any]) -> None:
    ta.save(folder / "new.safetensors", leaves)


def _save_shards(folder: Path, leaves: dict[str, Any]) -> None:
    largest = max(leaf.nbytes for leaf in leaves.values())
    ta.save(folder / "shards", leaves, max_shard_bytes=4 * largest)


def _save_treeadapt_orbax(folder: Path, leaves: dict[str, Any]) -> None:
    ta.save(folder / "ours", leaves)


def _save_safetensors(folder: Path, leaves: dict[str, Any]) -> None:
    import safetensors.numpy

    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    safetensors.numpy.save_file(arrays, folder / "theirs.safetensors")


def _save_orbax(folder: Path, leaves: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "theirs", leaves, force=True)


def _save_numpy(folder: Path, leaves: dict[str, Any]) -> None:
    np.savez(folder / "theirs.npz", **leaves)


_LOADS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "treeadapt": _load_treeadapt,
    "treeadapt, migration": _load_migrated,
    "safetensors, device_put": _load_safetensors,
    "Orbax": _load_orbax,
    "np.load, device_put": _load_numpy,
}
_SAVES: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "treeadapt": _save_treeadapt,
    "treeadapt, shards": _save_shards,
    "treeadapt, Orbax": _save_treeadapt_orbax,
    "safetensors": _save_safetensors,
    "Orbax": _save_orbax,
    "np.savez": _save_numpy,
}


_STACKS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "treeadapt, to NumPy": _stack_treeadapt,
    "treeadapt, to 8 devices": _stack_to_devices,
    "treeadapt, of Orbax": _stack_of_orbax,
    "safetensors, np.stack": _stack_by_numpy,
}
_WORKS = {"load": _LOADS, "save": _SAVES, "stack": _STACKS}


def _write(folder: Path, leaves: dict[str, np.ndarray]) -> None:
    folder.mkdir(exist_ok=True)
    _save_safetensors(folder, leaves)
    (folder / "theirs.safetensors").rename(folder / "model.safetensors")
    _save_orbax(folder, leaves)
    (folder / "theirs").rename(folder / "orbax")
    np.savez(folder / "model.npz", **leaves)
    ta.save(folder / "ours", leaves)


def _measured(work: str, folder: Path, layers: int, width: int) -> dict[str, float]:
    """Run one contender, first on something small."""
    step, _, name = work.partition(":")
    found: dict[str, float] = {}
    for part, size in (("small", (2, 128)), ("large", (layers, width))):
        path = folder / part
        target = _target(_shapes(*size))
        given: Any = target
        if step == "save":
            given = _load_treeadapt(path, target)
        before = memory_bytes("VmRSS")
        start = time.perf_counter()
        made = jax.block_until_ready(_WORKS[step][name](path, given))
        seconds = time.perf_counter() - start
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(made))
        groups = jax.tree.leaves(given if step == "save" else made)
        largest = max(leaf.nbytes for leaf in groups)
        found = {
            "seconds": seconds,
            "beyond": max(0, memory_bytes("VmHWM") - before - arrays),
            "largest": largest,
            "arrays": arrays,
            "leaves": len(target),
        }
    return found


def memory_bytes(field: str) -> int:
    """Return what the system counts of this process, on Linux."""
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1_024
    return 0


def _done(work: str, folder: str, layers: int, width: int) -> dict[str, float]:
    """Do what a process of its own does."""
    if work != "write":
        return _measured(work, Path(folder), layers, width)
    _write(Path(folder) / "small", _model(2, 128))
    _write(Path(folder) / "large", _model(layers, width))
    return {}


if __name__ == "__main__":
    print(json.dumps(_done(*sys.argv[1:3], *map(int, sys.argv[3:]))))
