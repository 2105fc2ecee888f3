"""What to call next, if the names of a checkpoint are not those of a target.

Takes names, shapes and the ``config.json`` next to the weights; gives one sentence with
a call. Reads no array. Whether a checkpoint fits is up to ``deciding``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from treeadapt.checkpoints import safetensors_file, torch_file
from treeadapt.checkpoints.load_report import compare_with_target
from treeadapt.checkpoints.migrated import source_of
from treeadapt.checkpoints.record import SHAPES, TREE, Stored
from treeadapt.checkpoints.remote import AnyPath
from treeadapt.checkpoints.shard_index import ShardSet, index_that_lists
from treeadapt.errors import MigrationError
from treeadapt.migrations.loading import load_migration
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.tables.published import (
    CONFIG,
    is_name,
    names_for,
    published,
)
from treeadapt.migrations.templates import Template
from treeadapt.text.names import listing
from treeadapt.text.wording import worded
from treeadapt.trees.arrays import is_array

_OF_FOLDERS = (safetensors_file.INDEX, torch_file.INDEX)  # named by their folder


def next_call(
    stored: Stored, likes: Mapping[str, Any], random: Collection[str] = ()
) -> str:
    """Return a sentence with the call that leads what is stored to a target.

    Args:
        stored: what the checkpoint holds, under its own names.
        likes: leaves of the target by path.
        random: paths of the target's random state, which published weights lack.
    """
    if call := likely_call(stored, likes, random):
        return call
    return (
        f"ta.draft_migration({_name(stored)}, target) writes a table from these names "
        "to the target's. If both models run here, ta.match_models proves one."
    )


def likely_call(
    stored: Stored, likes: Mapping[str, Any], random: Collection[str] = ()
) -> str:
    """Return a sentence as ``next_call`` does, and nothing where no call is known.

    Args:
        stored: as for ``next_call``.
        likes: as for ``next_call``.
        random: as for ``next_call``.
    """
    name = _name(stored)
    wanted = {path: leaf.shape for path, leaf in likes.items() if is_array(leaf)}
    there = {path: leaf.array.shape for path, leaf in stored.table.items()}
    if parts := _parts_like(there, wanted):
        keys = parts[0].split("/")
        nested = "".join(f"{{{key!r}: " for key in keys) + "target" + "}" * len(keys)
        got = "".join(f"[{key!r}]" for key in keys)
        others = f" ({listing(parts[1:], limit=3)} too)" * (len(parts) > 1)
        return (
            f"All leaves of the target are below {parts[0]!r} in it{others}: "
            f"ta.load({name}, {nested}, where={parts[0]!r}){got}."
        )
    if parts := _parts_like(wanted, there):
        what = f"one part of the target, {parts[0]!r}"
        if len(parts) > 1:
            what = f"{len(parts)} parts of the target, {listing(parts, limit=3)}"
        return (
            f"It has the names of {what}: ta.load({name}, part), with that part alone."
        )
    if shipped := [*_shipped(stored, likes, {*random})]:
        calls = (f"ta.load({name}, target, {arguments})" for arguments in shipped)
        return f"A table that ships with treeadapt fits: {', or '.join(calls)}."
    return ""


def _name(stored: Stored) -> str:
    return "tree" if _is_tree(stored) else listing([str(stored.path)])


def config_of(stored: Stored) -> AnyPath | None:
    """Return the ``config.json`` next to a checkpoint; None without one."""
    path = stored.path
    file = (path if path.is_dir() else path.parent) / CONFIG
    return None if _is_tree(stored) or not file.is_file() else file


def _by_type(stored: Stored) -> list[str]:
    """Return the published tables for the model type that a configuration states."""
    config = config_of(stored)
    # Its errors would hide the one in whose message this is a hint.
    with contextlib.suppress(MigrationError):
        return [] if config is None else names_for(config)
    return []


def all_shards(stored: Stored) -> str:
    """Return a sentence with the call that loads all, if this is one of some shards."""
    if _is_tree(stored):
        return ""
    path = stored.path
    index, shards = index_that_lists(path)
    says, count, whole = "It is", len({*shards.values()}), path.parent
    if index is None and (by_name := ShardSet.of(path)):
        says, count = "By its name it is", int(by_name.count)
    elif index is not None and index.name not in _OF_FOLDERS:
        whole = index
    if count < 2:
        return ""
    name = listing([str(whole)])
    cure = worded(
        f"To load all of them: ta.load({name}, ...).", f"Name {name} instead."
    )
    return f"{says} one of {count} shards. {cure}"


def tables_that_take(
    stored: Stored, migration: Any, likes: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a sentence with the tables of a layout that take what is stored, if any.

    Where there is a target, it says whether these make its leaves.

    Args:
        stored: what the checkpoint holds, under its own names.
        migration: the name of the layout, or of a table of it that does not fit; there
            is no sentence for anything else.
        likes: leaves of the target by path; None without one.
    """
    layout = migration.partition("/")[0] if is_name(migration) else ""
    tables = published().get(layout, {}).values()
    fitting = [
        name
        for name in dict.fromkeys(table.name for table in tables)
        if name != migration and _takes_names(stored, name)
    ]
    if not fitting:
        return []
    # Models of several types have the same names, and mean other numbers by them.
    of_type = _by_type(stored)
    fitting = [name for name in fitting if name in of_type] or fitting
    calls = " or ".join(
        worded(f"migration={name!r}", f"--migration {name}") for name in fitting
    )
    if likes is not None and not any(_makes(stored, name, likes) for name in fitting):
        return [
            f"By the names in it, {calls} fits this checkpoint, but not this target, "
            "whose leaves have other names."
        ]
    more = f", or from ta.load_migration({fitting[0]!r}, config=..., sizes=...)"
    return [
        f"By the names in it, {calls} fits. Sizes that shapes leave open come from a "
        f"{CONFIG} in its folder{worded(more, '')}."
    ]


