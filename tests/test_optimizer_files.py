"""Optimizers from files: law 15, what a file may say, and what is said of the rest."""

from __future__ import annotations

import copy
import datetime
import inspect
import json
import random
import re
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
from sizes import some
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


@pytest.mark.parametrize("row", some(ROWS), ids=lambda row: row.name)
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


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: each.name)
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


GROUPED = [config for config in CONFIGS if "[optimizers." in config.toml]


@pytest.mark.parametrize("config", GROUPED, ids=lambda config: config.name)
def test_law_15_a_file_is_the_one_with_shared_arguments_written_out(config: Config):
    written_out = tomllib.loads(config.toml)
    tables = [
        table
        for each in written_out.get("optimizers", {}).values()
        for table in (each if isinstance(each, list) else [each])
    ]
    each: dict[str, Any] = {}
    for name in {name for table in tables for name in table}:
        values = [table.get(name) for table in tables if name in arguments_of(table)]
        if name not in KEPT and values and all(x == values[0] for x in values):
            each[name] = values[0]
    document = copy.deepcopy(written_out)
    for table in document.get("optimizers", {}).values():
        for call in table if isinstance(table, list) else [table]:
            for name in each:
                call.pop(name, None)
    fields = {"each": each} if each else {}
    shapes = {path: np.ones(shape, "f") for path, shape in config.shapes.items()}
    texts = []
    for data in (written_out, {**document, **fields}):
        tx = ta.load_optimizer(data, **config.given)
        state = tx.init(shapes)
        texts.append((str(jax.make_jaxpr(tx.update)(shapes, state, shapes)), state))
    assert texts[0][0] == texts[1][0]
    assert_same_shapes(texts[0][1], texts[1][1])


def arguments_of(table: dict[str, Any]) -> set[str]:
    modules = (optax, optax.contrib, ta)
    functions = (getattr(module, table["type"], None) for module in modules)
    function = next(filter(None, functions), None)
    return {*inspect.signature(function).parameters} if function else set()


#: What ``[each]`` may not hold.
KEPT = ("type", "inject", "learning_rate", "weight_decay", "mask")


SHARED = {
    "rules": {"**/bias": "a", "**": "b"},
    "optimizers": {"a": [SGD], "b": {**ADAMW, "b2": 0.9}},
}


@pytest.mark.parametrize(
    ("each", "says"),
    [
        (
            {"learning_rate": 1.0},
            "each.learning_rate: groups differ in it; write it in",
        ),
        ({"lr": 1.0}, "each.lr: groups differ in it"),
        ({"weight_decay": 1.0}, "each.weight_decay: groups differ in it"),
        ({"mask": "**"}, "each.mask: groups differ in it"),
        ({"weight_decay_mask": "**"}, "each.weight_decay_mask: groups differ in it"),
        ({"type": "adam"}, "each.type: groups differ in it"),
        ({"inject": ["eps"]}, "each.inject: groups differ in it"),
        (
            {"b3": 0.9},
            "each.b3: no table of [optimizers] has such an argument; known:",
        ),
        ({"beta1": 0.9}, "did you mean 'b1'?"),
        (
            {"b2": 0.9},
            "each.b2: each table that has it gives a value of its own; remove",
        ),
        ({"b1": 1.5}, "each.b1: 1.5 is not less than 1"),
        ({"b1": {"given": "x"}}, "each.b1: nobody gives 'x'; pass x=, or write it in"),
        (3, "'each' is not a table. Write [each] above b2 = 0.95."),
    ],
)
def test_what_is_wrong_with_shared_arguments_is_said_once(each, says):
    with pytest.raises(ta.RulesFileError) as caught:
        ta.load_optimizer({**SHARED, "each": each})
    text = " ".join(str(caught.value).split())
    assert says in text
    assert text.count("each.") <= 1


def test_arguments_are_shared_with_nothing_inside_a_table():
    nested = {
        "rules": {"**": "all"},
        "each": {"b1": 0.5},
        "optimizers": {"all": {"type": "MultiSteps", "opt": ADAMW}},
    }
    nested["optimizers"]["all"]["every_k_schedule"] = 2
    with pytest.raises(ta.RulesFileError, match=r"each\.b1: no table of"):
        ta.load_optimizer(nested)
    around = {"each": {"b1": 0.5}, "optimizer": ADAMW}
    with pytest.raises(ta.RulesFileError, match=r"each\.b1: there is no table in"):
        ta.load_optimizer(around)


def test_an_injected_argument_may_be_shared():
    adamw = {**ADAMW, "inject": ["b1"]}
    document = {
        "rules": {"**": "all"},
        "each": {"b1": 0.5},
        "optimizers": {"all": adamw},
    }
    state = ta.load_optimizer(document).init({"w": np.ones(2, "f")})
    assert float(ta.tree_get(state, "b1")) == 0.5


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


