"""Path segments: keys that are equal read alike, and no text depends on chance."""

from __future__ import annotations

import dataclasses
import enum
import fractions
from collections import OrderedDict
from decimal import Decimal

import jax
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeadapt as ta


class Word(enum.StrEnum):
    KERNEL = "kernel"


class Place(enum.IntEnum):
    ONE = 1


class Plain(enum.Enum):
    A = 1


class Text(str):
    def __str__(self):
        return "never asked"


@jtu.register_pytree_with_keys_class
class Keyed:
    """A node with one leaf at any key; no two share what is remembered of a tree."""

    def __init__(self, key):
        self.key = key

    def tree_flatten_with_keys(self):
        return ((self.key, 1.0),), object()

    @classmethod
    def tree_unflatten(cls, _, leaves):
        raise NotImplementedError


def segment(key):
    """The path of a leaf that has one key."""
    if type(key).__module__ != jtu.DictKey.__module__:
        try:
            key = jtu.DictKey(key)
        except TypeError:
            pytest.skip("the keys of this JAX do not hold None")
    (path,) = ta.tree_paths(Keyed(key))
    return path


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("kernel", "kernel"),
        ("", ""),
        ("a/b", "a/b"),
        ("w[0]*{x}", "w[0]*{x}"),
        (Word.KERNEL, "kernel"),
        (np.str_("w"), "w"),
        (Text("w"), "w"),
        (3, "3"),
        (-1, "-1"),
        (10**30, "1" + "0" * 30),
        (True, "1"),
        (np.True_, "1"),
        (Place.ONE, "1"),
        (np.int64(1), "1"),
        (np.uint8(200), "200"),
        (1.0, "1"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (np.float64(0.5), "0.5"),
        (1e300, str(int(1e300))),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (Decimal("0.5"), "0.5"),
        (fractions.Fraction(1, 2), "0.5"),
        (1 + 0j, "1"),
        (np.complex128(0.5), "0.5"),
        (("a", 1), "(a,1)"),
        (("a", (True, 0.5)), "(a,(1,0.5))"),
        ((), "()"),
        (jtu.DictKey("a"), "a"),
        (jtu.DictKey(1.0), "1"),
        (jtu.GetAttrKey("w"), "w"),
        (jtu.SequenceKey(2), "2"),
    ],
    ids=repr,
)
@pytest.mark.hazard("A18")
def test_text_of_a_key(key, text):
    assert segment(key) == text
    assert type(segment(key)) is str or isinstance(key, str)


def test_a_position_in_the_path_of_a_filter_is_its_number():
    at_3 = (jtu.FlattenedIndexKey(3),)
    assert ta.glob("3")(at_3, np.ones(1))
    assert not ta.glob("0")(at_3, np.ones(1))


@pytest.mark.parametrize(
    "key",
    [
        frozenset({"a", "b"}),
        object(),
        None,
        b"bytes",
        Plain.A,
        int,
        1 + 2j,
        np.complex64(1),
        Decimal("0.1"),
        fractions.Fraction(1, 3),
        ("a", frozenset()),
        10**5_000,
    ],
    ids=lambda key: type(key).__name__,
)
def test_a_key_without_stable_text_is_refused(key):
    with pytest.raises(ta.PathError, match=r"no stable text.*register"):
        segment(key)


def test_single_precision_keys_are_refused():
    # NumPy holds np.float32(0.1) equal to 0.1 and to its double neighbour, which are
    # not equal to each other: no text could be the same for all three.
    assert np.float32(0.1) == 0.1
    assert np.float32(0.1) == float(np.float32(0.1)) != 0.1
    with pytest.raises(ta.PathError):
        segment(np.float32(0.1))


def test_the_error_names_the_node():
    with pytest.raises(ta.PathError, match=r"In the node at 'x/y': .* type Plain"):
        ta.to_state_dict({"x": {"y": {Plain.A: 1.0}}})


numbers = st.one_of(
    st.integers(-3, 3),
    st.booleans(),
    st.floats(-2, 2),
    st.floats(allow_nan=False),
    st.sampled_from([np.int64(1), np.int32(2), np.float64(0.5), np.True_, Place.ONE]),
    st.fractions(-2, 2, max_denominator=4),
)


@pytest.mark.slow
@given(numbers, numbers)
def test_equal_keys_have_equal_text(one, two):
    try:
        texts = segment(one), segment(two)
    except ta.PathError:
        return
    assert (texts[0] == texts[1]) == (one == two)


@pytest.mark.slow
@given(st.lists(st.tuples(numbers, numbers), max_size=3))
def test_equal_pairs_have_equal_text(pairs):
    same = [tuple(pair) for pair in pairs]
    for one in same:
        for two in same:
            if one == two:
                try:
                    assert segment(one) == segment(two)
                except ta.PathError:
                    return


@pytest.mark.hazard("A1")
def test_keys_of_mixed_types_are_named():
    for tree in ({"x": {1: 1.0, "a": 2.0}}, {"x": [{("a",): 1.0, "a": 2.0}]}):
        with pytest.raises(ta.PathError, match=r"The dict at 'x.*cannot sort.*str"):
            ta.to_state_dict(tree)


