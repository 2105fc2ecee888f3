"""The options that plan the memory of a tree: a mesh, and an optimizer.

``--mesh data=16,model=8`` becomes an ``AbstractMesh``, so no device is needed.
``--optimizer module:tx`` imports code: it is the user's own, as with ``python -m``.
"""

from __future__ import annotations

import re
from typing import Any

from jax.sharding import AbstractMesh

from treeadapt.cli.sources import FUNCTION, named, resolved
from treeadapt.data_files import one_line
from treeadapt.errors import ShardingError, TransformError
from treeadapt.names import listing
from treeadapt.transforms.adapt import is_transformation

_AXIS = re.compile(r"\s*([^=,]*[^=,\s])\s*=\s*([1-9][0-9]{0,8})\s*")


def read_mesh(text: str) -> AbstractMesh:
    """Read the axes of a mesh.

    Args:
        text: names and sizes, such as ``data=16,model=8``.

    Raises:
        ShardingError: it cannot be read, or two axes have one name.
    """
    found = [_AXIS.fullmatch(part) for part in text.split(",")]
    pairs = [match.groups() for match in found if match is not None]
    sizes = {name: int(size) for name, size in pairs}
    if len(sizes) < len(found):
        raise ShardingError(
            f"--mesh has {listing([text])}. Write the name and size of each axis: "
            "data=16,model=8."
        )
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def read_optimizer(text: str) -> Any:
    """Import a transformation, or what a function of no arguments returns.

    Args:
        text: ``module:name``.

    Raises:
        TransformError: it is not one.
        TreeAdaptError: it cannot be found, or the function fails.
    """
    if not FUNCTION.fullmatch(text):
        raise TransformError(f"--optimizer has {listing([text])}. Write module:tx.")
    with named(text):
        found = resolved(text)
        if not is_transformation(found) and callable(found):
            found = found()
    if not is_transformation(found):
        raise TransformError(
            f"{text} is {one_line(repr(found))}. Give a transformation of Optax, or a "
            "function of no arguments that returns one."
        )
    return found
