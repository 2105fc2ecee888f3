"""Optimizers from files: law 15, what a file may say, and what is said of the rest."""

from __future__ import annotations

import inspect
import json
import tomllib
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from optimizer_configs import CONFIGS, Config
from programs import Case, Step, bits, flat_params, numbers, program
from trees import TREES

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

SGD = {"type": "sgd", "learning_rate": 0.1}
ADAMW = {"type": "adamw", "learning_rate": 0.1, "weight_decay": 0.5, "mask": "**/w"}
PARAMS = {"net": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, "out": jnp.ones(2)}


def one(table: Any, **fields: Any) -> dict[str, Any]:
    """A document with one optimizer, for all leaves."""
    return {"rules": {"**": "all"}, "optimizers": {"all": table}, **fields}


def refused(document: Any, **given: Any) -> str:
    with pytest.raises(ta.RulesFileError) as error:
        ta.load_optimizer(document, **given)
    return str(error.value)


def train(tx: Any, flat: Any, whole: Any = None) -> Any:
    """The params after three steps with made-up gradients, and the state.

    Those gradients are of a ``whole`` model of which the params may be a part.
    """
    state, whole = tx.init(flat), whole or flat

    @jax.jit
    def step(flat: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, flat)
        return optax.apply_updates(flat, updates), state

    for number in range(3):
        grads = numbers(whole, number)
        flat, state = step(flat, state, {path: grads[path] for path in flat})
    return flat, state


# Law 15


#: JAX takes these apart, and so Optax can train them.
ROWS = [row for row in TREES if not row.opaque]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_law_15_the_file_is_the_program_and_the_state_of_partition(row):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.TreeAdaptWarning)
        tree = row.make()
        flat = flat_params(tree)
        if not flat:
            pytest.skip("no array trains")
        adamw = ADAMW | {"mask": ["!**/b"]}
        document = one([{"type": "clip", "max_delta": 1}, adamw])
        mask = {path: path.rpartition("/")[2] != "b" for path in flat}
        by_hand = optax.chain(
            optax.clip(1), optax.adamw(0.1, weight_decay=0.5, mask=mask)
        )
        if all(mask.values()):
            document["optimizers"]["all"][1]["mask"] = True
        texts = []
        for tx in (
            ta.load_optimizer(document),
            ta.partition({"all": by_hand}, {"**": "all"}),
        ):
            step = Step(Case("", lambda: None), tree, tx)
            state = jax.eval_shape(step.init, flat)
            texts.append(program(step, flat, state, flat))
        assert texts[0] == texts[1]


#: The others train only in ``make test-slow``.
FAST = ("GPT-2, clipped", "openpi", "Muon, axes", "Brax, injected")


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            each,
            id=each.name,
            marks=() if each.name.startswith(FAST) else pytest.mark.slow,
        )
        for each in CONFIGS
    ],
)
def test_law_15_a_configuration_trains_as_optax_by_hand(config: Config, tmp_path):
    shapes = {path: np.zeros(shape, "f") for path, shape in config.shapes.items()}
    params = numbers(shapes, 0.5)
    labels = {path: config.label(path) for path in params}
    file = tmp_path / "optimizer.toml"
    file.write_text(f"version = 1\n{config.toml}")
    ours, state = train(ta.load_optimizer(file, **config.given), params)
    mapping = tomllib.loads(config.toml)
    again = ta.load_optimizer(mapping, **config.given)
    assert_same_shapes(again.init(params), state)
    trains = {path: x for path, x in params.items() if labels[path] != "frozen"}
    by_hand = config.by_hand({path: labels[path] for path in trains})
    theirs, _ = train(by_hand, trains, params)
    moved = {path: x for path, x in ours.items() if path in trains}
    assert bits(moved) == bits(theirs)
    still = params.keys() - trains.keys()
    assert bits([ours[path] for path in still]) == bits([params[p] for p in still])
    assert not all(np.array_equal(ours[path], params[path]) for path in trains)


def assert_same_shapes(one: Any, two: Any) -> None:
    assert jax.eval_shape(lambda: one) == jax.eval_shape(lambda: two)


def test_there_are_twenty_configurations():
    assert len({config.name for config in CONFIGS}) >= 20


# Every type


def returned(function: Any) -> Any:
    result = inspect.signature(function).return_annotation
    if isinstance(result, type) and issubclass(result, optax.GradientTransformation):
        return "transformation"
    return "schedule" if result == optax.Schedule else ""


