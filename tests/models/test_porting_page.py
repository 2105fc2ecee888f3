"""The page on porting runs with PyTorch, and what its table of advice says holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from test_pages import REPOSITORY, run_page

import treeadapt as ta

torch = pytest.importorskip("torch")
nnx = pytest.importorskip("flax.nnx")
PAGE = "docs/recipes/porting.md"
IMAGE = np.random.default_rng(0).normal(size=(4, 3, 9, 8)).astype("float32")


def source_of(module: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module")
def page() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield run_page(PAGE, (REPOSITORY / PAGE).read_text("utf-8"), patch)


def test_the_six_lines_answer_as_the_module_does(page: Any) -> None:
    with torch.no_grad():
        wanted = page.old(torch.from_numpy(page.tokens)).numpy()
    answers = page.torch_function(page.old, page.tokens)(page.source)
    np.testing.assert_array_equal(answers, wanted)
    doubled = {**page.source, "head.weight": 2 * page.source["head.weight"]}
    np.testing.assert_allclose(
        page.torch_function(page.old, page.tokens)(doubled), 2 * wanted, rtol=1e-5
    )


class OldImages(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 5, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(5)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(5, 11)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.drop(x))


class NewImages(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.stem = nnx.Conv(3, 5, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(5, epsilon=1e-5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(5, 11, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.bn(self.stem(x))).mean((1, 2))
        return self.out(self.drop(x))


def test_dropout_and_batch_statistics_are_as_the_page_says(page: Any) -> None:
    old, new = OldImages().eval(), NewImages(nnx.Rngs(0))
    new.eval()
    graph, target = nnx.split(new)
    image = IMAGE.transpose(0, 2, 3, 1)
    model = jax.jit(lambda params: nnx.merge(graph, params)(image))
    match = ta.match_models(
        source_of(old), target, model, page.torch_function(old, IMAGE)
    )
    assert match.verdict == "proved", match
    params = match.migration(source_of(old), target)
    np.testing.assert_array_equal(params["bn/var"], source_of(old)["norm.running_var"])
    (counter,) = (row for row in match.migration.rows if row.drops)
    assert counter.takes("norm.num_batches_tracked")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(23, 6)
        self.mix = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def test_one_name_of_a_tied_head_is_enough(page: Any) -> None:
    old, tokens = Tied().eval(), np.arange(23)[None]
    source = source_of(old)
    reference: Callable[[Any], Any] = page.torch_function(old, tokens)
    with pytest.raises(ValueError, match="tied"):
        reference(source)
    del source["head.weight"]
    target = {"e": np.zeros((23, 6)), "k": np.zeros((6, 6)), "b": np.zeros(6)}
    model = jax.jit(
        lambda p: jax.numpy.tanh(p["e"][tokens] @ p["k"] + p["b"]) @ p["e"].T
    )
    match = ta.match_models(source, target, model, reference)
    assert match.verdict == "proved", match


def test_a_model_in_16_bits_is_compared_in_float32(page: Any) -> None:
    old, tokens = Tied().to(torch.bfloat16).eval(), np.arange(23)[None]
    old = old.float()
    source = source_of(old)
    del source["head.weight"]
    half = jax.numpy.bfloat16
    target = {"e": np.zeros((23, 6), half), "k": np.zeros((6, 6), half)}
    target["b"] = np.zeros(6, half)
    model = jax.jit(
        lambda p: jax.numpy.tanh(p["e"][tokens] @ p["k"] + p["b"]) @ p["e"].T
    )
    match = ta.match_models(source, target, model, page.torch_function(old, tokens))
    assert match.found, match
    assert any("cast up to float32" in text for text in match.why)


def test_a_module_in_the_place_of_a_function_names_the_function(page: Any) -> None:
    module = torch.nn.Linear(3, 2).eval()
    source, inputs = source_of(module), torch.linspace(-1, 1, 12).reshape(4, 3)
    target = {"k": np.zeros((3, 2)), "b": np.zeros(2)}

    def model(params: Any) -> Any:
        return inputs.numpy() @ params["k"] + params["b"]

    with pytest.raises(TypeError) as caught:  # PyTorch's own
        ta.match_models(source, target, model, module)
    (note,) = caught.value.__notes__
    assert "reference= failed on the leaves of the source: 'bias', 'weight'" in note
    written = note.partition("reference=lambda")[2].removesuffix(".")
    names = {"torch": torch, "module": module, "inputs": inputs}
    cure = eval(f"lambda{written}", names)
    assert ta.match_models(source, target, model, cure).found
