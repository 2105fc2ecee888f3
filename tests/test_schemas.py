"""Schemas: what a checkpoint says of its leaves, without the arrays; and its hash."""

from __future__ import annotations

import json
import os
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from caps import CAPS
from command import run
from jax.sharding import NamedSharding, PartitionSpec
from marks import hash_of, kinds_of, ties_of
from sizes import some
from test_checkpoints import write
from trees import TREES

import treeadapt as ta

# Orbax may leave its event loop to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

SCHEMA = "model.schema.toml"
every_tree = pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)


@pytest.fixture(autouse=True)
def _other_warnings_are_tested_elsewhere():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.TreeAdaptWarning)
        yield


def same(one, two):
    assert not ta.tree_diff(one, two)


def everything():
    """A tree with each kind of leaf."""
    weight = jnp.ones((3, 4))
    return {
        "act": jax.nn.relu,
        "blocks": [{"q": jnp.ones((8, 3))} for _ in range(2)],
        "embed": {"w": weight},
        "flag": True,
        "head": {"w": weight},
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 4),
        "rate": 0.1,
        "scale": jnp.ones((), jnp.bfloat16),
        "step": 7,
        'ü "x"\n': np.zeros((0, 2), np.int8),
    }


LINES = r"""
"blocks/0/q" = "float32[8,3]"
"blocks/1/q" = "float32[8,3]"
"embed/w" = "float32[3,4]"
"flag" = "bool"
"head/w" = "tied to embed/w"
"key" = "key<threefry2x32> uint32[2]"
"keys" = "key<rbg> uint32[4,4]"
"rate" = "float"
"scale" = "bfloat16[]"
"step" = "int"
"ü \"x\"\n" = "int8[0,2]"
"""


@pytest.fixture
def schema(tmp_path):
    ta.save(tmp_path / SCHEMA, everything())
    return tmp_path / SCHEMA


def lines(path):
    return path.read_text("utf-8").partition("[leaves]")[2]


def text_of(*leaves, head="version = 1"):
    return "\n".join([head, "[leaves]", *leaves]) + "\n"


# What is in it.


@pytest.mark.slow
def test_a_schema_has_one_line_a_leaf_in_the_order_of_the_tree(schema):
    assert lines(schema) == LINES
    assert re.fullmatch(
        r"# .*\nversion = 1\nhash = \"[0-9a-f]{16}\"\n\n",
        schema.read_text("utf-8").partition("[leaves]")[0],
    )


@pytest.mark.parametrize("name", ["m.schema.toml", "M.Schema.TOML", ".schema.toml"])
def test_the_ending_decides(name, tmp_path):
    ta.save(tmp_path / name, everything())
    assert lines(tmp_path / name) == LINES
    with pytest.raises(ta.CheckpointError, match="is a schema and holds no arrays"):
        ta.load(tmp_path / name, everything())


def test_other_toml_files_are_not_schemas(tmp_path):
    with pytest.raises(ta.CheckpointError, match=r"unknown ending, '.toml'"):
        ta.save(tmp_path / "model.toml", everything())


def test_an_abstract_tree_has_the_schema_of_the_tree(tmp_path):
    arrays = {k: x for k, x in everything().items() if k not in ("act", "embed")}
    ta.save(tmp_path / "a.schema.toml", arrays)
    is_array = {k: not isinstance(x, bool | int | float) for k, x in arrays.items()}
    specs = jax.eval_shape(lambda: {k: x for k, x in arrays.items() if is_array[k]})
    ta.save(tmp_path / "b.schema.toml", arrays | specs)
    assert (tmp_path / "a.schema.toml").read_text() == (
        tmp_path / "b.schema.toml"
    ).read_text()


def test_abstract_leaves_that_are_one_object_are_not_tied(tmp_path):
    spec = jax.ShapeDtypeStruct((2,), np.float32)
    ta.save(tmp_path / SCHEMA, {"a": spec, "b": spec})
    assert lines(tmp_path / SCHEMA) == '\n"a" = "float32[2]"\n"b" = "float32[2]"\n'