@pytest.mark.parametrize("name", some(TYPES))
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


@pytest.mark.slow
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


def test_an_outermost_multi_steps_keeps_its_methods():
    for rules in ({"net": "frozen", "**": "all"}, {"**": "all"}):
        root = {"type": "MultiSteps", "every_k_schedule": 2, "opt": SGD}
        tx = ta.load_optimizer({"rules": rules, "optimizer": root})
        state = tx.init(PARAMS)
        assert not tx.has_updated(state)
        trains = ["out"] if "net" in rules else ["net/b", "net/w", "out"]
        assert [*state.acc_grads] == trains


FLAT = ta.to_flat_dict(PARAMS)


@pytest.mark.slow
def test_given_values_replace_those_of_the_file():
    table = {"type": "sgd", "learning_rate": {"given": "rate"}}
    steps = {"given": "steps"}
    rate = {"type": "linear_schedule", "init_value": 1.0, "end_value": 0.0}
    document = one(table, given={"rate": rate | {"transition_steps": steps}})
    by_hand = optax.linear_schedule(1.0, 0.0, 4)

    def bits_of(**given):
        return bits(train(ta.load_optimizer(document, **given), FLAT)[0])

    want = bits(train(optax.sgd(by_hand), FLAT)[0])
    assert bits_of(steps=4) == want
    assert bits_of(steps=4, rate=by_hand) == want  # steps counts as mentioned
    assert bits_of(rate=by_hand) == want
    assert bits_of(rate=rate | {"transition_steps": 4}) == want
    assert bits_of(rate=jnp.float32(0.5)) == bits_of(rate=0.5)
    assert bits_of(rate={"type": "constant_schedule", "value": steps}, steps=2) != want


@pytest.mark.slow
def test_given_holds_what_a_file_cannot():
    table = {
        "type": "add_noise",
        "eta": 0.1,
        "gamma": 0.5,
        "key": {"given": "key"},
    }
    assert "what only Python has, not the int 3; write key" in refused(
        one(table | {"key": 3})
    )
    tx = ta.load_optimizer(one(table), key=jax.random.key(0))
    by_hand = optax.add_noise(0.1, 0.5, key=jax.random.key(0))
    assert bits(train(tx, FLAT)[0]) == bits(train(by_hand, FLAT)[0])
    nested = ta.load_optimizer(one([{"given": "inner"}, SGD]), inner=optax.clip(1.0))
    by_hand = optax.chain(optax.clip(1.0), optax.sgd(0.1))
    assert bits(train(nested, FLAT)[0]) == bits(train(by_hand, FLAT)[0])


def test_a_mask_decides_on_the_whole_tree():
    model = {"layers": [jnp.ones((2, 2)) for _ in range(3)], "head": jnp.ones(2)}
    table = {"type": "add_decayed_weights", "weight_decay": 1.0}
    table |= {"mask": "layers/{-1}"}  # of the whole tree, not of the group
    tx = ta.load_optimizer(
        {
            "rules": {"layers/2": "a", "**": "b"},
            "optimizers": {"a": table, "b": SGD},
        }
    )
    updates, _ = tx.update(model, tx.init(model), model)
    assert float(updates["layers"][2][0, 0]) == 2.0


def test_carry_state_from_a_run_without_a_root_to_one_with_it():
    document = {
        "rules": {"net/b": "frozen", "**": "all"},
        "optimizers": {"all": {"type": "adamw", "learning_rate": 0.1}},
    }
    clip = {"type": "clip_by_global_norm", "max_norm": 1.0}
    rooted = document | {
        "optimizer": {
            "type": "MultiSteps",
            "every_k_schedule": 2,
            "opt": [clip, {"type": "partition"}],
        }
    }
    _, saved = train(ta.load_optimizer(document), FLAT)
    state, report = ta.carry_state(ta.load_optimizer(rooted), FLAT, saved)
    adam = saved.inner_states["all"][0]
    again = state.inner_opt_state[1].inner_states["all"][0]
    assert bits(again) == bits(adam)
    assert all("inner_states" not in path for path in report.fresh)


def test_one_optimizer_reports_leaves_without_a_rule_as_partition_does():
    document = {"rules": {"net/b": "frozen", "net/w": "all"}, "optimizer": SGD}
    with pytest.raises(ta.UnmatchedPathError, match="out"):
        ta.load_optimizer(document).init(PARAMS)
    # With "frozen" alone the others train.
    tx = ta.load_optimizer({"rules": {"net": "frozen"}, "optimizer": SGD})
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert float(updates["out"][0]) == pytest.approx(-0.1)


