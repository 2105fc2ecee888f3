"""Llama from PyTorch into models of our own, between them, and back into PyTorch.

``llamas.py`` has the models. They take the laws of ``laws.py``, as Flax's own does.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import Laws, make_setting, needs_torch
from llamas import EquinoxLlama, LinenLlama, NnxLlama, Sizes
from mutations import with_rows, without
from test_flax import CASES, LLAMA
from tiny import TOKENS, table_file, transformers

import treeadapt as ta

SIZES = Sizes(37, 84, LLAMA["num_hidden_layers"], 6, 3, 14, 23)


class Own(NamedTuple):
    """A model of our own.

    Attributes:
        table: that reads the published names into it.
        shapes: makes it without arrays.
        logits: what it answers to tokens.
    """

    table: str
    shapes: Callable[[Sizes], Any]
    logits: Callable[[Any, Sizes], jax.Array]


OWN = {
    "nnx": Own(
        "llama-scanned",
        lambda s: nnx.eval_shape(lambda: NnxLlama(s, nnx.Rngs(0))),
        lambda model, s: model(TOKENS),
    ),
    "Linen": Own(
        "llama-scanned",
        lambda s: jax.eval_shape(LinenLlama(s).init, jax.random.key(0), TOKENS)[
            "params"
        ],
        lambda params, s: LinenLlama(s).apply({"params": params}, TOKENS),
    ),
    "Equinox": Own(
        "llama-equinox",
        lambda s: eqx.filter_eval_shape(EquinoxLlama, s, jax.random.key(0)),
        lambda model, s: jax.vmap(model)(TOKENS),
    ),
}


def answer_of(own: Own, sizes: Sizes = SIZES) -> Callable[[Any], np.ndarray]:
    compiled = jax.jit(lambda model: own.logits(model, sizes))
    return lambda model: np.asarray(compiled(model))


@pytest.fixture(scope="module", params=OWN)
def setting(request, tmp_path_factory):
    own, tiny = OWN[request.param], CASES["llama-flax"]
    folder = tmp_path_factory.mktemp("model")
    file = table_file(own.table)
    return make_setting(tiny, file, folder, own.shapes(SIZES), answer_of(own))


class TestOwn(Laws):
    """The laws, for models of our own."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """PyTorch's model, and Flax's own, for what needs a file only."""
    tiny, folder = CASES["llama-flax"], tmp_path_factory.mktemp("model")
    file = table_file("llama-flax")
    return make_setting(tiny, file, folder, tiny.flax_params(), tiny.flax_answer())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("nnx", {"d": 14}), ("Equinox", {"d": 14, "two": 2, "half": 7})],
)
def test_without_a_target_the_size_of_a_head_is_enough(llama, name, sizes, tmp_path):
    file = table_file(OWN[name].table)
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(tomllib.loads(file.read_text()) | {"sizes": sizes}))
    found = ta.load_migration(edited)(llama.params)
    assert not ta.tree_diff(found, filled(name, llama.params), values=True)


@pytest.mark.parametrize("name", ["nnx", "Linen"])
def test_the_layers_may_be_on_the_second_axis(llama, name, tmp_path):
    own, sizes = OWN[name], dataclasses.replace(SIZES, axis=1)
    text = (table_file(own.table)).read_text()
    file = tmp_path / "second.toml"
    file.write_text(re.sub(r" : l (\w)", r" : \1 l", text))
    m = ta.load_migration(file)
    target = own.shapes(sizes)
    model = ta.from_flat_dict(target, m(llama.params, target))
    np.testing.assert_allclose(
        answer_of(own, sizes)(model), llama.expected, atol=1e-5, rtol=1e-5
    )
    assert not ta.tree_diff(m.inverse(model), llama.params, values=True)


# From one model to another, through the published names


def migration_of(name: str) -> ta.Migration:
    return ta.load_migration(table_file(OWN[name].table))


def filled(name: str, arrays: dict[str, Any]) -> Any:
    """A model of our own with arrays that have published names."""
    target = OWN[name].shapes(SIZES)
    return ta.from_flat_dict(target, migration_of(name)(arrays, target))


@pytest.mark.parametrize("there", OWN)
@pytest.mark.parametrize("here", OWN)
def test_a_model_in_one_library_becomes_that_of_another(llama, here, there):
    back = migration_of(here).inverse(filled(here, llama.params))
    found, expected = filled(there, back), filled(there, llama.params)
    assert not ta.tree_diff(found, expected, values=True)


#: One table of groups for all models of our own, in a list or in a scan.
GROUPS = ta.Rules(
    {
        ("embed", "blocks/{0..1}"): "frozen",
        ta.leaf(ndim=1): "norms",
        "**": "kernels",
    },
    stacks={"blocks": 0},
)
PUBLISHED_GROUPS = {
    ("model.embed_tokens.weight", "model.layers.{0..1}.*"): "frozen",
    ta.leaf(ndim=1): "norms",
    "**": "kernels",
}


def fine_tuning(groups: Any) -> Any:
    schedule = optax.linear_schedule(1e-1, 1e-3, 9)
    by_group = {"norms": optax.sgd(0.1, momentum=0.9), "kernels": optax.adam(schedule)}
    return ta.partition(by_group, groups)


def step(tx: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """With gradients of each number by itself, so that moving and training commute."""
    updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
    return ta.apply_updates(params, updates), state


@pytest.mark.parametrize("there", ["nnx", "Linen"])
def test_layers_of_a_run_that_froze_some_start_fresh_inside_a_scan(llama, there):
    """A list froze two layers: its state moves as it is, not to part of a stack."""
    own, published = fine_tuning(GROUPS), fine_tuning(PUBLISHED_GROUPS)
    listed = filled("Equinox", llama.params)
    params, state = step(own, *step(own, listed, own.init(listed)))
    names = migration_of("Equinox").inverse(params)
    back = migration_of("Equinox").inverse
    moved, report = ta.carry_state(published, names, state, migration=back)
    assert report.fresh == report.warnings == report.left_over == ()
    assert report.unmoved == report.misshaped == report.partly == {}

    scanned = filled(there, names)
    carried, report = ta.carry_state(own, scanned, moved, migration=migration_of(there))
    leaves = ta.to_flat_dict(carried)
    slices = {name for name in leaves if "blocks/{2..4}/" in name}
    assert {*report.fresh} == slices
    assert report.unmoved
    assert all(not leaves[name].any() for name in slices)
    rest = leaves.keys() - slices
    assert len(rest) > 4
    assert all(np.any(leaves[name]) for name in rest)
    trace = "inner_states/norms/0/trace/"
    before = ta.to_flat_dict(moved)[trace + "model.norm.weight"]
    np.testing.assert_array_equal(leaves[trace + "norm/scale"], before)
    (warning,) = report.warnings
    assert "Give these leaves a group of their own" in warning

    stepped, _ = step(own, scanned, carried)
    start, end = (migration_of(there).inverse(m) for m in (scanned, stepped))
    frozen = {name for name in start if np.array_equal(start[name], end[name])}
    assert frozen == {
        name
        for name in start
        if name.startswith(("model.embed", "model.layers.0.", "model.layers.1."))
    }


RATE, MOMENTUM = 0.5, 0.9


@pytest.fixture(scope="module")
def trained(llama):
    """The losses of three steps in PyTorch, and the parameters after them."""
    import torch

    model, losses = llama.tiny.read_torch(llama.folder), []
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    tokens = torch.from_numpy(TOKENS)
    for _ in range(3):
        logits = model(tokens).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    arrays = {name: each.detach().numpy() for name, each in model.named_parameters()}
    return losses, arrays


@needs_torch
@pytest.mark.parametrize("name", OWN)
def test_steps_of_training_are_equal(llama, trained, name):
    def loss(model: Any) -> jax.Array:
        logits = OWN[name].logits(model, SIZES)[:, :-1]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:])
        return each.mean()

    losses, expected = trained
    gradient, tx = jax.jit(jax.value_and_grad(loss)), optax.sgd(RATE, MOMENTUM)
    model = filled(name, llama.params)
    state = tx.init(model)
    for number in losses:
        value, grads = gradient(model)
        np.testing.assert_allclose(value, number, rtol=1e-5)
        updates, state = tx.update(grads, state, model)
        model = optax.apply_updates(model, updates)
    found = migration_of(name).inverse(model)
    assert found.keys() == expected.keys()
    for path, after in expected.items():
        assert np.abs(after - llama.params[path]).max() > 1e-3
        np.testing.assert_allclose(found[path], after, atol=1e-5, err_msg=path)


# A head that is the embedding


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A folder as Llama 3.2 1B has it, and what PyTorch answers."""
    tiny = CASES["llama-flax"]._replace(
        config=lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
        buffers=dict,
    )
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder)
    assert "lm_head.weight" not in ta.read_metadata(folder)
    return tiny, folder, tiny.torch_answer(tiny.read_torch(folder))


