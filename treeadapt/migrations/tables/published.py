"""Published tables: which migration file has the layout of a library for a model type.

Takes the name of a layout (``tunix``) or of a table (``tunix/qwen3``), and what the
``config.json`` next to published weights says; gives a file, and sizes. A table is a
migration file in the folder of its layout, from the names of the Hugging Face hub to
those of the library's own params. A model type that no table has is an error with what
is near it, never the nearest one. What a row means is up to ``migrations``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from treeadapt.errors import MigrationError
from treeadapt.text.data_files import MAX_INTEGER, DataFile, is_content, near_file
from treeadapt.text.names import Speller, listing
from treeadapt.text.wording import worded

CONFIG = "config.json"

#: A folder with a ``config.json``, that file, or what it holds.
Config: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]

_ALIKE = 0.8  # num_key_value_heads is not a typo of num_attention_heads (0.63)
_SIGNS = re.compile(r" [+/] ")

_TABLE = DataFile("migration", MigrationError, "[[rows]]", 'from = "a : i o"')
_CONFIG = DataFile(
    *("configuration", MigrationError, "{}", '"model_type": "llama"'),
    has_constants=True,
)


class PublishedTable(NamedTuple):
    """A published table.

    Attributes:
        name: layout and model type.
        file: that has its rows.
        oracle: the library and version that it was compared with.
        model_types: of the configurations that it is for.
    """

    name: str
    file: Any
    oracle: str
    model_types: tuple[str, ...]

    @property
    def fields(self) -> dict[str, Any]:
        """What its file has."""
        return _TABLE.read(self.file)

    @property
    def sha256(self) -> str:
        """The hash of its file, which a table that begins with it may state."""
        text = self.file.read_bytes().replace(b"\r\n", b"\n")
        return hashlib.sha256(text).hexdigest()

    @property
    def compared_on(self) -> str:
        """The day on which it was last compared with its library; empty if unknown.

        It is not in the file of the table, whose hash others may state.
        """
        return str(_compared()["days"].get(self.name, ""))

    @property
    def answers_apart(self) -> str:
        """How far answers of its library's model were from those of PyTorch's.

        The largest difference, relative to the largest number in the answers of models
        with random weights, and which settings were not those of the configurations;
        empty where both were not called.
        """
        return str(_compared()["answers"].get(self.name, ""))

    @property
    def not_called(self) -> str:
        """Why answers of its library's model were not compared; empty if they were."""
        return str(_compared()["reasons"].get(self.name, ""))


def _compared() -> dict[str, Any]:
    """Return what the last comparisons of tables with their libraries gave."""
    file: Any = resources.files(__package__) / "compared.toml"
    return _TABLE.read(file)


@functools.cache
def published() -> Mapping[str, Mapping[str, PublishedTable]]:
    """Return all tables, by layout and then by model type."""
    layouts: dict[str, dict[str, PublishedTable]] = {}
    by_name = operator.attrgetter("name")
    for folder in sorted(resources.files(__package__).iterdir(), key=by_name):
        is_layout = folder.is_dir() and not folder.name.startswith("_")
        for file in sorted(folder.iterdir(), key=by_name) if is_layout else ():
            path: Any = file  # or a part of a package that is a zip file
            fields, stem = _TABLE.read(path), file.name.removesuffix(".toml")
            types = tuple(fields.get("model_types", [stem]))
            name, oracle = f"{folder.name}/{stem}", fields.get("oracle", "")
            tables = layouts.setdefault(folder.name, {})
            tables |= dict.fromkeys(types, PublishedTable(name, file, oracle, types))
    return layouts


def is_name(text: Any) -> TypeGuard[str]:
    """Return whether a text names a layout or a table, and not a file."""
    if not isinstance(text, str) or text.endswith((".toml", ".json")):
        return False
    if is_content(text):  # which reading it as a file says
        return False
    return not (os.path.isabs(text) or text.startswith(".") or "\\" in text)


