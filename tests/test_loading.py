"""Loading: comparison with the target, numbers, keys, casts and shards.

Formats, round trips and hostile files are in ``test_checkpoints.py``.
"""

from __future__ import annotations

import enum
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from command import run
from flax import nnx, serialization
from flax.training.train_state import TrainState
from marks import kinds_of
from test_checkpoints import ENDINGS, FORMATS, same, write

import treeadapt as ta
from treeadapt.checkpoints import locating, migrated, safetensors_file

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(params=FORMATS)
def file(request, tmp_path):
    """A name for a checkpoint in each writable format."""
    return tmp_path / f"model{ENDINGS[request.param]}"


# Each array is compared with the target once.


@pytest.mark.hazard("K25")
@pytest.mark.parametrize(
    "kind", [kind for kind in locating.FORMATS if kind not in ("schema", "torch")]
)
def test_content_that_contradicts_the_metadata_is_refused(kind, tmp_path, monkeypatch):
    path = tmp_path / ("x" if kind == "orbax" else f"x.{kind}")
    write(path, {"a": np.ones(2, np.float32)})
    for other in (np.ones(2, np.float16), np.ones(3, np.float32)):
        reader = SimpleNamespace(read=lambda *_, other=other: [other])
        monkeypatch.setattr(locating.FORMATS[kind], "read", reader.read)
        for target in ({"a": np.zeros(2, np.float32)}, None):
            with pytest.raises(ta.CheckpointError, match="metadata says that 'a' is"):
                ta.load(path, target)


def test_two_leaves_of_a_msgpack_file_with_one_path_are_refused(tmp_path):
    path = tmp_path / "x.msgpack"
    state = {"a/b": np.ones(2, np.float32), "a": {"b": np.zeros(2, np.float32)}}
    path.write_bytes(serialization.msgpack_serialize(state))
    for read in (ta.read_metadata, ta.load):
        with pytest.raises(ta.CheckpointError, match="two leaves are named 'a/b'"):
            read(path)


def test_pieces_of_another_dtype_are_compared_as_they_are_read(tmp_path):
    path = tmp_path / "x.msgpack"
    pieces = {"0": np.ones(2, np.float32), "1": np.ones(2, np.float64)}
    whole = {"__msgpack_chunked_array__": True, "shape": {"0": 4}, "chunks": pieces}
    path.write_bytes(serialization.msgpack_serialize({"a": whole}))
    report = ta.compare_checkpoint(path, {"a": np.zeros(4, np.float32)})
    assert report.retyped == {"a": ("float64[4]", "float32[4]")}


KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.mark.hazard("G6", "G19")
@pytest.mark.parametrize("there", KEYS)
@pytest.mark.parametrize("here", KEYS)
def test_a_key_of_one_kind_never_loads_as_another(here, there, file):
    saved = {"key": jax.random.key(3, impl=here), "w": np.ones(1)}
    ta.save(file, saved)
    target = {"key": jax.random.key(0, impl=there), "w": np.ones(1)}
    if here == there:
        same(ta.load(file, target), saved)
        same(ta.load(file), saved)
        return
    report = ta.compare_checkpoint(file, target)
    assert not report.fits
    assert here in str(report)
    for cast in (False, True):
        with pytest.raises(ta.CheckpointError, match=f"{here} key"):
            ta.load(file, target, cast=cast)
    with pytest.warns(ta.TreeAdaptWarning, match="and left as they are: 'key'"):
        assert ta.load(file, target, strict=False)["key"] is target["key"]


