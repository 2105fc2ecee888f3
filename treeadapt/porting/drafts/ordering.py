"""The order of drafted rows: each takes its own leaves, and no other.

The first row that matches takes a leaf. A number that both paths have is written as
``{n}``, which matches any text: ``conv{n}`` takes ``conv_shortcut``, too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from treeadapt.migrations.planning import assign
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row
from treeadapt.porting.drafts.writing import WrittenRow
from treeadapt.text.names import listing

_CAPTURE = re.compile(r"(?<!\\)\{([^\W\d]\w*)\}")


def rows_apart(rows: Sequence[WrittenRow], paths: Sequence[str]) -> list[WrittenRow]:
    """Put each row below those whose leaves it would take.

    Where two would take leaves of each other, or one would take a leaf that no row is
    for, its captures become lists of what they match. What is left is marked.

    Args:
        rows: the table; ``{rest:**}`` is last and takes what is left.
        paths: of all leaves of the source.
    """
    live = dict(enumerate(rows))
    order = list(live)
    read = {number: row.read for number, row in live.items()}
    owners = {path: n for n, row in live.items() for path in row.row.source_paths}
    tried: set[object] = set()
    while True:
        taken, _ = assign([read[number] for number in order], paths, Problems())
        strays = {
            number: [leaf.path for leaf in leaves if owners.get(leaf.path) != number]
            for number, leaves in zip(order, taken, strict=True)
            if not live[number].row.is_rest
        }
        is_settled = True
        for number, astray in strays.items():
            raised = set()
            for owner in sorted({owners[path] for path in astray if path in owners}):
                every = live[number].row.source_paths
                if (number, owner) not in tried and not any(
                    map(read[owner].takes, every)
                ):
                    order.remove(owner)
                    order.insert(order.index(number), owner)
                    raised.add(owner)
                tried.add((number, owner))
            left = [path for path in astray if owners.get(path) not in raised]
            narrower = None
            if left and number not in tried:
                tried.add(number)
                narrower = _narrowed(live[number], read[number], left)
            if narrower is not None:
                live[number], read[number] = narrower, narrower.read
            elif left and ("marked", number) not in tried:
                tried.add(("marked", number))
                row = live[number].row
                note = f"it takes {listing(left, limit=3)}, too"
                marked = row.marked("other leaves", note)
                live[number] = dataclasses.replace(live[number], row=marked)
            is_settled = is_settled and not raised and narrower is None
        if is_settled:
            return [live[number] for number in order]


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
    names = [
        name
        for name in dict.fromkeys(_CAPTURE.findall(paths[0]))
        if all(_CAPTURE.findall(path).count(name) == 1 for path in paths)
        and not any(re.search(rf"\b{name}\b", text) for text in axes)
        and all(re.fullmatch(r"\w+", text) for text in texts.get(name, ()))
    ]
    for chosen in [*([name] for name in names), names]:
        sources = row.sources
        for name in chosen:
            values = sorted(texts[name], key=lambda text: (len(text), text))
            listed = f"{{{name}={','.join(values)}}}"
            sources = tuple(text.replace(f"{{{name}}}", listed) for text in sources)
        narrower = dataclasses.replace(row, sources=sources)
        if chosen and not any(map(narrower.read.takes, strays)):
            return narrower
    return None
