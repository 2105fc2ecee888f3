"""The flat view of a tree that trains, and the way back for updates.

``trained`` shows a tree as ``{label path: array}`` of its inexact arrays that train,
one level deep, whatever its containers: what an Optax transformation is run on.
``put_updates`` puts a flat result into the structure of the updates that came in, and
``callbacks_on_flat`` lets the caller's functions of params take flat ones.
``LookaheadParams`` is shown half by half.
Runs no transformation (see ``adapt``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax

from treeadapt.errors import NoArraysError, TransformError, TreeAdaptError
from treeadapt.selection.whole_tree import no_whole_tree
from treeadapt.text.names import listing, plural
from treeadapt.transforms.state_map import fast_params
from treeadapt.trees.adapters.registry import current_registry
from treeadapt.trees.arrays import (
    is_array,
    is_float0,
    is_inexact,
    is_number,
    least_value,
)
from treeadapt.trees.describing import describe
from treeadapt.trees.flatten import flatten
from treeadapt.trees.views import TreeView, same_structure, view_nested, view_tree

FlatDict = dict[str, Any]
Back = Callable[[FlatDict], Any]

#: Extra arguments that are functions of the params. Optax 0.2.8 calls them with params
#: of the structure that the transformation has, which is not the caller's (optax#1304).
CALLBACKS = ("value_fn", "grad_fn", "obj_fn")
#: The one of them that returns gradients.
GRADIENT = "grad_fn"
#: What the result of that one is called in messages.
OF_GRADIENT = "what grad_fn returned"


def view_params(tree: Any) -> TreeView:
    """Take a tree apart that JAX itself can take apart.

    Raises:
        TransformError: JAX sees an object that holds arrays as one leaf.
        PathCollisionError: two leaves have the same path.
    """
    view = view_tree(tree)
    if isinstance(view.structure, jtu.PyTreeDef):
        return view
    registry = current_registry()
    for index, leaf in enumerate(flatten(tree)[0]):
        if registry.find(leaf).opens and any(map(is_array, view_nested(leaf).leaves)):
            keys, _ = jtu.tree_leaves_with_path(tree)[index]
            where = f"at {jtu.keystr(keys)}" if keys else "at the root"
            raise TransformError(
                f"JAX sees the {type(leaf).__name__} {where} as one leaf, so it can "
                "neither differentiate, compile nor train what is in it. Register the "
                "class with JAX (a dataclass with jax.tree_util.register_dataclass), "
                "or train the plain dict that treeadapt.split gives."
            )
    return view


def require_no_refs(view: TreeView) -> None:
    """Raise for a leaf that changes in place, where an array is kept or read.

    Raises:
        TransformError: it names the leaf.
    """
    refs = [path for path, leaf in view.items() if isinstance(leaf, jax.Ref)]
    if refs:
        text = f"{listing(refs)} {'is a Ref' if len(refs) == 1 else 'are Refs'}"
        change = "changes" if len(refs) == 1 else "change"
        raise TransformError(f"{text}, which {change} in place. Pass arrays, ref[...].")


def trained(view: TreeView) -> FlatDict:
    """Return the inexact arrays of a tree that an optimizer should see, by path."""
    paths, untrained = view.plan.paths, view.plan.untrained
    return {
        paths[index]: leaf
        for index, leaf in enumerate(view.leaves)
        if is_inexact(leaf) and index not in untrained
    }


def require_trained(view: TreeView) -> FlatDict:
    """Return ``trained(view)``; raise if it is empty.

    Raises:
        NoArraysError: nothing would train.
    """
    flat = trained(view)
    if not flat:
        contents = (
            f"{plural(len(view.leaves), 'leaf')}: {listing(view.plan.paths)}."
            if view.leaves
            else "no leaf at all; if a filter chose its leaves (wrt=), it matched none."
        )
        raise NoArraysError(
            f"The tree ({type(view.tree).__name__}) has no floating-point or complex "
            f"array that trains, so nothing would train. It has {contents}"
        )
    return flat


def by_half(fn: Callable[[Any], Any], flat: Any) -> Any:
    """Return ``fn(flat)``, half by half for lookahead."""
    if isinstance(flat, optax.LookaheadParams):
        return optax.LookaheadParams(*map(fn, flat))
    return fn(flat)


def pick_arrays(view: TreeView, paths: Sequence[str], whose: str) -> FlatDict:
    """Return the inexact arrays of a tree at ``paths``.

    Args:
        view: the tree.
        paths: where it should have arrays.
        whose: what the tree is, for the message.

    Raises:
        TransformError: it has no such array at some path.
    """
    flat = view.flat()
    wrong = [path for path in paths if not is_inexact(flat.get(path))]
    if wrong:
        raise TransformError(
            f"There is no floating-point array at {listing(wrong)} of {whose}, where "
            "the updates have one. The updates must be gradients of the params.",
            paths=wrong,
        )
    return {path: flat[path] for path in paths}


def require_layers(updates: Any, params: FlatDict, paths: Iterable[str]) -> None:
    """Raise unless updates hold layers where the params do: both have one shape."""
    for path in paths:
        update, param = fast_params(updates)[path], params[path]
        if is_array(update) and update.shape != param.shape:
            raise TransformError(
                f"The update of {path!r} is {describe(update)}, and the param is "
                f"{describe(param)}: which entries belong to which layer is not known. "
                "Make the updates gradients of the params first.",
                paths=[path],
            )


def put_updates(view: TreeView, flat: Any, params: TreeView | None) -> Any:
    """Return updates in the structure of the updates that came in.

    Args:
        view: the updates that came in.
        flat: ``{path: update}``, or ``LookaheadParams`` of two such.
        params: the params, whose dtypes the zeros take; None if they are not known.

    Returns:
        Tree with the treedef of ``view``: arrays that did not train become zeros of
        the dtype of their param, numbers become zeros of their type, other static
        leaves stay. What is not a flat dict is returned unchanged.
    """
    leaves = {} if params is None else params.flat()

    def put(flat: Any) -> Any:
        if type(flat) is not dict:
            return flat  # a measurement, as inside optax.monitor
        is_each = is_of_examples(flat, leaves)
        rest = [(path, leaf) for path, leaf in view.items() if path not in flat]
        still = {p: _still(x, leaves.get(p), is_each=is_each) for p, x in rest}
        return view.replace(still | flat)

    return by_half(put, flat)


def is_of_examples(updates: FlatDict, params: Mapping[str, Any]) -> bool:
    """Return whether some update has another shape than its param.

    Gradients of each example have; what does not move is then zero for each.
    """
    for path, x in updates.items():
        param: Any = params.get(path)
        # A number serves as the gradient of any array.
        if is_array(x) and is_array(param) and x.shape not in ((), param.shape):
            return True
    return False


def _still(update: Any, param: Any, *, is_each: bool) -> Any:
    """Return the update of a leaf that does not train.

    Args:
        update: the one that came in.
        param: the leaf; None if it is not known.
        is_each: the other updates are for each example, so this one is, too.
    """
    if is_number(update):
        return type(update)(0)
    if not is_array(update):
        return update
    like = param if is_array(param) else update
    # Optax 0.2.8 fails on float0, the gradient that JAX gives for integers.
    if is_float0(like) or jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return update  # this kind has no zero
    if like.shape == update.shape or not is_each:
        return no_change(like)
    return jnp.zeros_like(like, shape=update.shape)


def no_change(like: Any) -> jax.Array:
    """Return the update that ``optax.apply_updates`` adds without changing a bit.

    It is -0.0, in both parts of a complex number: ``x + -0.0`` is ``x`` for every
    ``x``, but ``-0.0 + 0.0`` is ``0.0``. Of a dtype without a zero (the scales of
    quantized weights) it is the least value, which changes none but itself.

    Args:
        like: array, whose shape, dtype and sharding it has.
    """
    # ``optax.apply_updates`` (0.2.8) adds whatever it gets, zeros too.
    value: complex = 0
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        value = complex(-0.0, -0.0)
    elif is_inexact(like):
        least = least_value(like.dtype)
        value = -0.0 if least is None else least
    update = jnp.full_like(like, value)
    if isinstance(like, jax.core.Tracer):
        sharding = jax.typeof(like).sharding
        # JAX 0.12 forgets Explicit axes here where no mesh is in force.
        if any(sharding.spec) and jax.typeof(update).sharding != sharding:
            return jax.sharding.reshard(update, sharding)
    return update


def flat_extra(
    extra: Mapping[str, Any],
    keys: Sequence[str],
    grads: TreeView,
    whole: TreeView | None,
) -> dict[str, Any]:
    """Convert the extra arguments of an update to the flat view.

    Args:
        extra: keyword arguments as the caller gave them.
        keys: paths of the flat updates.
        grads: the updates, whose shape an argument may have.
        whole: the params, whose shape it may have as well; callbacks get flat params
            merged into them.

    Returns:
        The arguments; those shaped like the updates or the params are flat dicts, and
        ``value_fn``, ``grad_fn`` and ``obj_fn`` take flat params. ``value`` and
        everything else is left alone.
    """
    shapes = [grads] if whole is None else [grads, whole]
    views = {
        name: view
        for name, value in extra.items()
        if (view := _params_shaped(name, value, keys, shapes)) is not None
    }
    flats = {name: view.flat() for name, view in views.items()}
    shown = {name: {p: flat.get(p) for p in keys} for name, flat in flats.items()}
    flat_args = {**extra, **shown}
    if whole is None:
        return flat_args
    backs = {name: view.replace for name, view in views.items()}

    def narrow(gradient: Any) -> FlatDict:
        return pick_arrays(view_tree(gradient), keys, OF_GRADIENT)

    return flat_args | callbacks_on_flat(extra, whole.replace, backs, narrow)


def _params_shaped(
    name: str, value: Any, keys: Sequence[str], shapes: Sequence[TreeView]
) -> TreeView | None:
    """View an extra argument, if it has the shape of the params."""
    # Every scalar has the structure of params that are one bare array. ``grad`` must
    # have that of the updates: line searches multiply the two (Optax 0.2.8).
    if not keys or (list(keys) == [""] and name != "grad"):
        return None
    trees = [view.flat() for view in shapes]
    # JAX 0.10 counts a variable with two paths twice.
    sizes = {len(keys), *(len(flatten(view.tree)[0]) for view in shapes)}
    try:
        if len(flatten(value)[0]) not in sizes:
            return None
        view = view_tree(value)
    except TreeAdaptError:
        return None  # an object that this library cannot read as a tree
    flat = view.flat()
    if flat.keys() != set(keys) and all(flat.keys() != tree.keys() for tree in trees):
        return None
    same = any(same_structure(view.structure, one.structure) for one in shapes)
    return view if is_like(name, flat, trees, same=same) else None


def is_like(
    name: str, flat: FlatDict, trees: Sequence[Mapping[str, Any]], *, same: bool
) -> bool:
    """Return whether an extra argument with the paths of the params is like them.

    One with the same places by chance is not, such as a pair of numbers next to
    a list of two arrays: where nothing has a name, shapes must agree.

    Args:
        name: of the argument; ``value`` never is and ``grad`` always is.
        flat: the argument.
        trees: updates and params.
        same: whether it has the structure of one of them.
    """
    if name in ("value", "grad"):
        return name == "grad"
    if same and not all(path.replace("/", "").isdigit() for path in flat):
        return True
    shapes = {path: leaf.shape for path, leaf in flat.items() if is_array(leaf)}
    return bool(shapes) and all(
        any(getattr(tree.get(path), "shape", None) == shape for tree in trees)
        for path, shape in shapes.items()
    )


def shaped_extra(
    extra: Mapping[str, Any], updates: FlatDict, params: Any | None
) -> dict[str, FlatDict]:
    """Return the extra arguments of flat dicts that are shaped like the updates."""
    trees = [updates] if params is None else [updates, fast_params(params)]
    return {
        name: value
        for name, value in extra.items()
        if type(value) is dict
        and value.keys() == updates.keys()
        and is_like(name, value, trees, same=True)
    }


def callbacks_on_flat(
    extra: Mapping[str, Any],
    back: Back,
    backs: Mapping[str, Back],
    narrow: Callable[[Any], FlatDict],
) -> dict[str, Any]:
    """Return the callbacks among extra arguments as functions of flat params.

    Args:
        extra: keyword arguments, callbacks of which take the caller's params.
        back: puts flat params into the structure that the callbacks take.
        backs: puts back, by name, extra arguments that have been made flat; a line
            search hands them on to ``value_fn``.
        narrow: gives a gradient in the caller's structure as a flat dict.
    """

    def of_flat(name: str) -> Callable[..., Any]:
        fn = extra[name]

        @functools.wraps(fn)
        def call(flat: FlatDict, /, *args: Any, **kwargs: Any) -> Any:
            values = {
                name: backs[name](value) if name in backs else value
                for name, value in kwargs.items()
            }
            with no_whole_tree():
                result = fn(back(flat), *args, **values)
            return narrow(result) if name == GRADIENT else result

        return call

    return {name: of_flat(name) for name in CALLBACKS if callable(extra.get(name))}
