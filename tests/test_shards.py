"""Folders of safetensors shards as the library writes them."""

from __future__ import annotations

import json
import os
import shlex

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from command import run
from hypothesis import given
from hypothesis import strategies as st

import treeadapt as ta
from treeadapt.checkpoints import safetensors_file, save_load

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

INDEX = "model.safetensors.index.json"


def same(one, two):
    assert not ta.tree_diff(one, two, values=True)


def zeros_of(tree):
    return jax.tree.map(np.zeros_like, tree)


def index_of(folder):
    return json.loads((folder / INDEX).read_text("utf-8"))


def shards_of(folder):
    return sorted({*os.listdir(folder)} - {INDEX})


def everything():
    """Leaves of every kind that the format holds, in an order of their own."""
    weight = jnp.arange(12.0).reshape(3, 4)
    key = jax.random.key(3)
    wide = np.arange(24, dtype=np.int32).reshape(4, 6)
    return {
        "z": {"w": weight, "tied": weight},
        "bf16": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16),
        "fp8": np.array([0.5, 2.0, -1.0], ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 3), ml_dtypes.bfloat16),
        "key": key,
        "step": 700,
        "rate": 0.5,
        "flag": np.True_,
        "fortran": np.asfortranarray(wide),
        "cut": wide[1:, ::2],
        "reversed": wide[::-1],
        "repeated": np.broadcast_to(np.float16(3), (5, 2)),
        "a": {"tied too": weight, "key": key},
    }


@pytest.mark.parametrize("max_shard_bytes", [1, 16, 60, 10**9])
def test_every_kind_of_leaf_comes_back_from_shards(max_shard_bytes, tmp_path):
    folder = tmp_path / "model"
    ta.save(f"{folder}/", everything(), max_shard_bytes=max_shard_bytes)
    blank = everything() | {"step": 0, "rate": 0.0}
    again = ta.load(folder, blank)
    same(again, everything())
    assert again["z"]["w"] is again["z"]["tied"] is again["a"]["tied too"]
    assert again["a"]["key"] is again["key"]
    plain = ta.load(folder)
    assert plain["z"]["w"] is plain["a"]["tied too"]
    assert os.listdir(tmp_path) == ["model"]


def test_a_folder_is_as_hugging_face_writes_it(tmp_path):
    flat = {
        "h.0.weight": np.ones((2, 3), np.float32),
        "h.1.weight": np.full((2, 3), 2, np.float32),
        "head": np.arange(9, dtype=np.int64),
    }
    ta.save(tmp_path / "gpt", flat, max_shard_bytes=50)
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    assert shards_of(tmp_path / "gpt") == names
    index = index_of(tmp_path / "gpt")
    assert list(index["metadata"].pop("treeadapt")) == ["version", "hash"]
    assert index == {
        "metadata": {"total_size": 24 + 24 + 72},
        "weight_map": {
            "h.0.weight": names[0],
            "h.1.weight": names[0],
            "head": names[1],
        },
    }
    found = {}
    for name in names:
        found |= safetensors.numpy.load_file(tmp_path / "gpt" / name)
    same(found, flat)


def test_the_index_keeps_the_order_of_the_leaves(tmp_path):
    dtypes = [np.int64, np.float16, np.float32] * 4
    ta.save(tmp_path / "x", [np.ones(2, one) for one in dtypes], max_shard_bytes=40)
    found = ta.read_metadata(tmp_path / "x")
    assert list(found) == [str(number) for number in range(12)]
    assert [leaf.dtype for leaf in found.values()] == dtypes


def test_marks_of_a_file_come_with_the_format_that_hugging_face_asks_for(tmp_path):
    ta.save(tmp_path / "x", {"a": np.ones(3), "step": 3}, max_shard_bytes=8)
    texts = []
    for name in shards_of(tmp_path / "x"):
        with safetensors.safe_open(tmp_path / "x" / name, "np") as file:
            texts.append(file.metadata())
    assert [text["format"] for text in texts] == ["pt", "pt"]
    assert json.loads(texts[0]["treeadapt"])["kinds"] == {}
    assert json.loads(texts[1]["treeadapt"])["kinds"] == {"step": "number"}


