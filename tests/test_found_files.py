"""Checkpoints as users find them: caches, links, files of other tools, full disks."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from command import invoke, run
from flax import serialization

import treeadapt as ta
from treeadapt.checkpoints import migrated, save_load
from treeadapt.checkpoints.array_boxes import FileArray

# Orbax may leave its event loop to the collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(os.name != "posix", reason="links as POSIX has them"),
]

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLAT = {f"h.{n}.weight": np.full((2, 3), n, np.float32) for n in range(3)}
FLAT["head"] = np.arange(4, dtype=np.float32)
TABLE = {"h.{l}.weight : i o": "blocks/kernel : l o i", "head": "head"}


def same(one, two):
    assert not ta.tree_diff(one, two, values=True)


def zeros_of(tree):
    return jax.tree.map(np.zeros_like, tree)


def published(folder, max_shard_bytes=40):
    """Write a folder as ``save_pretrained`` does; None for one file."""
    if max_shard_bytes is None:
        folder.mkdir()
        safetensors.numpy.save_file(FLAT, folder / WHOLE, {"format": "pt"})
    else:
        ta.save(folder, FLAT, max_shard_bytes=max_shard_bytes)
    (folder / "config.json").write_text("{}")
    return folder


def cached(source, root, *, moved=False):
    """Lay a folder out as Hugging Face's cache does.

    Files are in ``blobs``, by their hash, and a snapshot holds relative links to them.
    """
    home = root / "models--org--name"
    snapshot, blobs = home / "snapshots" / "8b1f0e", home / "blobs"
    blobs.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(snapshot.name)
    for file in (file for file in source.rglob("*") if file.is_file()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def linked_folder(source, root):
    """Return a link to a folder."""
    (root / "latest").symlink_to(source)
    return root / "latest"


def linked_files(source, root):
    """Return a folder of absolute links to files on another disk."""
    folder = root / "mine"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file.absolute())
    return folder


def no_links(source, _):
    return source


LAYOUTS = [cached, linked_folder, linked_files, no_links]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_shard_bytes", [40, None], ids=["shards", "one file"])
def test_a_model_behind_links_is_read_by_all_functions(
    max_shard_bytes, layout, tmp_path
):
    path = layout(published(tmp_path / "at", max_shard_bytes), tmp_path)
    same(ta.load(path), FLAT)
    same(ta.load(path, zeros_of(FLAT)), FLAT)
    assert {*ta.read_metadata(path)} == {*FLAT}
    assert ta.compare_checkpoint(path, zeros_of(FLAT)).fits
    table = ta.Migration(TABLE)
    stacked = {"blocks/kernel": jnp.zeros((3, 3, 2)), "head": jnp.zeros(4)}
    found = ta.load(path, stacked, migration=table)
    same(found, jax.tree.map(jnp.asarray, table(FLAT)))
    assert ta.compare_checkpoint(path, stacked, migration=table).fits
    save_load.copy(path, tmp_path / "copy", migration=table, max_shard_bytes=40)
    same(ta.to_flat_dict(ta.load(tmp_path / "copy")), table(FLAT))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_state_of_an_optimizer_behind_links_is_carried(layout, tmp_path):
    params = {name: jnp.asarray(leaf) for name, leaf in FLAT.items()}
    tx = optax.adam(1e-3)
    # Every leaf differs from that of a fresh state.
    state = jax.tree.map(lambda leaf: leaf + jnp.ones_like(leaf), tx.init(params))
    ta.save(tmp_path / "at", state, max_shard_bytes=40)
    path = layout(tmp_path / "at", tmp_path)
    table = ta.Migration(TABLE)
    for saved in (ta.load(path), ta.load(path, jax.eval_shape(tx.init, params))):
        carried, report = ta.carry_state(tx, table(params), saved, migration=table)
        assert not report.fresh
        kernel = carried[0].mu["blocks/kernel"]
        same(kernel, table(ta.to_flat_dict(state[0].mu))["blocks/kernel"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_behind_links_is_read_by_all_commands(layout, tmp_path):
    path = layout(published(tmp_path / "at"), tmp_path)
    rows = tmp_path / "rows.toml"
    rows.write_text(ta.Migration(TABLE).to_toml(), "utf-8")
    assert "head" in run("show", path)
    assert run("diff", path, tmp_path / "at", "--values") == "No difference.\n"
    assert run("lint", path, "--migration", rows).startswith("0 findings")
    text = run("explain", path, "h.1.weight", "--migration", rows)
    assert "-> 'blocks/kernel'" in text
    file = tmp_path / "one.safetensors"
    assert "Wrote 2 leaves" in run("convert", path, file, "--migration", rows)
    same(ta.to_flat_dict(ta.load(file)), ta.Migration(TABLE)(FLAT))


def test_a_link_to_nothing_is_a_missing_shard(tmp_path):
    path = cached(published(tmp_path / "at"), tmp_path)
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.resolve().unlink()
    with pytest.raises(ta.CheckpointError, match=f"'{shard.name}', .* is not a file"):
        ta.load(path)


def test_the_cache_of_a_model_proposes_its_snapshots(tmp_path):
    path = cached(published(tmp_path / "at"), tmp_path)
    with pytest.raises(ta.CheckpointError, match="Name one of them") as caught:
        ta.load(path.parents[1])
    assert repr(str(path / INDEX)) in str(caught.value)
    same(ta.load(path / INDEX), FLAT)


@pytest.mark.slow
@pytest.mark.hazard("K10")
@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_orbax_in_the_cache_is_read_and_links_out_of_it_are_not(use_ocdbt, tmp_path):
    tree = {"a": np.arange(8, dtype=np.uint8), "b": {"c": np.ones(3)}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as orbax:
        orbax.save(tmp_path / "at" / "step", tree)
    path = cached(tmp_path / "at", tmp_path) / "step"
    same(ta.load(path), tree)
    (tmp_path / "link").symlink_to(path)
    same(ta.load(tmp_path / "link", zeros_of(tree)), tree)
    (tmp_path / "secret").write_text("SECRET")
    last = sorted(file for file in path.rglob("*") if file.is_file())[-1]
    blob = last.resolve()
    for outward in (last, blob):
        outward.unlink()
        outward.symlink_to(tmp_path / "secret")
        with pytest.raises(ta.CheckpointError, match=f"{last.name}' in it is a link"):
            ta.load(path)
        if outward is last:
            last.unlink()
            last.symlink_to(blob)


# What comes into a folder while it is read.


def during(monkeypatch, change):
    """Run a change before the second leaf is read from a file."""
    read, seen = FileArray.read, []

    def late(self, boxes, *into):
        seen.append(self)
        if len(seen) == 2:
            change()
        return read(self, boxes, *into)

    monkeypatch.setattr(FileArray, "read", late)


def metadata_of_a_finder(folder):
    (folder / ".DS_Store").write_bytes(b"\0")


def a_backup(folder):
    shutil.copy(next(folder.glob("*.safetensors")), folder / "backup.safetensors")
    shutil.copy(next(folder.glob("*.json")), folder / "index.json.bak")


def a_backup_by_links(folder):
    (folder / "backup").mkdir()
    for file in folder.glob("*.safetensors"):
        os.link(file, folder / "backup" / file.name)
        file.chmod(0o600)


@pytest.mark.parametrize("change", [metadata_of_a_finder, a_backup, a_backup_by_links])
@pytest.mark.parametrize("max_shard_bytes", [40, None], ids=["shards", "one file"])
def test_other_files_may_come_while_a_checkpoint_is_read(
    max_shard_bytes, change, tmp_path, monkeypatch
):
    path = published(tmp_path / "at", max_shard_bytes)
    during(monkeypatch, lambda: change(path))
    same(ta.load(path), FLAT)


@pytest.mark.parametrize("layout", [cached, no_links])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.hazard("K24")
def test_another_index_or_shard_is_another_checkpoint(
    number, layout, tmp_path, monkeypatch
):
    path = layout(published(tmp_path / "at"), tmp_path)
    file = sorted(path.glob("model*"))[number].resolve()

    def change():
        shutil.copy(file, tmp_path / "new")
        (tmp_path / "new").replace(file)

    during(monkeypatch, change)
    with pytest.raises(ta.CheckpointError, match="was replaced while it was read"):
        ta.load(path)


@pytest.mark.hazard("K24")
def test_a_link_that_is_turned_while_it_is_read_is_noticed(tmp_path, monkeypatch):
    for name in ("one", "two"):
        published(tmp_path / name)
    link = linked_folder(tmp_path / "one", tmp_path)

    def change():
        link.unlink()
        link.symlink_to(tmp_path / "two")

    during(monkeypatch, change)
    with pytest.raises(ta.CheckpointError, match="was replaced while it was read"):
        ta.load(link)


def test_other_files_may_come_into_a_folder_of_orbax_while_it_is_read(
    tmp_path, monkeypatch
):
    ta.save(tmp_path / "x", FLAT)
    read = migrated.read_arrays

    def late(*args):
        metadata_of_a_finder(tmp_path / "x")
        return read(*args)

    monkeypatch.setattr(migrated, "read_arrays", late)
    same(ta.load(tmp_path / "x"), FLAT)


# Which checkpoint of a folder is meant.

OTHER = {"other": np.ones(3, np.float32)}


def whole_next_to(folder):
    safetensors.numpy.save_file(OTHER, folder / WHOLE)
    return folder


def orbax_next_to(folder):
    ta.save(folder.with_name("orbax"), OTHER)
    shutil.copytree(folder.with_name("orbax"), folder, dirs_exist_ok=True)
    return folder


AMBIGUOUS = {
    "index and file": (lambda x: whole_next_to(published(x)), (INDEX, WHOLE)),
    "index and orbax": (lambda x: orbax_next_to(published(x)), (INDEX, "_METADATA")),
    "file and orbax": (
        lambda x: orbax_next_to(published(x, None)),
        (WHOLE, "_METADATA"),
    ),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_two_checkpoints_in_a_folder_are_an_error_that_names_both(case, tmp_path):
    make, names = AMBIGUOUS[case]
    path = make(tmp_path / "at")
    rows = tmp_path / "rows.toml"
    rows.write_text(ta.Migration(TABLE).to_toml(), "utf-8")
    reads = [
        lambda: ta.load(path),
        lambda: ta.load(path, zeros_of(FLAT), strict=False),
        lambda: ta.load(path, migration=ta.Migration(TABLE)),
        lambda: ta.read_metadata(path),
        lambda: ta.compare_checkpoint(path, FLAT),
    ]
    for read in reads:
        with pytest.raises(ta.CheckpointError) as caught:
            read()
        assert all(repr(str(path / name)) in str(caught.value) for name in names)
    for command in (
        ("show", path),
        ("lint", path, "--migration", rows),
        ("diff", path, path),
        ("explain", path, "head", "--migration", rows),
        ("convert", path, tmp_path / "new.safetensors"),
    ):
        text = run(*command, code=2)
        assert all(name in text for name in names)
    if WHOLE in names:
        wanted = OTHER if INDEX in names else FLAT
        same(ta.load(path / WHOLE), wanted)  # each can be named
    if INDEX in names:
        same(ta.load(path / INDEX), FLAT)


def test_an_index_of_one_whole_file_is_one_checkpoint(tmp_path):
    # As MLX writes a model that fits one file.
    path = published(tmp_path / "at", None)
    index = {"weight_map": dict.fromkeys(FLAT, WHOLE)}
    (path / INDEX).write_text(json.dumps(index))
    same(ta.load(path), FLAT)


def test_an_index_whose_shards_are_gone_is_not_a_second_checkpoint(tmp_path):
    # ``save_pretrained`` removes old shards and leaves their index.
    path = whole_next_to(published(tmp_path / "at"))
    for shard in path.glob("model-*"):
        shard.unlink()
    same(ta.load(path), OTHER)
    ta.save(path / WHOLE, FLAT)
    same(ta.load(path), FLAT)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_next_to_a_file_is_not_ignored(text, tmp_path):
    path = whole_next_to(published(tmp_path / "at"))
    (path / INDEX).write_text(text)
    with pytest.raises(ta.CheckpointError, match="more than one checkpoint"):
        ta.load(path)


@pytest.mark.parametrize(
    "name",
    ["weights.safetensors", "adapter_model.safetensors", "model.fp16.safetensors"],
)
def test_a_folder_with_one_file_of_another_name_is_that_file(name, tmp_path):
    path = published(tmp_path / "at", None)
    (path / WHOLE).rename(path / name)
    (path / "._weights.safetensors").write_bytes(b"\0")  # as macOS leaves
    (path / "training_args.bin").write_bytes(b"\0")
    same(ta.load(path), FLAT)
    assert "head" in run("show", path)
    safetensors.numpy.save_file(OTHER, path / "zoo.safetensors")
    with pytest.raises(ta.CheckpointError, match=f"'.*zoo.safetensors', '.*/{name}'"):
        ta.load(path)
    (path / name).rename(path / WHOLE)  # the name that tools give comes first
    same(ta.load(path), FLAT)


def test_what_a_folder_holds_that_is_not_read_for_the_folder_is_named(tmp_path):
    np.savez(tmp_path / "flax_model.npz", **FLAT)
    with pytest.raises(ta.CheckpointError, match=r"It holds '.*/flax_model\.npz'"):
        ta.load(tmp_path)
    (tmp_path / "model.eqx").write_bytes(b"")
    with pytest.raises(ta.CheckpointError, match="tree_deserialise_leaves"):
        ta.load(tmp_path / "model.eqx")
    for ending, reader in (("keras", "keras"), ("h5", "h5py"), ("npy", r"numpy\.load")):
        (tmp_path / f"model.{ending}").write_bytes(b"")
        with pytest.raises(ta.CheckpointError, match=f"Read it with {reader}"):
            ta.load(tmp_path / f"model.{ending}")


def test_a_folder_of_jaxs_own_serialization_is_refused_with_the_way(tmp_path):
    # As ``pytree_serialization.save`` of JAX 0.10 writes it; reading takes flatbuffers.
    (tmp_path / "array_store").mkdir()
    leaves = {"__jax_pytreedef_repr": "", "__jax_leaf_ids": ["Array(int32[3])"]}
    (tmp_path / "pytreedef.json").write_text(json.dumps(leaves))
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(tmp_path, {"w": np.zeros(3, "int32")})
    call = f"ta.load(pytree_serialization.load({str(tmp_path)!r}), target)"
    assert call in str(caught.value)


@pytest.mark.slow
def test_items_that_are_numbers_are_no_steps(tmp_path):
    import orbax.checkpoint as ocp

    tree = {"0": {"w": np.ones(3)}, "a": {"b": np.ones(2)}}
    items = {name: ocp.args.StandardSave(part) for name, part in tree.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "step", ocp.args.Composite(**items))
    assert not ta.tree_diff(ta.load(tmp_path / "step"), tree, values=True)


@pytest.mark.slow
@pytest.mark.parametrize("item", ["params", "opt"])
def test_the_items_of_an_orbax_step_are_one_tree(tmp_path, item):
    import orbax.checkpoint as ocp

    tree = {"params": {"w": np.arange(3.0)}, "opt": {"mu": np.ones(2), "count": 3}}
    saved = {name: ocp.args.StandardSave(part) for name, part in tree.items()}
    saved["about"] = ocp.args.JsonSave({"rate": 0.1})
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.Composite(**saved))
        manager.wait_until_finished()
    step = tmp_path / "run" / "2"
    assert [*ta.read_metadata(step)] == ["opt/count", "opt/mu", "params/w"]
    loaded = ta.load(step, tree)
    assert not ta.tree_diff(loaded, tree, values=True)
    assert loaded["opt"]["count"] == 3
    with pytest.warns(ta.TreeAdaptWarning, match="The last that is complete, '2'"):
        same(ta.load(tmp_path / "run")["params"], tree["params"])
    part = ta.load(step, {item: tree[item]}, where=item)
    assert not ta.tree_diff(part, {item: tree[item]}, values=True)
    assert not ta.tree_diff(ta.load(step / item, tree[item]), tree[item], values=True)
    with pytest.raises(ta.CheckpointError, match=f"are below '{item}' in it"):
        ta.load(step, tree[item])


def test_checkpoints_of_orbax_in_a_folder_that_is_no_step_stay_apart(tmp_path):
    for name in ("best", "last"):
        ta.save(tmp_path / name, FLAT)
    with pytest.raises(ta.CheckpointError, match="Name one of them"):
        ta.load(tmp_path)


def test_an_index_of_another_name_is_read(tmp_path):
    # As Diffusers writes its models.
    path = published(tmp_path / "at")
    (path / INDEX).rename(path / "diffusion_pytorch_model.safetensors.index.json")
    same(ta.load(path), FLAT)
    file = path / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ta.CheckpointError, match="second checkpoint next to"):
        ta.save(file, OTHER)
    safetensors.numpy.save_file(OTHER, file)
    with pytest.raises(ta.CheckpointError, match="it holds several"):
        ta.load(path)
    same(ta.load(file), OTHER)


def test_the_index_of_a_variant_is_read(tmp_path):
    # As ``save_pretrained(..., variant="fp16")`` writes it.
    path = published(tmp_path / "at")
    document = json.loads((path / INDEX).read_text())
    (path / INDEX).unlink()
    for name in {*document["weight_map"].values()}:
        (path / name).rename(path / name.replace("model-", "model.fp16-"))
    shards = document["weight_map"].items()
    document["weight_map"] = {k: v.replace("model-", "model.fp16-") for k, v in shards}
    index = path / "model.safetensors.index.fp16.json"
    index.write_text(json.dumps(document))
    same(ta.load(path), FLAT)
    same(ta.load(index), FLAT)
    assert "head" in run("show", index)
    for shard in path.glob("*.safetensors"):
        shard.unlink()
    safetensors.numpy.save_file(OTHER, path / "model.fp16.safetensors")
    same(ta.load(path), OTHER)  # as a later save leaves it that writes one file


def test_an_index_is_read_and_not_written(tmp_path):
    with pytest.raises(ta.CheckpointError, match="unknown ending"):
        ta.save(tmp_path / INDEX, FLAT)


def test_a_file_is_not_saved_next_to_shards(tmp_path):
    path = published(tmp_path / "at")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    message = f"second checkpoint next to '{path / INDEX}'"
    with pytest.raises(ta.CheckpointError, match=f"{message}.* away first"):
        ta.save(path / WHOLE, OTHER)
    ta.save(tmp_path / "one.safetensors", OTHER)
    text = run("convert", tmp_path / "one.safetensors", path / WHOLE, code=2)
    assert "second checkpoint" in text
    assert before == {file.name: file.read_bytes() for file in path.iterdir()}
    ta.save(path / "adapter.safetensors", OTHER)  # nobody takes that for the model
    same(ta.load(path), FLAT)
    (path / "adapter.safetensors").unlink()
    (path / "config.json").unlink()
    ta.save(path, OTHER, max_shard_bytes=40)
    same(ta.load(path), OTHER)
    for file in path.iterdir():
        file.unlink()
    ta.save(path / WHOLE, FLAT)  # as the message says
    same(ta.load(path), FLAT)
    ta.save(path / WHOLE, OTHER)
    same(ta.load(path), OTHER)


def test_a_file_is_not_saved_into_a_checkpoint_of_orbax(tmp_path):
    ta.save(tmp_path / "x", FLAT)
    with pytest.raises(ta.CheckpointError, match="another folder"):
        ta.save(tmp_path / "x" / WHOLE, OTHER)
    same(ta.load(tmp_path / "x"), FLAT)


# Files that another tool wrote again, with our metadata.


def trained():
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    params = {"embed": weight, "head": weight, "norm": np.ones(3, np.float32)}
    return {"params": params, "step": 700, "rate": 0.5, "key": jax.random.key(3)}


def rewritten(path, change, to=None):
    """Write a file again as safetensors' own example does, metadata handed on."""
    with safetensors.safe_open(path, "np") as file:
        flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = file.metadata()
    safetensors.numpy.save_file(change(flat), to or path, metadata=texts)


