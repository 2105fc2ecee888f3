"""The registry: who speaks for a type, in which order, and that copies are apart."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import gc
import itertools
import pickle
import threading
import weakref
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sizes import slow_but

import treeadapt as ta


def w():
    return jnp.ones(2)


@pytest.fixture
def registry():
    """A copy of the default registry, in force."""
    with ta.default_registry.copy().use() as copy:
        yield copy


class Net:
    """A class that JAX does not know."""

    def method(self):
        """Do nothing; a bound method of it holds the instance."""

    def __init__(self, w, b):
        raise TypeError("a conversion calls no constructor")


def net(**attributes):
    made = object.__new__(Net)
    vars(made).update(attributes)
    return made


@jtu.register_pytree_node_class
class Pair:
    """A class that JAX knows, without keys."""

    def __init__(self, one, two):
        self.one, self.two = one, two

    def tree_flatten(self):
        return (self.one, self.two), "aux"

    @classmethod
    def tree_unflatten(cls, aux, children):
        assert aux == "aux"
        return cls(*children)


def adapter(cls, name="mine", **kwargs):
    return ta.Adapter(
        name=name,
        applies=cls,
        flatten=lambda node: ta.Flat([*vars(node)], [*vars(node).values()], type(node)),
        unflatten=lambda aux, children: None,
        **kwargs,
    )


# One line


def test_fields_of_a_class_that_jax_does_not_know(registry):
    ta.register(Net, fields=("w", "b"))
    tree = {"net": net(w=w(), b=w(), name="n")}
    assert ta.tree_paths(tree) == ("net/w", "net/b")
    again = ta.from_flat_dict(tree, {"net/w": 1.0, "net/b": 2.0}, strict=False)
    assert vars(again["net"]) == {"w": 1.0, "b": 2.0, "name": "n"}


def test_fields_of_a_class_that_jax_knows(registry):
    ta.register(Pair, fields=("w", "b"))
    tree = {"pair": Pair(w(), w())}
    assert ta.tree_paths(tree) == ("pair/w", "pair/b")
    again = ta.from_state_dict(tree, ta.to_state_dict(tree))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert again["pair"].one is tree["pair"].one


def test_fields_rename_a_dataclass_that_runs_code(registry):
    ta.register(Doubling, fields=("kernel",))
    tree = Doubling(w())
    assert ta.tree_paths(tree) == ("kernel",)
    again = ta.from_state_dict(tree, {"kernel": tree.w})
    assert again.w is tree.w


@jtu.register_dataclass
@dataclasses.dataclass
class Doubling:
    w: Any

    def __post_init__(self):
        self.w = self.w * 2


def test_a_single_field_may_be_a_string(registry):
    ta.register(Net, fields="w")
    assert ta.tree_paths(net(w=w())) == ("w",)


def test_the_error_for_an_unknown_class_gives_the_line_that_cures_it(registry):
    tree = {"a": net(w=w(), b=w(), name="n")}
    with pytest.raises(ta.AdapterError, match="at 'a'") as raised:
        ta.to_state_dict(tree)
    line = str(raised.value).rpartition(": ")[2]
    assert line == 'treeadapt.register(Net, fields=("w", "b"))'
    exec(line, {"treeadapt": ta, "Net": Net})
    assert ta.tree_paths(tree) == ("a/w", "a/b")


def test_a_warning_for_positions_gives_the_line_that_cures_it(registry):
    with pytest.warns(ta.UnstablePathWarning, match="Pair is registered") as found:
        assert ta.tree_paths(Pair(w(), w())) == ("0", "1")
    line = str(found[0].message).rpartition(": ")[2]
    exec(line, {"treeadapt": ta, "Pair": Pair})
    assert ta.tree_paths(Pair(w(), w())) == ("name0", "name1")


@pytest.mark.hazard("D11")
def test_another_array_beside_the_fields_is_an_error(registry):
    ta.register(Net, fields=("w",))
    with pytest.raises(
        ta.AdapterError, match="in addition to its children, 'b'"
    ) as raised:
        ta.to_state_dict([net(w=w(), b=[w()])])
    assert str(raised.value).endswith('register(Net, fields=("w", "b"))')
    assert "at '0'" in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [
        (Net,),
        (Net, None),
        ("Net", ("w",)),
        (None, ("w",)),
        (Net, ("w", "w")),
        ("Net", None, True),
        (Net, ("w",), True),
        (ta.Adapter(name="a", applies=Net), None, True),
        (Net, (1,)),
        (ta.Adapter(name="a", applies=Net, flatten=lambda n: n), ("w",)),
    ],
)
def test_a_malformed_entry_is_refused(registry, arguments):
    entries = registry.entries
    with pytest.raises(ta.AdapterError):
        ta.register(*arguments[:2], leaf=len(arguments) == 3)
    assert registry.entries == entries


def test_a_container_by_fields_is_refused(registry):
    class Both(dict):
        pass

    with pytest.raises(ta.AdapterError, match="holds items besides attributes"):
        ta.register(Both, fields=("w",))


def test_a_missing_field_is_named_with_its_path(registry):
    ta.register(Net, fields=("w", "b"))
    with pytest.raises(ta.AdapterError, match=r"At 'x/0': A Net .* no attribute 'b'"):
        ta.to_state_dict({"x": [net(w=w())]})


def test_a_wrong_number_of_fields_is_named_with_its_path(registry):
    ta.register(Pair, fields=("w", "b", "c"))
    with pytest.raises(ta.AdapterError, match="At 'x': A Pair has 2 children"):
        ta.to_state_dict({"x": Pair(w(), w())})


def test_a_registered_class_is_opened_whatever_it_holds(registry):
    ta.register(Net, fields=("w",))
    assert ta.tree_paths({"a": net(w=1.0)}) == ("a/w",)
    assert ta.tree_paths({"a": net(w=np.float32(1))}) == ("a/w",)


def test_any_class_that_jax_does_not_know_can_be_a_leaf(registry):
    tree = {"a": net(w=w()), "b": Outer(w())}
    ta.register(Net, leaf=True)
    ta.register(Outer, leaf=True)
    assert ta.to_flat_dict(tree) == tree
    again = ta.merge(*ta.split({**tree, "w": w()}))
    assert again["a"] is tree["a"]
    ta.register(ta.Adapter(name="all", applies=lambda cls: cls is Net, leaf=True))
    assert registry.find(tree["a"]).adapter is None
    ta.register(Net, fields="w")  # the newest entry decides
    assert ta.tree_paths(tree) == ("a/w", "b")


def test_a_class_that_jax_opens_cannot_be_a_leaf(registry):
    ta.register(Pair, leaf=True)
    with pytest.raises(ta.AdapterError, match="Pair is registered as a leaf, but JAX"):
        ta.to_state_dict({"a": Pair(w(), w())})


def test_an_object_that_is_a_leaf_is_not_searched_for_arrays(registry):
    tree = {"a": functools.partial(max, net(w=w()))}
    with pytest.raises(ta.AdapterError, match="leaf at 'a'"):
        ta.to_state_dict(tree)
    ta.register(Net, leaf=True)
    assert ta.tree_paths(tree) == ("a",)


@pytest.mark.parametrize(
    ("hide", "cure"),
    [
        (lambda x: functools.partial(max, x), "jax.tree_util.Partial instead of"),
        (lambda x: functools.partial(max, key=[x]), "jax.tree_util.Partial instead"),
        (lambda x: functools.partial(functools.partial(max, x)), "tree_util.Partial"),
        (lambda x: net(w=x).method, r"Partial\(Net.method, object\)"),
        (lambda x: {"b": x}.get, r"Partial\(dict.get, object\)"),
    ],
)
def test_arrays_behind_a_function_are_reported(hide, cure):
    for tree in ({"a": hide(w())}, {"a": hide(1.0), "b": net(f=hide(w()))}):
        with pytest.raises(ta.AdapterError, match=r"leaf at '[ab]'"):
            ta.to_state_dict(tree)
    with pytest.raises(ta.AdapterError, match=cure):
        ta.to_state_dict({"a": hide(w())})
    for _ in range(2):  # the second time by the plan
        assert ta.tree_paths({"a": hide(1.0)}) == ("a",)
    with pytest.raises(ta.AdapterError, match=cure):
        ta.to_state_dict({"a": hide(w())})


# In full


def test_a_full_adapter_in_both_directions(registry):
    def flatten(node):
        return ta.Flat(["kernel", "scale"], [node.w, node.s], node.name)

    def unflatten(name, children):
        return net(w=children[0], s=children[1], name=name)

    ta.register(ta.Adapter(name="n", applies=Net, flatten=flatten, unflatten=unflatten))
    tree = [net(w=w(), s=jnp.ones(()), name="n")]
    assert ta.tree_paths(tree) == ("0/kernel", "0/scale")
    again = ta.merge(*ta.split(tree))
    assert vars(again[0]) == vars(tree[0])


def test_a_box_adds_no_segment(registry):
    ta.register(
        ta.Adapter(
            name="box",
            applies=Net,
            flatten=lambda node: ta.Flat((ta.BOX,), [node.w], node.name),
            unflatten=lambda name, children: net(w=children[0], name=name),
        )
    )
    tree = {
        "a": net(w=w(), name="n"),
        "b": net(w={"c": net(w=w(), name="m")}, name="o"),
    }
    assert ta.tree_paths(tree) == ("a", "b/c")
    assert set(ta.to_state_dict(tree)["b"]) == {"c"}
    assert ta.merge(*ta.split(tree))["b"].w["c"].name == "m"


@pytest.mark.parametrize(
    "children", [(1.0, 2.0), (1.0, {"x": 2.0}), ({"x": 2.0}, 1.0), ([1.0], [2.0])]
)
def test_a_box_with_several_children_loses_none(registry, children):
    ta.register(
        ta.Adapter(
            name="box",
            applies=Pair,
            flatten=lambda node: ta.Flat((ta.BOX, ta.BOX), [node.one, node.two]),
        )
    )
    for tree in (Pair(*children), {"a": 0.0, "b": Pair(*children)}):
        with pytest.raises(ta.PathCollisionError):
            ta.to_state_dict(tree)
        with pytest.raises(ta.PathCollisionError):
            ta.to_flat_dict(tree)


def test_a_box_with_a_leaf_and_nothing_else(registry):
    ta.register(
        ta.Adapter(
            name="box",
            applies=Pair,
            flatten=lambda node: ta.Flat((ta.BOX, ta.BOX), [node.one, node.two]),
        )
    )
    for empty in (None, {}, []):
        for pair in (Pair(1.0, empty), Pair(empty, 1.0)):
            tree = {"a": 0.0, "b": pair}
            assert ta.to_state_dict(tree) == {"a": 0.0, "b": 1.0}
            again = ta.from_state_dict(tree, {"a": 0.0, "b": 2.0})
            assert 2.0 in vars(again["b"]).values()
    tree = Pair({"x": 1.0}, {"y": 2.0})
    assert ta.to_state_dict(tree) == {"x": 1.0, "y": 2.0}


def test_an_adapter_may_say_that_a_node_does_not_train(registry):
    ta.register(
        ta.Adapter(
            name="frozen",
            applies=Pair,
            flatten=lambda node: ta.Flat(("one", "two"), [node.one, node.two], "aux"),
            trains=lambda node: False,
        )
    )
    params, rest = ta.split({"a": Pair(w(), [w()]), "b": w()})
    assert list(params) == ["b"]
    assert list(rest.arrays) == ["a/one", "a/two/0"]


def test_an_identity_under_two_paths_is_one_leaf(registry):
    ta.register(
        ta.Adapter(
            name="shared",
            applies=Net,
            flatten=lambda node: ta.Flat(("w",), [node.w]),
            unflatten=lambda aux, children: net(w=children[0]),
            shared=True,
        )
    )
    one = net(w=w())
    tree = {"a": one, "b": [one], "c": net(w=w())}
    assert ta.tree_paths(tree) == ("a/w", "c/w")
    again = ta.merge(*ta.split(tree))
    assert again["a"] is again["b"][0]
    assert again["a"] is not again["c"]


def wrong_order(node):
    return ta.Flat(("two", "one"), [node.two, node.one], "aux")


def lost_child(node):
    return ta.Flat(("one",), [node.one], "aux")


def other_children(node):
    return ta.Flat(("one", "two"), [node.one, "other"], "aux")


@pytest.mark.parametrize("flatten", [wrong_order, lost_child, other_children])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_adapter_out_of_the_order_of_jax_is_an_error(registry, flatten, by_hand):
    ta.register(ta.Adapter(name="odd one", applies=Pair, flatten=flatten))
    beside = Doubling(w()) if by_hand else None
    for _ in range(2):
        with pytest.raises(ta.AdapterError, match=r"'odd one'.*JAX's order"):
            ta.to_state_dict([Pair(w(), jnp.zeros(1)), beside])


@pytest.mark.hazard("H13")
@pytest.mark.parametrize(
    "flatten",
    [
        lambda node: ([node.one, node.two], None),
        lambda node: ta.Flat(("one",), [node.one, node.two]),
        lambda node: ta.Flat(("one", "two"), {"one": node.one, "two": node.two}),
        lambda node: ta.Flat((k for k in "ab"), [node.one, node.two]),
        lambda node: {"one": node.one, "two": node.two},
        lambda node: None,
    ],
)
def test_a_flatten_that_returns_nonsense_is_named(registry, flatten):
    def unflatten(aux, children):
        raise AssertionError("never called")

    odd = ta.Adapter(name="odd two", applies=Net, flatten=flatten, unflatten=unflatten)
    ta.register(odd)
    with pytest.raises(ta.AdapterError, match=r"At 'x': .*'odd two' takes a Net apart"):
        ta.to_state_dict({"x": net(one=w(), two=w())})
    ta.register(ta.Adapter(name="odd one", applies=Pair, flatten=flatten))
    with pytest.raises(
        ta.AdapterError, match=r"At 'x': .*'odd one' takes a Pair apart"
    ):
        ta.to_state_dict({"x": Pair(w(), w())})


def test_an_adapter_without_unflatten_is_for_classes_that_jax_knows(registry):
    ta.register(
        ta.Adapter(name="n", applies=object, flatten=lambda node: ta.Flat((), ()))
    )
    leaf = net()
    assert ta.to_flat_dict({"x": leaf, "none": None})["x"] is leaf


# Order


@pytest.mark.hazard("H8")
def test_the_newest_entry_wins(registry):
    ta.register(Pair, fields=("a", "b"))
    ta.register(Pair, fields=("c", "d"))
    assert ta.tree_paths(Pair(w(), w())) == ("c", "d")
    assert [entry.name for entry in registry.entries[:2]] == ["Pair", "Pair"]


class Base:
    pass


class Child(Base):
    pass


class GrandChild(Child):
    pass


def test_an_exact_entry_beats_a_newer_one_for_a_base_class(registry):
    child = ta.register(adapter(Child))
    base = ta.register(adapter(Base))
    assert registry.find(Child()).adapter is child
    assert registry.find(Base()).adapter is base
    assert registry.find(GrandChild()).adapter is base  # the newest that covers it


def test_the_users_entry_beats_the_libraries(registry):
    layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    ta.register(eqx.nn.Linear, fields=("kernel", "offset"))
    assert ta.tree_paths(layer) == ("kernel", "offset")
    ta.register(
        ta.Adapter(
            name="every module",
            applies=eqx.Module,
            flatten=lambda node: ta.Flat(
                [f"_{key.name}" for key, _ in keyed(node)],
                [child for _, child in keyed(node)],
            ),
        )
    )
    assert ta.tree_paths(layer) == ("kernel", "offset")
    assert ta.tree_paths(eqx.nn.LayerNorm(2)) == ("_weight", "_bias")


def keyed(node):
    return list(jtu.default_registry.flatten_one_level_with_keys(node)[0])


def test_the_libraries_beat_the_class_that_jax_knows():
    # A NamedTuple is a tuple, every Equinox module and Flax struct a dataclass.
    names = {
        "NamedTuple": Point(1, 2),
        "tuple": (1, 2),
        "equinox Module": eqx.nn.LayerNorm(2),
        "equinox Shared": SHARED,
        "registered dataclass": Doubling(1.0),
        "registered class": Pair(1, 2),
        "dict": {},
        "None": None,
    }
    for name, node in names.items():
        assert ta.default_registry.find(node).adapter.name == name


class Point(NamedTuple):
    x: Any
    y: Any


SHARED = eqx.nn.Shared(
    (eqx.nn.LayerNorm(2), eqx.nn.LayerNorm(2)),
    where=lambda pair: pair[1].weight,
    get=lambda pair: pair[0].weight,
)


class OneChild(list):
    """A list that JAX knows as one child and metadata."""


class ByValue(dict):
    """A mapping that JAX opens in the order of its values."""


class SecondField(NamedTuple):
    """A NamedTuple with a static field, which JAX was told of by hand."""

    n: Any
    w: Any


class NoField(NamedTuple):
    n: Any


def _by_value(node):
    return sorted(node, key=node.get)


jtu.register_pytree_with_keys(
    OneChild,
    lambda node: (((jtu.GetAttrKey("w"), node[0]),), tuple(node[1:])),
    lambda aux, children: OneChild([*children, *aux]),
)
jtu.register_pytree_with_keys(
    ByValue,
    lambda node: (
        [(jtu.DictKey(key), node[key]) for key in _by_value(node)],
        tuple(_by_value(node)),
    ),
    lambda aux, children: ByValue(zip(aux, children, strict=True)),
)
jtu.register_pytree_with_keys(
    SecondField,
    lambda node: (((jtu.GetAttrKey("w"), node.w),), node.n),
    lambda aux, children: SecondField(aux, *children),
)
jtu.register_static(NoField)


@pytest.mark.parametrize(
    ("node", "paths"),
    [
        (OneChild([1.0, 2.0, 3.0]), ("x/w",)),
        (ByValue(a=2.0, b=1.0), ("x/b", "x/a")),
        (SecondField("n", {"k": 1.0}), ("x/w/k",)),
        (NoField(1), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_that_was_registered_with_jax_is_what_jax_knows(node, paths):
    tree = {"x": node}
    assert ta.tree_paths(tree) == paths
    for again in (
        ta.from_state_dict(tree, ta.to_state_dict(tree)),
        ta.merge(*ta.split(tree)),
    ):
        assert type(again["x"]) is type(node)
        assert again == tree


def test_a_predicate_decides_as_well(registry):
    entry = ta.register(adapter(lambda cls: cls.__name__ == "Net"))
    assert registry.find(net()).adapter is entry


@pytest.fixture
def run(fresh):
    def run(program):
        done = fresh.run(program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(
    "order", slow_but((), ["lazily", "backward after", "forward", "backward"])
)
def test_lazy_loading_does_not_change_the_rank(order, run):
    program = """
        import sys
        import jax, jax.numpy as jnp
        import treeadapt as ta
        {first}
        w = jnp.ones(2)
        ta.tree_paths({{"a": [w, (w, None)]}})
        import attr, equinox as eqx, flax.linen as nn, flax.struct
        from flax import nnx
        {second}
        @flax.struct.dataclass
        class Struct:
            w: jax.Array
        @attr.s
        class Attrs:
            w = attr.ib()
        nodes = [
            Struct(w), Attrs(w), eqx.nn.LayerNorm(2), nn.Partitioned(w, ("x",)),
            nnx.Param(w), nnx.State({{"a": w}}), nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        ]
        for node in nodes:
            name = ta.default_registry.find(node).adapter.name
            print(f"{{type(node).__name__}}:", name, ta.tree_paths({{"x": node}}))
    """
    load = "import treeadapt.trees.adapters.{0} as _{0}"
    libraries = ["attrs", "equinox", "flax", "nnx"]
    forward = "; ".join(load.format(name) for name in libraries)
    backward = "; ".join(load.format(name) for name in reversed(libraries))
    first, second = {
        "lazily": ("", ""),
        "backward after": ("", backward),
        "forward": (forward, ""),
        "backward": (backward, ""),
    }[order]
    assert run(program.format(first=first, second=second)).splitlines() == [
        "Struct: registered class ('x/w',)",
        "Attrs: attrs class ('x/w',)",
        "LayerNorm: equinox Module ('x/weight', 'x/bias')",
        "Partitioned: flax box ('x',)",
        "Param: nnx Variable ('x',)",
        "State: nnx State ('x/a',)",
        "Linear: nnx Module ('x/bias', 'x/kernel')",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "path"),
    [
        ("import attr\n@attr.s\nclass A:\n    w = attr.ib()\ntree = A(w)", "w"),
        (
            "from penzai.core import named_axes\ntree = {'a': named_axes.wrap(w)}",
            "a",
        ),
        ("from flax.core import FrozenDict\ntree = FrozenDict({'a': w})", "a"),
        (
            "from haiku.data_structures import to_immutable_dict as immutable\n"
            "tree = immutable({'a': {'b': w}})",
            "a/b",
        ),
    ],
)
def test_a_part_of_a_library_loads_its_adapters(make, path, run):
    program = f"import jax.numpy as jnp\nw = jnp.ones(2)\n{make}\n"
    program += "import treeadapt as ta\nprint(ta.tree_paths(tree))"
    assert run(program).strip() == str((path,))


# Copies, and what is remembered


def test_a_copy_is_independent():
    copied = ta.default_registry.copy()
    before = ta.default_registry.entries
    copied.register(Net, fields=("w",))
    assert ta.default_registry.entries == before
    other = copied.copy()
    other.register(Net, fields=("w", "b"))
    assert copied.find(net()).adapter is not other.find(net()).adapter
    assert repr(copied).startswith("AdapterRegistry([")


def test_use_holds_within_its_block():
    copied = ta.default_registry.copy()
    copied.register(Pair, fields=("w", "b"))
    tree = Pair(w(), w())
    with copied.use():
        assert ta.tree_paths(tree) == ("w", "b")
        inner = copied.copy()
        inner.register(Pair, fields=("c", "d"))
        with inner.use():
            assert ta.tree_paths(tree) == ("c", "d")
        with pytest.raises(ZeroDivisionError), inner.use():
            _ = 1 / 0
        assert ta.tree_paths(tree) == ("w", "b")
    with pytest.warns(ta.UnstablePathWarning):
        assert ta.tree_paths({"a": tree}) == ("a/0", "a/1")


def test_registering_clears_the_plans(registry):
    tree = Pair(w(), w())
    ta.register(Pair, fields=("w", "b"))
    first = ta.tree_paths(tree)
    ta.register(Pair, fields=("c", "d"))
    assert (first, ta.tree_paths(tree)) == (("w", "b"), ("c", "d"))


def fresh_class(name="Late"):
    return type(name, (), {"__module__": __name__, "__init__": _set_w})


def _set_w(self, w):
    self.w = w


def by_key(node):
    return ((jtu.GetAttrKey("w"), node.w),), None


def register_with_jax(cls):
    jtu.register_pytree_with_keys(
        cls, by_key, lambda _, children: cls(*children), lambda node: ((node.w,), None)
    )


def test_a_class_may_be_registered_with_jax_late(registry):
    Late = fresh_class()
    tree = {"a": Late(w())}
    with pytest.raises(ta.AdapterError):
        ta.to_state_dict(tree)
    register_with_jax(Late)
    assert ta.tree_paths(tree) == ("a/w",)
    assert jax.tree.structure(ta.merge(*ta.split(tree))) == jax.tree.structure(tree)


def test_a_leaf_without_arrays_may_become_a_node_late(registry):
    Late = fresh_class()
    tree = {"a": Late(1.0), "b": w()}
    assert ta.tree_paths(tree) == ("a", "b")
    register_with_jax(Late)
    assert ta.tree_paths(tree) == ("a/w", "b")


def test_an_opened_class_may_be_registered_with_jax_late(registry):
    @dataclasses.dataclass
    class Late:
        w: Any
        n: Any = 1

    tree = {"a": Late(w(), 2.0), "b": [Outer(Late(w(), 3.0))]}
    assert ta.tree_paths(tree) == ("a/w", "a/n", "b/0/inner/w", "b/0/inner/n")
    jtu.register_dataclass(Late, data_fields=["w"], meta_fields=["n"])
    assert ta.tree_paths(tree) == ("a/w", "b/0/inner/w")
    assert ta.merge(*ta.split(tree))["a"].n == 2.0


@dataclasses.dataclass
class Outer:
    inner: Any


def test_an_array_like_class_may_be_registered_with_jax_late(registry):
    class Quantized:
        shape, dtype = (2,), np.dtype("int8")

        def __init__(self, w):
            self.w = w

    tree = {"a": Quantized(w()), "b": Doubling(w())}
    assert ta.tree_paths(tree) == ("a", "b/w")
    register_with_jax(Quantized)
    assert ta.tree_paths(tree) == ("a/w", "b/w")


@pytest.mark.hazard("H9", "H20")
@pytest.mark.usefixtures("small_heap")
def test_the_registry_keeps_no_class_alive(registry):
    dropped = []
    for _ in range(50):
        cls = dataclasses.make_dataclass("D", ["w"])
        ta.to_state_dict({"a": cls(w()), "b": cls(1.0)})
        dropped.append(weakref.ref(cls))
        del cls
    gc.collect()
    assert sum(ref() is not None for ref in dropped) == 0


def test_a_box_is_one_object():
    assert copy.deepcopy(ta.BOX) is ta.BOX
    assert pickle.loads(pickle.dumps(ta.BOX)) is ta.BOX
    assert repr(ta.BOX) == "BOX"


# Threads


def test_threads_convert_and_register(registry):
    """Eight threads: whoever converts sees one whole state of the registry."""
    start = threading.Barrier(8)
    tree = {"a": [Point(w(), {"k": w()})] * 5, "p": Pair(w(), w())}
    ta.register(Pair, fields=("w0", "b0"))

    def convert():
        start.wait()
        with registry.use():
            return [
                tuple(ta.to_flat_dict({"x": tree, f"k{i % 7}": 1.0}))
                for i in range(300)
            ]

    def enter(first):
        start.wait()
        for i in range(first, first + 40):
            registry.register(Pair, fields=(f"w{i}", f"b{i}"))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [pool.submit(convert) for _ in range(6)]
        entered = [pool.submit(enter, first) for first in (1, 200)]
    assert [done.result() for done in entered] == [None, None]
    for paths in itertools.chain(*(done.result() for done in found)):
        one, two = (path[4:] for path in paths if path.startswith("x/p/"))
        assert (one[0], two[0], one[1:]) == ("w", "b", two[1:])
        assert len(paths) == 13


# A model


CLASSES = [type(name, (), {}) for name in "ABC"]
CLASSES += [type(cls.__name__ + "1", (cls,), {}) for cls in CLASSES]


class Model(RuleBasedStateMachine):
    """Registries against lists of entries, searched the slow way."""

    def __init__(self):
        super().__init__()
        self.registries = [(ta.AdapterRegistry(), [])]

    which = st.integers(0, 3)

    @rule(which=which, cls=st.sampled_from(CLASSES))
    def add(self, which, cls):
        registry, entries = self.registries[which % len(self.registries)]
        entries.append((cls, registry.register(cls, fields=("w",))))

    @rule(which=which, names=st.sets(st.sampled_from("ABC1"), min_size=1))
    def add_predicate(self, which, names):
        def applies(cls):
            return bool(set(cls.__name__) & names)

        registry, entries = self.registries[which % len(self.registries)]
        entries.append((applies, registry.register(adapter(applies))))

    @precondition(lambda self: len(self.registries) < 4)
    @rule(which=which)
    def copy(self, which):
        registry, entries = self.registries[which % len(self.registries)]
        self.registries.append((registry.copy(), list(entries)))

    @rule(which=which)
    def forget(self, which):
        self.registries[which % len(self.registries)][0].forget()

    @invariant()
    def finds_what_the_model_says(self):
        for registry, entries in self.registries:
            assert registry.entries == tuple(e for _, e in reversed(entries))
            for cls in CLASSES:
                assert registry.find(cls()).adapter is expected(entries, cls)


def expected(entries, cls):
    newest_first = entries[::-1]
    exact = [entry for applies, entry in newest_first if applies is cls]
    covering = [
        entry
        for applies, entry in newest_first
        if (issubclass(cls, applies) if isinstance(applies, type) else applies(cls))
    ]
    return next(iter([*exact, *covering]), None)


TestModel = pytest.mark.slow(Model.TestCase)
TestModel.settings = settings(max_examples=100, stateful_step_count=20)