def test_sharded_and_deleted_arrays_have_a_schema(tmp_path):
    mesh = jax.make_mesh((4,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    array = jax.device_put(jnp.ones((8, 2)), sharding)
    spec = jax.ShapeDtypeStruct((8, 2), np.float32, sharding=sharding)
    gone = jnp.ones((8, 2))
    gone.delete()
    ta.save(tmp_path / SCHEMA, [array, spec, gone])
    assert {*ta.read_metadata(tmp_path / SCHEMA).values()} == {
        jax.ShapeDtypeStruct((8, 2), np.float32)
    }


def test_where_chooses_leaves(tmp_path):
    ta.save(tmp_path / SCHEMA, everything(), where=["blocks", "step"])
    assert [*ta.read_metadata(tmp_path / SCHEMA)] == [
        "blocks/0/q",
        "blocks/1/q",
        "step",
    ]
    with pytest.raises(ta.UnusedRuleError):
        ta.save(tmp_path / SCHEMA, everything(), where="block")


def test_a_dtype_that_no_checkpoint_holds_leaves_the_old_file(schema):
    before = schema.read_bytes()
    with pytest.raises(ta.CheckpointError, match="'a' is of dtype datetime64"):
        ta.save(schema, {"a": np.zeros(2, "M8[s]")})
    with pytest.raises(ta.CheckpointError, match="not valid Unicode"):
        ta.save(schema, {"\ud800": np.zeros(2)})
    assert schema.read_bytes() == before
    assert os.listdir(schema.parent) == [SCHEMA]


def test_a_folder_of_that_name_stays(tmp_path):
    (tmp_path / SCHEMA).mkdir()
    with pytest.raises(ta.CheckpointError, match="is a folder"):
        ta.save(tmp_path / SCHEMA, everything())
    with pytest.raises(ta.CheckpointError, match="not a schema file"):
        ta.read_metadata(tmp_path / SCHEMA)


# What reads it.


@every_tree
def test_every_tree_fits_its_schema(row, tmp_path):
    ta.save(tmp_path / SCHEMA, row.make())
    assert ta.compare_checkpoint(tmp_path / SCHEMA, row.make()).fits


@pytest.mark.parametrize("row", some(TREES), ids=lambda row: row.name)
def test_a_schema_loads_as_the_abstract_tree_of_what_a_checkpoint_holds(row, tmp_path):
    tree = row.make()
    if row.name == "abstract":
        tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
    for name in ("x.safetensors", SCHEMA):
        ta.save(tmp_path / name, tree)
    same(ta.load(tmp_path / "x.safetensors"), ta.load(tmp_path / SCHEMA))
    same(
        ta.read_metadata(tmp_path / "x.safetensors"),
        ta.read_metadata(tmp_path / SCHEMA),
    )


def test_a_schema_gives_abstract_leaves(schema):
    found = ta.load(schema)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(found))
    assert (found["step"].shape, found["step"].dtype) == ((), np.int64)
    assert found["keys"].dtype == jax.random.key(0, impl="rbg").dtype
    assert found["keys"].shape == (4,)
    assert ta.load(schema, where="blocks/0") == {
        "blocks": {"0": {"q": jax.ShapeDtypeStruct((8, 3), np.float32)}}
    }


@pytest.mark.slow
def test_a_schema_is_a_target(schema, tmp_path):
    tree = everything()
    ta.save(tmp_path / "x.safetensors", tree)
    again = ta.load(tmp_path / "x.safetensors", ta.load(schema))
    assert not ta.tree_diff(again, ta.load(tmp_path / "x.safetensors"), values=True)
    assert isinstance(again["blocks"]["0"]["q"], jax.Array)
    assert again["embed"]["w"] is again["head"]["w"]
    assert again["step"] == 7


def test_a_schema_holds_no_arrays(schema, tmp_path):
    for target in (everything(), {"other": np.ones(2)}):
        with pytest.raises(ta.CheckpointError, match="is a schema and holds no arrays"):
            ta.load(schema, target)
    for name in ("x", "x.safetensors"):
        text = run("convert", schema, tmp_path / name, code=2)
        assert "is a schema and holds no arrays" in text
    assert os.listdir(tmp_path) == [SCHEMA]


def test_a_state_is_not_carried_from_a_schema(tmp_path):
    params = {"w": jnp.ones(3)}
    tx = optax.adam(0.1)
    ta.save(tmp_path / SCHEMA, tx.init(params))
    saved = ta.load(tmp_path / SCHEMA)
    with pytest.raises(ta.CheckpointError, match="no arrays: '0/count'"):
        ta.carry_state(tx, params, saved)
    abstract = jax.eval_shape(lambda: params)
    assert len(ta.carry_state(tx, abstract, saved)[1].carried) == 3


@pytest.mark.parametrize("name", ["x.safetensors", "x", "x.npz", "x.msgpack"])
def test_a_checkpoint_of_each_format_becomes_a_schema(name, tmp_path):
    write(tmp_path / name, {"b": np.ones((2, 3), np.float32), "a/b": np.zeros(4, "i8")})
    run("convert", tmp_path / name, tmp_path / SCHEMA)
    same(ta.read_metadata(tmp_path / SCHEMA), ta.read_metadata(tmp_path / name))
    again = tmp_path / "again.schema.toml"
    run("convert", tmp_path / SCHEMA, again)
    assert again.read_text() == (tmp_path / SCHEMA).read_text()


def test_numbers_of_a_schema_fit_by_their_kind(schema):
    tree = everything()
    report = ta.compare_checkpoint(schema, tree | {"step": 8, "rate": np.float32(3.0)})
    assert report.fits
    assert not report.numbers
    assert "changed" not in str(report)
    report = ta.compare_checkpoint(schema, tree | {"step": 0.5, "rate": 3, "flag": 1})
    assert report.retyped == {
        "flag": ("a number, bool[]", "an int"),
        "rate": ("a number, float64[]", "an int"),
        "step": ("a number, int64[]", "a float"),
    }
    assert [
        *ta.compare_checkpoint(schema, tree | {"step": 0.5}, cast=True).retyped
    ] == []


def test_a_report_says_what_does_not_fit(schema):
    tree = everything()
    tree["key"] = jax.random.key(0, impl="rbg")
    tree["scale"] = jnp.ones(())
    tree["embed"] = {"w": jnp.ones((4, 4))}
    tree["new"] = jnp.ones(1)
    del tree["blocks"]
    report = ta.compare_checkpoint(schema, tree)
    assert not report.fits
    assert report.missing == ("new",)
    assert report.unexpected == ("blocks/0/q", "blocks/1/q")
    assert [*report.misshaped] == ["embed/w", "key"]
    assert [*report.retyped] == ["scale"]
    assert repr(report) == str(report)


def test_a_migration_moves_a_schema(tmp_path):
    layers = {f"layers.{n}.weight": np.ones((4, 3), np.float32) for n in range(2)}
    ta.save(tmp_path / SCHEMA, layers)
    stack = ta.Migration({"layers.{n}.weight : o i": "layers/kernel : n i o"})
    found = ta.load(tmp_path / SCHEMA, migration=stack)
    assert found == {"layers": {"kernel": jax.ShapeDtypeStruct((2, 3, 4), np.float32)}}
    target = {"layers": {"kernel": np.ones((2, 3, 4), np.float32)}}
    assert ta.compare_checkpoint(tmp_path / SCHEMA, target, migration=stack).fits
    assert stack.plan(ta.read_metadata(tmp_path / SCHEMA), target).exact
    (tmp_path / "stack.toml").write_text(stack.to_toml())
    new = tmp_path / "new.schema.toml"
    run("convert", tmp_path / SCHEMA, new, "--migration", tmp_path / "stack.toml")
    assert lines(new) == '\n"layers/kernel" = "float32[2,3,4]"\n'


def test_what_a_function_makes_of_a_schema_is_not_known(schema):
    tree = {"q": jax.ShapeDtypeStruct((3, 8), np.float32)}
    migration = ta.Migration({"blocks/0/q": ("q", np.transpose), "{x:**}": None})
    with pytest.raises(ta.MigrationError, match="what that makes of a schema"):
        ta.load(schema, migration=migration)
    assert ta.compare_checkpoint(schema, tree, migration=migration).fits


# Its hash.


@pytest.mark.parametrize("row", some(TREES), ids=lambda row: row.name)
def test_the_hash_is_that_of_the_checkpoint_in_every_format(row, tmp_path):
    tree = row.make()
    if row.name == "abstract":
        tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
    names = [SCHEMA, "x.safetensors", *(["x"] if row.paths else [])]
    for name in names:
        ta.save(tmp_path / name, tree)
    ta.save(tmp_path / "shards", tree, max_shard_bytes=20)
    found = {hash_of(tmp_path / name) for name in (*names, "shards")}
    assert len(found) == 1
    assert "" not in found


@pytest.mark.slow
def test_the_hash_of_a_tree_with_everything(schema, tmp_path):
    tree = everything()
    ta.save(tmp_path / "x.safetensors", tree)
    ta.save(tmp_path / "shards", tree, max_shard_bytes=100)
    run("convert", tmp_path / "x.safetensors", tmp_path / "y.schema.toml")
    run("convert", schema, tmp_path / "z.schema.toml")
    names = ("x.safetensors", "shards", "y.schema.toml", "z.schema.toml")
    assert {hash_of(tmp_path / x) for x in names} == {hash_of(schema)}
    tree.pop('ü "x"\n')  # Orbax stores no leaf without elements
    for name in ("orbax", "x.safetensors"):
        ta.save(tmp_path / name, tree)
    run("convert", tmp_path / "orbax", tmp_path / "y.schema.toml", "--force")
    names = ("orbax", "x.safetensors", "y.schema.toml")
    assert len({hash_of(tmp_path / name) for name in names}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"step": 7.0},
        {"step": np.int64(7)},
        {"key": jax.random.key_data(jax.random.key(0))},
        {"key": jax.random.key(0, impl="rbg")},
        {"scale": jnp.ones((), jnp.float16)},
        {"scale": jnp.ones(1, jnp.bfloat16)},
        {"head": {"w": jnp.ones((3, 4))}},
        {"act": jnp.ones(1)},
    ],
)
def test_the_hash_says_what_a_leaf_is(change, schema):
    before = hash_of(schema)
    ta.save(schema, everything() | {"step": 8})
    assert hash_of(schema) == before
    ta.save(schema, everything() | change)
    assert hash_of(schema) != before


