"""``shard_largest``: specs that follow the shape of each array and the mesh.

What a spec is, and which rule decides, is in ``test_sharding.py``.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command import run
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scanned import BY_NAME as TWINS
from trees import TREES

import treeadapt as ta
from treeadapt import ReplicatedWarning, named_shardings, partition_specs, shard_largest

MESH = AbstractMesh((4, 2), ("data", "model"))
PARAMS = {
    "up": {
        "bias": jax.ShapeDtypeStruct((16,), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32),
    },
    "scale": jax.ShapeDtypeStruct((), jnp.float32),
}
RULES = {"**": shard_largest("data", min_size=32)}
SPECS = {"up": {"bias": P(), "kernel": P(None, "data")}, "scale": P()}

#: Arrays that the mesh does not divide are not what these tests are about.
copies_are_fine = pytest.mark.filterwarnings("ignore::treeadapt.ReplicatedWarning")


def spec_of(shape, value):
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return named_shardings(params, {"w": value}, MESH)["w"].spec


def divides(spec, shape, mesh=MESH):
    """Whether JAX can divide an array so, with an entry of the spec for each axis."""
    try:
        NamedSharding(mesh, spec).shard_shape(shape)
    except ValueError:
        return False
    return len(spec) in (0, len(shape))


def specs_on(tree, rules, mesh=MESH, **options):
    shardings = named_shardings(tree, rules, mesh, **options)
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


# What it gives


@pytest.mark.parametrize(
    ("shape", "axis", "min_size", "spec"),
    [
        ((8, 16), "data", 0, P(None, "data")),
        ((16, 8), "data", 0, P("data", None)),
        ((8, 8), "data", 0, P("data", None)),  # the first of equal ones
        ((3, 8, 8), "data", 0, P(None, "data", None)),
        ((30, 8), "data", 0, P(None, "data")),  # 4 does not divide 30
        ((8, 8), "data", 64, P("data", None)),
        ((8, 8), "data", 65, P()),
        ((12, 8), ("data", "model"), 0, P(None, ("data", "model"))),
        ((8, 4), ["data", "model"], 0, P(("data", "model"), None)),
        ((8, 4), ("data",), 0, P("data", None)),
        ((), "data", 0, P()),
        ((0, 8), "data", 0, P()),
        ((2**8, 2**8), "data", 2**16, P("data", None)),
        ((2**8, 2**8), "data", 2**16 + 1, P()),
    ],
)
def test_the_largest_axis_that_the_mesh_divides(shape, axis, min_size, spec):
    assert spec_of(shape, shard_largest(axis, min_size)) == spec


@pytest.mark.parametrize("shape", [(8, 8), (8, 3, 8), (16, 8, 8, 16), (8, 8, 6)])
def test_of_equal_axes_the_last_if_asked(shape):
    first, last = (spec_of(shape, shard_largest("data", 0, ties=x)) for x in TIES)
    largest = [axis for axis, size in enumerate(shape) if size == max(shape)]
    assert [*first].index("data") == largest[0]
    assert [*last].index("data") == largest[-1]


TIES = ("first", "last")


def test_small_is_below_two_to_the_sixteen_unless_said():
    assert shard_largest("data") == shard_largest("data", min_size=2**16)


@pytest.mark.slow
@copies_are_fine
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), max_size=4).map(tuple),
    st.sampled_from(["data", "model", ("data", "model"), ("model", "data")]),
    st.sampled_from([0, 1, 16, 100]),
)
def test_of_all_specs_that_fit_it_is_the_one_of_the_largest_axis(shape, axis, min_size):
    spec = spec_of(shape, shard_largest(axis, min_size))
    places = sorted(range(len(shape)), key=lambda place: (-shape[place], place))
    specs = [
        P(*(axis if i == at else None for i in range(len(shape)))) for at in places
    ]
    fitting = [each for each in specs if divides(each, shape)]
    is_large = math.prod(shape) >= min_size
    assert spec == (fitting[0] if fitting and is_large else P())


@copies_are_fine
@pytest.mark.filterwarnings("ignore::treeadapt.UnstablePathWarning")
@pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)
def test_every_array_of_every_tree_has_a_spec_that_fits(row):
    tree = row.make()
    if row.name.startswith("Optax") or row.name.endswith("Partitioned"):
        pytest.skip("a state of Optax is refused; a box decides itself")
    default = shard_largest("model", min_size=4)
    shardings = ta.to_flat_dict(named_shardings(tree, {}, MESH, default=default))
    for path, leaf in ta.to_flat_dict(tree).items():
        shape = getattr(leaf, "shape", ())
        spec = shardings[path].spec
        is_even = any(size % 2 == 0 for size in shape) and math.prod(shape) >= 4
        assert divides(spec, shape)
        assert (spec != P()) == is_even


@copies_are_fine
@pytest.mark.parametrize("name", ["Linen, axis 1", "nnx", "Equinox", "dict of experts"])
@pytest.mark.parametrize("size", [5, 7, 13])  # 5 layers, of which no other size is 5
@pytest.mark.parametrize("min_size", [0, 50])
def test_layers_are_sharded_as_in_the_unrolled_model(name, size, min_size):
    twin, mesh = TWINS[name], AbstractMesh((size,), ("data",))
    default = shard_largest("data", min_size=min_size)
    rules = ta.Rules({}, default=default, stacks=twin.stacks)
    scanned = twin.scanned()
    of_arrays = ta.to_flat_dict(named_shardings(scanned, rules, mesh))
    of_layers = ta.to_flat_dict(named_shardings(twin.unrolled(), rules, mesh))
    sharded = 0
    for path, layer, index in twin.places(ta.split(scanned)[0]):
        entries = iter(of_layers[layer].spec)
        whole = [None if isinstance(i, int) else next(entries, None) for i in index]
        stored = of_arrays[path].spec
        assert [*stored, *[None] * (len(whole) - len(stored))] == whole, path
        sharded += any(whole)
    assert (sharded > 0) == (size != 5)


def test_the_first_rule_that_matches_decides_next_to_other_specs():
    rules = {"**/bias": P("model"), "**": shard_largest("data", 0)}
    assert specs_on(PARAMS, rules) == {
        "up": {"bias": P("model"), "kernel": P(None, "data")},
        "scale": P(),
    }


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        (RULES, {}),
        ({"**": "all"}, {"specs": {"all": RULES["**"]}}),
        (ta.Rules({"**": "all"}).bind(PARAMS), {"specs": {"all": RULES["**"]}}),
        ({}, {"default": RULES["**"]}),
        (ta.Rules({}, default=RULES["**"]), {}),
    ],
)
def test_it_is_a_value_wherever_a_spec_is(rules, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is small was meant to be copied
        assert specs_on(PARAMS, rules, **options) == SPECS


def test_a_function_among_the_params_is_on_every_device():
    model = {"w": jnp.ones((8, 16)), "act": jax.nn.relu}
    shardings = named_shardings(model, RULES, MESH)
    assert (shardings["w"].spec, shardings["act"].spec) == (P(None, "data"), P())


def test_a_box_that_says_otherwise_is_an_error():
    kernel = nn.with_partitioning(nn.initializers.ones, ("data", None))
    init = nn.Dense(16, kernel_init=kernel, use_bias=False).init
    variables = jax.eval_shape(init, jax.random.key(0), jnp.ones((1, 8)))
    with pytest.raises(ta.ShardingError) as caught:
        named_shardings(variables, RULES, MESH)
    text = str(caught.value)
    assert "P('data', None) by its box, P(None, 'data') by rule '**'" in text
    same = {"**": shard_largest("data", 2**16)}
    assert "P() by rule" in refusal(named_shardings, variables, same, MESH)


def test_state_follows_params():
    shardings = named_shardings(PARAMS, RULES, MESH)
    state = ta.opt_state_shardings(optax.adam(0.1), PARAMS, shardings)
    assert state[0].mu == shardings


# The mesh


def refusal(function, *arguments, **options):
    with pytest.raises(ta.ShardingError) as caught:
        function(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_partition_specs_asks_the_mesh_that_is_set(kind):
    types = (getattr(AxisType, kind),) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    with jax.set_mesh(mesh):
        assert partition_specs(PARAMS, RULES) == SPECS
        specs = []
        jax.jit(lambda params: specs.append(partition_specs(params, RULES))).lower(
            PARAMS
        )
    assert specs == [SPECS]
    other = AbstractMesh((16,), ("data",))
    with jax.set_mesh(mesh):  # a mesh that is passed counts more
        wide = {"**": shard_largest("data", 0)}
        assert specs_on(PARAMS, wide, other)["up"]["bias"] == P("data")


def test_without_a_mesh_partition_specs_names_the_function_that_takes_one():
    text = refusal(partition_specs, PARAMS, RULES)
    assert text == (
        "'scale' float32[]: shard_largest('data', min_size=32) (rule '**') needs the "
        "size of the mesh axis 'data', but no mesh is set. Call named_shardings(tree, "
        "rules, mesh), or set the mesh around this call: jax.set_mesh(mesh)."
    )
    assert partition_specs({"up": jnp.ones(4)}, {"up": P("data")}) == {"up": P("data")}


@pytest.mark.parametrize("min_size", [0, 2**16])  # also where it would shard nothing
def test_an_axis_that_the_mesh_does_not_have_is_an_error(min_size):
    rules = {"**": shard_largest(("data", "tensor"), min_size)}
    text = refusal(named_shardings, PARAMS, rules, MESH)
    assert "axis 'tensor', but the mesh has 'data'" in text
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        text = refusal(partition_specs, PARAMS, rules)
    assert "axis 'tensor', but the mesh has 'data'. Correct the name" in text


@pytest.mark.parametrize("source", ["rule", "default"])
def test_a_large_array_that_nothing_divides_is_reported(source):
    params = {**PARAMS, "odd": jnp.ones((7, 9)), "small": jnp.ones((3, 3))}
    pairs = [RULES, {}] if source == "rule" else [{}, {"default": RULES["**"]}]
    with pytest.warns(ReplicatedWarning) as caught:
        named_shardings(params, pairs[0], MESH, **pairs[1])
    (warning,) = caught
    assert "divides no axis of 1 leaf, 252 bytes" in str(warning.message)
    assert "every device: 'odd'. Pad an axis" in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named_shardings(params, {"odd": P(), **RULES}, MESH)


# The value


@pytest.mark.parametrize("axis", ["data", ("data", "model"), "it's"])
def test_it_is_data(axis):
    value = shard_largest(axis, min_size=8)
    assert eval(repr(value), {"shard_largest": shard_largest}) == value
    assert value == shard_largest(axis, min_size=8) != shard_largest(axis, min_size=9)
    assert hash(value) == hash(shard_largest(axis, min_size=8))
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    with pytest.raises(AttributeError):
        value.min_size = 9
    rules = ta.Rules({"**": value})
    assert (
        eval(repr(rules), {"Rules": ta.Rules, "shard_largest": shard_largest}) == rules
    )
    assert rules.where(shard_largest(axis, min_size=8)).matches("up/kernel")


@pytest.mark.parametrize("axis", ["", (), None, 3, ("data", 3), ("data", ""), {"data"}])
def test_what_is_not_a_mesh_axis_is_refused(axis):
    text = refusal(shard_largest, axis)
    assert f"got {axis!r}, which is not the name of a mesh axis" in text


def test_a_mesh_axis_twice_is_refused():
    assert "name each mesh axis once" in refusal(shard_largest, ("data", "data"))


@pytest.mark.parametrize("least", [-1, 1.5, "64", True])
def test_what_is_not_a_number_of_elements_or_bytes_is_refused(least):
    for name in ("min_size", "min_bytes"):
        text = refusal(shard_largest, "data", **{name: least})
        assert f"got {name}={least!r}. Write the number" in text


@pytest.mark.parametrize("ties", ["lasst", True, None, 0])
def test_ties_are_the_first_or_the_last(ties):
    assert f"got ties={ties!r}" in refusal(shard_largest, "data", ties=ties)


# Rules of others, rewritten: their names and shapes as facts

S = jax.ShapeDtypeStruct


def largest_by_bytes(leaf, size, min_bytes, *, at_least=2):
    """What openpi (4 MiB) and big_vision (4 MiB, of any rank) shard of an array."""
    is_small = math.prod(leaf.shape) * leaf.dtype.itemsize < min_bytes
    if len(leaf.shape) < at_least or is_small:
        return P()
    for axis in np.argsort(leaf.shape)[::-1]:
        if leaf.shape[axis] % size == 0:
            return P(*("fsdp" if i == axis else None for i in range(leaf.ndim)))
    return P()


def transformer(width, mlp, layers, heads, dtype):
    """Names and shapes of a scanned transformer as PaliGemma and ViT have them."""
    block = {
        "attn/q_einsum/w": (layers, heads, width, width // heads),
        "attn/kv_einsum/w": (layers, 2, 1, width, width // heads),
        "attn/attn_vec_einsum/w": (layers, heads, width // heads, width),
        "mlp/gating_einsum": (layers, 2, width, mlp),
        "mlp/linear": (layers, mlp, width),
        "pre_attention_norm/scale": (layers, width),
        "lora/a": (layers, width, 16),
        "square": (width, width),
    }
    return {
        "llm": {
            "embedder": S((257_152, width), dtype),
            "final_norm": S((width,), dtype),
        },
        "layers": {path: S(shape, dtype) for path, shape in block.items()},
        "img/pos_embedding": S((1, 256, 1152), jnp.float32),
        "action_out_proj/kernel": S((1024, 32), jnp.float32),
        "time": S((), jnp.int32),
    }


@copies_are_fine
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(2048, 16_384, 18, 8), (1024, 4096, 18, 8), (1152, 4304, 27, 16)]
)
@pytest.mark.parametrize("devices", [4, 8, 3])
def test_rules_by_bytes_of_others_are_one_row(sizes, dtype, devices):
    model, mesh = transformer(*sizes, dtype), AbstractMesh((devices,), ("fsdp",))
    by_bytes = shard_largest("fsdp", min_bytes=4 * 2**20, ties="last")
    for at_least, rules in (
        (2, [(ta.leaf(ndim=0) | ta.leaf(ndim=1), P()), ("**", by_bytes)]),
        (0, {"**": by_bytes}),
    ):
        shardings = ta.to_flat_dict(named_shardings(model, rules, mesh))
        for path, leaf in ta.to_flat_dict(model).items():
            want = largest_by_bytes(leaf, devices, 4 * 2**20, at_least=at_least)
            assert shardings[path].spec == want, path


def test_bytes_are_those_of_one_layer_and_both_limits_count():
    params = {"h": {"w": S((4, 8, 8), jnp.bfloat16)}, "w": S((8, 8), jnp.bfloat16)}
    for least, is_sharded in ((128, True), (129, False)):
        rules = ta.Rules(
            {"**": shard_largest("data", min_bytes=least)}, stacks={"h": 0}
        )
        specs = specs_on(params, rules)
        assert (specs["w"] == P("data", None)) == is_sharded
        assert (specs["h"]["w"] == P(None, "data", None)) == is_sharded
    assert spec_of((8, 8), shard_largest("data", 65, min_bytes=1)) == P()
    assert spec_of((8, 8), shard_largest("data", 64, min_bytes=257)) == P()
    assert spec_of((8, 8), shard_largest("data", 64, min_bytes=256)) == P("data", None)


# Files and reports

FILE = """\
version = 1

