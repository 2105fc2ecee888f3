"""The order of drafted rows: each takes its own leaves, and no other.

The first row that matches takes a leaf. A number that both paths have is written as
``{n}``, which matches any text: ``conv{n}`` takes ``conv_shortcut``, too.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from treeadapt.migrations.planning import assign
from treeadapt.migrations.problems import Problems
from treeadapt.porting.drafts.rows import DraftRow, Hole
from treeadapt.porting.drafts.writing import WrittenRow, is_any_text
from treeadapt.text.names import listing

_WORD = re.compile(r"\w+")


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
            if left and side == 0 and not self._narrow(number, left):
                rivals = {owners.get(path, number) for path in left} - {number}
                shared = {n: [*filter(read[n].takes, own[number])] for n in rivals}
                if not self._raise_narrowed(number, shared):
                    self._mark(number, left)

    def _narrow(self, number: int, strays: Sequence[str]) -> bool:
        """Narrow a row that takes other leaves, if it can be."""
        row = self.live[number]
        narrower = None if number in self._tried else _narrowed(row, strays)
        self._tried.add(number)
        self.live[number] = narrower or row
        return narrower is not None

    def _raise_narrowed(self, number: int, shared: Mapping[int, Sequence[str]]) -> bool:
        """Narrow the rows whose leaves a row takes, and raise them above it.

        Args:
            number: of the row.
            shared: its own leaves that these rows would take, by their numbers.
        """
        narrower = {
            n: _narrowed(self.live[n], strays)
            for n, strays in shared.items()
            if ("raised", n) not in self._tried
        }
        rows = {n: row for n, row in narrower.items() if row is not None}
        if not shared or len(rows) < len(shared):
            return False
        for owner, row in rows.items():
            self._tried.add(("raised", owner))
            self.live[owner] = row
            self.numbers.remove(owner)
            self.numbers.insert(self.numbers.index(number), owner)
        return True

    def _mark(self, number: int, strays: Sequence[str]) -> None:
        row = self.live[number]
        note = f"it takes {listing(strays, limit=3)}, too"
        self.live[number] = row.with_row(row.row.marked("other leaves", note))


def _narrowed(row: WrittenRow, strays: Sequence[str]) -> WrittenRow | None:
    """Return a row whose captures are lists, so that it takes no stray leaf."""
    if not row.row.sources:
        return None
    read = row.read
    texts: dict[str, dict[str, None]] = {}
    for path in row.row.source_paths:
        for address in read.sources:
            for name, value in (address.path.match(path) or {}).items():
                texts.setdefault(name, {})[str(value)] = None
    values = {
        atom: sorted(texts.get(row.spelling.names[atom], ()), key=_in_length)
        for atom in _captured(row.row)
    }
    atoms = [atom for atom, every in values.items() if all(map(_WORD.fullmatch, every))]
    for chosen in [*([atom] for atom in atoms), atoms]:
        narrower = row.respelled(lists={atom: values[atom] for atom in chosen})
        if chosen and not any(map(narrower.read.takes, strays)):
            return narrower
    return None


def _captured(row: DraftRow) -> list[int]:
    """Return the atoms that are one number or text of each path, and of no axis."""
    axes = itertools.chain(*(axis for place in row.places for axis in place.axes))
    of_axes = {atom for part in axes for atom in part}
    every = [
        Counter(
            token.atoms[0]
            for token in place.tokens
            if isinstance(token, Hole) and len(token.atoms) == 1
            if not token.texts or is_any_text(token, row, place)
        )
        for place in row.places
    ]
    return [
        atom
        for atom in every[0]
        if atom not in of_axes and all(counts[atom] == 1 for counts in every)
    ]


def _in_length(text: str) -> tuple[int, str]:
    return len(text), text