def test_a_leaf_under_an_empty_key_is_not_tied(tmp_path):
    x = jnp.ones(2)
    tree = {"": x, "b": x, "c": x}
    ta.save(tmp_path / "m.safetensors", tree)
    ta.save(tmp_path / "shards", tree, max_shard_bytes=8)
    ta.save(tmp_path / SCHEMA, tree)
    for name in ("m.safetensors", "shards", SCHEMA):
        assert ties_of(tmp_path / name) == {"c": "b"}
    for name in ("m.safetensors", "shards"):
        same(ta.load(tmp_path / name, tree), tree)


@pytest.mark.slow
def test_orbax_keeps_ties(tmp_path):
    ta.save(tmp_path / "x", everything(), where=["embed", "head", "step"])
    assert ties_of(tmp_path / "x") == {"head/w": "embed/w"}
    stored = ta.load(tmp_path / "x")
    assert stored["embed"]["w"] is stored["head"]["w"]
    again = ta.load(tmp_path / "x", stored)
    assert again["embed"]["w"] is again["head"]["w"]


def test_an_edit_of_a_schema_is_asked_about_once(schema):
    text = schema.read_text("utf-8").replace("bfloat16[]", "bfloat16[8]")
    schema.write_text(text, "utf-8")
    with pytest.raises(ta.CheckpointError) as caught:
        ta.compare_checkpoint(schema, everything())
    message = str(caught.value)
    assert str(schema) in message
    assert "remove that line" in message
    line = re.search(r'write (hash = "[0-9a-f]{16}")', message)[1]
    old = re.search("hash = .*", text)[0]
    for new in (line, ""):
        schema.write_text(text.replace(old, new), "utf-8")
        assert ta.read_metadata(schema)["scale"].shape == (8,)


