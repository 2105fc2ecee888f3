"""Rules files: tables of patterns as TOML or JSON text, read as data and no more.

Takes a file or Python values, gives plain strings, numbers and bools, or text. A file
may come from anyone: its size and counts are capped before work, keys that occur twice,
unknown fields and versions are refused, regular expressions too unless they are
allowed, nothing is imported or run by name, and every failure is a ``RulesFileError``.
See ``rules`` and ``freeze_spec`` for what the patterns do.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from treeadapt.errors import PatternError, RulesFileError
from treeadapt.names import listing, plural, shorten
from treeadapt.patterns import REGEX_PREFIX, parse, weight

VERSION = 1
MAX_BYTES = 4 * 2**20
MAX_PATTERNS = 10_000
MAX_PATHS = 200_000
MAX_WEIGHT = 200_000  # of all patterns together; see ``patterns.weight``
_MAX_INTEGER = 2**63
_MAX_DOTS = 16  # in one key; the time that tomllib takes grows with the square

Label: TypeAlias = str | int | float | bool

# Strings and comments of TOML; what remains is keys, numbers and punctuation.
_TOML_TEXT = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*+"{0,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*+'{0,5}"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|\#[^\n]*+",
    re.DOTALL,
)
_TOML_END_OF_KEY = re.compile(r"[=,{}\[\]\n]")


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML or JSON file; its top level is a table with ``version = 1``.

    Args:
        path: file name; its ending, ``.toml`` or ``.json``, decides the form.

    Returns:
        The other top-level fields, as nested dicts, lists and plain values.

    Raises:
        RulesFileError: the file cannot be read, is too large or malformed, a key
            occurs twice, or its version is another one.
    """
    try:
        name = Path(path)
    except TypeError as error:
        raise RulesFileError(f"A rules file is named by a path: {error}.") from error
    parsers: dict[str, Callable[[str], Any]] = {".toml": _toml, ".json": _json}
    parser = parsers.get(name.suffix.lower())
    if parser is None:
        cure = 'Write it as TOML: version = 1, [rules], "**/bias" = "no_decay".'
        _refuse(name, "a rules file is TOML or JSON, by its ending", cure)
    text = _text(name)
    try:
        document = parser(text)
    except RecursionError:
        _refuse(name, "it is nested too deep", "A rules file has two levels.")
    except ValueError as error:  # includes what both parsers raise
        quotes = ' Patterns and labels are quoted: "**/bias" = "no_decay".'
        cure = f"Correct it.{quotes if parser is _toml else ''}"
        _refuse(name, f"it is malformed: {_one_line(error)}", cure)
    return _versioned(name, document)


