"""Links that hang together as one row, or as several that are alike.

Takes components of links whose paths are alike but for numbers; gives their rows, or
none if one of them follows no row. Which components are tried together, and what of
their paths is a number, is up to ``values``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from treeadapt.migrations.chain import roots_of
from treeadapt.porting.drafts.links import (
    Components,
    Link,
    NumberedLeaf,
    templates_of,
)
from treeadapt.porting.drafts.mixed_radix import fit_map
from treeadapt.porting.drafts.parts import Pattern, Variant, row_of_parts
from treeadapt.porting.drafts.rows import DraftRow, template_of
from treeadapt.porting.drafts.taken import (
    SelectedOf,
    ordered_in,
    selected_of,
    taken_links,
    with_takes,
)

_MAX_NUMBER = 10**6

#: How many leaves the source, and the target, have of each template.
Counts: TypeAlias = tuple[Counter[Pattern], Counter[Pattern]]


def components_of(links: Iterable[Link]) -> list[list[Link]]:
    """Divide links into those that hang together."""
    links = [*links]
    ends = [[(side, leaf.path) for side, leaf in enumerate(x.ends)] for x in links]
    roots = roots_of(ends)
    components: dict[object, list[Link]] = {}
    for link, (source, _) in zip(links, ends, strict=True):
        components.setdefault(roots[source], []).append(link)
    return [*components.values()]


class Pool:
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
    every = ([link.ends for link in component] for component in components_of(links))
    return tuple(
        (
            tuple(dict.fromkeys(source.path for source, _ in ends)),
            tuple(dict.fromkeys(target.path for _, target in ends)),
        )
        for ends in every
    )
