"""Differences of two trees, leaf by leaf, whatever holds the leaves.

Takes two trees, concrete or abstract; gives a ``TreeDiff`` that is false when they are
equal and prints its differences, alike ones on one line. Leaves meet by label path, so
container classes do not matter. Shapes and dtypes are always compared, values only on
request, one leaf at a time. A leaf that went under one name and came under a similar
one, with the same shape and dtype, is reported as renamed.
See ``Migration`` for moving leaves to other names.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.errors import TreeAdaptError, UnusedRuleError
from treeadapt.selection.answers import require_agreement
from treeadapt.selection.repairs import Names, pattern_text, unused_message
from treeadapt.selection.rules import Rules, allowing
from treeadapt.selection.selectors import Unused, Where
from treeadapt.selection.tree_first import view_whole
from treeadapt.text.names import (
    first_rows,
    fold,
    leaves_below,
    listing,
    natural,
    plural,
)
from treeadapt.trees.arrays import Tree, is_array
from treeadapt.trees.describing import describe
from treeadapt.trees.metadata import same_static

Kind = Literal["removed", "added", "renamed", "reshaped", "retyped", "changed"]

_KINDS: dict[Kind, str] = {
    "removed": "-",
    "added": "+",
    "renamed": ">",
    "reshaped": "~",
    "retyped": "~",
    "changed": "~",
}
_SHOWN = 20  # differences that repr shows
_SIMILAR_LETTERS = 0.6
_SIMILAR_WORDS = 0.5
_CHUNK = 2**20  # elements that are compared at a time
_MAX_PAIRS = 20_000  # names compared in all
_MAX_NAME = 200
_WORD = re.compile(r"[0-9]+|[A-Za-z]+")
_NUMBER = re.compile("[0-9]+")
# What libraries call the same array.
_SAME = {"weight": "kernel", "w": "kernel", "embedding": "kernel", "b": "bias"}


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One leaf that differs.

    Attributes:
        kind: ``"removed"``, ``"added"``, ``"renamed"``, ``"reshaped"``, ``"retyped"``
            or ``"changed"``. A leaf of another shape and dtype is reshaped.
        path: in the first tree; in the second for one that was added.
        path_after: in the second tree; empty for one that was removed.
        before: dtype and shape, or type, in the first tree.
        after: the same in the second tree.
        note: what else is known: how many elements changed, and by how much.
    """

    kind: Kind
    path: str
    path_after: str
    before: str
    after: str
    note: str = ""

    def __str__(self) -> str:
        text = f"{_KINDS[self.kind]} {self.kind:8}  {self.path!r}"
        if self.kind == "renamed":
            text += f" -> {self.path_after!r}"
        change = self.before or self.after
        if self.before and self.after and self.before != self.after:
            change = f"{self.before} -> {self.after}"
        return f"{text}: {change}{', ' * bool(self.note)}{self.note}"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TreeDiff:
    """What differs between two trees; false if nothing does.

    Attributes:
        differences: by kind, then in natural order.
        values_compared: whether values were compared, or names, shapes and dtypes only.
    """

    differences: tuple[Difference, ...]
    values_compared: bool = True

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    def __repr__(self) -> str:
        return self._text(_SHOWN)

    def __str__(self) -> str:
        return self._text(len(self.differences))

    def of(self, kind: Kind) -> tuple[Difference, ...]:
        """Return the differences of one kind."""
        return tuple(each for each in self.differences if each.kind == kind)

    def _rows(self) -> dict[str, list[int]]:
        """Write the differences, and the places of those that each line is about.

        Leaves that went from below one node to below another one are one line, and so
        are lines that differ in a number of their paths only.
        """
        groups: dict[Any, list[int]] = {}
        for place, each in enumerate(self.differences):
            nodes = place if each.note else _unlike_starts(each.path, each.path_after)
            key = nodes if each.kind == "renamed" else place
            groups.setdefault((each.note, key), []).append(place)
        lines: dict[str, list[tuple[str, list[int]]]] = {}
        for (note, _), places in groups.items():
            line = _moved_text([self.differences[place] for place in places])
            lines.setdefault(note, []).append((line, places))
        rows: list[tuple[str, list[int]]] = []
        for alike in lines.values():  # numbers in a note are none of a path
            for text, numbers in fold(line for line, _ in alike).items():
                rows.append((text, [p for number in numbers for p in alike[number][1]]))
        return dict(sorted(rows, key=lambda row: row[1][0]))

    def _text(self, limit: int) -> str:
        if not self.differences:
            unread = " in names, shapes and dtypes; values were not compared"
            return f"No difference{'' if self.values_compared else unread}."
        counts = collections.Counter(difference.kind for difference in self.differences)
        kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in _KINDS if counts[kind])
        lines = [f"{plural(len(self.differences), 'difference')}: {kinds}."]
        lines += first_rows(self._rows(), limit=limit)
        return "\n".join(lines)


