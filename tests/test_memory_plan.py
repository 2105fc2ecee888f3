"""The memory of a plan, next to what eight devices really hold.

``conftest.py`` makes eight devices of one CPU. Every total is compared with the shards
of arrays that exist, and with what XLA says that a compiled step takes.
"""

from __future__ import annotations

import collections
import json
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from command import run
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sizes import some
from trees import TREES

import treeadapt as ta

AXES = {"data": 4, "model": 2}
ABSTRACT_MESH = AbstractMesh(
    tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 2
)
RULES = {
    "embed": P("model", "data"),
    "**/up": P("data", "model"),
    "**/down": P(("model", "data"), None),
    "**": P(),
}


def mesh():
    return jax.make_mesh((4, 2), tuple(AXES), axis_types=(AxisType.Auto,) * 2)


def model(layers: int = 3, dtype: Any = jnp.float32) -> dict[str, Any]:
    def block():
        return {
            "up": jnp.ones((8, 16), dtype),
            "down": jnp.ones((16, 8), dtype),
            "scale": jnp.ones(8, dtype),
        }

    return {"embed": jnp.ones((32, 8), dtype), "layers": [block()] * layers}


ABSTRACT = jax.eval_shape(model)
EMBED, UP, DOWN, SCALE = 32 * 8 * 4, 8 * 16 * 4, 16 * 8 * 4, 8 * 4
PARAMS = EMBED // 8 + 3 * (UP // 8 + DOWN // 8 + SCALE)


def partitioned():
    groups = {"slow": optax.sgd(0.1), "fast": optax.adamw(0.1)}
    rules = {"embed": "frozen", "**/scale": "slow", "**": "fast"}
    return ta.partition(groups, rules)


OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "adamw, bfloat16": lambda: optax.adamw(0.1, mu_dtype=jnp.bfloat16),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=8),
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "partition": partitioned,
    "freeze": lambda: ta.freeze(optax.adam(0.1), ["embed", "**/up"]),
    "clip, then freeze": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), ta.freeze(optax.sgd(0.1), "embed")
    ),
}
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


def kinds(plan: ta.MemoryPlan) -> dict[str, int]:
    return {one.kind: one.device_bytes for one in plan.kinds}


def held(tree: Any) -> int:
    """The most bytes that one device holds of the arrays in a tree."""
    found = collections.Counter()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            found[shard.device] += shard.data.size * array.dtype.itemsize
    return max(found.values(), default=0)


# The numbers


@pytest.mark.slow
@optimizers
def test_each_device_holds_what_the_plan_says(name):
    tx = OPTIMIZERS[name]()
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=tx).memory
    params = jax.device_put(model(), ta.named_shardings(ABSTRACT, RULES, mesh()))
    state = ta.init_sharded(tx, params)
    found = kinds(plan)
    assert found["params"] == held(params) == PARAMS
    of_state = {kind: size for kind, size in found.items() if kind.startswith("state")}
    assert sum(of_state.values()) == held(state)
    assert plan.device_bytes == sum(found.values())
    assert plan.num_devices == 8


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", some(OPTIMIZERS, 4))
def test_a_compiled_step_takes_what_the_plan_says(name):
    tx = OPTIMIZERS[name]()
    shardings = ta.named_shardings(ABSTRACT, RULES, mesh())
    places = ta.opt_state_shardings(tx, ABSTRACT, shardings)

    def step(grads, params, state):
        updates, new_state = tx.update(grads, state, params)
        # Params and state are read; a gradient is only if the update reads it.
        return updates, new_state, jax.tree.map(jnp.copy, (params, state))

    state = jax.eval_shape(tx.init, ABSTRACT)
    jitted = jax.jit(step, in_shardings=(shardings, shardings, places))
    taken = jitted.lower(ABSTRACT, ABSTRACT, state).compile().memory_analysis()
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=tx).memory
    assert plan.device_bytes == taken.argument_size_in_bytes


