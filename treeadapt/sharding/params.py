"""Specs of a model's arrays, by rules.

``decide_specs`` gives every leaf a spec. It reads shapes alone, and names every leaf
that does not fit. What a rule says outranks nothing: a box that says otherwise is an
error, and a copy on every device that no rule asked for is reported.
See ``specs`` for how a spec is written, ``training_state`` for trees that hold the
states of optimizers, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec, get_abstract_mesh

from treeadapt.errors import ShardingError, UnmatchedPathError
from treeadapt.layers.region import Along
from treeadapt.layers.stacks import one_layer
from treeadapt.selection.answers import require_agreement
from treeadapt.selection.decision import MISSING, STATIC
from treeadapt.selection.largest_axis import ShardLargest
from treeadapt.selection.rules import BoundRules, RulesLike, as_rules
from treeadapt.sharding.specs import (
    AxisRules,
    as_spec,
    box_specs,
    is_open,
    is_replicated,
    same_spec,
    spec_of_rank,
    spec_problem,
    spec_text,
)
from treeadapt.text.names import listing, plural, section
from treeadapt.transforms.optax_fields import is_state_class
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe
from treeadapt.trees.views import TreeView

#: What to do with a state whose params are not known.
BY_PARAMS = (
    "State follows the params by path and shape, not by rules: "
    "opt_state_shardings(tx, params, partition_specs(params, rules))."
)
_DEFAULT = "the default"
_BOX = "its box"


_Spec = PartitionSpec | ShardLargest


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The spec of a leaf, and where it comes from; no spec if nothing says one."""

    spec: _Spec | None
    source: str = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        return repr(self.spec)


def decide_specs(
    view: TreeView,
    rules: RulesLike,
    specs: Mapping[Any, Any] | None = None,
    default: Any = MISSING,
    logical_axes: Mapping[str, Any] | AxisRules = (),
    mesh: Mesh | AbstractMesh | None = None,
) -> tuple[list[PartitionSpec], str]:
    """Return one spec a leaf, all of them checked, and a complaint or nothing.

    The complaint is of copies on every device that no rule asked for. Arguments and
    errors as for ``named_shardings``, but for states of optimizers, which are refused.
    """
    _refuse_optimizer_state(view)
    by_rules, own_default, axes = _by_rules(view, rules, specs)
    boxes = box_specs(view, logical_axes)
    fallback = own_default if default is MISSING else as_spec(default, "default=")
    leaf_specs = _LeafSpecs(mesh)
    for index, (path, leaf) in enumerate(view.items()):
        if not is_array(leaf):
            leaf_specs.specs.append(PartitionSpec())
            continue
        box, layer = boxes.get(index), one_layer(leaf, axes[index])
        choice = by_rules[index] or _unruled(layer, box, fallback)
        leaf_specs.add(path, leaf, layer, choice, box, axes[index])
    leaf_specs.require_fit(view)
    return leaf_specs.specs, "\n".join(leaf_specs.silent_lines())


