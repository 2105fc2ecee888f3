"""Fields of a state by name: Optax's answers, and never a parameter's."""

from __future__ import annotations

import fractions
import functools
import inspect
import warnings
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import chex
import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optax.tree_utils import tree_get_all_with_path
from trees import mlp

import treeadapt as ta
from treeadapt import apply_updates, schedule_free_eval_params, tree_get, tree_set
from treeadapt.state.fields import _search
from treeadapt.transforms.optax_fields import STATE_FIELDS, is_state_class

ADAM = optax.adam(0.1)
GIVEN = {
    "inner": ADAM,
    "tx": ADAM,
    "optimizer": ADAM,
    "base_optimizer": ADAM,
    "adv_optimizer": optax.sgd(0.1),
    "inner_factory": optax.adam,
    "mask": lambda tree: jax.tree.map(lambda _: True, tree),
    "freeze_mask": True,
    "transforms": {"a": ADAM},
    "param_labels": "a",
    "measure_name": "norm",
    "measure": optax.tree.norm,
    "step_size_fn": lambda count: 0.1,
    "should_transform_fn": lambda step, **_: True,
    "f": lambda updates, params: updates,
    "l2_norm_clip": 1.0,
    "max_consecutive_errors": 3,
    "max_backtracking_steps": 5,
    "max_linesearch_steps": 5,
    "key": None,
    "seed": 0,
}

ODD = ("lookahead", "chain", "named_chain")  # pairs of params; nothing to chain


def shipped():
    """Every transformation that Optax makes from numbers and other transformations."""
    for module in (optax, optax.contrib):
        for name, make in sorted(vars(module).items()):
            if name.startswith("_") or "inject" in name or name in ODD:
                continue
            if not inspect.isfunction(make):
                continue
            signature = inspect.signature(make)
            if "GradientTransformation" not in str(signature.return_annotation):
                continue
            needed = [
                p.name
                for p in signature.parameters.values()
                if (p.default is p.empty and p.kind is not p.VAR_POSITIONAL)
                or p.name == "key"
            ]
            with warnings.catch_warnings(action="ignore"):  # some are deprecated
                yield name, make(**{arg: GIVEN.get(arg, 0.5) for arg in needed})


