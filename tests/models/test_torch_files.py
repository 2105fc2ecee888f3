"""Files that PyTorch writes are read as PyTorch reads them."""

from __future__ import annotations

import argparse
import collections
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from quantized import FORMS, published

import treeadapt as ta

torch = pytest.importorskip("torch")

FLOAT8 = [name for name in dir(torch) if name.startswith("float8_e")]


def as_numpy(value):
    """A tensor's numbers, through integers of their width where NumPy lacks a name."""
    value = value.detach().resolve_conj()
    names = {torch.bfloat16: torch.int16}
    names |= {getattr(torch, kind): torch.uint8 for kind in FLOAT8}
    if value.dtype not in names:
        return value.numpy()
    array = value.contiguous().view(names[value.dtype]).numpy()
    return array.view(jnp.dtype(str(value.dtype).removeprefix("torch.")))


def flat_of(node, above=""):
    """What PyTorch loads, by joined keys: tensors and numbers alone."""
    if isinstance(node, torch.Tensor):
        return {above[1:]: as_numpy(node)}
    if isinstance(node, torch.Size):
        return {}
    if isinstance(node, dict | list | tuple):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        parts = [flat_of(value, f"{above}/{key}") for key, value in pairs]
        return dict(collections.ChainMap(*reversed(parts)))
    is_number = isinstance(node, bool | int | float) and not isinstance(
        node, np.generic
    )
    return {above[1:]: np.asarray(node)} if is_number else {}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
    )


