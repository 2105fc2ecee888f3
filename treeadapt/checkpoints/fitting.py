"""How the leaves of a checkpoint fit those of a target, and are put in their place.

Takes metadata and abstract or concrete leaves; gives a ``LoadReport``, and from an
array that was read the leaf for the target. A Python number is stored as a 0-d array,
a typed PRNG key as its integers; ``Stored.kinds`` says which leaves were one.
Reads no file: ``store`` hands over what is in one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.checkpoints.common import NUMBER, Stored
from treeadapt.convert import describe
from treeadapt.errors import CheckpointError
from treeadapt.names import Speller, listing, plural

_SHOWN = 8
_NUMBERS: tuple[Any, ...] = (bool, int, float, complex)
_FAMILIES = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How a checkpoint and a target fit together.

    Attributes:
        restored: paths of the target that the checkpoint fills.
        kept: paths that keep what the target has: not selected, static leaves, and
            Python numbers that the checkpoint lacks.
        missing: paths of the target that the checkpoint lacks.
        unexpected: paths of the checkpoint that the target lacks.
        misshaped: paths with another shape: what is stored, and what the target has.
        retyped: paths with the same shape and another dtype, or another kind of PRNG
            key, or a number that the target's dtype cannot hold; the same.
        numbers: restored Python numbers whose value changes: what is stored, and what
            the target has.
    """

    restored: tuple[str, ...]
    kept: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: Mapping[str, tuple[str, str]]
    retyped: Mapping[str, tuple[str, str]]
    numbers: Mapping[str, tuple[Any, Any]]

    @property
    def fits(self) -> bool:
        """Whether nothing is missing, unexpected, misshaped or retyped."""
        return not (self.missing or self.unexpected or self.misshaped or self.retyped)

    def __str__(self) -> str:
        lines = [f"{plural(len(self.restored), 'leaf')} restored."]
        if self.kept:
            lines.append(f"{plural(len(self.kept), 'leaf')} kept from the target.")
        speller = Speller()
        for kind, names, others, source in (
            ("missing", self.missing, self.unexpected, "stored is"),
            ("unexpected", self.unexpected, self.missing, "the target has"),
        ):
            if names:
                lines.append(f"{plural(len(names), 'leaf')} {kind}:")
            for name in names[:_SHOWN]:
                near = speller.nearest(name, others[:2_000], count=1)
                # One stored name is not offered to two that are missing.
                back = speller.nearest(near[0], names[:2_000], count=1) if near else []
                hint = f" ({source} {listing(near)})" if back == [name] else ""
                lines.append(f"  {listing([name])}{hint}")
            lines += _more(len(names))
        for title, pairs in (
            (plural(len(self.misshaped), "leaf") + " of another shape", self.misshaped),
            (plural(len(self.retyped), "leaf") + " of another dtype", self.retyped),
            (plural(len(self.numbers), "number") + " changed", self.numbers),
        ):
            if pairs:
                lines.append(f"{title}:")
            for name, (got, want) in list(pairs.items())[:_SHOWN]:
                lines.append(f"  {listing([name])}: {got}, the target has {want}")
            lines += _more(len(pairs))
        return "\n".join(lines)


def compared(
    own: Mapping[str, Any],
    chosen: Iterable[bool],
    stored: Stored,
    unexpected: tuple[str, ...],
    read: Callable[[list[str]], Mapping[str, Any]],
    *,
    cast: bool,
) -> LoadReport:
    """Compare metadata with a target.

    Args:
        own: the target's leaves, by path.
        chosen: for each leaf, whether it is to be loaded.
        stored: what the checkpoint holds.
        unexpected: paths of the checkpoint that are to be loaded and have no target.
        read: reads 0-d leaves, the only ones whose values matter.
        cast: whether other dtypes fit.
    """
    restored, kept, missing = set(), [], []
    misshaped: dict[str, tuple[str, str]] = {}
    retyped: dict[str, tuple[str, str]] = {}
    scalars: dict[str, Any] = {}
    for (one, leaf), yes in zip(own.items(), chosen, strict=True):
        found, is_static = stored.leaves.get(one), not is_array(leaf)
        if not yes or (is_static and found is None):
            kept.append(one)
        elif found is None:
            missing.append(one)
        elif is_static and not is_number(leaf):
            retyped[one] = (_described(stored, one), describe(leaf))
        elif found.shape != (() if is_static else data(leaf).shape):
            misshaped[one] = (_described(stored, one), describe(leaf))
        elif is_static or (stored.kinds.get(one) == NUMBER and not is_key(leaf)):
            scalars[one] = leaf
        elif not _same_type(found.dtype, stored.kinds.get(one), leaf, cast=cast):
            retyped[one] = (_described(stored, one), describe(leaf))
        else:
            restored.add(one)
    numbers = {}
    values = read(list(scalars)) if scalars else {}
    for one, leaf in scalars.items():
        value = values[one].item()
        if not _holds(leaf, value, values[one].dtype, cast=cast):
            retyped[one] = (f"{_described(stored, one)} {value}", describe(leaf))
            continue
        restored.add(one)
        if is_number(leaf) and repr(type(leaf)(value)) != repr(leaf):
            numbers[one] = (value, leaf)
    return LoadReport(
        tuple(one for one in own if one in restored),
        tuple(kept),
        tuple(missing),
        unexpected,
        misshaped,
        retyped,
        numbers,
    )


