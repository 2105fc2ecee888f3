"""Hyperparameters: Optax's semantics, and no mask is ever taken for a schedule."""

from __future__ import annotations

import functools
import inspect
import re
import types
import warnings
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Optional, Union

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import treeadapt as ta
from treeadapt import inject_hyperparams, schedule, tree_get

if TYPE_CHECKING:
    from nowhere import ScalarOrSchedule

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"bias": jnp.full(3, 2.0), "kernel": jnp.full((2, 3), 2.0)}
ZERO = jax.tree.map(jnp.zeros_like, PARAMS)


def signature_of(make):
    try:
        return inspect.signature(make, eval_str=True)
    except (NameError, AttributeError, TypeError):
        return inspect.signature(make)


def is_injected(parameter, value):
    """Whether a factory with one parameter gets its argument from Optax, each step."""
    keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    def make(**_):
        raise AssertionError("not called before init")

    make.__signature__ = inspect.Signature([keyword])
    injected = []

    def inject(inner, **options):
        return lambda **hyperparams: injected.append({*hyperparams})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optax, "inject_hyperparams", inject)
        inject_hyperparams(make)(**{parameter.name: value})
    (names,) = injected
    assert names <= {parameter.name}
    return bool(names)


def shipped():
    """Every function of Optax that returns a transformation, with its signature."""
    for module in (optax, optax.contrib):
        for name, make in sorted(vars(module).items()):
            if name.startswith("_") or "inject" in name or not inspect.isfunction(make):
                continue
            signature = signature_of(make)
            if "GradientTransformation" in str(signature.return_annotation):
                yield pytest.param(make, signature, id=f"{module.__name__}.{name}")


def a_schedule(count):
    return 0.1


#: Parameters of Optax's own functions for which a callable is not a schedule.
OTHER = {
    *("mask", "freeze_mask", "trust_ratio_mask", "weight_decay_mask", "param_labels"),
    *("clip_value_fn", "hessian_diagonal_fn", "should_transform_fn", "step_size_fn"),
    *("accumulator_dtype", "dtype_momentum", "mu_dtype", "param_dtype", "state_dtype"),
    *("adapt_lower_bound", "adaptive", "bias_correction", "bias_correction_mu"),
    *("bias_correction_nu", "centered", "debias", "eps_in_sqrt", "factored"),
    *("flip_sign", "forward_extra_args", "mask_compatible_extra_args", "nesterov"),
    *("multiply_by_parameter_scale", "opaque_mode", "reset_state", "store_grad"),
    *("safeguard_warmup", "scale_init_precond", "use_clipping", "verbose"),
    *("adv_optimizer", "base_optimizer", "fast_optimizer", "inner", "linesearch"),
    *("optimizer", "transforms", "tx", "args"),
    *("axis", "batch_axis_name", "betas", "f", "initial_guess_strategy", "measure"),
    *("measure_name", "mode", "muon_weight_dimension_numbers", "ns_coeffs"),
    *("preconditioning", "variant", "weight_dimension_numbers"),
}


@pytest.mark.parametrize(("make", "signature"), [*shipped()])
def test_the_sweep_over_every_parameter_of_optax(make, signature):
    for name, parameter in signature.parameters.items():
        assert is_injected(parameter, a_schedule) == (name not in OTHER), name
        assert not is_injected(parameter, ta.glob("**")), name
        assert not is_injected(parameter, ta.Rules({"**": 1})), name
        assert not is_injected(parameter, ta.lift({"kernel": True})), name
        assert is_injected(parameter, schedule(a_schedule)), name
        for value in (True, np.True_, jnp.array([True]), None, (0.1, 0.2)):
            assert not is_injected(parameter, value), name
        if re.search("(^|_)mask$", name):
            with pytest.raises(ta.TransformError, match="is not a mask"):
                is_injected(parameter, "text")
        else:
            assert not is_injected(parameter, "text"), name


