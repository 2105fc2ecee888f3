"""``nnx.Optimizer``: fields of its state, and states carried, sharded and written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import treeadapt as ta

# Optax adds weak types to the numbers of its state.
pytestmark = pytest.mark.usefixtures("standard_promotion")

ADAM = optax.inject_hyperparams(optax.adam)(0.1)
FROZEN = {"enc": "frozen", "**": "a"}
TXS = {
    "adam": optax.adam(0.1),
    "hyperparams": ADAM,
    "chain": optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)),
    "partition": ta.partition({"a": optax.adam(0.1)}, FROZEN),
    "adapt": ta.adapt(optax.adam(0.1)),
}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.enc = nnx.Linear(2, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.enc(x))))


def made(tx):
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def trained(model, optimizer, steps):
    x = jax.random.normal(jax.random.key(0), (5, 2))

    def loss(model):
        return jnp.mean((model(x) - 1) ** 2)

    for _ in range(steps):
        optimizer.update(model, nnx.grad(loss)(model))
    return ta.to_flat_dict(nnx.state(model, nnx.Param))


def arrays(tree):
    return {path: np.asarray(leaf) for path, leaf in ta.to_flat_dict(tree).items()}


def same(one, two):
    assert one.keys() == two.keys()
    for path in one:
        np.testing.assert_array_equal(one[path], two[path], err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hyperparams", "partition", "adapt", "adam"])
def test_fields_are_read_from_the_optimizer_and_set_in_a_new_state(name):
    model, optimizer = made(TXS[name])
    trained(model, optimizer, 2)
    assert ta.tree_get(optimizer, "ScaleByAdamState.count") == 2
    before = arrays(optimizer.opt_state)
    state = ta.tree_set(optimizer, **{"ScaleByAdamState.count": 7})
    assert ta.tree_get(state, "ScaleByAdamState.count") == 7
    same(arrays(optimizer.opt_state), before)
    ta.set_opt_state(optimizer, state)
    assert ta.tree_get(optimizer, "ScaleByAdamState.count") == 7
    assert optimizer.step[...] == 2
    trained(model, optimizer, 1)
    assert ta.tree_get(optimizer, "ScaleByAdamState.count") == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", TXS)
def test_training_goes_on_as_if_it_had_not_stopped(name, tmp_path):
    model, optimizer = made(TXS[name])
    trained(model, optimizer, 3)
    file = tmp_path / "run.safetensors"
    ta.save(file, {"model": model, "optimizer": optimizer})
    wanted = trained(model, optimizer, 2)

    model, optimizer = made(TXS[name])
    other, earlier = made(TXS[name])
    run = ta.load(file, {"model": other, "optimizer": earlier})
    nnx.update(model, nnx.state(run["model"]))
    params = nnx.state(model, nnx.Param)
    state, report = ta.carry_state(optimizer.tx, params, run["optimizer"])
    assert not report.fresh
    ta.set_opt_state(optimizer, state, step=run["optimizer"].step[...])
    assert optimizer.step[...] == 3
    assert optimizer.step[...].dtype == jnp.uint32
    same(arrays(trained(model, optimizer, 2)), arrays(wanted))


@pytest.mark.slow
def test_a_stage_of_unfreezing_carries_the_moments_of_the_stage_before():
    model, optimizer = made(TXS["partition"])
    trained(model, optimizer, 3)
    tx = ta.partition({"a": optax.adam(0.1)}, {"**": "a"})
    thawed = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state, report = ta.carry_state(tx, nnx.state(model, nnx.Param), optimizer)
    assert {path.rpartition("enc/")[0][-3:] for path in report.fresh} == {"mu/", "nu/"}
    ta.set_opt_state(thawed, state, step=optimizer.step[...])
    moments = arrays(ta.tree_get(thawed, "mu"))
    earlier = arrays(ta.tree_get(optimizer, "mu"))
    assert set(moments) - set(earlier) == {"enc/bias", "enc/kernel"}
    same({path: moments[path] for path in earlier}, earlier)
    trained(model, thawed, 1)
    assert thawed.step[...] == 4


@pytest.mark.slow
def test_a_sharded_state_stays_where_it_was_put():
    mesh = jax.make_mesh((8,), ("data",))
    model, optimizer = made(TXS["adapt"])
    trained(model, optimizer, 1)
    params = nnx.state(model, nnx.Param)
    rules = {"enc/kernel": PartitionSpec(None, "data"), "**": PartitionSpec()}
    shardings = ta.opt_state_shardings(
        optimizer.tx, params, ta.named_shardings(params, rules, mesh)
    )
    state, _ = ta.carry_state(optimizer.tx, params, optimizer)
    ta.set_opt_state(optimizer, jax.device_put(state, shardings))
    moment = ta.tree_get(optimizer, "mu")["enc/kernel"]
    wanted = NamedSharding(mesh, PartitionSpec(None, "data"))
    assert moment.sharding.is_equivalent_to(wanted, 2)


def test_variables_stay_the_same_objects_so_that_compiled_steps_see_them():
    _, optimizer = made(TXS["adam"])
    count = optimizer.opt_state[0].count
    ta.set_opt_state(optimizer, ta.tree_set(optimizer, count=3))
    assert optimizer.opt_state[0].count is count
    assert count[...] == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s[:1], None),  # states without leaves do not count
        (lambda s: s[1:], "'0/count' is missing in the state, and int32"),
        (lambda s: (*s, jnp.ones(2)), r"'2' is float32\[2\] in the state, and missing"),
        (
            lambda s: (s[0]._replace(count=jnp.ones(3, "int32")), *s[1:]),
            r"'0/count' is int32\[3\] in the state, and int32\[\] in the optimizer",
        ),
        (lambda s: (s[0]._replace(count=jnp.array(1.0)), *s[1:]), "float32"),
        (lambda s: jax.eval_shape(lambda: s), r"'0/count' is int32\[\] without values"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, match):
    _, optimizer = made(TXS["adam"])
    before = arrays(optimizer.opt_state)
    state = change(ta.tree_set(optimizer, count=5))
    if match is None:
        ta.set_opt_state(optimizer, state)
        assert ta.tree_get(optimizer, "count") == 5
        return
    with pytest.raises(ta.StructureMismatchError, match=match):
        ta.set_opt_state(optimizer, state, step=3)
    same(arrays(optimizer.opt_state), before)
    assert optimizer.step[...] == 0


@pytest.mark.parametrize(
    "step",
    [
        1.5,
        [1, 2],
        True,
        -1,
        2**33,
        np.int64(2**40),
        jnp.int32(-1),
        "3",
        np.ones(2, int),
    ],
)
def test_a_step_is_one_integer(step):
    _, optimizer = made(TXS["adam"])
    with pytest.raises(ta.StructureMismatchError, match="step is"):
        ta.set_opt_state(optimizer, ta.tree_set(optimizer, count=5), step=step)
    assert ta.tree_get(optimizer, "count") == 0


def test_any_other_object_is_refused():
    state = optax.adam(0.1).init({"a": jnp.ones(2)})
    with pytest.raises(
        ta.TransformError, match=r"Expected an nnx.Optimizer; got a tuple"
    ):
        ta.set_opt_state(state, state)


def test_the_pair_of_carry_state_is_refused():
    model, optimizer = made(TXS["adam"])
    pair = ta.carry_state(TXS["adam"], nnx.state(model, nnx.Param), optimizer)
    for wrong in (pair, pair[1]):
        with pytest.raises(ta.StructureMismatchError, match="is missing in the state"):
            ta.set_opt_state(optimizer, wrong)
    ta.set_opt_state(optimizer, pair[0])


def test_an_optimizer_is_not_the_params():
    model, optimizer = made(TXS["adam"])
    with pytest.raises(ta.TransformError, match=r"Got an Optimizer as params.*\(tx, p"):
        ta.carry_state(TXS["adam"], optimizer, nnx.state(model, nnx.Param))
    with pytest.raises(ta.TransformError, match=r"takes \(optimizer, state\)"):
        ta.set_opt_state(optimizer.opt_state, optimizer)


def test_all_of_an_optimizer_is_refused_with_the_names_of_its_parts():
    _, optimizer = made(TXS["adam"])
    whole = ta.to_state_dict(optimizer)
    with pytest.raises(ta.StructureMismatchError, match="Pass the 'opt_state'"):
        ta.set_opt_state(optimizer, whole)
    ta.set_opt_state(optimizer, whole["opt_state"], step=whole["step"])


@pytest.mark.parametrize("call", [ta.tree_norms, ta.summarize])
def test_rules_are_not_for_an_optimizer(call):
    model, optimizer = made(TXS["adam"])
    with pytest.raises(ta.TransformError, match=f"{call.__name__} with rules got an"):
        call(optimizer, {"**": "a"})
    for tree in (model, nnx.state(model, nnx.Param), ta.tree_get(optimizer, "mu")):
        call(tree, {"enc": "a", "**": "b"})
    call(optimizer.opt_state, {"**/mu": "mu", "**": "others"})
    call(optimizer)


def test_an_optimizer_in_the_place_of_its_transformation_says_where_that_is():
    model, optimizer = made(TXS["adam"])
    with pytest.raises(ta.TransformError, match="Its tx has them: pass that"):
        ta.carry_state(optimizer, nnx.state(model, nnx.Param), optimizer)


def test_a_filter_for_some_layers_of_an_array_says_what_takes_arrays_apart():
    model = nnx.Dict(w=nnx.Param(jnp.ones((4, 2))))
    some = ta.Rules({"w/{0..1}": "a", "**": "b"}, stacks={"w": 0}).where("a")
    with pytest.raises(ta.StackError, match=r"Use treeadapt\.partition, freeze or"):
        nnx.Optimizer(model, optax.adam(0.1), wrt=some.bind(model))
