"""Files of PyTorch: what is read of them, and that nothing in them is ever run.

The files are written byte by byte; ``tests/models`` has those that PyTorch writes.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import sys
import tracemalloc
import warnings
import zipfile
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from command import run
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch_archives import (
    KINDS,
    Storages,
    archive,
    parameter,
    save,
    saved,
    several,
    table,
    tensor,
    text,
    value_of,
)

import treeadapt as ta

RANDOM = np.random.default_rng(0)
ARRAYS = {
    "w": RANDOM.normal(size=(4, 5)).astype("f4"),
    "b": RANDOM.normal(size=7).astype(ml_dtypes.bfloat16),
    "h": RANDOM.normal(size=(2, 3)).astype("f2"),
    "n": np.array(3, "i8"),
    "m": np.array([True, False]),
    "c": np.array([1 + 2j], "c8"),
    "z": np.zeros((0, 3), "f4"),
}


def same(tree, arrays):
    flat = ta.to_flat_dict(tree)
    assert {*flat} == {*arrays}
    for name, array in arrays.items():
        assert flat[name].dtype == array.dtype, name
        np.testing.assert_array_equal(flat[name], array, strict=True)


def bin_file(tmp_path, pickled, storages=None, name="pytorch_model.bin", **how):
    file = tmp_path / name
    file.write_bytes(archive(pickled, storages or {}, **how))
    return file


# What is read


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.pth", "x.ckpt", "x"])
def test_a_state_dict_is_read_by_its_content(name, tmp_path):
    save(tmp_path / name, ARRAYS)
    same(ta.load(tmp_path / name), ARRAYS)
    assert "all         7 " in run("show", tmp_path / name)
    if "." in name:
        same(ta.load(tmp_path), ARRAYS)


def test_content_decides_before_the_ending(tmp_path):
    save(tmp_path / "x.safetensors", ARRAYS)
    same(ta.load(tmp_path / "x.safetensors"), ARRAYS)
    ta.save(tmp_path / "y.safetensors", {"w": np.ones(2)})
    (tmp_path / "y.safetensors").rename(tmp_path / "y.pt")
    same(ta.load(tmp_path / "y.pt"), {"w": np.ones(2)})
    with (tmp_path / "z.pth").open("wb") as file:
        np.savez(file, w=np.ones(2))
    same(ta.load(tmp_path / "z.pth"), {"w": np.ones(2)})


@pytest.mark.parametrize("kind", [*KINDS])
def test_every_dtype_of_a_storage(kind, tmp_path):
    array = np.arange(6).reshape(2, 3).astype(kind)
    save(tmp_path / "x.pt", {"a": array})
    same(ta.load(tmp_path / "x.pt"), {"a": array})


@pytest.mark.parametrize(
    "kind", ["uint16", "uint64", "float8_e4m3fn", "float8_e8m0fnu"]
)
def test_dtypes_without_a_class_of_storages(kind, tmp_path):
    array = np.arange(1, 7).astype(kind)
    more = [f"ctorch\n{kind}\n".encode()]
    pickled = tensor(
        "0", "Untyped", array.nbytes, (3,), offset=2, more=more, version="_v3"
    )
    file = bin_file(tmp_path, table({"a": pickled}), {"0": array})
    same(ta.load(file), {"a": array[2:5]})


def test_parameters_lists_and_numbers(tmp_path):
    array = np.ones(3, "f4")
    tree = {
        "state_dict": table({"l.weight": parameter(tensor("0", "Float", 3, (3,)))}),
        "optimizer": table({"state": table({0: table({"step": value_of(7)})})}),
        "groups": value_of([{"lr": 0.5, "amsgrad": False, "betas": [0.9, 0.99]}]),
        "name": value_of("adamw"),
        "best": value_of(None),
    }
    file = bin_file(tmp_path, table(tree), {"0": array})
    flat = ta.to_flat_dict(ta.load(file))
    assert {name: leaf.tolist() for name, leaf in flat.items()} == {
        "state_dict/l.weight": [1.0, 1.0, 1.0],
        "optimizer/state/0/step": 7,
        "groups/0/lr": 0.5,
        "groups/0/amsgrad": False,
        "groups/0/betas/0": 0.9,
        "groups/0/betas/1": 0.99,
    }
    target = {"optimizer": {"state": {"0": {"step": 0}}}}
    read = ta.load(file, target, where="optimizer/state/**")
    assert read == {"optimizer": {"state": {"0": {"step": 7}}}}


def views(array) -> dict[str, tuple[Any, ...]]:
    """Shape, strides and offset of views of 24 numbers, and what they show."""
    grid = array.reshape(4, 6)
    return {
        "transposed": ((6, 4), (1, 6), 0, grid.T),
        "every other": ((2, 3), (12, 2), 1, grid[::2, 1::2]),
        "a column": ((4,), (6,), 5, grid[:, 5]),
        "repeated": ((3, 6), (0, 1), 6, np.broadcast_to(grid[1], (3, 6))),
        "one number": ((2, 2), (0, 0), 3, np.full((2, 2), array[3])),
        "moved": ((3, 4, 2), (2, 6, 1), 0, array.reshape(4, 3, 2).transpose(1, 0, 2)),
        "one long": ((1, 6), (99, 1), 18, grid[3:]),
        "a number": ((), (), 23, grid[3, 5]),
        "none": ((0, 3), (3, 1), 0, np.zeros((0, 3), array.dtype)),
    }


@pytest.mark.parametrize("block", [8, 2**24])
def test_views_are_read_as_what_they_show(block, tmp_path, monkeypatch):
    monkeypatch.setattr("treeadapt.checkpoints.strided_array._BLOCK_BYTES", block)
    array = RANDOM.normal(size=24).astype("f4")
    wanted = views(array)
    pickled = {
        name: tensor("0", "Float", 24, shape, strides, offset)
        for name, (shape, strides, offset, _) in wanted.items()
    }
    file = bin_file(tmp_path, table(pickled), {"0": array})
    same(ta.load(file), {name: np.asarray(view[-1]) for name, view in wanted.items()})
    rows = ta.Migration({"transposed : a b": "new : b a", "{rest:**}": None})
    same(ta.load(file, migration=rows), {"new": array.reshape(4, 6)})


def test_each_device_reads_its_part_of_a_view(tmp_path):
    array = RANDOM.normal(size=64).astype("f4")
    file = bin_file(
        tmp_path, table({"a": tensor("0", "Float", 64, (8, 8), (1, 8))}), {"0": array}
    )
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    for spec in [("x", "y"), ("y",), (None, "x"), ()]:
        place = NamedSharding(mesh, PartitionSpec(*spec))
        target = {"a": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=place)}
        leaf = ta.load(file, target)["a"]
        assert leaf.sharding == place
        np.testing.assert_array_equal(leaf, array.reshape(8, 8).T)


def test_views_that_are_the_same_are_tied(tmp_path):
    array = np.ones((2, 3), "f4")
    leaf = tensor("0", "Float", 6, (2, 3))
    other = tensor("0", "Float", 6, (3, 2))
    file = bin_file(tmp_path, table({"a": leaf, "b": leaf, "c": other}), {"0": array})
    tree = ta.load(file)
    assert tree["a"] is tree["b"]
    assert tree["c"].shape == (3, 2)
    assert "Tied" in run("show", file)


@pytest.mark.slow
def test_a_large_transpose_is_not_in_memory_twice(tmp_path):
    array = np.arange(2**22, dtype="f4")  # 16 MiB
    leaf = tensor("0", "Float", 2**22, (2**11, 2**11), (1, 2**11))
    file = bin_file(tmp_path, table({"a": leaf}), {"0": array})
    ta.load(file)
    tracemalloc.start()
    loaded = ta.load(file)["a"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(loaded, array.reshape(2**11, 2**11).T)
    assert peak <= array.nbytes + 2**24 + 2**20


@pytest.mark.parametrize("is_turned", [True, False])
def test_quantised_arrays_of_pytorch_are_decoded(is_turned, tmp_path):
    codes = RANDOM.normal(size=(256, 128)).astype(ml_dtypes.float8_e4m3fn)
    scales = RANDOM.random((2, 1)).astype("f4") + 1
    kind = [b"ctorch\nfloat8_e4m3fn\n"]
    stored = codes.T.copy() if is_turned else codes
    strides = (1, 256) if is_turned else (128, 1)
    tree = {
        "a.weight": tensor(
            *("0", "Untyped", codes.size, codes.shape, strides),
            more=kind,
            version="_v3",
        ),
        "a.weight_scale_inv": tensor("1", "Float", 2, (2, 1)),
    }
    file = bin_file(tmp_path, table(tree), {"0": stored, "1": scales})
    want = codes.astype("f4") * np.repeat(scales, 128, axis=0)
    same(ta.load(file), {"a.weight": want.astype(ml_dtypes.bfloat16)})
    assert {*ta.load(file, decode=False)} == {*tree}


# Folders


def sharded(folder, arrays):
    folder.mkdir(exist_ok=True)
    names, files = [*arrays], {}
    for number, part in ((1, names[:2]), (2, names[2:])):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        save(folder / file, {name: arrays[name] for name in part})
        files |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def test_a_folder_of_shards(tmp_path):
    folder = sharded(tmp_path / "model", ARRAYS)
    for name in (folder, folder / "pytorch_model.bin.index.json"):
        same(ta.load(name), ARRAYS)
        assert {*ta.read_metadata(name)} == {*ARRAYS}
        assert "all         7 " in run("show", name)


def test_an_index_and_its_shards_must_agree(tmp_path):
    folder = sharded(tmp_path / "model", ARRAYS)
    file = folder / "pytorch_model.bin.index.json"
    index = json.loads(file.read_text())
    for change in ({"w": "../x.bin"}, {"more": index["weight_map"]["w"]}):
        names = {"weight_map": index["weight_map"] | change}
        file.write_text(json.dumps(names))
        with pytest.raises(ta.CheckpointError, match="index"):
            ta.read_metadata(folder)
    del index["weight_map"]["w"]
    file.write_text(json.dumps(index))
    with pytest.raises(ta.CheckpointError, match=r"disagree .*'w'"):
        ta.read_metadata(folder)


def test_safetensors_in_the_folder_come_first(tmp_path):
    sharded(tmp_path, ARRAYS)
    ta.save(tmp_path / "model.safetensors", {"w": np.ones(2)})
    same(ta.load(tmp_path), {"w": np.ones(2)})
    (tmp_path / "model.safetensors").unlink()
    same(ta.load(tmp_path), ARRAYS)


def test_the_name_that_tools_give_comes_before_other_files_of_pytorch(tmp_path):
    for name in ("training_args.bin", "optimizer.pt"):
        save(tmp_path / name, {"x": np.ones(1)})
    with pytest.raises(ta.CheckpointError, match=r"'.*training_args\.bin', '.*optimiz"):
        ta.load(tmp_path)
    save(tmp_path / "pytorch_model.bin", ARRAYS)
    same(ta.load(tmp_path), ARRAYS)
    sharded(tmp_path, ARRAYS)
    with pytest.raises(ta.CheckpointError, match="more than one checkpoint"):
        ta.load(tmp_path)


def test_of_a_remote_file_only_what_is_needed_is_asked_for(tmp_path):
    big = RANDOM.normal(size=(2**9, 2**10)).astype("f4")  # 2 MiB
    raw = saved({"first": big, "second": big + 1, "small": np.ones(3, "f4")})
    folder = fsspec.filesystem("memory")
    folder.pipe("/torch_files/pytorch_model.bin", raw)
    asked: list[int] = []
    cat_file = type(folder).cat_file

    def counted(self, path, start=None, end=None, **options):
        data = cat_file(self, path, start=start, end=end, **options)
        asked.append(len(data))
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(folder), "cat_file", counted)
        name = "memory://torch_files/pytorch_model.bin"
        assert {*ta.read_metadata(name)} == {"first", "second", "small"}
        assert sum(asked) < 2**20
        asked.clear()
        same(
            ta.load("memory://torch_files", where="small"), {"small": np.ones(3, "f4")}
        )
        assert sum(asked) < 2**20
        same(
            ta.load(name), {"first": big, "second": big + 1, "small": np.ones(3, "f4")}
        )


# What is left out is said


def test_objects_of_training_are_left_out_with_a_warning(tmp_path):
    tree = {
        "w": tensor("0", "Float", 2, (2,)),
        "args": b"cargparse\nNamespace\n)\x81" + table({"lr": value_of(1.0)}) + b"b",
        "device": b"ctorch\ndevice\n" + several(text("cpu")) + b"R",
        "dtype": b"ctorch\nfloat16\n",
        "seen": b"c__builtin__\nset\n" + several(value_of([1])) + b"R",
        "large": b"\x8a\x0a" + (2**70).to_bytes(10, "little"),
    }
    file = bin_file(tmp_path, table(tree), {"0": np.ones(2, "f4")})
    text_ = r"5 objects in it are left out, 'args' \(argparse.Namespace\), 'device'"
    with pytest.warns(ta.TreeAdaptWarning, match=text_):
        same(ta.load(file), {"w": np.ones(2, "f4")})


# What is not read is named, with what to do

SOUND = tensor("0", "Float", 2, (2,))
OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
CALL = b"cos\nsystem\n" + several(text("echo")) + b"R"
UNREAD = {
    "a function": (table({"w": SOUND, "x": CALL}), "an object of 'os.system'"),
    "a class": (
        table({"w": SOUND, "x": b"cmy.models\nNet\n)\x81}b"}),
        r"'my.models.Net'. Only tensors.*torch.save\(model.state_dict\(\), new\)",
    ),
    "an instance": (
        table({"w": SOUND, "x": b"(imy\nNet\n"}),
        "it has the opcode INST at byte",
    ),
    "protocol 0": (table({"w": SOUND, "x": b"I1\n"}), "it has the opcode INT"),
    "a key": (table({"w": SOUND}) + b"N\x88s", "has a key of the kind NoneType"),
    "a conjugate": (
        table({"w": tensor("0", "Float", 2, (2,), more=[table({"conj": b"\x88"})])}),
        r"as its conjugate or negative. Save tensor.resolve_conj",
    ),
    "a packed dtype": (
        table(
            {
                "w": tensor(
                    *("0", "Untyped", 8, (2,)),
                    more=[b"ctorch\nFloatStorage\n"],
                    version="_v3",
                )
            }
        ),
        "a tensor in it is of the dtype 'torch.FloatStorage'",
    ),
    "a sparse tensor": (
        table({"w": b"ctorch._utils\n_rebuild_sparse_tensor\n"}),
        "an object of 'torch._utils._rebuild_sparse_tensor'",
    ),
}
DAMAGED = {
    "out of bounds": tensor("0", "Float", 2, (3,)),
    "an offset out of bounds": tensor("0", "Float", 2, (2,), offset=1),
    "strides out of bounds": tensor("0", "Float", 2, (2,), (2,)),
    "a negative stride": tensor("0", "Float", 2, (2,), (-1,), 1),
    "a negative size": tensor("0", "Float", 2, (-2,)),
    "too many numbers": tensor("0", "Float", 2, (2**61, 2**61), (0, 0)),
    "more strides than axes": tensor("0", "Float", 2, (2,), (1, 1)),
    "no such storage": tensor("1", "Float", 2, (2,)),
    "a storage of another size": tensor("0", "Double", 2, (2,)),
    "repeated without end": tensor("0", "Float", 2, (2**40,), (0,)),
    "no storage": SOUND.replace(b"Q", b""),
    "nothing to recall": b"h\x07",
    "no mark": b"u",
    "below the mark": b"(\x86",
    "too few": b"R",
    "a text called": several(text("x"), several()) + b"R",
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_not_read_is_named_with_the_way_out(case, tmp_path):
    pickled, message = UNREAD[case]
    file = bin_file(tmp_path, pickled, {"0": np.ones(2, "f4")})
    with pytest.raises(ta.CheckpointError, match=message):
        ta.load(file)


@pytest.mark.parametrize("case", DAMAGED)
def test_a_tensor_that_cannot_be_is_refused(case, tmp_path):
    pickled = table({"good": SOUND, "w": DAMAGED[case]})
    file = bin_file(tmp_path, pickled, {"0": np.ones(2, "f4")})
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(file)
    assert "Error:" not in str(caught.value), caught.value


def levels(count: int) -> bytes:
    return b"".join(b"}" + text("a") for _ in range(count)) + SOUND + b"s" * count


def doubled(count: int) -> bytes:
    """A list of twice a list of twice a list, which has 2**count places."""
    return b"]q\x00" + b"".join(
        b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1])
        for n in range(count)
    )


LARGE = {
    "levels": (levels(70), "more than 64 levels"),
    "places": (doubled(40), "more entries than are read"),
    "itself": (b"}q\x00" + text("a") + b"h\x00s", "more than 64 levels"),
    "numbers alone": (value_of({"a": 1}), "it holds no tensors"),
    "two of a name": (table({"a/b": SOUND, "a": table({"b": SOUND})}), "'a/b'"),
    "a number and a text": (table({1: SOUND, "1": SOUND}), "two leaves in it"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE)
def test_tables_that_are_too_large_are_refused(case, tmp_path):
    pickled, message = LARGE[case]
    file = bin_file(tmp_path, pickled, {"0": np.ones(2, "f4")})
    with pytest.raises(ta.CheckpointError, match=message):
        ta.load(file)


def test_a_memo_of_any_index_takes_no_memory(tmp_path):
    pickled = table({"w": SOUND}) + b"r" + (2**32 - 1).to_bytes(4, "little")
    file = bin_file(tmp_path, pickled, {"0": np.ones(2, "f4")})
    tracemalloc.start()
    same(ta.load(file), {"w": np.ones(2, "f4")})
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def old_archive():
    return OLD


def without_directory():
    return saved(ARRAYS)[:-30]


def cut_in_the_middle():
    raw = saved({"w": np.ones(2**12, "f4")})
    return raw[:2000] + raw[4000:]


def overlapping():
    """Two members of which the directory says that they are at the same place."""
    raw = bytearray(saved({"a": np.ones(2, "f4"), "b": np.ones(2, "f4")}))
    entries = [
        place
        for place in range(len(raw))
        if raw[place : place + 4] == b"PK\1\2" and b"/data/" in raw[place : place + 70]
    ]
    first, second = entries
    raw[second + 42 : second + 46] = raw[first + 42 : first + 46]
    return bytes(raw)


def twice():
    raw = io.BytesIO(saved(ARRAYS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(raw, "a") as out:
            out.writestr("archive/data/0", b"0")
    return raw.getvalue()


FILES = {
    "before 1.6": (old_archive, r"before 1\.6. Save it again: torch.save\(torch.load"),
    "a pickle": (lambda: pickle.dumps({"w": 1}), "it is a pickle, which can run code"),
    "something else": (lambda: b"GGUF" * 9, "it is not a file of PyTorch"),
    "TorchScript": (
        lambda: archive(
            table({"w": SOUND}), {"0": np.ones(2, "f4")}, extra={"constants.pkl": b""}
        ),
        r"TorchScript program. .*torch.jit.load\(file\).state_dict",
    ),
    "compressed": (
        lambda: archive(
            table({"w": SOUND}),
            {"0": np.ones(2, "f4")},
            compression=zipfile.ZIP_DEFLATED,
        ),
        "is compressed. Save it again",
    ),
    "big-endian": (
        lambda: archive(table({"w": SOUND}), {"0": np.ones(2, "f4")}, order=b"big"),
        "big-endian",
    ),
    "no directory": (without_directory, "not a whole archive. Download"),
    "cut": (cut_in_the_middle, "cut off|not where|not a whole"),
    "overlapping": (overlapping, "not where its directory says"),
    "twice": (twice, "two of its members have the same name"),
    "nothing": (lambda: b"", "it is empty"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_not_an_archive_of_tensors_is_named(case, tmp_path):
    make, message = FILES[case]
    (tmp_path / "x.pt").write_bytes(make())
    with pytest.raises(ta.CheckpointError, match=message):
        ta.load(tmp_path / "x.pt")


def test_a_pickle_has_a_cap(tmp_path, monkeypatch):
    file = bin_file(tmp_path, table({"w": SOUND}), {"0": np.ones(2, "f4")})
    monkeypatch.setattr("treeadapt.checkpoints.torch_file._MAX_PICKLE_BYTES", 99)
    with pytest.raises(ta.CheckpointError, match="its pickle is larger than"):
        ta.load(file)
    monkeypatch.undo()
    monkeypatch.setattr("treeadapt.checkpoints.torch_pickle._MAX_OPCODES", 20)
    with pytest.raises(ta.CheckpointError, match="more than 20 opcodes"):
        ta.load(file)


def test_files_of_pytorch_are_not_written(tmp_path):
    with pytest.raises(
        ta.CheckpointError, match=r"bin files are read, but not written"
    ):
        ta.save(tmp_path / "x.bin", ARRAYS)


# The state of an optimizer


def adam(groups, moments, **more):
    """The opcodes of ``Adam.state_dict()``."""
    state = {
        number: table(
            {
                "step": value_of(3),
                "exp_avg": tensor(str(number), "Float", size, (size,)),
            }
        )
        for number, size in moments.items()
    }
    groups = value_of([{"lr": 0.1, "params": each, **more} for each in groups])
    return table({"state": table(state), "param_groups": groups})


def run_of(tmp_path, optimizer, sizes, model=None, name="x.pt"):
    """A file of an optimizer whose moments are their number, and of a model."""
    storages = {str(n): np.full(size, n, "f4") for n, size in sizes.items()}
    tree = {"optimizer": optimizer}
    if model is not None:
        storages["m"] = np.zeros(9, "f4")
        tree["model"] = table(model)
    return bin_file(tmp_path, table(tree), storages, name)


def test_moments_come_by_the_names_that_the_caller_gives(tmp_path):
    sizes = {0: 2, 1: 2, 2: 3}
    file = run_of(tmp_path, adam([[2, 0], [1]], sizes), sizes)
    state = ta.load_torch_state(file, names=["c", "a", "b"])
    assert {n: leaf.tolist() for n, leaf in state["exp_avg"].items()} == {
        "c": [2, 2, 2],
        "a": [0, 0],
        "b": [1, 1],
    }
    assert {n: int(step) for n, step in state["step"].items()} == dict.fromkeys(
        "abc", 3
    )
    assert ta.load_torch_state(file, names=["c", "a", "b"], at="optimizer").keys() == {
        *state
    }


def test_a_parameter_without_a_gradient_has_no_moments(tmp_path):
    file = run_of(tmp_path, adam([[0, 1]], {1: 2}), {1: 2})
    state = ta.load_torch_state(file, names=["a", "b"])
    assert {field: [*named] for field, named in state.items()} == {
        "step": ["b"],
        "exp_avg": ["b"],
    }


def test_the_names_in_the_file_are_read(tmp_path):
    sizes = {0: 2, 1: 2}
    file = run_of(tmp_path, adam([[1, 0]], sizes, param_names=["y", "x"]), sizes)
    state = ta.load_torch_state(file)
    assert {n: leaf[0] for n, leaf in state["exp_avg"].items()} == {"y": 1, "x": 0}


def test_moments_that_are_kept_as_codes_come_as_they_are(tmp_path):
    codes = [b"ctorch\nfloat8_e4m3fn\n"]
    moments = {
        "exp_avg": tensor("0", "Untyped", 2, (2,), more=codes, version="_v3"),
        "exp_avg_scale": tensor("1", "Float", 1, (1,)),
    }
    groups = value_of([{"params": [0]}])
    state = table({"state": table({0: table(moments)}), "param_groups": groups})
    arrays = {"0": np.ones(2, ml_dtypes.float8_e4m3fn), "1": np.full(1, 3, "f4")}
    read = ta.load_torch_state(bin_file(tmp_path, state, arrays), names=["a"])
    assert read.keys() == {"exp_avg", "exp_avg_scale"}
    assert read["exp_avg"]["a"].dtype == ml_dtypes.float8_e4m3fn


def leaf(size, offset=0):
    return tensor("m", "Float", 9, (size,), offset=offset)


def test_one_group_takes_the_names_of_the_state_dict_next_to_it(tmp_path):
    sizes = {0: 2, 1: 2}
    model = {"second": leaf(2), "first": leaf(2, 2)}
    file = run_of(tmp_path, adam([[0, 1]], sizes), sizes, model)
    state = ta.load_torch_state(file)
    assert {n: x[0] for n, x in state["exp_avg"].items()} == {"second": 0, "first": 1}


TWO = {0: 2, 1: 2}
GUESSES = {
    "two groups": ([[0], [1]], {"a": leaf(2), "b": leaf(2, 2)}, "2 groups of numbered"),
    "a tie": ([[0, 1]], {"a": leaf(2), "b": leaf(2)}, "its state dict has ties"),
    "a buffer": ([[0, 1]], {"a": leaf(2), "b": leaf(2, 2), "n": leaf(1)}, "3 leaves"),
    "other shapes": ([[0, 1]], {"a": leaf(2), "b": leaf(3)}, "not the shape of 'b'"),
    "no model": ([[0, 1]], None, "there are 0 state dicts next to it"),
}


@pytest.mark.parametrize("case", GUESSES)
def test_names_are_never_guessed(case, tmp_path):
    groups, model, message = GUESSES[case]
    file = run_of(tmp_path, adam(groups, TWO), TWO, model)
    with pytest.raises(
        ta.CheckpointError, match=f"{message}.*Pass names=, in the orde"
    ):
        ta.load_torch_state(file)
    assert ta.load_torch_state(file, names=["a", "b"])["exp_avg"]["a"].tolist() == [
        0,
        0,
    ]


def test_names_that_do_not_fit_are_refused(tmp_path):
    file = run_of(tmp_path, adam([[0, 1]], TWO), TWO)
    for names, message in [(["a"], "1 name for 2 param"), (["a", "a"], "a name twice")]:
        with pytest.raises(ta.CheckpointError, match=message):
            ta.load_torch_state(file, names=names)
    file = run_of(tmp_path, adam([[0, 1]], TWO, param_names=["a"]), TWO)
    with pytest.raises(ta.CheckpointError, match="its param_names has 1 name for 2"):
        ta.load_torch_state(file)


@pytest.mark.slow
def test_which_optimizer_is_said(tmp_path):
    both = table({"a": adam([[0, 1]], TWO), "b": adam([[0, 1]], TWO)})
    file = bin_file(tmp_path, both, {str(n): np.full(2, n, "f4") for n in TWO})
    with pytest.raises(ta.CheckpointError, match=r"at 'a', 'b'\. Name one: at='a"):
        ta.load_torch_state(file, names="ab")
    assert ta.load_torch_state(file, names="ab", at="b")["exp_avg"].keys() == {"a", "b"}
    with pytest.raises(ta.CheckpointError, match="at 'c'; it has some at 'a', 'b'"):
        ta.load_torch_state(file, names="ab", at="c")
    save(tmp_path / "y.pt", ARRAYS)
    with pytest.raises(
        ta.CheckpointError, match=r"states of a torch\.optim it has none"
    ):
        ta.load_torch_state(tmp_path / "y.pt")
    ta.save(tmp_path / "y.safetensors", {"w": np.ones(2)})
    with pytest.raises(ta.CheckpointError, match="not one file of PyTorch"):
        ta.load_torch_state(tmp_path / "y.safetensors")


# Hostile files

NAMES = [
    *("os\nsystem", "posix\nsystem", "builtins\neval", "__builtin__\nexec"),
    *("torch\nload", "torch.hub\nload", "torch._utils\n_rebuild_qtensor"),
    *("numpy\nload", "torch.storage\n_load_from_bytes", "harmful\nNet"),
]


def mutated(raw: bytes, draw: random.Random) -> bytes:
    """Change some bytes, cut some out, or put a global or an opcode in."""
    data = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = draw.randrange(len(data))
        kind = draw.randrange(6)
        if kind == 0:
            data[place] = draw.randrange(256)
        elif kind == 1:
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del data[place : place + draw.choice([1, 2, 8, 64])]
        elif kind == 3:
            data[place:place] = bytes([draw.randrange(256)])
        elif kind == 4:
            data[place:place] = f"c{draw.choice(NAMES)}\n)R".encode()
        else:
            other = draw.randrange(len(data))
            data[place : place + 8] = data[other : other + 8]
        if not data:
            break
    return bytes(data)


def mutant(number: int) -> bytes:
    """A damaged file: in its pickle, so that the archive is sound, or anywhere."""
    draw = random.Random(number)
    tree = {
        "state": {"l.weight": np.ones((2, 3), "f4"), "l.bias": np.ones(2, "f2")},
        "optimizer": {0: {"step": 3, "exp_avg": np.ones((2, 3), "f4")}},
        "groups": [{"lr": 0.1, "params": [0, 1], "name": "adamw"}],
    }
    storages = Storages()
    pickled = storages.tree(tree)
    if number % 3:
        return archive(mutated(pickled, draw), storages.arrays)
    return mutated(archive(pickled, storages.arrays), draw)


@pytest.mark.slow
def test_no_mutant_raises_another_error_or_imports_anything(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    "".encode("cp437")  # with which ``zipfile`` reads names of members
    before = {*sys.modules}
    messages = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracemalloc.start()
        for number in range(3_000):
            file.write_bytes(mutant(number))
            try:
                ta.load(file)
            except ta.TreeAdaptError as error:
                messages.append(str(error))
            assert tracemalloc.get_traced_memory()[1] < 2**30 + 2**26, number
        tracemalloc.stop()
    assert 1_000 < len(messages) < 3_000
    assert max(map(len, messages)) < 4_000
    assert {*sys.modules} - before == set()
