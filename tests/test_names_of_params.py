"""Params may be called as fields, hyperparameters, groups and stages are.

One law: with such names every answer is the one that names of no meaning get, but for
the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

#: Names of hyperparameters, of fields, of places in a chain, of groups and of links.
NAMES = (
    *("b1", "b2", "eps", "learning_rate", "count", "value", "grad", "mu", "nu"),
    *("0", "1", "inner_state", "inner_states", "hyperparams", "info", "trace", "x"),
)
PLAIN = tuple(f"w{place}" for place in range(len(NAMES)))
#: Arrays that differ in size, so that no answer fits the wrong one.
SIZES = range(2, 2 + len(NAMES))
STACKED = [(4, size, 3) if size % 2 else (4, size) for size in SIZES]

TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "inject": lambda: ta.inject_hyperparams(optax.adam)(1e-2),
    "injected by Optax": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    "chain": lambda: optax.named_chain(("x", optax.adam(1e-2)), ("b1", optax.trace(1))),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


def arrays(names: tuple[str, ...], shapes: Any) -> dict[str, Any]:
    """Params of some shapes, in the same order whatever their names are."""
    return {
        name: jnp.full(shape, 1.0 + place)
        for place, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }


def plainly(tree: Any, names: tuple[str, ...]) -> Any:
    """Leaves and names as with harmless names, sorted: last key of each leaf."""
    to_plain = dict(zip(names, PLAIN, strict=True))

    def text(keys: Any) -> str:
        *above, key = keys
        name = getattr(key, "key", None)
        path = jax.tree_util.keystr((*above,))
        names_itself = path.endswith("hyperparams")
        return path + str(key if names_itself else to_plain.get(name, key))

    leaves = [(text(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(tree)]
    return sorted(leaves, key=lambda pair: pair[0])


def adapted(tx: Any, names: tuple[str, ...]) -> Any:
    """A state that was made for every second param, and updates for all of them."""
    params = arrays(names, [(size,) for size in SIZES])
    tx = ta.adapt(tx)
    part = dict(list(params.items())[::2])

    @jax.jit  # one program, not one for each size
    def step(part: Any, params: Any) -> Any:
        return tx.update(part, tx.init(part), params, **searched(params))[0]

    return step(part, params)


def searched(params: Any) -> dict[str, Any]:
    def value_fn(params: Any) -> Any:
        return sum(jnp.sum(leaf) for leaf in params.values())

    return {"value": jnp.float32(1), "grad": params, "value_fn": value_fn}


def placed(tx: Any, names: tuple[str, ...]) -> Any:
    params = arrays(names, [(size, size + 1) for size in SIZES])
    specs = {name: P(f"axis {place}", None) for place, name in enumerate(params)}
    return ta.opt_state_shardings(tx, params, specs)


def mapped(tx: Any, names: tuple[str, ...]) -> Any:
    params = arrays(names, [(size,) for size in SIZES])
    numbers = {name: place for place, name in enumerate(params)}
    state = tx.init(params)
    return ta.tree_map_params(
        tx, lambda _, number: number, state, numbers, transform_non_params=lambda _: -1
    )


def layered(tx: Any, names: tuple[str, ...]) -> Any:
    tx = ta.per_layer(tx, {"": ("all_{l}", 0)})
    params = arrays(names, STACKED)
    return jax.jit(lambda x: tx.update(x, tx.init(x), x))(params)


def carried(tx: Any, names: tuple[str, ...]) -> Any:
    params = arrays(names, [(size,) for size in SIZES])
    first, *_ = names
    groups = ta.partition({"mu": tx, "b2": tx}, {first: "mu", "**": "b2"})
    saved = jax.jit(groups.init)(params)
    grown = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.float32 else x, saved)
    state, report = ta.carry_state(ta.adapt(tx), params, grown)
    assert not report.fresh, str(report)
    back, report = ta.carry_state(groups, params, state)
    assert not report.fresh, str(report)
    return state, back


ANSWERS = {"adapted": adapted, "placed": placed, "mapped": mapped}
LAYERED = [n for n in TRANSFORMATIONS if n not in ("lbfgs", "adafactor")]
CASES = [
    *((answer, tx) for answer in ANSWERS.values() for tx in TRANSFORMATIONS),
    *((layered, tx) for tx in LAYERED),
    *((carried, tx) for tx in ("adam", "inject", "MultiSteps", "chain")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "name"),
    [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in CASES],
)
def test_names_of_params_decide_nothing(answer, name):
    evil, harmless = (
        plainly(answer(TRANSFORMATIONS[name](), names), names)
        for names in (NAMES, PLAIN)
    )
    assert [text for text, _ in evil] == [text for text, _ in harmless]
    for (text, one), (_, two) in zip(evil, harmless, strict=True):
        if isinstance(one, P | int):
            assert one == two, text
        else:
            np.testing.assert_array_equal(one, two, text)