def cast_to(dtype, *names):
    def change(flat):
        names_here = names or flat
        return flat | {n: flat[n].astype(dtype) for n in names_here if n in flat}

    return change


WEIGHTS = ("params/embed", "params/norm")


def warned(call, *texts):
    with pytest.warns(ta.TreeAdaptWarning, match="is read as it is now") as caught:
        value = call()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert all(text in str(caught[0].message) for text in texts)
    return value


@pytest.mark.parametrize("shards", [False, True])
def test_other_dtypes_keep_ties_and_numbers(shards, tmp_path):
    path = tmp_path / ("x" if shards else "x.safetensors")
    ta.save(path, trained(), **({"max_shard_bytes": 25} if shards else {}))
    for file in path.glob("*.safetensors") if shards else [path]:
        rewritten(file, cast_to(jnp.bfloat16, *WEIGHTS))
    found = warned(lambda: ta.load(path), "dtypes and ties are not those")
    assert found["params"]["embed"] is found["params"]["head"]
    assert found["params"]["norm"].dtype == jnp.bfloat16
    target = trained() | {"step": 0}
    again = warned(lambda: ta.load(path, target, cast=True))
    assert (again["step"], again["rate"]) == (700, 0.5)
    same(again["params"], trained()["params"])
    assert warned(lambda: ta.compare_checkpoint(path, target, cast=True)).fits
    assert warned(lambda: ta.read_metadata(path))["step"].dtype == np.int64
    partly = warned(lambda: ta.load(path, target, where="params/norm", cast=True))
    assert partly["params"]["norm"].all()
    ta.save(path, again, **({"max_shard_bytes": 25} if shards else {}))
    same(ta.load(path, target), trained())  # without a warning


