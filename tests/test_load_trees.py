"""``load`` of a tree in memory: what fits is taken, with the report of files."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import treeadapt as ta

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def equal(found, wanted):
    assert not ta.tree_diff(found, wanted, values=True)


def tree(seed=0):
    random = np.random.default_rng(seed)
    arrays = {"w": random.normal(size=(8, 4)), "b": random.normal(size=4)}
    return {"enc": {k: v.astype("f4") for k, v in arrays.items()}, "step": 7 + seed}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("where", ["**", "enc"])
def test_a_tree_is_loaded_as_its_file_would_be(tmp_path, strict, where):
    ta.save(tmp_path / "x.safetensors", tree())
    target = tree(1)
    options = {"strict": strict, "where": where}
    equal(
        ta.load(tree(), target, **options),
        ta.load(tmp_path / "x.safetensors", target, **options),
    )
    assert ta.compare_checkpoint(tree(), target) == ta.compare_checkpoint(
        tmp_path / "x.safetensors", target
    )


def test_what_fits_is_taken_and_the_rest_is_listed():
    source = tree() | {"head": np.ones(3, np.float32)}
    target = tree(1) | {"head": np.zeros(5, np.float32), "new": np.zeros(2)}
    with pytest.warns(ta.TreeAdaptWarning, match="Not loaded from the tree") as caught:
        found = ta.load(source, target, strict=False)
    equal(found["enc"], source["enc"])
    assert found["head"] is target["head"]
    assert "'head': float32[3], the target has float32[5]" in str(caught[0].message)
    with pytest.raises(ta.CheckpointError, match=r"^The tree does not fit the target"):
        ta.load(source, target)


def test_without_a_target_it_is_nested_dicts():
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    found = ta.load({"layers": [model, jax.random.key(3)], "f": jnp.tanh})
    assert found["layers"]["0"]["weight"] is model.weight
    equal(found["layers"]["1"], jax.random.key(3))
    assert [*found] == ["layers"]


@pytest.mark.slow
def test_any_classes_are_taken_by_name():
    one, two = (eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(n)) for n in (0, 1))
    flat = ta.to_flat_dict(ta.split(one)[0])
    equal(ta.load(flat, two), one)
    equal(ta.load(one, two), one)
    equal(ta.load(jax.tree.map(np.asarray, flat), two), one)


def test_arrays_of_jax_go_from_device_to_device(monkeypatch):
    sharding = NamedSharding(MESH, P("data", "model"))
    source = {"w": jax.device_put(np.arange(32.0, dtype="f4").reshape(8, 4), sharding)}
    turned = NamedSharding(MESH, P("model", "data"))
    like = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=turned)
    other = jax.ShapeDtypeStruct((4, 8), np.float32, sharding=turned)
    m = ta.Migration({"w : a b": "v : b a"})
    host = np.asarray(source["w"])

    def refuse(*_):
        raise AssertionError("over the host")

    with monkeypatch.context() as patch:
        patch.setattr(type(source["w"]), "__array__", refuse)
        found = ta.load(source, {"w": like})["w"]
        moved = ta.load(source, {"v": other}, migration=m)["v"]
        as_is = ta.load(source, {"w": jax.ShapeDtypeStruct((8, 4), np.float32)})["w"]
    assert as_is is source["w"]
    assert found.sharding == moved.sharding == turned
    np.testing.assert_array_equal(np.asarray(found), host)
    np.testing.assert_array_equal(np.asarray(moved), host.T)


def test_arrays_of_numpy_are_not_shared_with_jax():
    source = {"w": np.zeros(2**16, np.float32)}
    for m in (None, ta.Migration({"w : a": "w : a"})):
        found = ta.load(source, {"w": jnp.ones(2**16)}, migration=m)["w"]
        source["w"][:] = 5
        assert not np.asarray(found).any()
        source["w"][:] = 0


def test_dtypes_are_cast_if_asked():
    target = {"w": jnp.zeros(3, jnp.bfloat16), "v": np.zeros(3, np.float16)}
    source = {"w": jnp.arange(3.0), "v": jnp.arange(3.0)}
    with pytest.raises(ta.CheckpointError, match="cast=True"):
        ta.load(source, target)
    found = ta.load(source, target, cast=True)
    assert found["w"].dtype == jnp.bfloat16
    assert isinstance(found["v"], np.ndarray)
    with pytest.raises(ta.CheckpointError, match="'v' holds values"):
        ta.load(source | {"v": jnp.full(3, 1e30)}, target, cast=True)


@pytest.mark.slow
def test_migrations_lists_and_chains_take_trees():
    flat = {f"h.{n}.w": np.arange(3, dtype="f4") + n for n in range(4)}
    a = ta.Migration({"h.{n}.w : e": "{n} : e"})
    b = ta.Migration({"{n} : e": "w : n e"})
    want = b(a(flat))
    for source in (flat, jax.tree.map(jnp.asarray, flat)):
        target = jax.tree.map(lambda x: np.zeros_like(x), b(a(source)))
        equal(ta.load(source, target, migration=[a, a.then(b)]), target | want)
        equal(ta.load(source, migration=a.then(b)), want)
    with pytest.raises(ta.MigrationError, match="No migration of 2 fits the tree"):
        ta.load(flat, want, migration=[a, b])


def test_abstract_trees_are_as_schemas():
    shapes = jax.eval_shape(lambda: {"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
    assert ta.compare_checkpoint(shapes, {"w": np.ones((2, 3), "f4")}).unexpected
    assert ta.load(shapes) == shapes
    m = ta.Migration({"w : a b": "w : b a", "b": "b"})
    assert ta.load(shapes, migration=m)["w"].shape == (3, 2)
    with pytest.raises(ta.CheckpointError, match="The tree has shapes and no arrays"):
        ta.load(shapes, {"w": np.ones((2, 3)), "b": np.ones(3)})


@pytest.mark.parametrize("source", [None, {}, jnp.tanh, [None], object()])
def test_what_holds_nothing_is_refused(source):
    with pytest.raises(ta.TreeAdaptError, match=r"comes first|no adapter|object"):
        ta.load(source, {"w": np.ones(2)})


def test_a_name_comes_first():
    with pytest.raises(
        ta.CheckpointError, match="The name of a checkpoint comes first"
    ):
        ta.load({"w": np.ones(2)}, "model.safetensors")
