"""Rows: what a migration says, one row for leaves of one kind.

Takes a table as it was typed and gives ``Row``s whose names are understood: a name is a
number where it is an axis, one of ``{(b i)}``, shifted, or listed on both sides, and
text everywhere else. A row that contradicts itself is an error here, before any tree is
seen. See ``planning`` for which leaves a row takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from treeadapt.errors import MigrationError
from treeadapt.migrations.axes import (
    ANY_AXES,
    REST,
    Axes,
    every_name,
    names_of,
    parse_axes,
    parts_of,
    renamed,
    run_together,
)
from treeadapt.migrations.operations import Notes, Values, parse_operations, refuse
from treeadapt.migrations.take import taken_name
from treeadapt.migrations.templates import (
    NO_SIZES,
    Template,
    malformed,
    parse_template,
)
from treeadapt.text.names import Speller, listing, plural
from treeadapt.trees.describing import describe

SPLIT = " : "
MAX_CHARACTERS = 4_096

_ESCAPE_OR_SPLIT = re.compile(rf"\\.|(?={SPLIT})", re.DOTALL)
# A path, and axes after a colon without a space on one of its sides.
_TIGHT = re.compile(r"(.*[^\s:{])\s*:\s*([a-z(\[][\w()\[\] ]*)")

#: Next to what a row drops, in the inverse of a table that fills it by a pattern.
_UNDO_NEW = {"undo": "new"}


class Piece(NamedTuple):
    """What moves as a whole: one part of a source to one part of a target.

    Attributes:
        source: place of the source in its row.
        source_part: of its bracket; 0 without one.
        target: place of the target.
        target_part: of its bracket.
    """

    source: int
    source_part: int
    target: int
    target_part: int


@dataclasses.dataclass(frozen=True)
class Address:
    """A path, and the axes of the arrays that are there.

    Attributes:
        text: as typed.
        path: template of the path.
        axes: its axes.
        has_axes: whether they are written.
    """

    text: str
    path: Template
    axes: Axes
    has_axes: bool

    @functools.cached_property
    def numbers(self) -> tuple[str, ...]:
        """Names of the numbers in its path, from left to right."""
        return tuple(
            dict.fromkeys(
                name
                for each in self.path.captures
                if each.is_number
                for name in each.names
            )
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        sources: addresses of the leaves that it takes.
        targets: addresses that it fills; none in a row that drops leaves.
        values: what is done to the values of the targets, or undone.
        notes: what else is known of it.
        function: makes the leaves of the targets out of those of the sources.
        inverse: makes those of the sources out of those of the targets.
        splits: whether ``function`` returns a sequence, one leaf for each target.
        joins: whether ``inverse`` returns a sequence, one leaf for each source.
        is_spare: whether it undoes ``new=`` for a pattern: it drops what no row before
            it takes and, with a target, what the target has no place for.
    """

    sources: tuple[Address, ...]
    targets: tuple[Address, ...]
    values: Values = dataclasses.field(default_factory=Values)
    notes: Notes = dataclasses.field(default_factory=Notes)
    function: Callable[..., Any] | None = None
    inverse: Callable[..., Any] | None = None
    splits: bool = False
    joins: bool = False
    is_spare: bool = False

    @property
    def text(self) -> str:
        """Its sources as typed."""
        return ", ".join(source.text for source in self.sources)

    @property
    def ends(self) -> tuple[str, str]:
        """Its sources, and its targets, in quotes."""
        targets = ", ".join(repr(each.text) for each in self.targets)
        return repr(self.text), targets or "dropped"

    @property
    def both(self) -> str:
        """Its sources and targets, for a line about them."""
        return " -> ".join(self.ends)

    @property
    def made(self) -> tuple[str, str]:
        """Its targets as typed, and what else it says of them."""
        targets = ", ".join(target.text for target in self.targets)
        _, value = self.typed()
        options = value[-1] if isinstance(value, tuple) else None
        extra = "a function" if self.function is not None else ""
        if isinstance(options, Mapping):
            extra = ", ".join(f"{name} = {it!r}" for name, it in options.items())
        return targets or "dropped", extra

    @property
    def drops(self) -> bool:
        """Whether the leaves that it takes have no place in the result."""
        return not self.targets

    @functools.cached_property
    def moves(self) -> bool:
        """Whether arrays are read, rather than leaves passed on or to a function."""
        return self.function is None and bool(
            self.has_axes or self.values.moves or self.compares
        )

    @property
    def has_axes(self) -> bool:
        """Whether its addresses have axes."""
        return self.sources[0].has_axes

    @functools.cached_property
    def outer(self) -> frozenset[str]:
        """Names of numbers in all of its paths: each value has leaves of its own."""
        names = [frozenset(each.numbers) for each in (*self.sources, *self.targets)]
        return frozenset.intersection(*names)

    @functools.cached_property
    def names(self) -> set[str]:
        """Names of all its numbers and axes."""
        every = (*self.sources, *self.targets)
        names = ((*each.numbers, *every_name(each.axes)) for each in every)
        shifts = (c.shift_name for each in every for c in each.path.captures)
        return {*itertools.chain(*names), *shifts, *self.values.size_names} - {REST, ""}

    @functools.cached_property
    def sees_target(self) -> bool:
        """Whether its function has a parameter ``target``, which no leaf fills."""
        if self.function is None:
            return False
        is_bound = "target" in getattr(self.function, "keywords", ())  # of a partial
        with contextlib.suppress(TypeError, ValueError):  # of what is written in C
            parameters = [*inspect.signature(self.function).parameters]
            return "target" in parameters[len(self.sources) :] and not is_bound
        return False

    @functools.cached_property
    def listed(self) -> dict[str, int]:
        """Counts of the numbers that are written as texts."""
        counts: dict[str, int] = {}
        for address in (*self.renamed.targets, *self.sources):
            for each in address.path.captures:
                if each.is_number and each.entries:
                    counts[each.key] = len(each.entries)
        for name, _ in self.values.take:  # texts are translated before they are taken
            if name in counts:
                counts.pop(taken_name(name), None)
        return counts

    @functools.cached_property
    def lost(self) -> list[str]:
        """Names of captured text that some target lacks, and that no list spells."""
        source = self.sources[0]
        texts = source.path.names.difference(source.numbers, self.spellings)
        return sorted(
            name
            for name in texts
            if any(name not in each.path.names for each in self.targets)
        )

    @functools.cached_property
    def spellings(self) -> dict[str, tuple[str, ...]]:
        """Texts of which any may be in the paths of one side, by name.

        Another side does not have the name: each text is another spelling of the same.
        """
        if self.drops:
            return {}
        sides = self.sources, self.targets
        every = [[each.path.names for each in side] for side in sides]
        numbers = {name for side in sides for each in side for name in each.numbers}
        return {
            capture.key: capture.entries
            for side, names, others in zip(sides, every, every[::-1], strict=True)
            for capture in side[0].path.captures
            if capture.entries
            and capture.key not in numbers.union(*others)
            and all(capture.key in each for each in names)
        }

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What moves as a whole: the parts of both sides go together in order.

        Sources that hold copies of one array are all in it; the first one is used.
        """
        sources, targets = (
            [(n, k) for n, one in enumerate(side) for k in range(parts_of(one.axes))]
            for side in (self.sources, self.targets)
        )
        pairs: Iterable[Any] = itertools.product(sources, targets)
        if self.has_parts:
            pairs = zip(sources, targets, strict=True)
        return tuple(Piece(*source, *target) for source, target in pairs)

    @property
    def has_parts(self) -> bool:
        """Whether an address has a bracket."""
        every = (*self.sources, *self.targets)
        return any(parts_of(each.axes) > 1 for each in every)

    @property
    def compares(self) -> bool:
        """Whether several sources must hold equal arrays."""
        is_copied = self.function is None and not self.has_parts
        is_computed = self.values.multiply or self.values.add
        return len(self.sources) > 1 and is_copied and not is_computed

    @property
    def copies(self) -> bool:
        """Whether it makes the same numbers several times."""
        repeats = self.values.repeats(is_source=False)
        return bool(repeats) or self.reversed().compares

    @functools.cached_property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of names that hold in this row only."""
        repeats = {name: size for name, size in self.values.repeat if size is not None}
        takes = {name: take.size for name, take in self.values.take if take.size}
        return {**repeats, **takes, **dict(self.notes.sizes)}

    @functools.cached_property
    def selects(self) -> bool:
        """Whether it may take some numbers of an axis only, which has no way back."""
        return not all(take.is_order for _, take in self.values.take)

    @functools.cached_property
    def renamed(self) -> Row:
        """The row with names of their own for the numbers that are taken.

        The axes of its sources have the names of all numbers.
        """
        names = {name: taken_name(name) for name, _ in self.values.take}
        if not names:
            return self
        sides = (
            tuple(
                dataclasses.replace(
                    each,
                    path=each.path.renamed(names),
                    axes=renamed(each.axes, names) if is_target else each.axes,
                )
                for each in side
            )
            for is_target, side in enumerate((self.sources, self.targets))
        )
        sources, targets = sides
        return dataclasses.replace(self, sources=sources, targets=targets)

    def takes(self, path: str) -> bool:
        """Return whether one of its sources matches a path."""
        return any(each.path.match(path) is not None for each in self.sources)

    def reversed(self) -> Row:
        """Return the row read backwards."""
        return self._backwards

    @functools.cached_property
    def _backwards(self) -> Row:
        values, undoes = self.values, bool(self.values) and not self.values.undoes
        if undoes != values.undoes:
            values = dataclasses.replace(values, undoes=undoes)
        return Row(
            sources=self.targets,
            targets=self.sources,
            values=values,
            notes=self.notes.reversed() if self.notes.optional else self.notes,
            function=self.inverse,
            inverse=self.function,
            splits=self.joins,
            joins=self.splits,
        )

    def typed(self) -> tuple[Any, Any]:
        """Return the row as it is written in a table."""

        def side(addresses: Sequence[Address], *, alone: bool) -> Any:
            texts = tuple(each.text for each in addresses)
            return texts[0] if alone and len(texts) == 1 else texts

        source = side(self.sources, alone=not self.joins)
        if self.drops:
            beside = self.notes.typed() | (_UNDO_NEW if self.is_spare else {})
            return source, (None, beside) if beside else None
        target = side(self.targets, alone=not self.splits)
        if self.function is not None:
            functions = (self.function, self.inverse)
            return source, (target, functions if self.inverse else self.function)
        options = self.values.typed()
        if self.values.undoes:
            options = {"undo": options}
        options |= self.notes.typed()
        return source, (target, options) if options else target


