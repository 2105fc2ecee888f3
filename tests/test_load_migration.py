"""Loading through a migration: new names and axes while a checkpoint is read."""

from __future__ import annotations

import json
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx, serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import kinds_of
from sizes import full
from test_checkpoints import ENDINGS, FORMATS, same, tree, write
from test_migration_properties import migration as migration_of
from test_migration_properties import tables

import treeadapt as ta
from treeadapt.checkpoints import migrated, save_load
from treeadapt.trees import arrays

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

LAYERS, WIDTH, HEADS, GROUPS, DIM, HIDDEN, WORDS = 3, 10, 5, 1, 2, 7, 11
LLAMA = {
    "model.embed_tokens.weight": "embed",
    "model.layers.{l}.self_attn.q_proj.weight : (h d) e": "blocks/q : l e h d",
    (
        "model.layers.{l}.self_attn.k_proj.weight : (k d) e",
        "model.layers.{l}.self_attn.v_proj.weight : (k d) e",
    ): "blocks/kv : l e [(k d) (k d)]",
    "model.layers.{l}.self_attn.o_proj.weight : e (h d)": "blocks/o : l h d e",
    "model.layers.{l}.mlp.{p=gate,up}_proj.weight : f e": "blocks/wi : l e p f",
    "model.layers.{l}.mlp.down_proj.weight : e f": "blocks/wo : l f e",
    "model.layers.{l}.input_layernorm.weight : e": "blocks/norm : l e",
    "lm_head.weight : v e": "head : e v",
}
SIZES = {"d": DIM, "k": GROUPS}


def migration(extra=(), **options):
    return ta.Migration(LLAMA | dict(extra), sizes=SIZES, **options)


def llama(dtype=np.float32):
    """The leaves of a small Llama under the names of its publisher."""
    rng = np.random.default_rng(0)
    block = {
        "self_attn.q_proj": (HEADS * DIM, WIDTH),
        "self_attn.k_proj": (GROUPS * DIM, WIDTH),
        "self_attn.v_proj": (GROUPS * DIM, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * DIM),
        "mlp.gate_proj": (HIDDEN, WIDTH),
        "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN),
        "input_layernorm": (WIDTH,),
    }
    shapes = {"model.embed_tokens": (WORDS, WIDTH), "lm_head": (WORDS, WIDTH)}
    for n in range(LAYERS):
        shapes |= {f"model.layers.{n}.{name}": s for name, s in block.items()}
    return {
        f"{name}.weight": rng.normal(size=shape).astype(dtype)
        for name, shape in shapes.items()
    }


def scanned(flat):
    """The same numbers as the scanned model has them, made without the library."""

    def stack(name):
        return np.stack(
            [flat[f"model.layers.{n}.{name}.weight"] for n in range(LAYERS)]
        )

    def heads(name):
        return np.moveaxis(stack(f"self_attn.{name}_proj"), 2, 1)

    wi = np.stack([stack("mlp.gate_proj"), stack("mlp.up_proj")], 1)
    return {
        "embed": flat["model.embed_tokens.weight"],
        "blocks": {
            "q": heads("q").reshape(LAYERS, WIDTH, HEADS, DIM),
            "kv": np.concatenate([heads("k"), heads("v")], 2),
            "o": heads("o").reshape(LAYERS, HEADS, DIM, WIDTH),
            "wi": np.transpose(wi, (0, 3, 1, 2)),
            "wo": np.moveaxis(stack("mlp.down_proj"), 2, 1),
            "norm": stack("input_layernorm"),
        },
        "head": flat["lm_head.weight"].T,
    }


class Blocks(eqx.Module):
    q: jax.Array
    kv: jax.Array
    o: jax.Array
    wi: jax.Array
    wo: jax.Array
    norm: jax.Array
    activation: object = jax.nn.silu


class EquinoxModel(eqx.Module):
    embed: jax.Array
    blocks: Blocks
    head: jax.Array


class NnxBlocks(nnx.Module):
    def __init__(self, leaves):
        for name, leaf in leaves.items():
            setattr(self, name, nnx.Param(leaf))


class NnxModel(nnx.Module):
    def __init__(self, tree):
        self.embed, self.head = nnx.Param(tree["embed"]), nnx.Param(tree["head"])
        self.blocks = NnxBlocks(tree["blocks"])


def equinox_model(tree):
    return EquinoxModel(tree["embed"], Blocks(**tree["blocks"]), tree["head"])