SHIPPED = dict(shipped())
WRAPPED = {
    "inject": optax.inject_hyperparams(optax.adamw)(0.1),
    "inject schedule": optax.inject_hyperparams(optax.sgd)(lambda count: 0.1),
    "multi steps": optax.MultiSteps(
        ADAM, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "monitor": optax.monitor({"size": optax.measure_with_ema(optax.tree.norm, 0.9)}),
    "named chain": optax.named_chain(("clip", optax.clip(1.0)), ("adam", ADAM)),
    "partition": optax.partition({"g": ADAM, "h": optax.sgd(0.1, 0.9)}, "g"),
    "deep": optax.chain(
        optax.masked(optax.named_chain(("a", optax.apply_if_finite(ADAM, 2))), True),
        optax.inject_hyperparams(optax.lbfgs, static_args=("memory_size",))(0.1),
    ),
}
EVERY = SHIPPED | WRAPPED


def places(state):
    """Exact paths of everything in a state that has a name, by name."""
    known = {str(part.names[0]) for part in _search(state, ()) if part.names}
    found = {name: [] for name in sorted(known)}
    for part in _search(state, found):
        for name in part.names:
            if name in found:
                found[name].append(part.exact_path())
    return found


def init(tx, params):
    with jax.numpy_dtype_promotion("standard"):
        return tx.init(params)


def arrays(names):
    return {name: jnp.ones((2, 2)) for name in names}


def state_names():
    """Every name that some state of Optax gives a field."""
    names = {}
    for tx in EVERY.values():
        names |= dict.fromkeys(places(init(tx, arrays("wb"))))
    return sorted(names)


NAMES = state_names()
FIELDS = [name for name in NAMES if name.isidentifier()]
Evil = namedtuple("Evil", FIELDS)
Harmless = namedtuple("Harmless", [f"w{i}" for i in range(len(Evil._fields))])


class Inner(NamedTuple):
    count: Any
    learning_rate: Any


class PPO(NamedTuple):
    policy: Any
    value: Any


every_transform = pytest.mark.parametrize("name", EVERY)


def test_the_names_are_those_of_optax():
    assert {"count", "mu", "nu", "value", "grad", "learning_rate", "z"} <= set(NAMES)
    assert len(EVERY) > 90


@pytest.fixture
def one_zero(monkeypatch):
    """One array of zeros for all leaves of a shape and dtype, as only names count."""
    make = jnp.zeros_like

    @functools.cache
    def made(shape, dtype):
        with jax.ensure_compile_time_eval():
            return jnp.zeros(shape, dtype)

    def zeros_like(leaf, dtype=None, **options):
        if options or isinstance(leaf, jax.core.Tracer):
            return make(leaf, dtype, **options)
        return made(leaf.shape, dtype or leaf.dtype)

    monkeypatch.setattr(jnp, "zeros_like", zeros_like)


EVIL, HARMLESS = arrays(NAMES), arrays(f"w{i}" for i in range(len(NAMES)))


def test_a_rate_that_is_not_in_the_state_leads_to_inject_hyperparams():
    state = ta.adapt(optax.adam(1.0)).init({"w": jnp.ones(2)})
    with pytest.raises(ta.TransformError, match="inject_hyperparams"):
        ta.tree_set(state, learning_rate=2.0)


@every_transform
@pytest.mark.usefixtures("one_zero")
def test_no_name_of_a_parameter_is_taken_for_one_of_the_state(name):
    assert places(init(EVERY[name], EVIL)) == places(init(EVERY[name], HARMLESS))


@every_transform
@pytest.mark.usefixtures("one_zero")
def test_nor_under_native_states_of_nested_and_named_tuples(name):
    tx = EVERY[name]
    leaves = [jnp.ones((2, 2))] * len(Evil._fields)
    for evil, harmless in (
        (Evil(*leaves), Harmless(*leaves)),
        ({"count": {"mu": [Inner(*leaves[:2])]}}, {"w": {"w": [leaves[0], leaves[1]]}}),
    ):
        assert places(init(tx, evil)) == places(init(tx, harmless))


@every_transform
def test_it_finds_what_optax_finds(name):
    state = init(EVERY[name], arrays(("a/b", "a/c")))
    for key, paths in places(state).items():
        want = [id(value) for _, value in tree_get_all_with_path(state, key)]
        got = [id(part.value) for part in _found(state, key)]
        if "schedule" in name and key == "learning_rate":
            want = want[:1]  # its schedule's state is under this key too
        assert sorted(got) == sorted(want), (key, paths)


PARAMS = {
    "policy": {"count": jnp.ones(2), "learning_rate": jnp.ones(1)},
    "value": {"grad": jnp.ones(2), "mu": jnp.ones(1)},
}


def two_groups(**rates):
    inject = optax.inject_hyperparams(optax.adamw)
    txs = {name: inject(rate) for name, rate in rates.items()}
    return ta.partition(txs, {name: name for name in rates})


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    return [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(
            jax.tree.leaves_with_path(one), jax.tree.leaves(two), strict=True
        )
        if not (a is b or (a == b).all())
    ]


def test_optax_itself_overwrites_a_parameter():
    # If Optax changes this, the cure may go.
    params = {"count": jnp.ones(())}
    state = optax.tree_utils.tree_set(optax.sgd(0.1, 0.9).init(params), count=7)
    assert state[0].trace["count"] == 7
    with pytest.raises(ta.TransformError, match="'count'"):
        tree_set(optax.sgd(0.1, 0.9).init(params), count=7)


def test_one_group_is_read_and_set():
    state = two_groups(policy=0.1, value=0.2).init(PARAMS)
    assert tree_get(state, "learning_rate", group="value") == jnp.float32(0.2)
    new = tree_set(state, group="policy", learning_rate=1e-4)
    (changed,) = same(state, new)
    assert changed == ".inner_states['policy'].hyperparams['learning_rate']"
    assert tree_get(new, "learning_rate", group="policy") == jnp.float32(1e-4)


def test_every_field_of_the_name_is_set():
    state = two_groups(policy=0.1, value=0.2).init(PARAMS)
    new = tree_set(state, learning_rate=0.5, count=3)
    assert len(same(state, new)) == 6
    assert tree_get(new, "ScaleByAdamState.count", group="policy") == 3


def test_a_class_tells_fields_of_one_name_apart():
    state = optax.inject_hyperparams(optax.adamw)(0.1, b1=0.5).init(PARAMS)
    new = tree_set(state, **{"ScaleByAdamState.count": 9, "hyperparams.b1": 0.25})
    assert same(state, new) == [".hyperparams['b1']", ".inner_state[0].count"]
    assert tree_get(new, "ScaleByAdamState") is new.inner_state[0]


@pytest.mark.hazard("F21")
def test_several_fields_are_an_error_that_names_them():
    state = two_groups(policy=0.1, value=0.2).init(PARAMS)
    with pytest.raises(ta.TransformError) as info:
        tree_get(state, "learning_rate")
    for group in ("policy", "value"):
        path = f"state.inner_states['{group}'].hyperparams['learning_rate']"
        assert path in str(info.value)
        assert eval(path, {"state": state}) is tree_get(
            state, "learning_rate", group=group
        )


def test_the_error_of_several_fields_says_how_to_name_one():
    rate = optax.inject_hyperparams(optax.adam)(0.1)
    state = ta.partition({"a": rate, "b": rate}, {"**/w": "a", "**": "b"}).init(
        {"x": {"w": jnp.ones(2), "b": jnp.ones(2)}}
    )
    with pytest.raises(ta.TransformError, match="are called 'count'") as info:
        tree_get(state, "count", group="b")
    text = str(info.value)
    assert "name its class too ('InjectStatefulHyperparamsState.count')" in text
    assert "state.inner_states['b']" in text


def test_nothing_found_is_an_error_with_the_nearest_name_or_the_default():
    state = optax.inject_hyperparams(optax.adam)(0.1).init(PARAMS)
    with pytest.raises(ta.TransformError, match=r"'learning_rates'.*'learning_rate'"):
        tree_get(state, "learning_rates")
    with pytest.raises(ta.TransformError, match="Parameters are not searched"):
        tree_set(state, policy=1)
    assert tree_get(state, "lr", None) is None
    assert tree_get((), "count", 5) == 5


def test_an_unknown_group_is_an_error_even_with_a_default():
    state = two_groups(policy=0.1, value=0.2).init(PARAMS)
    with pytest.raises(ta.TransformError, match=r"'polcy'.*'policy', 'value'"):
        tree_get(state, "count", None, group="polcy")
    with pytest.raises(ta.TransformError, match="there are no groups"):
        tree_set(optax.adam(0.1).init(PARAMS), count=1, group=0)


def test_groups_within_groups():
    inner = optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, "a")
    outer = optax.chain(optax.partition({0: inner, 1: optax.adam(0.2)}, 0))
    state = outer.init(jnp.ones(2))
    paths = [part.exact_path() for part in _found(state, "mu", group="a")]
    assert paths == [
        "state[0].inner_states[0].inner_state.inner_states['a'].inner_state[0].mu"
    ]
    assert len(_found(state, "mu", group=0)) == 1
    assert len(_found(state, "trace", group=0)) == 1