def parse_rows(table: Any, sizes: Mapping[str, int] = NO_SIZES) -> tuple[Row, ...]:
    """Parse a table.

    Args:
        table: mapping of sources to targets, or ordered pairs, or rows.
        sizes: by names that paths and operations may have in the place of numbers.

    Raises:
        MigrationError: it is none of these, or a row of it is malformed.
    """
    pairs = [*table.items()] if isinstance(table, Mapping) else table
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, Row) or (isinstance(pair, list | tuple) and len(pair) == 2)
        for pair in pairs
    ):
        is_name = isinstance(table, str | os.PathLike)
        raise MigrationError(
            "A table is a mapping {source: target} or {source: (target, function)}, "
            f"or a list of such pairs, not {describe(table)}."
            + " A file of rows is read by ta.load_migration(path)."
            * is_name
        )
    return tuple(
        pair if isinstance(pair, Row) else parse_row(pair[0], pair[1], sizes)
        for pair in pairs
    )


def parse_row(source: Any, value: Any, sizes: Mapping[str, int] = NO_SIZES) -> Row:
    """Parse one row: what is on the left, and what is on the right.

    Args:
        source: as it is typed.
        value: the same.
        sizes: as for ``parse_rows``.

    Raises:
        MigrationError: it is malformed.
    """
    target, extra = value, None
    if isinstance(value, tuple) and len(value) == 2:
        is_pair = isinstance(value[1], tuple) and all(map(callable, value[1]))
        if callable(value[1]) or isinstance(value[1], Mapping) or is_pair:
            target, extra = value
    if isinstance(extra, Mapping) and isinstance(extra.get("sizes"), Mapping):
        sizes = {**sizes, **extra["sizes"]}
    sources = _addresses(source, source, sizes, wild=target is None)
    targets = () if target is None else _addresses(target, source, sizes)
    row = Row(sources, targets)
    if extra is not None and target is None:
        notes = dict(extra) if isinstance(extra, Mapping) else {"": extra}
        is_spare = notes.pop("undo", None) == _UNDO_NEW["undo"]
        if not (notes.keys() <= {"check"} and (notes or is_spare)):
            refuse(row.text, "it drops leaves and changes them", "Write None alone")
        _, read = parse_operations(row.text, notes) if notes else (None, Notes())
        row = dataclasses.replace(row, is_spare=is_spare, notes=read)
    elif isinstance(extra, Mapping):
        row = Row(sources, targets, *parse_operations(row.text, extra, sizes))
    elif extra is not None:
        functions = extra if isinstance(extra, tuple) else (extra, None)
        if len(functions) != 2:
            problem = f"it has {len(functions)} functions"
            refuse(row.text, problem, "Write (function, inverse)")
        row = Row(
            sources,
            targets,
            function=functions[0],
            inverse=functions[1],
            splits=isinstance(target, tuple),
            joins=isinstance(source, tuple),
        )
    row = _understood(row)
    _check_sides(row)
    if row.has_axes and not row.drops:
        _check_axes(row)
    elif row.values.multiply or row.values.add:
        verb = "adds" if row.values.add else "multiplies"
        refuse(row.text, f"it {verb} and has no axes", "Write them after ' : '")
    _check_names(row)
    _check_takes(row, sizes)
    return row