MODELS = {"plain": dict, "equinox": equinox_model, "nnx": NnxModel}


def shards(path, flat):
    """Write a folder of two shards with their index, as Hugging Face does."""
    path.mkdir()
    names = [*flat]
    table = {}
    for place, part in enumerate((names[::2], names[1::2])):
        shard = f"model-{place}.safetensors"
        safetensors.numpy.save_file({n: flat[n] for n in part}, path / shard)
        table |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": table}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def msgpack(path, flat):
    path.write_bytes(serialization.msgpack_serialize(flat))


def orbax(path, flat):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, flat)


WRITERS = {
    "x.safetensors": ta.save,
    "ours": ta.save,
    "shards": shards,
    "x.npz": lambda path, flat: np.savez(path, **flat),
    "x.msgpack": msgpack,
    "theirs": orbax,
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, llama())
    return path


@pytest.fixture(params=FORMATS)
def place(request, tmp_path):
    """A name for a checkpoint in each format that is written."""
    return tmp_path / f"model{ENDINGS[request.param]}"


def zeros_of(tree, module=jnp):
    return jax.tree.map(lambda x: module.zeros(x.shape, x.dtype), tree)


# What is loaded.


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_read_through_a_table(name, tmp_path):
    WRITERS[name](tmp_path / name, llama())
    want = scanned(llama())
    same(ta.load(tmp_path / name, migration=migration()), want)
    same(ta.load(tmp_path / name, zeros_of(want), migration=migration()), want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_published_model_comes_into_other_classes_and_back(kind, file, tmp_path):
    want = scanned(llama())
    target = MODELS[kind](zeros_of(want))
    model = ta.load(file, target, migration=migration())
    assert type(model) is type(target)
    leaves = ta.to_flat_dict(model)
    assert leaves.pop("blocks/activation", jax.nn.silu) is jax.nn.silu
    same(leaves, want)
    ta.save(tmp_path / "back.safetensors", model)
    back = ta.load(
        tmp_path / "back.safetensors", llama(), migration=migration().inverse
    )
    same(back, llama())
    assert all(isinstance(leaf, np.ndarray) for leaf in back.values())


@pytest.mark.slow
@pytest.mark.parametrize("there", FORMATS)
def test_a_copy_has_the_new_names_and_axes(there, place, tmp_path):
    path, seen = tmp_path / f"copy{ENDINGS[there]}", []
    ta.save(place, llama() | {"step": 7, "rng": jax.random.key(1)})
    rows = {"step": "count", "rng": ("rng", "again")}
    save_load.copy(place, path, migration=migration(rows), progress=seen.append)
    want = scanned(llama()) | {"count": np.int64(7)}
    want |= dict.fromkeys(("rng", "again"), jax.random.key(1))
    same(ta.load(path), want)
    assert kinds_of(path)["count"] == "number"
    assert {*seen} | {"again"} == {*ta.read_metadata(path)}
    with pytest.raises(ta.MigrationError, match="no row takes"):
        save_load.copy(path, tmp_path / "more", migration=migration())
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("name", ["x.pkl", "x.npz", "folder", "no/x"])
def test_no_leaf_is_read_if_the_copy_must_not_be_written(name, tmp_path):
    (tmp_path / "folder").mkdir()
    ta.save(tmp_path / "one.safetensors", tree())
    seen = []
    with pytest.raises(ta.CheckpointError):
        save_load.copy(
            tmp_path / "one.safetensors", tmp_path / name, progress=seen.append
        )
    assert seen == []


@pytest.mark.slow
def test_loading_is_the_same_as_migrating_what_was_loaded(file):
    want = migration()(ta.load(file))
    found = ta.to_flat_dict(ta.load(file, migration=migration()))
    assert found.keys() == want.keys()
    same(found, want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The row .* takes .* are left out")
@settings(max_examples=full(400, 10))  # each writes two files
@given(tables(), st.data())
def test_any_table_loads_what_it_makes_of_the_leaves(tmp_path_factory, row, data):
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    m = migration_of(row)
    ta.save(path, row.before)
    kinds = st.sampled_from([np.zeros, jax.ShapeDtypeStruct])
    target = {
        name: data.draw(kinds)(leaf.shape, leaf.dtype)
        for name, leaf in sorted(row.after.items())
    }
    arrays = st.sampled_from([np.asarray, jnp.asarray])
    target |= {name: data.draw(arrays)(row.like[name]) for name in sorted(row.like)}
    found = ta.load(path, target, migration=m)
    same(found, row.after)
    for name, leaf in target.items():
        is_host = isinstance(leaf, np.ndarray)
        assert isinstance(found[name], np.ndarray if is_host else jax.Array)
    part = data.draw(st.sampled_from(sorted(target)))
    found = ta.load(path, target, where=ta.escape(part), migration=m)
    same(found[part], row.after[part])
    assert all(found[name] is target[name] for name in target if name != part)
    if not row.products:
        ta.save(path, row.after)
        original = row.before | row.past
        same(ta.load(path, original, migration=m.inverse), row.before)


def test_8_bit_and_bfloat16_arrays_stay_bit_by_bit(tmp_path):
    flat = {
        f"h.{n}.w": np.array([[n, -0.0], [np.nan, 1]], ml_dtypes.bfloat16)
        for n in range(2)
    }
    flat["f8"] = np.array([[0.5, -1], [2, np.nan]], ml_dtypes.float8_e4m3fn)
    ta.save(tmp_path / "x.safetensors", flat)
    table = {"h.{n}.w : a b": "w : b n a", "f8 : a b": "f8 : b a"}
    found = ta.load(tmp_path / "x.safetensors", migration=ta.Migration(table))
    w = np.stack([flat["h.0.w"], flat["h.1.w"]]).transpose(2, 0, 1)
    assert found["w"].tobytes() == w.tobytes()
    assert found["f8"].dtype == ml_dtypes.float8_e4m3fn
    assert found["f8"].tobytes() == flat["f8"].T.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_results_go_to_the_shardings_of_the_target(place, axis):
    mesh = jax.make_mesh((8,), ("x",))
    spec = jax.sharding.PartitionSpec(*[None, None][:axis], "x")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    flat = {f"h.{n}": np.arange(16.0, dtype=np.float32) + n for n in range(8)}
    flat |= {"same": np.arange(64.0, dtype=np.float32).reshape(8, 8)}
    ta.save(place, flat)
    table = {"h.{n} : (a b)": "h : n a b", "same": "same"}
    m = ta.Migration(table, sizes={"a": 8})
    target = {
        "h": jax.ShapeDtypeStruct((8, 8, 2), np.float32, sharding=sharding),
        "same": jax.device_put(jnp.zeros((8, 8)), sharding),
    }
    found = ta.load(place, target, migration=m)
    assert {leaf.sharding for leaf in found.values()} == {sharding}
    whole = np.stack([flat[f"h.{n}"] for n in range(8)])
    np.testing.assert_array_equal(found["h"], whole.reshape(8, 8, 2))
    np.testing.assert_array_equal(found["same"], flat["same"])


def test_one_stored_leaf_goes_to_two_homes(place):
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    ta.save(place, {"w": np.arange(8.0, dtype=np.float32)})
    target = {
        "host": np.zeros(8, np.float32),
        "spread": jax.device_put(jnp.zeros(8), sharding),
    }
    found = ta.load(place, target, migration=ta.Migration({"w": ("host", "spread")}))
    assert isinstance(found["host"], np.ndarray)
    assert found["spread"].sharding == sharding
    same(found["host"], found["spread"])


@pytest.mark.slow
def test_cast_works_after_the_migration(file):
    want = scanned(llama())
    target = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), want)
    with pytest.raises(ta.MigrationError, match=r"'blocks/q' is made of .* by the row"):
        ta.load(file, target, migration=migration())
    with pytest.raises(ta.MigrationError, match="pass cast=True to convert dtypes, ch"):
        ta.load(file, target, migration=migration())
    found = ta.load(file, target, migration=migration(), cast=True)
    same(found, jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), want))


