"""What is drafted where one table cannot say it: two sides that are nearer each other.

A first table makes one side, with numbers of layers that are two; a last table takes
the other one, with such numbers, or with the summands of what is a sum. The draft
between them is as any other.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from treeadapt.migrations.migration import Migration
from treeadapt.porting.drafts.answering import led_back
from treeadapt.porting.drafts.checking import in_order
from treeadapt.porting.drafts.evidence import Evidence
from treeadapt.porting.drafts.finishing import rest
from treeadapt.porting.drafts.inputs import Side
from treeadapt.porting.drafts.merging import merged
from treeadapt.porting.drafts.migration_draft import MigrationDraft
from treeadapt.porting.drafts.ordering import rows_apart
from treeadapt.porting.drafts.parts import Pattern, without_endings
from treeadapt.porting.drafts.rows import (
    DraftAddress,
    DraftRow,
    Hole,
    Tokens,
    by_template,
    is_count,
    template_of,
    tokens_of,
)
from treeadapt.porting.drafts.values import blocks_of_links
from treeadapt.porting.drafts.writing import as_table, escaped, written

_CHAIN = (
    "One table cannot say it: these are {}, one after the other, as `a.then(b)` is."
)
_ENDS = frozenset("/.-_")  # of a number


@dataclasses.dataclass(frozen=True)
class NearerSides:
    """Two sides, and the tables around what is drafted between them.

    Attributes:
        calls: the sides, once, or twice with different numbers.
        names: of each side, those of its leaves that it has another name for here.
        tables: those above the draft, and those below it.
        inner: sides, and what is before a number of their paths that tables made, and
            whose count is in ``sizes``.
    """

    calls: Sequence[tuple[Side, Side]]
    names: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    tables: tuple[tuple[Migration, ...], tuple[Migration, ...]] = ((), ())
    inner: frozenset[tuple[int, Pattern]] = frozenset()

    def own(self, side: int, path: str) -> str:
        """Return the name that a leaf has on its own side."""
        return self.names[side].get(path, path)

    def named(
        self, sources: Mapping[str, Any], targets: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is known of the leaves of both sides by the names here."""
        sides = enumerate(self.calls[0])
        ones, twos = (
            {path: (sources, targets)[n][self.own(n, path)] for path in side.leaves}
            for n, side in sides
        )
        return ones, twos

    def around(self, draft: MigrationDraft) -> MigrationDraft:
        """Return a draft with the tables around it, by the names that leaves have."""
        if not any(self.tables):
            return draft
        migration = in_order((*self.tables[0], draft.migration, *self.tables[1]))

        def own(side: int, paths: Iterable[str]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(self.own(side, path) for path in paths))

        pairs: dict[str, tuple[str, ...]] = {}
        for old, new in draft.pairs.items():  # several may be one on their own side
            name = self.own(0, old)
            pairs[name] = tuple(dict.fromkeys([*pairs.get(name, ()), *own(1, new)]))
        return dataclasses.replace(
            draft,
            migration=migration,
            pairs=pairs,
            doubtful=self._doubtful(migration, own(0, draft.doubtful)),
            missing=own(1, draft.missing),
            unexpected=own(0, draft.unexpected),
            notes=(*draft.notes, _CHAIN.format(len(migration.tables))),
            _shapes={self.own(0, path): x for path, x in draft._shapes.items()},
            _inner=draft,
            _place=len(self.tables[0]),
        )

    def _doubtful(self, migration: Migration, paths: Sequence[str]) -> tuple[str, ...]:
        """Return paths, and those of the source that marked rows around them take."""
        leaves, likes = (
            {self.own(n, path): leaf for path, leaf in side.leaves.items()}
            for n, side in enumerate(self.calls[0])
        )
        plan, _ = migration.planned(leaves, likes)
        doubtful = {*paths}
        for number, table in enumerate(plan.tables):
            marked = [group for group in table.groups if group.row.notes.check]
            named = itertools.chain(*(group.source_paths for group in marked))
            doubtful |= {*led_back(plan.tables[:number], named)}
        return tuple(path for path in leaves if path in doubtful)

    def in_blocks(
        self, evidence: Evidence, rows: Sequence[DraftRow]
    ) -> Iterator[NearerSides]:
        """Yield the same with a number of paths that is two, as left leaves show."""
        found = blocks_of_links(*evidence.linked_without_live_row(rows))
        for blocks, _ in found.most_common():
            if spelled := self._spelled(*blocks):
                yield spelled

    def in_endings(
        self, evidence: Evidence, rows: Sequence[DraftRow]
    ) -> Iterator[NearerSides]:
        """Yield the same with a number in place of what follows a number, or does not.

        As of the two directions of a layer, ``l0`` and ``l0_reverse``: as ``l0/0`` and
        ``l0/1`` they are two of one kind. The table says which before it reads any
        number, because a capture of one name takes the other one, too.
        """
        left = evidence.without_row([row for row in rows if row.is_live])
        for side, paths in enumerate(left):
            leaves = self.calls[0][side].leaves
            endings = _endings({*map(template_of, paths)}, by_template(leaves))
            spelled = self._with_endings(side, endings) if endings else None
            if spelled is not None:
                yield spelled

    def _with_endings(
        self, side: int, endings: Mapping[Pattern, Pattern]
    ) -> NearerSides | None:
        """Return the same with a number in place of endings; None if names clash.

        Args:
            side: of the endings.
            endings: what paths are here, by their templates.
        """
        leaves = self.calls[0][side].leaves
        names: dict[str, str] = {}
        renamings: list[DraftRow] = []
        for template, paths in by_template(leaves).items():
            if template not in endings:
                continue
            addresses = [_captured(each) for each in (template, endings[template])]
            news = [_filled(endings[template], path) for path in paths]
            names |= dict(zip(news, paths, strict=True))
            pairs = [((old,), (new,)) for old, new in zip(paths, news, strict=True)]
            one, two = ((DraftAddress(tokens, ()),) for tokens in addresses)
            renamings.append(DraftRow(one, two, {}, tuple(pairs), "values"))
        if not names.keys().isdisjoint(leaves):
            return None
        texts, of_rows = written(merged(renamings))
        texts = rows_apart(texts, [*leaves], [*names])
        renamed = {*names.values()}
        if others := [path for path in leaves if path not in renamed]:
            texts += written([rest(others, "values")])[0]
        table = as_table(texts, of_rows)
        return self._with_side(side, names, table if side == 0 else table.inverse)

    def in_periods(self) -> Iterator[NearerSides]:
        """Yield the same where some leaves are in every so manieth layer only.

        As where three layers of four have one kind of attention, and one another.
        """
        for side, leaves in enumerate(self.calls[0]):
            every: dict[Pattern, dict[Pattern, set[int]]] = {}
            for path in leaves.leaves:
                template, tokens = template_of(path), tokens_of(path)
                for place, token in enumerate(template):
                    if token is None:
                        above = template[:place]
                        numbers = every.setdefault(above, {}).setdefault(
                            template, set()
                        )
                        numbers.add(int(tokens[place]))
            for above, sets in every.items():
                size = _period([*sets.values()])
                if size and (spelled := self._spelled(side, above, size)):
                    yield spelled

    def _spelled(self, side: int, above: Pattern, size: int) -> NearerSides | None:
        """Return the same where a number of the paths of one side is two.

        Args:
            side: of the number.
            above: what is before it in paths.
            size: how many values a block has.
        """
        names: dict[str, str] = {}
        forms: dict[tuple[str, str], None] = {}
        inner: set[tuple[int, Pattern]] = set()
        for path in self.calls[0][side].leaves:
            if template_of(path)[: len(above) + 1] != (*above, None):
                continue
            tokens = tokens_of(path)
            head, number = tokens[: len(above)], int(tokens[len(above)])
            rest = "".join(tokens[len(above) + 1 :])
            end = rest[:1] or "."
            if end not in _ENDS:
                return None
            block, within = divmod(number, size)
            names[f"{''.join(head)}{block}{end}{within}{rest}"] = path
            inner.add((side, (*above, None, end)))
            forms[_form(above, rest)] = None
        if not names.keys().isdisjoint(self.calls[0][side].leaves):
            return None
        rows: list[Any] = [(one, (two, {"check": "sizes"})) for one, two in forms]
        if len(names) < len(self.calls[0][side].leaves):
            rows.append(("{rest:**}", "{rest}"))
        table = Migration(rows, sizes={"i": size})
        table = table if side == 0 else table.inverse
        spelled = self._with_side(side, names, table)
        return dataclasses.replace(spelled, inner=self.inner | inner)

    def _with_side(
        self, side: int, names: Mapping[str, str], table: Migration
    ) -> NearerSides:
        """Return the same with other names of one side, and the table between them."""
        spelled = {old: new for new, old in names.items()}
        kept = self.names[side].items()
        own = {new: path for new, path in kept if new not in spelled}
        own |= {new: self.own(side, old) for new, old in names.items()}
        if side == 0:
            calls = [(source.renamed(spelled), target) for source, target in self.calls]
            tables = (*self.tables[0], table), self.tables[1]
            return NearerSides(calls, (own, self.names[1]), tables)
        calls = [(source, target.renamed(spelled)) for source, target in self.calls]
        tables = self.tables[0], (table, *self.tables[1])
        return NearerSides(calls, (self.names[0], own), tables)