def _unlike_starts(path: str, other: str) -> tuple[str, str]:
    """Return two paths without the segments in which they end alike."""
    some, others = path.split("/"), other.split("/")
    while some and others and some[-1] == others[-1]:
        del some[-1], others[-1]
    return "/".join(some), "/".join(others)


def _moved_text(differences: Sequence[Difference]) -> str:
    """Write one difference, or leaves that went from one node to another."""
    first = differences[0]
    if len(differences) == 1:
        return str(first)
    nodes = _unlike_starts(first.path, first.path_after)
    ends = [each.path[len(nodes[0]) :].lstrip("/") for each in differences]
    before, after = (repr(leaves_below(node, ends)) for node in nodes)
    return f"{_KINDS[first.kind]} {first.kind:8}  {before} -> {after}"


def tree_diff(
    a: Tree,
    b: Tree,
    *,
    where: Where = "**",
    values: bool = False,
    unused: Unused = "error",
) -> TreeDiff:
    """Compare two trees by path: names, shapes, dtypes and, if asked, values.

    Args:
        a: the first tree, of any containers, concrete or abstract.
        b: the second tree, of the same or other containers.
        where: selects the leaves to compare, in each tree by itself;
            ``ta.leaf()`` compares arrays alone.
        values: compare values as well, bit by bit, so that NaN equals the same NaN and
            0.0 differs from -0.0; static leaves by type and value. The result says how
            far apart arrays are. Values are brought to the host one leaf at a time.
        unused: ``"error"`` or ``"ignore"`` entries of ``where`` that match no array in
            either tree.

    Returns:
        ``TreeDiff``: false if nothing differs, so that a test may
        ``assert not tree_diff(a, b)``.

    Raises:
        PathCollisionError: two leaves of one tree have the same path.
        UnusedRuleError: an entry of ``where`` selects no array in either tree.
        TreeAdaptError: ``values=True`` and a leaf has no value here: it is abstract,
            traced or lies on devices of other processes.

    Example:
        >>> before = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
        >>> after = {"dense": {"weight": jnp.ones((2, 3)), "bias": jnp.zeros(4)}}
        >>> print(tree_diff(before, after))
        2 differences: 1 renamed, 1 reshaped.
        > renamed   'dense/kernel' -> 'dense/weight': float32[2,3]
        ~ reshaped  'dense/bias': float32[3] -> float32[4]
    """
    where = allowing(where, unused)

    def read(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterable[Any]:
        return zip(one.values(), two.values(), strict=True)

    return compared(a, b, where, read if values else None)


def compared(
    a: Any,
    b: Any,
    where: Any,
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterable[Any]] | None,
) -> TreeDiff:
    """Compare two trees, whose values may have to be read first.

    Args:
        a: the first tree.
        b: the second tree.
        where: as for ``tree_diff``.
        read: takes leaves of the first tree by path, and the leaves to compare them
            with in the same order; gives pairs of values. None to compare no values.

    Raises:
        TreeAdaptError: as for ``tree_diff``.
    """
    one, two = _selected(a, b, where)
    gone = {path: leaf for path, leaf in one.items() if path not in two}
    come = {path: leaf for path, leaf in two.items() if path not in one}
    pairs = _renamed(gone, come)
    renamed = {*pairs.values()}
    differences = []
    for path, leaf in gone.items():
        if path not in pairs:
            differences.append(Difference("removed", path, "", describe(leaf), ""))
    for path, leaf in come.items():
        if path not in renamed:
            differences.append(Difference("added", path, path, "", describe(leaf)))
    for path, leaf in one.items():
        if path not in two:
            continue
        before, after = describe(leaf), describe(two[path])
        if before == after:
            pairs[path] = path
            continue
        kind: Kind = "reshaped" if _is_reshaped(leaf, two[path]) else "retyped"
        differences.append(Difference(kind, path, path, before, after))
    notes = dict.fromkeys(pairs, "")
    if read is not None:
        ones = {path: one[path] for path in pairs}
        twos = {path: two[path] for path in pairs.values()}
        values = iter(read(ones, twos))
        for path in pairs:  # of which each is gone before the next one is read
            notes[path] = _change(path, *next(values))
    for path, after in pairs.items():
        if path != after or notes[path]:
            text = describe(one[path])
            kind = "renamed" if path != after else "changed"
            differences.append(Difference(kind, path, after, text, text, notes[path]))
    order = list(_KINDS)
    differences.sort(key=lambda each: (order.index(each.kind), natural(each.path)))
    return TreeDiff(tuple(differences), read is not None)


