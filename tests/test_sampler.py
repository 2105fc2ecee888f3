"""The weights of a trainer, moved to a sampler on another mesh by one program.

The trainer scans its layers and shards them over two axes; the sampler has each layer
by itself, more heads of keys and values, and one axis. What XLA compiles of a migration
is compared with what it compiles of functions that someone wrote for these weights.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeadapt as ta

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, HIDDEN, VOCAB, COPIES = 3, 32, 8, 4, 4, 64, 48, 2
DEVICES = np.array(jax.devices()[:8])
# Names are those of the trainer; specs are of one layer, there and in the sampler.
SHAPES = {
    "query": (WIDTH, HEADS, DIM),
    "key": (WIDTH, KV_HEADS, DIM),
    "value": (WIDTH, KV_HEADS, DIM),
    "out": (HEADS, DIM, WIDTH),
    "up": (WIDTH, HIDDEN),
    "norm": (WIDTH,),
}
IN_TRAINER = {
    "query": ("data", "model"),
    "key": ("data", "model"),
    "value": ("data", "model"),
    "out": ("model", None, "data"),
    "up": ("data", "model"),
    "norm": (),
}
IN_SAMPLER = {
    "query": P(None, "tensor"),
    "key": P(None, "tensor"),
    "value": P(None, "tensor"),
    "out": P("tensor"),
    "up": P(None, "tensor"),
    "norm": P(),
}

OPERATIONS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
COLLECTIVE = re.compile(rf"= (.*?) ({OPERATIONS})(?:-start)?\(")
# Either kind compiles to the same program, so one is enough for each change.
KINDS = ["dict", pytest.param("nnx", marks=pytest.mark.slow)]
BYTES = {"f32": 4, "u32": 4, "bf16": 2, "u16": 2}


def trainer_mesh() -> Mesh:
    return Mesh(DEVICES.reshape(4, 2), ("data", "model"))


def sampler_mesh(devices: Any = DEVICES) -> Mesh:
    return Mesh(devices, ("tensor",))


def trained(kind: str, mesh: Mesh | None = None) -> Any:
    """The weights of a trainer, in a dict or in a state of nnx."""
    numbers = np.random.default_rng(0)
    mesh = mesh or trainer_mesh()

    def put(shape: tuple[int, ...], spec: P) -> Any:
        array = numbers.normal(size=shape).astype(np.float32)
        leaf = jax.device_put(array, NamedSharding(mesh, spec))
        return nnx.Param(leaf) if kind == "nnx" else leaf

    blocks = {
        name: put((LAYERS, *shape), P(None, *IN_TRAINER[name]))
        for name, shape in SHAPES.items()
    }
    tree = {"blocks": blocks, "embed": put((VOCAB, WIDTH), P("model", "data"))}
    return nnx.State(tree) if kind == "nnx" else tree


def migration(dtype: str | None) -> ta.Migration:
    more: dict[str, Any] = {} if dtype is None else {"cast": dtype}

    def to(address: str, **repeat: Any) -> Any:
        operations = repeat | more
        return (address, operations) if operations else address

    heads = to("layers/{l}/{p} : e (k r) d", repeat={"r": COPIES})
    return ta.Migration(
        {
            "embed : v e": to("embed : v e"),
            "blocks/{p=key,value} : l e k d": heads,
            "blocks/{p} : l ...": to("layers/{l}/{p} : ..."),
        }
    )


def by_stack(dtype: Any, moved_as: Any = None) -> Callable[[Any], dict[str, Any]]:
    """Hand-written: cast and repeat all layers at once, then take them apart."""

    def moved(tree: Any) -> dict[str, Any]:
        new = {"embed": _last(_first(tree["embed"], dtype, moved_as), dtype)}
        for name, leaf in tree["blocks"].items():
            stack = _first(leaf, dtype, moved_as)
            if name in ("key", "value"):
                stack = jnp.repeat(stack, COPIES, axis=2)
            for layer in range(LAYERS):
                new[f"layers/{layer}/{name}"] = _last(stack[layer], dtype)
        return new

    return moved


def by_layer(dtype: Any, moved_as: Any = None) -> Callable[[Any], dict[str, Any]]:
    """Hand-written: take the layers apart, then cast and repeat each."""

    def moved(tree: Any) -> dict[str, Any]:
        new = {"embed": _last(_first(tree["embed"], dtype, moved_as), dtype)}
        for name, leaf in tree["blocks"].items():
            for layer in range(LAYERS):
                array = _first(leaf[layer], dtype, moved_as)
                if name in ("key", "value"):
                    array = jnp.repeat(array, COPIES, axis=1)
                new[f"layers/{layer}/{name}"] = _last(array, dtype)
        return new

    return moved


def _first(leaf: Any, dtype: Any, moved_as: Any) -> Any:
    """A leaf in the dtype in which it is moved."""
    array = leaf[...] if dtype is None else leaf[...].astype(dtype)
    bits = jax.lax.bitcast_convert_type
    return array if moved_as is None else bits(array, moved_as)


def _last(array: Any, dtype: Any) -> Any:
    """A leaf in the dtype of the sampler."""
    if dtype is None or array.dtype == dtype:
        return array
    return jax.lax.bitcast_convert_type(array, dtype)


def shardings(mesh: Mesh, dtype: str | None = None) -> dict[str, NamedSharding]:
    """Where the sampler has each of its weights."""
    shapes = jax.eval_shape(migration(dtype), trained("dict"))
    table = {f"layers/*/{name}": spec for name, spec in IN_SAMPLER.items()}
    specs = {"embed": P("tensor"), **table}
    padded = {
        pattern: P(*spec, *[None] * (len(SHAPES.get(pattern[9:], (0, 0))) - len(spec)))
        for pattern, spec in specs.items()
    }
    return ta.named_shardings(shapes, padded | {"layers/*/norm": P()}, mesh)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one compiled program does.

    Attributes:
        counts: collectives by operation. sizes_bytes: of their results, likewise.
        accessed_bytes: that all operations read and write. temporary_bytes: held on
        each device while it runs, next to arguments and results.
    """

    counts: dict[str, int]
    sizes_bytes: dict[str, int]
    accessed_bytes: float
    temporary_bytes: int


