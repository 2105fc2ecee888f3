"""One partition spec: how it is written, and whether it fits an array and a mesh.

Takes what a rule says (``P("data", None)`` or ``("data", None)``) and gives a
``PartitionSpec``, and the shape of what each device of a mesh then holds. Says in a few
words what is wrong with a spec for an array of some shape; raises nothing about a leaf
itself, so that a message can name all leaves at once. ``box_specs`` gives the specs
that a model asks for itself, by the axis names in its boxes.
See ``trees.axis_names`` for boxes, ``params`` for which leaf gets which spec.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from treeadapt.errors import ShardingError
from treeadapt.selection.largest_axis import ShardLargest
from treeadapt.text.names import listing, plural, shorten
from treeadapt.trees.adapters.adapter import AxisNames
from treeadapt.trees.axis_names import axis_names
from treeadapt.trees.views import TreeView

#: Ordered pairs of a logical name and the mesh axes for it, as Flax writes them.
AxisRules = Sequence[tuple[str, Any]]


def as_spec(value: Any, who: str) -> PartitionSpec | ShardLargest:
    """Read a partition spec.

    Args:
        value: a ``PartitionSpec``; or a tuple or list with one entry an axis: the name
            of a mesh axis, a tuple or list of such, or None; ``...`` once for all other
            axes. What ``shard_largest`` gives comes back as it is, because its spec
            depends on the array.
        who: what gives the value, for the message.

    Raises:
        ShardingError: it is not a spec. None is never one.

    Example:
        >>> as_spec([("data", "model"), None], "the rule"), as_spec((), "the rule")
        (P(('data', 'model'), None), P())
    """
    if isinstance(value, ShardLargest):
        return value
    if isinstance(value, PartitionSpec):
        spec = value
    elif isinstance(value, tuple | list) and all(
        isinstance(name, str) and name for each in value for name in mesh_axes(each)
    ):
        spec = PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in value))
    else:
        raise ShardingError(
            f"{who} gives {shorten(repr(value))}, which is not a spec. "
            "Write P('data', None) or ('data', None), one entry for each axis of the "
            "array, P('data', ...) for the first axis of any array, and P() for a copy "
            'on every device; in a rules file ["data", ""], ["data", "..."] and []. '
            'For the largest axis, shard_largest("data"). Labels get their specs by '
            "specs=."
        )
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise ShardingError(
            f"{who} gives {spec}. Leave out what is unreduced or reduced: only values "
            "inside a program can be."
        )
    if [*spec].count(...) > 1:
        raise ShardingError(
            f"{who} gives {spec_text(spec)}. Write ... once, for all other axes."
        )
    return spec


def spec_of_rank(spec: PartitionSpec, rank: int) -> PartitionSpec:
    """Return a spec with None for the axes that ``...`` stands for.

    Args:
        spec: the spec; one without ``...`` comes back as it is.
        rank: of the array; if the spec names more axes, ``...`` stands for none.

    Example:
        >>> spec_of_rank(PartitionSpec("x", ...), 3)
        P('x', None, None)
    """
    if ... not in [*spec]:
        return spec
    place = [*spec].index(...)
    before, after = [*spec][:place], [*spec][place + 1 :]
    nones = [None] * (rank - len(before) - len(after))
    return PartitionSpec(*before, *nones, *after)


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes that one entry of a spec names.

    Example:
        >>> mesh_axes("data"), mesh_axes(("data", "model")), mesh_axes(None)
        (('data',), ('data', 'model'), ())
    """
    if entry is None or entry is ... or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def spec_text(spec: PartitionSpec) -> str:
    """Write a spec as it is typed; JAX's own ``repr`` differs between its releases.

    Example:
        >>> spec_text(PartitionSpec("x")), spec_text(PartitionSpec(("x", "y"), None))
        ("P('x')", "P(('x', 'y'), None)")
    """
    entries = ["..." if entry is ... else repr(entry) for entry in spec]
    return f"P({', '.join(entries)})"


def is_replicated(spec: PartitionSpec) -> bool:
    """Return whether every device holds the whole array.

    Example:
        >>> is_replicated(PartitionSpec(None, None)), is_replicated(PartitionSpec("x"))
        (True, False)
    """
    return not any(map(mesh_axes, spec))


def is_open(spec: PartitionSpec) -> bool:
    """Return whether some axis is left to the compiler.

    Example:
        >>> is_open(PartitionSpec("x", PartitionSpec.UNCONSTRAINED))
        True
    """
    return any(entry is PartitionSpec.UNCONSTRAINED for entry in spec)


def same_spec(one: PartitionSpec, two: PartitionSpec) -> bool:
    """Compare two specs by what they do to one array.

    Example:
        >>> same_spec(PartitionSpec("x"), PartitionSpec("x", None))
        True
    """
    pairs = itertools.zip_longest(one, two)
    return all(mesh_axes(a) == mesh_axes(b) for a, b in pairs)