def check_fields(
    path: str | os.PathLike[str], document: Mapping[str, Any], known: Sequence[str]
) -> None:
    """Raise if a document has other fields than those known.

    Raises:
        RulesFileError: it names the unknown field and the nearest known one.
    """
    for field in document:
        if field not in known:
            near = difflib.get_close_matches(field[:100], known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Remove it."
            fields = listing(("version", *known))
            _refuse(
                path,
                f"it has an unknown field {listing([field])}; known are {fields}",
                hint,
            )


def parse_rules(
    path: str | os.PathLike[str], table: Any, *, allow_regex: bool
) -> list[tuple[str, Label]]:
    """Read the ordered rules of a document.

    Args:
        path: where it comes from, for messages.
        table: ``{pattern: label}``.
        allow_regex: accept ``re:`` patterns.

    Returns:
        Pairs of a pattern and a label, in the file's order.

    Raises:
        RulesFileError: the table is malformed.
        PatternError: a pattern is malformed.
    """
    if not isinstance(table, Mapping):
        cure = 'Write one:\n[rules]\n"**/bias" = "no_decay"'
        _refuse(path, "it has no table of rules", cure)
    check_patterns(path, list(table), allow_regex=allow_regex)
    for place, (pattern, label) in enumerate(table.items(), 1):
        if isinstance(label, dict):
            _refuse(
                path,
                f"the label of rule {place}, {listing([pattern])}, is a table",
                'Put the pattern in quotes: "policy/hidden_0" = "frozen".',
            )
        check_label(path, label, f"rule {place}, {listing([pattern])},")
    return list(table.items())


def check_label(path: str | os.PathLike[str], label: Any, place: str) -> None:
    """Raise unless ``label`` is a string, a bool or an ordinary number.

    Raises:
        RulesFileError: it names the rule.
    """
    if isinstance(label, float) and math.isfinite(label):
        return
    if isinstance(label, str | bool):
        return
    if isinstance(label, int) and -_MAX_INTEGER <= label < _MAX_INTEGER:
        return
    _refuse(
        path,
        f"the label of {place} is {_one_line(repr(label))}",
        "A label is a string, a number or a bool.",
    )


def check_patterns(
    path: str | os.PathLike[str], patterns: Sequence[Any], *, allow_regex: bool
) -> None:
    """Raise unless all are well-formed patterns of the kinds allowed.

    Raises:
        RulesFileError: too many, not strings, or ``re:`` where it is not allowed.
        PatternError: a pattern is malformed.
    """
    if len(patterns) > MAX_PATTERNS:
        _refuse(
            path, f"it has {len(patterns):,} patterns", f"At most {MAX_PATTERNS:,}."
        )
    total = 0
    for pattern in patterns:
        if not isinstance(pattern, str):
            _refuse(
                path,
                f"{_one_line(repr(pattern))} is not a pattern",
                "Put it in quotes.",
            )
        total += weight(pattern)
        if total > MAX_WEIGHT:
            _refuse(
                path,
                f"its patterns have more than {MAX_WEIGHT:,} segments and characters "
                f"of segments with wildcards, up to {listing([pattern])}",
                "Split the file, or write shorter patterns.",
            )
        body = pattern.removeprefix("!")
        if body.startswith(REGEX_PREFIX) and not allow_regex:
            _refuse(
                path,
                f"{listing([pattern])} is a regular expression, which a hostile file "
                "could use to stall the program",
                "Write a glob, or pass allow_regex=True for a file that you trust.",
            )
        try:
            parse(body)
        except PatternError as error:
            raise PatternError(f"Rules file {str(path)!r}: {error}") from None


def check_strings(
    path: str | os.PathLike[str], field: str, value: Any, limit: int
) -> list[str]:
    """Return a list of strings, at most ``limit`` of them.

    Raises:
        RulesFileError: it is something else.
    """
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        cure = f'Write {field} = ["...", "..."].'
        _refuse(path, f"{field!r} is not a list of strings", cure)
    if len(value) > limit:
        _refuse(
            path, f"{field} has {plural(len(value), 'entry')}", f"At most {limit:,}."
        )
    return value


def write_toml(
    fields: Mapping[str, Any], rules: Mapping[str, Label] | None = None
) -> str:
    """Write a document as TOML, ``version`` first and rules last.

    Args:
        fields: strings, numbers, bools and lists of strings by field name.
        rules: labels by pattern, in order.

    Raises:
        RulesFileError: a value cannot be written.

    Example:
        >>> print(write_toml({"default": "train"}, {"policy/**": "frozen"}), end="")
        version = 1
        default = "train"
        <BLANKLINE>
        [rules]
        "policy/**" = "frozen"
    """
    lines = [f"version = {VERSION}"]
    lines += [f"{name} = {_value(value)}" for name, value in fields.items()]
    if rules:
        lines += ["", "[rules]"]
    for pattern, label in (rules or {}).items():
        if isinstance(label, list | tuple):
            raise RulesFileError(
                f"A rules file cannot hold the label of {listing([pattern])}, the "
                f"{type(label).__name__} {_one_line(repr(label))}; a label is a "
                "string, a number or a bool."
            )
        lines.append(f"{_string(pattern)} = {_value(label)}")
    return "\n".join(lines) + "\n"


def _text(name: Path) -> str:
    try:
        with name.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RulesFileError(
            f"Rules file {str(name)!r} cannot be read: {_one_line(error)}."
        ) from error
    if len(data) > MAX_BYTES:
        _refuse(name, f"it is larger than {MAX_BYTES:,} bytes", "Split it.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse(name, f"it is not UTF-8: {_one_line(error)}", "Save it as UTF-8.")


def _toml(text: str) -> Any:
    import tomllib  # here, because importing it takes longer than all of this library

    text = text.replace("\r\n", "\n")
    bare = _TOML_TEXT.sub('"', text)
    if any(part.count(".") > _MAX_DOTS for part in _TOML_END_OF_KEY.split(bare)):
        raise ValueError("a key has too many dots; put patterns in quotes")
    return tomllib.loads(text)


def _json(text: str) -> Any:
    return json.loads(
        text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant
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


def _versioned(name: Path, document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        cure = 'Write {"version": 1, "rules": {...}}.'
        _refuse(name, "its top level is not a table", cure)
    fields = dict(document)
    version = fields.pop("version", None)
    if type(version) is not int or version != VERSION:
        seen = (
            "no version" if version is None else f"version {_one_line(repr(version))}"
        )
        _refuse(name, f"it has {seen}", f"This release reads version = {VERSION}.")
    return fields


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        short = f"[{', '.join(map(_value, value))}]"
        if len(short) <= 72:
            return short
        return "[\n" + "".join(f"    {_value(item)},\n" for item in value) + "]"
    if isinstance(value, int) and -_MAX_INTEGER <= value < _MAX_INTEGER:
        return repr(int(value))
    if isinstance(value, float) and math.isfinite(value):
        return repr(float(value))
    raise RulesFileError(
        f"A rules file holds strings, numbers and bools; it cannot hold the "
        f"{type(value).__name__} {_one_line(repr(value))}."
    )


def _string(text: str) -> str:
    text = str.__str__(text)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise RulesFileError(f"{listing([text])} is not valid Unicode: write it again.")
    # A JSON string is a TOML string, but for the control character DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _refuse(path: str | os.PathLike[str], seen: str, cure: str) -> NoReturn:
    raise RulesFileError(f"Rules file {str(path)!r}: {seen}. {cure}")


def _one_line(thing: Any) -> str:
    text = " ".join(str(thing)[:2_000].split())
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return shorten(text)