def test_numbers_of_another_dtype_fit_by_their_kind_and_keys_are_none(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, trained())
    rewritten(path, cast_to(np.float16))
    lost = "'key' in it is not a 'thr"
    found = warned(lambda: ta.load(path), "dtypes and ties are not those", lost)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float16)}
    assert found["params"]["embed"] is found["params"]["head"]
    report = warned(lambda: ta.compare_checkpoint(path, trained(), cast=True))
    assert report.retyped["step"] == ("a number, float16[] 700.0", "an int")
    assert "rate" in report.restored
    assert "key" not in report.restored


def test_ties_that_another_tool_stored_twice_are_two_leaves(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, trained())
    rewritten(path, lambda flat: flat | {"params/head": flat["params/embed"] + 1})
    found = warned(lambda: ta.load(path), "ties 'params/head' to 'params/embed'")
    assert found["params"]["head"][0, 0] == 1
    rewritten(path, lambda flat: {n: x for n, x in flat.items() if n != "params/embed"})
    found = warned(lambda: ta.load(path), "but stores no 'params/embed'")
    assert [*found["params"]] == ["head", "norm"]


@pytest.mark.filterwarnings("always::treeadapt.TreeAdaptWarning")
def test_commands_warn_of_a_file_that_was_written_again(tmp_path):
    path, new = tmp_path / "x.safetensors", tmp_path / "new.safetensors"
    ta.save(path, trained())
    rewritten(path, cast_to(jnp.bfloat16, *WEIGHTS))
    for command in (("show", path), ("diff", path, path), ("convert", path, new)):
        done = invoke(*command)
        assert done.exit_code == 0, done.output
        assert "warning: The checkpoint" in done.stderr
    assert run("diff", path, new, "--values") == "No difference.\n"


