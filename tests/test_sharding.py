"""Specs and shardings by rules, and optimizer state that follows its params.

Runs on a mesh of the eight devices that ``conftest.py`` makes of one CPU. Several
processes are in ``test_multiprocess.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command import run
from flax import nnx
from flax.core import freeze
from flax.linen import partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scanned import BY_NAME as TWINS
from sizes import some
from transformations import BY_NAME as TRANSFORMATIONS
from transformations import CASES
from trees import BY_NAME, TREES

import treeadapt as ta
from treeadapt import (
    ReplicatedWarning,
    init_sharded,
    named_shardings,
    opt_state_shardings,
    partition_specs,
)

ABSTRACT = {
    "up": {
        "bias": jax.ShapeDtypeStruct((16,), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32),
    },
    "scale": jax.ShapeDtypeStruct((), jnp.float32),
}
RULES = {"**/kernel": P("data", "model"), "**/bias": P("model"), "scale": P()}
SPECS = {
    "up": {"bias": P("model"), "kernel": P("data", "model")},
    "scale": P(),
}

# What ``refusals.txt`` names, too.
SQUARE = jax.ShapeDtypeStruct((2, 2), jnp.float32)
ODD = {"up": {**ABSTRACT["up"], "odd": jax.ShapeDtypeStruct((6, 3), jnp.float32)}}
LABELS = ta.Rules({"**/kernel": "column", "**": "vector"})
NO_DEVICES = AbstractMesh((4, 2), ("data", "model"))
FOUR = AbstractMesh((2, 4), ("data", "four"))
ADAM = optax.adam(0.1)


def mesh_of(kind: str = "Auto") -> jax.sharding.Mesh:
    types = (getattr(AxisType, kind),) * 2
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


def params_on(mesh: jax.sharding.Mesh, memory_kind: str | None = None) -> Any:
    """Params with other numbers in every place, sharded as ``SPECS`` says."""
    values = jax.tree.map(
        lambda leaf: jnp.arange(float(np.prod(leaf.shape))).reshape(leaf.shape) / 64,
        ABSTRACT,
    )
    return jax.tree.map(
        lambda value, spec: jax.device_put(
            value, NamedSharding(mesh, spec, memory_kind=memory_kind)
        ),
        values,
        SPECS,
    )


both_meshes = pytest.mark.parametrize("kind", ["Auto", "Explicit"])


# Specs


@pytest.mark.parametrize(
    ("written", "spec"),
    [
        (P("x", None), P("x", None)),
        (("x", None), P("x", None)),
        (["x", ["y", "z"]], P("x", ("y", "z"))),
        ((), P()),
        ([None], P(None)),
        ([], P()),
    ],
)
def test_a_spec_is_read_as_it_is_written(written, spec):
    leaf = jax.ShapeDtypeStruct((2,) * len(spec), "float32")
    assert ta.partition_specs({"w": leaf}, {"**": written}) == {"w": spec}


MOE = {
    "Encoder/block_1/Moe/Mlp/Dense_0/kernel": (4, 8, 16),
    "Encoder/block_1/Moe/Mlp/Dense_0/bias": (4, 16),
    "Encoder/block_1/Moe/Mlp/count": (4,),
    "Encoder/block_1/Moe/Router/kernel": (8, 4),
}


def test_three_dots_stand_for_all_other_axes_whatever_the_rank(tmp_path):
    model = {path: jax.ShapeDtypeStruct(x, jnp.float32) for path, x in MOE.items()}
    file = tmp_path / "moe.toml"
    file.write_text(
        'version = 1\n[rules]\n"**/Moe/Mlp" = ["expert", "..."]\n"**" = []\n'
    )
    by_hand = {"**/Moe/Mlp": P("expert", ...), "**": P()}
    typed = {"**/Moe/Mlp": ("expert", ...), "**": ()}
    for rules in (by_hand, typed, ta.load_rules(file)):
        specs = partition_specs(model, rules)
        assert [specs[path] for path in MOE] == [
            P("expert", None, None),
            P("expert", None),
            P("expert"),
            P(),
        ]
    assert ta.load_rules(file).to_toml() == ta.Rules(by_hand).to_toml()
    specs = partition_specs(model, {"**": P(..., "x")})
    assert [len(specs[path]) for path in MOE] == [3, 2, 1, 2]
    assert all(spec[-1] == "x" for spec in specs.values())
    # Specs of one layer, labels, and a default.
    stacked = {"h": {"w": jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)}}
    rules = ta.Rules({"**": "a"}, stacks={"h": 0})
    assert partition_specs(stacked, rules, specs={"a": P("x", ...)}) == {
        "h": {"w": P(None, "x", None)}
    }
    assert partition_specs(stacked, {}, default=P("x", ...))["h"]["w"][0] == "x"
    assert "P('expert', ...)" in str(ta.summarize(model, by_hand))
    arrays = {path: np.zeros(shape, "float32") for path, shape in MOE.items()}
    ta.save(tmp_path / "moe.safetensors", arrays)
    tree, path = tmp_path / "moe.safetensors", next(iter(MOE))
    text = run("explain", tree, path, "--rules", file)
    assert "gets P('expert', ...)." in text


@pytest.mark.parametrize(
    "value",
    [None, 3, True, "", "x", "x, None", {"x": 1}, (1,), (("x", 2),), ("",), P],
)
@pytest.mark.hazard("B3")
def test_anything_else_is_no_spec(value):
    with pytest.raises(
        ta.ShardingError, match=r"The rule 'up/kernel' gives .* not a spec"
    ):
        partition_specs(ABSTRACT, {"up/kernel": value, "**": P()})


def test_the_first_rule_that_matches_decides():
    assert partition_specs(ABSTRACT, RULES) == SPECS


@pytest.mark.hazard("J7", "G15")
@pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)
def test_specs_have_the_treedef_of_the_tree(row):
    tree = row.make()
    if row.name.startswith("Optax"):
        with pytest.raises(ta.ShardingError, match="opt_state_shardings"):
            partition_specs(tree, {"**": P()})
        return
    rules = ta.Rules({"*": P()}, unused="ignore", default=P())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnstablePathWarning)
        warnings.simplefilter("ignore", ReplicatedWarning)
        if row.name.endswith("Partitioned"):
            rules = ta.Rules({"b": P()})
        specs = partition_specs(tree, rules, logical_axes={"x": "x", "y": "y"})
    assert type(specs) is (P if row.name == "bare leaf" else type(tree))
    if not row.opaque:  # a class that JAX does not know is opened for arrays alone
        assert jax.tree.structure(specs) == jax.tree.structure(tree)
        assert all(isinstance(spec, P) for spec in jax.tree.leaves(specs))


def test_a_spec_of_values_inside_a_program_is_refused():
    try:
        spec = P("x", None, unreduced={"y"})
    except TypeError:
        pytest.skip("this JAX has no such specs")
    with pytest.raises(ta.ShardingError, match="Leave out what is"):
        partition_specs(ABSTRACT, {"**": spec})


def test_statistics_keep_the_axes_that_all_their_origins_share():
    # Of (128, 4, 4) a mean over one of the last two axes may be either of them.
    tx = optax.adafactor(0.1, min_dim_size_to_factor=4)
    params = {
        "query": jax.ShapeDtypeStruct((128, 4, 4), jnp.float32),
        "out": jax.ShapeDtypeStruct((4, 4, 128), jnp.float32),
    }
    specs = {"query": P("data", "model", None), "out": P("model", None, "data")}
    factored, *_ = opt_state_shardings(tx, params, specs)
    made = jax.eval_shape(tx.init, params)[0]
    assert made.v_col["query"].shape == (128, 4)
    assert factored.v_col == {"query": P("data", None), "out": P(None, "data")}
    assert factored.v_row == {"query": P("model", None), "out": P("model", None)}


def test_an_array_without_a_rule_is_an_error_and_a_scalar_is_not():
    with pytest.raises(ta.UnmatchedPathError, match=r"1 of 3 arrays .* 'up/bias'"):
        partition_specs(ABSTRACT, {"**/kernel": P("x", None)})
    specs = partition_specs(ABSTRACT, {"up": P()})
    assert specs["scale"] == P()


def test_a_default_is_checked_like_a_rule():
    kernel = {"**/kernel": P("x", None)}
    assert partition_specs(ABSTRACT, kernel, default=P("y"))["up"]["bias"] == P("y")
    with pytest.raises(ta.ShardingError, match=r"'up/bias' .*\(the default\)"):
        partition_specs(ABSTRACT, kernel, default=P("y", None))


@pytest.mark.parametrize("default", [P(), P(None), ()])
def test_a_replicated_default_is_reported(default):
    with pytest.warns(ReplicatedWarning, match=r"1 leaf, 64 bytes.*'up/bias'") as seen:
        partition_specs(ABSTRACT, {"**/kernel": P("x", None)}, default=default)
    assert [warning.filename for warning in seen] == [__file__]
    rules, mesh = ta.Rules({"**/kernel": P("data", None)}, default=default), mesh_of()
    with pytest.warns(ReplicatedWarning, match="'up/bias'") as seen:
        named_shardings(ABSTRACT, rules, mesh)
    assert [warning.filename for warning in seen] == [__file__]


def test_a_rule_that_replicates_is_not_reported():
    partition_specs(ABSTRACT, {"**/kernel": P("x", None), "**": P()})


def test_labels_get_their_specs_from_a_table():
    rules = ta.Rules({"**/kernel": "column", "**": "vector"})
    specs = {"column": P("data", "model"), "vector": ()}
    assert partition_specs(ABSTRACT, rules, specs=specs)["up"] == {
        "bias": P(),
        "kernel": P("data", "model"),
    }


def test_a_rules_file_says_specs_as_lists(tmp_path):
    file = tmp_path / "sharding.toml"
    file.write_text(
        'version = 1\ndefault = []\n[rules]\n"**/kernel" = ["data", "model"]\n'
        '"**/bias" = [["data", "model"]]\n'
    )
    rules = ta.load_rules(file)
    specs = partition_specs(ABSTRACT, rules)
    assert specs["up"] == {"bias": P(("data", "model")), "kernel": P("data", "model")}
    assert ta.Rules(rules.pairs, default=rules.default).to_toml() == rules.to_toml()


def test_bound_rules_answer_for_a_flat_dict():
    model = BY_NAME["NamedTuple"].make()
    where = ta.node(type(model.hidden)) & ta.glob("**/w")
    rules = ta.Rules({where: P("x", None), "**": P()})
    params, _ = ta.split(model)
    assert partition_specs(params, rules.bind(model))["hidden/w"] == P("x", None)
    scalar = jnp.ones(())  # as a schedule's step count
    assert partition_specs(scalar, ta.Rules({"**": P()}).bind(scalar)) == P()


@pytest.mark.hazard("B3")
def test_static_leaves_get_the_empty_spec():
    model = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
    specs = partition_specs(model, {"**/weight": ("x", None), "**/bias": P()})
    assert specs.activation == P()
    assert specs.layers[0].weight == P("x", None)


# Boxes


def boxed() -> dict[str, Any]:
    return {
        "kernel": nn.Partitioned(jnp.ones((8, 4)), ("data", None)),
        "bias": jnp.ones(4),
    }


def test_a_box_speaks_where_no_rule_does():
    specs = partition_specs(boxed(), {"bias": P("model")})
    assert specs["kernel"].value == P("data", None)
    assert specs["bias"] == P("model")


def test_a_box_outranks_the_default():
    specs = partition_specs(boxed(), [], default=P("model"))
    assert ta.to_flat_dict(specs) == {"bias": P("model"), "kernel": P("data", None)}


def test_a_rule_may_say_what_the_box_says():
    rules = {"kernel": P("data", None), "bias": P()}
    assert partition_specs(boxed(), rules)["kernel"].value == P("data", None)


def test_logical_names_are_translated():
    tree = {"kernel": nn.LogicallyPartitioned(jnp.ones((8, 4)), ("embed", "mlp"))}
    axes = {"embed": None, "mlp": "model"}
    (spec,) = ta.to_flat_dict(partition_specs(tree, [], logical_axes=axes)).values()
    assert spec == P(None, "model")
    with pytest.raises(
        ta.ShardingError, match=r"'kernel' names an axis 'mlp'.*logical"
    ):
        partition_specs(tree, [], logical_axes={"embed": None})
    with pytest.raises(ta.ShardingError, match="logical_axes is a mapping"):
        partition_specs(tree, [], logical_axes="embed")


@pytest.mark.parametrize(
    "pairs",
    [
        (("embed", "data"), ("mlp", "model")),
        (("mlp", "model"), ("embed", "model"), ("embed", "data")),
        (("mlp", "data"), ("embed", "data")),
        (("embed", ("data", "model")), ("mlp", None)),
    ],
)
def test_logical_names_are_translated_as_flax_does(pairs):
    box = nn.LogicallyPartitioned(jnp.ones((8, 4)), ("embed", "mlp"))
    expected = nn.logical_to_mesh_axes(("embed", "mlp"), pairs)
    assert partition_specs({"w": box}, [], logical_axes=pairs)["w"].value == expected


def test_a_box_may_bring_its_own_translation():
    box = nn.LogicallyPartitioned(
        jnp.ones((8, 4)), ("embed", "mlp"), rules=(("embed", None), ("mlp", "model"))
    )
    assert partition_specs([box], [])[0].value == P(None, "model")


def test_a_logical_name_twice_in_one_spec_is_an_error():
    box = nn.LogicallyPartitioned(jnp.ones((8, 4)), ("embed", "embed"))
    pairs = (("embed", "data"), ("embed", "model"))
    with pytest.raises(ValueError, match="embed"):  # of Flax, too
        nn.logical_to_mesh_axes(("embed", "embed"), pairs)
    with pytest.raises(ta.ShardingError, match="'embed' twice") as caught:
        partition_specs({"w": box}, [], logical_axes=pairs)
    assert caught.value.paths == ("w",)


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """An array with names of its axes, of nobody's library."""

    def __init__(self, array, names):
        self.array, self.names = array, names

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("array"), self.array)], self.names

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(*children, names)