def test_a_key_that_orbax_wrote_keeps_its_kind(tmp_path):
    saved = {"a.b": {"key": jax.random.key(3, impl="rbg")}, "w": jnp.ones(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", saved)
    same(ta.load(tmp_path / "x", jax.tree.map(jnp.zeros_like, saved)), saved)
    saved["a.b"]["key"] = jax.random.key(3, impl="unsafe_rbg")
    with pytest.raises(ta.CheckpointError, match="a rbg key, the target has key<urbg>"):
        ta.load(tmp_path / "x", saved)


def test_a_key_is_not_an_array_of_integers_nor_the_reverse(file):
    ta.save(file, {"key": jax.random.key(3)})
    report = ta.compare_checkpoint(file, {"key": np.zeros(2, np.uint32)})
    assert report.retyped == {"key": ("a threefry2x32 key", "uint32[2]")}
    # Integers that other libraries store do not imply a kind of key.
    ta.save(file, {"key": jax.random.key_data(jax.random.key(3))})
    same(ta.load(file, {"key": jax.random.key(0)}), {"key": jax.random.key(3)})


def test_an_array_in_place_of_a_static_leaf_is_reported(file):
    ta.save(file, {"act": np.ones(2, np.float32)})
    report = ta.compare_checkpoint(file, {"act": jax.nn.relu})
    assert report.retyped == {"act": ("float32[2]", "a custom_jvp")}


@pytest.mark.hazard("K26")
def test_metadata_of_safetensors_makes_no_leaf(tmp_path):
    path = tmp_path / "x.safetensors"
    flat = {"pt": np.ones(2), "encoder": np.ones(1)}
    texts = {"format": "pt", "base_model": "encoder"}
    safetensors.numpy.save_file(flat, path, texts)
    assert set(ta.read_metadata(path)) == {"pt", "encoder"}
    same(ta.load(path, jax.tree.map(np.zeros_like, flat)), flat)


@pytest.mark.hazard("K26")
@pytest.mark.parametrize(
    "marks",
    [
        "{",
        '{"ties": {"b": "a", "b": "a"}, "kinds": {}}',
    ],
)
def test_damaged_marks_are_refused(marks, tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.ones(2)}, path, {"treeadapt": marks})
    with pytest.raises(ta.CheckpointError):
        ta.read_metadata(path)


@pytest.mark.hazard("K26")
@pytest.mark.parametrize(
    ("marks", "doubt"),
    [
        ('{"ties": {"b": "nothing"}, "kinds": {}}', "ties 'b' .* stores no 'nothing'"),
        ('{"ties": {"a": "a"}, "kinds": {}}', "ties 'a' .* stores 'a', too"),
        ('{"ties": {}, "kinds": {"a": "number"}}', "'a' in it is not a 'number'"),
        ('{"ties": {}, "kinds": {"a": "rbg"}}', "'a' in it is not a 'rbg'"),
        ('{"ties": {}, "kinds": {"nothing": "number"}}', "says that .* but lacks it"),
    ],
)
def test_marks_that_do_not_fit_make_no_leaf(marks, doubt, tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.ones(2)}, path, {"treeadapt": marks})
    with pytest.warns(ta.TreeAdaptWarning, match=doubt):
        same(ta.load(path), {"a": np.ones(2)})


def test_an_unknown_kind_of_key_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    marks = '{"ties": {}, "kinds": {"a": "my_own"}}'
    data = np.ones(2, np.uint32)
    safetensors.numpy.save_file({"a": data}, path, {"treeadapt": marks})
    with pytest.raises(ta.CheckpointError, match="my_own"):
        ta.load(path)
    with pytest.raises(ta.CheckpointError, match="my_own"):
        ta.load(path, {"a": data})


# Python numbers.


def trained(step):
    state = TrainState.create(
        apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.adam(1e-3)
    )
    for _ in range(step):
        state = state.apply_gradients(grads=state.params)
    return state


@pytest.mark.slow
@pytest.mark.hazard("G18")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("saved_as", [int, jnp.int32])
@pytest.mark.parametrize("resumed_as", [int, jnp.int32])
def test_a_train_state_resumes_at_its_step(saved_as, resumed_as, file):
    state = trained(5).replace(step=saved_as(5))
    ta.save(file, state)
    fresh = trained(0).replace(step=resumed_as(0))
    again = ta.load(file, fresh)
    assert again.step == 5
    assert type(again.step) is type(fresh.step)
    same(again.opt_state, state.opt_state)
    abstract = ta.load(file, jax.eval_shape(lambda: fresh))
    assert int(abstract.step) == 5


def test_numbers_are_marked_and_come_back_as_arrays_without_a_target(file):
    saved = {"step": 700, "rate": 0.1, "flag": True, "w": np.ones(2), "big": 2**62}
    ta.save(file, saved)
    again = ta.load(file)
    assert {k: (x.shape, x.dtype.name) for k, x in again.items() if k != "w"} == {
        "step": ((), "int64"),
        "rate": ((), "float64"),
        "flag": ((), "bool"),
        "big": ((), "int64"),
    }
    assert {k: x.item() for k, x in again.items() if k != "w"} == {
        "step": 700,
        "rate": 0.1,
        "flag": True,
        "big": 2**62,
    }
    assert set(kinds_of(file)) == {"step", "rate", "flag", "big"}
    loaded = ta.load(file, {**saved, "step": 0, "rate": 1.0, "flag": False, "big": 0})
    assert loaded.items() >= {"step": 700, "rate": 0.1, "flag": True}.items()
    assert all(type(loaded[name]) is type(saved[name]) for name in saved)