def test_operations_of_rows_are_undone_on_the_way_back(tmp_path):
    flat = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3)}
    m = ta.Migration({"w : a b": ("v : b a", {"scale": 2, "pad": {"a": (0, 2)}})})
    ta.save(tmp_path / "x.safetensors", flat)
    found = ta.load(tmp_path / "x.safetensors", migration=m)
    assert found["v"].tolist() == [[0, 6, 0, 0], [2, 8, 0, 0], [4, 10, 0, 0]]
    ta.save(tmp_path / "y.safetensors", found)
    same(ta.load(tmp_path / "y.safetensors", flat, migration=m.inverse), flat)


# Numbers, keys and ties.


@pytest.mark.slow
def test_a_number_passes_through_a_row_without_axes(place):
    ta.save(place, {"step": 700, "w": np.ones(2)})
    m = ta.Migration({"step": "count", "w": "w"})
    target = {"count": 0, "w": np.zeros(2)}
    assert ta.load(place, target, migration=m)["count"] == 700
    assert ta.compare_checkpoint(place, target, migration=m).numbers == {
        "count": (700, 0)
    }
    array = ta.load(place, target | {"count": jnp.zeros((), jnp.int32)}, migration=m)
    assert array["count"].dtype == jnp.int32
    assert ta.load(place, migration=m)["count"].dtype == np.int64
    with pytest.raises(ta.MigrationError, match="'step' is a Python number"):
        ta.load(place, migration=ta.Migration({"step : ": "count : ", "w": "w"}))
    with pytest.raises(ta.MigrationError, match=r"'count': a number, int64\[\] 700"):
        ta.load(place, target | {"count": jnp.zeros((), jnp.int8)}, migration=m)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_have_the_axes_that_the_model_sees(impl, place):
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    saved = {f"h.{n}.rng": keys[n] for n in range(4)} | {"rng": keys}
    ta.save(place, saved)
    m = ta.Migration(
        {"h.{n}.rng : ": "h : n", "rng : (a b)": "grid : b a"}, sizes={"a": 2}
    )
    want = {"h": keys, "grid": keys.reshape(2, 2).T}
    same(ta.load(place, zeros_of(want), migration=m), want)
    same(ta.load(place, jax.eval_shape(lambda: want), migration=m), want)
    same(ta.load(place, migration=ta.Migration({"{x:**}": "{x}"})), saved)
    ta.save(place, want)
    same(ta.load(place, saved, migration=m.inverse), saved)
    other = {"h": jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 4)}
    with pytest.raises(ta.MigrationError, match=f"'h': a {impl} key"):
        ta.load(place, other, migration=ta.Migration({"h": "h", "grid": None}))


