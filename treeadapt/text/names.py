"""Names in messages: lists of them, names that differ in a number, the nearest one.

Takes paths, patterns or lines about them; gives short text. ``section`` writes a list
below its title, ``Mismatch`` how two sets of names differ. Nothing here knows what the
names belong to.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

_NUMBER = re.compile("([0-9]+)")
MAX_LISTED = 12  # paths of a tree that messages list in full
SHOWN = 8  # names of a listing, rows of a section
_FEW = 3  # leaves of a node that are named
_MAX_TEXT = 300  # longer names are not typing errors
_FOLDED = 20_000  # names that are folded for a message
_MOST_DIGITS = 15  # of a number that is one of a range
_CANDIDATES = 2_000  # names among which the nearest is sought


def listing(
    names: Iterable[str], *, limit: int = SHOWN, write: Callable[[str], str] = repr
) -> str:
    """Write paths for a message: quoted, the first ``limit``, then how many more.

    Args:
        names: paths or patterns, in the order to show.
        limit: how many to write out.
        write: how; ``str`` for texts that are not to be quoted.

    Example:
        >>> listing(["a/b", "c", "d"], limit=2)
        "'a/b', 'c' and 1 more"
    """
    names = list(names)
    shown = ", ".join(write(shorten(name)) for name in names[:limit])
    left = len(names) - limit
    return f"{shown} and {left:,} more" if left > 0 else shown


def paths_text(paths: Sequence[str]) -> str:
    """Write a sentence that says which paths there are: all of a few, or the first.

    Example:
        >>> paths_text(["a/b", "c"])
        "The paths here are 'a/b', 'c'."
        >>> paths_text([f"{n}/w" for n in "abcdefghijklmnop"])
        "Paths here look like 'a/w', 'b/w', 'c/w' and 13 more."
        >>> paths_text([""])[:51]
        'This is one bare array in place of a tree: its path'
    """
    if list(paths) == [""]:
        return (
            "This is one bare array in place of a tree: its path is ''. A loop that "
            "ravels its params (jax.flatten_util.ravel_pytree) passes one, and no path "
            "selects a part of it: decide on the tree that it was made from."
        )
    if len(paths) <= MAX_LISTED:
        return f"The paths here are {listing(paths, limit=MAX_LISTED)}."
    return f"Paths here look like {listing(paths, limit=3)}."


def counts_text(counts: Mapping[str, int], *, limit: int = 6) -> str:
    """Write how many there are of each name, in natural order.

    Example:
        >>> counts_text({"kernel": 4, "bias": 1_200})
        'bias 1,200, kernel 4'
        >>> counts_text(dict.fromkeys("cab", 1), limit=2)
        'a 1, b 1 and 1 more'
    """
    texts = [
        f"{shorten(name, limit=40) or repr(name)} {counts[name]:,}"
        for name in sorted(counts, key=natural)
    ]
    return listing(texts, limit=limit, write=str)


def section(
    title: str, rows: Sequence[str] | Mapping[str, Sequence[int]], *, left: int = 0
) -> list[str]:
    """Write rows below a title: the first ``SHOWN``, then how many more.

    Args:
        title: the first line; none if empty.
        rows: lines, or what ``fold`` made of lines. Without any, there is no title.
        left: how many lines there are in addition.

    Example:
        >>> section("8 of 9 are odd:", ["a", "b"], left=6)
        ['8 of 9 are odd:', '  a', '  b', '  and 6 more']
        >>> section("", fold(f"{'abcdefghi'[i // 10]}/{i}" for i in range(90)))[-2:]
        ['  h/{70..79}', '  and 10 more']
    """
    lines = [f"  {row}" for row in first_rows(rows, left=left)]
    return [title, *lines] if title and lines else lines


def first_rows(
    rows: Sequence[str] | Mapping[str, Sequence[int]],
    *,
    limit: int = SHOWN,
    left: int = 0,
) -> list[str]:
    """Return the first rows, then how many more there are.

    Args:
        rows: as for ``section``.
        limit: how many to return.
        left: how many lines there are in addition.

    Example:
        >>> "; ".join(first_rows(["a", "b", "c"], limit=1))
        'a; and 2 more'
    """
    if isinstance(rows, Mapping):
        left += sum(map(len, itertools.islice(rows.values(), limit, None)))
    else:
        left += len(rows[limit:])
    shown = [*itertools.islice(rows, limit)]
    return [*shown, f"and {left:,} more"] if left > 0 else shown


def fold(texts: Iterable[str]) -> dict[str, list[int]]:
    """Write texts that differ in one number, three or more, as one text.

    Args:
        texts: paths, or lines about them.

    Returns:
        Each text, in order, and the places of the texts that it replaces.

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
    folds = [row for rows in groups.values() for row in _fold_rows(rows)]
    folds.sort(key=lambda row: row[1][0])
    folded: dict[str, list[int]] = {}
    for parts, places in folds:
        folded.setdefault("".join(parts), []).extend(places)
    return folded


