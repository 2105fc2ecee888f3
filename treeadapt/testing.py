"""Check adapters of your own: ``check_adapter`` holds them to the library's laws.

Takes a tree of the classes in question, and calls the adapters as conversions do. An
error names the law that does not hold, the class and the path. For tests: nothing else
imports it, and ``import treeadapt`` does not.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from treeadapt.errors import AdapterError, TreeAdaptWarning
from treeadapt.selection.splitting import merge, split
from treeadapt.trees.adapters.adapter import BOX
from treeadapt.trees.adapters.registry import NodeKind, current_registry
from treeadapt.trees.opaque import Searcher
from treeadapt.trees.paths import SEPARATOR, segment
from treeadapt.trees.state_dict import (
    from_flat_dict,
    from_state_dict,
    to_flat_dict,
    to_state_dict,
)
from treeadapt.trees.views import view_nested


def check_adapter(tree: Any) -> None:
    """Hold the adapters of all nodes of a tree to the laws; give None if they hold.

    - *order*: ``flatten`` gives the same keys each time.
    - *agreement with JAX*: the leaves are those of ``jax.tree.leaves``, in its order,
      where JAX knows the class.
    - *unflatten*: it does not look at a child, and puts each one back where it was.
    - *aux*: there is not an array in it.
    - *identity*: every conversion and its way back give the caller's own leaves.
    - *eval_shape*: it works on abstract values.
    - *jit*: it adds no operation, and equal trees are traced once.
    - *pickling*: what ``split`` leaves over can be pickled where the tree can, if
      adapters rebuild the tree.

    Args:
        tree: a tree of the classes, with arrays of any shapes; small is enough.

    Raises:
        AdapterError: a law does not hold, or no adapter opens ``tree``.

    Example:
        >>> class Net:
        ...     def __init__(self, w):
        ...         self.w = w
        >>> with ta.default_registry.copy().use():
        ...     _ = ta.register(Net, fields=("w",))
        ...     check_adapter({"net": Net(jnp.ones(2))})
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TreeAdaptWarning)
        nodes = list(_nodes(tree))
        if not nodes:
            raise AdapterError(
                f"No adapter opens a {type(tree).__name__}. Register the class first: "
                "treeadapt.register(...)."
            )
        for path, node, kind in nodes:
            _check_node(path, node, kind)
        _check_leaves(tree)
        _check_transformations(tree)
        _check_pickling(tree)


def _nodes(tree: Any) -> Iterator[tuple[str, Any, NodeKind]]:
    registry, met = current_registry(), dict[int, Any]()
    pending = [("", tree)]
    while pending:
        path, node = pending.pop()
        kind = registry.find_again(node)
        if kind.adapter is None or id(node) in met:
            continue
        met[id(node)] = node
        yield path, node, kind
        flat = kind.adapter.open(node)
        pending += [
            (path if key is BOX else f"{path}{SEPARATOR}{segment(key)}".strip("/"), at)
            for key, at in zip(flat.keys, flat.children, strict=True)
        ]


def _check_node(path: str, node: Any, kind: NodeKind) -> None:
    adapter = kind.adapter
    assert adapter is not None  # of a node
    flat = adapter.open(node)
    keys = _texts(flat.keys)
    with _law("order", path, node):
        if _texts(adapter.open(node).keys) != keys:
            raise _BrokenError("flatten gives other keys when it is called again")
    with _law("aux", path, node):
        if Searcher(current_registry()).holds_array(flat.aux):
            raise _BrokenError("there is an array in aux. Make it a child")
    if not kind.by_hand or adapter.unflatten is None:
        return
    marks = [_Mark() for _ in flat.children]
    hint = "unflatten(aux, children) fails on children that are not arrays: "
    with _law("unflatten", path, node, before=hint):
        rebuilt = adapter.unflatten(flat.aux, marks)
        if type(rebuilt) is not type(node):
            raise _BrokenError(f"unflatten gives a {type(rebuilt).__name__}")
        again = adapter.open(rebuilt)
        if _texts(again.keys) != keys:
            raise _BrokenError(f"the keys {keys} come back as {again.keys!r}")
        for key, mark, child in zip(keys, marks, again.children, strict=True):
            if mark is not child:
                raise _BrokenError(f"the child {key!r} is not put back")


