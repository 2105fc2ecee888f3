"""``partition``: Optax's numbers, a flat dict for each group, and errors with paths."""

from __future__ import annotations

import enum
import sys
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from brax.training.agents.ppo.losses import PPONetworkParams
from programs import bits, cast_back, flat_params, flat_updates, like, program, put
from sizes import some
from trees import BY_NAME as ROW
from trees import TREES, LayerTuple, ModelTuple, mlp, two_layers

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(autouse=True)
def _positions_are_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnstablePathWarning)
        yield


TRAINS = [row for row in TREES if row.paths and not row.opaque]


def noisy():
    return optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1))


def transforms() -> dict[str, Any]:
    drifts = optax.chain(optax.zero_nans(), optax.adamw(0.1, weight_decay=0.5))
    return {
        "a": optax.MultiSteps(drifts, 2).gradient_transformation(),
        "b": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
        "c": noisy(),
    }


def spread(flat: dict[str, Any]) -> dict[str, str]:
    """Labels for a flat dict, all four of them if it has four leaves."""
    names = ("a", "b", "frozen", "c")
    return {path: names[index % 4] for index, path in enumerate(sorted(flat))}


# Law 5: the numbers of optax.partition

# ``optax.set_to_zero`` gives 0.0; adding it to -0.0 gives 0.0.
HOLD = optax.stateless_with_tree_map(
    lambda update, _: jnp.full_like(
        update, complex(-0.0, -0.0) if jnp.iscomplexobj(update) else -0.0
    )
)


@pytest.mark.parametrize("row", some(TRAINS), ids=lambda row: row.name)
def test_law_5_every_tree_runs_the_program_of_optaxs_partition(row):
    tree = row.make()
    params, grads = flat_params(tree), flat_params(tree, 1.0)
    labels = spread(params)
    ours = ta.partition(transforms(), lambda _: like(tree, labels))
    native = optax.partition(transforms() | {"frozen": HOLD}, lambda _: labels)

    def step(grads, state, params):
        updates, state = ours.update(like(tree, grads), state, put(tree, params))
        return flat_updates(updates), jax.tree.leaves(state)

    def reference(grads, state, params):
        updates, new = native.update(grads, state, params)
        return updates, jax.tree.leaves(cast_back(state, new))

    state, want = ours.init(put(tree, params)), native.init(params)
    assert bits(jax.tree.leaves(state)) == bits(jax.tree.leaves(want))
    text = program(reference, grads, want, params)
    assert program(step, grads, state, params) == text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit", "scan"])
def test_law_5_several_steps_give_the_bits_of_optaxs_partition(mode):
    tree = two_layers(ModelTuple, LayerTuple)
    params = flat_params(tree)
    labels = spread(params)
    made = transforms()
    ours = ta.partition(made, ta.lift(labels))
    native = optax.partition(made | {"frozen": HOLD}, labels)

    def several(tx, wrap, unwrap):
        def body(carry, seed):
            params, state = carry
            grads = {path: jnp.sin(seed + x) for path, x in params.items()}
            updates, new = tx.update(wrap(grads), state, wrap(params))
            flat = unwrap(updates)
            moved = {path: x + flat[path] for path, x in params.items()}
            return (moved, cast_back(state, new)), flat

        carry, seen = (params, tx.init(wrap(params))), []
        if mode == "scan":
            carry, seen = jax.lax.scan(body, carry, jnp.arange(4.0))
        body = jax.jit(body)
        for seed in jnp.arange(4.0) if mode == "jit" else ():
            carry, updates = body(carry, seed)
            seen.append(updates)
        return carry[0], jax.tree.leaves(carry[1]), seen

    got = several(ours, lambda flat: put(tree, flat), flat_updates)
    assert bits(got) == bits(several(native, lambda flat: flat, lambda flat: flat))


class Agent(NamedTuple):
    policy: Any
    value: Any


class Module(eqx.Module):
    policy: Any
    value: Any


@pytest.mark.parametrize(
    "make",
    [
        PPONetworkParams,
        Agent,
        Module,
        lambda policy, value: {"policy": policy, "value": value},
    ],
)
def test_one_table_works_for_every_container_of_an_agent(make):
    def network(seed):
        return {
            "params": {
                "hidden_0": {"kernel": jnp.full((2, 3), seed), "bias": jnp.ones(3)}
            }
        }

    params = make(policy=network(1.0), value=network(2.0))
    tx = ta.partition(
        {"slow": optax.adam(0.1), "fast": optax.sgd(1.0)},
        {"policy/**/kernel": "frozen", "policy": "slow", "value": "fast"},
    )
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(params, state, params)
    assert type(updates) is type(params)
    flat = flat_updates(updates)
    assert not flat["policy/params/hidden_0/kernel"].any()
    assert (flat["value/params/hidden_0/kernel"] == -2).all()
    adam = state.inner_states["slow"][0]
    assert list(adam.mu) == ["policy/params/hidden_0/bias"]