# What is said of the rest

CLIP = {"type": "clip_by_global_norm", "max_norm": 1.0}
PART = {"type": "partition"}
LINEAR = {"type": "linear_schedule", "init_value": 1.0, "end_value": 0.0}
BOTH = {"rules": {"net": "a", "**": "b"}, "optimizers": {"a": SGD, "b": SGD}}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        # types
        ({"b1": 0.9}, "optimizers.all: it has no type; write { type = "),
        ({}, "expected an optimizer, not the dict {}; write { type = "),
        ({"type": "adamww"}, "there is no type 'adamww'; did you mean 'adamw'?"),
        ({"type": "torch.optim.AdamW"}, "did you mean 'adamw'?"),
        ({"type": "optax.sgd"}, "did you mean 'sgd'?"),
        ({"_target_": "optax.adamw", "learning_rate": 1}, 'write type = "adamw"'),
        ({"name": "Lion"}, 'write type = "lion"'),
        ("adamw", "expected an optimizer, not the str 'adamw'"),
        (3, "expected an optimizer, not the int 3"),
        ([], "expected an optimizer, not the list []"),
        ([SGD, "clip"], "optimizers.all[1]: expected an optimizer"),
        (LINEAR, "linear_schedule makes a schedule, not a transformation"),
        ({"type": "os.system"}, "there is no type 'os.system'"),
        ({"type": "__class__"}, "there is no type '__class__'"),
        # arguments
        (SGD | {"lr": 1}, "sgd has no argument 'lr'; did you mean 'learning_rate'?"),
        (SGD | {"wd": 1}, "sgd has no argument 'wd'"),
        ({"type": "adam", "lr": 1}, "adam has no argument 'lr'; did you mean"),
        (
            {"type": "adamw", "learning_rate": 1, "betas": [0, 1]},
            "did you mean 'b1', 'b2'?",
        ),
        ({"type": "adamw", "learning_rate": 1, "epsilon": 1}, "did you mean 'eps'?"),
        ({"type": "sgd"}, "optimizers.all: sgd needs 'learning_rate'"),
        ({"type": "identity", "x": 1}, "identity has no argument 'x'"),
        # numbers
        (SGD | {"learning_rate": -1e-3}, "learning_rate: -0.001 is less than 0"),
        (SGD | {"learning_rate": True}, "expected a number, not the bool True"),
        (SGD | {"learning_rate": "1e-3"}, "YAML takes 1e-3 for a text"),
        (SGD | {"learning_rate": "fast"}, "expected a number, not the str 'fast'"),
        (SGD | {"learning_rate": float("nan")}, "is not a finite number"),
        (SGD | {"learning_rate": 10**400}, "is not a finite number"),
        (SGD | {"learning_rate": 10**20}, "more than 2,147,483,647; write 1e+20"),
        (SGD | {"learning_rate": 1e39}, "is not a finite number"),
        (SGD | {"learning_rate": [0.1]}, "expected a number, not the list"),
        (SGD | {"learning_rate": None}, "expected a number, not none"),
        (SGD | {"momentum": LINEAR}, 'write inject = ["momentum"] next to type'),
        (SGD | {"nesterov": "true"}, "expected a bool, not the str 'true'"),
        (SGD | {"nesterov": 1}, "expected a bool, not the int 1"),
        (SGD | {"accumulator_dtype": "bf16"}, "expected a floating-point dtype"),
        (SGD | {"accumulator_dtype": "int8"}, "expected a floating-point dtype"),
        (SGD | {"accumulator_dtype": "1e-3"}, "expected a floating-point dtype"),
        (SGD | {"accumulator_dtype": "(2,)f4"}, "expected a floating-point dtype"),
        ({"type": "apply_every", "k": 0}, "optimizers.all.k: 0 is less than 1"),
        ({"type": "apply_every", "k": 1.5}, "k: 1.5 is not a whole number"),
        ({"type": "apply_every", "k": 2**31}, "is more than 2,147,483,647"),
        ({"type": "lbfgs", "memory_size": 20_000}, "is more than 10,000"),
        ({"type": "scale_by_muon", "ns_steps": 101}, "101 is more than 100"),
        ({"type": "scale_by_lion", "mode": "soft"}, "'soft' is none of 'hard', "),
        ({"type": "polyak_sgd", "variant": "x"}, "'x' is none of 'sps', 'sps+'"),
        ({"type": "dog", "learning_rate": 1, "init_step": ["x", 1]}, "'x' is none of"),
        ({"type": "prodigy", "betas": [0.9]}, "expected a list of length 2"),
        # masks and tables of patterns
        (ADAMW | {"mask": "a**b"}, "optimizers.all.mask: "),
        (ADAMW | {"mask": "re:.*"}, "is a regular expression"),
        (ADAMW | {"mask": ["re:.*"]}, "is a regular expression"),
        (ADAMW | {"mask": []}, "expected a pattern, not the list []"),
        (ADAMW | {"mask": {"a": True}}, "expected a pattern, not the dict"),
        ({"type": "scale_by_rules", "rules": {"re:x": 1}}, "is a regular expression"),
        ({"type": "scale_by_rules", "rules": {}}, "expected a table of patterns"),
        ({"type": "scale_by_rules", "rules": {"**": -1}}, "-1 is less than 0"),
        (
            {
                "type": "scale_by_muon",
                "weight_dimension_numbers": {"**": {"reduction": 0}},
            },
            "expected a table of axes, or none, not the dict",
        ),
        ({"type": "per_layer", "tx": SGD}, "per_layer needs 'stacks'"),
        ({"type": "per_layer", "tx": SGD, "stacks": {"a": 1.5}}, "optimizers.all"),
        # schedules
        (SGD | {"learning_rate": {"type": "linear"}}, "linear_schedule"),
        (SGD | {"learning_rate": SGD}, "sgd makes a transformation, not a schedule"),
        (SGD | {"learning_rate": LINEAR}, "linear_schedule needs 'transition_steps'"),
        (
            SGD | {"learning_rate": LINEAR | {"transition_steps": 0}},
            "transition_steps: 0 is less than 1",
        ),
        (
            {"type": "scale_by_schedule", "step_size_fn": 0.1},
            "expected a schedule, not the float 0.1; write { type = ",
        ),
        (
            SGD
            | {
                "learning_rate": {
                    "type": "join_schedules",
                    "schedules": [LINEAR | {"transition_steps": 3}],
                    "boundaries": [3, 2],
                }
            },
            "1 schedules have 0 boundaries, not 2",
        ),
        (
            SGD
            | {
                "learning_rate": {
                    "type": "piecewise_constant_schedule",
                    "init_value": 1,
                    "boundaries_and_scales": {"1.5": 1},
                }
            },
            "'1.5' is not a step",
        ),
        (
            SGD
            | {
                "learning_rate": {
                    "type": "warmup_cosine_decay_schedule",
                    "init_value": 0,
                    "peak_value": 1,
                    "warmup_steps": 10,
                    "decay_steps": 5,
                }
            },
            "warmup_cosine_decay_schedule refuses this: ",
        ),
        # inject
        (SGD | {"inject": "learning_rate"}, 'write a list: inject = ["learning_rate"]'),
        (SGD | {"inject": ["rate"]}, "'rate' is not a number of sgd; it has"),
        (SGD | {"inject": ["nesterov"]}, "'nesterov' is not a number of sgd"),
        (SGD | {"inject": ["momentum"]}, "inject: momentum has no value here"),
        # given
        (SGD | {"schedule": LINEAR}, "'schedule'; did you mean 'learning_rate'?"),
        (SGD | {"learning_rate": {"given": 3}}, "given is the name of a value"),
        (SGD | {"learning_rate": {"given": "x"}}, "nobody gives 'x'; pass x=, or"),
        (SGD | {"learning_rate": {"given": "x", "y": 1}}, "optimizers.all.learning"),
        (PART, "partition goes into [optimizer], and once"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(table, says):
    text = refused(one(table))
    assert says in text
    assert "optimizers.all" in text
    assert text.startswith("Rules file '<mapping>': 1 finding.\n"), text


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"rules": {"**": "a"}}, "optimizers: there are none"),
        ({}, "it has no rules"),
        (one(SGD) | {"optimisers": {}}, "unknown field 'optimisers'"),
        (BOTH | {"optimizers": {"a": SGD}}, "the label 'b' has no optimizer"),
        (BOTH | {"optimizers": {"a": SGD, "bb": SGD}}, "did you mean 'b'?"),
        (
            {"rules": {"**": "all"}, "optimizers": {"all": SGD, "frozen": SGD}},
            '"frozen" leaves do not train; remove this table',
        ),
        ({"rules": {"**": 1}, "optimizers": {"1": SGD}}, "the label 1 is not a text"),
        ({"rules": {"**": "a"}, "optimizers": SGD}, "did you mean [optimizer]?"),
        ({"rules": {"**": "a"}, "optimizers": 3}, "'optimizers' is not a table"),
        (
            {"rules": {"**": "a"}, "optimizer": {"a": SGD}},
            "did you mean [optimizers.a]?",
        ),
        (BOTH | {"optimizer": CLIP}, 'put { type = "partition" } where'),
        (BOTH | {"optimizer": [CLIP, PART, PART]}, "optimizer[2]: partition goes"),
        (
            {"rules": {"net": "a", "**": "b"}, "optimizer": SGD},
            "the labels 'a', 'b' are trained alike",
        ),
        ({"rules": {"**": "a"}, "optimizer": PART}, "partition needs [rules], and"),
        (BOTH | {"given": 3}, "'given' is not a table"),
        (BOTH | {"given": {"rate": 1}}, "given.rate: the file never mentions it"),
        (BOTH | {"given": {"names": 1}}, "load_optimizer has such an argument"),
        (
            one(
                SGD | {"learning_rate": {"given": "a"}},
                given={"a": {"given": "b"}, "b": {"given": "a"}},
            ),
            "it needs itself: a -> b -> a",
        ),
        (one(SGD) | {"version": 2}, "it has version 2"),
        (one(SGD) | {"rules": {"a**b": "all"}}, "a**b"),
        (one(SGD) | {"rules": [["a", "all"], ["a", "all"]]}, "each pattern once"),
        (one(SGD) | {"rules": [["a"]]}, "not a table, nor pairs"),
        (one(SGD) | {"rules": {"re:.*": "all"}}, "is a regular expression"),
        (one(SGD) | {"stacks": {"a": 1.5}}, "stacks"),
        ([], "it is of type list"),
    ],
)
def test_what_is_wrong_with_a_document(document, says):
    text = refused(document)
    assert says in text
    assert text.startswith("Rules file '<mapping>'")


