"""Loading: migrations from files and published tables, and what configurations state.

Takes the name of a file, or of a published table, and what a model's ``config.json``
says; gives a ``Migration``. See ``files`` for what a file may hold.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from treeadapt.errors import MigrationError
from treeadapt.migrations.counts import Count
from treeadapt.migrations.files import (
    MIGRATION_FILE,
    FileTable,
    check_weight,
    options_of,
    read_tables,
)
from treeadapt.migrations.migration import Migration, require_mapping
from treeadapt.migrations.rows import parse_rows
from treeadapt.migrations.tables.published import (
    Config,
    absent_keys,
    find,
    is_name,
    not_a_table,
    stated_flags,
    stated_sizes,
)
from treeadapt.text.data_files import is_content
from treeadapt.text.names import listing


def load_migration(
    path: str | os.PathLike[str],
    *,
    config: Config | None = None,
    sizes: Mapping[str, int] | None = None,
    rows: Any = None,
) -> Migration:
    """Read a migration from a TOML or JSON file, or one of the published tables.

    ``version = 1`` and ordered ``[[rows]]``. A row has ``from`` and ``to``, each an
    address or a list of them, and may have ``take``, ``repeat``, ``scale``, ``offset``,
    ``pad``, ``fill``, ``cast`` and ``add``, or these in a table ``undo``, and
    ``multiply``, ``sizes``, ``checked``, ``optional`` and ``check``; or it has
    ``drop``, alone or with ``check``, in an inverse also ``undo = "new"``. ``[sizes]``
    and ``[new]`` as for ``Migration``. ``[config]`` says under which key of a
    configuration a size is: ``h = "num_attention_heads"``, with dots for nested keys,
    or a list of keys, of which the first counts that is there; such a size is one in
    the whole table. ``[counts]`` says the same of how many numbers there are in a path:
    ``"layers.{l}.*" = "num_hidden_layers"``. ``extends`` names a
    published table: rows of the file come first, and its other entries win;
    ``sha256`` fixes that table, as ``lint`` says.

    Args:
        path: file name, ending in ``.toml`` or ``.json``. The file is read as data:
            nothing in it is imported or run. Any other text, unless it is absolute,
            begins with a dot or has a backslash, names a published table, as
            ``"tunix/qwen3"``, or with ``config`` its layout, ``"tunix"``.
        config: a published model's ``config.json``, the folder that has it, or what it
            holds: gives the model type, and sizes that neither ``[sizes]`` nor the rows
            have. A size that it states and shapes contradict is an error.
        sizes: as for ``Migration``; they win over those of the file and of ``config``.
        rows: a table, as for ``Migration``, whose rows come before those of the file.
            Rows of the file that they leave nothing may match nothing. Of a file with
            several tables, these and ``sizes`` are of the first.

    Raises:
        MigrationError: the file cannot be read, is malformed, or too large; there is no
            such table; the configuration has no model type or a malformed size; or
            ``sizes`` is not a mapping.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "table.toml"
        >>> text = Migration({"layers.{l}.w : i o": "w : l o i"}).to_toml()
        >>> _ = file.write_text(text)
        >>> load_migration(file)
        Migration({'layers.{l}.w : i o': 'w : l o i'})
        >>> config = {"model_type": "qwen3", "head_dim": 64}
        >>> table = load_migration("tunix", config=config, sizes={"h": 2})
        >>> table.origin
        "of the table 'tunix/qwen3', with d = 64 (head_dim)"
        >>> own = load_migration("tunix", config=config, rows={"lm_head.weight": None})
        >>> own.rows[0].drops, len(own.rows) - len(table.rows)
        (True, 1)
    """
    require_mapping("sizes", sizes)
    name = ""
    if is_name(path):
        name, path, *_ = find(path, config)
    elif _is_other_file(path):
        raise MigrationError(f"{listing([os.fspath(path)])}: {not_a_table(path)}")
    first, *others = read_tables(path)
    if sizes is not None or rows is not None:
        first = _with_own(first, sizes or {}, rows)
    tables = [_read(path, first, name, config)]
    tables += [_read(path, table, "", config) for table in others]
    every = [
        each.path
        for table in tables
        for row in (*table._added, *table._rows)
        for each in row.sources
    ]
    check_weight(path, every)
    check_weight(
        path, [t.path for each in tables for r in each.rows for t in r.targets]
    )
    migration = functools.reduce(Migration.then, tables)
    migration.published = name
    return migration


def _is_other_file(path: Any) -> bool:
    """Return whether a path names what is there, and is not a table by its ending."""
    if not isinstance(path, str | os.PathLike) or is_content(path):
        return False
    is_table = os.fspath(path).lower().endswith((".toml", ".json"))
    return not is_table and os.path.exists(path)


def _read(
    path: str | os.PathLike[str], table: FileTable, name: str, config: Config | None
) -> Migration:
    """Return one table of a file.

    Args:
        path: of the file.
        table: what the file has of it.
        name: of a published table; empty for a file, and for further tables.
        config: as for ``load_migration``.
    """
    rows, sizes, new, keys, counts, base = table
    stated = {} if config is None else stated_sizes(keys, config)
    used = {n: size for n, (size, _) in stated.items() if n not in sizes}
    flags = (
        {} if config is None else stated_flags(filter(None, map(_key, rows)), config)
    )
    omitted = [n for n, row in enumerate(rows) if not flags.get(_key(row), True)]
    known = [_with_flags(row, flags) for n, row in enumerate(rows) if n not in omitted]
    try:
        migration = Migration(known, sizes={**sizes, **used}, new=new)
    except MigrationError as error:
        open_sizes = [n for n in keys if n not in sizes and n not in used]
        hint = f"\nPass config=, which gives {listing(open_sizes)}." * bool(open_sizes)
        raise MigrationError(f"{MIGRATION_FILE.head(path)}{error}{hint}") from None
    texts = [f"{n} = {size} ({stated[n][1]})" for n, size in used.items()]
    texts += [f"{key} = false" for key, is_true in flags.items() if not is_true]
    of_name = f"of the table {name!r}" if name else f"of {str(path)!r}" * bool(texts)
    migration.bases = (base,) if base else ()
    counted = (
        {} if config is None else stated_sizes(counts, config, measures_lists=True)
    )
    migration.counts = tuple(Count.of(*each, counted) for each in counts.items())
    if config is not None:
        unknown = {n: key for n, key in keys.items() if n not in {**stated, **sizes}}
        uncounted = {path: key for path, key in counts.items() if path not in counted}
        migration.unstated = tuple(
            _unstated(unknown, uncounted, config, is_own=not name)
        )
    migration.shared_sizes, migration.omitted = frozenset(keys), tuple(omitted)
    migration.origin = ", with ".join(filter(None, (of_name, ", ".join(texts))))
    return migration


def _unstated(
    sizes: Mapping[str, str | list[str]],
    counts: Mapping[str, str | list[str]],
    config: Config,
    *,
    is_own: bool,
) -> Iterator[str]:
    """Yield what is not compared with a configuration, because it lacks a key.

    Configurations leave sizes to defaults of their model, and the keys of published
    tables are those of real ones: of these it is said only if a key is near.

    Args:
        sizes: of ``[config]``: keys by name, of which nothing is stated.
        counts: the same of ``[counts]``, by path.
        config: the configuration.
        is_own: whether the table is not a published one.
    """
    absent = {("[counts]", n): it for n, it in absent_keys(counts, config).items()}
    absent |= {("[config]", n): it for n, it in absent_keys(sizes, config).items()}
    for (section, name), (text, near) in absent.items():
        if near or (is_own and section == "[counts]"):
            hint = f" Did you mean {near!r}?" * bool(near)
            of_what = f"which {section} has for {name!r:.200}"
            yield f"{text}, {of_what}, so that is not compared.{hint}"


def _with_own(table: FileTable, sizes: Mapping[str, int], rows: Any) -> FileTable:
    """Return a table with rows and sizes of the caller.

    Raises:
        MigrationError: the rows are not a table.
    """
    pairs = [*rows.items()] if isinstance(rows, Mapping) else rows or []
    parse_rows(pairs, sizes)  # which says what is wrong, before it is one of many
    return table.extended(FileTable([*pairs], {**sizes}, {}, {}, {}))


def _key(row: tuple[Any, Any]) -> str:
    """Return the key of a configuration that says whether a row is about a copy."""
    key = options_of(row).get("copy", "")
    return key if isinstance(key, str) else ""


def _with_flags(row: tuple[Any, Any], flags: Mapping[str, bool]) -> tuple[Any, Any]:
    """Return a row that no longer asks for what a configuration states."""
    if _key(row) not in flags:
        return row
    source, (target, options) = row
    return source, (target, {**options, "copy": True})