@pytest.mark.slow
def test_a_complex_number_goes_to_orbax(tmp_path):
    ta.save(tmp_path / "x", {"z": 1 + 2j})
    assert ta.load(tmp_path / "x", {"z": 0j}) == {"z": 1 + 2j}
    assert ta.load(tmp_path / "x", {"z": jnp.zeros((), jnp.complex64)})["z"] == 1 + 2j
    with pytest.raises(ta.CheckpointError, match="Orbax"):
        ta.save(tmp_path / "x.safetensors", {"z": 1j})


FITS = [
    (700, "int32", True),
    (700, "int8", False),
    (5, "uint8", True),
    (-1, "uint32", False),
    (0.5, "bfloat16", True),
    (0.1, "float32", False),
    (0.1, "float64", True),
    (math.nan, "float16", True),
    (1e300, "float32", False),
    (True, "bool", True),
    (True, "int32", False),
    (1, "bool", False),
    (1, "float32", False),
    (1.0, "int32", False),
]


@pytest.mark.parametrize(("number", "dtype", "fits"), FITS)
def test_a_number_fits_a_leaf_that_holds_it_exactly(number, dtype, fits, tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"n": number, "w": np.ones(1)})
    target = {"n": np.zeros((), jnp.dtype(dtype)), "w": np.zeros(1)}
    report = ta.compare_checkpoint(path, target)
    assert report.fits == fits
    if fits:
        found = ta.load(path, target)["n"]
        assert found.dtype == dtype
        assert found == number or math.isnan(number)
    else:
        assert str(number) in report.retyped["n"][0]
        with pytest.raises(ta.CheckpointError, match="'n': a number"):
            ta.load(path, target)


@pytest.mark.parametrize(
    ("array", "number", "fits"),
    [
        (np.int32(7), 0, True),
        (np.uint64(2**63), 0, True),
        (jnp.bfloat16(0.5), 0.0, True),
        (np.bool_(True), False, True),
        (np.bool_(True), 0, False),
        (np.int32(7), 0.0, False),
        (np.float32(7), 0, False),
        (np.ones(1, np.int32), 0, False),
    ],
)
def test_an_array_fits_a_number_of_its_kind(array, number, fits, tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"n": array})
    assert ta.compare_checkpoint(path, {"n": number}).fits == fits
    if fits:
        again = ta.load(path, {"n": number})["n"]
        assert again == array
        assert type(again) is type(number)


def test_a_file_without_a_number_leaves_that_of_the_target(file):
    ta.save(file, {"b": np.ones(2), "a": 1, "c": np.ones(1)})
    target = {"a": 0, "b": np.zeros(2), "c": np.ones(1), "step": 3, "act": jax.nn.relu}
    report = ta.compare_checkpoint(file, target)
    assert report.fits
    assert (report.restored, report.kept) == (("a", "b", "c"), ("act", "step"))
    assert ta.load(file, target)["step"] == 3


@pytest.mark.hazard("G18")
def test_the_report_lists_numbers_that_change(file):
    saved = {"step": 700, "rate": 0.1, "flag": True, "nan": math.nan, "zero": -0.0}
    ta.save(file, saved)
    target = {**saved, "step": 0, "flag": False, "zero": 0.0}
    report = ta.compare_checkpoint(file, target)
    assert report.numbers == {
        "step": (700, 0),
        "flag": (True, False),
        "zero": (-0.0, 0.0),
    }
    assert "3 numbers changed" in str(report)
    assert "'step': 700, the target has 0" in str(report)
    assert math.copysign(1, ta.load(file, target)["zero"]) == -1


class Mode(enum.Enum):
    TRAIN = 1


