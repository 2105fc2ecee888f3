"""Random trees with stacks in them, and random rules: law 12 by Hypothesis.

The reference is ``scanned.Twin``, which unrolls a tree leaf by leaf. The names are few,
so that patterns and paths really meet.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scanned import Axis, Twin, nested
from test_stacks_law import decisions

import treeadapt as ta
from treeadapt.layers.region import Along, Region, read_key

EXAMPLES = settings.default.max_examples

NAMES = ("a", "b", "c_1")
NUMBERS = ("0", "1", "{0..1}", "{-1}", "{-2..}", "{-3..-2}", "[02]", "10", "?")
#: Axes of the stacks around an array, the outermost first.
AXES = ((0, 1, 2), (-1, -2, -3), (0, -1, 1))


@st.composite
def paths(draw):
    """Paths of leaves, none of which is above another."""
    found = draw(
        st.sets(
            st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join),
            min_size=1,
            max_size=6,
        )
    )
    return sorted(
        path for path in found if not any(one.startswith(path + "/") for one in found)
    )


@st.composite
def twins(draw):
    """A tree of shapes with stacks, as a twin."""
    leaves = draw(paths())
    nodes = sorted(
        {path.rsplit("/", n)[0] for path in leaves for n in range(path.count("/") + 1)}
        | {""}
    )
    keys = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
    keys = sorted(keys, key=len)
    places = draw(st.sampled_from(AXES))
    stacks, axes, sizes = {}, [], {}
    for key in keys:
        depth = sum(above(other, key) for other in keys) - 1
        suffix = draw(st.sampled_from(["/{l}", "_{l}", "/{l}/x"])) if key else "/{l}"
        template = (key + suffix).strip("/")
        stacks[key] = (template, places[depth])
        inside = [path for path in leaves if above(key, path) and path not in keys]
        # Not a leaf that has another stack: that one may be the inner stack.
        inside = [p for p in inside if sum(above(k, p) for k in keys) == depth + 1]
        besides = draw(st.lists(st.sampled_from(inside), max_size=1)) if inside else []
        stacks |= dict.fromkeys(besides)
        axes.append(Axis(key, places[depth], template, tuple(besides)))
        sizes[key] = draw(st.sampled_from([1, 2, 3, 11]))
    flat = {}
    for path in leaves:
        shape = draw(st.lists(st.sampled_from([5, 7]), max_size=2))
        for place, axis in enumerate(one for one in axes if one.covers(path)):
            assert place == 0 or axis.axis != axes[0].axis
        own = [axis for axis in axes if axis.covers(path)]
        rank = len(shape) + len(own)
        where = {axis.axis % rank: sizes[axis.key] for axis in own}
        rest = iter(shape)
        whole = tuple(where.get(n) or next(rest) for n in range(rank))
        flat[path] = jax.ShapeDtypeStruct(whole, jnp.float32)
    return Twin("", dict, dict, stacks, tuple(axes), max, max), flat


def above(node, path):
    return not node or path == node or path.startswith(node + "/")


segments = st.sampled_from(
    (*NAMES, *NUMBERS, "*", "**", "x", *(f"{n}_{k}" for n in "ab" for k in NUMBERS))
)
patterns = (
    st.lists(segments, min_size=1, max_size=4)
    .map("/".join)
    .filter(lambda text: "**/**" not in text)
)
selectors = st.one_of(
    patterns,
    st.sampled_from([ta.leaf(ndim=0), ta.leaf(ndim=1), ta.leaf(min_size=7)]),
    st.tuples(patterns, patterns).map(lambda two: [two[0], "!" + two[1]]),
)
tables = st.lists(st.tuples(selectors, st.integers(0, 2)), min_size=1, max_size=4)
options = st.fixed_dictionaries(
    {},
    optional={
        "default": st.integers(0, 2),
        "unused": st.just("ignore"),
        "overlap": st.just("error"),
    },
)


@settings(max_examples=max(EXAMPLES // 2, 25))
@given(twins(), tables, st.booleans(), options)
def test_law_12_random_rules_decide_as_on_the_unrolled_tree(twin, table, closed, given):
    twin, flat = twin
    table = [*table, ("**", 0)] if closed else table
    expected = decisions(ta.Rules(table, **given), nested(twin.unroll_shapes(flat)))
    with_stacks = ta.Rules(table, stacks=twin.stacks, **given)
    assert decisions(with_stacks, nested(flat)) == expected


# Pieces of arrays.


@settings(max_examples=max(EXAMPLES // 4, 25))
@given(st.data())
def test_names_of_layers_can_be_read(data):
    keys = data.draw(
        st.lists(st.sampled_from(["", "a", "a/b", "a/b/c"]), max_size=3, unique=True)
    )
    numbers = st.sets(st.integers(0, 12), min_size=1).map(sorted).map(tuple)
    along = [
        Along(key, data.draw(st.integers(0, 12)), data.draw(numbers))
        for key in sorted(keys, key=len)
    ]
    region = Region("a/b/c", tuple(along))
    assert read_key(region.key) == region


@pytest.mark.slow
@settings(max_examples=max(EXAMPLES // 40, 5))
@given(st.integers(1, 5), st.integers(1, 4), st.permutations([0, 1, 2]), st.data())
def test_any_layers_of_nested_stacks_move_with_their_group(layers, experts, axes, data):
    outer, inner, _ = axes
    sizes = {outer: layers, inner: experts}
    shape = tuple(sizes.get(axis, 2) for axis in range(3))
    rng = np.random.default_rng(layers * 7 + experts)
    grad = jnp.asarray(rng.normal(size=shape), jnp.float32)
    grid = [*itertools.product(range(layers), range(experts))]
    labels = data.draw(
        st.lists(
            st.sampled_from(["a", "b", "frozen"]),
            min_size=len(grid),
            max_size=len(grid),
        )
    )
    if not {"a", "b"} & {*labels}:
        labels[0] = "a"
    table = {
        f"w/{layer}/e/{expert}": label
        for (layer, expert), label in zip(grid, labels, strict=True)
    }
    factors = {"a": 2.0, "b": 3.0, "frozen": 0.0}
    transforms = {
        label: optax.scale(factors[label]) for label in {*labels} - {"frozen"}
    }
    rules = ta.Rules(table, stacks={"w": outer, "w/e": inner})
    tree = {"w": {"e": grad}}
    tx = ta.partition(transforms, rules)
    updates, state = jax.jit(lambda: tx.update(tree, tx.init(tree), tree))()
    del state
    expected = np.zeros(shape, np.float32)
    for (layer, expert), label in zip(grid, labels, strict=True):
        index = [slice(None)] * 3
        index[outer], index[inner] = layer, expert
        expected[tuple(index)] = factors[label] * grad[tuple(index)]
    np.testing.assert_array_equal(updates["w"]["e"], expected)
    by_factor = ta.Rules(
        [(where, factors[label]) for where, label in rules.pairs], stacks=rules.stacks
    )
    scaled = ta.scale_by_rules(by_factor).update(tree, optax.EmptyState(), tree)[0]
    np.testing.assert_array_equal(scaled["w"]["e"], expected)