@pytest.mark.parametrize("version", [2, "1", None, 0])
@pytest.mark.parametrize("name", ["x.safetensors", "x", "shards"])
def test_marks_of_another_version_are_not_read(name, version, tmp_path):
    path = tmp_path / name
    ta.save(path, trained(), **({"max_shard_bytes": 99} if name == "shards" else {}))
    new = {"version": version, "leaves": "as a later version says it", "hash": "?"}
    if name == "x":
        document = json.loads((path / "_METADATA").read_text())
        document["custom_metadata"]["treeadapt"] = new
        (path / "_METADATA").write_text(json.dumps(document))
    elif name == "shards":
        document = json.loads((path / INDEX).read_text())
        document["metadata"]["treeadapt"] = new
        (path / INDEX).write_text(json.dumps(document))
        assert ta.load(path)["params"]["norm"].all()  # nothing is lost
        return
    else:
        with safetensors.safe_open(path, "np") as file:
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = {"treeadapt": json.dumps(new)}
        safetensors.numpy.save_file(flat, path, metadata=texts)
    found = warned(lambda: ta.load(path), f"are of version {version!r}")
    assert found["params"]["norm"].all()


def test_the_marks_of_today_are_of_version_one(tmp_path):
    # If this text changes, the version must, or older files are taken for changed.
    ta.save(tmp_path / "x.safetensors", trained())
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
        marks = json.loads(file.metadata()["treeadapt"])
    assert marks == {
        "version": 1,
        "ties": {"params/head": "params/embed"},
        "kinds": {"key": "threefry2x32", "rate": "number", "step": "number"},
        "hash": "8bd4c8803c80c12d",
    }


