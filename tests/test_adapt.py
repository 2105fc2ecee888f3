"""``adapt``: every transformation on every tree, with the bits of the flat dict."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import (
    Step,
    bits,
    cast_back,
    flat_params,
    flat_updates,
    like,
    loss,
    numbers,
    program,
    put,
    reference,
)
from sizes import crossed, full, some
from transformations import BY_NAME as CASE
from transformations import CASES
from trees import BY_NAME as ROW
from trees import (
    TREES,
    LayerTuple,
    ModelTuple,
    PlainLayer,
    Row,
    b,
    mlp,
    structure,
    two_layers,
    w,
)

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(autouse=True)
def _positions_are_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnstablePathWarning)
        yield


TRAINS = [row for row in TREES if row.paths and not row.opaque]
every_tree = pytest.mark.parametrize("row", TRAINS, ids=lambda row: row.name)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
#: Functions among the leaves, fields out of order, tuples, variables, odd paths.
SOME = ["Equinox MLP", "NamedTuple", "tuple", "nnx.Module", "odd keys", "bare leaf"]


# Law 4: the numbers of the flat dict


@functools.cache
def reference_program(name: str, signature: Any) -> tuple[Any, str]:
    """Structure of the state and program of Optax itself on a flat dict."""
    flat = {path: jnp.zeros(shape, dtype) for path, shape, dtype in signature}
    params, step = numbers(flat, 0.5), reference(CASE[name], flat)
    state = step.init(params)
    return bits(state), program(step, numbers(flat, 1.0), state, params)


def assert_runs_the_program_of_the_flat_dict(case: Any, row: Any) -> None:
    tree = row.make()
    params = flat_params(tree)
    signature = tuple((path, x.shape, x.dtype) for path, x in sorted(params.items()))
    state_bits, text = reference_program(case.name, signature)
    step = Step(case, tree, ta.adapt(case.make()))
    state = step.init(params)
    assert bits(state) == state_bits
    assert program(step, numbers(params, 1.0), state, params) == text


@pytest.mark.parametrize(
    ("row", "name"),
    [
        pytest.param(row, name, id=f"{name}-{row.name}")
        for name in ("adamw", "lbfgs, backtracking", "sam, opaque")
        # The next test runs all of them on some trees.
        for row in (TRAINS if name == "adamw" else full(TRAINS, []))
        # The others do not work on a flat dict of many dtypes either.
        if row.name != "many dtypes" or name == "adamw"
    ],
)
def test_every_tree_runs_the_program_of_the_flat_dict(row, name):
    assert_runs_the_program_of_the_flat_dict(CASE[name], row)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(*cell, id=f"{cell[0].name}-{cell[1]}", marks=marks)
        for place, cell in enumerate(crossed(CASES, SOME))
        for marks in [[pytest.mark.slow] if place % 5 else []]
    ],
)
def test_every_transformation_runs_the_program_of_the_flat_dict(case, name):
    assert_runs_the_program_of_the_flat_dict(case, ROW[name])


@every_case
def test_the_state_keeps_its_types_and_so_it_scans(case):
    tree = ROW["Equinox MLP"].make()
    params = flat_params(tree)
    step = Step(case, tree, ta.adapt(case.make()))
    state = step.init(params)
    if case.name == "monitor":  # its state starts without measurements
        _, state = jax.eval_shape(step, params, state, params)
    _, new = jax.eval_shape(step, params, state, params)
    types = jax.tree.map(lambda x: (x.shape, x.dtype), (state, new))
    assert types[0] == types[1]


def several(step: Any, mode: str, params: Any, *, count: int = 4) -> Any:
    """Run steps, eagerly, compiled or scanned; return all updates and the state."""

    def body(carry: Any, seed: Any) -> Any:
        params, state = carry
        grads = {path: jnp.sin(seed + x) for path, x in params.items()}
        updates, state = step(grads, state, params)
        # The first of lookahead's two halves is the one that trains.
        moved = {
            p: x + updates.get(p, updates.get(f"fast:{p}")) for p, x in params.items()
        }
        return (moved, state), updates

    seeds, carry = jnp.arange(count, dtype=jnp.float32), (params, step.init(params))
    if mode == "scan":
        return jax.lax.scan(body, carry, seeds)
    body = jax.jit(body) if mode == "jit" else body
    seen = []
    for seed in seeds:
        carry, updates = body(carry, seed)
        seen.append(updates)
    return carry, jax.tree.map(lambda *steps: jnp.stack(steps), *seen)


@pytest.mark.parametrize(
    ("name", "mode"),
    some(
        [
            ("adamw", "eager"),
            ("adamw", "jit"),
            ("sam", "scan"),
            ("noise", "jit"),
            ("adamw", "scan"),
            ("lookahead, reset", "jit"),
            ("MultiSteps", "scan"),
            ("lookahead, reset", "scan"),
        ]
    ),
)
def test_several_steps_give_the_bits_of_the_flat_dict(name, mode):
    case = CASE[name]
    tree = two_layers(ModelTuple, LayerTuple)  # whose fields are not in order of name
    params = flat_params(tree)
    ours = several(Step(case, tree, ta.adapt(case.make())), mode, params)
    assert bits(ours) == bits(several(reference(case, params), mode, params))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(*cell, id=f"{cell[0].name}-{cell[1]}", marks=marks)
        for place, cell in enumerate(crossed(CASES, SOME))
        for marks in [[pytest.mark.slow] if place % 5 else []]
    ],
)
def test_as_tree_runs_the_program_of_the_callers_tree(case, name):
    assert_runs_the_program_of_the_callers_tree(case, ROW[name])


@every_tree
def test_as_tree_shows_every_tree_in_its_own_classes(row):
    if row.name in ("doubling dataclass", "NamedTuple of its own making"):
        return  # Optax itself cannot map over these
    if row.name != "nnx tied":
        assert_runs_the_program_of_the_callers_tree(CASE["adamw"], row)
        return
    with pytest.raises(ta.TransformError, match="which JAX takes for two"):
        ta.adapt(optax.adam(0.1), as_tree=True).init(row.make())


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(ta.adapt, optax.adam(0.1)),
        functools.partial(ta.freeze, optax.adam(0.1), "hidden/w"),
        functools.partial(ta.partition, {"a": optax.adam(0.1)}, {"**": "a"}),
    ],
    ids=["adapt", "freeze", "partition"],
)
def test_as_tree_refuses_what_jax_does_not_know(make):
    tree = {"hidden": {"w": w(), "b": b()}, "size": PlainLayer(2, 3)}
    make().init(tree)
    with pytest.raises(ta.TransformError, match="not know PlainLayer, at 'size'"):
        make(as_tree=True).init(tree)


def is_linear(node: Any) -> bool:
    return isinstance(node, eqx.nn.Linear)


def orthogonal() -> optax.GradientTransformation:
    """Orthogonalise the weight of each linear layer, as optimizers of Levanter do."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def each(node: Any) -> Any:
            if not is_linear(node) or node.weight is None:
                return node
            u, _, v = jnp.linalg.svd(node.weight, full_matrices=False)
            return eqx.tree_at(lambda layer: layer.weight, node, u @ v)

        return jax.tree.map(each, updates, is_leaf=is_linear), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    up: Any
    down: Any