def test_a_group_is_that_of_the_outermost_partition():
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
    groups = {"adam": optax.adam(0.1), "muon": optax.contrib.muon(0.1)}
    state = ta.partition(groups, {"b": "adam", "**": "muon"}).init(params)
    assert list(tree_get(state, "mu", group="adam")) == ["b"]
    new = tree_set(state, group="adam", count=3)
    assert same(state, new) == [".inner_states['adam'][0].count"]
    both = (state.inner_states["muon"], state.inner_states["muon"])
    assert len(_found(both, "mu", group="muon")) == 2  # side by side


def _found(state, name, **group):
    return [part for part in _search(state, (name,), **group) if name in part.names]


def test_what_is_found_is_the_states_own_object():
    state = ta.adapt(optax.adam(0.1)).init(mlp())
    assert tree_get(state, "mu") is state[0].mu
    assert (
        tree_set(state, count=1)[0].nu["layers/0/bias"]
        is (state[0].nu["layers/0/bias"])
    )


def test_setting_nothing_anew_returns_the_state():
    state = ta.adapt(optax.adam(0.1)).init(mlp())
    assert tree_set(state) is state


def test_links_of_a_named_chain_are_names():
    tx = ta.adapt(optax.named_chain(("clip", optax.clip(1.0)), ("adam", ADAM)))
    state = tx.init(PARAMS)
    assert tree_get(state, "adam") is state["adam"]
    new = tree_set(state, count=4)
    assert type(new) is OrderedDict
    assert list(new) == ["clip", "adam"]
    assert new["adam"][0].count == 4


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_measurements_and_reasons_to_skip_are_names():
    tx = optax.chain(
        optax.snapshot("size", optax.tree.norm),
        optax.monitor({"mean": optax.measure_with_ema(optax.tree.norm, 0.9)}),
    )
    state = tx.update(PARAMS, tx.init(PARAMS))[1]
    assert tree_get(state, "size") is state[0].measurement["size"]
    assert tree_get(state, "mean") is state[1].measurements["mean"]
    state = WRAPPED["multi steps"].init(PARAMS)
    assert tree_get(state, "should_skip") is state.skip_state["should_skip"]
    assert tree_get(state, "ScaleByAdamState.count") is state.inner_opt_state[0].count


