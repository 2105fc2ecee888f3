"""What a leaf or an argument is, in a few words for messages; no array is read."""

from __future__ import annotations

import functools
import inspect
import numbers
from typing import Any

import numpy as np

from treeadapt.text.names import shorten
from treeadapt.trees.arrays import is_array


def describe(leaf: Any) -> str:
    """Write a leaf's dtype and shape, or its type if it is not an array.

    Example:
        >>> describe(np.zeros((2, 3), np.float32)), describe(1.0)
        ('float32[2,3]', 'a float')
    """
    if not is_array(leaf):
        name = type(leaf).__name__
        return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    return f"{written_dtype(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"


def written_dtype(dtype: Any) -> str:
    """Write the dtype of an array.

    Example:
        >>> written_dtype(np.dtype("float32"))
        'float32'
    """
    return _numpy_text(dtype) if isinstance(dtype, np.dtype) else str(dtype)


# NumPy takes 4 microseconds to write a dtype, and most leaves of a model share one.
_numpy_text = functools.lru_cache(maxsize=64)(str)


def describe_argument(value: Any) -> str:
    """Write an argument that is in the wrong place, without reading an array.

    Example:
        >>> describe_argument("encoder"), describe_argument({"w": [1.0]})
        ("'encoder'", 'a dict')
    """
    is_short = isinstance(value, str | numbers.Number | type | None)
    is_short |= inspect.isroutine(value)
    return shorten(repr(value), limit=100) if is_short else describe(value)
