"""The pages of the site are complete: every name, every error, every link.

``test_pages`` checks that they run; ``make docs`` builds the site.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import os
import re
import typing
from pathlib import Path

import equinox
import jax
import optax
import pytest
from flax import linen, nnx

import treeadapt as ta

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    str(file.relative_to(DOCS)): file.read_text("utf-8")
    for file in sorted(DOCS.rglob("*.md"))
    if "_build" not in file.parts
}

FENCE = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:data):: (\w+)$", flags=re.MULTILINE)


def prose(text: str) -> str:
    return FENCE.sub("", text)


def headings(text: str) -> list[str]:
    return [title.strip("`") for title in HEADING.findall(prose(text))]


def anchor(title: str) -> str:
    """Turn a heading into an anchor as GitHub and MyST do."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def exceptions() -> set[str]:
    names, pending = set(), [ta.TreeAdaptError, ta.TreeAdaptWarning]
    while pending:
        cls = pending.pop()
        if cls.__module__.startswith("treeadapt."):  # not a class of some test
            names.add(cls.__name__)
        pending += cls.__subclasses__()
    return names


def test_every_error_and_warning_has_an_entry_in_the_catalogue():
    catalogue = headings(PAGES["errors.md"]) + headings(PAGES["warnings.md"])
    entries = {title for title in catalogue if " " not in title}
    groups = {"Errors", "Names", "Classes", "Optimizers", "Warnings"}
    assert entries - groups == exceptions()


def test_every_public_name_is_in_the_reference():
    pages = (text for name, text in PAGES.items() if name.startswith("api/"))
    described = [name for text in pages for name in DIRECTIVE.findall(text)]
    assert len(set(described)) == len(described)
    assert set(described) == set(ta.__all__) - {"__version__"}


def contents() -> list[tuple[str, list[str], list[str]]]:
    """The page, options and entries of each list of pages."""
    trees = [
        (name, tree.splitlines())
        for name, text in PAGES.items()
        for tree in TOCTREE.findall(text)
    ]
    return [
        (
            name,
            [line for line in lines if line.startswith(":")],
            [line for line in lines if line and not line.startswith(":")],
        )
        for name, lines in trees
    ]


def test_every_page_is_once_in_the_contents():
    listed = [
        os.path.normpath(Path(name).parent / f"{entry}.md")
        for name, _, entries in contents()
        for entry in entries
    ]
    assert sorted(listed) == sorted(set(PAGES) - {"index.md"})


def test_the_navigation_is_short_groups_with_captions():
    for name, options, entries in contents():
        if name == "index.md":
            assert any(line.startswith(":caption: ") for line in options)
        assert 2 <= len(entries) <= 8, entries


def test_every_law_of_the_design_has_a_test_of_its_number():
    section = PAGES["design.md"].partition("## Laws")[2]
    laws = re.findall(r"^(\d+)\. ", section, flags=re.MULTILINE)
    names = "".join(
        path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py")
    )
    assert laws == [str(number) for number in range(1, 16)]
    assert not [law for law in laws if f"def test_law_{law}_" not in names]


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_what_it_is_and_ends(name):
    fences = re.findall(r"^```.*$", PAGES[name], flags=re.MULTILINE)
    assert all(fence != "```" for fence in fences[::2])
    assert all(fence == "```" for fence in fences[1::2])
    assert len(fences) % 2 == 0


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    for target in LINK.findall(prose(PAGES[name])):
        if target.startswith("https://"):
            continue
        file, _, place = target.partition("#")
        page = (DOCS / name).parent / file if file else DOCS / name
        assert page.exists(), target
        if place:
            text = page.read_text("utf-8")
            described = (f"treeadapt.{name}" for name in DIRECTIVE.findall(text))
            assert place in {*map(anchor, headings(text)), *described}, target


@pytest.mark.slow
def test_docstrings_name_what_is_there():
    """``See `x``` names a module, or what is defined in one."""
    package = DOCS.parent / "treeadapt"
    trees = {path: ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")}
    defined: set[str] = set()
    for path, tree in trees.items():
        defined |= {*path.parts, path.stem}
        nodes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for node in itertools.chain.from_iterable(node.body for node in nodes):
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            names = (getattr(one, "name", getattr(one, "id", "")) for one in targets)
            defined.update(names)
    gone = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                for sentence in re.findall(r"\b[Ss]ee (``.*?)(?:[.;)](?: |$)|$)", text):
                    names = re.findall(r"``([\w.]+)``", sentence)
                    gone += [(path.name, n) for n in names if {*n.split(".")} - defined]
    assert gone == []


def test_help_names_classes_that_a_user_can_find():
    known = [ta, builtins, typing, jax, jax.sharding, optax, nnx, linen, equinox]
    missing = []
    for name in ta.__all__:
        text = inspect.getdoc(getattr(ta, name)) or ""
        for cls in re.findall(r"``([A-Z][A-Za-z]*[a-z][A-Za-z]*)\b", text):
            if not any(hasattr(module, cls) for module in known):
                missing.append((name, cls))
    assert missing == []
