"""Rows from values: which numbers of the source are which of the target.

Leaves that share numbers are linked. What is linked, and alike but for the numbers in
its paths, is one row: numbers that are equal along every link are captures, all others
are axes of one array that the leaves are together. ``mixed_radix`` finds how an index
of one side is made of those of the other one, ``parts`` writes it as places.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from treeadapt.migrations.chain import roots_of
from treeadapt.porting.drafts.links import (
    Components,
    Link,
    NumberedLeaf,
    reread,
    templates_of,
    written_back,
)
from treeadapt.porting.drafts.mixed_radix import fit_map
from treeadapt.porting.drafts.parts import Pattern, Variant, row_of_parts
from treeadapt.porting.drafts.rows import (
    DraftAddress,
    DraftRow,
    Hole,
    Tokens,
    is_count,
    template_of,
    windowed,
)
from treeadapt.porting.drafts.segments import (
    cut_pool,
    cuts_of_pool,
    with_whole_leaves,
)
from treeadapt.porting.drafts.taken import (
    SelectedOf,
    ordered_in,
    selected_of,
    taken_links,
    with_takes,
)

_MAX_NUMBER = 10**6
_MOST_LAYERS = 64  # of a block
_MOST_NAMES = 8  # numbers at one place of a path that may be words


#: How many leaves the source, and the target, have of each template.
Counts: TypeAlias = tuple[Counter[Pattern], Counter[Pattern]]

#: A number of paths of a side, by what is before it, and how many values a block has.
Blocks: TypeAlias = tuple[int, Pattern, int]


def rows_of_links(
    sources: Iterable[NumberedLeaf],
    targets: Iterable[NumberedLeaf],
    links: Iterable[Link],
) -> list[DraftRow]:
    """Return the rows that shared numbers show; none for links that follow no row.

    Args:
        sources: all leaves of the source.
        targets: all leaves of the target.
        links: between some of them.
    """
    counts = _counted(sources, targets)
    pools = _pools(links)
    by_pool = {ends: _rows_of_pool(pool, counts) for ends, pool in pools.items()}
    failed = {ends: pools[ends] for ends, rows in by_pool.items() if not rows}
    rows = [row for rows in by_pool.values() for row in rows]
    return rows + _rows_of_words(failed, counts)


def rows_of_counted_names(
    sources: Iterable[NumberedLeaf],
    targets: Iterable[NumberedLeaf],
    links: Iterable[Link],
) -> list[DraftRow]:
    """Return rows in which numbers are names, of arrays that are only counted.

    As of parameters of a list: ``t7`` and ``t9`` are one array, as ``t8`` and ``t10``
    are another one.

    Args:
        sources: all leaves of the source.
        targets: all leaves of the target.
        links: between some of them, that follow no other row.
    """
    counts = _counted(sources, targets)
    rows: list[DraftRow] = []
    for pool in _pools(links).values():
        if len(pool) <= _MOST_NAMES:
            every = [_rows_with_a_name([each], counts, in_order=True) for each in pool]
            rows += [row for of_one in every for row in of_one or () if all(every)]
    return rows


def rows_of_orders(
    sources: Iterable[NumberedLeaf],
    targets: Iterable[NumberedLeaf],
    links: Iterable[Link],
) -> list[DraftRow]:
    """Return rows that take numbers in another order, or some of them.

    Args:
        sources: all leaves of the source.
        targets: all leaves of the target.
        links: between some of them, that follow no other row.
    """
    sources, alike = [*sources], dict[Pattern, list[Sequence[int]]]()
    for leaf in sources:
        alike.setdefault(leaf.template, []).append(leaf.numbers)
    numbers = {
        template: [_count({*each}) for each in zip(*every, strict=True)]
        for template, every in alike.items()
    }
    counts = _counted(sources, targets)
    pools = [_Pool(pool, counts, numbers) for pool in _pools(links).values()]
    return [row for pool in pools for row in pool.rows() or ()]


def _count(numbers: Collection[int]) -> int:
    """Return how many numbers there are; 0 of some that do not count from 0."""
    return len(numbers) if max(numbers) < len(numbers) else 0


def _counted(
    sources: Iterable[NumberedLeaf], targets: Iterable[NumberedLeaf]
) -> Counts:
    return (
        Counter(leaf.template for leaf in sources),
        Counter(leaf.template for leaf in targets),
    )


def _pools(links: Iterable[Link]) -> dict[object, list[list[Link]]]:
    """Return links that hang together, by the templates of both of their ends."""
    pools: dict[object, list[list[Link]]] = {}
    for component in _components(links):
        ends = {end for link in component for end in enumerate(templates_of(link))}
        pools.setdefault(frozenset(ends), []).append(component)
    return pools


def _rows_of_words(pools: Mapping[Any, Components], counts: Counts) -> list[DraftRow]:
    """Return the rows of pools that are one if words of a path are numbers.

    As the layers of a block are that are called ``local`` and ``global``.
    """
    rows: list[DraftRow] = []
    done: set[Any] = set()
    for side in (1, 0):
        alike: dict[object, dict[Pattern, Components]] = {}
        for ends, pool in pools.items():
            own = [template for s, template in ends if s == side]
            others = frozenset(end for end in ends if end[0] != side)
            if len(own) == 1 and ends not in done:
                alike.setdefault(others, {})[own[0]] = pool
        for by_template in alike.values():
            window = None
            if len(by_template) > 1:
                window = windowed([*map(_as_tokens, by_template)])
            if window is not None:
                every = _rows_of_window(side, by_template, window, counts)
                rows += every
                seen = {(side, template) for template in by_template}
                done |= {ends for ends in pools if every and ends & seen}
    return rows


def _as_tokens(template: Pattern) -> Tokens:
    return tuple(Hole(()) if token is None else token for token in template)


def _rows_of_window(
    side: int,
    pools: Mapping[Pattern, Components],
    window: tuple[int, int],
    counts: Counts,
) -> list[DraftRow]:
    """Return the rows of pools whose paths differ within a window on one side."""
    first, last = window

    def least(template: Pattern) -> list[tuple[int, ...]]:
        links = itertools.chain(*pools[template])
        return sorted(link.ends[1 - side].numbers for link in links)

    templates = sorted(pools, key=least)
    place = sum(token is None for token in templates[0][:first])
    words = tuple("".join(map(str, t[first : len(t) - last])) for t in templates)

    def numbered(leaf: NumberedLeaf) -> NumberedLeaf:
        template, nth = leaf.template, templates.index(leaf.template)
        return dataclasses.replace(
            leaf,
            template=(*template[:first], None, *template[len(template) - last :]),
            numbers=(*leaf.numbers[:place], nth, *leaf.numbers[place:]),
        )

    def worded(address: DraftAddress) -> DraftAddress | None:
        token = address.tokens[first]
        if not isinstance(token, Hole):
            return address.with_tokens(first, first + 1, words[int(token)])
        if token.shift or len(token.atoms) > 1:
            return None
        hole = dataclasses.replace(token, texts=words)
        return address.with_tokens(first, first + 1, hole)

    pool = [component for each in templates for component in pools[each]]
    rows = _rows_of_pool(reread(pool, side, numbered), counts)
    return [new for row in rows if (new := written_back(row, side, worded))]


def _rows_in_blocks(pool: Components, counts: Counts) -> list[DraftRow]:
    """Return the rows if a number of a path is two: of a block, and within it.

    The one within the block is a number of the other path.
    """
    links = [*itertools.chain(*pool)]
    for side in (0, 1):
        numbers = [[link.ends[s].numbers for link in links] for s in (side, 1 - side)]
        lengths = (range(min(map(len, every))) for every in numbers)
        for place, other in itertools.product(*lengths):
            outer = [each[place] for each in numbers[0]]
            inner = [each[other] for each in numbers[1]]
            size = math.gcd(*(n - i for n, i in zip(outer, inner, strict=True)))
            if not 0 <= max(inner) < size or max(outer) < size:
                continue
            split = functools.partial(_in_block, place=place, size=size)
            rows = _Pool(reread(pool, side, split), counts).rows() or []
            joined = [_with_blocks(row, side, place, size) for row in rows]
            if rows and all(joined):
                return [row for row in joined if row]
    return []


def blocks_of_links(
    sources: Iterable[NumberedLeaf],
    targets: Iterable[NumberedLeaf],
    links: Iterable[Link],
) -> Counter[Blocks]:
    """Return which numbers of paths are two, of a block and within it; how often.

    As of a scan of blocks, each of which scans its first layers: these have a row if
    their number is two, and none without, because others are between the blocks.

    Args:
        sources: all leaves of the source.
        targets: all leaves of the target.
        links: between some of them, that follow no row.
    """
    counts = _counted(sources, targets)
    found: Counter[Blocks] = Counter()
    for pool in _pools(links).values():
        for side in (0, 1):
            leaves = [link.ends[side] for component in pool for link in component]
            for place in range(min(len(leaf.numbers) for leaf in leaves)):
                most = max(leaf.numbers[place] for leaf in leaves)
                for size in range(2, min(most, _MOST_LAYERS) + 1):
                    split = functools.partial(_in_block, place=place, size=size)
                    if _Pool(reread(pool, side, split), counts).rows():
                        templates = {leaf.template for leaf in leaves}
                        found.update((side, _above(t, place), size) for t in templates)
                        break
    return found


def _above(template: Pattern, place: int) -> Pattern:
    """Return what is before a number of a path."""
    at = [i for i, token in enumerate(template) if token is None][place]
    return template[:at]


def _in_block(leaf: NumberedLeaf, place: int, size: int) -> NumberedLeaf:
    """Return a leaf with two numbers in place of one."""
    at = [i for i, token in enumerate(leaf.template) if token is None][place]
    before, (number, *after) = leaf.numbers[:place], leaf.numbers[place:]
    return dataclasses.replace(
        leaf,
        template=(*leaf.template[:at], None, *leaf.template[at:]),
        numbers=(*before, *divmod(number, size), *after),
    )


def _with_blocks(row: DraftRow, side: int, place: int, size: int) -> DraftRow | None:
    """Return a row with one number in place of two; None if they are something else."""
    inner: set[int] = set()

    def joined(address: DraftAddress) -> DraftAddress | None:
        at = [n for n, t in enumerate(address.tokens) if isinstance(t, Hole)]
        start = at[place]
        holes = [t for t in address.tokens[start : start + 2] if isinstance(t, Hole)]
        are_plain = not any(h.shift or h.texts or len(h.atoms) > 1 for h in holes)
        if len(holes) < 2 or not are_plain:
            return None
        inner.update(holes[1].atoms)
        hole = Hole((*holes[0].atoms, *holes[1].atoms))
        # 0 and 3 are the first of the first two and the second of the second two:
        # numbers of blocks that are those within them do not count through.
        if len({*hole.atoms}) < len(hole.atoms):
            return None
        return address.with_tokens(start, start + 2, hole)

    new = written_back(row, side, joined)
    if new is None:
        return None
    sizes = {**row.sizes, **dict.fromkeys(inner, size)}
    return dataclasses.replace(new, sizes=sizes, gaps=row.gaps | inner)


def _rows_of_segments(pool: Components, counts: Counts) -> list[DraftRow]:
    """Return the rows if leaves of one side are several, one after the other."""
    for side in (0, 1):
        if cuts := cuts_of_pool(pool, side):
            segments = cut_pool(pool, side, cuts)
            rows = _Pool(segments, counts).rows() or _rows_in_blocks(segments, counts)
            every = [with_whole_leaves(row, side) for row in rows]
            if rows and all(every):
                return [row for row in every if row]
    return []


def _rows_of_pool(pool: Components, counts: Counts) -> list[DraftRow]:
    """Return the rows of components whose paths are alike but for numbers."""
    rows = _Pool(pool, counts).rows()
    if rows is not None:
        return rows
    named = _rows_with_a_name(pool, counts)
    if named is not None:
        return named
    if rows := _rows_in_blocks(pool, counts) or _rows_of_segments(pool, counts):
        return rows
    shapes: dict[object, list[Sequence[Link]]] = {}  # apart, some may follow one
    for component in pool:
        key = frozenset(
            (a.shape, b.shape) for a, b in (link.ends for link in component)
        )
        shapes.setdefault(key, []).append(component)
    if len(shapes) == 1:
        return []
    parts = (
        _Pool(part, counts).rows() or _rows_with_a_name(part, counts)
        for part in shapes.values()
    )
    return [row for part in parts for row in part or ()]


def _rows_with_a_name(
    pool: Components, counts: Counts, *, in_order: bool = False
) -> list[DraftRow] | None:
    """Return the rows if one number of a path is a part of its name, as in ``w0``.

    So are those of arrays that follow each other and differ in size, and of ties; and
    where nothing else is a row, ``in_order``, of some that are a stack in the order of
    their numbers. What is a stack in another order has no row.
    """
    for side in (0, 1):
        values: dict[tuple[Pattern, int], set[int]] = {}
        shapes: dict[Pattern, set[tuple[int, ...]]] = {}
        for leaf in (link.ends[side] for component in pool for link in component):
            shapes.setdefault(leaf.template, set()).add(leaf.shape)
            for place, number in enumerate(leaf.numbers):
                values.setdefault((leaf.template, place), set()).add(number)
        for (template, place), numbers in values.items():
            if not 1 < len(numbers) <= _MOST_NAMES:
                continue
            named = functools.partial(_named, template=template, place=place)
            rows = _Pool(reread(pool, side, named), counts).rows() or []
            are_copies = all(len(r.places) > 2 and not r.has_bracket for r in rows)
            if rows and (are_copies or len(shapes[template]) > 1):
                return rows
            if rows and in_order and all(map(_is_ascending, rows)):
                note = "these numbers were seen at this size alone"
                return [row.marked("sizes", note) for row in rows]
    return None


def _is_ascending(row: DraftRow) -> bool:
    """Return whether a row has one list, of numbers in their order."""
    tokens = [token for place in row.places for token in place.tokens]
    lists = [token.texts for token in tokens if isinstance(token, Hole) and token.texts]
    if len(lists) != 1 or not all(map(is_count, lists[0])):
        return False
    return [*lists[0]] == sorted(lists[0], key=int)


def _named(leaf: NumberedLeaf, template: Pattern, place: int) -> NumberedLeaf:
    """Return a leaf one number of which is a word, if it has a template."""
    if leaf.template != template:
        return leaf
    at = [i for i, token in enumerate(template) if token is None][place]
    return dataclasses.replace(
        leaf,
        template=(*template[:at], str(leaf.numbers[place]), *template[at + 1 :]),
        numbers=leaf.numbers[:place] + leaf.numbers[place + 1 :],
    )


def _components(links: Iterable[Link]) -> list[list[Link]]:
    """Divide links into those that hang together."""
    links = [*links]
    ends = [[(side, leaf.path) for side, leaf in enumerate(x.ends)] for x in links]
    roots = roots_of(ends)
    components: dict[object, list[Link]] = {}
    for link, (source, _) in zip(links, ends, strict=True):
        components.setdefault(roots[source], []).append(link)
    return [*components.values()]


class _Pool:
    """Components that are alike but for numbers in paths.

    Args:
        components: links that hang together.
        counts: of leaves.
        numbers: how many there are at each place of the source's paths; where they are
            known, rows may ``take``.
    """

    def __init__(
        self,
        components: Components,
        counts: Counts,
        numbers: Mapping[Pattern, Sequence[int]] | None = None,
    ) -> None:
        self._components, self._counts = components, counts
        self._numbers = numbers or {}
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
            row = dataclasses.replace(row, pairs=_pairs(links))
            form = row.sources, row.targets, row.gaps, row.notes, row.takes
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
        for counts, paths in zip(
            self._counts, (row.source_paths, row.target_paths), strict=True
        ):
            templates = {*map(template_of, paths)}
            if sum(counts[each] for each in templates) > len({*paths}):
                return True
        return False

    def _find_captures(self) -> list[dict[tuple[int, Pattern], list[int]]]:
        """Return classes of positions whose numbers are equal along every link."""
        equal: dict[tuple[Pattern, Pattern], np.ndarray] = {}
        seen: dict[tuple[int, Pattern, int], set[int]] = {}
        for link in itertools.chain(*self._components):
            for side, leaf in enumerate(link.ends):
                for place, number in enumerate(leaf.numbers):
                    seen.setdefault((side, leaf.template, place), set()).add(number)
            same = np.equal.outer(link.ends[0].numbers, link.ends[1].numbers)
            key = templates_of(link)
            equal[key] = equal[key] & same if key in equal else same
        templates = {end for pair in equal for end in enumerate(pair)}
        classes: dict[object, dict[tuple[int, Pattern], list[int]]] = {}
        for node, root in roots_of(
            ((0, source, int(a)), (1, target, int(b)))
            for (source, target), same in equal.items()
            for a, b in np.argwhere(same)
        ).items():
            if len(seen[node]) > 1:
                side, template, place = node
                classes.setdefault(root, {}).setdefault((side, template), []).append(
                    place
                )
        return [each for each in classes.values() if each.keys() == templates]

    def _key(self, link: Link) -> tuple[int, ...]:
        return self._captured(0, link.ends[0])

    def _captured(self, side: int, leaf: NumberedLeaf) -> tuple[int, ...]:
        """Return the numbers of a path that are captures."""
        return tuple(
            leaf.numbers[each[side, leaf.template][0]] for each in self._captures
        )

    def _kind(self, links: Sequence[Link]) -> object:
        """Return what decides of the form of a row: equal ones have one form."""
        kinds = set()
        for link in links:
            for side, leaf in enumerate(link.ends):
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
        leaves: dict[Pattern, dict[str, NumberedLeaf]] = {}
        for leaf in (link.ends[side] for link in links):
            leaves.setdefault(leaf.template, {})[leaf.path] = leaf
        variants = []
        for template, by_path in leaves.items():
            captured = {
                place for each in self._captures for place in each[side, template]
            }
            first = self._key(links[0])
            rows = [
                leaf.numbers
                for leaf in by_path.values()
                if self._captured(side, leaf) == first
            ]
            free = [i for i in range(len(rows[0])) if i not in captured]
            slots = [i for i in free if len({row[i] for row in rows}) > 1]
            values = [sorted({row[i] for row in rows}) for i in slots]
            by_slot = {
                tuple(leaf.numbers[i] for i in slots) for leaf in by_path.values()
            }
            is_grid = len(by_slot) == len(rows) == math.prod(map(len, values))
            shapes = {leaf.shape for leaf in by_path.values()}
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
        row = self._plain_row((sources, targets), links)
        if row is not None:
            return row
        for selected in self._selected(sources, targets, links):
            if any(selected.values()):
                taken = [*taken_links(links, selected)]
                sides = self._variants(0, taken), self._variants(1, taken)
                row = self._plain_row(sides, taken)
                if row is not None and (row := with_takes(row, selected)):
                    return row
        return None

    def _selected(
        self, sources: list[Variant], targets: list[Variant], links: Sequence[Link]
    ) -> Iterator[SelectedOf]:
        """Yield which values of the sources' axes, or numbers, the targets may have."""
        if not self._numbers:
            return
        counts = [self._numbers[each.template] for each in sources]
        for in_parts in (True, False):
            if len(sources) == 1:
                (whole,) = sources
                every = [
                    selected_of(
                        part,
                        whole,
                        self._points(1, part, whole, links),
                        counts[0],
                        in_parts=in_parts,
                    )
                    for part in targets
                ]
                are_one = every == every[:1] * len(every)
                yield {whole.template: every[0] if are_one else ()}
            if len(targets) == 1:
                yield {
                    part.template: ordered_in(
                        part,
                        targets[0],
                        self._points(0, part, targets[0], links),
                        own,
                        in_parts=in_parts,
                    )
                    for part, own in zip(sources, counts, strict=True)
                }

    def _plain_row(
        self,
        sides: tuple[list[Variant] | None, list[Variant] | None],
        links: Sequence[Link],
    ) -> DraftRow | None:
        """Return the row in which no number is left out, or in another order."""
        sources, targets = sides
        if sources is None or targets is None:
            return None
        for side in (1, 0):  # the parts are targets, or sources
            parts, wholes = (targets, sources)[:: 2 * side - 1]
            if len(wholes) == 1:
                row = self._placed(side, parts, wholes[0], links)
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
            leaf, other = link.ends[side], link.ends[1 - side]
            if leaf.template != part.template:
                continue
            inner, outer = link.flats[side], link.flats[1 - side]
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
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return the leaves of each component."""
    every = ([link.ends for link in component] for component in _components(links))
    return tuple(
        (
            tuple(dict.fromkeys(source.path for source, _ in ends)),
            tuple(dict.fromkeys(target.path for _, target in ends)),
        )
        for ends in every
    )