class _LeafSpecs:
    """The spec of each leaf, and what is wrong with any of them, to be told at once.

    Attributes:
        specs: one a leaf that has one.
    """

    def __init__(self, mesh: Mesh | AbstractMesh | None) -> None:
        self.specs: list[PartitionSpec] = []
        self._mesh = mesh
        self._conflicts: list[str] = []  # of rules and boxes
        self._wrong: list[str] = []  # for shape or mesh
        self._unmatched: list[str] = []
        # Leaves of which every device has a copy, though no rule says so.
        self._silent: dict[str, Any] = {}
        self._undivided: dict[str, Any] = {}

    def add(
        self,
        path: str,
        leaf: Any,
        layer: Any,
        choice: _Choice,
        box: PartitionSpec | None,
        stacked: Sequence[Along],
    ) -> None:
        """Add the spec of a leaf.

        Args:
            path: of the leaf.
            leaf: an array.
            layer: one layer of it, for which rules speak; itself if it has none.
            choice: what decides it.
            box: the spec of its box, for the whole of it.
            stacked: its axes of layers.
        """
        spec, source = choice.spec, choice.source
        if spec is None:
            self._unmatched.append(path)
            return
        if isinstance(spec, PartitionSpec):
            spec = spec_of_rank(spec, len(layer.shape))
        if isinstance(spec, ShardLargest):
            rule, who = spec, _named(path, leaf)
            spec = rule.spec(layer, _mesh_sizes(rule, who, source, self._mesh))
            if is_replicated(spec) and rule.shards(layer):
                self._undivided[path] = leaf
        elif source is _DEFAULT and is_replicated(spec) and not is_open(spec):
            self._silent[path] = leaf
        target = leaf if source == _BOX else layer
        complaint = spec_problem(spec, target.shape, self._mesh)
        if complaint is not None:
            part = "" if target is leaf else f"for one layer, {describe(target)}, "
            self._wrong.append(f"{_named(path, leaf)}: {part}{complaint} ({source})")
        elif target is not leaf and len(spec):
            of_layers, rest = {each.axis for each in stacked}, iter(spec)
            every = range(len(leaf.shape))
            spec = PartitionSpec(
                *(None if axis in of_layers else next(rest) for axis in every)
            )
        if box is not None and not same_spec(spec, box):
            both = f"{spec_text(box)} by {_BOX}, {spec_text(spec)} by {source}"
            self._conflicts.append(f"{_named(path, leaf)}: {both}")
        self.specs.append(spec)

    def require_fit(self, view: TreeView) -> None:
        """Raise if rules and boxes disagree, a leaf has no spec, or one does not fit.

        Raises:
            ShardingError, UnmatchedPathError: it names all leaves of one kind.
        """
        if self._conflicts:
            lines = section("Rules and boxes disagree:", self._conflicts)
            lines.append(
                "Exclude these leaves from the rule, change it, or unbox the params. "
                "Where layers are not sharded, logical_axes= has None for the name of "
                "their axis."
            )
            raise ShardingError("\n".join(lines))
        if self._unmatched:
            arrays = plural(sum(map(is_array, view.leaves)), "array")
            verb = "has" if len(self._unmatched) == 1 else "have"
            raise UnmatchedPathError(
                f"{len(self._unmatched):,} of {arrays} {verb} no rule, and no names in "
                f"a box: {listing(self._unmatched)}.\nAdd a rule for them, end the "
                'rules with ("**", P()), or pass default=<spec>.',
                paths=self._unmatched,
            )
        if self._wrong:
            raise ShardingError(_wrong_message(self._wrong, self._mesh))

    def silent_lines(self) -> Iterator[str]:
        """Say which leaves every device holds although no rule says so, by reason."""
        if self._silent:
            yield (
                f"No rule matches {_counted(self._silent)}, of which the default puts "
                f"a copy on every device: {listing(self._silent)}. Give them a rule; "
                'to say that this is intended, end with "**": P().'
            )
        if self._undivided:
            yield (
                f"The mesh divides no axis of {_counted(self._undivided)}, so "
                "shard_largest puts a copy on every device: "
                f"{listing(self._undivided)}. Pad an axis, or name fewer mesh axes; to "
                "say that this is intended, give them a rule with P()."
            )


def _unruled(leaf: Any, box: PartitionSpec | None, default: _Spec | None) -> _Choice:
    """Return what decides a leaf, or one layer of it, that no rule matches."""
    if box is not None:
        return _Choice(box, _BOX)
    if not leaf.shape:
        return _Choice(PartitionSpec(), "a scalar")
    return _Choice(default, _DEFAULT)