@pytest.mark.slow
@given(st.lists(st.integers(0, 9)), st.integers(1, 12))
def test_shards_hold_the_leaves_in_order_and_are_full(sizes, limit):
    leaves = {str(n): np.zeros(size, np.int8) for n, size in enumerate(sizes)}
    counts = safetensors_file._divided(leaves, limit)
    assert sum(counts) == len(sizes)
    assert all(counts)
    ends = np.cumsum(counts)
    for start, end in zip([0, *ends], ends, strict=False):
        assert sum(sizes[start:end]) <= limit or end - start == 1
        if end < len(sizes):
            assert sum(sizes[start : end + 1]) > limit


def test_a_tree_without_leaves_is_an_index(tmp_path):
    with pytest.warns(ta.TreeAdaptWarning, match="Nothing is saved"):
        ta.save(tmp_path / "x", {"a": None}, max_shard_bytes=5)
    assert os.listdir(tmp_path / "x") == [INDEX]
    assert ta.load(tmp_path / "x") == {}


# One shard is on the host at a time.


@pytest.fixture
def steps(monkeypatch):
    """Names of leaves that are read or brought to the host, and of shards written."""
    seen, write, to_array = [], safetensors_file.write, save_load.to_array

    def writing(path, *args):
        seen.append(path.name[:11])
        write(path, *args)

    def bringing(name, leaf):
        seen.append(name)
        return to_array(name, leaf)

    monkeypatch.setattr(safetensors_file, "write", writing)
    monkeypatch.setattr(save_load, "to_array", bringing)
    return seen


def test_a_shard_is_written_before_the_next_leaves_are_taken(steps, tmp_path):
    flat = {name: np.zeros(2, np.float32) for name in "abcde"}
    ta.save(tmp_path / "x", flat, max_shard_bytes=16)
    first, second, third = (f"model-0000{number}" for number in (1, 2, 3))
    assert steps == ["a", "b", first, "c", "d", second, "e", third]
    steps.clear()
    save_load.copy(
        tmp_path / "x", tmp_path / "y", max_shard_bytes=8, progress=steps.append
    )
    assert steps[:4] == ["a", "model-00001", "b", "model-00002"]


def test_a_dtype_that_the_format_lacks_is_found_before_anything_is_taken(
    steps, tmp_path
):
    tree = {"a": np.ones(3), "z": np.ones(1, np.complex128)}
    with pytest.raises(ta.CheckpointError, match="'z' is complex128"):
        ta.save(tmp_path / "x", tree, max_shard_bytes=8)
    assert steps == []
    assert os.listdir(tmp_path) == []


