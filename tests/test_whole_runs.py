"""A whole run by one table: params, averages and moments in one load or one convert.

Compared with what separate calls give: the table on the params and on their averages,
and ``carry_state`` on the state.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command import run as run_command
from flax import nnx
from test_checkpoints import same

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS = 3
ROWS = {
    "layers/{l}/q/weight : (h d) e": "blocks/q/kernel : l e h d",
    "layers/{l}/mlp/weight : [f f] e": (
        "blocks/gate/kernel : l e f",
        "blocks/value/kernel : l e f",
    ),
    "layers/{l}/scale : e": "blocks/scale : e l",
    "embed : v e": "embed : e v",
}
SIZES = {"d": 2}
PARAMS = ta.Migration(ROWS, sizes=SIZES)


def below(name: str, side: Any) -> Any:
    return (
        tuple(f"{name}/{each}" for each in side)
        if isinstance(side, tuple)
        else (f"{name}/{side}")
    )


#: The same rows for all that holds params, and one for what does not.
RUN = ta.Migration(
    {f"{{t:**}}/{a}": below("{t}", b) for a, b in ROWS.items()}
    | {"{rest:**}": "{rest}"},
    sizes=SIZES,
)


def params_of(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32))

    layers = [
        {
            "q": {"weight": array(6, 4)},
            "mlp": {"weight": array(10, 4)},
            "scale": array(4),
        }
        for _ in range(LAYERS)
    ]
    return {"layers": layers, "embed": array(7, 4)}


TRANSFORMATIONS = {
    "adam": optax.adam(1e-2),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "steps": optax.MultiSteps(optax.adam(1e-2), 2),
}


def trained(tx: Any) -> dict[str, Any]:
    """A run of three steps: a step, params, their average and a state."""
    params = params_of()
    state, average = tx.init(params), params
    for step in range(3):
        grads = jax.tree.map(lambda x, s=step: jnp.sin(x * 3 + s), params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
    return {"step": 3, "params": params, "average": average, "opt_state": state}


def nested(flat: Any) -> Any:
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        *above, last = path.split("/")
        node = out
        for name in above:
            node = node.setdefault(name, {})
        node[last] = leaf
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_one_table_moves_a_run_as_separate_calls_do(name, tmp_path):
    tx = TRANSFORMATIONS[name]
    run = trained(tx)
    params = nested(PARAMS(run["params"]))
    state, report = ta.carry_state(tx, params, run["opt_state"], migration=PARAMS)
    assert not report.fresh
    wanted = {
        "step": 3,
        "params": params,
        "average": nested(PARAMS(run["average"])),
        "opt_state": state,
    }
    target = {
        "step": 0,
        "params": jax.tree.map(jnp.zeros_like, params),
        "average": jax.tree.map(jnp.zeros_like, params),
        "opt_state": tx.init(params),
    }
    same(ta.from_flat_dict(target, RUN(run)), wanted)
    file, moved = tmp_path / "run.safetensors", tmp_path / "moved.safetensors"
    ta.save(file, run)
    loaded = ta.load(file, target, migration=RUN)
    same(loaded, wanted)
    # The command writes the same, and back.
    table = tmp_path / "run.toml"
    table.write_text(RUN.to_toml())
    back = tmp_path / "back.safetensors"
    for command in ([file, moved], [moved, back, "--reverse"]):
        run_command("convert", *command, "--migration", table)
    same(ta.load(moved, target), wanted)
    same(ta.load(back, run), run)
    # Training goes on as it would have.
    grads = jax.tree.map(lambda x: jnp.cos(x), run["params"])
    updates, _ = tx.update(grads, run["opt_state"], run["params"])
    moved_updates, _ = tx.update(
        nested(PARAMS(grads)), loaded["opt_state"], loaded["params"]
    )
    for path, leaf in PARAMS(updates).items():
        np.testing.assert_allclose(
            ta.to_flat_dict(moved_updates)[path], leaf, 1e-4, 1e-7
        )


class Old(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.second = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(nnx.relu(self.first(x)))


class New(nnx.Module):
    """The same, whose second kernel is stored the other way round."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(3, 5, rngs=rngs)
        self.head = nnx.Param(nnx.initializers.normal()(rngs.params(), (2, 5)))
        self.bias = nnx.Param(jnp.zeros(2))

    def __call__(self, x: Any) -> Any:
        hidden = nnx.relu(self.hidden(x))
        return hidden @ self.head[...].T + self.bias[...]


