"""One call shards a whole training state: params, copies of them, optimizer states.

The law: each leaf has the sharding that the params get by themselves, and the state by
``opt_state_shardings``. Rules of others are rewritten, with names and shapes as facts.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from sizes import grid
from test_shard_largest import largest_by_bytes

import treeadapt as ta
from treeadapt import named_shardings, partition_specs

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore::treeadapt.ReplicatedWarning"),
]

MESH = AbstractMesh((4, 2), ("data", "model"))


def init() -> dict[str, Any]:
    return {
        "wte": {"embedding": jnp.ones((16, 8))},
        "h": {"w": jnp.ones((8, 24)), "b": jnp.ones(24)},
        "ln": {"scale": jnp.ones(8)},
    }


PARAMS = jax.eval_shape(init)
#: Names from the node that holds the params; and of no place.
RULES = {"wte/embedding": P("data", "model"), "h/w": P(None, "data"), "**": P()}
ANYWHERE = {"**/embedding": P("data", "model"), "**/w": P(None, "data"), "**": P()}


class Everything(TrainState):
    """A state as people extend it."""

    ema_params: Any = None
    rng: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Loop:
    model: Any
    opt: Any
    step: Any


class Mine(NamedTuple):
    """The state of a transformation of one's own."""

    mom: Any
    count: Any


def mine() -> Any:
    def init(params: Any) -> Any:
        return Mine(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    return optax.GradientTransformation(init, lambda g, s, p=None: (g, s))


GROUPS = {"h": "a", "ln": "frozen", "**": "b"}
TXS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "sgd": lambda: optax.sgd(0.1),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.adam(1e-3), 2
    ).gradient_transformation(),
    "partition": lambda: ta.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1, 0.9)}, GROUPS
    ),
    "optax.partition": lambda: optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1)}, ta.Rules({"h": "b", "**": "a"})
    ),
    "lbfgs": lambda: ta.adapt(optax.lbfgs(memory_size=3)),
    "inject": lambda: ta.inject_hyperparams(optax.adam)(1e-3),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "sm3": lambda: optax.sm3(0.1),
    "muon": lambda: optax.contrib.muon(1e-3),
    "per_layer": lambda: ta.per_layer(optax.lamb(1e-3), {"h/w": 0}),
    "of one's own": lambda: optax.chain(optax.scale_by_adam(), mine()),
}

#: Where params and state are in a training state, and how it is made.
FORMS: dict[str, tuple[str, str, Callable[[Any, Any], Any]]] = {
    "TrainState": (
        "params",
        "opt_state",
        lambda tx, p: TrainState.create(params=p, tx=tx, apply_fn=None),
    ),
    "with averages": (
        "params",
        "opt_state",
        lambda tx, p: Everything.create(
            params=p,
            tx=tx,
            apply_fn=jax.nn.relu,
            ema_params=jax.tree.map(jnp.array, p),
            rng=jax.random.key(0),
        ),
    ),
    "dict": (
        "net",
        "opt",
        lambda tx, p: {
            "net": p,
            "opt": tx.init(p),
            "stats": {"mean": jnp.ones(8)},
            "step": jnp.int32(0),
        },
    ),
    "tuple": ("0", "1", lambda tx, p: (p, tx.init(p), jnp.int32(0))),
    "dataclass": ("model", "opt", lambda tx, p: Loop(p, tx.init(p), jnp.int32(0))),
    "flat": (
        "params",
        "opt",
        lambda tx, p: {
            "params": ta.to_flat_dict(p),
            "opt": ta.adapt(tx).init(p),
        },
    ),
}


def below(flat: dict[str, Any], node: str) -> dict[str, Any]:
    start = f"{node}/"
    return {k.removeprefix(start): v for k, v in flat.items() if k.startswith(start)}