def test_a_value_that_nothing_mentions_names_the_nearest():
    document = one(SGD | {"learning_rate": {"given": "rate"}})
    text = refused(document, raet=3)
    assert "given.raet: the file never mentions it; did you mean 'rate'?" in text
    assert "nobody gives 'rate'" in text
    text = refused(one(SGD | {"learning_rate": "rate"}), rate=0.1)
    assert "not the str 'rate'; write { given = \"rate\" }" in text
    text = refused(document, rate=0.1, names={"adam": optax.adam, "x": 3})
    assert "'adam' is a name of Optax's" in text
    assert "'x' cannot be called by name" in text


def test_an_injected_number_takes_a_schedule():
    table = SGD | {"momentum": 0.9, "inject": ["momentum"]}
    linear = LINEAR | {"transition_steps": 1e1}
    tx = ta.load_optimizer(one(table | {"momentum": linear}))
    by_hand = optax.inject_hyperparams(optax.sgd, ("nesterov", "accumulator_dtype"))(
        0.1, momentum=optax.linear_schedule(1.0, 0.0, 10)
    )
    assert bits(train(tx, FLAT)[0]) == bits(train(by_hand, FLAT)[0])
    state = ta.load_optimizer(one(table)).init(PARAMS)
    hyperparams = state.inner_states["all"].hyperparams
    assert [*hyperparams] == ["momentum"]


