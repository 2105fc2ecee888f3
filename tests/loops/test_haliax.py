"""Optimizers that look for haliax's modules, as Levanter's Muon does, in a group."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import treeadapt as ta

haliax = pytest.importorskip("haliax", reason="haliax is NOT INSTALLED")


class Net(eqx.Module):
    up: haliax.nn.Linear
    down: haliax.nn.Linear


def net() -> Net:
    wide, narrow = haliax.Axis("wide", 4), haliax.Axis("narrow", 3)
    one, two = jax.random.split(jax.random.key(0))
    return Net(
        haliax.nn.Linear.init(wide, narrow, key=one),
        haliax.nn.Linear.init(narrow, wide, key=two),
    )


def is_linear(node: Any) -> bool:
    return isinstance(node, haliax.nn.Linear)


def orthogonal() -> optax.GradientTransformation:
    """Orthogonalise each weight that is there, and leave other arrays alone."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def each(node: Any) -> Any:
            if not is_linear(node) or node.weight is None:
                return node
            assert node.bias is None, "the bias is in another group"
            u, _, v = jnp.linalg.svd(node.weight.array, full_matrices=False)
            weight = haliax.named(u @ v, node.weight.axes)
            return eqx.tree_at(lambda layer: layer.weight, node, weight)

        return jax.tree.map(each, updates, is_leaf=is_linear), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


@pytest.mark.parametrize("rules", [{"**/weight": "modules", "**": "others"}])
def test_a_transformation_that_looks_for_modules_of_haliax(rules):
    table = {"modules": orthogonal(), "others": optax.sgd(0.5)}
    model = net()
    grads = jax.tree.map(lambda x: 3 * x, eqx.filter(model, eqx.is_array))
    tx = ta.partition(table, rules, as_tree=True)
    updates, _ = eqx.filter_jit(tx.update)(grads, tx.init(model), model)
    for name in ("up", "down"):
        grad, made = getattr(grads, name), getattr(updates, name)
        u, _, v = jnp.linalg.svd(grad.weight.array, full_matrices=False)
        assert made.weight.axes == grad.weight.axes
        assert jnp.allclose(made.weight.array, u @ v, atol=1e-6)
        assert jnp.allclose(made.bias.array, -0.5 * grad.bias.array)


def test_one_module_of_several_is_shown_as_tree():
    model = net()
    grads = jax.tree.map(lambda x: 3 * x, eqx.filter(model, eqx.is_array))
    table = {"modules": orthogonal(), "others": optax.set_to_zero()}
    tx = ta.partition(table, {"up/weight": "modules", "**": "others"}, as_tree=True)
    updates, _ = tx.update(grads, tx.init(model), model)
    u, _, v = jnp.linalg.svd(grads.up.weight.array, full_matrices=False)
    assert jnp.allclose(updates.up.weight.array, u @ v, atol=1e-6)
    assert not updates.down.weight.array.any()
