"""States of optimizers that look as if some steps had been taken, without taking them.

For tests of what becomes of a state, whatever made it.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings

#: Before a change, and as many after it; ``MultiSteps`` is amid its three with each.
STEPS = 4 if settings.default.max_examples >= 2_000 else 2


def aged(tx: Any, params: Any) -> tuple[Any, Any]:
    """Return params, and a state of theirs with numbers in it and counts of ``STEPS``.

    No two leaves have the same numbers, and none is 0.
    """
    seeds = itertools.count(1)

    def filled(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(next(seeds))
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.asarray(np.full(leaf.shape, STEPS, leaf.dtype))
        numbers = np.arange(1, leaf.size + 1).reshape(leaf.shape)
        return jnp.asarray(np.sin(numbers + next(seeds)) ** 2).astype(leaf.dtype)

    return params, jax.tree.map(filled, jax.eval_shape(tx.init, params))
