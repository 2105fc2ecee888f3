"""Migration files: a table of rows as TOML or JSON text.

Takes what ``data_files`` reads and gives a table as Python writes it, or writes rows. A
file may come from anyone: it has no unknown fields, and what planning it may cost is
capped before work. What a row means is up to ``rows``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from treeadapt.errors import MigrationError
from treeadapt.migrations.operations import COVERED, NOTES, OPERATIONS
from treeadapt.migrations.rows import SPLIT, Row
from treeadapt.migrations.tables.published import find, is_name, names_for
from treeadapt.migrations.templates import Template
from treeadapt.text.data_files import VERSION, DataFile, FileField
from treeadapt.text.names import listing

MIGRATION_FILE = DataFile(
    "migration",
    MigrationError,
    "[[rows]]",
    'from = "a : i o"',
    in_python="ta.Migration(table)",
    tables_for=names_for,
)
MAX_ROWS = 10_000
MAX_TABLES = 16  # of a chain
MAX_CHARACTERS = 200_000  # of all addresses with captures or axes
MAX_WEIGHT = 500  # of all paths of one side; see ``check_weight``

_TEXTS = FileField("a string, or a list of strings", 'it as "a/kernel : i o"')
_ROW = dict.fromkeys(("from", "to", "drop"), _TEXTS)
_ROW |= dict.fromkeys((*OPERATIONS, "undo", *NOTES), FileField())
#: What a published table has next to its rows: see ``tables``.
_OF_TABLES = dict.fromkeys(("model_types", "oracle", "digests"), FileField())
_MAPPINGS = ("sizes", "new", "config", "counts")
_TABLE = {
    name: FileField("a table", f"[{name}] above its lines", MAX_ROWS)
    for name in _MAPPINGS
}
_TABLE |= dict.fromkeys(("extends", "sha256"), FileField())
_ROWS = '[[rows]] above from = "a : i o" and to = "b : o i"'
_TABLE["rows"] = FileField("a list of tables", _ROWS, MAX_ROWS, is_required=True)
_MORE_ROWS = FileField("a list of tables", _ROWS, MAX_ROWS)
_CHAIN = "[[tables]] above the tables of each, and [[tables.rows]]"
_TABLES = {"tables": FileField("a list of tables", _CHAIN, MAX_TABLES), **_OF_TABLES}


class BaseTable(NamedTuple):
    """The published table that a table begins with.

    Attributes:
        name: layout and model type.
        sha256: of its file, as it is.
        stated: the same, as the table states it; empty if it does not.
    """

    name: str
    sha256: str
    stated: str


class FileTable(NamedTuple):
    """What a migration file holds.

    Attributes:
        rows: as ``Migration`` takes them.
        sizes: the same.
        new: the same.
        config: under which keys of a model's configuration sizes are, by their names.
        counts: the same of how many numbers paths have, by the paths.
        base: the published table that it begins with; None without one.
    """

    rows: list[tuple[Any, Any]]
    sizes: dict[str, int]
    new: dict[str, str | dict[str, str]]
    config: dict[str, str | list[str]]
    counts: dict[str, str | list[str]]
    base: BaseTable | None = None

    def extended(self, own: FileTable) -> FileTable:
        """Return a table that begins with this one.

        Args:
            own: rows that come first, and what else is otherwise.
        """
        sizes = {n: size for n, size in self.sizes.items() if n not in own.config}
        new = {path: how for path, how in self.new.items() if path not in own.new}
        return FileTable(
            [*own.rows, *map(_covered, self.rows)],
            {**sizes, **own.sizes},
            {**own.new, **new},
            {**self.config, **own.config},
            {**self.counts, **own.counts},
            own.base or self.base,
        )


def read_tables(path: str | os.PathLike[str]) -> list[FileTable]:
    """Read a migration file: one table, or those of a chain in order.

    Args:
        path: file name, ending in ``.toml`` or ``.json``.

    Raises:
        MigrationError: the file cannot be read, is malformed, or too large.
    """
    document = MIGRATION_FILE.read(path)
    documents = document.get("tables", [document])
    if "tables" in document:
        MIGRATION_FILE.check(path, document, _TABLES)
        if not documents:
            MIGRATION_FILE.refuse(path, "it has no tables", f"Write {_CHAIN}.")
        for number, each in enumerate(documents, 1):
            MIGRATION_FILE.check(path, each, _fields_of(each), of=f"table {number}")
    else:
        MIGRATION_FILE.check(path, document, {**_fields_of(document), **_OF_TABLES})
    tables = [_table(path, each) for each in documents]
    for name in ("rows", *_MAPPINGS):
        if (count := sum(len(getattr(table, name)) for table in tables)) > MAX_ROWS:
            seen = f"{name!r} has {count:,} entries"
            MIGRATION_FILE.refuse(path, seen, f"At most {MAX_ROWS:,}.")
    texts = [*itertools.chain(*(table.new for table in tables))]
    for source, value in itertools.chain(*(table.rows for table in tables)):
        for side in (source, _split(value)[0] or ()):
            texts += side if isinstance(side, tuple) else [side]
    total = sum(len(text) for text in texts if "{" in text or SPLIT in text)
    if total > MAX_CHARACTERS:
        seen = f"its addresses with captures or axes have {total:,} characters"
        MIGRATION_FILE.refuse(path, seen, f"At most {MAX_CHARACTERS:,}. Split it.")
    return tables


def _table(path: str | os.PathLike[str], document: Mapping[str, Any]) -> FileTable:
    """Return one table of a file."""
    tables = {name: document.get(name, {}) for name in _MAPPINGS}
    for name in ("config", "counts"):
        keys = dict.fromkeys(tables[name], _TEXTS)
        MIGRATION_FILE.check(path, tables[name], keys, of=name)
    rows = document.get("rows", [])
    pairs = [_pair(path, place, row) for place, row in enumerate(rows, 1)]
    table = FileTable(pairs, **tables)
    for name in ("extends", "sha256"):
        if not isinstance(document.get(name, ""), str):
            MIGRATION_FILE.refuse(path, f"{name!r} is not a string", "Write a text.")
    if "extends" not in document:
        return table
    name = document["extends"]
    if not is_name(name) or "/" not in name:
        cure = "Name a published table: extends = 'tunix/qwen3'. No other file is read."
        MIGRATION_FILE.refuse(path, f"it extends {name!r:.200}", cure)
    published = find(name)
    base, *others = read_tables(published.file)
    if others:
        cure = "Load that, and join it with a table of your own by then()."
        MIGRATION_FILE.refuse(path, f"{name!r} is a chain, which nothing extends", cure)
    stated = BaseTable(published.name, published.sha256, document.get("sha256", ""))
    return base.extended(table._replace(base=stated))


def _fields_of(document: Mapping[str, Any]) -> dict[str, FileField]:
    """Return the fields that a table of a file may have."""
    return {**_TABLE, "rows": _MORE_ROWS} if "extends" in document else _TABLE


def _split(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return what is on the right of a row: its target, and what is next to that."""
    if isinstance(value, tuple) and value and isinstance(value[-1], Mapping):
        return value
    return value, {}