def spec_of(leaf: Any) -> P:
    axes = [axis for axis, size in enumerate(leaf.shape) if size and not size % 2]
    if not axes:
        return P()
    return P(*("model" if axis == axes[0] else None for axis in range(leaf.ndim)))


@pytest.mark.filterwarnings("ignore::treeadapt.UnstablePathWarning")
@pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)
def test_trees_of_every_kind_hold_what_the_plan_says(row):
    tree = row.make()
    flat = ta.to_flat_dict(tree)
    arrays = {path: leaf for path, leaf in flat.items() if hasattr(leaf, "dtype")}
    rules = {ta.escape(path): spec_of(leaf) for path, leaf in arrays.items()}
    refused = {"Optax": "opt_state_shardings", "nn.": "box"}  # see ``test_sharding``
    for name, complaint in refused.items():
        if row.name.startswith(name) and row.name != "nn.Dense":
            with pytest.raises(ta.ShardingError, match=complaint):
                ta.summarize(tree, rules, mesh=ABSTRACT_MESH)
            return
    plan = ta.summarize(tree, rules, mesh=ABSTRACT_MESH).memory
    placed = {
        path: jax.device_put(
            jnp.zeros(leaf.shape, leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf,
            NamedSharding(mesh(), spec_of(leaf)),
        )
        for path, leaf in arrays.items()
    }
    assert plan.device_bytes == held(placed)
    assert len(plan.arrays) == len(arrays)


@pytest.mark.usefixtures("standard_promotion")
def test_one_table_labels_freezes_and_shards():
    rules = ta.Rules({"embed": "frozen", "**/{up,down}": "wide", "**": "rest"})
    specs = {"frozen": P("model", "data"), "wide": P("data", "model"), "rest": P()}
    tx = ta.freeze(optax.adam(0.1), rules.where("frozen"))
    report = ta.summarize(ABSTRACT, rules, mesh=ABSTRACT_MESH, tx=tx, specs=specs)
    assert [total.label for total in report.totals] == ["frozen", "wide", "rest"]
    trains = PARAMS - EMBED // 8
    of_state = {"state/mu": trains, "state/nu": trains, "state/count": 4}
    of_params = {"params": PARAMS, "gradients": trains}
    assert kinds(report.memory) == of_params | of_state


def test_a_frozen_leaf_has_neither_gradient_nor_state():
    tx = ta.partition({"slow": optax.sgd(0.1)}, {"embed": "frozen", "**": "slow"})
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=tx).memory
    assert [array.kind for array in plan.arrays if array.path == "embed"] == ["params"]
    assert kinds(plan) == {"params": PARAMS, "gradients": PARAMS - EMBED // 8}


@pytest.mark.parametrize(
    "where",
    [
        "layers/{-2..}",
        "layers/{-1}",
        ["layers/*", "!layers/{-1}"],
        ta.leaf(lambda leaf: leaf.ndim == 1),
    ],
    ids=str,
)
def test_what_is_frozen_by_more_than_its_own_name_has_no_gradient(where):
    frozen = ta.param_mask(ABSTRACT, where)
    trains = {path for path, yes in ta.to_flat_dict(frozen).items() if not yes}
    for inner in (optax.lion(0.1), optax.sgd(0.1)):
        tx = ta.freeze(inner, where)
        plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=tx).memory
        found = {array.path for array in plan.arrays if array.kind == "gradients"}
        assert found == trains


def test_a_gradient_that_clipping_reads_is_there_although_its_leaf_is_frozen():
    tx = OPTIMIZERS["clip, then freeze"]()
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=tx).memory
    assert kinds(plan) == {"params": PARAMS, "gradients": PARAMS}


def test_what_cannot_be_traced_has_all_its_gradients():
    search = optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3))
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=search).memory
    assert kinds(plan)["gradients"] == PARAMS


def test_whole_numbers_have_no_gradient():
    tree = {"w": jnp.ones((8, 4)), "steps": jnp.arange(4), "act": jax.nn.relu}
    rules = {"w": P("data", None), "**": P()}
    tx = ta.adapt(optax.sgd(0.1, momentum=0.9))
    plan = ta.summarize(tree, rules, mesh=ABSTRACT_MESH, tx=tx).memory
    assert kinds(plan) == {"params": 32 + 16, "gradients": 32, "state/trace": 32}


