"""Every error and warning that treeadapt raises itself.

All errors are ``ValueError``s under one root, name the path, say what was seen and
what to do, and hold at most 4 kB of text whatever the size of the tree. The catalogue
with causes and cures is ``docs/errors.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_MESSAGE_BYTES = 4000
_NUMBER = re.compile("([0-9]+)")


class TreeAdaptError(ValueError):
    """Root of all treeadapt errors; the message is clipped to 4 kB.

    Args:
        message: what happened, to which path, what was seen, what to do.

    Example:
        >>> len(str(TreeAdaptError("x" * 10_000)).encode())
        4000
    """

    def __init__(self, message: str):
        super().__init__(_clip(message))


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


class RenameError(TreeAdaptError):
    """A rename table does not fit the leaves: none, two or no names for some."""


class CheckpointError(TreeAdaptError):
    """A checkpoint cannot be read or written: damaged, unknown or misfitting."""


class SelectorError(TreeAdaptError):
    """A selector was used where it cannot answer."""


class RulesError(TreeAdaptError):
    """A rules table does not fit the tree, or is malformed."""


class UnmatchedPathError(RulesError):
    """An array leaf is matched by no rule and there is no default."""


class UnusedRuleError(RulesError):
    """A pattern matches no array leaf, or only leaves that earlier rules match."""


class OverlapError(RulesError):
    """Two rules with different values match one leaf and ``overlap="error"``."""


class RulesFileError(RulesError):
    """A rules file is not valid TOML or JSON of a known version."""


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
    """One array stands under two paths and would train apart."""


class ReplicatedWarning(TreeAdaptWarning):
    """No rule speaks for some arrays, and the default puts them on every device."""


class UnliftedMaskWarning(TreeAdaptWarning):
    """A mask or label function decides otherwise on the flat dict that it is shown."""


class CollectionWarning(TreeAdaptWarning):
    """Linen collections other than ``params`` are about to be trained."""


class RandomStateWarning(TreeAdaptWarning):
    """A model counts its random draws, and a rest of ``split`` keeps the old counts."""


def listing(names: Iterable[str], *, limit: int = 8) -> str:
    """Write paths for a message: quoted, the first ``limit``, then how many more.

    Args:
        names: paths or patterns, in the order to show.
        limit: how many to write out.

    Example:
        >>> listing(["a/b", "c", "d"], limit=2)
        "'a/b', 'c' and 1 more"
    """
    names = list(names)
    shown = ", ".join(repr(shorten(name)) for name in names[:limit])
    left = len(names) - limit
    return f"{shown} and {left:,} more" if left > 0 else shown


def fold(texts: Iterable[str]) -> dict[str, list[int]]:
    """Write texts that differ in one number, three or more, as one text.

    Args:
        texts: paths, or lines about them.

    Returns:
        Each text, in order, and the places of the texts that it stands for.

    Example:
        >>> list(fold([*(f"layers/{i}/bias" for i in range(12)), "head", "h/0", "h/1"]))
        ['layers/{0..11}/bias', 'head', 'h/0', 'h/1']
        >>> fold([f"'b{i}/w{j}' (row {i})" for j in range(2) for i in range(1, 4)])
        {"'b{1..3}/w0' (row {1..3})": [0, 1, 2], "'b{1..3}/w1' (row {1..3})": [3, 4, 5]}
    """
    groups: dict[tuple[str, ...], list[tuple[list[str], list[int]]]] = {}
    for place, text in enumerate(texts):
        parts = _NUMBER.split(text)
        groups.setdefault(tuple(parts[::2]), []).append((parts, [place]))
    found = [row for rows in groups.values() for row in _fold_rows(rows)]
    found.sort(key=lambda row: row[1][0])
    folded: dict[str, list[int]] = {}
    for parts, places in found:
        folded.setdefault("".join(parts), []).extend(places)
    return folded


def _fold_rows(
    rows: list[tuple[list[str], list[int]]],
) -> list[tuple[list[str], list[int]]]:
    """Fold texts that are alike but for their numbers, one number after the other."""
    pending = list(range(1, len(rows[0][0]), 2))
    while pending and len(rows) > 2:
        # Numbers that differ together, in whatever way, are one number.
        codes = [_codes([parts[i] for parts, _ in rows]) for i in pending]
        together = [
            i for i, code in zip(pending, codes, strict=True) if code == codes[0]
        ]
        pending = [i for i in pending if i not in together]
        alike: dict[tuple[str, ...], list[tuple[list[str], list[int]]]] = {}
        for row in rows:
            others = (x for i, x in enumerate(row[0]) if i not in together)
            alike.setdefault(tuple(others), []).append(row)
        rows = [
            joined
            for same in alike.values()
            for joined in (_joined(same, together) if len(same) > 2 else same)
        ]
    return rows


def _joined(
    rows: list[tuple[list[str], list[int]]], at: list[int]
) -> list[tuple[list[str], list[int]]]:
    """Write rows that differ at some places only as one; as they are if that fails."""
    parts, places = list(rows[0][0]), [place for row in rows for place in row[1]]
    for index in at:
        texts = [row[0][index] for row in rows]
        numbers = sorted({int(text) for text in texts if len(text) < 10})
        width = len(texts[0]) if any(text[0] == "0" != text for text in texts) else 0
        if texts.count(texts[0]) == len(texts):
            continue
        is_run = len(numbers) == len(rows) == numbers[-1] - numbers[0] + 1
        if not is_run or {f"{n:0{width}}" for n in numbers} != {*texts}:
            return rows
        parts[index] = f"{{{numbers[0]:0{width}}..{numbers[-1]:0{width}}}}"
    return [(parts, places)]


def _codes(texts: list[str]) -> list[int]:
    first: dict[str, int] = {}
    return [first.setdefault(text, len(first)) for text in texts]


def plural(count: int, noun: str) -> str:
    """Write a count with its noun.

    Example:
        >>> plural(1, "leaf"), plural(1_247, "path")
        ('1 leaf', '1,247 paths')
    """
    irregular = {"leaf": "leaves", "entry": "entries"}
    word = noun if count == 1 else irregular.get(noun, noun + "s")
    return f"{count:,} {word}"


def shorten(text: str, *, limit: int = 200) -> str:
    """Cut the middle out of a text that is too long for a message.

    Example:
        >>> shorten("0123456789" * 9, limit=40)
        '01234567890123456789...34567890123456789'
    """
    return text if len(text) <= limit else f"{text[: limit - 20]}...{text[-17:]}"


def _clip(message: str) -> str:
    data = message.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return message
    return data[: MAX_MESSAGE_BYTES - 4].decode("utf-8", "ignore") + " ..."
