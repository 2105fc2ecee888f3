"""The page on PyTorch's groups runs, and prints what it shows."""

from __future__ import annotations

import pytest
from test_pages import REPOSITORY, run_page

pytest.importorskip("torch")
PAGE = "docs/recipes/pytorch.md"


def test_one_rules_file_groups_both_and_the_step_is_the_same(monkeypatch):
    page = run_page(PAGE, (REPOSITORY / PAGE).read_text("utf-8"), monkeypatch)
    flat, theirs = page.flat, page.theirs
    frozen = {path for path in flat if path.startswith(("blocks/0", "blocks/1"))}
    assert {path for path in flat if (flat[path] == theirs[path]).all()} == frozen
    parameters = dict(page.model.named_parameters())
    still = {name for name, leaf in parameters.items() if not leaf.requires_grad}
    assert {name.replace(".", "/") for name in still} == frozen