@pytest.mark.parametrize("tree", ["module", "box"])
def test_a_model_of_another_library_needs_no_conversion(tree):
    if tree == "module":
        made = eqx.filter_eval_shape(eqx.nn.Linear, 4, 8, key=jax.random.key(0))
        rules = {"weight": P("data", None), "bias": P()}
    else:
        box = nn.Partitioned(jnp.ones((8, 4)), ("data", None))
        made, rules = {"weight": box, "bias": jnp.ones(8)}, {"bias": P()}
    tx = ta.adapt(optax.lion(0.1))
    report = ta.summarize(made, rules, mesh=ABSTRACT_MESH, tx=tx)
    each = 8 * 4 * 4 // 4 + 8 * 4
    found = {"params": each, "gradients": each, "state/mu": each, "state/count": 4}
    assert kinds(report.memory) == found
    assert report.notes == ()


def test_numbers_of_one_kind_are_added_over_the_groups_of_a_partition():
    groups = {"a": optax.adam(0.1), "b": optax.adam(0.2)}
    tx = ta.partition(groups, {"embed": "a", "**": "b"})
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=tx).memory
    found = {one.kind: (one.num_leaves, one.device_bytes) for one in plan.kinds}
    assert found["state/mu"] == found["params"] == (10, PARAMS)
    assert found["state/count"] == (2, 8)


# What is largest, and what is copied


def test_the_largest_leaf_counts_its_gradient_and_its_state():
    tx = optax.adam(0.1)
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=tx).memory
    (first, size), *others = plan.largest
    assert (first.path, size) == ("embed", 4 * EMBED // 8)
    assert sum(size for _, size in plan.largest) == plan.device_bytes
    assert [array.path for array, _ in others][-1] == "0/count"


def test_what_belongs_to_no_param_is_a_leaf_of_its_own():
    tx = optax.flatten(optax.sgd(0.1, momentum=0.9))
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=tx).memory
    array, size = plan.largest[0]
    assert array.kind == "state/trace"
    assert array.param is None
    assert array.is_replicated
    assert size == array.size_bytes == EMBED + 3 * (UP + DOWN + SCALE)


def test_a_tree_that_is_an_array_has_its_gradient_and_its_state():
    leaf = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    rules, tx = {"**": P("data", None)}, optax.adam(0.1)
    plan = ta.summarize(leaf, rules, mesh=ABSTRACT_MESH, tx=tx).memory
    each = 8 * 4 * 4 // 4
    sizes = [(array.path, size) for array, size in plan.largest]
    assert sizes == [("", 4 * each), ("0/count", 4)]


def test_the_fast_half_of_lookahead_has_the_gradients_and_the_state():
    half = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    tree = optax.LookaheadParams(half, half)
    tx = optax.lookahead(optax.sgd(0.1, momentum=0.9), 5, 0.5)
    rules = {"**": P("data", None)}
    plan = ta.summarize(tree, rules, mesh=ABSTRACT_MESH, tx=tx).memory
    each = 8 * 4 * 4 // 4
    sizes = {array.path: size for array, size in plan.largest}
    assert sizes == {"fast/w": 3 * each, "slow/w": each, "steps_since_sync": 4}
    part = ta.summarize(tree, rules, mesh=ABSTRACT_MESH, tx=tx, where="fast")
    assert part.memory.device_bytes == 3 * each


def test_one_device_is_not_each_of_several():
    mesh = AbstractMesh((1,), ("a\nb",))
    plan = ta.summarize(ABSTRACT, {"**": P()}, mesh=mesh).memory
    assert plan.headline.endswith(r" on 1 device (a\nb=1)")