def test_tables_of_patterns_see_the_stacks_of_the_file():
    params = {"blocks": jnp.ones((3, 2)), "head": jnp.ones(2)}
    factors = {"blocks/0": 0.5, "**": 1.0}
    scale = [SGD, {"type": "scale_by_rules", "rules": factors}]
    tx = ta.load_optimizer(one(scale, stacks={"blocks": 0}))
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["blocks"][:, 0].tolist() == pytest.approx([-0.05, -0.1, -0.1])
    root = {"type": "per_layer", "tx": SGD}
    for rules in ({"rules": {"**": "all"}}, {}):
        tx = ta.load_optimizer({**rules, "optimizer": root, "stacks": {"blocks": 0}})
        assert sorted(tx.init(params)) == ["", "blocks"]


@pytest.mark.slow
def test_layers_of_an_array_train_as_on_the_model_unrolled():
    blocks = {"w": jnp.arange(12.0).reshape(4, 3), "b": jnp.ones((4, 1))}
    stacked = {"blocks": blocks, "head": jnp.ones(2)}
    layers = {str(n): {k: x[n] for k, x in blocks.items()} for n in range(4)}
    unrolled = {"blocks": layers, "head": jnp.ones(2)}
    labels = {"blocks/{0..1}": "frozen", "blocks/2": "a", "**/b": "b", "**": "c"}
    adam = {"type": "adam", "learning_rate": 0.2}
    tx = ta.load_optimizer(
        {
            "rules": labels,
            "stacks": {"blocks": 0},
            "optimizers": {"a": SGD, "b": adam, "c": ADAMW | {"mask": True}},
            "optimizer": [CLIP, PART],
        }
    )

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda x: x * 0.1 + 0.1, params)
        updates, state = tx.update(grads, state, params)
        return ta.apply_updates(params, updates), state

    results = []
    for params in (stacked, unrolled):
        state = tx.init(params)
        for _ in range(3):
            params, state = step(params, state)
        results.append(params)
    one, two = (tree["blocks"] for tree in results)
    for n in range(4):
        for name in ("w", "b"):
            assert jnp.allclose(one[name][n], two[str(n)][name], rtol=1e-6)
    assert bits([x[:2] for x in one.values()]) == bits(
        [blocks[name][:2] for name in one]
    )