def test_lines_may_change_their_order(schema):
    head, table, rest = schema.read_text("utf-8").partition("[leaves]\n")
    schema.write_text(head + table + "\n".join(rest.splitlines()[::-1]), "utf-8")
    assert ta.compare_checkpoint(schema, everything()).fits


def test_a_file_that_another_program_changed_is_read_with_a_warning(tmp_path):
    path = tmp_path / "x.safetensors"
    ta.save(path, {"a": np.ones(2), "b": np.ones(3)})
    with safetensors.safe_open(path, "np") as file:
        texts = file.metadata()
    content = {"a": np.ones(2)}
    safetensors.numpy.save_file(content, path, texts)
    for read in (ta.read_metadata, ta.load, lambda x: ta.load(x, content)):
        with pytest.warns(ta.TreeAdaptWarning, match=r"x.safetensors.*as it is now"):
            read(path)
    safetensors.numpy.save_file(content, path)  # as other programs write
    same(ta.load(path), content)
    own = json.loads(texts["treeadapt"])
    del own["hash"], own["version"]  # as earlier versions wrote
    safetensors.numpy.save_file(content, path, {"treeadapt": json.dumps(own)})
    same(ta.load(path), content)


@pytest.mark.slow
def test_a_folder_that_another_program_changed_is_read_with_a_warning(tmp_path):
    ta.save(tmp_path / "x", {"a": np.ones(2), "b": 3})
    file = tmp_path / "x" / "_METADATA"
    document = json.loads(file.read_text())
    assert document["custom_metadata"]["treeadapt"]["kinds"] == {"b": "number"}
    document["custom_metadata"]["treeadapt"]["kinds"] = {}
    file.write_text(json.dumps(document))
    with pytest.warns(ta.TreeAdaptWarning, match="is read as it is now"):
        assert [*ta.read_metadata(tmp_path / "x")] == ["a", "b"]
    del document["custom_metadata"]["treeadapt"]["hash"]
    file.write_text(json.dumps(document))
    assert [*ta.read_metadata(tmp_path / "x")] == ["a", "b"]