@pytest.mark.parametrize(("make", "signature"), [*shipped()])
def test_learning_rates_are_scheduled_and_masks_never(make, signature):
    for name, parameter in signature.parameters.items():
        if "learning_rate" in name or "weight_decay" in name.removesuffix("_mask"):
            assert is_injected(parameter, a_schedule) == ("mask" not in name)
        if any(word in name for word in ("mask", "labels", "_fn", "dtype")):
            assert not is_injected(parameter, a_schedule)


def extra():
    def loss(params):
        return sum(jnp.sum(leaf**2) for leaf in params.values())

    return {"value": 1.0, "grad": PARAMS, "value_fn": loss, "obj_fn": loss}


def steps(tx, count=2):
    """State and params after some compiled steps."""
    tx = optax.with_extra_args_support(tx)
    given = extra()

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda x: 0.5 * x, params)
        updates, state = tx.update(grads, state, params, **given)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, jax.jit(tx.init)(PARAMS)
    for _ in range(count):
        params, state = step(params, state)
    return params, state


def assert_equal(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def rates():
    for name, make in vars(optax).items():
        known = inspect.isfunction(make) and not name.startswith("_")
        names = list(inspect.signature(make).parameters) if known else []
        if names[:1] == ["learning_rate"] and name not in (
            "lbfgs",
            "adafactor",
            "noisy_sgd",
        ):
            yield name, make


RATES = dict(rates())


@pytest.mark.slow
@pytest.mark.parametrize("name", RATES)
def test_numbers_and_states_are_those_of_optax(name):
    rate = optax.linear_schedule(0.1, 0.0, 10)
    with warnings.catch_warnings(action="ignore"):  # some are deprecated
        want = steps(optax.inject_hyperparams(RATES[name])(learning_rate=rate))
        got = steps(inject_hyperparams(RATES[name])(learning_rate=rate))
    assert isinstance(got[1], optax.schedules.InjectStatefulHyperparamsState)
    assert_equal(got, want)


def test_enough_optimizers_are_compared():
    assert len(RATES) > 20


# The traps


def decays(tx):
    """Names of the leaves that decay moves."""
    updates, _ = tx.update(ZERO, tx.init(PARAMS), PARAMS)
    return {name for name, update in updates.items() if (update != 0).any()}


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


class Net(eqx.Module):
    bias: Any
    kernel: Any

    def __call__(self, x):
        return self.kernel @ x + self.bias


@pytest.mark.slow
def test_optax_itself_turns_weight_decay_off():
    # If Optax changes this, the whole of this room may go.
    tx = optax.inject_hyperparams(optax.adamw)(0.1, weight_decay=0.5, mask=matrices)
    assert decays(tx) == set()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (optax.adamw, "mask"),
        (optax.lion, "mask"),
        (optax.lamb, "mask"),
        (optax.adamaxw, "mask"),
        (optax.nadamw, "mask"),
        (optax.adan, "mask"),
        (optax.add_decayed_weights, "mask"),
        (optax.adadelta, "weight_decay_mask"),
        (optax.contrib.muon, "weight_decay_mask"),
        (functools.partial(optax.adamw, 0.1), "mask"),
    ],
)
@pytest.mark.parametrize(
    "mask",
    [
        matrices,
        ta.glob("kernel"),
        ta.leaf(ndim=2),
        ta.lift(matrices),
        functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1),
        {"bias": False, "kernel": True},
    ],
    ids=["function", "glob", "leaf", "lift", "partial", "dict"],
)
def test_masks_decide_what_decays(make, name, mask):
    given = {name: mask, "weight_decay": 0.5}
    if "learning_rate" in inspect.signature(make).parameters:
        given["learning_rate"] = 0.1
    tx = inject_hyperparams(make)(**given)
    assert decays(tx) == {"kernel"}
    state = tx.init(PARAMS)
    assert name not in state.hyperparams
    assert tree_get(state, "hyperparams.weight_decay") == 0.5