def unchecked_text(rows: Sequence[Row]) -> str:
    """Write which rows have a mark, for a warning; empty if none has.

    Example:
        >>> row = parse_row("w", ("kernel", {"check": "names"}))
        >>> unchecked_text([row, parse_row("b", "bias")])[:60]
        "1 of 2 rows of the migration is marked to check: 'w' (names)"
    """
    marked = [row for row in rows if row.notes.check]
    if not marked:
        return ""
    names = listing((f"{r.text!r:.200} ({r.notes.check})" for r in marked), write=str)
    verb = "is" if len(marked) == 1 else "are"
    return (
        f"{len(marked):,} of {plural(len(rows), 'row')} of the migration {verb} marked "
        f"to check: {names}. Nobody has compared the answers of the two models yet. "
        "Compare them, then delete `check` from the rows; if they differ, "
        "find_wrong_rows finds the row."
    )


def _addresses(
    side: Any, row: Any, sizes: Mapping[str, int], *, wild: bool = False
) -> tuple[Address, ...]:
    texts = side if isinstance(side, tuple) else (side,)
    if not texts or not all(isinstance(text, str) for text in texts):
        cure = (
            "A row is source: target, source: (target, function) or source: (target, "
            "operations), and several names are a tuple of strings"
        )
        refuse(str(row), f"{side!r:.80} is not a name", cure)
    return tuple(_address(text, sizes, wild=wild) for text in texts)