def cost(function: Callable[[Any], Any], tree: Any) -> Cost:
    jitted = jax.jit(function, out_shardings=shardings(sampler_mesh()))
    compiled = jitted.lower(tree).compile()
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    for results, operation in COLLECTIVE.findall(compiled.as_text()):
        counts[operation] += 1
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            sizes[operation] += BYTES[dtype] * math.prod(map(int, shape.split(",")))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    accessed = compiled.cost_analysis()["bytes accessed"]
    return Cost(dict(counts), dict(sizes), accessed, temporary)


def handwritten(write: Callable[..., Any], dtype: str | None) -> Any:
    """A function that moves what a migration does, in the cheapest dtype.

    XLA for CPUs sends bfloat16 as float32, which other backends do not. Integers of 16
    bits are sent as they are.
    """
    return write(dtype, None if dtype is None else jnp.uint16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_program_costs_what_a_handwritten_one_does(kind, dtype):
    tree = trained(kind)
    of_migration = cost(migration(dtype), tree)
    assert of_migration.counts["all-to-all"]  # the meshes do differ
    assert of_migration == cost(handwritten(by_stack, dtype), tree)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_program_costs_no_more_than_other_handwritten_ones(dtype):
    tree = trained("dict")
    of_migration = cost(migration(dtype), tree)
    for other in (handwritten(by_layer, dtype), by_stack(dtype), by_layer(dtype)):
        of_other = cost(other, tree)
        for operation, count in of_migration.counts.items():
            size = of_migration.sizes_bytes[operation]
            assert count <= of_other.counts[operation]
            assert size <= of_other.sizes_bytes[operation]
        assert of_migration.temporary_bytes <= of_other.temporary_bytes
        # Taking layers apart first, a program need not write a stack in a new order.
        assert of_migration.accessed_bytes <= 1.1 * of_other.accessed_bytes


@pytest.mark.slow
def test_half_the_bytes_are_sent_if_the_sampler_has_bfloat16():
    whole, half = (
        cost(migration(dtype), trained("dict")) for dtype in (None, "bfloat16")
    )
    assert half.counts == whole.counts
    for operation, size in whole.sizes_bytes.items():
        assert 2 * half.sizes_bytes[operation] == size


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_every_step_gives_the_sampler_the_weights_of_the_trainer(kind, dtype):
    places = shardings(sampler_mesh())
    push = jax.jit(migration(dtype), out_shardings=places)
    tree = trained(kind)
    step = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: 0.9 * leaf, tree),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, tree),
    )
    for _ in range(3):
        weights = push(tree)
        expected = jax.jit(by_layer(dtype), out_shardings=places)(tree)
        assert programs.bits(weights) == programs.bits(expected)
        assert {path: leaf.sharding for path, leaf in weights.items()} == places
        tree = step(tree)
    assert push._cache_size() == 1


@pytest.mark.slow
def test_the_old_weights_of_the_sampler_lend_their_memory_to_the_new_ones():
    m, places, tree = migration("bfloat16"), shardings(sampler_mesh()), trained("dict")
    plain = jax.jit(m, out_shardings=places)
    push = jax.jit(
        lambda old, tree: m(tree),
        out_shardings=places,
        donate_argnums=0,
        keep_unused=True,
    )
    old = plain(tree)
    memory = push.lower(old, tree).compile().memory_analysis()
    shards = (leaf.addressable_shards[0].data.nbytes for leaf in old.values())
    assert memory.alias_size_in_bytes == sum(shards)
    before = plain.lower(tree).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= before.temp_size_in_bytes
    expected = programs.bits(plain(tree))
    new = push(old, tree)
    assert all(leaf.is_deleted() for leaf in old.values())
    assert programs.bits(new) == expected