def placed(name: str, array: Any, like: Any) -> Any:
    """Turn what was read into a leaf like the target's, where the target's is.

    Args:
        name: of the leaf, for messages.
        array: as it was read.
        like: the target's leaf.

    Raises:
        CheckpointError: the target's dtype cannot hold a value.
    """
    if is_number(like):
        return type(like)(array.item())
    if is_key(like):
        keys = wrapped(array, key_kind(like))
        return jax.device_put(keys, home(like))
    if array.dtype != like.dtype:
        array = _cast(name, array, like.dtype)
    if isinstance(array, jax.Array):
        return array
    if isinstance(like, np.ndarray | np.generic):
        return np.asarray(array)
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return np.asarray(array)  # 64 bits, which JAX would cut in half here
    return jax.device_put(np.asarray(array), home(like))


def home(leaf: Any) -> Any:
    """Return the sharding that a leaf is bound to; None where JAX may move it."""
    is_traced = isinstance(leaf, jax.core.Tracer)
    if isinstance(leaf, jax.Array) and not is_traced and not leaf.committed:
        return None  # what is bound to one device refuses to meet what is on several
    return getattr(leaf, "sharding", None)


def wrapped(array: Any, kind: Any) -> jax.Array:
    """Return the PRNG keys of a kind whose integers are ``array``."""
    return jax.random.wrap_key_data(jnp.asarray(array), impl=kind)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed PRNG keys."""
    return is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def key_kind(leaf: Any) -> Any:
    """Return the kind of typed PRNG keys, abstract ones too: ``"threefry2x32"``."""
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return kinds[0]


def is_number(leaf: Any) -> bool:
    """Return whether a leaf is a Python number; NumPy's are arrays, enums neither."""
    return type(leaf) in _NUMBERS


def as_arrays(leaves: Iterable[Any]) -> list[Any]:
    """Return leaves with 0-d abstract arrays for Python numbers, for a selector."""
    return [
        jax.ShapeDtypeStruct((), np.dtype(type(leaf))) if is_number(leaf) else leaf
        for leaf in leaves
    ]


def data(leaf: Any) -> Any:
    """Return shape and dtype that a leaf has in a file."""
    return jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf


def _same_type(dtype: Any, kind: str | None, leaf: Any, *, cast: bool) -> bool:
    if is_key(leaf) or kind is not None:
        known = is_key(leaf) and kind in (None, str(key_kind(leaf)))
        return known and dtype == data(leaf).dtype
    return dtype == leaf.dtype or (cast and _widens(dtype, leaf.dtype))


def _holds(leaf: Any, value: Any, dtype: Any, *, cast: bool) -> bool:
    """Return whether a 0-d leaf or a number can take a value of some dtype."""
    own = np.dtype(type(leaf)) if is_number(leaf) else leaf.dtype
    if _family(own) != _family(dtype):
        return cast and _widens(dtype, own)
    if is_number(leaf) or (cast and _family(own) > 1):
        return True
    with np.errstate(all="ignore"):
        held = np.asarray(value).astype(own)
    return bool(np.array_equal(held.item(), value, equal_nan=_family(own) > 1))


def _family(dtype: Any) -> int:
    return next((n for n, f in enumerate(_FAMILIES) if jnp.issubdtype(dtype, f)), -1)


def _widens(dtype: Any, into: Any) -> bool:
    """Return whether ``cast`` may change one dtype to another: never 1.5 to 1."""
    return 0 <= _family(dtype) <= _family(into)


def _cast(name: str, array: Any, dtype: Any) -> Any:
    inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    with np.errstate(all="ignore"):
        made = array.astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        is_lost = np.isfinite(made) != (np.isfinite(array) if inexact else True)
    else:
        is_lost = made.astype(array.dtype) != array
    if is_lost.any():
        raise CheckpointError(
            f"{listing([name])} holds values of {array.dtype} that {dtype} cannot hold."
        )
    return made


def _described(stored: Stored, one: str) -> str:
    kind = stored.kinds.get(one)
    if kind == NUMBER:
        return f"a number, {describe(stored.leaves[one])}"
    return f"a {kind} key" if kind else describe(stored.leaves[one])


def _more(count: int) -> list[str]:
    return [f"  and {count - _SHOWN:,} more"] if count > _SHOWN else []