def _endings(
    some: Collection[Pattern], every: Mapping[Pattern, Sequence[str]]
) -> dict[Pattern, Pattern]:
    """Return templates with a number for what follows a number of them, or does not.

    Args:
        some: templates, of which one of each kind is to be.
        every: templates, and their paths.

    Example:
        >>> every = {
        ...     ("l", None): ["l0", "l1"],
        ...     ("l", None, "_", "back"): ["l0_back", "l1_back"],
        ... }
        >>> for old, new in _endings([*every], every).items():
        ...     print(old, new)
        ('l', None) ('l', None, '/', '0')
        ('l', None, '_', 'back') ('l', None, '/', '1')
    """
    counts = {t: {_numbers(path) for path in paths} for t, paths in every.items()}
    found: dict[tuple[Pattern, int], list[Pattern]] = {}
    for template, numbers in counts.items():
        for without, start in without_endings(template):
            if counts.get(without) == numbers:
                found.setdefault((without, start), []).append(template)
    new: dict[Pattern, Pattern] = {}
    for (without, start), others in found.items():
        alike = [without, *others]
        if new.keys().isdisjoint(alike) and not {*some}.isdisjoint(alike):
            rest_of = without[start:]
            for place, template in enumerate(alike):
                new[template] = (*without[:start], "/", str(place), *rest_of)
    return new