def named_by(axis_names):
    return ta.Adapter(
        name="Named",
        applies=Named,
        flatten=lambda node: ta.Flat((ta.BOX,), (node.array,)),
        axis_names=axis_names,
    )


def test_an_adapter_may_name_the_axes_of_an_array():
    leaf = jax.ShapeDtypeStruct((8, 4, 2), jnp.float32)
    tree = {"w": Named(leaf, ("embed", "mlp", None)), "b": Named(leaf, None)}
    registry = ta.default_registry.copy()
    registry.register(named_by(lambda node: node.names))
    axes = {"embed": "data", "mlp": "model"}
    with registry.use():
        specs = partition_specs(tree, {"b": P()}, logical_axes=axes)
        assert specs["w"].array == P("data", "model", None)
        # Rules decide where nobody translates a name, and must agree where one does.
        for other in ((), {"vocabulary": "data"}):
            rules = {"**": P("data", None, None)}
            specs = partition_specs(tree, rules, logical_axes=other)
            assert specs["w"].array == P("data", None, None)
        with pytest.raises(ta.ShardingError, match="Rules and boxes disagree"):
            partition_specs(tree, rules, logical_axes=axes)
        with pytest.raises(ta.ShardingError, match=r"names an axis 'mlp'.*logical"):
            partition_specs(tree, {"b": P()}, logical_axes={"embed": None})
        short = Named(jax.ShapeDtypeStruct((8, 4), jnp.float32), ("embed", "mlp", None))
        with pytest.raises(ta.ShardingError, match="has 3 entries for 2 axes"):
            partition_specs([short], [], logical_axes=axes)
        rules = ta.Rules({"w/**": P(None, None), "b": P()}, stacks={"w": "embed"})
        assert partition_specs(tree, rules)["w"].array == P(None, None, None)