def in_parts(tx: Any, rules: Any, params: Any = PARAMS) -> tuple[Any, Any]:
    """The shardings of params and of state, each by its own call."""
    shardings = named_shardings(params, rules, MESH)
    state = ta.opt_state_shardings(tx, params, shardings)
    return ta.to_flat_dict(shardings), ta.to_flat_dict(state)


@pytest.mark.parametrize(("name", "form"), grid(TXS, FORMS, 3))
def test_one_call_gives_what_calls_for_each_part_give(name, form):
    node, place, make = FORMS[form]
    tx = TXS[name]()
    tx_of_parts = ta.adapt(tx) if form == "flat" else tx
    tree = jax.eval_shape(lambda: make(tx, init()))
    params, state = in_parts(tx_of_parts, RULES)
    prefixed = {f"{node}/{k}" if k != "**" else k: v for k, v in RULES.items()}
    for rules in (RULES, ANYWHERE, prefixed, ta.Rules(RULES, unused="ignore")):
        shardings = named_shardings(tree, rules, MESH)
        assert jax.tree.structure(shardings) == jax.tree.structure(tree)
        flat = ta.to_flat_dict(shardings)
        assert below(flat, node) == params
        assert below(flat, place) == state
        if form == "with averages":
            assert below(flat, "ema_params") == params
        rest = {"rng", "step", "stats/mean", "0/count"} & flat.keys()
        assert {flat[path].spec for path in rest} <= {P()}
        specs = ta.to_flat_dict(partition_specs(tree, rules))
        assert {k: v.spec for k, v in below(flat, node).items()} == below(specs, node)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "partition"])
@pytest.mark.parametrize("form", ["TrainState", "with averages", "dict"])
def test_a_state_is_made_and_put_where_one_call_says(name, form, kind):
    types = (jax.sharding.AxisType[kind],) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
    tx, make = TXS[name](), FORMS[form][2]

    def whole() -> Any:
        return make(tx, init())

    shardings = named_shardings(jax.eval_shape(whole), RULES, mesh)
    host = whole()
    with jax.set_mesh(mesh):
        made = jax.jit(whole, out_shardings=shardings)()
    for tree in (made, jax.device_put(host, shardings)):
        leaves = zip(*map(jax.tree.leaves, (tree, shardings, host)), strict=True)
        for leaf, sharding, value in leaves:
            assert leaf.sharding == sharding
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(leaf, value)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["objects", "state"])
def test_an_nnx_optimizer_with_its_model_is_one_call(form):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    tree: Any = {"model": model, "optimizer": optimizer}
    if form == "state":
        tree = nnx.split(tree)[1]
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    # A state that Flax has split off has lost the classes that say what is a moment.
    from_node = {"dense/kernel": P("data", "model"), "**": P()}
    for rules in [ANYWHERE_NNX, *([from_node] if form == "objects" else ())]:
        shardings = named_shardings(tree, rules, mesh)
        flat = ta.to_flat_dict(shardings)
        sharded = [path for path, each in flat.items() if each.spec != P()]
        assert sorted(sharded) == [
            "model/dense/kernel",
            "optimizer/opt_state/0/mu/dense/kernel",
            "optimizer/opt_state/0/nu/dense/kernel",
        ]
    placed = ta.to_flat_dict(jax.device_put(tree, shardings))
    assert all(leaf.sharding == flat[path] for path, leaf in placed.items())


ANYWHERE_NNX = {"**/kernel": P("data", "model"), "**": P()}


