"""A warning reports a mask or label function that the flat dict misleads."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from trees import TREES, mlp

import treeadapt as ta

PARAMS = {"block": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}


def by_last_key(tree):
    """The idiom of Flax's examples."""
    flat = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict({keys: keys[-1] != "bias" for keys in flat})


def by_shape(tree):
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, tree)


def in_adamw(mask):
    return optax.adamw(0.1, mask=mask)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "adamw": in_adamw,
    "masked": lambda mask: optax.masked(optax.sgd(0.1), mask),
    "chain": lambda mask: optax.chain(optax.clip(1.0), in_adamw(mask)),
    "named_chain": lambda mask: optax.named_chain(("a", in_adamw(mask))),
    "apply_if_finite": lambda mask: optax.apply_if_finite(in_adamw(mask), 3),
    "MultiSteps": lambda mask: optax.MultiSteps(in_adamw(mask), 2),
    "lars": lambda mask: optax.lars(0.1, weight_decay_mask=mask),
    "multi_transform": lambda labels: optax.multi_transform(
        {True: optax.sgd(0.1), False: optax.sgd(1.0)}, labels
    ),
    "optax.inject_hyperparams": lambda mask: optax.inject_hyperparams(
        optax.adamw, static_args="mask"
    )(0.1, mask=mask),
    "inject_hyperparams": lambda mask: ta.inject_hyperparams(optax.adamw)(
        0.1, mask=mask
    ),
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "adapt": ta.adapt,
    "partition": lambda tx: ta.partition({"a": tx}, {"**": "a"}),
    "freeze": lambda tx: ta.freeze(tx, []),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_function_that_reads_keys_is_reported_wherever_it_is(wrapper):
    tx = ta.adapt(WRAPPERS[wrapper](by_last_key))
    with pytest.warns(ta.UnliftedMaskWarning, match=r"by_last_key .*'block/bias' than"):
        tx.init(PARAMS)


@pytest.mark.parametrize("maker", MAKERS)
def test_every_wrapper_that_passes_the_flat_dict_warns(maker):
    with pytest.warns(ta.UnliftedMaskWarning) as told:
        MAKERS[maker](in_adamw(by_last_key)).init(PARAMS)
    assert [warning.filename for warning in told] == [__file__]
    with pytest.warns(ta.UnliftedMaskWarning):
        jax.eval_shape(MAKERS[maker](in_adamw(by_last_key)).init, PARAMS)


class Masks(NamedTuple):
    block: Any


TREE_OF_MASKS = {"block": {"kernel": True, "bias": False}}
TREES_OF_MASKS = {
    "tree": TREE_OF_MASKS,
    "tree of other classes": Masks({"kernel": True, "bias": False}),
    "prefix": {"block": True},
    "function": lambda _: TREE_OF_MASKS,
    "NumPy": {"block": {"kernel": np.bool_(True), "bias": np.bool_(False)}},
}


@pytest.mark.hazard("F36")
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("masks", TREES_OF_MASKS)
def test_masks_in_the_shape_of_the_model_are_an_error_that_names_lift(
    maker, wrapper, masks
):
    tx = MAKERS[maker](WRAPPERS[wrapper](TREES_OF_MASKS[masks]))
    with pytest.raises(ta.TransformError, match=r"mask=treeadapt\.lift\(mask\)") as got:
        tx.init(PARAMS)
    shown = "the function <lambda>" if masks == "function" else "'block': "
    assert shown in str(got.value) or masks == "tree of other classes"
    lifted = ta.lift(TREES_OF_MASKS[masks])
    MAKERS[maker](WRAPPERS[wrapper](lifted)).init(PARAMS)


def test_other_trees_in_the_shape_of_the_model_are_named_too():
    axes = {"block": {"kernel": optax.contrib.MuonDimensionNumbers(), "bias": None}}
    muon = functools.partial(optax.contrib.muon, 0.1)
    with pytest.raises(ta.TransformError, match=r"treeadapt\.lift"):
        ta.adapt(muon(muon_weight_dimension_numbers=axes)).init(PARAMS)
    frozen = optax.transforms.selective_transform(
        optax.sgd(0.1), freeze_mask=TREE_OF_MASKS
    )
    with pytest.raises(ta.TransformError, match=r"treeadapt\.lift"):
        ta.adapt(frozen).init(PARAMS)


