"""What pages show on trees of arrays also works on a model that holds functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import treeadapt as ta

# Optax and Equinox promote dtypes as JAX does by default.
pytestmark = pytest.mark.usefixtures("standard_promotion")

RULES = {"layers/0": "frozen", "**": "train"}
SPECS = {"**/weight": PartitionSpec("data", None), "**": PartitionSpec()}


def made() -> eqx.nn.MLP:
    return eqx.nn.MLP(8, 4, 16, depth=1, activation=jnp.tanh, key=jax.random.key(0))


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def doubled(model: Any) -> Any:
    return ta.map_where(lambda leaf: leaf * 2, model, "**")


def grads_of(model: Any) -> Any:
    return eqx.filter_grad(lambda m: jnp.sum(m(jnp.ones(8))))(model)


def stepped(tx: Any, model: Any) -> Any:
    updates, _ = tx.update(grads_of(model), tx.init(model), model)
    return ta.apply_updates(model, updates)


def trained(model: Any) -> Any:
    return stepped(ta.partition({"train": optax.adam(1e-1)}, RULES), model)


def trained_under_jit(model: Any) -> Any:
    tx = ta.freeze(optax.adam(1e-1), "layers/0")
    params, rest = ta.split(model)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.sum(ta.merge(params, rest)(jnp.ones(8)))

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return ta.apply_updates(params, updates), state

    params, _ = step(params, state)
    return ta.merge(params, rest)


def by_a_file(model: Any) -> Any:
    adam = {"type": "adam", "learning_rate": 0.1}
    document = {"rules": RULES, "each": {"b1": 0.5}, "optimizers": {"train": adam}}
    return stepped(ta.load_optimizer(document), model)


def with_other_rates(model: Any) -> Any:
    factors = ta.scale_by_rules({"layers/0": 0.1, "**": 1.0})
    return stepped(optax.chain(ta.adapt(optax.adam(1e-1)), factors), model)


def with_a_rate_in_the_state(model: Any) -> Any:
    tx = ta.adapt(ta.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    state = ta.tree_set(tx.init(model), learning_rate=0.5)
    assert float(ta.tree_get(state, "learning_rate")) == 0.5
    updates, _ = tx.update(grads_of(model), state, model)
    return ta.apply_updates(model, updates)


def migrated(model: Any) -> Any:
    """Through the names of another library, and back into the model."""
    flat = {p: x for p, x in ta.to_flat_dict(model).items() if eqx.is_array(x)}
    published = {path.replace("/", "."): leaf for path, leaf in flat.items()}
    rows = {"layers.{l}.{name}": "layers/{l}/{name}"}
    return ta.from_flat_dict(model, ta.Migration(rows)(published, target=model))


def drafted(model: Any) -> Any:
    weights = {
        f"net.{n}.{kind}": np.asarray(getattr(layer, kind))
        for n, layer in enumerate(model.layers)
        for kind in ("weight", "bias")
    }
    draft = ta.draft_migration(weights, model)
    assert not draft.missing
    return ta.from_flat_dict(model, draft.migration(weights, target=model))


def split_and_moved(model: Any) -> Any:
    params, rest = ta.split(model)
    places = ta.named_shardings(params, SPECS, mesh(AxisType.Explicit))
    return ta.merge(jax.device_put(params, places), rest)


CALLS: dict[str, Callable[[Any], Any]] = {
    "freeze a part": trained,
    "freeze a part under jit": trained_under_jit,
    "an optimizer in a file": by_a_file,
    "a rate for each layer": with_other_rates,
    "a rate in the state": with_a_rate_in_the_state,
    "by a table": migrated,
    "by a draft": drafted,
    "through names with dots": lambda m: ta.from_state_dict(m, ta.to_state_dict(m)),
    "change some arrays": doubled,
    "average": lambda model: ta.incremental_update(doubled(model), model, 0.5),
    "shard": lambda m: eqx.filter_shard(m, ta.named_shardings(m, SPECS, mesh())),
    "shard on explicit axes": split_and_moved,
    "through a flat dict": lambda m: ta.from_flat_dict(m, ta.to_flat_dict(m)),
}


@pytest.mark.slow
def test_the_loop_of_the_readme_trains_such_a_model():
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    (loop,) = re.findall(r"^(tx = .*?)```", readme, flags=re.DOTALL | re.MULTILINE)
    # The page's gradient is one of its own params.
    loop, count = re.subn(r"^grads = .*$", "grads = params", loop, flags=re.MULTILINE)
    assert count == 1
    names = {"ta": ta, "optax": optax, "params": made(), "rules": ta.Rules(RULES)}
    exec(loop, names)
    diff = ta.tree_diff(made(), names["params"], values=True)
    assert {each.path for each in diff} == {"layers/1/bias", "layers/1/weight"}


@pytest.mark.parametrize("name", CALLS)
def test_the_result_has_the_functions_of_the_model(name):
    model = made()
    result = CALLS[name](model)
    assert type(result) is type(model)
    assert result.activation is model.activation
    assert result(jnp.ones(8)).shape == (4,)


@pytest.mark.slow
def test_a_checkpoint_has_its_arrays_and_the_target_its_functions(tmp_path):
    model = made()
    ta.save(tmp_path / "model", model, max_shard_bytes=600)
    assert "activation" not in ta.read_metadata(tmp_path / "model")
    again = ta.load(tmp_path / "model", doubled(model))
    assert again.activation is model.activation
    assert not ta.tree_diff(again, model, values=True)
    ta.save(tmp_path / "model.schema.toml", model)
    assert ta.compare_checkpoint(tmp_path / "model", model).fits
    with pytest.raises(ta.CheckpointError, match=r"ta\.draft_migration\("):
        ta.load(tmp_path / "model", {"model": {"kernel": jnp.ones((4, 16))}})
    ta.save(tmp_path / "run", {"params": model, "step": 3})
    with pytest.raises(ta.CheckpointError, match="are below 'params' in it"):
        ta.load(tmp_path / "run", model)


def test_states_are_placed_and_carried():
    model, tx = made(), ta.adapt(optax.adamw(1e-3))
    places = ta.named_shardings(model, SPECS, mesh())
    sharded = eqx.filter_shard(model, places)
    state = ta.init_sharded(tx, sharded)
    moments = ta.to_flat_dict(state)
    (first,) = (leaf for path, leaf in moments.items() if "mu/layers/0/weight" in path)
    assert first.addressable_shards[0].data.shape == (4, 8)
    _, report = ta.carry_state(tx, model, tx.init(model))
    assert not report.fresh


@pytest.mark.slow
def test_reports_read_only_its_arrays():
    model = made()
    assert ta.summarize(model, RULES).rows
    labels = ta.to_flat_dict(ta.param_labels(model, RULES))
    assert labels["layers/0/weight"] == "frozen"
    assert np.isfinite([*ta.tree_norms(model, RULES).values()]).all()
    assert not ta.tree_diff(model, model, values=True)


def answers(weights: dict[str, Any]) -> jax.Array:
    hidden = jnp.tanh(X @ weights["up.weight"].T + weights["up.bias"])
    return hidden @ weights["down.weight"].T + weights["down.bias"]


X = np.random.default_rng(0).normal(size=(5, 8)).astype("float32")
OLD = {
    "up.weight": (16, 8),
    "up.bias": (16,),
    "down.weight": (4, 16),
    "down.bias": (4,),
}


@pytest.mark.slow
def test_two_models_give_a_table_and_a_wrong_row_is_found():
    weights = {name: np.ones(shape, "float32") for name, shape in OLD.items()}
    model = made()

    def new(params: Any) -> jax.Array:
        return jax.vmap(params)(X)

    match = ta.match_models(weights, model, new, answers)
    assert match.verdict == "proved"
    rng = np.random.default_rng(1)
    weights = {n: rng.normal(size=x.shape).astype("f4") for n, x in weights.items()}
    table = {
        "up.{name}": "layers/0/{name}",
        "down.weight": "layers/1/weight",
        "down.bias": ("layers/1/bias", {"scale": 1.0}),
    }
    report = ta.find_wrong_rows(ta.Migration(table), weights, model, new, answers)
    assert report.found
    loaded = ta.from_flat_dict(model, match.migration(weights, target=model))
    assert np.allclose(new(loaded), answers(weights), atol=1e-5)


def test_specs_labels_masks_and_parts_have_the_paths_of_its_arrays():
    model, tx = made(), ta.adapt(optax.adam(1e-3))
    arrays = {p for p in ta.tree_paths(model) if p.endswith(("weight", "bias"))}
    assert arrays == {f"layers/{n}/{k}" for n in (0, 1) for k in ("weight", "bias")}
    assert ta.summarize(model, SPECS, mesh=mesh(), tx=tx).memory.num_devices == 8
    assert ta.to_flat_dict(ta.partition_specs(model, SPECS)).keys() >= arrays
    assert ta.to_flat_dict(ta.param_mask(model, "**/bias"))["layers/0/bias"]
    places = ta.named_shardings(model, SPECS, mesh())
    assert jax.tree.leaves(ta.opt_state_shardings(tx, model, places))
    largest = ta.shard_largest("data", min_size=1)
    biggest = ta.to_flat_dict(ta.named_shardings(model, {"**": largest}, mesh()))
    assert biggest["layers/0/weight"].spec[0] == "data"


@pytest.mark.slow
def test_the_state_of_its_optimizer_is_saved_and_goes_on(tmp_path):
    model, tx = made(), ta.adapt(optax.adam(1e-3))
    state = tx.init(model)
    counted = ta.tree_map_params(tx, lambda leaf: leaf + 1, state)
    ta.save(tmp_path / "run", {"params": model, "state": counted})
    run = ta.load(tmp_path / "run", {"params": model, "state": state})
    assert run["params"].activation is model.activation
    assert not ta.tree_diff(run["state"], counted, values=True)


#: Calls of pages that take no model.
OF_NO_MODEL = {
    *("escape", "glob", "leaf", "node", "load_migration", "load_rules", "register"),
    # Of one library or one kind of optimizer, where its own tests train such a model.
    *("lift", "load_torch_state", "per_layer", "schedule", "schedule_free_eval_params"),
    *("set_opt_state", "value_and_grad_from_state"),
}


def test_every_call_that_takes_a_model_is_tried():
    text = Path(__file__).read_text("utf-8")
    functions = {name for name in ta.__all__ if name.islower() and name[0] != "_"}
    tried = {*re.findall(r"ta\.([a-z_]+)\(", text)}
    assert functions - tried - {"default_registry"} == OF_NO_MODEL
