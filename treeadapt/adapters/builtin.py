"""Python's own containers.

``NODES`` are the containers that JAX flattens; ``OPENERS`` are those that JAX sees as
one opaque leaf: subclasses of ``dict``, ``list`` and ``tuple``, mapping proxies,
``deque``, ``UserDict`` and plain dataclasses. Rebuilding runs none of their
constructors. Reading never creates a key of a ``defaultdict``.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import types
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu

from treeadapt.adapters import fields
from treeadapt.adapters.fields import Shell
from treeadapt.errors import AdapterError
from treeadapt.registry import BOX, Adapter, Flat

_JAX = "treeadapt.adapters.jax"  # imports this file


def is_generated(function: Any) -> bool:
    """Tell whether ``dataclasses`` or ``namedtuple`` wrote the source of a function."""
    code = getattr(function, "__code__", None)
    # The name tells it from the code of ``python -c``, whose file is "<string>" too.
    return (
        code is not None
        and code.co_filename == "<string>"
        and code.co_qualname.startswith(("__create_fn__.", "<lambda>"))
    )


def _dict(node: dict[Any, Any]) -> Flat:
    values, keys = jtu.default_registry.flatten_one_level(node)
    return Flat(keys, values)


def _default_dict(node: Any) -> Flat:
    values, (_, keys) = jtu.default_registry.flatten_one_level(node)
    return Flat(keys, values)


def _sequence(node: Sequence[Any]) -> Flat:
    return Flat(range(len(node)), node)


def _none(node: None) -> Flat:
    return Flat((), ())


def _is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _namedtuple(node: Any) -> Flat:
    cls = type(node)
    if not isinstance(cls._fields, tuple) or len(cls._fields) != tuple.__len__(node):
        raise AdapterError(
            f"{cls.__name__} says it has the fields {cls._fields!r} but holds "
            f"{tuple.__len__(node)} items; it is no NamedTuple. Rename its _fields."
        )
    if jtu.default_registry.flatten_one_level(node)[1] is not cls:
        return importlib.import_module(_JAX).take_registered_apart(node)
    return Flat(cls._fields, tuple(node), Shell(cls, None, _rest(node)))


def _namedtuple_again(aux: Any, children: Sequence[Any]) -> Any:
    if isinstance(aux, Shell):
        return _tuple_again(aux, children)
    return aux.unflatten(children)


def _tuple_again(aux: Shell, children: Sequence[Any]) -> Any:
    return fields.put_back(tuple.__new__(aux.cls, children), aux.rest)


def _has_own_constructor(cls: type) -> bool:
    # JAX calls cls(*children); a subclass may have redefined what that does.
    own_init: Any = cls.__init__  # type: ignore[misc]
    return not is_generated(cls.__new__) or own_init is not object.__init__


NODES = (
    Adapter(name="dict", applies=dict, flatten=_dict),
    Adapter(name="list", applies=list, flatten=_sequence),
    Adapter(name="tuple", applies=lambda cls: cls is tuple, flatten=_sequence),
    Adapter(name="None", applies=type(None), flatten=_none),
    Adapter(
        name="OrderedDict",
        applies=collections.OrderedDict,
        flatten=_dict,
    ),
    Adapter(
        name="defaultdict",
        applies=collections.defaultdict,
        flatten=_default_dict,
    ),
    Adapter(
        name="NamedTuple",
        applies=_is_namedtuple,
        flatten=_namedtuple,
        unflatten=_namedtuple_again,
        by_hand=_has_own_constructor,
    ),
)


def _base_of(cls: type) -> Any:
    return collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict


def _mapping(node: Any) -> Flat:
    # The methods of the base, as a subclass may give other values than it holds.
    base = _base_of(type(node))
    order = tuple(base.__iter__(node))
    keys = order if base is collections.OrderedDict else _sorted(order)
    form = (keys, order, getattr(node, "default_factory", None))
    children = [base.__getitem__(node, key) for key in keys]
    return Flat(keys, children, Shell(type(node), form, _rest(node)))


def _mapping_again(aux: Shell, children: Sequence[Any]) -> Any:
    keys, order, factory = aux.form
    items = dict(zip(keys, children, strict=True))
    base = _base_of(aux.cls)
    node = base.__new__(aux.cls)
    for key in order:
        base.__setitem__(node, key, items[key])
    if issubclass(aux.cls, collections.defaultdict):
        node.default_factory = factory
    return fields.put_back(node, aux.rest)


def _proxy(node: Any) -> Flat:
    keys = _sorted(tuple(node))
    return Flat(keys, [node[key] for key in keys], (keys, tuple(node)))


def _proxy_again(aux: Any, children: Sequence[Any]) -> Any:
    items = dict(zip(aux[0], children, strict=True))
    return types.MappingProxyType({key: items[key] for key in aux[1]})


def _sorted(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return tuple(sorted(keys))  # as JAX orders the keys of a dict
    except TypeError:
        return keys


def _list(node: Any) -> Flat:
    children = list(list.__iter__(node))
    return Flat(range(len(children)), children, Shell(type(node), None, _rest(node)))


def _list_again(aux: Shell, children: Sequence[Any]) -> Any:
    node: Any = list.__new__(aux.cls)
    list.extend(node, children)
    return fields.put_back(node, aux.rest)


def _tuple(node: Any) -> Flat:
    children = tuple(tuple.__iter__(node))
    return Flat(range(len(children)), children, Shell(type(node), None, _rest(node)))


def _deque(node: Any) -> Flat:
    children = list(collections.deque.__iter__(node))
    aux = Shell(type(node), node.maxlen, _rest(node))
    return Flat(range(len(children)), children, aux)


def _deque_again(aux: Shell, children: Sequence[Any]) -> Any:
    node: Any = collections.deque.__new__(aux.cls)
    collections.deque.__init__(node, children, aux.form)
    return fields.put_back(node, aux.rest)


def _user_dict(node: Any) -> Flat:
    return fields.take_apart(node, ("data",))._replace(keys=(BOX,))


def _dataclass(node: Any) -> Flat:
    names = [field.name for field in dataclasses.fields(node)]
    return fields.take_apart(node, names)


def _rest(node: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(fields.attributes(node).items())


OPENERS = (
    Adapter(
        name="dict subclass",
        applies=dict,
        flatten=_mapping,
        unflatten=_mapping_again,
    ),
    Adapter(
        name="mapping proxy",
        applies=types.MappingProxyType,
        flatten=_proxy,
        unflatten=_proxy_again,
    ),
    Adapter(
        name="UserDict",
        applies=collections.UserDict,
        flatten=_user_dict,
        unflatten=fields.put_together,
    ),
    Adapter(
        name="list subclass",
        applies=list,
        flatten=_list,
        unflatten=_list_again,
    ),
    Adapter(
        name="tuple subclass",
        applies=tuple,
        flatten=_tuple,
        unflatten=_tuple_again,
    ),
    Adapter(
        name="deque",
        applies=collections.deque,
        flatten=_deque,
        unflatten=_deque_again,
    ),
    Adapter(
        name="dataclass",
        applies=dataclasses.is_dataclass,
        flatten=_dataclass,
        unflatten=fields.put_together,
    ),
)
