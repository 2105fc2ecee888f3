"""Every error and warning that treeadapt raises itself.

All errors are ``ValueError``s under one root, name the path, say what was seen and
what to do, and hold at most 4 kB of text whatever the size of the tree. The catalogue
with causes and cures is ``docs/errors.md``, and ``docs/warnings.md``.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_MESSAGE_BYTES = 4000
_OURS = f"{__package__}."

#: Whether ``explaining`` lets errors through. Tests set it, so that it hides no defect.
RAISES_IN_EXPLANATIONS = False


class TreeAdaptError(ValueError):
    """Root of all treeadapt errors; the message is clipped to 4 kB.

    Args:
        message: what happened, to which path, what was seen, what to do.
        paths: label paths that it is about, each once.

    Attributes:
        paths: all of them, however many the message shows; empty if it is about none.

    Example:
        >>> error = TreeAdaptError("x" * 10_000, paths=["a/w", "b/w"])
        >>> len(str(error).encode()), error.paths
        (4000, ('a/w', 'b/w'))
    """

    def __init__(self, message: str, *, paths: Iterable[str] = ()):
        super().__init__(_clip(message))
        self.paths = tuple(dict.fromkeys(paths))

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython 7 and later print, in notebooks too.

        They ask an exception for it. Of frames of this package in a row, only the
        first, which the caller called, is in it.
        """
        shell = sys.modules["IPython"].get_ipython()
        lines: list[str] = shell.InteractiveTB.structured_traceback(
            type(self), self, _folded(self.__traceback__), tb_offset=1
        )
        return lines


def _folded(frames: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback with one of several frames of this package in a row."""
    kept: list[types.TracebackType] = []
    was_ours = False
    while frames is not None:
        is_ours = frames.tb_frame.f_globals.get("__name__", "").startswith(_OURS)
        kept += [] if is_ours and was_ours else [frames]
        was_ours, frames = is_ours, frames.tb_next
    folded = None
    for each in reversed(kept):
        place = each.tb_frame, each.tb_lasti, each.tb_lineno
        folded = types.TracebackType(folded, *place)
    return folded


class PathError(TreeAdaptError):
    """A key cannot be written as a segment of a label path."""


class PathCollisionError(PathError):
    """Two leaves of one tree, or two keys of one node, have the same label path."""


class TreeDepthError(TreeAdaptError):
    """A tree is nested deeper than JAX can flatten."""


class TreeCycleError(TreeDepthError):
    """A tree contains itself."""


class AdapterError(TreeAdaptError):
    """A registry entry is wrong, or an object that holds arrays has none."""


class StructureMismatchError(TreeAdaptError):
    """The given entries do not fit the target: missing, unexpected or misshaped."""


class PatternError(TreeAdaptError):
    """A path pattern is malformed; the message points at the column."""


class MigrationProblem(NamedTuple):
    """One thing that keeps a migration from being done.

    Attributes:
        row: text of the row that makes it; None if no row does.
        kind: ``"unmatched"``, ``"missing"``, ``"misfit"`` and so on, as in ``lint``.
        paths: leaves that it is about, of the source or of the target.
    """

    row: str | None
    kind: str
    paths: tuple[str, ...]


class MigrationError(TreeAdaptError):
    """A table of rows does not fit the leaves, or is malformed.

    Attributes:
        problems: all that is wrong, if the table was planned.
    """

    def __init__(
        self,
        message: str,
        *,
        paths: Iterable[str] = (),
        problems: Iterable[MigrationProblem] = (),
    ):
        self.problems = tuple(problems)
        concerned = [path for each in self.problems for path in each.paths]
        super().__init__(message, paths=[*paths, *concerned])


class CheckpointError(TreeAdaptError):
    """A checkpoint cannot be read or written: damaged, unknown or misfitting."""


class SelectorError(TreeAdaptError):
    """A selector was used where it cannot answer."""


class RulesError(TreeAdaptError):
    """A rules table does not fit the tree, or is malformed."""


class UnmatchedPathError(RulesError):
    """An array leaf is matched by no rule and there is no default."""


class UnusedRuleError(RulesError):
    """A pattern matches no array leaf, or only leaves that earlier rules match.

    Attributes:
        patterns: these patterns, as they were typed; of a class its name.
    """

    def __init__(
        self, message: str, *, paths: Iterable[str] = (), patterns: Iterable[str] = ()
    ):
        super().__init__(message, paths=paths)
        self.patterns = tuple(dict.fromkeys(patterns))


class OverlapError(RulesError):
    """Two rules with different values match one leaf and ``overlap="error"``."""


class RulesFileError(RulesError):
    """A rules file is malformed, or what it says of optimizers is wrong.

    Attributes:
        findings: all that is wrong with its optimizers, each with its place.
    """

    def __init__(
        self,
        message: str,
        *,
        paths: Iterable[str] = (),
        findings: Iterable[str] = (),
    ):
        super().__init__(message, paths=paths)
        self.findings = tuple(findings)


class StackError(TreeAdaptError):
    """A stack does not fit the tree, or layers of one array are to be told apart."""


class FreezeError(TreeAdaptError):
    """A leaf that a freeze spec froze is not frozen any more."""


class NoArraysError(TreeAdaptError):
    """An optimizer was given a tree without a single array to train."""


class TransformError(TreeAdaptError):
    """An Optax transformation cannot be used as asked."""


class ShardingError(TreeAdaptError):
    """A partition spec does not fit the array or the mesh."""


class TreeAdaptWarning(UserWarning):
    """Root of all treeadapt warnings."""


class UnstablePathWarning(TreeAdaptWarning):
    """A class gives its children no names, so their paths are positions."""


class TiedLeafWarning(TreeAdaptWarning):
    """One array has two paths and would train apart."""


class ReplicatedWarning(TreeAdaptWarning):
    """No rule matches some arrays, and the default puts them on every device."""


class UnusedAlternativeWarning(TreeAdaptWarning):
    """An alternative of a pattern matches nothing, and reads like a mistake."""


class UnliftedMaskWarning(TreeAdaptWarning):
    """A function decides otherwise on the flat dict that it is shown, or finds less."""


class CollectionWarning(TreeAdaptWarning):
    """Linen collections other than ``params`` are about to be trained."""


class RandomStateWarning(TreeAdaptWarning):
    """A model counts its random draws, and a rest of ``split`` keeps the old counts."""


@contextlib.contextmanager
def explaining(error: BaseException | None = None) -> Iterator[None]:
    """Run code that explains an error, or searches for what to warn of.

    If it fails, that is a note of the error, with the place, or else a warning: an
    explanation never replaces what it explains. Warnings pass, as errors too.
    """
    try:
        yield
    except Warning:  # of a filter that turns them into errors
        raise
    except Exception as failure:
        if RAISES_IN_EXPLANATIONS:
            raise
        frames = [*traceback.walk_tb(failure.__traceback__)]
        names = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
        ours = [n for n, name in enumerate(names) if name.startswith("treeadapt")]
        place = f"{names[ours[-1]]}, line {frames[ours[-1]][1]}"
        kind = type(failure).__name__
        note = f"treeadapt failed to explain more: {kind} in {place}. Please report it."
        if error is None:
            warnings.warn(note, TreeAdaptWarning, stacklevel=3)
        else:
            error.add_note(note)


def _clip(message: str) -> str:
    data = message.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return message
    return data[: MAX_MESSAGE_BYTES - 4].decode("utf-8", "ignore") + " ..."
