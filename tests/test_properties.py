"""The laws over thousands of drawn trees, many of whose paths collide."""

from __future__ import annotations

import collections
import dataclasses
import fractions
import math
import re
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import (
    MAPPINGS,
    Leaf,
    Node,
    Number,
    Word,
    build,
    is_opaque,
    plans,
    reference,
    sibling_clash,
    word_dicts,
)
from trees import assert_same

import treeadapt as ta

# A text alone reads as the name of a file, and is refused as a model.
any_plan = st.one_of(plans, word_dicts).filter(lambda plan: plan != Leaf("text"))


def collisions(tree):
    """Paths that several leaves have, by the slow reference."""
    counts = collections.Counter(path for path, _ in reference(tree))
    return {path for path, count in counts.items() if count > 1}


def clean(plan):
    """A tree of the plan without collisions of any kind; other plans are skipped."""
    tree = build(plan)
    assume(not collisions(tree) and not sibling_clash(tree))
    return tree


@pytest.mark.slow
def test_drawn_trees_do_collide():
    found = []

    @settings(max_examples=300)
    @given(word_dicts)
    def draw(plan):
        found.append(bool(collisions(build(plan))))

    draw()
    assert sum(found) > 30


@given(any_plan)
def test_paths_are_those_of_the_reference(plan):
    tree = clean(plan)
    wanted = list(reference(tree))
    flat = ta.to_flat_dict(tree)
    assert ta.tree_paths(tree) == tuple(path for path, _ in wanted)
    assert list(flat) == [path for path, _ in wanted]
    assert all(flat[path] is leaf for path, leaf in wanted)


@given(any_plan)
def test_two_leaves_never_share_a_path(plan):
    tree = build(plan)
    shared = collisions(tree)
    if not (shared or sibling_clash(tree)):
        assert len(ta.to_flat_dict(tree)) == len(list(reference(tree)))
        return
    for convert in (ta.to_flat_dict, ta.tree_paths, ta.split):
        with pytest.raises(ta.PathCollisionError) as raised:
            convert(tree)
    if not sibling_clash(tree):
        named = re.search(
            r"same path '(.*)': (.*) and (.*)\. Rename", str(raised.value)
        )
        path, one, two = named.groups()
        assert path in shared
        if not is_opaque(plan):
            exact = exact_paths(tree, path)
            assert {one, two} <= exact
            assert one != two


def exact_paths(tree, path):
    """JAX's exact path of each leaf with a label path, by the order of the leaves."""
    keyed = jtu.tree_leaves_with_path(tree)
    names = [name for name, _ in reference(tree)]
    return {
        jtu.keystr(keys)
        for name, (keys, _) in zip(names, keyed, strict=True)
        if name == path
    }


@given(any_plan)
def test_nested_form_keeps_every_leaf_or_raises(plan):
    tree = build(plan)
    if sibling_clash(tree):
        with pytest.raises(ta.PathCollisionError, match="have the same name"):
            ta.to_state_dict(tree)
        return
    state = ta.to_state_dict(tree)
    wanted = collections.Counter(id(leaf) for _, leaf in reference(tree))
    found = jax.tree.leaves(state, is_leaf=lambda x: type(x) is not dict)
    assert collections.Counter(id(leaf) for leaf in found if leaf is not None) == wanted
    assert_same(tree, ta.from_state_dict(tree, state))


@given(any_plan)
def test_law_1_flat_dict_round_trip(plan):
    tree = clean(plan)
    assert_same(tree, ta.from_flat_dict(tree, ta.to_flat_dict(tree)))


@given(any_plan, st.booleans(), st.sampled_from(["inexact", "all"]), st.data())
def test_law_1_merge_undoes_split(plan, nested, arrays, data):
    tree = clean(plan)
    trained = [path for path, leaf in reference(tree) if is_float(leaf)]
    chosen = data.draw(st.sets(st.sampled_from(trained)) if trained else st.just(set()))
    where = [ta.escape(path) for path in sorted(chosen) if path]
    params, rest = ta.split(tree, where, arrays=arrays, nested=nested)
    assert_same(tree, ta.merge(params, rest))
    moved = jax.tree.map(lambda leaf: leaf, (params, rest))
    assert_same(tree, ta.merge(*moved))