def test_a_table_that_serves_several_models_says_so():
    scale = {"type": "scale_by_rules", "rules": {"zz": 0.5, "**": 1.0}}
    document = {"optimizer": [SGD, scale]}
    with pytest.raises(ta.UnusedRuleError, match="zz"):
        ta.load_optimizer(document).init(PARAMS)
    ta.load_optimizer(document | {"unused": "ignore"}).init(PARAMS)


def test_a_mapping_that_cannot_be_read_says_why():
    class Missing(dict):
        def items(self):
            raise KeyError("rate is missing")

    assert "rate is missing" in refused(one(Missing()))
    assert "names: it is not a mapping" in refused(one(SGD), names=3)


def test_all_findings_are_in_one_error():
    tables = [{"type": "adamx"}, {"type": "sgd"}, SGD | {"learning_rate": -1}]
    text = refused(one(tables))
    assert text.startswith("Rules file '<mapping>': 3 findings.\n")
    assert [f"[{number}]" in text for number in range(3)] == [True] * 3
    with pytest.raises(ta.RulesFileError) as error:
        ta.load_optimizer(one([{"type": "x" * 100}] * 200))
    assert len(str(error.value).encode()) <= 4_000
    assert len(error.value.findings) == 200
    assert error.value.findings[7].startswith("optimizers.all[7].type: ")


@pytest.mark.slow
def test_hostile_documents_are_refused_soon():
    table: Any = SGD
    for _ in range(40):
        table = [table]
    assert "nested" in refused(one(table))
    table = {"type": "masked", "mask": True}
    deep: Any = SGD
    for _ in range(40):
        deep = table | {"inner": deep}
    assert "nested too deep" in refused(one(deep))
    long = {f"x{n}": table | {"inner": {"given": f"x{n + 1}"}} for n in range(20)}
    text = refused(one({"given": "x0"}, given=long | {"x20": SGD}))
    assert "nested deeper than 32" in text
    # 10 ** 9 clips, if each name were read as often as it is used
    given: dict[str, Any] = {"x0": {"type": "clip", "max_delta": 1}}
    for level in range(9):
        given[f"x{level + 1}"] = [{"given": f"x{level}"}] * 10
    text = refused(one({"given": "x9"}, given=given))
    assert "more than 10,000 values" in text
    endless: dict[str, Any] = one(SGD)
    endless["given"] = endless
    assert "too deep" in refused(endless)
    steps = [*range(1, 1_500)]
    rate = {"type": "join_schedules", "schedules": [LINEAR] * 1_500}
    text = refused(one(SGD | {"learning_rate": rate | {"boundaries": steps}}))
    assert "at most 1,000" in text


VALUES = (0, 1, -1, 0.5, 1e39, 10**20, True, None, "none", "bfloat16", "**", "!w", "x")
VALUES += ("1e-3", "linear", float("nan"), {"given": "a"}, {"given": "b"})
KEYS = ("**", "w", "re:.*", "a**b", "1000", "learning_rate", "b1", "type", "inject")


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random() if depth < 5 else 1.0
    if kind < 0.15:
        name = rng.choice(TYPES)
        arguments = inspect.signature(EXPORTS[name]).parameters.values()
        chosen = [
            each.name
            for each in arguments
            if each.default is each.empty or rng.random() < 0.15
        ]
        values = {each: random_value(rng, depth + 1) for each in chosen}
        return {"type": name, **values}
    if kind < 0.25:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind < 0.35:
        keys = rng.sample(KEYS, rng.randint(0, 2))
        return {key: random_value(rng, depth + 1) for key in keys}
    return rng.choice(VALUES)