def test_an_error_that_has_nothing_to_do_with_masks_stays_as_it_is():
    def fail(params):
        raise ValueError("of its own")

    for masks in (ta.lift(TREE_OF_MASKS), True, None):
        broken = optax.GradientTransformation(fail, lambda u, s, p=None: (u, s))
        with pytest.raises(ValueError, match=r"^of its own$"):
            ta.adapt(optax.chain(in_adamw(masks), broken)).init(PARAMS)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "mask",
    [by_shape, ta.lift(by_last_key), ta.glob("**/kernel"), ta.leaf(ndim=2)],
    ids=["by shape", "lifted", "glob", "leaf"],
)
def test_functions_that_decide_alike_are_not_reported(wrapper, mask):
    if wrapper == "multi_transform" and not isinstance(mask, Callable):
        pytest.skip("no function")
    state = ta.adapt(WRAPPERS[wrapper](mask)).init(PARAMS)
    assert state is not None


def test_on_a_flat_dict_there_is_nothing_to_report():
    flat, _ = ta.split(PARAMS)
    ta.adapt(in_adamw(by_last_key)).init(flat)


@pytest.mark.slow
def test_a_function_of_paths_says_so_by_lifting():
    def by_path(flat):
        return {path: path.endswith("/kernel") for path in flat}

    with pytest.warns(ta.UnliftedMaskWarning):
        ta.adapt(in_adamw(by_path)).init(PARAMS)
    mask = ta.lift(lambda tree: by_path(ta.to_flat_dict(tree)))
    tx = ta.adapt(optax.add_decayed_weights(0.1, mask))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = tx.update(zeros, tx.init(PARAMS), PARAMS)
    assert jax.tree.map(lambda u: bool(jnp.any(u != 0)), updates) == {
        "block": {"bias": False, "kernel": True}
    }


def test_the_norms_do_not_silently_decay():
    model = (mlp(), eqx.nn.LayerNorm(2))

    def mask(tree):
        def is_norm(node):
            return isinstance(node, eqx.nn.LayerNorm)

        return jax.tree.map(lambda node: not is_norm(node), tree, is_leaf=is_norm)

    with pytest.warns(ta.UnliftedMaskWarning, match=r"'1/weight', '1/bias'"):
        ta.adapt(in_adamw(mask)).init(model)


@pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)
def test_shapes_are_the_same_on_every_tree(row):
    if row.opaque or row.name == "no leaf":
        pytest.skip("Optax cannot")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnstablePathWarning)
        ta.adapt(in_adamw(by_shape)).init(row.make())


def test_an_error_of_such_a_function_has_a_note():
    class Agent(NamedTuple):
        policy: Any
        value: Any

    params = Agent(jnp.ones(2), jnp.ones(2))
    mask = lambda tree: Agent(tree.policy.ndim > 1, False)  # noqa: E731
    with pytest.raises(AttributeError) as caught:
        ta.adapt(in_adamw(mask)).init(params)
    assert "treeadapt.lift" in caught.value.__notes__[0]
    assert ta.adapt(in_adamw(ta.lift(mask))).init(params)


def test_unassigned_cells_and_cycles_are_skipped():
    ring: list[Any] = []

    def init(params, held=ring):
        return later if params is held else optax.EmptyState()

    ring += [init, ring]
    if ring is None:
        later = None
    tx = optax.GradientTransformation(init, optax.identity().update)
    assert ta.adapt(tx).init({"a": [jnp.ones(2)]}) == optax.EmptyState()


def test_a_mapping_that_reads_its_items_is_left_alone():
    class Lazy(Mapping):
        def __getitem__(self, key):
            raise OSError("read")

        def __iter__(self):
            raise OSError("read")

        def __len__(self):
            raise OSError("read")

    lazy = Lazy()

    def init(params):
        assert lazy is not None
        return {"count": jnp.zeros(())}

    tx = optax.GradientTransformation(init, lambda grads, state, params=None: state)
    assert ta.adapt(tx).init(PARAMS)["count"] == 0


# Functions with other names


def dimensions(cls):
    """Dimension numbers only for matrices, by the last key."""

    def by_key(tree):
        flat = traverse_util.flatten_dict(tree)
        found = {
            keys: cls(0, 1) if keys[-1] == "kernel" else None
            for keys, leaf in flat.items()
        }
        return traverse_util.unflatten_dict(found)

    return by_key


def doubled(updates, params=None):
    del params
    block = updates.get("block", {})
    return updates | {"block": jax.tree.map(lambda u: u * 2, block)}


READERS = {
    "galore": lambda: optax.contrib.galore(
        0.1,
        rank=1,
        weight_dimension_numbers=dimensions(optax.contrib.GaLoreDimensionNumbers),
    ),
    "muon": lambda: optax.contrib.muon(
        0.1,
        muon_weight_dimension_numbers=dimensions(optax.contrib.MuonDimensionNumbers),
    ),
    "scale_by_muon": lambda: optax.contrib.scale_by_muon(
        weight_dimension_numbers=dimensions(optax.contrib.MuonDimensionNumbers)
    ),
    "stateless": lambda: optax.stateless(doubled),
    "partial": lambda: optax.stateless(functools.partial(doubled, params=None)),
    "chain": lambda: optax.chain(optax.identity(), optax.stateless(doubled)),
}