def pairs() -> dict[str, Any]:
    one, two = (eqx.nn.Linear(3, 3, key=jax.random.key(n)) for n in (0, 1))
    state = nnx.State({"up": one, "down": nnx.Param(jnp.ones(2))})
    return {"Equinox": [one, two], "dataclass": Pair(one, two), "nnx.State": state}


@pytest.mark.slow
@pytest.mark.hazard("F35")
@pytest.mark.parametrize("name", ["Equinox", "dataclass", "nnx.State"])
def test_a_transformation_that_looks_for_modules_finds_them_as_tree(name):
    model = pairs()[name]
    grads = jax.tree.map(lambda x: 3 * x, model)
    table = {"modules": orthogonal(), "others": optax.sgd(1.0)}
    rules = ta.Rules({"**/weight": "modules", "**": "others"})
    plain = optax.chain(orthogonal(), optax.sgd(0.5))
    plain_groups = optax.partition(table, rules)
    for ours, theirs, moved in (
        (ta.adapt(plain, as_tree=True), plain, ta.glob("**")),
        (ta.partition(table, rules, as_tree=True), plain_groups, ta.glob("**")),
        (ta.freeze(plain, "**/bias", as_tree=True), plain, ~ta.glob("**/bias")),
    ):
        want, _ = theirs.update(grads, theirs.init(model), model)
        updates, _ = jax.jit(ours.update)(grads, ours.init(model), model)
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        chosen = jax.tree.map(
            lambda yes, a, b: bool(not yes or jnp.allclose(a, b, atol=1e-6)),
            ta.param_mask(model, moved),
            updates,
            want,
        )
        assert all(jax.tree.leaves(chosen))


def test_a_box_with_nothing_to_show_is_none_as_tree():
    """An optimizer asks a module for its bias, and would take the box for one."""
    seen = []

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        is_pair = functools.partial(lambda cls, x: isinstance(x, cls), Pair)
        seen.extend(jax.tree.leaves(updates, is_leaf=is_pair))
        return updates, state

    looks = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    model = [
        Pair(
            flax.linen.Partitioned(w(), ("a", None)),
            flax.linen.Partitioned(b(), (None,)),
        )
    ]
    tx = ta.partition(
        {"modules": looks, "others": optax.sgd(1.0)},
        {"**/up": "modules", "**": "others"},
        as_tree=True,
    )
    updates, _ = tx.update(model, tx.init(model), model)
    (pair,) = seen
    assert isinstance(pair.up, flax.linen.Partitioned)
    assert pair.down is None
    assert jax.tree.structure(updates) == jax.tree.structure(model)


@pytest.mark.parametrize(
    "make",
    [
        ta.adapt,
        lambda tx: ta.adapt(optax.chain(optax.clip(1.0), tx)),
        lambda tx: ta.freeze(tx, "**/bias"),
        lambda tx: ta.partition({"a": tx}, {"**": "a"}),
    ],
    ids=["adapt", "chain", "freeze", "partition"],
)
def test_a_transformation_that_tests_for_classes_of_the_model_is_reported(make):
    model = pairs()["Equinox"]
    with pytest.warns(
        ta.UnliftedMaskWarning, match="tests for the class Linear"
    ) as got:
        make(orthogonal()).init(model)
    assert [one.filename for one in got] == [__file__]
    assert "is_linear" in str(got[0].message)
    # Nobody looks for these, and a flat dict has lost nothing.
    for quiet in ([nnx.Param(w())], {"a/b": w(), "c": w()}, ROW["NamedTuple"].make()):
        ta.adapt(orthogonal()).init(quiet)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Equinox MLP", "NamedTuple", "nnx.Module"])
def test_a_state_goes_from_the_flat_dict_to_the_tree_and_back(name):
    model = ROW[name].make()
    grads = like(model, numbers(flat_params(model), 1.0))
    flat, tree = (ta.adapt(optax.adam(0.1), as_tree=yes) for yes in (False, True))
    states = [tx.update(grads, tx.init(model), model)[1] for tx in (flat, tree)]
    for tx, old, want in ((tree, states[0], states[1]), (flat, states[1], states[0])):
        with pytest.raises(ta.TransformError, match=r"carry_state\(tx, params"):
            tx.update(grads, old, model)
        state, report = ta.carry_state(tx, model, old)
        assert not report.fresh
        assert bits(state) == bits(want)


def test_a_state_as_tree_that_lacks_leaves_says_which():
    model = pairs()["dataclass"]
    part = ta.freeze(optax.adam(0.1), "up/weight", as_tree=True)
    tx = ta.adapt(optax.adam(0.1), as_tree=True)
    with pytest.raises(ta.TransformError, match="missing '0/mu/up/weight'"):
        tx.update(model, part.init(model), model)


@pytest.mark.slow
def test_callbacks_and_layers_as_tree_are_in_the_places_of_the_tree():
    model = {"blocks": {"w": jnp.arange(8.0).reshape(4, 2)}, "head": jnp.ones(2)}
    seen = []

    def update(updates: Any, state: Any, params: Any, *, value_fn: Any, **_: Any):
        seen.append(jax.tree.map(jnp.shape, (updates, params)))
        return updates, value_fn(jax.tree.map(jnp.zeros_like, params))

    tx = optax.GradientTransformationExtraArgs(lambda p: jnp.float32(0), update)
    rules = ta.Rules({"blocks/[12]": "a", "**": "b"}, stacks={"blocks": 0})
    groups = ta.partition({"a": tx, "b": tx}, rules, as_tree=True)
    updates, state = groups.update(model, groups.init(model), model, value_fn=loss)
    assert bits(updates) == bits(model)
    assert seen == [
        ({"blocks": {"w": (2, 2)}, "head": None},) * 2,
        ({"blocks": {"w": (2, 2)}, "head": (2,)},) * 2,
    ]
    for label, zeros in (("a", [1, 2]), ("b", [0, 3])):
        cut = {"blocks": {"w": model["blocks"]["w"].at[jnp.array(zeros)].set(0)}}
        head = model["head"] * (label == "a")
        assert state.inner_states[label] == loss(cut | {"head": head})