def test_targets_of_one_row_share_one_array_if_they_do_in_the_target(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"wte": np.ones((2, 3)), "lm": np.ones((4, 5))})
    rows = {
        "wte": ("embed", "head"),
        "lm : v e": ("a : e v", "b : e v", "c : v e"),
    }
    shapes = {"embed": (2, 3), "head": (2, 3), "a": (5, 4), "b": (5, 4), "c": (4, 5)}
    for module in (np, jnp):
        apart = {name: module.zeros(shape) for name, shape in shapes.items()}
        tied = {**apart, "head": apart["embed"], "b": apart["a"]}
        for target in (tied, jax.eval_shape(lambda tree: tree, tied)):
            found = ta.load(path, target, migration=ta.Migration(rows), cast=True)
            assert found["embed"] is found["head"]
            assert found["a"] is found["b"]
            assert found["a"] is not found["c"]
        found = ta.load(path, apart, migration=ta.Migration(rows), cast=True)
        assert found["embed"] is not found["head"]
        assert not np.shares_memory(found["a"], found["b"])
    target = {**apart, "head": np.zeros((2, 3))}
    found = ta.load(path, target, migration=ta.Migration(rows), cast=True)
    assert isinstance(found["head"], np.ndarray)
    assert isinstance(found["embed"], jax.Array)


def test_tied_leaves_may_move_by_rows_of_their_own(tmp_path):
    path, weight = tmp_path / "x.safetensors", jnp.arange(6.0).reshape(2, 3)
    ta.save(path, {"a": weight, "b": weight, "c": weight, "d": weight})
    rows = {"a": "one", "b : x y": "two : y x", "c": "three", "d : x y": "four : y x"}
    found = ta.load(path, migration=ta.Migration(rows))
    same(found, {"one": weight, "three": weight, "two": weight.T, "four": weight.T})
    assert found["one"] is found["three"]
    assert found["two"] is found["four"]


def test_parts_of_one_array_are_not_tied(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"qkv": np.arange(6.0)})
    found = ta.load(
        path, migration=ta.Migration({"qkv : [a a a]": ("q : a", "k : a", "v : a")})
    )
    assert {name: x.tolist() for name, x in found.items()} == {
        "q": [0, 1],
        "k": [2, 3],
        "v": [4, 5],
    }


# Which leaves are loaded.


def reads(monkeypatch):
    """Return a list that will hold the paths of the leaves that are read."""
    seen = []
    read = migrated.read_arrays

    def spy(stored, wanted):
        for path, array in read(stored, wanted):
            seen.append(path)
            yield path, array

    monkeypatch.setattr(migrated, "read_arrays", spy)
    return seen