def test_the_bytes_of_copies_are_there():
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH).memory
    (total,) = plan.kinds
    assert total.replicated_bytes == 3 * SCALE
    copied = [array.path for array in plan.arrays if array.is_replicated]
    assert copied == [f"layers/{n}/scale" for n in range(3)]
    one = AbstractMesh((1, 1), tuple(AXES))
    plan = ta.summarize(ABSTRACT, RULES, mesh=one).memory
    assert plan.kinds[0].replicated_bytes == 0  # one device has no copies
    assert plan.device_bytes == EMBED + 3 * (UP + DOWN + SCALE)


def test_where_leaves_out_the_rest_and_its_state():
    tx = optax.adam(0.1)
    report = ta.summarize(ABSTRACT, RULES, where="embed", mesh=ABSTRACT_MESH, tx=tx)
    each = EMBED // 8
    of_state = {"state/mu": each, "state/nu": each}
    assert kinds(report.memory) == {"params": each, "gradients": each} | of_state


# The memory of the host


def in_host(tree):
    """Return the bytes of each device in the memory of the host."""
    sizes = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            if leaf.sharding.memory_kind == "pinned_host":
                sizes[shard.device] += shard.data.nbytes
    return set(sizes.values())


@pytest.mark.parametrize("name", some(["adam", "adafactor", "partition"], 3))
def test_each_host_holds_what_the_plan_says(name):
    tx, real = OPTIMIZERS[name](), mesh()
    params = jax.device_put(model(), ta.named_shardings(model(), RULES, real))
    places = ta.opt_state_shardings(tx, params, memory_kind="pinned_host")
    state = jax.device_put(tx.init(params), places)
    options = {"tx": tx, "memory_kind": "pinned_host"}
    for one in (ABSTRACT_MESH, real):
        plan = ta.summarize(ABSTRACT, RULES, mesh=one, **options).memory
        assert {plan.host_bytes["pinned_host"]} == in_host(state)
        none = ta.summarize(ABSTRACT, RULES, mesh=one, tx=tx).memory
        assert plan.device_bytes + plan.host_bytes["pinned_host"] == none.device_bytes
        assert none.host_bytes == {}
        same = ta.summarize(ABSTRACT, RULES, mesh=one, tx=tx, memory_kind="device")
        assert str(same.memory) == str(none)


