"""Arrays move on the devices where they will live, and are read ahead of copies.

CPUs take the place of accelerators: ``forced`` lets ``load`` take them for such, and a
program for each array pay. What is loaded must then be the same, bit for bit.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from test_slices import counted

import treeadapt as ta
from treeadapt.checkpoints import accelerators
from treeadapt.migrations import on_device, running

# Each device has programs of its own to compile, so there are few.
MESH = jax.make_mesh(
    *((2, 2), ("data", "model")),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[2:6],
)


def force(patch):
    """Take CPUs for accelerators, and every array for worth a program."""
    patch.setattr(accelerators, "is_accelerator", lambda device: True)
    patch.setattr(
        accelerators, "is_worth_compiling", lambda num_arrays, num_bytes: True
    )


@pytest.fixture
def forced(monkeypatch):
    force(monkeypatch)


def numbers(shape, dtype, seed=0):
    """Numbers of random bits, NaNs of every kind among them."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    data = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return data.view(dtype).reshape(shape)


# Shapes, the rows, and which of them a device makes.
FORMS = {
    "turned": ({"a": (16, 8)}, {"a : i o": "x : o i"}, {"x"}),
    "stacked": (
        {f"a.{n}": (16, 8) for n in range(4)},
        {"a.{n} : i o": "x : n i o"},
        {"x"},
    ),
    "stacked and turned": (
        {f"a.{n}": (16, 8) for n in range(4)},
        {"a.{n} : i o": "x : o n i"},
        {"x"},
    ),
    "heads": (
        {f"a.{n}": (16, 8) for n in range(4)},
        {"a.{n} : (h d) o": ("x : n o h d")},
        {"x"},
    ),
    "unstacked": (
        {"a": (4, 16, 8)},
        {"a : n i o": "x.{n} : o i"},
        {f"x.{n}" for n in range(4)},
    ),
    "joined": (
        {"a": (16, 8), "b": (16, 8), "c": (8, 8)},
        {("a : q o", "b : q o", "c : k o"): "x : o [q q k]"},
        {"x"},
    ),
    "divided": (
        {"a": (16, 8)},
        {"a : [q q] o": ("x : o q", "y : o q")},
        {"x", "y"},
    ),
    "nested": (
        {"a": (16, 8), "b": (8, 8)},
        {("a : (g r) o", "b : g o"): "x : o (g [r 1])"},
        {"x"},
    ),
    "repeated": (
        {"a": (8, 8)},
        {"a : h o": ("x : o (h r)", {"repeat": {"r": 2}})},
        {"x"},
    ),
    "padded": (
        {"a": (14, 8)},
        {"a : v o": ("x : o v", {"pad": {"v": (0, 2)}})},
        {"x"},
    ),
    "taken": (
        {"a": (16, 8)},
        {"a : v o": ("x : o v", {"take": {"v": [*range(8, 16), *range(8)]}})},
        {"x"},
    ),
    "equal copies": (
        {"a": (16, 8), "b": (16, 8)},
        {("a : v o", "b : v o"): "x : o v"},
        set(),
    ),
    "scaled": ({"a": (16, 8)}, {"a : i o": ("x : o i", {"scale": 2})}, set()),
    "renamed": ({"a": (16, 8)}, {"a": "x"}, set()),
    "a function": ({"a": (16, 8)}, {"a": ("x", np.transpose)}, set()),
}
PLACES = {
    "float32": None,
    "bfloat16": P("data", "model"),
    "float8_e4m3fn": "one",
    "int8": P(None, "model"),
    "bool": P(),
}


def target_of(migration, leaves, spec):
    """Abstract leaves of what a migration makes, on some devices."""

    def sharding(leaf):
        if spec == "one":
            return SingleDeviceSharding(jax.devices()[3])
        return None if spec is None else NamedSharding(MESH, spec)

    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(leaf))
        for path, leaf in jax.eval_shape(migration, leaves).items()
    }


def bits(array):
    return np.asarray(array).reshape(-1).view(np.uint8).tobytes()


