"""Groups: leaves that move together, and the sizes of their axes.

Takes one row and the leaves that it takes. Leaves that differ only in numbers which
become axes are one group; its sizes are solved from the shapes of its sources first,
then of the target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp

from treeadapt.migrations.axes import REST, Axes, Axis, Product, every_name, indices
from treeadapt.migrations.group import Group, Taken, shape_of, size_bytes
from treeadapt.migrations.move import Layout, Move
from treeadapt.migrations.operations import Values
from treeadapt.migrations.problems import Problems, UnplannedError, name_target
from treeadapt.migrations.renumbering import Renumbering
from treeadapt.migrations.rows import Address, Row
from treeadapt.migrations.solving import Equation, solve
from treeadapt.migrations.take import taken_name
from treeadapt.migrations.templates import compose, decompose
from treeadapt.text.names import listing, natural, plural, size_text
from treeadapt.text.wording import worded
from treeadapt.trees.arrays import is_array, is_inexact_dtype
from treeadapt.trees.casting import (
    factor_dtype,
    has_zero,
    kind_of,
    wide_dtype,
)
from treeadapt.trees.describing import describe

MAX_LEAVES = 1_000_000  # that arrays may become, as of a checkpoint
MAX_GROWTH = 32  # bytes that arrays become, for each byte of theirs
MAX_MORE_BYTES = 2**30  # of all that arrays become beyond that
_SHOWN = 6  # missing leaves that a message lists

Specs: TypeAlias = Mapping[str, Any]
Sizes: TypeAlias = Mapping[str, int]

#: Text and numbers that all leaves of a group share, by name.
Shared: TypeAlias = Mapping[str, Any]

#: For each source of a row, paths by the numbers that tell its leaves apart.
Leaves: TypeAlias = Sequence[dict[tuple[int, ...], str]]


@dataclasses.dataclass
class GroupMaker:
    """Makes the groups of one row.

    Attributes:
        row: the row.
        place: its place in the table.
        sizes: sizes that hold in the whole table; those of the row are added.
        source: shapes and dtypes by path.
        target: the same of what the result should be, if that is known.
        problems: gets all that is wrong.
        is_partial: whether the result may have more than ``target`` shows.
        lengths: see ``take.lengths_after``; for rows that take numbers.
        typed: the row as its author wrote it, for messages, where ``row`` has the
            addresses of copies too; None where both are one. (``self._named`` is
            ``row`` with names of their own for numbers that ``take`` selects.)
        renumbering: what the row takes by number, and which leaves it leaves out.
    """

    row: Row
    place: int
    sizes: Sizes
    source: Specs
    target: Specs | None
    problems: Problems
    is_partial: bool = False
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    typed: Row | None = None

    def __post_init__(self) -> None:
        self.sizes = {**self.sizes, **self.row.sizes}
        self._typed = self.typed or self.row
        self.renumbering = Renumbering(self.row, self.lengths)
        #: The row, with names of their own for what is taken.
        self._named = self.row.renamed

    def groups(self, matches: Sequence[Taken]) -> list[Group]:
        """Return the groups, in natural order of their first targets."""
        counts = self._counts(matches)
        if counts is None:
            return []
        try:
            matches, counts = self.renumbering.apply(matches, counts)
        except UnplannedError as error:
            paths = [match.path for match in matches]
            self.problems.fail(error.kind, error.text, self._typed, {}, paths)
            return []
        groups = [*(self._renamed if self._renames else self._moved)(matches, counts)]
        self._check_products(groups)
        return sorted(groups, key=lambda group: natural(group.targets[0][0]))

    def _check_products(self, groups: Sequence[Group]) -> None:
        """Note sizes that differ between groups, and that only a product shows.

        Where queries have more heads than keys, ``(h d)`` with one ``h`` for both gives
        each its own ``d``, which is wrong. The outermost name may differ: with one
        ``d``, there are more heads of the same size.

        Args:
            groups: of this row.
        """
        if self.target is not None:
            filled = itertools.chain(*(group.filled for group in groups))
            if not self.is_partial or all(path in self.target for path in filled):
                return  # it shows what the sizes are
        axes = [axis for address in self.row.sources for axis in address.axes]
        products = [product for axis in axes for product in axis.parts]
        inner = {name: product for product in products for name in product[1:]}
        alone = {axis.name for axis in axes}
        for name in (name for name in inner if name not in alone):
            if not self.row.sizes.keys().isdisjoint(inner[name]):
                continue  # the row itself says how the product is made
            firsts: dict[int, str] = {}
            for group in groups:
                if group.move is not None:
                    firsts.setdefault(group.move.size[name], next(group.source_paths))
            if len(firsts) > 1:
                sizes = [
                    f"{size} in {listing([path])}" for size, path in firsts.items()
                ]
                target = name_target("pass a target")
                self.problems.add(
                    "sizes",
                    f"{name} is {' and '.join(sizes[:2])}. Only {inner[name][0]}, the "
                    f"outermost of ({' '.join(inner[name])}), may differ: write the "
                    f"size of {name} in {worded('sizes=', '[sizes]')}, or those of "
                    f"this row next to its target, {target}, or write two rows",
                    self._typed,
                    leaves=[*firsts.values()],
                )

    @property
    def _renames(self) -> bool:
        """Whether each leaf gets another name, and nothing else."""
        row = self.row
        captures = (
            c for each in (*row.sources, *row.targets) for c in each.path.captures
        )
        return (
            len(row.sources) == len(row.targets) == 1
            and not (row.moves or row.function or row.values.take)
            and not any(map(self._inner, (*row.sources, *row.targets)))
            and all(c.names == (c.key,) for c in captures)
        )

    def _renamed(self, matches: Sequence[Taken], counts: Sizes) -> Iterator[Group]:
        """Plan leaves that get new names, a group each, faster than ``_moved`` does."""
        (target,) = self.row.targets
        self.problems.num_made += len(matches)  # never more than the source has
        for _, path, captures in matches:
            paths = ((path,),), ((target.path.fill(captures, counts),),)
            specs = (self.source[path],)
            yield Group(self.row, self.place, *paths, None, specs)

    def _moved(self, matches: Sequence[Taken], counts: Sizes) -> Iterator[Group]:
        """Plan leaves of which several may be in one group."""
        # Of ``layers.{l}.{p=q,k}.w`` to ``{p=q,k}/w : l ...``, "layers.3.q.w" is in the
        # family of p = 0, by its index (3,).
        families: dict[Any, tuple[dict[str, Any], Leaves]] = {}
        for address, path, captures in matches:
            template = self._named.sources[address].path
            keys = {each.key for each in template.captures}
            values: dict[str, Any] = {
                key: it for key, it in captures.items() if key not in keys
            }
            for each in template.captures:
                values |= decompose(each.names, captures[each.key], counts)
            # ``{(b i)}`` and ``{i}`` in one path may give ``i`` two values.
            if values.keys() != captures.keys() and any(
                compose(each.names, values, counts) != captures[each.key]
                for each in template.captures
                if each.is_number
            ):
                text = f"{listing([path])}: its numbers contradict each other"
                self.problems.fail("sizes", text, self._typed, values, [path])
                continue
            inner = self._inner(self._named.sources[address])
            index = tuple(values.pop(name) for name in inner)
            key = tuple(sorted(values.items()))
            _, leaves = families.setdefault(
                key, (values, [{} for _ in self.row.sources])
            )
            leaves[address][index] = path
        for values, leaves in families.values():
            try:
                yield self._group(values, leaves, counts)
            except UnplannedError as error:
                paths = [path for each in leaves for path in each.values()]
                self.problems.fail(error.kind, error.text, self._typed, values, paths)

    def _counts(self, matches: Sequence[Taken]) -> dict[str, int] | None:
        """Count the numbers that the row's sources hold, by name.

        Returns:
            None if sizes that would say so stay open, which is then a problem.
        """
        most: dict[tuple[str, ...], int] = {}
        for address, _, captures in matches:
            for each in self.row.sources[address].path.captures:
                if each.is_number and not each.entries:
                    number = int(captures[each.key])
                    most[each.names] = max(most.get(each.names, 0), number)
        counts = dict(self.row.listed)
        for (name, *others), number in most.items():
            if others:
                continue
            listed = counts.setdefault(name, number + 1)
            if name in self.row.listed and listed <= number:
                paths = [m.path for m in matches if m.captures.get(name) == number]
                text = f"{listing(paths)} is number {number} of {name}, and a list "
                text += f"of {self._typed.text!r:.200} has {listed} texts for it"
                self.problems.fail("sizes", text, self._typed, {}, paths)
                return None
        for names, number in most.items():
            first, *others = names
            if not others:
                continue
            sizes = {**counts, **self.sizes}
            where = f"the number {{({' '.join(names)})}} of {self.row.text!r:.200}"
            if not {*others} <= {*sizes}:
                list(solve(self._shown(matches[0].captures, sizes), sizes))
                faults = [*solve([Equation((names,), number + 1, where)], sizes)]
                loose = [name for name in names if name not in sizes]
                if faults or loose:
                    captures = matches[0].captures
                    text = f"{where}: {self._open(loose, captures, sizes)}"
                    text = faults[0] if faults else text
                    paths = [each.path for each in matches]
                    self.problems.fail("sizes", text, self._typed, {}, paths)
                    return None
            counts |= {name: sizes[name] for name in others}
            block = math.prod(sizes[name] for name in others)
            counts[first] = number // block + 1
        return counts

    def _firsts(self, values: Shared, sizes: Sizes) -> Iterator[tuple[Address, str]]:
        """Yield each address of the target, and the path of the first leaf there.

        Args:
            values: text and numbers that the leaves share.
            sizes: what is known of sizes.
        """
        for address in self._named.targets:
            firsts = dict.fromkeys(address.numbers, 0)
            inner = dict.fromkeys(self._inner(address), 0)
            every = {**firsts, **values, **inner}
            yield address, address.path.fill(every, {**firsts, **sizes})

    def _shown(self, values: Shared, sizes: Sizes) -> Iterator[Equation]:
        """Yield what the shapes of the target say, of the first leaf at each address.

        Args:
            values: text and numbers that the leaves share.
            sizes: what is known of sizes.
        """
        for address, path in self._firsts(values, sizes):
            like = (self.target or {}).get(path)
            axes = _ranked(address.axes, len(shape_of(like)))
            if is_array(like) and axes is not None:
                yield from self._equations(axes, path, like, is_target=True)

    def _group(self, values: Shared, leaves: Leaves, counts: Sizes) -> Group:
        """Plan one group.

        Args:
            values: text and numbers that all its leaves share.
            leaves: paths by the numbers that tell the leaves of a source apart.
            counts: how many of each number the whole row has.
        """
        group_counts = {
            name: max(index[place] for index in by_index) + 1
            for address, by_index in zip(self._named.sources, leaves, strict=True)
            for place, name in enumerate(self._inner(address))
            if by_index and name not in self._named.listed
        }
        own = {**counts, **group_counts}
        is_whole = own != counts and not self._missing(values, leaves, own)
        if is_whole and self.target is not None:
            # Leaves that are fewer than those of another group: the target may say so.
            with contextlib.suppress(UnplannedError):
                group = self._whole(values, leaves, own)
                if all(path in self.target for path in group.filled):
                    return group
        missing = self._missing(values, leaves, counts)
        if missing:
            paths = itertools.chain(*(by_index.values() for by_index in leaves))
            text = f"{listing(paths, limit=2)} without {listing(missing)}"
            if is_whole:
                cure = "" if self.target else name_target("pass a target")
                cure += ", or " * bool(cure)
                text += f"; if none is missing, {cure}write two rows"
            self._fault(text, "torn")
        return self._whole(values, leaves, counts)

    def _inner(self, address: Address) -> tuple[str, ...]:
        """Return the numbers in its path that tell leaves of a group apart."""
        return tuple(n for n in address.numbers if n not in self._named.outer)

    def _missing(self, values: Shared, leaves: Leaves, counts: Sizes) -> list[str]:
        """Return the first paths that a group lacks."""
        missing: list[str] = []
        for address, by_index in zip(self._named.sources, leaves, strict=True):
            names = self._inner(address)
            if not {*names} <= {*counts}:  # no leaf of this source is there at all
                missing.append(address.path.text)
            elif len(by_index) < math.prod(counts[name] for name in names):
                # Among this many of each number are enough that no leaf has.
                few = {n: min(counts[n], len(by_index) + _SHOWN) for n in names}
                lacking = (i for i in indices(names, few) if i not in by_index)
                for index in itertools.islice(lacking, _SHOWN):
                    numbers = [*map(self.renumbering.number, names, index)]
                    missing.append(self._path(address, values, numbers, counts))
        return missing

    def _whole(self, values: Shared, leaves: Leaves, counts: Sizes) -> Group:
        """Plan a group of which no part is missing."""
        row, named = self.row, self._named
        sources = tuple(
            tuple(by_index[index] for index in indices(self._inner(address), counts))
            for address, by_index in zip(named.sources, leaves, strict=True)
        )
        move: Move | None = None
        sizes = {**counts, **self.sizes}
        specs: tuple[Any, ...] = (None,) * len(row.targets)
        if row.function is None:
            self._check_equal(sources)
            specs = (self.source[sources[0][0]],) * len(row.targets)
        if row.moves:
            sides, sizes = self._solved(values, sources, counts)
        filled = []
        for address in named.targets:
            names = self._inner(address)
            count = math.prod(sizes[name] for name in names) if names else 1
            self.problems.num_made += count
            if self.problems.num_made > MAX_LEAVES:
                text = f"would become {count:,} leaves; at most {MAX_LEAVES:,} in all"
                self._fault(f"{listing([sources[0][0]])} {text}", "large")
            every = indices(names, sizes)
            filled.append(tuple(self._path(address, values, n, sizes) for n in every))
        targets = tuple(filled)
        if row.moves:
            move = self._move(sides, sizes, sources, targets[0][0])
            specs = tuple(_made(move, layout) for layout in move.targets)
            self._check_growth(sources, targets, specs)
        selected = self.renumbering.selected
        return Group(row, self.place, sources, targets, move, specs, selected)

    def _check_growth(
        self,
        sources: Sequence[Sequence[str]],
        targets: Sequence[Sequence[str]],
        specs: Sequence[Any],
    ) -> None:
        """Raise if little would become so much that it may not fit into memory.

        A few bytes of a table could otherwise fill it, however small the source is.
        """
        source_bytes = sum(
            len(paths) * size_bytes(self.source[paths[0]]) for paths in sources
        )
        target = self.target or {}
        sizes = [
            sum(shape_of(target.get(path)) != spec.shape for path in paths)
            * size_bytes(spec)
            for paths, spec in zip(targets, specs, strict=True)
        ]
        self.problems.more_bytes += max(0, sum(sizes) - MAX_GROWTH * source_bytes)
        if self.problems.more_bytes > MAX_MORE_BYTES:
            largest = sizes.index(max(sizes))
            text = f"{listing([sources[0][0]])} would become {describe(specs[largest])}"
            limits = f"{MAX_GROWTH} times its bytes, and {size_text(MAX_MORE_BYTES)}"
            self._fault(f"{text}; at most {limits} more in all", "large")

    def _path(
        self, address: Address, values: Shared, index: Iterable[int], sizes: Sizes
    ) -> str:
        """Return the path of one leaf at an address."""
        numbers = dict(zip(self._inner(address), index, strict=True))
        return address.path.fill({**values, **numbers}, sizes)

    def _solved(
        self, values: Shared, sources: Sequence[Sequence[str]], counts: Sizes
    ) -> tuple[tuple[list[Layout], list[Layout]], dict[str, int]]:
        """Return the layouts of both sides, and the sizes of all their names."""
        row, first = self._named, sources[0][0]
        sizes = {**counts, **self.sizes}
        layouts, equations, more = self._source_layouts(sources)
        faults = [
            f"{plural(counts[name], 'leaf')} for {name}, whose size is {size}"
            for name, size in self.sizes.items()
            if counts.get(name, size) != size
            and not (name in row.outer and counts[name] < size)
        ]
        faults += self._solve(equations, sizes)
        wanted = [
            Layout(self._inner(each), _ranked(each.axes, len(each.axes) + more))
            for each in row.targets
        ]
        names = _names((*layouts, *wanted))
        if self.target is not None and not (faults or names.keys() <= sizes.keys()):
            # Contradictions are dropped: what contradicts the target is reported
            # later, with its whole shape.
            self._solve([*self._shown(values, sizes), *equations], sizes)
            faults += self._solve(equations, sizes)
        loose = [name for name in names if name not in sizes]
        if loose and not faults:
            faults = [self._open(loose, values, sizes)]
        numbers = itertools.chain(*(layout.numbers for layout in wanted))
        repeats = (name for name, _ in row.values.repeat)
        empty = [n for n in (*numbers, *repeats) if sizes.get(n) == 0]
        faults += [f"{name} has size 0, so no leaf holds it" for name in empty]
        lists = [name for name, take in row.values.take if take.size]
        if faults and lists:
            text = f"take names all numbers of {listing(lists)}, or has 'of': how many"
            faults.append(f"{text} there are")
        if faults:
            self._fault(f"{listing([first])}: {'; '.join(faults)}")
        return (layouts, wanted), sizes

    def _source_layouts(
        self, sources: Sequence[Sequence[str]]
    ) -> tuple[list[Layout], list[Equation], int]:
        """Return layouts of the sources, what their shapes say, and axes of ``...``."""
        equations: list[Equation] = []
        layouts: list[Layout] = []
        further: dict[int, str] = {}  # numbers of axes that ``...`` stands for
        for address, (path, *_) in zip(self._named.sources, sources, strict=True):
            spec = self.source[path]
            axes = _ranked(address.axes, len(shape_of(spec)))
            if not is_array(spec):
                text = f"{listing([path])} is a Python number and not an array"
                self._fault(text, "values")
            if axes is None:
                text = f"{listing([path])} is {describe(spec)}, and"
                count = len(address.axes)
                self._fault(f"{text} {address.text!r:.200} has axes for {count}")
            layouts.append(Layout(self._inner(address), axes))
            equations += self._equations(axes, path, spec, is_target=False)
            further.setdefault(len(axes) - len(address.axes), path)
        self._check_alike(further.values())
        (more,) = further
        return layouts, equations, more

    def _solve(self, equations: Sequence[Equation], sizes: dict[str, int]) -> list[str]:
        """Add what follows to sizes, also of what is taken; return contradictions."""
        faults = [*solve(equations, sizes)]
        for name, _ in self.row.values.take:
            if name in sizes and taken_name(name) not in sizes:
                order = self.renumbering.order(name, sizes[name])
                sizes[taken_name(name)] = len(order)
                return self._solve(equations, sizes)
        return faults

    def _equations(
        self, axes: Axes, path: str, spec: Any, *, is_target: bool
    ) -> Iterator[Equation]:
        """Yield what the shape of one leaf says of sizes."""
        pads = self.row.values.pads(is_source=not is_target)
        for place, (axis, size) in enumerate(zip(axes, shape_of(spec), strict=True)):
            where = f"axis {place} of {listing([path])}"
            if axis.name in pads:
                size, where = size - sum(pads[axis.name]), f"{where} without padding"
            block = self._block(axis)
            if block:  # the last one may be short
                yield Equation((axis.parts[0][:1],), -(-size // block), where)
            else:
                yield Equation(axis.parts, size, where, axis.before)

    def _block(self, axis: Axis) -> int:
        """Return the size of the blocks of an axis; 0 unless its last one may be short.

        Factors have a number for each block, whose size is given; the product has the
        axis whole.
        """
        (product, *others), row = axis.parts, self.row
        if not row.values.multiply or others or len(product) < 2:
            return 0
        is_whole = all(
            any(axis in address.axes for address in side)
            for side in (row.sources, row.targets)
        )
        if not is_whole or not {*product[1:]} <= {*self.sizes}:
            return 0
        return math.prod(self.sizes[name] for name in product[1:])

    def _lengths(self, sources: Sequence[Sequence[str]]) -> dict[Product, int]:
        """Return the sizes of axes whose last block may be short."""
        lengths: dict[Product, int] = {}
        for address, (path, *_) in zip(self.row.sources, sources, strict=True):
            shape = shape_of(self.source[path])
            for place, (axis, size) in enumerate(zip(address.axes, shape, strict=True)):
                other = lengths.setdefault(axis.parts[0], size)
                if self._block(axis) and other != size:
                    text = f"axis {place} of {listing([path])} has size {size:,}"
                    self._fault(f"{text}, and another factor {other:,}")
        axes = (axis for address in self.row.targets for axis in address.axes)
        return {a.parts[0]: lengths[a.parts[0]] for a in axes if self._block(a)}

    def _move(
        self,
        sides: Sequence[Sequence[Layout]],
        sizes: Sizes,
        sources: Sequence[Sequence[str]],
        target_path: str,
    ) -> Move:
        """Return how the arrays of a group are moved, with their new dtype.

        Args:
            sides: layouts of the sources, and of the targets.
            sizes: of all names.
            sources: paths of the leaves of each source.
            target_path: of the first target.
        """
        row, source_path = self.row, sources[0][0]
        dtype = (
            self._dtype_of_product(sources)
            if row.values.multiply
            else self.source[source_path].dtype
        )
        lacking = [name for name in row.values.size_names if name not in sizes]
        if lacking:
            text = (
                f"{listing([source_path])}: the size of {listing(lacking)} stays open"
            )
            self._fault(f"{text}; {_write_size()}")
        values = row.values.with_sizes(sizes)
        self._check_numbers(values, dtype, source_path)
        after = self._cast_dtype(dtype, source_path, target_path)
        padded = (dtype, after) if row.values.pad else ()
        lacking = [each for each in padded if not has_zero(each)]
        if lacking:
            text = f"{listing([source_path])}: {lacking[0]} has no zeros to pad with"
            self._fault(text, "values")
        takes = self.renumbering.orders(_names(sides[0]), sizes, source_path)
        like: Any = (self.target or {}).get(target_path)
        if row.values.fills and is_array(like) and like.dtype != after:
            text = f"{listing([target_path])} would be {after} and is {like.dtype}"
            cure = (
                f"what the target fills is not cast; write {{'cast': '{like.dtype}'}}"
            )
            self._fault(f"{text}, and {cure}", "values")
        return Move(
            sources=tuple(sides[0]),
            targets=tuple(sides[1]),
            pieces=row.pieces,
            sizes=tuple((n, sizes[n]) for n in _names(itertools.chain(*sides))),
            values=values,
            dtype=after,
            compares=row.compares,
            lengths=(*self._lengths(sources).items(),) if row.values.multiply else (),
            takes=takes,
            # Of a sum only its first source can be given back, the others get zeros.
            zeros=(*range(1, len(sides[1])),) if values.add and values.undoes else (),
        )

    def _dtype_of_product(self, sources: Sequence[Sequence[str]]) -> Any:
        """Return the dtype of what some factors make."""
        dtypes = {paths[0]: self.source[paths[0]].dtype for paths in sources}
        for path, dtype in dtypes.items():
            is_small = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize <= 2
            if not (is_small or is_inexact_dtype(dtype)):
                text = f"{listing([path])} is {dtype}, which is not a factor"
                self._fault(text, "values")
        return factor_dtype(dtypes.values())

    def _check_numbers(self, values: Values, dtype: Any, source_path: str) -> None:
        """Raise unless arrays of a dtype can be computed with the row's numbers."""
        if not values.computes:
            return
        text = f"{listing([source_path])} is"
        if not is_inexact_dtype(dtype):
            text = f"{text} {dtype}, which cannot be scaled, shifted or added"
            self._fault(text, "values")
        limits = jnp.finfo(wide_dtype(dtype))
        least, most = float(limits.tiny), float(limits.max)
        if not least <= abs(values.scale) <= most or abs(values.offset) > most:
            numbers = f"a scale of {values.scale} and an offset of {values.offset}"
            text = f"{text} computed in {limits.dtype}, which cannot hold {numbers}"
            self._fault(text, "values")

    def _cast_dtype(self, dtype: Any, source_path: str, target_path: str) -> Any:
        """Return the dtype of what a group makes."""
        cast, undoes = self.row.values.cast, self.row.values.undoes
        if not cast:
            return dtype
        ends = [jnp.dtype(name) for name in (cast[0], cast[-1])]
        before, after = reversed(ends) if undoes else ends
        like: Any = (self.target or {}).get(target_path)
        problem = ""
        if undoes and len(cast) == 1 and is_array(like):
            after = like.dtype
        elif undoes and len(cast) == 1:
            problem = (
                "was cast from a dtype that only a target shows: pass one, or write "
                f"the old dtype, too, as {{'cast': ['bfloat16', '{cast[0]}']}}"
            )
        if dtype != before and (undoes or len(cast) > 1):
            problem = f"is {dtype}, and the row casts {before}"
        if not problem and (kind_of(after) is None or kind_of(after) != kind_of(dtype)):
            problem = f"is {dtype}, and {after} is another kind of number"
        if problem:
            self._fault(f"{listing([source_path])} {problem}", "values")
        return after

    def _check_equal(self, sources: Sequence[Sequence[str]]) -> None:
        """Raise unless the arrays of a group go together."""
        if len(sources) == len(sources[0]) == 1:
            return
        dtypes: dict[Any, str] = {}
        for paths in sources:
            shapes: dict[Any, str] = {}
            for path in paths:
                spec = self.source[path]
                shapes.setdefault((shape_of(spec), is_array(spec)), path)
                dtypes.setdefault(getattr(spec, "dtype", type(spec)), path)
            self._check_alike(shapes.values())
            if self.row.values.multiply:  # a factor may have any
                self._check_alike(dtypes.values())
                dtypes.clear()
        self._check_alike(dtypes.values())

    def _check_alike(self, paths: Collection[str]) -> None:
        if len(paths) > 1:
            texts = [f"{listing([p])} is {describe(self.source[p])}" for p in paths]
            self._fault(", ".join(texts[:2]), "unequal")

    def _open(self, names: Sequence[str], values: Shared, sizes: Sizes) -> str:
        """Write that sizes stay open, and what would settle them.

        Args:
            names: of these sizes.
            values: text and numbers that the leaves share.
            sizes: what is known of sizes.
        """
        text = f"the size of {listing(names)} stays open"
        if self.target is None:
            target = name_target("give a target")
            return f"{text}; {_write_size()}, or {target}"
        paths = [path for _, path in self._firsts(values, sizes)]
        lacking = [path for path in paths if path not in self.target]
        if not lacking or self.is_partial:
            return f"{text}, and the target does not show it; {_write_size()}"
        self.problems.lacking += lacking
        return f"{text}: the target has no {listing(lacking)}"

    def _fault(self, text: str, kind: str = "sizes") -> NoReturn:
        raise UnplannedError(text, kind)


def _names(layouts: Iterable[Layout]) -> dict[str, None]:
    """Return the names of all numbers and axes, in order."""
    return dict.fromkeys(
        name
        for layout in layouts
        for name in (*layout.numbers, *every_name(layout.axes))
    )


def _ranked(axes: Axes, rank: int) -> Any:
    """Return one axis for each of an array of some rank; None if it cannot have them.

    What ``...`` stands for is written out.
    """
    names = [axis.name for axis in axes]
    if REST not in names:
        return axes if len(axes) == rank else None
    place, count = names.index(REST), rank - len(axes) + 1
    rest = tuple(Axis(((f"{REST}{number}",),)) for number in range(count))
    return (*axes[:place], *rest, *axes[place + 1 :]) if count >= 0 else None


def _made(move: Move, layout: Layout) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of the leaves that a move gives at an address."""
    pads = move.values.pads(is_source=False)
    padded = tuple(
        size + sum(pads.get(axis.name, ()))
        for axis, size in zip(layout.axes, move.shape(layout), strict=True)
    )
    return jax.ShapeDtypeStruct(padded, move.dtype)


def _write_size() -> str:
    calls = "sizes= of ta.Migration or ta.load_migration"
    return f"write it in {worded(calls, '[sizes]')}"