# --- what other tools leave behind ---

NARROW = {"w": np.arange(6).reshape(2, 3).astype(jnp.bfloat16)}
BYTES = {"q": np.arange(4).astype(jnp.float8_e4m3fn), "n": np.arange(3).astype("int4")}


def test_an_archive_of_bfloat16_is_read_as_it_was_written(tmp_path):
    file, flat = tmp_path / "x.npz", {**NARROW, "b": np.ones(2, np.float32)}
    np.savez(file, **flat)  # which writes |V2
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), flat)
    for target in (None, flat, shapes, jax.tree.map(jnp.asarray, flat)):
        again = ta.load(file, target)
        for name, leaf in flat.items():
            assert again[name].dtype == leaf.dtype
            assert np.asarray(again[name]).tobytes() == leaf.tobytes()
    half = {"w": np.zeros((2, 3), np.float16)}
    (pair,) = ta.compare_checkpoint(file, half, where="w").retyped.values()
    assert pair == ("bfloat16[2,3]", "float16[2,3]")
    m = ta.Migration({"b": None, "{x} : a b": "k/{x} : b a"})
    moved = ta.load(file, {"k": {"w": jnp.zeros((3, 2), jnp.bfloat16)}}, migration=m)
    np.testing.assert_array_equal(moved["k"]["w"], NARROW["w"].T)