def test_the_next_step_may_donate_what_the_sampler_has():
    # A row that only renames would give the same array outside of jit.
    norm = jax.device_put(jnp.ones(4), NamedSharding(trainer_mesh(), P()))
    m = ta.Migration({"norm": "scale"})
    tree = {"norm": norm}
    assert m(tree)["scale"] is norm
    weights = jax.jit(m, out_shardings={"scale": norm.sharding})(tree)
    jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)(tree)
    assert norm.is_deleted()
    assert weights["scale"].tolist() == [1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["other devices", "another order"])
def test_other_devices_get_shards_as_the_sampler_has_them(order):
    there = DEVICES[4:] if order == "other devices" else DEVICES[:4][::-1]
    here = Mesh(DEVICES[:4].reshape(2, 2), ("data", "model"))
    m, tree = migration("bfloat16"), trained("dict", here)
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(m, out_shardings=shardings(sampler_mesh(there)))(tree)
    push = jax.jit(m, out_shardings=shardings(sampler_mesh(DEVICES[:4])))
    weights = push(tree)
    moved = jax.device_put(weights, shardings(sampler_mesh(there)))
    assert programs.bits(moved) == programs.bits(weights)
    for path, leaf in weights.items():
        pairs = zip(
            leaf.addressable_shards, moved[path].addressable_shards, strict=True
        )
        assert all(one.data.shape == two.data.shape for one, two in pairs)
        assert moved[path].sharding.device_set == set(there)


def chunks(shapes: dict[str, Any], most_bytes: int) -> list[tuple[str, ...]]:
    """Divide the sampler's leaves, those of one stack together, as the page does."""
    every, left = [[]], most_bytes
    for name in sorted(shapes, key=lambda name: name.split("/")[::-1]):
        size = shapes[name].size * shapes[name].dtype.itemsize
        if every[-1] and size > left:
            every.append([])
            left = most_bytes
        every[-1].append(name)
        left -= size
    return [*map(tuple, every)]


def bytes_on(devices: Any, known: set[int]) -> int:
    """How many bytes of arrays that are not ``known`` are on some devices."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.live_arrays()
        if id(leaf) not in known
        for device in leaf.sharding.device_set
        if device in {*devices}
    )


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4, 20])
def test_chunks_to_other_devices_need_memory_for_one_chunk(parts):
    training, sampling = DEVICES[:4], DEVICES[4:]
    mesh = Mesh(training.reshape(2, 2), ("data", "model"))
    m, tree = migration("bfloat16"), trained("dict", mesh)
    here, there = (shardings(sampler_mesh(each)) for each in (training, sampling))
    shapes = jax.eval_shape(m, tree)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes.values())
    names_by_chunk = chunks(shapes, total // parts)
    most = max(sum(shapes[n].size * 2 for n in names) for names in names_by_chunk)
    expected = jax.device_put(jax.jit(m, out_shardings=here)(tree), there)
    weights = jax.device_put(expected, there, may_alias=False)
    expected = programs.bits(expected)
    known = {id(leaf) for leaf in jax.live_arrays()}
    known -= {id(leaf) for leaf in weights.values()}
    result = bytes_on(sampling, known)
    peaks = []
    for names in names_by_chunk:
        push = jax.jit(
            lambda tree, names=names: {name: m(tree)[name] for name in names},
            out_shardings={name: here[name] for name in names},
        )
        chunk = push(tree)
        for name in names:
            weights.pop(name).delete()
        weights |= jax.device_put(chunk, {name: there[name] for name in names})
        jax.block_until_ready(weights)
        peaks.append((bytes_on(training, known), bytes_on(sampling, known)))
        for leaf in chunk.values():
            leaf.delete()
    assert programs.bits({name: weights[name] for name in shapes}) == expected
    copies = 4  # at most: what is on every device
    assert max(here for here, _ in peaks) <= copies * most
    assert max(there for _, there in peaks) <= result
    assert bytes_on(training, known) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation", [{"scale": 3.0}, {"offset": 0.1}, {"multiply": True}], ids=str
)
def test_what_is_computed_is_rounded_after_it(operation):
    numbers = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    names = ("a", "b") if "multiply" in operation else ("a",)
    tree = {name: jnp.asarray(one) for name, one in zip(names, numbers, strict=False)}
    sources = tuple(f"{name} : x y" for name in names)
    m = ta.Migration({sources: ("c : y x", {**operation, "cast": "bfloat16"})})
    assert programs.bits(jax.jit(m)(tree)) == programs.bits(m(tree))