def _address(text: str, sizes: Mapping[str, int], *, wild: bool) -> Address:
    if len(text) > MAX_CHARACTERS:
        refuse(text, f"it has {len(text):,} characters", f"At most {MAX_CHARACTERS:,}")
    # Nothing is matched where the axes start.
    splits = [one.start() for one in _ESCAPE_OR_SPLIT.finditer(text) if not one[0]]
    if len(splits) > 1:
        malformed(text, splits[1], "a second ' : '", r"Write a literal one as ' \: '")
    if splits and wild:
        malformed(text, splits[0], "axes of leaves that are dropped", "Leave them out")
    end = splits[0] if splits else len(text)
    path = parse_template(text, text[:end], wild=wild, sizes=sizes)
    axes = parse_axes(text, end + len(SPLIT)) if splits else ANY_AXES
    return Address(text, path, axes, bool(splits))


def spaced(text: str) -> str:
    """Write an address whose colon lacks a space as it is meant, or "".

    Example:
        >>> spaced("{l}/w:i o"), spaced("w: (h d) e"), spaced("kernel:0")
        ('{l}/w : i o', 'w : (h d) e', '')
    """
    match = None if SPLIT in text else _TIGHT.fullmatch(text)
    return f"{match[1]}{SPLIT}{match[2].strip()}" if match else ""


