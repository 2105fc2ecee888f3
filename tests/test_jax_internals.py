"""What ``trees/_jax.py`` takes from JAX without a promise, as it is relied on.

If one of these fails with a new release of JAX, fix that file first: everything else
that fails follows from it.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import pytest
from several import free_port
from trees import TREES, Keyless, RegisteredLayer

from treeadapt.trees import _jax


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)
def test_flatten_is_that_of_jax_tree(row):
    tree = row.make()
    leaves, treedef = _jax.flatten(tree)
    wanted, structure = jax.tree.flatten(tree)
    assert treedef == structure
    assert all(
        a is b or type(a) is type(b) for a, b in zip(leaves, wanted, strict=True)
    )


def test_flatten_stops_where_the_caller_says():
    tree = [1, (2, {"a": 3})]
    leaves, _ = _jax.flatten(tree, lambda node: isinstance(node, dict))
    assert leaves == [1, 2, {"a": 3}]


@pytest.mark.parametrize(
    ("node", "children", "metadata"),
    [
        ({"b": 1, "a": 2}, [2, 1], ["a", "b"]),
        (collections.OrderedDict(b=1, a=2), [1, 2], ("b", "a")),
        (collections.defaultdict(list, b=1, a=2), [2, 1], (list, ("a", "b"))),
        ([1, [2]], [1, [2]], None),
        ((1, 2), [1, 2], None),
        (None, [], None),
        (Point(1, (2,)), [1, (2,)], Point),
        (Keyless(1, 2), [1, 2], None),
        (RegisteredLayer(1, 2), [1, 2], (2.0,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_level_gives_children_and_metadata(node, children, metadata):
    found, data = _jax.one_level(node)
    assert [*found] == children
    assert data == metadata or [*data] == [*metadata]


@pytest.mark.parametrize("leaf", [1.0, "a", object(), max, {1}, dataclasses.Field])
def test_one_level_gives_none_for_a_leaf(leaf):
    assert _jax.one_level(leaf) is None


def test_one_level_with_keys_gives_the_keys_of_a_registration():
    pairs, _ = _jax.one_level_with_keys(RegisteredLayer(1, 2))
    assert [*pairs] == [(jtu.GetAttrKey("w"), 1), (jtu.GetAttrKey("b"), 2)]
    pairs, _ = _jax.one_level_with_keys(Keyless(1, 2))
    assert [key for key, _ in pairs] == [*map(jtu.FlattenedIndexKey, range(2))]


def test_walk_meets_each_node_with_its_metadata_children_first():
    seen = []
    treedef = jax.tree.structure({"a": [1, Point(2, None)], "b": RegisteredLayer(1, 2)})
    _jax.walk(treedef, lambda children, data: seen.append(data))
    assert seen[0] is None  # of None
    assert seen[1] is Point
    assert seen[-1] == ["a", "b"]
    assert (2.0,) in seen
    assert len(seen) == 5


def test_treedefs_compare_metadata_with_equals_and_hash_without_it():
    one, two = jax.tree.structure({1: 0}), jax.tree.structure({True: 0})
    assert one == two
    other = jax.tree.structure({"a": 0})
    assert hash(one) == hash(two) == hash(other)
    assert one != other


def test_what_is_too_deep_or_cannot_be_sorted_raises():
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    try:
        with pytest.raises((SystemError, RecursionError)):
            _jax.flatten(deep)
    finally:
        while deep:  # Python overflows its stack when it frees such a list at once
            deep = deep.pop()
    with pytest.raises(ValueError, match="Comparator raised"):
        _jax.flatten({1: 0, "a": 0})


TALK = """
import sys
import jax
from treeadapt.trees import _jax

assert _jax.coordination_client() is None
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 1, 0)
client = _jax.coordination_client()
client.wait_at_barrier("here", 9_000)
client.key_value_set("a/1/x", "one")
client.key_value_set("a/1/x", "two", allow_overwrite=True)
client.key_value_set_bytes("a/1/y/z", b"")
client.key_value_set("a/10", "ten")
assert client.blocking_key_value_get_bytes("a/1/y/z", 9_000) == b""
assert sorted(client.key_value_dir_get("a/1")) == [("a/1/x", "two"), ("a/1/y/z", "")]
assert client.key_value_dir_get("b") == []
client.key_value_delete("a/1")
assert client.key_value_dir_get("a") == [("a/10", "ten")]
try:
    client.blocking_key_value_get_bytes("b", 1)
except jax.errors.JaxRuntimeError:
    jax.distributed.shutdown()
"""


def test_processes_talk_through_the_client_of_the_coordination_service(fresh):
    done = fresh.run(TALK, free_port())
    assert done.returncode == 0, done.stderr


WITHOUT_PRIVATE_MODULE = """
import sys
import jax._src
del jax._src.distributed  # as in a JAX that has moved it
sys.modules["jax._src.distributed"] = None
import treeadapt as ta
for name in ta.__all__:
    getattr(ta, name)
assert ta.tree_paths({"a": 1}) == ("a",)
"""


@pytest.mark.slow
def test_an_import_needs_no_private_module_of_jax(fresh):
    done = fresh.run(WITHOUT_PRIVATE_MODULE)
    assert done.returncode == 0, done.stderr
