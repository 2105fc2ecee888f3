"""Specs and shardings of whole trees: params, or all of a training state.

``partition_specs`` gives every leaf a ``PartitionSpec``, ``named_shardings`` puts them
on a mesh. Both read shapes alone, so they work on abstract trees before anything is
allocated. Rules decide on params. States of optimizers in the tree follow the params
that they are of, which are found by the paths in their copies of them.
See ``params`` for what rules decide, ``state`` for where the leaves of a state go.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from treeadapt.errors import ReplicatedWarning, ShardingError, StackError
from treeadapt.layers.region import read_key
from treeadapt.selection.decision import MISSING
from treeadapt.selection.rules import BoundRules, Rules, RulesLike
from treeadapt.selection.tree_first import view_first
from treeadapt.sharding.params import BY_PARAMS, decide_specs
from treeadapt.sharding.specs import AxisRules
from treeadapt.sharding.state import PlacedParam, place_slot
from treeadapt.text.names import listing
from treeadapt.transforms.optax_fields import is_state_class
from treeadapt.transforms.state_map import above, copied_tails, homes_in, map_classes
from treeadapt.trees.arrays import Tree, is_array
from treeadapt.trees.describing import describe_argument
from treeadapt.trees.exact import node_at
from treeadapt.trees.views import TreeView, view_tree

#: Sets of params: indices of arrays by what their paths have below a node, by the path
#: of that node.
_Sets = dict[str, dict[str, int]]


def partition_specs(
    tree: Tree,
    rules: RulesLike,
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
        tree: params, concrete or abstract; no value is read. Or a whole training state:
            a tree that holds params and the states of their optimizers, such as Flax's
            ``TrainState``, a dict, or an ``nnx.Optimizer`` next to its model. Rules
            then name params, with or without the field that holds these; each copy of
            a param in a state follows it, statistics of other shapes go where
            ``opt_state_shardings`` puts them, and so do counts. Trees next to the
            params with their paths and shapes (averages, a target network) follow the
            same rules.
        rules: ``Rules``, or a mapping or pairs for it, whose values are specs:
            ``P("data", None)`` or ``("data", None)``; ``P("expert", ...)`` is the first
            axis of any array. ``load_rules`` reads them too. If
            they have ``stacks``, a spec is for one layer, as in the unrolled model; in
            the array, the axis of the layers is not sharded. ``shard_largest("data")``
            needs a mesh, that of ``jax.set_mesh``; ``named_shardings`` takes one.
        specs: ``{label: spec}`` where the rules give labels, so that one table labels,
            decays, freezes and shards.
        default: spec of arrays that no rule matches and no box names.
        logical_axes: mesh axes by logical axis name, for boxes that carry such names;
            a mapping or ordered pairs, as Flax's ``logical_axis_rules``.

    Returns:
        Tree with exactly the treedef of ``tree``. Where no rule matches, the names in a
        box (``nn.Partitioned``, ``nn.LogicallyPartitioned``, ``nnx.Variable``) make the
        spec; a scalar and a leaf that is not an array get ``P()``.

    Raises:
        ShardingError: a spec does not fit its array, or is not a spec; a rule and a box
            disagree; a label has no spec; the tree holds the state of an optimizer and
            not its params, or two different sets of params that have one; or
            ``shard_largest`` names an axis that the mesh does not have, or there is no
            mesh.
        UnmatchedPathError: an array has no rule, no box, and there is no default.
        UnusedRuleError: a rule matches no array leaf, or is unreachable.
        StackError: layers of one array get different specs.

    Warns:
        ReplicatedWarning: the default puts arrays on every device, or no axis of a
            large one can be sharded as ``shard_largest`` says. A rule that says so
            (``"**": P()``) is not reported.

    Example:
        >>> P = jax.sharding.PartitionSpec
        >>> params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
        >>> partition_specs(params, {"**/kernel": P("data", "model"), "**": P()})
        {'up': {'bias': P(), 'kernel': P('data', 'model')}}
    """
    view = view_first(tree, rules, "partition_specs(tree, rules)")
    return view.rebuild(_decided(view, rules, specs, default, logical_axes, None))


