"""Errors of checkpoints: short ones that name the file, whatever a library raised."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from treeadapt.checkpoints.url import Url, is_url
from treeadapt.errors import CheckpointError, TreeAdaptError
from treeadapt.text.data_files import one_line
from treeadapt.text.names import listing
from treeadapt.trees.describing import describe

AGAIN = "Download or copy it again."  # what is not whole


def named_path(path: Any) -> Path:
    """Return the local path that the caller gives.

    Raises:
        CheckpointError: it is a tree, by mistake, or a URL, or empty.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            "The name of a checkpoint comes first, save(path, tree) and load(path, "
            f"target); got {describe(path)} for it."
            + " Shards are named by their folder."
            * isinstance(path, list | tuple)
        )
    if is_url(os.fspath(path)):
        raise CheckpointError(
            "Checkpoints are written to files and folders of this machine, and not to "
            "a URL. Save there and copy it, or use Orbax itself."
        )
    if not os.fspath(path).strip():
        raise CheckpointError(
            f"The name of a checkpoint is empty, {os.fspath(path)!r:.60}, as an unset "
            "variable of a shell is. Name a file or a folder; the current one is '.'."
        )
    return Path(path)


def refuse(path: str | os.PathLike[str], problem: str, cure: str = "") -> NoReturn:
    """Raise because of what a checkpoint is.

    Raises:
        CheckpointError: always.
    """
    name = listing([os.fspath(path)])
    raise CheckpointError(
        f"The checkpoint {name} is unusable: {problem}. {cure}".strip()
    )


@contextlib.contextmanager
def reported(path: str | os.PathLike[str], action: str) -> Iterator[None]:
    """Turn whatever another library raises inside into one short error.

    Args:
        path: the checkpoint.
        action: ``"read"`` or ``"written"``.

    Raises:
        CheckpointError: instead of any other exception.
    """
    try:
        yield
    except TreeAdaptError:
        raise
    except Exception as error:  # noqa: BLE001 - and told in the one that is raised
        # Parsers of damaged files raise what they like, down to KeyError.
        text = one_line(error)
        cause: Exception | None = error
        problem = f": {type(error).__name__}{': ' * bool(text)}{text}"
        if isinstance(path, Url):
            text, cause = one_line(path.said_by(error)), None
            problem = f": {text}"
        reason = _system_reason(str(error))
        if reason not in text:  # it is in the middle, which was cut out
            problem = f": {reason}."
        if isinstance(error, ImportError):
            package = "orbax-checkpoint" if error.name == "orbax" else error.name
            problem = f" without {error.name}: pip install {package}."
        raise CheckpointError(
            f"The checkpoint {listing([os.fspath(path)])} cannot be {action}{problem}"
        ) from cause


def _system_reason(text: str) -> str:
    """Return the words of the system in a message, such as those of a full disk."""
    reasons = (os.strerror(number) for number in errno.errorcode)
    return next((reason for reason in reasons if reason in text), "")
