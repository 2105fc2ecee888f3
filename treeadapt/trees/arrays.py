"""What counts as an array, for every room of the library.

An *array leaf* has a ``shape`` and a ``dtype``: JAX arrays, tracers, typed PRNG keys,
NumPy arrays and NumPy scalars, ``jax.ShapeDtypeStruct``. Everything else (a Python
number, a function, a string) is a *static leaf*. No value is ever read: the answers
depend on attributes that tracers, abstract, deleted and sharded arrays all have.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

#: Any pytree, or a tree of classes that the registry can open.
Tree: TypeAlias = Any
#: Arrays by label path, as ``split`` gives them.
Params: TypeAlias = dict[str, Any]
_OWN_PAGES_BYTES = 2**20  # an array of so many has pages of its own, to give back whole
_ALIGNMENT = 64  # bytes; JAX takes such memory on a CPU without a copy
_SQUARE = 64  # numbers on a side that stay in the cache while they are turned


def is_array(leaf: Any) -> bool:
    """Return whether ``leaf`` has a shape and a dtype.

    Example:
        >>> is_array(np.float32(1.0)), is_array(1.0), is_array(jnp.ones(3))
        (True, False, True)
    """
    if isinstance(leaf, type):  # ``np.float32`` itself has both, as descriptors
        return False
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def are_arrays(leaves: Sequence[Any]) -> list[bool]:
    """Return whether each leaf is an array; a class of arrays is asked once.

    Example:
        >>> are_arrays([jnp.ones(3), 1.0, np.float32(1.0)])
        [True, False, True]
    """
    is_sure = {cls: is_array_class(cls) for cls in set(map(type, leaves))}
    if all(is_sure.values()):
        return [True] * len(leaves)
    return [is_sure[type(leaf)] or is_array(leaf) for leaf in leaves]


def is_number(leaf: Any) -> bool:
    """Return whether ``leaf`` is one of Python's own numbers, by its exact type.

    A member of an ``IntEnum`` is not, and NumPy's are arrays.

    Example:
        >>> is_number(1.0), is_number(True), is_number(np.float64(1.0))
        (True, True, False)
    """
    return type(leaf) in (bool, int, float, complex)


def is_array_class(cls: type) -> bool:
    """Return whether ``cls`` is a class of JAX's or NumPy's own arrays and scalars.

    Example:
        >>> is_array_class(np.ndarray), is_array_class(jax.Array), is_array_class(list)
        (True, True, False)
    """
    return issubclass(cls, ARRAY_CLASSES)


def is_inexact(leaf: Any) -> bool:
    """Return whether ``leaf`` is an array of floating-point or complex numbers.

    Typed PRNG keys, integers, booleans and ``float0`` are not.

    Example:
        >>> is_inexact(jnp.ones(3)), is_inexact(jnp.arange(3)), is_inexact(1.0)
        (True, False, False)
    """
    return is_array(leaf) and is_inexact_dtype(leaf.dtype)


def are_inexact(arrays: Iterable[Any]) -> list[bool]:
    """Return whether each array is of floats or complex numbers; asks a dtype once.

    Example:
        >>> are_inexact([jnp.ones(3), jnp.arange(3)])
        [True, False]
    """
    dtypes = list(map(operator.attrgetter("dtype"), arrays))
    answer_of = {dtype: is_inexact_dtype(dtype) for dtype in set(dtypes)}
    return list(map(answer_of.__getitem__, dtypes))


def is_float0(leaf: Any) -> bool:
    """Return whether ``leaf`` is the empty gradient JAX gives for an integer input."""
    return getattr(leaf, "dtype", None) == _FLOAT0


@functools.lru_cache(maxsize=256)
def is_inexact_dtype(dtype: Any) -> bool:
    """Return whether ``dtype`` is floating point or complex, or extends such a one.

    Raises:
        TypeError: it is that of another library, such as PyTorch.
    """
    try:
        return bool(jnp.issubdtype(dtype, jnp.inexact))
    except TypeError as error:
        raise TypeError(
            f"{dtype} is not a dtype of NumPy or JAX. Convert such leaves first, as "
            "with tensor.detach().numpy()."
        ) from error


@functools.lru_cache(maxsize=256)
def least_value(dtype: Any) -> Any:
    """Return the least value of a dtype that has no zero; None if it has one.

    Example:
        >>> least_value(jnp.dtype("float32")), least_value(jnp.dtype("float8_e8m0fnu"))
        (None, 5.87747e-39)
    """
    blank = np.zeros((), dtype)[()]
    return None if blank == 0 else blank


@functools.lru_cache(maxsize=256)
def narrow_bits(dtype: Any, max_bits: int = 16) -> Any:
    """Return the dtype of integers with the bits of narrow floats; None for others.

    XLA widens floats of 8 and 16 bits, and what comes back of a NaN is another one.

    Example:
        >>> narrow_bits(jnp.dtype("bfloat16")), narrow_bits(jnp.dtype("float32"))
        (dtype('uint16'), None)
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    bits = jnp.finfo(dtype).bits
    return np.dtype(f"uint{bits}") if 8 <= bits <= max_bits else None


ARRAY_CLASSES = (
    np.ndarray,
    np.generic,
    jax.Array,
    jax.core.Tracer,
    jax.ShapeDtypeStruct,
)
_FLOAT0 = np.dtype([("float0", np.void, 0)])


def is_placed(value: Any) -> bool:
    """Return whether a value is an array that was put on certain devices."""
    is_concrete = isinstance(value, jax.Array) and not isinstance(
        value, jax.core.Tracer
    )
    return is_concrete and value.committed


def same_value(one: Any, two: Any) -> bool:
    """Compare two values by type and content; arrays only by identity.

    Example:
        >>> same_value("a", "a"), same_value(1, True), same_value(jnp.ones(1), 1.0)
        (True, False, False)
    """
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    equal = one == two
    return bool(equal) if isinstance(equal, bool) or np.isscalar(one) else False


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
    """Return a new array that JAX takes on a CPU without a copy."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes >= _OWN_PAGES_BYTES:
        pages = mmap.mmap(-1, size_bytes, access=mmap.ACCESS_COPY)
        return np.frombuffer(pages, dtype).reshape(shape)
    data = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    start = -data.ctypes.data % _ALIGNMENT
    return data[start : start + size_bytes].view(dtype).reshape(shape)


def copy_values(array: Any, values: Any) -> None:
    """Copy ``values`` into an array of NumPy of the same shape.

    NumPy copies along the rows of the array. If these are columns of the values, each
    number costs a line of the cache: squares of both are copied one by one then, which
    takes a sixth of the time for 4,096 by 4,096 numbers.

    Example:
        >>> array = np.zeros((2, 3))
        >>> copy_values(array, np.arange(6.0).reshape(3, 2).T)
        >>> array.tolist()
        [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    """
    strides = [abs(stride) for stride in getattr(values, "strides", ())]
    axes = [n for n in range(array.ndim) if array.shape[n] > 1]
    if len(axes) > 1 and len(strides) == array.ndim:
        row = min(axes, key=lambda axis: abs(array.strides[axis]))
        column = min(axes, key=strides.__getitem__)
        if row != column and min(array.shape[row], array.shape[column]) >= _SQUARE // 2:
            steps = (_SQUARE if n in (row, column) else 1 for n in range(array.ndim))
            starts = map(range, itertools.repeat(0), array.shape, steps)
            for corner in itertools.product(*starts):
                square = tuple(
                    slice(start, start + (_SQUARE if n in (row, column) else 1))
                    for n, start in enumerate(corner)
                )
                array[square] = values[square]
            return
    array[...] = values
