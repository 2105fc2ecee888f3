"""Rules files: tables of patterns as TOML or JSON text, read as data and no more.

Takes what ``data_files`` reads, gives plain strings, numbers and bools; or writes them.
A file may come from anyone: counts are capped before work, regular expressions are
refused unless they are allowed, and every failure is a ``RulesFileError``. See
``rules`` and ``freeze_spec`` for what the patterns do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from treeadapt.data_files import MAX_INTEGER, VERSION, DataFile, one_line
from treeadapt.errors import PatternError, RulesFileError
from treeadapt.names import listing
from treeadapt.patterns import REGEX_PREFIX, parse, weight

MAX_PATTERNS = 10_000
MAX_PATHS = 200_000
MAX_WEIGHT = 200_000  # of all patterns together; see ``patterns.weight``
Label: TypeAlias = str | int | float | bool

RULES_FILE = DataFile("rules", RulesFileError, "[rules]", '"**/bias" = "no_decay"')


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
        RULES_FILE.refuse(path, "it has no table of rules", cure)
    check_patterns(path, list(table), allow_regex=allow_regex)
    for place, (pattern, label) in enumerate(table.items(), 1):
        if isinstance(label, dict):
            RULES_FILE.refuse(
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
    if isinstance(label, int) and -MAX_INTEGER <= label < MAX_INTEGER:
        return
    RULES_FILE.refuse(
        path,
        f"the label of {place} is {one_line(repr(label))}",
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
        RULES_FILE.refuse(
            path, f"it has {len(patterns):,} patterns", f"At most {MAX_PATTERNS:,}."
        )
    total = 0
    for pattern in patterns:
        if not isinstance(pattern, str):
            RULES_FILE.refuse(
                path,
                f"{one_line(repr(pattern))} is not a pattern",
                "Put it in quotes.",
            )
        total += weight(pattern)
        if total > MAX_WEIGHT:
            RULES_FILE.refuse(
                path,
                f"its patterns have more than {MAX_WEIGHT:,} segments and characters "
                f"of segments with wildcards, up to {listing([pattern])}",
                "Split the file, or write shorter patterns.",
            )
        body = pattern.removeprefix("!")
        if body.startswith(REGEX_PREFIX) and not allow_regex:
            RULES_FILE.refuse(
                path,
                f"{listing([pattern])} is a regular expression, which a hostile file "
                "could use to stall the program",
                "Write a glob, or pass allow_regex=True for a file that you trust.",
            )
        try:
            parse(body)
        except PatternError as error:
            raise PatternError(f"Rules file {str(path)!r}: {error}") from None


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
    lines = [f"version = {VERSION}", *RULES_FILE.field_lines(fields)]
    if rules:
        lines += ["", RULES_FILE.table]
    for pattern, label in (rules or {}).items():
        if isinstance(label, list | tuple):
            raise RulesFileError(
                f"A rules file cannot hold the label of {listing([pattern])}, the "
                f"{type(label).__name__} {one_line(repr(label))}; a label is a "
                "string, a number or a bool."
            )
        lines.append(f"{RULES_FILE.string(pattern)} = {RULES_FILE.value(label)}")
    return "\n".join(lines) + "\n"