def _covered(row: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a row that may match nothing where rows above it take its leaves."""
    source, (target, options) = row[0], _split(row[1])
    if target is None or "copy" in options or "optional" in options:
        return row
    return source, (target, {**options, "optional": COVERED})


def options_of(row: tuple[Any, Any]) -> Mapping[str, Any]:
    """Return what is next to the target of a row, as it is typed."""
    return _split(row[1])[1]


def check_weight(path: str | os.PathLike[str], paths: Iterable[Template]) -> None:
    """Raise if it may take too long to find the rows of many leaves.

    A path with captures weighs one, and twice its captures more for each number or list
    that may take several tries, because other captures come before it.

    Raises:
        MigrationError: the paths weigh too much.
    """
    total = 0
    for template in paths:
        total += bool(template.captures)
        for capture, is_settled in zip(
            template.captures, template.settled, strict=True
        ):
            if not (is_settled or capture.is_free):
                total += 2 * len(template.captures)
        if total > MAX_WEIGHT:
            seen = f"its captures weigh more than {MAX_WEIGHT:,}"
            cure = f"Split the file, or write fewer; up to {listing([template.text])}."
            MIGRATION_FILE.refuse(path, seen, cure)


def write_tables(
    tables: Sequence[tuple[Sequence[Row], Mapping[str, int], Mapping[str, Any]]],
) -> str:
    """Write a migration file as TOML, the rows of each table last.

    Args:
        tables: rows, sizes and fillings of each; several are a chain.

    Raises:
        MigrationError: rows have functions; all of them are named.
    """
    stuck = [r.text for rows, *_ in tables for r in rows if r.function is not None]
    if stuck:
        raise MigrationError(
            f"A migration file cannot hold functions, and these rows have some: "
            f"{listing(stuck)}. Keep them in Python, or write them as axes, scale, "
            "offset, pad and cast."
        )
    lines = [f"version = {VERSION}"]
    is_chain = len(tables) > 1
    for table in tables:
        lines += lines_of_table(*table, is_one_of_several=is_chain)
    return "\n".join(lines) + "\n"


def lines_of_table(
    rows: Sequence[Row],
    sizes: Mapping[str, int],
    new: Mapping[str, str | Mapping[str, str]],
    *,
    is_one_of_several: bool,
) -> list[str]:
    """Write a table of a migration file, the rows last.

    Args:
        rows: without functions.
        sizes: next to them.
        new: what fills leaves that the source lacks.
        is_one_of_several: whether the file has other tables.
    """
    above = "tables." if is_one_of_several else ""
    lines = ["", "[[tables]]"] * is_one_of_several + ["rows = []"] * (not rows)
    heads = [(f"[{above}sizes]", sizes), (f"[{above}new]", new)]
    heads += [(f"[[{above}rows]]", _fields(row)) for row in rows]
    for head, fields in heads:
        if fields:
            lines += ["", head, *MIGRATION_FILE.field_lines(fields)]
    return lines


def _fields(row: Row) -> dict[str, Any]:
    source, value = row.typed()
    if row.drops:
        return {"drop": source, **(value[1] if value else {})}
    target, values = value if row.values or row.notes else (value, {})
    return {"from": source, "to": target, **values}


def _pair(path: str | os.PathLike[str], place: int, row: Any) -> tuple[Any, Any]:
    """Return one row as Python writes it."""

    def refuse(problem: str, cure: str) -> NoReturn:
        MIGRATION_FILE.refuse(path, f"row {place} {problem}", cure)

    MIGRATION_FILE.check(path, row, _ROW, of=f"row {place}")
    sides: list[Any] = []
    for name in ("drop",) if "drop" in row else ("from", "to"):
        if name not in row:
            refuse(f"has no {name!r}", "Write from and to, or drop alone.")
        side = row[name]
        sides.append(tuple(side) if isinstance(side, list) else side)
    values = {name: row[name] for name in row if name not in ("from", "to", "drop")}
    if "drop" in row and not {*row} <= {"drop", "undo", "check"}:
        others = listing(name for name in row if name != "drop")
        refuse(f"drops leaves and has {others}", "Remove one of the two.")
    if "drop" in row:
        return sides[0], (None, values) if values else None
    return sides[0], (sides[1], values) if values else sides[1]
