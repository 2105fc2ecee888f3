"""``Migration``: the same numbers under other names and with other axes."""

from __future__ import annotations

import functools
import itertools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.arrays import is_array, is_array_class, is_inexact_dtype, is_number
from treeadapt.convert import describe
from treeadapt.data_files import MAX_INTEGER
from treeadapt.errors import MigrationError
from treeadapt.migrations.files import check_weight, read_table, write_table
from treeadapt.migrations.groups import Group, has_zero, require_sound
from treeadapt.migrations.moments import changed_moments
from treeadapt.migrations.plan import (
    DROPPED,
    MigrationPlan,
    leads_back,
    read_backwards,
)
from treeadapt.migrations.planning import assign, compare_target, fits, plan_groups
from treeadapt.migrations.problems import Problems
from treeadapt.migrations.rows import Row, parse_row, parse_rows
from treeadapt.migrations.running import filled, run
from treeadapt.names import Speller, listing, natural
from treeadapt.tables.published import Config, find, is_name, stated_sizes
from treeadapt.trees.views import view_tree

_FILLINGS = ("zeros", "target", DROPPED)
_X64 = "jax_enable_x64 in arrays of JAX"
_EXPLICIT = """ On a mesh with Explicit axes, call
jax.sharding.auto_axes(migration, out_sharding=...) inside jit."""
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
            None to drop leaves; ``(address, options)`` with any of ``repeat``,
            ``scale``, ``offset``, ``pad``, ``fill``, ``cast`` and ``multiply``, and of
            ``sizes`` and ``checked`` for this row; ``(address, function)`` or
            ``(address, (function, inverse))``. On either side a tuple of addresses is
            several copies of one array, the parts of a concatenation that is written
            with ``[...]`` on the other side, the factors of a product, or what a
            function takes or returns.
        sizes: sizes of axes, for those that shapes leave open.
        new: what fills leaves of the target that the source lacks, by path, in which
            ``*`` and ``**`` are wildcards: ``"zeros"``, or ``"target"`` to keep them.
            ``"dropped"`` keeps them too, may match nothing, and is left out without a
            target; in an inverse it is what the rows drop.

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

    def __init__(
        self,
        table: Any,
        *,
        sizes: Mapping[str, int] | None = None,
        new: Mapping[str, str] | None = None,
    ) -> None:
        self._rows = parse_rows(table)
        for name, mapping in (("sizes", sizes), ("new", new)):
            if not isinstance(mapping, Mapping | None):
                raise MigrationError(
                    f"Expected a mapping as {name}=, got {describe(mapping)}."
                )
        self._sizes = {name: self._size(name, n) for name, n in (sizes or {}).items()}
        self._new = dict(new or {})
        for path, filling in self._new.items():
            if not isinstance(path, str) or filling not in _FILLINGS:
                raise MigrationError(
                    f"new= has {path!r:.200}: {filling!r:.80}. Write 'zeros', or "
                    "'target' or 'dropped' to keep what the target has."
                )
        self._added = tuple(parse_row(path, None) for path in self._new)
        self.origin = ""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the table, in order."""
        return self._rows

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that hold in the whole table."""
        return self._sizes

    def _size(self, name: str, number: Any) -> int:
        """Return a size as an int."""
        is_bool = isinstance(number, bool | np.bool_)
        try:
            size = 0 if is_bool else operator.index(number)
        except TypeError:
            size = 0
        if not 0 < size < MAX_INTEGER:
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

    def __call__(self, tree: Any, target: Any = None) -> dict[str, Any]:
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
        plan = self._plan(leaves, likes)
        problems = Problems()
        for group in plan.groups:
            if group.move is not None:
                _check_leaves(group, leaves, problems)
        arrays = [leaf for leaf in leaves.values() if is_array(leaf)]
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays)
        in_numpy = all(isinstance(leaf, np.ndarray | np.generic) for leaf in arrays)
        new: dict[str, Any] = {}
        likes = likes or {}
        if not abstract:
            for path in plan.without_values(likes):
                problems.add("abstract", listing([path]))
        for path, filling in plan.new.items():
            like = likes[path]
            if abstract:
                new[path] = plan.added[path]
            elif filling != "zeros":
                new[path] = like
            elif in_numpy:
                new[path] = np.zeros(like.shape, like.dtype)
            elif _in_jax(like.dtype):
                new[path] = jnp.zeros(like.shape, like.dtype, device=_sharding(like))
            else:
                problems.add("blank", f"{listing([path])}: {like.dtype} needs {_X64}")
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
        return self._plan(_flat(source), likes)

    def _plan(
        self, leaves: Mapping[str, Any], likes: Mapping[str, Any] | None
    ) -> MigrationPlan:
        plan, problems = self.planned(leaves, likes)
        if likes is not None:
            compare_target(plan.groups, plan.new, likes, problems)
        problems.raise_any()
        return plan

    def planned(
        self, leaves: Mapping[str, Any], likes: Mapping[str, Any] | None
    ) -> tuple[MigrationPlan, Problems]:
        """Return a plan, and what is wrong with it but for how it fits a target.

        Args:
            leaves: of the source, by path.
            likes: of the target, by path; None without one.

        Raises:
            MigrationError: a target is needed.
        """
        source = {
            path: _abstract(leaf) for path, leaf in leaves.items() if _moves(leaf)
        }
        problems = Problems(origin=self.origin)
        static = tuple(path for path in leaves if path not in source)
        groups, dropped = plan_groups(
            self._rows, self._sizes, source, likes, problems, static
        )
        for group, text in changed_moments(groups, source):
            problems.add("values", text, group.row, paths=[*group.filled])
        needed = [path for path, filling in self._new.items() if filling != DROPPED]
        if needed and likes is None:
            raise MigrationError(
                f"new= fills {listing(needed)} in the form of a target. Pass one: "
                "the model, or its shapes."
            )
        likes = likes or {}
        filled = {path for group in groups for path in group.filled}
        left = {p: it for p, it in likes.items() if is_array(it) and p not in filled}
        new, lost = self._filled(left, problems)
        plan = MigrationPlan(
            tuple(groups),
            tuple(dropped),
            new,
            lost,
            {path: _abstract(likes[path]) for path in new},
            static,
            source,
            self._rows,
            read_backwards(self._rows, self._added),
            self._sizes,
            {path: _sharding(like) for path, like in likes.items()},
        )
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
        for (text, filling), matches in zip(self._new.items(), by_row, strict=True):
            if not matches and filling == DROPPED:
                lost.append(text)
            elif not matches:
                problems.add("idle", listing([text]))
            for _, path, _ in matches:
                new[path] = filling
                if filling == "zeros" and not has_zero(left[path].dtype):
                    text = f"{listing([path])}: {describe(left[path])}"
                    problems.add("blank", text, paths=[path])
        return new, tuple(lost)

    @functools.cached_property
    def inverse(self) -> Migration:
        """The rows read backwards.

        What a row drops is kept of a target that has it, and left out without one. What
        ``new`` fills is dropped: a path of ``new`` always, and what a pattern of it
        matches if no row takes it, or if a target has no place for what a row makes of
        it.

        Raises:
            MigrationError: a row has a function without an inverse, multiplies, or
                drops a part of a name; all such rows are named.
        """
        rows = [row for row in self._rows if not row.drops and not leads_back(row)]
        stuck = [row.text for row in rows]
        products = "; what multiply makes has no way back"
        if stuck:
            raise MigrationError(
                f"These rows cannot be read backwards: {listing(stuck)}. Write "
                "(target, (function, inverse)), and use all captured names in targets"
                f"{products if any(row.values.multiply for row in rows) else ''}."
            )
        dropped = (each.text for r in self._rows if r.drops for each in r.sources)
        inverse = Migration({}, new=dict.fromkeys(dropped, DROPPED))
        inverse._rows = tuple(row for _, row in read_backwards(self._rows, self._added))
        inverse._sizes, inverse.origin = dict(self._sizes), self.origin
        return inverse

    def to_toml(self) -> str:
        """Write the table as a migration file, for ``load_migration``.

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
        return write_table(self._rows, self._sizes, self._new)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Migration):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self._rows, frozenset(self._sizes.items()), tuple(self._new.items())

    def __repr__(self) -> str:
        pairs = [row.typed() for row in self._rows]
        is_unique = len({source for source, _ in pairs}) == len(pairs)
        table: Any = dict(pairs) if is_unique else pairs
        extra = f", sizes={self._sizes!r}" if self._sizes else ""
        extra += f", new={self._new!r}" if self._new else ""
        return f"Migration({table!r}{extra})"


def _flat(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path; the name of a file is not one."""
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


