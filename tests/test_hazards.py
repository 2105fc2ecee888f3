"""The page of known hazards and the tests agree.

``docs/hazards.md`` says what treeadapt does about each; a test that proves it is marked
with the id: ``@pytest.mark.hazard("A4")``. These tests compare the two.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "hazards.md").read_text("utf-8")

ID = re.compile(r"[A-L][1-9][0-9]?(?:[a-z]|\.[a-z0-9]+)?")
GROUP = re.compile(r"^## ([A-L])\. (.*?)(?=^## |\Z)", flags=re.DOTALL | re.MULTILINE)
CELLS = re.compile(r"(?<!\\)\|")


class Row(NamedTuple):
    group: str
    id: str
    severity: str
    hazard: str
    answer: str

    @property
    def is_ours(self) -> bool:
        return not self.answer.startswith("Not ours:")


def rows() -> list[Row]:
    """Read the tables below the headings ``## A. ...`` to ``## L. ...``."""
    found = []
    for group, text in GROUP.findall(PAGE):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        for line in lines[2:]:
            cells = [cell.strip() for cell in CELLS.split(line)[1:-1]]
            found.append(Row(group, *cells))
    return found


def marked_ids(source: str) -> list[str]:
    """Collect the ids of every ``pytest.mark.hazard(...)`` in a test file."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.literal_eval(argument)
        for call in calls
        if ast.unparse(call.func) == "pytest.mark.hazard"
        for argument in call.args
    ]


ROWS = rows()


@functools.cache
def marked() -> dict[str, list[str]]:
    """Return the ids of each test file; read late, because to read them all is slow."""
    return {
        file.name: marked_ids(text)
        for file in sorted(HERE.glob("test_*.py"))
        if "mark.hazard(" in (text := file.read_text("utf-8"))
    }


def test_every_row_of_the_page_is_well_formed():
    assert [group for group, _ in GROUP.findall(PAGE)] == list("ABCDEFGHIJKL")
    for row in ROWS:
        assert ID.fullmatch(row.id), row
        assert row.id.startswith(row.group), row
        assert row.severity in ("2", "3"), row
        assert all(row), row
    times = Counter(row.id for row in ROWS)
    assert [name for name in times if times[name] > 1] == []


def test_every_grave_hazard_of_ours_has_a_test():
    tested = {name for names in marked().values() for name in names}
    grave = [row.id for row in ROWS if row.severity == "3" and row.is_ours]
    assert [name for name in grave if name not in tested] == []


def test_every_marker_names_a_row_of_the_page():
    known = {row.id for row in ROWS}
    unknown = {
        file: [name for name in names if name not in known]
        for file, names in marked().items()
    }
    assert {file: names for file, names in unknown.items() if names} == {}


def test_markers_are_read_wherever_they_are():
    source = """
    pytestmark = pytest.mark.hazard("A1")
    @pytest.mark.hazard("A2", "A3")
    @pytest.mark.parametrize("row", [pytest.param(1, marks=pytest.mark.hazard("A4"))])
    def test_something(row): ...
    @pytest.mark.other("A5")
    def test_something_else(): ...
    """
    found = marked_ids("if True:\n" + source)
    assert sorted(found) == ["A1", "A2", "A3", "A4"]
