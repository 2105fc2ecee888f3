"""Kills, full disks, damage and races: the old checkpoint stays, errors name the file.

See ``test_replacing`` for what may be replaced, and for kills between the steps of the
replacing itself.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from forks import IMPORTS, Forks
from sizes import slow_but

import treeadapt as ta
from treeadapt.checkpoints import replacing, save_load
from treeadapt.checkpoints.array_boxes import FileArray
from treeadapt.cli import diffing, sources

# Orbax may leave its event loop to the collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(os.name != "posix", reason="kills and limits as POSIX does"),
]

KINDS = {
    "file": ("x.safetensors", {}),
    "shards": ("x", {"max_shard_bytes": 20_000}),
    "orbax": ("x", {}),
}
INDEX = "model.safetensors.index.json"


def tree(number):
    """Leaves that show which save they are of, and do not compress."""
    noise = np.random.default_rng(number).bytes(48_000)
    return {
        "small": np.full(3, number, np.float32),
        "wide": np.frombuffer(noise[:16_000], np.uint8),
        "wider": np.frombuffer(noise[16_000:], np.uint8),
    }


def number_of(path):
    """Return the number of the save at a path, all of which must be there."""
    found = ta.load(path, tree(0))
    number = int(found["small"][0])
    assert not ta.tree_diff(found, tree(number), values=True)
    return number


@pytest.fixture(scope="module")
def forks():
    prelude = f"""
import json, os, resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
{IMPORTS}
import orbax.checkpoint, safetensors.numpy, treeadapt as ta
from test_checkpoint_faults import tree
from treeadapt.checkpoints import replacing
"""
    made = Forks(prelude)
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    """A name at which save number 1 is, and the options of the next one."""
    name, options = KINDS[request.param]
    ta.save(tmp_path / name, tree(1), **options)
    return tmp_path / name, options


def clean(path, options):
    """Return whether a save replaces all that is there, with nothing left behind."""
    assert os.listdir(path.parent) == [path.name]
    ta.save(path, tree(99), **options)
    assert os.listdir(path.parent) == [path.name]
    return number_of(path) == 99


# The process ends.

READ = """
path, options, number = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
"""

# Kills itself at one of the uses of the folder that Python reports.
KILL = """
count, last = 0, int(sys.argv[4])
if sys.argv[5] == "moves":
    replacing._exchange = lambda *_: False

def hook(event, arguments):
    global count
    if event.startswith(("open", "os.", "shutil.")) and folder in repr(arguments):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

folder = os.path.dirname(path)
sys.addaudithook(hook)
ta.save(path, tree(number), **options)
print(count)
"""


@pytest.mark.slow
@pytest.mark.hazard("K23")
@pytest.mark.filterwarnings("ignore:A save to:treeadapt.TreeAdaptWarning")
@pytest.mark.parametrize(
    ("saved", "moves"),
    [("file", ""), *((kind, x) for kind in ("shards", "orbax") for x in ("", "moves"))],
    indirect=["saved"],
)
def test_a_save_that_is_killed_leaves_the_old_or_the_new_checkpoint(
    moves, saved, forks
):
    path, options = saved
    command = (READ + KILL, path, json.dumps(options))
    done = forks.run(*command, 2, 0, moves)
    assert done.returncode == 0, done.stderr
    count, old, seen = int(done.stdout), 2, set()
    events = {*range(1, count + 1, 1 + count // 12), *range(count - 6, count + 1)}
    for event in sorted(events):
        assert forks.run(*command, 10 + event, event, moves).returncode == -9
        found = number_of(path)
        assert found in (old, 10 + event)
        seen.add(found == old)
        old = found
        replacing.restore(path)  # as the next save does first
        assert os.listdir(path.parent) == [path.name]
    assert seen == {True, False}
    ta.save(path, tree(3), **options)
    assert clean(path, options)


# The system refuses to make a file longer, with a signal or an error.
LIMIT = """
if sys.argv[5] == "killed":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), hard))
try:
    ta.save(path, tree(number), **options)
