"""``per_layer``: a transformation on each layer of a stack by itself.

An array of a stack holds all layers, so what looks at a whole array sees all of them at
once: Muon hands it to Adam, LAMB takes one norm for 48 layers. Here ``jax.vmap`` runs
``init`` and ``update`` over the axis of the layers. State stays stacked; what depends
on no layer, such as a count, is kept once.
See ``layers.stacks`` for what a stack is, ``partition`` for groups of leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from treeadapt import _jax
from treeadapt.arrays import is_array
from treeadapt.errors import TransformError
from treeadapt.layers.region import Along, Region
from treeadapt.layers.stacks import Stacks, one_layer
from treeadapt.selection.whole import WholeTree
from treeadapt.state_map import fast_params, owners
from treeadapt.transforms.adapt import run_flat, with_extra_args
from treeadapt.transforms.flat import (
    CALLBACKS,
    FlatDict,
    require_layers,
)
from treeadapt.transforms.partition import Groups, init_groups, update_groups
from treeadapt.transforms.placing import (
    Part,
    axes_in_leaf,
    flat_key,
    in_place,
    shapes_of,
)
from treeadapt.trees.views import view_tree

#: The rank of one layer of each leaf of a state, by its keys; by what ``init`` saw.
_Ranks = dict[Any, dict[Any, int]]
_MOST_RANKS = 256

#: What cannot run on each layer by itself, by the class of its state.
_REFUSED = {
    "AddNoiseState": "optax.add_noise draws random numbers leaf by leaf",
    "ApplyIfFiniteState": "optax.apply_if_finite skips the step of all layers or none",
    "DifferentiallyPrivateAggregateState": "dpsgd draws random numbers leaf by leaf",
    "HutchinsonState": "sophia draws random numbers leaf by leaf",
    "ScaleByBacktrackingLinesearchState": "a line search takes one step for all layers",
    "ScaleByZoomLinesearchState": "a line search takes one step for all layers",
}


def per_layer(tx: Any, stacks: Any) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that runs ``tx`` on each layer of a stack by itself.

    For models that hold their layers along an axis of each array, as those that run
    them in a scan do. Muon, LAMB, LARS, Adafactor, NovaGrad, SM3 and whatever else
    looks at a whole array then does what it does on the same model unrolled; see the
    compatibility page for a table of all of Optax. Shapes that a mask function or a
    selector in ``tx`` sees are those of one layer, so ``leaf(ndim=2)`` is a matrix.

    A norm over all leaves is a norm over one layer here: leave ``clip_by_global_norm``,
    and whatever adapts one number to the whole model (Prodigy, DoG, Polyak steps),
    outside: ``optax.chain(optax.clip_by_global_norm(1.0), per_layer(tx, stacks))``.

    Args:
        tx: any Optax transformation, but those that draw random numbers, search along
            a line, or skip whole steps.
        stacks: ``{key: axis}``, as for ``Rules``: ``{"blocks": 0}``. Any axis, nested
            stacks, exceptions; or the ``stacks`` of rules. Arrays that are below no key
            are trained too, each as one array, as in the unrolled model: an embedding
            or a head. So is a kernel of attention that has an axis of heads and no key.
            ``partition`` leaves arrays to another transformation.

    Returns:
        ``GradientTransformationExtraArgs`` for any tree; use it outermost, in a group
        of ``partition`` (where it runs on the layers of the group), or inside ``adapt``
        and ``optax.chain``. Its state is a dict with the state of ``tx`` on the leaves
        of each stack, by key, and on those of no stack, under ``""`` (``"none"``, if
        the whole tree is one); for some layers of a stack the key says which:
        ``blocks/{4..11}``. In it, arrays hold layers
        where the params do, other statistics hold them along axis 0, and what is the
        same for all layers at the start and after an update is there once. (Where an
        update needs extra arguments other than ``value``, counts are stacked too.)
        Extra arguments shaped like the params are divided into layers; all layers
        share the others. State and updates are sharded as the params, statistics along
        the axis of the layers; meshes may have Auto or Explicit axes.

    Raises:
        StackError: ``stacks`` is malformed; or (by ``init``) an array lacks the axis,
            arrays of a stack disagree in their number of layers, a key matches nothing,
            or rules in ``tx`` would treat layers of one array differently.
        TransformError: ``tx`` is not a transformation, or (by ``init``) cannot run on
            each layer; or (by ``update``) asks for a value or gradient of the model.

    Example:
        >>> params = {"blocks": {"kernel": jnp.ones((12, 8, 8))}, "head": jnp.ones(8)}
        >>> tx = per_layer(optax.contrib.muon(1e-3), {"blocks": 0})
        >>> state = tx.init(params)
        >>> muon = state["blocks"].inner_states["muon"].inner_state[0]
        >>> muon.mu["blocks/kernel"].shape, muon.count.shape
        ((12, 8, 8), ())
    """
    inner = with_extra_args(tx, "per_layer takes (tx, stacks)")
    stacks = Stacks(stacks)
    keys = [key for key, axis in stacks.data.items() if axis is not None]
    rest = "none" if "" in keys else ""
    ranks: _Ranks = {}

    def groups(whole: WholeTree, flat: FlatDict) -> tuple[Groups, WholeTree]:
        axes = stacks.axes(whole.view, is_part=not whole.strict)
        layers = list(map(one_layer, whole.view.leaves, axes))
        along = dict(zip(whole.view.plan.paths, axes, strict=True))
        parts: dict[str, dict[str, tuple[Along, ...]]] = {}
        for path in flat:
            key, some = _layers_of(whole, path, along[whole.stored_path(path)])
            parts.setdefault(rest if key is None else key, {})[path] = some
        groups = {
            key: (_mapped(inner, part, ranks), dict.fromkeys(part))
            for key, part in parts.items()
        }
        view = view_tree(whole.view.rebuild(layers))
        return groups, dataclasses.replace(whole, layers=view)

    def init(whole: WholeTree | None, params: Any) -> Any:
        if whole is None:
            return {key: inner.init(params) for key in [rest, *keys]}
        states = init_groups(*groups(whole, fast_params(params)), params)
        _require_separable(states)
        return states

    def update(
        whole: WholeTree, updates: FlatDict, state: Any, params: Any, extra: FlatDict
    ) -> tuple[Any, Any]:
        calls = {n: _refusing(n, extra[n]) for n in CALLBACKS if n in extra}
        divided = groups(whole, updates if params is None else fast_params(params))
        return update_groups(*divided, updates, state, params, extra | calls)

    return run_flat(inner, init, update)


