"""Putting a new file or folder in the place of an old one.

At every moment the old one or the new one is at the path, even if the process is
killed: a file is renamed over a file, and two folders are exchanged in one step where
the system can do that (Linux, on most local file systems). Elsewhere a folder is moved
aside first, and the next save or load puts it back if its writer died before the new
one was in place.

Everything is written in a hidden folder next to the path, ``.NAME.HASH.RANDOM.part``,
with a lock in it that its writer holds. The next save to this path removes such folders
whose writers are dead. Of several writers at once the last one wins.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from treeadapt.errors import CheckpointError, TreeAdaptWarning
from treeadapt.text.names import listing

try:
    import fcntl
except ImportError:  # Windows: what dead writers leave stays there
    fcntl = None  # type: ignore[assignment]

# What ``renameat2`` says where the kernel, or the file system (NFS), cannot exchange:
# https://man7.org/linux/man-pages/man2/rename.2.html
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST)
_CURRENT_FOLDER, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_ATTEMPTS = 100


@contextlib.contextmanager
def replaced(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Give a new name to write to, and put that at ``path`` if all went well.

    Args:
        path: a file, a folder or nothing; stays as it is if writing fails. A new entry
            gets its mode.
        check: called before the writing and again before the replacing; raises if what
            is at ``path`` must stay.

    Raises:
        CheckpointError: there is no folder to write to, or the new entry cannot be put
            at ``path``.
    """
    if not path.parent.is_dir():
        raise CheckpointError(
            f"There is no folder {listing([str(path.parent)])}. Make it."
        )
    place = path.absolute()
    restore(place)
    check()
    with _workplace(place) as folder:
        new = folder / "new"
        yield new
        check()
        with contextlib.suppress(FileNotFoundError):
            new.chmod(stat.S_IMODE(place.stat().st_mode))
        _put(new, place)


def restore(path: Path) -> None:
    """Remove what dead writers of ``path`` left, and put back what they moved away."""
    prefix = glob.escape(_prefix(path))
    for folder in path.parent.glob(f"{prefix}*.part"):
        with contextlib.suppress(OSError):  # another removed it
            _settle(folder, path)
    for folder in path.parent.glob(f"{prefix}*.gone"):
        _delete(folder)


def _settle(folder: Path, path: Path) -> None:
    if folder.is_symlink():  # made by someone else
        return
    try:
        lock = (folder / "lock").open("r+b")
    except FileNotFoundError:
        # Its writer died, or is, between making the folder and the lock in it. In the
        # second case either this fails, or the writer makes another folder.
        folder.rmdir()
        return
    old = folder / "old"
    with lock:
        is_displaced = old.exists() and not path.exists()
        if not _lock(lock, wait=is_displaced):
            return
        if old.exists() and not path.exists():
            old.rename(path)
            warnings.warn(
                f"A save to {listing([str(path)])} was interrupted. The checkpoint "
                "before it was put back.",
                TreeAdaptWarning,
                stacklevel=2,
            )
        _remove(folder)


def _remove(folder: Path) -> None:
    gone = folder.with_suffix(".gone")  # in one step: nothing in it is ever put back
    folder.rename(gone)
    _delete(gone)


def _delete(gone: Path) -> None:
    with contextlib.suppress(OSError):
        for entry in gone.iterdir():  # one has the mode of what it was to replace
            if entry.is_dir() and not entry.is_symlink():
                entry.chmod(stat.S_IRWXU)
    shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """Make a folder that is locked while in use."""
    while True:
        folder = Path(tempfile.mkdtemp(".part", _prefix(path), path.parent))
        with contextlib.suppress(FileNotFoundError):
            lock = (folder / "lock").open("xb")
            _lock(lock, wait=True)
            if (folder / "lock").exists():
                break
            lock.close()
        # Another save took the folder for one that a dead writer left.
    try:
        with lock:
            yield folder
    finally:
        if not (folder / "old").exists() or path.exists():
            with contextlib.suppress(OSError):  # another save removed it
                _remove(folder)


def _prefix(path: Path) -> str:
    # At most 188 bytes, so that the whole name is a name in any file system.
    digest = hashlib.sha256(path.name.encode("utf-8", "surrogatepass")).hexdigest()
    return f".{path.name[:40]}.{digest[:16]}."


def _lock(file: IO[Any], *, wait: bool) -> bool:
    """Lock a file until it is closed or its process ends. Returns whether it worked."""
    if fcntl is None:
        return False
    try:
        # Held by the open file: the kernel drops it however the process ends, and no
        # file with the number of a process can be mistaken for one that lives.
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # another has it, or this file system has no locks
        return False
    return True


def _put(new: Path, path: Path) -> None:
    old = new.with_name("old")
    try:
        if new.is_dir():
            _put_folder(new, path, old)
            with contextlib.suppress(OSError):  # else ``restore`` may take it for lost
                old.rename(old.with_name("replaced"))
        else:
            new.replace(path)
    except OSError as error:
        if old.exists():
            with contextlib.suppress(OSError):
                old.rename(path)
        kept = ""
        if path.exists():
            kept = " What was there is still there."
        elif old.exists():
            kept = (
                f" What was there is at {listing([str(old)])}, the new one at "
                f"{listing([str(new)])}. Rename one of them."
            )
        raise CheckpointError(
            f"{listing([str(path)])} was not replaced: {error}.{kept}"
        ) from error


def _put_folder(new: Path, path: Path, old: Path) -> None:
    for attempt in range(_ATTEMPTS):  # as often as other writers come in between
        try:
            new.rename(path)  # where nothing is, or an empty folder
        except OSError as error:
            # Another writer may have moved away by now what was in the way.
            if error.errno not in _IN_THE_WAY and not path.is_dir():
                raise
        else:
            return
        with contextlib.suppress(FileNotFoundError):
            if _exchange(new, path):
                return
            if old.exists():
                old.rename(new.with_name(f"older{attempt}"))
            path.rename(old)
    raise FileExistsError(errno.EEXIST, "other writers replace it all the time")


def _exchange(one: Path, two: Path) -> bool:
    """Exchange two entries in one step; False where the system cannot."""
    if sys.platform != "linux":
        return False
    # Python has no function for it; glibc has one since 2.28, others may have none.
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    names = os.fsencode(one), os.fsencode(two)
    if not call(_CURRENT_FOLDER, names[0], _CURRENT_FOLDER, names[1], _EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(two))