def same_leaves(ours, usual):
    assert ours.keys() == usual.keys()
    for path, leaf in usual.items():
        assert ours[path].sharding == leaf.sharding, path
        assert ours[path].committed == leaf.committed
        assert (ours[path].shape, ours[path].dtype) == (leaf.shape, leaf.dtype)
        assert bits(ours[path]) == bits(leaf), path
        for one, two in zip(
            ours[path].addressable_shards, leaf.addressable_shards, strict=True
        ):
            assert one.device == two.device
            assert bits(one.data) == bits(two.data)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_device_makes_the_same_bits_of_every_form_of_row(tmp_path, monkeypatch, form):
    shapes, rows, on_devices = FORMS[form]
    migration = ta.Migration(rows, sizes={"h": 4} if form == "heads" else {})
    turned = set()
    programs = accelerators._turned
    for dtype, spec in PLACES.items():
        leaves = {
            path: numbers(shape, dtype, 0 if form == "equal copies" else n)
            for n, (path, shape) in enumerate(shapes.items())
        }
        if form == "scaled":
            leaves = {"a": np.ones((16, 8), "float32")}  # of any bits some overflow
        file = tmp_path / "x.safetensors"
        ta.save(file, leaves)
        target = target_of(migration, leaves, spec)
        with counted(monkeypatch) as counts:
            usual = ta.load(file, target, migration=migration)
        with monkeypatch.context() as patch:
            force(patch)
            turned.clear()
            patch.setattr(
                accelerators,
                "_turned",
                lambda path, *rest: turned.add(path) or programs(path, *rest),
            )
            if on_devices and dtype != "bool":  # NumPy moves nothing
                patch.setattr(running, "_run_on_host", None)
            with counted(patch) as fewer:
                ours = ta.load(file, target, migration=migration)
        same_leaves(ours, usual)
        assert turned == (on_devices if dtype != "bool" else set())
        assert sum(fewer) == sum(counts)


def test_a_stack_is_made_by_one_program_for_all_layers(tmp_path, forced, monkeypatch):
    layers = {f"h.{n}.w": numbers((16, 32), "float32", n) for n in range(12)}
    file = tmp_path / "x.safetensors"
    ta.save(file, layers)
    migration = ta.Migration({"h.{n}.w : o i": "w : n i o"})
    on_device._update.cache_clear()
    monkeypatch.setattr("treeadapt.migrations.moved_array._STEP_BYTES", 1)
    found = ta.load(file, target_of(migration, layers, None), migration=migration)
    whole = np.stack([leaf.T for leaf in layers.values()])
    assert bits(found["w"]) == bits(whole)
    assert on_device._update.cache_info().misses == 1
    assert on_device._update.cache_info().hits == 11


# Reading, copying, and the memory between them.


def large(count=6):
    """Leaves whose buffers are aligned, and large enough to be filled again."""
    return {f"w{n}": numbers((512, 768), "float32", n) for n in range(count)}


def to_default(leaves):
    """Abstract leaves of JAX's default device, in another order than in the file."""
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in reversed(leaves.items())
    }


def overwriting(monkeypatch):
    """Overwrite each buffer as soon as it is given back; count them."""
    give_back = accelerators._Buffers.give_back
    counts = []

    def overwrite(self, arrays):
        for array in arrays:
            array[...] = 7
            counts.append(array.nbytes)
        give_back(self, arrays)

    monkeypatch.setattr(accelerators._Buffers, "give_back", overwrite)
    monkeypatch.setattr(accelerators, "_INFLIGHT_BYTES", 2 * 512 * 768 * 4)
    monkeypatch.setattr(accelerators, "_READ_BYTES", 2**20)
    return counts


@pytest.fixture
def copying(monkeypatch):
    """Let CPUs copy what they are given, as accelerators do."""
    put = jax.device_put
    of_callback = jax.make_array_from_callback
    monkeypatch.setattr(
        jax, "device_put", lambda x, *place, **kw: put(np.array(x), *place, **kw)
    )
    monkeypatch.setattr(
        jax,
        "make_array_from_callback",
        lambda shape, sharding, part, dtype: of_callback(
            shape, sharding, lambda index: np.array(part(index)), dtype=dtype
        ),
    )
    monkeypatch.setattr(accelerators, "_is_copied", lambda array: True)