def test_an_archive_of_bytes_without_a_dtype_is_not_guessed(tmp_path):
    file = tmp_path / "x.npz"
    np.savez(file, **NARROW, **BYTES)  # which writes |V1
    with pytest.warns(ta.TreeAdaptWarning, match="'q' is left out, because void8"):
        assert ta.read_metadata(file).keys() == {"w"}
    np.savez(file, **BYTES)
    with pytest.raises(ta.CheckpointError, match="it holds no numbers: 'q'"):
        ta.load(file)


def of_flax(folder, step, tree=FLAT):
    """Write what ``flax.training.checkpoints.save_checkpoint`` does without Orbax."""
    folder.mkdir(exist_ok=True)
    (folder / f"checkpoint_{step}").write_bytes(serialization.to_bytes(tree))
    return folder / f"checkpoint_{step}"


def test_a_checkpoint_of_flax_without_an_ending_is_read_by_its_content(tmp_path):
    file = of_flax(tmp_path / "run", 4)
    (tmp_path / "run" / "checkpoint_tmp").write_bytes(b"")
    (tmp_path / "run" / "events.out.1").write_bytes(b"\x80\x04anything")
    for name in (file, file.parent):
        same(ta.load(name, zeros_of(FLAT)), FLAT)
        assert ta.read_metadata(name).keys() == FLAT.keys()
        assert run("show", name)
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ta.CheckpointError, match="it is cut off"):
        ta.load(file)


