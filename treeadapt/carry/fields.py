"""Fields of an optimizer's state, by name: a parameter's name is never taken for one.

Takes the state of any Optax transformation, wherever its pieces are (chains, groups of
a partition, wrappers), and gets or sets fields: those of its named tuples, and the
entries of ``hyperparams``. What a field such as ``mu`` holds is not searched, so a
parameter called ``count``, ``value`` or ``mu`` is neither found nor overwritten.
Classes tell states from params: Optax's own (see ``optax_fields``), those that hold one
of these, and those that the caller names.
Stable names for every array of a state are up to ``convert``.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import numbers
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from treeadapt.arrays import is_array
from treeadapt.carry.optax_fields import (
    GROUPS,
    LABELLED_FIELDS,
    NAMED_FIELDS,
    STATE_FIELDS,
    is_state_class,
)
from treeadapt.convert import describe
from treeadapt.errors import StructureMismatchError, TransformError
from treeadapt.names import listing, plural
from treeadapt.trees.views import view_tree

_MISSING: Any = object()


def tree_get(
    state: Any, key: Any, default: Any = _MISSING, *, group: Hashable = _MISSING
) -> Any:
    """Return the one field of an optimizer's state that has a name.

    As ``optax.tree_utils.tree_get``, but parameters are not searched.

    Args:
        state: state of any Optax transformation, or an object that holds one, such as
            Flax's ``TrainState``.
        key: name of a field (``"count"``), a hyperparameter (``"learning_rate"``), a
            measurement, a link of ``named_chain`` or a state class
            (``"ScaleByAdamState"``). ``"ScaleByAdamState.count"`` is that class's
            field, ``"hyperparams.b1"`` the hyperparameter. A state class that is not
            of Optax and holds no state of it must be named so; it could be params.
        default: what to return if there is none.
        group: look only into the state of this group of a partition.

    Returns:
        The state's own object.

    Raises:
        TransformError: no field has that name and there is no default; several have;
            what has it may be params; or no partition has such a group.

    Example:
        >>> state = optax.adam(1e-3).init({"count": jnp.ones(2)})
        >>> tree_get(state, "count")
        Array(0, dtype=int32)
    """
    search = _Search((key,), group)
    _visit(state, search)
    found = search.found[key]
    if len(found) > 1:
        raise TransformError(_several_message(key, [path for path, _ in found]))
    if found:
        return found[0][1]
    if default is _MISSING:
        raise TransformError(search.nothing_message(key))
    return default


def tree_set(state: Any, /, *, group: Hashable = _MISSING, **fields: Any) -> Any:
    """Return a state with new values in the fields that have these names.

    As ``optax.tree_utils.tree_set``, every field of that name is set; but parameters
    are left alone, and dtypes are kept, so that a compiled step is not traced anew.

    Args:
        state: as for ``tree_get``.
        group: set only the state of this group of a partition.
        **fields: values by name; ``**{"ScaleByAdamState.count": 0}`` sets the field of
            one class. A value has the structure and the shapes of the old one.

    Returns:
        State with the treedef of ``state``; each new array has the dtype, and the
        sharding, of the one that it replaces.

    Raises:
        TransformError: no field has that name; what has it may be params; the dtype
            cannot hold the value; a schedule would overwrite the hyperparameter at the
            next step; or no partition has such a group.
        StructureMismatchError: a value has another structure or shape.

    Example:
        >>> tx = optax.inject_hyperparams(optax.sgd)(0.1)
        >>> state = tree_set(tx.init({"learning_rate": jnp.ones(2)}), learning_rate=1)
        >>> tree_get(state, "learning_rate")
        Array(1., dtype=float32)
    """
    search = _Search(tuple(fields), group, fields)
    new = _visit(state, search)
    for name in fields:
        if not search.found[name]:
            raise TransformError(search.nothing_message(name))
    return new


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
    search = _Search((name,))
    _visit(state, search)
    if not search.found[name]:
        raise TransformError(
            "The state holds no ScheduleFreeState: it is not that of a transformation "
            "made by optax.contrib.schedule_free."
        )
    view = view_tree(params)
    own = view.flat()
    new: dict[str, Any] = {}
    for _, inner in search.found[name]:
        z = view_tree(inner.z).flat()
        _require_paths(z, own, new)
        y = {path: own[path] for path in z}
        new |= optax.contrib.schedule_free_eval_params(inner._replace(z=z), y)
    return view.replace(new)


class _Role(enum.Enum):
    """What a part of a state is."""

    STATE = enum.auto()  # a state, or a container of states
    NAMED = enum.auto()  # a dict whose keys are names of the state
    LABELLED = enum.auto()  # a dict of states whose keys are labels, not names
    VALUE = enum.auto()  # what a field holds: parameters, a number


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One part of a state, and where it stands."""

    value: Any
    role: _Role
    path: tuple[Any, ...] = ()
    names: tuple[Any, ...] = ()
    field: str = ""
    scheduled: tuple[Any, ...] = ()
    set_by_schedule: bool = False

    def exact_path(self) -> str:
        return f"state{jtu.keystr(self.path)}"


