"""What is refused, and the words that say why: a row of ``refusals.txt`` each.

A new refusal without a set-up of its own is a row there. What needs one, or compares
more than words, is a test next to what it is about.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

import treeadapt as ta

FILE = Path(__file__).with_name("refusals.txt")


LAW_10 = 4096  # bytes of a message


class Row(NamedTuple):
    module: str
    most_bytes: int
    call: str
    kind: str
    words: list[str]


def rows() -> Iterator[Row]:
    module, most_bytes = "", LAW_10
    for line in FILE.read_text("utf-8").splitlines():
        if line.startswith("["):
            module, _, most = line[1:].partition("]")
            most_bytes = int(most or LAW_10)
        elif line and not line.startswith("#"):
            call, kind, *words = line.split(" || ")
            yield Row(module, most_bytes, call, kind, words)


@pytest.mark.parametrize("row", [*rows()], ids=lambda row: row.call)
def test_law_10_what_is_refused_is_named_in_at_most_4_kb(row):
    names = {name: getattr(ta, name) for name in ta.__all__}
    names |= vars(importlib.import_module(row.module))
    # Adam needs the usual promotion.
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(eval(row.kind, names)) as caught,
    ):
        eval(row.call, names)
    message = " ".join(str(caught.value).split())
    said = [word for word in row.words if not word.startswith("!")]
    assert said
    assert re.search(".*".join(map(re.escape, said)), message), message
    # Numbers of a tree are never in a message.
    unsaid = ["Array(", *(word[1:] for word in row.words if word.startswith("!"))]
    assert not [word for word in unsaid if word in message], message
    assert len(str(caught.value).encode()) <= row.most_bytes