def leaves_below(node: str, ends: Sequence[str]) -> str:
    """Write the leaves of a node: their names if they are few.

    Args:
        node: path of the node; empty for the whole tree.
        ends: what is below it.

    Example:
        >>> leaves_below("norm", ["bias", "scale"]), leaves_below("", [*"abcd"])
        ('norm/{bias,scale}', '**')
    """
    end = ends[0] if len(ends) == 1 else f"{{{','.join(ends)}}}"
    end = end if len(ends) <= _FEW else "**"
    return f"{node}/{end}" if node else end


def _fold_rows(
    rows: list[tuple[list[str], list[int]]],
) -> list[tuple[list[str], list[int]]]:
    """Fold texts that are alike but for their numbers, one number after the other."""
    pending = list(range(1, len(rows[0][0]), 2))
    while pending and len(rows) > 2:
        # Numbers that differ together, in whatever way, are one number.
        codes = {i: _codes([parts[i] for parts, _ in rows]) for i in pending}
        together = [i for i in pending if codes[i] == codes[pending[0]]]
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
        if texts.count(texts[0]) == len(texts):
            continue
        written = range_text(texts)
        if not written:
            return rows
        parts[index] = written
    return [(parts, places)]


def range_text(numbers: Sequence[str]) -> str:
    """Write numbers that follow each other as a pattern does; empty if they do not.

    Numbers of one width are others than those without zeros before them.

    Example:
        >>> range_text(["2", "1", "3"]), range_text(["08", "09", "10"])
        ('{1..3}', '{08..10}')
        >>> range_text(["0", "2", "4"])
        ''
    """
    values = sorted({int(text) for text in numbers if len(text) <= _MOST_DIGITS})
    padded = any(text[0] == "0" != text for text in numbers)
    width = len(numbers[0]) if padded else 0
    is_run = len(values) == len(numbers) == values[-1] - values[0] + 1
    if not is_run or {f"{n:0{width}}" for n in values} != {*numbers}:
        return ""
    return f"{{{values[0]:0{width}}..{values[-1]:0{width}}}}"


def _codes(texts: list[str]) -> list[int]:
    first: dict[str, int] = {}
    return [first.setdefault(text, len(first)) for text in texts]


def natural(path: str) -> list[list[str | tuple[int, str, str]]]:
    """Return a sort key that counts: ``layer_2`` before ``layer_10``.

    Example:
        >>> sorted(["layer_10", "layer_2", "embed"], key=natural)
        ['embed', 'layer_2', 'layer_10']
    """
    return list(map(_natural_segment, path.split("/")))


# Large trees say the same few segments again and again.
@functools.lru_cache(maxsize=4_096)
def _natural_segment(segment: str) -> list[str | tuple[int, str, str]]:
    # By their length, not by ``int``, which refuses thousands of digits.
    return [
        (len(part.lstrip("0")), part.lstrip("0"), part) if place % 2 else part
        for place, part in enumerate(_NUMBER.split(segment))
    ]


def plural(count: int, noun: str) -> str:
    """Write a count with its noun.

    Example:
        >>> plural(1, "leaf"), plural(1_247, "path")
        ('1 leaf', '1,247 paths')
    """
    irregular = {
        "leaf": "leaves",
        "address": "addresses",
        "entry": "entries",
        "axis": "axes",
        "clash": "clashes",
        "mask or label": "masks or labels",
        "array or layer": "arrays and layers",
    }
    word = noun if count == 1 else irregular.get(noun, noun + "s")
    return f"{count:,} {word}"


def size_text(size_bytes: int) -> str:
    """Write a size for people.

    Example:
        >>> size_text(48), size_text(123_456), size_text(54_000_000_000)
        ('48 B', '121 KiB', '50.3 GiB')
        >>> size_text(2**20 - 1)
        '1.0 MiB'
    """
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while round(size) >= 1024 and len(units) > 1:  # as it is written
        size, units = size / 1024, units[1:]
    digits = 0 if units[0] == "B" or size >= 100 else 1
    return f"{size:.{digits}f} {units[0]}"