def test_static_leaves_that_cannot_be_saved_are_named(file):
    tree = {"w": np.ones(1), "name": "adam", "mode": Mode.TRAIN, "huge": 2**70}
    with pytest.warns(ta.TreeAdaptWarning) as caught:
        ta.save(file, {**tree, "step": 1, "act": jax.nn.relu, "cls": dict})
    assert "3 leaves cannot be saved" in str(caught[0].message)
    assert "'huge', 'mode', 'name'" in str(caught[0].message)
    assert set(ta.read_metadata(file)) == {"w", "step"}
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_numbers_of_other_libraries_are_numbers(tmp_path):
    state = {"step": 7, "w": np.ones(2), "rate": 0.1, "name": "adam", "none": None}
    (tmp_path / "x.msgpack").write_bytes(serialization.msgpack_serialize(state))
    del state["name"], state["none"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", state)
    for name in ("x.msgpack", "x"):
        assert set(kinds_of(tmp_path / name)) == {"step", "rate"}
        again = ta.load(tmp_path / name, {"step": 0, "w": np.zeros(2), "rate": 0.0})
        assert (again["step"], again["rate"]) == (7, 0.1)
        target = {"step": jnp.zeros((), jnp.int32), "w": np.zeros(2), "rate": 0.0}
        assert ta.load(tmp_path / name, target)["step"].dtype == jnp.int32


def test_a_number_beyond_64_bits_with_a_sign_is_copied(tmp_path):
    state = {"huge": 2**63, "step": 1}
    (tmp_path / "x.msgpack").write_bytes(serialization.msgpack_serialize(state))
    for name in ("y.safetensors", "y"):
        run("convert", tmp_path / "x.msgpack", tmp_path / name)
        assert ta.load(tmp_path / name, {"huge": 0, "step": 0}) == state


@pytest.mark.parametrize("there", FORMATS)
def test_numbers_and_keys_are_marked_in_a_copy(file, there, tmp_path):
    saved = {"step": 7, "key": jax.random.key(1, impl="rbg"), "w": np.ones(1)}
    ta.save(file, saved)
    run("convert", file, tmp_path / f"copy{ENDINGS[there]}")
    assert kinds_of(tmp_path / f"copy{ENDINGS[there]}") == {
        "step": "number",
        "key": "rbg",
    }


# Without a target, partly, and into other dtypes.


def test_a_checkpoint_without_a_target_is_nested_dicts(file):
    saved = {
        "layers": [{"w": np.ones(2)}, {"w": np.zeros(3, np.float16)}],
        "h.0.weight": np.ones(1, jnp.bfloat16),
        "key": jax.random.key(1, impl="rbg"),
    }
    ta.save(file, saved)
    again = ta.load(file)
    assert set(again) == {"layers", "h.0.weight", "key"}
    assert set(again["layers"]) == {"0", "1"}
    same(again, saved)
    assert type(again["layers"]["0"]["w"]) is np.ndarray


def test_a_bare_leaf_is_the_leaf(file):
    ta.save(file, np.arange(3))
    assert ta.load(file).tolist() == [0, 1, 2]


def test_ties_are_one_array_without_a_target(tmp_path):
    weight = jnp.ones(4)
    ta.save(tmp_path / "x.safetensors", {"z": weight, "a": {"w": weight}})
    again = ta.load(tmp_path / "x.safetensors")
    assert again["z"] is again["a"]["w"]


def test_a_leaf_above_others_does_not_fit_into_nested_dicts(file, monkeypatch):
    ta.save(file, {"a": np.ones(1), "a/b": np.ones(2), "c": np.ones(3)})
    assert set(ta.load(file, where="c")) == {"c"}
    assert ta.load(file, where="a/b")["a"]["b"].shape == (2,)
    monkeypatch.setattr(migrated, "read_arrays", None)
    with pytest.raises(
        ta.PathCollisionError, match=r"'a' next to 'a/b'.*read_metadata"
    ):
        ta.load(file)


@pytest.mark.slow
def test_where_chooses_what_is_saved(file):
    tree = {"encoder": [np.ones(1), np.ones(2)], "head": np.ones(3), "step": 4}
    ta.save(file, tree, where=["encoder", "step"])
    assert list(ta.load(file)) == ["encoder", "step"]
    ta.save(file, tree, where="step")
    assert ta.load(file)["step"] == 4
    with pytest.raises(ta.UnusedRuleError, match="hed"):
        ta.save(file, tree, where="hed")
    assert ta.load(file)["step"] == 4


def test_where_chooses_what_is_loaded_without_a_target(file):
    ta.save(file, {"layers": [np.ones(1), np.ones(2)], "head": np.ones(3)})
    assert list(ta.load(file, where="head")) == ["head"]
    assert ta.load(file, where="layers/{-1}")["layers"]["1"].shape == (2,)
    with pytest.raises(ta.UnusedRuleError, match="hed"):
        ta.load(file, where="hed")


def test_where_chooses_numbers_of_the_target(file):
    ta.save(file, {"step": 4, "epoch": 2})
    again = ta.load(file, {"step": 0, "epoch": 0}, where="step")
    assert again == {"step": 4, "epoch": 0}


CASTS = [
    (np.float32([0.1, 3]), "bfloat16", True),
    (np.array([0.1, 3], jnp.bfloat16), "float32", True),
    (np.float64([0.1, 3]), "float32", True),
    (np.int32([1, 2]), "float32", True),
    (np.bool_([True, False]), "int32", True),
    (np.int32([1, 2]), "int8", True),
    (np.int32([1, 300]), "int8", False),
    (np.float32([0.1, 1e30]), "float16", False),
    (np.float32([np.inf, np.nan]), "float16", True),
    (np.float32([1, 2]), "int32", False),
    (np.complex64([1, 2]), "float32", False),
    (np.uint8([200, 1]), "int8", False),
    (np.int32([-1, 1]), "uint32", False),
    (np.uint8([100, 1]), "int8", True),
    (np.float32([np.inf, 1]), "float8_e4m3fn", False),
    (np.float32([np.inf, 1]), "float8_e5m2", True),
    (np.int8([-128, 1]), "float4_e2m1fn", False),
    (np.float32([-6, 0.1]), "float4_e2m1fn", True),
    (np.int32([2**24, -(2**24)]), "float32", True),
    (np.int32([2**24 + 1, 1]), "float32", False),
    (np.int32([2**31 - 1, 1]), "float32", False),
    (np.int64([2**63 - 1, 1]), "float32", False),
    (np.uint64([2**64 - 1, 1]), "float16", False),
    (np.int64([2**53 + 1, 1]), "complex64", False),
    (np.int16([257, 1]), "bfloat16", False),
    (np.int8([5, 1]), "float4_e2m1fn", False),
    (np.int8([4, 1]), "float8_e8m0fnu", True),
    (np.int8([3, 1]), "float8_e8m0fnu", False),
    (np.bool_([False, True]), "float8_e8m0fnu", False),
    (np.float32([3, 0.5]), "float8_e8m0fnu", True),
    (np.float32([-1, 1]), "float8_e8m0fnu", False),
    (np.array([2, 1], jnp.float8_e8m0fnu), "float8_e4m3fn", True),
    (np.array([2**-100, 1], jnp.float8_e8m0fnu), "float8_e4m3fn", True),
    (np.array([2.0**100, 1], jnp.float8_e8m0fnu), "float8_e4m3fn", False),
    (np.array([4, 1], jnp.float8_e5m2), "float8_e8m0fnu", True),
]


@pytest.mark.parametrize(("array", "dtype", "fits"), CASTS)
def test_cast_gives_arrays_the_dtype_of_the_target(array, dtype, fits, tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"a": array})
    for zeros in (np.zeros, jnp.zeros):
        target = {"a": zeros(2, jnp.dtype(dtype))}
        with pytest.raises(ta.CheckpointError, match="'a'"):
            ta.load(path, target)
        if fits:
            again = ta.load(path, target, cast=True)["a"]
            assert again.dtype == dtype
            wide = array.astype(np.float32) if array.itemsize == 1 else array
            np.testing.assert_array_equal(np.asarray(again), wide.astype(dtype))
        else:
            with pytest.raises(ta.CheckpointError, match="'a'"):
                ta.load(path, target, cast=True)