def test_a_line_search_tells_its_own_value_from_a_parameters():
    tx = ta.adapt(optax.lbfgs())
    state = tx.init({"value": jnp.ones(2), "grad": jnp.ones(2), "count": jnp.ones(2)})
    search = state[2]
    assert tree_get(state, "value") is search.value
    assert tree_get(state, "grad") is search.grad
    assert tree_get(state, "num_linesearch_steps") is search.info.num_linesearch_steps


def test_states_of_other_libraries_are_looked_into():
    train = TrainState.create(
        apply_fn=mlp, params={"count": jnp.ones(2)}, tx=optax.adam(0.1)
    )
    assert tree_get(train, "count") is train.opt_state[0].count
    assert tree_get(train, "step") == 0
    new = tree_set(train, count=5)
    assert isinstance(new, TrainState)
    assert (new.opt_state[0].count, new.params["count"][0]) == (5, 1)

    @flax.struct.dataclass
    class TrainingState:
        optimizer_state: Any
        params: Any

    new = tree_set(TrainingState(ADAM.init(PARAMS), Inner(jnp.ones(1), 1)), count=5)
    assert new.optimizer_state[0].count == 5
    assert new.params.count == 1


def test_states_that_are_dataclasses_are_looked_into():
    @chex.dataclass
    class MineState:
        count: Any
        mu: Any
        inner: Any

    state = (MineState(count=jnp.array(1), mu=PARAMS, inner=ADAM.init(PARAMS)),)
    assert len(_found(state, "count")) == 2
    new = tree_set(state, **{"MineState.count": 3})
    assert isinstance(new[0], MineState)
    assert (new[0].count, new[0].inner[0].count) == (3, 0)


class ModelState(NamedTuple):
    count: Any
    w: Any


def model_state(fill=1.0):
    return ModelState(count=jnp.full(2, fill), w=jnp.full(3, fill))


@pytest.mark.hazard("F28")
@pytest.mark.parametrize("name", ["inject", "multi steps", "monitor", "partition"])
def test_params_in_a_class_that_is_called_a_state_stay(name):
    tx = optax.chain(EVERY[name], optax.trace(0.9), optax.lbfgs())
    state = tx.init(model_state())
    new = tree_set(state, count=7)
    changed = same(state, new)
    assert changed
    assert not any(
        path.endswith(("u.count", "e.count", "grads.count")) for path in changed
    )
    assert new[1].trace is state[1].trace


def test_statistics_beside_an_optimizer_stay():
    @flax.struct.dataclass
    class RunningStatisticsState:
        count: Any
        mean: Any

    @flax.struct.dataclass
    class TrainingState:
        optimizer_state: Any
        params: Any
        normalizer_params: Any
        env_steps: Any

    state = TrainingState(
        optimizer_state=ADAM.init(model_state()),
        params=model_state(),
        normalizer_params=RunningStatisticsState(jnp.array(5.0), jnp.ones(2)),
        env_steps=jnp.array(0),
    )
    new = tree_set(state, count=7, env_steps=9)
    assert same(state, new) == [".optimizer_state[0].count", ".env_steps"]


