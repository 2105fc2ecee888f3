"""Rows from values: which numbers of the source are which of the target.

Leaves that share numbers are linked. What is linked, and alike but for the numbers in
its paths, is one row: numbers that are equal along every link are captures, all others
are axes of one array that the leaves are together. ``digits`` finds how an index of one
side is made of those of the other one, ``parts`` writes it as places.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from treeadapt.drafts.digits import fit_map
from treeadapt.drafts.numbers import Origins
from treeadapt.drafts.parts import Pattern, Variant, row_of_parts
from treeadapt.drafts.rows import (
    DraftRow,
    Hole,
    Tokens,
    is_count,
    template_of,
    tokens_of,
    windowed,
)

_LEAST_KNOWN = 0.2  # of a leaf, before its numbers are evidence
_ALL = 0.9  # of a leaf: no number of it is in another one by chance
_LEAST_LINK = 0.005  # of what is known of other leaves, before it is of another one
_MAX_NUMBER = 10**6
_MOST_NAMES = 8  # numbers at one place of a path that may be words


@dataclasses.dataclass(frozen=True)
class NumberedLeaf:
    """A leaf of one side.

    Attributes:
        path: its path.
        shape: of its array.
        template: its tokens, with None for numbers.
        numbers: in its path.
    """

    path: str
    shape: tuple[int, ...]
    template: tuple[str | None, ...]
    numbers: tuple[int, ...]


def leaf_of(path: str, shape: tuple[int, ...]) -> NumberedLeaf:
    """Return a leaf with the numbers of its path apart."""
    numbers = tuple(int(token) for token in tokens_of(path) if is_count(token))
    return NumberedLeaf(path, shape, template_of(path), numbers)


@dataclasses.dataclass(frozen=True)
class Link:
    """Numbers that two leaves share: where they are in each."""

    source: int
    target: int
    source_flat: np.ndarray
    target_flat: np.ndarray


#: Leaves of one side, by their numbers.
Side: TypeAlias = Mapping[int, NumberedLeaf]

#: Links that hang together, several times.
Components: TypeAlias = Sequence[Sequence[Link]]


def find_links(
    targets: Sequence[NumberedLeaf],
    origins: Mapping[str, Origins],
    least: float = _LEAST_KNOWN,
) -> list[Link]:
    """Return which leaves share numbers."""
    links = []
    for number, leaf in enumerate(targets):
        origin = origins.get(leaf.path)
        if origin is None or origin.share < least or not len(origin.flat):
            continue
        order = np.argsort(origin.leaves, kind="stable")
        leaves, starts = np.unique(origin.leaves[order], return_index=True)
        for source, shared in zip(leaves, np.split(order, starts[1:]), strict=True):
            if origin.share >= _ALL or len(shared) >= _LEAST_LINK * len(origin.flat):
                links.append(
                    Link(
                        int(source), number, origin.places[shared], origin.flat[shared]
                    )
                )
    return links


def rows_of_links(
    sources: Sequence[NumberedLeaf],
    targets: Sequence[NumberedLeaf],
    links: Sequence[Link],
) -> list[DraftRow]:
    """Return the rows that shared numbers show; none for links that follow no row."""
    pools: dict[object, list[list[Link]]] = {}
    for component in _components(links):
        ends = {(0, sources[one.source].template) for one in component}
        ends |= {(1, targets[one.target].template) for one in component}
        pools.setdefault(frozenset(ends), []).append(component)
    sides = dict(enumerate(sources)), dict(enumerate(targets))
    by_pool = {ends: _rows_of_pool(*sides, pool) for ends, pool in pools.items()}
    failed = {ends: pools[ends] for ends, rows in by_pool.items() if not rows}
    rows = [row for rows in by_pool.values() for row in rows]
    return rows + _rows_of_words(*sides, failed)


def _rows_of_words(
    sources: Side, targets: Side, pools: Mapping[Any, Components]
) -> list[DraftRow]:
    """Return the rows of pools that are one if words of a path are numbers.

    As the layers of a block are that are called ``local`` and ``global``.
    """
    rows: list[DraftRow] = []
    done: set[Any] = set()
    for side in (1, 0):
        alike: dict[object, dict[Pattern, Components]] = {}
        for ends, pool in pools.items():
            if ends in done:
                continue
            own = [template for s, template in ends if s == side]
            others = frozenset(end for end in ends if end[0] != side)
            if len(own) == 1:
                alike.setdefault(others, {})[own[0]] = pool
        for by_template in alike.values():
            window = None
            if len(by_template) > 1:
                window = windowed([*map(_as_tokens, by_template)])
            if window is not None:
                every = _rows_of_window(sources, targets, side, by_template, window)
                rows += every
                seen = {(side, template) for template in by_template}
                done |= {ends for ends in pools if every and ends & seen}
    return rows


def _as_tokens(template: Pattern) -> Tokens:
    return tuple(Hole(()) if token is None else token for token in template)


def _rows_of_window(
    sources: Side,
    targets: Side,
    side: int,
    pools: Mapping[Pattern, Components],
    window: tuple[int, int],
) -> list[DraftRow]:
    """Return the rows of pools whose paths differ within a window on one side."""
    first, last = window

    def word(template: Pattern) -> str:
        return "".join(map(str, template[first : len(template) - last]))

    def least(template: Pattern) -> list[tuple[int, ...]]:
        other = (targets, sources)[side]
        ends = [(one.target, one.source)[side] for c in pools[template] for one in c]
        return sorted(other[number].numbers for number in ends)

    templates = sorted(pools, key=least)
    place = sum(token is None for token in templates[0][:first])
    leaves = dict((sources, targets)[side])
    for nth, template in enumerate(templates):
        united = (*template[:first], None, *template[len(template) - last :])
        for number, leaf in leaves.items():
            if leaf.template == template:
                numbers = (*leaf.numbers[:place], nth, *leaf.numbers[place:])
                leaves[number] = dataclasses.replace(
                    leaf, template=united, numbers=numbers
                )
    pool = [component for each in templates for component in pools[each]]
    words = tuple(map(word, templates))
    rows = []
    one, two = (leaves, targets) if side == 0 else (sources, leaves)
    for row in _rows_of_pool(one, two, pool):
        sides = [row.sources, row.targets]
        addresses = []
        for each in sides[side]:
            token = each.tokens[first]
            if isinstance(token, Hole) and (token.shift or len(token.atoms) > 1):
                break
            new = (
                dataclasses.replace(token, texts=words)
                if isinstance(token, Hole)
                else words[int(token)]
            )
            tokens = (*each.tokens[:first], new, *each.tokens[first + 1 :])
            addresses.append(dataclasses.replace(each, tokens=tokens))
        else:
            sides[side] = tuple(addresses)
            rows.append(dataclasses.replace(row, sources=sides[0], targets=sides[1]))
    return rows


def _rows_in_blocks(sources: Side, targets: Side, pool: Components) -> list[DraftRow]:
    """Return the rows if a number of a path is two: of a block, and within it.

    The one within the block is a number of the other path.
    """
    links = [link for component in pool for link in component]
    for side in (0, 1):
        sides = sources, targets
        ends = [
            (
                sides[side][(k.source, k.target)[side]],
                sides[1 - side][(k.target, k.source)[side]],
            )
            for k in links
        ]
        if not all(a.numbers and b.numbers for a, b in ends):
            continue
        for place, other in itertools.product(
            range(min(len(a.numbers) for a, _ in ends)),
            range(min(len(b.numbers) for _, b in ends)),
        ):
            inner = [b.numbers[other] for _, b in ends]
            outer = [a.numbers[place] for a, _ in ends]
            size = math.gcd(*(n - i for n, i in zip(outer, inner, strict=True)))
            if not 0 <= max(inner) < size or max(outer) < size:
                continue
            split = {
                number: _in_block(leaf, place, size)
                for number, leaf in sides[side].items()
            }
            one, two = (split, targets) if side == 0 else (sources, split)
            rows = _Pool(one, two, pool).rows() or []
            joined = [_with_blocks(row, side, place, size) for row in rows]
            if rows and all(joined):
                return [row for row in joined if row]
    return []


def _in_block(leaf: NumberedLeaf, place: int, size: int) -> NumberedLeaf:
    """Return a leaf with two numbers in place of one."""
    if place >= len(leaf.numbers):
        return leaf
    at = [i for i, token in enumerate(leaf.template) if token is None][place]
    template = (*leaf.template[:at], None, *leaf.template[at:])
    numbers = (*leaf.numbers[:place], *divmod(leaf.numbers[place], size))
    numbers += leaf.numbers[place + 1 :]
    return dataclasses.replace(leaf, template=template, numbers=numbers)


def _with_blocks(row: DraftRow, side: int, place: int, size: int) -> DraftRow | None:
    """Return a row with one number in place of two; None if they are something else."""
    sides = [row.sources, row.targets]
    addresses = []
    atoms: set[int] = set()
    for each in sides[side]:
        at = [n for n, t in enumerate(each.tokens) if isinstance(t, Hole)]
        pair = [each.tokens[n] for n in at[place : place + 2]]
        holes = [hole for hole in pair if isinstance(hole, Hole)]
        if len(holes) < 2 or at[place] + 1 != at[place + 1]:
            return None
        if any(hole.shift or hole.texts or len(hole.atoms) > 1 for hole in holes):
            return None
        hole = Hole((*holes[0].atoms, *holes[1].atoms))
        atoms |= {*holes[1].atoms}
        tokens = (*each.tokens[: at[place]], hole, *each.tokens[at[place] + 2 :])
        addresses.append(dataclasses.replace(each, tokens=tokens))
    sides[side] = tuple(addresses)
    return dataclasses.replace(
        row,
        sources=sides[0],
        targets=sides[1],
        sizes={**row.sizes, **dict.fromkeys(atoms, size)},
        gaps=row.gaps | atoms,
    )


def _rows_of_pool(sources: Side, targets: Side, pool: Components) -> list[DraftRow]:
    """Return the rows of components whose paths are alike but for numbers."""
    rows = _Pool(sources, targets, pool).rows()
    if rows is not None:
        return rows
    named = _rows_with_a_name(sources, targets, pool)
    if named is not None:
        return named
    if rows := _rows_in_blocks(sources, targets, pool):
        return rows
    shapes: dict[object, list[Sequence[Link]]] = {}  # apart, some may follow one
    for component in pool:
        key = frozenset(
            (sources[one.source].shape, targets[one.target].shape) for one in component
        )
        shapes.setdefault(key, []).append(component)
    if len(shapes) == 1:
        return []
    parts = (
        _Pool(sources, targets, part).rows()
        or _rows_with_a_name(sources, targets, part)
        for part in shapes.values()
    )
    return [row for part in parts for row in part or ()]


def _rows_with_a_name(
    sources: Side, targets: Side, pool: Components
) -> list[DraftRow] | None:
    """Return the rows if one number of a path is a part of its name, as in ``w0``.

    So are those of arrays that follow each other and differ in size, and of ties. What
    follows each other and has one size is a stack in another order: no row says that.
    """
    for side in (0, 1):
        every = {(one.source, one.target)[side] for links in pool for one in links}
        leaves = {number: (sources, targets)[side][number] for number in sorted(every)}
        values: dict[tuple[Pattern, int], set[int]] = {}
        shapes: dict[Pattern, set[tuple[int, ...]]] = {}
        for leaf in leaves.values():
            shapes.setdefault(leaf.template, set()).add(leaf.shape)
            for place, number in enumerate(leaf.numbers):
                values.setdefault((leaf.template, place), set()).add(number)
        for (template, place), numbers in values.items():
            if not 1 < len(numbers) <= _MOST_NAMES:
                continue
            named = {
                number: _named(leaf, place) if leaf.template == template else leaf
                for number, leaf in leaves.items()
            }
            one, two = (named, targets) if side == 0 else (sources, named)
            rows = _Pool(one, two, pool).rows() or []
            are_copies = all(len(r.places) > 2 and not r.has_bracket for r in rows)
            if rows and (are_copies or len(shapes[template]) > 1):
                return rows
    return None


def _named(leaf: NumberedLeaf, place: int) -> NumberedLeaf:
    """Return a leaf one number of which is a word."""
    at = [i for i, token in enumerate(leaf.template) if token is None][place]
    template = list(leaf.template)
    template[at] = str(leaf.numbers[place])
    numbers = leaf.numbers[:place] + leaf.numbers[place + 1 :]
    return dataclasses.replace(leaf, template=tuple(template), numbers=numbers)


def _components(links: Sequence[Link]) -> list[list[Link]]:
    """Divide links into those that hang together."""
    parents: dict[tuple[int, int], tuple[int, int]] = {}

    def root(node: tuple[int, int]) -> tuple[int, int]:
        while parents.setdefault(node, node) != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for link in links:
        parents[root((0, link.source))] = root((1, link.target))
    components: dict[tuple[int, int], list[Link]] = {}
    for link in links:
        components.setdefault(root((0, link.source)), []).append(link)
    return list(components.values())


class _Pool:
    """Components that are alike but for numbers in paths."""

    def __init__(self, sources: Side, targets: Side, components: Components) -> None:
        self._sides = (sources, targets)
        self._components = components
        self._captures = self._find_captures()

    def rows(self) -> list[DraftRow] | None:
        """Return the rows; None if not all of it follows one."""
        by_key: dict[object, list[Link]] = {}
        for component in self._components:
            by_key.setdefault(self._key(component[0]), []).extend(component)
        kinds: dict[object, list[Link]] = {}
        for links in by_key.values():
            kinds.setdefault(self._kind(links), []).extend(links)
        rows: dict[object, list[DraftRow]] = {}
        for links in kinds.values():
            row = self._row(links)
            if row is None:
                return None
            row = dataclasses.replace(row, pairs=_pairs(links, *self._sides))
            form = row.sources, row.targets, row.gaps, row.notes
            rows.setdefault(form, []).append(row)
        alone = (every[0] for every in rows.values() if len(every) < 2)
        if any(row.fixed and self._has_more(row) for row in alone):
            return None  # one value of a number does not show that two paths have it
        return [
            dataclasses.replace(
                every[0], pairs=tuple(pair for row in every for pair in row.pairs)
            )
            for every in rows.values()
        ]

    def _has_more(self, row: DraftRow) -> bool:
        """Return whether other leaves have the paths of a row but for numbers."""
        for side, paths in enumerate((row.source_paths, row.target_paths)):
            every = self._sides[side].values()
            templates = {leaf.template for leaf in every if leaf.path in {*paths}}
            if sum(leaf.template in templates for leaf in every) > len({*paths}):
                return True
        return False

    def _leaf(self, side: int, link: Link) -> NumberedLeaf:
        return self._sides[side][(link.source, link.target)[side]]

    def _find_captures(
        self,
    ) -> list[dict[tuple[int, Pattern], list[int]]]:
        """Return classes of positions whose numbers are equal along every link."""
        equal: dict[tuple[Pattern, Pattern], np.ndarray] = {}
        seen: dict[tuple[int, Pattern, int], set[int]] = {}
        for link in itertools.chain(*self._components):
            one, two = self._leaf(0, link), self._leaf(1, link)
            for side, leaf in enumerate((one, two)):
                for place, number in enumerate(leaf.numbers):
                    seen.setdefault((side, leaf.template, place), set()).add(number)
            same = np.equal.outer(one.numbers, two.numbers)
            key = one.template, two.template
            equal[key] = equal[key] & same if key in equal else same
        classes: list[dict[tuple[int, Pattern], list[int]]] = []
        sides = [
            sorted({s for s, _ in equal}, key=str),
            sorted({t for _, t in equal}, key=str),
        ]
        # A class starts from a number of one template and takes what equals it.
        first = sides[0][0]
        for place in range(sum(token is None for token in first)):
            if len(seen.get((0, first, place), ())) < 2:
                continue
            nodes: dict[tuple[int, Pattern], list[int]] = {}
            waiting, reached = [(0, first, place)], {(0, first, place)}
            while waiting:
                side, template, position = waiting.pop()
                nodes.setdefault((side, template), []).append(position)
                for (s, t), same in equal.items():
                    if (s, t)[side] != template:
                        continue
                    others = np.flatnonzero(
                        same[position] if side == 0 else same[:, position]
                    )
                    for other in map(int, others):
                        node = (1 - side, (s, t)[1 - side], other)
                        if node not in reached:
                            reached.add(node)
                            waiting.append(node)
            whole = len(nodes) == len(sides[0]) + len(sides[1])
            if whole and nodes not in classes:
                classes.append(
                    {key: sorted(position) for key, position in nodes.items()}
                )
        return classes

    def _key(self, link: Link) -> tuple[int, ...]:
        return self._captured(0, self._leaf(0, link))

    def _captured(self, side: int, leaf: NumberedLeaf) -> tuple[int, ...]:
        """Return the numbers of a path that are captures."""
        return tuple(
            leaf.numbers[each[side, leaf.template][0]] for each in self._captures
        )

    def _kind(self, links: Sequence[Link]) -> object:
        """Return what decides of the form of a row: equal ones have one form."""
        kinds = set()
        for link in links:
            for side in (0, 1):
                leaf = self._leaf(side, link)
                captured = {
                    place
                    for each in self._captures
                    for place in each[side, leaf.template]
                }
                numbers = tuple(
                    n for i, n in enumerate(leaf.numbers) if i not in captured
                )
                kinds.add((side, leaf.template, leaf.shape, numbers))
        return frozenset(kinds)

    def _variants(self, side: int, links: Sequence[Link]) -> list[Variant] | None:
        """Return the leaves of one side as arrays, one for each template."""
        leaves: dict[Pattern, dict[int, NumberedLeaf]] = {}
        for link in links:
            leaf = self._leaf(side, link)
            number = (link.source, link.target)[side]
            leaves.setdefault(leaf.template, {})[number] = leaf
        variants = []
        for template, by_number in leaves.items():
            captured = {
                place for each in self._captures for place in each[side, template]
            }
            first = self._key(links[0])
            rows = [
                leaf.numbers
                for leaf in by_number.values()
                if self._captured(side, leaf) == first
            ]
            free = [i for i in range(len(rows[0])) if i not in captured]
            slots = [i for i in free if len({row[i] for row in rows}) > 1]
            values = [sorted({row[i] for row in rows}) for i in slots]
            by_slot = {
                tuple(leaf.numbers[i] for i in slots) for leaf in by_number.values()
            }
            is_grid = len(by_slot) == len(rows) == math.prod(map(len, values))
            shapes = {leaf.shape for leaf in by_number.values()}
            is_small = all(each[-1] < _MAX_NUMBER for each in values)
            if not is_grid or len(shapes) > 1 or not is_small:
                return None
            fixed = {i: rows[0][i] for i in free if i not in slots}
            variants.append(Variant(template, slots, values, fixed, shapes.pop()))
        return variants

    def _row(self, links: Sequence[Link]) -> DraftRow | None:
        sources, targets = self._variants(0, links), self._variants(1, links)
        if sources is None or targets is None:
            return None
        sides = (sources, targets)
        for side in (1, 0):  # the parts are targets, or sources
            if len(sides[1 - side]) == 1:
                row = self._placed(side, sides[side], sides[1 - side][0], links)
                if row is not None:
                    return row
        return None

    def _placed(
        self, side: int, parts: list[Variant], whole: Variant, links: Sequence[Link]
    ) -> DraftRow | None:
        """Return the row if each part is somewhere in the whole.

        Args:
            side: on which the parts are.
            parts: arrays.
            whole: the array on the other side.
            links: between them.
        """
        maps = []
        for part in parts:
            flat, places = self._points(side, part, whole, links)
            index_map = fit_map(part.ranked, flat, places, whole.numbered)
            if index_map is None:
                return None
            maps.append(index_map)
        captures = {
            (s, template, place): atom
            for atom, each in enumerate(self._captures)
            for (s, template), places in each.items()
            for place in places
        }
        return row_of_parts(side, parts, whole, maps, captures)

    def _points(
        self, side: int, part: Variant, whole: Variant, links: Sequence[Link]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where numbers are in the part, and where in the whole."""
        ranks = [{v: i for i, v in enumerate(values)} for values in part.values]
        flat, places = [], []
        for link in links:
            leaf, other = self._leaf(side, link), self._leaf(1 - side, link)
            if leaf.template != part.template:
                continue
            inner, outer = (link.source_flat, link.target_flat)[
                :: 1 if side == 0 else -1
            ]
            slot = [
                r[leaf.numbers[i]] for r, i in zip(ranks, part.positions, strict=True)
            ]
            flat.append(inner + _flat(slot, part.ranked) * math.prod(part.shape))
            slot = [other.numbers[i] for i in whole.positions]
            places.append(outer + _flat(slot, whole.numbered) * math.prod(whole.shape))
        return np.concatenate(flat), np.concatenate(places)


def _flat(values: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for value, size in zip(values, sizes, strict=False):
        number = number * size + value
    return number


def _pairs(
    links: Iterable[Link],
    sources: Side,
    targets: Side,
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return the leaves of each component."""
    return tuple(
        (
            tuple(dict.fromkeys(sources[each.source].path for each in component)),
            tuple(dict.fromkeys(targets[each.target].path for each in component)),
        )
        for component in _components(list(links))
    )