class _Search:
    """What is looked for in a state, and what was found.

    Attributes:
        names: the names to find.
        group: label of the only group to look into, if there is one.
        values: new values by name; the old ones stay where it is empty.
        classes: names of classes that the caller names in ``names``.
        found: exact path and old value of every hit, by name.
        doubtful: exact path and class of what may be a state or params, by field.
    """

    def __init__(
        self,
        names: tuple[Any, ...] = (),
        group: Hashable = _MISSING,
        values: Mapping[str, Any] | None = None,
    ):
        self.names = names
        self.group = group
        self.values = values or {}
        self.classes = {str(name).partition(".")[0] for name in names}
        self.found: dict[Any, list[tuple[str, Any]]] = {name: [] for name in names}
        self.known: dict[str, None] = {}
        self.labels: dict[Hashable, None] = {}
        self.doubtful: dict[Any, tuple[str, str]] = {}

    def meet(self, part: _Part) -> Any:
        """Return the value that shall stand where ``part`` stands."""
        self.known.update(dict.fromkeys(map(str, part.names[:1])))
        value = part.value
        for name in self.names:
            if name in part.names:
                self.found[name].append((part.exact_path(), value))
                if name in self.values:
                    value = _like(part, self.values[name])
        return value

    def is_state(self, node: Any) -> bool:
        """Tell whether a class of Optax, or one that the caller names, says so."""
        cls = type(node)
        return is_state_class(cls) or (
            _is_record(node) and cls.__name__ in self.classes
        )

    def holds_state(self, node: Any) -> bool:
        """Tell whether a state is at a node or below it."""
        return any(map(self.is_state, jax.tree.leaves(node, is_leaf=self.is_state)))

    def doubt(self, part: _Part) -> None:
        """Note the fields of what may be a state or params."""
        where = (part.exact_path(), type(part.value).__name__)
        for key, _ in _one_level(part.value)[0]:
            self.doubtful.setdefault(_name_of(key), where)

    def require_no_doubt(self) -> None:
        """Raise if a name that is looked for is a field of what may be params.

        Raises:
            TransformError: it is.
        """
        for name in self.names:
            if name in self.doubtful:
                path, cls = self.doubtful[name]
                raise TransformError(
                    f"{path} is a {cls}, which has a field {name!r} but is neither a "
                    "class of Optax nor holds one, so it may be params. Give the "
                    f'class with the name: "{cls}.{name}", or that of the state that '
                    "you mean."
                )

    def nothing_message(self, name: Any) -> str:
        if self.group is not _MISSING and self.group not in self.labels:
            return (
                f"No partition in the state has a group {self.group!r}; the groups are "
                f"{listing(map(str, self.labels)) or 'none'}."
            )
        near = difflib.get_close_matches(str(name), self.known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return (
            f"No field of the state is called {name!r}{hint}. There are "
            f"{listing(self.known) or 'none'}. Parameters are not searched."
        )


def _visit(state: Any, search: _Search) -> Any:
    """Show every part of a state to a search; return the state as it is then."""
    inside = search.group is _MISSING
    part = _Part(state, _Role.STATE, names=_class_names(state))
    new = _visit_part(part, search, inside=inside)
    search.require_no_doubt()
    if not inside and search.group not in search.labels:
        raise TransformError(search.nothing_message(None))
    return new


def _visit_part(part: _Part, search: _Search, *, inside: bool) -> Any:
    value = search.meet(part) if inside else part.value
    part = dataclasses.replace(part, value=value)
    children = list(_children(part, search, inside=inside))
    if not children:
        return value
    new = []
    for child in children:
        enters = inside
        if part.field == GROUPS and part.role is _Role.LABELLED:
            label = child.path[-1].key
            search.labels[label] = None
            enters = inside or label == search.group
        new.append(_visit_part(child, search, inside=enters))
    if all(one.value is two for one, two in zip(children, new, strict=True)):
        return value
    return _one_level(value)[1].unflatten(new)


def _children(part: _Part, search: _Search, *, inside: bool) -> Iterator[_Part]:
    """Yield the parts right below one, with their roles."""
    node, role = part.value, part.role
    is_record = _is_record(node)
    if role is _Role.VALUE or not (
        is_record or isinstance(node, tuple | list | Mapping)
    ):
        return
    is_unknown = (is_record and not search.is_state(node)) or (
        role is _Role.STATE and isinstance(node, Mapping)
    )
    if is_unknown and not search.holds_state(node):
        if is_record and inside:
            search.doubt(part)
        return  # params may be the whole state of some transformation
    for key, child in _one_level(node)[0]:
        name, path = _name_of(key), (*part.path, key)
        if role is _Role.NAMED:
            yield _Part(
                child,
                _Role.VALUE,
                path,
                names=(name, f"{part.field}.{name}"),
                set_by_schedule=name in part.scheduled,
            )
        elif is_record:
            below = _role_of(node, name, child, search)
            own = _class_names(child) if below is _Role.STATE else ()
            yield _Part(
                child,
                below,
                path,
                names=(name, f"{type(node).__name__}.{name}", *own),
                field=name,
                scheduled=tuple(getattr(node, "hyperparams_states", ())),
            )
        else:
            is_link = isinstance(node, Mapping) and role is _Role.STATE
            link = (name,) if is_link else ()
            yield _Part(child, _Role.STATE, path, names=(*link, *_class_names(child)))


def _role_of(node: Any, field: str, value: Any, search: _Search) -> _Role:
    if not is_state_class(type(node)):
        return _Role.STATE if search.holds_state(value) else _Role.VALUE
    if isinstance(value, Mapping) and field in NAMED_FIELDS:
        return _Role.NAMED
    if isinstance(value, Mapping) and field in LABELLED_FIELDS:
        return _Role.LABELLED
    return _Role.STATE if field in STATE_FIELDS else _Role.VALUE


def _is_record(node: Any) -> bool:
    if isinstance(node, tuple):
        return hasattr(node, "_fields")
    return dataclasses.is_dataclass(type(node)) and not jtu.all_leaves((node,))


def _class_names(node: Any) -> tuple[str, ...]:
    return (type(node).__name__,) if _is_record(node) else ()


def _one_level(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the children of a node by key, and what puts new ones in their place."""
    keyed, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(keys[0], child) for keys, child in keyed], treedef


def _name_of(key: Any) -> Any:
    return key.name if isinstance(key, jtu.GetAttrKey) else getattr(key, "key", None)


def _like(part: _Part, new: Any) -> Any:
    """Return a new value with the structure, shapes and dtypes of the old one."""
    if part.set_by_schedule:
        raise TransformError(
            f"{part.exact_path()} follows a schedule, which sets it anew at every "
            "step. Change the schedule, or give inject_hyperparams a number."
        )
    treedef: Any
    leaves, treedef = jax.tree.flatten(part.value)
    new_leaves, new_treedef = jax.tree.flatten(new)
    is_boxed = len(leaves) == 1 and jtu.all_leaves((new,))
    if new_treedef != treedef and not is_boxed:
        raise StructureMismatchError(
            f"The new value of {part.exact_path()} has another structure: "
            f"{_text(new_treedef)} where the state has {_text(treedef)}."
        )
    pairs = zip(leaves, new_leaves, strict=True)
    return treedef.unflatten([_cast(part, old, leaf) for old, leaf in pairs])


def _cast(part: _Part, old: Any, new: Any) -> Any:
    if not is_array(old):
        return new
    if np.shape(new) != old.shape:
        raise StructureMismatchError(
            f"The new value of {part.exact_path()} has another shape: {describe(new)} "
            f"where the state has {describe(old)}."
        )
    if not _can_hold(old.dtype, new):
        raise TransformError(
            f"{part.exact_path()} is {describe(old)} and cannot hold {new!r:.100}. "
            "Give a value of its dtype, or of a narrower kind."
        )
    # A copy: one value may be set in several places, each of which may be donated.
    array = jnp.array(new, dtype=old.dtype)
    concrete = not isinstance(old, jax.core.Tracer) and isinstance(old, jax.Array)
    if not concrete or isinstance(array, jax.core.Tracer) or not old.committed:
        return array
    return jax.device_put(array, old.sharding)


def _can_hold(dtype: Any, new: Any) -> bool:
    if not is_array(new) and not isinstance(new, numbers.Number):
        return False
    if isinstance(new, float) and new.is_integer():
        new = int(new)
    if type(new) is int and jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min <= new <= jnp.iinfo(dtype).max
    given = jnp.result_type(new)
    return given == dtype or _rank(given) <= _rank(dtype) < len(_KINDS)


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _rank(dtype: Any) -> int:
    kinds = (jnp.issubdtype(dtype, kind) for kind in _KINDS)
    return next((place for place, yes in enumerate(kinds) if yes), len(_KINDS))


def _text(treedef: Any) -> str:
    text = str(treedef)
    return text if len(text) <= 300 else f"{text[:297]}..."


def _require_paths(
    z: Mapping[str, Any], own: Mapping[str, Any], taken: Mapping[str, Any]
) -> None:
    missing = [path for path in z if path not in own]
    if missing:
        raise StructureMismatchError(
            f"{plural(len(missing), 'path')} of the state are not in the params: "
            f"{listing(missing)}. Pass the params that the state was made for."
        )
    twice = [path for path in z if path in taken]
    if twice:
        raise TransformError(
            f"Two schedule_free states hold {listing(twice)}. Ask with the inner one: "
            "the params of the outer one are not those of the model."
        )


def _several_message(key: Any, paths: list[str]) -> str:
    return (
        f"{plural(len(paths), 'field')} of the state are called {key!r}: "
        f"{', '.join(paths[:8])}{' ...' if len(paths) > 8 else ''}. Name its class too "
        '("ScaleByAdamState.count"), pass group=, or read it at its path.'
    )