def shorten(text: str, *, limit: int = 200) -> str:
    """Cut the middle out of a text that is too long for a message.

    Example:
        >>> shorten("0123456789" * 9, limit=40)
        '01234567890123456789...34567890123456789'
    """
    return text if len(text) <= limit else f"{text[: limit - 20]}...{text[-17:]}"


class Speller:
    """Finds similar words with bounded effort, whatever the words.

    ``difflib`` takes time that grows with the cube of the length for words made of few
    letters. The effort is counted, not timed, so that messages are repeatable.
    """

    def __init__(self) -> None:
        self._effort = 5_000_000

    def nearest(
        self, word: str, words: Iterable[str], *, count: int = 3, cutoff: float = 0.6
    ) -> list[str]:
        """Return the words most like ``word``, the most similar first.

        Args:
            word: what was typed.
            words: what exists.
            count: how many to return at most.
            cutoff: least similarity, from 0 to 1.

        Example:
            >>> Speller().nearest("kernal", ["bias", "kernel"])
            ['kernel']
        """
        matcher = difflib.SequenceMatcher(b=word[:_MAX_TEXT], autojunk=False)
        scored: list[tuple[float, int, str]] = []
        for place, other in enumerate(words):
            matcher.set_seq1(other[:_MAX_TEXT])
            if matcher.real_quick_ratio() < cutoff or matcher.quick_ratio() < cutoff:
                continue
            lengths = sorted((len(word), len(other)))
            self._effort -= lengths[0] ** 2 * lengths[1] // 4
            if self._effort < 0:
                break
            score = matcher.ratio()
            if score >= cutoff:
                scored.append((-score, place, other))
        return [other for _, _, other in sorted(scored)[:count]]

    def best(self, word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str:
        """Return the most similar of the first words; empty if none is similar.

        Args:
            word: what was typed.
            words: what exists.
            cutoff: least similarity, from 0 to 1.
        """
        first = itertools.islice(words, _CANDIDATES)
        return next(iter(self.nearest(word, first, count=1, cutoff=cutoff)), "")


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """How named leaves do not fit those of a target; false if they do.

    Attributes:
        missing: names that the target has and the leaves lack.
        unexpected: names that the target lacks.
        misfits: by name, why a leaf of another shape or dtype does not fit.

    Example:
        >>> print(Mismatch(["bias"], ["bais"]).text("leaf", "stored is"))
        2 leaves do not fit the target: 1 missing, 1 unexpected.
          missing 'bias' (stored is 'bais')
          unexpected 'bais' (the target has 'bias')
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    misfits: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misfits)

    @property
    def paths(self) -> list[str]:
        """All names that do not fit."""
        return [*self.missing, *self.unexpected, *self.misfits]

    def text(
        self, noun: str, source: str, *, to: str = "the target", hint: str = ""
    ) -> str:
        """Write all that does not fit, each missing name with the nearest unexpected.

        Args:
            noun: what the names belong to.
            source: what says that there is an unexpected name, such as "the dict has".
            to: what they should fit.
            hint: a line below the first one.
        """
        counts = {
            "missing": len(self.missing),
            "unexpected": len(self.unexpected),
            "of another shape or dtype": len(self.misfits),
        }
        total = sum(counts.values())
        text = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
        do = "does" if total == 1 else "do"
        lines = [f"{plural(total, noun)} {do} not fit {to}: {text}."]
        lines += filter(None, [hint])
        missing = fold(self.missing[:_FOLDED])
        unexpected = fold(self.unexpected[:_FOLDED])
        spell = Speller()
        for kind, names, others, there in (
            ("missing", missing, unexpected, source),
            ("unexpected", unexpected, missing, f"{to} has"),
        ):
            rows: dict[str, list[int]] = {}
            for name, places in names.items():
                near = spell.best(name, others) if len(rows) < SHOWN else ""
                # Only the missing name that is nearest to an unexpected one shows that.
                mutual = near not in ("", name) and spell.best(near, names) == name
                also = f" ({there} {listing([near])})" if mutual else ""
                rows[f"{kind} {listing([name])}{also}"] = places
            lines += section("", rows, left=max(0, counts[kind] - _FOLDED))
        some = itertools.islice(self.misfits.items(), _FOLDED)
        rows = fold(f"{listing([name])}: {problem}" for name, problem in some)
        lines += section("", rows, left=max(0, len(self.misfits) - _FOLDED))
        return "\n".join(lines)
