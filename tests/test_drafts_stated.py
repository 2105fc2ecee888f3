"""Drafts from a published folder use what its ``config.json`` states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import treeadapt as ta

Arrays = dict[str, np.ndarray]
LLAMA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 5,
    "hidden_size": 14,
}


def numbers(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    random = np.random.default_rng(0)
    return {path: random.normal(size=s).astype("float32") for path, s in shapes.items()}


def folder_of(path: Path, leaves: Arrays, config: Any) -> Path:
    """A folder with weights and their configuration."""
    ta.save(path, leaves, max_shard_bytes=10**9)
    (path / "config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    return path


def attention(heads: int, kv: int, size: int, width: int = 14) -> Arrays:
    rows = {"q": heads * size, "k": kv * size, "v": kv * size}
    return numbers(
        {
            f"layers.{n}.self_attn.{name}_proj.weight": (o, width)
            for n in range(3)
            for name, o in rows.items()
        }
    )


def kernels(heads: int, kv: int, size: int, width: int = 14) -> dict[str, Any]:
    return {
        f"blocks/{n}/{name}/kernel": jax.ShapeDtypeStruct((width, h, size), "float32")
        for n in range(3)
        for name, h in {"q": heads, "k": kv, "v": kv}.items()
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "head_dim": LLAMA,
    "text_config.head_dim": {"text_config": LLAMA, "vision_config": {"num_heads": 3}},
    "hidden_size / num_attention_heads": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": None,
        "hidden_size": 20,
    },
    "n_embd / n_head": {"n_head": 4, "n_embd": 20, "n_head_kv": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("key", CONFIGS)
def test_heads_of_another_number_are_refused_after_the_marks_are_gone(key, tmp_path):
    width = 20 if "/" in key else 14
    weights = folder_of(tmp_path / "a", attention(4, 2, 5, width), CONFIGS[key])
    draft = ta.draft_migration(weights, kernels(4, 2, 5, width))
    assert draft.migration.sizes == {"d": 5}
    text = draft.to_toml()
    assert f'#     d = "{key}"' in text
    lines = (line for line in text.splitlines() if not line.startswith("check"))
    table = tmp_path / "table.toml"
    table.write_text("\n".join(lines))
    ta.load(weights, kernels(4, 2, 5, width), migration=table)
    with pytest.raises(ta.MigrationError, match="of another shape"):
        ta.load(weights, kernels(2, 1, 10, width), migration=table)


def test_a_draft_for_other_heads_than_those_of_the_weights_is_marked(tmp_path):
    weights = folder_of(tmp_path / "a", attention(4, 2, 5), LLAMA)
    draft = ta.draft_migration(weights, kernels(10, 5, 2))
    assert all("heads" in row.notes.check for row in draft.migration.rows)
    assert "states 4 heads of 5 (head_dim), and these are 10 of 2" in draft.to_toml()


def heads_last(leaves: Arrays, heads: int) -> Arrays:
    return {
        path: leaf.reshape(heads, -1, leaf.shape[1]).swapaxes(0, 1).reshape(leaf.shape)
        for path, leaf in leaves.items()
    }


def test_a_size_that_no_shape_gives_is_asked_of_the_configuration(tmp_path):
    """The size of heads that are turned within one axis."""

    def folder(name: str, heads: int, size: int) -> tuple[Path, Arrays]:
        leaves = numbers(
            {"h.0.attn.q.w": (heads * size, 7), "h.1.attn.q.w": (heads * size, 7)}
        )
        config = {"num_attention_heads": heads, "head_dim": size}
        return folder_of(tmp_path / name, leaves, config), leaves

    small, _ = folder("small", 4, 5)
    draft = ta.draft_migration(small, convert=lambda leaves: heads_last(leaves, 4))
    assert not draft.doubtful
    table = tmp_path / "table.toml"
    table.write_text(draft.to_toml())
    assert '[config]\nd = "head_dim"' in draft.to_toml()
    assert ta.load_migration(table, config=small) == draft.migration
    large, leaves = folder("large", 3, 11)
    wanted = heads_last(leaves, 3)
    loaded = ta.load(large, wanted, migration=table)
    assert not ta.tree_diff(loaded, wanted, values=True)
    assert draft.check(large, lambda leaves: heads_last(leaves, 3))


@pytest.mark.slow
def test_the_number_of_first_layers_is_asked_of_the_configuration(tmp_path):
    def split(leaves: Arrays, dense: int) -> Arrays:
        stack = np.stack([*leaves.values()])
        return {"dense/w": stack[:dense], "moe/w": stack[dense:]}

    leaves = numbers({f"h.{n}.w": (5, 7) for n in range(5)})
    weights = folder_of(tmp_path / "a", leaves, {"first_k_dense_replace": 2})
    draft = ta.draft_migration(weights, convert=lambda leaves: split(leaves, 2))
    assert not draft.doubtful
    assert 'dense = "first_k_dense_replace"' in draft.to_toml()
    more = numbers({f"h.{n}.w": (5, 7) for n in range(7)})
    larger = folder_of(tmp_path / "b", more, {"first_k_dense_replace": 3})
    assert draft.check(larger, lambda leaves: split(leaves, 3))


EMBEDDING = {"model.embed_tokens.weight": (50, 16), "model.norm.weight": (16,)}


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("stays", [False, True])
def test_a_tied_head_is_filled_with_the_embedding(stays, is_nested, tmp_path):
    leaves = numbers(EMBEDDING)
    stated: dict[str, Any] = {"tie_word_embeddings": True}
    config = {"text_config": stated} if is_nested else stated
    weights = folder_of(tmp_path / "a", leaves, config)
    embed, norm = EMBEDDING if stays else ("embed", "norm/scale")
    target = {embed: np.zeros((50, 16), "f4"), norm: np.zeros(16, "f4")}
    target["lm_head.kernel" if stays else "head/kernel"] = np.zeros((16, 50), "f4")
    abstract = {p: jax.ShapeDtypeStruct(a.shape, a.dtype) for p, a in target.items()}
    draft = ta.draft_migration(weights, abstract)
    assert not draft.missing
    assert "model.embed_tokens.weight" in draft.doubtful
    head = [*target][-1]
    assert f"{head} is the embedding: the configuration has" in draft.to_toml()
    made = draft.migration(leaves, abstract)
    assert np.array_equal(made[head], leaves["model.embed_tokens.weight"].T)
    assert np.array_equal(made[embed], leaves["model.embed_tokens.weight"])


@pytest.mark.parametrize("by_function", [False, True])
def test_a_head_is_a_copy_where_the_configuration_ties_it(by_function, tmp_path):
    leaves = numbers(EMBEDDING)
    weights = folder_of(tmp_path / "a", leaves, {"tie_word_embeddings": True})

    def convert(leaves: Any) -> Any:
        embed, norm = leaves.values()
        return {"embed": embed, "head/kernel": embed.T, "norm/scale": norm}

    target = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for path, array in convert(leaves).items()
    }
    if by_function:
        draft = ta.draft_migration(weights, convert=convert)
    else:
        draft = ta.draft_migration(weights, target)
    assert not draft.missing
    assert "head/kernel is the embedding: the configuration has" in draft.to_toml()
    table = tmp_path / "table.toml"
    table.write_text(draft.to_toml())
    assert ta.load_migration(table) == draft.migration
    lines = (line for line in draft.to_toml().splitlines() if "check" not in line)
    table.write_text("\n".join(lines))
    loaded = ta.load(weights, target, migration=table)
    assert not ta.tree_diff(loaded, convert(leaves), values=True)
    back = draft.migration.inverse(loaded, leaves)
    assert not ta.tree_diff(back, leaves, values=True)
    assert by_function == (not draft.doubtful)
    untied = folder_of(tmp_path / "b", leaves, {"tie_word_embeddings": False})
    with pytest.raises(ta.MigrationError, match="missing 'head/kernel'"):
        ta.load(untied, target, migration=table)
    if by_function:
        assert draft.check(weights, convert)


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False}])
def test_a_head_that_is_not_tied_is_missing(config, tmp_path):
    weights = folder_of(tmp_path / "a", numbers(EMBEDDING), config)
    shapes = {"embed": (50, 16), "norm/scale": (16,), "head/kernel": (16, 50)}
    target = {p: jax.ShapeDtypeStruct(s, "float32") for p, s in shapes.items()}
    assert ta.draft_migration(weights, target).missing == ("head/kernel",)


def test_a_configuration_that_cannot_be_read_is_said_to_be(tmp_path):
    weights = folder_of(tmp_path / "a", attention(4, 2, 5), "{")
    draft = ta.draft_migration(weights, kernels(4, 2, 5))
    assert any(note.startswith("Heads and ties are not known") for note in draft.notes)


COUNTED = {
    "h/{l}/**": ("h/{}/w", {"n_layer": 3}, "n_layer"),
    "model.layers.{l}.*": ("model.layers.{}.w", {"num_hidden_layers": 3}, None),
    "layers.{l}.*": ("layers.{}.w/k", {"text_config": {"num_layers": 3}}, None),
    "m.layers.*.experts.{l}.*": (
        "m.layers.0.experts.{}.w",
        {"num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 3},
        "num_experts",
    ),
}


@pytest.mark.parametrize("text", COUNTED)
def test_layers_are_counted_by_the_configuration(text, tmp_path):
    name, config, key = COUNTED[text]
    shapes: dict[str, tuple[int, ...]] = {name.format(n): (5, 7) for n in range(3)}
    shapes |= {path.replace("layers.0", "layers.1"): s for path, s in shapes.items()}
    leaves = numbers(shapes | {"ln": (7,)})
    weights = folder_of(tmp_path / "a", leaves, config)
    target = {path.replace("w", "kernel"): leaf.T for path, leaf in leaves.items()}
    draft = ta.draft_migration(weights, target)
    assert f'"{text}" = ' in draft.to_toml()
    assert key is None or f'= "{key}"' in draft.to_toml()
    table = tmp_path / "table.toml"
    table.write_text(draft.to_toml())
    assert ta.load_migration(table) == draft.migration
    ta.load(weights, target, migration=table)
    lost = {path: leaf for path, leaf in leaves.items() if ".2." not in path}
    lost = {path: leaf for path, leaf in lost.items() if "/2/" not in path}
    fewer = folder_of(tmp_path / "b", lost, config)
    smaller = {path.replace("w", "kernel"): leaf.T for path, leaf in lost.items()}
    with pytest.raises(ta.MigrationError, match="is 3, and the file has 2"):
        ta.load(fewer, smaller, migration=table)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 3, "vision_config": {"num_hidden_layers": 3}},
        {"num_hidden_layers": 4},
        {"num_attention_heads": 3, "num_experts": 3},
        {},
    ],
)
def test_what_may_be_counted_by_chance_is_not(config, tmp_path):
    leaves = numbers({f"layers.{n}.w": (5, 7) for n in range(3)})
    weights = folder_of(tmp_path / "a", leaves, config)
    target = {path.replace("w", "k"): leaf.T for path, leaf in leaves.items()}
    assert "[counts]" not in ta.draft_migration(weights, target).to_toml()