@pytest.mark.slow
def test_scanned_layers_and_classes_of_a_model_are_known_in_a_state():
    blocks = {"blocks": {"w": jnp.ones((6, 8, 4)), "b": jnp.ones((6, 4))}}
    rules = ta.Rules({"**/w": P("data", "model"), "**": P()}, stacks={"blocks": 0})
    groups = ta.Rules({"blocks/{0..1}": "a", "**": "b"}, stacks={"blocks": 0})
    tx = ta.partition({"a": optax.adam(1e-3), "b": optax.sgd(0.1, 0.9)}, groups)
    tree = {"net": blocks, "opt": jax.eval_shape(tx.init, blocks)}
    flat = ta.to_flat_dict(named_shardings(tree, rules, MESH))
    params, state = in_parts(tx, rules, blocks)
    assert below(flat, "net") == params
    assert below(flat, "opt") == state
    assert {each.spec for path, each in state.items() if path.endswith("w")} == {
        P(None, "data", "model")
    }

    class Net(eqx.Module):
        first: eqx.nn.Linear
        second: eqx.nn.LayerNorm

    net = Net(eqx.nn.Linear(8, 4, key=jax.random.key(0)), eqx.nn.LayerNorm(4))
    net = eqx.filter(net, eqx.is_array)
    tree = (net, optax.adam(1e-3).init(net))
    by_class = [(eqx.nn.LayerNorm, P()), ("**/weight", P("model", ...)), ("**", P())]
    flat = ta.to_flat_dict(named_shardings(tree, by_class, MESH))
    sharded = [path for path, each in flat.items() if each.spec == P("model", None)]
    assert sharded == ["0/first/weight", "1/0/mu/first/weight", "1/0/nu/first/weight"]


def test_rules_may_name_each_of_several_trees_that_are_alike():
    node, place, make = FORMS["with averages"]
    tree = jax.eval_shape(lambda: make(optax.adam(1e-3), init()))
    rules = {"ema_params": P(), "**/embedding": P("data", None), "**": P()}
    flat = ta.to_flat_dict(named_shardings(tree, rules, MESH))
    assert flat["ema_params/wte/embedding"].spec == P()
    assert flat[f"{node}/wte/embedding"].spec == P("data", None)
    assert flat[f"{place}/0/mu/wte/embedding"].spec == P("data", None)


def test_alike_trees_with_other_specs_need_one_that_is_called_params():
    tree = {"ema": PARAMS, "net": PARAMS, "opt": optax.adam(0.1).init(init())}
    rules = {"ema": P(), "**/w": P(None, "data"), "**": P()}
    with pytest.raises(ta.ShardingError, match=r"any of 'ema', 'net'.*'params'"):
        named_shardings(tree, rules, MESH)
    tree["params"] = tree.pop("net")
    flat = ta.to_flat_dict(named_shardings(tree, rules, MESH))
    assert flat["opt/0/mu/h/w"].spec == flat["params/h/w"].spec == P(None, "data")
    assert flat["ema/h/w"].spec == P()


def test_a_state_follows_the_nearest_of_trees_that_are_alike():
    one = {"net": PARAMS, "opt": jax.eval_shape(optax.adam(0.1).init, PARAMS)}
    rules = {"a/**/w": P(None, "data"), "b/**/w": P("data", None), "**": P()}
    flat = ta.to_flat_dict(named_shardings({"a": one, "b": one}, rules, MESH))
    for name, spec in (("a", P(None, "data")), ("b", P("data", None))):
        paths = [f"{name}/{each}/h/w" for each in ("net", "opt/0/mu", "opt/0/nu")]
        assert {flat[path].spec for path in paths} == {spec}


def test_params_may_be_one_bare_array():
    array = jnp.ones((8, 4))
    tree = {"params": array, "opt": optax.adam(0.1).init(array)}
    flat = ta.to_flat_dict(named_shardings(tree, {"params": P("data", ...)}, MESH))
    assert {path for path, each in flat.items() if each.spec == P("data", None)} == {
        "params",
        "opt/0/mu",
        "opt/0/nu",
    }


def test_bound_rules_decide_on_the_params():
    tree = {"net": PARAMS, "opt": jax.eval_shape(optax.adam(0.1).init, PARAMS)}
    bound = ta.Rules(RULES).bind(PARAMS)
    flat = ta.to_flat_dict(named_shardings(tree, bound, MESH))
    assert flat["opt/0/mu/h/w"].spec == flat["net/h/w"].spec == P(None, "data")


