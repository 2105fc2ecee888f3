"""The scanned models and their unrolled twins are one model; what their boxes say.

What Flax writes into boxes is held down here, because stacks are read from it.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from scanned import (
    BY_NAME,
    LAYERS,
    TOKENS,
    TWINS,
    LinenModel,
    NnxModel,
    arrays,
    nnx_boxes,
)
from sizes import full

import treeadapt as ta

every_twin = pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
#: These compute, and Equinox's on a page; the structures of all are compared.
COMPUTED = ("Linen, boxes, axis 1", "nnx, metadata", "dict of experts")


@pytest.mark.slow
@pytest.mark.parametrize("name", full(tuple(BY_NAME)[:-1], COMPUTED))
def test_both_twins_compute_the_same(name, standard_promotion):
    del standard_promotion
    twin = BY_NAME[name]

    def output(forward, model):
        params, rest = ta.split(model)
        return jax.jit(lambda params: forward(ta.merge(params, rest)))(params)

    scanned = output(twin.forward, twin.scanned())
    unrolled = output(twin.forward_unrolled, twin.unrolled())
    np.testing.assert_allclose(scanned, unrolled, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@every_twin
def test_stack_undoes_unroll(twin):
    model = twin.scanned()
    again = twin.stack_tree(twin.unroll_tree(model))
    assert not ta.tree_diff(model, again, values=True)
    assert {*twin.unroll(arrays(model))} == {*arrays(twin.unrolled())}


def names_in_boxes(tree):
    """The names and sizes of the axes below ``blocks``, of the arrays in boxes."""

    def is_box(node):
        return isinstance(node, nn.Partitioned | nnx.Variable)

    def names(box):
        if isinstance(box, nn.Partitioned):
            return box.names, box.value.shape
        if isinstance(box, nnx.Variable):
            return box.get_metadata().get("out_sharding"), box.shape
        return None, getattr(box, "shape", ())

    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_box)
    found = [(jax.tree_util.keystr(path), *names(box)) for path, box in leaves]
    return [row for row in found if "blocks" in row[0]]


@every_twin
def test_boxes_name_the_axis_of_layers_where_a_transform_has_a_name(twin):
    tree = twin.scanned()
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else tree
    boxed = "boxes" in twin.name or "metadata" in twin.name
    for path, names, shape in names_in_boxes(tree):
        assert boxed == (names is not None), path
        if boxed:
            assert names.index("layers") == shape.index(LAYERS), path


@pytest.mark.slow
def test_arrays_without_a_box_have_no_names():
    def kernels(init, names):
        return nn.with_partitioning(init, names) if len(names) == 2 else init

    model = LinenModel(0, kernels, metadata=True)
    tree = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    for path, names, _ in names_in_boxes(tree):
        assert (names is not None) == ("kernel" in path), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: jax.eval_shape(
            LinenModel(-1, nn.with_partitioning, metadata=True).init,
            jax.random.key(0),
            TOKENS,
        ),
        lambda: nnx.state(nnx.eval_shape(lambda: NnxModel(-1, nnx_boxes, nnx.Rngs(0)))),
    ],
    ids=["Linen", "nnx"],
)
def test_flax_names_the_wrong_axis_where_a_scan_counts_from_the_end(make):
    # The name is inserted before the last one, and not behind it.
    for path, names, shape in names_in_boxes(make()):
        assert shape.index(LAYERS) == len(shape) - 1, path
        assert names.index("layers") == len(shape) - 2, path