@pytest.mark.parametrize("make", [optax.adamw, optax.lion, optax.lamb])
def test_a_mask_may_be_a_callable_module(make):
    params = Net(**PARAMS)
    mask = Net(bias=False, kernel=True)
    tx = inject_hyperparams(make)(0.1, weight_decay=0.5, mask=mask)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zero, tx.init(params), params)
    assert (updates.bias == 0).all()
    assert (updates.kernel != 0).all()
    hidden = inject_hyperparams(functools.partial(make, mask=mask))
    again, _ = (tx := hidden(0.1, weight_decay=0.5)).update(
        zero, tx.init(params), params
    )
    assert (again.kernel == updates.kernel).all()


def test_a_raw_model_trains_inside_adapt():
    model = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    make = inject_hyperparams(optax.adamw)
    tx = ta.adapt(make(a_schedule, weight_decay=0.5, mask=ta.glob("**/weight")))
    state = tx.init(model)
    grads = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    updates, state = eqx.filter_jit(tx.update)(grads, state, model)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)
    assert (updates.layers[0].bias == 0).all()
    assert (updates.layers[0].weight != 0).all()
    assert tree_get(state, "learning_rate") == jnp.float32(0.1)


def test_a_class_selector_looks_through_to_the_callers_tree():
    model = {
        "norm": eqx.nn.LayerNorm(2),
        "out": eqx.nn.Linear(2, 2, key=jax.random.key(0)),
    }
    mask = ~ta.node(eqx.nn.LayerNorm)
    tx = ta.adapt(inject_hyperparams(optax.adamw)(0.1, weight_decay=0.5, mask=mask))
    grads = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    updates, _ = tx.update(grads, tx.init(model), model)
    assert (updates["norm"].weight == 0).all()
    assert (updates["out"].weight != 0).all()


def test_labels_of_a_factory_of_ones_own_may_be_a_callable_module():
    def make(lr, labels):
        txs = {"fast": optax.sgd(lr), "slow": optax.sgd(0.1 * lr)}
        return optax.multi_transform(txs, lambda _: labels)

    params = Net(**PARAMS)
    tx = inject_hyperparams(make)(a_schedule, labels=Net(bias="fast", kernel="slow"))
    updates, state = tx.update(params, tx.init(params), params)
    assert updates.bias[0] == jnp.float32(-0.2)
    assert updates.kernel[0, 0] == jnp.float32(0.1 * jnp.float32(0.1) * -2)
    assert set(state.hyperparams) == {"lr"}


def test_rules_are_labels():
    def make(lr, labels):
        return optax.multi_transform({"a": optax.sgd(lr), "b": optax.sgd(0.0)}, labels)

    tx = inject_hyperparams(make)(1.0, ta.Rules({"kernel": "a", "**": "b"}))
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert (updates["bias"] == 0).all()
    assert (updates["kernel"] == -2).all()


def test_bound_rules_are_not_taken_for_a_schedule():
    def make(lr, groups):
        return optax.multi_transform({"a": optax.sgd(lr), "b": optax.sgd(0.0)}, groups)

    rules = ta.Rules({"kernel": "a", "**": "b"}).bind(PARAMS)
    tx = inject_hyperparams(make)(1.0, rules)
    state = tx.init(PARAMS)
    assert set(state.hyperparams) == {"lr"}
    updates, _ = tx.update(PARAMS, state, PARAMS)
    assert (updates["bias"] == 0).all()


@pytest.mark.slow
def test_adafactor_compiles_without_static_args():
    params, state = steps(inject_hyperparams(optax.adafactor)(0.1))
    want, _ = steps(optax.adafactor(0.1))
    assert_equal(params, want)
    assert "min_dim_size_to_factor" not in state.hyperparams


@pytest.mark.slow
def test_lbfgs_and_its_line_search_compile():
    tx = inject_hyperparams(optax.lbfgs)(0.5, memory_size=3)
    state = jax.jit(tx.init)(PARAMS)

    def loss(params):
        return sum(jnp.sum(leaf**2) for leaf in params.values())

    value, grads = jax.value_and_grad(loss)(PARAMS)
    updates, state = jax.jit(functools.partial(tx.update, value_fn=loss))(
        grads, state, PARAMS, value=value, grad=grads
    )
    assert loss(optax.apply_updates(PARAMS, updates)) < value
    assert set(state.hyperparams) == {"learning_rate"}