OTHER = {"gen": {"w": jnp.ones((8, 2))}, "disc": {"v": jnp.ones((8, 2))}}


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (lambda: optax.adam(0.1).init(PARAMS_ON), "no one tree next to it has all"),
        (
            lambda: {"opt": optax.adam(0.1).init(PARAMS_ON), "step": jnp.ones(3)},
            "no one tree next to it has all the params",
        ),
        (
            lambda: {
                name: {"params": params, "opt": optax.adam(0.1).init(params)}
                for name, params in OTHER.items()
            },
            "no one tree next to it has all the params",
        ),
        (
            lambda: {
                "one": {"a": jnp.ones((4, 2)), "b": jnp.ones(4)},
                "two": {"a": jnp.ones((4, 2)), "c": jnp.ones(2)},
                "opt": optax.adam(0.1).init({"a": jnp.ones((4, 2))}),
            },
            "may be of 'one', 'two', which differ",
        ),
    ],
)
def test_a_state_whose_params_are_not_known_is_sent_elsewhere(tree, text):
    with pytest.raises(ta.ShardingError, match=f"{text}.*opt_state_shardings"):
        named_shardings(tree(), {"**": P()}, MESH)


PARAMS_ON = {"a": jnp.ones((4, 2))}


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        (
            {"wte/embeding": P(), "**": P()},
            ta.UnusedRuleError,
            "'params/wte/embedding'",
        ),
        ({"h": P(), "wte": P()}, ta.UnmatchedPathError, "'ln/scale'"),
        ({"h/w": P("data"), "**": P()}, ta.ShardingError, "1 entry for 2 axes"),
        ({"h/w": P("tensor", None), "**": P()}, ta.ShardingError, "not an axis of the"),
    ],
)
def test_errors_are_those_of_rules_for_params(rules, error, text):
    make = FORMS["TrainState"][2]
    tree = jax.eval_shape(lambda: make(optax.adam(1e-3), init()))
    with pytest.raises(error, match=text):
        named_shardings(tree, rules, MESH)


