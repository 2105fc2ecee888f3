"""What shapes cannot see: pairs of a group that could be exchanged.

Takes a planned group, and reads its sizes alone. A plan and ``lint`` list the pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from treeadapt.migrations.axes import REST, Product, product_text
from treeadapt.migrations.group import Group
from treeadapt.migrations.move import Layout, Move
from treeadapt.migrations.take import plain_name, taken_name


def swappable(group: Group) -> Iterator[tuple[str, str]]:
    """Yield what could be swapped in a group without changing a shape, in pairs."""
    move, row = group.move, group.row
    for address in (*row.sources, *row.targets):
        for each in address.path.captures:
            yield from itertools.combinations(each.names, 2)
            is_axis = each.is_number and each.key not in row.outer
            if is_axis and len(each.entries) > 1:
                yield each.key, each.key
    if move is None or not row.has_axes:
        return
    for axis in itertools.chain(
        *(each.axes for each in (*move.sources, *move.targets))
    ):
        sizes = enumerate(map(move.count, axis.parts), 1)
        for (one, size), (two, other) in itertools.combinations(sizes, 2):
            if size == other > 0:
                yield f"part {one}", f"part {two}"
    for source, one, target, two in move.pieces:
        sides = (move.sources[source], one), (move.targets[target], two)
        products = [_products(layout, part) for layout, part in sides]
        every = [*itertools.chain(*products)]
        names = dict.fromkeys(itertools.chain(*every))
        for a, b in itertools.combinations(names, 2):
            are_together = any(a in product and b in product for product in every)
            if are_together or _sizes(move, a) & _sizes(move, b):
                yield a, b
        for side in products:
            for first, second in itertools.combinations(side, 2):
                is_composed = max(len(first), len(second)) > 1
                if is_composed and move.count(first) == move.count(second) > 1:
                    yield product_text(first), product_text(second)


def _products(layout: Layout, part: int) -> list[Product]:
    """Return what an axis or a number of a path is made of, but for ``...``."""
    products = (axis.product(part) for axis in layout.axes)
    every = (*products, *((name,) for name in layout.numbers))
    plain = (tuple(map(plain_name, each)) for each in every)
    return [each for each in plain if not "".join(each).startswith(REST)]


def _sizes(move: Move, name: str) -> set[int]:
    """Return the sizes of a name above 1, on either side."""
    sizes = move.size.get(name), move.size.get(taken_name(name))
    return {size for size in sizes if size is not None and size > 1}
