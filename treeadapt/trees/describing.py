"""What a leaf or an argument is, in a few words for messages; no array is read."""

from __future__ import annotations

import inspect
import numbers
from typing import Any

from treeadapt.text.names import shorten
from treeadapt.trees.arrays import is_array


def describe(leaf: Any) -> str:
    """Write a leaf's dtype and shape, or its type if it is not an array.

    Example:
        >>> import numpy as np
        >>> describe(np.zeros((2, 3), np.float32)), describe(1.0)
        ('float32[2,3]', 'a float')
    """
    if not is_array(leaf):
        name = type(leaf).__name__
        return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def describe_argument(value: Any) -> str:
    """Write an argument that is in the wrong place, without reading an array.

    Example:
        >>> describe_argument("encoder"), describe_argument({"w": [1.0]})
        ("'encoder'", 'a dict')
    """
    is_short = isinstance(value, str | numbers.Number | type | None)
    is_short |= inspect.isroutine(value)
    return shorten(repr(value), limit=100) if is_short else describe(value)