def states():
    """Trees of every kind that is saved, by name."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    grid = torch.randn(6, 8)
    tied = torch.nn.Linear(4, 4)
    yield "state dict", model.state_dict()
    yield "parameters", dict(model.named_parameters())
    yield (
        "training",
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": torch.optim.lr_scheduler.MultiStepLR(
                optimizer, [2]
            ).state_dict(),
            "args": argparse.Namespace(lr=0.1),
            "device": torch.device("cpu"),
            "dtype": torch.bfloat16,
            "random": torch.get_rng_state(),
            "numpy": [np.float64(3.0), np.arange(3)],
            "epoch": 3,
            "name": "tiny",
            "shape": grid.shape,
        },
    )
    yield (
        "views",
        {
            "t": grid.t(),
            "slice": grid[1:, ::2],
            "rows": grid[2:4],
            "repeated": grid[:1].expand(5, 8),
            "moved": grid.reshape(2, 3, 8).permute(2, 0, 1),
            "number": grid[3, 5],
            "empty": torch.zeros(0, 3),
        },
    )
    yield "tied", {"a": tied.weight, "b": tied.weight, "c": tied.bias}
    kinds = "float64 float16 bfloat16 int8 uint8 int16 uint16 int32 uint32 int64 bool "
    kinds += "complex64 complex128"
    yield (
        "dtypes",
        {kind: torch.arange(6).to(getattr(torch, kind)) for kind in kinds.split()},
    )
    codes = torch.arange(256, dtype=torch.uint8)
    yield (
        "floats of 8 bits",
        {kind: codes.clone().view(getattr(torch, kind)) for kind in FLOAT8},
    )
    yield "a list", [torch.ones(2), {"x": torch.zeros(3)}]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_pytorch_saves_is_read(protocol, tmp_path):
    file = tmp_path / "x.pt"
    for name, state in states():
        torch.save(state, file, pickle_protocol=protocol)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if name != "training" else "ignore")
            read = ta.to_flat_dict(ta.load(file))
        want = flat_of(torch.load(file, weights_only=False))
        assert {*read} == {*want}, name
        for path, array in want.items():
            assert read[path].dtype == array.dtype, (name, path)
            pair = read[path], array
            if array.dtype.itemsize == 1:  # NaN too, bit for bit
                pair = tuple(np.ascontiguousarray(each).view("u1") for each in pair)
            np.testing.assert_array_equal(*pair, strict=True, err_msg=path)


def test_the_ways_out_lead_out(tmp_path):
    """Each file that is refused is read once it is saved again as the error says."""
    model = network()
    old, new = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save(model.state_dict(), old, _use_new_zipfile_serialization=False)
    with pytest.raises(ta.CheckpointError, match=r"torch\.load\(file, map_location"):
        ta.load(old)
    torch.save(torch.load(old, map_location="cpu"), new)
    wanted = ta.load(new)
    torch.save(model, old)
    with pytest.raises(ta.CheckpointError, match=r"'torch\.nn\.modules\.container\.S"):
        ta.load(old)
    torch.save(torch.load(old, weights_only=False).state_dict(), new)
    assert not ta.tree_diff(ta.load(new), wanted, values=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model).save(old)
    with pytest.raises(ta.CheckpointError, match="TorchScript"):
        ta.load(old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(torch.jit.load(old).state_dict(), new)
    assert not ta.tree_diff(ta.load(new), wanted, values=True)
    tensor = torch.ones(2, dtype=torch.complex64).mul(1j).conj()
    torch.save({"a": tensor}, old)
    with pytest.raises(ta.CheckpointError, match="resolve_conj"):
        ta.load(old)
    torch.save({"a": tensor.resolve_conj().resolve_neg()}, new)
    np.testing.assert_array_equal(ta.load(new)["a"], [-1j, -1j])


def test_a_folder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32}
    sizes |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    for name, size in (("whole", "1GB"), ("shards", "8KB")):
        for is_safe in (True, False):
            folder = tmp_path / f"{name}{is_safe}"
            model.save_pretrained(
                folder, safe_serialization=is_safe, max_shard_size=size
            )
        pair = [ta.load(tmp_path / f"{name}{is_safe}") for is_safe in (True, False)]
        assert not ta.tree_diff(*pair, values=True)
        moved = [
            ta.load(tmp_path / f"{name}{is_safe}", migration="tunix")
            for is_safe in (True, False)
        ]
        assert not ta.tree_diff(*moved, values=True)


def test_what_safetensors_packs_is_read(tmp_path):
    """Its F4, and all floats of 8 bits, as PyTorch has them."""
    import safetensors.torch

    codes = torch.arange(256, dtype=torch.uint8)
    packed = codes.clone().reshape(2, 16, 8).view(torch.float4_e2m1fn_x2)
    state = {kind: codes.clone().view(getattr(torch, kind)) for kind in FLOAT8}
    file = tmp_path / "x.safetensors"
    safetensors.torch.save_file({**state, "packed": packed}, file)
    read = ta.load(file)
    assert read["packed"].shape == (2, 16, 16)
    numbers = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1)
    want = numbers.reshape(2, 16, 16).view(jnp.float4_e2m1fn)
    np.testing.assert_array_equal(read["packed"], want, strict=True)
    for kind, tensor in state.items():
        assert read[kind].dtype == as_numpy(tensor).dtype
        assert read[kind].tobytes() == as_numpy(tensor).tobytes()


def as_tensor(array):
    """The tensor of an array, through integers where PyTorch lacks NumPy's dtype."""
    kind = getattr(torch, array.dtype.name)
    if kind not in {torch.bfloat16, *(getattr(torch, name) for name in FLOAT8)}:
        return torch.from_numpy(np.array(array))
    words = array.reshape(-1).view("i2" if array.dtype.itemsize == 2 else "u1").copy()
    return torch.from_numpy(words).view(kind).reshape(array.shape)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_quantised_models_of_pytorch_are_decoded(name, tmp_path):
    """Of all methods: a ``pytorch_model.bin`` is read as safetensors are."""
    form = published(name)
    tensors = {path: as_tensor(part) for path, part in form.parts.items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    if form.config is not None:
        (tmp_path / "config.json").write_text(json.dumps(form.config))
    with np.errstate(all="ignore"):
        loaded = ta.to_flat_dict(ta.load(tmp_path))
    for path, meant in form.meant.items():
        leaf = np.asarray(loaded[path])
        assert (leaf.shape, leaf.dtype) == (meant.shape, meant.dtype)
        assert leaf.tobytes() == np.ascontiguousarray(meant).tobytes()
