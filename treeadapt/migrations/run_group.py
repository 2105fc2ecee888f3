"""One group of a plan: its leaves under their new names, with all that may go wrong.

Takes a group and leaves by path; gives leaves by path. Arrays are moved by ``running``,
a function of the row is called, and what is only renamed stays as it is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from treeadapt.errors import MigrationError, explaining
from treeadapt.migrations.group import Group
from treeadapt.migrations.planning import fits
from treeadapt.migrations.running import filled, run
from treeadapt.text.names import listing
from treeadapt.trees.arrays import is_array, is_number
from treeadapt.trees.describing import describe

_EXPLICIT = """ On a mesh with Explicit axes, call
jax.sharding.auto_axes(migration, out_sharding=...) inside jit."""


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
                spec.shape, spec.dtype, sharding=sharding_of(likes.get(path))
            )
            for path, spec in group.specs.items()
        }
    shardings = [
        [sharding_of(likes.get(path)) for path in paths] for paths in group.targets
    ]
    try:
        arrays, faults = run(group.move, sources, shardings)
    except Exception as error:
        with explaining(error):
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


def require_sound(group: Group, faults: Sequence[str]) -> None:
    """Raise if something is wrong with the values of a group.

    Raises:
        MigrationError: something is.
    """
    if faults:
        *_, last = group.source_paths
        cure = (
            f" If both are meant, the target needs a leaf for each; {listing([last])}: "
            "None, a row above all others, drops one."
        )
        raise MigrationError(
            f"The row {listing([group.row.text])} cannot make "
            f"{listing(group.filled, limit=2)} of "
            f"{listing(group.source_paths, limit=2)}: "
            f"{'; '.join(faults)}.{cure if group.row.notes.copy else ''}"
        )


def _called(
    group: Group,
    leaves: Sequence[Any],
    likes: Mapping[str, Any],
    fits: Callable[[Any, Any], bool],
) -> dict[str, Any]:
    row = group.row
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    function: Any = row.function
    if row.sees_target:
        shown = tuple(_shown(group, path, likes) for path in group.filled)
        target = shown if row.splits else shown[0]
        function = functools.partial(function, target=target)
    try:
        result = jax.eval_shape(function, *leaves) if abstract else function(*leaves)
    except Exception as error:
        with explaining(error):
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
        text = "" if is_moved(leaf) else "which is not an array"
        if not text and path in likes and not fits(leaf, likes[path]):
            text = f"and the target has {describe(likes[path])}"
        if text:
            raise MigrationError(
                f"The function of the row {row.text!r:.200} made {listing([path])} of "
                f"{listing(group.source_paths, limit=2)}: {describe(leaf)}, {text}."
            )
    return dict(zip(paths, result, strict=True))


def _shown(group: Group, path: str, likes: Mapping[str, Any]) -> Any:
    """Return shape and dtype of a leaf of the target, for a function that asks."""
    if path not in likes:
        raise MigrationError(
            f"The function of the row {group.row.text!r:.200} asks for the shape of "
            f"{listing([path])}, and no target has it. Pass a target with it."
        )
    like = likes[path]
    dtype = like.dtype if is_array(like) else np.dtype(type(like))
    return jax.ShapeDtypeStruct(np.shape(like), dtype)


def spec_of(leaf: Any) -> Any:
    """Return an array without its values; a number as it is."""
    return _spec(tuple(leaf.shape), leaf.dtype) if is_array(leaf) else leaf


# Most leaves of a large model are alike, and JAX takes 8 microseconds for each.
@functools.lru_cache(maxsize=1_024)
def _spec(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def is_moved(leaf: Any) -> bool:
    """Return whether a leaf needs a row: static leaves do not."""
    return is_array(leaf) or is_number(leaf)


def sharding_of(like: Any) -> Any:
    """Return the sharding of a leaf; None without one."""
    return getattr(like, "sharding", None)