@pytest.mark.hazard("A2")
def test_integer_and_text_of_it_in_one_dict():
    with pytest.raises(ta.PathError, match="int, str"):
        ta.to_flat_dict({0: 1.0, "0": 2.0})
    with pytest.raises(ta.PathCollisionError, match=r"name '0': \[0\] and \['0'\]"):
        ta.to_state_dict(OrderedDict({0: 1.0, "0": 2.0}))


@pytest.mark.hazard("A3")
def test_one_path_for_index_and_text():
    assert ta.tree_paths([5.0]) == ta.tree_paths({"0": 5.0}) == ta.tree_paths({0: 5.0})


@pytest.mark.hazard("A4")
def test_separator_in_a_key():
    tree = {"a/b": 1.0, "a": {"b": 2.0}}
    with pytest.raises(ta.PathCollisionError) as raised:
        ta.to_flat_dict(tree)
    assert "['a']['b']" in str(raised.value)
    assert "['a/b']" in str(raised.value)
    assert ta.from_state_dict(tree, ta.to_state_dict(tree)) == tree


@pytest.mark.hazard("A5")
def test_glob_characters_are_plain_text():
    tree = {"w[0]": {"a*b": 1.0}}
    assert ta.tree_paths(tree) == ("w[0]/a*b",)
    assert ta.glob(ta.escape("w[0]/a*b")).matches("w[0]/a*b")


@pytest.mark.hazard("A6", "A21")
def test_empty_keys_and_the_bare_leaf():
    assert ta.tree_paths({"": 1.0, "a": {"": 2.0}}) == ("", "a/")
    assert ta.tree_paths({"": {"": 1.0}}) == ("/",)
    assert ta.tree_paths(5.0) == ("",)
    for tree in (5.0, {"": 5.0}, {"": {"": 5.0, "a": 6.0}}):
        assert ta.from_flat_dict(tree, ta.to_flat_dict(tree)) == tree
        assert ta.from_state_dict(tree, ta.to_state_dict(tree)) == tree


@pytest.mark.hazard("A7")
def test_tuple_keys():
    tree = {("a", "b"): 1.0, ("a",): {"b": 2.0}}
    assert ta.tree_paths(tree) == ("(a)/b", "(a,b)")
    assert ta.from_state_dict(tree, ta.to_state_dict(tree)) == tree


@pytest.mark.hazard("A8")
def test_the_key_objects_come_back():
    tree = {Word.KERNEL: 1.0}
    again = ta.from_flat_dict(tree, {"kernel": 2.0})
    assert [type(key) for key in again] == [Word]


@pytest.mark.hazard("A9", "A9b")
def test_equal_keys_of_other_types_one_after_the_other():
    for key in (1, True, 1.0, np.int64(1)):
        tree = {key: 1.0}
        assert ta.tree_paths(tree) == ("1",)
        (again,) = ta.from_state_dict(tree, {"1": 2.0})
        assert type(again) is type(key)


@pytest.mark.hazard("A10")
def test_look_alikes_stay_apart():
    tree = {"\u00e9": 1.0, "e\u0301": 2.0}
    assert len(ta.to_flat_dict(tree)) == 2


@pytest.mark.hazard("A11")
def test_order_is_that_of_jax():
    tree = {f"l{i}": i for i in (1, 2, 10)}
    assert ta.tree_paths(tree) == ("l1", "l10", "l2")
    assert list(ta.to_flat_dict(tree).values()) == jax.tree.leaves(tree)


@pytest.mark.hazard("A16")
def test_quotes_in_keys():
    tree = {"a']['b": 1.0, "a": {"b": 2.0}}
    assert ta.tree_paths(tree) == ("a/b", "a']['b")


@pytest.mark.hazard("A18")
def test_text_is_free_of_repr():
    tree = {np.int64(1): {np.str_("w"): 1.0}}
    assert ta.tree_paths(tree) == ("1/w",)


@pytest.mark.hazard("A22")
def test_keys_of_one_hash_stay_apart():
    assert hash(-1) == hash(-2)
    assert ta.tree_paths({-1: 1.0}) == ("-1",)
    assert ta.tree_paths({-2: 1.0}) == ("-2",)


@jtu.register_dataclass
@dataclasses.dataclass
class Noted:
    w: float
    note: object = dataclasses.field(metadata={"static": True})


@pytest.mark.hazard("A22")
def test_static_values_that_are_equal_come_back_each_as_it_was():
    for note in (-1, -2, 1, True, 1.0, 0.0, -0.0):
        tree = [Noted(1.0, note)]
        for (again,) in (
            ta.from_flat_dict(tree, ta.to_flat_dict(tree)),
            ta.from_state_dict(tree, ta.to_state_dict(tree)),
            ta.merge(*ta.split(tree, [])),
        ):
            assert repr(again.note) == repr(note)