def test_a_random_document_is_built_or_refused():
    rng, refusals = random.Random(0), 0
    fields = ("rules", "optimizers", "optimizer", "given", "stacks", "expect", "unused")
    for _ in range(300):
        document = one(random_value(rng))
        for name in rng.sample(fields, rng.randint(0, 2)):
            document[name] = random_value(rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optax's own
                ta.load_optimizer(document, **{"a": 0.1} if rng.random() < 0.5 else {})
        except ta.RulesFileError:
            refusals += 1
    assert 200 < refusals < 300


# What comes from a file, and what the caller passes


@pytest.mark.parametrize("date", ["2020-01-01", "07:32:00", "2020-01-01T07:32:00Z"])
@pytest.mark.parametrize(
    "text",
    [
        '[optimizers.t]\ntype = "sgd"\nlearning_rate = 0.1\nnesterov = {date}',
        '[optimizers.t]\ntype = "sgd"\nlearning_rate = 0.1\naccumulator_dtype = {date}',
        '[optimizers.t]\ntype = "adamw"\nlearning_rate = 0.1\nmask = ["a", {date}]',
        '[optimizer]\ntype = "sgd"\nlearning_rate = {{given = "n"}}\n'
        "[given]\nn = {date}",
        "[stacks]\nblocks = {date}",
    ],
)
def test_no_file_holds_a_date(text, date, tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text(f'version = 1\n[rules]\n"**" = "t"\n{text.format(date=date)}')
    for read in (ta.load_optimizer, ta.load_rules):
        with pytest.raises(ta.RulesFileError, match=r"is a date or a time; write a "):
            read(file)
    file.write_text(f'version = 1\n[rules]\n"**" = {date}')
    with pytest.raises(ta.RulesFileError, match=r"rules\.\*\* is a date or a time"):
        ta.load_rules(file)
    file.write_text(f'version = 1\n[rows]\n"a" = "b"\n[new]\n"c" = {date}')
    with pytest.raises(ta.MigrationError, match=r"new\.c is a date or a time"):
        ta.load_migration(file)


OBJECTS = [datetime.date(2020, 1, 1), object(), b"bytes", 1j]


@pytest.mark.parametrize(
    ("name", "argument"),
    sorted(
        {
            (kind, each)
            for kind, each in (
                ("sgd", "nesterov"),
                ("sgd", "accumulator_dtype"),
                ("adamw", "mask"),
                ("sgd", "momentum"),
                ("sgd", "learning_rate"),
                ("prodigy", "betas"),
                ("polyak_sgd", "variant"),
                ("scale_by_rules", "rules"),
                ("apply_every", "k"),
                ("scale_by_muon", "weight_dimension_numbers"),
                ("per_layer", "stacks"),
                ("masked", "inner"),
                ("piecewise_constant_schedule", "boundaries_and_scales"),
            )
        }
    ),
)
def test_an_object_is_refused_where_it_is_of_another_kind(name, argument):
    table = {"type": name, "tx": SGD} if name == "per_layer" else {"type": name}
    table = with_defaults(name)[0] if name in EXPORTS else table
    for thing in OBJECTS:
        for value, passed in ((thing, {}), ({"given": "n"}, {"n": thing})):
            makes = table | {argument: value}
            if name == "piecewise_constant_schedule":
                makes = {"type": "scale_by_schedule", "step_size_fn": makes}
            text = refused(one(makes), **passed)
            assert "expected a" in text, (thing, text)


def test_objects_that_fit_are_taken():
    sgd = SGD | {"momentum": 0.9}
    masks = [ta.glob("**/w"), lambda p: True, np.bool_(True)]
    tables = [sgd | {"nesterov": np.bool_(True)}]
    tables += [sgd | {"accumulator_dtype": x} for x in (jnp.bfloat16, np.dtype("f4"))]
    tables += [ADAMW | {"mask": mask} for mask in masks]
    tables += [{"type": "prodigy", "betas": (0.9, 0.99)}]
    for table in tables:
        ta.load_optimizer(one(table)).init(FLAT)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (n, a)
        for n in TYPES
        if n != "partition"
        for a in inspect.signature(EXPORTS[n]).parameters
        if re.fullmatch("b[123]|beta3|decay|rho|momentum|adam_b[12]", a)
    ],
)
@pytest.mark.parametrize("rate", [95, 1.0, 1])
def test_a_decay_rate_is_less_than_1(name, argument, rate):
    table, _ = with_defaults(name)
    if table.get(argument) == 1:  # sm3 adds up, if nothing else is asked of it
        rate = 1.5
    text = refused(one(table | {argument: rate}))
    assert f".{argument}: {rate!r} is not less than 1" in text
    assert "betas[0]: 1 is not less" in refused(
        one({"type": "prodigy", "betas": [1, 0]})
    )


# Remedies: each does what its message says


@pytest.mark.slow
def test_an_optimizer_that_optax_makes_of_another_is_written_as_that():
    for name, of, rate in (("nadam", "adam", 0.1), ("nadamw", "adamw", 0.1)):
        for said in (name, f"optax.{name}", f"torch.optim.{name.title()}"):
            cure = f'write type = "{of}" with nesterov = true'
            assert cure in refused(one({"type": said, "learning_rate": rate}))
            assert cure in refused(one({"_target_": said, "learning_rate": rate}))
        table = {"type": of, "learning_rate": rate, "nesterov": True}
        want = bits(train(getattr(optax, name)(rate), FLAT)[0])
        assert bits(train(ta.load_optimizer(one(table)), FLAT)[0]) == want