def test_a_param_in_the_memory_of_the_host_is_there_with_its_state():
    parked = NamedSharding(ABSTRACT_MESH, P(), memory_kind="pinned_host")
    embed = jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=parked)
    tree, tx = ABSTRACT | {"embed": embed}, optax.adam(0.1)
    plan = ta.summarize(tree, RULES, mesh=ABSTRACT_MESH, tx=tx).memory
    assert plan.host_bytes == {"pinned_host": 3 * EMBED // 8}
    assert plan.device_bytes == 4 * PARAMS + 4 - 3 * EMBED // 8
    here = {(x.kind, x.path) for x in plan.arrays if x.memory_kind}
    assert here == {
        ("params", "embed"),
        ("state/mu", "0/mu/embed"),
        ("state/nu", "0/nu/embed"),
    }
    assert {x.path: size for x, size in plan.largest}["embed"] == EMBED // 8
    there = ta.summarize(tree, RULES, mesh=ABSTRACT_MESH, tx=tx, memory_kind="device")
    assert there.memory.host_bytes == {"pinned_host": EMBED // 8}


def test_arrays_on_real_devices_count_where_they_are():
    real = mesh()
    for kind, size in (("pinned_host", SCALE), ("device", None)):
        placed = jax.device_put(jnp.ones(8), NamedSharding(real, P(), memory_kind=kind))
        plan = ta.summarize({"scale": placed}, {"**": P()}, mesh=real).memory
        assert plan.host_bytes.get(kind) == size


HOST_TEXT = """\
1.2 KiB on each of 8 devices (data=4, model=2), and 612 B of each in pinned_host

memory                      leaves     size  each device  replicated
params                          10  4.1 KiB        608 B        96 B
gradients                       10  4.1 KiB        608 B        96 B
state/trace in pinned_host      10  4.1 KiB        608 B        96 B
state/count in pinned_host       1      4 B          4 B         4 B
all                             20  8.2 KiB      1.2 KiB       192 B
all in pinned_host              11  4.1 KiB        612 B       100 B
"""


def test_the_memory_of_the_host_reads_the_same_in_every_form(tmp_path):
    options = {"mesh": ABSTRACT_MESH, "tx": momentum(), "memory_kind": "pinned_host"}
    report = ta.summarize(ABSTRACT, RULES, **options)
    assert str(report.memory).startswith(HOST_TEXT)
    assert "with state" not in str(report.memory)  # the largest are on the device
    for text in (str(report), report.to_markdown(), report.to_text()):
        assert HOST_TEXT in text
    arguments = (*MESH, "--optimizer", "test_memory_plan:momentum")
    arguments += ("--memory-kind", "pinned_host")
    assert HOST_TEXT in show(tmp_path, *arguments)
    memory = json.loads(show(tmp_path, *arguments, "--format", "json"))["memory"]
    assert memory["host_bytes"] == {"pinned_host": 612}
    kinds = {one["kind"]: one.get("memory_kind") for one in memory["kinds"]}
    assert kinds == {
        "params": None,
        "gradients": None,
        "state/trace": "pinned_host",
        "state/count": "pinned_host",
    }
    assert {one.get("memory_kind") for one in memory["arrays"]} == {None, "pinned_host"}


# How it reads


TEXT = """\
1.2 KiB on each of 8 devices (data=4, model=2)

memory     leaves     size  each device  replicated
params         10  4.1 KiB        608 B        96 B
gradients      10  4.1 KiB        608 B        96 B
all            20  8.2 KiB      1.2 KiB       192 B

largest, with state  contents           spec                        each device
layers/{0..2}/down   3 x float32[16,8]  P(('model', 'data'), None)        384 B
layers/{0..2}/up     3 x float32[8,16]  P('data', 'model')                384 B
embed                float32[32,8]      P('model', 'data')                256 B
layers/{0..2}/scale  3 x float32[8]     P()                               192 B

A copy on each device: 3 leaves, 192 B with state: 'layers/{0..2}/scale'."""


def test_a_plan_reads_the_same_in_every_form():
    report = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=optax.sgd(0.1))
    text = str(report.memory)
    assert text == TEXT
    for form in (str(report), report.to_text(), report.to_markdown()):
        assert all(line in form.splitlines() for line in text.splitlines())
    for form in (report.to_svg(), report.to_html()):
        assert "1.2 KiB on each of 8 devices" in form
        assert "layers/{0..2}/down" in form
    assert repr(report.memory) == f"MemoryPlan({text.splitlines()[0]})"


@pytest.mark.slow
def test_leaves_of_one_form_are_one_line_and_many_are_added_up():
    tree = {f"a{chr(97 + n)}": jnp.ones((4, n + 1)) for n in range(20)}
    plan = ta.summarize(tree, {"**": P("data", None)}, mesh=ABSTRACT_MESH).memory
    lines = str(plan).splitlines()
    assert lines[-1].split() == ["and", "12", "more", "312", "B"]
    assert sum("float32" in line for line in lines) == 8


@pytest.mark.slow
def test_no_array_is_made_of_a_model_that_fits_nowhere():
    tree = {"w": [jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)] * 8}
    before = jax.live_arrays()
    wide = AbstractMesh((2**12,), ("data",))
    tx = ta.freeze(optax.adam(0.1), "w/0")
    plan = ta.summarize(tree, {"**": P("data", None)}, mesh=wide, tx=tx).memory
    assert {*map(id, jax.live_arrays())} <= {*map(id, before)}
    assert plan.kinds[0].device_bytes == 8 * 2**30


def test_without_a_mesh_nothing_changes():
    report = ta.summarize(ABSTRACT, RULES)
    assert report.memory is None
    assert "device" not in str(report) + report.to_text() + report.to_markdown()


def test_a_default_that_replicates_is_a_note():
    rules = ta.Rules({"embed": P("model", None)}, default=P())
    report = ta.summarize(ABSTRACT, rules, mesh=ABSTRACT_MESH)
    assert "9 leaves" in report.notes[0]
    assert "the default puts a copy on every device" in report.notes[0]


