"""A drafted table, and its text: a migration file with a comment where to look."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from treeadapt.data_files import VERSION
from treeadapt.drafts.values import leaf_of
from treeadapt.drafts.writing import WrittenRow, alone
from treeadapt.migrations.files import MIGRATION_FILE
from treeadapt.migrations.migration import Migration
from treeadapt.names import first_rows, fold, listing, plural

_SHARED = (
    "# These have numbers in common, in an order that no drafted row gives. If there",
    "# are more on the target's side, see `pad`; if there are copies on the source's,",
    "# draft the other way around, and take the inverse, which undoes a `repeat`:",
)
_EVIDENCE = {
    "values": "by values",
    "shapes": "by names and shapes",
    "equal": "by equal paths",
}
_KINDS = ("by values", "by names and shapes", "by equal paths", "to check")


@dataclasses.dataclass(frozen=True)
class MigrationDraft:
    """A drafted table, and what each of its rows rests on.

    Attributes:
        migration: the table as it is, doubtful rows included.
        pairs: for each path of the source the paths of the target that it goes to.
        doubtful: paths of the source whose row is marked ``# check:``.
        missing: leaves of the target that nothing fills.
        unexpected: leaves of the source without a partner; in the text, their rows that
            drop them are comments.
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
    _sizes: Mapping[str, int] = dataclasses.field(repr=False)

    def to_toml(self) -> str:
        """Write the table as a migration file, with a comment where to look at it."""
        lines = [f"# {line}".rstrip() for line in str(self).splitlines()]
        lines += [f"version = {VERSION}"]
        if self._sizes:
            lines += ["", "# What no shape says at another size.", "[sizes]"]
            lines += MIGRATION_FILE.field_lines(self._sizes)
        if not self._rows:
            lines.append("rows = []")
        for each in self._rows:
            if each.row.is_rest:
                lines += self._drops()
            lines.append("")
            lines += [f"# check: {_line(reason)}" for reason in each.row.checks]
            lines += [f"# {_line(note)}" for note in each.row.notes]
            fields = {"from": alone(each.sources), "to": alone(each.targets)}
            lines.append(MIGRATION_FILE.table)
            lines += MIGRATION_FILE.field_lines(fields | each.operations)
        if not any(each.row.is_rest for each in self._rows):
            lines += self._drops()
        unlike = [path for path in self.missing if path not in self._shared]
        if unlike:
            lines += ["", "# Nothing in the source is like these leaves of the target:"]
            lines += _listed(fold(unlike))
        if self._shared:
            lines += ["", *_SHARED]
            lines += _listed(
                f"{path} and {', '.join(fold(sources))}"
                for path, sources in self._shared.items()
            )
        return "\n".join(lines) + "\n"

    def _drops(self) -> list[str]:
        """Return the rows that would drop leaves without a partner, as comments."""
        shared = {path for paths in self._shared.values() for path in paths}
        unlike = [path for path in self.unexpected if path not in shared]
        if not unlike:
            return []
        lines = ["", "# Nothing in the target is like these. To drop them:"]
        for text in _dropping(unlike):
            lines += ["#", f"# {MIGRATION_FILE.table}"]
            lines.append(f"# drop = {MIGRATION_FILE.string(text)}")
        return lines

    def __str__(self) -> str:
        counts = Counter(
            "to check" if each.row.checks else _EVIDENCE[each.row.evidence]
            for each in self._rows
        )
        parts = [f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind]]
        head = plural(len(self._rows), "row")
        lines = [f"{head}{': ' if parts else ''}{', '.join(parts)}."]
        for noun, paths in (
            ("of the target that nothing fills", self.missing),
            ("of the source without a partner", self.unexpected),
        ):
            if paths:
                names = listing(fold(paths), limit=4)
                lines.append(f"{plural(len(paths), 'leaf')} {noun}: {names}.")
        return "\n".join([*lines, *self.notes])


def _dropping(paths: Sequence[str]) -> Iterator[str]:
    """Yield the text of drops for leaves, those that differ in numbers as one."""
    groups: dict[object, list[str]] = {}
    for path in paths:
        groups.setdefault(leaf_of(path, ()).template, []).append(path)
    for members in groups.values():
        leaves = [leaf_of(path, ()) for path in members]
        text, place = "", 0
        for token in leaves[0].template:
            if token is None:
                numbers = {leaf.numbers[place] for leaf in leaves}
                text += "*" if len(numbers) > 1 else str(numbers.pop())
                place += 1
            else:
                text += "".join(f"\\{c}" if c in "\\{}*?[" else c for c in token)
        yield text.replace(" : ", r" \: ")


def _listed(texts: Iterable[str], limit: int = 200) -> list[str]:
    """Write texts as comments, one a line."""
    return [f"#     {_line(text)}" for text in first_rows([*texts], limit=limit)]


def _line(text: str) -> str:
    """Write a text within one line of a comment."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown[:400]
