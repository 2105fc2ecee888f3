r"""Renaming: the leaves of one library under the names and layouts of another.

Takes a tree or flat dict and a table of name templates, gives a flat dict under the new
names. A template is text with captured names in braces; a function next to it changes
the layout. Every leaf must be named by a row, every row must name a leaf, and no two
leaves may get one name: one error reports all that is wrong, before any function
runs. No value is read except by the caller's functions, and abstract leaves stay
abstract.
See ``from_flat_dict`` for putting the result into the other library's classes.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from treeadapt.convert import describe
from treeadapt.errors import RenameError
from treeadapt.names import Speller, listing, plural
from treeadapt.paths import SEPARATOR
from treeadapt.trees.views import view_tree

_SHOWN = 6  # problems of one kind that a message lists
_CANDIDATES = 2_000  # paths among which the nearest is sought
_CAPTURE = re.compile(r"\{(?P<name>[A-Za-z_]\w*)(?P<many>:\*\*)?\}")
_HINTS = {
    "{": "A capture is {name}, or {name:**} for whole segments",
    "}": "It closes nothing",
    "*": "Capture what it matches: {name} within a segment, {name:**} for several",
    "?": "Capture what it matches: {name}",
    "[": "Capture what it matches: {name}",
}

Captures = tuple[tuple[str, str], ...]


def rename(flat: Any, table: Mapping[Any, Any]) -> dict[str, Any]:
    r"""Rename every leaf, and change layouts where a row has a function.

    A row is ``source: target``, ``source: (target, function)`` or, to leave leaves out,
    ``source: None``. In a source ``{name}`` captures a part of one segment, as short as
    the text around it allows, and ``{name:**}`` any number of whole segments, none
    included, once in a template. In the target both are ``{name}``. ``\x`` is a literal
    ``x``. The first row that matches a leaf names it.

    A tuple of sources with the same names *joins*: the function gets one leaf for each,
    in that order. A tuple of targets *splits*: the function gives as many leaves.

    Args:
        flat: flat dict ``{path: leaf}``, or any tree.
        table: sources to targets, in order. For stacked layers write the tuple of
            sources out: ``tuple(f"layers/{i}/w" for i in range(12))``.

    Returns:
        Flat dict under the new names, in the order of the rows. Leaves without a
        function are the caller's own objects. On ``jax.ShapeDtypeStruct`` a function
        is run by ``jax.eval_shape``.

    Raises:
        RenameError: leaves without a row, rows without a leaf, two leaves with one new
            name, or joins with a part missing, all at once; a malformed template; a
            function that gives another number of leaves than there are targets.

    Example:
        >>> flat = {"linear_0/kernel": np.ones((2, 3)), "linear_0/bias": np.ones(3)}
        >>> table = {
        ...     "linear_{n}/kernel": ("layers/{n}/weight", np.transpose),
        ...     "linear_{n}/bias": "layers/{n}/bias",
        ... }
        >>> {path: leaf.shape for path, leaf in rename(flat, table).items()}
        {'layers/0/weight': (3, 2), 'layers/0/bias': (3,)}
    """
    rows = _rows(table)
    view = view_tree(flat)
    leaves = view.flat()
    moves, problems = _plan(rows, list(leaves))
    if problems:
        raise RenameError("\n".join(problems))
    renamed: dict[str, Any] = {}
    for move in moves:
        if move.targets:
            given = [leaves[path] for path in move.sources]
            renamed.update(zip(move.targets, move.run(given), strict=True))
    return renamed


@dataclasses.dataclass(frozen=True)
class _Template:
    """One name with captures, segment by segment.

    Attributes:
        text: as typed.
        segments: per segment its literals and captured names in turn, literals first;
            None for the segment that captures any number of them.
        many: name of that capture; empty without one.
    """

    text: str
    segments: tuple[tuple[str, ...] | None, ...]
    many: str

    @property
    def names(self) -> frozenset[str]:
        inner = [part for part in self.segments if part is not None]
        found = {name for parts in inner for name in parts[1::2]}
        return frozenset(found | {self.many} if self.many else found)

    @property
    def key(self) -> str | None:
        """What a path that matches has: itself, its first segment, or anything."""
        first = self.segments[0]
        if all(part is not None and len(part) == 1 for part in self.segments):
            return SEPARATOR.join(part[0] for part in self.segments if part)
        return first[0] + SEPARATOR if first and len(first) == 1 else None

    def match(self, path: str) -> Captures | None:
        """Return what a path gives each name; None if it does not match."""
        parts = path.split(SEPARATOR)
        found: dict[str, str] = {}
        if self.many:
            before = self.segments.index(None)
            after = len(self.segments) - before - 1
            stop = len(parts) - after
            if stop < before:
                return None
            # Each with its separator: no segment and one empty segment differ.
            found[self.many] = "".join(SEPARATOR + part for part in parts[before:stop])
            parts = [*parts[:before], *parts[stop:]]
        inner = [segment for segment in self.segments if segment is not None]
        if len(inner) != len(parts):
            return None
        for segment, part in zip(inner, parts, strict=True):
            if not _capture(segment, part, found):
                return None
        return tuple(sorted(found.items()))

    def fill(self, captures: Captures) -> str:
        """Return the name that the captures give."""
        known = dict(captures)
        filled = []
        for segment in self.segments:
            alone = segment is not None and not (segment[0] or segment[2:] != ("",))
            value = known[segment[1]] if segment and alone else ""
            if segment is None or (alone and value[:1] in ("", SEPARATOR)):
                run = known[self.many] if segment is None else value
                filled += run.split(SEPARATOR)[1:]
                continue
            texts = [
                known[part].removeprefix(SEPARATOR) if place % 2 else part
                for place, part in enumerate(segment)
            ]
            filled.append("".join(texts))
        return SEPARATOR.join(filled)


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of the table; ``targets`` is empty where leaves are left out."""

    sources: tuple[_Template, ...]
    targets: tuple[_Template, ...]
    splits: bool
    function: Callable[..., Any] | None

    @property
    def text(self) -> str:
        return ", ".join(source.text for source in self.sources)