PEAK = """
import resource, sys
import jax, numpy as np, treeadapt as ta
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
leaves = [jax.device_put(np.full(2**21, n, np.float32), sharding) for n in range(16)]
jax.block_until_ready(leaves)

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak_bytes()
for name, limit in (("warm", 2**23), ("x", 2**24)):
    ta.save(f"{sys.argv[1]}/{name}", leaves, max_shard_bytes=limit)
print(peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="measures as POSIX does")
def test_saving_sharded_arrays_keeps_no_copy_on_the_host(fresh, tmp_path):
    flag = "--xla_force_host_platform_device_count=4"
    done = fresh.run(PEAK, tmp_path, XLA_FLAGS=flag)
    assert done.returncode == 0, done.stderr
    # Of the 128 MiB, 16 are in a shard, and about as many are code that is loaded.
    assert int(done.stdout) < 64 * 2**20


# Which folders are replaced.


def test_a_new_save_leaves_no_old_shard(tmp_path):
    ta.save(tmp_path / "x", {"a": np.ones(4), "b": np.ones(4)}, max_shard_bytes=32)
    assert len(shards_of(tmp_path / "x")) == 2
    ta.save(tmp_path / "x", {"a": np.zeros(4)}, max_shard_bytes=32)
    assert shards_of(tmp_path / "x") == ["model-00001-of-00001.safetensors"]
    same(ta.load(tmp_path / "x"), {"a": np.zeros(4)})
    assert os.listdir(tmp_path) == ["x"]


def content(folder):
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def with_config(folder):
    ta.save(folder, {"a": np.ones(2)}, max_shard_bytes=8)
    (folder / "config.json").write_text("{}")


def with_a_stray_shard(folder):
    ta.save(folder, {"a": np.ones(2)}, max_shard_bytes=8)
    safetensors.numpy.save_file({"b": np.ones(1)}, folder / "model-9.safetensors")


def with_a_folder(folder):
    ta.save(folder, {"a": np.ones(2)}, max_shard_bytes=8)
    (folder / "below").mkdir()
    (folder / "below" / "notes.txt").write_text("years")


def with_another_kind_of_shard(folder):
    ta.save(folder, {"a": np.ones(2)}, max_shard_bytes=8)
    (folder / "thesis.txt").write_text("years")
    table = {"weight_map": {"a": "thesis.txt"}}
    (folder / INDEX).write_text(json.dumps(table))


def with_a_damaged_index(folder):
    ta.save(folder, {"a": np.ones(2)}, max_shard_bytes=8)
    (folder / INDEX).write_text("{")


def with_a_note(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("years")


HOLDERS = {
    "config.json": (with_config, "more than .* shards: 'config.json'"),
    "stray": (with_a_stray_shard, "more than .* shards: 'model-9.safetensors'"),
    "folder": (with_a_folder, "more than .* shards: 'below'"),
    "shard": (with_another_kind_of_shard, "more than .*'thesis.txt'"),
    "index": (with_a_damaged_index, "cannot be read"),
    "note": (with_a_note, "is not a folder of safetensors shards"),
    "orbax": (lambda at: ta.save(at, {"a": np.ones(2)}), "is not a folder of safe"),
}


@pytest.mark.hazard("K22")
@pytest.mark.parametrize("case", HOLDERS)
def test_a_folder_with_anything_but_shards_is_not_replaced(case, tmp_path):
    make, reason = HOLDERS[case]
    make(tmp_path / "x")
    before = content(tmp_path)
    with pytest.raises(ta.CheckpointError, match=reason):
        ta.save(tmp_path / "x", {"b": np.ones(2)}, max_shard_bytes=8)
    assert content(tmp_path) == before


@pytest.mark.skipif(os.name != "posix", reason="POSIX only")
def test_a_folder_of_links_to_shards_is_not_replaced(tmp_path):
    ta.save(tmp_path / "x", {"a": np.ones(2)}, max_shard_bytes=8)
    shard = tmp_path / "x" / "model-00001-of-00001.safetensors"
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    with pytest.raises(ta.CheckpointError, match=r"more than .*'model-00001-of-00001"):
        ta.save(tmp_path / "x", {"b": np.ones(2)}, max_shard_bytes=8)
    assert (tmp_path / "blob").exists()


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "x").mkdir()
    ta.save(tmp_path / "x", {"a": np.ones(2)}, max_shard_bytes=8)
    assert list(ta.load(tmp_path / "x")) == ["a"]


def test_another_format_does_not_replace_shards(tmp_path):
    ta.save(tmp_path / "x", {"a": np.ones(2)}, max_shard_bytes=8)
    before = content(tmp_path)
    with pytest.raises(ta.CheckpointError, match=r"Choose|choose another name"):
        ta.save(tmp_path / "x", {"b": np.ones(2)})
    assert content(tmp_path) == before


def test_shards_do_not_replace_a_file(tmp_path):
    (tmp_path / "x").write_text("years")
    with pytest.raises(ta.CheckpointError, match="is a file"):
        ta.save(tmp_path / "x", {"b": np.ones(2)}, max_shard_bytes=8)
    assert (tmp_path / "x").read_text() == "years"


@pytest.mark.parametrize("size", [0, -1, 5e9, True, "5GB", np.int64(5)])
def test_a_size_of_shards_is_a_positive_int(size, tmp_path):
    with pytest.raises(ta.CheckpointError, match=r"positive int, such as 5 \* 2\*\*30"):
        ta.save(tmp_path / "x", {"a": np.ones(2)}, max_shard_bytes=size)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x.safetensors", r"ends in '\.safetensors'"),
        ("x.schema.toml", r"ends in '\.toml'"),
        ("x.orbax", r"ends in '\.orbax'"),
        ("x.npz", r"ends in '\.npz'"),
    ],
)
def test_shards_are_a_folder_of_safetensors(name, reason, tmp_path):
    with pytest.raises(ta.CheckpointError, match=reason):
        ta.save(tmp_path / name, {"a": np.ones(2)}, max_shard_bytes=8)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_shards_have_the_usual_mode(tmp_path):
    (tmp_path / "other").touch()
    ta.save(tmp_path / "x", {"a": np.ones(1)}, max_shard_bytes=8)
    mode = (tmp_path / "other").stat().st_mode
    assert all(file.stat().st_mode == mode for file in (tmp_path / "x").iterdir())


# Copies.


@pytest.mark.parametrize("name", ["one.safetensors", "one", "one.npz"])
def test_a_checkpoint_is_copied_into_shards_and_back(name, tmp_path):
    tree = {"a": np.ones((2, 3), np.float32), "step": 7, "b": np.zeros(3, np.float16)}
    if name.endswith(".npz"):
        np.savez(tmp_path / name, **{**tree, "a": tree["a"].astype(">f4")})
    else:
        ta.save(tmp_path / name, tree)
    text = run("convert", tmp_path / name, tmp_path / "two", "--max-shard-bytes", 32)
    assert "Wrote 3 leaves" in text
    assert len(shards_of(tmp_path / "two")) == 2
    save_load.copy(tmp_path / "two", tmp_path / "three.safetensors")
    for copied in ("two", "three.safetensors"):
        same(ta.load(tmp_path / copied, {**zeros_of(tree), "step": 0}), tree)


def test_convert_replaces_a_folder_of_shards(tmp_path):
    ta.save(tmp_path / "one.safetensors", {"a": np.ones(2)})
    ta.save(tmp_path / "two", {"b": np.ones(2)}, max_shard_bytes=8)
    options = ("convert", tmp_path / "one.safetensors", tmp_path / "two")
    assert "Pass --max-shard-bytes" in run(*options, "--force", code=2)
    assert "--force" in run(*options, "--max-shard-bytes", 8, code=2)
    run(*options, "--force", "--max-shard-bytes", 8)
    assert list(ta.load(tmp_path / "two")) == ["a"]


def test_a_migration_is_written_in_shards(steps, tmp_path):
    flat = {f"{name}/{n}": np.full(4, n, np.int8) for n in range(2) for name in "ab"}
    flat["step"] = np.int8(3)
    ta.save(tmp_path / "x.safetensors", flat)
    table = {f"{x}/{{n}} : e": f"{x}s : n e" for x in "ab"}
    table["step"] = ("step", "count")
    migration = ta.Migration(table)
    steps.clear()
    save_load.copy(
        tmp_path / "x.safetensors",
        tmp_path / "y",
        migration=migration,
        max_shard_bytes=8,
        progress=steps.append,
    )
    names = (f"model-0000{number}" for number in (1, 2, 3))
    assert [*steps[1::2]] == [*names]
    found = ta.to_flat_dict(ta.load(tmp_path / "y"))
    same(found, migration(flat))
    assert found["step"] is found["count"]


def test_a_folder_with_one_file_and_no_index_is_that_file(tmp_path):
    tree = {"a": np.arange(3.0), "b": {"c": np.ones(2)}}
    ta.save(tmp_path / "model.safetensors", tree)
    (tmp_path / "config.json").write_text("{}")
    same(ta.load(tmp_path, zeros_of(tree)), tree)
    assert [*ta.read_metadata(tmp_path)] == ["a", "b/c"]


@pytest.mark.parametrize("ending", ["bin", "pt", "pth", "ckpt"])
def test_a_file_that_is_named_as_of_pytorch_and_is_not_is_refused(ending, tmp_path):
    file = tmp_path / f"pytorch_model.{ending}"
    file.write_bytes(b"PK")
    with pytest.raises(ta.CheckpointError, match="it is not a file of PyTorch"):
        ta.load(file)


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    file.symlink_to(
        "../../blobs/gone"
    )  # snapshots of a cache, copied without its blobs
    for path in (file, tmp_path):
        with pytest.raises(ta.CheckpointError) as caught:
            ta.read_metadata(path)
        said = f"'{file}' is a link to '../../blobs/gone', which is not there."
        assert str(caught.value).endswith(said)


PARTS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


@pytest.fixture
def three(tmp_path):
    """A folder of three shards, and its tree."""
    tree = {f"layers.{n}.w": np.full(4, n, np.float32) for n in range(3)}
    ta.save(tmp_path / "three [1]", tree, max_shard_bytes=16)
    assert shards_of(tmp_path / "three [1]") == PARTS
    return tmp_path / "three [1]", tree


def listed_elsewhere(folder, name, shard):
    document = index_of(folder)
    document["weight_map"][name] = shard
    (folder / INDEX).write_text(json.dumps(document))


def without_index(folder):
    (folder / INDEX).unlink()


def with_a_shard_of_another_count(folder):
    listed_elsewhere(folder, "layers.2.w", "model-00003-of-00004.safetensors")


def with_a_leaf_in_another_shard(folder):
    listed_elsewhere(folder, "layers.2.w", PARTS[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_index, f"there is no '{INDEX}', .* of its 3 shards"),
        (
            with_a_shard_of_another_count,
            "00003-of-00004.safetensors', .* is not a file in it",
        ),
        (with_a_leaf_in_another_shard, "disagree .*: 'layers.2.w'"),
    ],
)
def test_a_wrong_index_is_written_by_the_lines_in_the_error(three, change, says):
    folder, tree = three
    change(folder)
    for read in (ta.load, ta.read_metadata, lambda path: ta.load(path, tree)):
        with pytest.raises(ta.CheckpointError, match=says) as caught:
            read(folder)
    exec(str(caught.value).partition("there:\n")[2], {})
    same(ta.load(folder, zeros_of(tree)), tree)
    assert set(index_of(folder)) == {"metadata", "weight_map"}  # as transformers reads


def test_the_command_has_a_command_that_writes_an_index(three):
    folder, tree = three
    without_index(folder)
    _, line = run("show", folder, code=2).rstrip().split("there:\n")
    python, option, lines = shlex.split(line)
    assert (python, option) == ("python", "-c")
    exec(lines, {})
    same(ta.load(folder), tree)


@pytest.mark.parametrize("gone", [PARTS[1:], [PARTS[1]], [PARTS[1], INDEX]])
def test_shards_that_are_lacking_are_named_with_what_gets_them(three, gone):
    folder, _ = three
    for name in gone:
        (folder / name).unlink()
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(folder)
    names = " ".join(gone)
    command = f"hf download ORG/NAME {names} --local-dir '{folder}'."
    assert str(caught.value).endswith(command)
    assert ("it has 2 of 3 shards" in str(caught.value)) == (INDEX in gone)


def test_half_of_a_download_is_not_taken_for_a_model(three):
    folder, tree = three
    for name in (INDEX, *PARTS[1:]):
        (folder / name).unlink()
    with pytest.raises(ta.CheckpointError, match="it has 1 of 3 shards"):
        ta.load(folder)
    assert list(ta.load(folder / PARTS[0])) == ["layers.0.w"]  # as it is asked for
    says = f"By its name it is one of 3 shards. To load all of them: ta.load('{folder}'"
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(folder / PARTS[0], tree)
    assert says in str(caught.value)


def test_one_of_one_shard_is_whole_without_an_index(tmp_path):
    tree = {"a": np.arange(3.0)}
    ta.save(tmp_path / "model-00001-of-00001.safetensors", tree)
    same(ta.load(tmp_path), tree)