class _Mark:
    """Stands for a child; nothing can be done with it."""


def _check_leaves(tree: Any) -> None:
    try:
        view = view_nested(tree)
    except AdapterError as error:
        raise AdapterError(f"Law 'agreement with JAX' does not hold. {error}") from None
    flat = to_flat_dict(tree)
    ways = {
        "from_flat_dict": lambda: from_flat_dict(tree, flat),
        "from_state_dict": lambda: from_state_dict(tree, to_state_dict(tree)),
        "merge": lambda: merge(*split(tree, arrays="all")),
    }
    for name, way in ways.items():
        again = way()
        rebuilt = view_nested(again)
        with _law("identity", "", tree):
            if type(again) is not type(tree) or rebuilt.plan.paths != view.plan.paths:
                raise _BrokenError(f"{name} gives other classes or paths")
        for (path, one), two in zip(view.items(), rebuilt.leaves, strict=True):
            with _law("identity", path, one):
                if one is not two:
                    raise _BrokenError(f"{name} gives another object")


def _check_transformations(tree: Any) -> None:
    traces: list[int] = []

    def there_and_back(params: Any, rest: Any) -> Any:
        traces.append(1)
        return split(merge(params, rest), arrays="all")[0]

    params, rest = split(tree, arrays="all")
    with _law("eval_shape", "", tree):
        shapes = jax.eval_shape(there_and_back, params, rest)
        if shapes != jax.eval_shape(lambda same: same, params):
            raise _BrokenError("the arrays come back with other names or shapes")
    with _law("jit", "", tree):
        program = jax.make_jaxpr(there_and_back)(params, rest).jaxpr
        if program.eqns or program.outvars != program.invars[: len(params)]:
            raise _BrokenError(f"a conversion adds operations: {program.eqns[:3]}")
        if not all(isinstance(leaf, jax.Array) for leaf in params.values()):
            return
        del traces[:]
        compiled = jax.jit(lambda *both: there_and_back(*both))  # traced by nobody yet
        for _ in range(2):
            compiled(*split(tree, arrays="all"))
        if len(traces) != 1:
            raise _BrokenError("equal trees are traced twice. Give them equal aux")


def _check_pickling(tree: Any) -> None:
    paths = view_nested(tree).plan.paths
    if isinstance(view_nested(tree).structure, jax.tree_util.PyTreeDef):
        return  # JAX rebuilds it, and its nodes decide
    try:
        pickle.dumps(tree)
    except (pickle.PickleError, AttributeError, TypeError):  # nothing is promised
        return
    params, rest = split(tree, arrays="all")
    hint = "define unflatten, and the classes in aux, in a module: "
    with _law("pickling", "", tree, before=hint):
        again = merge(params, pickle.loads(pickle.dumps(rest)))
        if view_nested(again).plan.paths != paths:
            raise _BrokenError("other paths come back")


def _texts(keys: Any) -> list[str]:
    return ["" if key is BOX else segment(key) for key in keys]


class _BrokenError(Exception):
    """What breaks a law."""


@contextlib.contextmanager
def _law(law: str, path: str, node: Any, *, before: str = "") -> Iterator[None]:
    """Say that a law does not hold if anything is raised inside.

    Args:
        law: its name.
        path: where it does not hold.
        node: what is there.
        before: what it may mean if an adapter raises, not ``_BrokenError``.

    Raises:
        AdapterError: instead of what was raised.
    """
    try:
        yield
    except Exception as error:  # of code that is the caller's
        what = str(error).removesuffix(".")
        if not isinstance(error, _BrokenError):
            what = f"{before}{type(error).__name__}: {what}"
        raise AdapterError(
            f"Law {law!r} does not hold for the {type(node).__name__} at {path!r}: "
            f"{what}."
        ) from error