def _check_leaves(group: Group, leaves: Mapping[str, Any], problems: Problems) -> None:
    """Note leaves that cannot be moved, which their shapes and dtypes do not show."""
    for path in group.source_paths:
        leaf, text = leaves[path], ""
        if isinstance(leaf, np.ma.MaskedArray):
            text = "a masked array, whose mask would be lost; fill it first"
        elif not isinstance(leaf, _ARRAYS):
            text = f"{describe(leaf)}, which is not an array of NumPy or JAX"
        if text:
            problems.add("values", f"{listing([path])} is {text}")
    dtype = group.target_specs[0].dtype
    is_jax = any(isinstance(leaves[path], jax.Array) for path in group.source_paths)
    if group.row.values.cast and is_jax and not _in_jax(dtype):
        paths = listing(group.filled, limit=2)
        problems.add("values", f"{paths} would be {dtype}, which needs {_X64}")


def _in_jax(dtype: Any) -> bool:
    """Return whether arrays of JAX may have a dtype of numbers."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) == dtype)


def run_group(
    group: Group,
    leaves: Mapping[str, Any],
    likes: Mapping[str, Any],
    fits: Callable[[Any, Any], bool] = fits,
) -> dict[str, Any]:
    """Return the leaves that one group makes.

    Args:
        group: of a plan.
        leaves: at least those of the group, by path: arrays of one kind.
        likes: leaves of the target, as far as there is one; a sharded array that is
            moved goes to their shardings.
        fits: says whether what a function makes fits a leaf of the target.

    Raises:
        MigrationError: copies are not equal, what is cut off is not zero, or a function
            returns other leaves than the row or the target has.
    """
    sources = [[leaves[path] for path in paths] for paths in group.sources]
    if group.row.function is not None:
        return _called(group, [leaf for (leaf,) in sources], likes, fits)
    if group.move is None:
        (leaf,) = sources[0]
        return dict.fromkeys(group.filled, leaf)
    every = [*itertools.chain(*sources)]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in every):
        return {
            path: jax.ShapeDtypeStruct(
                spec.shape, spec.dtype, sharding=_sharding(likes.get(path))
            )
            for path, spec in group.specs.items()
        }
    shardings = [
        [_sharding(likes.get(path)) for path in paths] for paths in group.targets
    ]
    try:
        arrays, faults = run(group.move, sources, shardings)
    except Exception as error:
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in every)
        error.add_note(
            f"In the migration row {group.row.text!r:.200}, which makes "
            f"{listing(group.filled, limit=2)} of "
            f"{listing(group.source_paths, limit=2)}."
            f"{_EXPLICIT if is_traced else ''}"
        )
        raise
    require_sound(group, faults)
    if group.row.values.fills:
        arrays = [
            [
                filled(group.move, place, array, likes[path])
                for path, array in zip(paths, of_target, strict=True)
            ]
            for place, (paths, of_target) in enumerate(
                zip(group.targets, arrays, strict=True)
            )
        ]
    return dict(zip(group.filled, itertools.chain(*arrays), strict=True))


def _called(
    group: Group,
    leaves: Sequence[Any],
    likes: Mapping[str, Any],
    fits: Callable[[Any, Any], bool],
) -> dict[str, Any]:
    row = group.row
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    function: Any = row.function
    try:
        result = jax.eval_shape(function, *leaves) if abstract else function(*leaves)
    except Exception as error:
        pairs = itertools.islice(zip(group.source_paths, leaves, strict=True), 4)
        texts = [f"{path!r}, {describe(leaf)}" for path, leaf in pairs]
        error.add_note(
            f"In the function of the migration row {row.text!r}, given "
            f"{'; '.join(texts)}."
        )
        raise
    paths = [*group.filled]
    if not row.splits:
        result = (result,)
    elif not isinstance(result, list | tuple) or len(result) != len(paths):
        count = len(result) if isinstance(result, list | tuple) else describe(result)
        raise MigrationError(
            f"The function of the row {row.text!r} gives {count} for "
            f"{listing(group.source_paths)}, and the row has {len(paths)} targets. "
            "Return a tuple with one leaf for each."
        )
    for path, leaf in zip(paths, result, strict=True):
        text = "" if _moves(leaf) else "which is not an array"
        if not text and path in likes and not fits(leaf, likes[path]):
            text = f"and the target has {describe(likes[path])}"
        if text:
            raise MigrationError(
                f"The function of the row {row.text!r:.200} made {listing([path])} of "
                f"{listing(group.source_paths, limit=2)}: {describe(leaf)}, {text}."
            )
    return dict(zip(paths, result, strict=True))


def load_migration(
    path: str | os.PathLike[str], *, config: Config | None = None
) -> Migration:
    """Read a migration from a TOML or JSON file, or one of the published tables.

    ``version = 1`` and ordered ``[[rows]]``. A row has ``from`` and ``to``, each an
    address or a list of them, and may have ``repeat``, ``scale``, ``offset``, ``pad``,
    ``fill`` and ``cast``, or these in a table ``undo``, and ``multiply``, ``sizes``,
    ``checked``, ``optional`` and ``check``; or it has ``drop``, alone or with
    ``check``, in an inverse also ``undo = "new"``. ``[sizes]`` and ``[new]`` as for
    ``Migration``. ``[config]`` says under which key of a configuration a size is:
    ``h = "num_attention_heads"``, with dots for nested keys, or a list of keys, of
    which the first counts that is there.

    Args:
        path: file name, ending in ``.toml`` or ``.json``. The file is read as data:
            nothing in it is imported or run. Any other text, unless it is absolute,
            begins with a dot or has a backslash, names a published table, as
            ``"tunix/qwen3"``, or with ``config`` its layout, ``"tunix"``.
        config: a published model's ``config.json``, the folder that has it, or what it
            holds: gives the model type, and sizes that neither ``[sizes]`` nor the rows
            have. A size that it states and shapes contradict is an error.

    Raises:
        MigrationError: the file cannot be read, is malformed, or too large; there is no
            such table; the configuration has no model type or a malformed size.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "table.toml"
        >>> text = Migration({"layers.{l}.w : i o": "w : l o i"}).to_toml()
        >>> _ = file.write_text(text)
        >>> load_migration(file)
        Migration({'layers.{l}.w : i o': 'w : l o i'})
        >>> config = {"model_type": "qwen3", "num_attention_heads": 16}
        >>> table = load_migration("tunix", config=config)
        >>> table.origin
        "of the table 'tunix/qwen3', with h = 16 (num_attention_heads)"
    """
    name = ""
    if is_name(path):
        name, path, *_ = find(path, config)
    rows, sizes, new, keys = read_table(path)
    stated = {} if config is None else stated_sizes(keys, config)
    used = {n: size for n, (size, _) in stated.items() if n not in sizes}
    try:
        migration = Migration(rows, sizes={**sizes, **used}, new=new)
    except MigrationError as error:
        raise MigrationError(f"Migration file {str(path)!r}: {error}") from None
    texts = [f"{n} = {size} ({stated[n][1]})" for n, size in used.items()]
    of_name = f"of the table {name!r}" if name else f"of {str(path)!r}" * bool(texts)
    migration.origin = ", with ".join(filter(None, (of_name, ", ".join(texts))))
    added = [each for row in migration._added for each in row.sources]
    for side in ("sources", "targets"):
        addresses = (each for row in migration._rows for each in getattr(row, side))
        check_weight(path, [each.path for each in (*added, *addresses)])
    return migration


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


def _moves(leaf: Any) -> bool:
    return is_array(leaf) or is_number(leaf)


def _sharding(like: Any) -> Any:
    return getattr(like, "sharding", None)
