"""The page of counts says what the tests hold."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import conftest  # noqa: F401  (its profiles are counted)
import pytest
import test_checkpoints
import test_depth
import test_hazards
import test_limits
import test_matcher
import test_multiprocess
import test_rules_files
import test_threads
import transformations
import trees
from hypothesis import settings

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "reliability.md").read_text("utf-8")
ROW = re.compile(r"^\| ([^|]+?) +\| ([\d,]+) +\| `([^`]+)` \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)
TESTS = {
    file.name: ast.parse(file.read_text("utf-8"))
    for file in sorted(HERE.glob("test_*.py"))
}


def functions() -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for tree in TESTS.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node


def properties() -> int:
    """Count the tests that draw examples, state machines included."""
    drawn = [
        node
        for node in functions()
        if any(ast.unparse(one).startswith("given(") for one in node.decorator_list)
    ]
    machines = [
        node
        for node in functions()
        if isinstance(node, ast.ClassDef)
        and "RuleBasedStateMachine" in map(ast.unparse, node.bases)
    ]
    return len(drawn) + len(machines)


def golden_paths() -> int:
    found = tomllib.loads((HERE / "golden_paths.toml").read_text("utf-8"))
    return sum(len(paths) for trees in found.values() for paths in trees.values())


def with_a_test() -> int:
    marked = {name for names in test_hazards.MARKED.values() for name in names}
    return sum(row.id in marked for row in test_hazards.ROWS)


def most_processes() -> int:
    source = (HERE / "test_multiprocess.py").read_text("utf-8")
    return max(map(int, re.findall(r'"(\d+) processes"', source)))


COUNTS: dict[str, Callable[[], int]] = {
    "kinds of trees in one table, which every law runs over": lambda: len(trees.TREES),
    "paths in the golden file": golden_paths,
    "Optax transformations, run on any tree as on its flat dict": lambda: len(
        transformations.CASES
    ),
    "properties, each over random examples": properties,
    "examples of a property": lambda: settings.get_profile("default").max_examples,
    "examples of a property, at length": lambda: (
        settings.get_profile("full").max_examples
    ),
    "known hazards": lambda: len(test_hazards.ROWS),
    "grave ones among them": lambda: sum(
        row.severity == "3" for row in test_hazards.ROWS
    ),
    "hazards with a test that carries their id": with_a_test,
    "hostile patterns": lambda: len(test_matcher.HOSTILE),
    "hostile checkpoints": lambda: len(test_checkpoints.HOSTILE),
    "damaged rules files and freeze specs": lambda: (
        len(test_rules_files.SEEDS) * test_rules_files.MUTATIONS
    ),
    "threads at once": lambda: test_threads.THREADS,
    "mixed operations of each thread": lambda: test_threads.OPERATIONS,
    "processes at once": most_processes,
    "devices of all processes together": lambda: test_multiprocess.NUM_DEVICES,
    "levels of the deepest trees": lambda: max(test_depth.LEVELS),
    "kinds of containers that are nested deep": lambda: len(test_depth.KINDS),
    "leaves of the largest tree": lambda: test_limits.NUM_LEAVES,
    "mismatches of 20,000 leaves, each told in 4 kB": lambda: len(
        test_limits.MISMATCHES
    ),
}


def test_the_page_has_just_these_counts():
    assert [what for what, _, _ in ROWS] == [*COUNTS]


@pytest.mark.parametrize("what", COUNTS)
def test_a_count_on_the_page_is_that_of_the_tests(what):
    stated = {name: count for name, count, _ in ROWS}
    assert stated[what] == f"{COUNTS[what]():,}"


@pytest.mark.parametrize("command", dict.fromkeys(command for *_, command in ROWS))
def test_a_command_on_the_page_selects_a_test(command):
    if command.startswith("make "):
        makefile = (HERE.parent / "Makefile").read_text("utf-8")
        assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.MULTILINE)
        return
    program, target, *rest = command.split()
    assert program == "pytest"
    if target == "tests":
        assert rest in (["-m", "hazard"], ["-m", "hypothesis"])
        return
    tree = TESTS[target.removeprefix("tests/")]
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    word = rest[1] if rest else "test_"
    assert any(name.startswith("test_") and word in name for name in names)