def _understood(row: Row) -> Row:
    """Return the row with the kinds of its captures decided."""
    sides = row.sources, row.targets
    captures = [[each for one in side for each in one.path.captures] for side in sides]
    every = [*captures[0], *captures[1]]
    if not every:
        return row
    lists = [{each.key: each.entries for each in s if each.entries} for s in captures]
    numbers = {*lists[0].keys()} & lists[1].keys()
    numbers.update(name for each in every if each.is_number for name in each.names)
    numbers.update(name for name, _ in row.values.take)
    for address in (*row.sources, *row.targets):
        numbers.update(every_name(address.axes))
    entries = {**lists[0], **lists[1]}
    texts = {each.key for each in every if each.is_many}
    for each in every:
        if each.is_many and each.key in numbers:
            problem = f"{{{each.key}:**}} is text and {each.key!r} is an axis"
            refuse(row.text, problem, "Use another name")
        is_text = each.entries and each.key not in numbers
        if is_text and each.entries != entries[each.key]:
            problem = f"two lists of {each.key!r} are on one side"
            cure = "Write the same texts, or a list on each side"
            refuse(row.text, problem, cure)
        if each.entries and len(each.entries) != len(entries[each.key]):
            problem = f"its lists of {each.key!r} have different lengths"
            refuse(row.text, problem, "Write one text for each on the other side")

    least: dict[str, int] = {}  # a number from which something is taken starts there
    for each in every:
        least[each.key] = min(least.get(each.key, 0), each.shift)

    def understood(address: Address) -> Address:
        path = address.path.understood(numbers, entries, texts, least)
        return dataclasses.replace(address, path=path)

    sources, targets = (tuple(map(understood, side)) for side in sides)
    return dataclasses.replace(row, sources=sources, targets=targets)


def _check_sides(row: Row) -> None:
    """Raise where the captures or the numbers of addresses do not go together."""
    every = (*row.sources, *row.targets)
    if len({each.has_axes for each in every}) > 1 and not row.drops:
        problem = "some of its addresses have axes and some have not"
        meant = next(filter(None, (spaced(one.text) for one in every)), "")
        cure = "Write the axes of each, or of none"
        refuse(
            row.text, problem, f"Put spaces around ':', {meant!r}" if meant else cure
        )
    if row.function is not None:
        numbers = [name for each in every for name in each.numbers]
        if row.has_axes or numbers:
            problem = "it has a function and axes"
            refuse(row.text, problem, "A function gets the leaves of one name")
    elif len(row.sources) > 1 and len(row.targets) > 1:
        problem = "it has several sources and several targets"
        refuse(row.text, problem, "Write one address on one side, or a function")
    texts = [each.path.names.difference(each.numbers) for each in row.sources]
    if len({*texts}) > 1:
        refuse(row.text, "its sources capture different names", "Use the same in each")
    captured = row.sources[0].path.names
    for target in row.targets:
        for name in sorted(target.path.names - captured - row.spellings.keys()):
            if not row.has_axes or name not in target.numbers:
                problem = f"its target has {{{name}}}, which it does not capture"
                refuse(row.text, problem, "Capture it in the source")
    inner = {name for each in every for name in each.numbers} - row.outer
    if inner and not (row.has_axes or row.drops):
        problem = f"{min(inner)!r} is a number that is not in all of its paths"
        refuse(row.text, problem, "Write the axes of each address after ' : '")