def test_where_selects_new_names_and_only_their_sources_are_read(file, monkeypatch):
    seen = reads(monkeypatch)
    target = {**zeros_of(scanned(llama())), "embed": jnp.ones(1)}
    found = ta.load(file, target, where="blocks/wi", migration=migration())
    same(found["blocks"]["wi"], scanned(llama())["blocks"]["wi"])
    assert found["embed"] is target["embed"]
    assert len(seen) == 2 * LAYERS
    assert all(path.split(".")[4] in ("gate_proj", "up_proj") for path in seen)
    part = ta.load(file, where="blocks/{wo,norm}", migration=migration())
    assert {*part} == {"blocks"}
    assert {*part["blocks"]} == {"wo", "norm"}
    with pytest.raises(ta.UnusedRuleError, match=r"lm_head\.weight"):
        ta.load(file, where="lm_head.weight", migration=migration())


def test_a_part_of_a_group_does_not_keep_the_rest_in_memory(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"h": np.arange(12.0).reshape(4, 3)})
    m = ta.Migration({"h : n e": "h/{n} : e"})
    one = ta.load(path, where="h/2", migration=m)["h"]["2"]
    assert one.tolist() == [6, 7, 8]
    assert one.base is None or one.base.nbytes < 12 * 8


@pytest.mark.slow
@pytest.mark.parametrize("in_numpy", [True, False])
def test_new_leaves_may_be_ones(file, in_numpy):
    want = scanned(llama())
    scale = np.zeros(2, np.float16) if in_numpy else jnp.zeros(2, jnp.bfloat16)
    m = migration(new={"scale": "ones"})
    found = ta.load(file, zeros_of(want) | {"scale": scale}, migration=m)
    assert found["scale"].dtype == scale.dtype
    assert found["scale"].tolist() == [1.0, 1.0]
    made = m(ta.load(file), zeros_of(want) | {"scale": scale})
    assert made["scale"].tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_new_leaves_come_from_the_target(file):
    want = scanned(llama())
    target = zeros_of(want) | {"bias": jnp.ones(3), "rng": jax.random.key(1)}
    target |= {"scale": jnp.ones(2, jnp.bfloat16), "host": np.ones(1)}
    m = migration(
        new={"bias": "target", "scale": "zeros", "host": "zeros", "rng": "target"}
    )
    found = ta.load(file, target, migration=m)
    same(found["blocks"], want["blocks"])
    assert found["bias"] is target["bias"]
    assert found["rng"] is target["rng"]
    same(
        {k: found[k] for k in ("scale", "host")},
        {"scale": jnp.zeros(2, jnp.bfloat16), "host": np.zeros(1)},
    )
    assert isinstance(found["host"], np.ndarray)
    report = ta.compare_checkpoint(file, target, migration=m)
    assert report.fits
    assert report.kept == ("bias", "rng")
    abstract = jax.eval_shape(lambda: target)
    with pytest.raises(ta.MigrationError, match=r"values are kept.*\n.*'bias'"):
        ta.load(file, abstract, migration=m)
    with pytest.raises(ta.MigrationError, match="Pass one"):
        ta.load(file, migration=m)


@pytest.mark.slow
def test_without_strict_the_target_keeps_what_does_not_fit(file, monkeypatch):
    target = zeros_of(scanned(llama())) | {"more": jnp.ones(2)}
    target["head"] = jnp.ones(5)
    del target["embed"]
    with pytest.warns(
        ta.TreeAdaptWarning, match="and left as they are: 'more', 'head'"
    ):
        found = ta.load(file, target, migration=migration(), strict=False)
    assert found["more"] is target["more"]
    assert found["head"] is target["head"]
    same(found["blocks"], scanned(llama())["blocks"])
    report = ta.compare_checkpoint(file, target, migration=migration())
    assert (report.missing, report.unexpected) == (("more",), ("embed",))
    assert report.misshaped == {"head": (f"float32[{WIDTH},{WORDS}]", "float32[5]")}
    # A leaf without a row would be lost in silence.
    rows = {row: address for row, address in LLAMA.items() if "lm_head" not in row}
    monkeypatch.setattr(migrated, "read_arrays", None)
    with pytest.raises(ta.MigrationError, match=r"no row takes\n  'lm_head\.weight'"):
        ta.load(file, target, migration=ta.Migration(rows, sizes=SIZES), strict=False)


# Several layouts of one model.

