"""A value of sharding rules that says which axis to shard by the shape of the array.

``shard_largest`` makes one. It is data, so that rules, their files and reports hold it
like any other value; ``ShardLargest.spec`` gives the spec for one shape and one mesh.
See ``sharding.params`` for what rules with it give a tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from treeadapt.errors import ShardingError
from treeadapt.names import shorten

MIN_SIZE = 2**16


def shard_largest(axis: str | Sequence[str], min_size: int = MIN_SIZE) -> ShardLargest:
    """Return a value for sharding rules: the largest axis that a mesh axis divides.

    One line for what is otherwise a function of every shape: ``{"**":
    shard_largest("data")}``. It is the value of a rule, a ``default=``, or one of
    ``specs=``, wherever a spec is.

    Args:
        axis: name of the mesh axis; a tuple of names for several, which then shard one
            axis of the array together.
        min_size: number of elements below which an array is on every device. With
            ``stacks``, of one layer, as in the unrolled model.

    Returns:
        An immutable value, hashable and comparable. Of each array it shards the largest
        axis that the size of the mesh axis divides, the first of equal ones, and never
        that of a stack's layers. The spec is ``P()`` if there is no such axis, if the
        array is empty, or if it has less than ``min_size`` elements.

    Raises:
        ShardingError: ``axis`` is not one or several names, or ``min_size`` is not a
            number of elements.

    Example:
        >>> from treeadapt import named_shardings
        >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
        >>> params = {"w": jnp.ones((6, 8)), "b": jnp.ones(8)}
        >>> rules = {"**": shard_largest("data", min_size=16)}
        >>> shardings = named_shardings(params, rules, mesh)
        >>> shardings["w"].spec, shardings["b"].spec
        (P(None, 'data'), P())
    """
    names = (axis,) if isinstance(axis, str) else axis
    is_named = isinstance(names, tuple | list) and len(names) > 0
    if not is_named or not all(isinstance(name, str) and name for name in names):
        raise ShardingError(
            f"shard_largest got {shorten(repr(axis))}, which is not the name of a mesh "
            'axis. Write shard_largest("data"), or shard_largest(("data", "model")).'
        )
    if len({*names}) < len(names):
        raise ShardingError(
            f"shard_largest got {shorten(repr(axis))}: name each mesh axis once."
        )
    is_count = isinstance(min_size, int) and not isinstance(min_size, bool)
    if not is_count or min_size < 0:
        raise ShardingError(
            f"shard_largest got min_size={shorten(repr(min_size))}. Write the number "
            "of elements below which an array is on every device, such as 2**16."
        )
    return ShardLargest(tuple(names), min_size)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ShardLargest:
    """What ``shard_largest`` returns.

    Attributes:
        names: of the mesh axes.
        min_size: number of elements below which an array is on every device.
    """

    names: tuple[str, ...]
    min_size: int

    def __repr__(self) -> str:
        return f"shard_largest({self.entry!r}, min_size={self.min_size})"

    @property
    def entry(self) -> Any:
        """The mesh axes as an entry of a spec."""
        return self.names[0] if len(self.names) == 1 else self.names

    @property
    def data(self) -> dict[str, Any]:
        """It as a rules file has it."""
        entry = self.entry if len(self.names) == 1 else list(self.names)
        return {"shard_largest": entry, "min_size": self.min_size}

    def shards(self, shape: Sequence[int]) -> bool:
        """Return whether an array is large enough to be sharded.

        Example:
            >>> shard_largest("x", 8).shards((2, 4)), shard_largest("x", 8).shards((2,))
            (True, False)
        """
        return len(shape) > 0 and math.prod(shape) >= max(self.min_size, 1)

    def spec(self, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
        """Return the spec of an array, or of one layer.

        Args:
            shape: of the array.
            sizes: of the axes of the mesh, by name.

        Example:
            >>> shard_largest("x", 0).spec((3, 8, 8), {"x": 4})
            P(None, 'x', None)
        """
        parts = math.prod(sizes[name] for name in self.names)
        axes = [axis for axis, size in enumerate(shape) if size % parts == 0]
        if not axes or not self.shards(shape):
            return PartitionSpec()
        largest = max(axes, key=lambda axis: shape[axis])  # the first of equal ones
        return PartitionSpec(
            *(self.entry if axis == largest else None for axis in range(len(shape)))
        )