def tables_of(name: str) -> Mapping[str, PublishedTable]:
    """Return the tables of a layout, by model type.

    Args:
        name: of the layout, or of a table of it.

    Raises:
        MigrationError: there is no such layout.
    """
    layout, layouts = name.partition("/")[0], published()
    if layout not in layouts:
        types = dict.fromkeys(itertools.chain(*layouts.values()))
        near = Speller().nearest(layout, [*layouts, *types], count=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        if os.path.exists(name):  # of any text, where a path may raise
            hint = f"{not_a_table(name)} "
        elif near and (typed := tables_named(near[0])) and near[0] in types:
            which = "It" if near[0] == layout else f"Near it, {near[0]!r}"
            hint = f"{which} is a model type; tables of it are {listing(typed)}. "
        raise MigrationError(
            f"There is no layout {listing([layout])}. {hint}Layouts are "
            f"{listing(layouts, limit=99)}; the name of a file ends in .toml or .json. "
            f"{near_file(Path(name))}".rstrip()
        )
    return layouts[layout]


def tables_named(text: str) -> list[str]:
    """Return the tables of a layout, of a model type, or the one of this name.

    Example:
        >>> tables_named("pi05"), tables_named("tunix/qwen3"), tables_named("policy")
        (['openpi/pi05'], ['tunix/qwen3'], [])
    """
    layout, _, model_type = text.partition("/")
    return [
        *dict.fromkeys(
            table.name
            for each, types in published().items()
            for of_type, table in types.items()
            if text in (each, of_type) or (each, of_type) == (layout, model_type)
        )
    ]


def not_a_table(path: str | os.PathLike[str]) -> str:
    """Say of a file or folder, such as a checkpoint, how tables go with it."""
    name, folder = listing([os.fspath(path)]), Path(path)
    cure = worded(
        f"loads by one: ta.load({name}, target, migration=table)",
        "is read by one: it comes first, and the table after --migration",
    )
    tables: list[str] = []
    with contextlib.suppress(MigrationError):
        if (folder / CONFIG).is_file():
            tables = names_for(folder)
    more = f" Tables for its {CONFIG} are {listing(tables)}." if tables else ""
    return f"What is there is not a table. If it is a checkpoint, it {cure}.{more}"


def find(name: str, config: Config | None = None) -> PublishedTable:
    """Return the table that a name means.

    Args:
        name: of a layout, or ``layout/model_type``.
        config: has the model type, where the name does not.

    Raises:
        MigrationError: there is no such layout or no table of the model type, or the
            type is not known.
    """
    layout, _, model_type = name.partition("/")
    tables = tables_of(name)
    if not model_type:
        cure = f"Name the table, as '{layout}/<model_type>'"
        if config is None:
            raise MigrationError(
                f"The layout {layout!r} has {len({*tables.values()})} tables, and "
                f"which is meant depends on the model type. {cure}, or pass config=, "
                f"a folder with {CONFIG}."
            )
        where, fields = _read(config, f" {cure}.")
        stated = fields.get("model_type")
        if not isinstance(stated, str) or not stated:
            seen = f"{stated!r:.80} as" if "model_type" in fields else "no"
            raise MigrationError(f"{where} has {seen} 'model_type'. {cure}.")
        model_type = stated
    if table := tables.get(model_type):
        return table
    near = Speller().nearest(model_type, [*tables])
    others = [each for each, types in published().items() if model_type in types]
    lists = {"Near it": near, "The layouts that have it": others, "It has": [*tables]}
    texts = (f"{key}: {listing(it, limit=99)}. " for key, it in lists.items() if it)
    raise MigrationError(
        f"The layout {layout!r} has no table of the model type "
        f"{listing([model_type])}. {''.join(texts)}"
        "If one of these fits all the same, name it outright."
    )


def names_for(config: Config) -> list[str]:
    """Return the names of the tables for the model type of a configuration.

    Raises:
        MigrationError: it cannot be read.
    """
    _, fields = _read(config)
    stated = str(fields.get("model_type"))
    layouts = (tables.get(stated) for tables in published().values())
    return [table.name for table in layouts if table is not None]


def stated_sizes(
    keys_by_name: Mapping[str, str | list[str]],
    config: Config,
    *,
    measures_lists: bool = False,
) -> dict[str, tuple[int, str]]:
    """Return the sizes that a configuration states, and the key of each.

    Args:
        keys_by_name: of ``[config]`` in a table: for the name of a size a key, with
            dots between those of nested ones, or ``"key / key"``, ``"key + key"``, or
            several of these, of which the first counts that is there and not null. A
            number in a key is a place in a list.
        config: the configuration.
        measures_lists: whether a list stands for how many entries it has.

    Raises:
        MigrationError: it cannot be read, or a value is not a size.
    """
    sizes: dict[str, tuple[int, str]] = {}
    where, fields = _read(config) if keys_by_name else ("", {})
    for name, keys in keys_by_name.items():
        for key in [keys] if isinstance(keys, str) else keys:
            sign = " + " if " + " in key else " / "
            values = [_value(fields, part) for part in key.split(sign)]
            if measures_lists and any(isinstance(it, list) for it in values):
                values = [len(it) if isinstance(it, list) else it for it in values]
                key = f"len({key})"
            if None in values:
                continue
            whole, *others = values
            are_sizes = all(type(n) is int and 0 < n < MAX_INTEGER for n in values)
            if not are_sizes or (sign == " / " and whole % math.prod(others)):
                seen = sign.join(f"{value!r:.80}" for value in values)
                raise MigrationError(
                    f"{where} has {key!r}: {seen}, which is the size {name!r} "
                    "of the table. It is an integer above 0."
                )
            size = sum(values) if sign == " + " else whole // math.prod(others)
            sizes[name] = size, key
            break
    return sizes


def absent_keys(
    keys_by_name: Mapping[str, str | list[str]], config: Config
) -> dict[str, tuple[str, str]]:
    """Return, of names of which a configuration states nothing, which keys it lacks.

    Args:
        keys_by_name: as for ``stated_sizes``.
        config: the configuration.

    Returns:
        By name, a text that says so, and the nearest key that is there; empty if none
        is near.

    Raises:
        MigrationError: it cannot be read.
    """
    where, fields = _read(config) if keys_by_name else ("", {})
    absent: dict[str, tuple[str, str]] = {}
    for name, keys in keys_by_name.items():
        several = [keys] if isinstance(keys, str) else keys
        parts = itertools.chain(*(_SIGNS.split(key) for key in several))
        lacking = [part for part in parts if _value(fields, part) is None]
        nearest = next(filter(None, (_near_key(fields, key) for key in lacking)), "")
        absent[name] = f"{where} has no {listing(lacking, limit=2)}", nearest
    return absent


def _near_key(fields: Mapping[str, Any], key: str) -> str:
    """Return the key of a number or a list, next to an absent one, that is like it."""
    above, dot, last = key.rpartition(".")
    node = _value(fields, above) if dot else fields
    entries = node.items() if isinstance(node, Mapping) else ()
    names = (name for name, value in entries if isinstance(value, int | list))
    near = Speller().best(last, names, cutoff=_ALIKE)
    return f"{above}{dot}{near}" if near else ""


def stated_flags(keys: Iterable[str], config: Config) -> dict[str, bool]:
    """Return what a configuration says is true or false, by key.

    Args:
        keys: with dots between those of nested ones.
        config: the configuration.

    Raises:
        MigrationError: it cannot be read.
    """
    names = [*dict.fromkeys(keys)]
    fields = _read(config)[1] if names else {}
    flags = {name: _value(fields, name) for name in names}
    return {name: flag for name, flag in flags.items() if isinstance(flag, bool)}


def _value(fields: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(fields, list) and part.isdecimal():
            fields = dict(enumerate(fields)).get(int(part))
        else:
            fields = fields.get(part) if isinstance(fields, Mapping) else None
    return fields


def _read(config: Config, cure: str = "") -> tuple[str, Mapping[str, Any]]:
    """Return what messages call a configuration, and what it holds."""
    if isinstance(config, Mapping):
        return "The configuration", config
    is_path = hasattr(config, "suffix")  # one of a remote store is not a PathLike
    if not is_path and not isinstance(config, str | os.PathLike):
        raise MigrationError(
            f"Expected as config= a folder, a {CONFIG}, or what it holds; got "
            f"{type(config).__name__}. A configuration of transformers has .to_dict()."
        )
    if config == "":  # an unset variable of a shell
        raise MigrationError(
            f"config='' names no folder. Pass one with a {CONFIG}; the current one is "
            "'.'."
        )
    path: Any = config if is_path else Path(config)
    file = path if path.suffix == ".json" else path / CONFIG
    where = f"The configuration {listing([str(file)])}"
    try:
        fields = _CONFIG.parsed(file)
    except MigrationError as error:
        raise MigrationError(f"{error}{cure}") from None
    if not isinstance(fields, Mapping):
        raise MigrationError(f"{where} is not a table.{cure}")
    return where, fields