def _numbers(path: str) -> tuple[str, ...]:
    return tuple(filter(is_count, tokens_of(path)))


def _captured(template: Pattern) -> Tokens:
    """Return the tokens of addresses in which each number is captured."""
    count = itertools.count()
    return tuple(Hole((next(count),)) if t is None else t for t in template)


def _filled(template: Pattern, path: str) -> str:
    """Return a path of another template with the numbers of a path."""
    numbers = iter(_numbers(path))
    return "".join(next(numbers) if t is None else t for t in template)


def _period(sets: Sequence[set[int]]) -> int:
    """Return after how many numbers all sets of some begin again; 0 if none does.

    Example:
        >>> _period([{0, 1, 2, 3, 4, 5}, {0, 1, 3, 4}, {2, 5}])
        3
        >>> _period([{0, 1, 2, 3, 4, 5}, {0}])
        0
    """
    count = len(set().union(*sets))
    some = [each for each in sets if len(each) < count]
    for size in range(2, count // 2 + 1) if some else ():
        starts = ({n % size for n in each} for each in some)
        if count % size == 0 and all(
            each == {n for n in range(count) if n % size in start}
            for each, start in zip(some, starts, strict=True)
        ):
            return size
    return 0


def _form(above: Pattern, rest: str) -> tuple[str, str]:
    """Return the addresses of paths whose number is one, and two.

    Example:
        >>> _form(("layers", "."), ".attn.w")
        ('layers.{(b i)}.{rest}', 'layers.{b}.{i}.{rest}')
        >>> _form(("h", "/"), "/attn/w")
        ('h/{(b i)}/{rest:**}', 'h/{b}/{i}/{rest}')
    """
    count = itertools.count()
    head = "".join(f"{{n{next(count)}}}" if t is None else escaped(t) for t in above)
    end, first, more = rest[:1], *rest[1:].partition("/")[::2]
    if end == "/":
        tails = ("/{rest:**}", "/{rest}")
    elif more:
        tails = (f"{end}{{rest}}/{{more:**}}", f"{end}{{rest}}/{{more}}")
    else:
        tails = (f"{end}{{rest}}" if first else end,) * 2
    return f"{head}{{(b i)}}{tails[0]}", f"{head}{{b}}{end or '.'}{{i}}{tails[1]}"