@pytest.mark.parametrize("about", [None, [], {"treeadapt": 1}, {"treeadapt": {}}])
def test_an_index_of_others_needs_no_hash(about, tmp_path):
    ta.save(tmp_path / "x", {"a": np.ones(2), "b": np.ones(3)}, max_shard_bytes=30)
    file = tmp_path / "x" / "model.safetensors.index.json"
    document = json.loads(file.read_text())
    for metadata in (about, {"treeadapt": {"hash": "0"}}):
        file.write_text(json.dumps(document | {"metadata": metadata}))
        if metadata is about:
            assert [*ta.read_metadata(tmp_path / "x")] == ["a", "b"]
    with pytest.warns(ta.TreeAdaptWarning, match="is read as it is now"):
        ta.read_metadata(tmp_path / "x")


def test_marks_of_leaves_that_another_program_removed_are_named(tmp_path):
    tied = np.ones(3, np.float32)
    ta.save(tmp_path / "m.safetensors", {"a": tied, "b": tied, "step": 3})
    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as file:
        marks = file.metadata()

    def complaint(**leaves):
        path = tmp_path / "other.safetensors"
        safetensors.numpy.save_file(leaves, path, metadata=marks)
        with pytest.warns(ta.TreeAdaptWarning) as raised:
            assert {*leaves} <= {*ta.read_metadata(path)}
        return str(raised[0].message)

    step = np.array(3)
    assert "ties 'b' to 'a' but stores no 'a'" in complaint(step=step)
    text = complaint(a=tied, b=tied.copy(), step=step)
    assert "ties 'b' to 'a' but stores 'b', too" in text
    assert "says that 'step' is a 'number' but lacks it" in complaint(a=tied)


@pytest.mark.slow
def test_ties_of_an_orbax_folder_must_be_equal_leaves(tmp_path):
    weight = jnp.ones(3)
    ta.save(tmp_path / "x", {"a": weight, "b": weight, "c": jnp.ones(2)})
    file = tmp_path / "x" / "_METADATA"
    document = json.loads(file.read_text())
    for ties in ({"c": "a"}, {"d": "a"}, {"a": "d"}, {"a": "b", "b": "a"}):
        document["custom_metadata"]["treeadapt"]["ties"] = ties
        file.write_text(json.dumps(document))
        text = " in it is not ".join(map(repr, next(iter(ties.items()))))
        with pytest.warns(ta.TreeAdaptWarning, match=text):
            assert {*ta.read_metadata(tmp_path / "x")} == {*"abc"}


