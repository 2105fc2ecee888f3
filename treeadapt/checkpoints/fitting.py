"""How the leaves of a checkpoint fit those of a target, and are put in their place.

Takes metadata and abstract or concrete leaves; gives a ``LoadReport``, and from an
array that was read the leaf for the target. A Python number is stored as a 0-d array,
a typed PRNG key as its integers; ``Leaf.kind`` says so.
Reads no file: ``store`` hands over what is in one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.checkpoints.common import NUMBER, Leaf, Stored
from treeadapt.convert import describe
from treeadapt.errors import CheckpointError
from treeadapt.names import Speller, listing, plural

_SHOWN = 8
_CANDIDATES = 2_000
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
        lines += _names("missing", self.missing, self.unexpected, "stored is")
        lines += _names("unexpected", self.unexpected, self.missing, "the target has")
        lines += _pairs("leaf", "of another shape", self.misshaped)
        lines += _pairs("leaf", "of another dtype", self.retyped)
        lines += _pairs("number", "changed", self.numbers)
        return "\n".join(lines)


def _names(
    kind: str, names: tuple[str, ...], others: tuple[str, ...], source: str
) -> Iterator[str]:
    if names:
        yield f"{plural(len(names), 'leaf')} {kind}:"
    speller = Speller()
    for name in names[:_SHOWN]:
        near = speller.nearest(name, others[:_CANDIDATES], count=1)
        # One stored name is not offered to two that are missing.
        back = [speller.nearest(one, names[:_CANDIDATES], count=1) for one in near]
        hint = f" ({source} {listing(near)})" if back == [[name]] else ""
        yield f"  {listing([name])}{hint}"
    yield from _more(len(names))


def _pairs(noun: str, what: str, pairs: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    if pairs:
        yield f"{plural(len(pairs), noun)} {what}:"
    for name, (got, want) in list(pairs.items())[:_SHOWN]:
        yield f"  {listing([name])}: {got}, the target has {want}"
    yield from _more(len(pairs))


def _more(count: int) -> list[str]:
    return [f"  and {count - _SHOWN:,} more"] if count > _SHOWN else []


def compared(
    own: Mapping[str, Any],
    chosen: Iterable[bool],
    stored: Stored,
    unexpected: Iterable[str],
    read: Callable[[Mapping[str, Any]], Iterable[tuple[str, Any]]],
    *,
    cast: bool,
) -> LoadReport:
    """Compare metadata with a target.

    Args:
        own: the target's leaves, by path.
        chosen: for each leaf, whether it is to be loaded.
        stored: what the checkpoint holds.
        unexpected: paths of the checkpoint that are to be loaded and have no target.
        read: reads leaves; only 0-d ones are asked for, whose values matter.
        cast: whether other dtypes fit.
    """
    forms = {path: stored_form(own[path]) for path in itertools.compress(own, chosen)}
    pairs = {
        path: (stored.table[path], form)
        for path, form in forms.items()
        if path in stored.table
    }
    scalars = [path for path, pair in pairs.items() if _by_value(*pair)]
    values = {path: array.item() for path, array in read(dict.fromkeys(scalars))}
    restored: list[str] = []
    kept: list[str] = []
    missing: list[str] = []
    misshaped, retyped, numbers = {}, {}, {}
    for path, leaf in own.items():
        if path not in pairs:
            is_kept = path not in forms or not is_array(leaf)
            (kept if is_kept else missing).append(path)
            continue
        (there, form), value = pairs[path], values.get(path)
        if form is not None and form.array.shape != there.array.shape:
            misshaped[path] = (_described(there), describe(leaf))
        elif form is None or not _takes(form, there, value, cast=cast):
            retyped[path] = (_described(there, value), describe(leaf))
        else:
            restored.append(path)
            if is_number(leaf) and repr(type(leaf)(value)) != repr(leaf):
                numbers[path] = (value, leaf)
    return LoadReport(
        tuple(restored),
        tuple(kept),
        tuple(missing),
        tuple(unexpected),
        misshaped,
        retyped,
        numbers,
    )


def stored_form(leaf: Any) -> Leaf | None:
    """Return what a file says of a leaf; None for a leaf that is no data."""
    if is_number(leaf):
        return Leaf(jax.ShapeDtypeStruct((), np.dtype(type(leaf))), NUMBER)
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return Leaf(data, str(_key_kind(leaf)))
    if is_array(leaf):
        return Leaf(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return None


def target_form(leaf: Leaf) -> Any:
    """Return a leaf for a target that a stored one fits: of NumPy, or an abstract key.

    Raises:
        ValueError: JAX does not know this kind of key.
    """
    if leaf.kind not in ("", NUMBER):
        return jax.eval_shape(lambda data: _keys(data, leaf.kind), leaf.array)
    return np.broadcast_to(np.zeros((), leaf.array.dtype), leaf.array.shape)


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
        return jax.device_put(_keys(array, _key_kind(like)), home(like))
    if array.dtype != like.dtype:
        array = _cast(name, array, like.dtype)
    if isinstance(array, jax.Array):
        return array
    array = np.asarray(array)
    is_cut = jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype  # 64 bits to 32
    if is_cut or isinstance(like, np.ndarray | np.generic):
        return array
    return jax.device_put(array, home(like))


def home(leaf: Any) -> Any:
    """Return the sharding that a leaf is bound to; None where JAX may move it."""
    is_traced = isinstance(leaf, jax.core.Tracer)
    if isinstance(leaf, jax.Array) and not is_traced and not leaf.committed:
        return None  # what is bound to one device refuses to meet what is on several
    return getattr(leaf, "sharding", None)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed PRNG keys."""
    return is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def is_number(leaf: Any) -> bool:
    """Return whether a leaf is a Python number; NumPy's are arrays, enums neither."""
    return type(leaf) in _NUMBERS


