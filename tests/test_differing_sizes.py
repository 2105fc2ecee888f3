"""A checkpoint of a model of another size: the number that differs is said once, first.

Loading what fits is offered where a head or a vocabulary differs, not where a size of
the whole model does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeadapt as ta

ROWS = {
    "embed.weight": "embed",
    "layers.{l}.q.weight : (h d) e": "q : l e h d",
    "layers.{l}.k.weight : (h d) e": "k : l e h d",
    "layers.{l}.up.weight : f e": "up : l e f",
    "norm.weight": "norm",
}
SPLIT = "A checkpoint shows only the product (h d)."


def published(layers: int = 2) -> dict[str, np.ndarray]:
    shapes = {"q": (24, 10), "k": (12, 10), "up": (7, 10)}
    leaves = {
        f"layers.{layer}.{name}.weight": np.ones(shape, "float32")
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    ends = {"embed.weight": (37, 10), "norm.weight": (10,)}
    return leaves | {name: np.ones(x, "float32") for name, x in ends.items()}


def own(
    *, layers: int = 2, heads: int = 4, key_heads: int = 2, d: int = 6, v: int = 37
) -> dict[str, np.ndarray]:
    shapes = {
        "embed": (v, 10),
        "q": (layers, 10, heads, d),
        "k": (layers, 10, key_heads, d),
        "up": (layers, 10, 7),
        "norm": (10,),
    }
    return {name: np.zeros(shape, "float32") for name, shape in shapes.items()}


def error(path: Path, target: Any, migration: Any = None) -> list[str]:
    with pytest.raises(ta.TreeAdaptError, match="does not fit the target") as caught:
        ta.load(path, target, migration=migration)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"layers": 3}, ["The checkpoint has 2 layers, the target has 3."]),
        ({"layers": 1}, ["The checkpoint has 2 layers, the target has 1."]),
        (
            {"heads": 8, "d": 3},
            [
                "d is 6 in the checkpoint, 3 in the target.",
                "h is 4 in the checkpoint, 8 in the target.",
                SPLIT,
            ],
        ),
        ({"heads": 8}, ["h is 4 in the checkpoint, 8 in the target.", SPLIT]),
    ],
)
def test_a_size_of_the_whole_model_comes_first(tmp_path, sizes, said):
    ta.save(tmp_path / "x.safetensors", published())
    table = ta.Migration(ROWS, sizes={"d": 6})
    lines = error(tmp_path / "x.safetensors", own(**sizes), table)
    assert {line[: len(SPLIT)] for line in lines[1 : 1 + len(said)]} == {
        line[: len(SPLIT)] for line in said
    }
    assert "here d = 6" in lines[len(said)] or SPLIT not in said
    assert lines[1 + len(said)].endswith(" fit.")
    assert "strict=False" not in "\n".join(lines)


def test_what_fits_is_offered_where_a_vocabulary_differs(tmp_path):
    ta.save(tmp_path / "x.safetensors", published())
    table = ta.Migration(ROWS, sizes={"d": 6})
    target = own(v=40)
    lines = error(tmp_path / "x.safetensors", target, table)
    assert lines[-1].endswith("or pass strict=False.")
    with pytest.warns(ta.TreeAdaptWarning, match="Not loaded"):
        loaded = ta.load(
            tmp_path / "x.safetensors", target, migration=table, strict=False
        )
    assert loaded["q"].all()


def test_sizes_that_a_table_leaves_open_are_to_be_stated(tmp_path):
    ta.save(tmp_path / "x.safetensors", published())
    target = own(heads=8, d=3)  # by itself, 24 queries are 8 times 3 as well
    lines = error(tmp_path / "x.safetensors", target, ta.Migration(ROWS))
    assert "State those of the checkpoint in [sizes] or sizes=" in "\n".join(lines)
    stated = ta.Migration(ROWS, sizes={"d": 6})
    assert ta.load(tmp_path / "x.safetensors", own(), migration=stated)["k"].all()


@pytest.mark.parametrize(("more", "is_offered"), [(1, False), (-1, True)])
@pytest.mark.parametrize("renames", [False, True])
def test_layers_with_numbers_are_counted(tmp_path, more, is_offered, renames):
    ta.save(tmp_path / "x.safetensors", published())
    table, target = None, published(2 + more)
    if renames:
        table = ta.Migration({"{rest:**}": "new/{rest}"})
        target = {f"new/{path}": leaf for path, leaf in target.items()}
    lines = error(tmp_path / "x.safetensors", target, table)
    assert lines[1] == f"The checkpoint has 2 layers, the target has {2 + more}."
    assert ("strict=False" in lines[-1]) == is_offered


def test_one_number_is_named_without_a_table(tmp_path):
    ta.save(tmp_path / "x.safetensors", own())
    lines = error(tmp_path / "x.safetensors", own(layers=3))
    assert lines[1] == "A size of 2 in the checkpoint is 3 in the target."
    assert "strict=False" not in lines[-1]


def test_axes_in_another_order_are_not_other_sizes(tmp_path):
    ta.save(tmp_path / "x.safetensors", published())
    turned = {**ROWS, "layers.{l}.up.weight : f e": "up : l f e"}
    table = ta.Migration(turned, sizes={"d": 6})
    text = "\n".join(error(tmp_path / "x.safetensors", own(), table))
    assert "With two axes exchanged it fits" in text
    assert "in the checkpoint" not in text


@pytest.mark.parametrize("renames", [False, True])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 2}, " config.json says num_hidden_layers = 2."),
        ({"n_layer": 3}, " config.json says n_layer = 3, so files may be missing."),
        ({"num_hidden_layers": "2"}, ""),
        ({}, ""),
    ],
)
def test_a_configuration_says_whose_count_is_meant(tmp_path, config, said, renames):
    ta.save(tmp_path / "x.safetensors", published())
    (tmp_path / "config.json").write_text(json.dumps(config))
    table, target = None, published(3)
    if renames:
        table, target = ta.Migration(ROWS, sizes={"d": 6}), own(layers=3)
    lines = error(tmp_path / "x.safetensors", target, table)
    assert lines[1] == f"The checkpoint has 2 layers, the target has 3.{said}"
