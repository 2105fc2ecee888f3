"""Optax's own tests of ``partition``, run on ours.

The tests ship with Optax; none is copied here. Ours replaces theirs wherever Optax
itself uses it, so ``selective_transform`` is tested with it too. Trees of labels are
wrapped in a function: ours takes a tree only through ``lift``.
"""

from __future__ import annotations

import types

import jax.numpy as jnp
import optax
import pytest

import treeadapt as ta

reason = "this Optax comes without its tests"
combining_test = pytest.importorskip("optax.transforms._combining_test", reason=reason)
combine_test = pytest.importorskip("optax._src.combine_test", reason=reason)
freezing_test = pytest.importorskip("optax.transforms._freezing_test", reason=reason)

pytestmark = pytest.mark.usefixtures("standard_promotion", "ours_for_theirs")

#: One of the tests trains integers, which do not train here.
FLOATS = types.SimpleNamespace(
    **{name: getattr(jnp, name) for name in ("asarray", "ones", "zeros")},
    array=lambda values: jnp.array(values, float),
)


def ours(transforms, param_labels):
    labels = param_labels if callable(param_labels) else lambda _: param_labels
    return ta.partition(transforms, labels)


@pytest.fixture
def ours_for_theirs(monkeypatch):
    for module in ("transforms._combining", "_src.combine", "transforms._freezing"):
        monkeypatch.setattr(f"optax.{module}.partition", ours)
    for module in (combining_test, combine_test):
        monkeypatch.setattr(module, "jnp", FLOATS)


class TestPartition(combining_test.PartitionTest):
    """``optax.partition`` by its own name."""


class TestMultiTransform(combine_test.PartitionTest):
    """``optax.multi_transform``."""


class TestSelectiveTransform(freezing_test.SelectiveTransformTest):
    """``optax.selective_transform``, which is a partition."""

    def test_selective_bad_structure(self):
        # Theirs expects the words of JAX's message, which has no path in it.
        tx = optax.selective_transform(optax.sgd(1.0), freeze_mask={"a": True})
        with pytest.raises(ValueError, match="'b'"):
            tx.init(freezing_test.PARAMS_FLAT)


def test_ours_is_what_is_tested():
    tx = optax.selective_transform(optax.adam(1.0), freeze_mask={"a": True, "b": False})
    state = tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})
    assert list(state.inner_states["train"][0].mu) == ["b"]
