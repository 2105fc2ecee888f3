"""One process of a run on several: what ``test_multiprocess.py`` starts.

    multiprocess_worker.py <process> <processes> <port> <folder>

All processes together have eight CPU devices. Together they train one model, sharded so
that none sees all of it. Each writes its compiled program and its results into
``folder``. A single process does the same on eight devices.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import treeadapt as ta

NUM_DEVICES = 8
NUM_STEPS = 3
LABELS = ("decay", "embed", "frozen", "no_decay", "slow")


class Agent(NamedTuple):
    policy: Any
    value: Any


SHAPES = Agent(
    policy={
        "embed": {"kernel": (16, 8)},
        "hidden_0": {"kernel": (8, 16), "bias": (16,)},
        "hidden_1": {"kernel": (16, 16), "bias": (16,)},
        "norm": {"scale": (8,)},
    },
    value=[{"kernel": (16, 8)}, {"kernel": (8, 4)}],
)
LABEL_RULES = ta.Rules(
    {
        "policy/embed": "embed",
        "policy/hidden_0": "frozen",
        "**/bias": "no_decay",
        "value": "decay",
        "**": "slow",
    }
)
SPEC_RULES = {"**/kernel": ("data", "model"), "**/bias": ("model",), "**": ()}


def optimizer() -> Any:
    """Four groups, two of which sum over all of their leaves."""
    clip = optax.clip_by_global_norm(64.0)
    return ta.partition(
        {
            "slow": optax.chain(clip, optax.sgd(1 / 256, momentum=0.5)),
            "no_decay": optax.adam(1 / 64),
            "embed": optax.sgd(1 / 128),
            "decay": optax.chain(
                clip, optax.adamw(1 / 64, mask=ta.glob("**/0/kernel"))
            ),
        },
        LABEL_RULES,
    )


def make_agent() -> Agent:
    """Small whole numbers: sums of them are exact in any order."""

    def make(shape: tuple[int, ...]) -> jax.Array:
        count = int(np.prod(shape))
        return (jnp.arange(count, dtype=jnp.float32) % 7 - 3).reshape(shape)

    return jax.tree.map(make, SHAPES, is_leaf=lambda x: type(x) is tuple)


def loss(params: Any, rest: Any, batch: jax.Array) -> jax.Array:
    agent = ta.merge(params, rest)
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(agent):
        rows = batch[:, : leaf.shape[0]]
        total += jnp.sum(rows @ leaf) if leaf.ndim == 2 else jnp.sum(rows * leaf)
    return total


def step(params: Any, rest: Any, state: Any, batch: jax.Array) -> Any:
    grads = jax.grad(loss)(params, rest, batch)
    updates, state = optimizer().update(grads, state, params)
    return ta.apply_updates(params, updates), rest, state


def mesh_of(kind: str) -> jax.sharding.Mesh:
    types = (getattr(AxisType, kind),) * 2
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


def make_sharded(mesh: jax.sharding.Mesh) -> tuple[Agent, Agent]:
    """The agent, created on its shardings, and the shardings."""
    shardings = ta.named_shardings(jax.eval_shape(make_agent), SPEC_RULES, mesh)
    return jax.jit(make_agent, out_shardings=shardings)(), shardings


def seen_share(leaf: jax.Array) -> float:
    """The share of an array that this process can see."""
    seen = {str(shard.index): shard.data.size for shard in leaf.addressable_shards}
    return sum(seen.values()) / leaf.size


def train(report: dict[str, Any]) -> dict[str, Any]:
    """Train for a few steps; return the agent and the state of its optimizer."""
    mesh = mesh_of("Auto")
    agent, shardings = make_sharded(mesh)
    report["seen"] = {k: seen_share(v) for k, v in ta.to_flat_dict(agent).items()}
    report["labels"] = ta.to_flat_dict(ta.param_labels(agent, LABEL_RULES))
    report["summary"] = str(ta.summarize(agent, LABEL_RULES))

    params, rest = ta.split(agent)
    flat_shardings = ta.to_flat_dict(shardings)
    state = ta.init_sharded(optimizer(), params)
    places = ta.opt_state_shardings(optimizer(), params, flat_shardings)
    report["state"] = {
        name: [str(leaf.sharding.spec), leaf.sharding == place]
        for (name, leaf), place in zip(
            ta.to_flat_dict(state).items(), jax.tree.leaves(places), strict=True
        )
    }

    def whole() -> dict[str, Any]:
        agent = make_agent()
        moments = optax.adam(0.1).init(agent)
        return {"agent": agent, "moments": moments, "step": jnp.int32(0)}

    of_all = ta.named_shardings(jax.eval_shape(whole), SPEC_RULES, mesh)
    made = jax.jit(whole, out_shardings=of_all)()
    report["whole"] = {
        name: [str(leaf.sharding.spec), seen_share(leaf)]
        for name, leaf in ta.to_flat_dict(made).items()
    }
    everywhere = NamedSharding(mesh, P())
    batch = jax.jit(
        lambda: jnp.arange(128.0).reshape(8, 16) % 5 - 2,
        out_shardings=NamedSharding(mesh, P("data", None)),
    )()
    compiled = jax.jit(
        step,
        donate_argnums=(0, 1, 2),
        out_shardings=(flat_shardings, everywhere, places),
    )
    report["programs"] = {
        "init": jax.jit(optimizer().init).lower(agent).as_text(),
        "step": compiled.lower(params, rest, state, batch).as_text(),
        "there and back": jax.jit(there_and_back).lower(agent).as_text(),
    }
    for _ in range(NUM_STEPS):
        params, rest, state = compiled(params, rest, state, batch)
    return {"agent": ta.merge(params, rest), "state": state}


def there_and_back(agent: Agent) -> Agent:
    agent = ta.merge(*ta.split(agent, "**/kernel"))
    agent = ta.from_flat_dict(agent, ta.to_flat_dict(agent))
    return ta.from_state_dict(agent, ta.to_state_dict(agent))


def convert(report: dict[str, Any]) -> None:
    """Convert arrays that this process cannot read, on a mesh with Explicit axes."""
    agent, _ = make_sharded(mesh_of("Explicit"))
    with jax.transfer_guard("disallow_explicit"):
        again = there_and_back(agent)
    pairs = zip(jax.tree.leaves(agent), jax.tree.leaves(again), strict=True)
    report["identical"] = all(one is two for one, two in pairs)
    state = ta.to_flat_dict(ta.init_sharded(ta.adapt(optax.adam(1.0)), agent))
    report["explicit"] = {name: str(v.sharding.spec) for name, v in state.items()}


def save_and_restore(trained: dict[str, Any], folder: Path) -> bool:
    """Save the sharded flat dict; compare what this process sees of it again."""
    flat = ta.to_flat_dict(trained)
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        trained,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", flat)
        checkpointer.wait_until_finished()
        by_orbax = checkpointer.restore(folder / "checkpoint", ta.to_flat_dict(like))
    by_path = ta.load(folder / "checkpoint", like)
    assert jax.tree.structure(by_path) == jax.tree.structure(trained)
    return same_here(by_orbax, flat) and same_here(ta.to_flat_dict(by_path), flat)


def same_here(one: dict[str, jax.Array], two: dict[str, jax.Array]) -> bool:
    """Compare shardings, and the parts that this process sees."""
    return list(one) == list(two) and all(
        one[path].sharding == leaf.sharding
        and all(
            np.array_equal(part.data, own.data)
            for part, own in zip(
                one[path].addressable_shards, leaf.addressable_shards, strict=True
            )
        )
        for path, leaf in two.items()
    )


def gather(flat: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The numbers, for comparison: whole arrays on every process."""
    mesh = next(iter(flat.values())).sharding.mesh
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(flat)
    return {path: np.asarray(leaf.addressable_data(0)) for path, leaf in whole.items()}


def main(process: int, processes: int, port: str, folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{port}", processes, process, initialization_timeout=30
        )
    assert len(jax.devices()) == NUM_DEVICES
    # How a set of labels would order a program in this process.
    report: dict[str, Any] = {"order of a set": list(set(LABELS))}
    trained = train(report)
    convert(report)
    report["restored"] = save_and_restore(trained, folder)
    numbers = gather(ta.to_flat_dict(trained))
    np.savez(folder / f"numbers-{process}.npz", **numbers)
    (folder / f"report-{process}.json").write_text(json.dumps(report))
    if processes > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    # This process ends even if the test that started it does not.
    faulthandler.dump_traceback_later(55, exit=True)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
