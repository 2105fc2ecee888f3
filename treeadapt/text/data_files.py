"""Data files: TOML and JSON documents from anyone, read as data and no more.

Takes a file name, gives nested dicts, lists and plain values; writes values as TOML. A
file's size and nesting are capped before work, keys that occur twice, unknown fields
and other versions are refused, and nothing is imported or run by name. What a field
means is up to the rooms that have such files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from treeadapt.errors import TreeAdaptError
from treeadapt.text.names import Speller, listing, shorten
from treeadapt.text.places import BARE_KEY, TOML_TEXT, Place, json_lines, toml_lines
from treeadapt.text.wording import offered, worded

VERSION = 1
MAX_BYTES = 4 * 2**20
MAX_INTEGER = 2**63
_PLAIN = (bool, int, float, str)  # in addition to tables and lists
_ENDINGS = (".toml", ".json")
_MAX_DOTS = 16  # in one key; the time that tomllib takes grows with the square
_MAX_ALL_DOTS = 100_000  # in all keys and numbers; each costs tomllib some microseconds

# Which field only one kind of file has, what that is, and what takes it.
_KINDS_OF_FILES = {
    "rows": ("a migration file", "ta.load_migration", "--migration"),
    "tables": ("a chain of migrations", "ta.load_migration", "--migration"),
    "optimizer": ("an optimizer file", "ta.load_optimizer", "--rules"),
    "optimizers": ("an optimizer file", "ta.load_optimizer", "--rules"),
    "rules": ("a rules file", "ta.load_rules", "--rules"),
    "freeze": ("the file of a FreezeSpec", "ta.FreezeSpec.load", ""),
    "leaves": ("a schema of a tree", "ta.load", "TREE"),
}
_TOML_END_OF_KEY = re.compile(r"[=,{}\[\]\n]")


def near_file(name: Path) -> str:
    """Return what a missing file may be called, as a hint, or ""."""
    with contextlib.suppress(OSError, ValueError):  # of a name that no file can have
        if name.exists():
            return ""
        files = [each for each in name.parent.iterdir() if each.suffix in _ENDINGS]
        if stem := Speller().best(name.stem, sorted(each.stem for each in files)):
            near = [str(each) for each in files if each.stem == stem]
            return f"Did you mean {listing(near)}?"
    return ""


def _as_option(path: str | os.PathLike[str], option: str) -> str:
    """Return how a command takes a file: the running one, or else ``show``."""
    if offered(option):
        return f"Pass it as {option}."
    name = listing([str(path)])
    if option.startswith("-"):
        name = f"TREE {option} {name}"
    return f"To see what it does: treeadapt show {name}"


def _by_config(path: str | os.PathLike[str], tables: list[str] | None) -> str:
    """Return how the configuration of a model is used.

    Args:
        path: of the configuration.
        tables: names of those that ship for it; None if that is not known here.
    """
    if tables == []:
        return "No table for it ships with treeadapt; treeadapt tables lists them."
    name = repr(tables[0]) if tables else "table"
    lists = "Tables are listed by treeadapt tables"
    if tables:
        lists = f"Tables for it are {listing(tables)}"
    cure = worded(
        f"Pass it as config=, as here: ta.load_migration({name}, config="
        f"{str(path)!r:.200}).",
        f"Name one, as --migration {tables[0] if tables else 'TABLE'}.",
    )
    return f"{lists}. {cure}"


def is_content(text: Any) -> bool:
    """Return whether a text is what is in a data file, in the place of its name."""
    return isinstance(text, str) and ("\n" in text or text.lstrip().startswith("{"))


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


# What a field may be; a text may stand for a list of one.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "anything": lambda value: True,
    "a table": lambda value: isinstance(value, dict),
    "a list of tables": lambda value: _is_list_of(dict, value),
    "a list of strings": lambda value: _is_list_of(str, value),
    "a table of lists of strings": lambda value: (
        isinstance(value, dict) and all(_is_list_of(str, x) for x in value.values())
    ),
    "a string, or a list of strings": lambda value: (
        isinstance(value, str) or (_is_list_of(str, value) and value != [])
    ),
}


@dataclasses.dataclass(frozen=True)
class FileField:
    """What a field of a table may be.

    Attributes:
        kind: in words, one of ``_KINDS``.
        example: how it is written.
        limit: of entries.
        is_required: whether it has to be there.
    """

    kind: str = "anything"
    example: str = ""
    limit: int | None = None
    is_required: bool = False


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A kind of file.

    Attributes:
        noun: ``"rules"`` for a rules file.
        error: what is raised about it.
        table: the head of its main table, for messages.
        line: a line below that head, whose quotes people forget.
        max_bytes: size of the largest file that is read.
        in_python: how Python writes what it holds, for messages.
        is_flat: whether one table of texts is all that it has. Its time and memory are
            then those of its lines; nested tables take many times more.
        tables_for: names the files that ship for the model of a configuration, which
            is taken for such a file now and then; None if none do.
        has_constants: whether its JSON may say Infinity and NaN, as Python writes them:
            transformers does in the ``config.json`` of Mamba 2.
    """

    noun: str
    error: type[TreeAdaptError]
    table: str
    line: str
    max_bytes: int = MAX_BYTES
    is_flat: bool = False
    in_python: str = ""
    tables_for: Callable[[dict[str, Any]], list[str]] | None = None
    has_constants: bool = False

    def read(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read a TOML or JSON file; its top level is a table with ``version = 1``.

        Args:
            path: file name; its ending, ``.toml`` or ``.json``, decides the form.

        Returns:
            The other top-level fields, as nested dicts, lists and plain values.

        Raises:
            TreeAdaptError: of the kind's class: the file cannot be read, is too large
                or malformed, a key occurs twice, or its version is another one.
        """
        document = self.parsed(path)
        return self.versioned(path, document)

    def parsed(self, path: str | os.PathLike[str]) -> Any:
        """Read a file as ``read`` does, whatever its top level and version are.

        Raises:
            TreeAdaptError: as for ``read``.
        """
        try:
            # One in a remote store has all the methods that are used here.
            name: Any = path if hasattr(path, "suffix") else Path(path)
        except TypeError as error:
            text = f"A {self.noun} file is named by a path: {error}."
            more = f" In Python write {self.in_python}." * bool(self.in_python)
            raise self.error(f"{text}{more}") from error
        parser = {".toml": self._toml, ".json": self._json}.get(name.suffix.lower())
        if parser is None and is_content(path):
            file = "file.json" if str(path).lstrip().startswith("{") else "file.toml"
            raise self.error(
                f"Expected the name of a {self.noun} file, got its content, "
                f"{listing([str(path)])}. Write it to a file, "
                f"pathlib.Path({file!r}).write_text(text), and pass that name."
            )
        if parser is None:
            seen = f"a {self.noun} file is TOML or JSON, by its ending"
            cure = f"Write it as TOML: version = 1, {self.table}, {self.line}."
            self.refuse(name, seen, near_file(name) or cure)
        text = self._text(name)
        try:
            return parser(text)
        except RecursionError:
            cure = f"Write version = 1, {self.table}, {self.line}."
            self.refuse(name, "it is nested too deep", cure)
        except ValueError as error:  # includes what both parsers raise
            quotes = f" Names and texts are quoted: {self.line}."
            cure = f"Correct it.{quotes if parser == self._toml else ''}"
            self.refuse(name, f"it is malformed: {one_line(error)}", cure)

    def lines(self, path: str | os.PathLike[str]) -> dict[Place, int]:
        """Return on which line of a file, which ``read`` accepts, each place is.

        Raises:
            TreeAdaptError: it cannot be read.
        """
        is_json = Path(path).suffix.lower() == ".json"
        return (json_lines if is_json else toml_lines)(self._text(Path(path)))

    def _json(self, text: str) -> Any:
        return parse_json(text, has_constants=self.has_constants)

    def _toml(self, text: str) -> Any:
        import tomllib  # here, because importing it takes longer than this library

        text = text.replace("\r\n", "\n")
        bare = TOML_TEXT.sub('"', text)
        dots = [part.count(".") for part in _TOML_END_OF_KEY.split(bare)]
        if max(dots) > _MAX_DOTS or sum(dots) > _MAX_ALL_DOTS:
            raise ValueError("keys have too many dots; put names in quotes")
        if self.is_flat and (bare.count("[") > 1 or {*"{."} & {*bare}):
            raise ValueError("a name or a text is not in quotes, or there is a table")
        document = tomllib.loads(text)
        if place := _place_of_date(document):
            raise ValueError(f"{place} is a date or a time; write a text in quotes")
        return document

    def _text(self, name: Path) -> str:
        try:
            with name.open("rb") as file:
                data = file.read(self.max_bytes + 1)
        except FileNotFoundError:
            cure = near_file(name) or "Check the name."
            self.refuse(name, "there is no such file", cure)
        except (OSError, ValueError) as error:
            reason = one_line(getattr(error, "strerror", None) or error)
            self.refuse(name, f"it cannot be read: {reason}", "Check the name.")
        if len(data) > self.max_bytes:
            seen = f"it is larger than {self.max_bytes:,} bytes"
            self.refuse(name, seen, "Split it.")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            cure = "Save it as UTF-8."
            self.refuse(name, f"it is not UTF-8: {one_line(error)}", cure)

    def versioned(self, name: str | os.PathLike[str], document: Any) -> dict[str, Any]:
        """Return the fields of a document but for its version, which is checked.

        Raises:
            TreeAdaptError: it is not a table, or of another version.
        """
        if not isinstance(document, dict):
            cure = 'Write {"version": 1, ...}.'
            self.refuse(name, "its top level is not a table", cure)
        fields = dict(document)
        version = fields.pop("version", None)
        if type(version) is not int or version != VERSION:
            seen = f"version {one_line(repr(version))}"
            seen = "no version" if version is None else seen
            cure = f"This release reads version = {VERSION}."
            if version is None and "model_type" in fields:
                seen = f"'model_type': {fields['model_type']!r:.80}: it is the "
                seen += "configuration of a published model"
                tables = self.tables_for and self.tables_for(fields)
                cure = _by_config(name, tables)
            self.refuse(name, f"it has {seen}", cure)
        return fields

    def check(
        self,
        path: str | os.PathLike[str],
        table: Mapping[str, Any],
        fields: Mapping[str, FileField],
        *,
        of: str = "it",
    ) -> None:
        """Raise unless a table has the fields that it may have, and these their form.

        Args:
            path: name of the file, for messages.
            table: a part of the document.
            fields: those that it may have.
            of: what the table is, for messages.

        Raises:
            TreeAdaptError: a field is unknown (the nearest known one is named), is
                missing, is of another kind, or has too many entries.
        """
        lacking = (
            name
            for name, field in fields.items()
            if field.is_required and name not in table
        )
        missing = next(lacking, None)
        other = (key for key in _KINDS_OF_FILES if key in table and key not in fields)
        if missing and (key := next(other, "")):
            what, call, option = _KINDS_OF_FILES[key]
            cure = f"Read it with {call}."
            if option:
                cure = worded(cure, _as_option(path, option))
            self.refuse(path, f"it is {what}, because it has {key!r}", cure)
        for name in table:
            if name not in fields:
                near = Speller().nearest(name, fields, count=1)
                hint = f"Did you mean {near[0]!r}?" if near else "Remove it."
                if missing and not near:  # it is another kind of file, or lacks a head
                    hint = f"There is no {missing!r}: write {fields[missing].example}."
                seen = f"{of} has an unknown field {listing([name])}; known are"
                self.refuse(path, f"{seen} {listing(fields)}", hint)
        whose = "" if of == "it" else f" of {of}"
        if missing:
            self.refuse(
                path, f"{of} has no {missing}", f"Write {fields[missing].example}."
            )
        for name, field in fields.items():
            if name not in table:
                continue
            if not _KINDS[field.kind](table[name]):
                seen = f"{name!r}{whose} is not {field.kind}"
                self.refuse(path, seen, f"Write {field.example}.")
            elif field.limit is not None and len(table[name]) > field.limit:
                seen = f"{name!r}{whose} has {len(table[name]):,} entries"
                self.refuse(path, seen, f"At most {field.limit:,}. Split it.")

    def refuse(self, path: str | os.PathLike[str], seen: str, cure: str) -> NoReturn:
        """Raise because of what is in a file.

        Raises:
            TreeAdaptError: always, of the kind's class.
        """
        raise self.error(f"{self.head(path)}{seen}. {cure}")

    def head(self, path: str | os.PathLike[str]) -> str:
        """Return what names a file in front of a message.

        Args:
            path: its name; "" where who catches the error says of what it is.
        """
        name = str(path)
        return f"{self.noun.capitalize()} file {name!r}: " if name else ""

    def field_lines(self, fields: Mapping[str, Any]) -> list[str]:
        """Write fields as TOML, a line each.

        Args:
            fields: strings, numbers, bools, and lists and dicts of them, by name.

        Raises:
            TreeAdaptError: a value cannot be written.
        """
        return [f"{self.key(name)} = {self.value(it)}" for name, it in fields.items()]

    def value(self, value: Any) -> str:
        """Write one value as TOML.

        Raises:
            TreeAdaptError: it cannot be written.
        """
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, list | tuple):
            short = f"[{', '.join(map(self.value, value))}]"
            if len(short) <= 72:
                return short
            lines = "".join(f"    {self.value(item)},\n" for item in value)
            return f"[\n{lines}]"
        if isinstance(value, Mapping):
            return f"{{ {', '.join(self.field_lines(value))} }}"
        is_small = not isinstance(value, int) or -MAX_INTEGER <= value < MAX_INTEGER
        if isinstance(value, int | float) and is_small and math.isfinite(value):
            return json.dumps(value)  # as TOML writes it, too
        raise self.error(
            f"A {self.noun} file holds strings, numbers and bools; it cannot hold the "
            f"{type(value).__name__} {one_line(repr(value))}."
        )

    def key(self, name: str) -> str:
        """Write a key as TOML, without quotes where it needs none.

        Raises:
            TreeAdaptError: it is not valid Unicode.
        """
        return name if BARE_KEY.fullmatch(name) else self.string(name)

    def string(self, text: str) -> str:
        """Write a string as TOML.

        Raises:
            TreeAdaptError: it is not valid Unicode.
        """
        text = str.__str__(text)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise self.error(f"{listing([text])} is not valid Unicode: write it again.")
        # A JSON string is a TOML string, but for the control character DEL.
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def one_line(thing: Any) -> str:
    """Write anything for a message: short, on one line, without control characters."""
    text = " ".join(str(thing)[:2_000].split())
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return shorten(text)


def _place_of_date(document: Any) -> str:
    """Return where a document has a value that JSON has no form of, or "".

    Dates and times of TOML are objects of Python, and as such true.
    """
    pending: list[tuple[str, Any]] = [("", document)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{place}.{key}", each) for key, each in value.items()]
        elif isinstance(value, list):
            pending += [(f"{place}[{n}]", each) for n, each in enumerate(value)]
        elif not isinstance(value, _PLAIN):
            return one_line(place.removeprefix("."))
    return ""


def parse_json(text: str, *, has_constants: bool = False) -> Any:
    """Read JSON in which no key occurs twice.

    Args:
        text: the whole of it.
        has_constants: whether it may say Infinity and NaN.

    Raises:
        ValueError: it is malformed.
    """
    constant = None if has_constants else _no_constant
    return json.loads(
        text, object_pairs_hook=_without_duplicates, parse_constant=constant
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {listing([key])} occurs twice")
        table[key] = value
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
