"""Fields of an optimizer's state, by name: a parameter's name is never taken for one.

Takes the state of any Optax transformation, wherever its pieces are (chains, groups of
a partition, wrappers), and gets or sets fields: those of its named tuples, and the
entries of ``hyperparams``. What a field such as ``mu`` holds is not searched, so a
parameter called ``count``, ``value`` or ``mu`` is neither found nor overwritten. States
differ from params by their classes: Optax's own (see ``transforms/optax_fields``),
those that hold one of these, and those that the caller names. See ``trees/state_dict``
for stable names of every array of a state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from treeadapt.errors import StructureMismatchError, TransformError
from treeadapt.text.names import Speller, listing, plural, shorten
from treeadapt.transforms.nnx_state import plain_state
from treeadapt.transforms.optax_fields import (
    GROUPS,
    LABELLED_FIELDS,
    NAMED_FIELDS,
    SCHEDULES,
    STATE_FIELDS,
    is_state_class,
)
from treeadapt.transforms.state_map import holds
from treeadapt.trees.arrays import is_array
from treeadapt.trees.casting import converted, is_lost, kind_of
from treeadapt.trees.describing import describe, describe_argument
from treeadapt.trees.views import view_tree

_MISSING: Any = object()


def tree_get(
    state: Any, key: Any, default: Any = _MISSING, *, group: Hashable = _MISSING
) -> Any:
    """Return the one field of an optimizer's state that has a name.

    As ``optax.tree_utils.tree_get``, but parameters are not searched.

    Args:
        state: state of any Optax transformation, or an object that holds one, such as
            Flax's ``TrainState`` or an ``nnx.Optimizer``.
        key: name of a field (``"count"``), a hyperparameter (``"learning_rate"``), a
            measurement, a link of ``named_chain`` or a state class
            (``"ScaleByAdamState"``). ``"ScaleByAdamState.count"`` is that class's
            field, ``"hyperparams.b1"`` the hyperparameter. A state class that is not
            of Optax and holds no state of it must be named so; it could be params.
        default: what to return if there is none.
        group: look only into the state of this group of a partition, of the outermost
            that has one.

    Returns:
        The state's own object; of an ``nnx.Optimizer`` the array in its variable.

    Raises:
        TransformError: no field has that name and there is no default; several have;
            what has it may be params; no partition has such a group; or ``state`` is
            another object, which may hold a state.

    Example:
        >>> state = optax.adam(1e-3).init({"count": jnp.ones(2)})
        >>> tree_get(state, "count")
        Array(0, dtype=int32)
    """
    parts = _search(plain_state(state), (key,), group)
    named = [part for part in parts if key in part.names]
    if len(named) > 1:
        places = listing([part.exact_path() for part in named], write=str)
        names = [name for part in named for name in part.names if "." in str(name)]
        example = f" ({names[0]!r})" if names else ""
        raise TransformError(
            f"{plural(len(named), 'field')} of the state are called {key!r}: {places}. "
            f"Read one in Python, or name its class too{example}, or pass group=."
        )
    if not named and default is _MISSING:
        raise TransformError(_nothing_message(key, parts))
    return named[0].value if named else default


def tree_set(state: Any, /, *, group: Hashable = _MISSING, **fields: Any) -> Any:
    """Return a state with new values in the fields that have these names.

    As ``optax.tree_utils.tree_set``, every field of that name is set; but parameters
    are left alone, and dtypes are kept, so that a compiled step is not traced again.

    Args:
        state: as for ``tree_get``.
        group: set only the state of this group of a partition, as for ``tree_get``.
        **fields: values by name; ``**{"ScaleByAdamState.count": 0}`` sets the field of
            one class. A value has the structure and the shapes of the old one; one
            number fills a field that is an array, as a count of each layer.

    Returns:
        State with the treedef of ``state``; each new array has the dtype, and the
        sharding, of the one that it replaces. Of an ``nnx.Optimizer``, which stays as
        it is, the state for ``set_opt_state``.

    Raises:
        TransformError: no field has that name; what has it may be params; the dtype
            cannot hold the value, which would become infinite, NaN or zero; a schedule
            would overwrite the hyperparameter at the next step; or no partition has
            such a group.
        StructureMismatchError: a value has another structure or shape.

    Example:
        >>> tx = optax.inject_hyperparams(optax.sgd)(0.1)
        >>> state = tree_set(tx.init({"learning_rate": jnp.ones(2)}), learning_rate=1)
        >>> tree_get(state, "learning_rate")
        Array(1., dtype=float32)
    """
    state = plain_state(state)
    parts = _search(state, fields, group)
    new = []
    for name, value in fields.items():
        named = [part for part in parts if name in part.names]
        if not named:
            raise TransformError(_nothing_message(name, parts))
        new += [(part.path, _like(part, value)) for part in named]
    for path, value in sorted(new, key=lambda pair: len(pair[0])):
        state = _put(state, path, value)
    return state


def schedule_free_eval_params(state: Any, params: Any) -> Any:
    """Return the params to evaluate a model that ``schedule_free`` trains.

    As ``optax.contrib.schedule_free_eval_params``, with the same numbers as on the flat
    dict.

    Args:
        state: state that holds that of ``optax.contrib.schedule_free`` somewhere: made
            through ``adapt`` or ``partition``, or on the tree itself.
        params: the current params, any tree.

    Returns:
        Tree with the treedef of ``params``; leaves that ``schedule_free`` does not
        train are the caller's own.

    Raises:
        TransformError: ``state`` holds no state of ``schedule_free``, or two of them
            for one leaf.
        StructureMismatchError: ``params`` lacks a leaf that the state has.

    Example:
        >>> tx = optax.contrib.schedule_free_sgd(0.1)
        >>> params = {"net/w": jnp.ones(2)}
        >>> schedule_free_eval_params(tx.init(params), {"net": {"w": jnp.ones(2)}})
        {'net': {'w': Array([1., 1.], dtype=float32)}}
    """
    name = optax.contrib.ScheduleFreeState.__name__
    states = [part for part in _search(state, (name,)) if name in part.names]
    if not states:
        raise TransformError(
            "The state holds no ScheduleFreeState: it is not that of a transformation "
            "made by optax.contrib.schedule_free. schedule_free_eval_params takes "
            "(state, params)."
        )
    view = view_tree(params)
    flat = view.flat()
    new: dict[str, Any] = {}
    for part in states:
        z = view_tree(part.value.z).flat()
        if missing := [path for path in z if path not in flat]:
            raise StructureMismatchError(
                f"The params lack {plural(len(missing), 'path')} of the state: "
                f"{listing(missing)}. Pass the params that the state was made for.",
                paths=missing,
            )
        if twice := [path for path in z if path in new]:
            raise TransformError(
                f"Two schedule_free states hold {listing(twice)}. Ask with the inner "
                "one: the params of the outer one are not those of the model."
            )
        y = {path: flat[path] for path in z}
        new |= optax.contrib.schedule_free_eval_params(part.value._replace(z=z), y)
    return view.replace(new)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One part of a state: a field, or a state among others.

    Attributes:
        value: the part.
        path: JAX's keys that lead to it.
        names: what it is called.
        label: that of the group of a partition, if it is the state of one.
        is_scheduled: a schedule sets it at every step.
        owner: class of the object that has it, if this may be params.
    """

    value: Any
    path: tuple[Any, ...] = ()
    names: tuple[Any, ...] = ()
    label: Hashable = _MISSING
    is_scheduled: bool = False
    owner: str | None = None

    def exact_path(self) -> str:
        return f"state{jtu.keystr(self.path)}"


