"""What version 0.3.0 pickled loads, and means the same.

The files of ``tests/pickles_0_3`` were written by it, protocol 4, from the objects that
``WHAT_IT_MEANT`` makes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import treeadapt as ta

FILES = Path(__file__).parent / "pickles_0_3"
PARAMS = {
    "enc": {"kernel": np.ones((2, 2), "f4"), "bias": np.ones(2, "f4")},
    "head": np.ones(2, "f4"),
}
SEVERAL = [(ta.leaf(ndim=2), 1), (["enc", "!**/bias"], 3), ("**", 2)]
TABLE = {
    "a.{l}.w : o i": "blocks/w : l i o",
    "b": None,
    "c : v e": ("x : v e", "y : e v"),
    "d : v": ("d : v", {"scale": 2.0}),
}
WHAT_IT_MEANT: dict[str, Callable[[], object]] = {
    "rules": lambda: ta.Rules(
        {"**/bias": "frozen", "enc/{0..3}": "b", "**": "train"}, unused="ignore"
    ),
    "rules_of_selectors": lambda: ta.Rules(SEVERAL, default=None),
    "rules_of_stacks": lambda: ta.Rules(
        {"blocks/0": "a", "**": "b"}, stacks={"blocks": 0}
    ),
    "bound_rules": lambda: ta.Rules({"**/bias": "f", "**": "t"}).bind(PARAMS),
    "glob": lambda: ta.glob("**/kernel"),
    "leaf": lambda: ta.leaf(ndim=2),
    "combined": lambda: ta.glob("enc") & ~ta.leaf(ndim=1) | "head",
    "node": lambda: ta.node(dict),
    "bound_glob": lambda: ta.glob("enc").bind(PARAMS),
    "migration": lambda: ta.Migration(TABLE),
    "chain": lambda: ta.Migration({"a": "b"}).then(ta.Migration({"b": "c"})),
    "inverse": lambda: ta.Migration({"a : x y": "b : y x"}).inverse,
    "freeze_spec": lambda: ta.FreezeSpec(freeze="enc"),
    "bound_freeze_spec": lambda: ta.FreezeSpec(freeze="enc").bind(PARAMS),
}


def test_every_file_is_tried():
    assert {file.stem for file in FILES.glob("*.pickle")} == WHAT_IT_MEANT.keys()


@pytest.mark.parametrize("name", WHAT_IT_MEANT)
def test_what_an_older_version_pickled_loads_and_means_the_same(name):
    old = pickle.loads((FILES / f"{name}.pickle").read_bytes())
    meant = WHAT_IT_MEANT[name]()
    assert old == meant
    assert repr(old) == repr(meant)


@pytest.mark.parametrize("name", ["rules", "bound_rules"])
def test_rules_that_an_older_version_pickled_decide(name):
    old = pickle.loads((FILES / f"{name}.pickle").read_bytes())
    assert old(PARAMS) == WHAT_IT_MEANT[name]()(PARAMS)


def test_a_migration_that_an_older_version_pickled_runs():
    old = pickle.loads((FILES / "migration.pickle").read_bytes())
    source = {
        **{f"a.{layer}.w": np.full((2, 3), layer, "f4") for layer in range(2)},
        "b": np.ones(1, "f4"),
        "c": np.eye(2, dtype="f4"),
        "d": np.ones(2, "f4"),
    }
    assert not ta.tree_diff(old(source), ta.Migration(TABLE)(source), values=True)