@pytest.mark.parametrize("like", [0.0, 0j, np.float64(0), np.float32(0)])
def test_cast_keeps_the_value_of_an_integer(like, file):
    ta.save(file, {"w": np.ones(1), "step": 2**53 + 1})
    target = {"w": np.zeros(1), "step": like}
    report = ta.compare_checkpoint(file, target, cast=True)
    assert "int64[] 9007199254740993" in report.retyped["step"][0]
    with pytest.raises(
        ta.CheckpointError, match=r"'step': a number, int64.* 900719925"
    ):
        ta.load(file, target, cast=True)
    assert ta.load(file, target, cast=True, where="w")["step"] == like
    ta.save(file, {"w": np.ones(1), "step": 2**24})
    assert ta.load(file, target, cast=True)["step"] == 2**24


@pytest.mark.slow
def test_cast_of_a_number_may_round_and_not_become_infinite(file):
    ta.save(file, {"rate": 0.1})
    found = ta.load(file, {"rate": np.float32(0)}, cast=True)["rate"]
    assert found == np.float32(0.1)
    ta.save(file, {"rate": 1e60})
    assert ta.compare_checkpoint(file, {"rate": np.float32(0)}, cast=True).retyped
    with pytest.raises(ta.CheckpointError, match=r"'rate': a number, float64.* 1e"):
        ta.load(file, {"rate": np.float32(0)}, cast=True)


