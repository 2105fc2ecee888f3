"""Groups: leaves that move together, and the sizes of their axes.

Takes one row and the leaves that it takes. Leaves that differ only in numbers which
become axes are one group; its sizes are solved from the shapes of its sources first,
then of the target.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from treeadapt.arrays import is_array, is_inexact_dtype
from treeadapt.convert import describe
from treeadapt.migrations.axes import REST, Axes, Axis, names_of
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Address, Row
from treeadapt.migrations.running import Layout, Move
from treeadapt.migrations.solving import Equation, solve
from treeadapt.migrations.templates import Captures, decompose
from treeadapt.names import listing, natural, plural

_SHOWN = 6  # missing leaves that a message lists

Specs = Mapping[str, Any]


class Taken(NamedTuple):
    """A leaf that a row takes: by which of its addresses, and what it captured."""

    address: int
    path: str
    captures: Captures


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that move together.

    Attributes:
        row: the row that takes them.
        place: its place in the table.
        sources: paths of the leaves of each source, in the order of their numbers.
        targets: the same of each target.
        move: how their arrays are moved; None where each leaf stays as it is, and where
            the row has a function.
        made: shape and dtype of each target's leaves; None where a function decides.
        bytes: of its sources and targets together.
    """

    row: Row
    place: int
    sources: tuple[tuple[str, ...], ...]
    targets: tuple[tuple[str, ...], ...]
    move: Move | None
    made: tuple[Any, ...]
    bytes: int

    @property
    def given(self) -> Iterator[str]:
        """Paths of all its sources."""
        return itertools.chain.from_iterable(self.sources)

    @property
    def filled(self) -> Iterator[str]:
        """Paths of all its targets."""
        return itertools.chain.from_iterable(self.targets)


class _UnplannedError(Exception):
    """A group cannot be planned, because of what the problems say."""