# Hostile and damaged files.


HOSTILE = {
    "nothing": ("", "it is empty"),
    "no table": ("version = 1\n", "it has no leaves"),
    "a number for a table": ("version = 1\nleaves = 1", "'leaves' is not a table"),
    "version 2": (text_of(head="version = 2"), "version 2"),
    "another field": (text_of(head="version = 1\ncode = 'x'"), "unknown field 'code'"),
    "a leaf twice": (text_of('"a" = "int"', '"a" = "int"'), "malformed"),
    "no quotes": (text_of("a.b.c = 'int'"), "not in quotes"),
    "no TOML": (text_of('"a" = float32[3]'), "not in quotes.*Names and texts"),
    "a number": (text_of('"a" = 3'), "'a' is '3'"),
    "a list": (text_of('"a" = ["float32", 3]'), "not in quotes"),
    "unknown dtype": (text_of('"a" = "float33[3]"'), "unknown dtype, 'float33'"),
    "an object": (text_of('"a" = "object[3]"'), "unknown dtype, 'object'"),
    "no shape": (text_of('"a" = "float32"'), "Write shape and dtype"),
    "a negative size": (text_of('"a" = "float32[-1]"'), "Write shape and dtype"),
    "a huge size": (text_of(f'"a" = "float32[{"9" * 5_000}]"'), "Write shape and"),
    "a huge product": (text_of(f'"a" = "int8[{2**40},{2**40}]"'), "no sound shape"),
    "a hundred axes": (text_of(f'"a" = "int8[{"1," * 99}1]"'), "no sound shape"),
    "other digits": (text_of('"a" = "int8[٣]"'), "Write shape and dtype"),
    "an end": (text_of('"a" = "int8[3]\\n"'), "Write shape and dtype"),
    "a kind": (text_of('"a" = "secret uint32[2]"'), "Write shape and dtype"),
    "a number of rank 1": (text_of('"a" = "number int32[1]"'), "is not a 'number'"),
    "a key of that kind": (text_of('"a" = "key<number> int8[2]"'), "not a 'number'"),
    "tied to nothing": (text_of('"a" = "tied to b"'), "ties .* but stores no 'b'"),
    "tied to itself": (text_of('"a" = "tied to a"'), "ties .* but stores no 'a'"),
    "tied twice": (
        text_of('"a" = "tied to b"', '"b" = "tied to c"', '"c" = "int"'),
        "ties 'a' to 'b' but stores no 'b'",
    ),
    "a conflict": (
        text_of("<<<<<<< HEAD", '"a" = "int"', "=======", ">>>>>>> x"),
        r"malformed: .*\(at line 3, ",
    ),
    "a hash of another type": (text_of(head="version = 1\nhash = 3"), "and not '3'"),
    "many dots": (text_of(f"{'a.' * 99}a = 'int'"), "too many dots"),
    "deep": (text_of(f"a = {'[' * 9_999}"), "not in quotes"),
    "two tables": (text_of("[more]"), "or there is a table"),
    "a table in a line": (text_of('"a" = { b = "int" }'), "or there is a table"),
    "an escape": (text_of('"\\u001b[31m" = "x"'), r"'\\x1b\[31m'"),
    "no utf-8": (b"version = 1\n\xff", "not UTF-8"),
}


@pytest.mark.hazard("K7", "K8", "K11", "K12", "K16")
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_schemas_are_short_errors(case, tmp_path):
    content, text = HOSTILE[case]
    path = tmp_path / SCHEMA
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (ta.read_metadata, ta.load, lambda x: ta.compare_checkpoint(x, {})):
        with pytest.raises(ta.CheckpointError, match=text) as caught:
            read(path)
        message = str(caught.value)
        assert str(path) in message
        assert len(message) < 700
        assert "\x1b" not in message