@pytest.mark.parametrize("ending", ["", ".bin", ".weights", ".ckpt"])
def test_files_of_any_name_are_read_by_their_content(ending, tmp_path):
    ta.save(tmp_path / "x.safetensors", FLAT)
    np.savez(tmp_path / "x.npz", **FLAT)
    for old in ("x.safetensors", "x.npz"):
        name = tmp_path / f"model{ending}"
        shutil.copy(tmp_path / old, name)
        same(ta.load(name), ta.load(tmp_path / old))


def archive_of_torch():
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        # The same bytes at any time of day.
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), b"\x80\x02}q\x00.")
    return raw.getvalue()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (pickle.dumps({"w": 1}), "it is a pickle, which can run code and is not read"),
        (archive_of_torch(), "it holds no tensors"),
    ],
    ids=["pickle", "archive"],
)
def test_a_pickle_of_any_name_is_named(content, text, tmp_path):
    (tmp_path / "model_best").write_bytes(content)
    with pytest.raises(ta.CheckpointError, match=text):
        ta.load(tmp_path / "model_best")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 26214\n"
DAMAGED = {
    "a pointer": (lambda _: POINTER, "pointer of Git LFS, and not the .* git lfs pull"),
    "nothing": (lambda _: b"", "it is empty. Download"),
    "a page": (lambda _: b"\n<!DOCTYPE html><html>404", "it is a web page"),
    "half": (lambda raw: raw[: len(raw) // 2], "cut off|not a whole archive"),
    "nearly all": (lambda raw: raw[:-3], "cut off|not a whole archive"),
}
KINDS = ("x.safetensors", "x.npz", "x.msgpack", "checkpoint_9", "shards", INDEX)


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_not_what_it_should_be_is_named(case, kind, tmp_path):
    file = name = tmp_path / kind
    damage, text = DAMAGED[case]
    if kind in ("shards", INDEX):
        name = tmp_path / "shards"
        ta.save(name, FLAT, max_shard_bytes=40)
        file = name / INDEX if kind == INDEX else next(name.glob("*-00002-*"))
        text += "|JSONDecodeError" * (kind == INDEX)
    elif kind == "x.npz":
        np.savez(file, **FLAT)
    elif kind == "x.safetensors":
        ta.save(file, FLAT)
    else:
        file.write_bytes(serialization.to_bytes(FLAT))
    file.write_bytes(damage(file.read_bytes()))
    for read in (ta.load, ta.read_metadata):
        with pytest.raises(ta.CheckpointError, match=text) as caught:
            read(name)
        assert file.name in str(caught.value)
        assert len(str(caught.value)) < 700


def test_what_follows_the_last_array_of_a_file_is_an_error(tmp_path):
    file = tmp_path / "x.safetensors"
    ta.save(file, FLAT)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"more")
    said = f"it has {size + 4:,} bytes, and its header describes {size:,}"
    with pytest.raises(ta.CheckpointError, match=said):
        ta.read_metadata(file)


def test_the_name_of_a_model_on_a_hub_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ta.CheckpointError, match="run hf download google/gemma-2b, and"
    ):
        ta.load("google/gemma-2b")
    assert "run hf download google/gemma-2b, and" in run(
        "show", "google/gemma-2b", code=2
    )
    for other in ("org/x.safetensors", "/org/x", "a/b/c", "model"):
        with pytest.raises(ta.CheckpointError) as caught:
            ta.load(other)
        assert "hf download" not in str(caught.value)


