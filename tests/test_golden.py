"""The golden file: paths that must not change, in any version of a library.

``golden_paths.toml`` is plain data, written once and checked by people. Checkpoints,
rules files and optimizer states of users contain such names. A failure here means that
their names would change. A section is a library; its trees are in ``golden_trees.py``.
The section ``table`` is the shared table of trees, which needs all libraries at once.
"""

from __future__ import annotations

import importlib.util
import tomllib
import warnings
from pathlib import Path

import pytest
from golden_trees import LIBRARIES

import treeadapt as ta

GOLDEN = tomllib.loads(Path(__file__).with_name("golden_paths.toml").read_text("utf-8"))
TABLE = "table"


@pytest.fixture(autouse=True)
def _positions_are_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnstablePathWarning)
        yield


def paths_of(trees):
    return {name: list(ta.tree_paths(tree)) for name, tree in trees.items()}


@pytest.mark.parametrize("library", LIBRARIES)
def test_law_3_paths_of_a_library_are_those_of_the_golden_file(library):
    if not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed")
    trees = LIBRARIES[library]()
    assert paths_of(trees) == GOLDEN[library]
    assert {name: list(ta.to_flat_dict(tree)) for name, tree in trees.items()} == (
        GOLDEN[library]
    )


def test_law_3_paths_of_the_shared_table_are_those_of_the_golden_file():
    missing = [name for name in LIBRARIES if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    from trees import TREES

    assert paths_of({row.name: row.make() for row in TREES}) == GOLDEN[TABLE]


def test_the_golden_file_fixes_at_least_300_paths_of_every_library():
    assert list(GOLDEN) == [*LIBRARIES, TABLE]
    sections = [paths for trees in GOLDEN.values() for paths in trees.values()]
    assert sum(map(len, sections)) >= 300
    assert all(len(set(paths)) == len(paths) for paths in sections)
