"""Specs and shardings of a model's arrays, by rules.

``partition_specs`` gives every leaf a ``PartitionSpec``, ``named_shardings`` puts them
on a mesh. Both read shapes alone, so they work on abstract trees before anything is
allocated, and name every leaf that does not fit. What a rule says outranks nothing: a
box that says otherwise is an error, and a copy on every device that no rule asked for
is reported.
How a spec is written is up to ``specs``, optimizer state to ``state``.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from treeadapt.arrays import is_array
from treeadapt.carry.optax_fields import is_state_class
from treeadapt.convert import describe
from treeadapt.errors import ReplicatedWarning, ShardingError, UnmatchedPathError
from treeadapt.names import listing, plural
from treeadapt.selection.matches import MISSING, STATIC, where_text
from treeadapt.selection.rules import BoundRules, Rules, as_rules
from treeadapt.sharding.boxes import AxisRules, box_specs
from treeadapt.sharding.specs import (
    as_spec,
    is_replicated,
    mesh_misfit,
    misfit,
    same_spec,
    spec_text,
)
from treeadapt.trees.views import TreeView, view_tree

_SHOWN = 8  # problems that a message lists
_DEFAULT = "the default"
_NO_CHOICE = "a scalar"


def partition_specs(
    tree: Any,
    rules: Any,
    *,
    specs: Mapping[Any, Any] | None = None,
    default: Any = MISSING,
    logical_axes: Mapping[str, Any] | AxisRules = (),
) -> Any:
    """Return the ``PartitionSpec`` of every leaf: the first rule that matches decides.

    This is what the field copies around as ``match_partition_rules``, with patterns on
    whole paths and every spec checked. A spec has one entry for each axis of its array,
    or is ``P()``: a copy on every device.

    Args:
        tree: params, concrete or abstract; no value is read.
        rules: ``Rules``, or a mapping or pairs for it, whose values are specs:
            ``P("data", None)``, ``("data", None)``, or text for rules files, ``"data,
            None"``, ``"data+model, None"`` and ``"replicated"`` for ``P()``.
        specs: ``{label: spec}`` where the rules give labels, so that one table labels,
            decays, freezes and shards.
        default: spec of arrays for which no rule and no box speaks.
        logical_axes: mesh axes by logical axis name, for boxes that carry such names;
            a mapping or ordered pairs, as Flax's ``logical_axis_rules``.

    Returns:
        Tree with exactly the treedef of ``tree``. Where no rule matches, the names in a
        box (``nn.Partitioned``, ``nn.LogicallyPartitioned``, ``nnx.Variable``) make the
        spec; a scalar and a leaf that is not an array get ``P()``.

    Raises:
        ShardingError: a spec does not fit its array, or is not a spec; a rule and a box
            disagree; a label has no spec; or the tree is the state of an optimizer.
        UnmatchedPathError: an array has no rule, no box, and there is no default.
        UnusedRuleError: a rule hits no array leaf, or decides none.

    Warns:
        ReplicatedWarning: the default puts arrays on every device. A rule that says so
            (``"**": P()``) is not reported.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
        >>> partition_specs(params, {"**/kernel": P("data", "model"), "**": P()})
        {'up': {'bias': P(), 'kernel': P('data', 'model')}}
    """
    view = view_tree(tree)
    return view.rebuild(_decided(view, rules, specs, default, logical_axes, None))


def named_shardings(
    tree: Any,
    rules: Any,
    mesh: Mesh | AbstractMesh,
    *,
    specs: Mapping[Any, Any] | None = None,
    default: Any = MISSING,
    logical_axes: Mapping[str, Any] | AxisRules = (),
) -> Any:
    """Return the ``NamedSharding`` of every leaf on a mesh.

    For ``jax.device_put(params, shardings)``, or ``jax.jit(init,
    out_shardings=shardings)`` where the params would not fit on one device.

    Args:
        tree: params, concrete or abstract; no value is read, nothing is moved.
        rules: as for ``partition_specs``.
        mesh: the mesh, which may be abstract.
        specs: as for ``partition_specs``.
        default: as for ``partition_specs``.
        logical_axes: as for ``partition_specs``.

    Returns:
        Tree with exactly the treedef of ``tree``; leaves that are not arrays get
        ``P()``.

    Raises:
        ShardingError: as ``partition_specs``; or a spec names an axis that the mesh
            does not have, or the size of an array is not divisible by the mesh.
        UnmatchedPathError: an array has no rule, no box, and there is no default.
        UnusedRuleError: a rule hits no array leaf, or decides none.

    Warns:
        ReplicatedWarning: the default puts arrays on every device.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
        >>> abstract = {"kernel": jax.ShapeDtypeStruct((8, 2), jnp.float32)}
        >>> named_shardings(abstract, {"**": ("data", None)}, mesh)["kernel"].spec
        P('data', None)
    """
    view = view_tree(tree)
    found = _decided(view, rules, specs, default, logical_axes, mesh)
    return view.rebuild([NamedSharding(mesh, spec) for spec in found])


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """The spec of one leaf, and where it comes from; both None if nothing speaks."""

    spec: PartitionSpec
    source: str


def _decided(
    view: TreeView,
    rules: Any,
    specs: Mapping[Any, Any] | None,
    default: Any,
    logical_axes: Mapping[str, Any] | AxisRules,
    mesh: Mesh | AbstractMesh | None,
) -> list[PartitionSpec]:
    """Return one spec a leaf, all of them checked."""
    _refuse_optimizer_state(view)
    chosen, own_default = _by_rules(view, rules, specs)
    _add_boxes(view, chosen, box_specs(view, logical_axes))
    fallback = own_default if default is MISSING else as_spec(default, "default=")
    found = _complete(view, chosen, fallback)
    _check(view, found, mesh)
    _report_replicated(view, found)
    return [choice.spec for choice in found]


def _refuse_optimizer_state(view: TreeView) -> None:
    for index, leaf in enumerate(view.leaves):
        for cls in view.plan.enclosing(index):
            if is_state_class(cls) and is_array(leaf):
                raise ShardingError(
                    f"{listing([view.plan.paths[index]])} is in the state of an "
                    f"optimizer, a {cls.__name__}. State follows the params by path "
                    "and shape, not by rules: opt_state_shardings(tx, params, "
                    "partition_specs(params, rules))."
                )


def _by_rules(
    view: TreeView, rules: Any, specs: Mapping[Any, Any] | None
) -> tuple[list[_Choice | None], PartitionSpec | None]:
    """Return what the rules say for each leaf, and their own default."""
    meant = _meaning(specs)
    if isinstance(rules, BoundRules):
        labels = view_tree(rules(view.tree)).leaves
        return [
            None if label is STATIC else _Choice(meant(label, "The rules"), "the rules")
            for label in labels
        ], None
    table = _as_rules(rules)
    texts = [f"rule {where_text(where)}" for where in table.selectors]
    choices = [
        _Choice(meant(value, f"The {text}"), text)
        for value, text in zip(table.values, texts, strict=True)
    ]
    own = None if table.default is MISSING else meant(table.default, "default=")
    given = (*table.values, *(() if own is None else (table.default,)))
    _require_known_labels(specs, given)
    matches = table.match(view)
    matches.check_rules()
    return [None if i < 0 else choices[i] for i in matches.deciding], own


def _as_rules(rules: Any) -> Rules:
    if not isinstance(rules, Rules):
        pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
        for pair in pairs:
            if isinstance(pair, tuple | list) and len(pair) == 2 and pair[1] is None:
                as_spec(None, f"The rule {pair[0]!r}")
        rules = pairs
    return as_rules(rules)


def _meaning(specs: Mapping[Any, Any] | None) -> Callable[[Any, str], PartitionSpec]:
    """Return what reads a value of the rules as a spec."""
    if specs is None:
        return as_spec
    known = {
        label: as_spec(spec, f"specs={{{label!r}: ...}}")
        for label, spec in specs.items()
    }

    def of_label(label: Any, who: str) -> PartitionSpec:
        if not isinstance(label, Hashable) or label not in known:
            raise ShardingError(
                f"{who} gives the label {label!r}, for which specs= has nothing; it "
                f"has {listing(map(str, known)) or 'no label'}. Add it."
            )
        return known[label]

    return of_label


def _require_known_labels(
    specs: Mapping[Any, Any] | None, labels: Sequence[Any]
) -> None:
    idle = [str(label) for label in specs or () if label not in labels]
    if idle:
        raise ShardingError(
            f"No rule gives the label {listing(idle)} of specs=; the rules give "
            f"{listing(dict.fromkeys(map(str, labels)))}. Correct it, or leave it out."
        )


def _add_boxes(
    view: TreeView,
    chosen: list[_Choice | None],
    boxes: Mapping[int, PartitionSpec],
) -> None:
    """Let the names in boxes speak where no rule does."""
    conflicts = []
    for index, spec in sorted(boxes.items()):
        choice = chosen[index]
        if choice is None:
            chosen[index] = _Choice(spec, "its box")
        elif not same_spec(choice.spec, spec):
            text = f"{spec_text(choice.spec)} by {choice.source}"
            conflicts.append((index, f"{spec_text(spec)} by its box, {text}"))
    if conflicts:
        raise ShardingError(
            f"Rules and boxes disagree:\n{_lines(view, conflicts)}\nLet one of them "
            "speak: exclude these leaves from the rule, change it, or unbox the "
            "params (flax.linen.unbox)."
        )


def _complete(
    view: TreeView, chosen: Sequence[_Choice | None], default: PartitionSpec | None
) -> list[_Choice]:
    """Fill in what neither a rule nor a box decides."""
    found, unmatched = [], []
    for path, leaf, choice in zip(view.plan.paths, view.leaves, chosen, strict=True):
        if choice is not None:
            found.append(choice)
        elif not is_array(leaf) or not leaf.shape:
            found.append(_Choice(PartitionSpec(), _NO_CHOICE))
        elif default is not None:
            found.append(_Choice(default, _DEFAULT))
        else:
            unmatched.append(path)
    if unmatched:
        num_arrays = sum(map(is_array, view.leaves))
        raise UnmatchedPathError(_unmatched_message(unmatched, num_arrays))
    return found


def _unmatched_message(unmatched: Sequence[str], num_arrays: int) -> str:
    verb = "has" if len(unmatched) == 1 else "have"
    return (
        f"{len(unmatched):,} of {plural(num_arrays, 'array')} {verb} no rule, and no "
        f"names in a box: {listing(unmatched)}.\nAdd a rule for them, end the rules "
        'with ("**", P()), or pass default=<spec>.'
    )


def _check(
    view: TreeView, found: Sequence[_Choice], mesh: Mesh | AbstractMesh | None
) -> None:
    problems = []
    for index, (leaf, choice) in enumerate(zip(view.leaves, found, strict=True)):
        if not is_array(leaf):
            continue
        wrong = misfit(choice.spec, leaf.shape)
        if wrong is None and mesh is not None:
            wrong = mesh_misfit(choice.spec, leaf.shape, mesh)
        if wrong is not None:
            problems.append((index, f"{wrong} ({choice.source})"))
    if not problems:
        return
    lines = [f"{plural(len(problems), 'spec')} cannot shard the array:"]
    lines.append(_lines(view, problems))
    lines.append(
        "Give one entry for each axis of the array (None: not sharded), or P() for a "
        "copy\non every device. Labels get their specs by specs=."
    )
    if mesh is not None:
        sizes = (f"{name!r} of size {size}" for name, size in mesh.shape.items())
        lines.append(f"The mesh has {', '.join(sizes)}.")
    raise ShardingError("\n".join(lines))


def _report_replicated(view: TreeView, found: Sequence[_Choice]) -> None:
    silent = [
        index
        for index, choice in enumerate(found)
        if choice.source is _DEFAULT and is_replicated(choice.spec)
    ]
    if not silent:
        return
    leaves = [view.leaves[index] for index in silent]
    size_bytes = sum(
        math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 0) for leaf in leaves
    )
    warnings.warn(
        f"No rule speaks for {plural(len(silent), 'leaf')}, {size_bytes:,} bytes, of "
        "which the default puts a copy on every device: "
        f"{listing(view.plan.paths[index] for index in silent)}. Give them a rule; "
        '"**": P() as the last one says that this is meant.',
        ReplicatedWarning,
        stacklevel=4,
    )


def _lines(view: TreeView, problems: Sequence[tuple[int, str]]) -> str:
    lines = [
        f"  {listing([view.plan.paths[i]])} {describe(view.leaves[i])}: {text}"
        for i, text in problems[:_SHOWN]
    ]
    if len(problems) > _SHOWN:
        lines.append(f"  and {len(problems) - _SHOWN:,} more")
    return "\n".join(lines)
