"""Static leaves and static fields: compared by type and value, as at the split."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import enum
import fractions
import functools
import logging
import math
import operator
import pathlib
import random
import re
import threading
import types
import uuid
from typing import Any, NamedTuple

import attrs
import equinox as eqx
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from trees import mlp, nnx_batchnorm

import treeadapt as ta


@dataclasses.dataclass
class Settings:
    scale: Any = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: Any = 1


@dataclasses.dataclass(eq=False)
class ByIdentity:
    scale: Any = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: Any = 1


@attrs.define
class Attrs:
    scale: Any = 1


@attrs.frozen
class AttrsFrozen:
    scale: Any = 1


class Object:
    def __init__(self, scale=1):
        self.scale = scale

    def method(self):
        return self.scale


class WithSlots:
    __slots__ = ("scale",)

    def __init__(self, scale=1):
        self.scale = scale


class Comparable(Object):
    def __eq__(self, other):
        return isinstance(other, Comparable) and self.scale == other.scale

    __hash__ = None


class Hashable(Comparable):
    def __hash__(self):
        return 0


class SilentList(list):
    def __iter__(self):
        return iter(())

    def __hash__(self):
        return 0


class MyDict(dict): ...


class MySet(set): ...


class MyDeque(collections.deque): ...


class MyStr(str): ...


class MyInt(int): ...


class MyTuple(tuple): ...


class Pair(NamedTuple):
    first: Any
    second: Any = 0


class Setter:
    def __init__(self):
        self._scale = 1

    @property
    def scale(self):
        return self._scale

    @scale.setter
    def scale(self, value):
        self._scale = value


class Color(enum.Enum):
    RED = 1


def cycle():
    found = [1]
    found.append(found)
    return found


def ring():
    one, two = Object(), Object()
    one.other, two.other = two, one
    return one


def set_scale(thing):
    object.__setattr__(thing, "scale", 1.0)


def append(thing):
    thing.append(2)


# Name: how it is made, and how it changes in place.
CHANGING = {
    "list": (lambda: [1], append),
    "list within": (lambda: ([{"a": [1]}],), lambda x: x[0][0]["a"].append(2)),
    "list, 1 for 1.0": (lambda: [1], lambda x: operator.setitem(x, 0, 1.0)),
    "list, 0.0 for -0.0": (lambda: [0.0], lambda x: operator.setitem(x, 0, -0.0)),
    "list of complex": (lambda: [0j], lambda x: operator.setitem(x, 0, -0j)),
    "list with itself": (lambda: Object(cycle()), lambda x: x.scale.append(2)),
    "dict": (lambda: {"scale": 1}, lambda x: x.update(scale=2)),
    "dict, True for 1": (lambda: {"scale": 1}, lambda x: x.update(scale=True)),
    "order of a dict": (
        lambda: Object({"a": 1, "b": 1}),
        lambda x: x.scale.update(a=x.scale.pop("a")),
    ),
    "nested configuration": (
        lambda: {"model": {"layers": [{"width": 1}]}},
        lambda x: x["model"]["layers"][0].update(width=2),
    ),
    "set": (lambda: {1}, lambda x: x.add(2)),
    "set, 1.0 for 1": (lambda: {1}, lambda x: (x.clear(), x.add(1.0))),
    "set within a tuple": (lambda: (1, {1}), lambda x: x[1].add(2)),
    "frozenset of objects": (
        lambda: frozenset({Hashable()}),
        lambda x: set_scale(next(iter(x))),
    ),
    "deque": (lambda: collections.deque([1]), append),
    "bounded deque": (lambda: collections.deque([1, 1], 2), append),
    "bytearray": (lambda: bytearray(b"a"), lambda x: x.extend(b"b")),
    "list after a list": (lambda: ([1], ("a", [2])), lambda x: append(x[1][1])),
    "NumPy array within": (
        lambda: Settings(Settings([np.ones(2)])),
        lambda x: operator.setitem(x.scale.scale[0], 0, 2),
    ),
    "SimpleNamespace": (lambda: types.SimpleNamespace(scale=1), set_scale),
    "argparse.Namespace": (lambda: argparse.Namespace(scale=1), set_scale),
    "dataclass": (Settings, set_scale),
    "dataclass with slots": (Slotted, set_scale),
    "dataclass without eq": (ByIdentity, set_scale),
    "dataclass of dataclasses": (
        lambda: Settings([Settings()]),
        lambda x: set_scale(x.scale[0]),
    ),
    "attribute that is no field": (Settings, lambda x: setattr(x, "other", 1)),
    "frozen dataclass": (Frozen, set_scale),
    "frozen dataclass of a list": (lambda: Frozen([1]), lambda x: x.scale.append(2)),
    "attrs": (Attrs, set_scale),
    "frozen attrs": (lambda: AttrsFrozen([1]), lambda x: x.scale.append(2)),
    "object": (Object, set_scale),
    "object of objects": (lambda: Object(Object()), lambda x: set_scale(x.scale)),
    "objects that hold each other": (ring, lambda x: set_scale(x.other)),
    "object with slots": (WithSlots, set_scale),
    "object with __eq__": (Comparable, set_scale),
    "object with __hash__": (Hashable, set_scale),
    "object with a property": (Setter, lambda x: setattr(x, "scale", 2)),
    "list subclass": (lambda: SilentList([1]), append),
    "dict subclass": (lambda: MyDict(a=1), lambda x: x.update(a=2)),
    "attribute of a dict subclass": (lambda: MyDict(a=1), set_scale),
    "set subclass": (lambda: MySet({1}), lambda x: x.add(2)),
    "deque subclass": (lambda: MyDeque([1]), append),
    "attribute of a str": (lambda: MyStr("a"), set_scale),
    "attribute of an int": (lambda: MyInt(1), set_scale),
    "attribute of a tuple": (lambda: MyTuple((1,)), set_scale),
    "NamedTuple": (lambda: Pair([1]), lambda x: x.first.append(2)),
    "OrderedDict": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda x: x.move_to_end("a"),
    ),
    "defaultdict": (
        lambda: collections.defaultdict(int, a=1),
        lambda x: setattr(x, "default_factory", list),
    ),
    "Counter": (lambda: collections.Counter("a"), lambda x: x.update("a")),
    "ChainMap": (lambda: collections.ChainMap({"a": 1}), lambda x: x.update(a=2)),
    "UserDict": (lambda: collections.UserDict(a=1), lambda x: x.update(a=2)),
    "UserList": (lambda: collections.UserList([1]), append),
    "mapping proxy": (
        lambda: types.MappingProxyType(vars(types.SimpleNamespace(a=[1]))),
        lambda x: x["a"].append(2),
    ),
    "partial": (
        lambda: functools.partial(max, {"a": 1}),
        lambda x: x.args[0].update(a=2),
    ),
    "keywords of a partial": (
        lambda: functools.partial(max, default=1),
        lambda x: x.keywords.update(default=2),
    ),
    "keywords of JAX's partial": (
        lambda: Object(jtu.Partial(max, default=1)),
        lambda x: x.scale.keywords.update(default=2),
    ),
    "bound method": (lambda: Object().method, lambda x: set_scale(x.__self__)),
}

# All else is what it is, whatever becomes of it.
CLOSED = {
    "array": (lambda: array.array("i", [1]), append),
    "random.Random": (lambda: random.Random(0), lambda x: x.random()),
    "NumPy generator": (lambda: np.random.default_rng(0), lambda x: x.random()),
    "iterator": (lambda: iter([1, 2]), next),
    "generator": (lambda: (i for i in range(3)), next),
    "method of a list": (lambda: [1].count, lambda x: x.__self__.append(2)),
}


@flax.struct.dataclass
class Struct:
    w: Any
    static: Any = flax.struct.field(pytree_node=False)


class Module(eqx.Module):
    w: Any
    static: Any = eqx.field(static=True)


class Net(nnx.Module):
    def __init__(self, w, static):
        self.w = nnx.Param(w)
        self.settings = nnx.static(static)


@jtu.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    static: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass
class Plain:
    w: Any
    static: Any


HOLDERS = {
    "leaf": lambda w, static: {"w": w, "static": static},
    "Equinox": Module,
    "flax.struct": Struct,
    "nnx": Net,
    "registered": Registered,
    "plain": Plain,
}


def tracer():
    """Return a compiled function of a tree, and the list of its traces."""
    traces = []

    @jax.jit
    def run(params, rest):
        traces.append(ta.merge(params, rest))
        return 0

    return lambda tree: run(*ta.split(tree)), traces


def hold(holder, static):
    return HOLDERS[holder](jnp.ones(2), static)


def form(holder, static):
    """Return what ``jit`` compares of a split tree."""
    tree = static if holder is None else hold(holder, static)
    return jax.tree.structure(ta.split(tree)[1])


@pytest.mark.hazard("H6b", "H7", "K20")
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", CHANGING)
def test_a_static_that_changes_in_place_is_another(kind, holder):
    if kind == "NumPy array within" and holder in ("leaf", "plain"):
        pytest.skip("that array is a leaf")
    make, change = CHANGING[kind]
    value = make()
    tree = hold(holder, value)
    before = form(None, tree)
    assert before == form(None, tree)
    change(value)
    after = form(None, tree)
    assert before != after
    assert after == form(None, tree)
    assert before != after


@pytest.mark.hazard("H6b")
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", ["set", "dataclass", "object", "partial"])
def test_a_static_that_changes_in_place_traces_anew(kind, holder):
    make, change = CHANGING[kind]
    value = make()
    tree = hold(holder, value)
    run, traces = tracer()
    run(tree)
    run(tree)
    assert len(traces) == 1
    change(value)
    run(tree)
    run(tree)
    assert len(traces) == 2


@pytest.mark.hazard("H6b")
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", CLOSED)
def test_what_is_not_looked_into_is_one_object_whatever_becomes_of_it(kind, holder):
    make, change = CLOSED[kind]
    value = make()
    tree = hold(holder, Object(value))
    before = form(None, tree)
    change(value)
    assert before == form(None, tree)
    assert before != form(holder, Object(make()))


@pytest.mark.hazard("H3")
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, 1.0),
        (Frozen(1), Frozen(1.0)),
        (Frozen(1), Frozen(True)),
        (Frozen((0.0,)), Frozen((-0.0,))),
        (Frozen(Frozen(1)), Frozen(Frozen(np.int64(1)))),
        (AttrsFrozen(1), AttrsFrozen(1.0)),
        (Hashable(1), Hashable(1.0)),
        (frozenset({1}), frozenset({1.0})),
        (frozenset({1}), frozenset({True})),
        (frozenset({(1, "a")}), frozenset({(1.0, "a")})),
        (frozenset({1}), {1}),
        (Pair(1), Pair(1.0)),
        (Pair(1, 0), (1, 0)),
        ("a", MyStr("a")),
        (1, MyInt(1)),
        (Object, Hashable),
        (fractions.Fraction(1), 1),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=1.0)),
        (functools.partial(max, 1), functools.partial(max, 1.0)),
        (jax.tree.structure({1: 0}), jax.tree.structure({1.0: 0})),
    ],
)
def test_static_values_of_another_type_are_others(one, two, holder):
    forms = [form(holder, value) for value in (one, two, one)]
    assert forms[0] == forms[2]
    assert forms[0] != forms[1]


def closure():
    return jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")


@functools.lru_cache
def cached():
    return 1


SAME = {
    "relu": lambda: jax.nn.relu,
    "gelu": lambda: functools.partial(jax.nn.gelu, approximate=False),
    "compiled": lambda: jax.jit(lambda x: x),
    "initializer": lambda: closure(),
    "partial of a partial": lambda: functools.partial(functools.partial(max, 1), [2]),
    "lambda": lambda: lambda x: x,
    "class": lambda: Settings,
    "module": lambda: jnp,
    "builtin": lambda: max,
    "cached function": lambda: cached,
    "itemgetter": lambda: operator.itemgetter(1),
    "ufunc": lambda: np.add,
    "vectorized": lambda: np.vectorize(len),
    "dtype": lambda: np.dtype("float32"),
    "jnp dtype": lambda: jnp.bfloat16,
    "dtypes within": lambda: (jnp.float32, np.dtype("int8"), np.float16),
    "mesh": lambda: jax.make_mesh((1,), ("x",)),
    "sharding": lambda: jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P("x")),
    "spec": lambda: jax.P("x", None),
    "device": lambda: jax.devices()[0],
    "shape": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "optax": lambda: optax.adamw(1e-3),
    "optax chain": lambda: optax.chain(
        optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(1)
    ),
    "Linen module": lambda: nn.Dense(3),
    "Linen apply": lambda: nn.Sequential([nn.Dense(3), nn.relu]).apply,
    "nnx graph": lambda: nnx.split(nnx_batchnorm())[0],
    "treedef": lambda: jax.tree.structure({"a": [1, 2]}),
    "selector": lambda: ta.glob("a") | ta.leaf(ndim=2),
    "rules": lambda: ta.Rules({"a": "frozen", "**": "train"}),
    "pattern": lambda: re.compile("a+"),
    "path": lambda: pathlib.Path("/a/b"),
    "uuid": lambda: uuid.UUID(int=1),
    "logger": lambda: logging.getLogger("a.logger"),
    "lock": lambda: threading.Lock(),
    "object with a lock": lambda: Object(threading.RLock()),
    "enum": lambda: Color.RED,
    "sentinel": lambda: object(),
    "generic": lambda: list[int],
    "union": lambda: int | None,
    "settings": lambda: Settings({"a": [1, {2}]}),
    "cycle": lambda: cycle(),
    "bytes": lambda: b"a",
    "nan": lambda: float("nan"),
    "doubled fifty times": lambda: functools.reduce(
        lambda below, _: [below, below], range(50), [1]
    ),
    "deep": lambda: functools.reduce(lambda below, _: [below], range(20_000), 1),
}


@pytest.mark.hazard("H5")
@pytest.mark.parametrize("kind", SAME)
def test_what_does_not_change_traces_once(kind):
    held = types.SimpleNamespace(value=SAME[kind]())
    tree = hold("registered", held)
    assert form(None, tree) == form(None, tree)
    with ta.default_registry.copy().use():  # which remembers nothing of it
        again = form(None, tree)
    assert form(None, tree) == again


def test_linen_modules_that_were_made_apart_are_the_same_if_their_fields_are():
    one, same, other = (nn.Dense(width).apply for width in (2, 2, 3))
    assert form("leaf", one) == form("leaf", same)
    assert form("leaf", one) != form("leaf", other)


def test_numbers_are_the_same_bit_for_bit():
    assert form("leaf", complex(math.nan, 0.0)) == form("leaf", complex(math.nan, 0.0))
    assert form("leaf", 0j) != form("leaf", -0j)
    zeros = [Settings(np.zeros(1)) for _ in range(2)]
    assert form("registered", zeros[0]) == form("registered", zeros[1])
    zeros[1].scale = -zeros[1].scale
    assert form("registered", zeros[0]) != form("registered", zeros[1])


class Dense(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(nn.Dense(self.width)(x))


def train_state():
    with jax.numpy_rank_promotion("allow"):
        variables = Dense(2).init(jax.random.key(0), jnp.ones((1, 2)))
    return TrainState.create(
        apply_fn=Dense(2).apply, params=variables["params"], tx=optax.adamw(1e-3)
    )


def nnx_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(
        nnx.Linear(2, 4, rngs=rngs, kernel_init=closure()),
        nnx.BatchNorm(4, rngs=rngs),
        nnx.relu,
        nnx.Dropout(0.5, rngs=rngs),
        nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=False),
    )


def eqx_model():
    keys = jax.random.split(jax.random.key(0), 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 2, 3, key=keys[0]),
            eqx.nn.Lambda(functools.partial(jax.nn.gelu, approximate=False)),
            eqx.nn.MLP(2, 2, 4, 2, activation=jax.nn.silu, key=keys[1]),
            eqx.nn.MultiheadAttention(2, 4, key=keys[2]),
        ]
    )


@pytest.mark.slow
@pytest.mark.hazard("H5")
@pytest.mark.filterwarnings("ignore::treeadapt.RandomStateWarning")
@pytest.mark.parametrize("make", [train_state, nnx_model, eqx_model, mlp])
def test_a_model_of_a_library_traces_once(make):
    run, traces = tracer()
    tree = make()
    for _ in range(3):
        run(tree)
        params, rest = ta.split(tree)
        tree = ta.merge(jax.tree.map(lambda x: x + 1, params), rest)
    assert len(traces) == 1


def test_a_result_holds_no_settings_that_have_changed():
    settings = {"scale": 1}
    run = jax.jit(lambda params, rest: (params, rest))
    run(*ta.split(Struct(jnp.ones(2), settings)))
    settings["scale"] = 2
    result = ta.merge(*run(*ta.split(Struct(jnp.ones(2), {"scale": 1}))))
    assert result.static == {"scale": 1}


def test_a_change_between_split_and_merge_is_not_found_for_others():
    settings = {"scale": 1}
    tree = Struct(jnp.ones(2), settings)
    run = jax.jit(lambda params, rest: ta.merge(params, rest).static["scale"])
    params, rest = ta.split(tree)
    settings["scale"] = 2
    run(params, rest)
    settings["scale"] = 1
    assert run(*ta.split(tree)) == 1
    assert run(*ta.split(Struct(jnp.ones(2), {"scale": 1}))) == 1