def test_dtypes_and_flags_reach_the_factory():
    make = inject_hyperparams(optax.adam)
    tx = make(0.1, mu_dtype=jnp.bfloat16, nesterov=True, eps_root=0)
    state = jax.jit(tx.init)(PARAMS)
    assert state.inner_state[0].mu["bias"].dtype == jnp.bfloat16
    assert "nesterov" not in state.hyperparams


# Schedules and numbers


def test_numbers_may_be_overwritten_and_schedules_go_on():
    make = inject_hyperparams(optax.sgd)
    tx = make(0.5, momentum=optax.linear_schedule(0.0, 1.0, 10))
    state = tx.init(PARAMS)
    for count in range(3):
        _, state = tx.update(PARAMS, state, PARAMS)
        assert state.hyperparams["momentum"] == pytest.approx(count / 10)
    state.hyperparams["learning_rate"] = 0.25
    state.hyperparams["momentum"] = 0.75  # scheduled: no effect
    _, state = tx.update(ZERO, state, PARAMS)
    assert state.hyperparams["learning_rate"] == 0.25
    assert state.hyperparams["momentum"] == pytest.approx(0.3)
    assert state.count == 4


def test_hyperparams_take_the_dtype_of_the_params_or_the_one_given():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = inject_hyperparams(optax.sgd)(0.1)
    assert tx.init(params).hyperparams["learning_rate"].dtype == jnp.bfloat16
    tx = inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.float32)(0.1)
    assert tx.init(params).hyperparams["learning_rate"].dtype == jnp.float32


@pytest.mark.slow
def test_hyperparams_of_complex_params_are_real():
    params = {"w": jnp.ones(2), "z": jnp.ones(2, jnp.complex64)}
    for tx in (
        inject_hyperparams(optax.adamw)(0.1),
        ta.adapt(inject_hyperparams(optax.adamw)(lambda count: 0.1 * 0.5**count)),
    ):
        state = tx.init(params)
        updates, new = tx.update(params, state, params)
        assert updates["w"].dtype == jnp.float32
        assert updates["z"].dtype == jnp.complex64
        assert {x.dtype for x in new.hyperparams.values()} == {jnp.dtype("float32")}
        dtypes = [jax.tree.map(lambda x: x.dtype, s) for s in (state, new)]
        assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("mask", ["kernel", ["kernel", "bias"]])
@pytest.mark.parametrize(
    "make",
    [
        lambda mask: inject_hyperparams(optax.adamw)(0.1, mask=mask),
        lambda mask: ta.adapt(optax.adamw(0.1, mask=mask)),
        lambda mask: ta.freeze(optax.masked(optax.sgd(0.1), mask), "bias"),
        lambda mask: ta.partition({"a": optax.adamw(0.1, mask=mask)}, {"**": "a"}),
        lambda mask: ta.per_layer(optax.adamw(0.1, mask=mask), {"b": 0}),
        lambda mask: ta.adapt(optax.MultiSteps(optax.adamw(0.1, mask=mask), 2)),
    ],
)
def test_a_text_is_no_mask(make, mask):
    with pytest.raises(ta.TransformError, match=r"Write mask=.*glob\('kernel'\)"):
        make(mask)


def test_a_text_may_be_a_label():
    groups = {"a": optax.sgd(0.1)}
    for labels in ("a", {"mask": "a"}):
        tx = ta.adapt(optax.multi_transform(groups, labels))
        params = {"mask": jnp.ones(2)}
        assert tx.update(params, tx.init(params))[0]["mask"] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), jnp.array(0.5), 0.5]
)
def test_every_kind_of_numberis_injected(number):
    tx = inject_hyperparams(optax.sgd)(number)
    rate = tx.init(PARAMS).hyperparams["learning_rate"]
    assert (rate, rate.dtype) == (0.5, jnp.float32)


