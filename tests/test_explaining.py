"""Explanations: code that explains an error, or searches, never replaces it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core import FrozenDict

import treeadapt as ta
from treeadapt import errors
from treeadapt.migrations import run_group
from treeadapt.selection import alternatives, repairs
from treeadapt.transforms import adapt, unlifted_masks
from treeadapt.trees import flatten

NOTE = "treeadapt failed to explain more: ZeroDivisionError in "


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


@pytest.fixture
def guarded(monkeypatch):
    """As for users: nothing is raised in place of an error."""
    monkeypatch.setattr(errors, "RAISES_IN_EXPLANATIONS", False)


class Layer(NamedTuple):
    w: jax.Array


def model(size: int) -> Any:
    return {"enc": Layer(jnp.ones((2, 2))), "head": Layer(jnp.ones((size, size)))}


def wrong_step(rules: Any) -> Exception:
    tx = ta.partition({"train": optax.adam(1e-3)}, rules)
    with pytest.raises(TypeError) as error:
        tx.update(model(3), tx.init(model(2)), model(2))
    return error.value


def test_rules_that_decided_on_several_trees_leave_an_error_as_it_is():
    table = {"enc": "frozen", "**": "train"}
    used = ta.Rules(table)
    for tree in (model(2), {"enc": model(2)["enc"], "x": jnp.ones(2)}):
        ta.summarize(tree, used)
    assert str(wrong_step(used)) == str(wrong_step(ta.Rules(table)))


Phase = enum.Enum("Phase", "A B")
KEYS = {Phase.A: jnp.ones(1), None: 1, "a": 2, int: 3}


def test_a_transformation_may_hold_a_dict_that_jax_cannot_sort():
    rates = dict.fromkeys(KEYS, 0.1)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        raise TypeError(f"{len(rates)} of mine")

    tx = ta.adapt(optax.GradientTransformation(lambda _: (), update))
    with pytest.raises(TypeError, match="4 of mine") as error:
        tx.update(model(2), tx.init(model(2)), model(2))
    assert not hasattr(error.value, "__notes__")


TX = ta.partition({"train": optax.adam(1e-3)}, {"**": "train"})


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (adapt, "stale_error"),
        (adapt, "unlifted_trees"),
        (adapt, "names_of_asked"),
        (flatten, "_problem"),
    ],
)
def test_an_explanation_that_fails_is_a_note(module, function, guarded, monkeypatch):
    state = TX.init(model(2))
    monkeypatch.setattr(module, function, fail)

    def program() -> None:
        if module is flatten:
            ta.tree_paths({"a": {1: 1, "b": 2}})
        TX.update(model(3), state, model(2))

    with pytest.raises((TypeError, ValueError)) as error:
        program()
    assert error.value.__notes__[-1].startswith(NOTE)
    monkeypatch.setattr(errors, "RAISES_IN_EXPLANATIONS", True)
    with pytest.raises(ZeroDivisionError):
        program()


def fail_in_row(leaf: Any) -> Any:
    raise TypeError("of a row")


def test_a_row_of_a_migration_keeps_its_error(guarded, monkeypatch):
    monkeypatch.setattr(run_group, "describe", fail)
    migration = ta.Migration({"a": ("b", fail_in_row)})
    with pytest.raises(TypeError, match="of a row") as error:
        migration({"a": jnp.ones(2)})
    assert error.value.__notes__[-1].startswith(NOTE)


def test_a_search_that_fails_is_a_warning(guarded, monkeypatch):
    tree = {"net": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}
    text = "failed to explain more: ZeroDivisionError in .*Please report it"
    with monkeypatch.context() as patch:
        patch.setattr(repairs, "_advice", fail)
        with (
            pytest.warns(ta.TreeAdaptWarning, match=text),
            pytest.raises(ta.UnusedRuleError, match="kernl"),
        ):
            ta.param_labels(tree, {"**/kernl": 1, "**": 2})
    with monkeypatch.context() as patch:
        patch.setattr(alternatives, "_mistakes", fail)
        with pytest.warns(ta.TreeAdaptWarning, match=text):
            labels = ta.param_labels(tree, {"**/{kernl,kernel}": 1, "**": 2})
        assert labels == {"net": {"kernel": 1, "bias": 2}}
    with monkeypatch.context() as patch:
        patch.setattr(unlifted_masks, "_everything", fail)
        patch.setattr(adapt, "refuse_text_masks", lambda *_: None)
        patch.setattr(adapt, "refuse_labels_as_mask", lambda *_: None)
        with pytest.warns(ta.TreeAdaptWarning, match=text):
            ta.adapt(optax.sgd(0.1)).init(tree)


def test_a_warning_that_is_an_error_passes(guarded):
    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda keys, _: len(keys) > 1, params)

    tx = ta.adapt(optax.adamw(0.1, mask=mask))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ta.UnliftedMaskWarning):
            tx.init({"net": {"kernel": jnp.ones(2)}})


# Searches for arrays in objects


class Config:
    def __init__(self) -> None:
        self.rates = dict.fromkeys(KEYS, 1)


HOLDERS = {
    "object": Config(),
    "partial": functools.partial(print, dict.fromkeys(KEYS, 1)),
    "method": Config().__init__,
    "mapping": types.MappingProxyType({1: {None: 1, "a": 2}}),
    "frozen dict": functools.partial(print, FrozenDict({None: 1, "a": 2})),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_an_object_may_hold_keys_that_jax_cannot_sort(name):
    tree = {"w": jnp.ones(2), "config": HOLDERS[name]}
    assert ta.tree_paths(tree) == ("config", "w")
    params, rest = ta.split(tree)
    assert [*params] == ["w"]
    assert ta.merge(params, rest)["config"] is HOLDERS[name]
    ta.summarize(tree)
    tx = ta.adapt(optax.sgd(0.1))
    updates, _ = tx.update({"w": jnp.ones(2), "config": None}, tx.init(tree), tree)
    assert updates["w"].shape == (2,)


@pytest.mark.parametrize("name", ["object", "partial", "frozen dict"])
def test_an_array_below_such_keys_is_found(name):
    thing = {
        "object": Config(),
        "partial": functools.partial(print, KEYS),
        "frozen dict": functools.partial(print, FrozenDict(KEYS)),
    }[name]
    if name == "object":
        thing.rates = KEYS
    with pytest.raises(ta.AdapterError, match="'config'"):
        ta.tree_paths({"w": jnp.ones(2), "config": thing})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Built:
    w: Any

    def __post_init__(self) -> None:
        self.rates = dict.fromkeys(KEYS, 1)


def test_a_dataclass_may_keep_keys_that_jax_cannot_sort():
    params, rest = ta.split({"net": Built(jnp.ones(2))})
    assert [*params] == ["net/w"]
    assert ta.merge(params, rest)["net"].rates == dict.fromkeys(KEYS, 1)