def is_empty_box(node: Any) -> bool:
    is_box = isinstance(node, nnx.Variable | flax.linen.Partitioned)
    is_box = is_box or type(node).__name__ == "NonTrainable"  # of paramax
    return is_box and not jax.tree.leaves(node)


def assert_runs_the_program_of_the_callers_tree(case: Any, row: Any) -> None:
    tree = row.make()
    params = flat_params(tree)
    # As equinox.partition gives it, with None for a box that has nothing in it.
    of_arrays = jax.tree.map(
        lambda node: None if is_empty_box(node) else node,
        like(tree, params),
        is_leaf=is_empty_box,
    )
    plain = Step(case, of_arrays, case.make(), cast_back=True)
    step = Step(case, tree, ta.adapt(case.make(), as_tree=True))
    state = step.init(params)
    assert bits(state) == bits(plain.init(params))
    grads = numbers(params, 1.0)
    assert program(step, grads, state, params) == program(plain, grads, state, params)


@every_tree
def test_the_state_is_that_of_the_transformation_on_the_split_tree(row):
    tree = row.make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.CollectionWarning)
        params, _ = ta.split(tree)
    tx = optax.chain(optax.adam(0.1), optax.trace(0.9))
    assert bits(ta.adapt(tx).init(tree)) == bits(tx.init(params))


@every_tree
def test_updates_have_the_treedef_of_the_updates_that_came_in(row):
    tree = row.make()
    params = put(tree, flat_params(tree))
    grads = like(tree, flat_params(tree, 1.0))
    updates, _ = ta.adapt(optax.sgd(0.1)).update(grads, optax.sgd(0.1).init({}), params)
    assert structure(updates) == structure(grads)
    assert type(updates) is type(grads)


@pytest.mark.parametrize(
    "row", [r for r in TREES if r.opaque], ids=lambda row: row.name
)
@pytest.mark.hazard("B8", "D1")
@pytest.mark.hazard("B8", "D1")
def test_a_class_that_jax_sees_as_one_leaf_is_refused(row):
    tree, tx = row.make(), optax.adam(0.1)
    for made in (
        ta.adapt(tx),
        ta.partition({"a": tx}, {"**": "a"}),
        ta.freeze(tx, "**"),
    ):
        with pytest.raises(ta.TransformError, match=r"at .*split") as info:
            made.init(tree)
        assert "register_dataclass" in str(info.value)
    with pytest.raises(ta.TransformError, match="one leaf"):
        ta.adapt(tx).update(tree, (), None)


def test_the_message_has_the_path_of_the_refused_leaf():
    tree = {"net": [ROW["dataclass"].make()]}
    with pytest.raises(ta.TransformError, match=r"PlainModel at \['net'\]\[0\]"):
        ta.adapt(optax.adam(0.1)).init(tree)


# Adapted transformations keep Optax's contracts


class Named(NamedTuple):
    """Params with the names of Optax's own fields."""

    value: Any
    count: Any
    mu: Any
    fast: Any
    grad: Any


