"""``per_layer``: a transformation on each layer of a stack by itself.

An array of a stack holds all layers, so what looks at a whole array sees all of them at
once: Muon hands it to Adam, LAMB takes one norm for 48 layers. Here ``jax.vmap`` runs
``init`` and ``update`` over the axis of the layers. Every leaf of the state has an axis
of layers, a count too.
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
import numpy as np
import optax

from treeadapt.errors import TransformError
from treeadapt.layers.region import Along, Region
from treeadapt.layers.stacks import Stacks, one_layer
from treeadapt.selection.whole_tree import WholeTree
from treeadapt.transforms.adapt import run_flat, with_extra_args
from treeadapt.transforms.flat import CALLBACKS, FlatDict, require_layers, shaped_extra
from treeadapt.transforms.partition import Groups, init_groups, update_groups
from treeadapt.transforms.state_map import fast_params, owners
from treeadapt.transforms.vmap_placement import (
    AxesByPath,
    axes_in_leaf,
    flat_key,
    in_place,
)
from treeadapt.trees import _jax
from treeadapt.trees.arrays import is_array
from treeadapt.trees.views import view_tree

#: What cannot run on each layer by itself, by the class of its state (Optax 0.2.8).
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
        ``blocks/{4..11}``. In it every leaf has an axis of layers: that of its
        param, if it belongs to one, else the first. So a step count or a
        hyperparameter is there once a layer; ``tree_set`` fills it with one number.
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
        ((12, 8, 8), (12,))
    """
    inner = with_extra_args(tx, "per_layer takes (tx, stacks)")
    stacks = Stacks(stacks)
    keys = [key for key, axis in stacks.data.items() if axis is not None]
    rest = "none" if "" in keys else ""

    def groups(whole: WholeTree, flat: FlatDict) -> tuple[Groups, WholeTree]:
        axes = stacks.axes(whole.view, is_part=not whole.strict)
        layers = list(map(one_layer, whole.view.leaves, axes))
        along = dict(zip(whole.view.plan.paths, axes, strict=True))
        parts: dict[str, dict[str, tuple[Along, ...]]] = {}
        for path in flat:
            key, some = _layers_of(whole, path, along[whole.stored_path(path)])
            parts.setdefault(rest if key is None else key, {})[path] = some
        groups = {
            key: (_mapped(inner, part), {path: Region(path) for path in part})
            for key, part in parts.items()
        }
        view = view_tree(whole.view.rebuild(layers))
        return groups, dataclasses.replace(whole, layers=view)

    def init(whole: WholeTree | None, params: Any) -> Any:
        if whole is None:  # Optax asks with its placeholder, which has no layers
            return {key: inner.init(params) for key in [rest, *keys]}
        states = init_groups(*groups(whole, fast_params(params)), params)
        _require_separable(states)
        return states

    def update(
        whole: WholeTree, updates: FlatDict, state: Any, params: Any, extra: FlatDict
    ) -> tuple[Any, Any]:
        given = [name for name in CALLBACKS if callable(extra.get(name))]
        calls = {name: _refusing(name, extra[name]) for name in given}
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

    @functools.wraps(fn)
    def refuse(*_: Any, **__: Any) -> Any:
        raise TransformError(
            f"A transformation inside per_layer calls {name}, which takes the whole "
            "params, on one layer of them. Put it around or next to per_layer(...)."
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
    tx: optax.GradientTransformationExtraArgs, part: AxesByPath
) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` on each layer of some leaves: one ``vmap`` for each stack.

    Args:
        tx: the transformation.
        part: the leaves, and the axes of their layers.
    """
    levels = len(next(iter(part.values())))
    for level in reversed(range(levels)):
        axes, size = {}, 0
        for path, along in part.items():
            _, axis, numbers = along[level]
            size = len(numbers)
            # The axes of the stacks around it are gone by then.
            axes[path] = axis - sum(outer.axis < axis for outer in along[:level])
        tx = _over(tx, axes, size)
    return in_place(tx, part) if levels else tx


def _over(
    tx: optax.GradientTransformationExtraArgs, axes: Mapping[str, int], size: int
) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` on each layer along one axis of each array of a flat dict.

    Every leaf of its state has an axis of layers: where the param has it, for a copy of
    a param; else the first.
    """

    def init(params: Any) -> Any:
        like = fast_params(params)
        state = _vmap(tx.init, (params,), _axes_of_params(params, like), size)
        return _moved(state, _axes_of_state(state, like))

    def update(
        updates: FlatDict, state: Any, params: Any | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        like = updates if params is None else fast_params(params)
        require_layers(updates, like, axes)
        shaped = shaped_extra(extra, updates, params)

        def on_layer(updates: Any, state: Any, params: Any, shaped: Any) -> Any:
            return tx.update(updates, state, params, **(extra | shaped))

        args = (updates, state, params, shaped)
        ins = [
            *_axes_of_params(updates, like),
            *_axes_of_state(state, like),
            *_axes_of_params((params, shaped), like),
        ]
        new, after = _vmap(on_layer, args, ins, size)
        # What is none of the updates is refused later.
        keyed = jtu.tree_leaves_with_path(new)
        new = _moved(new, [axes.get(flat_key(keys), 0) for keys, _ in keyed])
        return new, _moved(after, _axes_of_state(after, like))

    def _axes_of_params(trees: Any, like: FlatDict) -> list[int | None]:
        """Return the axis of each leaf of flat dicts; None if it has another shape."""
        keyed = [(flat_key(keys), x) for keys, x in jtu.tree_leaves_with_path(trees)]
        return [axes[p] if np.shape(x) == like[p].shape else None for p, x in keyed]

    def _axes_of_state(state: Any, like: FlatDict) -> list[int]:
        leaves = zip(owners(state, axes).values(), jax.tree.leaves(state), strict=True)
        return [
            0
            if path is None
            else axes_in_leaf([axes[path]], like[path].ndim, x.ndim)[0]
            for path, x in leaves
        ]

    return optax.GradientTransformationExtraArgs(init, update)


def _vmap(
    fn: Callable[..., Any], args: Any, axes: Sequence[int | None], size: int
) -> Any:
    """Call ``fn`` on each layer; leaves of the result hold layers along axis 0.

    Args:
        fn: function of one layer.
        args: its arguments, for all layers.
        axes: that of the layers in each leaf of ``args``; None where they share it.
        size: how many layers there are.
    """
    leaves, structure = _jax.flatten(args)

    def on_leaves(*leaves: Any) -> Any:
        return fn(*structure.unflatten(leaves))

    return jax.vmap(on_leaves, tuple(axes), axis_size=size)(*leaves)


def _moved(tree: Any, axes: Sequence[int]) -> Any:
    """Return a tree whose leaves hold their first axis along another one."""
    leaves, structure = _jax.flatten(tree)
    return structure.unflatten(map(jnp.moveaxis, leaves, [0] * len(leaves), axes))
