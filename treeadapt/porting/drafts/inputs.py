"""One side of a draft: the leaves of a tree, a checkpoint or a schema.

Gives names, shapes and dtypes, and reads an array when it is asked for. Keys and counts
of random streams are left out: no file of another library has them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from treeadapt.checkpoints import opening, reading
from treeadapt.checkpoints.leaves import stored_form
from treeadapt.checkpoints.record import NUMBER, Leaf, Stored
from treeadapt.checkpoints.versions import watched
from treeadapt.errors import MigrationError
from treeadapt.migrations.migration import require_dtypes
from treeadapt.text.names import listing, plural
from treeadapt.trees.describing import describe_argument
from treeadapt.trees.views import view_tree

MAX_LEAVES = 200_000
_WHOLE_BYTES = 2**28  # of a checkpoint that is read at once


@dataclasses.dataclass(frozen=True)
class Side:
    """Leaves by path, in the order of their file or tree.

    Attributes:
        name: of the file; empty for a tree.
        leaves: shapes and dtypes.
        arrays: the values, each read when it is asked for; None if there are none.
    """

    name: str
    leaves: Mapping[str, jax.ShapeDtypeStruct]
    arrays: Mapping[str, Callable[[], np.ndarray]] | None

    def array(self, path: str) -> np.ndarray:
        """Read one array."""
        assert self.arrays is not None
        return self.arrays[path]()

    def with_dtypes(self, dtypes: Mapping[str, Any]) -> Side:
        """Return the side with other dtypes of its leaves, by path."""
        leaves = {
            path: jax.ShapeDtypeStruct(leaf.shape, dtypes[path])
            for path, leaf in self.leaves.items()
        }
        return dataclasses.replace(self, leaves=leaves)

    def renamed(self, names: Mapping[str, str]) -> Side:
        """Return the side with other names of some leaves."""
        leaves = {names.get(path, path): leaf for path, leaf in self.leaves.items()}
        read = self.arrays
        arrays = read and {names.get(path, path): read[path] for path in read}
        return dataclasses.replace(self, leaves=leaves, arrays=arrays)


def read_side(
    tree: Any,
    other_paths: Iterable[str] = (),
    what: str = "the tree",
    *,
    decode: bool = True,
) -> Side:
    """Return one side of a draft.

    Args:
        tree: tree, concrete or abstract; or the path of a checkpoint or schema.
        other_paths: paths of the other side, for the names of what is in boxes.
        what: what an error calls it: ``"the source"``.
        decode: as for ``load``.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        MigrationError: there are no arrays, or too many.
    """
    if isinstance(tree, str | os.PathLike):
        side = _of_file(tree, other_paths, decode=decode)
    else:
        side = _of_tree(tree)
    if not side.leaves:
        text = f"There is no array in {listing([side.name]) if side.name else what}"
        is_function = inspect.isroutine(tree) or isinstance(tree, type)
        if is_function and what.startswith("the "):
            cure = "Pass what it returns; shapes do: jax.eval_shape, nnx.eval_shape"
            text = f"{what[:1].upper()}{what[1:]} is {describe_argument(tree)}. {cure}"
        raise MigrationError(f"{text}.")
    if len(side.leaves) > MAX_LEAVES:
        raise MigrationError(
            f"A draft takes {MAX_LEAVES:,} leaves at most, and there are "
            f"{plural(len(side.leaves), 'leaf')}. Draft a model with fewer layers: the "
            "table is that of all of its sizes."
        )
    return side


def _of_file(
    file: str | os.PathLike[str], other_paths: Iterable[str], *, decode: bool
) -> Side:
    stored = opening.read_stored(file, decode=decode).without_boxes([*other_paths])
    table = _without_streams(stored.table)
    leaves = {path: leaf.array for path, leaf in table.items()}
    if stored.format == "schema":
        return Side(str(stored.path), leaves, None)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    if total <= _WHOLE_BYTES:
        arrays = {path: _constant(array) for path, array in _read(stored, leaves)}
    else:
        arrays = {path: _later(stored, path) for path in leaves}
    return Side(str(stored.path), leaves, arrays)


def _read(stored: Stored, paths: Iterable[str]) -> list[tuple[str, np.ndarray]]:
    with watched(stored.path, stored.version):
        arrays = reading.read_arrays(stored, dict.fromkeys(paths))
        return [(path, np.asarray(array)) for path, array in arrays]


def _constant(array: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: array


def _later(stored: Stored, path: str) -> Callable[[], np.ndarray]:
    return lambda: _read(stored, [path])[0][1]


def _of_tree(tree: Any) -> Side:
    flat = view_tree(tree).flat()
    require_dtypes(flat)
    if is_flat(tree) and {*tree} == {*flat}:
        flat = {path: flat[path] for path in tree}  # not sorted, as JAX would have it
    table = {path: form for path, leaf in flat.items() if (form := stored_form(leaf))}
    table = _without_streams(table)
    leaves = {path: form.array for path, form in table.items()}
    values = {path: _value(flat[path]) for path in leaves}
    arrays = {path: value for path, value in values.items() if value is not None}
    return Side("", leaves, arrays if len(arrays) == len(leaves) else None)


def is_flat(tree: Any) -> bool:
    """Return whether a tree is a dict without containers in it."""
    return type(tree) is dict and not any(
        isinstance(value, dict | list | tuple) for value in tree.values()
    )


def _value(leaf: Any) -> Callable[[], np.ndarray] | None:
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        return None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return None
    return lambda: np.asarray(leaf)


def _without_streams(table: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return leaves but for typed keys, and the counts next to them."""
    keys = {path for path, leaf in table.items() if leaf.kind not in ("", NUMBER)}
    parents = {path.rpartition("/")[0] for path in keys}

    def is_count(path: str, leaf: Leaf) -> bool:
        parent, _, last = path.rpartition("/")
        return last == "count" and parent in parents and not leaf.array.shape

    return {
        path: leaf
        for path, leaf in table.items()
        if path not in keys and not is_count(path, leaf)
    }


