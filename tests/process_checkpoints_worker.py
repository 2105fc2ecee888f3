"""One process of a run on several: what ``test_process_checkpoints.py`` starts.

    process_checkpoints_worker.py <process> <processes> <port> <folder> [<call> <who>]

Saves and loads a model and its optimizer with the other processes, and calls what must
fail. Writes what it saw into ``folder``. With a call, ``save`` or ``load``, the process
``who`` kills itself in the middle of it.
"""

from __future__ import annotations

import faulthandler
import functools
import itertools
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import treeadapt as ta
from treeadapt.checkpoints import (
    array_boxes,
    migrated,
    opening,
    orbax_folder,
    processes,
    writing,
)

SHAPES = {"embed": (16, 8), "layers": [(8, 16), (16, 8)], "scale": (8,), "odd": (3,)}
RULES = {
    "embed": P("data", "model"),
    "layers": P("data", "model"),
    "scale": P("model"),
    "odd": P(),
}
TX = ta.adapt(optax.adam(1e-2))


def make_params() -> Any:
    """Numbers that differ from leaf to leaf and from element to element."""
    leaves = itertools.count(1)

    def make(shape: tuple[int, ...]) -> jax.Array:
        numbers = jnp.arange(math.prod(shape), dtype=jnp.float32)
        return (numbers / 64 + next(leaves)).reshape(shape)

    return jax.tree.map(make, SHAPES, is_leaf=lambda x: type(x) is tuple)


def make_model() -> dict[str, Any]:
    """Params, the state of an optimizer after a step, and a key."""
    params = make_params()
    with jax.numpy_dtype_promotion("standard"):  # as Adam needs it
        _, state = TX.update(params, TX.init(params), params)
    half = params["embed"].astype(jnp.bfloat16)
    return {"params": params, "state": state, "half": half, "key": jax.random.key(7)}


def extra(times: int) -> dict[str, Any]:
    """Leaves that each process has for itself."""
    local = (jnp.arange(2) + 1) * times
    return {"step": 7 * times, "host": np.arange(3) * times, "local": local}


def abstract_model(*shape: int) -> Any:
    """The model on a mesh, as it is sharded there, without its arrays."""
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=types)
    abstract = jax.eval_shape(make_model)
    params = ta.named_shardings(abstract["params"], RULES, mesh)
    places = {
        "params": params,
        "state": ta.opt_state_shardings(TX, abstract["params"], params),
        "half": NamedSharding(mesh, P("data", None)),
        "key": NamedSharding(mesh, P()),
    }
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=place
        ),
        abstract,
        places,
    )


def sharded_model(*shape: int) -> Any:
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_model(*shape))
    return jax.jit(make_model, out_shardings=places)()


