"""Replacing a checkpoint: what may be replaced, and what exists at every moment."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from command import run
from sizes import some

import treeadapt as ta
from treeadapt.checkpoints import locating, orbax_folder, replacing
from treeadapt.checkpoints.record import DTYPES

# Orbax may leave its event loop to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX only")

TREE = {"a": np.ones(2, np.float32)}


def content(folder):
    """Return every file below a folder, with its bytes."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def with_steps(runs):
    runs.mkdir()
    ta.save(runs / "step_1", TREE)
    (runs / "notes.txt").write_text("years")
    return runs


def with_items(root):
    with ocp.CheckpointManager(root) as manager:
        for step in (9, 10):
            items = {name: ocp.args.StandardSave(TREE) for name in ("opt", "params")}
            manager.save(step, args=ocp.args.Composite(**items))
    return root


def with_a_note(folder):
    ta.save(folder, TREE)
    (folder / "d" / "notes.txt").write_text("years")
    return folder


HOLDERS = {
    "steps": lambda tmp: with_steps(tmp / "runs"),
    "a step alone": lambda tmp: with_a_note(tmp / "runs" / "0").parent,
    "a manager": lambda tmp: with_items(tmp / "runs"),
    "a manager's step": lambda tmp: with_items(tmp / "runs") / "10",
    "a note in a checkpoint": lambda tmp: with_a_note(tmp / "runs"),
}


