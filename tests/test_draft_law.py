"""Drafts at other sizes: a table drafted at one size is that of all sizes.

Each case of ``test_migration_tables`` is drafted once, from values, and compared with
its table on arrays of other sizes. The tables of ``docs/examples/migrations`` are in
``test_drafts``.
"""

from __future__ import annotations

import pytest
import test_migration_tables as tables
from resized import resized
from test_drafts import abstract, moves_alike, right_rows

import treeadapt as ta

#: Sizes that a case does not let go: the remainder starts after three blocks.
KEPT = {"blocks_of_six_layers_and_a_remainder": {3}}


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("name", tables.CASES)
def test_each_table_of_the_tests_is_drafted_for_all_sizes(name, is_back):
    case = tables.CASES[name]()
    pair = case.source, case.result
    draft = ta.draft_migration(*pair[:: -1 if is_back else 1])
    if not is_back:
        assert not draft.doubtful
        assert not draft.missing
    sizes = {*draft.migration.sizes.values()}
    table, source = resized(
        tables.migration(case), case.source, sizes | KEPT.get(name, set())
    )
    result = table(source)
    assert abstract(source) != abstract(case.source)
    if is_back:
        source = table.inverse(result, source)
        source = {path: source[path] for path in source if path not in draft.missing}
        ties = {p: a for p, a in result.items() if p not in draft.unexpected}
        moves_alike(draft.migration, ties, source)
    else:
        moves_alike(draft.migration, source, result)


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("name", tables.CASES)
def test_what_names_and_shapes_leave_unmarked_is_right(name, is_back):
    case = tables.CASES[name]()
    table, sides = tables.migration(case), (case.source, case.result)
    if is_back:
        table, sides = table.inverse, sides[::-1]
    draft = ta.draft_migration(*map(abstract, sides))
    _, right = right_rows(draft, table, sides[0])
    assert {*draft.pairs} - {*draft.doubtful} <= right
