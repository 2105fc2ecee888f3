"""The page on PyTorch's groups runs, and its file means the same step in Optax."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_pages import REPOSITORY, run_page

import treeadapt as ta

torch = pytest.importorskip("torch")
PAGE = "docs/recipes/pytorch.md"


def arrays_of(named):
    """Return arrays of JAX by path, zeros where there is no tensor."""
    return {
        name.replace(".", "/"): jnp.asarray(
            np.zeros(leaf.shape, "float32") if tensor is None else tensor.numpy().copy()
        )
        for name, leaf, tensor in named
    }


def test_one_rules_file_groups_both_and_the_step_is_the_same(monkeypatch):
    page = run_page(PAGE, (REPOSITORY / PAGE).read_text("utf-8"), monkeypatch)
    model, named = page.model, dict(page.model.named_parameters())
    tree = page.tree_of(named.items())
    params = arrays_of((name, leaf, leaf.detach()) for name, leaf in named.items())
    model(torch.ones(3, 4)).square().sum().backward()
    grads = arrays_of((name, leaf, leaf.grad) for name, leaf in named.items())
    page.optimizer.step()
    theirs = arrays_of((name, leaf, leaf.detach()) for name, leaf in named.items())

    optimizers = {
        "decay": optax.adamw(1e-2, weight_decay=0.1),
        "no_decay": optax.adam(1e-2),
    }
    tx = ta.partition(optimizers, page.rules)
    params, grads = (ta.from_flat_dict(tree, flat) for flat in (params, grads))
    updates, _ = tx.update(grads, tx.init(params), params)
    before = ta.to_flat_dict(params)
    after = ta.to_flat_dict(ta.apply_updates(params, updates))
    assert after.keys() == theirs.keys()
    for path in after:
        np.testing.assert_allclose(after[path], theirs[path], atol=1e-6)
    frozen = {path for path in after if path.startswith(("blocks/0", "blocks/1"))}
    assert {path for path in after if (before[path] == theirs[path]).all()} == frozen
    still = {name for name, leaf in named.items() if not leaf.requires_grad}
    assert {name.replace(".", "/") for name in still} == frozen