except ta.CheckpointError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit_bytes", [100, 10_000, 20_000])
def test_a_kill_in_the_middle_of_a_write_leaves_the_old_checkpoint(
    limit_bytes, saved, forks
):
    path, options = saved
    command = (READ + LIMIT, path, json.dumps(options), 2, limit_bytes, "killed")
    assert forks.run(*command).returncode == -signal.SIGXFSZ
    assert number_of(path) == 1
    ta.save(path, tree(3), **options)
    assert clean(path, options)


# The disk is full or broken.


def said(done, options):
    """What a process wrote to stderr.

    TensorStore may answer after Orbax has given up, and Python prints that; only a hook
    of the whole process would hide it.
    """
    is_late = options == KINDS["orbax"][1] and "asyncio/base_" in done.stderr
    return "" if is_late else done.stderr


def test_no_setting_of_the_process_is_touched_while_orbax_runs(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def settings():
        hooks = sys.unraisablehook, sys.excepthook, threading.excepthook
        return *hooks, sys.getrecursionlimit(), [*warnings.filters], [*sys.path]

    before, inside = settings(), []
    for name in ("save", "restore"):
        run = getattr(ocp.PyTreeCheckpointHandler, name)

        def recorded(*args, run=run, **kwargs):
            inside.append(settings())
            return run(*args, **kwargs)

        monkeypatch.setattr(ocp.PyTreeCheckpointHandler, name, recorded)
    ta.save(tmp_path / "x", tree(1))
    ta.load(tmp_path / "x")
    assert len(inside) == 2
    assert all(each == before for each in inside)
    assert settings() == before


@pytest.mark.hazard("K28")
@pytest.mark.parametrize("limit_bytes", slow_but((), [100, 10_000, 20_000]))
def test_a_write_that_the_system_refuses_leaves_the_old_checkpoint(
    limit_bytes, saved, forks
):
    path, options = saved
    command = (READ + LIMIT, path, json.dumps(options), 2, limit_bytes, "fails")
    done = forks.run(*command)
    assert (done.returncode, said(done, options)) == (0, "")
    [line] = done.stdout.splitlines()
    assert repr(str(path)) in line
    assert "File too large" in line
    assert number_of(path) == 1
    assert clean(path, options)


@pytest.fixture(params=slow_but([16], [4, 16, 40]))
def small_disk(request, tmp_path):
    """A file system of so many KiB, where this user may make one."""
    (tmp_path / "disk").mkdir()
    size = f"size={request.param}k"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(tmp_path / "disk")]
    if shutil.which("mount") is None or subprocess.run(command).returncode:
        pytest.skip("file systems are made by root")
    yield tmp_path / "disk"
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


COMMAND = """
from treeadapt.cli.commands import main
sys.argv = ["treeadapt", "convert", *sys.argv[1:3], *json.loads(sys.argv[3])]
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.hazard("K28")
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_one_line_with_the_words_of_the_system(
    kind, small_disk, tmp_path, forks
):
    name, options = KINDS[kind]
    texts = json.dumps(options)
    saving = f"{READ}\n{LIMIT}".replace("resource.setrlimit", "lambda *_: ")
    done = forks.run(saving, small_disk / name, texts, 2, 0, "fails")
    assert (done.returncode, said(done, options)) == (0, "")
    [line] = done.stdout.splitlines()
    assert repr(str(small_disk / name)) in line
    assert "No space left on device" in line
    ta.save(tmp_path / "x.safetensors", tree(2))
    more = [f"--max-shard-bytes={n}" for n in options.values()]
    source, file = tmp_path / "x.safetensors", small_disk / name
    done = forks.run(COMMAND, source, file, json.dumps(more))
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "No space left on device" in line
    assert os.listdir(small_disk) == []


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


def failing(call, error, after=0):
    """Return a function that calls another so many times, and then raises."""
    left = after

    def made(*args, **kwargs):
        nonlocal left
        if not left:
            raise error
        left -= 1
        return call(*args, **kwargs)

    return made


@pytest.mark.hazard("K28")
@pytest.mark.parametrize("error", [FULL, BROKEN], ids=["full", "broken"])
@pytest.mark.parametrize("num_written", [0, 1, 2])
def test_if_one_of_the_shards_cannot_be_written_the_old_ones_stay(
    num_written, error, tmp_path, monkeypatch
):
    path, options = tmp_path / "x", KINDS["shards"][1]
    ta.save(path, tree(1), **options)
    with monkeypatch.context() as patch:
        write = failing(safetensors.numpy.save_file, error, num_written)
        patch.setattr(safetensors.numpy, "save_file", write)
        if num_written == 2:  # that is all, but for the index
            patch.undo()
            patch.setattr(Path, "write_text", failing(None, error))
        with pytest.raises(ta.CheckpointError, match=error.strerror) as caught:
            ta.save(path, tree(2), **options)
    assert repr(str(path)) in str(caught.value)
    assert number_of(path) == 1
    assert clean(path, options)


def test_if_a_leaf_cannot_be_read_the_copy_is_not_made(tmp_path):
    path, options = tmp_path / "to" / "x", KINDS["shards"][1]
    path.parent.mkdir()
    ta.save(path, tree(1), **options)
    ta.save(tmp_path / "from", tree(2), **options)
    seen = []

    def cut(name):
        seen.append(name)
        if len(seen) == 2:  # the first shard of the copy is written
            shutil.rmtree(tmp_path / "from")

    with pytest.raises(ta.CheckpointError, match=r"'.*/from'"):
        save_load.copy(tmp_path / "from", path, **options, progress=cut)
    assert len(seen) >= 2
    assert number_of(path) == 1
    assert clean(path, options)


# Root may do anything, so the program becomes another user, who has no other rights.
DENIED = """
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    ta.save(path, tree(number), **options)
except ta.CheckpointError as error:
    print(error)
