"""Wrong rows of a table that reads a Llama of PyTorch, each found again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from laws import needs_torch
from test_flax import CASES
from test_llama import OWN, SIZES, answer_of, migration_of

import treeadapt as ta

pytestmark = needs_torch

MISTAKES = {
    "self_attn.{p=q,k,v}_proj": ("(h d)", "(d h)"),
    "self_attn.o_proj": ("(h d)", "(d h)"),
    "mlp.{m}_proj": ("{m}", "{m=up,gate,down}"),
}


def wrong(migration: ta.Migration, count: int) -> ta.Migration:
    rows: list[tuple[Any, Any]] = []
    for source, target in (row.typed() for row in migration.rows):
        mistakes = [*MISTAKES.items()][:count]
        old, new = next((m for key, m in mistakes if key in source), ("", ""))
        if "{m" in new:
            target = target.replace(old, "{m=gate,up,down}")
        rows.append((source.replace(old, new) if old else source, target))
    return ta.Migration(rows)


@pytest.mark.parametrize(("how", "count"), [("function", 3), ("answers", 1)])
def test_wrong_rows_are_found(how: str, count: int) -> None:
    import torch

    tiny, own = CASES["llama-flax"], OWN["Linen"]
    model, target = tiny.torch_model(), own.shapes(SIZES)
    source = {name: x.numpy() for name, x in model.state_dict().items()}

    def reference(arrays: Any) -> np.ndarray:
        state = {name: torch.tensor(array) for name, array in arrays.items()}
        model.load_state_dict(state)
        return tiny.torch_answer(model)

    answers = reference(source)
    report = ta.find_wrong_rows(
        wrong(migration_of("Linen"), count),
        {name: array.copy() for name, array in source.items()},
        target,
        answer_of(own),
        reference if how == "function" else answers,
    )
    assert report.found, report
    assert len(report.changes) == count
