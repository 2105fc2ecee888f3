"""Explaining: what a plan does with one leaf, and where an index of it goes.

Takes a plan and a path, of the source or of the result; gives lines for people. The
index of an axis is written as arithmetic on the names of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from treeadapt.migrations.axes import REST, Axis
from treeadapt.migrations.groups import Group
from treeadapt.migrations.plan import MigrationPlan, sizes_text
from treeadapt.migrations.rows import Address, Pads
from treeadapt.migrations.running import Layout, Move
from treeadapt.names import fold, listing


def explanation(plan: MigrationPlan, path: str) -> Iterator[str]:
    """Yield what a plan does with a leaf, or makes it of; nothing if it has no row.

    Example:
        >>> from treeadapt.migrations.migration import Migration
        >>> m = Migration({"layers.{l}.q : (h d) e": "q : l e h d"}, sizes={"d": 4})
        >>> plan = m.plan({f"layers.{n}.q": np.ones((8, 3)) for n in range(5)})
        >>> for line in explanation(plan, "layers.3.q"):
        ...     print(line)
        row 1: 'layers.{l}.q : (h d) e' -> 'q : l e h d'
        captures: l = 3
        sizes: l=5, h=2, d=4, e=3
        'layers.3.q'[h*4 + d, e] -> 'q'[3, e, h, d]
    """
    for group in plan.groups:
        for is_source, side in ((True, group.sources), (False, group.targets)):
            for number, paths in enumerate(side):
                if path in paths:
                    yield from _leaf_lines(group, number, path, is_source=is_source)
    if path in plan.dropped:
        place = next(n for n, row in enumerate(plan.rows, 1) if row.takes(path))
        yield f"row {place}: {plan.rows[place - 1].text!r} drops it"
    if path in plan.new:
        yield f"{listing([path])} is new, and filled by {plan.new[path]!r}"
    if path in plan.static:
        yield f"{listing([path])} is not an array, and left out"


def _leaf_lines(
    group: Group, number: int, path: str, *, is_source: bool
) -> Iterator[str]:
    row, move = group.row, group.move
    yield f"row {group.place + 1}: {row.both}"
    captured = _captured((row.sources if is_source else row.targets)[number], path)
    if captured:
        yield f"captures: {captured}"
    if move is None:
        how = "as it is" if row.function is None else "by a function"
        yield f"{listing(group.given)} -> {listing(group.filled)}, {how}"
        return
    if sizes_text(group):
        yield f"sizes: {sizes_text(group)}"
    for name, value in row.values.typed().items():
        yield f"{name}{' undone' if row.values.undoes else ''}: {value}"
    layout = (move.sources if is_source else move.targets)[number]
    paths = (group.sources if is_source else group.targets)[number]
    every = zip(paths, move.indices(layout.numbers), strict=True)
    fixed = next(own for one, own in every if one == path)

    def place(layout: Layout, paths: Sequence[str], part: int, pads: Pads) -> str:
        """Write which leaves are at an address, and where in them an index is."""
        names = [
            path
            for path, own in zip(paths, move.indices(layout.numbers), strict=True)
            if own.items() <= {**own, **fixed}.items()
        ]
        index = ", ".join(_index(move, axis, part, fixed, pads) for axis in layout.axes)
        return f"{listing(fold(names), limit=2)}[{index}]"

    pads = [move.values.pads(is_source=is_source) for is_source in (True, False)]
    for s, one, t, two in move.pieces:
        if number == (s if is_source else t):
            left = place(move.sources[s], group.sources[s], one, pads[0])
            right = place(move.targets[t], group.targets[t], two, pads[1])
            yield f"{left} -> {right}"


def _captured(address: Address, path: str) -> str:
    """Write what a path gives each capture, and the number that a text stands for."""
    found = address.path.match(path) or {}
    texts = {}
    for each in address.path.captures:
        value = found[each.key]
        text = each.write(value)
        is_other = isinstance(value, int) and text != str(value)
        texts[each.key] = f"{each.key} = {text}{f' ({value})' if is_other else ''}"
    return ", ".join(texts.values())


def _index(
    move: Move, axis: Axis, part: int, fixed: Mapping[str, int], pads: Pads
) -> str:
    """Write the index along an axis as a sum over names."""
    start = move.start(axis, part) + pads.get(axis.name, (0, 0))[0]
    terms: list[str] = []
    factor = 1
    for name in reversed(axis.product(part)):
        if name in fixed:
            start += fixed[name] * factor
        else:
            text = name.replace(REST, "i").replace(" ", "")
            terms.insert(0, text if factor == 1 else f"{text}*{factor}")
        factor *= move.size[name]
    return " + ".join(terms + [str(start)] * (start > 0 or not terms))