NAMED = Named(*(jnp.full(2, float(i + 1)) for i in range(5)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lbfgs", "lookahead", "inject_hyperparams"])
def test_params_may_have_the_names_of_optaxs_fields(name):
    row = Row("named like Optax", lambda: NAMED, Named._fields)
    assert_runs_the_program_of_the_flat_dict(CASE[name], row)


def test_a_field_called_fast_is_not_a_lookahead():
    tx = ta.adapt(optax.lookahead(optax.adam(0.1), 2, 0.5))
    assert sorted(tx.init(NAMED).fast_state[0].mu) == sorted(Named._fields)
    hijacked = optax.lookahead(optax.adam(0.1), 2, 0.5).init(NAMED)
    assert hijacked.fast_state[0].mu.shape == (2,)  # only of the leaf ``fast``


def test_lookahead_goes_half_by_half():
    model = two_layers(ModelTuple, LayerTuple)
    tx = ta.adapt(optax.lookahead(optax.sgd(0.1), 1, 0.5))
    params = optax.LookaheadParams.init_synced(model)
    updates, _ = tx.update(model, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    moved = optax.apply_updates(params, updates)
    assert bits(moved.fast) == bits(moved.slow)  # synchronised


def test_params_may_be_left_out():
    tx = ta.adapt(optax.adam(0.1))
    model = mlp()
    grads = eqx.filter(model, eqx.is_array)
    updates, _ = tx.update(grads, tx.init(model))
    want, _ = tx.update(grads, tx.init(model), model)
    assert bits(updates) == bits(want)


@pytest.mark.parametrize("name", SOME)
def test_it_starts_on_abstract_params(name):
    tx, tree = ta.adapt(optax.adam(0.1)), ROW[name].make()
    arrays = ta.split(tree)[0]
    shapes = {p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in arrays.items()}
    abstract = put(tree, shapes)
    state = jax.eval_shape(lambda: tx.init(put(tree, arrays)))
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(abstract))
    assert state == jax.eval_shape(tx.init, abstract) if name == "tuple" else True


def test_params_may_be_the_whole_model_if_only_a_part_trains():
    model = mlp()
    part = eqx.filter(model, ta.glob("layers/1")(model))
    tx = ta.adapt(optax.adamw(0.1))
    state = tx.init(part)
    updates, new = tx.update(part, state, model)
    assert jax.tree.structure(updates) == jax.tree.structure(part)
    want, _ = tx.update(part, state, part)
    assert bits(updates) == bits(want)
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_a_missing_update_reaches_optax_as_missing():
    params = {"a": jnp.ones(2), "b": (jnp.ones(2), jnp.ones(2))}
    flat = {"a": jnp.ones(2), "b/0": jnp.ones(2), "b/1": jnp.ones(2)}
    grads = {"a": jnp.ones(2), "b": (None, jnp.ones(2))}
    tx = optax.chain(
        optax.add_decayed_weights(0.1), optax.trace(0.9), optax.scale(-1.0)
    )
    state, native = ta.adapt(tx).init(params), tx.init(flat)
    for _ in range(3):
        updates, state = ta.adapt(tx).update(grads, state, params)
        want, native = tx.update({**flat, "b/0": None}, native, flat)
        assert bits(updates["b"][1]) == bits(want["b/1"])
        assert updates["b"][0] is None
        assert bits(state) == bits(native)
    tx = ta.adapt(optax.adam(0.1))
    with pytest.raises(ta.TransformError, match=r"\(None\) for 'b/0'.*freeze"):
        tx.update(grads, tx.init(params), params)


def test_masked_nodes_among_the_updates_stay():
    params = {"a": jnp.ones(2), "b": (jnp.ones(2), jnp.ones(2))}
    masked = {"a": jnp.ones(2), "b": (optax.MaskedNode(), jnp.ones(2))}
    tx = optax.sgd(0.1)
    updates, _ = ta.adapt(tx).update(masked, tx.init({}), params)
    assert updates["b"][0] == optax.MaskedNode()
    assert updates["b"][1][0] == -0.1


@pytest.mark.slow
def test_float0_and_integer_updates_become_zeros_of_the_params_dtype():
    params = {
        "i": jnp.arange(3, dtype=jnp.int8),
        "k": jax.random.key(0),
        "n": np.arange(3),
        "u": jnp.arange(3),
        "w": jnp.ones(2),
    }
    grads = jax.grad(lambda p: p["w"].sum(), allow_int=True)(params)
    grads["u"] = jnp.ones(3, int)
    tx = ta.adapt(optax.adam(0.1))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert bits(updates["i"]) == bits(jnp.zeros(3, jnp.int8))
    assert bits(updates["n"]) == bits(updates["u"]) == bits(jnp.zeros(3, int))
    assert updates["k"] is grads["k"]
    new = ta.apply_updates(params, updates) if hasattr(ta, "apply_updates") else None
    assert new is None or new["k"] is params["k"]
    with pytest.raises(TypeError):  # Optax itself
        optax.adam(0.1).update(grads, optax.adam(0.1).init(params), params)


def test_the_gradients_may_hold_the_functions_of_the_model():
    model = mlp()
    updates, _ = ta.adapt(optax.sgd(0.1)).update(
        model, (optax.EmptyState(),) * 2, model
    )
    assert updates.activation is model.activation


def test_statistics_get_zeros_and_no_state():
    tree = ROW["nnx.BatchNorm"].make()
    tx = ta.adapt(optax.adam(0.1))
    state = tx.init(tree)
    assert sorted(state[0].mu) == ["bias", "scale"]
    grads = put(tree, {path: jnp.ones(2) for path in ROW["nnx.BatchNorm"].paths})
    updates, _ = tx.update(grads, state, tree)
    flat = ta.to_flat_dict(updates)
    assert [path for path, x in sorted(flat.items()) if (x == 0).all()] == [
        "mean",
        "var",
    ]


def test_optax_maps_over_the_params_in_the_state():
    model = mlp()
    tx = ta.adapt(optax.chain(optax.masked(optax.adam(0.1), ta.glob("layers/0"))))
    state = optax.tree.map_params(tx, lambda leaf: "p", tx.init(model))
    adam = state[0].inner_state[0]
    assert adam.mu["layers/0/weight"] == adam.nu["layers/0/bias"] == "p"
    assert adam.count == 0


@pytest.mark.slow
def test_multi_steps_keeps_its_methods_and_hands_on_extra_arguments():
    steps = optax.MultiSteps(optax.chain(optax.polyak_sgd(), optax.sgd(1.0)), 2)
    tx, params = ta.adapt(steps), {"net": [jnp.ones(2)]}
    state = tx.init(params)
    assert tx.gradient_transformation() is tx
    assert tx.inner_opt is steps.inner_opt
    for done in (False, True):
        updates, state = tx.update(params, state, params, value=jnp.float32(1.0))
        assert bool(tx.has_updated(state)) is done
    assert (updates["net"][0] != 0).all()
    without = optax.chain(steps.gradient_transformation())  # Optax drops the value
    with pytest.raises(TypeError, match="value"):
        without.update(params, without.init(params), params, value=jnp.float32(1.0))


def test_extra_arguments_are_ignored_where_the_transformation_takes_none():
    params = {"w": jnp.ones(2)}
    tx = ta.adapt(optax.GradientTransformation(*optax.scale(2.0)))
    updates, _ = tx.update(params, tx.init(params), params, value=1.0, batch=params)
    assert updates["w"][0] == 2


def recording() -> tuple[Any, dict[str, Any]]:
    """A transformation that records its arguments."""
    seen: dict[str, Any] = {}

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        seen.update(extra, updates=updates, params=params)
        return updates, state

    init = optax.init_empty_state
    return optax.GradientTransformationExtraArgs(init, update), seen


def test_extra_arguments_shaped_like_the_params_are_flat_and_others_untouched():
    tx, seen = recording()
    model, batch = mlp(), (jnp.ones(2), {"x": jnp.ones(3)})
    grads = eqx.filter(model, eqx.is_array)
    tags = jax.tree.map(lambda x: x.ndim, grads)
    loader = object()
    extra = {"batch": batch, "loader": loader, "model": model, "nothing": None}
    ta.adapt(tx).update(
        grads, optax.EmptyState(), model, tags=tags, value=grads, **extra
    )
    assert list(seen["updates"]) == list(seen["tags"]) == list(ta.split(model)[0])
    assert seen["tags"]["layers/0/weight"] == 2
    assert bits(seen["model"]) == bits(ta.split(model)[0])
    assert seen["value"] is grads  # is never shaped like params
    assert all(seen[name] is extra[name] for name in ("batch", "loader", "nothing"))


@pytest.mark.parametrize("maker", [ta.adapt, lambda tx: ta.freeze(tx, [])])
def test_an_argument_that_accidentally_has_the_paths_of_the_params_stays_as_it_is(
    maker,
):
    tx, seen = recording()
    params = [jnp.ones((2, 3)), jnp.ones(2)]
    pairs = {
        "bounds": (-1.0, 2.0),
        "limits": [-1.0, 2.0],
        "scalars": (jnp.float32(-1), jnp.float32(2)),
        "counts": {"0": 1, "1": 2},
    }
    own = {"momentum": (jnp.ones((2, 3)), jnp.ones(2)), "grad": params}
    maker(tx).update(params, maker(tx).init(params), params, **pairs, **own)
    assert all(seen[name] is value for name, value in pairs.items())
    for name, (first, second) in own.items():
        assert seen[name]["0"] is first
        assert seen[name]["1"] is second


def test_a_group_gets_all_of_a_dict_that_accidentally_has_its_keys():
    tx, seen = recording()
    grouped = ta.partition({"a": tx}, {"0": "frozen", "1": "a"})
    params = [jnp.ones((2, 3)), jnp.ones(2)]
    counts = {"0": 1, "1": 2}
    grouped.update(params, grouped.init(params), params, counts=counts, own=params)
    assert seen["counts"] == counts
    assert list(seen["own"]) == ["1"]


def test_collections_besides_params_do_not_train_silently():
    variables = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(2)}}
    sgd = optax.sgd(0.1)
    trains = [
        ta.adapt(sgd),
        ta.adapt(optax.adamw(0.1, mask=ta.glob("**/w"))),
        ta.partition({"a": sgd}, {"**": "a"}),
        ta.freeze(sgd, "params/w"),
    ]
    meant = [
        ta.partition({"a": sgd}, {"params": "a", "**": "frozen"}),
        ta.partition({"a": sgd}, {"params": "a", "batch_stats": "a"}),
        ta.freeze(sgd, "batch_stats"),
        ta.freeze(sgd, ~ta.glob("params")),
        ta.adapt(optax.chain(optax.clip(1.0), ta.freeze(sgd, "batch_stats"))),
        ta.scale_by_rules({"**": 1.0}),
    ]
    for tx in trains:
        with pytest.warns(ta.CollectionWarning, match=r"'batch_stats'.*freeze") as told:
            tx.init(variables)
        assert [warning.filename for warning in told] == [__file__]
    for tx in (*meant, *trains):  # no warning, which would be an error
        tx.init(variables if tx in meant else {"params": variables["params"]})


