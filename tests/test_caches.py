"""Caches: none gives a stale answer, grows without bound, or keeps a tree alive.

Plans by structure, what a registry says of a type, matchers by patterns, and answers
remembered with a plan only ever save work.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import weakref
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import treeadapt as ta
from treeadapt.patterns import characters, glob, matcher
from treeadapt.patterns.glob import parse
from treeadapt.patterns.matcher import matcher_of
from treeadapt.selection.whole_tree import whole_tree
from treeadapt.trees import arrays, views
from treeadapt.trees.metadata import Snapshot, node_data, same_static

pytestmark = pytest.mark.usefixtures("small_heap")


@jtu.register_dataclass
@dataclasses.dataclass
class Registered:
    x: Any
    m: Any = dataclasses.field(metadata={"static": True})


@jtu.register_dataclass
@dataclasses.dataclass
class ByHand:
    """One that treeadapt rebuilds itself."""

    x: Any
    m: Any = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        pass


@flax.struct.dataclass
class Struct:
    x: Any
    m: Any = flax.struct.field(pytree_node=False)


class Module(eqx.Module):
    x: Any
    m: Any = eqx.field(static=True)


HOLDERS = {cls.__name__: cls for cls in (Registered, ByHand, Struct, Module)}
holders = pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)

CONVERSIONS = {
    "state dict": lambda tree: ta.from_state_dict(tree, ta.to_state_dict(tree)),
    "flat dict": lambda tree: ta.from_flat_dict(tree, ta.to_flat_dict(tree)),
    "split and merge": lambda tree: ta.merge(*ta.split(tree)),
    "map_where": lambda tree: ta.map_where(lambda leaf: leaf, tree, "**"),
    "merge inside jit": lambda tree: jax.jit(ta.merge)(*ta.split(tree)),
}
conversions = pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)

# Equal to Python, and so to JAX, in groups of which each member is another value.
EQUAL = [
    (1, True, 1.0),
    (0.0, -0.0, 0),
    ((1, "a"), (True, "a"), (1.0, "a")),
    (2, 2 + 0j),
]


def exactly(value):
    return type(value), repr(value)


# Nothing stale


@pytest.mark.hazard("A9b", "H3")
@holders
@conversions
@pytest.mark.parametrize("group", EQUAL, ids=repr)
def test_equal_statics_of_other_types_come_back_as_they_were(holder, convert, group):
    for value in (*group, *reversed(group)):
        again = convert(holder(jnp.ones(1), value))
        assert exactly(again.m) == exactly(value)


@pytest.mark.slow
@pytest.mark.hazard("H3")
@holders
def test_each_exact_value_of_a_static_field_is_traced_once(holder):
    traced = []

    @jax.jit
    def step(params, rest):
        traced.append(rest)
        return ta.merge(params, rest).x

    values = list(itertools.chain(*EQUAL))
    for value in values * 2:
        step(*ta.split(holder(jnp.ones(1), value)))
    assert len(traced) == len({exactly(value) for value in values})


@dataclasses.dataclass
class Config:
    k: Any


CHANGES = {
    "a dict": (lambda k: {"k": k}, lambda m, k: m.update(k=k), lambda m: m["k"]),
    "a list": (lambda k: [k], lambda m, k: m.__setitem__(0, k), lambda m: m[0]),
    "a set": (
        lambda k: {k},
        lambda m, k: (m.clear(), m.add(k)),
        lambda m: next(iter(m)),
    ),
    "a dataclass": (Config, lambda m, k: setattr(m, "k", k), lambda m: m.k),
    "a list in a tuple": (
        lambda k: ("a", [k]),
        lambda m, k: m[1].__setitem__(0, k),
        lambda m: m[1][0],
    ),
    "a list in a dict": (
        lambda k: {"k": [k]},
        lambda m, k: m["k"].append(m["k"].pop() * 0 + k),
        lambda m: m["k"][0],
    ),
}


@pytest.mark.hazard("H6b", "K20")
@holders
@pytest.mark.parametrize(("make", "change", "read"), CHANGES.values(), ids=CHANGES)
def test_a_static_that_changed_in_place_is_compiled_anew(holder, make, change, read):
    @jax.jit
    def step(params, rest):
        model = ta.merge(params, rest)
        return model.x * read(model.m)

    def result(static):
        return float(step(*ta.split(holder(jnp.float32(2), static))))

    static = make(1.0)
    before = ta.split(holder(jnp.float32(2), static))
    assert result(static) == 2
    change(static, 10.0)
    assert (result(static), result(make(10.0)), result(make(1.0))) == (20, 20, 2)
    assert float(step(*before)) == 2  # as it was when it was split
    change(static, 3.0)
    assert (result(static), result(make(1.0)), result(static)) == (6, 2, 6)


@pytest.mark.hazard("H6b")
@holders
def test_a_list_in_a_static_field_costs_no_second_trace_while_it_stays(holder):
    traced = []

    @jax.jit
    def step(params, rest):
        traced.append(rest)
        return ta.merge(params, rest).x

    for static in ([1, {"a": (2, {3})}], [1, {"a": (2, {3})}]):
        step(*ta.split(holder(jnp.ones(1), static)))
        step(*ta.split(holder(jnp.ones(1), static)))
    assert len(traced) == 1


def test_metadata_compares_by_type():
    one, two = (jax.tree.structure(Registered(0, m)) for m in (1, True))
    assert one == two
    assert not same_static(one, two)
    assert Snapshot(node_data(one)) != Snapshot(node_data(two))


@pytest.mark.hazard("H2")
def test_an_aux_that_equals_everything_comes_back_as_it_was():
    for convert in CONVERSIONS.values():
        for value in (1, 2):
            again = convert((AlwaysEqual(value), {"w": jnp.ones(1)}))
            assert again[0].value == value


@jtu.register_static
class AlwaysEqual:
    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return True


class One:
    def __init__(self, w):
        self.w = w


class Two(One): ...


for _cls in (One, Two):
    jtu.register_dataclass(_cls, ["w"], [])


def test_classes_that_only_a_hash_tells_apart_have_plans_of_their_own():
    one, two = ({"x": cls(jnp.ones(1)), "y": jnp.ones(1)} for cls in (One, Two))
    assert jax.tree.structure(one) == jax.tree.structure(two)  # JAX sees no class
    for _ in range(2):
        assert jax.tree.leaves(ta.param_mask(two, [Two])) == [True, False]
        with pytest.raises(ta.UnusedRuleError, match="Two"):
            ta.param_mask(one, [Two])


def test_static_treedefs_of_classes_that_only_a_hash_tells_apart_are_others():
    one, two = (jax.tree.structure(cls(0)) for cls in (One, Two))
    assert one == two
    assert not same_static(one, two)
    assert not same_static([one], [two])
    assert same_static(one, jax.tree.structure(One(1)))


@pytest.mark.hazard("E3")
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static:UserWarning")
@holders
def test_static_arrays_are_never_found_by_equality(holder):
    for fill in (1.0, 2.0, 1.0):
        tree = holder(jnp.ones(1), np.full(2, fill))
        for name, convert in CONVERSIONS.items():
            if "jit" not in name:  # which no static array leaves
                assert convert(tree).m is tree.m


def test_names_that_depend_on_a_list_are_read_anew():
    names = ["a", "b"]
    node = Keyed(names, [1.0, 2.0])
    assert ta.tree_paths(node) == ("a", "b")
    names[0] = "z"
    assert ta.tree_paths(node) == ("z", "b")
    assert ta.tree_paths(Keyed(["a", "b"], [1.0, 2.0])) == ("a", "b")
    assert ta.param_mask(node, "z").values == [True, False]


class Keyed:
    def __init__(self, names, values):
        self.names, self.values = names, values


jtu.register_pytree_with_keys(
    Keyed,
    lambda node: (
        [(jtu.DictKey(k), v) for k, v in zip(node.names, node.values, strict=True)],
        node.names,
    ),
    lambda names, values: Keyed(names, list(values)),
)


def test_keys_that_are_equal_keep_their_type():
    for keys in ((1, True, 1.0, np.int64(1)), ("a", np.str_("a"))):
        for key in (*keys, *reversed(keys)):
            tree = {key: jnp.ones(1)}
            for name, convert in CONVERSIONS.items():
                found = next(iter(convert(tree)))
                assert exactly(found) == exactly(key), name


@pytest.mark.slow
@pytest.mark.hazard("H1", "H18", "H19")
def test_structures_of_one_hash_are_told_apart_and_the_latest_is_found_first(
    monkeypatch,
):
    trees = [Registered({"x": jnp.ones(1)}, i) for i in range(200)]
    trees += [{f"k{i}": jnp.ones(1)} for i in range(200)]
    assert len({hash(jax.tree.structure(tree)) for tree in trees}) == 2
    with ta.AdapterRegistry().use() as registry:
        for _ in range(2):
            for i, tree in enumerate(trees):
                path = f"k{i - 200}" if i >= 200 else "x/x"
                assert ta.tree_paths(tree) == (path,)
                assert len(kept(registry)) <= views._MAX_PLANS
        compared = []
        equal = views._equal
        monkeypatch.setattr(
            views, "_equal", lambda one, two: compared.append(one) or equal(one, two)
        )
        ta.tree_paths(trees[-1])
        assert len(compared) <= 2


# Bounded


def test_plans_are_bounded_in_number_and_in_leaves(monkeypatch):
    monkeypatch.setattr(views, "_MAX_PLANS", 10)
    monkeypatch.setattr(views, "_MAX_PLANNED_LEAVES", 500)
    with ta.AdapterRegistry().use() as registry:
        for i in range(100):
            ta.tree_paths({f"k{i}": [1.0] * (i % 9)})
            assert len(kept(registry)) <= 10
        for i in range(20):
            ta.tree_paths({f"k{i}": [1.0] * 200})
            assert sum(map(len, kept(registry))) <= 500


def kept(registry):
    cache = registry.memo["plans"][0]
    return [plan for bucket in cache._buckets.values() for _, plan in bucket]


@pytest.mark.slow
def test_what_is_remembered_with_a_plan_is_bounded():
    with ta.AdapterRegistry().use() as registry:
        for i in range(200):
            ta.Rules({"a": i, f"b{i}": 1}, unused="ignore")({"a": jnp.ones(1)})
            ta.param_mask({"a": jnp.ones(1)}, ["a", f"!b{i}"], unused="ignore")
            assert all(len(plan.memo) <= 32 for plan in kept(registry))


@pytest.mark.parametrize(
    "function",
    [
        arrays.is_inexact_dtype,
        matcher.matcher_of,
        glob.parse,
        arrays.narrow_bits,
    ],
    ids=lambda function: function.__name__,
)
def test_every_cached_function_has_a_bound(function):
    assert function.cache_info().maxsize <= 4_096


def test_a_matcher_forgets_before_it_grows_large(monkeypatch):
    monkeypatch.setattr(characters, "MAX_TRANSITIONS", 100)
    one = matcher_of((parse("**/a[0-9]*"),))
    for i in range(50):
        assert one.match_path(f"b{i}/c/a{i}") == 1
        assert one.match_path(f"x{i}/c{i}/b{i}") == 0
        assert one._automata[0]._transitions <= 100 + 10


# Nothing kept alive


def dropped(make):
    """Make 40 objects, use each and drop it; return how many live on."""
    left = []
    for i in range(40):
        left.append(weakref.ref(make(i)))
    gc.collect()
    return sum(ref() is not None for ref in left)


def use(tree, *wheres):
    """Put a tree through every cache that there is."""
    ta.from_state_dict(tree, ta.to_state_dict(tree))
    ta.merge(*ta.split(tree, arrays="all"))
    for where in ("**", *wheres):
        ta.param_mask(tree, where, unused="ignore")
        ta.Rules([(where, "a"), ("**", "b")], unused="ignore")(tree)
    with whole_tree(tree):
        ta.glob("**")(ta.to_flat_dict(tree))


def test_no_array_is_kept_alive():
    def make(i):
        array = np.full(2, i, np.float32)
        use({"w": [array, Open(array.copy())], "m": Module(array.copy(), "s")})
        return array

    assert dropped(make) == 0


@dataclasses.dataclass
class Open:
    w: Any


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static:UserWarning")
def test_no_array_is_kept_alive_by_a_label_a_predicate_or_an_unhashable_static():
    def make(i):
        array = np.full(2, i, np.float32)
        use({"w": np.ones(2)}, ta.leaf(lambda leaf: array.ndim == leaf.ndim))
        ta.param_labels({"w": np.ones(2)}, {"**": Label(array)})
        for holder in HOLDERS.values():
            ta.to_flat_dict(holder(np.ones(2), [array]))
            ta.to_flat_dict(holder(np.ones(2), array))
        return array

    assert dropped(make) == 0


class Label:
    def __init__(self, array):
        self.array = array


@pytest.mark.slow
def test_no_class_is_kept_alive_that_jax_lets_go():
    def opened(i):
        cls = dataclasses.make_dataclass("D", ["w"])
        use({"a": cls(np.ones(1))}, cls, ta.node(cls))
        return cls

    def refused(i):
        cls = type("Sub", (dict,), {})
        with pytest.raises(ta.AdapterError, match="holds arrays"):
            use({"a": cls(w=np.ones(1))}, cls)
        return cls

    def entered(i):
        cls = type("Net", (), {})
        with ta.default_registry.copy().use():
            ta.register(cls, fields=("w",))
            node = cls()
            node.w = np.ones(1)
            use([node], cls)
        return cls

    def asked(i):
        cls = type("Absent", (), {})
        use({"a": np.ones(1)}, ta.node(cls), ~ta.node(cls))
        return cls

    for make in (opened, refused, entered, asked):
        assert dropped(make) == 0, make.__name__


def test_namedtuples_are_let_go_with_the_plans_of_their_structures():
    # A treedef holds the class, and a plan is found by treedef.
    with ta.AdapterRegistry().use() as registry:

        def make(i):
            cls = collections.namedtuple("N", "w b")
            use(cls(np.ones(1), np.ones(1)), cls)
            return cls

        alive = dropped(make)
        assert alive <= len(kept(registry)) <= 256
        registry.forget()
        assert dropped(lambda i: type("Other", (), {})) == 0


@pytest.mark.slow
def test_classes_of_leaves_that_look_like_arrays_do_not_pile_up():
    refs = []
    for _ in range(600):
        cls = type("Array", (), {"shape": (2,), "dtype": np.dtype("int8")})
        ta.to_flat_dict({"a": cls()})
        refs.append(weakref.ref(cls))
        del cls
    gc.collect()
    assert sum(ref() is not None for ref in refs) <= 256


def test_a_registry_is_let_go_with_all_that_it_remembers():
    def make(i):
        registry = ta.default_registry.copy()
        with registry.use():
            use({f"k{i}": [np.ones(1)]})
        return registry

    assert dropped(make) == 0


def test_bound_selectors_and_rules_keep_no_array():
    bound = []

    def make(i):
        array = np.full(2, i, np.float32)
        tree = {"a": array, "b": np.ones(2)}
        bound.append(ta.glob("a").bind(tree))
        bound.append(ta.Rules({"a": 1, "**": 2}).bind(tree))
        bound.append(ta.FreezeSpec(["a"]).bind(tree))
        return array

    assert dropped(make) == 0
    assert len(bound) == 120
