"""Whether a transformation does the same on two trees, judged by the traced programs.

``Step`` is one update of a transformation as a function of flat dicts, whatever tree
the transformation itself gets. Two steps whose programs have the same text compute the
same bits, compiled or not, so a table of hundreds of pairs costs only traces.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeadapt as ta
from treeadapt.trees.views import view_tree

Flat = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One transformation, and what its update needs.

    Attributes:
        name: of the transformation; the test id.
        make: returns it.
        extra: names of the extra arguments of its update.
        lookahead: its params are ``LookaheadParams``.
    """

    name: str
    make: Callable[[], Any]
    extra: tuple[str, ...] = ()
    lookahead: bool = False


def loss(tree: Any) -> jax.Array:
    """A sum over the leaves that train, in the order of their paths."""
    flat = ta.split(tree)[0]
    parts = [jnp.sum(jnp.abs(flat[path] - 0.25) ** 2) for path in sorted(flat)]
    return sum(part.astype(jnp.float32) for part in parts)


def like(tree: Any, flat: Mapping[str, Any], *, other: Any = None) -> Any:
    """The tree with the leaves of ``flat``, and ``other`` for every other leaf."""
    view = view_tree(tree)
    return view.rebuild([flat.get(path, other) for path in view.plan.paths])


def put(tree: Any, flat: Mapping[str, Any]) -> Any:
    """The tree with the leaves of ``flat`` in their places."""
    view = view_tree(tree)
    pairs = zip(view.plan.paths, view.leaves, strict=True)
    return view.rebuild([flat.get(path, leaf) for path, leaf in pairs])


def numbers(flat: Mapping[str, Any], seed: float) -> Flat:
    """Numbers of all sizes and signs in the shapes and dtypes of ``flat``."""
    found = {}
    for index, (path, leaf) in enumerate(sorted(flat.items())):
        steps = 0.7 * np.arange(1, leaf.size + 1).reshape(leaf.shape)
        values = np.sin(seed + index + steps) * 3.0 ** (index % 4)
        found[path] = jnp.asarray(values.astype(leaf.dtype))
    return found


def flat_params(tree: Any, seed: float = 0.5) -> Flat:
    """The arrays of a tree that train, with numbers in them."""
    return numbers(ta.split(tree)[0], seed)


class Step:
    """One update as a function of flat dicts.

    Args:
        case: what the update needs. tree: the transformation gets trees with this
        structure. tx: the transformation. cast_back: cast integers in the state to the
        dtypes that they had.
    """

    def __init__(self, case: Case, tree: Any, tx: Any, *, cast_back: bool = False):
        self.case, self.tree, self.tx = case, tree, tx
        self.cast_back = cast_back

    def params(self, flat: Flat) -> Any:
        params = put(self.tree, flat)
        return optax.LookaheadParams(params, params) if self.case.lookahead else params

    def init(self, flat: Flat) -> Any:
        return self.tx.init(self.params(flat))

    def __call__(self, grads: Flat, state: Any, params: Flat) -> tuple[Flat, Any]:
        full, gradients = self.params(params), like(self.tree, grads)
        extra = {name: _EXTRA[name](gradients) for name in self.case.extra}
        updates, new = self.tx.update(gradients, state, full, **extra)
        return flat_updates(updates), cast_back(state, new) if self.cast_back else new


def reference(case: Case, flat: Flat) -> Step:
    """Optax itself on the flat dict."""
    return Step(case, flat, case.make(), cast_back=True)


def _gradients(params: Any, index: Any = 0) -> Any:
    flat = ta.split(params)[0]
    return like(params, {path: leaf * 0.5 for path, leaf in sorted(flat.items())})


_EXTRA: dict[str, Callable[[Any], Any]] = {
    "grad": lambda gradients: gradients,
    "grad_fn": lambda _: _gradients,
    "loss": lambda _: jnp.float32(2.0),
    "obj_fn": lambda _: loss,
    "value": lambda _: jnp.float32(2.0),
    "value_fn": lambda _: loss,
}


def cast_back(old: Any, new: Any) -> Any:
    """The new state with integers and booleans in the dtypes of the old one."""

    def cast(keys: Any, leaf: Any) -> Any:
        dtype = known.get(jax.tree_util.keystr(keys), leaf.dtype)
        exact = not any(jnp.issubdtype(d, jnp.inexact) for d in (dtype, leaf.dtype))
        return leaf.astype(dtype) if exact and dtype != leaf.dtype else leaf

    paths = jax.tree.leaves_with_path(old)
    known = {jax.tree_util.keystr(keys): leaf.dtype for keys, leaf in paths}
    return jax.tree.map_with_path(cast, new)


def flat_updates(updates: Any) -> Flat:
    """Updates by path; those of both halves for lookahead."""
    if isinstance(updates, optax.LookaheadParams):
        halves = updates._asdict().items()
        return {
            f"{half}:{path}": leaf
            for half, tree in halves
            for path, leaf in flat_updates(tree).items()
        }
    leaves = ta.to_flat_dict(updates).items()
    return {path: leaf for path, leaf in leaves if eqx.is_inexact_array(leaf)}


def program(fn: Callable[..., Any], *args: Any) -> str:
    """The program of a function, with the bits of its constants and its output tree."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    consts = [_data(const).tobytes().hex() for const in closed.consts]
    body = re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr))
    return "\n".join([body, *consts, str(jax.tree.structure(shape))])


def bits(tree: Any) -> Any:
    """The structure of a tree, and the dtypes, shapes and bytes of its leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    data = [_data(leaf) for leaf in leaves]
    return treedef, [(one.dtype, one.shape, one.tobytes()) for one in data]


def _data(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)