def is_long(leaf: Any) -> bool:
    """Return whether a leaf is a Python number that does not fit 64 bits."""
    return is_number(leaf) and np.asarray(leaf).dtype != type(leaf)


def as_array(leaf: Any) -> Any:
    """Return a leaf, or a 0-d abstract array for a Python number."""
    return jax.ShapeDtypeStruct((), type(leaf)) if is_number(leaf) else leaf


def _keys(array: Any, kind: Any) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(array), impl=kind)


def _key_kind(leaf: Any) -> Any:
    """Return the kind of typed PRNG keys, abstract ones too: ``"threefry2x32"``."""
    kinds: list[Any] = []
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), leaf)
    return kinds[0]


def _by_value(there: Leaf, form: Leaf | None) -> bool:
    """Return whether what fits depends on the value, as it does with numbers."""
    if form is None or there.array.shape or form.array.shape:
        return False
    return NUMBER in (there.kind, form.kind)


def _takes(form: Leaf, there: Leaf, value: Any, *, cast: bool) -> bool:
    """Return whether a leaf of the target takes what is stored, of its shape."""
    own, dtype = form.array.dtype, there.array.dtype
    if value is None and (form.kind or there.kind):
        # What other libraries store as integers says nothing about a kind.
        return form.kind != "" and there.kind in ("", form.kind) and own == dtype
    is_wider = cast and 0 <= _family(dtype) <= _family(own)  # never 1.5 to 1
    if value is None:
        return is_wider or own == dtype
    if _family(own) != _family(dtype) or (cast and _family(own) > 1):
        return is_wider
    if form.kind == NUMBER:
        return True
    with np.errstate(all="ignore"):
        held = np.asarray(value).astype(own).item()
    return bool(np.array_equal(held, value, equal_nan=_family(own) > 1))


def _family(dtype: Any) -> int:
    return next((n for n, f in enumerate(_FAMILIES) if jnp.issubdtype(dtype, f)), -1)


def _cast(name: str, array: Any, dtype: Any) -> Any:
    with np.errstate(all="ignore"):
        made = array.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        is_lost = made.astype(array.dtype) != array
    elif jnp.issubdtype(array.dtype, jnp.inexact):
        is_lost = np.isfinite(made) != np.isfinite(array)
    else:
        is_lost = ~np.isfinite(made)
    if is_lost.any():
        raise CheckpointError(
            f"{listing([name])} holds values of {array.dtype} that {dtype} cannot hold."
        )
    return made


def _described(leaf: Leaf, value: Any = None) -> str:
    text = f"a {leaf.kind} key" if leaf.kind else describe(leaf.array)
    if leaf.kind == NUMBER:
        text = f"a number, {describe(leaf.array)}"
    return text if value is None else f"{text} {value}"
