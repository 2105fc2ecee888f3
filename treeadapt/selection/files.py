"""Rules files: tables of patterns as TOML or JSON text, read as data and no more.

Takes what ``data_files`` reads, gives strings, numbers, bools and, for lists, specs of
partitions, for tables what ``shard_largest`` gives; or writes them.
A file may come from anyone: counts are capped before work, regular expressions are
refused unless they are allowed, and every failure is a ``RulesFileError``. See
``rules`` and ``freeze_spec`` for what the patterns do.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from treeadapt.errors import PatternError, RulesFileError, ShardingError
from treeadapt.patterns.glob import REGEX_PREFIX, parse
from treeadapt.selection.largest_axis import ShardLargest, shard_largest
from treeadapt.text.data_files import (
    MAX_INTEGER,
    VERSION,
    DataFile,
    FileField,
    one_line,
)
from treeadapt.text.names import listing
from treeadapt.text.wording import worded

MAX_PATTERNS = 10_000
MAX_PATHS = 200_000
MAX_WEIGHT = 200_000  # of all patterns together; see ``patterns.Pattern``
MAX_STACKS = 256
MAX_AXES = 64  # of an array, and of a mesh
OPTIONS = ("default", "unused", "overlap", "stacks", "expect")
Label: TypeAlias = str | int | float | bool | PartitionSpec | ShardLargest

_LABELS = (
    'A label is a string, a number, a bool, or for a PartitionSpec a list: ["data", '
    '""] shards the first of two axes, ["data", "..."] the first of any. '
    '{ shard_largest = "data" } shards the largest.'
)

_LARGEST = "shard_largest"
_REST = "..."  # all axes that a spec does not name
FIELDS = {
    "rules": FileField(
        "a table", '[rules] above "**/bias" = "no_decay"', is_required=True
    ),
    **dict.fromkeys(("default", "unused", "overlap"), FileField()),
    "stacks": FileField("a table", '[stacks] above "blocks" = 0', MAX_STACKS),
    "expect": FileField("a table", '[expect] above "lora" = 24', MAX_PATTERNS),
    "given": FileField("a table", "[given] above rate = 1e-3", MAX_PATTERNS),
    "optimizers": FileField(
        "a table", "[optimizers.LABEL] for each label", MAX_PATTERNS
    ),
    "each": FileField("a table", "[each] above b2 = 0.95", MAX_PATTERNS),
    "optimizer": FileField(),
}
_OF_LARGEST = dict.fromkeys((_LARGEST, "min_size", "min_bytes", "ties"), FileField())
RULES_FILE = DataFile(
    "rules",
    RulesFileError,
    "[rules]",
    '"**/bias" = "no_decay"',
    in_python="ta.Rules(rules)",
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
    check_patterns(path, list(table), allow_regex=allow_regex)
    rules = []
    for place, (pattern, label) in enumerate(table.items(), 1):
        if isinstance(label, dict) and _LARGEST not in label:
            seen = f"the label of rule {place}, {listing([pattern])}, is a table"
            cure = 'Put the pattern in quotes: "policy/hidden_0" = "frozen".'
            RULES_FILE.refuse(path, seen, cure)
        who = f"rule {place}, {listing([pattern])},"
        rules.append((pattern, read_label(path, label, who)))
    return rules


def read_label(path: str | os.PathLike[str], label: Any, place: str) -> Label:
    """Read a label: a string, a bool, an ordinary number, or a spec as a list.

    Args:
        path: where it comes from, for messages.
        label: what the file has. The entries of a list are mesh axes, lists of mesh
            axes, ``""`` (in JSON also null) for an axis that is not sharded, or
            ``"..."`` for all others. A table has the arguments of ``shard_largest``.
        place: the rule, for messages.

    Raises:
        RulesFileError: it is something else.
    """
    is_float = isinstance(label, float) and math.isfinite(label)
    is_whole = isinstance(label, int) and -MAX_INTEGER <= label < MAX_INTEGER
    if isinstance(label, str | bool) or is_float or is_whole:
        return label
    if _is_spec(label):
        return PartitionSpec(*map(_read_entry, label))
    if isinstance(label, dict) and _LARGEST in label:
        who = f"the label of {place.removesuffix(',')}"
        RULES_FILE.check(path, label, _OF_LARGEST, of=who)
        with contextlib.suppress(ShardingError):
            options = {name: x for name, x in label.items() if name != _LARGEST}
            value = shard_largest(label[_LARGEST], **options)
            most = max(value.min_size, value.min_bytes)
            if len(value.names) <= MAX_AXES and most < MAX_INTEGER:
                return value
        cure = 'Write { shard_largest = "data", min_size = 65536 }.'
        RULES_FILE.refuse(path, f"{who} is {one_line(repr(label))}", cure)
    RULES_FILE.refuse(path, f"the label of {place} is {one_line(repr(label))}", _LABELS)


def _is_spec(label: Any) -> bool:
    if not isinstance(label, list) or len(label) > MAX_AXES:
        return False
    return all(map(_is_entry, label)) and label.count(_REST) < 2


def _read_entry(entry: Any) -> Any:
    if entry == _REST:
        return ...
    return tuple(entry) if isinstance(entry, list) else entry or None


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, list):
        some = 0 < len(entry) <= MAX_AXES
        return some and all(isinstance(axis, str) and axis for axis in entry)
    return entry is None or isinstance(entry, str)


def read_stacks(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stacks of a document as ``Rules`` takes them."""
    return {
        key: None if axis is False else tuple(axis) if isinstance(axis, list) else axis
        for key, axis in table.items()
    }