def assert_pytorch_answers(tied: Any, arrays: dict[str, Any], place: Any) -> None:
    tiny, folder, expected = tied
    assert not ta.tree_diff(arrays, ta.load(folder), values=True)
    ta.save(place, arrays, max_shard_bytes=8_000)
    assert np.array_equal(tiny.torch_answer(tiny.read_torch(place)), expected)


@needs_torch
@pytest.mark.parametrize("name", OWN)
def test_a_tied_head_needs_no_row(tied, name, tmp_path):
    own, sizes = OWN[name], dataclasses.replace(SIZES, tied=True)
    file = table_file(own.table)
    with pytest.raises(ta.MigrationError, match=r"no leaf is taken by\n  'lm_head\.w"):
        ta.load(tied[1], own.shapes(sizes), migration=ta.load_migration(file))
    m = without(file, "lm_head.weight", tmp_path)
    model = ta.load(tied[1], own.shapes(sizes), migration=m)
    np.testing.assert_allclose(answer_of(own, sizes)(model), tied[2], atol=1e-5)
    assert_pytorch_answers(tied, m.inverse(model), tmp_path / "back")


@needs_torch
@pytest.mark.parametrize("name", ["nnx", "Linen"])
def test_a_tied_head_is_copied_into_a_head_of_its_own(tied, name, tmp_path):
    own = OWN[name]
    file = table_file(own.table)
    first, *rows, head, dropped = tomllib.loads(file.read_text())["rows"]
    assert head["from"] == "lm_head.weight : v e"
    both = {
        "from": f"{first['from']} : v e",
        "to": [f"{first['to']} : v e", head["to"]],
    }
    comment = file.read_text().partition("version = 1")[0]
    assert all(json.dumps(address) in comment for address in (both["from"], both["to"]))
    m = with_rows(file, [both, *rows, dropped], tmp_path)
    model = ta.load(tied[1], own.shapes(SIZES), migration=m)
    np.testing.assert_allclose(answer_of(own)(model), tied[2], atol=1e-5)
    assert_pytorch_answers(tied, m.inverse(model), tmp_path / "back")