@dataclasses.dataclass(frozen=True)
class _Move:
    """Leaves at some paths become leaves at others."""

    row: _Row
    sources: tuple[str, ...]
    targets: tuple[str, ...]

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the leaves for the targets."""
        function = self.row.function
        if function is None:
            return leaves
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        try:
            made = jax.eval_shape(function, *leaves) if abstract else function(*leaves)
        except Exception as error:
            texts = [
                f"{path!r}, {describe(leaf)}" for path, leaf in self._given(leaves)
            ]
            error.add_note(
                f"In the function of the rename row {self.row.text!r}, given "
                f"{'; '.join(texts)}."
            )
            raise
        if not self.row.splits:
            return [made]
        if not isinstance(made, list | tuple) or len(made) != len(self.targets):
            count = len(made) if isinstance(made, list | tuple) else describe(made)
            raise RenameError(
                f"The function of the row {self.row.text!r} gives {count} for "
                f"{listing(self.sources)}, and the row has {len(self.targets)} "
                "targets. Return a tuple with one leaf for each."
            )
        return made

    def _given(self, leaves: Sequence[Any]) -> list[tuple[str, Any]]:
        return list(zip(self.sources, leaves, strict=True))[:4]


def _plan(rows: Sequence[_Row], paths: Sequence[str]) -> tuple[list[_Move], list[str]]:
    """Decide what becomes of each leaf; return the moves, or what is wrong."""
    groups, unmapped = _assign(rows, paths)
    moves: list[_Move] = []
    torn: list[str] = []
    for row, group in zip(rows, groups, strict=True):
        for captures, found in group.items():
            missing = [
                source.fill(captures)
                for source, path in zip(row.sources, found, strict=True)
                if path is None
            ]
            given = tuple(path for path in found if path is not None)
            if missing:
                torn.append(f"{listing(given, limit=2)} without {listing(missing)}")
            targets = tuple(target.fill(captures) for target in row.targets)
            moves.append(_Move(row, given, targets))
    unused = [row for row, group in zip(rows, groups, strict=True) if not group]
    return moves, [
        *_told("leaf", "no row names", _near_rows(unmapped, rows)),
        *_told("row", "no leaf is left for", _near_paths(unused, rows, paths)),
        *_told("join", "parts are missing of", torn),
        *_told("clash", "two leaves get the name of", _clashes(moves)),
    ]


def _assign(
    rows: Sequence[_Row], paths: Sequence[str]
) -> tuple[list[dict[Captures, list[str | None]]], list[str]]:
    """Give each path to the first row that matches it."""
    groups: list[dict[Captures, list[str | None]]] = [{} for _ in rows]
    index: dict[str | None, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        for place, source in enumerate(row.sources):
            index.setdefault(source.key, []).append((number, place))
    unmapped = []
    for path in paths:
        keys = dict.fromkeys((path, path.partition(SEPARATOR)[0] + SEPARATOR, None))
        for number, place in heapq.merge(*(index.get(key, ()) for key in keys)):
            captures = rows[number].sources[place].match(path)
            if captures is None:
                continue
            group = groups[number]
            found = group.setdefault(captures, [None] * len(rows[number].sources))
            if found[place] is None:
                found[place] = path
                break
        else:
            unmapped.append(path)
    return groups, unmapped


def _clashes(moves: Sequence[_Move]) -> list[str]:
    first: dict[str, _Move] = {}
    found = []
    for move in moves:
        for target in move.targets:
            other = first.setdefault(target, move)
            if other is not move or move.targets.count(target) > 1:
                both = dict.fromkeys([*other.sources[:2], *move.sources[:2]])
                found.append(f"{listing([target])}: {listing(both)}")
    return list(dict.fromkeys(found))


def _near_rows(unmapped: Sequence[str], rows: Sequence[_Row]) -> Iterator[str]:
    texts = [source.text for row in rows for source in row.sources]
    speller = Speller()
    for path in unmapped[:_SHOWN]:
        near = speller.nearest(path, texts[:_CANDIDATES], count=1)
        yield listing([path]) + (f" (the nearest is {listing(near)})" if near else "")
    yield from unmapped[_SHOWN:]


def _near_paths(
    unused: Sequence[_Row], rows: Sequence[_Row], paths: Sequence[str]
) -> Iterator[str]:
    speller = Speller()
    for row in unused[:_SHOWN]:
        taken = [p for p in paths if any(s.match(p) is not None for s in row.sources)]
        if taken:
            hint = f" (earlier rows name {listing(taken, limit=2)}; move it up)"
        else:
            near = speller.nearest(row.sources[0].text, paths[:_CANDIDATES], count=1)
            hint = f" (the nearest leaf is {listing(near)})" if near else ""
        yield listing([row.text]) + hint
    yield from (row.text for row in unused[_SHOWN:])


def _told(noun: str, verb: str, problems: Iterator[str] | list[str]) -> list[str]:
    """Write the problems of one kind."""
    texts = list(problems)
    if not texts:
        return []
    plurals = {"clash": "clashes"}
    count = (
        f"{len(texts):,} {plurals[noun]}" if noun in plurals and len(texts) > 1 else ""
    )
    lines = [f"{count or plural(len(texts), noun)}: {verb}"]
    lines += [f"  {text}" for text in texts[:_SHOWN]]
    if len(texts) > _SHOWN:
        lines.append(f"  and {len(texts) - _SHOWN:,} more")
    return lines


def _rows(table: Any) -> list[_Row]:
    if not isinstance(table, Mapping):
        raise RenameError(
            "A table is a mapping {source: target} or {source: (target, function)}, "
            f"not {describe(table)}."
        )
    return [_row(source, value) for source, value in table.items()]


def _row(source: Any, value: Any) -> _Row:
    sources = _templates(source, source)
    function = None
    target = value
    if isinstance(value, tuple) and len(value) == 2 and callable(value[1]):
        target, function = value
    targets = () if target is None else _templates(target, source)
    row = _Row(sources, targets, isinstance(target, tuple), function)
    if function is None and (len(sources) > 1 or row.splits):
        _refuse(row.text, "several leaves need a function", "Write (target, function)")
    if len({template.names for template in sources}) > 1:
        _refuse(row.text, "its sources capture different names", "Use the same in each")
    for name in sorted(frozenset().union(*(t.names for t in targets))):
        if name not in sources[0].names:
            _refuse(row.text, f"its target has {{{name}}}, which it does not capture")
    return row


def _templates(given: Any, row: Any) -> tuple[_Template, ...]:
    texts = given if isinstance(given, tuple) else (given,)
    if not texts or not all(isinstance(text, str) for text in texts):
        _refuse(
            str(row),
            f"{given!r:.80} is not a name",
            "A row is source: target or source: (target, function), and several names "
            "are a tuple of strings",
        )
    return tuple(map(_template, texts))


def _template(text: str) -> _Template:
    segments: list[tuple[str, ...] | None] = []
    many = ""
    for segment in _segments(text):
        whole = _CAPTURE.fullmatch(segment)
        if whole and whole["many"]:
            if many:
                _refuse(text, "it has two captures of several segments", "One will do")
            many = whole["name"]
            segments.append(None)
        else:
            segments.append(_parts(text, segment))
    return _Template(text, tuple(segments), many)


def _segments(text: str) -> list[str]:
    """Split at each slash that no backslash precedes."""
    pieces = re.split(r"(\\.|/)", text, flags=re.DOTALL)
    ends = [place for place, piece in enumerate(pieces) if piece == SEPARATOR]
    bounds = [-1, *ends, len(pieces)]
    return ["".join(pieces[a + 1 : b]) for a, b in itertools.pairwise(bounds)]


def _parts(text: str, segment: str) -> tuple[str, ...]:
    """Return the literals and captured names of one segment, in turn."""
    parts = [""]
    place = 0
    while place < len(segment):
        capture = _CAPTURE.match(segment, place)
        if capture:
            if capture["many"]:
                _refuse(text, f"{capture[0]} means whole segments", "Alone in one")
            if len(parts) > 1 and not parts[-1]:
                _refuse(text, "two captures touch", "Put text between them")
            parts += [capture["name"], ""]
            place = capture.end()
            continue
        if segment[place] in _HINTS:
            _refuse(text, f"a bare {segment[place]!r}", _HINTS[segment[place]])
        place += segment[place] == "\\" and place + 1 < len(segment)
        parts[-1] += segment[place]
        place += 1
    return tuple(parts)


def _capture(segment: tuple[str, ...], part: str, found: dict[str, str]) -> bool:
    """Match one segment, each capture as short as it can be; note what they hold."""
    if len(segment) == 1:
        return part == segment[0]
    if not part.startswith(segment[0]):
        return False
    place, last = len(segment[0]), len(segment) - 2
    for index in range(1, len(segment), 2):
        name, after = segment[index], segment[index + 1]
        if index == last:
            end = len(part) - len(after)
            fits = end > place and part.endswith(after)
        else:
            end = part.find(after, place + 1)
            fits = end >= 0
        if not fits or found.setdefault(name, part[place:end]) != part[place:end]:
            return False
        place = end + len(after)
    return True


def _refuse(
    text: str, problem: str, cure: str = "Capture it in the source"
) -> NoReturn:
    raise RenameError(
        f"The rename row {listing([text])} is malformed: {problem}. {cure}."
    )