def bits(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return leaf


def wrong(tree: Any, like: Any, expected: dict[str, np.ndarray]) -> list[str]:
    """Paths whose sharding, or bits that this process sees, are others."""
    found = []
    likes = ta.to_flat_dict(like)
    for path, leaf in ta.to_flat_dict(tree).items():
        data = bits(leaf)
        same = all(
            np.asarray(part.data).tobytes() == expected[path][part.index].tobytes()
            for part in data.addressable_shards
        )
        if leaf.sharding != likes[path].sharding or leaf.dtype != likes[path].dtype:
            same = False
        found += [] if same else [path]
    return found


def attempt(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ta.TreeAdaptError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def failing(
    where: Any, name: str, error: BaseException, call: Callable[[], Any]
) -> str:
    """Return the error of a call, inside which a function raises."""
    original = getattr(where, name)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    setattr(where, name, fail)
    try:
        return attempt(call)
    finally:
        setattr(where, name, original)


def share_read(call: Callable[[], Any], file: Path) -> float:
    """Return how much of a file a call reads, but for its header."""
    counts, read = [], array_boxes.FileArray._read_to

    def counted(self: Any, stream: Any, start_bytes: int, array: Any) -> None:
        counts.append(array.nbytes)
        read(self, stream, start_bytes, array)

    array_boxes.FileArray._read_to = counted  # type: ignore[method-assign]
    call()
    array_boxes.FileArray._read_to = read  # type: ignore[method-assign]
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    return sum(counts) / (file.stat().st_size - header_bytes)


def right(process: int, folder: Path) -> dict[str, Any]:
    """Save and load; return the paths of what is not as it should be."""
    report: dict[str, Any] = {}
    expected = {
        path: np.asarray(bits(leaf))
        for path, leaf in ta.to_flat_dict(jax.jit(make_model)()).items()
    }
    saved, other = sharded_model(4, 2), abstract_model(2, 4)
    report["made"] = wrong(saved, saved, expected)
    for _ in range(2):  # the second one replaces the first
        ta.save(folder / "together", saved | extra(1))
    for name in ("together", "alone", "alone.safetensors", "shards"):
        loaded = ta.load(folder / name, other | extra(0))
        report[name] = wrong({key: loaded[key] for key in other}, other, expected)
        report[f"{name}, extra"] = [
            key for key in extra(1) if np.any(loaded[key] != extra(1)[key])
        ]
        wide = other["half"].update(dtype=jnp.float32)
        some = ta.load(folder / name, {"half": wide}, where="half", cast=True)
        expect = {"half": expected["half"].astype(np.float32)}
        report[f"{name}, cast"] = wrong(some, {"half": wide}, expect)
        rows = ta.Migration({"half : a b": "turned : b a", "**": None})
        turned = {"turned": other["params"]["layers"][0].update(dtype=jnp.bfloat16)}
        some = ta.load(folder / name, turned, where="turned", migration=rows)
        expect = {"turned": expected["half"].T}
        report[f"{name}, turned"] = wrong(some, turned, expect)
        half = other["half"]
        shape = 2 * half.shape[0], half.shape[1]
        nines = functools.partial(jnp.full, shape, 9, jnp.bfloat16)
        # Each process has its own shards only.
        grown = {"grown": jax.jit(nines, out_shardings=half.sharding)()}
        options = {"pad": {"a": (0, half.shape[0])}, "fill": "target"}
        rows = ta.Migration({"half : a b": ("grown : a b", options), "**": None})
        some = ta.load(folder / name, grown, where="grown", migration=rows)
        added = np.full_like(expected["half"], 9)
        expect = {"grown": np.concatenate([expected["half"], added])}
        report[f"{name}, grown"] = wrong(some, grown, expect)
        # So many parts of it that it is read whole.
        sharding = half.sharding.update(spec=P("data"))
        column = functools.partial(jnp.full, shape[0], 9, jnp.bfloat16)
        make = jax.jit(column, out_shardings=sharding)
        cut = {f"{number}": make() for number in range(shape[1])}
        rows = ta.Migration({"half : a b": ("{b} : a", options), "**": None})
        some = ta.load(folder / name, cut, migration=rows)
        columns = expect["grown"].T
        expect = {key: columns[int(key)] for key in cut}
        report[f"{name}, cut"] = wrong(some, cut, expect)
    # Of steps of a run all take the one that the first process takes.
    (folder / "run").mkdir(exist_ok=True)
    for step in (1, 2):
        ta.save(folder / "run" / f"{step}", {"half": saved["half"]} | extra(step))
    last_step = opening.last_step
    if process == 1:  # it does not see the last one yet
        opening.last_step = lambda _: ("1", "")
    loaded = ta.load(folder / "run", {"half": other["half"]} | extra(0))
    opening.last_step = last_step
    report["step"] = [key for key in extra(2) if np.any(loaded[key] != extra(2)[key])]
    if process == 1:  # alone, without waiting for the others
        host = {"params": {"embed": np.zeros((16, 8), np.float32)}, "step": 0}
        some = ta.load(folder / "together", host, where=["params/embed", "step"])
        assert some["params"]["embed"].tobytes() == expected["params/embed"].tobytes()
        assert some["step"] == 7
        assert ta.compare_checkpoint(folder / "together", host, where="step").fits
        assert ta.load(folder / "together")["params"]["odd"].shape == (3,)
        ta.save(folder / "one.safetensors", host)
    return report


def errors(process: int, folder: Path) -> dict[str, str]:
    """Call what must fail, in all processes alike; return the errors."""
    old, tree = folder / "together", {"a": sharded_model(4, 2)["params"]["embed"]}
    full = OSError(28, "No space left on device")
    like = {"half": abstract_model(4, 2)["half"]}

    def load(name: Path) -> None:
        ta.load(name, like, where="half")

    def reload() -> None:
        load(old)

    is_last, is_first = process == jax.process_count() - 1, process == 0
    found = {
        "other tree": attempt(
            lambda: ta.save(old, tree | ({"b": 1} if is_last else {"c": np.ones(2)}))
        ),
        "no folder": attempt(lambda: ta.save(folder / "nowhere" / "x", tree)),
        "other call": attempt(lambda: load(old) if is_last else ta.save(old, tree)),
        "other name": attempt(lambda: ta.save(folder / f"new-{is_last}", tree)),
        "no file": attempt(lambda: load(folder / "nowhere")),
        "no file there": attempt(lambda: load(folder / "nowhere" if is_last else old)),
        "safetensors": attempt(lambda: ta.save(folder / "x.safetensors", tree)),
        "shards": attempt(lambda: ta.save(folder / "x", tree, max_shard_bytes=9)),
        "empty": attempt(lambda: ta.save(old, tree | {"b": np.ones(0)})),
    }

    def failing_in(who: bool, where: Any, name: str, error: BaseException) -> str:
        def call() -> None:
            ta.save(old, tree)

        return failing(where, name, error, call) if who else attempt(call)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 if is_last else soft, hard))
    found["full there"] = attempt(lambda: ta.save(old, tree))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found["full first"] = failing_in(is_first, orbax_folder, "write", full)
    found["full at last"] = failing_in(is_first, orbax_folder, "finish", full)
    if is_last:  # it sees no folder that process 0 makes
        absent = folder / "no"
        absent = folder / "no"
        writing.Path = lambda name: Path(absent if ".part" in str(name) else name)
    found["not shared"] = attempt(lambda: ta.save(old, tree))
    writing.Path = Path
    found["stopped"] = failing_in(is_last, orbax_folder, "write", KeyboardInterrupt())
    found["read there"] = (
        failing(migrated, "read_arrays", OSError(5, "Input/output error"), reload)
        if is_last
        else attempt(reload)
    )
    processes._ARRIVAL_S = 1
    if is_last:
        time.sleep(3)
    found["late"] = attempt(lambda: ta.save(old, tree))
    processes._ARRIVAL_S = 300
    found["afterwards"] = attempt(reload)
    return found


def die(process: int, folder: Path, call: str, who: int) -> None:
    """Kill one process inside a call, in which the others then wait."""
    model = sharded_model(4, 2)
    if process == who:
        name = "write" if call == "save" else "read"

        def kill(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(orbax_folder, name, kill)
    if call == "save":
        ta.save(folder / "old", model)
    else:
        ta.load(folder / "old", model, strict=False)


def main(process: int, count: int, port: str, folder: Path, *death: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}",
        count,
        process,
        initialization_timeout=30,
        heartbeat_timeout_seconds=6 if death else 100,
    )
    if death:
        die(process, folder, death[0], int(death[1]))
        return
    file, like = folder / "alone.safetensors", abstract_model(8, 1) | extra(0)
    report = {
        "wrong": right(process, folder),
        "share": share_read(lambda: ta.load(file, like), file),
        "errors": errors(process, folder),
    }
    (folder / f"report-{process}.json").write_text(json.dumps(report))
    jax.distributed.shutdown()


if __name__ == "__main__":
    # This process ends even if the test that started it does not.
    faulthandler.dump_traceback_later(45, exit=True)
    own, others, port, folder, *death = sys.argv[1:]
    main(int(own), int(others), port, Path(folder), *death)