def test_arguments_of_another_size_are_not_examined():
    tx, seen = recording()
    keyless = ROW["keyless class"].make()["net"]  # would warn of its positions
    params = {"w": jnp.ones(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ta.adapt(tx).update(params, optax.EmptyState(), params, batch=keyless)
    assert seen["batch"] is keyless


def test_scalars_with_one_bare_array_are_not_params():
    tx, seen = recording()
    x = jnp.ones(3)
    ta.adapt(tx).update(x, optax.EmptyState(), x, grad=x, loss=jnp.float32(2), value=x)
    assert bits(seen["grad"]) == bits({"": x})
    assert seen["loss"] == 2
    assert seen["value"] is x


class Scaled(eqx.Module):
    """A loss that is a module."""

    by: jax.Array

    def __call__(self, params, *, flat):
        return self.by * flat * loss(params)


def test_callbacks_keep_their_signatures():
    tx, seen = recording()
    model = mlp()

    def value_fn(params, batch, *, flat=1, **rest):
        return loss(params)

    fns = [value_fn, functools.partial(value_fn, flat=2), jax.jit(value_fn)]
    fns += [
        Scaled(jnp.ones(())),
        eqx.filter_jit(value_fn),
        jax.tree_util.Partial(value_fn),
    ]
    for fn in fns:
        ta.adapt(tx).update(model, optax.EmptyState(), model, value_fn=fn)
        assert inspect.signature(seen["value_fn"]) == inspect.signature(fn)
    ta.adapt(tx).update(model, optax.EmptyState(), model, value_fn=fns[3])
    assert seen["value_fn"](seen["params"], flat=2) == 2 * loss(model)


@pytest.mark.slow
def test_a_line_search_passes_extra_arguments_to_the_loss_unchanged():
    params = (jnp.ones(2), jnp.ones(2))  # of the shape of the batch
    batch = (jnp.full(2, 3.0), jnp.full(2, 4.0))

    def value_fn(params, batch, scale):
        assert isinstance(params, tuple)
        assert isinstance(batch, tuple)
        return scale * sum(
            jnp.sum((p - x) ** 2) for p, x in zip(params, batch, strict=True)
        )

    def step(tx):
        def update(params, state):
            value, grad = jax.value_and_grad(value_fn)(params, batch, 0.5)
            extra = {"value": value, "grad": grad, "value_fn": value_fn}
            args = {"batch": batch, "scale": 0.5}
            return tx.update(grad, state, params, **extra, **args)[0]

        return program(update, params, tx.init(params))

    tx = optax.lbfgs(memory_size=2)
    assert step(ta.adapt(tx)) == step(tx)
    assert step(ta.freeze(tx, [])) == step(tx)
    assert step(ta.partition({"a": tx}, {"**": "a"})) == step(tx)


@pytest.mark.parametrize("name", SOME)
def test_gradients_for_sam_have_the_callers_classes(name):
    tree, seen = ROW[name].make(), []
    params = put(tree, flat_params(tree))
    grads = like(tree, flat_params(tree, 1.0))

    def grad_fn(params, index):
        seen.append(type(params))
        return like(params, flat_params(tree, 2.0))

    tx = ta.adapt(optax.contrib.sam(optax.sgd(1.0), optax.sgd(0.1), opaque_mode=True))
    updates, _ = tx.update(grads, tx.init(params), params, grad_fn=grad_fn)
    assert seen == [type(params)]
    want = {path: -x for path, x in flat_params(tree, 2.0).items()}
    assert bits(flat_updates(updates)) == bits(want)
    with pytest.raises(ta.TransformError, match="grad_fn returned"):
        tx.update(grads, tx.init(params), params, grad_fn=lambda p, i: {})


def test_a_state_of_half_precision_follows_the_transformation():
    params = {"net": [jnp.ones(2, jnp.bfloat16)]}
    grads = {"net": [jnp.ones(2, jnp.float32)]}
    for tx in (
        optax.adam(0.1),
        optax.adam(0.1, mu_dtype=jnp.float32),
        optax.sgd(0.1, 0.9),
    ):
        state = ta.adapt(tx).init(params)
        ours = ta.adapt(tx).update(grads, state, params)[1]
        want = tx.update(
            {"net/0": grads["net"][0]}, state, {"net/0": params["net"][0]}
        )[1]
        assert bits(ours) == bits(want)


def test_scan_names_the_floating_point_state_that_drifts_and_mu_dtype_fixes_it():
    params = {"net": [jnp.ones(2, jnp.bfloat16)]}
    grads = {"net": [jnp.ones(2, jnp.float32)]}

    def train(tx):
        def step(state, _):
            return tx.update(grads, state, params)[1], None

        return jax.lax.scan(step, tx.init(params), length=2)

    with pytest.raises(TypeError, match=r"\.trace\['net/0'\] has type bfloat16"):
        train(ta.adapt(optax.sgd(0.1, momentum=0.9)))
    train(ta.adapt(optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32)))


# Selectors, rules and lifted functions decide on the whole tree


class Block(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    activation: Callable = jax.nn.relu


def blocks() -> list[Block]:
    return [
        Block(eqx.nn.Linear(2, 2, key=jax.random.key(i)), eqx.nn.LayerNorm(2))
        for i in range(3)
    ]


def decayed(tx: Any, model: Any) -> list[str]:
    """Paths of the leaves that a transformation moves with zero gradients."""
    zeros = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    moving = put(model, flat_params(model, 9.0))  # no zero in it
    updates, _ = tx.update(zeros, tx.init(moving), moving)
    return [path for path, x in flat_updates(updates).items() if (x != 0).any()]


LINEAR = ["0/linear/bias", "0/linear/weight", "1/linear/bias", "1/linear/weight"]
LINEAR += ["2/linear/bias", "2/linear/weight"]


@pytest.mark.parametrize(
    ("mask", "want"),
    [
        (~ta.node(eqx.nn.LayerNorm), LINEAR),
        (ta.glob("{-1}/linear"), LINEAR[4:]),
        (ta.glob("**/<Linear>/bias"), LINEAR[::2]),
        (ta.Rules({eqx.nn.LayerNorm: False, "**": True}).where(True), LINEAR),
        (ta.Rules({eqx.nn.LayerNorm: False, "**": True}), LINEAR),
        (ta.lift(lambda m: [Block(True, False)] * len(m)), LINEAR),
        (ta.lift([Block(True, False), *[Block(False, False)] * 2]), LINEAR[:2]),
    ],
    ids=[
        "class",
        "from the end",
        "class name",
        "where",
        "rules",
        "lifted",
        "lifted tree",
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_masks_decide_on_the_callers_whole_tree(mask, want, nested):
    tx = optax.adamw(0.1, weight_decay=0.5, mask=mask)
    if nested:
        inner = optax.chain(ta.adapt(tx), optax.identity())
        tx = optax.masked(inner, lambda p: jax.tree.map(lambda _: True, p))
    model = blocks()
    assert sorted(decayed(ta.adapt(tx), model)) == want
    rules = {"1": "b", "**": "a"}
    in_groups = decayed(ta.partition({"a": tx, "b": tx}, rules), model)
    assert sorted(in_groups) == want


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (ta.glob("**/wieght"), "weight"),
        (ta.glob("0") & ~ta.node(eqx.nn.Conv), "Conv"),
        (ta.Rules({"9": True, "**": False}), "9"),
        (ta.lift({"0": True, "1": True, "2": True, "3": True}), "'3'"),
    ],
)
def test_a_selector_that_matches_nothing_is_an_error_in_init(mask, words):
    tx, model = optax.adamw(0.1, mask=mask), blocks()
    nested = optax.masked(ta.adapt(tx), lambda p: jax.tree.map(jnp.ndim, p))
    made = [ta.adapt(tx), ta.freeze(tx, "0/norm"), ta.partition({"a": tx}, {"**": "a"})]
    for wrapped in (*made, ta.adapt(nested)):
        with pytest.raises(ta.UnusedRuleError, match=words):
            wrapped.init(model)


def test_holes_in_a_model_do_not_make_it_a_part_of_one():
    model = {"l": eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))}
    for typo in ("**/biass", "l/bias/x"):
        tx = optax.adamw(0.1, mask=ta.glob(typo))
        frozen = ta.freeze(optax.sgd(0.1), typo)
        state = ta.adapt(optax.adamw(0.1, mask=ta.glob("**"))).init(model)
        uses = [
            lambda tx=tx: tx.init(model),
            lambda tx=tx: ta.adapt(tx).init(model),
            lambda tx=tx, state=state: ta.adapt(tx).update(model, state, model),
            lambda frozen=frozen: frozen.init(model),
            lambda frozen=frozen: frozen.update(model, frozen.init(model), model),
            lambda typo=typo: ta.split(model, typo),
        ]
        for use in uses:
            with pytest.raises(ta.UnusedRuleError, match=typo.strip("*/")):
                use()