# Cost: leaves plus groups


def chain_of(leaves: int, groups: int) -> tuple[Any, Any]:
    params = {f"layer_{i}": jnp.ones(1) for i in range(leaves)}
    labels = {path: i % groups for i, path in enumerate(params)}
    return params, ({g: optax.adam(0.1) for g in range(groups)}, lambda _: labels)


def nodes(make: Any, leaves: int, groups: int) -> int:
    params, args = chain_of(leaves, groups)
    return jax.tree.structure(make(*args).init(params)).num_nodes


@pytest.mark.slow
def test_state_grows_with_leaves_plus_groups():
    def interaction(make):
        one, two = (nodes(make, n, 10) - nodes(make, n, 1) for n in (20, 40))
        return two - one

    assert interaction(ta.partition) == 0
    assert interaction(optax.partition) > 0  # leaves times groups


def calls(leaves: int, groups: int) -> int:
    """Count the functions of this library and JAX that tracing an update runs."""
    params, args = chain_of(leaves, groups)
    tx = ta.partition(*args)
    state, count = tx.init(params), 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    def update(grads, state, params, tags):
        updates, state = tx.update(grads, state, params, tags=tags)
        return updates

    jax.eval_shape(update, params, state, params, params)
    sys.setprofile(profile)
    try:
        jax.eval_shape(lambda *args: update(*args), params, state, params, params)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
def test_trace_work_grows_with_leaves_plus_groups():
    per_group = [calls(leaves, 12) - calls(leaves, 2) for leaves in (20, 40)]
    assert per_group[1] < 1.1 * per_group[0]


def test_many_groups_are_one_program():
    params, args = chain_of(12, 4)
    tx = ta.partition(*args)
    text = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    whole = optax.adam(0.1)
    alone = jax.make_jaxpr(whole.update)(params, whole.init(params), params)
    assert len(text.eqns) <= len(alone.eqns) + 4 * 40


# A line search in a group


def quadratic(params: Any) -> jax.Array:
    flat = ta.split(params)[0]
    return sum(jnp.sum((x - 0.5) ** 2) for _, x in sorted(flat.items()))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["frozen", "sgd"])
def test_a_line_search_sees_the_other_leaves_as_they_are(frozen):
    model = mlp()
    line = optax.scale_by_backtracking_linesearch(3, store_grad=True)
    search = optax.lbfgs(memory_size=1, linesearch=line)
    rules = {"layers/1": frozen, "**": "search"}
    txs = {"search": search} | ({"sgd": optax.sgd(0.1)} if frozen == "sgd" else {})
    tx = ta.partition(txs, rules)
    flat = flat_params(model)
    mine = {path: x for path, x in flat.items() if path.startswith("layers/0")}

    def ours(flat, state):
        model_now = put(model, flat)
        value, grad = jax.value_and_grad(lambda f: quadratic(put(model, f)))(flat)
        grads = like(model, grad)
        extra = {"value": value, "grad": grads, "value_fn": quadratic}
        updates, state = tx.update(grads, state, model_now, **extra)
        return {path: flat_updates(updates)[path] for path in mine}

    def alone(flat, state):
        mine = {path: x for path, x in flat.items() if path.startswith("layers/0")}

        def value_fn(part):
            return quadratic({**flat, **part})

        value, grad = jax.value_and_grad(quadratic)(flat)
        grad = {path: grad[path] for path in mine}
        extra = {"value": value, "grad": grad, "value_fn": value_fn}
        return search.update(grad, state, mine, **extra)[0]

    state = tx.init(put(model, flat))
    own = state.inner_states["search"]
    assert bits(own) == bits(search.init(mine))
    step, want = jax.jit(ours), jax.jit(alone)
    assert bits(step(flat, state)) == bits(want(flat, own))