FLAT = {f"h.{n}.w": np.full((2, 3), n, np.float32) for n in range(3)}
UNROLLED = ta.Migration({"h.{n}.w : i o": "blocks/w : n o i"})
SCANNED = ta.Migration({"blocks.w : n i o": "blocks/w : n o i"})
STACKED = {"blocks.w": np.stack([*FLAT.values()])}
TARGET = {"blocks": {"w": jnp.zeros((3, 3, 2))}}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize(("leaves", "place"), [(FLAT, 0), (STACKED, 1)])
def test_of_several_migrations_the_one_that_fits_is_taken(
    tmp_path, ending, leaves, place
):
    path = tmp_path / f"x{ending}"
    write(path, leaves)
    for target in (TARGET, None):
        found = ta.load(path, target, migration=[UNROLLED, SCANNED])
        same(found["blocks"]["w"], np.stack([leaf.T for leaf in FLAT.values()]))
    report = ta.compare_checkpoint(path, TARGET, migration=(UNROLLED, SCANNED))
    assert report.fits
    assert report.migration == place
    assert f"by migration[{place}], which alone fits" in str(report)


def test_if_no_migration_fits_the_error_says_how_each_misses(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"blocks.w": np.ones((4, 2, 3)), "bias": np.ones(2)})
    monkeypatch.setattr(migrated, "read_arrays", None)
    for call in (ta.load, ta.compare_checkpoint):
        with pytest.raises(ta.MigrationError) as caught:
            call(path, TARGET, migration=[UNROLLED, SCANNED])
        text = str(caught.value)
        assert "No migration of 2 fits" in text
        first, second = text.split("migration[1] does not:")
        assert "'h.{n}.w : i o'" in first
        assert "no row takes" in second
        assert "'bias'" in second


def test_a_target_decides_between_migrations_whose_rows_both_fit(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, FLAT)
    other = ta.Migration({"h.{n}.w : i o": "blocks/w : n i o"})
    found = ta.load(path, TARGET, migration=[other, UNROLLED])
    same(found["blocks"]["w"], np.stack([leaf.T for leaf in FLAT.values()]))
    # Without one, and where only the rows must fit, both do.
    for options in ({}, {"target": TARGET, "strict": False}):
        with pytest.raises(
            ta.MigrationError, match=r"migration\[0\], migration\[1\] fit"
        ):
            ta.load(path, migration=[other, UNROLLED], **options)


def test_none_among_migrations_is_what_is_stored_as_it_is(tmp_path):
    path = tmp_path / "x.safetensors"
    for leaves, place in (({"blocks/w": jnp.ones((3, 3, 2))}, 0), (FLAT, 1)):
        ta.save(path, leaves)
        report = ta.compare_checkpoint(path, TARGET, migration=[None, UNROLLED])
        assert report.migration == place
        ta.load(path, TARGET, migration=[None, UNROLLED])
    assert ta.compare_checkpoint(path, TARGET, migration=UNROLLED).migration is None


@pytest.mark.parametrize("migrations", [[], [UNROLLED, {"a": "b"}], {"a": "b"}])
def test_what_is_not_a_list_of_migrations_is_an_error(tmp_path, migrations):
    ta.save(tmp_path / "x.safetensors", FLAT)
    with pytest.raises(ta.MigrationError, match=r"Expected migration=|of 0 fits"):
        ta.load(tmp_path / "x.safetensors", TARGET, migration=migrations)


def test_a_draft_is_not_a_migration_but_has_one(tmp_path):
    ta.save(tmp_path / "x.safetensors", {"a": jnp.ones(2)})
    draft = ta.draft_migration({"a": jnp.ones(2)}, {"b": jnp.ones(2)})
    with pytest.raises(ta.MigrationError, match=r"Pass draft\.migration"):
        ta.load(tmp_path / "x.safetensors", {"b": jnp.ones(2)}, migration=draft)


# What is wrong.