@dataclasses.dataclass
class GroupMaker:
    """Makes the groups of one row.

    Attributes:
        row: the row.
        place: its place in the table.
        sizes: sizes that hold in the whole table.
        source: shapes and dtypes by path.
        target: the same of what the result should be, if that is known.
        problems: gets all that is wrong.
        hint: what to do with leaves after the last whole block.
    """

    row: Row
    place: int
    sizes: Mapping[str, int]
    source: Specs
    target: Specs | None
    problems: Problems
    hint: str = ""

    def groups(self, taken: Sequence[Taken]) -> list[Group]:
        """Return the groups, in natural order of their first targets."""
        counts = self._counts(taken)
        if counts is None:
            return []
        held: dict[tuple[Any, ...], list[dict[tuple[int, ...], str]]] = {}
        values: dict[tuple[Any, ...], dict[str, Any]] = {}
        for address, path, captures in taken:
            own = self._values(captures, counts)
            layout = self.row.sources[address].numbers
            inner = tuple(own[n] for n in layout if n not in self.row.outer)
            outer = {
                n: v for n, v in own.items() if n not in layout or n in self.row.outer
            }
            key = tuple(sorted(outer.items()))
            values[key] = outer
            group = held.setdefault(key, [{} for _ in self.row.sources])
            group[address][inner] = path
        made = []
        for key, leaves in held.items():
            try:
                made.append(self._group(values[key], leaves, counts))
            except _UnplannedError:
                continue
        return sorted(made, key=lambda group: natural(group.targets[0][0]))

    def _values(self, captures: Captures, counts: Mapping[str, int]) -> dict[str, Any]:
        """Return the value of each name, those of products taken apart."""
        own: dict[str, Any] = {}
        for key, value in captures.items():
            if key.startswith("("):
                own |= decompose(key.strip("()").split(), int(value), counts)
            else:
                own[key] = value
        return own

    def _counts(self, taken: Sequence[Taken]) -> dict[str, int] | None:
        """Count the numbers that the row's sources hold, by name."""
        most: dict[tuple[str, ...], int] = {}
        for address, _, captures in taken:
            for each in self.row.sources[address].path.captures:
                if each.is_number and not each.entries:
                    number = int(captures[each.key])
                    most[each.names] = max(most.get(each.names, 0), number)
        counts = dict(self.row.listed)
        counts |= {names[0]: n + 1 for names, n in most.items() if len(names) == 1}
        for names, number in most.items():
            first, *others = names
            if not others:
                continue
            known = {**counts, **self.sizes}
            if self.target is not None and not {*others} <= {*known}:
                known = {**self._counts_of_target(known), **known}
            where = f"the number {{({' '.join(names)})}} of {self.row.text!r:.200}"
            if not {*others} <= {*known}:
                faults = [*solve([Equation((names,), number + 1, where)], known)]
                loose = [name for name in names if name not in known]
                if faults or loose:
                    text = faults[0] if faults else f"{where}: {_open(loose)}"
                    self.problems.add("sizes", text)
                    return None
            counts |= {name: known[name] for name in others}
            block = math.prod(known[name] for name in others)
            counts[first] = number // block + 1
            self.hint = self._remainder(taken, names, (number + 1) // block * block)
        return counts

    def _remainder(
        self, taken: Sequence[Taken], names: Sequence[str], start: int
    ) -> str:
        """Propose a row for the leaves after the last whole block."""
        key = f"({' '.join(names)})"
        paths = [
            each.path for each in taken if int(each.captures.get(key, -1)) >= start
        ]
        text = self.row.sources[0].path.text.replace(f"{{{key}}}", f"{{n+{start}}}")
        return (
            f"; {listing(paths, limit=2)} are not a whole block: take them in a row "
            f"above, {text!r:.200}"
            if paths
            else ""
        )

    def _counts_of_target(self, known: Mapping[str, int]) -> dict[str, int]:
        """Count what the names and shapes of the target say of the row's numbers."""
        found: dict[str, int] = {}
        assert self.target is not None
        for address in self.row.targets:
            for path, spec in self.target.items():
                captures = address.path.match(path)
                if captures is None or not is_array(spec):
                    continue
                for key, value in captures.items():
                    if isinstance(value, int) and not key.startswith("("):
                        found[key] = max(found.get(key, 0), value + 1)
                sizes = dict(known)
                axes = _ranked(address.axes or (), len(spec.shape))
                if axes is not None:
                    [*solve(self._equations(address, axes, path, spec), sizes)]
                    found |= {n: s for n, s in sizes.items() if n not in known}
        return found

    def _group(
        self,
        values: dict[str, Any],
        leaves: Sequence[Mapping[tuple[int, ...], str]],
        counts: Mapping[str, int],
    ) -> Group:
        """Plan one group.

        Args:
            values: text and numbers that all its leaves share.
            leaves: paths by the numbers that tell the leaves of a source apart.
            counts: how many of each number the whole row has.
        """
        row = self.row
        if not row.has_axes:
            return self._renamed(values, leaves, counts)
        inner = [self._inner(address) for address in row.sources]
        own = {
            name: max(index[place] for index in found) + 1
            for names, found in zip(inner, leaves, strict=True)
            for place, name in enumerate(names)
            if found and name not in row.listed
        }
        used = dict(counts)
        if any(counts[name] != count for name, count in own.items()):
            # Another count than that of other groups holds if the target confirms it.
            tried = {**counts, **own}
            if self._missing(values, leaves, tried) is None and self._confirmed(
                values, leaves, tried
            ):
                used = tried
        missing = self._missing(values, leaves, used)
        if missing is not None:
            paths = [*itertools.chain(*(found.values() for found in leaves))]
            text = f"{listing(paths, limit=2)} without {listing(missing)}{self.hint}"
            self.problems.add("torn", text)
            raise _UnplannedError
        sources = tuple(
            tuple(found[index] for index in _product(names, used))
            for names, found in zip(inner, leaves, strict=True)
        )
        return self._moved(values, sources, used)

    def _inner(self, address: Address) -> tuple[str, ...]:
        return tuple(n for n in address.numbers if n not in self.row.outer)

    def _missing(
        self,
        values: Mapping[str, Any],
        leaves: Sequence[Mapping[tuple[int, ...], str]],
        counts: Mapping[str, int],
    ) -> list[str] | None:
        """Return the first paths that a group lacks; None if it is whole."""
        missing: list[str] = []
        for address, found in zip(self.row.sources, leaves, strict=True):
            names = self._inner(address)
            if not {*names} <= {*counts}:  # no leaf of this source is there at all
                missing.append(address.path.text)
                continue
            if len(found) == math.prod(counts[name] for name in names):
                continue
            lacking = (i for i in _product(names, counts) if i not in found)
            for index in itertools.islice(lacking, _SHOWN):
                every = {**values, **dict(zip(names, index, strict=True))}
                missing.append(address.path.fill(every, counts))
        return missing or None

    def _confirmed(
        self,
        values: Mapping[str, Any],
        leaves: Sequence[Mapping[tuple[int, ...], str]],
        counts: Mapping[str, int],
    ) -> bool:
        """Return whether the target's shapes agree with some counts."""
        paths = tuple(tuple(found.values()) for found in leaves)
        if self.target is None:
            return False
        try:
            quiet = dataclasses.replace(self, problems=Problems())
            group = quiet._moved(values, paths, counts)
        except _UnplannedError:
            return False
        return not quiet.problems.found and all(p in self.target for p in group.filled)

    def _renamed(
        self,
        values: Mapping[str, Any],
        leaves: Sequence[Mapping[Any, str]],
        counts: Mapping[str, int],
    ) -> Group:
        """Plan a group whose leaves keep their axes."""
        row, sizes = self.row, {**counts, **self.sizes}
        sources = tuple(tuple(found.values()) for found in leaves)
        absent = [
            address.path.fill(values, sizes)
            for address, found in zip(row.sources, sources, strict=True)
            if not found
        ]
        given = [*itertools.chain(*sources)]
        if absent:
            text = f"{listing(given, limit=2)} without {listing(absent)}"
            self.problems.add("torn", text)
            raise _UnplannedError
        targets = tuple((each.path.fill(values, sizes),) for each in row.targets)
        specs = [self.source[path] for path in given]
        if row.function is not None:
            made: tuple[Any, ...] = (None,) * len(targets)
            return self._made(sources, targets, None, made)
        self._check_equal(sources)
        move = None
        if row.values or row.compares:
            shape = shape_of(specs[0])
            axes = {f"axis {place}": size for place, size in enumerate(shape)}
            layout = Layout((), tuple(Axis(((name,),)) for name in axes))
            sides = [layout] * len(sources), [layout] * len(targets)
            move = self._move(*sides, tuple(axes.items()), targets, given)
        spec = specs[0] if move is None else _spec(specs[0].shape, move.dtype)
        return self._made(sources, targets, move, (spec,) * len(targets))

    def _moved(
        self,
        values: Mapping[str, Any],
        sources: tuple[tuple[str, ...], ...],
        counts: Mapping[str, int],
    ) -> Group:
        """Plan a group whose axes are written."""
        row = self.row
        self._check_equal(sources)
        sizes = {**counts, **self.sizes}
        equations: list[Equation] = []
        ranked: list[Axes] = []
        for address, paths in zip(row.sources, sources, strict=True):
            spec = self.source[paths[0]]
            axes = _ranked(address.axes or (), len(shape_of(spec)))
            if axes is None or not is_array(spec):
                self._fault(_misranked(paths[0], spec, address))
            ranked.append(axes)  # type: ignore[arg-type]
            equations += self._equations(address, axes or (), paths[0], spec)
        clashes = [
            f"{plural(counts[name], 'leaf')} for {name}, whose size is {size}"
            for name, size in self.sizes.items()
            if counts.get(name, size) != size
            and not (name in row.outer and counts[name] < size)
        ]
        faults = clashes + [*solve(equations, sizes)]
        rank = sum(n.startswith(REST) for n in names_of(ranked[0], 0))
        wanted = [_ranked(a.axes or (), rank, of_rest=True) for a in row.targets]
        if self.target is not None and not faults:
            self._solve_by_target(values, wanted, sizes)
            faults = faults or [*solve(equations, sizes)]
        if faults:
            self._fault(f"{listing([sources[0][0]])}: {'; '.join(faults)}")
        names = dict.fromkeys(
            itertools.chain(
                *(a.numbers for a in (*row.sources, *row.targets)),
                *(
                    part
                    for axes in (*ranked, *wanted)
                    for axis in axes or ()
                    for part in axis.parts
                ),
            )
        )
        loose = [n for n in names if n not in sizes and n not in values]
        if loose:
            self._fault(f"{listing([sources[0][0]])}: {_open(loose)}")
        empty = [
            name
            for address in row.targets
            for name in self._inner(address)
            if sizes[name] == 0
        ]
        if empty:
            text = f"{empty[0]} has size 0, so no leaf holds it"
            self._fault(f"{listing([sources[0][0]])}: {text}")
        targets = tuple(
            tuple(
                address.path.fill(
                    {**values, **dict(zip(self._inner(address), index, strict=True))},
                    sizes,
                )
                for index in _product(self._inner(address), sizes)
            )
            for address in row.targets
        )
        layouts = [
            [
                Layout(self._inner(address), axes or ())
                for address, axes in zip(side, every, strict=True)
            ]
            for side, every in ((row.sources, ranked), (row.targets, wanted))
        ]
        known = tuple((name, sizes[name]) for name in names if name in sizes)
        given = [paths[0] for paths in sources]
        move = self._move(layouts[0], layouts[1], known, targets, given)
        made = []
        pads: dict[Any, Any] = {} if row.undoes else dict(row.values.pad)
        for layout in move.targets:
            padded = tuple(
                size + sum(pads.get(axis.name, ()))
                for axis, size in zip(layout.axes, move.shape(layout), strict=True)
            )
            made.append(_spec(padded, move.dtype))
        return self._made(sources, targets, move, tuple(made))

    def _solve_by_target(
        self,
        values: Mapping[str, Any],
        wanted: Sequence[Axes | None],
        sizes: dict[str, int],
    ) -> None:
        """Add the sizes that only the target's shapes and names show."""
        assert self.target is not None
        for _ in range(2):
            equations: list[Equation] = []
            for address, axes in zip(self.row.targets, wanted, strict=True):
                path = self._first_path(address, values, sizes)
                like: Any = self.target.get(path) if path is not None else None
                if is_array(like) and len(like.shape) == len(axes or ()):
                    equations += self._equations(address, axes or (), path or "", like)
            # What contradicts the target is reported with its whole shape.
            [*solve(equations, sizes)]
            every = {name for each in self.row.targets for name in self._inner(each)}
            if every <= {*sizes}:
                return
            found = self._counts_of_target(sizes)
            sizes |= {name: found[name] for name in every - {*sizes} if name in found}

    def _first_path(
        self, address: Address, values: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> str | None:
        """Return the path of an address's first leaf, if its sizes are known."""
        every = {**dict.fromkeys(self._inner(address), 0), **values}
        try:
            return address.path.fill(every, sizes)
        except KeyError:
            return None

    def _equations(
        self, address: Address, axes: Axes, path: str, spec: Any
    ) -> Iterator[Equation]:
        """Yield what the shape at an address says of sizes."""
        row = self.row
        is_padded = (address in row.sources) == row.undoes
        pads: dict[Any, Any] = dict(row.values.pad) if is_padded else {}
        for place, (axis, size) in enumerate(zip(axes, shape_of(spec), strict=True)):
            where = f"axis {place} of {listing([path])}"
            if axis.name in pads:
                size, where = size - sum(pads[axis.name]), f"{where} without padding"
            yield Equation(axis.parts, size, where)

    def _move(
        self,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        sizes: tuple[tuple[str, int], ...],
        paths: Sequence[Sequence[str]],
        given: Sequence[str],
    ) -> Move:
        row = self.row
        dtype = self.source[given[0]].dtype if is_array(self.source[given[0]]) else None
        if dtype is None:
            self._fault(f"{listing(given[:1])} is a Python number and not an array")
        if row.values.computes and not is_inexact_dtype(dtype):
            text = f"{listing(given[:1])} is {dtype}, which cannot be scaled or shifted"
            self.problems.add("values", text)
            raise _UnplannedError
        final = self._cast(dtype, given[0], paths[0][0])
        return Move(
            tuple(sources),
            tuple(targets),
            row.pieces,
            sizes,
            row.values,
            row.undoes,
            final,
            row.compares,
        )

    def _cast(self, dtype: Any, path: str, filled: str) -> Any:
        """Return the dtype of what a group makes."""
        row, cast = self.row, self.row.values.cast
        if not cast:
            return dtype
        old, new = jnp.dtype(cast[0]), jnp.dtype(cast[-1])
        spec: Any = (self.target or {}).get(filled)
        problem = ""
        if not row.undoes:
            final = new
            if len(cast) > 1 and dtype != old:
                problem = f"is {dtype}, and the row casts {old}"
        elif dtype != new:
            final, problem = new, f"is {dtype}, and the row was cast to {new}"
        elif len(cast) > 1:
            final = old
        elif is_array(spec):
            final = spec.dtype
        else:
            final, problem = (
                new,
                (
                    "was cast: from which dtype is known from a target only, or from "
                    f"{{'cast': [..., {cast[-1]!r}]}}"
                ),
            )
        if not problem and _rank(final) < _rank(dtype):
            problem = f"is {dtype}, which {final} cannot hold"
        if problem:
            self.problems.add("values", f"{listing([path])} {problem}")
            raise _UnplannedError
        return final

    def _check_equal(self, sources: Sequence[Sequence[str]]) -> None:
        """Raise unless the arrays of a group go together."""
        dtypes: dict[Any, str] = {}
        for paths in sources:
            shapes: dict[Any, str] = {}
            for path in paths:
                spec = self.source[path]
                shapes.setdefault((shape_of(spec), is_array(spec)), path)
                dtypes.setdefault(getattr(spec, "dtype", type(spec)), path)
            if len(shapes) > 1:
                self._unequal([*shapes.values()])
        if len(dtypes) > 1:
            self._unequal([*dtypes.values()])

    def _unequal(self, paths: Sequence[str]) -> None:
        texts = [f"{listing([p])} is {describe(self.source[p])}" for p in paths[:2]]
        self.problems.add("unequal", ", ".join(texts))
        raise _UnplannedError

    def _fault(self, text: str) -> None:
        self.problems.add("sizes", text)
        raise _UnplannedError

    def _made(
        self,
        sources: tuple[tuple[str, ...], ...],
        targets: tuple[tuple[str, ...], ...],
        move: Move | None,
        made: tuple[Any, ...],
    ) -> Group:
        size_bytes = sum(_bytes(self.source[p]) for paths in sources for p in paths)
        for paths, spec in zip(targets, made, strict=True):
            size_bytes += len(paths) * _bytes(spec)
        return Group(self.row, self.place, sources, targets, move, made, size_bytes)


def _open(names: Sequence[str]) -> str:
    return (
        f"the size of {listing(names)} stays open; write it in sizes=, or give a target"
    )


def _misranked(path: str, spec: Any, address: Address) -> str:
    if not is_array(spec):
        return f"{listing([path])} is a Python number and not an array"
    return (
        f"{listing([path])} is {describe(spec)}, and {address.text!r:.200} has axes "
        f"for {len(address.axes or ())}"
    )


def _ranked(axes: Axes, rank: int, *, of_rest: bool = False) -> Axes | None:
    """Return the axes with ``...`` written out for an array of some rank.

    Args:
        axes: as parsed.
        rank: of the array; with ``of_rest`` that of ``...`` alone.
        of_rest: see ``rank``.

    Returns:
        One axis for each of the array; None if it cannot have them.
    """
    has_rest = any(axis.name == REST for axis in axes)
    count = rank if of_rest else rank - len(axes) + 1
    if not has_rest:
        return axes if of_rest or len(axes) == rank else None
    if count < 0:
        return None
    rest = tuple(Axis(((f"{REST}{place}",),)) for place in range(count))
    place = [axis.name for axis in axes].index(REST)
    return (*axes[:place], *rest, *axes[place + 1 :])


def _product(
    names: Sequence[str], counts: Mapping[str, int]
) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(counts[name]) for name in names))


def _spec(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def shape_of(spec: Any) -> tuple[int, ...]:
    """Return the shape of a leaf; that of a Python number is empty."""
    return tuple(spec.shape) if is_array(spec) else ()


def _bytes(spec: Any) -> int:
    if not is_array(spec):
        return 0
    return math.prod(spec.shape) * int(getattr(spec.dtype, "itemsize", 0))


def _rank(dtype: Any) -> int:
    """Return where the kind of a dtype is among those that hold each other."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return [bool(jnp.issubdtype(dtype, kind)) for kind in kinds].index(True)
