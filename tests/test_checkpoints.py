"""Checkpoints in each format: round trips, partial loads, and hostile files.

Ids of hazards (G5, K7, ...) refer to the table in the documentation.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import warnings
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from command import run
from flax import nnx, serialization
from marks import ties_of

import treeadapt as ta

# Orbax may leave its event loop to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

FORMATS = ("safetensors", "orbax")
ENDINGS = {name: "" if name == "orbax" else f".{name}" for name in FORMATS}


def tree():
    return {
        "layers": [{"kernel": jnp.arange(6.0).reshape(2, 3)}, {"kernel": jnp.ones(2)}],
        "bf16": jnp.array([1.5, -0.0], jnp.bfloat16),
        "fp8": np.array([0.5, 2.0, -1.0], ml_dtypes.float8_e4m3fn),
        "fp8_5": jnp.ones((2, 2), jnp.float8_e5m2),
        "scalar": np.float32(3.5),
        "count": jnp.zeros((), jnp.int32),
        "flag": np.array([True, False]),
        "wide": np.arange(3, dtype=np.float64),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }


def write(path, flat):
    """Write a flat dict to a file of any readable format."""
    if path.suffix == ".npz":
        np.savez(path, **flat)
    elif path.suffix == ".msgpack":
        path.write_bytes(serialization.msgpack_serialize(dict(flat)))
    else:
        ta.save(path, flat)


@pytest.fixture(params=FORMATS)
def file(request, tmp_path):
    """A name for a checkpoint in each format."""
    return tmp_path / f"model{ENDINGS[request.param]}"


def same(one, two):
    assert not ta.tree_diff(one, two, values=True)


def zeros_like(tree):
    return jax.tree.map(lambda x: np.zeros(np.shape(x), x.dtype), tree)


@pytest.mark.hazard("G5")
def test_every_dtype_comes_back_bit_by_bit(file):
    ta.save(file, tree())
    again = ta.load(file, zeros_like(tree()))
    same(again, tree())
    assert jax.tree.structure(again) == jax.tree.structure(tree())


def test_metadata_gives_shapes_and_dtypes(file):
    ta.save(file, tree())
    found = ta.read_metadata(file)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in found.values())
    assert not ta.tree_diff(found, tree())


@pytest.mark.hazard("A20")
def test_odd_names_come_back(file):
    odd = {
        "a.b": np.ones(1),
        "a": {"b": np.full(1, 2.0)},
        "..": {"..": {"evil": np.full(1, 3.0)}},
        "0": np.full(1, 4.0),
        "sp ce%2F": np.full(1, 5.0),
        "ü\n\x1b": np.full(1, 6.0),
        "": np.full(1, 7.0),
        "x//y": np.full(1, 8.0),
        "C:\\": np.full(1, 9.0),
        "/abs": np.full(1, 10.0),
    }
    ta.save(file, odd)
    same(ta.load(file, zeros_like(odd)), odd)
    assert sorted(os.listdir(file.parent)) == [file.name]


@pytest.mark.hazard("K9")
def test_no_stored_name_leads_outside_the_folder(tmp_path):
    paths = ("../../evil", "/abs", "a/../b", "%E", "%", "\x00", "~", "C:\\")
    odd = {path: np.full(1, n) for n, path in enumerate(paths)}
    ta.save(tmp_path / "folder", odd)
    names = json.loads((tmp_path / "folder" / "_METADATA").read_text())
    for leaf in names["tree_metadata"].values():
        for segment in leaf["key_metadata"]:
            assert segment["key"]
            assert {*segment["key"]}.isdisjoint("./~\x00\\")
    same(ta.load(tmp_path / "folder", zeros_like(odd)), odd)


def test_a_leaf_above_another_can_be_stored(file):
    flat = {"a": np.ones(1), "a/b": np.ones(2)}
    ta.save(file, flat)
    same(ta.load(file, zeros_like(flat)), flat)


def test_tied_leaves_are_stored_once(tmp_path):
    weight = jnp.ones((64, 64))
    tied = {"embed": weight, "head": {"weight": weight}, "other": jnp.ones(1)}
    path = tmp_path / "x.safetensors"
    ta.save(path, tied)
    assert path.stat().st_size < 1.5 * weight.nbytes
    assert ties_of(path) == {"head/weight": "embed"}
    again = ta.load(path, jax.eval_shape(lambda: tied))
    assert again["embed"] is again["head"]["weight"]
    same(again, tied)
    run("convert", path, tmp_path / "y.safetensors")
    assert ties_of(tmp_path / "y.safetensors") == {"head/weight": "embed"}


FORMS = ("x.safetensors", "x", "shards")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("make", [np.ones, jnp.ones])
def test_ties_of_a_file_bind_only_what_is_tied_in_the_target(name, make, tmp_path):
    weight = make((4, 4))
    tied, apart = {"a": weight, "b": weight}, {"a": make((4, 4)), "b": make((4, 4))}
    shards = {"max_shard_bytes": 2**20} if name == "shards" else {}
    ta.save(tmp_path / name, tied, **shards)
    again = ta.load(tmp_path / name, tied)
    assert again["a"] is again["b"]
    again = ta.load(tmp_path / name, apart)
    assert again["a"] is not again["b"]
    assert not np.shares_memory(again["a"], again["b"])
    same(again, tied)
    if make is np.ones:
        again["a"][0] = 7
        assert again["b"][0, 0] == 1
    # A target that is tied does not bind what a file has twice.
    ta.save(tmp_path / name, {"a": weight, "b": 2 * weight}, **shards)
    again = ta.load(tmp_path / name, tied)
    assert (again["a"][0, 0], again["b"][0, 0]) == (1, 2)


def test_tied_leaves_are_stored_twice_by_orbax(tmp_path):
    weight = jnp.ones(3)
    tied = {"a": weight, "b": weight}
    ta.save(tmp_path / "x", tied)
    same(ta.load(tmp_path / "x", zeros_like(tied)), tied)


@pytest.mark.slow
@pytest.mark.hazard("G6")
def test_prng_keys_are_stored_as_integers(file):
    keys = {"key": jax.random.key(3), "many": jax.random.split(jax.random.key(1), 4)}
    keys["rbg"] = jax.random.key(5, impl="rbg")
    ta.save(file, keys)
    for target in (jax.tree.map(jnp.zeros_like, keys), jax.eval_shape(lambda: keys)):
        again = ta.load(file, target)
        assert again["rbg"].dtype == keys["rbg"].dtype
        same(again, keys)


@pytest.mark.slow
@pytest.mark.hazard("F7")
def test_integer_keys_come_back_as_integers(file):
    class Net(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])

    pure = nnx.to_pure_dict(nnx.state(Net(0)))
    assert list(pure["layers"]) == [0, 1]
    ta.save(file, pure)
    again = ta.load(file, zeros_like(pure))
    assert jax.tree.structure(again) == jax.tree.structure(pure)
    same(again, pure)
    same(ta.load(file, Net(1)), Net(0))


@pytest.mark.slow
def test_a_model_comes_back_in_its_classes(file):
    model = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
    ta.save(file, model)
    again = ta.load(file, eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(1)))
    same(again, model)
    assert again.activation is model.activation
    abstract = eqx.filter_eval_shape(lambda: model)
    assert isinstance(ta.load(file, abstract).layers[0].weight, jax.Array)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_training_continues_from_restored_optimizer_state(file):
    params = {"w": jnp.ones((2, 3)), "head": {"b": jnp.ones(3)}}
    tx = ta.partition({"fast": optax.adam(1e-1), "slow": optax.adam(1e-2)}, RULES)
    grads = jax.tree.map(jnp.ones_like, params)
    _, state = tx.update(grads, tx.init(params), params)
    ta.save(file, state)
    again = ta.load(file, jax.eval_shape(tx.init, params))
    same(tx.update(grads, again, params), tx.update(grads, state, params))


RULES = {"head": "fast", "**": "slow"}


def test_leaves_go_to_the_shardings_of_the_target(file):
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = {"w": jax.device_put(jnp.arange(8.0), sharding)}
    ta.save(file, whole)
    abstract = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
    for target in (whole, abstract):
        again = ta.load(file, target)["w"]
        assert again.sharding == sharding
        np.testing.assert_array_equal(again, whole["w"])


def test_one_error_reports_all_misfits(file):
    ta.save(
        file,
        {
            "kernal": np.ones(2),
            "shape": np.ones((2, 3)),
            "type": np.ones(2, np.float32),
            "good": np.ones(1),
        },
    )
    target = {
        "kernel": np.zeros(2),
        "shape": np.zeros((3, 2)),
        "type": np.zeros(2, ml_dtypes.bfloat16),
        "good": np.zeros(1),
    }
    report = ta.compare_checkpoint(file, target)
    assert (report.restored, report.missing, report.unexpected, report.fits) == (
        ("good",),
        ("kernel",),
        ("kernal",),
        False,
    )
    assert report.misshaped == {"shape": ("float64[2,3]", "float64[3,2]")}
    assert report.retyped == {"type": ("float32[2]", "bfloat16[2]")}
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(file, target)
    text = str(caught.value)
    assert "'kernel' (stored is 'kernal')" in text
    assert "'shape': float64[2,3], the target has float64[3,2]" in text
    with pytest.warns(ta.TreeAdaptWarning, match="'kernel', 'shape', 'type'"):
        again = ta.load(file, target, strict=False)
    assert again["kernel"] is target["kernel"]
    assert again["shape"] is target["shape"]
    assert again["good"].tolist() == [1]


@pytest.mark.slow
def test_many_misfits_are_a_short_error(tmp_path):
    ta.save(tmp_path / "x.safetensors", {"a": np.ones(1)})
    target = {f"layers/{n}/{'x' * 50}": np.zeros(1) for n in range(5_000)}
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(tmp_path / "x.safetensors", target)
    assert len(str(caught.value).encode()) <= 4_000


def test_a_failed_save_leaves_the_old_file(file):
    ta.save(file, {"a": np.ones(1)})
    bad = {"a": np.ones(1), "b": np.array([object()])}
    with pytest.raises(ta.CheckpointError):
        ta.save(file, bad)
    assert ta.load(file, {"a": np.zeros(1)})["a"].tolist() == [1]
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_a_new_file_has_the_usual_mode(tmp_path):
    path = tmp_path / "x.safetensors"
    (tmp_path / "other").touch()
    ta.save(path, {"a": np.ones(1)})
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    path.chmod(0o640)
    ta.save(path, {"a": np.ones(1)})
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_folder_that_is_not_a_checkpoint_is_never_replaced(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years")
    for options in ({}, {"max_shard_bytes": 8}):
        with pytest.raises(ta.CheckpointError, match="folder"):
            ta.save(folder, {"a": np.ones(1)}, **options)
    assert (folder / "thesis.txt").read_text() == "years"


def test_a_masked_array_is_refused(file):
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    with pytest.raises(ta.CheckpointError, match="'a' is a masked array, whose mask"):
        ta.save(file, {"a": masked})
    ta.save(file, {"a": masked.filled(0)})


def test_what_changes_in_place_is_refused(file):
    ref = jax.new_ref(jnp.ones(2))
    with pytest.raises(ta.CheckpointError, match=r"'a' is a Ref.*ref\[\.\.\.\]"):
        ta.save(file, {"a": ref})
    ta.save(file, {"a": ref[...]})


@pytest.mark.parametrize("dtype", [">f4", "U3", "M8[D]", "O"])
def test_a_dtype_that_no_checkpoint_holds_is_refused_with_a_way_out(file, dtype):
    tree = {"a": np.zeros(2, dtype), "b": np.ones(2)}
    with pytest.raises(ta.CheckpointError, match=r"'a' is of dtype .* out with where="):
        ta.save(file, tree)
    ta.save(file, tree, where="b")


def test_a_leaf_without_value_is_refused(file):
    with pytest.raises(ta.CheckpointError, match="'a' has no value"):
        ta.save(file, {"a": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert not file.exists()


def test_a_leaf_without_elements(tmp_path):
    empty = {"a": np.zeros((0, 3), ml_dtypes.bfloat16), "f": np.zeros((0,), "f4")}
    ta.save(tmp_path / "x.safetensors", empty)
    same(ta.load(tmp_path / "x.safetensors", zeros_like(empty)), empty)
    with pytest.raises(ta.CheckpointError, match="'a' has no elements"):
        ta.save(tmp_path / "x", empty)
    assert not (tmp_path / "x").exists()


def test_dtypes_that_safetensors_lacks(tmp_path):
    wide = {"a": np.full(1, 1 + 2j, np.complex128)}
    with pytest.raises(ta.CheckpointError, match="Save as an Orbax folder"):
        ta.save(tmp_path / "x.safetensors", wide)
    ta.save(tmp_path / "x", wide)
    same(ta.load(tmp_path / "x", zeros_like(wide)), wide)


@pytest.mark.parametrize("there", FORMATS)
@pytest.mark.parametrize("here", FORMATS)
def test_formats_are_copied_into_each_other(here, there, tmp_path):
    one, two = tmp_path / f"one{ENDINGS[here]}", tmp_path / f"two{ENDINGS[there]}"
    ta.save(one, tree())
    run("convert", one, two)
    same(ta.load(two, zeros_like(tree())), tree())


# Files that other programs wrote.


def test_files_of_the_libraries_themselves(tmp_path):
    flat = {"a/b": np.ones((2, 3), np.float32), "a/c": np.arange(3)}
    safetensors.numpy.save_file(flat, tmp_path / "x.safetensors", {"format": "pt"})
    np.savez(tmp_path / "x.npz", **flat)
    np.savez_compressed(tmp_path / "z.npz", **flat)
    state = {"a": {"b": flat["a/b"], "c": flat["a/c"]}, "step": 3, "none": None}
    (tmp_path / "x.msgpack").write_bytes(serialization.msgpack_serialize(state))
    for name in ("x.safetensors", "x.npz", "z.npz"):
        same(ta.load(tmp_path / name, zeros_like(flat)), flat)
    again = ta.load(tmp_path / "x.msgpack", {**zeros_like(flat), "step": 0})
    assert again.pop("step") == 3
    same(again, flat)


def test_our_files_are_read_by_the_libraries(tmp_path):
    flat = {"a/b": np.ones((2, 3), np.float32), "c": np.arange(3)}
    ta.save(tmp_path / "x.safetensors", flat)
    same(safetensors.numpy.load_file(tmp_path / "x.safetensors"), flat)


@pytest.mark.parametrize("ending", ["npz", "msgpack"])
def test_formats_of_numpy_and_flax_are_read_and_never_written(ending, tmp_path):
    path = tmp_path / f"x.{ending}"
    with pytest.raises(ta.CheckpointError, match=r"\.safetensors.* Orbax"):
        ta.save(path, {"a": np.ones(1)})
    assert list(tmp_path.iterdir()) == []
    flat = {"a/b": np.ones((2, 3), np.float32), "c": np.arange(3), "d e.f": np.ones(1)}
    write(path, flat)
    assert list(ta.read_metadata(path)) == list(flat)
    same(ta.load(path, zeros_like(flat)), flat)
    run("convert", path, tmp_path / "y.safetensors")
    same(ta.load(tmp_path / "y.safetensors", zeros_like(flat)), flat)


@pytest.mark.hazard("K19")
def test_orbax_folders_of_others(tmp_path):
    state = {
        "params": {"dense.0": [jnp.ones(2), jnp.ones(3)]},
        "opt": optax.adam(1e-3).init({"w": jnp.ones(2)}),
        "%41": jnp.ones(1),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", state)
    found = ta.read_metadata(tmp_path / "x")
    assert not ta.tree_diff(found, state)
    same(ta.load(tmp_path / "x", jax.eval_shape(lambda: state)), state)
    part = ta.load(tmp_path / "x", zeros_like(state), where="opt/0/mu/w")
    assert part["params"]["dense.0"][0].tolist() == [0, 0]


def test_a_step_of_a_checkpoint_manager(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
    assert list(ta.read_metadata(tmp_path / "run" / "7")) == ["w"]


def test_another_byte_order_is_converted(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.arange(3, dtype=">f4"))
    found = ta.load(tmp_path / "x.npz", {"a": np.zeros(3, "f4")})
    assert found["a"].tolist() == [0, 1, 2]


# Hostile files.


def header(text, data=b"", length=None):
    text = text.encode() if isinstance(text, str) else json.dumps(text).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape=(1,), begin=0, end=4, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def zipped(**members):
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/"), data)
    return raw.getvalue()


def npy(array, **options):
    raw = io.BytesIO()
    np.lib.format.write_array(raw, array, **options)
    return raw.getvalue()


def ext(shape=(1,), dtype="float32", data=b"0000"):
    inner = msgpack.packb((shape, dtype, data))
    return msgpack.packb({"a": msgpack.ExtType(1, inner)})


class Harm:
    def __reduce__(self):
        return (os.abort, ())


TWICE = '{"a":%s,"a":%s}' % ((json.dumps(tensor()),) * 2)
HOSTILE = {
    "empty": ("safetensors", b""),
    "only a length": ("safetensors", b"\x10\0\0"),
    "huge header": ("safetensors", struct.pack("<Q", 2**40) + b"{}"),
    "header past the end": ("safetensors", header({}, length=99)),
    "a name twice": ("safetensors", header(TWICE, b"0000")),
    "huge shape": ("safetensors", header({"a": tensor((2**40,))}, b"0000")),
    "product overflow": ("safetensors", header({"a": tensor((2**40,) * 9)}, b"0000")),
    "negative shape": ("safetensors", header({"a": tensor((-1,))}, b"0000")),
    "shape of text": ("safetensors", header({"a": tensor("ab")}, b"0000")),
    "true in a shape": ("safetensors", header({"a": tensor((True,))}, b"0000")),
    "offsets past the end": ("safetensors", header({"a": tensor(end=4)}, b"00")),
    "offsets backward": ("safetensors", header({"a": tensor(begin=8)}, b"0" * 9)),
    "unknown dtype": ("safetensors", header({"a": tensor(dtype="X")}, b"0000")),
    "list for a table": ("safetensors", header("[1]")),
    "number for a tensor": ("safetensors", header({"a": 1})),
    "deep header": ("safetensors", header("[" * 100_000)),
    "no utf-8": ("safetensors", struct.pack("<Q", 2) + b"\xff\xfe"),
    "huge number": ("safetensors", header('{"a":' + "1" * 5_000 + "}")),
    "no zip": ("npz", b"PK nonsense"),
    "empty zip file": ("npz", b""),
    "a pickle": ("npz", pickle.dumps(Harm())),
    "an object array": ("npz", zipped(a_npy=b"")),
    "no array in it": ("npz", zipped(readme=b"hello")),
    "an empty msgpack": ("msgpack", b""),
    "msgpack cut": ("msgpack", ext()[:-2]),
    "msgpack and more": ("msgpack", ext() + b"\x01"),
    "msgpack of huge shape": ("msgpack", ext((2**40,))),
    "msgpack of negative shape": ("msgpack", ext((-1, -1))),
    "msgpack of objects": ("msgpack", ext(dtype="object")),
    "msgpack of O": ("msgpack", ext(dtype="O")),
    "msgpack of other size": ("msgpack", ext((3,))),
    "msgpack without pieces": (
        "msgpack",
        msgpack.packb(
            {"a": {"__msgpack_chunked_array__": True, "shape": {"0": 9}, "chunks": {}}}
        ),
    ),
    "msgpack huge map": ("msgpack", b"\xdf\xff\xff\xff\xff"),
    "msgpack huge list": ("msgpack", b"\xdd\xff\xff\xff\xff"),
    "msgpack deeper": ("msgpack", b"\x81\xa1a" * 100_000),
    "msgpack of a number": ("msgpack", b"\x01"),
    "msgpack other extension": (
        "msgpack",
        msgpack.packb({"a": msgpack.ExtType(9, b"")}),
    ),
    "msgpack bad extension": (
        "msgpack",
        msgpack.packb({"a": msgpack.ExtType(1, b"x")}),
    ),
}


def hostile(case, tmp_path):
    """Write one of the hostile files."""
    kind, data = HOSTILE[case]
    if case == "an object array":
        array = np.array([Harm()], object)
        data = zipped(**{"a.npy": npy(array, allow_pickle=True)})
    path = tmp_path / f"x.{kind}"
    path.write_bytes(data)
    return path


@pytest.mark.hazard("K7", "K8", "K11", "K12", "K16")
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_short_errors(case, tmp_path):
    path = hostile(case, tmp_path)
    for read in (ta.read_metadata, lambda p: ta.load(p, {"a": np.zeros(1, "f4")})):
        with pytest.raises(ta.CheckpointError) as caught:
            read(path)
        text = str(caught.value)
        assert len(text) < 600
        assert len(text.splitlines()) <= 2
    run("convert", path, tmp_path / "y.safetensors", code=2)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "marks",
    [
        "{}",
        "[]",
        "3",
        '{"ties": {}}',
        '{"kinds": {}}',
        '{"ties": [], "kinds": {}}',
        '{"ties": {}, "kinds": "number"}',
        '{"ties": {"b": ["a"]}, "kinds": {}}',
        '{"ties": {}, "kinds": {"a": 3}}',
    ],
)
def test_malformed_marks_are_named(marks, tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.ones(2)}, path, {"treeadapt": marks})
    table = "(ties|kinds)"
    with pytest.raises(ta.CheckpointError, match=f"treeadapt has no table of {table}"):
        ta.load(path)
    folder = tmp_path / "x"
    ta.save(folder, {"a": np.ones(2)})
    file = folder / "_METADATA"
    document = json.loads(file.read_text())
    document["custom_metadata"]["treeadapt"] = json.loads(marks)
    file.write_text(json.dumps(document))
    with pytest.raises(ta.CheckpointError, match=f"treeadapt has no table of {table}"):
        ta.load(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is read as it is now:treeadapt.TreeAdaptWarning")
@pytest.mark.parametrize("name", ["safetensors", "npz", "msgpack"])
def test_a_cut_or_flipped_file_either_raises_or_loads(name, tmp_path):
    path = tmp_path / f"x.{name}"
    flat = {
        "a/b": np.arange(4.0, dtype=np.float32),
        "c": np.ones(2, np.float16),
    }
    write(path, flat)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [good[:n] for n in range(0, len(good), 3)]
    for _ in range(150):
        data = bytearray(good)
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(data))
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        try:
            ta.load(path, zeros_like(flat))
        except ta.CheckpointError:
            refused += 1
    assert refused > len(damaged) // 3


@pytest.mark.slow
@pytest.mark.hazard("K11")
def test_a_bomb_is_not_read(tmp_path):
    array = np.zeros(5 * 10**6)
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy(array))
    path = tmp_path / "x.npz"
    path.write_bytes(raw.getvalue())
    assert ta.read_metadata(path)["a"].shape == array.shape
    with pytest.raises(ta.CheckpointError, match="another shape"):
        ta.load(path, {"a": np.zeros(3)})


def test_a_repeated_name_in_an_archive(tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", npy(np.ones(1)))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.npy", npy(np.ones(1)))
    with pytest.raises(ta.CheckpointError, match="occurs twice: 'a'"):
        ta.read_metadata(path)


def test_arrays_of_an_archive_that_are_not_numbers_are_left_out(tmp_path):
    path = tmp_path / "x.npz"
    others = {
        "config": np.array({"layers": 2}, object),
        "names": np.array(["encoder", "head"]),
        "raw": np.array([b"x"]),
        "when": np.array(["2020-01-01"], "M8[D]"),
        "records": np.zeros(2, [("a", "f4")]),
    }
    np.savez(path, w=np.ones(2), **others)
    for read in (ta.load, ta.read_metadata):
        with pytest.warns(
            ta.TreeAdaptWarning, match="'config' is left out, because obj"
        ):
            assert list(read(path)) == ["w"]
    with pytest.warns(
        ta.TreeAdaptWarning, match="because str224 is not a dtype of numbers"
    ):
        assert ta.load(path, {"w": np.zeros(2)})["w"].tolist() == [1, 1]
    np.savez(path, **others)
    with pytest.raises(ta.CheckpointError, match="it holds no numbers: 'config'"):
        ta.load(path)


def test_metadata_reads_no_array(tmp_path):
    path = tmp_path / "x.npz"
    write(path, {"a": np.zeros(10**6), "b": np.ones(3)})
    data = bytearray(path.read_bytes())
    data[5_000:6_000] = b"\xff" * 1_000  # within the first array
    path.write_bytes(data)
    assert list(ta.read_metadata(path)) == ["a", "b"]
    with pytest.raises(ta.CheckpointError, match="CRC"):
        ta.load(path, {"a": np.zeros(10**6), "b": np.zeros(3)})


@pytest.fixture
def folder(tmp_path):
    ta.save(tmp_path / "x", {"a": {"b": np.ones(4, np.float32)}, "c": np.ones(2)})
    return tmp_path / "x"


@pytest.mark.hazard("K10")
def test_an_orbax_folder_with_a_link_is_refused(folder, tmp_path):
    (tmp_path / "secret").write_text("SECRET")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ta.CheckpointError, match="is a link"):
        ta.read_metadata(folder)


@pytest.mark.hazard("K9")
@pytest.mark.parametrize("key", ["..", "../evil", "/abs", "a\\b", "\0"])
def test_an_orbax_name_that_leads_outside_is_refused(folder, key):
    document = json.loads((folder / "_METADATA").read_text())
    entry = next(iter(document["tree_metadata"].values()))
    entry["key_metadata"][0]["key"] = key
    (folder / "_METADATA").write_text(json.dumps(document))
    with pytest.raises(ta.CheckpointError, match="leads out"):
        ta.read_metadata(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, '{"tree_metadata": {"a": 1}}', "\x00"]
)
def test_damaged_orbax_metadata(folder, text):
    (folder / "_METADATA").write_text(text)
    for read in (ta.read_metadata, lambda p: ta.load(p, {"c": np.zeros(2)})):
        with pytest.raises(ta.CheckpointError) as caught:
            read(folder)
        assert len(str(caught.value)) < 800


def test_an_orbax_folder_without_its_data(folder):
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in ("_METADATA", "_CHECKPOINT_METADATA"):
            path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ta.CheckpointError):
        ta.load(folder, {"a": {"b": np.zeros(4, np.float32)}, "c": np.zeros(2)})


def test_names_that_are_not_checkpoints(tmp_path):
    (tmp_path / "x.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dir.npz").mkdir()
    for name in ("x.txt", "folder", "dir.npz", "nothing.npz", "nothing"):
        with pytest.raises(ta.CheckpointError):
            ta.read_metadata(tmp_path / name)
    with pytest.raises(ta.CheckpointError, match="no folder"):
        ta.save(tmp_path / "no" / "x", {"a": np.ones(1)})
    with pytest.raises(ta.CheckpointError, match="unknown ending"):
        ta.save(tmp_path / "x.pkl", {"a": np.ones(1)})
    with pytest.raises(ta.CheckpointError, match=r"Write \.safetensors"):
        ta.save(tmp_path / "x.bin", {"a": np.ones(1)})
    (tmp_path / "folder" / "pytorch_model.bin").touch()
    for name in ("folder", "folder/pytorch_model.bin"):
        with pytest.raises(ta.CheckpointError, match="it is empty"):
            ta.read_metadata(tmp_path / name)


@pytest.mark.hazard("K14")
def test_hostile_names_do_not_reach_the_terminal(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"a\n\x1b[31m": tensor(end=9)}, b"0000"))
    with pytest.raises(ta.CheckpointError) as caught:
        ta.read_metadata(path)
    assert "\x1b" not in str(caught.value)


@pytest.mark.slow
def test_no_format_library_is_imported_until_a_file_needs_it(fresh):
    script = (
        "import sys, treeadapt.checkpoints.save_load\n"
        "assert not {'orbax', 'safetensors', 'flax', 'msgpack'} & set(sys.modules)"
    )
    run = fresh.run(script)
    assert run.returncode == 0, run.stderr


def test_processes_that_cannot_talk_do_not_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ta.CheckpointError, match=r"Call jax\.distributed\.initialize"):
        ta.save(tmp_path / "checkpoint", {"w": jnp.ones(2)})
    assert list(tmp_path.iterdir()) == []


def test_numpy_scalars_that_are_one_object_are_not_tied(tmp_path):
    """NumPy has one ``True_``, so that a tie would depend on values."""
    trees = [{"a": np.True_, "b": value} for value in (np.True_, np.False_)]
    for number, tree in enumerate(trees):
        ta.save(tmp_path / f"{number}.schema.toml", tree)
    one, two = ((tmp_path / f"{n}.schema.toml").read_text() for n in (0, 1))
    assert one == two


@pytest.mark.parametrize("name", ["m.safetensors", "folder"])
@pytest.mark.parametrize("dtype", ["uint2", "uint4", "float8_e4m3"])
def test_what_no_format_writes_is_saved_as_the_error_says(tmp_path, dtype, name):
    array = jnp.arange(4).astype(dtype)
    with pytest.raises(ta.CheckpointError) as caught:
        ta.save(tmp_path / name, {"w": array})
    (wider,) = re.findall(r'astype\("(.*?)"\)', str(caught.value))
    assert "cast=True" in str(caught.value)
    ta.save(tmp_path / name, {"w": array.astype(wider)})
    loaded = ta.load(tmp_path / name, {"w": array}, cast=True)["w"]
    assert loaded.dtype == dtype
    assert np.asarray(loaded).tolist() == np.asarray(array).tolist()


@pytest.mark.parametrize("dtype", ["int2", "int4", "float8_e3m4", "float4_e2m1fn"])
def test_what_safetensors_lacks_is_written_by_orbax(tmp_path, dtype):
    array = jnp.zeros(4, dtype)
    with pytest.raises(ta.CheckpointError, match="Save as an Orbax folder"):
        ta.save(tmp_path / "m.safetensors", {"w": array})
    ta.save(tmp_path / "folder", {"w": array})
    assert ta.load(tmp_path / "folder")["w"].dtype == dtype


@pytest.mark.parametrize(
    ("tree", "is_said"),
    [
        ({}, True),
        ([], True),
        ({"a": None, "act": jax.nn.relu}, True),
        ((optax.EmptyState(), optax.EmptyState()), False),
        ({"s": optax.sgd(0.1).init({})}, False),
    ],
)
def test_a_checkpoint_of_nothing_is_said(tmp_path, tree, is_said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ta.save(tmp_path / "x.safetensors", tree)
    texts = [str(each.message) for each in caught]
    assert [text.startswith("Nothing is saved") for text in texts] == [True] * is_said
    assert ta.load(tmp_path / "x.safetensors") == {}


@pytest.mark.parametrize(
    "content", [b"hello, not a checkpoint", b"hello", b"\x80\x04\x95 of pickle"]
)
def test_a_file_that_is_not_of_safetensors_is_said_to_be_none(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(
        ta.CheckpointError, match="it is not a safetensors file"
    ) as caught:
        ta.load(tmp_path / "x.safetensors")
    assert f"it begins with {content[:9]!r}" in str(caught.value)
    assert ("pickles" in str(caught.value)) == (content[0] == 0x80)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("missing", []),
        ("modle", ["model.safetensors", "model.npz"]),
        ("k", ["k.safetensors"]),
        ("q", []),
    ],
)
def test_a_name_is_near_by_what_is_before_its_ending(tmp_path, typed, meant):
    for name in ("k.safetensors", "e.safetensors", "model.safetensors", "model.npz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ta.CheckpointError, match="There is no checkpoint") as caught:
        ta.load(tmp_path / f"{typed}.safetensor")
    said = str(caught.value).partition("Did you mean ")[2].rstrip("?").split(", ")
    paths = [repr(str(tmp_path / name)) for name in meant]
    assert sorted(said) == sorted(paths or [""])
