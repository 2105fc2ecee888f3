"""``check_adapter``: it passes what is right, and names the law that is broken."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from trees import TREES

import treeadapt as ta
from treeadapt.testing import check_adapter


@pytest.mark.parametrize(
    "row", [row for row in TREES if row.paths not in ((), ("",))], ids=lambda r: r.name
)
def test_every_adapter_of_the_library_passes(row):
    check_adapter(row.make())


class Pair:
    """A class that JAX does not know."""

    def __init__(self, a, b):
        self.a, self.b = a, b


@jtu.register_pytree_node_class
class Known(Pair):
    """A class that JAX knows."""

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def flatten(node):
    return ta.Flat(("a", "b"), [node.a, node.b])


def unflatten(_, children):
    return Pair(*children)


def with_an_array(node):
    return ta.Flat(("a",), [node.a], [node.b])


def of_another_class(_, children):
    return Known(*children)


def swapped(_, children):
    return Pair(*reversed(children))


def looking(_, children):
    return Pair(children[0] + 0, children[1])


def copying(node):
    return ta.Flat(("a", "b"), [jnp.array(node.a), node.b])


numbers = itertools.count()


def of_new_names(node):
    return ta.Flat((f"a{next(numbers)}", "b"), [node.a, node.b])


def of_new_aux(node):
    return ta.Flat(("a", "b"), [node.a, node.b], next(numbers))


def looking_at_tracers(_, children):
    if hasattr(children[0], "dtype"):
        float(children[0][0])
    return Pair(*children)


def adding(_, children):
    if isinstance(children[0], jax.core.Tracer):
        children = [children[0] + 1, children[1]]
    return Pair(*children)


@pytest.mark.parametrize(
    ("law", "flatten", "unflatten"),
    [
        ("order", of_new_names, unflatten),
        ("aux", with_an_array, lambda aux, children: Pair(*children, *aux)),
        ("unflatten", flatten, of_another_class),
        ("unflatten", flatten, swapped),
        ("unflatten", flatten, looking),
        ("unflatten", copying, unflatten),
        ("eval_shape", flatten, looking_at_tracers),
        ("jit", flatten, adding),
        ("jit", of_new_aux, unflatten),
        ("pickling", flatten, lambda aux, children: Pair(*children)),
    ],
)
def test_the_law_that_an_adapter_breaks_is_named(law, flatten, unflatten):
    broken = ta.Adapter(name="pair", applies=Pair, flatten=flatten, unflatten=unflatten)
    tree = {"x": [Pair(jnp.ones(2), jnp.zeros(3))]}
    with ta.default_registry.copy().use() as registry:
        registry.register(broken)
        with pytest.raises(ta.AdapterError, match=f"Law '{law}' does not hold"):
            check_adapter(tree)


def test_a_broken_adapter_is_named_with_its_path():
    with ta.default_registry.copy().use() as registry:
        registry.register(
            ta.Adapter(name="p", applies=Pair, flatten=flatten, unflatten=swapped)
        )
        with pytest.raises(ta.AdapterError, match="the Pair at 'x/0': the child 'a'"):
            check_adapter({"x": [Pair(jnp.ones(2), jnp.zeros(3))]})


def test_an_adapter_that_disagrees_with_jax_is_named():
    with ta.default_registry.copy().use() as registry:
        registry.register(
            ta.Adapter(
                name="known",
                applies=Known,
                flatten=lambda node: ta.Flat(("b", "a"), [node.b, node.a]),
            )
        )
        with pytest.raises(ta.AdapterError, match="Law 'agreement with JAX'"):
            check_adapter([Known(jnp.ones(2), jnp.zeros(3))])


def test_a_class_without_an_adapter_is_named():
    with pytest.raises(ta.AdapterError, match="No adapter opens a Pair"):
        check_adapter(Pair(1.0, 2.0))


def test_an_adapter_by_fields_passes():
    with ta.default_registry.copy().use():
        ta.register(Pair, fields=("a", "b"))
        check_adapter({"x": [Pair(jnp.ones(2), Pair(jnp.ones(2), 1.0))]})


@pytest.mark.slow
def test_importing_the_package_does_not_import_the_test_kit(fresh):
    program = "import sys, treeadapt; print('treeadapt.testing' in sys.modules)"
    assert fresh.run(program).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("unflatten", "what"),
    [
        (lambda aux, children: None, "unflatten gives a NoneType"),
        (lambda children: None, "unflatten.aux, children. fails .* TypeError"),
    ],
)
def test_what_unflatten_does_wrong_is_said(unflatten, what):
    broken = ta.Adapter(name="p", applies=Pair, flatten=flatten, unflatten=unflatten)
    with ta.default_registry.copy().use() as registry:
        registry.register(broken)
        with pytest.raises(ta.AdapterError, match=what):
            check_adapter({"x": Pair(jnp.ones(2), jnp.zeros(3))})


def test_an_adapter_applies_to_a_class_or_a_test_and_not_to_a_name():
    named = ta.Adapter(name="p", applies="Pair", flatten=flatten, unflatten=unflatten)
    registry = ta.default_registry.copy()
    with pytest.raises(ta.AdapterError, match="Expected a class"):
        registry.register(named)