SHARDED = NamedSharding(MESH, P("data", "model"))


@pytest.mark.parametrize("sharding", [None, SHARDED], ids=["one", "sharded"])
def test_a_buffer_is_never_filled_again_that_a_cpu_may_keep(
    tmp_path, forced, monkeypatch, sharding
):
    leaves = large()
    ta.save(tmp_path / "x.safetensors", leaves)
    like = to_default(leaves)
    if sharding is not None:
        like = {path: leaf.update(sharding=sharding) for path, leaf in like.items()}
    counts = overwriting(monkeypatch)
    found = ta.load(tmp_path / "x.safetensors", like)
    assert all(bits(found[path]) == bits(leaf) for path, leaf in leaves.items())
    assert not counts
    # The same without that law, so that this test is known to see a shared buffer.
    monkeypatch.setattr(accelerators, "_is_copied", lambda array: True)
    found = ta.load(tmp_path / "x.safetensors", like)
    assert counts
    assert any(bits(found[path]) != bits(leaf) for path, leaf in leaves.items())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, {"w{n} : a b": "x : n b a"}])
@pytest.mark.parametrize("sharding", [None, "sharded"])
def test_buffers_are_filled_again_once_they_are_copied(
    tmp_path, forced, copying, monkeypatch, rows, sharding
):
    leaves = large()
    file = tmp_path / "x.safetensors"
    ta.save(file, leaves)
    migration = None if rows is None else ta.Migration(rows)
    wanted = leaves
    if rows is not None:
        wanted = {"x": np.stack([leaf.T for leaf in leaves.values()])}
    like = to_default(wanted)
    if sharding is not None:
        spec = P(*[None] * (wanted["x"].ndim - 2 if rows else 0), "data", "model")
        places = NamedSharding(MESH, spec)
        like = {path: leaf.update(sharding=places) for path, leaf in like.items()}
    counts = overwriting(monkeypatch)
    made = []
    monkeypatch.setattr(
        accelerators,
        "empty",
        lambda shape, dtype, empty=accelerators.empty: (
            made.append(shape) or empty(shape, dtype)
        ),
    )
    found = ta.load(file, like, migration=migration)
    assert all(bits(found[path]) == bits(leaf) for path, leaf in wanted.items())
    assert counts
    if sharding is None:  # shards are smaller than what is worth keeping
        assert len(made) < len(leaves)


@pytest.mark.parametrize("kind", ["file", "store"])
@pytest.mark.parametrize("rows", [None, {"w{n} : a b": "x : n b a"}])
def test_no_more_bytes_are_in_flight_than_allowed(
    tmp_path, forced, monkeypatch, kind, rows
):
    leaves = large(8)
    size_bytes = leaves["w0"].nbytes
    most = 3 * size_bytes
    file, options = tmp_path / "x.safetensors", {}
    ta.save(file, leaves)
    if kind == "store":
        fsspec = pytest.importorskip("fsspec")
        store = fsspec.filesystem("memory")
        store.pipe_file("/x.safetensors", file.read_bytes())
        file, options = "memory://x.safetensors", {"max_inflight_bytes": 2 * most}
    monkeypatch.setattr("treeadapt.migrations.moved_array._STEP_BYTES", size_bytes)
    monkeypatch.setattr(accelerators, "_INFLIGHT_BYTES", most)
    monkeypatch.setattr(accelerators, "_READ_BYTES", 2**20)
    start, counts = accelerators._Belt._start, []

    def started(self):
        yield from start(self)
        counts.append(self._inflight_bytes)

    monkeypatch.setattr(accelerators._Belt, "_start", started)
    migration = None if rows is None else ta.Migration(rows)
    like = to_default(leaves)
    if rows is not None:
        like = target_of(migration, leaves, None)
    found = ta.load(file, like, migration=migration, **options)
    wanted = {"x": np.stack([x.T for x in leaves.values()])} if rows else leaves
    assert all(bits(found[path]) == bits(leaf) for path, leaf in wanted.items())
    assert size_bytes < max(counts) <= most


