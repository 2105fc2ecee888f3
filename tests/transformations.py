"""One of each kind of Optax transformation, to test a wrapper of all of them.

Every optimizer that Optax ships is in ``docs/compatibility.md``; these make different
demands on a wrapper: callbacks, extra arguments, state that drifts, noise per leaf,
masks, a separate class for params.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from programs import Case

LINE_SEARCH = ("value", "grad", "value_fn")


def _lbfgs_backtracking():
    search = optax.scale_by_backtracking_linesearch(3, store_grad=True)
    return optax.lbfgs(memory_size=2, linesearch=search)


def _noise():
    return optax.chain(
        optax.add_noise(0.1, 0.55, key=jax.random.key(0)), optax.sgd(0.1)
    )


def _multi_steps():
    return optax.MultiSteps(optax.chain(optax.zero_nans(), optax.adam(0.1)), 2)


def _lookahead(*, reset_state: bool = False):
    fast = optax.chain(optax.zero_nans(), optax.adam(0.1))
    return optax.lookahead(fast, 2, 0.5, reset_state=reset_state)


def _sam(*, opaque_mode: bool = False):
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    return optax.contrib.sam(
        optax.adam(0.1), optax.chain(optax.zero_nans(), ascent), opaque_mode=opaque_mode
    )


def _injected():
    return optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(0.1, 0.01, 5), weight_decay=0.5
    )


def _biggest(updates):
    return jnp.max(jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(updates)]))


CASES = (
    Case("adamw", lambda: optax.adamw(0.1, weight_decay=0.5)),
    Case(
        "global norm",
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lion(0.1)),
    ),
    Case("momentum", lambda: optax.sgd(0.1, momentum=0.9, nesterov=True)),
    Case("noise", _noise),
    Case("adafactor", lambda: optax.adafactor(0.1, min_dim_size_to_factor=2)),
    Case("sm3", lambda: optax.sm3(0.1)),
    Case("lamb", lambda: optax.lamb(0.1, weight_decay=0.5)),
    Case("lbfgs", lambda: optax.lbfgs(memory_size=2), LINE_SEARCH),
    Case("lbfgs, backtracking", _lbfgs_backtracking, LINE_SEARCH),
    Case("lbfgs, no search", lambda: optax.lbfgs(0.1, linesearch=None)),
    Case("MultiSteps", _multi_steps),
    Case("lookahead", _lookahead, lookahead=True),
    Case("lookahead, reset", lambda: _lookahead(reset_state=True), lookahead=True),
    Case("apply_if_finite", lambda: optax.apply_if_finite(optax.adam(0.1), 3)),
    Case("flatten", lambda: optax.flatten(optax.adam(0.1))),
    Case("schedule_free", lambda: optax.contrib.schedule_free_adamw(0.1)),
    Case("sam", _sam),
    Case("sam, opaque", lambda: _sam(opaque_mode=True), ("grad_fn",)),
    Case("muon", lambda: optax.contrib.muon(0.1)),
    Case("galore", lambda: optax.contrib.galore(0.1, rank=1)),
    Case("reduce_on_plateau", lambda: optax.contrib.reduce_on_plateau(), ("value",)),
    Case("inject_hyperparams", _injected),
    Case(
        "masked",
        lambda: optax.masked(optax.adam(0.1), lambda p: jax.tree.map(jnp.ndim, p)),
    ),
    Case(
        "named_chain",
        lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(0.1))),
    ),
    Case("polyak", optax.polyak_sgd, ("value",)),
    Case("sophia", lambda: optax.contrib.sophia(0.1, update_interval=1), ("obj_fn",)),
    Case("prodigy", optax.contrib.prodigy),
    Case("mechanize", lambda: optax.contrib.mechanize(optax.adam(0.1))),
    Case("complex", lambda: optax.contrib.split_real_and_imaginary(optax.adam(0.1))),
    Case("monitor", lambda: optax.chain(optax.monitor({"biggest": _biggest}), _sam())),
)

BY_NAME = {case.name: case for case in CASES}