@functools.cache  # a file of the package, which one error may ask for twice
def _shipped_table(name: str) -> Migration:
    """Return a published table without a configuration."""
    return load_migration(name)


def _takes_names(stored: Stored, name: str) -> bool:
    """Return whether the rows of a published table take all names, and need no more."""
    try:  # without sizes a table may say nothing, and is not named
        table = _shipped_table(name)
        source = source_of(stored, table, None, cast=False)
    except MigrationError:
        return False
    if not source.problems.texts.keys() <= {"sizes"}:
        return False
    every = (address.path for row in table.rows for address in row.sources)
    return all(_uses_all_entries(path, stored.table) for path in every)


def _makes(stored: Stored, name: str, likes: Mapping[str, Any]) -> bool:
    """Return whether a published table makes a leaf of a target by its name."""
    source = source_of(stored, _shipped_table(name), None, cast=False)
    return not likes.keys().isdisjoint(source.stored.table)


def _uses_all_entries(path: Template, names: Iterable[str]) -> bool:
    """Return whether names have each entry of lists such as ``{p=gate,up,down}``.

    Names without any match are of an optional row, and an empty entry is optional.
    """
    matches = [match for match in map(path.match, names) if match is not None]
    lists = (each for each in path.captures if each.entries and "" not in each.entries)
    return not matches or all(
        len({match[each.key] for match in matches}) == len(each.entries)
        for each in lists
    )


def _is_tree(stored: Stored) -> bool:
    return stored.format in (TREE, SHAPES)


def _parts_like(
    whole: Mapping[str, tuple[int, ...]], part: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return the paths below which one tree holds another, shortest first.

    Shapes tell apart parts with the same names; the only part of these names is meant
    in any case.

    Args:
        whole: shapes by path.
        part: the same.
    """
    first = next(iter(part), "")
    if "" in part or not first:
        return []
    ending = f"/{first}"
    above = [path.removesuffix(ending) for path in whole if path.endswith(ending)]
    named = [p for p in above if all(f"{p}/{path}" in whole for path in part)]
    fitting = [
        p for p in named if all(whole[f"{p}/{x}"] == shape for x, shape in part.items())
    ]
    alike = fitting or (named if len(named) == 1 else [])
    return sorted(alike, key=lambda path: (path.count("/"), path != "params", path))


def _shipped(
    stored: Stored, likes: Mapping[str, Any], random: Collection[str]
) -> Iterator[str]:
    """Yield arguments of ``load`` for published tables that fit type, names, shapes."""
    config = config_of(stored)
    for name in _by_type(stored):
        try:
            table = load_migration(name, config=config)
            source = source_of(stored, table, likes, cast=True)
        except MigrationError:
            continue
        if source.problems.texts:
            continue
        report = compare_with_target(
            likes, [True] * len(likes), source.stored, (), None, cast=False
        )
        lacking = {*report.missing} - {*random} - source.kept
        is_whole = source.stored.table.keys() <= likes.keys()
        if is_whole and not lacking and not report.misshaped:
            yield f"migration={name!r}{', cast=True' * bool(report.retyped)}"
