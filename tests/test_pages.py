"""Every page of the documentation runs, and prints the output that it shows.

The ``python`` blocks of a page run in order, in one namespace, as a reader would run
them. The ``text`` block right below a block is its output, where ``...`` matches
anything; a block without one prints nothing. Output
of libraries during a block that only imports is ignored.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import doctest
import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

# A reader runs a page in JAX's default configuration.
pytestmark = pytest.mark.usefixtures("standard_promotion")

REPOSITORY = Path(__file__).parent.parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

FENCE = r"^```{}\n(?P<{}>.*?)^```\n"
BLOCK = re.compile(
    FENCE.format("python", "code") + r"(?:\n*" + FENCE.format("text", "out") + ")?",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """One example: its code, what it prints, and the line where it starts."""

    code: str
    prints: str
    line: int


def blocks(text: str) -> list[Block]:
    found = (
        Block(
            match["code"],
            match["out"] or "",
            text.count("\n", 0, match.start("code")),
        )
        for match in BLOCK.finditer(text)
    )
    return list(found)


PAGES = {
    str(file.relative_to(REPOSITORY)): file
    for file in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    # ``test_upstream`` and ``loops/test_loops`` run these, one section at a time,
    # ``models/test_*_page`` what needs PyTorch, ``loops/test_keras`` Keras.
    if file.name not in ("upstream.md", "pytorch.md", "porting.md", "keras.md")
    and file.parent.name != "loops"
    and blocks(file.read_text("utf-8"))
}


# What a newcomer reads first; the others take long.
FIRST = (
    "README.md",
    "docs/index.md",
    "docs/quickstart.md",
    "docs/libraries/loops.md",
)


@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST else pytest.param(name, marks=pytest.mark.slow)
        for name in PAGES
    ],
)
def test_page_runs_and_prints_what_it_says(name, monkeypatch):
    run_page(name, PAGES[name].read_text("utf-8"), monkeypatch)


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "Expected:\n    2\nGot:\n"),
        ("```python\nprint(1)\n```\nProse.\n", "Expected nothing\nGot:\n    1"),
        ("```python\nx = 1\n```\n\n```text\n1\n```\n", "Got nothing"),
    ],
    ids=["other output", "output that is not shown", "output that never comes"],
)
def test_a_wrong_page_fails(page, complaint, monkeypatch):
    with pytest.raises(pytest.fail.Exception, match=re.escape(complaint)):
        run_page("wrong.md", page, monkeypatch)


def test_blocks_share_names_and_errors_name_the_line(monkeypatch):
    page = "Text.\n\n```python\nx = 0\n```\n\n```python\n\n1 / x\n```\n"
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("page.md", page, monkeypatch)
    assert str(caught.traceback[-1].path) == "page.md"
    assert caught.traceback[-1].lineno + 1 == 9


def test_only_output_right_below_belongs_to_a_block():
    page = "```python\nx = 1\n```\n\nProse.\n\n```text\nA figure.\n```\n"
    assert blocks(page) == [Block("x = 1\n", "", 1)]


def run_page(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the blocks of a page, and return the module that they defined."""
    # Classes look up the module that they were defined in.
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for block in blocks(text):
        printed = io.StringIO()
        # The line numbers of a traceback are those of the page.
        source = "\n" * block.line + block.code
        code = compile(source, name, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, vars(module))
        if block.prints or not only_imports(block.code):
            check(name, block, printed.getvalue())
    return module


def only_imports(code: str) -> bool:
    return all(
        isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(code).body
    )


def check(name: str, block: Block, printed: str) -> None:
    checker = doctest.OutputChecker()
    if not checker.check_output(block.prints, printed, OPTIONS):
        example = doctest.Example(block.code, block.prints)
        difference = checker.output_difference(example, printed, OPTIONS)
        pytest.fail(f"{name}, line {block.line + 1}:\n{difference}", pytrace=False)
