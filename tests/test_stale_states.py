"""A state of other rules, params or classes is refused, and the error says why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
import pytest
from transformations import CASES

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {name: jnp.ones((2, 2)) for name in "abc"}
RULES = {"a": "s", "b": "f", "c": "frozen"}
ADAM = optax.adam(0.1)


def partition(rules, tx=ADAM):
    labels = {"s", "f", "n"} & set(rules.values())
    return ta.partition(dict.fromkeys(labels, tx), rules)


OLD = partition(RULES).init(PARAMS)
TITLE = "The state is not one of this optimizer, rules and params. "
REMEDY = "state, report = treeadapt.carry_state(tx, params, state)"


@pytest.mark.parametrize(
    ("rules", "lines"),
    [
        (RULES | {"b": "n"}, ["inner_states/n/0/", "inner_states/f/0/"]),
        (RULES | {"c": "f"}, ["missing 'inner_states/f/0/mu/c'"]),
        (RULES | {"a": "frozen"}, ["unexpected 'inner_states/s/0/mu/a'"]),
        (
            {"a": "f", "b": "s", "c": "frozen"},
            ["inner_states/f/0/mu/", "inner_states/s/0/mu/"],
        ),
    ],
    ids=["renamed", "thawed", "gone", "swapped"],
)
@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_a_state_of_other_rules_is_refused_and_then_carried(rules, lines, mode):
    tx = partition(rules)
    update = jax.jit(tx.update) if mode == "jit" else tx.update
    with pytest.raises(ta.TransformError) as caught:
        update(PARAMS, OLD, PARAMS)
    text = str(caught.value)
    assert text.startswith(TITLE)
    assert all(line in text for line in lines)
    assert REMEDY in text
    state, _ = ta.carry_state(tx, PARAMS, OLD)
    update(PARAMS, state, PARAMS)


def test_groups_without_moments_have_states_too():
    tx = partition(RULES | {"b": "n"}, optax.sgd(0.1))
    with pytest.raises(ta.TransformError, match="of other groups"):
        tx.update(PARAMS, partition(RULES, optax.sgd(0.1)).init(PARAMS), PARAMS)


def test_layers_that_go_to_another_group_are_named():
    params = {"blocks": jnp.ones((4, 3))}

    def split(first):
        table = {f"blocks/{{0..{first}}}": "s", "**": "f"}
        rules = ta.Rules(table, stacks={"blocks": 0})
        return ta.partition({"s": ADAM, "f": ADAM}, rules)

    with pytest.raises(ta.TransformError, match=r"missing .*blocks/\{0..2\}'"):
        split(2).update(params, split(0).init(params), params)


def masked(**mask):
    return ta.adapt(optax.masked(ADAM, mask))


@pytest.mark.parametrize(
    ("tx", "state", "line"),
    [
        (ta.freeze(ADAM, "a"), ta.adapt(ADAM).init(PARAMS), "unexpected '0/mu/a'"),
        (
            ta.adapt(ADAM),
            ta.adapt(ADAM).init(PARAMS | {"a": jnp.ones((3, 2))}),
            "'0/mu/a': float32[3,2] in place of float32[2,2]",
        ),
        (
            masked(a=True, b=False, c=True),
            masked(a=True, b=True, c=True).init(PARAMS),
            "unexpected 'inner_state/0/mu/b'",
        ),
        (
            ta.per_layer(ADAM, {"a": 0}),
            ta.per_layer(ADAM, {"b": 0}).init(PARAMS),
            "missing 'a/0/count'",
        ),
        (
            ta.adapt(optax.inject_hyperparams(optax.adam)(0.1)),
            ta.adapt(optax.inject_hyperparams(optax.sgd)(0.1)).init(PARAMS),
            "missing 'hyperparams/b1'",
        ),
        (
            partition(RULES),
            {"inner_states": dict(OLD.inner_states)},
            "other groups, or of a checkpoint",
        ),
    ],
    ids=["thaw", "shape", "masked", "layers", "inject", "plain"],
)
def test_other_wrappers_and_states_read_without_their_classes(tx, state, line):
    with pytest.raises(ta.TransformError) as caught:
        tx.update(PARAMS, state, PARAMS)
    assert line in str(caught.value)
    assert REMEDY in str(caught.value)


def moved(tree, old, new):
    return {path.replace(old, new): leaf for path, leaf in tree.items()}


@pytest.mark.slow
@pytest.mark.parametrize("rules", [{"**": "s"}, {"**/w": "s", "**": "f"}])
def test_params_of_other_names_are_shown_in_pairs(rules):
    params = {f"net/layers/{n}/{key}": jnp.ones(2) for n in range(3) for key in "bw"}
    for tx in (partition(rules), ta.adapt(ADAM)):
        now = moved(params, "layers", "blocks")
        with pytest.raises(ta.TransformError) as caught:
            tx.update(now, tx.init(params), now)
        text = str(caught.value)
        assert text.startswith(TITLE)
        assert "/mu/net/blocks/" in text
        assert "/mu/net/layers/" in text
        assert "migration=table where params" in text
        table = ta.Migration({"{a:**}/layers/{b:**}": "{a}/blocks/{b}"})
        state, _ = ta.carry_state(tx, now, tx.init(params), migration=table)
        tx.update(now, state, now)


def test_updates_of_other_names_are_shown_in_pairs():
    params = {"net/w": jnp.ones(2), "net/b": jnp.ones(2), "scale": jnp.ones(2)}
    tx = ta.adapt(ADAM)
    with pytest.raises(ta.TransformError) as caught:
        tx.update(moved(params, "net", "nets"), tx.init(params), params)
    first, *rows = str(caught.value).splitlines()
    assert "not gradients of these params. 4 names do not" in first
    assert "  missing 'net/b' (the updates have 'nets/b')" in rows


# A learning rate, and a random key, belong to no leaf.
WITHOUT_PARAMS = {"noise", "polyak", "reduce_on_plateau"}


def names_params(state):
    keys = [keys for keys, _ in jtu.tree_leaves_with_path(state)]
    return any(
        isinstance(key, jtu.DictKey) and key.key == "c" for k in keys for key in k
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_transformation_takes_a_state_that_lacks_a_leaf(case):
    rules = {"a": "s", "b": "f", "c": "f"}
    old, new = (partition(r, case.make()) for r in (rules, rules | {"c": "s"}))
    params = PARAMS
    if case.lookahead:
        params = optax.LookaheadParams(PARAMS, PARAMS)
    extra = {
        "value": jnp.float32(1),
        "grad": PARAMS,
        "value_fn": lambda flat: sum(map(jnp.sum, flat.values())),
        "grad_fn": lambda flat, *_: flat,
        "obj_fn": lambda flat: sum(map(jnp.sum, flat.values())),
    }
    extra = {name: extra[name] for name in case.extra}

    def step(params):
        state = old.init(params)
        old.update(PARAMS, state, params, **extra)
        return new.update(PARAMS, state, params, **extra)

    if case.name in WITHOUT_PARAMS:
        assert not names_params(jax.eval_shape(old.init, params))
        jax.eval_shape(step, params)
        return
    with pytest.raises(ta.TransformError, match="carry_state"):
        jax.eval_shape(step, params)


@pytest.mark.slow
def test_an_error_of_the_caller_stays_what_it_is():
    def value_fn(params):
        raise ZeroDivisionError("mine")

    tx = partition(RULES, optax.lbfgs())
    with pytest.raises(ZeroDivisionError, match="mine"):
        tx.update(
            PARAMS,
            tx.init(PARAMS),
            PARAMS,
            value=jnp.float32(1),
            grad=PARAMS,
            value_fn=value_fn,
        )


@pytest.mark.slow
def test_what_a_monitor_measured_is_not_of_other_rules():
    def measure(updates):
        if len(calls) > 1:
            raise ZeroDivisionError("mine")
        calls.append(1)
        return {"of a": updates["a"].sum()}

    calls = [1]
    tx = ta.adapt(optax.chain(optax.monitor({"sums": measure}), ADAM))
    state = tx.init(PARAMS)
    calls.clear()
    _, state = tx.update(PARAMS, state, PARAMS)
    calls.append(1)
    with pytest.raises(ZeroDivisionError, match="mine"):
        tx.update(PARAMS, state, PARAMS)
