"""The trees whose paths ``golden_paths.toml`` fixes, one function for each library.

A function imports its library when it is called, and otherwise only JAX, NumPy and
Optax, so it works if no other optional library is installed. Most trees are the model
of a page in ``docs/``, or a layer as its library builds it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

import treeadapt as ta


def a(*shape: int) -> jax.Array:
    return jnp.zeros(shape)


def zeros(init: Callable[..., Any], *args: Any) -> Any:
    """What a library initializes, with zeros in it: nothing is compiled."""
    return filled(jax.eval_shape(init, *args))


def filled(shapes: Any) -> Any:
    """A tree with zeros for its shapes."""

    def array(like: Any) -> Any:
        if not isinstance(like, jax.ShapeDtypeStruct):
            return like
        return jnp.asarray(np.zeros(like.shape, like.dtype))

    return jax.tree.map(array, shapes)


def dense(n_in: int = 2, n_out: int = 3) -> dict[str, Any]:
    return {"kernel": a(n_in, n_out), "bias": a(n_out)}


class Quickstart(NamedTuple):
    layers: list[Any]
    head: Any


class LayerNorm(NamedTuple):
    scale: Any
    bias: Any


class Agent(NamedTuple):
    policy: Any
    value: Any


class State(NamedTuple):
    step: Any
    ema: Any
    targets: tuple[Any, ...]


@dataclasses.dataclass
class Block:
    norm: Any
    attention: Any
    mlp: Any
    dropout: float = 0.0


@jtu.register_dataclass
@dataclasses.dataclass
class Registered:
    encoder: Any
    decoder: Any
    name: str = dataclasses.field(default="model", metadata={"static": True})


@jtu.register_dataclass
@dataclasses.dataclass
class Starts:
    """JAX would run ``__post_init__`` when it rebuilds this one."""

    w: Any
    scale: Any = None

    def __post_init__(self) -> None:
        self.scale = jnp.ones(3)


@jtu.register_pytree_with_keys_class
class Keyed:
    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        names = ("first", "second")
        keys = map(jtu.GetAttrKey, names[: len(self.children)])
        return tuple(zip(keys, self.children, strict=True)), None

    def tree_flatten(self) -> tuple[Any, None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Keyed:
        return cls(*children)


class Net:
    def __init__(self, w: Any, b: Any) -> None:
        self.w, self.b = w, b


def _attention() -> dict[str, Any]:
    return {name: {"kernel": a(2, 2)} for name in ("query", "key", "value", "out")}


def _transformer(layers: int) -> dict[str, Any]:
    def block() -> dict[str, Any]:
        return {
            "ln_1": {"scale": a(2), "bias": a(2)},
            "attn": {name: dense() for name in ("c_attn", "c_proj")},
            "ln_2": {"scale": a(2), "bias": a(2)},
            "mlp": {name: dense() for name in ("c_fc", "c_proj")},
        }

    return {
        "wte": {"embedding": a(5, 2)},
        "wpe": {"embedding": a(4, 2)},
        "h": {str(number): block() for number in range(layers)},
        "ln_f": {"scale": a(2), "bias": a(2)},
    }


def core() -> dict[str, Any]:
    ta.register(Net, fields=("w", "b"))

    def block() -> Block:
        return Block(LayerNorm(a(2), a(2)), _attention(), [dense(), dense()])

    def params() -> dict[str, Any]:
        return {"encoder": dense(), "head": dense()}

    tx = ta.partition(
        {"fast": optax.adam(1e-2), "slow": optax.sgd(1e-3, momentum=0.9)},
        {"encoder/bias": "frozen", "encoder": "slow", "head": "fast"},
    )
    return {
        "quickstart": Quickstart([dense(), dense()], dense()),
        "transformer": _transformer(2),
        "agent": Agent({"params": params()}, {"params": params()}),
        "state": State(a(), {"w": a(2)}, (a(2), {"w": a(2)})),
        "dataclass": block(),
        "dataclass in a list": {"blocks": [block(), block()]},
        "registered dataclass": Registered(dense(), [dense(), None]),
        "registered dataclass that runs code": {"net": Starts(a(3))},
        "class with keys": Keyed(dense(), Keyed(a(1), a(2))),
        "registered by hand": {"nets": [Net(a(2), a(2)), Net(a(2), a(2))]},
        "OrderedDict": collections.OrderedDict(z=a(1), a=a(1)),
        "defaultdict": collections.defaultdict(list, z=[a(1)], a=[a(1)]),
        "sequences": [a(1), (a(1), [a(1)]), [a(1), a(1)]],
        "eleven in a list": [a(1) for _ in range(11)],
        "integer keys": {10: a(1), 9: a(1), -1: a(1)},
        "integer text": {"10": a(1), "9": a(1), "-1": a(1)},
        "float and bool keys": {1.5: a(1), True: a(1)},
        "tuple keys": {("a", 1): a(1), ("a", 2): {"w": a(1)}},
        "slashes, dots and signs": {
            "mlp/~/linear_0": {"w": a(1)},
            "a.b": a(1),
            "a b": a(1),
            "['k']": a(1),
            "*": a(1),
            "{0..3}": a(1),
            "!not": a(1),
            "\\": a(1),
            "\t": a(1),
            "\n": a(1),
        },
        "empty segments": {"": {"": a(1), "w": a(1)}, "a": {"": a(1)}},
        "unicode": {
            "gr\u00f6\u00dfe": a(1),
            "gro\u0308\u00dfe": a(1),
            "層": {"重み": a(1)},
        },
        "bare leaf": a(1),
        "nothing": {"a": {}, "b": None, "c": ()},
        "holes": {"a": None, "b": [None, a(1)], "c": {}, "d": ((), a(1))},
        "static leaves": {"act": jax.nn.relu, "rate": 0.1, "name": "x", "w": a(1)},
        "numpy": {"array": np.zeros(2), "scalar": np.float32(1), "key": np.zeros(2)},
        "abstract": jax.eval_shape(lambda: {"layers": [dense()], "head": dense()}),
        "typed key": {"rng": jax.random.key(0), "w": a(1)},
        "partial": {"fn": jtu.Partial(max, a(1), k=a(2))},
        "Adam": optax.adam(1e-3).init(params()),
        "state of a partition": tx.init(params()),
        "state of a freeze": ta.freeze(optax.adam(1e-3), "encoder").init(params()),
        "state dict": ta.to_state_dict(Quickstart([dense()], dense())),
        "flat dict": ta.to_flat_dict(Quickstart([dense()], dense())),
    }


def flax() -> dict[str, Any]:
    import flax.linen as nn
    import flax.struct
    from flax import nnx
    from flax.core import FrozenDict
    from flax.training.train_state import TrainState

    class Cnn(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(2, (1, 1), name="stem")(x)
            x = nn.BatchNorm(use_running_average=True)(x)
            x = nn.LayerNorm()(x)
            return nn.Dense(1, name="head")(x)

    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
            return nn.Dense(3, kernel_init=init)(x)

    @flax.struct.dataclass
    class Normalized:
        mean: Any
        std: Any
        params: Any
        name: str = flax.struct.field(pytree_node=False, default="agent")

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.scale = nnx.Param(a(2))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.List([Block(rngs), Block(rngs)])
            self.head = nnx.Linear(2, 1, use_bias=False, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.head = nnx.Embed(3, 2, rngs=rngs)
            self.embed = self.head

    cnn, model = Cnn(), Model(nnx.Rngs(0))
    variables = zeros(cnn.init, jax.random.key(0), a(1, 2, 2, 2))
    attention = nn.MultiHeadDotProductAttention(num_heads=1)
    lstm = nn.RNN(nn.LSTMCell(2))
    return {
        "Linen": variables,
        "Linen, frozen": FrozenDict(variables),
        "Linen boxes": zeros(Boxed().init, jax.random.key(0), a(1, 2)),
        "Linen attention": zeros(attention.init, jax.random.key(0), a(1, 2, 2)),
        "Linen LSTM": zeros(lstm.init, jax.random.key(0), a(1, 2, 2)),
        "TrainState": TrainState.create(
            apply_fn=cnn.apply, params=variables["params"], tx=optax.sgd(0.1)
        ),
        "struct": Normalized(a(2), a(2), {"policy": dense()}),
        "nnx": model,
        "nnx state": nnx.state(model),
        "nnx pure dict": nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        "nnx params": nnx.state(model, nnx.Param),
        "nnx tied": Tied(nnx.Rngs(0)),
        "nnx attention": nnx.MultiHeadAttention(
            1, 2, decode=False, rngs=nnx.Rngs(params=0)
        ),
    }


def equinox() -> dict[str, Any]:
    import equinox as eqx

    class Residual(eqx.Module):
        layers: list[Any]
        norm: Any
        scale: Any
        name: str = eqx.field(static=True, default="residual")

    def layer(kind: Any, *sizes: int, **options: Any) -> Any:
        make = functools.partial(kind, *sizes, key=jax.random.key(0), **options)
        return filled(eqx.filter_eval_shape(make))

    linear = functools.partial(layer, eqx.nn.Linear, 2, 2)
    net = Residual([linear(), linear(use_bias=False)], eqx.nn.LayerNorm(2), a())
    tied = eqx.nn.Shared(
        (layer(eqx.nn.Embedding, 2, 2), linear()),
        where=lambda pair: pair[1].weight,
        get=lambda pair: pair[0].weight,
    )
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="ema")
    return {
        "MLP": layer(eqx.nn.MLP, 2, 1, width_size=8, depth=1),
        "Module": net,
        "Module, arrays": eqx.filter(net, eqx.is_array),
        "Module, abstract": eqx.filter_eval_shape(lambda: net),
        "Sequential": eqx.nn.Sequential([linear(), eqx.nn.Lambda(jnp.tanh)]),
        "Conv2d": layer(eqx.nn.Conv2d, 1, 1, 3),
        "GRUCell": layer(eqx.nn.GRUCell, 2, 2),
        "attention": eqx.filter(layer(eqx.nn.MultiheadAttention, 1, 2), eqx.is_array),
        "Shared": eqx.filter(tied, eqx.is_array),
        "BatchNorm": eqx.filter(norm, eqx.is_inexact_array),
        "State": state,
        "in a dict": {"policy": [linear()], "value": linear()},
    }


def haiku() -> dict[str, Any]:
    import haiku as hk
    from haiku.data_structures import to_immutable_dict

    def forward(x: Any) -> Any:
        x = hk.nets.MLP([3, 3], name="mlp")(x)
        x = hk.LayerNorm(-1, True, True)(x)
        return hk.Linear(1, name="head")(x)

    def normalized(x: Any) -> Any:
        return hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training=True)

    key, x = jax.random.key(0), a(1, 2)
    params = zeros(hk.transform(forward).init, key, x)
    with jax.numpy_dtype_promotion("standard"):
        pair = zeros(hk.transform_with_state(normalized).init, key, x)
    return {
        "params": params,
        "params, immutable": to_immutable_dict(params),
        "params and state": pair,
    }


def paramax() -> dict[str, Any]:
    import equinox as eqx
    import paramax

    make = functools.partial(eqx.nn.Linear, 2, 2, key=jax.random.key(0))

    def linear() -> Any:
        return filled(eqx.filter_eval_shape(make))

    positive = paramax.Parameterize(jax.nn.softplus, a(2))
    normalized = paramax.WeightNormalization(jnp.ones((2, 2)))
    return {
        "frozen leaves": {"base": paramax.non_trainable(linear()), "head": linear()},
        "frozen module": {"base": paramax.NonTrainable(linear()), "head": linear()},
        "computed": eqx.tree_at(
            lambda layer: (layer.weight, layer.bias), linear(), (normalized, positive)
        ),
        "frozen in another": paramax.WeightNormalization(
            paramax.NonTrainable(jnp.ones(2))
        ),
    }


def penzai() -> dict[str, Any]:
    from penzai import pz

    def affine(name: str) -> Any:
        return pz.nn.Affine.from_config(
            name=name,
            init_base_rng=jax.random.key(0),
            input_axes={"features": 2},
            output_axes={"features": 2},
        )

    @pz.pytree_dataclass
    class Pair(pz.Struct):
        w: Any
        b: Any

    model = pz.nn.Sequential([affine("encoder"), affine("head")])
    return {
        "model": model,
        "variables": pz.unbind_params(model, freeze=True)[1],
        "struct": Pair(pz.nx.wrap(a(2, 2)).tag("i", "o"), [a(2)]),
    }


def attrs() -> dict[str, Any]:
    import attrs

    @attrs.define
    class Layer:
        w: Any = attrs.field(converter=jnp.asarray)
        _b: Any = None

    @attrs.frozen
    class Model:
        layers: list[Layer]
        head: Any

    return {"model": Model([Layer(a(2), a(2)), Layer(a(2), a(2))], dense())}


def chex() -> dict[str, Any]:
    import chex

    @chex.dataclass
    class Layer:
        w: Any
        b: Any

    @chex.dataclass(mappable_dataclass=False, frozen=True)
    class Model:
        layers: list[Layer]
        head: Any

    return {"model": Model(layers=[Layer(w=a(2), b=a(2)) for _ in "ab"], head=dense())}


def brax() -> dict[str, Any]:
    from brax.training.agents.ppo import losses, networks
    from brax.training.agents.sac import networks as sac

    ppo = networks.make_ppo_networks(
        3, 2, policy_hidden_layer_sizes=(4, 4), value_hidden_layer_sizes=(4,)
    )
    params = losses.PPONetworkParams(
        policy=zeros(ppo.policy_network.init, jax.random.key(0)),
        value=zeros(ppo.value_network.init, jax.random.key(1)),
    )
    twin = sac.make_sac_networks(3, 2, hidden_layer_sizes=(4,))
    return {
        "PPO": params,
        "PPO, as saved": (params.policy, params.value),
        "SAC": {
            "policy": zeros(twin.policy_network.init, jax.random.key(0)),
            "q": zeros(twin.q_network.init, jax.random.key(1)),
        },
    }


#: Module that must be installed -> its trees, by name, which are made once.
LIBRARIES: Mapping[str, Callable[[], dict[str, Any]]] = types.MappingProxyType(
    {
        "jax": functools.cache(core),
        "flax": functools.cache(flax),
        "equinox": functools.cache(equinox),
        "haiku": functools.cache(haiku),
        "paramax": functools.cache(paramax),
        "penzai": functools.cache(penzai),
        "attrs": functools.cache(attrs),
        "chex": functools.cache(chex),
        "brax": functools.cache(brax),
    }
)