_FIRST = 0x3B000000  # the bits of 2**-9 in float32
_BLOCK = 2**11  # numbers of which no two are equal in a 16-bit float


#: In another order for each call, as 1 more than a number may be another number.
_SHUFFLES = np.array([2_654_435_761, 2_246_822_519, 3_266_489_917], np.uint32)


def _spread(first: int, count: int, nth: int) -> np.ndarray:
    """Return distinct float32, neighbors of which are apart in 16 bits, too.

    They are from 2**-9 to 2**7 (beyond only after 2**27 of them), where 16-bit floats
    show that 1 is added.

    Args:
        first: how many were returned before.
        count: how many to return.
        nth: call of a function; others have other numbers.
    """
    number = np.arange(first, first + count, dtype=np.uint32)
    block = number // _BLOCK
    shuffle = (block + 1) * _SHUFFLES[nth]  # another order in each block
    upper = (number % _BLOCK * (shuffle >> 20 | 1) + (shuffle >> 9)) % _BLOCK
    pattern = _FIRST + ((block >> 16) << 27 | upper << 16 | block & 0xFFFF)
    return pattern.astype(np.uint32).view(np.float32)


def distinct_numbers(
    leaves: Mapping[str, jax.ShapeDtypeStruct], nth: int = 0
) -> dict[str, Any]:
    """Return arrays of shapes, no number of which occurs twice, read-only.

    Floating-point ones are float32, because JAX would halve wider ones. Others keep
    their dtype. What has room for no distinct numbers is 0, or 1 in every other call.

    Raises:
        MigrationError: there are too many numbers.
    """
    arrays: dict[str, Any] = {}
    array: np.ndarray
    ints = (e.size for e in leaves.values() if np.issubdtype(e.dtype, np.integer))
    next_float, next_int = 0, 1 + nth * sum(ints)
    total = sum(leaf.size for leaf in leaves.values())
    if total > 2**28:
        raise MigrationError(
            f"convert= would be called with {total:,} numbers. Pass a small model of "
            "the same kind: the table is that of all of its sizes."
        )
    for path, leaf in leaves.items():
        kind = np.dtype(leaf.dtype)
        if jax.numpy.issubdtype(kind, np.floating):
            array = _spread(next_float, leaf.size, nth)
            next_float += leaf.size
        elif jax.numpy.issubdtype(kind, np.integer):
            room = np.iinfo(kind).max if kind.kind in "iu" else 0
            fits = next_int + leaf.size <= room
            stop = next_int + leaf.size if fits else next_int
            array = np.arange(next_int, stop) if fits else np.full(leaf.size, nth % 2)
            array, next_int = array[:: -1 if nth % 2 else 1].astype(kind), stop
        else:
            array = np.full(leaf.size, nth % 2).astype(kind)
        array = array.reshape(leaf.shape)
        array.flags.writeable = False
        arrays[path] = array
    return arrays


def yielded(items: list[Any], kind: str) -> Any:
    """Return what a conversion function yields, as a dict.

    Args:
        items: what it yields; pairs of names and arrays.
        kind: what it returned, for messages.

    Raises:
        MigrationError: they are something else, or one name is there twice.
    """
    others = [type(each).__name__ for each in items if not is_pair(each)]
    if others:
        raise MigrationError(
            f"convert= returned {kind} of {others[0]}. It is to return or yield pairs "
            "(name, array), a dict, or a tree."
        )
    counts = Counter(name for name, _ in items)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise MigrationError(
            f"convert= gave {listing(twice, limit=3)} twice. Each name is one array."
        )
    return dict(items)


def is_pair(item: Any) -> bool:
    """Return whether something is a name with its array."""
    is_two = isinstance(item, tuple | list) and len(item) == 2
    return is_two and isinstance(item[0], str) and not isinstance(item[1], str)


@contextlib.contextmanager
def calling(function: Any, integers: Sequence[str] = ()) -> Any:
    """Report whatever a conversion function raises.

    Args:
        function: that is called.
        integers: paths of its argument where other integers are than in the source.

    Raises:
        MigrationError: instead.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        yield
    except Exception as error:
        wording = " ".join(str(error).split())[:300]
        cure = ""
        if "read-only" in wording or "not writeable" in wording:
            cure = " It writes into its input: let it copy the array first."
        elif integers and isinstance(error, IndexError):
            cure = (
                " All numbers of the source are replaced by others, its integers too, "
                f"{listing(integers)}: a function that needs these is drafted from "
                "what it returns, draft_migration(source, convert(source))."
            )
        raise MigrationError(
            f"convert={name} raised {type(error).__name__}: {wording}.{cure}"
        ) from error