@pytest.mark.slow
def test_optaxs_own_partition_cannot_hold_a_line_search():
    # optax#1649; once this works, remove the sentence from our docs.
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    txs = {"search": optax.lbfgs(memory_size=2), "frozen": optax.set_to_zero()}
    tx = optax.partition(txs, {"a": "search", "b": "frozen"})
    value, grad = jax.value_and_grad(quadratic)(params)
    extra = {"value": value, "grad": grad, "value_fn": quadratic}
    with pytest.raises((TypeError, ValueError)):
        tx.update(grad, tx.init(params), params, **extra)


def test_arguments_shaped_like_the_params_are_narrowed_to_a_group():
    seen = {}

    def spy(name):
        def update(updates, state, params=None, **extra):
            seen[name] = {"updates": updates, "params": params, **extra}
            return updates, state

        return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)

    def value_fn(params, batch):
        assert type(params) is LayerTuple
        assert type(batch) is LayerTuple
        return params.w + batch.w + params.b

    params = LayerTuple(jnp.ones(1), jnp.full(1, 2.0))
    tx = ta.partition({"a": spy("a"), "b": spy("b")}, {"w": "a", "b": "b"})
    tx.update(params, tx.init(params), params, batch=params, value_fn=value_fn, value=1)
    assert {name: sorted(one["batch"]) for name, one in seen.items()} == {
        "a": ["w"],
        "b": ["b"],
    }
    assert sorted(seen["a"]["params"]) == ["w"]
    inside = seen["a"]["value_fn"]({"w": jnp.zeros(1)}, batch={"w": jnp.full(1, 5.0)})
    assert inside == 0 + 5 + 2
    assert seen["b"]["value"] == 1


# Labels


def test_labels_may_come_from_functions_prefixes_selectors_and_bound_rules():
    model = two_layers(ModelTuple, LayerTuple)
    txs = {"slow": optax.sgd(1.0), "fast": optax.sgd(2.0)}
    rules = ta.Rules({"hidden": "slow", "**": "fast"})
    prefix = ModelTuple("slow", LayerTuple("fast", "fast"))
    given = [
        rules,
        {"hidden": "slow", "**": "fast"},
        [("hidden", "slow"), ("**", "fast")],
        rules.bind(model),
        lambda _: prefix,
        lambda p: jax.tree.map_with_path(
            lambda k, _: "slow" if k[0].name == "hidden" else "fast", p
        ),
        ta.lift(prefix),
        ta.lift({"hidden": "slow", "out": "fast"}),
        ta.lift(lambda _: {"hidden": "slow", "out/w": "fast", "out/b": "fast"}),
    ]
    ones = jax.tree.map(jnp.ones_like, model)
    for labels in given:
        tx = ta.partition(txs, labels)
        updates, _ = tx.update(ones, tx.init(model), model)
        assert updates.hidden.w[0, 0] == -1
        assert updates.out.b[0] == -2
    tx = ta.partition({True: optax.sgd(1.0), False: optax.sgd(2.0)}, ta.glob("hidden"))
    updates, _ = tx.update(ones, tx.init(model), model)
    assert (updates.hidden.w[0, 0], updates.out.b[0]) == (-1, -2)
    one = ta.partition({"slow": optax.sgd(1.0)}, lambda _: "slow")
    assert one.update(ones, one.init(model), model)[0].out.b[0] == -1


