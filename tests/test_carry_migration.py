"""``carry_state`` with a migration: every copy of the params moves by the same rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from aged import aged
from sizes import FULL, full, some
from states import assert_equal

import treeadapt as ta
from treeadapt.transforms.optax_fields import DEGREES

# Optax itself promotes.
pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS = 2

TABLES = {
    "rename": {"{name:**}": "model/{name}"},
    "transpose": {
        "layers/{l}/{n}/weight : a b": "blocks/{l}/{n}/kernel : b a",
        "layers/{l}/mlp/bias": "blocks/{l}/mlp/bias",
        "head : v e": "head : e v",
    },
    "heads": {
        "layers/{l}/q/weight : (h d) e": "layers/{l}/q/kernel : h d e",
        "{rest:**}": "{rest}",
    },
    "stack": {
        "layers/{l}/q/weight : (h d) e": "blocks/q/kernel : l e h d",
        "layers/{l}/{n}/weight : f e": "blocks/{n}/kernel : l e f",
        "layers/{l}/mlp/bias : f": "blocks/bias : l f",
        "head : v e": "head : e v",
    },
    "fused": {
        "layers/{l}/kv/weight : [(k d) (k d)] e": (
            "layers/{l}/k : k d e",
            "layers/{l}/v : e k d",
        ),
        "{rest:**}": "{rest}",
    },
}
MIGRATIONS = {
    name: ta.Migration(table, sizes={"d": 3} if name in ("heads", "stack") else None)
    for name, table in TABLES.items()
}
MIGRATIONS["fused"] = ta.Migration(TABLES["fused"], sizes={"d": 2})
# Each also backwards: unstack, split heads joined, key and value joined.
MIGRATIONS |= {f"{name}, back": m.inverse for name, m in MIGRATIONS.items()}


def start() -> dict[str, Any]:
    ramp = jnp.linspace(-1.0, 1.0, 36, dtype=jnp.float32)
    params: dict[str, Any] = {"head": ramp[:35].reshape(7, 5) * 3}
    for i in range(LAYERS):
        params |= {
            f"layers/{i}/q/weight": ramp[:30].reshape(6, 5) + i,
            f"layers/{i}/kv/weight": ramp[5:25].reshape(4, 5) * (i + 2),
            f"layers/{i}/mlp/weight": ramp[3:33].reshape(6, 5) * (i - 4),
            f"layers/{i}/mlp/bias": ramp[:6] * i,
        }
    return params


def grads_of(params: Any, step: int) -> Any:
    """Elementwise, so that moving and differentiating commute."""
    return jax.tree.map(lambda leaf: jnp.sin(leaf * 3 + step), params)


def train(tx: Any, params: Any, state: Any, steps: int = 2) -> tuple[Any, Any]:
    # Not compiled: two programs that compute the same round differently once fused.
    with jax.disable_jit():
        for step in range(steps):
            updates, state = tx.update(grads_of(params, step), state, params)
            params = optax.apply_updates(params, updates)
    return params, state


schedule = optax.linear_schedule(1e-1, 1e-3, 6)
adam = optax.adam(schedule)
by_group = {"a": adam, "b": optax.sgd(1e-1, momentum=0.9)}
rules = {"**/bias": "b", "**/q": "frozen", "**": "a"}

rules_a = {"head": "frozen", "**": "a"}

#: Transformations of each number by itself.
LEAFWISE = {
    "adam": adam,
    "adamw": optax.adamw(schedule, mask=lambda p: {k: "head" in k for k in p}),
    "momentum": optax.sgd(schedule, momentum=0.9),
    "lion": optax.lion(1e-2),
    "ema": optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "amsgrad": optax.amsgrad(1e-2),
    "MultiSteps": optax.MultiSteps(adam, 3).gradient_transformation(),
    "inject": optax.inject_hyperparams(optax.adamw)(schedule, mu_dtype="bfloat16"),
    "adapt": ta.adapt(optax.chain(optax.clip(0.5), adam)),
    "partition": ta.partition(by_group, rules),
    "freeze": ta.freeze(adam, "**/head"),
    "schedule_free": optax.contrib.schedule_free(adam, 1e-2),
}


def assert_report(report: Any) -> None:
    assert report.fresh == report.warnings == report.left_over == ()
    assert report.unmoved == report.misshaped == report.ambiguous == {}


#: Every table with adam, every transformation with one table, and every second one with
#: another; at length all with all.
PAIRS = [
    (table, name)
    for table in MIGRATIONS
    for number, name in enumerate(LEAFWISE)
    if FULL
    or name == "adam"
    or table == "stack"
    or (table == "fused, back" and number % 2)
]


@pytest.mark.slow
@pytest.mark.parametrize(("table", "name"), PAIRS)
def test_moving_and_training_commute_bit_for_bit(table, name):
    m, tx, params = MIGRATIONS[table], LEAFWISE[name], start()
    target = None
    if table.endswith("back"):
        params = MIGRATIONS[table.removesuffix(", back")](params)
        target = start()
    params, old = train(tx, params, tx.init(params))
    new = m(params, target=target)
    state, report = ta.carry_state(tx, new, old, migration=m)
    assert_report(report)
    after, state = train(tx, new, state, 1)
    params, old = train(tx, params, old, 1)
    assert_equal(after, m(params, target=target))
    assert_equal(state, ta.carry_state(tx, new, old, migration=m)[0])


#: Transformations that look at several numbers together.
WHOLE = {
    "lbfgs in adapt": ta.adapt(optax.lbfgs(memory_size=3)),
    "lbfgs in a partition": ta.partition({"a": optax.scale_by_lbfgs(2)}, rules_a),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), adam),
}


def loss(params: Any) -> Any:
    return sum(jnp.sum(jnp.cos(leaf)) for leaf in ta.to_flat_dict(params).values())


def searching(tx: Any) -> Any:
    """A compiled step of training with the arguments that line searches take."""

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any]:
        value, grad = jax.value_and_grad(loss)(params)
        more = {"value": value, "grad": grad, "value_fn": loss}
        update = optax.with_extra_args_support(tx).update
        updates, state = update(grad, state, params, **more)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "own") for name in [*LEAFWISE][:: full(1, 2)]),
        *((name, "flat") for name in ("partition", *WHOLE)),
    ],
)
def test_layers_are_stacked_and_unstacked_without_a_trace(name, form):
    m, tx, params = MIGRATIONS["stack"], (LEAFWISE | WHOLE)[name], start()
    step = searching(tx)
    params, old = step(*step(params, tx.init(params)))
    stacked = m(params)
    saved = ta.to_flat_dict(old) if form == "flat" else old
    state, report = ta.carry_state(tx, stacked, saved, migration=m)
    assert_report(report)
    saved = ta.to_flat_dict(state) if form == "flat" else state
    again, report = ta.carry_state(tx, params, saved, migration=m.inverse)
    assert_report(report)
    assert jax.tree.structure(again) == jax.tree.structure(old)
    assert_equal(again, old)
    assert_equal(step(params, again)[0], step(params, old)[0])


# Partial copies


@pytest.mark.parametrize("layer", [0, 1])
def test_a_stack_of_which_a_layer_was_frozen_starts_fresh(layer):
    m, params = (
        ta.Migration({"h.{l}/w : e": "h/w : l e", "out": "head"}),
        {
            "h.0": {"w": jnp.ones(3)},
            "h.1": {"w": jnp.ones(3)},
            "out": jnp.ones(2),
        },
    )
    tx = ta.freeze(adam, f"h.{layer}")
    params, old = aged(tx, params)
    state, report = ta.carry_state(adam, m(params), old, migration=m)
    assert report.fresh == ("0/mu/h/w", "0/nu/h/w")
    reason = ["'h.1/w' without 'h.0/w'", "it would be float32[1,3], and 'h/w' is"][
        layer
    ]
    other = 1 - layer
    assert [*report.unmoved] == [f"0/{field}/h.{other}/w" for field in ("mu", "nu")]
    assert all(reason in text for text in report.unmoved.values())
    for field in ("mu", "nu"):
        new, before = getattr(state[0], field), getattr(old[0], field)
        assert not np.any(new["h/w"])
        assert np.array_equal(new["head"], before["out"])
    (text,) = report.warnings
    assert "mu, nu of 'h/w' start again" in text


@pytest.mark.slow
def test_layers_of_two_groups_are_not_stacked():
    m = MIGRATIONS["stack"]
    tx = ta.partition({"a": adam, "b": adam}, {"layers/0": "a", "**": "b"})
    params, old = aged(tx, start())
    one = ta.partition({"a": adam}, {"**": "a"})
    state, report = ta.carry_state(one, m(params), old, migration=m)
    prefix = "inner_states/a/0"
    assert report.fresh == tuple(
        path for path in ta.tree_paths(state) if f"{prefix}/" in path and "/bl" in path
    )
    assert report.carried[f"{prefix}/mu/head"] == "inner_states/b/0/mu/head"
    assert len(report.unmoved) == 2 * 2 * 4
    assert report.left_over == ("inner_states/a/0/count", "inner_states/a/1/count")


def test_groups_follow_their_params_and_their_counts_the_groups():
    m = ta.Migration({"enc.{l}/w : e": "encoder : l e", "out": "head/kernel"})
    params = {"enc.0/w": jnp.ones(3), "enc.1/w": jnp.ones(3), "out": jnp.ones(2)}
    tx = ta.partition({"a": adam, "b": adam}, {"out": "b", "**": "a"})
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.update(grads, tx.init(params), params)[1]
    new_tx = ta.partition({"slow": adam, "fast": adam}, {"head": "fast", "**": "slow"})
    state, report = ta.carry_state(new_tx, m(params), state, migration=m)
    assert_report(report)
    assert report.carried["inner_states/slow/0/mu/encoder"] == (
        "inner_states/a/0/mu/enc.0/w, inner_states/a/0/mu/enc.1/w"
    )
    assert state.inner_states["slow"][0].count == 1


# The laws of values


CHANGED = ta.Migration({"w": ("w", {"scale": 4.0, "offset": 3.0}), "b": "b"})

#: Transformations whose state does not depend on the params that they make.
SCALED = {
    "adabelief": optax.adabelief(1e-2, eps_root=0.0),
    "adam": adam,
    "ademamix": optax.contrib.ademamix(1e-2),
    "simplified": optax.contrib.simplified_ademamix(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "adan": optax.adan(1e-2),
    "adadelta": optax.scale_by_adadelta(),
    "adagrad": optax.scale_by_rss(0.0),
    "lion": optax.lion(1e-2),
    "madgrad": optax.contrib.madgrad(1e-2),
    "momo": optax.contrib.momo_adam(1e-2),
    "MultiSteps": optax.MultiSteps(adam, 3).gradient_transformation(),
    "optimistic": optax.scale_by_optimistic_gradient(),
    "rmsprop": optax.scale_by_rms(),
    "centered": optax.scale_by_stddev(),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "apply_every": optax.apply_every(4),
    "lbfgs": optax.scale_by_lbfgs(3),
}


def numbers(count: int, params: Any, *, scale: float) -> Any:
    grads = jax.tree.map(lambda leaf: jnp.sin(leaf + count), params)
    return {**grads, "w": grads["w"] / scale}


@pytest.mark.parametrize("name", some(SCALED))
def test_the_powers_of_a_scale_are_those_that_optax_shows(name):
    tx = SCALED[name]
    params = {"w": jnp.linspace(1.0, 2.0, 6).reshape(2, 3), "b": jnp.ones(3)}
    states = []
    for m in (lambda tree: tree, CHANGED):
        state = tx.init(m(params))
        for count in range(3):
            scale = 4.0 if m is CHANGED else 1.0
            moved = jax.tree.map(lambda leaf, k=count: leaf * (1 + k / 8), params)
            grads = numbers(count, params, scale=scale)
            update = optax.with_extra_args_support(tx).update
            state = update(grads, state, m(moved), value=jnp.ones(()))[1]
        states.append(state)
    old, direct = states
    carried, report = ta.carry_state(tx, CHANGED(params), old, migration=CHANGED)
    assert (report.fresh, report.unmoved) == ((), {})
    one, two = ta.to_flat_dict(carried), ta.to_flat_dict(direct)
    for path in one:
        if path.endswith(("/w", "/b")) and "e_x" not in path:
            np.testing.assert_allclose(one[path], two[path], 1e-4, 1e-7, err_msg=path)


#: Fields of Optax's states whose power the table has.
POWERS = {
    "ApplyEvery": "grad_acc",
    "DAdaptAdamWState": "exp_avg exp_avg_sq grad_sum",
    "DoGState": "init_params",
    "DoWGState": "init_params",
    "MadgradState": "grad_sum_sq s x0",
    "MechanicState": "m v s x0",
    "MomoAdamState": "exp_avg exp_avg_sq",
    "MomoState": "exp_avg",
    "MultiStepsState": "acc_grads",
    "MuonState": "mu",
    "ProdigyState": "exp_avg exp_avg_sq grad_sum params0",
    "SAMState": "cache",
    "ScaleByAdaDeltaState": "e_g e_x",
    "ScaleByAdamState": "mu nu",
    "ScaleByAdanState": "m v n g",
    "ScaleByAdemamixState": "m1 m2 nu",
    "ScaleByAmsgradState": "mu nu nu_max",
    "ScaleByBacktrackingLinesearchState": "grad",
    "ScaleByBeliefState": "mu nu",
    "ScaleByLBFGSState": "params updates diff_params_memory diff_updates_memory",
    "ScaleByLionState": "mu",
    "ScaleByOptimisticGradientState": "previous_gradient",
    "ScaleByRStdDevState": "mu nu",
    "ScaleByRmsState": "nu",
    "ScaleByRssState": "sum_of_squares",
    "ScaleBySimplifiedAdEMAMixState": "m n",
    "ScaleByZoomLinesearchState": "grad",
    "ScheduleFreeState": "z",
    "SophiaState": "mu nu",
    "TraceState": "trace",
}


@pytest.mark.slow
def test_a_state_that_optax_adds_is_to_be_looked_at():
    params = {"w": jnp.linspace(1.0, 2.0, 6), "b": jnp.ones(3)}
    modules = (optax, optax.contrib, optax.transforms, optax.experimental)
    classes = {
        name: cls
        for module in modules
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    }
    hidden = type(optax.scale_by_optimistic_gradient().init(params))
    classes[hidden.__name__] = hidden  # Optax 0.2.8 exports no name for it
    assert len(classes) > 50
    assert {*" ".join(POWERS.values()).split()} == DEGREES.keys()
    for name, cls in classes.items():
        if cls.__module__.partition(".")[0] != "optax" or not cls._fields:
            continue
        old = cls(*[params] * len(cls._fields))
        tx = optax.GradientTransformation(
            lambda params, cls=cls: cls(*[params] * len(cls._fields)),
            optax.identity().update,
        )
        state, report = ta.carry_state(tx, CHANGED(params), old, migration=CHANGED)
        fields = {
            field
            for field in cls._fields
            if f"{field}/w" in report.carried
            and not np.array_equal(getattr(state, field)["w"], params["w"])
        }
        assert fields == {*POWERS.get(name, "").split()}, name


def test_averages_of_params_are_scaled_and_shifted_like_them():
    tx = optax.contrib.schedule_free(adam, 1e-2)
    params = {"w": jnp.linspace(1.0, 2.0, 6), "b": jnp.ones(3)}
    params, old = aged(tx, params)
    state, _ = ta.carry_state(tx, CHANGED(params), old, migration=CHANGED)
    assert np.array_equal(state.z["w"], old.z["w"] * 4 + 3)
    adam_state, old_adam = (each.base_optimizer_state[0] for each in (state, old))
    assert np.array_equal(adam_state.nu["w"], old_adam.nu["w"] / 16)


@pytest.mark.slow
def test_values_are_undone_on_the_way_back():
    params = {"w": jnp.linspace(1.0, 2.0, 6), "b": jnp.ones(3)}
    for tx in (adam, optax.contrib.schedule_free(adam, 1e-2)):
        params, old = train(tx, params, tx.init(params))
        state, _ = ta.carry_state(tx, CHANGED(params), old, migration=CHANGED)
        again, _ = ta.carry_state(tx, params, state, migration=CHANGED.inverse)
        for one, two in zip(jax.tree.leaves(again), jax.tree.leaves(old), strict=True):
            np.testing.assert_allclose(one, two, 1e-6)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_moments_that_a_scale_would_make_infinite_start_fresh(kind):
    m = ta.Migration({"w": ("kernel", {"scale": 1e-20})})
    back = ta.Migration({"kernel": ("w", {"scale": 1e20})}).inverse
    tx = optax.trace(0.9)
    saved = optax.TraceState({"w": kind(np.full(3, 1e30, np.float32))})
    for migration in (m, back):
        params = {"kernel": jnp.ones(3)}
        state, report = ta.carry_state(tx, params, saved, migration=migration)
        assert np.array_equal(state.trace["kernel"], np.zeros(3))
        assert "values do not fit" in report.unmoved["trace/w"]


def test_slots_keep_their_dtype_when_params_are_cast():
    m = ta.Migration({"w": ("kernel", {"cast": ["float32", "bfloat16"]})})
    tx = optax.scale_by_adam(mu_dtype=jnp.float32)
    params, old = aged(tx, {"w": jnp.arange(3.0)})
    state, report = ta.carry_state(tx, m(params), old, migration=m)
    assert state.mu["kernel"] is old.mu["w"]
    assert state.nu["kernel"].dtype == jnp.bfloat16  # as Optax makes it here
    assert (
        "bfloat16[3], but the saved one is float32[3]"
        in (report.misshaped["nu/kernel"])
    )


@pytest.mark.slow
def test_slots_are_cast_with_their_params_if_asked():
    m = ta.Migration({"w : a b": ("kernel : b a", {"cast": ["float32", "bfloat16"]})})
    tx, params = optax.adam(1e-2), {"w": jnp.arange(6.0).reshape(2, 3)}
    params, old = aged(tx, params)
    _, report = ta.carry_state(tx, m(params), old, migration=m)
    assert report.carried == {}
    assert "pass cast=True" in report.warnings[0]
    state, report = ta.carry_state(tx, m(params), old, migration=m, cast=True)
    assert report.warnings == ()
    for field in ("mu", "nu"):
        want = getattr(old[0], field)["w"].T.astype("bfloat16")
        assert np.array_equal(getattr(state[0], field)["kernel"], want)
    back, _ = ta.carry_state(tx, params, state, migration=m.inverse, cast=True)
    assert back[0].mu["w"].dtype == jnp.float32


@pytest.mark.slow
def test_padding_is_zero_in_slots_and_is_cut_off_again():
    m = ta.Migration({"w : v e": ("w : v e", {"pad": {"v": [0, 2]}})})
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    params, old = aged(adam, params)
    state, report = ta.carry_state(adam, m(params), old, migration=m)
    assert report.partly == {f"0/{f}/w": (f"0/{f}/w/{{2..3}}",) for f in ("mu", "nu")}
    assert np.array_equal(state[0].nu["w"], np.pad(old[0].nu["w"], ((0, 2), (0, 0))))
    # Rows that were padded may have trained since.
    state = optax.tree_utils.tree_set(state, mu={"w": jnp.ones((4, 3))})
    again, _ = ta.carry_state(adam, params, state, migration=m.inverse)
    assert np.array_equal(again[0].mu["w"], np.ones((2, 3)))


@pytest.mark.parametrize("form", ["own", "flat"])
@pytest.mark.parametrize("name", ["adafactor", "sm3"])
def test_statistics_that_do_not_move_are_not_of_another_kind(name, form):
    tx = getattr(optax, name)(1e-2)
    m = ta.Migration({"w : a b": "w : b a", "b : a": "c : a"})
    params = {"w": jnp.ones((4, 8)), "b": jnp.ones(4)}
    params, old = aged(tx, params)
    saved = ta.to_flat_dict(old) if form == "flat" else old
    _, report = ta.carry_state(tx, m(params), saved, migration=m)
    assert report.unmoved
    assert not any("another kind" in text for text in report.warnings), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["own", "flat"])
def test_layers_that_padding_adds_are_reported_like_new_leaves(form):
    m = ta.Migration({"h/{k} : l ...": ("h/{k} : l ...", {"pad": {"l": [1, 0]}})})
    params = {"h": {"w": jnp.ones((2, 3, 3)), "b": jnp.ones((2, 3))}}
    params, old = train(adam, params, adam.init(params))
    saved = ta.to_flat_dict(old) if form == "flat" else old
    new = ta.from_flat_dict(params, m(params), strict=False)
    _, report = ta.carry_state(adam, new, saved, migration=m)
    (warning,) = report.warnings
    assert "fresh moments under an old step count" in warning
    assert "mu, nu of 'h/b/{0}', 'h/w/{0}' start again" in warning
    # The cure that it names.
    rules = ta.Rules({"h/0/**": "new", "h/**": "old"}, stacks={"h": 0})
    groups = ta.partition({"new": adam, "old": adam}, rules)
    state, report = ta.carry_state(groups, new, saved, migration=m)
    assert report.warnings == ()
    counts = [state.inner_states[name][0].count for name in ("new", "old")]
    assert counts == [0, 2]


def test_what_padding_adds_to_averages_is_as_the_params_are():
    m = ta.Migration({"w : v e": ("w : v e", {"pad": {"v": [0, 2]}})})
    tx = optax.contrib.schedule_free_sgd(1e-2)
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    params, old = aged(tx, params)
    new = {"w": m(params)["w"].at[2:].set(5.0)}
    z = ta.tree_get(ta.carry_state(tx, new, old, migration=m)[0], "z")["w"]
    assert np.array_equal(z[:2], ta.tree_get(old, "z")["w"])
    assert np.array_equal(z[2:], new["w"][2:])


def test_padding_along_two_axes_is_zero_and_reported():
    m = ta.Migration({"k : a b": ("k : a b", {"pad": {"a": [1, 1], "b": [0, 1]}})})
    params = {"k": jnp.ones((2, 3))}
    params, old = aged(adam, params)
    state, report = ta.carry_state(adam, m(params), old, migration=m)
    assert np.array_equal(state[0].mu["k"], np.pad(old[0].mu["k"], ((1, 1), (0, 1))))
    assert "mu, nu of 'k' start again" in report.warnings[0]
    again, report = ta.carry_state(adam, params, state, migration=m.inverse)
    assert_equal(again, old)
    assert_report(report)


def test_new_leaves_are_fresh_and_dropped_ones_left_over():
    m = ta.Migration({"w": "kernel", "old/*": None}, new={"bias": "zeros"})
    params = {"w": jnp.ones(3), "old": {"x": jnp.ones(2)}}
    new = m(params, target={"kernel": jnp.ones(3), "bias": jnp.ones(2)})
    _, report = ta.carry_state(adam, new, adam.init(params), migration=m)
    assert report.fresh == ("0/mu/bias", "0/nu/bias")
    assert report.left_over == ("0/mu/old/x", "0/nu/old/x")
    assert report.unmoved == {}


# What cannot be known starts fresh, and the report says so


def unmoved(tx: Any, params: Any, table: Any, **kwargs: Any) -> tuple[Any, Any]:
    m = ta.Migration(table)
    state = aged(tx, params)[1]
    return ta.carry_state(tx, m(params), state, migration=m)


@pytest.mark.slow
def test_a_field_whose_power_is_not_known_starts_fresh():
    params = {"w": jnp.ones(3)}
    for table in ({"w": ("w", {"scale": 2.0})}, {"w": ("w", {"offset": 2.0})}):
        for tx in (optax.ema(0.9), optax.chain(adam, optax.trace(0.9))):
            _, report = unmoved(tx, params, table)
            (name,) = (name for name in report.unmoved)
            assert name in ("ema/w", "1/trace/w")
            field = name.split("/")[-2]
            text = f"{name!r}: what a row with values does to {field!r} is not known"
            assert f"not moved, {text}" in str(report)


def test_a_row_with_a_function_starts_fresh():
    _, report = unmoved(adam, {"w": jnp.ones(3)}, {"w": ("w", lambda w: w * 2)})
    assert "not moved, '0/mu/w', '0/nu/w': its row has a function" in str(report)


RENAMED = "it does not have the shape of its parameter, so it is only renamed"


def test_statistics_of_other_shapes_are_renamed_but_not_moved():
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(3)}
    _, report = unmoved(tx, params, {"{n}": "net/{n}"})
    assert_report(report)
    assert report.carried["0/v_row/net/w"] == "0/v_row/w"
    _, report = unmoved(tx, params, {"w : a b": "kernel : b a", "b": "bias"})
    assert sorted(report.unmoved) == ["0/v/w", "0/v_col/w", "0/v_row/w"]
    assert "0/v_row/b" in report.carried.values()
    assert "'w' is float32[1], and 'w : a b' has axes for 2" in str(report)
    assert "it does not have the shape of its parameter, so it is only renamed" in str(
        report
    )


def test_statistics_that_come_several_a_parameter_are_renamed():
    params = {"w": jnp.ones((3, 4)), "x": {"b": jnp.ones(3)}}
    table = {"w": "net/w", "{a}/{n}": "{a}/{n}"}
    _, report = unmoved(optax.sm3(1e-2), params, table)
    assert_report(report)
    assert report.carried["0/mu/net/w/1"] == "0/mu/w/1"
    _, report = unmoved(
        optax.sm3(1e-2), params, {"w : a b": "w : b a", "{r:**}": "{r}"}
    )
    assert list(report.unmoved) == ["0/mu/w/0", "0/mu/w/1"]
    assert "it does not have the shape of its parameter, so it is only renamed" in str(
        report
    )


def test_one_parameter_that_becomes_several_takes_its_moments_along():
    table = {"wte : v e": ("embed : v e", "head : e v")}
    state, report = unmoved(adam, {"wte": jnp.arange(6.0).reshape(2, 3)}, table)
    assert np.array_equal(state[0].mu["embed"], state[0].mu["head"].T)
    assert not report.warnings
    plain, _ = unmoved(adam, {"wte": jnp.ones(2)}, {"wte": ("embed", "head")})
    leaves = [leaf for leaf in jax.tree.leaves(plain) if leaf.ndim]
    assert len({id(leaf) for leaf in leaves}) == len(leaves) == 4  # donatable


def test_copies_that_become_one_need_equal_moments():
    params = {"embed": jnp.ones(2), "head": jnp.ones(2)}
    m = ta.Migration({("embed", "head"): "wte"})
    _, old = train(adam, params, adam.init(params))
    new = {"wte": jnp.ones(2)}
    assert_report(ta.carry_state(adam, new, old, migration=m)[1])
    other = optax.tree_utils.tree_set(old, nu=params | {"head": jnp.zeros(2)})
    _, report = ta.carry_state(adam, new, other, migration=m)
    assert report.fresh == ("0/nu/wte",)
    assert "not moved, '0/nu/embed', '0/nu/head': the copies are not equal" in (
        str(report)
    )


def test_copies_are_not_compared_under_jit():
    m = ta.Migration({("embed", "head"): "wte"})
    old = adam.init({"embed": jnp.ones(2), "head": jnp.ones(2)})
    reports = []

    @jax.jit
    def carry(saved):
        state, report = ta.carry_state(adam, {"wte": jnp.ones(2)}, saved, migration=m)
        reports.append(report)
        return state

    carry(old)
    assert "copies cannot be compared under jit" in str(reports[0])


def test_a_vector_of_all_params_starts_fresh_with_its_count():
    tx = optax.flatten(optax.adam(1e-3))
    params = {"b": jnp.ones(3), "w": jnp.ones((3, 4))}
    state, report = unmoved(tx, params, {"w : a b": "a : b a", "b": "b"})
    assert report.carried == {}
    assert "all params are joined there, without names" in str(report)
    assert_equal(state, tx.init({"a": jnp.ones((4, 3)), "b": jnp.ones(3)}))


@pytest.mark.parametrize("form", ["own", "flat"])
@pytest.mark.parametrize("before", ["adam", "amsgrad", "sm3", "schedule_free", "group"])
def test_moments_that_the_new_state_lacks_are_left_over(before, form):
    tx = {
        "adam": adam,
        "amsgrad": optax.amsgrad(1e-2),
        "sm3": optax.sm3(1e-2),
        "schedule_free": optax.contrib.schedule_free(adam, 1e-2),
        "group": ta.partition({"mu": adam}, {"**": "mu"}),
    }[before]
    m = ta.Migration({"w : a b": "k : b a", "b": "c"})
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(300)}
    old = tx.init(params)
    saved = ta.to_flat_dict(old) if form == "flat" else old
    _, report = ta.carry_state(optax.sgd(1e-2), m(params), saved, migration=m)
    assert report.unmoved == {}
    assert report.left_over == tuple(ta.to_flat_dict(saved))


def test_leaves_without_a_row_are_reported():
    m = ta.Migration({"w": "kernel"})
    old = adam.init({"w": jnp.ones(2), "b": jnp.ones(3)})
    _, report = ta.carry_state(adam, {"kernel": jnp.ones(2)}, old, migration=m)
    assert "not moved, '0/mu/b', '0/nu/b': no row takes it" in str(report)


@pytest.mark.slow
def test_a_long_report_stays_short():
    params = {f"layers.{i}": jnp.ones(2) for i in range(40)}
    m = ta.Migration({"layers.{l} : e": "layers : l e"})
    old = ta.freeze(adam, "layers.7").init(params)
    _, report = ta.carry_state(adam, m(params), old, migration=m)
    assert report.fresh == ("0/count", "0/mu/layers", "0/nu/layers")
    assert len(report.unmoved) == 78
    assert len(str(report)) < 1000
    m = ta.Migration({"layers.{l}": ("blocks.{l}", jnp.negative)})
    _, report = ta.carry_state(adam, m(params), old, migration=m)
    assert len(report.unmoved) == 78
    assert len(str(report)) < 1000


# Forms of the saved state, and errors


@pytest.mark.slow
def test_boxes_have_no_segment_in_the_paths_of_rows():
    m, params = MIGRATIONS["stack"], start()
    state = aged(adam, params)[1]
    boxed = {f"{name}/value": leaf for name, leaf in ta.to_flat_dict(state).items()}
    mixed = {name.replace("bias/value", "bias"): leaf for name, leaf in boxed.items()}
    for saved in (boxed, {"opt_state": boxed, "step": 3}, mixed):
        again, report = ta.carry_state(adam, m(params), saved, migration=m)
        assert (report.fresh, report.unmoved) == ((), {})
        assert_equal(again, ta.carry_state(adam, m(params), state, migration=m)[0])


def test_a_state_of_nested_dicts_in_a_whole_checkpoint():
    m = ta.Migration({"layers/{l}/w : o i": "blocks/w : l i o", "{r:**}": "{r}"})
    layers = {str(i): {"w": jnp.full((2, 3), float(i))} for i in range(2)}
    params = {"layers": layers, "head": {"w": jnp.ones((3, 4))}}
    flat = m(params)
    new = {"blocks": {"w": flat["blocks/w"]}, "head": {"w": flat["head/w"]}}
    old = aged(adam, params)[1]
    saved = {"params": params, "opt_state": old, "step": 3}
    state, report = ta.carry_state(adam, new, saved, migration=m)
    assert (report.fresh, report.unmoved) == ((), {})
    assert np.array_equal(
        state[0].nu["blocks"]["w"][1], old[0].nu["layers"]["1"]["w"].T
    )


def test_moments_go_to_the_shardings_of_the_params():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    before, after = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (("x", None), (None, None, "x"))
    )
    m = ta.Migration({"layers/{l} : a b": "layers : l b a"})
    params = {f"layers/{i}": jax.device_put(jnp.ones((8, 3)), before) for i in range(2)}
    spec = jax.ShapeDtypeStruct((2, 3, 8), jnp.float32, sharding=after)
    new = m(params, target={"layers": spec})
    state, _ = ta.carry_state(adam, new, adam.init(params), migration=m)
    assert state[0].mu["layers"].sharding == after
    back, _ = ta.carry_state(adam, params, state, migration=m.inverse)
    assert back[0].nu["layers/1"].sharding == before


def test_moments_of_stages_go_where_each_of_them_is():
    m = ta.Migration({"layers : l a b": "layers/{l} : b a"})
    params = {"layers": jnp.ones((2, 8, 3))}
    devices = jax.devices()[3:5]
    new = {
        path: jax.device_put(leaf, device)
        for (path, leaf), device in zip(m(params).items(), devices, strict=True)
    }
    state, _ = ta.carry_state(adam, new, adam.init(params), migration=m)
    for i, device in enumerate(devices):
        assert state[0].mu[f"layers/{i}"].devices() == {device}


@pytest.mark.slow
def test_arrays_of_numpy_and_abstract_ones():
    m, params = MIGRATIONS["stack"], start()
    old = aged(adam, params)[1]
    state = ta.carry_state(adam, m(params), old, migration=m)[0]
    saved = jax.tree.map(np.asarray, ta.to_flat_dict(old))
    in_numpy, _ = ta.carry_state(adam, m(params), saved, migration=m)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(in_numpy))
    assert_equal(in_numpy, state)
    traced = jax.jit(lambda s: ta.carry_state(adam, m(params), s, migration=m)[0])(old)
    assert_equal(traced, state)
    specs = [jax.eval_shape(lambda tree: tree, each) for each in (m(params), old)]
    abstract, report = ta.carry_state(adam, *specs, migration=m)
    assert_report(report)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(
        lambda a: (a.shape, a.dtype), state
    )


def test_params_that_are_called_like_fields():
    table = {"mu": "nu", "nu/{l} : e": "count : l e", "{r:**}": "{r}"}
    params = {"mu": jnp.ones(2), "nu": {"0": jnp.ones(3), "1": jnp.ones(3)}}
    _, report = unmoved(adam, params | {"x": {"mu": jnp.ones(4)}}, table)
    assert_report(report)
    assert report.carried["0/mu/nu"] == "0/mu/mu"
    assert report.carried["0/nu/x/mu"] == "0/nu/x/mu"


def test_a_table_is_not_a_migration():
    with pytest.raises(
        ta.MigrationError, match=r"expects a ta\.Migration\(table\), and got a dict"
    ):
        ta.carry_state(adam, {"w": 1.0}, {}, migration={"v": "w"})  # type: ignore


def test_two_leaves_of_a_copy_that_get_one_name():
    m = ta.Migration({"{model}/w": "w"})
    old = adam.init({"a": {"w": jnp.ones(2)}, "b": {"w": jnp.ones(2)}})
    with pytest.raises(ta.MigrationError, match="Several leaves get the name '0/mu/w'"):
        ta.carry_state(adam, {"w": jnp.ones(2)}, old, migration=m)


def test_a_renamed_model_is_told_of_migrations():
    tx = optax.adam(1e-3)
    old = tx.init({"w": jnp.ones(2)})
    with pytest.warns(ta.TreeAdaptWarning, match="nothing was carried"):
        _, report = ta.carry_state(tx, {"kernel": jnp.ones(2)}, old)
    assert "pass migration=ta.Migration({old: new})" in report.warnings[0]