def test_what_may_be_params_is_set_only_where_its_class_is_named():
    state = (*ADAM.init(PARAMS), model_state(0.0))
    for ask in (
        lambda: tree_set(state, count=7),
        lambda: tree_get(state, "count", None),
        lambda: tree_get(model_state(), "w"),
    ):
        with pytest.raises(ta.TransformError, match=r'may be params.*"ModelState\.'):
            ask()
    new = tree_set(state, **{"ScaleByAdamState.count": 7})
    assert same(state, new) == ["[0].count"]
    new = tree_set(state, **{"ModelState.count": jnp.ones(2)})
    assert same(state, new) == ["[2].count"]
    train = TrainState.create(apply_fn=mlp, params=PARAMS, tx=optax.sgd(0.1))
    train = train.replace(opt_state=(model_state(0.0),))
    assert tree_get(train, "ModelState.count") is train.opt_state[0].count


@pytest.mark.slow
def test_the_table_of_state_fields_covers_every_state_of_optax():
    held = set()
    for tx in EVERY.values():
        pending = [init(tx, arrays("wb"))]
        while pending:
            node = pending.pop()
            if is_state_class(type(node)):
                below = {
                    field: jax.tree.leaves(
                        getattr(node, field),
                        is_leaf=lambda x: is_state_class(type(x)),
                    )
                    for field in node._fields
                }
                held |= {
                    field
                    for field, leaves in below.items()
                    if any(is_state_class(type(leaf)) for leaf in leaves)
                }
            pending += (
                list(node.values())
                if isinstance(node, dict)
                else list(node)
                if isinstance(node, tuple | list)
                else []
            )
    assert held <= STATE_FIELDS
    assert len(held) > 8


def test_variables_of_an_nnx_optimizer_stay_variables():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    count = tree_get(optimizer.opt_state, "count")
    assert isinstance(count, nnx.Variable)
    new = tree_set(optimizer.opt_state, count=3)
    assert type(tree_get(new, "count")) is type(count)
    assert tree_get(new, "count")[...] == 3


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        (jnp.array(1, jnp.int32), 7.0, 7),
        (jnp.array(1, jnp.int32), jnp.array(7, jnp.int8), 7),
        (jnp.array(1.0, jnp.bfloat16), 3, 3.0),
        (jnp.array(1.0, jnp.bfloat16), np.float64(0.5), 0.5),
        (jnp.array(1.0, jnp.float32), jnp.array(0.5), 0.5),
        (jnp.array(1.0, jnp.float32), np.float16(0.5), 0.5),
        (jnp.array(False), True, True),
        (jnp.array(1j), 2.0, 2.0 + 0j),
        (np.float32(1.0), 2.0, 2.0),
        (jnp.array(1, jnp.int32), 7.5, None),
        (jnp.array(1, jnp.int32), jnp.array(7.0), None),
        (jnp.array(1, jnp.int8), 300, None),
        (jnp.array(1, jnp.int32), np.int64(3_000_000_000), None),
        (jnp.array(1, jnp.int32), np.array(-3_000_000_000), None),
        (jnp.array(1, jnp.int32), np.int64(700), 700),
        (jnp.array(1, jnp.uint8), np.int8(-1), None),
        (jnp.array(1, jnp.int8), jnp.array([300])[0], None),
        (jnp.array(False), 1, None),
        (jnp.array(1.0), 1j, None),
        (jnp.array(1.0), "1", None),
        (jnp.array(1.0), np.array("1"), None),
        (jnp.array(1.0), fractions.Fraction(1, 2), None),
        (jnp.array(1.0), 1e60, None),
        (jnp.array(1.0), -1e60, None),
        (jnp.array(1.0), 1e-60, None),
        (jnp.array(1.0), np.float64(1e60), None),
        (jnp.array(1.0), np.array(1e60), None),
        (jnp.array(1.0), 10**400, None),
        (jnp.array(1.0), np.array(10**400), None),
        (jnp.array(1.0), 2**40, 2.0**40),
        (jnp.array(1.0), float("inf"), float("inf")),
        (jnp.array(1.0), 0.0, 0.0),
        (jnp.array(1.0, jnp.float16), 70_000, None),
        (jnp.array(1.0, jnp.float16), jnp.array(1e5), None),
        (jnp.array(1.0, jnp.float8_e4m3fn), float("inf"), None),
        (jnp.array(1.0, jnp.float8_e8m0fnu), -2.0, None),
        (jnp.array(1j), complex(1, 1e60), None),
        (jnp.array(1j), 1e60, None),
        (jnp.array(1, jnp.int32), 10**400, None),
        (jnp.array(1, jnp.int32), float("nan"), None),
        (jnp.array(1, jnp.int32), float("inf"), None),
        (jnp.array(1, jnp.uint8), -1.0, None),
        (jnp.array(1, jnp.uint32), -1, None),
        (jnp.array(1, jnp.uint8), True, None),  # a flag, and no number
        (jnp.array(1.0), True, None),
        (jnp.array(1.0), np.True_, None),
        (jnp.array(1.0), jnp.array(True), None),
        (jnp.array(1.0), jax.new_ref(jnp.array(2.0)), None),
        (jnp.array(True), False, False),
        (jnp.array(1.0), jax.random.key(0), None),
        (jax.random.key(0), 1.0, None),
        (jax.random.key(0), jax.random.key(1), jax.random.key(1)),
    ],
)
def test_dtypes_are_kept_or_refused(old, new, want):
    state = optax.ScaleByScheduleState(count=old)
    if want is None:
        with pytest.raises(ta.TransformError, match=r"state\.count.*cannot hold"):
            tree_set(state, count=new)
        return
    count = tree_set(state, count=new).count
    assert (count.dtype, count.shape) == (old.dtype, ())
    assert not getattr(count, "weak_type", False)
    assert count == want