def check_patterns(
    path: str | os.PathLike[str], patterns: Sequence[Any], *, allow_regex: bool
) -> None:
    """Raise unless all are well-formed patterns of the kinds allowed.

    Raises:
        RulesFileError: too many, not strings, or ``re:`` where it is not allowed.
        PatternError: a pattern is malformed.
    """
    if len(patterns) > MAX_PATTERNS:
        seen = f"it has {len(patterns):,} patterns"
        RULES_FILE.refuse(path, seen, f"At most {MAX_PATTERNS:,}.")
    total = 0
    for pattern in patterns:
        if not isinstance(pattern, str):
            seen = f"{one_line(repr(pattern))} is not a pattern"
            RULES_FILE.refuse(path, seen, "Put it in quotes.")
        body = pattern.removeprefix("!")
        if body.startswith(REGEX_PREFIX) and not allow_regex:
            RULES_FILE.refuse(
                path,
                f"{listing([pattern])} is a regular expression, which a hostile file "
                "could use to stall the program",
                f"Write a glob, or pass {worded('allow_regex=True', '--allow-regex')} "
                "for a file that you trust.",
            )
        try:
            total += parse(body).weight
        except PatternError as error:
            raise PatternError(f"{RULES_FILE.head(path)}{error}") from None
        if total > MAX_WEIGHT:
            RULES_FILE.refuse(
                path,
                f"its patterns have more than {MAX_WEIGHT:,} segments and characters "
                f"of segments with wildcards, up to {listing([pattern])}",
                "Split the file, or write shorter patterns.",
            )


def write_toml(
    fields: Mapping[str, Any], rules: Mapping[str, Label] | None = None
) -> str:
    """Write a document as TOML, ``version`` first and rules last.

    Args:
        fields: strings, numbers, bools and lists of strings by field name.
        rules: labels by pattern, in order; a spec is written as a list, and one by
            ``shard_largest`` as a table.

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
    labels = [(listing([pattern]), label) for pattern, label in (rules or {}).items()]
    if "default" in fields:
        labels.append(("default=", fields["default"]))
    for whose, label in labels:
        if label is None:
            raise RulesFileError(
                f"A rules file cannot hold the None of {whose}: TOML has none. Build "
                "these rules in Python."
            )
        if isinstance(label, list | tuple | Mapping):  # it would be read as a spec
            raise RulesFileError(
                f"A rules file cannot hold the label of {whose}, the "
                f"{type(label).__name__} {one_line(repr(label))}. Write the spec of a "
                'partition as one, P("data", None).'
            )
    data = {name: _as_data(value) for name, value in fields.items()}
    stacks, expect = (data.pop(name, {}) for name in ("stacks", "expect"))
    lines = [f"version = {VERSION}", *RULES_FILE.field_lines(data)]
    heads = {"[stacks]": stacks, "[expect]": expect, RULES_FILE.table: rules}
    if others := [label for label in expect if not isinstance(label, str)]:
        raise RulesFileError(
            f"A rules file can expect a number of arrays for labels that are texts; "
            f"{one_line(repr(others[0]))} is none."
        )
    for head, table in heads.items():
        lines += ["", head] if table else []
        for key, value in (table or {}).items():
            written = False if value is None else _as_data(value)
            lines.append(f"{RULES_FILE.string(key)} = {RULES_FILE.value(written)}")
    return "\n".join(lines) + "\n"


def _as_data(label: Any) -> Any:
    """Return a label as a file has it: a spec, where a list can say it, as a list."""
    if isinstance(label, ShardLargest):
        return label.data
    if not isinstance(label, PartitionSpec):
        return label
    try:
        if PartitionSpec(*label) != label:
            return label
    except ValueError:  # JAX does not take a spec with unreduced axes apart
        return label
    data = [
        list(e) if isinstance(e, tuple) else _REST if e is ... else e or ""
        for e in label
    ]
    is_whole = _is_spec(data) and PartitionSpec(*map(_read_entry, data)) == label
    return data if is_whole else label