[rules]
"**/bias" = { shard_largest = ["data", "model"], min_size = 8 }
"**" = { shard_largest = "data", min_size = 32 }
"""


def test_a_rules_file_holds_it_both_ways(tmp_path):
    rules = ta.Rules({"**/bias": shard_largest(("data", "model"), 8), **RULES})
    assert rules.to_toml() == FILE
    (tmp_path / "rules.toml").write_text(FILE)
    assert ta.load_rules(tmp_path / "rules.toml") == rules
    as_default = ta.Rules({"scale": P()}, default=shard_largest("data"))
    (tmp_path / "default.toml").write_text(as_default.to_toml())
    assert ta.load_rules(tmp_path / "default.toml") == as_default
    text = '{"version": 1, "rules": {"**": {"shard_largest": "data"}}}'
    (tmp_path / "rules.json").write_text(text)
    loaded = ta.load_rules(tmp_path / "rules.json")
    assert loaded == ta.Rules({"**": shard_largest("data")})


def test_a_summary_shows_the_spec_that_results():
    report = ta.summarize(PARAMS, RULES, mesh=MESH, tx=optax.adam(0.1))
    specs = {row.path: row.spec for row in report.rows}
    assert specs == ta.to_flat_dict(SPECS)
    head, *lines = str(report).splitlines()
    assert head.split()[-3:] == ["label", "spec", "rule"]
    (kernel,) = (line for line in lines if line.startswith("up/kernel  [8,16]"))
    assert kernel.endswith("shard_largest('data', min_size=32)  P(None, 'data')     1")
    placed = {each.path: each.spec for each in report.memory.arrays}
    assert placed["up/kernel"] == placed["0/mu/up/kernel"] == P(None, "data")


def test_a_summary_without_a_mesh_or_with_specs_as_labels_has_no_such_column():
    assert "spec" not in str(ta.summarize(PARAMS, RULES)).splitlines()[0]
    report = ta.summarize(PARAMS, {"**": P()}, mesh=MESH)
    assert "spec" not in str(report).splitlines()[0]


def test_a_summary_reports_what_nothing_divides():
    report = ta.summarize({"odd": jnp.ones((7, 9))}, RULES, mesh=MESH)
    assert "The mesh divides no axis of 1 leaf" in str(report)


def test_the_command_shows_a_file_on_a_mesh(tmp_path):
    (tmp_path / "rules.toml").write_text(FILE)
    params = {"bias": jnp.ones(16), "kernel": jnp.ones((8, 16))}
    ta.save(tmp_path / "model.safetensors", {"up": params})
    names = tmp_path / "model.safetensors", "--rules", tmp_path / "rules.toml"
    mesh = "--mesh", "data=4,model=2"
    text = run("show", *names, *mesh)
    assert "P(('data', 'model'))" in text
    document = json.loads(run("show", *names, *mesh, "--format", "json"))
    kernel = {each["path"]: each for each in document["leaves"]}["up/kernel"]
    assert kernel["spec"] == [None, "data"]
    assert kernel["label"] == {"shard_largest": "data", "min_size": 32}
    document = json.loads(run("show", *names, "--format", "json"))
    assert "spec" not in document["leaves"][0]