@pytest.mark.parametrize(
    "new",
    [jnp.ones(3), 1.0, {"a": jnp.ones(2)}, None, {"w": jnp.ones(2), "b": jnp.ones(2)}],
)
def test_another_structure_or_shape_is_an_error(new):
    state = optax.adam(0.1).init({"w": jnp.ones(2)})
    with pytest.raises(ta.StructureMismatchError, match=r"state\[0\]\.mu"):
        tree_set(state, mu=new)


def test_a_whole_tree_is_set_and_takes_the_old_dtypes():
    state = optax.adam(0.1, mu_dtype=jnp.bfloat16).init({"w": jnp.ones(2)})
    new = tree_set(state, mu={"w": jnp.full(2, 3.0)})
    assert new[0].mu["w"].dtype == jnp.bfloat16
    assert new[0].mu["w"].tolist() == [3, 3]
    inner = state[0]._replace(count=jnp.array(4))
    assert tree_set(state, ScaleByAdamState=inner)[0].count == 4


def test_arrays_are_rounded_but_none_becomes_infinite():
    state = optax.adam(0.1).init({"w": jnp.ones(2, jnp.float16)})
    new = tree_set(state, mu={"w": np.array([1 / 3, 1e-20], np.float32)})
    assert new[0].mu["w"].tolist() == [np.float16(1 / 3), 0]
    with pytest.raises(ta.TransformError, match=r"state\[0\]\.mu is float16\[2\]"):
        tree_set(state, mu={"w": jnp.array([1.0, 1e5])})


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_is_not_traced_again():
    traces = []
    tx = ta.adapt(optax.inject_hyperparams(optax.adam)(0.1))
    params = {"w": jnp.ones(2)}

    @jax.jit
    def step(state):
        traces.append(1)
        return tx.update(params, state, params)[1]

    state = step(tx.init(params))
    for value in (0.5, 1, np.float64(2.0), jnp.array(0.1)):
        state = step(tree_set(state, learning_rate=value, count=2))
    assert len(traces) == 1


def test_it_works_under_jit():
    state = optax.adam(0.1).init({"w": jnp.ones(2)})
    new = jax.jit(lambda state, count: tree_set(state, count=count))(state, 3)
    assert new[0].count == 3
    with pytest.raises(ta.TransformError, match="cannot hold"):
        jax.jit(lambda state, count: tree_set(state, count=count))(state, 3.5)


def test_one_value_set_twice_may_be_donated():
    state = two_groups(policy=0.1, value=0.2).init(PARAMS)
    rate = jnp.array(0.5)
    new = tree_set(state, learning_rate=rate)
    jax.jit(lambda state: state, donate_argnums=0)(new)
    assert rate == 0.5


def test_the_sharding_is_kept():
    mesh = jax.make_mesh((8,), ("x",))
    everywhere = jax.NamedSharding(mesh, jax.P())
    state = jax.device_put(optax.adam(0.1).init({"w": jnp.ones(2)}), everywhere)
    new = tree_set(state, count=3, mu={"w": jnp.ones(2)})
    assert new[0].count.sharding == everywhere
    assert new[0].mu["w"].sharding == everywhere