def _search(
    state: Any, names: Iterable[Any], group: Hashable = _MISSING
) -> list[_Part]:
    """Return the parts of a state among which some names are looked for.

    Args:
        state: the state.
        names: the names, as ``tree_get`` takes them.
        group: label of the only group of a partition to look into, if there is one.

    Raises:
        TransformError: what has such a name may be params, there is no such group, or
            the state is another object.
    """
    is_searched = _is_record(state) or isinstance(state, tuple | list | Mapping)
    if not (is_searched or is_array(state) or state is None):
        raise TransformError(
            f"Expected the state of an optimizer; got {describe_argument(state)}. Pass "
            "the field that holds one: tree_get(state, key), tree_set(state, key=...)."
        )
    names = list(names)
    classes = frozenset(str(name).partition(".")[0] for name in names)

    def is_state(node: Any) -> bool:
        is_named = _is_record(node) and type(node).__name__ in classes
        return is_state_class(type(node)) or is_named

    # ``optax.tree.set`` (0.2.8) goes by keys: a param called ``count`` is one, too.
    parts = list(_parts(_Part(state, names=_class_names(state)), is_state))
    if group is not _MISSING:
        parts = _of_group(parts, group)
    for part in parts:
        if part.owner is not None and part.names[0] in names:
            path, name = jtu.keystr(part.path[:-1]), part.names[0]
            raise TransformError(
                f"state{path} is a {part.owner}, which has a field {name!r} but is "
                "not a state of Optax and contains none, so it may be params. Give the "
                f'class with the name: "{part.owner}.{name}", or that of the state '
                "that you mean."
            )
    return parts