# --- the steps of a run ---


def steps_of_orbax(folder, *steps, prefix=None):
    """Save steps as Orbax's manager does; each has its number."""
    options = ocp.CheckpointManagerOptions(step_prefix=prefix, max_to_keep=9)
    with ocp.CheckpointManager(folder, options=options) as manager:
        for step in steps:
            tree = {"w": np.full(3, step, np.float32)}
            manager.save(step, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [None, "checkpoint"])
def test_the_last_step_of_a_run_is_read_and_named(prefix, tmp_path):
    run_folder = steps_of_orbax(tmp_path / "run", 900, 1000, 1100, prefix=prefix)
    names = sorted(each.name for each in run_folder.iterdir())
    last = next(name for name in names if "1100" in name)
    said = f"last that is complete, '{last}', is read; there are 2 earlier steps"
    target = {"w": np.zeros(3, np.float32)}
    for read in (lambda x: ta.load(x, target), ta.load):
        with pytest.warns(ta.TreeAdaptWarning, match=said):
            assert read(run_folder)["w"][0] == 1100
    with pytest.warns(ta.TreeAdaptWarning, match=said):
        assert ta.compare_checkpoint(run_folder, target).fits
    for name in names:  # without a warning
        assert ta.load(run_folder / name, target)["w"][0] == int(
            name.rpartition("_")[2]
        )
    # Those that are being written, or were not to their end, are not taken.
    (run_folder / f"{last}.orbax-checkpoint-tmp-12").mkdir()
    shutil.copytree(run_folder / last, run_folder / last.replace("1100", "1200"))
    metadata = run_folder / last.replace("1100", "1200") / "default" / "_METADATA"
    metadata.unlink()
    with pytest.warns(
        ta.TreeAdaptWarning, match="2 earlier steps, '.*1200' incomplete"
    ):
        assert ta.load(run_folder, target)["w"][0] == 1100


@pytest.mark.slow
@pytest.mark.filterwarnings("always::treeadapt.TreeAdaptWarning")
def test_commands_say_which_step_they_read(tmp_path):
    run_folder = steps_of_orbax(tmp_path / "run", 9, 10)
    done = invoke("show", run_folder)
    assert done.exit_code == 0
    assert "the last that is complete, '10', is read" in done.stderr.replace(
        "The", "the"
    )
    assert run("diff", run_folder, run_folder / "10", "--values") == "No difference.\n"


def test_a_run_of_one_step_is_that_step(tmp_path):
    run_folder = steps_of_orbax(tmp_path / "run", 7)
    assert ta.load(run_folder)["w"][0] == 7
    (run_folder / "7" / "default" / "_METADATA").unlink()
    with pytest.raises(ta.CheckpointError, match="there is neither"):
        ta.load(run_folder)


def test_the_last_step_of_flax_is_read(tmp_path):
    for step in (2, 10):
        of_flax(tmp_path / "run", step, {"w": np.full(3, step)})
    with pytest.warns(ta.TreeAdaptWarning, match="'checkpoint_10', is read"):
        assert ta.load(tmp_path / "run")["w"][0] == 10
    # Of two runs in one folder, none is meant.
    (tmp_path / "run" / "other_3").write_bytes(
        serialization.to_bytes({"w": np.ones(3)})
    )
    with pytest.raises(ta.CheckpointError, match=r"It holds '.*/other_3', '.*_10'"):
        ta.load(tmp_path / "run")


def test_a_folder_of_one_checkpoint_has_no_steps(tmp_path):
    # Numbered items of one step, and numbers next to files that are meant.
    ta.save(tmp_path / "model.safetensors", FLAT)
    steps_of_orbax(tmp_path / "5", 1)
    same(ta.load(tmp_path, zeros_of(FLAT)), FLAT)


def test_files_of_another_kind_than_their_ending_are_said_to_be(tmp_path):
    right, wrong = tmp_path / "w.safetensors", tmp_path / "w.npz"
    ta.save(right, {"w": np.ones(2)})
    right.rename(wrong)
    with pytest.raises(ta.CheckpointError, match="as safetensors do: give it that end"):
        ta.load(wrong)
    wrong.rename(right)
    assert ta.load(right)["w"].shape == (2,)
    right.write_bytes(b"\x80\x04}." * 10)
    with pytest.raises(ta.CheckpointError, match="So do pickles, which are"):
        ta.load(right)