def test_a_scheduled_hyperparameter_cannot_be_set():
    tx = optax.inject_hyperparams(optax.adamw)(lambda count: 0.1, weight_decay=0.5)
    state = tx.init(PARAMS)
    assert tree_get(state, "learning_rate") == jnp.float32(0.1)
    with pytest.raises(ta.TransformError, match=r"\['learning_rate'\] follows a sched"):
        tree_set(state, learning_rate=0.5)
    assert tree_get(tree_set(state, weight_decay=0.1), "weight_decay") == jnp.float32(
        0.1
    )


# schedule_free


def schedule_free(**kwargs):
    return optax.contrib.schedule_free_adamw(0.1, warmup_steps=2, **kwargs)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_eval_params_are_those_of_optax_on_the_flat_dict():
    tx, model = schedule_free(), mlp()
    flat, rest = ta.split(model)
    state = tx.init(flat)
    for _ in range(3):
        updates, state = tx.update(jax.tree.map(lambda x: x * 0.5, flat), state, flat)
        flat = optax.apply_updates(flat, updates)
    want = optax.contrib.schedule_free_eval_params(state, flat)
    model = ta.merge(flat, rest)
    for function in (
        schedule_free_eval_params,
        eqx.filter_jit(schedule_free_eval_params),
    ):
        got = function(state, model)
        assert jax.tree.structure(got) == jax.tree.structure(model)
        assert got.activation is model.activation
    new, _ = ta.split(schedule_free_eval_params(state, model))
    assert all((new[path] == want[path]).all() for path in want)
    assert all((new[path] != flat[path]).any() for path in want)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("native", [False, True])
def test_eval_params_of_a_state_anywhere(native):
    params = PPO(policy={"w": jnp.ones(2)}, value={"w": jnp.full(2, 3.0)})
    tx = optax.chain(optax.clip(1.0), optax.apply_if_finite(schedule_free(), 3))
    tx = tx if native else ta.adapt(tx)
    state = tx.init(params)
    for _ in range(2):
        grads = jax.tree.map(lambda x: 0.5 * x, params)
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
    got = schedule_free_eval_params(state, params)
    inner = state[1].inner_state
    z = inner.z if native else ta.from_flat_dict(params, inner.z)
    want = optax.contrib.schedule_free_eval_params(inner._replace(z=z), params)
    assert same(got, want) == []
    assert len(same(got, params)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_eval_params_of_groups():
    params = PPO(policy={"w": jnp.ones(2)}, value={"w": jnp.full(2, 3.0)})
    grads = jax.tree.map(jnp.ones_like, params)
    tx = ta.partition({"a": schedule_free()}, {"policy": "a", "**": "frozen"})
    updates, state = tx.update(grads, tx.init(params), params)
    moved = apply_updates(params, updates)
    got = schedule_free_eval_params(state, moved)
    assert got.value["w"] is moved.value["w"]
    tx = ta.partition(
        {"a": schedule_free(), "b": schedule_free()}, {"policy": "a", "**": "b"}
    )
    updates, state = tx.update(grads, tx.init(params), params)
    moved = apply_updates(params, updates)
    both = schedule_free_eval_params(state, moved)
    for group, name in (("a", "policy"), ("b", "value")):
        path, leaf = f"{name}/w", getattr(moved, name)["w"]
        own = state.inner_states[group]
        want = optax.contrib.schedule_free_eval_params(own, {path: leaf})
        assert (getattr(both, name)["w"] == want[path]).all()
    masked = optax.masked(schedule_free(), PPO(policy=True, value=False))
    updates, state = masked.update(grads, masked.init(params), params)
    again = schedule_free_eval_params(state, params._replace(policy=moved.policy))
    assert (again.policy["w"] == got.policy["w"]).all()


def test_eval_params_want_the_right_state_and_params():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(ta.TransformError, match="no ScheduleFreeState"):
        schedule_free_eval_params(optax.adam(0.1).init(params), params)
    state = schedule_free().init(params)
    with pytest.raises(ta.StructureMismatchError, match="'b'"):
        schedule_free_eval_params(state, {"a": jnp.ones(2)})
    with pytest.raises(ta.TransformError, match="Two schedule_free states hold 'a'"):
        schedule_free_eval_params((state, state), params)
