"""``Migration``: the same numbers under other names and with other axes."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.chain import plan_chain
from treeadapt.migrations.copies import check_copies
from treeadapt.migrations.counts import Count
from treeadapt.migrations.files import BaseTable, write_tables
from treeadapt.migrations.group import Group
from treeadapt.migrations.moments import changed_moments
from treeadapt.migrations.operations import as_size
from treeadapt.migrations.plan import (
    BLANKS,
    DROPPED,
    MigrationPlan,
    leads_back,
    read_backwards,
)
from treeadapt.migrations.planning import (
    assign,
    compare_target,
    plan_groups,
)
from treeadapt.migrations.problems import Problems, name_target
from treeadapt.migrations.rows import Row, parse_row, parse_rows
from treeadapt.migrations.run_group import is_moved, run_group, sharding_of, spec_of
from treeadapt.migrations.spellings import HasPlace
from treeadapt.selection.rules import Rules
from treeadapt.text.html_table import html_table
from treeadapt.text.names import Speller, listing, natural, plural
from treeadapt.text.wording import worded
from treeadapt.trees.arrays import is_array, is_array_class, is_inexact_dtype
from treeadapt.trees.casting import has_zero
from treeadapt.trees.describing import describe
from treeadapt.trees.views import view_tree

_FILLINGS = (*BLANKS, "target", DROPPED)
_X64 = "jax_enable_x64 in arrays of JAX"
_ARRAYS = np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct


class Migration:
    r"""A table of rows: each says that the same numbers are at two addresses.

    An address is a path and, after " : ", the axes of the array as einops writes them.
    ``{name}`` in a path captures a part of one segment, ``{name:**}`` whole segments. A
    capture that the other path lacks is an axis: the leaves with the numbers 0 to n-1
    become one array, or one array becomes n leaves. See the page on the notation for
    every form.

    Args:
        table: mapping of sources to targets, or ordered pairs. A target is an address;
            None to drop leaves; ``(address, options)`` with any of ``take``,
            ``repeat``, ``scale``, ``offset``, ``pad``, ``fill``, ``cast``, ``multiply``
            and ``add``, and of ``sizes`` and ``checked`` for this row;
            ``(address, function)`` or ``(address, (function, inverse))``. On either
            side a tuple of addresses is several copies of one array, the parts of a
            concatenation that is written with ``[...]`` on the other side, the factors
            of a product, the summands of a sum, or what a function takes or returns.
        sizes: sizes of axes, for those that shapes leave open.
        new: what fills leaves of the target that the source lacks, by path, in which
            ``*`` and ``**`` are wildcards: ``"zeros"``, ``"ones"``, or ``"target"`` to
            keep them. ``"dropped"`` keeps them too, may match nothing, and is left out
            without a target; in an inverse it is what the rows drop. With a mark, as
            rows have, it is ``{"fill": "zeros", "check": "ask Ann"}``.

    Raises:
        MigrationError: a row is malformed; the message points at the column.

    Example:
        >>> m = Migration({"layers.{l}.q.weight : (h d) e": "blocks/q : l e h d"})
        >>> flat = {f"layers.{i}.q.weight": np.ones((6, 5)) for i in range(4)}
        >>> abstract = {"blocks/q": jax.ShapeDtypeStruct((4, 5, 2, 3), np.float64)}
        >>> m(flat, target=abstract)["blocks/q"].shape
        (4, 5, 2, 3)
        >>> list(m.inverse(m(flat, target=abstract)))[-1]
        'layers.3.q.weight'
    """

    # Of the class, because pickles of 0.3.0 have none of these.
    origin: str = ""
    published: str = ""  # the name of a published table, if it is one
    bases: tuple[BaseTable, ...] = ()
    counts: tuple[Count, ...] = ()
    unstated: tuple[str, ...] = ()  # what a configuration at hand should state
    shared_sizes: frozenset[str] = frozenset()
    omitted: tuple[int, ...] = ()  # rows of its file that a configuration leaves out

    def __init__(
        self,
        table: Any,
        *,
        sizes: Mapping[str, int] | None = None,
        new: Mapping[str, str | Mapping[str, str]] | None = None,
    ) -> None:
        for name, mapping in (("sizes", sizes), ("new", new)):
            require_mapping(name, mapping)
        known = {name: as_size(size) for name, size in (sizes or {}).items()}
        known = {name: size for name, size in known.items() if size}
        self._rows = parse_rows(table, known)
        check_copies(self._rows)
        self._sizes = {name: self._size(name, n) for name, n in (sizes or {}).items()}
        self._new = dict(new or {})
        marked = {path: _filling(path, how) for path, how in self._new.items()}
        self._added = tuple(
            parse_row(path, (None, {"check": check}) if check else None, known)
            for path, (_, check) in marked.items()
        )

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the table, in order."""
        return self._rows

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that hold in the whole table."""
        return self._sizes

    @property
    def tables(self) -> tuple[Migration, ...]:
        """The tables of a chain, in order; of one table that alone."""
        return (self,)

    @functools.cached_property
    def _fillings(self) -> dict[str, str]:
        """What fills new leaves, without marks."""
        return {path: _filling(path, how)[0] for path, how in self._new.items()}

    @property
    def _marked_new(self) -> tuple[Row, ...]:
        """What fills new leaves and has a mark, as rows of all tables."""
        every = itertools.chain(*(table._added for table in self.tables))
        return tuple(entry for entry in every if entry.notes.check)

    def then(self, other: Migration) -> Migration:
        """Return a migration that does ``other`` to what this one makes.

        It is called, planned, read backwards, written to a file and given to ``load``
        and ``carry_state`` like one table. Names and shapes between the tables need not
        exist anywhere, names of axes and ``sizes`` are those of each table, and the
        leaves between may be any: only the last result is compared with a target.

        Args:
            other: table or chain whose sources are the targets of this one.

        Raises:
            MigrationError: it is something else.

        Example:
            >>> a = Migration({"h.{(b i)}.w : e": "{i} : b e"}, sizes={"i": 3})
            >>> b = Migration({"{j=0,1} : b e": "local : b j e", "2": "full"})
            >>> flat = {f"h.{n}.w": np.full(2, n) for n in range(6)}
            >>> new = a.then(b)(flat)
            >>> new["local"].shape, new["full"].tolist()
            ((2, 2, 2), [[2, 2], [5, 5]])
            >>> a.then(b).inverse == b.inverse.then(a.inverse)
            True
        """
        if not isinstance(other, Migration):
            raise MigrationError(
                f"then() expects a Migration, got {describe(other)}."
                f"{to_migration(other)}"
            )
        return MigrationChain((*self.tables, *other.tables))

    def _size(self, name: str, number: Any) -> int:
        """Return a size as an int."""
        size = as_size(number)
        if not size:
            raise MigrationError(
                f"The size of {name!r:.200} is {number!r:.80}. It is an integer above "
                "0, of at most 64 bits."
            )
        axes = {name for row in self._rows for name in row.names}
        if name not in axes:
            near = Speller().nearest(str(name), sorted(axes), count=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Remove it."
            raise MigrationError(
                f"sizes= has {name!r:.200}, which is not an axis of any row. {hint}"
            )
        return size

    def __call__(self, tree: Any = None, target: Any = None) -> dict[str, Any]:
        """Return the leaves under their new names, with their new axes.

        Arrays of NumPy stay with NumPy, and may share memory with ``tree``: a row
        without axes and operations gives the caller's own objects, one array that
        becomes one array whole may be a view, as of ``numpy.transpose``, and so may be
        each leaf that one array becomes. Copies at several addresses may share memory,
        too, and ``new`` with ``"target"`` gives the target's own objects. To write into
        the result, copy it first.

        Under ``jit``, and on ``jax.ShapeDtypeStruct``, no value is checked.

        Args:
            tree: tree or flat dict; its arrays and Python numbers all need a row.
                Functions and other static leaves stay out of the result.
            target: tree or flat dict that the result should fit, concrete or abstract;
                its shapes solve sizes that would stay open. Each array that is moved
                goes to the sharding of its own leaf.

        Returns:
            Flat dict, in the order of the rows and then of names.

        Raises:
            MigrationError: leaves without a row, rows without a leaf, torn groups,
                clashes, sizes that contradict each other, misfits with ``target``, all
                at once and before any array is read; copies that differ, a padding
                that is not zero, values that their new dtype cannot hold.
        """
        leaves = _flat(tree)
        likes = None if target is None else _flat(target)
        plan, problems = self.planned(leaves, likes, compares=True)
        problems.raise_any()
        return self._made(plan, leaves, likes or {})

    def _made(
        self, plan: MigrationPlan, leaves: Mapping[str, Any], likes: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what a plan makes of leaves."""
        problems = Problems()
        for group in plan.groups:
            if group.move is not None:
                _check_leaves(group, leaves, problems)
        arrays = [leaf for leaf in leaves.values() if is_array(leaf)]
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays)
        in_numpy = all(isinstance(leaf, np.ndarray | np.generic) for leaf in arrays)
        new: dict[str, Any] = {}
        if not abstract:
            for path in plan.without_values(likes):
                problems.add("abstract", listing([path]), leaves=[path])
        for path, filling in plan.new.items():
            like = likes[path]
            if abstract:
                new[path] = plan.added[path]
            elif filling not in BLANKS:
                new[path] = like
            elif in_numpy:
                new[path] = np.full(like.shape, BLANKS[filling], like.dtype)
            elif _in_jax(like.dtype):
                blank, device = BLANKS[filling], sharding_of(like)
                new[path] = jnp.full(like.shape, blank, like.dtype, device=device)
            else:
                text = f"{listing([path])}: {like.dtype} needs {_X64}"
                problems.add("blank", text, leaves=[path])
        problems.raise_any()
        moved: dict[str, Any] = {}
        for _, groups in itertools.groupby(plan.groups, lambda group: group.place):
            row: dict[str, Any] = {}
            for group in groups:
                row |= run_group(group, leaves, likes)
            moved |= {path: row[path] for path in sorted(row, key=natural)}
        return moved | new

    def plan(self, source: Any, target: Any = None) -> MigrationPlan:
        """Return what would be done, from shapes and dtypes alone.

        Args:
            source: as for a call; also what ``read_metadata`` returns.
            target: as for a call.

        Raises:
            MigrationError: as for a call, but for what only values show.
        """
        likes = None if target is None else _flat(target)
        plan, problems = self.planned(_flat(source), likes, compares=True)
        problems.raise_any()
        return plan

    def planned(
        self,
        leaves: Mapping[str, Any],
        likes: Mapping[str, Any] | None,
        *,
        compares: bool = False,
        has_place: HasPlace | None = None,
    ) -> tuple[MigrationPlan, Problems]:
        """Return a plan, and what is wrong with it.

        Args:
            leaves: of the source, by path.
            likes: of the target, by path; None without one.
            compares: whether the result must fit the target.
            has_place: as for ``plan_groups``.

        Raises:
            MigrationError: a target is needed.
        """
        source = {
            path: spec_of(leaf) for path, leaf in leaves.items() if is_moved(leaf)
        }
        problems = Problems(origin=self.origin)
        static = tuple(path for path in leaves if path not in source)
        groups, dropped = plan_groups(
            self._rows, self._sizes, source, likes, problems, static, has_place
        )
        for name in sorted(self.shared_sizes.difference(self._sizes)):
            _check_one_size(name, groups, problems)
        for group, text in changed_moments(groups, source):
            problems.add("values", text, group.row, paths=[*group.filled])
        for group in groups if has_place is None else ():
            for path in group.filled if group.row.sees_target else ():
                if path not in (likes or {}):
                    text = f"{listing([path])}, by the row {group.row.text!r:.200}"
                    problems.add("unseen", text, group.row, paths=[path])
        needed = [
            path
            for path, filling in self._fillings.items()
            if filling != DROPPED and path not in self._new_if_lacking
        ]
        if needed and likes is None:
            cure = name_target("Pass one: the model, or its shapes", "Name one")
            raise MigrationError(
                f"{worded('new=', '[new]')} fills {listing(needed)} in the form of a "
                f"target. {cure}.",
                paths=needed,
            )
        is_target, likes = likes is not None, likes or {}
        filled = {path for group in groups for path in group.filled}
        left = {p: it for p, it in likes.items() if is_array(it) and p not in filled}
        new, lost = self._filled(left, problems)
        plan = MigrationPlan(
            tuple(groups),
            tuple(dropped),
            new,
            lost,
            {path: spec_of(likes[path]) for path in new},
            static,
            source,
            self._rows,
            self._added,
            self._sizes,
            {path: sharding_of(like) for path, like in likes.items()},
            self.bases,
            self.counts,
        )
        if compares and is_target:
            compare_target(plan.groups, plan.new, likes, problems)
        return plan, problems

    def _filled(
        self, left: Mapping[str, Any], problems: Problems
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return how arrays of a target are filled that no row fills, by path.

        Also what was dropped on the way there, and the target does not have.
        """
        by_row, _ = assign(self._added, [*left], problems)
        new: dict[str, str] = {}
        lost: list[str] = []
        entries = self._fillings.items()
        for (text, filling), matches in zip(entries, by_row, strict=True):
            if not matches and filling == DROPPED:
                lost.append(text)
            elif not matches and text not in self._new_if_lacking:
                problems.add("idle", listing([text]))
            for _, path, _ in matches:
                new[path] = filling
                if filling in BLANKS and not has_zero(left[path].dtype):
                    text = f"{listing([path])}: {describe(left[path])}"
                    problems.add("blank", text, paths=[path])
        return new, tuple(lost)

    @functools.cached_property
    def _new_if_lacking(self) -> frozenset[str]:
        """Entries of ``new`` for leaves that an optional row may fill."""
        paths = [
            target.path.text
            for row in self._rows
            if row.notes.optional
            for target in row.targets
        ]
        return frozenset(
            text
            for text, entry in zip(self._new, self._added, strict=True)
            if any(map(entry.takes, paths))
        )

    @functools.cached_property
    def inverse(self) -> Migration:
        """The rows read backwards.

        What a row drops is kept of a target that has it, and left out without one. What
        ``new`` fills is dropped: a path of ``new`` always, and what a pattern of it
        matches if no row takes it, or if a target has no place for what a row makes of
        it.

        Raises:
            MigrationError: a row has a function without an inverse, multiplies, takes
                some numbers of an axis only, or drops a part of a name; all such rows
                are named.
        """
        rows = [row for row in self._rows if not row.drops and not leads_back(row)]
        stuck = [row.text for row in rows]
        causes = {
            "multiply makes": any(row.values.multiply for row in rows),
            "take selects": any(row.selects for row in rows),
        }
        why = (f"; what {cause} has no way back" for cause in causes if causes[cause])
        if stuck:
            raise MigrationError(
                f"These rows cannot be read backwards: {listing(stuck)}. Write "
                "(target, (function, inverse)), and use all captured names in targets"
                f"{''.join(why)}."
            )
        dropped = (each.text for r in self._rows if r.drops for each in r.sources)
        inverse = Migration({}, new=dict.fromkeys(dropped, DROPPED))
        inverse._rows = tuple(row for _, row in read_backwards(self._rows, self._added))
        inverse._sizes, inverse.origin = dict(self._sizes), self.origin
        inverse.bases, inverse.shared_sizes = self.bases, self.shared_sizes
        inverse.unstated = self.unstated
        return inverse

    def to_toml(self) -> str:
        """Write the tables as a migration file, for ``load_migration``.

        Raises:
            MigrationError: rows have functions; all of them are named.

        Example:
            >>> table = {"w : i o": ("kernel : o i", {"scale": 0.5}), "*.mask": None}
            >>> print(Migration(table).to_toml(), end="")
            version = 1
            <BLANKLINE>
            [[rows]]
            from = "w : i o"
            to = "kernel : o i"
            scale = 0.5
            <BLANKLINE>
            [[rows]]
            drop = "*.mask"
        """
        tables = [(each._rows, each._sizes, each._new) for each in self.tables]
        return write_tables(tables)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Migration):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return tuple(
            (
                each._rows,
                frozenset(each._sizes.items()),
                tuple(each._fillings.items()),
                each._added,
            )
            for each in self.tables
        )

    def __repr__(self) -> str:
        pairs = [row.typed() for row in self._rows]
        is_unique = len({source for source, _ in pairs}) == len(pairs)
        table: Any = dict(pairs) if is_unique else pairs
        extra = f", sizes={self._sizes!r}" if self._sizes else ""
        extra += f", new={self._new!r}" if self._new else ""
        return f"Migration({table!r}{extra})"

    def _repr_html_(self) -> str:
        """Return the rows for a notebook."""
        rows = [(n, row.text, *row.made) for n, row in enumerate(self._rows, 1)]
        sizes = (f"{name} = {size}" for name, size in self._sizes.items())
        notes = [f"sizes: {', '.join(sizes)}"] * bool(self._sizes)
        notes += [f"new: {listing(self._new)}"] * bool(self._new)
        title = plural(len(rows), "row")
        if len(self.tables) > 1:
            title += f" of {len(self.tables)} tables, one after the other"
        return html_table(title, ("row", "source", "target", "and"), rows, notes)


class MigrationChain(Migration):
    """Tables, each of which takes what the one before makes; see ``Migration.then``.

    Args:
        tables: at least two.
    """

    def __init__(self, tables: Sequence[Migration]) -> None:
        super().__init__({})
        self._rows = tuple(itertools.chain(*(table.rows for table in tables)))
        self._tables = tuple(tables)
        self.origin = "; ".join(filter(None, (table.origin for table in tables)))

    @property
    def tables(self) -> tuple[Migration, ...]:
        """The tables, in order."""
        return self._tables

    def __call__(self, tree: Any = None, target: Any = None) -> dict[str, Any]:
        """Return the leaves as the last table makes them; see ``Migration``."""
        leaves = _flat(tree)
        likes = None if target is None else _flat(target)
        plan, problems = self.planned(leaves, likes, compares=True)
        if "unknown" in problems.texts:  # what a function makes is known once it ran
            first, *others = self._tables
            first_plan, problems = first.planned(leaves, plan.likes(0))
            problems.raise_any()
            leaves = first._made(first_plan, leaves, plan.likes(0))
            return functools.reduce(Migration.then, others)(leaves, target)
        problems.raise_any()
        for place, table in enumerate(self._tables):
            leaves = table._made(plan.tables[place], leaves, plan.likes(place))
        return dict(leaves)

    def planned(
        self,
        leaves: Mapping[str, Any],
        likes: Mapping[str, Any] | None,
        *,
        compares: bool = False,
        has_place: HasPlace | None = None,
    ) -> tuple[Any, Problems]:
        """Return a ``ChainPlan``, and what is wrong with it."""
        return plan_chain(self._tables, leaves, likes, compares=compares)

    @functools.cached_property
    def inverse(self) -> Migration:
        """The tables read backwards, the last one first.

        Raises:
            MigrationError: rows of a table have no way back; it names the table.
        """
        inverses: list[Migration] = []
        for number, table in enumerate(self._tables, 1):
            try:
                inverses.insert(0, table.inverse)
            except MigrationError as error:
                count = len(self._tables)
                raise MigrationError(f"Table {number} of {count}: {error}") from None
        return MigrationChain(inverses)

    def __repr__(self) -> str:
        first, *others = map(repr, self._tables)
        return first + "".join(f".then({text})" for text in others)


def _flat(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path; the name of a file is not one."""
    if tree is None:
        raise MigrationError(
            "Expected a tree of arrays. An inverse is a migration like any other: "
            "m.inverse, without (), and m.inverse(tree) to move a tree back."
        )
    if isinstance(tree, str | os.PathLike):
        raise MigrationError(
            f"Expected a tree of arrays, got {describe(tree)}. Of a checkpoint, "
            "load(path, migration=...) gives the arrays and read_metadata(path) their "
            "shapes."
        )
    flat = view_tree(tree).flat()
    require_dtypes(flat)
    return flat


def require_dtypes(leaves: Mapping[str, Any]) -> None:
    """Raise if an array has a dtype that NumPy and JAX lack.

    Raises:
        MigrationError: it names the path, and how to convert.
    """
    is_usual = {cls: is_array_class(cls) for cls in {*map(type, leaves.values())}}
    for path, leaf in leaves.items():
        if is_usual[type(leaf)] or not is_array(leaf):
            continue
        try:
            is_inexact_dtype(leaf.dtype)
        except TypeError as error:
            cls = type(leaf)
            raise MigrationError(
                f"The leaf {listing([path])} is a {cls.__module__}.{cls.__qualname__} "
                f"of {leaf.dtype}, not an array of NumPy or JAX. Convert all leaves, "
                "as with {name: x.detach().numpy() for name, x in state_dict.items()} "
                "(bfloat16: x.float() first), or save them and pass the file's name."
            ) from error


def to_migration(value: Any, keyword: str = "") -> str:
    """Write how to come by a migration, given what is not one; "" if that is not known.

    Args:
        value: in the place of a migration.
        keyword: of the argument, ``migration=``, if it is not the first.

    Example:
        >>> to_migration("table.toml")
        " Read it first: ta.load_migration('table.toml')."
    """
    if isinstance(value, Rules):
        return (
            " Rules label leaves; a table says which leaf becomes which: "
            f'{keyword}ta.Migration({{"old/path": "new/path"}}).'
        )
    if isinstance(value, str | os.PathLike):
        return f" Read it first: {keyword}ta.load_migration({os.fspath(value)!r:.200})."
    texts = value.values() if isinstance(value, Mapping) else ()
    if isinstance(value, list) or any(isinstance(x, str | tuple) for x in texts):
        return f" Wrap the table: {keyword}ta.Migration(table)."
    has_one = isinstance(getattr(value, "migration", None), Migration)
    names = {"MigrationDraft": "draft", "ModelMatch": "match"}
    name = names.get(type(value).__name__, "report")
    return f" Pass {name}.migration." * has_one


def _check_leaves(group: Group, leaves: Mapping[str, Any], problems: Problems) -> None:
    """Note leaves that cannot be moved, which their shapes and dtypes do not show."""
    for path in group.source_paths:
        leaf, text = leaves[path], ""
        if isinstance(leaf, np.ma.MaskedArray):
            text = "a masked array, whose mask would be lost; fill it first"
        elif not isinstance(leaf, _ARRAYS):
            text = f"{describe(leaf)}, which is not an array of NumPy or JAX"
        if text:
            problems.add("values", f"{listing([path])} is {text}", leaves=[path])
    dtype = group.target_specs[0].dtype
    is_jax = any(isinstance(leaves[path], jax.Array) for path in group.source_paths)
    if group.row.values.cast and is_jax and not _in_jax(dtype):
        paths = listing(group.filled, limit=2)
        text = f"{paths} would be {dtype}, which needs {_X64}"
        problems.add("values", text, leaves=[*group.filled])


def _filling(path: Any, how: Any) -> tuple[str, str]:
    """Return what fills new leaves, and the mark of that; empty without one.

    Raises:
        MigrationError: it is something else.
    """
    fields = how if isinstance(how, Mapping) else {"fill": how}
    filling, check = fields.get("fill"), fields.get("check", "")
    is_known = {*fields} <= {"fill", "check"} and isinstance(check, str)
    if not isinstance(path, str) or filling not in _FILLINGS or not is_known:
        raise MigrationError(
            f"new= has {path!r:.200}: {how!r:.80}. Write 'zeros' or 'ones', or "
            "'target' or 'dropped' to keep what the target has."
        )
    return filling, check


def require_mapping(name: str, value: Any) -> None:
    """Raise unless an argument is a mapping, or None.

    Raises:
        MigrationError: it is not.
    """
    if not isinstance(value, Mapping | None):
        raise MigrationError(f"Expected a mapping as {name}=, got {describe(value)}.")


def _check_one_size(name: str, groups: Iterable[Group], problems: Problems) -> None:
    """Note a size that rows of a table solve in two ways, and that a model has once."""
    firsts: dict[int, Group] = {}
    for group in groups:
        sizes = group.move.size if group.move and name not in group.row.sizes else {}
        if name in sizes:
            firsts.setdefault(sizes[name], group)
    if len(firsts) > 1:
        seen = (
            f"{size} in {listing([next(group.source_paths)])}"
            for size, group in [*firsts.items()][:2]
        )
        text = f"{name} is {' and '.join(seen)}, and a model has one {name}: pass"
        cure = f"config=, or sizes={{{name!r}: ...}}, with what is right"
        leaves = [next(group.source_paths) for group in firsts.values()]
        row = [*firsts.values()][-1].row
        problems.add("sizes", f"{text} {cure}", row, leaves=leaves)


def _in_jax(dtype: Any) -> bool:
    """Return whether arrays of JAX may have a dtype of numbers."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) == dtype)