def _check_axes(row: Row) -> None:
    """Raise unless both sides of each piece have the same names."""
    sides = row.sources, row.targets
    counts = [sum(parts_of(each.axes) for each in side) for side in sides]
    for side, count, others in zip(sides, counts, reversed(counts), strict=True):
        for address in side:
            parts = parts_of(address.axes)
            if parts > 1 and count != others:
                problem = (
                    f"it is a concatenation of {parts} parts, and the other side has "
                    f"{plural(others, 'address')}"
                )
                cure = "Write one address, or one part of a bracket, for each part"
                refuse(address.text, problem, cure)
            both = sorted({*every_name(address.axes)}.intersection(address.numbers))
            if both:
                problem = f"{both[0]!r} is in its path and among its axes"
                refuse(address.text, problem, "Write it once")
    if row.lost:
        problem = f"{{{row.lost[0]}}} is neither in the target's path nor an axis of it"
        refuse(row.text, problem, _spaces(row) or "Write it on both sides")
    if row.values.multiply:
        return _check_factors(row)
    for source, one, target, two in row.pieces:
        left, right = row.sources[source], row.targets[target]
        here = {*left.numbers, *names_of(left.axes, one)}
        there = {*right.numbers, *names_of(right.axes, two)}
        texts = left.path.names.difference(left.numbers)
        here |= there & row.values.repeats(is_source=False)
        there |= here & row.values.repeats(is_source=True)
        alone = sorted((here ^ there) - texts)
        if alone:
            inside, outside = (left, right) if alone[0] in here else (right, left)
            near = Speller().nearest(alone[0], sorted(here & there), count=1)
            cure = f"Did you mean {near[0]!r}" if near else "Write each on both sides"
            cure = _spaces(row) or cure
            problem = f"{listing(alone)} on one side only: in {inside.text!r:.200}, and"
            refuse(row.text, f"{problem} not in {outside.text!r:.200}", cure)


def _spaces(row: Row) -> str:
    """Write that names of axes have spaces between them, if some may lack them."""
    one, two = (
        [name for each in side for name in every_name(each.axes)]
        for side in (row.sources, row.targets)
    )
    captured = set().union(*(each.path.names for each in row.sources))
    name = run_together(one, two, captured)
    return f"Write spaces between axes: {' '.join(name)!r}" if name else ""


def _check_factors(row: Row) -> None:
    """Raise unless the names of the factors together are those of the product."""
    (target, *others) = row.targets
    names = [{*each.numbers, *every_name(each.axes)} for each in row.sources]
    there = {*target.numbers, *every_name(target.axes)}
    axes = [axis for each in (*row.sources, target) for axis in each.axes]
    if others or len(row.sources) < 2:
        problem = "it multiplies, and does not have several sources and one target"
        refuse(row.text, problem, 'Write ("w : (a i) b", "s : a b"): "w : (a i) b"')
    if REST in there.union(*names) or any(len(axis.parts) > 1 for axis in axes):
        refuse(row.text, "it multiplies along ... or [...]", "Name each axis")
    texts = row.sources[0].path.names.difference(row.sources[0].numbers)
    alone = sorted(there.symmetric_difference(set().union(*names)) - texts)
    alone += sorted(set(row.values.repeats(is_source=False)))
    if alone:
        problem = f"it multiplies, and {listing(alone)} is not on both sides"
        refuse(row.text, problem, "The product has the axes of its factors")


