"""The order of drafted rows: each takes its own leaves, and no other.

The first row that matches takes a leaf. A number that both paths have is written as
``{n}``, which matches any text: ``conv{n}`` takes ``conv_shortcut``, too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from treeadapt.migrations.planning import assign
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row
from treeadapt.porting.drafts.writing import WrittenRow
from treeadapt.text.names import listing

_CAPTURE = re.compile(r"(?<!\\)\{([^\W\d]\w*)(?:\+([0-9]+))?\}")


def rows_apart(
    rows: Sequence[WrittenRow], sources: Sequence[str], targets: Sequence[str]
) -> list[WrittenRow]:
    """Put each row below those whose leaves it would take, there or on the way back.

    Where two would take leaves of each other, or one would take a leaf that no row is
    for, its captures become lists of what they match. What is left is marked.

    Args:
        rows: the table; ``{rest:**}`` is last and takes what is left.
        sources: paths of all leaves of the source.
        targets: paths of all leaves of the target.
    """
    order = _Order(rows)
    while True:
        before = [*order.numbers], dict(order.live)
        order.set_apart(1, targets)
        order.set_apart(0, sources)
        if before == (order.numbers, order.live):
            return [order.live[number] for number in order.numbers]


class _Order:
    """Rows of a table, which change their places.

    Attributes:
        live: the rows by number; those that are narrowed or marked are replaced.
        numbers: in the order of the table.
    """

    def __init__(self, rows: Sequence[WrittenRow]) -> None:
        self.live = dict(enumerate(rows))
        self.numbers = [*self.live]
        self._tried: set[object] = set()  # what is not done again

    def set_apart(self, side: int, paths: Sequence[str]) -> None:
        """Raise, narrow or mark rows, by what they take; raise only, of targets."""
        rows, tried = self.live, self._tried
        read = {n: row.read for n, row in rows.items()}
        own = {n: row.row.source_paths for n, row in rows.items()}
        if side == 1:
            read = {n: row.reversed() for n, row in read.items()}
            own = {n: row.row.target_paths for n, row in rows.items()}
        owners = {path: number for number, every in own.items() for path in every}
        taken, _ = assign([read[number] for number in self.numbers], paths, Problems())
        strays = {
            number: [leaf.path for leaf in leaves if owners.get(leaf.path) != number]
            for number, leaves in zip(self.numbers, taken, strict=True)
            if not rows[number].row.is_rest
        }
        for number, astray in strays.items():
            raised = set()
            for owner in sorted({owners[path] for path in astray if path in owners}):
                is_new = (side, number, owner) not in tried
                if is_new and not any(map(read[owner].takes, own[number])):
                    self.numbers.remove(owner)
                    self.numbers.insert(self.numbers.index(number), owner)
                    raised.add(owner)
                tried.add((side, number, owner))
            left = [path for path in astray if owners.get(path) not in raised]
            if left and side == 0:
                self._narrow(number, read[number], left)

    def _narrow(self, number: int, read: Row, strays: Sequence[str]) -> None:
        """Narrow a row that takes other leaves, or mark it."""
        row = self.live[number]
        narrower = None if number in self._tried else _narrowed(row, read, strays)
        if narrower is None and ("marked", number) not in self._tried:
            self._tried.add(("marked", number))
            note = f"it takes {listing(strays, limit=3)}, too"
            marked = row.row.marked("other leaves", note)
            narrower = dataclasses.replace(row, row=marked)
        self._tried.add(number)
        self.live[number] = narrower or row


def _narrowed(row: WrittenRow, read: Row, strays: Sequence[str]) -> WrittenRow | None:
    """Return a row whose captures are lists, so that it takes no stray leaf."""
    texts: dict[str, dict[str, None]] = {}
    for path in row.row.source_paths:
        for address in read.sources:
            for name, value in (address.path.match(path) or {}).items():
                texts.setdefault(name, {})[str(value)] = None
    paths, axes = zip(
        *(text.partition(" : ")[::2] for text in (*row.sources, *row.targets)),
        strict=True,
    )
    shifts = [dict(_CAPTURE.findall(path)) for path in paths]
    names = [
        name
        for name in shifts[0]
        if all(
            _CAPTURE.findall(path).count((name, own.get(name))) == 1
            for path, own in zip(paths, shifts, strict=True)
        )
        and not any(re.search(rf"\b{name}\b", text) for text in axes)
        and all(re.fullmatch(r"\w+", text) for text in texts.get(name, ()))
    ]

    for chosen in [*([name] for name in names), names]:
        lists = {name: sorted(texts[name], key=_in_length) for name in chosen}
        narrow = [
            _listed(text, shift, lists)
            for text, shift in zip((*row.sources, *row.targets), shifts, strict=True)
        ]
        count = len(row.sources)
        # A number that is not the same on both sides is a list on both, by place.
        is_shifted = any(shift[name] for shift in shifts for name in chosen)
        targets = tuple(narrow[count:]) if is_shifted else row.targets
        narrower = dataclasses.replace(
            row, sources=tuple(narrow[:count]), targets=targets
        )
        if chosen and not any(map(narrower.read.takes, strays)):
            return narrower
    return None


def _in_length(text: str) -> tuple[int, str]:
    return len(text), text


def _listed(
    text: str, shifts: Mapping[str, str], lists: Mapping[str, Sequence[str]]
) -> str:
    """Return an address with lists of values for some captures, shifted as these."""
    for name, values in lists.items():
        shift = shifts[name]
        capture = f"{name}+{shift}" if shift else name
        own = [str(int(value) + int(shift)) for value in values] if shift else values
        text = text.replace(f"{{{capture}}}", f"{{{name}={','.join(own)}}}")
    return text