def test_an_axis_left_to_the_compiler_counts_as_whole():
    rules = {"embed": P(P.UNCONSTRAINED, "data"), "**": P()}
    report = ta.summarize(ABSTRACT, rules, mesh=ABSTRACT_MESH)
    assert report.memory.arrays[0].device_bytes == EMBED // 4
    assert report.notes == (
        "1 array with an axis left to the compiler: counted as whole.",
    )


def test_a_tree_without_arrays_is_nothing_to_hold():
    plan = ta.summarize({}, {}, mesh=ABSTRACT_MESH, tx=optax.adam(0.1)).memory
    assert plan.device_bytes == 0
    assert str(plan).splitlines()[-1].split() == ["all", "0", *["0", "B"] * 3]


# What is refused


def test_an_optimizer_that_takes_no_functions_is_named_with_the_cure():
    tree = {"w": jnp.ones((8, 4)), "act": jax.nn.relu}
    rules = {"w": P("data", None)}
    with pytest.raises(ta.TransformError, match=r"'act'. Wrap it: treeadapt.adapt"):
        ta.summarize(tree, rules, mesh=ABSTRACT_MESH, tx=optax.adam(0.1))


@pytest.mark.parametrize(
    ("rules", "options", "complaint"),
    [
        (
            {"**": P("tensor", None)},
            {},
            r"'embed'.*'tensor' is not an axis of the mesh",
        ),
        ({"**": P("data", None, None)}, {}, r"'embed'.*has 3 entries for 2 axes"),
        ({"embed": P(None, ("data", "model", "x"))}, {}, "no rule|not an axis"),
        ({"embed": P("data", None), "**": ()}, {"specs": {"x": P()}}, "label"),
        (None, {}, "needs rules that give specs"),
        ({"**": "train"}, {}, r"The rule '\*\*' gives 'train', which is not a spec"),
        ({"**": P()}, {"tx": optax.adam}, "call it"),
        (
            {"**": P()},
            {"mesh": "data=4"},
            "mesh= to be a jax.sharding.Mesh.*got the type str",
        ),
        ({"**": P()}, {"mesh": None, "tx": optax.sgd(0.1)}, "Pass mesh="),
        ({"**": P()}, {"mesh": None, "specs": {}}, "Pass mesh="),
    ],
)
def test_what_does_not_fit_is_refused_by_path(rules, options, complaint):
    options = {"mesh": ABSTRACT_MESH} | options
    with pytest.raises(ta.TreeAdaptError, match=complaint):
        ta.summarize(ABSTRACT, rules, **options)


def test_a_size_that_does_not_divide_is_refused_by_path():
    odd = {"up": jax.ShapeDtypeStruct((30, 64), jnp.float32)}
    complaint = "'up'.*size 30, which 'data' of size 4 does not divide"
    with pytest.raises(ta.ShardingError, match=complaint):
        ta.summarize(odd, {"**": P("data", None)}, mesh=ABSTRACT_MESH)


# The command


def tree():
    return model()


def tx():
    return optax.adam(0.1)


def momentum():
    schedule = optax.constant_schedule(0.1)
    return optax.sgd(schedule, momentum=0.9)


FROZEN = ta.freeze(optax.adam(0.1), "embed")
NOT_A_TX = 3
LONG = ["a long text"] * 100


def failing():
    raise ValueError


FILE = """\
version = 1

[rules]
"embed" = ["model", "data"]
"**/up" = ["data", "model"]
"**/down" = [["model", "data"], ""]
"**" = []
"""


def show(tmp_path, *arguments, code=0, rules=FILE):
    (tmp_path / "specs.toml").write_text(rules)
    tree = ["show", "test_memory_plan:tree", "--rules", tmp_path / "specs.toml"]
    return run(*tree, *arguments, code=code)