def test_one_error_says_all_and_nothing_is_read(tmp_path, monkeypatch):
    flat = llama()
    del flat["model.layers.1.mlp.down_proj.weight"]
    flat["model.layers.2.self_attn.q_proj.weight"] = np.ones((4, 5), np.float32)
    ta.save(tmp_path / "x.safetensors", flat | {"extra": np.ones(1), "step": 3})
    target = zeros_of(scanned(llama())) | {"more": jnp.ones(2), "step": 0}
    target["head"] = jnp.ones((WORDS, WIDTH))
    monkeypatch.setattr(migrated, "read_arrays", None)
    m = migration({"model.norm.weight": "norm", "step": "step"})
    for target_or_none in (target, None):
        with pytest.raises(ta.MigrationError) as caught:
            ta.load(tmp_path / "x.safetensors", target_or_none, migration=m)
        text = str(caught.value)
        assert len(text.encode()) <= 4_000
        for part in (
            "no row takes\n  'extra'",
            "no leaf is taken by\n  'model.norm.weight'",
            "without 'model.layers.1.mlp.down_proj.weight'",
            "'model.layers.2.self_attn.q_proj.weight' is float32[4,5]",
        ):
            assert part in text
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(tmp_path / "x.safetensors", target, migration=m)
    text = str(caught.value)
    for part in (
        "'more'",
        f"'head': float32[{WIDTH},{WORDS}], the target has float32[{WORDS},{WIDTH}]",
        "'head' is made of 'lm_head.weight' by the row 'lm_head.weight : v e'",
        "Change the migration, choose leaves with where=, or pass the checkpoint that "
        "it is for.",
    ):
        assert part in text
    assert "strict=False" not in text
    with pytest.raises(ta.MigrationError, match="no row takes"):
        ta.compare_checkpoint(tmp_path / "x.safetensors", target, migration=m)


def test_a_second_run_is_an_error(file, tmp_path, monkeypatch):
    ta.save(tmp_path / "y.safetensors", ta.load(file, migration=migration()))
    monkeypatch.setattr(migrated, "read_arrays", None)
    with pytest.raises(ta.MigrationError, match="no leaf is taken by"):
        ta.load(tmp_path / "y.safetensors", migration=migration())


def test_sizes_may_come_from_the_target(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"q": np.arange(6.0)})
    m = ta.Migration({"q : (h d)": "q : h d"})
    assert ta.load(path, {"q": np.zeros((3, 2))}, migration=m)["q"].shape == (3, 2)
    with pytest.raises(ta.MigrationError, match="'h', 'd' stays open"):
        ta.load(path, migration=m)
    with pytest.raises(ta.MigrationError, match="'q'"):
        ta.load(path, {"q": np.zeros((4, 2))}, migration=m)


def test_copies_that_differ_and_a_padding_that_is_not_zero(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"a": np.ones(3), "b": np.arange(3.0)})
    target = {"w": np.zeros(3)}
    with pytest.raises(ta.MigrationError, match="copies are not equal"):
        ta.load(path, target, migration=ta.Migration({"w": ("a", "b")}).inverse)
    m = ta.Migration({"w : n": ("b : n", {"pad": {"n": (0, 1)}})})
    drop = ta.Migration({"a": None, "b : n": "v : n"})
    ta.save(path, {"b": np.arange(3.0)})
    with pytest.raises(ta.MigrationError, match="cut off is not zero"):
        ta.load(path, {"w": np.zeros(2)}, migration=m.inverse)
    assert target["w"].tolist() == [0, 0, 0]
    assert ta.load(path, migration=drop)["v"].tolist() == [0, 1, 2]


def test_names_that_dicts_cannot_hold_are_refused_before_reading(file, monkeypatch):
    monkeypatch.setattr(migrated, "read_arrays", None)
    rows = {"lm_head.weight": "a", "model.embed_tokens.weight": "a/b"}
    m = ta.Migration(rows | {"model.layers.*": None})
    with pytest.raises(ta.PathCollisionError, match="'a' next to 'a/b'"):
        ta.load(file, migration=m)


@pytest.mark.parametrize("wrong", [LLAMA, 7])
def test_a_table_is_not_a_migration(file, wrong):
    with pytest.raises(ta.MigrationError, match=r"migration=ta\.Migration\(table\)"):
        ta.load(file, migration=wrong)


HUGE = {
    "number": ({"h.0": 2, "h.999999999999": 2}, {"h.{n} : e": "h : n e"}, {}),
    "block": (
        {"h.0": 2, "h.999999999999": 2},
        {"h.{(a b)} : e": "h : a b e"},
        {"b": 2},
    ),
    "digits": ({"h.0": 2, f"h.{'9' * 5_000}": 2}, {"h.{n} : e": "h : n e"}, {}),
    "axis": ({"h": (2**50, 0)}, {"h : n e": "h.{n} : e"}, {}),
}