def test_cast_keeps_the_sharding_of_the_target(file):
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    ta.save(file, {"w": np.arange(8.0), "step": 3})
    target = {"w": jax.device_put(jnp.zeros(8), sharding), "step": jnp.zeros(())}
    with pytest.raises(ta.CheckpointError):
        ta.load(file, target)
    report = ta.compare_checkpoint(file, target, cast=True)
    assert report.fits
    again = ta.load(file, target, cast=True)
    assert again["w"].sharding == sharding
    assert again["w"].tolist() == list(range(8))
    assert again["step"] == 3


def test_64_bit_values_are_kept_where_jax_would_narrow_them(file):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ta.save(file, {"w": np.full(2, 0.1)})
    target = {"w": jax.ShapeDtypeStruct((2,), np.float64, sharding=sharding)}
    assert ta.load(file, target)["w"].tolist() == [0.1, 0.1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.safetensors", "x"])
def test_arrays_that_jax_may_move_stay_movable(tmp_path, name):
    tree = {"w": jnp.ones(8), "key": jax.random.key(0)}
    bound = jax.device_put(tree, jax.devices()[0])
    ta.save(tmp_path / name, tree)
    for target in (tree, bound):
        again = ta.load(tmp_path / name, target)
        for path in tree:
            assert again[path].committed == target[path].committed
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    batch = jax.device_put(jnp.ones(8), sharding)
    jax.jit(jnp.add)(ta.load(tmp_path / name, tree)["w"], batch)
    assert jax.eval_shape(
        lambda: ta.load(tmp_path / name, {**tree, "w": tree["w"] * 2})
    )


# Folders of safetensors shards.


def sharded(folder, shards, **changes):
    folder.mkdir()
    for name, flat in shards.items():
        safetensors.numpy.save_file(flat, folder / name, {"format": "pt"})
    table = {one: name for name, flat in shards.items() for one in flat}
    table |= changes
    document = {"metadata": {"total_size": 1}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


SHARDS = {
    "model-00001-of-00002.safetensors": {
        "h.0.weight": np.ones(2, np.float32),
        "h.1.weight": np.full(2, 2, np.float32),
    },
    "model-00002-of-00002.safetensors": {"h.0.bias": np.arange(3, dtype=np.float32)},
}


@pytest.mark.parametrize("rest", [{"c": np.ones(2)}, {}], ids=["leaf", "tie"])
def test_a_shard_cannot_tie_a_name_of_another_shard(tmp_path, rest):
    shards = {"1.safetensors": {"a": np.zeros(2)}, "2.safetensors": {"b": np.ones(2)}}
    shards["2.safetensors"] |= rest
    folder = sharded(tmp_path / "tied", shards)
    for (name, flat), one in zip(shards.items(), "ab", strict=True):
        if one == "a" or not rest:
            marks = json.dumps({"ties": {"c": one}, "kinds": {}})
            safetensors.numpy.save_file(flat, folder / name, {"treeadapt": marks})
    with pytest.raises(ta.CheckpointError, match="two leaves in it are named 'c'"):
        ta.load(folder)


def test_a_folder_of_shards_is_one_checkpoint(tmp_path):
    folder = sharded(tmp_path / "gpt", SHARDS)
    whole = {one: x for flat in SHARDS.values() for one, x in flat.items()}
    assert set(ta.read_metadata(folder)) == set(whole)
    same(ta.load(folder), whole)
    same(ta.load(folder, jax.tree.map(np.zeros_like, whole)), whole)
    assert list(ta.load(folder, where="h.0.bias")) == ["h.0.bias"]
    run("convert", folder, tmp_path / "one.safetensors")
    same(ta.load(tmp_path / "one.safetensors"), whole)
    with pytest.raises(ta.CheckpointError, match="folder"):
        ta.save(folder, whole)


FIRST = "model-00001-of-00002.safetensors"


@pytest.mark.hazard("K9", "K10", "K12", "K27")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"h.0.bias": "../secret.safetensors"}, "is not a file in it"),
        ({"h.0.bias": "/etc/passwd"}, "is not a file in it"),
        ({"h.0.bias": ".."}, "is not a file in it"),
        ({"h.0.bias": ""}, "is not a file in it"),
        ({"h.0.bias": "below/x.safetensors"}, "is not a file in it"),
        ({"h.0.bias": "nowhere.safetensors"}, "is not a file in it"),
        ({"h.0.bias": "gone.safetensors"}, "is not a file in it"),
        ({"h.0.bias": 3}, "gives no file for 'h.0.bias'"),
        ({"h.0.bias": FIRST}, "disagree .*'h.0.bias'"),
        ({"h.2.bias": FIRST}, "disagree .*'h.2.bias'"),
    ],
)
def test_a_wrong_index_is_an_error_before_any_array_is_read(
    changes, reason, tmp_path, monkeypatch
):
    secret = {"h.0.bias": np.arange(3, dtype=np.float32)}
    safetensors.numpy.save_file(secret, tmp_path / "secret.safetensors")
    folder = sharded(tmp_path / "gpt", SHARDS, **changes)
    (folder / "nowhere.safetensors").symlink_to(tmp_path / "nowhere.safetensors")
    (folder / "below").mkdir()
    safetensors.numpy.save_file(secret, folder / "below" / "x.safetensors")
    monkeypatch.setattr(safetensors_file, "read", None)
    for read in (ta.read_metadata, ta.load):
        with pytest.raises(ta.CheckpointError, match=reason):
            read(folder)


