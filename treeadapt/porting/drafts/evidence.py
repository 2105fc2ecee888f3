"""What numbers show: which row makes which leaf of the target.

Takes both sides of a draft, twice where a function was called twice; gives rows that
make every number of their targets, or says that a row does not. What is looked for, in
this order: the numbers as they are, 1 more or less, with zeros around them or without
some of the first or last, and any other multiple, by rank.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.porting.drafts.called_function import as_bytes
from treeadapt.porting.drafts.inputs import Side
from treeadapt.porting.drafts.links import Link, NumberedLeaf, find_links, leaf_of
from treeadapt.porting.drafts.merging import canonical
from treeadapt.porting.drafts.numbers import (
    Lookup,
    Origins,
    contents,
    exact_factor,
    filled_box,
    find_origins,
    fitted_line,
    have_numbers_in_common,
    is_beyond_chance,
    is_constant,
    is_symmetric,
    is_telling,
    known_in_all,
)
from treeadapt.porting.drafts.rows import DraftRow, by_template, template_of
from treeadapt.porting.drafts.slices import with_links_of_slices
from treeadapt.porting.drafts.trying import TriedRows, plans
from treeadapt.porting.drafts.values import (
    rows_of_counted_names,
    rows_of_links,
    rows_of_orders,
)
from treeadapt.porting.drafts.writing import is_of_path, written
from treeadapt.text.names import fold, listing, natural

EQUAL = "equal leaves"
CONSTANT = "constant numbers"
_LEAST_SHARE = 0.2  # of a leaf, before its numbers are evidence
_LEAST_WITHIN = 0.05  # of a leaf, to find its order next to one other leaf
_MOST_FACTORS = 64  # leaves that are compared one by one
_MOST_NUMBERS = 2**24  # that are sorted
_ROUNDED = 1e-6  # of a factor that float32 numbers show

#: Reads the array of a path, of the first or the second call.
Read: TypeAlias = Callable[[int, str], np.ndarray]

#: First and last index along each axis, of the leaves of which a box is looked at.
Crops: TypeAlias = Mapping[tuple[int, str], tuple[tuple[int, int], ...]]

#: Leaves of the source, and of the target, and the links between them.
LinkedLeaves: TypeAlias = tuple[
    Sequence[NumberedLeaf], Sequence[NumberedLeaf], Sequence[Link]
]


class _Multiple(NamedTuple):
    """The numbers of some leaves as those of others, times something, plus something.

    Attributes:
        scale: what the numbers of the source are multiplied by.
        offset: what is added to the product.
        arrays: the products, by path of the source, in the shapes that these have.
    """

    scale: float
    offset: float
    arrays: dict[str, np.ndarray]


_NO_CROPS: Crops = {}
_UNCHANGED: Mapping[str, Any] = {}


class Evidence:
    """The numbers of both sides.

    Attributes:
        calls: source and target, once, or twice with different numbers.
        source: the leaves of one side, with their numbers if there are any.
        target: those of the other side.
    """

    def __init__(self, calls: Sequence[tuple[Side, Side]]) -> None:
        self.calls = calls
        self.source, self.target = calls[0]
        self._tried = TriedRows()
        self._latest: tuple[object, Mapping[str, Origins]] = (), {}

    @property
    def has_numbers(self) -> bool:
        """Whether both sides hold arrays."""
        return self.source.arrays is not None and self.target.arrays is not None

    def with_dtypes(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> Evidence:
        """Return the same numbers as those of leaves with other dtypes, by path."""
        first = self.source.with_dtypes(old), self.target.with_dtypes(new)
        return Evidence([first, *self.calls[1:]])

    def without_row(
        self, rows: Iterable[DraftRow]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the leaves of both sides that no row has, live or not, by path."""
        olds = {path for row in rows for path in row.source_paths}
        news = {path for row in rows for path in row.target_paths}
        return (
            {
                path: leaf
                for path, leaf in self.source.leaves.items()
                if path not in olds
            },
            {
                path: leaf
                for path, leaf in self.target.leaves.items()
                if path not in news
            },
        )

    def rows(self) -> tuple[list[DraftRow], bool]:
        """Return the rows that numbers show; whether any are in common."""
        ones, twos = [*self.source.leaves], [*self.target.leaves]
        lookups = self._lookups(ones, twos)
        have_common = have_numbers_in_common(lookups[0].varied().values())
        twins: dict[str, list[str]] = {}
        for number, first in enumerate(lookups[0].first_equal):
            if number != first:
                twins.setdefault(ones[first], []).append(ones[number])
        known = self._known(lookups)
        rows = [_with_twins(row, twins) for row in self._rows(ones, twos, known)]

        leaves = self.target.leaves
        unchanged = {
            path
            for path, own in known.items()
            if not own.absent and leaves[path].dtype.itemsize > 2  # else by chance
        }

        def changed() -> tuple[dict[str, Any], dict[str, Any]]:
            olds, news = self.without_row(rows)
            return olds, {p: leaf for p, leaf in news.items() if p not in unchanged}

        for offset in (1.0, -1.0):
            rows += self._shifted(*changed(), offset)
        rows += self._cropped(*self.without_row(rows))
        rows += self._scaled(*changed())
        return rows, have_common

    def linked(
        self,
        ones: Iterable[str],
        twos: Iterable[str],
        *,
        old: Read | None = None,
        crops: Crops | None = None,
        **changed: Any,
    ) -> list[DraftRow]:
        """Return the rows that shared numbers show among some leaves.

        Args:
            ones: paths of the source.
            twos: paths of the target.
            old: reads an array of the source as something changed it.
            crops: which box of a leaf is looked at, by side and path.
            changed: fields of the rows: what was done to the numbers.
        """
        sources, targets, crops = [*ones], [*twos], crops or {}
        if not targets:
            return []
        known = self._known(self._lookups(sources, targets, old, crops))
        return self._rows(sources, targets, known, crops, changed)

    def _rows(
        self,
        ones: Sequence[str],
        twos: Sequence[str],
        known: Mapping[str, Origins],
        crops: Crops = _NO_CROPS,
        changed: Mapping[str, Any] = _UNCHANGED,
    ) -> list[DraftRow]:
        """Return the rows that ``linked`` does, of numbers whose places are known."""
        olds, news = self._leaves(0, ones, crops), self._leaves(1, twos, crops)
        links = find_links(olds, news, known, _LEAST_SHARE)
        return [*self._fitting(rows_of_links(olds, news, links), crops, changed)]

    def counted(self, rows: Sequence[DraftRow]) -> list[DraftRow]:
        """Return what numbers show of arrays whose names are only numbers, at last."""
        linked = self.linked_without_live_row(rows)
        return [*self._fitting(rows_of_counted_names(*linked), {}, {})]

    def reordered(self, rows: Sequence[DraftRow]) -> list[DraftRow]:
        """Return rows that ``take`` numbers, of leaves that no live row has."""
        ones, news, links = self.linked_without_live_row(rows)
        if len(self.calls) == 1:  # else all numbers are distinct
            links = with_links_of_slices(
                ones, news, links, functools.partial(self._read, 0)
            )
        linked = {link.ends[0].path for link in links}
        free = {*self.without_row([row for row in rows if row.is_live])[0]} - linked
        olds = self._leaves(0, [*self.source.leaves], {})
        whole = (
            self._with_left_out(r, free) for r in rows_of_orders(olds, news, links)
        )
        return [*self._fitting(filter(None, whole), {}, {})]

    def _read(self, nth: int, side: int, path: str) -> np.ndarray:
        return self.calls[nth][side].array(path)

    def _with_left_out(self, row: DraftRow, free: Collection[str]) -> DraftRow | None:
        """Return a row with the leaves that it leaves out; None if others need them.

        Args:
            row: that may take some of the numbers of its paths.
            free: leaves whose numbers are nowhere in the target.
        """
        if all(take.is_order or not is_of_path(row, atom) for atom, take in row.takes):
            return row
        own = {*row.source_paths}
        templates = {*map(template_of, own)}
        alike = (p for p in self.source.leaves if template_of(p) in templates)
        gone = [path for path in alike if path not in own]
        pairs = (*row.pairs, *(((path,), ()) for path in gone))
        return dataclasses.replace(row, pairs=pairs) if {*free} >= {*gone} else None

    def linked_without_live_row(self, rows: Sequence[DraftRow]) -> LinkedLeaves:
        """Return the leaves of ``without_row`` with their links, if none is live.

        A row that numbers contradict leaves its leaves to others.
        """
        live = [row for row in rows if row.is_live]
        ones, twos = map(list, self.without_row(live))
        if not twos:
            return [], [], []
        olds, news = self._leaves(0, ones, {}), self._leaves(1, twos, {})
        known = self._known_of(ones, twos)
        return olds, news, find_links(olds, news, known, _LEAST_SHARE)

    def _leaves(
        self, side: int, paths: Sequence[str], crops: Crops
    ) -> list[NumberedLeaf]:
        leaves = (self.source, self.target)[side].leaves
        return [
            leaf_of(path, tuple(b - a for a, b in crops[side, path]))
            if (side, path) in crops
            else leaf_of(path, leaves[path].shape)
            for path in paths
        ]

    def _lookups(
        self,
        ones: Sequence[str],
        twos: Sequence[str],
        old: Read | None = None,
        crops: Crops = _NO_CROPS,
    ) -> list[Lookup]:
        """Return where numbers of some leaves are, in each call (see ``linked``)."""

        def reading(side: int, nth: int, path: str) -> Callable[[], np.ndarray]:
            def read() -> np.ndarray:
                if old is None or side == 1:
                    array = self.calls[nth][side].array(path)
                else:
                    array = old(nth, path)
                return cropped(array, crops.get((side, path)))

            return read

        return [
            find_origins(
                [reading(0, nth, path) for path in ones],
                [self.source.leaves[path].dtype for path in ones],
                {path: reading(1, nth, path) for path in twos},
            )
            for nth in range(len(self.calls))
        ]

    def _known_of(
        self, ones: Sequence[str], twos: Sequence[str], crops: Crops = _NO_CROPS
    ) -> Mapping[str, Origins]:
        """Return where numbers of some leaves are; of the last ones without a look."""
        key = tuple(ones), tuple(twos), tuple(crops.items())
        if key != self._latest[0]:
            lookups = self._lookups(ones, twos, crops=crops)
            self._latest = key, self._known(lookups)
        return self._latest[1]

    def _known(self, lookups: Sequence[Lookup]) -> dict[str, Origins]:
        """Return where the numbers of targets are, in all calls alike."""
        # What is constant in one of two calls by chance is not so in the other one.
        is_called_twice = len(lookups) > 1
        every = [
            lookup.origins if is_called_twice else lookup.varied() for lookup in lookups
        ]
        return {
            path: known_in_all(
                [origins[path] for origins in every],
                is_wide=self.target.leaves[path].dtype.itemsize > 2,
            )
            for path in every[0]
            if all(path in origins for origins in every)
        }

    def _fitting(
        self, rows: Iterable[DraftRow], crops: Crops, changed: Mapping[str, Any]
    ) -> Iterator[DraftRow]:
        """Yield the rows that make every number of their targets, casts apart."""
        for row in rows:
            pads = self._pads(row, crops) if crops else {}
            for each in self.by_dtype(row) if pads is not None else ():
                fields = {**(pads or {}), **changed}
                whole = dataclasses.replace(each, **fields) if fields else each
                if self.gives(whole):
                    yield whole

    def _pads(self, row: DraftRow, crops: Crops) -> dict[str, Any] | None:
        """Return what a row cuts off, or adds; None if no row can say that.

        Its leaves may differ in it. Nor does a row both cut and pad: in the notation
        either its way there pads, or its way back does.
        """
        fields: dict[str, Any] = {}
        for side, name in enumerate(("cuts", "pads")):
            every = {
                self._widths(row, side, path, crops)
                for path in (row.source_paths, row.target_paths)[side]
            }
            if len(every) > 1 or None in every:
                return None
            fields[name] = every.pop()
        does_both = all(fields.values())
        return None if does_both else fields

    def _widths(
        self, row: DraftRow, side: int, path: str, crops: Crops
    ) -> tuple[tuple[int, int, int], ...] | None:
        """Return by how much a leaf of a row is longer, on axes of the first address.

        It is None if these have no such axis: one is padded as a whole, or not at all.
        """
        box, addresses = crops.get((side, path)), row.sides[side]
        if box is None:
            return ()
        sizes = (self.source, self.target)[side].leaves[path].shape
        own = addresses
        if len(addresses) > 1:
            (text,), _ = written([row])
            read = text.read.targets if side else ()
            both = zip(addresses, read, strict=False)
            own = tuple(a for a, of in both if of.path.match(path) is not None)
        if len(own) != 1:
            return None
        widths = []
        for axis, size, (first, end) in zip(own[0].axes, sizes, box, strict=True):
            if not (first or end < size):
                continue
            if tuple(map(len, axis)) != (1,) or axis not in addresses[0].axes:
                return None
            widths.append((addresses[0].axes.index(axis), first, size - end))
        return tuple(sorted(widths))

    def by_dtype(self, row: DraftRow) -> Iterator[DraftRow]:
        """Divide a row by the dtypes of its leaves, and note the casts."""
        parts: dict[tuple[str, ...], list[Any]] = {}
        for pair in row.pairs:
            sources, targets = pair
            olds = {str(np.dtype(self.source.leaves[path].dtype)) for path in sources}
            news = {str(np.dtype(self.target.leaves[path].dtype)) for path in targets}
            if len(olds) == len(news) == 1:
                old, new = olds.pop(), news.pop()
                parts.setdefault((old, new) if old != new else (), []).append(pair)
        left_out = [pair for pair in row.pairs if not pair[1]]
        for cast, pairs in parts.items():
            own = (*pairs, *left_out)
            is_same = own == row.pairs and cast == row.cast
            yield row if is_same else dataclasses.replace(row, pairs=own, cast=cast)

    def _shifted(
        self, ones: Mapping[str, Any], twos: Mapping[str, Any], offset: float
    ) -> list[DraftRow]:
        """Return rows of leaves whose numbers are 1 more, or less, as of norms."""

        def read(nth: int, path: str) -> np.ndarray:
            array = self.calls[nth][0].array(path)
            return array.astype(np.promote_types(array.dtype, np.float32)) + offset

        return self.linked(_floats(ones), _floats(twos), old=read, offset=offset)

    def _cropped(
        self, ones: Mapping[str, Any], twos: Mapping[str, Any]
    ) -> list[DraftRow]:
        """Return rows of leaves that are longer by zeros, or shorter."""
        crops = self._crops(ones, twos)
        return self.linked(ones, twos, crops=crops) if crops else []

    def _crops(self, ones: Mapping[str, Any], twos: Mapping[str, Any]) -> Crops:
        """Return the boxes of leaves that are in leaves of the other side."""
        crops: dict[tuple[int, str], tuple[tuple[int, int], ...]] = {}
        if not twos:
            return crops
        for path in _floats(twos):
            box = filled_box(self.target.array(path) != 0)
            if box and box != _whole(twos[path].shape):
                crops[1, path] = box
        places: dict[str, list[np.ndarray]] = {}
        known = self._known_of([*ones], [*twos], crops)
        for own in known.values():
            for number, path in enumerate(ones):
                places.setdefault(path, []).append(own.places[own.leaves == number])
        for path, every in places.items():
            seen = np.zeros(ones[path].shape, bool)
            seen.reshape(-1)[np.concatenate(every)] = True
            box = filled_box(seen)
            if box and box != _whole(ones[path].shape):
                crops[0, path] = box
        return crops

    def _scaled(
        self, ones: Mapping[str, Any], twos: Mapping[str, Any]
    ) -> Iterator[DraftRow]:
        """Yield rows of leaves whose numbers are a multiple, plus something."""
        crops = {key: box for key, box in self._crops({}, twos).items() if key[0]}
        kinds = np.dtype("float32"), np.dtype("float64")
        twos = {path: leaf for path, leaf in twos.items() if leaf.dtype in kinds}
        done: set[str] = set()
        groups = [[*by_template(_floats(side)).values()] for side in (ones, twos)]
        groups[1] += [*_of_one_word(groups[1])]
        for olds, news in itertools.product(*groups):
            if done & {*olds, *news}:
                continue
            rows = self._of_one_factor(olds, news, crops)
            for part in () if rows else self._by_factor(olds, news, crops):
                rows += self._of_one_factor(*part, crops)
            for row in rows:
                done |= {*row.source_paths, *row.target_paths}
                yield row

    def _of_one_factor(
        self, olds: Sequence[str], news: Sequence[str], crops: Crops
    ) -> list[DraftRow]:
        """Return the rows of leaves that are one multiple of others, in all calls."""
        tried = (self._multiple(n, olds, news, crops) for n in range(len(self.calls)))
        multiples = [each for each in tried if each]
        scales, offsets = {m.scale for m in multiples}, {m.offset for m in multiples}
        scale = min(scales, key=lambda scale: len(f"{scale!r}"), default=1.0)
        # Each call rounds the factor otherwise.
        is_one = np.allclose([*scales], scale, rtol=_ROUNDED, atol=0)
        if len(multiples) < len(self.calls) or len(offsets) > 1 or not is_one:
            return []
        (offset,) = offsets
        if not offset:
            scale = exact_factor(scale, self._factored(olds, multiples))

        def read(nth: int, path: str) -> np.ndarray:
            return multiples[nth].arrays[path]

        return self.linked(
            olds, news, old=read, crops=crops, scale=scale, offset=offset
        )

    def _by_factor(
        self, olds: Sequence[str], news: Sequence[str], crops: Crops
    ) -> Iterator[tuple[list[str], list[str]]]:
        """Yield leaves of one multiple each, where layers have several."""
        parts: dict[tuple[float, float], tuple[list[str], list[str]]] = {}
        pairs = zip(sorted(olds, key=natural), sorted(news, key=natural), strict=False)
        for old, new in pairs if 1 < len(olds) == len(news) <= _MOST_FACTORS else ():
            found = self._multiple(0, [old], [new], crops)
            if found is None:
                return
            ones, twos = parts.setdefault((found.scale, found.offset), ([], []))
            ones.append(old)
            twos.append(new)
        yield from parts.values()

    def _multiple(
        self, nth: int, olds: Sequence[str], news: Sequence[str], crops: Crops
    ) -> _Multiple | None:
        """Return leaves with the numbers of others that have the same rank there.

        None where ranks do not show a factor, or show that nothing is changed.
        """
        source, target = self.calls[nth]
        if sum(source.leaves[path].size for path in olds) > _MOST_NUMBERS:
            return None
        sources = [source.array(path) for path in olds]
        targets = [cropped(target.array(path), crops.get((1, path))) for path in news]
        if sum(a.size for a in sources) != sum(a.size for a in targets):
            return None
        x, y = (np.concatenate([a.reshape(-1) for a in s]) for s in (sources, targets))
        line = fitted_line(np.sort(x), np.sort(y))
        if line is None or line == (1.0, 0.0):
            return None
        ranked = np.empty_like(y)
        ranked[np.argsort(x)] = np.sort(y)[:: 1 if line[0] > 0 else -1]
        parts = np.split(ranked, np.cumsum([a.size for a in sources])[:-1])
        arrays = {
            path: part.reshape(array.shape)
            for path, part, array in zip(olds, parts, sources, strict=True)
        }
        return _Multiple(*line, arrays)

    def _factored(
        self, olds: Sequence[str], multiples: Sequence[_Multiple]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield arrays of the source, and what they were multiplied to."""
        for (source, _), products in zip(self.calls, multiples, strict=True):
            yield from ((source.array(path), products.arrays[path]) for path in olds)

    def fits(self, row: DraftRow) -> bool:
        """Return whether a row fits the shapes of both sides."""
        return self._tried.fits(row, self.source.leaves, self.target.leaves)

    def fit_together(self, rows: Iterable[DraftRow]) -> bool:
        """Return whether the live ones of some rows agree on all of their leaves."""
        rows = [row for row in rows if row.is_live]
        source = {p: self.source.leaves[p] for row in rows for p in row.source_paths}
        target = {p: self.target.leaves[p] for row in rows for p in row.target_paths}
        return plans([*map(canonical, rows)], source, target)

    def gives(self, row: DraftRow) -> bool:
        """Return whether a row fits, and makes every number of its targets."""
        if len(row.pairs) > 2 and not self.fits(row):  # else it is planned here
            return False
        for from_side, to_side in self.calls:
            source = {path: from_side.array(path) for path in row.source_paths}
            target = {path: to_side.leaves[path] for path in row.target_paths}
            planned = self._tried.planned(row, source, target)
            try:
                moved = planned.made(source, target)
            except MigrationError:
                return False
            for path in target:
                wanted = to_side.array(path)
                if row.scale != 1 or row.is_sum:
                    is_equal = np.allclose(moved[path], wanted, rtol=1e-5, atol=1e-7)
                else:
                    is_equal = np.array_equal(as_bytes(moved[path]), as_bytes(wanted))
                if not is_equal:
                    return False
        return True

    def tested(self, row: DraftRow) -> list[DraftRow]:
        """Return what numbers leave of a row that names propose."""
        arrays = [self.target.array(path) for path in row.target_paths]
        if all(map(is_constant, arrays)):
            is_live = self.gives(row)
            if is_live and all(map(self._is_a_number_of_its_own, row.target_paths)):
                return [dataclasses.replace(row, evidence="values", checks=())]
            row = row.marked(CONSTANT) if is_live else row
            return [dataclasses.replace(row, is_live=is_live)]
        if rows := self._within(row):
            return rows
        for offset in (0.0, 1.0):
            tried = dataclasses.replace(row, offset=offset)
            if self.gives(tried):
                if all(map(is_telling, arrays)):
                    return [dataclasses.replace(tried, evidence="values", checks=())]
                return [tried]
        return [dataclasses.replace(row, is_live=False)]

    def _is_a_number_of_its_own(self, path: str) -> bool:
        """Return whether a leaf is one number, and another one in each call."""
        made = [to_side.array(path) for _, to_side in self.calls]
        return len({array.tobytes() for array in made}) > 1 and made[0].size == 1

    def _within(self, row: DraftRow) -> list[DraftRow]:
        """Return the rows that numbers show among the leaves of a proposed row alone.

        A number that other leaves have, too, may stand once among these.
        """
        links = []
        for ones, twos in row.pairs:
            olds, news = self._leaves(0, ones, {}), self._leaves(1, twos, {})
            known = self._known(self._lookups(ones, twos))
            links += find_links(olds, news, known, _LEAST_WITHIN)
        olds = self._leaves(0, row.source_paths, {})
        news = self._leaves(1, row.target_paths, {})
        rows = [*self._fitting(rows_of_links(olds, news, links), {}, {})]
        done = {path for each in rows for path in each.target_paths}
        return rows if done == {*row.target_paths} else []

    def repeated(self, ones: Sequence[str], twos: Sequence[str]) -> list[DraftRow]:
        """Return the rows of some leaves alone, where numbers are repeated."""
        return self._within(
            DraftRow((), (), {}, ((tuple(ones), tuple(twos)),), "values")
        )

    def with_rivals(self, rows: Iterable[DraftRow]) -> Iterator[DraftRow]:
        """Mark rows whose numbers say nothing of the leaf, or of the order of its axes.

        A cast makes the numbers of a model and of its average equal; a symmetric array
        is the same whichever axis is first.
        """
        rows = [*rows]
        proved = [row for row in rows if row.is_live and row.evidence == "values"]
        sizes = {
            self.target.leaves[path].size for row in proved for path in row.target_paths
        }
        sizes |= {
            self.source.leaves[p].size for row in proved for p in row.source_paths
        }
        alike: dict[object, list[str]] = {}
        keys: dict[object, object] = {}
        dtypes = (self.target.leaves[row.target_paths[0]].dtype for row in proved)
        for dtype in dict.fromkeys(dtypes):
            for path, leaf in self.source.leaves.items():
                same = leaf.size in sizes and contents([self.source.array(path)], dtype)
                if same:
                    keys[dtype, path] = dtype, same
                    alike.setdefault((dtype, same), []).append(path)
        for row in rows:
            if not (row.is_live and row.evidence == "values"):
                yield row
                continue
            dtype = self.target.leaves[row.target_paths[0]].dtype
            own = dict.fromkeys(row.source_paths)
            every = dict.fromkeys(keys.get((dtype, path)) for path in own)
            there = itertools.chain(*(alike.get(key, ()) for key in every))
            others = [path for path in there if path not in own]
            if others:
                names = listing(fold(others), limit=3)
                row = row.marked(EQUAL, f"these have the same numbers: {names}")
            if all(is_symmetric(self.source.array(path)) for path in own):
                row = row.marked("order of axes", "the arrays are symmetric")
            yield row

    def are_equal(self, rows: Iterable[DraftRow]) -> bool:
        """Return whether a row that was tested gives numbers, and not by chance."""
        paths = (path for row in rows if row.is_live for path in row.target_paths)
        return any(is_beyond_chance(self.target.array(path)) for path in paths)

    def are_reordered(self, rows: Sequence[DraftRow]) -> bool:
        """Return whether leaves, or those of a row, have their numbers elsewhere."""
        dtypes = {leaf.dtype for leaf in self.target.leaves.values()}
        rows = [row for row in rows if not row.is_live]
        old = [
            *([path] for path in self.source.leaves),
            *(r.source_paths for r in rows),
        ]
        new = [
            *([path] for path in self.target.leaves),
            *(r.target_paths for r in rows),
        ]
        there = {
            (dtype, contents([self.source.array(path) for path in paths], dtype))
            for paths in old
            for dtype in dtypes
        }
        return any(
            (dtype, own) in there
            for paths in new
            for dtype in {self.target.leaves[path].dtype for path in paths}
            if (own := contents([self.target.array(path) for path in paths], dtype))
        )


def cropped(array: np.ndarray, box: tuple[tuple[int, int], ...] | None) -> np.ndarray:
    """Return a box of an array; all of it without one."""
    return array if box is None else array[tuple(slice(a, b) for a, b in box)]


def _whole(shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in shape)


def _floats(leaves: Mapping[str, Any]) -> list[str]:
    return [p for p, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _of_one_word(groups: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield groups whose paths differ in one word as one."""
    alike: dict[object, list[str]] = {}
    for paths in groups:
        template = template_of(paths[0])
        for place, token in enumerate(template):
            if token is not None and token.isalpha():
                key = place, template[:place], template[place + 1 :]
                alike.setdefault(key, []).extend(paths)
    yield from alike.values()


def _with_twins(row: DraftRow, twins: Mapping[str, Sequence[str]]) -> DraftRow:
    """Mark a row whose source has the same numbers elsewhere, too."""
    names = [name for path in row.source_paths for name in twins.get(path, ())]
    if not names:
        return row
    note = f"the source has the same numbers at {listing(names, limit=3)}"
    return row.marked(EQUAL, note)