def _selected(a: Any, b: Any, where: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    table = Rules([(where, True)], default=False, unused="ignore")
    matches = [table.match(view_whole(tree)) for tree in (a, b)]
    # An entry may match in only one of the trees; in neither is an error.
    asked = [each for each in matches if any(each.is_array)]
    unused = [[entry for _, entry in each.unused] for each in asked]
    nowhere = [x for x in unused[0] if all(x in y for y in unused)] if asked else []
    if nowhere:
        text = unused_message(nowhere, Names(asked[0].view, asked[0].is_array))
        raise UnusedRuleError(text, patterns=map(pattern_text, nowhere))
    selections = []
    for each in matches:
        answers = require_agreement(each.answers.values, "A selection of arrays")
        pairs = zip(each.stored.items(), answers, strict=True)
        selections.append({path: leaf for (path, leaf), yes in pairs if yes is True})
    return selections[0], selections[1]


def _is_reshaped(a: Any, b: Any) -> bool:
    return is_array(a) and is_array(b) and tuple(a.shape) != tuple(b.shape)


def _change(path: str, a: Any, b: Any) -> str:
    """Write how far two leaves of one description are apart; empty if they are not."""
    if a is b:
        return ""
    if not is_array(a):
        return "" if same_static(a, b) else f"{a!r:.60} -> {b!r:.60}"
    one, two = (np.ascontiguousarray(_value(path, x)).reshape(-1) for x in (a, b))
    parts = (slice(n, n + _CHUNK) for n in range(0, one.size, _CHUNK))
    apart = [_apart(one[part], two[part]) for part in parts]
    count = sum(each.num_changed for each in apart)
    if not count:
        return ""
    note = f"{count:,} of {plural(one.size, 'element')}"
    most = [each.most for each in apart if each.most is not None]
    if most:
        text = f"{max(most):,}" if isinstance(max(most), int) else f"{max(most):.3g}"
        note += f", by at most {text}"
    return note + ", NaN" * any(each.has_nan for each in apart)


class _Apart(NamedTuple):
    """How far parts of two arrays are apart.

    Attributes:
        num_changed: how many elements differ.
        most: the largest difference; None if it is not known, or none.
        has_nan: whether some differences are not numbers.
    """

    num_changed: int
    most: int | float | None = None
    has_nan: bool = False


def _apart(one: np.ndarray[Any, Any], two: np.ndarray[Any, Any]) -> _Apart:
    """Compare flat arrays of one dtype, bit by bit."""
    if one.dtype.hasobject:
        pairs = zip(one, two, strict=True)
        differs = np.array([not same_static(*pair) for pair in pairs], bool)
    else:
        bits = [x.view(np.uint8).reshape(one.size, one.itemsize) for x in (one, two)]
        differs = (bits[0] != bits[1]).any(axis=1)
    count = int(differs.sum())
    is_integer = jnp.issubdtype(one.dtype, np.integer)
    if not count or not (is_integer or jnp.issubdtype(one.dtype, np.inexact)):
        return _Apart(count)
    one, two = one[differs], two[differs]
    if is_integer:  # 64 bits do not fit a float, and their difference not an int64
        apart = np.maximum(one, two).astype("u8") - np.minimum(one, two).astype("u8")
        return _Apart(count, int(apart.max()))
    is_complex = jnp.issubdtype(one.dtype, np.complexfloating)
    wide = np.result_type(one.dtype, np.complex128 if is_complex else np.float64)
    with np.errstate(all="ignore"):
        apart = np.abs(one.astype(wide) - two.astype(wide))
    defined = apart[~np.isnan(apart)]
    most = float(defined.max()) if defined.size else None
    return _Apart(count, most, defined.size < apart.size)


def _value(path: str, leaf: Any) -> np.ndarray[Any, Any]:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
    elif hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array):
        return np.asarray(leaf)  # maybe read from a file
    raise TreeAdaptError(
        f"The leaf {listing([path])} has no value here: it is a "
        f"{type(leaf).__name__}, abstract, traced or on devices of other processes. "
        "Compare names and shapes alone, with values=False."
    )