@pytest.mark.slow
def test_a_cut_or_changed_schema_either_raises_or_loads(schema):
    lines = schema.read_bytes().splitlines(keepends=True)
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        kept = lines[:2] + lines[3:] if rng.integers(2) else lines
        data = bytearray(b"".join(kept))
        at, size = rng.integers(len(data)), rng.integers(1, 20)
        new = rng.choice(bytearray(b'"[]=<>, \n\\019az#{}.\xff'), 1).tobytes()
        data[at : at + size] = new if rng.integers(2) else b""
        schema.write_bytes(data)
        try:
            ta.load(schema)
        except ta.CheckpointError:
            refused += 1
    assert refused > 100


def test_what_a_person_may_write(tmp_path):
    path = tmp_path / SCHEMA
    path.write_text(
        text_of('"a" = "number int32[]"', '"b" = "number int64[]"', "c = 'complex'")
    )
    assert kinds_of(path) == dict.fromkeys("abc", "number")
    again = tmp_path / "again.schema.toml"
    run("convert", path, again)
    assert lines(again) == '\n"a" = "number int32[]"\n"b" = "int"\n"c" = "complex"\n'


def test_an_unknown_kind_of_key_is_an_error_where_it_matters(tmp_path):
    path = tmp_path / SCHEMA
    path.write_text(text_of('"a" = "key<my own> kind> uint32[2]"'))
    assert kinds_of(path) == {"a": "my own> kind"}
    with pytest.raises(ta.CheckpointError, match="my own> kind"):
        ta.load(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / SCHEMA
    with path.open("wb") as file:
        file.truncate(CAPS["bytes of a schema"] + 1)
    with pytest.raises(ta.CheckpointError, match="larger than 16,777,216 bytes"):
        ta.read_metadata(path)


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**63,), (0, 2**64), (1,) * 65])
def test_a_schema_that_cannot_be_read_is_not_written(shape, tmp_path):
    spec = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(
        ta.CheckpointError, match=r"'a' is float32\[.*no checkpoint holds"
    ):
        ta.save(tmp_path / SCHEMA, {"a": spec})
    assert not (tmp_path / SCHEMA).exists()


@pytest.mark.parametrize("shape", [(2**31, 2**31), (0, 2**63 - 1), (1,) * 64])
def test_a_schema_that_is_written_can_be_read(shape, tmp_path):
    spec = jax.ShapeDtypeStruct(shape, jnp.float32)
    ta.save(tmp_path / SCHEMA, {"a": spec})
    assert ta.read_metadata(tmp_path / SCHEMA)["a"].shape == shape


@pytest.mark.slow
def test_a_large_model_has_a_schema(tmp_path):
    experts = {
        f"model.language_model.layers.{n}.mlp.experts.{e}.{name}_proj.weight_scale_inv"
        for n in range(40)
        for e in range(256)
        for name in ("gate", "down")
    }
    spec = jax.ShapeDtypeStruct((2_048, 512), jnp.bfloat16)
    ta.save(tmp_path / SCHEMA, dict.fromkeys(sorted(experts), spec))
    assert (tmp_path / SCHEMA).stat().st_size * 8 < CAPS["bytes of a schema"]
    assert ta.read_metadata(tmp_path / SCHEMA).keys() == experts


# The command line.


def changed():
    """The tree of ``everything`` after a change, for ``module:function``."""
    tree = everything() | {"scale": jnp.ones(2, jnp.bfloat16)}
    tree["embedding"] = tree.pop("embed")
    return tree


def test_the_commands_take_a_schema(schema, tmp_path):
    assert "blocks/0/q" in run("show", schema)
    assert "Tied, and counted twice: 'head/w' is 'embed/w'" in run("show", schema)
    rules = tmp_path / "rules.toml"
    rules.write_text('version = 1\n[rules]\n"blocks" = "a"\n"heads" = "b"\n')
    assert "unused: rule 2" in run("lint", schema, "--rules", rules, code=1)
    assert "gets 'a'" in run("explain", schema, "blocks/0/q", "--rules", rules)
    rules.write_text('version = 1\n[rules]\n"**" = []\n')
    text = run("show", schema, "--rules", rules, "--mesh", "data=4")
    assert "on each of 4 devices" in text