def is_float(leaf):
    return isinstance(leaf, np.ndarray) and leaf.dtype == np.float32


@given(any_plan)
def test_order_is_that_of_jax(plan):
    assume(not is_opaque(plan))
    tree = clean(plan)
    flat = ta.to_flat_dict(tree)
    assert all(
        a is b for a, b in zip(flat.values(), jax.tree.leaves(tree), strict=True)
    )


@given(any_plan)
def test_law_3_insertion_order_does_not_matter(plan):
    assert sorted(ta.tree_paths(clean(plan))) == sorted(
        ta.tree_paths(build(plan, backwards=True))
    )


@given(any_plan)
def test_law_3_class_names_do_not_matter(plan):
    assert ta.tree_paths(clean(plan)) == ta.tree_paths(build(plan, variant=1))


@given(any_plan, st.data())
def test_law_3_other_leaves_keep_their_paths(plan, data):
    tree = clean(plan)
    nodes = [node for node in all_nodes(plan) if node.kind in ("dict", "OrderedDict")]
    nodes = [node for node in nodes if all(isinstance(k, str) for k in node.keys)]
    assume(nodes)
    place = data.draw(st.sampled_from(nodes))
    grown = build(with_child(plan, place, "zz", Leaf("float")))
    before, after = set(ta.tree_paths(tree)), set(ta.tree_paths(grown))
    assert before < after
    (new,) = after - before
    assert new.split("/")[-1] == "zz"


def all_nodes(plan):
    if isinstance(plan, Node):
        yield plan
        for child in plan.children:
            yield from all_nodes(child)


def with_child(plan, place, key, child):
    """The plan with one more child at each node that is ``place``; one at least."""
    if isinstance(plan, Leaf):
        return plan
    if plan is place:
        return Node(plan.kind, (*plan.keys, key), (*plan.children, child))
    children = tuple(with_child(inner, place, key, child) for inner in plan.children)
    return Node(plan.kind, plan.keys, children)


@given(any_plan, st.sampled_from(["missing", "extra", "shape", "dtype"]), st.data())
def test_one_damaged_entry_of_a_flat_dict_is_named(plan, damage, data):
    tree = clean(plan)
    flat = ta.to_flat_dict(tree)
    arrays = [path for path, leaf in flat.items() if isinstance(leaf, np.ndarray)]
    assume(arrays or damage == "extra")
    path = "zz" if damage == "extra" else data.draw(st.sampled_from(arrays))
    if damage == "missing":
        del flat[path]
    else:
        flat[path] = damaged(flat.get(path), damage)
    assert_names_only(path, lambda: ta.from_flat_dict(tree, flat))


@pytest.mark.slow
@given(any_plan, st.sampled_from(["missing", "extra", "shape", "dtype"]), st.data())
def test_one_damaged_entry_of_a_state_dict_is_named(plan, damage, data):
    tree = clean(plan)
    state = ta.to_state_dict(tree)
    places = list(dicts_and_keys(state))
    if damage == "extra":
        places = [(node, "zz", path) for node, path in dict_paths(state)]
    assume(places)
    node, key, path = data.draw(st.sampled_from(places))
    if damage == "missing":
        del node[key]
    else:
        node[key] = damaged(node.get(key), damage)
    assert_names_only(path, lambda: ta.from_state_dict(tree, state))


def damaged(leaf, damage):
    if damage == "extra":
        return np.zeros(2, np.float32)
    return np.zeros(7, leaf.dtype) if damage == "shape" else leaf.astype(np.float64)


def dict_paths(state, path=None):
    """Every dict of a state dict, with its path."""
    if type(state) is dict:
        yield state, "zz" if path is None else f"{path}/zz"
        for key, child in state.items():
            yield from dict_paths(child, key if path is None else f"{path}/{key}")