def test_the_place_of_a_none_may_be_named():
    model = {"l": eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))}
    for mask in (ta.glob("**/bias"), ta.lift({"l/weight": True, "l/bias": False})):
        tx = optax.adamw(0.1, mask=mask)
        for wrapped in (tx, ta.adapt(tx), ta.freeze(tx, "**/bias")):
            wrapped.update(model, wrapped.init(model), model)
    assert list(ta.split(model, "**/weight")[0]) == ["l/weight"]
    assert ta.split(model, "**/bias")[0] == {}
    with pytest.raises(ta.UnusedRuleError, match="'l/bias/x'"):
        ta.lift({"l/weight": True, "l/bias": False, "l/bias/x": True})(model)


def test_without_lift_a_function_that_reads_classes_sees_the_flat_dict():
    def decays(tree):
        found = jax.tree.map(
            lambda node: not isinstance(node, eqx.nn.LayerNorm),
            tree,
            is_leaf=lambda node: isinstance(node, eqx.nn.LayerNorm),
        )
        return found

    model = blocks()
    tx = optax.adamw(0.1, weight_decay=0.5, mask=decays)
    with pytest.warns(ta.UnliftedMaskWarning, match="lift"):
        everything = decayed(ta.adapt(tx), model)
    assert len(everything) == len(LINEAR) * 2  # LayerNorms too
    tx = optax.adamw(0.1, weight_decay=0.5, mask=ta.lift(decays))
    assert sorted(decayed(ta.adapt(tx), model)) == LINEAR


def test_a_mask_on_part_of_the_tree_reports_nothing():
    tx = optax.masked(
        optax.chain(optax.add_decayed_weights(0.1, ta.glob("1"))),
        {"0": True, "1": False},
    )
    tx.init({"0": jnp.ones(2), "1": jnp.ones(2)})
    ta.adapt(tx).init({"0": jnp.ones(2), "1": jnp.ones(2)})