def shard_shape(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """Return the shape of what each device holds of an array that the spec fits.

    An axis that is left to the compiler counts as whole, which is the most there is.

    Example:
        >>> mesh = AbstractMesh((4, 2), ("x", "y"))
        >>> shard_shape(PartitionSpec(("x", "y"), None), (16, 3), mesh)
        (2, 3)
    """
    parts = [math.prod(mesh.shape[name] for name in mesh_axes(entry)) for entry in spec]
    pairs = itertools.zip_longest(shape, parts, fillvalue=1)
    return tuple(size // part for size, part in pairs)


def spec_problem(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mesh | AbstractMesh | None = None
) -> str | None:
    """Say what is wrong with a spec for an array; None if it fits.

    Args:
        spec: the spec.
        shape: of the array.
        mesh: the mesh that shall hold the array, if one is known.

    Example:
        >>> spec_problem(PartitionSpec("x"), (8, 4))
        "P('x') has 1 entry for 2 axes"
        >>> spec_problem(PartitionSpec("x", None), (6, 2), AbstractMesh((4,), ("x",)))
        "axis 0 has size 6, which 'x' of size 4 does not divide"
    """
    text = spec_text(spec)
    names = [name for entry in spec for name in mesh_axes(entry)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        return f"{text} names {twice[0]!r} twice"
    if not shape and len(spec):
        return f"{text} for a scalar, which can only be P()"
    if len(spec) and len(spec) != len(shape):
        entries = plural(len(spec), "entry")
        axes = "axis" if len(shape) == 1 else "axes"
        return f"{text} has {entries} for {len(shape)} {axes}"
    if mesh is None:
        return None
    unknown = [name for name in names if name not in mesh.shape]
    if unknown:
        return f"{unknown[0]!r} is not an axis of the mesh"
    if is_open(spec) and AxisType.Auto not in mesh.axis_types:
        return f"{text} leaves an axis to the compiler: no mesh axis is Auto"
    for axis, entry in enumerate(spec):
        over = [f"{name!r} of size {mesh.shape[name]}" for name in mesh_axes(entry)]
        if shape[axis] % math.prod(mesh.shape[name] for name in mesh_axes(entry)):
            text = " and ".join(over) + (" does" if len(over) == 1 else " together do")
            return f"axis {axis} has size {shape[axis]}, which {text} not divide"
    return None


def box_specs(
    view: TreeView, logical_axes: Mapping[str, Any] | AxisRules
) -> dict[int, PartitionSpec]:
    """Return the specs that the boxes of a tree ask for.

    Args:
        view: the tree.
        logical_axes: mesh axes by logical name, or ordered pairs of these; as in Flax
            an earlier pair takes the mesh axis.

    Returns:
        ``{index of a leaf: spec}`` of the leaves in boxes that have names.

    Raises:
        ShardingError: there are no mesh axes for a logical name.
    """
    named = axis_names(view)
    pairs = _pairs(logical_axes) if named else ()
    translated = {name for name, _ in pairs}
    return {
        index: _spec(names, pairs, view.plan.paths[index])
        for index, names in named.items()
        if not (names.is_note and translated.isdisjoint(names.names))
    }


def _pairs(logical_axes: Mapping[str, Any] | AxisRules) -> AxisRules:
    if isinstance(logical_axes, Mapping):
        return tuple(logical_axes.items())
    pairs = tuple(logical_axes)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ShardingError(
            "logical_axes is a mapping from logical name to mesh axes, or pairs, such "
            f"as {{'embed': None, 'mlp': 'model'}}; got {logical_axes!r}."
        )
    return pairs


def _spec(named: AxisNames, pairs: AxisRules, path: str) -> PartitionSpec:
    names = [name for name in named.names if isinstance(name, str)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ShardingError(
            f"The axes of {listing([path])} are called {named.names!r}, {twice[0]!r} "
            "twice. Give each its own name, such as 'embed' and 'embed_out'.",
            paths=[path],
        )
    pairs = (*pairs, *named.rules)
    ruled = {name for name, _ in pairs if name is not None}
    entries: list[Any] = [None] * len(named.names)
    places: dict[Any, int] = {}  # of logical names
    used: set[str] = set()
    for place, name in enumerate(named.names):
        if name in ruled:
            places[name] = place
        elif name is not None and named.logical:
            raise ShardingError(
                f"The box at {listing([path])} names an axis {name!r}, a logical name. "
                "Say which mesh axes it is, or None: "
                f"logical_axes={{{name!r}: 'model'}}."
            )
        else:
            entries[place] = name
            used.update(mesh_axes(name))
    for name, axes in pairs:
        if name in places and used.isdisjoint(mesh_axes(axes)):
            entries[places.pop(name)] = tuple(axes) if isinstance(axes, list) else axes
            used.update(mesh_axes(axes))
    return PartitionSpec(*entries)
