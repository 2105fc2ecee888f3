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


def trained(model: Any) -> Any:
    tx = ta.partition({"train": optax.adam(1e-1)}, RULES)
    grads = eqx.filter_grad(lambda m: jnp.sum(m(jnp.ones(8))))(model)
    updates, _ = tx.update(grads, tx.init(model), model)
    return ta.apply_updates(model, updates)


def split_and_moved(model: Any) -> Any:
    params, rest = ta.split(model)
    places = ta.named_shardings(params, SPECS, mesh(AxisType.Explicit))
    return ta.merge(jax.device_put(params, places), rest)


CALLS: dict[str, Callable[[Any], Any]] = {
    "freeze a part": trained,
    "change some arrays": doubled,
    "average": lambda model: ta.incremental_update(doubled(model), model, 0.5),
    "shard": lambda m: eqx.filter_shard(m, ta.named_shardings(m, SPECS, mesh())),
    "shard on explicit axes": split_and_moved,
    "through a flat dict": lambda m: ta.from_flat_dict(m, ta.to_flat_dict(m)),
}


def test_the_loop_of_the_readme_trains_such_a_model():
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    (loop,) = re.findall(r"```python\n(tx = .*?)```", readme, flags=re.DOTALL)
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


def test_reports_read_only_its_arrays():
    model = made()
    assert ta.summarize(model, RULES).rows
    labels = ta.to_flat_dict(ta.param_labels(model, RULES))
    assert labels["layers/0/weight"] == "frozen"
    assert np.isfinite([*ta.tree_norms(model, RULES).values()]).all()
    assert not ta.tree_diff(model, model, values=True)