# Nothing to train, and other errors


@pytest.mark.parametrize(
    "tree",
    [
        {},
        (),
        None,
        {"n": jnp.arange(3)},
        {"act": jax.nn.relu, "name": "mlp", "rate": 0.5},
        {"a": {}, "e": None},
        eqx.filter(mlp(), lambda x: False),
    ],
    ids=[
        "dict",
        "tuple",
        "None",
        "integers",
        "static leaves",
        "None in it",
        "filtered",
    ],
)
def test_no_array_at_all_raises(tree):
    tx = optax.adam(0.1)
    for made in (ta.adapt(tx), ta.freeze(tx, []), ta.partition({"a": tx}, {"**": "a"})):
        with pytest.raises(ta.NoArraysError, match="nothing would train"):
            made.init(tree)


def test_a_group_or_a_mask_may_be_empty():
    inner = ta.adapt(optax.adam(0.1))
    params = {"w": jnp.ones(2)}
    tx = ta.partition({"a": inner, "b": optax.sgd(0.1)}, lambda p: {"w": "b"})
    tx.update(params, tx.init(params), params)
    tx = optax.masked(inner, {"w": False})
    tx.update(params, tx.init(params), params)


def test_updates_that_do_not_fit_are_named():
    tx = ta.adapt(optax.sgd(0.1))
    params = {"a": jnp.ones(2), "b": jnp.arange(2)}
    state = tx.init(params)
    with pytest.raises(ta.TransformError, match=r"not gradients of these"):
        tx.update({"c": jnp.ones(2)}, state, params)
    with pytest.raises(ta.TransformError, match=r"'a'.*float.*jnp\.asarray"):
        tx.update({"a": jnp.ones(())}, state, {"a": 0.5, "w": jnp.ones(2)})
    params = optax.LookaheadParams({"a": jnp.ones(2)}, {"b": jnp.ones(2)})
    with pytest.raises(ta.TransformError, match="'a' of the params"):
        tx.update({"a": jnp.ones(2)}, state, params)


def test_a_number_that_never_trains_gets_no_update():
    params = {"w": jnp.ones(2), "rate": 1.0, "steps": 3, "on": True, "z": 1j}
    grads = params | {"w": jnp.ones(2)}  # such as the model itself instead of zeros
    tx = ta.adapt(optax.sgd(0.1))
    for given in (params, None):
        updates, _ = tx.update(grads, tx.init(params), given)
        rest = {name: updates[name] for name in updates if name != "w"}
        assert rest == {"rate": 0.0, "steps": 0, "on": False, "z": 0j}
        new = ta.apply_updates(params, updates)
        assert all(new[name] is params[name] for name in rest)


@pytest.mark.parametrize("grad", [0.5, 2, np.int32(2)], ids=repr)
@pytest.mark.parametrize("make", [optax.sgd, optax.adam])
def test_a_gradient_may_be_a_number_where_the_param_is_an_array(make, grad):
    params, grads = {"a": {"w": jnp.float32(1)}}, {"a": {"w": grad}}
    flat, flat_grads = {"a/w": jnp.float32(1)}, {"a/w": grad}
    tx = make(0.1)
    expected, _ = tx.update(flat_grads, tx.init(flat), flat)
    for made in (
        ta.adapt(tx),
        ta.partition({"t": tx}, {"**": "t"}),
        ta.freeze(tx, []),
    ):
        updates, _ = made.update(grads, made.init(params), params)
        assert float(updates["a"]["w"]) == float(expected["a/w"]) != 0


@pytest.mark.parametrize("thing", [optax.adam, None, "adam", ta.glob("**")])
def test_other_objects_are_refused_as_transformations(thing):
    makes = (
        lambda: ta.adapt(thing),
        lambda: ta.freeze(thing, "a"),
        lambda: ta.partition({"a": thing}, {"**": "a"}),
    )
    for make in makes:
        with pytest.raises(ta.TransformError, match=r"lacks init/update|call it"):
            make()


def test_equal_trees_are_traced_once_and_nothing_is_added_to_the_program():
    tx, model = ta.adapt(optax.adamw(0.1)), two_layers(ModelTuple, LayerTuple)
    traces = []

    @jax.jit
    def step(grads, state, params):
        traces.append(1)
        return tx.update(grads, state, params)

    state = tx.init(model)
    for _ in range(3):
        _, state = step(model, state, model)
    assert len(traces) == 1
    assert cast_back(state, state)[0].count == 3


@pytest.mark.slow
def test_buffers_may_be_donated_and_keep_their_sharding():
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    params = LayerTuple(*jax.device_put((jnp.ones(8), jnp.ones((8, 2))), sharding))
    tx = ta.adapt(optax.adam(0.1))
    state = tx.init(params)
    assert {x.sharding for x in jax.tree.leaves(state[0].mu)} == {sharding}
    step = jax.jit(tx.update, donate_argnums=(0, 1))
    updates, new = step(jax.tree.map(jnp.copy, params), state, params)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x in updates)
    assert new[0].count == 1


@pytest.mark.hazard("D16")
@pytest.mark.usefixtures("small_heap")
def test_no_transformation_keeps_the_params_alive():
    said = ta.lift(lambda tree: jax.tree.map(lambda _: True, tree))
    bound = []

    def step(tx):
        params = {"a": jnp.ones(3), "b": LayerTuple(w(), b())}
        state = tx.init(params)
        tx.update(params, state, params)
        bound.append((ta.glob("a").bind(params), ta.Rules({"**": "t"}).bind(params)))
        return [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]

    for tx in (
        ta.adapt(optax.sgd(0.1, momentum=0.9)),
        ta.adapt(optax.masked(optax.sgd(0.1), said)),
        ta.partition({"t": optax.sgd(0.1)}, {"a": "frozen", "**": "t"}),
        ta.freeze(optax.sgd(0.1), "a"),
    ):
        kept = step(tx)
        gc.collect()
        assert [leaf() for leaf in kept] == [None, None, None]


@pytest.mark.slow
def test_it_maps_over_an_ensemble():
    tx = ta.adapt(optax.adam(0.1))
    models = jax.tree.map(lambda x: jnp.stack([x, x * 2]), {"l": (w(), b(1))})
    state = jax.vmap(tx.init)(models)
    updates, _ = jax.vmap(tx.update)(models, state, models)
    first = jax.tree.map(lambda x: x[1], models)
    want, _ = tx.update(first, tx.init(first), first)
    np.testing.assert_allclose(updates["l"][0][1], want["l"][0], rtol=1e-6)


