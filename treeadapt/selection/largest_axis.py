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
from treeadapt.text.names import shorten

MIN_SIZE = 2**16
_TIES = ("first", "last")


def shard_largest(
    axis: str | Sequence[str],
    min_size: int | None = None,
    *,
    min_bytes: int = 0,
    ties: str = "first",
) -> ShardLargest:
    """Return a value for sharding rules: the largest axis that a mesh axis divides.

    One line for what is otherwise a function of every shape: ``{"**":
    shard_largest("data")}``. It is the value of a rule, a ``default=``, or one of
    ``specs=``, wherever a spec is.

    Args:
        axis: name of the mesh axis; a tuple of names for several, which then shard one
            axis of the array together.
        min_size: number of elements below which an array is on every device. With
            ``stacks``, of one layer, as in the unrolled model. None is 65,536, or any
            with ``min_bytes``.
        min_bytes: the same in bytes of the array, whatever its dtype: with
            ``4 * 2**20`` a float32 kernel of 2,048 x 512 is divided and a bfloat16 one
            is not.
        ties: which of equal axes is sharded, ``"first"`` or ``"last"``. Many FSDP
            rules, those of big_vision and openpi among them, take the last.

    Returns:
        An immutable value, hashable and comparable. Of each array it shards the largest
        axis that the size of the mesh axis divides, never that of a stack's layers. The
        spec is ``P()`` if there is no such axis, if the array is empty, or if it is
        smaller than ``min_size`` or ``min_bytes``.

    Raises:
        ShardingError: ``axis`` is not one or several names, ``min_size`` or
            ``min_bytes`` is not a number, or ``ties`` is something else.

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
    if min_size is None:
        min_size = 0 if min_bytes else MIN_SIZE
    for name, least, unit in (
        ("min_size", min_size, "elements below which an array is on every device"),
        ("min_bytes", min_bytes, "bytes below which an array is on every device"),
    ):
        is_count = isinstance(least, int) and not isinstance(least, bool)
        if not is_count or least < 0:
            raise ShardingError(
                f"shard_largest got {name}={shorten(repr(least))}. Write the number of "
                f"{unit}, such as 2**16."
            )
    if ties not in _TIES:
        raise ShardingError(
            f'shard_largest got ties={shorten(repr(ties))}. Write "first" or "last".'
        )
    return ShardLargest(tuple(names), min_size, min_bytes, ties)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class ShardLargest:
    """What ``shard_largest`` returns.

    Attributes:
        names: of the mesh axes.
        min_size: number of elements below which an array is on every device.
        min_bytes: the same in bytes.
        ties: which of equal axes is sharded.
    """

    names: tuple[str, ...]
    min_size: int
    min_bytes: int = 0
    ties: str = "first"

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self._options.items()]
        return f"shard_largest({', '.join([repr(self.entry), *options])})"

    @property
    def _options(self) -> dict[str, Any]:
        """What has to be said of it besides the axis."""
        options: dict[str, Any] = {}
        if self.min_size or not self.min_bytes:
            options["min_size"] = self.min_size
        if self.min_bytes:
            options["min_bytes"] = self.min_bytes
        return options if self.ties == "first" else options | {"ties": self.ties}

    @property
    def entry(self) -> Any:
        """The mesh axes as an entry of a spec."""
        return self.names[0] if len(self.names) == 1 else self.names

    @property
    def data(self) -> dict[str, Any]:
        """It as a rules file has it."""
        entry = self.entry if len(self.names) == 1 else list(self.names)
        return {"shard_largest": entry, **self._options}

    def shards(self, like: Any) -> bool:
        """Return whether an array is large enough to be sharded.

        Args:
            like: the array, or one layer of it.

        Example:
            >>> rule = shard_largest("x", 8)
            >>> rule.shards(jnp.ones((2, 4))), rule.shards(jnp.ones(2))
            (True, False)
        """
        size = math.prod(like.shape)
        is_large = size * like.dtype.itemsize >= self.min_bytes
        return len(like.shape) > 0 and size >= max(self.min_size, 1) and is_large

    def spec(self, like: Any, sizes: Mapping[str, int]) -> PartitionSpec:
        """Return the spec of an array.

        Args:
            like: the array, or one layer of it.
            sizes: of the axes of the mesh, by name.

        Example:
            >>> shard_largest("x", 0).spec(jnp.ones((3, 8, 8)), {"x": 4})
            P(None, 'x', None)
        """
        shape: Sequence[int] = like.shape
        parts = math.prod(sizes[name] for name in self.names)
        axes = [axis for axis, size in enumerate(shape) if size % parts == 0]
        if not axes or not self.shards(like):
            return PartitionSpec()
        ordered = axes if self.ties == "first" else axes[::-1]
        largest = max(ordered, key=lambda axis: shape[axis])  # the first of equal ones
        return PartitionSpec(
            *(self.entry if axis == largest else None for axis in range(len(shape)))
        )
