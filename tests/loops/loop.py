"""The loops of ``docs/libraries/loops``: what each must do, and a look inside.

A section of those pages is a program with ``train(tx)``, ``groups`` and ``rules``. What
the rules should do is written here once more, without treeadapt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

#: Makes an optimizer from those of the groups, with Optax alone.
Theirs = Callable[[Mapping[str, Any]], optax.GradientTransformation]


class Section(NamedTuple):
    """What the loop of one section must do.

    Attributes:
        needs: distributions that must be installed.
        theirs: what the partition does, without treeadapt.
        still: label paths of the frozen leaves, and which part of each is frozen.
        misspelt: a pattern that looks like one of the rules and matches nothing.
        file: where the state is saved.
    """

    needs: tuple[str, ...]
    theirs: Theirs
    still: Mapping[str, Any]
    misspelt: str
    file: str = "state.safetensors"


def by_place(label: Callable[[str], str]) -> Theirs:
    """Optax's own partition, with labels by the place of a leaf as JAX prints it."""

    def labels(tree: Any) -> Any:
        return jax.tree.map_with_path(
            lambda place, _: label(jax.tree_util.keystr(place)), tree
        )

    def make(groups: Mapping[str, Any]) -> optax.GradientTransformation:
        return optax.partition({**groups, "frozen": optax.set_to_zero()}, labels)

    return make


def flow(groups: Mapping[str, Any]) -> optax.GradientTransformation:
    """Optax cannot label layers of an array: the updates of the first become zero."""

    def without_first(updates: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map_with_path(
            lambda place, leaf: leaf if is_base(place) else leaf.at[:1].set(0), updates
        )

    def is_base(place: Any) -> bool:
        return jax.tree_util.keystr(place).startswith(".base_dist")

    partition = by_place(lambda place: "base" if ".base_dist" in place else "layers")
    return optax.chain(partition(groups), optax.stateless(without_first))


def spring(groups: Mapping[str, Any]) -> optax.GradientTransformation:
    """Optax gives a line search the masked params: the two groups, written out."""
    physics, field = groups["physics"], groups["field"]

    def init(params: Any) -> Any:
        return physics.init(params.physics), field.init(params.field)

    def update(
        updates: Any, state: Any, params: Any, *, value: Any, grad: Any, value_fn: Any
    ) -> Any:
        def value_of_physics(numbers: Any) -> Any:
            return value_fn(type(params)(physics=numbers, field=params.field))

        numbers, first = physics.update(
            updates.physics,
            state[0],
            params.physics,
            value=value,
            grad=grad.physics,
            value_fn=value_of_physics,
        )
        network, second = field.update(updates.field, state[1])
        place, change = jax.tree_util.keystr, jax.tree.map_with_path
        network = change(
            lambda keys, leaf: 0 * leaf if ".layers[0]" in place(keys) else leaf,
            network,
        )
        parts = {"physics": numbers, "field": network}
        return type(updates)(**parts), (first, second)

    return optax.GradientTransformationExtraArgs(init, update)


def of_numpyro(place: str) -> str:
    slow = "slow" if place == "['bias']" else "fast"
    return "frozen" if place == "['noise_auto_scale']" else slow


def of_gpjax(place: str) -> str:
    kernel = "kernel" if ".kernel" in place else "rest"
    return "frozen" if ".obs_stddev" in place else kernel


def of_netket(place: str) -> str:
    slow = "slow" if "bias" in place else "fast"
    return "frozen" if place == "['visible_bias']" else slow


def of_dynamax(place: str) -> str:
    fast = "fast" if place == ".emissions.means" else "slow"
    return "frozen" if place.startswith(".transitions") else fast


def of_sbx(place: str) -> str:
    slow = "slow" if "bias" in place else "fast"
    return "frozen" if "Dense_0" in place else slow


def of_blackjax(place: str) -> str:
    means = "means" if place.startswith("[0]") else "scales"
    return "frozen" if place == "[1]['bias']" else means


def of_brax(place: str) -> str:
    fast = "fast" if place.startswith(".policy") else "slow"
    return "frozen" if fast == "fast" and "hidden_0" in place else fast


def of_tunix(place: str) -> str:
    fast = "fast" if "lora_a" in place else "slow"
    return "frozen" if place.startswith("['layers'][0]") else fast


CONDITIONER = "bijection/bijection/bijection/bijections/0/conditioner/layers"
BRAX = Section(
    ("brax",),
    by_place(of_brax),
    {"policy/params/hidden_0/bias": ..., "policy/params/hidden_0/kernel": ...},
    "policy/hidden_0",
)
SECTIONS = {
    "NumPyro": Section(
        ("numpyro",), by_place(of_numpyro), {"noise_auto_scale": ...}, "nosie_*_scale"
    ),
    "FlowJAX": Section(
        ("flowjax",),
        flow,
        {
            f"{CONDITIONER}/{layer}/{name}": np.s_[:1]
            for layer in range(2)
            for name in ("bias", "weight")
        },
        "bijection/bijection/bijection/3",
    ),
    "GPJax": Section(
        ("gpjax",),
        by_place(of_gpjax),
        {"likelihood/obs_stddev/_unconstrained": ...},
        "likelyhood",
    ),
    "NetKet": Section(
        ("netket",),
        by_place(of_netket),
        {"visible_bias": ...},
        "visible_bais",
        file="state",
    ),
    "Dynamax": Section(
        ("dynamax",),
        by_place(of_dynamax),
        {"transitions/transition_matrix": ...},
        "transition",
    ),
    "sbx": Section(
        ("sbx-rl",),
        by_place(of_sbx),
        {"params/Dense_0/bias": ..., "params/Dense_0/kernel": ...},
        "Dense_0",
    ),
    "BlackJAX": Section(
        ("blackjax",), by_place(of_blackjax), {"1/bias": ...}, "rho/bias"
    ),
    "Optimistix and diffrax": Section(
        ("optimistix", "diffrax"),
        spring,
        {"field/layers/0/weight": ..., "field/layers/0/bias": ...},
        "feild/layers/0",
    ),
    "Brax": BRAX,
    "A whole `ppo.train`": BRAX,
    "Tunix": Section(
        ("google-tunix",),
        by_place(of_tunix),
        {"layers/0/lora/lora_a": ..., "layers/0/lora/lora_b": ...},
        "layer/0",
    ),
}


@dataclasses.dataclass(eq=False)
class Watched:
    """An optimizer that remembers what the loop hands it, also in compiled code.

    Attributes:
        inner: the optimizer that is watched.
        first: the params that ``init`` was called with.
        state: its last state.
        steps: how many updates there were.
    """

    inner: optax.GradientTransformation
    first: Any = None
    state: Any = None
    steps: int = 0

    @property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer for the loop."""
        inner = optax.with_extra_args_support(self.inner)

        def init(params: Any) -> Any:
            jax.debug.callback(self._started, params)
            return inner.init(params)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            updates, state = inner.update(updates, state, params, **extra)
            jax.debug.callback(self._stepped, state)
            return updates, state

        return optax.GradientTransformationExtraArgs(init, update)

    def _started(self, params: Any) -> None:
        self.first = jax.tree.map(np.asarray, params)

    def _stepped(self, state: Any) -> None:
        self.state = jax.tree.map(np.asarray, state)
        self.steps += 1
