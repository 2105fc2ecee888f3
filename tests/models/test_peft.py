"""Adapters of LoRA: one that PEFT trained answers alike here, one trained here in PEFT.

A case is a table ``peft-*.toml`` of ``docs/examples/migrations`` and a model in JAX.
The answers of PyTorch with PEFT are what the answers here are compared with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import needs_torch
from llamas import NnxLlama
from mutations import wrong_tables
from test_flax import CASES, GPT2_SIZES
from test_llama import SIZES
from tiny import MIGRATIONS, TOKENS, Tiny

import treeadapt as ta

sys.path.append(str(MIGRATIONS.parent))
from gpt2_lora import merge_factors, write_adapter
from gpt2_nnx import GPT2

peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytestmark = needs_torch

RANK = 3
Flat = dict[str, Any]


class Case(NamedTuple):
    """A model in JAX that takes adapters.

    Attributes:
        tiny: the model in PyTorch.
        table: that reads the whole model.
        modules: in PyTorch that get factors.
        make: the model in JAX.
        factors: the names and shapes of its factors.
        logits: what a model with these factors answers to tokens.
        merged: the model with the products added to its kernels.
        write: the factors of a model as a folder for PEFT.
    """

    tiny: Tiny
    table: str
    modules: list[str]
    make: Callable[[], Any]
    factors: Callable[[Any], Flat]
    logits: Callable[[Any, Flat], jax.Array]
    merged: Callable[[Any, Flat], Any]
    write: Callable[[Path, Any, Flat], None]


def gpt2() -> GPT2:
    """The model of the example in the size of the tiny GPT-2."""
    return GPT2(**GPT2_SIZES, rank=RANK, rngs=nnx.Rngs(0))


def with_factors(model: GPT2, factors: Flat) -> GPT2:
    return ta.merge(factors, ta.split(model, ["**/lora"])[1])


LLAMA_MODULES = [f"{m}_proj" for m in ("q", "k", "v", "o", "gate", "up", "down")]
#: How the factors of a kernel are multiplied, of all layers at once.
PRODUCTS = {
    **dict.fromkeys(("query", "key", "value"), "ler,lrhd->lehd"),
    "out": "lhdr,lre->lhde",
    **dict.fromkeys(("gate", "up", "down"), "lir,lro->lio"),
}


def llama_factors(model: NnxLlama) -> Flat:
    """Factors next to each kernel; the second ones are zero."""
    params, _ = ta.split(model)
    factors, random = {}, np.random.default_rng(0)
    for name, product in PRODUCTS.items():
        axes, out = product.split("->")
        kernel = params[f"blocks/{name}/kernel"]
        sizes = dict(zip(out, kernel.shape, strict=True)) | {"r": RANK}
        first, second = ([sizes[axis] for axis in each] for each in axes.split(","))
        start = random.normal(size=first, scale=0.3).astype("float32")
        factors[f"blocks/{name}/lora_a"] = start
        factors[f"blocks/{name}/lora_b"] = np.zeros(second, "float32")
    return factors


def merged_llama(model: NnxLlama, factors: Flat) -> NnxLlama:
    params, rest = ta.split(model)
    for name, product in PRODUCTS.items():
        first, second = (factors[f"blocks/{name}/lora_{each}"] for each in "ab")
        params[f"blocks/{name}/kernel"] += jnp.einsum(product, first, second)
    return ta.merge(params, rest)


def write_llama(folder: Path, model: NnxLlama, factors: Flat) -> None:
    table = ta.load_migration(MIGRATIONS / "peft-llama-scanned.toml")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": LLAMA_MODULES,
    }
    folder.mkdir()
    ta.save(folder / "adapter_model.safetensors", table.inverse(factors))
    (folder / "adapter_config.json").write_text(json.dumps(config))


ADAPTERS = {
    "peft-gpt2-nnx": Case(
        CASES["gpt2-flax"],
        "gpt2-nnx",
        ["c_attn", "c_proj", "c_fc"],
        gpt2,
        lambda model: ta.split(model, ["**/lora"])[0],
        lambda model, factors: with_factors(model, factors)(TOKENS),
        lambda model, factors: merge_factors(with_factors(model, factors)),
        lambda folder, model, factors: write_adapter(
            folder, with_factors(model, factors)
        ),
    ),
    "peft-llama-scanned": Case(
        CASES["llama-flax"]._replace(buffers=dict),
        "llama-scanned",
        LLAMA_MODULES,
        lambda: NnxLlama(SIZES, nnx.Rngs(0)),
        llama_factors,
        lambda model, factors: merged_llama(model, factors)(TOKENS),
        merged_llama,
        write_llama,
    ),
}


class Setting(NamedTuple):
    """What the tests of a case share.

    Attributes:
        name: of the table.
        case: of that name.
        base: folder of the model in PyTorch.
        model: the same model in JAX.
        answer: to tokens, of factors; compiled once.
    """

    name: str
    case: Case
    base: Path
    model: Any
    answer: Callable[[Flat], np.ndarray]

    @property
    def table(self) -> Path:
        return MIGRATIONS / f"{self.name}.toml"

    @property
    def factors(self) -> Flat:
        """As the model starts with them: the second ones are zero."""
        return self.case.factors(self.model)

    def peft_model(self, **config: Any) -> Any:
        """PyTorch's model with an adapter that three steps trained."""
        import torch

        config = {"r": RANK, "lora_alpha": 2 * RANK, **config}
        lora = peft.LoraConfig(
            target_modules=self.case.modules,
            fan_in_fan_out="c_attn" in self.case.modules,
            **config,
        )
        torch.manual_seed(2)
        model = peft.get_peft_model(self.case.tiny.read_torch(self.base), lora).eval()
        trained = [each for each in model.parameters() if each.requires_grad]
        adam = torch.optim.Adam(trained, lr=0.1)
        tokens = torch.from_numpy(TOKENS)
        for _ in range(3):
            logits = model(tokens).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            adam.zero_grad()
            loss.backward()
            adam.step()
        return model

    def loaded(self, folder: Path, migration: ta.Migration) -> Flat:
        """The factors that a folder of PEFT holds."""
        file = folder / "adapter_model.safetensors"
        return ta.load(file, self.factors, migration=migration)