# Without params


class Net(nnx.Module):
    """Layers of two classes; one dtype of two."""

    def __init__(self):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
        self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
        self.layers = nnx.List(
            [nnx.LayerNorm(2, rngs=nnx.Rngs(1)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))]
        )


MORE_THAN_PATHS = {
    "class": nnx.LayerNorm,
    "class name": "**/<LayerNorm>",
    "from the end": "layers/{-1}",
    "dtype": ta.leaf(dtype=jnp.bfloat16),
    "shape": ta.leaf(ndim=1) & ~ta.glob("linear"),
}
FREEZERS = {
    "freeze": lambda where: ta.freeze(optax.sgd(0.1), where),
    "partition": lambda where: ta.partition(
        {"a": optax.sgd(0.1)}, [(where, "frozen"), ("**", "a")]
    ),
    "scale_by_rules": lambda where: ta.scale_by_rules([(where, 0.0), ("**", 1.0)]),
    "masked": lambda where: ta.adapt(optax.freeze(ta.glob("**") & where)),
    "in a chain": lambda where: ta.adapt(
        optax.chain(optax.identity(), ta.freeze(optax.sgd(0.1), where))
    ),
    "bound": lambda where: ta.adapt(optax.freeze((ta.glob("**") & where).bind(Net()))),
}


@pytest.mark.hazard("F31")
@pytest.mark.parametrize("freezer", FREEZERS)
@pytest.mark.parametrize("where", some(MORE_THAN_PATHS))
@pytest.mark.parametrize("asked", ["with params", "without"])
def test_gradients_alone_never_move_a_frozen_leaf(freezer, where, asked):
    model = Net()
    grads = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, jnp.float32), nnx.state(model, nnx.Param)
    )
    where = MORE_THAN_PATHS[where]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnliftedMaskWarning)
        tx = FREEZERS[freezer](where)
        state = tx.init(model)
    if asked == "without" and freezer != "bound":
        with pytest.raises(ta.TransformError, match=r"update\(updates, state, params"):
            tx.update(grads, state)
        return
    updates, _ = tx.update(grads, state, *[model] * (asked == "with params"))
    frozen = ta.to_flat_dict(ta.param_mask(model, where))
    moved = ta.to_flat_dict(updates)
    for path, is_frozen in frozen.items():
        assert bool(moved[path].any()) is not is_frozen


def test_decisions_by_path_alone_need_no_params():
    model = {"a": jnp.ones(2), "b": [jnp.ones(2), jnp.ones(2)]}
    spec = ta.FreezeSpec("b").bind(model)
    tree = ta.lift({"a": False, "b": True})
    function = ta.lift(lambda tree: {"a": False, "b": [True, True]})
    for where in ("b", ["**", "!a"], ta.glob("b").bind(model), spec, tree, function):
        frozen = ta.freeze if isinstance(where, str | list | ta.FreezeSpec) else None
        tx = (
            ta.adapt(optax.chain(optax.sgd(0.1), optax.freeze(where)))
            if frozen is None
            else frozen(optax.sgd(0.1), where)
        )
        updates, _ = tx.update(model, tx.init(model))
        assert not updates["b"][0].any()
        assert updates["a"].all()
    rules = ta.Rules({"b/{0..1}": "frozen", "**": "a"})
    for made in (rules, rules.bind(model)):
        tx = ta.partition({"a": optax.sgd(0.1)}, made)
        updates, _ = tx.update(model, tx.init(model))
        assert not updates["b"][0].any()


def test_a_function_does_not_see_gradients_of_other_classes():
    model = Net()
    labels = ta.lift(lambda net: {"linear": "a", "layers": "a", "norm": "frozen"})
    tx = ta.partition({"a": optax.sgd(0.1)}, lambda net: labels.asked(net))
    grads = nnx.state(model, nnx.Param)
    state = tx.init(model)
    with pytest.raises(ta.TransformError, match=r"update\(updates, state, params"):
        tx.update(grads, state)
    assert tx.update(grads, state, model)


# Optimizers inside callbacks

INNER = {
    "freeze": lambda: ta.freeze(optax.sgd(1.0), ta.leaf(ndim=2)),
    "partition": lambda: ta.partition(
        {"a": optax.sgd(1.0)}, [(ta.leaf(ndim=2), "frozen"), ("**", "a")]
    ),
    "mask": lambda: ta.adapt(
        optax.chain(optax.sgd(1.0), optax.freeze(ta.leaf(ndim=2)))
    ),
    "no adapter": lambda: optax.chain(optax.sgd(1.0), optax.freeze(ta.leaf(ndim=2))),
    "lifted": lambda: ta.partition(
        {"a": optax.sgd(1.0)},
        lambda p: jax.tree.map(lambda x: "a" if x.ndim == 1 else "frozen", p),
    ),
}
OUTER = {
    "adapt": lambda tx: ta.adapt(tx),
    "partition": lambda tx: ta.partition({"o": tx}, {"**": "o"}),
    "freeze": lambda tx: ta.freeze(tx, "b"),
}
PAIRS = [*((inner, "adapt") for inner in INNER), *(("freeze", by) for by in OUTER)]


@pytest.mark.hazard("F32")
@pytest.mark.parametrize(("inner", "outer"), dict.fromkeys(PAIRS))
def test_an_optimizer_inside_a_callback_decides_on_its_own_tree(inner, outer):
    # The same paths with swapped shapes: here ``b`` is the matrix.
    tx, seen = INNER[inner](), []
    own = {"a": jnp.ones(2), "b": jnp.ones((2, 2))}

    @jax.jit
    def step(params):
        return tx.update(params, tx.init(params), params)[0]["a"]

    def value_fn(params):
        with jax.ensure_compile_time_eval():
            seen.append(step(own).tolist())
        return sum(jnp.sum(leaf**2) for leaf in params.values())

    line = optax.scale_by_backtracking_linesearch(2)
    search = OUTER[outer](optax.chain(optax.sgd(0.1), line))
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
    extra = {"value": jnp.float32(6.0), "grad": params, "value_fn": value_fn}
    search.update(params, search.init(params), params, **extra)
    assert seen[0] == [-1.0, -1.0]
    assert step(own).tolist() == [-1.0, -1.0]  # as compiled inside the callback
