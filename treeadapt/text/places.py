"""Places in a TOML or JSON file: how messages name them, and on which line they are.

Takes the text of a file that a parser has accepted. The parsers of Python's library say
no lines, so each statement of TOML is parsed by itself, and JSON value by value. Both
readers refuse a key that occurs twice, so a place is on one line.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

#: Keys, and numbers from 0 in lists, from the top level down.
Place: TypeAlias = tuple[str | int, ...]

# Strings and comments of TOML; what remains is keys, numbers and punctuation.
TOML_TEXT = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*+"{0,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*+'{0,5}"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|\#[^\n]*+",
    re.DOTALL,
)
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_JSON = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\n\r]*")
_MAX_DEPTH = 64  # of JSON; what is deeper has the line of what it is in
_IN_TEXT = "\f"  # stands for a line that ends within a string of TOML


def place_text(place: Place) -> str:
    """Write a place for messages.

    Example:
        >>> place_text(("optimizers", "no decay", 2, "b1"))
        'optimizers."no decay"[2].b1'
    """
    text = ""
    for key in place:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            is_bare = BARE_KEY.fullmatch(key)
            written = key if is_bare else json.dumps(key, ensure_ascii=False)
            text += "." * bool(text) + written
    return text


def line_of(lines: Mapping[Place, int], place: Place) -> int | None:
    """Return the line of a place, or of the nearest one around it; None for the whole.

    Args:
        lines: what ``toml_lines`` or ``json_lines`` returns.
        place: what is looked for; it need not exist, as an argument that is missing.
    """
    around = (place[:count] for count in range(len(place), 0, -1))
    return next((lines[each] for each in around if each in lines), None)


def toml_lines(text: str) -> dict[Place, int]:
    r"""Return the line, from 1, of each key of TOML and of each table of a list.

    What is within a value has the line on which this begins; of the entries of a list
    over several lines, each its own.

    Example:
        >>> lines = toml_lines('[[rows]]\nfrom = "a"\n[[rows]]\nfrom = [\n"b"]')
        >>> lines[("rows", 1)], lines[("rows", 1, "from")]
        (3, 4)
    """
    import tomllib  # here, as in ``data_files``

    lines: dict[Place, int] = {}
    sizes: dict[Place, int] = {}  # of lists of tables, so far
    table: Place = ()
    for number, statement, bare in _statements(text.replace("\r\n", "\n")):
        fields: Any = tomllib.loads(statement)
        if not bare.lstrip().startswith("["):
            _note(lines, table, fields, number, [*_entry_lines(bare, number)])
            continue
        table, head = (), fields
        while isinstance(head, dict) and head:
            ((key, head),) = head.items()
            table += (key,)
            if table in sizes and not isinstance(head, list):
                table += (sizes[table] - 1,)
        if isinstance(head, list):
            sizes[table] = sizes.get(table, 0) + 1
            lines.setdefault(table, number)
            table += (sizes[table] - 1,)
        for count in range(1, len(table) + 1):
            lines.setdefault(table[:count], number)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the statements of TOML: first line, text, and text without strings."""
    bare = TOML_TEXT.sub(_without_text, text)
    lines = text.split("\n")
    start = depth = 0
    pieces: list[str] = []
    for piece in bare.split("\n"):
        pieces.append(piece)
        depth += sum(map(piece.count, "[{")) - sum(map(piece.count, "]}"))
        if depth == 0:
            whole = "\n".join(pieces)
            end = start + 1 + whole.count("\n") + whole.count(_IN_TEXT)
            yield start + 1, "\n".join(lines[start:end]), whole
            start, pieces = end, []


def _without_text(found: re.Match[str]) -> str:
    is_comment = found[0].startswith("#")
    return "" if is_comment else '"' + _IN_TEXT * found[0].count("\n")


def _entry_lines(bare: str, line: int) -> Iterator[int]:
    """Yield the lines on which the entries begin if the value of a statement is a list.

    Args:
        bare: the statement, without strings and comments.
        line: on which it begins.
    """
    value = bare.partition("=")[2].lstrip()
    depth, is_new = 0, False
    for char in value if value.startswith("[") else "":
        if char in "\n" + _IN_TEXT:
            line += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 1:
            is_new = True
        elif not char.isspace():
            if is_new:
                yield line
                is_new = False
            if char in "[{":
                depth += 1
                is_new = depth == 1


def _note(
    lines: dict[Place, int], place: Place, value: Any, line: int, entries: Sequence[int]
) -> None:
    """Note the line of what is in a value of TOML.

    Args:
        lines: by place; it grows.
        place: of the value.
        value: as parsed.
        line: on which it begins.
        entries: lines on which entries begin, if it is a list.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            lines.setdefault((*place, key), line)
            _note(lines, (*place, key), each, line, entries)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            if isinstance(each, dict | list):
                own = entries[number] if number < len(entries) else line
                lines[(*place, number)] = own
                _note(lines, (*place, number), each, own, ())


def json_lines(text: str) -> dict[Place, int]:
    r"""Return the line, from 1, of each key of JSON and of each entry of a list.

    Example:
        >>> json_lines('{"rules": {\n"a": "b"}}')
        {('rules',): 1, ('rules', 'a'): 2}
    """
    ends = [found.start() for found in re.finditer("\n", text)]
    lines: dict[Place, int] = {}

    def read(at: int, place: Place) -> int:
        """Note what is in the value that begins at a character; return its end."""
        is_table = text[at] == "{"
        if text[at] not in "{[" or len(place) > _MAX_DEPTH:
            return _JSON.raw_decode(text, at)[1]
        number = 0
        at = _after_blank(text, at + 1)
        while text[at] not in "}]":
            key: str | int = number
            line = bisect.bisect_left(ends, at) + 1
            if is_table:
                key, at = _JSON.raw_decode(text, at)
                at = _after_blank(text, _after_blank(text, at) + 1)  # of the colon
            lines[(*place, key)] = line
            at = _after_blank(text, read(at, (*place, key)))
            if text[at] == ",":
                at = _after_blank(text, at + 1)
            number += 1
        return at + 1

    read(_after_blank(text, 0), ())
    return lines


def _after_blank(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return at if blank is None else blank.end()