@pytest.mark.hazard("K22")
@pytest.mark.parametrize("case", HOLDERS)
def test_only_a_folder_that_is_exactly_one_checkpoint_is_replaced(case, tmp_path):
    (tmp_path / "runs").mkdir() if case == "a step alone" else None
    folder = HOLDERS[case](tmp_path)
    before = content(tmp_path)
    with pytest.raises(ta.CheckpointError, match="is not replaced") as caught:
        ta.save(folder, TREE)
    assert "choose another name." in str(caught.value).lower()
    assert content(tmp_path) == before
    ta.save(tmp_path / "x.safetensors", TREE)
    shown = run("convert", tmp_path / "x.safetensors", folder, "--force", code=2)
    assert "is not replaced" in shown
    (tmp_path / "x.safetensors").unlink()
    assert content(tmp_path) == before


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 8}])
def test_the_current_folder_is_not_replaced(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (".", tmp_path):
        with pytest.raises(ta.CheckpointError, match="is the current folder"):
            ta.save(path, TREE, **options)
    assert Path.cwd() == tmp_path
    assert not any(tmp_path.parent.glob(".*.part"))


def test_files_added_to_the_folder_during_writing_stay(tmp_path, monkeypatch):
    ta.save(tmp_path / "x", TREE)
    write = orbax_folder.write

    def slow(*args):
        write(*args)
        (tmp_path / "x" / "notes.txt").write_text("years")

    monkeypatch.setattr(orbax_folder, "write", slow)
    with pytest.raises(ta.CheckpointError, match=r"did not write: 'notes.txt'"):
        ta.save(tmp_path / "x", TREE)
    assert (tmp_path / "x" / "notes.txt").read_text() == "years"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.slow
def test_a_folder_of_steps_is_read_at_the_last_complete_one(tmp_path):
    root = with_items(tmp_path / "runs")
    (root / "11.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (root / "11.orbax-checkpoint-tmp" / "params" / "_METADATA").touch()
    step = root / "10"
    with pytest.warns(ta.TreeAdaptWarning, match=f"The last .* '10'.*{str(step)!r}"):
        loaded = ta.load(root, {"params": TREE, "opt": TREE})
    assert loaded["params"]["a"].tolist() == [1, 1]
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(step, TREE)
    # The call in the second line works.
    cure = str(caught.value).splitlines()[1].partition("it (")[2].partition(": ")[2]
    assert (
        cure
        == f"ta.load({str(step)!r}, {{'params': target}}, where='params')['params']."
    )
    names = {"ta": ta, "target": TREE}
    assert eval(cure.removesuffix("."), names)["a"].tolist() == [1, 1]
    for item in ("params", "opt"):
        assert ta.load(step / item, TREE)["a"].tolist() == [1, 1]


@posix
@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_a_link_is_not_replaced_and_not_followed(ending, tmp_path):
    link, real = tmp_path / f"latest{ending}", tmp_path / f"step{ending}"
    ta.save(real, TREE)
    link.symlink_to(real.name)
    assert ta.load(link, TREE)["a"].tolist() == [1, 1]
    with pytest.raises(ta.CheckpointError, match=f"a link to 'step{ending}'"):
        ta.save(link, {"b": np.ones(1)})
    assert link.is_symlink()
    assert list(ta.read_metadata(real)) == ["a"]


# What exists at every moment.

SAVER = """
import sys
import numpy as np, treeadapt as ta
from treeadapt.checkpoints import replacing

exchange, number = replacing._exchange, 0
while True:
    number += 1
    replacing._exchange = exchange if number % 2 else lambda *_: False
    ta.save(sys.argv[1], {name: np.full(3, float(number)) for name in "abc"})
    print(number, flush=True)
"""
LOADED = {name: np.zeros(3) for name in "abc"}


def numbers(path):
    """Return the number of the save at a path, which must be consistent."""
    found = {float(x) for leaf in ta.load(path, LOADED).values() for x in leaf}
    assert len(found) == 1
    return found.pop()


@posix
@pytest.mark.slow
@pytest.mark.hazard("K23")
@pytest.mark.filterwarnings("ignore:A save to:treeadapt.TreeAdaptWarning")
def test_a_kill_at_a_random_moment_leaves_the_old_or_the_new_checkpoint(tmp_path):
    path = tmp_path / "x"
    command = [sys.executable, "-c", SAVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
        saver.stdout.readline()
        time.sleep(random.uniform(0, 0.4))
        saver.send_signal(signal.SIGKILL)
        said = saver.stdout.read().split()
    last = float(said[-1]) if said else 1.0
    assert numbers(path) in (last, last + 1)
    ta.save(path, LOADED)
    assert os.listdir(tmp_path) == ["x"]
    assert numbers(path) == 0


# Kills itself at one of the events that Python reports, such as any use of a file.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from treeadapt.checkpoints import replacing

path, exchanges, left = Path(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3])
if not exchanges:
    replacing._exchange = lambda *_: False

def hook(event, _):
    global left
    if event.startswith(("os.r", "os.mkdir", "open", "fcntl.", "ctypes.dlsym")):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
with replacing.replaced(path) as new:
    new.mkdir()
    for name in "ab":
        (new / name).write_text("new")
left = 0
"""


@posix
@pytest.mark.slow
@pytest.mark.hazard("K23")
@pytest.mark.filterwarnings("ignore:A save to:treeadapt.TreeAdaptWarning")
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_use_of_a_file_leaves_one_of_the_two(exchanges, tmp_path, fresh):
    path = tmp_path / "x"
    seen, found, killed = set(), {"new"}, -signal.SIGKILL
    for event in range(1, 200):
        if "new" in found:
            if path.exists():
                for file in path.iterdir():
                    file.unlink()
            else:
                path.mkdir()
            for name in "ab":
                (path / name).write_text("old")
        killed = fresh.run(KILLED, path, exchanges, event).returncode
        if exchanges:
            assert path.exists()
        replacing.restore(path)  # as each save and load does first
        assert os.listdir(tmp_path) == ["x"]
        found = {text.decode() for text in content(path).values()}
        assert sorted(content(path)) == ["a", "b"]
        assert len(found) == 1
        seen |= found
        if killed == 0:
            break
    assert (killed, seen) == (0, {"old", "new"})


@pytest.mark.hazard("K24")
@pytest.mark.parametrize("name", ["x", "x.safetensors"])
def test_a_load_never_mixes_two_saves(name, tmp_path, monkeypatch):
    path = tmp_path / name
    ta.save(path, TREE)
    reader = locating.FORMATS[locating.format_of(path)]
    read = reader.read

    def late(*args):
        ta.save(path, {"a": np.zeros(2, np.float32)})
        return read(*args)

    monkeypatch.setattr(reader, "read", late)
    with pytest.raises(ta.CheckpointError, match="replaced while it was read"):
        ta.load(path, TREE)


@pytest.mark.slow
@posix
@pytest.mark.parametrize("exchanges", [True, False])
def test_one_of_several_concurrent_writers_wins_completely(
    exchanges, tmp_path, monkeypatch
):
    if not exchanges:
        monkeypatch.setattr(replacing, "_exchange", lambda *_: False)
    path, failed = tmp_path / "x", []

    def run(number):
        try:
            for _ in range(50):
                with replacing.replaced(path) as new:
                    new.mkdir()
                    for name in "ab":
                        (new / name).write_text(str(number))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(set(content(path).values())) == 1
    assert os.listdir(tmp_path) == ["x"]


def test_what_was_replaced_is_never_put_back(tmp_path, monkeypatch):
    monkeypatch.setattr(replacing, "_exchange", lambda *_: False)
    ta.save(tmp_path / "x", TREE)
    left, remove = [], replacing._remove

    def watched(folder):
        left.extend(os.listdir(folder))
        remove(folder)

    monkeypatch.setattr(replacing, "_remove", watched)
    ta.save(tmp_path / "x", TREE)
    assert sorted(left) == ["lock", "replaced"]  # restore looks for "old"


@posix
def test_files_of_a_running_writer_are_not_litter(tmp_path):
    with replacing.replaced(tmp_path / "x") as new:
        new.mkdir()
        (new / "a").write_text("one")
        with replacing.replaced(tmp_path / "x") as other:
            other.mkdir()
        replacing.restore(tmp_path / "x")
    assert (tmp_path / "x" / "a").read_text() == "one"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_if_the_last_step_fails_the_old_checkpoint_stays(
    exchanges, tmp_path, monkeypatch
):
    path = tmp_path / "x"
    ta.save(path, TREE)
    if exchanges:
        full = OSError(errno.EIO, "Input/output error")
        monkeypatch.setattr(replacing, "_exchange", lambda *_: throw(full))
    else:
        monkeypatch.setattr(replacing, "_exchange", lambda *_: False)
        rename = os.rename
        monkeypatch.setattr(
            os, "rename", lambda a, b: throw(b) if ends(a, "new") else rename(a, b)
        )
    with pytest.raises(ta.CheckpointError, match="is still there") as caught:
        ta.save(path, {"b": np.ones(1)})
    assert repr(str(path)) in str(caught.value)
    assert list(ta.read_metadata(path)) == ["a"]
    assert os.listdir(tmp_path) == ["x"]


def test_if_the_old_checkpoint_cannot_be_put_back_the_error_names_both(
    tmp_path, monkeypatch
):
    path = tmp_path / "x"
    ta.save(path, TREE)
    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(replacing, "_exchange", lambda *_: False)
        patch.setattr(
            os, "rename", lambda a, b: throw(b) if b == path else rename(a, b)
        )
        with pytest.raises(ta.CheckpointError) as caught:
            ta.save(path, {"b": np.ones(1)})
    [folder] = tmp_path.iterdir()
    for name in ("old", "new"):
        assert (folder / name / "_METADATA").is_file()
        assert repr(str(folder / name)) in str(caught.value)
    with pytest.warns(ta.TreeAdaptWarning, match="was put back"):
        assert list(ta.read_metadata(path)) == ["a"]
    assert os.listdir(tmp_path) == ["x"]


def throw(reason):
    raise reason if isinstance(reason, OSError) else OSError(errno.EIO, str(reason))


def ends(path, name):
    return Path(path).name == name


@posix
def test_a_link_that_looks_like_litter_is_left_alone(tmp_path):
    home = tmp_path / "home"
    for name in ("old", "new"):
        (home / name).mkdir(parents=True)
    (home / "lock").touch()
    with replacing.replaced(tmp_path / "x") as new:
        litter = tmp_path / f"{new.parent.name[:-5]}a.part"
        new.touch()
    litter.symlink_to(home)
    replacing.restore(tmp_path / "y")
    (tmp_path / "x").unlink()
    replacing.restore(tmp_path / "x")
    assert sorted(os.listdir(home)) == ["lock", "new", "old"]
    assert not (tmp_path / "x").exists()


@posix
def test_a_new_folder_has_the_mode_of_the_old_one(tmp_path):
    ta.save(tmp_path / "x", TREE)
    (tmp_path / "x").chmod(0o700)
    ta.save(tmp_path / "x", TREE)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_a_name_may_have_the_maximum_length(ending, tmp_path):
    path = tmp_path / ("漢" * 80 + ending)
    for number in (1, 2):
        ta.save(path, {"漢" * 200: np.full(1, number)})
    assert ta.load(path, {"漢" * 200: np.zeros(1, int)})["漢" * 200].tolist() == [2]
    assert os.listdir(tmp_path) == [path.name]


LACKING = ("float8_e4m3", "uint2", "uint4")  # of TensorStore, as arrays too


@pytest.mark.parametrize("name", some([name for name in DTYPES if name not in LACKING]))
def test_orbax_accepts_a_numpy_scalar_of_each_dtype(name, tmp_path):
    dtype = DTYPES[name]
    ta.save(tmp_path / "x", {"a": dtype.type(1), "b": jnp.ones(2)})
    found = ta.load(tmp_path / "x", {"a": np.zeros((), dtype), "b": jnp.zeros(2)})["a"]
    assert (found.dtype, found.shape, bool(found == dtype.type(1))) == (dtype, (), True)
