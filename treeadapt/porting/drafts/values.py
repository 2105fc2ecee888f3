"""Rows from values: which numbers of the source are which of the target.

Leaves that share numbers are linked. What is linked, and alike but for the numbers in
its paths, is one row: numbers that are equal along every link are captures, all others
are axes of one array that the leaves are together. ``mixed_radix`` finds how an index
of one side is made of those of the other one, ``parts`` writes it as places.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from treeadapt.porting.drafts.links import (
    Components,
    Link,
    NumberedLeaf,
    reread,
    templates_of,
    written_back,
)
from treeadapt.porting.drafts.merging import canonical
from treeadapt.porting.drafts.parts import Pattern
from treeadapt.porting.drafts.pools import Counts, Pool, components_of
from treeadapt.porting.drafts.rows import (
    DraftAddress,
    DraftRow,
    Hole,
    Tokens,
    is_count,
    windowed,
)
from treeadapt.porting.drafts.segments import (
    cut_pool,
    cuts_of_pool,
    with_whole_leaves,
)

_MOST_LAYERS = 64  # of a block
_MOST_FORMS = 4  # in which some layers are moved, and others otherwise
_MOST_APART = 1_024  # leaves that are looked at one by one
_SEEN = "these numbers were seen at this size alone"
_MOST_NAMES = 8  # numbers at one place of a path that may be words


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
    forms: dict[object, list[DraftRow]] = {}
    by_pool: dict[object, list[DraftRow]] = {}
    for ends, pool in pools.items():
        form = _form_of_link(pool)
        if form in forms:
            by_pool[ends] = [_between(row, pool[0][0]) for row in forms[form]]
            continue
        by_pool[ends] = _rows_of_pool(pool, counts)
        if form is not None and all(len(row.places) == 2 for row in by_pool[ends]):
            forms[form] = [*map(canonical, by_pool[ends])]
    failed = {ends: pools[ends] for ends, rows in by_pool.items() if not rows}
    rows = [row for rows in by_pool.values() for row in rows]
    return rows + _rows_of_words(failed, counts)


def _form_of_link(pool: Components) -> object:
    """Return what decides the row of one link of names without numbers, else None.

    Names of words alone do not: what has the same shapes and places has the same row.
    """
    links = [*itertools.islice(itertools.chain(*pool), 2)]
    if len(links) > 1 or any(leaf.numbers for leaf in links[0].ends):
        return None
    digests = (hashlib.sha256(flat.tobytes()).digest() for flat in links[0].flats)
    return (*(leaf.shape for leaf in links[0].ends), *digests)


def _between(row: DraftRow, link: Link) -> DraftRow:
    """Return the row of one link as that of another one."""
    (one,), (two,) = (
        (dataclasses.replace(place, tokens=tuple(filter(None, leaf.template))),)
        for place, leaf in zip(row.places, link.ends, strict=True)
    )
    old, new = (leaf.path for leaf in link.ends)
    pairs = (((old,), (new,)),)
    return dataclasses.replace(row, sources=(one,), targets=(two,), pairs=pairs)


def rows_of_counted_names(
    sources: Iterable[NumberedLeaf],
    targets: Iterable[NumberedLeaf],
    links: Iterable[Link],
) -> list[DraftRow]:
    """Return rows in which numbers are names, of arrays that are only counted.

    As of parameters of a list: ``t7`` and ``t9`` are one array, as ``t8`` and ``t10``
    are another one; or of two norms, of which ``1`` is ``3``, and ``2`` is ``2``.

    Args:
        sources: all leaves of the source.
        targets: all leaves of the target.
        links: between some of them, that follow no other row.
    """
    counts = _counted(sources, targets)
    rows: list[DraftRow] = []
    for pool in _pools(links).values():
        alone: list[DraftRow] = []
        if len(pool) <= _MOST_NAMES:
            every = [_rows_with_a_name([each], counts, in_order=True) for each in pool]
            alone = [row for of_one in every for row in of_one or () if all(every)]
        rows += (
            alone or _rows_of_other_numbers(pool, counts) or _rows_apart(pool, counts)
        )
    return rows


def _rows_apart(pool: Components, counts: Counts) -> list[DraftRow]:
    """Return a row for each leaf that is one of the target, whatever their numbers are.

    As of blocks whose numbers go on from stage to stage, some of which are left.
    """
    if not all(len(component) == 1 for component in pool) or len(pool) > _MOST_APART:
        return []
    every = [Pool([component], counts).rows() for component in pool]
    return [row.marked("numbers", _SEEN) for rows in every for row in rows or ()]


def _rows_of_other_numbers(pool: Components, counts: Counts) -> list[DraftRow]:
    """Return the rows if each value of a number is one of a number of the other path.

    They list what no ``take`` says, because the numbers of one side do not count.
    """
    links = [*itertools.chain(*pool)]
    if len({templates_of(link) for link in links}) > 1:
        return []
    first = links[0].ends
    for places in itertools.product(*(range(len(leaf.numbers)) for leaf in first)):
        pairs = {
            tuple(leaf.numbers[i] for leaf, i in zip(link.ends, places, strict=True))
            for link in links
        }
        olds, news = ({*numbers} for numbers in zip(*pairs, strict=True))
        is_one_to_one = len(pairs) == len(olds) == len(news)
        is_same = all(old == new for old, new in pairs)
        can_take = _count(olds) and max(news) - min(news) < len(news)
        if (
            not 1 < len(pairs) <= _MOST_NAMES
            or not is_one_to_one
            or is_same
            or can_take
        ):
            continue
        named = pool
        for side, (leaf, place) in enumerate(zip(first, places, strict=True)):
            own = functools.partial(_named, template=leaf.template, place=place)
            named = reread(named, side, own)
        parts = _pools(itertools.chain(*named)).values()
        every = [Pool(part, counts).rows() for part in parts]
        if all(every):
            # What is united as a list may get a mark (see ``single_numbers``).
            return [row for rows in every for row in rows or ()]
    return []


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
    pools = _pools(links).values()
    return [row for pool in pools for row in _rows_in_order(pool, counts, numbers)]


def _rows_in_order(
    pool: Components, counts: Counts, numbers: Mapping[Pattern, Sequence[int]]
) -> list[DraftRow]:
    """Return the rows that take numbers, also if a word of the paths is a number."""
    if rows := Pool(pool, counts, numbers).rows():
        return rows
    every = (
        _words_in_order(each, pool, counts, numbers) for each in _words_within(pool)
    )
    return next(filter(None, every), [])


def _words_in_order(
    words: _Words,
    pool: Components,
    counts: Counts,
    numbers: Mapping[Pattern, Sequence[int]],
) -> list[DraftRow]:
    """Return the rows that take numbers, with words in place of some."""
    every = dict(numbers)
    for template in words.of if words.side == 0 else ():
        new, place = words.template(template)
        own = numbers[template]
        every[new] = [*own[:place], len(words.texts), *own[place:]]
    return words.rows(pool, lambda numbered: Pool(numbered, counts, every).rows())


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
    for component in components_of(links):
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
    texts = tuple("".join(map(str, t[first : len(t) - last])) for t in templates)
    words = _Words(side, first, last, texts, dict(zip(templates, texts, strict=True)))
    pool = [component for each in templates for component in pools[each]]
    return words.rows(pool, lambda numbered: _rows_of_pool(numbered, counts))


@dataclasses.dataclass(frozen=True)
class _Words:
    """Words at one place of the paths of a side, which are read as numbers.

    Attributes:
        side: of the paths.
        first: how many tokens are before the words.
        last: how many are after them.
        texts: the words, in the order of their numbers.
        of: the word of each template.
    """

    side: int
    first: int
    last: int
    texts: tuple[str, ...]
    of: Mapping[Pattern, str]

    def rows(
        self,
        pool: Components,
        rows_of: Callable[[Components], Sequence[DraftRow] | None],
    ) -> list[DraftRow]:
        """Return rows with the words in a list, of those of links with numbers."""
        rows = rows_of(reread(pool, self.side, self._numbered)) or ()
        return [
            new for row in rows if (new := written_back(row, self.side, self._worded))
        ]

    def template(self, template: Pattern) -> tuple[Pattern, int]:
        """Return a template with a number for the word, and its place among numbers."""
        before, after = template[: self.first], template[len(template) - self.last :]
        return (*before, None, *after), before.count(None)

    def _numbered(self, leaf: NumberedLeaf) -> NumberedLeaf:
        template, place = self.template(leaf.template)
        nth = self.texts.index(self.of[leaf.template])
        numbers = (*leaf.numbers[:place], nth, *leaf.numbers[place:])
        return dataclasses.replace(leaf, template=template, numbers=numbers)

    def _worded(self, address: DraftAddress) -> DraftAddress | None:
        token, end = address.tokens[self.first], self.first + 1
        if not isinstance(token, Hole):
            return address.with_tokens(self.first, end, self.texts[int(token)])
        if token.shift or len(token.atoms) > 1:
            return None
        hole = dataclasses.replace(token, texts=self.texts)
        return address.with_tokens(self.first, end, hole)


def _words_within(pool: Components) -> Iterator[_Words]:
    """Yield words that are a number of one pool, each with every other path.

    As ``forward`` and ``reverse`` of two biases each, which one array has in two rows,
    one bias after the other.
    """
    for side in (1, 0):
        links = [*itertools.chain(*pool)]
        templates = [*{link.ends[side].template: None for link in links}]
        lengths = {*map(len, templates)}
        for at in range(lengths.pop()) if len(lengths) == 1 < len(templates) else ():
            others = {(*t[:at], *t[at + 1 :]) for t in templates}
            firsts: dict[str | None, int] = {}
            for link in links:
                word, start = link.ends[side].template[at], min(link.flats[1 - side])
                firsts[word] = min(start, firsts.get(word, start))
            texts = sorted(filter(None, firsts), key=firsts.__getitem__)
            is_grid = len(texts) * len(others) == len(templates)
            if len(texts) == len(firsts) > 1 and is_grid:
                last = len(templates[0]) - at - 1
                of = {t: str(t[at]) for t in templates}
                yield _Words(side, at, last, tuple(texts), of)


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
            rows = Pool(reread(pool, side, split), counts).rows() or []
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
                    if Pool(reread(pool, side, split), counts).rows():
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
            rows = Pool(segments, counts).rows() or _rows_in_blocks(segments, counts)
            every = [with_whole_leaves(row, side) for row in rows]
            if rows and all(every):
                return [row for row in every if row]
    return []


def _rows_of_pool(pool: Components, counts: Counts) -> list[DraftRow]:
    """Return the rows of components whose paths are alike but for numbers."""
    rows = Pool(pool, counts).rows()
    if rows is not None:
        return rows
    named = _rows_with_a_name(pool, counts)
    if named is not None:
        return named
    if rows := _rows_in_blocks(pool, counts) or _rows_of_segments(pool, counts):
        return rows
    for words in _words_within(pool):
        if rows := words.rows(pool, lambda numbered: Pool(numbered, counts).rows()):
            return rows
    shapes: dict[object, list[Sequence[Link]]] = {}  # apart, some may follow one
    for component in pool:
        key = frozenset(
            (a.shape, b.shape) for a, b in (link.ends for link in component)
        )
        shapes.setdefault(key, []).append(component)
    if len(shapes) == 1:
        return _rows_of_forms(pool, counts)
    parts = (
        Pool(part, counts).rows()
        or _rows_with_a_name(part, counts)
        or _rows_of_forms(part, counts)
        for part in shapes.values()
    )
    return [row for part in parts for row in part or ()]


def _rows_of_forms(pool: Components, counts: Counts) -> list[DraftRow]:
    """Return the rows if the leaves of some numbers are moved otherwise than others.

    As where one square map of several is turned, which no shape shows.
    """
    forms: dict[object, list[Sequence[Link]]] = {}
    for component in pool if 1 < len(pool) <= _MOST_APART else ():
        rows = Pool([component], counts).rows()
        if not rows:
            return []
        forms.setdefault(frozenset(map(_form, rows)), []).append(component)
    if not 1 < len(forms) <= _MOST_FORMS:
        return []
    every = [Pool(part, counts).rows() for part in forms.values()]
    return [row for rows in every for row in rows or ()] if all(every) else []


def _form(row: DraftRow) -> object:
    """Return what a row does with axes, whatever the numbers of its paths are."""
    row = canonical(row)
    paths = (
        tuple(None if isinstance(t, Hole) or is_count(t) else t for t in place.tokens)
        for place in row.places
    )
    return tuple(paths), tuple(place.axes for place in row.places), row.takes


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
            rows = Pool(reread(pool, side, named), counts).rows() or []
            are_copies = all(len(r.places) > 2 and not r.has_bracket for r in rows)
            if rows and (are_copies or len(shapes[template]) > 1):
                return rows
            if rows and in_order and all(map(_is_ascending, rows)):
                return [row.marked("numbers", _SEEN) for row in rows]
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