def test_diff_of_schemas_is_for_ci(schema, tmp_path):
    other = tmp_path / "other.schema.toml"
    ta.save(other, everything() | {"step": 8})
    assert run("diff", schema, other).startswith("No difference in names, shapes")
    ta.save(other, changed())
    text = run("diff", schema, other, code=1)
    assert text.splitlines() == [
        "2 differences: 1 renamed, 1 reshaped.",
        "> renamed   'embed/w' -> 'embedding/w': float32[3,4]",
        "~ reshaped  'scale': bfloat16[] -> bfloat16[2]",
        f"note: treeadapt draft {schema} {other} writes the table.",
    ]
    run("diff", schema, "test_schemas:everything")
    of_function = text.replace(str(other), "test_schemas:changed")
    assert run("diff", schema, "test_schemas:changed", code=1) == of_function
    ta.save(tmp_path / "x.safetensors", everything())
    run("diff", schema, tmp_path / "x.safetensors")
    assert "holds no arrays" in run("diff", schema, other, "--values", code=2)
    ta.save(other, everything() | {"key": jax.random.key_data(jax.random.key(0))})
    assert "'key': key<fry>[] -> uint32[2]" in run("diff", schema, other, code=1)


def test_a_schema_whose_hash_differs_is_unusable(schema):
    schema.write_text(schema.read_text("utf-8").replace("[8,3]", "[8,4]"), "utf-8")
    assert "remove that line" in run("diff", schema, schema, code=2)


ROWS = """
version = 1

[[rows]]
from = "h.{l}.attn.weight : i o"
to = "blocks/attn : l o i"

[[rows]]
from = "{rest}"
to = "{rest}"
"""


@pytest.fixture
def schemas(tmp_path):
    """Two schemas and the migration that leads from one to the other."""
    old = {f"h.{n}.attn.weight": np.ones((4, 6), np.float32) for n in range(3)}
    ta.save(tmp_path / "old.schema.toml", old | {"norm": np.ones(4)})
    new = {"blocks": {"attn": np.ones((3, 6, 4), np.float32)}, "norm": np.ones(4)}
    ta.save(tmp_path / "new.schema.toml", new)
    (tmp_path / "rows.toml").write_text(ROWS)
    ta.save(tmp_path / "old.safetensors", old | {"norm": np.ones(4)})
    return [tmp_path / f"{x}.toml" for x in ("old.schema", "new.schema", "rows")]


def test_a_migration_between_two_schemas_is_linted(schemas):
    old, new, rows = schemas
    assert run("lint", old, new, "--migration", rows) == "0 findings in 4 arrays.\n"
    text = run("explain", old, "h.1.attn.weight", "--migration", rows, "--target", new)
    assert "-> 'blocks/attn'" in text
    ta.save(new, {"blocks": {"attn": np.ones((3, 4, 6), np.float32)}})
    text = run("lint", old, new, "--migration", rows, code=1)
    assert "'blocks/attn': float32[3,4,6]" in text
    assert "'norm'" in text


def test_convert_makes_and_takes_schemas(schemas, tmp_path):
    old, new, rows = schemas
    made = tmp_path / "made.schema.toml"
    given = tmp_path / "old.safetensors"
    assert "Wrote 4 leaves" in run("convert", given, made)
    assert not ta.tree_diff(ta.load(made), ta.load(old))
    run("diff", made, old)
    run("convert", given, made, "--migration", rows, "--target", new, "--force")
    run("diff", made, new)
    run("convert", old, made, "--migration", rows, "--force")
    run("diff", made, new)
    run("convert", given, tmp_path / "x.safetensors", "--migration", rows)
    run("diff", tmp_path / "x.safetensors", new)
    for more in ([], ["--dry-run"], ["--max-shard-bytes", "100"]):
        text = run("convert", old, tmp_path / "y", *more, code=2)
        assert text.endswith("is a schema and holds no arrays. Name a checkpoint.\n")
    assert not (tmp_path / "y").exists()
