"""``hf://org/name@revision``, over a file system of our own under that name.

It answers as that of huggingface_hub 0.36 does; nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar

import numpy as np
import pytest
from command import run
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from tiny_qwen3 import CONFIG, SHAPES
from torch_archives import saved

import treeadapt as ta

RANDOM = np.random.default_rng(0)


class HubFile(AbstractBufferedFile):
    """A file that is read by ranges, and by default ahead of what is asked for."""

    def _fetch_range(self, start, end):
        self.fs.asked.append((self.path, start, end))
        return self.fs.content(self.path)[start:end]


class HubFileSystem(AbstractFileSystem):
    """Files of models, by ``org/name`` and revision."""

    protocol = "hf"
    cachable = False
    repos: ClassVar[dict[tuple[str, str], dict[str, bytes]]] = {}
    asked: ClassVar[list[tuple[str, int, int]]] = []

    def _resolved(self, path: str) -> tuple[dict[str, bytes], str, str]:
        """What is in a model, the start of its paths, and the rest of a path."""
        org, name, *rest = self._strip_protocol(path).split("/")
        repo, _, revision = f"{org}/{name}".partition("@")
        files = self.repos.get((repo, revision or "main"))
        if files is None:
            raise FileNotFoundError(f"{path} (repository not found)")
        return files, f"{org}/{name}", "/".join(rest)

    def content(self, path: str) -> bytes:
        files, _, file = self._resolved(path)
        return files[file]

    def info(self, path, **_):
        files, root, file = self._resolved(path)
        if not file:
            return {"name": root, "size": 0, "type": "directory"}
        if file not in files:
            raise FileNotFoundError(path)
        blob = hashlib.sha1(files[file]).hexdigest()
        facts = {"name": f"{root}/{file}", "size": len(files[file]), "type": "file"}
        return facts | {"blob_id": blob, "lfs": None, "last_commit": None}

    def ls(self, path, detail=True, **_):
        files, root, _ = self._resolved(path)
        names = [f"{root}/{file}" for file in files]
        return [self.info(name) for name in names] if detail else names

    def invalidate_cache(self, path=None):
        if path:
            self._resolved(path)  # which fails if there is no such model

    def _open(self, path, mode="rb", block_size=None, **options):
        options = {key: value for key, value in options.items() if key != "autocommit"}
        return HubFile(self, path, mode, size=self.info(path)["size"], **options)


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    monkeypatch.setitem(_registry, "hf", HubFileSystem)
    HubFileSystem.repos.clear()
    HubFileSystem.asked.clear()
    return HubFileSystem


def qwen3() -> dict[str, Any]:
    arrays = {
        f"model.layers.{layer}.{name}.weight": RANDOM.normal(size=shape).astype("f4")
        for layer in range(2)
        for name, shape in SHAPES.items()
    }
    arrays["model.embed_tokens.weight"] = RANDOM.normal(size=(37, 22)).astype("f4")
    arrays["model.norm.weight"] = RANDOM.normal(size=22).astype("f4")
    return arrays


def files_of(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["file", "shards", "bin"])
@pytest.mark.parametrize("revision", ["main", "v2"])
def test_a_model_is_loaded_by_its_name(form, revision, hub, tmp_path):
    arrays, folder = qwen3(), tmp_path / "model"
    folder.mkdir()
    if form == "file":
        ta.save(folder / "model.safetensors", arrays)
    elif form == "bin":
        (folder / "pytorch_model.bin").write_bytes(saved(arrays))
    else:
        folder.rmdir()
        ta.save(folder, arrays, max_shard_bytes=8_000)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hub.repos["Qwen/Tiny", "main"] = {}
    hub.repos["Qwen/Tiny", revision] = files_of(folder)
    name = "hf://Qwen/Tiny" + f"@{revision}" * (revision != "main")
    want = ta.load(folder, migration="tunix")
    assert not ta.tree_diff(ta.load(name, migration="tunix"), want, values=True)
    assert ta.read_metadata(name).keys() == arrays.keys()
    assert ta.compare_checkpoint(name, want, migration="tunix").fits
    assert "embed_tokens" in run("show", name)


def test_no_more_is_read_than_asked_for(hub, tmp_path):
    big = RANDOM.normal(size=(2**10, 2**10)).astype("f4")  # 4 MiB
    ta.save(tmp_path / "model.safetensors", {"a": big, "b": big, "c": np.ones(3)})
    hub.repos["org/name", "main"] = files_of(tmp_path)
    loaded = ta.load("hf://org/name", where="a")
    np.testing.assert_array_equal(loaded["a"], big)
    assert sum(stop - start for _, start, stop in hub.asked) < 1.05 * big.nbytes


def test_a_model_that_changes_while_it_is_read_is_an_error(hub, tmp_path, monkeypatch):
    ta.save(tmp_path / "model.safetensors", {"a": np.ones(3)})
    old = files_of(tmp_path)
    ta.save(tmp_path / "model.safetensors", {"a": np.zeros(3)})
    hub.repos["org/name", "main"] = old
    fetch = HubFile._fetch_range

    def fetch_and_push(self, start, end):
        data = fetch(self, start, end)
        if start:
            hub.repos["org/name", "main"] = files_of(tmp_path)  # of the same size
        return data

    monkeypatch.setattr(HubFile, "_fetch_range", fetch_and_push)
    with pytest.raises(ta.CheckpointError, match="was replaced while it was read"):
        ta.load("hf://org/name")


@pytest.mark.parametrize("name", ["hf://org/none", "hf://org/name@v9"])
def test_a_model_that_is_not_there_is_named(name, hub):
    hub.repos["org/name", "main"] = {}
    with pytest.raises(ta.CheckpointError, match=f"There is no checkpoint '{name}'"):
        ta.load(name)


def test_a_model_without_weights_says_so(hub):
    hub.repos["org/name", "main"] = {"config.json": b"{}"}
    with pytest.raises(
        ta.CheckpointError, match="'hf://org/name' is unusable: there is"
    ):
        ta.load("hf://org/name")


def test_what_is_not_installed_is_named(monkeypatch):
    def missing(*_, **__):
        raise ImportError("Install huggingface_hub to access HfFileSystem")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(ta.CheckpointError, match=r'pip install "treeadapt\[hub\]"; or'):
        ta.load("hf://org/name")


@pytest.mark.parametrize("name", ["google/gemma-2b", "google/gemma-2b@v2"])
def test_a_bare_name_offers_both_ways(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ta.CheckpointError) as caught:
        ta.load(name)
    command = name.replace("@", " --revision ")
    load = f"load 'hf://{name}' (after pip install \"treeadapt[hub]\")"
    told = f"{load}, or run hf download {command}, and load the folder"
    assert told in str(caught.value)
