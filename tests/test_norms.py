"""Norms by label and by path: against NumPy, of layers, on meshes, what is refused."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scanned import TWINS
from sizes import some
from trees import TREES

import treeadapt as ta

INF = float("inf")
ORDERS = (1, 2, INF)
ARRAYS = (jax.Array, np.ndarray, np.generic)
EMPTY: list[np.ndarray] = [np.zeros(0)]

GRADS = {
    "net": {"w": jnp.array([[3.0, -4.0]]), "b": jnp.array([1.0, 2.0])},
    "head": jnp.array([2.0 + 1j, -1j]),
    "half": jnp.full(1000, 300.0, "bfloat16"),
    "count": jnp.array(7),
    "key": jax.random.key(0),
    "act": jnp.tanh,
    "masked": optax.MaskedNode(),
    "none": None,
    "empty": jnp.ones((0, 3)),
}
RULES = {"net/b": "frozen", "net": "net", "**": "others"}


def expected(arrays, order):
    numbers = [np.abs(np.asarray(array).astype("complex128")) for array in arrays]
    joined = np.concatenate([*map(np.ravel, numbers), *EMPTY])
    return np.linalg.norm(joined, order) if joined.size else 0.0


def counted(tree):
    return {
        path: leaf
        for path, leaf in ta.to_flat_dict(tree).items()
        if isinstance(leaf, ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }


def close(norms, wanted):
    assert norms.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(norms[name], wanted[name], rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("order", ORDERS)
def test_norms_by_path_are_numpys_of_inexact_leaves(order):
    norms = ta.tree_norms(GRADS, ord=order)
    assert {"count", "key", "act"}.isdisjoint(norms)
    leaves = {"half": GRADS["half"], "empty": GRADS["empty"], "head": GRADS["head"]}
    leaves |= {"net/b": GRADS["net"]["b"], "net/w": GRADS["net"]["w"]}
    wanted = {path: expected([leaves[path]], order) for path in norms}
    assert wanted.keys() == leaves.keys()
    close(norms, wanted)
    assert {norm.dtype for norm in norms.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize("order", ORDERS)
def test_norms_by_label_are_those_of_their_leaves_together_in_the_order_of_rules(order):
    norms = ta.tree_norms(GRADS, RULES, ord=order)
    assert list(norms) == ["frozen", "net", "others"]
    others = [GRADS["head"], GRADS["half"], GRADS["empty"]]
    close(
        norms,
        {
            "frozen": expected([GRADS["net"]["b"]], order),
            "net": expected([GRADS["net"]["w"]], order),
            "others": expected(others, order),
        },
    )
    bound = ta.Rules(RULES).bind(GRADS)
    assert ta.tree_norms(GRADS, bound, ord=order) == norms
    compiled = jax.jit(lambda grads: ta.tree_norms(grads, RULES, ord=order))
    arrays = {**GRADS, "act": None}
    close(compiled(arrays), {name: float(norm) for name, norm in norms.items()})


@pytest.mark.filterwarnings("ignore::treeadapt.TreeAdaptWarning")
@pytest.mark.parametrize("row", some(TREES), ids=lambda row: row.name)
def test_every_kind_of_tree_has_its_norms(row):
    tree = row.make()
    if row.name == "abstract":
        with pytest.raises(TypeError):
            ta.tree_norms(tree)
        return
    leaves = counted(tree)
    norms = ta.tree_norms(tree)
    assert norms.keys() == leaves.keys()
    close(norms, {path: expected([leaves[path]], 2) for path in norms})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("twin", "order"),
    list(itertools.product(TWINS, ORDERS)),
    ids=lambda value: getattr(value, "name", None),
)
def test_layers_of_an_array_count_for_their_own_labels(twin, order):
    table = {twin.at("{0..1}"): "low", twin.at("{-1}"): "last", "**": "rest"}
    rules = ta.Rules(table, stacks=twin.stacks)
    norms = ta.tree_norms(twin.scanned(), rules, ord=order)
    assert list(norms)[:2] == ["low", "last"]
    close(norms, ta.tree_norms(twin.unrolled(), rules, ord=order))


def test_a_part_of_a_tree_has_the_norms_of_its_leaves():
    rules = ta.Rules({"head": "frozen", "**": "net"})
    assert list(ta.tree_norms({"net": jnp.ones(2), "head": None}, rules)) == ["net"]
    part = {"net": jnp.ones(2), "head": optax.MaskedNode()}
    assert list(ta.tree_norms(part, rules)) == ["net"]
    assert ta.tree_norms({}) == {}


@pytest.mark.slow
def test_wide_and_narrow_numbers_are_added_in_float64():
    with jax.enable_x64(True):
        grads = {"a": jnp.full(3, 1e-12), "b": jnp.ones(1, "float32")}
        norms = ta.tree_norms(grads, {"**": "all"}, ord=1)
        assert norms["all"].dtype == "float64"
        assert norms["all"] == 1 + 3e-12
        assert ta.tree_norms(grads)["b"].dtype == "float32"


def test_the_largest_number_shows_which_leaves_are_not_finite():
    grads = {"a": jnp.array([1.0, jnp.nan]), "b": jnp.full(2, 3e38), "c": jnp.ones(2)}
    sizes = ta.tree_norms(grads, ord=INF)
    assert [path for path in sizes if not jnp.isfinite(sizes[path])] == ["a"]


@pytest.mark.parametrize(
    ("rules", "order", "error", "match"),
    [
        ({"**": 1.0}, 2, ta.RulesError, "label 1.0 is not a string.*'empty' has it"),
        ({"**": None}, 2, ta.RulesError, "label None is not a string"),
        (None, 3, ta.SelectorError, "ord is 3"),
        (None, "fro", ta.SelectorError, "ord is 'fro'"),
        ({"ned": "a", "**": "b"}, 2, ta.UnusedRuleError, "did you mean 'net'"),
        ({"net": "a"}, 2, ta.UnmatchedPathError, "'empty', 'half', 'head'"),
    ],
)
def test_what_is_refused(rules, order, error, match):
    with pytest.raises(error, match=match):
        ta.tree_norms(GRADS, rules, ord=order)


@pytest.mark.slow
def test_sharded_layers_are_summed_where_they_are():
    mesh = jax.make_mesh((8,), ("data",))
    grads = {"blocks": jnp.arange(16 * 8 * 32.0).reshape(16, 8, 32), "b": jnp.ones(64)}
    rules = ta.Rules({"blocks/{0..4}": "low", "**": "high"}, stacks={"blocks": 0})
    wanted = ta.tree_norms(grads, rules)
    for spec in (PartitionSpec("data"), PartitionSpec(None, "data")):
        sharding = NamedSharding(mesh, spec)
        whole = NamedSharding(mesh, PartitionSpec("data"))
        placed = jax.device_put(grads, {"blocks": sharding, "b": whole})
        norms = jax.jit(lambda grads: ta.tree_norms(grads, rules))
        close(norms(placed), {name: float(norm) for name, norm in wanted.items()})
        text = norms.lower(placed).compile().as_text()
        # Sums of the 16 layers may be gathered; the array, of 4,096 numbers, never is.
        gathers = [line for line in text.splitlines() if " all-gather(" in line]
        assert not [line for line in gathers if "= f32[16,1,1]" not in line]