def dicts_and_keys(state, path=None):
    """Every array of a state dict: the dict it stands in, its key there, its path."""
    for key, child in state.items() if type(state) is dict else ():
        below = key if path is None else f"{path}/{key}"
        if isinstance(child, np.ndarray):
            yield state, key, below
        yield from dicts_and_keys(child, below)


def assert_names_only(path, convert):
    with pytest.raises(ta.StructureMismatchError) as raised:
        convert()
    first, line = str(raised.value).splitlines()
    assert first.startswith("1 entry does not fit")
    assert repr(path) in line


SAME_KEYS = (
    (0, 0.0, -0.0, False, np.int64(0), np.float64(0)),
    (1, 1.0, True, np.int64(1), Number.ONE, np.True_),
    (0.5, np.float64(0.5), fractions.Fraction(1, 2)),
    ("a", Word.A, np.str_("a")),
    ("b", Word.B, np.str_("b")),
)
EQUAL = {key: group for group in SAME_KEYS for key in group}


def twin(plan, draw):
    """The plan with keys that are equal to its keys, and of other types."""
    if isinstance(plan, Leaf):
        return plan
    keys = tuple(draw(st.sampled_from(EQUAL.get(key, (key,)))) for key in plan.keys)
    keys = keys if plan.kind in MAPPINGS else plan.keys
    return Node(plan.kind, keys, tuple(twin(child, draw) for child in plan.children))


@pytest.mark.slow
@given(plans, st.data())
def test_equal_structures_have_equal_paths(plan, data):
    tree = clean(plan)
    other = build(twin(plan, data.draw))
    assert jax.tree.structure(tree) == jax.tree.structure(other) or is_opaque(plan)
    assert ta.tree_paths(tree) == ta.tree_paths(other)


patterns = st.sampled_from(
    ["a", "*/b", "**/a", "{0,1}", "**/{a,b}/*", "[!a]", "{0..1}", "(a,b)", "!**/a"]
)
tables = st.lists(
    st.tuples(patterns, st.sampled_from("xyz")),
    max_size=3,
    unique_by=lambda row: row[0],
)


def label(tree, table):
    """The labels of every leaf of a tree that JAX knows."""
    labels = ta.Rules(table, default="rest", unused="ignore")(tree)
    assert jax.tree.structure(labels) == jax.tree.structure(tree)
    return jax.tree.leaves(labels)


@given(plans, tables, st.data())
def test_equal_structures_have_equal_labels(plan, table, data):
    assume(not is_opaque(plan))
    tree, other = clean(plan), build(twin(plan, data.draw))
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    assert label(tree, table) == label(other, table)


@given(plans, tables)
def test_class_names_do_not_change_labels(plan, table):
    assume(not is_opaque(plan))
    assert label(clean(plan), table) == label(build(plan, variant=1), table)


@jtu.register_dataclass
@dataclasses.dataclass(eq=False)
class Static:
    inner: Any
    note: Any = dataclasses.field(metadata={"static": True})


notes = st.sampled_from(
    [1, True, 1.0, 0.0, -0.0, math.nan, "a", (1,), [1], [2], {"k": 1}]
) | st.builds(np.arange, st.integers(1, 3))


@given(plans, notes)
def test_a_warm_cache_says_what_a_cold_one_says(plan, note):
    tree = {"x": Static(clean(plan), note)}
    with ta.default_registry.copy().use():
        cold = ta.tree_paths(tree)
    assert ta.tree_paths(tree) == cold == ta.tree_paths(tree)
    if isinstance(note, list):
        note.append(3)
        assert ta.tree_paths(tree) == cold
    assert_same_leaves(tree, ta.from_flat_dict(tree, ta.to_flat_dict(tree)))
    one, two = (jax.tree.structure(ta.split(tree, [])[1]) for _ in range(2))
    assert one == two or isinstance(note, np.ndarray) or note != note


def assert_same_leaves(tree, again):
    one, two = ta.to_flat_dict(tree), ta.to_flat_dict(again)
    assert one.keys() == two.keys()
    assert all(one[path] is two[path] for path in one)
    assert type(again["x"].note) is type(tree["x"].note)
