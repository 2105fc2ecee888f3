"""Plans in words: a line for each row, what warnings say, and the way of one leaf.

Takes a ``MigrationPlan``, whose module imports this one and knows no sentence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from treeadapt.migrations.axes import REST
from treeadapt.migrations.group import Group
from treeadapt.migrations.rows import Address, Row
from treeadapt.migrations.take import plain_name
from treeadapt.text.html_table import html_table
from treeadapt.text.names import fold, listing, plural, size_text
from treeadapt.trees.paths import SEPARATOR

_WIDTH = 88


def plan_text(plan: Any) -> str:
    """Write a plan: what becomes of how many leaves, each row, and remarks."""
    lines = [_title(plan)]
    for (source, target), counts, remarks in _rows(plan):
        end = f"-> {target}{f': {counts}' if counts else ''}"
        is_short = len(f"{source} {end}") <= _WIDTH
        lines += [f"{source} {end}"] if is_short else [source, f"    {end}"]
        lines += [f"    {remark}" for remark in remarks]
    return "\n".join([*lines, *_remarks(plan)])


def plan_html(plan: Any) -> str:
    """Write a plan for a notebook."""
    rows = (
        (number, *ends, counts, "\n".join(remarks))
        for number, (ends, counts, remarks) in enumerate(_rows(plan), 1)
    )
    head = ("row", "source", "target", "arrays", "remarks")
    return html_table(_title(plan), head, rows, _remarks(plan))


def _title(plan: Any) -> str:
    counts = plural(len(plan.source), "leaf"), plural(len(plan.result), "leaf")
    verb = "becomes" if len(plan.source) == 1 else "become"
    return f"{counts[0]} {verb} {counts[1]}."


def _remarks(plan: Any) -> list[str]:
    """What is to be said of the whole, as lines."""
    kept = dict.fromkeys(plan.kept)
    marked = [row for place, row in plan.backwards if place is None and row.notes.check]
    lines = []
    for path, how in plan.new.items():
        checks = [f"; check: {row.notes.check}" for row in marked if row.takes(path)]
        if path not in kept:
            lines.append(f"new {listing([path])}: {how}{''.join(checks[:1])}")
    if kept:
        text = f"{plural(len(kept), 'leaf')} dropped before, kept of the target"
        lines.append(f"{text}: {listing(fold(kept))}")
    if plan.lost:
        text = f"{plural(len(plan.lost), 'pattern')} of leaves dropped before"
        lines.append(f"{text}, in no target: {listing(plan.lost)}")
    if plan.static:
        names = listing(plan.static)
        lines.append(f"not arrays, and left out: {names}")
    words = "exact" if plan.exact else "not exact"
    lines.append(
        f"{words}; {size_text(plan.peak_bytes)} for the largest group"
        f"{'; a second run would pass' if plan.repeatable else ''}"
    )
    lost = [path for path in plan.one_way if path not in plan.noted]
    if lost:
        names = listing(fold(lost))
        lines.append(f"{plural(len(lost), 'leaf')} with no way back: {names}")
    lines += (*noted_lines(plan), *unstated_lines(plan))
    if plan.gathered:
        names = listing(fold(plan.gathered))
        lines.append(f"whole sources for each part of {names}")
    return [*lines, *(f"not checked on shapes: {text}" for text in plan.unread)]


def _rows(plan: Any) -> Iterator[tuple[tuple[str, str], str, list[str]]]:
    """Yield of each row its two sides, how many arrays it moves, and remarks."""
    for place, (row, groups) in enumerate(plan.by_row):
        checks = [f"check: {row.notes.check}"] if row.notes.check else []
        if row.drops:
            counts = "it matches nothing here" if place in plan.idle else ""
            yield row.ends, counts, checks
            continue
        if row.notes.copy and not groups:
            yield row.ends, "copies alone", checks
            continue
        sources = sum(len(paths) for group in groups for paths in group.sources)
        targets = sum(len(paths) for group in groups for paths in group.targets)
        remarks = [*filter(None, dict.fromkeys(map(sizes_text, groups))), *checks]
        if left := ", ".join(filter(None, dict.fromkeys(map(selected_text, groups)))):
            remarks.append(f"it takes {left}")
        if row.values.add:
            text = "trained on, several summands move faster than their sum"
            remarks.append(f"{text}: {len(row.sources)} times")
        if plan.swappable.get(place):
            pairs = pairs_text(plan.swappable[place])
            remarks.append(f"shapes do not tell apart: {pairs}")
        yield row.ends, f"{sources:,} to {targets:,}", remarks


def pairs_text(pairs: Iterable[tuple[str, str]]) -> str:
    """Write pairs that shapes do not tell apart."""
    return ", ".join(
        f"the texts of {a}" if a == b else f"{a} and {b}" for a, b in pairs
    )


def noted_lines(plan: Any) -> Iterator[str]:
    """Yield of which leaves of a plan the way back gives something else, and what."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in plan.noted.items():
        by_reason.setdefault(reason, []).append(path)
    for reason, paths in by_reason.items():
        yield f"back from {listing(fold(paths))}, {reason}"


