"""``carry_state`` where layers of one array are frozen, grouped or stored otherwise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from aged import aged
from sizes import some
from states import assert_equal

import treeadapt as ta

# Optax itself promotes.
pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS = 6
STACKS = {"blocks": 0}
UNROLL = ta.Migration({"blocks/{n} : l ...": "blocks/{l}/{n} : ...", "head": "head"})

schedule = optax.linear_schedule(1e-1, 1e-3, 9)
adam = optax.adam(schedule)

#: Transformations of each number by itself.
LEAFWISE = {
    "adam": adam,
    "adamw": optax.adamw(schedule, weight_decay=0.1),
    "momentum": optax.sgd(schedule, momentum=0.9),
    "lion": optax.lion(schedule),
    "amsgrad": optax.amsgrad(1e-2),
    "MultiSteps": optax.MultiSteps(adam, 3).gradient_transformation(),
    "inject": optax.inject_hyperparams(optax.adamw)(schedule, mu_dtype="bfloat16"),
    "schedule_free": optax.contrib.schedule_free(adam, 1e-2),
}

every = pytest.mark.parametrize("name", some(LEAFWISE))


def start() -> dict[str, Any]:
    ramp = jnp.linspace(-1.0, 1.0, LAYERS * 6, dtype=jnp.float32)
    return {
        "blocks/w": ramp.reshape(LAYERS, 3, 2),
        "blocks/b": ramp[: LAYERS * 2].reshape(LAYERS, 2) * 2,
        "head": ramp[:3],
    }


def grads_of(params: Any, step: int) -> Any:
    """Elementwise, so that moving and differentiating commute."""
    return jax.tree.map(lambda leaf: jnp.sin(leaf * 3 + step), params)


def train(tx: Any, params: Any, state: Any, first: int = 0) -> tuple[Any, Any]:
    # Not compiled: two programs that compute the same round differently once fused.
    with jax.disable_jit():
        for step in range(first, first + 2):
            updates, state = tx.update(grads_of(params, step), state, params)
            params = ta.apply_updates(params, updates)
    return params, state


def trained(tx: Any, params: Any) -> tuple[Any, Any]:
    return train(tx, params, tx.init(params))


def grouped(tx: Any, **patterns: Any) -> Any:
    """A group for each name; the other layers are frozen."""
    rules = [(where, name) for name, where in patterns.items()]
    table = ta.Rules([*rules, ("**", "frozen")], stacks=STACKS)
    return ta.partition(dict.fromkeys(patterns, tx), table)


def from_layer(tx: Any, depth: int) -> Any:
    return grouped(tx, a=[f"blocks/{{{depth}..{LAYERS - 1}}}", "head"])


def assert_clean(report: Any) -> None:
    assert report.fresh == report.warnings == report.left_over == ()
    assert report.unmoved == report.misshaped == report.ambiguous == report.partly == {}


# Other layers


@pytest.mark.slow
@every
def test_a_layer_that_thaws_leaves_the_moments_of_the_others_bit_for_bit(name):
    before, after = (from_layer(LEAFWISE[name], depth) for depth in (4, 3))
    params, old = aged(before, start())
    state, report = ta.carry_state(after, params, old)
    copies = [name for name in ta.to_flat_dict(state) if "{3..5}" in name]
    new, old_flat = ta.to_flat_dict(state), ta.to_flat_dict(old)
    for name in copies:
        was = name.replace("{3..5}", "{4..5}")
        assert report.carried[name] == was
        assert np.array_equal(new[name][1:], old_flat[was])
        assert report.partly[name] == (name.replace("{3..5}", "{3}"),)
    assert sorted(report.fresh) == sorted(n.replace("{3..5}", "{3}") for n in copies)
    assert report.left_over == ()
    fresh = ta.to_flat_dict(after.init(params))
    for name in copies:
        assert np.array_equal(new[name][0], fresh[name][0])


def test_a_layer_that_thaws_under_an_old_count_is_reported():
    params, old = aged(from_layer(adam, 4), start())
    _, report = ta.carry_state(from_layer(adam, 3), params, old)
    (text,) = report.warnings
    assert "mu, nu of 'blocks/{3}/b', 'blocks/{3}/w' start again" in text
    assert str(report).startswith(
        "carried 8 of 8 leaves of the new state, 4 of them in part\n"
    )


def test_layers_that_thaw_into_a_group_of_their_own_have_a_count_of_their_own():
    before = from_layer(adam, 4)
    after = grouped(adam, a=["blocks/{4..5}", "head"], b="blocks/{2..3}")
    params, old = aged(before, start())
    state, report = ta.carry_state(after, params, old)
    assert report.warnings == report.left_over == ()
    assert report.partly == {}
    assert {name.split("/")[1] for name in report.fresh} == {"b"}
    assert_equal(state.inner_states["a"], old.inner_states["a"])
    assert_equal(state.inner_states["b"], after.init(params).inner_states["b"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [*((n, "own") for n in LEAFWISE), ("adam", "flat"), ("inject", "host")],
)
def test_slices_and_whole_arrays_are_carried_into_each_other(name, form):
    tx = LEAFWISE[name]
    first = grouped(tx, a=["blocks/{0,1,5}", "head"], b="blocks/{2..4}")
    second = grouped(tx, c="blocks/{1..3}", d=["blocks/{0,4,5}", "head"])
    params, old = trained(first, start())
    state, expected = old, train(first, params, old, 2)[0]
    for other in (ta.adapt(tx), second, tx, first):
        saved = state if form == "own" else ta.to_flat_dict(state)
        if form == "host":
            saved = jax.tree.map(np.asarray, saved)
        state, report = ta.carry_state(other, params, saved)
        assert report.fresh == report.warnings == ()
        assert report.misshaped == report.ambiguous == report.partly == {}
        assert_equal(train(other, params, state, 2)[0], expected)
    assert_equal(state, old)


def test_what_the_new_state_lacks_is_left_over_by_layers():
    params, old = aged(ta.adapt(adam), start())
    _, report = ta.carry_state(from_layer(adam, 4), params, old)
    assert set(report.left_over) == {
        f"0/{field}/blocks/{{0..3}}/{leaf}" for field in ("mu", "nu") for leaf in "bw"
    }
    assert report.carried["inner_states/a/0/mu/blocks/{4..5}/w"] == (
        "0/mu/blocks/{4..5}/w"
    )


def test_groups_that_divide_their_layers_otherwise_name_what_they_took():
    first = grouped(adam, a="blocks/{0..2}", b=["blocks/{3..5}", "head"])
    second = grouped(adam, a="blocks/{0..3}", b=["blocks/{4..5}", "head"])
    params, old = aged(first, start())
    _, report = ta.carry_state(second, params, old)
    assert_clean(report)
    prefixes = "inner_states/a/0/mu/blocks", "inner_states/b/0/mu/blocks"
    assert report.carried[f"{prefixes[0]}/{{0..3}}/w"] == (
        f"{prefixes[0]}/{{0..2}}/w, {prefixes[1]}/{{3}}/w"
    )
    assert report.carried[f"{prefixes[1]}/{{4..5}}/w"] == f"{prefixes[1]}/{{4..5}}/w"


def test_the_same_slices_are_the_saved_objects():
    tx = from_layer(adam, 4)
    params, old = aged(tx, start())
    state, report = ta.carry_state(tx, params, old)
    assert_clean(report)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(old), strict=True)
    assert all(one is two for one, two in pairs)


def test_one_group_of_layers_is_reset():
    tx = grouped(adam, a=["blocks/{0..2}", "head"], b="blocks/{3..5}")
    params, old = aged(ta.adapt(adam), start())
    state, report = ta.carry_state(tx, params, old, reset="inner_states/b")
    assert_equal(state.inner_states["b"], tx.init(params).inner_states["b"])
    assert all(name.startswith("inner_states/b/") for name in report.reset)
    assert "0/mu/blocks/{3..5}/w" in report.left_over


def test_the_work_grows_with_groups_and_not_with_layers():
    params = {"h": jnp.zeros((2_000, 1))}
    sizes = []
    for stop in (1, 1_998):
        rules = {f"h/{{0..{stop}}}": "a", "**": "b"}
        table = ta.Rules(rules, stacks={"h": 0})
        tx = ta.partition({"a": adam, "b": adam}, table)
        saved = ta.adapt(adam).init(params)

        def carry(saved: Any, tx: Any = tx) -> Any:
            return ta.carry_state(tx, params, saved)[0]

        sizes.append(len(jax.make_jaxpr(carry)(saved).eqns))
    assert sizes[0] == sizes[1] < 20


# Shapes


@pytest.mark.slow
def test_layers_along_other_axes_and_nested_stacks():
    stacks = {"blocks": 1, "blocks/experts": 0}
    ramp = jnp.linspace(0.0, 1.0, 3 * 4 * 3, dtype=jnp.float32)
    params = {
        "blocks/experts/w": ramp.reshape(3, 4, 3),
        "blocks/v": ramp[:8].reshape(2, 4),
    }
    tables = [
        {"blocks/{1..3}/experts/{0,2}": "a", "blocks/*/v": "b", "**": "frozen"},
        {"blocks/0": "a", "blocks/*/experts/{1..2}": "b", "**": "frozen"},
    ]
    one, two = (
        ta.partition({"a": adam, "b": adam}, ta.Rules(table, stacks=stacks))
        for table in tables
    )
    params, old = aged(one, params)
    state, report = ta.carry_state(two, params, old)
    flat, old_flat = ta.to_flat_dict(state), ta.to_flat_dict(old)
    new = flat["inner_states/b/0/mu/blocks/{1..3}@1/experts/{1..2}/w"]
    was = old_flat["inner_states/a/0/mu/blocks/{1..3}@1/experts/{{0},{2}}/w"]
    assert np.array_equal(new[1], was[1])
    assert not np.any(new[0])
    name = "inner_states/b/0/mu/blocks/{1..3}@1/experts/{1..2}/w"
    assert report.carried[name] == "inner_states/a/0/mu/blocks/{1..3}@1/experts/{2}/w"
    assert report.partly[name] == (name.replace("{1..2}", "{1}"),)
    whole, _ = ta.carry_state(ta.adapt(adam), params, old)
    again, report = ta.carry_state(one, params, whole)
    assert report.fresh == report.warnings == ()
    assert_equal(again, old)


#: Some layers of two stacks, along the first two axes.
KEY = "h/{0..1}/e/{2..3}@1/w"


def _from_nested(where: str) -> Any:
    rules = ta.Rules({where: "a", "**": "frozen"}, stacks={"h": 0, "h/e": 1})
    return ta.partition({"a": adam}, rules)


@pytest.mark.slow
def test_keys_name_the_axes_that_shapes_do_not_show():
    tx = _from_nested("h/{0..1}/e/{2..3}")
    params, old = aged(tx, {"h/e/w": jnp.ones((4, 4, 3))})
    other = _from_nested("h/{0..1}/e/{1..2}")
    name = "inner_states/a/0/mu/h/{0..1}/e/{1..2}@1/w"
    new, report = ta.carry_state(tx, params, old)
    assert_clean(report)
    assert_equal(new, old)
    new, report = ta.carry_state(other, params, old)
    assert report.partly[name] == (name.replace("{1..2}", "{1}"),)
    mu = ta.to_flat_dict(new)[name]
    assert np.array_equal(mu[:, 1], old.inner_states["a"][0].mu[KEY][:, 0])
    assert not np.any(mu[:, 0])
    new, report = ta.carry_state(ta.adapt(adam), params, old)
    assert np.array_equal(new[0].mu["h/e/w"][:2, 2:], old.inner_states["a"][0].mu[KEY])


def test_statistics_of_other_shapes_go_on_in_the_same_slices_only():
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9)
    before = from_layer(tx, 4)
    params, old = aged(before, start())
    state, report = ta.carry_state(before, params, old)
    assert_clean(report)
    assert_equal(state, old)
    state, report = ta.carry_state(from_layer(tx, 3), params, old)
    for name in report.partly:
        assert "/ema/" in name or "/v/" in name  # as the arrays themselves
    assert "inner_states/a/0/v_row/blocks/{3..5}/w" in report.fresh
    assert any("v_row" in text and "start again" in text for text in report.warnings)


@pytest.mark.slow
def test_numbers_for_each_layer_go_on_in_the_same_layers_only():
    def tx(first: int) -> Any:
        rules = {f"blocks/{{{first}..{first + 3}}}": "a", "**": "frozen"}
        prodigy = ta.per_layer(optax.contrib.prodigy(1.0), STACKS)
        return ta.partition({"a": prodigy}, ta.Rules(rules, stacks=STACKS))

    params, old = aged(tx(0), start())
    again, report = ta.carry_state(tx(0), params, old)
    assert_clean(report)
    assert_equal(again, old)
    # As many layers, but others: each has numbers of its own.
    state, report = ta.carry_state(tx(2), params, old)
    names = [
        f"inner_states/a/blocks/{layers}/numerator_weighted"
        for layers in ("{0..3}", "{2..5}")
    ]
    assert not np.any(ta.to_flat_dict(state)[names[1]])
    assert np.all(ta.to_flat_dict(old)[names[0]])
    assert (
        f"fresh, {names[1]!r} is float32[4] of other layers than the saved one "
        f"(saved as {names[0]!r})"
    ) in str(report)


@pytest.mark.slow
def test_step_counts_that_are_there_for_each_layer_go_on_in_other_layers():
    def update(updates: Any, state: Any, params: Any = None, *, factor: Any) -> Any:
        del params
        return jax.tree.map(lambda update: update * factor, updates), state

    needs_factor = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    inner = ta.per_layer(optax.chain(optax.scale_by_adam(), needs_factor), STACKS)

    def tx(first: int) -> Any:
        rules = {f"blocks/{{{first}..{first + 3}}}": "a", "**": "frozen"}
        return ta.partition({"a": inner}, ta.Rules(rules, stacks=STACKS))

    params = start()
    grads = grads_of(params, 0)
    _, old = tx(0).update(grads, tx(0).init(params), params, factor=0.1)
    state, _ = ta.carry_state(tx(2), params, old)
    count = ta.to_flat_dict(state)["inner_states/a/blocks/{2..5}/0/count"]
    assert np.array_equal(count, [1, 1, 1, 1])


def loss(params: Any) -> Any:
    return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(params))


def search(tx: Any, params: Any, state: Any) -> tuple[Any, Any]:
    value, grad = jax.value_and_grad(loss)(params)
    more = {"value": value, "grad": grad, "value_fn": loss}
    updates, state = tx.update(grad, state, params, **more)
    return ta.apply_updates(params, updates), state


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        optax.scale_by_lbfgs(3),
        optax.lbfgs(memory_size=2),
    ],
)
def test_the_memory_of_lbfgs_is_cut_behind_its_first_axis(tx):
    before, after = from_layer(tx, 4), from_layer(tx, 2)
    params = start()
    params, old = search(before, *search(before, params, before.init(params)))
    state, _ = ta.carry_state(after, params, old)
    new, was = ta.to_flat_dict(state), ta.to_flat_dict(old)
    (name,) = (n for n in new if "diff_params_memory" in n and n.endswith("/w"))
    assert np.array_equal(new[name][:, 2:], was[name.replace("{2..5}", "{4..5}")])
    again, _ = ta.carry_state(before, params, state)
    assert_equal(
        {n: leaf for n, leaf in ta.to_flat_dict(again).items() if "memory" in n},
        {n: leaf for n, leaf in was.items() if "memory" in n},
    )
    search(after, params, state)


def test_under_jit_and_on_shapes():
    before, after = from_layer(adam, 4), from_layer(adam, 3)
    params, old = aged(before, start())
    state, report = ta.carry_state(after, params, old)
    compiled = jax.jit(lambda params, old: ta.carry_state(after, params, old)[0])
    assert_equal(compiled(params, old), state)
    specs = jax.eval_shape(lambda: (params, old))
    shapes, planned = ta.carry_state(after, *specs)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert (planned.carried, planned.partly) == (report.carried, report.partly)
    # What is abstract in part is abstract, and the report says it.
    mixed, report = ta.carry_state(after, specs[0], old)
    assert report.partly == {}
    leaf = mixed.inner_states["a"][0].mu["blocks/{3..5}/w"]
    assert isinstance(leaf, jax.ShapeDtypeStruct)
    assert "inner_states/a/0/mu/blocks/{3..5}/w" in report.fresh


# Stacked and unrolled


def unrolled(tx: Any, depth: int) -> Any:
    rules = {f"blocks/{{{depth}..5}}": "a", "head": "a", "**": "frozen"}
    return ta.partition({"a": tx}, rules if depth else {"**": "a"})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LEAFWISE])
def test_a_group_of_all_layers_is_unrolled_and_stacked_again_bit_for_bit(name):
    tx = LEAFWISE[name]
    scanned, flat = from_layer(tx, 0), unrolled(tx, 0)
    params, old = trained(scanned, start())
    layers = UNROLL(params)
    state, report = ta.carry_state(flat, layers, old, migration=UNROLL)
    assert_clean(report)
    after, state = train(flat, layers, state, 2)
    params, old = train(scanned, params, old, 2)
    assert_equal(after, UNROLL(params))
    again, report = ta.carry_state(scanned, params, state, migration=UNROLL.inverse)
    assert_clean(report)
    assert_equal(again, old)


def test_all_layers_are_unrolled_into_those_that_train():
    params, old = aged(from_layer(adam, 0), start())
    state, report = ta.carry_state(
        unrolled(adam, 4), UNROLL(params), old, migration=UNROLL
    )
    assert (report.fresh, report.unmoved, report.warnings) == ((), {}, ())
    new, was = (each.inner_states["a"][0].mu for each in (state, old))
    assert np.array_equal(new["blocks/5/w"], was["blocks/w"][5])


@pytest.mark.slow
def test_unrolled_layers_are_stacked_into_groups_that_share_an_array():
    params, old = aged(unrolled(adam, 0), UNROLL(start()))
    stacked = UNROLL.inverse(params)
    tx = grouped(adam, a=["blocks/{1..3}", "head"], b="blocks/{4..5}")
    state, report = ta.carry_state(tx, stacked, old, migration=UNROLL.inverse)
    assert (report.fresh, report.unmoved) == ((), {})
    # One array is made of all of them.
    assert report.carried["inner_states/b/0/mu/blocks/{4..5}/w"] == (
        "inner_states/a/0/mu/blocks/{0..5}/w"
    )
    was = old.inner_states["a"][0].mu
    for group, layers in {"a": [1, 2, 3], "b": [4, 5]}.items():
        key = f"blocks/{{{layers[0]}..{layers[-1]}}}/w"
        mu = state.inner_states[group][0].mu[key]
        assert np.array_equal(mu, jnp.stack([was[f"blocks/{i}/w"] for i in layers]))


def test_slices_are_renamed_with_their_array():
    m = ta.Migration({"blocks/{n}": "layers/{n}", "head": "out"})
    params, old = aged(from_layer(adam, 4), start())
    rules = ta.Rules(
        {"layers/{3..5}": "a", "out": "a", "**": "frozen"}, stacks={"layers": 0}
    )
    tx = ta.partition({"a": adam}, rules)
    state, report = ta.carry_state(tx, m(params), old, migration=m)
    name = "inner_states/a/0/mu/layers/{3..5}/w"
    assert report.carried[name] == "inner_states/a/0/mu/blocks/{4..5}/w"
    assert report.partly[name] == ("inner_states/a/0/mu/layers/{3}/w",)
    new = state.inner_states["a"][0].mu["layers/{3..5}/w"]
    assert np.array_equal(new[1:], old.inner_states["a"][0].mu["blocks/{4..5}/w"])


def test_slices_along_two_axes_are_renamed_with_their_array():
    stacks = {"a": 0, "a/b": 1}
    rules = {"a/{0..1}/b/{0}": "x", "a/2/b/{1..3}": "x", "**": "frozen"}
    params = {"a": {"b": {"w": jnp.arange(24.0).reshape(3, 4, 2)}}}
    m = ta.Migration({"a/b/w": "c/d/w"})
    tx = ta.partition({"x": adam}, ta.Rules(rules, stacks=stacks))
    params, old = aged(tx, params)
    was = old.inner_states["x"][0].mu
    assert [*was] == ["a/{0..1}/b/{0}@1/w", "a/{2}/b/{1..3}@1/w"]
    rules = {path.replace("a", "c").replace("b", "d"): x for path, x in rules.items()}
    other = ta.Rules(rules, stacks={"c": 0, "c/d": 1})
    state, report = ta.carry_state(
        ta.partition({"x": adam}, other), m(params), old, migration=m
    )
    assert_clean(report)
    for new, before in zip(
        state.inner_states["x"][0].mu.values(), was.values(), strict=True
    ):
        assert np.array_equal(new, before)
    _, report = ta.carry_state(adam, m(params), old, migration=m)
    text = "cut along several axes that no key names"
    assert report.misshaped == dict.fromkeys(["0/mu/c/d/w", "0/nu/c/d/w"], text)


def test_slices_whose_row_has_axes_start_fresh_with_the_reason():
    params, old = aged(from_layer(adam, 4), start())
    state, report = ta.carry_state(
        unrolled(adam, 4), UNROLL(params), old, migration=UNROLL
    )
    text = "it holds only some layers, and its row has axes"
    slices = [name for name in ta.tree_paths(old) if "blocks" in name]
    assert report.unmoved == dict.fromkeys(slices, text)
    assert len(slices) == 4
    assert report.fresh == tuple(n for n in ta.tree_paths(state) if "blocks" in n)
    assert f"not moved, {slices[0]!r}" in str(report)
    assert f": {text}" in str(report)


def test_unstacking_under_jit_and_on_shapes():
    params, old = aged(from_layer(adam, 0), start())
    tx, layers = unrolled(adam, 4), UNROLL(params)

    def carry(params: Any, old: Any) -> Any:
        return ta.carry_state(tx, params, old, migration=UNROLL)[0]

    state = carry(layers, old)
    assert_equal(jax.jit(carry)(layers, old), state)
    shapes = carry(*jax.eval_shape(lambda: (layers, old)))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("start", [1, 3])
def test_what_all_layers_share_is_carried_to_more_of_them(start):
    params = {"blocks": {"w": jnp.ones((5, 3, 3))}}

    def muon(start, **options):
        group = ta.per_layer(optax.contrib.muon(0.1, **options), {"blocks": 0})
        table = {f"blocks/{{{start}..4}}": "muon", "**": "frozen"}
        return ta.partition({"muon": group}, ta.Rules(table, stacks={"blocks": 0}))

    saved = muon(3, ns_coeffs=(3.0, -4.0, 2.0)).init(params)
    state, report = ta.carry_state(muon(start), params, saved)
    rows = ta.tree_get(state, "ns_coeffs").tolist()
    assert rows == [[3.0, -4.0, 2.0]] * (5 - start)
    assert not report.misshaped