@pytest.mark.parametrize("name", ["soap", "sparseadam", "asgd", "shampoo", "qhadam"])
def test_an_optimizer_that_optax_lacks_is_not_said_to_be_another(name):
    text = refused(one({"type": name}))
    assert "Optax has no such optimizer" in text
    assert "did you mean" not in text
    names = {name: lambda: optax.sgd(0.1)}
    tx = ta.load_optimizer(one({"type": name}), names=names)
    assert bits(train(tx, FLAT)[0]) == bits(train(optax.sgd(0.1), FLAT)[0])


@pytest.mark.parametrize("label", ["freeze", "Frozen", "fixed", "no_train", "none"])
def test_a_label_that_means_frozen_is_said_to_be_frozen(label):
    document = {"rules": {"out": label, "**": "all"}, "optimizers": {"all": SGD}}
    text = refused(document)
    cure = f'write "frozen" if they are not to train, or [optimizers.{label}]'
    assert f"the label {label!r} has no optimizer; {cure}" in text
    tx = ta.load_optimizer(document | {"rules": {"out": "frozen", "**": "all"}})
    assert not tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]["out"].any()
    document["optimizers"][label] = SGD
    tx = ta.load_optimizer(document)
    assert tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]["out"].all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("weight_decay", None, "not none; leave it out for the default, 0.0001"),
        ("eps", [1e-30, 1e-3], "leave it out for the default, 1e-08"),
        ("b1", "0.9,", "leave it out for the default, 0.9"),
        ("learning_rate", None, "write learning_rate = 1e-3"),
        ("learning_rate", "${rate}", 'write { given = "rate" }, and pass rate='),
        ("learning_rate", "${given.rate}", 'write { given = "rate" }, and pass rate='),
    ],
)
def test_a_number_that_is_none_is_not_made_up(name, value, cure):
    table = {"type": "adamw", "learning_rate": 1e-3}
    text = refused(one(table | {name: value}))
    assert text.endswith(cure), text
    given = {"rate": 1e-3} if "given" in cure else {}
    table["learning_rate"] = {"given": "rate"} if given else 1e-3
    tx = ta.load_optimizer(one(table), **given)
    assert bits(train(tx, FLAT)[0]) == bits(train(optax.adamw(1e-3), FLAT)[0])


@pytest.mark.parametrize(
    ("text", "name"),
    [("lr * 0.1", "lr_0_1"), ("0.1*lr", "value_0_1_lr"), ("lambda", "lambda_")],
)
def test_a_computed_value_is_passed_by_a_name(text, name):
    table = SGD | {"learning_rate": {"given": text}}
    seen = refused(one(table))
    assert "is not a name, and nothing is computed here" in seen
    assert f'write {{ given = "{name}" }}, and pass {name}=' in seen
    tx = ta.load_optimizer(one(SGD | {"learning_rate": {"given": name}}), **{name: 0.1})
    assert bits(train(tx, FLAT)[0]) == bits(train(optax.sgd(0.1), FLAT)[0])
    ta.load_optimizer(one(table, given={text: 0.1}))  # a key of a file may be anything


Tx = optax.GradientTransformation


def bare(inner, every, rate):
    return optax.chain(inner, optax.scale(every), optax.scale_by_learning_rate(rate))


def in_text(inner: Tx, every: int, rate: optax.ScalarOrSchedule) -> Tx:
    return bare(inner, every, rate)


def quoted(inner: "Tx", every: "int", rate: "optax.ScalarOrSchedule") -> "Unknown":  # noqa: F821, UP037
    return bare(inner, every, rate)


@pytest.mark.slow
@pytest.mark.parametrize("make", [bare, in_text, quoted])
def test_annotations_of_the_callers_factories_may_be_texts(make):
    rate = {"type": "constant_schedule", "value": 0.1}
    inner = {"type": "clip", "max_delta": 1.0}
    table = {"type": "mine", "inner": inner, "every": 4, "rate": rate}
    tx = ta.load_optimizer({"optimizer": table}, names={"mine": make})
    want = bare(optax.clip(1.0), 4, optax.constant_schedule(0.1))
    assert bits(train(tx, FLAT)[0]) == bits(train(want, FLAT)[0])
    if make is in_text:
        text = refused({"optimizer": table | {"every": 0.5}}, names={"mine": make})
        assert "optimizer.every: 0.5 is not a whole number" in text