def test_only_trainable_leaves_need_labels():
    model = mlp()
    txs = {"a": optax.sgd(1.0)}
    by_shape = lambda p: jax.tree.map(lambda x: "ab"[x.ndim > 9], p)  # noqa: E731
    for labels in (by_shape, ta.lift(by_shape(eqx.filter(model, eqx.is_array)))):
        tx = ta.partition(txs, labels)
        tx.update(eqx.filter(model, eqx.is_array), tx.init(model), model)
    counted = {"w": jnp.ones(2), "n": jnp.arange(2)}
    ta.partition(txs, {"w": "a"}).init(counted)
    ta.partition(txs, lambda p: {"w": "a"}).init(counted)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.mark.parametrize(
    ("txs", "rules", "error", "words"),
    [
        ({"frozen": 1}, {"**": "frozen"}, ta.TransformError, "reserved"),
        ({ta.STATIC: 1}, {"**": "a"}, ta.TransformError, "STATIC"),
        ({"a": 1, 0: 1}, {"w": "a", "b": 0}, ta.TransformError, "one type.*int, str"),
        ({Color.RED: 1, Color.BLUE: 1}, {"w": Color.RED}, ta.TransformError, "sort"),
        ({"a": 1, "b": 1}, {"**": "a"}, ta.TransformError, "No rule leads.*'b'"),
        (
            {"slow": 1, "fast": 1},
            {"w": "slwo", "b": "fast"},
            ta.TransformError,
            "'slwo', 'fast'",
        ),
        ({"a": 1}, {"w": {"x": "a"}, "b": "a"}, ta.TransformError, "treeadapt.lift"),
        (
            {"a": 1},
            LayerTuple("a", "a"),
            ta.TransformError,
            "LayerTuple.*treeadapt.lift",
        ),
        ({"a": 1}, Module("a", "a"), ta.TransformError, "Module.*treeadapt.lift"),
        ({"a": 1}, {"w": None, "b": "a"}, ta.RulesError, "None"),
    ],
    ids=[
        "reserved",
        "STATIC",
        "types",
        "enum",
        "idle",
        "misspelt",
        "nested",
        "tuple",
        "module",
        "None",
    ],
)
def test_errors_are_reported_before_any_params_are_seen(txs, rules, error, words):
    with pytest.raises(error, match=words):
        ta.partition({label: optax.sgd(0.1) for label in txs}, rules)


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ({"w": "a", "b": "typo"}, ta.TransformError, r"'typo' \('b'\).*'a'"),
        (lambda p: {"w": "a", "b": "typo"}, ta.TransformError, r"'typo' \('b'\)"),
        (lambda p: {"w": "a", "b": 0}, ta.TransformError, r"label 0 \('b'\)"),
        (lambda p: {"w": "a", "b": None}, ta.UnmatchedPathError, "'b'"),
        (lambda p: {"w": "a"}, ta.UnmatchedPathError, "'b'"),
        (lambda p: {"w": "a", "b": "a", "c": "a"}, ta.UnusedRuleError, "'c'"),
        (ta.lift({"w": "a", "b/deep": "a", "b": "a"}), ta.UnusedRuleError, "'b/deep'"),
        ({"w": "a"}, ta.UnmatchedPathError, "'b'"),
        ({"w": "a", "x": "a", "**": "a"}, ta.UnusedRuleError, "'x'"),
        ({"**": "a", "w": "a"}, ta.UnusedRuleError, "unreachable"),
    ],
)
def test_labels_that_do_not_fit_the_params_are_named(rules, error, words):
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    tx = ta.partition({"a": optax.sgd(0.1)}, rules)
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.raises(error, match=words):
            init(params)


def test_a_message_about_many_leaves_is_short():
    params = {f"layer_{i}": jnp.ones(1) for i in range(500)}
    tx = ta.partition({"a": optax.sgd(0.1)}, lambda p: dict.fromkeys(p, "typo"))
    with pytest.raises(ta.TransformError, match="and 496 more") as info:
        tx.init(params)
    assert len(str(info.value)) < 400


# Inside other things, and other things inside


@pytest.mark.slow
def test_it_nests():
    model = two_layers(ModelTuple, LayerTuple)
    inner = ta.partition(
        {"x": optax.sgd(1.0), "y": optax.sgd(2.0)}, {"**/w": "x", "**": "y"}
    )
    outer = ta.partition({"in": inner, "z": optax.sgd(4.0)}, {"out/w": "z", "**": "in"})
    direct = ta.partition(
        {"x": optax.sgd(1.0), "y": optax.sgd(2.0), "z": optax.sgd(4.0)},
        {"out/w": "z", "**/w": "x", "**": "y"},
    )
    params = put(model, flat_params(model))
    want, _ = direct.update(params, direct.init(params), params)
    factory = optax.inject_hyperparams(
        lambda rate: optax.chain(optax.scale(rate), outer)
    )
    for tx in (
        outer,
        ta.adapt(outer),
        optax.chain(optax.identity(), outer),
        optax.named_chain(("p", outer)),
        ta.adapt(optax.MultiSteps(outer, 1)),
        optax.MultiSteps(outer, 1),
        ta.adapt(factory(1.0)),
        ta.adapt(optax.apply_if_finite(outer, 3)),
        ta.freeze(outer, []),
        optax.masked(outer, lambda p: jax.tree.map(lambda _: True, p)),
    ):
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        assert bits(updates) == bits(want)
    optax.tree.map_params(ta.adapt(outer), lambda x: x, outer.init(params))