def test_a_tensor_missing_from_the_index_is_an_error(tmp_path):
    shards = {name: dict(flat) for name, flat in SHARDS.items()}
    folder = sharded(tmp_path / "gpt", shards)
    extra = {**SHARDS[FIRST], "h.9.weight": np.ones(1)}
    safetensors.numpy.save_file(extra, folder / FIRST)
    with pytest.raises(ta.CheckpointError, match=r"disagree .*'h\.9\.weight'"):
        ta.load(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        "[" * 100_000,
        '{"weight_map": {"a": "x", "a": "x"}}',
    ],
)
def test_a_damaged_index_is_a_short_error(text, tmp_path):
    folder = sharded(tmp_path / "gpt", SHARDS)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(folder)
    assert len(str(caught.value)) < 600


def test_where_selects_arrays_whose_layers_agree(tmp_path):
    table = {"blocks/{0..1}/w": "part", "**/b": "whole", "**": "rest"}
    rules = ta.Rules(table, stacks={"blocks": 0})
    part, whole = rules.where("part"), rules.where("whole")
    tree = {"blocks": {"w": np.ones((4, 3)), "b": np.ones(4)}, "b": np.ones(2)}
    blank = jax.tree.map(np.zeros_like, tree)
    file = tmp_path / "x.safetensors"
    ta.save(file, tree | {"other": np.ones(3)})
    wanted = ["b", "blocks/b"]
    found = ta.to_flat_dict(ta.load(file, blank, where=whole))
    assert [path for path, leaf in found.items() if leaf.any()] == wanted
    assert sorted(ta.compare_checkpoint(file, blank, where=whole).restored) == wanted
    doubled = ta.to_flat_dict(ta.map_where(lambda x: x * 2, tree, whole))
    assert [path for path, leaf in doubled.items() if 2 in leaf] == wanted
    for take in (
        lambda: ta.load(file, blank, where=part),
        lambda: ta.compare_checkpoint(file, blank, where=part),
        lambda: ta.save(tmp_path / "y.safetensors", tree, where=part),
        lambda: ta.map_where(lambda x: x * 2, tree, part),
    ):
        with pytest.raises(ta.StackError, match="'blocks/w' get different answers"):
            take()