def _renamed(gone: Mapping[str, Any], come: Mapping[str, Any]) -> dict[str, str]:
    """Pair removed leaves with similar added ones, the most similar first.

    Pairs whose numbers agree are sought first: a layer keeps its number more often
    than its name, and few names are left to compare.
    """
    renamed: dict[str, str] = {}
    gone, come, left = dict(gone), dict(come), _MAX_PAIRS
    for numbers in (_NUMBER, None):
        scored: list[tuple[float, int, str, str]] = []
        news = _alike(come, numbers)
        for key, paths in _alike(gone, numbers).items():
            others = news.get(key, [])
            left -= len(paths) * len(others)
            if left < 0:
                break
            scored += _scores(paths, others)
        for _, _, path, other in sorted(scored, key=lambda entry: entry[:2]):
            if path in gone and other in come:
                renamed[path] = other
                del gone[path], come[other]
    return renamed


def _scores(
    paths: Sequence[str], others: Sequence[str]
) -> Iterator[tuple[float, int, str, str]]:
    """Yield the pairs that are similar: minus how much, a count, and the names."""
    matcher = difflib.SequenceMatcher(autojunk=False)
    words = {path: _words(path) for path in (*paths, *others)}
    count = 0
    for other in others:
        matcher.set_seq2(other[:_MAX_NAME])
        for path in paths:
            both = (words[path] & words[other]).total()
            score = 2 * both / max(1, words[path].total() + words[other].total())
            matcher.set_seq1(path[:_MAX_NAME])
            if matcher.quick_ratio() >= _SIMILAR_LETTERS:
                letters = matcher.ratio()
                score = max(score, letters if letters >= _SIMILAR_LETTERS else 0.0)
            if score >= _SIMILAR_WORDS:
                count += 1
                yield -score, count, path, other


def _words(path: str) -> collections.Counter[str]:
    words = _WORD.findall(path[:_MAX_NAME].lower())
    return collections.Counter(_SAME.get(word, word) for word in words)


def _alike(
    leaves: Mapping[str, Any], numbers: re.Pattern[str] | None
) -> dict[object, list[str]]:
    """Return the paths of arrays that agree in shape, dtype and, maybe, numbers."""
    by_kind: dict[object, list[str]] = {}
    for path, leaf in leaves.items():
        if is_array(leaf):
            key = describe(leaf), *(numbers.findall(path) if numbers else ())
            by_kind.setdefault(key, []).append(path)
    return by_kind
