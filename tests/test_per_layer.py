"""``per_layer``: on stacked layers, what happens to the unrolled model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformations
from programs import Case, numbers
from scanned import BY_NAME, TWINS
from sizes import full
from stacked import LAYER, STACKS, distance, far_apart, stack, unrolled
from states import assert_equal

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

P = jax.sharding.PartitionSpec
LAYERS = 7  # more than some axes of a layer

#: Of ``transformations``: what looks at each leaf, or each element, alone.
LEAF_BY_LEAF = (
    "adafactor",
    "adamw",
    "complex",
    "galore",
    "inject_hyperparams",
    "lamb",
    "lookahead",
    "lookahead, reset",
    "masked",
    "momentum",
    "MultiSteps",
    "muon",
    "named_chain",
    "reduce_on_plateau",
    "schedule_free",
    "sm3",
)
#: Of these, what looks at a whole array, and so at all layers, without ``per_layer``.
OF_ARRAYS = ("adafactor", "galore", "lamb", "muon", "sm3")
#: Newton and Schulz's iteration enlarges what XLA rounds otherwise in a batch, and so
#: does the difference of two copies of the params.
FAR = {"muon": 1e-4, "lookahead": 1e-5, "lookahead, reset": 1e-5}


def model(layers=LAYERS):
    """A flat dict of stacked layers."""
    return stack(numbers(unrolled(layers), 0.5), layers)


def shapes(tree):
    return jax.tree.map(jnp.shape, tree)


def close(one, two):
    pairs = zip(*map(jax.tree.leaves, (one, two)), strict=True)
    return all(far_apart(np.asarray(a), np.asarray(b)) < 1e-6 for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    full(LEAF_BY_LEAF, (*OF_ARRAYS, "lookahead", "MultiSteps")),
)
def test_updates_of_layers_are_those_of_the_unrolled_model(name):
    case = transformations.BY_NAME[name]
    assert distance(case, LAYERS, by_layer=True) <= FAR.get(name, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", full(OF_ARRAYS, ("lamb",)))
def test_the_law_of_layers_can_fail(name):
    assert distance(transformations.BY_NAME[name], LAYERS, by_layer=False) > 0.01


@pytest.mark.slow
def test_a_norm_over_all_leaves_is_one_over_a_layer_inside():
    case = Case("norm", lambda: optax.clip_by_global_norm(1.0))
    assert distance(case, 3, by_layer=False) < 1e-6
    assert distance(case, 3, by_layer=True) > 0.1


def kernels_decayed():
    return optax.lamb(0.1, weight_decay=0.5, mask=ta.leaf(ndim=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "twin",
    full(tuple(BY_NAME), ("Linen, boxes, axis 1", "dict of experts")),
)
def test_layers_of_any_library_and_axis_update_as_unrolled_ones(twin):
    twin = BY_NAME[twin]
    results = []
    for tree, tx in (
        (twin.scanned(), ta.per_layer(kernels_decayed(), twin.stacks)),
        (twin.unrolled(), ta.adapt(kernels_decayed())),
    ):

        def updates(tree=tree, tx=tx):
            _, state = tx.update(tree, tx.init(tree), tree)
            return ta.split(tx.update(tree, state, tree)[0])[0]

        results.append(jax.jit(updates)())
    one, two = twin.unroll(results[0]), results[1]
    assert one.keys() == two.keys()
    assert close(one, {path: two[path] for path in one})


@functools.partial(jax.jit, static_argnums=0)
def step(tx, params, state):
    return tx.update(jax.tree.map(jnp.sin, params), state, params)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_copies_of_params_hold_layers_where_the_params_do(twin):
    tree = twin.scanned()
    tx = ta.per_layer(optax.adam(0.1), twin.stacks)
    state = jax.eval_shape(lambda: tx.init(tree))
    params = {path: leaf.shape for path, leaf in ta.split(tree)[0].items()}
    found = {}
    for path, leaf in ta.to_flat_dict(state).items():
        if "/0/mu/" in path:
            found[path.partition("/0/mu/")[2]] = leaf.shape
        elif "/0/nu/" not in path:
            # A count for each layer, also in stacks inside others.
            assert leaf.ndim == sum(
                axis.covers(path[: -len("/0/count")]) for axis in twin.axes
            )
    assert found == params


@pytest.mark.slow
def test_a_group_of_some_layers_runs_on_each_of_them():
    table = {
        "blocks/{0..1}": "frozen",
        "blocks/2/norm": "frozen",
        "blocks/*/attn": "muon",
        "blocks/6/norm": "muon",
        "**": "lamb",
    }

    def partition(wrap, **options):
        groups = {"muon": optax.contrib.muon(0.1), "lamb": optax.lamb(0.1)}
        groups = {label: wrap(tx) for label, tx in groups.items()}
        return ta.partition(groups, ta.Rules(table, **options))

    flat = numbers(unrolled(LAYERS), 0.5)
    params = stack(flat, LAYERS)
    one = partition(lambda tx: ta.per_layer(tx, STACKS), stacks=STACKS)
    two = partition(lambda tx: tx)
    state, want = one.init(params), two.init(flat)
    for _ in range(2):
        updates, state = step(one, params, state)
        expected, want = step(two, flat, want)
    for path, update in stack(expected, LAYERS).items():
        assert far_apart(np.asarray(update), np.asarray(updates[path])) < 1e-4
    assert [*state.inner_states["muon"]] == ["blocks/{2..6}", "blocks/{6}"]
    assert [*state.inner_states["lamb"]] == ["", "blocks/{2..6}", "blocks/{3..5}"]
    sharded = ta.opt_state_shardings(one, params, jax.tree.map(lambda _: P(), params))
    assert jax.tree.structure(sharded) == jax.tree.structure(state)
    _, report = ta.carry_state(one, params, state)
    assert len(report.carried) == len(jax.tree.leaves(state))


@pytest.mark.slow
def test_moments_of_layers_stay_when_more_of_them_train():
    def partition(table):
        tx = ta.per_layer(optax.lamb(0.1), STACKS)
        return ta.partition({"a": tx}, ta.Rules(table, stacks=STACKS))

    params = model()
    upper, every = (
        partition({"blocks/{0..4}": "frozen", "**": "a"}),
        partition({"**": "a"}),
    )
    _, state = step(upper, params, upper.init(params))
    new, report = ta.carry_state(every, params, state)
    assert [path for path in report.fresh if "/mu/" in path] == [
        f"inner_states/a/blocks/0/mu/blocks/{{0..4}}/{path}" for path in sorted(LAYER)
    ]
    before = state.inner_states["a"]["blocks/{5..6}"][0].mu
    for path, moment in new.inner_states["a"]["blocks"][0].mu.items():
        was = before[path.replace("blocks/", "blocks/{5..6}/")]
        assert np.array_equal(moment[5:], was)
        assert not moment[:5].any()


@pytest.mark.slow
def test_a_state_keeps_its_types_in_a_scan_and_equals_that_of_single_steps():
    params = model()
    tx = ta.per_layer(
        optax.chain(optax.zero_nans(), optax.adafactor(min_dim_size_to_factor=2)),
        STACKS,
    )
    state = jax.jit(tx.init)(params)

    def one(carry, _):
        updates, new = step(tx, *carry)
        return (ta.apply_updates(carry[0], updates), new), updates

    scanned, _ = jax.lax.scan(one, (params, state), None, length=2)
    single = params, state
    for _ in range(2):
        single, _ = one(single, None)
    assert close(scanned, single)


@pytest.mark.slow
def test_a_state_goes_to_per_layer_and_back():
    params = model()
    plain, layered = ta.adapt(optax.adam(0.1)), ta.per_layer(optax.adam(0.1), STACKS)
    _, old = step(plain, params, plain.init(params))
    state, report = ta.carry_state(layered, params, old)
    assert not report.fresh
    assert close(step(plain, params, old)[0], step(layered, params, state)[0])
    back, report = ta.carry_state(plain, params, state)
    assert close(back, old)


def test_a_state_says_where_it_holds_params():
    params = model()
    tx = ta.per_layer(optax.adam(0.1), STACKS)
    marked = optax.tree.map_params(tx, lambda leaf: "param", tx.init(params))
    assert marked["blocks"][0].mu == dict.fromkeys(
        (f"blocks/{path}" for path in LAYER), "param"
    )
    tx = ta.per_layer(optax.adafactor(0.1, min_dim_size_to_factor=2), STACKS)
    specs = {path: P(*"abc"[: leaf.ndim]) for path, leaf in params.items()}
    state = ta.opt_state_shardings(tx, params, specs)["blocks"][0]
    assert state.v_row["blocks/attn/kernel"] == P("a", "b")
    assert state.v_col["blocks/attn/kernel"] == P("a", "c")
    assert state.v["blocks/norm/scale"] == P("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize("stacks", [STACKS, {"blocks": 0, "blocks/inner": 1}])
def test_an_update_traces_no_init_and_the_update_once(stacks):
    inner = optax.lamb(1e-2)
    traced = []

    def init(params):
        traced.append("init")
        return inner.init(params)

    def update(updates, state, params):
        traced.append("update")
        return inner.update(updates, state, params)

    params = {"blocks": {"w": jnp.ones((3, 4)), "inner": {"w": jnp.ones((3, 2, 4))}}}
    tx = ta.per_layer(optax.GradientTransformation(init, update), stacks)
    state = tx.init(params)
    traced.clear()
    tx.update(params, state, params)
    assert traced == ["update"] * len(stacks)


@pytest.mark.slow
def test_every_leaf_of_the_state_has_an_axis_of_layers():
    make = ta.inject_hyperparams(optax.adam)
    tx = ta.per_layer(make(optax.linear_schedule(0.1, 0.01, 5)), STACKS)
    _, state = step(tx, model(), tx.init(model()))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state["blocks"])} == {LAYERS}
    rates = state["blocks"].hyperparams["learning_rate"]
    assert rates.shape == state["blocks"].count.shape == (LAYERS,)
    assert len({*rates.tolist()}) == 1


def test_one_number_fills_a_field_of_every_layer():
    params = model()
    tx = ta.per_layer(ta.inject_hyperparams(optax.adam)(0.1), STACKS)
    state = ta.tree_set(tx.init(params), count=7, learning_rate=0.5)
    held = state["blocks"]
    for leaf, want in ((held.count, 7), (held.hyperparams["learning_rate"], 0.5)):
        assert leaf.tolist() == [want] * LAYERS
    assert jax.tree.map(jnp.shape, state) == shapes(tx.init(params))
    with pytest.raises(ta.StructureMismatchError, match=r"has another shape: float"):
        ta.tree_set(state, learning_rate=jnp.ones(2))


@pytest.mark.slow
def test_a_state_that_kept_counts_once_is_carried():
    params = model()
    tx = ta.per_layer(ta.inject_hyperparams(optax.adam)(0.1), STACKS)
    _, state = step(tx, params, tx.init(params))

    def once(leaf):
        return leaf[0] if leaf.shape == (LAYERS,) else leaf

    old = state | {"blocks": jax.tree.map(once, state["blocks"])}
    with pytest.raises(ta.TransformError, match=r"carry_state\(tx, params"):
        tx.update(params, old, params)
    new, report = ta.carry_state(tx, params, old)
    assert not report.fresh
    assert not report.misshaped
    assert_equal(new, state)
    # As they are after a checkpoint, too.
    new, report = ta.carry_state(tx, params, ta.to_flat_dict(old))
    assert_equal(new, state)


def test_counts_that_differ_between_layers_are_no_one_number():
    params = model()
    plain, tx = ta.adapt(optax.adam(0.1)), ta.per_layer(optax.adam(0.1), STACKS)
    state = ta.tree_set(tx.init(params), count=3)
    inner = state["blocks"][0]
    count = inner.count.at[2].set(5)
    state["blocks"] = (inner._replace(count=count), *state["blocks"][1:])
    with pytest.warns(ta.TreeAdaptWarning, match="'0/count' could be 'blocks/0/count'"):
        _, report = ta.carry_state(plain, params, state)
    assert "0/count" not in report.carried


@pytest.mark.slow
def test_extra_arguments_like_the_params_are_divided_into_layers():
    def update(updates, state, params=None, *, hessian, scale, **extra):
        seen.append((shapes(updates), shapes(hessian), shapes(scale)))
        return jax.tree.map(lambda h: h * scale["by"], hessian), state

    seen = []
    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    params = model()
    tx = ta.per_layer(tx, STACKS)
    hessian, scale = jax.tree.map(jnp.cos, params), {"by": jnp.full(2, 3.0)[0]}
    updates, _ = tx.update(
        params, tx.init(params), params, hessian=hessian, scale=scale
    )
    assert close(updates, jax.tree.map(lambda h: 3 * h, hessian))
    layer = {f"blocks/{path}": shape for path, shape in LAYER.items()}
    assert (layer, layer, {"by": ()}) in seen


@pytest.mark.slow
def test_masks_see_the_shapes_of_one_layer():
    params = model()
    kernels = {path: path.endswith("kernel") or path == "embed" for path in params}
    rules = {"**/kernel": True, "embed": True, "**": False}
    for mask in (
        ta.leaf(ndim=2),
        ta.lift(lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 2, tree)),
        lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 2, tree),
        ta.Rules(rules, stacks=STACKS).where(True),
    ):
        tx = ta.per_layer(optax.add_decayed_weights(0.5, mask), STACKS)
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = tx.update(zeros, tx.init(params), params)
        assert {path: bool(update.any()) for path, update in updates.items()} == kernels


@pytest.mark.slow
def test_a_part_without_leaves_has_no_state():
    params = {path: leaf for path, leaf in model().items() if "blocks" in path}
    tx = ta.per_layer(optax.flatten(optax.adam(0.1)), STACKS)
    state = tx.init(params)
    assert [*state] == ["blocks"]
    updates, _ = step(tx, params, state)
    plain = ta.adapt(optax.adam(0.1))
    assert close(updates, step(plain, params, plain.init(params))[0])


@pytest.mark.slow
def test_layers_may_be_sharded_over_explicit_axes():
    kind = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 4), ("l", "x"), axis_types=(kind, kind))
    params = {"blocks/w": jnp.ones((4, 8, 8)), "blocks/b": jnp.ones((4, 8))}
    specs = {"blocks/w": P("l", "x", None), "blocks/b": P("l", None)}
    with jax.set_mesh(mesh):
        params = jax.device_put(params, ta.named_shardings(params, specs, mesh))
        tx = ta.per_layer(optax.lamb(0.1), {"blocks": 0})
        state = ta.init_sharded(tx, params)
        updates, state = jax.jit(tx.update)(params, state, params)
        for tree in (updates, state["blocks"][0].mu):
            assert jax.tree.map(lambda leaf: leaf.sharding.spec, tree) == specs


@pytest.mark.slow
def test_layers_of_a_model_that_is_not_stacked_are_leaves():
    flat = numbers(unrolled(3), 0.5)
    one, two = ta.per_layer(optax.lamb(0.1), STACKS), ta.adapt(optax.lamb(0.1))
    updates = step(one, flat, one.init(flat))[0]
    assert close(updates, step(two, flat, two.init(flat))[0])


REFUSED = {
    "add_noise": (lambda: optax.add_noise(0.1, 0.5, key=0), "random numbers"),
    "apply_if_finite": (
        lambda: optax.apply_if_finite(optax.adam(0.1), 3),
        "apply_if_finite skips",
    ),
    "dpsgd": (
        lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, key=0),
        "dpsgd draws",
    ),
    "lbfgs": (optax.lbfgs, "line search"),
    "backtracking": (
        lambda: optax.scale_by_backtracking_linesearch(3),
        "line search",
    ),
    "MultiSteps, skipping": (
        lambda: optax.MultiSteps(
            optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
        ),
        "MultiSteps",
    ),
    "sophia": (lambda: optax.contrib.sophia(0.1), "sophia draws"),
    "a typed key": (
        lambda: optax.GradientTransformation(
            lambda _: jax.random.key(0), lambda u, s, _: (u, s)
        ),
        "random numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_on_each_layer_is_refused_by_name(name):
    make, why = REFUSED[name]
    with pytest.raises(ta.TransformError, match=why):
        ta.per_layer(make(), STACKS).init(model())
    with pytest.raises(ta.TransformError, match=why):
        jax.eval_shape(ta.per_layer(make(), STACKS).init, model())


def test_a_function_of_the_model_is_not_called_on_a_layer():
    tx = optax.contrib.sam(optax.adam(0.1), optax.sgd(0.1), opaque_mode=True)
    tx, params = ta.per_layer(tx, STACKS), model()
    with pytest.raises(
        ta.TransformError, match="grad_fn, which takes the whole params"
    ):
        tx.update(params, tx.init(params), params, grad_fn=lambda params, _: params)


def test_what_gives_no_updates_is_refused():
    tx = ta.per_layer(optax.measure_with_ema(optax.tree.norm, 0.9), STACKS)
    with pytest.raises(ta.TransformError, match="no updates"):
        jax.eval_shape(
            lambda params: tx.update(params, tx.init(params), params), model()
        )


def test_stacks_that_do_not_fit_are_errors():
    params = model()
    for stacks, text in (
        ({"block": 0}, "matches nothing"),
        ({"blocks": 2}, "has no axis 2"),
        ({"blocks": 1}, "disagree"),
        ({"blocks": 0.5}, "expected an axis"),
    ):
        with pytest.raises(ta.StackError, match=text):
            ta.per_layer(optax.adam(0.1), stacks).init(params)
    with pytest.raises(ta.TransformError, match="call it"):
        ta.per_layer(optax.adam, STACKS)


@pytest.mark.slow
def test_leaves_outside_of_a_stack_of_the_whole_tree_have_a_part_of_their_own():
    params = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 2)), "head": jnp.ones((3, 2))}
    tx = ta.per_layer(optax.lamb(0.1), {"": 0, "head": None})
    state = tx.init(params)
    assert {key: [*part[0].mu] for key, part in state.items()} == {
        "": ["a", "b"],
        "none": ["head"],
    }
    updates, _ = step(tx, params, state)
    assert shapes(updates) == shapes(params)


def test_rules_that_divide_the_layers_belong_outside():
    rules = ta.Rules({"blocks/0": "frozen", "**": "a"}, stacks=STACKS)
    for each in (rules, rules.bind(model())):
        inside = ta.per_layer(ta.partition({"a": optax.sgd(0.1)}, each), STACKS)
        with pytest.raises(ta.StackError, match="inside per_layer"):
            inside.init(model())
