"""``carry_state``: training goes on after what holds the state has changed."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from aged import STEPS, aged
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P
from sizes import crossed, slow_but, some
from trees import SAME_MODEL, two_layers

import treeadapt as ta
from treeadapt import carry_state

# Optax itself promotes.
pytestmark = pytest.mark.usefixtures("standard_promotion")

adam = optax.adam(1e-2)


def start() -> dict[str, Any]:
    """Params of a trunk and a head, with values that differ everywhere."""
    ramp = jnp.linspace(-1.0, 1.0, 12, dtype=jnp.float32)
    return {
        "head": {"b": ramp[:2] * 2, "w": ramp[:8].reshape(4, 2)},
        "trunk": {"b": ramp[4:8], "w": ramp.reshape(3, 4)},
    }


def grads_of(params: Any, step: int) -> Any:
    """Gradients that depend on the params, the leaf and the step."""
    flat = ta.to_flat_dict(params)
    found = {
        path: jnp.sin(leaf * (i + 2) + step)
        for i, (path, leaf) in enumerate(flat.items())
    }
    return ta.from_flat_dict(params, found)


def train(tx: Any, params: Any, state: Any, first: int, last: int) -> tuple[Any, Any]:
    # Not compiled: two programs that compute the same round differently once fused.
    with jax.disable_jit():
        for number in range(first, last):
            updates, state = tx.update(grads_of(params, number), state, params)
            params = optax.apply_updates(params, updates)
    return params, state


def trained(tx: Any, params: Any) -> tuple[Any, Any]:
    return train(tx, params, tx.init(params), 0, STEPS)


def assert_equal(one: Any, two: Any) -> None:
    one, two = ta.to_flat_dict(one), ta.to_flat_dict(two)
    assert list(one) == list(two)
    for path in one:
        assert one[path].dtype == two[path].dtype, path
        assert np.array_equal(one[path], two[path]), path


def assert_goes_on(tx: Any, params: Any, state: Any, old_tx: Any, old: Any) -> None:
    """Training on with either transformation gives the same params, bit for bit."""
    assert_equal(
        train(tx, params, state, STEPS, 2 * STEPS)[0],
        train(old_tx, params, old, STEPS, 2 * STEPS)[0],
    )


def group(name: str, *more: str) -> dict[str, str]:
    return {name: "a", **dict.fromkeys(more, "b"), "**": "frozen"}


schedule = optax.linear_schedule(1e-1, 1e-3, 3 * STEPS)

#: Transformations whose numbers do not depend on groups and wrappers around them.
LEAFWISE = {
    "adam": adam,
    "adam with a schedule": optax.adam(schedule),
    "adamw": optax.adamw(schedule, weight_decay=0.1),
    "momentum": optax.sgd(schedule, momentum=0.9),
    "rmsprop": optax.rmsprop(schedule, momentum=0.9, centered=True),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "sm3": optax.sm3(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "lion": optax.lion(schedule),
    "schedule_free": optax.contrib.schedule_free(adam, 1e-2),
    "named_chain": optax.named_chain(("one", optax.clip(1.0)), ("two", adam)),
    "inject": optax.inject_hyperparams(optax.adam)(schedule),
    "MultiSteps": optax.MultiSteps(adam, 3).gradient_transformation(),
    "muon": optax.contrib.muon(1e-2),
}

#: What can be around a transformation, once for all leaves.
WRAPPED = {
    "adapt": ta.adapt,
    "plain": lambda tx: tx,
    "partition": lambda tx: ta.partition({"a": tx}, {"**": "a"}),
    "groups": lambda tx: ta.partition({"a": tx, "b": tx}, {"head": "a", "**": "b"}),
    "optax.partition": lambda tx: optax.partition(
        {"a": tx, "b": tx}, {"head": "a", "trunk": "b"}
    ),
    "masked": lambda tx: optax.masked(tx, {"head": True, "trunk": True}),
    "freeze": lambda tx: ta.freeze(tx, []),
    "chain": lambda tx: optax.chain(optax.clip(100.0), tx, optax.identity()),
    "named_chain": lambda tx: optax.named_chain(("c", optax.clip(100.0)), ("tx", tx)),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


#: From what to what each transformation is carried.
MOVES = [
    ("adapt", "chain"),
    ("optax.partition", "groups"),
    ("groups", "plain"),
    ("named_chain", "groups"),
    ("masked", "apply_if_finite"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("inside", "move"), crossed(LEAFWISE, MOVES, 3))
def test_training_goes_on_bit_for_bit(inside, move):
    before, after = move
    if before == "optax.partition" and inside in ("schedule_free", "muon"):
        pytest.skip("Optax itself cannot: it needs every leaf")
    one, two = (WRAPPED[around](LEAFWISE[inside]) for around in (before, after))
    params, old = trained(one, start())
    state, report = carry_state(two, params, old)
    assert report.misshaped == report.ambiguous == {}
    assert report.warnings == ()
    assert_goes_on(two, params, state, one, old)


@pytest.mark.parametrize("around", WRAPPED)
def test_the_same_transformation_gets_every_leaf_and_no_copy(around):
    tx = WRAPPED[around](optax.adam(schedule))
    params, old = aged(tx, start())
    state, report = carry_state(tx, params, old)
    assert jax.tree.structure(state) == jax.tree.structure(old)
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(old), strict=True):
        assert one is two
    assert set(report.carried) == set(ta.to_flat_dict(old))
    assert report.left_over == report.fresh == report.warnings == ()


def rules(*groups: str) -> Any:
    """One Adam for each group; the other leaves are frozen."""
    table = dict(group.split(":") for group in groups)
    return ta.partition(
        {name: optax.adam(schedule) for name in table},
        [*((w.split("|"), name) for name, w in table.items()), ("**", "frozen")],
    )


@pytest.mark.slow
def test_a_leaf_that_thaws_into_a_group_of_its_own_starts_as_if_new():
    before, after = rules("a:trunk"), rules("a:trunk", "b:head")
    params, old = trained(before, start())
    state, report = carry_state(after, params, old)
    assert report.warnings == report.left_over == ()
    assert set(report.fresh) == {
        name for name in ta.to_flat_dict(state) if name.startswith("inner_states/b/")
    }
    got = train(after, params, state, STEPS, 2 * STEPS)[0]
    assert_equal(got["trunk"], train(before, params, old, STEPS, 2 * STEPS)[0]["trunk"])
    alone = rules("b:head")
    fresh = train(alone, params, alone.init(params), STEPS, 2 * STEPS)[0]
    assert_equal(got["head"], fresh["head"])


@pytest.mark.slow
def test_freezing_more_leaves_the_others_alone():
    before, after = rules("a:**"), rules("a:trunk")
    params, old = trained(before, start())
    state, report = carry_state(after, params, old)
    assert report.fresh == report.warnings == ()
    assert report.left_over == (
        "inner_states/a/0/mu/head/b",
        "inner_states/a/0/mu/head/w",
        "inner_states/a/0/nu/head/b",
        "inner_states/a/0/nu/head/w",
    )
    one = train(after, params, state, STEPS, 2 * STEPS)[0]
    two = train(before, params, old, STEPS, 2 * STEPS)[0]
    assert_equal(one["trunk"], two["trunk"])
    assert_equal(one["head"], params["head"])


@pytest.mark.slow
def test_thawing_one_layer_after_another():
    params = start()
    stages = [
        rules("a:head/w"),
        rules("a:head/w", "b:head/b"),
        rules("a:head/w", "b:head/b", "c:trunk"),
        rules("a:*/w", "b:*/b"),
    ]
    state = stages[0].init(params)
    reports = []
    for number, tx in enumerate(stages):
        state, report = carry_state(tx, params, state)
        params, state = train(tx, params, state, number, number + 1)
        reports.append(report)
    assert [len(report.fresh) for report in reports] == [0, 4, 6, 0]
    assert [report.left_over for report in reports[:3]] == [()] * 3
    # The trunk was younger than the groups that it joined at the end.
    (text,) = reports[3].warnings
    assert "(2 alike)" in text
    assert "'trunk/w', 'trunk/b'" in text
    assert "reset=['inner_states/a/0', 'inner_states/b/0']." in text
    counts = [int(ta.to_flat_dict(state)[f"inner_states/{g}/0/count"]) for g in "ab"]
    assert counts == [4, 3]


def test_moments_under_an_old_count_are_reported_with_the_cure():
    params, old = aged(rules("a:trunk"), start())
    old = set_count(old, 1000)
    after = rules("a:**")
    state, report = carry_state(after, params, old)
    (text,) = report.warnings
    assert "1,000 in 'inner_states/a/0/count'" in text
    assert "mu, nu of 'head/b', 'head/w' start again" in text
    assert "2.5 times its usual length" in text
    assert "reset='inner_states/a/0'" in text
    assert text in str(report)
    # The cure that it names, and the one that it names first.
    state, report = carry_state(after, params, old, reset="inner_states/a/0")
    assert report.warnings == ()
    assert_equal(state.inner_states["a"][0], after.init(params).inner_states["a"][0])
    assert carry_state(rules("a:trunk", "b:head"), params, old)[1].warnings == ()


def test_alike_warnings_of_several_groups_are_one_with_a_cure_for_all():
    names = "abcdef"
    params = {name: {"w": jnp.ones(2), "b": jnp.ones(2)} for name in names}
    adams = {name: optax.adam(0.1) for name in names}
    some = {f"{name}/w": name for name in names} | {"**": "frozen"}
    params, old = aged(ta.partition(adams, some), params)
    after = ta.partition(adams, {name: name for name in names})
    _, report = carry_state(after, params, old)
    (text,) = report.warnings
    assert text.startswith("fresh moments under an old step count (6 alike): ")
    assert "'inner_states/a/0/count', 'inner_states/b/0/count'" in text
    assert "mu, nu of 'a/b', 'b/b', 'c/b', 'd/b', 'e/b', 'f/b' start again" in text
    cure = [f"inner_states/{name}/0" for name in names]
    assert text.endswith(f"reset={cure}.")
    assert carry_state(after, params, old, reset=cure)[1].warnings == ()


@pytest.mark.parametrize(
    ("other", "title"),
    [
        (optax.yogi(0.1), "moments below where they start"),
        (optax.lion(0.1), "moments of another kind"),
    ],
)
def test_another_optimizer_in_several_groups_is_one_warning(other, title):
    params = {name: jnp.ones(2) for name in "abc"}
    groups = {name: name for name in params}
    before = ta.partition(dict.fromkeys("abc", adam), groups)
    old = small_steps(before, params, 10)
    after = ta.partition(dict.fromkeys("abc", other), groups)
    _, report = carry_state(after, params, old)
    (text,) = report.warnings
    assert text.startswith(f"{title} (3 alike): ")
    cure = [f"inner_states/{name}/0" for name in "abc"]
    assert text.endswith(f"reset={cure}.")
    assert carry_state(after, params, old, reset=cure)[1].warnings == ()


def test_warnings_that_differ_in_numbers_stay_apart():
    params, old = aged(rules("a:trunk/w", "b:head/w"), start())
    old.inner_states["a"] = set_count(old.inner_states["a"], 1000)
    _, report = carry_state(rules("a:trunk", "b:head"), params, old)
    assert [" alike" in text for text in report.warnings] == [False, False]


def test_the_name_of_a_file_is_not_a_state():
    with pytest.raises(ta.CheckpointError, match=r"'run.safetensors'.*treeadapt.load"):
        carry_state(optax.adam(0.1), start(), "run.safetensors")


def set_count(state: Any, steps: int) -> Any:
    flat = ta.to_flat_dict(state)
    counts = {name: jnp.int32(steps) for name in flat if name.endswith("/count")}
    return ta.from_flat_dict(state, flat | counts)


@pytest.mark.slow
def test_the_first_step_under_an_old_count_is_that_much_too_long():
    tx = optax.scale_by_adam(eps=0.0)
    params = {"w": jnp.ones(1)}
    model, old = aged(rules("a:trunk"), start())
    for steps in (10, 30, 100, 300, 1000, 3000, 10_000, 100_000):
        updates, _ = tx.update(params, tx.init(params)._replace(count=jnp.int32(steps)))
        _, report = carry_state(rules("a:**"), model, set_count(old, steps))
        length = f"would be {updates['w'][0]:.1f} times its usual length"
        assert length in report.warnings[0]


@pytest.mark.slow
def test_a_leaf_moves_to_another_group_with_its_moments():
    before = rules("a:trunk", "b:head")
    after = rules("a:trunk|head/w", "b:head")
    params, old = trained(before, start())
    state, report = carry_state(after, params, old)
    assert report.warnings == report.fresh == report.left_over == ()
    assert report.carried["inner_states/a/0/mu/head/w"] == "inner_states/b/0/mu/head/w"
    assert report.carried["inner_states/a/0/count"] == "inner_states/a/0/count"
    assert_goes_on(after, params, state, before, old)


def test_a_leaf_that_joins_an_older_group_is_reported():
    params, old = aged(rules("a:trunk", "b:head"), start())
    old.inner_states["a"] = set_count(old.inner_states["a"], 1000)
    state, report = carry_state(rules("a:trunk|head/w", "b:head"), params, old)
    (text,) = report.warnings
    assert "another age" in text
    assert "'head/w'" in text
    assert "'head/b'" not in text
    # The group's own count stays: what did not move goes on exactly.
    assert int(state.inner_states["a"][0].count) == 1000
    assert int(state.inner_states["a"][1].count) == 1000


def test_groups_of_different_ages_that_merge_take_the_smaller_count():
    params, old = aged(rules("a:trunk", "b:head"), start())
    old.inner_states["a"] = set_count(old.inner_states["a"], 1000)
    tx = ta.adapt(optax.adam(schedule))
    state, report = carry_state(tx, params, old)
    assert report.carried["0/count"] == "inner_states/b/0/count"
    assert [int(state[0].count), int(state[1].count)] == [STEPS, STEPS]
    (text,) = report.warnings
    assert "'trunk/b', 'trunk/w'" in text


def test_a_group_that_is_divided_takes_its_count_along_and_can_be_donated():
    params, old = aged(ta.adapt(optax.adam(schedule)), start())
    state, report = carry_state(rules("a:trunk", "b:head"), params, old)
    assert report.fresh == ()
    one, two = (state.inner_states[group] for group in "ab")
    assert int(one[0].count) == int(two[0].count) == STEPS
    leaves = jax.tree.leaves(state)
    assert len({id(leaf) for leaf in leaves}) == len(leaves)
    jax.jit(lambda state: state, donate_argnums=0)(jax.tree.map(jnp.copy, state))


@pytest.mark.slow
def test_one_group_is_reset_and_the_others_stay():
    tx = rules("a:trunk", "b:head")
    params, old = aged(tx, start())
    state, report = carry_state(tx, params, old, reset="inner_states/b")
    assert jax.tree.structure(state) == jax.tree.structure(old)
    assert_equal(state.inner_states["a"], old.inner_states["a"])
    assert_equal(state.inner_states["b"], tx.init(params).inner_states["b"])
    assert report.fresh == report.warnings == ()
    assert all(name.startswith("inner_states/b/") for name in report.reset)
    tx.update(params, state, params)


def test_leaves_are_reset_by_their_path():
    tx = ta.adapt(optax.trace(0.9))
    params, old = aged(tx, start())
    state, report = carry_state(tx, params, old, reset="**/head")
    assert report.reset == ("trace/head/b", "trace/head/w")
    assert not np.any(state.trace["head/w"])
    assert state.trace["trunk/w"] is old.trace["trunk/w"]


def test_a_reset_that_selects_nothing_is_an_error():
    tx = ta.adapt(adam)
    with pytest.raises(ta.UnusedRuleError, match="inner_states/b"):
        carry_state(tx, start(), tx.init(start()), reset="inner_states/b")


@pytest.mark.parametrize(
    "row",
    [row for row in SAME_MODEL if not row.opaque and row.name != "abstract"],
    ids=lambda row: row.name,
)
def test_a_state_of_plain_adam_on_any_container_loads_into_adapt(row):
    model = row.make()
    arrays = eqx.filter(model, eqx.is_array)
    old = optax.adam(1e-2).init(arrays)
    old = jax.tree.map(lambda leaf: leaf + 3 if leaf.dtype == jnp.int32 else leaf, old)
    other = two_layers(dict, dict)
    state, report = carry_state(ta.adapt(adam), other, old)
    assert report.fresh == report.left_over == ()
    assert int(state[0].count) == 3
    # And back: native Optax takes over a state that was made through adapt.
    state, report = carry_state(adam, arrays, ta.adapt(adam).init(other))
    assert report.fresh == report.left_over == ()
    assert jax.tree.structure(state) == jax.tree.structure(old)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["flat dict", "state dict", "msgpack", "npz"])
def test_a_state_from_disk(form, tmp_path):
    tx = ta.partition({"a": optax.adam(schedule)}, {"**": "a"})
    params, old = trained(optax.adam(schedule), FrozenDict(start()))
    if form == "flat dict":
        saved = ta.to_flat_dict(old)
    elif form == "state dict":
        saved = ta.to_state_dict(old)
    elif form == "msgpack":
        data = flax.serialization.to_bytes(old)
        saved = flax.serialization.msgpack_restore(data)
    else:
        np.savez(tmp_path / "state.npz", **ta.to_flat_dict(old))
        with np.load(tmp_path / "state.npz") as file:
            saved = dict(file)
    params = params.unfreeze()
    state, report = carry_state(tx, params, saved)
    assert report.fresh == report.left_over == ()
    plain = optax.adam(schedule)
    old = jax.tree.map(
        jnp.asarray, ta.from_flat_dict(plain.init(params), saved_flat(old))
    )
    assert_goes_on(tx, params, state, plain, old)


def saved_flat(state: Any) -> dict[str, Any]:
    return ta.to_flat_dict(state)


def test_a_whole_training_state_will_do():
    class TrainState(NamedTuple):
        step: Any
        params: Any
        opt_state: Any

    params, old = aged(adam, start())
    saved = TrainState(jnp.int32(5), params, old)
    state, report = carry_state(ta.adapt(adam), params, saved)
    assert report.fresh == ()
    assert_equal(state, old)


class Named(NamedTuple):
    """Params that are called like the fields of a state."""

    count: Any
    mu: Any
    value: Any
    grad: Any
    learning_rate: Any


def named() -> Named:
    ramp = jnp.linspace(1.0, 2.0, 3, dtype=jnp.float32)
    return Named(ramp, {"mu": ramp * 2, "nu": {"mu": ramp * 3}}, ramp[0], ramp, ramp)


@pytest.mark.parametrize(
    "kind",
    slow_but(["adam", "inject"], ["adam", "inject", "lbfgs", "MultiSteps", "lion"]),
)
def test_params_that_are_called_like_fields(kind):
    tx = {**LEAFWISE, "lbfgs": optax.lbfgs(memory_size=2, linesearch=None)}[kind]
    params, old = trained(tx, named())
    after = ta.partition({"a": tx}, {"**": "a"})
    state, report = carry_state(after, params, old)
    assert report.fresh == report.left_over == report.warnings == (), str(report)
    assert all(name.endswith("/" + source) for name, source in report.carried.items())
    if kind != "lbfgs":  # its sums run over the leaves in another order
        assert_goes_on(after, params, state, tx, old)
    again, report = carry_state(tx, params, state)
    assert_equal(again, old)


def nasty() -> dict[str, Any]:
    """Params whose paths read like those of a state."""

    def ones(*shape: int) -> Any:
        return jnp.ones(shape)

    return {
        "0": {
            "count": ones(2, 2),
            "mu": ones(3, 2),
            "nu": {"0": {"trace": ones(2, 3)}},
        },
        "mu": {
            "0": {"count": ones(2, 4), "inner_state": ones(4, 2)},
            "nu": {"0": {"count": ones(1, 2)}},
        },
        "inner_state": {"0": {"mu": ones(5, 2), "count": ones(2, 2)}},
        "inner_states": {"mu": {"0": {"count": ones(3, 3)}}},
        "trace": ones(2, 2),
    }


def in_groups(tx: Any, **labels: str) -> Any:
    rules = {**labels, "**": "inner_states"}
    return ta.partition(dict.fromkeys(rules.values(), tx), rules)


#: The same params in groups whose labels are names of fields, or indices.
NASTY = {
    "mu": lambda tx: in_groups(tx, **{"0/**": "mu", "mu/**": "0", "inner_state": "nu"}),
    "nu": lambda tx: in_groups(tx, **{"0/**": "nu", "mu/**": "mu", "trace": "count"}),
    "adapt": ta.adapt,
    "plain": lambda tx: tx,
}
MORE = {
    **LEAFWISE,
    "lbfgs": optax.lbfgs(memory_size=2, linesearch=None),
    "search": optax.lbfgs(memory_size=2),
    "private": optax.contrib.differentially_private_aggregate(
        1.0, 0.5, jax.random.key(0)
    ),
    "momentum": optax.rmsprop(1e-2, momentum=0.9),
    "trace": optax.trace(0.9),
    "ema": optax.ema(0.9),
}


@pytest.mark.parametrize(("name", "kind"), some(itertools.product(MORE, NASTY)))
def test_an_unchanged_state_is_carried_whole_whatever_its_names(name, kind):
    params, tx = nasty(), NASTY[kind](MORE[name])
    old = tx.init(params)
    for saved in (old, ta.to_flat_dict(old), ta.to_state_dict(old)):
        state, report = carry_state(tx, params, saved)
        assert report.carried == {path: path for path in ta.to_flat_dict(old)}
        assert not any("another kind" in text for text in report.warnings)
        pairs = zip(*map(jax.tree.leaves, (state, old)), strict=True)
        assert all(one is two or np.array_equal(one, two) for one, two in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "renames"),
    list(
        itertools.product(
            ["adam", "inject", "MultiSteps", "muon", "trace"], NASTY, [False, True]
        )
    ),
)
def test_groups_of_such_names_are_carried_into_others(name, kind, renames):
    params, old = nasty(), NASTY[kind](MORE[name]).init(nasty())
    same = ta.Migration({"{path:**}": "{path}"}) if renames else None
    for other in NASTY.keys() - {kind}:
        tx = NASTY[other](MORE[name])
        for saved in (old, ta.to_flat_dict(old)):
            _, report = carry_state(tx, params, saved, migration=same)
            assert report.fresh == (), str(report)
            assert report.misshaped == report.ambiguous == {}, str(report)


def test_a_state_of_ones_own_is_known_by_its_class():
    class Mine(NamedTuple):
        buffers: Any
        inner: Any

    def mine(tx: Any) -> Any:
        def init(params: Any) -> Any:
            return Mine((params, params), tx.init(params))

        return optax.GradientTransformation(init, tx.update)

    params = nasty()
    old = NASTY["mu"](mine(adam)).init(params)
    for kind in NASTY:
        _, report = carry_state(NASTY[kind](mine(adam)), params, old)
        assert report.fresh == (), str(report)
        assert report.ambiguous == report.misshaped == {}, str(report)
    path = "buffers/1/mu/nu/0/count"
    assert report.carried[path] == f"inner_states/0/{path}"


def test_a_removed_layer_that_is_called_like_a_field():
    tx = ta.adapt(optax.trace(0.9))
    old = tx.init({"a": jnp.ones(2), "trace": {"w": jnp.ones(2)}})
    _, report = carry_state(tx, {"a": jnp.ones(2), "w": jnp.ones(2)}, old)
    assert report.carried == {"trace/a": "trace/a"}
    assert report.fresh == ("trace/w",)
    assert report.left_over == ("trace/trace/w",)


@functools.cache
def step_of(tx: Any) -> Any:
    """One step of a line search, compiled once for each transformation."""

    def loss(params: Any) -> Any:
        leaves = ta.to_flat_dict(params).values()
        return sum(jnp.sum((leaf - 0.3) ** 4) for leaf in leaves)

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(loss)(params)
        updates, state = tx.update(
            grad, state, params, value=value, grad=grad, value_fn=loss
        )
        return optax.apply_updates(params, updates), state

    return step


def line_search(tx: Any, params: Any, state: Any, steps: int) -> tuple[Any, Any]:
    # A state with weak types would be compiled by itself.
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)
    for _ in range(steps):
        params, state = step_of(tx)(params, state)
    return params, state


@pytest.mark.slow
def test_a_line_search_goes_on():
    tx = optax.lbfgs(memory_size=3)
    before, after = ta.adapt(tx), ta.partition({"a": tx}, {"**": "a"})
    params, old = line_search(before, start(), before.init(start()), 3)
    state, report = carry_state(after, params, old)
    assert report.fresh == report.left_over == report.warnings == ()
    assert_equal(
        line_search(after, params, state, 2)[0], line_search(before, params, old, 2)[0]
    )


@pytest.mark.slow
def test_a_stored_value_is_left_behind_when_its_gradient_is_not_whole():
    tx = optax.lbfgs(memory_size=3)
    before, after = ta.freeze(tx, "head"), ta.freeze(tx, [])
    params, old = line_search(before, start(), before.init(start()), 3)
    state, report = carry_state(after, params, old)
    assert "2/value" in report.fresh
    assert float(state[2].value) == np.inf
    # Where leaves are only frozen, the gradient of the others is whole.
    state, report = carry_state(before, params, state)
    assert "2/value" in report.carried


def test_hyperparameters_are_carried_and_can_be_reset():
    make = optax.inject_hyperparams(optax.adam)
    before, after = ta.adapt(make(1e-2)), ta.partition({"a": make(5e-2)}, {"**": "a"})
    params, old = aged(before, start())
    old.hyperparams["learning_rate"] = jnp.float32(0.25)
    state, _ = carry_state(after, params, old)
    assert float(state.inner_states["a"].hyperparams["learning_rate"]) == 0.25
    state, report = carry_state(after, params, old, reset="**/learning_rate")
    assert float(state.inner_states["a"].hyperparams["learning_rate"]) == np.float32(
        0.05
    )
    assert report.reset == ("inner_states/a/hyperparams/learning_rate",)


@pytest.mark.parametrize("inside", ["sgd", "adam"])
def test_schedules_follow_the_leaves(inside):
    tx = optax.sgd(schedule) if inside == "sgd" else optax.adam(schedule)
    params, old = aged(tx, start())
    after = ta.partition({"a": tx, "b": tx}, {"head": "a", "**": "b"})
    state, _ = carry_state(after, params, old)
    counts = [int(state.inner_states[group][1].count) for group in "ab"]
    assert counts == [STEPS, STEPS]
    third = ta.partition(
        {"a": tx, "b": tx, "c": tx}, {"head/w": "c", "head": "a", "**": "b"}
    )
    state, report = carry_state(third, params, state)
    # SGD has no moments that say where group c came from, but all groups agree.
    counts = [int(state.inner_states[group][1].count) for group in "abc"]
    assert counts == [STEPS] * 3
    assert report.fresh == report.warnings == ()


def scheduled(*labels: str) -> Any:
    """Schedules alone, one for each of the leaves in turn."""
    rules = [(f"*/{path}", label) for path, label in zip("bw", labels, strict=True)]
    made = optax.scale_by_schedule(schedule)
    return ta.partition(dict.fromkeys(labels, made), rules)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        ("ab", "ab", [5, 2]),  # names decide
        ("ab", "ba", [5, 2]),
        ("ab", "ac", [5, None]),
        ("ab", "cd", [None, None]),
        ("ab", "cc", [None]),
        ("aa", "cd", [2, 2]),  # there is one
        ("aa", "cc", [2]),
    ],
)
def test_groups_without_moments_take_no_count_of_others(before, after, counts, outer):
    params, old = start(), scheduled(*before).init(start())
    for label, count in zip(before, (5, 2), strict=True):
        was = old.inner_states[label]
        old.inner_states[label] = was._replace(count=jnp.int32(count))
    tx = scheduled(*after)
    if outer:
        tx = optax.chain(optax.clip(1.0), tx)
    labels, unsure = sorted({*after}), counts.count(None)
    check = pytest.warns(ta.TreeAdaptWarning, match="may be any of several saved ones")
    with check if unsure else contextlib.nullcontext():
        state, report = carry_state(tx, params, old)
    groups = (state[1] if outer else state).inner_states
    assert [int(groups[x].count) for x in labels] == [x or 0 for x in counts]
    assert len(report.ambiguous) == unsure
    assert any("may be any of several" in x for x in report.warnings) == bool(unsure)
    # Equal counts are no question, and what is reset is none either.
    for count, reset in ((7, None), (None, "**/count")):
        equal = old if count is None else jax.tree.map(lambda _: jnp.int32(7), old)
        state, report = carry_state(tx, params, equal, reset=reset)
        assert report.ambiguous == {}
        assert {int(x) for x in jax.tree.leaves(state)} == {count or 0}


def test_a_chain_of_masked_schedules_gives_no_group_the_count_of_another():
    params = {"img": jnp.ones(3), "txt": jnp.ones(3)}
    one = optax.scale_by_schedule(schedule)
    masks = [{name: name == key for name in params} for key in params]
    old = optax.chain(adam, *(optax.masked(one, mask) for mask in masks)).init(params)
    saved = (old[0], set_count(old[1], 5), set_count(old[2], 2))
    groups = ta.partition(dict.fromkeys(params, one), {name: name for name in params})
    tx = optax.chain(adam, groups)
    with pytest.warns(ta.TreeAdaptWarning, match="'1/inner_states/img/count' could be"):
        state, report = carry_state(tx, params, saved)
    assert list(report.ambiguous) == [
        "1/inner_states/img/count",
        "1/inner_states/txt/count",
    ]
    saved = (old[0], set_count(old[1], 5), set_count(old[2], 5))
    state, report = carry_state(tx, params, saved)
    assert [int(x.count) for x in state[1].inner_states.values()] == [5, 5]
    assert report.warnings == ()


def test_groups_without_moments_join_by_their_counts():
    tx = optax.sgd(schedule)
    before = ta.partition({"a": tx, "b": tx}, {"head": "a", "**": "b"})
    params, old = aged(before, start())
    state, report = carry_state(ta.adapt(tx), params, old)
    assert int(state[1].count) == STEPS
    old.inner_states["b"] = set_count(old.inner_states["b"], STEPS - 1)
    with pytest.warns(ta.TreeAdaptWarning, match="'1/count' could be"):
        state, report = carry_state(ta.adapt(tx), params, old)
    assert report.carried == {}


def test_states_without_moments_are_not_guessed_between():
    params = start()
    two = optax.chain(optax.scale_by_schedule(schedule), optax.sgd(schedule))
    one = optax.named_chain(("sgd", optax.scale_by_schedule(schedule)))
    first, second = two.init(params)
    with pytest.warns(ta.TreeAdaptWarning, match="'sgd/count' could be"):
        _, report = carry_state(
            ta.adapt(one), params, (first._replace(count=jnp.int32(3)), second)
        )
    assert report.ambiguous == {"sgd/count": ("0/count", "1/1/count")}
    _, report = carry_state(ta.adapt(one), params, (first, second))
    assert report.carried == {"sgd/count": "0/count"}
    # What is counted are updates, which all stages of a chain see.
    state, report = carry_state(ta.adapt(two), params, set_count(one.init(params), 3))
    assert {int(count) for count in jax.tree.leaves(state)} == {3}
    # Of other numbers that is not so.
    rates = optax.inject_hyperparams(optax.sgd)(0.1)
    twice = optax.chain(rates, optax.named_chain(("more", rates)))
    alone = optax.named_chain(("rate", rates))
    with pytest.warns(ta.TreeAdaptWarning, match="hyperparams/learning_rate' could be"):
        carry_state(ta.adapt(twice), params, alone.init(params))


@pytest.mark.parametrize(
    ("after", "counts"),
    [
        (lambda a, s: optax.chain(a, s, s), [9, 5, 2]),
        (lambda a, s: optax.apply_if_finite(optax.chain(a, s, s), 3), [9, 5, 2]),
        (
            lambda a, s: ta.partition({"x": optax.chain(a, s, s)}, {"**": "x"}),
            [9, 5, 2],
        ),
        (lambda a, s: optax.chain(a, s), [9, None]),
        (lambda a, s: optax.chain(optax.clip(1.0), a, s, s), [9, None, None]),
    ],
)
def test_a_place_next_to_moments_is_no_name_if_stages_came_or_went(after, counts):
    moments, stage = optax.scale_by_adam(), optax.scale_by_schedule(schedule)
    params, old = start(), optax.chain(moments, stage, stage).init(start())
    saved = tuple(
        part._replace(count=jnp.int32(count))
        for part, count in zip(old, (9, 5, 2), strict=True)
    )
    check = pytest.warns(ta.TreeAdaptWarning, match="may be any of several saved")
    with check if None in counts else contextlib.nullcontext():
        state, _ = carry_state(after(moments, stage), params, saved)
    names = {n: x for n, x in ta.to_flat_dict(state).items() if n.endswith("/count")}
    assert [int(count) for count in names.values()] == [count or 0 for count in counts]


WHERE_IT_COUNTS = {
    "plain": lambda tx: tx,
    "twice": lambda tx: optax.chain(tx, optax.scale_by_schedule(schedule)),
    "later": lambda tx: optax.chain(
        optax.clip(1.0), tx, optax.scale_by_schedule(schedule)
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "groups": lambda tx: ta.partition({"x": tx, "y": tx}, {"head": "x", "**": "y"}),
    "masked": lambda tx: optax.chain(
        optax.masked(tx, {"head": True, "trunk": False}),
        optax.masked(tx, {"head": False, "trunk": True}),
    ),
    "named": lambda tx: optax.named_chain(("s", tx)),
    "inject": lambda tx: optax.inject_hyperparams(optax.sgd)(schedule),
    "freeze": lambda tx: ta.freeze(tx, "head"),
}


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.permutations(WHERE_IT_COUNTS, 2))
)
def test_equal_counts_are_taken_and_others_are_not_guessed(before, after):
    params, schedules = start(), optax.sgd(schedule)
    old = WHERE_IT_COUNTS[before](schedules).init(params)
    tx = WHERE_IT_COUNTS[after](schedules)
    names = [name for name in ta.to_flat_dict(old) if name.endswith("count")]
    for counts in (
        dict.fromkeys(names, 7),
        dict(zip(names, range(7, 20), strict=False)),
    ):
        flat = ta.to_flat_dict(old) | {n: jnp.int32(c) for n, c in counts.items()}
        are_equal = len(set(counts.values())) == 1
        check = pytest.warns(ta.TreeAdaptWarning, match="may be any of several saved")
        with contextlib.nullcontext() if are_equal else check:
            state, _ = carry_state(tx, params, ta.from_flat_dict(old, flat))
        new = ta.to_flat_dict(state)
        carried = {int(new[name]) for name in new if name.endswith("count")}
        assert carried == {7 if are_equal else 0}


def test_noise_of_groups_goes_on():
    tx = optax.add_noise(0.1, 0.5, 0)
    params, old = aged(ta.adapt(tx), start())
    after = ta.partition({"a": tx, "b": tx}, {"head": "a", "**": "b"})
    state, report = carry_state(after, params, old)
    assert report.fresh == report.left_over == ()
    keys = [jax.random.key_data(state.inner_states[g].rng_key) for g in "ab"]
    assert np.array_equal(*keys)


def test_a_layer_of_another_size_is_fresh_and_told():
    tx = ta.adapt(adam)
    params, old = aged(tx, start())
    params["head"]["w"] = jnp.ones((4, 5))
    state, report = carry_state(tx, params, old)
    assert state[0].mu["head/w"].shape == (4, 5)
    assert list(report.misshaped) == ["0/mu/head/w", "0/nu/head/w"]
    assert "'0/mu/head/w' is float32[4,5], but the saved one is float32[4,2]" in str(
        report
    )
    assert "'head/w'" in report.warnings[0]


@pytest.mark.slow
def test_another_dtype_is_not_cast_in_silence():
    tx = ta.adapt(optax.adam(1e-2, mu_dtype=jnp.bfloat16))
    params, old = aged(ta.adapt(adam), start())
    state, report = carry_state(tx, params, old)
    assert "bfloat16[2], but the saved one is float32[2]" in str(report)
    assert state[0].mu["head/b"].dtype == jnp.bfloat16
    assert state[0].nu["head/b"] is old[0].nu["head/b"]
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), old[0].mu)
    state, report = carry_state(tx, params, (old[0]._replace(mu=cast), *old[1:]))
    assert report.misshaped == {}


#: Params of another dtype, by the names of transformations with state of all kinds.
CASTS = {
    **LEAFWISE,
    "lbfgs": optax.lbfgs(memory_size=2, linesearch=None),
    "mu_dtype": optax.adam(1e-2, mu_dtype=jnp.float32),
    "schedule_free_adamw": optax.contrib.schedule_free_adamw(1e-2),
    "ema": optax.chain(optax.ema(0.9), optax.scale(-1e-2)),
    "noise": optax.noisy_sgd(1e-2, key=0),
    "zero_nans": optax.chain(optax.zero_nans(), adam),
}


@pytest.mark.parametrize(
    ("name", "form"), some(itertools.product(CASTS, ["own", "flat"]), 9)
)
def test_a_state_follows_params_that_are_cast(name, form):
    tx = ta.adapt(CASTS[name])
    params, old = aged(tx, start())
    old = jax.tree.map(  # some drift with the gradients
        lambda leaf, like: (
            leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)
        ),
        old,
        tx.init(params),
    )
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    saved = ta.to_flat_dict(old) if form == "flat" else old
    want = ta.to_flat_dict(tx.init(small))
    state, report = carry_state(tx, small, saved, cast=True)
    assert report.fresh == report.left_over == report.warnings == (), str(report)
    flat = ta.to_flat_dict(old)
    for path, leaf in ta.to_flat_dict(state).items():
        assert leaf.dtype == want[path].dtype
        if leaf.dtype == flat[path].dtype:
            assert leaf is flat[path]
            assert path not in report.retyped
        else:
            assert np.array_equal(leaf, flat[path].astype(leaf.dtype)), path
            assert report.retyped[path] == ("float32", "bfloat16")
    back, report = carry_state(tx, params, state, cast=True)
    assert report.warnings == ()
    for path, leaf in ta.to_flat_dict(back).items():
        assert leaf.dtype == flat[path].dtype
    # Without it nothing is cast, and the report names the cure.
    _, report = carry_state(tx, small, saved)
    assert report.retyped == {}
    is_same = all(leaf.dtype == want[path].dtype for path, leaf in flat.items())
    assert is_same == (not report.misshaped)
    if not is_same:
        assert "pass cast=True" in report.warnings[0]
        assert not any("renamed" in text for text in report.warnings)


def test_a_cast_is_in_the_report():
    params, old = aged(ta.adapt(adam), start())
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    _, report = carry_state(ta.adapt(adam), small, old, cast=True)
    assert "8 of them cast from float32 to bfloat16: '0/mu/head/b'" in str(report)
    _, report = carry_state(ta.adapt(adam), small, old)
    assert report.warnings[0].startswith(
        "8 leaves of another dtype than saved, started again: '0/mu/head/b', "
    )


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8", "complex64", "key"])
def test_integers_bools_and_keys_are_never_cast(dtype):
    def init(params):
        return optax.TraceState(params)

    def of(dtype):
        leaf = jax.random.key(0) if dtype == "key" else jnp.zeros((), dtype)
        return {"w": leaf}

    tx = optax.GradientTransformation(init, adam.update)
    _, report = carry_state(tx, {"w": jnp.ones(())}, optax.TraceState(of(dtype)))
    for cast in (False, True):
        saved = optax.TraceState(of(dtype))
        _, report = carry_state(tx, {"w": jnp.ones(())}, saved, cast=cast)
        assert list(report.misshaped) == ["trace/w"]
        assert not any("cast=True" in text for text in report.warnings)
    if dtype in ("int32", "uint8"):  # counts of another width are not cast either
        saved = [optax.ScaleByScheduleState(jnp.zeros((), "int8"))]
        tx = optax.chain(optax.scale_by_schedule(schedule))
        _, report = carry_state(tx, start(), saved, cast=True)
        assert list(report.misshaped) == ["0/count"]


@pytest.mark.parametrize("form", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_what_would_become_infinite_or_zero_is_not_cast_in_silence(form):
    old = optax.adam(1e-2).init({"v": jnp.ones(2), "w": jnp.ones(2)})
    mu, nu = old[0].mu, old[0].nu
    old[0].mu["w"], old[0].nu["v"] = form(np.float32([1, 1e5])), form(mu["v"] + 1e-12)
    small = {"v": jnp.ones(2, jnp.float16), "w": jnp.ones(2, jnp.float16)}
    state, report = carry_state(adam, small, old, cast=True)
    assert (
        "float16[2], where the saved float32[2] would be infinite"
        in (report.misshaped["0/mu/w"])
    )
    assert state[0].mu["w"].tolist() == [0, 0]
    (warning,) = report.warnings
    assert "'0/nu/v', '0/nu/w' were cast" in warning
    assert nu["v"].dtype == np.float32
    _, report = carry_state(adam, small, old)
    assert "cast=True" in report.warnings[0]
    assert "'0/mu/w'" not in report.warnings[0]


@pytest.mark.slow
def test_a_stored_value_is_left_behind_when_its_gradient_is_cast():
    tx = ta.adapt(optax.lbfgs(memory_size=2))
    params, old = line_search(tx, {"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)}), 2)
    small = {"w": params["w"].astype(jnp.bfloat16)}
    state, report = carry_state(tx, small, old, cast=True)
    assert [name for name in report.fresh if name.endswith("value")] == ["2/value"]
    assert jnp.isinf(ta.tree_get(state, "value"))


@pytest.mark.slow
def test_slices_are_cast():
    rules = ta.Rules({"h/0/**": "frozen", "**": "a"}, stacks={"h": 0})
    tx, params = ta.partition({"a": adam}, rules), {"h": {"w": jnp.ones((3, 2))}}
    old = aged(tx, params)[1]
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    state, report = carry_state(ta.adapt(adam), small, old, cast=True)
    assert report.retyped["0/mu/h/w"] == ("float32", "bfloat16")
    assert report.partly["0/mu/h/w"] == ("0/mu/h/{0}/w",)
    want = ta.tree_get(old, "mu")["h/{1..2}/w"].astype(jnp.bfloat16)
    assert np.array_equal(state[0].mu["h/w"][1:], want)


def test_a_cast_works_on_shapes_and_under_jit():
    tx = ta.adapt(adam)
    params, old = aged(tx, start())
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    want, _ = carry_state(tx, small, old, cast=True)
    shapes = jax.eval_shape(lambda: (small, old))
    for saved in (shapes[1], old):
        state, report = carry_state(tx, shapes[0], saved, cast=True)
        assert len(report.retyped) == 8
        assert jax.eval_shape(lambda: want) == jax.eval_shape(lambda s: s, state)
    state = jax.jit(lambda *args: carry_state(tx, *args, cast=True)[0])(small, old)
    assert_equal(state, want)


def test_python_numbers_become_arrays_of_the_dtype():
    tx = ta.adapt(optax.inject_hyperparams(optax.sgd)(0.1))
    params = {"w": jnp.ones(2)}
    saved = {"count": 5, "hyperparams/learning_rate": 0.5}
    state, report = carry_state(tx, params, saved)
    assert report.fresh == ()
    assert state.count.dtype == jnp.int32
    assert float(state.hyperparams["learning_rate"]) == 0.5
    _, report = carry_state(tx, params, {**saved, "count": 2.5})
    assert list(report.misshaped) == ["count"]


def test_two_states_that_fit_equally_are_not_guessed_between():
    params, old = aged(adam, start())
    saved = {"actor": old, "critic": old}
    with pytest.warns(ta.TreeAdaptWarning, match="8 leaves of the new state may be"):
        state, report = carry_state(ta.adapt(adam), params, saved)
    assert report.ambiguous["0/mu/head/b"] == (
        "actor/0/mu/head/b",
        "critic/0/mu/head/b",
    )
    assert "could be any of 'actor/0/mu/head/b', 'critic/0/mu/head/b'" in str(report)
    assert_equal(state, ta.adapt(adam).init(params))
    _, report = carry_state(ta.adapt(adam), params, saved["actor"])
    assert report.ambiguous == {}


def test_a_renamed_model_is_told():
    tx = ta.adapt(adam)
    params, old = aged(tx, start())
    with pytest.warns(ta.TreeAdaptWarning, match="nothing was carried.*migration="):
        _, report = carry_state(tx, {"model": params}, old)
    assert list(report.carried) == []
    assert "'0/nu/model/trunk/w'" in report.warnings[0]
    assert "'0/nu/trunk/w'" in report.warnings[0]


def test_a_vector_of_all_leaves_is_told():
    tx = ta.adapt(optax.flatten(adam))
    params, old = aged(tx, start())
    state, report = carry_state(tx, params, old)
    assert_equal(state, old)
    assert len(report.warnings) == 2
    assert "'0/mu' is float32[26]" in report.warnings[0]


def test_one_bare_array():
    params, old = aged(adam, jnp.arange(3.0))
    tx = ta.adapt(adam)
    state, report = carry_state(tx, params, old)
    assert report.fresh == ()
    assert report.left_over == ()
    assert state[0].mu[""] is old[0].mu
    again, report = carry_state(adam, params, state)
    assert again[0].mu is old[0].mu


def test_nothing_is_made_if_everything_is_carried():
    made = []

    def init(params: Any) -> Any:
        made.append(not isinstance(params["head"]["b"] + 0, jax.core.Tracer))
        return adam.init(params)

    tx = optax.GradientTransformation(init, adam.update)
    params, old = aged(adam, start())
    carry_state(tx, params, old)
    assert True not in made
    carry_state(tx, params, old, reset="**/mu")
    assert True in made


def test_abstract_params_give_the_report_alone():
    params, old = aged(optax.adam(schedule), start())
    abstract = jax.eval_shape(lambda: params)
    state, report = carry_state(rules("a:trunk", "b:**"), abstract, old)
    assert report.fresh == ()
    state, report = carry_state(ta.adapt(adam), abstract, jax.eval_shape(lambda: old))
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)
    )
    state, _ = carry_state(ta.adapt(adam), abstract, old, reset="**/mu")
    assert isinstance(state[0].mu["head/b"], jax.ShapeDtypeStruct)


def test_it_works_inside_jit():
    tx = rules("a:trunk", "b:head")
    params, old = aged(ta.adapt(optax.adam(schedule)), start())
    state = jax.jit(lambda params, old: carry_state(tx, params, old)[0])(params, old)
    assert_equal(state, carry_state(tx, params, old)[0])


def test_a_mask_that_reads_values():
    tx = ta.adapt(
        optax.masked(adam, lambda tree: jax.tree.map(lambda x: bool(x.ndim), tree))
    )
    reads = ta.adapt(
        optax.masked(adam, lambda tree: jax.tree.map(lambda x: bool(x.any()), tree))
    )
    params = start()
    _, report = carry_state(reads, params, tx.init(params))
    assert report.fresh == ()


def test_the_report_reads_well():
    params, old = aged(rules("a:trunk"), start())
    _, report = carry_state(rules("b:**"), params, old, reset="**/trunk/b")
    assert str(report).splitlines()[:4] == [
        "carried 4 of 10 leaves of the new state",
        "  4 of them from elsewhere: 'inner_states/b/0/count' from "
        "'inner_states/a/0/count', ...",
        "fresh, nothing saved fits (4): 'inner_states/b/0/mu/head/b', "
        "'inner_states/b/0/mu/head/w', 'inner_states/b/0/nu/head/b', "
        "'inner_states/b/0/nu/head/w'",
        "reset, as asked (2): 'inner_states/b/0/mu/trunk/b', "
        "'inner_states/b/0/nu/trunk/b'",
    ]


@pytest.mark.slow
def test_a_long_report_stays_short():
    params = {f"layer_{i}": jnp.ones(1) for i in range(200)}
    wide = {f"layer_{i}": jnp.ones(2) for i in range(200)}
    tx = ta.adapt(adam)
    _, report = carry_state(tx, wide, tx.init(params))
    assert "and 392 more" in str(report)
    assert len(str(report)) < 3000


# Slots


def test_nothing_is_set_on_the_placeholder_of_optax(caplog):
    asked = []

    def init(params):
        asked.append(params)
        return optax.TraceState(jax.tree.map(jnp.zeros_like, params))

    pairs = optax.LookaheadParams.init_synced(start())
    recorded = optax.GradientTransformation(init, adam.update)
    tx = optax.lookahead(recorded, sync_period=2, slow_step_size=0.5)
    for outer in (tx, ta.adapt(tx)):
        state = outer.init(pairs)
        specs = ta.opt_state_shardings(outer, pairs, jax.tree.map(lambda _: P(), pairs))
        assert jax.tree.structure(specs) == jax.tree.structure(state)
        report = carry_state(outer, pairs, state)[1]
        assert list(report.carried) == list(ta.to_flat_dict(state))
    is_mark = [not jax.tree.leaves(params) for params in asked]
    assert any(is_mark)
    assert not any(
        vars(params) for params, yes in zip(asked, is_mark, strict=True) if yes
    )
    assert "only fast parameters" not in caplog.text


# Moments of another kind


def small_steps(tx: Any, params: Any, count: int) -> Any:
    """A state after some steps with a small gradient."""
    grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e-3), params)
    state = tx.init(params)
    for _ in range(count):
        state = tx.update(grads, state, params)[1]
    return state


MISREAD = {
    "without their count": (adam, optax.rmsprop(1e-2, centered=True), "lacks count"),
    "under a new count": (optax.rmsprop(1e-2), adam, "adds count, mu"),
    "of another class": (adam, optax.adabelief(1e-2), "is ScaleByBeliefState"),
    "below the start": (
        adam,
        optax.yogi(1e-2),
        "start at 1e-06 here, and after 10 steps are as low as 1e-08",
    ),
    "scaled from now on": (
        optax.sgd(1e-2, momentum=0.9),
        optax.rmsprop(1e-2, momentum=0.9),
        "scaled by nothing and now are by nu",
    ),
    "not scaled any more": (
        optax.rmsprop(1e-2, momentum=0.9),
        optax.sgd(1e-2, momentum=0.9),
        "scaled by nu and now are by nothing",
    ),
}
BY_NUMBERS = ("below the start", "scaled from now on", "not scaled any more")


@pytest.mark.hazard("F29")
@pytest.mark.parametrize("kind", MISREAD)
@pytest.mark.parametrize("form", ["own", "flat"])
def test_moments_that_lost_their_meaning_are_reported_with_the_cure(kind, form):
    before, after, words = MISREAD[kind]
    params, old = start(), small_steps(before, start(), 10)
    saved = ta.to_flat_dict(old) if form == "flat" else old
    _, report = carry_state(after, params, saved)
    if (kind, form) == ("of another class", "flat"):
        assert report.warnings == ()  # names alone do not say it
        return
    (warning,) = report.warnings
    by_class = form != "flat" and kind not in BY_NUMBERS
    assert ("where the new state is ScaleBy" if by_class else words) in warning
    cure = warning.partition("reset='")[2].partition("'")[0]
    assert carry_state(after, params, saved, reset=cure)[1].warnings == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LEAFWISE, "yogi", "adagrad", "lookahead"])
def test_the_same_optimizer_is_never_taken_for_another(name):
    more = {
        "yogi": optax.yogi(1e-2),
        "adagrad": optax.adagrad(1e-2),
        "lookahead": optax.lookahead(adam, 2, 0.5),
    }
    tx = ta.adapt((LEAFWISE | more)[name])
    params = start()
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    state = tx.init(params)
    grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1e-3), start())
    for _ in range(3):
        state = tx.update(grads, state, params)[1]
    assert carry_state(tx, params, state)[1].warnings == ()
    assert carry_state(tx, params, ta.to_flat_dict(state))[1].warnings == ()