class Growing:
    """A stateful schedule, as Optax defines them."""

    def init(self):
        return jnp.array(1.0)

    def update(self, state, **extra):
        return state * extra["factor"]

    def __call__(self, state, **extra):
        return state


@pytest.mark.parametrize("wrap", [lambda x: x, schedule])
def test_stateful_schedules_keep_their_state(wrap):
    tx = inject_hyperparams(optax.sgd)(wrap(Growing()))
    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = tx.update(PARAMS, state, PARAMS, factor=2.0)
    assert state.hyperparams_states["learning_rate"] == 8
    assert state.hyperparams["learning_rate"] == 4


def test_schedules_may_be_modules_where_a_number_is_wanted():
    class Decay(eqx.Module):
        rate: jax.Array

        def __call__(self, count):
            return self.rate / (count + 1)

    tx = inject_hyperparams(optax.sgd)(Decay(jnp.array(0.5)))
    assert tx.init(PARAMS).hyperparams["learning_rate"] == 0.5


def test_the_factory_gets_its_arguments_as_they_were_given():
    seen = []

    def make(a, /, lr, *rest, scale=1.0, **more):
        seen.append((a, rest, more["flag"], more["mask"]))
        return optax.sgd(lr * scale * more["factor"] * a)

    given = {"flag": True, "factor": a_schedule, "mask": matrices}
    tx = inject_hyperparams(make)(3, 2.0, "x", matrices, **given)
    updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert updates["bias"][0] == pytest.approx(-3 * 2.0 * 0.1 * 2)
    assert set(state.hyperparams) == {"a", "lr", "scale", "factor"}
    assert seen[0][1:] == (("x", matrices), True, matrices)


def test_static_args_and_schedule_settle_the_rest():
    made = []

    def make(one, two, my_mask):
        made.append((one, two, my_mask))
        return optax.identity()

    factory = inject_hyperparams(make, static_args=("one",))
    state = factory(a_schedule, a_schedule, schedule(a_schedule)).init(PARAMS)
    assert set(state.hyperparams) == {"two", "my_mask"}
    assert made[0][0] is a_schedule
    state = inject_hyperparams(make, static_args="two")(0.5, 0.5, 0.5).init(PARAMS)
    assert set(state.hyperparams) == {"one", "my_mask"}


def test_a_keyword_may_have_the_name_of_a_positional_parameter():
    def stars(rate, *more, **named):
        return optax.sgd(rate * named["more"] + sum(more))

    def only(rate, /, **named):
        return optax.sgd(rate * named["rate"])

    for make, args, name in ((stars, (3.0, 1.0), "more"), (only, (3.0,), "rate")):
        tx = ta.inject_hyperparams(make)(*args, **{name: 2.0})
        state = tx.init(PARAMS)
        assert state.hyperparams[name] == 2.0
        known = make(*args, **{name: 2.0})
        updates, _ = tx.update(PARAMS, state, PARAMS)
        expected, _ = known.update(PARAMS, known.init(PARAMS))
        for path, update in updates.items():
            assert np.array_equal(update, expected[path])


def test_static_args_must_be_parameters():
    with pytest.raises(ta.TransformError, match=r"'msk'.*'learning_rate'"):
        inject_hyperparams(optax.adamw, static_args=["msk"])
    inject_hyperparams(lambda **more: optax.identity(), static_args=["msk"])


def test_schedule_wants_a_callable_and_does_what_it_does():
    assert schedule(lambda count: count + 1)(2) == 3
    with pytest.raises(ta.TransformError, match=r"got 0\.1"):
        schedule(0.1)


