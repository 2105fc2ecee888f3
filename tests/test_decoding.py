"""Quantised arrays of published checkpoints, read as the numbers that they mean.

The table of forms is in ``quantized``: what is decoded equals, bit for bit, the plain
formula there, which ``make test-oracles`` compares with the libraries themselves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import tomllib
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
from command import invoke
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from quantized import (
    BF16,
    FORMS,
    FP4,
    Published,
    config,
    float8,
    groups,
    in_blocks,
    published,
    scales,
    write,
    write_safetensors,
)

import treeadapt as ta
from treeadapt.checkpoints import array_boxes, opening

EVERY = sorted(FORMS)
PUBLISHED = Path(__file__).with_name("published")
#: Parts without which an array is read all the same: nothing is lost with them.
SPARE = ("input_scale", "input_global_scale", "weight_format", "g_idx")
PATIENT = {"cast": True, "strict": False}


@pytest.fixture(params=EVERY)
def form(request) -> Published:
    return published(request.param)


@pytest.fixture
def folder(form, tmp_path) -> Path:
    return write(tmp_path / "published", form)


def blocks(tmp_path, shape=(256, 256), **others):
    """A folder with one weight of FP8 in blocks, and other leaves."""
    at = np.random.default_rng(0)
    w, s = float8(at, *shape), scales(at, *(-(-n // 128) for n in shape))
    meant = (w.astype("f4") * in_blocks(s, 128, shape)).astype(BF16)
    parts = {"a.weight": w, "a.weight_scale_inv": s, **others}
    stated = config("fp8", weight_block_size=[128, 128])
    return write(tmp_path / "fp8", Published(parts, {"a.weight": meant}, stated)), meant


def assert_same(leaf, meant):
    leaf = np.asarray(leaf)
    assert (leaf.shape, leaf.dtype) == (meant.shape, meant.dtype)
    assert leaf.tobytes() == np.ascontiguousarray(meant).tobytes()


# --- law 17: the numbers, their boxes, and no scale left over ---


def test_a_decoded_leaf_is_what_its_parts_mean(form, folder):
    loaded = ta.load(folder)
    assert {*loaded} == {*form.meant}
    for name, meant in form.meant.items():
        assert_same(loaded[name], meant)


@pytest.mark.parametrize("name", EVERY)
def test_a_decoded_leaf_is_what_the_library_made_of_it(name):
    """Digests of ``make test-oracles``."""
    file = Path(__file__).with_name("quantized.toml")
    digests = tomllib.loads(file.read_text("utf-8"))["digests"]
    if name not in digests:
        pytest.skip("no library that installs reads this form")
    (leaf, *_) = published(name).meant.values()
    assert hashlib.sha256(np.ascontiguousarray(leaf)).hexdigest() == digests[name]


def test_metadata_and_reports_have_what_is_meant(form, folder):
    metadata = ta.read_metadata(folder)
    assert {k: (v.shape, v.dtype) for k, v in metadata.items()} == {
        k: (v.shape, v.dtype) for k, v in form.meant.items()
    }
    report = ta.compare_checkpoint(folder, form.meant)
    assert report.fits
    (name,) = {*form.meant} - {"norm.weight"}
    assert [*report.decoded] == [name]
    assert f"1 leaf decoded: {report.decoded[name]}." in str(report)


def test_parts_are_there_without_decoding(form, folder):
    loaded = ta.load(folder, decode=False)
    assert {*loaded} == {*form.parts} == {*ta.read_metadata(folder, decode=False)}
    for name, part in form.parts.items():
        assert_same(loaded[name], part)
    report = ta.compare_checkpoint(folder, form.parts, decode=False)
    assert report.fits
    assert not report.decoded


def test_a_box_is_that_box_of_the_whole(form, folder):
    stored = opening.read_stored(folder)
    at = random.Random(0)
    for name, meant in form.meant.items():
        for _ in range(25):
            wanted = []
            for _ in range(at.randint(1, 3)):
                ends = (sorted(at.choices(range(n + 1), k=2)) for n in meant.shape)
                wanted.append(tuple(slice(*pair) for pair in ends))
            into = [None] * len(wanted)
            if at.random() < 0.5:
                into[0] = np.empty(meant[wanted[0]].shape, meant.dtype)
            arrays = stored.table[name].key.read(wanted, into)
            for box, array, given in zip(wanted, arrays, into, strict=True):
                assert given is None or array is given
                assert_same(array, meant[box])


def test_shards_on_eight_devices_are_those_of_the_whole(form, folder):
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    for name, meant in form.meant.items():
        for names in itertools.permutations(("x", "y", None, None), meant.ndim):
            sizes = [mesh.shape.get(axis, 1) for axis in names]
            if any(n % size for n, size in zip(meant.shape, sizes, strict=True)):
                continue
            sharding = NamedSharding(mesh, P(*names))
            like = jax.ShapeDtypeStruct(meant.shape, meant.dtype, sharding=sharding)
            leaf = ta.load(folder, {name: like}, where=name)[name]
            assert leaf.sharding == sharding
            assert_same(leaf, meant)


def test_rows_move_decoded_leaves_and_lead_back(form, folder):
    (name,) = {*form.meant} - {"norm.weight"}
    meant = form.meant[name]
    axes = "abc"[: meant.ndim]
    there = " ".join(axes)
    back = " ".join(reversed(axes))
    m = ta.Migration({f"{name} : {there}": f"w : {back}", "norm.weight": "n"})
    mesh = jax.make_mesh((8,), ("x",))
    spec = P("x") if meant.shape[-1] % 8 == 0 else P()
    like = jax.ShapeDtypeStruct(
        meant.T.shape, meant.dtype, sharding=NamedSharding(mesh, spec)
    )
    loaded = ta.load(folder, {"w": like, "n": np.zeros(5, BF16)}, migration=m)
    assert_same(loaded["w"], meant.T)
    assert_same(m.inverse(loaded)[name], meant)


def test_a_lost_part_is_an_error_that_names_it(form, tmp_path):
    """However lenient the call is, for each part of each form."""
    if form.config is None:
        pytest.skip("without a configuration some parts are arrays like others")
    for lost in form.parts:
        if lost == "norm.weight" or lost.endswith(SPARE):
            continue
        parts = {name: part for name, part in form.parts.items() if name != lost}
        folder = write(tmp_path / lost, form._replace(parts=parts))
        for call in (
            lambda folder=folder: ta.load(folder),
            lambda folder=folder: ta.read_metadata(folder),
            lambda folder=folder: ta.load(folder, form.meant, **PATIENT),
            lambda folder=folder: ta.load(folder, form.meant, where="norm*", **PATIENT),
            lambda folder=folder: ta.compare_checkpoint(folder, form.meant, cast=True),
        ):
            with pytest.raises(ta.CheckpointError, match="decode=False") as caught:
                call()
            left = [name for name in parts if name != "norm.weight"]
            assert any(name in str(caught.value) for name in left)
        assert {*ta.load(folder, decode=False)} == {*parts}


def test_parts_of_another_shape_are_an_error(form, tmp_path):
    is_of_tensor = any(
        part.size == 1 for name, part in form.parts.items() if name == "a.weight_scale"
    )
    for changed, part in form.parts.items():
        if changed == "norm.weight" or changed.endswith(SPARE[:3]):
            continue
        if changed == "a.weight" and is_of_tensor:
            continue
        longer = np.concatenate([part.reshape(-1, *part.shape[1:])] * 3)
        parts = form.parts | {changed: longer}
        folder = write(tmp_path / changed, form._replace(parts=parts))
        if "quant_state" in changed or form.config is None:
            continue
        with pytest.raises(ta.CheckpointError, match="decode=False") as caught:
            ta.load(folder)
        assert changed.partition(".weight")[0].split("_")[0] in str(caught.value)


# --- what is read, and how much memory it takes ---


def test_a_shard_of_four_reads_its_quarter(tmp_path, monkeypatch):
    folder, meant = blocks(tmp_path, (2048, 1024))
    counts = []
    read_to = array_boxes.FileArray._read_to

    def counted(self, file, start, array):
        counts.append(array.nbytes)
        read_to(self, file, start, array)

    monkeypatch.setattr(array_boxes.FileArray, "_read_to", counted)
    (whole,) = [leaf.key for leaf in opening.read_stored(folder).table.values()]
    for box in np.s_[0:512, 0:1024], np.s_[512:1024, 0:1024]:
        counts.clear()
        assert_same(whole.read([box])[0], meant[box])
        assert sum(counts) == 512 * 1024 + 4 * 8 * 4  # and its scales
    counts.clear()
    whole.read([np.s_[0:2048, 0:512], np.s_[0:2048, 512:1024]])
    assert sum(counts[:1]) <= 2**20
    assert sum(counts) <= 2048 * 1024 + 2 * 4 * 16 * 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_memory_is_the_result_what_is_stored_and_little_more(name, tmp_path):
    at, size = np.random.default_rng(0), 2048
    parts = {
        "a.weight": float8(at, 2 * size, 2 * size),
        "a.weight_scale_inv": scales(at, size // 64, size // 64),
    }
    stated = config("fp8", weight_block_size=[128, 128])
    if name == "mxfp4":
        words = at.integers(0, 256, (4, size, size // 16, 16), np.uint8)
        parts = {"a_blocks": words, "a_scales": words[..., 0]}
        stated = config("mxfp4")
    folder = write(tmp_path / name, Published(parts, {}, stated))
    stored = sum(part.nbytes for part in parts.values())
    (leaf,) = opening.read_stored(folder).table.values()
    tracemalloc.start()
    array = np.asarray(leaf.key)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Large arrays have pages of their own, which are not counted here.
    assert array.nbytes == np.prod(leaf.array.shape) * 2
    assert peak < stored + 2**24


# --- what is taken for a quantised array, and what is not ---


def test_without_a_configuration_plain_float8_and_int8_stay(tmp_path):
    w = float8(np.random.default_rng(0), 4, 6)
    arrays = {"w": w, "n": w.view(np.int8), "n_scale": np.ones(4, np.float32)}
    write_safetensors(tmp_path / "m.safetensors", arrays)
    report = ta.compare_checkpoint(tmp_path, arrays)
    assert report.fits
    assert report.plain_float8 == ("w",)
    assert "1 leaf float8 without scales: 'w'." in str(report)
    for name, leaf in ta.load(tmp_path).items():
        assert_same(leaf, arrays[name])


@pytest.mark.parametrize("scale", ["qscale_weight", "scale_weight", "pre_quant_scale"])
def test_a_scale_of_an_unknown_name_is_not_left_over(scale, tmp_path):
    w = float8(np.random.default_rng(0), 4, 6)
    arrays = {"a.weight": w, f"a.{scale}": np.ones((), np.float32)}
    write_safetensors(tmp_path / "m.safetensors", arrays)
    with pytest.raises(ta.CheckpointError, match=f"'a.{scale}' is next to 'a.weight'"):
        ta.load(tmp_path)
    folder, _ = blocks(tmp_path, **{f"a.{scale}": np.ones((), np.float32)})
    with pytest.raises(ta.CheckpointError, match=f"'a.{scale}' is next to 'a.weight'"):
        ta.load(folder)


def test_what_save_wrote_is_read_as_it_is(tmp_path):
    w = float8(np.random.default_rng(0), 4, 6)
    tree = {"a.weight": w, "a.weight_scale": np.ones((4, 1), np.float32)}
    ta.save(tmp_path / "m.safetensors", tree)
    assert {*ta.load(tmp_path)} == {*tree}
    (tmp_path / "config.json").write_text(json.dumps(config("fbgemm_fp8")))
    assert {*ta.load(tmp_path)} == {"a.weight"}
    for name in ("m.schema.toml", "orbax"):
        ta.save(tmp_path / name, tree)
        assert {*ta.read_metadata(tmp_path / name)} == {*tree}


def test_a_target_with_all_parts_gets_them(form, folder):
    loaded = ta.load(folder, form.parts)
    for name, part in form.parts.items():
        assert_same(loaded[name], part)
    assert ta.compare_checkpoint(folder, form.parts).fits


def test_scales_of_a_cache_are_left_out_with_a_warning(tmp_path):
    names = ("l.0.k_scale", "l.1.k_scale", "l.0.attn.v_proj.v_scale")
    caches = dict.fromkeys(names, np.ones((), np.float32))
    folder, meant = blocks(tmp_path, **caches)
    target = {"a.weight": np.zeros_like(meant)}
    with pytest.warns(ta.TreeAdaptWarning, match="3 scales of a quantised cache"):
        assert_same(ta.load(folder, target)["a.weight"], meant)
    m = ta.Migration({"a.weight : i o": "w : o i"})
    with pytest.warns(ta.TreeAdaptWarning, match="'l.0.k_scale'"):
        assert_same(ta.load(folder, migration=m)["w"], meant.T)
    report = ta.compare_checkpoint(folder, target)
    assert report.fits
    assert report.left_out == names
    assert {*ta.load(folder)} == {"a.weight", *names}
    asked = target | {"l.0.k_scale": np.zeros((), np.float32)}
    with pytest.warns(ta.TreeAdaptWarning, match="2 scales"):
        assert ta.load(folder, asked)["l.0.k_scale"] == 1
    m = ta.Migration({"a.weight : i o": "w : o i", "{r:**}": "{r}"})
    assert {*ta.load(folder, migration=m)} > {"w"}
    assert invoke("lint", folder, "--migration", "{}").exit_code == 2


def test_rows_of_parts_need_what_is_stored(tmp_path):
    folder, meant = blocks(tmp_path)
    row = {("a.weight : (a i) (b j)", "a.weight_scale_inv : a b"): "w : (a i) (b j)"}
    row = {key: (value, {"multiply": True}) for key, value in row.items()}
    m = ta.Migration(row, sizes={"i": 128, "j": 128})
    with pytest.raises(ta.MigrationError, match="decode=False") as caught:
        ta.load(folder, migration=m)
    assert "'a.weight_scale_inv', a part of the leaf 'a.weight'" in str(caught.value)
    product = ta.load(folder, migration=m, decode=False)["w"]
    assert_same(np.asarray(product).astype(BF16), meant)
    drops = ta.Migration({"a.weight": "w", "*_scale_inv": None})
    assert_same(ta.load(folder, migration=drops)["w"], meant)


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        (config("hqq"), "its quant_method is 'hqq', and known are 'fp8'"),
        (config("torchao"), "'torchao'"),
        (config("compressed-tensors", format="marlin-24"), "'marlin-24', is not read"),
        (
            config("compressed-tensors", sparsity_config={"format": "sparse-24"}),
            "'sparse-24'",
        ),
        (config("compressed-tensors", transform_config={"a": 1}), "transform_config"),
        (config("fp8", weight_block_size=[128, "a"]), "as a block"),
        (config("fp8", weight_block_size=[64, 64]), "blocks of 64 x 64"),
        (config("fp8", weight_block_size=[128] * 3), "blocks of 128 x 128 x 128"),
    ],
)
def test_a_method_that_is_not_read_is_named(stated, text, tmp_path):
    folder, _ = blocks(tmp_path)
    (folder / "config.json").write_text(json.dumps(stated))
    for call in (ta.load, ta.read_metadata):
        with pytest.raises(ta.CheckpointError) as caught:
            call(folder)
        assert text in str(caught.value)
        assert str(caught.value).endswith(
            "decode=False gives each leaf as it is stored."
        )


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("awq", {"version": "gemv"}, "'gemv', which is not read"),
        ("awq", {"bits": 8}, "8 bits, which is not read"),
        ("awq", {"group_size": 16}, "of groups of 16"),
        ("awq", {"quant_method": "gptq"}, "which is not packed as gptq is"),
        ("gptq_4_bits", {"checkpoint_format": "marlin"}, "'marlin', which is not read"),
        ("gptq_4_bits", {"bits": 3}, "3 bits, which is not read"),
        ("int4_packed", groups(8), "of 8 bits"),
    ],
)
def test_a_form_that_is_not_read_is_named(name, changes, text, tmp_path):
    form = published(name)
    form.config["quantization_config"] |= changes
    with pytest.raises(ta.CheckpointError, match=text):
        ta.load(write(tmp_path / "m", form))


@pytest.mark.parametrize(
    ("name", "part", "value", "text"),
    [
        ("gptq_4_bits", "a.g_idx", np.full(64, 4, np.int32), "not among 4"),
        ("gptq_4_bits", "a.g_idx", np.full(64, -1, np.int32), "not among 4"),
        ("int4_packed", "a.weight_shape", np.array([20, 80]), r"says \(20, 80\)"),
        ("int4_packed", "a.weight_shape", np.array([-20, 64]), r"says \(-20, 64\)"),
        ("int4_packed", "a.weight_g_idx", np.arange(64, dtype="i4"), "activations"),
        ("nvfp4_of_modelopt", "a.weight_scale_2", np.ones(3, "f4"), "weight_scale_2"),
        ("fp8_blocks", "b.weight", np.zeros((2, 3), "i1"), "'b.weight' is int8"),
        ("fp8_of_rows", "b.weight_scale", np.ones(3, "f4"), "'b.weight_scale' is a"),
        ("int4_packed", "a.weight", np.ones((20, 64), BF16), "stored twice"),
        ("gptq_v2", "a.weight", np.ones((32, 64), BF16), "stored twice"),
    ],
)
def test_parts_that_contradict_each_other_are_an_error(
    name, part, value, text, tmp_path
):
    form = published(name)
    folder = write(tmp_path / "m", form._replace(parts=form.parts | {part: value}))
    with pytest.raises(ta.CheckpointError, match=text) as caught:
        ta.load(folder, form.meant, strict=False, cast=True)
    assert "decode=False" in str(caught.value)


@pytest.mark.parametrize("state", ["{", "[]", "{}", '{"shape": [1], "blocksize": 0}'])
def test_a_state_of_bitsandbytes_that_says_nothing_is_an_error(state, tmp_path):
    form = published("nf4_of_bitsandbytes")
    (at,) = (name for name in form.parts if "quant_state" in name)
    parts = form.parts | {at: np.frombuffer(state.encode(), np.uint8)}
    with pytest.raises(ta.CheckpointError, match="not say what it should"):
        ta.load(write(tmp_path / "m", form._replace(parts=parts)))


def test_a_scale_in_another_shard_is_named_with_its_shard(tmp_path):
    form = published("fp8_blocks")
    names = [*form.parts]
    files = {name: f"model-{n}.safetensors" for n, name in enumerate(names)}
    for name, file in files.items():
        write_safetensors(tmp_path / file, {name: form.parts[name]})
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for stated in (None, form.config):
        if stated:
            (tmp_path / "config.json").write_text(json.dumps(stated))
        assert_same(ta.load(tmp_path)["a.weight"], form.meant["a.weight"])
        for name, other in itertools.permutations(names[:2]):
            with pytest.raises(ta.CheckpointError) as caught:
                ta.load(tmp_path / files[name])
            there = f"'{other}' is in '{files[other]}', as the index says"
            assert there in str(caught.value)
            assert f"Read the whole folder, '{tmp_path}'" in str(caught.value)


def test_the_dtype_is_that_of_the_configuration_else_of_scales(tmp_path):
    form = published("fp8_blocks_with_bfloat16_scales")
    stated = form.config["quantization_config"]
    for fields, dtype in (
        ({"dtype": "float32"}, np.float32),
        ({"torch_dtype": "torch.float16"}, np.float16),
        ({"text_config": {"dtype": "float16"}}, np.float16),
        ({}, BF16),
    ):
        changed = {"quantization_config": stated, **fields}
        folder = write(tmp_path / str(len(str(fields))), form._replace(config=changed))
        assert ta.read_metadata(folder)["a.weight"].dtype == dtype
    inner = {"text_config": {"quantization_config": stated, "torch_dtype": "float16"}}
    folder = write(tmp_path / "inner", form._replace(config=inner))
    assert ta.read_metadata(folder)["a.weight"].dtype == np.float16


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": Infinity}', "\x00", "[" * 10**5])
def test_a_strange_configuration_is_one_error_or_none(text, tmp_path):
    folder, meant = blocks(tmp_path)
    (folder / "config.json").write_text(text)
    if text in ("[1]", '{"a": Infinity}'):
        assert_same(ta.load(folder)["a.weight"], meant)
        return
    with pytest.raises(ta.CheckpointError, match="next to it cannot be read"):
        ta.load(folder)
    assert {*ta.load(folder, decode=False)} == {"a.weight", "a.weight_scale_inv"}


def test_a_plain_checkpoint_asks_for_no_configuration(tmp_path):
    write_safetensors(tmp_path / "m.safetensors", {"w": np.ones((2, 3), np.float32)})
    (tmp_path / "config.json").write_text("{")
    assert {*ta.load(tmp_path)} == {"w"}


# --- published tables, and files of PyTorch ---


def quantised(weights, names):
    """Weights as FP8 in blocks of 8, and what these mean; any others as they are."""
    parts, meant, at = {}, {}, np.random.default_rng(0)
    for name, weight in weights.items():
        if not re.search(names, name):
            parts[name] = meant[name] = weight.astype(BF16)
            continue
        w = float8(at, *weight.shape)
        s = scales(at, *(-(-n // 8) for n in weight.shape))
        parts |= {name: w, f"{name}_scale_inv": s}
        meant[name] = (w.astype("f4") * in_blocks(s, 8, w.shape)).astype(BF16)
    return parts, meant


def tiny(model_type):
    folder = PUBLISHED / model_type / "1"
    random_bits = np.random.default_rng(0)
    schema = ta.read_metadata(folder / "model.schema.toml")
    weights = {
        name: random_bits.normal(size=leaf.shape).astype(leaf.dtype)
        for name, leaf in schema.items()
    }
    return weights, json.loads((folder / "config.json").read_text())


@pytest.mark.slow
def test_a_table_takes_deepseek_v3_as_it_is_published(tmp_path):
    weights, stated = tiny("deepseek_v3")
    number = stated["num_hidden_layers"]
    more = {  # the layer that predicts one more token, as in the published files
        name.replace(f"layers.{number - 1}.", f"layers.{number}."): leaf
        for name, leaf in weights.items()
        if f"layers.{number - 1}." in name
    }
    more[f"model.layers.{number}.eh_proj.weight"] = np.ones((24, 48), np.float32)
    names = r"(_proj|_proj_with_mqa|q_a_proj|q_b_proj)\.weight$"
    parts, meant = quantised(weights | more, names)
    fields = config("fp8", weight_block_size=[8, 8], fmt="e4m3")
    folder = write(
        tmp_path / "m", Published(parts, meant, stated | fields | {"dtype": "bfloat16"})
    )
    (folder / "config.json").write_text(
        json.dumps(
            stated | {**fields, "model_type": "deepseek_v3", "dtype": "bfloat16"}
        )
    )
    table = ta.load_migration("maxtext/deepseek_v3", config=folder)
    drop = ta.Migration({f"model.layers.{number}.*": None, "{rest:**}": "{rest}"})
    kept = {name: leaf for name, leaf in meant.items() if name not in more}
    expected = table(kept)
    loaded = ta.load(folder, migration=drop.then(table))
    assert not ta.tree_diff(loaded, expected, values=True)
    back = table.inverse(loaded)
    assert not ta.tree_diff(back, kept, values=True)


def test_a_table_takes_gpt_oss_as_it_is_published(tmp_path):
    weights, stated = tiny("gpt_oss")
    parts, meant, at = {}, {}, np.random.default_rng(0)
    for name, leaf in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            parts[name] = meant[name] = leaf.astype(BF16)
            continue
        experts, rows, columns = leaf.shape
        rows = -(-rows // 32) * 32  # a block is 32 long
        codes = at.integers(0, 16, (experts, columns, rows), np.uint8)
        s = at.integers(115, 125, (experts, columns, rows // 32), np.uint8)
        array = np.ldexp(FP4[codes], s.repeat(32, -1).astype(int) - 127)
        parts[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(
            *s.shape, 16
        )
        parts[f"{name}_scales"] = s
        meant[name] = np.ascontiguousarray(array.swapaxes(1, 2).astype(BF16))
    folder = write(tmp_path / "m", Published(parts, meant, {}))
    (folder / "config.json").write_text(
        json.dumps(
            stated | {**config("mxfp4"), "model_type": "gpt_oss", "dtype": "bfloat16"}
        )
    )
    table = ta.load_migration("maxtext/gpt_oss", config=folder)
    loaded = ta.load(folder, migration="maxtext")
    assert not ta.tree_diff(loaded, table(meant), values=True)
    assert not ta.tree_diff(table.inverse(loaded), meant, values=True)


# --- the command ---


def test_the_command_marks_decoded_leaves_and_shows_parts(tmp_path):
    folder, meant = blocks(tmp_path, b=np.ones(3, BF16))
    shown = invoke("show", folder)
    assert "Decoded from float8_e4m3fn with scales: 'a.weight'." in shown.stdout
    assert "1 leaf decoded: float8_e4m3fn with scales; sizes are" in shown.stderr
    records = json.loads(invoke("show", folder, "--format", "json").stdout)["leaves"]
    by_path = {each["path"]: each for each in records}
    assert by_path["a.weight"]["decoded"] == "float8_e4m3fn with scales"
    assert by_path["a.weight"]["bytes"] == meant.nbytes
    assert by_path["b"]["decoded"] is None
    shown = invoke("show", folder, "--no-decode")
    assert "a.weight_scale_inv" in shown.stdout
    assert "ecoded" not in shown.output
    for command in ("diff", "lint", "explain", "draft", "bench"):
        assert "--no-decode" in invoke(command, "--help").stdout


def test_convert_writes_plain_weights_and_a_configuration_that_says_so(tmp_path):
    folder, meant = blocks(tmp_path, b=np.ones(3, np.float32))
    (folder / "hf_quant_config.json").write_text("{}")
    out = tmp_path / "out" / "model.safetensors"
    out.parent.mkdir()
    done = invoke("convert", folder, out, "--like", folder)
    assert done.exit_code == 0, done.output
    written = json.loads((out.parent / "config.json").read_text())
    assert written == {"model_type": "any", "torch_dtype": "bfloat16"}
    assert "config.json has no quantization_config there, and its dtype" in done.stdout
    assert "'hf_quant_config.json' (of quantised weights)" in done.stdout
    assert_same(ta.load(out)["a.weight"], meant)
    done = invoke("convert", folder, out, "--like", folder, "--no-decode", "--force")
    assert done.exit_code == 2
    assert "--no-decode writes codes and scales" in done.stderr
    raw = tmp_path / "raw.safetensors"
    assert invoke("convert", folder, raw, "--no-decode").exit_code == 0
    assert {*ta.load(raw)} == {"a.weight", "a.weight_scale_inv", "b"}


def test_commands_compare_and_plan_what_is_meant(tmp_path):
    caches = {"l.0.k_scale": np.ones((), np.float32)}
    folder, meant = blocks(tmp_path, **caches)
    ta.save(tmp_path / "plain.safetensors", {"a.weight": meant, **caches})
    plain = tmp_path / "plain.safetensors"
    assert invoke("diff", folder, plain, "--values").exit_code == 0
    assert invoke("diff", folder, plain, "--no-decode").exit_code == 1
    table = tmp_path / "table.json"
    rows = [{"from": "a.weight : i o", "to": "w : o i"}]
    table.write_text(json.dumps({"version": 1, "rows": rows}))
    assert invoke("lint", folder, "--migration", table).exit_code == 0
    out = tmp_path / "out.safetensors"
    assert invoke("convert", folder, out, "--migration", table).exit_code == 0
    assert_same(ta.load(out)["w"], meant.T)
    rows[0]["from"] = ["a.weight : (a i) (b j)", "a.weight_scale_inv : a b"]
    rows[0] |= {"to": "w : (a i) (b j)", "multiply": True}
    table.write_text(
        json.dumps({"version": 1, "rows": rows, "sizes": {"i": 128, "j": 128}})
    )
    found = invoke("lint", folder, "--migration", table)
    assert found.exit_code == 1
    assert "pass --no-decode" in found.stdout
    draft = ta.draft_migration(folder, {"w": jax.ShapeDtypeStruct((256, 256), BF16)})
    assert "a.weight_scale_inv" not in draft.to_toml()


# --- two numbers in a byte ---


def packed_file(tmp_path, shape, name="F4"):
    """A file as safetensors writes F4: two in a byte, the low bits first."""
    size = -(-int(np.prod(shape)) // 2)
    data = np.random.default_rng(4).integers(0, 256, size, np.uint8)
    entry = {"dtype": name, "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({"w": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + data.tobytes())
    return file, np.stack([data & 15, data >> 4], -1).reshape(-1)


def test_numbers_of_4_bits_are_read_whole_and_in_shards(tmp_path):
    file, codes = packed_file(tmp_path, [6, 16])
    whole = codes.reshape(6, 16).view(ml_dtypes.float4_e2m1fn)
    read = ta.load(file)["w"]
    assert read.dtype == whole.dtype
    assert read.tobytes() == whole.tobytes()
    assert ta.read_metadata(file)["w"].dtype == whole.dtype
    for shape, places in (((2,), ("d",)), ((2, 4), ("a", "b")), ((8,), (None, "d"))):
        names = [name for name in dict.fromkeys(places) if name]
        sharding = jax.NamedSharding(jax.make_mesh(shape, names), jax.P(*places))
        for dtype in (whole.dtype, np.float32):
            like = jax.ShapeDtypeStruct((6, 16), dtype, sharding=sharding)
            array = ta.load(file, {"w": like}, cast=True)["w"]
            assert array.sharding == sharding
            np.testing.assert_array_equal(np.asarray(array), whole.astype(dtype))
    m = ta.Migration({"w : (a b) c": "w : c b a"}, sizes={"b": 3})
    turned = ta.load(file, migration=m)
    want = whole.reshape(2, 3, 16).transpose(2, 1, 0)
    np.testing.assert_array_equal(turned["w"], want, strict=True)


@pytest.mark.parametrize(
    ("shape", "name", "text"),
    [
        ([2, 3], "F4", "a byte of 'w' has numbers of two rows"),
        ([], "F4", "a byte of 'w' has numbers of two rows"),
        ([2, 4], "F9", "unknown dtype, 'F9'"),
    ],
)
def test_numbers_that_bytes_do_not_hold_are_an_error(tmp_path, shape, name, text):
    with pytest.raises(ta.CheckpointError, match=text):
        ta.load(packed_file(tmp_path, shape, name)[0])


@pytest.mark.parametrize("name", ["F6_E2M3", "F6_E3M2"])
def test_numbers_of_6_bits_are_an_error_that_says_who_can_unpack_them(tmp_path, name):
    entry = {"dtype": name, "shape": [2, 8], "data_offsets": [0, 12]}
    header, file = json.dumps({"w": entry}).encode(), tmp_path / "m.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(12)))
    with pytest.raises(ta.CheckpointError, match=f"'w' is {name}, .*deserialize"):
        ta.load(file)
    ((leaf, said),) = safetensors.deserialize(file.read_bytes())
    assert (leaf, bytes(said["data"])) == ("w", bytes(range(12)))
    kind = {"F6_E2M3": ml_dtypes.float6_e2m3fn, "F6_E3M2": ml_dtypes.float6_e3m2fn}
    numbers = np.arange(64, dtype=np.uint8).view(kind[name]).astype(np.float32)
    short = numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(numbers, short)
