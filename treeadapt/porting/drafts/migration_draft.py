"""A drafted table, and its text: a migration file with a comment where to look."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from treeadapt.migrations.files import MIGRATION_FILE, lines_of_table
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.rows import SPLIT, Row
from treeadapt.porting.drafts.answering import ANSWERED, Shapes
from treeadapt.porting.drafts.checking import (
    DraftCheck,
    blank_lines,
    compared_with,
    shapes_of_tables,
    with_other_sizes,
)
from treeadapt.porting.drafts.rows import DraftRow, by_template, tokens_of
from treeadapt.porting.drafts.stated import sizes_at
from treeadapt.porting.drafts.writing import (
    ESCAPED_SPLIT,
    WrittenRow,
    WrittenSizes,
    alone,
)
from treeadapt.text.data_files import VERSION
from treeadapt.text.html_table import html_table
from treeadapt.text.names import first_rows, fold, listing, plural

_SHARED = (
    "# These have numbers in common, in an order that no row found here gives. Tried",
    "# were one table, and a first one that makes two numbers of one, or one of an",
    "# ending such as `_reverse`; with convert=, sums too. What is cut otherwise takes",
    "# a table `a` that is written manually: draft_migration(a(source), target) drafts",
    "# `b` of `a.then(b)`. If there are copies on the source's side,",
    "# draft the other way around, and take the inverse, which undoes a `repeat`:",
)
_SEEN = (
    "# No shape says these: they were seen at this size alone, so their rows have a",
    "# mark. A model with others needs them here, or in sizes= of load_migration.",
)
_READ = (
    "# No row here gives what the function makes of these. What is computed otherwise",
    "# than by `take`, `scale`, `offset`, `pad`, `cast`, `add` takes a row with a",
    "# function:",
)
_STATED = (
    "# The configuration next to the source states it, and shapes fit any number of",
    "# heads. For models of other sizes, write it in [config], and load with config=:",
)
_ASKED = (
    "# No shape says these, and the configuration next to the weights does: config= of",
    "# load_migration, or the name of this file as migration= of load:",
)
_MOST_NOTES = 6  # above a row
_NEXT = {
    "functions": "ta.match_models proves a table, given both models as functions.",
    "answers": "ta.find_wrong_rows names a wrong row, given answers of one model.",
    "size": (
        "draft.check at another size answers "
        "'length', 'numbers', 'order', 'scale' and 'sizes'."
    ),
}
_KINDS = ("by values", "to check", "to pass leaves on")

#: The number of its table, from 1, sources, targets, operations, and marks of a row.
_TypedRow: TypeAlias = tuple[
    int, tuple[str, ...], tuple[str, ...], Mapping[str, Any], tuple[str, ...]
]


@dataclasses.dataclass(frozen=True, repr=False)
class MigrationDraft:
    """A drafted table, and what each of its rows rests on.

    Attributes:
        migration: the table as it is, doubtful rows included.
        pairs: for each path of the source the paths of the target that it goes to.
        doubtful: paths of the source whose row has a mark, ``check``, in any table.
        missing: leaves of the target that nothing fills.
        unexpected: leaves of the source without a partner; in the text, rows that drop
            them are comments, unless the function reads them.
        notes: what else there is to know: sizes of 1, models that are not alike.
    """

    migration: Migration
    pairs: Mapping[str, tuple[str, ...]]
    doubtful: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]
    _shared: Mapping[str, tuple[str, ...]] = dataclasses.field(repr=False)
    _rows: tuple[WrittenRow, ...] = dataclasses.field(repr=False)
    _refuted: tuple[WrittenRow, ...] = dataclasses.field(repr=False)
    _sizes: WrittenSizes = dataclasses.field(repr=False)
    _has_function: bool = dataclasses.field(repr=False)
    _shapes: Shapes = dataclasses.field(repr=False)
    _inner: MigrationDraft | None = dataclasses.field(repr=False, default=None)
    _place: int = dataclasses.field(repr=False, default=0)

    def check(
        self, source: Any, other: Any, *, sizes: Mapping[str, int] | None = None
    ) -> DraftCheck:
        """Run the table at another size, there and back, and compare.

        Numbers of one configuration cannot show what another one would, such as which
        of two equal sizes is meant. Sizes that the table says itself are those that it
        was drafted at, but for those that a ``config.json`` next to ``source`` states,
        or ``sizes`` does.

        Args:
            source: tree, checkpoint or schema of another configuration.
            other: the conversion function, which is called with distinct numbers; or
                the target, a tree or a checkpoint, that ``source`` should become.
            sizes: of this configuration, by names that the table has in ``[sizes]``.
                Marks of their rows stay, because others need them, too.

        Returns:
            A report that is false if something differs. It says which rows do, and at
            which paths. Its ``migration`` is the table, and where all is equal, without
            the marks that this size answers.

        Raises:
            MigrationError: a side holds no numbers; the function raises, or returns no
                arrays; the table has no size of a name.

        Example:
            >>> from treeadapt.porting.drafts.draft import draft_migration
            >>> small = {"w": np.zeros((3, 5), "f4")}
            >>> draft = draft_migration(small, convert=lambda w: {"k": w["w"].T})
            >>> large = {"w": jax.ShapeDtypeStruct((7, 9), "float32")}
            >>> print(draft.check(large, lambda w: {"k": w["w"].T}))
            1 leaf: equal, there and back.
            >>> print(draft.check(large, lambda w: {"k": -w["w"].T}))
            The row 'w : o i' differs on the way there: 'k'.
            The row 'w : o i' differs on the way back: 'w'.
        """
        stated = sizes_at(self._sizes.keys, source)
        table = self.migration
        migration = with_other_sizes(table, {**stated, **(sizes or {})})
        before = {name: n for each in table.tables for name, n in each.sizes.items()}
        others = {name for name, n in (sizes or {}).items() if before[name] != n}
        shapes = shapes_of_tables(table, self._shapes)
        return compared_with(migration, shapes, source, other, stated, others)

    def to_toml(self) -> str:
        """Write the table as a migration file, with a comment where to look at it."""
        lines = [f"# {line}".rstrip() for line in self.summary.splitlines()]
        lines += [f"version = {VERSION}"]
        if self._inner is None:
            return "\n".join([*lines, *self._table_lines("")]) + "\n"
        for place, table in enumerate(self.migration.tables):
            if place == self._place:
                lines += ["", "[[tables]]", *self._inner._table_lines("tables.")]
                continue
            parts = table.rows, table.sizes, table._new
            lines += lines_of_table(*parts, is_one_of_several=True)
        return "\n".join(lines) + "\n"

    def _table_lines(self, above: str) -> list[str]:
        """Write the rows, with a comment where to look.

        Args:
            above: what is before the names of tables in the file.
        """
        lines = [*self._size_lines(above)]
        if not self._rows:
            lines.append("rows = []")
        if self.migration._new:
            lines += ["", "# The function makes these of no leaf of the source:"]
            lines += [f"[{above}new]", *MIGRATION_FILE.field_lines(self.migration._new)]
        for each in self._rows:
            if each.row.is_rest:
                lines += self._drops(above)
            lines += ["", *_row_lines(each, above)]
        if self._refuted:
            lines += ["", "# Names are for these rows, and the numbers against them:"]
            for each in self._refuted:
                lines += [
                    f"# {line}".rstrip() for line in ("", *_row_lines(each, above))
                ]
        if not any(each.row.is_rest for each in self._rows):
            lines += self._drops(above)
        named = {path for each in self._refuted for path in each.row.target_paths}
        unlike = [p for p in self.missing if p not in self._shared and p not in named]
        if unlike:
            lines += ["", "# Nothing in the source is like these leaves of the target:"]
            lines += _listed(fold(unlike))
        if self._shared:
            lines += ["", *_SHARED]
            lines += _listed(
                f"{path} and {', '.join(fold(sources))}"
                for path, sources in self._shared.items()
            )
        return lines

    def to_json(self) -> str:
        """Return the draft as JSON, for a program that decides what to do.

        The table is under ``table``, as the text of its file.
        """
        rows = [
            {"in_table": number, "from": old, "to": new, "check": checks}
            for number, old, new, _, checks in self._every_row()
        ]
        names = ("pairs", "doubtful", "missing", "unexpected", "notes")
        fields = {name: getattr(self, name) for name in names}
        document = {"rows": rows, **fields, "table": self.to_toml()}
        return json.dumps(document, indent=2, default=dict)

    def _size_lines(self, above: str) -> Iterator[str]:
        """Yield the sizes that the rows name, and where they come from."""
        keys, every = self._sizes.keys, self._sizes.sizes
        seen = {name: size for name, size in every.items() if name not in keys}
        asked = {name: key for name, key in keys.items() if name in self._sizes.open}
        fixed = {name: every[name] for name in keys if name not in asked}
        if asked:
            yield from (
                "",
                "# No shape says these; the configuration does:",
                f"[{above}config]",
            )
            yield from MIGRATION_FILE.field_lines(asked)
        counts = self._sizes.counts
        if counts and not above:  # of several tables, paths may have other names
            yield from ("", "# So many there are, by the configuration:", "[counts]")
            yield from MIGRATION_FILE.field_lines(counts)
        if seen or fixed:
            yield from ("", f"[{above}sizes]")
        if fixed:
            yield from MIGRATION_FILE.field_lines(fixed)
            yield from _STATED
            lines = MIGRATION_FILE.field_lines({name: keys[name] for name in fixed})
            yield from (f"#     {line}" for line in lines)
        if seen:
            yield from MIGRATION_FILE.field_lines(seen)
            yield from _SEEN

    def _drops(self, above: str) -> list[str]:
        """Return the rows that would drop leaves without a partner, as comments."""
        shared = {path for paths in self._shared.values() for path in paths}
        named = {path for each in self._refuted for path in each.row.source_paths}
        unlike = [p for p in self.unexpected if p not in shared | named]
        if not unlike:
            return []
        if self._has_function:
            return ["", *_READ, *_listed(fold(unlike))]
        lines = ["", "# Nothing in the target is like these. To drop them:"]
        for each in dropping(unlike):
            lines += ["#", *(f"# {line}" for line in _row_lines(each, above))]
        return lines

    def __repr__(self) -> str:
        rows = [
            f"{source} -> {target}{'    check: ' * bool(check)}{check}"
            for source, target, check in self._row_texts()
        ]
        return "\n".join([self.summary, *rows])

    def _repr_html_(self) -> str:
        """Return the draft for a notebook."""
        title, *notes = self.summary.splitlines()
        head = ("source", "target", "check")
        return html_table(title, head, self._row_texts(), notes)

    def _row_texts(self) -> Iterator[tuple[str, str, str]]:
        """Yield of each row its sources, its targets, and what it rests on."""
        for _, *sides, operations, checks in self._every_row():
            source, target = (", ".join(map(repr, side)) for side in sides)
            options = (f"{k}={v!r}" for k, v in operations.items())
            yield source, " ".join([target or "dropped", *options]), ", ".join(checks)

    def _every_row(self) -> Iterator[_TypedRow]:
        """Yield the rows of all tables: of those around the rows, too."""
        for number, table in enumerate(self.migration.tables):
            if number == self._place:
                for each in self._rows:
                    sides = each.sources, each.targets
                    yield number + 1, *sides, each.operations, each.row.checks
                continue
            for row in table.rows:
                old, new = (
                    tuple(address.text for address in side)
                    for side in (row.sources, row.targets)
                )
                values = row.values.typed()
                checks = tuple(filter(None, row.notes.check.split(", ")))
                options = {"undo": values} if row.values.undoes else values
                yield number + 1, old, new, options, checks

    def _rows_around(self) -> Iterator[Row]:
        """Yield the rows of the tables around the one with the rows of the draft."""
        for number, table in enumerate(self.migration.tables):
            if number != self._place:
                yield from table.rows

    @property
    def summary(self) -> str:
        """How many rows there are, what is left out, and what else there is to know."""
        rows = self.migration.rows
        passing = sum(map(_passes_on, self._rows_around()))
        counts = Counter("to check" if row.notes.check else "by values" for row in rows)
        counts.subtract({"by values": passing})
        counts["to pass leaves on"] = passing
        parts = [f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind]]
        head = plural(len(rows), "row")
        lines = [f"{head}{': ' if parts else ''}{', '.join(parts)}."]
        marks = {
            mark for row in rows for mark in filter(None, row.notes.check.split(", "))
        }
        is_open = bool(marks - ANSWERED)
        has_gaps = bool(self.missing and not self._has_function)
        needs = {
            "functions": is_open or has_gaps,
            "answers": is_open,
            "size": bool(marks & ANSWERED),
        }
        lines += [text for what, text in _NEXT.items() if needs[what]]
        for noun, paths in (
            ("of the target that nothing fills", self.missing),
            ("of the source without a partner", self.unexpected),
        ):
            if paths:
                names = listing(fold(paths), limit=4)
                lines.append(f"{plural(len(paths), 'leaf')} {noun}: {names}.")
        return "\n".join([*lines, *blank_lines(self.migration), *self.notes])


def _passes_on(row: Row) -> bool:
    """Return whether a row takes what is left to another table as it is."""
    both = {address.text for address in (*row.sources, *row.targets)}
    return both == {"{rest:**}", "{rest}"} and not row.notes.check


def _row_lines(each: WrittenRow, above: str) -> list[str]:
    """Write a row, what its reader should know above it."""
    notes = first_rows([_line(note) for note in each.row.notes], limit=_MOST_NOTES)
    fields = {"from": alone(each.sources), "to": alone(each.targets)}
    if not each.targets:
        fields = {"drop": alone(each.sources)}
    return [
        *(f"# {note}" for note in notes),
        f"[[{above}rows]]",
        *MIGRATION_FILE.field_lines(fields | each.options),
    ]


def dropping(paths: Iterable[str], others: Iterable[str] = ()) -> Iterator[WrittenRow]:
    """Yield rows that drop leaves, those that differ in numbers as one.

    Args:
        paths: of the leaves.
        others: of leaves, some of which may differ from these in numbers alone: then
            rows list the numbers.
    """
    every = by_template(others)
    for template, members in by_template(paths).items():
        is_all = {*members} >= {*every.get(template, ())}
        numbers = [
            [*dict.fromkeys(each)]
            for each in zip(*map(tokens_of, members), strict=True)
        ]
        is_grid = math.prod(map(len, numbers)) == len(members)
        for some in [members] if is_all or is_grid else [[path] for path in members]:
            text = _dropped(template, some, in_full=not is_all)
            row = DraftRow((), (), {}, ((tuple(some), ()),), "values")
            yield WrittenRow((text,), (), {}, row)


def _dropped(
    template: Sequence[str | None], paths: Sequence[str], *, in_full: bool
) -> str:
    """Return the address of leaves that differ in numbers."""
    text = ""
    tokens = [*map(tokens_of, paths)]
    for place, token in enumerate(template):
        if token is None:
            numbers = [*dict.fromkeys(each[place] for each in tokens)]
            listed = f"{{n{place}={','.join(numbers)}}}" if in_full else "*"
            text += listed if len(numbers) > 1 else numbers[0]
        else:
            text += "".join(f"\\{c}" if c in "\\{}*?[" else c for c in token)
    return text.replace(SPLIT, ESCAPED_SPLIT)


def _listed(texts: Iterable[str], limit: int = 200) -> list[str]:
    """Write texts as comments, one a line."""
    return [f"#     {_line(text)}" for text in first_rows([*texts], limit=limit)]


def _line(text: str) -> str:
    """Write a text within one line of a comment."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown[:400]