MESH = ("--mesh", "data=4, model=2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tx", "FROZEN"])
def test_the_command_prints_what_summarize_does(tmp_path, name):
    optimizer = tx() if name == "tx" else FROZEN
    plan = ta.summarize(ABSTRACT, RULES, mesh=ABSTRACT_MESH, tx=optimizer).memory
    options = (*MESH, "--optimizer", f"test_memory_plan:{name}")
    assert str(plan) in show(tmp_path, *options)
    assert str(plan) in show(tmp_path, *options, "--depth", 1)
    assert str(plan) in show(tmp_path, *options, "--format", "tree")
    found = json.loads(show(tmp_path, *options, "--format", "json"))["memory"]
    assert found["mesh"] == AXES
    assert found["devices"] == 8
    assert found["device_bytes"] == plan.device_bytes
    sizes = {one["kind"]: one["device_bytes"] for one in found["kinds"]}
    assert sizes == kinds(plan)
    assert sum(one["replicated_bytes"] for one in found["kinds"]) == sum(
        one.replicated_bytes for one in plan.kinds
    )
    arrays = {(one["kind"], one["path"]): one for one in found["arrays"]}
    assert len(arrays) == len(plan.arrays)
    down = arrays["params", "layers/0/down"]
    assert down == {
        "kind": "params",
        "path": "layers/0/down",
        "param": "layers/0/down",
        "shape": [16, 8],
        "dtype": "float32",
        "spec": [["model", "data"], None],
        "bytes": DOWN,
        "device_bytes": DOWN // 8,
        "replicated": False,
    }


def test_labels_that_are_specs_are_data_for_other_programs(tmp_path):
    leaves = json.loads(show(tmp_path, "--format", "json"))["leaves"]
    assert leaves[0]["label"] == ["model", "data"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--optimizer", "test_memory_plan:tx"), "--optimizer needs --mesh"),
        ((*MESH, "--memory-kind", "pinned_host"), "--memory-kind needs --optimizer"),
        (
            (*MESH, "--optimizer", "test_memory_plan:tx", "--memory-kind", "host"),
            "Valid memory kinds are: device, pinned_host",
        ),
        (("--mesh", "data=4,model"), "Write the name and size of each axis"),
        (("--mesh", "data=0"), "Write the name and size of each axis"),
        (("--mesh", "data=4,data=2"), "Write the name and size of each axis"),
        (("--mesh", ""), "Write the name and size of each axis"),
        (("--mesh", "data=4"), "'model' is not an axis of the mesh"),
        (("--mesh", "data=5,model=2"), "which 'data' of size 5 does not divide"),
        ((*MESH, "--optimizer", "adam"), "Write module:tx"),
        ((*MESH, "--optimizer", "test_memory_plan:NOT_A_TX"), "is 3. Give a transf"),
        ((*MESH, "--optimizer", "test_memory_plan:LONG"), ". Give a transf"),
        ((*MESH, "--optimizer", "test_memory_plan:lost"), ":lost is not there"),
        ((*MESH, "--optimizer", "test_memory_plan:failing"), ":failing raised ValueE"),
        ((*MESH, "--optimizer", ":tx"), "Write module:tx"),
        ((*MESH, "--optimizer", "test_memory_plan.py:tx"), "Write module:tx"),
    ],
)
def test_wrong_options_are_reported_in_a_line_or_two(tmp_path, arguments, told):
    text = show(tmp_path, *arguments, code=2)
    assert told in text
    assert len(text.splitlines()) <= 2


def test_a_mesh_needs_rules():
    shown = run("show", "test_memory_plan:tree", *MESH, code=2)
    assert "--mesh needs --rules" in shown


def test_boxes_with_logical_names_are_planned():
    box = nn.LogicallyPartitioned(jnp.ones((8, 4)), ("embed", "mlp"))
    mesh = AbstractMesh((4, 2), ("data", "model"))
    axes = {"embed": "data", "mlp": "model"}
    found = ta.summarize({"kernel": box}, [], mesh=mesh, logical_axes=axes)
    assert found.memory.device_bytes == 8 * 4 * 4 // 8
    with pytest.raises(ta.ShardingError, match="logical_axes= are for a mesh"):
        ta.summarize({"kernel": box}, logical_axes=axes)