def test_a_schedule_that_gives_no_number_is_named():
    def make(rate, decay_on):
        return optax.sgd(rate)

    factory = inject_hyperparams(make)
    for fn in (matrices, lambda count: count > 3, lambda count: {"a": 1.0}):
        with pytest.raises(ta.TransformError, match=r"'decay_on'.*static_args"):
            factory(0.1, fn).init(PARAMS)
    with pytest.raises(AttributeError) as info:
        factory(0.1, lambda params: params.kernel).init(PARAMS)
    assert "'decay_on'" in info.value.__notes__[0]


def test_the_factory_keeps_its_name_and_signature():
    make = inject_hyperparams(optax.adamw)
    assert make.__name__ == "adamw"
    assert inspect.signature(make) == inspect.signature(optax.adamw)
    with pytest.raises(TypeError, match="learning_rate"):
        make(weight_decay=0.1)


# What annotations say


class Schedules(NamedTuple):
    """A callable that JAX sees as a tree."""

    rate: float

    def __call__(self, count):
        return self.rate


def annotated(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty):
    return inspect.Parameter(
        "thing",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=annotation,
        default=default,
    )


@pytest.mark.parametrize(
    ("annotation", "default", "is_schedule"),
    [
        (inspect.Parameter.empty, inspect.Parameter.empty, True),
        (Any, inspect.Parameter.empty, True),
        (inspect.Parameter.empty, 1, True),
        (inspect.Parameter.empty, 0.5, True),
        (Any, np.float32(0.5), True),
        (inspect.Parameter.empty, None, False),
        (inspect.Parameter.empty, True, False),
        (float, inspect.Parameter.empty, True),
        (float | None, None, True),
        (Optional[float], None, True),  # noqa: UP045
        (Union[float, jax.Array], None, True),  # noqa: UP007
        (Annotated[float, "rate"], None, True),
        (jax.Array, None, True),
        (jax.typing.ArrayLike, None, True),
        (optax.ScalarOrSchedule, None, True),
        (Optional[optax.ScalarOrSchedule], None, True),  # noqa: UP045
        (bool, True, False),
        (bool | float, True, True),
        (str, inspect.Parameter.empty, False),
        (optax.Schedule, inspect.Parameter.empty, False),
        (optax.Params, None, False),
        (Any | types.FunctionType, None, False),
        (optax.GradientTransformation, None, False),
        (tuple[float, float], None, False),
        (Annotated[Any, [1]], None, False),
    ],
)
def test_what_the_parameter_says(annotation, default, is_schedule):
    assert is_injected(annotated(annotation, default), a_schedule) == is_schedule


def test_where_nothing_is_said_modules_and_classes_are_no_schedules():
    silent = annotated()
    module = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    for value in (module, Schedules(0.1), jnp.bfloat16, dict):
        assert not is_injected(silent, value)
        assert is_injected(silent, schedule(value))
    for value in (functools.partial(a_schedule), jax.tree_util.Partial(a_schedule)):
        assert is_injected(silent, value)


@pytest.mark.parametrize(
    ("annotation", "value", "is_number"),
    [
        (int, 3, False),
        (int, np.int32(3), False),
        (int | None, 3, False),
        (int, jnp.array(3), True),
        (float, 3, True),
        (int | float, 3, True),
        (jax.typing.ArrayLike, 3, True),
        (inspect.Parameter.empty, 3, True),
    ],
)
def test_an_integer_where_only_an_integer_will_do_is_a_size(
    annotation, value, is_number
):
    assert is_injected(annotated(annotation), value) == is_number


def test_a_name_for_type_checkers_alone_counts_as_no_annotation():
    def make(lr: ScalarOrSchedule, mask: Any | None = None, size: int = 2):
        assert isinstance(size, int)
        return optax.adamw(lr, mask=mask)

    tx = inject_hyperparams(make)(a_schedule, mask=matrices)
    assert set(jax.jit(tx.init)(PARAMS).hyperparams) == {"lr"}
    assert decays(tx) == {"kernel"}

    def unread(lr: optax.no_such_name, size: int = 2):
        return optax.scale(lr * size)

    assert set(inject_hyperparams(unread)(0.1).init(PARAMS).hyperparams) == {
        "lr",
        "size",
    }