@pytest.fixture(scope="module", params=ADAPTERS)
def setting(request, tmp_path_factory):
    case = ADAPTERS[request.param]
    base = tmp_path_factory.mktemp("base")
    case.tiny.save(base)
    table = ta.load_migration(MIGRATIONS / f"{case.table}.toml")
    model = ta.load(base, case.make(), migration=table)
    compiled = jax.jit(case.logits)
    return Setting(
        request.param,
        case,
        base,
        model,
        lambda factors: np.asarray(compiled(model, factors)),
    )


@pytest.fixture(scope="module")
def adapter(setting, tmp_path_factory):
    """The folder of an adapter that PEFT trained, and PyTorch's answer with it."""
    model = setting.peft_model()
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder, setting.case.tiny.torch_answer(model)


def test_an_adapter_that_peft_trained_answers_the_same(setting, adapter):
    folder, expected = adapter
    table = ta.load_migration(setting.table)
    factors = setting.loaded(folder, table)
    assert np.abs(expected - setting.answer(setting.factors)).max() > 0.1
    np.testing.assert_allclose(setting.answer(factors), expected, atol=1e-5, rtol=1e-5)
    file = ta.load(folder / "adapter_model.safetensors")
    assert not ta.tree_diff(table.inverse(factors), file, values=True)


def test_the_schema_lists_what_peft_saves(setting, adapter):
    schema = MIGRATIONS / f"{setting.name.rpartition('-')[0]}.schema.toml"
    saved = ta.read_metadata(adapter[0] / "adapter_model.safetensors")
    assert ta.compare_checkpoint(schema, saved).fits


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": RANK}, 1.0),
        ({"lora_alpha": 5}, 5 / RANK),
        ({"lora_alpha": 5, "use_rslora": True}, 5 / RANK**0.5),
    ],
)
def test_the_scale_of_the_table_is_that_of_the_configuration(
    setting, config, scale, tmp_path
):
    model = setting.peft_model(**config)
    model.save_pretrained(tmp_path / "adapter")
    text = setting.table.read_text()
    assert text.count("scale = 2.0") >= 2
    (tmp_path / "table.toml").write_text(text.replace("scale = 2.0", f"{scale = }"))
    table = ta.load_migration(tmp_path / "table.toml")
    factors = setting.loaded(tmp_path / "adapter", table)
    expected = setting.case.tiny.torch_answer(model)
    np.testing.assert_allclose(setting.answer(factors), expected, atol=2e-5, rtol=1e-5)


def test_an_adapter_trained_here_answers_the_same_in_pytorch(setting, tmp_path):
    case, model, factors = setting.case, setting.model, setting.factors

    def loss(factors: Flat) -> jax.Array:
        logits = case.logits(model, factors)[:, :-1]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:])
        return each.mean()

    gradient, tx = jax.jit(jax.grad(loss)), optax.adam(0.1)
    state = tx.init(factors)
    for _ in range(3):
        updates, state = tx.update(gradient(factors), state, factors)
        factors = optax.apply_updates(factors, updates)
    expected = setting.answer(factors)
    assert np.abs(expected - setting.answer(setting.factors)).max() > 0.1

    case.write(tmp_path / "adapter", model, factors)
    theirs = peft.PeftModel.from_pretrained(
        case.tiny.read_torch(setting.base), tmp_path / "adapter"
    ).eval()
    np.testing.assert_allclose(
        case.tiny.torch_answer(theirs), expected, atol=1e-5, rtol=1e-5
    )
    # The merge of PEFT gives the weights that the merge here gives.
    whole = ta.load_migration(MIGRATIONS / f"{case.table}.toml")
    weights = dict(theirs.merge_and_unload().named_parameters())
    prefix = "transformer." if case.tiny.base else ""
    for name, leaf in whole.inverse(case.merged(model, factors)).items():
        their = weights[f"{prefix}{name}"].detach().numpy()
        np.testing.assert_allclose(leaf, their, atol=1e-5, err_msg=name)


def test_no_mistake_in_the_table_stays_unseen(setting, adapter, tmp_path):
    """Shapes tell of it, or the answer does."""
    folder, expected = adapter
    source = ta.load(folder / "adapter_model.safetensors")
    unseen, seen = [], 0
    for mistake, wrong in wrong_tables(setting.table, tmp_path):
        seen += 1
        try:
            factors = wrong(source, setting.factors)
        except ta.MigrationError:
            continue
        # The copies of one array may change places.
        right = ta.load_migration(setting.table)(source, setting.factors)
        if not ta.tree_diff(factors, right, values=True):
            assert ": paths" in mistake
        elif np.allclose(setting.answer(factors), expected, atol=1e-3):
            unseen.append(mistake)
    assert not unseen
    assert seen > 5
