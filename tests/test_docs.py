"""The pages of the site are complete: every name, every error, every link.

``test_pages`` checks that they run; ``make docs`` builds the site.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import treeadapt as ta
from treeadapt import errors

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
DIRECTIVE = re.compile(r"^\.\. auto\w+:: (\w+)$", flags=re.MULTILINE)


def prose(text: str) -> str:
    return FENCE.sub("", text)


def headings(text: str) -> list[str]:
    return [title.strip("`") for title in HEADING.findall(prose(text))]


def anchor(title: str) -> str:
    """Turn a heading into an anchor as GitHub and MyST do."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def exceptions() -> set[str]:
    public = {name: getattr(ta, name) for name in ta.__all__}
    return {
        name
        for name, value in (vars(errors) | public).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }


def test_every_error_and_warning_has_an_entry_in_the_catalogue():
    entries = {title for title in headings(PAGES["errors.md"]) if " " not in title}
    groups = {"Names", "Classes", "Optimizers", "Warnings"}
    assert entries - groups == exceptions()


def test_every_public_name_is_in_the_reference():
    described = DIRECTIVE.findall(PAGES["api.md"])
    assert len(set(described)) == len(described)
    assert set(described) == set(ta.__all__) - {"__version__"}


def test_every_page_is_in_the_contents():
    contents = {
        f"{entry}.md"
        for tree in TOCTREE.findall(PAGES["index.md"])
        for entry in tree.split("\n")
        if entry and not entry.startswith(":")
    }
    assert contents == set(PAGES) - {"index.md"}


def test_the_navigation_is_short_groups_with_captions():
    for tree in TOCTREE.findall(PAGES["index.md"]):
        options = [line for line in tree.split("\n") if line.startswith(":")]
        entries = [line for line in tree.split("\n") if line not in (*options, "")]
        assert any(line.startswith(":caption: ") for line in options)
        assert 2 <= len(entries) <= 8, entries


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    for target in LINK.findall(prose(PAGES[name])):
        if target.startswith("https://"):
            continue
        file, _, place = target.partition("#")
        page = (DOCS / name).parent / file if file else DOCS / name
        assert page.exists(), target
        if place:
            assert place in map(anchor, headings(page.read_text("utf-8"))), target