def test_copies_that_nobody_asked_for_are_reported_once():
    tree = {"net": PARAMS, "opt": jax.eval_shape(optax.adam(0.1).init, PARAMS)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        named_shardings(tree, {"h/w": P(None, "data")}, MESH, default=P())
    (warning,) = caught
    assert "3 leaves" in str(warning.message)


# Rules of others, for all of a training state


def llama(width: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of EasyLM's LLaMA."""
    wide = 4 * width
    block = {
        **{f"attention/{name}/kernel": (width, width) for name in ("wq", "wk", "wv")},
        "attention/wo/kernel": (width, width),
        "feed_forward/w1/kernel": (width, wide),
        "feed_forward/w2/kernel": (wide, width),
        "feed_forward/w3/kernel": (width, wide),
        "attention_norm/kernel": (width,),
        "ffn_norm/kernel": (width,),
    }
    return {
        "transformer/wte/embedding": (vocabulary, width),
        **{
            f"transformer/h/{number}/{path}": shape
            for number in range(layers)
            for path, shape in block.items()
        },
        "transformer/ln_f/kernel": (width,),
        "lm_head/kernel": (width, vocabulary),
    }


#: Regular expressions that are searched for in a name, as that library writes them.
EASYLM = (
    ("transformer/wte/embedding", P("mp", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
    ("attention/wo/kernel", P("mp", "fsdp")),
    ("feed_forward/w1/kernel", P("fsdp", "mp")),
    ("feed_forward/w2/kernel", P("mp", "fsdp")),
    ("feed_forward/w3/kernel", P("fsdp", "mp")),
    ("attention_norm/kernel", P(None)),
    ("ffn_norm/kernel", P(None)),
    ("transformer/ln_f/kernel", P(None)),
    ("lm_head/kernel", P("fsdp", "mp")),
    (".*", P(None)),
)
EASYLM_HERE = {
    "**/wte/embedding": P("mp", "fsdp"),
    "**/attention/{wq,wk,wv}": P("fsdp", "mp"),
    "**/attention/wo": P("mp", "fsdp"),
    "**/feed_forward/{w1,w3}": P("fsdp", "mp"),
    "**/feed_forward/w2": P("mp", "fsdp"),
    "**/lm_head": P("fsdp", "mp"),
    "**": P(),
}


def nested(shapes: dict[str, tuple[int, ...]], dtype: Any = jnp.float32) -> Any:
    leaves = {path: jax.ShapeDtypeStruct(x, dtype) for path, x in shapes.items()}
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, name = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[name] = leaf
    return tree


def searched(path: str, leaf: Any) -> P:
    """The spec of a leaf where expressions are searched for in all names."""
    if not leaf.shape or math.prod(leaf.shape) == 1:
        return P()
    return next(spec for rule, spec in EASYLM if re.search(rule, path))


def places(spec: P) -> tuple[Any, ...]:
    """A spec without the axes at its end that are not sharded."""
    entries = [*spec]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def train_states(params: Any, tx: Any) -> Iterator[tuple[str, Any]]:
    state = jax.eval_shape(
        lambda p: TrainState.create(params=p, tx=tx, apply_fn=None), params
    )
    yield from ta.to_flat_dict(state).items()


@pytest.mark.slow
def test_the_rules_of_easylm_for_a_whole_training_state():
    params = nested(llama(64, 12, 256))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    mesh = AbstractMesh((4, 2), ("fsdp", "mp"))
    state = jax.eval_shape(
        lambda p: TrainState.create(params=p, tx=tx, apply_fn=None), params
    )
    flat = ta.to_flat_dict(named_shardings(state, EASYLM_HERE, mesh))
    leaves = dict(train_states(params, tx))
    assert len(flat) == len(leaves) == 335
    for path, leaf in leaves.items():
        assert places(flat[path].spec) == places(searched(path, leaf)), path


@pytest.mark.parametrize("at_least", [0, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rules_by_shape_of_openpi_and_big_vision_for_a_whole_state(at_least, dtype):
    shapes = {
        "PaliGemma/llm/embedder/input_embedding": (257_152, 2048),
        "PaliGemma/llm/layers/attn/q_einsum/w": (18, 8, 2048, 256),
        "PaliGemma/llm/layers/attn/kv_einsum/w": (18, 2, 1, 2048, 256),
        "PaliGemma/llm/layers/attn/attn_vec_einsum/w": (18, 8, 256, 2048),
        "PaliGemma/llm/layers/mlp/gating_einsum": (18, 2, 2048, 16_384),
        "PaliGemma/llm/layers/mlp/linear": (18, 16_384, 2048),
        "PaliGemma/llm/layers/pre_ffw_norm/scale": (18, 2048),
        "PaliGemma/img/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel": (
            *(27, 1152, 4304),
        ),
        "PaliGemma/img/Transformer/encoderblock/MlpBlock_0/Dense_0/bias": (27, 4304),
        "PaliGemma/img/head/kernel": (1152, 2048),
        "square": (2048, 2048),
        "action_in_proj/kernel": (32, 1024),
        "action_in_proj/bias": (2**21,),
    }
    params = nested(shapes, dtype)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    mesh = AbstractMesh((8,), ("fsdp",))
    by_bytes = ta.shard_largest("fsdp", min_bytes=4 * 2**20, ties="last")
    small = [(ta.leaf(ndim=1), P())] if at_least else []
    state = jax.eval_shape(
        lambda p: TrainState.create(params=p, tx=tx, apply_fn=None), params
    )
    flat = ta.to_flat_dict(named_shardings(state, [*small, ("**", by_bytes)], mesh))
    for path, leaf in train_states(params, tx):
        want = largest_by_bytes(leaf, 8, 4 * 2**20, at_least=at_least)
        assert flat[path].spec == want, path
