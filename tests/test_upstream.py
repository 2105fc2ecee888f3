"""The bugs of other libraries that this one works around, each on its own.

``docs/upstream.md`` shows them. A program that prints something else fails here: if the
bug is gone, its section can go, and so can what is in this library because of it.
"""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_pages import REPOSITORY, blocks, run_page

import treeadapt as ta

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

PAGE = "docs/upstream.md"
TEXT = (REPOSITORY / PAGE).read_text("utf-8")
START, *SECTIONS = re.split(r"^(?=## )", TEXT, flags=re.MULTILINE)
SECTIONS = {section.partition("\n")[0][3:]: section for section in SECTIONS}
BUGS = {name: text for name, text in SECTIONS.items() if name != "Fixed"}
TEST = re.compile(r"- Test:\s+`(test_\w+\.py)::(test_\w+)`\n")


@pytest.mark.parametrize("name", SECTIONS)
def test_the_bug_is_still_there(name, monkeypatch):
    section = SECTIONS[name]
    found = re.search(r"^Not in JAX ([\d.]+)\.$", section, re.MULTILINE)
    if found and numbers(version("jax")) <= numbers(found[1]):
        pytest.skip(f"not in JAX {found[1]}")
    # The line numbers of an error are those of the page.
    skipped = TEXT[len(START) : TEXT.index(section)].count("\n")
    still_prints(name, START + "\n" * skipped + section, monkeypatch)


def still_prints(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        run_page(PAGE, text, monkeypatch)
    except pytest.fail.Exception as changed:
        test = TEST.search(text)
        installed = ", ".join(f"{x} {version(x)}" for x in ("optax", "jax", "flax"))
        pytest.fail(
            f"{name!r} prints something else with {installed}. If the bug is gone, "
            f"remove its section, and what {'::'.join(test.groups()) if test else ''} "
            f"holds down.\n{changed}",
            pytrace=False,
        )


def numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")[:3]]


def test_a_bug_that_is_gone_is_reported(monkeypatch):
    section = (
        "```python\nprint(1)\n```\n\n```text\n2\n```\n\n- Test: `test_x.py::test_y`\n"
    )
    with pytest.raises(pytest.fail.Exception, match="bug is gone") as caught:
        still_prints("`x` fails", section, monkeypatch)
    assert "'`x` fails' prints something else with optax" in str(caught.value)
    assert "test_x.py::test_y" in str(caught.value)


@pytest.mark.parametrize("name", BUGS)
def test_each_bug_is_short_and_says_what_treeadapt_does(name):
    (block,) = blocks(BUGS[name])
    assert sum(bool(line.strip()) for line in block.code.splitlines()) <= 10
    assert "treeadapt" in BUGS[name]
    assert "- Effect" in BUGS[name]


def test_dataclasses_of_equal_fields_stay_apart():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Metres:
        w: Any

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Feet:
        w: Any

    length = jnp.ones(2)
    for cls in (Metres, Feet, Metres):
        again = ta.from_flat_dict(cls(length), ta.to_flat_dict(cls(length)))
        assert type(again) is cls
    metres, feet, more = (ta.split(c(length))[1] for c in (Metres, Feet, Metres))
    assert jax.tree.structure(metres) != jax.tree.structure(feet)
    assert jax.tree.structure(metres) == jax.tree.structure(more)
