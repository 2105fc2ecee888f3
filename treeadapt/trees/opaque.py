"""Leaves that hold arrays: objects that neither JAX nor an adapter opens.

Such an object would silently be passed on as a leaf, and its arrays with it. Looks at
attributes, items, arguments of ``functools.partial`` and the objects of bound methods,
at each object once, however they refer to each other. Reads no array.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from treeadapt.errors import AdapterError
from treeadapt.text.names import listing
from treeadapt.trees.adapters import fields
from treeadapt.trees.adapters.adapter import Flat
from treeadapt.trees.adapters.registry import AdapterRegistry
from treeadapt.trees.arrays import is_array

# Leaves of classes from these packages hold no arrays that an adapter should find.
_PLAIN_PACKAGES = ("functools", "jax", "jaxlib", "ml_dtypes", "numpy", "typing")
_TORCH = "torch.nn.modules.module.Module"
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_MAPPINGS = (dict, types.MappingProxyType)
_SEQUENCES = (list, tuple, collections.deque)
# Classes whose instances hold objects elsewhere than in attributes.
_HOLDERS = (functools.partial, *_METHODS, *_MAPPINGS, *_SEQUENCES)


def is_plain(cls: type) -> bool:
    """Return whether leaves of class ``cls`` need no closer look."""
    if issubclass(cls, _HOLDERS):
        return False
    package = cls.__module__.partition(".")[0]
    if fields.builtin_base(cls) is cls:
        return package == "builtins" or not cls.__dictoffset__
    return package in _PLAIN_PACKAGES


class Searcher:
    """Looks for arrays inside objects, and remembers what it found.

    Keeps every object that it saw alive, so it serves for one walk.
    """

    def __init__(self, registry: AdapterRegistry):
        self._registry = registry
        self._empty: dict[int, Any] = {}  # objects with no array in them

    def holds_array(self, top: Any) -> bool:
        """Return whether an array lies somewhere inside ``top``."""
        seen = {id(top): top}
        pending = [top]
        while pending:
            thing = pending.pop()
            # What an adapter opens may have a shape and a dtype, as a spec does.
            if self._registry.find(thing).adapter is None and is_array(thing):
                return True
            for inner in self._inside(thing):
                if id(inner) not in seen and id(inner) not in self._empty:
                    seen[id(inner)] = inner
                    pending.append(inner)
        self._empty.update(seen)
        return False

    def full(self, attributes: Mapping[str, Any]) -> list[str]:
        """Return the names of the attributes that hold arrays."""
        return [name for name, at in attributes.items() if self.holds_array(at)]

    def _inside(self, node: Any) -> Iterator[Any]:
        kind = self._registry.find(node)
        if kind.is_mapping and isinstance(node, dict):
            yield from _held(node)  # JAX would sort the keys, and may be unable to
        elif kind.adapter is not None:
            try:
                flat = kind.adapter.open(node)
            except (TypeError, ValueError):  # as a ``FrozenDict`` with such keys
                yield from fields.attributes(node).values()
                return
            yield from flat.children
            yield from passed_over(flat).values()
        elif not (kind.sealed or is_plain(type(node)) or isinstance(node, type)):
            yield from fields.attributes(node).values()
            yield from _held(node)


def _held(node: Any) -> Iterable[Any]:
    """Return what an object holds elsewhere than in its attributes."""
    if isinstance(node, functools.partial):
        return (node.func, *node.args, *node.keywords.values())
    if isinstance(node, _METHODS):
        return (node.__self__,)
    if isinstance(node, dict):  # past the methods of the class, which may do more
        return dict.values(node)
    if isinstance(node, types.MappingProxyType):
        return node.values()
    base = next((cls for cls in _SEQUENCES if isinstance(node, cls)), None)
    return () if base is None else base.__iter__(node)


def passed_over(flat: Flat) -> dict[str, Any]:
    """Return the attributes of a node that its adapter keeps but does not show."""
    return dict(flat.aux.rest) if isinstance(flat.aux, fields.Shell) else {}


def leaf_error(leaf: Any, path: str, hidden: list[str]) -> AdapterError:
    """Return the error for a leaf that holds arrays.

    Args:
        leaf: the object.
        path: its path.
        hidden: its attributes that hold them.
    """
    cure = _cure(leaf, hidden)
    if isinstance(leaf, functools.partial):
        cure = "Use jax.tree_util.Partial instead of functools.partial."
    elif isinstance(leaf, _METHODS):
        of = type(leaf.__self__).__name__
        name = getattr(leaf, "__name__", "function")
        cure = (
            "Use jax.tree_util.Partial of the function and the object instead: "
            f"jax.tree_util.Partial({of}.{name}, object)"
        )
    elif isinstance(leaf, Mapping | collections.deque | list | tuple):
        cure = _cure_of_container(leaf)
    return AdapterError(
        f"The leaf at {path!r} is a {_name(leaf)} that holds arrays, and JAX does not "
        f"look inside it. {cure}"
    )


def node_error(
    node: Any, path: str, named: Iterable[Any], hidden: list[str]
) -> AdapterError:
    """Return the error for a node whose adapter passes over the arrays in ``hidden``.

    Args:
        node: the node.
        path: its path.
        named: the keys of its children.
        hidden: its attributes that hold the other arrays.
    """
    names = [*(key for key in named if isinstance(key, str)), *hidden]
    return AdapterError(
        f"The {_name(node)} at {path!r} holds arrays in addition to its children, "
        f"{listing(hidden)}, which would not be seen. {_cure(node, names)}"
    )


def _name(node: Any) -> str:
    return _full_name(type(node))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _cure(node: Any, names: list[str]) -> str:
    if any(_full_name(cls) == _TORCH for cls in type(node).__mro__):
        return (
            "A module of PyTorch is not a tree: save it (save_pretrained, or its "
            "state_dict() to safetensors) and pass the name of the folder or file."
        )
    listed = ", ".join(f'"{name}"' for name in names)
    comma = "," if len(names) == 1 else ""
    cure = (
        "Register the class: "
        f"treeadapt.register({type(node).__name__}, fields=({listed}{comma}))"
    )
    if sum(name.startswith("_") for name in names) > max(1, len(names) / 2):
        # Books that a library keeps, which lead back to the object.
        cure += "; or, if these keep the books of a library, pass a dict of its arrays."
    return cure


def _cure_of_container(node: Any) -> str:
    if isinstance(node, Mapping):
        pairs = "[(jax.tree_util.DictKey(k), x[k]) for k in sorted(x)]"
        keyed = f"{pairs}, tuple(sorted(x))"
        build = "dict(zip(keys, values))"
    else:
        keyed = "[(jax.tree_util.SequenceKey(i), y) for i, y in enumerate(x)], None"
        build = "values"
    name = type(node).__name__
    return (
        "Convert it to a plain dict, list or tuple, or register the class with JAX: "
        f"jax.tree_util.register_pytree_with_keys({name}, lambda x: ({keyed}), "
        f"lambda keys, values: {name}({build}))"
    )