def _layers_of(
    whole: WholeTree, path: str, along: tuple[Along, ...]
) -> tuple[str | None, tuple[Along, ...]]:
    """Return the key of the part that has an array, and the layers that are there.

    Args:
        whole: the caller's tree.
        path: of the array, or the key of some layers of one.
        along: the layers of the array in that tree.
    """
    if not along or path not in whole.regions:
        return along[-1].stack if along else None, along
    some = Region(path, along).of_numbers(whole.regions[path].numbers)
    # Arrays may hold layers of one stack along different axes.
    of_stack = Region(along[-1].stack, some.along).on(dict.fromkeys(some.numbers, 0))
    return of_stack.key, some.inside(path).along


def _refusing(name: str, fn: Any) -> Any:
    """Return a callback that raises when it is called on one layer."""
    if not callable(fn):
        return fn

    @functools.wraps(fn)
    def refuse(*_: Any, **__: Any) -> Any:
        raise TransformError(
            f"A transformation inside per_layer calls {name}, which takes the whole "
            "params, on one layer of them. Put it around per_layer(...), or next to it "
            "in optax.chain."
        )

    return refuse


def _require_separable(states: Any) -> None:
    """Refuse what cannot run on each layer by itself, as its state shows."""

    def check(node: Any) -> bool:
        name = type(node).__name__
        why = _REFUSED.get(name)
        if name == "MultiStepsState" and jax.tree.leaves(node.skip_state):
            why = "optax.MultiSteps with should_skip_update_fn skips all layers or none"
        if is_array(node) and jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
            why = "it draws random numbers, the same for every layer"
        if why is not None:
            raise TransformError(
                f"per_layer cannot run this transformation on each layer: {why}. Put "
                "it around per_layer(...), or next to it in optax.chain."
            )
        return False

    jax.tree.leaves(states, is_leaf=check)