def train_nnx(optimizer: Any, model: Any, steps: int = 3) -> None:
    xs = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
    for _ in range(steps):
        loss = nnx.grad(lambda model: jnp.mean((model(xs) - 1) ** 2))
        optimizer.update(model, loss(model))


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".safetensors", ""])
def test_a_model_and_its_nnx_optimizer_move_by_one_table(ending, tmp_path):
    tx = optax.adam(1e-2)
    old = Old(nnx.Rngs(0))
    run = {"model": old, "optimizer": nnx.Optimizer(old, tx, wrt=nnx.Param)}
    train_nnx(run["optimizer"], old)
    rows = {
        "first/{k}": "hidden/{k}",
        "second/kernel : i o": "head : o i",
        "second/bias": "bias",
    }
    m = ta.Migration(
        {f"{{t:**}}/{a}": f"{{t}}/{b}" for a, b in rows.items()}
        | {"{rest:**}": "{rest}"}
    )
    file = tmp_path / f"run{ending}"
    ta.save(file, run)
    model = New(nnx.Rngs(1))
    target = {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}
    moved = ta.load(file, target, migration=m)
    flat = ta.to_flat_dict(moved)
    params = ta.Migration(rows)(old)
    for path, leaf in params.items():
        np.testing.assert_array_equal(flat[f"model/{path}"], leaf)
    state = ta.carry_state(tx, params, run["optimizer"], migration=ta.Migration(rows))
    for path, leaf in ta.to_flat_dict(state[0]).items():
        np.testing.assert_array_equal(flat[f"optimizer/opt_state/{path}"], leaf)
    assert flat["optimizer/step"] == 3
    for each in (run, moved):
        train_nnx(each["optimizer"], each["model"])
    for path, leaf in ta.Migration(rows)(old).items():
        moved_leaf = ta.to_flat_dict(moved["model"])[path]
        np.testing.assert_allclose(moved_leaf, leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 2.0},
        {"offset": 1.0},
        {"pad": {"v": (0, 1)}},
        {"undo": {"scale": 2.0}},
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_what_changes_numbers_is_refused_of_moments(options, alone, tmp_path):
    run = trained(TRANSFORMATIONS["adam"])
    if alone:  # a file of the state has no params, and two moments
        run = {"opt_state": run["opt_state"]}
    row = {"{t:**}/embed : v e": ("{t}/embed : v e", options)}
    m = ta.Migration(row | {"{rest:**}": "{rest}"})
    text = (
        r"'opt_state/0/mu/embed' is 'mu' of an optimizer's state, whose numbers change "
        r"in another way .* carry_state\(..., migration=\) the state"
    )
    with pytest.raises(ta.MigrationError, match=text):
        m(run)
    with pytest.raises(ta.MigrationError, match=text):
        m.plan(run)
    ta.save(tmp_path / "run.safetensors", run)
    with pytest.raises(ta.MigrationError, match=text):
        ta.load(tmp_path / "run.safetensors", migration=m)
    cast = {"{t:**}/embed : v e": ("{t}/embed : v e", {"cast": "bfloat16"})}
    assert ta.Migration(cast | {"{rest:**}": "{rest}"})(run)


def test_a_model_may_have_heads_that_are_called_as_fields_are():
    m = ta.Migration({"{t:**}/w : a": ("{t}/w : a", {"scale": 2.0}), "{x:**}": "{x}"})
    w = {"w": np.ones(2)}
    for model in (
        {"head": {"mu": w, "count": np.ones(2), "nu": w}},  # a count has no axes
        {"head": {"mu": w, "count": 3}},  # nothing else has what is below it
        {"head": {"mu": w, "logvar": w}, "body": w, "step": 1},
        {"norm": {"mean": w, "count": 3}, "body": w},
    ):
        moved = m(model)
        assert all(leaf.max() == 2 for path, leaf in moved.items() if path[-1] == "w")
    run = {"opt": {"count": 3, "mu": w}, "params": w}
    with pytest.raises(ta.MigrationError, match="'opt/mu/w' is 'mu' of an optimizer's"):
        m(run)
