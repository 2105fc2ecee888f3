"""``partition`` and ``freeze``: different transformations for different leaves.

Each group of leaves is a flat dict of its own, so state and trace work grow with leaves
plus groups. Layers of one array may be in several groups: each has a ``Region`` of it,
cut out and put in again; whole arrays cost nothing. Frozen leaves belong to no group:
they have no state, no gradient of theirs reaches a transformation, and their update is
-0.0.
See ``rules`` for which leaf has which label, ``adapt`` for the way to flat dicts,
``layers.region`` for what a region is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from treeadapt.errors import PathCollisionError, RulesError, TransformError
from treeadapt.layers.keys import boxes
from treeadapt.layers.region import Region, put
from treeadapt.selection.answers import Split
from treeadapt.selection.arguments import check_choice, turned_text
from treeadapt.selection.decision import MISSING, STATIC
from treeadapt.selection.rules import BoundRules, Rules, RulesLike, as_rules
from treeadapt.selection.selectors import Unused, Where, as_selector
from treeadapt.selection.whole_tree import Question, WholeTree, in_force
from treeadapt.text.names import Speller, listing
from treeadapt.transforms.adapt import (
    is_transformation,
    run_flat,
    unlike_transformation,
    with_extra_args,
    with_methods_of,
)
from treeadapt.transforms.as_tree import on_tree
from treeadapt.transforms.flat import (
    OF_GRADIENT,
    FlatDict,
    by_half,
    callbacks_on_flat,
    is_of_examples,
    no_change,
    pick_arrays,
    require_layers,
    shaped_extra,
)
from treeadapt.transforms.lift import is_function, lift
from treeadapt.transforms.state_map import fast_params
from treeadapt.trees.arrays import is_array, is_number
from treeadapt.trees.describing import describe, describe_argument
from treeadapt.trees.views import view_tree

FROZEN = "frozen"

#: By key of a group's flat dict, the layers of an array of the flat dict around it; all
#: of it, if they are along no axis.
Group = dict[str, Region]
#: By label, a transformation and the leaves that it runs on.
Groups = Mapping[Any, tuple[optax.GradientTransformationExtraArgs, Group]]


def partition(
    transforms: Mapping[Hashable, Any],
    rules: RulesLike | Callable[[Any], Any],
    *,
    as_tree: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Run a transformation for each label, on any tree.

    This is Optax's ``partition`` (``multi_transform``); what Equinox calls by that
    name is ``treeadapt.split``. Numbers equal ``optax.partition`` on the flat dict, bit
    for bit.

    Args:
        transforms: ``{label: transformation}``. The label ``"frozen"`` needs none:
            such leaves have no state, and their update is -0.0, which keeps every bit
            of a number that it is added to.
        rules: ``Rules``, or a mapping or pairs for it; or a function from a tree to a
            label tree, whose labels may be for whole subtrees. A label tree that is
            there already goes in as ``treeadapt.lift(labels)``. ``Rules`` with
            ``stacks`` may put layers of one array into different groups; each then has
            a slice of it, such as ``blocks/{4..11}/attn/kernel``.
        as_tree: show each transformation the params in the model's own classes, with
            None for the leaves of other groups, as ``adapt`` explains: for those that
            look for modules by class.

    Returns:
        ``GradientTransformationExtraArgs`` for any tree. Its state is Optax's
        ``PartitionState``, with the state of each transformation on the flat dict of
        its own leaves (or on the tree with these). A group's ``value_fn`` gets the
        current params of the other groups merged in, so a group may hold a line search.

    Raises:
        TransformError: a label has no transformation (raised by ``init``, with
            paths), no rule leads to a transformation, ``"frozen"`` has one, labels
            cannot be sorted together, or ``rules`` is a label tree; or (by ``update``)
            the state is one of other rules, which ``carry_state`` takes over.
        UnmatchedPathError: (by ``init``) a leaf that trains has no label.
        UnusedRuleError: (by ``init``) a pattern matches no array.

    Example:
        >>> tx = partition({"slow": optax.sgd(0.1)}, {"a": "frozen", "**": "slow"})
        >>> params = {"a": jnp.ones(1), "b": jnp.ones(1)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'a': Array([-0.], dtype=float32), 'b': Array([-0.1], dtype=float32)}
    """
    _check_labels(transforms)
    by_function = is_function(rules) and not isinstance(rules, Rules | BoundRules)
    labels = lift(rules) if by_function else _read_rules(transforms, rules)
    return _run_groups(
        labels,
        {x: with_extra_args(tx, as_tree=as_tree) for x, tx in transforms.items()},
        still=FROZEN,
        pack=optax.transforms.PartitionState,
        unpack=lambda state: state.inner_states,
        # As Optax, a function may be asked about no params at all.
        needs_arrays=not by_function,
    )