def _mesh_sizes(
    rule: ShardLargest, who: str, source: str, mesh: Mesh | AbstractMesh | None
) -> Mapping[str, int]:
    """Return the size of each mesh axis, of the mesh that is set if none is passed.

    Args:
        rule: what needs them.
        who: the leaf, for messages.
        source: what gives the rule, for messages.
        mesh: the mesh that was passed.
    """
    sizes: Mapping[str, int] = (get_abstract_mesh() if mesh is None else mesh).shape
    unknown = [name for name in rule.names if name not in sizes]
    if unknown:
        seen = f"the mesh has {listing(sizes)}. Correct the name"
        if not sizes:
            seen = "no mesh is set. Call named_shardings(tree, rules, mesh)"
        raise ShardingError(
            f"{who}: {rule} ({source}) needs the size of the mesh axis {unknown[0]!r}, "
            f"but {seen}, or set the mesh around this call: jax.set_mesh(mesh)."
        )
    return sizes


def _refuse_optimizer_state(view: TreeView) -> None:
    for path, leaf in view.items():
        for cls in filter(is_state_class, view.plan.enclosing(path)):
            if is_array(leaf):
                raise ShardingError(
                    f"{listing([path])} is in the state of an optimizer, a "
                    f"{cls.__name__}. {BY_PARAMS}",
                    paths=[path],
                )


def _by_rules(
    view: TreeView, rules: Any, specs: Mapping[Any, Any] | None
) -> tuple[list[_Choice | None], _Spec | None, Sequence[Sequence[Along]]]:
    """Return what the rules say for each leaf, their default, and axes of layers."""
    if isinstance(rules, BoundRules):
        labels, who = require_agreement(rules.of_view(view), rules.gives), "the rules"
        choices = [
            None if label is STATIC else _Choice(_read(label, "The rules", specs), who)
            for label in labels
        ]
        return choices, None, rules.rules.stacks.axes(view)
    table = as_rules(rules)
    texts = [f"rule {where.typed}" for where in table.selectors]
    pairs = zip(table.values, texts, strict=True)
    choices = [_Choice(_read(x, f"The {text}", specs), text) for x, text in pairs]
    is_open = table.default is MISSING
    default = None if is_open else _read(table.default, "default=", specs)
    labels = [value for value in (*table.values, table.default) if value is not MISSING]
    idle = [str(label) for label in specs or () if label not in labels]
    if idle:
        raise ShardingError(
            f"No rule gives the label {listing(idle)} of specs=; the rules give "
            f"{listing(dict.fromkeys(map(str, labels)))}. Correct it, or leave it out."
        )
    decision = table.match(view)
    decision.check_rules()
    by_leaf = decision.answers_of([*choices, None], [*texts, "no rule"]).values
    return require_agreement(by_leaf, "A sharding"), default, decision.unrolled.axes


def _read(value: Any, who: str, specs: Mapping[Any, Any] | None) -> _Spec:
    """Return the spec that a value of the rules is, or that ``specs=`` has for it."""
    if specs is None:
        return as_spec(value, who)
    if not isinstance(value, Hashable) or value not in specs:
        raise ShardingError(
            f"{who} gives the label {value!r}, for which specs= has nothing; it "
            f"has {listing(map(str, specs)) or 'no label'}. Add it."
        )
    return as_spec(specs[value], f"specs={{{value!r}: ...}}")


def _wrong_message(wrong: Sequence[str], mesh: Mesh | AbstractMesh | None) -> str:
    sizes = () if mesh is None else mesh.shape.items()
    axes = ", ".join(f"{name!r} of size {size}" for name, size in sizes)
    lines = section(f"{plural(len(wrong), 'spec')} cannot shard the array:", wrong)
    lines.append(
        "Give one entry for each axis of the array (None: not sharded), P('data', ...) "
        "for the\nfirst axis of any array, or P() for a copy on every device."
    )
    return "\n".join([*lines, f"The mesh has {axes}."] if axes else lines)


def _counted(leaves: Mapping[str, Any]) -> str:
    size_bytes = sum(
        math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 0)
        for leaf in leaves.values()
    )
    return f"{plural(len(leaves), 'leaf')}, {size_bytes:,} bytes"


def _named(path: str, leaf: Any) -> str:
    return f"{listing([path])} {describe(leaf)}"