def test_a_module_that_was_renamed_is_one_line_for_each_name_in_it(tmp_path):
    part = dict.fromkeys(("kernel", "bias"), np.ones(2))
    old = {"blocks": {str(n): part for n in range(4)}, "value_head": part}
    ta.save(tmp_path / "x.safetensors", old)
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(tmp_path / "x.safetensors", {"block": old["blocks"]})
    assert str(caught.value).splitlines()[3:10] == [
        "18 leaves do not fit the target: 8 missing, 10 unexpected.",
        "  missing 'block/{0..3}/bias' (stored is 'blocks/{0..3}/bias')",
        "  missing 'block/{0..3}/kernel' (stored is 'blocks/{0..3}/kernel')",
        "  unexpected 'blocks/{0..3}/bias' (the target has 'block/{0..3}/bias')",
        "  unexpected 'blocks/{0..3}/kernel' (the target has 'block/{0..3}/kernel')",
        "  unexpected 'value_head/bias'",
        "  unexpected 'value_head/kernel'",
    ]


# --- random state ---


class Dropped(nnx.Module):
    def __init__(self, seed, rate=0.1, layers=1):
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(2, 3, rngs=rngs)
        if rate:
            self.drops = nnx.List([nnx.Dropout(rate, rngs=rngs) for _ in range(layers)])


def random_paths(model):
    return {path for path in ta.to_flat_dict(model) if "rngs" in path}


@pytest.mark.parametrize("table", [None, {"up/{k}": "up/{k}"}])
def test_a_model_keeps_its_random_state_where_a_checkpoint_has_none(table, tmp_path):
    file, saved, model = tmp_path / "x.safetensors", Dropped(0, 0), Dropped(1)
    ta.save(file, saved)
    m = ta.Migration(table) if table else None
    paths = random_paths(model)
    assert paths
    report = ta.compare_checkpoint(file, model, migration=m)
    assert report.fits
    assert {*report.random} == paths <= {*report.kept}
    assert "No random state in the checkpoint; the target keeps 'drops/" in str(report)
    before = {path: str(ta.to_flat_dict(model)[path]) for path in paths}
    loaded = ta.load(file, model, migration=m)
    after = ta.to_flat_dict(loaded)
    assert {path: str(after[path]) for path in paths} == before
    np.testing.assert_array_equal(after["up/kernel"], saved.up.kernel[...])
    with pytest.raises(ta.CheckpointError if m is None else ta.MigrationError) as told:
        ta.load(file, nnx.eval_shape(lambda: Dropped(1)), migration=m)
    assert "load(path, model)" in str(told.value)


def test_a_part_of_the_random_state_is_missing_data(tmp_path):
    file = tmp_path / "x.safetensors"
    flat = ta.to_flat_dict(Dropped(0))
    count = next(path for path in flat if path.endswith("count"))
    ta.save(file, {path: leaf for path, leaf in flat.items() if path != count})
    with pytest.raises(ta.CheckpointError, match="missing"):
        ta.load(file, Dropped(1))


def test_other_missing_leaves_are_refused_next_to_random_state(tmp_path):
    ta.save(tmp_path / "x.safetensors", Dropped(0, 0), where="up/kernel")
    with pytest.raises(ta.CheckpointError, match="up/bias"):
        ta.load(tmp_path / "x.safetensors", Dropped(1))


def test_a_key_that_no_adapter_calls_random_state_is_data(tmp_path):
    ta.save(tmp_path / "x.safetensors", {"w": np.ones(2)})
    with pytest.raises(ta.CheckpointError, match="rng"):
        ta.load(tmp_path / "x.safetensors", {"w": np.ones(2), "rng": jax.random.key(0)})


def test_a_run_without_its_random_state_is_a_warning(tmp_path):
    ta.save(tmp_path / "x.safetensors", {"model": Dropped(0, 0), "step": 7})
    with pytest.warns(ta.TreeAdaptWarning, match="holds 'step' of a run and no random"):
        ta.load(tmp_path / "x.safetensors", {"model": Dropped(1), "step": 0})


def test_a_keras_model_keeps_its_seeds(tmp_path):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("of another backend")
    dense = keras.layers.Dense(2)
    dense.build((None, 3))
    saved = {v.path: np.asarray(v.value) for v in dense.variables}
    seeds = keras.random.SeedGenerator(3)
    ta.save(tmp_path / "x.safetensors", saved)
    target = {**{v.path: v for v in dense.variables}, "seed": seeds.state}
    report = ta.compare_checkpoint(tmp_path / "x.safetensors", target)
    assert report.random == ("seed",)
    assert report.fits