def _check_takes(row: Row, sizes: Mapping[str, int]) -> None:
    """Raise unless what is taken is along axes, or numbers, that have one meaning."""
    values, every = row.values, (*row.sources, *row.targets)
    if values.add:
        several = row.targets if values.undoes else row.sources
        if len(several) < 2 or row.has_parts:
            problem = "it adds, and does not have several sources without brackets"
            cure = 'Write ("a : x y", "b : x y"): "c : x y"; a table before it can cut'
            refuse(row.text, problem, cure)
        if values.multiply:
            refuse(row.text, "it adds and multiplies", "Write one table for each")
    for name, take in values.take:
        others = [n for n, _ in (*values.repeat, *values.pad)]
        if values.multiply or values.add or name in others:
            verb = "multiplies" * values.multiply or "adds" * values.add
            verb = verb or f"repeats or pads {name!r}"
            problem = f"it takes numbers of {name!r} and {verb}"
            refuse(row.text, problem, "Write two tables, a.then(b)")
        in_paths = [c for each in every for c in each.path.captures if name in c.names]
        in_axes = any(name in every_name(each.axes) for each in every)
        if not (in_axes or in_paths) or name == REST:
            near = Speller().nearest(name, sorted(row.names), count=1)
            cure = f"Did you mean {near[0]!r}" if near else "Remove it"
            problem = f"take has {name!r:.200}, which is not an axis or number of it"
            refuse(row.text, problem, cure)
        if len({bool(c.entries) for c in in_paths}) > 1 and not in_axes:
            problem = f"it takes some of the texts of {name!r}, which one path lists"
            refuse(row.text, problem, "Write a list in each path")
        size = sizes.get(name, take.size)
        if take.size and size != take.size:
            cure = f"Select some of them: {{'take': {{{name!r}: [...], 'of': {size}}}}}"
            problem = f"take has {take.size:,} numbers of {name!r}, whose size is"
            refuse(row.text, f"{problem} {size:,}", cure)


def _check_names(row: Row) -> None:
    """Raise unless the row has the axes that its operations and notes name."""
    side = row.sources if row.values.undoes else row.targets
    for name, _ in row.values.pad:
        for address in side:
            if name == REST or name not in [axis.name for axis in address.axes]:
                problem = f"it pads {name!r}, which is not an axis of"
                cure = "Write it as an axis of its own"
                refuse(row.text, f"{problem} {address.text!r:.200}", cure)
    for name, _ in row.values.repeat:
        is_axis = any(name in every_name(each.axes) for each in side)
        others = row.targets if row.values.undoes else row.sources
        in_path = any(name in each.numbers for each in side)
        in_others = any(name in {*every_name(o.axes), *o.numbers} for o in others)
        if not is_axis or name == REST or in_path or in_others:
            here, there = ("source", "target")[:: -1 if not row.values.undoes else 1]
            problem = f"it repeats along {name!r}, which is not an axis of its {here}"
            refuse(row.text, f"{problem} alone", f"Write it there, not in the {there}")
    sizes, repeats = dict(row.notes.sizes), dict(row.values.repeat)
    for name in sizes:
        if repeats.get(name) not in (None, sizes[name]):
            problem = f"{name!r} has two sizes, {repeats[name]} and {sizes[name]}"
            refuse(row.text, problem, "Write it once")
    for noun, names in (("sizes", sizes), ("checked", row.notes.checked)):
        for name in names:
            if name not in row.names or not row.has_axes:
                near = Speller().nearest(name, sorted(row.names), count=1)
                cure = f"Did you mean {near[0]!r}" if near else "Remove it"
                problem = f"{noun} has {name!r:.200}, which is not an axis of the row"
                refuse(row.text, problem, cure)
