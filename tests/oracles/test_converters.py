"""Drafts read whole tables off the field's converters, right at every configuration."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from oracles.converters import CONVERTERS, Arrays, Shapes
from oracles.other_converters import OTHER_CONVERTERS

import treeadapt as ta

ORACLES = CONVERTERS | OTHER_CONVERTERS


def numbers(shapes: Shapes, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {path: random.normal(size=s).astype("float32") for path, s in shapes.items()}


def marks_of(row: Any) -> list[str]:
    return list(filter(None, row.notes.check.split(", ")))


def form_of(row: Any) -> str:
    return re.sub(r"\{[^}]*\}", "{}", row.text.split(" : ")[0])


#: They scale queries by the size of a head, which is two axes where it turns.
SCALED = ("maxtext/llama3.1", "maxtext/llama3.1-scanned", "maxtext/mixtral-scanned")


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_a_table_is_read_off_a_converter(name):
    oracle = ORACLES[name]
    shapes, convert = oracle.make(**oracle.small)
    draft = ta.draft_migration(numbers(shapes, 0), convert=convert)
    marks = {mark for row in draft.migration.rows for mark in marks_of(row)}
    assert marks <= {"sizes", "length", "numbers"}
    rows = draft.migration.rows
    # Rows that have the layers before those of another rest on the same number.
    after = {form_of(row): {*marks_of(row)} for row in rows if "{l+" in row.text}
    for row in rows:
        assert ("length" in marks_of(row)) == bool(row.values.pad)
        is_numbered = "numbers" in after.get(form_of(row), "")
        assert ("numbers" in marks_of(row)) == ("{l+12}" in row.text or is_numbered)
    scales = {row.values.typed().get("scale") for row in draft.migration.rows}
    assert ("(two d)**-0.5" in scales) == (name in SCALED)
    assert all(
        ("sizes" in marks_of(row))
        == (bool({*table.sizes} & row.names) or "sizes" in after.get(form_of(row), ""))
        for table in draft.migration.tables
        for row in table.rows
    )
    assert not (draft.missing)
    assert not (draft.unexpected)
    shapes, convert = oracle.make(**oracle.other)
    source = numbers(shapes, 1)
    result = convert(source)
    made = draft.migration(source, result)
    back = draft.migration.inverse(made, source)
    for ones, twos in ((made, result), (back, source)):
        assert ones.keys() == twos.keys()
        for path, array in twos.items():
            np.testing.assert_allclose(ones[path], array, rtol=2e-6, atol=1e-6)


#: Leaves of which names alone give the wrong partner, or none.
LEFT = {"maxtext/deepseek3-scanned": 7, "maxtext/qwen3.5-scanned": 30}


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_names_alone_pair_the_leaves_of_a_converter(name):
    oracle = ORACLES[name]
    shapes, convert = oracle.make(**oracle.small)
    source = numbers(shapes, 0)
    proved = ta.draft_migration(source, convert=convert)
    sides = (
        {p: jax.ShapeDtypeStruct(np.shape(x), "float32") for p, x in side.items()}
        for side in (source, convert(source))
    )
    draft = ta.draft_migration(*sides)
    assert {*draft.pairs} <= {*draft.doubtful}
    wrong = [p for p, new in proved.pairs.items() if draft.pairs.get(p) != new]
    assert len(wrong) == LEFT.get(name, 0), wrong