@pytest.mark.parametrize(
    "name", ["nnx.Module", "nnx.State", "FrozenDict", "Equinox MLP"]
)
def test_the_state_is_the_same_whatever_the_classes(name):
    tree = ROW[name].make()
    flat = ta.split(tree)[0]
    first = next(iter(flat)).partition("/")[0]
    tx = ta.partition(
        {"a": optax.adam(0.1)}, {f"{first}/**/{{w,weight}}": "frozen", "**": "a"}
    )
    assert bits(tx.init(tree)) == bits(tx.init(flat))


def test_a_missing_update_reaches_the_group_as_missing():
    params = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)}
    grads = {"a": None, "b": jnp.ones(2), "c": None}
    made = optax.trace(0.5)
    for tx in (
        ta.partition({"t": made}, {"c": "frozen", "**": "t"}),
        ta.freeze(made, "c"),
        ta.adapt(optax.chain(optax.trace(0.0), ta.freeze(made, "c"))),
    ):
        state = tx.init(params)
        for want in (1.0, 1.5):
            updates, state = tx.update(grads, state, params)
            assert updates["a"] is updates["c"] is None
            assert updates["b"][0] == want
    tx = ta.partition({"t": optax.adam(0.1)}, {"c": "frozen", "**": "t"})
    with pytest.raises(ta.TransformError, match=r"\(None\) for 'a'"):
        tx.update(grads, tx.init(params), params)


def test_a_multi_steps_object_may_be_a_group():
    steps = optax.MultiSteps(optax.chain(optax.polyak_sgd(), optax.sgd(1.0)), 2)
    tx = ta.partition({"a": steps}, {"b": "frozen", "**": "a"})
    params = {"w": jnp.ones(1), "b": jnp.ones(1)}
    state = tx.init(params)
    for done in (False, True):
        _, state = tx.update(params, state, params, value=jnp.float32(1.0))
        assert bool(steps.has_updated(state.inner_states["a"])) is done


def test_a_class_in_place_of_a_transformation_is_reported_as_one():
    for make in (ta.adapt, lambda tx: ta.partition({"a": tx}, {"**": "a"})):
        with pytest.raises(ta.TransformError, match="MultiSteps, which is a class"):
            make(optax.MultiSteps)


@pytest.mark.slow
def test_a_missing_argument_of_a_loss_stays_its_own_error():
    def loss(params, *, scale):
        return scale * jnp.sum(params["w"] ** 2)

    params = {"w": jnp.ones(2)}
    tx = ta.partition({"a": optax.lbfgs()}, {"**": "a"})
    call = {"value": jnp.float32(2.0), "grad": params, "value_fn": loss}
    with pytest.raises(TypeError, match="'scale'"):
        tx.update(params, tx.init(params), params, **call)


def test_the_name_of_a_file_of_rules_leads_to_load_rules():
    with pytest.raises(ta.TransformError, match=r"'a\.toml'.*treeadapt\.load_rules"):
        ta.partition({"a": optax.sgd(0.1)}, "a.toml")


def test_frozen_multi_steps_keep_their_methods():
    steps = optax.MultiSteps(optax.sgd(1.0), 2)
    tx, params = ta.freeze(steps, "b"), {"w": jnp.ones(1), "b": jnp.ones(1)}
    state = tx.init(params)
    for done in (False, True):
        _, state = tx.update(params, state, params)
        assert bool(tx.has_updated(state)) is done


def test_lookahead_may_be_the_group_next_to_frozen_leaves():
    tx = ta.partition(
        {"a": optax.lookahead(optax.sgd(0.1), 1, 0.5)}, {"b": "frozen", "**": "a"}
    )
    model = {"w": jnp.ones(2), "b": jnp.ones(2)}
    params = optax.LookaheadParams.init_synced(model)
    updates, _ = tx.update(model, tx.init(params), params)
    assert not updates.fast["b"].any()
    assert not updates.slow["b"].any()
    assert updates.slow["w"].any()


def test_a_transformation_in_place_of_the_mapping_is_reported():
    with pytest.raises(
        ta.TransformError, match=r"first {label: transformation}.* treeadapt\.adapt"
    ):
        ta.partition(optax.adam(1.0), {"**": "x"})


def test_what_returns_no_updates_cannot_be_a_group():
    measure = optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (jnp.ones(()), state),
    )
    params = {"a": jnp.ones(2), "b": jnp.ones(1)}
    for tx in (
        ta.partition({"x": measure}, {"**": "x"}),
        ta.freeze(measure, "a"),
        ta.per_layer(measure, {"a": 0}),
    ):
        with pytest.raises(ta.TransformError, match="gives no updates for '"):
            tx.update(params, tx.init(params), params)
