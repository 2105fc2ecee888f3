"""The one shared table of trees: every law of the library runs over every row.

A row is a container kind: a name, a function that makes a tree, and the label paths of
its leaves in leaf order. To give a new container kind all the laws, add one row.
``HIDDEN_OUT`` is the model that many rows hold in their own containers: two layers
with a kernel of shape (2, 3) and a bias of shape (3,), float32.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import attrs
import chex
import equinox as eqx
import flax.linen as nn
import flax.struct
import haiku as hk
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from flax import nnx
from flax.core import FrozenDict
from haiku.data_structures import to_immutable_dict
from penzai import pz

import treeadapt as ta


@dataclasses.dataclass(frozen=True)
class Row:
    """One container kind.

    Attributes:
        name: of the kind; the test id.
        make: builds a tree with new arrays on every call.
        paths: label paths of its leaves, in leaf order.
        opaque: JAX sees the tree, or a part of it, as one leaf.
        warns: the warning that its first conversion gives, if any.
    """

    name: str
    make: Callable[[], Any]
    paths: tuple[str, ...]
    opaque: bool = False
    warns: type[Warning] | None = None


HIDDEN_OUT = ("hidden/b", "hidden/w", "out/b", "out/w")
BY_FIELD = ("hidden/w", "hidden/b", "out/w", "out/b")


def w(fill: float = 1.0) -> jax.Array:
    return jnp.full((2, 3), fill, jnp.float32)


def b(fill: float = 0.0) -> jax.Array:
    return jnp.full((3,), fill, jnp.float32)


def two_layers(model: Callable[..., Any], layer: Callable[..., Any]) -> Any:
    return model(hidden=layer(w=w(), b=b()), out=layer(w=w(2), b=b(1)))


class LayerTuple(NamedTuple):
    w: Any
    b: Any


class ModelTuple(NamedTuple):
    hidden: Any
    out: Any


T = TypeVar("T")


class GenericTuple(NamedTuple, Generic[T]):
    hidden: T
    out: T


class Subclassed(collections.namedtuple("Base", "w b")):
    """A NamedTuple whose constructor JAX cannot call with its children."""

    def __new__(cls, w):
        return super().__new__(cls, w, w * 0)


@dataclasses.dataclass
class PlainLayer:
    w: Any
    b: Any


@dataclasses.dataclass
class PlainModel:
    hidden: Any
    out: Any


@dataclasses.dataclass(frozen=True, slots=True)
class SlotsLayer:
    w: Any
    b: Any


@jtu.register_dataclass
@dataclasses.dataclass
class RegisteredLayer:
    w: Any
    b: Any
    scale: float = dataclasses.field(default=2.0, metadata={"static": True})


@jtu.register_dataclass
@dataclasses.dataclass
class RegisteredModel:
    hidden: Any
    out: Any


@jtu.register_dataclass
@dataclasses.dataclass
class Doubling:
    """A registered dataclass that JAX cannot rebuild without changing it."""

    w: Any

    def __post_init__(self):
        self.w = jnp.asarray(self.w) * 2


@attrs.define
class AttrsLayer:
    w: Any = attrs.field(converter=jnp.asarray)
    _b: Any = attrs.field(default=None)


@attrs.frozen
class AttrsPair:
    w: Any
    b: Any


@attrs.define
class AttrsModel:
    hidden: Any
    out: Any


@dataclasses.dataclass
class ChildLayer(RegisteredLayer):
    """An unregistered subclass of a class that JAX knows."""


@flax.struct.dataclass
class StructLayer:
    w: Any
    b: Any
    name: str = flax.struct.field(pytree_node=False, default="layer")


@flax.struct.dataclass
class StructModel:
    hidden: Any
    out: Any


@chex.dataclass
class ChexLayer:
    w: Any
    b: Any


@chex.dataclass(mappable_dataclass=False)
class ChexModel:
    hidden: Any
    out: Any


class EqxLayer(eqx.Module):
    w: Any
    b: Any
    activation: Callable = jax.nn.relu
    width: int = eqx.field(static=True, default=3)

    def __call__(self, x):
        return self.activation(x @ self.w + self.b)

    def forward(self, x):
        return self(x)


class EqxModel(eqx.Module):
    hidden: Any
    out: Any

    def __call__(self, x):
        return self.out(self.hidden(x))


class EqxConverter(eqx.Module):
    w: Any = eqx.field(converter=jnp.asarray)

    def __check_init__(self):
        if self.w.ndim != 1:
            raise ValueError("w must be a vector")


class EqxHolder(eqx.Module):
    method: Any
    w: Any


class NnxLayer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(w())
        self.b = nnx.Param(b())


class NnxModel(nnx.Module):
    def __init__(self):
        self.hidden = NnxLayer()
        self.out = NnxLayer()


class NnxTied(nnx.Module):
    def __init__(self):
        self.emb = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        self.head = self.emb
        self.act = jax.nn.relu


@pz.pytree_dataclass
class PenzaiLayer(pz.Struct):
    w: Any
    b: Any


@pz.pytree_dataclass
class PenzaiModel(pz.Struct):
    hidden: Any
    out: Any


class Unregistered:
    """A class that only ``ta.register`` registers."""

    def __init__(self, w, b):
        raise TypeError("never called by a conversion")


def unregistered() -> Unregistered:
    net = object.__new__(Unregistered)
    net.w, net.b, net.name = w(), b(), "net"
    return net


ta.register(Unregistered, fields=("w", "b"))


@jtu.register_pytree_node_class
class Keyless:
    """Registered with JAX without keys."""

    def __init__(self, w, b):
        self.w, self.b = w, b

    def tree_flatten(self):
        return (self.w, self.b), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@jtu.register_pytree_node_class
class Named(Keyless):
    """Registered with JAX without keys, and named by an adapter."""


ta.register(Named, fields=("w", "b"))


def _numbered(make: Callable[[], Any]) -> Callable[[], Any]:
    """Make the tree of a library with numbers of our own: its own take compilation."""
    shapes = functools.cache(functools.partial(eqx.filter_eval_shape, make))

    def filled(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        steps = np.arange(1, leaf.size + 1, dtype=leaf.dtype)
        return jnp.asarray(np.sin(steps).reshape(leaf.shape))

    return lambda: jax.tree.map(filled, shapes())


@_numbered
def haiku_params() -> Any:
    def forward(x):
        return hk.nets.MLP([3, 3], name="mlp")(x)

    return hk.transform(forward).init(jax.random.PRNGKey(0), jnp.ones((1, 2)))


HAIKU = ("mlp/~/linear_0/b", "mlp/~/linear_0/w", "mlp/~/linear_1/b", "mlp/~/linear_1/w")


def penzai_linear() -> Any:
    return pz.nn.Linear.from_config(
        name="l",
        init_base_rng=jax.random.key(0),
        input_axes={"i": 2},
        output_axes={"o": 3},
    )


@_numbered
def eqx_shared() -> Any:
    k1, k2 = jax.random.split(jax.random.key(0))
    layers = (eqx.nn.Embedding(3, 2, key=k1), eqx.nn.Linear(2, 3, key=k2))
    return eqx.nn.Shared(layers, where=lambda p: p[1].weight, get=lambda p: p[0].weight)


def paramax_wrappers() -> Any:
    import paramax

    scale = paramax.Parameterize(jax.nn.softplus, w())
    return {"loc": paramax.NonTrainable(b()), "scale": scale}


def nnx_batchnorm() -> Any:
    return nnx.BatchNorm(2, rngs=nnx.Rngs(0))


@_numbered
def linen_variables() -> Any:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.Dense(3)(x))

    return Net().init(jax.random.key(0), jnp.ones((1, 2)))


DENSE = (
    "params/Dense_0/bias",
    "params/Dense_0/kernel",
    "params/Dense_1/bias",
    "params/Dense_1/kernel",
)


def adam_state() -> Any:
    return optax.adam(1e-3).init({"w": w(), "b": b()})


def masked_state() -> Any:
    tx = optax.chain(
        optax.masked(optax.adam(1e-3), {"w": True, "b": False}), optax.sgd(1.0)
    )
    return tx.init({"w": w(), "b": b()})


MLP = (
    "layers/0/weight",
    "layers/0/bias",
    "layers/1/weight",
    "layers/1/bias",
    "activation",
    "final_activation",
)


@_numbered
def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))


def with_function() -> dict[str, Any]:
    return {"w": jnp.ones((2, 2)), "act": jax.nn.relu}


def ordered(**layers: Any) -> Any:
    return collections.OrderedDict(layers)


def default(**layers: Any) -> Any:
    return collections.defaultdict(list, layers)


def _filled(layer: Callable[..., Any], model: Callable[..., Any], leaf: Any) -> Any:
    return model(hidden=layer(w=leaf, b=leaf), out=layer(w=leaf, b=leaf))


TREES = (
    Row("dict", lambda: two_layers(dict, dict), HIDDEN_OUT),
    Row("OrderedDict", lambda: two_layers(ordered, ordered), BY_FIELD),
    Row("defaultdict", lambda: two_layers(default, default), HIDDEN_OUT),
    Row("list", lambda: [w(), [b(), w(2)]], ("0", "1/0", "1/1")),
    Row("tuple", lambda: (w(), (b(), w(2))), ("0", "1/0", "1/1")),
    Row("NamedTuple", lambda: two_layers(ModelTuple, LayerTuple), BY_FIELD),
    Row("generic NamedTuple", lambda: two_layers(GenericTuple, LayerTuple), BY_FIELD),
    Row("NamedTuple of its own making", lambda: Subclassed(w()), ("w", "b")),
    Row(
        "dataclass",
        lambda: two_layers(PlainModel, PlainLayer),
        BY_FIELD,
        opaque=True,
    ),
    Row(
        "slots dataclass in dict",
        lambda: two_layers(dict, SlotsLayer),
        BY_FIELD,
        opaque=True,
    ),
    Row(
        "register_dataclass",
        lambda: two_layers(RegisteredModel, RegisteredLayer),
        BY_FIELD,
    ),
    Row("doubling dataclass", lambda: Doubling(w()), ("w",)),
    Row("attrs", lambda: AttrsLayer(w(), b()), ("w", "_b"), opaque=True),
    Row("flax.struct", lambda: two_layers(StructModel, StructLayer), BY_FIELD),
    Row(
        "FrozenDict",
        lambda: FrozenDict(two_layers(dict, dict)),
        HIDDEN_OUT,
    ),
    Row("Linen variables", linen_variables, DENSE),
    Row(
        "nn.Partitioned",
        lambda: {"w": nn.Partitioned(w(), ("x", "y")), "b": b()},
        ("b", "w"),
    ),
    Row(
        "nn.LogicallyPartitioned",
        lambda: {"w": nn.LogicallyPartitioned(w(), ("x", "y")), "b": b()},
        ("b", "w"),
    ),
    Row("chex mappable", lambda: two_layers(dict, ChexLayer), HIDDEN_OUT),
    Row("chex", lambda: two_layers(ChexModel, ChexLayer), HIDDEN_OUT),
    Row("nnx.Module", NnxModel, HIDDEN_OUT),
    Row("nnx.State", lambda: nnx.state(NnxModel()), HIDDEN_OUT),
    Row("pure nnx state", lambda: nnx.to_pure_dict(nnx.state(NnxModel())), HIDDEN_OUT),
    Row("nnx tied", NnxTied, ("emb/kernel",)),
    Row("nnx.BatchNorm", nnx_batchnorm, ("bias", "mean", "scale", "var")),
    Row(
        "nnx.List",
        lambda: nnx.List([NnxLayer(), NnxLayer()]),
        ("0/b", "0/w", "1/b", "1/w"),
    ),
    Row(
        "Equinox",
        lambda: two_layers(EqxModel, EqxLayer),
        (
            "hidden/w",
            "hidden/b",
            "hidden/activation",
            "out/w",
            "out/b",
            "out/activation",
        ),
    ),
    Row(
        "Equinox arrays",
        lambda: eqx.filter(two_layers(EqxModel, EqxLayer), eqx.is_array),
        BY_FIELD,
    ),
    Row("Equinox MLP", mlp, MLP),
    Row("Equinox converter", lambda: EqxConverter([1.0, 2.0]), ("w",)),
    Row(
        "Equinox bound method",
        lambda: EqxHolder(EqxLayer(w(), b()).forward, w()),
        (
            "method/__self__/w",
            "method/__self__/b",
            "method/__self__/activation",
            "w",
        ),
    ),
    Row(
        "Equinox vmapped",
        lambda: EqxHolder(None, eqx.filter_vmap(EqxLayer(w(), b()))),
        (
            "w/_fun/w",
            "w/_fun/b",
            "w/_fun/activation",
            "w/_in_axes",
            "w/_out_axes",
        ),
    ),
    Row(
        "Equinox Shared",
        eqx_shared,
        ("0/weight", "1/weight", "1/bias", "where", "get"),
    ),
    Row("Haiku", haiku_params, HAIKU),
    Row(
        "Haiku FlatMapping",
        lambda: to_immutable_dict(haiku_params()),
        HAIKU,
    ),
    *(
        [Row("paramax", paramax_wrappers, ("loc", "scale/fn", "scale/args/0"))]
        if importlib.util.find_spec("paramax")
        else []
    ),
    Row("penzai struct", lambda: two_layers(PenzaiModel, PenzaiLayer), BY_FIELD),
    Row("penzai model", penzai_linear, ("weights",), opaque=True),
    Row(
        "penzai values",
        lambda: pz.unbind_params(penzai_linear(), freeze=True)[1],
        ("0",),
    ),
    Row("Optax state", adam_state, ("0/count", "0/mu/b", "0/mu/w", "0/nu/b", "0/nu/w")),
    Row(
        "Optax masked state",
        masked_state,
        ("0/inner_state/0/count", "0/inner_state/0/mu/w", "0/inner_state/0/nu/w"),
    ),
    Row(
        "keyless class",
        lambda: {"net": Keyless(w(), b())},
        ("net/0", "net/1"),
        warns=ta.UnstablePathWarning,
    ),
    Row("keyless class, named", lambda: {"net": Named(w(), b())}, ("net/w", "net/b")),
    Row("registered object", unregistered, ("w", "b"), opaque=True),
    Row("jax Partial", lambda: jtu.Partial(max, w(), k=b()), ("args/0", "keywords/k")),
    Row(
        "None and empties",
        lambda: {
            "a": {},
            "c": [],
            "d": (),
            "e": None,
            "f": w(),
            "g": optax.EmptyState(),
        },
        ("f",),
    ),
    Row("no leaf", lambda: {"a": {}, "e": None}, ()),
    Row("bare leaf", w, ("",)),
    Row("odd keys", lambda: {"": w(), "a/b": b(), "a": {"c": w()}}, ("", "a/c", "a/b")),
    Row("integer keys", lambda: {10: w(), 2: b()}, ("2", "10")),
    Row(
        "many dtypes",
        lambda: {
            "bf16": jnp.ones(2, jnp.bfloat16),
            "int": jnp.arange(3),
            "key": jax.random.key(0),
            "numpy": np.ones(2, np.float64),
            "scalar": np.float32(1.5),
        },
        ("bf16", "int", "key", "numpy", "scalar"),
    ),
    Row(
        "abstract",
        lambda: jax.eval_shape(lambda: two_layers(dict, dict)),
        HIDDEN_OUT,
    ),
    Row(
        "static leaves",
        lambda: {"act": jax.nn.relu, "name": "mlp", "rate": 0.5, "w": w()},
        ("act", "name", "rate", "w"),
    ),
)

#: Trees with the structure of the two-layer model but no arrays: masks, labels, shapes.
WITHOUT_ARRAYS = {
    f"{classes} of {kind}": functools.partial(_filled, layer, model, leaf)
    for classes, layer, model in (
        ("dataclasses", PlainLayer, PlainModel),
        ("slots dataclasses", SlotsLayer, PlainModel),
        ("attrs classes", AttrsPair, AttrsModel),
        ("subclasses", ChildLayer, PlainModel),
    )
    for kind, leaf in (
        ("bools", True),
        ("labels", "train"),
        ("shapes", jax.ShapeDtypeStruct((2, 3), jnp.float32)),
        ("specs", jax.P("x")),
        ("statics", ta.STATIC),
        ("functions", jax.nn.relu),
    )
}

BY_NAME = {row.name: row for row in TREES}

#: Rows that hold the two-layer model and must agree on its paths.
SAME_MODEL = tuple(row for row in TREES if set(row.paths) == set(HIDDEN_OUT))


def assert_same(tree, again):
    """Same classes, same static parts, and every leaf the same object."""
    assert type(again) is type(tree)
    assert hash(jax.tree.structure(again)) == hash(jax.tree.structure(tree))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    (one, names), (two, others) = (
        jax.tree.flatten(ta.to_state_dict(each)) for each in (tree, again)
    )
    assert others == names
    assert all(a is b for a, b in zip(one, two, strict=True))
    with contextlib.suppress(ta.PathCollisionError), warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.TreeAdaptWarning)
        assert structure(again) == structure(tree)


def structure(tree):
    """The treedef of a tree, where opened classes are nodes, and statics by value."""
    return jax.tree.structure(ta.split(tree, where=[])[1])