def _of_group(parts: Sequence[_Part], group: Hashable) -> list[_Part]:
    """Return the parts in a group, but for those within groups of more partitions.

    Of ``{"adam": adam, "muon": muon}``, where ``optax.contrib.muon`` has two groups
    with the same names, these are those of the outer ones.
    """
    groups = [part for part in parts if part.label is not _MISSING]
    depth_of = {
        part.path: sum(part.path[: len(each.path)] == each.path for each in groups)
        for part in groups
        if part.label == group
    }
    if not depth_of:
        labels = listing(dict.fromkeys(str(part.label) for part in groups))
        raise TransformError(
            f"No partition in the state has a group {group!r}; "
            f"{f'the groups are {labels}' if labels else 'there are no groups'}."
        )
    least = min(depth_of.values())
    tops = [path for path, depth in depth_of.items() if depth == least]
    return [p for p in parts if any(p.path[: len(top)] == top for top in tops)]


def _parts(part: _Part, is_state: Callable[[Any], bool]) -> Iterator[_Part]:
    """Yield a state, and every part in it that has a name, the outer ones first.

    Args:
        part: the state.
        is_state: whether an object is a state by its class; any other may be params.
    """
    yield part
    node = part.value
    is_record, is_dict = _is_record(node), isinstance(node, Mapping)
    if not is_record and not isinstance(node, tuple | list | Mapping):
        return
    cls, is_optax = type(node).__name__, is_state_class(type(node))
    # Params may be the whole state of a transformation.
    is_unknown = is_dict or (is_record and not is_state(node))
    may_be_params = is_unknown and not holds(node, is_state)
    for key, child in _level(node):
        name, path, names = _name_of(key), (*part.path, key), _class_names(child)
        field = _Part(child, path, (name, f"{cls}.{name}"))
        if may_be_params and is_record:
            yield dataclasses.replace(field, owner=cls)
        elif may_be_params:
            return
        elif not is_record:  # a chain; a named one is a dict
            names = (name, *names) if is_dict else names
            yield from _parts(_Part(child, path, names), is_state)
        elif is_optax and isinstance(child, Mapping) and name in NAMED_FIELDS:
            yield field
            scheduled = getattr(node, SCHEDULES, ())
            for entry_key, entry in _level(child):
                names = (_name_of(entry_key), f"{name}.{_name_of(entry_key)}")
                is_set = names[0] in scheduled
                yield _Part(entry, (*path, entry_key), names, is_scheduled=is_set)
        elif is_optax and isinstance(child, Mapping) and name in LABELLED_FIELDS:
            yield field
            for entry_key, entry in _level(child):
                label = _name_of(entry_key) if name == GROUPS else _MISSING
                part = _Part(entry, (*path, entry_key), _class_names(entry), label)
                yield from _parts(part, is_state)
        elif name in STATE_FIELDS if is_optax else holds(child, is_state):
            yield from _parts(_Part(child, path, (*field.names, *names)), is_state)
        else:
            yield field