@pytest.mark.parametrize("case", HUGE)
def test_false_numbers_in_a_file_make_no_work(case, tmp_path, monkeypatch):
    shapes, rows, sizes = HUGE[case]
    path = tmp_path / "x.safetensors"
    ta.save(path, {name: np.ones(shape) for name, shape in shapes.items()})
    monkeypatch.setattr(migrated, "read_arrays", None)
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(path, migration=ta.Migration(rows, sizes=sizes))
    assert len(str(caught.value)) < 600


def test_a_file_with_an_unknown_kind_of_key_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    marks = '{"ties": {}, "kinds": {"a": "my_own"}}'
    safetensors.numpy.save_file(
        {"a": np.ones(2, np.uint32)}, path, {"treeadapt": marks}
    )
    with pytest.raises(ta.CheckpointError, match=r"x\.safetensors' cannot .*my_own"):
        ta.load(path, migration=ta.Migration({"a": "b"}))


# Functions.


def halves(leaf):
    return np.split(np.asarray(leaf), 2)


def test_functions_are_given_arrays_and_numbers(place):
    ta.save(
        place, {"w": np.arange(4.0, dtype=np.float32), "step": 3, "k": np.ones(2, "f4")}
    )
    m = ta.Migration(
        {
            "w": (("a", "b"), halves),
            "step": ("count", lambda step: step + 1),
            "k": ("k", jnp.negative),
        }
    )
    like = np.zeros(2, np.float32)
    target = {"a": jnp.zeros(2), "b": like, "count": 0, "k": like}
    found = ta.load(place, target, migration=m)
    assert found["a"].tolist() == [0, 1]
    assert isinstance(found["a"], jax.Array)
    assert isinstance(found["b"], np.ndarray)
    assert type(found["count"]) is int
    assert found["count"] == 4
    assert ta.load(place, where="{b,count}", migration=m)["b"].tolist() == [2, 3]


def test_what_a_function_makes_must_fit(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"w": np.arange(4.0, dtype=np.float32)})
    m = ta.Migration({"w": (("a", "b"), halves)})
    for strict in (True, False):
        target = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
        with pytest.raises(
            ta.MigrationError,
            match=r"row 'w' made 'b' of 'w': float32\[2\], .*float32\[3\]",
        ):
            ta.load(path, target, migration=m, strict=strict)
    half = {"a": np.zeros(2, np.float16), "b": np.zeros(2, np.float16)}
    with pytest.raises(ta.MigrationError, match="'a' of 'w': float32"):
        ta.load(path, half, migration=m)
    assert ta.load(path, half, migration=m, cast=True)["b"].dtype == np.float16
    with pytest.raises(ta.MigrationError, match="a str, which is not an array"):
        ta.load(path, migration=ta.Migration({"w": ("a", str)}))


def test_an_error_in_a_function_names_its_row(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"w": np.ones(3)})
    with pytest.raises(ZeroDivisionError) as caught:
        ta.load(path, migration=ta.Migration({"w": ("v", lambda leaf: 1 // 0)}))
    assert "row 'w'" in caught.value.__notes__[0]


# Boxes and memory.


@pytest.mark.slow
def test_rows_name_leaves_as_the_metadata_does(tmp_path):
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    orbax(tmp_path / "x", state)
    assert set(ta.read_metadata(tmp_path / "x")) == {"kernel", "bias"}
    m = ta.Migration({"kernel : a b": "weight : b a", "bias": "bias"})
    found = ta.load(tmp_path / "x", migration=m)
    same(found, {"weight": state["kernel"][...].T, "bias": state["bias"][...]})


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_group(tmp_path, monkeypatch):
    # Python counts no pages that an array asked the system for.
    monkeypatch.setattr(arrays, "_OWN_PAGES_BYTES", 2**62)
    path, layers, size = tmp_path / "x.safetensors", 4, 100_000
    flat = {
        f"{name}.{n}": np.ones(size, np.float32)
        for name in "abcdefgh"
        for n in range(layers)
    }
    ta.save(path, flat)
    m = ta.Migration({"{x}.{n} : e": "{x} : e n"})
    target = {name: np.zeros((size, layers), np.float32) for name in "abcdefgh"}
    group_bytes = m.plan(flat).peak_bytes
    result_bytes = sum(leaf.nbytes for leaf in target.values())
    ta.load(path, target, migration=m)  # what is imported and compiled once
    del flat
    tracemalloc.start()
    try:
        found = ta.load(path, target, migration=m)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["h"].shape == (size, layers)
    assert peak_bytes < result_bytes + group_bytes