def _mapped(
    tx: optax.GradientTransformationExtraArgs, part: Part, ranks: _Ranks
) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` on each layer of some leaves: one ``vmap`` for each stack.

    Args:
        tx: the transformation.
        part: the leaves, and the axes of their layers.
        ranks: what its ``init`` showed; is added to.
    """
    levels = len(next(iter(part.values())))
    for level in reversed(range(levels)):
        axes, size = {}, 0
        for path, along in part.items():
            _, axis, numbers = along[level]
            size = len(numbers)
            # The axes of the stacks around it are gone by then.
            axes[path] = axis - sum(outer.axis < axis for outer in along[:level])
        tx = _over(tx, axes, size, ranks)
    return in_place(tx, part) if levels else tx


def _over(
    tx: optax.GradientTransformationExtraArgs,
    axes: Mapping[str, int],
    size: int,
    ranks: _Ranks,
) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` on each layer along one axis of each array of a flat dict."""

    def kind(like: FlatDict, state: Any) -> Any:
        shapes = [(path, leaf.shape, leaf.dtype) for path, leaf in like.items()]
        return (*axes.items(), *shapes, _jax.flatten(state)[1])

    def init(params: Any) -> Any:
        like = fast_params(params)
        ins = _ins(params, like, axes)
        differ = _that_differ(tx, shapes_of(params), ins, axes, size)
        of_layer: dict[Any, int] = {}

        def places(layer: Any) -> list[int | None]:
            keyed = jtu.tree_leaves_with_path(layer)
            of_layer.update((keys, leaf.ndim) for keys, leaf in keyed)
            every = _places(layer, like, axes)
            return [axis if keys in differ else None for keys, axis in every.items()]

        state = _vmap(tx.init, (params,), ins, places, size)
        if len(ranks) >= _MOST_RANKS:
            ranks.clear()
        ranks[kind(like, state)] = of_layer
        return state

    def update(
        updates: FlatDict, state: Any, params: Any | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        like = updates if params is None else fast_params(params)
        require_layers(updates, like, axes)
        of_layer = ranks.get(kind(like, state))
        if of_layer is None:  # the state is not from here
            first = jax.eval_shape(tx.init, _layers(like, _ins(like, like, axes)))
            of_layer = {keys: x.ndim for keys, x in jtu.tree_leaves_with_path(first)}
        keyed = jtu.tree_leaves_with_path(state)
        shared = {keys for keys, leaf in keyed if leaf.ndim == of_layer.get(keys)}
        state_axes: dict[Any, int | None] = {
            **_places(state, like, axes, is_layer=False),
            **dict.fromkeys(shared),
        }
        shaped = {n: value for n, value in extra.items() if _is_flat(value, updates)}

        def on_layer(updates: Any, state: Any, params: Any, shaped: Any) -> Any:
            return tx.update(updates, state, params, **(extra | shaped))

        def places(layer: Any) -> list[int | None]:
            new_updates, new_state = layer
            every = _places(new_state, like, axes)
            return [
                *_flat_axes(new_updates, axes),
                *(None if keys in shared else axis for keys, axis in every.items()),
            ]

        ins = [*_ins(updates, like, axes), *state_axes.values()]
        ins += [*_ins(params, like, axes), *_ins(shaped, like, axes)]
        return _vmap(on_layer, (updates, state, params, shaped), ins, places, size)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_flat(value: Any, updates: FlatDict) -> bool:
    """Return whether an extra argument has an array for each update."""
    is_flat = type(value) is dict and value.keys() == updates.keys()
    return is_flat and all(map(is_array, value.values()))


def _that_differ(
    tx: Any, params: Any, ins: Sequence[int | None], axes: Mapping[str, int], size: int
) -> set[Any]:
    """Return where in a state values depend on the layer, at the start or later.

    Statistics of a param do; of others tracing tells. Everything does, if an update
    cannot be traced with ``value`` alone.
    """
    first = jax.eval_shape(tx.init, _layers(params, ins))
    places = [keys for keys, _ in jtu.tree_leaves_with_path(first)]
    leaves, structure = _jax.flatten(first)
    differing = _batched(tx.init, (params,), ins, size)
    differing |= {
        keys for keys, path in owners(first, axes).items() if path is not None
    }

    def step(params: Any, state: Any) -> Any:
        return tx.update(fast_params(params), state, params, value=jnp.float32(1))[1]

    def stacked(leaf: Any, axis: int | None) -> Any:
        shape = leaf.shape if axis is None else (size, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    while True:
        state_axes = [0 if keys in differing else None for keys in places]
        state = structure.unflatten(map(stacked, leaves, state_axes))
        try:
            later = _batched(step, (params, state), [*ins, *state_axes], size)
        except (KeyError, TypeError, ValueError):
            return set(places)
        if later <= differing:
            return differing
        differing |= later


def _batched(
    fn: Callable[..., Any], args: Any, ins: Sequence[int | None], size: int
) -> set[Any]:
    """Return where in the result of ``fn`` values depend on the layer."""
    leaves, structure = _jax.flatten(args)
    places: list[Any] = []
    flags: list[bool] = []
    note = jax.custom_batching.custom_vmap(lambda *leaves: leaves)

    @note.def_vmap
    def _(size: int, batched: Any, *leaves: Any) -> Any:
        del size
        flags.extend(batched)
        return leaves, tuple(batched)

    def on_layer(*leaves: Any) -> Any:
        result = jtu.tree_leaves_with_path(fn(*structure.unflatten(leaves)))
        places.extend(keys for keys, _ in result)
        return note(*(leaf for _, leaf in result))

    jax.eval_shape(jax.vmap(on_layer, tuple(ins), axis_size=size), *leaves)
    return {keys for keys, yes in zip(places, flags, strict=False) if yes}


def _vmap(
    fn: Callable[..., Any],
    args: Any,
    ins: Sequence[int | None],
    places: Callable[[Any], list[int | None]],
    size: int,
) -> Any:
    """Call ``fn`` on each layer.

    Args:
        fn: function of one layer.
        args: its arguments, for all layers.
        ins: the axis of the layers in each leaf of ``args``; None where they share it.
        places: gives the same for the leaves of the result, from those of one layer.
        size: how many layers there are.
    """
    leaves, structure = _jax.flatten(args)
    layer = jax.eval_shape(fn, *_layers(args, ins))
    outs = places(layer)

    def on_leaves(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(fn(*structure.unflatten(leaves)))

    new = jax.vmap(on_leaves, tuple(ins), outs, axis_size=size)(*leaves)
    return _jax.flatten(layer)[1].unflatten(new)


def _layers(tree: Any, ins: Sequence[int | None]) -> Any:
    """Return the shapes of one layer."""
    leaves, structure = _jax.flatten(tree)
    axes = [() if axis is None else (Along("", axis, ()),) for axis in ins]
    return structure.unflatten(map(one_layer, leaves, axes))


def _ins(tree: Any, like: FlatDict, axes: Mapping[str, int]) -> list[int | None]:
    """Return the axis of the layers in each leaf that is shaped like its param.

    Args:
        tree: flat dicts, in any containers.
        like: the params.
        axes: of the layers in these.
    """
    keyed = [(flat_key(keys), leaf) for keys, leaf in jtu.tree_leaves_with_path(tree)]
    return [axes[p] if leaf.shape == like[p].shape else None for p, leaf in keyed]


def _flat_axes(tree: Any, axes: Mapping[str, int]) -> list[int]:
    """Return the axis of the layers in each leaf of flat dicts, in any containers."""
    keyed = jtu.tree_leaves_with_path(tree)  # what is none is refused later
    return [axes.get(flat_key(keys), 0) for keys, _ in keyed]


def _places(
    state: Any, like: FlatDict, axes: Mapping[str, int], *, is_layer: bool = True
) -> dict[Any, int]:
    """Return the axis of the layers in each leaf of a state, by its keys.

    Args:
        state: of one layer, or of all.
        like: the params.
        axes: of the layers in these.
        is_layer: whether it is that of one layer.
    """
    leaves = zip(owners(state, axes).items(), jax.tree.leaves(state), strict=True)
    return {
        keys: 0
        if path is None
        else axes_in_leaf([axes[path]], like[path].ndim, leaf.ndim + is_layer)[0]
        for (keys, path), leaf in leaves
    }