EXPORTS = {
    name: value
    for module in (optax, optax.contrib)
    for name, value in vars(module).items()
    if not name.startswith("_") and inspect.isfunction(value)
}
REFUSED = [
    "chain",
    "named_chain",
    "multi_transform",
    "freeze",
    "selective_transform",
    "conditionally_mask",
    "conditionally_transform",
    "stateless",
    "stateless_with_tree_map",
    "measure_with_ema",
    "snapshot",
    "with_extra_args_support",
]
WITHOUT_ANNOTATION = ("dog", "dowg", "scale_by_factored_rms")
TYPES = sorted(
    name
    for name, value in EXPORTS.items()
    if (returned(value) or name in WITHOUT_ANNOTATION) and name not in REFUSED
)
#: What arguments without a default are, as a file has them.
REQUIRED = {
    **dict.fromkeys(("inner", "fast_optimizer", "base_optimizer"), SGD),
    **dict.fromkeys(("optimizer", "adv_optimizer"), SGD),
    **dict.fromkeys(("learning_rate", "clipping", "eta", "slow_step_size"), 0.1),
    **dict.fromkeys(("threshold", "max_norm", "max_delta", "l2_norm_clip"), 1.0),
    **dict.fromkeys(("decay", "gamma", "power", "decay_rate", "end_value"), 0.5),
    **dict.fromkeys(("init_value", "peak_value", "value", "noise_multiplier"), 0.5),
    **dict.fromkeys(("sync_period", "max_consecutive_errors", "seed"), 3),
    **dict.fromkeys(("max_backtracking_steps", "max_linesearch_steps"), 3),
    **dict.fromkeys(("warmup_steps", "transition_steps"), 5),
    "decay_steps": 20,
    "step_size": -0.1,
    "mask": "**",
    "step_size_fn": {"type": "constant_schedule", "value": 0.1},
    "interpolate_type": "linear",
    "schedules": [{"type": "constant_schedule", "value": 0.1}],
    "boundaries": [],
    "cosine_kwargs": [
        {"init_value": 0, "peak_value": 1, "decay_steps": 9, "warmup_steps": 2}
    ],
}


def as_data(value: Any) -> Any:
    """A default as a file has it; a function has no such form."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [as_data(each) for each in value]
    if isinstance(value, type):
        return jnp.dtype(value).name
    return "none" if value is None else value


def with_defaults(name: str) -> tuple[dict[str, Any], int]:
    """A table that says all that a type would do anyway; how many defaults it has."""
    table, count = {"type": name}, 0
    for parameter in inspect.signature(EXPORTS[name]).parameters.values():
        default = as_data(parameter.default)
        if parameter.default is parameter.empty:
            table[parameter.name] = REQUIRED[parameter.name]
        elif isinstance(default, bool | int | float | str | list):
            table[parameter.name], count = default, count + 1
    return table, count


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_read_with_all_its_defaults(name):
    if name == "partition":
        assert "goes into [optimizer]" in refused(one({"type": name}))
        return
    table, _ = with_defaults(name)
    if name == "join_schedules":
        table |= {"boundaries": [5], "schedules": 2 * table["schedules"]}
    if returned(EXPORTS[name]) == "schedule":
        table = {"type": "scale_by_schedule", "step_size_fn": table}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Specifying a key|.*is deprecated")
        tx = ta.load_optimizer(one(table))
    shapes = jax.eval_shape(tx.init, PARAMS)
    assert isinstance(shapes, optax.transforms.PartitionState)


def test_the_types_are_those_of_the_tested_optax():
    if optax.__version__ not in ("0.2.7", "0.2.8"):
        pytest.skip("another Optax")
    assert len(TYPES) == 125
    counts = [with_defaults(name)[1] for name in TYPES if name != "partition"]
    assert sum(counts) > 450


@pytest.mark.parametrize("name", [*REFUSED, "inject_hyperparams"])
def test_a_refused_type_says_what_to_write(name):
    text = refused(one({"type": name}))
    assert f"there is no type {name!r}; " in text
    assert "did you mean" not in text


# What a file may say


def test_state_and_update_of_one_file_in_every_form(tmp_path):
    ml_collections = pytest.importorskip("ml_collections")
    document = {
        "rules": {"net/b": "frozen", "**": "all"},
        "given": {"rate": 0.1},
        "optimizers": {"all": {**ADAMW, "learning_rate": {"given": "rate"}}},
    }
    file = tmp_path / "optimizer.json"
    file.write_text(json.dumps({"version": 1, **document}))
    pairs = {**document, "rules": [*document["rules"].items()]}
    frozen = types.MappingProxyType(document)
    config = ml_collections.ConfigDict(pairs)
    expected = ta.partition(
        {"all": optax.adamw(0.1, weight_decay=0.5, mask=ta.glob("**/w"))},
        document["rules"],
    )
    before = json.dumps(document)
    flat = ta.to_flat_dict(PARAMS)
    want = bits(train(expected, flat))
    for form in (file, str(file), document, frozen, pairs, config, config.to_dict()):
        assert bits(train(ta.load_optimizer(form), flat)) == want
    assert json.dumps(document) == before
    with pytest.raises(ta.RulesFileError, match=r"lose their order.*Write pairs"):
        ta.load_optimizer(ml_collections.ConfigDict(one(SGD)))