def selected_lines(plan: Any) -> Iterator[str]:
    """Yield warnings of what a plan leaves out because its rows take some numbers."""
    for table in plan.tables:
        texts: dict[tuple[str, str], None] = {}
        for group in table.groups:
            if group.selected:
                texts[group.row.text, selected_text(group)] = None
        for row, text in texts:
            yield f"The row {listing([row])} takes {text}; all others are left out."


def unstated_lines(plan: Any) -> Iterator[str]:
    """Yield which leaves of a plan are copies, though no configuration says so."""
    for table in plan.tables:
        for group in table.groups:
            key, count = group.row.notes.copy, len(table.rows[group.place].targets)
            if isinstance(key, str) and group.targets[count:]:
                paths = itertools.chain(*group.targets[count:])
                yield (
                    f"{listing(paths)} becomes a copy of "
                    f"{listing(group.source_paths)}, and no configuration says that "
                    f"{key} is true."
                )


def sizes_text(group: Group) -> str:
    """Write the sizes of a group's names."""
    sizes = group.move.sizes if group.move and group.row.has_axes else ()
    plain = (pair for pair in sizes if pair[0] == plain_name(pair[0]))
    plain = (pair for pair in plain if not pair[0].startswith(REST))
    return ", ".join(f"{name}={size}" for name, size in plain)


def take_text(row: Row) -> str:
    """Write what a row takes, in short."""
    return f"{row.values.typed()['take']}"[:80]


def selected_text(group: Group) -> str:
    """Write of which numbers a group leaves some out."""
    texts = (
        f"{some:,} of {plural(size, 'number')} of {name!r}"
        for name, some, size in group.selected
    )
    return ", ".join(texts)


def explanation(plan: Any, path: str, start: int = 0) -> Iterator[str]:
    """Yield what a plan does with a leaf, or makes it of; nothing if it has no row.

    Args:
        plan: of one table.
        path: of the leaf.
        start: how many rows are in the tables before.

    Example:
        >>> from treeadapt.migrations.migration import Migration
        >>> m = Migration({"layers.{l}.q : (h d) e": "q : l e h d"}, sizes={"d": 4})
        >>> plan = m.plan({f"layers.{n}.q": np.ones((8, 3)) for n in range(5)})
        >>> for line in explanation(plan, "layers.3.q"):
        ...     print(line)
        row 1: 'layers.{l}.q : (h d) e' -> 'q : l e h d'
        captures: l = 3
        sizes: l=5, h=2, d=4, e=3
        'layers.{0..4}.q' -> 'q'
    """
    for group in plan.groups:
        addresses = (*group.row.sources, *group.row.targets)
        for address, paths in zip(
            addresses, (*group.sources, *group.targets), strict=True
        ):
            if path in paths:
                yield f"row {start + group.place + 1}: {group.row.both}"
                yield from _leaf_lines(group, address, path)
    if path in plan.dropped:
        rows = [(n, row) for n, row in enumerate(plan.rows) if row.takes(path)]
        drops = [(n, row) for n, row in rows if row.drops]  # which may be the last
        leaving = [(n, row) for n, row in rows if row.values.take]
        place, row = (drops or leaving)[0]
        verb = "drops it" if row.drops else f"leaves it out: take = {take_text(row)}"
        yield f"row {start + place + 1}: {row.text!r} {verb}"
    if path in plan.kept:
        yield f"{listing([path])} was dropped before, and is kept of the target"
    elif path in plan.new:
        yield f"{listing([path])} is new, and filled by {plan.new[path]!r}"
    if path in plan.static:
        yield f"{listing([path])} is not an array, and left out"


def _leaf_lines(group: Group, address: Address, path: str) -> Iterator[str]:
    """Yield what is done with a leaf at one address, and with what moves with it."""
    row = group.row
    if captured := _captured(address, path):
        yield f"captures: {captured}"
    if sizes_text(group):
        yield f"sizes: {sizes_text(group)}"
    for name, value in row.values.typed().items():
        yield f"{name}{' undone' if row.values.undoes else ''}: {value}"
    how = ", by a function" if row.function else ", as it is" * (group.move is None)
    sides = (
        listing(fold([*side]), limit=2) for side in (group.source_paths, group.filled)
    )
    yield f"{' -> '.join(sides)}{how}"


def _captured(address: Address, path: str) -> str:
    """Write what a path gives each capture, and the number that a text stands for."""
    captures = address.path.match(path) or {}
    texts = {}
    for each in address.path.captures:
        value = captures[each.key]
        text = each.write(value).removeprefix(SEPARATOR)
        is_other = isinstance(value, int) and text != str(value)
        texts[each.key] = f"{each.key} = {text}{f' ({value})' if is_other else ''}"
    return ", ".join(texts.values())