def _put(node: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a tree with another value at one path."""
    if not path:
        return new
    treedef: Any = jax.tree.structure(node, is_leaf=lambda x: x is not node)
    return treedef.unflatten(
        _put(child, path[1:], new) if key == path[0] else child
        for key, child in _level(node)
    )


def _is_record(node: Any) -> bool:
    if isinstance(node, tuple):
        return hasattr(node, "_fields")
    return dataclasses.is_dataclass(type(node)) and not jtu.all_leaves((node,))


def _class_names(node: Any) -> tuple[str, ...]:
    return (type(node).__name__,) if _is_record(node) else ()


def _level(node: Any) -> list[tuple[Any, Any]]:
    """Return the children of a node by key."""
    keyed, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(keys[0], child) for keys, child in keyed]


def _name_of(key: Any) -> Any:
    return key.name if isinstance(key, jtu.GetAttrKey) else getattr(key, "key", None)


def _like(part: _Part, new: Any) -> Any:
    """Return a new value with the structure, shapes and dtypes of the old one."""
    if part.is_scheduled:
        raise TransformError(
            f"{part.exact_path()} follows a schedule, which sets it at every "
            "step. Change the schedule, or give inject_hyperparams a number."
        )
    treedef: Any
    leaves, treedef = jax.tree.flatten(part.value)
    new_leaves, new_treedef = jax.tree.flatten(new)
    is_boxed = len(leaves) == 1 and jtu.all_leaves((new,))
    if new_treedef != treedef and not is_boxed:
        raise StructureMismatchError(
            f"The new value of {part.exact_path()} has another structure: "
            f"{shorten(str(new_treedef))} where the state has {shorten(str(treedef))}."
        )
    pairs = zip(leaves, new_leaves, strict=True)
    return treedef.unflatten([_cast(part, old, leaf) for old, leaf in pairs])


def _cast(part: _Part, old: Any, new: Any) -> Any:
    if not is_array(old):
        return new
    # One number fills a field that is an array: ``per_layer`` keeps one for each layer.
    fills = np.shape(new) == () and part.value is old
    if np.shape(new) != old.shape and not fills:
        raise StructureMismatchError(
            f"The new value of {part.exact_path()} has another shape: {describe(new)} "
            f"where the state has {describe(old)}."
        )
    if isinstance(new, jax.Ref) or not can_hold(old.dtype, new):
        raise TransformError(
            f"{part.exact_path()} is {describe(old)} and cannot hold {new!r:.100}. "
            "Give a value of its dtype, or of a narrower kind."
        )
    if type(new) is int and jnp.issubdtype(old.dtype, jnp.inexact):
        new = float(new)  # it may have more digits than JAX's integers
    # A copy: one value may be set in several places, each of which may be donated.
    array = jnp.array(jnp.broadcast_to(jnp.array(new, dtype=old.dtype), old.shape))
    is_traced = any(isinstance(one, jax.core.Tracer) for one in (old, array))
    if is_traced or not getattr(old, "committed", False):
        return array
    return jax.device_put(array, old.sharding)


def can_hold(dtype: Any, new: Any) -> bool:
    """Return whether a dtype can hold a number: of its kind, or of a narrower one.

    A bool is not a number. An integer is held exactly. Another number may be rounded,
    but becomes neither infinite nor NaN nor, unless it is one of many, zero. Of arrays
    whose values are not known here and now only the kind is compared.

    Example:
        >>> can_hold(jnp.int32, 3.0), can_hold(jnp.int32, 3.5), can_hold(jnp.int8, 300)
        (True, False, False)
        >>> can_hold(jnp.float32, 1e60), can_hold(jnp.float32, float("inf"))
        (False, True)
    """
    if is_array(new) and new.dtype == dtype:
        return True
    if isinstance(new, float) and jnp.issubdtype(dtype, jnp.integer):
        new = int(new) if new.is_integer() else new
    values = numpy_values(new)
    if values is None and not is_array(new):
        return False
    kinds = [kind_of((new if values is None else values).dtype), kind_of(dtype)]
    if None in kinds or (jnp.bool_ in kinds and kinds[0] != kinds[1]):
        return False  # keys, texts, dates, objects; or a bool and a number
    if _KINDS.index(kinds[0]) > _KINDS.index(kinds[1]):
        return False
    if values is None or not values.size:
        return True
    with np.errstate(all="ignore"):
        cast = converted(values, dtype)
    is_zero = values.shape == () and bool(values) and not cast
    return not (is_zero or is_lost(values, cast))


# Each holds those before it, but for bools.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def numpy_values(leaf: Any) -> Any:
    """Return an array's values, or a number, in NumPy, if they are known here and now.

    None for tracers and abstract arrays, typed keys, and what other processes hold.
    """
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    if not is_array(leaf) or isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None
    is_here = leaf.is_fully_addressable if isinstance(leaf, jax.Array) else True
    return np.asarray(leaf) if is_here or leaf.is_fully_replicated else None


def _nothing_message(name: Any, parts: Iterable[_Part]) -> str:
    names = [str(part.names[0]) for part in parts if part.names and not part.owner]
    near = Speller().nearest(str(name), dict.fromkeys(names), count=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    cure = ""
    if not near and "hyperparams" not in names:
        cure = " A rate is in the state after treeadapt.inject_hyperparams."
    return (
        f"No field of the state is called {describe_argument(name)}{hint}. There are "
        f"{listing(dict.fromkeys(names)) or 'none'}. Parameters are not searched.{cure}"
    )