@pytest.mark.hazard("F34")
@pytest.mark.parametrize("reader", READERS)
def test_a_function_is_found_whatever_it_is_called(reader):
    tx = ta.adapt(READERS[reader]())
    with pytest.warns(ta.UnliftedMaskWarning, match="keys or classes") as told:
        tx.init(PARAMS)
    assert {warning.filename for warning in told} == {__file__}


def test_a_function_that_looks_for_classes_is_found_too():
    def halved(tree, _):
        def is_norm(node):
            return isinstance(node, eqx.nn.LayerNorm)

        def half(node):
            return jax.tree.map(lambda u: u / 2, node) if is_norm(node) else node

        return jax.tree.map(half, tree, is_leaf=is_norm)

    model = (mlp(), eqx.nn.LayerNorm(2))
    with pytest.warns(ta.UnliftedMaskWarning, match="halved .*as_tree=True"):
        ta.adapt(optax.stateless(halved)).init(model)


BY_SHAPE = {
    "stateless": lambda: optax.stateless(lambda u, p: jax.tree.map(jnp.negative, u)),
    "norm": lambda: optax.snapshot("norm", optax.tree.norm),
    "own norm": lambda: optax.snapshot("norm", lambda u: optax.tree.norm(u)),
    "sum": lambda: optax.snapshot(
        "sum", lambda u: sum(jnp.sum(x) for x in jax.tree.leaves(u))
    ),
    "ravel": lambda: optax.snapshot(
        "all", lambda u: jnp.concatenate([x.ravel() for x in jax.tree.leaves(u)])
    ),
    "skip": lambda: optax.MultiSteps(
        optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "schedule": lambda: optax.adamw(lambda count: 0.1 / (count + 1), mask=by_shape),
    "constant": lambda: optax.sgd(lambda count: 0.1),
    "galore": lambda: optax.contrib.galore(
        0.1,
        rank=1,
        weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda x: optax.contrib.GaLoreDimensionNumbers() if x.ndim == 2 else None,
            tree,
        ),
    ),
    "factory": lambda: optax.inject_hyperparams(lambda rate: optax.sgd(rate))(0.1),
    "own transformation": lambda: optax.chain(
        optax.GradientTransformation(lambda p: len(p), lambda u, s, p=None: (u, s))
    ),
}


@pytest.mark.parametrize("name", BY_SHAPE)
def test_a_difference_only_in_leaf_order_is_not_reported(name):
    class Reversed(NamedTuple):
        z: Any
        b: Any
        a: Any

    model = Reversed(jnp.ones((2, 2)), {"n": jnp.arange(3), "x": jnp.ones(3)}, None)
    params = Reversed(*model[:2], jnp.ones(2, jnp.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with jax.numpy_dtype_promotion("standard"):
            ta.adapt(BY_SHAPE[name]()).init(params)
            ta.adapt(BY_SHAPE[name]()).init(model)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("adapter", MAKERS)
def test_lift_takes_functions_whose_values_are_named_tuples(adapter):
    params = {"block": {"bias": jnp.ones(2), "kernel": jnp.eye(3)[:2], "odd": None}}

    def muon(fn):
        return optax.contrib.muon(0.1, muon_weight_dimension_numbers=fn)

    fn = dimensions(optax.contrib.MuonDimensionNumbers)
    tx = MAKERS[adapter](muon(ta.lift(fn)))
    state = tx.init(params)
    ours, _ = tx.update(params, state, params)
    flat, _ = ta.split(params)
    by_path = {
        "block/bias": None,
        "block/kernel": optax.contrib.MuonDimensionNumbers(0, 1),
    }
    for given in (lambda _: by_path, ta.lift(by_path)):
        native = muon(given)
        want, _ = native.update(flat, native.init(flat), flat)
        for path, leaf in want.items():
            assert (ours["block"][path[6:]] == leaf).all()


def test_an_error_of_a_function_at_an_update_has_a_note():
    def doubles(updates, params):
        return {"block": updates["block"]}

    tx = ta.adapt(optax.stateless(doubles))
    state = tx.init(PARAMS)
    with pytest.raises(KeyError) as caught:
        tx.update(PARAMS, state, PARAMS)
    assert "doubles is shown the flat dict" in caught.value.__notes__[0]