def test_reading_goes_on_while_arrays_are_copied(tmp_path, forced, monkeypatch):
    leaves = large(4)
    ta.save(tmp_path / "x.safetensors", leaves)
    monkeypatch.setattr(accelerators, "_READ_BYTES", 2**20)
    ahead, put = [], accelerators._Belt.put

    def note(self, delivery):
        ahead.append(len(self._reading))
        return put(self, delivery)

    monkeypatch.setattr(accelerators._Belt, "put", note)
    ta.load(tmp_path / "x.safetensors", to_default(leaves))
    assert ahead == [0, 1, 2, 3]


def test_large_arrays_are_read_by_several_threads_each_byte_once(
    tmp_path, forced, monkeypatch
):
    leaves = large(2)
    ta.save(tmp_path / "x.safetensors", leaves)
    monkeypatch.setattr(accelerators, "_READ_BYTES", 2**18)
    like = {
        path: leaf.update(sharding=SHARDED) for path, leaf in to_default(leaves).items()
    }
    with counted(monkeypatch) as counts:
        found = ta.load(tmp_path / "x.safetensors", like)
    assert all(bits(found[path]) == bits(leaf) for path, leaf in leaves.items())
    assert sum(counts) == sum(leaf.nbytes for leaf in leaves.values())
    assert len(counts) > 8


def test_what_cannot_be_read_is_the_error_that_it_was(tmp_path, forced, monkeypatch):
    leaves = large(3)
    file = tmp_path / "x.safetensors"
    ta.save(file, leaves)

    def fails(self, file, start_bytes, array):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(accelerators.FileArray, "_read_to", fails)
    with pytest.raises(ta.CheckpointError, match=r"x\.safetensors.*Input/output error"):
        ta.load(file, to_default(leaves))


def test_without_room_arrays_move_on_the_host_and_load_says_so(
    tmp_path, forced, monkeypatch
):
    leaves = large()
    file = tmp_path / "x.safetensors"
    ta.save(file, leaves)
    migration = ta.Migration({"w{n} : a b": "x : n b a"})
    like = target_of(migration, leaves, None)
    monkeypatch.setattr(accelerators, "_free_bytes", lambda device: 2**20)
    with pytest.warns(
        ta.TreeAdaptWarning, match=r"1 array moved on the host.*'x'"
    ) as warned:
        found = ta.load(file, like, migration=migration)
    assert warned[0].filename == __file__
    assert bits(found["x"]) == bits(np.stack([leaf.T for leaf in leaves.values()]))


def test_what_is_small_or_changes_stays_on_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    monkeypatch.setattr(accelerators, "_turned", None)
    leaves = large(2)
    file = tmp_path / "x.safetensors"
    ta.save(file, leaves)
    migration = ta.Migration({"w{n} : a b": "x : n b a"})
    like = target_of(migration, leaves, None)
    found = ta.load(file, like, migration=migration)  # too small for a program
    assert bits(found["x"]) == bits(np.stack([leaf.T for leaf in leaves.values()]))
    half = {path: leaf.update(dtype=np.float16) for path, leaf in like.items()}
    leaves = {path: np.ones((512, 768), np.float32) for path in leaves}
    ta.save(file, leaves)
    found = ta.load(file, half, migration=migration, cast=True)
    assert (np.asarray(found["x"]) == 1).all()


def test_numbers_keys_and_arrays_of_numpy_are_loaded_with_the_others(tmp_path, forced):
    tree = {
        "w": numbers((64, 32), "float32"),
        "step": 7,
        "key": jax.random.key(0),
        "host": np.arange(5),
        "none": np.zeros((0, 3), np.float32),
    }
    ta.save(tmp_path / "x.safetensors", tree)
    like = {**tree, "w": jnp.zeros((64, 32)), "step": 0, "none": jnp.zeros((0, 3))}
    found = ta.load(tmp_path / "x.safetensors", like)
    assert found["step"] == 7
    assert bits(found["w"]) == bits(tree["w"])
    assert isinstance(found["host"], np.ndarray)
    assert found["none"].shape == (0, 3)
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(tree["key"])).all()
