"""Casting: numbers in another dtype, and whether that is more than rounding.

Takes arrays of NumPy or JAX, traced too; gives arrays and answers. Small floats differ
in what they lack: some have no infinity, and NumPy has no way between some of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.trees.arrays import least_value


def factor_dtype(dtypes: Iterable[Any]) -> Any:
    """Return the dtype in which factors of some dtypes are multiplied."""
    floats = (dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact))
    wide = map(wide_dtype, floats)
    return functools.reduce(np.promote_types, wide, np.dtype(np.float32))


def is_lost(array: Any, new: Any, xp: Any = np) -> Any:
    """Return whether what was made of numbers is more than rounded.

    Integers and bools must be the same, as floating-point numbers, too; these stay
    finite, infinite or neither.

    Args:
        array: the numbers, integers or floating point.
        new: the same, of another dtype or computed.
        xp: ``numpy`` or ``jax.numpy``.
    """
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        # On the way back -1 would come of the largest unsigned number.
        is_same = converted(new, array.dtype) == array
        is_same &= (new < 0) == (array < 0)
    elif not jnp.issubdtype(array.dtype, jnp.inexact):
        is_same = _is_whole(array, new.real, xp)
    elif not has_infinite(new.dtype):  # all that is larger becomes the largest
        most, wide = jnp.finfo(new.dtype).max, array.astype(wide_dtype(array.dtype))
        is_same = (wide >= -float(most)) & (wide <= float(most))
    elif not has_infinite(array.dtype):  # JAX takes some of its numbers for others
        is_same = xp.isfinite(new)
    else:
        is_finite = xp.isfinite(new)
        if xp is np and is_finite.all():  # of what was not, nothing would be
            return np.False_
        is_same = is_finite == xp.isfinite(array)
        is_same &= xp.isinf(new) == xp.isinf(array)
    return ~xp.all(is_same)


def _is_whole(integers: Any, floats: Any, xp: Any) -> Any:
    """Return where floating-point numbers are the integers or bools that they were."""
    wide = floats.astype(wide_dtype(floats.dtype))  # which holds the limits
    if integers.dtype == np.bool_:
        return wide == integers
    # A number beyond the limits may become any integer on the way back.
    limits = jnp.iinfo(integers.dtype)
    is_inside = (wide >= float(limits.min)) & (wide < float(int(limits.max) + 1))
    back = xp.where(is_inside, wide, xp.zeros_like(wide)).astype(integers.dtype)
    return is_inside & (xp.floor(wide) == wide) & (back == integers)


def converted(array: Any, dtype: Any) -> Any:
    """Return an array in another dtype; NumPy lacks a way between some small dtypes."""
    if isinstance(array, jax.Array) or np.can_cast(array.dtype, dtype, "unsafe"):
        return array.astype(dtype)
    return array.astype(np.float32).astype(dtype)  # which holds all values of 8 bits


def has_infinite(dtype: Any) -> bool:
    """Return whether a dtype has infinity or NaN, which floats of 4 bits lack."""
    return bool(jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 8)


def wide_dtype(dtype: Any) -> Any:
    """Return the dtype in which numbers of a dtype are computed."""
    return dtype if jnp.finfo(dtype).bits >= 32 else np.dtype(np.float32)


def has_zero(dtype: Any) -> bool:
    """Return whether a dtype holds numbers, or bools, and 0 among them."""
    return kind_of(dtype) is not None and least_value(dtype) is None


def kind_of(dtype: Any) -> Any:
    """Return the kind of number that a dtype holds; None if it holds no numbers."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)