def freeze(
    tx: Any, where: Where, *, unused: Unused = "error", as_tree: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Run ``tx`` on every leaf but the selected ones, on any tree.

    It wraps, so nothing inside can move a frozen leaf. (``optax.chain(optax.freeze(
    mask), optax.adamw(lr))`` moves them by weight decay.) Their update is -0.0, which
    keeps every bit of a number that it is added to.

    Args:
        tx: any Optax transformation.
        where: selector of the leaves that no step may change; of layers of a stacked
            array, ``Rules(..., stacks=...).where(label)``.
        unused: ``"error"`` or ``"ignore"`` patterns and classes that match no array,
            as where one optimizer is for two trees, those of an actor and a critic.
        as_tree: show ``tx`` the params in the model's own classes, with None for the
            frozen leaves, as ``adapt`` explains: for one that looks for modules by
            class.

    Returns:
        ``GradientTransformationExtraArgs`` for any tree; its state is the state of
        ``tx`` on the flat dict of the other leaves (or on the tree with these).

    Raises:
        TransformError: ``tx`` is not a transformation.
        SelectorError: ``where`` is not a selector, or ``unused`` not one of its
            choices.
        UnusedRuleError: (by ``init``, and by ``update`` if the params are whole) a
            pattern or class in ``where`` matches no array.

    Example:
        >>> tx = freeze(optax.adamw(0.1), "a")
        >>> params = {"a": jnp.ones(1), "b": jnp.ones(1)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> updates["a"], list(state[0].mu)
        (Array([-0.], dtype=float32), ['b'])
    """
    inner = with_extra_args(tx, "freeze takes (tx, where)", as_tree=as_tree)
    selector = as_selector(where)
    check_choice("unused", unused, ("error", "ignore"))
    frozen = _run_groups(
        selector,
        {False: inner},
        unused=unused,
        still=True,
        pack=lambda states: states[False],
        unpack=lambda state: {False: state},
    )
    return with_methods_of(tx, frozen)


def one_group(
    tx: Any, rules: Rules, label: Hashable
) -> optax.GradientTransformationExtraArgs:
    """Run ``tx`` on the leaves with one label, the only one that is not frozen.

    As ``partition({label: tx}, rules)``, except that the state is that of ``tx``.
    """
    group = _run_groups(
        _read_rules({label: tx}, rules),
        {label: with_extra_args(tx)},
        still=FROZEN,
        pack=lambda states: states[label],
        unpack=lambda state: {label: state},
    )
    return with_methods_of(tx, group)


def _run_groups(
    labels: Question,
    inner: Mapping[Hashable, optax.GradientTransformationExtraArgs],
    *,
    still: Hashable,
    pack: Callable[[dict[Hashable, Any]], Any],
    unpack: Callable[[Any], Mapping[Hashable, Any]],
    needs_arrays: bool = True,
    unused: Unused = "error",
) -> optax.GradientTransformationExtraArgs:
    """Return what runs a transformation on each group of leaves of any tree.

    Args:
        labels: gives each leaf a label.
        inner: the transformation of each label.
        still: the label of leaves that do not move.
        pack: makes the state out of the states of the groups, by label.
        unpack: takes it apart again.
        needs_arrays: as for ``run_flat``.
        unused: ``"error"`` or ``"ignore"`` what matches nothing in ``labels``.
    """

    def groups(whole: WholeTree, flat: Any) -> tuple[Groups, WholeTree]:
        asked = dataclasses.replace(whole, strict=False) if lenient else whole
        paths = list(fast_params(flat))
        by_label, regions = _divide(paths, labels.answer(asked, paths))
        stray = {x: by_label[x] for x in by_label if x not in (*inner, still)}
        if stray:
            raise _no_transformation(stray, inner)
        within = whole
        if regions:
            within = dataclasses.replace(whole, regions={**whole.regions, **regions})
        groups = {
            label: (on_tree(tx, within), by_label.get(label, {}))
            for label, tx in inner.items()
        }
        return groups, within

    def init(whole: WholeTree | None, params: Any) -> Any:
        if whole is None:
            return pack({label: tx.init(params) for label, tx in inner.items()})
        return pack(init_groups(*groups(whole, params), params))

    def update(
        whole: WholeTree, updates: FlatDict, state: Any, params: Any, extra: FlatDict
    ) -> tuple[Any, Any]:
        by_label, within = groups(whole, updates if params is None else params)
        new, states = update_groups(
            by_label, within, updates, unpack(state), params, extra
        )
        return _with_zeros(new, _every(by_label), updates, params), pack(states)

    def moving(whole: WholeTree, flat: Any) -> list[str]:
        return [region.path for region in _every(groups(whole, flat)[0]).values()]

    lenient = unused == "ignore"
    parts = (labels, *inner.values())
    return run_flat(parts, init, update, needs_arrays=needs_arrays, moving=moving)


def _divide(
    paths: Sequence[str], answers: Sequence[Any]
) -> tuple[dict[Any, Group], dict[str, Region]]:
    """Group the arrays of a flat dict, or regions of them, by label.

    Args:
        paths: keys of the flat dict.
        answers: a label for each; ``Split`` where its layers have different ones.

    Returns:
        The groups by label; and by key, which layers of the caller's tree are cut out.

    Raises:
        PathCollisionError: the key of some layers is the path of another leaf.
    """
    groups: dict[Any, Group] = {}
    regions: dict[str, Region] = {}
    whole_paths = frozenset(paths)
    for path, answer in zip(paths, answers, strict=True):
        if not isinstance(answer, Split):
            groups.setdefault(answer, {})[path] = Region(path)
            continue
        for label, boxed in boxes(answer.values, answer.region.sizes).items():
            for places in boxed:
                region = answer.region.at(places)
                key = region.key
                if key in whole_paths:
                    raise PathCollisionError(
                        f"Some layers of {region.path!r} would be called {key!r}, "
                        "which is the path of another leaf. Rename that leaf.",
                        paths=[key],
                    )
                regions[key] = region
                inside = answer.region.inside(path).at(places)
                groups.setdefault(label, {})[key] = inside
    return groups, regions


def _take(flat: Any, group: Group) -> Any:
    """Return the flat dict of a group, half by half for lookahead."""

    def of_half(half: FlatDict) -> FlatDict:
        return {key: region.take(half[region.path]) for key, region in group.items()}

    return by_half(of_half, flat)


def _put_back(
    part: Mapping[str, Any], group: Group, rest: Callable[[str], Any]
) -> FlatDict:
    """Return the arrays of which a group has some layers, with these put in.

    Args:
        part: the flat dict of the group, or of several groups together.
        group: what its keys stand for.
        rest: gives the array, by path, that has all other layers; None if it has none,
            and then the result has none.
    """
    cut = {key: region for key, region in group.items() if region.along}
    arrays = {key: leaf for key, leaf in part.items() if key not in cut}
    regions: dict[str, list[tuple[Region, Any]]] = {}
    for key, region in cut.items():
        regions.setdefault(region.path, []).append((region, part[key]))
    return arrays | {path: put(rest(path), parts) for path, parts in regions.items()}


def _every(groups: Groups) -> Group:
    """Return all groups as one."""
    return {key: part for _, group in groups.values() for key, part in group.items()}


def init_groups(groups: Groups, whole: WholeTree, params: Any) -> dict[Any, Any]:
    """Return the state of each group, by label; arguments as for ``update_groups``."""
    with in_force(whole):
        return {
            label: tx.init(_take(params, group))
            for label, (tx, group) in groups.items()
        }


def update_groups(
    groups: Groups,
    whole: WholeTree,
    updates: FlatDict,
    state: Mapping[Any, Any],
    params: Any | None,
    extra: Mapping[str, Any],
) -> tuple[Any, dict[Any, Any]]:
    """Update each group: the updates of all of them, and their states by label.

    Extra arguments shaped like the updates are narrowed to the group; callbacks get the
    other leaves, and other layers, merged in.

    Args:
        groups: what runs on which leaves.
        whole: the caller's tree, which knows the regions that are in groups.
        updates: those of the flat dict around the groups, as are all that follow.
        state: of each group, by label.
        params: the params, if they are known.
        extra: extra arguments.

    Raises:
        TransformError: a transformation does not return updates, or updates do not have
            the shapes of params that are divided into layers.
    """
    # In ``optax.partition`` (0.2.8) each group has a node for each leaf of the others,
    # and cannot hold a line search, which meets these (optax#1649).
    shaped = shaped_extra(extra, updates, params)

    def run(label: Any, tx: Any, group: Group) -> tuple[Any, Any]:
        paths = [region.path for region in group.values()]
        if params is not None:
            cut = [region.path for region in group.values() if region.along]
            require_layers(updates, fast_params(params), cut)
        shown = None if params is None else _take(params, group)
        narrowed = {**extra, **{name: _take(v, group) for name, v in shaped.items()}}
        if params is not None:

            def merged(full: FlatDict, part: FlatDict) -> FlatDict:
                return {**full, **_put_back(part, group, full.get)}

            def narrow(gradient: Any) -> FlatDict:
                view = view_tree(gradient)
                return _take(pick_arrays(view, paths, OF_GRADIENT), group)

            back = functools.partial(merged, fast_params(params))
            backs = {n: functools.partial(merged, v) for n, v in shaped.items()}
            narrowed |= callbacks_on_flat(extra, back, backs, narrow)
        part = _take(updates, group)
        new, after = tx.update(part, state[label], shown, **narrowed)
        if not isinstance(new, dict | optax.LookaheadParams):
            raise TransformError(
                "A transformation of some leaves gives no updates for "
                f"{listing(group)}, but one {type(new).__name__}. Measure outside of "
                "partition, freeze and per_layer."
            )
        return new, after

    if gone := state.keys() - groups.keys():
        raise KeyError(*gone)  # nothing would return their state
    with in_force(whole):
        ran = {label: run(label, *group) for label, group in groups.items()}
    new = _joined_updates([new for new, _ in ran.values()])
    return new, {label: state for label, (_, state) in ran.items()}


def _with_zeros(new: Any, group: Group, updates: FlatDict, params: Any | None) -> Any:
    """Return ``new`` in whole arrays, nothing changed in what is not in the group.

    What does not change has the shape of the param, although gradients may be those of
    each example, unless other updates have theirs.
    """
    leaves = {} if params is None else fast_params(params)

    def of_half(half: FlatDict) -> FlatDict:
        is_each = is_of_examples(half, leaves)

        def zero(path: str) -> Any:
            update, param = updates[path], leaves.get(path)
            if update is None:
                return None
            if not is_array(update):  # a number may be the gradient of any array
                update = jnp.asarray(update)
            is_like = param is None or is_each or update.shape == param.shape
            return no_change(update if is_like else param)

        moved = _put_back(half, group, zero)
        return {**moved, **{path: zero(path) for path in updates if path not in moved}}

    return by_half(of_half, new)


def _joined_updates(parts: Sequence[Any]) -> Any:
    """Join the updates of the groups."""
    if any(isinstance(part, optax.LookaheadParams) for part in parts):
        slow = [getattr(part, "slow", part) for part in parts]
        fast = list(map(fast_params, parts))
        return optax.LookaheadParams(_joined_updates(fast), _joined_updates(slow))
    return {path: update for part in parts for path, update in part.items()}


def _read_rules(transforms: Mapping[Hashable, Any], rules: Any) -> Rules | BoundRules:
    try:
        table = rules.rules if isinstance(rules, BoundRules) else as_rules(rules)
    except RulesError as error:
        if isinstance(rules, Mapping):
            raise
        raise _no_rules(rules) from error
    labels = [x for x in (*table.values, table.default) if x is not MISSING]
    for name, label in zip((*table.names[:-1], "default="), labels, strict=False):
        if callable(label) or is_transformation(label):
            raise TransformError(
                f"An optimizer is in the place of a label ({name}). Give it a name: "
                'partition({"slow": optax.adam(1e-4)}, {"encoder": "slow"}).'
            )
    turned, known = table.turned, {*transforms, FROZEN}
    if turned and known.issuperset(turned.values()) and known.isdisjoint(turned):
        raise TransformError(turned_text(turned))
    if not all(isinstance(label, Hashable) for label in labels):
        raise _no_rules(rules)
    table.require_labels()
    idle = [str(label) for label in transforms if label not in labels]
    if idle:
        stray = [str(label) for label in labels if label not in known]
        near = Speller().best(idle[0], stray)
        cure = f"Did you mean {near!r}?" if near else "Add a rule, or leave it out."
        raise TransformError(
            f"No rule leads to the transformation {listing(idle)}; the rules give "
            f"{listing(map(repr, dict.fromkeys(labels)), write=str)}. {cure}"
        )
    return rules if isinstance(rules, BoundRules) else table


def _no_rules(rules: Any) -> TransformError:
    return TransformError(
        f"No rules can be read from {describe_argument(rules)}. Rules give plain "
        'names, as {"encoder": "frozen", "**": "train"}; treeadapt.load_rules(path) '
        "reads a file, and treeadapt.lift(labels) wraps a tree of labels."
    )


def _check_labels(transforms: Mapping[Any, Any]) -> None:
    if not isinstance(transforms, Mapping):
        raise TransformError(
            "partition takes (transforms, rules), first {label: transformation}; got "
            f"{describe(transforms)}. For one transformation use treeadapt.adapt."
        )
    if reserved := [label for label in (FROZEN, STATIC) if label in transforms]:
        raise TransformError(
            f"The label {reserved[0]!r} is reserved: such leaves do not move, have no "
            "state and need no transformation. Leave it out, or choose another label."
        )
    for label, tx in transforms.items():
        if not is_transformation(tx):
            cure = " First comes {label: transformation}, and then the rules."
            if tx is None:
                cure = ' For leaves that do not move, write "frozen" in the rules.'
            elif is_number(tx):
                cure = f" With a rate alone, name the optimizer: optax.adam({tx})."
            elif callable(tx):  # and the text says to call it
                cure = ""
            raise TransformError(
                f"The transformation of {label!r} is {unlike_transformation(tx)}.{cure}"
            )
    # Optax 0.2.8 accepts all of these, and fails later or does nothing.
    kinds = sorted({type(label).__name__ for label in transforms})
    with contextlib.suppress(TypeError):
        sorted(transforms)
        if len(kinds) < 2:
            return
    raise TransformError(
        "Labels that name groups must be of one type that can be sorted, because JAX "
        f"sorts them; got {', '.join(kinds)}. Strings will do."
    )


def _no_transformation(
    stray: Mapping[Hashable, Group], labels: Iterable[Hashable]
) -> TransformError:
    lines, names = [], [*map(str, labels)]
    for label, group in [*stray.items()][:8]:
        near = Speller().best(str(label), [*names, FROZEN])
        hint = f", did you mean {near!r}?" if near else ""
        lines.append(f"{label!r} ({listing(group, limit=4)}{hint})")
    return TransformError(
        f"No transformation for the label {'; '.join(lines)}. There "
        f"{f'are {listing(names)} and' if names else 'is only'} "
        '"frozen", which needs none. Correct the label in the '
        "rules, or add its optimizer: partition({..., "
        f"{next(iter(stray))!r}: optax.adam(1e-3)}}, rules).",
        paths=[path for group in stray.values() for path in group],
    )