def named_shardings(
    tree: Tree,
    rules: RulesLike,
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
        tree: params or a whole training state, as for ``partition_specs``, concrete or
            abstract; no value is read, nothing is moved.
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
        UnusedRuleError: a rule matches no array leaf, or is unreachable.

    Warns:
        ReplicatedWarning: as by ``partition_specs``.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
        >>> abstract = {"kernel": jax.ShapeDtypeStruct((8, 2), jnp.float32)}
        >>> named_shardings(abstract, {"**": ("data", None)}, mesh)["kernel"].spec
        P('data', None)

        A training state in one call:

        >>> moments = jax.eval_shape(optax.adam(1e-3).init, abstract)
        >>> state = {"params": abstract, "opt": moments}
        >>> shardings = named_shardings(state, {"kernel": ("data", None)}, mesh)
        >>> shardings["opt"][0].mu["kernel"].spec, shardings["opt"][0].count.spec
        (P('data', None), P())
    """
    call = "named_shardings(tree, rules, mesh)"
    if not isinstance(mesh, Mesh | AbstractMesh):
        got = describe_argument(mesh)
        raise ShardingError(f"Expected a mesh, {call}; got {got} in its place.")
    view = view_first(tree, rules, call)
    leaf_specs = _decided(view, rules, specs, default, logical_axes, mesh)
    return view.rebuild([NamedSharding(mesh, spec) for spec in leaf_specs])


def _decided(view: TreeView, rules: Any, *options: Any) -> list[PartitionSpec]:
    """Return one spec a leaf; warn of copies that no rule asked for."""
    holds_state = view.plan.paths_of(is_state_class)
    decide = _of_training_state if holds_state else decide_specs
    leaf_specs, complaint = decide(view, rules, *options)
    if complaint:
        warnings.warn(complaint, ReplicatedWarning, stacklevel=3)
    return leaf_specs


def _of_training_state(
    view: TreeView, rules: Any, *options: Any
) -> tuple[list[PartitionSpec], str]:
    """Return the specs of params, and of the states that follow them; a complaint.

    Args:
        view: the whole tree.
        rules: of the params.
        *options: as for ``decide_specs``.
    """
    in_state = {
        index
        for index, path in enumerate(view.plan.paths)
        if any(map(is_state_class, view.plan.enclosing(path)))
    }
    sets = _param_sets(view, in_state)
    leaf_specs, complaint = _of_params(view, rules, options, in_state, sets)
    members = next(iter(sets.values()), {})
    slots, everywhere = map_classes(view, members).slots, PartitionSpec()
    placed: dict[str, dict[str, PlacedParam]] = {
        node: {
            tail: PlacedParam(tuple(view.leaves[index].shape), leaf_specs[index])
            for tail, index in members.items()
        }
        for node, members in sets.items()
    }
    differing = [node for node in placed if placed[node] != placed[next(iter(placed))]]
    placed = placed if differing else dict([*placed.items()][:1])
    for index in in_state:
        leaf, mesh = view.leaves[index], options[-1]
        if is_array(leaf):
            params = _followed(slots[index].name, placed)
            place = place_slot(slots[index], leaf.shape, params, everywhere, mesh)
            assert isinstance(place.placement, PartitionSpec)
            leaf_specs[index] = place.placement
    return leaf_specs, complaint


def _followed(
    name: str, placed: Mapping[str, dict[str, PlacedParam]]
) -> dict[str, PlacedParam]:
    """Return the set of params that a leaf of a state follows.

    Rules may tell sets apart that are alike. Then it is the one that is nearest, or is
    called ``params``.

    Args:
        name: of the leaf.
        placed: the sets, by the paths of their nodes.

    Raises:
        ShardingError: nothing says which.
    """
    if len(placed) < 2:
        return next(iter(placed.values()), {})
    around = {*above(name)}
    shared = {node: len(around.intersection(above(node))) for node in placed}
    nearest = [node for node in placed if shared[node] == max(shared.values())]
    named = [node for node in nearest if node.rpartition("/")[2] == "params"]
    if len(nearest) == 1 or len(named) == 1:
        return placed[(named or nearest)[0]]
    raise ShardingError(
        f"{listing([name])} may follow any of {listing(placed)}, to which the rules "
        f"give different specs. Call what is trained 'params', or: {BY_PARAMS}",
        paths=placed,
    )


def _param_sets(view: TreeView, in_state: Collection[int]) -> _Sets:
    """Return the params that the states are of; several sets, if they are alike.

    Averages and target networks are alike. If no state has a copy of params, these are
    what has the most arrays at the root.

    Raises:
        ShardingError: there are none, or sets that are not alike.
    """
    tails, leaves = copied_tails(view), enumerate(view.items())
    outside = {p: i for i, (p, x) in leaves if i not in in_state and is_array(x)}
    if not tails:
        names = map(str, view.plan.child_names(None))
        sets = {name: _members(name, outside) for name in names}
        most = max(sets.values(), key=len, default={})
        kind = _shapes(view, most)
        return {node: x for node, x in sets.items() if x and _shapes(view, x) == kind}
    # Some statistics have more names below that of a param.
    longest = max(tails.values(), key=len)
    ends = [longest, read_key(longest).path, *above(longest)]
    nodes = dict.fromkeys(
        path.removesuffix(end).removesuffix("/")
        for end in ends
        for path in outside
        if not end or f"/{path}".endswith(f"/{end}")
    )
    sets = {}
    scores: dict[str, int] = {}
    for node in nodes:
        members = _members(node, outside)
        home = homes_in({tail: tail for tail in members}, deep=True)
        places = [(index, home(tail)) for index, tail in tails.items()]
        if any(place is None for _, place in places):
            continue
        sets[node] = members
        scores[node] = sum(
            view.leaves[index].shape
            == place[0].shape(view.leaves[members[place[0].path]].shape)
            for index, place in places
            if place
        )
    best = max(scores.values(), default=0)
    sets = {node: members for node, members in sets.items() if scores[node] == best}
    kinds = [_shapes(view, members) for members in sets.values()]
    if not sets:
        raise ShardingError(
            f"{listing([view.plan.paths[next(iter(tails))]])} is in the state of an "
            "optimizer, and no one tree next to it has all the params that the states "
            f"are of, such as {listing([longest])}. {BY_PARAMS}",
            paths=[view.plan.paths[index] for index in tails],
        )
    if any(kind != kinds[0] for kind in kinds):
        raise ShardingError(
            f"The states of optimizers may be of {listing(sets)}, which differ. "
            f"{BY_PARAMS}",
            paths=sets,
        )
    return sets


def _members(node: str, arrays: Mapping[str, int]) -> dict[str, int]:
    """Return the arrays at and below a node, by what their paths have below it."""
    start = f"{node}/" if node else ""
    members = {
        path.removeprefix(start): index
        for path, index in arrays.items()
        if path.startswith(start)
    }
    return {"": arrays[node]} if node in arrays else members


def _shapes(view: TreeView, members: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    return {tail: view.leaves[index].shape for tail, index in members.items()}


class _Reading(NamedTuple):
    """A way to read the paths in rules.

    Attributes:
        view: what the rules decide on.
        places: in it, of the params that all sets follow, by what follows their node.
        is_inside: whether it is that node, and not the whole tree.
    """

    view: TreeView
    places: Mapping[str, int]
    is_inside: bool = False


def _of_params(
    view: TreeView,
    rules: Any,
    options: Sequence[Any],
    in_state: Collection[int],
    sets: _Sets,
) -> tuple[list[PartitionSpec], str]:
    """Return a spec for each leaf that is in no state, and a complaint.

    Rules may name params from the root, or from the node that holds them, and all sets
    or each. They are read so that the fewest have no use.
    """

    def without(left_out: Collection[int]) -> TreeView:
        leaves = enumerate(view.leaves)
        kept = [0 if index in left_out else leaf for index, leaf in leaves]
        return view_tree(view.rebuild(kept))

    every = {index for members in sets.values() for index in members.values()}
    readings = [
        _Reading(without({*in_state, *every.difference(members.values())}), members)
        for members in sets.values()
    ]
    if len(sets) != 1:
        readings.append(_Reading(without(in_state), {}))
    if node := next(iter(sets), ""):
        inside = view_tree(node_at(view.tree, node))
        places = {path: place for place, path in enumerate(inside.plan.paths)}
        readings.append(_Reading(inside, places, is_inside=True))
    lenient, reading = rules, readings[-1]
    if not isinstance(rules, BoundRules):
        lenient = Rules(rules, unused="ignore")
        reading = min(readings, key=lambda each: _num_idle(lenient, each.view))
    specs, complaint = decide_specs(reading.view, rules, *options)
    leaf_specs, complaints = [*specs], [complaint]
    if reading.is_inside:
        others = without({*in_state, *every})
        leaf_specs, other = decide_specs(others, lenient, *options)
        complaints.append(other)
    for tail, place in reading.places.items():
        for members in sets.values():
            if tail in members:  # what is no array has no place
                leaf_specs[members[tail]] = specs[place]
    return leaf_specs, "\n".join(filter(None, complaints))


def _num_idle(table: Rules, view: TreeView) -> float:
    """Count the rules without a use on a tree; all, if their stacks are not in it."""
    try:
        decision = table.match(view)
    except StackError:
        return math.inf
    return len(decision.unused) + len(decision.shadowed)