def test_named_arrays_of_penzai_are_sharded_by_name():
    from penzai.core import named_axes

    array = named_axes.wrap(jnp.ones((8, 4, 2))).tag("embed", "mlp", "heads")
    tree = {"w": array, "v": array.untag("mlp", "heads")}
    axes = {"embed": "data", "mlp": "model", "heads": None}
    specs = ta.to_flat_dict(partition_specs(tree, [], logical_axes=axes))
    assert specs["w"] == P("data", "model", None)
    placed = dict(zip(tree["v"].data_array.shape, specs["v"], strict=True))
    assert placed == {8: "data", 4: None, 2: None}


def test_named_arrays_of_haliax_are_sharded_by_name():
    haliax = pytest.importorskip("haliax")
    array = haliax.named(jnp.ones((8, 4)), ("embed", "mlp"))
    axes = {"embed": "data", "mlp": "model"}
    specs = partition_specs({"w": array}, [], logical_axes=axes)
    assert ta.to_flat_dict(specs) == {"w": P("data", "model")}


class Dense(nn.Module):
    """Names of axes as T5X and Flaxformer keep them."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.ones
        kernel = partitioning.param_with_axes(
            "kernel", init, (8, 4), axes=("embed", "mlp")
        )
        bias = partitioning.param_with_axes("bias", init, (4,), axes=("mlp",))
        plain = self.param("plain", init, (4,))
        return (x[0] @ kernel + bias + plain)[None]


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Dense(name="dense")(x)


@pytest.mark.parametrize("form", [lambda x: x, lambda x: {"model": x, "step": 0}])
def test_names_in_a_collection_next_to_the_params_are_theirs(form):
    variables = jax.eval_shape(Two().init, jax.random.key(0), jnp.ones((1, 8)))
    axes = {"embed": "data", "mlp": "model"}
    rules = {"**/plain": P()}
    specs = partition_specs(form(variables), rules, logical_axes=axes)
    assert jax.tree.structure(specs) == jax.tree.structure(form(variables))
    flat = ta.to_flat_dict(specs)
    start = "model/" if "model/params/dense/bias" in flat else ""
    assert flat[f"{start}params/dense/kernel"] == P("data", "model")
    assert flat[f"{start}params/dense/bias"] == P("model")
    assert flat[f"{start}params/dense/plain"] == P()
    # As T5X's own function has it.
    with partitioning.axis_rules(tuple(axes.items())):
        names = partitioning.get_axis_names(variables["params_axes"])
        want = jax.tree.map(
            lambda each: nn.logical_to_mesh_axes(each, tuple(axes.items())),
            names,
            is_leaf=lambda x: isinstance(x, P),
        )
    assert want["dense"]["kernel"] == flat[f"{start}params/dense/kernel"]


class Net(nnx.Module):
    def __init__(self):
        names = {"out_sharding": ("data", "model"), "eager_sharding": False}
        self.kernel = nnx.Param(jnp.ones((8, 4)), **names)
        self.bias = nnx.Param(jnp.ones(4))
        self.again = self.kernel


@pytest.mark.parametrize(
    "make", [Net, lambda: nnx.state(Net())], ids=["Module", "State"]
)
def test_an_nnx_variable_is_a_box(make):
    specs = ta.to_flat_dict(partition_specs(make(), {"bias": P()}))
    assert list(specs.values()).count(P("data", "model")) == 1
    assert specs["bias"] == P()


# Meshes


@pytest.mark.parametrize("kind", ["Auto", "Explicit", "abstract"])
def test_shardings_are_the_specs_on_the_mesh(kind):
    mesh: Any = AbstractMesh((4, 2), ("data", "model"))
    if kind != "abstract":
        mesh = mesh_of(kind)
    expected = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    assert named_shardings(ABSTRACT, RULES, mesh) == expected


@both_meshes
def test_jax_takes_the_shardings(kind):
    mesh = mesh_of(kind)
    shardings = named_shardings(ABSTRACT, RULES, mesh)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), ABSTRACT)
    placed = jax.device_put(zeros, shardings)
    again = jax.jit(lambda tree: tree, in_shardings=(shardings,))(placed)
    made = jax.jit(lambda: jax.tree.map(jnp.asarray, zeros), out_shardings=shardings)()
    for tree in (placed, again, made):
        assert jax.tree.map(lambda leaf: leaf.sharding, tree) == shardings


BY_RANK = [(ta.leaf(ndim=2), P("data", "model")), (ta.leaf(ndim=1), P("model"))]


@pytest.mark.parametrize("name", ["Linen, axis 1", "nnx", "Equinox", "dict of experts"])
def test_layers_get_the_spec_of_the_unrolled_model_and_their_axis_is_whole(name):
    twin = TWINS[name]
    rules = ta.Rules([*BY_RANK, ("**", P())], stacks=twin.stacks, unused="ignore")
    scanned = twin.scanned()
    of_arrays = ta.to_flat_dict(ta.partition_specs(scanned, rules))
    of_layers = ta.to_flat_dict(ta.partition_specs(twin.unrolled(), rules))
    shapes = {path: leaf.shape for path, leaf in ta.split(scanned)[0].items()}
    for path, layer, index in twin.places(ta.split(scanned)[0]):
        entries = iter(of_layers[layer])
        whole = [None if isinstance(i, int) else next(entries) for i in index]
        assert of_arrays[path] == P(*whole), path
        assert len(whole) == len(shapes[path])
    bound = ta.Rules(
        [(where, str(spec)) for where, spec in BY_RANK],
        default="copy",
        stacks=twin.stacks,
    ).bind(scanned)
    specs = {str(spec): spec for _, spec in BY_RANK} | {"copy": P()}
    assert ta.to_flat_dict(ta.partition_specs(scanned, bound, specs=specs)) == of_arrays


LAYERS = {"blocks": {"w": jnp.ones((4, 6, 8)), "b": jnp.ones((4, 8))}}


def test_layers_of_one_array_with_different_specs_name_both_rules():
    table = {"blocks/{0..1}/w": P("x", None), "**": P()}
    with pytest.raises(ta.StackError) as caught:
        partition_specs(LAYERS, ta.Rules(table, stacks={"blocks": 0}))
    assert "rule 'blocks/{0..1}/w'" in str(caught.value)
    assert "rule '**'" in str(caught.value)
    same = {"blocks/{0..1}/w": P("x", None), "**/w": P("x", None), "**": P()}
    found = partition_specs(LAYERS, ta.Rules(same, stacks={"blocks": 0}))
    assert found == {"blocks": {"w": P(None, "x", None), "b": P()}}


def test_a_box_that_shards_the_axis_of_layers_says_what_to_pass():
    twin = TWINS["Linen, boxes, axis 1"]
    rules = ta.Rules(
        {"**/mlp_wi/kernel": P("data", "model")}, stacks=twin.stacks, default=P()
    )
    axes = {"embed": "data", "heads": "model", "mlp": "model"}
    tree = twin.scanned()["params"]["blocks"]["mlp_wi"]
    tree = {"params": {"blocks": {"mlp_wi": tree}}}
    with pytest.raises(ta.ShardingError) as caught:
        partition_specs(tree, rules, logical_axes=axes)
    assert "P('data', 'layers', 'model') by its box" in str(caught.value)
    assert "P('data', None, 'model') by rule" in str(caught.value)
    assert "logical_axes= has None for the name of their axis" in str(caught.value)
    found = partition_specs(tree, rules, logical_axes=axes | {"layers": None})
    specs = ta.to_flat_dict(found)
    assert {*specs.values()} == {P("data", None, "model"), P("model", None)}


def test_an_axis_that_nothing_decides_names_the_path():
    params = params_on(mesh_of())
    table = {"**/kernel": P("data", P.UNCONSTRAINED), "**": P()}
    assert P.UNCONSTRAINED in partition_specs(params, table)["up"]["kernel"]
    default = P(P.UNCONSTRAINED, P.UNCONSTRAINED)  # no copy: the compiler decides
    assert (
        P.UNCONSTRAINED
        in partition_specs({"w": params["up"]["kernel"]}, {}, default=default)["w"]
    )
    message = r"'up/kernel'.*no mesh axis is Auto"
    for mesh in (mesh_of("Explicit"), mesh_of("Explicit").abstract_mesh):
        with pytest.raises(ta.ShardingError, match=message):
            named_shardings(params, table, mesh)
    shardings = named_shardings(params, table, mesh_of("Auto"))
    with pytest.raises(ta.ShardingError, match=r"UNCONSTRAINED.*'0/mu/up/kernel'"):
        init_sharded(optax.adam(0.1), params, shardings)


def test_the_shardings_of_a_box_go_into_jit():
    shardings = named_shardings(boxed(), {"bias": P()}, mesh_of())
    out = jax.jit(lambda tree: tree, out_shardings=shardings)(boxed())
    assert out["kernel"].value.sharding.spec == P("data", None)


# State of optimizers: which leaf follows which param


def expected_places(params: Any, state: Any, shardings: Any) -> dict[str, Any]:
    """Shardings of the state leaves that are copies of a param, found naively."""
    shapes = {path: leaf.shape for path, leaf in ta.to_flat_dict(params).items()}
    found = {}
    for name, leaf in ta.to_flat_dict(state).items():
        for path, shape in shapes.items():
            if name.endswith(f"/{path}") and leaf.shape == shape and shape:
                found[name] = ta.to_flat_dict(shardings)[path]
    return found


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [("Auto", lambda tx: tx), ("Explicit", ta.adapt)],
    ids=["plain, Auto", "adapt, Explicit"],
)
@pytest.mark.parametrize("case", some(CASES, 5), ids=lambda case: case.name)
@pytest.mark.usefixtures("standard_promotion")
def test_state_of_every_transformation_follows_its_params(case, kind, wrap):
    if case.name == "flatten" and kind == "Explicit":
        pytest.skip("JAX refuses to flatten arrays whose axes are Explicit")
    mesh = mesh_of(kind)
    plain, params = params_on(mesh), params_on(mesh)
    tx, shardings = wrap(case.make()), named_shardings(params, RULES, mesh)
    if case.lookahead:
        plain = optax.LookaheadParams(plain, plain)
    state = init_sharded(tx, plain)
    placed = ta.to_flat_dict(opt_state_shardings(tx, plain))
    for name, leaf in ta.to_flat_dict(state).items():
        assert leaf.sharding == placed[name], name
    copies = expected_places(params, state, shardings)
    assert copies or case.name not in ("adamw", "lbfgs", "MultiSteps", "lookahead")
    for name, sharding in copies.items():
        assert placed[name] == sharding, name


@pytest.mark.hazard("J5", "G17")
@pytest.mark.parametrize("case", some(CASES), ids=lambda case: case.name)
@pytest.mark.usefixtures("standard_promotion")
def test_state_made_in_place_has_the_numbers_of_init(case):
    params = params_on(mesh_of())
    if case.lookahead:
        params = optax.LookaheadParams(params, params)
    tx = case.make()
    made, own = init_sharded(tx, params), tx.init(params)
    assert jax.tree.structure(made) == jax.tree.structure(own)
    for one, two in zip(jax.tree.leaves(made), jax.tree.leaves(own), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


WIDE = {
    "w": jax.ShapeDtypeStruct((8, 16), jnp.float32),
    "b": jax.ShapeDtypeStruct((16,), jnp.float32),
    "square": jax.ShapeDtypeStruct((8, 8), jnp.float32),
}
WIDE_SPECS = {"w": P("data", "model"), "b": P("model"), "square": P(None, "data")}


def wide_places(tx: Any) -> dict[str, P]:
    return ta.to_flat_dict(opt_state_shardings(tx, WIDE, WIDE_SPECS))


def test_the_flags_of_zero_nans_are_scalars():
    assert set(wide_places(optax.zero_nans()).values()) == {P()}


def test_the_rows_and_columns_of_adafactor_keep_the_axis_that_remains():
    places = wide_places(optax.adafactor(0.1, min_dim_size_to_factor=2))
    assert places["0/v_row/w"] == P("data")
    assert places["0/v_col/w"] == P("model")
    assert places["0/v/b"] == P("model")
    assert places["0/v/w"] == P()


def test_where_sizes_do_not_tell_the_axis_every_device_has_all():
    places = wide_places(optax.adafactor(0.1, min_dim_size_to_factor=2))
    assert places["0/v_row/square"] == places["0/v_col/square"] == P()


def test_sm3_numbers_the_axes():
    places = wide_places(optax.sm3(0.1))
    assert {name: place for name, place in places.items() if "square" in name} == {
        "0/mu/square/0": P(),
        "0/mu/square/1": P("data"),
        "0/nu/square": P(None, "data"),
    }
    assert (places["0/mu/w/0"], places["0/mu/w/1"]) == (P("data"), P("model"))


def test_the_memory_of_lbfgs_has_an_axis_in_front():
    places = wide_places(TRANSFORMATIONS["lbfgs"].make())
    assert places["0/diff_params_memory/w"] == P(None, "data", "model")
    assert places["0/params/w"] == P("data", "model")
    assert places["0/weights_memory"] == P()


def test_axes_that_stay_with_size_one_are_not_sharded():
    tx = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.sum(p, -1, keepdims=True), params),
        lambda updates, state, params=None: (updates, state),
    )
    assert wide_places(tx)["w"] == P("data", None)


def test_params_named_like_fields_are_no_fields():
    params = {"mu": {"count": WIDE["w"]}, "count": WIDE["b"], "nu": WIDE["square"]}
    specs = {
        "mu": {"count": WIDE_SPECS["w"]},
        "count": WIDE_SPECS["b"],
        "nu": WIDE_SPECS["square"],
    }
    state = opt_state_shardings(optax.adam(0.1), params, specs)[0]
    assert state.mu == state.nu == specs
    assert state.count == P()


def test_a_group_holds_its_own_leaves_and_a_frozen_one_nothing():
    tx = ta.partition(
        {"fast": optax.adam(0.1), "slow": optax.sgd(0.1, momentum=0.9)},
        {"w": "fast", "b": "slow", "square": "frozen"},
    )
    assert wide_places(tx) == {
        "inner_states/fast/0/count": P(),
        "inner_states/fast/0/mu/w": P("data", "model"),
        "inner_states/fast/0/nu/w": P("data", "model"),
        "inner_states/slow/0/trace/b": P("model"),
    }


def test_freeze_and_plain_partitions_of_optax():
    frozen = wide_places(ta.freeze(optax.adam(0.1), "w"))
    assert "0/mu/w" not in frozen
    assert frozen["0/mu/square"] == P(None, "data")
    labels = {"w": "a", "b": "b", "square": "a"}
    plain = wide_places(
        optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, labels)
    )
    assert plain["inner_states/a/inner_state/0/mu/w"] == P("data", "model")


def test_hyperparameters_are_on_every_device():
    tx = optax.chain(optax.inject_hyperparams(optax.adam)(0.1), optax.zero_nans())
    places = wide_places(tx)
    assert places["0/hyperparams/learning_rate"] == P()
    assert places["0/inner_state/0/mu/w"] == P("data", "model")


CONTAINERS = {
    "dict": lambda w, b: {"b": b, "w": w},
    "FrozenDict": lambda w, b: freeze({"b": b, "w": w}),
    "named tuple": lambda w, b: type(BY_NAME["NamedTuple"].make().hidden)(w=w, b=b),
    "Equinox": lambda w, b: type(BY_NAME["Equinox arrays"].make().hidden)(w, b, None),
    "nnx.State": lambda w, b: nnx.State({"w": nnx.Param(w), "b": nnx.Param(b)}),
    "boxes": lambda w, b: {"w": nn.Partitioned(w, ("data", "model")), "b": b},
    "flat dict": lambda w, b: {"b": b, "w": w},
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("wrap", [lambda tx: tx, ta.adapt], ids=["plain", "adapt"])
def test_the_container_of_the_params_does_not_matter(container, wrap):
    params = CONTAINERS[container](WIDE["w"], WIDE["b"])
    tx = wrap(optax.adam(0.1))
    places = opt_state_shardings(tx, params, {"w": P("data", None), "b": P()})
    assert ta.to_flat_dict(places) == {
        "0/count": P(),
        "0/mu/b": P(),
        "0/mu/w": P("data", None),
        "0/nu/b": P(),
        "0/nu/w": P("data", None),
    }
    state = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(places) == jax.tree.structure(state)


def test_params_that_are_one_bare_array():
    places = opt_state_shardings(optax.adam(0.1), WIDE["w"], P("data", None))
    assert places[0].mu == P("data", None)
    assert places[0].count == P()


def test_functions_among_the_params_stay():
    mesh = mesh_of()
    model = {"w": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))}
    state = init_sharded(ta.adapt(optax.adam(0.1)), {**model, "act": jax.nn.relu})
    assert state[0].mu["w"].sharding.spec == P("data")


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2),
    reason="that JAX compiles nothing for the host memory of several CPU devices",
)
@pytest.mark.parametrize("memory", ["pinned_host", "unpinned_host"])
@both_meshes
def test_memory_kinds_are_kept(kind, memory):
    params = params_on(mesh_of(kind), memory)
    for tx in (optax.adam(0.1), ta.adapt(optax.lbfgs(memory_size=2))):
        state = ta.to_flat_dict(init_sharded(tx, params))
        kinds = {name: leaf.sharding.memory_kind for name, leaf in state.items()}
        copies = [kind for name, kind in kinds.items() if name.endswith("kernel")]
        assert set(copies) == {memory}
        assert kinds["0/count"] != memory


@both_meshes
@pytest.mark.parametrize("memory", ["pinned_host", "unpinned_host"])
@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_memory_kind_is_that_of_the_whole_state(kind, memory, is_abstract):
    mesh = mesh_of(kind)
    shardings = named_shardings(
        ABSTRACT, RULES, mesh.abstract_mesh if is_abstract else mesh
    )
    for tx in (optax.adam(0.1), ta.adapt(optax.adafactor(0.1))):
        usual = opt_state_shardings(tx, ABSTRACT, shardings)
        hosted = opt_state_shardings(tx, ABSTRACT, shardings, memory_kind=memory)
        assert {each.memory_kind for each in jax.tree.leaves(hosted)} == {memory}
        assert hosted == jax.tree.map(lambda x: x.with_memory_kind(memory), usual)


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2),
    reason="that JAX compiles nothing for the host memory of several CPU devices",
)
@pytest.mark.parametrize("memory", ["pinned_host", "unpinned_host"])
@both_meshes
@pytest.mark.usefixtures("standard_promotion")
def test_a_step_moves_its_state_from_the_host_and_back(kind, memory):
    params, tx = params_on(mesh_of(kind)), ta.adapt(optax.adam(0.1))
    on_devices = opt_state_shardings(tx, params)
    on_host = opt_state_shardings(tx, params, memory_kind=memory)
    of_params = jax.tree.map(lambda leaf: leaf.sharding, params)

    def step(params, state):
        state = jax.device_put(state, on_devices)
        updates, state = tx.update(params, state, params)  # any gradient
        return ta.apply_updates(params, updates), state

    hosted = jax.jit(step, donate_argnums=1, out_shardings=(of_params, on_host))
    usual = jax.jit(step, out_shardings=(of_params, on_devices))
    one = params, jax.jit(tx.init, out_shardings=on_host)(params)
    two = params, init_sharded(tx, params)
    made = init_sharded(tx, params, memory_kind=memory)
    for leaf, other in zip(*map(jax.tree.leaves, (made, one[1])), strict=True):
        assert leaf.sharding == other.sharding
        np.testing.assert_array_equal(leaf, other)
    for _ in range(3):
        one, two = hosted(*one), usual(*two)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(one[1])}
        assert kinds == {memory}
    assert hosted._cache_size() == 1
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert not np.array_equal(one[0]["up"]["kernel"], params["up"]["kernel"])


# Where the state is made


@pytest.mark.hazard("J5")
def test_jit_alone_loses_the_sharding():
    params = params_on(mesh_of())
    lost = jax.jit(optax.adam(0.1).init)(params)[0].mu["up"]["kernel"].sharding
    kept = init_sharded(optax.adam(0.1), params)[0].mu["up"]["kernel"].sharding
    assert lost != kept == params["up"]["kernel"].sharding


@pytest.mark.hazard("J15")
@both_meshes
def test_a_mesh_in_force_changes_nothing(kind):
    mesh = mesh_of(kind)
    params = params_on(mesh)
    with jax.set_mesh(mesh):
        state = init_sharded(ta.adapt(optax.adam(0.1)), params)
    assert state[0].mu["up/kernel"].sharding == params["up"]["kernel"].sharding


def test_what_structure_alone_says_is_wrong():
    # The usual recipe: map_params gives every leaf below a param that param's spec.
    tx = optax.zero_nans()
    state = jax.eval_shape(tx.init, WIDE)
    by_structure = optax.tree.map_params(tx, lambda _, spec: spec, state, WIDE_SPECS)
    assert by_structure.found_nan["w"] == P("data", "model")
    assert state.found_nan["w"].shape == ()
    assert opt_state_shardings(tx, WIDE, WIDE_SPECS).found_nan["w"] == P()


@both_meshes
def test_state_is_made_inside_jit_where_the_shardings_are_given(kind):
    mesh = mesh_of(kind)
    params = params_on(mesh)
    shardings = named_shardings(params, RULES, mesh)
    tx = ta.adapt(optax.adam(0.1))
    state = jax.jit(lambda params: init_sharded(tx, params, shardings))(params)
    assert state[0].mu["up/kernel"].sharding.spec == P("data", "model")
    with pytest.raises(ta.ShardingError, match=r"traced or abstract.*'scale'"):
        jax.jit(lambda params: init_sharded(tx, params))(params)


def test_state_is_made_inside_jit_on_one_device():
    params = {"w": jnp.ones(4)}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tx = optax.adam(0.1)
    state = jax.jit(lambda params: init_sharded(tx, params, {"w": sharding}))(params)
    assert state[0].mu["w"].devices() == {jax.devices()[0]}


def test_params_on_no_mesh_give_what_jit_gives():
    params = {"w": jnp.ones(4), "host": np.ones(2, np.float32)}
    state = init_sharded(optax.adam(0.1), params)
    assert not state[0].mu["w"].committed
    device = jax.devices()[3]
    params = jax.device_put({"w": jnp.ones(4)}, device)
    assert init_sharded(optax.adam(0.1), params)[0].mu["w"].devices() == {device}


def test_an_array_beside_the_mesh_follows_on_every_device():
    params = {
        **params_on(mesh_of()),
        "host": np.ones(4, np.float32),
        "one": jnp.ones(2),
    }
    places = opt_state_shardings(optax.adam(0.1), params)[0].mu
    assert places["host"].spec == places["one"].spec == P()
    assert init_sharded(optax.adam(0.1), params)[0].mu["host"].sharding.spec == P()


@pytest.mark.hazard("B8", "D1")
@pytest.mark.parametrize("shardings", [None, {"hidden": P(), "out": P()}])
def test_params_in_a_class_that_jax_does_not_know_are_refused(shardings):
    params = {"net": BY_NAME["dataclass"].make()}
    for of_state in (opt_state_shardings, init_sharded):
        with pytest.raises(ta.TransformError, match=r"PlainModel at \['net'\].*split"):
            of_state(optax.adam(0.1), params, shardings)
