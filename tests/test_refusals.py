"""What is refused, and the words that say why: a row of ``refusals.txt`` each.

A new refusal without a set-up of its own is a row there. What needs one, or compares
more than words, is a test next to what it is about.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import treeadapt as ta

FILE = Path(__file__).with_name("refusals.txt")


def rows() -> Iterator[tuple[str, ...]]:
    module = ""
    for line in FILE.read_text("utf-8").splitlines():
        if line.startswith("["):
            module = line.strip("[]")
        elif line and not line.startswith("#"):
            yield module, *line.split(" || ")


@pytest.mark.parametrize("row", [*rows()], ids=lambda row: row[1])
def test_law_10_what_is_refused_is_named_in_at_most_4_kb(row):
    module, call, kind, *words = row
    names = {name: getattr(ta, name) for name in ta.__all__}
    names |= vars(importlib.import_module(module))
    with pytest.raises(eval(kind, names)) as caught:
        eval(call, names)
    message = " ".join(str(caught.value).split())
    assert words
    assert re.search(".*".join(map(re.escape, words)), message), message
    assert len(str(caught.value).encode()) <= 4096
