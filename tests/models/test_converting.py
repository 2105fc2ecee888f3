"""transformers' own conversion to Flax, read off as a table by ``convert=``."""

from __future__ import annotations

import numpy as np
import pytest
from laws import oracle
from test_flax import CASES

import treeadapt as ta


@pytest.mark.parametrize("name", CASES)
def test_transformers_own_conversion_becomes_a_table(name):
    tiny = CASES[name]
    source = tiny.source()
    draft = ta.draft_migration(source, convert=lambda leaves: oracle(tiny, leaves))
    assert not draft.doubtful, draft.to_toml()
    unused = {path for path in source if path not in draft.pairs}
    assert unused <= {*tiny.buffers()} | {
        path for path in source if "position_ids" in path or "inv_freq" in path
    } | {path for path in source if path.endswith(".attn.bias")}
    random = np.random.default_rng(3)
    other = {
        path: random.normal(size=leaf.shape).astype(leaf.dtype)
        for path, leaf in source.items()
        if path not in unused
    }
    made = draft.migration(other)
    assert not ta.tree_diff(made, oracle(tiny, other), values=True)
    assert not ta.tree_diff(draft.migration.inverse(made), other, values=True)