"""


@pytest.fixture
def public():
    """A folder below none that only root may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_read_only_stays_as_it_is(kind, public, forks):
    name, options = KINDS[kind]
    home = public / "home"
    home.mkdir()
    ta.save(home / name, tree(1), **options)
    home.chmod(0o555)
    done = forks.run(READ + DENIED, home / name, json.dumps(options), 2)
    home.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert repr(str(home / name)) in done.stdout
    assert "Permission denied" in done.stdout
    assert number_of(home / name) == 1
    assert clean(home / name, options)


def test_a_checkpoint_that_is_read_only_is_not_exchanged(public, forks):
    options = KINDS["shards"][1]
    home = public / "home"
    home.mkdir()
    home.chmod(0o777)
    ta.save(home / "x", tree(1), **options)
    (home / "x").chmod(0o555)
    done = forks.run(READ + DENIED, home / "x", json.dumps(options), 2)
    assert done.returncode == 0, done.stderr
    assert "was not replaced" in done.stdout
    assert "still there" in done.stdout
    assert number_of(home / "x") == 1
    (home / "x").chmod(0o755)
    assert clean(home / "x", options)


# What is read is damaged.


def shards_of(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.hazard("K29")
@pytest.mark.parametrize("left_bytes", [0, 4, 8, 40, 2_000, -1])
@pytest.mark.parametrize("number", [0, 1])
def test_a_cut_shard_is_an_error_that_names_it(number, left_bytes, tmp_path):
    path, options = tmp_path / "x", KINDS["shards"][1]
    ta.save(path, tree(1), **options)
    shard = shards_of(path)[number]
    shard.write_bytes(shard.read_bytes()[:left_bytes])
    for read in (ta.read_metadata, ta.load, lambda path: ta.load(path, tree(0))):
        with pytest.raises(ta.CheckpointError) as caught:
            read(path)
        assert repr(str(shard)) in str(caught.value)
        assert len(str(caught.value)) < 600
    assert clean(path, options)  # a damaged one is replaced


def test_a_shard_that_was_exchanged_does_not_fit(tmp_path):
    path = tmp_path / "x"
    ta.save(path, tree(1), **KINDS["shards"][1])
    first = shards_of(path)[0]
    changed = {"small": np.ones(4, np.float32), "wide": tree(1)["wide"]}
    safetensors.numpy.save_file(changed, first)
    with (
        pytest.warns(ta.TreeAdaptWarning, match="is read as it is now"),
        pytest.raises(ta.CheckpointError, match=r"'small': float32\[4\], .* float32"),
    ):
        ta.load(path, tree(0))
    document = json.loads((path / INDEX).read_text())
    del document["metadata"]["treeadapt"]  # as of another program
    (path / INDEX).write_text(json.dumps(document))
    with pytest.raises(ta.CheckpointError, match=r"'small': float32\[4\], .* float32"):
        ta.load(path, tree(0))
    changed["other"] = changed.pop("wide")
    safetensors.numpy.save_file(changed, first)
    with pytest.raises(ta.CheckpointError, match=r"disagree .*'other', 'wide'"):
        ta.load(path)


@pytest.mark.parametrize(
    "metadata", [{"total_size": 1}, {"total_size": "many"}, {}, [], None, "absent"]
)
def test_what_the_index_adds_up_is_not_compared(metadata, tmp_path):
    # Published indexes have wrong sums, and the headers say how many bytes there are.
    path, options = tmp_path / "x", KINDS["shards"][1]
    ta.save(path, tree(1), **options)
    document = json.loads((path / INDEX).read_text())
    document["metadata"] = metadata
    if metadata == "absent":
        del document["metadata"]
    (path / INDEX).write_text(json.dumps(document))
    assert number_of(path) == 1
    assert clean(path, options)


# Several at once.

RIVALS = """
children = []
for child in range(3):
    children.append(os.fork())
    if not children[-1]:
        for repeat in range(15):
            ta.save(path, tree(10 * child + repeat % 10), **options)
        os._exit(0)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "shards"])
def test_of_several_processes_that_save_the_last_one_wins(kind, tmp_path, forks):
    name, options = KINDS[kind]
    done = forks.run(READ + RIVALS, tmp_path / name, json.dumps(options), 0)
    assert done.stdout.split("\n")[0] == "[0, 0, 0]", done.stderr
    assert number_of(tmp_path / name) % 10 == 4
    assert clean(tmp_path / name, options)


@pytest.mark.hazard("K24")
@pytest.mark.parametrize("action", ["load", "migrate", "copy", "diff"])
def test_what_comes_between_the_reading_of_two_leaves_is_noticed(
    action, tmp_path, monkeypatch
):
    path = tmp_path / "x"
    ta.save(path, tree(1), max_shard_bytes=1)
    read, seen = FileArray.read, []

    def late(self, boxes, *into):
        found = read(self, boxes, *into)
        if len(seen) == 1:
            ta.save(path, tree(2), max_shard_bytes=1)
        seen.append(self.path)
        return found

    monkeypatch.setattr(FileArray, "read", late)
    stack = {"small": "a", "wide : (x y)": "b : y x", "wider": "c"}
    calls = {
        "load": lambda: ta.load(path, tree(0)),
        "migrate": lambda: ta.load(path, migration=ta.Migration(stack, sizes={"x": 2})),
        "copy": lambda: save_load.copy(path, tmp_path / "y", max_shard_bytes=10**6),
        "diff": lambda: diffing.differences(
            [str(path)] * 2, sources.read_pair(*[str(path)] * 2), "**", values=True
        ),
    }
    with pytest.raises(ta.CheckpointError, match="was replaced while it was read"):
        calls[action]()
    assert len(seen) > 1
    monkeypatch.undo()
    assert number_of(path) == 2
    assert clean(path, KINDS["shards"][1])


@pytest.mark.slow
@pytest.mark.hazard("K24")
@pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="folders are exchanged on Linux only"
)
def test_who_reads_while_others_save_sees_one_checkpoint_or_an_error(tmp_path):
    path, options = tmp_path / "x", KINDS["shards"][1]
    ta.save(path, tree(0), **options)
    stop, errors, seen = threading.Event(), [], set()

    def saving(first):
        number = first
        while not stop.is_set():
            number = first + (number + 1) % 10
            # With other numbers of shards, too.
            ta.save(path, tree(number), max_shard_bytes=(20_000, 1)[number % 2])

    threads = [threading.Thread(target=saving, args=(n,)) for n in (10, 20)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            try:
                seen.add(number_of(path))
            except ta.CheckpointError as error:
                errors.append(str(error))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all("was replaced while it was read" in error for error in errors)
    assert number_of(path) >= 10
    assert clean(path, options)
